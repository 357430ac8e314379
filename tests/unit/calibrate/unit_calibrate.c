/* Layers point by point: each gives the inputs of its linear layers, and all together are the
 * layer. */
#include "base/alloc.h"
#include "convert/family/family.h"
#include "convert/forward/forward_cpu.h"
#include "convert/forward/token_text.h"
#include "quant/matmul_ops.h"
#include "tests/fixtures/test.h"

#define HIDDEN 24u
#define INTER  40u
#define Q      24u
#define KV     12u
#define TOKENS 1300u /* two chunks */

static float draw(void)
{
    static uint32_t state = 5;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) * 0x1p-24f - 0.5f;
}

static float *floats(size_t n)
{
    void *v = NULL;
    qc_error err = {0};
    assert_int_equal(qc_malloc_aligned(&v, 64, n * sizeof(float), &err), QC_OK);
    float *f = v;
    for (size_t i = 0; i < n; i++)
        f[i] = draw();
    return f;
}

static void product(const qc_forward_matrix *w, const float *x, uint64_t ldx, uint64_t n, double *y)
{
    const float *d = w->dense;
    for (uint64_t t = 0; t < n; t++)
        for (uint64_t r = 0; r < w->rows; r++) {
            double sum = 0;
            for (uint64_t c = 0; c < w->cols; c++)
                sum += (double)d[r * w->cols + c] * (double)x[t * ldx + c];
            y[t * w->rows + r] = sum;
        }
}

static void assert_near(double a, double b)
{
    assert_true(a - b < 1e-4 && b - a < 1e-4);
}

typedef struct {
    uint64_t rows, cols;
} size;

/* Latents of 5 for q, and of 7 for keys and values of 3, of which heads share 2 turned elements. */
static const size latent[QC_LAYER_ALL_MATRICES] = {
    [QC_LAYER_Q] = {5, HIDDEN},      [QC_LAYER_K] = {7 + 2, HIDDEN},
    [QC_LAYER_O] = {HIDDEN, 12},     [QC_LAYER_GATE] = {INTER, HIDDEN},
    [QC_LAYER_UP] = {INTER, HIDDEN}, [QC_LAYER_DOWN] = {HIDDEN, INTER},
    [QC_LAYER_Q_B] = {Q, 5},         [QC_LAYER_KV_B] = {4 * (4 + 3), 7},
};
static const size plain[QC_LAYER_ALL_MATRICES] = {
    [QC_LAYER_Q] = {Q, HIDDEN},        [QC_LAYER_K] = {KV, HIDDEN},
    [QC_LAYER_V] = {KV, HIDDEN},       [QC_LAYER_O] = {HIDDEN, Q},
    [QC_LAYER_GATE] = {INTER, HIDDEN}, [QC_LAYER_UP] = {INTER, HIDDEN},
    [QC_LAYER_DOWN] = {HIDDEN, INTER},
};
/* Attention and the feed-forward part side by side, as GPT-NeoX has them. */
static const size beside[QC_LAYER_ALL_MATRICES] = {
    [QC_LAYER_Q] = {3 * Q, HIDDEN},
    [QC_LAYER_O] = {HIDDEN, Q},
    [QC_LAYER_GATE] = {INTER, HIDDEN},
    [QC_LAYER_DOWN] = {HIDDEN, INTER},
};

/* The matrix whose product with the inputs of a point is added to the hidden states, or -1. */
static int adds(int point)
{
    return point == QC_AT_GATE ? QC_LAYER_O : point == QC_AT_DOWN ? QC_LAYER_DOWN : -1;
}

/* The inputs at the points of latents are behind norms, whose weights are 1 here. */
static void check_latents(const qc_forward_inputs *in, const qc_forward_chunk *at, uint64_t n)
{
    for (uint64_t t = 0; t < at->tokens; t++) {
        double sum = 0.0;
        for (uint64_t i = 0; i < n; i++)
            sum += (double)in->x[t * in->ld + i] * (double)in->x[t * in->ld + i];
        assert_true(sum > 0.9 * (double)n &&
                    sum < 1.0001 * (double)n); /* 1e-6 is added to squares */
    }
}

/* What a point adds to the hidden states is its weight times the inputs that it gave. */
static void check_points(const size sizes[QC_LAYER_ALL_MATRICES])
{
    const int is_latent = sizes == latent, is_beside = sizes == beside;
    const uint64_t wide = sizes[QC_LAYER_O].cols;
    static const uint64_t lengths[] = {500, 300, 400, 100};
    static uint32_t ids[TOKENS];
    uint64_t spans[1] = {0};
    unsigned char turns[1] = {QC_LAYER_TURNED};
    qc_forward_shape shape = {.config = {.layers = 1,
                                         .hidden = HIDDEN,
                                         .intermediate = INTER,
                                         .heads = 4,
                                         .kv_heads = is_latent || is_beside ? 4 : 2,
                                         .head_dim = 6,
                                         .vocabulary = 8,
                                         .context = 512,
                                         .norm_eps = 1e-5},
                              .family = qc_family_of(is_latent   ? "deepseek_v3"
                                                     : is_beside ? "gpt_neox"
                                                                 : "llama"),
                              .parallel = is_beside,
                              .gate = is_beside ? QC_LAYER_GELU : QC_LAYER_SILU,
                              .windows = spans,
                              .turns = turns,
                              .turned = is_latent ? 2 : 6,
                              .turned_from = is_latent ? 4 : 0,
                              .value_dim = is_latent ? 3 : 6,
                              .q_rank = is_latent ? 5 : 0,
                              .kv_rank = is_latent ? 7 : 0,
                              .residual_scale = 1.0,
                              .rope = {.theta = 10000.0, .magnitude = 1.0}};
    const qc_forward_tools tools = {.threads = 2};
    const qc_forward_batch batch = {ids, lengths, 4, TOKENS, NULL};
    qc_forward_weights w = {0};
    qc_forward_cpu cpu;
    qc_error err = {0};
    for (int i = 0; i < QC_LAYER_ALL_MATRICES; i++) {
        if (sizes[i].rows == 0)
            continue;
        w.matrices[i].rows = sizes[i].rows;
        w.matrices[i].cols = sizes[i].cols;
        w.matrices[i].dtype = QC_DTYPE_F32;
        w.matrices[i].dense = w.matrices[i].owned = floats(sizes[i].rows * sizes[i].cols);
    }
    w.vectors[QC_LAYER_INPUT_NORM] = floats(2 * HIDDEN); /* layer norms have biases behind */
    w.vectors[QC_LAYER_POST_NORM] = floats(2 * HIDDEN);
    if (is_latent) {
        w.vectors[QC_LAYER_Q_A_NORM] = floats(5);
        w.vectors[QC_LAYER_KV_A_NORM] = floats(7);
        for (int i = 0; i < 7; i++)
            w.vectors[QC_LAYER_KV_A_NORM][i] = w.vectors[QC_LAYER_Q_A_NORM][i % 5] = 1.0f;
    }
    float *whole = floats(TOKENS * HIDDEN), *moved = floats(TOKENS * HIDDEN);
    float *before = floats(TOKENS * HIDDEN), *attended = floats(TOKENS * wide);
    double *y = calloc(TOKENS * HIDDEN, sizeof *y), *z = calloc(TOKENS * HIDDEN, sizeof *z);
    assert_true(y && z);
    memcpy(moved, whole, TOKENS * HIDDEN * sizeof *whole);
    assert_int_equal(qc_forward_cpu_create(&cpu, &shape, &tools, &batch, &err), QC_OK);
    assert_int_equal(qc_forward_cpu_layer(&cpu, &w, 0, whole, &err), QC_OK);
    for (int point = QC_AT_QKV; point <= QC_AT_END; point++) {
        const int of_latents = point == QC_AT_Q_B || point == QC_AT_KV_B;
        qc_forward_chunk at = {0};
        uint64_t seen = 0;
        if (of_latents && !is_latent)
            continue;
        unsigned chunks = 0;
        while (qc_forward_cpu_next(&cpu, &at)) {
            const qc_forward_pass pass = {.w = &w, .hidden = moved, .attended = attended};
            qc_forward_inputs in;
            memcpy(before, moved, TOKENS * HIDDEN * sizeof *before);
            assert_int_equal(at.start, seen);
            assert_int_equal(
                qc_forward_cpu_at(&cpu, &pass, &at, (qc_forward_point)point, &in, &err), QC_OK);
            seen += at.tokens;
            chunks++;
            if (point == QC_AT_O) {
                assert_int_equal(in.ld, wide);
                memcpy(attended + at.start * wide, in.x, at.tokens * wide * sizeof *in.x);
            }
            if (of_latents)
                check_latents(&in, &at, point == QC_AT_Q_B ? 5 : 7);
            int which = adds(point);
            if (which < 0)
                continue;
            if (is_beside && point == QC_AT_GATE) {
                assert_memory_equal(moved, before, TOKENS * HIDDEN * sizeof *before);
                continue;
            }
            if (point == QC_AT_GATE)
                product(&w.matrices[which], attended + at.start * wide, wide, at.tokens, y);
            else
                product(&w.matrices[which], in.x, in.ld, at.tokens, y);
            if (is_beside) {
                product(&w.matrices[QC_LAYER_O], attended + at.start * wide, wide, at.tokens, z);
                for (uint64_t i = 0; i < at.tokens * HIDDEN; i++)
                    y[i] += z[i];
            }
            const float *to = point == QC_AT_GATE ? moved : whole;
            for (uint64_t i = 0; i < at.tokens * HIDDEN; i++)
                assert_near((double)to[at.start * HIDDEN + i],
                            (double)before[at.start * HIDDEN + i] + y[i]);
        }
        assert_int_equal(seen, TOKENS);
        assert_int_equal(chunks, 2);
    }
    assert_memory_equal(moved, whole, TOKENS * HIDDEN * sizeof *whole);
    qc_forward_cpu_deinit(&cpu);
    qc_forward_weights_deinit(&w);
    qc_free(whole);
    qc_free(moved);
    qc_free(before);
    qc_free(attended);
    free(y);
    free(z);
}

TEST(points_are_the_layer)
{
    check_points(plain);
    check_points(latent);
    check_points(beside);
}

/* Windows are taken over all of the text, at most as many as asked for. */
TEST(windows_are_spread)
{
    uint32_t all[100];
    uint64_t length = 100;
    qc_error err = {0};
    for (uint32_t i = 0; i < 100; i++)
        all[i] = i;
    const qc_eval_ids ids = {all, &length, 1, 100};
    SCOPED(qc_eval_windows) w;
    assert_int_equal(qc_eval_windows_cut(&w, &ids, NULL, 0, 10, &err), QC_OK);
    qc_eval_windows_spread(&w, 100);
    assert_int_equal(w.count, 10);
    qc_eval_windows_spread(&w, 35);
    assert_int_equal(w.count, 3);
    assert_int_equal(w.tokens, 30);
    assert_int_equal(w.predicted, 27);
    for (uint32_t i = 0; i < 10; i++) {
        assert_int_equal(w.ids[i], 10 + i);
        assert_int_equal(w.ids[10 + i], 50 + i);
        assert_int_equal(w.ids[20 + i], 80 + i);
    }
    qc_eval_windows_spread(&w, 3); /* one stays */
    assert_int_equal(w.count, 1);
    assert_int_equal(w.ids[0], 50);
}
