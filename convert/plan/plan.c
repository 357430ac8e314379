/* How the output is laid out.
 *
 * The output order decides the shard of a tensor: embeddings come first, then everything by name,
 * with numbers compared as numbers, then the final norm and the head. So layers stay together, and
 * a device that holds a run of layers needs a run of shards. A weight and its derived tensors
 * always stay together. If there are devices, tensors are sorted by device first and have this
 * order within each. Within a shard the order is that of the reference writer. */
#include "convert/plan/plan.h"
#include "convert/model/expert_split.h"
#include "convert/model/recipe_coded.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "convert/term/glob.h"
#include "formats/seekable.h"
#include "quant/quant_decode.h"
#include "quant/quant_ops.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const role_suffix[QC_ROLE_TENSOR_COUNT] = {
    "",    ".absmax",       ".quant_map", ".nested_absmax", ".nested_quant_map",
    NULL, /* the scheme's */
    "SCB", "weight_format", "_scale",     "_shape",
};

typedef struct {
    int rank; /* 0 embeddings, 1 body, 2 head */
    const char *name;
    uint32_t source;
} order_entry;

static int order_rank(const qc_recipe_entry *e, const char *name)
{
    /* A multi-token prediction layer has tables and a head of its own. */
    if (strstr(name, ".layers."))
        return 1;
    if (e->role == QC_ROLE_EMBEDDING)
        return 0;
    if (e->role == QC_ROLE_HEAD || strcmp(name, "model.norm.weight") == 0 ||
        strcmp(name, "transformer.ln_f.weight") == 0 || strcmp(name, "transformer.ln_f.bias") == 0)
        return 2;
    return 1;
}

static int compare_order(const void *pa, const void *pb)
{
    const order_entry *a = pa, *b = pb;
    if (a->rank != b->rank)
        return a->rank - b->rank;
    int c = qc_natural_compare(a->name, b->name);
    return c ? c : strcmp(a->name, b->name);
}

/* The dtype of the weight in the model, which it may be read in another than. */
static qc_dtype model_dtype(const qc_job *j)
{
    return j->entry->coded ? j->entry->coded->dtype : j->model_dtype;
}

qc_bnb_state qc_job_state_of(const qc_job *j)
{
    qc_dtype dtype = model_dtype(j);
    qc_bnb_state s = {.block_elems = j->block_elems,
                      .source_dtype = dtype == QC_DTYPE_F64 ? QC_DTYPE_F32 : dtype,
                      .ndim = 2,
                      .dims = {j->rows, j->cols},
                      .nested = j->nested,
                      .nested_block_elems = QC_NESTED_BLOCK};
    (void)snprintf(s.quant_type, sizeof s.quant_type, "%s", qc_schemes[j->scheme].quant_type);
    const qc_coded_weight *coded = j->entry->coded;
    if (coded || j->stack) {
        s.ndim = j->ndim;
        memcpy(s.dims, coded ? coded->dims : j->dims, j->ndim * sizeof *s.dims);
    }
    return s;
}

/* Makes the name of a role tensor that lies beside a weight. For "M.weight" it is "M.SCB": int8's
 * scale lies beside the weight, not below it. */
static void name_role_tensor(const qc_job *j, qc_role_tensor role, qc_out_tensor *t)
{
    t->st.name = j->name;
    size_t stem = strlen(j->name);
    int packed = qc_schemes[j->scheme].role_tensors >> QC_ROLE_TENSOR_SHAPE & 1;
    if (role == QC_ROLE_TENSOR_MAIN && !packed)
        return;
    t->suffix = role == QC_ROLE_TENSOR_MAIN ? "_packed" : role_suffix[role];
    if (role == QC_ROLE_TENSOR_SCB || role == QC_ROLE_TENSOR_FORMAT) {
        if (stem >= 6 && strcmp(j->name + stem - 6, "weight") == 0)
            stem -= 6;
        else
            t->suffix = role == QC_ROLE_TENSOR_SCB ? ".SCB" : ".weight_format";
    } else if (role == QC_ROLE_TENSOR_STATE) {
        t->suffix = qc_schemes[j->scheme].state_suffix;
    }
    t->stem_bytes = (uint32_t)stem;
}

static void shape_part(qc_out_tensor *t, qc_dtype dtype, unsigned ndim, const uint64_t *dims,
                       uint64_t align_bytes)
{
    t->st.dtype = dtype;
    t->st.ndim = ndim;
    if (ndim > 0)
        memcpy(t->st.dims, dims, ndim * sizeof *dims);
    t->align_bytes = align_bytes;
}

static void describe_codes(const qc_plan *p, const qc_job *j, qc_out_tensor *t)
{
    const qc_scheme_row *row = &qc_schemes[j->scheme];
    uint64_t unit = row->by_rows ? j->cols : qc_job_group_elems(j);
    uint64_t flat[] = {qc_scheme_code_bytes(j->scheme, j->elems), 1};
    uint64_t each = qc_dtype_bits(row->code_dtype) / 8;
    uint64_t matrix[] = {j->rows, qc_scheme_code_bytes(j->scheme, j->cols) / each};
    int keeps_rows =
        row->format == QC_FORMAT_COMPRESSED_TENSORS || (row->by_rows && !p->own_form && !j->stack);
    shape_part(t, row->code_dtype, 2, keeps_rows ? matrix : flat,
               unit ? qc_scheme_code_bytes(j->scheme, unit) : 1);
}

static void describe_main(const qc_plan *p, const qc_job *j, qc_out_tensor *t)
{
    const qc_recipe_entry *e = j->entry;
    qc_dtype dtype = e->out_dtype;
    uint64_t align = 1;
    if (qc_scheme_is_quantized(j->scheme)) {
        describe_codes(p, j, t);
        return;
    }
    if (j->scheme == QC_SCHEME_CAST) {
        /* Steps of a stack of experts come from whole blocks of MXFP4. */
        align = j->source_den / 8u * (j->stack ? QC_MXFP4_BLOCK : 1u);
    } else if (j->scheme == QC_SCHEME_DEQUANT) {
        /* Steps begin at a block, and so at a whole byte of codes. */
        uint64_t unit =
            qc_scheme_elems_per_scale(e->stored->stored_as, j->cols, e->stored->block_elems);
        align = unit ? unit * (qc_dtype_bits(dtype) / 8) : 1;
    } else {
        dtype = p->model->tensors[j->source].dtype;
    }
    shape_part(t, dtype, j->ndim, j->dims, align);
}

/* Describes a role tensor of a quantized weight but its codes. */
static void describe_beside(const qc_job *j, qc_role_tensor role, qc_out_tensor *t)
{
    switch (role) {
    case QC_ROLE_TENSOR_ABSMAX:
        shape_part(t, j->nested ? QC_DTYPE_U8 : QC_DTYPE_F32, 1, &j->blocks, j->nested ? 1 : 4);
        break;
    case QC_ROLE_TENSOR_QUANT_MAP:
        shape_part(t, QC_DTYPE_F32, 1, (uint64_t[]){16}, 4);
        break;
    case QC_ROLE_TENSOR_NESTED_ABSMAX:
        shape_part(t, QC_DTYPE_F32, 1, (uint64_t[]){qc_ceil_div_u64(j->blocks, QC_NESTED_BLOCK)},
                   4);
        break;
    case QC_ROLE_TENSOR_NESTED_MAP:
        shape_part(t, QC_DTYPE_F32, 1, (uint64_t[]){256}, 4);
        break;
    case QC_ROLE_TENSOR_STATE: {
        const qc_bnb_state s = qc_job_state_of(j);
        shape_part(t, QC_DTYPE_U8, 1, (uint64_t[]){qc_bnb_state_bytes(&s)}, 1);
        break;
    }
    case QC_ROLE_TENSOR_SCB:
        shape_part(t, QC_DTYPE_F32, j->ndim - 1, j->dims, 4);
        break;
    case QC_ROLE_TENSOR_FORMAT:
        shape_part(t, QC_DTYPE_U8, 0, NULL, 1);
        break;
    case QC_ROLE_TENSOR_SCALE: {
        const uint64_t groups = j->block_elems ? j->cols / j->block_elems : 1;
        const qc_dtype dtype = qc_job_scale_dtype(j);
        shape_part(t, dtype, 2, (uint64_t[]){j->rows, groups}, qc_dtype_bits(dtype) / 8);
        break;
    }
    case QC_ROLE_TENSOR_SHAPE:
        shape_part(t, QC_DTYPE_I64, 1, (uint64_t[]){2}, 8);
        break;
    case QC_ROLE_TENSOR_MAIN:
    case QC_ROLE_TENSOR_COUNT:
        break;
    }
}

static void describe(const void *ctx, uint32_t i, qc_out_tensor *t)
{
    const qc_plan *p = ctx;
    const qc_output *o = &p->outputs[i];
    const qc_job *j = &p->jobs[o->job];
    name_role_tensor(j, o->role, t);
    t->group = o->job;
    t->device = j->device;
    if (o->role == QC_ROLE_TENSOR_MAIN)
        describe_main(p, j, t);
    else
        describe_beside(j, o->role, t);
}

static uint64_t bytes_of(const qc_out_tensor *t)
{
    uint64_t elems = 1;
    for (unsigned i = 0; i < t->st.ndim; i++)
        elems *= t->st.dims[i]; /* checked when the tensor was made */
    return elems * qc_dtype_bits(t->st.dtype) / 8;
}

qc_out_tensors qc_plan_tensors(const qc_plan *p)
{
    return (qc_out_tensors){describe, p, p->tensor_count};
}

qc_out_tensor qc_plan_tensor(const qc_plan *p, uint32_t i)
{
    return qc_layout_place(&p->layout, qc_plan_tensors(p), i);
}

/* There are fewer than 2^28 jobs; qc_plan_begin makes sure of it. */
static qc_output output_of(uint32_t job, qc_role_tensor role)
{
    return (qc_output){job & 0xfffffffu, (uint32_t)role & 15u};
}

static qc_status add_output(qc_plan *p, uint32_t job, qc_role_tensor role, qc_error *err)
{
    qc_job *j = &p->jobs[job];
    uint32_t i = p->tensor_count++;
    qc_out_tensor t;
    uint64_t bytes = 0;
    p->outputs[i] = output_of(job, role);
    j->outputs[role] = i;
    memset(&t, 0, sizeof t);
    describe(p, i, &t);
    QC_TRY(qc_shape_bytes(t.st.dims, t.st.ndim, t.st.dtype, &bytes, err));
    p->tensor_bytes += bytes;
    if (qc_scheme_is_quantized(j->scheme))
        p->quantized_bytes += bytes;
    return QC_OK;
}

/* Does the job have this role tensor? */
static int has_role(const qc_job *j, qc_role_tensor role)
{
    int nested = role == QC_ROLE_TENSOR_NESTED_ABSMAX || role == QC_ROLE_TENSOR_NESTED_MAP;
    return qc_schemes[j->scheme].role_tensors >> role & 1 && (j->nested || !nested);
}

static qc_status add_outputs(qc_plan *p, uint32_t job, qc_error *err)
{
    for (int role = 0; role < QC_ROLE_TENSOR_COUNT; role++) {
        if (has_role(&p->jobs[job], (qc_role_tensor)role))
            QC_TRY(add_output(p, job, (qc_role_tensor)role, err));
    }
    return QC_OK;
}

/* Finds the weight's shape as it is written, and in *bits how many bits an element has in the
 * source. A stack of experts in 16 bits is written in transformers' layout, [experts, in, out]. */
static qc_status shape_job(qc_plan *p, qc_job *j, unsigned *bits, qc_error *err)
{
    const qc_checkpoint_tensor *src = &p->model->tensors[j->source];
    const qc_recipe_entry *e = j->entry;
    const qc_coded_weight *coded = e->scheme != QC_SCHEME_KEEP ? e->coded : NULL;
    *bits = qc_dtype_bits(src->dtype);
    j->ndim = (unsigned char)src->ndim;
    j->dims = src->dims;
    if (e->scheme == QC_SCHEME_DEQUANT) {
        j->ndim = (unsigned char)e->stored->ndim;
        j->dims = e->stored->dims;
    } else if (coded) {
        j->name = coded->name;
        j->dtype = QC_DTYPE_F32;
        *bits = qc_coded_bits(coded);
        j->ndim = (unsigned char)coded->ndim;
        j->dims = coded->dims;
    }
    QC_TRY(qc_shape_elems(j->dims, j->ndim, &j->elems, err));
    j->stack = j->ndim == 3 && (j->name != src->name || e->scheme == QC_SCHEME_DEQUANT ||
                                qc_scheme_is_quantized(e->scheme));
    int turned_source = e->transpose && e->scheme != QC_SCHEME_DEQUANT && !coded;
    if (j->ndim == 2 || j->stack) {
        /* This cannot overflow: elems did not, or is 0. */
        j->rows = j->dims[turned_source ? 1 : 0] * (j->stack ? j->dims[1] : 1);
        j->cols = j->dims[turned_source ? 0 : j->ndim - 1];
    } else {
        j->cols = j->elems;
    }
    /* The codes lie as [out, in], so what is decoded from them is transposed. */
    if (turned_source || (e->transpose && (j->stack || e->scheme == QC_SCHEME_DEQUANT))) {
        uint64_t *dims = NULL;
        QC_TRY(qc_arena_array(p->arena, &dims, j->ndim, err));
        memcpy(dims, j->dims, j->ndim * sizeof *dims);
        dims[j->ndim - 2] = j->dims[j->ndim - 1];
        dims[j->ndim - 1] = j->dims[j->ndim - 2];
        j->dims = dims;
    }
    return QC_OK;
}

static void source_ratio(qc_job *j, unsigned num, unsigned den)
{
    j->source_num = (uint8_t)num;
    j->source_den = (uint8_t)den;
}

static int can_be_searched(const qc_job *j)
{
    const qc_form_ops *ops = qc_schemes[j->scheme].form;
    return ops && ops->searchable;
}

/* How many matrices of a stack are calibrated by themselves: each expert's, and gate and up apart
 * where they lie one below the other. 0: they are not, as no text is given, or blocks are
 * shared. */
static uint64_t matrices_of(const qc_plan *p, const qc_job *j)
{
    if (!qc_calibrates(&p->options->calibrate) || !j->stack || !qc_scheme_is_quantized(j->scheme))
        return 0;
    const int both = qc_expert_names_of(p->model) && qc_ends_with(j->name, QC_EXPERTS_GATE_UP);
    const uint64_t count = j->dims[0] * (both ? 2 : 1), elems = j->elems / count;
    const uint32_t block = qc_schemes[j->scheme].by_rows ? 1 : j->entry->block_elems;
    return j->elems % count == 0 && elems % block == 0 && j->rows % count == 0 && elems % 2 == 0
               ? count
               : 0;
}

int qc_job_may_be_calibrated(const qc_plan *p, const qc_job *j)
{
    const int matrix = j->ndim == 2 && !j->stack;
    const int turned = j->entry->transpose, decoded = j->entry->coded || j->entry->stored;
    return qc_calibrates(&p->options->calibrate) && j->elems > 0 && can_be_searched(j) &&
           (matrix ? !(turned && decoded) : !turned && matrices_of(p, j) > 0);
}

/* How scales that are not calibrated are found. Calibrated scales are laid out like searched ones,
 * group by group, and at this point nobody knows yet which weights are calibrated. */
static qc_scale_method scale_of(const qc_plan *p, const qc_job *j)
{
    qc_scale_method scale = p->options->recipe.scale;
    if (!can_be_searched(j))
        return QC_SCALE_ABSMAX;
    return scale == QC_SCALE_ABSMAX && qc_job_may_be_calibrated(p, j) ? QC_SCALE_SEARCH : scale;
}

/* Only a scheme with blocks has these. */
static void set_blocks(qc_job *j, uint32_t block_elems, int nested)
{
    if (qc_schemes[j->scheme].by_rows)
        return;
    j->block_elems = block_elems;
    j->blocks = qc_ceil_div_u64(j->elems, block_elems);
    j->nested = nested && !qc_schemes[j->scheme].form->integer;
}

static qc_status add_job(qc_plan *p, uint32_t source, qc_error *err)
{
    const qc_checkpoint_tensor *src = &p->model->tensors[source];
    const qc_recipe_entry *e = &p->recipe->entries[source];
    uint32_t job = p->job_count++;
    qc_job *j = &p->jobs[job];
    unsigned bits = 0;
    j->source = source;
    j->entry = e;
    j->scheme = e->scheme;
    j->rows = 1;
    j->name = src->name;
    j->dtype = src->dtype;
    j->model_dtype = qc_checkpoint_dtype(src);
    if (src->change && e->coded && e->scheme == QC_SCHEME_KEEP)
        QC_FAIL(
            err, QC_ERR_UNSUPPORTED,
            "tensor '%s' would stay in %s, into which no adapter can be merged; quantize it, or "
            "use --to bf16",
            src->name, qc_dtype_name(src->dtype));
    for (int i = 0; i < QC_ROLE_TENSOR_COUNT; i++)
        j->outputs[i] = QC_NO_OUTPUT;
    QC_TRY(shape_job(p, j, &bits, err));
    p->source_bytes += qc_checkpoint_bytes(src);
    if (j->elems == 0 && e->scheme != QC_SCHEME_DEQUANT)
        j->scheme = QC_SCHEME_KEEP;
    if (qc_schemes[j->scheme].by_rows && j->cols > QC_FRAME_MAX_BYTES)
        QC_FAIL(err, QC_ERR_SHAPE,
                "tensor '%s': rows of %" PRIu64 " weights are longer than row-wise int8 supports "
                "(%u); use --block-size, or --keep '%s'",
                src->name, j->cols, QC_FRAME_MAX_BYTES, src->name);
    unsigned out_bits = qc_schemes[j->scheme].bits;
    if (out_bits) {
        j->scale = scale_of(p, j);
        set_blocks(j, e->block_elems, p->options->recipe.double_quant);
        p->weights_quantized += j->elems;
        source_ratio(j, bits, out_bits);
    } else if (j->scheme == QC_SCHEME_CAST) {
        source_ratio(j, bits, qc_dtype_bits(e->out_dtype));
    } else if (j->scheme == QC_SCHEME_DEQUANT) {
        unsigned per_byte = 8 / qc_schemes[e->stored->stored_as].bits;
        source_ratio(j, 1, per_byte * qc_dtype_bits(e->out_dtype) / 8);
    } else {
        source_ratio(j, 1, 1);
    }
    return add_outputs(p, job, err);
}

/* Names a form that bitsandbytes does not have: block-wise int8, stacks of experts, NF4 beside
 * int8, or either of them beside weights that stay in FP8, MXFP4 or integers. The codes of such a
 * form never have the shape of the weight: a loader that does not know quant_method "qconv"
 * (transformers warns and goes on) would otherwise take them for the weights. */
static qc_status name_own_form(qc_plan *p, qc_error *err)
{
    enum { CODINGS = QC_SCHEME_COUNT, KINDS = CODINGS + QC_CODING_COUNT };
    int has[KINDS] = {0}, own = 0, quantized = 0;
    unsigned formats = 0;
    for (size_t i = 0; i < p->model->tensor_count; i++) {
        const qc_recipe_entry *e = &p->recipe->entries[i];
        const qc_coded_weight *c = e->coded;
        int kept = e->scheme == QC_SCHEME_KEEP && !(c && c->scales == UINT32_MAX);
        qc_dtype dtype = p->model->tensors[i].dtype;
        int mxfp4 = c && c->coding == QC_CODING_MXFP4;
        has[e->scheme] = 1;
        has[CODINGS + QC_CODING_FP8] |=
            kept && (dtype == QC_DTYPE_F8_E4M3 || dtype == QC_DTYPE_F8_E5M2);
        if (c && c->coding != QC_CODING_FP8)
            has[CODINGS + c->coding] |= kept;
        own |= qc_scheme_is_quantized(e->scheme) && mxfp4; /* a stack */
    }
    const char *text = "";
    for (int k = 0; k < KINDS; k++) {
        const qc_scheme_row *row = k < QC_SCHEME_COUNT ? &qc_schemes[k] : NULL;
        if (!has[k] || (row && !row->bits))
            continue;
        quantized += row != NULL;
        own |= !row || row->format == QC_FORMAT_OWN;
        formats |= row ? 1u << row->format : 0;
        QC_TRY(qc_arena_printf(p->arena, &text, err, "%s%s%s", text, *text ? "+" : "",
                               row ? row->name : qc_coding_name((qc_coding)(k - CODINGS))));
    }
    const int compressed_tensors = formats == 1u << QC_FORMAT_COMPRESSED_TENSORS;
    own |= quantized > 1 && !compressed_tensors;
    if (own && compressed_tensors)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%s would become %s, and compressed-tensors holds nothing else beside its "
                "integers; choose --to nf4, or --to bf16 first",
                p->model->path, text);
    if (quantized > 0 && own)
        p->own_form = text;
    return QC_OK;
}

uint64_t qc_plan_tensor_bytes(const qc_plan *p, uint32_t tensor)
{
    qc_out_tensor t = {0};
    describe(p, tensor, &t);
    return bytes_of(&t);
}

uint64_t qc_job_group_elems(const qc_job *j)
{
    int shared = j->scale != QC_SCALE_ABSMAX && j->nested;
    return (uint64_t)j->block_elems * (shared ? QC_NESTED_BLOCK : 1);
}

int qc_job_has_sample(const qc_job *j)
{
    return j->scale != QC_SCALE_ABSMAX && j->nested && qc_schemes[j->scheme].samples_offset;
}

/* The bytes of all role tensors of a quantized weight of which only the shape is known. */
static uint64_t quantized_bytes(qc_job *j, uint32_t block_elems, int nested)
{
    uint64_t bytes = qc_scheme_code_bytes(j->scheme, j->elems);
    set_blocks(j, block_elems, nested);
    for (int role = QC_ROLE_TENSOR_MAIN + 1; role < QC_ROLE_TENSOR_COUNT; role++) {
        qc_out_tensor t = {0};
        if (!has_role(j, (qc_role_tensor)role))
            continue;
        describe_beside(j, (qc_role_tensor)role, &t);
        bytes += bytes_of(&t);
    }
    return bytes;
}

uint64_t qc_plan_source_share(const qc_plan *p, const qc_job *j, uint64_t n)
{
    uint64_t all = p->model->tensors[j->source].bytes;
    uint64_t share = qc_ceil_div_u64(n * j->source_num, j->source_den);
    share = share < all ? share : all; /* an odd number of nibbles is rounded up */
    return j->entry->coded ? share
                           : share * qc_dtype_bits(j->model_dtype) / qc_dtype_bits(j->dtype);
}

int qc_job_source_is_shared(const qc_job *j)
{
    const qc_coded_weight *w = j->entry->coded;
    return w && qc_coding_is_integer(w->coding) && j->scheme != QC_SCHEME_KEEP;
}

uint64_t qc_plan_source_piece(const qc_plan *p, uint32_t tensor)
{
    const qc_job *j = &p->jobs[p->outputs[tensor].job];
    const qc_out_tensor made = qc_plan_tensor(p, tensor), *o = &made;
    uint64_t pieces = o->piece_bytes ? qc_ceil_div_u64(o->st.end - o->st.begin, o->piece_bytes) : 0;
    if (qc_job_source_is_shared(j) && pieces > 0)
        return qc_ceil_div_u64(p->model->tensors[j->source].bytes, pieces);
    /* Rounded up: of an odd number of nibbles the last byte is read whole. */
    return qc_ceil_div_u64(o->piece_bytes * j->source_num, j->source_den);
}

/* job_of has one element for each tensor of the source. */
static void count_absorbed(qc_plan *p, const uint32_t *job_of)
{
    for (size_t i = 0; i < p->model->tensor_count; i++) {
        const qc_recipe_entry *e = &p->recipe->entries[i];
        if (e->scheme != QC_SCHEME_ABSORBED || e->owner == UINT32_MAX ||
            p->recipe->entries[e->owner].scheme == QC_SCHEME_ABSORBED)
            continue;
        p->jobs[job_of[e->owner]].absorbed_bytes += p->model->tensors[i].bytes;
        p->source_bytes += p->model->tensors[i].bytes;
    }
}

uint64_t qc_plan_weight_bytes(uint64_t rows, uint64_t cols, qc_dtype dtype, qc_scheme scheme,
                              uint32_t block_elems, int nested)
{
    const qc_recipe_entry entry = {.coded = NULL};
    const uint64_t dims[] = {rows, cols};
    qc_job j = {.entry = &entry,
                .dims = dims,
                .elems = rows * cols,
                .rows = rows,
                .cols = cols,
                .scheme = scheme,
                .dtype = dtype,
                .model_dtype = dtype,
                .ndim = 2};
    if (!qc_scheme_is_quantized(scheme))
        return j.elems * (qc_dtype_bits(dtype) / 8);
    return quantized_bytes(&j, block_elems, nested);
}

uint64_t qc_plan_coded_bytes(const qc_coded_weight *w, qc_scheme scheme, uint32_t block_elems,
                             int nested)
{
    const qc_recipe_entry entry = {.coded = w};
    uint64_t cols = w->dims[w->ndim - 1], rows = w->dims[0] * (w->ndim == 3 ? w->dims[1] : 1);
    qc_job j = {.entry = &entry,
                .dims = w->dims,
                .elems = rows * cols,
                .rows = rows,
                .cols = cols,
                .scheme = scheme,
                .ndim = w->ndim & 0xff};
    return quantized_bytes(&j, block_elems, nested);
}

/* order and job_of are scratch memory with one element for each tensor of the source. */
static qc_status make_jobs(qc_plan *p, order_entry *order, uint32_t *job_of, qc_error *err)
{
    const qc_checkpoint_tensor *tensors = p->model->tensors;
    uint32_t jobs = 0, outputs = 0;
    for (uint32_t i = 0; i < p->model->tensor_count; i++) {
        const qc_recipe_entry *e = &p->recipe->entries[i];
        if (e->scheme == QC_SCHEME_ABSORBED)
            continue;
        order[jobs++] = (order_entry){order_rank(e, tensors[i].name), tensors[i].name, i};
        outputs += (unsigned)__builtin_popcount(qc_schemes[e->scheme].role_tensors);
    }
    qsort(order, jobs, sizeof *order, compare_order);
    QC_TRY(qc_arena_array(p->arena, &p->jobs, jobs, err));
    QC_TRY(qc_arena_array(p->arena, &p->outputs, outputs, err));
    for (uint32_t i = 0; i < jobs; i++) {
        job_of[order[i].source] = i;
        QC_TRY(add_job(p, order[i].source, err));
    }
    count_absorbed(p, job_of);
    return QC_OK;
}

qc_status qc_plan_begin(qc_plan *out, qc_arena *arena, const qc_checkpoint *model,
                        const qc_recipe *recipe, const qc_call *call,
                        const qc_plan_options *options, qc_error *err)
{
    qc_plan *p = out;
    memset(p, 0, sizeof *p);
    p->arena = arena;
    p->model = model;
    p->recipe = recipe;
    p->call = call;
    p->options = options;
    const uint32_t most = (1u << 28) - 1; /* all role tensors fit in 32 bits, too */
    if (model->tensor_count > most)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s has %zu tensors, and at most %u are converted",
                model->path, model->tensor_count, most);
    order_entry *order = NULL;
    uint32_t *job_of = NULL;
    QC_TRY(name_own_form(p, err));
    QC_TRY(qc_malloc(&order, model->tensor_count * sizeof *order, err));
    qc_status st = qc_malloc(&job_of, model->tensor_count * sizeof *job_of, err);
    if (st == QC_OK)
        st = make_jobs(p, order, job_of, err);
    qc_free(job_of);
    qc_free(order);
    return st;
}

/* Jobs come layer by layer, in the order in which devices take them; only a tied head, a vision
 * tower or spilled layers stand elsewhere. It is worth knowing, because a copy of all jobs is most
 * of a plan's memory. */
static int is_in_device_order(const qc_plan *p)
{
    for (uint32_t i = 1; i < p->job_count; i++) {
        if (p->jobs[i].device < p->jobs[i - 1].device)
            return 0;
    }
    return 1;
}

/* Moves job `from` to the end of the new array, and its tensors behind those that are there. */
static void move_job(qc_plan *p, const qc_job *from)
{
    qc_job *j = &p->jobs[p->job_count];
    *j = *from;
    for (int role = 0; role < QC_ROLE_TENSOR_COUNT; role++) {
        if (j->outputs[role] == QC_NO_OUTPUT)
            continue;
        p->outputs[p->tensor_count] = output_of(p->job_count, (qc_role_tensor)role);
        j->outputs[role] = p->tensor_count++;
    }
    p->job_count++;
}

qc_status qc_plan_set_devices(qc_plan *p, const uint32_t *device_of, const char **names,
                              uint32_t count, uint64_t context, qc_error *err)
{
    for (uint32_t i = 0; i < p->job_count; i++) {
        qc_job *j = &p->jobs[i];
        j->device = device_of[j->source];
        if (j->device >= count)
            QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s' has no device",
                    p->model->tensors[j->source].name);
    }
    p->device_names = names;
    p->device_count = count;
    p->placed_context = context;
    if (is_in_device_order(p))
        return QC_OK;
    const qc_job *old = p->jobs;
    uint32_t jobs = p->job_count;
    QC_TRY(qc_arena_array(p->arena, &p->jobs, jobs, err));
    p->job_count = p->tensor_count = 0;
    for (uint32_t d = 0; d < count; d++) {
        for (uint32_t i = 0; i < jobs; i++) {
            if (old[i].device == d)
                move_job(p, &old[i]);
        }
    }
    return QC_OK;
}

/* Gives numbers to the matrices of stacks. */
static qc_status number_matrices(qc_plan *p, qc_error *err)
{
    uint64_t next = p->job_count;
    p->first_matrix = NULL;
    if (!qc_calibrates(&p->options->calibrate))
        return QC_OK;
    QC_TRY(qc_arena_array(p->arena, &p->first_matrix, (size_t)p->job_count + 1, err));
    for (uint32_t i = 0; i < p->job_count; i++) {
        const qc_job *j = &p->jobs[i];
        p->first_matrix[i] = (uint32_t)next;
        next += j->stack && qc_job_may_be_calibrated(p, j) ? matrices_of(p, j) : 0;
        if (next >= UINT32_MAX)
            QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s has too many experts to be calibrated",
                    p->model->path);
    }
    p->first_matrix[p->job_count] = (uint32_t)next;
    return QC_OK;
}

qc_status qc_plan_lay_out(qc_plan *p, qc_error *err)
{
    QC_TRY(number_matrices(p, err));
    QC_TRY(qc_layout_make(&p->layout, p->arena, qc_plan_tensors(p), p->model->stem,
                          p->options->max_shard_bytes, err));
    for (uint32_t i = 0; i < p->layout.count; i++)
        p->content_bytes += p->layout.shards[i].header_bytes + p->layout.shards[i].data_bytes;
    return QC_OK;
}

qc_status qc_plan_make(qc_plan *out, qc_arena *arena, const qc_checkpoint *model,
                       const qc_recipe *recipe, const qc_call *call, const qc_plan_options *options,
                       qc_error *err)
{
    QC_TRY(qc_plan_begin(out, arena, model, recipe, call, options, err));
    return qc_plan_lay_out(out, err);
}

qc_dtype qc_job_scale_dtype(const qc_job *j)
{
    return qc_scheme_scale_dtype(model_dtype(j));
}

qc_form qc_job_form(const qc_job *j)
{
    qc_form form = qc_scheme_form(j->scheme, j->cols, j->block_elems, j->nested);
    form.scale_dtype = qc_job_scale_dtype(j);
    return form;
}

int qc_job_suits_gpu(const qc_job *j)
{
    return qc_scheme_is_quantized(j->scheme) &&
           (j->dtype == QC_DTYPE_F32 || j->dtype == QC_DTYPE_F16 || j->dtype == QC_DTYPE_BF16);
}

uint64_t qc_plan_gpu_bytes(const qc_plan *plan)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < plan->job_count; i++)
        if (qc_job_suits_gpu(&plan->jobs[i]))
            bytes += plan->model->tensors[plan->jobs[i].source].bytes;
    return bytes;
}
