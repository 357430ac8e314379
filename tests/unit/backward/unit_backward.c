/* The backward pass on small models of tests/data, one of them a mixture of experts: neither
 * threads, nor files instead of memory, nor blocks or the weights that are wanted change a bit; and
 * what ends it early. Values are compared with PyTorch's in cli_families. */
#include "base/alloc.h"
#include "base/interrupt.h"
#include "convert/backward/backward.h"
#include "tests/fixtures/test.h"
#include "tests/fixtures/test_model.h"

#include <math.h>

enum { TOKENS = 90, LAYERS = 4 };

typedef struct {
    qc_checkpoint *checkpoint;
    qc_arena arena;
    qc_forward_tensors tensors;
    qc_forward_source source;
    uint32_t ids[TOKENS];
    uint64_t lengths[3];
    qc_forward_batch batch;
    qc_backward_task task;
    uint64_t from; /* weights of layers from here on are wanted */
    double done;
    char folder[64];
} world;

static int wants(const void *ctx, uint64_t layer, uint64_t which)
{
    const world *w = ctx;
    return layer >= w->from && which != QC_LAYER_K;
}

static void did(void *ctx, double operations)
{
    ((world *)ctx)->done += operations;
}

static int open_world(void **state, const char *model)
{
    static world w;
    qc_error err = {0};
    w = (world){0};
    if (qc_blas_open(&w.task.blas, &err) != QC_OK)
        return 0; /* *state stays NULL */
    qc_arena_init(&w.arena);
    test_folder(w.folder, sizeof w.folder);
    test_must(qc_checkpoint_open(&w.checkpoint, model, &err), &err);
    w.source =
        (qc_forward_source){.checkpoint = w.checkpoint, .ops = qc_quant_ops_for(QC_ISA_SCALAR)};
    test_must(qc_st_cursor_create(&w.source.cursor, &err), &err);
    test_must(qc_forward_tensors_find(&w.tensors, &w.arena, w.checkpoint, NULL, &err), &err);
    assert_int_equal(w.tensors.shape.config.layers, LAYERS);
    for (uint32_t i = 0; i < TOKENS; i++)
        w.ids[i] = i * i % 251;
    w.lengths[0] = 49;
    w.lengths[1] = 1;
    w.lengths[2] = 40;
    w.batch = (qc_forward_batch){w.ids, w.lengths, 3, TOKENS, NULL};
    w.task = (qc_backward_task){.source = &w.source,
                                .tensors = &w.tensors,
                                .batch = &w.batch,
                                .tools = {.threads = 2},
                                .blas = w.task.blas,
                                .block = 4096,
                                .folder = w.folder,
                                .memory = UINT64_MAX,
                                .wants = wants,
                                .did = did,
                                .ctx = &w};
    *state = &w;
    return 0;
}

static int open_dense(void **state)
{
    return open_world(state, QC_TEST_DATA "/kjv-llama/model");
}

static int open_mixture(void **state)
{
    return open_world(state, QC_TEST_DATA "/kjv-moe/model");
}

static int close_world(void **state)
{
    world *w = *state;
    if (!w)
        return 0;
    qc_st_cursor_destroy(w->source.cursor);
    qc_checkpoint_close(w->checkpoint);
    qc_arena_deinit(&w->arena);
    return 0;
}

static world *world_of(void **state)
{
    if (!*state)
        skip();
    return *state;
}

static qc_backward *run(const qc_backward_task *task)
{
    qc_error err = {0};
    qc_backward *b = NULL;
    test_must(qc_backward_run(&b, task, &err), &err);
    return b;
}

static uint64_t rows_of(const world *w, uint64_t layer, uint64_t which)
{
    return qc_backward_linear(&w->tensors, layer, which)->rows;
}

static int is_made(const world *w, const qc_backward *b, uint64_t layer, uint64_t which)
{
    const int dense = which < QC_LAYER_ALL_MATRICES;
    return which != QC_LAYER_K && rows_of(w, layer, which) > 0 &&
           (dense || qc_backward_tokens(b, layer, which) > 0);
}

static void same(const world *w, const qc_backward *a, const qc_backward *b, uint64_t from)
{
    for (uint64_t l = from; l < LAYERS; l++)
        for (uint64_t i = 0; i < qc_backward_count(&w->tensors, l); i++) {
            const uint64_t n = rows_of(w, l, i);
            const float *x = qc_backward_moments(a, l, i), *y = qc_backward_moments(b, l, i);
            assert_int_equal(x != NULL, is_made(w, a, l, i));
            assert_int_equal(y != NULL, x != NULL);
            assert_int_equal(qc_backward_tokens(a, l, i), qc_backward_tokens(b, l, i));
            if (x)
                assert_memory_equal(x, y, (size_t)(n * n) * sizeof *x);
        }
}

/* All that are wanted, also of experts that no token went to. */
static uint64_t moments_bytes(const world *w)
{
    uint64_t bytes = 0;
    for (uint64_t l = 0; l < LAYERS; l++)
        for (uint64_t i = 0; i < qc_backward_count(&w->tensors, l); i++)
            if (i != QC_LAYER_K)
                bytes += rows_of(w, l, i) * rows_of(w, l, i) * sizeof(float);
    return bytes;
}

static void moments_are_moments(void **state)
{
    world *w = world_of(state);
    qc_backward *b = run(&w->task);
    for (uint64_t l = 0; l < LAYERS; l++)
        for (uint64_t i = 0; i < qc_backward_count(&w->tensors, l); i++) {
            const uint64_t n = rows_of(w, l, i);
            const float *g = qc_backward_moments(b, l, i);
            for (uint64_t r = 0; g && r < n; r++) {
                assert_true(g[r * n + r] > 0.0f);
                for (uint64_t c = 0; c < r; c++) {
                    assert_true(g[r * n + c] == g[c * n + r]);
                    assert_true(fabsf(g[r * n + c]) <=
                                1.001f * sqrtf(g[r * n + r]) * sqrtf(g[c * n + c]));
                }
            }
        }
    qc_backward_close(b);
}

static void nothing_else_counts(void **state)
{
    world *w = world_of(state);
    const qc_backward_outlook ahead = qc_backward_ahead(&w->task);
    qc_backward_task task = w->task;
    w->done = 0.0;
    qc_backward *whole = run(&w->task);
    assert_true(fabs(w->done / ahead.operations - 1.0) < 1e-9);
    assert_int_equal(ahead.disk, 0);
    task.tools.threads = 3;
    task.memory = 0; /* files */
    assert_true(qc_backward_ahead(&task).disk > 0);
    assert_int_equal(qc_backward_ahead(&task).kept, 0);
    assert_int_equal(ahead.kept, moments_bytes(w));
    qc_backward *other = run(&task);
    same(w, whole, other, 0);
    qc_backward_close(other);
    w->from = 2;
    assert_true(qc_backward_ahead(&w->task).operations < ahead.operations);
    other = run(&w->task);
    assert_null(qc_backward_moments(other, 1, QC_LAYER_Q));
    same(w, whole, other, 2);
    qc_backward_close(other);
    w->from = 0;
    qc_backward_close(whole);
}

static void blocks_are_parts(void **state)
{
    enum { BLOCK = 50 };
    world *w = world_of(state);
    qc_backward_task task = w->task;
    qc_backward *whole = run(&w->task);
    task.block = BLOCK;
    qc_backward *parts = run(&task);
    for (uint64_t i = 0; i < qc_backward_count(&w->tensors, 1); i++) {
        const uint64_t n = rows_of(w, 1, i);
        const float *g = qc_backward_moments(whole, 1, i), *p = qc_backward_moments(parts, 1, i);
        float most = 0.0f;
        for (uint64_t k = 0; g && k < n; k++)
            most = fmaxf(most, g[k * n + k]);
        for (uint64_t at = 0; g && at < n; at += BLOCK, p += BLOCK * BLOCK)
            for (uint64_t r = 0; r < BLOCK; r++)
                for (uint64_t c = 0; c < BLOCK; c++) {
                    const int in = at + r < n && at + c < n;
                    const float want = in ? g[(at + r) * n + at + c] : 0.0f;
                    assert_true(fabsf(p[r * BLOCK + c] - want) <= 1e-5f * most);
                }
    }
    qc_backward_close(parts);
    qc_backward_close(whole);
}

/* All experts that tokens went to have moments of those tokens, and a model's tokens go to as many
 * experts as it says. */
static void tokens_of_experts(void **state)
{
    world *w = world_of(state);
    const qc_routing *r = &w->tensors.shape.experts.routing;
    qc_backward *b = run(&w->task);
    for (uint64_t l = 0; l < LAYERS; l++) {
        uint64_t all = 0;
        for (uint64_t e = 0; e < r->experts; e++) {
            const uint64_t tokens = qc_backward_tokens(b, l, qc_expert_number(e, QC_EXPERT_DOWN));
            all += tokens;
            for (int part = 0; part < QC_EXPERT_MATRICES; part++) {
                const uint64_t which = qc_expert_number(e, part);
                assert_int_equal(qc_backward_tokens(b, l, which), tokens);
                assert_int_equal(qc_backward_moments(b, l, which) != NULL, tokens > 0);
            }
        }
        assert_int_equal(all, TOKENS * r->chosen);
        assert_null(qc_backward_moments(b, l, qc_expert_number(r->experts, 0))); /* shared */
        assert_int_equal(qc_backward_tokens(b, l, QC_LAYER_Q), TOKENS);
    }
    qc_backward_close(b);
}

static void ends_early(void **state)
{
    world *w = world_of(state);
    qc_backward_task task = w->task;
    qc_backward *b = NULL;
    qc_error err = {0};
    qc_interrupt();
    assert_int_equal(qc_backward_run(&b, &task, &err), QC_ERR_INTERRUPTED);
    qc_interrupt_clear();
    assert_null(b);
    task.memory = 0;
    task.folder = "/nowhere";
    assert_int_equal(qc_backward_run(&b, &task, &err), QC_ERR_IO);
    assert_non_null(strstr(err.msg, "/nowhere"));
    assert_null(b);
}

static void says_what_it_does_not_make(void **state)
{
    world *w = world_of(state);
    qc_forward_shape s = w->tensors.shape;
    assert_null(qc_backward_not_made(&s));
    s.cross = (unsigned char[LAYERS]){0, 1};
    assert_non_null(strstr(qc_backward_not_made(&s), "images"));
    s.config.encoder = 1;
    assert_non_null(strstr(qc_backward_not_made(&s), "no head"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(moments_are_moments),        cmocka_unit_test(nothing_else_counts),
        cmocka_unit_test(blocks_are_parts),           cmocka_unit_test(ends_early),
        cmocka_unit_test(says_what_it_does_not_make),
    };
    const struct CMUnitTest of_mixtures[] = {
        cmocka_unit_test(moments_are_moments), cmocka_unit_test(nothing_else_counts),
        cmocka_unit_test(blocks_are_parts), cmocka_unit_test(tokens_of_experts)};
    return cmocka_run_group_tests(tests, open_dense, close_world) +
           cmocka_run_group_tests(of_mixtures, open_mixture, close_world);
}
