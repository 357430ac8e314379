#include "convert/calibrate/calibrate_experts.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "convert/calibrate/calibrate_forward.h"
#include "convert/forward/forward_cpu.h"
#include "convert/term/console.h"
#include "quant/second_moments.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* An expert in memory, as it is (z) and as it becomes (x), and its tokens in both streams. */
typedef struct {
    uint64_t number;
    uint32_t jobs[QC_EXPERT_MATRICES];
    qc_expert_weights z, x; /* x borrows from z all that is not quantized */
    qc_calibrated_arrays arrays[QC_EXPERT_MATRICES];
    qc_weights quantized[QC_EXPERT_MATRICES];
    qc_expert_tokens x_tokens, z_tokens;
    const qc_forward_matrix *shared_gate;
    const float *norm;
    double seconds,
        gate_seconds; /* predicted for the forward passes; for those of down's moments */
    int short_of;     /* too few tokens came for some weight */
} expert;

/* ---- which weights ---- */

static uint32_t number_of(const qc_calibrate_experts *e, const qc_experts_layer *l, uint64_t i,
                          int part)
{
    return qc_calibrate_expert_job(e->job_of, l, i, part);
}

int qc_calibrate_experts_need(const qc_calibrate_experts *e, const qc_experts_layer *l)
{
    for (uint64_t i = 0; i <= l->count; i++) {
        const qc_expert_linears *x = qc_expert_of(l, i);
        for (int part = 0; x && part < QC_EXPERT_MATRICES; part++)
            if (qc_calibrate_needs(e->k, number_of(e, l, i, part)))
                return 1;
    }
    return 0;
}

void qc_calibrate_experts_mark(const qc_calibrate_experts *e, const qc_experts_layer *l,
                               unsigned char *marks)
{
    for (uint64_t i = 0; i <= l->count; i++) {
        const qc_expert_linears *x = qc_expert_of(l, i);
        for (int part = 0; x && part < QC_EXPERT_MATRICES; part++) {
            uint32_t job = number_of(e, l, i, part);
            if (job != QC_NO_JOB)
                marks[job] = 1;
        }
    }
}

/* ---- how much it is ---- */

/* The tokens that expert i is expected to get. */
static uint64_t expected(const qc_calibrate_experts *e, const qc_experts_layer *l, uint64_t i)
{
    uint64_t chosen = e->tensors->shape.experts.routing.chosen;
    return i == l->count ? e->tokens : qc_ceil_div_u64(e->tokens * chosen, l->count);
}

static double sizes_of(const qc_expert_linears *x, int from, int to)
{
    double all = 0;
    for (int i = from; i < to; i++)
        all += (double)x->linear[i].rows * (double)x->linear[i].cols;
    return all;
}

/* Both streams through an expert. */
static double pass_flops(const qc_calibrate_experts *e, const qc_experts_layer *l, uint64_t i)
{
    return 4.0 * (double)expected(e, l, i) * sizes_of(qc_expert_of(l, i), 0, QC_EXPERT_MATRICES);
}

/* Both streams up to the inputs of down. */
static double gate_flops(const qc_calibrate_experts *e, const qc_experts_layer *l, uint64_t i)
{
    return 4.0 * (double)expected(e, l, i) * sizes_of(qc_expert_of(l, i), 0, QC_EXPERT_DOWN);
}

static double router_flops(const qc_calibrate_experts *e, const qc_experts_layer *l)
{
    return 4.0 * (double)e->tokens * (double)l->router.rows * (double)l->router.cols;
}

static void add_forward(const qc_calibrate_experts *e, qc_calibrate_outlook *a, double flops)
{
    a->operations += flops;
    a->seconds += flops * e->k->forward_seconds;
}

qc_calibrate_room qc_calibrate_experts_ahead(const qc_calibrate_experts *e,
                                             const qc_experts_layer *l, qc_calibrate_outlook *a)
{
    const uint64_t block = e->outputs->task.block;
    qc_calibrate_room most = {0, 0};
    add_forward(e, a, router_flops(e, l));
    for (uint64_t i = 0; i <= l->count; i++) {
        const qc_expert_linears *x = qc_expert_of(l, i);
        uint32_t jobs[QC_EXPERT_MATRICES];
        if (!x)
            continue;
        for (int part = 0; part < QC_EXPERT_MATRICES; part++)
            jobs[part] = number_of(e, l, i, part);
        add_forward(e, a, pass_flops(e, l, i));
        const qc_calibrate_set first = {jobs, 2, x->linear[0].cols, expected(e, l, i), 1, block};
        qc_calibrate_set down = first;
        down.jobs += QC_EXPERT_DOWN;
        down.count = 1;
        down.n = x->linear[QC_EXPERT_DOWN].cols;
        if (qc_calibrate_needs(e->k, jobs[QC_EXPERT_DOWN]))
            add_forward(e, a, gate_flops(e, l, i));
        most = qc_calibrate_larger(most, qc_calibrate_set_ahead(e->k, &first, a));
        most = qc_calibrate_larger(most, qc_calibrate_set_ahead(e->k, &down, a));
    }
    return most;
}

uint64_t qc_calibrate_experts_bytes(const qc_calibrate_experts *e)
{
    return qc_sat_mul(2, qc_experts_bytes(&e->tensors->shape, e->k->threads, e->tokens, 0));
}

/* ---- buffers ---- */

qc_status qc_calibrate_experts_open(qc_calibrate_experts *e, const qc_calibrate_states *states,
                                    qc_error *err)
{
    const qc_forward_tools tools = {.threads = e->k->threads, .isa = e->k->isa};
    const qc_forward_shape *shape = &e->tensors->shape;
    e->x_hidden = states->x;
    e->z_hidden = states->z;
    QC_TRY(qc_experts_create(&e->x, shape, &tools, e->tokens, states->x_attended, err));
    return qc_experts_create(&e->z, shape, &tools, e->tokens, states->z_attended, err);
}

void qc_calibrate_experts_close(qc_calibrate_experts *e)
{
    qc_experts_deinit(&e->x);
    qc_experts_deinit(&e->z);
}

/* ---- an expert ---- */

static void take_quantized(const qc_calibrate_experts *e, expert *t, int part)
{
    const qc_job weight = qc_calibrated_weight(e->k->plan, t->jobs[part]), *j = &weight;
    const qc_calibrated_arrays *a = &t->arrays[part];
    t->quantized[part] = (qc_weights){
        .form = qc_job_form(j), .rows = j->rows, .codes = a->codes, .absmax = a->absmax};
    t->quantized[part].form.nested = 0; /* absmax holds the scales as a reader has them */
    t->x.matrices[part].quantized = &t->quantized[part];
    t->x.matrices[part].dense = NULL;
}

static void note_few(qc_calibrate_experts *e, expert *t, uint32_t job)
{
    if (e->few < QC_FEW_NAMED) {
        e->named[e->few].job = job;
        e->named[e->few].tokens = t->x_tokens.count;
    }
    e->few++;
    e->few_experts += !t->short_of;
    t->short_of = 1;
}

/* A weight by itself is left to the pipeline, and a part of a stack is searched now. */
static qc_status leave(const qc_calibrator *k, uint32_t job, const qc_forward_matrix *w,
                       qc_error *err)
{
    return job < k->plan->job_count ? QC_OK : qc_calibrate_forward_searched(k, job, w, err);
}

static qc_status open_expert(qc_calibrate_experts *e, expert *t, const qc_experts_layer *of,
                             qc_error *err)
{
    const qc_calibrator *k = e->k;
    QC_TRY(qc_expert_read(&t->z, &k->source, of, t->number, err));
    t->x = t->z;
    for (int i = 0; i < QC_EXPERT_MATRICES; i++) {
        t->jobs[i] = number_of(e, of, t->number, i);
        if (t->jobs[i] == QC_NO_JOB || !qc_calibrated_has(k->store, t->jobs[i]))
            continue;
        if (qc_calibrated_is_searched(k->store, t->jobs[i])) {
            note_few(e, t, t->jobs[i]);
            continue;
        }
        QC_TRY(qc_calibrated_alloc(&t->arrays[i], k->plan, t->jobs[i], err));
        QC_TRY(qc_calibrated_get(k->store, t->jobs[i], &t->arrays[i], err));
        take_quantized(e, t, i);
    }
    return QC_OK;
}

static void close_expert(expert *t)
{
    qc_expert_deinit(&t->z);
    for (int i = 0; i < QC_EXPERT_MATRICES; i++)
        qc_calibrated_free(&t->arrays[i]);
}

/* A matrix of the expert that has become codes. */
static int is_quantized(const expert *t, int part)
{
    return t->x.matrices[part].quantized == &t->quantized[part];
}

/* Adds the inputs of gate and up, or those of down, to the engine's moments: x's tokens in both
 * streams. */
static qc_status add_moments(qc_calibrate_experts *e, const expert *t, int down, qc_error *err)
{
    const qc_calibrate_engine *engine = e->k->engine;
    const qc_experts_states x = {e->x_hidden, t->norm}, z = {e->z_hidden, t->norm};
    for (uint64_t first = 0; first < t->x_tokens.count; first += QC_FORWARD_TOKENS) {
        const qc_expert_tokens piece = qc_experts_piece(&t->x_tokens, first);
        float *xs = e->x.x, *zs = e->z.x;
        QC_TRY(qc_experts_inputs(&e->x, &x, &piece, first, err));
        QC_TRY(qc_experts_inputs(&e->z, &z, &piece, first, err));
        if (down) {
            QC_TRY(qc_experts_gate(&e->x, &t->x, piece.count, &xs, err));
            QC_TRY(qc_experts_gate(&e->z, &t->z, piece.count, &zs, err));
        }
        QC_TRY(engine->ops->add(e->k->engine, xs, zs, piece.count, err));
    }
    return QC_OK;
}

/* Makes those of matrices [first, end) that are to be made, which have the same inputs. */
static qc_status make_set(qc_calibrate_experts *e, expert *t, int first, int end, qc_error *err)
{
    const qc_calibrator *k = e->k;
    const uint64_t n = t->z.matrices[first].cols, tokens = t->x_tokens.count;
    const int down = first == QC_EXPERT_DOWN, few = qc_calibrate_few(n, tokens);
    const int apart = e->apart || (down && (is_quantized(t, 0) || is_quantized(t, 1)));
    char text[QC_CALIBRATED_NAME_BYTES];
    uint32_t name = QC_NO_JOB;
    for (int i = end; i-- > first;)
        name = qc_calibrate_needs(k, t->jobs[i]) ? t->jobs[i] : name;
    if (name == QC_NO_JOB)
        return QC_OK;
    qc_calibrate_progress(k, (qc_moments_flops(tokens, n, apart) * k->moment_seconds) +
                                 (down ? t->gate_seconds : 0));
    if (!few) {
        QC_TRY(k->engine->ops->moments(k->engine, n, apart, err));
        QC_TRY(add_moments(e, t, down, err));
        QC_TRY(
            qc_calibrate_factor(k, n, apart, tokens, qc_calibrated_name(text, k->plan, name), err));
    }
    for (int i = first; i < end; i++) {
        if (!qc_calibrate_needs(k, t->jobs[i]))
            continue;
        if (few) {
            note_few(e, t, t->jobs[i]);
            QC_TRY(leave(k, t->jobs[i], &t->z.matrices[i], err));
            continue;
        }
        qc_feedback_outputs room;
        const qc_feedback_outputs *g = qc_calibrate_outputs_of(
            e->outputs, e->layer, qc_expert_number(t->number, i), t->jobs[i], &room);
        double seconds = qc_calibrate_weight_seconds(k, t->jobs[i], apart, g ? g->block : 0);
        QC_TRY(
            qc_calibrate_forward_weight(k, t->jobs[i], &t->z.matrices[i], g, &t->arrays[i], err));
        take_quantized(e, t, i);
        qc_calibrate_progress(k, seconds);
    }
    return QC_OK;
}

static qc_status pass(qc_experts_cpu *x, const qc_expert_weights *w, const expert *t, float *hidden,
                      const qc_expert_tokens *tokens, qc_error *err)
{
    const qc_experts_states h = {hidden, t->norm};
    return qc_experts_pass(x, w, &h, tokens, t->shared_gate, err);
}

/* An expert that no token goes to. It is read only where it is a part of a stack. */
static qc_status leave_out(qc_calibrate_experts *e, const qc_experts_layer *l, expert *t,
                           qc_error *err)
{
    for (int i = 0; i < QC_EXPERT_MATRICES; i++) {
        const uint32_t job = number_of(e, l, t->number, i);
        if (job == QC_NO_JOB)
            continue;
        const int needs = qc_calibrate_needs(e->k, job);
        if (needs || qc_calibrated_is_searched(e->k->store, job))
            note_few(e, t, job);
        if (!needs || job < e->k->plan->job_count)
            continue;
        if (!t->z.matrices[0].rows)
            QC_TRY(qc_expert_read(&t->z, &e->k->source, l, t->number, err));
        QC_TRY(leave(e->k, job, &t->z.matrices[i], err));
    }
    return QC_OK;
}

/* The weights of an expert are made, and both streams pass through it. */
static qc_status run_expert(qc_calibrate_experts *e, const qc_experts_layer *l, expert *t,
                            qc_error *err)
{
    qc_calibrate_engine *engine = e->k->engine;
    qc_calibrate_progress(e->k, t->seconds);
    if (t->x_tokens.count == 0 && t->z_tokens.count == 0) {
        return leave_out(e, l, t, err);
    }
    qc_status st = open_expert(e, t, l, err);
    if (st == QC_OK)
        st = make_set(e, t, QC_EXPERT_GATE, QC_EXPERT_DOWN, err);
    engine->ops->drop(engine);
    if (st == QC_OK)
        st = make_set(e, t, QC_EXPERT_DOWN, QC_EXPERT_MATRICES, err);
    engine->ops->drop(engine);
    if (st == QC_OK)
        st = pass(&e->x, &t->x, t, e->x_hidden, &t->x_tokens, err);
    if (st == QC_OK)
        st = pass(&e->z, &t->z, t, e->z_hidden, &t->z_tokens, err);
    return st;
}

/* ---- a layer ---- */

static qc_status route(qc_calibrate_experts *e, const qc_experts_layer *l, const float *norm,
                       qc_error *err)
{
    const qc_experts_states x = {e->x_hidden, norm}, z = {e->z_hidden, norm};
    qc_router_weights router;
    qc_status st = qc_router_read(&router, &e->k->source, l, err);
    if (st == QC_OK)
        st = qc_experts_route(&e->x, &router, &x, err);
    if (st == QC_OK)
        st = qc_experts_route(&e->z, &router, &z, err);
    qc_router_deinit(&router);
    qc_calibrate_progress(e->k, router_flops(e, l) * e->k->forward_seconds);
    return st;
}

/* Looks at all experts of stacks whose scales are not the experts' own. */
static qc_status look_at_groups(qc_calibrate_experts *e, const qc_experts_layer *l, qc_error *err)
{
    for (uint64_t i = 0; i < l->count; i++) {
        qc_expert_weights w = {0};
        qc_status st = QC_OK;
        for (int part = 0; st == QC_OK && part < QC_EXPERT_MATRICES; part++) {
            const uint32_t number = number_of(e, l, i, part);
            if (number == QC_NO_JOB || !qc_calibrate_shares_groups(e->k, number))
                continue;
            if (!w.matrices[0].rows)
                st = qc_expert_read(&w, &e->k->source, l, i, err);
            if (st == QC_OK)
                st = qc_calibrate_forward_groups_add(e->k, number, &w.matrices[part], err);
        }
        qc_expert_deinit(&w);
        QC_TRY(st);
        qc_alloc_trim();
    }
    qc_calibrate_groups_end(e->k);
    return QC_OK;
}

static qc_status run_all(qc_calibrate_experts *e, const qc_experts_layer *l, const float *norm,
                         const qc_forward_matrix *shared_gate, int *apart, qc_error *err)
{
    for (uint64_t i = 0; i <= l->count; i++) {
        expert t = {.number = i, .norm = norm};
        if (!qc_expert_of(l, i))
            continue;
        int shared = i == l->count;
        t.x_tokens = shared ? qc_experts_all(&e->x) : qc_experts_tokens(&e->x, i);
        t.z_tokens = shared ? qc_experts_all(&e->z) : qc_experts_tokens(&e->z, i);
        t.shared_gate = shared ? shared_gate : NULL;
        t.seconds = pass_flops(e, l, i) * e->k->forward_seconds;
        t.gate_seconds = gate_flops(e, l, i) * e->k->forward_seconds;
        qc_status st = run_expert(e, l, &t, err);
        for (int part = 0; part < QC_EXPERT_MATRICES; part++)
            *apart |= is_quantized(&t, part);
        close_expert(&t);
        QC_TRY(st);
        qc_alloc_trim(); /* else the heap grows with the number of experts */
    }
    return QC_OK;
}

qc_status qc_calibrate_experts_layer(qc_calibrate_experts *e, uint64_t layer,
                                     const qc_experts_layer *l, const float *norm, int *apart,
                                     qc_error *err)
{
    qc_forward_matrix gate = {0};
    e->apart = *apart;
    e->layer = layer;
    qc_status st = route(e, l, norm, err);
    int has_gate = l->shared_gate.tensor != QC_NO_TENSOR;
    if (st == QC_OK && qc_calibrate_experts_need(e, l))
        st = look_at_groups(e, l, err);
    if (st == QC_OK && has_gate)
        st = qc_forward_matrix_read(&gate, &e->k->source, &l->shared_gate, err);
    if (st == QC_OK)
        st = run_all(e, l, norm, has_gate ? &gate : NULL, apart, err);
    qc_forward_matrix_deinit(&gate);
    qc_calibrate_groups_drop(e->k);
    QC_TRY(st);
    QC_TRY(qc_experts_leave(&e->x, e->x_hidden, err));
    return qc_experts_leave(&e->z, e->z_hidden, err);
}

void qc_calibrate_experts_tell_few(const qc_calibrate_experts *e)
{
    char names[640] = "";
    size_t used = 0;
    if (e->few == 0)
        return;
    for (uint32_t i = 0; i < e->few && i < QC_FEW_NAMED; i++) {
        char name[QC_CALIBRATED_NAME_BYTES];
        (void)qc_calibrated_name(name, e->k->plan, e->named[i].job);
        int n = snprintf(names + used, sizeof names - used, "%s'%.120s' (%" PRIu64 ")",
                         i ? ", " : "", name, e->named[i].tokens);
        used += n > 0 ? (size_t)n : 0;
    }
    qc_console_warn(e->k->plan->call,
                    "%" PRIu32 " weight%s of %" PRIu32
                    " expert%s %s quantized without calibration, "
                    "as fewer tokens of the text went there than a quarter of the inputs: %s%s",
                    e->few, qc_plural(e->few), e->few_experts, qc_plural(e->few_experts),
                    qc_are(e->few), names, e->few > QC_FEW_NAMED ? ", ..." : "");
}
