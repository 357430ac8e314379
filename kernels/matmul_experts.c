/* The host side of experts (kernels/matmul_experts.h): it makes their table, checks arguments,
 * chooses a path, and launches. */
#include "base/checked.h"
#include "kernels/matmul_experts_internal.h"
#include "kernels/matmul_handle.h"

#include <inttypes.h>
#include <limits.h>
#include <string.h>

#define ALIGN      256u
#define SMALL_TILE 16u /* rows of x */
#define LARGE_TILE 64u

static uint64_t exponents_at(uint32_t count)
{
    return qc_align_u64(qc_experts_entry_bytes() * count, ALIGN);
}

static uint64_t codes_at(uint32_t count)
{
    return qc_align_u64(exponents_at(count) + (uint64_t)count * sizeof(int), ALIGN);
}

/* The bytes of a row of codes that is laid out anew; 0 where all rows lie well. */
static uint64_t repacked_row_bytes(const qc_weights *w, uint32_t count)
{
    uintptr_t addresses = 0;
    for (uint32_t i = 0; i < count; i++)
        addresses |= (uintptr_t)w[i].codes;
    return w->form.cols % 32 == 0 && addresses % 16 == 0 ? 0
                                                         : qc_matmul_repacked_row_bytes(&w->form);
}

uint64_t qc_matmul_experts_bytes(const qc_weights *w, uint32_t count)
{
    if (!w || (count && !w->form.ops))
        return UINT64_MAX;
    const uint64_t row_bytes = count ? repacked_row_bytes(w, count) : 0;
    return qc_sat_add(codes_at(count), qc_sat_mul(count, qc_sat_mul(w->rows, row_bytes)));
}

qc_status qc_matmul_experts_prepare(const qc_matmul *h, const qc_weights *w, uint32_t count,
                                    void *memory, qc_matmul_experts *out, qc_cuda_stream s,
                                    qc_error *err)
{
    QC_TRY(qc_matmul_here(h, err));
    if (!w || !out)
        QC_FAIL(err, QC_ERR_USAGE, "qc_matmul_experts_prepare: %s is NULL", w ? "out" : "w");
    for (uint32_t i = 0; i < count; i++) {
        QC_TRY(qc_matmul_check_weights(w + i, err));
        if (w[i].form.ops->integer)
            QC_FAIL(err, QC_ERR_UNSUPPORTED, "no kernel multiplies experts in %s",
                    w[i].form.ops->name);
        const char *differs = w[i].form.ops->kind != w->form.ops->kind       ? "form"
                              : w[i].rows != w->rows                         ? "rows"
                              : w[i].form.cols != w->form.cols               ? "columns"
                              : w[i].form.block_elems != w->form.block_elems ? "block size"
                              : !w[i].absmax != !w->absmax                   ? "kind of scales"
                              : !w->absmax && w[i].nested_block != w->nested_block ? "nested block"
                                                                                   : NULL;
        if (differs)
            QC_FAIL(err, QC_ERR_USAGE, "expert %u differs from the first in its %s", i, differs);
    }
    if (count == 0 || w->rows == 0 || w->form.cols == 0)
        QC_FAIL(err, QC_ERR_USAGE, "there are no experts, or they have no elements");
    if (!memory || (uintptr_t)memory % ALIGN)
        QC_FAIL(err, QC_ERR_USAGE, "the memory for experts is not 256-byte aligned");
    const uint64_t row_bytes = repacked_row_bytes(w, count);
    unsigned char *bytes = memory, *codes = bytes + codes_at(count);
    int *exponents = (int *)(void *)(bytes + exponents_at(count));
    *out = (qc_matmul_experts){.table = memory,
                               .form = w->form,
                               .rows = w->rows,
                               .count = count,
                               .repacked = row_bytes != 0};
    for (uint32_t i = 0; row_bytes && i < count; i++)
        QC_TRY(qc_matmul_repack_launch(w + i, row_bytes, codes + i * w->rows * row_bytes, s, err));
    QC_TRY(qc_experts_table_launch(w, count, memory, exponents, codes, row_bytes, s, err));
    return qc_experts_exponent_launch(memory, w, count, exponents, s, err);
}

/* ---- products -------------------------------------------------------------------------------- */

static uint64_t padded(const qc_matmul_experts *w)
{
    return qc_sat_mul(qc_ceil_div_u64(w->form.cols, 32), 32);
}

static uint64_t x_bytes(const qc_matmul_experts *w, uint64_t x_count)
{
    return qc_align_u64(qc_sat_mul(qc_sat_mul(x_count, padded(w)), 2), ALIGN);
}

uint64_t qc_matmul_experts_workspace(const qc_matmul_experts *w, uint64_t x_count)
{
    if (!w)
        return UINT64_MAX;
    return qc_sat_add(x_bytes(w, x_count), qc_align_u64(qc_sat_mul(x_count, 4), ALIGN));
}

static qc_status check_experts_io(const qc_matmul_experts *w, const qc_matmul_experts_io *io,
                                  qc_error *err)
{
    qc_matmul_io like = {.m = io->max_rows,
                         .x = io->x,
                         .x_dtype = io->x_dtype,
                         .ldx = io->ldx,
                         .y = io->y,
                         .y_dtype = io->y_dtype,
                         .ldy = io->ldy,
                         .bias = io->bias};
    QC_TRY(qc_matmul_check_io(&like, w->rows, w->form.cols, 1, err));
    like.m = io->x_count;
    QC_TRY(qc_matmul_check_io(&like, w->rows, w->form.cols, 0, err));
    if (io->max_rows > INT32_MAX || io->x_count > INT32_MAX)
        QC_FAIL(err, QC_ERR_USAGE, "experts take at most %d rows of x and of y", INT32_MAX);
    if (!io->offsets || (uintptr_t)io->offsets % 4 || (uintptr_t)io->x_rows % 4 ||
        (uintptr_t)io->row_weights % 4)
        QC_FAIL(err, QC_ERR_USAGE,
                "experts: offsets is NULL, or it, x_rows or row_weights is not 4-byte aligned");
    if (io->x_rows ? !io->x_count : io->x_count && io->x_count < io->max_rows)
        QC_FAIL(err, QC_ERR_USAGE, "experts: x_count is %" PRIu64 ", too few for %" PRIu64 " rows",
                io->x_count, io->max_rows);
    return QC_OK;
}

/* Decides the tiles, too. There may be as many as rows or experts, whichever are fewer, and one
 * more for each further m_tile rows. */
static qc_experts_call call_of(const qc_matmul *h, const qc_matmul_experts *w,
                               const qc_matmul_experts_io *io, qc_matmul_path path)
{
    const uint64_t k = w->form.cols;
    qc_experts_call c = {.table = w->table,
                         .offsets = io->offsets,
                         .x_rows = io->x_rows,
                         .row_weights = io->row_weights,
                         .count = w->count,
                         .max_rows = (uint32_t)io->max_rows,
                         .x_count = (uint32_t)(io->x_count ? io->x_count : io->max_rows),
                         .nf4 = w->form.ops->kind == QC_FORM_NF4,
                         .aligned = !w->repacked,
                         .n = w->rows,
                         .k = k,
                         .ldx = io->ldx ? io->ldx : k,
                         .ldy = io->ldy ? io->ldy : w->rows,
                         .x = io->x,
                         .x_dtype = io->x_dtype,
                         .y_dtype = io->y_dtype,
                         .y = io->y,
                         .bias = io->bias,
                         .fault = h->fault};
    c.x_aligned = ((uintptr_t)c.x | c.ldx * 2) % 16 == 0;
    uint32_t each = (c.max_rows + c.count - 1) / c.count;
    c.m_tile = path == QC_MATMUL_GEMV                      ? 1
               : each <= SMALL_TILE                        ? SMALL_TILE
               : path == QC_MATMUL_MMA_16816 && !c.aligned ? SMALL_TILE
                                                           : LARGE_TILE;
    uint32_t used = c.max_rows < c.count ? c.max_rows : c.count;
    c.slots = used + (c.max_rows - used) / c.m_tile;
    return c;
}

/* Lays x out as float16 in aligned rows of padded(w) elements. */
static qc_status lay_out_x(const qc_matmul_experts *w, qc_experts_call *c, void *workspace,
                           uint64_t workspace_bytes, qc_cuda_stream s, qc_error *err)
{
    const uint64_t needed = qc_matmul_experts_workspace(w, c->x_count);
    if (!workspace || (uintptr_t)workspace % ALIGN || workspace_bytes < needed)
        QC_FAIL(err, QC_ERR_USAGE,
                "experts: the workspace is NULL, not 256-byte aligned, or smaller than %" PRIu64
                " bytes",
                needed);
    qc_matmul_call call = {.m = c->x_count,
                           .k = c->k,
                           .x = c->x,
                           .x_dtype = c->x_dtype,
                           .ldx = c->ldx,
                           .plan.k_padded = padded(w)};
    int *exponents = (int *)(void *)((unsigned char *)workspace + x_bytes(w, c->x_count));
    QC_TRY(qc_matmul_input_launch(&call, workspace, exponents, s, err));
    c->x_exponent = c->x_dtype == QC_DTYPE_BF16 ? exponents : NULL;
    c->x = workspace;
    c->x_dtype = QC_DTYPE_F16;
    c->ldx = padded(w);
    return QC_OK;
}

qc_status qc_matmul_run_experts(const qc_matmul *h, const qc_matmul_experts *w,
                                const qc_matmul_experts_io *io, qc_matmul_path path,
                                void *workspace, uint64_t workspace_bytes, qc_cuda_stream s,
                                qc_error *err)
{
    QC_TRY(qc_matmul_here(h, err));
    QC_TRY(qc_matmul_check(h, err));
    if (!w || !io || !w->table)
        QC_FAIL(err, QC_ERR_USAGE, "experts: %s",
                io ? "the weights were not made ready" : "io is NULL");
    const unsigned sm = h->device.sm;
    if (path == QC_MATMUL_AUTO)
        path = io->max_rows <= w->count || sm < 70 ? QC_MATMUL_GEMV
               : sm < 80                           ? QC_MATMUL_MMA_884
                                                   : QC_MATMUL_MMA_16816;
    if (path != QC_MATMUL_GEMV && path != QC_MATMUL_MMA_884 && path != QC_MATMUL_MMA_16816)
        QC_FAIL(err, QC_ERR_USAGE, "experts cannot be multiplied by path %s",
                qc_matmul_path_name(path));
    if (path != QC_MATMUL_GEMV && sm < (path == QC_MATMUL_MMA_884 ? 70 : 80))
        QC_FAIL(err, QC_ERR_USAGE, "path %s needs a newer device than this one of sm_%u",
                qc_matmul_path_name(path), sm);
    if (io->max_rows == 0)
        return QC_OK;
    QC_TRY(check_experts_io(w, io, err));
    qc_experts_call c = call_of(h, w, io, path);
    if (path == QC_MATMUL_GEMV)
        return qc_gemv_experts_launch(&c, s, err);
    if (c.x_dtype == QC_DTYPE_BF16 || c.k % 32 != 0 || !c.x_aligned)
        QC_TRY(lay_out_x(w, &c, workspace, workspace_bytes, s, err));
    return path == QC_MATMUL_MMA_884 ? qc_mma884_experts_launch(&c, s, err)
                                     : qc_mma16816_experts_launch(&c, s, err);
}
