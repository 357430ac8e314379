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
        qc_wgmma<n>(fd, fa[k],
                    qc_wgmma_b(qc_shared_address(s.b + 2 * k * next_k(n)), 2 * next_k(n)), c || k);
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
} // namespace

int main()
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_products)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
