#include "base/read_rate.h"

#include "base/clock.h"
#include "base/workers.h"

#define STEP  256u  /* bytes */
#define AHEAD 4096u /* bytes, of prefetches */

typedef struct {
    const unsigned char *bytes;
    uint64_t share;
    _Atomic uint64_t sum; /* so that nothing is read in vain */
} reading;

typedef uint64_t vec256 __attribute__((vector_size(32), aligned(1), may_alias));

static qc_status read_share(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    reading *r = ctx;
    const unsigned char *p = r->bytes + index * r->share;
    vec256 sum[STEP / sizeof(vec256)] = {{0}};
    (void)team;
    (void)err;
    for (uint64_t i = 0; i < r->share; i += STEP) {
        for (unsigned k = 0; k < STEP; k += 64)
            __builtin_prefetch(p + i + k + AHEAD);
        for (unsigned k = 0; k < STEP / sizeof(vec256); k++)
            sum[k] ^= *(const vec256 *)(const void *)(p + i + k * sizeof(vec256));
    }
    for (unsigned k = 1; k < STEP / sizeof(vec256); k++)
        sum[0] ^= sum[k];
    atomic_fetch_xor(&r->sum, sum[0][0] ^ sum[0][1] ^ sum[0][2] ^ sum[0][3]);
    return QC_OK;
}

qc_status qc_read_memory(const void *bytes, uint64_t count, unsigned threads, double *seconds,
                         qc_error *err)
{
    reading r = {.bytes = bytes, .share = count / threads / STEP * STEP};
    const uint64_t began = qc_clock_ns();
    QC_TRY(qc_team_run(threads, read_share, &r, err));
    *seconds = (double)(qc_clock_ns() - began) * 1e-9;
    return QC_OK;
}
