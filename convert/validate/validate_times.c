#include "convert/validate/validate_times.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/read_rate.h"
#include "base/workers.h"
#include "convert/validate/timing.h"

#include <math.h>
#include <string.h>

qc_status qc_validate_timer_open(qc_validate_timer *t, qc_cpu_matmul *products, const uint64_t *m,
                                 unsigned m_count, uint64_t weight_bytes, qc_arena *arena,
                                 qc_error *err)
{
    *t = (qc_validate_timer){.arena = arena, .products = products};
    QC_TRY(qc_arena_alloc(arena, &t->m, m_count, sizeof *t->m, err));
    for (unsigned i = 0; i < m_count; i++)
        if (m[i] <= QC_VALIDATE_ROWS)
            t->m[t->m_count++] = m[i];
    t->shares = weight_bytes >= QC_VALIDATE_PASS_BYTES;
    t->pass_bytes = qc_min_u64(weight_bytes, QC_VALIDATE_PASS_BYTES);
    QC_TRY(qc_malloc(&t->pass, (size_t)t->pass_bytes, err));
    memset(t->pass, 1, (size_t)t->pass_bytes); /* so that it is memory, and not one page of zeros */
    return QC_OK;
}

void qc_validate_timer_close(qc_validate_timer *t)
{
    qc_free(t->pass);
    memset(t, 0, sizeof *t);
}

double qc_validate_read_rate(const qc_validate_timer *t)
{
    return t->read_seconds > 0.0 ? t->read_bytes / t->read_seconds : (double)NAN;
}

/* In each round the memory is passed first. A product with one row of W then wakes the threads:
 * between the products of a model they do not sleep. */
static qc_status time_of(qc_validate_timer *t, qc_validate_time *out, const qc_validate_layer *l,
                         const qc_weights *w, const qc_matmul_cpu_io *io, qc_error *err)
{
    double seconds[QC_VALIDATE_ROUNDS], shares[QC_VALIDATE_ROUNDS];
    qc_weights one_row = *w;
    one_row.rows = 1;
    for (unsigned i = 0; i < QC_VALIDATE_ROUNDS; i++) {
        double pass = 0.0;
        QC_TRY(qc_check_interrupted(err));
        QC_TRY(
            qc_read_memory(t->pass, t->pass_bytes, qc_cpu_matmul_threads(t->products), &pass, err));
        QC_TRY(qc_cpu_matmul_run(t->products, &one_row, io, err));
        const uint64_t began = qc_clock_ns();
        QC_TRY(qc_validate_multiply(t->products, w, *io, err));
        seconds[i] = (double)(qc_clock_ns() - began) * 1e-9;
        shares[i] = (double)NAN;
        if (!t->shares)
            continue;
        t->read_bytes += (double)t->pass_bytes;
        t->read_seconds += pass;
        shares[i] = (double)l->pair->bytes / (double)t->pass_bytes * pass / seconds[i];
    }
    *out = (qc_validate_time){.m = io->m,
                              .path = qc_cpu_matmul_is_fast(w) ? "integers" : "floats",
                              .seconds = qc_spread_of(seconds, QC_VALIDATE_ROUNDS).median,
                              .roof = qc_spread_of(shares, QC_VALIDATE_ROUNDS).median,
                              .output_error = l->output_error,
                              .kernel_error = l->kernel_error};
    return QC_OK;
}

qc_status qc_validate_take_times(qc_validate_timer *t, qc_validate_layer *l, const qc_weights *w,
                                 const qc_validate_input *in, qc_error *err)
{
    qc_validate_time *times = NULL;
    void *y = NULL;
    uint64_t bytes = 0;
    size_t size = 0;
    if (qc_mul_u64(w->rows, QC_VALIDATE_ROWS * sizeof(uint16_t), &bytes) ||
        qc_u64_to_size(bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "the outputs of tensor '%s' do not fit memory", l->pair->name);
    QC_TRY(qc_arena_alloc(t->arena, &times, t->m_count, sizeof *times, err));
    QC_TRY(qc_malloc(&y, size, err));
    qc_status st = QC_OK;
    for (unsigned i = 0; st == QC_OK && i < t->m_count; i++) {
        const qc_matmul_cpu_io io = {.x = in->x,
                                     .x_dtype = in->dtype,
                                     .m = t->m[i],
                                     .ldx = in->cols,
                                     .y = y,
                                     .y_dtype = in->dtype,
                                     .ldy = w->rows};
        st = time_of(t, &times[i], l, w, &io, err);
    }
    qc_free(y);
    l->times = times;
    l->time_count = st == QC_OK ? t->m_count : 0;
    return st;
}
