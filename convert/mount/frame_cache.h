/* Decompressed frames, of which the last used ones stay in memory.
 *
 * Whoever needs a frame pins it, looks at it and lets it go. If it is not there, the caller's
 * thread makes it; threads of the cache's own make those that are wanted ahead. A frame is made
 * once, however many wait for it.
 *
 * Memory: `slots` frames of frame_bytes, each of which is allocated when it is first needed, and
 * stored_bytes for each of `threads`, as many of which make frames at once.
 * Thread-safe except for create and destroy. */
#ifndef QC_CONVERT_FRAME_CACHE_H
#define QC_CONVERT_FRAME_CACHE_H

#include "formats/seekable.h"

typedef struct {
    qc_frame_coder *coder;
    void *stored; /* room for stored_bytes */
} qc_frame_tools;

typedef struct {
    size_t frame_count;  /* frames are 0 .. frame_count - 1 */
    size_t frame_bytes;  /* of the largest */
    size_t stored_bytes; /* of the largest */
    size_t slots;        /* at least 1 */
    unsigned threads;    /* at least 1 */
    /* Makes a frame at dst. Several threads call it at once, for different frames. */
    qc_status (*make)(void *ctx, size_t frame, const qc_frame_tools *tools, void *dst,
                      qc_error *err);
    void *ctx;
} qc_frame_cache_options;

typedef struct qc_frame_cache qc_frame_cache;

QC_NODISCARD qc_status qc_frame_cache_create(qc_frame_cache **out, const qc_frame_cache_options *o,
                                             qc_error *err);
void qc_frame_cache_destroy(qc_frame_cache *c); /* NULL is fine; nothing is pinned any more */
/* The bytes stay until qc_frame_cache_unpin. A thread pins one frame at a time, because it may have
 * to wait for a slot. A frame that cannot be made is tried anew by each caller. */
QC_NODISCARD qc_status qc_frame_cache_pin(qc_frame_cache *c, size_t frame,
                                          const unsigned char **bytes, qc_error *err);
void qc_frame_cache_unpin(qc_frame_cache *c, size_t frame);
/* Asks for a frame that will be needed soon. Returns at once; errors show when it is pinned. */
void qc_frame_cache_want(qc_frame_cache *c, size_t frame);

#endif
