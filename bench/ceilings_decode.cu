/* Ways to get from codes in registers to float16 pairs, without memory traffic: how many weights a
 * multiprocessor can decode per clock, whatever memory gives.
 *
 *   shuffle         16 values in the lanes of a warp, two shuffles a pair (bitsandbytes)
 *   PRMT            16 values as bytes in 8 registers, 4 lookups of a byte in 3 PRMT; no shared
 *                   memory
 *   pairs x1        256 pairs in shared memory, 1 KB: lanes meet in banks as codes have it
 *   pairs x16       16 copies, 16 KB: lane l reads copy l % 16, two lanes in a bank
 *   pairs x32       32 copies in rows of 128 bytes, 32 KB: lane l has bank l; a shift and a LOP3
 *   pairs x32 PRMT  the same in rows of 256 bytes, 64 KB: a PRMT puts the byte of codes into byte 1
 *                   of the address and the lane's place into byte 0
 *   float pairs     256 pairs of floats, 16 copies, 32 KB: 64-bit loads without conflicts
 *   int8            the byte under the exponent of 1024, minus 1152
 *
 * With " mma" the pairs are the A operand of mma.m16n8k16, and the products of 64 weights of a row
 * are multiplied by the row's scale in float and added up. With " mma 884" they are the B operand
 * of mma.m8n8k4, with 32 weights of a row. Without either they are exclusive-ored, which takes a
 * LOP3 for two.
 *
 * A step is 32 weights per lane, and the loop makes 4 steps. Codes come from one multiply-add per
 * word (4 weights of int8, 8 of NF4). A block has 512 threads with at most 64 registers. */
#include "bench/ceilings_ptx.cuh"
#include "quant/quant_values.h"

namespace
{
constexpr unsigned THREADS = QC_CEILING_THREADS;
const char WHAT[] = "ceilings_decode";

enum { SHUFFLE, BYTES, PAIRS_1, PAIRS_16, PAIRS_32, PAIRS_32_WIDE, FLOATS, INT8 };
/* What takes the pairs: exclusive or, mma.m16n8k16, or mma.m8n8k4. */
enum { FOLD, MMA, MMA_884 };

__host__ __device__ constexpr unsigned words(int scheme)
{
    return scheme == INT8 ? 8 : 4;
}

/* The bytes of a row of the table, which has a row for each of 256 bytes of codes, and how many
 * lanes have copies of their own. */
__host__ __device__ constexpr unsigned row_bytes(int scheme)
{
    return scheme == PAIRS_1                        ? 4
           : scheme == PAIRS_16                     ? 64
           : scheme == PAIRS_32 || scheme == FLOATS ? 128
           : scheme == PAIRS_32_WIDE                ? 256
                                                    : 0;
}
__host__ __device__ constexpr unsigned copies(int scheme)
{
    return scheme == PAIRS_1 ? 1 : scheme == PAIRS_16 || scheme == FLOATS ? 16 : 32;
}
/* log2(row_bytes) */
__host__ __device__ constexpr int row_shift(int scheme)
{
    return scheme == PAIRS_1 ? 2 : scheme == PAIRS_16 ? 6 : 7;
}

/* The 16 values as floats lie behind the table. Rows of 256 bytes have room for them in their
 * second half. */
__host__ __device__ constexpr unsigned values_at(int scheme)
{
    return scheme == PAIRS_32_WIDE ? 128 : 256 * row_bytes(scheme);
}
__host__ __device__ constexpr unsigned room_bytes(int scheme)
{
    return 256 * row_bytes(scheme) + (scheme == PAIRS_32_WIDE ? 0 : 64);
}

template <unsigned bytes> struct table_room {
    unsigned char at[bytes];
};

template <int scheme> struct decoder {
    const unsigned char *table;
    uint32_t place;           /* byte offset of the lane's copy in a row */
    uint32_t value;           /* SHUFFLE: that of code lane % 16 */
    uint32_t low[4], high[4]; /* BYTES: the bytes of the 16 values */

    /* A barrier has to follow. The timing begins with one. */
    __device__ __forceinline__ decoder(unsigned char *room) : table(room)
    {
        unsigned lane = threadIdx.x % 32;
        float *values = reinterpret_cast<float *>(room + values_at(scheme));
        if (threadIdx.x == 0) {
            constexpr float constants[16] = {QC_NF4_CODE_VALUES};
#pragma unroll
            for (int i = 0; i < 16; i++)
                values[i] = constants[i];
        }
        __syncthreads();
        if constexpr (row_bytes(scheme) != 0) {
            constexpr unsigned COPIES = copies(scheme), WORDS = scheme == FLOATS ? 2 : 1;
            for (unsigned i = threadIdx.x; i < 256 * COPIES; i += THREADS) {
                unsigned codes = i / COPIES;
                float lower = values[codes >> 4], upper = values[codes & 15];
                uint32_t *to = reinterpret_cast<uint32_t *>(room + codes * row_bytes(scheme) +
                                                            i % COPIES * (4 * WORDS));
                to[0] =
                    scheme == FLOATS ? __float_as_uint(lower) : qc_half2_of_floats(lower, upper);
                if constexpr (scheme == FLOATS)
                    to[1] = __float_as_uint(upper);
            }
            place = lane % COPIES * (4 * WORDS);
        } else if constexpr (scheme == SHUFFLE) {
            value = qc_half_of_float(values[lane % 16]);
        } else if constexpr (scheme == BYTES) {
#pragma unroll
            for (unsigned i = 0; i < 4; i++) {
                uint32_t first = qc_half2_of_floats(values[4 * i], values[4 * i + 1]);
                uint32_t second = qc_half2_of_floats(values[4 * i + 2], values[4 * i + 3]);
                low[i] = __byte_perm(first, second, 0x6420);
                high[i] = __byte_perm(first, second, 0x7531);
            }
        }
    }

    /* Moves byte i of w, which holds codes, to its place in an address. */
    __device__ __forceinline__ uint32_t offset(uint32_t w, int i) const
    {
        if constexpr (scheme == PAIRS_32_WIDE)
            return __byte_perm(w, place, 0x5504u | (unsigned)i << 4);
        constexpr int SHIFT = row_shift(scheme);
        uint32_t moved = 8 * i < SHIFT ? w << (SHIFT - 8 * i) : w >> (8 * i - SHIFT);
        if constexpr (scheme == PAIRS_1)
            return moved & (255u << SHIFT);
        return qc_and_or(moved, 255u << SHIFT, place);
    }

    /* Four bytes. Each is the byte of `from`[16] that one nibble of 16 bits names. */
    static __device__ __forceinline__ uint32_t lookup(const uint32_t from[4], uint32_t three_bits,
                                                      uint32_t half)
    {
        return __byte_perm(__byte_perm(from[0], from[1], three_bits),
                           __byte_perm(from[2], from[3], three_bits), half);
    }

    /* The pairs that a word of NF4 stands for. */
    __device__ __forceinline__ void pairs(uint32_t p[4], uint32_t w) const
    {
        if constexpr (scheme == SHUFFLE) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t upper = __shfl_sync(0xffffffffu, value, (int)(w >> 8 * i), 16);
                uint32_t lower = __shfl_sync(0xffffffffu, value, (int)(w >> (8 * i + 4)), 16);
                p[i] = __byte_perm(lower, upper, 0x5410);
            }
        } else if constexpr (scheme == BYTES) {
            uint32_t three_bits = w & 0x77777777u;
            uint32_t half = qc_and_or(w >> 1, 0x44444444u, 0x32103210u);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t l = lookup(low, three_bits >> 16 * i, half >> 16 * i);
                uint32_t h = lookup(high, three_bits >> 16 * i, half >> 16 * i);
                p[2 * i] = __byte_perm(l, h, 0x4051);
                p[2 * i + 1] = __byte_perm(l, h, 0x6273);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                p[i] = *reinterpret_cast<const uint32_t *>(table + offset(w, i));
        }
    }
};

/* The two pairs that a word of int8 stands for. */
QC_DEVICE void int8_pairs(uint32_t p[2], uint32_t w)
{
    w ^= 0x80808080u;
    p[0] = qc_half2_sub(__byte_perm(w, 0x64646464u, 0x4140), 0x64806480u);
    p[1] = qc_half2_sub(__byte_perm(w, 0x64646464u, 0x4342), 0x64806480u);
}

/* All pairs of a step: 4 words of 4, or 8 of 2. */
template <int scheme>
QC_DEVICE void step_pairs(uint32_t p[16], const decoder<scheme> &d, const uint32_t *w)
{
    if constexpr (scheme == INT8) {
#pragma unroll
        for (unsigned j = 0; j < 8; j++)
            int8_pairs(p + 2 * j, w[j]);
    } else {
#pragma unroll
        for (unsigned j = 0; j < 4; j++)
            d.pairs(p + 4 * j, w[j]);
    }
}

/* What a thread does with the pairs of a step. */
template <int sink> struct taker {
    uint32_t all[4];

    __device__ __forceinline__ taker()
    {
        all[0] = all[1] = all[2] = all[3] = 0;
    }
    __device__ __forceinline__ void take(const uint32_t p[16])
    {
#pragma unroll
        for (int i = 0; i < 16; i += 2)
            all[i / 2 % 2] ^= p[i] ^ p[i + 1];
    }
    __device__ __forceinline__ void result(uint32_t out[4]) const
    {
        out[0] = all[0] ^ all[1];
        out[1] = out[2] = out[3] = 0;
    }
};

template <> struct taker<MMA> {
    uint32_t x[2];
    float scale, scale_8;
    float sum[4];

    __device__ __forceinline__ taker()
    {
        unsigned lane = threadIdx.x % 32;
#pragma unroll
        for (unsigned j = 0; j < 2; j++)
            x[j] = qc_half2_of_floats(qc_ceiling_x(lane, 2 * j), qc_ceiling_x(lane, 2 * j + 1));
        scale = qc_ceiling_scale(lane / 4);
        scale_8 = qc_ceiling_scale(lane / 4 + 8);
        sum[0] = sum[1] = sum[2] = sum[3] = 0;
    }
    __device__ __forceinline__ void take(const uint32_t p[16])
    {
        float product[4] = {};
#pragma unroll
        for (int i = 0; i < 16; i += 4)
            qc_mma_m16n8k16(product, p + i, x);
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum[i] = __fmaf_rn(product[i], i < 2 ? scale : scale_8, sum[i]);
    }
    __device__ __forceinline__ void result(uint32_t out[4]) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++)
            out[i] = __float_as_uint(sum[i]);
    }
};

template <> struct taker<MMA_884> {
    uint32_t x[2];
    float scale[4]; /* scales of columns that differ in bits 2 and 0 */
    float sum[8];

    __device__ __forceinline__ taker()
    {
        unsigned lane = threadIdx.x % 32;
#pragma unroll
        for (unsigned j = 0; j < 2; j++)
            x[j] = qc_half2_of_floats(qc_ceiling_x(lane, 2 * j), qc_ceiling_x(lane, 2 * j + 1));
#pragma unroll
        for (unsigned j = 0; j < 4; j++)
            scale[j] = qc_ceiling_scale((j & 2) * 2 + (lane & 2) + (j & 1));
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] = 0;
    }
    __device__ __forceinline__ void take(const uint32_t p[16])
    {
        float product[8] = {};
#pragma unroll
        for (int i = 0; i < 16; i += 2)
            qc_ceiling_mma_884(product, x, p + i);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] = __fmaf_rn(product[i], scale[(i & 4) / 2 + (i & 1)], sum[i]);
    }
    __device__ __forceinline__ void result(uint32_t out[4]) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++)
            out[i] = __float_as_uint(sum[i] + sum[i + 4]);
    }
};

template <int scheme, int sink>
__global__ void __launch_bounds__(THREADS, 2)
    decode(uint32_t *out, qc_ceiling_span *spans, unsigned steps)
{
    constexpr unsigned WORDS = words(scheme);
    QC_SHARED(table_room<room_bytes(scheme)>, room);
    const decoder<scheme> d(room.at);
    unsigned index = blockIdx.x * THREADS + threadIdx.x;
    uint32_t w[WORDS], result[4] = {};
#pragma unroll
    for (unsigned j = 0; j < WORDS; j++)
        w[j] = qc_ceiling_hash(index * WORDS + j);
    taker<sink> to;

    qc_ceiling_span_begin(spans);
#pragma unroll 1
    for (unsigned s = 0; s < steps; s += QC_CEILING_STEPS) {
#pragma unroll
        for (unsigned u = 0; u < QC_CEILING_STEPS; u++) {
            if constexpr (scheme == FLOATS) {
#pragma unroll
                for (unsigned j = 0; j < WORDS; j++) {
#pragma unroll
                    for (int i = 0; i < 4; i += 2) {
                        uint2 f = *reinterpret_cast<const uint2 *>(d.table + d.offset(w[j], i));
                        uint2 g = *reinterpret_cast<const uint2 *>(d.table + d.offset(w[j], i + 1));
                        result[0] ^= f.x ^ g.x;
                        result[1] ^= f.y ^ g.y;
                    }
                }
            } else {
                uint32_t p[16];
                step_pairs<scheme>(p, d, w);
                to.take(p);
            }
#pragma unroll
            for (unsigned j = 0; j < WORDS; j++)
                w[j] = qc_ceiling_next(w[j]);
        }
    }
    qc_ceiling_span_end(spans);
    if constexpr (scheme != FLOATS)
        to.result(result);
#pragma unroll
    for (unsigned i = 0; i < 4; i++)
        out[index * 4 + i] = result[i];
}

/* ---- host ------------------------------------------------------------------------------------ */

template <int scheme> constexpr size_t shared_bytes()
{
    return sizeof(table_room<room_bytes(scheme)>);
}

template <int scheme, int sink> qc_status fits(unsigned *blocks, qc_error *err)
{
    return qc_ceiling_room(blocks, decode<scheme, sink>, THREADS, shared_bytes<scheme>(), WHAT,
                           err);
}

template <int scheme, int sink>
qc_status run(const qc_ceiling_run *r, qc_cuda_stream s, qc_error *err)
{
    QC_TRY(qc_cuda_allow_shared(decode<scheme, sink>, shared_bytes<scheme>(), WHAT, err));
    QC_LAUNCH((decode<scheme, sink>), r->blocks, THREADS, shared_bytes<scheme>(), s, r->out,
              r->spans, r->steps);
    return qc_cuda_launched(WHAT, err);
}
} // namespace

#define QC_DECODE(name, scheme, sink)                                                              \
    {                                                                                              \
        name, "weights", sink == MMA ? 80u : 70u, sink == MMA_884 ? 79u : QC_CEILING_ANY, 32,      \
            room_bytes(scheme), fits<scheme, sink>, run<scheme, sink>                              \
    }

extern "C" const qc_ceiling_kernel *qc_ceiling_decodes(unsigned *count)
{
    static const qc_ceiling_kernel kernels[] = {
        QC_DECODE("shuffle", SHUFFLE, FOLD),
        QC_DECODE("PRMT", BYTES, FOLD),
        QC_DECODE("pairs x1", PAIRS_1, FOLD),
        QC_DECODE("pairs x16", PAIRS_16, FOLD),
        QC_DECODE("pairs x32", PAIRS_32, FOLD),
        QC_DECODE("pairs x32 PRMT", PAIRS_32_WIDE, FOLD),
        QC_DECODE("float pairs", FLOATS, FOLD),
        QC_DECODE("int8", INT8, FOLD),
        QC_DECODE("pairs x32 mma", PAIRS_32, MMA),
        QC_DECODE("pairs x32 PRMT mma", PAIRS_32_WIDE, MMA),
        QC_DECODE("int8 mma", INT8, MMA),
        QC_DECODE("pairs x32 mma 884", PAIRS_32, MMA_884),
        QC_DECODE("pairs x32 PRMT mma 884", PAIRS_32_WIDE, MMA_884),
        QC_DECODE("int8 mma 884", INT8, MMA_884),
    };
    *count = sizeof(kernels) / sizeof(*kernels);
    return kernels;
}
