/* The CPU shim: threads, barriers, shuffles, votes, atomics, shared memory, intrinsics, 16-bit
 * floats. */
#include "tests/shim/shim_testing.h"

namespace
{
/* ---- who am I -------------------------------------------------------------------------------- */

struct place {
    unsigned thread, block, lane;
};

static __global__ void place_kernel(place *out)
{
    unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] =
        place{thread, block, qc_shim_self->lane};
}

static void test_places(void **)
{
    const unsigned threads = 5 * 3 * 4, blocks = 3 * 2 * 4;
    static place found[threads * blocks];
    for (const char *order : shim_orders) {
        qc_shim_set_order(order);
        device_array<place> out(threads * blocks);
        SHIM_RUN(out, place_kernel, dim3(3, 2, 4), dim3(5, 3, 4), 0, out.p);
        out.get(found);
        for (unsigned i = 0; i < threads * blocks; i++) {
            assert_int_equal(found[i].thread, i % threads);
            assert_int_equal(found[i].block, i / threads);
            assert_int_equal(found[i].lane, i % threads % 32);
        }
    }
}

/* ---- barriers -------------------------------------------------------------------------------- */

struct sum_shared {
    float value[256];
};

static __global__ void sum_kernel(const float *x, float *out)
{
    QC_SHARED(sum_shared, s);
    unsigned t = threadIdx.x;
    s.value[t] = x[blockIdx.x * 256 + t];
    __syncthreads();
    for (unsigned half = 128; half; half /= 2) {
        if (t < half)
            s.value[t] += s.value[t + half];
        __syncthreads();
    }
    if (t == 0)
        out[blockIdx.x] = s.value[0];
}

static void test_sum(void **)
{
    float host[1024], sums[4];
    for (int i = 0; i < 1024; i++)
        host[i] = (float)(i % 37);
    for (const char *order : shim_orders) {
        qc_shim_set_order(order);
        device_array<float> x(1024, host), out(4);
        SHIM_RUN(out, sum_kernel, 4, 256, sizeof(sum_shared), x.p, out.p);
        out.get(sums);
        for (int b = 0; b < 4; b++) {
            float want = 0;
            for (int i = 0; i < 256; i++)
                want += host[b * 256 + i];
            assert_true(sums[b] == want);
        }
    }
}

/* Threads that have ended are not waited for. */
static __global__ void leaving_kernel(int *out)
{
    int count = __syncthreads_count(threadIdx.x % 3 == 0);
    int all = __syncthreads_and(threadIdx.x < 70), any = __syncthreads_or(threadIdx.x == 69);
    if (threadIdx.x >= 40)
        return;
    int left = __syncthreads_count(1);
    if (threadIdx.x == 0) {
        out[0] = count;
        out[1] = all;
        out[2] = any;
        out[3] = left;
        out[4] = __syncthreads_count(1) == 40;
    } else {
        __syncthreads_count(1);
    }
}

/* The last two are in different lines: a fault. */
static bool run_two_lines()
{
    device_array<int> out(5);
    SHIM_RUN(out, leaving_kernel, 1, 70, 0, out.p);
    cudaDeviceSynchronize();
    return true;
}

static __global__ void votes_of_block_kernel(int *out)
{
    int count = __syncthreads_count(threadIdx.x % 3 == 0);
    int all = __syncthreads_and(threadIdx.x < 70), not_all = __syncthreads_and(threadIdx.x);
    int any = __syncthreads_or(threadIdx.x == 69), none = __syncthreads_or(threadIdx.x > 69);
    if (threadIdx.x >= 40)
        return;
    int left = __syncthreads_count(1);
    if (threadIdx.x == 39) {
        int all_of_it[] = {count, all, not_all, any, none, left};
        for (int i = 0; i < 6; i++)
            out[i] = all_of_it[i];
    }
}

static void test_votes_of_block(void **)
{
    const int want[6] = {24, 1, 0, 1, 0, 40};
    for (const char *order : shim_orders) {
        int found[6];
        qc_shim_set_order(order);
        device_array<int> out(6);
        SHIM_RUN(out, votes_of_block_kernel, 1, 70, 0, out.p);
        out.get(found);
        assert_memory_equal(found, want, sizeof(want));
    }
}

/* ---- warps ----------------------------------------------------------------------------------- */

static __global__ void shuffle_kernel(int *out)
{
    int lane = (int)qc_shim_self->lane;
    unsigned all = 0xffffffffu;
    int *mine = out + 12 * (int)threadIdx.x;
    mine[0] = __shfl_sync(all, 100 + lane, 5);
    mine[1] = __shfl_sync(all, 100 + lane, lane + 1);
    mine[2] = __shfl_sync(all, 100 + lane, 2, 8);
    mine[3] = __shfl_up_sync(all, 100 + lane, 3);
    mine[4] = __shfl_up_sync(all, 100 + lane, 1, 4);
    mine[5] = __shfl_down_sync(all, 100 + lane, 3);
    mine[6] = __shfl_down_sync(all, 100 + lane, 1, 4);
    mine[7] = __shfl_xor_sync(all, 100 + lane, 16);
    mine[8] = __shfl_xor_sync(all, 100 + lane, 4, 4);
    double wide = __shfl_xor_sync(all, 0.5 * lane, 1);
    mine[9] = (int)(wide * 2);
    /* Halves of a warp, each by itself, a different number of times. */
    if (lane < 16)
        mine[10] = __shfl_xor_sync(0x0000ffffu, lane, 1);
    else
        for (int i = 0; i < 3; i++)
            mine[10] = __shfl_xor_sync(0xffff0000u, lane + i, 2);
    mine[11] = (int)__shfl_sync(all, (unsigned long long)lane << 40, 7) >> 8 |
               (int)(__shfl_sync(all, (unsigned long long)lane << 40, 7) >> 40);
}

static void test_shuffles(void **)
{
    for (const char *order : shim_orders) {
        static int found[64 * 12];
        qc_shim_set_order(order);
        device_array<int> out(64 * 12);
        SHIM_RUN(out, shuffle_kernel, 1, 64, 0, out.p);
        out.get(found);
        for (int t = 0; t < 64; t++) {
            const int *f = found + 12 * t;
            int lane = t % 32;
            assert_int_equal(f[0], 105);
            assert_int_equal(f[1], 100 + (lane + 1) % 32);
            assert_int_equal(f[2], 100 + lane / 8 * 8 + 2);
            assert_int_equal(f[3], 100 + (lane < 3 ? lane : lane - 3));
            assert_int_equal(f[4], 100 + (lane % 4 ? lane - 1 : lane));
            assert_int_equal(f[5], 100 + (lane > 28 ? lane : lane + 3));
            assert_int_equal(f[6], 100 + (lane % 4 == 3 ? lane : lane + 1));
            assert_int_equal(f[7], 100 + (lane ^ 16));
            /* A lower segment may be read, a higher one not. */
            assert_int_equal(f[8], 100 + (lane & 4 ? lane ^ 4 : lane));
            assert_int_equal(f[9], lane ^ 1);
            assert_int_equal(f[10], lane < 16 ? lane ^ 1 : (lane ^ 2) + 2);
            assert_int_equal(f[11], 7);
        }
    }
}

static __global__ void vote_kernel(unsigned *out)
{
    unsigned lane = qc_shim_self->lane, all = 0xffffffffu;
    unsigned v[6] = {__ballot_sync(all, lane % 5 == 0),    (unsigned)__any_sync(all, lane == 31),
                     (unsigned)__any_sync(all, lane > 31), (unsigned)__all_sync(all, lane < 32),
                     (unsigned)__all_sync(all, lane != 9), 0};
    if (lane % 2)
        v[5] = __ballot_sync(0xaaaaaaaau, 1) ^ (unsigned)__all_sync(0xaaaaaaaau, 1);
    else
        v[5] = __ballot_sync(0x55555555u, lane < 16);
    for (int i = 0; i < 6; i++)
        out[threadIdx.x * 6 + i] = v[i];
}

static void test_votes(void **)
{
    for (const char *order : shim_orders) {
        static unsigned found[32 * 6];
        qc_shim_set_order(order);
        device_array<unsigned> out(32 * 6);
        SHIM_RUN(out, vote_kernel, 1, 32, 0, out.p);
        out.get(found);
        for (unsigned t = 0; t < 32; t++) {
            const unsigned want[6] = {0x42108421u, 1, 0, 1, 0, t % 2 ? 0xaaaaaaabu : 0x00005555u};
            assert_memory_equal(found + 6 * t, want, sizeof(want));
        }
    }
}

/* ---- atomics --------------------------------------------------------------------------------- */

struct counters {
    unsigned add, inc, or_, xor_, and_, max, min, cas, exch;
    int low, high;
    unsigned long long wide, wide_min;
    float f;
    unsigned order[200];
};

static __global__ void atomic_kernel(counters *c)
{
    unsigned t = blockIdx.x * blockDim.x + threadIdx.x;
    c->order[atomicAdd(&c->add, 1u)] = t;
    atomicInc(&c->inc, 6);
    atomicOr(&c->or_, 1u << t % 32);
    atomicXor(&c->xor_, t);
    atomicAnd(&c->and_, ~(1u << t % 8));
    atomicMax(&c->max, t);
    atomicMin(&c->min, t + 3);
    atomicCAS(&c->cas, t, t + 1);
    atomicExch(&c->exch, 42u);
    atomicMin(&c->low, -(int)t);
    atomicMax(&c->high, (int)t - 100);
    atomicAdd(&c->wide, 1ull << 33);
    atomicMin(&c->wide_min, (unsigned long long)t);
    atomicAdd(&c->f, 0.25f);
}

static void test_atomics(void **)
{
    for (const char *order : shim_orders) {
        counters c = {};
        c.and_ = c.min = 0xffffffffu;
        c.wide_min = ~0ull;
        qc_shim_set_order(order);
        device_array<counters> out(1, &c);
        SHIM_RUN(out, atomic_kernel, 2, 100, 0, out.p);
        out.get(&c);
        assert_int_equal(c.add, 200);
        assert_int_equal(c.inc, 200 % 7);
        assert_int_equal(c.or_, 0xffffffffu);
        unsigned all = 0;
        char seen[200] = {};
        for (unsigned t = 0; t < 200; t++) {
            all ^= t;
            seen[c.order[t]]++;
        }
        for (unsigned t = 0; t < 200; t++)
            assert_int_equal(seen[t], 1);
        assert_int_equal(c.xor_, all);
        assert_int_equal(c.and_, 0xffffff00u);
        assert_int_equal(c.max, 199);
        assert_int_equal(c.min, 3);
        assert_in_range(c.cas, 1, 200);
        assert_int_equal(c.exch, 42);
        assert_int_equal(c.low, -199);
        assert_int_equal(c.high, 99);
        assert_true(c.wide == 200ull << 33);
        assert_true(c.wide_min == 0);
        assert_true(c.f == 50.0f);
    }
}

/* The orders are what they say. */
static void test_orders(void **)
{
    counters forward = {}, reverse = {}, shuffled[2] = {};
    const char *const names[] = {"forward", "reverse", "shuffle:7", "shuffle:8"};
    counters *const all[] = {&forward, &reverse, &shuffled[0], &shuffled[1]};
    for (int i = 0; i < 4; i++) {
        qc_shim_set_order(names[i]);
        device_array<counters> out(1, all[i]);
        SHIM_RUN(out, atomic_kernel, 2, 100, 0, out.p);
        out.get(all[i]);
    }
    for (unsigned t = 0; t < 200; t++) {
        assert_int_equal(forward.order[t], t);
        assert_int_equal(reverse.order[t], 199 - t);
    }
    assert_memory_not_equal(shuffled[0].order, forward.order, sizeof(forward.order));
    assert_memory_not_equal(shuffled[0].order, reverse.order, sizeof(forward.order));
    assert_memory_not_equal(shuffled[0].order, shuffled[1].order, sizeof(forward.order));
}

/* ---- shared memory --------------------------------------------------------------------------- */

struct poison_shared {
    uint32_t word[25];
};

static __global__ void poison_kernel(uint32_t *out)
{
    QC_SHARED(poison_shared, s);
    if (threadIdx.x < 25)
        atomicAnd(&out[threadIdx.x], s.word[threadIdx.x]);
    __syncthreads();
    if (threadIdx.x < 25)
        s.word[threadIdx.x] = 0;
}

/* Also of the second block, after the first has written to it. */
static void test_shared_poison(void **)
{
    uint32_t found[25];
    memset(found, 0xff, sizeof(found));
    device_array<uint32_t> out(25, found);
    SHIM_RUN(out, poison_kernel, 2, 32, sizeof(poison_shared), out.p);
    out.get(found);
    for (uint32_t w : found)
        assert_int_equal(w, 0xffffffffu);
}

/* ---- intrinsics ------------------------------------------------------------------------------ */

static void test_intrinsics(void **)
{
    assert_int_equal(__byte_perm(0x33221100, 0x77665544, 0x7350), 0x77335500);
    assert_int_equal(__byte_perm(0x33228000, 0x77665544, 0x9184), 0xff800044);
    assert_int_equal(__funnelshift_l(0x89abcdef, 0x01234567, 8), 0x23456789);
    assert_int_equal(__funnelshift_r(0x89abcdef, 0x01234567, 8), 0x6789abcd);
    assert_int_equal(__funnelshift_l(0x89abcdef, 0x01234567, 32), 0x01234567);
    assert_int_equal(__funnelshift_lc(0x89abcdef, 0x01234567, 32), 0x89abcdef);
    assert_int_equal(__funnelshift_rc(0x89abcdef, 0x01234567, 40), 0x01234567);
    assert_int_equal(__popc(0xf0f00001u), 9);
    assert_int_equal(__popcll(0xf0f0000100000001ull), 10);
    assert_int_equal(__ffs(0), 0);
    assert_int_equal(__ffs(0x50), 5);
    assert_int_equal(__ffsll(1ll << 40), 41);
    assert_int_equal(__clz(0), 32);
    assert_int_equal(__clz(1), 31);
    assert_int_equal(__clzll(1), 63);
    assert_int_equal(__umulhi(0x80000000u, 6), 3);
    assert_true(__umul64hi(1ull << 63, 6) == 3);
    assert_int_equal(__float_as_uint(-2.0f), 0xc0000000u);
    assert_true(__uint_as_float(0x3f800000u) == 1.0f);
    assert_int_equal(__float2int_rn(2.5f), 2);
    assert_int_equal(__float2int_rn(-3.5f), -4);
    assert_int_equal(__float2int_rz(-3.9f), -3);
    assert_int_equal(__float2int_rn(NAN), 0);
    assert_int_equal(__float2int_rn(3e9f), INT32_MAX);
    assert_int_equal(__float2uint_rn(-1.0f), 0);
    assert_int_equal(__float2uint_rz(4e9f), 4000000000u);
    /* one rounding against two */
    float a = 1.0f + 0x1p-12f;
    assert_true(__fmaf_rn(a, a, -1.0f) == 0x1p-11f + 0x1p-24f);
    assert_true(__fadd_rn(__fmul_rn(a, a), -1.0f) == 0x1p-11f);
    assert_true(__frcp_rn(3.0f) == 1.0f / 3.0f);
    assert_true(min(3u, 5) == 3u && max(-1, 2) == 2 && min(1ull, 2ull) == 1ull);
    /* a NaN loses, as in CUDA */
    assert_true(max(NAN, 1.0f) == 1.0f && min(1.0f, NAN) == 1.0f);
}

/* The half nearest to v 2^-48, a tie to even. */
static uint16_t half_of_units(__int128 v)
{
    unsigned __int128 left = v < 0 ? -(unsigned __int128)v : (unsigned __int128)v;
    unsigned drop = 24; /* the last place of subnormal halves is 2^-24 */
    while (left >> drop >= 2048)
        drop++;
    unsigned units = (unsigned)(left >> drop);
    unsigned __int128 rest = left - ((unsigned __int128)units << drop);
    unsigned __int128 middle = (unsigned __int128)1 << (drop - 1);
    units += rest > middle || (rest == middle && units % 2);
    unsigned h = (drop - 24) * 1024 + units;
    return (uint16_t)((h < 0x7c00 ? h : 0x7c00) | (v < 0 ? 0x8000u : 0u));
}

static void test_half_fma(void **)
{
    const uint16_t special[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x3bff, 0x3c00,
                                0xbc01, 0x6801, 0x7bff, 0xfbff, 0x1001, 0x9001, 0x7c00, 0x7e00};
    enum { SPECIAL = sizeof(special) / sizeof(*special) };
    uint64_t random = 1;
    auto next = [&]() {
        random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        return (unsigned)(random >> 40);
    };
    auto units = [](uint16_t h, int scale) {
        return (__int128)ldexp((double)qc_float_of_half(h), scale);
    };
    unsigned twice = 0;
    for (unsigned i = 0; i < 300000; i++) {
        uint16_t v[3];
        for (uint16_t &h : v)
            h = next() % 8 ? (uint16_t)next() : special[next() % SPECIAL];
        float x = qc_float_of_half(v[0]), y = qc_float_of_half(v[1]), z = qc_float_of_half(v[2]);
        uint32_t found = qc_half2_fma(v[0] | 0x3c000000u, v[1] | 0x40000000u, v[2] | 0x3c000000u);
        assert_int_equal(found >> 16, 0x4200); /* 1 * 2 + 1 */
        found &= 0xffff;
        if (!isfinite(x) || !isfinite(y) || !isfinite(z)) {
            float want = x * y + z;
            if (want != want)
                assert_true((found & 0x7fff) > 0x7c00);
            else
                assert_int_equal(found, want > 0 ? 0x7c00 : 0xfc00);
            continue;
        }
        __int128 sum = units(v[0], 24) * units(v[1], 24) + units(v[2], 48);
        uint16_t want = half_of_units(sum);
        if (found != (sum ? want : found & 0x8000u))
            fail_msg("fma of 0x%04x 0x%04x 0x%04x is 0x%04x and not 0x%04x", v[0], v[1], v[2],
                     found, want);
        twice += sum && qc_half_of_float(x * y + z) != want;
    }
    assert_true(twice > 0); /* sums that a float would have rounded to a tie were among them */
    assert_int_equal(qc_half2_fma(0x80000000u, 0, 0x80000000u), 0x80000000u); /* -0 - 0, 0 + 0 */
}

/* Every half, and around every midpoint between two of them. */
static void test_half(void **)
{
    for (unsigned h = 0; h < 0x8000; h++) {
        float f = qc_float_of_half((uint16_t)h);
        unsigned exponent = h >> 10, fraction = h & 1023;
        if (exponent == 31) {
            assert_true(fraction ? f != f : f == INFINITY);
        } else {
            assert_true(f == (exponent ? ldexpf((float)(1024 + fraction), (int)exponent - 25)
                                       : ldexpf((float)fraction, -24)));
            float next = h == 0x7bff ? 65536.0f : qc_float_of_half((uint16_t)(h + 1));
            float middle = (f + next) / 2;
            unsigned even = h & 1 ? h + 1 : h;
            assert_int_equal(qc_half_of_float(middle), even);
            assert_int_equal(qc_half_of_float(nextafterf(middle, 0.0f)), h);
            assert_int_equal(qc_half_of_float(nextafterf(middle, INFINITY)), h + 1);
            assert_int_equal(qc_half_of_float(-f), h | 0x8000);
        }
        if (exponent != 31 || !fraction)
            assert_int_equal(qc_half_of_float(f), h);
        float negative = qc_float_of_half((uint16_t)(h | 0x8000));
        assert_true(f != f ? negative != negative : negative == -f && signbit(negative));
    }
    assert_int_equal(qc_half_of_float(NAN) & 0x7fff, 0x7fff);
    assert_int_equal(qc_half_of_float(INFINITY), 0x7c00);
    assert_int_equal(qc_half_of_float(-1e30f), 0xfc00);
    assert_int_equal(qc_half_of_float(1e-30f), 0);
    assert_int_equal(qc_half2_of_floats(1.0f, -2.0f), 0xc0003c00u);
    /* 2049 is no half: 3 * 683 = 2049 is rounded; 2048 - 1/2048 too */
    assert_int_equal(qc_half2_mul(qc_half2_of_floats(3, 2), qc_half2_of_floats(683, 5)),
                     qc_half2_of_floats(2048, 10));
    assert_int_equal(qc_half2_sub(qc_half2_of_floats(2048, 1), qc_half2_of_floats(0x1p-11f, 3)),
                     qc_half2_of_floats(2048, -2));
    assert_int_equal(qc_bf16_of_float(1.00390625f), 0x3f80);
    assert_int_equal(qc_bf16_of_float(1.01171875f), 0x3f82);
    assert_true(qc_float_of_bf16(0xc040) == -3.0f);
    uint16_t nan = qc_bf16_of_float(__uint_as_float(0x7f800001u));
    assert_true(qc_float_of_bf16(nan) != qc_float_of_bf16(nan));
}

/* ---- faults of threads ----------------------------------------------------------------------- */

template <int fault> static __global__ void diverging_kernel(int *out)
{
    unsigned t = threadIdx.x;
    if (fault == 0 && t != 7) /* one thread goes elsewhere */
        __syncthreads();
    if (fault == 0 && t == 7)
        out[0] = __shfl_sync(0xffffffffu, 1, 0);
    if (fault == 1 && t != 7) /* one lane does not come */
        out[0] = __any_sync(0xffffffffu, 1);
    if (fault == 2) /* a lane that is not of the mask */
        __syncwarp(0xfffffff0u);
    if (fault == 3) /* two collectives at once */
        out[0] = t < 16 ? __any_sync(0xffffffffu, 1) : __shfl_sync(0xffffffffu, 1, 0);
    if (fault == 4) /* a lane the block does not have */
        __syncwarp();
    if (fault == 5) /* overlapping masks */
        __syncwarp(t == 0 ? 3 : 7);
    if (fault == 6)
        __trap();
    if (fault == 7)
        qc_shim_syncthreads("elsewhere", (int)(t < 32), QC_SHIM_COUNT, 0);
}

template <int fault, unsigned threads> static bool diverge()
{
    device_array<int> out(1);
    SHIM_RUN(out, diverging_kernel<fault>, 1, threads, 0, out.p);
    cudaDeviceSynchronize();
    return true;
}

static void test_divergence(void **)
{
    for (const char *order : shim_orders) {
        qc_shim_set_order(order);
        shim_expect_fault(diverge<0, 64>, "threads wait for each other for ever");
        shim_expect_fault(diverge<1, 64>, "a lane of the mask is missing");
        shim_expect_fault(diverge<2, 32>, "mask 0xfffffff0, which leaves out the lane itself");
        shim_expect_fault(diverge<3, 32>, "lanes of one mask at different places");
        shim_expect_fault(diverge<4, 48>, "mask 0xffffffff in a warp of 16 lanes");
        shim_expect_fault(diverge<5, 3>, "threads wait for each other for ever");
        shim_expect_fault(diverge<6, 1>,
                          "__trap: kernel diverging_kernel<fault>, block (0,0,0), thread (0,0,0)");
        shim_expect_fault(diverge<7, 64>, "threads of a block at different barriers");
        shim_expect_fault(run_two_lines, "threads of a block at different barriers");
    }
    shim_expect_fault(diverge<0, 64>, "kernel diverging_kernel<fault>, block (0,0,0)");
}
} // namespace

int main()
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_places),         cmocka_unit_test(test_sum),
        cmocka_unit_test(test_votes_of_block), cmocka_unit_test(test_shuffles),
        cmocka_unit_test(test_votes),          cmocka_unit_test(test_atomics),
        cmocka_unit_test(test_orders),         cmocka_unit_test(test_shared_poison),
        cmocka_unit_test(test_intrinsics),     cmocka_unit_test(test_half),
        cmocka_unit_test(test_half_fma),       cmocka_unit_test(test_divergence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
