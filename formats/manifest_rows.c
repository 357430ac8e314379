/* The members of a manifest's objects, and the rows of its tensors, which are in memory or made one
 * at a time: see manifest.h. */
#include "formats/manifest_internal.h"

#include <string.h>

/* Ends with NULL. */
static const char *const schemes[] = {
    "nf4",   "int8",          "int8-block", "w2a16-channel", "w2a16", "w3a16-channel",
    "w3a16", "w4a16-channel", "w4a16",      "w5a16-channel", "w5a16", "w6a16-channel",
    "w6a16", "w7a16-channel", "w7a16",      "w8a16-channel", "w8a16", "w8a8",
    "awq",   "cast",          "keep",       "dequant",       "state", NULL};

const char *qc_manifest_scheme(const char *name)
{
    for (const char *const *s = schemes; *s; s++) {
        if (strcmp(*s, name) == 0)
            return *s;
    }
    return NULL;
}

const qc_json_row qc_manifest_option_rows[] = {
    QC_JSON_ROW(qc_manifest, to, TEXT, 0),
    QC_JSON_ROW(qc_manifest, block_elems, U64, 0),
    QC_JSON_ROW(qc_manifest, double_quant, BOOL, 0),
    QC_JSON_ROW(qc_manifest, rest, TEXT, 0),
    QC_JSON_ROW(qc_manifest, compute_dtype, MAYBE, 0),
    QC_JSON_ROW(qc_manifest, max_shard_bytes, U64, 0),
    {NULL},
};

static const char *const sides[] = {"one", "two", NULL};

const qc_json_row qc_manifest_calibration_rows[] = {
    QC_JSON_ROW(qc_manifest_calibration, hessians, TEXT, QC_WHEN_HESSIANS),
    QC_JSON_ROW(qc_manifest_calibration, text, TEXT, QC_WHEN_TEXT),
    QC_JSON_ROW_AS("xxh3_128", qc_manifest_calibration, digest, DIGEST, QC_WHEN_TEXT),
    QC_JSON_ROW(qc_manifest_calibration, tokenizer, TEXT, QC_WHEN_TEXT),
    QC_JSON_ROW(qc_manifest_calibration, tokens, U64, QC_WHEN_TEXT),
    QC_JSON_ROW(qc_manifest_calibration, windows, U64, QC_WHEN_TEXT),
    QC_JSON_ROW(qc_manifest_calibration, context, U64, QC_WHEN_TEXT),
    QC_JSON_ROW(qc_manifest_calibration, mix, DOUBLE, QC_WHEN_TEXT),
    QC_JSON_ROW(qc_manifest_calibration, relative_rank, DOUBLE, QC_WHEN_TEXT),
    QC_JSON_ROW_AS("judged_tokens", qc_manifest_calibration, judged.tokens, U64, QC_WHEN_TEXT),
    QC_JSON_ROW_AS("judged_search", qc_manifest_calibration, judged.search, DOUBLE, QC_WHEN_TEXT),
    QC_JSON_ROW_AS("judged_calibrated", qc_manifest_calibration, judged.calibrated, DOUBLE,
                   QC_WHEN_TEXT),
    QC_JSON_ROW(qc_manifest_calibration, damping, DOUBLE, 0),
    {"sided", QC_ROW_WORD, 0, offsetof(qc_manifest_calibration, sided), sides},
    {NULL},
};

const qc_json_row qc_manifest_placement_rows[] = {
    QC_JSON_ROW(qc_manifest_placement, vram, TEXT, 0),
    QC_JSON_ROW(qc_manifest_placement, margin, DOUBLE, 0),
    QC_JSON_ROW(qc_manifest_placement, context, U64, 0),
    QC_JSON_ROW(qc_manifest_placement, batch, U64, 0),
    QC_JSON_ROW(qc_manifest_placement, images, U64, 0),
    QC_JSON_ROW(qc_manifest_placement, kv_bits, U64, 0),
    QC_JSON_ROW(qc_manifest_placement, mla_expanded, BOOL, 0),
    {NULL},
};

const qc_json_row qc_manifest_device_rows[] = {
    QC_JSON_ROW(qc_manifest_device, name, TEXT, 0),
    QC_JSON_ROW(qc_manifest_device, tensor_bytes, U64, 0),
    QC_JSON_ROW(qc_manifest_device, shard_bytes, U64, 0),
    {NULL},
};

const qc_json_row qc_manifest_adapter_rows[] = {
    QC_JSON_ROW(qc_manifest_adapter, name, TEXT, 0),
    QC_JSON_ROW(qc_manifest_adapter, scale, DOUBLE, 0),
    QC_JSON_ROW_AS("config_xxh3_128", qc_manifest_adapter, config, DIGEST, 0),
    QC_JSON_ROW(qc_manifest_adapter, bytes, U64, 0),
    QC_JSON_ROW_AS("weights_xxh3_128", qc_manifest_adapter, weights, DIGEST, 0),
    {NULL},
};

const qc_json_row qc_manifest_source_rows[] = {
    QC_JSON_ROW(qc_manifest_source, name, TEXT, 0),
    QC_JSON_ROW(qc_manifest_source, bytes, U64, 0),
    QC_JSON_ROW_AS("header_xxh3_128", qc_manifest_source, header, DIGEST, 0),
    {NULL},
};

const qc_json_row qc_manifest_shard_rows[] = {
    QC_JSON_ROW(qc_manifest_shard, name, TEXT, 0),
    QC_JSON_ROW(qc_manifest_shard, content_bytes, U64, 0),
    QC_JSON_ROW(qc_manifest_shard, header_bytes, U64, 0),
    QC_JSON_ROW_AS("header_xxh3_128", qc_manifest_shard, header, DIGEST, 0),
    QC_JSON_ROW(qc_manifest_shard, device, U32, QC_WHEN_PLACED),
    QC_JSON_ROW(qc_manifest_shard, file_bytes, U64, QC_WHEN_STORED),
    QC_JSON_ROW(qc_manifest_shard, header_stored_bytes, U64, QC_WHEN_STORED),
    QC_JSON_ROW_AS("header_stored_xxh3_128", qc_manifest_shard, header_stored, DIGEST,
                   QC_WHEN_STORED),
    QC_JSON_ROW(qc_manifest_shard, table_bytes, U64, QC_WHEN_STORED),
    QC_JSON_ROW_AS("table_xxh3_128", qc_manifest_shard, table, DIGEST, QC_WHEN_STORED),
    {NULL},
};

const qc_json_row qc_manifest_tensor_rows[] = {
    QC_JSON_ROW(qc_manifest_tensor, name, TEXT, 0),
    {"scheme", QC_ROW_WORD, 0, offsetof(qc_manifest_tensor, scheme), schemes},
    QC_JSON_ROW(qc_manifest_tensor, dtype, DTYPE, 0),
    {NULL},
};

const qc_json_row qc_manifest_place_rows[] = {
    QC_JSON_ROW(qc_manifest_tensor, shard, U32, 0),
    QC_JSON_ROW(qc_manifest_tensor, begin, U64, 0),
    QC_JSON_ROW(qc_manifest_tensor, end, U64, 0),
    QC_JSON_ROW(qc_manifest_tensor, piece_bytes, U64, 0),
    QC_JSON_ROW_AS("xxh3_128", qc_manifest_tensor, content, DIGEST, 0),
    QC_JSON_ROW(qc_manifest_tensor, stored_offset, U64, QC_WHEN_STORED),
    QC_JSON_ROW(qc_manifest_tensor, stored_bytes, U64, QC_WHEN_STORED),
    QC_JSON_ROW_AS("stored_xxh3_128", qc_manifest_tensor, stored, DIGEST, QC_WHEN_STORED),
    {NULL},
};

const qc_json_row qc_manifest_error_rows[] = {
    QC_JSON_ROW(qc_manifest_tensor, rel_mse, DOUBLE, 0),
    QC_JSON_ROW(qc_manifest_tensor, max_err, DOUBLE, 0),
    QC_JSON_ROW(qc_manifest_tensor, max_err_index, U64, 0),
    {NULL},
};

const qc_json_row qc_manifest_output_rows[] = {
    QC_JSON_ROW(qc_manifest_outputs, rounded, DOUBLE, 0),
    QC_JSON_ROW(qc_manifest_outputs, calibrated, DOUBLE, 0),
    {NULL},
};

const qc_json_row qc_manifest_tensor_source_rows[] = {
    QC_JSON_ROW_AS("dtype", qc_manifest_tensor, source_dtype, DTYPE, 0),
    QC_JSON_ROW_AS("piece_bytes", qc_manifest_tensor, source_piece_bytes, U64, 0),
    QC_JSON_ROW_AS("xxh3_128", qc_manifest_tensor, source, DIGEST, 0),
    {NULL},
};

const qc_json_row qc_manifest_file_rows[] = {
    QC_JSON_ROW(qc_manifest_file, path, TEXT, 0),
    QC_JSON_ROW(qc_manifest_file, bytes, U64, 0),
    QC_JSON_ROW_AS("xxh3_128", qc_manifest_file, digest, DIGEST, 0),
    {NULL},
};

unsigned qc_manifest_when(const qc_manifest *m)
{
    return (m->compressed ? QC_WHEN_STORED : 0) |
           (m->placement.device_count > 0 ? QC_WHEN_PLACED : 0);
}

qc_status qc_manifest_row(const qc_manifest *m, size_t i, qc_manifest_tensor *room,
                          const qc_manifest_tensor **row, qc_error *err)
{
    *row = m->tensors ? &m->tensors[i] : room;
    if (m->tensors)
        return QC_OK;
    memset(room, 0, sizeof *room);
    return m->tensor_row(m->tensor_ctx, i, room, err);
}
