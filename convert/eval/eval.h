/* Perplexity, and KL divergence to another model, over a text: this is what eval prints and report
 * shows. Of encoders, which predict nothing, it is the distance of hidden states to another
 * model's.
 *
 * A text becomes windows of tokens (token_text.h). A batch of windows becomes the hidden states
 * of both models; the weights are read once for each batch. A chunk of hidden states becomes
 * logits, and each row of logits becomes a few numbers (eval_stats.h) before the next chunk takes
 * its place. So memory does not depend on the text, except for its ids and one float for each
 * predicted token. */
#ifndef QC_CONVERT_EVAL_H
#define QC_CONVERT_EVAL_H

#include "base/strbuf.h"
#include "convert/forward/forward.h"
#include "convert/term/call.h"

/* What eval is asked for, and what report runs of it. */
typedef struct {
    const char *text;    /* FILE; NULL: not given (report) */
    uint64_t context;    /* tokens of a window; 0: qconv chooses */
    uint64_t max_tokens; /* 0: all of the text */
    double max_kl;       /* 0: not given */
    double max_distance; /* the same, for encoders; 0: not given */
} qc_eval_options;

/* Each predicted token counts once; these are all tokens of a window except its first. Negative log
 * likelihoods are in nats. KL is D(P || Q) over the whole vocabulary, where P is the original's
 * distribution and Q the output's. A number that so few tokens cannot give (the standard error of a
 * single one) is NaN. */
typedef struct {
    const char *path, *against, *text;  /* as given; against is NULL if nothing is compared */
    const char *model_type, *tokenizer; /* "ids" where the text was ids */
    const char *device;                 /* "cpu" */
    /* tokens read, without those that are put in front of windows */
    uint64_t tokens;
    uint64_t windows, context, predicted;
    double perplexity, perplexity_error; /* the standard error treats tokens as independent draws */
    int compared;                        /* --against was given; otherwise everything below is 0 */
    double base_perplexity, base_perplexity_error;
    double difference, difference_error; /* perplexity - base_perplexity, from paired tokens */
    double log_ratio, log_ratio_error;   /* mean of ln(perplexity / base_perplexity) */
    double kl_mean, kl_error, kl_median, kl_99, kl_max;
    /* share of tokens where both models have the same most probable token */
    double top1, top1_error;
    /* The root mean square of the difference in the probability of the right token. */
    double probability_rms;
    /* Of an encoder, whose `predicted` is 0 and whose numbers from perplexity on mean nothing; of
     * other models everything from here to seconds is 0. The distance of a window's hidden states H
     * to the original's is |H - original| / |original|. Its embedding is their mean, and the
     * distance of embeddings is one minus the cosine. */
    int encoder;
    double distance_mean, distance_99, distance_max;
    double cosine_mean, cosine_99, cosine_max;
    double seconds;
} qc_eval_result;

/* Runs what o->eval and o->call.against ask for, on o->call.model. It prints nothing but progress
 * and warnings. The strings of *out live in o->call.arena. QC_ERR_INPUT for a text that predicts
 * nothing, for ids outside the vocabulary, and for models that cannot be compared. QC_ERR_USAGE for
 * an encoder alone, and for a limit that the kind of model does not have. QC_ERR_NONFINITE for
 * logits that are not numbers. Other errors are those of convert/forward/forward.h. The numbers do
 * not depend on threads, instruction set or batches. */
QC_NODISCARD qc_status qc_eval_run(qc_eval_result *out, const qc_call *call,
                                   const qc_eval_options *o, qc_error *err);
/* Writes the JSON of `eval --json`; docs/eval.md lists its members. */
QC_NODISCARD qc_status qc_eval_json(const qc_eval_result *r, qc_strbuf *out, qc_error *err);
/* Writes a table for a terminal. */
QC_NODISCARD qc_status qc_eval_text(const qc_eval_result *r, qc_strbuf *out, qc_error *err);

#endif
