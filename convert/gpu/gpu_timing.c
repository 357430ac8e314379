/* The timing of launches. Many of them are one graph, which is timed between two events. */
#include "convert/gpu/gpu_timing.h"

#include "base/alloc.h"
#include "base/workers.h"

/* This is long enough that the start of a graph (some 10 us) does not count. */
#define MIN_REPLAY_US 2000.0

/* ---- the device ---- */

qc_status qc_timer_open(qc_timer *t, int device, qc_error *err)
{
    uint64_t free_bytes = 0, total = 0;
    QC_TRY(qc_cuda_device_open(&t->device, device, err));
    QC_TRY(qc_cuda_use(&t->device, err));
    QC_TRY(qc_matmul_create(&t->handle, device, err));
    QC_TRY(qc_cuda_stream_create(&t->stream, err));
    QC_TRY(qc_cuda_event_create(&t->begin, 1, err));
    QC_TRY(qc_cuda_event_create(&t->end, 1, err));
    /* A workspace, so that cuBLAS finds the same in a graph as outside of one. Without it, cuBLAS
     * would allocate and release memory around every product that is timed. */
    QC_TRY(qc_cuda_memory(&free_bytes, &total, err));
    if (qc_matmul_no_gemm(t->handle) || free_bytes / 16 < QC_MATMUL_DENSE_WORKSPACE)
        return QC_OK;
    return qc_cuda_malloc(&t->gemm_workspace, (size_t)QC_MATMUL_DENSE_WORKSPACE, err);
}

void qc_timer_close(qc_timer *t)
{
    qc_cuda_free(t->gemm_workspace);
    if (t->end)
        qc_cuda_event_destroy(t->end);
    if (t->begin)
        qc_cuda_event_destroy(t->begin);
    if (t->stream)
        qc_cuda_stream_destroy(t->stream);
    qc_matmul_destroy(t->handle);
}

/* ---- contenders ---- */

static qc_status make_graph(qc_timer *t, qc_timed *c, uint32_t launches, qc_error *err)
{
    if (c->graph)
        qc_cuda_graph_destroy(c->graph);
    c->graph = NULL;
    c->launches = launches;
    QC_TRY(qc_cuda_capture_begin(t->stream, err));
    qc_status st = QC_OK;
    for (uint32_t i = 0; st == QC_OK && i < launches; i++)
        st = c->launch(c->ctx, i % c->copies, t->stream, err);
    /* A capture that was begun has to be ended, whatever happened in it. */
    qc_status ended = qc_cuda_capture_end(&c->graph, t->stream, st == QC_OK ? err : NULL);
    return st == QC_OK ? ended : st;
}

/* Replays the graph once. *us: microseconds of one launch. */
static qc_status replay(qc_timer *t, const qc_timed *c, double *us, qc_error *err)
{
    double ms = 0;
    QC_TRY(qc_check_interrupted(err));
    QC_TRY(qc_cuda_event_record(t->begin, t->stream, err));
    QC_TRY(qc_cuda_graph_launch(c->graph, t->stream, err));
    QC_TRY(qc_cuda_event_record(t->end, t->stream, err));
    QC_TRY(qc_cuda_event_synchronize(t->end, err));
    QC_TRY(qc_cuda_event_elapsed(&ms, t->begin, t->end, err));
    *us = ms * 1e3 / c->launches;
    return QC_OK;
}

/* Replays it once more. This replay must overwrite a wrong result with the right one. */
static qc_status replay_checked(qc_timer *t, qc_timed *c, qc_error *err)
{
    if (c->spoil)
        QC_TRY(c->spoil(c->ctx, err));
    QC_TRY(replay(t, c, &c->once_us, err));
    return c->look ? c->look(c->ctx, err) : QC_OK;
}

qc_status qc_timed_ready(qc_timer *t, qc_timed *c, qc_error *err)
{
    /* Libraries load their code on first use, which is not allowed during a capture. */
    QC_TRY(c->launch(c->ctx, 0, t->stream, err));
    QC_TRY(qc_cuda_stream_synchronize(t->stream, err));
    QC_TRY(make_graph(t, c, qc_timing_launches(c->copies, c->least, 1, 0), err));
    QC_TRY(replay(t, c, &c->once_us, err));
    QC_TRY(replay_checked(t, c, err));
    uint32_t launches = qc_timing_launches(c->copies, c->least, c->once_us, MIN_REPLAY_US);
    if (launches == c->launches)
        return QC_OK;
    QC_TRY(make_graph(t, c, launches, err));
    return replay_checked(t, c, err);
}

double qc_timed_round_seconds(qc_timed *const *c, uint32_t count)
{
    double us = 0;
    for (uint32_t i = 0; i < count; i++)
        us += 2 * c[i]->once_us * c[i]->launches;
    return us / 1e6;
}

qc_status qc_timed_rounds(qc_timer *t, qc_timed *const *c, uint32_t count, uint32_t rounds,
                          qc_error *err)
{
    for (uint32_t i = 0; i < count; i++) {
        QC_TRY(qc_calloc(&c[i]->us, 2 * (size_t)rounds, sizeof *c[i]->us, err));
    }
    for (uint32_t round = 0; round < rounds; round++)
        for (uint32_t step = 0; step < 2 * count; step++) {
            qc_timed *next = c[qc_timing_turn(round, step, count)];
            if (next->out.code != QC_OK)
                continue;
            qc_status st = replay(t, next, &next->us[2 * round + step / count], &next->out);
            /* Nothing writes to y between this replay and the look at it. */
            if (st == QC_OK && next->look && round + 1 == rounds && step >= count)
                st = next->look(next->ctx, &next->out);
            if (st == QC_ERR_INTERRUPTED) {
                if (err)
                    *err = next->out;
                return next->out.code;
            }
        }
    return QC_OK;
}

void qc_timed_done(qc_timed *c)
{
    if (c->graph)
        qc_cuda_graph_destroy(c->graph);
    qc_free(c->us);
    c->graph = NULL;
    c->us = NULL;
}

qc_status qc_timed_alone(qc_timer *t, qc_timed c, uint32_t rounds, double seconds, qc_spread *us,
                         qc_error *err)
{
    c.copies += !c.copies;
    qc_status st = qc_timed_ready(t, &c, err);
    if (st == QC_OK) {
        qc_timed *only = &c;
        rounds = qc_timing_rounds(rounds, qc_timed_round_seconds(&only, 1), seconds);
        st = qc_timed_rounds(t, &only, 1, rounds, err);
        if (st == QC_OK && c.out.code != QC_OK) {
            st = c.out.code;
            if (err)
                *err = c.out;
        }
        if (st == QC_OK)
            *us = qc_spread_of(c.us, 2 * rounds);
    }
    qc_timed_done(&c);
    return st;
}
