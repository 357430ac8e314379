/* base/: status, arena, strbuf, sizes, dtypes, CPU choice, teams and turnstiles. */
#define _GNU_SOURCE /* syscall */
#include "base/alloc.h"
#include "base/arena.h"
#include "base/bytes.h"
#include "base/checked.h"
#include "base/cpu.h"
#include "base/dtype.h"
#include "base/edit_distance.h"
#include "base/strbuf.h"
#include "base/text.h"
#include "base/workers.h"
#include "tests/fixtures/test.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

TEST(test_status)
{
    qc_error err = {0};
    assert_string_equal(qc_status_name(QC_ERR_NOSPACE), "ERR_NOSPACE");
    assert_int_equal(qc_status_exit_code(QC_OK), 0);
    assert_int_equal(qc_status_exit_code(QC_ERR_NOSPACE), 1);
    assert_int_equal(qc_status_exit_code(QC_ERR_USAGE), 2);
    assert_int_equal(qc_status_exit_code(QC_ERR_NONFINITE), 3);
    assert_int_equal(qc_status_exit_code(QC_ERR_CHECK), 4);
    assert_int_equal(qc_status_exit_code(QC_ERR_DEVICE), 5);
    assert_int_equal(qc_status_exit_code(QC_ERR_INTERRUPTED), 130);
    assert_string_equal(qc_status_name((qc_status)1000), "ERR_INTERNAL");
    for (int i = 0; i < QC_STATUS_COUNT; i++)
        assert_true(strlen(qc_status_meaning((qc_status)i)) > 0);
    assert_int_equal(qc_error_set(NULL, QC_ERR_IO, "f", 1, "x"), QC_ERR_IO);
    qc_error_prefix(NULL, "x");
    qc_error_set(&err, QC_ERR_IO, "f.c", 7, "name '%s'\033[31m", "a\nb");
    assert_string_equal(err.msg, "name 'a?b'?[31m");
    assert_int_equal(err.line, 7);
    qc_error_prefix(&err, "%s", "path");
    assert_string_equal(err.msg, "path: name 'a?b'?[31m");
}

/* A message that is too long is cut between characters. */
TEST(test_long_messages)
{
    char name[1200];
    for (int shift = 0; shift < 4; shift++) {
        qc_error err = {0};
        memset(name, 'x', sizeof name);
        for (int i = shift; i + 1 < 1100; i += 2)
            memcpy(name + i, "\xc3\xa9", 2);
        name[1100] = '\0';
        qc_error_set(&err, QC_ERR_INPUT, "f", 1, "%s", name);
        size_t len = strlen(err.msg);
        assert_true(len > 500 && len < sizeof err.msg);
        assert_string_equal(err.msg + len - 3, "...");
        assert_true((unsigned char)err.msg[len - 4] != 0xc3);
        qc_error_prefix(&err, "%s", name);
        len = strlen(err.msg);
        assert_string_equal(err.msg + len - 3, "...");
        assert_true((unsigned char)err.msg[len - 4] != 0xc3);
    }
}

TEST(test_sizes)
{
    uint64_t v = 0;
    size_t s = 0;
    assert_int_equal(qc_mul_u64(1ull << 32, 1ull << 31, &v), 0);
    assert_int_not_equal(qc_mul_u64(1ull << 32, 1ull << 32, &v), 0);
    assert_int_not_equal(qc_add_u64(UINT64_MAX, 1, &v), 0);
    assert_int_not_equal(qc_mul_size(SIZE_MAX, 2, &s), 0);
    assert_true(qc_ceil_div_u64(UINT64_MAX, 2) == 1ull << 63);
    assert_true(qc_ceil_div_u64(0, 5) == 0);
    unsigned char b[8] = {1, 2, 3, 4, 5, 6, 7, 8}, back[8];
    assert_int_equal(qc_load_le32(b), 0x04030201);
    assert_true(qc_load_le64(b) == 0x0807060504030201u);
    qc_store_le64(back, qc_load_le64(b));
    assert_memory_equal(b, back, 8);
}

TEST(test_dtypes)
{
    qc_error err = {0};
    qc_dtype t;
    uint64_t n = 0;
    for (int i = 0; i < QC_DTYPE_COUNT; i++) {
        const char *name = qc_dtype_name((qc_dtype)i);
        assert_int_equal(qc_dtype_from_name(name, strlen(name), &t), 0);
        assert_int_equal(t, i);
    }
    assert_int_equal(qc_dtype_from_name("f32", 3, &t), 1);
    assert_int_equal(qc_dtype_from_name("F3", 2, &t), 1);
    assert_int_equal(qc_shape_bytes((uint64_t[]){3, 5}, 2, QC_DTYPE_BF16, &n, &err), QC_OK);
    assert_true(n == 30);
    assert_int_equal(qc_shape_bytes(NULL, 0, QC_DTYPE_F64, &n, &err), QC_OK);
    assert_true(n == 8);
    assert_int_equal(qc_shape_bytes((uint64_t[]){2, 0}, 2, QC_DTYPE_F64, &n, &err), QC_OK);
    assert_true(n == 0);
    assert_int_equal(qc_shape_bytes((uint64_t[]){3}, 1, QC_DTYPE_F4, &n, &err), QC_ERR_INPUT);
    assert_int_equal(qc_shape_bytes((uint64_t[]){1ull << 40, 1ull << 40}, 2, QC_DTYPE_U8, &n, &err),
                     QC_ERR_INPUT);
    assert_int_equal(qc_shape_bytes((uint64_t[]){1ull << 61}, 1, QC_DTYPE_U8, &n, &err),
                     QC_ERR_INPUT);
    assert_null(qc_dtype_torch_name(QC_DTYPE_F4));
    assert_string_equal(qc_dtype_torch_name(QC_DTYPE_BF16), "bfloat16");
    assert_true(qc_dtype_is_integer(QC_DTYPE_BOOL) && qc_dtype_is_integer(QC_DTYPE_U64));
    assert_false(qc_dtype_is_integer(QC_DTYPE_F8_E8M0) || qc_dtype_is_integer(QC_DTYPE_C64));
}

TEST(test_arena_and_strbuf)
{
    qc_error err = {0};
    qc_arena a;
    const char *s = NULL;
    void *p = NULL;
    qc_arena_init(&a);
    for (size_t i = 0; i < 5000; i++) {
        assert_int_equal(qc_arena_alloc(&a, &p, i % 97, 3, &err), QC_OK);
        assert_int_equal((uintptr_t)p % 16, 0);
        memset(p, 0xff, i % 97 * 3);
    }
    assert_int_equal(qc_arena_alloc(&a, &p, 1000000, 1, &err), QC_OK);
    for (size_t i = 0; i < 1000000; i++)
        assert_int_equal(((unsigned char *)p)[i], 0);
    assert_int_equal(qc_arena_alloc(&a, &p, SIZE_MAX, 2, &err), QC_ERR_NOMEM);
    assert_int_equal(qc_arena_printf(&a, &s, &err, "%d-%s", 5, "x"), QC_OK);
    assert_string_equal(s, "5-x");
    qc_arena_deinit(&a);
    qc_arena_deinit(NULL);
    qc_strbuf b;
    qc_strbuf_init(&b, 10);
    assert_int_equal(qc_strbuf_adds(&b, "12345", &err), QC_OK);
    assert_int_equal(qc_strbuf_addf(&b, &err, "%05d", 67), QC_OK);
    assert_string_equal(b.data, "1234500067");
    assert_int_equal(qc_strbuf_adds(&b, "x", &err), QC_ERR_NOMEM);
    assert_int_equal(qc_strbuf_status(&b, &err), QC_OK); /* an add tells its failure itself */
    qc_strbuf_puts(&b, "y");
    qc_strbuf_putf(&b, "%s", "");
    assert_int_equal(qc_strbuf_status(&b, &err), QC_ERR_NOMEM);
    assert_int_equal(qc_strbuf_adds(&b, "", &err), QC_ERR_NOMEM);
    assert_string_equal(b.data, "1234500067");
    assert_string_equal(b.data, "1234500067");
    qc_strbuf_deinit(&b);
    qc_strbuf_deinit(&b);
}

TEST(lines_with_foreign_names_are_shown)
{
    qc_strbuf b;
    qc_strbuf_init(&b, 100);
    qc_strbuf_puts(&b, "\x1b");
    qc_strbuf_show(&b, "  %s: %d\n", "a\nb\x1b\xff\xc3\xa9", 5);
    assert_string_equal(b.data, "\x1b  a?b??\xc3\xa9: 5\n");
    qc_strbuf_show(&b, "%s", "");
    qc_strbuf_show(&b, "%s", "\n");
    assert_string_equal(b.data, "\x1b  a?b??\xc3\xa9: 5\n\n");
    qc_strbuf_show(&b, "%100s", "");
    assert_int_equal(qc_strbuf_status(&b, NULL), QC_ERR_NOMEM);
    qc_strbuf_deinit(&b);
    qc_strbuf_init(&b, 3);
    qc_strbuf_show(&b, "%s", "1234");
    assert_null(b.data);
    qc_strbuf_deinit(&b);
}

TEST(test_isa)
{
    qc_error err = {0};
    qc_isa isa;
    assert_int_equal(setenv("QCONV_ISA", "scalar", 1), 0);
    assert_int_equal(qc_isa_select(&isa, &err), QC_OK);
    assert_int_equal(isa, QC_ISA_SCALAR);
    assert_int_equal(setenv("QCONV_ISA", "sse9", 1), 0);
    assert_int_equal(qc_isa_select(&isa, &err), QC_ERR_USAGE);
    assert_non_null(strstr(err.msg, "sse9"));
    for (int i = 0; i < QC_ISA_COUNT; i++) {
        assert_int_equal(setenv("QCONV_ISA", qc_isa_name((qc_isa)i), 1), 0);
        qc_status want = qc_isa_available((qc_isa)i) ? QC_OK : QC_ERR_DEVICE;
        assert_int_equal(qc_isa_select(&isa, &err), want);
    }
    assert_int_equal(unsetenv("QCONV_ISA"), 0);
    assert_int_equal(qc_isa_select(&isa, &err), QC_OK);
    assert_true(qc_isa_available(isa));
    assert_true(qc_cpu_count() >= 1);
}

typedef struct {
    qc_turnstile gate;
    atomic_uint_fast64_t next;
    uint64_t order[3000];
    uint64_t passed;
    uint64_t fail_at;
} gated;

/* Numbers are taken in any order and must pass in theirs; every third is skipped. */
static qc_status pass_gate(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    (void)index;
    gated *g = ctx;
    for (;;) {
        uint64_t n = atomic_fetch_add(&g->next, 1);
        if (n >= 3000)
            return QC_OK;
        if (n % 3 == 2)
            continue;
        if (n == g->fail_at)
            QC_FAIL(err, QC_ERR_CHECK, "number %d", (int)n);
        QC_TRY(qc_turnstile_wait(&g->gate, n, team, err));
        g->order[g->passed++] = n;
        qc_turnstile_pass(&g->gate, n % 3 == 1 ? n + 2 : n + 1);
    }
}

TEST(test_turnstile)
{
    for (unsigned threads = 1; threads <= 8; threads *= 2) {
        qc_error err = {0};
        gated g = {.fail_at = UINT64_MAX};
        assert_int_equal(qc_turnstile_init(&g.gate, 0, &err), QC_OK);
        assert_int_equal(qc_team_run(threads, pass_gate, &g, &err), QC_OK);
        assert_true(g.passed == 2000);
        for (uint64_t i = 0; i < g.passed; i++)
            assert_true(g.order[i] == i / 2 * 3 + i % 2);
        qc_turnstile_deinit(&g.gate);
    }
}

/* One worker's error stops all, and is the one that is reported. */
TEST(test_team_error)
{
    for (unsigned threads = 1; threads <= 8; threads *= 2) {
        qc_error err = {0};
        gated g = {.fail_at = 900};
        assert_int_equal(qc_turnstile_init(&g.gate, 0, &err), QC_OK);
        assert_int_equal(qc_team_run(threads, pass_gate, &g, &err), QC_ERR_CHECK);
        assert_string_equal(err.msg, "number 900");
        qc_turnstile_deinit(&g.gate);
    }
}

TEST(test_interrupt)
{
    qc_error err = {0};
    gated g = {.fail_at = UINT64_MAX};
    assert_int_equal(qc_turnstile_init(&g.gate, 1u << 30, &err), QC_OK);
    qc_interrupt();
    assert_int_equal(qc_team_run(4, pass_gate, &g, &err), QC_ERR_INTERRUPTED);
    err = (qc_error){0};
    assert_int_equal(qc_check_interrupted(&err), QC_ERR_INTERRUPTED);
    assert_string_equal(err.msg, "interrupted");
    qc_interrupt_clear();
    assert_int_equal(qc_interrupted(), 0);
    assert_int_equal(qc_check_interrupted(&err), QC_OK);
    qc_turnstile_deinit(&g.gate);
}

/* The clock was set back by so many seconds after it was read. */
static int set_back;

/* In place of the C library's. */
int clock_gettime(clockid_t clock, struct timespec *t)
{
    int r = (int)syscall(SYS_clock_gettime, clock, t);
    t->tv_sec += clock == CLOCK_REALTIME ? set_back : 0;
    return r;
}

TEST(test_brief_waits)
{
    pthread_mutex_t lock;
    pthread_cond_t never;
    struct timespec begin, end;
    assert_int_equal(qc_lock_init(&lock, &never, NULL), QC_OK);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    set_back = 5;
    pthread_mutex_lock(&lock);
    qc_cond_wait_briefly(&never, &lock);
    pthread_mutex_unlock(&lock);
    set_back = 0;
    clock_gettime(CLOCK_MONOTONIC, &end);
    qc_lock_deinit(&lock, &never);
    assert_true(end.tv_sec - begin.tv_sec < 4);
}

TEST(test_edit_distance)
{
    static const struct {
        const char *a, *b;
        unsigned edits;
    } cases[] = {
        {"", "", 0},
        {"", "abc", 3},
        {"vram", "vram", 0},
        {"VRam", "vrAM", 0},
        {"vrm", "vram", 1},
        {"vraam", "vram", 1},
        {"vrem", "vram", 1},
        {"varm", "vram", 1},
        {"ca", "abc", 3}, /* a swap is not edited again */
        {"kitten", "sitting", 3},
    };
    char longest[QC_EDIT_MAX_BYTES + 1];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *a = cases[i].a, *b = cases[i].b;
        assert_int_equal(qc_edit_distance(a, strlen(a), b, strlen(b)), cases[i].edits);
        assert_int_equal(qc_edit_distance(b, strlen(b), a, strlen(a)), cases[i].edits);
    }
    memset(longest, 'x', sizeof longest);
    assert_int_equal(qc_edit_distance(longest, QC_EDIT_MAX_BYTES, "", 0), QC_EDIT_MAX_BYTES);
    assert_int_equal(qc_edit_distance(longest, QC_EDIT_MAX_BYTES + 1, "x", 1), QC_EDIT_TOO_LONG);
    assert_int_equal(qc_edit_distance("x", 1, longest, QC_EDIT_MAX_BYTES + 1), QC_EDIT_TOO_LONG);
}

TEST(test_folder_of)
{
    static const char *const folders[][2] = {
        {"name", "."}, {"./name", "."},    {"/name", "/"},  {"/", "/"},
        {"a/b", "a"},  {"/a/b/c", "/a/b"}, {"a/b/", "a/b"}, {"", "."},
    };
    char room[PATH_MAX], path[PATH_MAX + 2];
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
        assert_string_equal(qc_folder_of(room, folders[i][0]), folders[i][1]);
    memset(path, 'a', sizeof path);
    path[PATH_MAX + 1] = '\0';
    path[PATH_MAX - 1] = '/'; /* a folder of PATH_MAX - 1 bytes just fits */
    assert_int_equal(strlen(qc_folder_of(room, path)), PATH_MAX - 1);
    path[PATH_MAX - 1] = 'a';
    path[PATH_MAX] = '/';
    assert_null(qc_folder_of(room, path));
}

TEST(test_saturating_sizes)
{
    assert_true(qc_sat_add(1, 2) == 3 && qc_sat_mul(2, 3) == 6);
    assert_true(qc_sat_add(UINT64_MAX - 1, 1) == UINT64_MAX);
    assert_true(qc_sat_add(UINT64_MAX - 1, 2) == UINT64_MAX);
    assert_true(qc_sat_mul(1ull << 32, 1ull << 32) == UINT64_MAX);
    assert_true(qc_sat_mul(UINT64_MAX, 0) == 0);
}
