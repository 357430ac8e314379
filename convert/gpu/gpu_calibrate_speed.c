/* What the engine of calibrating on a GPU measures and predicts: speed of products, and room. */
#include "convert/gpu/gpu_calibrate_internal.h"

#include "base/checked.h"
#include "base/clock.h"

typedef qc_gpu_calibrator gpu;

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
    gpu *c;
    uint64_t n;
    qc_cublas_product_args product; /* of n x n matrices */
    qc_gpu_device_matrix dense;     /* for the forward pass of n tokens */
} measured;

typedef qc_status (*measured_fn)(const measured *m, qc_error *err);

static qc_status one_product(const measured *m, qc_error *err)
{
    qc_cublas *blas = m->c->tools.blas;
    QC_TRY(qc_cublas_begin(blas, NULL, 0, m->c->f.stream, err));
    qc_status st = qc_cublas_product(blas, &m->product, err);
    qc_cublas_end(blas);
    return st;
}

static qc_status one_dense(const measured *m, qc_error *err)
{
    qc_gpu_forward *f = &m->c->f;
    qc_cuda_product p;
    return qc_gpu_multiply(f, &m->dense, f->act.x, f->act.exponent, m->n, f->act.a, &p, err);
}

/* The seconds of the second run, because cuBLAS loads kernels in the first one of each size; but a
 * first run that is long is taken as it is. The very first one also loads the library, which takes
 * hundreds of milliseconds, so `warm` is 0 there: then it is run once more before. */
static qc_status time_of(const measured *m, measured_fn run, int warm, double *seconds,
                         qc_error *err)
{
    if (!warm) {
        QC_TRY(run(m, err));
        QC_TRY(qc_cuda_stream_synchronize(m->c->f.stream, err));
    }
    for (int i = 0; i < 2; i++) {
        uint64_t begin = qc_clock_ns();
        QC_TRY(run(m, err));
        QC_TRY(qc_cuda_stream_synchronize(m->c->f.stream, err));
        *seconds = (double)(qc_clock_ns() - begin) * 1e-9;
        if (*seconds > MEASURED_LONG)
            break;
    }
    *seconds = *seconds > 1e-9 ? *seconds : 1e-9;
    return QC_OK;
}

static qc_status measure_product(gpu *c, qc_dtype dtype, void *room, double *out, qc_error *err)
{
    for (uint64_t n = MEASURED_LEAST; n <= MEASURED_MOST; n *= 2) {
        uint64_t bytes = n * n * (qc_dtype_bits(dtype) / 8);
        unsigned char *at = room;
        double seconds = 0;
        const measured m = {.c = c,
                            .n = n,
                            .product = {.a = at,
                                        .b = at + bytes,
                                        .y = at + 2 * bytes,
                                        .dtype = dtype,
                                        .m = n,
                                        .n = n,
                                        .k = n,
                                        .lda = n,
                                        .ldb = n,
                                        .ldy = n,
                                        .trans_a = 1,
                                        .alpha = 1.0}};
        QC_TRY(time_of(&m, one_product, n > MEASURED_LEAST, &seconds, err));
        double operations = 2.0 * (double)n * (double)n * (double)n;
        *out = seconds / operations;
        if (seconds > MEASURED_ENOUGH)
            break;
    }
    return QC_OK;
}

/* Times the product with a gate matrix of zeros, whose halves are in `room`. */
static qc_status measure_forward(gpu *c, qc_gpu_memory *room, double *out, qc_error *err)
{
    const qc_forward_config *f = &c->f.form;
    const qc_forward_matrix gate = {
        .dtype = QC_DTYPE_F16, .rows = f->intermediate, .cols = f->hidden};
    const uint64_t most = qc_min_u64(MEASURED_MOST, c->f.act.tokens);
    measured m = {.c = c};
    qc_gpu_cutter counted = {0};
    m.dense = qc_gpu_lay_matrix(&gate, &counted);
    QC_TRY(qc_gpu_calibrator_grow(c, room, counted.used, OF_TIMED, err));
    qc_gpu_cutter at = {.base = room->base};
    m.dense = qc_gpu_lay_matrix(&gate, &at);
    m.dense.workspace_bytes = qc_matmul_no_gemm(c->f.handle) ? 0 : QC_MATMUL_DENSE_WORKSPACE;
    QC_TRY(qc_gpu_make_workspace(&c->f, m.dense.workspace_bytes + QC_MATMUL_HEADER_BYTES, err));
    QC_TRY(qc_cuda_fill(room->base, 0, (size_t)room->bytes, c->f.stream, err));
    QC_TRY(qc_cuda_fill(c->f.act.x, 0, (size_t)qc_gpu_bytes_of(most, f->hidden, sizeof(uint16_t)),
                        c->f.stream, err));
    const uint64_t least = qc_min_u64(most, 64);
    for (m.n = least; m.n <= most; m.n *= 2) {
        double seconds = 0;
        QC_TRY(time_of(&m, one_dense, m.n > least, &seconds, err));
        *out = seconds / (2.0 * (double)m.n * (double)f->intermediate * (double)f->hidden);
        if (seconds > MEASURED_ENOUGH)
            break;
    }
    return QC_OK;
}

static qc_status measure_all(gpu *c, qc_gpu_memory *room, qc_calibrate_speed *out, qc_error *err)
{
    const uint64_t elems = (uint64_t)3 * MEASURED_MOST * MEASURED_MOST;
    QC_TRY(qc_gpu_calibrator_grow(c, room, elems * sizeof(double), OF_TIMED, err));
    QC_TRY(qc_cuda_fill(room->base, 0, (size_t)room->bytes, c->f.stream, err));
    QC_TRY(measure_product(c, QC_DTYPE_F32, room->base, &out->single, err));
    QC_TRY(measure_product(c, QC_DTYPE_F64, room->base, &out->dual, err));
    return c->text ? measure_forward(c, room, &out->forward, err) : QC_OK;
}

qc_status qc_gpu_calibrator_measure(qc_calibrate_engine *e, const qc_forward_shape *shape,
                                    qc_calibrate_speed *out, qc_error *err)
{
    gpu *g = qc_gpu_calibrator_of(e);
    qc_gpu_memory room = {0};
    *out = (qc_calibrate_speed){.factor_slower = FACTOR_SLOWER,
                                .weight_slower = WEIGHT_SLOWER,
                                .coupled = COUPLED,
                                .coupled_pair = COUPLED_PAIR};
    QC_TRY(qc_gpu_calibrator_reopen(g, shape, 1, err));
    qc_status st = qc_gpu_calibrator_settled(g, measure_all(g, &room, out, err), err);
    qc_gpu_drop(&room);
    return st;
}

/* Activations, tables, kept inputs and the workspace. */
qc_calibrate_room qc_gpu_calibrator_room_text(const qc_calibrate_engine *e,
                                              const qc_forward_shape *shape, uint64_t tokens,
                                              uint64_t longest)
{
    const qc_forward_config *c = &shape->config;
    uint64_t chunk = qc_max_u64(longest, QC_GPU_TOKENS);
    uint64_t heads = qc_sat_mul(c->heads, c->head_dim);
    uint64_t widest = qc_max_u64(qc_max_u64(c->hidden, c->intermediate), heads);
    qc_gpu_cutter counted = {0};
    (void)e;
    (void)tokens;
    qc_gpu_lay_activations(c, chunk, &counted);
    uint64_t table = qc_gpu_bytes_of(longest, c->head_dim / 2, sizeof(float));
    uint64_t bytes = qc_sat_add(counted.used, qc_sat_mul(2, qc_gpu_aligned(table)));
    bytes = qc_sat_add(bytes, qc_gpu_bytes_of(chunk, widest, 2 * sizeof(float)));
    return (qc_calibrate_room){.device = qc_sat_add(bytes, QC_GPU_WORKSPACE_MOST)};
}

/* The device needs the largest of three: while moments are added, while they are factored, and
 * while a weight is worked on. */
qc_calibrate_room qc_gpu_calibrator_room_weight(const qc_calibrate_engine *e, uint64_t rows,
                                                uint64_t n, int cross, const qc_form *form,
                                                uint64_t block)
{
    uint64_t held = qc_sat_mul(qc_gpu_bytes_of(n, n, sizeof(double)), cross ? 2 : 1);
    uint64_t added = qc_sat_add(held, qc_cuda_moments_scratch_bytes(n));
    uint64_t factored = qc_sat_add(held, qc_cuda_feedback_open_bytes(n, cross));
    uint64_t worked = qc_sat_add(qc_cuda_feedback_kept_bytes(n, cross),
                                 qc_cuda_feedback_weight_least_bytes(rows, n, form, cross, block));
    (void)e;
    return (qc_calibrate_room){qc_sat_mul(qc_sat_mul(rows, n), 2),
                               qc_max_u64(qc_max_u64(added, factored), worked)};
}
