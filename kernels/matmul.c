/* The host side of the matmul: it checks weights and arguments, cuts the workspace as the plan
 * says, and launches in order. matmul_plan.c decides what is chosen when. */
#include "base/checked.h"
#include "kernels/matmul_handle.h"

#include <inttypes.h>
#include <limits.h>
#include <string.h>

#define PREPARED_BYTES 256u /* exponent and constants; repacked codes follow */

/* ---- weights --------------------------------------------------------------------------------- */

/* Returns the alignment of an address and of every row behind it, 16 at most. */
static unsigned row_alignment(const void *p, uint64_t row_bytes)
{
    unsigned alignment = 16;
    while (alignment > 1 && ((uintptr_t)p | row_bytes) % alignment)
        alignment /= 2;
    return alignment;
}

static int is_repacked(const qc_weights *w)
{
    return w->rows && w->form.cols && !w->form.ops->integer &&
           (w->form.cols % 32 != 0 || (uintptr_t)w->codes % 16 != 0);
}

uint64_t qc_matmul_prepared_bytes(const qc_weights *w)
{
    if (!w || !w->form.ops)
        return UINT64_MAX;
    return qc_sat_add(PREPARED_BYTES,
                      is_repacked(w) ? qc_sat_mul(w->rows, qc_matmul_repacked_row_bytes(&w->form))
                                     : 0);
}

qc_status qc_matmul_prepare(const qc_matmul *h, const qc_weights *w, void *memory,
                            qc_matmul_weights *out, qc_cuda_stream s, qc_error *err)
{
    QC_TRY(qc_matmul_here(h, err));
    QC_TRY(qc_matmul_check_weights(w, err));
    if (!out)
        QC_FAIL(err, QC_ERR_USAGE, "qc_matmul_prepare: out is NULL");
    if (!memory || (uintptr_t)memory % 256)
        QC_FAIL(err, QC_ERR_USAGE, "the memory for a prepared weight is not 256-byte aligned");
    memset(out, 0, sizeof *out);
    out->w = *w;
    out->exponent = memory;
    out->part = (qc_weights_part){.rows = w->rows, .cols = w->form.cols};
    QC_TRY(qc_matmul_exponent_launch(w, memory, s, err));
    if (is_repacked(w)) {
        unsigned char *codes = (unsigned char *)memory + PREPARED_BYTES;
        out->row_bytes = qc_matmul_repacked_row_bytes(&w->form);
        out->w.codes = codes;
        QC_TRY(qc_matmul_repack_launch(w, out->row_bytes, codes, s, err));
    }
    return QC_OK;
}

#define CUT_COLS 32u /* of a run, which kernels load at once */

qc_status qc_matmul_slice(const qc_matmul_weights *whole, const qc_weights_part *part,
                          qc_matmul_weights *out, qc_error *err)
{
    if (!whole || !part || !out)
        QC_FAIL(err, QC_ERR_USAGE, "qc_matmul_slice: %s is NULL",
                !whole  ? "the weight"
                : !part ? "the part"
                        : "out");
    const qc_weights_part *of = &whole->part;
    if (part->row > of->rows || part->rows > of->rows - part->row || part->col > of->cols ||
        part->cols > of->cols - part->col)
        QC_FAIL(err, QC_ERR_USAGE,
                "rows %" PRIu64 " to %" PRIu64 " and columns %" PRIu64 " to %" PRIu64
                " are not within a weight of %" PRIu64 " rows and %" PRIu64 " columns",
                part->row, qc_sat_add(part->row, part->rows), part->col,
                qc_sat_add(part->col, part->cols), of->rows, of->cols);
    const uint64_t begin = of->col + part->col, end = begin + part->cols;
    if (part->rows && part->cols &&
        (begin % CUT_COLS || (end % CUT_COLS && end != whole->w.form.cols)))
        QC_FAIL(err, QC_ERR_SHAPE,
                "columns %" PRIu64 " to %" PRIu64 " of a prepared weight in %s cut through %u "
                "weights that stay together; it can be cut at multiples of %u columns",
                begin, end, whole->w.form.ops->name, CUT_COLS, CUT_COLS);
    qc_matmul_weights slice = *whole;
    slice.part = (qc_weights_part){of->row + part->row, part->rows, begin, part->cols};
    *out = slice;
    return QC_OK;
}

/* ---- run ------------------------------------------------------------------------------------- */

static qc_matmul_shape shape_of(const qc_matmul *h, const qc_matmul_weights *w)
{
    qc_matmul_shape s;
    memset(&s, 0, sizeof s);
    s.kind = w->w.form.ops->kind;
    s.n = w->part.rows;
    s.k = w->part.cols;
    s.ldw = w->w.form.cols;
    s.first_most = w->part.row * w->w.form.cols + w->part.col;
    s.inside_64 = w->part.col % 64 != 0;
    s.block_elems = w->w.form.block_elems;
    s.x_dtype = s.y_dtype = QC_DTYPE_F16;
    s.ldx = s.k;
    s.x_alignment = 2;
    s.repacked = w->row_bytes != 0;
    s.have_gemm = h->gemm && s.k <= INT_MAX - 32;
    s.choice = h->choice;
    return s;
}

uint64_t qc_matmul_workspace_bytes(const qc_matmul *h, const qc_matmul_weights *w, uint64_t max_m,
                                   qc_matmul_path path, uint64_t limit_bytes)
{
    if (!h || !w || !w->w.form.ops)
        return UINT64_MAX;
    qc_matmul_shape s = shape_of(h, w);
    s.have_gemm = s.have_gemm && max_m <= INT_MAX;
    return qc_matmul_plan_workspace(&h->device, &s, max_m, path, limit_bytes);
}

/* Launches c[0 .. count), which share one plan. */
static qc_status launch(const qc_matmul *h, qc_matmul_call *c, uint32_t count,
                        unsigned char *workspace, uint64_t workspace_bytes, qc_cuda_stream s,
                        qc_error *err)
{
    const qc_matmul_plan *p = &c->plan;
    if (p->copies_x) {
        uint16_t *x = (uint16_t *)(void *)(workspace + p->x_offset);
        int *x_exponent = (int *)(void *)(workspace + p->x_exponent_offset);
        QC_TRY(p->image_rows ? qc_matmul_image_launch(c, x, x_exponent, s, err)
                             : qc_matmul_input_launch(c, x, x_exponent, s, err));
        for (uint32_t i = count; i-- > 0;) {
            c[i].x_exponent = c->x_dtype == QC_DTYPE_BF16 ? x_exponent : NULL;
            c[i].x = x;
            c[i].x_dtype = QC_DTYPE_F16;
            c[i].ldx = p->k_padded;
        }
    }
    float *partials = (float *)(void *)(workspace + p->partial_offset);
    for (uint32_t i = 0; i < count; i++) {
        c[i].fault = h->fault;
        c[i].partials = partials;
        if (p->splits > 1)
            partials += c[i].m * c[i].n * p->splits;
        /* These paths work in float, or in bfloat16, whose range is float's. */
        if (p->path == QC_MATMUL_GEMV || p->variant == QC_MATMUL_RING ||
            (p->path == QC_MATMUL_DEQUANT_GEMM && p->dense_dtype == QC_DTYPE_BF16))
            c[i].weights.exponent = NULL;
    }
    switch (p->path) {
    case QC_MATMUL_GEMV:
        QC_TRY(qc_gemv_launch(c, count, s, err));
        break;
    case QC_MATMUL_MMA_884:
        QC_TRY(qc_mma884_launch(c, count, s, err));
        break;
    case QC_MATMUL_MMA_16816:
        QC_TRY(qc_mma16816_launch(c, count, s, err));
        break;
    case QC_MATMUL_WGMMA:
        QC_TRY(qc_wgmma_launch(c, count, s, err));
        break;
    case QC_MATMUL_DEQUANT_GEMM:
        for (uint32_t i = 0; i < count; i++)
            QC_TRY(qc_matmul_dequant_gemm(h, c + i, workspace, workspace_bytes, s, err));
        return QC_OK;
    case QC_MATMUL_FILL:
        for (uint32_t i = 0; i < count; i++)
            QC_TRY(qc_matmul_reduce_launch(c + i, s, err));
        return QC_OK;
    case QC_MATMUL_AUTO:
    case QC_MATMUL_PATH_COUNT:
        QC_FAIL(err, QC_ERR_INTERNAL, "the plan of the matmul names no path");
    }
    for (uint32_t i = 0; i < count && p->splits > 1; i++)
        QC_TRY(qc_matmul_reduce_launch(c + i, s, err));
    return QC_OK;
}

static qc_status check_workspace(const void *workspace, uint64_t bytes, qc_error *err)
{
    if ((uintptr_t)workspace % 256)
        QC_FAIL(err, QC_ERR_USAGE, "the workspace is not 256-byte aligned");
    if (!workspace && bytes)
        QC_FAIL(err, QC_ERR_USAGE, "the workspace of %" PRIu64 " bytes is NULL", bytes);
    return QC_OK;
}

/* ---- planning: weights that share x, in as few launches as they allow --------------------- */

static int alike(const qc_matmul_weights *a, const qc_matmul_weights *b)
{
    const qc_weights *v = &a->w, *w = &b->w;
    return v->form.ops->kind == w->form.ops->kind && v->form.cols == w->form.cols &&
           a->part.cols == b->part.cols && v->form.block_elems == w->form.block_elems &&
           v->form.code_map == w->form.code_map && !v->absmax == !w->absmax &&
           (v->absmax || v->nested_block == w->nested_block) && !a->row_bytes == !b->row_bytes;
}

/* Describes those of the weights from *from on that are alike as one shape; *from moves behind
 * them. */
static qc_matmul_shape shape_of_alike(const qc_matmul *h, const qc_matmul_weights *const *w,
                                      uint32_t count, uint32_t *from)
{
    uint32_t first = *from;
    qc_matmul_shape s = shape_of(h, w[first]);
    s.n = 0;
    for (; *from < count && alike(w[first], w[*from]); ++*from) {
        if (w[*from]->part.rows == 0)
            continue;
        const qc_matmul_shape one = shape_of(h, w[*from]);
        s.part_n[s.parts++] = one.n;
        s.n = qc_sat_add(s.n, one.n);
        s.first_most = one.first_most > s.first_most ? one.first_most : s.first_most;
        s.inside_64 = s.inside_64 || one.inside_64;
    }
    if (s.parts == 1) /* planned as a single one */
        s.parts = 0;
    return s;
}

uint64_t qc_matmul_group_workspace_bytes(const qc_matmul *h, const qc_matmul_weights *const *w,
                                         uint32_t count, uint64_t max_m, qc_matmul_path path,
                                         uint64_t limit_bytes)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < count && count <= QC_MATMUL_GROUP_MOST; i++)
        if (!h || !w || !w[i] || !w[i]->w.form.ops)
            return UINT64_MAX;
    for (uint32_t i = 0; i < count && count <= QC_MATMUL_GROUP_MOST;) {
        qc_matmul_shape s = shape_of_alike(h, w, count, &i);
        s.have_gemm = s.have_gemm && max_m <= INT_MAX;
        uint64_t bytes = qc_matmul_plan_workspace(&h->device, &s, max_m, path, limit_bytes);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static uint64_t ldx_of(const qc_matmul_io *io, uint64_t k)
{
    return io->ldx ? io->ldx : k;
}

static qc_status check_group(const qc_matmul_weights *const *w, const qc_matmul_io *io,
                             uint32_t count, int pointers, qc_error *err)
{
    if (count < 1 || count > QC_MATMUL_GROUP_MOST)
        QC_FAIL(err, QC_ERR_USAGE, "the group has %u weights; expected 1 to %u", count,
                QC_MATMUL_GROUP_MOST);
    if (!w || !io)
        QC_FAIL(err, QC_ERR_USAGE, "a product: %s is NULL", w ? "io" : "w");
    for (uint32_t i = 0; i < count; i++) {
        const char *differs = NULL;
        QC_TRY(qc_matmul_check_weights(w[i] ? &w[i]->w : NULL, err));
        if (!w[i]->exponent)
            QC_FAIL(err, QC_ERR_USAGE, "the weight was not prepared; call qc_matmul_prepare first");
        QC_TRY(qc_matmul_check_io(io + i, w[i]->part.rows, w[i]->part.cols, pointers, err));
        if (w[i]->part.cols != w[0]->part.cols)
            differs = "K";
        else if (io[i].m != io->m)
            differs = "m";
        else if (io[i].x != io->x)
            differs = "x";
        else if (io[i].x_dtype != io->x_dtype || io[i].y_dtype != io->y_dtype)
            differs = "the dtype of x or y";
        else if (ldx_of(io + i, w[0]->part.cols) != ldx_of(io, w[0]->part.cols))
            differs = "ldx";
        if (differs)
            QC_FAIL(err, QC_ERR_USAGE,
                    "weight %u of the group differs from the first in %s; multiply it by itself", i,
                    differs);
    }
    return QC_OK;
}

/* Returns whether the arguments of cuBLAS can hold these sizes. */
static int strides_fit_gemm(const qc_matmul_io *io, uint64_t n, uint64_t k)
{
    return io->m <= INT_MAX && ldx_of(io, k) <= INT_MAX && (io->ldy ? io->ldy : n) <= INT_MAX;
}

static int has_epilogue(const qc_matmul_io *io)
{
    return io->bias || io->gate || io->residual;
}

/* Plans a group whose arguments were checked. */
static qc_status plan_group(const qc_matmul *h, const qc_matmul_weights *const *w,
                            const qc_matmul_io *io, uint32_t count, qc_matmul_path path,
                            uint64_t limit_bytes, qc_matmul_planned *out, qc_error *err)
{
    const uint64_t k = w[0]->part.cols;
    out->count = count;
    out->sets = 0;
    out->m = io->m;
    out->x_dtype = io->x_dtype;
    out->y_dtype = io->y_dtype;
    out->x_alignment = row_alignment(io->x, ldx_of(io, k) * 2);
    out->workspace_bytes = 0;
    for (uint32_t i = 0; i < count;) {
        const uint32_t first = i;
        qc_matmul_shape shape = shape_of_alike(h, w, count, &i);
        qc_matmul_planned_set *set = &out->set[out->sets++];
        shape.m = io->m;
        shape.x_dtype = io->x_dtype;
        shape.y_dtype = io->y_dtype;
        shape.ldx = ldx_of(io, k);
        shape.x_alignment = out->x_alignment;
        for (uint32_t j = first; j < i; j++) {
            out->weights[j] = (qc_matmul_planned_weight){.kind = w[j]->w.form.ops->kind,
                                                         .part = w[j]->part,
                                                         .cols = w[j]->w.form.cols,
                                                         .block_elems = w[j]->w.form.block_elems,
                                                         .repacked = w[j]->row_bytes != 0,
                                                         .has_epilogue = has_epilogue(io + j)};
            shape.has_epilogue = shape.has_epilogue || has_epilogue(io + j);
            shape.have_gemm = shape.have_gemm && strides_fit_gemm(io + j, w[j]->part.rows, k);
        }
        set->end = i;
        QC_TRY(qc_matmul_plan_make(&h->device, &shape, path, limit_bytes, &set->plan, err));
        if (set->plan.workspace_bytes > out->workspace_bytes)
            out->workspace_bytes = set->plan.workspace_bytes;
    }
    return QC_OK;
}

qc_status qc_matmul_plan_product(const qc_matmul *h, const qc_matmul_weights *const *w,
                                 const qc_matmul_io *io, uint32_t count, qc_matmul_path path,
                                 uint64_t limit_bytes, qc_matmul_planned *out, qc_error *err)
{
    if (!h || !out)
        QC_FAIL(err, QC_ERR_USAGE, "qc_matmul_plan_product: %s is NULL", h ? "out" : "the handle");
    QC_TRY(check_group(w, io, count, 0, err));
    return plan_group(h, w, io, count, path, limit_bytes, out, err);
}

qc_matmul_path qc_matmul_planned_path(const qc_matmul_planned *planned, uint32_t i)
{
    uint32_t set = 0;
    if (!planned || i >= planned->count)
        return QC_MATMUL_AUTO;
    while (planned->set[set].end <= i)
        set++;
    return planned->set[set].plan.path;
}

uint64_t qc_matmul_planned_workspace(const qc_matmul_planned *planned)
{
    return planned ? planned->workspace_bytes : UINT64_MAX;
}

/* ---- run ------------------------------------------------------------------------------------- */

/* Launches what was planned. Arguments were checked, and the plan is made for them. */
static qc_status launch_planned(const qc_matmul *h, const qc_matmul_planned *planned,
                                const qc_matmul_weights *const *w, const qc_matmul_io *io,
                                void *workspace, uint64_t workspace_bytes, qc_cuda_stream s,
                                qc_error *err)
{
    for (uint32_t i = 0, set = 0; set < planned->sets; set++) {
        qc_matmul_call c[QC_MATMUL_GROUP_MOST];
        uint32_t calls = 0;
        for (; i < planned->set[set].end; i++) {
            if (io->m == 0 || w[i]->part.rows == 0)
                continue;
            const uint64_t n = w[i]->part.rows, k = w[i]->part.cols;
            c[calls++] = (qc_matmul_call){.plan = planned->set[set].plan,
                                          .weights = *w[i],
                                          .m = io[i].m,
                                          .n = n,
                                          .k = k,
                                          .x = io[i].x,
                                          .x_dtype = io[i].x_dtype,
                                          .ldx = ldx_of(io + i, k),
                                          .out = {.y = io[i].y,
                                                  .ldy = io[i].ldy ? io[i].ldy : n,
                                                  .bias = io[i].bias,
                                                  .gate = io[i].gate,
                                                  .residual = io[i].residual,
                                                  .ldg = io[i].ldg ? io[i].ldg : n,
                                                  .ldr = io[i].ldr ? io[i].ldr : n,
                                                  .dtype = io[i].y_dtype,
                                                  .act = io[i].act}};
        }
        if (calls)
            QC_TRY(launch(h, c, calls, workspace, workspace_bytes, s, err));
    }
    return QC_OK;
}

qc_status qc_matmul_run_group(const qc_matmul *h, const qc_matmul_weights *const *w,
                              const qc_matmul_io *io, uint32_t count, qc_matmul_path path,
                              void *workspace, uint64_t workspace_bytes, qc_cuda_stream s,
                              qc_error *err)
{
    qc_matmul_planned planned;
    QC_TRY(qc_matmul_here(h, err));
    QC_TRY(qc_matmul_check(h, err));
    QC_TRY(check_group(w, io, count, 1, err));
    QC_TRY(check_workspace(workspace, workspace_bytes, err));
    QC_TRY(plan_group(h, w, io, count, path,
                      workspace_bytes ? workspace_bytes : QC_MATMUL_NO_WORKSPACE, &planned, err));
    return launch_planned(h, &planned, w, io, workspace, workspace_bytes, s, err);
}

qc_status qc_matmul_run(const qc_matmul *h, const qc_matmul_weights *w, const qc_matmul_io *io,
                        qc_matmul_path path, void *workspace, uint64_t workspace_bytes,
                        qc_cuda_stream s, qc_error *err)
{
    return qc_matmul_run_group(h, &w, io, 1, path, workspace, workspace_bytes, s, err);
}

/* Checks what may have changed since the plan was made, and would make it wrong. */
static qc_status check_planned(const qc_matmul_planned *p, const qc_matmul_weights *const *w,
                               const qc_matmul_io *io, qc_error *err)
{
    const uint64_t k = p->weights[0].part.cols;
    if (io->m != p->m)
        QC_FAIL(err, QC_ERR_USAGE,
                "the product was planned for %" PRIu64 " rows of x, not %" PRIu64, p->m, io->m);
    if (io->x_dtype != p->x_dtype || io->y_dtype != p->y_dtype)
        QC_FAIL(err, QC_ERR_USAGE, "the product was planned for x in %s and y in %s, not %s and %s",
                qc_dtype_name(p->x_dtype), qc_dtype_name(p->y_dtype), qc_dtype_name(io->x_dtype),
                qc_dtype_name(io->y_dtype));
    if (row_alignment(io->x, ldx_of(io, k) * 2) < p->x_alignment)
        QC_FAIL(err, QC_ERR_USAGE, "the product was planned for rows of x on %u-byte addresses",
                p->x_alignment);
    for (uint32_t i = 0, set = 0; i < p->count; i++) {
        const qc_matmul_planned_weight *v = &p->weights[i];
        const uint32_t first = set ? p->set[set - 1].end : 0;
        if (w[i]->w.form.ops->kind != v->kind ||
            memcmp(&w[i]->part, &v->part, sizeof v->part) != 0 || w[i]->w.form.cols != v->cols ||
            w[i]->w.form.block_elems != v->block_elems || (w[i]->row_bytes != 0) != v->repacked)
            QC_FAIL(err, QC_ERR_USAGE,
                    "weight %u differs in kind, part, block or layout from the %" PRIu64
                    " x %" PRIu64 " that the product was planned for",
                    i, v->part.rows, v->part.cols);
        if (!alike(w[first], w[i]))
            QC_FAIL(
                err, QC_ERR_USAGE,
                "weight %u was planned to be in one launch with weight %u, but has another form", i,
                first);
        if (has_epilogue(io + i) && !v->has_epilogue)
            QC_FAIL(err, QC_ERR_USAGE, "weight %u was planned without a bias, gate or residual", i);
        if (p->set[set].plan.path == QC_MATMUL_DEQUANT_GEMM &&
            !strides_fit_gemm(io + i, v->part.rows, k))
            QC_FAIL(err, QC_ERR_USAGE, "the strides of x or y are too large for cuBLAS");
        set += i + 1 == p->set[set].end;
    }
    return QC_OK;
}

qc_status qc_matmul_run_planned(const qc_matmul *h, const qc_matmul_planned *planned,
                                const qc_matmul_weights *const *w, const qc_matmul_io *io,
                                void *workspace, uint64_t workspace_bytes, qc_cuda_stream s,
                                qc_error *err)
{
    QC_TRY(qc_matmul_here(h, err));
    QC_TRY(qc_matmul_check(h, err));
    if (!planned)
        QC_FAIL(err, QC_ERR_USAGE, "qc_matmul_run_planned: the plan is NULL");
    QC_TRY(check_group(w, io, planned->count, 1, err));
    QC_TRY(check_planned(planned, w, io, err));
    QC_TRY(check_workspace(workspace, workspace_bytes, err));
    if (workspace_bytes < planned->workspace_bytes)
        QC_FAIL(err, QC_ERR_USAGE,
                "the workspace has %" PRIu64 " bytes, but the product was planned for %" PRIu64,
                workspace_bytes, planned->workspace_bytes);
    return launch_planned(h, planned, w, io, workspace, workspace_bytes, s, err);
}
