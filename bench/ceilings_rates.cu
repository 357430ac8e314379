/* Runs one instruction over and over, to find the rates that docs/kernels.md calculates with.
 *
 * A thread has 8 chains (4 or 2 for matrix products). Every link of a chain is one instruction, or
 * one instruction and what keeps the compiler from leaving it out. The loop is 64 of them long.
 * Threads have at most 64 registers. */
#include "bench/ceilings_ptx.cuh"

namespace
{
constexpr unsigned THREADS = QC_CEILING_THREADS;
constexpr int CHAINS = 8;
constexpr int PER_STEP = 16; /* instructions of a thread in a step */
const char WHAT[] = "ceilings_rates";

enum {
    FFMA,      /* float multiply-add */
    IMAD,      /* 32-bit multiply-add */
    LOP3,      /* logic of three words */
    SHF,       /* funnel shift */
    PRMT,      /* bytes out of two words */
    HMUL2,     /* two products of float16 */
    HALF,      /* float to float16 (F2F); and a LOP3 */
    PACK,      /* two floats to float16 (F2FP) */
    SHFL,      /* shuffle */
    LDS_32,    /* shared memory, no conflicts; the next address is what was loaded */
    LDS_64,    /* and 1 LOP3 */
    LDS_128,   /* and 2 LOP3 */
    LDS_WORST, /* 32 bits, all lanes in one bank */
    HMMA,      /* mma.m16n8k16 */
    HMMA_884,  /* mma.m8n8k4 */
    OPS
};

/* The words of shared memory: 16 bytes per lane and 8 chains of different rows, for all kinds of
 * loads. LDS_WORST has a row of 128 bytes per lane. */
constexpr unsigned ROOM_WORDS = 32 * 32;
struct room_for_loads {
    uint32_t word[ROOM_WORDS];
};
struct no_room {
    uint32_t word[1];
};
template <int op> struct room_of {
    using type = no_room;
};
template <> struct room_of<LDS_32> {
    using type = room_for_loads;
};
template <> struct room_of<LDS_64> {
    using type = room_for_loads;
};
template <> struct room_of<LDS_128> {
    using type = room_for_loads;
};
template <> struct room_of<LDS_WORST> {
    using type = room_for_loads;
};

__host__ __device__ constexpr bool loads(int op)
{
    return op >= LDS_32 && op <= LDS_WORST;
}
/* How many words a lane gets by one load. */
__host__ __device__ constexpr unsigned width(int op)
{
    return op == LDS_64 ? 2 : op == LDS_128 ? 4 : 1;
}
__host__ __device__ constexpr unsigned first_word(int op, unsigned lane)
{
    return op == LDS_WORST ? lane * 32 : lane * width(op);
}

/* Every lane's words, exclusive-ored, are the byte offset of the first one. So a chain stays where
 * it is, and it needs all words of a load. */
template <int op> QC_DEVICE void prepare(typename room_of<op>::type &room)
{
    for (unsigned i = threadIdx.x; i < ROOM_WORDS; i += THREADS)
        room.word[i] = 0;
    __syncthreads();
    if (threadIdx.x < 32) {
        unsigned at = first_word(op, threadIdx.x), all = at * 4;
        for (unsigned i = 1; i < width(op); i++) {
            uint32_t other = qc_ceiling_hash(threadIdx.x * 4 + i);
            room.word[at + i] = other;
            all ^= other;
        }
        room.word[at] = all;
    }
    __syncthreads();
}

/* `v` is the chain's value. `a` and `b` are this thread's, and the compiler never knows them. */
template <int op>
QC_DEVICE uint32_t link(uint32_t v, uint32_t neighbour, uint32_t a, uint32_t b, const char *base)
{
    if constexpr (op == FFMA)
        return __float_as_uint(
            __fmaf_rn(__uint_as_float(v), __uint_as_float(a), __uint_as_float(b)));
    else if constexpr (op == IMAD)
        return v * a + b;
    else if constexpr (op == LOP3)
        return qc_and_or(v, a, neighbour);
    else if constexpr (op == SHF)
        return __funnelshift_r(v, neighbour, 7);
    else if constexpr (op == PRMT)
        return __byte_perm(v, a, b);
    else if constexpr (op == HMUL2)
        return qc_half2_mul(v, a);
    else if constexpr (op == HALF)
        return qc_half_of_float(__uint_as_float(v)) ^ a;
    else if constexpr (op == PACK)
        return qc_half2_of_floats(__uint_as_float(v), __uint_as_float(neighbour));
    else if constexpr (op == SHFL)
        return __shfl_sync(0xffffffffu, v, (int)v);
    else if constexpr (op == LDS_64) {
        uint2 r = *reinterpret_cast<const uint2 *>(base + v);
        return r.x ^ r.y;
    } else if constexpr (op == LDS_128) {
        uint4 r = *reinterpret_cast<const uint4 *>(base + v);
        return r.x ^ r.y ^ r.z ^ r.w;
    } else
        return *reinterpret_cast<const uint32_t *>(base + v);
}

template <int op>
__global__ void __launch_bounds__(THREADS, 2)
    rate(uint32_t *out, qc_ceiling_span *spans, unsigned steps)
{
    QC_SHARED(typename room_of<op>::type, room);
    unsigned lane = threadIdx.x % 32, index = blockIdx.x * THREADS + threadIdx.x;
    if constexpr (loads(op))
        prepare<op>(room);
    const char *base = reinterpret_cast<const char *>(room.word);
    /* This is 0, but the compiler does not know that, so it can compute nothing beforehand. */
    uint32_t zero = steps >> 31;
    /* For FFMA and HMUL2: factors with which values neither vanish nor overflow, and chains that
     * differ. */
    constexpr bool floats = op == FFMA || op == HMUL2;
    uint32_t a = op == FFMA    ? 0x3f3f3f3fu ^ zero
                 : op == HMUL2 ? 0x3c003c00u ^ zero
                               : qc_ceiling_hash(~index);
    uint32_t b = op == FFMA ? 0x3f000000u ^ zero : qc_ceiling_hash(index) & 0x7777u;
    uint32_t v[CHAINS];
#pragma unroll
    for (int j = 0; j < CHAINS; j++)
        v[j] = loads(op) ? first_word(op, lane) * 4 + (zero << j)
               : floats  ? (0x3c003c00u + (unsigned)j) ^ zero
                         : qc_ceiling_hash(index * CHAINS + (unsigned)j);

    qc_ceiling_span_begin(spans);
#pragma unroll 1
    for (unsigned s = 0; s < steps; s += QC_CEILING_STEPS) {
#pragma unroll
        for (int i = 0; i < (int)QC_CEILING_STEPS * PER_STEP; i++)
            v[i % CHAINS] = link<op>(v[i % CHAINS], v[(i + 1) % CHAINS], a, b, base);
    }
    qc_ceiling_span_end(spans);
    uint32_t all[4] = {};
#pragma unroll
    for (int j = 0; j < CHAINS; j++)
        all[j % 4] += v[j];
    for (int j = 0; j < 4; j++)
        out[index * 4 + j] = all[j];
}

/* A step makes 4 products in 4 accumulators. */
__global__ void __launch_bounds__(THREADS, 2)
    rate_of_products(uint32_t *out, qc_ceiling_span *spans, unsigned steps)
{
    unsigned lane = threadIdx.x % 32, index = blockIdx.x * THREADS + threadIdx.x;
    float d[4][4] = {};
    uint32_t a[4], b[2];
    for (unsigned j = 0; j < 4; j++)
        a[j] = qc_half2_of_floats(qc_ceiling_scale(lane / 4), qc_ceiling_scale(j));
    for (unsigned j = 0; j < 2; j++)
        b[j] = qc_half2_of_floats(qc_ceiling_x(lane, 2 * j), qc_ceiling_x(lane, 2 * j + 1));
    qc_ceiling_span_begin(spans);
#pragma unroll 1
    for (unsigned s = 0; s < steps; s += QC_CEILING_STEPS) {
#pragma unroll
        for (int i = 0; i < (int)QC_CEILING_STEPS * 4; i++)
            qc_mma_m16n8k16(d[i % 4], a, b);
    }
    qc_ceiling_span_end(spans);
    for (int j = 0; j < 4; j++)
        out[index * 4 + j] = __float_as_uint(d[0][j] + d[1][j] + d[2][j] + d[3][j]);
}

/* A step makes 2 products in 2 accumulators. */
__global__ void __launch_bounds__(THREADS, 2)
    rate_of_products_884(uint32_t *out, qc_ceiling_span *spans, unsigned steps)
{
    unsigned lane = threadIdx.x % 32, index = blockIdx.x * THREADS + threadIdx.x;
    float d[2][8] = {};
    uint32_t a[2], b[2];
    for (unsigned j = 0; j < 2; j++) {
        a[j] = qc_half2_of_floats(qc_ceiling_x(lane, 2 * j), qc_ceiling_x(lane, 2 * j + 1));
        b[j] = qc_half2_of_floats(qc_ceiling_scale(lane), qc_ceiling_scale(j));
    }
    qc_ceiling_span_begin(spans);
#pragma unroll 1
    for (unsigned s = 0; s < steps; s += QC_CEILING_STEPS) {
#pragma unroll
        for (int i = 0; i < (int)QC_CEILING_STEPS * 2; i++)
            qc_ceiling_mma_884(d[i % 2], a, b);
    }
    qc_ceiling_span_end(spans);
    for (int j = 0; j < 4; j++)
        out[index * 4 + j] = __float_as_uint(d[0][j] + d[1][j] + d[0][j + 4] + d[1][j + 4]);
}

/* ---- host ------------------------------------------------------------------------------------ */

template <int op> qc_status fits(unsigned *blocks, qc_error *err)
{
    if constexpr (op == HMMA)
        return qc_ceiling_room(blocks, rate_of_products, THREADS, 0, WHAT, err);
    else if constexpr (op == HMMA_884)
        return qc_ceiling_room(blocks, rate_of_products_884, THREADS, 0, WHAT, err);
    else
        return qc_ceiling_room(blocks, rate<op>, THREADS, sizeof(typename room_of<op>::type), WHAT,
                               err);
}

template <int op> qc_status run(const qc_ceiling_run *r, qc_cuda_stream s, qc_error *err)
{
    if constexpr (op == HMMA)
        QC_LAUNCH(rate_of_products, r->blocks, THREADS, 0, s, r->out, r->spans, r->steps);
    else if constexpr (op == HMMA_884)
        QC_LAUNCH(rate_of_products_884, r->blocks, THREADS, 0, s, r->out, r->spans, r->steps);
    else
        QC_LAUNCH(rate<op>, r->blocks, THREADS, sizeof(typename room_of<op>::type), s, r->out,
                  r->spans, r->steps);
    return qc_cuda_launched(WHAT, err);
}
} // namespace

#define QC_RATE(name, unit, op, work)                                                              \
    {                                                                                              \
        name, unit, 70, QC_CEILING_ANY, work, sizeof(room_of<op>::type), fits<op>, run<op>         \
    }

extern "C" const qc_ceiling_kernel *qc_ceiling_rates(unsigned *count)
{
    static const qc_ceiling_kernel kernels[] = {
        QC_RATE("FFMA", "lanes", FFMA, PER_STEP),
        QC_RATE("IMAD", "lanes", IMAD, PER_STEP),
        QC_RATE("LOP3", "lanes", LOP3, PER_STEP),
        QC_RATE("SHF", "lanes", SHF, PER_STEP),
        QC_RATE("PRMT", "lanes", PRMT, PER_STEP),
        QC_RATE("HMUL2", "lanes", HMUL2, PER_STEP),
        QC_RATE("cvt.rn.f16.f32", "lanes", HALF, PER_STEP),
        {"cvt.rn.f16x2.f32", "lanes", 80, QC_CEILING_ANY, PER_STEP, 0, fits<PACK>, run<PACK>},
        QC_RATE("SHFL", "lanes", SHFL, PER_STEP),
        QC_RATE("LDS.32", "bytes", LDS_32, PER_STEP * 4),
        QC_RATE("LDS.64", "bytes", LDS_64, PER_STEP * 8),
        QC_RATE("LDS.128", "bytes", LDS_128, PER_STEP * 16),
        QC_RATE("LDS.32 one bank", "bytes", LDS_WORST, PER_STEP * 4),
        {"mma.m16n8k16", "multiply-adds", 80, QC_CEILING_ANY, 4 * 2048 / 32.0, 0, fits<HMMA>,
         run<HMMA>},
        {"mma.m8n8k4", "multiply-adds", 70, 79, 2 * 1024 / 32.0, 0, fits<HMMA_884>, run<HMMA_884>},
    };
    *count = sizeof(kernels) / sizeof(*kernels);
    return kernels;
}
