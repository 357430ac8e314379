/* Step 4 on the device where outputs do not count alike: what quant/error_feedback_outputs.c does.
 *
 * E H of a super of 512 columns is made for all rows of the piece, as where outputs count alike.
 * For a panel of 64 of them, a product for each unit makes D = G E H; one launch then chooses the
 * panel's codes in all units (cuda_feedback_outputs.cu), and its changes are passed on to E H of
 * the super's remainder. Units in which a sweep changed nothing are left out of D and of codes.
 *
 * So beyond the one-sided products a sweep takes 2 b operations a weight for D, with b rows in a
 * unit, and as many at most within the launches. Those are n / 64 a sweep, each of which one thread
 * block for each unit works on: with 8 sweeps and n = 4096 they are 512. There are units * n / 64
 * products for D a sweep. */
#include "kernels/cuda_feedback_job.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"

typedef qc_cuda_feedback_job job;

static uint64_t units_of(const job *j)
{
    return qc_ceil_div_u64(j->count, j->unit);
}

/* A piece begins with a unit. */
static qc_feedback_unit *unit_at(const job *j, uint64_t number)
{
    return &j->units[j->first / j->unit + number];
}

static uint64_t unit_rows(const job *j, uint64_t number)
{
    return qc_min_u64(j->unit, j->count - number * j->unit);
}

static float *moments_of(const job *j, uint64_t number)
{
    return j->d.outputs + number * j->unit * j->g->block;
}

qc_status qc_cuda_outputs_open(job *j, qc_error *err)
{
    const uint64_t units = qc_ceil_div_u64(j->rows, j->unit);
    QC_TRY(qc_calloc((void **)&j->units, units, sizeof *j->units, err));
    QC_TRY(qc_calloc((void **)&j->unit_counts, units, sizeof *j->unit_counts, err));
    for (uint64_t i = 0; i < units; i++) {
        QC_TRY(qc_check_interrupted(err));
        QC_TRY(qc_feedback_look_at_outputs(j->g, j->rows, i, &j->units[i], err));
    }
    return QC_OK;
}

qc_status qc_cuda_outputs_take(const job *j, qc_error *err)
{
    const uint64_t block = j->g->block, first = j->first / j->unit;
    qc_cuda_stream s = j->f->tools.stream;
    for (uint64_t i = 0; i < units_of(j); i++) {
        const uint64_t rows = unit_rows(j, i);
        const qc_feedback_unit *u = unit_at(j, i);
        QC_TRY(qc_cuda_to_device(moments_of(j, i), j->g->g + (first + i) * block * block,
                                 rows * block * sizeof(float), s, err));
        QC_TRY(
            qc_cuda_outputs_prepare(moments_of(j, i), rows, block, u->scale, u->damping, s, err));
    }
    return QC_OK;
}

qc_status qc_cuda_outputs_multiply(const job *j, qc_cuda_strip x, uint64_t cols, float *y,
                                   uint64_t ldy, int live, qc_error *err)
{
    for (uint64_t i = 0; i < units_of(j); i++) {
        const uint64_t first = i * j->unit, rows = unit_rows(j, i);
        const qc_cublas_product_args a = {.a = moments_of(j, i),
                                          .b = x.at + first * x.ld,
                                          .y = y + first * ldy,
                                          .dtype = QC_DTYPE_F32,
                                          .y_dtype = QC_DTYPE_F32,
                                          .m = rows,
                                          .n = cols,
                                          .k = rows,
                                          .lda = j->g->block,
                                          .ldb = x.ld,
                                          .ldy = ldy,
                                          .alpha = 1.0};
        if (!live || unit_at(j, i)->changed > 0)
            QC_TRY(qc_cublas_product(j->f->tools.blas, &a, err));
    }
    return QC_OK;
}

double qc_cuda_outputs_inverse(const job *j, uint64_t row)
{
    return unit_at(j, row / j->unit)->inverse;
}

/* Sets *changed to the number of codes. */
static qc_status sweep(job *j, qc_cuda_rows_outputs *a, unsigned long long *changed, qc_error *err)
{
    const uint64_t units = units_of(j);
    const qc_cuda_feedback_parts *d = &j->d;
    qc_cuda_stream s = j->f->tools.stream;
    QC_TRY(qc_cuda_fill(a->now, 0, units * sizeof *a->now, s, err));
    for (uint64_t super = 0; super < j->n; super += QC_CUDA_SUPER) {
        const uint64_t cols = qc_min_u64(j->n - super, QC_CUDA_SUPER);
        QC_TRY(qc_cuda_piece_times_h(j, d->e, 0, j->n, (qc_cuda_stretch){super, cols}, 1.0, d->g,
                                     err));
        for (uint64_t at = 0; at < cols; at += QC_CUDA_PANEL) {
            const uint64_t width = qc_min_u64(cols - at, QC_CUDA_PANEL), behind = at + width;
            a->col = super + at;
            a->cols = width;
            QC_TRY(qc_check_interrupted(err));
            QC_TRY(qc_cuda_outputs_multiply(j, (qc_cuda_strip){d->g + at, QC_CUDA_SUPER}, width,
                                            d->v, QC_CUDA_PANEL, 1, err));
            QC_TRY(qc_cuda_rows_sweep_outputs(&j->r, a, s, err));
            QC_TRY(qc_cuda_piece_pass_on(
                j,
                (qc_cuda_factor){{d->square + at * cols + behind, cols}, 0, width, cols - behind},
                behind, err));
        }
    }
    QC_TRY(qc_cuda_to_host(j->unit_counts, a->now, units * sizeof *a->now, s, err));
    QC_TRY(qc_cuda_stream_synchronize(s, err));
    *changed = 0;
    for (uint64_t i = 0; i < units; i++) {
        unit_at(j, i)->changed = j->unit_counts[i];
        *changed += j->unit_counts[i];
    }
    return QC_OK;
}

qc_status qc_cuda_outputs_sweeps(job *j, qc_error *err)
{
    const uint64_t units = units_of(j);
    unsigned long long *counts[] = {j->d.unit_counts, j->d.unit_counts + units}, changed = 1;
    qc_cuda_rows_outputs a = {.block = j->unit,
                              .g = j->d.outputs,
                              .ld = j->g->block,
                              .d = j->d.v,
                              .less = j->d.less,
                              .moved = j->d.moved};
    for (uint64_t i = 0; i < units; i++)
        unit_at(j, i)->changed = 1;
    QC_TRY(qc_cuda_fill(counts[0], 0xff, units * sizeof *counts[0], j->f->tools.stream, err));
    for (unsigned i = 0; i < j->f->options.sweeps && changed > 0; i++) {
        a.before = counts[i % 2];
        a.now = counts[1 - i % 2];
        QC_TRY(sweep(j, &a, &changed, err));
    }
    return QC_OK;
}
