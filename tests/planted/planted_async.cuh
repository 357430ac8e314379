/* Planted faults: bulk loads, barriers that count bytes, and products of a warpgroup. */
#ifndef QC_TESTS_PLANTED_ASYNC_CUH
#define QC_TESTS_PLANTED_ASYNC_CUH

#include "kernels/ptx_hopper.cuh"

enum { PA_STEPS = 8, PA_STAGES = 2, PA_WIDTH = 16, PA_A = 64 * 16, PA_B = 16 * PA_WIDTH };
enum { PA_THREADS = 128 + 32 };

typedef enum {
    PA_RIGHT,
    PA_NO_FULL_WAIT,    /* consumers do not wait for what is loaded */
    PA_WRONG_PARITY,    /* they always wait for the first phase */
    PA_NO_EMPTY_WAIT,   /* the producer does not wait for the consumers */
    PA_EARLY_RELEASE,   /* a stage is given back before its product was waited for */
    PA_NO_RELEASE,      /* one warp gives no stage back */
    PA_ONE_A,           /* the next A goes to the registers of the one that is used */
    PA_D_READ,          /* D is read before the wait */
    PA_D_WRITTEN,       /* D is written before the wait */
    PA_NO_WAIT,         /* nobody waits for the last product */
    PA_NO_COMMIT,       /* the last product is in no group */
    PA_NO_FENCE,        /* there is no fence before a product */
    PA_OTHER_ORDER,     /* a warp commits later than the others */
    PA_ONE_LESS,        /* a warp leaves out the last product */
    PA_LANE_LESS,       /* a lane leaves it out */
    PA_TOO_FEW_BYTES,   /* fewer bytes are announced than are loaded */
    PA_TOO_MANY_BYTES,  /* more are */
    PA_NOT_READY,       /* barriers are not made visible to bulk loads */
    PA_NO_INIT_BARRIER, /* the block does not wait for the barriers to be initialized */
    PA_COPIED_B,        /* threads write B */
    PA_OVERWRITTEN      /* a barrier is taken for other memory */
} pa_fault;

namespace
{
struct pa_stage {
    __align__(16) uint16_t a[PA_A]; /* [64][16] */
    uint16_t b[PA_B];               /* [2][2] matrices of 8 x 8, the first index that of k */
};

struct pa_ring_shared {
    pa_stage stage[PA_STAGES];
    uint64_t full[PA_STAGES], empty[PA_STAGES];
};

template <pa_fault fault> QC_DEVICE void pa_produce(pa_ring_shared &s, const pa_stage *from)
{
    for (unsigned step = 0; step < PA_STEPS; step++) {
        unsigned i = step % PA_STAGES;
        if (fault != PA_NO_EMPTY_WAIT)
            qc_mbarrier_wait(&s.empty[i], step / PA_STAGES % 2 ^ 1);
        uint32_t bytes = sizeof(pa_stage);
        bytes += fault == PA_TOO_MANY_BYTES ? 16 : 0;
        bytes -= fault == PA_TOO_FEW_BYTES ? 16 : 0;
        qc_mbarrier_expect(&s.full[i], bytes);
        qc_bulk_load(s.stage[i].a, from[step].a, sizeof(s.stage[i].a), &s.full[i]);
        qc_bulk_load(s.stage[i].b, from[step].b, sizeof(s.stage[i].b), &s.full[i]);
    }
}

/* d [64][16] = the sum of a b over the steps. Four warps multiply, and one thread of a fifth loads.
 * The product of a step runs while the A of the next is read. */
template <pa_fault fault> static __global__ void pa_ring(const pa_stage *from, float *d)
{
    QC_SHARED(pa_ring_shared, s);
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (unsigned i = 0; i < PA_STAGES; i++) {
            qc_mbarrier_init(&s.full[i], 1);
            qc_mbarrier_init(&s.empty[i], 4);
        }
        if (fault != PA_NOT_READY)
            qc_mbarrier_ready();
    }
    if (fault != PA_NO_INIT_BARRIER)
        __syncthreads();
    if (warp == 4) {
        if (lane == 0)
            pa_produce<fault>(s, from);
        return;
    }
    uint32_t a[2][4];
    float sum[PA_WIDTH / 2];
    auto release = [&](unsigned step) {
        if (lane == 0 && !(fault == PA_NO_RELEASE && warp == 2))
            qc_mbarrier_arrive(&s.empty[step % PA_STAGES]);
    };
    for (unsigned step = 0; step < PA_STEPS; step++) {
        pa_stage &now = s.stage[step % PA_STAGES];
        uint32_t(&to)[4] = a[fault == PA_ONE_A ? 0 : step % 2];
        bool last = step == PA_STEPS - 1;
        if (fault != PA_NO_FULL_WAIT)
            qc_mbarrier_wait(&s.full[step % PA_STAGES],
                             fault == PA_WRONG_PARITY ? 0 : step / PA_STAGES % 2);
        for (unsigned i = 0; i < 4; i++) {
            unsigned row = warp * 16 + lane / 4 + i % 2 * 8, column = lane % 4 * 2 + i / 2 * 8;
            const uint16_t *two = &now.a[row * 16 + column];
            to[i] = two[0] | (uint32_t)two[1] << 16;
        }
        if (fault == PA_COPIED_B && threadIdx.x == 0)
            for (uint16_t &b : now.b)
                b ^= 0x8000; /* -b */
        if (fault == PA_OVERWRITTEN && threadIdx.x == 0 && step == 1)
            s.full[0] = 0;
        if (fault != PA_NO_FENCE)
            qc_wgmma_fence();
        if (!(last &&
              ((fault == PA_ONE_LESS && warp == 1) || (fault == PA_LANE_LESS && lane == 9))))
            qc_wgmma(sum, to, qc_wgmma_b(qc_shared_address(now.b), 2 * 128), step != 0);
        if (fault == PA_OTHER_ORDER && warp == 3)
            qc_wgmma_fence();
        if (!(fault == PA_NO_COMMIT && last))
            qc_wgmma_commit();
        if (fault == PA_EARLY_RELEASE) {
            release(step);
            qc_wgmma_wait<1>();
        } else if (step) {
            qc_wgmma_wait<1>();
            release(step - 1);
        }
    }
    if (fault == PA_D_WRITTEN)
        sum[0] = 0;
    float before = sum[0];
    if (fault != PA_NO_WAIT)
        qc_wgmma_wait<0>();
    for (unsigned i = 0; i < PA_WIDTH / 2; i++)
        d[(warp * 16 + lane / 4 + i % 4 / 2 * 8) * PA_WIDTH + i / 4 * 8 + lane % 4 * 2 + i % 2] =
            fault == PA_D_READ && i == 0 ? before : sum[i];
}

/* In rounds four warps bring 16 bytes with each thread's cp.async, and four others read those of
 * other threads. fault 1: the writers arrive without their copies; 2: before they start them; 3: a
 * warp asks for other registers; 4: the writers do not wait for the readers. */
enum { PA_ROUNDS = 5 };
struct pa_copied_shared {
    __align__(16) uint32_t word[128][4];
    uint64_t full, empty;
};

template <int fault> static __global__ void pa_copied(const uint32_t *in, uint32_t *out)
{
    QC_SHARED(pa_copied_shared, s);
    unsigned t = threadIdx.x % 128;
    if (threadIdx.x == 0) {
        qc_mbarrier_init(&s.full, 128);
        qc_mbarrier_init(&s.empty, 128);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        if (fault == 3 && t < 32)
            qc_registers_fewer<32>();
        else
            qc_registers_fewer<24>();
    } else {
        qc_registers_more<240>();
    }
    for (unsigned round = 0; round < PA_ROUNDS; round++) {
        if (threadIdx.x < 128) {
            if (fault != 4)
                qc_mbarrier_wait(&s.empty, round % 2 ^ 1);
            if (fault == 2)
                qc_mbarrier_arrive_copied(&s.full);
            qc_cp_async_16(s.word[t], in + (round * 128 + t) * 4, 16);
            if (fault == 1)
                qc_mbarrier_arrive(&s.full);
            else if (fault != 2)
                qc_mbarrier_arrive_copied(&s.full);
        } else {
            qc_mbarrier_wait(&s.full, round % 2);
            out[round * 128 + t] = s.word[t ^ 77][t % 4];
            qc_mbarrier_arrive(&s.empty);
        }
    }
}

/* Doubles PA_B words of x; the second of two such kernels may begin before the first. early: it
 * loads x before it waits for the other. */
struct pa_step_shared {
    __align__(16) float x[PA_B];
    uint64_t full;
};

struct pa_step_args {
    const float *x;
    float *y;
};

template <bool early> static __global__ void pa_step(const pa_step_args a)
{
    QC_SHARED(pa_step_shared, s);
    if (!early)
        qc_grid_wait();
    if (threadIdx.x == 0) {
        qc_mbarrier_init(&s.full, 1);
        qc_mbarrier_ready();
        qc_mbarrier_expect(&s.full, sizeof(s.x));
        qc_bulk_load(s.x, a.x, sizeof(s.x), &s.full);
    }
    if (early)
        qc_grid_wait();
    __syncthreads();
    qc_mbarrier_wait(&s.full, 0);
    for (unsigned i = threadIdx.x; i < PA_B; i += blockDim.x)
        a.y[i] = 2 * s.x[i];
}
} // namespace

#endif
