/* A decoder's layers and head through convert/gpu/gpu_llama.c, on kernels on the CPU shim, against
 * the same in double: dense weights of every type and quantized ones, with cuBLAS and without,
 * biases, head norms, sliding windows, windows that do not fit one chunk; and what happens where
 * memory is short. */
#include "convert/forward/forward.h"
#include "convert/gpu/gpu_table.h"
#include "quant/matmul_ops.h"
#include "tests/fixtures/quant_testing.h"

#include <string.h>

#include <shim_control.h>

#define HIDDEN       40u
#define INTERMEDIATE 72u
#define HEADS        2u
#define KV_HEADS     1u
#define HEAD_DIM     16u
#define LONGEST      36u
#define Q_COLS       (HEADS * HEAD_DIM)
#define KV_COLS      (KV_HEADS * HEAD_DIM)

typedef enum { DENSE_F32, DENSE_F16, DENSE_BF16, NF4_NESTED, INT8_ROWS, INT4, KINDS } weight_kind;

/* A weight in its kind, and what it is worth. */
typedef struct {
    qc_forward_matrix m;
    qc_weights w;
    void *arrays[4];
    float *values; /* [rows, cols] */
    float *bias;
} weight;

typedef struct {
    weight matrix[7]; /* q, k, v, o, gate, up, down */
    float *input_norm, *attention_norm, *q_norm, *k_norm;
    uint64_t window;
} layer;

static qt_rng rng = {11};

static float *random_floats(size_t n, double mean, double spread)
{
    float *v = qt_alloc(n, sizeof *v);
    for (size_t i = 0; i < n; i++)
        v[i] = (float)(mean + spread * (double)qt_randn(&rng));
    return v;
}

static void quantize(weight *out, weight_kind kind, const float *src, uint64_t rows, uint64_t cols)
{
    const qc_quant_ops *ops = qc_quant_ops_for(QC_ISA_SCALAR);
    uint64_t n = rows * cols, blocks = (n + 63) / 64;
    qc_piece_sums sums;
    out->w = (qc_weights){.rows = rows, .form.cols = cols};
    if (kind == INT8_ROWS) {
        int8_t *codes = out->arrays[0] = qt_alloc(n, 1);
        float *scb = out->arrays[1] = qt_alloc(rows, sizeof *scb);
        ops->int8_rows_quantize(src, QC_DTYPE_F32, rows, cols, codes, scb, &sums);
        out->w.form.ops = &qc_form_int8_rows;
        out->w.codes = codes;
        out->w.absmax = scb;
    } else if (kind == INT4) {
        out->w.form.ops = &qc_form_w4a16;
        out->w.form.block_elems = 32;
        out->w.form.scale_dtype = QC_DTYPE_BF16;
        const qc_form_out to = {.codes = out->arrays[0] = qt_alloc(n / 2, 1),
                                .absmax = out->arrays[1] = qt_alloc(n / 32, sizeof(float))};
        out->w.form.ops->quantize(ops, &out->w.form, src, QC_DTYPE_F32, n, &to, &sums);
        out->w.codes = to.codes;
        out->w.absmax = to.absmax;
    } else {
        uint8_t *codes = out->arrays[0] = qt_alloc((n + 1) / 2, 1);
        float *absmax = qt_alloc(blocks, sizeof *absmax);
        uint8_t *absmax_codes = out->arrays[1] = qt_alloc(blocks, 1);
        float *nested = out->arrays[2] = qt_alloc((blocks + 255) / 256, sizeof *nested);
        ops->nf4_quantize(src, QC_DTYPE_F32, n, 64, codes, absmax, NULL, &sums);
        float offset = 0x1p-5f;
        ops->nested_quantize(absmax, blocks, offset, absmax_codes, nested);
        free(absmax);
        out->w.form.ops = &qc_form_nf4;
        out->w.form.block_elems = 64;
        out->w.codes = codes;
        out->w.absmax_codes = absmax_codes;
        out->w.nested_absmax = nested;
        out->w.nested_map = qc_dynamic_map;
        out->w.form.offset = offset;
        out->w.nested_block = 256;
    }
    for (uint64_t r = 0; r < rows; r++)
        qc_weights_row(ops, &out->w, r, out->values + r * cols);
    out->m.quantized = &out->w;
}

static void make_weight(weight *out, weight_kind kind, uint64_t rows, uint64_t cols, int with_bias)
{
    uint64_t n = rows * cols;
    float *src = random_floats(n, 0.0, 1.0 / sqrt((double)cols));
    memset(out, 0, sizeof *out);
    out->values = qt_alloc(n, sizeof *out->values);
    out->m = (qc_forward_matrix){.rows = rows, .cols = cols};
    if (kind >= NF4_NESTED) {
        quantize(out, kind, src, rows, cols);
    } else {
        static const qc_dtype types[] = {QC_DTYPE_F32, QC_DTYPE_F16, QC_DTYPE_BF16};
        out->arrays[0] = qt_alloc(n, qt_size(types[kind]));
        for (uint64_t i = 0; i < n; i++) {
            qt_put(out->arrays[0], types[kind], i, (double)src[i]);
            out->values[i] = (float)qt_get(out->arrays[0], types[kind], i);
        }
        out->m.dense = out->arrays[0];
        out->m.dtype = types[kind];
    }
    if (with_bias)
        out->m.bias = out->bias = random_floats(rows, 0.0, 0.2);
    free(src);
}

static void free_weight(weight *w)
{
    for (unsigned i = 0; i < 4; i++)
        free(w->arrays[i]);
    free(w->values);
    free(w->bias);
}

static void make_layer(layer *out, weight_kind kind, int extras)
{
    static const uint64_t shapes[7][2] = {
        {Q_COLS, HIDDEN},       {KV_COLS, HIDDEN},      {KV_COLS, HIDDEN},     {HIDDEN, Q_COLS},
        {INTERMEDIATE, HIDDEN}, {INTERMEDIATE, HIDDEN}, {HIDDEN, INTERMEDIATE}};
    for (unsigned i = 0; i < 7; i++)
        make_weight(&out->matrix[i], kind, shapes[i][0], shapes[i][1], extras);
    out->input_norm = random_floats(HIDDEN, 1.0, 0.2);
    out->attention_norm = random_floats(HIDDEN, 1.0, 0.2);
    out->q_norm = extras ? random_floats(HEAD_DIM, 1.0, 0.2) : NULL;
    out->k_norm = extras ? random_floats(HEAD_DIM, 1.0, 0.2) : NULL;
    out->window = extras ? 9 : 0;
}

static void free_layer(layer *l)
{
    for (unsigned i = 0; i < 7; i++)
        free_weight(&l->matrix[i]);
    free(l->input_norm);
    free(l->attention_norm);
    free(l->q_norm);
    free(l->k_norm);
}

static qc_forward_weights on_gpu(const layer *l)
{
    qc_forward_weights w = {.vectors = {[QC_LAYER_INPUT_NORM] = l->input_norm,
                                        [QC_LAYER_POST_NORM] = l->attention_norm,
                                        [QC_LAYER_Q_NORM] = l->q_norm,
                                        [QC_LAYER_K_NORM] = l->k_norm}};
    for (unsigned i = 0; i < QC_LAYER_MATRICES; i++)
        w.matrices[i] = l->matrix[i].m;
    return w;
}

/* ---- the same in double ---- */

static float cosine[LONGEST * HEAD_DIM / 2], sine[LONGEST * HEAD_DIM / 2];

static void normed(const double *x, const float *gain, size_t n, double eps, double *out)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    for (size_t i = 0; i < n; i++)
        out[i] = x[i] / sqrt(sum / (double)n + eps) * (double)gain[i];
}

static void product(const weight *w, const double *x, double *y)
{
    for (uint64_t r = 0; r < w->m.rows; r++) {
        y[r] = w->bias ? (double)w->bias[r] : 0.0;
        for (uint64_t c = 0; c < w->m.cols; c++)
            y[r] += (double)w->values[r * w->m.cols + c] * x[c];
    }
}

static void finish_heads(double *v, size_t heads, const float *norm, double eps, size_t position)
{
    for (size_t h = 0; h < heads; h++, v += HEAD_DIM) {
        if (norm)
            normed(v, norm, HEAD_DIM, eps, v);
        for (size_t d = 0; d < HEAD_DIM / 2; d++) {
            double c = (double)cosine[position * (HEAD_DIM / 2) + d];
            double s = (double)sine[position * (HEAD_DIM / 2) + d];
            double low = v[d], high = v[d + HEAD_DIM / 2];
            v[d] = low * c - high * s;
            v[d + HEAD_DIM / 2] = high * c + low * s;
        }
    }
}

static void attend(const double *q, const double *k, const double *v, size_t row, size_t from,
                   double *out)
{
    double score[LONGEST];
    for (size_t h = 0; h < HEADS; h++) {
        size_t kv = h / (HEADS / KV_HEADS) * HEAD_DIM;
        double total = 0, *to = out + h * HEAD_DIM;
        for (size_t j = from; j <= row; j++) {
            double sum = 0;
            for (size_t d = 0; d < HEAD_DIM; d++)
                sum += q[h * HEAD_DIM + d] * k[j * KV_COLS + kv + d];
            score[j] = exp(sum / sqrt((double)HEAD_DIM));
            total += score[j];
        }
        for (size_t d = 0; d < HEAD_DIM; d++) {
            to[d] = 0;
            for (size_t j = from; j <= row; j++)
                to[d] += score[j] / total * v[j * KV_COLS + kv + d];
        }
    }
}

static void layer_in_double(const layer *l, double *hidden, size_t rows, double eps)
{
    static double k[LONGEST * KV_COLS], v[LONGEST * KV_COLS];
    double x[INTERMEDIATE], q[Q_COLS], attended[Q_COLS], gate[INTERMEDIATE], up[INTERMEDIATE];
    for (size_t r = 0; r < rows; r++) {
        double *h = hidden + r * HIDDEN;
        normed(h, l->input_norm, HIDDEN, eps, x);
        product(&l->matrix[0], x, q);
        product(&l->matrix[1], x, k + r * KV_COLS);
        product(&l->matrix[2], x, v + r * KV_COLS);
        finish_heads(q, HEADS, l->q_norm, eps, r);
        finish_heads(k + r * KV_COLS, KV_HEADS, l->k_norm, eps, r);
        attend(q, k, v, r, l->window && r >= l->window ? r - l->window + 1 : 0, attended);
        product(&l->matrix[3], attended, x);
        for (size_t i = 0; i < HIDDEN; i++)
            h[i] += x[i];
        normed(h, l->attention_norm, HIDDEN, eps, x);
        product(&l->matrix[4], x, gate);
        product(&l->matrix[5], x, up);
        for (size_t i = 0; i < INTERMEDIATE; i++)
            gate[i] *= up[i] / (1.0 + exp(-gate[i]));
        product(&l->matrix[6], gate, x);
        for (size_t i = 0; i < HIDDEN; i++)
            h[i] += x[i];
    }
}

/* ---- tests ---- */

static const float eps = 1e-5f;

static const qc_forward_shape shape = {.config = {.hidden = HIDDEN,
                                                  .intermediate = INTERMEDIATE,
                                                  .heads = HEADS,
                                                  .kv_heads = KV_HEADS,
                                                  .head_dim = HEAD_DIM,
                                                  .norm_eps = 1e-5},
                                       .rope = {.theta = 10000.0, .factor = 1.0, .magnitude = 1.0}};

static qc_gpu_decoder *new_decoder(qc_error *err, qc_status expected)
{
    const qc_gpu_work *work = qc_gpu_table();
    qc_cuda_device device;
    qc_gpu_decoder *d = NULL;
    assert_int_equal(work->device_open(&device, 0, err), QC_OK);
    assert_int_equal(work->llama->create(&d, &device, &shape, LONGEST, err), expected);
    return d;
}

/* Largest difference, relative to the root mean square of all. */
static double difference(const float *got, const double *want, size_t n)
{
    double most = 0, squares = 0;
    for (size_t i = 0; i < n; i++) {
        double e = fabs((double)got[i] - want[i]);
        most = e > most || e != e ? e : most;
        squares += want[i] * want[i];
    }
    return most / sqrt(squares / (double)n);
}

static void check_layers(weight_kind kind, int extras, const uint64_t *lengths, size_t windows)
{
    const qc_gpu_work *work = qc_gpu_table();
    qc_error err = {0};
    layer l[2];
    uint64_t rows = 0;
    for (size_t i = 0; i < windows; i++)
        rows += lengths[i];
    make_layer(&l[0], kind, extras);
    make_layer(&l[1], kind, extras);
    float *hidden = random_floats(rows * HIDDEN, 0.0, 1.0);
    double *want = qt_alloc(rows * HIDDEN, sizeof *want);
    for (size_t i = 0; i < rows * HIDDEN; i += 97) /* what float16 could not hold */
        hidden[i] *= i % 2 ? 3e5f : 1.0f;
    for (size_t i = 0; i < rows * HIDDEN; i++)
        want[i] = (double)hidden[i];
    qc_gpu_decoder *d = new_decoder(&err, QC_OK);
    for (int i = 0; i < 2; i++) {
        qc_forward_weights g = on_gpu(&l[i]);
        QT_CHECK(work->llama->layer(d, &g, l[i].window, hidden, lengths, windows, &err) == QC_OK,
                 "%s", err.msg);
        double *at = want;
        for (size_t w = 0; w < windows; at += lengths[w++] * HIDDEN)
            layer_in_double(&l[i], at, lengths[w], (double)eps);
    }
    double e = difference(hidden, want, rows * HIDDEN);
    QT_CHECK(e < 4e-3, "kind %d extras %d: off by %g", (int)kind, extras, e);
    work->llama->destroy(d);
    free(hidden);
    free(want);
    free_layer(&l[0]);
    free_layer(&l[1]);
}

static void check_kinds(unsigned step)
{
    static const uint64_t lengths[] = {1, 17, LONGEST};
    for (unsigned i = 0; i < 2 * KINDS; i += step)
        check_layers((weight_kind)(i / 2), (int)(i % 2), lengths, 3);
}

TEST(test_layers)
{
    assert_int_equal(setenv("QCONV_LIBCUBLAS", QC_FAKE_CUBLAS, 1), 0);
    check_kinds(1);
}

TEST(test_layers_without_cublas)
{
    assert_int_equal(setenv("QCONV_LIBCUBLAS", "/nowhere/libcublas.so", 1), 0);
    check_kinds(3);
    assert_int_equal(setenv("QCONV_LIBCUBLAS", QC_FAKE_CUBLAS, 1), 0);
}

/* More tokens than a device takes at once that has little memory. */
TEST(test_chunks)
{
    uint64_t lengths[36];
    for (size_t i = 0; i < 36; i++)
        lengths[i] = LONGEST - i % 7;
    assert_int_equal(setenv("QCONV_LIBCUBLAS", "/nowhere/libcublas.so", 1), 0);
    qc_shim_set_devices("sm_90:4:2MiB"); /* 1024 tokens; with twice as many the layer has no room */
    check_layers(DENSE_F16, 0, lengths, 36);
    qc_shim_set_devices("sm_90:132:4GiB");
    assert_int_equal(setenv("QCONV_LIBCUBLAS", QC_FAKE_CUBLAS, 1), 0);
}

static void check_head(weight_kind kind, uint64_t vocabulary, uint64_t n)
{
    const qc_gpu_work *work = qc_gpu_table();
    qc_error err = {0};
    weight head;
    make_weight(&head, kind, vocabulary, HIDDEN, 0);
    float *hidden = random_floats(n * HIDDEN, 0.0, 3.0);
    float *logits = qt_alloc(n * vocabulary, sizeof *logits);
    double *want = qt_alloc(n * vocabulary, sizeof *want);
    qc_gpu_decoder *d = new_decoder(&err, QC_OK);
    assert_int_equal(work->llama->logits(d, hidden, n, logits, &err), QC_ERR_USAGE);
    QT_CHECK(work->llama->head(d, &head.m, &err) == QC_OK, "%s", err.msg);
    QT_CHECK(work->llama->logits(d, hidden, n, logits, &err) == QC_OK, "%s", err.msg);
    for (uint64_t r = 0; r < n; r++) {
        double x[HIDDEN];
        for (size_t i = 0; i < HIDDEN; i++)
            x[i] = (double)hidden[r * HIDDEN + i];
        product(&head, x, want + r * vocabulary);
    }
    double e = difference(logits, want, n * vocabulary);
    QT_CHECK(e < 4e-3, "head of kind %d: off by %g", (int)kind, e);
    work->llama->destroy(d);
    free_weight(&head);
    free(hidden);
    free(logits);
    free(want);
}

TEST(test_head)
{
    for (int kind = 0; kind < KINDS; kind++)
        check_head((weight_kind)kind, kind == INT4 ? 304 : 301, kind == 0 ? 1 : 37);
    check_head(DENSE_BF16, 9, 4100);
}

/* Whichever allocation of the device or the host fails: NOMEM or, where less memory will do, the
 * result; and nothing is left. */
TEST(test_no_memory)
{
    const qc_gpu_work *work = qc_gpu_table();
    static const uint64_t length = 5;
    qc_error err = {0};
    layer l;
    unsigned failed = 0;
    make_layer(&l, NF4_NESTED, 1);
    qc_forward_weights g = on_gpu(&l);
    float *hidden = random_floats(length * HIDDEN, 0.0, 1.0);
    size_t before = qc_shim_allocations(NULL);
    for (unsigned n = 1; n < 9; n++) {
        qc_cuda_device device;
        qc_gpu_decoder *d = NULL;
        assert_int_equal(work->device_open(&device, 0, &err), QC_OK);
        qc_shim_fail_malloc(n);
        qc_status st = work->llama->create(&d, &device, &shape, LONGEST, &err);
        if (st == QC_OK)
            st = work->llama->layer(d, &g, l.window, hidden, &length, 1, &err);
        qc_shim_fail_malloc(0);
        work->llama->destroy(d);
        assert_int_equal(qc_shim_allocations(NULL), before);
        if (st != QC_OK) {
            assert_int_equal(st, QC_ERR_NOMEM);
            failed++;
        }
    }
    /* The handle's word, tables, weights. Of activations and of workspace less will do. */
    assert_int_equal(failed, 3);
    free(hidden);
    free_layer(&l);
}

/* Logits of the bundled model, of two windows of its held-out text. */
static float *model_logits(const qc_devices *devices, const qc_forward_batch *batch,
                           uint64_t *count)
{
    static const char dir[] = QC_TEST_DATA "/kjv-llama/model";
    qc_error err = {0};
    qc_checkpoint *c = NULL;
    qc_forward *m = NULL;
    const qc_forward_tools tools = {.threads = 2, .devices = devices, .isa = QC_ISA_SCALAR};
    QT_CHECK(qc_checkpoint_open(&c, dir, &err) == QC_OK, "%s", err.msg);
    QT_CHECK(qc_forward_open(&m, dir, c, &tools, &err) == QC_OK, "%s", err.msg);
    const qc_forward_config *config = qc_forward_config_of(m);
    *count = batch->tokens * config->vocabulary;
    float *hidden = qt_alloc(batch->tokens * config->hidden, sizeof *hidden);
    float *logits = qt_alloc(*count, sizeof *logits);
    QT_CHECK(qc_forward_hidden(m, batch, hidden, &err) == QC_OK, "%s", err.msg);
    QT_CHECK(qc_forward_logits(m, hidden, batch->tokens, logits, &err) == QC_OK, "%s", err.msg);
    qc_forward_close(m);
    qc_checkpoint_close(c);
    free(hidden);
    return logits;
}

TEST(test_model)
{
    const qc_gpu_work *work = qc_gpu_table();
    static const uint64_t lengths[2] = {19, 8};
    uint32_t ids[27];
    qc_devices devices = {.work = work, .gpu_count = 1, .wished = 1, .text = "cuda:0"};
    qc_error err = {0};
    FILE *f = fopen(QC_TEST_DATA "/kjv-llama/heldout.txt", "r");
    assert_non_null(f);
    for (size_t i = 0; i < 27; i++)
        ids[i] = (uint32_t)fgetc(f);
    (void)fclose(f);
    assert_int_equal(work->device_open(&devices.gpus[0], 0, &err), QC_OK);
    const qc_forward_batch batch = {ids, lengths, 2, 27, NULL};
    uint64_t count = 0;
    float *cpu = model_logits(NULL, &batch, &count);
    uint64_t kernels = qc_shim_kernels_run();
    float *gpu = model_logits(&devices, &batch, &count);
    assert_true(qc_shim_kernels_run() > kernels + 4 * 10); /* it was not the CPU again */
    double *want = qt_alloc(count, sizeof *want);
    for (uint64_t i = 0; i < count; i++)
        want[i] = (double)cpu[i];
    double e = difference(gpu, want, count);
    print_message("the bundled model's logits differ by %.2g of their root mean square\n", e);
    QT_CHECK(e < 5e-3, "off by %g", e);
    free(cpu);
    free(gpu);
    free(want);
}

TEST(test_forms)
{
    const qc_gpu_work *work = qc_gpu_table();
    qc_cuda_device device;
    qc_error err = {0};
    assert_int_equal(work->device_open(&device, 0, &err), QC_OK);
    static const struct {
        qc_forward_config config;
        uint64_t longest;
    } wrong[] = {{{.hidden = 8, .intermediate = 8, .heads = 1, .kv_heads = 1, .head_dim = 258}, 8},
                 {{.hidden = 8, .intermediate = 8, .heads = 1, .kv_heads = 1, .head_dim = 7}, 8},
                 {{.hidden = 8, .intermediate = 8, .heads = 3, .kv_heads = 2, .head_dim = 8}, 8},
                 {{.hidden = 8, .intermediate = 8, .heads = 3, .kv_heads = 3, .head_dim = 8}, 0}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const qc_forward_shape s = {.config = wrong[i].config};
        qc_gpu_decoder *d = NULL;
        assert_int_equal(work->llama->create(&d, &device, &s, wrong[i].longest, &err),
                         QC_ERR_UNSUPPORTED);
        assert_null(d);
    }
    /* A window longer than was said. */
    layer l;
    uint64_t length = LONGEST + 1;
    make_layer(&l, DENSE_F32, 0);
    qc_forward_weights g = on_gpu(&l);
    float *hidden = qt_alloc(length * HIDDEN, sizeof *hidden);
    qc_gpu_decoder *d = new_decoder(&err, QC_OK);
    assert_int_equal(work->llama->layer(d, &g, l.window, hidden, &length, 1, &err), QC_ERR_USAGE);
    work->llama->destroy(d);
    free(hidden);
    free_layer(&l);
}

int main(void)
{
    for (size_t i = 0; i < LONGEST * HEAD_DIM / 2; i++) {
        double angle = (double)(i / (HEAD_DIM / 2)) *
                       pow(10000.0, -(double)(i % (HEAD_DIM / 2)) / (HEAD_DIM / 2));
        cosine[i] = (float)cos(angle);
        sine[i] = (float)sin(angle);
    }
    return test_run_all(NULL);
}
