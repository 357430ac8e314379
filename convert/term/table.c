#include "convert/term/table.h"

#include "base/text.h"
#include "convert/term/size_text.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Counts code points. In text that is not UTF-8 it counts the bytes that do not look like
 * continuations. */
static size_t width_of(const char *s)
{
    size_t n = 0;
    for (; *s; s++)
        n += ((unsigned char)*s & 0xc0) != 0x80;
    return n;
}

/* Copies into the arena, or returns NULL and remembers the failure. */
static char *keep(qc_table *t, const char *text, size_t len)
{
    void *copy = NULL;
    if (t->wanted || qc_arena_alloc(t->arena, &copy, len + 1, 1, NULL) != QC_OK) {
        t->wanted = t->wanted ? t->wanted : len + 1;
        return NULL;
    }
    memcpy(copy, text, len);
    return copy;
}

static const char not_known[] = "-"; /* the cell of a NULL */

void qc_table_begin(qc_table *t, qc_arena *arena, const char *columns)
{
    *t = (qc_table){.arena = arena};
    qc_table_columns(t, columns);
}

void qc_table_columns(qc_table *t, const char *columns)
{
    for (const char *end = columns; end; columns = end + 1) {
        qc_align align = *columns == '>' ? QC_ALIGN_RIGHT : QC_ALIGN_LEFT;
        columns += align == QC_ALIGN_RIGHT;
        end = strchr(columns, '|');
        assert(t->column_count < QC_TABLE_MAX_COLUMNS && t->cell_count == 0);
        t->titles[t->column_count] =
            keep(t, columns, end ? (size_t)(end - columns) : strlen(columns));
        t->aligns[t->column_count] = align;
        t->column_count++;
        if (!end)
            break;
    }
}

/* Makes room for one more cell; returns 0 where that fails. */
static int reserve(qc_table *t)
{
    size_t room = t->cell_room ? t->cell_room * 2 : 64 * t->column_count;
    const char **p = NULL;
    if (t->cell_count < t->cell_room)
        return 1;
    if (qc_arena_alloc(t->arena, &p, room, sizeof *t->cells, NULL) != QC_OK) {
        t->wanted = room * sizeof *t->cells;
        return 0;
    }
    if (t->cell_count)
        memcpy(p, t->cells, t->cell_count * sizeof *t->cells);
    t->cells = p;
    t->cell_room = room;
    return 1;
}

void qc_table_put(qc_table *t, const char *text)
{
    assert(t->column_count > 0);
    char *copy = text ? keep(t, text, strlen(text)) : NULL;
    if ((text && !copy) || !reserve(t))
        return;
    if (copy)
        qc_text_printable(copy);
    const char *cell = copy ? copy : not_known;
    size_t *width = &t->widths[t->cell_count % t->column_count];
    size_t w = width_of(cell);
    if (w > *width)
        *width = w;
    t->cells[t->cell_count++] = cell;
}

void qc_table_putf(qc_table *t, const char *fmt, ...)
{
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    qc_table_put(t, text);
}

void qc_table_number(qc_table *t, uint64_t n)
{
    qc_table_putf(t, "%" PRIu64, n);
}

void qc_table_count(qc_table *t, uint64_t n)
{
    char text[QC_SIZE_TEXT_BYTES];
    qc_table_put(t, qc_text_count(text, n));
}

void qc_table_bytes(qc_table *t, uint64_t n)
{
    char text[QC_SIZE_TEXT_BYTES];
    qc_table_put(t, qc_text_bytes(text, n));
}

void qc_table_empty(qc_table *t, unsigned count)
{
    for (; count > 0; count--)
        qc_table_put(t, "");
}

void qc_table_end_row(qc_table *t)
{
    if (t->cell_count % t->column_count)
        qc_table_empty(t, t->column_count - (unsigned)(t->cell_count % t->column_count));
}

static void print_row(const qc_table *t, const char *const *cells, unsigned indent, qc_strbuf *out)
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
            qc_strbuf_putf(out, "%*s%s", (int)pending, "", cells[c]);
            pending = 0;
        }
        if (t->aligns[c] == QC_ALIGN_LEFT)
            pending += fill;
    }
    qc_strbuf_puts(out, "\n");
}

void qc_table_print(const qc_table *t, unsigned indent, qc_strbuf *out)
{
    if (t->wanted && out->failed == QC_OK) {
        out->failed = QC_ERR_NOMEM;
        out->wanted = t->wanted;
    }
    assert(t->wanted || t->cell_count % t->column_count == 0);
    if (t->wanted || t->cell_count == 0)
        return;
    print_row(t, t->titles, indent, out);
    for (size_t i = 0; i < t->cell_count; i += t->column_count)
        print_row(t, t->cells + i, indent, out);
}
