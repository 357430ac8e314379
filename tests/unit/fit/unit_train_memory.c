/* Training memory: against the figures of the ZeRO paper, against sums done by hand, and the search
 * against trying every batch. */
#include "convert/fit/train_memory.h"
#include "convert/fit/train_plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const qc_geometry geometry = {.layer_count = 32,
                                     .hidden = 4096,
                                     .intermediate = 11008,
                                     .heads = 32,
                                     .kv_heads = 8,
                                     .head_dim = 128,
                                     .vocab = 32000};

static qc_train_model model_of(uint64_t parameters)
{
    return (qc_train_model){.parameters = parameters,
                            .quantized_bytes = parameters / 2,
                            .rank_elems = 2000000,
                            .largest_weight = 45088768,
                            .largest_layer = 202383360,
                            .geometry = &geometry};
}

static qc_train_options options_of(qc_train_method method)
{
    return (qc_train_options){.on = 1, .method = method, .lora_rank = 16, .effective_batch = 32};
}

static uint64_t states(const qc_train_bytes *b)
{
    return b->parameters + b->gradients + b->optimizer;
}

/* Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, mixed precision Adam, 64 GPUs:
 * 120 GB, 31.4 GB, 16.6 GB and 1.9 GB. */
static void test_zero_paper(void **state)
{
    static const double gb[] = {120.0, 31.4, 16.6, 1.9};
    (void)state;
    qc_train_model m = model_of(7500000000);
    qc_train_options t = options_of(QC_TRAIN_FULL);
    qc_train_place place = {.gpus = 64, .tokens = 2048};
    for (t.zero = 0; t.zero <= 3; t.zero++) {
        qc_train_bytes b = qc_train_estimate(&m, &t, &place, 1);
        double got = (double)states(&b) / 1e9;
        assert_true(got > gb[t.zero] - 0.06 && got < gb[t.zero] + 0.06);
    }
}

static void test_states_by_hand(void **state)
{
    (void)state;
    qc_train_model m = model_of(1000000);
    qc_train_place one = {.gpus = 1, .tokens = 1};
    qc_train_options t = options_of(QC_TRAIN_FULL);
    qc_train_bytes b = qc_train_estimate(&m, &t, &one, 1);
    assert_int_equal(b.parameters, 2000000);
    assert_int_equal(b.gradients, 2000000);
    assert_int_equal(b.optimizer, 12000000);
    t.precision = QC_PRECISION_FP32; /* no second copy of the weights */
    b = qc_train_estimate(&m, &t, &one, 1);
    assert_int_equal(b.parameters, 4000000);
    assert_int_equal(b.gradients, 4000000);
    assert_int_equal(b.optimizer, 8000000);
    t.optimizer = QC_OPTIMIZER_SGD;
    b = qc_train_estimate(&m, &t, &one, 1);
    assert_int_equal(b.optimizer, 4000000);
    t.optimizer = QC_OPTIMIZER_ADAM8BIT; /* 2 bytes, and 8 per 256 */
    b = qc_train_estimate(&m, &t, &one, 1);
    assert_int_equal(b.optimizer, 2000000 + 3907 * 8);
    /* Adapters: float32 whatever the base is computed in. */
    t = options_of(QC_TRAIN_LORA);
    assert_int_equal(qc_train_trained(&m, &t), 32000000);
    b = qc_train_estimate(&m, &t, &one, 1);
    assert_int_equal(b.parameters, 2000000 + 128000000);
    assert_int_equal(b.gradients, 128000000);
    assert_int_equal(b.optimizer, 256000000);
    assert_int_equal(b.workspace, 0);
    t.method = QC_TRAIN_QLORA;
    b = qc_train_estimate(&m, &t, &one, 1);
    assert_int_equal(b.parameters, 500000 + 128000000);
    assert_int_equal(b.workspace, 45088768 * 2);
}

/* Bytes a token of what torch was measured to keep; see docs/training.md. */
static void test_activations_by_hand(void **state)
{
    (void)state;
    qc_train_model m = model_of(1000000);
    qc_train_place place = {.gpus = 1, .tokens = 1000};
    qc_train_options t = options_of(QC_TRAIN_FULL);
    uint64_t attention = (2 * 4096 + 2 * 1024) * 2 /* q, output; k, v */
                         + 32 * 4;                 /* log-sum-exp of every head */
    uint64_t layer = 4096 * 8 + 4096 * 8           /* two norms: float32 in, 16 bit twice out */
                     + attention + 4 * 11008 * 2;  /* gate, up, silu(gate), product */
    uint64_t loss = 4096 * (4 + 2 * 2) + 32000 * 14;
    qc_train_bytes b = qc_train_estimate(&m, &t, &place, 3);
    assert_int_equal(b.activations, 3000 * (32 * layer + loss));
    assert_int_equal(b.batch_data, 3000 * 24);
    t.checkpointing = 1; /* the loss outweighs one layer at work */
    b = qc_train_estimate(&m, &t, &place, 3);
    assert_int_equal(b.activations, 3000 * (32 * 4096 * 2 + loss));
    assert_int_equal(b.total, b.parameters + b.gradients + b.optimizer + b.activations +
                                  b.batch_data + b.workspace + b.context);
    t.precision = QC_PRECISION_FP32;
    b = qc_train_estimate(&m, &t, &place, 1);
    assert_int_equal(b.activations, 1000 * (32 * 4096 * 4 + 4096 * 12 + 32000 * 16));
    /* Adapters keep the inputs of q, k, v, gate, up; o; down in float32. */
    t = options_of(QC_TRAIN_LORA);
    layer = 4096 * 8 + attention + 3 * 11008 * 2 + 4 * (5 * 4096 + 4096 + 11008) + 7 * 16 * 4;
    b = qc_train_estimate(&m, &t, &place, 1);
    assert_int_equal(b.activations, 1000 * (32 * layer + 4096 * 4 + 32000 * 14));
    t.precision = QC_PRECISION_FP32; /* no conversion, no copies */
    layer = 4096 * 8 + 2 * attention - 32 * 4 + 3 * 11008 * 4 + 2 * 4096 * 4 + 11008 * 4 + 448;
    b = qc_train_estimate(&m, &t, &place, 1);
    assert_int_equal(b.activations, 1000 * (32 * layer + 4096 * 4 + 32000 * 16));
}

/* With few words the peak is in the layer that is recomputed, not at the loss. */
static void test_activations_of_a_small_vocabulary(void **state)
{
    (void)state;
    qc_geometry small = geometry;
    small.vocab = 64;
    qc_train_model m = model_of(1000000);
    m.geometry = &small;
    qc_train_place place = {.gpus = 1, .tokens = 1000};
    qc_train_options t = options_of(QC_TRAIN_FULL);
    uint64_t attention = (2 * 4096 + 2 * 1024) * 2 + 32 * 4;
    uint64_t layer = 4096 * 16 + attention + 4 * 11008 * 2;
    t.checkpointing = 1;
    qc_train_bytes b = qc_train_estimate(&m, &t, &place, 1);
    assert_int_equal(b.activations, 1000 * (32 * 4096 * 2 + layer + 4 * 11008 + 2 * 4096 + 64 * 2));
    t.method = QC_TRAIN_QLORA;
    layer = 4096 * 8 + attention + 6 * 11008 + 4 * (6 * 4096 + 11008) + 7 * 16 * 4;
    b = qc_train_estimate(&m, &t, &place, 1);
    assert_int_equal(b.activations,
                     1000 * (32 * 4096 * 2 + layer + 8 * 11008 + 12 * 4096 + 64 * 2));
}

static void test_communication(void **state)
{
    (void)state;
    qc_train_model m = model_of(7000000000);
    qc_train_options t = options_of(QC_TRAIN_FULL);
    qc_train_place place = {.gpus = 4, .tokens = 1};
    assert_int_equal(qc_train_estimate(&m, &t, &place, 1).workspace, 14000000000);
    t.zero = 2;
    assert_int_equal(qc_train_estimate(&m, &t, &place, 1).workspace, 1000000000);
    t.zero = 3;
    assert_int_equal(qc_train_estimate(&m, &t, &place, 1).workspace,
                     1000000000 + 4 * (uint64_t)202383360);
}

static void test_search_is_exhaustive(void **state)
{
    (void)state;
    qc_train_model m = model_of(3000000000);
    qc_train_options t = options_of(QC_TRAIN_QLORA);
    t.effective_batch = 64;
    for (uint64_t budget = 1000000000; budget < 200000000000; budget += 777777777) {
        qc_train_place place = {.gpus = 2, .budget_bytes = budget, .tokens = 4096};
        uint64_t want = 0;
        while (want < 32 && qc_train_estimate(&m, &t, &place, want + 1).total <= budget)
            want++;
        assert_int_equal(qc_train_largest_batch(&m, &t, &place), want);
    }
}

static void test_settings(void **state)
{
    qc_train_setting s[QC_TRAIN_MAX_SETTINGS];
    (void)state;
    qc_train_model m = model_of(7000000000);
    qc_train_options wanted = options_of(QC_TRAIN_FULL);
    qc_train_place place = {.gpus = 4, .budget_bytes = 72000000000, .tokens = 2048};
    unsigned n = qc_train_settings(&m, &wanted, &place, s);
    assert_true(n >= 3 && n <= QC_TRAIN_MAX_SETTINGS);
    assert_int_equal(s[0].options.method, QC_TRAIN_FULL);
    assert_int_equal(s[n - 1].options.method, QC_TRAIN_QLORA);
    for (unsigned i = 0; i < n; i++) {
        assert_true(s[i].micro_batch > 0);
        assert_true(s[i].bytes.total <= place.budget_bytes);
        assert_true(s[i].micro_batch * s[i].accumulation * 4 >= 32);
        assert_true(s[i].micro_batch * (s[i].accumulation - 1) * 4 < 32);
    }
    /* What was asked for is kept. */
    wanted.method_given = wanted.zero_given = wanted.checkpointing_given = 1;
    wanted.optimizer_given = 1;
    wanted.zero = 2;
    wanted.checkpointing = 1;
    wanted.optimizer = QC_OPTIMIZER_SGD;
    n = qc_train_settings(&m, &wanted, &place, s);
    assert_int_equal(n, 1);
    assert_int_equal(s[0].options.zero, 2);
    assert_int_equal(s[0].options.checkpointing, 1);
    assert_int_equal(s[0].options.optimizer, QC_OPTIMIZER_SGD);
    /* Where nothing fits, the setting that is nearest, and it says so. */
    place.budget_bytes = 1000000;
    n = qc_train_settings(&m, &wanted, &place, s);
    assert_int_equal(n, 1);
    assert_int_equal(s[0].micro_batch, 0);
    assert_true(s[0].bytes.total > place.budget_bytes);
}

static void test_sizes_saturate(void **state)
{
    (void)state;
    qc_train_model m = model_of(UINT64_MAX / 2);
    qc_train_options t = options_of(QC_TRAIN_FULL);
    qc_train_place place = {.gpus = 1, .tokens = UINT64_MAX / 8, .budget_bytes = UINT64_MAX - 1};
    assert_true(qc_train_estimate(&m, &t, &place, 1000).total == UINT64_MAX);
    assert_int_equal(qc_train_largest_batch(&m, &t, &place), 0);
}

static void test_labels(void **state)
{
    char text[QC_TRAIN_LABEL_BYTES];
    (void)state;
    qc_train_options t = options_of(QC_TRAIN_QLORA);
    t.optimizer = QC_OPTIMIZER_ADAM8BIT;
    t.checkpointing = 1;
    t.zero = 2;
    assert_string_equal(qc_train_label(text, &t),
                        "QLoRA r16, bf16, 8-bit Adam, checkpointing, ZeRO-2");
    t = options_of(QC_TRAIN_FULL);
    assert_string_equal(qc_train_label(text, &t), "full, bf16, AdamW");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_zero_paper),
        cmocka_unit_test(test_states_by_hand),
        cmocka_unit_test(test_activations_by_hand),
        cmocka_unit_test(test_activations_of_a_small_vocabulary),
        cmocka_unit_test(test_communication),
        cmocka_unit_test(test_search_is_exhaustive),
        cmocka_unit_test(test_settings),
        cmocka_unit_test(test_sizes_saturate),
        cmocka_unit_test(test_labels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
