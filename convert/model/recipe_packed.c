#include "convert/model/recipe_packed.h"

#include "base/bytes.h"
#include "base/checked.h"
#include "base/text.h"
#include "convert/families/config_fields.h"
#include "convert/term/size_text.h"
#include "quant/quant_decode.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NO_TENSOR  UINT32_MAX
#define WORD_BITS  32u
#define NOT_GIVEN  UINT64_MAX
#define TEXT_BYTES 128u

typedef enum { BY_TENSOR, BY_CHANNEL, BY_GROUP } strategy;
static const char *const strategies[] = {"tensor", "channel", "group"};

/* What config.json says of some weights. */
typedef struct {
    uint64_t bits;  /* NOT_GIVEN: nothing */
    uint64_t group; /* columns that share a scale; 0: all; NOT_GIVEN: nothing */
    strategy by;    /* compressed-tensors only, like the two after it */
    int asymmetric;
    int act_order;      /* GPTQ too */
    const char *format; /* compressed-tensors: how they are stored; "": it does not say */
    const qc_json_node *targets;
    qc_integer_args said;
} weight_args;

typedef struct {
    const qc_checkpoint *model;
    qc_arena *arena;
    qc_coded_set *set;
    qc_dtype dtype;
    const qc_json_node *config; /* quantization_config, or NULL */
    const char *method;         /* its quant_method, or "" */
    qc_st_cursor *cursor;       /* made when it is first needed */
    int has_args;
    weight_args *args; /* those of integers */
    size_t arg_count;
} finder;

/* The tensors of a weight. */
typedef struct {
    const qc_checkpoint_tensor *codes, *scales, *zeros, *groups; /* the last two may be NULL */
    uint32_t index;                                              /* the codes' index */
    size_t stem; /* length of the module's path, with its last dot */
} parts;

/* ---- config.json ---- */

static int has_members(const qc_json_node *object, const char *key)
{
    const qc_json_node *n = qc_json_get(object, key);
    return n && qc_json_kind_of(n) == QC_JSON_OBJECT && qc_json_count(n) > 0;
}

/* Reads a whole number or null; -1 stands for 0. */
static qc_status read_number(const qc_json_node *object, const char *key, uint64_t *out,
                             qc_error *err)
{
    const qc_json_node *n = qc_json_get(object, key);
    double value = 0;
    if (!n || qc_json_kind_of(n) == QC_JSON_NULL)
        return QC_OK;
    QC_TRY(qc_json_as_double(n, key, &value, err));
    if (value == -1) {
        *out = 0;
        return QC_OK;
    }
    return qc_json_as_u64(n, key, out, err);
}

static qc_status read_bool(const qc_json_node *object, const char *key, int *out, qc_error *err)
{
    const qc_json_node *n = qc_json_get(object, key);
    return !n || qc_json_kind_of(n) == QC_JSON_NULL ? QC_OK : qc_json_as_bool(n, key, out, err);
}

static qc_status read_act_order(const qc_json_node *weights, int *out, qc_error *err)
{
    const qc_json_node *n = qc_json_get(weights, "actorder");
    const char *name = qc_json_string_or(n, NULL);
    if (!name)
        return read_bool(weights, "actorder", out, err);
    *out = strcmp(name, "group") == 0 || strcmp(name, "dynamic") == 0;
    if (!*out && strcmp(name, "weight") != 0 && strcmp(name, "static") != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "actorder is '%s', expected group or weight", name);
    return QC_OK;
}

static qc_status read_strategy(const qc_json_node *weights, weight_args *a, qc_error *err)
{
    const qc_json_node *n = qc_json_get(weights, "strategy");
    const char *name = NULL;
    if (n && qc_json_kind_of(n) != QC_JSON_NULL)
        QC_TRY(qc_json_as_string(n, "strategy", &name, err));
    a->by = a->group == NOT_GIVEN ? BY_TENSOR : a->group == 0 ? BY_CHANNEL : BY_GROUP;
    if (!name)
        return QC_OK;
    for (int i = 0; i < 3; i++) {
        if (strcmp(name, strategies[i]) == 0) {
            a->by = (strategy)i;
            return QC_OK;
        }
    }
    QC_FAIL(err, QC_ERR_UNSUPPORTED,
            "integer weights have the strategy '%s', expected tensor, channel or group; start from "
            "the 16-bit checkpoint",
            name);
}

/* Reads what a group of config_groups says of weights and activations. */
static qc_status read_scheme(finder *f, const qc_json_node *group, qc_error *err)
{
    const qc_json_node *weights = qc_json_get(group, "weights");
    weight_args *a = &f->args[f->arg_count];
    if (!weights || qc_json_kind_of(weights) != QC_JSON_OBJECT ||
        strcmp(qc_json_string_or(qc_json_get(weights, "type"), "int"), "int") != 0)
        return QC_OK;
    *a = (weight_args){.bits = 8, .group = NOT_GIVEN, .targets = qc_json_get(group, "targets")};
    QC_TRY(read_number(weights, "num_bits", &a->bits, err));
    QC_TRY(read_number(weights, "group_size", &a->group, err));
    QC_TRY(read_strategy(weights, a, err));
    int symmetric = 1;
    QC_TRY(read_bool(weights, "symmetric", &symmetric, err));
    a->asymmetric = !symmetric;
    QC_TRY(read_act_order(weights, &a->act_order, err));
    a->format = qc_json_string_or(qc_json_get(group, "format"),
                                  qc_json_string_or(qc_json_get(f->config, "format"), ""));
    f->arg_count++;
    const qc_json_node *activations = qc_json_get(group, "input_activations");
    uint64_t bits = 16;
    if (activations && qc_json_kind_of(activations) == QC_JSON_OBJECT) {
        bits = 8;
        QC_TRY(read_number(activations, "num_bits", &bits, err));
        a->said.static_activations = !qc_json_bool_or(qc_json_get(activations, "dynamic"), 0);
        a->said.float_activations =
            strcmp(qc_json_string_or(qc_json_get(activations, "type"), "int"), "int") != 0;
    }
    a->said.by_rows = a->by == BY_CHANNEL;
    a->said.bits = a->bits < 8 ? (unsigned)a->bits : 8;
    a->said.activation_bits = bits < 16 ? (unsigned)bits : 16;
    return QC_OK;
}

static qc_status read_compressed_tensors(finder *f, qc_error *err)
{
    const qc_json_node *groups = qc_json_get(f->config, "config_groups");
    if (f->has_args || strcmp(f->method, "compressed-tensors") != 0)
        return QC_OK;
    f->has_args = 1;
    /* Rotations that are made while the model runs belong to its weights, and a weight would be
     * wrong without them. */
    if (has_members(qc_json_get(f->config, "transform_config"), "config_groups"))
        QC_FAIL(
            err, QC_ERR_UNSUPPORTED,
            "config.json: quantization_config has a transform_config, whose rotations qconv does "
            "not undo; start from the 16-bit checkpoint");
    if (!groups || qc_json_kind_of(groups) != QC_JSON_OBJECT)
        return QC_OK;
    QC_TRY(qc_arena_array(f->arena, &f->args, qc_json_count(groups), err));
    for (const qc_json_node *g = qc_json_first(groups); g; g = qc_json_next(g)) {
        qc_status st = read_scheme(f, g, err);
        if (st != QC_OK) {
            qc_error_prefix(err, "config.json: quantization_config");
            return st;
        }
    }
    return QC_OK;
}

static qc_status read_gptq_awq(const finder *f, weight_args *a, qc_error *err)
{
    *a = (weight_args){.bits = NOT_GIVEN, .group = NOT_GIVEN};
    if (has_members(f->config, "dynamic"))
        return QC_OK; /* every module may have its own */
    QC_TRY(read_number(f->config, "w_bit", &a->bits, err));
    QC_TRY(read_number(f->config, "bits", &a->bits, err));
    QC_TRY(read_number(f->config, "q_group_size", &a->group, err));
    QC_TRY(read_number(f->config, "group_size", &a->group, err));
    a->act_order = qc_json_bool_or(qc_json_get(f->config, "desc_act"), 0);
    return QC_OK;
}

/* ---- tensors ---- */

static const qc_checkpoint_tensor *sibling(const finder *f, const parts *p, const char *tail)
{
    uint32_t i = qc_checkpoint_beside(f->model, p->codes->name, p->stem, tail);
    return i == NO_TENSOR ? NULL : &f->model->tensors[i];
}

/* Is the tensor named with this after a dot? Then *stem is the length of what comes before. */
static int has_tail(const qc_checkpoint_tensor *t, const char *tail, size_t *stem)
{
    size_t len = strlen(t->name), n = strlen(tail);
    if (len <= n || t->name[len - n - 1] != '.' || strcmp(t->name + len - n, tail) != 0)
        return 0;
    *stem = len - n;
    return 1;
}

static int is_scale_dtype(qc_dtype t)
{
    return t == QC_DTYPE_F32 || t == QC_DTYPE_F16 || t == QC_DTYPE_BF16;
}

static int is_matrix(const qc_checkpoint_tensor *t, qc_dtype dtype, uint64_t rows, uint64_t cols)
{
    return t->dtype == dtype && t->ndim == 2 && t->dims[0] == rows && t->dims[1] == cols;
}

static qc_status expect_matrix(const qc_checkpoint_tensor *t, qc_dtype dtype, uint64_t rows,
                               uint64_t cols, qc_error *err)
{
    char shape[QC_SHAPE_TEXT_BYTES];
    if (is_matrix(t, dtype, rows, cols))
        return QC_OK;
    QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': expected %s [%" PRIu64 ", %" PRIu64 "], found %s %s",
            t->name, qc_dtype_name(dtype), rows, cols, qc_dtype_name(t->dtype),
            qc_text_shape(shape, t->dims, t->ndim));
}

static qc_status expect_group_index(const qc_checkpoint_tensor *t, uint64_t cols, qc_error *err)
{
    char shape[QC_SHAPE_TEXT_BYTES];
    if (!t || (t->dtype == QC_DTYPE_I32 && t->ndim == 1 && t->dims[0] == cols))
        return QC_OK;
    QC_FAIL(err, QC_ERR_INPUT,
            "tensor '%s': expected I32 [%" PRIu64 "], the group of each column, found %s %s",
            t->name, cols, qc_dtype_name(t->dtype), qc_text_shape(shape, t->dims, t->ndim));
}

static uint32_t index_of(const finder *f, const qc_checkpoint_tensor *t)
{
    return t ? (uint32_t)(t - f->model->tensors) : NO_TENSOR;
}

static void own(const finder *f, const parts *p, const qc_checkpoint_tensor *t)
{
    if (t)
        f->set->owners[index_of(f, t)] = p->index;
}

static qc_status add(finder *f, const parts *p, const qc_coded_weight *like, qc_error *err)
{
    static const char *const beside[] = {
        "weight_shape", "input_scale",       "input_zero_point", "input_global_scale",
        "output_scale", "output_zero_point", "_input_scale",     NULL};
    qc_coded_weight *w = NULL;
    QC_TRY(qc_arena_array(f->arena, &w, 1, err));
    *w = *like;
    w->dtype = f->dtype;
    w->ndim = w->ndim ? w->ndim : 2;
    w->scales = index_of(f, p->scales);
    w->zeros = index_of(f, p->zeros);
    w->group_index = index_of(f, p->groups);
    if (!w->name)
        QC_TRY(
            qc_arena_printf(f->arena, &w->name, err, "%.*sweight", (int)p->stem, p->codes->name));
    if (strcmp(w->name, p->codes->name) != 0 && qc_checkpoint_find(f->model, w->name))
        QC_FAIL(
            err, QC_ERR_INPUT,
            "tensors '%s' and '%s' are the same weight, plain and packed: expected one of the two",
            w->name, p->codes->name);
    f->set->weights[p->index] = w;
    f->set->count++;
    own(f, p, p->scales);
    own(f, p, p->zeros);
    own(f, p, p->groups);
    for (int i = 0; beside[i]; i++)
        own(f, p, sibling(f, p, beside[i]));
    return QC_OK;
}

/* ---- compressed-tensors ---- */

/* Sets how scales are shared, from the shape of the scales. */
static qc_status fit_scales(qc_coded_weight *w, const qc_checkpoint_tensor *s, qc_error *err)
{
    char shape[QC_SHAPE_TEXT_BYTES];
    uint64_t n = 0, rows = w->dims[0], cols = w->dims[1];
    QC_TRY(qc_shape_elems(s->dims, s->ndim, &n, err));
    w->tile_rows = rows;
    w->tile_cols = cols;
    w->tiles_across = 1;
    if (n == 1)
        return QC_OK;
    if (s->ndim != 2 || s->dims[0] != rows || s->dims[1] == 0 || cols % s->dims[1] != 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s': expected one scale, [%" PRIu64 ", 1], or [%" PRIu64
                ", groups] with groups that divide the weight's %" PRIu64 " columns, found %s",
                s->name, rows, rows, cols, qc_text_shape(shape, s->dims, s->ndim));
    w->tile_rows = 1;
    w->tiles_across = s->dims[1];
    w->tile_cols = cols / s->dims[1];
    return QC_OK;
}

/* Are these the arguments of w? Where a row is one group, they may name it either way. */
static int is_described(const qc_coded_weight *w, const parts *p, const weight_args *a)
{
    int single = p->scales->ndim < 2 || w->tile_rows > 1;
    int one_row = w->dims[0] == 1 && w->tiles_across == 1;
    if (w->coding == QC_CODING_PACKED ? a->bits != w->bits : a->bits > 8)
        return 0;
    if ((a->asymmetric && !p->zeros) || (a->act_order && !p->groups))
        return 0;
    if (a->by == BY_TENSOR)
        return single || one_row;
    if (a->by == BY_CHANNEL)
        return w->tiles_across == 1 && (!single || one_row);
    return (!single || one_row) && a->group != NOT_GIVEN && a->group > 0 &&
           w->tiles_across == qc_ceil_div_u64(w->dims[1], a->group);
}

static void say_args(char text[TEXT_BYTES], const weight_args *a)
{
    char group[32] = "";
    if (a->by == BY_GROUP)
        (void)snprintf(group, sizeof group, ", group_size %" PRIu64, a->group);
    (void)snprintf(text, TEXT_BYTES, "num_bits %" PRIu64 ", strategy %s%s%s%s", a->bits,
                   strategies[a->by], group, a->asymmetric ? ", with zero points" : "",
                   a->act_order ? ", with actorder" : "");
}

/* Finds what config.json says of w, and takes over what it says of activations. */
static qc_status check_described(const finder *f, qc_coded_weight *w, const parts *p, qc_error *err)
{
    char says[TEXT_BYTES], found[TEXT_BYTES];
    for (size_t i = 0; i < f->arg_count; i++) {
        if (!is_described(w, p, &f->args[i]))
            continue;
        w->said = f->args[i].said;
        const char *format = f->args[i].format;
        const int packed = w->coding == QC_CODING_PACKED;
        if (*format == '\0' || strcmp(format, "mixed-precision") == 0 ||
            strcmp(format, packed ? "pack-quantized" : "int-quantized") == 0 ||
            (!packed && strcmp(format, "naive-quantized") == 0))
            return QC_OK;
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s': config.json says that the format is '%s', but the tensors have %s",
                p->codes->name, format, packed ? "pack-quantized" : "int-quantized");
    }
    if (!f->config || strcmp(f->method, "compressed-tensors") != 0)
        return QC_OK;
    if (f->arg_count == 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s' holds integers, but config.json's config_groups have no weights of "
                "the type int",
                p->codes->name);
    if (f->args[0].act_order && !p->groups)
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s': config.json says actorder, but there is no weight_g_idx beside it",
                p->codes->name);
    const weight_args is = {.bits = w->bits,
                            .group = w->tile_cols,
                            .by = w->tile_rows > 1      ? BY_TENSOR
                                  : w->tiles_across > 1 ? BY_GROUP
                                                        : BY_CHANNEL,
                            .asymmetric = p->zeros != NULL,
                            .act_order = p->groups != NULL};
    say_args(says, &f->args[0]);
    say_args(found, &is);
    QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': config.json says %s, but the tensors have %s",
            p->codes->name, says, found);
}

/* Checks the zero points' shape: bytes like the scales, or, in a packed weight, words. */
static qc_status check_zeros(const qc_coded_weight *w, const parts *p, qc_error *err)
{
    uint64_t n = 0, scales = 0;
    char shape[QC_SHAPE_TEXT_BYTES];
    if (!p->zeros)
        return QC_OK;
    QC_TRY(qc_shape_elems(p->zeros->dims, p->zeros->ndim, &n, err));
    QC_TRY(qc_shape_elems(p->scales->dims, p->scales->ndim, &scales, err));
    if (p->zeros->dtype == QC_DTYPE_I8 && n == scales)
        return QC_OK;
    if (w->coding == QC_CODING_PACKED && w->tile_rows == 1 &&
        is_matrix(p->zeros, QC_DTYPE_I32, qc_packed_words(w, w->dims[0]), w->tiles_across))
        return QC_OK;
    QC_FAIL(err, QC_ERR_INPUT,
            "tensor '%s': expected a zero point for each of %" PRIu64 " scales, found %s %s",
            p->zeros->name, scales, qc_dtype_name(p->zeros->dtype),
            qc_text_shape(shape, p->zeros->dims, p->zeros->ndim));
}

uint64_t qc_packed_words(const qc_coded_weight *w, uint64_t n)
{
    return w->padded ? qc_ceil_div_u64(n, WORD_BITS / w->bits)
                     : qc_ceil_div_u64(qc_code_bytes(w->bits, n), sizeof(uint32_t));
}

/* Do these arguments name the weight's module, and so that nothing else can be meant? */
static int names_module(const weight_args *a, const parts *p)
{
    const qc_json_node *n = a->targets ? qc_json_first(a->targets) : NULL;
    for (; n; n = qc_json_next(n)) {
        const char *target = qc_json_string_or(n, "");
        if (strlen(target) + 1 == p->stem && memcmp(target, p->codes->name, p->stem - 1) == 0)
            return 1;
    }
    return 0;
}

/* Does config.json name a version that did not pack densely? */
static int packs_whole_codes(const finder *f)
{
    const char *version = qc_json_string_or(qc_json_get(f->config, "version"), "");
    return strncmp(version, "0.", 2) == 0 && strtoul(version + 2, NULL, 10) < 18;
}

/* Do rows of so many words hold that many columns, one way or the other? Then *w says which. */
static int fills(const finder *f, qc_coded_weight *w, unsigned bits, uint64_t cols, uint64_t words)
{
    qc_coded_weight trial = *w;
    trial.bits = bits;
    trial.dims[1] = cols;
    for (int k = 0; k < 2; k++) {
        trial.padded = k != packs_whole_codes(f) && WORD_BITS % bits != 0;
        if (cols > 0 && qc_packed_words(&trial, cols) == words) {
            *w = trial;
            return 1;
        }
    }
    return 0;
}

/* Finds the bits and the columns of a packed weight from its words and from weight_shape's columns,
 * where there is one. bits stays 0 where they do not say. Several widths may fit: if a row is
 * short, without a weight_shape, or as 7 and 8 bits once took the same words. Then config.json
 * decides, or the width that is more common. */
static qc_status size_packed(finder *f, const parts *p, qc_coded_weight *w, qc_error *err)
{
    static const unsigned widths[] = {4, 8, 2, 3, 5, 6, 7, 1};
    enum { WIDTHS = sizeof widths / sizeof *widths };
    const qc_checkpoint_tensor *t = sibling(f, p, "weight_shape");
    const int known = t && f->model->file_count > 0;
    uint64_t shape[2] = {0}, words = p->codes->dims[1];
    unsigned char raw[16];
    if (known) {
        if (t->dtype != QC_DTYPE_I64 || t->bytes != sizeof raw)
            QC_FAIL(err, QC_ERR_INPUT,
                    "tensor '%s': expected I64 [2], found %s of %" PRIu64 " bytes", t->name,
                    qc_dtype_name(t->dtype), t->bytes);
        if (!f->cursor)
            QC_TRY(qc_st_cursor_create(&f->cursor, err));
        QC_TRY(qc_checkpoint_read(f->model, f->cursor, t, 0, raw, sizeof raw, err));
        shape[0] = qc_load_le64(raw);
        shape[1] = qc_load_le64(raw + 8);
    }
    w->dims[0] = p->codes->dims[0];
    size_t named = 0;
    while (named < f->arg_count && !names_module(&f->args[named], p))
        named++;
    for (int i = 0; i < 2 * WIDTHS && !w->bits; i++) {
        const unsigned bits = widths[i % WIDTHS];
        const uint64_t cols = known ? shape[1] : qc_sat_mul(words, WORD_BITS) / bits;
        int says = i >= WIDTHS && known; /* the first time it has to be config.json */
        for (size_t a = 0; i < WIDTHS && a < f->arg_count; a++)
            says |= f->args[a].bits == bits && (a == named || named == f->arg_count);
        if (says)
            (void)fills(f, w, bits, cols, words);
    }
    if (known && (shape[0] != w->dims[0] || !w->bits))
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s': weight_shape says [%" PRId64 ", %" PRId64
                "], which does not pack into words [%" PRIu64 ", %" PRIu64 "]",
                p->codes->name, (int64_t)shape[0], (int64_t)shape[1], w->dims[0], words);
    return QC_OK;
}

/* Adds a weight of compressed-tensors, in words or in bytes. */
static qc_status add_compressed(finder *f, parts *p, int packed, qc_error *err)
{
    qc_coded_weight w = {.coding = packed ? QC_CODING_PACKED : QC_CODING_INT};
    p->scales = sibling(f, p, "weight_scale");
    p->zeros = sibling(f, p, "weight_zero_point");
    p->groups = sibling(f, p, "weight_g_idx");
    if (!p->scales || !is_scale_dtype(p->scales->dtype) ||
        (!packed && f->config && strcmp(f->method, "compressed-tensors") != 0 &&
         strcmp(f->method, "qconv") != 0))
        return QC_OK;
    QC_TRY(read_compressed_tensors(f, err));
    if (packed) {
        QC_TRY(size_packed(f, p, &w, err));
    } else {
        w.bits = 8;
        memcpy(w.dims, p->codes->dims, 2 * sizeof *w.dims);
    }
    if (w.bits < 2)
        return QC_OK;
    QC_TRY(fit_scales(&w, p->scales, err));
    QC_TRY(check_zeros(&w, p, err));
    QC_TRY(expect_group_index(p->groups, w.dims[1], err));
    QC_TRY(check_described(f, &w, p, err));
    return add(f, p, &w, err);
}

/* ---- GPTQ and AWQ ---- */

/* Sets the columns of a group, from the number of groups. */
static qc_status fit_groups(qc_coded_weight *w, const parts *p, const weight_args *a, qc_error *err)
{
    uint64_t cols = w->dims[1], groups = p->scales->dims[0], size = a->group ? a->group : cols;
    w->tile_rows = 1;
    w->tiles_across = groups;
    w->tile_cols = size == NOT_GIVEN ? qc_ceil_div_u64(cols, groups) : size;
    if (a->bits != NOT_GIVEN && a->bits != w->bits)
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s': config.json says %" PRIu64 " bits, but the tensors have %u",
                p->codes->name, a->bits, w->bits);
    if (groups != qc_ceil_div_u64(cols, w->tile_cols) ||
        (size == NOT_GIVEN && !p->groups && cols % groups != 0))
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s': %" PRIu64 " columns in groups of %" PRIu64 " need %" PRIu64
                " rows of scales, found %" PRIu64,
                p->scales->name, cols, w->tile_cols, qc_ceil_div_u64(cols, w->tile_cols), groups);
    if (a->act_order && !p->groups)
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s': config.json says desc_act, but there is no g_idx beside it",
                p->codes->name);
    return QC_OK;
}

/* Has quantization_config no such member, or one of these two words? */
static int is_word(const finder *f, const char *key, const char *one, const char *other)
{
    const char *word = qc_json_string_or(qc_json_get(f->config, key), one);
    return strcmp(word, one) == 0 || strcmp(word, other) == 0;
}

static qc_status add_gptq(finder *f, parts *p, const weight_args *a, qc_error *err)
{
    qc_coded_weight w = {.coding = QC_CODING_GPTQ};
    uint64_t out = p->codes->dims[1], groups = p->scales->dims[0];
    /* The zero points say how many bits a code has. */
    uint64_t wide = p->zeros->ndim == 2 ? p->zeros->dims[1] : 0;
    w.bits = out == qc_sat_mul(wide, 8) ? 4 : out == qc_sat_mul(wide, 4) ? 8 : 0;
    if (!w.bits && a->bits != NOT_GIVEN && a->bits != 4 && a->bits != 8)
        return QC_OK;
    if (!w.bits)
        return expect_matrix(p->zeros, QC_DTYPE_I32, groups,
                             qc_ceil_div_u64(out, a->bits == 8 ? 4 : 8), err);
    p->groups = sibling(f, p, "g_idx");
    w.dims[0] = out;
    w.dims[1] = qc_sat_mul(p->codes->dims[0], WORD_BITS / w.bits);
    w.zero_add =
        strcmp(qc_json_string_or(qc_json_get(f->config, "checkpoint_format"), "gptq"), "gptq") == 0;
    QC_TRY(expect_matrix(p->zeros, QC_DTYPE_I32, groups, wide, err));
    QC_TRY(expect_group_index(p->groups, w.dims[1], err));
    QC_TRY(fit_groups(&w, p, a, err));
    return add(f, p, &w, err);
}

/* GPTQ and AWQ use the same names. The number of columns tells them apart. */
static qc_status add_qweight(finder *f, parts *p, qc_error *err)
{
    const qc_checkpoint_tensor *t = p->codes;
    weight_args a;
    p->scales = sibling(f, p, "scales");
    p->zeros = sibling(f, p, "qzeros");
    if (!p->scales || !p->zeros || !is_scale_dtype(p->scales->dtype) || p->scales->ndim != 2 ||
        p->scales->bytes == 0)
        return QC_OK;
    const uint64_t in = t->dims[0], out = p->scales->dims[1];
    int is_gptq = t->dims[1] == out;
    int gptq = strcmp(f->method, "gptq") == 0;
    int awq = strcmp(f->method, "awq") == 0 || strcmp(f->method, "autoawq") == 0;
    int own = strcmp(f->method, "qconv") == 0;
    gptq |= own && qc_json_get(f->config, "checkpoint_format") && is_gptq;
    const int known_layout =
        gptq ? is_word(f, "checkpoint_format", "gptq", "gptq_v2") &&
                   !qc_json_bool_or(qc_json_get(f->config, "is_marlin_format"), 0)
             : is_word(f, "version", "gemm", "GEMM");
    if ((f->config && !gptq && !awq && !own) || !known_layout)
        return QC_OK;
    QC_TRY(read_gptq_awq(f, &a, err));
    int is_awq = qc_sat_mul(t->dims[1], 8) == out;
    if ((gptq && !is_gptq) || (awq && !is_awq))
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s': config.json says %s, whose qweight would have %" PRIu64
                " columns, found %" PRIu64,
                t->name, f->method, out / (gptq ? 1 : 8), t->dims[1]);
    if (gptq || !is_awq)
        return gptq ? add_gptq(f, p, &a, err) : QC_OK;
    qc_coded_weight w = {.coding = QC_CODING_AWQ, .bits = 4, .dims = {out, in}};
    QC_TRY(expect_matrix(p->codes, QC_DTYPE_I32, in, out / 8, err));
    QC_TRY(expect_matrix(p->zeros, QC_DTYPE_I32, p->scales->dims[0], out / 8, err));
    QC_TRY(fit_groups(&w, p, &a, err));
    return add(f, p, &w, err);
}

/* ---- NVFP4 ---- */

/* The names of a weight's tensors. The codes' name is stem + codes; beside them lie stem + scales
 * and so on. */
static const struct {
    const char *tool, *codes, *scales, *global;
    int divides;
} nvfp4_forms[] = {
    {"ModelOpt", ".weight", "weight_scale", "weight_scale_2", 0},
    {"compressed-tensors", ".weight_packed", "weight_scale", "weight_global_scale", 1},
    {"ModelOpt", "", "_weight_scale", "_weight_scale_2", 0}, /* the last, since any name ends so */
};

/* Says in *form and *stem which of these tensor t is. */
static int is_nvfp4(const qc_checkpoint *m, const qc_checkpoint_tensor *t, unsigned *form,
                    size_t *stem)
{
    const size_t len = strlen(t->name);
    *form = 0;
    while (!qc_ends_with(t->name, nvfp4_forms[*form].codes))
        (*form)++;
    *stem = len - (*nvfp4_forms[*form].codes ? strlen(nvfp4_forms[*form].codes) - 1 : 0);
    const uint32_t i = qc_checkpoint_beside(m, t->name, *stem, nvfp4_forms[*form].scales);
    return t->dtype == QC_DTYPE_U8 && t->bytes > 0 && (t->ndim == 2 || t->ndim == 3) &&
           i != NO_TENSOR && m->tensors[i].dtype == QC_DTYPE_F8_E4M3;
}

/* Sets the shape of w, and how its scales are shared, from those of codes and scales. The codes of
 * a block lie along a row, or one below the other in a stack [experts, in, out], and then tile_cols
 * is 1. */
static int fit_nvfp4(qc_coded_weight *w, const qc_checkpoint_tensor *t,
                     const qc_checkpoint_tensor *s)
{
    if (s->ndim != t->ndim || (t->ndim == 3 && s->dims[0] != t->dims[0]))
        return 0;
    for (unsigned d = t->ndim; d-- > t->ndim - (t->ndim == 3 ? 2 : 1);) {
        const unsigned other = 2 * t->ndim - 3 - d; /* the other one of the last two */
        if (s->dims[other] != t->dims[other] ||
            qc_sat_mul(s->dims[d], QC_NVFP4_BLOCK / 2) != t->dims[d])
            continue;
        memcpy(w->dims, t->dims, sizeof w->dims);
        w->ndim = t->ndim;
        w->dims[d] *= 2;
        w->tile_rows = 1;
        w->tile_cols = d + 1 == t->ndim ? QC_NVFP4_BLOCK : 1;
        w->tiles_across = s->dims[t->ndim - 1];
        return 1;
    }
    return 0;
}

/* ComfyUI's files, and those that ModelOpt writes for it, have the scales in the order of cuBLAS
 * (0.47, swizzle_nvfp4_scales), which their shapes do not always show. They have a marker, a word
 * in the header, or no config.json. */
static int is_for_comfyui(const qc_checkpoint *m, const qc_checkpoint_tensor *t, size_t stem)
{
    int is = !m->config || qc_checkpoint_beside(m, t->name, stem, "comfy_quant") != NO_TENSOR;
    for (size_t i = 0; i < m->meta_count; i++)
        is |= strcmp(m->meta[i].key, "_quantization_metadata") == 0 ||
              strcmp(m->meta[i].key, "quantization_config") == 0;
    return is;
}

const char *qc_nvfp4_trouble(const qc_checkpoint *m, uint32_t i)
{
    const qc_checkpoint_tensor *t = &m->tensors[i];
    qc_coded_weight w;
    unsigned form = 0;
    size_t stem = 0;
    if (!is_nvfp4(m, t, &form, &stem))
        return NULL;
    const uint32_t s = qc_checkpoint_beside(m, t->name, stem, nvfp4_forms[form].scales);
    const uint32_t g = qc_checkpoint_beside(m, t->name, stem, nvfp4_forms[form].global);
    if (g == NO_TENSOR)
        return form == 1 ? "compressed-tensors (NVFP4), without the weight_global_scale that "
                           "divides its scales,"
                         : "ModelOpt (NVFP4), without the weight_scale_2 that multiplies its "
                           "scales,";
    if (form != 1 && is_for_comfyui(m, t, stem))
        return "ModelOpt (NVFP4) for ComfyUI, with scales in another order,";
    if (qc_checkpoint_beside(m, t->name, stem, "pre_quant_scale") != NO_TENSOR)
        return "ModelOpt (NVFP4), with a pre_quant_scale that its input is multiplied by,";
    const qc_checkpoint_tensor *global = &m->tensors[g];
    const uint64_t n = global->bytes / sizeof(float);
    if (!fit_nvfp4(&w, t, &m->tensors[s]) || global->dtype != QC_DTYPE_F32 ||
        (n != 1 && (t->ndim != 3 || n != t->dims[0])) ||
        qc_checkpoint_beside(m, t->name, stem, "weight_zero_point") != NO_TENSOR ||
        qc_checkpoint_beside(m, t->name, stem, "weight_g_idx") != NO_TENSOR)
        return form == 1 ? "compressed-tensors (NVFP4), with scales of another shape,"
                         : "ModelOpt (NVFP4), with scales of another shape,";
    return NULL;
}

static qc_status add_nvfp4(finder *f, parts *p, qc_error *err)
{
    const qc_checkpoint *m = f->model;
    qc_coded_weight w = {.coding = QC_CODING_NVFP4, .bits = 4};
    unsigned form = 0;
    if (!is_nvfp4(m, p->codes, &form, &p->stem) || qc_nvfp4_trouble(m, p->index))
        return QC_OK;
    p->scales = sibling(f, p, nvfp4_forms[form].scales);
    w.global = qc_checkpoint_beside(m, p->codes->name, p->stem, nvfp4_forms[form].global);
    w.divides = nvfp4_forms[form].divides;
    if (w.divides)
        QC_TRY(read_compressed_tensors(f, err));
    if (!*nvfp4_forms[form].codes)
        w.name = p->codes->name;
    (void)fit_nvfp4(&w, p->codes, p->scales);
    QC_TRY(add(f, p, &w, err));
    own(f, p, &m->tensors[w.global]);
    return QC_OK;
}

qc_status qc_packed_find(qc_coded_set *set, qc_arena *arena, const qc_checkpoint *model,
                         qc_dtype dtype, qc_error *err)
{
    finder f = {.model = model, .arena = arena, .set = set, .dtype = dtype};
    f.config = qc_config_quantization(model->config);
    f.method = qc_config_quant_method(model->config);
    qc_status st = QC_OK;
    for (uint32_t i = 0; st == QC_OK && i < (uint32_t)model->tensor_count; i++) {
        parts p = {.codes = &model->tensors[i], .index = i};
        const int words = p.codes->dtype == QC_DTYPE_I32;
        if (p.codes->dtype == QC_DTYPE_U8)
            st = add_nvfp4(&f, &p, err);
        if (st != QC_OK || p.codes->ndim != 2 || p.codes->bytes == 0)
            continue;
        if (words ? has_tail(p.codes, "weight_packed", &p.stem)
                  : p.codes->dtype == QC_DTYPE_I8 && has_tail(p.codes, "weight", &p.stem))
            st = add_compressed(&f, &p, words, err);
        else if (words && has_tail(p.codes, "qweight", &p.stem))
            st = add_qweight(&f, &p, err);
    }
    qc_st_cursor_destroy(f.cursor);
    return st;
}
