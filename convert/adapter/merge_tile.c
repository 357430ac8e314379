/* What a change begins with, and its weights in tiles. */
#include "convert/adapter/adapters_internal.h"

#include "base/checked.h"

#include <string.h>

#define CAST_RUN 4096u

qc_status qc_merge_read_base(const qc_merge *m, const qc_checkpoint *c, qc_st_cursor *cur,
                             uint64_t first, uint64_t n, float *out, qc_error *err)
{
    const qc_checkpoint_tensor *from = &m->change.stored;
    if (m->steps->kind == QC_STEP_WHOLE) {
        c = m->steps->adapter->weights;
        from = &c->tensors[m->steps->whole];
    }
    uint64_t each = qc_dtype_bits(from->dtype) / 8, overflow = 0;
    /* The end of `out` holds them until they are cast, run by run, which never catches up. */
    unsigned char *raw = (unsigned char *)out + n * (sizeof *out - each), run[CAST_RUN * 4];
    QC_TRY(qc_checkpoint_read(c, cur, from, first * each, raw, (size_t)(n * each), err));
    for (uint64_t at = 0; each < sizeof *out && at < n; at += CAST_RUN) {
        uint64_t now = qc_min_u64(n - at, CAST_RUN);
        memcpy(run, raw + at * each, (size_t)(now * each));
        m->set->ops->cast(run, from->dtype, now, out + at, QC_DTYPE_F32, &overflow);
    }
    return QC_OK;
}

/* A run of columns is taken for all rows before the next one, so that what it needs of the right
 * matrices stays in the cache. A row still gets its runs in order, and a column its rows. */
qc_status qc_merge_each_tile(const qc_merge *m, uint64_t first, uint64_t n, float *values,
                             qc_merge_taker take, void *ctx, qc_error *err)
{
    qc_merge_tile t;
    const uint64_t end = first + n;
    for (uint64_t col = 0; col < m->cols; col += QC_LOW_RANK_RUN) {
        const uint64_t run = qc_min_u64(m->cols - col, QC_LOW_RANK_RUN);
        for (t.row = first / m->cols; t.row * m->cols < end; t.row += t.rows) {
            const uint64_t at = t.row * m->cols + col; /* the run's first element */
            const uint64_t from = qc_max_u64(at, first), to = qc_min_u64(at + run, end);
            t.rows = at >= first && at + (QC_LOW_RANK_ROWS - 1) * m->cols + run <= end
                         ? QC_LOW_RANK_ROWS
                         : 1;
            if (from >= to)
                continue;
            t.n = (uint32_t)(to - from);
            t.col = col + (from - at);
            t.from = values + (from - first);
            for (uint32_t r = 0; r < t.rows; r++) {
                for (uint32_t i = 0; i < t.n; i++)
                    t.values[r][i] = (double)t.from[r * m->cols + i];
            }
            QC_TRY(take(ctx, &t, err));
        }
    }
    return QC_OK;
}

void qc_merge_add_product(const qc_merge *m, const qc_merge_step *s, qc_merge_tile *t)
{
    uint64_t rank = s->module->rank;
    qc_low_rank(m->set->isa, t->values[0],
                &(qc_low_rank_tile){.left = s->data.left + t->row * rank,
                                    .right = s->data.right,
                                    .rank = rank,
                                    .col = t->col,
                                    .rows = t->rows,
                                    .n = t->n,
                                    .scale = s->scale});
}
