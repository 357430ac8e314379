/* Reading a tensor that adapters change. */
#include "convert/adapter/adapters_internal.h"

#include "base/checked.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

/* Does all steps to a tile. */
static qc_status merge_tile(void *ctx, qc_merge_tile *t, qc_error *err)
{
    const qc_merge *m = ctx;
    for (const qc_merge_step *s = m->steps; s; s = s->next) {
        const double *factor = s->data.factor;
        for (uint32_t i = 0; s->kind == QC_STEP_BIAS && i < t->n; i++) /* one row */
            t->values[0][i] += s->data.left[t->col + i] * s->scale;
        if (s->kind != QC_STEP_LOW_RANK)
            continue;
        qc_merge_add_product(m, s, t);
        for (uint32_t r = 0; factor && r < t->rows; r++) {
            for (uint32_t i = 0; i < t->n; i++)
                t->values[r][i] *= factor[s->turned ? t->col + i : t->row + r];
        }
    }
    for (uint32_t r = 0; r < t->rows; r++) {
        float *to = t->from + r * m->cols;
        uint32_t bad = 0;
        int good = 1;
        for (uint32_t i = 0; i < t->n; i++) {
            to[i] = (float)t->values[r][i];
            good &= fabsf(to[i]) <= FLT_MAX;
        }
        while (!good && isfinite(to[bad]))
            bad++;
        if (!good)
            QC_FAIL(err, QC_ERR_NONFINITE,
                    "tensor '%s': the merged weight at row %" PRIu64 ", column %" PRIu64
                    " is not finite",
                    m->change.stored.name, t->row + r, t->col + bad);
    }
    return QC_OK;
}

/* ---- reading ---- */

static qc_status read_elements(qc_merge *m, const qc_checkpoint *c, qc_st_cursor *cur,
                               uint64_t first, uint64_t n, float *out, qc_error *err)
{
    QC_TRY(qc_merge_acquire(m, c, cur, err));
    qc_status st = qc_merge_read_base(m, c, cur, first, n, out, err);
    if (st == QC_OK)
        st = qc_merge_each_tile(m, first, n, out, merge_tile, m, err);
    qc_merge_release(m);
    return st;
}

qc_status qc_merge_read(const qc_checkpoint *c, qc_st_cursor *cur, const qc_checkpoint_tensor *t,
                        uint64_t offset, void *dst, size_t len, qc_error *err)
{
    qc_merge *m = qc_merge_of(t);
    unsigned char *out = dst;
    while (len > 0) {
        uint64_t inside = offset % sizeof(float), first = offset / sizeof(float);
        size_t now = len - len % sizeof(float);
        if (inside == 0 && now > 0 && (uintptr_t)out % _Alignof(float) == 0) {
            QC_TRY(read_elements(m, c, cur, first, now / sizeof(float), (void *)out, err));
        } else { /* a part of an element, or no place for one */
            float one = 0;
            now = qc_min_size(len, (size_t)(sizeof one - inside));
            QC_TRY(read_elements(m, c, cur, first, 1, &one, err));
            memcpy(out, (unsigned char *)&one + inside, now);
        }
        offset += now;
        out += now;
        len -= now;
    }
    return QC_OK;
}

qc_status qc_merge_apply(const qc_checkpoint *c, qc_st_cursor *cur, const qc_checkpoint_tensor *t,
                         uint64_t first, uint64_t n, float *values, qc_error *err)
{
    qc_merge *m = qc_merge_of(t);
    QC_TRY(qc_merge_acquire(m, c, cur, err));
    qc_status st = qc_merge_each_tile(m, first, n, values, merge_tile, m, err);
    qc_merge_release(m);
    return st;
}
