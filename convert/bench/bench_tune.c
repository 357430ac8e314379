/* The part of qconv bench --tune that needs no GPU: when a choice is better, for which rows of x it
 * is, and the table that is saved. */
#include "convert/device/bench.h"
#include "convert/device/tuning_file.h"

#include <inttypes.h>
#include <stdio.h>
#include <time.h>

#define LEAST_GAIN 1.01

int qc_bench_is_better(qc_bench_spread ratio)
{
    return ratio.samples >= QC_BENCH_TUNE_ROUNDS && ratio.median >= LEAST_GAIN && ratio.p10 > 1.0;
}

void qc_bench_tuned_range(const qc_bench_request *q, uint64_t m, uint64_t *least, uint64_t *most)
{
    uint64_t below = m / 2;
    for (uint32_t i = 0; i < q->m_count; i++)
        if (q->m[i] < m && q->m[i] > below)
            below = q->m[i];
    *least = below + 1;
    *most = m;
}

const char *qc_bench_plan_text(char out[QC_BENCH_PLAN_BYTES], const qc_bench_plan *p)
{
    char cut[32] = "";
    if (p->blocks)
        (void)snprintf(cut, sizeof cut, ", %" PRIu32 " blocks", p->blocks);
    else if (p->splits > 1)
        (void)snprintf(cut, sizeof cut, ", K in %" PRIu32, p->splits);
    (void)snprintf(out, QC_BENCH_PLAN_BYTES, "%s%s%s%s", p->path, p->variant ? " " : "",
                   p->variant ? p->variant : "", cut);
    return out;
}

static qc_form_kind kind_of(qc_bench_scheme s)
{
    return s == QC_BENCH_INT8         ? QC_FORM_INT8_ROWS
           : s == QC_BENCH_INT8_BLOCK ? QC_FORM_INT8_BLOCKS
                                      : QC_FORM_NF4;
}

/* Writes "2026-01-31T12:00:00Z", or "" if the clock is not set. */
static void put_date(char out[32])
{
    time_t now = time(NULL);
    struct tm utc;
    out[0] = '\0';
    if (gmtime_r(&now, &utc))
        (void)strftime(out, 32, "%Y-%m-%dT%H:%M:%SZ", &utc);
}

qc_status qc_bench_tuning_file(const qc_bench_request *q, const qc_bench_result *r, qc_arena *arena,
                               qc_strbuf *out, qc_error *err)
{
    char date[32];
    void *rows = NULL, *times = NULL;
    const qc_bench_device *d = &r->device;
    QC_TRY(qc_arena_alloc(arena, &rows, (size_t)r->tuned_count + 1, sizeof(qc_matmul_tuned), err));
    QC_TRY(qc_arena_alloc(arena, &times, (size_t)r->tuned_count + 1, sizeof(qc_tuning_times), err));
    put_date(date);
    qc_tuning t = {.gpu = d->name,
                   .sm = d->sm,
                   .multiprocessors = d->multiprocessors,
                   .driver_version = d->driver_version,
                   .runtime_version = d->runtime_version,
                   .program = "qconv " QCONV_VERSION,
                   .date = date,
                   .rows = rows,
                   .times = times};
    for (uint32_t i = 0; i < r->tuned_count; i++) {
        const qc_bench_tuned *b = &r->tuned[i];
        if (!b->better)
            continue;
        if (t.count == QC_MATMUL_TUNED_MOST)
            QC_FAIL(err, QC_ERR_USAGE,
                    "--save: the table holds at most %u choices, and more are better than the "
                    "plan's; measure fewer shapes",
                    QC_MATMUL_TUNED_MOST);
        qc_matmul_tuned *row = &t.rows[t.count];
        *row = (qc_matmul_tuned){.sm = d->sm,
                                 .multiprocessors = d->multiprocessors,
                                 .kind = kind_of(b->scheme),
                                 .n = q->shapes[b->shape].n,
                                 .k = q->shapes[b->shape].k,
                                 .choice = b->choice};
        qc_bench_tuned_range(q, b->m, &row->m_least, &row->m_most);
        ((qc_tuning_times *)times)[t.count++] = (qc_tuning_times){b->plan_us.median, b->us.median};
    }
    return qc_tuning_text(&t, out, err);
}
