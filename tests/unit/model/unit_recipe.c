/* The recipe on small made-up checkpoints: traps of names, rules, options. */
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/recipe_fixture.h"

#define LAYER "model.layers.0."
#define MOE   LAYER "block_sparse_moe."
#define TEXT  "model.language_model."
#define TOWER "model.vision_model."

static const char llama[] = "{\"model_type\":\"llama\",\"vocab_size\":256}";

static void add_llama(fixture *f)
{
    fixture_config(f, llama);
    fixture_add(f, "model.embed_tokens.weight", 256, 64);
    fixture_add(f, "lm_head.weight", 256, 64);
    for (int i = 0; i < 12; i++) {
        char name[128];
        (void)snprintf(name, sizeof name, "model.layers.%d.self_attn.q_proj.weight", i);
        fixture_add(f, name, 64, 64);
        (void)snprintf(name, sizeof name, "model.layers.%d.mlp.gate_proj.weight", i);
        fixture_add(f, name, 128, 64);
        (void)snprintf(name, sizeof name, "model.layers.%d.input_layernorm.weight", i);
        fixture_add_1d(f, name, 64);
        (void)snprintf(name, sizeof name, "model.layers.%d.self_attn.q_proj.bias", i);
        fixture_add_1d(f, name, 64);
    }
    fixture_add_1d(f, "model.norm.weight", 64);
}

TEST(llama_by_table)
{
    SCOPED(fixture) f = {0};
    fixture_init(&f, QC_TO_NF4);
    add_llama(&f);
    fixture_make_ok(&f);
    assert_string_equal(f.recipe.model_type, "llama");
    assert_int_equal(f.recipe.known_type, 1);
    assert_int_equal(f.recipe.input_is_quantized, 0);
    fixture_expect(&f, LAYER "self_attn.q_proj.weight", QC_SCHEME_NF4, QC_ROLE_LINEAR);
    fixture_expect(&f, LAYER "self_attn.q_proj.bias", QC_SCHEME_KEEP, QC_ROLE_BIAS);
    fixture_expect(&f, LAYER "input_layernorm.weight", QC_SCHEME_KEEP, QC_ROLE_NORM);
    fixture_expect(&f, "model.embed_tokens.weight", QC_SCHEME_KEEP, QC_ROLE_EMBEDDING);
    fixture_expect(&f, "lm_head.weight", QC_SCHEME_KEEP, QC_ROLE_HEAD);
    assert_string_equal(fixture_entry(&f, "lm_head.weight")->why, "output head");
    assert_int_equal(fixture_entry(&f, "lm_head.weight")->out_dtype, QC_DTYPE_BF16);
    assert_null(fixture_entry(&f, "lm_head.weight")->stored);
    fixture_expect_skips(&f, "lm_head");
}

TEST(every_source_dtype)
{
    for (int t = 0; t < QC_DTYPE_COUNT; t++) {
        SCOPED(fixture) f = {0};
        fixture_start(&f, QC_TO_NF4, llama, "");
        fixture_add_dims(&f, LAYER "self_attn.q_proj.weight", (qc_dtype)t, 2, (uint64_t[]){64, 64});
        /* FP8 without scales beside it: the codes are the weights. */
        int fp8 = t == QC_DTYPE_F8_E4M3 || t == QC_DTYPE_F8_E5M2;
        if (qc_dtype_is_quantizable((qc_dtype)t) || fp8) {
            fixture_make_ok(&f);
            assert_int_equal(fp8, f.recipe.entries[0].coded != NULL);
            assert_int_equal(f.recipe.entries[0].scheme, QC_SCHEME_NF4);
        } else {
            /* Never silently passed on: the weight of a Linear that cannot be read. */
            fixture_make_fails(&f, QC_ERR_UNSUPPORTED, qc_dtype_name((qc_dtype)t), "--keep");
            fixture_rule(&f, 0, "*.q_proj.*");
            fixture_make_ok(&f);
            fixture_expect(&f, LAYER "self_attn.q_proj.weight", QC_SCHEME_KEEP, QC_ROLE_LINEAR);
            assert_true(fixture_skips(&f, "model.layers.0.self_attn.q_proj"));
        }
    }
}

TEST(deepseek_v3_layout)
{
    static const fixture_tensor tensors[] = {
        {"model.embed_tokens.weight", 512, 64, QC_SCHEME_KEEP, QC_ROLE_EMBEDDING},
        {"lm_head.weight", 512, 64, QC_SCHEME_KEEP, QC_ROLE_HEAD},
        {"model.layers.3.mlp.gate.weight", 256, 64, QC_SCHEME_KEEP, QC_ROLE_ROUTER},
        {"model.layers.3.mlp.experts.255.down_proj.weight", 64, 64, QC_SCHEME_NF4, QC_ROLE_LINEAR},
        {"model.layers.3.self_attn.kv_b_proj.weight", 64, 64, QC_SCHEME_NF4, QC_ROLE_LINEAR},
        {"model.layers.61.eh_proj.weight", 64, 128, QC_SCHEME_NF4, QC_ROLE_LINEAR},
        {"model.layers.61.embed_tokens.weight", 512, 64, QC_SCHEME_KEEP, QC_ROLE_EMBEDDING},
        {"model.layers.61.shared_head.head.weight", 512, 64, QC_SCHEME_KEEP, QC_ROLE_HEAD},
        {"model.layers.61.shared_head.norm.weight", 64, 0, QC_SCHEME_KEEP, QC_ROLE_NORM},
        {0},
    };
    static const char bias[] = "model.layers.3.mlp.gate.e_score_correction_bias";
    SCOPED(fixture) f = {0};
    fixture_start(&f, QC_TO_NF4, "{\"model_type\":\"deepseek_v3\",\"n_routed_experts\":256}", "");
    f.options.rest = QC_REST_BF16;
    fixture_add_dims(&f, bias, QC_DTYPE_F32, 1, (uint64_t[]){256});
    fixture_check(&f, tensors, "lm_head model.layers.61.shared_head.head");
    /* Its dtype is part of the routing: not even --rest changes it. */
    fixture_expect(&f, bias, QC_SCHEME_KEEP, QC_ROLE_BIAS);
}

TEST(mixtral_router_is_a_linear)
{
    static const fixture_tensor tensors[] = {
        {"model.embed_tokens.weight", 512, 64, QC_SCHEME_KEEP, QC_ROLE_EMBEDDING},
        {"lm_head.weight", 512, 64, QC_SCHEME_KEEP, QC_ROLE_HEAD},
        {MOE "gate.weight", 8, 64, QC_SCHEME_KEEP, QC_ROLE_ROUTER},
        {MOE "experts.7.w2.weight", 64, 64, QC_SCHEME_INT8_ROWS, QC_ROLE_LINEAR},
        {LAYER "self_attn.o_proj.weight", 64, 64, QC_SCHEME_INT8_ROWS, QC_ROLE_LINEAR},
        {0},
    };
    SCOPED(fixture) f = {0};
    fixture_start(&f, QC_TO_INT8, "{\"model_type\":\"mixtral\",\"num_local_experts\":8}", "");
    fixture_check(&f, tensors, "lm_head model.layers.0.block_sparse_moe.gate");
    fixture_rule(&f, 1, "*.block_sparse_moe.gate.weight");
    fixture_make_ok(&f);
    fixture_expect_skips(&f, "lm_head");
}

TEST(qwen_moe_gates)
{
    static const fixture_tensor tensors[] = {
        {"model.embed_tokens.weight", 512, 64, QC_SCHEME_KEEP, QC_ROLE_EMBEDDING},
        {LAYER "mlp.gate.weight", 60, 64, QC_SCHEME_KEEP, QC_ROLE_ROUTER},
        {LAYER "mlp.shared_expert_gate.weight", 1, 64, QC_SCHEME_KEEP, QC_ROLE_ROUTER},
        {LAYER "mlp.shared_expert.gate_proj.weight", 64, 64, QC_SCHEME_NF4, QC_ROLE_LINEAR},
        {LAYER "mlp.experts.59.gate_proj.weight", 64, 64, QC_SCHEME_NF4, QC_ROLE_LINEAR},
        {0},
    };
    SCOPED(fixture) f = {0};
    fixture_start(&f, QC_TO_NF4, "{\"model_type\":\"qwen2_moe\",\"num_experts\":60}", "");
    fixture_check(&f, tensors,
                  "lm_head model.layers.0.mlp.gate model.layers.0.mlp.shared_expert_gate");
}

TEST(gpt2_is_transposed)
{
    /* As on the Hub (no prefix) and as saved with a head. */
    static const char *const prefixes[] = {"", "transformer."};
    for (size_t p = 0; p < 2; p++) {
        SCOPED(fixture) f = {0};
        fixture_init(&f, QC_TO_NF4);
        f.options.rest = QC_REST_BF16;
        fixture_config(&f, "{\"model_type\":\"gpt2\",\"vocab_size\":50257}");
        static const struct {
            const char *name;
            uint64_t rows, cols;
            int transpose;
        } weights[] = {
            {"h.11.attn.c_attn.weight", 64, 192, 1},
            {"h.11.attn.c_proj.weight", 64, 64, 1},
            {"h.11.mlp.c_fc.weight", 64, 256, 1},
            {"h.11.mlp.c_proj.weight", 256, 64, 1},
            {"wte.weight", 50257, 64, 0},
            {"wpe.weight", 1024, 64, 0},
        };
        char name[128];
        for (size_t i = 0; i < sizeof weights / sizeof *weights; i++) {
            (void)snprintf(name, sizeof name, "%s%s", prefixes[p], weights[i].name);
            fixture_add(&f, name, weights[i].rows, weights[i].cols);
        }
        (void)snprintf(name, sizeof name, "%sh.11.attn.bias", prefixes[p]);
        fixture_add_dims(&f, name, QC_DTYPE_F32, 4, (uint64_t[]){1, 1, 1024, 1024});
        fixture_rule(&f, 0, "*h.11.mlp.c_proj*");
        fixture_make_ok(&f);
        fixture_expect(&f, name, QC_SCHEME_KEEP, QC_ROLE_OTHER); /* a mask, not a bias */
        for (size_t i = 0; i < sizeof weights / sizeof *weights; i++) {
            (void)snprintf(name, sizeof name, "%s%s", prefixes[p], weights[i].name);
            int quantized = weights[i].transpose && i != 3;
            fixture_expect(&f, name, quantized ? QC_SCHEME_NF4 : QC_SCHEME_KEEP,
                           weights[i].transpose ? QC_ROLE_LINEAR : QC_ROLE_EMBEDDING);
            assert_int_equal(fixture_entry(&f, name)->transpose, quantized);
        }
        /* Under the names of GPT2Model and of GPT2LMHeadModel. */
        fixture_expect_skips(&f, "h.11.mlp.c_proj lm_head transformer.h.11.mlp.c_proj");
    }
}

TEST(bert_with_and_without_prefix)
{
    static const char *const prefixes[] = {"", "bert."};
    for (size_t p = 0; p < 2; p++) {
        SCOPED(fixture) f = {0};
        char name[160];
        fixture_start(&f, QC_TO_NF4, "{\"model_type\":\"bert\",\"vocab_size\":512}", "");
        static const char *const linear[] = {
            "encoder.layer.3.attention.self.query.weight",
            "encoder.layer.3.attention.output.dense.weight",
            "encoder.layer.3.intermediate.dense.weight",
            "encoder.layer.3.output.dense.weight",
            "pooler.dense.weight",
        };
        for (size_t i = 0; i < sizeof linear / sizeof *linear; i++) {
            (void)snprintf(name, sizeof name, "%s%s", prefixes[p], linear[i]);
            fixture_add(&f, name, 64, 64);
        }
        (void)snprintf(name, sizeof name, "%sembeddings.LayerNorm.gamma", prefixes[p]);
        fixture_add_1d(&f, name, 64);
        (void)snprintf(name, sizeof name, "%sembeddings.token_type_embeddings.weight", prefixes[p]);
        fixture_add(&f, name, 2, 64);
        fixture_add(&f, "cls.predictions.decoder.weight", 512, 64);
        fixture_add(&f, "cls.predictions.transform.dense.weight", 64, 64);
        fixture_add(&f, "cls.seq_relationship.weight", 2, 64);
        fixture_make_ok(&f);
        fixture_expect(&f, name, QC_SCHEME_KEEP, QC_ROLE_EMBEDDING);
        for (size_t i = 0; i < sizeof linear / sizeof *linear; i++) {
            (void)snprintf(name, sizeof name, "%s%s", prefixes[p], linear[i]);
            fixture_expect(&f, name, QC_SCHEME_NF4, QC_ROLE_LINEAR);
        }
        fixture_expect(&f, "cls.predictions.decoder.weight", QC_SCHEME_KEEP, QC_ROLE_HEAD);
        fixture_expect(&f, "cls.predictions.transform.dense.weight", QC_SCHEME_NF4, QC_ROLE_LINEAR);
        fixture_expect_skips(&f, "cls.predictions.decoder cls.seq_relationship lm_head");
    }
}

TEST(mllama_under_new_names)
{
    static const fixture_tensor tensors[] = {
        {"lm_head.weight", 512, 64, QC_SCHEME_KEEP, QC_ROLE_HEAD},
        {TEXT "embed_tokens.weight", 520, 64, QC_SCHEME_KEEP, QC_ROLE_EMBEDDING},
        {TEXT "layers.3.cross_attn.q_proj.weight", 64, 64, QC_SCHEME_NF4, QC_ROLE_LINEAR},
        {TEXT "layers.4.mlp.up_proj.weight", 64, 64, QC_SCHEME_KEEP, QC_ROLE_LINEAR},
        {TOWER "transformer.layers.0.mlp.fc1.weight", 64, 64, QC_SCHEME_NF4, QC_ROLE_LINEAR},
        {TOWER "global_transformer.layers.7.self_attn.v_proj.weight", 64, 64, QC_SCHEME_NF4,
         QC_ROLE_LINEAR},
        {TOWER "gated_positional_embedding.tile_embedding.weight", 9, 4096, QC_SCHEME_KEEP,
         QC_ROLE_EMBEDDING},
        {"model.multi_modal_projector.weight", 64, 64, QC_SCHEME_NF4, QC_ROLE_LINEAR},
        {0},
    };
    SCOPED(fixture) f = {0};
    fixture_start(&f, QC_TO_NF4, "{\"model_type\":\"mllama\",\"text_config\":{\"vocab_size\":512}}",
                  "-*.layers.4.*");
    fixture_check(&f, tensors,
                  "language_model.model.layers.4.mlp.up_proj lm_head "
                  "model.language_model.layers.4.mlp.up_proj");
}

/* A head in the file that stands for the embeddings too, told in three ways. */
TEST(tied_heads)
{
    static const struct {
        const char *config;
        int embeddings, meta, tied;
    } cases[] = {
        {"{\"model_type\":\"llama\",\"tie_word_embeddings\":true}", 1, 0, 1},
        {"{\"model_type\":\"llama\",\"tie_word_embeddings\":false}", 1, 0, 0},
        {"{\"model_type\":\"llama\"}", 1, 0, 0},
        {"{\"model_type\":\"gemma2\"}", 1, 0, 1},
        {"{\"model_type\":\"llama\"}", 0, 0, 1},
        {"{\"model_type\":\"new\",\"vocab_size\":256}", 1, 1, 1},
        {"{\"model_type\":\"new\",\"text_config\":{\"tie_word_embeddings\":true}}", 1, 0, 1},
        {"{\"model_type\":\"new\"}", 1, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SCOPED(fixture) f = {0};
        qc_st_meta meta = {"model.embed_tokens.weight", "lm_head.weight"};
        fixture_start(&f, QC_TO_NF4, cases[i].config, "");
        if (cases[i].meta) {
            f.model.meta = &meta;
            f.model.meta_count = 1;
        }
        fixture_add(&f, "lm_head.weight", 256, 64);
        fixture_add(&f, LAYER "self_attn.q_proj.weight", 64, 64);
        if (cases[i].embeddings)
            fixture_add(&f, "model.embed_tokens.weight", 256, 64);
        fixture_make_ok(&f);
        fixture_expect(&f, "lm_head.weight", QC_SCHEME_KEEP, QC_ROLE_HEAD);
        fixture_expect_skips(&f, "lm_head");
        fixture_rule(&f, 1, "lm_head.*");
        if (cases[i].tied) {
            fixture_make_fails(&f, QC_ERR_USAGE, "tied to the embeddings",
                               "--quantize 'lm_head.*'");
        } else {
            fixture_make_ok(&f);
            fixture_expect(&f, "lm_head.weight", QC_SCHEME_NF4, QC_ROLE_HEAD);
            fixture_expect_skips(&f, "");
        }
    }
}

TEST(last_rule_wins)
{
    SCOPED(fixture) f = {0};
    fixture_init(&f, QC_TO_NF4);
    add_llama(&f);
    fixture_rule(&f, 0, "model.layers.*");
    fixture_rule(&f, 1, "model.layers.1*");
    fixture_rule(&f, 0, "*.11.mlp.*");
    fixture_make_ok(&f);
    fixture_expect(&f, LAYER "self_attn.q_proj.weight", QC_SCHEME_KEEP, QC_ROLE_LINEAR);
    assert_string_equal(fixture_entry(&f, LAYER "self_attn.q_proj.weight")->why,
                        "--keep model.layers.*");
    fixture_expect(&f, "model.layers.1.mlp.gate_proj.weight", QC_SCHEME_NF4, QC_ROLE_LINEAR);
    assert_string_equal(fixture_entry(&f, "model.layers.1.mlp.gate_proj.weight")->why,
                        "--quantize model.layers.1*");
    fixture_expect(&f, "model.layers.10.mlp.gate_proj.weight", QC_SCHEME_NF4, QC_ROLE_LINEAR);
    fixture_expect(&f, "model.layers.11.mlp.gate_proj.weight", QC_SCHEME_KEEP, QC_ROLE_LINEAR);
    fixture_expect(&f, "model.layers.11.self_attn.q_proj.weight", QC_SCHEME_NF4, QC_ROLE_LINEAR);
    /* Norms and biases under a --quantize glob stay what they are. */
    fixture_expect(&f, "model.layers.11.input_layernorm.weight", QC_SCHEME_KEEP, QC_ROLE_NORM);
    /* The skip list: natural order, layer 2 before 11. */
    static const char *const first[] = {
        "classifier",
        "lm_head",
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.2.mlp.gate_proj",
    };
    for (uint32_t i = 0; i < 5; i++)
        assert_string_equal(f.recipe.skip_modules[i], first[i]);
    assert_string_equal(f.recipe.skip_modules[f.recipe.skip_count - 3],
                        "model.layers.11.mlp.gate_proj");
    assert_int_equal(f.recipe.skip_count, 4 + 2 * 9 + 1);
}

TEST(globs_that_help_nobody)
{
    static const struct {
        int quantize;
        const char *glob, *says;
    } cases[] = {
        {0, "model.layer.0.*", "matches no tensor"},
        {1, "*.experts.*", "matches no tensor"},
        {1, "*embed_tokens*", "embedding table"},
        {1, "*norm*", "two dimensions"},
        {1, "*.bias", "two dimensions"},
        {0, "", "matches no tensor"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SCOPED(fixture) f = {0};
        fixture_init(&f, QC_TO_NF4);
        add_llama(&f);
        fixture_rule(&f, cases[i].quantize, cases[i].glob);
        fixture_make_fails(&f, QC_ERR_USAGE, cases[i].glob, cases[i].says);
    }
    SCOPED(fixture) f = {0};
    fixture_init(&f, QC_TO_BF16);
    add_llama(&f);
    fixture_rule(&f, 1, "*q_proj.weight");
    fixture_make_fails(&f, QC_ERR_USAGE, "*q_proj.weight", "--to nf4");
}

TEST(rest_casts_what_is_kept)
{
    SCOPED(fixture) f = {0};
    fixture_start(&f, QC_TO_NF4, llama, "");
    f.options.rest = QC_REST_FP16;
    fixture_add_dims(&f, "model.norm.weight", QC_DTYPE_F32, 1, (uint64_t[]){64});
    fixture_add_dims(&f, "model.embed_tokens.weight", QC_DTYPE_F64, 2, (uint64_t[]){256, 64});
    fixture_add_dims(&f, "lm_head.weight", QC_DTYPE_F16, 2, (uint64_t[]){256, 64});
    fixture_add_dims(&f, LAYER "self_attn.rotary_emb.inv_freq", QC_DTYPE_F32, 1, (uint64_t[]){8});
    fixture_add_dims(&f, "counter", QC_DTYPE_I64, 0, NULL);
    fixture_add(&f, LAYER "self_attn.q_proj.weight", 64, 64);
    fixture_add(&f, LAYER "self_attn.o_proj.weight", 64, 64);
    fixture_rule(&f, 0, "*.o_proj.*");
    fixture_make_ok(&f);
    fixture_expect(&f, "model.norm.weight", QC_SCHEME_CAST, QC_ROLE_NORM);
    assert_int_equal(fixture_entry(&f, "model.norm.weight")->out_dtype, QC_DTYPE_F16);
    assert_string_equal(fixture_entry(&f, "model.norm.weight")->why, "--rest fp16");
    fixture_expect(&f, "model.embed_tokens.weight", QC_SCHEME_CAST, QC_ROLE_EMBEDDING);
    fixture_expect(&f, "lm_head.weight", QC_SCHEME_KEEP, QC_ROLE_HEAD); /* F16 already */
    fixture_expect(&f, LAYER "self_attn.rotary_emb.inv_freq", QC_SCHEME_KEEP, QC_ROLE_OTHER);
    fixture_expect(&f, "counter", QC_SCHEME_KEEP, QC_ROLE_OTHER);
    fixture_expect(&f, LAYER "self_attn.q_proj.weight", QC_SCHEME_NF4, QC_ROLE_LINEAR);
    /* --keep is "not quantized"; what is not quantized is the rest. */
    fixture_expect(&f, LAYER "self_attn.o_proj.weight", QC_SCHEME_CAST, QC_ROLE_LINEAR);
    fixture_expect_skips(&f, "lm_head model.layers.0.self_attn.o_proj");
}

TEST(to_float_casts_all_but_kept)
{
    static const fixture_tensor tensors[] = {
        {"model.embed_tokens.weight", 256, 64, QC_SCHEME_CAST, QC_ROLE_EMBEDDING},
        {LAYER "self_attn.q_proj.weight", 64, 64, QC_SCHEME_CAST, QC_ROLE_LINEAR},
        {"model.norm.weight", 64, 0, QC_SCHEME_KEEP, QC_ROLE_NORM},
        {0},
    };
    SCOPED(fixture) f = {0};
    fixture_start(&f, QC_TO_FP16, llama, "-model.norm.*");
    fixture_add_dims(&f, LAYER "self_attn.rotary_emb.inv_freq", QC_DTYPE_F32, 1, (uint64_t[]){8});
    fixture_check(&f, tensors, "");
    assert_string_equal(fixture_entry(&f, "model.embed_tokens.weight")->why, "--to fp16");
    assert_string_equal(fixture_entry(&f, "model.norm.weight")->why, "--keep model.norm.*");
    fixture_expect(&f, LAYER "self_attn.rotary_emb.inv_freq", QC_SCHEME_KEEP, QC_ROLE_OTHER);
}

TEST(general_rules)
{
    static const struct {
        const char *name;
        unsigned ndim;
        uint64_t dims[5];
        qc_role role;
        int quantized;
    } cases[] = {
        {"decoder.block.0.fc1.weight", 2, {64, 64}, QC_ROLE_LINEAR, 1},
        {"decoder.block.0.fc1.bias", 1, {64}, QC_ROLE_BIAS, 0},
        {"decoder.block.0.gate.weight", 2, {64, 64}, QC_ROLE_ROUTER, 0},
        {"decoder.block.0.ffn.router.layer.weight", 2, {64, 64}, QC_ROLE_ROUTER, 0},
        {"decoder.block.0.gate_proj.weight", 2, {64, 64}, QC_ROLE_LINEAR, 1},
        {"decoder.block.0.moe.experts.up_proj", 3, {8, 64, 64}, QC_ROLE_OTHER, 0},
        {"decoder.block.0.moe.up_bias", 2, {8, 64}, QC_ROLE_BIAS, 0},
        {"decoder.block.0.ln_2.weight", 1, {64}, QC_ROLE_NORM, 0},
        {"decoder.block.0.q_norm.weight", 2, {64, 64}, QC_ROLE_NORM, 0},
        {"decoder.block.0.A_log", 2, {64, 64}, QC_ROLE_OTHER, 0},
        {"decoder.block.0.attn.in_proj_weight", 2, {192, 64}, QC_ROLE_OTHER, 0},
        {"decoder.block.0.attn.relative_attention_bias.weight", 2, {32, 64}, QC_ROLE_EMBEDDING, 0},
        {"decoder.block.0.dt_proj.weight", 2, {64, 31}, QC_ROLE_OTHER, 0},
        {"decoder.block.0.mixer.conv1d.weight", 3, {64, 1, 4}, QC_ROLE_CONV, 0},
        {"vision.patch_embed.proj.weight", 5, {64, 3, 2, 14, 14}, QC_ROLE_CONV, 0},
        {"vision.patch_embed.proj_in.weight", 2, {64, 64}, QC_ROLE_LINEAR, 1},
        {"embeddings.word_embeddings.weight", 2, {512, 64}, QC_ROLE_EMBEDDING, 0},
        {"embeddings_project.weight", 2, {64, 64}, QC_ROLE_LINEAR, 1},
        {"shared.weight", 2, {512, 64}, QC_ROLE_EMBEDDING, 0},
        {"decoder.embed_tokens.3.weight", 2, {64, 64}, QC_ROLE_EMBEDDING, 0},
        {"decoder.sub_embeddings.3.weight", 2, {64, 64}, QC_ROLE_EMBEDDING, 0},
        {"decoder.rel_pos_emb.weight", 2, {64, 64}, QC_ROLE_EMBEDDING, 0},
        {"pre_classifier.weight", 2, {64, 64}, QC_ROLE_HEAD, 0},
        {"vision.head.mlp.fc1.weight", 2, {64, 64}, QC_ROLE_LINEAR, 1},
        {"vision.head.weight", 2, {64, 64}, QC_ROLE_HEAD, 0},
        {"decoder.block.0.indexer.weights_proj.weight", 2, {64, 64}, QC_ROLE_LINEAR, 0},
        {"decoder.block.0.attn.out_proj.weight", 2, {64, 64}, QC_ROLE_OTHER, 0},
        {"decoder.block.0.self_attn.out_proj.weight", 2, {64, 64}, QC_ROLE_LINEAR, 1},
        {"decoder.block.0.mlp.shared.weight_x", 2, {64, 64}, QC_ROLE_OTHER, 0},
        {"tok.weight", 2, {512, 64}, QC_ROLE_EMBEDDING, 0},
        {"output.weight", 2, {512, 64}, QC_ROLE_HEAD, 0},
        {"embed_out.weight", 2, {512, 64}, QC_ROLE_HEAD, 0},
        {"lm_head.dense.weight", 2, {64, 64}, QC_ROLE_HEAD, 0},
        {"score.weight", 2, {64, 64}, QC_ROLE_HEAD, 0},
        {"rotary.inv_freq", 1, {32}, QC_ROLE_OTHER, 0},
        {"empty.weight", 2, {0, 64}, QC_ROLE_OTHER, 0},
        {"scalar", 0, {0}, QC_ROLE_OTHER, 0},
        {"weight", 2, {64, 64}, QC_ROLE_OTHER, 0},
        {".weight", 2, {64, 64}, QC_ROLE_OTHER, 0},
        {"..weight", 2, {64, 64}, QC_ROLE_LINEAR, 1},
        {"", 2, {64, 64}, QC_ROLE_OTHER, 0},
        {"a.", 2, {64, 64}, QC_ROLE_OTHER, 0},
    };
    static const char *const configs[] = {
        "{\"model_type\":\"new\",\"vocab_size\":512,\"num_local_experts\":8}",
        "{\"model_type\":\"llama\",\"vocab_size\":512,\"num_experts\":8}",
        ("{\"model_type\":\"llama mistral\",\"text_config\":"
         "{\"vocab_size\":512,\"n_routed_experts\":8}}"),
    };
    for (size_t c = 0; c < sizeof configs / sizeof *configs; c++) {
        SCOPED(fixture) f = {0};
        fixture_start(&f, QC_TO_NF4, configs[c], "");
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
            fixture_add_dims(&f, cases[i].name, QC_DTYPE_F32, cases[i].ndim, cases[i].dims);
        fixture_make_ok(&f);
        assert_int_equal(f.recipe.known_type, c == 1);
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            if (c == 1 && strcmp(cases[i].name, "shared.weight") == 0)
                continue;
            fixture_expect(&f, cases[i].name, cases[i].quantized ? QC_SCHEME_NF4 : QC_SCHEME_KEEP,
                           cases[i].role);
        }
        /* What a loader may take for a Linear is on the list, guess or not. */
        assert_true(fixture_skips(&f, "decoder.block.0.dt_proj"));
        assert_true(fixture_skips(&f, "decoder.block.0.gate"));
        assert_true(fixture_skips(&f, "tok"));
        assert_true(fixture_skips(&f, "lm_head.dense"));
        assert_false(fixture_skips(&f, "decoder.block.0.fc1"));
        /* A guess may be overruled, a certainty not. */
        fixture_rule(&f, 1, "*.dt_proj.*");
        fixture_make_ok(&f);
        fixture_expect(&f, "decoder.block.0.dt_proj.weight", QC_SCHEME_NF4, QC_ROLE_OTHER);
        fixture_rule(&f, 1, "embeddings.word*");
        fixture_make_fails(&f, QC_ERR_USAGE, "embeddings.word_embeddings.weight",
                           "embedding table");
    }
}

TEST(weights_that_no_linear_multiplies_with)
{
    static const struct {
        const char *type, *name;
    } kept[] = {
        {"deepseek_v4", "layers.0.attn.wo_a"},
        {"deepseek_v4", "model.layers.0.self_attn.o_a_proj"},
        {"mamba", "backbone.layers.0.mixer.dt_proj"},
        {"ibert", "ibert.encoder.layer.0.attention.self.query"},
    };
    for (size_t i = 0; i < 2 * (sizeof kept / sizeof *kept); i++) {
        SCOPED(fixture) f = {0};
        char config[64], name[96];
        const int other = i % 2 == 1; /* another type quantizes it */
        (void)snprintf(config, sizeof config, "{\"model_type\":\"%s\"}",
                       other ? "falcon_mamba" : kept[i / 2].type);
        (void)snprintf(name, sizeof name, "%s.weight", kept[i / 2].name);
        fixture_start(&f, QC_TO_NF4, config, "");
        fixture_add_dims(&f, name, QC_DTYPE_F32, 2, (const uint64_t[]){64, 64});
        fixture_make_ok(&f);
        fixture_expect(&f, name, other ? QC_SCHEME_NF4 : QC_SCHEME_KEEP,
                       other ? QC_ROLE_LINEAR : QC_ROLE_OTHER);
        assert_int_equal(fixture_skips(&f, kept[i / 2].name), !other);
    }
}

TEST(gate_without_experts_is_a_linear)
{
    SCOPED(fixture) f = {0};
    fixture_init(&f, QC_TO_NF4);
    fixture_add(&f, "block.0.gate.weight", 64, 64);
    fixture_add(&f, "embed_tokens.weight", 512, 64);
    fixture_make_ok(&f); /* and without any config.json */
    assert_string_equal(f.recipe.model_type, "");
    assert_int_equal(f.recipe.known_type, 0);
    fixture_expect(&f, "block.0.gate.weight", QC_SCHEME_NF4, QC_ROLE_LINEAR);
    assert_string_equal(fixture_entry(&f, "block.0.gate.weight")->why, "linear by general rule");
}

/* Heads that are tied have no tensor, and not every one is called lm_head. */
TEST(hidden_heads)
{
    static const struct {
        const char *type, *tensor, *skips;
    } cases[] = {
        {"whisper", "model.decoder.layers.0.fc1.weight", "lm_head proj_out"},
        {"bert", "cls.predictions.transform.dense.weight",
         "cls.predictions.decoder lm_head pooler pooler.dense"},
        {"albert", "predictions.dense.weight", "lm_head pooler pooler.dense predictions.decoder"},
        {"new", "text.cls.predictions.x.weight", "lm_head text.cls.predictions.decoder"},
        {"new", "mypredictions.x.weight", "lm_head"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SCOPED(fixture) f = {0};
        char config[64];
        fixture_init(&f, QC_TO_NF4);
        (void)snprintf(config, sizeof config, "{\"model_type\":\"%s\"}", cases[i].type);
        fixture_config(&f, config);
        fixture_add(&f, cases[i].tensor, 64, 64);
        fixture_make_ok(&f);
        fixture_expect(&f, cases[i].tensor, QC_SCHEME_NF4, QC_ROLE_LINEAR);
        fixture_expect_skips(&f, cases[i].skips);
    }
}

TEST(held_in_32_bit)
{
    static const char wo[] = "encoder.block.0.layer.1.DenseReluDense.wo.weight";
    static const fixture_tensor tensors[] = {
        {"shared.weight", 512, 64, QC_SCHEME_KEEP, QC_ROLE_EMBEDDING},
        {"encoder.block.0.layer.1.DenseReluDense.wi.weight", 128, 64, QC_SCHEME_NF4,
         QC_ROLE_LINEAR},
        {wo, 64, 128, QC_SCHEME_KEEP, QC_ROLE_LINEAR},
        {0},
    };
    SCOPED(fixture) f = {0};
    fixture_start(&f, QC_TO_NF4, "{\"model_type\":\"t5\",\"vocab_size\":512}", "");
    fixture_check(&f, tensors,
                  "classification_head encoder.block.0.layer.1.DenseReluDense.wo lm_head");
    /* In float16 it overflows: written as transformers holds it, unless --keep says otherwise. */
    for (size_t i = 0; i < f.model.tensor_count; i++)
        f.model.tensors[i].dtype = QC_DTYPE_F16;
    fixture_make_ok(&f);
    fixture_expect(&f, wo, QC_SCHEME_CAST, QC_ROLE_LINEAR);
    assert_int_equal(fixture_entry(&f, wo)->out_dtype, QC_DTYPE_F32);
    fixture_expect(&f, "shared.weight", QC_SCHEME_KEEP, QC_ROLE_EMBEDDING);
    fixture_rule(&f, 0, "*.wo.weight");
    fixture_make_ok(&f);
    fixture_expect(&f, wo, QC_SCHEME_KEEP, QC_ROLE_LINEAR);
    fixture_rule(&f, 1, "*.wo.weight");
    fixture_make_fails(&f, QC_ERR_USAGE, "wo.weight", "32 bit");
}

TEST(packed_by_other_tools)
{
    static const char *const leaves[] = {"qweight", "weight_packed", "trellis", "q_weight"};
    for (size_t i = 0; i < sizeof leaves / sizeof *leaves; i++) {
        SCOPED(fixture) f = {0};
        char name[128];
        fixture_start(&f, QC_TO_NF4, llama, "");
        (void)snprintf(name, sizeof name, LAYER "self_attn.q_proj.%s", leaves[i]);
        fixture_add_dims(&f, name, QC_DTYPE_I32, 2, (uint64_t[]){8, 64});
        fixture_add_dims(&f, LAYER "self_attn.q_proj.scales", QC_DTYPE_F16, 2, (uint64_t[]){8, 64});
        fixture_make_fails(&f, QC_ERR_UNSUPPORTED, name, "16-bit");
        fixture_rule(&f, 0, "*q_proj*");
        fixture_make_ok(&f);
        fixture_expect(&f, name, QC_SCHEME_KEEP, QC_ROLE_PACKED);
        fixture_expect(&f, LAYER "self_attn.q_proj.scales", QC_SCHEME_KEEP, QC_ROLE_STATE);
    }
}

TEST(odd_configs)
{
    static const char *const configs[] = {
        "{}",
        "{\"model_type\":null,\"vocab_size\":null,\"tie_word_embeddings\":null}",
        "{\"model_type\":7,\"vocab_size\":-1,\"text_config\":[]}",
        "{\"model_type\":\"\",\"vocab_size\":1.5,\"text_config\":{\"vocab_size\":\"x\"}}",
        "{\"model_type\":\" llama \",\"tie_word_embeddings\":\"yes\"}",
    };
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        SCOPED(fixture) f = {0};
        fixture_init(&f, QC_TO_NF4);
        add_llama(&f);
        fixture_config(&f, configs[i]);
        fixture_make_ok(&f);
        assert_int_equal(f.recipe.known_type, 0);
        fixture_expect(&f, LAYER "self_attn.q_proj.weight", QC_SCHEME_NF4, QC_ROLE_LINEAR);
        fixture_expect(&f, "lm_head.weight", QC_SCHEME_KEEP, QC_ROLE_HEAD);
    }
    SCOPED(fixture) f = {0}; /* nothing at all */
    fixture_init(&f, QC_TO_NF4);
    fixture_make_ok(&f);
    fixture_expect_skips(&f, "lm_head");
}

TEST(out_of_memory)
{
    SCOPED(fixture) f = {0};
    fixture_init(&f, QC_TO_NF4);
    add_llama(&f);
    fixture_rule(&f, 0, "*.mlp.*");
    EACH_ALLOCATION_FAILS (fault, 1) {
        qc_arena_deinit(&f.arena);
        fault.st = fixture_make(&f);
    }
}
