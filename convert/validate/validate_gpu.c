#include "convert/validate/validate_gpu.h"

#include "base/alloc.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static qc_status leave_out(qc_validate_gpu *g, const char *why, qc_arena *arena, qc_error *err)
{
    return qc_arena_printf(arena, &g->left_out, err,
                           "the GPU's kernels, and their times against fp16, were left out (%s)",
                           why);
}

qc_status qc_validate_gpu_open(qc_validate_gpu *g, qc_device_options from,
                               const qc_product_options *o, qc_arena *arena, qc_error *err)
{
    qc_devices devices;
    memset(g, 0, sizeof *g);
    g->name = "cpu";
    g->m = o->m;
    g->m_count = o->m_count;
    QC_TRY(qc_devices_choose(&devices, from, UINT64_MAX, arena, err));
    if (devices.gpu_count == 0)
        return leave_out(g, devices.why, arena, err);
    g->device = devices.gpus[0];
    g->validator = devices.work->validator;
    qc_status st = g->validator->create(&g->comparer, &g->device, err);
    if (st != QC_OK && st != QC_ERR_INTERRUPTED && !devices.wished) {
        const qc_error why = err ? *err : (qc_error){0};
        return leave_out(g, why.msg, arena, err);
    }
    QC_TRY(st);
    g->on = 1;
    QC_TRY(qc_arena_printf(arena, &g->device_name, err, "cuda:%d", g->device.index));
    QC_TRY(qc_arena_printf(arena, &g->name, err, "%s (%s)", g->device_name, g->device.name));
    const char *no_gemm = g->validator->no_gemm(g->comparer);
    if (no_gemm)
        return qc_arena_printf(arena, &g->left_out, err, "the times of fp16 were left out (%s)",
                               no_gemm);
    return QC_OK;
}

void qc_validate_gpu_close(qc_validate_gpu *g)
{
    if (g->validator)
        g->validator->destroy(g->comparer);
    memset(g, 0, sizeof *g);
}

qc_dtype qc_validate_gpu_x_dtype(const qc_validate_gpu *g, qc_dtype dtype)
{
    return g->on && g->device.sm < 80 ? QC_DTYPE_F16 : dtype;
}

/* ---- original rows in 16 bit ---------------------------------------------------------------- */

typedef struct {
    qc_weight_reader reader;
    qc_weight_source source;
    qc_dtype dtype;
} rows_reader;

static qc_status read_rows(void *ctx, uint64_t first, uint64_t count, void *out, qc_error *err)
{
    rows_reader *r = ctx;
    return qc_weight_read(&r->reader, &r->source, first, count, out, r->dtype, err);
}

/* ---- a layer -------------------------------------------------------------------------------- */

/* Makes the rows for the errors, and behind them the rows for the times. Captured rows are spread
 * over all that there are, so the rows for the times do not begin with those for the errors. */
static qc_status make_rows(void **out, qc_validate_input *in, const qc_validate_pair *p,
                           qc_dtype dtype, uint64_t most, qc_error *err)
{
    uint64_t row = p->cols * sizeof(uint16_t);
    QC_TRY(qc_validate_input_make(in, p->name, dtype, most, p->cols, err));
    QC_TRY(qc_malloc(out, (size_t)((QC_VALIDATE_ROWS + most) * row), err));
    memcpy((unsigned char *)*out + QC_VALIDATE_ROWS * row, in->x, (size_t)(most * row));
    QC_TRY(qc_validate_input_make(in, p->name, dtype, QC_VALIDATE_ROWS, p->cols, err));
    memcpy(*out, in->x, (size_t)(QC_VALIDATE_ROWS * row));
    return QC_OK;
}

static qc_status compare(qc_validate_gpu *g, qc_validate_layer *l, const qc_validate_tools *tools,
                         const qc_stored_arrays *w, qc_validate_input *in, qc_arena *arena,
                         qc_error *err)
{
    const qc_validate_pair *p = l->pair;
    void *x = NULL;
    qc_gpu_compared *asked;
    qc_validate_time *times;
    uint64_t most = 1;
    rows_reader reader;
    QC_TRY(qc_arena_alloc(arena, &asked, g->m_count + 1, sizeof *asked, err));
    QC_TRY(qc_arena_alloc(arena, &times, g->m_count, sizeof *times, err));
    asked[0] = (qc_gpu_compared){.m = QC_VALIDATE_ROWS};
    for (unsigned i = 0; i < g->m_count; i++) {
        asked[i + 1] = (qc_gpu_compared){.m = g->m[i], .first = QC_VALIDATE_ROWS, .timed = 1};
        most = g->m[i] > most ? g->m[i] : most;
    }
    qc_dtype dtype = qc_validate_gpu_x_dtype(g, qc_validate_x_dtype(p->dtype));
    reader.dtype = dtype;
    QC_TRY(qc_weight_reader_open(&reader.reader, tools->model, err));
    qc_status st = qc_validate_source(&reader.source, tools, p, err);
    if (st == QC_OK)
        st = make_rows(&x, in, p, dtype, most, err);
    const qc_gpu_comparison c = {.w = &w->w,
                                 .codes_bytes = w->codes_bytes,
                                 .scales_bytes = w->scales_bytes,
                                 .nested_bytes = w->nested_bytes,
                                 .dtype = dtype,
                                 .x = x,
                                 .rows = QC_VALIDATE_ROWS + most,
                                 .read = read_rows,
                                 .ctx = &reader};
    if (st == QC_OK)
        st = g->validator->compare(g->comparer, &c, asked, g->m_count + 1, err);
    qc_free(x);
    qc_weight_reader_close(&reader.reader);
    QC_TRY(st);
    l->device = g->device_name;
    l->x_dtype = dtype;
    qc_validate_set_errors(l, &asked[0].output, &asked[0].kernel, (double)asked[0].outputs);
    for (unsigned i = 0; i < g->m_count; i++) {
        const qc_gpu_compared *r = &asked[i + 1];
        times[i] =
            (qc_validate_time){.m = r->m,
                               .path = r->path,
                               .seconds = r->seconds,
                               .fp16_seconds = r->fp16_seconds,
                               .roof = r->seconds > 0.0 ? r->floor_seconds / r->seconds : 0.0,
                               .output_error = qc_validate_ratio(r->output.ee, r->output.xx),
                               .kernel_error = qc_validate_ratio(r->kernel.ee, r->kernel.xx)};
    }
    l->times = times;
    l->time_count = g->m_count;
    return QC_OK;
}

qc_status qc_validate_gpu_measure(qc_validate_gpu *g, qc_validate_layer *l,
                                  const qc_validate_tools *tools, const qc_stored_arrays *w,
                                  qc_validate_input *in, qc_arena *arena, qc_error *err)
{
    qc_error why = {0};
    qc_dtype dtype = qc_validate_x_dtype(l->pair->dtype);
    if (!g->on)
        return QC_OK;
    qc_status st = compare(g, l, tools, w, in, arena, &why);
    if (st == QC_OK)
        return QC_OK;
    /* The CPU measures what does not fit the GPU or float16, and what the GPU has no kernel for. */
    if (st != QC_ERR_NOMEM && st != QC_ERR_RANGE && st != QC_ERR_UNSUPPORTED)
        return qc_error_pass(err, &why, st);
    QC_TRY(
        qc_arena_printf(arena, &l->note, err, "measured on the CPU, without times: %s", why.msg));
    qc_validate_tools whole = *tools;
    whole.weights_only = 0;
    whole.progress = NULL;
    QC_TRY(qc_validate_input_make(in, l->pair->name, dtype, QC_VALIDATE_ROWS, l->pair->cols, err));
    return qc_validate_measure(l, &whole, l->pair, &w->w, in, err);
}
