#include "convert/model/recipe_stored.h"

#include "base/checked.h"
#include "base/text.h"
#include "convert/model/recipe_coded.h"
#include "formats/bnb_state.h"
#include "quant/quant_decode.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define MAX_STATE_BYTES 65536u

typedef struct {
    const qc_checkpoint *model;
    qc_arena *arena;
    qc_st_cursor *cursor;
    qc_stored_set *set;
    qc_dtype float_dtype; /* config.json's dtype, or F16 if it names none */
} finder;

/* The first read makes the cursor, because most checkpoints have no state to read. */
static qc_status read_bytes(finder *f, const qc_checkpoint_tensor *t, void *dst, size_t len,
                            qc_error *err)
{
    if (!f->cursor)
        QC_TRY(qc_st_cursor_create(&f->cursor, err));
    return qc_checkpoint_read(f->model, f->cursor, t, 0, dst, len, err);
}

static qc_status check_part(const finder *f, uint32_t weight, uint32_t part, const char *what,
                            qc_dtype dtype, uint64_t elems, qc_error *err)
{
    const char *name = f->model->tensors[weight].name;
    if (part == QC_NO_TENSOR)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': %s is missing", name, what);
    const qc_checkpoint_tensor *t = &f->model->tensors[part];
    uint64_t n = 0;
    QC_TRY(qc_shape_elems(t->dims, t->ndim, &n, err));
    if (t->dtype != dtype || n != elems)
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s': expected %" PRIu64 " values of %s, found %" PRIu64 " of %s", t->name,
                elems, qc_dtype_name(dtype), n, qc_dtype_name(t->dtype));
    return QC_OK;
}

static void own(const finder *f, uint32_t weight, uint32_t part)
{
    if (part != QC_NO_TENSOR)
        f->set->owners[part] = weight;
}

static qc_status read_state(finder *f, uint32_t state, qc_bnb_state *out, qc_error *err)
{
    const qc_checkpoint_tensor *t = &f->model->tensors[state];
    if (t->dtype != QC_DTYPE_U8 || t->bytes == 0 || t->bytes > MAX_STATE_BYTES)
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s': expected 1 to %u bytes of U8, found %" PRIu64 " of %s", t->name,
                MAX_STATE_BYTES, t->bytes, qc_dtype_name(t->dtype));
    char json[MAX_STATE_BYTES];
    size_t len = (size_t)t->bytes;
    QC_TRY(read_bytes(f, t, json, len, err));
    qc_status st = qc_bnb_state_parse(out, json, len, err);
    if (st != QC_OK)
        qc_error_prefix(err, "tensor '%s'", t->name);
    return st;
}

/* Adds the weight of the state tensor at index `state`. The weight's name is the first stem_len
 * bytes of the state's name. */
static qc_status add_block_weight(finder *f, uint32_t state, size_t stem_len, qc_scheme scheme,
                                  const char *type, qc_error *err)
{
    const qc_checkpoint_tensor *tensors = f->model->tensors;
    const qc_scheme_row *row = &qc_schemes[scheme];
    const char *stem = tensors[state].name;
    uint32_t weight = qc_checkpoint_beside(f->model, stem, stem_len, "");
    if (weight == QC_NO_TENSOR)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': the weight it describes is missing", stem);
    const char *name = tensors[weight].name;
    if (f->set->weights[weight])
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s' has more than one quant_state or SCB", name);
    qc_bnb_state s;
    QC_TRY(read_state(f, state, &s, err));
    if (strcmp(s.quant_type, type) != 0)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': its name says %s, but its content says %s", stem,
                type, s.quant_type);
    qc_stored_weight *w = NULL;
    QC_TRY(qc_arena_array(f->arena, &w, 1, err));
    w->stored_as = scheme;
    w->fp4 = strcmp(type, row->quant_type) != 0;
    w->name = w->fp4 ? "fp4" : row->name;
    w->block_elems = s.block_elems;
    w->dtype = s.source_dtype;
    w->ndim = s.ndim;
    memcpy(w->dims, s.dims, sizeof w->dims);
    w->absmax = qc_checkpoint_beside(f->model, stem, stem_len, ".absmax");
    w->quant_map = qc_checkpoint_beside(f->model, stem, stem_len, ".quant_map");
    w->nested_absmax = qc_checkpoint_beside(f->model, stem, stem_len, ".nested_absmax");
    w->nested_map = qc_checkpoint_beside(f->model, stem, stem_len, ".nested_quant_map");

    uint64_t n = 0;
    QC_TRY(qc_shape_elems(s.dims, s.ndim, &n, err));
    if (s.block_elems == 0 || (s.nested && s.nested_block_elems == 0))
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': expected a block size above 0, found 0", stem);
    uint64_t want = qc_scheme_code_bytes(scheme, n);
    /* bitsandbytes can store its codes in tensors of other dtypes. */
    if (tensors[weight].bytes != want ||
        (row->format == QC_FORMAT_OWN && tensors[weight].dtype != row->code_dtype))
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s': %" PRIu64 " weights of %s take %" PRIu64 " bytes, found %" PRIu64
                " of %s",
                name, n, type, want, tensors[weight].bytes, qc_dtype_name(tensors[weight].dtype));
    if (row->format == QC_FORMAT_OWN && (tensors[weight].ndim != 2 || tensors[weight].dims[1] != 1))
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s': expected the codes of block-wise %s as [%" PRIu64
                ", 1], found %u dimensions",
                name, type, want, tensors[weight].ndim);
    uint64_t blocks = qc_ceil_div_u64(n, s.block_elems);
    QC_TRY(check_part(f, weight, w->absmax, "absmax", s.nested ? QC_DTYPE_U8 : QC_DTYPE_F32, blocks,
                      err));
    if (row->role_tensors & 1u << QC_ROLE_TENSOR_QUANT_MAP)
        QC_TRY(check_part(f, weight, w->quant_map, "quant_map", QC_DTYPE_F32, 16, err));
    if (s.nested) {
        w->nested_block_elems = s.nested_block_elems;
        w->nested_offset = (float)s.nested_offset;
        QC_TRY(check_part(f, weight, w->nested_absmax, "nested_absmax", QC_DTYPE_F32,
                          qc_ceil_div_u64(blocks, s.nested_block_elems), err));
        QC_TRY(check_part(f, weight, w->nested_map, "nested_quant_map", QC_DTYPE_F32, 256, err));
    } else if (w->nested_absmax != QC_NO_TENSOR || w->nested_map != QC_NO_TENSOR) {
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s' has a nested_absmax beside it, but its quant_state says that absmax "
                "is not nested",
                name);
    }
    const uint32_t beside[] = {state, w->absmax, w->quant_map, w->nested_absmax, w->nested_map};
    for (size_t i = 0; i < sizeof beside / sizeof *beside; i++)
        own(f, weight, beside[i]);
    f->set->weights[weight] = w;
    f->set->count++;
    return QC_OK;
}

/* Adds the weight of M.SCB at index scb; stem_len counts "M.". The weight is M.weight, or M itself:
 * a stack of experts, whose codes lie beside SCB [experts, out], is not a module. */
static qc_status add_row_weight(finder *f, uint32_t scb, size_t stem_len, qc_error *err)
{
    const qc_checkpoint_tensor *tensors = f->model->tensors;
    const char *stem = tensors[scb].name;
    uint32_t weight = qc_checkpoint_beside(f->model, stem, stem_len, "weight");
    int stack = weight == QC_NO_TENSOR && stem_len > 0;
    if (stack)
        weight = qc_checkpoint_beside(f->model, stem, stem_len - 1, "");
    if (weight == QC_NO_TENSOR)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': the weight it scales is missing", stem);
    const qc_checkpoint_tensor *t = &tensors[weight];
    const qc_checkpoint_tensor *scale = &tensors[scb];
    uint64_t rows = 0, cols = 0;
    stack |= scale->ndim == 2; /* Granite's are modules */
    QC_TRY(qc_shape_elems(scale->dims, scale->ndim, &rows, err));
    if (t->dtype != QC_DTYPE_I8 || t->ndim != 2)
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s': expected I8 of 2 dimensions beside SCB, found %s of %u", t->name,
                qc_dtype_name(t->dtype), t->ndim);
    if (stack && scale->ndim != 2)
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s': expected scales [experts, out] of a stack of experts, found %u "
                "dimensions",
                stem, scale->ndim);
    /* [n, 1] is a form of qconv's own; only the scales tell how many rows it has. */
    int flat = t->dims[1] == 1 && t->dims[0] != rows && rows > 0 && t->bytes % rows == 0;
    cols = flat ? t->bytes / rows : t->dims[1];
    if (f->set->weights[weight])
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s' has more than one quant_state or SCB", t->name);
    QC_TRY(check_part(f, weight, scb, "SCB", QC_DTYPE_F32, flat ? rows : t->dims[0], err));
    uint32_t format = qc_checkpoint_beside(f->model, stem, stem_len, "weight_format");
    if (format != QC_NO_TENSOR) {
        unsigned char value = 0;
        QC_TRY(check_part(f, weight, format, "weight_format", QC_DTYPE_U8, 1, err));
        QC_TRY(read_bytes(f, &tensors[format], &value, 1, err));
        if (value != 0)
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "tensor '%s': expected int8 weights in row order (weight_format 0), found "
                    "order %u; load and save the model with bitsandbytes 0.45 or later",
                    t->name, value);
    }
    qc_stored_weight *w = NULL;
    QC_TRY(qc_arena_array(f->arena, &w, 1, err));
    w->stored_as = QC_SCHEME_INT8_ROWS;
    w->name = qc_scheme_name(w->stored_as);
    w->absmax = scb;
    w->quant_map = w->nested_absmax = w->nested_map = QC_NO_TENSOR;
    w->block_elems = cols;
    w->dtype = f->float_dtype;
    w->ndim = stack ? 3 : 2;
    w->dims[0] = stack ? scale->dims[0] : rows;
    w->dims[1] = stack ? scale->dims[1] : cols;
    w->dims[2] = stack ? cols : 0;
    own(f, weight, scb);
    own(f, weight, format);
    f->set->weights[weight] = w;
    f->set->count++;
    return QC_OK;
}

/* Adds the weight of tensor i if that is a quant_state or SCB. */
static qc_status add_if_state(finder *f, uint32_t i, qc_error *err)
{
    static const char fp4[] = ".quant_state.bitsandbytes__fp4", scb[] = "SCB";
    const char *name = f->model->tensors[i].name;
    size_t len = strlen(name), tail = sizeof scb - 1;
    if (qc_ends_with(name, scb) && (len == tail || name[len - tail - 1] == '.'))
        return add_row_weight(f, i, len - tail, err);
    if (qc_ends_with(name, fp4))
        return add_block_weight(f, i, len - (sizeof fp4 - 1), QC_SCHEME_NF4, "fp4", err);
    for (unsigned s = 0; s < QC_SCHEME_COUNT; s++) {
        const qc_scheme_row *row = &qc_schemes[s];
        if (row->state_suffix && qc_ends_with(name, row->state_suffix))
            return add_block_weight(f, i, len - strlen(row->state_suffix), (qc_scheme)s,
                                    row->quant_type, err);
    }
    return QC_OK;
}

qc_status qc_stored_find(qc_stored_set *out, qc_arena *arena, const qc_checkpoint *model,
                         qc_error *err)
{
    memset(out, 0, sizeof *out);
    if (model->tensor_count >= QC_NO_TENSOR)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%zu tensors are too many", model->tensor_count);
    uint32_t count = (uint32_t)model->tensor_count;
    QC_TRY(qc_arena_array(arena, &out->weights, count, err));
    QC_TRY(qc_arena_array(arena, &out->owners, count, err));
    for (uint32_t i = 0; i < count; i++)
        out->owners[i] = QC_NO_TENSOR;
    finder f = {model, arena, NULL, out, qc_config_dtype(model, QC_DTYPE_F16)};
    qc_status st = QC_OK;
    for (uint32_t i = 0; i < count && st == QC_OK; i++)
        st = add_if_state(&f, i, err);
    qc_st_cursor_destroy(f.cursor);
    return st;
}

/* ---- compressed-tensors ---- */

unsigned qc_integers_activation_bits(const qc_coded_weight *w)
{
    return w->said.activation_bits ? w->said.activation_bits : w->coding == QC_CODING_INT ? 8 : 16;
}

uint64_t qc_integers_block(const qc_coded_weight *w)
{
    if (w->coding == QC_CODING_NVFP4)
        return QC_NVFP4_BLOCK;
    return w->tiles_across == 1 && (w->said.bits == 0 || w->said.by_rows) ? 0 : w->tile_cols;
}

#define GROUP_MAX 128u /* of --block-size; a longer row with one scale is no group */

/* Finds the scheme that makes such a weight; KEEP where none does. */
static qc_scheme integer_scheme(const qc_checkpoint_tensor *t, const qc_coded_weight *w)
{
    qc_scheme found = QC_SCHEME_KEEP;
    if (!qc_coding_is_packed(w->coding) || w->coding == QC_CODING_NVFP4 ||
        w->zeros != QC_NO_TENSOR || w->group_index != QC_NO_TENSOR || w->tile_rows != 1 ||
        w->padded)
        return found;
    for (unsigned s = 0; s < QC_SCHEME_COUNT; s++) {
        const qc_scheme_row *row = &qc_schemes[s];
        const int fits = row->by_rows
                             ? w->tiles_across == 1
                             : row->code_dtype == QC_DTYPE_I32 && w->tile_cols <= GROUP_MAX &&
                                   qc_block_size_valid((uint32_t)w->tile_cols);
        if (row->format != QC_FORMAT_COMPRESSED_TENSORS || row->bits != w->bits ||
            row->code_dtype != t->dtype || !fits ||
            (!row->form->words && w->dims[1] * w->bits % qc_dtype_bits(t->dtype) != 0))
            continue;
        if (!qc_scheme_is_quantized(found) || row->by_rows == (qc_integers_block(w) == 0))
            found = (qc_scheme)s;
    }
    return found;
}

qc_status qc_integers_name(const char **out, qc_arena *arena, const qc_coded_weight *w,
                           qc_error *err)
{
    const unsigned bits = w->said.bits ? w->said.bits : w->bits,
                   activations = qc_integers_activation_bits(w);
    const int by_rows = qc_integers_block(w) == 0;
    *out = qc_coding_name(w->coding);
    if (w->coding != QC_CODING_INT && w->coding != QC_CODING_PACKED)
        return QC_OK;
    for (unsigned s = 0; s < QC_SCHEME_COUNT; s++) {
        const qc_scheme_row *row = &qc_schemes[s];
        if (row->format == QC_FORMAT_COMPRESSED_TENSORS && row->bits == bits &&
            row->activation_bits == activations && row->by_rows == by_rows &&
            !w->said.float_activations) {
            *out = row->name;
            return QC_OK;
        }
    }
    return qc_arena_printf(arena, out, err, "w%ua%u%s%s", bits, activations,
                           w->said.float_activations ? "-fp8" : "",
                           by_rows && activations == 16 ? "-channel" : "");
}

static qc_status stored_as(const qc_stored_weight **out, qc_arena *arena,
                           const qc_checkpoint *model, qc_scheme scheme, uint64_t block_elems,
                           const qc_coded_weight *w, qc_error *err)
{
    qc_stored_weight *s = NULL;
    QC_TRY(qc_arena_array(arena, &s, 1, err));
    *s = (qc_stored_weight){.stored_as = scheme,
                            .absmax = w->scales,
                            .quant_map = QC_NO_TENSOR,
                            .nested_absmax = QC_NO_TENSOR,
                            .nested_map = QC_NO_TENSOR,
                            .block_elems = block_elems,
                            .dtype = model->tensors[w->scales].dtype,
                            .ndim = w->ndim};
    memcpy(s->dims, w->dims, sizeof s->dims);
    *out = s;
    return qc_integers_name(&s->name, arena, w, err);
}

qc_status qc_stored_of_integers(const qc_stored_weight **out, qc_arena *arena,
                                const qc_checkpoint *model, uint32_t tensor,
                                const qc_coded_weight *w, qc_error *err)
{
    const qc_scheme scheme = integer_scheme(&model->tensors[tensor], w);
    *out = NULL;
    return qc_scheme_is_quantized(scheme)
               ? stored_as(out, arena, model, scheme, qc_integers_block(w), w, err)
               : QC_OK;
}

qc_status qc_stored_of_awq(const qc_stored_weight **out, qc_arena *arena,
                           const qc_checkpoint *model, const qc_coded_weight *w, qc_error *err)
{
    return stored_as(out, arena, model, QC_SCHEME_AWQ, w->tile_cols, w, err);
}

qc_status qc_stored_find_codes(qc_stored_set *set, qc_coded_set *coded, qc_arena *arena,
                               const qc_checkpoint *model, qc_error *err)
{
    QC_TRY(qc_stored_find(set, arena, model, err));
    QC_TRY(qc_coded_find(coded, arena, model, err));
    for (uint32_t i = 0; i < (uint32_t)model->tensor_count; i++) {
        if (!coded->weights[i] || set->weights[i])
            continue;
        QC_TRY(qc_stored_of_integers(&set->weights[i], arena, model, i, coded->weights[i], err));
        set->count += set->weights[i] != NULL;
    }
    for (uint32_t i = 0; i < (uint32_t)model->tensor_count; i++) {
        const uint32_t weight = coded->owners[i];
        if (weight != QC_NO_TENSOR && set->weights[weight] && set->owners[i] == QC_NO_TENSOR)
            set->owners[i] = weight;
    }
    return QC_OK;
}
