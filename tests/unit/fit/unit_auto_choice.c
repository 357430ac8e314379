/* --to auto from names and shapes to schemes: groups, importance, devices, the recipe. */
#include "convert/fit/auto_choice.h"
#include "tests/fixtures/recipe_fixture.h"

#include <math.h>

static const char config[] =
    "{\"model_type\": \"llama\", \"hidden_size\": 256, \"intermediate_size\": 512, "
    "\"num_hidden_layers\": 4, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "
    "\"vocab_size\": 1000, \"max_position_embeddings\": 128}";

enum { LAYERS = 4 };

static const qc_call call = {.threads = 1};
static qc_plan_options plan_options; /* but for its recipe's, which are the fixture's */

static void llama(fixture *f)
{
    char name[128];
    fixture_init(f, QC_TO_AUTO);
    fixture_config(f, config);
    fixture_add(f, "model.embed_tokens.weight", 1000, 256);
    fixture_add(f, "lm_head.weight", 1000, 256);
    fixture_add_1d(f, "model.norm.weight", 256);
    for (int i = 0; i < LAYERS; i++) {
        static const struct {
            const char *name;
            uint64_t rows, cols;
        } w[] = {{"self_attn.q_proj", 256, 256}, {"self_attn.k_proj", 128, 256},
                 {"self_attn.v_proj", 128, 256}, {"self_attn.o_proj", 256, 256},
                 {"mlp.gate_proj", 512, 256},    {"mlp.up_proj", 512, 256},
                 {"mlp.down_proj", 256, 512}};
        for (size_t k = 0; k < sizeof w / sizeof *w; k++) {
            (void)snprintf(name, sizeof name, "model.layers.%d.%s.weight", i, w[k].name);
            fixture_add(f, name, w[k].rows, w[k].cols);
        }
    }
    plan_options.fit = (qc_fit_options){.margin = 1,
                                        .context = 16,
                                        .batch = 1,
                                        .images = 1,
                                        .kv_bits = 16,
                                        .cuda_context_bytes = 0};
}

static qc_status choose(fixture *f, qc_auto_result *r, const char *vram)
{
    qc_geometry g;
    qc_segments s;
    fixture_make_ok(f);
    assert_int_equal(qc_geometry_read(&g, &f->arena, f->model.config, &f->err), QC_OK);
    assert_int_equal(qc_segments_make(&s, &f->arena, &f->model, &f->recipe, &g, &f->err), QC_OK);
    assert_int_equal(qc_budget_parse(&plan_options.fit.vram, &f->arena, vram, &f->err), QC_OK);
    plan_options.recipe = f->options;
    qc_plan_subject subject = {&call, &f->model, &g, 0, NULL, NULL};
    return qc_auto_choose(r, &f->arena, &f->recipe, &subject, &s, &plan_options, &f->err);
}

static void choose_ok(fixture *f, qc_auto_result *r, const char *vram)
{
    if (choose(f, r, vram) != QC_OK)
        fail_msg("%s", f->err.msg);
}

static uint32_t entries_of(const fixture *f, qc_scheme scheme, uint32_t block_elems)
{
    uint32_t n = 0;
    for (size_t i = 0; i < f->model.tensor_count; i++)
        n += f->recipe.entries[i].scheme == scheme &&
             f->recipe.entries[i].block_elems == block_elems &&
             f->recipe.entries[i].role == QC_ROLE_LINEAR;
    return n;
}

TEST(test_schemes_option)
{
    unsigned c = 0;
    qc_error err = {0};
    assert_int_equal(qc_candidates_parse(&(qc_recipe_options){.schemes = NULL}, &c, &err), QC_OK);
    assert_int_equal(c, 7 | 1u << QC_CANDIDATE_16BIT);
    assert_int_equal(qc_candidates_parse(&(qc_recipe_options){.schemes = "int8,nf4-32"}, &c, &err),
                     QC_OK);
    assert_int_equal(c, (1u << QC_CANDIDATE_INT8) | (1u << QC_CANDIDATE_NF4_32));
    static const char *const bad[] = {"", "nf4,", "nf", "nf4, int8", "nf4-64", "NF4"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(qc_candidates_parse(&(qc_recipe_options){.schemes = bad[i]}, &c, &err),
                         QC_ERR_USAGE);
        assert_non_null(strstr(err.msg, "nf4, nf4-32, int8 and 16bit"));
    }
}

static void importance_is(const char *name, double want)
{
    double got = qc_auto_importance(name);
    if (fabs(got - want) > 1e-12)
        fail_msg("%s: %g, expected %g", name, got, want);
}

TEST(test_importance)
{
    importance_is("model.layers.3.self_attn.q_proj.weight", 0.5);
    importance_is("encoder.layer.0.attention.self.key.weight", 0.5);
    importance_is("model.layers.3.self_attn.v_proj.weight", 1);
    importance_is("model.layers.3.mlp.experts.*.down_proj.weight", 1);
    importance_is("model.layers.0.self_attn.qkv_proj.weight", 2);
    importance_is("model.layers.0.self_attn.kv_b_proj.weight", 1.5);
    importance_is("lm_head.weight", 1);
}

TEST(test_from_all_to_nothing)
{
    SCOPED(fixture) f = {0};
    qc_auto_result r;
    llama(&f);
    choose_ok(&f, &r, "100MB"); /* everything as it is */
    assert_true(r.fits && !r.measured && !r.mixed);
    assert_int_equal(r.group_count, 7 * LAYERS);
    assert_int_equal(entries_of(&f, QC_SCHEME_KEEP, 0), 7 * LAYERS);
    assert_true(fixture_skips(&f, "model.layers.2.mlp.up_proj"));
    assert_true(fixture_skips(&f, "lm_head"));
    choose_ok(&f, &r, "1MB"); /* not even the smallest fits, but that is taken */
    assert_false(r.fits);
    assert_int_equal(entries_of(&f, QC_SCHEME_NF4, 64), 7 * LAYERS);
    assert_false(fixture_skips(&f, "model.layers.2.mlp.up_proj"));
}

TEST(test_between)
{
    SCOPED(fixture) f = {0};
    qc_auto_result r;
    double before = HUGE_VAL;
    uint32_t kinds = 0;
    llama(&f);
    for (int kb = 2000; kb <= 9000; kb += 100) {
        char vram[32];
        (void)snprintf(vram, sizeof vram, "%dKB", kb);
        choose_ok(&f, &r, vram);
        if (!r.fits)
            continue;
        assert_true(r.predicted <= before * (1 + 1e-9) || r.predicted < 1e-12);
        before = r.predicted;
        uint64_t weights = 0;
        for (unsigned k = 0; k < QC_CANDIDATES; k++) {
            weights += r.count_chosen[k];
            kinds |= (r.count_chosen[k] ? 1u : 0u) << k;
            if (r.uniform_fits[k])
                assert_true(r.predicted <= r.uniform[k]);
        }
        assert_int_equal(weights, 7 * LAYERS);
        assert_int_equal(entries_of(&f, QC_SCHEME_NF4, 64), r.count_chosen[QC_CANDIDATE_NF4]);
        assert_int_equal(entries_of(&f, QC_SCHEME_NF4, 32), r.count_chosen[QC_CANDIDATE_NF4_32]);
        assert_int_equal(entries_of(&f, QC_SCHEME_INT8_ROWS, 0), r.count_chosen[QC_CANDIDATE_INT8]);
        assert_int_equal(entries_of(&f, QC_SCHEME_KEEP, 0), r.count_chosen[QC_CANDIDATE_16BIT]);
        assert_true(r.bound <= r.predicted * (1 + 1e-9));
    }
    assert_true(before < 1e-12); /* the last had room for all */
    assert_int_equal(kinds & ~(1u << QC_CANDIDATE_NF4_32), 5 | 1u << QC_CANDIDATE_16BIT);
}

TEST(test_candidates_and_rules)
{
    SCOPED(fixture) f = {0};
    qc_auto_result r;
    llama(&f);
    f.options.schemes = "nf4,16bit";
    fixture_rule(&f, 0, "*.2.mlp.*");
    fixture_rule(&f, 1, "lm_head.weight");
    choose_ok(&f, &r, "3500KB");
    assert_int_equal(r.group_count, 7 * LAYERS - 3 + 1);
    assert_int_equal(r.count_chosen[QC_CANDIDATE_INT8] + r.count_chosen[QC_CANDIDATE_NF4_32], 0);
    assert_true(r.count_chosen[QC_CANDIDATE_NF4] > 0 && !r.mixed);
    assert_true(isnan(r.uniform[QC_CANDIDATE_INT8]) && !isnan(r.uniform[QC_CANDIDATE_NF4]));
    fixture_expect(&f, "model.layers.2.mlp.up_proj.weight", QC_SCHEME_KEEP, QC_ROLE_LINEAR);
    f.options.schemes = "nf5";
    assert_int_equal(choose(&f, &r, "4MB"), QC_ERR_USAGE);
}

/* Experts of one projection in one layer are one group; a router is none. */
TEST(test_experts)
{
    static const char moe[] =
        "{\"model_type\": \"qwen3_moe\", \"hidden_size\": 128, \"moe_intermediate_size\": 64, "
        "\"num_hidden_layers\": 2, \"num_attention_heads\": 2, \"num_key_value_heads\": 2, "
        "\"head_dim\": 64, \"num_experts\": 20, \"num_experts_per_tok\": 2, \"vocab_size\": 100}";
    SCOPED(fixture) f = {0};
    qc_auto_result r;
    char name[128];
    fixture_init(&f, QC_TO_AUTO);
    fixture_config(&f, moe);
    fixture_add(&f, "model.embed_tokens.weight", 100, 128);
    for (int l = 0; l < 2; l++) {
        (void)snprintf(name, sizeof name, "model.layers.%d.mlp.gate.weight", l);
        fixture_add(&f, name, 20, 128);
        for (int e = 0; e < 20; e++) {
            (void)snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.up_proj.weight", l,
                           e);
            fixture_add(&f, name, 64, 128);
        }
    }
    plan_options.fit = (qc_fit_options){.margin = 1, .context = 16, .batch = 1, .kv_bits = 16};
    choose_ok(&f, &r, "100MB");
    assert_int_equal(r.group_count, 2);
    assert_int_equal(r.groups[1].weights, 20);
    assert_string_equal(r.groups[1].name, "layer 1 mlp.experts.*.up_proj");
    assert_true(r.groups[1].elems == 20u * 64 * 128);
}

/* Counts the modules of the engines whose weights did not all get one scheme and block size. */
static unsigned count_split(const fixture *f)
{
    unsigned split = 0;
    for (uint32_t i = 0; i < f->model.tensor_count; i++) {
        const char *name = f->model.tensors[i].name;
        const qc_recipe_entry *a = &f->recipe.entries[i];
        size_t stem = qc_expert_stem(name);
        qc_fused_group g = {.count = 0};
        if (!qc_fused_group_of(&g, &f->model, i))
            g.count = 0;
        for (unsigned k = 0; k < g.count; k++) {
            const qc_recipe_entry *b = &f->recipe.entries[g.tensors[k]];
            split += b->scheme != a->scheme || b->block_elems != a->block_elems;
        }
        for (uint32_t k = 0; stem > 0 && k < f->model.tensor_count; k++) {
            const qc_recipe_entry *b = &f->recipe.entries[k];
            split += strncmp(f->model.tensors[k].name, name, stem + 1) == 0 &&
                     (b->scheme != a->scheme || b->block_elems != a->block_elems);
        }
    }
    return split;
}

/* What engines hold as one module has one choice at every budget, unless it may be split, and then
 * the error is at most as large. */
TEST(test_one_choice_for_a_module)
{
    static const char *const projections[] = {"gate_proj", "up_proj", "down_proj"};
    char vram[32], name[128];
    unsigned split = 0, mixed = 0;
    for (unsigned kb = 800; kb <= 5600; kb += 150) {
        double predicted[2] = {0};
        for (int may = 0; may < 2; may++) {
            SCOPED(fixture) f = {0};
            qc_auto_result r;
            llama(&f);
            for (unsigned e = 0; e < 9; e++) {
                (void)snprintf(name, sizeof name, "model.layers.%u.mlp.experts.%u.%s.weight", e / 6,
                               e / 3, projections[e % 3]);
                fixture_add(&f, name, e % 3 < 2 ? 96 : 256, e % 3 < 2 ? 256 : 96);
            }
            f.options.split_fused = may;
            (void)snprintf(vram, sizeof vram, "%uKB", kb);
            choose_ok(&f, &r, vram);
            assert_int_equal(r.together, !may);
            if (may)
                split += count_split(&f);
            else
                assert_int_equal(count_split(&f), 0);
            unsigned schemes = 0;
            for (unsigned k = 0; k < QC_CANDIDATES; k++)
                schemes += r.count_chosen[k] > 0;
            mixed += !may && schemes > 1;
            predicted[may] = r.fits ? r.predicted : HUGE_VAL;
        }
        assert_true(predicted[1] <= predicted[0] * 1.0001);
    }
    assert_true(split > 0 && mixed > 10);
}

/* A Conv1D weight that stays as it is also stays in its own order. */
TEST(test_transposed)
{
    SCOPED(fixture) f = {0};
    qc_auto_result r;
    fixture_init(&f, QC_TO_AUTO);
    fixture_config(&f, "{\"model_type\": \"gpt2\", \"n_embd\": 64, \"n_layer\": 1, \"n_head\": 2, "
                       "\"vocab_size\": 100, \"n_positions\": 64}");
    fixture_add(&f, "wte.weight", 100, 64);
    fixture_add(&f, "h.0.mlp.c_fc.weight", 64, 256);
    plan_options.fit = (qc_fit_options){.margin = 1, .context = 16, .batch = 1, .kv_bits = 16};
    choose_ok(&f, &r, "100MB");
    const qc_recipe_entry *e = fixture_entry(&f, "h.0.mlp.c_fc.weight");
    assert_true(e->scheme == QC_SCHEME_KEEP && !e->transpose);
    f.options.schemes = "int8";
    choose_ok(&f, &r, "100MB");
    e = fixture_entry(&f, "h.0.mlp.c_fc.weight");
    assert_true(e->scheme == QC_SCHEME_INT8_ROWS && e->transpose);
    /* Bytes are those of the written shape [256, 64]: a scale for each of 256 rows. */
    assert_true(r.groups[0].bytes[QC_CANDIDATE_INT8] == 64u * 256 + 256 * 4 + 1);
}

/* A weight in FP8 is kept with all that lies beside it, or loses it. */
TEST(test_fp8)
{
    static const char q[] = "model.layers.0.self_attn.q_proj.weight",
                      scale[] = "model.layers.0.self_attn.q_proj.weight_scale_inv",
                      input[] = "model.layers.0.self_attn.q_proj.input_scale",
                      up[] = "model.layers.0.mlp.up_proj.weight";
    SCOPED(fixture) f = {0};
    qc_auto_result r;
    fixture_init(&f, QC_TO_AUTO);
    fixture_config(&f, config);
    fixture_add(&f, "model.embed_tokens.weight", 1000, 256);
    fixture_add_dims(&f, q, QC_DTYPE_F8_E4M3, 2, (uint64_t[]){300, 256});
    fixture_add_dims(&f, scale, QC_DTYPE_F32, 2, (uint64_t[]){3, 2});
    fixture_add_dims(&f, input, QC_DTYPE_F32, 1, (uint64_t[]){1});
    fixture_add(&f, up, 512, 256);
    plan_options.fit = (qc_fit_options){.margin = 1, .context = 16, .batch = 1, .kv_bits = 16};
    f.options.rest = QC_REST_FP16; /* for floats only */
    choose_ok(&f, &r, "100MB");
    assert_int_equal(r.group_count, 2);
    for (uint32_t g = 0; g < 2; g++)
        if (strstr(r.groups[g].name, "q_proj"))
            assert_int_equal(r.groups[g].bytes[QC_CANDIDATE_16BIT], 300 * 256 + 24 + 4);
    fixture_expect(&f, q, QC_SCHEME_KEEP, QC_ROLE_LINEAR);
    fixture_expect(&f, scale, QC_SCHEME_KEEP, QC_ROLE_STATE);
    fixture_expect(&f, input, QC_SCHEME_KEEP, QC_ROLE_STATE);
    fixture_expect(&f, up, QC_SCHEME_CAST, QC_ROLE_LINEAR);
    assert_true(!r.mixed && !r.mixed_fp8 && !qc_auto_mixture(&r));
    f.options.schemes = "nf4";
    choose_ok(&f, &r, "100MB");
    fixture_expect(&f, q, QC_SCHEME_NF4, QC_ROLE_LINEAR);
    fixture_expect(&f, scale, QC_SCHEME_ABSORBED, QC_ROLE_STATE);
    fixture_expect(&f, input, QC_SCHEME_ABSORBED, QC_ROLE_STATE);
    fixture_rule(&f, 0, q); /* by the user's word, beside what auto quantizes */
    choose_ok(&f, &r, "1MB");
    assert_int_equal(r.group_count, 1);
    fixture_expect(&f, q, QC_SCHEME_KEEP, QC_ROLE_LINEAR);
    fixture_expect(&f, input, QC_SCHEME_KEEP, QC_ROLE_STATE);
    assert_true(r.mixed_fp8 && strstr(qc_auto_mixture(&r), "FP8"));
}

/* What does not run on a card is no candidate, unless it is named. */
TEST(test_notes)
{
    SCOPED(fixture) f = {0};
    qc_auto_result r;
    llama(&f);
    choose_ok(&f, &r, "A100-40GB");
    assert_int_equal(r.note_count, 0);
    choose_ok(&f, &r, "A100-40GB+V100-16GB");
    assert_int_equal(r.candidates, 3 | 1u << QC_CANDIDATE_16BIT);
    assert_true(r.note_count == 1 && strstr(r.notes[0], "V100-16GB"));
    f.options.schemes = "nf4,int8";
    choose_ok(&f, &r, "V100-16GB");
    assert_int_equal(r.candidates, (1u << QC_CANDIDATE_NF4) | (1u << QC_CANDIDATE_INT8));
    assert_int_equal(r.note_count, 0);
    choose_ok(&f, &r, "1MB+cpu:1GB+disk");
    assert_true(!r.fits && r.spills && r.note_count == 1);
    assert_non_null(strstr(r.notes[0], "cpu and disk"));
}

/* What is left in 16 bit follows --rest. */
TEST(test_rest)
{
    SCOPED(fixture) f = {0};
    qc_auto_result r;
    llama(&f);
    f.options.rest = QC_REST_FP16;
    choose_ok(&f, &r, "100MB");
    const qc_recipe_entry *e = fixture_entry(&f, "model.layers.0.mlp.up_proj.weight");
    assert_true(e->scheme == QC_SCHEME_CAST && e->out_dtype == QC_DTYPE_F16);
}

TEST(test_text)
{
    SCOPED(fixture) f = {0};
    qc_auto_result r;
    qc_strbuf text;
    qc_json_writer w;
    qc_json *json = NULL;
    llama(&f);
    choose_ok(&f, &r, "4MB");
    qc_strbuf_init(&text, 1u << 20);
    assert_int_equal(qc_auto_explain(&r, 1, &text, &f.err), QC_OK);
    assert_non_null(strstr(text.data, "layer 3 mlp.down_proj"));
    assert_non_null(strstr(text.data, "normally distributed"));
    qc_strbuf_deinit(&text);
    qc_strbuf_init(&text, 1u << 20);
    assert_int_equal(qc_auto_explain(&r, 0, &text, &f.err), QC_OK);
    assert_null(strstr(text.data, "layer 3 mlp.down_proj"));
    assert_non_null(strstr(text.data, "  mlp.down_proj "));
    qc_strbuf_deinit(&text);
    qc_strbuf_init(&text, 1u << 20);
    qc_json_begin_text(&w, &text, &f.err);
    qc_auto_json(&r, 1, &w);
    assert_int_equal(qc_json_end_text(&w), QC_OK);
    assert_int_equal(qc_json_parse(&json, text.data, text.len, 0, &f.err), QC_OK);
    assert_non_null(qc_json_get(qc_json_get(qc_json_root(json), "auto"), "groups"));
    qc_json_destroy(json);
    qc_strbuf_deinit(&text);
}
