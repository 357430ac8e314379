/* formats/manifest.h. In the texts here, ' stands for ". */
#include "formats/manifest.h"

#include <math.h>
#include <time.h>

#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/manifest_sample.h"
#include "tests/fixtures/sanitized.h"
#include "tests/fixtures/test.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

static void add_quoted(qc_strbuf *out, const char *s)
{
    size_t begin = out->len;
    assert_int_equal(qc_strbuf_adds(out, s, NULL), QC_OK);
    for (char *p = out->data + begin; *s; s++, p++)
        *p = *p == '\'' ? '"' : *p;
}

/* Where `part` begins, or NULL. */
static const char *find(const qc_strbuf *text, const char *part)
{
    SCOPED(qc_strbuf) quoted = {.max = TEXT_MAX};
    add_quoted(&quoted, part);
    return strstr(text->data, quoted.data);
}

static void write_text(const qc_manifest *m, qc_strbuf *out)
{
    qc_error err = {0};
    qc_strbuf_init(out, TEXT_MAX);
    if (qc_manifest_write(m, out, &err) != QC_OK)
        fail_msg("%s", err.msg);
}

static void write_sample(unsigned parts, qc_strbuf *out)
{
    sample s;
    make_sample(&s, parts);
    write_text(&s.m, out);
}

static void read_text(qc_manifest *m, qc_arena *a, const char *text, size_t len)
{
    qc_error err = {0};
    if (qc_manifest_parse(m, a, text, len, &err) != QC_OK)
        fail_msg("%s", err.msg);
}

/* What was read does not need the text any more, and writes it again. */
static void assert_rewrites_to_itself(const qc_strbuf *text)
{
    qc_manifest m;
    SCOPED(qc_arena) a = {0};
    SCOPED(qc_strbuf) again;
    char *read = malloc(text->len);
    assert_non_null(read);
    memcpy(read, text->data, text->len);
    read_text(&m, &a, read, text->len);
    free(read);
    write_text(&m, &again);
    assert_int_equal(again.len, text->len);
    assert_memory_equal(again.data, text->data, text->len);
}

/* ---- Parts ----------------------------------------------------------------------------------- */

/* What stands in the text of a sample where those of `mask` among its parts are `parts`. */
static const struct {
    unsigned mask, parts;
    const char *text;
} written[] = {
    {PLACED, PLACED,
     "  },\n"
     "  'placement': {\n"
     "    'vram': '2x40GB+cpu',\n"
     "    'margin': 0.9,\n"
     "    'context': 8192,\n"
     "    'batch': 3,\n"
     "    'images': 1,\n"
     "    'kv_bits': 16,\n"
     "    'mla_expanded': true,\n"
     "    'devices': [\n"
     "      {'name': 'cuda:0', 'tensor_bytes': 72, 'shard_bytes': 172},\n"
     "      {'name': 'cuda:1', 'tensor_bytes': 0, 'shard_bytes': 0},\n"
     "      {'name': 'cpu', 'tensor_bytes': 2, 'shard_bytes': 106}\n"
     "    ]\n"
     "  },\n"},
    {CALIBRATED, MOMENTS,
     "    'calibrate': {\n"
     "      'hessians': 'moments.safetensors',\n"
     "      'damping': 0.05,\n"
     "      'sided': 'two'\n"
     "    }\n"},
    {TEXT, TEXT, "    ],\n    'calibrate': {\n      'text': "},
    {TEXT, TEXT,
     "      'text': 'a \\'text\\'.txt',\n"
     "      'xxh3_128': 'c5a64efff9224e392680525687aac7c5',\n"
     "      'tokenizer': 'bpe',\n"
     "      'tokens': 131072,\n"
     "      'windows': 64,\n"
     "      'context': 2048,\n"
     "      'damping': 0.01,\n"
     "      'sided': 'one'\n"
     "    }\n"
     "  },\n"},
    {TEXT, TEXT,
     "'max_err_index': 77, 'calibrated': {'rounded': 0.0123, 'calibrated': 0.00456}, 'source': "},
    {MERGED, MERGED,
     "  'adapters': [\n"
     "    {'name': 'a \\'b\\'', 'scale': 1.0, 'config_xxh3_128': "
     "'8555dcf672c663f7201a7c2cd4104783', "
     "'bytes': 123456789, 'weights_xxh3_128': 'bdbda1eb6e05adc4800d98e5524fefbc'}"},
    {MERGED | SECOND, MERGED | SECOND,
     "    {'name': 'c', 'scale': -0.1, 'config_xxh3_128': '5c7401c0ec22eeeeeaf06c6480b2cd11', "
     "'bytes': 7, 'weights_xxh3_128': 'd89f1c4509f3b233272b57e6d7c0a9e5'}\n"},
};

/* The text has each member under its name, so what was read from it and writes it again is what
 * was written first. */
TEST(every_set_of_parts_is_read_back)
{
    for (unsigned parts = 0; parts < ALL_PARTS; parts++) {
        char version[32];
        SCOPED(qc_strbuf) text;
        write_sample(parts, &text);
        (void)snprintf(version, sizeof version, "  'version': %d,\n",
                       parts & MERGED       ? 4
                       : parts & CALIBRATED ? 3
                       : parts & PLACED     ? 2
                                            : 1);
        assert_non_null(find(&text, version));
        for (size_t i = 0; i < COUNT(written); i++) {
            int expected = (parts & written[i].mask) == written[i].parts;
            if ((find(&text, written[i].text) != NULL) != expected)
                fail_msg("parts %u, text %zu: %s", parts, i, text.data);
        }
        assert_rewrites_to_itself(&text);
    }
}

TEST(empty_lists_are_read_back)
{
    for (unsigned variant = 0; variant < 4; variant++) {
        sample s;
        SCOPED(qc_strbuf) text;
        make_sample(&s, variant & COMPRESSED);
        s.m.scale = variant & 2 ? "search" : NULL;
        s.m.compute_dtype = NULL;
        s.m.rule_count = s.m.source_count = s.m.shard_count = 0;
        s.m.tensor_count = s.m.file_count = 0;
        write_text(&s.m, &text);
        assert_rewrites_to_itself(&text);
    }
}

/* A member that was neither written nor read would rewrite to itself. */
TEST(no_member_is_left_out)
{
    SCOPED(qc_strbuf) text;
    unsigned members = 0;
    write_sample(COMPRESSED | PLACED, &text);
    for (const char *p = text.data; (p = strstr(p, "\": ")); p++)
        members++;
    assert_int_equal(members, 133);
}

/* The last rule, so that readers that do not know it take it as a text. Absmax is not said. */
TEST(how_scales_were_found_is_a_rule)
{
    static const struct {
        const char *scale, *text;
    } methods[] = {
        {NULL, "odd\\'*'\n    ]\n"},
        {"search", "odd\\'*',\n      'scale search'\n    ]\n"},
        {"refit", "odd\\'*',\n      'scale refit'\n    ]\n"},
    };
    for (size_t i = 0; i < COUNT(methods); i++) {
        sample s;
        qc_manifest m;
        SCOPED(qc_strbuf) text;
        SCOPED(qc_arena) a = {0};
        make_sample(&s, 0);
        s.m.scale = methods[i].scale;
        write_text(&s.m, &text);
        if (!find(&text, methods[i].text))
            fail_msg("%s is not in %s", methods[i].text, text.data);
        read_text(&m, &a, text.data, text.len);
        assert_int_equal(m.rule_count, 2);
        assert_int_equal(m.scale != NULL, i > 0);
        assert_rewrites_to_itself(&text);
    }
}

/* docs/format.md shows this text: one tensor a line, digest last. */
TEST(the_text_looks_as_documented)
{
    sample s;
    SCOPED(qc_strbuf) text;
    make_sample(&s, 0);
    s.m.tensor_count = 0;
    s.m.shard_count = 0;
    s.m.file_count = 1;
    write_text(&s.m, &text);
    assert_ptr_equal(text.data,
                     find(&text,
                          "{\n"
                          "  'format': 'qconv',\n"
                          "  'version': 1,\n"
                          "  'qconv_version': '0.1.0',\n"
                          "  'compression': null,\n"
                          "  'options': {\n"
                          "    'to': 'nf4',\n"
                          "    'block_elems': 64,\n"
                          "    'double_quant': true,\n"
                          "    'rest': 'keep',\n"
                          "    'compute_dtype': 'bfloat16',\n"
                          "    'max_shard_bytes': 5000000000,\n"
                          "    'rules': [\n"
                          "      'keep lm_head*',\n"
                          "      'quantize *.\\'odd\\'*'\n"
                          "    ]\n"
                          "  },\n"
                          "  'sources': [\n"
                          "    {'name': 'model.safetensors', 'bytes': 1234, 'header_xxh3_128': '"));
    assert_non_null(find(&text, "  'shards': [],\n  'tensors': [],\n  'files': [\n"
                                "    {'path': 'config.json', 'bytes': 17, 'xxh3_128': '"));
    const char *tail = find(&text, "'}\n  ],\n  'manifest_xxh3_128': '");
    qc_digest d = qc_digest_bytes(text.data, text.len - 36);
    char end[40];
    qc_digest_hex(&d, end);
    memcpy(end + 32, "\"\n}\n", 5);
    assert_non_null(tail);
    assert_string_equal(strstr(tail, "128\": \"") + 7, end);
}

TEST(every_flipped_bit_is_found)
{
    for (unsigned compressed = 0; compressed < 2; compressed++) {
        SCOPED(qc_strbuf) text;
        write_sample(compressed, &text);
        for (size_t bit = 0; bit < text.len * 8; bit++) {
            qc_manifest m;
            SCOPED(qc_arena) a = {0};
            text.data[bit / 8] ^= (char)(1u << bit % 8);
            assert_int_equal(qc_manifest_parse(&m, &a, text.data, text.len, NULL), QC_ERR_CHECK);
            text.data[bit / 8] ^= (char)(1u << bit % 8);
            assert_null(m.tensors);
        }
    }
}

TEST(every_truncation_is_found)
{
    SCOPED(qc_strbuf) text;
    qc_manifest m;
    qc_error err = {0};
    write_sample(COMPRESSED, &text);
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
}

/* ---- What a right digest does not make right ------------------------------------------------- */

/* Parses text with `cut` bytes at `at` replaced, sealed again. */
static qc_status parse_changed(const qc_strbuf *text, size_t at, size_t cut, const char *to,
                               qc_error *err)
{
    qc_manifest m;
    char hex[QC_DIGEST_HEX_BYTES];
    SCOPED(qc_arena) a = {0};
    SCOPED(qc_strbuf) wrong = {.max = TEXT_MAX};
    assert_int_equal(qc_strbuf_add(&wrong, text->data, at, NULL), QC_OK);
    add_quoted(&wrong, to);
    assert_int_equal(qc_strbuf_adds(&wrong, text->data + at + cut, NULL), QC_OK);
    qc_digest d = qc_digest_bytes(wrong.data, wrong.len - 36);
    qc_digest_hex(&d, hex);
    memcpy(wrong.data + wrong.len - 36, hex, 32);
    return qc_manifest_parse(&m, &a, wrong.data, wrong.len, err);
}

/* What is changed in the text of a sample (the first time that it stands there). */
typedef struct {
    const char *from, *to, *says;
} wrong_text;

static const wrong_text unknown[] = {
    {"'qconv'", "'other'", "other"},
    {"'version': 1", "'version': 5", "version 5; expected 'qconv', 1 to 4"},
    {"'version': 1", "'version': 0", "version 0"},
    {"'method': 'zstd'", "'method': 'lz4'", "lz4"},
};

static const wrong_text wrong[] = {
    {"{\n  'format'", "[{\n  'format'", "byte"},
    {"'version': 1", "'version': 3", "member 'calibrate' is missing"},
    {"'version': 1", "'version': 2", "expected member 'placement'"},
    {"'version': 1", "'version': 1.5", "version"},
    {"'version': 1,", "", "expected member 'version'"},
    {"'level': 1", "'level': 20", "level"},
    {"'level': 1", "'level': 4294967297", "level"},
    {"'level': 1", "'level': 0", "level"},
    {"'zstd_version': '1.5.4'", "'zstd_version': '1.5.4', 'x': 1", "'x'"},
    {"'double_quant': true", "'double_quant': 1", "double_quant"},
    {"'compute_dtype': 'bfloat16'", "'compute_dtype': 3", "compute_dtype"},
    {"'rules': [", "'rules': [7, ", "rules"},
    {"'keep lm_head*'", "'scale search'", "'scale search' is not the last"},
    {"'quantize *.", "'scale *.", "expected search or refit"},
    {"'rules': [", "'more': 1, 'rules': [", "'rules'"},
    {"'options': {", "'options': 5, 'o': {", "options"},
    {"'sources': [", "'sources': [5, ", "sources[0]"},
    {"'sources': [", "'sources': 5, 'x': [", "sources"},
    {"'name': 'model.safetensors'", "'name': '/etc/passwd'", "/etc/passwd"},
    {"'bytes': 1234", "'bytes': -1", "bytes"},
    {"'bytes': 1234", "'bytes': 1e3", "bytes"},
    {"'bytes': 1234", "'bytes': 9007199254740992", "bytes"},
    {"'header_xxh3_128': '", "'header_xxh3_128': 'X", "hex"},
    {"'header_xxh3_128'", "'header_XXH3_128'", "expected member"},
    {"model-00001-of-00002.safetensors", "../model.safetensors", "../model"},
    {"model-00001-of-00002.safetensors", "a/./model.safetensors", "not a path inside"},
    {"model-00001-of-00002.safetensors", "a//model.safetensors", "not a path inside"},
    {"model-00001-of-00002.safetensors", "model/..", "not a path inside"},
    {"model-00001-of-00002.safetensors", "", "not a path inside"},
    {"model-00001-of-00002.safetensors", "model.bin", "a name that ends with .safetensors"},
    {"model-00001-of-00002.safetensors", ".safetensors", "a name that ends with .safetensors"},
    {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "twice"},
    {"'content_bytes': 172", "'content_bytes': 173", "content_bytes"},
    {"'header_bytes': 100", "'header_bytes': 9", "header_bytes"},
    {"'header_bytes': 100", "'header_bytes': 100000009", "header_bytes"},
    {"'file_bytes': 221", "'file_bytes': 222", "file_bytes"},
    {"'file_bytes': 221, ", "", "expected member 'file_bytes'"},
    {"'header_stored_bytes': 90", "'header_stored_bytes': 0", "stored_offset"},
    {"'table_bytes': 41", "'table_bytes': 0", "file_bytes"},
    {"'name': 'm'", "'name': 'scalar'", "listed twice"},
    {"'scheme': 'nf4'", "'scheme': 'nf5'", "nf5"},
    {"'dtype': 'U8'", "'dtype': 'u8'", "dtype"},
    {"'dtype': 'U8'", "'dtype': 'U16'", "its shape takes 128"},
    {"'shape': [64, 1]", "'shape': [64, 2]", "its shape takes 128"},
    {"'shape': [64, 1]", "'shape': [64, -1]", "shape"},
    {"'shape': [64, 1]", "'shape': [64, 1, 1, 1, 1, 1, 1, 1, 1]", "dimensions"},
    {"'shape': [64, 1]", "'shape': [9007199254740991, 9007199254740991]", "overflows"},
    {"'shape': [64, 1]", "'shape': 64", "shape"},
    {"'shard': 0", "'shard': 1", "content_bytes"},
    {"'shard': 0", "'shard': 2", "no shard number 2"},
    {"'shard': 1", "'shard': 0", "begins at"},
    {"'begin': 8", "'begin': 7", "its shape takes 64"},
    {"'begin': 8", "'begin': 80", "its shape takes 64"},
    {"'piece_bytes': 64", "'piece_bytes': 0", "piece_bytes"},
    {"'piece_bytes': 64", "'piece_bytes': 63", "at least 1048576"},
    {"'piece_bytes': 64", "'piece_bytes': 16777217", "piece_bytes"},
    {"'piece_bytes': 256", "'piece_bytes': 0", "piece_bytes"},
    {"'stored_offset': 110", "'stored_offset': 111", "stored_offset"},
    {"'stored_bytes': 70", "'stored_bytes': 0", "stored_bytes"},
    {"'stored_bytes': 70", "'stored_bytes': 71", "file_bytes"},
    {"'stored_offset': 0, 'stored_bytes': 0", "'stored_offset': 0, 'stored_bytes': 1",
     "it has no content, but a place"},
    {"'stored_offset': 0, 'stored_bytes': 0", "'stored_offset': 9, 'stored_bytes': 0",
     "it has no content, but a place"},
    {"'rel_mse': 0.0083", "'rel_mse': -0.0083", "errors"},
    {"'rel_mse': 0.0083", "'rel_mse': '0.0083'", "rel_mse"},
    {"'rel_mse': 0.0083, ", "", "'max_err'"},
    {"'max_err': 0.1234567890123", "'max_err': -1.0", "errors"},
    {"'source': {", "'source': 1, 's': {", "source"},
    {"'source': {'name': 'm'", "'source': {'name': null", "name"},
    {"'dtype': 'BF16'", "'dtype': 'BF17'", "BF17"},
    {"config.json", "qconv.json", "itself"},
    {"config.json", "model-00001-of-00002.safetensors", "twice"},
    {"config.json", "model-00001-of-00002.safetensors.zst", "the name of a shard"},
    {"config.json", "tokenizer.json", "not in the order of names"},
    {"config.json", "..", "not a path inside"},
    {"'files': [", "'files': [], 'more': [", "manifest_xxh3_128"},
    {",\n  'manifest_xxh3_128'", ",\n  'x': 1,\n  'manifest_xxh3_128'", "found 'x'"},
    {"{\n  'format'", "{\n  'manifest_xxh3_128': 1,\n  'format'", ""},
};

static const wrong_text wrong_placed[] = {
    {"'version': 2", "'version': 1", "found 'placement'"},
    {"'placement': {", "'placement': null, 'p': {", "placement"},
    {"'devices': [", "'devices': [], 'd': [", "devices is empty"},
    {"'margin': 0.9", "'margin': 0", "margin"},
    {"'margin': 0.9", "'margin': 1.01", "margin"},
    {"'kv_bits': 16", "'kv_bits': 0", "kv_bits"},
    {"'kv_bits': 16", "'kv_bits': 65", "kv_bits"},
    {"'cuda:1'", "'cuda:0'", "listed twice"},
    {"'cuda:1'", "''", "no name"},
    {"'tensor_bytes': 72", "'tensor_bytes': 71", "'cuda:0' has"},
    {"'shard_bytes': 172", "'shard_bytes': 173", "'cuda:0' has"},
    {"'shard_bytes': 0", "'shard_bytes': 9", "'cuda:1' has"},
    {"'device': 0", "'device': 1", "'cuda:0' has"},
    {"'device': 2", "'device': 3", "no device number 3"},
    {"'device': 0", "'device': 2", "'cuda:0' has"},
    {"'device': 0, ", "", "expected member 'device'"},
};

static const wrong_text wrong_calibrated[] = {
    {"'version': 3", "'version': 1", "member 'calibrate' is not known"},
    {"'calibrate': {", "'calibrate': null, 'c': {", "calibrate"},
    {"'text': ", "'words': ", "expected member 'text'"},
    {"'tokens': 131072", "'tokens': -1", "tokens"},
    {"'damping': 0.01", "'damping': -1",
     "damping: expected a finite number of 0 or more, found -1"},
    {"'damping': 0.01", "'damping': 0.01, 'more': 1", "'more'"},
    {"'sided': 'one'", "'sided': 'three'", "sided"},
    {",\n      'sided': 'one'", "", "sided"},
    {"'rounded': 0.0123", "'rounded': -1", "errors in outputs"},
    {"'rounded': 0.0123, ", "", "expected member 'rounded'"},
    {"'calibrated': 0.00456", "'calibrated': 0.00456, 'x': 1", "'x'"},
};

static const wrong_text wrong_merged[] = {
    {"'version': 4", "'version': 3", "calibrate"},
    {"'version': 4", "'version': 1", "'sources'"},
    {"'adapters': [", "'adapters': [], 'more': [", "adapters is empty"},
    {"'adapters': [", "'adapter': [", "expected member 'adapters'"},
    {"'scale': 1.0", "'scale': 1.0, 'x': 1", "'x'"},
    {"'scale': 1.0, ", "", "expected member 'scale'"},
    {"'bytes': 123456789", "'bytes': -1", "bytes"},
    {"'a \\'b\\''", "''", "adapters[0] has no name"},
};

static void assert_wrong(unsigned parts, const wrong_text *cases, size_t count, qc_status expected)
{
    SCOPED(qc_strbuf) text;
    write_sample(COMPRESSED | parts, &text);
    for (size_t i = 0; i < count; i++) {
        qc_error err = {0};
        const wrong_text *c = &cases[i];
        const char *at = find(&text, c->from);
        if (!at)
            fail_msg("\"%s\" is not in the text", c->from);
        qc_status st = parse_changed(&text, (size_t)(at - text.data), strlen(c->from), c->to, &err);
        if (st != expected || !strstr(err.msg, c->says))
            fail_msg("case %zu (\"%s\"): %s, \"%s\"", i, c->to, qc_status_name(st), err.msg);
    }
}

TEST(wrong_texts_with_a_right_digest_are_refused)
{
    assert_wrong(0, unknown, COUNT(unknown), QC_ERR_UNSUPPORTED);
    assert_wrong(0, wrong, COUNT(wrong), QC_ERR_INPUT);
    assert_wrong(PLACED, wrong_placed, COUNT(wrong_placed), QC_ERR_INPUT);
    assert_wrong(TEXT, wrong_calibrated, COUNT(wrong_calibrated), QC_ERR_INPUT);
    assert_wrong(MERGED, wrong_merged, COUNT(wrong_merged), QC_ERR_INPUT);
}

static void assert_refused(const qc_strbuf *text, size_t at, size_t cut, const char *to)
{
    qc_status st = parse_changed(text, at, cut, to, NULL);
    if (st != QC_ERR_INPUT && st != QC_ERR_UNSUPPORTED)
        fail_msg("\"%s\" at %zu: %s", to, at, qc_status_name(st));
}

/* Each member in turn under another name, then with a value of another kind. */
TEST(every_member_has_its_name_and_kind)
{
    for (unsigned parts = 0; parts <= (COMPRESSED | PLACED); parts++) {
        SCOPED(qc_strbuf) text;
        write_sample(parts, &text);
        const char *last = strstr(text.data, "\"manifest_xxh3_128\"");
        unsigned members = 0;
        for (const char *p = text.data; (p = strstr(p, "\": ")) && p < last; p += 3) {
            const char *value = p + 3;
            size_t at = (size_t)(value - text.data);
            assert_refused(&text, (size_t)(p - text.data), 0, "?");
            if (*value == '{' || *value == '[' || *value == 'n')
                assert_refused(&text, at, 0, "7, 'zz': ");
            else
                assert_refused(&text, at, strcspn(value + 1, ",}]\"\n") + 1 + (*value == '"'),
                               "[]");
            members++;
        }
        assert_true(members > 70);
    }
}

TEST(names_that_only_look_like_stored_shards_are_fine)
{
    static const char *const names[] = {"a.safetensors.zst",
                                        "model-00001-of-00002.safetensors.zst2",
                                        "model-00001-of-00002.safetensor.zst",
                                        "model-00003-of-00002.safetensors.zst", "b/..c/.d..e"};
    for (size_t i = 0; i < COUNT(names); i++) {
        sample s;
        SCOPED(qc_strbuf) text;
        make_sample(&s, COMPRESSED);
        s.files[0].path = names[i];
        write_text(&s.m, &text);
        assert_rewrites_to_itself(&text);
    }
}

static void assert_not_written(const qc_manifest *m, qc_status expected, const char *says)
{
    qc_error err = {0};
    SCOPED(qc_strbuf) out = {.max = TEXT_MAX};
    assert_int_equal(qc_strbuf_adds(&out, "kept", NULL), QC_OK);
    assert_int_equal(qc_manifest_write(m, &out, &err), expected);
    assert_string_equal(out.data, "kept");
    assert_non_null(strstr(err.msg, says));
}

/* A sample that is right but for one thing. */
#define REFUSED(edit, st, says)                                                                    \
    do {                                                                                           \
        make_sample(&s, COMPRESSED | PLACED | TEXT);                                               \
        edit;                                                                                      \
        assert_not_written(&s.m, st, says);                                                        \
    } while (0)

TEST(what_cannot_be_read_is_not_written)
{
    static char long_path[5000];
    sample s;
    memset(long_path, 'x', sizeof long_path - 1);
    REFUSED(s.tensors[1].begin = 9, QC_ERR_INPUT, "");
    REFUSED(s.m.zstd_version = NULL, QC_ERR_INPUT, "");
    REFUSED(s.m.scale = "guess", QC_ERR_INPUT, "guess");
    REFUSED(s.tensors[1].name = NULL, QC_ERR_INPUT, "");
    REFUSED(s.tensors[1].scheme = NULL, QC_ERR_INPUT, "");
    REFUSED(s.files[0].path = NULL, QC_ERR_INPUT, "");
    REFUSED(s.tensors[1].rel_mse = (double)INFINITY, QC_ERR_INPUT, "");
    REFUSED(s.tensors[1].max_err = (double)NAN, QC_ERR_INPUT, "");
    REFUSED(s.tensors[3].shard = 2, QC_ERR_INPUT, "");
    REFUSED(s.tensors[1].max_err_index = (uint64_t)1 << 53, QC_ERR_RANGE, "");
    REFUSED(s.tensors[2].dims[1] = (uint64_t)1 << 53, QC_ERR_RANGE, "");
    REFUSED(s.tensors[0].stored_bytes = UINT64_MAX, QC_ERR_INPUT, "");
    REFUSED(s.tensors[1].name = "\xff", QC_ERR_INPUT, "");
    REFUSED(s.calibration.tokenizer = NULL, QC_ERR_INPUT, "");
    REFUSED(s.m.placement.device_count = 0, QC_ERR_INPUT, "its device 2");
    REFUSED((s.shards[0].device = 2, s.shards[1].device = 0), QC_ERR_INPUT, "out of order");
    REFUSED(s.files[1].path = long_path, QC_ERR_INPUT, "");
    /* More pieces than are counted in 32 bits. */
    make_sample(&s, 0);
    s.tensors[3].dtype = QC_DTYPE_U8;
    s.tensors[3].ndim = 1;
    s.tensors[3].dims[0] = s.tensors[3].end = (uint64_t)1 << 52;
    s.tensors[3].piece_bytes = 1u << 20;
    s.shards[1].content_bytes = 104 + s.tensors[3].end;
    assert_not_written(&s.m, QC_ERR_INPUT, "more pieces than are supported");
    s.tensors[3].piece_bytes = 2u << 20;
    SCOPED(qc_strbuf) fits;
    write_text(&s.m, &fits);
    assert_rewrites_to_itself(&fits);
}

TEST(out_of_memory_is_said)
{
    sample s;
    SCOPED(qc_strbuf) text;
    make_sample(&s, COMPRESSED);
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
}

static double now_seconds(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

TEST(a_hundred_thousand_tensors)
{
    enum { TENSORS = TEST_SANITIZED ? 10000 : 100000 };
    sample s;
    SCOPED(qc_strbuf) text;
    make_sample(&s, COMPRESSED);
    qc_manifest_tensor *t = calloc(TENSORS, sizeof *t);
    char(*names)[64] = calloc(TENSORS, sizeof *names);
    assert_non_null(t);
    assert_non_null(names);
    uint64_t stored = s.shards[0].header_stored_bytes;
    for (size_t i = 0; i < TENSORS; i++) {
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
    s.m.tensor_count = TENSORS;
    s.m.shard_count = 1;
    s.shards[0].content_bytes = 100 + 64 * (uint64_t)TENSORS;
    s.shards[0].table_bytes = 17 + 8 * ((uint64_t)TENSORS + 1);
    s.shards[0].file_bytes = stored + s.shards[0].table_bytes;
    double t0 = now_seconds();
    write_text(&s.m, &text);
    double t1 = now_seconds();
    qc_manifest m;
    SCOPED(qc_arena) a = {0};
    read_text(&m, &a, text.data, text.len);
    printf("%zu bytes: written in %.2f s, read in %.2f s of processor time\n", text.len, t1 - t0,
           now_seconds() - t1);
    assert_int_equal(m.tensor_count, TENSORS);
    assert_rewrites_to_itself(&text);
    free(t);
    free(names);
}
