/* What `qconv plan` says, in two forms: text with a bar for each device, or one JSON object.
 * Nothing is computed here that a reader could not add up from the numbers given.
 * Thread-safe, because each call works only on what it is given. */
#ifndef QC_CONVERT_FIT_REPORT_H
#define QC_CONVERT_FIT_REPORT_H

#include "convert/fit/auto_choice.h"
#include "convert/fit/fit.h"
#include "convert/term/table.h"

/* Says what a predicted error is, and what it came to where perplexity was measured: NF4 with
 * searched scales on kjv-llama and TinyStories-656K (docs/accuracy.md; tests/cli/test_auto.py
 * compares the figures with bench/results/accuracy.json). */
#define QC_ERROR_UNIT                                                                              \
    "It has no unit: the sum over weights of relative squared error times importance."
#define QC_ERROR_SEEN                                                                              \
    "Measured on two small models, nf4 raises perplexity by 0.51% and 5.9% (docs/accuracy.md)."

/* The sum over the weights that have one scheme, each with its scales and state. */
typedef struct {
    const char *name; /* "nf4", "nf4-32" (blocks of 32), "int8", "keep", ... */
    uint64_t tensors; /* tensors of the source */
    uint64_t weights; /* parameters of the model in them, without scales and buffers */
    uint64_t bytes;   /* as they will lie in memory */
} qc_fit_scheme;

/* A change that was planned anew and makes the model fit. */
typedef struct {
    const char *change;   /* "--context 4096", "3 cards" */
    const char *sentence; /* "with --context 4096: 1.2 GB are left" */
} qc_suggestion;

/* One way to use the devices, to compare others with what --to auto made of them. */
typedef struct {
    const char *change; /* "--to nf4"; "this plan" for the plan itself */
    uint64_t max_context;
    double predicted;     /* predicted error; NaN: not known */
    const char *own_form; /* "nf4+int8": a form that only qconv reads; NULL: bitsandbytes' */
} qc_fit_choice;

#define QC_AUTO_TRADES                                                                             \
    "auto gives what is free beyond --context to precision; the same devices could hold"

/* The longest context at batch 1 where a prompt is read in one way. */
typedef struct {
    uint64_t tokens; /* tokens read at once; 0: the whole prompt */
    uint64_t max_context;
} qc_fit_prefill;

/* How many tokens are read at once in the step that is shown beside whole prompts. */
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
    int generates;                   /* there is a KV cache, so the two searches mean something */
    uint64_t max_context, max_batch; /* 0: none fits */
    /* The longest context for each way to read a prompt. One of the two ways was asked for. */
    qc_fit_prefill whole, steps;
    const qc_suggestion *suggestions;
    uint32_t suggestion_count;
    /* Commands by which a plan that fits comes true; NULL: it does not, or MODEL is here. */
    const char *download, *convert;
    const qc_fit_choice *choices; /* --to auto: the plan and others (qc_fit_compare) */
    uint32_t choice_count;
    const qc_auto_result *chosen;     /* --to auto; NULL: another */
    const struct qc_loaders *loaders; /* who reads what convert would write (loaders.h), or NULL */
    int needs_plugin;                 /* with --tp: vLLM serves it with qconv's plug-in only */
    int explain;                      /* the JSON has the groups of `chosen` too */
    const struct qc_model_shape *shape; /* for the JSON of -v (model_shape.h), or NULL */
} qc_fit_report;

/* Returns the logical parameters of a tensor that is written: 0 for scales, state and buffers, and
 * two for each byte of packed 4-bit codes. */
uint64_t qc_fit_parameters_of(const qc_plan *plan, const qc_job *job);
/* Sums up the schemes over the jobs of a plan (before or after its layout). */
QC_NODISCARD qc_status qc_fit_sum_schemes(qc_fit_report *r, const qc_plan *plan, qc_error *err);

typedef enum { QC_BARS_ASCII, QC_BARS_BLOCKS } qc_bar_style;
/* Returns QC_BARS_BLOCKS only where standard output is a terminal and the locale says UTF-8. */
qc_bar_style qc_bar_style_of_console(void);

#define QC_BAR_CELLS 48u
/* Appends one device to out as a bar of at most QC_BAR_CELLS cells, `cells` of which are its
 * budget. The parts are rounded so that their sum is right. */
void qc_fit_bar(const qc_fit_device *d, unsigned cells, qc_bar_style style, qc_strbuf *out);

/* Writes sentences that explain the budgets: "36.0 GB is 90% of 40.0 GB (--margin)", and how the
 * cards that are sold with that size differ, each on a line behind `indent`. */
void qc_fit_budget_notes(const qc_fit_report *r, const char *indent, qc_strbuf *out);

/* Says whether the model has latent attention, so that its form matters. */
int qc_fit_has_mla(const qc_geometry *g);

/* Writes the command that serves the model, or nothing where layers are placed whole. */
void qc_fit_serve_text(const qc_fit_report *r, qc_strbuf *out);

QC_NODISCARD qc_status qc_fit_report_text(const qc_fit_report *r, qc_bar_style style,
                                          qc_strbuf *out, qc_error *err);
/* Writes one JSON object and a new line; docs/cli.md has its members. */
QC_NODISCARD qc_status qc_fit_report_json(const qc_fit_report *r, qc_strbuf *out, qc_error *err);

#endif
