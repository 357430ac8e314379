/* The formulas of docs/training.md, one function per term. */
#include "convert/fit/train_memory.h"

#include "base/checked.h"
#include "convert/fit/fit_report.h"

#include <stdio.h>
#include <string.h>

const char *const qc_train_method_names[3] = {"full", "lora", "qlora"};
const char *const qc_train_optimizer_names[4] = {"adamw", "adam", "adam8bit", "sgd"};
const char *const qc_train_precision_names[3] = {"bf16", "fp16", "fp32"};

#define ADAPTER_BYTES     4u         /* peft holds adapters in float32 */
#define ZERO_BUCKET_ELEMS 500000000u /* the default of DeepSpeed's reduce_bucket_size */
#define BATCH_BYTES       24u        /* ids, mask and labels of a token, 8 bytes each */
#define LOSS_BYTES        12u  /* a logit: log-softmax, its gradient and the logit's, in float32 */
#define LAYER_ADAPTERS    7u   /* q, k, v, o, gate, up, down */
#define STATE_BLOCK       256u /* 8-bit states: bytes that share a float32 absmax */

/* ---- the model ---- */

/* Returns the number in "...layers.12....", or UINT64_MAX. */
static uint64_t layer_of(const char *name)
{
    static const char *const marks[] = {"layers.", "layer.", "h.", "blocks."};
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        const char *at = strstr(name, marks[i]);
        if (!at || (at != name && at[-1] != '.'))
            continue;
        uint64_t n = 0;
        const char *s = at + strlen(marks[i]);
        if (*s < '0' || *s > '9')
            continue;
        for (; *s >= '0' && *s <= '9' && n < 1000000; s++)
            n = n * 10 + (uint64_t)(*s - '0');
        return n;
    }
    return UINT64_MAX;
}

void qc_train_model_of(qc_train_model *out, const qc_plan *plan, const qc_geometry *geometry)
{
    memset(out, 0, sizeof *out);
    out->geometry = geometry;
    out->quantized_bytes = plan->tensor_bytes;
    uint64_t layer = UINT64_MAX, layer_elems = 0;
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_job *j = &plan->jobs[i];
        const qc_checkpoint_tensor *t = &plan->model->tensors[j->source];
        uint64_t elems = qc_fit_parameters_of(plan, j), of = layer_of(t->name);
        out->parameters = qc_sat_add(out->parameters, elems);
        if (of != layer) { /* jobs come layer by layer */
            layer = of;
            layer_elems = 0;
        }
        layer_elems = of == UINT64_MAX ? 0 : qc_sat_add(layer_elems, elems);
        if (layer_elems > out->largest_layer)
            out->largest_layer = layer_elems;
        if (j->entry->role != QC_ROLE_LINEAR || j->cols == j->elems)
            continue;
        out->rank_elems = qc_sat_add(out->rank_elems, qc_sat_add(j->rows, j->cols));
        if (elems > out->largest_weight)
            out->largest_weight = elems;
    }
}

/* ---- terms ---- */

static uint64_t width_of(const qc_train_options *t)
{
    return t->precision == QC_PRECISION_FP32 ? 4 : 2;
}

uint64_t qc_train_trained(const qc_train_model *m, const qc_train_options *t)
{
    return t->method == QC_TRAIN_FULL ? m->parameters : qc_sat_mul(m->rank_elems, t->lora_rank);
}

/* Adam has two states a parameter, in float32, or in 8 bits with an absmax per block. SGD with
 * momentum has one state. */
static uint64_t state_bytes(qc_optimizer optimizer, uint64_t parameters)
{
    switch (optimizer) {
    case QC_OPTIMIZER_ADAMW:
    case QC_OPTIMIZER_ADAM:
        return qc_sat_mul(parameters, 8);
    case QC_OPTIMIZER_ADAM8BIT:
        return qc_sat_add(qc_sat_mul(parameters, 2), qc_sat_mul(parameters / STATE_BLOCK + 1, 8));
    case QC_OPTIMIZER_SGD:
        return qc_sat_mul(parameters, 4);
    }
    return UINT64_MAX;
}

static void fill_states(qc_train_bytes *b, const qc_train_model *m, const qc_train_options *t,
                        uint32_t gpus)
{
    uint64_t width = width_of(t), trained = qc_train_trained(m, t);
    uint64_t base =
        t->method == QC_TRAIN_QLORA ? m->quantized_bytes : qc_sat_mul(m->parameters, width);
    uint64_t trained_width = t->method == QC_TRAIN_FULL ? width : ADAPTER_BYTES;
    /* When training is in 16 bit, the optimizer keeps a float32 copy to add small steps to. */
    uint64_t master = trained_width == 2 ? qc_sat_mul(trained, 4) : 0;
    b->parameters = base;
    if (t->zero == 3)
        b->parameters = qc_ceil_div_u64(base, gpus);
    if (t->method != QC_TRAIN_FULL)
        b->parameters = qc_sat_add(b->parameters, qc_sat_mul(trained, ADAPTER_BYTES));
    b->gradients = qc_ceil_div_u64(qc_sat_mul(trained, trained_width), t->zero >= 2 ? gpus : 1);
    b->optimizer = qc_ceil_div_u64(qc_sat_add(master, state_bytes(t->optimizer, trained)),
                                   t->zero >= 1 ? gpus : 1);
}

/* Counts what one layer keeps of one token for the backward pass. A frozen linear weight keeps
 * nothing. Its adapter keeps its input in float32, and where that is a conversion, every adapter
 * keeps a copy of its own. */
static uint64_t layer_token_bytes(const qc_geometry *g, const qc_train_options *t)
{
    uint64_t width = width_of(t), hidden = g->hidden, wide = g->intermediate;
    uint64_t queries = qc_sat_mul(g->heads, g->head_dim),
             keys = qc_sat_mul(g->kv_heads, g->head_dim);
    uint64_t attention =
        qc_sat_add(qc_sat_mul(qc_sat_add(qc_sat_mul(queries, 2), qc_sat_mul(keys, 2)), width),
                   qc_sat_mul(g->heads, 4));
    uint64_t bytes = qc_sat_add(attention, qc_sat_mul(hidden, 8));
    if (t->method == QC_TRAIN_FULL)
        return qc_sat_add(bytes,
                          qc_sat_add(qc_sat_mul(hidden, 4 * width), qc_sat_mul(wide, 4 * width)));
    bytes = qc_sat_add(bytes, qc_sat_add(qc_sat_mul(wide, 3 * width),
                                         qc_sat_mul(t->lora_rank, LAYER_ADAPTERS * 4)));
    if (width == ADAPTER_BYTES) /* the attention's output is counted already */
        return qc_sat_add(bytes,
                          qc_sat_add(qc_sat_mul(hidden, 2 * width), qc_sat_mul(wide, width)));
    return qc_sat_add(
        bytes,
        qc_sat_mul(qc_sat_add(qc_sat_add(qc_sat_mul(hidden, 5), queries), wide), ADAPTER_BYTES));
}

/* Counts the gradients of one token while the backward pass is in a layer's MLP, where they take
 * the most. */
static uint64_t backward_token_bytes(const qc_geometry *g, const qc_train_options *t)
{
    uint64_t width = width_of(t);
    if (t->method == QC_TRAIN_FULL)
        return qc_sat_add(qc_sat_mul(g->intermediate, 2 * width), qc_sat_mul(g->hidden, width));
    return qc_sat_add(qc_sat_mul(g->intermediate, 2 * width + ADAPTER_BYTES),
                      qc_sat_mul(g->hidden, 6 * width));
}

/* The peak is either at the loss, where the activations of all layers meet the logits, or in the
 * last layer. */
static uint64_t activation_bytes(const qc_geometry *g, const qc_train_options *t, uint64_t tokens)
{
    uint64_t width = width_of(t), layer = layer_token_bytes(g, t);
    uint64_t kept =
        qc_sat_mul(t->checkpointing ? qc_sat_mul(g->hidden, width) : layer, g->layer_count);
    uint64_t norm = qc_sat_mul(g->hidden, t->method == QC_TRAIN_FULL ? 4 + 2 * width : 4);
    uint64_t loss = qc_sat_add(norm, qc_sat_mul(g->vocab, LOSS_BYTES + width));
    uint64_t inside = qc_sat_add(backward_token_bytes(g, t), qc_sat_mul(g->vocab, width));
    if (t->checkpointing)
        inside = qc_sat_add(inside, layer);
    return qc_sat_mul(qc_sat_add(kept, loss > inside ? loss : inside), tokens);
}

static uint64_t workspace_bytes(const qc_train_model *m, const qc_train_options *t, uint32_t gpus)
{
    uint64_t width = width_of(t), trained = qc_train_trained(m, t), bytes = 0;
    if (t->method == QC_TRAIN_QLORA)
        bytes = qc_sat_mul(m->largest_weight, 2);
    if (gpus > 1 && t->zero == 0) /* buckets of the gradients lie beside them */
        bytes = qc_sat_add(bytes,
                           qc_sat_mul(trained, t->method == QC_TRAIN_FULL ? width : ADAPTER_BYTES));
    if (gpus > 1 && t->zero >= 1)
        bytes = qc_sat_add(bytes, qc_sat_mul(qc_min_u64(trained, ZERO_BUCKET_ELEMS), width));
    if (gpus > 1 && t->zero == 3) /* the layer that computes and the one being fetched */
        bytes = qc_sat_add(bytes, qc_sat_mul(m->largest_layer, 2 * width));
    return bytes;
}

qc_train_bytes qc_train_estimate(const qc_train_model *m, const qc_train_options *t,
                                 const qc_train_place *place, uint64_t micro_batch)
{
    qc_train_bytes b = {0};
    uint64_t tokens = qc_sat_mul(micro_batch, place->tokens);
    fill_states(&b, m, t, place->gpus);
    b.activations = activation_bytes(m->geometry, t, tokens);
    b.batch_data = qc_sat_mul(tokens, BATCH_BYTES);
    b.workspace = workspace_bytes(m, t, place->gpus);
    b.context = place->context_bytes;
    b.total = qc_sat_add(
        qc_sat_add(qc_sat_add(b.parameters, b.gradients), qc_sat_add(b.optimizer, b.activations)),
        qc_sat_add(qc_sat_add(b.batch_data, b.workspace), b.context));
    return b;
}

/* ---- search ---- */

static int fits(const qc_train_model *m, const qc_train_options *t, const qc_train_place *place,
                uint64_t micro_batch)
{
    return qc_train_estimate(m, t, place, micro_batch).total <= place->budget_bytes;
}

uint64_t qc_train_largest_batch(const qc_train_model *m, const qc_train_options *t,
                                const qc_train_place *place)
{
    uint64_t high = qc_ceil_div_u64(t->effective_batch, place->gpus), low = 0;
    if (fits(m, t, place, high))
        return high;
    while (high - low > 1) { /* low fits (or is 0), high does not */
        uint64_t middle = low + (high - low) / 2;
        if (fits(m, t, place, middle))
            low = middle;
        else
            high = middle;
    }
    return low;
}

static qc_train_setting make_setting(const qc_train_model *m, const qc_train_options *t,
                                     const qc_train_place *place)
{
    qc_train_setting s = {.options = *t};
    s.micro_batch = qc_train_largest_batch(m, t, place);
    uint64_t micro = s.micro_batch ? s.micro_batch : 1;
    s.bytes = qc_train_estimate(m, t, place, micro);
    s.accumulation = qc_ceil_div_u64(t->effective_batch, place->gpus);
    s.accumulation = s.accumulation / micro + (s.accumulation % micro != 0);
    return s;
}

typedef struct {
    int any;
    qc_train_setting first; /* the first that fits, in the order tried */
    qc_train_setting widest;
    qc_train_setting nearest; /* the one that is least over, where nothing fits */
} best_settings;

static void consider(best_settings *best, const qc_train_setting *s)
{
    if (!best->any)
        best->first = best->widest = best->nearest = *s;
    best->any = 1;
    if (best->first.micro_batch == 0 && s->micro_batch > 0)
        best->first = *s;
    if (s->micro_batch > best->widest.micro_batch)
        best->widest = *s;
    if (s->bytes.total < best->nearest.bytes.total)
        best->nearest = *s;
}

/* Tries settings, from what costs least time to what costs most: no recomputation first, then the
 * lower ZeRO stage, then the exact optimizer. */
static void try_method(best_settings *best, const qc_train_model *m, const qc_train_options *wanted,
                       qc_train_method method, const qc_train_place *place)
{
    static const qc_optimizer optimizers[] = {QC_OPTIMIZER_ADAMW, QC_OPTIMIZER_ADAM8BIT};
    /* bitsandbytes' 4-bit weights are not divided by ZeRO-3. */
    unsigned last_zero = place->gpus == 1 ? 0 : method == QC_TRAIN_QLORA ? 2 : 3;
    qc_train_options t = *wanted;
    t.method = method;
    for (int checkpointing = 0; checkpointing <= 1; checkpointing++) {
        if (wanted->checkpointing_given && checkpointing != wanted->checkpointing)
            continue;
        t.checkpointing = checkpointing;
        for (unsigned zero = 0; zero <= 3; zero++) {
            if (wanted->zero_given ? zero != wanted->zero : zero > last_zero)
                continue;
            t.zero = zero;
            for (size_t o = 0; o < sizeof optimizers / sizeof *optimizers; o++) {
                t.optimizer = wanted->optimizer_given ? wanted->optimizer : optimizers[o];
                qc_train_setting s = make_setting(m, &t, place);
                consider(best, &s);
                if (wanted->optimizer_given)
                    break;
            }
        }
    }
}

unsigned qc_train_settings(const qc_train_model *m, const qc_train_options *wanted,
                           const qc_train_place *place, qc_train_setting out[QC_TRAIN_MAX_SETTINGS])
{
    unsigned count = 0;
    for (int method = QC_TRAIN_FULL; method <= QC_TRAIN_QLORA; method++) {
        best_settings best = {0};
        if (wanted->method_given && method != (int)wanted->method)
            continue;
        try_method(&best, m, wanted, (qc_train_method)method, place);
        if (!best.any)
            continue;
        if (best.first.micro_batch == 0) {
            out[count++] = best.nearest;
            continue;
        }
        out[count++] = best.first;
        if (best.widest.micro_batch > best.first.micro_batch)
            out[count++] = best.widest;
    }
    return count;
}

const char *qc_train_label(char out[QC_TRAIN_LABEL_BYTES], const qc_train_options *t)
{
    static const char *const methods[] = {"full", "LoRA", "QLoRA"};
    static const char *const optimizers[] = {"AdamW", "Adam", "8-bit Adam", "SGD"};
    char rank[32] = "", zero[24] = "";
    if (t->method != QC_TRAIN_FULL)
        (void)snprintf(rank, sizeof rank, " r%llu", (unsigned long long)t->lora_rank);
    if (t->zero)
        (void)snprintf(zero, sizeof zero, ", ZeRO-%u", t->zero);
    (void)snprintf(out, QC_TRAIN_LABEL_BYTES, "%s%s, %s, %s%s%s", methods[t->method], rank,
                   qc_train_precision_names[t->precision], optimizers[t->optimizer],
                   t->checkpointing ? ", checkpointing" : "", zero);
    return out;
}
