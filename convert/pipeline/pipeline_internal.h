/* What the files of this room share, and nobody outside needs. */
#ifndef QC_CONVERT_PIPELINE_INTERNAL_H
#define QC_CONVERT_PIPELINE_INTERNAL_H

#include "convert/pipeline/pipeline.h"
#include "convert/pipeline/worker.h"

/* What a job needs from its first unit on until its last derived tensor is written. */
struct qc_job_work {
    qc_piece_sums *sums; /* one for each main unit */
    float *absmax;       /* scales of blocks or rows (SCB) */
    uint8_t calibrated;  /* codes and scales come from the store */
    qc_block_error *block_errors;
    /* These are for searched scales that are quantized as well. In int8 a sample of groups gives
     * the offset. */
    float *sample_absmax;             /* until the offset is known */
    uint64_t sample_count;            /* groups */
    atomic_uint_fast64_t sample_next; /* the first group that nobody took */
    atomic_uint_fast64_t sample_left; /* groups to come; whoever brings it to 0 makes the offset */
    uint8_t offset_ready;             /* under finish_lock */
    float offset;
    uint8_t *nested_codes;
    float *nested_absmax;
    char *state_json;
};

/* ---- pipeline_units.c ---- */

/* Makes all units, and counts those of each tensor, job and shard. */
QC_NODISCARD qc_status qc_units_make(qc_pipeline *p, qc_error *err);
/* Closes the file of a complete shard. The syncer calls this once it is on the disk. */
QC_NODISCARD qc_status qc_shard_close(qc_pipeline *p, uint32_t shard, qc_error *err);
/* Puts the units that are left for workers in order. What is kept may not change any more. */
QC_NODISCARD qc_status qc_units_dispatch(qc_pipeline *p, qc_error *err);

/* ---- job.c ---- */

/* Allocates s->work, if it is not there yet. */
QC_NODISCARD qc_status qc_job_need_work(qc_job_state *s, qc_error *err);

/* Reads elements [first, first + n) of the worker's weight as they are written (turned if the job
 * says so), in the job's dtype: that of the source, or float where the source is decoded first. */
QC_NODISCARD qc_status qc_job_read(qc_worker *w, uint64_t first, uint64_t n, void *dst,
                                   qc_error *err);
/* Reads elements [first, first + n), a step or less, to dst as qc_job_read does, and adds the bytes
 * that they come from to w->hash. */
QC_NODISCARD qc_status qc_job_read_step(qc_worker *w, uint64_t first, uint64_t n, void *dst,
                                        qc_error *err);
/* Finishes the worker's job, whose main units are all made: double quantization, errors and
 * state. */
QC_NODISCARD qc_status qc_job_finish(qc_worker *w, qc_error *err);
/* Frees what no derived tensor still to be written needs. The last of those may come much later: in
 * a shard all int8 codes lie before the state of the first weight. */
void qc_job_trim(const qc_pipeline *p, uint32_t job);

/* ---- unit_quantize.c ---- */

/* Allocates the worker's scratch for searching, if the plan has such weights. */
QC_NODISCARD qc_status qc_search_prepare(qc_worker *w, qc_error *err);
/* Allocates the buffers of an opened job whose scales are searched or calibrated (`sampled` is 0
 * for the latter). The caller holds finish_lock. */
QC_NODISCARD qc_status qc_search_open(const qc_job *j, int sampled, qc_job_work *s, qc_error *err);
/* Takes part in finding the offset of the worker's job, and waits until it is known. */
QC_NODISCARD qc_status qc_search_offset(qc_worker *w, qc_error *err);
/* Gives the worker a ring on a GPU, if it is to have one. Where there is no room for it, or where
 * the user did not name the GPUs, the worker goes without, and one warning says so. */
QC_NODISCARD qc_status qc_worker_take_gpu(qc_worker *w, unsigned index, qc_error *err);
void qc_worker_leave_gpu(qc_worker *w);
/* Does what qc_unit_make does, for a weight that is quantized: on the worker's GPU or the CPU. */
QC_NODISCARD qc_status qc_quantized_make(qc_worker *w, qc_unit *u, qc_error *err);

/* ---- unit_make.c ---- */

/* Sets the worker's job, and how its weight is read. */
QC_NODISCARD qc_status qc_worker_turn_to(qc_worker *w, uint32_t job, qc_error *err);
/* Fills w->content with the bytes of a main unit, and sets its digests of content and source. */
QC_NODISCARD qc_status qc_unit_make(qc_worker *w, qc_unit *u, qc_error *err);

#endif
