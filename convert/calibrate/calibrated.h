/* Weights that calibrating made, until the pipeline writes them: a store of codes and scales in the
 * staging folder.
 *
 * Calibrating goes through a model layer by layer, in another order and pace than shards are
 * written, and takes long; so what it makes of a weight goes to a scratch file, at a place that the
 * plan fixes, and a journal says when a weight is whole. A later run of the same command takes over
 * every weight whose record is there and whose bytes have the digest that it says. The pipeline
 * then takes codes and scales of such a weight from here, reads and hashes the source as always,
 * and measures the error of what it writes against it. Both files go with the staging folder.
 *
 * Digests are kept of pieces of 64 KiB, so that any part can be read and is checked where it is
 * read. The room is that of the codes and scales, again: known before, checked by the caller.
 * Memory: 16 bytes a piece, 64 a job. */
#ifndef QC_CONVERT_CALIBRATED_H
#define QC_CONVERT_CALIBRATED_H

#include "convert/output/output_dir.h"
#include "convert/plan/plan.h"
#include "quant/error_feedback.h"

#define QC_CALIBRATED_JOURNAL "journal-calibrated"
#define QC_CALIBRATED_WEIGHTS "journal-calibrated-weights"

typedef struct qc_calibrated qc_calibrated;

/* Opens or makes the store in the staging folder of d. identity: everything that the results
 * depend on, as text: the conversion, the calibration text, the device. A store that was made for
 * another identity begins anew. *kept: weights taken over. */
QC_NODISCARD qc_status qc_calibrated_open(qc_calibrated **out, const qc_plan *plan,
                                          qc_output_dir *d, const char *identity, uint32_t *kept,
                                          qc_error *err);
void qc_calibrated_close(qc_calibrated *c); /* NULL is fine */

/* Calibrating has gone through all that it can, and says this of itself (one string, for
 * qc_calibrated_done): what the store does not hold now, nothing will give. */
QC_NODISCARD qc_status qc_calibrated_set_done(qc_calibrated *c, const char *text, qc_error *err);
/* That string, until c is closed; NULL: it has not. *lost: weights that were recorded and are no
 * longer there, so that it has to go on after all. */
const char *qc_calibrated_done(const qc_calibrated *c, uint32_t *lost);
/* Whether job's weight was recorded and its bytes are not those. */
int qc_calibrated_is_lost(const qc_calibrated *c, uint32_t job);
/* The staging folder that it lies in. */
const char *qc_calibrated_folder(const qc_calibrated *c);
/* Weights in it. */
uint32_t qc_calibrated_count(const qc_calibrated *c);

/* Can this job's weight be calibrated, where --calibrate or --hessians is given: 2-D, NF4 or int8,
 * as it is in the source (not transposed, no stack)? */
int qc_calibrated_takes(const qc_plan *plan, uint32_t job);
/* Is it in the store, whole? Thread-safe. */
int qc_calibrated_has(const qc_calibrated *c, uint32_t job);
/* Its errors in outputs, as qc_feedback_weight gave them. */
qc_feedback_result qc_calibrated_result(const qc_calibrated *c, uint32_t job);
/* Bytes of the scratch file for these jobs: of all that qc_calibrated_takes; without those that are
 * in c (may be NULL). */
uint64_t qc_calibrated_bytes(const qc_plan *plan, const qc_calibrated *c);

/* Arrays of a weight: codes, and either absmax, or codes of absmax with nested_absmax. */
typedef struct {
    void *codes;
    float *absmax; /* the scales as a reader has them, in any case */
    uint8_t *absmax_codes;
    float *nested_absmax;
    float nested_offset;
    uint64_t codes_bytes, scales, groups; /* scales: blocks or rows */
    void *owned;
} qc_calibrated_arrays;

/* Room for a job's weight, zeroed; to be freed. */
QC_NODISCARD qc_status qc_calibrated_alloc(qc_calibrated_arrays *out, const qc_plan *plan,
                                           uint32_t job, qc_error *err);
void qc_calibrated_free(qc_calibrated_arrays *a); /* zeros are fine */
/* Writes and records it: bytes, sync, record, sync. One thread at a time. QC_ERR_INTERNAL where
 * a->absmax is not what a reader makes of its codes. */
QC_NODISCARD qc_status qc_calibrated_put(qc_calibrated *c, uint32_t job,
                                         const qc_calibrated_arrays *a,
                                         const qc_feedback_result *result, qc_error *err);
/* All of it again, into arrays of qc_calibrated_alloc. */
QC_NODISCARD qc_status qc_calibrated_get(const qc_calibrated *c, uint32_t job,
                                         qc_calibrated_arrays *a, qc_error *err);
/* Codes of elements [first, first + n), a step of the pipeline (from the beginning of a block, or
 * of a row), and their scales; arrays that are NULL are left out. QC_ERR_CHECK where bytes are no
 * longer those that were put. Thread-safe. */
QC_NODISCARD qc_status qc_calibrated_read(const qc_calibrated *c, uint32_t job, uint64_t first,
                                          uint64_t n, void *codes, float *absmax,
                                          uint8_t *absmax_codes, float *nested_absmax,
                                          float *nested_offset, qc_error *err);

#endif
