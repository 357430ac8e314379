/* Plain tables: columns are aligned with spaces, and there are no lines. Control characters in
 * cells become '?'. Widths count UTF-8 code points. One owner, no threads. */
#ifndef QC_CONVERT_TABLE_H
#define QC_CONVERT_TABLE_H

#include "base/arena.h"
#include "base/strbuf.h"

typedef enum { QC_ALIGN_LEFT, QC_ALIGN_RIGHT } qc_align;

#define QC_TABLE_MAX_COLUMNS 12

typedef struct {
    qc_arena *arena; /* owns the cells; borrowed */
    unsigned column_count;
    const char *titles[QC_TABLE_MAX_COLUMNS];
    qc_align aligns[QC_TABLE_MAX_COLUMNS];
    size_t widths[QC_TABLE_MAX_COLUMNS];
    const char **cells; /* row after row */
    size_t cell_count, cell_room;
} qc_table;

void qc_table_init(qc_table *t, qc_arena *arena);
/* Adds a column; call it before the first cell. title is a literal. */
void qc_table_column(qc_table *t, const char *title, qc_align align);
/* Cells fill rows from left to right. The text is copied, and NULL is shown as "-". */
QC_NODISCARD qc_status qc_table_cell(qc_table *t, const char *text, qc_error *err);
QC_NODISCARD qc_status qc_table_cellf(qc_table *t, qc_error *err, const char *fmt, ...)
    QC_PRINTF(3, 4);
/* Writes the titles and then the rows, each indented by `indent` spaces, without spaces at the ends
 * of lines. A column in which every cell is empty is left out. A table without rows gives nothing
 * at all. */
QC_NODISCARD qc_status qc_table_render(const qc_table *t, unsigned indent, qc_strbuf *out,
                                       qc_error *err);

#endif
