/* Stacks in floats, [experts, in, out], of experts that are stored one by one, in codes or floats.
 *
 * The bytes of such a stack are made as they are read: a frame's rows of a matrix are decoded,
 * turned, and put beside those of the other matrix. Each frame decodes its matrices anew, as where
 * a stack of codes is decoded (unit_make.c), so no more than a frame is ever held. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "convert/model/expert_split.h"
#include "convert/model/recipe_stored.h"
#include "convert/model/weight_read.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* A stack, and where it comes from. */
typedef struct {
    qc_tensor_change change;  /* first */
    const qc_checkpoint *was; /* the checkpoint with the experts' own tensors */
    unsigned matrices;        /* of an expert, side by side: gate and up, or down */
    qc_weight_source *sources;
} stack;

typedef struct {
    const qc_checkpoint *c; /* with the experts' own tensors */
    qc_arena *arena;
    const qc_expert_names *names;
    qc_stored_set stored;
    qc_coded_set coded;
    unsigned char *used; /* per tensor of c */
} decoder;

/* ---- reading ---- */

/* What a cursor keeps. */
typedef struct {
    qc_weight_reader weights;
    qc_buffer rows; /* of one matrix */
} scratch;

static void release(void *kept)
{
    scratch *s = kept;
    qc_weight_reader_close(&s->weights);
    qc_free(s->rows.data);
}

static qc_status read_matrix(scratch *s, const qc_checkpoint_tensor *t, const qc_weight_source *w,
                             uint64_t begin, uint64_t end, void *out, qc_error *err)
{
    uint64_t bad = UINT64_MAX;
    QC_TRY(qc_weight_turned(&s->weights, w, 0, begin, end, out, t->dtype, &bad, err));
    if (bad != UINT64_MAX)
        QC_FAIL(err, QC_ERR_RANGE,
                "tensor '%s': the weight at row %" PRIu64 ", column %" PRIu64
                " is too large for %s; use --to bf16",
                s->weights.model->tensors[w->tensor].name, bad % w->dims[1], bad / w->dims[1],
                qc_dtype_name(t->dtype));
    return QC_OK;
}

/* Reads elements [begin, end) of the stack, which lie in one expert's rows, given from the first of
 * these on. */
static qc_status read_expert(scratch *s, const qc_checkpoint_tensor *t, const stack *k,
                             const qc_weight_source *sources, uint64_t begin, uint64_t end,
                             unsigned char *out, qc_error *err)
{
    const uint64_t wide = t->dims[2], each = qc_dtype_bits(t->dtype) / 8;
    const uint64_t part = wide / k->matrices, row = begin / wide, rows = (end - 1) / wide + 1 - row;
    if (k->matrices == 1)
        return read_matrix(s, t, sources, begin, end, out, err);
    QC_TRY(qc_buffer_room(&s->rows, rows * part, each, err));
    for (unsigned m = 0; m < k->matrices; m++) {
        QC_TRY(read_matrix(s, t, &sources[m], row * part, (row + rows) * part, s->rows.data, err));
        for (uint64_t r = 0; r < rows; r++) {
            const uint64_t from = (row + r) * wide + m * part;
            const uint64_t a = qc_max_u64(from, begin), b = qc_min_u64(from + part, end);
            if (a < b)
                memcpy(out + (a - begin) * each,
                       (const unsigned char *)s->rows.data + (r * part + a - from) * each,
                       (size_t)((b - a) * each));
        }
    }
    return QC_OK;
}

static qc_status read_stack(const qc_checkpoint *c, qc_st_cursor *cur,
                            const qc_checkpoint_tensor *t, uint64_t offset, void *dst, size_t len,
                            qc_error *err)
{
    (void)c;
    const union {
        const qc_tensor_change *change;
        const stack *stack;
    } u = {t->change};
    const uint64_t each = qc_dtype_bits(t->dtype) / 8, matrix = t->dims[1] * t->dims[2];
    void *kept = NULL;
    if (offset % each != 0 || len % each != 0)
        QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s' is read in parts of elements", t->name);
    QC_TRY(qc_st_cursor_keep(&kept, cur, sizeof(scratch), release, err));
    scratch *s = kept;
    if (s->weights.model != u.stack->was) {
        qc_weight_reader_close(&s->weights);
        QC_TRY(qc_weight_reader_open(&s->weights, u.stack->was, err));
    }
    const uint64_t begin = offset / each, end = begin + len / each;
    for (uint64_t at = begin, next; at < end; at = next) {
        const uint64_t e = at / matrix;
        next = qc_min_u64((e + 1) * matrix, end);
        QC_TRY(read_expert(s, t, u.stack, &u.stack->sources[e * u.stack->matrices], at - e * matrix,
                           next - e * matrix, (unsigned char *)dst + (at - begin) * each, err));
    }
    return QC_OK;
}

/* ---- making ---- */

/* Finds the weight of a matrix; UINT32_MAX if there is none. */
static uint32_t matrix_of(const decoder *d, const char *stem, size_t stem_len, uint64_t expert,
                          const char *matrix)
{
    char name[4096];
    const int n = snprintf(name, sizeof name, "%.*s%s.%" PRIu64 ".%s.weight", (int)stem_len, stem,
                           d->names->path, expert, matrix);
    return n > 0 && (size_t)n < sizeof name ? qc_coded_index(&d->coded, d->c, name) : UINT32_MAX;
}

static const char *name_of(const decoder *d, size_t i)
{
    return d->coded.weights[i] ? d->coded.weights[i]->name : d->c->tensors[i].name;
}

/* Is tensor i the weight of gate in the first expert of a layer? Then *stem_len is the length of
 * what is before the experts' path. */
static int begins_layer(const decoder *d, size_t i, size_t *stem_len)
{
    char tail[256];
    const char *name = name_of(d, i);
    (void)snprintf(tail, sizeof tail, "%s.0.%s.weight", d->names->path, d->names->gate);
    if (!qc_ends_with(name, tail))
        return 0;
    *stem_len = strlen(name) - strlen(tail);
    return *stem_len == 0 || name[*stem_len - 1] == '.';
}

static qc_status make_stack(decoder *d, qc_checkpoint_tensor *t, const char *stem, size_t stem_len,
                            int down, qc_dtype dtype, qc_error *err)
{
    const char *const members[2][2] = {{d->names->gate, d->names->up}, {d->names->down}};
    const unsigned matrices = down ? 1 : 2;
    uint64_t experts = 0;
    stack *k = NULL;
    while (matrix_of(d, stem, stem_len, experts, d->names->gate) != UINT32_MAX)
        experts++;
    QC_TRY(qc_arena_array(d->arena, &k, 1, err));
    QC_TRY(qc_arena_array(d->arena, &k->sources, (size_t)experts * matrices, err));
    for (uint64_t i = 0; i < experts * matrices; i++) {
        qc_weight_source *w = &k->sources[i];
        const uint32_t n = matrix_of(d, stem, stem_len, i / matrices, members[down][i % matrices]);
        if (n != UINT32_MAX)
            QC_TRY(
                qc_weight_source_of(w, d->c, n, d->stored.weights[n], d->coded.weights[n], 1, err));
        if (n == UINT32_MAX || w->ndim != 2 || w->dims[0] != k->sources[0].dims[0] ||
            w->dims[1] != k->sources[0].dims[1])
            QC_FAIL(err, QC_ERR_INPUT,
                    "%s: the experts of '%.*s%s' are not all alike: number %" PRIu64
                    " has no %s of the first one's shape; --experts separate leaves them as they "
                    "are",
                    d->c->path, (int)stem_len, stem, d->names->path, i / matrices,
                    members[down][i % matrices]);
        d->used[n] = 1;
    }
    if (d->names->traits & QC_EXPERTS_BY_SHAPE && down &&
        k->sources[0].dims[0] == k->sources[0].dims[1])
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%s: the experts of '%.*s%s' are square, and versions of transformers differ in "
                "how they take a stack of such; --experts separate leaves them as they are",
                d->c->path, (int)stem_len, stem, d->names->path);
    *t = (qc_checkpoint_tensor){
        .dtype = dtype,
        .ndim = 3,
        .dims = {experts, k->sources[0].dims[0], k->sources[0].dims[1] * matrices},
        .begin = d->c->tensors[k->sources[0].tensor].begin,
        .file = d->c->tensors[k->sources[0].tensor].file};
    QC_TRY(qc_shape_bytes(t->dims, t->ndim, t->dtype, &t->bytes, err));
    QC_TRY(qc_arena_printf(d->arena, &t->name, err, "%.*s%s.%s", (int)stem_len, stem,
                           d->names->stacks, down ? QC_EXPERTS_DOWN : QC_EXPERTS_GATE_UP));
    k->change = (qc_tensor_change){.stored = *t, .scattered = 1, .read = read_stack};
    k->was = d->c;
    k->matrices = matrices;
    t->change = &k->change;
    return QC_OK;
}

qc_status qc_experts_decode(qc_checkpoint *c, qc_dtype dtype, qc_error *err)
{
    decoder d = {.arena = &c->arena, .names = qc_experts_names(c)};
    qc_checkpoint_tensor *tensors = NULL;
    qc_checkpoint *was = NULL;
    size_t stem_len = 0, count = 0, coded = 0;
    if (!d.names || !(d.names->traits & QC_EXPERTS_TURNED))
        return QC_OK;
    QC_TRY(qc_arena_array(d.arena, &was, 1, err));
    *was = *c;
    d.c = was;
    QC_TRY(qc_stored_find(&d.stored, d.arena, was, err));
    QC_TRY(qc_coded_find(&d.coded, d.arena, was, err));
    QC_TRY(qc_arena_array(d.arena, &d.used, c->tensor_count, err));
    QC_TRY(qc_arena_array(d.arena, &tensors, 3 * c->tensor_count, err));
    for (size_t i = 0; i < c->tensor_count; i++) {
        if (!begins_layer(&d, i, &stem_len))
            continue;
        for (int down = 0; down < 2; down++)
            QC_TRY(make_stack(&d, &tensors[count++], name_of(&d, i), stem_len, down, dtype, err));
    }
    if (count == 0)
        return QC_OK;
    for (size_t i = 0; i < c->tensor_count; i++) {
        const uint32_t stored = d.stored.owners[i], owner = d.coded.owners[i];
        if (d.used[i] || (stored != QC_NO_TENSOR && d.used[stored]) ||
            (owner != QC_NO_TENSOR && d.used[owner]))
            continue;
        coded += d.stored.weights[i] || d.coded.weights[i];
        tensors[count++] = c->tensors[i];
    }
    if (coded == 0 && d.stored.count + d.coded.count > 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%s: nothing but experts is quantized, and qconv makes no stacks of them then; "
                "--experts separate decodes them one by one",
                c->path);
    return qc_experts_replace(c, tensors, count, "beside the experts of which it is made", err);
}
