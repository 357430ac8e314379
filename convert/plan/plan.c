/* How the output is laid out.
 *
 * The output order decides the shard of a tensor: embeddings come first, then everything by name,
 * with numbers compared as numbers, then the final norm and the head. So layers stay together, and
 * a device that holds a run of layers needs a run of shards. A weight and its derived tensors
 * always stay together. If there are devices, tensors are sorted by device first and have this
 * order within each. Within a shard the order is that of the reference writer. */
#include "convert/plan/plan.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/term/glob.h"
#include "formats/seekable.h"
#include "quant/quant_decode.h"
#include "quant/quant_ops.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const part_suffix[QC_PART_COUNT] = {
    "",
    ".absmax",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    ".quant_state.bitsandbytes__nf4",
    "SCB",
    "weight_format",
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

static void fill_state(qc_bnb_state *s, qc_scheme scheme, qc_dtype source, uint64_t rows,
                       uint64_t cols, uint32_t block_elems, int nested)
{
    memset(s, 0, sizeof *s);
    (void)snprintf(s->quant_type, sizeof s->quant_type, "%s",
                   scheme == QC_SCHEME_NF4 ? "nf4" : "int8");
    s->block_elems = block_elems;
    s->dtype = source == QC_DTYPE_F64 ? QC_DTYPE_F32 : source;
    s->ndim = 2;
    s->dims[0] = rows;
    s->dims[1] = cols;
    s->nested = nested;
    s->nested_block_elems = QC_NESTED_BLOCK;
}

qc_bnb_state qc_job_state_of(const qc_job *j)
{
    const qc_coded_weight *coded = j->entry->coded;
    qc_bnb_state s;
    fill_state(&s, j->scheme, coded ? coded->dtype : j->dtype, j->rows, j->cols, j->block_elems,
               j->nested);
    if (coded) {
        s.ndim = coded->ndim;
        memcpy(s.dims, coded->dims, sizeof s.dims);
    }
    return s;
}

/* Makes the name of a role tensor that lies beside a weight. For "M.weight" it is "M.SCB": int8's
 * scale lies beside the weight, not below it. */
static void name_part(const qc_job *j, qc_part part, qc_out_tensor *t)
{
    t->st.name = j->name;
    if (part == QC_PART_MAIN)
        return;
    size_t stem = strlen(j->name);
    t->suffix = part_suffix[part];
    if (part == QC_PART_SCB || part == QC_PART_FORMAT) {
        if (stem >= 6 && strcmp(j->name + stem - 6, "weight") == 0)
            stem -= 6;
        else
            t->suffix = part == QC_PART_SCB ? ".SCB" : ".weight_format";
    } else if (part == QC_PART_STATE && j->scheme == QC_SCHEME_INT8_BLOCKS) {
        t->suffix = ".quant_state.qconv__int8";
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

static void describe_main(const qc_plan *p, const qc_job *j, qc_out_tensor *t)
{
    const qc_recipe_entry *e = j->entry;
    switch (j->scheme) {
    case QC_SCHEME_KEEP:
    case QC_SCHEME_ABSORBED:
        shape_part(t, p->model->tensors[j->source].dtype, j->ndim, j->dims, 1);
        break;
    case QC_SCHEME_CAST:
        /* Steps of a stack of experts come from whole blocks of MXFP4. */
        shape_part(t, e->out_dtype, j->ndim, j->dims,
                   j->source_den / 8u * (j->stack ? QC_MXFP4_BLOCK : 1u));
        break;
    case QC_SCHEME_DEQUANT: {
        /* Steps begin at a block, and so at a whole byte of codes. */
        uint64_t unit =
            e->stored->stored_as == QC_SCHEME_INT8_ROWS ? j->cols : e->stored->block_elems;
        shape_part(t, e->out_dtype, j->ndim, j->dims,
                   unit ? unit * (qc_dtype_bits(e->out_dtype) / 8) : 1);
        break;
    }
    case QC_SCHEME_NF4:
        shape_part(t, QC_DTYPE_U8, 2, (uint64_t[]){qc_ceil_div_u64(j->elems, 2), 1},
                   qc_job_group_elems(j) / 2);
        break;
    case QC_SCHEME_INT8_BLOCKS:
        shape_part(t, QC_DTYPE_I8, 2, (uint64_t[]){j->elems, 1}, qc_job_group_elems(j));
        break;
    case QC_SCHEME_INT8_ROWS:
        shape_part(t, QC_DTYPE_I8, 2,
                   (uint64_t[]){p->own_form ? j->elems : j->rows, p->own_form ? 1 : j->cols},
                   j->cols ? j->cols : 1);
        break;
    }
}

static void describe(const void *ctx, uint32_t i, qc_out_tensor *t)
{
    const qc_plan *p = ctx;
    const qc_output *o = &p->outputs[i];
    const qc_job *j = &p->jobs[o->job];
    name_part(j, o->part, t);
    t->group = o->job;
    t->device = j->device;
    switch (o->part) {
    case QC_PART_MAIN:
        describe_main(p, j, t);
        break;
    case QC_PART_ABSMAX:
        shape_part(t, j->nested ? QC_DTYPE_U8 : QC_DTYPE_F32, 1, &j->blocks, j->nested ? 1 : 4);
        break;
    case QC_PART_QUANT_MAP:
        shape_part(t, QC_DTYPE_F32, 1, (uint64_t[]){16}, 4);
        break;
    case QC_PART_NESTED_ABSMAX:
        shape_part(t, QC_DTYPE_F32, 1, (uint64_t[]){qc_ceil_div_u64(j->blocks, QC_NESTED_BLOCK)},
                   4);
        break;
    case QC_PART_NESTED_MAP:
        shape_part(t, QC_DTYPE_F32, 1, (uint64_t[]){256}, 4);
        break;
    case QC_PART_STATE: {
        const qc_bnb_state s = qc_job_state_of(j);
        shape_part(t, QC_DTYPE_U8, 1, (uint64_t[]){qc_bnb_state_bytes(&s)}, 1);
        break;
    }
    case QC_PART_SCB:
        shape_part(t, QC_DTYPE_F32, j->ndim - 1, j->dims, 4);
        break;
    case QC_PART_FORMAT:
        shape_part(t, QC_DTYPE_U8, 0, NULL, 1);
        break;
    case QC_PART_COUNT:
        break;
    }
}

qc_out_tensors qc_plan_tensors(const qc_plan *p)
{
    return (qc_out_tensors){describe, p, p->tensor_count};
}

qc_out_tensor qc_plan_tensor(const qc_plan *p, uint32_t i)
{
    return qc_layout_place(&p->layout, qc_plan_tensors(p), i);
}

/* There are fewer than 2^29 jobs; qc_plan_begin makes sure of it. */
static qc_output output_of(uint32_t job, qc_part part)
{
    return (qc_output){job & 0x1fffffffu, (uint32_t)part & 7u};
}

static qc_status add_output(qc_plan *p, uint32_t job, qc_part part, qc_error *err)
{
    qc_job *j = &p->jobs[job];
    uint32_t i = p->tensor_count++;
    qc_out_tensor t;
    uint64_t bytes = 0;
    p->outputs[i] = output_of(job, part);
    j->outputs[part] = i;
    memset(&t, 0, sizeof t);
    describe(p, i, &t);
    QC_TRY(qc_shape_bytes(t.st.dims, t.st.ndim, t.st.dtype, &bytes, err));
    p->tensor_bytes += bytes;
    if (j->scheme == QC_SCHEME_NF4 || j->scheme == QC_SCHEME_INT8_ROWS ||
        j->scheme == QC_SCHEME_INT8_BLOCKS)
        p->quantized_bytes += bytes;
    return QC_OK;
}

/* Adds the derived tensors of a block-quantized weight. */
static qc_status add_block_state(qc_plan *p, uint32_t job, qc_error *err)
{
    const qc_job *j = &p->jobs[job];
    QC_TRY(add_output(p, job, QC_PART_ABSMAX, err));
    if (j->scheme == QC_SCHEME_NF4)
        QC_TRY(add_output(p, job, QC_PART_QUANT_MAP, err));
    if (j->nested) {
        QC_TRY(add_output(p, job, QC_PART_NESTED_ABSMAX, err));
        QC_TRY(add_output(p, job, QC_PART_NESTED_MAP, err));
    }
    return add_output(p, job, QC_PART_STATE, err);
}

/* Finds the weight's shape as it is written, and in *bits how many bits an element has in the
 * source. A stack of experts in 16 bits is written in transformers' layout, [experts, in, out]. */
static qc_status shape_job(qc_plan *p, qc_job *j, unsigned *bits, qc_error *err)
{
    const qc_ckpt_tensor *src = &p->model->tensors[j->source];
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
        *bits = coded->coding == QC_CODING_MXFP4 ? 4 : 8;
        j->ndim = (unsigned char)coded->ndim;
        j->dims = coded->dims;
    }
    QC_TRY(qc_shape_elems(j->dims, j->ndim, &j->elems, err));
    j->stack = j->ndim == 3 && (j->name != src->name || e->scheme == QC_SCHEME_DEQUANT);
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
        void *v = NULL;
        QC_TRY(qc_arena_alloc(p->arena, &v, j->ndim, sizeof *j->dims, err));
        uint64_t *dims = v;
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

int qc_job_may_be_calibrated(const qc_plan *p, const qc_job *j)
{
    return qc_calibrates(&p->options->calibrate) && j->ndim == 2 && j->elems > 0 && !j->stack &&
           !j->entry->transpose &&
           (j->scheme == QC_SCHEME_NF4 || j->scheme == QC_SCHEME_INT8_ROWS ||
            j->scheme == QC_SCHEME_INT8_BLOCKS);
}

/* How scales that are not calibrated are found. Calibrated scales are laid out like searched ones,
 * group by group, and at this point nobody knows yet which weights are calibrated. */
static qc_scale_method scale_of(const qc_plan *p, const qc_job *j)
{
    qc_scale_method scale = p->options->recipe.scale;
    return scale == QC_SCALE_ABSMAX && qc_job_may_be_calibrated(p, j) ? QC_SCALE_SEARCH : scale;
}

static qc_status add_job(qc_plan *p, uint32_t source, qc_error *err)
{
    const qc_ckpt_tensor *src = &p->model->tensors[source];
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
    for (int i = 0; i < QC_PART_COUNT; i++)
        j->outputs[i] = QC_NO_OUTPUT;
    QC_TRY(shape_job(p, j, &bits, err));
    p->source_bytes += src->bytes;
    if (j->elems == 0 && e->scheme != QC_SCHEME_DEQUANT)
        j->scheme = QC_SCHEME_KEEP;
    if (j->scheme == QC_SCHEME_INT8_ROWS && j->cols > QC_FRAME_MAX_BYTES)
        QC_FAIL(err, QC_ERR_SHAPE,
                "tensor '%s': rows of %" PRIu64 " weights are longer than row-wise int8 supports "
                "(%u); use --block-size, or --keep '%s'",
                src->name, j->cols, QC_FRAME_MAX_BYTES, src->name);
    switch (j->scheme) {
    case QC_SCHEME_KEEP:
    case QC_SCHEME_ABSORBED:
        source_ratio(j, 1, 1);
        return add_output(p, job, QC_PART_MAIN, err);
    case QC_SCHEME_CAST:
        source_ratio(j, bits, qc_dtype_bits(e->out_dtype));
        return add_output(p, job, QC_PART_MAIN, err);
    case QC_SCHEME_DEQUANT: {
        unsigned out_each = qc_dtype_bits(e->out_dtype) / 8;
        source_ratio(j, 1, e->stored->stored_as == QC_SCHEME_NF4 ? 2 * out_each : out_each);
        return add_output(p, job, QC_PART_MAIN, err);
    }
    case QC_SCHEME_NF4:
    case QC_SCHEME_INT8_BLOCKS:
        j->scale = scale_of(p, j);
        j->block_elems = e->block_elems;
        j->blocks = qc_ceil_div_u64(j->elems, j->block_elems);
        j->nested = p->options->recipe.double_quant != 0;
        p->weights_quantized += j->elems;
        source_ratio(j, bits, j->scheme == QC_SCHEME_NF4 ? 4 : 8);
        QC_TRY(add_output(p, job, QC_PART_MAIN, err));
        return add_block_state(p, job, err);
    case QC_SCHEME_INT8_ROWS:
        j->scale = scale_of(p, j);
        p->weights_quantized += j->elems;
        source_ratio(j, bits, 8);
        QC_TRY(add_output(p, job, QC_PART_MAIN, err));
        QC_TRY(add_output(p, job, QC_PART_SCB, err));
        return add_output(p, job, QC_PART_FORMAT, err);
    }
    QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s': no such scheme", src->name);
}

/* Names a form that bitsandbytes does not have: block-wise int8, stacks of experts, NF4 beside
 * int8, or either of them beside weights that stay in FP8 or MXFP4. The codes of such a form never
 * have the shape of the weight: a loader that does not know quant_method "qconv" (transformers
 * warns and goes on) would otherwise take them for the weights. */
static qc_status name_own_form(qc_plan *p, qc_error *err)
{
    static const char *const names[] = {"nf4", "int8", "int8-block", "fp8", "mxfp4"};
    enum { NF4, INT8, INT8_BLOCKS, FP8, MXFP4, KINDS };
    int has[KINDS] = {0}, stack = 0;
    for (size_t i = 0; i < p->model->tensor_count; i++) {
        const qc_recipe_entry *e = &p->recipe->entries[i];
        const qc_coded_weight *c = e->coded;
        int kept = e->scheme == QC_SCHEME_KEEP && !(c && c->scales == UINT32_MAX);
        qc_dtype dtype = p->model->tensors[i].dtype;
        int quantized = e->scheme == QC_SCHEME_NF4 || e->scheme == QC_SCHEME_INT8_ROWS ||
                        e->scheme == QC_SCHEME_INT8_BLOCKS;
        has[NF4] |= e->scheme == QC_SCHEME_NF4;
        has[INT8] |= e->scheme == QC_SCHEME_INT8_ROWS;
        has[INT8_BLOCKS] |= e->scheme == QC_SCHEME_INT8_BLOCKS;
        has[FP8] |= kept && (dtype == QC_DTYPE_F8_E4M3 || dtype == QC_DTYPE_F8_E5M2);
        has[MXFP4] |= kept && c && c->coding == QC_CODING_MXFP4;
        stack |= quantized && c && c->coding == QC_CODING_MXFP4;
    }
    int quantizing = has[NF4] || has[INT8] || has[INT8_BLOCKS];
    if (!quantizing ||
        !(stack || has[INT8_BLOCKS] || (has[NF4] && has[INT8]) || has[FP8] || has[MXFP4]))
        return QC_OK;
    const char *text = "";
    for (int k = 0; k < KINDS; k++) {
        if (has[k])
            QC_TRY(
                qc_arena_printf(p->arena, &text, err, "%s%s%s", text, *text ? "+" : "", names[k]));
    }
    p->own_form = text;
    return QC_OK;
}

uint64_t qc_plan_tensor_bytes(const qc_plan *p, uint32_t tensor)
{
    qc_out_tensor t;
    uint64_t elems = 1;
    memset(&t, 0, sizeof t);
    describe(p, tensor, &t);
    for (unsigned i = 0; i < t.st.ndim; i++)
        elems *= t.st.dims[i]; /* checked when the tensor was made */
    return elems * qc_dtype_bits(t.st.dtype) / 8;
}

uint64_t qc_job_group_elems(const qc_job *j)
{
    int shared = j->scale != QC_SCALE_ABSMAX && j->nested;
    return (uint64_t)j->block_elems * (shared ? QC_NESTED_BLOCK : 1);
}

int qc_job_has_sample(const qc_job *j)
{
    /* Searched scales of NF4 lie on both sides of 0, which is their offset. */
    return j->scale != QC_SCALE_ABSMAX && j->nested && j->scheme == QC_SCHEME_INT8_BLOCKS;
}

static uint64_t int8_row_bytes(uint64_t rows, uint64_t cols)
{
    return rows * cols + rows * 4 + 1;
}

static uint64_t block_bytes(uint64_t elems, qc_scheme scheme, uint32_t block_elems, int nested,
                            const qc_bnb_state *s)
{
    uint64_t blocks = qc_ceil_div_u64(elems, block_elems);
    uint64_t bytes = scheme == QC_SCHEME_NF4 ? qc_ceil_div_u64(elems, 2) + 16 * 4 : elems;
    bytes += nested ? blocks + qc_ceil_div_u64(blocks, QC_NESTED_BLOCK) * 4 + 256 * 4 : blocks * 4;
    return bytes + qc_bnb_state_bytes(s);
}

uint64_t qc_plan_source_share(const qc_plan *p, const qc_job *j, uint64_t n)
{
    uint64_t all = p->model->tensors[j->source].bytes;
    uint64_t share = qc_ceil_div_u64(n * j->source_num, j->source_den);
    return share < all ? share : all; /* an odd number of nibbles is rounded up */
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
    if (scheme == QC_SCHEME_INT8_ROWS)
        return int8_row_bytes(rows, cols);
    if (scheme != QC_SCHEME_NF4 && scheme != QC_SCHEME_INT8_BLOCKS)
        return rows * cols * (qc_dtype_bits(dtype) / 8);
    qc_bnb_state s;
    fill_state(&s, scheme, dtype, rows, cols, block_elems, nested);
    return block_bytes(rows * cols, scheme, block_elems, nested, &s);
}

uint64_t qc_plan_coded_bytes(const qc_coded_weight *w, qc_scheme scheme, uint32_t block_elems,
                             int nested)
{
    uint64_t cols = w->dims[w->ndim - 1], rows = w->dims[0] * (w->ndim == 3 ? w->dims[1] : 1);
    if (scheme == QC_SCHEME_INT8_ROWS)
        return int8_row_bytes(rows, cols);
    qc_bnb_state s;
    fill_state(&s, scheme, w->dtype, rows, cols, block_elems, nested);
    s.ndim = w->ndim;
    memcpy(s.dims, w->dims, sizeof s.dims);
    return block_bytes(rows * cols, scheme, block_elems, nested, &s);
}

/* order and job_of are scratch memory with one element for each tensor of the source. */
static qc_status make_jobs(qc_plan *p, order_entry *order, uint32_t *job_of, qc_error *err)
{
    const qc_ckpt_tensor *tensors = p->model->tensors;
    uint32_t jobs = 0, outputs = 0;
    void *v = NULL;
    for (uint32_t i = 0; i < p->model->tensor_count; i++) {
        const qc_recipe_entry *e = &p->recipe->entries[i];
        if (e->scheme == QC_SCHEME_ABSORBED)
            continue;
        order[jobs++] = (order_entry){order_rank(e, tensors[i].name), tensors[i].name, i};
        outputs += e->scheme == QC_SCHEME_NF4           ? 6
                   : e->scheme == QC_SCHEME_INT8_BLOCKS ? 5
                   : e->scheme == QC_SCHEME_INT8_ROWS   ? 3
                                                        : 1;
    }
    qsort(order, jobs, sizeof *order, compare_order);
    QC_TRY(qc_arena_alloc(p->arena, &v, jobs, sizeof *p->jobs, err));
    p->jobs = v;
    QC_TRY(qc_arena_alloc(p->arena, &v, outputs, sizeof *p->outputs, err));
    p->outputs = v;
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
    if (model->tensor_count > UINT32_MAX / QC_PART_COUNT)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s: %zu tensors are more than %u", model->path,
                model->tensor_count, UINT32_MAX / QC_PART_COUNT);
    void *v = NULL;
    QC_TRY(name_own_form(p, err));
    QC_TRY(qc_malloc(&v, model->tensor_count * sizeof(order_entry), err));
    order_entry *order = v;
    v = NULL;
    qc_status st = qc_malloc(&v, model->tensor_count * sizeof(uint32_t), err);
    if (st == QC_OK)
        st = make_jobs(p, order, v, err);
    qc_free(v);
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
    for (int part = 0; part < QC_PART_COUNT; part++) {
        if (j->outputs[part] == QC_NO_OUTPUT)
            continue;
        p->outputs[p->tensor_count] = output_of(p->job_count, (qc_part)part);
        j->outputs[part] = p->tensor_count++;
    }
    p->job_count++;
}

qc_status qc_plan_set_devices(qc_plan *p, const uint32_t *device_of, const char **names,
                              uint32_t count, qc_error *err)
{
    void *v = NULL;
    for (uint32_t i = 0; i < p->job_count; i++) {
        qc_job *j = &p->jobs[i];
        j->device = device_of[j->source];
        if (j->device >= count)
            QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s' has no device",
                    p->model->tensors[j->source].name);
    }
    p->device_names = names;
    p->device_count = count;
    if (is_in_device_order(p))
        return QC_OK;
    const qc_job *old = p->jobs;
    uint32_t jobs = p->job_count;
    QC_TRY(qc_arena_alloc(p->arena, &v, jobs, sizeof *p->jobs, err));
    p->jobs = v;
    p->job_count = p->tensor_count = 0;
    for (uint32_t d = 0; d < count; d++) {
        for (uint32_t i = 0; i < jobs; i++) {
            if (old[i].device == d)
                move_job(p, &old[i]);
        }
    }
    return QC_OK;
}

qc_status qc_plan_lay_out(qc_plan *p, qc_error *err)
{
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
    return (j->scheme == QC_SCHEME_NF4 || j->scheme == QC_SCHEME_INT8_ROWS ||
            j->scheme == QC_SCHEME_INT8_BLOCKS) &&
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
