/* The pipeline: carries out a plan.
 *
 * One unit of work is one frame of one output tensor. A worker takes the next unit, reads its
 * source in pieces that fit the L2 cache, turns each into codes while it is hot, compresses the
 * frame and writes it. With compression a frame's place in the file is known when all before it
 * are: a turnstile hands out places in file order, everything else runs in parallel.
 *
 * Tensors derived from a whole weight (absmax, maps, state) are made by the worker that finishes
 * the weight's last frame. Those that come before the codes in the file are stored uncompressed,
 * so that their place could be kept free.
 *
 * On GPUs: each worker has a ring of slots of its own on one of them (workers are dealt out over
 * devices) and quantizes its unit through it: while it reads and hashes the next slot, others are
 * copied and quantized. What comes back is finished (sums in double, step by step in index order)
 * by the same worker, so that all bytes equal those made on the CPU.
 *
 * Searched scales (--scale search): a step is whole groups, and what the search leaves of it is
 * final. The offset of quantized scales is 0 in NF4; in int8 it comes from a sample of groups,
 * which the workers that open the weight share before its first frame; everything else is read
 * once.
 *
 * Calibrated weights (--calibrate): codes and scales come from the store
 * (convert/calibrate/calibrated.h); the source is read and hashed as always, and the error of what
 * is written measured against it. What the store does not hold is searched.
 *
 * Memory: per worker one source piece, one frame and one compressed frame, with a GPU 24 MiB of
 * pinned memory and as much of the device's; per weight in flight 10 bytes a block, of searched and
 * quantized scales 1 byte. Nothing grows with the model.
 *
 * Threads and ownership
 *   ring        owned by its worker, from before its first unit until after its last
 *   unit        owned by the worker that took it; its results are read after the team ended
 *   job state   `left` counts main frames; who brings it to 0 owns the job's finishing
 *   shard       `left` counts frames that are not recorded; who brings it to 0 writes the seek
 *               table; the syncer brings it to the disk and closes it
 *   sample      of searched scales: groups are dealt out by an atomic counter to the workers that
 *               want the offset; who brings `sample_left` to 0 makes it
 *   locks       shard_lock (opening, closing), finish_lock (waiting for a finished job or an
 *               offset): leaf locks
 *
 * Going on (convert/run/resume.h): units that a journal says are written are `kept`: nobody is sent
 * for them, and the turnstile steps over them, checking that it comes to their recorded places.
 */
#ifndef QC_CONVERT_PIPELINE_H
#define QC_CONVERT_PIPELINE_H

#include "base/workers.h"
#include "convert/calibrate/calibrated.h"
#include "convert/device/device_choice.h"
#include "convert/device/device_quantizer.h"
#include "convert/model/coded_read.h"
#include "convert/output/output_dir.h"
#include "convert/pipeline/source_files.h"
#include "convert/plan/plan.h"
#include "formats/digest.h"
#include "formats/journal.h"
#include "formats/read_ahead.h"
#include "formats/seekable.h"
#include "quant/quant_ops.h"
#include "quant/scale_search.h"

/* Source bytes read, hashed and quantized at a time, but never less than a row or group; sums of
 * errors are combined in pieces of this size, so it is part of what the manifest's figures depend
 * on. */
#define QC_SOURCE_STEP_BYTES (512u << 10)
/* Source bytes on their way to the team, beyond what it reads just now. */
#define QC_READ_AHEAD_BYTES (64u << 20)

typedef enum {
    QC_UNIT_HEADER,  /* the safetensors header of a shard */
    QC_UNIT_MAIN,    /* from the source */
    QC_UNIT_DERIVED, /* from a finished job, in its turn */
    QC_UNIT_DEFERRED /* from a finished job, to a place kept free: never compressed */
} qc_unit_kind;

/* A unit, made of what is kept of it and of the plan (qc_unit_of). */
typedef struct {
    uint64_t content_offset; /* in its tensor (or in the header) */
    uint64_t file_offset;    /* in the shard's file */
    uint32_t content_bytes;
    uint32_t stored_bytes;
    uint32_t index;
    uint32_t tensor; /* output tensor, QC_NO_OUTPUT for a header */
    uint32_t shard;
    qc_unit_kind kind;
    /* By qc_unit_read alone, and by who makes them. Zero where there is none: stored without
     * compression, source of what is derived. */
    qc_digest content, stored, source;
} qc_unit;

/* What is kept of it: most of what a conversion needs for a tensor that is written, so in 16 bytes.
 */
typedef struct {
    uint32_t stored_bytes;
    uint32_t tensor;
    uint32_t place_low; /* of its place in the shard's file: qc_unit_place */
    uint16_t place_high;
    uint8_t kind : 2;     /* qc_unit_kind; like the next two set before the team starts */
    uint8_t kept : 1;     /* recorded by an earlier run */
    uint8_t recorded : 1; /* as kept; and made again, it must have the same digests */
    uint8_t written;      /* by its worker, or kept; read after the team ended */
} qc_unit_state;
_Static_assert(sizeof(qc_unit_state) == 16, "there are as many as tensors in the output, or more");

static inline uint64_t qc_unit_place(const qc_unit_state *u)
{
    return (uint64_t)u->place_high << 32 | u->place_low;
}

static inline void qc_unit_set_place(qc_unit_state *u, uint64_t place) /* below 2^48 */
{
    u->place_low = (uint32_t)place;
    u->place_high = (uint16_t)(place >> 32);
}

/* What a job needs from its first piece on until the last derived tensor is written. */
typedef struct {
    qc_piece_sums *sums; /* per main unit */
    float *absmax;       /* blocks or rows (SCB); or, to dequantize, decoded scales */
    qc_block_error *block_errors;
    /* Searched scales that are quantized too: the offset, and in int8 what it is made from. */
    float *sample_absmax;             /* until the offset is known */
    uint64_t sample_count;            /* groups */
    atomic_uint_fast64_t sample_next; /* the first that nobody took */
    atomic_uint_fast64_t sample_left; /* groups to come; who brings it to 0 makes the offset */
    int offset_ready;                 /* under finish_lock */
    float offset;
    uint8_t *nested_codes;
    float *nested_absmax;
    char *state_json;
} qc_job_work;

typedef struct {
    _Atomic uint32_t left;             /* main units to come */
    _Atomic uint32_t derived_left;     /* in-order derived units to come */
    uint8_t finished;                  /* under finish_lock; of a kept job from the beginning */
    uint8_t begun;                     /* under finish_lock; recorded as begun, by any run */
    uint8_t kept;                      /* recorded as finished by an earlier run */
    uint8_t opened;                    /* under finish_lock */
    atomic_uint_fast64_t recorded_end; /* position in the journal behind its record; 0: none yet */
    qc_job_work *work;                 /* NULL before and after, and where nothing is computed */
    qc_tensor_error error;
    qc_feedback_result outputs; /* of a calibrated weight: its errors there; else zeros */
} qc_job_state;

typedef struct {
    const char *path; /* staged */
    qc_file file;     /* opened and closed under shard_lock */
    uint64_t next_offset;
    uint32_t first_unit, unit_count;
    atomic_uint_fast32_t left;
    atomic_int news;     /* written to since it was last brought to the disk */
    atomic_int complete; /* its file stays open until it is on the disk */
    int kept;            /* recorded as finished by an earlier run */
    int foreign;         /* another part's */
    uint64_t file_bytes;
    uint64_t table_bytes;
    qc_digest table;
} qc_shard_state;

typedef void (*qc_progress_fn)(void *ctx, uint64_t source_bytes);

/* From the thread of the syncer: all that lies in the journal before this position, and the frames
 * that it speaks of, are on the disk. */
typedef qc_status (*qc_durable_fn)(void *ctx, uint64_t journal_bytes, qc_error *err);

/* Where a pipeline records what it has finished, so that the same command can go on after it died
 * (convert/run/resume.h fills one). The functions may be called by several threads at once. */
typedef struct {
    void *ctx;
    qc_journal *journal; /* the syncer brings it to the disk */
    qc_status (*begin)(void *ctx, uint32_t job, qc_error *err); /* work on a weight begins */
    /* A weight is finished. *end: the position in the journal behind its record. */
    qc_status (*job)(void *ctx, uint32_t job, uint64_t *end, qc_error *err);
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
    qc_source_files sources;
    qc_unit_state *units;
    uint32_t unit_count;
    qc_file digests; /* scratch: room for all of each unit; nobody needs them until the end */
    qc_digest same_content[QC_PART_COUNT], same_stored[QC_PART_COUNT]; /* of tables */
    uint32_t piece_bytes; /* content of the largest unit */
    uint32_t *first_unit; /* per output tensor */
    uint32_t *dispatch;
    uint32_t dispatch_count;
    atomic_uint_fast32_t next_dispatch;
    qc_job_state *jobs;
    qc_shard_state *shards;
    qc_turnstile turnstile; /* compressed only */
    int have_turnstile;
    pthread_mutex_t shard_lock, finish_lock;
    pthread_cond_t finish_cond;
    int have_locks;
    unsigned threads;
    const qc_devices *devices;       /* NULL: the CPU */
    const qc_calibrated *calibrated; /* NULL: nothing is */
    atomic_uint_fast64_t gpu_elems;  /* that GPUs quantized */
    atomic_flag gpu_told;            /* that a GPU had no room was said once */
    qc_read_ahead reads;             /* by dispatch */
    int keep_cache;                  /* nothing is given back to the page cache */
    atomic_int halted;               /* the syncer failed: workers return */
    atomic_int misfit;               /* what is kept is not what this run makes of the source */
    qc_progress_fn progress;
    void *progress_ctx;
    qc_durable_fn durable; /* NULL: nobody wants to know */
    void *durable_ctx;
    atomic_uint_fast32_t freed; /* files that `durable` deleted: a full disk may have room again */
    qc_syncer *syncer;          /* while the team is at work */
    atomic_uint_fast32_t waiting; /* complete shards that are open until they are on the disk */
} qc_pipeline;

#define QC_NO_ITEM UINT32_MAX

/* One worker's scratch. */
typedef struct {
    qc_pipeline *p;
    qc_team *team;
    qc_st_cursor *cursor;
    qc_direct_reader *direct; /* of the cursor; NULL where all may stay in the page cache */
    uint32_t early;           /* dispatch number of what comes next, QC_NO_ITEM: not taken yet */
    qc_frame_coder *coder;
    qc_digest_state *hash;
    unsigned char *source;     /* one step; at least one row for row-wise int8 */
    unsigned char *content;    /* one frame */
    unsigned char *stored;     /* one frame, compressed */
    void *search;              /* scratch of the search; NULL where scales are absmax */
    float *scales;             /* those of a step, where only their codes are kept */
    qc_coded_scratch coded;    /* of weights in FP8 and MXFP4 */
    const qc_cuda_device *gpu; /* with a ring */
    qc_gpu_ring *ring;         /* NULL: the CPU */
} qc_worker;

/* Threads that are used when the user does not say: one per processor, as long as their buffers,
 * zstd's among them, stay below the memory target. level: of compression; 0 for none. */
unsigned qc_pipeline_default_threads(int level);

/* Prepare, run, clean up. Between the first two the caller may set devices, progress, keep_cache,
 * durable and the foreign shards, and take in what a journal holds (qc_resume_open,
 * qc_resume_check: in this order). out must have begun; shard files are staged in it but not
 * committed. After a run that returns QC_OK all shards that are not foreign are on the disk.
 * Results stay in p until qc_pipeline_deinit. */
QC_NODISCARD qc_status qc_pipeline_init(qc_pipeline *p, const qc_plan *plan, qc_output_dir *out,
                                        qc_isa isa, unsigned threads, qc_error *err);
QC_NODISCARD qc_status qc_pipeline_run(qc_pipeline *p, qc_error *err);
void qc_pipeline_deinit(qc_pipeline *p);
/* Lets go of the scratch file in the staging folder: no digests any more. */
void qc_pipeline_forget_digests(qc_pipeline *p);

/* Parts of the pipeline, one file each. */

/* Units, and how many of them each tensor, job and shard has. (pipeline_units.c) */
QC_NODISCARD qc_status qc_units_make(qc_pipeline *p, qc_error *err);
/* What is left for workers to take, in order; after that what is kept may not change.
 * (pipeline_units.c) */
QC_NODISCARD qc_status qc_units_dispatch(qc_pipeline *p, qc_error *err);
int qc_pipeline_is_compressed(const qc_pipeline *p);
/* Unit `index` as it is known now, but for digests; not while another worker may be making it.
 * (pipeline_units.c) */
qc_unit qc_unit_of(const qc_pipeline *p, uint32_t index);
/* The same of one that is written, with digests. (pipeline_units.c) */
QC_NODISCARD qc_status qc_unit_read(const qc_pipeline *p, uint32_t index, qc_unit *out,
                                    qc_error *err);
/* What the plan says of it, without its place, stored size and digests; at any time.
 * (pipeline_units.c) */
qc_unit qc_unit_planned(const qc_pipeline *p, uint32_t index);
/* Keep its place, size and digests. QC_ERR_INTERNAL where it is a table that is the same beside
 * every weight, and has other digests than that. (pipeline_units.c) */
QC_NODISCARD qc_status qc_unit_put(qc_pipeline *p, const qc_unit *u, qc_error *err);
uint32_t qc_unit_shard(const qc_pipeline *p, uint32_t index);
/* Units of an output tensor, from first_unit[tensor] on. (pipeline_units.c) */
uint32_t qc_unit_count(const qc_pipeline *p, uint32_t tensor);
/* Where unit u lies in its shard's file, without compression. (pipeline_units.c) */
uint64_t qc_unit_plain_place(const qc_pipeline *p, const qc_unit *u);
/* A job, with all that is derived from it, is to be made (again). (pipeline_units.c) */
void qc_job_reset(qc_pipeline *p, uint32_t job);

/* Scratch of a worker without a GPU; for anything that reads weights as the pipeline does. */
QC_NODISCARD qc_status qc_worker_init(qc_worker *w, qc_pipeline *p, qc_team *team, qc_error *err);
void qc_worker_deinit(qc_worker *w);
/* QC_ERR_INTERRUPTED when the team stopped: looked at with every step of source. */
QC_NODISCARD qc_status qc_worker_look_up(const qc_worker *w, qc_error *err);

/* The worker's ring, if it is to have one. Without room, or with GPUs that were not asked for by
 * name, the worker goes without, and one warning says so. (piece_quantize.c) */
QC_NODISCARD qc_status qc_worker_take_gpu(qc_worker *w, unsigned index, qc_error *err);
void qc_worker_leave_gpu(qc_worker *w);

/* Fill w->content with the unit's bytes (QC_UNIT_MAIN); *source gets the digest of the source
 * bytes. (piece_work.c) */
QC_NODISCARD qc_status qc_piece_make(qc_worker *w, qc_unit *u, qc_error *err);
/* Buffers a job needs before its first piece; its absmax when it is dequantized, its offset where
 * that comes from a sample. (piece_work.c) */
QC_NODISCARD qc_status qc_job_open(qc_worker *w, uint32_t job, qc_error *err);
/* The tensor that a job's weight is made of. (job_source.c) */
const qc_ckpt_tensor *qc_job_source(const qc_pipeline *p, const qc_job *j);
/* Elements [first, first + n) of a job's weight, as written (transposed if the job says so), in
 * the job's dtype: of the source, or float where that is decoded first. (piece_work.c) */
QC_NODISCARD qc_status qc_job_read(qc_worker *w, uint32_t job, uint64_t first, uint64_t n,
                                   void *dst, qc_error *err);
/* The stored bytes that the last qc_job_read of n elements (to `read`) took them from.
 * (piece_work.c) */
const unsigned char *qc_job_stored(const qc_worker *w, uint32_t job, uint64_t n, const void *read,
                                   size_t *bytes);
/* Source elements per step: whole rows or blocks. (piece_work.c) */
uint64_t qc_job_step_elems(const qc_job *j);
/* As qc_piece_make, for a weight that is quantized: on the worker's GPU, or on the CPU.
 * (piece_quantize.c) */
QC_NODISCARD qc_status qc_quantized_make(qc_worker *w, qc_unit *u, uint32_t job, qc_error *err);
/* Scratch for searching the plan's weights, if any; freed with the worker. (piece_search.c) */
QC_NODISCARD qc_status qc_search_prepare(qc_worker *w, qc_error *err);
/* Buffers of an opened job whose scales are searched, or calibrated: `sampled` 0; under
 * finish_lock. (piece_search.c) */
QC_NODISCARD qc_status qc_search_open(const qc_job *j, int sampled, qc_job_work *s, qc_error *err);
/* Takes part in finding the job's offset and waits until it is known. (piece_search.c) */
QC_NODISCARD qc_status qc_search_offset(qc_worker *w, uint32_t job, qc_error *err);
/* Elements [first, first + n), whole groups or rows, at source; codes to `codes`, the rest to the
 * job's state. (piece_search.c) */
void qc_search_step(qc_worker *w, uint32_t job, const void *source, uint64_t first, uint64_t n,
                    void *codes, qc_piece_sums *sums);
/* Does the job's weight come from the store? (piece_calibrated.c) */
int qc_job_is_calibrated(const qc_pipeline *p, uint32_t job);
/* As qc_search_step, of such a weight. QC_ERR_CHECK where the store is damaged.
 * (piece_calibrated.c) */
QC_NODISCARD qc_status qc_calibrated_step(qc_worker *w, uint32_t job, const void *source,
                                          uint64_t first, uint64_t n, void *codes,
                                          qc_piece_sums *sums, qc_error *err);
/* As qc_piece_make, for a stack of experts written transposed. (stack_work.c) */
QC_NODISCARD qc_status qc_stack_make(qc_worker *w, qc_unit *u, qc_error *err);
/* All main pieces are done: double quantization, errors, state. (job_finish.c) */
QC_NODISCARD qc_status qc_job_finish(qc_worker *w, uint32_t job, qc_error *err);
/* Opens a shard's file, if it is not open. (shard_files.c) */
QC_NODISCARD qc_status qc_shard_open(qc_pipeline *p, uint32_t shard, qc_error *err);
/* All frames of a shard are written and recorded: completes its file. (shard_files.c) */
QC_NODISCARD qc_status qc_shard_finish(qc_pipeline *p, uint32_t shard, qc_error *err);
/* Closes a complete shard, which the syncer has brought to the disk. (shard_files.c) */
QC_NODISCARD qc_status qc_shard_close(qc_pipeline *p, uint32_t shard, qc_error *err);
/* Is this part of a job still to be written, in its turn? (job_finish.c) */
int qc_job_awaits(const qc_pipeline *p, uint32_t job, qc_part part);
/* Take `bytes` bytes of such a part, as qc_job_part gave them, into a job that was finished by an
 * earlier run. QC_ERR_INPUT for another size. (job_finish.c) */
QC_NODISCARD qc_status qc_job_take_part(qc_pipeline *p, uint32_t job, qc_part part, const void *src,
                                        size_t bytes, qc_error *err);
/* Does such a part come from the job's state, or is it the same in every output? (job_finish.c) */
int qc_job_part_is_own(qc_part part);
/* Digest of the source of a main unit, as qc_piece_make has it, from the source as it is now.
 * (piece_work.c) */
QC_NODISCARD qc_status qc_piece_source(qc_worker *w, const qc_unit *u, qc_digest *out,
                                       qc_error *err);
/* The same where the bytes are the unit's share of the stored tensor. (stack_work.c) */
QC_NODISCARD qc_status qc_stack_source(qc_worker *w, const qc_unit *u, qc_digest *out,
                                       qc_error *err);
/* Bytes of a derived tensor of a finished job. (job_finish.c) */
const void *qc_job_part(const qc_pipeline *p, uint32_t job, qc_part part);
void qc_job_release(qc_job_state *s);
/* s->work, if it is not there yet. (job_finish.c) */
QC_NODISCARD qc_status qc_job_need_work(qc_job_state *s, qc_error *err);
/* Frees what no derived tensor still to be written needs. The last of them may come much later: in
 * a shard all int8 codes lie before the state of the first weight. (job_finish.c) */
void qc_job_trim(const qc_pipeline *p, uint32_t job);

#endif
