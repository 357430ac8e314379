/* Plain text tables, aligned with spaces and without lines. A table keeps the first error, and
 * qc_table_print reports it:
 *
 *     qc_table t;
 *     qc_table_begin(&t, arena, "tensor|dtype|>bytes");
 *     for (size_t i = 0; i < count; i++) {
 *         qc_table_put(&t, tensors[i].name);
 *         qc_table_put(&t, qc_dtype_name(tensors[i].dtype));
 *         qc_table_bytes(&t, tensors[i].bytes);
 *     }
 *     qc_table_print(&t, 2, out);
 *
 * Cells fill the rows from left to right. Control characters in cells become '?'. Widths count
 * UTF-8 code points. A table has one owner and is not thread-safe. */
#ifndef QC_CONVERT_TABLE_H
#define QC_CONVERT_TABLE_H

#include "base/arena.h"
#include "base/strbuf.h"

#include <stdint.h>

typedef enum { QC_ALIGN_LEFT, QC_ALIGN_RIGHT } qc_align;

#define QC_TABLE_MAX_COLUMNS 12

typedef struct {
    qc_arena *arena; /* owns the titles and the cells; borrowed */
    unsigned column_count;
    const char *titles[QC_TABLE_MAX_COLUMNS];
    qc_align aligns[QC_TABLE_MAX_COLUMNS];
    size_t widths[QC_TABLE_MAX_COLUMNS];
    const char **cells; /* row after row */
    size_t cell_count, cell_room;
    size_t wanted; /* how many bytes could not be had; 0 while all is well */
} qc_table;

/* Begins a table. The titles of the columns stand between '|'; a '>' before a title aligns its
 * column right. */
void qc_table_begin(qc_table *t, qc_arena *arena, const char *columns);
/* Adds more columns; call it before the first cell. */
void qc_table_columns(qc_table *t, const char *columns);

/* Each of these adds one cell. The text is copied, and NULL is shown as "-". */
void qc_table_put(qc_table *t, const char *text);
void qc_table_putf(qc_table *t, const char *fmt, ...) QC_PRINTF(2, 3);
void qc_table_number(qc_table *t, uint64_t n); /* "8030" */
void qc_table_count(qc_table *t, uint64_t n);  /* "8,030" */
void qc_table_bytes(qc_table *t, uint64_t n);  /* "8.03 KB" */
/* Leaves so many cells empty, or those that the row still needs. */
void qc_table_empty(qc_table *t, unsigned count);
void qc_table_end_row(qc_table *t);

/* Writes the titles and then the rows, each indented by `indent` spaces, without spaces at the ends
 * of lines. A column in which every cell is empty is left out. A table without rows gives nothing
 * at all. If a cell could not be stored, nothing is written, and qc_strbuf_status of `out` says
 * so. */
void qc_table_print(const qc_table *t, unsigned indent, qc_strbuf *out);

#endif
