/* Shared by error_feedback_rows.c, _outputs.c and _weight.c; not for callers. */
#ifndef QC_QUANT_ERROR_FEEDBACK_ROWS_H
#define QC_QUANT_ERROR_FEEDBACK_ROWS_H

#include "quant/error_feedback_internal.h"

typedef struct {
    const qc_feedback *f;
    const qc_form *form;
    const float *w, *target; /* [rows, n]; target: T */
    float *made;             /* T where it is not W */
    uint64_t rows;
    uint64_t shift; /* log2 of the block's size */
    int aligned;    /* no block goes on into the next row */
    uint64_t wide;  /* columns that share a scale within a row, or those of a panel */
    qc_feedback_out *out;
    unsigned char *scratch;
    uint64_t scratch_each;
    double *sums; /* [pieces][3] e H e^T of rounded, of T, calibrated; with G: [pieces][2] */

    /* With second moments of the outputs, else NULL: */
    const qc_feedback_outputs *g;
    float *e;       /* [rows, n] E */
    uint8_t *codes; /* [rows, n] a byte each */
    float *product; /* [rows, span] E H of a span of columns */
    qc_feedback_unit *units;
    uint64_t col, span; /* the columns of the product that are there */
} qc_feedback_job;

/* A chunk of rows, and where a thread keeps it. */
typedef struct {
    const qc_feedback_job *j;
    uint64_t first, rows; /* rows of the weight */
    float *e;             /* [rows, n] E */
    float *g;             /* [rows, wide] */
    float *units, *v;     /* [rows, wide] of a block: units of codes, and them times H */
    uint8_t *codes;       /* [rows, n] a byte each */
    float *row;           /* [n] */
    qc_tile *tile;
    float *inside; /* [QC_TILE_COLS, QC_TILE_COLS] of U or H */
} qc_feedback_chunk;

/* ---- error_feedback_rows.c ---- */

/* Gives the chunk of QC_FEEDBACK_ROWS or fewer rows from `first` on, but for those from `end`. */
qc_feedback_chunk qc_feedback_chunk_of(const qc_feedback_job *j, unsigned thread, uint64_t first,
                                       uint64_t end);
/* Does a step for all chunks of the weight, side by side. */
QC_NODISCARD qc_status qc_feedback_on_chunks(const qc_feedback_job *j,
                                             void (*step)(const qc_feedback_chunk *c),
                                             qc_error *err);
/* Sets E = T, as if all codes were those of 0. */
void qc_feedback_take_target(const qc_feedback_chunk *c);
/* Makes to [rows, cols], its rows ld apart, = left * E H of the columns on the left + E H of the
 * rest, or without those on the right. */
void qc_feedback_times_h(const qc_feedback_chunk *c, uint64_t col, uint64_t cols, float left,
                         int right, float *to, uint64_t ld);
/* Loads sixteen rows from `row` of the chunk: `cols` columns from col on, or those that order
 * names. in comes from c->g. */
void qc_feedback_load_tile(const qc_feedback_chunk *c, uint64_t row, uint64_t col, uint64_t cols,
                           const uint64_t *order);
void qc_feedback_load_codes(const qc_feedback_chunk *c, uint64_t row, uint64_t col, uint64_t cols);
/* Stores errors to columns from col on, and codes to where they belong. */
void qc_feedback_store_tile(const qc_feedback_chunk *c, uint64_t row, uint64_t col, uint64_t cols,
                            const uint64_t *order);
/* Sets the codes nearest to W; E = T - Q. */
void qc_feedback_round(const qc_feedback_chunk *c);
/* Step 3. Takes columns in order of falling moments; E is by places until all have codes. */
void qc_feedback_feed(const qc_feedback_chunk *c);
void qc_feedback_store_codes(const qc_feedback_chunk *c);
/* Step 1. target: [rows, n], or NULL where T is W. */
QC_NODISCARD qc_status qc_feedback_aim(qc_feedback_job *j, float *target, qc_error *err);
/* Does what follows the target where outputs count alike. */
QC_NODISCARD qc_status qc_feedback_run_rows(qc_feedback_job *j, qc_feedback_result *result,
                                            qc_error *err);
/* The bytes of a chunk's arrays; whole: E and the codes of all rows lie elsewhere. */
uint64_t qc_feedback_chunk_bytes(uint64_t n, uint64_t wide, int whole);

/* ---- error_feedback_outputs.c ---- */

/* Does what follows the target where G is given. */
QC_NODISCARD qc_status qc_feedback_run_outputs(qc_feedback_job *j, qc_feedback_result *result,
                                               qc_error *err);
/* Allocates what the job needs beyond that; the caller frees it, also after an error. */
QC_NODISCARD qc_status qc_feedback_open_outputs(qc_feedback_job *j, qc_error *err);
void qc_feedback_close_outputs(qc_feedback_job *j);
uint64_t qc_feedback_outputs_bytes(uint64_t rows, uint64_t n, uint64_t block);
/* Returns the operations that G adds to each weight. */
double qc_feedback_outputs_flops(uint64_t rows, uint64_t n, unsigned sweeps, uint64_t block);

#endif
