/* How the output is laid out.
 *
 * The output order decides the shard of a tensor: embeddings come first, then everything by name,
 * with numbers compared as numbers, then the final norm and the head. So layers stay together, and
 * a device that holds a run of layers needs a run of shards. A weight and its derived tensors
 * always stay together. If there are devices, tensors are sorted by device first and have this
 * order within each. Within a shard the order is that of the reference writer. */
#include "convert/plan/plan.h"
#include "convert/model/awq_layout.h"
#include "convert/model/expert_split.h"
#include "convert/model/recipe_coded.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "convert/term/console.h"
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
    "SCB", "weight_format", "_scale",     "_shape",         "qzeros",
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

qc_bnb_state qc_job_state_of(const qc_job *j)
{
    const qc_dtype dtype = j->model_dtype;
    qc_bnb_state s = {.block_elems = j->form.block_elems,
                      .source_dtype = dtype == QC_DTYPE_F64 ? QC_DTYPE_F32 : dtype,
                      .ndim = 2,
                      .dims = {j->rows, j->form.cols},
                      .nested = j->form.nested,
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
    if (qc_schemes[j->scheme].format == QC_FORMAT_AWQ) {
        t->suffix = role == QC_ROLE_TENSOR_MAIN    ? "qweight"
                    : role == QC_ROLE_TENSOR_SCALE ? "scales"
                                                   : role_suffix[role];
        t->stem_bytes = (uint32_t)(stem - strlen("weight"));
        return;
    }
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
    uint64_t flat[] = {qc_form_code_bytes(&j->form, j->elems), 1};
    uint64_t each = qc_dtype_bits(row->code_dtype) / 8;
    uint64_t matrix[] = {j->rows, qc_form_row_bytes(&j->form) / each};
    if (j->by_groups) { /* pieces are whole groups of all rows */
        shape_part(t, row->code_dtype, 2, (uint64_t[]){j->form.cols, j->rows / QC_AWQ_ROWS},
                   j->rows * j->form.block_elems / 2);
        return;
    }
    int keeps_rows =
        row->format == QC_FORMAT_COMPRESSED_TENSORS || (row->by_rows && !p->own_form && !j->stack);
    shape_part(t, row->code_dtype, 2, keeps_rows ? matrix : flat,
               qc_form_code_bytes(&j->form, j->group_elems));
}

static void describe_main(const qc_plan *p, const qc_job *j, qc_out_tensor *t)
{
    const qc_recipe_entry *e = j->entry;
    qc_dtype dtype = e->out_dtype;
    uint64_t align = 1;
    if (j->form.ops) {
        describe_codes(p, j, t);
        return;
    }
    if (j->scheme == QC_SCHEME_CAST) {
        /* Steps of a stack of experts come from whole blocks of MXFP4. */
        align = j->source_den / 8u * (j->stack ? QC_MXFP4_BLOCK : 1u);
    } else if (j->scheme == QC_SCHEME_DEQUANT) {
        /* Frames begin at a block, and so at a whole byte of codes. */
        align = j->elems ? j->group_elems * (qc_dtype_bits(dtype) / 8) : 1;
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
        shape_part(t, j->form.nested ? QC_DTYPE_U8 : QC_DTYPE_F32, 1, &j->scales,
                   j->form.nested ? 1 : 4);
        break;
    case QC_ROLE_TENSOR_QUANT_MAP:
        shape_part(t, QC_DTYPE_F32, 1, (uint64_t[]){16}, 4);
        break;
    case QC_ROLE_TENSOR_NESTED_ABSMAX:
        shape_part(t, QC_DTYPE_F32, 1, (uint64_t[]){qc_ceil_div_u64(j->scales, QC_NESTED_BLOCK)},
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
        const uint64_t groups = j->form.block_elems ? j->form.cols / j->form.block_elems : 1;
        const qc_dtype dtype = j->form.scale_dtype;
        uint64_t shape[] = {j->rows, groups};
        if (j->by_groups)
            memcpy(shape, (uint64_t[]){groups, j->rows}, sizeof shape);
        shape_part(t, dtype, 2, shape, qc_dtype_bits(dtype) / 8);
        break;
    }
    case QC_ROLE_TENSOR_ZEROS:
        shape_part(t, QC_DTYPE_I32, 2,
                   (uint64_t[]){j->form.cols / j->form.block_elems, j->rows / QC_AWQ_ROWS}, 4);
        break;
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

/* Does the job have this role tensor? */
static int has_role(const qc_job *j, qc_role_tensor role)
{
    int nested = role == QC_ROLE_TENSOR_NESTED_ABSMAX || role == QC_ROLE_TENSOR_NESTED_MAP;
    return qc_schemes[j->scheme].role_tensors >> role & 1 && (j->form.nested || !nested);
}

static qc_status add_outputs(qc_plan *p, uint32_t job, qc_error *err)
{
    qc_job *j = &p->jobs[job];
    j->first_output = p->tensor_count;
    for (int role = 0; role < QC_ROLE_TENSOR_COUNT; role++) {
        qc_out_tensor t = {0};
        uint64_t bytes = 0;
        if (!has_role(j, (qc_role_tensor)role))
            continue;
        j->roles = (uint16_t)(j->roles | 1u << role);
        p->outputs[p->tensor_count] = output_of(job, (qc_role_tensor)role);
        describe(p, p->tensor_count++, &t);
        QC_TRY(qc_shape_bytes(t.st.dims, t.st.ndim, t.st.dtype, &bytes, err));
        p->tensor_bytes += bytes;
        p->quantized_bytes += j->form.ops ? bytes : 0;
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
    j->ndim = src->ndim & 15u;
    j->dims = src->dims;
    if (e->scheme == QC_SCHEME_DEQUANT) {
        j->dtype = QC_DTYPE_F32;
        j->ndim = e->stored->ndim & 15u;
        j->dims = e->stored->dims;
    } else if (coded) {
        j->name = coded->name;
        j->shares_source = qc_coding_is_packed(coded->coding) != 0;
        j->dtype = QC_DTYPE_F32;
        *bits = qc_coded_bits(coded);
        j->ndim = coded->ndim & 15u;
        j->dims = coded->dims;
    }
    QC_TRY(qc_shape_elems(j->dims, j->ndim, &j->elems, err));
    j->stack = j->ndim == 3 && (j->name != src->name || e->scheme == QC_SCHEME_DEQUANT ||
                                qc_scheme_is_quantized(e->scheme));
    int turned_source = e->transpose && e->scheme != QC_SCHEME_DEQUANT && !coded;
    if (j->ndim == 2 || j->stack) {
        /* This cannot overflow: elems did not, or is 0. */
        j->form.cols = j->dims[j->ndim - (turned_source ? 2 : 1)];
        j->rows = j->form.cols ? j->elems / j->form.cols : 0;
    } else {
        j->form.cols = j->elems;
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

/* How many matrices of a stack are calibrated by themselves: each expert's, and gate and up apart
 * where they lie one below the other. 0: they are not, as no text is given, or blocks are
 * shared. */
static uint64_t matrices_of(const qc_plan *p, const qc_job *j)
{
    if (!qc_calibrates(&p->options->calibrate) || !j->stack || !qc_scheme_is_quantized(j->scheme))
        return 0;
    const int both = qc_experts_names(p->model) && qc_ends_with(j->name, QC_EXPERTS_GATE_UP);
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
    return qc_calibrates(&p->options->calibrate) && j->elems > 0 &&
           qc_scheme_is_quantized(j->scheme) &&
           (matrix ? !(turned && decoded) : !turned && matrices_of(p, j) > 0);
}

/* How scales that are not calibrated are found. Calibrated scales are laid out like searched ones,
 * group by group, and at this point nobody knows yet which weights are calibrated. */
static qc_scale_method scale_of(const qc_plan *p, const qc_job *j)
{
    qc_scale_method scale = p->options->recipe.scale;
    if (!qc_scheme_is_quantized(j->scheme))
        return QC_SCALE_ABSMAX;
    return scale == QC_SCALE_ABSMAX && qc_job_may_be_calibrated(p, j) ? QC_SCALE_SEARCH : scale;
}

void qc_job_set_form(qc_job *j, qc_scheme scheme, uint32_t block_elems, int nested)
{
    const int by_rows = qc_schemes[scheme].by_rows;
    j->scheme = scheme;
    nested = nested && !by_rows && !qc_schemes[scheme].form->integer;
    j->form = qc_scheme_form(scheme, j->form.cols, block_elems, nested);
    j->by_groups = qc_schemes[scheme].format == QC_FORMAT_AWQ;
    j->form.scale_dtype = j->by_groups ? QC_DTYPE_F16 : qc_scheme_scale_dtype(j->model_dtype);
    j->scales = by_rows ? j->rows : qc_ceil_div_u64(j->elems, block_elems);
}

uint64_t qc_job_source_bytes(const qc_job *j, uint64_t n)
{
    if (j->form.ops)
        return qc_ceil_div_u64(qc_form_code_elems(&j->form, n) * j->source_num, 8);
    return qc_ceil_div_u64(n * j->source_num, j->source_den);
}

uint64_t qc_job_elems(const qc_job *j, uint64_t n)
{
    /* The last byte may not be full. */
    return j->form.ops ? qc_min_u64(qc_form_code_elems(&j->form, n), j->elems)
                       : n * 8 / qc_dtype_bits(j->entry->out_dtype);
}

/* Says what stays together, and how much of the source is read at a time. */
static void set_steps(qc_job *j)
{
    const uint64_t each = qc_dtype_bits(j->dtype) / 8, n = each ? QC_SOURCE_STEP_BYTES / each : 1;
    const int shared = j->scale != QC_SCALE_ABSMAX && j->form.nested;
    uint64_t group = 1;
    if (j->form.ops)
        group = qc_form_scale_elems(&j->form) * (shared ? QC_NESTED_BLOCK : 1);
    if (j->scheme == QC_SCHEME_DEQUANT && j->elems > 0) {
        const qc_stored_weight *s = j->entry->stored;
        const qc_form stored = qc_scheme_form(s->stored_as, j->form.cols, s->block_elems, 0);
        group = qc_form_scale_elems(&stored);
    }
    j->group_elems = (uint32_t)qc_min_u64(group, UINT32_MAX);
    j->step_elems = n < group ? j->group_elems : (uint32_t)(n - n % group);
    j->has_sample = shared && qc_schemes[j->scheme].samples_offset;
}

static qc_status add_job(qc_plan *p, uint32_t source, qc_error *err)
{
    const qc_checkpoint_tensor *src = &p->model->tensors[source];
    const qc_recipe_entry *e = &p->recipe->entries[source];
    uint32_t job = p->job_count++;
    qc_job *j = &p->jobs[job];
    unsigned bits = 0, den = 1;
    *j = (qc_job){.entry = e,
                  .name = src->name,
                  .rows = 1,
                  .source_bytes = src->bytes,
                  .source = source,
                  .scheme = e->scheme,
                  .dtype = src->dtype};
    j->model_dtype = qc_checkpoint_dtype(src);
    if (e->coded)
        j->model_dtype = e->coded->dtype;
    if (src->change && e->coded && e->scheme == QC_SCHEME_KEEP)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "tensor '%s' would stay in %s, into which no adapter can be merged; quantize it, "
                "or use --to bf16",
                src->name, qc_dtype_name(src->dtype));
    QC_TRY(shape_job(p, j, &bits, err));
    p->source_bytes += qc_checkpoint_bytes(src);
    if (j->elems == 0 && e->scheme != QC_SCHEME_DEQUANT)
        j->scheme = QC_SCHEME_KEEP;
    if (qc_schemes[j->scheme].by_rows && j->form.cols > QC_FRAME_MAX_BYTES)
        QC_FAIL(err, QC_ERR_SHAPE,
                "tensor '%s': rows of %" PRIu64 " weights are longer than row-wise int8 supports "
                "(%u); use --block-size, or --keep '%s'",
                src->name, j->form.cols, QC_FRAME_MAX_BYTES, src->name);
    if (qc_scheme_is_quantized(j->scheme)) {
        j->scale = scale_of(p, j);
        qc_job_set_form(j, j->scheme, e->block_elems, p->options->recipe.double_quant);
        p->weights_quantized += j->elems;
        den = 8;
        j->shares_source |= j->by_groups;
        if (j->by_groups && (j->rows % QC_AWQ_ROWS != 0 || !qc_ends_with(j->name, ".weight")))
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "tensor '%s': AWQ packs the codes of 8 outputs of a module into a word, and "
                    "this one has %" PRIu64 " outputs; --keep '%s', or use --format "
                    "compressed-tensors",
                    j->name, j->rows, j->name);
        if (j->by_groups && qc_sat_mul(j->rows, j->form.block_elems / 2) > QC_FRAME_MAX_BYTES)
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "tensor '%s': a group of %" PRIu32 " inputs of %" PRIu64 " outputs does not "
                    "fit a frame (%u bytes); use a smaller --block-size, or --keep '%s'",
                    j->name, j->form.block_elems, j->rows, QC_FRAME_MAX_BYTES, j->name);
    } else if (j->scheme == QC_SCHEME_CAST) {
        den = qc_dtype_bits(e->out_dtype);
    } else if (j->scheme == QC_SCHEME_DEQUANT) {
        bits = 1;
        den = 8 / qc_schemes[e->stored->stored_as].bits * qc_dtype_bits(e->out_dtype) / 8;
    } else {
        bits = 1;
    }
    j->source_num = (uint8_t)bits;
    j->source_den = (uint8_t)den;
    set_steps(j);
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
        has[CODINGS + QC_CODING_FP8] |= kept && e->owner == UINT32_MAX && qc_dtype_is_fp8(dtype);
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
    const int awq = formats == 1u << QC_FORMAT_AWQ;
    own |= quantized > 1 && !compressed_tensors;
    if (own && (compressed_tensors || awq))
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%s would become %s, and %s holds nothing else beside its integers; choose --to "
                "nf4, or --to bf16 first",
                p->model->path, text, awq ? "AWQ" : "compressed-tensors");
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

uint64_t qc_plan_job_bytes(const qc_plan *p, const qc_job *j)
{
    uint64_t bytes = 0;
    for (uint32_t t = j->first_output; t < j->first_output + qc_job_output_count(j); t++)
        bytes += qc_plan_tensor_bytes(p, t);
    return bytes;
}

uint64_t qc_plan_source_piece(const qc_plan *p, uint32_t tensor)
{
    const qc_job *j = &p->jobs[p->outputs[tensor].job];
    const qc_out_tensor made = qc_plan_tensor(p, tensor), *o = &made;
    uint64_t pieces = o->piece_bytes ? qc_ceil_div_u64(o->st.end - o->st.begin, o->piece_bytes) : 0;
    if (j->shares_source && pieces > 0)
        return qc_ceil_div_u64(j->source_bytes, pieces);
    return qc_job_source_bytes(j, o->piece_bytes);
}

uint64_t qc_plan_weight_bytes(const uint64_t *dims, unsigned ndim, qc_dtype dtype, qc_scheme scheme,
                              uint32_t block_elems, int nested)
{
    const qc_recipe_entry entry = {.coded = NULL};
    const uint64_t rows = dims[0] * (ndim == 3 ? dims[1] : 1), cols = dims[ndim - 1];
    qc_job j = {.entry = &entry,
                .dims = dims,
                .elems = rows * cols,
                .rows = rows,
                .form = {.cols = cols},
                .model_dtype = dtype,
                .ndim = ndim & 15u,
                .stack = ndim == 3};
    qc_job_set_form(&j, scheme, block_elems, nested);
    uint64_t bytes = qc_form_code_bytes(&j.form, j.elems);
    for (int role = QC_ROLE_TENSOR_MAIN + 1; role < QC_ROLE_TENSOR_COUNT; role++) {
        qc_out_tensor t = {0};
        if (!has_role(&j, (qc_role_tensor)role))
            continue;
        describe_beside(&j, (qc_role_tensor)role, &t);
        bytes += bytes_of(&t);
    }
    return bytes;
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
    for (size_t i = 0; i < p->model->tensor_count; i++) {
        const qc_recipe_entry *e = &p->recipe->entries[i];
        if (e->scheme != QC_SCHEME_ABSORBED || e->owner == UINT32_MAX ||
            p->recipe->entries[e->owner].scheme == QC_SCHEME_ABSORBED)
            continue;
        p->jobs[job_of[e->owner]].absorbed_bytes += tensors[i].bytes;
        p->source_bytes += tensors[i].bytes;
    }
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

qc_status qc_plan_set_devices(qc_plan *p, const uint32_t *device_of, const char **names,
                              uint32_t count, uint64_t context, qc_error *err)
{
    int in_order = 1;
    for (uint32_t i = 0; i < p->job_count; i++) {
        qc_job *j = &p->jobs[i];
        j->device = (uint16_t)device_of[j->source];
        if (device_of[j->source] >= count || count > UINT16_MAX)
            QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s' has no device",
                    p->model->tensors[j->source].name);
        in_order &= i == 0 || j->device >= p->jobs[i - 1].device;
    }
    p->device_names = names;
    p->device_count = count;
    p->placed_context = context;
    /* Jobs come layer by layer, in the order in which devices take them; only a tied head, a vision
     * tower or spilled layers stand elsewhere. It is worth knowing, because a copy of all jobs is
     * most of a plan's memory. */
    if (in_order)
        return QC_OK;
    const qc_job *old = p->jobs;
    uint32_t jobs = p->job_count;
    QC_TRY(qc_arena_array(p->arena, &p->jobs, jobs, err));
    p->job_count = p->tensor_count = 0;
    for (uint32_t d = 0; d < count; d++) {
        for (uint32_t i = 0; i < jobs; i++) {
            if (old[i].device != d)
                continue;
            qc_job *j = &p->jobs[p->job_count];
            *j = old[i];
            j->first_output = p->tensor_count;
            for (int role = 0; role < QC_ROLE_TENSOR_COUNT; role++)
                if (j->roles >> role & 1)
                    p->outputs[p->tensor_count++] = output_of(p->job_count, (qc_role_tensor)role);
            p->job_count++;
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

int qc_job_suits_gpu(const qc_job *j)
{
    return j->form.ops &&
           (j->dtype == QC_DTYPE_F32 || j->dtype == QC_DTYPE_F16 || j->dtype == QC_DTYPE_BF16);
}

uint64_t qc_plan_gpu_bytes(const qc_plan *plan)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < plan->job_count; i++)
        if (qc_job_suits_gpu(&plan->jobs[i]))
            bytes += plan->jobs[i].source_bytes;
    return bytes;
}

/* Linear weights, their elements, and which of those `block` leaves as they are. */
typedef struct {
    uint32_t weights, left;
    uint64_t elems, left_elems;
} linear_weights;

static linear_weights count_left(const qc_plan *p, uint32_t block)
{
    linear_weights n = {0};
    qc_recipe_options o = p->options->recipe;
    o.block_elems = block;
    for (uint32_t i = 0; i < p->job_count; i++) {
        const qc_job *j = &p->jobs[i];
        const qc_checkpoint_tensor *t = &p->model->tensors[j->source];
        if (j->entry->role != QC_ROLE_LINEAR || t->ndim != 2)
            continue;
        const int left = !qc_scheme_is_quantized(j->scheme) && qc_scheme_obstacle(&o, t->dims[1]);
        n.weights++;
        n.left += (uint32_t)left;
        n.elems += j->elems;
        n.left_elems += left ? j->elems : 0;
    }
    return n;
}

/* Names weights that have 4 bits or fewer already, before they get so few again. */
static void warn_again(const qc_plan *p, const char *model)
{
    enum { FEW_BITS = 4 };
    const qc_job *first = NULL;
    uint32_t count = 0;
    for (uint32_t i = 0; i < p->job_count; i++) {
        const qc_job *j = &p->jobs[i];
        if (!j->entry->coded || qc_coded_bits(j->entry->coded) > FEW_BITS || !j->form.ops ||
            j->form.ops->bits > FEW_BITS)
            continue;
        first = first ? first : j;
        count++;
    }
    if (first)
        qc_console_warn(p->call,
                        "%" PRIu32
                        " weight%s of %s %s in %s already ('%s' is the first), and %s is "
                        "a second rounding; a 16-bit original loses less, --to keep nothing",
                        count, qc_plural(count), model, qc_are(count),
                        qc_coding_name(first->entry->coded->coding), first->name,
                        qc_scheme_name(first->scheme));
}

qc_status qc_plan_check_quantizes(const qc_plan *p, const char *model, qc_error *err)
{
    const qc_recipe_options *o = &p->options->recipe;
    warn_again(p, model);
    if (!qc_to_quantizes(o->to) || o->to == QC_TO_AUTO)
        return QC_OK;
    if (p->weights_quantized == 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: it has no weight to quantize%s; --dry-run shows what becomes of each tensor, "
                "and --quantize names others",
                model,
                o->format == QC_FORMAT_COMPRESSED_TENSORS
                    ? " in whole groups, and --block-size 32 makes smaller ones"
                    : "");
    const uint32_t block = qc_scheme_block_of_options(o);
    const linear_weights now = count_left(p, block);
    if (now.left_elems <= now.elems / 2)
        return QC_OK;
    uint32_t smaller = block;
    while (smaller > 32 && count_left(p, smaller).left_elems > 0)
        smaller /= 2;
    const linear_weights then = count_left(p, smaller);
    char advice[96] = "";
    if (then.left < now.left)
        (void)snprintf(advice, sizeof advice, "; --block-size %u quantizes %u of them", smaller,
                       now.left - then.left);
    qc_console_warn(p->call,
                    "%u of %u linear weights stay as they are, because their rows are no whole "
                    "groups of %u%s",
                    now.left, now.weights, block, advice);
    return QC_OK;
}
