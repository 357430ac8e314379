/* config.json -> layers and their caches: the facts of tests/data/models, families by hand, and
 * fields that cannot be. */
#include "convert/model/geometry.h"

#include "tests/fixtures/model_files.h"

#include <dirent.h>

static const qc_kv_use one_8k = {.context = 8192, .batch = 1, .images = 1, .kv_bits = 16};

static uint64_t cache_bytes(const qc_geometry *g, const qc_kv_use *use)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < g->layer_count; i++)
        total += qc_layer_kv_bytes(g, i, use);
    return total;
}

/* What one more token of one sequence adds. */
static uint64_t next_bytes(const qc_geometry *g, const qc_kv_use *use)
{
    qc_kv_use now = *use, then;
    now.batch = 1;
    then = now;
    then.context++;
    return cache_bytes(g, &then) - cache_bytes(g, &now);
}

static uint64_t number(const qc_json_node *object, const char *key, uint64_t missing)
{
    uint64_t v = missing;
    const qc_json_node *n = qc_json_get(object, key);
    if (n && qc_json_kind_of(n) != QC_JSON_NULL)
        assert_int_equal(qc_json_as_u64(n, key, &v, NULL), QC_OK);
    return v;
}

/* One entry of "kv_cache" against the layers it is "at". Counts them. */
static uint32_t check_group(const qc_geometry *g, const qc_json_node *group)
{
    const char *kind = qc_json_string_or(qc_json_get(group, "kind"), "");
    uint64_t window = number(group, "window", 0);
    uint32_t count = 0;
    for (const qc_json_node *n = qc_json_first(qc_json_get(group, "at")); n; n = qc_json_next(n)) {
        uint64_t at = 0;
        assert_int_equal(qc_json_as_u64(n, "at", &at, NULL), QC_OK);
        assert_true(at < g->layer_count);
        const qc_layer_geometry *l = &g->layers[at];
        if (strcmp(kind, "mla") == 0) {
            assert_int_equal(l->attention, QC_ATTENTION_MLA);
            assert_int_equal(l->kv_elems, number(group, "kv_lora_rank", 0) +
                                              number(group, "qk_rope_head_dim", 0));
        } else {
            assert_int_equal(l->kv_elems,
                             2 * number(group, "kv_heads", 0) * number(group, "head_dim", 0));
            qc_attention want = qc_json_bool_or(qc_json_get(group, "cross"), 0)
                                    ? QC_ATTENTION_CROSS
                                    : (window ? QC_ATTENTION_SLIDING : QC_ATTENTION_FULL);
            assert_int_equal(l->attention, want);
        }
        if (qc_json_get(group, "media_tokens"))
            assert_int_equal(g->media_positions, number(group, "media_tokens", 0));
        assert_int_equal(l->window, window);
        count++;
    }
    assert_int_equal(count, number(group, "layers", 0));
    return count;
}

static void check_sizes(const qc_geometry *g, const qc_json_node *sizes, const char *file)
{
    qc_kv_use use = one_8k;
    uint64_t want = number(sizes, "kv_bytes_at_8192", UINT64_MAX);
    if (cache_bytes(g, &use) != want)
        fail_msg("%s: %" PRIu64 " bytes at 8192, expected %" PRIu64, file, cache_bytes(g, &use),
                 want);
    assert_int_equal(qc_kv_bytes_per_token(g, &use), number(sizes, "kv_bytes_per_token", 1));
    use.context = 1 << 20;
    assert_int_equal(next_bytes(g, &use), number(sizes, "kv_bytes_per_token_past_windows", 1));
    use.context = 0;
    assert_int_equal(next_bytes(g, &use), number(sizes, "kv_bytes_per_token", 1));
    assert_int_equal(cache_bytes(g, &use), number(sizes, "kv_bytes_cross_per_image", 0));
    use.mla_expanded = 1;
    if (qc_json_get(sizes, "kv_bytes_per_token_mla_expanded"))
        assert_int_equal(qc_kv_bytes_per_token(g, &use),
                         number(sizes, "kv_bytes_per_token_mla_expanded", 0));
    /* Twice the sequences at half the width. */
    use = (qc_kv_use){.context = 8192, .batch = 2, .images = 1, .kv_bits = 8};
    assert_int_equal(cache_bytes(g, &use), want);
}

TEST(every_model)
{
    unsigned found = 0;
    DIR *dir = opendir(QC_TEST_DATA "/models");
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        size_t len = strlen(e->d_name);
        if (len < 5 || strcmp(e->d_name + len - 5, ".json") != 0)
            continue;
        SCOPED(fixture) f = {0};
        qc_json *doc = load(&f, e->d_name, QC_TO_NF4);
        const qc_json_node *root = qc_json_root(doc);
        qc_geometry g;
        if (qc_geometry_read(&g, &f.arena, f.model.config, &f.err) != QC_OK)
            fail_msg("%s: %s", e->d_name, f.err.msg);
        uint32_t cached = 0;
        const qc_json_node *groups = qc_json_get(root, "kv_cache");
        for (const qc_json_node *n = qc_json_first(groups); n; n = qc_json_next(n))
            cached += check_group(&g, n);
        assert_int_equal(cached, g.decoder ? g.layer_count : 0);
        assert_int_equal(g.guessed, 0);
        check_sizes(&g, qc_json_get(root, "sizes"), e->d_name);
        qc_json_destroy(doc);
        found++;
    }
    (void)closedir(dir);
    assert_int_equal(found, 10);
}

typedef struct {
    qc_arena arena;
    qc_json *doc;
    qc_geometry g;
    qc_error err;
} reading;

static qc_status read_config(reading *r, const char *text)
{
    memset(r, 0, sizeof *r);
    qc_arena_init(&r->arena);
    if (qc_json_parse(&r->doc, text, strlen(text), QC_JSON_PYTHON, &r->err) != QC_OK)
        fail_msg("%s: %s", text, r->err.msg);
    return qc_geometry_read(&r->g, &r->arena, r->doc, &r->err);
}

static void read_ok(reading *r, const char *text)
{
    if (read_config(r, text) != QC_OK)
        fail_msg("%s: %s", text, r->err.msg);
}

static void reading_deinit(reading *r)
{
    qc_json_destroy(r->doc);
    qc_arena_deinit(&r->arena);
}

/* F full, S sliding, M latent, X cross, - none. */
static void expect_kinds(const char *text, const char *kinds, uint64_t window)
{
    static const char letters[] = {'-', 'F', 'S', 'M', 'X'};
    SCOPED(reading) r;
    read_ok(&r, text);
    char got[64] = "";
    for (uint32_t i = 0; i < r.g.layer_count; i++) {
        got[i] = letters[r.g.layers[i].attention];
        if (r.g.layers[i].attention == QC_ATTENTION_SLIDING)
            assert_int_equal(r.g.layers[i].window, window);
    }
    if (strcmp(got, kinds) != 0)
        fail_msg("%s: %s, expected %s", text, got, kinds);
}

#define SHAPE                                                                                      \
    "\"hidden_size\":64,\"num_attention_heads\":4,\"num_key_value_heads\":2,"                      \
    "\"intermediate_size\":128,\"vocab_size\":32,"

TEST(windows_of_families)
{
    expect_kinds("{\"model_type\":\"mistral\"," SHAPE "\"num_hidden_layers\":3,"
                 "\"sliding_window\":4096}",
                 "SSS", 4096);
    expect_kinds("{\"model_type\":\"mistral\"," SHAPE "\"num_hidden_layers\":2,"
                 "\"sliding_window\":null}",
                 "FF", 0);
    expect_kinds("{\"model_type\":\"mistral\"," SHAPE "\"num_hidden_layers\":2}", "SS", 4096);
    expect_kinds("{\"model_type\":\"llama\"," SHAPE "\"num_hidden_layers\":2,"
                 "\"sliding_window\":7}",
                 "FF", 0);
    expect_kinds("{\"model_type\":\"gemma2\"," SHAPE "\"num_hidden_layers\":5,"
                 "\"sliding_window\":9}",
                 "SFSFS", 9);
    expect_kinds("{\"model_type\":\"gemma3_text\"," SHAPE "\"num_hidden_layers\":8,"
                 "\"sliding_window\":512,\"sliding_window_pattern\":6}",
                 "SSSSSFSS", 512);
    expect_kinds("{\"model_type\":\"gemma3\",\"text_config\":{\"model_type\":\"gemma3_text\","
                 "\"hidden_size\":64,\"num_hidden_layers\":7,\"sliding_window\":1024}}",
                 "SSSSSFS", 1024);
    expect_kinds("{\"model_type\":\"qwen2\"," SHAPE "\"num_hidden_layers\":4,\"sliding_window\":7,"
                 "\"use_sliding_window\":false,\"max_window_layers\":2}",
                 "FFFF", 0);
    expect_kinds("{\"model_type\":\"qwen2\"," SHAPE "\"num_hidden_layers\":4,\"sliding_window\":7,"
                 "\"use_sliding_window\":true,\"max_window_layers\":2}",
                 "FFSS", 7);
    expect_kinds("{\"model_type\":\"gpt_oss\"," SHAPE "\"num_hidden_layers\":2,"
                 "\"sliding_window\":128,"
                 "\"layer_types\":[\"sliding_attention\",\"full_attention\"]}",
                 "SF", 128);
    expect_kinds("{\"model_type\":\"new\"," SHAPE "\"num_hidden_layers\":3,\"sliding_window\":5,"
                 "\"layer_types\":[\"linear_attention\",\"full_attention\",\"sliding_attention\"]}",
                 "-FS", 5);
    expect_kinds("{\"model_type\":\"bert\"," SHAPE "\"num_hidden_layers\":2}", "--", 0);
    expect_kinds("{\"model_type\":\"bert\",\"is_decoder\":true," SHAPE "\"num_hidden_layers\":2}",
                 "FF", 0);
}

TEST(latent_attention)
{
    SCOPED(reading) r;
    /* DeepSeek-V3: 61 layers of 512 + 64. */
    read_ok(&r, "{\"model_type\":\"deepseek_v3\",\"num_hidden_layers\":61,\"hidden_size\":7168,"
                "\"num_attention_heads\":128,\"num_key_value_heads\":128,\"kv_lora_rank\":512,"
                "\"qk_rope_head_dim\":64,\"qk_nope_head_dim\":128,\"v_head_dim\":128,"
                "\"intermediate_size\":18432,\"moe_intermediate_size\":2048,"
                "\"n_routed_experts\":256,\"n_shared_experts\":1,\"num_experts_per_tok\":8,"
                "\"first_k_dense_replace\":3,\"max_position_embeddings\":163840}");
    assert_int_equal(qc_kv_bytes_per_token(&r.g, &one_8k), 70272);
    assert_int_equal(r.g.experts, 256);
    assert_int_equal(r.g.intermediate, 2048 * 9);
    assert_int_equal(r.g.max_context, 163840);
}

TEST(names_of_other_families)
{
    reading r;
    read_ok(&r, "{\"model_type\":\"gpt2\",\"n_layer\":12,\"n_head\":12,\"n_embd\":768,"
                "\"n_positions\":1024,\"vocab_size\":50257,\"n_inner\":null}");
    assert_int_equal(r.g.guessed, 0);
    assert_int_equal(r.g.intermediate, 3072);
    assert_int_equal(r.g.max_context, 1024);
    assert_int_equal(qc_kv_bytes_per_token(&r.g, &one_8k), 12 * 2 * 768 * 2);
    reading_deinit(&r);
    read_ok(&r, "{\"model_type\":\"falcon\",\"num_hidden_layers\":32,\"num_attention_heads\":71,"
                "\"hidden_size\":4544,\"multi_query\":true,\"num_kv_heads\":71}");
    assert_int_equal(r.g.guessed, 0);
    assert_int_equal(r.g.kv_heads, 1);
    assert_int_equal(r.g.head_dim, 64);
    reading_deinit(&r);
    read_ok(&r, "{\"model_type\":\"falcon\",\"num_hidden_layers\":60,\"num_attention_heads\":128,"
                "\"hidden_size\":8192,\"new_decoder_architecture\":true,\"num_kv_heads\":8}");
    assert_int_equal(r.g.kv_heads, 8);
    reading_deinit(&r);
    read_ok(&r, "{\"model_type\":\"bloom\",\"n_layer\":70,\"num_attention_heads\":112,"
                "\"hidden_size\":14336,\"torch_dtype\":\"bfloat16\"}");
    assert_int_equal(qc_kv_bytes_per_token(&r.g, &one_8k), UINT64_C(70) * 2 * 14336 * 2);
    assert_int_equal(r.g.dtype, QC_DTYPE_BF16);
    reading_deinit(&r);
    read_ok(&r, "{\"model_type\":\"mixtral\"," SHAPE "\"num_hidden_layers\":1,"
                "\"num_local_experts\":8,\"num_experts_per_tok\":2,\"dtype\":\"float16\"}");
    assert_int_equal(r.g.intermediate, 256);
    assert_int_equal(r.g.experts_per_token, 2);
    assert_int_equal(r.g.dtype, QC_DTYPE_F16);
    reading_deinit(&r);
    read_ok(&r, "{\"model_type\":\"somebodys_own\"," SHAPE "\"num_hidden_layers\":2}");
    assert_int_equal(r.g.guessed, 1);
    reading_deinit(&r);
}

/* What is kept for `context` tokens in fp16 by the whole model. */
static uint64_t kept(const qc_geometry *g, uint64_t context)
{
    const qc_kv_use use = {.context = context, .batch = 1, .kv_bits = 16};
    uint64_t total = 0;
    for (uint32_t i = 0; i < g->layer_count; i++)
        total += qc_layer_kv_bytes(g, i, &use);
    return total;
}

/* Bytes of the caches that transformers 5.23 filled for a model of this shape in bfloat16. A window
 * of 8 is counted whole where 7 were found between two steps. What was worked out and not measured
 * says so. tests/interop/test_interop_caches.py compares more types. */
TEST(kept_by_families)
{
    static const struct {
        const char *text;
        uint64_t at_12, at_40;
    } cases[] = {
        /* A state of fixed size. */
        {"{\"model_type\":\"mamba\",\"num_hidden_layers\":6,\"hidden_size\":64,\"expand\":2,"
         "\"intermediate_size\":128,\"state_size\":16,\"conv_kernel\":4,"
         "\"time_step_limit\":[0.0, Infinity]}",
         55296, 55296},
        {"{\"model_type\":\"mamba2\",\"num_hidden_layers\":6,\"hidden_size\":64,\"expand\":2,"
         "\"state_size\":128,\"num_heads\":8,\"head_dim\":16,\"n_groups\":2,\"conv_kernel\":4}",
         423936, 423936},
        {"{\"model_type\":\"rwkv\",\"num_hidden_layers\":6,\"hidden_size\":64,"
         "\"attention_hidden_size\":64}",
         6144, 6144},
        /* 2,560 bytes of states were measured; the keys and values of two layers are worked out. */
        {"{\"model_type\":\"recurrent_gemma\",\"num_hidden_layers\":6,\"hidden_size\":64,"
         "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":16,\"lru_width\":64,"
         "\"attention_window_size\":8,\"block_types\":[\"recurrent\",\"recurrent\",\"attention\"]}",
         4608, 4608},
        {"{\"model_type\":\"xlstm\",\"num_hidden_layers\":6,\"hidden_size\":128,\"num_heads\":4}",
         25392, 25392},
        /* A few layers of attention among others. */
        {"{\"model_type\":\"jamba\"," SHAPE "\"num_hidden_layers\":6,\"mamba_expand\":2,"
         "\"mamba_d_state\":16,\"mamba_d_conv\":4,\"attn_layer_period\":8,\"attn_layer_offset\":4}",
         47616, 51200},
        {"{\"model_type\":\"nemotron_h\"," SHAPE "\"head_dim\":16,\"conv_kernel\":4,"
         "\"mamba_num_heads\":8,\"mamba_head_dim\":16,\"ssm_state_size\":128,\"n_groups\":8,"
         "\"layers_block_type\":[\"linear_attention\",\"full_attention\",\"linear_attention\","
         "\"moe\",\"full_attention\",\"linear_attention\"]}",
         251904, 259072},
        /* Worked out: the same layers by their letters. */
        {"{\"model_type\":\"nemotron_h\"," SHAPE "\"head_dim\":16,\"conv_kernel\":4,"
         "\"mamba_num_heads\":8,\"mamba_head_dim\":16,\"ssm_state_size\":128,\"n_groups\":8,"
         "\"num_hidden_layers\":6,\"hybrid_override_pattern\":\"M*M-*M\"}",
         251904, 259072},
        {"{\"model_type\":\"falcon_h1\"," SHAPE "\"num_hidden_layers\":6,\"head_dim\":16,"
         "\"mamba_d_ssm\":128,\"mamba_d_state\":16,\"mamba_n_groups\":1,\"mamba_d_conv\":4}",
         /* measured with a state of 16 */ 66048, 87552},
        {"{\"model_type\":\"qwen3_next\"," SHAPE "\"num_hidden_layers\":6,\"head_dim\":16,"
         "\"linear_num_key_heads\":2,\"linear_num_value_heads\":2,\"linear_key_head_dim\":16,"
         "\"linear_value_head_dim\":16,\"linear_conv_kernel_dim\":4}",
         15616, 19200},
        /* A decoder beside an encoder keeps keys and values of the source too. */
        {"{\"model_type\":\"bart\",\"is_encoder_decoder\":true,\"d_model\":64,"
         "\"num_hidden_layers\":3,\"encoder_layers\":3,\"decoder_layers\":6,"
         "\"decoder_attention_heads\":4}",
         36864, 122880},
        {"{\"model_type\":\"whisper\",\"is_encoder_decoder\":true,\"d_model\":64,"
         "\"decoder_layers\":6,\"decoder_attention_heads\":4,\"max_source_positions\":1500}",
         2322432, 2365440},
        {"{\"model_type\":\"trocr\",\"d_model\":64,\"decoder_layers\":6,"
         "\"decoder_attention_heads\":4}",
         18432, 61440},
        {"{\"model_type\":\"xglm\",\"d_model\":64,\"num_layers\":6,\"attention_heads\":16}", 18432,
         61440},
        {"{\"model_type\":\"t5gemma\",\"is_encoder_decoder\":true,\"encoder\":{},\"decoder\":{"
         "\"model_type\":\"t5_gemma_module\"," SHAPE "\"num_hidden_layers\":6,\"head_dim\":16,"
         "\"sliding_window\":8,\"layer_types\":[\"sliding_attention\",\"full_attention\","
         "\"sliding_attention\",\"full_attention\",\"sliding_attention\",\"full_attention\"]}}",
         16896, 49152},
        /* Worked out: the encoder alone. */
        {"{\"model_type\":\"t5\",\"is_encoder_decoder\":true,\"d_model\":64,\"num_heads\":4,"
         "\"d_kv\":16,\"num_layers\":3,\"num_decoder_layers\":6,"
         "\"architectures\":[\"T5EncoderModel\"]}",
         0, 0},
        /* Two attentions in a layer; layers that use the cache of others; sizes per layer. */
        {"{\"model_type\":\"longcat_flash\",\"num_layers\":6,\"num_hidden_layers\":12,"
         "\"hidden_size\":64,"
         "\"num_attention_heads\":4,\"kv_lora_rank\":16,\"qk_rope_head_dim\":8,"
         "\"qk_nope_head_dim\":16,\"v_head_dim\":16}",
         6912, 23040},
        {"{\"model_type\":\"gemma3n_text\",\"hidden_size\":64,\"num_attention_heads\":4,"
         "\"num_key_value_heads\":2,\"num_hidden_layers\":6,\"head_dim\":16,"
         "\"intermediate_size\":[128,128,128,128,128,128],\"sliding_window\":8,"
         "\"num_kv_shared_layers\":2,\"layer_types\":[\"sliding_attention\",\"full_attention\","
         "\"sliding_attention\",\"full_attention\",\"sliding_attention\",\"full_attention\"]}",
         5120, 12288},
        /* Worked out for two layers; six were measured. */
        {"{\"model_type\":\"gemma4_text\"," SHAPE "\"num_hidden_layers\":2,\"head_dim\":16,"
         "\"sliding_window\":8,\"layer_types\":[\"sliding_attention\",\"full_attention\"]}",
         1024 + 12 * 4096, 1024 + 40 * 4096},
        /* Measured: towers and encoders keep nothing, whatever their config.json looks like. */
        {"{\"model_type\":\"swin\",\"num_layers\":4,\"hidden_size\":64,\"num_heads\":[3,6,12,24],"
         "\"depths\":[2,2,6,2]}",
         0, 0},
        {"{\"model_type\":\"convbert\"," SHAPE "\"num_hidden_layers\":2}", 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SCOPED(reading) r;
        read_ok(&r, cases[i].text);
        if (kept(&r.g, 12) != cases[i].at_12 || kept(&r.g, 40) != cases[i].at_40)
            fail_msg("%s: %llu and %llu bytes, expected %llu and %llu", cases[i].text,
                     (unsigned long long)kept(&r.g, 12), (unsigned long long)kept(&r.g, 40),
                     (unsigned long long)cases[i].at_12, (unsigned long long)cases[i].at_40);
        assert_int_equal(r.g.guessed, 0);
    }
}

TEST(little_is_said)
{
    reading r;
    read_ok(&r, "{}");
    assert_string_equal(r.g.model_type, "");
    assert_int_equal(r.g.layer_count, 0);
    assert_int_equal(r.g.guessed, 1);
    assert_int_equal(r.g.dtype, QC_DTYPE_COUNT);
    reading_deinit(&r);
    read_ok(&r, "{\"model_type\":\"llama\",\"vocab_size\":32}");
    assert_int_equal(r.g.layer_count, 0);
    assert_int_equal(r.g.vocab, 32);
    reading_deinit(&r);
    qc_geometry g;
    assert_int_equal(qc_geometry_read(&g, NULL, NULL, NULL), QC_OK);
    assert_int_equal(g.layer_count, 0);
    assert_string_equal(g.model_type, "");
}

TEST(what_cannot_be)
{
    static const struct {
        const char *text, *words;
    } cases[] = {
        {"{\"model_type\":\"llama\"," SHAPE "\"num_hidden_layers\":1000000000}",
         "num_hidden_layers is 1000000000, expected at most 10000"},
        {"{\"model_type\":\"llama\"," SHAPE "\"num_hidden_layers\":-1}", "num_hidden_layers"},
        {"{\"model_type\":\"llama\"," SHAPE "\"num_hidden_layers\":1.5}", "num_hidden_layers"},
        {"{\"model_type\":\"llama\"," SHAPE "\"num_hidden_layers\":\"32\"}", "num_hidden_layers"},
        {"{\"model_type\":\"llama\",\"num_hidden_layers\":2,\"hidden_size\":64}",
         "no num_attention_heads"},
        {"{\"model_type\":\"llama\",\"num_hidden_layers\":2,\"num_attention_heads\":4}",
         "no hidden_size"},
        {"{\"model_type\":\"llama\",\"num_hidden_layers\":2,\"num_attention_heads\":4,"
         "\"hidden_size\":66}",
         "not a multiple"},
        {"{\"model_type\":\"llama\",\"num_hidden_layers\":2,\"num_attention_heads\":4,"
         "\"num_key_value_heads\":0,\"hidden_size\":64}",
         "num_key_value_heads 0"},
        {"{\"model_type\":\"mixtral\"," SHAPE "\"num_hidden_layers\":2,"
         "\"num_local_experts\":1000000}",
         "num_local_experts is 1000000"},
        {"{\"model_type\":\"mixtral\"," SHAPE "\"num_hidden_layers\":2,"
         "\"num_local_experts\":8,\"num_experts_per_tok\":9}",
         "num_experts_per_tok is 9, expected at most 8"},
        {"{\"model_type\":\"gpt_oss\"," SHAPE "\"num_hidden_layers\":2,\"layer_types\":"
         "[\"full_attention\"]}",
         "layer_types has 1 entries"},
        {"{\"model_type\":\"gpt_oss\"," SHAPE "\"num_hidden_layers\":1,\"layer_types\":"
         "[\"full_attention\",\"full_attention\"]}",
         "more entries"},
        {"{\"model_type\":\"gpt_oss\"," SHAPE "\"num_hidden_layers\":1,\"layer_types\":[3]}",
         "layer_types"},
        {"{\"model_type\":\"gpt_oss\"," SHAPE "\"num_hidden_layers\":1,\"layer_types\":\"full\"}",
         "expected a list"},
        {"{\"model_type\":\"mllama\"," SHAPE "\"num_hidden_layers\":2,"
         "\"cross_attention_layers\":[2]}",
         "names layer 2"},
        {"{\"model_type\":\"deepseek_v3\"," SHAPE "\"num_hidden_layers\":2,\"kv_lora_rank\":512}",
         "kv_lora_rank is 512"},
        {"{\"model_type\":\"mllama\",\"vision_config\":{\"image_size\":1000000000,"
         "\"patch_size\":1,\"max_num_tiles\":1000000000}}",
         "positions"},
        {"{\"model_type\":\"llama\",\"max_position_embeddings\":9007199254740991}",
         "max_position_embeddings"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SCOPED(reading) r;
        qc_status st = read_config(&r, cases[i].text);
        if (st != QC_ERR_INPUT || !strstr(r.err.msg, cases[i].words))
            fail_msg("%s: %s: %s", cases[i].text, qc_status_name(st), r.err.msg);
    }
}

TEST(sizes_saturate)
{
    SCOPED(reading) r;
    read_ok(&r, "{\"model_type\":\"llama\",\"num_hidden_layers\":2,\"hidden_size\":1073741824,"
                "\"num_attention_heads\":1073741824,\"head_dim\":1073741824}");
    qc_kv_use use = {.context = UINT64_MAX, .batch = UINT64_MAX, .kv_bits = 32};
    assert_true(qc_layer_kv_bytes(&r.g, 0, &use) == UINT64_MAX);
    assert_true(qc_kv_bytes_per_token(&r.g, &use) == UINT64_MAX);
}

TEST_GROUP(NULL, free_roles)
