/* The scratch of one worker, for everything that reads weights as the pipeline does. */
#ifndef QC_CONVERT_WORKER_H
#define QC_CONVERT_WORKER_H

#include "base/workers.h"
#include "convert/device/device_quantizer.h"
#include "convert/model/weight_read.h"
#include "convert/pipeline/pipeline.h"
#include "formats/seekable.h"

#define QC_NO_ITEM UINT32_MAX

typedef struct {
    qc_pipeline *p;
    qc_team *team;
    /* The job of the unit at hand, in the plan and in the pipeline, and how its weight is read.
     * (qc_worker_turn_to) */
    uint32_t number;
    const qc_job *job;
    qc_job_state *state;
    qc_weight_source weight;
    qc_weight_reader reader;
    qc_direct_reader *direct; /* reads codes for it; NULL: all may stay in the page cache */
    uint32_t early;           /* dispatch number of the next unit; QC_NO_ITEM: none is taken yet */
    qc_frame_coder *coder;
    qc_digest_state *hash;
    unsigned char *source;     /* one step; for row-wise int8 at least one row */
    unsigned char *content;    /* one frame */
    unsigned char *stored;     /* one frame, compressed */
    void *search;              /* scratch of the search; NULL where all scales are absmax */
    float *scales;             /* the scales of a step, where only their codes are kept */
    qc_buffer made;            /* codes of a unit before they are put into AWQ's order */
    const qc_cuda_device *gpu; /* the GPU that the ring is on */
    qc_gpu_ring *ring;         /* NULL: the worker quantizes on the CPU */
} qc_worker;

/* Prepares a worker without a GPU. */
QC_NODISCARD qc_status qc_worker_init(qc_worker *w, qc_pipeline *p, qc_team *team, qc_error *err);
void qc_worker_deinit(qc_worker *w);
/* Returns QC_ERR_INTERRUPTED when the team has stopped. A worker asks at every step of the source.
 * (job.c) */
QC_NODISCARD qc_status qc_worker_look_up(const qc_worker *w, qc_error *err);
/* Waits until a flag under finish_lock is set. QC_ERR_INTERRUPTED when the team has stopped. */
QC_NODISCARD qc_status qc_worker_wait(const qc_worker *w, const uint8_t *flag, qc_error *err);
/* Hashes the source of a main unit, as it is now, in the way that qc_unit_make does.
 * (unit_make.c) */
QC_NODISCARD qc_status qc_unit_source(qc_worker *w, const qc_unit *u, qc_digest *out,
                                      qc_error *err);

#endif
