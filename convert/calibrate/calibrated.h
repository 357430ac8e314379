/* A store of the weights that calibrating made, until the pipeline writes them. It keeps codes and
 * scales in the staging folder.
 *
 * Calibrating goes through a model layer by layer, in another order and at another pace than shards
 * are written, and it takes long. So what it makes of a weight goes to a scratch file, at a place
 * that the plan fixes, and a journal says when a weight is whole. A later run of the same command
 * takes over every weight whose record is there and whose bytes have the digest that it says. The
 * pipeline then takes codes and scales of such a weight from here, reads and hashes the source as
 * always, and measures the error of what it writes against the source. Both files go with the
 * staging folder.
 *
 * Digests are kept of pieces of 64 KiB, so any part can be read, and is checked where it is read.
 * On the disk the store takes the room of the codes and scales once more. That is known in advance,
 * and the caller checks it. In memory it takes 16 bytes a piece and 64 bytes a job. */
#ifndef QC_CONVERT_CALIBRATED_H
#define QC_CONVERT_CALIBRATED_H

#include "convert/model/weight_read.h"
#include "convert/output/output_dir.h"
#include "convert/plan/plan.h"
#include "quant/error_feedback.h"

#define QC_CALIBRATED_JOURNAL "journal-calibrated"
#define QC_CALIBRATED_WEIGHTS "journal-calibrated-weights"

typedef struct qc_calibrated qc_calibrated;

/* Opens or makes the store in the staging folder of d. identity names, as text, everything that the
 * results depend on: the conversion, the calibration text and the device. A store that was made for
 * another identity begins anew. *kept: the number of weights that are taken over. */
QC_NODISCARD qc_status qc_calibrated_open(qc_calibrated **out, const qc_plan *plan,
                                          qc_output_dir *d, const char *identity, uint32_t *kept,
                                          qc_error *err);
void qc_calibrated_close(qc_calibrated *c); /* accepts NULL */

/* Records that calibrating has gone through all that it can, with one string for
 * qc_calibrated_done. What the store does not hold now will never come. */
QC_NODISCARD qc_status qc_calibrated_set_done(qc_calibrated *c, const char *text, qc_error *err);
/* Returns that string, which lives until c is closed, or NULL where calibrating is not done. *lost:
 * the number of weights that were recorded and are no longer there, so that calibrating has to go
 * on after all. */
const char *qc_calibrated_done(const qc_calibrated *c, uint32_t *lost);
/* Was the job's weight recorded, while its bytes are not those that were? */
int qc_calibrated_is_lost(const qc_calibrated *c, uint32_t job);
/* Returns the number of weights in the store that were calibrated. */
uint32_t qc_calibrated_count(const qc_calibrated *c);

/* ---- numbers of weights ----
 *
 * Functions below take a weight by its number. A weight has its job's number, and a matrix of a
 * stack of experts has one from plan->first_matrix. Where the pipeline reads, the number of a
 * stack's job stands for all of its matrices. */

/* Returns how many numbers there are. */
uint32_t qc_calibrated_numbers(const qc_plan *plan);
/* Returns how many matrices of a job have numbers of their own. */
uint32_t qc_calibrated_matrices(const qc_plan *plan, uint32_t job);
/* Returns the job of a number; *matrix: the place of the number's matrix in its stack. */
uint32_t qc_calibrated_job(const qc_plan *plan, uint32_t number, uint32_t *matrix);
/* Returns the weight as if it were a job by itself; dims are not its own. */
qc_job qc_calibrated_weight(const qc_plan *plan, uint32_t number);
/* Returns how many blocks of its first group of scales come before the weight. */
uint64_t qc_calibrated_lead(const qc_plan *plan, uint32_t number);
/* The place of a matrix in its stack: "3", or "3, gate" and "3, up" where these lie one below the
 * other. */
#define QC_CALIBRATED_PLACE_BYTES 20
const char *qc_calibrated_place(char out[QC_CALIBRATED_PLACE_BYTES], const qc_plan *plan,
                                uint32_t number);
/* What messages call the weight: "NAME", or "NAME[expert]" of a stack. */
#define QC_CALIBRATED_NAME_BYTES 256
const char *qc_calibrated_name(char out[QC_CALIBRATED_NAME_BYTES], const qc_plan *plan,
                               uint32_t number);

/* Reads a weight of the model as floats [rows, cols], a matrix of a stack by itself. The caller
 * frees it, also after a failure. */
QC_NODISCARD qc_status qc_calibrated_original(float **out, qc_weight_reader *reader,
                                              const qc_plan *plan, uint32_t number, qc_error *err);
/* Can this job's weight be calibrated, where --hessians is given? It must be 2-D,
 * or a matrix of a stack, and become NF4 or int8. What lies transposed in the source has to be a
 * plain matrix, as a Conv1D's is. A stack as a whole is not. */
int qc_calibrated_takes(const qc_plan *plan, uint32_t job);
/* Is all of the weight in the store? Thread-safe. */
int qc_calibrated_has(const qc_calibrated *c, uint32_t job);
/* The result of a weight of a stack that is in the store as the search made it, because the stack
 * is there as a whole or not at all. */
#define QC_CALIBRATED_SEARCHED ((qc_feedback_result){.rounded = -1.0, .calibrated = -1.0})
int qc_calibrated_is_searched(const qc_calibrated *c, uint32_t number);
/* Returns the errors of the weight's outputs, as qc_feedback_weight gave them; of a stack, the mean
 * of those that were calibrated. */
qc_feedback_result qc_calibrated_result(const qc_calibrated *c, uint32_t job);
/* Returns the bytes of the scratch file for all jobs that can be calibrated, without those whose
 * weights are in c, which may be NULL. */
uint64_t qc_calibrated_bytes(const qc_plan *plan, const qc_calibrated *c);

/* The arrays of a weight: codes, and either absmax, or codes of absmax with nested_absmax. */
typedef struct {
    void *codes;
    float *absmax; /* the scales as a reader has them, in any case */
    uint8_t *absmax_codes;
    float *nested_absmax;
    float nested_offset;
    uint64_t codes_bytes, scales, groups; /* scales: blocks or rows */
    void *owned;
} qc_calibrated_arrays;

/* Allocates zeroed arrays for a job's weight. The caller frees them. */
QC_NODISCARD qc_status qc_calibrated_alloc(qc_calibrated_arrays *out, const qc_plan *plan,
                                           uint32_t job, qc_error *err);
/* The same for a job that is not the plan's; lead: as qc_calibrated_lead. */
QC_NODISCARD qc_status qc_calibrated_alloc_job(qc_calibrated_arrays *out, const qc_job *j,
                                               uint64_t lead, qc_error *err);
void qc_calibrated_free(qc_calibrated_arrays *a); /* accepts zeros */
/* Writes the weight's bytes and syncs them, then records the weight and syncs the journal. One
 * thread may do so at a time. QC_ERR_INTERNAL where a->absmax is not what a reader makes of its
 * codes. */
QC_NODISCARD qc_status qc_calibrated_put(qc_calibrated *c, uint32_t job,
                                         const qc_calibrated_arrays *a,
                                         const qc_feedback_result *result, qc_error *err);
/* Reads all of a weight into arrays of qc_calibrated_alloc. */
QC_NODISCARD qc_status qc_calibrated_get(const qc_calibrated *c, uint32_t job,
                                         qc_calibrated_arrays *a, qc_error *err);
/* Reads the codes of elements [first, first + n) and their scales into the arrays of `to`; those
 * that are NULL are left out. The elements are a step of the pipeline, which begins with a block or
 * a row. QC_ERR_CHECK where the bytes are no longer those that were put. Thread-safe. */
QC_NODISCARD qc_status qc_calibrated_read(const qc_calibrated *c, uint32_t job, uint64_t first,
                                          uint64_t n, const qc_calibrated_arrays *to,
                                          qc_error *err);
/* Returns the offset of a weight's scales; 0 without double quantization. */
float qc_calibrated_offset(const qc_calibrated *c, uint32_t job);

#endif
