/* Tensors worked out from configurations: against the ten pattern files name by name, and against
 * published parameter counts. */
#include "base/text.h"
#include "convert/known/known_models.h"

#include "convert/known/model_tensors.h"
#include "convert/model/geometry.h"
#include "convert/model/segments.h"
#include "convert/plan/plan.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/model_files.h"
#include "tests/fixtures/sanitized.h"
#include "tests/fixtures/test_model.h"

#include <dirent.h>
#include <time.h>

static const qc_known_model *all;

static unsigned count_all(void)
{
    unsigned count = 0;
    all = qc_known_models(&count);
    assert_true(count > 200);
    return count;
}

static qc_checkpoint *open_ok(const char *model, int want_weights)
{
    qc_error err = {0};
    qc_checkpoint *c = NULL;
    int has_weights = -1;
    if (qc_model_open(&c, model, &has_weights, &err) != QC_OK)
        fail_msg("%s: %s", model, err.msg);
    assert_int_equal(has_weights, want_weights);
    return c;
}

static void open_fails(const char *model, qc_status code, const char *words)
{
    qc_error err = {0};
    qc_checkpoint *c = NULL;
    int has_weights = 0;
    qc_status st = qc_model_open(&c, model, &has_weights, &err);
    if (st != code || !strstr(err.msg, words))
        fail_msg("%s: %s: %s", model, qc_status_name(st), err.msg);
    assert_null(c);
}

/* ---- the pattern files ---- */

/* got has the tensors of want and no others; buffers are not worked out. */
static void expect_same(const qc_checkpoint *got, const qc_checkpoint *want, const char *file)
{
    size_t k = 0;
    uint64_t bytes = 0;
    for (size_t i = 0; i < want->tensor_count; i++) {
        const qc_checkpoint_tensor *w = &want->tensors[i];
        if (strcmp(w->name, "embeddings.position_ids") == 0)
            continue;
        if (k == got->tensor_count)
            fail_msg("%s: '%s' is missing", file, w->name);
        const qc_checkpoint_tensor *g = &got->tensors[k++];
        if (strcmp(g->name, w->name) != 0)
            fail_msg("%s: '%s', expected '%s'", file, g->name, w->name);
        int same = g->dtype == w->dtype && g->ndim == w->ndim && g->bytes == w->bytes;
        for (unsigned d = 0; same && d < g->ndim; d++)
            same = g->dims[d] == w->dims[d];
        if (!same)
            fail_msg("%s: '%s' differs in dtype or shape", file, g->name);
        bytes += g->bytes;
    }
    if (k != got->tensor_count)
        fail_msg("%s: '%s' is too many", file, got->tensors[k].name);
    assert_int_equal(got->tensor_bytes, bytes);
}

static void same_geometry(fixture *f, const qc_checkpoint *got)
{
    qc_geometry a, b;
    qc_kv_use use = {.context = 8192, .batch = 1, .images = 1, .kv_bits = 16};
    assert_int_equal(qc_geometry_read(&a, &f->arena, f->model.config, NULL), QC_OK);
    assert_int_equal(qc_geometry_read(&b, &f->arena, got->config, NULL), QC_OK);
    assert_int_equal(a.layer_count, b.layer_count);
    assert_int_equal(a.media_positions, b.media_positions);
    assert_int_equal(a.intermediate, b.intermediate);
    assert_int_equal(a.experts_per_token, b.experts_per_token);
    assert_int_equal(a.max_context, b.max_context);
    for (uint32_t i = 0; i < a.layer_count; i++)
        assert_int_equal(qc_layer_kv_bytes(&a, i, &use), qc_layer_kv_bytes(&b, i, &use));
}

TEST(every_model)
{
    unsigned found = 0;
    char folder[64], path[512];
    test_folder(folder, sizeof folder);
    (void)snprintf(path, sizeof path, "%s/config.json", folder);
    DIR *dir = opendir(QC_TEST_DATA "/models");
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        if (!qc_ends_with(e->d_name, ".json"))
            continue;
        SCOPED(fixture) f = {0};
        qc_json *doc = load(&f, e->d_name, QC_TO_NF4);
        fixture_make_ok(&f); /* sorts */
        const char *id = qc_json_string_or(qc_json_get(qc_json_root(doc), "hf_id"), "");
        qc_checkpoint *c = open_ok(id, 0);
        assert_string_equal(c->path, id);
        expect_same(c, &f.model, id);
        same_geometry(&f, c);
        qc_checkpoint_close(c);
        /* From the configuration in the file, as a folder and as a path. */
        test_must(qc_file_put(path, config_text, strlen(config_text), &f.err), &f.err);
        c = open_ok(folder, 0);
        expect_same(c, &f.model, e->d_name);
        qc_checkpoint_close(c);
        c = open_ok(path, 0);
        expect_same(c, &f.model, e->d_name);
        qc_checkpoint_close(c);
        qc_json_destroy(doc);
        found++;
    }
    (void)closedir(dir);
    assert_int_equal(found, 10);
}

/* ---- published counts ---- */

static uint64_t parameters(const qc_checkpoint *c, const char *without, qc_dtype only)
{
    uint64_t total = 0;
    for (size_t i = 0; i < c->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &c->tensors[i];
        uint64_t n = t->bytes * 8 / qc_dtype_bits(t->dtype);
        if (without && strncmp(t->name, without, strlen(without)) == 0)
            continue;
        if (only != QC_DTYPE_COUNT) {
            total += t->dtype == only ? n : 0;
            continue;
        }
        if (qc_ends_with(t->name, "_scales") || qc_ends_with(t->name, "_scale_inv"))
            continue;
        total += qc_ends_with(t->name, "_blocks") ? 2 * n : n;
    }
    return total;
}

/* Models with a layer for multi-token prediction, all of it counted. What docs/models.md says of
 * the others, and of these without that layer, is held by documented. */
static const struct {
    const char *id;
    uint64_t parameters;
} published[] = {
    {"zai-org/GLM-4.5-Air", 110468824832}, {"zai-org/GLM-4.5", 358337791296},
    {"zai-org/GLM-4.7", 358337791296},     {"deepseek-ai/DeepSeek-V3.2", 685355329792},
    {"zai-org/GLM-4.6", 356785898816},     {"zai-org/GLM-5", 753864139008},
    {"zai-org/GLM-5.2", 753329940480},
};

TEST(published_counts)
{
    for (size_t i = 0; i < sizeof published / sizeof *published; i++) {
        qc_checkpoint *c = open_ok(published[i].id, 0);
        uint64_t got = parameters(c, NULL, QC_DTYPE_COUNT);
        if (got != published[i].parameters)
            fail_msg("%s: %" PRIu64 " parameters, expected %" PRIu64, published[i].id, got,
                     published[i].parameters);
        qc_checkpoint_close(c);
    }
    qc_checkpoint *c = open_ok("bert-base-uncased", 0);
    assert_int_equal(parameters(c, "cls.", QC_DTYPE_COUNT), 109482240);
    qc_checkpoint_close(c);
    /* Qwen3.5: the tower, the layer for multi-token prediction, the text. */
    c = open_ok("Qwen3.5-4B", 0);
    const uint64_t whole = parameters(c, NULL, QC_DTYPE_COUNT);
    assert_int_equal(whole - parameters(c, "model.visual.", QC_DTYPE_COUNT), 333514240);
    assert_int_equal(whole - parameters(c, "mtp.", QC_DTYPE_COUNT), 120599552);
    assert_int_equal(whole - parameters(c, "model.language_model.", QC_DTYPE_COUNT), 4205751296);
    qc_checkpoint_close(c);
    /* DeepSeek-V3: without the layer for multi-token prediction, and by dtype with it. */
    clock_t begin = clock();
    c = open_ok("DeepSeek-V3", 0);
    print_message("DeepSeek-V3: %zu tensors, %.1f ms\n", c->tensor_count,
                  (double)(clock() - begin) * 1000.0 / CLOCKS_PER_SEC);
    assert_int_equal(c->tensor_count, 91991);
    assert_int_equal(parameters(c, "model.layers.61.", QC_DTYPE_COUNT), 671026419200);
    assert_int_equal(parameters(c, NULL, QC_DTYPE_F8_E4M3), 680571043840);
    assert_int_equal(parameters(c, NULL, QC_DTYPE_BF16), 3918786560);
    assert_int_equal(parameters(c, NULL, QC_DTYPE_F32), 41555600);
    qc_checkpoint_close(c);
}

/* ---- configurations by hand ---- */

typedef struct {
    char folder[64], path[128];
} place_for_config;

static void put_config(const place_for_config *p, const char *text)
{
    qc_error err = {0};
    test_must(qc_file_put(p->path, text, strlen(text), &err), &err);
}

static void make_place(place_for_config *p)
{
    test_folder(p->folder, sizeof p->folder);
    (void)snprintf(p->path, sizeof p->path, "%s/config.json", p->folder);
}

#define QWEN_MOE                                                                                   \
    "{\"model_type\":\"qwen2_moe\",\"hidden_size\":2048,\"intermediate_size\":5632,"               \
    "\"num_hidden_layers\":24,\"num_attention_heads\":16,\"num_key_value_heads\":16,"              \
    "\"vocab_size\":151936,\"num_experts\":60,\"num_experts_per_tok\":4,"                          \
    "\"moe_intermediate_size\":1408,\"shared_expert_intermediate_size\":5632,"                     \
    "\"decoder_sparse_step\":1,\"torch_dtype\":\"bfloat16\"}"
#define TINY                                                                                       \
    "\"hidden_size\":8,\"intermediate_size\":16,\"num_hidden_layers\":2,"                          \
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"vocab_size\":10"

TEST(other_families)
{
    static const struct {
        const char *config;
        uint64_t parameters, tensors;
    } cases[] = {
        /* Qwen1.5-MoE-A2.7B, gemma-2b, gemma-7b, gemma-3-1b: published. */
        {QWEN_MOE, 14315784192, 24 * (2 + 7 + 1 + 180 + 3 + 1) + 3},
        {"{\"model_type\":\"gemma\",\"hidden_size\":2048,\"intermediate_size\":16384,"
         "\"num_hidden_layers\":18,\"num_attention_heads\":8,\"num_key_value_heads\":1,"
         "\"head_dim\":256,\"vocab_size\":256000}",
         2506172416, 18 * 9 + 2},
        {"{\"model_type\":\"gemma\",\"hidden_size\":3072,\"intermediate_size\":24576,"
         "\"num_hidden_layers\":28,\"num_attention_heads\":16,\"num_key_value_heads\":16,"
         "\"head_dim\":256,\"vocab_size\":256000}",
         8537680896, 28 * 9 + 2},
        {"{\"model_type\":\"gemma3_text\",\"hidden_size\":1152,\"intermediate_size\":6912,"
         "\"num_hidden_layers\":26,\"num_attention_heads\":4,\"num_key_value_heads\":1,"
         "\"head_dim\":256,\"vocab_size\":262144}",
         999885952, 26 * 13 + 2},
        /* By hand: 10*8 twice, 8; layers of q 64, k and v 32, o 64, three of 128, norms 16. */
        {"{\"model_type\":\"llama\"," TINY "}", 80 + 80 + 8 + 2 * (64 + 64 + 64 + 384 + 16), 21},
        {"{\"model_type\":\"llama\",\"attention_bias\":true,\"mlp_bias\":true," TINY "}",
         80 + 80 + 8 + 2 * (64 + 64 + 64 + 384 + 16 + 8 + 4 + 4 + 8 + 16 + 16 + 8), 21 + 14},
        {"{\"model_type\":\"llama\",\"tie_word_embeddings\":true," TINY "}",
         80 + 8 + 2 * (64 + 64 + 64 + 384 + 16), 20},
        {"{\"model_type\":\"phi3\"," TINY "}", 80 + 80 + 8 + 2 * (64 + 64 + 64 + 384 + 16),
         3 + 2 * 6},
        /* One dense layer of two. */
        {"{\"model_type\":\"qwen3_moe\",\"head_dim\":4,\"num_experts\":3,"
         "\"num_experts_per_tok\":1,\"moe_intermediate_size\":4,\"mlp_only_layers\":[1]," TINY "}",
         80 + 80 + 8 + 2 * (64 + 64 + 64 + 16 + 8) + 384 + 24 + 3 * 96, 3 + 16 + 3 + 1 + 9},
        {"{\"model_type\":\"qwen3_moe\",\"head_dim\":4,\"num_experts\":3,"
         "\"num_experts_per_tok\":1,\"moe_intermediate_size\":4,\"decoder_sparse_step\":2," TINY
         "}",
         80 + 80 + 8 + 2 * (64 + 64 + 64 + 16 + 8) + 384 + 24 + 3 * 96, 3 + 16 + 3 + 1 + 9},
        {"{\"model_type\":\"bert\",\"architectures\":[\"BertForMaskedLM\"],"
         "\"max_position_embeddings\":5," TINY "}",
         80 + 40 + 16 + 16 + 2 * (4 * 72 + 144 + 136 + 32) + 10 + 72 + 16, 5 + 32 + 5},
    };
    place_for_config p;
    make_place(&p);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_config(&p, cases[i].config);
        qc_checkpoint *c = open_ok(p.folder, 0);
        uint64_t got = parameters(c, NULL, QC_DTYPE_COUNT);
        if (got != cases[i].parameters || c->tensor_count != cases[i].tensors)
            fail_msg("%s: %" PRIu64 " parameters in %zu tensors, expected %" PRIu64 " in %" PRIu64,
                     cases[i].config, got, c->tensor_count, cases[i].parameters, cases[i].tensors);
        qc_checkpoint_close(c);
    }
    /* decoder_sparse_step 2: the second of two has the experts. */
    put_config(&p, "{\"model_type\":\"qwen3_moe\",\"head_dim\":4,\"num_experts\":3,"
                   "\"num_experts_per_tok\":1,\"moe_intermediate_size\":4,"
                   "\"decoder_sparse_step\":2," TINY "}");
    qc_checkpoint *c = open_ok(p.folder, 0);
    assert_null(qc_checkpoint_find(c, "model.layers.0.mlp.gate.weight"));
    assert_non_null(qc_checkpoint_find(c, "model.layers.1.mlp.gate.weight"));
    qc_checkpoint_close(c);
    /* gpt-oss that is not packed. */
    put_config(&p, "{\"model_type\":\"gpt_oss\",\"head_dim\":4,\"num_local_experts\":3,"
                   "\"num_experts_per_tok\":1,\"attention_bias\":true," TINY "}");
    c = open_ok(p.folder, 0);
    const qc_checkpoint_tensor *t =
        qc_checkpoint_find(c, "model.layers.1.mlp.experts.gate_up_proj");
    assert_non_null(t);
    assert_int_equal(t->dims[0], 3);
    assert_int_equal(t->dims[1], 8);
    assert_int_equal(t->dims[2], 32);
    assert_int_equal(t->dtype, QC_DTYPE_F32);
    qc_checkpoint_close(c);
}

TEST(refused_configurations)
{
    static const struct {
        const char *config;
        qc_status code;
        const char *words;
    } cases[] = {
        {"{\"model_type\":\"mamba\"," TINY "}", QC_ERR_UNSUPPORTED,
         "give the checkpoint itself or its headers (docs/planning.md), or a type of "
         "docs/models.md: llama"},
        {"{" TINY "}", QC_ERR_INPUT,
         "expected the configuration of a model, with a model_type or architectures, found JSON"},
        {"{\"architectures\":[\"Own\"]," TINY "}", QC_ERR_UNSUPPORTED, "expected a model_type"},
        {"{\"version\":\"1.0\",\"added_tokens\":[],\"model\":{\"type\":\"BPE\",\"vocab\":{}}}",
         QC_ERR_INPUT,
         "expected the configuration of a model, with a model_type or architectures, found JSON"},
        {"{\"model_type\":\"gemma3\",\"text_config\":{\"model_type\":\"gemma3_text\"}}",
         QC_ERR_UNSUPPORTED, "'gemma3'"},
        {"{\"model_type\":\"mllama\"}", QC_ERR_UNSUPPORTED, "'mllama'"},
        {"{\"model_type\":\"llama\",\"quantization_config\":{\"quant_method\":\"gptq\"}," TINY "}",
         QC_ERR_UNSUPPORTED, "quantized by 'gptq'"},
        {"{\"model_type\":\"llama\",\"quantization_config\":{\"quant_method\":\"fp8\","
         "\"weight_block_size\":[128,128]}," TINY "}",
         QC_ERR_UNSUPPORTED, "quantized by 'fp8'"},
        {"{\"model_type\":\"llama\"}", QC_ERR_INPUT,
         "the number of layers is missing, so the tensors"},
        {"{\"model_type\":\"llama\",\"num_hidden_layers\":1000000000,\"hidden_size\":8,"
         "\"num_attention_heads\":2}",
         QC_ERR_INPUT, "num_hidden_layers is 1000000000"},
        {"{\"model_type\":\"llama\",\"num_hidden_layers\":2,\"hidden_size\":8,"
         "\"num_attention_heads\":2,\"intermediate_size\":8}",
         QC_ERR_INPUT, "vocab_size is missing"},
        {"{\"model_type\":\"llama\",\"num_hidden_layers\":2,\"hidden_size\":8,"
         "\"num_attention_heads\":2,\"intermediate_size\":8,\"vocab_size\":-5}",
         QC_ERR_INPUT, "vocab_size is -5"},
        {"{\"model_type\":\"mixtral\"," TINY "}", QC_ERR_INPUT, "number of experts"},
        {"{\"model_type\":\"mixtral\",\"num_local_experts\":100000,\"num_hidden_layers\":10000,"
         "\"hidden_size\":8,\"num_attention_heads\":2,\"intermediate_size\":8,\"vocab_size\":9}",
         QC_ERR_INPUT, "10000 layers with 100000 experts each"},
        {"{\"model_type\":\"qwen3_moe\",\"head_dim\":4,\"num_experts\":3,"
         "\"num_experts_per_tok\":1,\"moe_intermediate_size\":0," TINY "}",
         QC_ERR_INPUT, "dimension of 0"},
        {"{\"model_type\":\"qwen3_moe\",\"head_dim\":4,\"num_experts\":3,"
         "\"num_experts_per_tok\":1,\"moe_intermediate_size\":4,\"mlp_only_layers\":[2]," TINY "}",
         QC_ERR_INPUT, "names layer 2"},
        {"{\"model_type\":\"deepseek_v2\",\"n_routed_experts\":3," TINY "}", QC_ERR_INPUT,
         "kv_lora_rank is missing"},
        {"{\"model_type\":\"gpt_oss\",\"num_local_experts\":3,\"quantization_config\":"
         "{\"quant_method\":\"mxfp4\"}," TINY "}",
         QC_ERR_INPUT,
         "expected inputs of experts in whole blocks of MXFP4, which have 32 weights"},
        {"{\"model_type\":\"bert\",\"architectures\":[\"BertForQuestionAnswering\"]," TINY "}",
         QC_ERR_UNSUPPORTED, "'BertForQuestionAnswering'"},
        {"{\"model_type\":\"gpt2\",\"n_layer\":1,\"n_head\":1,\"n_embd\":8}", QC_ERR_INPUT,
         "n_positions"},
        {"[1]", QC_ERR_INPUT,
         "expected the configuration of a model, with a model_type or architectures, found JSON"},
        {"{\"model_type\":", QC_ERR_INPUT, "config.json"},
        {"", QC_ERR_INPUT, "config.json"},
    };
    place_for_config p;
    make_place(&p);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_config(&p, cases[i].config);
        open_fails(p.path, cases[i].code, cases[i].words);
        open_fails(p.folder, cases[i].code, p.folder);
    }
}

/* The first built-in configuration of each type that is not among the largest. */
static int is_first_of_type(unsigned i)
{
    const char *text = all[i].config;
    size_t head = (size_t)(strstr(strstr(text, "model_type"), ",") - text);
    for (unsigned k = 0; k < i; k++) {
        if (strncmp(all[k].config, text, head) == 0)
            return 0;
    }
    qc_checkpoint *c = open_ok(all[i].id, 0);
    const size_t tensors = c->tensor_count;
    qc_checkpoint_close(c);
    return tensors < 20000;
}

/* Every number of a configuration replaced, one at a time, by what it cannot be. */
TEST(spoilt_configurations)
{
    static const char *const values[] = {"0",    "-1",    "1000000000", "1e300",           "2.5",
                                         "null", "\"x\"", "[]",         "9007199254740991"};
    qc_checkpoint *c = NULL;
    place_for_config p;
    make_place(&p);
    for (unsigned i = 0; i < count_all(); i++) {
        const char *text = all[i].config;
        if (!is_first_of_type(i))
            continue;
        for (const char *s = text; (s = strstr(s, "\":")) != NULL;) {
            s += 2;
            size_t n = strspn(s, "0123456789");
            for (size_t v = 0; n && v < sizeof values / sizeof *values; v++) {
                char spoilt[4096];
                qc_error err = {0};
                int has_weights = 0;
                (void)snprintf(spoilt, sizeof spoilt, "%.*s%s%s", (int)(s - text), text, values[v],
                               s + n);
                put_config(&p, spoilt);
                qc_status st = qc_model_open(&c, p.folder, &has_weights, &err);
                if (st != QC_OK && (st != QC_ERR_INPUT || !strstr(err.msg, "config.json")) &&
                    !strstr(err.msg, "overflow"))
                    fail_msg("%s: %s: %s", spoilt, qc_status_name(st), err.msg);
                if (st == QC_OK)
                    qc_checkpoint_close(c);
            }
        }
    }
}

/* ---- finding ---- */

TEST(ids)
{
    for (unsigned i = 0; i < count_all(); i++) {
        const char *id = all[i].id;
        assert_ptr_equal(qc_known_model_find(id), &all[i]);
        assert_ptr_equal(qc_known_model_find(strchr(id, '/') + 1), &all[i]);
    }
    assert_string_equal(qc_known_model_find("LLAMA-3.1-8b")->id, "meta-llama/Llama-3.1-8B");
    assert_null(qc_known_model_find(""));
    assert_null(qc_known_model_find("Llama-3.1-8"));
    assert_null(qc_known_model_find("other/Llama-3.1-8B"));
    open_fails("Llama-3.1-9B", QC_ERR_INPUT,
               "did you mean 'meta-llama/Llama-3.1-8B', 'meta-llama/Meta-Llama-3-8B' or '");
    open_fails("no/such/place", QC_ERR_INPUT, "does not exist");
}

/* Addresses, copies by their last part, and the beginning of one name only. */
TEST(meant_ids)
{
    static const struct {
        const char *asked, *meant;
    } cases[] = {
        {"https://huggingface.co/meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"},
        {"hf://Qwen/Qwen3-8B", "Qwen/Qwen3-8B"},
        {"unsloth/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"},
        {"Llama-3.3-70B", "meta-llama/Llama-3.3-70B-Instruct"},
        {"Llama3.3-70B", "meta-llama/Llama-3.3-70B-Instruct"},
        {"Llama 3.3 70B", "meta-llama/Llama-3.3-70B-Instruct"},
        {"llama-3.3", "meta-llama/Llama-3.3-70B-Instruct"},
        {"Gemma-3-27b", NULL}, /* -pt and -it */
        {"gpt-oss-1", NULL},   /* not the 1 of 120 */
        {"Llama-3.1-8B-I", "meta-llama/Llama-3.1-8B-Instruct"},
        {"Llama-3.1-7", NULL},
        {"Llama-3.2", NULL}, /* several */
        {"Llama-3.3-70B-Instruct-bnb-4bit", NULL},
        {"", NULL},
        {"-", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const qc_known_model *found = qc_known_model_meant(cases[i].asked);
        const char *want = cases[i].meant;
        if (!found != !want || (found && strcmp(found->id, want) != 0))
            fail_msg("%s: '%s', expected '%s'", cases[i].asked, found ? found->id : "",
                     want ? want : "");
    }
    open_fails("foo/bar-7b", QC_ERR_INPUT,
               "give a folder with its config.json: hf download foo/bar-7b config.json --local-dir "
               "bar-7b");
}

/* The family first, then the size, then the letters. */
TEST(near_ids)
{
    static const struct {
        const char *asked, *near;
    } cases[] = {
        {"Llama-3-8B", "meta-llama/Llama-3.1-8B"},
        {"Llama-3.1-70B-", "meta-llama/Llama-3.1-70B"},
        {"Gemma-3-27b", "google/gemma-3-27b-pt"},
        {"meta-llama/Llama-3-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct"},
        {"Llama-3.1-8b-it", "meta-llama/Llama-3.1-8B"},
        {"Llama-3.1-9B", "meta-llama/Llama-3.1-8B"},
        {"llama3-405b", "meta-llama/Llama-3.1-405B"},
        {"Qwen3-70B", "Qwen/Qwen2.5-72B"},
        {"qwen/qwen3-32", "Qwen/Qwen3-32B"},
        {"mistral", "mistralai/Mistral-7B-v0.1"},
        {"mistralai/Mistral-7B", "mistralai/Mistral-7B-v0.1"},
        {"mixtral-8x22b-chat", "mistralai/Mixtral-8x22B-v0.1"},
        {"gpt-oss", "openai/gpt-oss-20b"},
        {"gpt-oss-100b", "openai/gpt-oss-120b"},
        {"lama-3.1-70B", "meta-llama/Llama-3.1-70B"},
        {"ll", NULL},
        {"an-instruct-8B", NULL},
        {"quite another thing", NULL},
        {"", NULL},
        {"gxxxpxxxtxxx2xxx", NULL},
    };
    const char *near[QC_KNOWN_NEAR_MAX];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *want = cases[i].near;
        unsigned n = qc_known_model_near(cases[i].asked, near);
        if ((n > 0) != (want != NULL) || (want && strcmp(near[0], want) != 0))
            fail_msg("%s: '%s', expected '%s'", cases[i].asked, n ? near[0] : "", want ? want : "");
    }
    assert_int_equal(qc_known_model_near("Llama-3-8B", near), 3);
    assert_string_equal(near[1], "meta-llama/Meta-Llama-3-8B");
    char lengthy[400];
    memset(lengthy, 'a', sizeof lengthy - 1);
    lengthy[sizeof lengthy - 1] = '\0';
    assert_int_equal(qc_known_model_near(lengthy, near), 0);
}

TEST(paths)
{
    qc_error err = {0};
    place_for_config p;
    make_place(&p);
    put_config(&p, "{\"model_type\":\"llama\"," TINY "}");
    qc_checkpoint *c = open_ok(p.folder, 0);
    assert_string_equal(c->path, p.folder);
    assert_non_null(c->config);
    assert_int_equal(c->config_len, strlen(c->config_text));
    /* No weights to read. */
    qc_st_cursor *cursor = NULL;
    unsigned char byte = 0;
    assert_int_equal(qc_st_cursor_create(&cursor, &err), QC_OK);
    assert_int_equal(qc_checkpoint_read(c, cursor, &c->tensors[0], 0, &byte, 1, &err),
                     QC_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.msg, "has no weights: it was worked out from a configuration"));
    qc_st_cursor_destroy(cursor);
    qc_checkpoint_close(c);
    /* Weights of whatever kind: no longer a configuration alone. */
    char path[160];
    (void)snprintf(path, sizeof path, "%s/pytorch_model.bin", p.folder);
    test_must(qc_file_put(path, "x", 1, &err), &err);
    int has_weights = 0;
    assert_int_not_equal(qc_model_open(&c, p.folder, &has_weights, &err), QC_OK);
    assert_int_equal(unlink(path), 0);
    /* A whole checkpoint, and no configuration at all. */
    test_write_model(p.folder);
    c = open_ok(p.folder, 1);
    assert_int_equal(c->tensor_count, 4);
    qc_checkpoint_close(c);
    test_folder(p.folder, sizeof p.folder);
    assert_int_not_equal(qc_model_open(&c, p.folder, &has_weights, &err), QC_OK);
}

/* Recipe, segments and sizes take them as they are. */
TEST(every_one_can_be_planned)
{
    const char *last = "";
    for (unsigned i = 0; i < count_all(); i++) {
        const qc_known_model *k = &all[i];
        if (k->config == last)
            continue;
        last = k->config;
        qc_checkpoint *c = open_ok(k->id, 0);
        qc_plan_options o = {.recipe = {.to = QC_TO_NF4, .double_quant = 1}};
        qc_recipe recipe;
        qc_plan plan;
        qc_geometry g;
        qc_segments segments;
        qc_error err = {0};
        SCOPED(qc_arena) arena = {0};
        test_must(qc_recipe_make(&recipe, &arena, c, &o.recipe, &err), &err);
        test_must(qc_geometry_read(&g, &arena, c->config, &err), &err);
        test_must(qc_segments_make(&segments, &arena, c, &recipe, &g, &err), &err);
        test_must(qc_plan_begin(&plan, &arena, c, &recipe, NULL, &o, &err), &err);
        assert_true(recipe.known_type);
        assert_int_equal(g.guessed, 0);
        assert_int_equal(plan.source_bytes, c->tensor_bytes);
        uint32_t layers = 0;
        for (uint32_t s = 0; s < segments.count; s++)
            layers += segments.segments[s].kind == QC_SEGMENT_LAYER;
        assert_int_equal(layers, g.layer_count);
        qc_checkpoint_close(c);
    }
}

/* The row of the page's tables that names the id, or NULL. */
static const char *row_of(const char *text, const char *id)
{
    size_t n = strlen(id);
    for (const char *at = strstr(text, id); at; at = strstr(at + n, id)) {
        const char *line = at;
        while (line > text && line[-1] != '\n')
            line--;
        if (*line == '|' && (at[n] == ',' || at[n] == ' '))
            return at;
    }
    return NULL;
}

/* docs/models.md names every id with its published number of parameters: without a layer for
 * multi-token prediction. */
TEST(documented)
{
    size_t len = 0;
    char *text = read_text(QC_TEST_DATA "/../../docs/models.md", &len);
    for (unsigned i = 0; i < count_all(); i++) {
        const char *id = all[i].id;
        const char *at = row_of(text, id);
        char digits[64];
        if (!at)
            fail_msg("%s is not in docs/models.md", id);
        qc_checkpoint *c = open_ok(id, 0);
        const char *layers = strstr(all[i].config, "\"num_hidden_layers\":");
        (void)snprintf(digits, sizeof digits, "model.layers.%ld.",
                       layers ? strtol(strchr(layers, ':') + 1, NULL, 10) : -1);
        uint64_t rest = parameters(c, digits, QC_DTYPE_COUNT); /* without a prediction layer */
        digits[0] = '\0';
        for (uint64_t unit = 1000000000000000; unit; unit /= 1000) {
            size_t used = strlen(digits);
            if (rest / unit == 0 && used == 0)
                continue;
            (void)snprintf(digits + used, sizeof digits - used, used ? ",%03d" : "%d",
                           (int)(rest / unit % 1000));
        }
        const char *end = strchr(at, '\n');
        const char *found = strstr(at, digits);
        if (!found || found > end || strchr("0123456789,", found[-1]) ||
            strchr("0123456789,", found[strlen(digits)]))
            fail_msg("%s: docs/models.md does not say %s", id, digits);
        qc_checkpoint_close(c);
    }
    free(text);
}

/* Every allocation fails once. */
TEST(out_of_memory)
{
    static const char *const models[] = {"gemma-2-2b-it", "gpt2", "Llama-3.2-11B-Vision"};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        EACH_ALLOCATION_FAILS (fault, 0) {
            qc_checkpoint *c = NULL;
            int has_weights = 0;
            SCOPED(qc_arena) arena = {0};
            qc_plan_options o = {.recipe = {.to = QC_TO_NF4, .double_quant = 1}};
            qc_recipe recipe;
            qc_geometry g;
            qc_segments segments;
            fault.st = qc_model_open(&c, models[i], &has_weights, NULL);
            if (fault.st == QC_OK)
                fault.st = qc_geometry_read(&g, &arena, c->config, NULL);
            if (fault.st == QC_OK)
                fault.st = qc_recipe_make(&recipe, &arena, c, &o.recipe, NULL);
            if (fault.st == QC_OK)
                fault.st = qc_segments_make(&segments, &arena, c, &recipe, &g, NULL);
            qc_checkpoint_close(c);
            assert_true(fault.st != QC_OK || fault.at > 10);
        }
    }
}

TEST(shapes_alone)
{
    static const char config[] = "{\"model_type\":\"llama\"}";
    const uint64_t most = UINT64_C(1) << 61;
    qc_checkpoint_tensor rows[] = {
        {.name = "b", .dtype = QC_DTYPE_BF16, .ndim = 2, .dims = {3, 5}, .begin = 7, .file = 9},
        {.name = "a", .dtype = QC_DTYPE_F32, .ndim = 1, .dims = {4}},
    };
    qc_checkpoint *c = NULL;
    qc_error err = {0};
    test_must(qc_checkpoint_create_shapes(&c, "m", config, strlen(config), rows, 2, &err), &err);
    assert_string_equal(c->tensors[0].name, "a");
    assert_int_equal(c->tensor_bytes, 16 + 30);
    assert_int_equal(qc_checkpoint_find(c, "b")->begin, 0);
    assert_int_equal(qc_checkpoint_find(c, "b")->file, 0);
    qc_checkpoint_close(c);
    rows[1].name = "b";
    assert_int_equal(qc_checkpoint_create_shapes(&c, "m", config, strlen(config), rows, 2, &err),
                     QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "'b' is there twice"));
    assert_null(c);
    rows[1] = (qc_checkpoint_tensor){.name = "c", .dtype = QC_DTYPE_F32, .ndim = 1, .dims = {most}};
    rows[0] = (qc_checkpoint_tensor){.name = "d", .dtype = QC_DTYPE_F32, .ndim = 1, .dims = {most}};
    assert_int_equal(qc_checkpoint_create_shapes(&c, "m", config, strlen(config), rows, 2, &err),
                     QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "overflow"));
    assert_int_equal(qc_checkpoint_create_shapes(&c, "m", "[]", 2, rows, 0, &err), QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "; expected an object"));
}

TEST_GROUP(NULL, free_roles)
