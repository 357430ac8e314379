/* A table of choices: its checks, and the lookup. See matmul_tuning.h. */
#include "kernels/matmul_tuning.h"

#include <inttypes.h>

static int is_known(const qc_matmul_choice *c)
{
    switch (c->path) {
    case QC_MATMUL_MMA_16816:
        return c->variant < QC_MATMUL_VARIANT_COUNT;
    case QC_MATMUL_GEMV:
    case QC_MATMUL_MMA_884:
    case QC_MATMUL_DEQUANT_GEMM:
    case QC_MATMUL_WGMMA:
        return c->variant == 0;
    case QC_MATMUL_AUTO:
    case QC_MATMUL_FILL:
    case QC_MATMUL_PATH_COUNT:
        break;
    }
    return 0;
}

qc_status qc_matmul_tuned_check(const qc_matmul_tuned *rows, size_t count, qc_error *err)
{
    if (count > QC_MATMUL_TUNED_MOST)
        QC_FAIL(err, QC_ERR_USAGE, "the table has %zu tuned choices; expected at most %u", count,
                QC_MATMUL_TUNED_MOST);
    for (size_t i = 0; i < count; i++) {
        const qc_matmul_tuned *r = &rows[i];
        if (!qc_form_ops_of(r->kind))
            QC_FAIL(err, QC_ERR_USAGE, "tuned row %zu: the weights' kind %d is not known", i,
                    (int)r->kind);
        if (r->m_least == 0 || r->m_least > r->m_most)
            QC_FAIL(err, QC_ERR_USAGE,
                    "tuned row %zu: rows of x: expected a range that begins at 1 or more, found "
                    "%" PRIu64 " to %" PRIu64,
                    i, r->m_least, r->m_most);
        if (!is_known(&r->choice))
            QC_FAIL(err, QC_ERR_USAGE, "tuned row %zu: path %d, variant %u cannot be chosen", i,
                    (int)r->choice.path, r->choice.variant);
        if (r->choice.blocks > QC_MATMUL_BLOCKS_MOST)
            QC_FAIL(err, QC_ERR_USAGE, "tuned row %zu: blocks: expected at most %u, found %u", i,
                    QC_MATMUL_BLOCKS_MOST, r->choice.blocks);
    }
    return QC_OK;
}

qc_matmul_choice qc_matmul_tuned_find(const qc_matmul_tuned *rows, size_t count,
                                      const qc_cuda_device *device, const qc_matmul_shape *shape)
{
    static const qc_matmul_choice none = {QC_MATMUL_AUTO, 0, 0};
    for (size_t i = 0; i < count; i++) {
        const qc_matmul_tuned *r = &rows[i];
        if (r->n == shape->n && r->k == shape->k && r->kind == shape->kind &&
            r->m_least <= shape->m && shape->m <= r->m_most && (!r->sm || r->sm == device->sm) &&
            (!r->multiprocessors || r->multiprocessors == device->multiprocessors))
            return r->choice;
    }
    return none;
}
