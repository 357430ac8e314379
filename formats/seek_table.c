/* The seek table: sizes of all frames, in a skippable frame at the end of the file.
 *
 *   5E 2A 4D 18 | u32 bytes that follow | entries | u32 count | u8 descriptor | B1 EA 92 8F
 *   entry: u32 stored bytes | u32 content bytes [ | u32 checksum, if descriptor bit 7 ]
 *
 * Nothing protects the table itself (zstd -t does not look into skippable frames), so everything in
 * it that can be checked is checked: the stored sizes must add up to the table's place. A wrong
 * content size shows when its frame is decoded; the manifest has a digest of the whole table. */
#include "formats/seekable.h"

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/checked.h"

#include <inttypes.h>
#include <string.h>

#define SKIPPABLE_MAGIC   0x184D2A5Eu
#define SEEKABLE_MAGIC    0x8F92EAB1u
#define HEAD_BYTES        8u
#define FOOT_BYTES        9u
#define FRAMES_MAX        0x8000000u
#define FRAME_LEAST_BYTES 8u /* an empty skippable frame; zstd frames are longer */
#define HAS_CHECKSUMS     0x80u
#define RESERVED_BITS     0x7cu
#define STEP_ENTRIES      4096u

/* Reads the size of the skippable frame and of one entry from the last 9 bytes of the file. */
static qc_status read_foot(const qc_file *f, uint64_t file_bytes, uint32_t *count,
                           uint32_t *entry_bytes, qc_error *err)
{
    unsigned char foot[FOOT_BYTES];
    if (file_bytes < HEAD_BYTES + FOOT_BYTES)
        QC_FAIL(err, QC_ERR_TRUNCATED,
                "%s has %" PRIu64 " bytes and is too short for a zstd seekable file", f->path,
                file_bytes);
    QC_TRY(qc_file_pread(f, foot, sizeof foot, file_bytes - sizeof foot, err));
    if (qc_load_le32(foot + 5) != SEEKABLE_MAGIC)
        QC_FAIL(
            err, QC_ERR_INPUT,
            "%s does not end with a seek table: it is cut short, or is not a zstd seekable file",
            f->path);
    if (foot[4] & RESERVED_BITS)
        QC_FAIL(err, QC_ERR_INPUT, "%s: seek table: reserved bits are set (descriptor 0x%02x)",
                f->path, foot[4]);
    *count = qc_load_le32(foot);
    *entry_bytes = foot[4] & HAS_CHECKSUMS ? 12 : 8;
    if (*count > FRAMES_MAX)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: the seek table lists %" PRIu32 " frames; at most %u are allowed", f->path,
                *count, FRAMES_MAX);
    return QC_OK;
}

static qc_status add_entry(qc_seek_table *t, const qc_file *f, size_t index, uint64_t *stored,
                           const unsigned char *entry, qc_error *err)
{
    qc_frame *frame = &t->frames[index];
    frame->stored_offset = *stored;
    frame->content_offset = t->content_bytes;
    frame->stored_bytes = qc_load_le32(entry);
    frame->content_bytes = qc_load_le32(entry + 4);
    if (frame->stored_bytes < FRAME_LEAST_BYTES || frame->stored_bytes > t->table_offset - *stored)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: seek table: frame %zu cannot have %" PRIu32 " bytes at offset %" PRIu64,
                f->path, index, frame->stored_bytes, *stored);
    if (frame->content_bytes > QC_FRAME_READ_MAX_BYTES)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: seek table: frame %zu holds %" PRIu32 " bytes; at most %u are supported",
                f->path, index, frame->content_bytes, QC_FRAME_READ_MAX_BYTES);
    /* Such a frame is read into memory; frames without content never are. */
    if (frame->content_bytes && frame->stored_bytes / 2 > qc_frame_bound(frame->content_bytes))
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: seek table: frame %zu has %" PRIu32 " bytes, which is too much for %" PRIu32
                " bytes of content",
                f->path, index, frame->stored_bytes, frame->content_bytes);
    *stored += frame->stored_bytes;
    t->content_bytes += frame->content_bytes; /* < 2^27 x 2^28: no overflow */
    return QC_OK;
}

static qc_status read_entries(qc_seek_table *t, const qc_file *f, uint32_t entry_bytes,
                              qc_error *err)
{
    unsigned char head[HEAD_BYTES];
    uint64_t stored = 0;
    QC_TRY(qc_file_pread(f, head, sizeof head, t->table_offset, err));
    if (qc_load_le32(head) != SKIPPABLE_MAGIC ||
        qc_load_le32(head + 4) != t->table_bytes - HEAD_BYTES)
        QC_FAIL(err, QC_ERR_INPUT, "%s: the seek table does not begin where its end says", f->path);
    unsigned char *buf = NULL;
    QC_TRY(qc_malloc(&buf, (size_t)STEP_ENTRIES * entry_bytes, err));
    qc_status st = QC_OK;
    for (size_t i = 0; i < t->count && st == QC_OK;) {
        size_t n = qc_min_size(t->count - i, STEP_ENTRIES);
        st = qc_file_pread(f, buf, n * entry_bytes,
                           t->table_offset + HEAD_BYTES + (uint64_t)i * entry_bytes, err);
        for (size_t k = 0; k < n && st == QC_OK; k++)
            st = add_entry(t, f, i + k, &stored, buf + k * entry_bytes, err);
        i += n;
    }
    qc_free(buf);
    QC_TRY(st);
    if (stored != t->table_offset)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: the frames of the seek table have %" PRIu64 " bytes, but the file has %" PRIu64
                " before it",
                f->path, stored, t->table_offset);
    return QC_OK;
}

qc_status qc_seek_table_read(qc_seek_table *out, const qc_file *f, qc_error *err)
{
    uint64_t file_bytes = 0;
    uint32_t count = 0, entry_bytes = 0;
    memset(out, 0, sizeof *out);
    QC_TRY(qc_file_size(f, &file_bytes, err));
    QC_TRY(read_foot(f, file_bytes, &count, &entry_bytes, err));
    uint64_t table_bytes = HEAD_BYTES + FOOT_BYTES + (uint64_t)count * entry_bytes;
    /* Every frame takes FRAME_LEAST_BYTES, so the size of the file bounds the memory. */
    if (table_bytes + (uint64_t)count * FRAME_LEAST_BYTES > file_bytes)
        QC_FAIL(err, QC_ERR_TRUNCATED,
                "%s: the %" PRIu32 " frames of the seek table do not fit a file of %" PRIu64
                " bytes",
                f->path, count, file_bytes);
    QC_TRY(qc_malloc(&out->frames, (size_t)count * sizeof *out->frames, err));
    out->count = count;
    out->table_bytes = table_bytes;
    out->table_offset = file_bytes - table_bytes;
    qc_status st = read_entries(out, f, entry_bytes, err);
    if (st != QC_OK)
        qc_seek_table_deinit(out);
    return st;
}

void qc_seek_table_deinit(qc_seek_table *t)
{
    if (!t)
        return;
    qc_free(t->frames);
    memset(t, 0, sizeof *t);
}

qc_status qc_seek_table_build(qc_strbuf *out, const qc_frame *frames, size_t count, qc_error *err)
{
    unsigned char buf[FOOT_BYTES];
    uint64_t stored = 0, content = 0;
    if (count > FRAMES_MAX)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "the file would have %zu frames; at most %u are allowed",
                count, FRAMES_MAX);
    for (size_t i = 0; i < count; i++) {
        if (frames[i].stored_offset != stored || frames[i].content_offset != content)
            QC_FAIL(err, QC_ERR_INTERNAL, "frame %zu does not follow the one before it", i);
        stored += frames[i].stored_bytes;
        content += frames[i].content_bytes;
    }
    qc_store_le32(buf, SKIPPABLE_MAGIC);
    qc_store_le32(buf + 4, (uint32_t)(FOOT_BYTES + 8 * count));
    qc_strbuf_put(out, buf, HEAD_BYTES);
    for (size_t i = 0; i < count; i++) {
        qc_store_le32(buf, frames[i].stored_bytes);
        qc_store_le32(buf + 4, frames[i].content_bytes);
        qc_strbuf_put(out, buf, 8);
    }
    qc_store_le32(buf, (uint32_t)count);
    buf[4] = 0;
    qc_store_le32(buf + 5, SEEKABLE_MAGIC);
    qc_strbuf_put(out, buf, FOOT_BYTES);
    return qc_strbuf_status(out, err);
}

size_t qc_seek_table_find(const qc_seek_table *t, uint64_t offset)
{
    /* Finds the last frame that begins at or before offset; frames of no content share the
     * beginning of the next one and come before it. */
    size_t low = 0, high = t->count;
    while (high - low > 1) {
        size_t mid = low + (high - low) / 2;
        if (t->frames[mid].content_offset <= offset)
            low = mid;
        else
            high = mid;
    }
    return low;
}
