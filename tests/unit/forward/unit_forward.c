/* The forward pass on a model of one layer, against the same in double, written down anew here; and
 * what is wrong with a checkpoint or a batch: every kind is found, and no allocation or Ctrl-C that
 * comes in between leaks or is taken for success. */
#include "base/workers.h"
#include "convert/forward/forward.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/double_layer.h"
#include "tests/fixtures/test.h"

#include <math.h>

#define HIDDEN 24u
#define INTER  40u
#define HEADS  4u
#define KV     2u
#define DIM    6u
#define VOCAB  30u
#define SPAN   5u

#define SIZES                                                                                      \
    "\"hidden_size\": 24, \"intermediate_size\": 40, \"num_hidden_layers\": 1, "                   \
    "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"head_dim\": 6, "                    \
    "\"vocab_size\": 30, \"max_position_embeddings\": 64, \"rms_norm_eps\": 1e-5"

#define L "model.layers.0."
static const test_tensor tensors[] = {
    {"model.embed_tokens.weight", QC_DTYPE_F32, 2, {VOCAB, HIDDEN}},
    {"model.norm.weight", QC_DTYPE_F32, 1, {HIDDEN}},
    {"lm_head.weight", QC_DTYPE_F32, 2, {VOCAB, HIDDEN}},
    {L "input_layernorm.weight", QC_DTYPE_F32, 1, {HIDDEN}},
    {L "post_attention_layernorm.weight", QC_DTYPE_F32, 1, {HIDDEN}},
    {L "self_attn.q_proj.weight", QC_DTYPE_F32, 2, {HEADS * DIM, HIDDEN}},
    {L "self_attn.k_proj.weight", QC_DTYPE_F32, 2, {KV * DIM, HIDDEN}},
    {L "self_attn.v_proj.weight", QC_DTYPE_F32, 2, {KV * DIM, HIDDEN}},
    {L "self_attn.o_proj.weight", QC_DTYPE_F32, 2, {HIDDEN, HEADS *DIM}},
    {L "mlp.gate_proj.weight", QC_DTYPE_F32, 2, {INTER, HIDDEN}},
    {L "mlp.up_proj.weight", QC_DTYPE_F32, 2, {INTER, HIDDEN}},
    {L "mlp.down_proj.weight", QC_DTYPE_F32, 2, {HIDDEN, INTER}},
    {L "self_attn.q_norm.weight", QC_DTYPE_F32, 1, {DIM}},
    {L "self_attn.k_norm.weight", QC_DTYPE_F32, 1, {DIM}},
};
enum { TENSORS = sizeof tensors / sizeof *tensors };

static const uint32_t ids[] = {3, 29, 0, 3, 7, 11, 12, 13, 14, 1, 5, 5, 5, 28, 2, 9};
static const uint64_t lengths[] = {9, 0, 1, 6};
static const qc_forward_batch batch = {ids, lengths, 4, 16, NULL};

/* A model in a folder, open. */
typedef struct {
    char folder[64];
    qc_checkpoint *c;
    qc_forward *m;
    qc_error err;
} world;

static void make_folder(world *w, const test_tensor *rows, size_t count, const char *members)
{
    char config[1024];
    (void)snprintf(config, sizeof config, "{%s}", members);
    *w = (world){{0}, NULL, NULL, {0}};
    test_folder(w->folder, sizeof w->folder);
    test_write_checkpoint(w->folder, rows, count, config);
    test_must(qc_checkpoint_open(&w->c, w->folder, &w->err), &w->err);
}

static qc_status open_model(world *w, unsigned threads)
{
    qc_forward_tools tools = {.threads = threads};
    return qc_forward_open(&w->m, w->folder, w->c, &tools, &w->err);
}

static void world_deinit(world *w)
{
    qc_forward_close(w->m);
    qc_checkpoint_close(w->c);
}

/* ---- the same in double ---- */

static void d_turn(double *x, const float *norm, unsigned position)
{
    double y[DIM];
    if (norm)
        d_norm(x, norm, DIM, x);
    for (unsigned i = 0; i < DIM / 2; i++) {
        double angle = position * pow(10000.0, -2.0 * i / DIM);
        y[i] = x[i] * cos(angle) - x[i + DIM / 2] * sin(angle);
        y[i + DIM / 2] = x[i + DIM / 2] * cos(angle) + x[i] * sin(angle);
    }
    memcpy(x, y, sizeof y);
}

typedef struct {
    int head_norms, tied;
    unsigned span;
} variant;

/* Logits of one window. */
static void d_logits(world *w, const variant *v, const uint32_t *window, unsigned n, double *out)
{
    double h[16][HIDDEN], q[16][HEADS * DIM], k[16][KV * DIM], u[16][KV * DIM];
    double x[HIDDEN], a[HEADS * DIM], g[INTER], up[INTER], y[HIDDEN];
    const float *embedding = test_values(w->c, "model.embed_tokens.weight");
    const float *q_norm = v->head_norms ? test_values(w->c, L "self_attn.q_norm.weight") : NULL;
    const float *k_norm = v->head_norms ? test_values(w->c, L "self_attn.k_norm.weight") : NULL;
    const float *input = test_values(w->c, L "input_layernorm.weight");
    const float *wq = test_values(w->c, L "self_attn.q_proj.weight");
    const float *wk = test_values(w->c, L "self_attn.k_proj.weight");
    const float *wv = test_values(w->c, L "self_attn.v_proj.weight");
    for (unsigned t = 0; t < n; t++) {
        for (unsigned i = 0; i < HIDDEN; i++)
            h[t][i] = (double)embedding[window[t] * HIDDEN + i];
        d_norm(h[t], input, HIDDEN, x);
        d_linear(wq, HEADS * DIM, HIDDEN, x, q[t]);
        d_linear(wk, KV * DIM, HIDDEN, x, k[t]);
        d_linear(wv, KV * DIM, HIDDEN, x, u[t]);
        for (unsigned i = 0; i < HEADS; i++)
            d_turn(q[t] + i * DIM, q_norm, t);
        for (unsigned i = 0; i < KV; i++)
            d_turn(k[t] + i * DIM, k_norm, t);
    }
    const float *wo = test_values(w->c, L "self_attn.o_proj.weight");
    const float *post = test_values(w->c, L "post_attention_layernorm.weight");
    const float *wg = test_values(w->c, L "mlp.gate_proj.weight"),
                *wu = test_values(w->c, L "mlp.up_proj.weight");
    const float *wd = test_values(w->c, L "mlp.down_proj.weight");
    const float *last = test_values(w->c, "model.norm.weight");
    const float *head = v->tied ? embedding : test_values(w->c, "lm_head.weight");
    for (unsigned t = 0; t < n; t++) {
        unsigned low = v->span && t + 1 > v->span ? t + 1 - v->span : 0;
        memset(a, 0, sizeof a);
        for (unsigned i = 0; i < HEADS; i++) {
            unsigned at = i / (HEADS / KV) * DIM;
            double p[16], total = 0.0;
            for (unsigned j = low; j <= t; j++) {
                p[j] = 0.0;
                for (unsigned d = 0; d < DIM; d++)
                    p[j] += q[t][i * DIM + d] * k[j][at + d];
                total += p[j] = exp(p[j] / sqrt((double)DIM));
            }
            for (unsigned j = low; j <= t; j++)
                for (unsigned d = 0; d < DIM; d++)
                    a[i * DIM + d] += p[j] / total * u[j][at + d];
        }
        d_linear(wo, HIDDEN, HEADS * DIM, a, y);
        for (unsigned i = 0; i < HIDDEN; i++)
            h[t][i] += y[i];
        d_norm(h[t], post, HIDDEN, x);
        d_linear(wg, INTER, HIDDEN, x, g);
        d_linear(wu, INTER, HIDDEN, x, up);
        for (unsigned i = 0; i < INTER; i++)
            g[i] = g[i] / (1.0 + exp(-g[i])) * up[i];
        d_linear(wd, HIDDEN, INTER, g, y);
        for (unsigned i = 0; i < HIDDEN; i++)
            h[t][i] += y[i];
        d_norm(h[t], last, HIDDEN, x);
        d_linear(head, VOCAB, HIDDEN, x, out + t * VOCAB);
    }
}

/* ---- agreement ---- */

static qc_status logits(world *w, const qc_forward_batch *b, float *out)
{
    float hidden[16 * HIDDEN];
    QC_TRY(qc_forward_hidden(w->m, b, hidden, &w->err));
    return qc_forward_logits(w->m, hidden, b->tokens, out, &w->err);
}

static void check(world *w, const variant *v)
{
    double want[16 * VOCAB], ee = 0.0, xx = 0.0;
    float got[16 * VOCAB], again[16 * VOCAB];
    test_must(open_model(w, 1), &w->err);
    test_must(logits(w, &batch, got), &w->err);
    for (unsigned i = 0, at = 0; i < 4; at += (unsigned)lengths[i], i++)
        d_logits(w, v, ids + at, (unsigned)lengths[i], want + at * VOCAB);
    for (unsigned i = 0; i < 16 * VOCAB; i++) {
        double e = (double)got[i] - want[i];
        ee += e * e;
        xx += want[i] * want[i];
    }
    if (!(sqrt(ee / xx) < 2e-6))
        fail_msg("relative error %g", sqrt(ee / xx));
    /* The same bits by other threads, and window by window. */
    qc_forward_close(w->m);
    test_must(open_model(w, 3), &w->err);
    test_must(logits(w, &batch, again), &w->err);
    assert_memory_equal(got, again, sizeof got);
    for (unsigned i = 0, at = 0; i < 4; at += (unsigned)lengths[i], i++) {
        const qc_forward_batch one = {ids + at, lengths + i, 1, lengths[i], NULL};
        test_must(logits(w, &one, again + at * VOCAB), &w->err);
    }
    assert_memory_equal(got, again, sizeof got);
    assert_true(qc_forward_memory(w->m, 16, 9) > 16 * HIDDEN * sizeof(float));
    assert_true(qc_forward_memory(w->m, 32, 9) >= qc_forward_memory(w->m, 16, 9));
}

TEST(agrees)
{
    world w;
    make_folder(&w, tensors, TENSORS - 2, "\"model_type\": \"llama\", " SIZES);
    check(&w, &(variant){0, 0, 0});
    assert_int_equal(qc_forward_config_of(w.m)->vocabulary, VOCAB);
    world_deinit(&w);
    make_folder(&w, tensors, TENSORS,
                "\"model_type\": \"qwen3\", \"use_sliding_window\": true, \"sliding_window\": 5, "
                "\"max_window_layers\": 0, " SIZES);
    check(&w, &(variant){1, 0, SPAN});
    world_deinit(&w);
    make_folder(&w, tensors, TENSORS - 2,
                "\"model_type\": \"mistral\", \"sliding_window\": 5, " SIZES);
    check(&w, &(variant){0, 0, SPAN});
    world_deinit(&w);
}

/* A tied head under either name is the same model. */
TEST(tied)
{
    test_tensor rows[TENSORS];
    float got[2][16 * VOCAB];
    for (int i = 0; i < 2; i++) {
        SCOPED(world) w;
        memcpy(rows, tensors, sizeof rows);
        rows[0].name = i ? "lm_head.weight" : "model.embed_tokens.weight";
        rows[2] = (test_tensor){"unused", QC_DTYPE_F32, 1, {1}};
        make_folder(&w, rows, TENSORS - 2,
                    "\"model_type\": \"llama\", \"tie_word_embeddings\": true, " SIZES);
        if (i == 0)
            check(&w, &(variant){0, 1, 0});
        else
            test_must(open_model(&w, 1), &w.err);
        test_must(logits(&w, &batch, got[i]), &w.err);
    }
    assert_memory_equal(got[0], got[1], sizeof got[0]);
}

/* ---- what is wrong ---- */

static void refuses(const test_tensor *rows, size_t count, const char *members, qc_status code,
                    const char *word)
{
    SCOPED(world) w;
    make_folder(&w, rows, count, members);
    assert_int_equal(open_model(&w, 1), code);
    if (!strstr(w.err.msg, word))
        fail_msg("'%s' is not in: %s", word, w.err.msg);
    assert_null(w.m);
}

TEST(wrong_checkpoints)
{
    static const char llama[] = "\"model_type\": \"llama\", " SIZES;
    test_tensor rows[TENSORS];
    for (unsigned i = 0; i < TENSORS - 2; i++) {
        memcpy(rows, tensors, sizeof rows);
        rows[i].name = "other.weight";
        refuses(rows, TENSORS - 2, llama, QC_ERR_INPUT, tensors[i].name);
        memcpy(rows, tensors, sizeof rows);
        rows[i].dims[0]++;
        refuses(rows, TENSORS - 2, llama, QC_ERR_SHAPE, tensors[i].name);
        memcpy(rows, tensors, sizeof rows);
        rows[i].dtype = QC_DTYPE_I32;
        refuses(rows, TENSORS - 2, llama, QC_ERR_UNSUPPORTED, tensors[i].name);
    }
    refuses(tensors, TENSORS - 2, "\"model_type\": \"bloom\", " SIZES, QC_ERR_UNSUPPORTED, "bloom");
    refuses(tensors, TENSORS - 2, "\"model_type\": \"llama\", \"attention_bias\": true, " SIZES,
            QC_ERR_INPUT, "q_proj.bias");
    refuses(tensors, TENSORS - 2, "\"model_type\": \"llama\", \"mlp_bias\": true, " SIZES,
            QC_ERR_INPUT, "gate_proj.bias");
    refuses(tensors, TENSORS - 2, "\"model_type\": \"qwen3\", " SIZES, QC_ERR_INPUT, "q_norm");
    refuses(tensors, TENSORS - 2, "\"model_type\": \"qwen2\", " SIZES, QC_ERR_INPUT, "q_proj.bias");
    refuses(tensors, TENSORS - 2,
            "\"model_type\": \"llama\", \"tie_word_embeddings\": true, " SIZES, QC_ERR_UNSUPPORTED,
            "which of the two");
    memcpy(rows, tensors, sizeof rows);
    rows[5].name = L "self_attn.q_proj.qweight";
    refuses(
        rows, TENSORS - 2,
        "\"model_type\": \"llama\", \"quantization_config\": {\"quant_method\": \"gptq\"}, " SIZES,
        QC_ERR_UNSUPPORTED, "gptq");
}

TEST(wrong_batches)
{
    SCOPED(world) w;
    float out[16 * HIDDEN];
    const uint32_t beyond[] = {0, 1, VOCAB};
    const uint64_t n[] = {1, 2}, huge[] = {UINT64_MAX, 2};
    make_folder(&w, tensors, TENSORS - 2,
                "\"model_type\": \"llama\", \"rope_scaling\": {\"type\": \"dynamic\", \"factor\": "
                "2}, \"max_position_embeddings\": 8, \"hidden_size\": 24, \"intermediate_size\": "
                "40, \"num_hidden_layers\": 1, \"num_attention_heads\": 4, "
                "\"num_key_value_heads\": 2, \"head_dim\": 6, \"vocab_size\": 30");
    test_must(open_model(&w, 1), &w.err);
    assert_int_equal(
        qc_forward_hidden(w.m, &(qc_forward_batch){beyond, n, 2, 3, NULL}, out, &w.err),
        QC_ERR_INPUT);
    assert_non_null(strstr(w.err.msg, "token 1 of window 1 is 30"));
    assert_int_equal(
        qc_forward_hidden(w.m, &(qc_forward_batch){beyond, n, 2, 2, NULL}, out, &w.err),
        QC_ERR_INPUT);
    assert_int_equal(
        qc_forward_hidden(w.m, &(qc_forward_batch){beyond, huge, 2, 1, NULL}, out, &w.err),
        QC_ERR_INPUT);
    assert_int_equal(qc_forward_hidden(w.m, &batch, out, &w.err), QC_ERR_UNSUPPORTED);
    assert_non_null(strstr(w.err.msg, "dynamic"));
    test_must(qc_forward_hidden(w.m, &(qc_forward_batch){NULL, NULL, 0, 0, NULL}, out, &w.err),
              &w.err);
    test_must(
        qc_forward_hidden(w.m, &(qc_forward_batch){NULL, lengths + 1, 1, 0, NULL}, out, &w.err),
        &w.err);
}

/* One weight of the file is overwritten with infinity. */
TEST(not_finite)
{
    SCOPED(world) w;
    float out[16 * HIDDEN];
    char path[96];
    const float infinite = INFINITY;
    make_folder(&w, tensors, TENSORS - 2, "\"model_type\": \"llama\", " SIZES);
    const qc_checkpoint_tensor *t = qc_checkpoint_find(w.c, L "mlp.down_proj.weight");
    (void)snprintf(path, sizeof path, "%s/model.safetensors", w.folder);
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, (long)(w.c->files[0].st.data_offset + t->begin + 8), SEEK_SET), 0);
    assert_int_equal(fwrite(&infinite, sizeof infinite, 1, f), 1);
    assert_int_equal(fclose(f), 0);
    test_must(open_model(&w, 2), &w.err);
    assert_int_equal(qc_forward_hidden(w.m, &batch, out, &w.err), QC_ERR_NONFINITE);
    assert_non_null(strstr(w.err.msg, "layer 0"));
}

TEST(every_allocation)
{
    SCOPED(world) w;
    float out[16 * VOCAB];
    uint64_t failures = 0;
    make_folder(&w, tensors, TENSORS - 2, "\"model_type\": \"llama\", " SIZES);
    for (int threads = 1; threads <= 2; threads++) {
        EACH_ALLOCATION_FAILS (fault, 0) {
            fault.st = open_model(&w, (unsigned)threads);
            if (fault.st == QC_OK)
                fault.st = logits(&w, &batch, out);
            qc_forward_close(w.m);
            w.m = NULL;
            failures += fault.st != QC_OK;
        }
    }
    assert_true(failures > 40);
}

TEST(interrupted)
{
    SCOPED(world) w;
    float out[16 * VOCAB], hidden[16 * HIDDEN] = {0.0f};
    make_folder(&w, tensors, TENSORS - 2, "\"model_type\": \"llama\", " SIZES);
    test_must(open_model(&w, 2), &w.err);
    qc_interrupt();
    assert_int_equal(qc_forward_hidden(w.m, &batch, hidden, &w.err), QC_ERR_INTERRUPTED);
    assert_int_equal(qc_forward_logits(w.m, hidden, 16, out, &w.err), QC_ERR_INTERRUPTED);
    qc_interrupt_clear();
    test_must(logits(&w, &batch, out), &w.err);
}
