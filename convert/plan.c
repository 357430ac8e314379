/* How the output is laid out.
 *
 * Output order (which decides the shard of a tensor): embeddings, then everything by name with
 * numbers compared as numbers, then the final norm and the head; so layers stay together and a
 * device that holds a run of layers needs a run of shards. A weight and its derived tensors are one
 * group and never part. With devices they come first, and this order holds within each. Within a
 * shard the order is the reference writer's. */
#include "convert/plan.h"

#include "base/checked.h"
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

/* "M.weight" -> "M.SCB": int8's scale sits beside the weight, not below it. */
static qc_status part_name(qc_arena *arena, const char **out, const char *weight, qc_part part,
                           int block_int8, qc_error *err)
{
    size_t stem = strlen(weight);
    const char *suffix = part_suffix[part];
    if (part == QC_PART_SCB || part == QC_PART_FORMAT) {
        if (stem >= 6 && strcmp(weight + stem - 6, "weight") == 0)
            stem -= 6;
        else
            return qc_arena_printf(arena, out, err, "%s.%s", weight, suffix);
    } else if (part == QC_PART_STATE && block_int8) {
        suffix = ".quant_state.qconv__int8";
    }
    size_t tail = strlen(suffix);
    void *v = NULL;
    QC_TRY(qc_arena_alloc(arena, &v, stem + tail + 1, 1, err));
    memcpy(v, weight, stem);
    memcpy((char *)v + stem, suffix, tail);
    *out = v;
    return QC_OK;
}

static qc_status add_output(qc_plan *p, uint32_t job, qc_part part, qc_dtype dtype, unsigned ndim,
                            const uint64_t *dims, uint64_t align_bytes, qc_error *err)
{
    qc_job *j = &p->jobs[job];
    qc_out_tensor *t = &p->tensors[p->tensor_count];
    if (part == QC_PART_MAIN)
        t->st.name = j->name;
    else
        QC_TRY(part_name(p->arena, &t->st.name, j->name, part, j->scheme == QC_SCHEME_INT8_BLOCKS,
                         err));
    t->st.dtype = dtype;
    t->st.ndim = ndim;
    for (unsigned i = 0; i < ndim; i++)
        t->st.dims[i] = dims[i];
    t->group = job;
    t->align_bytes = align_bytes;
    t->user = p->tensor_count;
    uint64_t bytes = 0;
    QC_TRY(qc_shape_bytes(dims, ndim, dtype, &bytes, err));
    t->piece_bytes = qc_layout_piece_bytes(bytes, align_bytes);
    p->tensor_bytes += bytes;
    if (j->scheme == QC_SCHEME_NF4 || j->scheme == QC_SCHEME_INT8_ROWS ||
        j->scheme == QC_SCHEME_INT8_BLOCKS)
        p->quantized_bytes += bytes;
    p->outputs[p->tensor_count] = (qc_output){job, part};
    j->outputs[part] = p->tensor_count++;
    return QC_OK;
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

/* Derived tensors of a block-quantized weight. */
static qc_status add_block_state(qc_plan *p, uint32_t job, qc_error *err)
{
    qc_job *j = &p->jobs[job];
    const qc_coded_weight *coded = j->entry->coded;
    qc_bnb_state *s = &j->state;
    fill_state(s, j->scheme, coded ? coded->dtype : j->dtype, j->rows, j->cols, j->block_elems,
               j->nested);
    if (coded) {
        s->ndim = coded->ndim;
        memcpy(s->dims, coded->dims, sizeof s->dims);
    }
    QC_TRY(add_output(p, job, QC_PART_ABSMAX, j->nested ? QC_DTYPE_U8 : QC_DTYPE_F32, 1, &j->blocks,
                      j->nested ? 1 : 4, err));
    if (j->scheme == QC_SCHEME_NF4)
        QC_TRY(add_output(p, job, QC_PART_QUANT_MAP, QC_DTYPE_F32, 1, (uint64_t[]){16}, 4, err));
    if (j->nested) {
        uint64_t nested = qc_ceil_div_u64(j->blocks, QC_NESTED_BLOCK);
        QC_TRY(add_output(p, job, QC_PART_NESTED_ABSMAX, QC_DTYPE_F32, 1, &nested, 4, err));
        QC_TRY(add_output(p, job, QC_PART_NESTED_MAP, QC_DTYPE_F32, 1, (uint64_t[]){256}, 4, err));
    }
    uint64_t state_bytes = qc_bnb_state_bytes(s);
    return add_output(p, job, QC_PART_STATE, QC_DTYPE_U8, 1, &state_bytes, 1, err);
}

/* Shape of what is written for a weight that is decoded first; *bits: that a weight has in the
 * source. A stack of experts in 16 bit is written as transformers has it, [experts, in, out]. */
static void shape_of_coded(qc_job *j, const qc_recipe_entry *e, unsigned *ndim, uint64_t *dims,
                           uint64_t *bits)
{
    const qc_coded_weight *c = e->coded;
    j->name = c->name;
    j->dtype = QC_DTYPE_F32;
    *bits = c->coding == QC_CODING_MXFP4 ? 4 : 8;
    *ndim = c->ndim;
    memcpy(dims, c->dims, sizeof c->dims);
}

static void swap_u64(uint64_t *a, uint64_t *b)
{
    uint64_t t = *a;
    *a = *b;
    *b = t;
}

static qc_status add_job(qc_plan *p, uint32_t source, qc_error *err)
{
    const qc_ckpt_tensor *src = &p->model->tensors[source];
    const qc_recipe_entry *e = &p->recipe->entries[source];
    uint32_t job = p->job_count++;
    qc_job *j = &p->jobs[job];
    j->source = source;
    j->entry = e;
    j->scheme = e->scheme;
    j->rows = 1;
    j->name = src->name;
    j->dtype = src->dtype;
    for (int i = 0; i < QC_PART_COUNT; i++)
        j->outputs[i] = QC_NO_OUTPUT;
    unsigned ndim = src->ndim;
    uint64_t dims[QC_MAX_DIMS], bits = qc_dtype_bits(src->dtype);
    memcpy(dims, src->dims, sizeof dims);
    if (e->scheme == QC_SCHEME_DEQUANT) {
        ndim = e->stored->ndim;
        memcpy(dims, e->stored->dims, sizeof dims);
    } else if (e->coded && e->scheme != QC_SCHEME_KEEP) {
        shape_of_coded(j, e, &ndim, dims, &bits);
    } else if (e->transpose) {
        dims[0] = src->dims[1];
        dims[1] = src->dims[0];
    }
    QC_TRY(qc_shape_elems(dims, ndim, &j->elems, err));
    int stack = ndim == 3 && (j->name != src->name || e->scheme == QC_SCHEME_DEQUANT);
    if (ndim == 2 || stack) {
        j->rows = dims[0] * (stack ? dims[1] : 1); /* no overflow: elems has none, or is 0 */
        j->cols = dims[ndim - 1];
    } else {
        j->cols = j->elems;
    }
    /* Codes lie as [out, in]: what is decoded from them is turned. */
    if (e->transpose && (stack || e->scheme == QC_SCHEME_DEQUANT))
        swap_u64(&dims[ndim - 2], &dims[ndim - 1]);
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
        j->source_num = j->source_den = 1;
        return add_output(p, job, QC_PART_MAIN, src->dtype, ndim, dims, 1, err);
    case QC_SCHEME_CAST:
        j->source_num = bits;
        j->source_den = qc_dtype_bits(e->out_dtype);
        /* Pieces of a stack of experts come from whole blocks of MXFP4. */
        return add_output(p, job, QC_PART_MAIN, e->out_dtype, ndim, dims,
                          j->source_den / 8 * (stack ? QC_MXFP4_BLOCK : 1), err);
    case QC_SCHEME_DEQUANT: {
        /* Pieces begin at a block (and so at a whole byte of codes). */
        uint64_t unit =
            e->stored->stored_as == QC_SCHEME_INT8_ROWS ? j->cols : e->stored->block_elems;
        uint64_t out_each = qc_dtype_bits(e->out_dtype) / 8;
        j->source_num = 1;
        j->source_den = e->stored->stored_as == QC_SCHEME_NF4 ? 2 * out_each : out_each;
        return add_output(p, job, QC_PART_MAIN, e->out_dtype, ndim, dims,
                          unit ? unit * out_each : 1, err);
    }
    case QC_SCHEME_NF4:
    case QC_SCHEME_INT8_BLOCKS: {
        int nf4 = j->scheme == QC_SCHEME_NF4;
        j->scale = p->options->scale;
        j->block_elems = e->block_elems;
        j->blocks = qc_ceil_div_u64(j->elems, j->block_elems);
        j->nested = p->options->double_quant;
        p->weights_quantized += j->elems;
        if (nf4) {
            uint64_t packed[2] = {qc_ceil_div_u64(j->elems, 2), 1};
            j->source_num = bits;
            j->source_den = 4;
            QC_TRY(add_output(p, job, QC_PART_MAIN, QC_DTYPE_U8, 2, packed,
                              qc_job_group_elems(j) / 2, err));
        } else {
            uint64_t flat[2] = {j->elems, 1};
            j->source_num = bits;
            j->source_den = 8;
            QC_TRY(
                add_output(p, job, QC_PART_MAIN, QC_DTYPE_I8, 2, flat, qc_job_group_elems(j), err));
        }
        return add_block_state(p, job, err);
    }
    case QC_SCHEME_INT8_ROWS: {
        uint64_t codes[2] = {p->own_form ? j->elems : j->rows, p->own_form ? 1 : j->cols};
        j->scale = p->options->scale;
        p->weights_quantized += j->elems;
        j->source_num = bits;
        j->source_den = 8;
        QC_TRY(add_output(p, job, QC_PART_MAIN, QC_DTYPE_I8, 2, codes, j->cols ? j->cols : 1, err));
        QC_TRY(add_output(p, job, QC_PART_SCB, QC_DTYPE_F32, ndim - 1, dims, 4, err));
        return add_output(p, job, QC_PART_FORMAT, QC_DTYPE_U8, 0, NULL, 1, err);
    }
    }
    QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s': no such scheme", src->name);
}

/* Forms that bitsandbytes does not have: block-wise int8, stacks of experts, NF4 beside int8,
 * either beside weights that stay in FP8 or MXFP4. Their codes never have the shape of the weight:
 * a loader that does not know quant_method "qconv" (transformers warns and goes on) would take them
 * for the weights. */
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
    const qc_st_tensor *t = &p->tensors[tensor].st;
    uint64_t elems = 1;
    for (unsigned i = 0; i < t->ndim; i++)
        elems *= t->dims[i]; /* checked when the tensor was made */
    return elems * qc_dtype_bits(t->dtype) / 8;
}

uint64_t qc_job_group_elems(const qc_job *j)
{
    int shared = j->scale != QC_SCALE_ABSMAX && j->nested;
    return (uint64_t)j->block_elems * (shared ? QC_NESTED_BLOCK : 1);
}

int qc_job_has_sample(const qc_job *j)
{
    /* Searched scales of NF4 lie on both sides of 0, their offset. */
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

/* job_of: per tensor of the source. */
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

qc_status qc_plan_begin(qc_plan *out, qc_arena *arena, const qc_checkpoint *model,
                        const qc_recipe *recipe, const qc_options *options, qc_error *err)
{
    qc_plan *p = out;
    memset(p, 0, sizeof *p);
    p->arena = arena;
    p->model = model;
    p->recipe = recipe;
    p->options = options;
    if (model->tensor_count > UINT32_MAX / QC_PART_COUNT)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s: %zu tensors are more than %u", model->path,
                model->tensor_count, UINT32_MAX / QC_PART_COUNT);
    uint32_t sources = (uint32_t)model->tensor_count;
    void *v = NULL;
    QC_TRY(name_own_form(p, err));
    QC_TRY(qc_arena_alloc(arena, &v, sources, sizeof(order_entry), err));
    order_entry *order = v;
    uint32_t jobs = 0, outputs = 0;
    for (uint32_t i = 0; i < sources; i++) {
        const qc_recipe_entry *e = &recipe->entries[i];
        if (e->scheme == QC_SCHEME_ABSORBED)
            continue;
        order[jobs++] =
            (order_entry){order_rank(e, model->tensors[i].name), model->tensors[i].name, i};
        outputs += e->scheme == QC_SCHEME_NF4           ? 6
                   : e->scheme == QC_SCHEME_INT8_BLOCKS ? 5
                   : e->scheme == QC_SCHEME_INT8_ROWS   ? 3
                                                        : 1;
    }
    qsort(order, jobs, sizeof *order, compare_order);
    QC_TRY(qc_arena_alloc(arena, &v, jobs, sizeof *p->jobs, err));
    p->jobs = v;
    QC_TRY(qc_arena_alloc(arena, &v, outputs, sizeof *p->tensors, err));
    p->tensors = v;
    QC_TRY(qc_arena_alloc(arena, &v, outputs, sizeof *p->outputs, err));
    p->outputs = v;
    QC_TRY(qc_arena_alloc(arena, &v, sources, sizeof(uint32_t), err));
    uint32_t *job_of = v;
    for (uint32_t i = 0; i < jobs; i++) {
        job_of[order[i].source] = i;
        QC_TRY(add_job(p, order[i].source, err));
    }
    count_absorbed(p, job_of);
    return QC_OK;
}

/* Jobs come layer by layer, as devices take them; only a tied head, a vision tower or what was
 * spilled stands elsewhere. Copies of all jobs and tensors are a third of a plan's memory. */
static int is_in_device_order(const qc_plan *p, const uint32_t *device_of)
{
    for (uint32_t i = 1; i < p->job_count; i++) {
        if (device_of[p->jobs[i].source] < device_of[p->jobs[i - 1].source])
            return 0;
    }
    return 1;
}

/* Move job `from` and its tensors to the ends of the new arrays. */
static void move_job(qc_plan *p, const qc_plan *old, uint32_t from, uint32_t device)
{
    qc_job *j = &p->jobs[p->job_count];
    *j = old->jobs[from];
    for (int part = 0; part < QC_PART_COUNT; part++) {
        uint32_t t = j->outputs[part];
        if (t == QC_NO_OUTPUT)
            continue;
        qc_out_tensor *to = &p->tensors[p->tensor_count];
        *to = old->tensors[t];
        to->group = p->job_count;
        to->device = device;
        to->user = p->tensor_count;
        p->outputs[p->tensor_count] = (qc_output){p->job_count, (qc_part)part};
        j->outputs[part] = p->tensor_count++;
    }
    p->job_count++;
}

qc_status qc_plan_set_devices(qc_plan *p, const uint32_t *device_of, const char **names,
                              uint32_t count, qc_error *err)
{
    const qc_plan old = *p;
    void *v = NULL;
    for (uint32_t i = 0; i < p->job_count; i++) {
        if (device_of[p->jobs[i].source] >= count)
            QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s' has no device",
                    p->model->tensors[p->jobs[i].source].name);
    }
    p->device_names = names;
    p->device_count = count;
    if (is_in_device_order(p, device_of)) {
        for (uint32_t i = 0; i < p->tensor_count; i++)
            p->tensors[i].device = device_of[p->jobs[p->outputs[i].job].source];
        return QC_OK;
    }
    QC_TRY(qc_arena_alloc(p->arena, &v, old.job_count, sizeof *p->jobs, err));
    p->jobs = v;
    QC_TRY(qc_arena_alloc(p->arena, &v, old.tensor_count, sizeof *p->tensors, err));
    p->tensors = v;
    QC_TRY(qc_arena_alloc(p->arena, &v, old.tensor_count, sizeof *p->outputs, err));
    p->outputs = v;
    p->job_count = p->tensor_count = 0;
    for (uint32_t d = 0; d < count; d++) {
        for (uint32_t i = 0; i < old.job_count; i++) {
            if (device_of[old.jobs[i].source] == d)
                move_job(p, &old, i, d);
        }
    }
    return QC_OK;
}

qc_status qc_plan_lay_out(qc_plan *p, qc_error *err)
{
    QC_TRY(qc_layout_make(&p->layout, p->arena, p->tensors, p->tensor_count,
                          p->options->max_shard_bytes, err));
    for (uint32_t i = 0; i < p->layout.count; i++)
        p->content_bytes += p->layout.shards[i].header_bytes + p->layout.shards[i].data_bytes;
    return QC_OK;
}

qc_status qc_plan_make(qc_plan *out, qc_arena *arena, const qc_checkpoint *model,
                       const qc_recipe *recipe, const qc_options *options, qc_error *err)
{
    QC_TRY(qc_plan_begin(out, arena, model, recipe, options, err));
    return qc_plan_lay_out(out, err);
}
