/* The frames of an output: found, read, checked and decoded in one place. What verifies, unpacks,
 * compares or loads an output is a client of this (docs/architecture.md).
 *
 *   begin   says which shards of a manifest it is about: all, or those of one device
 *   open    one shard: it is there and has the size that it should have
 *   list    its frames, by its seek table and the manifest; in a plain output the pieces of its
 *           tensors take their place, which are stored as they are
 *   header  what the shard says of its tensors is what the manifest says
 *   run     a team of threads reads a range of them, of a device, a tensor or a header, and hands
 *           each on; the client says where its content goes, or that it is not wanted
 *
 * The tensors of a checkpoint without a manifest are read in the same way, in pieces that the
 * caller chooses (qc_output_frames_of_checkpoint, then run).
 *
 * A frame belongs to one tensor or to the header of a shard. Damage is QC_ERR_CHECK; messages about
 * a shard begin with its path, and those about a header with "header of NAME".
 *
 * Memory: 32 bytes a frame and 8 a tensor. A thread has one frame as it is stored.
 * Source: docs/format.md, sections 2, 4 and 5. */
#ifndef QC_FORMATS_OUTPUT_FRAMES_H
#define QC_FORMATS_OUTPUT_FRAMES_H

#include "formats/checkpoint.h"
#include "formats/manifest.h"
#include "formats/seekable.h"

#define QC_HEADER_FRAME UINT32_MAX

typedef struct {
    uint64_t offset; /* in the file */
    uint64_t at;     /* in the content of its tensor or header */
    uint32_t stored_bytes, content_bytes;
    uint32_t shard;  /* index among the shards chosen */
    uint32_t tensor; /* index among their tensors, or QC_HEADER_FRAME */
} qc_output_frame;

/* Neighbouring frames: of a tensor, or of a header. */
typedef struct {
    uint32_t first, count;
} qc_frame_range;

typedef struct {
    qc_file file;
    char *path; /* owned; known once it was to be opened */
    uint64_t file_bytes;
    size_t first, end; /* its tensors, of those chosen */
    qc_frame_range header;
    int listed; /* its frames are known */
} qc_output_shard;

typedef struct {
    const char *dir;
    const qc_manifest *m;            /* NULL with a checkpoint */
    const qc_checkpoint *checkpoint; /* NULL with a manifest */
    const char *device; /* messages say that it needs the shards; NULL: nobody is named */
    size_t first_shard, first_tensor; /* indices in the manifest of the first chosen */
    qc_output_shard *shards;
    size_t shard_count;
    qc_frame_range *tensors;
    size_t tensor_count;
    qc_output_frame *frames;
    size_t frame_count;
    size_t max_stored, max_content;
} qc_output_frames;

/* Chooses `shards` shards of m from first_shard on, and their tensors. dir and m are borrowed. Call
 * deinit also where it failed. */
QC_NODISCARD qc_status qc_output_frames_begin(qc_output_frames *f, const char *dir,
                                              const qc_manifest *m, size_t first_shard,
                                              size_t shards, qc_error *err);
void qc_output_frames_deinit(qc_output_frames *f);
/* Lists the tensors of a checkpoint, which is borrowed, piece_bytes[i] of the i-th at a time; of
 * those that have 0 there, nothing. */
QC_NODISCARD qc_status qc_output_frames_of_checkpoint(qc_output_frames *f, const qc_checkpoint *c,
                                                      const uint64_t *piece_bytes, qc_error *err);
/* Shards are numbered from the first that is chosen. A shard that failed has no frames. */
QC_NODISCARD qc_status qc_output_frames_open(qc_output_frames *f, size_t shard, qc_error *err);
QC_NODISCARD qc_status qc_output_frames_list(qc_output_frames *f, size_t shard, qc_error *err);
QC_NODISCARD qc_status qc_output_frames_header(const qc_output_frames *f, size_t shard,
                                               qc_error *err);

/* Returns the row of a tensor, which is numbered from the first that is chosen. */
const qc_manifest_tensor *qc_output_row(const qc_output_frames *f, size_t tensor);
/* Prefixes a message with "tensor 'NAME' in FILE". */
void qc_output_tell_tensor(const qc_output_frames *f, size_t tensor, qc_error *err);

/* ---- reading -------------------------------------------------------------------------------- */

/* A run over neighbouring frames. Where it hashes nothing, each frame has its own checksum checked,
 * which plain outputs do not have. */
typedef struct {
    qc_frame_range range;
    unsigned threads;   /* at most so many, and at least 1 */
    qc_digest *stored;  /* gets the digest of each frame's bytes in the file; NULL: none are made */
    qc_digest *content; /* gets those of the contents, and checksums are checked, too; needs stored;
                           NULL: none are made */
} qc_frames_job;

/* Who gets the frames of a run; every function may be NULL. A worker has one frame at a time; any
 * status other than QC_OK ends the run. */
typedef struct {
    /* Sets *dst to where the content goes; without that the frame is passed over. Without this
     * function each worker has a buffer. */
    qc_status (*room)(void *ctx, unsigned worker, const qc_output_frame *frame, void **dst,
                      qc_error *err);
    qc_status (*put)(void *ctx, unsigned worker, const qc_output_frame *frame, void *content,
                     qc_error *err);
    /* Gets a frame that cannot be decoded, which then ends nothing. */
    void (*broken)(void *ctx, const qc_output_frame *frame);
    /* A worker ends early; each that does says so. */
    void (*failed)(void *ctx);
    int ahead; /* the system is told which frames come next */
} qc_frames_client;

/* Several runs over the same frames may go on at once. */
QC_NODISCARD qc_status qc_output_frames_run(const qc_output_frames *f, const qc_frames_job *job,
                                            const qc_frames_client *client, void *ctx,
                                            qc_error *err);

#endif
