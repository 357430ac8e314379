/* The store of calibrated weights. */
#include "base/checked.h"
#include "convert/run/calibration.h"
#include "tests/fixtures/calibrated_fixture.h"
#include "tests/fixtures/pipeline_fixture.h"

#include <errno.h>
#include <fcntl.h>

static void begin(test_conversion *c, const world *w, const char *form)
{
    test_conversion_begin(c, "qconv %s --hessians %s --compress none -q --threads 2 %s %s", form,
                          w->text, w->model, w->out);
}

static uint32_t first_job(const qc_plan *plan)
{
    for (uint32_t i = 0; i < plan->job_count; i++)
        if (qc_calibrated_takes(plan, i))
            return i;
    fail_msg("there is none");
    return 0;
}

static qc_calibrated *open_store(test_conversion *c, uint32_t *kept)
{
    qc_calibrated *store = NULL;
    qc_error err = {0};
    test_must(qc_calibrated_open(&store, &c->plan, &c->dir, "identity", kept, &err), &err);
    return store;
}

static void put(qc_calibrated *store, const qc_plan *plan, uint32_t job)
{
    const qc_feedback_result result = result_of(job);
    qc_calibrated_arrays a;
    qc_error err = {0};
    make_up(&a, plan, job);
    test_must(qc_calibrated_put(store, job, &a, &result, &err), &err);
    qc_calibrated_free(&a);
}

static unsigned put_all(qc_calibrated *store, const qc_plan *plan)
{
    unsigned n = 0;
    for (uint32_t i = 0; i < plan->job_count; i++) {
        if (qc_calibrated_takes(plan, i)) {
            put(store, plan, i);
            n++;
        }
    }
    return n;
}

static void assert_is_made_up(const qc_calibrated *store, const qc_plan *plan, uint32_t job)
{
    qc_calibrated_arrays want, have;
    qc_error err = {0};
    make_up(&want, plan, job);
    test_must(qc_calibrated_alloc(&have, plan, job, &err), &err);
    test_must(qc_calibrated_get(store, job, &have, &err), &err);
    assert_memory_equal(have.codes, want.codes, want.codes_bytes);
    assert_memory_equal(have.absmax, want.absmax, want.scales * sizeof(float));
    if (want.groups) {
        assert_memory_equal(have.absmax_codes, want.absmax_codes, want.scales);
        assert_memory_equal(have.nested_absmax, want.nested_absmax, want.groups * sizeof(float));
    }
    assert_memory_equal(&have.nested_offset, &want.nested_offset, sizeof(float));
    const qc_feedback_result result = qc_calibrated_result(store, job), was = result_of(job);
    assert_memory_equal(&result, &was, sizeof was);
    qc_calibrated_free(&want);
    qc_calibrated_free(&have);
}

TEST_WITH(test_what_is_put_comes_back, setup, teardown)
{
    const world *w = *state;
    for (unsigned f = 0; f < FORMS; f++) {
        SCOPED(test_conversion) c;
        uint32_t kept = 9, lost = 9;
        begin(&c, w, forms[f]);
        qc_calibrated *store = open_store(&c, &kept);
        assert_int_equal(kept, 0);
        assert_null(qc_calibrated_done(store, &lost));
        unsigned n = put_all(store, &c.plan);
        assert_int_equal(n, 2);
        for (int again = 0; again < 2; again++) {
            assert_int_equal(qc_calibrated_count(store), n);
            for (uint32_t i = 0; i < c.plan.job_count; i++) {
                assert_int_equal(qc_calibrated_has(store, i), qc_calibrated_takes(&c.plan, i));
                if (qc_calibrated_takes(&c.plan, i))
                    assert_is_made_up(store, &c.plan, i);
            }
            assert_int_equal(qc_calibrated_bytes(&c.plan, store), 0);
            assert_true(qc_calibrated_bytes(&c.plan, NULL) > 0);
            qc_calibrated_close(store);
            store = open_store(&c, &kept);
            assert_int_equal(kept, n);
        }
        qc_calibrated_close(store);
    }
}

/* Any part of a weight, as the pipeline's steps are cut. */
TEST_WITH(test_parts, setup, teardown)
{
    static const test_tensor rows[] = {
        {"model.layers.0.mlp.up_proj.weight", QC_DTYPE_BF16, 2, {3000, 130}}};
    const world *w = *state;
    test_write_checkpoint(w->model, rows, 1, "{\"model_type\": \"llama\"}");
    for (unsigned f = 0; f < FORMS; f++) {
        SCOPED(test_conversion) c;
        uint32_t kept = 0;
        qc_calibrated_arrays all, part;
        qc_error err = {0};
        begin(&c, w, forms[f]);
        qc_calibrated *store = open_store(&c, &kept);
        const qc_job *j = &c.plan.jobs[0];
        uint64_t unit = j->scheme == QC_SCHEME_INT8_ROWS ? j->form.cols : j->form.block_elems;
        uint64_t per_byte = j->scheme == QC_SCHEME_NF4 ? 2 : 1;
        put(store, &c.plan, 0);
        make_up(&all, &c.plan, 0);
        test_must(qc_calibrated_alloc(&part, &c.plan, 0, &err), &err);
        for (uint64_t first = 0; first < j->elems; first += 37 * unit) {
            uint64_t n = first * 3 % (j->elems - first) + 1, scale = first / unit;
            uint64_t scales = qc_ceil_div_u64(n, unit);
            test_must(qc_calibrated_read(store, 0, first, n, &part, &err), &err);
            assert_memory_equal(part.codes, (uint8_t *)all.codes + first / per_byte,
                                qc_ceil_div_u64(n, per_byte));
            assert_memory_equal(part.absmax, all.absmax + scale, scales * sizeof(float));
        }
        const qc_calibrated_arrays codes = {.codes = part.codes};
        assert_int_equal(qc_calibrated_read(store, 0, 1, 1, &codes, &err), QC_ERR_INTERNAL);
        assert_int_equal(qc_calibrated_read(store, 0, 0, j->elems + 1, &codes, &err),
                         QC_ERR_INTERNAL);
        qc_calibrated_free(&all);
        qc_calibrated_free(&part);
        qc_calibrated_close(store);
    }
}

TEST_WITH(test_done_is_remembered, setup, teardown)
{
    const world *w = *state;
    SCOPED(test_conversion) c;
    uint32_t kept = 0, lost = 0;
    qc_error err = {0};
    begin(&c, w, "--to nf4");
    qc_calibrated *store = open_store(&c, &kept);
    (void)put_all(store, &c.plan);
    test_must(qc_calibrated_set_done(store, "first", &err), &err);
    test_must(qc_calibrated_set_done(store, "a=1\nb=2\n", &err), &err);
    qc_calibrated_close(store);
    store = open_store(&c, &kept);
    assert_string_equal(qc_calibrated_done(store, &lost), "a=1\nb=2\n");
    assert_int_equal(lost, 0);
    qc_calibrated_close(store);
}

static void staged(char *out, size_t cap, const world *w, const char *name)
{
    (void)snprintf(out, cap, "%s/" TEST_STAGING "/%s", w->out, name);
}

/* The record of the last weight is cut at every byte: the others stay. */
TEST_WITH(test_torn_record, setup, teardown)
{
    const world *w = *state;
    SCOPED(test_conversion) c;
    uint32_t kept = 0;
    char path[200];
    struct stat before, after;
    begin(&c, w, "--to nf4");
    staged(path, sizeof path, w, QC_CALIBRATED_JOURNAL);
    for (off_t cut = 1;; cut++) {
        qc_calibrated *store = open_store(&c, &kept);
        uint32_t first = first_job(&c.plan), second = first + 1;
        while (!qc_calibrated_takes(&c.plan, second))
            second++;
        if (!qc_calibrated_has(store, first))
            put(store, &c.plan, first);
        assert_int_equal(stat(path, &before), 0);
        put(store, &c.plan, second);
        assert_int_equal(stat(path, &after), 0);
        qc_calibrated_close(store);
        if (cut > after.st_size - before.st_size)
            break;
        assert_int_equal(truncate(path, after.st_size - cut), 0);
        store = open_store(&c, &kept);
        assert_int_equal(kept, 1);
        assert_true(qc_calibrated_has(store, first));
        assert_false(qc_calibrated_has(store, second));
        assert_is_made_up(store, &c.plan, first);
        qc_calibrated_close(store);
    }
}

static void flip(const char *path, off_t at)
{
    unsigned char b = 0;
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &b, 1, at), 1);
    b ^= 0x10;
    assert_int_equal(pwrite(fd, &b, 1, at), 1);
    (void)close(fd);
}

/* A weight whose bytes changed is not taken over, and one that changes later is not read. */
TEST_WITH(test_damaged_bytes, setup, teardown)
{
    const world *w = *state;
    SCOPED(test_conversion) c;
    uint32_t kept = 0, lost = 0;
    char path[200];
    qc_error err = {0};
    begin(&c, w, "--to nf4");
    staged(path, sizeof path, w, QC_CALIBRATED_WEIGHTS);
    qc_calibrated *store = open_store(&c, &kept);
    uint32_t job = first_job(&c.plan);
    unsigned n = put_all(store, &c.plan);
    test_must(qc_calibrated_set_done(store, "done", &err), &err);
    flip(path, 100);
    qc_calibrated_arrays a;
    test_must(qc_calibrated_alloc(&a, &c.plan, job, &err), &err);
    assert_int_equal(qc_calibrated_get(store, job, &a, &err), QC_ERR_CHECK);
    assert_non_null(strstr(err.msg, c.plan.jobs[job].name));
    qc_calibrated_free(&a);
    qc_calibrated_close(store);
    store = open_store(&c, &kept);
    assert_int_equal(kept, n - 1);
    assert_false(qc_calibrated_has(store, job));
    assert_true(qc_calibrated_is_lost(store, job));
    assert_non_null(qc_calibrated_done(store, &lost));
    assert_int_equal(lost, 1);
    put(store, &c.plan, job);
    (void)qc_calibrated_done(store, &lost);
    assert_int_equal(lost, 0);
    qc_calibrated_close(store);
    assert_int_equal(truncate(path, 10), 0); /* all are cut */
    store = open_store(&c, &kept);
    assert_int_equal(kept, 0);
    (void)qc_calibrated_done(store, &lost);
    assert_int_equal(lost, n);
    qc_calibrated_close(store);
}

/* What was made for something else, or is no journal, begins anew. */
TEST_WITH(test_other_identity, setup, teardown)
{
    const world *w = *state;
    SCOPED(test_conversion) c;
    qc_calibrated *store = NULL;
    uint32_t kept = 0;
    char path[200];
    qc_error err = {0};
    begin(&c, w, "--to nf4");
    store = open_store(&c, &kept);
    (void)put_all(store, &c.plan);
    qc_calibrated_close(store);
    test_must(qc_calibrated_open(&store, &c.plan, &c.dir, "another", &kept, &err), &err);
    assert_int_equal(kept, 0);
    (void)put_all(store, &c.plan);
    qc_calibrated_close(store);
    test_must(qc_calibrated_open(&store, &c.plan, &c.dir, "another", &kept, &err), &err);
    assert_int_equal(kept, 2);
    qc_calibrated_close(store);
    staged(path, sizeof path, w, QC_CALIBRATED_JOURNAL);
    flip(path, 2);
    test_must(qc_calibrated_open(&store, &c.plan, &c.dir, "another", &kept, &err), &err);
    assert_int_equal(kept, 0);
    qc_calibrated_close(store);
}

/* A conversion's store is its own: the stage begins anew where the conversion is another. */
TEST_WITH(test_other_conversion, setup, teardown)
{
    static const struct {
        const char *digest;
        uint32_t kept;
    } runs[] = {{"one", 0}, {"one", 2}, {"two", 0}, {"two", 2}};
    SCOPED(test_conversion) c;
    begin(&c, *state, "--to nf4");
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        qc_calibration stage;
        qc_error err = {0};
        calibrator.digest = runs[i].digest;
        test_must(qc_calibration_open(&stage, &c.pipeline, &c.dir, &err), &err);
        assert_int_equal(qc_calibration_count(&stage), runs[i].kept);
        if (runs[i].kept == 0)
            (void)put_all(stage.store, &c.plan);
        qc_calibration_close(&stage);
    }
    c.pipeline.calibrated = NULL;
}

/* The n-th write or sync fails, for every n: what was recorded is there, what failed is not, and
 * goes in the next time. */
TEST_WITH(test_failing_disk, setup, teardown)
{
    static const struct {
        qc_io_kind kind;
        int e;
        qc_status want;
    } faults[] = {{QC_IO_WRITE, ENOSPC, QC_ERR_NOSPACE}, {QC_IO_SYNC, EIO, QC_ERR_IO}};
    const world *w = *state;
    for (size_t k = 0; k < sizeof faults / sizeof *faults; k++) {
        SCOPED(test_conversion) c;
        uint32_t kept = 0;
        begin(&c, w, "--to nf4");
        qc_calibrated *store = open_store(&c, &kept);
        uint32_t first = first_job(&c.plan), second = first + 1;
        while (!qc_calibrated_takes(&c.plan, second))
            second++;
        put(store, &c.plan, first);
        for (uint64_t n = 1;; n++) {
            const qc_feedback_result result = result_of(second);
            qc_calibrated_arrays a;
            qc_error err = {0};
            make_up(&a, &c.plan, second);
            qc_io_fail_at(faults[k].kind, n, 1, faults[k].e);
            qc_status st = qc_calibrated_put(store, second, &a, &result, &err);
            qc_io_fail_at(faults[k].kind, 0, 0, 0);
            qc_calibrated_free(&a);
            assert_is_made_up(store, &c.plan, first);
            if (st == QC_OK) {
                assert_true(n == 3);
                assert_is_made_up(store, &c.plan, second);
                break;
            }
            assert_int_equal(st, faults[k].want);
            assert_false(qc_calibrated_has(store, second));
        }
        qc_calibrated_close(store);
        store = open_store(&c, &kept);
        assert_int_equal(kept, 2);
        qc_calibrated_close(store);
    }
}

static qc_status store_and_read(void *ctx, qc_error *err)
{
    test_conversion *c = ctx;
    qc_calibrated *store = NULL;
    qc_calibrated_arrays a = {0};
    uint32_t kept = 0, job = first_job(&c->plan);
    const qc_feedback_result result = result_of(job);
    QC_TRY(qc_calibrated_open(&store, &c->plan, &c->dir, "identity", &kept, err));
    qc_status st = qc_calibrated_alloc(&a, &c->plan, job, err);
    if (st == QC_OK)
        st = qc_calibrated_put(store, job, &a, &result, err);
    if (st == QC_OK)
        st = qc_calibrated_get(store, job, &a, err);
    qc_calibrated_free(&a);
    qc_calibrated_close(store);
    return st;
}

TEST_WITH(test_no_memory, setup, teardown)
{
    const world *w = *state;
    SCOPED(test_conversion) c;
    begin(&c, w, "--to int8");
    test_every_allocation(store_and_read, &c, 10);
}

/* Scales that are not those of their codes would be read as others. */
TEST_WITH(test_scales_must_fit, setup, teardown)
{
    const world *w = *state;
    SCOPED(test_conversion) c;
    uint32_t kept = 0;
    qc_error err = {0};
    qc_calibrated_arrays a;
    begin(&c, w, "--to nf4");
    qc_calibrated *store = open_store(&c, &kept);
    uint32_t job = first_job(&c.plan);
    const qc_feedback_result result = result_of(job);
    make_up(&a, &c.plan, job);
    a.absmax[a.scales - 1] += 0.5f;
    assert_int_equal(qc_calibrated_put(store, job, &a, &result, &err), QC_ERR_INTERNAL);
    assert_false(qc_calibrated_has(store, job));
    qc_calibrated_free(&a);
    qc_calibrated_close(store);
}
