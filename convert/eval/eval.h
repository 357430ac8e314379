/* Perplexity, and KL divergence to another model, over a text: what eval prints and report shows.
 *
 * A text becomes windows of tokens (eval_windows.h), a batch of windows the hidden states of both
 * models, weights read once a batch; a chunk of hidden states becomes logits, and each row of
 * logits a few numbers (eval_stats.h) before the next chunk takes its place. So memory does not
 * depend on the text but for its ids and one float a predicted token. */
#ifndef QC_CONVERT_EVAL_H
#define QC_CONVERT_EVAL_H

#include "base/strbuf.h"
#include "convert/llama/llama.h"
#include "convert/term/call.h"

/* What eval is asked for, and what report runs of it. */
typedef struct {
    const char *text;    /* FILE; NULL: not given (report) */
    uint64_t context;    /* tokens of a window; 0: chosen */
    uint64_t max_tokens; /* 0: all of the text */
    double max_kl;       /* 0: not given */
} qc_eval_options;

/* Each predicted token counts once: the tokens of a window but its first. Negative log likelihoods
 * in nats. KL is D(P || Q) with P the original's distribution, Q the output's, over the whole
 * vocabulary. What cannot be said of so few tokens (the standard error of one) is NaN. */
typedef struct {
    const char *path, *against, *text;  /* as given; against NULL: not compared */
    const char *model_type, *tokenizer; /* "ids" where the text was ids */
    const char *device;                 /* "cpu", "cuda:0 (NVIDIA H200)" */
    uint64_t tokens;                    /* read, without those put in front of windows */
    uint64_t windows, context, predicted;
    double perplexity, perplexity_error; /* standard error, of tokens as independent draws */
    int compared;                        /* with --against; else all below is 0 */
    double base_perplexity, base_perplexity_error;
    double difference, difference_error; /* perplexity - base_perplexity, of paired tokens */
    double log_ratio, log_ratio_error;   /* mean of ln(perplexity / base_perplexity) */
    double kl_mean, kl_error, kl_median, kl_99, kl_max;
    double top1, top1_error; /* share of tokens where both say the same first */
    double probability_rms;  /* root mean square of the difference in the probability of the right
                                token */
    double seconds;
} qc_eval_result;

/* Runs what o->eval and o->call.against ask, on o->call.model. Prints nothing but progress and
 * warnings. Strings of *out live in o->call.arena. QC_ERR_INPUT for texts that predict nothing, ids
 * out of the vocabulary, vocabularies that differ; QC_ERR_NONFINITE for logits that are no numbers;
 * else as convert/llama/llama.h has it. The numbers do not depend on threads, instruction set or
 * batches.
 */
QC_NODISCARD qc_status qc_eval_run(qc_eval_result *out, const qc_call *call,
                                   const qc_eval_options *o, qc_error *err);
/* The JSON of `eval --json`, and reading it again (QC_ERR_INPUT). docs/eval.md has its members. */
QC_NODISCARD qc_status qc_eval_json(const qc_eval_result *r, qc_strbuf *out, qc_error *err);
QC_NODISCARD qc_status qc_eval_read(qc_eval_result *out, qc_arena *arena, const char *path,
                                    qc_error *err);
/* A table for a terminal. */
QC_NODISCARD qc_status qc_eval_text(const qc_eval_result *r, qc_strbuf *out, qc_error *err);

#endif
