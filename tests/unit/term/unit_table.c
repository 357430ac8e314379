#include "convert/term/table.h"
#include "tests/fixtures/test.h"

typedef struct {
    qc_arena arena;
    qc_table t;
    qc_strbuf out;
} fixture;

static void begin(fixture *f, const char *columns)
{
    qc_arena_init(&f->arena);
    qc_table_begin(&f->t, &f->arena, columns);
    qc_strbuf_init(&f->out, 100000);
}

static void rendered(fixture *f, unsigned indent, const char *want)
{
    qc_table_print(&f->t, indent, &f->out);
    assert_int_equal(qc_strbuf_status(&f->out, NULL), QC_OK);
    assert_string_equal(f->out.data ? f->out.data : "", want);
    qc_strbuf_deinit(&f->out);
    qc_arena_deinit(&f->arena);
}

static void cells(fixture *f, const char *const *texts, size_t count)
{
    for (size_t i = 0; i < count; i++)
        qc_table_put(&f->t, texts[i]);
}

TEST(aligned)
{
    fixture f;
    static const char *const texts[] = {"a", "1", "x", "long", "12345", "", "b", "", NULL};
    begin(&f, "name|>n|note");
    cells(&f, texts, 9);
    rendered(&f, 2,
             "  name      n  note\n"
             "  a         1  x\n"
             "  long  12345\n"
             "  b            -\n");
}

TEST(empty_columns_vanish)
{
    fixture f;
    static const char *const texts[] = {"a", "", "1", "b", "", "2"};
    begin(&f, "x|never|>y");
    cells(&f, texts, 6);
    rendered(&f, 0, "x  y\na  1\nb  2\n");
}

TEST(no_rows)
{
    fixture f;
    begin(&f, "x");
    rendered(&f, 0, "");
}

TEST(strange_names)
{
    fixture f;
    static const char *const texts[] = {"\xc3\xa9", "1", "ab\n\033[1m", "2", "\xc2\x9b!", "3"};
    begin(&f, "name|n");
    cells(&f, texts, 6);
    rendered(&f, 0,
             "name     n\n"
             "\xc3\xa9        1\n"
             "ab??[1m  2\n"
             "??\x21      3\n");
}

TEST(many_rows)
{
    fixture f;
    begin(&f, ">n");
    for (int i = 0; i < 1000; i++)
        qc_table_putf(&f.t, "%d", i);
    qc_table_print(&f.t, 0, &f.out);
    assert_int_equal(f.out.len, 1001 * 4);
    qc_strbuf_deinit(&f.out);
    qc_arena_deinit(&f.arena);
}

TEST(kinds_of_cells)
{
    fixture f;
    begin(&f, "a||>b");
    qc_table_columns(&f.t, ">c|rest");
    qc_table_number(&f.t, 8030);
    qc_table_count(&f.t, 8030);
    qc_table_bytes(&f.t, 8030);
    qc_table_putf(&f.t, "%.1f%%", 12.34);
    qc_table_end_row(&f.t);
    qc_table_end_row(&f.t); /* a row that is complete stays so */
    qc_table_put(&f.t, "x");
    qc_table_end_row(&f.t);
    rendered(&f, 0,
             "a                  b      c\n"
             "8030  8,030  8.03 KB  12.3%\n"
             "x\n");
}

/* A table that lacks memory writes nothing, and the text that it was to be part of says so. */
TEST(failures_stick)
{
    fixture f;
    qc_error err = {0};
    begin(&f, "x|y");
    f.t.wanted = 77;
    qc_table_put(&f.t, "a");
    qc_table_end_row(&f.t);
    qc_table_print(&f.t, 0, &f.out);
    assert_int_equal(qc_strbuf_status(&f.out, &err), QC_ERR_NOMEM);
    assert_string_equal(err.msg, "there is not enough memory for 77 bytes of text");
    assert_int_equal(f.out.len, 0);
    qc_strbuf_deinit(&f.out);
    qc_arena_deinit(&f.arena);
}
