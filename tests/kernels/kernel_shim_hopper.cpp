/* The CPU shim: what runs on its own on sm_90a. Products of each width against plain ones, barriers
 * between producing and consuming warps, and what each wrapper refuses. Mistakes in the order of
 * things are planted in tests/planted/planted_async.cuh. */
#include "kernels/ptx_hopper.cuh"
#include "tests/shim/shim_testing.h"

namespace
{
/* Small whole numbers: every sum is exact in any order. */
static float element(unsigned matrix, unsigned i, unsigned j)
{
    return (float)((int)((i * 37 + j * 11 + matrix * 5) % 31) - 15);
}

/* ---- products -------------------------------------------------------------------------------- */

enum { GROUPS = 2, ROWS = 64 * GROUPS, DEPTH = 48, PAD = 32 };

/* From the matrices with 8 k to those with the next 8, in halves. */
static constexpr unsigned next_k(unsigned n)
{
    return n * 8 + PAD / 2;
}

template <unsigned n> struct product_shared {
    __align__(16) uint16_t b[DEPTH / 8 * next_k(n)];
    uint64_t full;
};

/* PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16": element i of A is at
 *   row    = (warp % 4) * 16 + groupID for i in {0, 1, 4, 5}, else + 8
 *   column = threadID_in_group * 2 + (i & 1), + 8 for i >= 4
 * and element i of D at
 *   row    = (warp % 4) * 16 + groupID for i % 4 < 2, else + 8
 *   column = 8 * (i / 4) + threadID_in_group * 2 + (i & 1) */
template <int n>
static __global__ void product_kernel(const float *a, const uint16_t *b, const float *c, float *d)
{
    QC_SHARED(product_shared<n>, s);
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned row = warp * 16 + lane / 4, column = lane % 4 * 2;
    if (threadIdx.x == 0) {
        qc_mbarrier_init(&s.full, 1);
        qc_mbarrier_ready();
        qc_mbarrier_expect(&s.full, sizeof(s.b));
        qc_bulk_load(s.b, b, sizeof(s.b), &s.full);
    }
    __syncthreads();
    uint32_t fa[DEPTH / 16][4];
    float fd[n / 2];
    for (unsigned k = 0; k < DEPTH / 16; k++)
        for (unsigned i = 0; i < 8; i += 2) {
            unsigned r = row + (i & 2 ? 8 : 0), at = k * 16 + column + (i >= 4 ? 8 : 0);
            fa[k][i / 2] = qc_half2_of_floats(a[r * DEPTH + at], a[r * DEPTH + at + 1]);
        }
    for (unsigned i = 0; c && i < n / 2; i++)
        fd[i] = c[(row + (i % 4 < 2 ? 0 : 8)) * n + 8 * (i / 4) + column + (i & 1)];
    qc_mbarrier_wait(&s.full, 0);
    qc_wgmma_fence();
    for (unsigned k = 0; k < DEPTH / 16; k++)
        qc_wgmma(fd, fa[k], qc_wgmma_b(qc_shared_address(s.b + 2 * k * next_k(n)), 2 * next_k(n)),
                 c || k);
    qc_wgmma_commit();
    qc_wgmma_wait<0>();
    for (unsigned i = 0; i < n / 2; i++)
        d[(row + (i % 4 < 2 ? 0 : 8)) * n + 8 * (i / 4) + column + (i & 1)] = fd[i];
}

template <unsigned n> static void check_product(bool adds)
{
    static float a[ROWS * DEPTH], c[ROWS * n], d[ROWS * n];
    static uint16_t b[DEPTH / 8 * next_k(n)];
    for (unsigned i = 0; i < ROWS * DEPTH; i++)
        a[i] = element(0, i / DEPTH, i % DEPTH);
    for (unsigned i = 0; i < ROWS * n; i++)
        c[i] = element(2, i / n, i % n);
    memset(b, 0xff, sizeof(b));
    for (unsigned k = 0; k < DEPTH; k++)
        for (unsigned j = 0; j < n; j++)
            b[k / 8 * next_k(n) + j / 8 * 64 + j % 8 * 8 + k % 8] =
                qc_half_of_float(element(1, k, j));
    device_array<float> da(ROWS * DEPTH, a), dc(ROWS * n, c), dd(ROWS * n);
    device_array<uint16_t> db(sizeof(b) / 2, b);
    SHIM_RUN(dd, product_kernel<n>, 1, 128 * GROUPS, sizeof(product_shared<n>), da.p, db.p,
             adds ? dc.p : nullptr, dd.p);
    dd.get(d);
    for (unsigned i = 0; i < ROWS; i++)
        for (unsigned j = 0; j < n; j++) {
            float want = adds ? c[i * n + j] : 0;
            for (unsigned k = 0; k < DEPTH; k++)
                want += a[i * DEPTH + k] * element(1, k, j);
            if (d[i * n + j] != want)
                fail_msg("n = %u, d[%u][%u] is %g and not %g", n, i, j, (double)d[i * n + j],
                         (double)want);
        }
}

static void test_products(void **)
{
    for (const char *order : shim_orders) {
        qc_shim_set_order(order);
        check_product<16>(false);
        check_product<16>(true);
        check_product<32>(true);
        check_product<64>(false);
        check_product<128>(true);
        check_product<256>(true);
    }
}
/* ---- when things happen ---------------------------------------------------------------------- */

struct moments_shared {
    __align__(16) uint16_t b[2 * 128];
    uint64_t full;
};

/* With A and B of ones, each product adds 16. out: what is in two sums at five moments; 0: poison. */
static __global__ void moments_kernel(const uint16_t *ones, float *out)
{
    QC_SHARED(moments_shared, s);
    const uint32_t a[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    float first[8], second[8];
    if (threadIdx.x == 0) {
        qc_mbarrier_init(&s.full, 1);
        qc_mbarrier_ready();
        qc_mbarrier_expect(&s.full, sizeof(s.b));
        qc_bulk_load(s.b, ones, sizeof(s.b), &s.full);
    }
    __syncthreads();
    qc_mbarrier_wait(&s.full, 0);
    auto look = [&]() {
        for (const float *d = first; d; d = d == first ? second : nullptr, out += blockDim.x)
            out[threadIdx.x] = d[7] == d[7] ? d[7] : 0;
    };
    uint64_t b = qc_wgmma_b(qc_shared_address(s.b), 256);
    auto add = [&](float(&d)[8], int more) { qc_wgmma(d, a, b, more); };
    qc_wgmma_fence();
    add(first, 0);
    qc_wgmma_commit();
    qc_wgmma_fence();
    add(first, 1);
    add(second, 0);
    qc_wgmma_commit();
    qc_wgmma_fence();
    add(second, 1);
    qc_wgmma_wait<1>();
    look(); /* products of the second group still add to both */
    qc_wgmma_commit();
    look();
    qc_wgmma_wait<1>();
    look(); /* the last group adds to the second alone */
    qc_wgmma_wait<0>();
    look();
    qc_wgmma_fence();
    add(second, 1);
    add(first, 0);
    qc_wgmma_commit();
    qc_wgmma_wait<0>();
    look();
}

static void test_moments(void **)
{
    enum { THREADS = 128, MOMENTS = 5 };
    static const float want[MOMENTS][2] = {{0, 0}, {0, 0}, {32, 0}, {32, 32}, {16, 48}};
    uint16_t ones[256];
    float found[MOMENTS * 2 * THREADS];
    for (uint16_t &h : ones)
        h = 0x3c00;
    for (const char *order : shim_orders) {
        qc_shim_set_order(order);
        device_array<uint16_t> from(256, ones);
        device_array<float> out(MOMENTS * 2 * THREADS);
        SHIM_RUN(out, moments_kernel, 1, THREADS, sizeof(moments_shared), from.p, out.p);
        out.get(found);
        for (unsigned i = 0; i < MOMENTS * 2 * THREADS; i++)
            assert_true(found[i] == want[i / (2 * THREADS)][i / THREADS % 2]);
    }
}

/* ---- barriers -------------------------------------------------------------------------------- */

enum { ROUNDS = 9, SIDE = 64 };

struct sides_shared {
    __align__(16) uint32_t loaded[4];
    uint32_t word[SIDE];
    uint64_t full, empty;
};

/* Half of the threads write words, the others read each other's, in rounds. In the odd rounds one of
 * the writers brings four more words as well; in the even ones nobody announces anything. */
static __global__ void sides_kernel(const uint32_t *in, uint32_t *out)
{
    QC_SHARED(sides_shared, s);
    unsigned t = threadIdx.x % SIDE;
    if (threadIdx.x == SIDE) {
        qc_mbarrier_init(&s.full, SIDE);
        qc_mbarrier_init(&s.empty, SIDE);
    }
    __syncthreads();
    if (threadIdx.x == 3)
        qc_mbarrier_ready(); /* of no use: it has initialized nothing */
    if (threadIdx.x == SIDE)
        qc_mbarrier_ready();
    __syncthreads();
    for (unsigned round = 0; round < ROUNDS; round++) {
        if (threadIdx.x < SIDE) {
            qc_mbarrier_wait(&s.empty, round % 2 ^ 1);
            s.word[t] = round * SIDE + t;
            if (round % 2 && t == 5) {
                qc_bulk_load(s.loaded, in + round * 4, sizeof(s.loaded), &s.full);
                qc_mbarrier_expect(&s.full, sizeof(s.loaded));
            } else {
                qc_mbarrier_arrive(&s.full);
            }
        } else {
            qc_mbarrier_wait(&s.full, round % 2);
            out[round * SIDE + t] = s.word[t ^ 33] + (round % 2 ? s.loaded[t % 4] : 0);
            qc_mbarrier_arrive(&s.empty);
        }
    }
}

static void test_sides(void **)
{
    uint32_t in[4 * ROUNDS], found[ROUNDS * SIDE];
    for (uint32_t i = 0; i < 4 * ROUNDS; i++)
        in[i] = 1000 * i;
    for (const char *order : shim_orders) {
        qc_shim_set_order(order);
        device_array<uint32_t> from(4 * ROUNDS, in), out(ROUNDS * SIDE);
        SHIM_RUN(out, sides_kernel, 1, 2 * SIDE, sizeof(sides_shared), from.p, out.p);
        out.get(found);
        for (unsigned i = 0; i < ROUNDS * SIDE; i++) {
            unsigned round = i / SIDE, t = i % SIDE;
            assert_int_equal(found[i],
                             round * SIDE + (t ^ 33) + (round % 2 ? in[4 * round + t % 4] : 0));
        }
    }
}

/* ---- what is refused ------------------------------------------------------------------------- */

struct bad_shared {
    __align__(16) unsigned char bytes[512];
    uint64_t barrier[2];
};

/* In 128 threads; in holds 512 bytes. */
template <int fault> static __global__ void bad_kernel(const unsigned char *in)
{
    QC_SHARED(bad_shared, s);
    const uint32_t a[4] = {};
    float d[16] = {};
    uint64_t b = qc_wgmma_b(qc_shared_address(s.bytes), 256);
    auto load = [&](unsigned to, const void *from, uint32_t bytes) {
        qc_bulk_load(s.bytes + to, from, bytes, s.barrier);
    };
    if (threadIdx.x == 0) {
        qc_mbarrier_init(s.barrier, fault == 0 ? 0 : 1);
        qc_mbarrier_ready();
        if (fault == 1)
            qc_mbarrier_init(s.barrier, 1);
        if (fault == 2)
            qc_mbarrier_init(reinterpret_cast<uint64_t *>(s.bytes + 4), 1);
        if (fault == 3)
            qc_mbarrier_wait(s.barrier, 2);
        if (fault == 4)
            load(0, in, 24);
        if (fault == 5)
            load(0, in, 0);
        if (fault == 6)
            load(8, in, 16);
        if (fault == 7)
            load(0, in + 8, 16);
        if (fault == 8)
            load(512, in, 32);
        if (fault == 9)
            load(0, in + 496, 32);
        if (fault == 10)
            load(0, s.bytes + 256, 16);
        if (fault == 11)
            qc_bulk_load(s.bytes, in, 16, s.barrier + 1);
        if (fault == 12 || fault == 13) {
            qc_mbarrier_expect(s.barrier, 32);
            load(16, in, 32);
            if (fault == 13) {
                s.bytes[40] = 1;
                qc_mbarrier_wait(s.barrier, 0);
            }
        }
        if (fault == 14)
            qc_mbarrier_wait(s.barrier, 0);
    }
    qc_wgmma_fence();
    if (fault == 15)
        qc_wgmma(reinterpret_cast<float(&)[8]>(d), a, b + (512 >> 4), 0);
    if (fault == 16)
        qc_wgmma(reinterpret_cast<float(&)[8]>(d), a, b - (1024 >> 4), 0);
    if (fault == 17)
        qc_wgmma(reinterpret_cast<float(&)[8]>(d), a, b | UINT64_C(1) << 62, 0);
    if (fault == 18)
        qc_wgmma(reinterpret_cast<float(&)[8]>(d), a, b + threadIdx.x / 16 % 2, 0);
    if (fault == 19) {
        qc_wgmma(d, a, qc_wgmma_b(qc_shared_address(s.bytes), 0), 0);
        qc_wgmma(reinterpret_cast<float(&)[8]>(d[4]), a, b, 0);
    }
    if (fault == 20 && threadIdx.x >= 32) {
        qc_wgmma(reinterpret_cast<float(&)[8]>(d), a, b, 0);
        qc_wgmma_commit();
        qc_wgmma_wait<0>();
    }
}

template <int fault, unsigned threads = 128> static bool bad()
{
    device_array<unsigned char> in(512);
    SHIM_RUN(in, bad_kernel<fault>, 1, threads, sizeof(bad_shared), in.p);
    cudaDeviceSynchronize();
    return true;
}

static bool bad_device()
{
    qc_shim_set_devices("sm_100:100:1GiB");
    return bad<21>();
}

static bool bad_code()
{
    qc_shim_set_code(80);
    return bad<21>();
}

static void test_refused(void **)
{
    char text[1000];
    assert_int_equal(shim_in_child(bad<21>, text, sizeof(text)), SHIM_RIGHT);
    shim_expect_fault(bad<0>, "mbarrier.init with a count of 0");
    shim_expect_fault(bad<1>, "the mbarrier at offset 512 is initialized again");
    shim_expect_fault(bad<2>, "mbarrier.init: offset 4 of shared memory is not aligned to 8");
    shim_expect_fault(bad<3>, "with a parity of 2");
    shim_expect_fault(bad<4>, "a bulk load of 24 bytes, which is no multiple of 16");
    shim_expect_fault(bad<5>, "a bulk load of 0 bytes");
    shim_expect_fault(bad<6>, "a bulk load: offset 8 of shared memory is not aligned to 16");
    shim_expect_fault(bad<7>, "which is not aligned to 16 bytes");
    shim_expect_fault(bad<8>, "is outside of the 528 bytes of shared memory");
    shim_expect_fault(bad<9>, "which is not within memory of the device");
    shim_expect_fault(bad<10>, "which is not within memory of the device");
    shim_expect_fault(bad<11>, "a bulk load: the mbarrier at offset 520 was not initialized");
    shim_expect_fault(bad<12>, "nobody has waited for a bulk load to offset 16");
    shim_expect_fault(bad<13>, "offset 16 of shared memory, or what follows it, was written while");
    shim_expect_fault(bad<14>, "thread (0,0,0) waits for phase 0 of the mbarrier at offset 512");
    shim_expect_fault(bad<15>, "matrix (0, 0) of B is at offset 512, outside of the 528 bytes");
    shim_expect_fault(bad<16>, "matrix (0, 0) of B is at offset -1024, outside of");
    shim_expect_fault(bad<17>, "has bits that ptx_hopper.cuh does not set");
    shim_expect_fault(bad<18>, "the lanes of a warp do not do the same");
    shim_expect_fault(bad<19>, "a part of D belongs to the D of another product");
    shim_expect_fault(bad<20>, "waits for other warps at wgmma.wait_group");
    shim_expect_fault(bad<21, 96>, "in a warp that belongs to no warpgroup");
    shim_expect_fault(bad_device, "only in code for sm_90a; this device is sm_100");
    shim_expect_fault(bad_code, "with code for sm_80");
}
} // namespace

int main()
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_moments),
        cmocka_unit_test(test_sides),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
