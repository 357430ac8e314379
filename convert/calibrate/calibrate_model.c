/* With --calibrate, a text passes through the model in two streams, layer by layer and side by
 * side: z through the layers as they are, and x through those that were quantized. The inputs that
 * a set of linear layers gets in both streams give its second moments. Then the set is
 * quantized, and x goes on behind it. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "base/workers.h"
#include "convert/calibrate/calibrate_experts.h"
#include "convert/calibrate/calibrate_forward.h"
#include "convert/calibrate/calibrate_outputs.h"
#include "convert/calibrate/calibration_text.h"
#include "convert/family/family.h"
#include "convert/forward/forward_cross.h"
#include "convert/forward/token_text.h"
#include "convert/model/expert_split.h"
#include "convert/model/recipe_stored.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"
#include "quant/second_moments.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    qc_forward_point point;
    qc_layer_which first;
    unsigned count;
} linear_set;

/* The linear layers that have the same inputs, in the order of their points. */
static const linear_set sets[] = {
    {QC_AT_QKV, QC_LAYER_Q, 3}, {QC_AT_Q_B, QC_LAYER_Q_B, 1},   {QC_AT_KV_B, QC_LAYER_KV_B, 1},
    {QC_AT_O, QC_LAYER_O, 1},   {QC_AT_GATE, QC_LAYER_GATE, 2}, {QC_AT_DOWN, QC_LAYER_DOWN, 1},
};
#define SETS (sizeof sets / sizeof *sets)

/* Those of a layer that looks at images. */
static const linear_set cross_sets[SETS] = {
    {QC_AT_QKV, QC_LAYER_Q, 1}, {QC_AT_IMAGE, QC_LAYER_K, 2},   {QC_AT_KV_B, QC_LAYER_KV_B, 1},
    {QC_AT_O, QC_LAYER_O, 1},   {QC_AT_GATE, QC_LAYER_GATE, 2}, {QC_AT_DOWN, QC_LAYER_DOWN, 1},
};

/* Streams go by way of these points; the others are reached only for a weight. */
static int on_the_way(qc_forward_point point)
{
    return point == QC_AT_QKV || point == QC_AT_O || point == QC_AT_GATE;
}

/* A layer in memory, as it is (z) and as it becomes (x). */
typedef struct {
    uint64_t number;
    uint32_t jobs[QC_LAYER_ALL_MATRICES]; /* QC_NO_JOB: not to be quantized */
    qc_forward_weights z, x;              /* x borrows from z all that is not quantized */
    qc_calibrated_arrays arrays[QC_LAYER_ALL_MATRICES];
    qc_weights quantized[QC_LAYER_ALL_MATRICES];
} layer;

typedef struct {
    qc_calibrator *k;
    qc_checkpoint *separate; /* --experts stacked: the model with its experts apart */
    qc_forward_tensors tensors;
    uint32_t *job_of; /* [tensors of the source]: the weight that each is, if it can be calibrated
                       * (qc_calibrate_find) */
    qc_calibrate_experts experts; /* of a mixture */
    qc_calibrate_outputs outputs;
    qc_eval_windows windows;
    qc_forward_batch batch;
    qc_calibrate_states states;
    uint64_t q;            /* floats of all heads of a token */
    uint64_t image_tokens; /* of all images that the windows see, each once */
    uint64_t last; /* how many layers to go through: up to the last that has a weight to be made */
    int head;      /* the head is to be made as well */
    int apart;     /* x and z differ, because something was quantized */
} model;

/* ---- which weights ---- */

static uint32_t job_of(const model *m, const qc_forward_linear *l)
{
    return qc_calibrate_job_of(m->job_of, l);
}

static int is_cross(const model *m, uint64_t number)
{
    return m->tensors.shape.cross && m->tensors.shape.cross[number];
}

static const linear_set *sets_of(const model *m, uint64_t number)
{
    return is_cross(m, number) ? cross_sets : sets;
}

/* How many inputs the moments of a set are of, and whether the streams have the same. */
static uint64_t set_tokens(const model *m, const linear_set *g)
{
    return g->point == QC_AT_IMAGE ? m->image_tokens : m->batch.tokens;
}

static int set_apart(const model *m, const linear_set *g)
{
    return g->point != QC_AT_IMAGE && m->apart;
}

static int set_needs(const model *m, uint64_t number, const linear_set *g)
{
    for (unsigned i = 0; i < g->count; i++)
        if (qc_calibrate_needs(m->k, job_of(m, &m->tensors.layers[number].linear[g->first + i])))
            return 1;
    return 0;
}

static int layer_needs(const model *m, uint64_t number)
{
    for (size_t i = 0; i < SETS; i++)
        if (set_needs(m, number, &sets_of(m, number)[i]))
            return 1;
    const qc_experts_layer *experts = m->tensors.layers[number].experts;
    return experts && qc_calibrate_experts_need(&m->experts, experts);
}

/* A head that is the embedding is not quantized by itself. */
static uint32_t head_job(const model *m)
{
    return m->tensors.head.tensor == m->tensors.embedding ? QC_NO_JOB : job_of(m, &m->tensors.head);
}

static qc_status find_jobs(model *m, qc_error *err)
{
    const qc_checkpoint *c = m->k->source.checkpoint;
    QC_TRY(qc_arena_alloc(&m->k->arena, &m->job_of, c->tensor_count, sizeof *m->job_of, err));
    QC_TRY(qc_calibrate_find(m->job_of, m->k->plan, c, err));
    m->experts.job_of = m->job_of;
    for (uint64_t i = 0; i < m->tensors.shape.config.layers; i++)
        if (layer_needs(m, i))
            m->last = i + 1;
    m->head = qc_calibrate_needs(m->k, head_job(m));
    if (m->head)
        m->last = m->tensors.shape.config.layers;
    return QC_OK;
}

/* Warns of weights that are to be quantized and that belong to no layer of the forward pass. */
static qc_status tell_left(const model *m, qc_error *err)
{
    const qc_plan *plan = m->k->plan;
    uint32_t count = 0, *left = NULL, stack_count = 0, *stacks = NULL;
    unsigned char *has = NULL; /* per weight: a layer has it */
    QC_TRY(qc_arena_alloc(&m->k->arena, &left, plan->job_count, sizeof *left, err));
    QC_TRY(qc_arena_alloc(&m->k->arena, &stacks, plan->job_count, sizeof *stacks, err));
    QC_TRY(qc_arena_alloc(&m->k->arena, &has, qc_calibrated_numbers(plan), 1, err));
    for (uint64_t l = 0; l < m->tensors.shape.config.layers; l++) {
        const qc_forward_layer *in = &m->tensors.layers[l];
        for (int part = 0; part < QC_LAYER_ALL_MATRICES; part++)
            if (job_of(m, &in->linear[part]) != QC_NO_JOB)
                has[job_of(m, &in->linear[part])] = 1;
        if (in->experts)
            qc_calibrate_experts_mark(&m->experts, in->experts, has);
    }
    if (head_job(m) != QC_NO_JOB)
        has[head_job(m)] = 1;
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const uint32_t matrices = qc_calibrated_matrices(plan, i);
        if (!qc_scheme_is_quantized(plan->jobs[i].scheme) ||
            has[matrices ? plan->first_matrix[i] : i])
            continue;
        if (plan->jobs[i].stack)
            stacks[stack_count++] = i;
        else
            left[count++] = i;
    }
    m->k->r->left = count + stack_count;
    qc_calibrate_tell_left(m->k, stacks, stack_count,
                           "as their experts share blocks, or no layer has them");
    qc_calibrate_tell_left(
        m->k, left, count,
        m->tensors.shape.family->cross_names && !m->k->images
            ? "as the forward pass has no inputs for them (--image-states gives those of layers "
              "that look at images)"
            : "as the forward pass has no inputs for them");
    return QC_OK;
}

/* ---- the text ---- */

static qc_status make_windows(model *m, qc_error *err)
{
    const qc_plan_options *o = m->k->o;
    const qc_forward_config *c = &m->tensors.shape.config;
    uint64_t most = o->calibrate.max_tokens ? o->calibrate.max_tokens : QC_CALIBRATE_TOKENS;
    if (m->k->costs)
        most = qc_min_u64(most, QC_CALIBRATE_OUTPUT_TOKENS);
    uint64_t context = o->calibrate.context ? o->calibrate.context : QC_TOKEN_TEXT_CONTEXT;
    const qc_call *call = m->k->plan->call;
    qc_strbuf text;
    if (c->context > 0 && context > c->context && !o->calibrate.context)
        context = c->context;
    else if (c->context > 0 && context > c->context)
        qc_console_warn(call,
                        "%s: --calibration-context %" PRIu64 " is more than the %" PRIu64
                        " positions that the model was made for",
                        call->model, context, c->context);
    const qc_token_text t = {.arena = &m->k->arena,
                             .name = o->calibrate.text,
                             .tokenizer = call->tokenizer,
                             .models = {m->k->plan->model},
                             .model_count = 1,
                             .model = call->model,
                             .vocabulary = c->vocabulary,
                             .ids = c->ids,
                             .context = context < most ? context : most};
    uint64_t all = 0;
    qc_strbuf_init(&text, QC_TOKEN_TEXT_MAX);
    qc_status st = qc_calibrate_text(o, &text, err);
    if (st == QC_OK)
        st = qc_token_text_windows(&m->windows, &t, &text, &all, &m->k->r->tokenizer, err);
    qc_strbuf_deinit(&text);
    QC_TRY(st);
    qc_eval_windows_spread(&m->windows, most);
    m->batch = (qc_forward_batch){m->windows.ids, m->windows.lengths, m->windows.count,
                                  m->windows.tokens, m->windows.sequences};
    m->k->r->tokens = m->windows.tokens;
    m->k->r->windows = m->windows.count;
    m->k->r->context = t.context;
    if (m->k->images)
        QC_TRY(qc_cross_tokens(&m->image_tokens, &m->tensors.shape, m->k->images, &m->batch, err));
    if (m->windows.tokens < all)
        qc_console_detail(
            call, 1,
            "%" PRIu64 " window%s %s taken, evenly spread over the text's %" PRIu64 " tokens",
            m->windows.count, qc_plural(m->windows.count), qc_are(m->windows.count), all);
    return QC_OK;
}

/* ---- how much it is ---- */

/* Returns the operations of both streams up to a point of a layer. */
static double point_flops(const model *m, uint64_t number, qc_forward_point point)
{
    const qc_forward_linear *l = m->tensors.layers[number].linear;
    double weights = 0, tokens = (double)m->batch.tokens;
    const int cross = is_cross(m, number);
    const uint64_t keys = cross ? m->tensors.shape.image_tokens : m->windows.longest;
    double attention = 2.0 * tokens * (double)keys * (double)m->q;
    qc_layer_which from = QC_LAYER_Q, to = QC_LAYER_Q;
    if (point == QC_AT_Q_B || point == QC_AT_KV_B || point == QC_AT_O)
        to = QC_LAYER_O;
    else if (point == QC_AT_GATE)
        from = QC_LAYER_O, to = QC_LAYER_GATE;
    else if (point == QC_AT_DOWN)
        from = QC_LAYER_GATE, to = QC_LAYER_DOWN;
    else if (point == QC_AT_END)
        from = QC_LAYER_GATE, to = QC_LAYER_MATRICES;
    for (int i = (int)from; i < (int)to; i++) {
        const int of_images = cross && (i == QC_LAYER_K || i == QC_LAYER_V);
        weights += (double)l[i].rows * (double)l[i].cols *
                   (of_images ? (double)m->image_tokens / tokens : 1.0);
    }
    for (int i = QC_LAYER_MATRICES; i < QC_LAYER_ALL_MATRICES && point == QC_AT_O; i++)
        weights += (double)l[i].rows * (double)l[i].cols;
    return 2 * (2 * tokens * weights + (point == QC_AT_O ? attention : 0));
}

static double pass_flops(const model *m, uint64_t number)
{
    return point_flops(m, number, QC_AT_O) + point_flops(m, number, QC_AT_GATE) +
           point_flops(m, number, QC_AT_END);
}

static void add_forward(const model *m, qc_calibrate_outlook *a, double flops)
{
    a->operations += flops;
    a->seconds += flops * m->k->forward_seconds;
}

static qc_calibrate_room sum_of(qc_calibrate_room a, qc_calibrate_room b)
{
    return (qc_calibrate_room){qc_sat_add(a.host, b.host), qc_sat_add(a.device, b.device)};
}

static qc_calibrate_room add_set(const model *m, qc_calibrate_outlook *a,
                                 const qc_forward_linear *linears, const linear_set *p)
{
    uint32_t jobs[QC_LAYER_MATRICES];
    for (unsigned i = 0; i < p->count; i++)
        jobs[i] = job_of(m, &linears[i]);
    const int head = linears == &m->tensors.head;
    const qc_calibrate_set s = {jobs,
                                p->count,
                                linears[0].cols,
                                set_tokens(m, p),
                                p->point != QC_AT_IMAGE,
                                head ? 0 : m->outputs.task.block};
    return qc_calibrate_set_ahead(m->k, &s, a);
}

/* Behind attention, the sums of experts are where its outputs were. */
static uint64_t attended_width(const model *m)
{
    const qc_forward_shape *s = &m->tensors.shape;
    return s->experts.names && s->config.hidden > m->q ? s->config.hidden : m->q;
}

static void look_ahead(const model *m, qc_calibrate_outlook *a)
{
    const qc_forward_tensors *t = &m->tensors;
    const qc_calibrate_engine *e = m->k->engine;
    qc_calibrate_room most = {0, 0};
    *a = (qc_calibrate_outlook){.disk =
                                    m->k->costs ? 0 : qc_calibrated_bytes(m->k->plan, m->k->store)};
    for (uint64_t i = 0; i < m->last; i++) {
        qc_calibrate_room work = {0, 0};
        if (!layer_needs(m, i)) {
            add_forward(m, a, pass_flops(m, i));
        } else {
            for (size_t g = 0; g < SETS; g++) {
                const linear_set *p = &sets_of(m, i)[g];
                int needs = set_needs(m, i, p);
                if (needs || on_the_way(p->point))
                    add_forward(m, a, point_flops(m, i, p->point));
                if (needs)
                    work =
                        qc_calibrate_larger(work, add_set(m, a, &t->layers[i].linear[p->first], p));
            }
            add_forward(m, a, point_flops(m, i, QC_AT_END));
        }
        if (t->layers[i].experts)
            work = qc_calibrate_larger(
                work, qc_calibrate_experts_ahead(&m->experts, t->layers[i].experts, a));
        /* The layer is held as it was and as it becomes. */
        const qc_calibrate_room held = {.host = qc_sat_mul(2, t->layers[i].memory_bytes)};
        most = qc_calibrate_larger(most, sum_of(work, held));
    }
    if (m->head) {
        const linear_set one = {.count = 1};
        qc_calibrate_room work = add_set(m, a, &t->head, &one);
        work.host = qc_sat_add(work.host, qc_sat_mul(2, t->head.memory_bytes));
        most = qc_calibrate_larger(most, work);
    }
    most = sum_of(most, e->ops->room_text(e, &t->shape, m->batch.tokens, m->windows.longest));
    if (t->shape.experts.names)
        most.host = qc_sat_add(most.host, qc_calibrate_experts_bytes(&m->experts));
    uint64_t states =
        qc_calibrate_states_bytes(m->batch.tokens, t->shape.config.hidden, attended_width(m));
    if (states > qc_calibrate_states_memory())
        a->disk = qc_sat_add(a->disk, states);
    else
        most.host = qc_sat_add(most.host, states);
    a->memory = most.host;
    qc_calibrate_outputs_ahead(&m->outputs, a);
    a->device_memory = most.device;
}

static qc_status tell(model *m, qc_calibrate_outlook *a, qc_error *err)
{
    char tokens[QC_SIZE_TEXT_BYTES], text[128];
    look_ahead(m, a);
    char back[QC_SIZE_TEXT_BYTES + 32] = "";
    if (m->outputs.task.block > 0)
        (void)snprintf(back, sizeof back, ", %s of them backwards",
                       qc_text_count(tokens, m->outputs.batch.tokens));
    (void)snprintf(text, sizeof text, "%s tokens (%" PRIu64 " window%s of up to %" PRIu64 ")%s",
                   qc_text_count(tokens, m->batch.tokens), m->windows.count,
                   qc_plural(m->windows.count), m->windows.longest, back);
    qc_calibrate_tell(m->k, a, text);
    QC_TRY(qc_calibrate_check_room(m->k, a, err));
    return tell_left(m, err);
}

/* ---- layers ---- */

static void take_quantized(const model *m, layer *l, int part)
{
    const qc_job *j = &m->k->plan->jobs[l->jobs[part]];
    const qc_form form = qc_job_form(j);
    const qc_calibrated_arrays *a = &l->arrays[part];
    l->quantized[part] =
        (qc_weights){.form = form, .rows = j->rows, .codes = a->codes, .absmax = a->absmax};
    l->quantized[part].form.nested = 0; /* absmax holds the scales as a reader has them */
    l->x.matrices[part].quantized = &l->quantized[part];
    l->x.matrices[part].dense = NULL;
}

static qc_status open_layer(model *m, layer *l, uint64_t number, qc_error *err)
{
    memset(l, 0, sizeof *l);
    l->number = number;
    QC_TRY(qc_forward_weights_read(&l->z, &m->k->source, &m->tensors.layers[number], err));
    l->x = l->z;
    for (int i = 0; i < QC_LAYER_ALL_MATRICES; i++) {
        l->jobs[i] = job_of(m, &m->tensors.layers[number].linear[i]);
        if (l->jobs[i] == QC_NO_JOB || m->k->costs || !qc_calibrated_has(m->k->store, l->jobs[i]))
            continue;
        QC_TRY(qc_calibrated_alloc(&l->arrays[i], m->k->plan, l->jobs[i], err));
        QC_TRY(qc_calibrated_get(m->k->store, l->jobs[i], &l->arrays[i], err));
        take_quantized(m, l, i);
    }
    return QC_OK;
}

static void close_layer(layer *l)
{
    qc_forward_weights_deinit(&l->z);
    for (int i = 0; i < QC_LAYER_ALL_MATRICES; i++)
        qc_calibrated_free(&l->arrays[i]);
}

/* Takes both streams to a point of the layer. n: the number of inputs whose moments are to be
 * added, or 0. */
static qc_status run_to(model *m, const layer *l, const linear_set *p, uint64_t n, qc_error *err)
{
    const qc_calibrator *k = m->k;
    const qc_forward_point point = p->point;
    double seconds =
        point_flops(m, l->number, point) * k->forward_seconds +
        (n ? qc_moments_flops(set_tokens(m, p), n, set_apart(m, p)) : 0) * k->moment_seconds;
    return k->engine->ops->reach(k->engine, point, n > 0, seconds, err);
}

static qc_status quantize_set(model *m, layer *l, const linear_set *g, uint64_t n, qc_error *err)
{
    const qc_calibrator *k = m->k;
    uint32_t first = QC_NO_JOB;
    for (unsigned i = g->count; i-- > 0;)
        first = qc_calibrate_needs(k, l->jobs[g->first + i]) ? l->jobs[g->first + i] : first;
    QC_TRY(qc_calibrate_factor(k, n, set_apart(m, g), set_tokens(m, g), k->plan->jobs[first].name,
                               err));
    for (unsigned i = 0; i < g->count; i++) {
        qc_layer_which part = (qc_layer_which)(g->first + i);
        if (!qc_calibrate_needs(k, l->jobs[part]))
            continue;
        qc_feedback_outputs room;
        double seconds =
            qc_calibrate_weight_seconds(k, l->jobs[part], set_apart(m, g), m->outputs.task.block);
        QC_TRY(qc_calibrate_forward_weight(
            k, l->jobs[part], &l->z.matrices[part],
            qc_calibrate_outputs_of(&m->outputs, l->number, part, l->jobs[part], &room),
            &l->arrays[part], err));
        qc_calibrate_progress(k, seconds);
        if (k->costs)
            continue;
        take_quantized(m, l, (int)part);
    }
    return QC_OK;
}

/* Runs up to the point of a set, and quantizes the set where a weight is to be made. */
static qc_status calibrate_set(model *m, layer *l, const linear_set *p, int needs, qc_error *err)
{
    qc_calibrate_engine *e = m->k->engine;
    uint64_t n = needs ? l->z.matrices[p->first].cols : 0;
    if (needs)
        QC_TRY(e->ops->moments(e, n, set_apart(m, p), err));
    qc_status st = run_to(m, l, p, n, err);
    if (st == QC_OK && needs)
        st = quantize_set(m, l, p, n, err);
    e->ops->drop(e);
    return st;
}

static qc_status calibrate_part(model *m, layer *l, const linear_set *p, qc_error *err)
{
    const int needs = set_needs(m, l->number, p);
    if (needs || on_the_way(p->point))
        QC_TRY(calibrate_set(m, l, p, needs, err));
    for (unsigned i = 0; i < p->count; i++)
        m->apart |= l->jobs[p->first + i] != QC_NO_JOB && !m->k->costs;
    return QC_OK;
}

static const linear_set at_end = {.point = QC_AT_END};

static qc_status calibrate_layer(model *m, layer *l, qc_error *err)
{
    for (size_t g = 0; g < SETS; g++)
        QC_TRY(calibrate_part(m, l, &sets_of(m, l->number)[g], err));
    int over = l->number + 1 == m->last && !m->head;
    return over ? QC_OK : run_to(m, l, &at_end, 0, err);
}

/* The same with experts behind attention. */
static qc_status calibrate_mixture(model *m, layer *l, qc_error *err)
{
    size_t g = 0;
    for (; sets[g].point != QC_AT_GATE; g++)
        QC_TRY(calibrate_part(m, l, &sets[g], err));
    return run_to(m, l, &sets[g], 0, err);
}

/* Passes through a layer whose weights are all there, or stay as they are. */
static qc_status pass_layer(model *m, const layer *l, qc_error *err)
{
    qc_calibrate_engine *e = m->k->engine;
    QC_TRY(e->ops->pass(e, pass_flops(m, l->number) * m->k->forward_seconds, err));
    for (int i = 0; i < QC_LAYER_ALL_MATRICES; i++)
        m->apart |= l->jobs[i] != QC_NO_JOB && !m->k->costs;
    return QC_OK;
}

static qc_status run_layer(model *m, uint64_t number, qc_error *err)
{
    layer l;
    qc_calibrate_engine *e = m->k->engine;
    const qc_experts_layer *experts = m->tensors.layers[number].experts;
    qc_status st = open_layer(m, &l, number, err);
    if (st == QC_OK)
        st = e->ops->layer(e, number, &l.z, &l.x, err);
    if (st == QC_OK)
        st = !layer_needs(m, number) ? pass_layer(m, &l, err)
             : experts               ? calibrate_mixture(m, &l, err)
                                     : calibrate_layer(m, &l, err);
    if (st == QC_OK && experts)
        st = qc_calibrate_experts_layer(&m->experts, number, experts,
                                        l.z.vectors[QC_LAYER_POST_NORM], &m->apart, err);
    if (st == QC_ERR_NONFINITE)
        qc_error_prefix(err, "%s: layer %" PRIu64, m->k->plan->call->model,
                        qc_layer_number(&m->tensors.shape, number));
    close_layer(&l);
    return st;
}

/* Quantizes the head. Its inputs are the states behind the final norm. */
static qc_status run_head(model *m, qc_error *err)
{
    const qc_calibrator *k = m->k;
    const uint64_t n = m->tensors.shape.config.hidden;
    qc_calibrate_engine *e = k->engine;
    qc_calibrated_arrays arrays = {0};
    qc_forward_matrix w = {0};
    float *norm = NULL;
    uint32_t job = head_job(m);
    qc_status st = qc_forward_last_norm_read(&norm, &k->source, &m->tensors, err);
    if (st == QC_OK)
        st = e->ops->moments(e, n, m->apart, err);
    if (st == QC_OK)
        st = e->ops->head(e, norm, err);
    if (st == QC_OK)
        st = qc_calibrate_factor(k, n, m->apart, m->batch.tokens, k->plan->jobs[job].name, err);
    if (st == QC_OK)
        st = qc_forward_matrix_read(&w, &k->source, &m->tensors.head, err);
    if (st == QC_OK)
        st = qc_calibrate_forward_weight(k, job, &w, NULL, &arrays, err);
    e->ops->drop(e);
    qc_free(norm);
    qc_calibrated_free(&arrays);
    qc_forward_matrix_deinit(&w);
    return st;
}

/* ---- all of it ---- */

static qc_status run_text(model *m, const qc_calibrate_outlook *a, qc_error *err)
{
    qc_calibrator *k = m->k;
    const qc_forward_config *c = &m->tensors.shape.config;
    uint64_t hidden = c->hidden;
    QC_TRY(qc_progress_create(&k->progress, k->plan->call, k->costs ? "weighing" : "calibrating",
                              (uint64_t)(a->seconds * 1e6) + 1, err));
    qc_progress_hide_amounts(k->progress);
    QC_TRY(qc_calibrate_outputs_make(&m->outputs, err));
    QC_TRY(
        qc_calibrate_states_open(&m->states, k, m->batch.tokens, hidden, attended_width(m), err));
    QC_TRY(k->engine->ops->text(k->engine, &m->tensors.shape, &m->batch, &m->states, err));
    QC_TRY(qc_forward_embed(&k->source, &m->tensors, &m->batch, m->states.x, err));
    memcpy(m->states.z, m->states.x, (size_t)(m->batch.tokens * hidden) * sizeof(float));
    if (m->tensors.shape.experts.names)
        QC_TRY(qc_calibrate_experts_open(&m->experts, &m->states, err));
    for (uint64_t i = 0; i < m->last; i++)
        QC_TRY(run_layer(m, i, err));
    qc_calibrate_experts_tell_few(&m->experts);
    qc_calibrate_outputs_tell_few(&m->outputs);
    k->r->left += m->experts.few;
    return m->head ? run_head(m, err) : QC_OK;
}

/* The text goes through experts that are apart, also where they are written as stacks. */
static qc_status open_separate(model *m, qc_error *err)
{
    const qc_plan *plan = m->k->plan;
    if (plan->options->recipe.experts != QC_EXPERTS_STACKED || !qc_expert_names_of(plan->model))
        return QC_OK;
    QC_TRY(qc_checkpoint_open(&m->separate, plan->call->model, err));
    QC_TRY(qc_experts_split(m->separate, 0, err));
    m->k->source.checkpoint = m->separate;
    return QC_OK;
}

static qc_status run(model *m, qc_error *err)
{
    qc_calibrate_outlook ahead;
    QC_TRY(open_separate(m, err));
    qc_status st = qc_forward_tensors_find(&m->tensors, &m->k->arena, m->k->source.checkpoint,
                                           m->k->images, err);
    if (st == QC_ERR_UNSUPPORTED) {
        size_t used = strlen(err->msg);
        (void)snprintf(err->msg + used, sizeof err->msg - used,
                       "; --calibrate runs text through the model itself. Second moments captured "
                       "elsewhere can be given with --hessians (docs/calibration.md)");
    }
    QC_TRY(st);
    /* Costs are those of layers whose outputs have moments, and not of experts. */
    if (m->k->costs && (qc_backward_not_made(&m->tensors.shape) || m->tensors.shape.experts.names))
        return QC_OK;
    m->q = qc_forward_attended(&m->tensors.shape);
    m->experts.k = m->k;
    m->experts.tensors = &m->tensors;
    m->experts.outputs = &m->outputs;
    QC_TRY(find_jobs(m, err));
    QC_TRY(make_windows(m, err));
    m->experts.tokens = m->batch.tokens;
    QC_TRY(
        qc_calibrate_outputs_choose(&m->outputs, m->k, &m->tensors, m->job_of, &m->windows, err));
    if (m->k->costs && m->head)
        return QC_OK; /* its outputs have no moments */
    QC_TRY(qc_calibrate_measure(m->k, err));
    QC_TRY(tell(m, &ahead, err));
    if (m->k->costs && m->k->r->left > 0)
        return QC_OK;
    return (m->k->store || m->k->costs) && ahead.weights > 0 ? run_text(m, &ahead, err) : QC_OK;
}

qc_status qc_calibrate_model(qc_calibrator *k, qc_error *err)
{
    model m = {.k = k};
    qc_error own = {0};
    qc_status st = run(&m, err ? err : &own);
    qc_calibrate_experts_close(&m.experts);
    qc_calibrate_outputs_close(&m.outputs);
    qc_calibrate_states_close(&m.states);
    k->source.checkpoint = k->plan->model;
    qc_checkpoint_close(m.separate);
    qc_eval_windows_deinit(&m.windows);
    return st;
}
