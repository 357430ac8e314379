#include "formats/shard_frames.h"

#include "base/alloc.h"
#include "base/checked.h"

static qc_status check_digest(const qc_seek_table *table, const qc_file *f,
                              const qc_manifest_shard *s, qc_error *err)
{
    void *v = NULL;
    int same = 0;
    if (table->table_bytes == s->table_bytes) {
        QC_TRY(qc_malloc(&v, (size_t)table->table_bytes, err));
        qc_status st = qc_file_pread(f, v, (size_t)table->table_bytes, table->table_offset, err);
        if (st == QC_OK) {
            qc_digest d = qc_digest_bytes(v, (size_t)table->table_bytes);
            same = qc_digest_equal(&d, &s->table);
        }
        qc_free(v);
        QC_TRY(st);
    }
    if (!same)
        QC_FAIL(err, QC_ERR_CHECK, "%s: its seek table is not the one that was written", f->path);
    return QC_OK;
}

/* Checks that the frames from *frame on hold `bytes` of content in `stored` bytes of the file; each
 * but the last must hold one piece (0: any size). */
static int take_frames(const qc_seek_table *table, size_t *frame, uint64_t bytes, uint64_t piece,
                       uint64_t stored)
{
    uint64_t content_sum = 0, stored_sum = 0;
    while (content_sum < bytes) {
        if (*frame == table->count)
            return 0;
        const qc_frame *f = &table->frames[(*frame)++];
        uint64_t left = bytes - content_sum, want = qc_min_u64(left, piece);
        if (f->content_bytes == 0 || f->content_bytes > left || (piece && f->content_bytes != want))
            return 0;
        content_sum += f->content_bytes;
        stored_sum += f->stored_bytes;
    }
    return stored_sum == stored;
}

/* The tensors' frames then begin where the manifest says, because the manifest was checked to lay
 * them one after another behind the header's. */
static int are_listed(qc_shard_frames *s, const qc_manifest *m, size_t shard, size_t first,
                      size_t end)
{
    const qc_manifest_shard *sh = &m->shards[shard];
    size_t frame = 0;
    if (!take_frames(&s->table, &frame, sh->header_bytes, 0, sh->header_stored_bytes))
        return 0;
    s->header_frames = frame;
    for (size_t i = first; i < end; i++) {
        const qc_manifest_tensor *t = &m->tensors[i];
        if (!take_frames(&s->table, &frame, t->end - t->begin, t->piece_bytes, t->stored_bytes))
            return 0;
    }
    return frame == s->table.count;
}

qc_status qc_shard_frames_read(qc_shard_frames *out, const qc_file *f, const qc_manifest *m,
                               size_t shard, size_t first, size_t end, qc_error *err)
{
    *out = (qc_shard_frames){0};
    qc_status st = qc_seek_table_read(&out->table, f, err);
    if (st == QC_ERR_INPUT || st == QC_ERR_TRUNCATED)
        st = qc_error_recode(err, QC_ERR_CHECK); /* it was right once */
    if (st == QC_OK)
        st = check_digest(&out->table, f, &m->shards[shard], err);
    if (st == QC_OK && !are_listed(out, m, shard, first, end))
        st =
            QC_ERROR(err, QC_ERR_CHECK, "%s: its frames are not those the manifest lists", f->path);
    if (st != QC_OK)
        qc_shard_frames_deinit(out);
    return st;
}

void qc_shard_frames_deinit(qc_shard_frames *s)
{
    qc_seek_table_deinit(&s->table);
    *s = (qc_shard_frames){0};
}

/* The number fits: qc_manifest_check has made sure of it. */
uint32_t qc_shard_pieces(const qc_manifest_tensor *t)
{
    uint64_t bytes = t->end - t->begin;
    return bytes ? (uint32_t)qc_ceil_div_u64(bytes, t->piece_bytes) : 0;
}
