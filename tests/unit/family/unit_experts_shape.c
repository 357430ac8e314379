/* What config.json says about experts: the defaults of each type, which layers have experts, and
 * every refusal. */
#include "convert/family/experts_shape.h"
#include "tests/fixtures/test.h"

#define LAYERS 5u

static qc_arena arena;
static qc_error err;

static qc_status read_config(qc_experts_shape *s, const char *members)
{
    qc_json *doc = NULL;
    char text[1024];
    (void)snprintf(text, sizeof text, "{%s}", members);
    assert_int_equal(qc_json_parse(&doc, text, strlen(text), 0, &err), QC_OK);
    qc_status st = qc_experts_shape_read(s, &arena, qc_json_root(doc), LAYERS, &err);
    qc_json_destroy(doc);
    return st;
}

static qc_experts_shape good(const char *members)
{
    qc_experts_shape s;
    if (read_config(&s, members) != QC_OK)
        fail_msg("%s: %s", members, err.msg);
    return s;
}

static void bad(const char *members, qc_status code, const char *words)
{
    qc_experts_shape s;
    assert_int_equal(read_config(&s, members), code);
    if (!strstr(err.msg, words))
        fail_msg("'%s' is not in: %s", words, err.msg);
}

static void layers(const qc_experts_shape *s, const char *expected)
{
    for (unsigned i = 0; i < LAYERS; i++)
        assert_int_equal(qc_experts_in(s, i), expected[i] == '1');
}

/* A row: type, experts, chosen, groups, groups chosen, normalized, scale, inner, shared, layers. */
TEST(defaults)
{
    static const struct {
        const char *config;
        qc_expert_scores scores;
        uint64_t experts, chosen, groups, groups_chosen;
        int normalized;
        float scale;
        uint64_t inner, shared;
        const char *layers;
    } rows[] = {
        {"\"mixtral\"", QC_SCORES_SOFTMAX, 8, 2, 1, 1, 1, 1.0f, 14336, 0, "11111"},
        {"\"qwen2_moe\"", QC_SCORES_SOFTMAX, 60, 4, 1, 1, 0, 1.0f, 1408, 5632, "11111"},
        {"\"qwen3_moe\"", QC_SCORES_SOFTMAX, 128, 8, 1, 1, 0, 1.0f, 768, 0, "11111"},
        {"\"olmoe\"", QC_SCORES_SOFTMAX, 64, 8, 1, 1, 0, 1.0f, 2048, 0, "11111"},
        {"\"glm4_moe\"", QC_SCORES_SIGMOID, 128, 8, 1, 1, 1, 1.0f, 1408, 1408, "01111"},
        {"\"deepseek_v3\"", QC_SCORES_SIGMOID, 256, 8, 8, 4, 1, 2.5f, 2048, 2048, "00011"},
        {"\"deepseek_v2\", \"num_experts_per_tok\": 6", QC_SCORES_SOFTMAX, 64, 6, 1, 1, 0, 1.0f,
         1407, 2814, "11111"},
        {"\"gpt_oss\"", QC_SCORES_OF_CHOSEN, 128, 4, 1, 1, 0, 1.0f, 2880, 0, "11111"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char text[128];
        (void)snprintf(text, sizeof text, "\"model_type\": %s", rows[i].config);
        const qc_experts_shape s = good(text);
        const qc_routing *r = &s.routing;
        assert_non_null(s.names);
        assert_true(r->scores == rows[i].scores && r->experts == rows[i].experts);
        assert_true(r->chosen == rows[i].chosen && r->groups == rows[i].groups);
        assert_true(r->groups_chosen == rows[i].groups_chosen);
        assert_true(r->normalized == rows[i].normalized && r->scale == rows[i].scale);
        assert_int_equal(s.inner, rows[i].inner);
        assert_int_equal(s.shared, rows[i].shared);
        layers(&s, rows[i].layers);
    }
    const qc_experts_shape none = good("\"model_type\": \"llama\", \"num_experts\": 4");
    assert_null(none.names);
    layers(&none, "00000");
}

/* DeepSeek-V2.5's fields, and those of a small qwen3_moe. */
TEST(fields)
{
    qc_experts_shape s =
        good("\"model_type\": \"deepseek_v2\", \"n_routed_experts\": 160, "
             "\"num_experts_per_tok\": 6, \"topk_method\": \"group_limited_greedy\", \"n_group\": "
             "8, \"topk_group\": 3, \"routed_scaling_factor\": 16.0, \"moe_intermediate_size\": "
             "1536, \"n_shared_experts\": 2, \"first_k_dense_replace\": 1, \"moe_layer_freq\": 1, "
             "\"norm_topk_prob\": false");
    assert_true(s.routing.groups == 8 && s.routing.groups_chosen == 3);
    assert_true(s.routing.group_rule == QC_GROUP_BY_BEST && s.routing.scale == 16.0f);
    assert_true(s.inner == 1536 && s.shared == 3072);
    layers(&s, "01111");
    s = good("\"model_type\": \"deepseek_v2\", \"num_experts_per_tok\": 6, \"n_group\": 8, "
             "\"topk_group\": 3, \"topk_method\": \"greedy\", \"n_shared_experts\": null");
    assert_true(s.routing.groups == 1 && s.shared == 0);
    s = good("\"model_type\": \"qwen3_moe\", \"num_experts\": 4, \"num_experts_per_tok\": 2, "
             "\"norm_topk_prob\": true, \"decoder_sparse_step\": 2, \"mlp_only_layers\": [3]");
    assert_true(s.routing.experts == 4 && s.routing.normalized);
    layers(&s, "01000");
    s = good("\"model_type\": \"gpt_oss\", \"swiglu_limit\": 5.5");
    assert_true(s.clamped && s.limit == 5.5f && s.alpha == 1.702f);
}

TEST(refusals)
{
    bad("\"model_type\": \"mixtral\", \"num_local_experts\": 0", QC_ERR_INPUT,
        "num_local_experts is 0");
    bad("\"model_type\": \"mixtral\", \"num_experts_per_tok\": 9", QC_ERR_INPUT,
        "num_experts_per_tok is 9, and there are 8 experts");
    bad("\"model_type\": \"deepseek_v2\"", QC_ERR_INPUT, "num_experts_per_tok is missing");
    bad("\"model_type\": \"deepseek_v2\", \"num_experts_per_tok\": 6, \"topk_method\": \"noaux\"",
        QC_ERR_UNSUPPORTED, "topk_method is 'noaux'");
    bad("\"model_type\": \"deepseek_v2\", \"num_experts_per_tok\": 6, \"norm_topk_prob\": true",
        QC_ERR_UNSUPPORTED, "norm_topk_prob is true");
    bad("\"model_type\": \"deepseek_v3\", \"n_group\": 7", QC_ERR_INPUT, "of 7 groups");
    bad("\"model_type\": \"deepseek_v3\", \"topk_group\": 9", QC_ERR_INPUT, "9 (topk_group)");
    bad("\"model_type\": \"deepseek_v3\", \"n_group\": 256", QC_ERR_INPUT, "of 256 groups");
    bad("\"model_type\": \"deepseek_v3\", \"n_routed_experts\": 16, \"topk_group\": 3",
        QC_ERR_INPUT, "8 experts cannot be chosen from 3");
    bad("\"model_type\": \"deepseek_v3\", \"moe_layer_freq\": 2", QC_ERR_UNSUPPORTED,
        "moe_layer_freq is 2");
    bad("\"model_type\": \"deepseek_v3\", \"routed_scaling_factor\": 0", QC_ERR_INPUT,
        "routed_scaling_factor is 0");
    bad("\"model_type\": \"glm4_moe\", \"norm_topk_prob\": 1", QC_ERR_INPUT, "norm_topk_prob");
    bad("\"model_type\": \"glm4_moe\", \"n_shared_experts\": 100000, \"moe_intermediate_size\": "
        "1000000",
        QC_ERR_INPUT, "n_shared_experts makes");
    bad("\"model_type\": \"qwen3_moe\", \"mlp_only_layers\": [5]", QC_ERR_INPUT,
        "names layer 5, but there are only 5 layers");
    bad("\"model_type\": \"qwen2_moe\", \"shared_expert_intermediate_size\": 0", QC_ERR_INPUT,
        "shared_expert_intermediate_size is 0");
    bad("\"model_type\": \"gpt_oss\", \"swiglu_limit\": -1", QC_ERR_INPUT, "swiglu_limit is -1");
}

int main(void)
{
    qc_arena_init(&arena);
    int failed = test_run_all(NULL);
    qc_arena_deinit(&arena);
    return failed;
}
