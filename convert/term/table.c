#include "convert/term/table.h"

#include "convert/term/console.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void qc_table_init(qc_table *t, qc_arena *arena)
{
    memset(t, 0, sizeof *t);
    t->arena = arena;
}

/* Counts code points. In text that is not UTF-8 it counts the bytes that do not look like
 * continuations. */
static size_t width_of(const char *s)
{
    size_t n = 0;
    for (; *s; s++)
        n += ((unsigned char)*s & 0xc0) != 0x80;
    return n;
}

void qc_table_column(qc_table *t, const char *title, qc_align align)
{
    assert(t->column_count < QC_TABLE_MAX_COLUMNS && t->cell_count == 0);
    t->titles[t->column_count] = title;
    t->aligns[t->column_count] = align;
    t->column_count++;
}

qc_status qc_table_cell(qc_table *t, const char *text, qc_error *err)
{
    assert(t->column_count > 0);
    if (!text)
        text = "-";
    if (t->cell_count == t->cell_room) {
        size_t room = t->cell_room ? t->cell_room * 2 : 64 * t->column_count;
        void *p = NULL;
        QC_TRY(qc_arena_alloc(t->arena, &p, room, sizeof *t->cells, err));
        if (t->cell_count)
            memcpy(p, t->cells, t->cell_count * sizeof *t->cells);
        t->cells = p;
        t->cell_room = room;
    }
    void *copy = NULL;
    size_t len = strlen(text);
    QC_TRY(qc_arena_alloc(t->arena, &copy, len + 1, 1, err));
    memcpy(copy, text, len + 1);
    qc_console_printable(copy);
    size_t *width = &t->widths[t->cell_count % t->column_count];
    size_t w = width_of(copy);
    if (w > *width)
        *width = w;
    t->cells[t->cell_count++] = copy;
    return QC_OK;
}

qc_status qc_table_cellf(qc_table *t, qc_error *err, const char *fmt, ...)
{
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (n < 0)
        QC_FAIL(err, QC_ERR_INTERNAL, "a table cell could not be formatted");
    return qc_table_cell(t, text, err);
}

static qc_status render_row(const qc_table *t, const char *const *cells, unsigned indent,
                            qc_strbuf *out, qc_error *err)
{
    size_t pending = indent; /* spaces still to be written; never at the end of a line */
    int shown = 0;
    for (unsigned c = 0; c < t->column_count; c++) {
        if (t->widths[c] == 0)
            continue;
        size_t title = width_of(t->titles[c]);
        size_t column = t->widths[c] > title ? t->widths[c] : title;
        size_t fill = column - width_of(cells[c]);
        pending += shown ? 2 : 0;
        shown = 1;
        if (t->aligns[c] == QC_ALIGN_RIGHT)
            pending += fill;
        if (*cells[c]) {
            QC_TRY(qc_strbuf_addf(out, err, "%*s%s", (int)pending, "", cells[c]));
            pending = 0;
        }
        if (t->aligns[c] == QC_ALIGN_LEFT)
            pending += fill;
    }
    return qc_strbuf_adds(out, "\n", err);
}

qc_status qc_table_render(const qc_table *t, unsigned indent, qc_strbuf *out, qc_error *err)
{
    assert(t->column_count == 0 || t->cell_count % t->column_count == 0);
    if (t->cell_count == 0)
        return QC_OK;
    QC_TRY(render_row(t, t->titles, indent, out, err));
    for (size_t i = 0; i < t->cell_count; i += t->column_count)
        QC_TRY(render_row(t, t->cells + i, indent, out, err));
    return QC_OK;
}
