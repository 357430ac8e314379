/* Every allocation, read, write, sync and rename of convert, verify and unpack is made to fail in
 * turn. Each time: a clean error of the right kind, nothing that passes for an output, an older
 * output still whole, no handle left open, no leak (the sanitizer stage looks), and afterwards the
 * same command ends with the bytes of an undisturbed run. Then the same of a conversion that goes
 * on with what a failed one left. */
#include "base/alloc.h"
#include "convert/cli/commands.h"
#include "formats/manifest.h"
#include "tests/fixtures/fault_fixture.h"
#include "tests/fixtures/sanitized.h"
#include "tests/fixtures/test.h"
#include "tests/fixtures/test_world.h"

#include <errno.h>

/* Under a sanitizer every third operation fails: the first, fourth, ... alone, the second, fifth,
 * ... with all behind it. */
#define STEP (TEST_SANITIZED ? 3u : 1u)
/* Other ways through convert share most operations with the first one, where each fails in both
 * ways: there each fails in one way, the odd ones alone, the even ones with all behind it. */
#define STEP_OF_OTHERS (TEST_SANITIZED ? 3u : 2u)

static char fp8_model[512];

/* Two matrices of FP8 with the scale of each 128x128 block, as DeepSeek-V3 has them. */
static void write_fp8_model(const char *dir)
{
    static const test_tensor rows[] = {
        {"model.layers.0.mlp.up_proj.weight", QC_DTYPE_F8_E4M3, 2, {300, 130}},
        {"model.layers.0.mlp.up_proj.weight_scale_inv", QC_DTYPE_F32, 2, {3, 2}},
        {"model.layers.0.self_attn.q_proj.weight", QC_DTYPE_F8_E4M3, 2, {64, 130}},
        {"model.layers.0.self_attn.q_proj.weight_scale_inv", QC_DTYPE_F32, 2, {1, 2}},
    };
    test_write_checkpoint(dir, rows, sizeof rows / sizeof *rows,
                          "{\"model_type\": \"deepseek_v3\", \"quantization_config\": "
                          "{\"quant_method\": \"fp8\", \"fmt\": \"e4m3\", "
                          "\"weight_block_size\": [128, 128]}}");
}

static int setup(void **state)
{
    const world *w = *state = world_in(test_folder);
    (void)snprintf(fp8_model, sizeof fp8_model, "%s/fp8", w->root);
    test_write_model(w->model);
    write_fp8_model(fp8_model);
    return 0;
}

typedef qc_status (*run_fn)(const world *w, qc_error *err);

static qc_status run_convert(const world *w, qc_error *err)
{
    return test_run_line(test_command, err,
                         "qconv --to nf4 -q --threads=2 --max-shard-size=20KB %s %s", w->model,
                         w->out);
}

static qc_status run_convert_plain_int8(const world *w, qc_error *err)
{
    return test_run_line(test_command, err,
                         "qconv --to=int8 -q --force --threads=1 --compress=none %s %s", w->model,
                         w->out);
}

static qc_status run_convert_placed(const world *w, qc_error *err)
{
    return test_run_line(test_command, err,
                         "qconv --to nf4 -q --threads=2 --vram 2x2GB --context 64 %s %s", w->model,
                         w->out);
}

static qc_status run_convert_auto(const world *w, qc_error *err)
{
    return test_run_line(test_command, err,
                         "qconv --to auto -q --threads=2 --vram 2x2GB --context 64 %s %s", w->model,
                         w->out);
}

static qc_status run_convert_fp8(const world *w, qc_error *err)
{
    return test_run_line(test_command, err, "qconv --to nf4 -q --threads=2 %s %s", fp8_model,
                         w->out);
}

/* The sample of groups before a weight's first frame, shared by two workers. */
static qc_status run_convert_searched(const world *w, qc_error *err)
{
    return test_run_line(test_command, err, "qconv --to nf4 --scale search -q --threads=2 %s %s",
                         w->model, w->out);
}

static qc_status run_convert_searched_fp8(const world *w, qc_error *err)
{
    return test_run_line(
        test_command, err,
        "qconv --to int8 --block-size 32 --scale refit -q --threads=2 --compress=none %s %s",
        fp8_model, w->out);
}

static qc_status run_convert_searched_auto(const world *w, qc_error *err)
{
    return test_run_line(
        test_command, err,
        "qconv --to auto --scale search -q --threads=2 --vram 2x2GB --context 64 %s %s", w->model,
        w->out);
}

static qc_status run_verify(const world *w, qc_error *err)
{
    return test_run_line(test_command, err, "qconv verify -q --threads=2 %s", w->out);
}

static qc_status run_unpack(const world *w, qc_error *err)
{
    return test_run_line(test_command, err, "qconv unpack -q --threads=2 %s %s", w->out, w->other);
}

static int exists(const char *dir, const char *name)
{
    char path[256];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    return access(path, F_OK) == 0;
}

/* What one command makes: where, and the bytes of an undisturbed run. left: of a run that failed,
 * to go on with, or NULL. */
typedef struct {
    const world *w;
    run_fn run;
    const char *made; /* or NULL */
    const char *left;
    unsigned step; /* of the operations that fail */
    qc_digest want;
    size_t handles;
} subject;

static void clear(const subject *s)
{
    if (s->made)
        test_remove(s->made);
}

static void prepare(const subject *s)
{
    clear(s);
    if (s->left)
        test_copy_tree(s->left, s->made);
}

static unsigned first_to_fail(const subject *s, int persistent)
{
    return 1u + (unsigned)persistent % s->step;
}

static subject subject_of(const world *w, run_fn run, const char *made, unsigned step)
{
    subject s = {.w = w, .run = run, .made = made, .step = step};
    qc_error err = {0};
    clear(&s);
    test_must(run(w, &err), &err);
    if (made)
        s.want = test_tree_digest(made);
    s.handles = test_open_handles();
    return s;
}

static void assert_as_wanted(const subject *s)
{
    if (s->made) {
        qc_digest d = test_tree_digest(s->made);
        assert_true(qc_digest_equal(&d, &s->want));
        assert_false(exists(s->made, ".qconv-partial"));
    }
}

/* After a failure: nothing that a reader would take for an output; and after it, the command does
 * all of it. */
static void assert_survived(const subject *s, const qc_error *failure)
{
    qc_error err = {0};
    assert_true(failure->msg[0] != '\0');
    assert_int_equal(test_open_handles(), s->handles);
    if (!s->made)
        return;
    if (exists(s->made, QC_MANIFEST_NAME))
        print_error("left behind after: %s (%s:%d)\n", failure->msg, failure->file, failure->line);
    assert_false(exists(s->made, QC_MANIFEST_NAME));
    if (access(s->made, F_OK) != 0)
        return; /* nothing is left: what a run makes then is known */
    qc_status st = s->run(s->w, &err);
    if (st != QC_OK)
        print_error("after '%s': %s\n", failure->msg, err.msg);
    assert_int_equal(st, QC_OK);
    assert_as_wanted(s);
}

/* Fail allocation 1, 2, 3, ... until the command no longer gets that far: alone, then with all
 * that come after it. */
static void fail_allocations_of(const subject *s)
{
    for (int persistent = 0; persistent < 2; persistent++) {
        for (uint64_t n = first_to_fail(s, persistent);; n += s->step) {
            qc_error err = {0};
            prepare(s);
            qc_alloc_fail_at(n, persistent);
            qc_status st = s->run(s->w, &err);
            uint64_t tried = qc_alloc_count();
            qc_alloc_fail_at(0, 0);
            if (st == QC_OK)
                assert_as_wanted(s);
            if (tried < n) {
                assert_int_equal(st, QC_OK);
                print_message("%llu allocations failed in turn\n",
                              (unsigned long long)((n - 1) / s->step));
                assert_true(n > 20);
                break;
            }
            /* A failed allocation may be survived (a hint, a warning); else it is reported. */
            if (st != QC_OK) {
                if (st != QC_ERR_NOMEM)
                    print_error("allocation %llu: %s: %s\n", (unsigned long long)n,
                                qc_status_name(st), err.msg);
                assert_int_equal(st, QC_ERR_NOMEM);
                assert_survived(s, &err);
            }
        }
    }
    clear(s);
}

static void fail_io_of(const subject *s, qc_io_kind kind, int e, qc_status want, uint64_t at_least)
{
    for (int persistent = 0; persistent < 2; persistent++) {
        for (uint64_t n = first_to_fail(s, persistent);; n += s->step) {
            qc_error err = {0};
            prepare(s);
            qc_io_fail_at(kind, n, persistent, e);
            qc_status st = s->run(s->w, &err);
            uint64_t tried = qc_io_count(kind);
            qc_io_fail_at(kind, 0, 0, 0);
            if (tried < n) {
                assert_int_equal(st, QC_OK);
                assert_as_wanted(s);
                assert_true(n > at_least);
                break;
            }
            if (st != want)
                print_error("operation %llu: %s: %s\n", (unsigned long long)n, qc_status_name(st),
                            err.msg);
            assert_int_equal(st, want);
            assert_survived(s, &err);
        }
    }
    clear(s);
}

static void fail_allocations(const world *w, run_fn run, const char *made)
{
    subject s = subject_of(w, run, made, STEP);
    fail_allocations_of(&s);
}

static void fail_io(const world *w, run_fn run, const char *made, qc_io_kind kind, int e,
                    qc_status want, uint64_t at_least)
{
    subject s = subject_of(w, run, made, STEP);
    fail_io_of(&s, kind, e, want, at_least);
}

/* What a conversion left whose disk was full at the n-th write; 0: nothing was finished by then. */
static int leave(const world *w, run_fn run, const char *left, uint64_t n)
{
    qc_error err = {0};
    test_remove(w->out);
    qc_io_fail_at(QC_IO_WRITE, n, 1, ENOSPC);
    qc_status st = run(w, &err);
    qc_io_fail_at(QC_IO_WRITE, 0, 0, 0);
    assert_int_equal(st, QC_ERR_NOSPACE);
    int some = exists(w->out, ".qconv-partial");
    if (some)
        test_copy_tree(w->out, left);
    test_remove(w->out);
    return some;
}

TEST(test_convert_allocations)
{
    const world *w = *state;
    fail_allocations(w, run_convert, w->out);
    test_remove(w->out);
    fail_allocations(w, run_convert_plain_int8, w->out);
    test_remove(w->out);
}

TEST(test_convert_io)
{
    const world *w = *state;
    fail_io(w, run_convert, w->out, QC_IO_READ, EIO, QC_ERR_IO, 4);
    fail_io(w, run_convert, w->out, QC_IO_WRITE, ENOSPC, QC_ERR_NOSPACE, 20);
    fail_io(w, run_convert, w->out, QC_IO_WRITE, EIO, QC_ERR_IO, 20);
    fail_io(w, run_convert, w->out, QC_IO_SYNC, EIO, QC_ERR_IO, 4);
    fail_io(w, run_convert, w->out, QC_IO_RENAME, EIO, QC_ERR_IO, 4);
    fail_io(w, run_convert_plain_int8, w->out, QC_IO_WRITE, ENOSPC, QC_ERR_NOSPACE, 5);
}

/* The same for every other way through convert. */
TEST(test_other_conversions)
{
    static const run_fn runs[] = {run_convert_placed,       run_convert_auto,
                                  run_convert_fp8,          run_convert_searched,
                                  run_convert_searched_fp8, run_convert_searched_auto};
    const world *w = *state;
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        subject s = subject_of(w, runs[i], w->out, STEP_OF_OTHERS);
        fail_allocations_of(&s);
        test_remove(w->out);
        fail_io_of(&s, QC_IO_READ, EIO, QC_ERR_IO, 4);
        fail_io_of(&s, QC_IO_WRITE, ENOSPC, QC_ERR_NOSPACE, 4);
        fail_io_of(&s, QC_IO_SYNC, EIO, QC_ERR_IO, 4);
        fail_io_of(&s, QC_IO_RENAME, EIO, QC_ERR_IO, 2);
    }
}

TEST(test_full_disk_message)
{
    const world *w = *state;
    qc_error err = {0};
    qc_io_fail_at(QC_IO_WRITE, 3, 1, ENOSPC);
    qc_status st = run_convert(w, &err);
    qc_io_fail_at(QC_IO_WRITE, 0, 0, 0);
    assert_int_equal(st, QC_ERR_NOSPACE);
    assert_non_null(strstr(err.msg, "bytes"));
    assert_false(exists(w->out, QC_MANIFEST_NAME));
    test_remove(w->out);
}

TEST(test_verify_and_unpack)
{
    const world *w = *state;
    qc_error err = {0};
    test_must(run_convert(w, &err), &err);
    fail_allocations(w, run_verify, NULL);
    fail_io(w, run_verify, NULL, QC_IO_READ, EIO, QC_ERR_IO, 5);
    fail_allocations(w, run_unpack, w->other);
    test_remove(w->other);
    fail_io(w, run_unpack, w->other, QC_IO_READ, EIO, QC_ERR_IO, 5);
    fail_io(w, run_unpack, w->other, QC_IO_WRITE, ENOSPC, QC_ERR_NOSPACE, 5);
    fail_io(w, run_unpack, w->other, QC_IO_SYNC, EIO, QC_ERR_IO, 3);
    test_remove(w->out);
}

/* A replacement that fails before its files move leaves the old output whole. */
TEST(test_old_output_survives)
{
    const world *w = *state;
    qc_error err = {0};
    test_must(run_convert(w, &err), &err);
    for (uint64_t n = 1;; n++) {
        qc_io_fail_at(QC_IO_WRITE, n, 1, ENOSPC);
        qc_status st = run_convert_plain_int8(w, &err);
        uint64_t tried = qc_io_count(QC_IO_WRITE);
        qc_io_fail_at(QC_IO_WRITE, 0, 0, 0);
        if (tried < n) {
            assert_int_equal(st, QC_OK);
            break;
        }
        assert_int_equal(st, QC_ERR_NOSPACE);
        test_must(run_verify(w, &err), &err);
    }
    test_must(run_verify(w, &err), &err);
    test_remove(w->out);
}

/* Faults while a conversion goes on with what another left: little done, half, nearly all. */
TEST(test_continued)
{
    static const run_fn runs[] = {run_convert, run_convert_plain_int8};
    const world *w = *state;
    char left[128];
    (void)snprintf(left, sizeof left, "%s/left", w->root);
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        qc_io_fail_at(QC_IO_WRITE, 0, 0, 0);
        subject s = subject_of(w, runs[i], w->out, STEP);
        uint64_t writes = qc_io_count(QC_IO_WRITE);
        unsigned left_some = 0;
        for (unsigned part = 1; part < 4; part++) {
            if (!leave(w, runs[i], left, writes * part / 4))
                continue;
            left_some++;
            s.left = left;
            if (part == 2)
                fail_allocations_of(&s);
            fail_io_of(&s, QC_IO_READ, EIO, QC_ERR_IO, 4);
            fail_io_of(&s, QC_IO_WRITE, ENOSPC, QC_ERR_NOSPACE, 4);
            fail_io_of(&s, QC_IO_SYNC, EIO, QC_ERR_IO, 4);
            fail_io_of(&s, QC_IO_RENAME, EIO, QC_ERR_IO, 2);
            test_remove(left);
        }
        assert_true(left_some > 1);
    }
}

TEST_GROUP(setup, NULL)
