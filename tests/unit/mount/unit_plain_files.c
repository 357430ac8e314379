/* convert/mount/plain_files.h: what a mount shows is what unpack writes, in any order of reading
 * and by many threads; damage is told and never handed out. */
#include "base/alloc.h"
#include "base/workers.h"
#include "convert/mount/frame_cache.h"
#include "convert/mount/plain_files.h"
#include "formats/seekable.h"
#include "tests/fixtures/sanitized.h"
#include "tests/fixtures/test_model.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <time.h>

#include <cmocka.h>

#define BIG       "model.big"
#define BIG_BYTES (20u << 20) /* three frames */
#define SIDE      "notes.txt"

static char root[64], model[96], out[96], plain[96];

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Of the big tensor nothing can be compressed, so that its frames are stored alike. */
static void fill(qc_strbuf *text, const qc_st_tensor *t)
{
    if (t->dtype != QC_DTYPE_I8) {
        test_fill_pattern(text, t);
        return;
    }
    for (uint64_t i = 0; i < (t->end - t->begin) / 8; i++) {
        uint64_t v = mix(i + 1);
        qc_strbuf_put(text, &v, sizeof v);
    }
}

static int setup(void **state)
{
    static const test_tensor rows[] = {
        {BIG, QC_DTYPE_I8, 2, {20, 1u << 20}},
        {"model.embed_tokens.weight", QC_DTYPE_F32, 2, {32, 70}},
        {"model.empty", QC_DTYPE_F32, 2, {0, 7}},
        {"model.layers.0.mlp.up_proj.weight", QC_DTYPE_F32, 2, {300, 70}},
        {"model.layers.0.self_attn.q_proj.weight", QC_DTYPE_F32, 2, {1200, 1152}},
    };
    char path[160];
    qc_strbuf side;
    qc_error err = {0};
    (void)state;
    test_folder(root, sizeof root);
    (void)snprintf(model, sizeof model, "%s/model", root);
    (void)snprintf(out, sizeof out, "%s/out", root);
    (void)snprintf(plain, sizeof plain, "%s/plain", root);
    test_write_filled(model, rows, sizeof rows / sizeof *rows, "{\"model_type\": \"llama\"}", fill);
    /* A file of two pieces, in a folder. */
    (void)snprintf(path, sizeof path, "%s/deep/er", model);
    test_must(qc_dir_make(path, &err), &err);
    (void)snprintf(path, sizeof path, "%s/deep/er/" SIDE, model);
    qc_strbuf_init(&side, SIZE_MAX / 2);
    for (unsigned i = 0; i < 900000; i++)
        qc_strbuf_putf(&side, "%05u\n", i % 99991);
    test_must(qc_file_put(path, side.data, side.len, &err), &err);
    qc_strbuf_deinit(&side);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    test_remove(root);
    return 0;
}

static void make_output(const char *options)
{
    qc_error err = {0};
    test_must(test_run_line(test_command, &err, "qconv %s -q --force %s %s", options, model, out),
              &err);
}

typedef struct {
    unsigned count;
    qc_error last;
    pthread_mutex_t lock;
} faults;

static void add_fault(void *ctx, const qc_error *fault)
{
    faults *f = ctx;
    pthread_mutex_lock(&f->lock);
    f->count++;
    f->last = *fault;
    pthread_mutex_unlock(&f->lock);
}

static qc_plain_files *open_files(uint64_t memory, unsigned threads, faults *told)
{
    qc_plain_files *p = NULL;
    qc_error err = {0};
    test_must(qc_plain_files_create(&p, add_fault, told, &err), &err);
    test_must(qc_plain_files_add(p, out, "", &err), &err);
    test_must(qc_plain_files_start(p, memory, threads, &err), &err);
    return p;
}

static size_t index_of(const qc_plain_files *p, const char *path)
{
    size_t i = 0;
    while (i < qc_plain_files_count(p) && strcmp(qc_plain_files_at(p, i)->path, path) != 0)
        i++;
    assert_true(i < qc_plain_files_count(p));
    return i;
}

/* ---- The same bytes -------------------------------------------------------------------------- */

typedef struct {
    qc_plain_files *p;
    qc_strbuf *want; /* per file */
} reading;

/* Reads a stretch and compares it; nothing is written behind it. */
static qc_status compare(const reading *r, size_t i, uint64_t at, size_t len, qc_error *err)
{
    unsigned char *got = malloc(len + 1);
    got[len] = 0xa5;
    qc_status st = qc_plain_files_read(r->p, i, at, got, len, err);
    if (st == QC_OK && ((len && memcmp(got, r->want[i].data + at, len) != 0) || got[len] != 0xa5))
        st = QC_ERROR(err, QC_ERR_INTERNAL, "%zu bytes at %llu of %s are others", len,
                      (unsigned long long)at, qc_plain_files_at(r->p, i)->path);
    free(got);
    return st;
}

static qc_status read_some(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    const reading *r = ctx;
    uint64_t seed = 1000u * (index + 1);
    (void)team;
    for (unsigned k = 0; k < 150; k++) {
        const size_t i = mix(++seed) % qc_plain_files_count(r->p);
        const uint64_t bytes = r->want[i].len, at = mix(++seed) % (bytes + 1);
        const uint64_t most = (uint64_t)1 << mix(++seed) % 22, left = bytes - at;
        const uint64_t len = mix(++seed) % (most + 1);
        QC_TRY(compare(r, i, at, (size_t)(len < left ? len : left), err));
    }
    /* From beginning to end, as the kernel does. */
    for (uint64_t at = 0, n = 0; at < r->want[0].len; at += n) {
        n = r->want[0].len - at < (128u << 10) ? r->want[0].len - at : 128u << 10;
        QC_TRY(compare(r, 0, at, (size_t)n, err));
    }
    return QC_OK;
}

static void assert_as_unpacked(uint64_t memory, unsigned threads)
{
    faults told = {.lock = PTHREAD_MUTEX_INITIALIZER};
    reading r = {.p = open_files(memory, threads, &told)};
    qc_arena a;
    qc_tree_file *tree = NULL;
    size_t count = 0;
    qc_error err = {0};
    qc_arena_init(&a);
    test_must(test_run_line(test_command, &err, "qconv unpack -q --force %s %s", out, plain), &err);
    test_must(qc_dir_tree(&a, plain, 100, &tree, &count, &err), &err);
    assert_int_equal(count, qc_plain_files_count(r.p));
    r.want = calloc(count, sizeof *r.want);
    for (size_t k = 0; k < count; k++) {
        const size_t i = index_of(r.p, tree[k].path);
        const char *path = NULL;
        test_must(qc_path_join(&a, &path, plain, tree[k].path, &err), &err);
        qc_strbuf_init(&r.want[i], SIZE_MAX / 2);
        test_must(qc_file_slurp(path, &r.want[i], &err), &err);
        assert_int_equal(qc_plain_files_at(r.p, i)->bytes, tree[k].bytes);
        assert_true(qc_plain_files_at(r.p, i)->modified_ns > 1000000000000000000);
        test_must(compare(&r, i, 0, r.want[i].len, &err), &err);
    }
    test_must(qc_team_run(4, read_some, &r, &err), &err);
    assert_int_equal(told.count, 0);
    for (size_t k = 0; k < count; k++)
        qc_strbuf_deinit(&r.want[k]);
    free(r.want);
    qc_plain_files_destroy(r.p);
    qc_arena_deinit(&a);
}

static void every_kind_of_output_is_as_unpacked(void **state)
{
    static const char *const kinds[] = {"--to nf4",
                                        "--to int8 --max-shard-size 3MB",
                                        "--to bf16",
                                        "--to nf4 --no-double-quant",
                                        "--to keep --compress zstd:3",
                                        "--to int4"};
    (void)state;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i += TEST_SANITIZED ? 3 : 1) {
        make_output(kinds[i]);
        assert_as_unpacked(i % 2 ? 1 : 64u << 20, 1 + (unsigned)i % 3);
    }
}

/* ---- Damage ---------------------------------------------------------------------------------- */

static void shard_path(char path[160])
{
    (void)snprintf(path, 160, "%s/model.safetensors.zst", out);
}

/* The stored frames [first, first + 3) of the big tensor. */
static size_t big_frames(qc_frame frames[3])
{
    qc_seek_table t;
    qc_file f = QC_FILE_CLOSED;
    char path[160];
    qc_error err = {0};
    size_t first = 0;
    shard_path(path);
    test_must(qc_file_open_read(&f, path, &err), &err);
    test_must(qc_seek_table_read(&t, &f, &err), &err);
    while (t.frames[first].content_bytes < (4u << 20))
        first++;
    memcpy(frames, &t.frames[first], 3 * sizeof *frames);
    assert_int_equal(frames[0].content_bytes + frames[1].content_bytes + frames[2].content_bytes,
                     BIG_BYTES);
    qc_seek_table_deinit(&t);
    qc_file_discard(&f);
    return first;
}

static void flip(const char *path, uint64_t at)
{
    unsigned char b = 0;
    int fd = open(path, O_RDWR);
    assert_int_equal(pread(fd, &b, 1, (off_t)at), 1);
    b ^= 4;
    assert_int_equal(pwrite(fd, &b, 1, (off_t)at), 1);
    assert_int_equal(close(fd), 0);
}

static qc_status read_byte(qc_plain_files *p, uint64_t at)
{
    unsigned char byte = 0;
    qc_error err = {0};
    return qc_plain_files_read(p, index_of(p, "model.safetensors"), at, &byte, 1, &err);
}

static void damage_is_told_once_and_not_handed_out(void **state)
{
    faults told = {.lock = PTHREAD_MUTEX_INITIALIZER};
    qc_frame f[3];
    char path[160];
    (void)state;
    make_output("--to nf4");
    (void)big_frames(f);
    shard_path(path);
    qc_plain_files *p = open_files(1, 1, &told);
    flip(path, f[1].stored_offset + 100000);
    for (unsigned again = 0; again < 3; again++) {
        assert_int_equal(read_byte(p, f[0].content_offset), QC_OK);
        assert_int_equal(read_byte(p, f[1].content_offset), QC_ERR_CHECK);
        assert_int_equal(read_byte(p, f[2].content_offset - 1), QC_ERR_CHECK);
        assert_int_equal(read_byte(p, f[2].content_offset), QC_OK);
        assert_int_equal(told.count, 1);
    }
    char words[320];
    (void)snprintf(words, sizeof words, "tensor '" BIG "' in %s: a frame cannot be decompressed",
                   path);
    assert_string_equal(told.last.msg, words);
    flip(path, f[1].stored_offset + 100000);
    assert_int_equal(read_byte(p, f[1].content_offset), QC_OK); /* the disk is well again */
    qc_plain_files_destroy(p);
}

/* Frames that are whole, but not where they belong: only the digest of the tensor tells. */
static void swapped_frames_are_found(void **state)
{
    faults told = {.lock = PTHREAD_MUTEX_INITIALIZER};
    qc_frame f[3];
    char path[160];
    (void)state;
    make_output("--to nf4");
    (void)big_frames(f);
    assert_int_equal(f[0].stored_bytes, f[1].stored_bytes);
    shard_path(path);
    const size_t n = f[0].stored_bytes;
    unsigned char *a = malloc(n), *b = malloc(n);
    int fd = open(path, O_RDWR);
    assert_int_equal(pread(fd, a, n, (off_t)f[0].stored_offset), n);
    assert_int_equal(pread(fd, b, n, (off_t)f[1].stored_offset), n);
    assert_int_equal(pwrite(fd, b, n, (off_t)f[0].stored_offset), n);
    assert_int_equal(pwrite(fd, a, n, (off_t)f[1].stored_offset), n);
    qc_plain_files *p = open_files(64u << 20, 1, &told);
    assert_int_equal(read_byte(p, f[0].content_offset), QC_OK); /* it is the first of three */
    assert_int_equal(read_byte(p, f[2].content_offset), QC_OK);
    assert_int_equal(read_byte(p, f[1].content_offset), QC_ERR_CHECK);
    assert_non_null(strstr(told.last.msg, "its bytes are not those that were written"));
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(read_byte(p, f[i].content_offset), QC_ERR_CHECK);
    assert_int_equal(told.count, 3);
    qc_plain_files_destroy(p);
    /* A frame that is swapped later is known by its digest. */
    assert_int_equal(pwrite(fd, a, n, (off_t)f[0].stored_offset), n);
    assert_int_equal(pwrite(fd, b, n, (off_t)f[1].stored_offset), n);
    p = open_files(1, 1, &told);
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(read_byte(p, f[i].content_offset), QC_OK);
    assert_int_equal(pwrite(fd, b, n, (off_t)f[0].stored_offset), n);
    assert_int_equal(read_byte(p, f[0].content_offset), QC_ERR_CHECK);
    qc_plain_files_destroy(p);
    assert_int_equal(close(fd), 0);
    free(a);
    free(b);
}

static void other_files_are_checked(void **state)
{
    faults told = {.lock = PTHREAD_MUTEX_INITIALIZER};
    char path[160];
    unsigned char byte = 0;
    qc_error err = {0};
    (void)state;
    make_output("--to nf4");
    (void)snprintf(path, sizeof path, "%s/deep/er/" SIDE, out);
    qc_plain_files *p = open_files(1, 1, &told);
    const size_t i = index_of(p, "deep/er/" SIDE);
    flip(path, 100);
    assert_int_equal(qc_plain_files_read(p, i, 5, &byte, 1, NULL), QC_ERR_CHECK);
    assert_int_equal(qc_plain_files_read(p, i, 5000000, &byte, 1, NULL), QC_OK);
    assert_int_equal(told.count, 1);
    qc_plain_files_destroy(p);
    test_must(qc_plain_files_create(&p, add_fault, &told, &err), &err);
    assert_int_equal(qc_plain_files_add(p, out, "", &err), QC_ERR_CHECK);
    assert_non_null(strstr(err.msg, SIDE ": its bytes are not those that were written"));
    qc_plain_files_destroy(p);
}

static void what_is_missing_or_plain_is_refused(void **state)
{
    faults told = {.lock = PTHREAD_MUTEX_INITIALIZER};
    char path[160];
    qc_plain_files *p = NULL;
    qc_error err = {0};
    (void)state;
    make_output("--to nf4");
    shard_path(path);
    assert_int_equal(unlink(path), 0);
    test_must(qc_plain_files_create(&p, add_fault, &told, &err), &err);
    assert_int_equal(qc_plain_files_add(p, out, "", &err), QC_ERR_CHECK);
    assert_non_null(strstr(err.msg, "model.safetensors.zst: the file is missing"));
    qc_plain_files_destroy(p);
    make_output("--to nf4 --compress none");
    test_must(qc_plain_files_create(&p, add_fault, &told, &err), &err);
    assert_int_equal(qc_plain_files_add(p, out, "", &err), QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "its shards are plain .safetensors files already"));
    assert_int_equal(qc_plain_files_add(p, model, "", &err), QC_ERR_INPUT); /* no output */
    qc_plain_files_destroy(p);
}

/* ---- Faults of the machine ------------------------------------------------------------------- */

static qc_status open_and_read(faults *told, qc_error *err)
{
    qc_plain_files *p = NULL;
    unsigned char bytes[64];
    QC_TRY(qc_plain_files_create(&p, add_fault, told, err));
    qc_status st = qc_plain_files_add(p, out, "a/", err);
    if (st == QC_OK)
        st = qc_plain_files_start(p, 1, 2, err);
    for (size_t i = 0; st == QC_OK && i < qc_plain_files_count(p); i++)
        st = qc_plain_files_read(p, i, qc_plain_files_at(p, i)->bytes - sizeof bytes, bytes,
                                 sizeof bytes, err);
    qc_plain_files_destroy(p);
    return st;
}

static qc_status number_of(void *ctx, size_t frame, const qc_frame_tools *tools, void *dst,
                           qc_error *err)
{
    (void)ctx;
    (void)tools;
    (void)err;
    *(unsigned char *)dst = (unsigned char)frame;
    return QC_OK;
}

static void *pin_the_third(void *arg)
{
    const unsigned char *bytes = NULL;
    assert_int_equal(qc_frame_cache_pin(arg, 2, &bytes, NULL), QC_OK);
    assert_int_equal(*bytes, 2);
    qc_frame_cache_unpin(arg, 2);
    return NULL;
}

/* A thread that finds every slot pinned goes on as soon as one is let go; else this never ends. */
static void who_waits_for_a_slot_gets_it(void **state)
{
    const qc_frame_cache_options o = {.frame_count = 3,
                                      .frame_bytes = 64,
                                      .stored_bytes = 64,
                                      .slots = 1,
                                      .threads = 1,
                                      .make = number_of};
    qc_frame_cache *c = NULL;
    const unsigned char *bytes = NULL;
    pthread_t other;
    (void)state;
    assert_int_equal(qc_frame_cache_create(&c, &o, NULL), QC_OK);
    assert_int_equal(qc_frame_cache_pin(c, 1, &bytes, NULL), QC_OK);
    assert_int_equal(pthread_create(&other, NULL, pin_the_third, c), 0);
    (void)nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL); /* so that it waits */
    assert_int_equal(*bytes, 1);
    qc_frame_cache_unpin(c, 1);
    assert_int_equal(pthread_join(other, NULL), 0);
    qc_frame_cache_destroy(c);
}

static void every_allocation_and_read_fails_once(void **state)
{
    faults told = {.lock = PTHREAD_MUTEX_INITIALIZER};
    qc_error err = {0};
    (void)state;
    make_output("--to nf4");
    for (unsigned of_memory = 0; of_memory < 2; of_memory++) {
        qc_status st = QC_ERR_IO;
        unsigned n = 0;
        while (st != QC_OK) {
            n++;
            if (of_memory)
                qc_alloc_fail_at(n, 0);
            else
                qc_io_fail_at(QC_IO_READ, n, 0, EIO);
            st = open_and_read(&told, &err);
            qc_alloc_fail_at(0, 0);
            qc_io_fail_at(QC_IO_READ, 0, 0, 0);
            if (st != QC_OK)
                assert_int_equal(st, of_memory ? QC_ERR_NOMEM : QC_ERR_IO);
        }
        assert_true(n > 10);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kind_of_output_is_as_unpacked),
        cmocka_unit_test(damage_is_told_once_and_not_handed_out),
        cmocka_unit_test(swapped_frames_are_found),
        cmocka_unit_test(other_files_are_checked),
        cmocka_unit_test(what_is_missing_or_plain_is_refused),
        cmocka_unit_test(who_waits_for_a_slot_gets_it),
        cmocka_unit_test(every_allocation_and_read_fails_once),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
