/* The layouts are those of transformers 5, conversion_mapping.py (MergeModulelist(dim=0), and
 * Concatenate(dim=1) for gate and up). */
#include "convert/model/expert_split.h"

#include "base/checked.h"
#include "base/text.h"
#include "convert/model/recipe_coded.h"
#include "formats/checkpoint_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const char *types;            /* " a b " */
    const char *path;             /* of the experts in a released checkpoint */
    const char *gate, *up, *down; /* names of the matrices in that checkpoint */
    const char *router;           /* the released name of "mlp.gate.weight"; NULL: it is the same */
} expert_names;

static const expert_names families[] = {
    {" qwen2_moe qwen3_moe qwen3_next qwen3_5_moe qwen3_5_moe_text deepseek_v2 deepseek_v3 "
     "deepseek_v32 dots1 ernie4_5_moe glm4_moe glm4_moe_lite glm_moe_dsa olmoe flex_olmo "
     "exaone_moe solar_open cohere2_moe mellum hunyuan_v1_moe longcat_flash ",
     "mlp.experts", "gate_proj", "up_proj", "down_proj", NULL},
    {" mixtral minimax minimax_m2 ", "block_sparse_moe.experts", "w1", "w3", "w2",
     "block_sparse_moe.gate.weight"},
};

static const char gate_up_tail[] = "mlp.experts.gate_up_proj";
static const char down_tail[] = "mlp.experts.down_proj";
static const char gate_up_scale_tail[] = "mlp.experts.gate_up_proj_scale_inv";
static const char down_scale_tail[] = "mlp.experts.down_proj_scale_inv";
static const char router_tail[] = "mlp.gate.weight";

typedef struct {
    qc_checkpoint *c;
    const expert_names *names;
    int fp8_only;
    uint64_t block[2];             /* FP8: rows and columns that share a scale */
    qc_checkpoint_tensor *tensors; /* the new list */
    size_t count, room;
} splitter;

static const expert_names *find_family(const qc_checkpoint *c)
{
    if (!c->config)
        return NULL;
    const char *type = qc_json_string_or(qc_json_get(qc_json_root(c->config), "model_type"), "");
    size_t len = strlen(type);
    if (len == 0 || strchr(type, ' '))
        return NULL;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        for (const char *p = families[i].types; (p = strstr(p, type)) != NULL; p += len) {
            if (p[-1] == ' ' && p[len] == ' ')
                return &families[i];
        }
    }
    return NULL;
}

/* Returns the length of what stands before the tail, where the tail begins a component of the name;
 * SIZE_MAX if it does not. */
static size_t stem_before(const char *name, const char *tail)
{
    size_t n = strlen(name), m = strlen(tail);
    if (n < m || strcmp(name + n - m, tail) != 0 || (n > m && name[n - m - 1] != '.'))
        return SIZE_MAX;
    return n - m;
}

static const qc_checkpoint_tensor *find(const qc_checkpoint *c, const char *stem, size_t stem_len,
                                        const char *tail)
{
    char name[4096];
    if (stem_len + strlen(tail) >= sizeof name)
        return NULL;
    memcpy(name, stem, stem_len);
    memcpy(name + stem_len, tail, strlen(tail) + 1);
    return qc_checkpoint_find(c, name);
}

static int is_fp8(qc_dtype t)
{
    return t == QC_DTYPE_F8_E4M3 || t == QC_DTYPE_F8_E5M2;
}

/* Does every expert's matrix in t have whole blocks of scales of its own? parts is how many
 * matrices lie one below the other in each expert of t. */
static int has_scales(const splitter *s, const qc_checkpoint_tensor *t,
                      const qc_checkpoint_tensor *scales, uint64_t parts)
{
    return scales && scales->ndim == 3 && scales->dims[0] == t->dims[0] &&
           (parts == 1 || t->dims[1] / parts % s->block[0] == 0) &&
           scales->dims[1] == qc_ceil_div_u64(t->dims[1], s->block[0]) &&
           scales->dims[2] == qc_ceil_div_u64(t->dims[2], s->block[1]);
}

/* Does the layer have both fused tensors, with dtypes and shapes that are known? */
static int fits(const splitter *s, const char *name, size_t stem)
{
    const qc_checkpoint_tensor *gate_up = find(s->c, name, stem, gate_up_tail);
    const qc_checkpoint_tensor *down = find(s->c, name, stem, down_tail);
    if (!gate_up || !down || gate_up->ndim != 3 || down->ndim != 3 || gate_up->bytes == 0 ||
        down->bytes == 0 || gate_up->dims[0] != down->dims[0] || gate_up->dims[1] % 2 != 0 ||
        gate_up->dims[1] / 2 != down->dims[2] || gate_up->dims[2] != down->dims[1])
        return 0;
    if (is_fp8(gate_up->dtype) && is_fp8(down->dtype))
        return has_scales(s, gate_up, find(s->c, name, stem, gate_up_scale_tail), 2) &&
               has_scales(s, down, find(s->c, name, stem, down_scale_tail), 1);
    return !s->fp8_only && qc_dtype_is_quantizable(gate_up->dtype) &&
           qc_dtype_is_quantizable(down->dtype);
}

typedef struct {
    size_t stem;      /* length of what is before "mlp." */
    int down;         /* is it down_proj? Otherwise it is gate and up. */
    const char *tail; /* end of the split tensors' names: ".weight", ".weight_scale_inv" */
} fused_kind;

/* Is t fused, in the layout that is known? */
static int is_fused(const splitter *s, const qc_checkpoint_tensor *t, fused_kind *kind)
{
    static const char *const tails[] = {gate_up_tail, down_tail, gate_up_scale_tail,
                                        down_scale_tail};
    if (!s->names)
        return 0;
    for (int i = 0; i < 4; i++) {
        kind->stem = stem_before(t->name, tails[i]);
        kind->down = i % 2;
        kind->tail = i < 2 ? ".weight" : ".weight_scale_inv";
        if (kind->stem == SIZE_MAX || !fits(s, t->name, kind->stem))
            continue;
        /* A scale beside 16-bit experts does not belong to them. */
        return i < 2 || is_fp8(find(s->c, t->name, kind->stem, gate_up_tail)->dtype);
    }
    return 0;
}

/* Adds rows [first, first + rows) of one expert's matrix as a tensor. */
static qc_status add_part(splitter *s, const qc_checkpoint_tensor *from, const fused_kind *kind,
                          uint64_t expert, const char *matrix, uint64_t first, uint64_t rows,
                          qc_error *err)
{
    qc_checkpoint_tensor *t = &s->tensors[s->count++];
    uint64_t row_bytes = from->bytes / from->dims[0] / from->dims[1];
    QC_TRY(qc_arena_printf(&s->c->arena, &t->name, err, "%.*s%s.%" PRIu64 ".%s%s", (int)kind->stem,
                           from->name, s->names->path, expert, matrix, kind->tail));
    t->dtype = from->dtype;
    t->ndim = 2;
    t->dims[0] = rows;
    t->dims[1] = from->dims[2];
    t->bytes = rows * row_bytes;
    t->begin = from->begin + (expert * from->dims[1] + first) * row_bytes;
    t->file = from->file;
    return QC_OK;
}

static qc_status add_fused(splitter *s, const qc_checkpoint_tensor *t, const fused_kind *kind,
                           qc_error *err)
{
    for (uint64_t e = 0; e < t->dims[0]; e++) {
        if (kind->down) {
            QC_TRY(add_part(s, t, kind, e, s->names->down, 0, t->dims[1], err));
            continue;
        }
        uint64_t half = t->dims[1] / 2;
        QC_TRY(add_part(s, t, kind, e, s->names->gate, 0, half, err));
        QC_TRY(add_part(s, t, kind, e, s->names->up, half, half, err));
    }
    return QC_OK;
}

static qc_status add_plain(splitter *s, const qc_checkpoint_tensor *t, qc_error *err)
{
    qc_checkpoint_tensor *to = &s->tensors[s->count++];
    *to = *t;
    size_t stem = s->names && s->names->router ? stem_before(t->name, router_tail) : SIZE_MAX;
    if (stem == SIZE_MAX || !fits(s, t->name, stem))
        return QC_OK;
    return qc_arena_printf(&s->c->arena, &to->name, err, "%.*s%s", (int)stem, t->name,
                           s->names->router);
}

static int compare_names(const void *pa, const void *pb)
{
    const qc_checkpoint_tensor *a = pa, *b = pb;
    return strcmp(a->name, b->name);
}

/* Is t a stack of experts, or are the experts' matrices laid end to end (dbrx)? granitemoe and
 * jetmoe call theirs input_linear and output_linear. */
static int is_stack(const qc_checkpoint_tensor *t)
{
    int named = strstr(t->name, "experts.") || strstr(t->name, "moe.");
    if (t->ndim == 3)
        return strstr(t->name, "experts.") != NULL ||
               (t->dims[1] >= 32 && t->dims[2] >= 32 &&
                (named || qc_ends_with(t->name, ".input_linear.weight") ||
                 qc_ends_with(t->name, ".output_linear.weight")));
    return t->ndim == 2 && t->dims[0] >= 32 && t->dims[1] >= 32 &&
           strstr(t->name, "experts.mlp.") && !qc_ends_with(t->name, ".weight") &&
           !qc_ends_with(t->name, "bias");
}

/* Warns of stacks of experts in floats that no recipe quantizes or decodes. */
static qc_status warn_of_stacks(const splitter *s, qc_error *err)
{
    uint64_t stacks = 0, weights = 0;
    const char *first = NULL;
    for (size_t i = 0; i < s->c->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &s->c->tensors[i];
        int plain = qc_dtype_is_quantizable(t->dtype) && !s->fp8_only;
        if (!is_stack(t) || t->bytes == 0 || !(plain || is_fp8(t->dtype)) ||
            qc_ends_with(t->name, "_scale_inv") || qc_ends_with(t->name, "_scale"))
            continue;
        uint64_t n = t->bytes / (qc_dtype_bits(t->dtype) / 8);
        stacks++;
        weights += n;
        first = first ? first : t->name;
    }
    if (stacks == 0)
        return QC_OK;
    return qc_checkpoint_warn(s->c, err,
                              "%" PRIu64 " stack%s of experts ('%.160s' is the first) with %" PRIu64
                              " weights %s kept as they are, because it is not known for this "
                              "model type and shape how the experts lie in a stack",
                              stacks, qc_plural(stacks), first, weights, qc_are(stacks));
}

qc_status qc_experts_split(qc_checkpoint *c, int fp8_only, qc_error *err)
{
    splitter s = {.c = c, .names = find_family(c), .fp8_only = fp8_only};
    fused_kind kind;
    QC_TRY(qc_coded_block(s.block, c, err));
    s.room = c->tensor_count;
    for (size_t i = 0; i < c->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &c->tensors[i];
        if (!is_fused(&s, t, &kind))
            continue;
        /* There cannot be more tensors than bytes, but a hostile shape may still claim very
         * many. */
        if (t->dims[0] > UINT32_MAX / 8 || s.room > UINT32_MAX / 8)
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "tensor '%s' has %" PRIu64 " experts, which is more than qconv can split",
                    t->name, t->dims[0]);
        s.room += 2 * (size_t)t->dims[0];
    }
    if (s.room > c->tensor_count) {
        QC_TRY(qc_arena_array(&c->arena, &s.tensors, s.room, err));
        for (size_t i = 0; i < c->tensor_count; i++) {
            const qc_checkpoint_tensor *t = &c->tensors[i];
            QC_TRY(is_fused(&s, t, &kind) ? add_fused(&s, t, &kind, err) : add_plain(&s, t, err));
        }
        qsort(s.tensors, s.count, sizeof *s.tensors, compare_names);
        for (size_t i = 1; i < s.count; i++) {
            if (strcmp(s.tensors[i - 1].name, s.tensors[i].name) == 0)
                QC_FAIL(
                    err, QC_ERR_INPUT,
                    "%s has '%s' twice: by itself and within a fused tensor; remove one of the two",
                    c->path, s.tensors[i].name);
        }
        c->tensors = s.tensors;
        c->tensor_count = s.count;
    }
    return warn_of_stacks(&s, err);
}
