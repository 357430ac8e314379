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

static void widen(qc_merge_tile *t, uint64_t cols)
{
    for (uint32_t r = 0; r < t->rows; r++) {
        const float *from = t->from + r * cols;
        for (uint32_t i = 0; i < t->n; i++)
            t->values[r][i] = (double)from[i];
    }
}

qc_status qc_merge_each_tile(const qc_merge *m, uint64_t first, uint64_t n, float *values,
                             qc_merge_taker take, void *ctx, qc_error *err)
{
    qc_merge_tile t;
    for (uint64_t at = 0; at < n;) {
        uint64_t col = (first + at) % m->cols, run = qc_min_u64(n - at, m->cols - col);
        t.rows = col == 0 && (n - at) / m->cols >= QC_LOW_RANK_ROWS ? QC_LOW_RANK_ROWS : 1;
        t.row = (first + at) / m->cols;
        for (uint64_t done = 0; done < run; done += t.n) {
            t.n = (uint32_t)qc_min_u64(run - done, QC_LOW_RANK_RUN);
            t.col = col + done;
            t.from = values + at + done;
            widen(&t, m->cols);
            QC_TRY(take(ctx, &t, err));
        }
        at += t.rows * run;
    }
    return QC_OK;
}

void qc_merge_add_product(const qc_merge *m, const qc_merge_step *s, qc_merge_tile *t)
{
    double sums[QC_LOW_RANK_ROWS][QC_LOW_RANK_RUN];
    uint64_t rank = s->module->rank;
    qc_low_rank(m->set->isa, sums[0],
                &(qc_low_rank_tile){.left = s->data.left + t->row * rank,
                                    .right = s->data.right,
                                    .rank = rank,
                                    .col = t->col,
                                    .rows = t->rows,
                                    .n = t->n});
    for (uint32_t r = 0; r < t->rows; r++) {
        for (uint32_t i = 0; i < t->n; i++)
            t->values[r][i] += sums[r][i] * s->scale;
    }
}
