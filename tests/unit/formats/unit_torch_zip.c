/* formats/torch_zip.h: archives built here byte by byte, then broken in one place. */
#include "formats/torch_zip.h"

#include "base/alloc.h"
#include "tests/fixtures/fixture_files.h"

#include <errno.h>
#include <fcntl.h>

#define COUNT(a) (sizeof(a) / sizeof *(a))

static fx_dir root;

static int make_root(void **state)
{
    (void)state;
    fx_make_dir(&root);
    return 0;
}

static int remove_root(void **state)
{
    (void)state;
    test_remove(root.path);
    return 0;
}

/* Where the records of the last archive built are. */
typedef enum { LOCAL0, LOCAL1, CENTRAL0, CENTRAL1, END64, LOCATOR, END, PLACES } place;

typedef struct {
    qc_strbuf bytes;
    size_t at[PLACES];
    size_t data[2];
} archive;

static void add(archive *a, uint64_t value, unsigned bytes)
{
    unsigned char b[8];
    qc_store_le64(b, value);
    assert_int_equal(qc_strbuf_add(&a->bytes, b, bytes, NULL), QC_OK);
}

static void adds(archive *a, const char *s)
{
    assert_int_equal(qc_strbuf_adds(&a->bytes, s, NULL), QC_OK);
}

static const char *names[2] = {"m/data.pkl", "m/data/0"};
static const char *const contents[2] = {"first entry", "the second one"};

/* As torch writes it: sizes behind the data (descriptor), zip64 end record. */
static void build(archive *a, int as_torch)
{
    memset(a, 0, sizeof *a);
    qc_strbuf_init(&a->bytes, 1u << 20);
    for (int i = 0; i < 2; i++) {
        size_t n = strlen(contents[i]);
        uint32_t crc = qc_zip_crc32(contents[i], n);
        size_t pad = 20;
        a->at[LOCAL0 + i] = a->bytes.len;
        add(a, 0x04034b50, 4);
        add(a, 20, 2);
        add(a, as_torch ? 0x0808 : 0, 2);
        add(a, 0, 2);
        add(a, 0, 4); /* time, date */
        add(a, as_torch ? 0 : crc, 4);
        add(a, as_torch ? 0 : n, 4);
        add(a, as_torch ? 0 : n, 4);
        add(a, strlen(names[i]), 2);
        add(a, 4 + pad, 2);
        adds(a, names[i]);
        add(a, 0x4246, 2);
        add(a, pad, 2);
        adds(a, "ZZZZZZZZZZZZZZZZZZZZ");
        a->data[i] = a->bytes.len;
        adds(a, contents[i]);
        if (as_torch) {
            add(a, 0x08074b50, 4);
            add(a, crc, 4);
            add(a, n, 4);
            add(a, n, 4);
        }
    }
    size_t begin = a->bytes.len;
    for (int i = 0; i < 2; i++) {
        size_t n = strlen(contents[i]);
        a->at[CENTRAL0 + i] = a->bytes.len;
        add(a, 0x02014b50, 4);
        add(a, 0, 4);
        add(a, as_torch ? 0x0808 : 0, 2);
        add(a, 0, 2);
        add(a, 0, 4);
        add(a, qc_zip_crc32(contents[i], n), 4);
        add(a, n, 4);
        add(a, n, 4);
        add(a, strlen(names[i]), 2);
        add(a, 0, 2);
        add(a, 0, 2);
        add(a, 0, 2);
        add(a, 0, 2);
        add(a, 0, 4);
        add(a, a->at[LOCAL0 + i], 4);
        adds(a, names[i]);
    }
    size_t bytes = a->bytes.len - begin;
    if (as_torch) {
        a->at[END64] = a->bytes.len;
        add(a, 0x06064b50, 4);
        add(a, 44, 8);
        add(a, 0x031e, 2);
        add(a, 0x2d, 2);
        add(a, 0, 8);
        add(a, 2, 8);
        add(a, 2, 8);
        add(a, bytes, 8);
        add(a, begin, 8);
        a->at[LOCATOR] = a->bytes.len;
        add(a, 0x07064b50, 4);
        add(a, 0, 4);
        add(a, a->at[END64], 8);
        add(a, 1, 4);
    }
    a->at[END] = a->bytes.len;
    add(a, 0x06054b50, 4);
    add(a, 0, 4);
    add(a, 2, 2);
    add(a, 2, 2);
    add(a, bytes, 4);
    add(a, begin, 4);
    add(a, 0, 2);
}

static qc_status read_bytes(qc_torch_zip *z, qc_file *f, const void *bytes, size_t len,
                            qc_error *err)
{
    char path[FX_PATH_BYTES];
    fx_put(root.path, "a.zip", bytes, len);
    fx_join(path, root.path, "a.zip");
    assert_int_equal(qc_file_open_read(f, path, NULL), QC_OK);
    return qc_torch_zip_read(z, f, len, err);
}

static void reads_both_forms(void **state)
{
    (void)state;
    for (int as_torch = 0; as_torch < 2; as_torch++) {
        archive a;
        qc_torch_zip z;
        qc_file f = QC_FILE_CLOSED;
        qc_error err = {0};
        build(&a, as_torch);
        if (read_bytes(&z, &f, a.bytes.data, a.bytes.len, &err) != QC_OK)
            fail_msg("%s", err.msg);
        assert_true(z.count == 2);
        for (int i = 0; i < 2; i++) {
            char buf[32] = {0};
            const qc_zip_entry *e = qc_torch_zip_find(&z, names[i]);
            assert_non_null(e);
            assert_true(e->data_offset == a.data[i] && e->bytes == strlen(contents[i]));
            assert_true(e->header_offset == a.at[LOCAL0 + i]);
            assert_int_equal(qc_torch_zip_load(&f, e, buf, NULL), QC_OK);
            assert_string_equal(buf, contents[i]);
        }
        assert_null(qc_torch_zip_find(&z, "m/data"));
        qc_torch_zip_deinit(&z);
        qc_file_discard(&f);
        qc_strbuf_deinit(&a.bytes);
    }
}

static void knows_crc32(void **state)
{
    (void)state;
    /* The check value of the CRC catalogue. */
    assert_true(qc_zip_crc32("123456789", 9) == 0xcbf43926u);
    assert_true(qc_zip_crc32("", 0) == 0);
}

static void finds_damage_by_crc(void **state)
{
    archive a;
    qc_torch_zip z;
    qc_file f = QC_FILE_CLOSED;
    qc_error err = {0};
    char buf[32];
    (void)state;
    build(&a, 1);
    a.bytes.data[a.data[1]] ^= 1;
    assert_int_equal(read_bytes(&z, &f, a.bytes.data, a.bytes.len, NULL), QC_OK);
    assert_int_equal(qc_torch_zip_load(&f, qc_torch_zip_find(&z, names[0]), buf, NULL), QC_OK);
    assert_int_equal(qc_torch_zip_load(&f, qc_torch_zip_find(&z, names[1]), buf, &err),
                     QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "zip entry 'm/data/0' has CRC-32 "));
    assert_non_null(strstr(err.msg, ": the file is damaged"));
    qc_torch_zip_deinit(&z);
    qc_file_discard(&f);
    qc_strbuf_deinit(&a.bytes);
}

static const struct {
    int as_torch;
    place where;
    unsigned offset;
    unsigned bytes;
    uint64_t value;
    qc_status status;
    const char *message; /* begins with this */
} breaks[] = {
    {0, END, 0, 4, 0, QC_ERR_TRUNCATED, "the zip archive has no end record"},
    {0, END, 20, 2, 1, QC_ERR_TRUNCATED, "the zip archive has no end record"},
    {0, END, 4, 2, 1, QC_ERR_UNSUPPORTED, "the zip archive is split over several disks"},
    {0, END, 8, 2, 1, QC_ERR_UNSUPPORTED, "the zip archive is split over several disks"},
    {0, END, 8, 4, 0x00010001, QC_ERR_INPUT,
     "the zip directory has 54 bytes behind its last entry"},
    {0, END, 8, 4, 0x00030003, QC_ERR_INPUT,
     "the zip directory of 110 bytes is said to have 3 entries"},
    {0, END, 12, 4, 0xfffffff0, QC_ERR_INPUT,
     "the zip directory is said to have 4294967280 bytes at 151, but it must end at byte 261"},
    {0, END, 12, 4, 109, QC_ERR_INPUT, "the zip directory is said to have 109 bytes at 151"},
    {0, END, 16, 4, 0xffffff00, QC_ERR_INPUT, "the zip directory is said to have 110 bytes at"},
    {0, END, 16, 4, 1, QC_ERR_INPUT, "the zip directory is said to have 110 bytes at 1,"},
    {1, LOCATOR, 8, 8, UINT64_MAX, QC_ERR_INPUT,
     "the zip64 end record is said to be at byte 1844674"},
    {1, LOCATOR, 8, 8, 3, QC_ERR_INPUT,
     "there is no zip64 end record at byte 3, where one must be"},
    {1, LOCATOR, 16, 4, 2, QC_ERR_UNSUPPORTED, "the zip archive is split over several disks"},
    {1, END64, 0, 4, 0, QC_ERR_INPUT, "there is no zip64 end record at byte "},
    {1, END64, 4, 8, 45, QC_ERR_INPUT, "there is no zip64 end record at byte "},
    {1, END64, 16, 4, 1, QC_ERR_UNSUPPORTED, "the zip archive is split over several disks"},
    {1, END64, 24, 8, 1, QC_ERR_UNSUPPORTED, "the zip archive is split over several disks"},
    {1, END64, 40, 8, UINT64_MAX, QC_ERR_INPUT, "the two end records of the zip archive disagree"},
    {1, END, 10, 2, 1, QC_ERR_INPUT, "the two end records of the zip archive disagree"},
    {0, CENTRAL0, 0, 4, 0, QC_ERR_INPUT, "entry 0 of the zip directory has no header"},
    {0, CENTRAL1, 0, 4, 0, QC_ERR_INPUT, "entry 1 of the zip directory has no header"},
    {0, CENTRAL1, 28, 2, 0, QC_ERR_INPUT,
     "entry 1 of the zip directory has a name that is empty or holds"},
    {0, CENTRAL1, 28, 2, 9, QC_ERR_INPUT, "entry 1 of the zip directory is cut off"},
    {0, CENTRAL1, 30, 2, 65535, QC_ERR_INPUT, "entry 1 of the zip directory is cut off"},
    {0, CENTRAL1, 32, 2, 65535, QC_ERR_INPUT, "entry 1 of the zip directory is cut off"},
    {0, CENTRAL1, 46, 1, 0, QC_ERR_INPUT,
     "entry 1 of the zip directory has a name that is empty or holds"},
    {0, CENTRAL1, 46, 1, 'x', QC_ERR_INPUT, "zip entry 'x/data/0': byte 75 does not begin"},
    {0, CENTRAL0, 8, 2, 1, QC_ERR_UNSUPPORTED, "zip entry 'm/data.pkl' is encrypted"},
    {0, CENTRAL0, 8, 2, 0x40, QC_ERR_UNSUPPORTED, "zip entry 'm/data.pkl' is encrypted"},
    {0, CENTRAL0, 8, 2, 0x2000, QC_ERR_UNSUPPORTED, "zip entry 'm/data.pkl' is encrypted"},
    {0, CENTRAL0, 10, 2, 8, QC_ERR_UNSUPPORTED,
     "zip entry 'm/data.pkl' is compressed (method 8), but torch.save stores entries as they are"},
    {0, CENTRAL0, 20, 4, 10, QC_ERR_INPUT,
     "zip entry 'm/data.pkl' is stored as it is, but has 10 bytes for 11"},
    {0, CENTRAL0, 24, 4, 0xffffffff, QC_ERR_INPUT,
     "zip entry 'm/data.pkl': its extra fields do not hold its sizes"},
    {0, CENTRAL0, 42, 4, 0xffffffff, QC_ERR_INPUT,
     "zip entry 'm/data.pkl': its extra fields do not hold its sizes"},
    {0, CENTRAL0, 42, 4, 0xfffffffe, QC_ERR_INPUT,
     "zip entry 'm/data.pkl' is said to begin at byte 4294967294, but the entries end at byte 151"},
    {0, CENTRAL0, 42, 4, 115, QC_ERR_INPUT, "zip entry 'm/data.pkl' is said to begin at byte 115"},
    {0, CENTRAL1, 42, 4, 0, QC_ERR_INPUT, "zip entry 'm/data/0': byte 0 does not begin its header"},
    {0, CENTRAL0, 16, 4, 1, QC_ERR_INPUT,
     "zip entry 'm/data.pkl': the directory and the header at byte 0 disagree"},
    {0, LOCAL0, 0, 4, 0, QC_ERR_INPUT, "zip entry 'm/data.pkl': byte 0 does not begin its header"},
    {0, LOCAL0, 26, 2, 9, QC_ERR_INPUT, "zip entry 'm/data.pkl': byte 0 does not begin its header"},
    {0, LOCAL0, 30, 1, 'x', QC_ERR_INPUT, "zip entry 'm/data.pkl': byte 0 does not begin"},
    {0, LOCAL0, 6, 2, 1, QC_ERR_INPUT, "zip entry 'm/data.pkl': the directory and the header"},
    {0, LOCAL0, 8, 2, 8, QC_ERR_INPUT, "zip entry 'm/data.pkl': the directory and the header"},
    {0, LOCAL0, 14, 4, 1, QC_ERR_INPUT, "zip entry 'm/data.pkl': the directory and the header"},
    {0, LOCAL0, 18, 4, 1, QC_ERR_INPUT, "zip entry 'm/data.pkl': the directory and the header"},
    {0, LOCAL0, 22, 4, 1, QC_ERR_INPUT, "zip entry 'm/data.pkl': the directory and the header"},
    {0, LOCAL0, 22, 4, 0xffffffff, QC_ERR_INPUT,
     "zip entry 'm/data.pkl': its extra fields do not hold its sizes"},
    {0, LOCAL0, 28, 2, 65535, QC_ERR_TRUNCATED,
     "zip entry 'm/data.pkl' of 11 bytes at byte 0 goes beyond byte 151"},
    {0, LOCAL0, 28, 2, 25, QC_ERR_INPUT, "zip entries 'm/data.pkl' and 'm/data/0' overlap"},
    {0, LOCAL1, 28, 2, 25, QC_ERR_TRUNCATED, "zip entry 'm/data/0' of 14 bytes at byte 75"},
};

static void says_what_is_wrong(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(breaks); i++) {
        archive a;
        qc_torch_zip z;
        qc_file f = QC_FILE_CLOSED;
        qc_error err = {0};
        unsigned char v[8];
        build(&a, breaks[i].as_torch);
        qc_store_le64(v, breaks[i].value);
        memcpy(a.bytes.data + a.at[breaks[i].where] + breaks[i].offset, v, breaks[i].bytes);
        qc_status st = read_bytes(&z, &f, a.bytes.data, a.bytes.len, &err);
        if (st != breaks[i].status ||
            strncmp(err.msg, breaks[i].message, strlen(breaks[i].message)) != 0)
            fail_msg("case %zu: %s '%s', expected %s '%s'", i, qc_status_name(st), err.msg,
                     qc_status_name(breaks[i].status), breaks[i].message);
        assert_true(!z.entries && !z.count && !z.arena.head);
        qc_file_discard(&f);
        qc_strbuf_deinit(&a.bytes);
    }
}

static void refuses_duplicates(void **state)
{
    archive a;
    qc_torch_zip z;
    qc_file f = QC_FILE_CLOSED;
    qc_error err = {0};
    (void)state;
    names[1] = names[0];
    build(&a, 0);
    names[1] = "m/data/0";
    assert_int_equal(read_bytes(&z, &f, a.bytes.data, a.bytes.len, &err), QC_ERR_INPUT);
    assert_string_equal(err.msg, "zip entry 'm/data.pkl' is there twice");
    qc_file_discard(&f);
    qc_strbuf_deinit(&a.bytes);
}

/* Never read outside, never anything but a status with exit code 3. */
static void survives_truncation_and_flips(void **state)
{
    (void)state;
    for (int as_torch = 0; as_torch < 2; as_torch++) {
        archive a;
        build(&a, as_torch);
        for (size_t n = 0; n < a.bytes.len; n++) {
            qc_torch_zip z;
            qc_file f = QC_FILE_CLOSED;
            qc_error err = {0};
            qc_status st = read_bytes(&z, &f, a.bytes.data, n, &err);
            assert_int_equal(qc_status_exit_code(st), 3);
            assert_true(err.msg[0] != '\0');
            qc_file_discard(&f);
        }
        for (size_t i = 0; i < a.bytes.len * 8; i++) {
            qc_torch_zip z;
            qc_file f = QC_FILE_CLOSED;
            a.bytes.data[i / 8] ^= (char)(1 << i % 8);
            qc_status st = read_bytes(&z, &f, a.bytes.data, a.bytes.len, NULL);
            assert_true(st == QC_OK || qc_status_exit_code(st) == 3);
            for (size_t k = 0; k < z.count; k++)
                assert_true(z.entries[k].data_offset + z.entries[k].bytes <= a.bytes.len);
            qc_torch_zip_deinit(&z);
            qc_file_discard(&f);
            a.bytes.data[i / 8] ^= (char)(1 << i % 8);
        }
        qc_strbuf_deinit(&a.bytes);
    }
}

/* ---- beyond 4 GiB: a hole in the file, zip64 fields everywhere ---- */

#define HUGE_BYTES (5ull << 30)

static void put_at(int fd, uint64_t *at, const archive *a)
{
    assert_true(pwrite(fd, a->bytes.data, a->bytes.len, (off_t)*at) == (ssize_t)a->bytes.len);
    *at += a->bytes.len;
}

static void reads_zip64(void **state)
{
    archive a = {0};
    char path[FX_PATH_BYTES];
    qc_torch_zip z;
    qc_file f = QC_FILE_CLOSED;
    qc_error err = {0};
    uint64_t at = 0;
    uint64_t header[2];
    static const uint64_t sizes[2] = {HUGE_BYTES, 3};
    (void)state;
    fx_join(path, root.path, "huge.zip");
    int fd = open(path, O_CREAT | O_RDWR | O_TRUNC, 0600);
    assert_true(fd >= 0);
    for (int i = 0; i < 2; i++) {
        qc_strbuf_init(&a.bytes, 4096);
        header[i] = at;
        add(&a, 0x04034b50, 4);
        add(&a, 0x002d, 2);
        add(&a, 0, 8);
        add(&a, 0, 4);
        add(&a, i ? 3 : 0xffffffff, 4);
        add(&a, i ? 3 : 0xffffffff, 4);
        add(&a, 8, 2);
        add(&a, i ? 0 : 20, 2);
        adds(&a, i ? "m/data/1" : "m/data/0");
        if (i == 0) {
            add(&a, 1, 2);
            add(&a, 16, 2);
            add(&a, HUGE_BYTES, 8);
            add(&a, HUGE_BYTES, 8);
        }
        put_at(fd, &at, &a);
        qc_strbuf_deinit(&a.bytes);
        at += sizes[i];
    }
    uint64_t begin = at;
    qc_strbuf_init(&a.bytes, 4096);
    for (int i = 0; i < 2; i++) {
        add(&a, 0x02014b50, 4);
        add(&a, 0, 8);
        add(&a, 0, 8); /* time, date, CRC-32 not computed */
        add(&a, i ? 3 : 0xffffffff, 4);
        add(&a, i ? 3 : 0xffffffff, 4);
        add(&a, 8, 2);
        add(&a, i ? 12 : 20, 2);
        add(&a, 0, 6);
        add(&a, 0, 4);
        add(&a, i ? 0xffffffff : 0, 4);
        adds(&a, i ? "m/data/1" : "m/data/0");
        add(&a, 1, 2);
        add(&a, i ? 8 : 16, 2);
        add(&a, i ? header[1] : HUGE_BYTES, 8);
        if (i == 0)
            add(&a, HUGE_BYTES, 8);
    }
    uint64_t bytes = a.bytes.len;
    add(&a, 0x06064b50, 4);
    add(&a, 44, 8);
    add(&a, 0, 4);
    add(&a, 0, 8);
    add(&a, 2, 8);
    add(&a, 2, 8);
    add(&a, bytes, 8);
    add(&a, begin, 8);
    add(&a, 0x07064b50, 4);
    add(&a, 0, 4);
    add(&a, begin + bytes, 8);
    add(&a, 1, 4);
    add(&a, 0x06054b50, 4);
    add(&a, 0, 4);
    add(&a, 0xffffffff, 4);
    add(&a, bytes, 4);
    add(&a, 0xffffffff, 4);
    add(&a, 0, 2);
    put_at(fd, &at, &a);
    qc_strbuf_deinit(&a.bytes);
    assert_true(pwrite(fd, "end", 3, (off_t)(begin - 3)) == 3);
    assert_int_equal(close(fd), 0);
    assert_int_equal(qc_file_open_read(&f, path, NULL), QC_OK);
    if (qc_torch_zip_read(&z, &f, at, &err) != QC_OK)
        fail_msg("%s", err.msg);
    assert_true(z.count == 2 && z.entries[0].bytes == HUGE_BYTES);
    assert_true(z.entries[1].bytes == 3 && z.entries[1].data_offset == begin - 3);
    char buf[4] = {0};
    assert_int_equal(qc_torch_zip_load(&f, &z.entries[1], buf, NULL), QC_OK);
    assert_string_equal(buf, "end");
    qc_torch_zip_deinit(&z);
    qc_file_discard(&f);
}

static void survives_faults(void **state)
{
    archive a;
    (void)state;
    build(&a, 1);
    for (int kind = 0; kind < 2; kind++) {
        qc_status st = QC_ERR_INTERNAL;
        for (uint64_t n = 1; st != QC_OK; n++) {
            qc_torch_zip z;
            qc_file f = QC_FILE_CLOSED;
            char path[FX_PATH_BYTES];
            qc_error err = {0};
            fx_put(root.path, "a.zip", a.bytes.data, a.bytes.len);
            fx_join(path, root.path, "a.zip");
            assert_int_equal(qc_file_open_read(&f, path, NULL), QC_OK);
            if (kind == 0)
                qc_alloc_fail_at(n, 0);
            else
                qc_io_fail_at(QC_IO_READ, n, 0, EIO);
            st = qc_torch_zip_read(&z, &f, a.bytes.len, &err);
            qc_alloc_fail_at(0, 0);
            qc_io_fail_at(QC_IO_READ, 0, 0, 0);
            assert_true(st == QC_OK || st == (kind ? QC_ERR_IO : QC_ERR_NOMEM));
            assert_true(n < 100);
            qc_torch_zip_deinit(&z);
            qc_file_discard(&f);
        }
    }
    qc_strbuf_deinit(&a.bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(knows_crc32),         cmocka_unit_test(reads_both_forms),
        cmocka_unit_test(finds_damage_by_crc), cmocka_unit_test(says_what_is_wrong),
        cmocka_unit_test(refuses_duplicates),  cmocka_unit_test(survives_truncation_and_flips),
        cmocka_unit_test(reads_zip64),         cmocka_unit_test(survives_faults),
    };
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
