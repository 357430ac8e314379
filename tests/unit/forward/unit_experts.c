/* The experts of a layer, against the same in double, written down anew here; an expert that no
 * token goes to is not looked at; what is wrong with a checkpoint is found; and no allocation or
 * Ctrl-C that comes in between leaks or is taken for success. */
#include "base/workers.h"
#include "convert/forward/experts.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/double_layer.h"
#include "tests/fixtures/test.h"

#include <math.h>

#define HIDDEN 8u
#define INNER  6u
#define SHARED 5u
#define COUNT  4u
#define CHOSEN 2u
#define TOKENS 1100u /* more than are in work at a time */
#define DEAD   2u    /* the expert that no token goes to */

#define CONFIG                                                                                     \
    "\"model_type\": \"qwen2_moe\", \"hidden_size\": 8, \"intermediate_size\": 10, "               \
    "\"num_hidden_layers\": 1, \"num_attention_heads\": 2, \"num_key_value_heads\": 1, "           \
    "\"vocab_size\": 12, \"num_experts\": 4, \"num_experts_per_tok\": 2, "                         \
    "\"moe_intermediate_size\": 6, \"shared_expert_intermediate_size\": 5, "                       \
    "\"norm_topk_prob\": true, \"rms_norm_eps\": 1e-6"

#define L "model.layers.0."
#define EXPERT(e)                                                                                  \
    {L "mlp.experts." #e ".gate_proj.weight", QC_DTYPE_F32, 2, {INNER, HIDDEN}},                   \
        {L "mlp.experts." #e ".up_proj.weight", QC_DTYPE_F32, 2, {INNER, HIDDEN}},                 \
    {                                                                                              \
        L "mlp.experts." #e ".down_proj.weight", QC_DTYPE_F32, 2,                                  \
        {                                                                                          \
            HIDDEN, INNER                                                                          \
        }                                                                                          \
    }

static const test_tensor tensors[] = {
    {"model.embed_tokens.weight", QC_DTYPE_F32, 2, {12, HIDDEN}},
    {"model.norm.weight", QC_DTYPE_F32, 1, {HIDDEN}},
    {"lm_head.weight", QC_DTYPE_F32, 2, {12, HIDDEN}},
    {L "input_layernorm.weight", QC_DTYPE_F32, 1, {HIDDEN}},
    {L "post_attention_layernorm.weight", QC_DTYPE_F32, 1, {HIDDEN}},
    {L "self_attn.q_proj.weight", QC_DTYPE_F32, 2, {HIDDEN, HIDDEN}},
    {L "self_attn.q_proj.bias", QC_DTYPE_F32, 1, {HIDDEN}},
    {L "self_attn.k_proj.weight", QC_DTYPE_F32, 2, {HIDDEN / 2, HIDDEN}},
    {L "self_attn.k_proj.bias", QC_DTYPE_F32, 1, {HIDDEN / 2}},
    {L "self_attn.v_proj.weight", QC_DTYPE_F32, 2, {HIDDEN / 2, HIDDEN}},
    {L "self_attn.v_proj.bias", QC_DTYPE_F32, 1, {HIDDEN / 2}},
    {L "self_attn.o_proj.weight", QC_DTYPE_F32, 2, {HIDDEN, HIDDEN}},
    {L "mlp.gate.weight", QC_DTYPE_F32, 2, {COUNT, HIDDEN}},
    EXPERT(0),
    EXPERT(1),
    EXPERT(2),
    EXPERT(3),
    {L "mlp.shared_expert.gate_proj.weight", QC_DTYPE_F32, 2, {SHARED, HIDDEN}},
    {L "mlp.shared_expert.up_proj.weight", QC_DTYPE_F32, 2, {SHARED, HIDDEN}},
    {L "mlp.shared_expert.down_proj.weight", QC_DTYPE_F32, 2, {HIDDEN, SHARED}},
    {L "mlp.shared_expert_gate.weight", QC_DTYPE_F32, 2, {1, HIDDEN}},
};
enum { TENSORS = sizeof tensors / sizeof *tensors, FIRST_OF_FFN = 12 };

typedef struct {
    char folder[64];
    qc_checkpoint *c;
    qc_arena arena;
    qc_forward_tensors t;
    qc_forward_source s;
    qc_error err;
} world;

static qc_status open_world(world *w, const test_tensor *rows)
{
    *w = (world){.s = {.ops = qc_quant_ops_for(QC_ISA_SCALAR)}};
    qc_arena_init(&w->arena);
    test_folder(w->folder, sizeof w->folder);
    test_write_checkpoint(w->folder, rows, TENSORS, "{" CONFIG "}");
    test_must(qc_checkpoint_open(&w->c, w->folder, &w->err), &w->err);
    test_must(qc_st_cursor_create(&w->s.cursor, &w->err), &w->err);
    w->s.checkpoint = w->c;
    return qc_forward_tensors_find(&w->t, &w->arena, w->c, NULL, &w->err);
}

static void world_deinit(world *w)
{
    qc_st_cursor_destroy(w->s.cursor);
    qc_checkpoint_close(w->c);
    qc_arena_deinit(&w->arena);
}

static void overwrite(world *w, const char *name, const float *values, size_t count)
{
    char path[96];
    const qc_checkpoint_tensor *t = qc_checkpoint_find(w->c, name);
    (void)snprintf(path, sizeof path, "%s/model.safetensors", w->folder);
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, (long)(w->c->files[0].st.data_offset + t->begin), SEEK_SET), 0);
    assert_int_equal(fwrite(values, sizeof *values, count, f), count);
    assert_int_equal(fclose(f), 0);
}

/* The router gives expert DEAD -100 times the first element of a state, and that is positive. */
static void kill_expert(world *w)
{
    float router[COUNT * HIDDEN], bad[INNER * HIDDEN], norm[HIDDEN];
    for (unsigned i = 0; i < COUNT * HIDDEN; i++)
        router[i] = 0.3f * (float)((int)(i * 7 % 11) - 5);
    for (unsigned i = 0; i < HIDDEN; i++)
        router[DEAD * HIDDEN + i] = i == 0 ? -100.0f : 0.0f;
    overwrite(w, L "mlp.gate.weight", router, COUNT * HIDDEN);
    for (unsigned i = 0; i < HIDDEN; i++)
        norm[i] = 0.5f + 0.25f * (float)(i % 3);
    overwrite(w, L "post_attention_layernorm.weight", norm, HIDDEN);
    for (unsigned i = 0; i < INNER * HIDDEN; i++)
        bad[i] = NAN;
    overwrite(w, L "mlp.experts.2.up_proj.weight", bad, INNER * HIDDEN);
}

static void make_states(float *h)
{
    uint32_t seed = 1;
    for (unsigned i = 0; i < TOKENS * HIDDEN; i++) {
        seed = seed * 1664525u + 1013904223u;
        h[i] = (float)(seed >> 8) / (float)(1u << 23) - 1.0f;
        if (i % HIDDEN == 0)
            h[i] = fabsf(h[i]) + 0.5f;
    }
}

static qc_status run(world *w, unsigned threads, uint64_t tokens, float *hidden)
{
    const qc_forward_tools tools = {.threads = threads};
    const qc_experts_layer *l = w->t.layers[0].experts;
    qc_experts_cpu x = {0};
    float *norm = NULL;
    qc_status st = qc_experts_create(&x, &w->t.shape, &tools, tokens, NULL, &w->err);
    if (st == QC_OK)
        st = qc_forward_vector_read(&norm, &w->s, w->t.layers[0].vectors[QC_LAYER_POST_NORM],
                                    &w->err);
    if (st == QC_OK)
        st = qc_experts_run(&x, &w->s, l, norm, hidden, &w->err);
    qc_free(norm);
    qc_experts_deinit(&x);
    return st;
}

/* ---- the same in double ---- */

typedef struct {
    const float *gate, *up, *down;
    unsigned inner;
} d_expert;

static void d_add(const d_expert *e, const double *x, double share, double *sum)
{
    double g[INNER], u[INNER], y[HIDDEN];
    d_linear(e->gate, e->inner, HIDDEN, x, g);
    d_linear(e->up, e->inner, HIDDEN, x, u);
    for (unsigned i = 0; i < e->inner; i++)
        g[i] = g[i] / (1.0 + exp(-g[i])) * u[i];
    d_linear(e->down, HIDDEN, e->inner, g, y);
    for (unsigned i = 0; i < HIDDEN; i++)
        sum[i] += share * y[i];
}

static d_expert d_find(world *w, const char *module, unsigned inner)
{
    static const char *const parts[] = {"gate", "up", "down"};
    const float *found[3];
    for (int i = 0; i < 3; i++) {
        char name[96];
        (void)snprintf(name, sizeof name, L "mlp.%s.%s_proj.weight", module, parts[i]);
        found[i] = test_values(w->c, name);
    }
    return (d_expert){found[0], found[1], found[2], inner};
}

typedef struct {
    const float *norm, *router, *gate;
    d_expert experts[COUNT], shared;
} d_layer;

static void d_token(const d_layer *l, const float *h, double *out)
{
    double x[HIDDEN], p[COUNT], ss = 0.0, total = 0.0, gate = 0.0;
    unsigned first = 0, second;
    for (unsigned i = 0; i < HIDDEN; i++)
        ss += (double)h[i] * (double)h[i];
    for (unsigned i = 0; i < HIDDEN; i++) {
        x[i] = (double)h[i] / sqrt(ss / HIDDEN + 1e-6) * (double)l->norm[i];
        out[i] = (double)h[i];
    }
    d_linear(l->router, COUNT, HIDDEN, x, p);
    for (unsigned e = 1; e < COUNT; e++)
        first = p[e] > p[first] ? e : first;
    second = first == 0 ? 1 : 0;
    for (unsigned e = 0; e < COUNT; e++)
        second = e != first && p[e] > p[second] ? e : second;
    total = exp(p[first]) + exp(p[second]);
    d_add(&l->experts[first], x, exp(p[first]) / total, out);
    d_add(&l->experts[second], x, exp(p[second]) / total, out);
    d_linear(l->gate, 1, HIDDEN, x, &gate);
    d_add(&l->shared, x, 1.0 / (1.0 + exp(-gate)), out);
}

/* ---- agreement ---- */

static float hidden[TOKENS * HIDDEN], again[TOKENS * HIDDEN], before[TOKENS * HIDDEN];

TEST(agrees)
{
    SCOPED(world) w;
    d_layer l;
    double ee = 0.0, xx = 0.0;
    test_must(open_world(&w, tensors), &w.err);
    kill_expert(&w);
    make_states(before);
    memcpy(hidden, before, sizeof before);
    test_must(run(&w, 1, TOKENS, hidden), &w.err);
    l = (d_layer){.norm = test_values(w.c, L "post_attention_layernorm.weight"),
                  .router = test_values(w.c, L "mlp.gate.weight"),
                  .gate = test_values(w.c, L "mlp.shared_expert_gate.weight"),
                  .shared = d_find(&w, "shared_expert", SHARED)};
    for (unsigned e = 0; e < COUNT; e++) {
        char module[32];
        (void)snprintf(module, sizeof module, "experts.%u", e);
        l.experts[e] = d_find(&w, module, INNER);
    }
    for (unsigned t = 0; t < TOKENS; t++) {
        double want[HIDDEN];
        d_token(&l, before + (size_t)t * HIDDEN, want);
        for (unsigned i = 0; i < HIDDEN; i++) {
            double e = (double)hidden[t * HIDDEN + i] - want[i];
            ee += e * e;
            xx += want[i] * want[i];
        }
    }
    if (!(sqrt(ee / xx) < 1e-6))
        fail_msg("relative error %g", sqrt(ee / xx));
    /* The same bits by other threads, and in other batches. */
    memcpy(again, before, sizeof before);
    test_must(run(&w, 3, TOKENS, again), &w.err);
    assert_memory_equal(hidden, again, sizeof hidden);
    memcpy(again, before, sizeof before);
    for (uint64_t at = 0, n = 1; at < TOKENS; at += n, n = 3 * n + 1) {
        uint64_t left = TOKENS - at < n ? TOKENS - at : n;
        test_must(run(&w, 2, left, again + at * HIDDEN), &w.err);
    }
    assert_memory_equal(hidden, again, sizeof hidden);
}

/* The memory of a layer has one expert, or the shared ones, and not all. */
TEST(memory)
{
    SCOPED(world) w;
    test_must(open_world(&w, tensors), &w.err);
    const qc_experts_layer *l = w.t.layers[0].experts;
    assert_int_equal(l->count, COUNT);
    assert_int_equal(l->memory_bytes, (COUNT * HIDDEN + 3 * INNER * HIDDEN) * sizeof(float));
    uint64_t one = qc_experts_bytes(&w.t.shape, 1, 1, 1),
             more = qc_experts_bytes(&w.t.shape, 1, 1000, 1);
    assert_true(more >= one + 999 * (HIDDEN + 4 * CHOSEN) * sizeof(float));
    assert_true(qc_experts_bytes(&w.t.shape, 1, UINT64_MAX / 8, 1) == UINT64_MAX);
}

/* A whole model and its logits by transformers (tests/data/tiny-moe). */
TEST(known_logits)
{
    qc_error err = {0};
    qc_checkpoint *c = NULL;
    qc_forward *m = NULL;
    qc_json *doc = NULL;
    const qc_forward_tools tools = {.threads = 2};
    SCOPED(qc_strbuf) text = {.max = 1u << 20};
    test_must(qc_file_slurp(QC_TEST_DATA "/tiny-moe/expected.json", &text, &err), &err);
    test_must(qc_json_parse(&doc, text.data, text.len, 0, &err), &err);
    test_must(qc_checkpoint_open(&c, QC_TEST_DATA "/tiny-moe", &err), &err);
    test_must(qc_forward_open(&m, "tiny-moe", c, &tools, &err), &err);
    const qc_json_node *want = qc_json_first(qc_json_get(qc_json_root(doc), "logits"));
    unsigned windows = 0;
    for (const qc_json_node *w = qc_json_first(qc_json_get(qc_json_root(doc), "ids")); w;
         w = qc_json_next(w), want = qc_json_next(want), windows++) {
        uint32_t ids[32];
        float states[32 * 16], got[64];
        uint64_t n = 0, id = 0;
        for (const qc_json_node *i = qc_json_first(w); i; i = qc_json_next(i)) {
            test_must(qc_json_as_u64(i, "id", &id, &err), &err);
            ids[n++] = (uint32_t)id;
        }
        test_must(qc_forward_hidden(m, &(qc_forward_batch){ids, &n, 1, n, NULL}, states, &err),
                  &err);
        test_must(qc_forward_logits(m, states + (n - 1) * 16, 1, got, &err), &err);
        const qc_json_node *l = qc_json_first(want);
        for (unsigned i = 0; i < 64; i++, l = qc_json_next(l)) {
            double expected = 0.0;
            test_must(qc_json_as_double(l, "logit", &expected, &err), &err);
            if (fabs((double)got[i] - expected) > 2e-5)
                fail_msg("logit %u of window %u is %g, expected %g", i, windows, (double)got[i],
                         expected);
        }
    }
    assert_int_equal(windows, 3);
    qc_forward_close(m);
    qc_checkpoint_close(c);
    qc_json_destroy(doc);
}

/* ---- what is wrong ---- */

TEST(wrong_checkpoints)
{
    test_tensor rows[TENSORS];
    for (unsigned i = FIRST_OF_FFN; i < TENSORS; i++) {
        static const qc_status codes[] = {QC_ERR_INPUT, QC_ERR_SHAPE, QC_ERR_UNSUPPORTED};
        for (unsigned how = 0; how < 3; how++) {
            SCOPED(world) w;
            memcpy(rows, tensors, sizeof rows);
            if (how == 0)
                rows[i].name = "other.weight";
            else if (how == 1)
                rows[i].dims[1]++;
            else
                rows[i].dtype = QC_DTYPE_I32;
            assert_int_equal(open_world(&w, rows), codes[how]);
            if (!strstr(w.err.msg, tensors[i].name))
                fail_msg("'%s' is not in: %s", tensors[i].name, w.err.msg);
        }
    }
}

TEST(not_finite)
{
    world w;
    float bad = INFINITY;
    test_must(open_world(&w, tensors), &w.err);
    make_states(hidden);
    overwrite(&w, L "mlp.gate.weight", &bad, 1);
    assert_int_equal(run(&w, 2, TOKENS, hidden), QC_ERR_NONFINITE);
    assert_string_equal(w.err.msg, "what the router gives is not finite");
    world_deinit(&w);
    test_must(open_world(&w, tensors), &w.err);
    make_states(hidden);
    overwrite(&w, L "mlp.shared_expert.down_proj.weight", &bad, 1);
    assert_int_equal(run(&w, 2, TOKENS, hidden), QC_ERR_NONFINITE);
    assert_string_equal(w.err.msg, "a hidden state is not finite");
    world_deinit(&w);
}

TEST(every_allocation)
{
    SCOPED(world) w;
    uint64_t failures = 0;
    test_must(open_world(&w, tensors), &w.err);
    EACH_ALLOCATION_FAILS (fault, 0) {
        make_states(hidden);
        fault.st = run(&w, 2, 20, hidden);
        failures = fault.at - 1;
    }
    assert_true(failures > 40);
}

TEST(interrupted)
{
    SCOPED(world) w;
    test_must(open_world(&w, tensors), &w.err);
    make_states(hidden);
    qc_interrupt();
    assert_int_equal(run(&w, 2, 20, hidden), QC_ERR_INTERRUPTED);
    qc_interrupt_clear();
    test_must(run(&w, 2, 20, hidden), &w.err);
}
