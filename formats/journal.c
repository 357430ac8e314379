#define XXH_INLINE_ALL
#include <xxhash.h>

#include "formats/journal.h"

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/workers.h"
#include "formats/file_io.h"

#include <inttypes.h>
#include <pthread.h>
#include <string.h>

#define HEAD_BYTES 8u /* type and length */
#define SUM_BYTES  8u

_Static_assert(HEAD_BYTES + SUM_BYTES == QC_JOURNAL_RECORD_EXTRA, "a record's frame");

struct qc_journal {
    qc_file file;
    pthread_mutex_t lock; /* protects end and the order of appends; a leaf lock */
    uint64_t end;
};

/* Returns the sum of a record that is laid out whole, except for its sum. */
static uint64_t sum_of(const unsigned char *record, size_t len, uint64_t position)
{
    return XXH3_64bits_withSeed(record, len, (XXH64_hash_t)position);
}

/* ---- Reading -------------------------------------------------------------------------------- */

/* Reads the magic. *torn is set if the file holds only the beginning of one, perhaps followed by
 * zeros where the file grew before its bytes were written. */
static qc_status check_magic(const qc_file *f, uint64_t size, int *torn, qc_error *err)
{
    static const char magic[] = QC_JOURNAL_MAGIC;
    unsigned char found[QC_JOURNAL_MAGIC_BYTES] = {0};
    size_t n = size < sizeof found ? (size_t)size : sizeof found, same = 0;
    QC_TRY(qc_file_pread(f, found, n, 0, err));
    while (same < sizeof found && found[same] == (unsigned char)magic[same])
        same++;
    *torn = same < sizeof found;
    for (size_t i = same; i < sizeof found; i++) {
        if (found[i] != 0)
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "%s does not begin as a journal of this version of qconv does: it is damaged, "
                    "or of another version",
                    f->path);
    }
    return QC_OK;
}

/* Reads the record at `at`; *whole is 0 where there is none. buf grows to hold it. */
static qc_status read_record(const qc_file *f, uint64_t size, uint64_t at, void **buf, size_t *cap,
                             qc_journal_record *r, int *whole, qc_error *err)
{
    unsigned char head[HEAD_BYTES];
    *whole = 0;
    if (size - at < QC_JOURNAL_RECORD_EXTRA)
        return QC_OK;
    QC_TRY(qc_file_pread(f, head, sizeof head, at, err));
    uint32_t bytes = qc_load_le32(head + 4);
    if (bytes > QC_JOURNAL_RECORD_MAX || bytes > size - at - QC_JOURNAL_RECORD_EXTRA)
        return QC_OK;
    size_t need = (size_t)bytes + QC_JOURNAL_RECORD_EXTRA;
    if (need > *cap) {
        QC_TRY(qc_realloc_array(buf, need, 1, err));
        *cap = need;
    }
    unsigned char *record = *buf;
    QC_TRY(qc_file_pread(f, record, need, at, err));
    if (qc_load_le64(record + need - SUM_BYTES) != sum_of(record, need - SUM_BYTES, at))
        return QC_OK;
    r->type = qc_load_le32(record);
    r->payload_bytes = bytes;
    r->payload = record + HEAD_BYTES;
    r->end = at + need;
    *whole = 1;
    return QC_OK;
}

static qc_status replay(const qc_file *f, qc_journal_fn fn, void *ctx, qc_journal_found *found,
                        qc_error *err)
{
    uint64_t size = 0;
    int torn = 0, whole = 1;
    void *buf = NULL;
    size_t cap = 0;
    memset(found, 0, sizeof *found);
    QC_TRY(qc_file_size(f, &size, err));
    QC_TRY(check_magic(f, size, &torn, err));
    found->cut_bytes = size;
    if (torn)
        return QC_OK;
    found->bytes = QC_JOURNAL_MAGIC_BYTES;
    qc_status st = QC_OK;
    while (st == QC_OK) {
        qc_journal_record r;
        st = read_record(f, size, found->bytes, &buf, &cap, &r, &whole, err);
        if (st != QC_OK || !whole)
            break;
        if (fn)
            st = fn(ctx, &r, err);
        found->bytes = r.end;
        found->records++;
    }
    found->cut_bytes = size - found->bytes;
    qc_free(buf);
    return st;
}

/* ---- Opening -------------------------------------------------------------------------------- */

static qc_status begin(qc_journal *j, qc_error *err)
{
    QC_TRY(qc_file_resize(&j->file, 0, err));
    QC_TRY(qc_file_pwrite(&j->file, QC_JOURNAL_MAGIC, QC_JOURNAL_MAGIC_BYTES, 0, err));
    QC_TRY(qc_file_sync(&j->file, err));
    j->end = QC_JOURNAL_MAGIC_BYTES;
    return qc_dir_sync_holder(j->file.path, err);
}

qc_status qc_journal_open(qc_journal **out, const char *path, qc_journal_fn fn, void *ctx,
                          qc_journal_found *found, qc_error *err)
{
    qc_journal_found own = {0};
    found = found ? found : &own;
    *out = NULL;
    qc_journal *j = NULL;
    QC_TRY(qc_calloc(&j, 1, sizeof *j, err));
    j->file = QC_FILE_CLOSED;
    qc_status st = qc_lock_init(&j->lock, NULL, err);
    if (st != QC_OK) {
        qc_free(j);
        return st;
    }
    st = qc_file_open_update(&j->file, path, err);
    if (st == QC_OK)
        st = replay(&j->file, fn, ctx, found, err);
    if (st == QC_OK) {
        j->end = found->bytes;
        if (found->bytes == 0)
            st = begin(j, err);
        else if (found->cut_bytes > 0)
            st = qc_file_resize(&j->file, found->bytes, err);
    }
    if (st != QC_OK) {
        qc_journal_close(j);
        return st;
    }
    *out = j;
    return QC_OK;
}

qc_status qc_journal_read(const char *path, qc_journal_fn fn, void *ctx, qc_journal_found *found,
                          qc_error *err)
{
    qc_file f = QC_FILE_CLOSED;
    qc_journal_found own;
    QC_TRY(qc_file_open_read(&f, path, err));
    qc_status st = replay(&f, fn, ctx, found ? found : &own, err);
    qc_file_discard(&f);
    return st;
}

/* ---- Writing -------------------------------------------------------------------------------- */

qc_status qc_journal_append(qc_journal *j, uint32_t type, const void *payload, size_t bytes,
                            qc_error *err)
{
    if (bytes > QC_JOURNAL_RECORD_MAX)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s: a record of %zu bytes is too large", j->file.path,
                bytes);
    size_t need = bytes + QC_JOURNAL_RECORD_EXTRA;
    unsigned char *record = NULL;
    QC_TRY(qc_malloc(&record, need, err));
    qc_store_le32(record, type);
    qc_store_le32(record + 4, (uint32_t)bytes);
    if (bytes > 0)
        memcpy(record + HEAD_BYTES, payload, bytes);
    pthread_mutex_lock(&j->lock);
    qc_store_le64(record + need - SUM_BYTES, sum_of(record, need - SUM_BYTES, j->end));
    qc_status st = qc_file_pwrite(&j->file, record, need, j->end, err);
    if (st == QC_OK)
        j->end += need;
    /* Whatever a failed write left behind the end is not a record. With luck cutting the file
     * removes these bytes too. */
    qc_status cut = st == QC_OK ? QC_OK : qc_file_resize(&j->file, j->end, NULL);
    (void)cut;
    pthread_mutex_unlock(&j->lock);
    qc_free(record);
    return st;
}

qc_status qc_journal_sync(qc_journal *j, qc_error *err)
{
    return qc_file_sync_data(&j->file, err);
}

void qc_journal_close(qc_journal *j)
{
    if (!j)
        return;
    qc_file_discard(&j->file);
    pthread_mutex_destroy(&j->lock);
    qc_free(j);
}
