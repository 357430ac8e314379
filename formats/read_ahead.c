#include "formats/read_ahead.h"

#include "base/alloc.h"
#include "base/workers.h"

#include <string.h>

qc_status qc_read_ahead_init(qc_read_ahead *r, uint32_t count, qc_read_range_fn range, void *ctx,
                             uint64_t window_bytes, int give_back, int direct, qc_error *err)
{
    void *v = NULL;
    memset(r, 0, sizeof *r);
    r->range = range;
    r->ctx = ctx;
    r->count = count;
    r->window_bytes = window_bytes;
    r->give_back = give_back;
    atomic_init(&r->direct, give_back && direct);
    atomic_init(&r->furthest, 0);
    atomic_init(&r->asked, 0);
    QC_TRY(qc_calloc(&v, count, 1, err));
    r->fresh = v;
    QC_TRY(qc_lock_init(&r->lock, NULL, err));
    r->have_lock = 1;
    return QC_OK;
}

void qc_read_ahead_deinit(qc_read_ahead *r)
{
    if (r->have_lock)
        pthread_mutex_destroy(&r->lock);
    qc_free(r->fresh);
    memset(r, 0, sizeof *r);
}

/* Finds out whether item `first` and the rest of its group are cached. */
static void look_at_group(qc_read_ahead *r, uint32_t first, uint32_t group)
{
    for (r->looked = first; r->looked < r->count; r->looked++) {
        qc_read_range a = r->range(r->ctx, r->looked);
        if (!a.file)
            continue;
        if (a.group != group)
            break;
        qc_file_hint_guess(a.file, 0);
        r->fresh[r->looked] = (unsigned char)qc_file_is_uncached(a.file, a.offset, a.bytes);
    }
}

static void ask_for_next(qc_read_ahead *r)
{
    uint32_t item = (uint32_t)atomic_load(&r->asked);
    qc_read_range a = r->range(r->ctx, item);
    if (a.file) {
        if (r->give_back && item >= r->looked)
            look_at_group(r, item, a.group);
        if (!r->fresh[item] || !atomic_load(&r->direct))
            qc_file_hint_read_soon(a.file, a.offset, a.bytes);
        r->ahead_bytes += a.bytes;
    }
    atomic_store(&r->asked, item + 1);
}

void qc_read_ahead_take(qc_read_ahead *r, uint32_t item)
{
    uint_fast32_t seen = atomic_load(&r->furthest);
    while (seen <= item && !atomic_compare_exchange_weak(&r->furthest, &seen, item + 1)) {
    }
    /* Asking may have to wait for a busy device. One thread asks at a time, and the others go on,
     * but not before their item was looked at: what they read would look like somebody else's
     * pages. */
    if (atomic_load(&r->asked) <= item)
        pthread_mutex_lock(&r->lock);
    else if (pthread_mutex_trylock(&r->lock) != 0)
        return;
    for (const uint32_t furthest = (uint32_t)atomic_load(&r->furthest); r->passed < furthest;
         r->passed++) {
        if (r->passed == atomic_load(&r->asked))
            ask_for_next(r);
        qc_read_range a = r->range(r->ctx, r->passed);
        if (a.file)
            r->ahead_bytes -= a.bytes;
    }
    while (atomic_load(&r->asked) < r->count && r->ahead_bytes < r->window_bytes)
        ask_for_next(r);
    pthread_mutex_unlock(&r->lock);
}

int qc_read_ahead_is_direct(const qc_read_ahead *r, uint32_t item, qc_read_range *range)
{
    if (!atomic_load(&r->direct) || !r->fresh[item])
        return 0;
    *range = r->range(r->ctx, item);
    return 1;
}

void qc_read_ahead_no_direct(qc_read_ahead *r, uint32_t item)
{
    qc_read_range a = r->range(r->ctx, item);
    atomic_store(&r->direct, 0);
    qc_file_hint_read_soon(a.file, a.offset, a.bytes);
}

void qc_read_ahead_done(qc_read_ahead *r, uint32_t item)
{
    if (!r->give_back || !r->fresh[item])
        return;
    qc_read_range a = r->range(r->ctx, item);
    qc_file_hint_done(a.file, a.offset, a.bytes);
}
