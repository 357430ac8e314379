#include "convert/term/table.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

typedef struct {
    qc_arena arena;
    qc_table t;
    qc_strbuf out;
} fixture;

static void begin(fixture *f)
{
    qc_arena_init(&f->arena);
    qc_table_init(&f->t, &f->arena);
    qc_strbuf_init(&f->out, 100000);
}

static void rendered(fixture *f, unsigned indent, const char *want)
{
    assert_int_equal(qc_table_render(&f->t, indent, &f->out, NULL), QC_OK);
    assert_string_equal(f->out.data ? f->out.data : "", want);
    qc_strbuf_deinit(&f->out);
    qc_arena_deinit(&f->arena);
}

static void cells(fixture *f, const char *const *texts, size_t count)
{
    for (size_t i = 0; i < count; i++)
        assert_int_equal(qc_table_cell(&f->t, texts[i], NULL), QC_OK);
}

static void aligned(void **state)
{
    (void)state;
    fixture f;
    static const char *const texts[] = {"a", "1", "x", "long", "12345", "", "b", "", NULL};
    begin(&f);
    qc_table_column(&f.t, "name", QC_ALIGN_LEFT);
    qc_table_column(&f.t, "n", QC_ALIGN_RIGHT);
    qc_table_column(&f.t, "note", QC_ALIGN_LEFT);
    cells(&f, texts, 9);
    rendered(&f, 2,
             "  name      n  note\n"
             "  a         1  x\n"
             "  long  12345\n"
             "  b            -\n");
}

static void empty_columns_vanish(void **state)
{
    (void)state;
    fixture f;
    static const char *const texts[] = {"a", "", "1", "b", "", "2"};
    begin(&f);
    qc_table_column(&f.t, "x", QC_ALIGN_LEFT);
    qc_table_column(&f.t, "never", QC_ALIGN_LEFT);
    qc_table_column(&f.t, "y", QC_ALIGN_RIGHT);
    cells(&f, texts, 6);
    rendered(&f, 0, "x  y\na  1\nb  2\n");
}

static void no_rows(void **state)
{
    (void)state;
    fixture f;
    begin(&f);
    qc_table_column(&f.t, "x", QC_ALIGN_LEFT);
    rendered(&f, 0, "");
}

static void strange_names(void **state)
{
    (void)state;
    fixture f;
    static const char *const texts[] = {"\xc3\xa9", "1", "ab\n\033[1m", "2", "\xc2\x9b!", "3"};
    begin(&f);
    qc_table_column(&f.t, "name", QC_ALIGN_LEFT);
    qc_table_column(&f.t, "n", QC_ALIGN_LEFT);
    cells(&f, texts, 6);
    rendered(&f, 0,
             "name     n\n"
             "\xc3\xa9        1\n"
             "ab??[1m  2\n"
             "??\x21      3\n");
}

static void many_rows(void **state)
{
    (void)state;
    fixture f;
    begin(&f);
    qc_table_column(&f.t, "n", QC_ALIGN_RIGHT);
    for (int i = 0; i < 1000; i++)
        assert_int_equal(qc_table_cellf(&f.t, NULL, "%d", i), QC_OK);
    assert_int_equal(qc_table_render(&f.t, 0, &f.out, NULL), QC_OK);
    assert_int_equal(f.out.len, 1001 * 4);
    qc_strbuf_deinit(&f.out);
    qc_arena_deinit(&f.arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(aligned),   cmocka_unit_test(empty_columns_vanish),
        cmocka_unit_test(no_rows),   cmocka_unit_test(strange_names),
        cmocka_unit_test(many_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
