#include "kernels/cuda_upload.h"

#include "base/alloc.h"
#include "base/checked.h"

#define SLOTS 2u

typedef struct {
    unsigned char *slots[SLOTS];
    qc_cuda_event copied[SLOTS];
    int sent[SLOTS]; /* there is a copy to wait for */
    qc_cuda_stream stream;
    unsigned next; /* slot that room gives */
} upload_worker;

struct qc_cuda_upload {
    qc_cuda_device device;
    unsigned count;
    size_t slot_bytes;
    unsigned char *pinned;
    upload_worker *workers;
};

static qc_status set_up(qc_cuda_upload *u, qc_error *err)
{
    uint64_t bytes = 0;
    if (qc_mul_u64(SLOTS * (uint64_t)u->count, u->slot_bytes, &bytes) || bytes > SIZE_MAX)
        QC_FAIL(err, QC_ERR_NOMEM,
                "%u threads with slots of %zu bytes need more pinned memory than can be addressed",
                u->count, u->slot_bytes);
    QC_TRY(qc_calloc(&u->workers, u->count, sizeof *u->workers, err));
    QC_TRY(qc_cuda_use(&u->device, err));
    QC_TRY(qc_cuda_host_malloc(&u->pinned, (size_t)bytes, err));
    for (unsigned i = 0; i < u->count; i++) {
        upload_worker *w = &u->workers[i];
        QC_TRY(qc_cuda_stream_create(&w->stream, err));
        for (unsigned k = 0; k < SLOTS; k++) {
            w->slots[k] = u->pinned + (SLOTS * (size_t)i + k) * u->slot_bytes;
            QC_TRY(qc_cuda_event_create(&w->copied[k], 0, err));
        }
    }
    return QC_OK;
}

qc_status qc_cuda_upload_create(qc_cuda_upload **out, const qc_cuda_device *device,
                                unsigned workers, size_t slot_bytes, qc_error *err)
{
    qc_cuda_upload *u;
    *out = NULL;
    if (workers == 0 || slot_bytes == 0)
        QC_FAIL(
            err, QC_ERR_USAGE,
            "an upload needs at least one thread and slots of at least one byte, not %u and %zu",
            workers, slot_bytes);
    QC_TRY(qc_calloc(&u, 1, sizeof *u, err));
    u->device = *device;
    u->count = workers;
    u->slot_bytes = slot_bytes;
    qc_status st = set_up(u, err);
    if (st != QC_OK) {
        qc_cuda_upload_destroy(u);
        return st;
    }
    *out = u;
    return QC_OK;
}

void qc_cuda_upload_destroy(qc_cuda_upload *u)
{
    if (!u)
        return;
    for (unsigned i = 0; u->workers && i < u->count; i++) {
        /* Pinned memory must not be freed while it is read. A stream that fails has stopped. */
        if (u->workers[i].stream && qc_cuda_stream_synchronize(u->workers[i].stream, NULL) != QC_OK)
            continue;
    }
    for (unsigned i = 0; u->workers && i < u->count; i++) {
        for (unsigned k = 0; k < SLOTS; k++)
            qc_cuda_event_destroy(u->workers[i].copied[k]);
        qc_cuda_stream_destroy(u->workers[i].stream);
    }
    qc_cuda_host_free(u->pinned);
    qc_free(u->workers);
    qc_free(u);
}

qc_status qc_cuda_upload_room(qc_cuda_upload *u, unsigned worker, void **pinned, qc_error *err)
{
    upload_worker *w = &u->workers[worker];
    *pinned = NULL;
    QC_TRY(qc_cuda_use(&u->device, err)); /* this may be the first call in this thread */
    if (w->sent[w->next])
        QC_TRY(qc_cuda_event_synchronize(w->copied[w->next], err));
    w->sent[w->next] = 0;
    *pinned = w->slots[w->next];
    return QC_OK;
}

qc_status qc_cuda_upload_send(qc_cuda_upload *u, unsigned worker, void *device, size_t bytes,
                              qc_error *err)
{
    upload_worker *w = &u->workers[worker];
    if (bytes > u->slot_bytes)
        QC_FAIL(err, QC_ERR_INTERNAL, "%zu bytes are to be sent from a slot of %zu", bytes,
                u->slot_bytes);
    QC_TRY(qc_cuda_to_device(device, w->slots[w->next], bytes, w->stream, err));
    QC_TRY(qc_cuda_event_record(w->copied[w->next], w->stream, err));
    w->sent[w->next] = 1;
    w->next = (w->next + 1) % SLOTS;
    return QC_OK;
}

qc_status qc_cuda_upload_finish(qc_cuda_upload *u, qc_error *err)
{
    QC_TRY(qc_cuda_use(&u->device, err));
    for (unsigned i = 0; i < u->count; i++) {
        QC_TRY(qc_cuda_stream_synchronize(u->workers[i].stream, err));
        for (unsigned k = 0; k < SLOTS; k++)
            u->workers[i].sent[k] = 0;
    }
    return QC_OK;
}
