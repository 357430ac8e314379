/* What `qconv plan` says, in three forms: text with a bar per device, one JSON object, one HTML
 * page. Nothing is computed here that a reader could not add up from the numbers given.
 * Thread-safe: each call works on what it is given. */
#ifndef QC_CONVERT_FIT_REPORT_H
#define QC_CONVERT_FIT_REPORT_H

#include "convert/fit/auto_choice.h"
#include "convert/fit/fit.h"

/* What a predicted error is, and what it came to where perplexity was measured: NF4 with searched
 * scales on kjv-llama and TinyStories-656K (docs/accuracy.md; tests/cli/test_auto.py compares the
 * figures with bench/results/accuracy.json). */
#define QC_ERROR_UNIT                                                                              \
    "It has no unit: the sum over weights of relative squared error times importance."
#define QC_ERROR_SEEN                                                                              \
    "Measured on two small models, nf4 raises perplexity by 0.51% and 5.9% (docs/accuracy.md)."

/* What became what: weights together with their scales and state. */
typedef struct {
    const char *name; /* "nf4", "nf4-32" (blocks of 32), "int8", "keep", ... */
    uint64_t tensors; /* of the source */
    uint64_t weights; /* parameters of the model among them: no scales, no buffers */
    uint64_t bytes;   /* as they will lie in memory */
} qc_fit_scheme;

/* A change that was planned anew and fits. */
typedef struct {
    const char *change;   /* "--context 4096", "3 cards" */
    const char *sentence; /* "with --context 4096: 1.2 GB are left" */
} qc_suggestion;

/* One way to use the devices, for comparing what --to auto made of them with others. */
typedef struct {
    const char *change; /* "--to nf4"; of the plan itself "this plan" */
    uint64_t max_context;
    double predicted;     /* error; NaN: not known */
    const char *own_form; /* "nf4+int8": a form that only qconv reads; NULL: bitsandbytes' */
} qc_fit_choice;

/* "qconv only", or "transformers too". */
const char *qc_fit_read_by(const qc_fit_choice *c);
#define QC_AUTO_TRADES                                                                             \
    "auto gives what is free beyond --context to precision; the same devices could hold"

/* The longest context at batch 1 where a prompt is read in one way. */
typedef struct {
    uint64_t tokens; /* read at once; 0: the whole prompt */
    uint64_t max_context;
} qc_fit_prefill;

/* The step that is shown beside whole prompts. */
#define QC_USUAL_PREFILL 2048u

typedef struct {
    const qc_fit *fit;
    const qc_fit_options *use; /* context and the like, defaults filled in */
    qc_arena *arena;           /* for working memory; borrowed */
    const char *model;         /* as given */
    const char *model_type;    /* "": none */
    const char *to;            /* "nf4", ... */
    int has_weights;           /* 0: worked out from the configuration alone */
    uint64_t parameters;
    uint64_t file_bytes; /* uncompressed shards with their headers */
    const qc_fit_scheme *schemes;
    uint32_t scheme_count;
    int generates;                   /* there is a KV cache: the two searches mean something */
    uint64_t max_context, max_batch; /* 0: none fits */
    qc_fit_prefill whole, steps;     /* the longest context by how a prompt is read; one of the two
                                        is what was asked for */
    const qc_suggestion *suggestions;
    uint32_t suggestion_count;
    const qc_fit_choice *choices; /* --to auto: the plan and others, see qc_fit_compare */
    uint32_t choice_count;
    const qc_auto_result *chosen;     /* --to auto; NULL: another */
    const struct qc_loaders *loaders; /* who reads what convert would write (loaders.h), or NULL */
    int explain;                      /* JSON: the groups of `chosen` too */
} qc_fit_report;

/* Logical parameters of a tensor that is written: 0 for scales, state and buffers, two a byte of
 * packed 4-bit codes. */
uint64_t qc_fit_parameters_of(const qc_plan *plan, const qc_job *job);
/* Sums over the jobs of a plan (before or after its layout). */
QC_NODISCARD qc_status qc_fit_sum_schemes(qc_fit_report *r, const qc_plan *plan, qc_error *err);

typedef enum { QC_BARS_ASCII, QC_BARS_BLOCKS } qc_bar_style;
/* Blocks only where standard output is a terminal and the locale says UTF-8. */
qc_bar_style qc_bar_style_of_console(void);

#define QC_BAR_CELLS 48u
/* One device as a bar of at most QC_BAR_CELLS cells, `cells` of which are its budget; parts are
 * rounded so that their sum is. Appended to out. */
void qc_fit_bar(const qc_fit_device *d, unsigned cells, qc_bar_style style, qc_strbuf *out);

/* Sentences that explain the budgets: "36.0 GB is 90% of 40.0 GB (--margin)", and how the cards
 * that are sold with that size differ. Each on a line that begins with `begin` and ends with `end`.
 */
void qc_fit_budget_notes(const qc_fit_report *r, const char *begin, const char *end,
                         qc_strbuf *out);

/* Where a prompt is read whole, or in steps of some tokens; and whether the form of latent
 * attention means anything to this model. */
void qc_fit_prefill_text(const qc_fit_prefill *p, qc_strbuf *out);
int qc_fit_has_mla(const qc_geometry *g);
/* "the latent is cached, ...: transformers 5.23"; a sentence without a full stop. */
void qc_fit_mla_text(const qc_fit_options *use, qc_strbuf *out);

/* "short by 3.21 GB on cuda:1; would fit with --to nf4, or with 3 cards"; "" when it fits. */
void qc_fit_verdict(const qc_fit_report *r, qc_strbuf *out);
QC_NODISCARD qc_status qc_fit_report_text(const qc_fit_report *r, qc_bar_style style,
                                          qc_strbuf *out, qc_error *err);
/* One JSON object and a new line; docs/cli.md has its members. */
QC_NODISCARD qc_status qc_fit_report_json(const qc_fit_report *r, qc_strbuf *out, qc_error *err);
/* One page without scripts or anything from outside, also well-formed XML. */
QC_NODISCARD qc_status qc_fit_report_html(const qc_fit_report *r, qc_strbuf *out, qc_error *err);

#endif
