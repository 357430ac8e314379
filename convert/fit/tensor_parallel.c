#include "convert/fit/tensor_parallel.h"

#include "base/checked.h"
#include "base/text.h"
#include "convert/families/config_fields.h"
#include "convert/families/family.h"
#include "convert/fit/plugin_share.h"

#include <inttypes.h>
#include <string.h>

#define VOCABULARY_PADDING 64u
#define LIST_MAX_BYTES     4096u
#define VLLM_PREFILL       2048u /* --max-num-batched-tokens of vllm serve on most GPUs */
#define FLOAT_BYTES        2u /* of a floating-point tensor in vLLM, unless it is said to be more */

/* Lists the model types that vLLM splits as their rows say, in order. */
static void list_types(qc_strbuf *list)
{
    for (const char *last = "", *next = ""; next; last = next) {
        next = NULL;
        for (size_t i = 0; i < qc_family_count; i++) {
            const char *type = qc_families[i].type;
            if (qc_family_is(&qc_families[i], "TP") && strcmp(type, last) > 0 &&
                (!next || strcmp(type, next) < 0))
                next = type;
        }
        if (next)
            qc_strbuf_putf(list, " %s", next);
    }
}

static int is_expert(const char *name)
{
    return strstr(name, ".experts.") != NULL;
}

/* ---- bytes ---- */

/* Returns the number of heads of k and v that a card has. */
static uint64_t rank_kv_heads(const qc_geometry *g, uint32_t ranks)
{
    return g->kv_heads >= ranks ? g->kv_heads / ranks : 1;
}

/* Bits of an element as vLLM holds it. Scales of 8-bit weights and the bias of DeepSeek-V3's
 * choice of experts are in single precision. */
static unsigned bits_of(const qc_split_tensor *t)
{
    const char *parameter = qc_family_parameter(t->name);
    if (!qc_dtype_is_quantizable(t->dtype))
        return qc_dtype_bits(t->dtype);
    if (strcmp(parameter, "weight_scale_inv") == 0 ||
        (strcmp(parameter, "weight_scale") == 0 && !t->packed) ||
        qc_ends_with(t->name, "e_score_correction_bias"))
        return 32;
    return FLOAT_BYTES * 8;
}

/* Returns the bytes of the shape that a packed weight had before. vLLM makes one for q, k and v
 * together, and one for gate and up; for experts its two numbers are in 16 bit. */
static uint64_t shape_bytes(const qc_split_tensor *t)
{
    static const char *const fused[] = {".k_proj.", ".v_proj.", ".up_proj.", ".w3."};
    for (size_t i = 0; i < sizeof fused / sizeof *fused; i++)
        if (strstr(t->name, fused[i]))
            return 0;
    return 2 * (is_expert(t->name) ? FLOAT_BYTES : sizeof(int64_t));
}

/* Returns the dimension that is split, or ndim if none is. */
static unsigned split_dim(const qc_split_tensor *t, qc_split split)
{
    const char *parameter = qc_family_parameter(t->name);
    int in_module = *parameter != '\0';
    if (qc_config_word_in(parameter, " input_scale weight_scale_2 input_global_scale "
                                     "weight_global_scale "))
        return t->ndim; /* one number, which every card has */
    /* AWQ and GPTQ have inputs by outputs. */
    if (qc_config_word_in(parameter, " qweight qzeros scales "))
        return split == QC_SPLIT_ROWS ? 0
               : split == QC_SPLIT_COLUMNS || split == QC_SPLIT_KV_HEADS ||
                       split == QC_SPLIT_FUSED_QKV
                   ? 1
                   : t->ndim;
    /* gpt-oss: [experts, out, ...], and in 16 bit [experts, in, out] */
    unsigned stack = !in_module && is_expert(t->name);
    int turned = stack && t->ndim == 3 && qc_dtype_is_quantizable(t->dtype);
    switch (split) {
    case QC_SPLIT_COLUMNS:
        return turned ? 2 : stack;
    case QC_SPLIT_ROWS:
        if (t->ndim < 2 + stack || (!stack && t->dims[1] == 1))
            return t->ndim; /* a bias, or one scale a row */
        return turned ? 1 : 1 + stack;
    case QC_SPLIT_KV_HEADS:
    case QC_SPLIT_FUSED_QKV:
    case QC_SPLIT_VOCABULARY:
    case QC_SPLIT_SINKS:
        return 0;
    case QC_SPLIT_UNKNOWN:
    case QC_SPLIT_WHOLE:
    case QC_SPLIT_ABSENT:
        break;
    }
    return t->ndim;
}

static qc_status divide(uint64_t *out, const qc_split_tensor *t, uint64_t size, uint32_t ranks,
                        qc_error *err)
{
    int scales = strcmp(qc_family_parameter(t->name), "weight_scale") == 0;
    if (size % ranks != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "tensor '%s': vLLM does not split it over %" PRIu32
                " cards, because its %s, %" PRIu64 ", is not a multiple of %" PRIu32
                "; plan with another --tp, or with --parallel layers",
                t->name, ranks, scales ? "number of scales" : "size", size, ranks);
    *out = size / ranks;
    return QC_OK;
}

/* Finds how much of a dimension of this size a card has. */
static qc_status rank_size(uint64_t *out, const qc_split_tensor *t, qc_split split, uint64_t size,
                           const qc_tp_split *tp, qc_error *err)
{
    const qc_geometry *g = tp->geometry;
    const uint32_t ranks = tp->ranks;
    uint64_t kv_heads = rank_kv_heads(g, ranks);
    uint64_t fused = qc_sat_add(g->heads, qc_sat_mul(2, g->kv_heads));
    switch (split) {
    case QC_SPLIT_KV_HEADS:
        if (g->kv_heads == 0 || size % g->kv_heads != 0)
            break;
        *out = size / g->kv_heads * kv_heads;
        return QC_OK;
    case QC_SPLIT_FUSED_QKV:
        if (fused == 0 || size % fused != 0)
            break;
        *out = size / fused * (g->heads / ranks + 2 * kv_heads);
        return QC_OK;
    case QC_SPLIT_VOCABULARY:
        size = qc_sat_mul(qc_ceil_div_u64(size, VOCABULARY_PADDING), VOCABULARY_PADDING);
        return divide(out, t, size, ranks, err);
    case QC_SPLIT_COLUMNS:
    case QC_SPLIT_ROWS:
    case QC_SPLIT_SINKS:
        return divide(out, t, size, ranks, err);
    case QC_SPLIT_UNKNOWN:
    case QC_SPLIT_WHOLE:
    case QC_SPLIT_ABSENT:
        break;
    }
    QC_FAIL(err, QC_ERR_UNSUPPORTED,
            "tensor '%s': vLLM does not split it over %" PRIu32 " cards, because its %" PRIu64
            " rows are not whole heads; plan with --parallel layers",
            t->name, ranks, size);
}

qc_status qc_split_bytes(uint64_t *out, const qc_split_tensor *t, const qc_tp_split *tp,
                         qc_error *err)
{
    qc_split split = qc_family_split(tp->family, t->name);
    uint64_t elems = 1;
    *out = 0;
    if (split == QC_SPLIT_UNKNOWN)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "tensor '%s': it is not known how vLLM splits it over cards; plan with --parallel "
                "layers",
                t->name);
    if (split == QC_SPLIT_ABSENT)
        return QC_OK;
    if (strcmp(qc_family_parameter(t->name), "weight_shape") == 0) {
        *out = shape_bytes(t);
        return QC_OK;
    }
    unsigned at = split_dim(t, split);
    for (unsigned i = 0; i < t->ndim; i++) {
        uint64_t size = t->dims[i];
        if (i == at)
            QC_TRY(rank_size(&size, t, split, t->dims[i], tp, err));
        elems = qc_sat_mul(elems, size);
    }
    *out = qc_sat_mul(elems, bits_of(t)) / 8;
    return QC_OK;
}

/* ---- the model ---- */

void qc_tp_defaults(qc_fit_options *o)
{
    if (o->tensor_parallel > 0)
        o->parallel = QC_PARALLEL_TENSOR;
    if (o->parallel != QC_PARALLEL_TENSOR)
        return;
    if (!o->prefill_given)
        o->prefill = VLLM_PREFILL;
    o->mla_absorbed = !o->mla_expanded;
}

uint32_t qc_tp_ranks(const qc_fit_options *o)
{
    if (o->tensor_parallel > 0)
        return (uint32_t)o->tensor_parallel;
    return o->parallel == QC_PARALLEL_TENSOR ? o->vram.gpu_count : 0;
}

qc_status qc_tp_check(const qc_fit_options *o, const qc_checkpoint *model, const qc_geometry *g,
                      qc_error *err)
{
    const qc_budget *budget = &o->vram;
    uint32_t ranks = qc_tp_ranks(o);
    qc_config config;
    if (budget->gpu_count == 0 || budget->count > budget->gpu_count)
        QC_FAIL(err, QC_ERR_USAGE,
                "tensor parallelism splits a model over GPUs only, but --vram %s names %s",
                budget->text, budget->gpu_count ? "cpu or disk as well" : "none");
    if (ranks != budget->gpu_count)
        QC_FAIL(err, QC_ERR_USAGE,
                "--tp %" PRIu32 " needs as many GPUs in --vram, but that names %" PRIu32, ranks,
                budget->gpu_count);
    qc_config_open(&config, model->config);
    if (!qc_family_is(qc_family_find(config.model_type), "TP")) {
        qc_strbuf list;
        qc_strbuf_init(&list, LIST_MAX_BYTES);
        list_types(&list);
        qc_status st = QC_ERROR(
            err, QC_ERR_UNSUPPORTED,
            "%s: it is not known how vLLM splits model type '%s' over cards (known:%s); plan "
            "with --parallel layers",
            model->path, config.model_type, list.data ? list.data : "");
        qc_strbuf_deinit(&list);
        return st;
    }
    const uint64_t kv = g->kv_heads;
    if (g->heads == 0 || g->heads % ranks != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "vLLM does not split %" PRIu64 " attention heads over %" PRIu32
                " cards: the number of heads has to be a multiple of the number of cards; plan "
                "with another --tp, or with --parallel layers",
                g->heads, ranks);
    if (kv == 0 || (kv >= ranks ? kv % ranks : ranks % kv) != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "vLLM does not split %" PRIu64 " KV heads over %" PRIu32
                " cards: one number has to be a multiple of the other; plan with another --tp, or "
                "with --parallel layers",
                kv, ranks);
    return QC_OK;
}

qc_status qc_tp_geometry(qc_geometry *out, qc_arena *arena, const qc_geometry *g, uint32_t ranks,
                         qc_error *err)
{
    *out = *g;
    QC_TRY(qc_arena_array(arena, &out->layers, g->layer_count, err));
    out->heads = g->heads / ranks;
    out->kv_heads = rank_kv_heads(g, ranks);
    out->intermediate = qc_ceil_div_u64(g->intermediate, ranks);
    for (uint32_t i = 0; i < g->layer_count; i++) {
        qc_layer_geometry *l = &out->layers[i];
        *l = g->layers[i];
        /* Every card caches all of the latent. */
        l->kv_elems_expanded /= ranks;
        if (l->attention != QC_ATTENTION_MLA)
            l->kv_elems = l->kv_elems / g->kv_heads * out->kv_heads;
    }
    return QC_OK;
}

/* Is the scale in tensor i of a weight that is packed in words? Scales that convert makes lie
 * beside their weight in the plan; those of a checkpoint are found by name. */
static qc_status is_packed(int *out, qc_arena *arena, const qc_plan *plan, const qc_job *j,
                           const char *name, qc_error *err)
{
    const char *weight = NULL, *parameter = qc_family_parameter(name);
    size_t stem = strlen(name) - strlen(parameter);
    *out = 0;
    if (!qc_config_word_in(parameter, " weight_scale weight_shape "))
        return QC_OK;
    if (qc_scheme_is_quantized(j->scheme)) {
        *out = qc_schemes[j->scheme].code_dtype == QC_DTYPE_I32;
        return QC_OK;
    }
    QC_TRY(qc_arena_printf(arena, &weight, err, "%.*sweight_packed", (int)stem, name));
    *out = qc_checkpoint_find(plan->model, weight) != NULL;
    return QC_OK;
}

static qc_status tensor_bytes(uint64_t *out, qc_arena *scratch, const qc_plan *plan, uint32_t i,
                              const qc_tp_split *split, qc_error *err)
{
    const qc_job *j = &plan->jobs[plan->outputs[i].job];
    qc_out_tensors all = qc_plan_tensors(plan);
    qc_out_tensor t;
    memset(&t, 0, sizeof t);
    all.get(all.ctx, i, &t);
    qc_split_tensor s = {t.st.name, t.st.dtype, t.st.ndim, t.st.dims, 0};
    if (t.suffix)
        QC_TRY(qc_arena_printf(scratch, &s.name, err, "%.*s%s", (int)t.stem_bytes, t.st.name,
                               t.suffix));
    QC_TRY(is_packed(&s.packed, scratch, plan, j, s.name, err));
    return qc_split_bytes(out, &s, split, err);
}

/* A card's share of a row has to be whole 32-bit words, as vLLM cuts between them. */
static qc_status check_words(const qc_job *j, const char *name, const qc_tp_split *split,
                             qc_error *err)
{
    const uint64_t cols = j->form.cols / split->ranks, bits = j->form.ops->bits;
    if (qc_family_split(split->family, name) != QC_SPLIT_ROWS || cols * bits % 32 == 0)
        return QC_OK;
    QC_FAIL(err, QC_ERR_UNSUPPORTED,
            "tensor '%s': vLLM does not split it over %" PRIu32 " cards, because %" PRIu64
            " of its codes of %" PRIu64 " bits are no whole 32-bit words; plan with another --tp, "
            "or with --parallel layers",
            name, split->ranks, cols, bits);
}

static qc_status job_bytes(uint64_t *out, qc_arena *scratch, const qc_plan *plan,
                           const qc_segments *segments, const qc_tp_split *split, const qc_job *j,
                           qc_error *err)
{
    uint32_t segment = segments->of_tensor[j->source];
    *out = 0;
    if (segment >= segments->count)
        return QC_OK;
    /* Layers of multi-token prediction are loaded only for a draft model, and a tied head that the
     * file has, too, never. */
    const qc_segment *s = &segments->segments[segment];
    const char *name = plan->model->tensors[j->source].name;
    if (s->kind == QC_SEGMENT_EXTRA ||
        (s->follows != QC_NO_SEGMENT && qc_begins_with(name, "lm_head.")))
        return QC_OK;
    if (qc_plugin_serves(j))
        return qc_plugin_bytes(out, plan, j, split, err);
    if (j->form.ops && j->form.ops->words)
        QC_TRY(check_words(j, name, split, err));
    for (uint32_t t = j->first_output; t < j->first_output + qc_job_output_count(j); t++) {
        uint64_t bytes = 0;
        QC_TRY(tensor_bytes(&bytes, scratch, plan, t, split, err));
        *out = qc_sat_add(*out, bytes);
    }
    return QC_OK;
}

qc_status qc_tp_sum_tensors(uint64_t **tensor_bytes, qc_arena *arena, const qc_plan *plan,
                            const qc_segments *segments, const qc_tp_split *split, int partly,
                            qc_error *err)
{
    qc_arena scratch;
    qc_status st = QC_OK;
    unsigned tables = 0;
    QC_TRY(qc_arena_array(arena, tensor_bytes, plan->model->tensor_count, err));
    qc_arena_init(&scratch);
    for (uint32_t i = 0; st == QC_OK && i < plan->job_count; i++) {
        uint64_t *bytes = &(*tensor_bytes)[plan->jobs[i].source];
        qc_error trouble = {0};
        st = job_bytes(bytes, &scratch, plan, segments, split, &plan->jobs[i], &trouble);
        if (st == QC_OK && *bytes > 0 && qc_plugin_serves(&plan->jobs[i]))
            *bytes = qc_sat_add(*bytes, qc_plugin_tables(&plan->jobs[i], &tables));
        if (partly && qc_status_is_refusal(st)) {
            *bytes = QC_TP_UNSPLIT;
            st = QC_OK;
        } else if (st != QC_OK && err) {
            *err = trouble;
        }
    }
    qc_arena_deinit(&scratch);
    return st;
}

qc_status qc_tp_sum_segments(uint64_t **segment_bytes, qc_arena *arena, const qc_plan *plan,
                             const qc_segments *segments, const qc_tp_split *split, qc_error *err)
{
    uint64_t *bytes = NULL;
    QC_TRY(qc_arena_array(arena, segment_bytes, segments->count, err));
    QC_TRY(qc_tp_sum_tensors(&bytes, arena, plan, segments, split, 0, err));
    for (uint32_t i = 0; i < plan->model->tensor_count; i++) {
        uint32_t segment = segments->of_tensor[i];
        if (segment < segments->count)
            (*segment_bytes)[segment] = qc_sat_add((*segment_bytes)[segment], bytes[i]);
    }
    return QC_OK;
}

/* ---- serving ---- */

void qc_tp_serve_options(qc_strbuf *text, const qc_fit_options *o, uint32_t ranks)
{
    qc_strbuf_putf(text,
                   "--tensor-parallel-size %" PRIu32 " --max-model-len %" PRIu64
                   " --gpu-memory-utilization %.3g --max-num-batched-tokens %" PRIu64,
                   ranks, o->context, o->margin, o->prefill ? o->prefill : o->context);
    if (o->kv_bits == 8)
        qc_strbuf_puts(text, " --kv-cache-dtype fp8");
}
