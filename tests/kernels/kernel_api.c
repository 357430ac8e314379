/* The matmul's C API: empty shapes, what preparing leaves, every path from
 * end to end, cuBLAS and its absence, threads. On the CPU shim cuBLAS is a stand-in. */
#include "tests/fixtures/kernel_matmul.h"

#include "kernels/matmul_kernels.h"

#include <pthread.h>

#ifdef QC_CUDA_SHIM
#include "shim_control.h"
#endif

static const qc_form_kind kinds[] = {QC_FORM_NF4, QC_FORM_INT8_ROWS, QC_FORM_INT8_BLOCKS};

/* ---- empty shapes ---------------------------------------------------------------------------- */

TEST(test_empty)
{
    qt_rng rng = qt_rng_start("empty");
    qc_matmul *h = km_handle();
    const uint64_t shapes[][3] = {{0, 5, 64}, {3, 0, 64}, {3, 5, 0}, {70000, 1, 0}, {0, 0, 0}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int form = 0; form < (shapes[i][0] > 3 ? 2 : 6); form++) {
            km_spec spec = {
                .kind = kinds[form % 3], .n = shapes[i][1], .k = shapes[i][2], .block = 64};
            km_job job = {.m = shapes[i][0],
                          .x_dtype = QC_DTYPE_F16,
                          .y_dtype = form < 3 ? QC_DTYPE_F16 : QC_DTYPE_BF16,
                          .bias = form % 2,
                          .ldy = shapes[i][1] + 2};
            km_weight w;
            km_data d;
            km_weight_make(&w, h, &spec, &rng);
            km_data_make(&d, &w, &job, &rng);
            assert_int_equal(qc_matmul_workspace_bytes(h, &w.ready, job.m, QC_MATMUL_AUTO, 0), 0);
            km_run(h, &w, &d);
            for (uint64_t m = 0; m < job.m; m++)
                for (uint64_t n = 0; n < spec.n; n++)
                    assert_int_equal(d.y[m * job.ldy + n], job.bias ? d.bias[n] : 0);
            km_data_free(&d);
            km_weight_free(&w);
        }
    qc_matmul_destroy(h);
}

/* ---- preparing ------------------------------------------------------------------------------- */

TEST(test_exponent)
{
    qt_rng rng = qt_rng_start("exponent");
    qc_matmul *h = km_handle();
    const double scales[] = {0.05, 1.0, 0.0041, 0.0038, 32767.0, 40000.0, 1e-6, 1e9, 1e-38, 1e38};
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i += qt_every(3))
        for (int form = 0; form < 5; form++) {
            km_spec spec = {.kind = form < 3 ? kinds[form] : QC_FORM_NF4,
                            .n = 300,
                            .k = 64,
                            .block = 32,
                            .nested = form == 3,
                            .custom_map = form == 4,
                            .scale = scales[i]};
            km_weight w;
            km_weight_make(&w, h, &spec, &rng);
            uint64_t count = form == 1 ? spec.n : spec.n * spec.k / 32;
            double peak = 0.0, code = form == 4 ? 0.0 : 1.0;
            for (uint64_t b = 0; b < count; b++) {
                const qc_weights *q = &w.host;
                float product = form == 3
                                    ? q->nested_map[q->absmax_codes[b]] * q->nested_absmax[b / 256]
                                    : 0.0f;
                float scale = form == 3 ? product + q->form.offset : q->absmax[b];
                peak = fmax(peak, fabs((double)scale));
            }
            for (int c = 0; form == 4 && c < 16; c++)
                code = fmax(code, fabs((double)w.host.form.code_map[c]));
            peak = (double)(float)(peak * code);
            struct {
                int exponent;
                float inverse, zero, one;
            } got;
            km_read(&got, w.ready.exponent, sizeof got);
            double scaled = ldexp(peak, got.exponent);
            if (peak >= 0x1p-8 && peak < 0x1p15)
                assert_int_equal(got.exponent, 0);
            else if (got.exponent == 126) /* the most there is */
                assert_true(peak < 0x1p-111);
            else
                QT_CHECK(scaled >= 0x1p14 && scaled < 0x1p15, "%g * 2^%d", peak, got.exponent);
            assert_true(got.inverse == ldexpf(1.0f, -got.exponent));
            assert_true(got.zero == 0.0f && got.one == 1.0f);
            km_weight_free(&w);
        }
    qc_matmul_destroy(h);
}

TEST(test_repack)
{
    qt_rng rng = qt_rng_start("repack");
    qc_matmul *h = km_handle();
    const uint64_t widths[] = {1, 2, 31, 33, 63, 64, 65, 100};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i += qt_every(3))
        for (size_t kind = 0; kind < 3; kind++) {
            km_spec spec = {.kind = kinds[kind], .n = 7, .k = widths[i], .block = 32, .shift = 3};
            km_weight w;
            km_weight_make(&w, h, &spec, &rng);
            uint64_t row = (spec.k + 31) / 32 * (kind ? 32 : 16);
            assert_int_equal(w.ready.row_bytes, row);
            uint8_t *got = km_host(spec.n * row);
            const uint8_t *codes = w.host.codes;
            km_read(got, w.ready.w.codes, spec.n * row);
            for (uint64_t n = 0; n < spec.n; n++)
                for (uint64_t k = 0; k < row * (kind ? 1 : 2); k++) {
                    uint64_t f = n * spec.k + k;
                    unsigned want = k >= spec.k ? 0
                                    : kind      ? codes[f]
                                                : codes[f / 2] >> (f % 2 ? 0 : 4) & 15u;
                    unsigned have =
                        kind ? got[n * row + k] : got[n * row + k / 2] >> (k % 2 ? 0 : 4) & 15u;
                    assert_int_equal(have, want);
                }
            free(got);
            km_weight_free(&w);
        }
    qc_matmul_destroy(h);
}

/* BF16 rows as float16 times a power of two: the same numbers down to 2^-31 of the row's largest.
 */
TEST(test_input)
{
    qt_rng rng = qt_rng_start("input");
    enum { M = 9, K = 333, LD = 350, PADDED = 352 };
    for (int bf16 = 0; bf16 < 2; bf16++) {
        uint16_t x[M * LD], out[M * PADDED];
        int exponents[M];
        for (size_t i = 0; i < M * LD; i++) {
            int spread = (int)qt_below(&rng, 40) - 20, row = (int)(i / LD);
            double v = ldexp(qt_uniform(&rng) - 0.5, spread + (row - 4) * 25);
            x[i] = bf16 ? km_bits((float)v, QC_DTYPE_BF16) : (uint16_t)qt_next(&rng);
        }
        if (bf16) {
            for (size_t i = 0; i < LD; i++) { /* zeros; only subnormals; nothing finite */
                x[5 * LD + i] = i % 2 ? 0x8000u : 0;
                x[6 * LD + i] = (uint16_t)(1 + i % 100);
                x[7 * LD + i] = i % 2 ? 0x7f80u : 0xff81u;
            }
            x[8 * LD + 3] = 0x7fc1u;
            x[8 * LD + 4] = 0xff80u;
            x[8 * LD + 5] = 0x7f7fu; /* the largest finite */
        }
        void *base = NULL, *device_out = NULL, *device_exponents = NULL;
        qc_matmul_call c;
        memset(&c, 0, sizeof c);
        c.m = M;
        c.k = K;
        c.ldx = LD;
        c.plan.k_padded = PADDED;
        c.x_dtype = bf16 ? QC_DTYPE_BF16 : QC_DTYPE_F16;
        c.x = km_upload(x, sizeof x, 2, &base);
        KM_OK(qc_cuda_malloc(&device_out, sizeof out, &km_error));
        KM_OK(qc_cuda_malloc(&device_exponents, sizeof exponents, &km_error));
        qc_cuda_stream s = NULL;
        KM_OK(qc_cuda_stream_create(&s, &km_error));
        KM_OK(qc_cuda_fill(device_exponents, 0, sizeof exponents, s, &km_error)); /* F16 has none */
        KM_OK(qc_matmul_input_launch(&c, device_out, device_exponents, s, &km_error));
        km_download(out, device_out, sizeof out, s);
        km_download(exponents, device_exponents, sizeof exponents, s);
        qc_cuda_stream_destroy(s);
        qc_cuda_free(base);
        qc_cuda_free(device_out);
        qc_cuda_free(device_exponents);
        for (int m = 0; m < M; m++) {
            double peak = 0.0, scaled_peak = 0.0;
            for (int k = 0; k < K; k++) {
                double v = (double)qc_f32_from_bf16(x[m * LD + k]);
                peak = isfinite(v) ? fmax(peak, fabs(v)) : peak;
            }
            for (int k = 0; k < PADDED; k++) {
                uint16_t got = out[m * PADDED + k];
                if (k >= K) {
                    assert_int_equal(got, 0);
                    continue;
                }
                if (!bf16) {
                    assert_int_equal(got, x[m * LD + k]);
                    continue;
                }
                double v = (double)qc_f32_from_bf16(x[m * LD + k]);
                double y = (double)qc_f32_from_f16(got);
                if (!isfinite(v)) {
                    assert_true(isnan(v) ? isnan(y) : y == v);
                    continue;
                }
                scaled_peak = fmax(scaled_peak, fabs(y));
                double back = ldexp(y, -exponents[m]);
                if (fabs(v) >= ldexp(peak, -31))
                    QT_CHECK(back == v, "row %d: %.9g became %.9g", m, v, back);
                else
                    assert_true(fabs(back - v) <= ldexp(1.0, -25 - exponents[m]));
            }
            if (bf16)
                assert_true(peak == 0.0 ? exponents[m] == 0
                                        : scaled_peak >= 0x1p14 && scaled_peak < 0x1p15);
        }
    }
}

/* ---- all paths ------------------------------------------------------------------------------- */

static km_rounding rounding_of(const qc_matmul *h, const km_job *job)
{
    int bf16 = (job->path == QC_MATMUL_DEQUANT_GEMM || job->path == QC_MATMUL_AUTO) &&
               qc_matmul_device(h)->sm >= 80 && job->x_dtype == QC_DTYPE_BF16 &&
               job->y_dtype == QC_DTYPE_BF16;
    if (bf16)
        return (km_rounding){0x1p-8, 0.0};
    return (km_rounding){0x1p-11, 0x1p-25};
}

static void check_path(const qc_matmul *h, qc_matmul_path path, qt_rng *rng)
{
    for (int form = 0; form < 24; form += (int)qt_every(5)) {
        km_spec spec = {.kind = kinds[form % 3],
                        .n = form % 4 ? 70 : 195,
                        .k = form % 2 ? 96 : 77,
                        .block = 64,
                        .nested = form % 3 != 1 && form % 5 < 3,
                        .scale = form == 7   ? 2e-4
                                 : form == 8 ? 300.0
                                             : 0};
        km_job job = {.m = form % 5 ? 11 : 33,
                      .ldx = spec.k + (form % 4 == 3 ? 5 : 0),
                      .ldy = spec.n + (form % 4 == 2 ? 3 : 0),
                      .x_dtype = form & 1 ? QC_DTYPE_F16 : QC_DTYPE_BF16,
                      .y_dtype = form & 2 ? QC_DTYPE_F16 : QC_DTYPE_BF16,
                      .bias = form % 3 == 0,
                      .x_shift = form % 7 ? 0 : 1,
                      .path = path,
                      /* DEQUANT_GEMM: 64 rows at a time */
                      .limit_bytes = path == QC_MATMUL_DEQUANT_GEMM ? (4u << 20) + 64 * 1024 : 0};
        km_weight w;
        km_data d;
        km_weight_make(&w, h, &spec, rng);
        km_data_make(&d, &w, &job, rng);
        if (form == 9) /* far beyond what float16 holds */
            for (uint64_t i = 0; i < job.m * job.ldx; i++)
                if (job.x_dtype == QC_DTYPE_BF16)
                    d.x[i] = km_bits(km_float(d.x[i], QC_DTYPE_BF16) * 0x1p40f, QC_DTYPE_BF16);
        km_rounding r = rounding_of(h, &job);
        if (form == 7 || form == 8) /* scaled into float16's normals */
            r.absolute = 0.0;
        km_run(h, &w, &d);
        km_check(&w, &d, r);
        km_data_free(&d);
        km_weight_free(&w);
    }
}

TEST(test_paths)
{
    qt_rng rng = qt_rng_start("paths");
    qc_matmul *h = km_handle();
    if (!qc_matmul_no_gemm(h))
        check_path(h, QC_MATMUL_DEQUANT_GEMM, &rng);
    check_path(h, QC_MATMUL_MMA_884, &rng);
    check_path(h, QC_MATMUL_GEMV, &rng);
    if (qc_matmul_device(h)->sm >= 80)
        check_path(h, QC_MATMUL_MMA_16816, &rng);
    check_path(h, QC_MATMUL_AUTO, &rng);
    qc_matmul_destroy(h);
}

/* Integers are dequantized and multiplied, whatever m; their sums in double too. */
static void check_integers(const qc_matmul *h, const km_spec *spec, const km_job *job, qt_rng *rng)
{
    km_weight w;
    km_data d;
    qc_cuda_stream s = NULL;
    km_weight_make(&w, h, spec, rng);
    km_data_make(&d, &w, job, rng);
    km_run(h, &w, &d);
    km_check(&w, &d, rounding_of(h, job));
    void *base_x = NULL, *y = NULL;
    const uint64_t outputs = job->m * spec->n;
    const qc_matmul_exact e = {.w = &w.device,
                               .n = spec->n,
                               .k = spec->k,
                               .m = job->m,
                               .x = km_upload(d.x, job->m * spec->k * 2, 0, &base_x),
                               .x_dtype = job->x_dtype};
    double *got = km_host(outputs * sizeof *got);
    KM_OK(qc_cuda_malloc(&y, outputs * sizeof *got, &km_error));
    KM_OK(qc_cuda_stream_create(&s, &km_error));
    qc_matmul_exact to = e;
    to.y = y;
    KM_OK(qc_matmul_reference(h, &to, s, &km_error));
    km_download(got, y, outputs * sizeof *got, s);
    for (uint64_t i = 0; i < outputs; i++) {
        double sum = 0.0;
        for (uint64_t k = 0; k < spec->k; k++)
            sum += (double)km_value(&w.host, i % spec->n, k) *
                   (double)km_float(d.x[i / spec->n * spec->k + k], job->x_dtype);
        assert_true(got[i] == sum);
    }
    qc_cuda_stream_destroy(s);
    qc_cuda_free(base_x);
    qc_cuda_free(y);
    free(got);
    km_data_free(&d);
    km_weight_free(&w);
}

TEST(test_integers)
{
    qt_rng rng = qt_rng_start("integers");
    qc_matmul *h = km_handle();
    static const struct {
        qc_form_kind kind;
        uint32_t block;
    } forms[] = {{QC_FORM_W2A16, 64}, {QC_FORM_W2A16, 0}, {QC_FORM_W3A16, 32},  {QC_FORM_W3A16, 0},
                 {QC_FORM_W4A16, 64}, {QC_FORM_W4A16, 0}, {QC_FORM_W5A16, 128}, {QC_FORM_W5A16, 0},
                 {QC_FORM_W6A16, 64}, {QC_FORM_W6A16, 0}, {QC_FORM_W7A16, 32},  {QC_FORM_W7A16, 0},
                 {QC_FORM_W8A16, 32}, {QC_FORM_W8A16, 0}, {QC_FORM_W8A8, 0}};
    if (qc_matmul_no_gemm(h)) {
        qc_matmul_destroy(h);
        skip();
    }
    for (unsigned f = 0; f < sizeof forms / sizeof *forms; f++)
        for (int i = 0; i < 3; i++) {
            const km_spec spec = {.kind = forms[f].kind,
                                  .n = i ? 70 : 195,
                                  .k = i < 2            ? 128
                                       : forms[f].block ? 256
                                                        : 72,
                                  .block = forms[f].block,
                                  .shift = i == 1 ? 8 : 0,
                                  .scale = i == 1   ? 2e-6
                                           : i == 2 ? 300.0
                                                    : 0};
            const km_job job = {.m = i ? 9 : 1,
                                .x_dtype = i ? QC_DTYPE_F16 : QC_DTYPE_BF16,
                                .y_dtype = QC_DTYPE_BF16,
                                .bias = i == 2,
                                .path = f % 2 ? QC_MATMUL_DEQUANT_GEMM : QC_MATMUL_AUTO};
            assert_int_equal(
                256, qc_matmul_prepared_bytes(&(qc_weights){
                         .form = {.ops = qc_form_ops_of(spec.kind), .cols = 40}, .rows = 8}));
            check_integers(h, &spec, &job, &rng);
        }
    km_spec spec = {.kind = QC_FORM_W4A16, .n = 8, .k = 64, .block = 64};
    km_weight w;
    qc_error err = {0};
    km_weight_make(&w, h, &spec, &rng);
    const qc_matmul_io io = {.m = 2,
                             .x = w.device.codes,
                             .y = w.bases[0],
                             .x_dtype = QC_DTYPE_F16,
                             .y_dtype = QC_DTYPE_F16};
    km_expect(qc_matmul_run(h, &w.ready, &io, QC_MATMUL_GEMV, NULL, 0, NULL, &err),
              QC_ERR_UNSUPPORTED, &err, "only path dequant-gemm reads w4a16");
    km_weight_free(&w);
    qc_matmul_destroy(h);
}

#ifdef QC_CUDA_SHIM
TEST(test_other_devices)
{
    const char *const devices[] = {"sm_70:80:2GiB", "sm_75:40:2GiB"};
    for (size_t i = 0; i < 2; i++) {
        qc_shim_set_devices(devices[i]);
        test_paths(state);
    }
    qc_shim_set_devices("sm_90:132:4GiB");
}

TEST(test_no_cublas)
{
    qt_rng rng = qt_rng_start("no_cublas");
    char *real = strdup(getenv("QCONV_LIBCUBLAS"));
    qc_error err = {0};
    setenv("QCONV_LIBCUBLAS", "libm.so.6", 1);
    qc_matmul *h = km_handle();
    assert_string_equal(qc_matmul_no_gemm(h), "libm.so.6 is too old: it has no cublasCreate_v2");
    qc_matmul_destroy(h);
    setenv("QCONV_LIBCUBLAS", "/nowhere/libcublas.so", 1);
    h = km_handle();
    assert_string_equal(qc_matmul_no_gemm(h),
                        "cuBLAS cannot be loaded: /nowhere/libcublas.so could not be opened");
    qc_matmul_io io = {.m = 1, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16};
    km_expect(qc_matmul_dense(h, NULL, 1, 1, &io, NULL, 0, NULL, &err), QC_ERR_UNSUPPORTED, &err,
              "could not be opened");
    km_spec spec = {.kind = QC_FORM_NF4, .n = 8, .k = 64, .block = 64};
    km_weight w;
    km_weight_make(&w, h, &spec, &rng);
    assert_true(UINT64_MAX == qc_matmul_workspace_bytes(h, &w.ready, 9, QC_MATMUL_DEQUANT_GEMM, 0));
    const km_spec integers = {.kind = QC_FORM_W8A8, .n = 8, .k = 64};
    km_weight v;
    km_weight_make(&v, h, &integers, &rng);
    assert_true(UINT64_MAX == qc_matmul_workspace_bytes(h, &v.ready, 9, QC_MATMUL_AUTO, 0));
    km_weight_free(&v);
    unsigned char *memory = NULL;
    KM_OK(qc_cuda_malloc((void **)&memory, 4096, &km_error));
    io = (qc_matmul_io){
        .m = 2, .x = memory, .x_dtype = QC_DTYPE_F16, .y = memory + 1024, .y_dtype = QC_DTYPE_F16};
    km_expect_run(h, &w.ready, &io, QC_MATMUL_DEQUANT_GEMM, NULL, 0, "needs cuBLAS");
    qc_cuda_free(memory);
    /* Any M goes through the tensor cores then. */
    km_job job = {.m = 700, .x_dtype = QC_DTYPE_BF16, .y_dtype = QC_DTYPE_BF16};
    km_data d;
    km_data_make(&d, &w, &job, &rng);
    km_run(h, &w, &d);
    km_check(&w, &d, rounding_of(h, &job));
    km_data_free(&d);
    km_weight_free(&w);
    qc_matmul_destroy(h);
    setenv("QCONV_LIBCUBLAS", real, 1);
    free(real);
}
#endif

/* ---- dense and reference --------------------------------------------------------------------- */

TEST(test_dense)
{
    enum { M = 5, N = 37, K = 50, LDX = 53, LDY = 41 };
    qt_rng rng = qt_rng_start("dense");
    qc_matmul *h = km_handle();
    qc_error err = {0};
    if (qc_matmul_no_gemm(h)) {
        print_message("skipped: %s\n", qc_matmul_no_gemm(h));
        qc_matmul_destroy(h);
        return;
    }
    for (int bf16 = 0; bf16 < 2; bf16++) {
        qc_dtype t = bf16 ? QC_DTYPE_BF16 : QC_DTYPE_F16;
        uint16_t x[M * LDX], w[N * K], y[M * LDY];
        void *bx = NULL, *bw = NULL, *by = NULL;
        for (size_t i = 0; i < M * LDX; i++)
            x[i] = km_bits((float)(qt_uniform(&rng) - 0.5), t);
        for (size_t i = 0; i < N * K; i++)
            w[i] = km_bits((float)(qt_uniform(&rng) - 0.5), t);
        memset(y, 0x5a, sizeof y);
        qc_matmul_io io = {.m = M,
                           .x = km_upload(x, sizeof x, 0, &bx),
                           .x_dtype = t,
                           .ldx = LDX,
                           .y = km_upload(y, sizeof y, 0, &by),
                           .y_dtype = t,
                           .ldy = LDY};
        void *dw = km_upload(w, sizeof w, 0, &bw), *memory = NULL;
        uint64_t bytes = bf16 ? 0 : QC_MATMUL_DENSE_WORKSPACE;
        qc_cuda_stream s = NULL;
        KM_OK(qc_cuda_stream_create(&s, &km_error));
        KM_OK(qc_cuda_malloc(&memory, bytes, &km_error));
        if (bf16 && qc_matmul_device(h)->sm < 80) {
            km_expect(qc_matmul_dense(h, dw, N, K, &io, memory, bytes, s, &err), QC_ERR_UNSUPPORTED,
                      &err, "sm_80");
        } else {
            KM_OK(qc_matmul_dense(h, dw, N, K, &io, memory, bytes, s, &km_error));
            km_download(y, io.y, sizeof y, s);
            for (size_t m = 0; m < M; m++)
                for (size_t n = 0; n < LDY; n++) {
                    double sum = 0.0;
                    for (size_t k = 0; n < N && k < K; k++)
                        sum +=
                            (double)km_float(x[m * LDX + k], t) * (double)km_float(w[n * K + k], t);
                    double got = (double)km_float(y[m * LDY + n], t);
                    if (n >= N)
                        assert_int_equal(y[m * LDY + n], 0x5a5a);
                    else
                        assert_true(fabs(got - sum) <= fabs(sum) * 0x1p-8 + 1e-4);
                }
            /* K 0: zeros. */
            KM_OK(qc_matmul_dense(h, dw, N, 0, &io, memory, bytes, s, &km_error));
            km_download(y, io.y, sizeof y, s);
            assert_int_equal(y[LDY + N - 1], 0);
            io.m = 0;
            KM_OK(qc_matmul_dense(h, dw, N, K, &io, memory, bytes, s, &km_error));
            io.m = M;
            km_expect(qc_matmul_dense(h, NULL, N, K, &io, memory, bytes, s, &err), QC_ERR_USAGE,
                      &err, "NULL");
            km_expect(qc_matmul_dense(h, dw, N, K, &io, (unsigned char *)dw + 8, 8, s, &err),
                      QC_ERR_USAGE, &err, "not 256-byte aligned");
            io.bias = dw;
            km_expect(qc_matmul_dense(h, dw, N, K, &io, memory, bytes, s, &err), QC_ERR_USAGE, &err,
                      "bias");
            io.bias = NULL;
            io.y_dtype = bf16 ? QC_DTYPE_F16 : QC_DTYPE_BF16;
            km_expect(qc_matmul_dense(h, dw, N, K, &io, memory, bytes, s, &err), QC_ERR_USAGE, &err,
                      "one dtype");
        }
        qc_cuda_stream_destroy(s);
        qc_cuda_free(memory);
        qc_cuda_free(bx);
        qc_cuda_free(bw);
        qc_cuda_free(by);
    }
    qc_matmul_destroy(h);
}

static void expect_reference(const qc_matmul *h, const km_weight *w, const void *dense,
                             qc_dtype dense_dtype, const float *values, uint64_t n, uint64_t k,
                             qt_rng *rng)
{
    enum { M = 3 };
    uint16_t *x = km_host(M * k * 2);
    double *y = km_host(M * n * sizeof *y);
    void *base = NULL, *device_y = NULL;
    qc_dtype t = qt_next(rng) % 2 ? QC_DTYPE_F16 : QC_DTYPE_BF16;
    for (uint64_t i = 0; i < M * k; i++)
        x[i] = km_bits((float)(qt_uniform(rng) - 0.5), t);
    const void *device_x = km_upload(x, M * k * 2, 0, &base);
    KM_OK(qc_cuda_malloc(&device_y, M * n * sizeof *y, &km_error));
    qc_cuda_stream s = NULL;
    KM_OK(qc_cuda_stream_create(&s, &km_error));
    const qc_matmul_exact exact = {.w = w ? &w->device : NULL,
                                   .dense = dense,
                                   .dense_dtype = dense_dtype,
                                   .n = n,
                                   .k = k,
                                   .m = M,
                                   .x = device_x,
                                   .x_dtype = t,
                                   .y = device_y};
    KM_OK(qc_matmul_reference(h, &exact, s, &km_error));
    km_download(y, device_y, M * n * sizeof *y, s);
    qc_cuda_stream_destroy(s);
    for (uint64_t m = 0; m < M; m++)
        for (uint64_t i = 0; i < n; i++) {
            double sum = 0.0;
            for (uint64_t j = 0; j < k; j++)
                sum += (double)values[i * k + j] * (double)km_float(x[m * k + j], t);
            assert_true(y[m * n + i] == sum);
        }
    qc_cuda_free(base);
    qc_cuda_free(device_y);
    free(x);
    free(y);
}

/* Bit for bit: products are exact, sums in one order. */
TEST(test_reference)
{
    qt_rng rng = qt_rng_start("reference");
    qc_matmul *h = km_handle();
    qc_error err = {0};
    for (int form = 0; form < 7; form++) {
        km_spec spec = {.kind = kinds[form % 3],
                        .n = 13,
                        .k = 75,
                        .block = 32,
                        .nested = form > 3 && form % 3 != 1,
                        .custom_map = form == 3};
        km_weight w;
        km_weight_make(&w, h, &spec, &rng);
        float *values = km_host(spec.n * spec.k * sizeof *values);
        for (uint64_t i = 0; i < spec.n * spec.k; i++)
            values[i] = km_value(&w.host, i / spec.k, i % spec.k);
        expect_reference(h, &w, NULL, QC_DTYPE_F32, values, spec.n, spec.k, &rng);
        if (form == 0) {
            double y;
            void *base = NULL, *dense = km_upload(values, spec.n * spec.k * 4, 0, &base);
            expect_reference(h, NULL, dense, QC_DTYPE_F32, values, spec.n, spec.k, &rng);
            qc_cuda_free(base);
            for (int bf16 = 0; bf16 < 2; bf16++) {
                qc_dtype t = bf16 ? QC_DTYPE_BF16 : QC_DTYPE_F16;
                uint16_t *half = km_host(spec.n * spec.k * 2);
                for (uint64_t i = 0; i < spec.n * spec.k; i++) {
                    half[i] = km_bits(values[i], t);
                    values[i] = km_float(half[i], t);
                }
                dense = km_upload(half, spec.n * spec.k * 2, 0, &base);
                expect_reference(h, NULL, dense, t, values, spec.n, spec.k, &rng);
                qc_cuda_free(base);
                free(half);
            }
            qc_matmul_exact e = {&w.device, NULL, QC_DTYPE_F32, 13, 74, 1, &y, QC_DTYPE_F16, &y};
            km_expect(qc_matmul_reference(h, &e, NULL, &err), QC_ERR_USAGE, &err,
                      "the weight is 13 x 75, but a product with 13 x 74 was asked for");
            e.k = 75, e.m = 0, e.x = NULL, e.y = NULL;
            KM_OK(qc_matmul_reference(h, &e, NULL, &km_error));
            e = (qc_matmul_exact){NULL, &y, QC_DTYPE_F64, 1, 1, 1, &y, QC_DTYPE_F16, &y};
            km_expect(qc_matmul_reference(h, &e, NULL, &err), QC_ERR_USAGE, &err,
                      "dense weights are F64");
            e.dense = NULL, e.dense_dtype = QC_DTYPE_F32;
            km_expect(qc_matmul_reference(h, &e, NULL, &err), QC_ERR_USAGE, &err,
                      "weights are NULL");
        }
        free(values);
        km_weight_free(&w);
    }
    qc_matmul_destroy(h);
}

#ifdef QC_CUDA_SHIM
/* Thread blocks that go round, as a device's do with more rows than a grid has. */
TEST(test_grid_steps)
{
    qc_shim_set_grid(1);
    test_repack(state);
    test_input(state);
    test_paths(state);
    test_reference(state);
    qc_shim_set_grid(0);
}
#endif

/* ---- threads --------------------------------------------------------------------------------- */

typedef struct {
    const qc_matmul *h;
    const km_weight *w;
    km_data data;
    uint16_t *want;
    int wrong;
} thread_work;

static void *work(void *arg)
{
    thread_work *t = arg;
    qc_error err = {0};
    if (qc_cuda_use(qc_matmul_device(t->h), &err) != QC_OK)
        return NULL;
    for (int i = 0; i < 3; i++) {
        km_run(t->h, t->w, &t->data);
        t->wrong += memcmp(t->data.y, t->want, t->data.job.m * t->data.n * 2) != 0;
    }
    return NULL;
}

/* One handle and one weight, two threads with streams and workspaces of their own. */
TEST(test_threads)
{
    qt_rng rng = qt_rng_start("threads");
    qc_matmul *h = km_handle();
    km_spec spec = {.kind = QC_FORM_INT8_BLOCKS, .n = 70, .k = 160, .block = 32, .nested = 1};
    km_weight w;
    km_weight_make(&w, h, &spec, &rng);
    for (int path = QC_MATMUL_GEMV; path <= QC_MATMUL_DEQUANT_GEMM; path++) {
        if ((path == QC_MATMUL_DEQUANT_GEMM && qc_matmul_no_gemm(h)) ||
            (path == QC_MATMUL_MMA_16816 && qc_matmul_device(h)->sm < 80))
            continue;
        thread_work works[2];
        pthread_t threads[2];
        for (int i = 0; i < 2; i++) {
            km_job job = {.m = 10,
                          .x_dtype = QC_DTYPE_F16,
                          .y_dtype = QC_DTYPE_BF16,
                          .path = (qc_matmul_path)path};
            works[i] = (thread_work){.h = h, .w = &w};
            km_data_make(&works[i].data, &w, &job, &rng);
            km_run(h, &w, &works[i].data);
            works[i].want = km_host(job.m * spec.n * 2);
            memcpy(works[i].want, works[i].data.y, job.m * spec.n * 2);
        }
        for (int i = 0; i < 2; i++)
            assert_int_equal(pthread_create(&threads[i], NULL, work, &works[i]), 0);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(pthread_join(threads[i], NULL), 0);
            assert_int_equal(works[i].wrong, 0);
            free(works[i].want);
            km_data_free(&works[i].data);
        }
    }
    km_weight_free(&w);
    qc_matmul_destroy(h);
}

int main(void)
{
    int skip = km_no_device();
    return skip ? skip : test_run_all(NULL);
}
