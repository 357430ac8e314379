/* A manifest for tests, with and without a placement, and ways to spoil it. After cmocka.h. */
#ifndef QC_TESTS_MANIFEST_SAMPLE_H
#define QC_TESTS_MANIFEST_SAMPLE_H

#include "formats/manifest.h"

#include <stdio.h>
#include <string.h>

#define TEXT_MAX (256u << 20)

/* A small manifest whose every part a test may spoil. */
typedef struct {
    qc_manifest m;
    const char *rules[2];
    qc_manifest_source sources[1];
    qc_manifest_shard shards[2];
    qc_manifest_tensor tensors[4];
    qc_manifest_file files[2];
    qc_manifest_device devices[3];
} sample;

static qc_digest digest_of(const char *s)
{
    return qc_digest_bytes(s, strlen(s));
}

static void make_sample(sample *s, int compressed)
{
    memset(s, 0, sizeof *s);
    s->rules[0] = "keep lm_head*";
    s->rules[1] = "quantize *.\"odd\"*";
    s->sources[0] = (qc_manifest_source){"model.safetensors", 1234, digest_of("source")};
    s->tensors[0] = (qc_manifest_tensor){.name = "m.absmax",
                                         .scheme = "state",
                                         .dtype = QC_DTYPE_F32,
                                         .ndim = 1,
                                         .dims = {2},
                                         .end = 8,
                                         .piece_bytes = 8,
                                         .content = digest_of("absmax"),
                                         .stored_offset = 90,
                                         .stored_bytes = 20,
                                         .stored = digest_of("absmax stored")};
    s->tensors[1] = (qc_manifest_tensor){.name = "m",
                                         .scheme = "nf4",
                                         .dtype = QC_DTYPE_U8,
                                         .ndim = 2,
                                         .dims = {64, 1},
                                         .begin = 8,
                                         .end = 72,
                                         .piece_bytes = 64,
                                         .content = digest_of("codes"),
                                         .stored_offset = 110,
                                         .stored_bytes = 70,
                                         .stored = digest_of("codes stored"),
                                         .has_error = 1,
                                         .rel_mse = 0.0083,
                                         .max_err = 0.1234567890123,
                                         .max_err_index = 77,
                                         .source_name = "m",
                                         .source_dtype = QC_DTYPE_BF16,
                                         .source_piece_bytes = 256,
                                         .source = digest_of("weights")};
    s->tensors[2] = (qc_manifest_tensor){.name = "empty",
                                         .scheme = "keep",
                                         .dtype = QC_DTYPE_I64,
                                         .ndim = 2,
                                         .dims = {0, 5},
                                         .piece_bytes = 8,
                                         .content = digest_of(""),
                                         .shard = 1,
                                         .source_name = "empty",
                                         .source_dtype = QC_DTYPE_I64,
                                         .source_piece_bytes = 8,
                                         .source = digest_of("")};
    s->tensors[3] = (qc_manifest_tensor){.name = "scalar",
                                         .scheme = "cast",
                                         .dtype = QC_DTYPE_F16,
                                         .end = 2,
                                         .piece_bytes = 2,
                                         .content = digest_of("s"),
                                         .stored_offset = 95,
                                         .stored_bytes = 15,
                                         .stored = digest_of("s stored"),
                                         .shard = 1,
                                         .source_name = "scalar",
                                         .source_dtype = QC_DTYPE_F32,
                                         .source_piece_bytes = 4,
                                         .source = digest_of("S")};
    s->shards[0] = (qc_manifest_shard){.name = "model-00001-of-00002.safetensors",
                                       .content_bytes = 172,
                                       .header_bytes = 100,
                                       .header = digest_of("header 0"),
                                       .file_bytes = 221,
                                       .header_stored_bytes = 90,
                                       .header_stored = digest_of("header 0 stored"),
                                       .table_bytes = 41,
                                       .table = digest_of("table 0")};
    s->shards[1] = (qc_manifest_shard){.name = "model-00002-of-00002.safetensors",
                                       .content_bytes = 106,
                                       .header_bytes = 104,
                                       .header = digest_of("header 1"),
                                       .file_bytes = 143,
                                       .header_stored_bytes = 95,
                                       .header_stored = digest_of("header 1 stored"),
                                       .table_bytes = 33,
                                       .table = digest_of("table 1")};
    s->files[0] = (qc_manifest_file){"config.json", 17, digest_of("config")};
    s->files[1] = (qc_manifest_file){"sub folder/\xc3\xa9.txt", 0, digest_of("")};
    s->m = (qc_manifest){.qconv_version = "0.1.0",
                         .zstd_version = compressed ? "1.5.4" : NULL,
                         .compressed = compressed,
                         .level = compressed ? 1 : 0,
                         .to = "nf4",
                         .block_elems = 64,
                         .double_quant = 1,
                         .rest = "keep",
                         .compute_dtype = "bfloat16",
                         .max_shard_bytes = 5000000000,
                         .rules = s->rules,
                         .rule_count = 2,
                         .sources = s->sources,
                         .source_count = 1,
                         .shards = s->shards,
                         .shard_count = 2,
                         .tensors = s->tensors,
                         .tensor_count = 4,
                         .files = s->files,
                         .file_count = 2};
}

/* The two shards on the outer of three devices. */
static inline void make_placed_sample(sample *s, int compressed)
{
    make_sample(s, compressed);
    s->devices[0] = (qc_manifest_device){"cuda:0", 72, 172};
    s->devices[1] = (qc_manifest_device){"cuda:1", 0, 0};
    s->devices[2] = (qc_manifest_device){"cpu", 2, 106};
    s->shards[1].device = 2;
    s->m.placement = (qc_manifest_placement){.vram = "2x40GB+cpu",
                                             .margin = 0.9,
                                             .context = 8192,
                                             .batch = 3,
                                             .images = 1,
                                             .kv_bits = 16,
                                             .mla_expanded = 1,
                                             .devices = s->devices,
                                             .device_count = 3};
}

static inline void write_text(const qc_manifest *m, qc_strbuf *out)
{
    qc_error err = {0};
    qc_strbuf_init(out, TEXT_MAX);
    if (qc_manifest_write(m, out, &err) != QC_OK)
        fail_msg("%s", err.msg);
}

/* text with `from` replaced by `to` (the first time), sealed again. */
static void respell(qc_strbuf *out, const qc_strbuf *text, const char *from, const char *to)
{
    const char *at = strstr(text->data, from);
    char hex[QC_DIGEST_HEX_BYTES];
    if (!at)
        fail_msg("'%s' is not in the text", from);
    size_t before = (size_t)(at - text->data), after = before + strlen(from);
    qc_strbuf_init(out, TEXT_MAX);
    assert_int_equal(qc_strbuf_add(out, text->data, before, NULL), QC_OK);
    assert_int_equal(qc_strbuf_adds(out, to, NULL), QC_OK);
    assert_int_equal(qc_strbuf_add(out, text->data + after, text->len - after, NULL), QC_OK);
    qc_digest d = qc_digest_bytes(out->data, out->len - 36);
    qc_digest_hex(&d, hex);
    memcpy(out->data + out->len - 36, hex, 32);
}

typedef struct {
    const char *from, *to;
    qc_status st;
    const char *says;
} wrong_text;

static inline void assert_wrong(const qc_strbuf *text, const wrong_text *cases, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        qc_strbuf wrong;
        qc_manifest m;
        qc_arena a;
        qc_error err = {0};
        qc_arena_init(&a);
        respell(&wrong, text, cases[i].from, cases[i].to);
        qc_status st = qc_manifest_parse(&m, &a, wrong.data, wrong.len, &err);
        if (st != cases[i].st || !strstr(err.msg, cases[i].says))
            fail_msg("case %zu ('%s'): %s, \"%s\"", i, cases[i].to, qc_status_name(st), err.msg);
        qc_strbuf_deinit(&wrong);
        qc_arena_deinit(&a);
    }
}

#endif
