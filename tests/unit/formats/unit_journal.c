/* The journal: what was appended comes back, whatever happened to the file's end. */
#include "base/alloc.h"
#include "base/bytes.h"
#include "formats/file_io.h"
#include "formats/journal.h"
#include "formats/text_file.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/test.h"
#include "tests/fixtures/test_model.h"

#include <errno.h>
#include <pthread.h>

#define RECORDS 7

typedef struct {
    char root[64], path[96];
} world;

static int setup(void **state)
{
    static world w;
    test_folder(w.root, sizeof w.root);
    (void)snprintf(w.path, sizeof w.path, "%s/journal", w.root);
    *state = &w;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    qc_io_fail_at(QC_IO_WRITE, 0, 0, 0);
    return 0;
}

/* Record i: type 100 + i, i * 5 bytes of value i. */
static size_t payload(unsigned i, unsigned char *out)
{
    memset(out, (int)i, i * 5u);
    return i * 5u;
}

typedef struct {
    unsigned count;
    uint64_t ends[64];
    unsigned stop_at; /* 0: never */
} seen;

static qc_status see(void *ctx, const qc_journal_record *r, qc_error *err)
{
    seen *s = ctx;
    unsigned char want[64];
    size_t n = payload(s->count, want);
    assert_int_equal(r->type, 100 + s->count);
    assert_int_equal(r->payload_bytes, n);
    assert_non_null(r->payload);
    assert_memory_equal(r->payload, want, n);
    s->ends[s->count++] = r->end;
    if (s->stop_at == s->count)
        QC_FAIL(err, QC_ERR_CHECK, "enough");
    return QC_OK;
}

static void append(qc_journal *j, unsigned first, unsigned end)
{
    qc_error err = {0};
    for (unsigned i = first; i < end; i++) {
        unsigned char body[64];
        size_t n = payload(i, body);
        test_must(qc_journal_append(j, 100 + i, body, n, &err), &err);
    }
}

static void write_journal(const world *w)
{
    qc_error err = {0};
    qc_journal *j = NULL;
    qc_journal_found found;
    test_must(qc_journal_open(&j, w->path, NULL, NULL, &found, &err), &err);
    assert_int_equal(found.records, 0);
    append(j, 0, RECORDS);
    test_must(qc_journal_sync(j, &err), &err);
    qc_journal_close(j);
}

static void slurp(const world *w, qc_strbuf *out)
{
    qc_error err = {0};
    qc_strbuf_init(out, 1u << 20);
    test_must(qc_file_slurp(w->path, out, &err), &err);
}

static void put(const world *w, const void *bytes, size_t len)
{
    qc_error err = {0};
    test_must(qc_file_put(w->path, bytes, len, &err), &err);
}

TEST_WITH(test_comes_back, setup, teardown)
{
    const world *w = *state;
    qc_error err = {0};
    qc_journal *j = NULL;
    qc_journal_found found;
    seen s = {0};
    write_journal(w);
    test_must(qc_journal_read(w->path, see, &s, &found, &err), &err);
    assert_int_equal(s.count, RECORDS);
    assert_int_equal(found.records, RECORDS);
    assert_int_equal(found.cut_bytes, 0);
    assert_int_equal(found.bytes, s.ends[RECORDS - 1]);
    /* And goes on where it ended. */
    s.count = 0;
    test_must(qc_journal_open(&j, w->path, see, &s, &found, &err), &err);
    assert_int_equal(s.count, RECORDS);
    append(j, RECORDS, RECORDS + 2);
    qc_journal_close(j);
    s.count = 0;
    test_must(qc_journal_read(w->path, see, &s, NULL, &err), &err);
    assert_int_equal(s.count, RECORDS + 2);
    qc_journal_close(NULL);
}

/* Cut at every byte: every record that is whole, and nothing else; and it can be appended to. */
TEST_WITH(test_cut_at_every_byte, setup, teardown)
{
    const world *w = *state;
    qc_error err = {0};
    qc_strbuf whole;
    seen all = {0};
    write_journal(w);
    slurp(w, &whole);
    test_must(qc_journal_read(w->path, see, &all, NULL, &err), &err);
    for (size_t len = 0; len <= whole.len; len++) {
        qc_journal *j = NULL;
        qc_journal_found found;
        seen s = {0};
        unsigned want = 0;
        while (want < RECORDS && all.ends[want] <= len)
            want++;
        put(w, whole.data, len);
        test_must(qc_journal_open(&j, w->path, see, &s, &found, &err), &err);
        assert_int_equal(s.count, want);
        assert_int_equal(found.bytes + found.cut_bytes, len);
        append(j, want, RECORDS);
        qc_journal_close(j);
        qc_strbuf again;
        slurp(w, &again);
        assert_int_equal(again.len, whole.len);
        assert_memory_equal(again.data, whole.data, whole.len);
        qc_strbuf_deinit(&again);
    }
    qc_strbuf_deinit(&whole);
}

/* Every bit of every record: it and what follows are gone, what is before stays. */
TEST_WITH(test_every_flipped_bit, setup, teardown)
{
    const world *w = *state;
    qc_error err = {0};
    qc_strbuf whole;
    seen all = {0};
    write_journal(w);
    slurp(w, &whole);
    test_must(qc_journal_read(w->path, see, &all, NULL, &err), &err);
    for (size_t bit = QC_JOURNAL_MAGIC_BYTES * 8; bit < whole.len * 8; bit++) {
        seen s = {0};
        unsigned want = 0;
        while (all.ends[want] <= bit / 8)
            want++;
        whole.data[bit / 8] = (char)(whole.data[bit / 8] ^ 1 << bit % 8);
        put(w, whole.data, whole.len);
        test_must(qc_journal_read(w->path, see, &s, NULL, &err), &err);
        assert_int_equal(s.count, want);
        whole.data[bit / 8] = (char)(whole.data[bit / 8] ^ 1 << bit % 8);
    }
    qc_strbuf_deinit(&whole);
}

/* A record that is whole, but at another place. */
TEST_WITH(test_a_record_elsewhere, setup, teardown)
{
    const world *w = *state;
    qc_error err = {0};
    qc_strbuf whole;
    qc_journal_found found;
    seen all = {0};
    write_journal(w);
    slurp(w, &whole);
    test_must(qc_journal_read(w->path, see, &all, NULL, &err), &err);
    SCOPED(qc_strbuf) moved = {.max = 1u << 20};
    test_must(qc_strbuf_add(&moved, whole.data, QC_JOURNAL_MAGIC_BYTES, &err), &err);
    test_must(qc_strbuf_add(&moved, whole.data + all.ends[0], whole.len - all.ends[0], &err), &err);
    put(w, moved.data, moved.len);
    test_must(qc_journal_read(w->path, NULL, NULL, &found, &err), &err);
    assert_int_equal(found.records, 0);
    qc_strbuf_deinit(&whole);
}

TEST_WITH(test_what_is_no_journal, setup, teardown)
{
    static const struct {
        const char *bytes;
        size_t len;
        qc_status want;
    } cases[] = {
        {"", 0, QC_OK},
        {"QCJ", 3, QC_OK},
        {"QCJ\0\0\0\0\0\0\0\0\0", 12, QC_OK}, /* grew before its bytes were written */
        {"\0\0\0\0\0\0\0\0", 8, QC_OK},
        {"QCJRNL2\n", 8, QC_ERR_UNSUPPORTED},
        {"{\"format\": 1}", 13, QC_ERR_UNSUPPORTED},
        {"x", 1, QC_ERR_UNSUPPORTED},
    };
    const world *w = *state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qc_error err = {0};
        qc_journal *j = NULL;
        qc_journal_found found;
        put(w, cases[i].bytes, cases[i].len);
        assert_int_equal(qc_journal_read(w->path, see, NULL, NULL, &err), cases[i].want);
        assert_int_equal(qc_journal_open(&j, w->path, NULL, NULL, &found, &err), cases[i].want);
        if (cases[i].want == QC_OK) {
            seen s = {0};
            append(j, 0, 3);
            qc_journal_close(j);
            test_must(qc_journal_read(w->path, see, &s, NULL, &err), &err);
            assert_int_equal(s.count, 3);
            continue;
        }
        qc_strbuf left; /* untouched */
        assert_null(j);
        assert_non_null(strstr(err.msg, "does not begin as a journal"));
        slurp(w, &left);
        assert_int_equal(left.len, cases[i].len);
        assert_memory_equal(left.data, cases[i].bytes, left.len);
        qc_strbuf_deinit(&left);
    }
}

/* A length that the file does not have is not asked of the heap. */
TEST_WITH(test_a_length_that_lies, setup, teardown)
{
    const world *w = *state;
    qc_error err = {0};
    qc_journal_found found;
    unsigned char bytes[QC_JOURNAL_MAGIC_BYTES + 64] = {0};
    memcpy(bytes, QC_JOURNAL_MAGIC, QC_JOURNAL_MAGIC_BYTES);
    for (unsigned shift = 0; shift < 32; shift++) {
        qc_store_le32(bytes + QC_JOURNAL_MAGIC_BYTES + 4, (uint32_t)1 << shift);
        put(w, bytes, sizeof bytes);
        qc_alloc_fail_at(3, 1); /* the path, a record of what is there at most */
        qc_status st = qc_journal_read(w->path, NULL, NULL, &found, &err);
        qc_alloc_fail_at(0, 0);
        assert_int_equal(st, QC_OK);
        assert_int_equal(found.records, 0);
    }
}

TEST_WITH(test_reader_that_had_enough, setup, teardown)
{
    const world *w = *state;
    qc_error err = {0};
    qc_journal *j = NULL;
    seen s = {.stop_at = 3};
    write_journal(w);
    assert_int_equal(qc_journal_open(&j, w->path, see, &s, NULL, &err), QC_ERR_CHECK);
    assert_null(j);
    assert_int_equal(s.count, 3);
    seen all = {0};
    test_must(qc_journal_read(w->path, see, &all, NULL, &err), &err);
    assert_int_equal(all.count, RECORDS);
}

/* Half a record on a full disk: none, and the next one takes its place. */
TEST_WITH(test_full_disk, setup, teardown)
{
    const world *w = *state;
    qc_error err = {0};
    qc_journal *j = NULL;
    seen s = {0};
    unsigned char body[64];
    test_must(qc_journal_open(&j, w->path, NULL, NULL, NULL, &err), &err);
    append(j, 0, 2);
    qc_io_fail_at(QC_IO_WRITE, 1, 0, ENOSPC);
    assert_int_equal(qc_journal_append(j, 102, body, payload(2, body), &err), QC_ERR_NOSPACE);
    qc_io_fail_at(QC_IO_WRITE, 0, 0, 0);
    append(j, 2, RECORDS);
    assert_int_equal(qc_journal_append(j, 1, body, (size_t)QC_JOURNAL_RECORD_MAX + 1, &err),
                     QC_ERR_UNSUPPORTED);
    qc_journal_close(j);
    test_must(qc_journal_read(w->path, see, &s, NULL, &err), &err);
    assert_int_equal(s.count, RECORDS);
}

TEST_WITH(test_links_are_refused, setup, teardown)
{
    const world *w = *state;
    char other[96];
    qc_error err = {0};
    qc_journal *j = NULL;
    (void)snprintf(other, sizeof other, "%s/other", w->root);
    test_must(qc_file_put(other, "x", 1, &err), &err);
    assert_int_equal(symlink(other, w->path), 0);
    assert_int_equal(qc_journal_open(&j, w->path, NULL, NULL, NULL, &err), QC_ERR_IO);
    assert_int_equal(unlink(w->path), 0);
    assert_int_equal(qc_journal_read(w->path, NULL, NULL, NULL, &err), QC_ERR_IO);
}

#define WRITERS    4
#define PER_WRITER 500

static void *append_many(void *ctx)
{
    qc_journal *j = ctx;
    for (unsigned i = 0; i < PER_WRITER; i++) {
        unsigned char body[40];
        memset(body, (int)i, sizeof body);
        if (qc_journal_append(j, i, body, i % sizeof body, NULL) != QC_OK)
            return ctx;
        if (i % 100 == 0 && qc_journal_sync(j, NULL) != QC_OK)
            return ctx;
    }
    return NULL;
}

static qc_status count_types(void *ctx, const qc_journal_record *r, qc_error *err)
{
    unsigned *counts = ctx;
    (void)err;
    assert_in_range(r->type, 0, PER_WRITER - 1);
    counts[r->type]++;
    return QC_OK;
}

TEST_WITH(test_many_writers, setup, teardown)
{
    const world *w = *state;
    qc_error err = {0};
    qc_journal *j = NULL;
    pthread_t threads[WRITERS];
    static unsigned counts[PER_WRITER];
    memset(counts, 0, sizeof counts);
    test_must(qc_journal_open(&j, w->path, NULL, NULL, NULL, &err), &err);
    for (unsigned i = 0; i < WRITERS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, append_many, j), 0);
    for (unsigned i = 0; i < WRITERS; i++) {
        void *failed = NULL;
        assert_int_equal(pthread_join(threads[i], &failed), 0);
        assert_null(failed);
    }
    qc_journal_close(j);
    test_must(qc_journal_read(w->path, count_types, counts, NULL, &err), &err);
    for (unsigned i = 0; i < PER_WRITER; i++)
        assert_int_equal(counts[i], WRITERS);
}

TEST_WITH(test_every_allocation, setup, teardown)
{
    const world *w = *state;
    EACH_ALLOCATION_FAILS (fault, 1) {
        qc_journal *j = NULL;
        (void)unlink(w->path);
        fault.st = qc_journal_open(&j, w->path, NULL, NULL, NULL, NULL);
        if (fault.st == QC_OK)
            fault.st = qc_journal_append(j, 1, "abc", 3, NULL);
        qc_journal_close(j);
        assert_true(fault.st != QC_OK || fault.at > 3);
    }
}
