/* formats/manifest.h */
#include "formats/manifest.h"

#include <math.h>
#include <time.h>

#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/manifest_sample.h"
#include "tests/fixtures/sanitized.h"
#include "tests/fixtures/test.h"

/* What was read does not need the text any more, and writes it again. */
static void assert_rewrites_to_itself(const qc_strbuf *text)
{
    qc_manifest m;
    qc_error err = {0};
    SCOPED(qc_arena) a = {0};
    SCOPED(qc_strbuf) again;
    char *read = malloc(text->len);
    assert_non_null(read);
    memcpy(read, text->data, text->len);
    if (qc_manifest_parse(&m, &a, read, text->len, &err) != QC_OK)
        fail_msg("%s", err.msg);
    free(read);
    write_text(&m, &again);
    assert_int_equal(again.len, text->len);
    assert_memory_equal(again.data, text->data, text->len);
}

TEST(writing_what_was_read_gives_the_same_bytes)
{
    for (int variant = 0; variant < 16; variant++) {
        sample s;
        qc_strbuf text;
        if (variant & 4)
            make_placed_sample(&s, variant & 1);
        else
            make_sample(&s, variant & 1);
        if (variant & 2) {
            s.m.placement.device_count = 0;
            s.m.compute_dtype = NULL;
            s.m.rule_count = s.m.source_count = s.m.shard_count = 0;
            s.m.tensor_count = s.m.file_count = 0;
        }
        if (variant & 8)
            s.m.scale = variant & 4 ? "refit" : "search";
        write_text(&s.m, &text);
        assert_rewrites_to_itself(&text);
        qc_strbuf_deinit(&text);
    }
}

/* A member that was neither written nor read would rewrite to itself. */
TEST(no_member_is_left_out)
{
    sample s;
    SCOPED(qc_strbuf) text;
    unsigned members = 0;
    make_placed_sample(&s, 1);
    write_text(&s.m, &text);
    for (const char *p = text.data; (p = strstr(p, "\": ")); p++)
        members++;
    assert_int_equal(members, 133);
}

/* The last rule, so that readers that do not know it take it as a text. Absmax is not said. */
TEST(how_scales_were_found_is_a_rule)
{
    static const char *const methods[] = {NULL, "search", "refit"};
    for (size_t i = 0; i < 3; i++) {
        sample s;
        qc_strbuf text;
        qc_manifest m;
        char want[64];
        make_sample(&s, 0);
        s.m.scale = methods[i];
        write_text(&s.m, &text);
        (void)snprintf(want, sizeof want, "odd\\\"*\"%s%s%s\n    ]\n", i ? ",\n      \"scale " : "",
                       i ? methods[i] : "", i ? "\"" : "");
        if (!strstr(text.data, want))
            fail_msg("%s is not in %s", want, text.data);
        SCOPED(qc_arena) a = {0};
        assert_int_equal(qc_manifest_parse(&m, &a, text.data, text.len, NULL), QC_OK);
        assert_int_equal(m.rule_count, 2);
        assert_int_equal(m.scale != NULL, i > 0);
        if (i > 0)
            assert_string_equal(m.scale, methods[i]);
        qc_strbuf_deinit(&text);
    }
    sample s;
    qc_strbuf text;
    qc_error err = {0};
    make_sample(&s, 0);
    s.m.scale = "guess";
    qc_strbuf_init(&text, TEXT_MAX);
    assert_int_equal(qc_manifest_write(&s.m, &text, &err), QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "guess"));
    qc_strbuf_deinit(&text);
}

/* docs/format.md shows this text: one tensor a line, digest last. */
TEST(the_text_looks_as_documented)
{
    sample s;
    qc_strbuf text;
    make_sample(&s, 0);
    s.m.tensor_count = 0;
    s.m.shard_count = 0;
    s.m.file_count = 1;
    write_text(&s.m, &text);
    static const char head[] =
        "{\n"
        "  \"format\": \"qconv\",\n"
        "  \"version\": 1,\n"
        "  \"qconv_version\": \"0.1.0\",\n"
        "  \"compression\": null,\n"
        "  \"options\": {\n"
        "    \"to\": \"nf4\",\n"
        "    \"block_elems\": 64,\n"
        "    \"double_quant\": true,\n"
        "    \"rest\": \"keep\",\n"
        "    \"compute_dtype\": \"bfloat16\",\n"
        "    \"max_shard_bytes\": 5000000000,\n"
        "    \"rules\": [\n"
        "      \"keep lm_head*\",\n"
        "      \"quantize *.\\\"odd\\\"*\"\n"
        "    ]\n"
        "  },\n"
        "  \"sources\": [\n"
        "    {\"name\": \"model.safetensors\", \"bytes\": 1234, \"header_xxh3_128\": \"";
    static const char tail[] = "\"}\n  ],\n  \"manifest_xxh3_128\": \"";
    assert_memory_equal(text.data, head, sizeof head - 1);
    assert_non_null(strstr(text.data, "  \"shards\": [],\n  \"tensors\": [],\n  \"files\": [\n"
                                      "    {\"path\": \"config.json\", \"bytes\": 17, "
                                      "\"xxh3_128\": \""));
    assert_memory_equal(text.data + text.len - 36 - (sizeof tail - 1), tail, sizeof tail - 1);
    qc_digest d = qc_digest_bytes(text.data, text.len - 36);
    char hex[QC_DIGEST_HEX_BYTES];
    qc_digest_hex(&d, hex);
    assert_memory_equal(text.data + text.len - 36, hex, 32);
    assert_string_equal(text.data + text.len - 4, "\"\n}\n");
    qc_strbuf_deinit(&text);
}

TEST(every_flipped_bit_is_found)
{
    for (int compressed = 0; compressed < 2; compressed++) {
        sample s;
        qc_strbuf text;
        make_sample(&s, compressed);
        write_text(&s.m, &text);
        for (size_t bit = 0; bit < text.len * 8; bit++) {
            qc_manifest m;
            SCOPED(qc_arena) a = {0};
            text.data[bit / 8] ^= (char)(1u << bit % 8);
            assert_int_equal(qc_manifest_parse(&m, &a, text.data, text.len, NULL), QC_ERR_CHECK);
            text.data[bit / 8] ^= (char)(1u << bit % 8);
            assert_null(m.tensors);
        }
        qc_strbuf_deinit(&text);
    }
}

TEST(every_truncation_is_found)
{
    sample s;
    qc_strbuf text;
    qc_manifest m;
    qc_error err = {0};
    make_sample(&s, 1);
    write_text(&s.m, &text);
    SCOPED(qc_arena) a = {0};
    for (size_t len = 0; len < text.len; len++) {
        char *exact = malloc(len + 1);
        assert_non_null(exact);
        memcpy(exact, text.data, len);
        assert_int_equal(qc_manifest_parse(&m, &a, exact, len, &err), QC_ERR_CHECK);
        assert_non_null(strstr(err.msg, "manifest: "));
        free(exact);
    }
    assert_int_equal(qc_strbuf_adds(&text, "\n", NULL), QC_OK);
    assert_int_equal(qc_manifest_parse(&m, &a, text.data, text.len, &err), QC_ERR_CHECK);
    qc_strbuf_deinit(&text);
}

/* ---- What a right digest does not make right ------------------------------------------------- */

TEST(wrong_texts_with_a_right_digest_are_refused)
{
    static const wrong_text cases[] = {
        {"{\n  \"format\"", "[{\n  \"format\"", QC_ERR_INPUT, "byte"},
        {"\"qconv\"", "\"other\"", QC_ERR_UNSUPPORTED, "other"},
        {"\"version\": 1", "\"version\": 5", QC_ERR_UNSUPPORTED, "version 5"},
        {"\"version\": 1", "\"version\": 0", QC_ERR_UNSUPPORTED, "version 0"},
        {"\"version\": 1", "\"version\": 3", QC_ERR_INPUT, "member 'calibrate' is missing"},
        {"\"version\": 1", "\"version\": 2", QC_ERR_INPUT, "expected member 'placement'"},
        {"\"version\": 1", "\"version\": 1.5", QC_ERR_INPUT, "version"},
        {"\"version\": 1,", "", QC_ERR_INPUT, "expected member 'version'"},
        {"\"method\": \"zstd\"", "\"method\": \"lz4\"", QC_ERR_UNSUPPORTED, "lz4"},
        {"\"level\": 1", "\"level\": 20", QC_ERR_INPUT, "level"},
        {"\"level\": 1", "\"level\": 4294967297", QC_ERR_INPUT, "level"},
        {"\"level\": 1", "\"level\": 0", QC_ERR_INPUT, "level"},
        {"\"zstd_version\": \"1.5.4\"", "\"zstd_version\": \"1.5.4\", \"x\": 1", QC_ERR_INPUT,
         "'x'"},
        {"\"double_quant\": true", "\"double_quant\": 1", QC_ERR_INPUT, "double_quant"},
        {"\"compute_dtype\": \"bfloat16\"", "\"compute_dtype\": 3", QC_ERR_INPUT, "compute_dtype"},
        {"\"rules\": [", "\"rules\": [7, ", QC_ERR_INPUT, "rules"},
        {"\"keep lm_head*\"", "\"scale search\"", QC_ERR_INPUT, "'scale search' is not the last"},
        {"\"quantize *.", "\"scale *.", QC_ERR_INPUT, "expected search or refit"},
        {"\"rules\": [", "\"more\": 1, \"rules\": [", QC_ERR_INPUT, "'rules'"},
        {"\"options\": {", "\"options\": 5, \"o\": {", QC_ERR_INPUT, "options"},
        {"\"sources\": [", "\"sources\": [5, ", QC_ERR_INPUT, "sources[0]"},
        {"\"sources\": [", "\"sources\": 5, \"x\": [", QC_ERR_INPUT, "sources"},
        {"\"name\": \"model.safetensors\"", "\"name\": \"/etc/passwd\"", QC_ERR_INPUT,
         "/etc/passwd"},
        {"\"bytes\": 1234", "\"bytes\": -1", QC_ERR_INPUT, "bytes"},
        {"\"bytes\": 1234", "\"bytes\": 1e3", QC_ERR_INPUT, "bytes"},
        {"\"bytes\": 1234", "\"bytes\": 9007199254740992", QC_ERR_INPUT, "bytes"},
        {"\"header_xxh3_128\": \"", "\"header_xxh3_128\": \"X", QC_ERR_INPUT, "hex"},
        {"\"header_xxh3_128\"", "\"header_XXH3_128\"", QC_ERR_INPUT, "expected member"},
        {"model-00001-of-00002.safetensors", "../model.safetensors", QC_ERR_INPUT, "../model"},
        {"model-00001-of-00002.safetensors", "a/./model.safetensors", QC_ERR_INPUT,
         "not a path inside"},
        {"model-00001-of-00002.safetensors", "a//model.safetensors", QC_ERR_INPUT,
         "not a path inside"},
        {"model-00001-of-00002.safetensors", "model/..", QC_ERR_INPUT, "not a path inside"},
        {"model-00001-of-00002.safetensors", "", QC_ERR_INPUT, "not a path inside"},
        {"model-00001-of-00002.safetensors", "model.bin", QC_ERR_INPUT,
         "a name that ends with .safetensors"},
        {"model-00001-of-00002.safetensors", ".safetensors", QC_ERR_INPUT,
         "a name that ends with .safetensors"},
        {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", QC_ERR_INPUT,
         "twice"},
        {"\"content_bytes\": 172", "\"content_bytes\": 173", QC_ERR_INPUT, "content_bytes"},
        {"\"header_bytes\": 100", "\"header_bytes\": 9", QC_ERR_INPUT, "header_bytes"},
        {"\"header_bytes\": 100", "\"header_bytes\": 100000009", QC_ERR_INPUT, "header_bytes"},
        {"\"file_bytes\": 221", "\"file_bytes\": 222", QC_ERR_INPUT, "file_bytes"},
        {"\"file_bytes\": 221, ", "", QC_ERR_INPUT, "expected member 'file_bytes'"},
        {"\"header_stored_bytes\": 90", "\"header_stored_bytes\": 0", QC_ERR_INPUT,
         "stored_offset"},
        {"\"table_bytes\": 41", "\"table_bytes\": 0", QC_ERR_INPUT, "file_bytes"},
        {"\"name\": \"m\"", "\"name\": \"scalar\"", QC_ERR_INPUT, "listed twice"},
        {"\"scheme\": \"nf4\"", "\"scheme\": \"nf5\"", QC_ERR_INPUT, "nf5"},
        {"\"dtype\": \"U8\"", "\"dtype\": \"u8\"", QC_ERR_INPUT, "dtype"},
        {"\"dtype\": \"U8\"", "\"dtype\": \"U16\"", QC_ERR_INPUT, "its shape takes 128"},
        {"\"shape\": [64, 1]", "\"shape\": [64, 2]", QC_ERR_INPUT, "its shape takes 128"},
        {"\"shape\": [64, 1]", "\"shape\": [64, -1]", QC_ERR_INPUT, "shape"},
        {"\"shape\": [64, 1]", "\"shape\": [64, 1, 1, 1, 1, 1, 1, 1, 1]", QC_ERR_INPUT,
         "dimensions"},
        {"\"shape\": [64, 1]", "\"shape\": [9007199254740991, 9007199254740991]", QC_ERR_INPUT,
         "overflows"},
        {"\"shape\": [64, 1]", "\"shape\": 64", QC_ERR_INPUT, "shape"},
        {"\"shard\": 0", "\"shard\": 1", QC_ERR_INPUT, "content_bytes"},
        {"\"shard\": 0", "\"shard\": 2", QC_ERR_INPUT, "no shard number 2"},
        {"\"shard\": 1", "\"shard\": 0", QC_ERR_INPUT, "begins at"},
        {"\"begin\": 8", "\"begin\": 7", QC_ERR_INPUT, "its shape takes 64"},
        {"\"begin\": 8", "\"begin\": 80", QC_ERR_INPUT, "its shape takes 64"},
        {"\"piece_bytes\": 64", "\"piece_bytes\": 0", QC_ERR_INPUT, "piece_bytes"},
        {"\"piece_bytes\": 64", "\"piece_bytes\": 63", QC_ERR_INPUT, "at least 1048576"},
        {"\"piece_bytes\": 64", "\"piece_bytes\": 16777217", QC_ERR_INPUT, "piece_bytes"},
        {"\"piece_bytes\": 256", "\"piece_bytes\": 0", QC_ERR_INPUT, "piece_bytes"},
        {"\"stored_offset\": 110", "\"stored_offset\": 111", QC_ERR_INPUT, "stored_offset"},
        {"\"stored_bytes\": 70", "\"stored_bytes\": 0", QC_ERR_INPUT, "stored_bytes"},
        {"\"stored_bytes\": 70", "\"stored_bytes\": 71", QC_ERR_INPUT, "file_bytes"},
        {"\"stored_offset\": 0, \"stored_bytes\": 0", "\"stored_offset\": 0, \"stored_bytes\": 1",
         QC_ERR_INPUT, "it has no content, but a place"},
        {"\"stored_offset\": 0, \"stored_bytes\": 0", "\"stored_offset\": 9, \"stored_bytes\": 0",
         QC_ERR_INPUT, "it has no content, but a place"},
        {"\"rel_mse\": 0.0083", "\"rel_mse\": -0.0083", QC_ERR_INPUT, "errors"},
        {"\"rel_mse\": 0.0083", "\"rel_mse\": \"0.0083\"", QC_ERR_INPUT, "rel_mse"},
        {"\"rel_mse\": 0.0083, ", "", QC_ERR_INPUT, "'max_err'"},
        {"\"max_err\": 0.1234567890123", "\"max_err\": -1.0", QC_ERR_INPUT, "errors"},
        {"\"source\": {", "\"source\": 1, \"s\": {", QC_ERR_INPUT, "source"},
        {"\"source\": {\"name\": \"m\"", "\"source\": {\"name\": null", QC_ERR_INPUT, "name"},
        {"\"dtype\": \"BF16\"", "\"dtype\": \"BF17\"", QC_ERR_INPUT, "BF17"},
        {"config.json", "qconv.json", QC_ERR_INPUT, "itself"},
        {"config.json", "model-00001-of-00002.safetensors", QC_ERR_INPUT, "twice"},
        {"config.json", "model-00001-of-00002.safetensors.zst", QC_ERR_INPUT,
         "the name of a shard"},
        {"config.json", "tokenizer.json", QC_ERR_INPUT, "not in the order of names"},
        {"config.json", "..", QC_ERR_INPUT, "not a path inside"},
        {"\"files\": [", "\"files\": [], \"more\": [", QC_ERR_INPUT, "manifest_xxh3_128"},
        {",\n  \"manifest_xxh3_128\"", ",\n  \"x\": 1,\n  \"manifest_xxh3_128\"", QC_ERR_INPUT,
         "found 'x'"},
        {"{\n  \"format\"", "{\n  \"manifest_xxh3_128\": 1,\n  \"format\"", QC_ERR_INPUT, ""},
    };
    sample s;
    qc_strbuf text;
    make_sample(&s, 1);
    write_text(&s.m, &text);
    assert_wrong(&text, cases, sizeof cases / sizeof *cases);
    qc_strbuf_deinit(&text);
}

/* Reseal text with `cut` bytes at `at` replaced; it must be refused. */
static void assert_refused(const qc_strbuf *text, size_t at, size_t cut, const char *to)
{
    qc_manifest m;
    char hex[QC_DIGEST_HEX_BYTES];
    SCOPED(qc_arena) a = {0};
    SCOPED(qc_strbuf) wrong = {.max = TEXT_MAX};
    assert_int_equal(qc_strbuf_add(&wrong, text->data, at, NULL), QC_OK);
    assert_int_equal(qc_strbuf_adds(&wrong, to, NULL), QC_OK);
    assert_int_equal(qc_strbuf_add(&wrong, text->data + at + cut, text->len - at - cut, NULL),
                     QC_OK);
    qc_digest d = qc_digest_bytes(wrong.data, wrong.len - 36);
    qc_digest_hex(&d, hex);
    memcpy(wrong.data + wrong.len - 36, hex, 32);
    qc_status st = qc_manifest_parse(&m, &a, wrong.data, wrong.len, NULL);
    if (st != QC_ERR_INPUT && st != QC_ERR_UNSUPPORTED)
        fail_msg("'%s' at %zu: %s", to, at, qc_status_name(st));
}

/* Each member in turn under another name, then with a value of another kind. */
TEST(every_member_has_its_name_and_kind)
{
    for (int variant = 0; variant < 4; variant++) {
        sample s;
        qc_strbuf text;
        if (variant & 2)
            make_placed_sample(&s, variant & 1);
        else
            make_sample(&s, variant & 1);
        write_text(&s.m, &text);
        const char *last = strstr(text.data, "\"manifest_xxh3_128\"");
        unsigned members = 0;
        for (const char *p = text.data; (p = strstr(p, "\": ")) && p < last; p += 3) {
            const char *value = p + 3;
            size_t at = (size_t)(value - text.data);
            assert_refused(&text, (size_t)(p - text.data), 0, "?");
            if (*value == '{' || *value == '[' || *value == 'n')
                assert_refused(&text, at, 0, "7, \"zz\": ");
            else
                assert_refused(&text, at, strcspn(value + 1, ",}]\"\n") + 1 + (*value == '"'),
                               "[]");
            members++;
        }
        assert_true(members > 70);
        qc_strbuf_deinit(&text);
    }
}

TEST(names_that_only_look_like_stored_shards_are_fine)
{
    static const char *const names[] = {"a.safetensors.zst",
                                        "model-00001-of-00002.safetensors.zst2",
                                        "model-00001-of-00002.safetensor.zst",
                                        "model-00003-of-00002.safetensors.zst", "b/..c/.d..e"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        sample s;
        qc_strbuf text;
        make_sample(&s, 1);
        s.files[0].path = names[i];
        write_text(&s.m, &text);
        assert_rewrites_to_itself(&text);
        qc_strbuf_deinit(&text);
    }
}

TEST(what_cannot_be_read_is_not_written)
{
    sample s;
    qc_error err = {0};
    SCOPED(qc_strbuf) out = {.max = TEXT_MAX};
    assert_int_equal(qc_strbuf_adds(&out, "kept", NULL), QC_OK);
    make_sample(&s, 1);
    s.tensors[1].begin = 9;
    assert_int_equal(qc_manifest_write(&s.m, &out, &err), QC_ERR_INPUT);
    make_sample(&s, 1);
    s.m.zstd_version = NULL;
    assert_int_equal(qc_manifest_write(&s.m, &out, &err), QC_ERR_INPUT);
    make_sample(&s, 1);
    s.tensors[1].name = NULL;
    assert_int_equal(qc_manifest_write(&s.m, &out, &err), QC_ERR_INPUT);
    make_sample(&s, 1);
    s.tensors[1].scheme = NULL;
    assert_int_equal(qc_manifest_write(&s.m, &out, &err), QC_ERR_INPUT);
    make_sample(&s, 1);
    s.files[0].path = NULL;
    assert_int_equal(qc_manifest_write(&s.m, &out, &err), QC_ERR_INPUT);
    make_sample(&s, 1);
    s.tensors[1].rel_mse = (double)INFINITY;
    assert_int_equal(qc_manifest_write(&s.m, &out, &err), QC_ERR_INPUT);
    make_sample(&s, 1);
    s.tensors[1].max_err = (double)NAN;
    assert_int_equal(qc_manifest_write(&s.m, &out, &err), QC_ERR_INPUT);
    make_sample(&s, 1);
    s.tensors[3].shard = 2;
    assert_int_equal(qc_manifest_write(&s.m, &out, &err), QC_ERR_INPUT);
    make_sample(&s, 1);
    s.tensors[1].max_err_index = (uint64_t)1 << 53;
    assert_int_equal(qc_manifest_write(&s.m, &out, &err), QC_ERR_RANGE);
    make_sample(&s, 1);
    s.tensors[2].dims[1] = (uint64_t)1 << 53;
    assert_int_equal(qc_manifest_write(&s.m, &out, &err), QC_ERR_RANGE);
    make_sample(&s, 1);
    s.tensors[0].stored_bytes = UINT64_MAX;
    assert_int_equal(qc_manifest_write(&s.m, &out, &err), QC_ERR_INPUT);
    make_sample(&s, 1);
    s.tensors[1].name = "\xff";
    assert_int_equal(qc_manifest_write(&s.m, &out, &err), QC_ERR_INPUT);
    /* More pieces than are counted in 32 bits. */
    make_sample(&s, 0);
    s.tensors[3].dtype = QC_DTYPE_U8;
    s.tensors[3].ndim = 1;
    s.tensors[3].dims[0] = s.tensors[3].end = (uint64_t)1 << 52;
    s.tensors[3].piece_bytes = 1u << 20;
    s.shards[1].content_bytes = 104 + s.tensors[3].end;
    assert_int_equal(qc_manifest_write(&s.m, &out, &err), QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "more pieces than are supported"));
    s.tensors[3].piece_bytes = 2u << 20;
    qc_strbuf fits;
    write_text(&s.m, &fits);
    assert_rewrites_to_itself(&fits);
    qc_strbuf_deinit(&fits);
    static char long_path[5000];
    memset(long_path, 'x', sizeof long_path - 1);
    make_sample(&s, 1);
    s.files[1].path = long_path;
    assert_int_equal(qc_manifest_write(&s.m, &out, &err), QC_ERR_INPUT);
    assert_string_equal(out.data, "kept");
}

TEST(out_of_memory_is_said)
{
    sample s;
    qc_strbuf text;
    make_sample(&s, 1);
    EACH_ALLOCATION_FAILS (fault, 0) {
        SCOPED(qc_strbuf) none = {.max = TEXT_MAX};
        fault.st = qc_manifest_write(&s.m, &none, NULL);
        assert_true(fault.st == QC_OK || none.len == 0);
    }
    write_text(&s.m, &text);
    EACH_ALLOCATION_FAILS (fault, 0) {
        qc_manifest m;
        SCOPED(qc_arena) a = {0};
        fault.st = qc_manifest_parse(&m, &a, text.data, text.len, NULL);
    }
    qc_strbuf_deinit(&text);
}

static double now_seconds(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

TEST(a_hundred_thousand_tensors)
{
    enum { COUNT = TEST_SANITIZED ? 10000 : 100000 };
    sample s;
    qc_strbuf text;
    make_sample(&s, 1);
    qc_manifest_tensor *t = calloc(COUNT, sizeof *t);
    char(*names)[64] = calloc(COUNT, sizeof *names);
    assert_non_null(t);
    assert_non_null(names);
    uint64_t stored = s.shards[0].header_stored_bytes;
    for (size_t i = 0; i < COUNT; i++) {
        (void)snprintf(names[i], 64, "model.layers.%zu.mlp.experts.%zu.down_proj.weight", i / 256,
                       i * 7919 % 65536 + i);
        t[i] = s.tensors[1];
        t[i].name = t[i].source_name = names[i];
        t[i].begin = i * 64;
        t[i].end = i * 64 + 64;
        t[i].stored_offset = stored;
        t[i].rel_mse = 0.008 + 1e-9 * (double)i;
        stored += t[i].stored_bytes;
    }
    s.m.tensors = t;
    s.m.tensor_count = COUNT;
    s.m.shard_count = 1;
    s.shards[0].content_bytes = 100 + 64 * (uint64_t)COUNT;
    s.shards[0].table_bytes = 17 + 8 * ((uint64_t)COUNT + 1);
    s.shards[0].file_bytes = stored + s.shards[0].table_bytes;
    double t0 = now_seconds();
    write_text(&s.m, &text);
    double t1 = now_seconds();
    qc_manifest m;
    SCOPED(qc_arena) a = {0};
    assert_int_equal(qc_manifest_parse(&m, &a, text.data, text.len, NULL), QC_OK);
    printf("%zu bytes: written in %.2f s, read in %.2f s of processor time\n", text.len, t1 - t0,
           now_seconds() - t1);
    assert_int_equal(m.tensor_count, COUNT);
    assert_rewrites_to_itself(&text);
    qc_strbuf_deinit(&text);
    free(t);
    free(names);
}
