/* Every allocation of validate is made to fail in turn: an error that says so, no file half
 * written, no leak (the sanitizer stage looks), and afterwards the command works as if nothing had
 * been. */
#include "base/alloc.h"
#include "base/workers.h"
#include "convert/commands.h"
#include "convert/validate_pair.h"
#include "test_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct {
    char root[64];
    char model[96], out[96], baseline[96], page[96];
} world;

static qc_status run_words(int argc, char **argv, qc_error *err)
{
    qc_arena a;
    qc_options o;
    qc_arena_init(&a);
    qc_status st = qc_options_parse(&o, &a, argc, argv, err);
    if (st == QC_OK)
        st = o.command == QC_CMD_VALIDATE ? qc_cmd_validate(&o, err) : qc_cmd_convert(&o, err);
    qc_arena_deinit(&a);
    return st;
}

static int setup(void **state)
{
    static world w;
    /* Conv1D weights, which are read whole. */
    static const test_tensor rows[] = {
        {"h.0.mlp.c_fc.weight", QC_DTYPE_F32, 2, {40, 72}},
        {"h.0.mlp.c_proj.weight", QC_DTYPE_BF16, 2, {72, 40}},
        {"h.0.ln_1.weight", QC_DTYPE_F32, 1, {40}},
    };
    qc_error err = {0};
    test_folder(w.root, sizeof w.root);
    (void)snprintf(w.model, sizeof w.model, "%s/model", w.root);
    (void)snprintf(w.out, sizeof w.out, "%s/out", w.root);
    (void)snprintf(w.baseline, sizeof w.baseline, "%s/baseline.json", w.root);
    (void)snprintf(w.page, sizeof w.page, "%s/page.html", w.root);
    test_write_checkpoint(w.model, rows, sizeof rows / sizeof *rows, "{\"model_type\": \"gpt2\"}");
    test_must(test_run_line(run_words, &err, "qconv --to=nf4 -q --threads=1 --device=cpu %s %s",
                            w.model, w.out),
              &err);
    *state = &w;
    return 0;
}

static int teardown(void **state)
{
    world *w = *state;
    test_remove(w->root);
    return 0;
}

static qc_status validate(world *w, int against_baseline, qc_error *err)
{
    return test_run_line(
        run_words, err,
        "qconv validate -q --threads=1 --device=cpu --against %s --%s %s --html %s %s", w->model,
        against_baseline ? "baseline" : "save-baseline", w->baseline, w->page, w->out);
}

static void every_allocation(void **state)
{
    world *w = *state;
    for (int against = 0; against < 2; against++) {
        for (uint64_t n = 1;; n++) {
            qc_error err = {0};
            (void)unlink(w->page);
            qc_alloc_fail_at(n, 0);
            qc_status st = validate(w, against, &err);
            uint64_t tried = qc_alloc_count();
            qc_alloc_fail_at(0, 0);
            if (tried < n) {
                test_must(st, &err);
                assert_true(n > 50);
                break;
            }
            if (st == QC_OK) /* one that is survived */
                continue;
            if (st != QC_ERR_NOMEM || !*err.msg)
                print_error("allocation %llu: %s\n", (unsigned long long)n, err.msg);
            assert_int_equal(st, QC_ERR_NOMEM);
            assert_true(*err.msg);
        }
        qc_error err = {0};
        test_must(validate(w, against, &err), &err);
        assert_int_equal(access(w->page, F_OK), 0);
    }
}

/* A layer is read in pieces, so that Ctrl-C is answered on a slow disk, too. */
static void reading_is_interrupted(void **state)
{
    const world *w = *state;
    qc_error err = {0};
    qc_checkpoint *c = NULL;
    qc_st_cursor *cursor = NULL;
    void *bytes = NULL;
    unsigned char last[8];
    test_must(qc_checkpoint_open(&c, w->model, &err), &err);
    test_must(qc_st_cursor_create(&cursor, &err), &err);
    const qc_ckpt_tensor *t = qc_checkpoint_find(c, "h.0.mlp.c_fc.weight");
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_allocation),
        cmocka_unit_test(reading_is_interrupted),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
