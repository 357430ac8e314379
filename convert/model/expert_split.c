/* The layouts are those of transformers 5, conversion_mapping.py (MergeModulelist(dim=0), and
 * Concatenate(dim=1) for gate and up). */
#include "convert/model/expert_split.h"

#include "base/checked.h"
#include "base/text.h"
#include "convert/families/config_fields.h"
#include "convert/model/recipe_coded.h"
#include "convert/model/scheme.h"
#include "formats/checkpoint_internal.h"
#include "formats/tensor_pieces.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const qc_expert_names families[] = {
    {" qwen2_moe qwen3_moe qwen3_next qwen3_5_moe qwen3_5_moe_text deepseek_v2 deepseek_v3 "
     "deepseek_v32 dots1 ernie4_5_moe glm4_moe glm4_moe_lite glm_moe_dsa olmoe flex_olmo "
     "exaone_moe solar_open cohere2_moe mellum hunyuan_v1_moe longcat_flash ",
     "mlp.experts", "gate_proj", "up_proj", "down_proj", NULL},
    {" mixtral minimax minimax_m2 ", "block_sparse_moe.experts", "w1", "w3", "w2",
     "block_sparse_moe.gate.weight"},
};

/* Types whose stacks are published as such, with these names, and which have no other form. */
static const char published_stacked[] = " granitemoe granitemoeshared granitemoehybrid ";

static const char gate_up_tail[] = QC_EXPERTS_GATE_UP;
static const char down_tail[] = QC_EXPERTS_DOWN;
static const char gate_up_scale_tail[] = "mlp.experts.gate_up_proj_scale_inv";
static const char down_scale_tail[] = "mlp.experts.down_proj_scale_inv";
static const char router_tail[] = QC_EXPERTS_ROUTER;
const char *const qc_experts_nf4_parts[QC_EXPERTS_NF4_PARTS] = {"",
                                                                ".absmax",
                                                                ".quant_map",
                                                                ".nested_absmax",
                                                                ".nested_quant_map",
                                                                ".quant_state.bitsandbytes__nf4"};
const char *const qc_experts_int8_parts[QC_EXPERTS_INT8_PARTS] = {"", ".SCB", ".weight_format"};

typedef struct {
    qc_checkpoint *c;
    const qc_checkpoint *model; /* the same */
    const qc_expert_names *names;
    int fp8_only;
    uint64_t block[2];             /* FP8: rows and columns that share a scale */
    qc_checkpoint_tensor *tensors; /* the new list */
    size_t count, room;
    qc_st_cursor *cursor; /* of quant_states; NULL: none was read yet */
} splitter;

static int is_type(const qc_checkpoint *c, const char *types)
{
    const qc_json_node *root = c->config ? qc_json_root(c->config) : NULL;
    return qc_config_word_in(qc_json_string_or(qc_json_get(root, "model_type"), ""), types);
}

const qc_expert_names *qc_expert_names_of(const qc_checkpoint *c)
{
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        if (is_type(c, families[i].types))
            return &families[i];
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
    const qc_checkpoint_tensor *gate_up = find(s->model, name, stem, gate_up_tail);
    const qc_checkpoint_tensor *down = find(s->model, name, stem, down_tail);
    if (!gate_up || !down || gate_up->ndim != 3 || down->ndim != 3 || gate_up->bytes == 0 ||
        down->bytes == 0 || gate_up->dims[0] != down->dims[0] || gate_up->dims[1] % 2 != 0 ||
        gate_up->dims[1] / 2 != down->dims[2] || gate_up->dims[2] != down->dims[1])
        return 0;
    if (is_fp8(gate_up->dtype) && is_fp8(down->dtype))
        return has_scales(s, gate_up, find(s->model, name, stem, gate_up_scale_tail), 2) &&
               has_scales(s, down, find(s->model, name, stem, down_scale_tail), 1);
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
        return i < 2 || is_fp8(find(s->model, t->name, kind->stem, gate_up_tail)->dtype);
    }
    return 0;
}

/* ---- stacks in codes ---- */

typedef struct {
    size_t stem; /* length of what is before "mlp." */
    int down;
    qc_expert_form form;
    int part; /* what lies beside the codes; 0: the codes */
    qc_bnb_state state;
    uint64_t dims[3];
} code_kind;

qc_status qc_expert_state_read(qc_bnb_state *out, const qc_checkpoint *c, qc_st_cursor *cursor,
                               const qc_checkpoint_tensor *t, qc_error *err)
{
    char json[4096];
    if (t->bytes == 0 || t->bytes > sizeof json)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': expected 1 to %zu bytes, found %" PRIu64, t->name,
                sizeof json, t->bytes);
    QC_TRY(qc_checkpoint_read(c, cursor, t, 0, json, (size_t)t->bytes, err));
    return qc_bnb_state_parse(out, json, (size_t)t->bytes, err);
}

qc_status qc_expert_state_make(qc_checkpoint *c, qc_checkpoint_tensor *t, const qc_bnb_state *s,
                               qc_error *err)
{
    char json[4096];
    const size_t len = qc_bnb_state_bytes(s);
    if (len > sizeof json)
        QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s': a quant_state of %zu bytes", t->name, len);
    QC_TRY(qc_bnb_state_write(s, json, err));
    return qc_tensor_text(c, t, json, len, err);
}

/* Finds the shape of the stack P of k's form: stem + tail. Clears *found if there is none. */
static qc_status shape_of(splitter *s, const char *name, const code_kind *k, const char *tail,
                          uint64_t dims[3], qc_bnb_state *state, int *found, qc_error *err)
{
    const char *suffix = k->form == QC_EXPERTS_NF4 ? qc_experts_nf4_parts[QC_NF4_STATE]
                                                   : qc_experts_int8_parts[QC_INT8_SCB];
    char beside[128];
    (void)snprintf(beside, sizeof beside, "%s%s", tail, suffix);
    const qc_checkpoint_tensor *codes = find(s->model, name, k->stem, tail);
    const qc_checkpoint_tensor *t = find(s->model, name, k->stem, beside);
    *found = 0;
    if (!codes || !t)
        return QC_OK;
    if (k->form == QC_EXPERTS_INT8) {
        uint64_t rows = t->ndim == 2 ? qc_sat_mul(t->dims[0], t->dims[1]) : 0;
        if (rows == 0 || codes->dtype != QC_DTYPE_I8 || codes->bytes % rows != 0)
            return QC_OK;
        memcpy(dims, (uint64_t[]){t->dims[0], t->dims[1], codes->bytes / rows}, 3 * sizeof *dims);
    } else {
        if (!s->cursor)
            QC_TRY(qc_st_cursor_create(&s->cursor, err));
        QC_TRY(qc_expert_state_read(state, s->model, s->cursor, t, err));
        const uint64_t elems =
            qc_sat_mul(qc_sat_mul(state->dims[0], state->dims[1]), state->dims[2]);
        if (state->ndim != 3 || codes->dtype != QC_DTYPE_U8 || elems / 2 != codes->bytes)
            return QC_OK;
        memcpy(dims, state->dims, 3 * sizeof *dims);
    }
    *found = 1;
    return QC_OK;
}

/* Sets *is if t belongs to a stack in codes, in the layout that is known. */
static qc_status find_codes(splitter *s, const qc_checkpoint_tensor *t, code_kind *k, int *is,
                            qc_error *err)
{
    enum { KINDS = 2 * (QC_EXPERTS_NF4_PARTS + QC_EXPERTS_INT8_PARTS) };
    *is = 0;
    for (int i = 0; s->names && i < KINDS && !*is; i++) {
        char tail[128];
        uint64_t up[3], down[3];
        qc_bnb_state states[2];
        int found[2] = {0, 0};
        k->down = i % 2;
        k->part = i / 2;
        k->form = k->part < QC_EXPERTS_NF4_PARTS ? QC_EXPERTS_NF4 : QC_EXPERTS_INT8;
        if (k->form == QC_EXPERTS_INT8)
            k->part -= QC_EXPERTS_NF4_PARTS;
        (void)snprintf(tail, sizeof tail, "%s%s", k->down ? down_tail : gate_up_tail,
                       k->form == QC_EXPERTS_NF4 ? qc_experts_nf4_parts[k->part]
                                                 : qc_experts_int8_parts[k->part]);
        k->stem = stem_before(t->name, tail);
        if (k->stem == SIZE_MAX)
            continue;
        QC_TRY(shape_of(s, t->name, k, gate_up_tail, up, &states[0], &found[0], err));
        QC_TRY(shape_of(s, t->name, k, down_tail, down, &states[1], &found[1], err));
        *is = found[0] && found[1] && up[0] == down[0] && up[1] % 2 == 0 && up[1] / 2 == down[2] &&
              up[2] == down[1] && up[0] > 0 && up[1] > 0 && up[2] > 0;
        memcpy(k->dims, k->down ? down : up, sizeof up);
        k->state = states[k->down];
    }
    return QC_OK;
}

/* A block of weights, or a group of nested scales, spans two matrices. */
static qc_status refuse_blocks(const qc_checkpoint_tensor *t, const code_kind *k, uint64_t elems,
                               qc_error *err)
{
    const uint64_t block = k->state.block_elems;
    if (block > 0 && elems % block == 0 && elems % 2 == 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "tensor '%s': a matrix of an expert has %" PRIu64 " scales, which are no whole "
                "groups of %" PRIu64
                ", so the doubly quantized scales of the stack cannot be taken "
                "apart; convert the source again with --experts separate, or with "
                "--no-double-quant",
                t->name, elems / block, k->state.nested_block_elems);
    QC_FAIL(err, QC_ERR_UNSUPPORTED,
            "tensor '%s': a matrix of an expert has %" PRIu64 " weights, which are no whole blocks "
            "of %" PRIu64 ", so the stack cannot be taken apart; convert the source again with "
            "--experts separate",
            t->name, elems, block);
}

/* Makes of part k of a stack, from, the same of the matrix of n weights that begins at weight
 * `first` and has rows rows. */
static qc_status cut_codes(splitter *s, qc_checkpoint_tensor *t, const qc_checkpoint_tensor *from,
                           const code_kind *k, uint64_t first, uint64_t rows, qc_error *err)
{
    const uint64_t cols = k->dims[2], n = rows * cols, block = k->state.block_elems;
    const uint64_t group = k->state.nested ? k->state.nested_block_elems : 1;
    uint64_t at = 0, count = 0; /* of the part's elements */
    if (k->form == QC_EXPERTS_INT8) {
        if (k->part == QC_INT8_FORMAT)
            return QC_OK;
        at = k->part == QC_INT8_CODES ? first : first / cols;
        t->dims[0] = rows;
        t->dims[1] = cols;
        t->ndim = k->part == QC_INT8_CODES ? 2 : 1;
        count = k->part == QC_INT8_CODES ? n : rows;
    } else if (k->part == QC_NF4_STATE) {
        qc_bnb_state state = k->state;
        state.ndim = 2;
        state.dims[0] = rows;
        state.dims[1] = cols;
        return qc_expert_state_make(s->c, t, &state, err);
    } else if (k->part == QC_NF4_MAP || k->part == QC_NF4_NESTED_MAP) {
        return QC_OK;
    } else if (block == 0 || group == 0 || n % 2 != 0 || n % block != 0 || n / block % group != 0) {
        return refuse_blocks(from, k, n, err);
    } else {
        const uint64_t each = k->part == QC_NF4_CODES    ? 2
                              : k->part == QC_NF4_ABSMAX ? block
                                                         : block * group;
        at = first / each;
        t->dims[0] = count = n / each;
        t->dims[1] = 1;
        t->ndim = k->part == QC_NF4_CODES ? 2 : 1;
    }
    const uint64_t width = qc_dtype_bits(t->dtype) / 8;
    t->begin += at * width;
    t->bytes = count * width;
    if (t->bytes > from->bytes || t->begin - from->begin > from->bytes - t->bytes)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s' is too small for the stack that it belongs to",
                from->name);
    return QC_OK;
}

static qc_status add_codes(splitter *s, const qc_checkpoint_tensor *from, const code_kind *k,
                           qc_error *err)
{
    const uint64_t half = k->down ? k->dims[1] : k->dims[1] / 2;
    for (uint64_t e = 0; e < k->dims[0]; e++) {
        for (uint64_t m = 0; m < (k->down ? 1 : 2); m++) {
            qc_checkpoint_tensor *t = &s->tensors[s->count++];
            const char *matrix = k->down ? s->names->down : m ? s->names->up : s->names->gate;
            const char *suffix = k->form == QC_EXPERTS_NF4 ? qc_experts_nf4_parts[k->part]
                                                           : qc_experts_int8_parts[k->part];
            const int beside = k->form == QC_EXPERTS_INT8 && k->part > 0; /* the module */
            *t = *from;
            QC_TRY(qc_arena_printf(&s->c->arena, &t->name, err, "%.*s%s.%" PRIu64 ".%s%s%s",
                                   (int)k->stem, from->name, s->names->path, e, matrix,
                                   beside ? "" : ".weight", suffix));
            QC_TRY(cut_codes(s, t, from, k, (e * k->dims[1] + m * half) * k->dims[2], half, err));
        }
    }
    return QC_OK;
}

/* ---- stacks in floats and FP8 ---- */

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
    const qc_checkpoint_tensor *stack =
        stem == SIZE_MAX ? NULL : find(s->model, t->name, stem, gate_up_tail);
    code_kind k;
    int codes = 0;
    if (stack)
        QC_TRY(find_codes(s, stack, &k, &codes, err));
    if (!stack || !(codes || fits(s, t->name, stem)))
        return QC_OK;
    return qc_arena_printf(&s->c->arena, &to->name, err, "%.*s%s", (int)stem, t->name,
                           s->names->router);
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

/* Is t to be taken apart? Then *experts is how many there are. */
static qc_status find_any(splitter *s, const qc_checkpoint_tensor *t, fused_kind *fused,
                          code_kind *codes, int *is_codes, uint64_t *experts, qc_error *err)
{
    *experts = is_fused(s, t, fused) ? t->dims[0] : 0;
    *is_codes = 0;
    if (*experts == 0)
        QC_TRY(find_codes(s, t, codes, is_codes, err));
    if (*is_codes)
        *experts = codes->dims[0];
    /* There cannot be more tensors than bytes, but a hostile shape may still claim very many. */
    if (*experts > UINT32_MAX / 8 || s->room > UINT32_MAX / 8)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "tensor '%s' has %" PRIu64 " experts, which is more than qconv can split", t->name,
                *experts);
    return QC_OK;
}

static qc_status split(splitter *s, qc_error *err)
{
    qc_checkpoint *c = s->c;
    fused_kind fused;
    code_kind codes;
    int is_codes = 0;
    uint64_t experts = 0;
    s->room = c->tensor_count;
    for (size_t i = 0; i < c->tensor_count; i++) {
        QC_TRY(find_any(s, &c->tensors[i], &fused, &codes, &is_codes, &experts, err));
        s->room += 2 * (size_t)experts;
    }
    if (s->room == c->tensor_count)
        return QC_OK;
    QC_TRY(qc_arena_array(&c->arena, &s->tensors, s->room, err));
    for (size_t i = 0; i < c->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &c->tensors[i];
        QC_TRY(find_any(s, t, &fused, &codes, &is_codes, &experts, err));
        QC_TRY(is_codes  ? add_codes(s, t, &codes, err)
               : experts ? add_fused(s, t, &fused, err)
                         : add_plain(s, t, err));
    }
    qsort(s->tensors, s->count, sizeof *s->tensors, qc_by_text);
    for (size_t i = 1; i < s->count; i++) {
        if (strcmp(s->tensors[i - 1].name, s->tensors[i].name) == 0)
            QC_FAIL(err, QC_ERR_INPUT,
                    "%s has '%s' twice: by itself and within a fused tensor; remove one of the two",
                    c->path, s->tensors[i].name);
    }
    c->tensors = s->tensors;
    c->tensor_count = s->count;
    return QC_OK;
}

qc_status qc_experts_split(qc_checkpoint *c, int fp8_only, qc_error *err)
{
    splitter s = {.c = c, .model = c, .names = qc_expert_names_of(c), .fp8_only = fp8_only};
    QC_TRY(qc_coded_block(s.block, c, err));
    qc_status st = split(&s, err);
    qc_st_cursor_destroy(s.cursor);
    return st == QC_OK ? qc_experts_warn(c, fp8_only, 0, err) : st;
}

int qc_experts_known(const qc_checkpoint *c)
{
    return qc_expert_names_of(c) != NULL || is_type(c, published_stacked);
}

static int is_granite_stack(const qc_checkpoint *c, const qc_checkpoint_tensor *t)
{
    static const char *const tails[] = {"input_linear.weight", "output_linear.weight"};
    for (int i = 0; i < 2; i++) {
        const size_t stem = stem_before(t->name, tails[i]);
        const qc_checkpoint_tensor *up = stem == SIZE_MAX ? NULL : find(c, t->name, stem, tails[0]);
        const qc_checkpoint_tensor *down = up ? find(c, t->name, stem, tails[1]) : NULL;
        if (down && up->ndim == 3 && down->ndim == 3 && up->dims[0] == down->dims[0] &&
            up->dims[1] % 2 == 0 && up->dims[1] / 2 == down->dims[2] &&
            up->dims[2] == down->dims[1])
            return is_type(c, published_stacked);
    }
    return 0;
}

int qc_experts_is_stack(const qc_checkpoint *c, const qc_checkpoint_tensor *t)
{
    const splitter s = {.model = c, .names = qc_expert_names_of(c)};
    fused_kind kind;
    return t->ndim == 3 && t->bytes > 0 && qc_dtype_is_quantizable(t->dtype) &&
           (is_fused(&s, t, &kind) || is_granite_stack(c, t));
}

qc_status qc_experts_warn(qc_checkpoint *c, int fp8_only, int stacked, qc_error *err)
{
    uint64_t stacks = 0, weights = 0, known = 0;
    const char *first = NULL;
    for (size_t i = 0; i < c->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &c->tensors[i];
        int plain = qc_dtype_is_quantizable(t->dtype) && !fp8_only;
        if (!is_stack(t) || t->bytes == 0 || !(plain || is_fp8(t->dtype)) ||
            qc_ends_with(t->name, "_scale_inv") || qc_ends_with(t->name, "_scale"))
            continue;
        const int is_known = qc_experts_is_stack(c, t);
        if (is_known && stacked)
            continue;
        known += is_known != 0;
        uint64_t n = t->bytes / (qc_dtype_bits(t->dtype) / 8);
        stacks++;
        weights += n;
        first = first ? first : t->name;
    }
    if (stacks == 0)
        return QC_OK;
    if (known == stacks)
        return qc_checkpoint_warn(c, err,
                                  "%" PRIu64 " stack%s of experts ('%.160s' is the first) with "
                                  "%" PRIu64 " weights %s kept as they are; --experts stacked "
                                  "quantizes them, for transformers 5 after `import qconv` and for "
                                  "qconv.load",
                                  stacks, qc_plural(stacks), first, weights, qc_are(stacks));
    return qc_checkpoint_warn(c, err,
                              "%" PRIu64 " stack%s of experts ('%.160s' is the first) with %" PRIu64
                              " weights %s kept as they are, because it is not known for this "
                              "model type and shape how the experts lie in a stack",
                              stacks, qc_plural(stacks), first, weights, qc_are(stacks));
}

int qc_experts_are_stacked(const qc_checkpoint *c)
{
    for (size_t i = 0; i < c->tensor_count; i++) {
        const char *name = c->tensors[i].name;
        const size_t stem = stem_before(name, gate_up_tail);
        if (stem != SIZE_MAX &&
            (find(c, name, stem, QC_EXPERTS_GATE_UP ".quant_state.bitsandbytes__nf4") ||
             find(c, name, stem, QC_EXPERTS_GATE_UP ".SCB")))
            return 1;
    }
    return 0;
}
