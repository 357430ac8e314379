/* What engines hold as one module is found by name, gets one choice by rules, and is to be skipped
 * under the engines' name. */
#include "tests/fixtures/recipe_fixture.h"

#define ATTENTION "model.layers.0.self_attn."
#define MLP       "model.layers.0.mlp."

static void expect_group(const fixture *f, const char *name, const char *fused, unsigned count)
{
    qc_fused_group g;
    const qc_checkpoint_tensor *t = qc_checkpoint_find(&f->model, name);
    assert_non_null(t);
    int found = qc_fused_group_of(&g, &f->model, (uint32_t)(t - f->model.tensors));
    if (found != (fused != NULL))
        fail_msg("%s: in a group: %d", name, found);
    if (!fused)
        return;
    assert_string_equal(g.row->fused, fused);
    assert_int_equal(g.count, count);
}

TEST(groups_by_name)
{
    static const struct {
        const char *name, *fused;
        unsigned count;
    } cases[] = {
        {ATTENTION "q_proj.weight", "qkv_proj", 3},
        {ATTENTION "k_proj.weight", "qkv_proj", 3},
        {ATTENTION "v_proj.weight", "qkv_proj", 3},
        {ATTENTION "o_proj.weight", NULL, 0},
        {MLP "gate_proj.weight", "gate_up_proj", 2},
        {MLP "up_proj.weight", "gate_up_proj", 2},
        {MLP "down_proj.weight", NULL, 0},
        {"model.layers.1.mlp.up_proj.weight", NULL, 0}, /* no gate beside it */
        {"model.layers.1.self_attn.q_proj.weight", "qkv_proj", 2},
        {"model.layers.1.self_attn.k_proj.weight", "qkv_proj",
         2}, /* keys that are the values, too */
        {"model.layers.2.self_attn.q_a_proj.weight", "fused_qkv_a_proj", 2},
        {"model.layers.2.self_attn.kv_a_proj_with_mqa.weight", "fused_qkv_a_proj", 2},
        {"encoder.layer.0.attention.self.query.weight", "qkv_proj", 3},
        {"encoder.layer.0.attention.self.key.weight", "qkv_proj", 3},
        {"encoder.layer.0.attention.self.value.weight", "qkv_proj", 3},
        {"model.decoder.layers.0.encoder_attn.q_proj.weight", NULL, 0},
        {"model.decoder.layers.0.encoder_attn.k_proj.weight", "kv_proj", 2},
        {"model.decoder.layers.0.encoder_attn.v_proj.weight", "kv_proj", 2},
        {"model.layers.3.cross_attn.q_proj.weight", NULL, 0},
        {"model.layers.3.cross_attn.k_proj.weight", NULL, 0},
        {"model.layers.4.block_sparse_moe.experts.11.w1.weight", "gate_up_proj", 2},
        {"model.layers.4.block_sparse_moe.experts.11.w3.weight", "gate_up_proj", 2},
        {"q_proj.weight", "qkv_proj", 2},
        {"k_proj.weight", "qkv_proj", 2},
    };
    SCOPED(fixture) f = {0};
    fixture_init(&f, QC_TO_NF4);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        fixture_add(&f, cases[i].name, 64, 64);
    qsort(f.model.tensors, f.model.tensor_count, sizeof *f.model.tensors, fixture_order);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_group(&f, cases[i].name, cases[i].fused, cases[i].count);
    assert_int_equal(qc_expert_stem("a.mlp.experts.17.up_proj.weight"), strlen("a.mlp.experts"));
    assert_int_equal(qc_expert_stem("experts.0.w1.weight"), strlen("experts"));
    assert_int_equal(qc_expert_stem("a.mlp.shared_experts.up_proj.weight"), 0);
    assert_int_equal(qc_expert_stem("a.shared_experts.1.up_proj.weight"), 0);
    assert_int_equal(qc_expert_stem("a.experts.up_proj.weight"), 0);
}

static const char *const layer[] = {ATTENTION "q_proj.weight", ATTENTION "k_proj.weight",
                                    ATTENTION "v_proj.weight", MLP "gate_proj.weight",
                                    MLP "up_proj.weight",      NULL};

static void add_layer(fixture *f)
{
    fixture_config(f, "{\"model_type\":\"llama\",\"vocab_size\":512}");
    for (const char *const *name = layer; *name; name++)
        fixture_add(f, *name, 64, 64);
}

/* Checks what --to and the rules make of q, k, v, gate and up, one letter for each. */
static void expect_choice(qc_to to, int split, const char *rules, const char *want)
{
    char got[6] = "";
    SCOPED(fixture) f = {0};
    fixture_init(&f, to);
    f.options.split_fused = split;
    add_layer(&f);
    fixture_rules(&f, rules);
    fixture_make_ok(&f);
    for (unsigned i = 0; i < 5; i++)
        got[i] = qc_scheme_is_quantized(fixture_entry(&f, layer[i])->scheme) ? 'Q' : '-';
    assert_string_equal(got, want);
}

TEST(rules_are_widened)
{
    expect_choice(QC_TO_NF4, 0, "", "QQQQQ");
    expect_choice(QC_TO_NF4, 0, "-*.q_proj.*", "---QQ");
    expect_choice(QC_TO_NF4, 1, "-*.q_proj.*", "-QQQQ");
    expect_choice(QC_TO_INT8, 0, "-*.v_proj.* -*up_proj*", "-----");
    expect_choice(QC_TO_NF4, 0, "-*self_attn* +*.k_proj.*", "QQQQQ"); /* the last rule counts */
    expect_choice(QC_TO_NF4, 1, "-*self_attn* +*.k_proj.*", "-Q-QQ");
    expect_choice(QC_TO_NF4, 0, "+*.k_proj.* -*self_attn*", "---QQ");
    expect_choice(QC_TO_AUTO, 0, "-*gate*", "QQQ--");
    expect_choice(QC_TO_BF16, 0, "-*gate*", "-----");
}

TEST(what_the_warning_says)
{
    SCOPED(fixture) f = {0};
    fixture_init(&f, QC_TO_NF4);
    add_layer(&f);
    fixture_add(&f, "model.layers.1.self_attn.q_proj.weight", 64, 64);
    fixture_add(&f, "model.layers.1.self_attn.k_proj.weight", 64, 64);
    fixture_rule(&f, 0, "*gate_proj* of none"); /* refused before anything is widened */
    fixture_make_fails(&f, QC_ERR_USAGE, "--keep", "matches no tensor");
    f.options.rule_count = 0;
    fixture_rule(&f, 0, "*mlp*");
    fixture_rule(&f, 0, "*.q_proj.*");
    fixture_make_ok(&f);
    assert_int_equal(f.recipe.widened.count, 2);
    assert_int_equal(f.recipe.widened.list[0].groups, 0);
    const qc_fused_widening *w = &f.recipe.widened.list[1];
    assert_int_equal(w->groups, 2);
    assert_string_equal(w->row->fused, "qkv_proj");
    assert_string_equal(w->first, "model.layers.0.self_attn");
    assert_string_equal(w->named, "q_proj");
    assert_string_equal(w->added, "k_proj and v_proj");
    assert_string_equal(fixture_entry(&f, ATTENTION "v_proj.weight")->why,
                        "--keep *.q_proj.*, for qkv_proj");
    assert_string_equal(fixture_entry(&f, ATTENTION "q_proj.weight")->why, "--keep *.q_proj.*");
}

/* A member that cannot be quantized leaves the group split, whatever the rule says. */
TEST(members_that_cannot)
{
    SCOPED(fixture) f = {0};
    fixture_init(&f, QC_TO_NF4);
    add_layer(&f);
    fixture_add_dims(&f, "model.layers.1.mlp.gate_proj.weight", QC_DTYPE_I64, 2,
                     (uint64_t[]){64, 64});
    fixture_add(&f, "model.layers.1.mlp.up_proj.weight", 64, 64);
    fixture_rule(&f, 0, "*.1.mlp.*");
    fixture_rule(&f, 1, "*.1.mlp.up*");
    fixture_make_ok(&f);
    fixture_expect(&f, "model.layers.1.mlp.gate_proj.weight", QC_SCHEME_KEEP, QC_ROLE_LINEAR);
    fixture_expect(&f, "model.layers.1.mlp.up_proj.weight", QC_SCHEME_NF4, QC_ROLE_LINEAR);
    assert_int_equal(f.recipe.widened.list[1].groups, 0);
    assert_false(fixture_skips(&f, "model.layers.1.mlp.gate_up_proj"));
}

TEST(skip_lists_have_the_engines_names)
{
    SCOPED(fixture) f = {0};
    fixture_init(&f, QC_TO_NF4);
    add_layer(&f);
    fixture_add(&f, "model.layers.1.self_attn.q_a_proj.weight", 64, 64);
    fixture_add(&f, "model.layers.1.self_attn.kv_a_proj_with_mqa.weight", 64, 64);
    fixture_rule(&f, 0, "*q_proj*");
    fixture_rule(&f, 0, "*q_a_proj*");
    fixture_make_ok(&f);
    fixture_expect_skips(&f, "lm_head model.layers.0.self_attn.k_proj "
                             "model.layers.0.self_attn.q_proj model.layers.0.self_attn.qkv_proj "
                             "model.layers.0.self_attn.v_proj "
                             "model.layers.1.self_attn.fused_qkv_a_proj "
                             "model.layers.1.self_attn.fused_qkv_a_proj_with_mqa "
                             "model.layers.1.self_attn.kv_a_proj_with_mqa "
                             "model.layers.1.self_attn.q_a_proj");
    fixture_init(&f, QC_TO_NF4); /* a split group has no such name: part of it is quantized */
    f.options.split_fused = 1;
    add_layer(&f);
    fixture_rule(&f, 0, "*q_proj*");
    fixture_make_ok(&f);
    fixture_expect_skips(&f, "lm_head model.layers.0.self_attn.q_proj");
    fixture_init(&f,
                 QC_TO_NF4); /* the other names that the group may have in memory, and experts */
    fixture_config(&f, "{\"model_type\":\"llava\",\"text_config\":{\"vocab_size\":512}}");
    fixture_add(&f, "language_model.model.layers.0.mlp.up_proj.weight", 64, 64);
    fixture_add(&f, "language_model.model.layers.0.mlp.gate_proj.weight", 64, 64);
    fixture_add(&f, "language_model.model.layers.1.mlp.experts.0.up_proj.weight", 64, 64);
    fixture_add(&f, "language_model.model.layers.1.mlp.experts.0.gate_proj.weight", 64, 64);
    fixture_add(&f, "language_model.model.layers.2.mlp.up_proj.weight", 64, 64);
    fixture_rule(&f, 0, "*.0.*up_proj*");
    fixture_make_ok(&f);
    assert_true(fixture_skips(&f, "language_model.model.layers.0.mlp.gate_up_proj"));
    assert_true(fixture_skips(&f, "model.language_model.layers.0.mlp.gate_up_proj"));
    assert_true(fixture_skips(&f, "language_model.model.layers.1.mlp.experts.0.gate_proj"));
    assert_false(fixture_skips(&f, "language_model.model.layers.1.mlp.experts.0.gate_up_proj"));
}
