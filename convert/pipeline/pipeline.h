/* The pipeline carries out a plan.
 *
 * One unit of work is one frame of one output tensor. A worker takes the next unit, reads its
 * source in steps that fit the L2 cache, turns each step into codes while it is hot, compresses the
 * frame and writes it. With compression, a frame's place in the file is known only when all frames
 * before it are compressed. A turnstile hands out the places in file order; everything else runs in
 * parallel.
 *
 * Some tensors are derived from a whole weight: absmax, maps, the state. The worker that finishes
 * the weight's last frame makes them. Those that come before the codes in the file are stored
 * uncompressed, so that a place of known size could be kept free for them.
 *
 * On GPUs, each worker has a ring of slots of its own on one of them (workers are dealt out over
 * devices), and quantizes its unit through it: while it reads and hashes the next slot, others are
 * copied and quantized. The same worker finishes what comes back (it adds up the sums in double,
 * step by step in index order), so all bytes equal those made on the CPU.
 *
 * With searched scales (--scale search), a step is whole groups, and what the search leaves of it
 * is final. The offset of quantized scales is 0 in NF4. In int8 it comes from a sample of groups,
 * which the workers that open the weight share before its first frame. Everything else is read
 * once.
 *
 * With calibrated weights (--hessians), codes and scales come from the store
 * (convert/calibrate/calibrated.h). The source is read and hashed all the same, and the error of
 * what is written is measured against it. What the store does not hold is searched.
 *
 * Memory: each worker holds one step of the source, one frame and one compressed frame, and with a
 * GPU 24 MiB of pinned memory and as much of the device's. Each weight in flight takes 10 bytes a
 * block, or 1 byte where its scales are searched and quantized. Nothing grows with the model.
 *
 * Threads and ownership
 *   ring        its worker owns it, from before the first unit until after the last
 *   unit        the worker that took it owns it; its results are read after the team has ended
 *   job state   `left` counts main frames; who brings it to 0 owns the finishing of the job
 *   shard       `left` counts frames that are not recorded; who brings it to 0 writes the seek
 *               table; the syncer brings the file to the disk and closes it
 *   sample      an atomic counter deals the groups out to the workers that want the offset of
 *               searched scales; who brings `sample_left` to 0 makes the offset
 *   locks       shard_lock (for opening and closing files) and finish_lock (for waiting until a job
 *               is finished, or its offset is known) are leaf locks
 *
 * Going on after an interruption (convert/run/resume.h): units that a journal says are written are
 * `kept`. No worker makes them, and the turnstile steps over them, checking that it comes to the
 * places that are recorded. */
#ifndef QC_CONVERT_PIPELINE_H
#define QC_CONVERT_PIPELINE_H

#include "base/workers.h"
#include "convert/calibrate/calibrated.h"
#include "convert/device/device_choice.h"
#include "convert/output/output_dir.h"
#include "convert/pipeline/source_use.h"
#include "convert/plan/plan.h"
#include "formats/digest.h"
#include "formats/journal.h"
#include "formats/read_ahead.h"
#include "quant/quant_ops.h"
#include "quant/scale_search.h"

typedef enum {
    QC_UNIT_HEADER,  /* holds the safetensors header of a shard */
    QC_UNIT_MAIN,    /* is made from the source */
    QC_UNIT_DERIVED, /* is made from a finished job, when its turn in the file comes */
    QC_UNIT_DEFERRED /* is made from a finished job, and goes uncompressed to a place kept free */
} qc_unit_kind;

/* A unit is one frame of one output tensor, or of the header of a shard. A worker makes it as a
 * whole. */
typedef struct {
    uint64_t content_offset; /* in its tensor, or in the header */
    uint64_t file_offset;    /* in the shard's file */
    uint32_t content_bytes;
    uint32_t stored_bytes;
    uint32_t index;  /* the unit's own */
    uint32_t tensor; /* the output tensor, or QC_NO_OUTPUT for a header */
    uint32_t shard;
    uint8_t kind;     /* a qc_unit_kind; it and the next two are set before the team starts */
    uint8_t kept;     /* an earlier run recorded it */
    uint8_t recorded; /* was kept; if it is made again, it must have the same digests */
    /* Its worker sets these; they are read after the team has ended. */
    uint8_t written : 1; /* or it is kept */
    uint8_t zeros : 1;   /* its source is zeros; what is kept says nothing */
    uint8_t lost : 1;    /* its content is zeros, though its source is not */
    /* The worker that makes the unit sets these. A digest is zero where there is nothing to hash:
     * `stored` without compression, `source` of what is derived. */
    qc_digest content, stored, source;
} qc_unit;

typedef struct qc_job_work qc_job_work; /* convert/pipeline/pipeline_internal.h */

typedef struct {
    _Atomic uint32_t left;         /* main units to come */
    _Atomic uint32_t derived_left; /* derived units to come, in their turn */
    uint8_t finished;              /* under finish_lock; of a kept job from the beginning */
    uint8_t begun;                 /* under finish_lock; a run recorded that it began */
    uint8_t kept;                  /* an earlier run recorded it as finished */
    uint8_t opened;                /* under finish_lock */
    atomic_int recorded;           /* the journal has it */
    uint8_t not_finite;            /* some element that is not quantized, under finish_lock */
    uint64_t first_not_finite;
    qc_job_work *work; /* NULL before and after, and where nothing is computed */
    qc_tensor_error error;
    qc_feedback_result outputs; /* errors of a calibrated weight's outputs; else zeros */
} qc_job_state;

typedef struct {
    const char *path; /* in the staging folder */
    qc_file file;     /* opened and closed under shard_lock */
    uint64_t next_offset;
    uint32_t first_unit, unit_count;
    atomic_uint_fast32_t left;
    atomic_int unsynced; /* written to since it was last brought to the disk */
    atomic_int complete; /* its file stays open until it is on the disk */
    int kept;            /* an earlier run recorded it as finished */
    int foreign;         /* belongs to another process's part */
    uint64_t file_bytes;
    uint64_t table_bytes;
    qc_digest table;
} qc_shard_state;

typedef void (*qc_progress_fn)(void *ctx, uint64_t source_bytes);

/* Where a pipeline records what it has finished, so that the same command can go on after it died
 * (convert/run/resume.h fills one). The functions may be called by several threads at once. */
typedef struct {
    void *ctx;
    qc_journal *journal; /* the syncer brings it to the disk */
    qc_status (*begin)(void *ctx, uint32_t job, qc_error *err); /* work on a weight begins */
    qc_status (*job)(void *ctx, uint32_t job, qc_error *err);   /* the weight is finished */
    qc_status (*unit)(void *ctx, uint32_t unit, qc_error *err);
    qc_status (*shard)(void *ctx, uint32_t shard, qc_error *err);
} qc_recorder;

typedef struct qc_syncer qc_syncer; /* convert/pipeline/syncer.h */

typedef struct qc_pipeline {
    const qc_plan *plan;
    const qc_quant_ops *ops;
    const qc_search_ops *search;
    qc_output_dir *out;
    const qc_recorder *recorder; /* NULL: nothing is recorded */
    qc_unit *units;
    uint32_t unit_count;
    uint32_t unit_bytes;  /* content of the largest unit */
    uint32_t *first_unit; /* [output tensors] */
    uint32_t *dispatch;
    uint32_t dispatch_count;
    atomic_uint_fast32_t next_dispatch;
    qc_job_state *jobs;
    qc_shard_state *shards;
    qc_turnstile turnstile; /* only with compression */
    int have_turnstile;
    pthread_mutex_t shard_lock, finish_lock;
    pthread_cond_t finish_cond;
    int have_locks;
    unsigned threads;
    const qc_devices *devices;       /* NULL: the CPU */
    const qc_calibrated *calibrated; /* NULL: no weight is calibrated */
    atomic_uint_fast64_t gpu_elems;  /* elements that GPUs quantized */
    atomic_flag gpu_told;            /* a warning has said that a GPU had no room */
    qc_read_ahead reads;             /* by dispatch number */
    int keep_cache;                  /* nothing is given back to the page cache */
    atomic_int halted;               /* the syncer failed, so workers return */
    atomic_int misfit;               /* kept units are not what this run makes of the source */
    qc_progress_fn progress;
    void *progress_ctx;
    qc_syncer *syncer;            /* while the team is at work */
    atomic_uint_fast32_t waiting; /* complete shards that are open until they are on the disk */
} qc_pipeline;

/* Returns how many threads are used when the user does not say: one for each processor, as long as
 * their buffers, zstd's among them, stay below the memory target. level: of compression; 0 for
 * none. */
unsigned qc_pipeline_default_threads(int level);

/* Prepare, run, clean up. Between the first two the caller may set devices, progress, keep_cache
 * and the foreign shards, and may take in what a journal holds (qc_resume_open and then
 * qc_resume_check). out must have begun; shard files are staged in it but not committed. After a
 * run that returns QC_OK, all shards that are not foreign are on the disk. The results stay in p
 * until qc_pipeline_deinit. */
QC_NODISCARD qc_status qc_pipeline_init(qc_pipeline *p, const qc_plan *plan, qc_output_dir *out,
                                        qc_isa isa, unsigned threads, qc_error *err);
QC_NODISCARD qc_status qc_pipeline_run(qc_pipeline *p, qc_error *err);
void qc_pipeline_deinit(qc_pipeline *p);

int qc_pipeline_is_compressed(const qc_pipeline *p);
/* The units of an output tensor are this many, from p->first_unit[tensor] on. */
uint32_t qc_unit_count(const qc_pipeline *p, uint32_t tensor);
/* Returns where unit u lies in its shard's file when nothing is compressed. */
uint64_t qc_unit_plain_place(const qc_pipeline *p, const qc_unit *u);
/* Forgets what is kept of a job, so that it and all that is derived from it are made (again). */
void qc_job_reset(qc_pipeline *p, uint32_t job);

/* The derived tensors of jobs, for who takes in what an earlier run finished. */

/* The bytes of a derived tensor of a finished job. */
const void *qc_job_role_tensor(const qc_pipeline *p, uint32_t job, qc_role_tensor role);
/* Does such a tensor come from the job's state, or is it the same in every output? */
int qc_role_tensor_is_own(qc_role_tensor role);
/* Frees s->work with all its arrays. */
void qc_job_release(qc_job_state *s);
/* Is this tensor of a job still to be written, in its turn? */
int qc_job_awaits(const qc_pipeline *p, uint32_t job, qc_role_tensor role);
/* Takes `bytes` bytes of such a tensor, as qc_job_role_tensor gave them, into a job that an earlier
 * run finished. QC_ERR_INPUT for another size. */
QC_NODISCARD qc_status qc_job_take_role_tensor(qc_pipeline *p, uint32_t job, qc_role_tensor role,
                                               const void *src, size_t bytes, qc_error *err);

#endif
