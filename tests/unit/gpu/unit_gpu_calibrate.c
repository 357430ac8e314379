/* The engine of convert/gpu/gpu_calibrate.c, on kernels on the CPU shim: weights that are as good
 * as those of the CPU's engine, dense and quantized, with one side and with both; and what is an
 * error. */
#include "base/alloc.h"
#include "convert/gpu/gpu_table.h"
#include "tests/fixtures/feedback_testing.h"

#include <shim_control.h>

#define ROWS   24u
#define COLS   40u
#define TOKENS 160u

static qt_rng rng = {5};
static qc_devices devices = {.gpu_count = 1};
static qc_calibrator calibrator = {.devices = &devices, .threads = 1};
static const qc_feedback_options options = {0.1, 2};

static qc_calibrate_engine *new_engine(const qc_calibrate_engine_ops *ops)
{
    qc_calibrate_engine *e = NULL;
    qc_error err = {0};
    assert_int_equal(qc_cuda_device_open(&devices.gpus[0], 0, &err), QC_OK);
    calibrator.ops = qc_quant_ops_for(QC_ISA_SCALAR);
    calibrator.blas = blas;
    assert_int_equal(qc_calibrate_engine_create(&e, ops, &calibrator, &err), QC_OK);
    return e;
}

/* An engine on the GPU whose device is open, as measuring leaves it. */
static qc_calibrate_engine *new_gpu(void)
{
    qc_calibrate_engine *e = new_engine(qc_gpu_calibrating_table.ops);
    qc_calibrate_speed speed;
    qc_error err = {0};
    QT_CHECK(e->ops->measure(e, &speed, &err) == QC_OK, "%s", err.msg);
    assert_true(speed.single > 0 && speed.dual > 0);
    return e;
}

static double *copy_of(const double *v, size_t n)
{
    void *out = NULL;
    qc_error err = {0};
    assert_int_equal(qc_malloc(&out, n * sizeof *v, &err), QC_OK);
    memcpy(out, v, n * sizeof *v);
    return out;
}

static qc_feedback_result weight_of(qc_calibrate_engine *e, const data *d, int cross,
                                    const float *w, const qc_feedback_outputs *g)
{
    const qc_form form = {.ops = &qc_form_nf4, .block_elems = 32, .cols = COLS};
    unsigned char codes[ROWS * COLS];
    float absmax[ROWS * COLS / 32];
    qc_feedback_out out = {.codes = codes, .absmax = absmax};
    qc_feedback_result result = {0};
    qc_feedback_info info;
    qc_error err = {0};
    double *h = copy_of(d->h, COLS * COLS), *c = cross ? copy_of(d->c, COLS * COLS) : NULL;
    QT_CHECK(e->ops->take(e, COLS, h, c, &err) == QC_OK, "%s", err.msg);
    QT_CHECK(e->ops->factor(e, &options, &info, &err) == QC_OK, "%s", err.msg);
    QT_CHECK(e->ops->weight(e, &form, w, ROWS, g, &out, &result, &err) == QC_OK, "%s", err.msg);
    e->ops->drop(e);
    return result;
}

static void check_near(double got, double want, double slack, const char *what)
{
    QT_CHECK(fabs(got - want) <= slack * fabs(want), "%s: %g, not %g", what, got, want);
}

TEST(test_weights)
{
    qc_calibrate_engine *cpu = new_engine(&qc_calibrate_cpu_ops), *gpu = new_gpu();
    data d = make_data(&rng, COLS, TOKENS, 0);
    float *values = make_weight(&rng, ROWS, COLS);
    float g[ROWS * ROWS];
    for (unsigned i = 0; i < ROWS * ROWS; i++)
        g[i] = i % (ROWS + 1) ? 0.5f : 1.0f + (float)(i % 5);
    const qc_feedback_outputs outputs = {.g = g, .block = ROWS, .damping = 0.1};
    for (unsigned i = 0; i < 4; i++) {
        const int cross = i & 1, both = i >> 1 & 1;
        const qc_feedback_result want = weight_of(cpu, &d, cross, values, both ? &outputs : NULL);
        const qc_feedback_result got = weight_of(gpu, &d, cross, values, both ? &outputs : NULL);
        check_near(got.rounded, want.rounded, 1e-3, "rounded");
        check_near(got.calibrated, want.calibrated, 0.04, "calibrated");
        check_near(got.calibrated_two_sided, want.calibrated_two_sided, 0.04, "two-sided");
        QT_CHECK(both || got.calibrated < got.rounded, "%g is worse than %g", got.calibrated,
                 got.rounded);
    }
    qc_calibrate_engine_destroy(cpu);
    qc_calibrate_engine_destroy(gpu);
    free_data(&d);
    free(values);
}

TEST(test_errors)
{
    qc_calibrate_engine *e = new_engine(qc_gpu_calibrating_table.ops);
    const qc_form form = {.ops = &qc_form_nf4, .block_elems = 32, .cols = 2};
    static const double values[4] = {1, 2, 3, 4};
    qc_calibrate_speed speed;
    qc_error err = {0};
    const char *name = NULL;
    SCOPED(qc_arena) arena = {0};
    assert_int_equal(setenv("QCONV_LIBCUBLAS", "/nowhere/libcublas.so", 1), 0);
    assert_int_equal(qc_gpu_calibrating_table.name(&name, &arena, &devices.gpus[0], &err),
                     QC_ERR_DEVICE);
    assert_null(name);
    assert_int_equal(e->ops->measure(e, &speed, &err), QC_ERR_DEVICE);
    assert_int_equal(setenv("QCONV_LIBCUBLAS", QC_FAKE_CUBLAS, 1), 0);
    assert_int_equal(qc_gpu_calibrating_table.name(&name, &arena, &devices.gpus[0], &err), QC_OK);
    assert_non_null(strstr(name, "cuSOLVER"));
    assert_int_equal(e->ops->measure(e, &speed, &err), QC_OK);
    assert_int_equal(e->ops->factor(e, &options, NULL, &err), QC_ERR_USAGE);
    assert_int_equal(e->ops->weight(e, &form, NULL, 1, NULL, NULL, NULL, &err), QC_ERR_USAGE);
    assert_int_equal(e->ops->take(e, 0, NULL, NULL, &err), QC_ERR_USAGE);
    const size_t before = qc_shim_allocations(NULL);
    for (unsigned n = 1; n < 3; n++) {
        qc_shim_fail_malloc(n);
        assert_int_equal(e->ops->take(e, 2, copy_of(values, 4), copy_of(values, 4), &err),
                         QC_ERR_NOMEM);
        qc_shim_fail_malloc(0);
        assert_non_null(strstr(err.msg, "--device cpu calibrates without one"));
    }
    qc_calibrate_engine_destroy(e);
    assert_true(qc_shim_allocations(NULL) <= before);
}

int main(void)
{
    qc_error err = {0};
    setenv("QCONV_LIBCUBLAS", QC_FAKE_CUBLAS, 1);
    setenv("QCONV_LIBCUSOLVER", QC_FAKE_CUSOLVER, 1);
    if (qc_blas_open(&blas, &err) != QC_OK) {
        print_message("skipped: %s\n", err.msg);
        return 77;
    }
    return test_run_all(NULL);
}
