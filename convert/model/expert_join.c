#include "base/text.h"
#include "convert/families/config_fields.h"
#include "convert/model/expert_split.h"
#include "convert/model/fused_groups.h"
#include "convert/model/scheme.h"
#include "formats/tensor_pieces.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    qc_checkpoint *c;
    const qc_expert_names *names;
    qc_checkpoint_tensor *tensors; /* the new list */
    size_t count;
    unsigned char *used; /* per tensor of c */
    qc_st_cursor *cursor;
} joiner;

/* A stack in the making. */
typedef struct {
    const char *stem; /* stem_len bytes are what is before the experts' path */
    size_t stem_len;
    int down;
    uint64_t experts;
    qc_expert_form form;
    uint64_t dims[3];
    qc_bnb_state state; /* NF4: a matrix's */
} stack;

/* Finds what lies beside the weight of a matrix (suffix ".weight.absmax", ".SCB"); NULL if there is
 * none. m: 0 gate or down, 1 up. */
static const qc_checkpoint_tensor *part_of(const joiner *j, const stack *k, uint64_t expert,
                                           unsigned m, const char *suffix)
{
    char name[4096];
    const char *matrix = k->down ? j->names->down : m ? j->names->up : j->names->gate;
    int n = snprintf(name, sizeof name, "%.*s%s.%" PRIu64 ".%s%s", (int)k->stem_len, k->stem,
                     j->names->path, expert, matrix, suffix);
    return n > 0 && (size_t)n < sizeof name ? qc_checkpoint_find(j->c, name) : NULL;
}

static qc_status refuse(const joiner *j, const stack *k, uint64_t expert, const char *what,
                        qc_error *err)
{
    QC_FAIL(err, QC_ERR_INPUT,
            "--experts stacked: the experts of '%.*s%s' are not all alike: number %" PRIu64
            " %s; leave the option out",
            (int)k->stem_len, k->stem, j->names->path, expert, what);
}

/* Says how the first matrix is stored, and what shape it has. */
static qc_status look_at_first(joiner *j, stack *k, qc_error *err)
{
    const qc_checkpoint_tensor *w = part_of(j, k, 0, 0, ".weight");
    const qc_checkpoint_tensor *scb = part_of(j, k, 0, 0, ".SCB");
    const qc_checkpoint_tensor *state =
        part_of(j, k, 0, 0, qc_expert_parts[QC_EXPERTS_NF4][QC_NF4_STATE].matrix);
    if (!w)
        return refuse(j, k, 0, "has no weight in floats, NF4 or int8", err);
    k->dims[1] = w->dims[0];
    k->dims[2] = w->dims[1];
    if (state) {
        k->form = QC_EXPERTS_NF4;
        QC_TRY(qc_expert_state_read(&k->state, j->c, j->cursor, state, err));
        k->dims[1] = k->state.dims[0];
        k->dims[2] = k->state.dims[1];
        if (k->state.nested)
            QC_FAIL(
                err, QC_ERR_UNSUPPORTED,
                "--experts stacked: the scales of '%s' are quantized themselves, with an offset "
                "for each expert, and a stack has one offset; convert the source again with "
                "--experts stacked, or with --no-double-quant",
                w->name);
        if (k->state.block_elems == 0 || k->dims[1] * k->dims[2] % k->state.block_elems != 0)
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "--experts stacked: '%s' has %" PRIu64 " x %" PRIu64 " weights, which are no "
                    "whole blocks of %" PRIu64 "; leave the option out",
                    w->name, k->dims[1], k->dims[2], k->state.block_elems);
    } else if (scb && w->dtype == QC_DTYPE_I8) {
        k->form = QC_EXPERTS_INT8;
    } else if (qc_dtype_is_quantizable(w->dtype) && w->ndim == 2 && w->bytes > 0) {
        k->form = QC_EXPERTS_FLOATS;
    } else {
        QC_FAIL(
            err, QC_ERR_UNSUPPORTED,
            "--experts stacked: '%s' is %s, and only experts in floats, NF4 and int8 by rows can "
            "be stacked; --to bf16 makes floats of them",
            w->name, qc_dtype_name(w->dtype));
    }
    k->dims[0] = k->experts;
    k->dims[1] *= k->down ? 1 : 2;
    return QC_OK;
}

/* Adds a part of a stack. With the first matrix's alone (`shared`) the others have to have the same
 * bytes. */
static qc_status add_part(joiner *j, const stack *k, unsigned part, int shared, unsigned ndim,
                          const uint64_t *dims, qc_error *err)
{
    const qc_expert_part *ends = &qc_expert_parts[k->form][part];
    const unsigned matrices = k->down ? 1 : 2;
    qc_checkpoint_tensor *parts = NULL, *t = &j->tensors[j->count++];
    unsigned char first[64], other[64];
    size_t count = 0;
    QC_TRY(qc_arena_array(&j->c->arena, &parts, (size_t)k->experts * matrices, err));
    for (uint64_t e = 0; e < k->experts; e++) {
        for (unsigned m = 0; m < matrices; m++) {
            const qc_checkpoint_tensor *from = part_of(j, k, e, m, ends->matrix);
            if (!from || from->dtype != (count ? parts[0].dtype : from->dtype) ||
                from->bytes != (count ? parts[0].bytes : from->bytes) ||
                (shared && from->bytes > sizeof first))
                return refuse(j, k, e, "has another form or shape than the first", err);
            if (shared)
                QC_TRY(qc_checkpoint_read(j->c, j->cursor, from, 0, count ? other : first,
                                          (size_t)from->bytes, err));
            if (shared && count && memcmp(first, other, (size_t)from->bytes) != 0)
                return refuse(j, k, e, "has other values of its codes than the first", err);
            j->used[from - j->c->tensors] = 1;
            parts[count++] = *from;
        }
    }
    *t = parts[0];
    QC_TRY(qc_arena_printf(&j->c->arena, &t->name, err, "%.*s%s.%s%s", (int)k->stem_len, k->stem,
                           j->names->stacks, k->down ? QC_EXPERTS_DOWN : QC_EXPERTS_GATE_UP,
                           ends->stack));
    if (shared)
        return QC_OK;
    t->ndim = ndim;
    memcpy(t->dims, dims, ndim * sizeof *dims);
    QC_TRY(qc_tensor_join(j->c, t, parts, count, err));
    if (t->bytes != parts[0].bytes * count)
        return refuse(j, k, 0, "does not have the size that its shape says", err);
    return QC_OK;
}

/* Every quant_state has to say what the first one does. Adds that of the stack. */
static qc_status add_state(joiner *j, const stack *k, qc_error *err)
{
    const qc_expert_part *ends = &qc_expert_parts[QC_EXPERTS_NF4][QC_NF4_STATE];
    qc_checkpoint_tensor *t = &j->tensors[j->count++];
    for (uint64_t e = 0; e < k->experts; e++) {
        for (unsigned m = 0; m < (k->down ? 1u : 2u); m++) {
            const qc_checkpoint_tensor *from = part_of(j, k, e, m, ends->matrix);
            qc_bnb_state s;
            if (!from)
                return refuse(j, k, e, "is not quantized as the first is", err);
            QC_TRY(qc_expert_state_read(&s, j->c, j->cursor, from, err));
            if (s.nested || s.block_elems != k->state.block_elems ||
                s.source_dtype != k->state.source_dtype || s.ndim != 2 ||
                s.dims[0] != k->state.dims[0] || s.dims[1] != k->state.dims[1])
                return refuse(j, k, e, "is not quantized as the first is", err);
            j->used[from - j->c->tensors] = 1;
        }
    }
    qc_bnb_state s = k->state;
    s.ndim = 3;
    memcpy(s.dims, k->dims, sizeof k->dims);
    QC_TRY(qc_arena_printf(&j->c->arena, &t->name, err, "%.*s%s.%s%s", (int)k->stem_len, k->stem,
                           j->names->stacks, k->down ? QC_EXPERTS_DOWN : QC_EXPERTS_GATE_UP,
                           ends->stack));
    return qc_expert_state_make(j->c, t, &s, err);
}

static qc_status add_stack(joiner *j, stack *k, qc_error *err)
{
    QC_TRY(look_at_first(j, k, err));
    const uint64_t rows = k->dims[0] * k->dims[1], n = rows * k->dims[2];
    if (k->form == QC_EXPERTS_FLOATS)
        return add_part(j, k, 0, 0, 3, k->dims, err);
    if (k->form == QC_EXPERTS_INT8) {
        QC_TRY(add_part(j, k, QC_INT8_CODES, 0, 2, (uint64_t[]){n, 1}, err));
        QC_TRY(add_part(j, k, QC_INT8_SCB, 0, 2, k->dims, err));
        return add_part(j, k, QC_INT8_FORMAT, 1, 0, NULL, err);
    }
    QC_TRY(add_part(j, k, QC_NF4_CODES, 0, 2, (uint64_t[]){n / 2, 1}, err));
    QC_TRY(add_part(j, k, QC_NF4_ABSMAX, 0, 1, (uint64_t[]){n / k->state.block_elems}, err));
    QC_TRY(add_part(j, k, QC_NF4_MAP, 1, 0, NULL, err));
    return add_state(j, k, err);
}

/* Is tensor t the weight of gate in the first expert of a layer? Then *stem_len is the length of
 * what is before the experts' path. */
static int begins_layer(const joiner *j, const qc_checkpoint_tensor *t, size_t *stem_len)
{
    char tail[256];
    const int n = snprintf(tail, sizeof tail, "%s.0.%s.weight", j->names->path, j->names->gate);
    const size_t len = strlen(t->name);
    if (n < 0 || len < (size_t)n || strcmp(t->name + len - (size_t)n, tail) != 0)
        return 0;
    *stem_len = len - (size_t)n;
    return *stem_len == 0 || t->name[*stem_len - 1] == '.';
}

static qc_status add_others(joiner *j, qc_error *err)
{
    for (size_t i = 0; i < j->c->tensor_count; i++) {
        const qc_checkpoint_tensor *from = &j->c->tensors[i];
        const char *router = j->names->router;
        if (j->used[i])
            continue;
        if (qc_expert_stem(from->name) > 0 && strstr(from->name, j->names->path))
            QC_FAIL(
                err, QC_ERR_UNSUPPORTED,
                "--experts stacked: '%s' belongs to an expert, and a stack has no place for it; "
                "leave the option out",
                from->name);
        qc_checkpoint_tensor *to = &j->tensors[j->count++];
        *to = *from;
        if (router && qc_ends_with(from->name, router))
            QC_TRY(qc_arena_printf(&j->c->arena, &to->name, err, "%.*s%s",
                                   (int)(strlen(from->name) - strlen(router)), from->name,
                                   QC_EXPERTS_ROUTER));
    }
    return QC_OK;
}

static qc_status join(joiner *j, qc_error *err)
{
    qc_checkpoint *c = j->c;
    size_t layers = 0, stem_len = 0;
    /* A layer's two stacks have at most eight tensors, and its experts at least three each. */
    QC_TRY(qc_arena_array(&c->arena, &j->tensors, 4 * c->tensor_count, err));
    QC_TRY(qc_arena_array(&c->arena, &j->used, c->tensor_count, err));
    QC_TRY(qc_st_cursor_create(&j->cursor, err));
    for (size_t i = 0; i < c->tensor_count; i++) {
        if (!begins_layer(j, &c->tensors[i], &stem_len))
            continue;
        stack k = {.stem = c->tensors[i].name, .stem_len = stem_len};
        while (part_of(j, &k, k.experts, 0, ".weight"))
            k.experts++;
        QC_TRY(add_stack(j, &k, err));
        k.down = 1;
        QC_TRY(add_stack(j, &k, err));
        layers++;
    }
    if (layers == 0)
        return QC_OK;
    QC_TRY(add_others(j, err));
    return qc_experts_replace(c, j->tensors, j->count, "beside the experts of which it is made",
                              err);
}

qc_status qc_experts_join(qc_checkpoint *c, qc_error *err)
{
    joiner j = {.c = c, .names = qc_experts_names(c)};
    if (!j.names) {
        for (size_t i = 0; i < c->tensor_count; i++) {
            if (qc_expert_stem(c->tensors[i].name) > 0)
                QC_FAIL(
                    err, QC_ERR_UNSUPPORTED,
                    "--experts stacked: it is not known for this model type how the experts lie "
                    "in a stack ('%s' is one's); leave the option out",
                    c->tensors[i].name);
        }
        return QC_OK;
    }
    qc_status st = join(&j, err);
    qc_st_cursor_destroy(j.cursor);
    return st;
}

int qc_experts_become_codes(const qc_checkpoint *c, const qc_recipe_options *o)
{
    const qc_expert_names *names = qc_expert_names_of(qc_config_type(c->config));
    return qc_to_quantizes(o->to) &&
           (o->experts == QC_EXPERTS_STACKED ||
            (o->experts == QC_EXPERTS_AS_FOUND && names && names->traits & QC_EXPERTS_WHOLE &&
             o->to != QC_TO_AUTO && o->format != QC_FORMAT_COMPRESSED_TENSORS));
}

qc_status qc_experts_arrange(qc_checkpoint *c, const qc_recipe_options *o, qc_error *err)
{
    const qc_expert_names *names = qc_experts_names(c);
    const unsigned traits = names ? names->traits : 0;
    if (traits & QC_EXPERTS_TURNED && o->experts != QC_EXPERTS_SEPARATE &&
        (o->to == QC_TO_BF16 || o->to == QC_TO_FP16)) {
        QC_TRY(qc_experts_decode(c, o->to == QC_TO_BF16 ? QC_DTYPE_BF16 : QC_DTYPE_F16, err));
        return qc_experts_warn(c, 1, 0, err);
    }
    if (traits & QC_EXPERTS_MODULES && o->experts == QC_EXPERTS_STACKED)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "--experts stacked: loaders have a module for each expert of this model type where "
                "weights are quantized, and no place for a stack of codes; leave the option out "
                "(--to bf16 makes stacks)");
    if (o->experts == QC_EXPERTS_STACKED)
        QC_TRY(qc_experts_join(c, err));
    if (qc_experts_become_codes(c, o))
        return qc_experts_warn(c, 0, 1, err);
    if (o->experts == QC_EXPERTS_STACKED)
        return QC_OK;
    if (o->to == QC_TO_KEEP && o->experts == QC_EXPERTS_AS_FOUND)
        return QC_OK;
    return qc_experts_split(c, o->experts == QC_EXPERTS_AS_FOUND && !qc_to_quantizes(o->to), err);
}
