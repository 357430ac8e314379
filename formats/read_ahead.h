/* Reading ahead of a team of readers, and giving the page cache back what it held before.
 *
 * Work comes as items 0 .. count - 1, each of which reads one range of one file; readers take items
 * in about this order. Whoever takes an item asks the system for the ranges of the next ones, until
 * `window` bytes are on their way, in requests that every file system carries out whole. When an
 * item was read, its pages are given back, if none of them was in the page cache when they were
 * asked for: what somebody else had there stays. So a file of any size goes through a cache of one
 * window.
 *
 *        done            taken          asked for (window)
 *   .....gone.....[ reading reading ][ coming coming coming ]............
 *
 * Items of one group may be read in any order once its first one was taken (samples of a tensor):
 * what is cached of a group is looked at before that.
 *
 * The kernel's own read-ahead is switched off for the files: what it brings in was not asked for
 * here, and would be taken for somebody else's.
 *
 * Thread-safe but for init and deinit. All of it is advice: nothing here fails but for memory. */
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

/* The range of an item; a pure function of it. */
typedef qc_read_range (*qc_read_range_fn)(void *ctx, uint32_t item);

typedef struct {
    qc_read_range_fn range;
    void *ctx;
    uint32_t count;
    uint64_t window_bytes;
    int give_back;
    atomic_int direct;
    pthread_mutex_t lock; /* a leaf lock; protects what follows, but not what is atomic */
    int have_lock;
    uint32_t looked;            /* items before this one were looked at */
    uint32_t passed;            /* items before this one are behind the furthest taken */
    uint64_t ahead_bytes;       /* asked for, not passed */
    unsigned char *fresh;       /* per item: nothing of it was cached; set before it is asked for */
    atomic_uint_fast32_t asked; /* items before this one were asked for */
    atomic_uint_fast32_t furthest; /* one past the last item taken */
} qc_read_ahead;

/* give_back 0: pages stay. direct, with give_back: what is not cached is read by the callers past
 * the cache, so only the rest is asked for. */
QC_NODISCARD qc_status qc_read_ahead_init(qc_read_ahead *r, uint32_t count, qc_read_range_fn range,
                                          void *ctx, uint64_t window_bytes, int give_back,
                                          int direct, qc_error *err);
void qc_read_ahead_deinit(qc_read_ahead *r); /* also of a zeroed one */
/* The caller is about to read an item. */
void qc_read_ahead_take(qc_read_ahead *r, uint32_t item);
/* 1: nothing of an item that was taken was cached, and its range is not asked for (direct): the
 * caller reads it past the cache, or says that it cannot: it and all that follow are asked for. */
int qc_read_ahead_is_direct(const qc_read_ahead *r, uint32_t item, qc_read_range *range);
void qc_read_ahead_no_direct(qc_read_ahead *r, uint32_t item);
/* And has read it. */
void qc_read_ahead_done(qc_read_ahead *r, uint32_t item);

#endif
