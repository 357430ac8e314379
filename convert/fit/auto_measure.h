/* Measures how much each candidate of --to auto would change a weight: the relative squared error
 * on sampled rows, with the quantizers that the conversion uses.
 *
 * A sample is QC_AUTO_SAMPLE_ROWS rows, evenly spaced. It has more rows where these would be fewer
 * than QC_AUTO_SAMPLE_ELEMS weights, and all rows where there are no more. NF4's blocks run over
 * the sampled rows as they do over all rows. Of rows longer than QC_AUTO_SAMPLE_MAX weights only so
 * many are read. */
#ifndef QC_CONVERT_AUTO_MEASURE_H
#define QC_CONVERT_AUTO_MEASURE_H

#include "convert/fit/auto_solve.h"
#include "convert/model/recipe.h"

#define QC_AUTO_SAMPLE_ROWS  32u
#define QC_AUTO_SAMPLE_ELEMS (64u << 10)
#define QC_AUTO_SAMPLE_MAX   (4u << 20)

typedef struct {
    uint32_t tensor;     /* index in the checkpoint; of a dtype that quantizers read, or coded */
    uint64_t rows, cols; /* as written: [rows, cols] */
    int transpose;       /* is it stored as [cols, rows]? 0 for a coded one */
    /* Set for a weight in FP8 or MXFP4, whose errors are measured against its decoded values; else
     * NULL. */
    const qc_coded_weight *coded;
    unsigned wanted;                /* bit c is set for a candidate to measure */
    const qc_candidate_form *forms; /* per candidate */
    /* results */
    double sum_xx;                 /* sum of squares of the sampled weights */
    uint64_t elems;                /* their number */
    double rel_mse[QC_CANDIDATES]; /* NaN: not wanted or not possible (int8: beyond float16) */
    int not_finite; /* a sampled weight is NaN or infinite: only 16 bit has an error */
    uint64_t rows_read, bytes_read; /* the scales of a coded weight are not counted */
} qc_auto_sample;

/* Measures what is wanted, with scales as the conversion will find them. The result does not depend
 * on threads. Returns QC_ERR_INTERRUPTED, QC_ERR_IO, and any other error of reading. */
QC_NODISCARD qc_status qc_auto_measure(qc_auto_sample *samples, uint32_t count,
                                       const qc_checkpoint *model, const qc_recipe_options *o,
                                       unsigned threads, qc_error *err);
/* Works out the errors of a group from its samples, as if all of them were one weight, and the mean
 * square of its weights. Returns whether one of them is not finite. */
int qc_auto_combine(double rel_mse[QC_CANDIDATES], double *mean_square, const qc_auto_sample *s,
                    uint32_t n);
/* Returns the expected relative squared error of normally distributed weights in rows of `cols`.
 * It was measured (NF4's with scales that are not quantized), but for int8 with a scale for each
 * row, which has E[max^2] / (12 * 127^2) over the row, times a measured share where scales are
 * searched. */
double qc_auto_normal_mse(qc_candidate_form form, uint64_t cols, qc_scale_method scale);
/* Returns how much the error of the weight of this name matters (docs/decisions/0006). */
double qc_auto_importance(const char *name);

#endif
