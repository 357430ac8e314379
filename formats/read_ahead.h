/* Reads ahead of a team of readers, and leaves in the page cache only what was there before.
 *
 * Work comes as items 0 .. count - 1, each of which reads one range of one file; readers take items
 * in about this order. Whoever takes an item asks the system for the ranges of the next ones, until
 * `window` bytes are on their way, in requests that every file system carries out whole. After an
 * item was read, its pages leave the cache again, unless some of them were in the cache before they
 * were asked for: pages that somebody else had there stay. So a file of any size goes through a
 * cache of one window.
 *
 *        done            taken          asked for (window)
 *   .....gone.....[ reading reading ][ coming coming coming ]............
 *
 * Items of one group (samples of a tensor) may be read in any order once its first one was taken.
 * What is cached of a group is found out before that.
 *
 * The kernel's own read-ahead is switched off for the files, because pages that it brought in would
 * look as if somebody else had them there.
 *
 * Thread-safe except for init and deinit. All of it is advice to the system, so it fails only where
 * memory is lacking. */
#ifndef QC_FORMATS_READ_AHEAD_H
#define QC_FORMATS_READ_AHEAD_H

#include "formats/file_io.h"

#include <pthread.h>
#include <stdatomic.h>

typedef struct {
    const qc_file *file; /* NULL: the item reads nothing worth asking for */
    uint64_t offset, bytes;
    uint32_t group;
} qc_read_range;

/* Returns the range of an item, and always the same one for it. */
typedef qc_read_range (*qc_read_range_fn)(void *ctx, uint32_t item);

typedef struct {
    qc_read_range_fn range;
    void *ctx;
    uint32_t count;
    uint64_t window_bytes;
    int give_back;
    atomic_int direct;
    pthread_mutex_t lock; /* a leaf lock; protects what follows, except for the atomic members */
    int have_lock;
    uint32_t looked;            /* items before this one were looked at */
    uint32_t passed;            /* items before this one are taken, or lie before one that is */
    uint64_t ahead_bytes;       /* bytes that were asked for and not passed */
    unsigned char *fresh;       /* per item: nothing of it was cached; set before it is asked for */
    atomic_uint_fast32_t asked; /* items before this one were asked for */
    atomic_uint_fast32_t furthest; /* one past the last item taken */
} qc_read_ahead;

/* With give_back 0 pages stay in the cache. With direct (and give_back) callers read what is not
 * cached past the cache themselves, so only the rest is asked for. */
QC_NODISCARD qc_status qc_read_ahead_init(qc_read_ahead *r, uint32_t count, qc_read_range_fn range,
                                          void *ctx, uint64_t window_bytes, int give_back,
                                          int direct, qc_error *err);
void qc_read_ahead_deinit(qc_read_ahead *r); /* r may be all zeros */
/* Call it before you read an item. */
void qc_read_ahead_take(qc_read_ahead *r, uint32_t item);
/* Returns 1 if nothing of a taken item was cached and its range is not asked for (direct): the
 * caller then reads it past the cache. A caller that cannot do that says so, and this item and all
 * that follow are asked for. */
int qc_read_ahead_is_direct(const qc_read_ahead *r, uint32_t item, qc_read_range *range);
void qc_read_ahead_no_direct(qc_read_ahead *r, uint32_t item);
/* Call it after you have read it. */
void qc_read_ahead_done(qc_read_ahead *r, uint32_t item);

#endif
