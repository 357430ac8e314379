/* --tune: for a shape and an M all candidates take turns. Then the fastest one and the plan's own
 * are measured again in rounds of their own, which decide, so that a candidate that was only lucky
 * once among many is not taken for a good one. */
#include "base/alloc.h"
#include "convert/device/tuning_file.h"
#include "convert/gpu/gpu_bench_internal.h"

#include <stdio.h>

/* This share of the rounds that were asked for is enough to see which candidate is fastest. */
#define SIEVE_SHARE 3u
/* The least launches in a graph. They are few, because there are many candidates and every graph
 * takes 2 ms in any case. */
#define LEAST 4u

typedef struct {
    qc_bench_player p; /* first, as qc_bench_spoil_y and qc_bench_look_at_y take its address */
    const qc_bench_weights *weights;
    qc_matmul_tuned row; /* path AUTO: the plan's own choice */
    qc_bench_plan plan;
} candidate;

static uint64_t limit_of(const qc_bench_work *w)
{
    return w->b->device.memory_bytes / 8;
}

/* While this launch is put on the stream, the table has one row. */
static qc_status launch(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const candidate *c = ctx;
    const qc_bench_work *w = c->p.w;
    qc_matmul *h = w->b->handle;
    QC_TRY(qc_matmul_set_tuning(h, &c->row, c->row.choice.path != QC_MATMUL_AUTO, err));
    qc_status st = qc_matmul_run(h, &c->weights->w[copy], &w->io, QC_MATMUL_AUTO, w->workspace,
                                 w->workspace_bytes, s, err);
    qc_status reset = qc_matmul_set_tuning(h, NULL, 0, NULL);
    return st == QC_OK ? reset : st;
}

static qc_matmul_io io_of(const qc_bench_work *w, uint64_t m)
{
    return (qc_matmul_io){.m = m, .x = w->x, .x_dtype = w->dtype, .y = w->y, .y_dtype = w->dtype};
}

uint64_t qc_bench_tune_workspace(const qc_bench_work *w, uint32_t scheme, uint64_t limit_bytes)
{
    const qc_bench_request *q = w->b->q;
    const qc_bench_weights *weights = &w->weights[scheme];
    uint64_t most = 0;
    for (uint32_t i = 0; i < q->m_count && q->m[i] <= w->max_m; i++) {
        qc_matmul_choice choices[QC_MATMUL_CANDIDATES_MOST];
        const qc_matmul_io io = io_of(w, q->m[i]);
        qc_matmul_shape s = qc_bench_shape_of(w->b, &weights->w[0], &io);
        uint32_t count = qc_matmul_candidates(&w->b->device, &s, limit_bytes, choices);
        for (uint32_t c = 0; c < count; c++) {
            qc_matmul_plan p;
            s.choice = choices[c];
            if (qc_matmul_plan_make(&w->b->device, &s, QC_MATMUL_AUTO, limit_bytes, &p, NULL) ==
                    QC_OK &&
                p.workspace_bytes > most)
                most = p.workspace_bytes;
        }
    }
    return most;
}

static qc_status plan_of(const qc_bench_work *w, const candidate *c, qc_bench_plan *out,
                         qc_error *err)
{
    qc_matmul_plan p;
    qc_matmul_shape s = qc_bench_shape_of(w->b, &c->weights->w[0], &w->io);
    s.choice = c->row.choice;
    QC_TRY(qc_matmul_plan_make(&w->b->device, &s, QC_MATMUL_AUTO, w->workspace_bytes, &p, err));
    *out = (qc_bench_plan){.path = qc_matmul_path_name(p.path),
                           .variant = qc_tuning_variant_name(p.variant),
                           .splits = p.splits,
                           .blocks = p.variant == QC_MATMUL_STREAM ? p.blocks : 0};
    return QC_OK;
}

/* Finds the fastest of c[1 .. count), compared with c[0] round by round. *out is 0 where none is
 * faster. */
static qc_status fastest(qc_bench_contender *const *c, uint32_t count, uint32_t rounds,
                         uint32_t *out, qc_error *err)
{
    double best = 1.0;
    *out = 0;
    for (uint32_t i = 1; i < count; i++) {
        qc_bench_spread ratio;
        if (c[i]->out.code != QC_OK)
            continue;
        QC_TRY(qc_bench_ratio_of(&ratio, c[i], c[0], rounds, err));
        if (ratio.samples && ratio.median > best) {
            best = ratio.median;
            *out = i;
        }
    }
    return QC_OK;
}

static qc_status drop(const candidate *c, const qc_error *why, qc_error *err)
{
    return qc_bench_drop(c->p.w, c->p.contender, c->plan.path, why, err);
}

/* Measures the plan's own choice against one other. */
static qc_status decide(const qc_bench_contender *own, const qc_bench_contender *other,
                        qc_bench_tuned *t, qc_error *err)
{
    qc_bench_work *w = ((candidate *)own->ctx)->p.w;
    qc_bench_contender two[2] = {*own, *other};
    qc_bench_contender *const both[2] = {&two[0], &two[1]};
    two[0].us = two[1].us = NULL; /* the graphs still belong to own and other */
    uint32_t rounds = qc_bench_rounds(w->b->q->rounds, qc_bench_round_seconds(both, 2),
                                      qc_bench_point_seconds(w->b, w->index, w->m_index) / 2 /
                                          w->b->q->scheme_count);
    rounds = rounds < QC_BENCH_TUNE_ROUNDS ? QC_BENCH_TUNE_ROUNDS : rounds;
    qc_status st = qc_bench_time(w->b, both, 2, rounds, err);
    for (uint32_t i = 0; st == QC_OK && i < 2; i++)
        if (two[i].out.code != QC_OK)
            st = drop(two[i].ctx, &two[i].out, err);
    if (st == QC_OK && two[0].out.code == QC_OK && two[1].out.code == QC_OK) {
        st = qc_bench_ratio_of(&t->ratio, &two[1], &two[0], rounds, err);
        t->us = qc_bench_us_of(&two[1], rounds);
        t->better = st == QC_OK && qc_bench_is_better(t->ratio);
    }
    if (st == QC_OK && two[0].out.code == QC_OK)
        t->plan_us = qc_bench_us_of(&two[0], rounds);
    qc_free(two[0].us);
    qc_free(two[1].us);
    return st;
}

/* c[0] is the plan's own choice. If it was not right to the end, t->plan_us has no samples
 * afterwards. */
static qc_status compare(qc_bench_contender *const *c, uint32_t count, qc_bench_tuned *t,
                         qc_error *err)
{
    const candidate *own = c[0]->ctx;
    qc_bench_work *w = own->p.w;
    const qc_bench_request *q = w->b->q;
    uint32_t best = 0, wanted = q->rounds / SIEVE_SHARE;
    uint32_t rounds =
        qc_bench_rounds(wanted < 1 ? 1 : wanted, qc_bench_round_seconds(c, count),
                        qc_bench_point_seconds(w->b, w->index, w->m_index) / 2 / q->scheme_count);
    QC_TRY(qc_bench_time(w->b, c, count, rounds, err));
    for (uint32_t i = 0; i < count; i++)
        if (c[i]->out.code != QC_OK)
            QC_TRY(drop(c[i]->ctx, &c[i]->out, err));
    if (c[0]->out.code != QC_OK)
        return QC_OK;
    QC_TRY(fastest(c, count, rounds, &best, err));
    t->plan = own->plan;
    t->turn = (qc_bench_rotation){c[0]->copies, c[0]->launches,
                                  c[0]->copies *
                                      qc_bench_weight_bytes(t->scheme, w->shape->n, w->shape->k)};
    if (best == 0) {
        t->plan_us = qc_bench_us_of(c[0], rounds);
        return QC_OK;
    }
    const candidate *other = c[best]->ctx;
    t->choice = other->row.choice;
    t->other = other->plan;
    return decide(c[0], c[best], t, err);
}

static qc_status try_candidate(candidate *ctx, qc_bench_contender *c, qc_error *err)
{
    char text[QC_BENCH_PLAN_BYTES];
    QC_TRY(plan_of(ctx->p.w, ctx, &ctx->plan, err));
    (void)snprintf(ctx->p.what, sizeof ctx->p.what, "the %s matmul (%s)",
                   qc_bench_scheme_name(ctx->weights->scheme),
                   qc_bench_plan_text(text, &ctx->plan));
    QC_TRY(qc_bench_run_and_check(&ctx->p, c, err));
    return qc_bench_ready(ctx->p.w->b, c, err);
}

static qc_status tune_scheme(qc_bench_work *w, uint32_t scheme, qc_error *err)
{
    const qc_bench_weights *weights = &w->weights[scheme];
    qc_bench_result *r = w->b->r;
    qc_matmul_choice choices[QC_MATMUL_CANDIDATES_MOST];
    qc_bench_contender c[QC_MATMUL_CANDIDATES_MOST] = {{0}};
    qc_bench_contender *in[QC_MATMUL_CANDIDATES_MOST];
    candidate ctx[QC_MATMUL_CANDIDATES_MOST];
    uint32_t in_count = 0;
    qc_status st = QC_OK;
    if (w->why[1 + scheme].code != QC_OK)
        return qc_bench_drop(w, 1 + scheme, NULL, &w->why[1 + scheme], err);
    qc_matmul_shape s = qc_bench_shape_of(w->b, &weights->w[0], &w->io);
    uint32_t count = qc_matmul_candidates(&w->b->device, &s, limit_of(w), choices);
    qc_bench_tuned t = {.shape = w->index,
                        .scheme = weights->scheme,
                        .m = w->io.m,
                        .repacked = weights->w[0].row_bytes != 0};
    if (count == 0) {
        r->left_out++;
        return QC_OK;
    }
    for (uint32_t i = 0; st == QC_OK && i < count; i++) {
        ctx[i] = (candidate){.p = {.w = w, .contender = 1 + scheme, .truth = 1 + scheme},
                             .weights = weights,
                             .row = {.kind = s.kind,
                                     .n = s.n,
                                     .k = s.k,
                                     .m_least = 1,
                                     .m_most = UINT64_MAX,
                                     .choice = choices[i]}};
        c[i] = (qc_bench_contender){.launch = launch,
                                    .ctx = &ctx[i],
                                    .copies = weights->copies,
                                    .least = LEAST,
                                    .spoil = qc_bench_spoil_y,
                                    .look = qc_bench_look_at_y};
        if (try_candidate(&ctx[i], &c[i], &c[i].out) != QC_OK)
            st = drop(&ctx[i], &c[i].out, err);
        else
            in[in_count++] = &c[i];
    }
    t.candidates = in_count;
    /* Without the plan's own choice there is nothing that another one could be better than. */
    int have_own = in_count && in[0] == &c[0];
    if (st == QC_OK && have_own)
        st = compare(in, in_count, &t, err);
    for (uint32_t i = 0; i < count; i++)
        qc_bench_done(&c[i]);
    if (st != QC_OK || !t.plan_us.samples)
        return st;
    r->tuned[r->tuned_count++] = t;
    w->b->sink->tuned(w->b->sink->ctx, &t);
    qc_bench_save(w->b);
    return QC_OK;
}

qc_status qc_bench_tune_point(qc_bench_work *w, qc_error *err)
{
    w->io = io_of(w, w->b->q->m[w->m_index]);
    for (uint32_t i = 0; i < w->b->q->scheme_count; i++)
        QC_TRY(tune_scheme(w, i, err));
    return QC_OK;
}
