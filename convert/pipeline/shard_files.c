/* The staged files of shards. The worker that first writes to one opens it, the worker that records
 * its last frame completes it with a seek table, and it is closed once it is on the disk. */
#include "convert/pipeline/pipeline_internal.h"

#include "base/alloc.h"

/* This many complete shards stay open until the syncer has been there, because the kernel forgets
 * that a page could not be written when nobody has the file open. Where one round has more of them,
 * they are small. */
#define OPEN_COMPLETE 8u

qc_status qc_shard_open(qc_pipeline *p, uint32_t shard, qc_error *err)
{
    qc_shard_state *s = &p->shards[shard];
    qc_status st = QC_OK;
    pthread_mutex_lock(&p->shard_lock);
    if (s->file.fd < 0)
        st = qc_file_open_update(&s->file, s->path, err);
    pthread_mutex_unlock(&p->shard_lock);
    return st;
}

static qc_status write_table(qc_pipeline *p, uint32_t shard, qc_error *err)
{
    qc_shard_state *s = &p->shards[shard];
    void *v = NULL;
    qc_strbuf table;
    qc_strbuf_init(&table, SIZE_MAX / 2);
    QC_TRY(qc_calloc(&v, s->unit_count, sizeof(qc_frame), err));
    qc_frame *frames = v;
    uint64_t content = 0;
    for (uint32_t i = 0; i < s->unit_count; i++) {
        const qc_unit u = qc_unit_of(p, s->first_unit + i);
        frames[i] = (qc_frame){u.file_offset, content, u.stored_bytes, u.content_bytes};
        content += u.content_bytes;
    }
    qc_status st = qc_seek_table_build(&table, frames, s->unit_count, err);
    if (st == QC_OK)
        st = qc_file_pwrite(&s->file, table.data, table.len, s->next_offset, err);
    if (st == QC_OK) {
        s->table = qc_digest_bytes(table.data, table.len);
        s->table_bytes = table.len;
        s->file_bytes = s->next_offset + table.len;
    }
    qc_strbuf_deinit(&table);
    qc_free(frames);
    return st;
}

qc_status qc_shard_finish(qc_pipeline *p, uint32_t shard, qc_error *err)
{
    qc_shard_state *s = &p->shards[shard];
    const qc_shard *sh = &p->plan->layout.shards[shard];
    s->file_bytes = sh->header_bytes + sh->data_bytes;
    QC_TRY(qc_shard_open(p, shard, err));
    if (qc_pipeline_is_compressed(p))
        QC_TRY(write_table(p, shard, err));
    QC_TRY(
        qc_file_resize(&s->file, s->file_bytes, err)); /* an earlier run may have written further */
    if (p->recorder)
        QC_TRY(p->recorder->shard(p->recorder->ctx, shard, err));
    if (atomic_fetch_add(&p->waiting, 1) >= OPEN_COMPLETE)
        QC_TRY(qc_shard_close(p, shard, err));
    else
        atomic_store(&s->complete, 1);
    atomic_store(&s->news, 1);
    return QC_OK;
}

qc_status qc_shard_close(qc_pipeline *p, uint32_t shard, qc_error *err)
{
    pthread_mutex_lock(&p->shard_lock);
    qc_status st = qc_file_close(&p->shards[shard].file, err);
    pthread_mutex_unlock(&p->shard_lock);
    atomic_fetch_sub(&p->waiting, 1);
    return st;
}
