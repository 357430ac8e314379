/* What `qconv validate` says: tables for a terminal, one JSON object, one HTML page; and whether it
 * is good enough: limits, and a baseline from an earlier run. */
#ifndef QC_CONVERT_VALIDATE_REPORT_H
#define QC_CONVERT_VALIDATE_REPORT_H

#include "convert/validate/validate_layer.h"

typedef struct {
    const char *name; /* of a layer */
    const char *why;  /* a clause */
} qc_validate_failure;

typedef struct {
    const char *out, *model; /* as given */
    const char *activations; /* file as given; NULL: random */
    uint64_t seed;
    uint64_t rows;             /* of activations, for the errors */
    qc_validate_layer *layers; /* the chosen ones and those that cannot be compared */
    size_t layer_count;
    size_t quantized;     /* quantized weights of OUT */
    size_t comparable;    /* of them: those that could be measured */
    size_t measured;      /* of them: those that were chosen */
    uint64_t sample;      /* --sample, or 0 */
    const char *device;   /* "cpu", or the GPU's name */
    const char *left_out; /* a sentence about what could not be done; NULL: nothing */
    const uint64_t *m;    /* times: sizes of batch; NULL without a GPU */
    unsigned m_count;
    unsigned threads;
    const char *isa;
    double max_error;     /* 0: not given */
    const char *baseline; /* file as given, or NULL */
    double tolerance;
    size_t in_baseline; /* measured layers that the baseline has */
    qc_validate_failure *failures;
    size_t failure_count;
    double seconds;
} qc_validate_report;

/* The measured layer with the largest output error (one that is no number counts as largest); NULL
 * if none was measured. */
const qc_validate_layer *qc_validate_worst(const qc_validate_report *r);

QC_NODISCARD qc_status qc_validate_text(const qc_validate_report *r, qc_arena *arena,
                                        qc_strbuf *out, qc_error *err);
/* docs/validate.md has the members. */
QC_NODISCARD qc_status qc_validate_json(const qc_validate_report *r, qc_strbuf *out, qc_error *err);
QC_NODISCARD qc_status qc_validate_html(const qc_validate_report *r, qc_arena *arena,
                                        qc_strbuf *out, qc_error *err);

/* ---- validate_baseline.c ---- */

typedef struct {
    const char *name;
    double weight_error, output_error;
} qc_validate_base_layer;

typedef struct {
    const char *path;
    uint64_t seed, rows;
    int captured;                   /* activations came from a file */
    qc_validate_base_layer *layers; /* sorted by name */
    size_t layer_count;
} qc_validate_baseline;

QC_NODISCARD qc_status qc_validate_baseline_read(qc_validate_baseline *out, qc_arena *arena,
                                                 const char *path, qc_error *err);
QC_NODISCARD qc_status qc_validate_baseline_text(const qc_validate_report *r, qc_strbuf *out,
                                                 qc_error *err);
/* QC_ERR_INPUT when it was made with other activations than r is. */
QC_NODISCARD qc_status qc_validate_baseline_fits(const qc_validate_baseline *base,
                                                 const qc_validate_report *r, qc_error *err);
/* Sets in_baseline; layers of r: chosen. QC_ERR_INPUT when none of those to be measured is in it,
 * so that a run which compares nothing does not pass. */
QC_NODISCARD qc_status qc_validate_baseline_cover(const qc_validate_baseline *base,
                                                  qc_validate_report *r, qc_error *err);
/* Sets failures of r and failure of its layers. base: NULL where none is given. pairs: all of them,
 * also those that were not chosen. */
QC_NODISCARD qc_status qc_validate_judge(qc_validate_report *r, const qc_validate_pairs *pairs,
                                         const qc_validate_baseline *base, qc_arena *arena,
                                         qc_error *err);

#endif
