#include "convert/model/scheme.h"

#include "base/checked.h"
#include "quant/quant_ops.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define ROLE(r)       (1u << QC_ROLE_TENSOR_##r)
#define PACKED        (ROLE(MAIN) | ROLE(SCALE) | ROLE(SHAPE))
#define NESTED_SCALES (ROLE(ABSMAX) | ROLE(NESTED_ABSMAX) | ROLE(NESTED_MAP) | ROLE(STATE))

/* Integers that compressed-tensors packs to words, with 16-bit activations: by rows, and in groups
 * of 128 unless others are asked for. */
#define W16_ROW(b, suffix, ...)                                                                    \
    {                                                                                              \
        .name = "w" #b "a16" suffix, .to = QC_TO_INT##b, .form = &qc_form_w##b##a16, .bits = (b),  \
        .format = QC_FORMAT_COMPRESSED_TENSORS, .activation_bits = 16, .code_dtype = QC_DTYPE_I32, \
        .role_tensors = PACKED, __VA_ARGS__                                                        \
    }
#define W16(b)                                                                                     \
    [QC_SCHEME_W##b##A16_CHANNEL] = W16_ROW(b, "-channel", .by_rows = 1),                          \
    [QC_SCHEME_W##b##A16] = W16_ROW(b, "", .default_block = 128)

const qc_scheme_row qc_schemes[QC_SCHEME_COUNT] = {
    [QC_SCHEME_KEEP] = {.name = "keep", .role_tensors = ROLE(MAIN)},
    [QC_SCHEME_CAST] = {.name = "cast", .role_tensors = ROLE(MAIN)},
    [QC_SCHEME_NF4] =
        {
            .name = "nf4",
            .to = QC_TO_NF4,
            .form = &qc_form_nf4,
            .bits = 4,
            .default_block = QC_BLOCK_DEFAULT,
            .format = QC_FORMAT_BITSANDBYTES,
            .code_dtype = QC_DTYPE_U8,
            .role_tensors = ROLE(MAIN) | ROLE(QUANT_MAP) | NESTED_SCALES,
            .quant_type = "nf4",
            .state_suffix = ".quant_state.bitsandbytes__nf4",
        },
    [QC_SCHEME_INT8_ROWS] =
        {
            .name = "int8",
            .to = QC_TO_INT8,
            .form = &qc_form_int8_rows,
            .bits = 8,
            .by_rows = 1,
            .format = QC_FORMAT_BITSANDBYTES,
            .needs_int8_matmul = 1,
            .code_dtype = QC_DTYPE_I8,
            .role_tensors = ROLE(MAIN) | ROLE(SCB) | ROLE(FORMAT),
        },
    [QC_SCHEME_INT8_BLOCKS] =
        {
            .name = "int8-block",
            .to = QC_TO_INT8,
            .form = &qc_form_int8_blocks,
            .bits = 8,
            .format = QC_FORMAT_OWN,
            .samples_offset = 1,
            .code_dtype = QC_DTYPE_I8,
            .role_tensors = ROLE(MAIN) | NESTED_SCALES,
            .quant_type = "int8",
            .state_suffix = ".quant_state.qconv__int8",
        },
    W16(4),
    [QC_SCHEME_W8A16] = W16_ROW(8, "", .by_rows = 0),
    [QC_SCHEME_W8A16_CHANNEL] = W16_ROW(8, "-channel", .by_rows = 1),
    [QC_SCHEME_W8A8] =
        {
            .name = "w8a8",
            .to = QC_TO_INT8,
            .form = &qc_form_w8a8,
            .bits = 8,
            .by_rows = 1,
            .format = QC_FORMAT_COMPRESSED_TENSORS,
            .activation_bits = 8,
            .code_dtype = QC_DTYPE_I8,
            .role_tensors = ROLE(MAIN) | ROLE(SCALE),
        },
    W16(2),
    W16(3),
    W16(5),
    W16(6),
    W16(7),
    [QC_SCHEME_AWQ] =
        {
            .name = "awq",
            .to = QC_TO_INT4,
            .form = &qc_form_w4a16,
            .bits = 4,
            .default_block = 128,
            .format = QC_FORMAT_AWQ,
            .activation_bits = 16,
            .code_dtype = QC_DTYPE_I32,
            .role_tensors = ROLE(MAIN) | ROLE(SCALE) | ROLE(ZEROS),
        },
    [QC_SCHEME_DEQUANT] = {.name = "dequant", .role_tensors = ROLE(MAIN)},
    [QC_SCHEME_ABSORBED] = {.name = "absorbed", .role_tensors = ROLE(MAIN)},
};

#define SIXTEEN_BITS [QC_CANDIDATE_16BIT] = {"16bit", "auto: 16 bit", QC_SCHEME_KEEP, 0, 0, 0}

static const qc_candidate bitsandbytes_candidates[QC_CANDIDATES] = {
    {"nf4", "auto: nf4", QC_SCHEME_NF4, 64, 0, 0},
    {"nf4-32", "auto: nf4, block 32", QC_SCHEME_NF4, 32, 0, 0},
    {"int8", "auto: int8", QC_SCHEME_INT8_ROWS, 0, 0, 0},
    SIXTEEN_BITS,
};

#define WIDEST_GROUP 128u
#define GROUPS(b, asked_only)                                                                      \
    {                                                                                              \
        "int" #b, "auto: int" #b, QC_SCHEME_W##b##A16, WIDEST_GROUP, asked_only,                   \
            QC_SCHEME_W##b##A16_CHANNEL                                                            \
    }
/* int8 has a scale for each row: groups would cost an eighth of a bit and gain no more by it than
 * other weights do. */
#define PACKED_CANDIDATES(int8, other)                                                             \
    {                                                                                              \
        GROUPS(2, 1), GROUPS(3, 1), GROUPS(4, 0),                                                  \
            {"int4-32", "auto: int4, block 32", QC_SCHEME_W4A16, 32, 1, 0}, GROUPS(5, 0),          \
            GROUPS(6, 0), GROUPS(7, 1), {"int8", "auto: int8", int8, 0, 0, other}, SIXTEEN_BITS,   \
    }
/* Indexed by whether activations have 16 bits. */
static const qc_candidate packed_candidates[2][QC_CANDIDATES] = {
    PACKED_CANDIDATES(QC_SCHEME_W8A8, QC_SCHEME_KEEP),
    PACKED_CANDIDATES(QC_SCHEME_W8A16_CHANNEL, QC_SCHEME_W8A16)};

const qc_candidate *qc_candidates_of(const qc_recipe_options *o)
{
    return o->format == QC_FORMAT_COMPRESSED_TENSORS ? packed_candidates[o->activations_16 != 0]
                                                     : bitsandbytes_candidates;
}

/* Names the candidates of a table: "nf4, nf4-32, int8 and 16bit". */
static void name_candidates(const qc_candidate *rows, char *out, size_t size)
{
    size_t used = 0;
    for (unsigned c = 0; c < QC_CANDIDATE_16BIT; c++)
        if (rows[c].name && used < size)
            used +=
                (size_t)snprintf(out + used, size - used, "%s%s", used ? ", " : "", rows[c].name);
    if (used < size)
        (void)snprintf(out + used, size - used, " and %s", rows[QC_CANDIDATE_16BIT].name);
}

qc_status qc_candidates_parse(const qc_recipe_options *o, unsigned *candidates, qc_error *err)
{
    const qc_candidate *rows = qc_candidates_of(o);
    *candidates = 0;
    for (unsigned c = 0; c < QC_CANDIDATES && !o->schemes; c++)
        *candidates |= rows[c].name && !rows[c].asked_only ? 1u << c : 0;
    for (const char *at = o->schemes; at;) {
        const char *comma = strchr(at, ',');
        size_t len = comma ? (size_t)(comma - at) : strlen(at);
        unsigned c = 0;
        while (c < QC_CANDIDATES &&
               (!rows[c].name || strlen(rows[c].name) != len || memcmp(rows[c].name, at, len) != 0))
            c++;
        if (c == QC_CANDIDATES) {
            char names[128];
            name_candidates(rows, names, sizeof names);
            QC_FAIL(err, QC_ERR_USAGE,
                    "--schemes: expected some of %s, separated by commas, found '%.*s'", names,
                    len < 64 ? (int)len : 64, at);
        }
        *candidates |= 1u << c;
        at = comma ? comma + 1 : NULL;
    }
    return QC_OK;
}

int qc_candidate_step(const qc_candidate *c, unsigned step, qc_candidate_form *form)
{
    const int by_rows = c->block_elems == 0;
    const unsigned steps = c->other == QC_SCHEME_KEEP ? 1 : QC_CANDIDATE_STEPS - !by_rows;
    *form = (qc_candidate_form){c->scheme, c->block_elems};
    if (step > 0 && step + 1 == steps)
        *form = (qc_candidate_form){by_rows ? c->scheme : c->other, 0};
    else if (step > 0)
        *form = (qc_candidate_form){by_rows ? c->other : c->scheme,
                                    WIDEST_GROUP >> (by_rows ? step - 1 : step)};
    return step < steps;
}

const char *qc_scheme_name(qc_scheme s)
{
    return s < QC_SCHEME_COUNT ? qc_schemes[s].name : "unknown";
}

const char *qc_scheme_text(char out[QC_SCHEME_TEXT_BYTES], const char *name, uint64_t block_elems)
{
    if (block_elems)
        (void)snprintf(out, QC_SCHEME_TEXT_BYTES, "%s b%" PRIu64, name, block_elems);
    else
        (void)snprintf(out, QC_SCHEME_TEXT_BYTES, "%s", name);
    return out;
}

int qc_scheme_is_quantized(qc_scheme s)
{
    return qc_schemes[s].bits > 0;
}

qc_scheme qc_scheme_of_options(const qc_recipe_options *o)
{
    qc_scheme found = o->format == QC_FORMAT_COMPRESSED_TENSORS ? QC_SCHEME_W4A16 : QC_SCHEME_NF4;
    for (unsigned s = 0; s < QC_SCHEME_COUNT; s++) {
        const qc_scheme_row *row = &qc_schemes[s];
        int suits = o->block_elems   ? !row->by_rows
                    : o->per_channel ? row->by_rows
                                     : row->by_rows || row->default_block;
        /* A form of qconv's own is one that bitsandbytes could not hold. */
        if (o->format == QC_FORMAT_BITSANDBYTES)
            suits &= row->format == o->format || row->format == QC_FORMAT_OWN;
        else
            suits &=
                row->format == o->format &&
                (row->to != QC_TO_INT8 || row->activation_bits == (o->activations_16 ? 16u : 8u));
        if (row->bits && row->to == o->to && suits)
            found = (qc_scheme)s;
    }
    return found;
}

uint32_t qc_scheme_block_of_options(const qc_recipe_options *o)
{
    return o->block_elems ? o->block_elems : qc_schemes[qc_scheme_of_options(o)].default_block;
}

static const char *rows_obstacle(const qc_scheme_row *row, uint32_t block_elems, uint64_t cols)
{
    if (row->format != QC_FORMAT_COMPRESSED_TENSORS && row->format != QC_FORMAT_AWQ)
        return NULL;
    if (cols == 0)
        return row->format == QC_FORMAT_AWQ ? "is not a Linear of AWQ"
                                            : "is not a Linear of compressed-tensors";
    if (!row->by_rows && block_elems && cols % block_elems)
        return "has rows of no whole groups";
    const int whole = row->form->words || cols * row->bits % qc_dtype_bits(row->code_dtype) == 0;
    return whole ? NULL : "has rows of no whole words";
}

const char *qc_candidate_obstacle(qc_candidate_form form, uint64_t cols)
{
    return rows_obstacle(&qc_schemes[form.scheme], form.block_elems, cols);
}

const char *qc_scheme_obstacle(const qc_recipe_options *o, uint64_t cols)
{
    const qc_candidate *rows = qc_candidates_of(o);
    const char *obstacle =
        rows_obstacle(&qc_schemes[qc_scheme_of_options(o)], qc_scheme_block_of_options(o), cols);
    qc_candidate_form form;
    for (unsigned k = 0; o->to == QC_TO_AUTO && obstacle && k < QC_CANDIDATE_16BIT; k++)
        for (unsigned step = 0; rows[k].name && qc_candidate_step(&rows[k], step, &form); step++)
            obstacle = qc_candidate_obstacle(form, cols) ? obstacle : NULL;
    return obstacle;
}

qc_dtype qc_scheme_scale_dtype(qc_dtype dtype)
{
    return dtype == QC_DTYPE_F16 || dtype == QC_DTYPE_BF16 ? dtype : QC_DTYPE_F32;
}

qc_form qc_scheme_form(qc_scheme s, uint64_t cols, uint64_t block_elems, int nested)
{
    qc_form form = {
        .ops = qc_schemes[s].form, .cols = cols, .nested = nested, .scale_dtype = QC_DTYPE_F32};
    if (form.ops && !qc_schemes[s].by_rows)
        form.block_elems = block_elems < UINT32_MAX ? (uint32_t)block_elems : UINT32_MAX;
    return form;
}

uint64_t qc_scheme_code_bytes(qc_scheme s, uint64_t elems)
{
    return qc_code_bytes(qc_schemes[s].bits, elems);
}

int qc_to_quantizes(qc_to to)
{
    int quantizes = to == QC_TO_AUTO;
    for (unsigned s = 0; s < QC_SCHEME_COUNT && !quantizes; s++)
        quantizes = qc_schemes[s].bits && qc_schemes[s].to == to;
    return quantizes;
}

const char *qc_to_name(qc_to to)
{
    static const char *const names[] = {QC_TO_NAMES};
    return names[to];
}

const char *qc_format_name(qc_format format)
{
    static const char *const names[] = {QC_FORMAT_NAMES, "qconv"};
    return names[format];
}

const char *qc_rest_name(qc_rest rest)
{
    static const char *const names[] = {QC_REST_NAMES};
    return names[rest];
}

const char *qc_scale_name(const qc_recipe_options *o)
{
    static const char *const names[] = {QC_SCALE_NAMES};
    return qc_to_quantizes(o->to) ? names[o->scale] : NULL;
}
