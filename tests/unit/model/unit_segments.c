/* Models cut into segments: the ten pattern files, families by hand, names made at random. */
#include "convert/model/segments.h"

#include "convert/plan/plan.h"
#include "tests/fixtures/model_files.h"

#include <dirent.h>
#include <time.h>

static fixture f;
static qc_geometry geometry;
static qc_segments segments;

static qc_status try_to_cut(void)
{
    fixture_make_ok(&f);
    assert_int_equal(qc_geometry_read(&geometry, &f.arena, f.model.config, &f.err), QC_OK);
    return qc_segments_make(&segments, &f.arena, &f.model, &f.recipe, &geometry, &f.err);
}

static void make_cut(void)
{
    if (try_to_cut() != QC_OK)
        fail_msg("%s", f.err.msg);
}

/* The segment whose prefixes hold a name; fails unless exactly one prefix does. */
static uint32_t holder(const char *name)
{
    uint32_t found = QC_NO_SEGMENT;
    const char *by = NULL;
    for (uint32_t i = 0; i < segments.count; i++) {
        for (uint32_t k = 0; k < segments.segments[i].module_count; k++) {
            const char *m = segments.segments[i].modules[k];
            size_t len = strlen(m);
            if (strncmp(name, m, len) != 0 || (name[len] != '.' && name[len] != '\0'))
                continue;
            if (by)
                fail_msg("'%s' is below '%s' and '%s'", name, by, m);
            by = m;
            found = i;
        }
    }
    if (!by)
        fail_msg("'%s' is below no module", name);
    return found;
}

/* Every tensor of the source and every one that would be written. */
static void check_cover(void)
{
    qc_plan plan;
    const qc_plan_options options = {.recipe = f.options};
    assert_int_equal(segments.tensor_count, f.model.tensor_count);
    for (uint32_t i = 0; i < segments.tensor_count; i++) {
        assert_true(segments.of_tensor[i] < segments.count);
        assert_int_equal(holder(f.model.tensors[i].name), segments.of_tensor[i]);
    }
    if (qc_plan_begin(&plan, &f.arena, &f.model, &f.recipe, NULL, &options, &f.err) != QC_OK)
        fail_msg("plan: %s", f.err.msg);
    for (uint32_t i = 0; i < plan.tensor_count; i++) {
        uint32_t source = plan.jobs[plan.outputs[i].job].source;
        qc_out_tensor t = {.align_bytes = 1};
        SCOPED(qc_strbuf) name = {.max = 1000};
        qc_out_tensors all = qc_plan_tensors(&plan);
        all.get(all.ctx, i, &t);
        assert_int_equal(qc_out_tensor_name(&name, &t, NULL), QC_OK);
        assert_int_equal(holder(name.data), segments.of_tensor[source]);
    }
}

static void check_order(void)
{
    for (uint32_t i = 1; i < segments.count; i++) {
        const qc_segment *a = &segments.segments[i - 1], *b = &segments.segments[i];
        if (b->kind == QC_SEGMENT_EXTRA || a->kind == QC_SEGMENT_EXTRA)
            continue;
        assert_true(a->kind <= b->kind);
        if (a->kind == QC_SEGMENT_LAYER && b->kind == QC_SEGMENT_LAYER)
            assert_true(a->layer < b->layer);
    }
}

/* "embeddings layer 0 ... layer 3 norm head>0": runs of layers are shortened, '>' says follows. */
static void expect_cut(const char *want)
{
    char got[1024] = "";
    for (uint32_t i = 0; i < segments.count; i++) {
        const qc_segment *g = &segments.segments[i];
        size_t used = strlen(got);
        if (g->kind == QC_SEGMENT_LAYER && i > 0 && i + 1 < segments.count &&
            segments.segments[i - 1].kind == QC_SEGMENT_LAYER &&
            segments.segments[i + 1].kind == QC_SEGMENT_LAYER)
            continue;
        (void)snprintf(got + used, sizeof got - used, "%s%s", i ? ", " : "", g->name);
        used = strlen(got);
        if (g->follows != QC_NO_SEGMENT)
            (void)snprintf(got + used, sizeof got - used, ">%" PRIu32, g->follows);
    }
    assert_string_equal(got, want);
}

static void expect_modules(const char *segment, const char *want)
{
    char got[1024] = "";
    for (uint32_t i = 0; i < segments.count; i++) {
        const qc_segment *g = &segments.segments[i];
        if (strcmp(g->name, segment) != 0)
            continue;
        for (uint32_t k = 0; k < g->module_count; k++) {
            size_t used = strlen(got);
            (void)snprintf(got + used, sizeof got - used, "%s%s", k ? " " : "", g->modules[k]);
        }
        assert_string_equal(got, want);
        return;
    }
    fail_msg("no segment '%s'", segment);
}

/* ---- the pattern files ---- */

static const struct {
    const char *file, *cut;
} files[] = {
    {"DeepSeek-V2.5.json", "embeddings, layer 0, layer 59, norm, head"},
    {"Llama-3.1-8B.json", "embeddings, layer 0, layer 31, norm, head"},
    {"Llama-3.2-11B-Vision-Instruct.json", "embeddings, vision, layer 0, layer 39, norm, head"},
    {"Llama-3.3-70B-Instruct.json", "embeddings, layer 0, layer 79, norm, head"},
    {"Qwen2.5-72B-Instruct.json", "embeddings, layer 0, layer 79, norm, head"},
    {"Qwen3-32B.json", "embeddings, layer 0, layer 63, norm, head"},
    {"all-MiniLM-L6-v2.json", "embeddings, layer 0, layer 5, head"},
    {"deepseek-llm-7b-chat.json", "embeddings, layer 0, layer 29, norm, head"},
    {"gemma-2-2b.json", "embeddings, layer 0, layer 25, norm, head>0"},
    {"gpt-oss-20b.json", "embeddings, layer 0, layer 23, norm, head"},
};

TEST(every_model)
{
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        for (int to = 0; to < 2; to++) {
            qc_json *doc = load(&f, files[i].file, to ? QC_TO_INT8 : QC_TO_NF4);
            make_cut();
            expect_cut(files[i].cut);
            check_order();
            check_cover();
            if (strcmp(files[i].file, "all-MiniLM-L6-v2.json") == 0) {
                expect_modules("embeddings", "embeddings");
                expect_modules("head", "pooler");
            } else if (strcmp(files[i].file, "gemma-2-2b.json") == 0) {
                expect_modules("embeddings", "model.embed_tokens model.rotary_emb");
                expect_modules("head", "lm_head");
                expect_modules("layer 12", "model.layers.12");
            } else if (strstr(files[i].file, "Vision")) {
                expect_modules("vision", "multi_modal_projector vision_model");
                expect_modules("embeddings", "language_model.model.embed_tokens "
                                             "language_model.model.rotary_emb");
                expect_modules("head", "language_model.lm_head");
                expect_modules("layer 3", "language_model.model.layers.3");
            }
            qc_json_destroy(doc);
        }
    }
}

/* ---- families by hand ---- */

static void start(const char *config)
{
    fixture_init(&f, QC_TO_INT8);
    fixture_config(&f, config);
}

static void finish(const char *want)
{
    make_cut();
    expect_cut(want);
    check_order();
    check_cover();
}

QC_PRINTF(3, 4)
static void add(uint64_t rows, uint64_t cols, const char *fmt, ...)
{
    char name[256];
    va_list ap;
    va_start(ap, fmt);
    (void)vsnprintf(name, sizeof name, fmt, ap);
    va_end(ap);
    if (cols)
        fixture_add(&f, name, rows, cols);
    else
        fixture_add_1d(&f, name, rows);
}

TEST(mllama_new_names)
{
    start("{\"model_type\":\"mllama\",\"text_config\":{\"model_type\":\"mllama_text_model\","
          "\"hidden_size\":64,\"num_hidden_layers\":2,\"num_attention_heads\":2,"
          "\"cross_attention_layers\":[1]}}");
    add(100, 64, "model.language_model.embed_tokens.weight");
    add(64, 64, "model.language_model.layers.0.self_attn.q_proj.weight");
    add(64, 64, "model.language_model.layers.1.cross_attn.q_proj.weight");
    add(1, 0, "model.language_model.layers.1.cross_attn_attn_gate");
    add(64, 0, "model.language_model.norm.weight");
    add(92, 64, "lm_head.weight");
    add(64, 96, "model.multi_modal_projector.weight");
    add(64, 0, "model.vision_model.class_embedding");
    add(64, 64, "model.vision_model.transformer.layers.0.self_attn.q_proj.weight");
    finish("embeddings, vision, layer 0, layer 1, norm, head");
    expect_modules("vision", "model.multi_modal_projector model.vision_model");
    expect_modules("norm", "model.language_model.norm");
}

TEST(mixtral)
{
    start("{\"model_type\":\"mixtral\",\"hidden_size\":64,\"num_hidden_layers\":12,"
          "\"num_attention_heads\":2,\"num_local_experts\":8}");
    add(100, 64, "model.embed_tokens.weight");
    add(100, 64, "lm_head.weight");
    add(64, 0, "model.norm.weight");
    for (int l = 0; l < 12; l++) {
        add(8, 64, "model.layers.%d.block_sparse_moe.gate.weight", l);
        add(64, 64, "model.layers.%d.self_attn.q_proj.weight", l);
        add(64, 0, "model.layers.%d.input_layernorm.weight", l);
        for (int e = 0; e < 8; e++)
            add(96, 64, "model.layers.%d.block_sparse_moe.experts.%d.w1.weight", l, e);
    }
    finish("embeddings, layer 0, layer 11, norm, head");
}

/* Every kind of name that DeepSeek-V3 has, shapes scaled down. */
TEST(deepseek_v3)
{
    static const char *const matrices[] = {"self_attn.q_a_proj", "self_attn.kv_b_proj"};
    static const char *const scales[] = {"", "_scale_inv"};
    start("{\"model_type\":\"deepseek_v3\",\"hidden_size\":64,\"num_hidden_layers\":61,"
          "\"num_attention_heads\":2,\"kv_lora_rank\":32,\"qk_rope_head_dim\":16,"
          "\"qk_nope_head_dim\":16,\"v_head_dim\":16,\"n_routed_experts\":256,"
          "\"tie_word_embeddings\":false}");
    add(100, 64, "model.embed_tokens.weight");
    add(100, 64, "lm_head.weight");
    add(64, 0, "model.norm.weight");
    for (int l = 0; l < 62; l++) {
        for (int s = 0; s < 2; s++) {
            for (int p = 0; p < 2; p++)
                add(64, 64, "model.layers.%d.%s.weight%s", l, matrices[p], scales[s]);
            add(64, 64, "model.layers.%d.mlp.%sup_proj.weight%s", l, l < 3 ? "" : "shared_experts.",
                scales[s]);
            for (int e = 0; l >= 3 && e < 256; e++)
                add(64, 64, "model.layers.%d.mlp.experts.%d.up_proj.weight%s", l, e, scales[s]);
        }
        add(64, 0, "model.layers.%d.input_layernorm.weight", l);
        add(64, 0, "model.layers.%d.self_attn.kv_a_layernorm.weight", l);
        if (l >= 3) {
            add(256, 64, "model.layers.%d.mlp.gate.weight", l);
            add(256, 0, "model.layers.%d.mlp.gate.e_score_correction_bias", l);
        }
    }
    add(100, 64, "model.layers.61.embed_tokens.weight");
    add(64, 128, "model.layers.61.eh_proj.weight");
    add(64, 0, "model.layers.61.enorm.weight");
    add(100, 64, "model.layers.61.shared_head.head.weight");
    add(64, 0, "model.layers.61.shared_head.norm.weight");
    finish("embeddings, layer 0, layer 60, layer 61, norm, head");
    assert_int_equal(segments.segments[62].kind, QC_SEGMENT_EXTRA);
    assert_int_equal(segments.segments[62].layer, 61);
}

TEST(gpt2_and_tied_heads)
{
    start("{\"model_type\":\"gpt2\",\"n_layer\":2,\"n_head\":2,\"n_embd\":64}");
    add(100, 64, "wte.weight");
    add(50, 64, "wpe.weight");
    add(64, 192, "h.0.attn.c_attn.weight");
    add(64, 192, "h.1.attn.c_attn.weight");
    add(64, 0, "ln_f.bias");
    add(64, 0, "ln_f.weight");
    finish("embeddings, layer 0, layer 1, norm, head>0");
    expect_modules("embeddings", "wpe wte");
    expect_modules("layer 1", "h.1");
    expect_modules("norm", "ln_f");
    expect_modules("head", "lm_head");

    /* Tied, though the file has both. */
    start("{\"model_type\":\"llama\",\"tie_word_embeddings\":true}");
    add(100, 64, "model.embed_tokens.weight");
    add(64, 64, "model.layers.0.self_attn.q_proj.weight");
    add(100, 64, "lm_head.weight");
    finish("embeddings, layer 0, head>0");

    /* An encoder has no head to tie. */
    start("{\"model_type\":\"bert\",\"hidden_size\":64,\"num_hidden_layers\":1,"
          "\"num_attention_heads\":2}");
    add(100, 64, "bert.embeddings.word_embeddings.weight");
    add(64, 0, "bert.embeddings.LayerNorm.weight");
    add(64, 64, "bert.encoder.layer.0.attention.self.query.weight");
    finish("embeddings, layer 0");
    expect_modules("embeddings", "bert.embeddings");
    expect_modules("layer 0", "bert.encoder.layer.0");
}

TEST(odd_places)
{
    /* An encoder beside a decoder, a lone parameter, a name with a byte below '.'. */
    start("{\"model_type\":\"t5\",\"num_layers\":2,\"num_heads\":2,\"d_model\":64}");
    add(100, 64, "shared.weight");
    add(64, 64, "encoder.block.0.layer.0.SelfAttention.q.weight");
    add(64, 0, "encoder.final_layer_norm.weight");
    add(64, 64, "decoder.block.0.layer.0.SelfAttention.q.weight");
    add(64, 64, "decoder.block.1.layer.0.SelfAttention.q.weight");
    add(64, 64, "decoder.block.1-x.weight");
    add(64, 0, "scale");
    add(100, 64, "lm_head.weight");
    finish("embeddings, encoder.block.0, layer 0, layer 1, norm, head");
    expect_modules("embeddings", "decoder.block.1-x scale shared");

    /* int8 scales beside a weight that shares its module with layers. */
    start("{\"model_type\":\"new\",\"hidden_size\":64}");
    add(64, 64, "model.weight");
    add(64, 64, "model.layers.0.up.weight");
    add(100, 64, "model.embed.weight");
    finish("embeddings, layer 0, head>0");
    expect_modules("embeddings", "model.embed model.weight model.SCB model.weight_format");

    /* Nothing known at all. */
    start("{}");
    add(64, 64, "a.b");
    add(64, 64, "c");
    make_cut();
    assert_int_equal(segments.count, 1);
    check_cover();

    start("{}");
    make_cut();
    assert_int_equal(segments.count, 0);

    /* No prefix can tell these apart. */
    start("{}");
    add(64, 64, "model");
    add(64, 64, "model.layers.0.up.weight");
    add(100, 64, "model.embed.weight");
    assert_int_equal(try_to_cut(), QC_ERR_UNSUPPORTED);
    assert_non_null(strstr(f.err.msg, "'model'"));
}

/* Whatever the names, all are covered once or the call refuses. */
TEST(random_names)
{
    static const char *const words[] = {"model", "layers", "0",   "1",       "10",        "embed",
                                        "norm",  "visual", "h",   "lm_head", "encoder",   "weight",
                                        "a-b",   "a",      "mtp", "bias",    "weight.abs"};
    const char *text = getenv("QC_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : (uint64_t)time(NULL), x = seed;
    unsigned refused = 0;
    print_message("seed %" PRIu64 "\n", seed);
    for (int round = 0; round < 2000; round++) {
        start(round % 2 ? "{\"model_type\":\"llama\"}" : "{}");
        for (int t = 0; t < 12; t++) {
            char name[256] = "";
            x = x * 6364136223846793005u + 1442695040888963407u;
            unsigned n = 1 + (unsigned)(x >> 60) % 5;
            for (unsigned k = 0; k < n; k++) {
                size_t used = strlen(name);
                x = x * 6364136223846793005u + 1442695040888963407u;
                (void)snprintf(name + used, sizeof name - used, "%s%s", k ? "." : "",
                               words[(x >> 33) % (sizeof words / sizeof *words)]);
            }
            int twice = 0;
            for (size_t k = 0; k < f.model.tensor_count; k++)
                twice |= strcmp(f.model.tensors[k].name, name) == 0;
            if (!twice)
                fixture_add(&f, name, 64, 64);
        }
        qc_status st = try_to_cut();
        if (st == QC_OK)
            check_cover();
        else
            assert_int_equal(st, QC_ERR_UNSUPPORTED);
        refused += st != QC_OK;
        check_order();
    }
    assert_true(refused < 1000);
}

static int teardown(void **state)
{
    fixture_deinit(&f);
    return free_roles(state);
}

TEST_GROUP(NULL, teardown)
