#include "quant/piecework.h"

#include "base/checked.h"
#include "base/workers.h"

typedef struct {
    qc_piece_fn fn;
    void *ctx;
    uint64_t count;
    atomic_uint_fast64_t next;
} job;

static qc_status take(qc_team *team, unsigned thread, void *ctx, qc_error *err)
{
    job *j = ctx;
    for (;;) {
        const uint64_t piece = atomic_fetch_add(&j->next, 1);
        if (piece >= j->count)
            return QC_OK;
        QC_TRY(qc_check_stopped(team, err));
        QC_TRY(j->fn(j->ctx, thread, piece, err));
    }
}

qc_status qc_piecework(unsigned threads, uint64_t count, qc_piece_fn fn, void *ctx, qc_error *err)
{
    job j = {.fn = fn, .ctx = ctx, .count = count};
    atomic_init(&j.next, 0);
    QC_TRY(qc_check_interrupted(err));
    if (count == 0)
        return QC_OK;
    return qc_team_run(qc_min_u32(count, threads), take, &j, err);
}
