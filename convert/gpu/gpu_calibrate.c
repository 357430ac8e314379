/* The engine on a GPU that makes weights of moments from elsewhere. The interface is
 * calibrate_engine.h; the work is cuda_feedback.h's. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "convert/gpu/gpu_table.h"
#include "kernels/cuda_feedback.h"

/* What the memory is for. */
#define OF_MOMENTS "the second moments of a linear layer's inputs"
#define OF_TIMED   "products that are timed"

/* Factors and weights take this many times as long as their products alone. These ratios were
 * calculated (kernels/cuda_feedback_weight.c), not timed. */
#define FACTOR_SLOWER 2.0
#define WEIGHT_SLOWER 1.5
/* So are these, in cycles of 1.5 GHz: a look at 16 codes takes 200, and a pair of coupled outputs
 * takes a hundredth of one (kernels/cuda_feedback_outputs.cu). */
#define COUPLED      (200.0 / 16.0 / 1.5e9)
#define COUPLED_PAIR (0.01 / 1.5e9)

#define MEASURED_LEAST  256u
#define MEASURED_MOST   2048u
#define MEASURED_ENOUGH 0.02 /* seconds that stand out from noise */
#define MEASURED_LONG   0.5  /* seconds that are not waited for twice */

typedef struct {
    qc_calibrate_engine base;
    qc_cuda_device device;
    qc_cuda_feedback_tools tools; /* without a stream the device is not open */
    uint64_t n;                   /* rows of the moments; 0: none */
    double *h, *c;                /* c NULL: none */
    qc_cuda_feedback *factor;
} gpu;

static gpu *of(qc_calibrate_engine *e)
{
    return (gpu *)e;
}

/* ---- memory ---- */

/* Makes an error that says what the device has no room for. */
static qc_status named(qc_status st, const char *what, qc_error *err)
{
    if (st == QC_ERR_NOMEM)
        QC_FAIL(err, QC_ERR_NOMEM, "the GPU's memory has no room for %s", what);
    return st;
}

static void drop_moments(gpu *g)
{
    qc_cuda_free(g->h);
    qc_cuda_free(g->c);
    g->h = g->c = NULL;
    g->n = 0;
}

static void drop_factor(gpu *g)
{
    qc_cuda_feedback_close(g->factor);
    g->factor = NULL;
}

/* Waits for what was started; nothing may still use the memory that is given back. */
static void settle(const gpu *g)
{
    /* A stream that fails has stopped as well. */
    qc_status st = g->tools.stream ? qc_cuda_stream_synchronize(g->tools.stream, NULL) : QC_OK;
    (void)st;
}

/* After an error, what was started may still read the host's arrays, so this waits for it. Returns
 * st. */
static qc_status settled(const gpu *g, qc_status st, qc_error *err)
{
    if (st != QC_OK)
        settle(g);
    if (st == QC_ERR_NOMEM)
        qc_error_prefix(err, "calibrating on the GPU (--device cpu calibrates without one)");
    return st;
}

/* ---- the device ---- */

static void close_device(gpu *g)
{
    settle(g);
    drop_factor(g);
    drop_moments(g);
    qc_cusolver_close(g->tools.solver);
    qc_cublas_close(g->tools.blas);
    qc_cuda_stream_destroy(g->tools.stream);
    g->tools = (qc_cuda_feedback_tools){0};
}

static qc_status open_device(gpu *g, const qc_cuda_device *device, qc_error *err)
{
    QC_TRY(qc_cuda_use(device, err));
    QC_TRY(qc_cublas_open(&g->tools.blas, device->runtime_version, err));
    QC_TRY(qc_cusolver_open(&g->tools.solver, device->runtime_version, err));
    g->device = *device;
    return qc_cuda_stream_create(&g->tools.stream, err);
}

static void close(qc_calibrate_engine *e)
{
    close_device(of(e));
}

static qc_status device_name(const char **out, qc_arena *arena, const qc_cuda_device *device,
                             qc_error *err)
{
    gpu g = {0};
    *out = NULL;
    qc_status st = open_device(&g, device, err);
    if (st == QC_OK)
        st = qc_arena_printf(arena, out, err, "%s, %s, %s", device->name,
                             qc_cublas_name(g.tools.blas), qc_cusolver_name(g.tools.solver));
    close_device(&g);
    return st;
}

/* ---- speed and room ---- */

static qc_status one_product(const gpu *g, const qc_cublas_product_args *p, qc_error *err)
{
    QC_TRY(qc_cublas_begin(g->tools.blas, NULL, 0, g->tools.stream, err));
    qc_status st = qc_cublas_product(g->tools.blas, p, err);
    qc_cublas_end(g->tools.blas);
    QC_TRY(st);
    return qc_cuda_stream_synchronize(g->tools.stream, err);
}

/* Gives the seconds of an operation, from the second run of each size, because cuBLAS loads kernels
 * in the first one; but a first run that is long is taken as it is. The very first one also loads
 * the library, which takes hundreds of milliseconds, so it is run once more before. */
static qc_status measure_product(const gpu *g, qc_dtype dtype, unsigned char *room, double *out,
                                 qc_error *err)
{
    for (uint64_t n = MEASURED_LEAST; n <= MEASURED_MOST; n *= 2) {
        uint64_t bytes = n * n * (qc_dtype_bits(dtype) / 8);
        double seconds = 0;
        const qc_cublas_product_args p = {.a = room,
                                          .b = room + bytes,
                                          .y = room + 2 * bytes,
                                          .dtype = dtype,
                                          .y_dtype = dtype,
                                          .m = n,
                                          .n = n,
                                          .k = n,
                                          .lda = n,
                                          .ldb = n,
                                          .ldy = n,
                                          .trans_a = 1,
                                          .alpha = 1.0};
        if (n == MEASURED_LEAST)
            QC_TRY(one_product(g, &p, err));
        for (int i = 0; i < 2 && seconds <= MEASURED_LONG; i++) {
            const uint64_t begin = qc_clock_ns();
            QC_TRY(one_product(g, &p, err));
            seconds = (double)(qc_clock_ns() - begin) * 1e-9;
        }
        seconds = seconds > 1e-9 ? seconds : 1e-9;
        *out = seconds / (2.0 * (double)n * (double)n * (double)n);
        if (seconds > MEASURED_ENOUGH)
            break;
    }
    return QC_OK;
}

static qc_status measure(qc_calibrate_engine *e, qc_calibrate_speed *out, qc_error *err)
{
    const size_t bytes = (size_t)3 * MEASURED_MOST * MEASURED_MOST * sizeof(double);
    gpu *g = of(e);
    void *room = NULL;
    *out = (qc_calibrate_speed){.factor_slower = FACTOR_SLOWER,
                                .weight_slower = WEIGHT_SLOWER,
                                .coupled = COUPLED,
                                .coupled_pair = COUPLED_PAIR};
    close_device(g);
    qc_status st = open_device(g, &e->k->devices->gpus[0], err);
    if (st == QC_OK)
        st = named(qc_cuda_malloc(&room, bytes, err), OF_TIMED, err);
    if (st == QC_OK)
        st = qc_cuda_fill(room, 0, bytes, g->tools.stream, err);
    if (st == QC_OK)
        st = measure_product(g, QC_DTYPE_F32, room, &out->single, err);
    if (st == QC_OK)
        st = measure_product(g, QC_DTYPE_F64, room, &out->dual, err);
    st = settled(g, st, err);
    qc_cuda_free(room);
    return st;
}

/* The device needs the larger of two: while moments are factored, and while a weight is worked
 * on. */
static qc_calibrate_room room_weight(const qc_calibrate_engine *e, uint64_t rows, uint64_t n,
                                     int cross, const qc_form *form, uint64_t block)
{
    uint64_t held = qc_sat_mul(qc_calibrate_square_bytes(n), cross ? 2 : 1);
    uint64_t factored = qc_sat_add(held, qc_cuda_feedback_open_bytes(n, cross));
    uint64_t worked = qc_sat_add(qc_cuda_feedback_kept_bytes(n, cross),
                                 qc_cuda_feedback_weight_least_bytes(rows, n, form, block));
    (void)e;
    return (qc_calibrate_room){qc_sat_mul(qc_sat_mul(rows, n), sizeof(float)),
                               qc_max_u64(factored, worked)};
}

/* ---- moments ---- */

static qc_status new_moments(gpu *g, uint64_t n, int cross, qc_error *err)
{
    uint64_t bytes = qc_calibrate_square_bytes(n);
    size_t size = 0;
    QC_TRY(qc_cuda_use(&g->device, err));
    QC_TRY(qc_cuda_stream_synchronize(g->tools.stream, err));
    drop_factor(g);
    drop_moments(g);
    if (n == 0)
        QC_FAIL(err, QC_ERR_USAGE, "second moments need at least one input, found none");
    if (bytes == UINT64_MAX || qc_u64_to_size(bytes, &size))
        return named(QC_ERR_NOMEM, OF_MOMENTS, err);
    QC_TRY(named(qc_cuda_malloc(&g->h, size, err), OF_MOMENTS, err));
    if (cross)
        QC_TRY(named(qc_cuda_malloc(&g->c, size, err), OF_MOMENTS, err));
    g->n = n;
    return QC_OK;
}

static qc_status take_moments(qc_calibrate_engine *e, uint64_t n, double *h, double *c,
                              qc_error *err)
{
    gpu *g = of(e);
    size_t bytes = (size_t)(n * n * sizeof *h);
    qc_status st = new_moments(g, n, c != NULL, err);
    if (st == QC_OK)
        st = qc_cuda_to_device(g->h, h, bytes, g->tools.stream, err);
    if (st == QC_OK && c)
        st = qc_cuda_to_device(g->c, c, bytes, g->tools.stream, err);
    if (st == QC_OK)
        st = qc_cuda_stream_synchronize(g->tools.stream, err);
    st = settled(g, st, err);
    qc_free(h);
    qc_free(c);
    return st;
}

/* ---- factor and weights ---- */

static qc_status factor(qc_calibrate_engine *e, const qc_feedback_options *options,
                        qc_feedback_info *info, qc_error *err)
{
    gpu *g = of(e);
    QC_TRY(qc_cuda_use(&g->device, err));
    if (g->n == 0)
        QC_FAIL(err, QC_ERR_USAGE, "there are no moments to be factored");
    QC_TRY(qc_cuda_stream_synchronize(g->tools.stream, err));
    drop_factor(g);
    qc_status st =
        named(qc_cuda_feedback_open(&g->factor, &g->tools, g->n, g->h, g->c, options, info, err),
              "the factor of second moments", err);
    st = settled(g, st, err);
    drop_moments(g);
    return st;
}

static qc_status weight(qc_calibrate_engine *e, const qc_form *form, const float *w, uint64_t rows,
                        const qc_feedback_outputs *outputs, qc_feedback_out *out,
                        qc_feedback_result *result, qc_error *err)
{
    gpu *g = of(e);
    QC_TRY(qc_cuda_use(&g->device, err));
    if (!g->factor)
        QC_FAIL(err, QC_ERR_USAGE, "a weight can only follow a factor");
    const qc_status st =
        qc_cuda_feedback_weight(g->factor, form, w, QC_DTYPE_F32, rows, outputs, out, result, err);
    return settled(g, named(st, "a weight in work", err), err);
}

/* The next moments or the next factor take its place. Until then it may stay. */
static void drop(qc_calibrate_engine *e)
{
    (void)e;
}

static const qc_calibrate_engine_ops ops = {
    .engine_bytes = sizeof(gpu),
    .close = close,
    .measure = measure,
    .room_weight = room_weight,
    .take = take_moments,
    .factor = factor,
    .weight = weight,
    .drop = drop,
};

const qc_gpu_calibrating qc_gpu_calibrating_table = {.ops = &ops, .name = device_name};
