/* verify --against: every allocation and every read is made to fail in turn, with and without a
 * manifest: an error that says so, no leak (the sanitizer stage looks), and no verdict about OUT.
 */
#include "base/workers.h"
#include "convert/verify/against.h"
#include "tests/fixtures/fault_fixture.h"
#include "tests/fixtures/test_world.h"

#include <errno.h>

static int setup(void **state)
{
    const world *w = *state = world_in(test_folder);
    qc_error err = {0};
    char manifest[256];
    (void)snprintf(manifest, sizeof manifest, "%s/qconv.json", w->other);
    test_write_conv1d(w->model);
    test_must(test_run_line(test_command, &err, "qconv --to=nf4 -q --rest bf16 --device=cpu %s %s",
                            w->model, w->out),
              &err);
    test_must(test_run_line(test_command, &err,
                            "qconv --to=int8 --block-size 64 -q --compress none --device=cpu %s %s",
                            w->model, w->other),
              &err);
    if (unlink(manifest) != 0)
        _exit(99);
    return 0;
}

static qc_status verify(const world *w, int bare, qc_error *err)
{
    return test_run_line(test_command, err, "qconv verify -q --threads=1 --against %s %s", w->model,
                         bare ? w->other : w->out);
}

typedef struct {
    const world *w;
    int bare;
} verify_run;

static qc_status verify_again(void *ctx, qc_error *err)
{
    const verify_run *r = ctx;
    return verify(r->w, r->bare, err);
}

static qc_status verify_alone(void *ctx, qc_error *err)
{
    const world *w = ctx;
    return test_run_line(test_command, err, "qconv verify -q --json --threads=1 %s", w->out);
}

TEST(every_allocation)
{
    for (int bare = 0; bare < 2; bare++)
        test_every_allocation(verify_again, &(verify_run){*state, bare}, 30);
    test_every_allocation(verify_alone, *state, 30);
}

TEST(every_read)
{
    const world *w = *state;
    for (int bare = 0; bare < 2; bare++) {
        for (uint64_t n = 1;; n++) {
            qc_error err = {0};
            qc_io_fail_at(QC_IO_READ, n, 0, EIO);
            qc_status st = verify(w, bare, &err);
            uint64_t tried = qc_io_count(QC_IO_READ);
            qc_io_fail_at(QC_IO_READ, 0, 0, 0);
            if (tried < n) {
                test_must(st, &err);
                assert_true(n > 10);
                break;
            }
            if (st != QC_ERR_IO || !*err.msg)
                print_error("read %llu: %s: %s\n", (unsigned long long)n, qc_status_name(st),
                            err.msg);
            assert_int_equal(st, QC_ERR_IO);
        }
    }
}

TEST(interrupted)
{
    const world *w = *state;
    for (int bare = 0; bare < 2; bare++) {
        qc_error err = {0};
        qc_interrupt();
        assert_int_equal(verify(w, bare, &err), QC_ERR_INTERRUPTED);
        qc_interrupt_clear();
    }
}

/* What another program gets: rows that outlive both checkpoints. */
TEST(rows)
{
    const world *w = *state;
    qc_error err = {0};
    qc_against_result r;
    qc_manifest m;
    int found = 0;
    SCOPED(qc_arena) a = {0};
    const qc_call call = {.arena = &a, .threads = 2};
    qc_against_options how = {.out = w->out, .model = w->model, .manifest = &m};
    test_must(qc_manifest_find(&m, &found, &a, w->out, &err), &err);
    assert_true(found);
    test_must(qc_against_run(&r, &call, &how, NULL, &err), &err);
    assert_int_equal(r.faults, 0);
    assert_int_equal(r.count, 3);
    assert_int_equal(r.quantized, 2);
    assert_int_equal(r.cast, 1);
    assert_int_equal(r.digests, 3);
    assert_string_equal(r.rows[1].name, "h.0.mlp.c_fc.weight");
    assert_true(r.rows[1].transpose && r.rows[1].dims[0] == 72);
    assert_true(r.rows[1].error > 0.0 && r.rows[1].ratio > 0.8 && r.rows[1].ratio <= 1.0);
    test_must(qc_manifest_find(&m, &found, &a, w->other, &err), &err);
    assert_false(found);
    how.out = w->other;
    how.manifest = NULL;
    test_must(qc_against_run(&r, &call, &how, NULL, &err), &err);
    assert_int_equal(r.faults, 0);
    assert_int_equal(r.equal, 1);
    assert_int_equal(r.digests, 0);
}

TEST_GROUP(setup, NULL)
