/* formats/seekable.h */
#include "formats/seekable.h"

#include "base/alloc.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/fixture_files.h"
#include "tests/fixtures/st_header.h"

#include <errno.h>
#include <zstd.h>

#define KIB 1024u

static fx_dir dir;
static char path[FX_PATH_BYTES];
static uint64_t seed = 88172645463325252u;

static int setup(void **state)
{
    (void)state;
    fx_make_dir(&dir);
    fx_join(path, dir.path, "file.zst");
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    qc_alloc_fail_at(0, 0);
    qc_io_fail_at(QC_IO_READ, 0, 0, 0);
    return 0;
}

static uint64_t next_random(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

/* bits of 8: how many of a byte's bits are random, so 8 - bits can be saved without any match. */
static void fill_skewed(unsigned char *p, size_t len, unsigned bits)
{
    for (size_t i = 0; i < len; i++)
        p[i] = (unsigned char)(next_random() >> 20 & ((1u << bits) - 1));
}

static void *must_alloc(size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);
    assert_non_null(p);
    return p;
}

/* Encode, decode with our coder and with libzstd alone; returns the stored size. */
static size_t round_trip(qc_frame_coder *c, int level, const unsigned char *src, size_t len)
{
    size_t cap = qc_frame_bound(len), n = 0;
    unsigned char *dst = must_alloc(cap), *again = must_alloc(cap), *back = must_alloc(len);
    qc_error err = {0};
    assert_int_equal(qc_frame_encode(c, level, src, len, dst, cap, &n, &err), QC_OK);
    assert_true(n <= qc_raw_frame_bytes(len));
    assert_true(n == qc_raw_frame_bytes(len) || n * 100 <= len * 96);
    memset(back, 0xee, len);
    assert_int_equal(qc_frame_decode(c, dst, n, back, len, &err), QC_OK);
    assert_memory_equal(back, src, len);
    memset(back, 0xee, len);
    assert_int_equal(ZSTD_decompress(back, len, dst, n), len);
    assert_memory_equal(back, src, len);
    assert_int_equal(ZSTD_getFrameContentSize(dst, n), len);
    assert_true(dst[4] & 4); /* checksum flag */
    qc_frame_coder *other = NULL;
    size_t m = 0;
    assert_int_equal(qc_frame_coder_create(&other, NULL), QC_OK);
    assert_int_equal(qc_frame_encode(other, level, src, len, again, cap, &m, NULL), QC_OK);
    assert_int_equal(m, n); /* does not depend on what the coder did before */
    assert_memory_equal(again, dst, n);
    qc_frame_coder_destroy(other);
    free(dst);
    free(again);
    free(back);
    return n;
}

TEST(raw_frames_of_every_size)
{
    static const size_t sizes[] = {0,      1,      2,      255,      256,           65791,
                                   65792,  131071, 131072, 131073,   262144,        262145,
                                   300000, 393216, 393217, 1u << 20, (8u << 20) + 1};
    size_t most = (8u << 20) + 1;
    unsigned char *src = must_alloc(most), *dst = must_alloc(qc_raw_frame_bytes(most) + 8),
                  *back = must_alloc(most);
    qc_frame_coder *c = NULL;
    qc_error err = {0};
    assert_int_equal(qc_frame_coder_create(&c, &err), QC_OK);
    fill_skewed(src, most, 8);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t len = sizes[i], n = qc_raw_frame_bytes(len);
        memset(dst + n, 0x5a, 8);
        qc_raw_frame_write(dst, src, len);
        for (size_t k = 0; k < 8; k++)
            assert_int_equal(dst[n + k], 0x5a);
        assert_int_equal(ZSTD_findFrameCompressedSize(dst, n), n);
        assert_int_equal(ZSTD_decompress(back, most, dst, n), len);
        assert_memory_equal(back, src, len);
        assert_int_equal(qc_frame_decode(c, dst, n, back, len, &err), QC_OK);
        if (len > 0) {
            dst[n / 2] ^= 1; /* content, or a block's header */
            assert_int_equal(qc_frame_decode(c, dst, n, back, len, &err), QC_ERR_INPUT);
            dst[n / 2] ^= 1;
        }
        dst[n - 1] ^= 1;
        assert_int_equal(qc_frame_decode(c, dst, n, back, len, &err), QC_ERR_INPUT);
    }
    qc_frame_coder_destroy(c);
    free(src);
    free(dst);
    free(back);
}

/* Straight from a file, and only what is written as qc_raw_frame_write writes it. */
TEST_WITH(raw_frames_are_read_in_place, setup, teardown)
{
    static const size_t sizes[] = {1, 131071, 131072, 131073, 131074, 131075, 262144, 300000};
    const size_t at = 77, most = 300000;
    unsigned char *src = must_alloc(most), *file = must_alloc(at + qc_raw_frame_bytes(most));
    qc_error err = {0};
    qc_digest_state *hash = NULL;
    assert_int_equal(qc_digest_create(&hash, NULL), QC_OK);
    fill_skewed(src, most, 8);
    memset(file, 1, at);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t len = sizes[i], n = qc_raw_frame_bytes(len);
        unsigned char *dst = must_alloc(len); /* exact: sanitizers see what lies beyond */
        qc_raw_frame_write(file + at, src, len);
        qc_digest want = qc_digest_bytes(file + at, n);
        /* 0: as it is; then a bit of each part, and the last byte missing. */
        const size_t flips[] = {0, 1, 5, 10, 12, len / 3 + 12, n - 1, n - 4};
        for (size_t k = 0; k <= sizeof flips / sizeof *flips; k++) {
            qc_file f = QC_FILE_CLOSED;
            int cut = k == sizeof flips / sizeof *flips, as_written = 9;
            int in_head = k >= 1 && k <= 3;
            if (k > 0 && !cut)
                file[at + flips[k]] ^= 4;
            fx_put(dir.path, "file.zst", file, at + n - (cut ? 1 : 0));
            assert_int_equal(qc_file_open_read(&f, path, &err), QC_OK);
            memset(dst, 0xee, len);
            qc_status st = qc_raw_frame_read(&as_written, &f, at, dst, len, NULL, &err);
            assert_int_equal(st, cut ? QC_ERR_TRUNCATED : k == 0 || in_head ? QC_OK : QC_ERR_INPUT);
            assert_int_equal(as_written, k == 0);
            if (k == 0)
                assert_memory_equal(dst, src, len);
            qc_digest_reset(hash);
            st = qc_raw_frame_read(&as_written, &f, at, dst, len, hash, &err);
            assert_int_equal(st, cut ? QC_ERR_TRUNCATED : QC_OK);
            assert_int_equal(as_written, !in_head && !cut);
            if (as_written) { /* what was flipped, the digest has */
                qc_digest got = qc_digest_finish(hash);
                assert_int_equal(qc_digest_equal(&got, &want), k == 0);
            }
            qc_file_discard(&f);
            if (k > 0 && !cut)
                file[at + flips[k]] ^= 4;
        }
        if (len > 131072) { /* the head of the second block */
            qc_file f = QC_FILE_CLOSED;
            int as_written = 9;
            file[at + 12 + 131072 + 1] ^= 1;
            fx_put(dir.path, "file.zst", file, at + n);
            assert_int_equal(qc_file_open_read(&f, path, &err), QC_OK);
            assert_int_equal(qc_raw_frame_read(&as_written, &f, at, dst, len, NULL, &err), QC_OK);
            assert_int_equal(as_written, 0);
            qc_file_discard(&f);
        }
        free(dst);
    }
    qc_digest_destroy(hash);
    free(src);
    free(file);
}

TEST(frames_go_both_ways)
{
    static const size_t sizes[] = {0,         1,         100,           4096, 100000, 256 * KIB - 1,
                                   256 * KIB, 300 * KIB, 1024 * KIB + 7};
    static const int levels[] = {1, 2, 3, 9};
    unsigned char *src = must_alloc(2048 * KIB);
    qc_frame_coder *c = NULL;
    assert_int_equal(qc_frame_coder_create(&c, NULL), QC_OK);
    for (unsigned bits = 0; bits <= 8; bits += 2) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            fill_skewed(src, sizes[i], bits);
            for (size_t k = 0; k < sizeof levels / sizeof *levels; k++) {
                size_t n = round_trip(c, levels[k], src, sizes[i]);
                if (sizes[i] >= 4096 && bits < 8)
                    assert_true(n < sizes[i] * (bits + 1) / 8 + 200);
                if (bits == 8)
                    assert_int_equal(n, qc_raw_frame_bytes(sizes[i]));
            }
        }
    }
    qc_frame_coder_destroy(c);
    free(src);
}

/* Repetitions are found where there are any, though level 1 looks for them in a sample only. */
TEST(matches_are_used_at_level_1)
{
    size_t len = 1024 * KIB;
    unsigned char *src = must_alloc(len);
    qc_frame_coder *c = NULL;
    assert_int_equal(qc_frame_coder_create(&c, NULL), QC_OK);
    fill_skewed(src, len, 8);
    for (size_t i = 3000; i < len; i++)
        src[i] = src[i - 3000];
    assert_true(round_trip(c, 1, src, len) < len / 10);
    memset(src, 0, len);
    assert_true(round_trip(c, 1, src, len) < 200);
    qc_frame_coder_destroy(c);
    free(src);
}

TEST(checksums_are_skipped_on_request)
{
    const size_t len = 300 * KIB, cap = qc_frame_bound(len);
    unsigned char *src = must_alloc(len), *dst = must_alloc(cap), *back = must_alloc(len);
    size_t n = 0;
    for (unsigned bits = 4; bits <= 8; bits += 4) { /* compressed, stored */
        qc_frame_coder *c = NULL;
        assert_int_equal(qc_frame_coder_create(&c, NULL), QC_OK);
        fill_skewed(src, len, bits);
        assert_int_equal(qc_frame_encode(c, 1, src, len, dst, cap, &n, NULL), QC_OK);
        dst[n - 1] ^= 1;
        assert_int_equal(qc_frame_decode(c, dst, n, back, len, NULL), QC_ERR_INPUT);
        qc_frame_coder_skip_checksums(c);
        for (unsigned again = 0; again < 2; again++) {
            memset(back, 0, len);
            assert_int_equal(qc_frame_decode(c, dst, n, back, len, NULL), QC_OK);
            assert_memory_equal(back, src, len);
        }
        assert_int_equal(qc_frame_decode(c, dst, n - 1, back, len, NULL), QC_ERR_INPUT);
        qc_frame_coder_destroy(c);
    }
    free(src);
    free(dst);
    free(back);
}

TEST(the_four_percent_rule)
{
    size_t len = 1024 * KIB;
    unsigned char *src = must_alloc(len);
    qc_frame_coder *c = NULL;
    assert_int_equal(qc_frame_coder_create(&c, NULL), QC_OK);
    /* So many of 256 bytes are below 16: their entropy is 0.8% below 8 bits, 3.2%, 6.4%, ... */
    static const struct {
        unsigned skewed;
        int stored;
    } cases[] = {{0, 1}, {26, 1}, {51, 1}, {77, 0}, {128, 0}, {256, 0}};
    for (int level = 1; level <= 3; level++) {
        for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
            for (size_t i = 0; i < len; i++) {
                uint64_t r = next_random() >> 20;
                src[i] = (unsigned char)((r >> 8 & 255) < cases[k].skewed ? r & 15 : r);
            }
            size_t n = round_trip(c, level, src, len);
            assert_int_equal(n == qc_raw_frame_bytes(len), cases[k].stored);
        }
    }
    qc_frame_coder_destroy(c);
    free(src);
}

/* The default number of threads rests on these. */
TEST(a_coder_says_what_it_takes)
{
    const size_t frame = 8 << 20;
    assert_int_equal(qc_frame_coder_bytes(0, frame), 0);
    assert_in_range(qc_frame_coder_bytes(1, frame), 100 << 10, 4 << 20);
    assert_in_range(qc_frame_coder_bytes(19, frame), 40 << 20, 200 << 20);
}

TEST(wrong_calls_are_refused)
{
    qc_frame_coder *c = NULL;
    char buf[300];
    size_t n = 0;
    assert_int_equal(qc_frame_coder_create(&c, NULL), QC_OK);
    assert_int_equal(qc_frame_encode(c, 0, "x", 1, buf, sizeof buf, &n, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_frame_encode(c, 20, "x", 1, buf, sizeof buf, &n, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_frame_encode(c, 1, "x", 1, buf, qc_frame_bound(1) - 1, &n, NULL),
                     QC_ERR_INTERNAL);
    assert_int_equal(qc_frame_encode(c, 1, buf, QC_FRAME_MAX_BYTES + 1, buf, sizeof buf, &n, NULL),
                     QC_ERR_INTERNAL);
    qc_frame_coder_destroy(c);
    qc_frame_coder_destroy(NULL);
    assert_string_equal(qc_frame_library_version(), ZSTD_versionString());
}

TEST(damaged_frames_are_refused)
{
    unsigned char src[2000], dst[3000], back[2001];
    size_t n = 0;
    qc_error err = {0};
    qc_frame_coder *c = NULL;
    assert_int_equal(qc_frame_coder_create(&c, NULL), QC_OK);
    fill_skewed(src, sizeof src, 5);
    assert_true(qc_frame_bound(sizeof src) <= sizeof dst);
    assert_int_equal(qc_frame_encode(c, 1, src, sizeof src, dst, sizeof dst, &n, &err), QC_OK);
    assert_true(n < sizeof src);
    for (size_t len = 0; len < n; len++) { /* cut short */
        unsigned char *exact = must_alloc(len);
        memcpy(exact, dst, len);
        assert_int_equal(qc_frame_decode(c, exact, len, back, sizeof src, &err), QC_ERR_INPUT);
        free(exact);
    }
    for (size_t bit = 0; bit < n * 8; bit++) {
        dst[bit / 8] ^= (unsigned char)(1u << bit % 8);
        qc_status st = qc_frame_decode(c, dst, n, back, sizeof src, &err);
        if (st == QC_OK) /* bits without meaning: never other content */
            assert_memory_equal(back, src, sizeof src);
        else
            assert_int_equal(st, QC_ERR_INPUT);
        dst[bit / 8] ^= (unsigned char)(1u << bit % 8);
    }
    assert_int_equal(qc_frame_decode(c, dst, n, back, sizeof src + 1, &err), QC_ERR_INPUT);
    assert_int_equal(qc_frame_decode(c, dst, n, back, sizeof src - 1, &err), QC_ERR_INPUT);
    assert_int_equal(qc_frame_decode(c, dst, n + 1, back, sizeof src, &err), QC_ERR_INPUT);
    static const unsigned char skippable[] = {0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0};
    assert_int_equal(qc_frame_decode(c, skippable, 8, back, 0, &err), QC_ERR_INPUT);
    memcpy(dst + n, skippable, 8); /* two frames are not one */
    assert_int_equal(qc_frame_decode(c, dst, n + 8, back, sizeof src, &err), QC_ERR_INPUT);
    qc_frame_coder_destroy(c);
}

TEST(out_of_memory_is_said)
{
    size_t len = 300 * KIB, cap = qc_frame_bound(len);
    unsigned char *src = must_alloc(len), *dst = must_alloc(cap);
    fill_skewed(src, len, 6);
    EACH_ALLOCATION_FAILS (fault, 0) {
        qc_frame_coder *c = NULL;
        size_t used = 0;
        fault.st = qc_frame_coder_create(&c, NULL);
        if (fault.st == QC_OK)
            fault.st = qc_frame_encode(c, 1, src, len, dst, cap, &used, NULL);
        if (fault.st == QC_OK)
            fault.st = qc_frame_decode(c, dst, used, src, len, NULL);
        qc_frame_coder_destroy(c);
        assert_true(fault.st != QC_OK || fault.at > 4); /* libzstd's own took part */
    }
    free(src);
    free(dst);
}

/* ---- Seek tables ---------------------------------------------------------------------------- */

static qc_status read_bytes(qc_seek_table *t, const void *bytes, size_t len, qc_error *err)
{
    qc_file f = QC_FILE_CLOSED;
    fx_put(dir.path, "file.zst", bytes, len);
    assert_int_equal(qc_file_open_read(&f, path, err), QC_OK);
    qc_status st = qc_seek_table_read(t, &f, err);
    qc_file_discard(&f);
    return st;
}

/* count frames of 100 bytes each, of no particular content, and their table. */
static void build_file(qc_strbuf *b, size_t count)
{
    qc_frame *frames = must_alloc(count * sizeof *frames);
    static const char filler[100] = "";
    qc_strbuf_init(b, 10000000);
    for (size_t i = 0; i < count; i++) {
        frames[i] = (qc_frame){i * 100, i * 1000, 100, 1000};
        assert_int_equal(qc_strbuf_add(b, filler, sizeof filler, NULL), QC_OK);
    }
    assert_int_equal(qc_seek_table_build(b, frames, count, NULL), QC_OK);
    free(frames);
}

TEST(a_table_has_the_bytes_of_the_specification)
{
    static const unsigned char want[] = {
        0x5e, 0x2a, 0x4d, 0x18, 25, 0, 0, 0, 0x10, 0, 0, 0, 0x20, 0,    0,    0,   0x30,
        0x01, 0,    0,    0,    0,  0, 0, 2, 0,    0, 0, 0, 0xb1, 0xea, 0x92, 0x8f};
    static const qc_frame frames[] = {{0, 0, 0x10, 0x20}, {0x10, 0x20, 0x130, 0}};
    SCOPED(qc_strbuf) b = {.max = 1000};
    assert_int_equal(qc_seek_table_build(&b, frames, 2, NULL), QC_OK);
    assert_int_equal(b.len, sizeof want);
    assert_memory_equal(b.data, want, sizeof want);
}

/* One frame of `stored` bytes that says it holds `content`. */
static qc_status read_one_frame(size_t stored, uint32_t content, qc_error *err)
{
    SCOPED(qc_seek_table) t;
    qc_frame frame = {0, 0, (uint32_t)stored, content};
    void *filler = must_alloc(stored);
    memset(filler, 0, stored);
    SCOPED(qc_strbuf) b = {.max = 10000000};
    assert_int_equal(qc_strbuf_add(&b, filler, stored, NULL), QC_OK);
    assert_int_equal(qc_seek_table_build(&b, &frame, 1, NULL), QC_OK);
    qc_status st = read_bytes(&t, b.data, b.len, err);
    free(filler);
    return st;
}

/* A frame is read into memory whole: one that is far larger than its content is refused. */
TEST_WITH(a_frame_is_not_much_larger_than_its_content, setup, teardown)
{
    qc_error err = {0};
    assert_int_equal(read_one_frame(1000, 1000, &err), QC_OK);
    assert_int_equal(read_one_frame(2 * qc_frame_bound(1000), 1000, &err), QC_OK);
    assert_int_equal(read_one_frame(2 * qc_frame_bound(1000) + 2, 1000, &err), QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "too much for 1000 bytes of content"));
    assert_int_equal(read_one_frame(1 << 20, 1, &err), QC_ERR_INPUT);
    assert_int_equal(read_one_frame(1 << 20, 0, &err), QC_OK); /* never read */
}

TEST_WITH(tables_go_both_ways, setup, teardown)
{
    static const size_t counts[] = {0, 1, 2, 4095, 4096, 4097, 9000};
    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
        qc_strbuf b;
        SCOPED(qc_seek_table) t;
        qc_error err = {0};
        build_file(&b, counts[k]);
        assert_int_equal(read_bytes(&t, b.data, b.len, &err), QC_OK);
        assert_int_equal(t.count, counts[k]);
        assert_int_equal(t.content_bytes, counts[k] * 1000);
        assert_int_equal(t.table_offset, counts[k] * 100);
        assert_int_equal(t.table_bytes, 17 + counts[k] * 8);
        for (size_t i = 0; i < t.count; i++) {
            assert_int_equal(t.frames[i].stored_offset, i * 100);
            assert_int_equal(t.frames[i].content_offset, i * 1000);
            assert_int_equal(qc_seek_table_find(&t, i * 1000), i);
            assert_int_equal(qc_seek_table_find(&t, i * 1000 + 999), i);
        }
        qc_strbuf_deinit(&b);
    }
    qc_seek_table_deinit(NULL);
}

TEST(empty_frames_are_never_found)
{
    qc_frame frames[] = {{0, 0, 9, 0},  {9, 0, 9, 5},  {18, 5, 9, 0}, {27, 5, 9, 0},
                         {36, 5, 9, 1}, {45, 6, 9, 4}, {54, 10, 9, 0}};
    static const size_t holds[] = {1, 1, 1, 1, 1, 4, 5, 5, 5, 5};
    qc_seek_table t = {frames, 7, 10, 63, 0};
    for (size_t i = 0; i < 10; i++)
        assert_int_equal(qc_seek_table_find(&t, i), holds[i]);
}

TEST_WITH(entries_with_checksums_are_read, setup, teardown)
{
    unsigned char file[20 + 8 + 24 + 9] = {0}, *p = file + 20;
    SCOPED(qc_seek_table) t;
    qc_store_le32(p, 0x184D2A5E);
    qc_store_le32(p + 4, 24 + 9);
    qc_store_le32(p + 8, 11);
    qc_store_le32(p + 12, 70);
    qc_store_le32(p + 16, 0xdeadbeef);
    qc_store_le32(p + 20, 9);
    qc_store_le32(p + 24, 30);
    qc_store_le32(p + 32, 2);
    p[36] = 0x83; /* checksums; the two low bits mean nothing */
    qc_store_le32(p + 37, 0x8F92EAB1);
    assert_int_equal(read_bytes(&t, file, sizeof file, NULL), QC_OK);
    assert_int_equal(t.count, 2);
    assert_int_equal(t.content_bytes, 100);
    assert_int_equal(t.frames[1].stored_offset, 11);
}

TEST_WITH(every_truncation_is_refused, setup, teardown)
{
    qc_strbuf b;
    build_file(&b, 3);
    for (size_t len = 0; len < b.len; len++) {
        qc_seek_table t;
        qc_error err = {0};
        qc_status st = read_bytes(&t, b.data, len, &err);
        assert_true(st == QC_ERR_INPUT || st == QC_ERR_TRUNCATED);
        assert_non_null(strstr(err.msg, path));
        assert_null(t.frames);
    }
    qc_strbuf_deinit(&b);
}

/* Every bit of a table: refused, or one of the two bits that mean nothing, or a content size, which
 * the frame then contradicts. */
TEST_WITH(every_flipped_bit_is_noticed, setup, teardown)
{
    qc_frame frames[3];
    qc_frame_coder *c = NULL;
    unsigned char src[500], buf[1000], back[1000];
    unsigned ignored = 0, sizes = 0;
    SCOPED(qc_strbuf) b = {.max = 10000};
    assert_int_equal(qc_frame_coder_create(&c, NULL), QC_OK);
    fill_skewed(src, sizeof src, 4);
    for (size_t i = 0; i < 3; i++) {
        size_t n = 0;
        assert_int_equal(qc_frame_encode(c, 1, src, sizeof src, buf, sizeof buf, &n, NULL), QC_OK);
        frames[i] = (qc_frame){b.len, i * sizeof src, (uint32_t)n, sizeof src};
        assert_int_equal(qc_strbuf_add(&b, buf, n, NULL), QC_OK);
    }
    size_t table = b.len;
    assert_int_equal(qc_seek_table_build(&b, frames, 3, NULL), QC_OK);
    for (size_t bit = table * 8; bit < b.len * 8; bit++) {
        qc_seek_table t;
        b.data[bit / 8] ^= (char)(1u << bit % 8);
        qc_status st = read_bytes(&t, b.data, b.len, NULL);
        if (st == QC_OK) {
            assert_int_equal(t.count, 3);
            size_t wrong = 3;
            for (size_t i = 0; i < 3; i++) {
                assert_int_equal(t.frames[i].stored_bytes, frames[i].stored_bytes);
                if (t.frames[i].content_bytes != sizeof src)
                    wrong = i;
            }
            if (wrong == 3) {
                ignored++;
            } else {
                sizes++;
                if (t.frames[wrong].content_bytes <= sizeof back)
                    assert_int_equal(qc_frame_decode(c, b.data + frames[wrong].stored_offset,
                                                     frames[wrong].stored_bytes, back,
                                                     t.frames[wrong].content_bytes, NULL),
                                     QC_ERR_INPUT);
            }
        } else {
            assert_true(st == QC_ERR_INPUT || st == QC_ERR_TRUNCATED);
        }
        qc_seek_table_deinit(&t);
        b.data[bit / 8] ^= (char)(1u << bit % 8);
    }
    assert_int_equal(ignored, 2);
    assert_int_equal(sizes, 3 * 28); /* the top four bits exceed what is read */
    qc_frame_coder_destroy(c);
}

TEST_WITH(hostile_tables_are_refused, setup, teardown)
{
    unsigned char file[64];
    qc_seek_table t;
    qc_error err = {0};
    static const struct {
        uint32_t magic, size, stored, content, count;
        unsigned char descriptor;
    } cases[] = {
        {0x184D2A5D, 17, 39, 1, 1, 0},          /* another skippable frame */
        {0x184D2A5E, 18, 39, 1, 1, 0},          /* another size */
        {0x184D2A5E, 17, 38, 1, 1, 0},          /* a gap before the table */
        {0x184D2A5E, 17, 40, 1, 1, 0},          /* into the table */
        {0x184D2A5E, 17, 0, 1, 1, 0},           /* no frame at all */
        {0x184D2A5E, 17, 7, 1, 1, 0},           /* shorter than any frame */
        {0x184D2A5E, 17, 39, 0x10000001, 1, 0}, /* more than is read at once */
        {0x184D2A5E, 17, 39, 0xffffffff, 1, 0}, /* all ones */
        {0x184D2A5E, 17, 39, 1, 2, 0},          /* more frames than fit */
        {0x184D2A5E, 17, 39, 1, 0xffffffff, 0}, /* a count that overflows */
        {0x184D2A5E, 17, 39, 1, 0x8000001, 0},  /* a count above the format's limit */
        {0x184D2A5E, 17, 39, 1, 0x8000000, 0},  /* and at it */
        {0x184D2A5E, 17, 39, 1, 1, 4},          /* reserved bits */
        {0x184D2A5E, 17, 39, 1, 1, 0x40},       /* the other end of them */
        {0x184D2A5E, 17, 39, 1, 1, 0x80},       /* entries of another size */
    };
    for (size_t i = 0; i <= sizeof cases / sizeof *cases; i++) {
        memset(file, 0, sizeof file);
        int right = i == sizeof cases / sizeof *cases;
        qc_store_le32(file + 39, right ? 0x184D2A5E : cases[i].magic);
        qc_store_le32(file + 43, right ? 17 : cases[i].size);
        qc_store_le32(file + 47, right ? 39 : cases[i].stored);
        qc_store_le32(file + 51, right ? 1 : cases[i].content);
        qc_store_le32(file + 55, right ? 1 : cases[i].count);
        file[59] = right ? 0 : cases[i].descriptor;
        qc_store_le32(file + 60, 0x8F92EAB1);
        qc_status st = read_bytes(&t, file, sizeof file, &err);
        if (right)
            assert_int_equal(st, QC_OK);
        else
            assert_true(st == QC_ERR_INPUT || st == QC_ERR_TRUNCATED);
        qc_seek_table_deinit(&t);
    }
}

TEST(frames_must_follow_each_other)
{
    qc_frame frames[] = {{0, 0, 10, 20}, {11, 20, 10, 20}};
    qc_error err = {0};
    SCOPED(qc_strbuf) b = {.max = 1000};
    assert_int_equal(qc_strbuf_adds(&b, "kept", NULL), QC_OK);
    assert_int_equal(qc_seek_table_build(&b, frames, 2, &err), QC_ERR_INTERNAL);
    frames[1] = (qc_frame){10, 21, 10, 20};
    assert_int_equal(qc_seek_table_build(&b, frames, 2, &err), QC_ERR_INTERNAL);
    assert_int_equal(qc_seek_table_build(&b, frames, 0x8000001, &err), QC_ERR_UNSUPPORTED);
    assert_string_equal(b.data, "kept");
}

TEST_WITH(faults_are_passed_on, setup, teardown)
{
    qc_strbuf b;
    qc_seek_table t;
    build_file(&b, 5000);
    for (uint64_t n = 1;; n++) {
        qc_io_fail_at(QC_IO_READ, n, 0, EIO);
        qc_status st = read_bytes(&t, b.data, b.len, NULL);
        qc_io_fail_at(QC_IO_READ, 0, 0, 0);
        if (st == QC_OK)
            break;
        assert_int_equal(st, QC_ERR_IO);
        assert_null(t.frames);
    }
    qc_seek_table_deinit(&t);
    qc_file f = QC_FILE_CLOSED;
    assert_int_equal(qc_file_open_read(&f, path, NULL), QC_OK);
    EACH_ALLOCATION_FAILS (fault, 0) {
        fault.st = qc_seek_table_read(&t, &f, NULL);
        qc_seek_table_deinit(&t);
    }
    qc_file_discard(&f);
    assert_int_equal(qc_seek_table_read(&t, &(qc_file){-1, path}, NULL), QC_ERR_IO);
    qc_frame frames[100];
    for (size_t i = 0; i < 100; i++)
        frames[i] = (qc_frame){i * 10, i * 10, 10, 10};
    EACH_ALLOCATION_FAILS (fault, 0) {
        SCOPED(qc_strbuf) out = {.max = 10000};
        fault.st = qc_seek_table_build(&out, frames, 100, NULL);
    }
    qc_strbuf_deinit(&b);
}

/* ---- The example of docs/format.md ---------------------------------------------------------- */

static void add_stored(qc_strbuf *b, qc_frame *frame, uint64_t content_offset, const void *p,
                       size_t len)
{
    unsigned char buf[512];
    size_t n = qc_raw_frame_bytes(len);
    assert_true(n <= sizeof buf);
    qc_raw_frame_write(buf, p, len);
    *frame = (qc_frame){b->len, content_offset, (uint32_t)n, (uint32_t)len};
    assert_int_equal(qc_strbuf_add(b, buf, n, NULL), QC_OK);
}

TEST(the_documented_example_is_right)
{
    static const qc_st_tensor t[] = {
        {.name = "s", .dtype = QC_DTYPE_F32, .ndim = 1, .dims = {1}, .begin = 0, .end = 4},
        {.name = "w", .dtype = QC_DTYPE_U8, .ndim = 2, .dims = {3, 1}, .begin = 4, .end = 7}};
    static const qc_st_meta meta = {"format", "pt"};
    static const unsigned char s[] = {0, 0, 0x80, 0x3f}, w[] = {0x12, 0x34, 0x56};
    qc_frame frames[3];
    SCOPED(qc_strbuf) head = {.max = 1000};
    SCOPED(qc_strbuf) file = {.max = 1000};
    assert_int_equal(st_header_build(&head, t, 2, &meta, 1, NULL), QC_OK);
    add_stored(&file, &frames[0], 0, head.data, head.len);
    add_stored(&file, &frames[1], head.len, s, sizeof s);
    add_stored(&file, &frames[2], head.len + sizeof s, w, sizeof w);
    assert_int_equal(qc_seek_table_build(&file, frames, 3, NULL), QC_OK);

    FILE *f = fopen(QC_TEST_GOLDEN "/../../docs/format.md", "r");
    char line[400];
    size_t at = 0;
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        char *used = NULL;
        unsigned long offset = strtoul(line, &used, 16);
        if (used != line + 8 || strncmp(used, "  ", 2) != 0 || offset != at)
            continue;
        for (const char *p = used + 2; *p != '|' && at < file.len; at++) {
            char *end = NULL;
            unsigned long byte = strtoul(p, &end, 16);
            assert_int_equal(byte, (unsigned char)file.data[at]);
            p = end + strspn(end, " ");
        }
    }
    (void)fclose(f);
    assert_int_equal(at, file.len);
}
