/* Every allocation of validate is made to fail in turn: an error that says so, no file half
 * written, no leak (the sanitizer stage looks), and afterwards the command works as if nothing had
 * been. */
#include "base/workers.h"
#include "convert/validate/validate_pair.h"
#include "tests/fixtures/fault_fixture.h"
#include "tests/fixtures/test_world.h"

static int setup(void **state)
{
    const world *w = *state = world_in(test_folder);
    qc_error err = {0};
    test_write_conv1d(w->model);
    test_must(test_run_line(test_command, &err, "qconv --to=nf4 -q --threads=1 --device=cpu %s %s",
                            w->model, w->out),
              &err);
    return 0;
}

typedef struct {
    const world *w;
    const char *baseline; /* the option */
} validate_run;

static qc_status validate(void *ctx, qc_error *err)
{
    const validate_run *r = ctx;
    return test_run_line(test_command, err,
                         "qconv validate -q --threads=1 --device=cpu --against %s --%s %s %s",
                         r->w->model, r->baseline, r->w->other, r->w->out);
}

TEST(every_allocation)
{
    const world *w = *state;
    static const char *const baseline[2] = {"save-baseline", "baseline"};
    for (int i = 0; i < 2; i++)
        test_every_allocation(validate, &(validate_run){w, baseline[i]}, 50);
}

/* A layer is read in pieces, so that Ctrl-C is answered on a slow disk, too. */
TEST(reading_is_interrupted)
{
    const world *w = *state;
    qc_error err = {0};
    qc_checkpoint *c = NULL;
    qc_st_cursor *cursor = NULL;
    void *bytes = NULL;
    unsigned char last[8];
    test_must(qc_checkpoint_open(&c, w->model, &err), &err);
    test_must(qc_st_cursor_create(&cursor, &err), &err);
    const qc_checkpoint_tensor *t = qc_checkpoint_find(c, "h.0.mlp.c_fc.weight");
    assert_non_null(t);
    test_must(qc_tensor_read(c, t, cursor, &bytes, &err), &err);
    test_must(qc_checkpoint_read(c, cursor, t, t->bytes - sizeof last, last, sizeof last, &err),
              &err);
    assert_memory_equal((unsigned char *)bytes + t->bytes - sizeof last, last, sizeof last);
    qc_free(bytes);
    bytes = NULL;
    qc_interrupt();
    assert_int_equal(qc_tensor_read(c, t, cursor, &bytes, &err), QC_ERR_INTERRUPTED);
    qc_interrupt_clear();
    qc_free(bytes);
    qc_st_cursor_destroy(cursor);
    qc_checkpoint_close(c);
}

TEST_GROUP(setup, NULL)
