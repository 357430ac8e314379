/* The output of `qconv validate`: tables for a terminal, or one JSON object. It also decides
 * whether the output is good enough, by limits and by a baseline from an earlier run. */
#ifndef QC_CONVERT_VALIDATE_REPORT_H
#define QC_CONVERT_VALIDATE_REPORT_H

#include "convert/validate/validate_layer.h"

typedef struct {
    const char *name; /* name of a layer */
    const char *why;  /* a clause */
} qc_validate_failure;

typedef struct {
    const char *out, *model; /* as given */
    const char *activations; /* the file, as given; NULL: they are random */
    uint64_t seed;
    uint64_t rows;             /* how many activations the errors are measured with */
    qc_validate_layer *layers; /* the chosen ones, and those that cannot be compared */
    size_t layer_count;
    size_t quantized;     /* quantized weights in OUT */
    size_t comparable;    /* how many of these can be measured */
    size_t measured;      /* how many of these were chosen */
    uint64_t sample;      /* --sample, or 0 */
    const char *device;   /* "cpu", or the GPU's name */
    const char *left_out; /* a sentence about what could not be done, or NULL */
    const uint64_t *m;    /* batch sizes that were timed */
    unsigned m_count;
    int timed_on_cpu;
    double read_rate; /* bytes a second that the CPU's threads read; NaN where it is unknown */
    unsigned threads;
    const char *isa;
    double max_error;     /* 0: not given */
    const char *baseline; /* the file, as given, or NULL */
    double tolerance;
    size_t in_baseline; /* how many measured layers the baseline has */
    qc_validate_failure *failures;
    size_t failure_count;
    double seconds;
} qc_validate_report;

QC_NODISCARD qc_status qc_validate_text(const qc_validate_report *r, qc_arena *arena,
                                        qc_strbuf *out, qc_error *err);
/* docs/validate.md has the members. */
QC_NODISCARD qc_status qc_validate_json(const qc_validate_report *r, qc_strbuf *out, qc_error *err);

/* ---- validate_baseline.c ---- */

typedef struct {
    const char *name;
    double weight_error, output_error;
} qc_validate_base_layer;

typedef struct {
    const char *path;
    uint64_t seed, rows;
    int captured;                   /* the activations came from a file */
    qc_validate_base_layer *layers; /* sorted by name */
    size_t layer_count;
} qc_validate_baseline;

QC_NODISCARD qc_status qc_validate_baseline_read(qc_validate_baseline *out, qc_arena *arena,
                                                 const char *path, qc_error *err);
QC_NODISCARD qc_status qc_validate_baseline_text(const qc_validate_report *r, qc_strbuf *out,
                                                 qc_error *err);
/* QC_ERR_INPUT when the baseline was made with other activations than r. */
QC_NODISCARD qc_status qc_validate_baseline_fits(const qc_validate_baseline *base,
                                                 const qc_validate_report *r, qc_error *err);
/* Sets in_baseline; the layers of r must have been chosen. QC_ERR_INPUT when the baseline has none
 * of the layers that are to be measured, so that a run which compares nothing does not pass. */
QC_NODISCARD qc_status qc_validate_baseline_cover(const qc_validate_baseline *base,
                                                  qc_validate_report *r, qc_error *err);
/* Sets the failures of r and the failure of its layers. base is NULL if there is none. pairs are
 * all pairs, including those that were not chosen. */
QC_NODISCARD qc_status qc_validate_judge(qc_validate_report *r, const qc_validate_pairs *pairs,
                                         const qc_validate_baseline *base, qc_arena *arena,
                                         qc_error *err);

#endif
