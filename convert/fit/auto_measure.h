/* How much each candidate of --to auto would change a weight: relative squared error on sampled
 * rows, with the quantizers that the conversion uses.
 *
 * Sampled: QC_AUTO_SAMPLE_ROWS rows, evenly spaced, or more where that is less than
 * QC_AUTO_SAMPLE_ELEMS weights; all rows where there are no more. NF4's blocks run over the sampled
 * rows as they do over all rows. Rows longer than QC_AUTO_SAMPLE_MAX weights are read that far. */
#ifndef QC_CONVERT_AUTO_MEASURE_H
#define QC_CONVERT_AUTO_MEASURE_H

#include "convert/fit/auto_solve.h"
#include "convert/model/recipe.h"

#define QC_AUTO_SAMPLE_ROWS  32u
#define QC_AUTO_SAMPLE_ELEMS (64u << 10)
#define QC_AUTO_SAMPLE_MAX   (4u << 20)

/* Indices of candidates, in order of size. */
enum { QC_AUTO_AT_NF4, QC_AUTO_AT_NF4_32, QC_AUTO_AT_INT8, QC_AUTO_AT_16BIT };

typedef struct {
    uint32_t tensor;     /* of the checkpoint; of a dtype that quantizers read, or coded */
    uint64_t rows, cols; /* as written: [rows, cols] */
    int transpose;       /* stored [cols, rows]; not of a coded one */
    /* In FP8 or MXFP4: errors are against its decoded values; else NULL. */
    const qc_coded_weight *coded;
    /* results */
    double sum_xx;                   /* sum of squares of the sampled weights */
    double rel_mse[QC_AUTO_CHOICES]; /* NaN: cannot be (int8: beyond float16) */
    int not_finite;                  /* a sampled weight is NaN or infinite: all but 16 bit NaN */
    uint64_t rows_read, bytes_read;  /* scales of a coded weight not counted */
} qc_auto_sample;

/* candidates: bit c set: measure candidate c, with scales as they will be found. The result does
 * not depend on threads.
 * QC_ERR_IO and what else reading gives; QC_ERR_INTERRUPTED. */
QC_NODISCARD qc_status qc_auto_measure(qc_auto_sample *samples, uint32_t count,
                                       const qc_checkpoint *model, unsigned candidates,
                                       int double_quant, qc_scale_method scale, unsigned threads,
                                       qc_error *err);
/* Expected relative squared error of normally distributed weights in rows of `cols`. For NF4
 * measured (scales not yet quantized), for int8 E[max^2] / (12 * 127^2) over the row, times a
 * measured share where scales are searched. */
double qc_auto_normal_mse(unsigned candidate, uint64_t cols, qc_scale_method scale);

#endif
