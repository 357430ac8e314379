/* Finds the tensor of MODEL that each tensor of OUT was made from, and those without a partner. */
#include "convert/verify/against_internal.h"

#include "base/checked.h"
#include "base/text.h"
#include "convert/model/expert_split.h"
#include "convert/model/recipe_coded.h"
#include "convert/model/recipe_rules.h"
#include "convert/term/glob.h"
#include "convert/term/size_text.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* An OUT without a manifest is read in pieces of this size, which is a multiple of every block size
 * and bounds the buffers. */
#define PIECE_BYTES ((uint64_t)4 << 20)

typedef struct {
    qc_against *a;
    const qc_family *table;
    unsigned char *used; /* per tensor of MODEL: something of OUT is made of it */
    qc_error *err;
} matcher;

static qc_status fault(qc_against *a, qc_against_tensor *t, qc_error *err, const char *fmt, ...)
    QC_PRINTF(4, 5);

static qc_status fault(qc_against *a, qc_against_tensor *t, qc_error *err, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    if (t->row.fault)
        return QC_OK;
    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return qc_arena_strndup(a->arena, &t->row.fault, text, strlen(text), err);
}

/* ---- shapes ---------------------------------------------------------------------------------- */

static qc_status shapes_differ(const matcher *m, qc_against_tensor *t, const uint64_t *dims,
                               unsigned ndim)
{
    char ours[QC_SHAPE_TEXT_BYTES], theirs[QC_SHAPE_TEXT_BYTES];
    return fault(m->a, t, m->err, "it is %s, but '%s' in MODEL is %s%s",
                 qc_text_shape(ours, t->row.dims, t->row.ndim), t->row.source,
                 qc_text_shape(theirs, dims, ndim),
                 t->row.transpose ? " and is to be transposed" : "");
}

int qc_against_same_shape(const qc_against_row *r, const uint64_t *dims, unsigned ndim)
{
    int same = ndim == r->ndim && (!r->transpose || ndim >= 2);
    for (unsigned i = 0; same && i < ndim; i++) {
        unsigned k = i;
        if (r->transpose && i + 2 >= ndim)
            k = i + 1 == ndim ? ndim - 2 : ndim - 1;
        same = dims[k] == r->dims[i];
    }
    return same;
}

/* ---- kinds ----------------------------------------------------------------------------------- */

static qc_status set_form(const matcher *m, qc_against_tensor *t)
{
    const qc_stored_weight *s = t->stored;
    const qc_checkpoint *c = m->a->output;
    float map[16];
    qc_form form = {.ops = qc_schemes[s->stored_as].form, .cols = t->cols};
    if (form.ops->integer)
        form.scale_dtype = c->tensors[s->absmax].dtype;
    qc_st_cursor *cursor = NULL;
    if (qc_stored_block(s)) {
        if (!qc_block_size_valid(s->block_elems))
            return fault(m->a, t, m->err, "qconv does not read blocks of %llu weights",
                         (unsigned long long)s->block_elems);
        form.block_elems = (uint32_t)s->block_elems;
    }
    if (s->quant_map == QC_NO_TENSOR) {
        qc_check_init(&t->check, &form);
        return QC_OK;
    }
    QC_TRY(qc_st_cursor_create(&cursor, m->err));
    qc_status st =
        qc_checkpoint_read(c, cursor, &c->tensors[s->quant_map], 0, map, sizeof map, m->err);
    qc_st_cursor_destroy(cursor);
    QC_TRY(st);
    form.code_map = map;
    qc_check_init(&t->check, &form);
    if (!s->fp4 && t->check.mapped)
        return fault(m->a, t, m->err,
                     "its quant_map, which has the values of its codes, is not that of NF4");
    return QC_OK;
}

static uint64_t part_bytes(const qc_checkpoint *c, uint32_t tensor)
{
    return tensor == QC_NO_TENSOR ? 0 : c->tensors[tensor].bytes;
}

static int is_integer(const qc_stored_weight *s)
{
    return qc_schemes[s->stored_as].form->integer;
}

static qc_status match_quantized(const matcher *m, qc_against_tensor *t)
{
    qc_against_row *r = &t->row;
    const qc_stored_weight *s = t->stored;
    const qc_checkpoint_tensor *from = &m->a->model->tensors[t->model_tensor];
    t->coded = m->a->coded.weights[t->model_tensor];
    const uint64_t *dims = t->coded ? t->coded->dims : from->dims;
    unsigned ndim = t->coded ? t->coded->ndim : from->ndim;
    r->source_dtype = from->dtype;
    r->transpose = !t->coded && (ndim == 2 ? qc_family_is_conv1d(m->table, from->name)
                                           : qc_experts_is_stack(m->a->model, from) == 2);
    t->through = from->dtype;
    if (!t->coded && !qc_dtype_is_quantizable(from->dtype))
        return fault(m->a, t, m->err, "in MODEL it is %s, which cannot be quantized",
                     qc_dtype_name(from->dtype));
    if (!qc_against_same_shape(r, dims, ndim))
        return shapes_differ(m, t, dims, ndim);
    /* Loaders cast a model before they quantize it, and record in the state what they cast it to,
     * or show it by the dtype of the scales. */
    if (!m->a->o->manifest && !t->coded && qc_dtype_is_quantizable(s->dtype) &&
        (qc_stored_block(s) || is_integer(s)) &&
        qc_dtype_bits(s->dtype) <= qc_dtype_bits(from->dtype))
        t->through = s->dtype;
    return set_form(m, t);
}

/* Refuses integers whose codes are not compared here with the weights they stand for. */
static qc_status refuse_integers(const matcher *m, qc_against_tensor *t, const qc_coded_weight *w)
{
    const qc_checkpoint_tensor *to = &m->a->output->tensors[t->out_tensor];
    const qc_checkpoint_tensor *from = &m->a->model->tensors[t->model_tensor];
    const char *name = NULL, *why = w->group_index != QC_NO_TENSOR ? "with act-order"
                                    : w->zeros != QC_NO_TENSOR     ? "with zero points"
                                    : w->tile_rows > 1             ? "with one scale"
                                                       : "in rows that do not fill whole words";
    memcpy(t->row.dims, w->dims, sizeof w->dims);
    t->row.ndim = w->ndim;
    if (!qc_against_same_shape(&t->row, from->dims, from->ndim))
        return shapes_differ(m, t, from->dims, from->ndim);
    QC_TRY(qc_integers_name(&name, m->a->arena, w, m->err));
    QC_FAIL(m->err, QC_ERR_UNSUPPORTED,
            "%s: tensor '%s' is %s %s, which qconv does not compare with the weights it was made "
            "from; 'python -m qconv eval --against' compares what the two models compute",
            m->a->output->path, to->name, name, why);
}

/* If a tensor holds codes of compressed-tensors, by its name and dtype, and has no scales: the
 * length of the module's name with its dot; otherwise 0. */
static size_t without_scales(const qc_checkpoint *c, const qc_checkpoint_tensor *t)
{
    static const char *const tails[] = {"weight", "weight_packed"};
    const char *tail = tails[t->dtype == QC_DTYPE_I32];
    const size_t len = strlen(t->name), n = strlen(tail);
    if ((t->dtype != QC_DTYPE_I32 && t->dtype != QC_DTYPE_I8) || len <= n ||
        t->name[len - n - 1] != '.' || !qc_ends_with(t->name, tail) ||
        qc_checkpoint_beside(c, t->name, len - n, "weight_scale") != QC_NO_TENSOR)
        return 0;
    return len - n;
}

static qc_status match_plain(const matcher *m, qc_against_tensor *t)
{
    qc_against_row *r = &t->row;
    const qc_checkpoint_tensor *to = &m->a->output->tensors[t->out_tensor];
    const qc_checkpoint_tensor *from = &m->a->model->tensors[t->model_tensor];
    const uint64_t *dims = from->dims;
    unsigned ndim = from->ndim;
    r->source_dtype = from->dtype;
    t->coded = m->a->coded.weights[t->model_tensor];
    t->packed = m->a->in_model.weights[t->model_tensor];
    if (from->dtype == to->dtype && qc_against_same_shape(r, dims, ndim)) {
        r->kind = QC_AGAINST_EQUAL;
        r->scheme = "keep";
        t->coded = NULL;
        t->packed = NULL;
        return QC_OK;
    }
    const qc_coded_weight *codes = m->a->out_coded.weights[t->out_tensor];
    if (codes && qc_coding_is_packed(codes->coding))
        return refuse_integers(m, t, codes);
    r->kind = QC_AGAINST_CAST;
    r->scheme = t->packed ? "dequant" : "cast";
    if (t->coded) {
        dims = t->coded->dims;
        ndim = t->coded->ndim;
        r->transpose = t->coded->coding == QC_CODING_MXFP4;
    } else if (t->packed) {
        dims = t->packed->dims;
        ndim = t->packed->ndim;
        r->transpose = (ndim == 3 && !qc_experts_known(m->a->model)) ||
                       (ndim == 2 && qc_family_is_conv1d(m->table, from->name));
    }
    if (!qc_against_same_shape(r, dims, ndim))
        return shapes_differ(m, t, dims, ndim);
    if (!qc_dtype_is_quantizable(to->dtype) ||
        (!t->coded && !t->packed && !qc_dtype_is_quantizable(from->dtype)))
        return fault(m->a, t, m->err, "it is %s, but in MODEL it is %s", qc_dtype_name(to->dtype),
                     qc_dtype_name(from->dtype));
    return QC_OK;
}

/* Was tensor i quantized in MODEL already, and kept? It is a quantized weight or its state. Every
 * part of a kept weight has its counterpart in MODEL. Integers may have been quantized anew under
 * the same names, which the manifest says; without one, they count as kept. */
static int is_kept(const matcher *m, uint32_t i)
{
    const qc_against *a = m->a;
    const qc_against_tensor *t = &a->tensors[i];
    const uint32_t owner = a->in_output.owners[i], weight = owner == QC_NO_TENSOR ? i : owner;
    const qc_manifest_tensor *listed = a->tensors[weight].listed;
    if (t->model_tensor == QC_NO_TENSOR)
        return 0;
    if (is_integer(a->in_output.weights[weight])) {
        const qc_checkpoint_tensor *to = &a->output->tensors[weight];
        const uint32_t from = qc_checkpoint_find_index(a->model, to->name);
        if (listed)
            return strcmp(listed->scheme, "keep") == 0;
        return from != QC_NO_TENSOR && a->model->tensors[from].dtype == to->dtype;
    }
    return owner == QC_NO_TENSOR ? a->in_model.weights[t->model_tensor] != NULL
                                 : a->in_model.owners[t->model_tensor] != QC_NO_TENSOR;
}

static qc_status match_one(const matcher *m, uint32_t i)
{
    qc_against *a = m->a;
    qc_against_tensor *t = &a->tensors[i];
    qc_against_row *r = &t->row;
    const qc_checkpoint_tensor *to = &a->output->tensors[i];
    uint32_t owner = a->in_output.owners[i];
    QC_TRY(qc_arena_strdup(a->arena, &r->name, to->name, m->err)); /* rows outlive checkpoints */
    r->dtype = to->dtype;
    r->ndim = to->ndim;
    memcpy(r->dims, to->dims, sizeof to->dims);
    r->bytes = t->out_bytes = to->bytes;
    t->out_tensor = i;
    t->stored = a->in_output.weights[i];
    const char *source = t->listed && t->listed->source_name ? t->listed->source_name : to->name;
    t->model_tensor = qc_checkpoint_find_index(a->model, source);
    if (!t->listed && t->model_tensor == QC_NO_TENSOR)
        t->model_tensor = qc_coded_index(
            &a->coded, a->model, a->out_coded.weights[i] ? a->out_coded.weights[i]->name : source);
    int kept = (t->stored || owner != QC_NO_TENSOR) && is_kept(m, i);
    if (owner != QC_NO_TENSOR && !kept) {
        r->kind = QC_AGAINST_STATE;
        r->scheme = "state";
        return QC_OK;
    }
    if (t->stored && !kept) {
        const qc_stored_weight *s = t->stored;
        r->kind = QC_AGAINST_QUANTIZED;
        r->scheme = s->name;
        r->ndim = s->ndim;
        memcpy(r->dims, s->dims, sizeof s->dims);
        r->block_elems = qc_stored_block(s);
        r->bytes += part_bytes(a->output, s->absmax) + part_bytes(a->output, s->nested_absmax) +
                    part_bytes(a->output, s->quant_map) + part_bytes(a->output, s->nested_map);
        t->cols = s->ndim ? s->dims[s->ndim - 1] : 1;
    }
    QC_TRY(qc_shape_elems(r->dims, r->ndim, &r->elems, m->err));
    t->rows = t->cols ? r->elems / t->cols : 0;
    const size_t module = t->stored ? 0 : without_scales(a->output, to);
    if (module > 0 && t->model_tensor == QC_NO_TENSOR)
        t->model_tensor = qc_checkpoint_beside(a->model, to->name, module, "weight");
    if (t->model_tensor == QC_NO_TENSOR) {
        r->scheme = r->scheme ? r->scheme : "keep";
        if (t->listed && t->listed->source_name)
            return fault(a, t, m->err, "its source '%s' is not in MODEL", source);
        return fault(a, t, m->err, "MODEL has no tensor of this name");
    }
    const qc_checkpoint_tensor *from = &a->model->tensors[t->model_tensor];
    QC_TRY(qc_arena_strdup(a->arena, &r->source, from->name, m->err));
    r->source_bytes = from->bytes;
    m->used[t->model_tensor] = 1;
    if (module > 0 && from->dtype != to->dtype) {
        r->scheme = "keep";
        return fault(a, t, m->err, "it holds codes, but there is no weight_scale beside it");
    }
    return r->kind == QC_AGAINST_QUANTIZED ? match_quantized(m, t) : match_plain(m, t);
}

/* ---- pieces ---------------------------------------------------------------------------------- */

static qc_status set_pieces(const matcher *m, qc_against_tensor *t)
{
    qc_against *a = m->a;
    uint64_t piece = PIECE_BYTES;
    if (t->row.kind == QC_AGAINST_STATE || t->row.fault)
        return QC_OK;
    if (t->listed) {
        piece = t->listed->piece_bytes;
    } else if (t->row.kind == QC_AGAINST_QUANTIZED && qc_form_by_rows(&t->check.form)) {
        uint64_t rows = t->cols && t->cols < PIECE_BYTES ? PIECE_BYTES / t->cols : 1;
        piece = qc_sat_mul(rows, t->cols ? t->cols : 1);
    }
    uint64_t count = qc_ceil_div_u64(t->out_bytes, piece);
    if (count > UINT32_MAX || qc_min_u64(piece, t->out_bytes) > UINT32_MAX)
        QC_FAIL(m->err, QC_ERR_NOMEM, "tensor '%s' is too large", t->row.name);
    if (qc_form_by_rows(&t->check.form) && t->row.kind == QC_AGAINST_QUANTIZED && t->cols &&
        piece % t->cols != 0 && count > 1)
        return fault(a, t, m->err, "its pieces in the manifest do not consist of whole rows");
    t->piece_bytes = piece;
    t->piece_count = (uint32_t)count;
    if (t->row.kind == QC_AGAINST_QUANTIZED) {
        QC_TRY(qc_arena_array(a->arena, &t->sums, count, m->err));
        for (uint64_t i = 0; i < count; i++)
            qc_check_sums_init(&t->sums[i]);
    } else {
        QC_TRY(qc_arena_array(a->arena, &t->differs, count, m->err));
        for (uint64_t i = 0; i < count; i++)
            t->differs[i] = UINT64_MAX;
    }
    /* The digests are over the source's own pieces, of which there are as many as of OUT's. */
    if (!t->listed || !t->listed->source_name ||
        qc_ceil_div_u64(t->row.source_bytes, t->listed->source_piece_bytes) != count)
        return QC_OK;
    QC_TRY(qc_arena_array(a->arena, &t->sources, count, m->err));
    return QC_OK;
}

/* ---- what is missing ------------------------------------------------------------------------- */

/* Do the two have the same bytes, as a head and the embeddings that it is tied to? */
static int is_tied_head(const matcher *m, uint32_t i)
{
    const qc_checkpoint *c = m->a->model;
    return c->config && qc_ends_with(c->tensors[i].name, "lm_head.weight") &&
           qc_json_bool_or(qc_config_get(c, "tie_word_embeddings"), qc_family_is(m->table, "TIED"));
}

static const char *why_missing(const matcher *m, uint32_t i, uint64_t layers, int mtp_all_missing)
{
    const qc_against *a = m->a;
    const char *name = a->model->tensors[i].name;
    uint32_t owner =
        a->in_model.owners[i] != QC_NO_TENSOR ? a->in_model.owners[i] : a->coded.owners[i];
    if (owner != QC_NO_TENSOR && m->used[owner])
        return "scales and state of a weight that was decoded";
    if (mtp_all_missing && qc_rules_predicts_more(name, layers))
        return "of a layer for multi-token prediction, left out";
    if (a->o->manifest)
        return NULL;
    /* transformers does not save these again. */
    if (is_tied_head(m, i))
        return "an output head that is tied to the embeddings";
    if (qc_ends_with(name, ".rotary_emb.inv_freq") || qc_ends_with(name, ".masked_bias") ||
        qc_ends_with(name, ".attn.bias"))
        return "a buffer that loaders make anew";
    return NULL;
}

static qc_status list_missing(const matcher *m)
{
    qc_against *a = m->a;
    uint64_t layers = UINT64_MAX;
    int mtp_all_missing = 1;
    if (qc_json_as_u64(qc_config_get(a->model, "num_hidden_layers"), "", &layers, NULL) != QC_OK ||
        layers == 0)
        layers = UINT64_MAX;
    size_t count = 0;
    for (uint32_t i = 0; i < (uint32_t)a->model->tensor_count; i++) {
        count += !m->used[i];
        if (m->used[i] && qc_rules_predicts_more(a->model->tensors[i].name, layers))
            mtp_all_missing = 0;
    }
    QC_TRY(qc_arena_array(a->arena, &a->missing, count + 1, m->err));
    for (uint32_t i = 0; i < (uint32_t)a->model->tensor_count; i++) {
        if (m->used[i])
            continue;
        qc_against_missing *missing = &a->missing[a->missing_count++];
        missing->why = why_missing(m, i, layers, mtp_all_missing);
        QC_TRY(qc_arena_strdup(a->arena, &missing->name, a->model->tensors[i].name, m->err));
    }
    return QC_OK;
}

qc_status qc_against_match(qc_against *a, qc_error *err)
{
    matcher m = {.a = a, .err = err};
    QC_TRY(qc_stored_find(&a->in_model, a->arena, a->model, err));
    QC_TRY(qc_coded_find(&a->coded, a->arena, a->model, err));
    m.table = qc_family_of(a->model);
    QC_TRY(qc_arena_alloc(a->arena, &m.used, a->model->tensor_count + 1, 1, err));
    QC_TRY(qc_arena_array(a->arena, &a->tensors, a->output->tensor_count + 1, err));
    if (a->o->manifest)
        QC_TRY(qc_arena_array(a->arena, &a->of_listed, a->o->manifest->tensor_count + 1, err));
    for (size_t i = 0; a->o->manifest && i < a->o->manifest->tensor_count; i++) {
        const qc_manifest_tensor *row = &a->o->manifest->tensors[i];
        a->of_listed[i] = qc_checkpoint_find_index(a->output, row->name);
        if (a->of_listed[i] != QC_NO_TENSOR)
            a->tensors[a->of_listed[i]].listed = row;
    }
    for (uint32_t i = 0; i < (uint32_t)a->output->tensor_count; i++) {
        QC_TRY(match_one(&m, i));
        QC_TRY(set_pieces(&m, &a->tensors[i]));
    }
    QC_TRY(list_missing(&m));
    qsort(a->missing, a->missing_count, sizeof *a->missing, qc_by_natural);
    return qc_natural_order(&a->by_name, a->arena, a->output->tensors,
                            offsetof(qc_checkpoint_tensor, name), sizeof *a->output->tensors,
                            a->output->tensor_count, err);
}
