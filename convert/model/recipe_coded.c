#include "convert/model/recipe_coded.h"

#include "base/checked.h"
#include "base/text.h"
#include "convert/families/config_fields.h"
#include "convert/model/recipe_packed.h"
#include "quant/quant_decode.h"

#include <inttypes.h>
#include <string.h>

#define NO_TENSOR     UINT32_MAX
#define DEFAULT_BLOCK 128u /* DeepSeek-V3's, for a config.json that lacks weight_block_size */

typedef struct {
    const qc_checkpoint *model;
    qc_arena *arena;
    qc_coded_set *set;
    qc_dtype dtype;
    const qc_json_node *quantization; /* config.json's quantization_config, or NULL */
    /* quantization is qconv's own, of an output that holds FP8 too */
    int own;
    uint64_t block[2];
} finder;

static qc_status new_weight(finder *f, uint32_t i, qc_coded_weight **out, qc_error *err)
{
    QC_TRY(qc_arena_array(f->arena, out, 1, err));
    (*out)->dtype = f->dtype;
    (*out)->scales = NO_TENSOR;
    f->set->weights[i] = *out;
    f->set->count++;
    return QC_OK;
}

/* ---- FP8 ---- */

/* Sets how scales are shared. weight_scale_inv has one for each block of the weight, or a single
 * one; weight_scale (by_rows) a single one, one for each row, or one for each block. A matrix with
 * as many scales as there are blocks can only be the last, except for a single column with one
 * scale per row, which is therefore tried first. */
static qc_status fit_scales(const finder *f, qc_coded_weight *w, const qc_checkpoint_tensor *s,
                            int by_rows, qc_error *err)
{
    uint64_t n = 0;
    if (s->dtype != QC_DTYPE_F32 && s->dtype != QC_DTYPE_BF16 && s->dtype != QC_DTYPE_F16 &&
        s->dtype != QC_DTYPE_F8_E8M0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "tensor '%s': expected scales of F32, BF16, F16 or F8_E8M0, found %s", s->name,
                qc_dtype_name(s->dtype));
    QC_TRY(qc_shape_elems(s->dims, s->ndim, &n, err));
    if (n == 1 && (by_rows || s->ndim < 2))
        return QC_OK;
    if (by_rows && s->dims[0] == w->dims[0] &&
        (s->ndim == 1 || (s->ndim == 2 && s->dims[1] == 1))) {
        w->tile_rows = 1;
        return QC_OK;
    }
    uint64_t down = qc_ceil_div_u64(w->dims[0], f->block[0]);
    uint64_t across = qc_ceil_div_u64(w->dims[1], f->block[1]);
    const int fits = s->ndim == 2 && s->dims[0] == down && s->dims[1] == across;
    if (!fits && by_rows)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "tensor '%s': expected one scale, one for each of the weight's %" PRIu64
                " rows, or [%" PRIu64 ", %" PRIu64 "] for its blocks of %" PRIu64 " x %" PRIu64
                ", found %" PRIu64 " in %u dimensions; start from the 16-bit checkpoint",
                s->name, w->dims[0], down, across, f->block[0], f->block[1], n, s->ndim);
    if (!fits)
        QC_FAIL(
            err, QC_ERR_INPUT,
            "tensor '%s': blocks of %" PRIu64 " x %" PRIu64 " of a weight [%" PRIu64 ", %" PRIu64
            "] need scales [%" PRIu64 ", %" PRIu64 "], found %" PRIu64 " in %u dimensions",
            s->name, f->block[0], f->block[1], w->dims[0], w->dims[1], down, across, n, s->ndim);
    w->tile_rows = f->block[0];
    w->tile_cols = f->block[1];
    w->tiles_across = across;
    return QC_OK;
}

/* Does the weight's module have a scale under another name? stem_len counts "M.". */
static const char *unknown_scale(const qc_checkpoint *model, uint32_t weight, size_t stem_len)
{
    const char *stem = model->tensors[weight].name;
    for (int step = -1; step <= 1; step += 2) {
        for (int64_t i = (int64_t)weight + step; i >= 0 && i < (int64_t)model->tensor_count;
             i += step) {
            const char *name = model->tensors[i].name;
            if (strncmp(name, stem, stem_len) != 0)
                break;
            if (strstr(name + stem_len, "scale") && !strchr(name + stem_len, '.'))
                return name;
        }
    }
    return NULL;
}

static qc_status add_fp8(finder *f, uint32_t i, qc_error *err)
{
    static const char weight_tail[] = ".weight";
    const qc_checkpoint *m = f->model;
    const qc_checkpoint_tensor *t = &m->tensors[i];
    if (!qc_dtype_is_fp8(t->dtype) || t->ndim != 2 || !qc_ends_with(t->name, weight_tail) ||
        t->dims[0] == 0 || t->dims[1] == 0)
        return QC_OK;
    size_t len = strlen(t->name), stem = len - (sizeof weight_tail - 2);
    uint32_t inverse = qc_checkpoint_beside(m, t->name, len, "_scale_inv");
    uint32_t plain = qc_checkpoint_beside(m, t->name, len, "_scale");
    uint32_t second = qc_checkpoint_beside(m, t->name, len, "_scale_2");
    uint32_t input = qc_checkpoint_beside(m, t->name, stem, "input_scale");
    /* ComfyUI's older form; like the others, a value is the code times the scale. */
    if (plain == NO_TENSOR)
        plain = qc_checkpoint_beside(m, t->name, stem, "scale_weight");
    if (input == NO_TENSOR)
        input = qc_checkpoint_beside(m, t->name, stem, "scale_input");
    uint32_t bound = qc_checkpoint_beside(m, t->name, stem, "input_scale_ub");
    if ((inverse != NO_TENSOR) + (plain != NO_TENSOR) + (second != NO_TENSOR) > 1)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "tensor '%s' has more than one kind of scales beside it: expected one of "
                "weight_scale_inv, weight_scale and weight_scale_2",
                t->name);
    qc_coded_weight *w = NULL;
    QC_TRY(new_weight(f, i, &w, err));
    w->coding = QC_CODING_FP8;
    w->ndim = 2;
    memcpy(w->dims, t->dims, sizeof w->dims);
    w->name = t->name;
    w->tile_rows = t->dims[0];
    w->tile_cols = t->dims[1];
    w->tiles_across = 1;
    w->scales = inverse != NO_TENSOR ? inverse : plain;
    if (w->scales == NO_TENSOR) {
        const char *other = unknown_scale(m, i, stem);
        if (other || (f->quantization && !f->own)) {
            /* We do not guess the scale. If the weight has to be read, it is refused then. */
            f->set->weights[i] = NULL;
            f->set->count--;
        }
        return QC_OK;
    }
    const qc_checkpoint_tensor *s = &m->tensors[w->scales];
    QC_TRY(fit_scales(f, w, s, inverse == NO_TENSOR, err));
    f->set->owners[w->scales] = i;
    if (input != NO_TENSOR)
        f->set->owners[input] = i;
    if (bound != NO_TENSOR)
        f->set->owners[bound] = i;
    return QC_OK;
}

/* ---- MXFP4 ---- */

static qc_status add_mxfp4(finder *f, uint32_t i, qc_error *err)
{
    static const char tail[] = "_blocks";
    const qc_checkpoint_tensor *t = &f->model->tensors[i];
    if (t->dtype != QC_DTYPE_U8 || t->ndim != 4 || t->dims[3] != QC_MXFP4_BYTES || t->bytes == 0 ||
        !qc_ends_with(t->name, tail))
        return QC_OK;
    size_t stem = strlen(t->name) - (sizeof tail - 1);
    uint32_t scales = qc_checkpoint_beside(f->model, t->name, stem, "_scales");
    if (scales == NO_TENSOR)
        return QC_OK;
    const qc_checkpoint_tensor *s = &f->model->tensors[scales];
    if ((s->dtype != QC_DTYPE_U8 && s->dtype != QC_DTYPE_F8_E8M0) || s->ndim != 3 ||
        memcmp(s->dims, t->dims, 3 * sizeof *s->dims) != 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s': expected U8 [%" PRIu64 ", %" PRIu64 ", %" PRIu64
                "], a scale for each block of '%s', found %s in %u dimensions",
                s->name, t->dims[0], t->dims[1], t->dims[2], t->name, qc_dtype_name(s->dtype),
                s->ndim);
    qc_coded_weight *w = NULL;
    QC_TRY(new_weight(f, i, &w, err));
    w->coding = QC_CODING_MXFP4;
    w->scales = scales;
    w->ndim = 3;
    w->dims[0] = t->dims[0];
    w->dims[1] = t->dims[1];
    if (qc_mul_u64(t->dims[2], QC_MXFP4_BLOCK, &w->dims[2]))
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s' has more weights than 64 bits can count", t->name);
    QC_TRY(qc_arena_strndup(f->arena, &w->name, t->name, stem, err));
    f->set->owners[scales] = i;
    return QC_OK;
}

/* ---- config.json ---- */

qc_dtype qc_config_dtype(const qc_checkpoint *model, qc_dtype missing)
{
    const qc_json_node *root = qc_config_root(model->config);
    const char *name = qc_json_string_or(qc_json_get(root, "torch_dtype"), NULL);
    if (!name)
        name = qc_json_string_or(qc_json_get(root, "dtype"), NULL);
    if (!name)
        return missing;
    const qc_dtype t = qc_dtype_from_torch_name(name);
    return t == QC_DTYPE_BF16 || t == QC_DTYPE_F16 || t == QC_DTYPE_F32 ? t : missing;
}

/* Reads two sizes: rows and columns. */
static qc_status read_block(uint64_t block[2], const qc_json_node *size, const char *what,
                            qc_error *err)
{
    if (!size || qc_json_kind_of(size) != QC_JSON_ARRAY)
        return QC_OK;
    const qc_json_node *n = qc_json_first(size);
    for (int i = 0; i < 2; i++, n = qc_json_next(n)) {
        if (!n)
            QC_FAIL(err, QC_ERR_INPUT,
                    "config.json: %s: expected 2 sizes, rows and columns, found fewer", what);
        QC_TRY(qc_json_as_u64(n, what, &block[i], err));
        if (block[i] == 0)
            QC_FAIL(err, QC_ERR_INPUT, "config.json: %s: expected sizes above 0, found 0", what);
    }
    return QC_OK;
}

qc_status qc_coded_block(uint64_t block[2], const qc_checkpoint *model, qc_error *err)
{
    block[0] = block[1] = DEFAULT_BLOCK;
    const qc_json_node *q = qc_config_quantization(model->config);
    QC_TRY(read_block(block, qc_json_get(q, "weight_block_size"), "weight_block_size", err));
    /* where compressed-tensors has it */
    const qc_json_node *groups = qc_json_get(q, "config_groups");
    if (!groups || qc_json_kind_of(groups) != QC_JSON_OBJECT)
        return QC_OK;
    for (const qc_json_node *g = qc_json_first(groups); g; g = qc_json_next(g))
        QC_TRY(read_block(block, qc_json_get(qc_json_get(g, "weights"), "block_structure"),
                          "block_structure", err));
    return QC_OK;
}

/* Gives ComfyUI's markers to the weights that they speak of: "M.comfy_quant" is JSON on the form
 * of M.weight, and "scaled_fp8" says that FP8 weights have scale_weight. ComfyUI would take what is
 * written instead of the codes for codes. */
static void own_markers(const finder *f)
{
    static const char marker[] = ".comfy_quant", of_all[] = "scaled_fp8";
    uint32_t last = NO_TENSOR;
    for (uint32_t i = 0; i < f->model->tensor_count; i++)
        if (f->set->weights[i] && f->set->weights[i]->coding == QC_CODING_FP8)
            last = i;
    for (uint32_t i = 0; i < f->model->tensor_count; i++) {
        const char *name = f->model->tensors[i].name;
        uint32_t weight = qc_ends_with(name, of_all) ? last : NO_TENSOR;
        if (qc_ends_with(name, marker))
            weight = qc_checkpoint_beside(f->model, name, strlen(name) - strlen(marker), ".weight");
        if (weight != NO_TENSOR && f->set->weights[weight])
            f->set->owners[i] = weight;
    }
}

qc_status qc_coded_find(qc_coded_set *out, qc_arena *arena, const qc_checkpoint *model,
                        qc_error *err)
{
    memset(out, 0, sizeof *out);
    uint32_t count = (uint32_t)model->tensor_count;
    QC_TRY(qc_arena_array(arena, &out->weights, count, err));
    QC_TRY(qc_arena_array(arena, &out->owners, count, err));
    for (uint32_t i = 0; i < count; i++)
        out->owners[i] = NO_TENSOR;
    finder f = {.model = model,
                .arena = arena,
                .set = out,
                .dtype = qc_config_dtype(model, QC_DTYPE_BF16),
                .quantization = qc_config_quantization(model->config),
                .own = strcmp(qc_config_quant_method(model->config), "qconv") == 0};
    QC_TRY(qc_coded_block(f.block, model, err));
    for (uint32_t i = 0; i < count; i++) {
        QC_TRY(add_fp8(&f, i, err));
        QC_TRY(add_mxfp4(&f, i, err));
    }
    QC_TRY(qc_packed_find(out, arena, model, f.dtype, err));
    own_markers(&f);
    return QC_OK;
}

const char *qc_coding_name(qc_coding coding)
{
    static const char *const names[QC_CODING_COUNT] = {
        [QC_CODING_FP8] = "fp8",           [QC_CODING_MXFP4] = "mxfp4",
        [QC_CODING_INT] = "int-quantized", [QC_CODING_PACKED] = "pack-quantized",
        [QC_CODING_GPTQ] = "gptq",         [QC_CODING_AWQ] = "awq",
        [QC_CODING_NVFP4] = "nvfp4",
    };
    return names[coding];
}

int qc_coding_is_packed(qc_coding coding)
{
    return coding != QC_CODING_FP8 && coding != QC_CODING_MXFP4;
}

unsigned qc_coded_bits(const qc_coded_weight *w)
{
    if (qc_coding_is_packed(w->coding))
        return w->bits;
    return w->coding == QC_CODING_MXFP4 ? 4 : 8;
}

uint32_t qc_coded_index(const qc_coded_set *set, const qc_checkpoint *model, const char *name)
{
    static const char *const tails[] = {"weight_packed", "qweight"};
    const qc_checkpoint_tensor *t = qc_checkpoint_find(model, name);
    if (t)
        return (uint32_t)(t - model->tensors);
    size_t len = strlen(name), stem = qc_ends_with(name, ".weight") ? len - strlen("weight") : 0;
    uint32_t i = stem ? NO_TENSOR : qc_checkpoint_beside(model, name, len, "_blocks");
    if (qc_ends_with(name, ".weight_packed")) {
        stem = len - strlen("weight_packed");
        i = qc_checkpoint_beside(model, name, stem, "weight");
        if (i != NO_TENSOR)
            return i;
    }
    for (size_t k = 0; stem && i == NO_TENSOR && k < sizeof tails / sizeof *tails; k++)
        i = qc_checkpoint_beside(model, name, stem, tails[k]);
    return i != NO_TENSOR && set->weights[i] ? i : NO_TENSOR;
}

/* ---- what others packed ---- */

static int has_sibling(const qc_checkpoint *m, const char *name, size_t stem, const char *tail)
{
    return qc_checkpoint_beside(m, name, stem, tail) != NO_TENSOR;
}

static int is_integer(qc_dtype t)
{
    return t == QC_DTYPE_U8 || t == QC_DTYPE_I8 || t == QC_DTYPE_I16 || t == QC_DTYPE_U16 ||
           t == QC_DTYPE_I32 || t == QC_DTYPE_U32 || t == QC_DTYPE_I64;
}

/* Returns the tool that quant_method names, if config.json has one that is known. */
static const char *tool_of_method(const char *method)
{
    static const struct {
        const char *method, *tool;
    } tools[] = {
        {"gptq", "GPTQ"},
        {"awq", "AWQ"},
        {"autoawq", "AWQ"},
        {"hqq", "HQQ"},
        {"aqlm", "AQLM"},
        {"exl2", "ExLlamaV2"},
        {"exl3", "ExLlamaV3"},
        {"quip", "QuIP#"},
        {"spqr", "SpQR"},
        {"vptq", "VPTQ"},
        {"eetq", "EETQ"},
        {"higgs", "HIGGS"},
        {"quark", "Quark"},
        {"quanto", "quanto"},
        {"torchao", "torchao"},
        {"modelopt", "ModelOpt"},
        {"auto-round", "AutoRound"},
        {"intel/auto-round", "AutoRound"},
        {"bitnet", "BitNet"},
        {"fbgemm_fp8", "FBGEMM"},
        {"fp_quant", "FP-Quant"},
        {"sinq", "SINQ"},
        {"fouroversix", "Four Over Six"},
        {"metal", "MLX (Metal)"},
        {"sdnq", "SDNQ"},
        {"nunchaku_lite", "Nunchaku"},
        {"gguf", "GGUF"},
        {"compressed-tensors", "compressed-tensors"},
    };
    for (size_t i = 0; i < sizeof tools / sizeof *tools; i++) {
        if (strcmp(method, tools[i].method) == 0)
            return tools[i].tool;
    }
    return NULL;
}

/* Returns the tool that tensor names give away: what t is called, and what lies beside it. */
static const char *tool_of_names(const qc_checkpoint *model, const qc_checkpoint_tensor *t)
{
    static const struct {
        /* beside replaces the tail; NULL: nothing needs to be there */
        const char *tail, *beside, *tool;
    } forms[] = {
        {"trellis", NULL, "ExLlamaV3"},
        {"q_weight", NULL, "ExLlamaV2"},
        {"W_q", NULL, "HQQ"},
        {"Qidxs", NULL, "QuIP#"},
        {"codes", "codebooks", "AQLM"},
        {"indices", "centroids.weight", "VPTQ"},
        {"dense_weights", NULL, "SpQR"},
        {"weight._data", NULL, "quanto"},
        {"_weight_qdata", NULL, "torchao"},
        {"weight_qdata", NULL, "torchao"},
        {"qweight", "g_idx", "GPTQ"},
        {"qweight", NULL, "GPTQ or AWQ"},
        {"weight_packed", NULL, "compressed-tensors"},
    };
    /* The name is only "weight", so its scales tell more about it than its dtype. */
    static const struct {
        qc_dtype dtype;
        const char *beside, *tool;
    } weights[] = {
        {QC_DTYPE_U32, "biases", "MLX"},
        {QC_DTYPE_I8, "weight_scales", "EETQ"},
        {QC_DTYPE_I16, "tables2", "HIGGS"},
        {QC_DTYPE_I8, "weight_scale", "compressed-tensors"},
    };
    size_t len = strlen(t->name);
    for (size_t k = 0; k < sizeof forms / sizeof *forms; k++) {
        size_t tail = strlen(forms[k].tail);
        if (len > tail && t->name[len - tail - 1] == '.' && qc_ends_with(t->name, forms[k].tail) &&
            (!forms[k].beside || has_sibling(model, t->name, len - tail, forms[k].beside)))
            return forms[k].tool;
    }
    for (size_t k = 0; k < sizeof weights / sizeof *weights; k++) {
        if (t->dtype == weights[k].dtype && qc_ends_with(t->name, ".weight") &&
            has_sibling(model, t->name, len - strlen("weight"), weights[k].beside))
            return weights[k].tool;
    }
    return NULL;
}

/* Several tools use the same names (qweight, weight_scale), and config.json may be older or newer
 * than the tensors. So names and dtypes decide that a tensor is packed, and config.json decides by
 * which tool, if it says so. */
const char *qc_foreign_tool(const qc_checkpoint *model, uint32_t i)
{
    const qc_checkpoint_tensor *t = &model->tensors[i];
    const char *method = tool_of_method(qc_config_quant_method(model->config));
    const char *names = qc_nvfp4_trouble(model, i);
    if (names)
        return names;
    names = tool_of_names(model, t);
    const size_t stem = strlen(t->name) - (names ? strlen("_packed") : 0);
    if (names && t->dtype == QC_DTYPE_I32 && qc_ends_with(t->name, ".weight_packed") &&
        !has_sibling(model, t->name, stem, "_scale"))
        return "compressed-tensors, without a weight_scale beside it,";
    if (names)
        return method ? method : names;
    return t->ndim >= 2 && is_integer(t->dtype) ? method : NULL;
}

/* ---- what follows from the schemes ---- */

void qc_recipe_settle_scales(qc_recipe *recipe, const qc_checkpoint *model)
{
    for (size_t i = 0; i < model->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &model->tensors[i];
        qc_recipe_entry *e = &recipe->entries[i];
        /* A tensor that an adapter changes is read as F32, but is written as the model has it. */
        if (!t->change || e->scheme != QC_SCHEME_KEEP || qc_checkpoint_dtype(t) == t->dtype)
            continue;
        e->scheme = QC_SCHEME_CAST;
        e->out_dtype = qc_checkpoint_dtype(t);
    }
    for (size_t i = 0; i < model->tensor_count; i++) {
        uint32_t owner = recipe->entries[i].owner;
        qc_recipe_entry *e = &recipe->entries[i];
        if (owner == UINT32_MAX)
            continue;
        const qc_recipe_entry *weight = &recipe->entries[owner];
        e->scheme = weight->scheme == QC_SCHEME_KEEP ? QC_SCHEME_KEEP : QC_SCHEME_ABSORBED;
        if (e->scheme == QC_SCHEME_KEEP)
            e->why = weight->why;
    }
}
