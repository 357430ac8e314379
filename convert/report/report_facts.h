/* What `qconv report` knows of an output, before it becomes a page or JSON.
 *
 * Sizes, roles and parts come from inspect (inspect_facts.h). This adds kinds and layers by name,
 * the error of every quantized weight, how often each code occurs, what was left in 16 bit and why,
 * and results of eval and bench. docs/report.md says what each number is.
 *
 * Errors come from the manifest, or are measured against the source where that is given. Codes are
 * always read from the output. Everything lives in the arena of the options. */
#ifndef QC_CONVERT_REPORT_FACTS_H
#define QC_CONVERT_REPORT_FACTS_H

#include "convert/eval/eval.h"
#include "convert/report/inspect_facts.h"
#include "convert/verify/against.h"

#define QC_REPORT_FORM_BYTES 48u
#define QC_REPORT_MAX_FORMS  64u
#define QC_REPORT_MAX_CELLS  (1u << 18)

/* How often each code occurs: the 16 codes of 4 bits as they are stored, or 256 numbers from -128
 * to 127 as bytes (two's complement). */
typedef struct {
    uint64_t counts[256];
    uint64_t total;
} qc_report_codes;

/* A scheme with its block size: "nf4, blocks of 64, scales in 8 bit". Forms that differ only in the
 * block size or in how scales are stored are kept apart, because their errors differ. */
typedef struct {
    char name[QC_REPORT_FORM_BYTES];
    const char *scheme;     /* "nf4", "fp4", "int8", "int8-block", "w4a16", ... */
    const qc_form_ops *ops; /* of its codes */
    uint64_t weights, elems, bytes;
    uint64_t with_error;
    double mean, median, least, most; /* relative MSE; mean by elements */
    qc_report_codes codes;
    double expected[256]; /* expected shares; see report_codes.h */
    int has_expected;
} qc_report_form;

/* One quantized weight. */
typedef struct {
    const char *name;
    uint32_t tensor; /* index in the output */
    uint32_t kind, form;
    uint32_t layer; /* index into layers, or QC_REPORT_NO_LAYER */
    const qc_stored_weight *stored;
    uint64_t elems, bytes;
    int has_error;
    double rel_mse, max_err;
    uint64_t max_index;                 /* flat index in the shape of `stored` */
    const qc_manifest_outputs *outputs; /* of a calibrated weight, from the manifest; else NULL */
    double over_median;                 /* rel_mse over the median of its form; 0: none */
    /* These are only known where the source was compared: */
    int has_expected;
    double expected;   /* the relative MSE that absmax scales in this form leave */
    uint64_t clipped;  /* elements beyond the largest value of their scale */
    const char *fault; /* a clause, or NULL */
} qc_report_weight;
#define QC_REPORT_NO_LAYER UINT32_MAX

/* Weights of one form whose names differ only in numbers: "self_attn.q_proj". */
typedef struct {
    const char *name;
    uint32_t form;
    uint64_t weights, elems, bytes;
    uint64_t with_error;
    double mean, most; /* relative MSE; mean by elements */
    double max_err;
    uint32_t most_of, max_of; /* index into weights */
    qc_report_codes codes;
} qc_report_kind;

/* Weights of one kind name in one layer. There are several where there are experts. */
typedef struct {
    uint32_t count;
    uint64_t elems;
    double mean, least, most; /* relative MSE */
    uint32_t form;            /* that of the first weight */
    int mixed;                /* the weights have different forms */
} qc_report_cell;

/* What was not quantized: tensors with the same role and reason are one row. */
typedef struct {
    const char *role, *why;
    const char *example; /* the name of one of them */
    uint64_t tensors, elems, bytes;
} qc_report_left;

typedef enum { QC_ERRORS_NONE, QC_ERRORS_MANIFEST, QC_ERRORS_SOURCE } qc_report_error_source;

/* One row of a bench result. 0 means "not measured". */
typedef struct {
    const char *model, *layer, *scheme, *path;
    uint64_t n, k, m;
    double us, dense_us, ratio, gbps, of_roof;
    int here; /* a weight of the output has this shape and scheme */
} qc_report_speed;

typedef struct {
    const char *device, *program, *dtype;
    double copy_gbps, gemm_tflops;
    qc_report_speed *rows;
    uint32_t row_count;
    uint32_t here;   /* rows that have a shape of this output */
    int complete;    /* 0: the run ended before all was measured */
    uint64_t failed; /* results that were wrong or could not be had */
} qc_report_bench;

typedef struct {
    const qc_call *call;
    qc_facts facts;
    qc_report_weight *weights; /* in natural order of names */
    uint32_t weight_count;
    uint32_t *worst; /* indices of weights with an error, largest relative MSE first */
    uint32_t worst_count;
    qc_report_form *forms;
    uint32_t form_count;
    qc_report_kind *kinds; /* by name, then form */
    uint32_t kind_count;
    const char **series; /* names of kinds, each once */
    uint32_t series_count;
    uint32_t *layers; /* numbers of the layers, rising */
    uint32_t layer_count;
    qc_report_cell *cells; /* [series_count, layer_count]; NULL beyond QC_REPORT_MAX_CELLS */
    qc_report_left *left;
    uint32_t left_count;
    qc_report_error_source errors;
    const qc_against_result *against; /* what the comparison found; NULL: not compared */
    const char *no_errors;            /* why some weight has no error, as a clause, or NULL */
    uint64_t source_bytes;            /* size of the source's files; 0: not known */
    uint64_t plain_bytes;             /* size of all weights in the dtypes that they had */
    uint64_t quantized_elems, quantized_bytes, scale_bytes;
    const char *scale; /* how scales were found: "absmax", ...; NULL: not known */
    const char *command;
    int has_eval;
    qc_eval_result eval;
    const char *eval_from;        /* the file of --eval; NULL: it was measured now */
    const qc_report_bench *bench; /* or NULL */
    double seconds;
    qc_strbuf *page; /* what sections write to while a page is made; else NULL */
} qc_report;

/* Opens call->model and gathers everything but errors from the source, codes, eval and bench. The
 * caller closes r->facts.model (NULL after an error). QC_ERR_INPUT when nothing is quantized. */
QC_NODISCARD qc_status qc_report_gather(qc_report *r, const qc_call *call, qc_error *err);
/* Measures errors against call->against, which replace those of the manifest, and keeps what else
 * the comparison finds. source is that checkpoint, for its size. Faults are results, not failures.
 * */
QC_NODISCARD qc_status qc_report_measure(qc_report *r, const qc_checkpoint *source, qc_error *err);
/* Computes the sums over forms, kinds and cells, and the order of `worst`, once errors are known.
 * */
QC_NODISCARD qc_status qc_report_sum_up(qc_report *r, qc_error *err);
/* Reads the file of --bench. QC_ERR_INPUT says that it is no result of bench. (report_bench.c) */
QC_NODISCARD qc_status qc_report_bench_read(qc_report *r, const char *path, qc_error *err);

/* Makes "self_attn.q_proj" from "model.layers.12.self_attn.q_proj.weight": numbers become '*', and
 * the beginning that all names have in common is left out. It is public for tests. */
QC_NODISCARD qc_status qc_report_kind_names(const char **kinds, const char *const *names,
                                            uint32_t count, qc_arena *arena, qc_error *err);
/* Finds the layer of a name, which is its first component that is a number. Returns 0 and sets
 * *layer, or returns 1. */
int qc_report_layer_of(const char *name, uint32_t *layer);
/* Has the form codes of 4 bits? */
int qc_report_is_4_bit(const qc_report_form *f);
/* Returns the number that code i of 4 bits is shown as: what it stands for, or a table's code. */
int qc_report_code(const qc_report_form *f, unsigned i);
/* Returns -10 log10(rel_mse) in dB; it is infinite where there is no error. */
double qc_report_sqnr(double rel_mse);
/* Finds the indices in a tensor of that shape that a flat index means. */
void qc_report_indices(uint64_t at[QC_MAX_DIMS], const uint64_t *dims, unsigned ndim,
                       uint64_t index);
/* Writes "[3, 17]", which is the place of a flat index in a tensor of that shape. */
#define QC_REPORT_PLACE_BYTES 192u
const char *qc_report_place(char out[QC_REPORT_PLACE_BYTES], const uint64_t *dims, unsigned ndim,
                            uint64_t index);

/* Write the page, and the same as JSON. (report_page.c, report_json.c) */
QC_NODISCARD qc_status qc_report_page_html(const qc_report *r, qc_strbuf *out, qc_error *err);
QC_NODISCARD qc_status qc_report_facts_json(const qc_report *r, qc_strbuf *out, qc_error *err);

#endif
