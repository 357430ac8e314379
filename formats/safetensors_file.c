/* One address space for both kinds of file: content bytes 0 .. 8 + N + data.
 *
 *   plain       content byte = file byte: pread
 *   compressed  content byte -> frame by the seek table -> decode
 *
 * A read that covers whole frames decodes them into the caller's memory. Only what is left at the
 * two ends goes through the cursor's own frame, which stays there for the next read: so reading a
 * tensor from start to end in several calls decodes each frame once. A zstd magic number can never
 * be a valid header length (it would be above QC_ST_MAX_HEADER_BYTES), so the first four bytes
 * decide. */
#include "formats/safetensors_file.h"

#include "base/alloc.h"
#include "base/bytes.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#define HEAD_BYTES          64u /* enough to recognise files that are not safetensors */
#define ZSTD_MAGIC          0xfd2fb528u
#define ZSTD_SKIPPABLE      0x184d2a50u
#define ZSTD_SKIPPABLE_MASK 0xfffffff0u
#define NO_FRAME            SIZE_MAX

struct qc_st_cursor {
    qc_frame_coder *coder;
    qc_buffer stored;  /* one frame as it lies in the file */
    qc_buffer content; /* one frame decoded: frame number `frame` of opening `serial` */
    uint64_t serial;
    size_t frame;             /* NO_FRAME when there is none */
    qc_direct_reader *direct; /* or NULL */
    void *kept;               /* or NULL */
    void (*release)(void *);
};

static atomic_uint_fast64_t next_serial = 1;

qc_status qc_st_cursor_create(qc_st_cursor **out, qc_error *err)
{
    *out = NULL;
    qc_st_cursor *c = NULL;
    QC_TRY(qc_calloc(&c, 1, sizeof *c, err));
    c->frame = NO_FRAME;
    qc_status st = qc_frame_coder_create(&c->coder, err);
    if (st != QC_OK) {
        qc_st_cursor_destroy(c);
        return st;
    }
    *out = c;
    return QC_OK;
}

static void release_kept(qc_st_cursor *c)
{
    if (c->kept)
        c->release(c->kept);
    qc_free(c->kept);
    c->kept = NULL;
}

qc_status qc_st_cursor_keep(void **out, qc_st_cursor *c, size_t bytes, void (*release)(void *),
                            qc_error *err)
{
    if (c->kept && c->release != release)
        release_kept(c);
    c->release = release;
    if (!c->kept)
        QC_TRY(qc_calloc(&c->kept, 1, bytes, err));
    *out = c->kept;
    return QC_OK;
}

void qc_st_cursor_destroy(qc_st_cursor *c)
{
    if (!c)
        return;
    release_kept(c);
    qc_frame_coder_destroy(c->coder);
    qc_free(c->stored.data);
    qc_free(c->content.data);
    qc_free(c);
}

void qc_st_cursor_use_direct(qc_st_cursor *c, qc_direct_reader *d)
{
    c->direct = d;
}

/* Reads stored bytes of f, with the cursor's direct reader if they are in its range. c may be
 * NULL. */
static qc_status read_stored(const qc_st_cursor *c, const qc_file *f, void *dst, size_t len,
                             uint64_t offset, qc_error *err)
{
    if (c && c->direct && qc_direct_read(c->direct, f, dst, len, offset))
        return QC_OK;
    return qc_file_pread(f, dst, len, offset, err);
}

static qc_status decode_frame(const qc_st_file *f, qc_st_cursor *c, size_t index, void *dst,
                              qc_error *err)
{
    const qc_frame *fr = &f->seek.frames[index];
    QC_TRY(qc_buffer_room(&c->stored, fr->stored_bytes, 1, err));
    QC_TRY(read_stored(c, &f->file, c->stored.data, fr->stored_bytes, fr->stored_offset, err));
    qc_status st =
        qc_frame_decode(c->coder, c->stored.data, fr->stored_bytes, dst, fr->content_bytes, err);
    if (st != QC_OK)
        qc_error_prefix(err, "%s: frame %zu at byte %" PRIu64, f->file.path, index,
                        fr->stored_offset);
    return st;
}

/* Reads len content bytes at offset; the caller has checked that they exist. */
static qc_status read_content(const qc_st_file *f, qc_st_cursor *c, uint64_t offset, void *dst,
                              size_t len, qc_error *err)
{
    unsigned char *to = dst;
    if (len == 0)
        return QC_OK;
    if (!f->compressed)
        return read_stored(c, &f->file, dst, len, offset, err);
    for (size_t i = qc_seek_table_find(&f->seek, offset); len != 0; i++) {
        const qc_frame *fr = &f->seek.frames[i];
        size_t skip = (size_t)(offset - fr->content_offset);
        size_t n = fr->content_bytes - skip;
        int cached = c->frame == i && c->serial == f->serial;
        if (n > len)
            n = len;
        if (n == 0)
            continue; /* a frame of no content may stand anywhere */
        if (n == fr->content_bytes && !cached) {
            QC_TRY(decode_frame(f, c, i, to, err));
        } else {
            if (!cached) {
                c->frame = NO_FRAME;
                QC_TRY(qc_buffer_room(&c->content, fr->content_bytes, 1, err));
                QC_TRY(decode_frame(f, c, i, c->content.data, err));
                c->frame = i;
                c->serial = f->serial;
            }
            memcpy(to, (const unsigned char *)c->content.data + skip, n);
        }
        to += n;
        offset += n;
        len -= n;
    }
    return QC_OK;
}

/* Reads the header of a file whose content has content_bytes. Unless `whole`, the data may be cut
 * off. */
static qc_status read_header(qc_st_file *f, qc_st_cursor *c, uint64_t content_bytes, int whole,
                             qc_error *err)
{
    unsigned char head[HEAD_BYTES];
    size_t head_len = content_bytes < sizeof head ? (size_t)content_bytes : sizeof head;
    uint64_t n = 0;
    void *json = NULL;
    QC_TRY(read_content(f, c, 0, head, head_len, err));
    qc_status st = qc_st_header_length(head, head_len, content_bytes, &n, err);
    if (st == QC_OK) {
        QC_TRY(qc_malloc(&json, (size_t)n, err));
        st = read_content(f, c, 8, json, (size_t)n, err);
        if (st != QC_OK) {
            qc_free(json);
            return st;
        }
        f->data_offset = 8 + n;
        st = qc_st_header_parse(&f->header, json, (size_t)n,
                                whole ? content_bytes - f->data_offset : QC_ST_ANY_BYTES, err);
        qc_free(json);
    }
    if (st != QC_OK)
        qc_error_prefix(err, "%s", f->file.path);
    return st;
}

static qc_status open_file(qc_st_file *out, const char *path, int whole, qc_error *err)
{
    unsigned char magic[4] = {0};
    qc_st_cursor *c = NULL;
    qc_status st = QC_OK;
    memset(out, 0, sizeof *out);
    out->file = QC_FILE_CLOSED;
    out->serial = atomic_fetch_add(&next_serial, 1);
    QC_TRY_GOTO(st, done, qc_file_open_read(&out->file, path, err));
    QC_TRY_GOTO(st, done, qc_file_stamp_take(&out->stamp, &out->file, err));
    out->file_bytes = out->stamp.bytes;
    /* Nothing behind the header is read yet, and perhaps nothing ever will be. */
    qc_file_hint_guess(&out->file, 0);
    if (out->file_bytes >= sizeof magic)
        QC_TRY_GOTO(st, done, qc_file_pread(&out->file, magic, sizeof magic, 0, err));
    const uint32_t first = qc_load_le32(magic);
    out->compressed = first == ZSTD_MAGIC || (first & ZSTD_SKIPPABLE_MASK) == ZSTD_SKIPPABLE;
    if (out->compressed) {
        QC_TRY_GOTO(st, done, qc_seek_table_read(&out->seek, &out->file, err));
        QC_TRY_GOTO(st, done, qc_st_cursor_create(&c, err));
        st = read_header(out, c, out->seek.content_bytes, whole, err);
    } else {
        st = read_header(out, NULL, out->file_bytes, whole, err);
    }
    qc_file_hint_guess(&out->file, 1);
done:
    qc_st_cursor_destroy(c);
    if (st != QC_OK)
        qc_st_file_close(out);
    return st;
}

qc_status qc_st_file_open(qc_st_file *out, const char *path, qc_error *err)
{
    return open_file(out, path, 1, err);
}

qc_status qc_st_file_open_cut(qc_st_file *out, const char *path, qc_error *err)
{
    return open_file(out, path, 0, err);
}

void qc_st_file_close(qc_st_file *f)
{
    if (!f)
        return;
    qc_st_header_deinit(&f->header);
    qc_seek_table_deinit(&f->seek);
    qc_file_discard(&f->file);
    memset(f, 0, sizeof *f);
    f->file = QC_FILE_CLOSED;
}

qc_status qc_st_file_read(const qc_st_file *f, qc_st_cursor *c, uint64_t offset, void *dst,
                          size_t len, qc_error *err)
{
    if (offset > f->header.data_bytes || len > f->header.data_bytes - offset)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: %zu bytes at %" PRIu64 " were asked for, but the data has %" PRIu64 " bytes",
                f->file.path, len, offset, f->header.data_bytes);
    return read_content(f, c, f->data_offset + offset, dst, len, err);
}

qc_status qc_st_file_read_header(const qc_st_file *f, qc_st_cursor *c, void *dst, qc_error *err)
{
    return read_content(f, c, 0, dst, (size_t)f->data_offset, err);
}
