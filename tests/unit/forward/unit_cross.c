/* A layer whose tokens look at images, against the same in double, written down anew here; states
 * that are read across their padding; and no allocation or Ctrl-C that comes in between leaks or is
 * taken for success. */
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
#define IMAGE  31u
#define MOST   80u /* keys */

#define CONFIG                                                                                     \
    "{\"model_type\": \"mllama_text_model\", \"hidden_size\": 24, \"intermediate_size\": 40, "     \
    "\"num_hidden_layers\": 1, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "           \
    "\"vocab_size\": 30, \"rms_norm_eps\": 1e-5, \"cross_attention_layers\": [0], "                \
    "\"image_token_index\": 31}"

#define L "model.layers.0."
static const test_tensor tensors[] = {
    {"model.embed_tokens.weight", QC_DTYPE_F32, 2, {VOCAB + 8, HIDDEN}},
    {"model.norm.weight", QC_DTYPE_F32, 1, {HIDDEN}},
    {"lm_head.weight", QC_DTYPE_F32, 2, {VOCAB, HIDDEN}},
    {L "input_layernorm.weight", QC_DTYPE_F32, 1, {HIDDEN}},
    {L "post_attention_layernorm.weight", QC_DTYPE_F32, 1, {HIDDEN}},
    {L "cross_attn.q_proj.weight", QC_DTYPE_F32, 2, {HEADS * DIM, HIDDEN}},
    {L "cross_attn.k_proj.weight", QC_DTYPE_F32, 2, {KV * DIM, HIDDEN}},
    {L "cross_attn.v_proj.weight", QC_DTYPE_F32, 2, {KV * DIM, HIDDEN}},
    {L "cross_attn.o_proj.weight", QC_DTYPE_F32, 2, {HIDDEN, HEADS *DIM}},
    {L "cross_attn.q_norm.weight", QC_DTYPE_F32, 1, {DIM}},
    {L "cross_attn.k_norm.weight", QC_DTYPE_F32, 1, {DIM}},
    {"other", QC_DTYPE_F32, 1, {3}}, /* so that neither gate is 0 */
    {L "cross_attn_attn_gate", QC_DTYPE_F32, 1, {1}},
    {L "cross_attn_mlp_gate", QC_DTYPE_F32, 1, {1}},
    {L "mlp.gate_proj.weight", QC_DTYPE_F32, 2, {INTER, HIDDEN}},
    {L "mlp.up_proj.weight", QC_DTYPE_F32, 2, {INTER, HIDDEN}},
    {L "mlp.down_proj.weight", QC_DTYPE_F32, 2, {HIDDEN, INTER}},
};
enum { TENSORS = sizeof tensors / sizeof *tensors };

static const test_tensor states[] = {
    {"padding.0", QC_DTYPE_F32, 2, {9, HIDDEN}},
    {"states", QC_DTYPE_F32, 2, {3, HIDDEN}},
    {"states.0", QC_DTYPE_F32, 2, {70, HIDDEN}},
};

/* Two windows of sequence 0, of which the first has the image's token, and two of others. froms:
 * the first token that sees the image. */
static const uint32_t ids[] = {3, 29, IMAGE, 3, 7, 11, 12, IMAGE, 14, 1, 5, 5};
static const uint64_t lengths[] = {5, 2, 1, 4}, sequences[] = {0, 0, 1, 2};
static const unsigned froms[] = {2, 0, 0, 0};
static const qc_forward_batch batch = {ids, lengths, 4, 12, sequences};

typedef struct {
    char folder[64], images[64], file[96];
    qc_checkpoint *c;
    qc_image_states *s;
    qc_forward *m;
    qc_error err;
} world;

static void make_world(world *w)
{
    *w = (world){.err = {0}};
    test_folder(w->folder, sizeof w->folder);
    test_folder(w->images, sizeof w->images);
    test_write_checkpoint(w->folder, tensors, TENSORS, CONFIG);
    test_write_checkpoint(w->images, states, sizeof states / sizeof *states, "{}");
    (void)snprintf(w->file, sizeof w->file, "%s/model.safetensors", w->images);
    test_must(qc_checkpoint_open(&w->c, w->folder, &w->err), &w->err);
}

static qc_status open_world(world *w, unsigned threads)
{
    qc_forward_tools tools = {.threads = threads};
    qc_status st = qc_image_states_open(&w->s, w->file, QC_ISA_SCALAR, &w->err);
    tools.images = w->s;
    return st == QC_OK ? qc_forward_open(&w->m, w->folder, w->c, &tools, &w->err) : st;
}

static void close_world(world *w)
{
    qc_forward_close(w->m);
    qc_image_states_close(w->s);
    w->m = NULL;
    w->s = NULL;
}

static void world_deinit(world *w)
{
    close_world(w);
    qc_checkpoint_close(w->c);
}

static qc_status logits(world *w, float *out)
{
    float hidden[12 * HIDDEN];
    qc_status st = qc_forward_hidden(w->m, &batch, hidden, &w->err);
    return st == QC_OK ? qc_forward_logits(w->m, hidden, 12, out, &w->err) : st;
}

/* ---- the same in double ---- */

typedef struct {
    unsigned keys;
    double k[MOST][KV * DIM], v[MOST][KV * DIM];
} seen;

static void d_keys(world *w, const qc_image *image, seen *out)
{
    float x[MOST * HIDDEN];
    const float *k = test_values(w->c, L "cross_attn.k_proj.weight"),
                *v = test_values(w->c, L "cross_attn.v_proj.weight"),
                *norm = test_values(w->c, L "cross_attn.k_norm.weight");
    test_must(qc_image_read(w->s, image, 0, image->all, x, &w->err), &w->err);
    for (unsigned t = 0; t < image->all; t++) {
        double row[HIDDEN];
        for (unsigned i = 0; i < HIDDEN; i++)
            row[i] = (double)x[t * HIDDEN + i];
        d_linear(k, KV * DIM, HIDDEN, row, out->k[t]);
        d_linear(v, KV * DIM, HIDDEN, row, out->v[t]);
        for (unsigned h = 0; h < KV; h++)
            d_norm(out->k[t] + h * DIM, norm, DIM, out->k[t] + h * DIM);
    }
}

static void d_attend(const double *q, const seen *s, double *out)
{
    for (unsigned h = 0; h < HEADS; h++) {
        const unsigned kv = h / (HEADS / KV) * DIM;
        double p[MOST], total = 0.0;
        for (unsigned j = 0; j < s->keys; j++) {
            p[j] = 0.0;
            for (unsigned d = 0; d < DIM; d++)
                p[j] += q[h * DIM + d] * s->k[j][kv + d];
            total += p[j] = exp(p[j] / sqrt(DIM));
        }
        for (unsigned d = 0; d < DIM; d++) {
            out[h * DIM + d] = 0.0;
            for (unsigned j = 0; j < s->keys; j++)
                out[h * DIM + d] += p[j] / total * s->v[j][kv + d];
        }
    }
}

static void d_token(world *w, uint32_t id, const seen *s, int fed, double *out)
{
    double h[HIDDEN], x[HIDDEN], q[HEADS * DIM], a[HEADS * DIM], g[INTER], u[INTER], y[HIDDEN];
    const float *embedding = test_values(w->c, "model.embed_tokens.weight");
    const float *q_norm = test_values(w->c, L "cross_attn.q_norm.weight");
    const double attended = tanh((double)*test_values(w->c, L "cross_attn_attn_gate"));
    const double gated = fed ? tanh((double)*test_values(w->c, L "cross_attn_mlp_gate")) : 0.0;
    for (unsigned i = 0; i < HIDDEN; i++)
        h[i] = (double)embedding[id * HIDDEN + i];
    d_norm(h, test_values(w->c, L "input_layernorm.weight"), HIDDEN, x);
    d_linear(test_values(w->c, L "cross_attn.q_proj.weight"), HEADS * DIM, HIDDEN, x, q);
    for (unsigned i = 0; i < HEADS; i++)
        d_norm(q + i * DIM, q_norm, DIM, q + i * DIM);
    d_attend(q, s, a);
    d_linear(test_values(w->c, L "cross_attn.o_proj.weight"), HIDDEN, HEADS * DIM, a, y);
    for (unsigned i = 0; i < HIDDEN; i++)
        h[i] += attended * y[i];
    d_norm(h, test_values(w->c, L "post_attention_layernorm.weight"), HIDDEN, x);
    d_linear(test_values(w->c, L "mlp.gate_proj.weight"), INTER, HIDDEN, x, g);
    d_linear(test_values(w->c, L "mlp.up_proj.weight"), INTER, HIDDEN, x, u);
    for (unsigned i = 0; i < INTER; i++)
        g[i] = g[i] / (1.0 + exp(-g[i])) * u[i];
    d_linear(test_values(w->c, L "mlp.down_proj.weight"), HIDDEN, INTER, g, y);
    for (unsigned i = 0; i < HIDDEN; i++)
        h[i] += gated * y[i];
    d_norm(h, test_values(w->c, "model.norm.weight"), HIDDEN, x);
    d_linear(test_values(w->c, "lm_head.weight"), VOCAB, HIDDEN, x, out);
}

TEST(agrees)
{
    static seen s;
    SCOPED(world) w;
    float first[12 * VOCAB], got[12 * VOCAB];
    double want[VOCAB];
    make_world(&w);
    test_must(open_world(&w, 1), &w.err);
    test_must(logits(&w, first), &w.err);
    assert_true(fabsf(*test_values(w.c, L "cross_attn_attn_gate")) > 0.2f);
    assert_true(fabsf(*test_values(w.c, L "cross_attn_mlp_gate")) > 0.2f);
    assert_true(qc_forward_image_memory(w.m) >= 79 * (2 * KV * DIM + HIDDEN) * sizeof(float));
    assert_true(qc_forward_memory(w.m, 12, 5) > qc_forward_image_memory(w.m));
    unsigned at = 0;
    for (unsigned window = 0; window < 4; window++) {
        const qc_image *image = qc_image_of(w.s, sequences[window]);
        d_keys(&w, image, &s);
        for (unsigned t = 0; t < lengths[window]; t++, at++) {
            const int fed = t >= froms[window];
            s.keys = (unsigned)(fed ? image->seen : image->all);
            d_token(&w, ids[at], &s, fed, want);
            for (unsigned i = 0; i < VOCAB; i++)
                assert_true(fabs((double)first[at * VOCAB + i] - want[i]) <
                            1e-4 * (1 + fabs(want[i])));
        }
    }
    close_world(&w);
    test_must(open_world(&w, 3), &w.err);
    test_must(logits(&w, got), &w.err);
    assert_memory_equal(first, got, sizeof got);
}

/* ---- states ---- */

TEST(reads_across_padding)
{
    SCOPED(world) w;
    float all[79 * HIDDEN], part[79 * HIDDEN];
    make_world(&w);
    test_must(open_world(&w, 1), &w.err);
    const qc_image *image = qc_image_of(w.s, 0);
    assert_true(image->seen == 70 && image->all == 79 && qc_image_states_longest(w.s) == 79);
    assert_true(qc_image_of(w.s, 1)->all == 3 && qc_image_of(w.s, 1) == qc_image_of(w.s, 7));
    test_must(qc_image_read(w.s, image, 0, 79, all, &w.err), &w.err);
    for (unsigned first = 0; first < 79; first += 13)
        for (unsigned n = 0; first + n <= 79; n += 5) {
            test_must(qc_image_read(w.s, image, first, n, part, &w.err), &w.err);
            assert_memory_equal(part, all + first * HIDDEN, n * HIDDEN * sizeof *part);
        }
}

TEST(every_allocation)
{
    SCOPED(world) w;
    float out[12 * VOCAB];
    uint64_t failures = 0;
    make_world(&w);
    EACH_ALLOCATION_FAILS (fault, 0) {
        fault.st = open_world(&w, 2);
        if (fault.st == QC_OK)
            fault.st = logits(&w, out);
        close_world(&w);
        failures = fault.at - 1;
    }
    assert_true(failures > 40);
}

TEST(interrupted)
{
    SCOPED(world) w;
    float out[12 * VOCAB];
    make_world(&w);
    test_must(open_world(&w, 2), &w.err);
    qc_interrupt();
    assert_int_equal(logits(&w, out), QC_ERR_INTERRUPTED);
    close_world(&w);
    assert_int_equal(open_world(&w, 2), QC_ERR_INTERRUPTED);
    qc_interrupt_clear();
}
