/* The recipe on the layouts of real checkpoints (tests/data/models): the role of every tensor, the
 * parameters that are quantized, and the bytes that come out of it. */
#include "tests/fixtures/model_files.h"

#include <dirent.h>
#include <time.h>

static qc_role expected_role(const char *role)
{
    static const struct {
        const char *name;
        qc_role role;
    } map[] = {
        {"linear", QC_ROLE_LINEAR},       {"mxfp4_blocks", QC_ROLE_PACKED},
        {"embedding", QC_ROLE_EMBEDDING}, {"mxfp4_scales", QC_ROLE_STATE},
        {"lm_head", QC_ROLE_HEAD},        {"fp8_scale", QC_ROLE_STATE},
        {"norm", QC_ROLE_NORM},           {"bias", QC_ROLE_BIAS},
        {"router", QC_ROLE_ROUTER},       {"router_bias", QC_ROLE_BIAS},
        {"sinks", QC_ROLE_OTHER},         {"gate", QC_ROLE_OTHER},
        {"conv", QC_ROLE_CONV},           {"pos_embed", QC_ROLE_EMBEDDING},
        {"buffer", QC_ROLE_OTHER},
    };
    for (size_t i = 0; i < sizeof map / sizeof *map; i++) {
        if (strcmp(map[i].name, role) == 0)
            return map[i].role;
    }
    fail_msg("role '%s' is new", role);
    return QC_ROLE_OTHER;
}

/* Bytes by the rules of tests/data/models/README.md: without per-tensor constants and buffers. */
static uint64_t bytes_of(const qc_checkpoint_tensor *t, const qc_recipe_entry *e, const char *role)
{
    uint64_t n = 0, rows = t->dims[0];
    assert_int_equal(qc_shape_elems(t->dims, t->ndim, &n, NULL), QC_OK);
    if (strcmp(role, "buffer") == 0 || e->scheme == QC_SCHEME_ABSORBED)
        return 0;
    if (e->coded && e->scheme != QC_SCHEME_KEEP) {
        assert_int_equal(qc_shape_elems(e->coded->dims, e->coded->ndim, &n, NULL), QC_OK);
        rows = t->dims[0] * t->dims[1];
    }
    uint64_t blocks = (n + 63) / 64;
    if (e->scheme == QC_SCHEME_NF4)
        return (n + 1) / 2 + blocks + 4 * ((blocks + 255) / 256);
    if (e->scheme == QC_SCHEME_INT8_ROWS)
        return n + 4 * rows;
    return n * qc_dtype_bits(e->out_dtype) / 8;
}

static uint64_t check_model(const fixture *f, const char *file, uint64_t *quantized)
{
    uint64_t total = 0;
    *quantized = 0;
    for (size_t i = 0; i < f->model.tensor_count; i++) {
        const qc_checkpoint_tensor *t = &f->model.tensors[i];
        const qc_recipe_entry *e = &f->recipe.entries[i];
        assert_string_equal(t->name, roles[i].name);
        qc_role want = expected_role(roles[i].role);
        if (e->role != want)
            fail_msg("%s: '%s' is %s, expected %s (%s)", file, t->name, qc_role_name(e->role),
                     qc_role_name(want), e->why);
        if (e->scheme == QC_SCHEME_NF4 || e->scheme == QC_SCHEME_INT8_ROWS)
            *quantized += t->bytes * 8 / (e->coded ? 4 : qc_dtype_bits(t->dtype));
        assert_int_equal(e->transpose, e->coded && e->scheme == QC_SCHEME_CAST);
        assert_non_null(e->why);
        total += bytes_of(t, e, roles[i].role);
    }
    return total;
}

static void expect_size(const qc_json_node *root, const char *file, const char *key, uint64_t got)
{
    uint64_t want = 0;
    const qc_json_node *sizes = qc_json_get(root, "sizes");
    if (qc_json_as_u64(qc_json_get(sizes, key), key, &want, NULL) != QC_OK)
        fail_msg("%s has no size '%s'", file, key);
    if (got != want)
        fail_msg("%s %s: %" PRIu64 " bytes, expected %" PRIu64, file, key, got, want);
}

/* From models/NOTES: quantizable parameters, without what is MXFP4. */
static const struct {
    const char *file;
    uint64_t quantizable;
    const char *skips;
} models[] = {
    {"DeepSeek-V2.5.json", 234643783680, "lm_head"},
    {"Llama-3.1-8B.json", 6979321856, "lm_head"},
    {"Llama-3.2-11B-Vision-Instruct.json", 9542041600, "lm_head"},
    {"Llama-3.3-70B-Instruct.json", 68451041280, "lm_head"},
    {"Qwen2.5-72B-Instruct.json", 70212648960, "lm_head"},
    {"Qwen3-32B.json", 31205621760, "lm_head"},
    {"all-MiniLM-L6-v2.json", 10764288, "lm_head"},
    {"deepseek-llm-7b-chat.json", 6071255040, "lm_head"},
    {"gemma-2-2b.json", 2024275968, "lm_head"},
    {"gpt-oss-20b.json", 637009920, "lm_head"},
};

static void one_model(const char *file, uint64_t quantizable, const char *skips)
{
    static const struct {
        qc_to to;
        const char *key;
    } runs[] = {{QC_TO_NF4, "nf4"}, {QC_TO_INT8, "int8"}, {QC_TO_BF16, "bf16"}};
    for (size_t r = 0; r < sizeof runs / sizeof *runs; r++) {
        SCOPED(fixture) f = {0};
        qc_json *doc = load(&f, file, runs[r].to);
        f.options.rest = QC_REST_BF16;
        fixture_make_ok(&f);
        assert_int_equal(f.recipe.known_type, 1);
        uint64_t quantized = 0, total = check_model(&f, file, &quantized);
        const qc_json_node *root = qc_json_root(doc);
        char key[64];
        int mxfp4 = strcmp(file, "gpt-oss-20b.json") == 0;
        (void)snprintf(key, sizeof key, "%s%s", runs[r].key, mxfp4 ? " mxfp4=keep" : "");
        if (runs[r].to != QC_TO_BF16) {
            expect_size(root, file, key, total);
            assert_int_equal(quantized, quantizable);
            fixture_expect_skips(&f, skips);
        } else {
            expect_size(root, file, "bf16", total);
            assert_int_equal(f.recipe.skip_count, 0);
        }
        qc_json_destroy(doc);
    }
}

/* --requantize: experts, too; NOTES' 19.7e9 weights and its sizes. */
TEST(gpt_oss_requantized)
{
    static const char file[] = "gpt-oss-20b.json";
    for (int int8 = 0; int8 < 2; int8++) {
        SCOPED(fixture) f = {0};
        qc_json *doc = load(&f, file, int8 ? QC_TO_INT8 : QC_TO_NF4);
        f.options.requantize = 1;
        fixture_make_ok(&f);
        uint64_t quantized = 0, total = check_model(&f, file, &quantized);
        expect_size(qc_json_root(doc), file, int8 ? "int8" : "nf4", total);
        assert_true(quantized == 19747307520);
        assert_int_equal(f.recipe.input_is_coded, 1);
        fixture_expect_skips(&f, "lm_head");
        qc_json_destroy(doc);
    }
}

TEST(every_model)
{
    size_t known = sizeof models / sizeof *models, found = 0;
    DIR *dir = opendir(QC_TEST_DATA "/models");
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        size_t len = strlen(e->d_name);
        if (len < 5 || strcmp(e->d_name + len - 5, ".json") != 0)
            continue;
        size_t i = 0;
        while (i < known && strcmp(models[i].file, e->d_name) != 0)
            i++;
        if (i == known)
            fail_msg("%s is not in the list of this test", e->d_name);
        one_model(models[i].file, models[i].quantizable, models[i].skips);
        found++;
    }
    (void)closedir(dir);
    assert_int_equal(found, known);
}

/* The usual practice: the vision tower and the projector stay in 16 bit. */
TEST(mllama_without_vision)
{
    static const char file[] = "Llama-3.2-11B-Vision-Instruct.json";
    for (int int8 = 0; int8 < 2; int8++) {
        SCOPED(fixture) f = {0};
        qc_json *doc = load(&f, file, int8 ? QC_TO_INT8 : QC_TO_NF4);
        fixture_rule(&f, 0, "vision_model.*");
        fixture_rule(&f, 0, "multi_modal_projector.*");
        fixture_make_ok(&f);
        uint64_t quantized = 0, total = check_model(&f, file, &quantized);
        expect_size(qc_json_root(doc), file, int8 ? "int8 vision=False" : "nf4 vision=False",
                    total);
        /* Named as in the file and as transformers calls them since 4.52. */
        assert_true(fixture_skips(&f, "multi_modal_projector"));
        assert_true(fixture_skips(&f, "model.multi_modal_projector"));
        assert_true(fixture_skips(&f, "vision_model")); /* one name for all of it */
        assert_true(fixture_skips(&f, "model.vision_model"));
        assert_false(fixture_skips(&f, "vision_model.transformer.layers.31.mlp.fc1"));
        assert_true(fixture_skips(&f, "lm_head"));
        qc_json_destroy(doc);
    }
}

/* The same without config.json's model_type: the general rules come to the same weights. */
TEST(general_rules_agree)
{
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        SCOPED(fixture) f = {0};
        qc_json *doc = load(&f, models[i].file, QC_TO_NF4);
        uint64_t vocab = 0;
        const qc_json_node *config = qc_json_get(qc_json_root(doc), "config");
        const qc_json_node *n = qc_json_get(config, "vocab_size");
        if (!n)
            n = qc_json_get(qc_json_get(config, "text_config"), "vocab_size");
        assert_int_equal(qc_json_as_u64(n, "vocab_size", &vocab, NULL), QC_OK);
        char text[128];
        (void)snprintf(text, sizeof text,
                       "{\"model_type\":\"new\",\"vocab_size\":%" PRIu64 ",\"num_experts\":8}",
                       vocab);
        fixture_config(&f, text);
        fixture_make_ok(&f);
        assert_int_equal(f.recipe.known_type, 0);
        for (size_t k = 0; k < f.model.tensor_count; k++) {
            const qc_recipe_entry *e = &f.recipe.entries[k];
            int want = strcmp(roles[k].role, "linear") == 0;
            if ((e->scheme == QC_SCHEME_NF4) != want)
                fail_msg("%s: '%s' is %s (%s)", models[i].file, roles[k].name,
                         qc_scheme_name(e->scheme), e->why);
        }
        assert_true(fixture_skips(&f, "lm_head"));
        qc_json_destroy(doc);
    }
}

/* 29,102 tensors three times over and eight globs. */
TEST(many_tensors_and_globs)
{
    SCOPED(fixture) f = {0};
    qc_json *doc = load(&f, "DeepSeek-V2.5.json", QC_TO_NF4);
    size_t n = f.model.tensor_count;
    for (int copy = 0; copy < 2; copy++) {
        for (size_t i = 0; i < n; i++) {
            char name[512];
            qc_checkpoint_tensor t = f.model.tensors[i];
            (void)snprintf(name, sizeof name, "copy%d.%s", copy, t.name);
            fixture_add_dims(&f, name, t.dtype, t.ndim, t.dims);
        }
    }
    static const char *const globs[] = {
        "*.q_a_proj.*",  "model.layers.1.*",    "*.experts.1?.*", "*[0-4].down_proj.weight",
        "*.layers.5?.*", "*e*e*e*e*.up_proj.*", "*.kv_b_proj.*",  "*lm_head*",
    };
    for (size_t i = 0; i < sizeof globs / sizeof *globs; i++)
        fixture_rule(&f, 0, globs[i]);
    clock_t start = clock();
    fixture_make_ok(&f);
    double ms = (double)(clock() - start) * 1000.0 / CLOCKS_PER_SEC;
    print_message("%zu tensors, %u globs: %.1f ms\n", f.model.tensor_count, f.options.rule_count,
                  ms);
    qc_json_destroy(doc);
}

TEST_GROUP(NULL, free_roles)
