/* The timing of launches. Many of them are one graph, which is timed between two events. */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/workers.h"
#include "convert/gpu/gpu_bench_internal.h"

#include <string.h>

/* This is long enough that the start of a graph (some 10 us) does not count. */
#define MIN_REPLAY_US 2000.0

double qc_bench_seconds_left(const qc_bench_gpu *b)
{
    return b->q->seconds - (double)(qc_clock_ns() - b->started_ns) / 1e9;
}

double qc_bench_point_seconds(const qc_bench_gpu *b, uint32_t shape, uint32_t m)
{
    double done = 0, ahead = 0;
    for (uint32_t i = 0; i < b->q->shape_count; i++)
        *(i <= shape ? &done : &ahead) += (double)b->q->shapes[i].n * (double)b->q->shapes[i].k;
    /* The shapes that follow will need time for other things than rounds, too. */
    double other = (double)(qc_clock_ns() - b->matmuls_ns) / 1e9 - b->timed_seconds;
    return qc_bench_share(b->q, b->r, shape, m, qc_bench_seconds_left(b) - other * ahead / done);
}

static qc_status make_graph(qc_bench_gpu *b, qc_bench_contender *c, uint32_t launches,
                            qc_error *err)
{
    if (c->graph)
        qc_cuda_graph_destroy(c->graph);
    c->graph = NULL;
    c->launches = launches;
    QC_TRY(qc_cuda_capture_begin(b->stream, err));
    qc_status st = QC_OK;
    for (uint32_t i = 0; st == QC_OK && i < launches; i++)
        st = c->launch(c->ctx, i % c->copies, b->stream, err);
    /* A capture that was begun has to be ended, whatever happened in it. */
    qc_status ended = qc_cuda_capture_end(&c->graph, b->stream, st == QC_OK ? err : NULL);
    return st == QC_OK ? ended : st;
}

/* Replays the graph once. *us: microseconds of one launch. */
static qc_status replay(qc_bench_gpu *b, const qc_bench_contender *c, double *us, qc_error *err)
{
    double ms = 0;
    QC_TRY(qc_check_interrupted(err));
    QC_TRY(qc_cuda_event_record(b->begin, b->stream, err));
    QC_TRY(qc_cuda_graph_launch(c->graph, b->stream, err));
    QC_TRY(qc_cuda_event_record(b->end, b->stream, err));
    QC_TRY(qc_cuda_event_synchronize(b->end, err));
    QC_TRY(qc_cuda_event_elapsed(&ms, b->begin, b->end, err));
    *us = ms * 1e3 / c->launches;
    return QC_OK;
}

/* Replays it once more. This replay must overwrite a wrong result with the right one. */
static qc_status replay_checked(qc_bench_gpu *b, qc_bench_contender *c, qc_error *err)
{
    if (c->spoil)
        QC_TRY(c->spoil(c->ctx, err));
    QC_TRY(replay(b, c, &c->once_us, err));
    return c->look ? c->look(c->ctx, err) : QC_OK;
}

qc_status qc_bench_ready(qc_bench_gpu *b, qc_bench_contender *c, qc_error *err)
{
    /* Libraries load their code on first use, which is not allowed during a capture. */
    QC_TRY(c->launch(c->ctx, 0, b->stream, err));
    QC_TRY(qc_cuda_stream_synchronize(b->stream, err));
    QC_TRY(make_graph(b, c, qc_bench_launches(c->copies, c->least, 1, 0), err));
    QC_TRY(replay(b, c, &c->once_us, err));
    QC_TRY(replay_checked(b, c, err));
    uint32_t launches = qc_bench_launches(c->copies, c->least, c->once_us, MIN_REPLAY_US);
    if (launches == c->launches)
        return QC_OK;
    QC_TRY(make_graph(b, c, launches, err));
    return replay_checked(b, c, err);
}

double qc_bench_round_seconds(qc_bench_contender *const *c, uint32_t count)
{
    double us = 0;
    for (uint32_t i = 0; i < count; i++)
        us += 2 * c[i]->once_us * c[i]->launches;
    return us / 1e6;
}

qc_status qc_bench_time(qc_bench_gpu *b, qc_bench_contender *const *c, uint32_t count,
                        uint32_t rounds, qc_error *err)
{
    uint64_t began_ns = qc_clock_ns();
    for (uint32_t i = 0; i < count; i++) {
        QC_TRY(qc_calloc(&c[i]->us, 2 * (size_t)rounds, sizeof *c[i]->us, err));
    }
    for (uint32_t round = 0; round < rounds; round++)
        for (uint32_t step = 0; step < 2 * count; step++) {
            qc_bench_contender *next = c[qc_bench_turn(round, step, count)];
            if (next->out.code != QC_OK)
                continue;
            qc_status st = replay(b, next, &next->us[2 * round + step / count], &next->out);
            /* Nothing writes to y between this replay and the look at it. */
            if (st == QC_OK && next->look && round + 1 == rounds && step >= count)
                st = next->look(next->ctx, &next->out);
            if (st == QC_ERR_INTERRUPTED) {
                if (err)
                    *err = next->out;
                return next->out.code;
            }
        }
    b->timed_seconds += (double)(qc_clock_ns() - began_ns) / 1e9;
    return QC_OK;
}

qc_bench_spread qc_bench_us_of(qc_bench_contender *c, uint32_t rounds)
{
    return qc_bench_spread_of(c->us, 2 * rounds);
}

qc_status qc_bench_ratio_of(qc_bench_spread *out, const qc_bench_contender *c,
                            const qc_bench_contender *of, uint32_t rounds, qc_error *err)
{
    uint32_t count = 0;
    double *ratios = NULL;
    QC_TRY(qc_calloc(&ratios, rounds, sizeof(double), err));
    for (uint32_t r = 0; r < rounds; r++) {
        double mine = c->us[2 * r] + c->us[2 * r + 1];
        if (mine > 0)
            ratios[count++] = (of->us[2 * r] + of->us[2 * r + 1]) / mine;
    }
    *out = qc_bench_spread_of(ratios, count);
    qc_free(ratios);
    return QC_OK;
}

void qc_bench_done(qc_bench_contender *c)
{
    if (c->graph)
        qc_cuda_graph_destroy(c->graph);
    qc_free(c->us);
    c->graph = NULL;
    c->us = NULL;
}

qc_status qc_bench_alone(qc_bench_gpu *b, qc_bench_contender c, qc_bench_spread *us, qc_error *err)
{
    c.copies += !c.copies;
    qc_status st = qc_bench_ready(b, &c, err);
    if (st == QC_OK) {
        /* Each of the dozen things that are measured alone gets a fiftieth of the time. */
        qc_bench_contender *only = &c;
        uint32_t rounds =
            qc_bench_rounds(b->q->rounds, qc_bench_round_seconds(&only, 1), b->q->seconds / 50);
        st = qc_bench_time(b, &only, 1, rounds, err);
        if (st == QC_OK && c.out.code != QC_OK) {
            st = c.out.code;
            if (err)
                *err = c.out;
        }
        if (st == QC_OK)
            *us = qc_bench_us_of(&c, rounds);
    }
    qc_bench_done(&c);
    return st;
}
