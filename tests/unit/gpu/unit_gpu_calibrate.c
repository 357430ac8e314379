/* A small layer in two streams through convert/gpu/gpu_calibrate.c, on kernels on the CPU shim,
 * against convert/forward/forward_cpu.c: hidden states at every point and second moments, with head
 * norms and biases and without, one matrix replaced by NF4; a whole layer; the head; more windows
 * than go at once; moments from elsewhere; and what is an error. */
#include "base/alloc.h"
#include "convert/family/family.h"
#include "convert/forward/forward_cpu.h"
#include "convert/gpu/gpu_calibrate.h"
#include "tests/fixtures/quant_testing.h"

#include <string.h>

#define HIDDEN       40u
#define INTERMEDIATE 72u
#define HEADS        2u
#define HEAD_DIM     16u
#define Q_COLS       (HEADS * HEAD_DIM)
#define KV_COLS      HEAD_DIM
#define LONGEST      36u
#define TOLERANCE    6e-3 /* of the root mean square: products of float16 */

static const uint64_t lengths[] = {1, 17, LONGEST, 9};
#define WINDOWS 4u
#define TOKENS  (1u + 17u + LONGEST + 9u)

static const qc_forward_batch batch = {.lengths = lengths, .count = WINDOWS, .tokens = TOKENS};

static qt_rng rng = {5};
static uint64_t no_window[1];
static unsigned char turns[1]; /* QC_LAYER_TURNED */
static qc_forward_shape shape = {.config = {.hidden = HIDDEN,
                                            .intermediate = INTERMEDIATE,
                                            .heads = HEADS,
                                            .kv_heads = 1,
                                            .head_dim = HEAD_DIM,
                                            .context = 64,
                                            .norm_eps = 1e-5},
                                 .rope = {.theta = 10000.0, .factor = 1.0, .magnitude = 1.0},
                                 .windows = no_window,
                                 .turns = turns,
                                 .turned = HEAD_DIM,
                                 .value_dim = HEAD_DIM,
                                 .residual_scale = 1.0};

static float *random_floats(size_t n, double mean, double spread)
{
    float *v = qt_alloc(n, sizeof *v);
    for (size_t i = 0; i < n; i++)
        v[i] = (float)(mean + spread * (double)qt_randn(&rng));
    return v;
}

/* ---- a layer ---- */

static void make_layer(qc_forward_weights *w, int extras)
{
    static const uint64_t shapes[QC_LAYER_MATRICES][2] = {
        {Q_COLS, HIDDEN},       {KV_COLS, HIDDEN},      {KV_COLS, HIDDEN},     {HIDDEN, Q_COLS},
        {INTERMEDIATE, HIDDEN}, {INTERMEDIATE, HIDDEN}, {HIDDEN, INTERMEDIATE}};
    memset(w, 0, sizeof *w);
    for (unsigned i = 0; i < QC_LAYER_MATRICES; i++) {
        uint64_t rows = shapes[i][0], cols = shapes[i][1];
        w->matrices[i] = (qc_forward_matrix){
            .rows = rows,
            .cols = cols,
            .dense = random_floats(rows * cols, 0.0, 1.0 / sqrt((double)cols)),
            .dtype = QC_DTYPE_F32,
            .bias = extras && i <= QC_LAYER_V ? random_floats(rows, 0.0, 0.2) : NULL};
    }
    w->vectors[QC_LAYER_INPUT_NORM] = random_floats(HIDDEN, 1.0, 0.2);
    w->vectors[QC_LAYER_POST_NORM] = random_floats(HIDDEN, 1.0, 0.2);
    if (extras) {
        w->vectors[QC_LAYER_Q_NORM] = random_floats(HEAD_DIM, 1.0, 0.2);
        w->vectors[QC_LAYER_K_NORM] = random_floats(HEAD_DIM, 1.0, 0.2);
    }
}

static void free_layer(qc_forward_weights *w)
{
    for (unsigned i = 0; i < QC_LAYER_MATRICES; i++) {
        free((void *)(uintptr_t)w->matrices[i].dense);
        free((void *)(uintptr_t)w->matrices[i].bias);
    }
    for (unsigned i = 0; i < QC_LAYER_VECTORS; i++)
        free(w->vectors[i]);
}

/* A matrix in a form, with one scale a block of 32. */
static void make_coded(const qc_form_ops *ops, const qc_forward_matrix *m, qc_weights *w,
                       void **codes, float **absmax)
{
    const qc_form form = {
        .ops = ops, .block_elems = 32, .cols = m->cols, .scale_dtype = QC_DTYPE_BF16};
    uint64_t n = m->rows * m->cols;
    qc_piece_sums sums = {0};
    *codes = qt_alloc(qc_form_code_bytes(&form, n), 1);
    *absmax = qt_alloc(qc_form_scales(&form, n), sizeof **absmax);
    const qc_form_out out = {.codes = *codes, .absmax = *absmax};
    ops->quantize(qc_quant_ops_for(QC_ISA_SCALAR), &form, m->dense, QC_DTYPE_F32, n, &out, &sums);
    *w = (qc_weights){.form = form, .rows = m->rows, .codes = *codes, .absmax = *absmax};
}

/* ---- the engine ---- */

static qc_devices devices = {.gpu_count = 1};
static qc_calibrator calibrator = {.devices = &devices};

static qc_calibrate_engine *new_engine(void)
{
    qc_calibrate_engine *e = NULL;
    qc_error err = {0};
    assert_int_equal(qc_cuda_device_open(&devices.gpus[0], 0, &err), QC_OK);
    calibrator.ops = qc_quant_ops_for(QC_ISA_SCALAR);
    assert_int_equal(
        qc_calibrate_engine_create(&e, qc_gpu_calibrating_table.ops, &calibrator, &err), QC_OK);
    return e;
}

/* An engine on which a text with these states is. */
static qc_calibrate_engine *new_text(const qc_forward_batch *b, const qc_calibrate_states *s)
{
    qc_calibrate_engine *e = new_engine();
    qc_error err = {0};
    QT_CHECK(e->ops->text(e, &shape, b, s, &err) == QC_OK, "%s", err.msg);
    return e;
}

static void new_cpu(qc_forward_cpu *cpu)
{
    qc_error err = {0};
    const qc_forward_tools tools = {.threads = 1, .isa = QC_ISA_SCALAR};
    assert_int_equal(qc_forward_cpu_create(cpu, &shape, &tools, &batch, &err), QC_OK);
}

static void check_near(const float *got, const float *want, size_t n, const char *what)
{
    double most = 0, squares = 0;
    for (size_t i = 0; i < n; i++) {
        double e = fabs((double)got[i] - (double)want[i]);
        most = e > most || e != e ? e : most;
        squares += (double)want[i] * (double)want[i];
    }
    QT_CHECK(most <= TOLERANCE * sqrt(squares / (double)n), "%s: off by %g", what, most);
}

/* got: lower triangle or all, want = a^T b of inputs [tokens, n] */
static void check_moments(const double *got, const float *a, const float *b, uint64_t tokens,
                          uint64_t n, int lower, const char *what)
{
    double most = 0, largest = 0;
    for (uint64_t i = 0; i < n; i++)
        for (uint64_t j = 0; j < (lower ? i + 1 : n); j++) {
            double sum = 0;
            for (uint64_t t = 0; t < tokens; t++)
                sum += (double)a[t * n + i] * (double)b[t * n + j];
            double e = fabs(got[i * n + j] - sum);
            most = e > most || e != e ? e : most;
            largest = fabs(sum) > largest ? fabs(sum) : largest;
        }
    QT_CHECK(most <= TOLERANCE * largest, "%s: off by %g of %g", what, most, largest);
}

static float *copy_of(const float *v, size_t n)
{
    float *out = qt_alloc(n, sizeof *out);
    memcpy(out, v, n * sizeof *out);
    return out;
}

typedef struct {
    float *hidden, *attended, *inputs; /* inputs: of the point before last */
} stream;

static uint64_t cpu_to(qc_forward_cpu *cpu, const qc_forward_weights *w, qc_forward_point point,
                       stream *s)
{
    const qc_forward_pass pass = {.w = w, .hidden = s->hidden, .attended = s->attended};
    qc_error err = {0};
    qc_forward_chunk at = {0};
    qc_forward_inputs in;
    uint64_t n = point == QC_AT_O ? Q_COLS : point == QC_AT_DOWN ? INTERMEDIATE : HIDDEN;
    assert_true(qc_forward_cpu_next(cpu, &at));
    assert_int_equal(at.tokens, TOKENS);
    assert_int_equal(qc_forward_cpu_at(cpu, &pass, &at, point, &in, &err), QC_OK);
    for (uint64_t t = 0; point != QC_AT_END && t < TOKENS; t++)
        memcpy(s->inputs + t * n, in.x + t * in.ld, n * sizeof *in.x);
    if (point == QC_AT_O)
        memcpy(s->attended, s->inputs, sizeof(float) * TOKENS * Q_COLS);
    return n;
}

static void check_points(int extras, const qc_form_ops *ops)
{
    qc_error err = {0};
    qc_forward_cpu cpu;
    qc_forward_weights wz, wx;
    qc_weights coded;
    void *codes = NULL;
    float *absmax = NULL;
    new_cpu(&cpu);
    make_layer(&wz, extras);
    wx = wz; /* but for o, which is replaced */
    make_coded(ops, &wz.matrices[QC_LAYER_O], &coded, &codes, &absmax);
    stream z = {random_floats((size_t)TOKENS * HIDDEN, 0.0, 1.0),
                qt_alloc((size_t)TOKENS * Q_COLS, sizeof(float)),
                qt_alloc((size_t)TOKENS * INTERMEDIATE, sizeof(float))};
    stream x = {random_floats((size_t)TOKENS * HIDDEN, 0.0, 1.0),
                qt_alloc((size_t)TOKENS * Q_COLS, sizeof(float)),
                qt_alloc((size_t)TOKENS * INTERMEDIATE, sizeof(float))};
    qc_calibrate_states s = {.x = copy_of(x.hidden, (size_t)TOKENS * HIDDEN),
                             .z = copy_of(z.hidden, (size_t)TOKENS * HIDDEN),
                             .x_attended = qt_alloc((size_t)TOKENS * Q_COLS, sizeof(float)),
                             .z_attended = qt_alloc((size_t)TOKENS * Q_COLS, sizeof(float))};
    float *px = copy_of(x.hidden, (size_t)TOKENS * HIDDEN);
    float *pz = copy_of(z.hidden, (size_t)TOKENS * HIDDEN);
    qc_calibrate_engine *c = new_text(&batch, &s);
    assert_int_equal(c->ops->layer(c, 0, &wz, &wx, &err), QC_OK);
    for (int at = QC_AT_QKV; at <= QC_AT_END; at++) {
        qc_forward_point point = (qc_forward_point)at;
        if (point == QC_AT_IMAGE || point == QC_AT_Q_B || point == QC_AT_KV_B)
            continue; /* the layer has no latents */
        if (point == QC_AT_GATE) {
            wx.matrices[QC_LAYER_O].quantized = &coded;
            assert_int_equal(c->ops->quantized(c, QC_LAYER_O, &err), QC_OK);
        }
        cpu_to(&cpu, &wz, point, &z);
        uint64_t n = cpu_to(&cpu, &wx, point, &x);
        double *h = qt_alloc(n * n, sizeof *h), *cross = qt_alloc(n * n, sizeof *cross);
        assert_int_equal(c->ops->moments(c, n, 1, &err), QC_OK);
        QT_CHECK(c->ops->reach(c, point, 1, 0.0, &err) == QC_OK, "%s", err.msg);
        check_near(s.x, x.hidden, (size_t)TOKENS * HIDDEN, "x");
        check_near(s.z, z.hidden, (size_t)TOKENS * HIDDEN, "z");
        if (point == QC_AT_O) {
            check_near(s.x_attended, x.attended, (size_t)TOKENS * Q_COLS, "attended x");
            check_near(s.z_attended, z.attended, (size_t)TOKENS * Q_COLS, "attended z");
        }
        assert_int_equal(qc_gpu_calibrator_inputs(c), n);
        assert_int_equal(qc_gpu_calibrator_read(c, h, cross, &err), QC_OK);
        if (point != QC_AT_END) {
            check_moments(h, x.inputs, x.inputs, TOKENS, n, 1, "H");
            check_moments(cross, x.inputs, z.inputs, TOKENS, n, 0, "C");
        }
        free(h);
        free(cross);
    }
    float *at_x = s.x_attended, *at_z = s.z_attended, *sx = s.x, *sz = s.z;
    /* All at once comes to the same. */
    s.x = px;
    s.z = pz;
    assert_int_equal(c->ops->pass(c, 0.0, &err), QC_OK);
    check_near(px, x.hidden, (size_t)TOKENS * HIDDEN, "pass x");
    check_near(pz, z.hidden, (size_t)TOKENS * HIDDEN, "pass z");
    qc_calibrate_engine_destroy(c);
    qc_forward_cpu_deinit(&cpu);
    float *all[] = {x.hidden, x.attended, x.inputs, z.hidden, z.attended, z.inputs,
                    px,       pz,         at_x,     at_z,     sx,         sz};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    free_layer(&wz);
    free(codes);
    free(absmax);
}

TEST(test_points)
{
    check_points(0, &qc_form_nf4);
    check_points(1, &qc_form_w4a16);
}

/* Head: more windows than one chunk of 4096 tokens holds. */
TEST(test_head_of_chunks)
{
    enum { many = 115, tokens = many * LONGEST };
    uint64_t all[many];
    qc_error err = {0};
    SCOPED(qc_forward_cpu) cpu;
    for (int i = 0; i < many; i++)
        all[i] = LONGEST;
    new_cpu(&cpu);
    float *gain = random_floats(HIDDEN, 1.0, 0.2);
    float *x = random_floats((size_t)tokens * HIDDEN, 0.0, 1.0);
    float *z = random_floats((size_t)tokens * HIDDEN, 0.0, 1.0);
    const qc_calibrate_states s = {.x = x, .z = z, .x_attended = x, .z_attended = z};
    const qc_forward_batch b = {.lengths = all, .count = many, .tokens = tokens};
    qc_calibrate_engine *c = new_text(&b, &s);
    assert_int_equal(c->ops->head(c, gain, &err), QC_ERR_USAGE);
    assert_int_equal(c->ops->moments(c, HIDDEN, 0, &err), QC_OK);
    QT_CHECK(c->ops->head(c, gain, &err) == QC_OK, "%s", err.msg);
    static double h[HIDDEN * HIDDEN];
    assert_int_equal(qc_gpu_calibrator_read(c, h, NULL, &err), QC_OK);
    for (uint64_t t = 0; t < tokens; t++)
        cpu.decoder->norm(x + t * HIDDEN, gain, HIDDEN, 1e-5f, x + t * HIDDEN);
    check_moments(h, x, x, tokens, HIDDEN, 1, "head");
    qc_calibrate_engine_destroy(c);
    free(gain);
    free(x);
    free(z);
}

TEST(test_errors)
{
    static const double values[4] = {1, 2, 3, 4};
    qc_calibrate_engine *c = new_engine();
    qc_calibrate_speed speed;
    qc_error err = {0};
    const char *name = NULL;
    void *h = NULL;
    double got[4];
    SCOPED(qc_arena) arena = {0};
    assert_int_equal(setenv("QCONV_LIBCUBLAS", "/nowhere/libcublas.so", 1), 0);
    assert_int_equal(qc_gpu_calibrating_table.name(&name, &arena, &devices.gpus[0], &err),
                     QC_ERR_DEVICE);
    assert_null(name);
    assert_int_equal(c->ops->measure(c, NULL, &speed, &err), QC_ERR_DEVICE);
    assert_int_equal(setenv("QCONV_LIBCUBLAS", QC_FAKE_CUBLAS, 1), 0);
    assert_int_equal(qc_gpu_calibrating_table.name(&name, &arena, &devices.gpus[0], &err), QC_OK);
    assert_non_null(strstr(name, "cuSOLVER"));
    assert_int_equal(c->ops->measure(c, NULL, &speed, &err), QC_OK);
    assert_true(speed.single > 0 && speed.dual > 0);
    assert_int_equal(c->ops->pass(c, 0.0, &err), QC_ERR_USAGE);
    assert_int_equal(qc_malloc(&h, sizeof values, &err), QC_OK);
    memcpy(h, values, sizeof values);
    assert_int_equal(c->ops->take(c, 2, h, NULL, &err), QC_OK);
    assert_int_equal(qc_gpu_calibrator_inputs(c), 2);
    assert_int_equal(qc_gpu_calibrator_read(c, got, NULL, &err), QC_OK);
    assert_memory_equal(got, values, sizeof values);
    qc_calibrate_engine_destroy(c);
}

int main(void)
{
    shape.family = qc_family_of("llama");
    setenv("QCONV_LIBCUBLAS", QC_FAKE_CUBLAS, 1);
    setenv("QCONV_LIBCUSOLVER", QC_FAKE_CUSOLVER, 1);
    return test_run_all(NULL);
}
