/* Reads from the end of the file to the front: the end record, the zip64 records where they are,
 * the directory, then one local header per entry. They must lie in this order and must not overlap:
 *
 *   entries ... | directory | [zip64 record | zip64 locator] | end record | comment
 *
 * So an offset can only point to where the reader of another program looks too. */
#include "formats/torch_zip.h"

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/checked.h"
#include "base/text.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define LOCAL_SIG         0x04034b50u
#define CENTRAL_SIG       0x02014b50u
#define END_SIG           0x06054b50u
#define END64_SIG         0x06064b50u
#define LOCATOR_SIG       0x07064b50u
#define LOCAL_BYTES       30u
#define CENTRAL_BYTES     46u
#define END_BYTES         22u
#define END64_BYTES       56u
#define LOCATOR_BYTES     20u
#define COMMENT_MAX_BYTES 65535u
#define EXTRA_ZIP64       0x0001u
#define FLAG_ENCRYPTED    0x0001u
#define FLAG_DESCRIPTOR   0x0008u /* sizes stand behind the data */
#define FLAG_STRONG       0x0040u
#define FLAG_MASKED       0x2000u /* the directory is encrypted */
#define DIRECTORY_MAX     (128u << 20)
#define ENTRIES_MAX       1000000u
#define NAME_SHOWN_BYTES  160

typedef struct {
    uint64_t offset; /* of the directory */
    uint64_t bytes;
    uint64_t count;
} directory;

uint32_t qc_zip_crc32(const void *bytes, size_t len)
{
    /* Works on four bits at a time: data.pkl is so small that reading a larger table would cost
     * more than it saves. */
    static const uint32_t table[16] = {0x00000000u, 0x1db71064u, 0x3b6e20c8u, 0x26d930acu,
                                       0x76dc4190u, 0x6b6b51f4u, 0x4db26158u, 0x5005713cu,
                                       0xedb88320u, 0xf00f9344u, 0xd6d6a3e8u, 0xcb61b38cu,
                                       0x9b64c2b0u, 0x86d3d2d4u, 0xa00ae278u, 0xbdbdf21cu};
    const unsigned char *p = bytes;
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < len; i++) {
        crc = table[(crc ^ p[i]) & 15u] ^ crc >> 4;
        crc = table[(crc ^ (uint32_t)p[i] >> 4) & 15u] ^ crc >> 4;
    }
    return ~crc;
}

/* ---- the end of the file ---- */

/* Finds the end record: the last one whose comment ends where the file ends. */
static qc_status find_end(const qc_file *f, uint64_t file_bytes, unsigned char end[END_BYTES],
                          uint64_t *at, qc_error *err)
{
    void *tail = NULL;
    size_t n = END_BYTES + COMMENT_MAX_BYTES;
    int found = 0;
    if (file_bytes < END_BYTES)
        QC_FAIL(err, QC_ERR_TRUNCATED,
                "the file has %" PRIu64 " bytes, but the end record of a zip archive alone has %u",
                file_bytes, END_BYTES);
    if (n > file_bytes)
        n = (size_t)file_bytes;
    QC_TRY(qc_malloc(&tail, n, err));
    qc_status st = qc_file_pread(f, tail, n, file_bytes - n, err);
    for (size_t i = n - END_BYTES + 1; st == QC_OK && !found && i-- > 0;) {
        const unsigned char *p = (const unsigned char *)tail + i;
        if (qc_load_le32(p) != END_SIG || qc_load_le16(p + 20) != n - i - END_BYTES)
            continue;
        memcpy(end, p, END_BYTES);
        *at = file_bytes - n + i;
        found = 1;
    }
    qc_free(tail);
    if (st == QC_OK && !found)
        QC_FAIL(err, QC_ERR_TRUNCATED,
                "the zip archive has no end record: the file is cut off or was not finished");
    return st;
}

/* Compares a field of the end record; it is all ones where the zip64 record has the value. */
static int agrees(uint64_t narrow, uint64_t saturated, uint64_t wide)
{
    return narrow == saturated || narrow == wide;
}

static qc_status read_end64(const qc_file *f, uint64_t locator_at, directory *d, uint64_t *end_at,
                            qc_error *err)
{
    unsigned char locator[LOCATOR_BYTES];
    unsigned char p[END64_BYTES];
    QC_TRY(qc_file_pread(f, locator, sizeof locator, locator_at, err));
    uint64_t at = qc_load_le64(locator + 8);
    if (at > locator_at || locator_at - at < END64_BYTES)
        QC_FAIL(err, QC_ERR_INPUT,
                "the zip64 end record is said to be at byte %" PRIu64
                ", but it must end before byte %" PRIu64,
                at, locator_at);
    QC_TRY(qc_file_pread(f, p, sizeof p, at, err));
    if (qc_load_le32(p) != END64_SIG || qc_load_le64(p + 4) != locator_at - at - 12)
        QC_FAIL(err, QC_ERR_INPUT,
                "there is no zip64 end record at byte %" PRIu64 ", where one must be", at);
    if (qc_load_le32(p + 16) != 0 || qc_load_le32(p + 20) != 0 ||
        qc_load_le64(p + 24) != qc_load_le64(p + 32) || qc_load_le32(locator + 16) > 1)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "the zip archive is split over several disks");
    d->count = qc_load_le64(p + 32);
    d->bytes = qc_load_le64(p + 40);
    d->offset = qc_load_le64(p + 48);
    *end_at = at;
    return QC_OK;
}

static qc_status find_directory(const qc_file *f, uint64_t file_bytes, directory *d, qc_error *err)
{
    unsigned char end[END_BYTES] = {0};
    unsigned char sig[4];
    uint64_t at = 0;
    uint64_t stop = 0; /* where the directory ends */
    QC_TRY(find_end(f, file_bytes, end, &at, err));
    uint64_t count = qc_load_le16(end + 10);
    uint64_t bytes = qc_load_le32(end + 12);
    uint64_t offset = qc_load_le32(end + 16);
    uint32_t locator = 0;
    if (at >= LOCATOR_BYTES) {
        QC_TRY(qc_file_pread(f, sig, sizeof sig, at - LOCATOR_BYTES, err));
        locator = qc_load_le32(sig);
    }
    if (locator == LOCATOR_SIG) {
        QC_TRY(read_end64(f, at - LOCATOR_BYTES, d, &stop, err));
        if (!agrees(count, 0xffffu, d->count) || !agrees(bytes, 0xffffffffu, d->bytes) ||
            !agrees(offset, 0xffffffffu, d->offset))
            QC_FAIL(err, QC_ERR_INPUT, "the two end records of the zip archive disagree");
    } else {
        uint32_t disk = qc_load_le16(end + 4);
        if (disk != 0 || qc_load_le16(end + 6) != 0 || qc_load_le16(end + 8) != count)
            QC_FAIL(err, QC_ERR_UNSUPPORTED, "the zip archive is split over several disks");
        *d = (directory){.offset = offset, .bytes = bytes, .count = count};
        stop = at;
    }
    if (d->offset > stop || d->bytes != stop - d->offset)
        QC_FAIL(err, QC_ERR_INPUT,
                "the zip directory is said to have %" PRIu64 " bytes at %" PRIu64
                ", but it must end at byte %" PRIu64,
                d->bytes, d->offset, stop);
    if (d->count > ENTRIES_MAX || d->bytes > DIRECTORY_MAX)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "the zip directory has %" PRIu64 " entries in %" PRIu64
                " bytes; at most %u in %u are accepted",
                d->count, d->bytes, ENTRIES_MAX, DIRECTORY_MAX);
    if (d->count > d->bytes / CENTRAL_BYTES)
        QC_FAIL(err, QC_ERR_INPUT,
                "the zip directory of %" PRIu64 " bytes is said to have %" PRIu64 " entries",
                d->bytes, d->count);
    return QC_OK;
}

/* ---- entries ---- */

/* Values of the zip64 extra field replace the fields that are all ones, in this order. */
static int widen(uint64_t *const fields[], size_t count, const unsigned char *extra, size_t len)
{
    const unsigned char *wide = NULL;
    size_t wide_len = 0;
    while (len >= 4) {
        size_t n = qc_load_le16(extra + 2);
        if (n > len - 4)
            return 1;
        if (qc_load_le16(extra) == EXTRA_ZIP64 && !wide) {
            wide = extra + 4;
            wide_len = n;
        }
        extra += 4 + n;
        len -= 4 + n;
    }
    for (size_t i = 0; i < count; i++) {
        if (*fields[i] != 0xffffffffu)
            continue;
        if (wide_len < 8)
            return 1;
        *fields[i] = qc_load_le64(wide);
        wide += 8;
        wide_len -= 8;
    }
    return 0;
}

/* Reads one record of the directory at p, where `left` bytes are left. */
static qc_status read_central(qc_torch_zip *z, qc_zip_entry *e, const unsigned char *p, size_t left,
                              size_t *used, qc_error *err)
{
    size_t total = CENTRAL_BYTES;
    if (left < CENTRAL_BYTES || qc_load_le32(p) != CENTRAL_SIG)
        QC_FAIL(err, QC_ERR_INPUT, "entry %zu of the zip directory has no header", z->count);
    size_t name_len = qc_load_le16(p + 28);
    size_t extra_len = qc_load_le16(p + 30);
    total += name_len + extra_len + qc_load_le16(p + 32);
    if (total > left)
        QC_FAIL(err, QC_ERR_INPUT, "entry %zu of the zip directory is cut off", z->count);
    if (name_len == 0 || memchr(p + CENTRAL_BYTES, '\0', name_len))
        QC_FAIL(err, QC_ERR_INPUT,
                "entry %zu of the zip directory has a name that is empty or holds a zero",
                z->count);
    QC_TRY(qc_arena_strndup(&z->arena, &e->name, (const char *)p + CENTRAL_BYTES, name_len, err));
    unsigned flags = qc_load_le16(p + 8);
    unsigned method = qc_load_le16(p + 10);
    if (flags & (FLAG_ENCRYPTED | FLAG_STRONG | FLAG_MASKED))
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "zip entry '%.*s' is encrypted", NAME_SHOWN_BYTES,
                e->name);
    if (method != 0)
        QC_FAIL(
            err, QC_ERR_UNSUPPORTED,
            "zip entry '%.*s' is compressed (method %u), but torch.save stores entries as they are",
            NAME_SHOWN_BYTES, e->name, method);
    uint64_t stored = qc_load_le32(p + 20);
    e->bytes = qc_load_le32(p + 24);
    e->header_offset = qc_load_le32(p + 42);
    e->crc32 = qc_load_le32(p + 16);
    uint64_t *const wide[] = {&e->bytes, &stored, &e->header_offset};
    if (widen(wide, 3, p + CENTRAL_BYTES + name_len, extra_len))
        QC_FAIL(err, QC_ERR_INPUT, "zip entry '%.*s': its extra fields do not hold its sizes",
                NAME_SHOWN_BYTES, e->name);
    if (stored != e->bytes)
        QC_FAIL(err, QC_ERR_INPUT,
                "zip entry '%.*s' is stored as it is, but has %" PRIu64 " bytes for %" PRIu64,
                NAME_SHOWN_BYTES, e->name, stored, e->bytes);
    *used = total;
    return QC_OK;
}

/* Reads the local header, which repeats name, method and sizes and tells where the data begins. The
 * sizes may be 0 where a descriptor stands behind the data. */
static qc_status read_local(const qc_file *f, qc_zip_entry *e, uint64_t limit, void *scratch,
                            qc_error *err)
{
    const unsigned char *p = scratch;
    size_t name_len = strlen(e->name);
    uint64_t room = 0;
    if (e->header_offset > limit || (room = limit - e->header_offset) < LOCAL_BYTES + name_len)
        QC_FAIL(err, QC_ERR_INPUT,
                "zip entry '%.*s' is said to begin at byte %" PRIu64
                ", but the entries end at byte %" PRIu64,
                NAME_SHOWN_BYTES, e->name, e->header_offset, limit);
    QC_TRY(qc_file_pread(f, scratch, LOCAL_BYTES + name_len, e->header_offset, err));
    if (qc_load_le32(p) != LOCAL_SIG || qc_load_le16(p + 26) != name_len ||
        memcmp(p + LOCAL_BYTES, e->name, name_len) != 0)
        QC_FAIL(err, QC_ERR_INPUT, "zip entry '%.*s': byte %" PRIu64 " does not begin its header",
                NAME_SHOWN_BYTES, e->name, e->header_offset);
    unsigned flags = qc_load_le16(p + 6);
    unsigned method = qc_load_le16(p + 8);
    size_t extra_len = qc_load_le16(p + 28);
    uint64_t stored = qc_load_le32(p + 18);
    uint64_t bytes = qc_load_le32(p + 22);
    uint32_t crc = qc_load_le32(p + 14);
    uint64_t head = LOCAL_BYTES + name_len + extra_len;
    if (head > room || e->bytes > room - head)
        QC_FAIL(err, QC_ERR_TRUNCATED,
                "zip entry '%.*s' of %" PRIu64 " bytes at byte %" PRIu64
                " goes beyond byte %" PRIu64 ", where the entries end",
                NAME_SHOWN_BYTES, e->name, e->bytes, e->header_offset, limit);
    if (bytes == 0xffffffffu || stored == 0xffffffffu) {
        uint64_t *const wide[] = {&bytes, &stored};
        QC_TRY(
            qc_file_pread(f, scratch, extra_len, e->header_offset + LOCAL_BYTES + name_len, err));
        if (widen(wide, 2, scratch, extra_len))
            QC_FAIL(err, QC_ERR_INPUT, "zip entry '%.*s': its extra fields do not hold its sizes",
                    NAME_SHOWN_BYTES, e->name);
    }
    int open = (flags & FLAG_DESCRIPTOR) && bytes == 0 && stored == 0;
    if (method != 0 || (flags & (FLAG_ENCRYPTED | FLAG_STRONG | FLAG_MASKED)) ||
        (!open && (bytes != e->bytes || stored != e->bytes || crc != e->crc32)))
        QC_FAIL(err, QC_ERR_INPUT,
                "zip entry '%.*s': the directory and the header at byte %" PRIu64 " disagree",
                NAME_SHOWN_BYTES, e->name, e->header_offset);
    e->data_offset = e->header_offset + head;
    return QC_OK;
}

static int compare_places(const void *va, const void *vb)
{
    const qc_zip_entry *a = va;
    const qc_zip_entry *b = vb;
    return (a->header_offset > b->header_offset) - (a->header_offset < b->header_offset);
}

static qc_status check_entries(qc_torch_zip *z, qc_error *err)
{
    qsort(z->entries, z->count, sizeof *z->entries, compare_places);
    for (size_t i = 1; i < z->count; i++) {
        const qc_zip_entry *e = &z->entries[i];
        if (e->header_offset < e[-1].data_offset + e[-1].bytes)
            QC_FAIL(err, QC_ERR_INPUT, "zip entries '%.*s' and '%.*s' overlap at byte %" PRIu64,
                    NAME_SHOWN_BYTES, e[-1].name, NAME_SHOWN_BYTES, e->name, e->header_offset);
    }
    qsort(z->entries, z->count, sizeof *z->entries, qc_by_text);
    size_t twice = qc_find_twice(z->entries, z->count, sizeof *z->entries);
    if (twice)
        QC_FAIL(err, QC_ERR_INPUT, "zip entry '%.*s' is there twice", NAME_SHOWN_BYTES,
                z->entries[twice].name);
    return QC_OK;
}

static qc_status read_directory(qc_torch_zip *z, const qc_file *f, const directory *d,
                                unsigned char *text, qc_error *err)
{
    size_t left = (size_t)d->bytes;
    size_t used = 0;
    QC_TRY(qc_file_pread(f, text, left, d->offset, err));
    QC_TRY(qc_arena_alloc(&z->arena, &z->entries, (size_t)d->count, sizeof *z->entries, err));
    for (; z->count < d->count; z->count++, text += used, left -= used)
        QC_TRY(read_central(z, &z->entries[z->count], text, left, &used, err));
    if (left != 0)
        QC_FAIL(err, QC_ERR_INPUT, "the zip directory has %zu bytes behind its last entry", left);
    return QC_OK;
}

static qc_status read_all(qc_torch_zip *z, const qc_file *f, uint64_t file_bytes, qc_error *err)
{
    directory d = {0};
    void *text = NULL;
    size_t cap = 0;
    QC_TRY(find_directory(f, file_bytes, &d, err));
    /* The buffer holds the directory first, then local headers, whose name and extra have 16-bit
     * sizes. */
    cap = (size_t)d.bytes > (size_t)2 * 65536 ? (size_t)d.bytes : (size_t)2 * 65536;
    QC_TRY(qc_malloc(&text, cap, err));
    qc_status st = read_directory(z, f, &d, text, err);
    for (size_t i = 0; st == QC_OK && i < z->count; i++)
        st = read_local(f, &z->entries[i], d.offset, text, err);
    qc_free(text);
    QC_TRY(st);
    return check_entries(z, err);
}

qc_status qc_torch_zip_read(qc_torch_zip *out, const qc_file *f, uint64_t file_bytes, qc_error *err)
{
    memset(out, 0, sizeof *out);
    qc_arena_init(&out->arena);
    qc_status st = read_all(out, f, file_bytes, err);
    if (st != QC_OK)
        qc_torch_zip_deinit(out);
    return st;
}

void qc_torch_zip_deinit(qc_torch_zip *z)
{
    if (!z)
        return;
    qc_arena_deinit(&z->arena);
    memset(z, 0, sizeof *z);
}

const qc_zip_entry *qc_torch_zip_find(const qc_torch_zip *z, const char *name)
{
    qc_zip_entry key = {.name = name};
    if (z->count == 0)
        return NULL;
    return bsearch(&key, z->entries, z->count, sizeof *z->entries, qc_by_text);
}

qc_status qc_torch_zip_load(const qc_file *f, const qc_zip_entry *e, void *dst, qc_error *err)
{
    size_t n = 0;
    if (qc_u64_to_size(e->bytes, &n))
        QC_FAIL(err, QC_ERR_NOMEM,
                "there is not enough memory for zip entry '%.*s' of %" PRIu64 " bytes",
                NAME_SHOWN_BYTES, e->name, e->bytes);
    QC_TRY(qc_file_pread(f, dst, n, e->data_offset, err));
    uint32_t crc = e->crc32 ? qc_zip_crc32(dst, n) : 0;
    if (crc != e->crc32)
        QC_FAIL(err, QC_ERR_INPUT,
                "zip entry '%.*s' has CRC-32 %08" PRIx32 ", but its directory says %08" PRIx32
                ": the file is damaged",
                NAME_SHOWN_BYTES, e->name, crc, e->crc32);
    return QC_OK;
}
