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

const qc_expert_part qc_expert_parts[QC_EXPERTS_FORMS][QC_EXPERTS_PARTS] = {
    [QC_EXPERTS_FLOATS] = {{"", ".weight"}},
    [QC_EXPERTS_FP8] = {{"", ".weight"}, {"_scale_inv", ".weight_scale_inv"}},
    [QC_EXPERTS_NF4] =
        {
            [QC_NF4_CODES] = {"", ".weight"},
            [QC_NF4_ABSMAX] = {".absmax", ".weight.absmax"},
            [QC_NF4_MAP] = {".quant_map", ".weight.quant_map"},
            [QC_NF4_NESTED] = {".nested_absmax", ".weight.nested_absmax"},
            [QC_NF4_NESTED_MAP] = {".nested_quant_map", ".weight.nested_quant_map"},
            [QC_NF4_STATE] = {".quant_state.bitsandbytes__nf4",
                              ".weight.quant_state.bitsandbytes__nf4"},
        },
    [QC_EXPERTS_INT8] =
        {
            [QC_INT8_CODES] = {"", ".weight"},
            [QC_INT8_SCB] = {".SCB", ".SCB"},
            [QC_INT8_FORMAT] = {".weight_format", ".weight_format"},
        },
};

typedef struct {
    qc_checkpoint *c;
    const qc_checkpoint *model; /* the same */
    const qc_expert_names *names;
    int fp8_only;
    uint64_t block[2];             /* FP8: rows and columns that share a scale */
    qc_checkpoint_tensor *tensors; /* the new list */
    size_t count, room;
    qc_st_cursor *cursor; /* reads quant_states; NULL: none was read yet */
} splitter;

const qc_expert_names *qc_experts_names(const qc_checkpoint *c)
{
    const qc_expert_names *names = qc_expert_names_of(qc_config_type(c->config));
    return names && !(names->traits & QC_EXPERTS_WHOLE) ? names : NULL;
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
    uint32_t i = qc_checkpoint_beside(c, stem, stem_len, tail);
    return i == UINT32_MAX ? NULL : &c->tensors[i];
}

/* ---- stacks ---- */

/* A tensor of a stack. */
typedef struct {
    size_t stem; /* length of what is before "mlp." */
    int down;    /* is it down_proj? Otherwise it is gate and up. */
    int turned;  /* does it lie as [experts, in, out]? */
    qc_expert_form form;
    unsigned part; /* 0: the weights; else something beside them */
    qc_bnb_state state;
    uint64_t dims[3]; /* the stack's shape, [experts, out, in] */
} piece;

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

/* Writes what the name of a stack ends with: "mlp.experts.down_proj". */
static void name_stack(char out[64], const qc_expert_names *names, int down)
{
    (void)snprintf(out, 64, "%s.%s", names->stacks, down ? QC_EXPERTS_DOWN : QC_EXPERTS_GATE_UP);
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

/* Finds the shape of the stack of p's form beside a tensor. It is 0 where there is none. */
static qc_status find_shape(splitter *s, const char *name, const piece *p, int down,
                            uint64_t dims[3], qc_bnb_state *state, qc_error *err)
{
    static const unsigned beside[] = {
        [QC_EXPERTS_FP8] = 1, [QC_EXPERTS_NF4] = QC_NF4_STATE, [QC_EXPERTS_INT8] = QC_INT8_SCB};
    char tail[64], other[128];
    name_stack(tail, s->names, down);
    (void)snprintf(other, sizeof other, "%s%s", tail,
                   qc_expert_parts[p->form][beside[p->form]].stack);
    const qc_checkpoint_tensor *codes = find(s->model, name, p->stem, tail);
    const qc_checkpoint_tensor *t = find(s->model, name, p->stem, other);
    memset(dims, 0, 3 * sizeof *dims);
    if (!codes || !t)
        return QC_OK;
    if (p->form == QC_EXPERTS_NF4) {
        if (!s->cursor)
            QC_TRY(qc_st_cursor_create(&s->cursor, err));
        QC_TRY(qc_expert_state_read(state, s->model, s->cursor, t, err));
        const uint64_t elems =
            qc_sat_mul(qc_sat_mul(state->dims[0], state->dims[1]), state->dims[2]);
        if (state->ndim == 3 && codes->dtype == QC_DTYPE_U8 && elems / 2 == codes->bytes)
            memcpy(dims, state->dims, 3 * sizeof *dims);
    } else if (p->form == QC_EXPERTS_INT8) {
        uint64_t rows = t->ndim == 2 ? qc_sat_mul(t->dims[0], t->dims[1]) : 0;
        if (rows > 0 && codes->dtype == QC_DTYPE_I8 && codes->bytes % rows == 0)
            memcpy(dims, (uint64_t[]){t->dims[0], t->dims[1], codes->bytes / rows},
                   3 * sizeof *dims);
    } else if (codes->ndim == 3 &&
               (p->form == QC_EXPERTS_FP8
                    ? qc_dtype_is_fp8(codes->dtype) && has_scales(s, codes, t, down ? 1 : 2)
                    : qc_dtype_is_quantizable(codes->dtype))) {
        memcpy(dims, codes->dims, 3 * sizeof *dims);
    }
    return QC_OK;
}

/* Are these the shapes of the two stacks of a layer? */
static int are_pair(const uint64_t up[3], const uint64_t down[3])
{
    return up[0] == down[0] && up[1] % 2 == 0 && up[1] / 2 == down[2] && up[2] == down[1];
}

/* Are these the shapes of a layer's stacks that lie as [experts, in, out]? Then they become what
 * they are as codes. */
static int are_turned_pair(uint64_t dims[2][3])
{
    uint64_t d[2][3];
    for (int i = 0; i < 2; i++)
        memcpy(d[i], (uint64_t[]){dims[i][0], dims[i][2], dims[i][1]}, sizeof d[i]);
    if (are_pair(d[0], d[1]))
        memcpy(dims, d, sizeof d);
    return are_pair(d[0], d[1]);
}

/* Sets *is if t belongs to a stack of this form, in the layout that is known. */
static qc_status find_of_form(splitter *s, const qc_checkpoint_tensor *t, qc_expert_form form,
                              piece *p, int *is, qc_error *err)
{
    const qc_expert_part *parts = qc_expert_parts[form];
    *is = 0;
    for (int down = 0; s->names && down < 2 && !*is; down++) {
        char stack[64];
        name_stack(stack, s->names, down);
        const char *at = strstr(t->name, stack);
        uint64_t dims[2][3];
        qc_bnb_state states[2];
        memset(states, 0, sizeof states);
        if (!at || (at > t->name && at[-1] != '.'))
            continue;
        *p = (piece){.stem = (size_t)(at - t->name), .down = down, .form = form};
        at += strlen(stack);
        while (parts[p->part].stack && strcmp(at, parts[p->part].stack) != 0)
            p->part++;
        if (!parts[p->part].stack)
            continue;
        for (int i = 0; i < 2; i++)
            QC_TRY(find_shape(s, t->name, p, i, dims[i], &states[i], err));
        const unsigned traits = form == QC_EXPERTS_FLOATS ? s->names->traits : 0;
        p->turned = traits & QC_EXPERTS_TURNED && are_turned_pair(dims);
        const int straight = !(traits & QC_EXPERTS_TURNED) || traits & QC_EXPERTS_BY_SHAPE;
        const int square = dims[1][1] == dims[1][2];
        *is = (p->turned ? !(traits & QC_EXPERTS_BY_SHAPE && square) : straight) &&
              are_pair(dims[0], dims[1]) && dims[0][0] > 0 && dims[0][1] > 0 && dims[0][2] > 0;
        memcpy(p->dims, dims[down], sizeof p->dims);
        p->state = states[down];
    }
    return QC_OK;
}

/* Sets *is if t belongs to a stack that is to be taken apart. */
static qc_status find_piece(splitter *s, const qc_checkpoint_tensor *t, piece *p, int *is,
                            qc_error *err)
{
    *is = 0;
    for (int form = s->fp8_only ? QC_EXPERTS_FP8 : QC_EXPERTS_FLOATS;
         form < QC_EXPERTS_FORMS && !*is; form++)
        QC_TRY(find_of_form(s, t, (qc_expert_form)form, p, is, err));
    return QC_OK;
}

/* A block of weights, or a group of nested scales, spans two matrices. */
static qc_status refuse_blocks(const qc_checkpoint_tensor *t, const piece *k, uint64_t elems,
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

/* Makes of t, a copy of a stack's tensor, the same of the matrix of expert e that has the rows from
 * `first` on. */
static qc_status cut(splitter *s, qc_checkpoint_tensor *t, const qc_checkpoint_tensor *from,
                     const piece *k, uint64_t e, int second, qc_error *err)
{
    const uint64_t matrices = k->down ? 1 : 2, rows = k->dims[1] / matrices, cols = k->dims[2];
    const uint64_t n = rows * cols, index = e * matrices + (uint64_t)second;
    const uint64_t block = k->state.block_elems;
    const uint64_t group = k->state.nested ? k->state.nested_block_elems : 1;
    uint64_t count = 0; /* elements of the part in a matrix */
    if (k->turned) {
        const qc_turned turned = {rows, cols, k->dims[1], (uint64_t)second * rows};
        t->ndim = 2;
        t->dims[0] = rows;
        t->dims[1] = cols;
        return qc_tensor_turn(s->c, t, from, &turned, e, err);
    }
    if (k->form == QC_EXPERTS_FLOATS || k->form == QC_EXPERTS_FP8) {
        t->dims[0] = from->dims[1] / matrices;
        t->dims[1] = from->dims[2];
        t->ndim = 2;
        count = t->dims[0] * t->dims[1];
    } else if (k->form == QC_EXPERTS_INT8) {
        if (k->part == QC_INT8_FORMAT)
            return QC_OK;
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
        t->dims[0] = count = n / each;
        t->dims[1] = 1;
        t->ndim = k->part == QC_NF4_CODES ? 2 : 1;
    }
    t->bytes = count * (qc_dtype_bits(t->dtype) / 8);
    t->begin += index * t->bytes;
    if (t->bytes > from->bytes || t->begin - from->begin > from->bytes - t->bytes)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s' is too small for the stack that it belongs to",
                from->name);
    return QC_OK;
}

static qc_status add_pieces(splitter *s, const qc_checkpoint_tensor *from, const piece *k,
                            qc_error *err)
{
    for (uint64_t e = 0; e < k->dims[0]; e++) {
        for (int m = 0; m < (k->down ? 1 : 2); m++) {
            qc_checkpoint_tensor *t = &s->tensors[s->count++];
            const char *matrix = k->down ? s->names->down : m ? s->names->up : s->names->gate;
            *t = *from;
            QC_TRY(qc_arena_printf(&s->c->arena, &t->name, err, "%.*s%s.%" PRIu64 ".%s%s",
                                   (int)k->stem, from->name, s->names->path, e, matrix,
                                   qc_expert_parts[k->form][k->part].matrix));
            QC_TRY(cut(s, t, from, k, e, m, err));
        }
    }
    return QC_OK;
}

/* Copies a tensor that is in no stack. The router beside a stack gets its released name. */
static qc_status add_plain(splitter *s, const qc_checkpoint_tensor *t, qc_error *err)
{
    qc_checkpoint_tensor *to = &s->tensors[s->count++];
    *to = *t;
    size_t stem = s->names && s->names->router ? stem_before(t->name, QC_EXPERTS_ROUTER) : SIZE_MAX;
    const qc_checkpoint_tensor *stack =
        stem == SIZE_MAX ? NULL : find(s->model, t->name, stem, "mlp." QC_EXPERTS_GATE_UP);
    piece k;
    int is = 0;
    if (stack)
        QC_TRY(find_piece(s, stack, &k, &is, err));
    return is ? qc_arena_printf(&s->c->arena, &to->name, err, "%.*s%s", (int)stem, t->name,
                                s->names->router)
              : QC_OK;
}

qc_status qc_experts_replace(qc_checkpoint *c, qc_checkpoint_tensor *tensors, size_t count,
                             const char *how, qc_error *err)
{
    qsort(tensors, count, sizeof *tensors, qc_by_text);
    size_t twice = qc_find_twice(tensors, count, sizeof *tensors);
    if (twice > 0)
        QC_FAIL(err, QC_ERR_INPUT, "%s has '%s' %s; remove one of the two", c->path,
                tensors[twice].name, how);
    c->tensors = tensors;
    c->tensor_count = count;
    return QC_OK;
}

static qc_status split(splitter *s, qc_error *err)
{
    qc_checkpoint *c = s->c;
    piece p;
    int is = 0;
    s->room = c->tensor_count;
    for (size_t i = 0; i < c->tensor_count; i++) {
        QC_TRY(find_piece(s, &c->tensors[i], &p, &is, err));
        const uint64_t experts = is ? p.dims[0] : 0;
        /* There cannot be more tensors than bytes, but a hostile shape may claim very many. */
        if (experts > UINT32_MAX / 8 || s->room > UINT32_MAX / 8)
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "tensor '%s' has %" PRIu64 " experts, which is more than qconv can split",
                    c->tensors[i].name, experts);
        s->room += 2 * (size_t)experts;
    }
    if (s->room == c->tensor_count)
        return QC_OK;
    QC_TRY(qc_arena_array(&c->arena, &s->tensors, s->room, err));
    for (size_t i = 0; i < c->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &c->tensors[i];
        QC_TRY(find_piece(s, t, &p, &is, err));
        QC_TRY(is ? add_pieces(s, t, &p, err) : add_plain(s, t, err));
    }
    return qc_experts_replace(c, s->tensors, s->count, "twice: by itself and within a fused tensor",
                              err);
}

qc_status qc_experts_split(qc_checkpoint *c, int fp8_only, qc_error *err)
{
    splitter s = {.c = c, .model = c, .names = qc_experts_names(c), .fp8_only = fp8_only};
    QC_TRY(qc_coded_block(s.block, c, err));
    qc_status st = split(&s, err);
    qc_st_cursor_destroy(s.cursor);
    return st == QC_OK ? qc_experts_warn(c, fp8_only, 0, err) : st;
}

int qc_experts_known(const qc_checkpoint *c)
{
    const qc_expert_names *names = qc_expert_names_of(qc_config_type(c->config));
    return (names && !(names->traits & QC_EXPERTS_TURNED)) ||
           qc_type_is("published_stacked", qc_config_type(c->config));
}

int qc_experts_is_stack(const qc_checkpoint *c, const qc_checkpoint_tensor *t)
{
    static const char *const granite[] = {"input_linear.weight", "output_linear.weight"};
    splitter s = {.model = c, .names = qc_expert_names_of(qc_config_type(c->config))};
    piece p;
    int is = 0;
    if (s.names && s.names->traits & QC_EXPERTS_MODULES)
        return 0;
    if (t->ndim != 3 || t->bytes == 0 || !qc_dtype_is_quantizable(t->dtype))
        return 0;
    for (int i = 0; i < 2 && qc_type_is("published_stacked", qc_config_type(c->config)); i++) {
        const size_t stem = stem_before(t->name, granite[i]);
        const qc_checkpoint_tensor *up =
            stem == SIZE_MAX ? NULL : find(c, t->name, stem, granite[0]);
        const qc_checkpoint_tensor *down = up ? find(c, t->name, stem, granite[1]) : NULL;
        if (down && up->ndim == 3 && down->ndim == 3 && are_pair(up->dims, down->dims))
            return 1;
    }
    if (find_of_form(&s, t, QC_EXPERTS_FLOATS, &p, &is, NULL) != QC_OK || !is)
        return 0;
    return p.turned ? 2 : 1;
}

int qc_experts_look_stacked(const qc_checkpoint_tensor *t)
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

qc_status qc_experts_warn(qc_checkpoint *c, int fp8_only, int stacked, qc_error *err)
{
    uint64_t stacks = 0, weights = 0, known = 0;
    const char *first = NULL;
    for (size_t i = 0; i < c->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &c->tensors[i];
        int plain = qc_dtype_is_quantizable(t->dtype) && !fp8_only;
        if (!qc_experts_look_stacked(t) || t->bytes == 0 || !(plain || qc_dtype_is_fp8(t->dtype)) ||
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
        return qc_checkpoint_warn(
            c, err,
            "%" PRIu64 " stack%s of experts ('%.160s' is the first) with "
            "%" PRIu64 " weights %s kept as they are; --experts stacked "
            "quantizes them to nf4 and int8, for transformers 5 after `import "
            "qconv` and for qconv.load",
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
        const size_t stem = stem_before(name, QC_EXPERTS_GATE_UP);
        if (stem != SIZE_MAX &&
            (find(c, name, stem, QC_EXPERTS_GATE_UP ".quant_state.bitsandbytes__nf4") ||
             find(c, name, stem, QC_EXPERTS_GATE_UP ".SCB")))
            return 1;
    }
    return 0;
}
