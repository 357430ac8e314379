/* What transformers must leave alone, in the names that its versions give it in memory; and weights
 * that it stores the other way round. */
#include "tests/fixtures/recipe_fixture.h"

#define TOWER "vision_tower.vision_model.encoder.layers."

/* Heads that a class for labels adds to a model whose file has none of them, unless the name would
 * catch what is quantized. */
TEST(heads_of_other_classes)
{
    SCOPED(fixture) f = {0};
    fixture_start(&f, QC_TO_NF4, "{\"model_type\":\"qwen2\",\"vocab_size\":512}",
                  "+*.score.up.weight");
    fixture_add(&f, "model.layers.0.mlp.up_proj.weight", 64, 64);
    fixture_add(&f, "model.layers.0.score.up.weight", 64, 64);
    fixture_make_ok(&f);
    assert_true(fixture_skips(&f, "classifier"));
    assert_true(fixture_skips(&f, "qa_outputs"));
    assert_false(fixture_skips(&f, "score"));
    /* A part's own type has a head of its own. */
    fixture_start(&f, QC_TO_NF4,
                  "{\"model_type\":\"vision-encoder-decoder\",\"decoder\":"
                  "{\"model_type\":\"trocr\",\"vocab_size\":512}}",
                  "");
    fixture_add(&f, "decoder.model.decoder.layers.0.fc1.weight", 64, 64);
    fixture_make_ok(&f);
    assert_true(fixture_skips(&f, "output_projection"));
    /* What transformers leaves alone. */
    fixture_start(&f, QC_TO_NF4, "{\"model_type\":\"clip\"}", "");
    fixture_add(&f, "text_projection.weight", 64, 64);
    fixture_add(&f, "visual_projection.weight", 64, 64);
    fixture_make_ok(&f);
    fixture_expect(&f, "text_projection.weight", QC_SCHEME_KEEP, QC_ROLE_HEAD);
    fixture_expect(&f, "visual_projection.weight", QC_SCHEME_NF4, QC_ROLE_LINEAR);
    assert_true(fixture_skips(&f, "text_projection"));
    /* One copy in the file, one for each layer in memory. */
    fixture_start(&f, QC_TO_NF4, "{\"model_type\":\"grounding-dino\",\"decoder_layers\":2}", "");
    fixture_add(&f, "bbox_embed.0.layers.0.weight", 64, 64);
    fixture_add(&f, "bbox_embed.0.layers.2.weight", 4, 64);
    fixture_add(&f, "model.encoder_output_bbox_embed.layers.0.weight", 64, 64);
    fixture_make_ok(&f);
    fixture_expect(&f, "model.encoder_output_bbox_embed.layers.0.weight", QC_SCHEME_NF4,
                   QC_ROLE_LINEAR);
    fixture_expect_skips(&f, "bbox_embed.0 bbox_embed.0.layers.0 bbox_embed.0.layers.2 "
                             "bbox_embed.1 bbox_embed.2 lm_head model.decoder.bbox_embed");
}

/* transformers 5.24 renames these as it loads. */
TEST(names_that_transformers_5_gives)
{
    static const struct {
        const char *type, *name, *in_memory[4];
    } cases[] = {
        {"sarvam_moe",
         "model.layers.0.attention.query_key_value",
         {"model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj",
          "model.layers.0.self_attn.v_proj"}},
        {"sarvam_moe", "model.layers.0.attention.dense", {"model.layers.0.self_attn.o_proj"}},
        {"axk2",
         "model.layers.0.input_layernorm2.W_up",
         {"model.layers.0.input_layernorm2.mlp.fc2"}},
        {"axk2", "model.layers.0.self_attn.q_b_proj", {"model.layers.0.self_attn.q_gate_proj"}},
        {"step3p7",
         "vision_model.transformer.resblocks.1.attn.out_proj",
         {"model.vision_model.layers.1.self_attn.out_proj",
          "model.vision_model.layers.1.self_attn.q_proj",
          "model.vision_model.layers.1.self_attn.v_proj"}},
        {"step3p7",
         "model.layers.0.share_expert.up_proj",
         {"model.language_model.layers.0.mlp.shared_experts.up_proj"}},
        {"inkling2",
         "model.llm.layers.0.attn.wq_du",
         {"model.language_model.layers.0.self_attn.q_proj.linear"}},
        {"inkling2",
         "model.visual.backbone.layers.3.mlp.c_fc",
         {"model.vision_tower.layers.3.mlp.fc1"}},
        {"ultrabert", "ultrabert.layers.0.up", {"model.layers.0.up", "layers.0.up"}},
        {"diffusion_gemma",
         "model.decoder.layers.0.up",
         {"model.encoder.language_model.layers.0.up"}},
        {"llama_of_somebody", "model.layers.0.attention.dense", {"model.layers.0.attention.dense"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SCOPED(fixture) f = {0};
        char config[64], name[96];
        (void)snprintf(config, sizeof config, "{\"model_type\":\"%s\"}", cases[i].type);
        (void)snprintf(name, sizeof name, "%s.weight", cases[i].name);
        fixture_start(&f, QC_TO_NF4, config, "-*");
        fixture_add(&f, name, 64, 64);
        fixture_make_ok(&f);
        assert_true(fixture_skips(&f, cases[i].name));
        for (size_t k = 0; k < 4 && cases[i].in_memory[k]; k++)
            if (!fixture_skips(&f, cases[i].in_memory[k]))
                fail_msg("%s: '%s' is not on the list", cases[i].type, cases[i].in_memory[k]);
        assert_false(fixture_skips(&f, "model.layers.0.self_attn.k_norm"));
    }
}

/* Names in memory differ from those of the file, and by version. */
TEST(names_in_memory)
{
    static const char llava[] = "{\"model_type\":\"llava\",\"text_config\":{\"vocab_size\":512},"
                                "\"vision_config\":{}}";
    static const struct {
        const char *config, *rules, *names[6], *skips;
    } cases[] = {
        {llava,
         "-vision_tower.* -*.layers.0.*",
         {"language_model.model.layers.0.mlp.up_proj.weight",
          "language_model.model.layers.1.mlp.up_proj.weight",
          "multi_modal_projector.linear_1.weight", TOWER "0.mlp.fc1.weight",
          TOWER "1.mlp.fc1.weight"},
         "language_model.model.layers.0.mlp.up_proj lm_head "
         "model.language_model.layers.0.mlp.up_proj model.vision_tower vision_tower"},
        /* a tower of which only a part stays */
        {llava,
         "-*.layers.0.*",
         {TOWER "0.mlp.fc1.weight", TOWER "1.mlp.fc1.weight"},
         "lm_head model.vision_tower.encoder.layers.0.mlp.fc1 "
         "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1 "
         "vision_tower.encoder.layers.0.mlp.fc1 "
         "vision_tower.vision_model.encoder.layers.0.mlp.fc1"},
        /* language layers without a word of it */
        {"{\"model_type\":\"qwen2_vl\",\"vocab_size\":512,\"vision_config\":{}}",
         "-model.*",
         {"model.layers.0.mlp.up_proj.weight", "visual.blocks.0.mlp.fc1.weight"},
         "lm_head model.language_model.layers.0.mlp.up_proj model.layers.0.mlp.up_proj"},
        /* ViT, renamed inside */
        {"{\"model_type\":\"vit\"}",
         "-*.layer.0.*",
         {"vit.encoder.layer.0.attention.attention.query.weight",
          "vit.encoder.layer.1.attention.attention.query.weight",
          "vit.encoder.layer.0.output.dense.weight"},
         "lm_head vit.encoder.layer.0.attention.attention.query "
         "vit.encoder.layer.0.attention.q_proj vit.encoder.layer.0.mlp.fc2 "
         "vit.encoder.layer.0.output.dense vit.layers.0.attention.q_proj vit.layers.0.mlp.fc2"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SCOPED(fixture) f = {0};
        fixture_start(&f, QC_TO_NF4, cases[i].config, cases[i].rules);
        for (const char *const *name = cases[i].names; *name; name++)
            fixture_add(&f, *name, 64, 64);
        fixture_make_ok(&f);
        fixture_expect_skips(&f, cases[i].skips);
    }
}

/* GPT-2 as a part of something else: [in, out] by its bias, by its name where it is square. */
TEST(conv1d_without_a_table)
{
    static const char *const configs[] = {
        "{\"model_type\":\"vision-encoder-decoder\",\"decoder\":{\"model_type\":\"gpt2\"}}",
        "{\"model_type\":\"of-my-own\"}", /* where nothing tells, a square matrix is a Linear */
    };
    for (int i = 0; i < 2; i++) {
        SCOPED(fixture) f = {0};
        fixture_init(&f, QC_TO_NF4);
        fixture_config(&f, configs[i]);
        fixture_add(&f, "decoder.h.0.attn.c_attn.weight", 64, 192);
        fixture_add_1d(&f, "decoder.h.0.attn.c_attn.bias", 192);
        fixture_add(&f, "decoder.h.0.attn.c_proj.weight", 64, 64);
        fixture_add_1d(&f, "decoder.h.0.attn.c_proj.bias", 64);
        fixture_add(&f, "encoder.fc1.weight", 128, 64);
        fixture_add_1d(&f, "encoder.fc1.bias", 128);
        fixture_add(&f, "encoder.c_fc.weight", 128, 64); /* gpt_bigcode's is a Linear */
        fixture_add_1d(&f, "encoder.c_fc.bias", 128);
        fixture_make_ok(&f);
        assert_int_equal(fixture_entry(&f, "decoder.h.0.attn.c_attn.weight")->transpose, 1);
        assert_int_equal(fixture_entry(&f, "decoder.h.0.attn.c_proj.weight")->transpose, i == 0);
        assert_int_equal(fixture_entry(&f, "encoder.fc1.weight")->transpose, 0);
        assert_int_equal(fixture_entry(&f, "encoder.c_fc.weight")->transpose, 0);
    }
}
