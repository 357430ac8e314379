/* The factor of second moments on a GPU. What follows from the diagonal alone (the order of the
 * columns, damping) is done on the host, by the CPU's own functions; the rest stays on the device:
 *
 *   H --gather, in reverse order--> a --cuSOLVER--> factor --> hu, d
 *   C --gather, transposed--> (in H's room) --cuSOLVER--> --transposed--> m
 *
 * H = R R^T with R upper is the usual L L^T of H with rows and columns in reverse. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "kernels/cuda_feedback_internal.h"
#include "quant/error_feedback_internal.h"

#include <string.h>

qc_cuda_form qc_cuda_form_of(const qc_form *form)
{
    const qc_form_ops *o = form->ops;
    return (qc_cuda_form){.table = qc_form_is_table(o),
                          .few = o->bits <= 4,
                          .by_rows = qc_form_by_rows(form),
                          .integer = o->integer,
                          .signed_scales = o->signed_scales,
                          .step_last = o->step_last,
                          .lowest = (float)o->lowest,
                          .highest = (float)o->highest,
                          .span = o->span,
                          .step = o->step,
                          .reach = qc_form_reach(o),
                          .scale_dtype = form->scale_dtype};
}

#define ODD_ROWS 64u /* rows that are named together, as on the CPU */

typedef struct {
    qc_cuda_feedback *f;
    double *h, *c;
    double *a;       /* device, [n, n] */
    void *device;    /* device: the arrays of `in`, and odd */
    uint32_t *odd;   /* device, [n] */
    double *own;     /* [n] */
    uint64_t *order; /* [n] */
    void *host;      /* what `device` is filled from */
    qc_cuda_factor_input in;
    double mean, damping;
} opening;

static uint64_t lists_bytes(uint64_t n)
{
    return qc_sat_mul(n, 2 * sizeof(double) + 2 * sizeof(uint32_t) + 1);
}

/* Sends the lists, which depend on the damping, to the device. */
static qc_status send_lists(opening *o, qc_error *err)
{
    const uint64_t n = o->f->n;
    double *damped = o->host, *added = damped + n;
    uint32_t *order = (uint32_t *)(damped + 2 * n);
    uint8_t *dead = (uint8_t *)(order + 2 * n);
    for (uint64_t k = 0; k < n; k++) {
        const double more = o->damping * qc_feedback_anchor(o->own[k], o->mean);
        dead[k] = o->own[k] == 0.0;
        damped[k] = dead[k] ? o->mean : o->own[k] + more;
        added[k] = dead[k] ? o->mean : more;
        order[k] = (uint32_t)o->order[k];
        order[n + k] = 0;
    }
    QC_TRY(qc_cuda_to_device(o->device, o->host, (size_t)lists_bytes(n), o->f->tools.stream, err));
    /* After this the host's lists may be filled anew. */
    return qc_cuda_stream_synchronize(o->f->tools.stream, err);
}

static qc_status check_finite(const opening *o, const double *square, int lower, qc_error *err)
{
    const uint64_t n = o->f->n;
    uint32_t *odd = o->host;
    qc_cuda_stream s = o->f->tools.stream;
    QC_TRY(qc_cuda_find_odd(square, n, lower, o->odd, s, err));
    QC_TRY(qc_cuda_to_host(odd, o->odd, (size_t)n * sizeof *odd, s, err));
    QC_TRY(qc_cuda_stream_synchronize(s, err));
    for (uint64_t k = 0; k < n; k++)
        if (odd[k]) {
            const uint64_t first = k / ODD_ROWS * ODD_ROWS, end = first + ODD_ROWS;
            return qc_feedback_odd(first, end < n ? end : n, err);
        }
    return QC_OK;
}

static qc_status factor(opening *o, qc_feedback_info *info, qc_error *err)
{
    const qc_cuda_feedback_tools *t = &o->f->tools;
    int exists = 0;
    o->damping = o->f->options.damping;
    for (;;) {
        QC_TRY(qc_check_interrupted(err));
        QC_TRY(send_lists(o, err));
        QC_TRY(qc_cuda_gather_factor(&o->in, o->h, o->a, t->stream, err));
        QC_TRY(qc_cusolver_factor(t->solver, o->f->n, o->a, &exists, t->stream, err));
        if (exists)
            break;
        QC_TRY(qc_feedback_raise(&o->damping, info, err));
    }
    info->damping = o->damping;
    return QC_OK;
}

static qc_status open_with(opening *o, qc_feedback_info *info, qc_error *err)
{
    qc_cuda_feedback *f = o->f;
    qc_cuda_stream s = f->tools.stream;
    const uint64_t n = f->n;
    QC_TRY(qc_calloc(&o->own, (size_t)n, sizeof *o->own, err));
    QC_TRY(qc_calloc(&o->order, (size_t)n, sizeof *o->order, err));
    QC_TRY(qc_malloc_aligned(&o->host, 64, (size_t)lists_bytes(n), err));
    QC_TRY(qc_cuda_malloc(&o->device, (size_t)lists_bytes(n), err));
    QC_TRY(qc_cuda_malloc(&o->a, (size_t)(n * n * sizeof *o->a), err));
    QC_TRY(qc_cuda_malloc(&f->hu, (size_t)(n * n * sizeof *f->hu), err));
    QC_TRY(qc_cuda_malloc(&f->d, (size_t)n * sizeof *f->d, err));
    QC_TRY(qc_cuda_malloc(&f->inverse, (size_t)n * sizeof *f->inverse, err));
    QC_TRY(qc_cuda_malloc(&f->order, (size_t)n * sizeof *f->order, err));
    /* Lists of n lie one behind the other: damped, added, order, odd, dead. */
    double *damped = o->device;
    uint32_t *order = (uint32_t *)(damped + 2 * n);
    o->odd = order + n;
    o->in = (qc_cuda_factor_input){.n = n,
                                   .order = order,
                                   .damped = damped,
                                   .added = damped + n,
                                   .dead = (const uint8_t *)(o->odd + n)};
    QC_TRY(check_finite(o, o->h, 1, err));
    if (o->c)
        QC_TRY(check_finite(o, o->c, 0, err));
    double *diagonal = o->device;
    QC_TRY(qc_cuda_diagonal(o->h, n, diagonal, s, err));
    QC_TRY(qc_cuda_to_host(o->own, diagonal, (size_t)n * sizeof *o->own, s, err));
    QC_TRY(qc_cuda_stream_synchronize(s, err));
    QC_TRY(qc_feedback_look_at_diagonal(o->own, n, o->order, &o->mean, &info->dead, err));
    o->in.scale = qc_feedback_scale(o->mean);
    QC_TRY(factor(o, info, err));
    QC_TRY(qc_cuda_copy(f->order, o->in.order, (size_t)n * sizeof *f->order, s, err));
    QC_TRY(qc_cuda_fill_feedback(&o->in, o->h, o->a, f->hu, f->d, f->inverse, s, err));
    if (o->c) { /* overwrites H's room, because hu is filled already */
        QC_TRY(qc_cuda_malloc(&f->m, (size_t)(n * n * sizeof *f->m), err));
        QC_TRY(qc_cuda_gather_target(&o->in, o->c, o->h, s, err));
        QC_TRY(qc_cusolver_solve(f->tools.solver, n, o->a, n, o->h, s, err));
        QC_TRY(qc_cuda_narrow_target(&o->in, o->h, f->m, s, err));
    }
    return qc_cuda_stream_synchronize(s, err);
}

qc_status qc_cuda_feedback_open(qc_cuda_feedback **out, const qc_cuda_feedback_tools *t, uint64_t n,
                                double *h, double *c, const qc_feedback_options *options,
                                qc_feedback_info *info, qc_error *err)
{
    qc_cuda_feedback *f = NULL;
    qc_feedback_info local = {0};
    *out = NULL;
    QC_TRY(qc_feedback_check(n, options, err));
    QC_TRY(qc_calloc(&f, 1, sizeof *f, err));
    *f = (qc_cuda_feedback){.tools = *t, .n = n, .options = *options};
    opening o = {.f = f, .h = h, .c = c};
    qc_status st = open_with(&o, &local, err);
    /* No work may still use what is freed. */
    if (st != QC_OK && qc_cuda_stream_synchronize(t->stream, NULL) != QC_OK)
        local.damping = 0.0; /* the device is lost */
    qc_cuda_free(o.a);
    qc_cuda_free(o.device);
    qc_free(o.host);
    qc_free(o.order);
    qc_free(o.own);
    if (st != QC_OK) {
        qc_cuda_feedback_close(f);
        return st;
    }
    if (info)
        *info = local;
    *out = f;
    return QC_OK;
}

void qc_cuda_feedback_close(qc_cuda_feedback *f)
{
    if (!f)
        return;
    qc_cuda_free(f->order);
    qc_cuda_free(f->hu);
    qc_cuda_free(f->d);
    qc_cuda_free(f->inverse);
    qc_cuda_free(f->m);
    qc_free(f);
}

uint64_t qc_cuda_feedback_kept_bytes(uint64_t n, int cross)
{
    const uint64_t square = qc_sat_mul(qc_sat_mul(n, n), sizeof(float));
    return qc_sat_add(qc_sat_mul(square, cross ? 2 : 1), qc_sat_mul(n, 12) + 2048);
}

uint64_t qc_cuda_feedback_open_bytes(uint64_t n, int cross)
{
    const uint64_t square = qc_sat_mul(qc_sat_mul(n, n), sizeof(double));
    return qc_sat_add(qc_cuda_feedback_kept_bytes(n, cross), qc_sat_add(square, lists_bytes(n)));
}
