/* The CPU shim: matrix products and their fragments, ldmatrix, cp.async.
 *
 * Both fragment layouts are checked against plain products of matrices whose elements are all
 * different, by the tables of the PTX ISA written out anew here. */
#include "tests/shim/shim_testing.h"

namespace
{
/* Small whole numbers: every sum is exact in any order. */
static float element(int matrix, int i, int j)
{
    return (float)((i * 37 + j * 11 + matrix * 5) % 61 - 30);
}

/* ---- m16n8k16 -------------------------------------------------------------------------------- */

/* PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": element ai of A is at
 *   row    = groupID for ai with i in {0, 1, 4, 5}, else groupID + 8
 *   column = threadID_in_group * 2 + (i & 1), + 8 for i >= 4 */
static __global__ void mma_16816_kernel(const float *a, const float *b, const float *c, float *d)
{
    unsigned lane = threadIdx.x % 32, group = lane >> 2, in_group = lane & 3;
    uint32_t fa[4], fb[2];
    float fd[4];
    float va[8], vb[4];
    for (unsigned i = 0; i < 8; i++) {
        unsigned row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
        unsigned column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
        va[i] = a[row * 16 + column];
    }
    for (unsigned i = 0; i < 4; i++)
        vb[i] = b[(in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0)) * 8 + group];
    for (unsigned i = 0; i < 4; i++)
        fa[i] = qc_half2_of_floats(va[2 * i], va[2 * i + 1]);
    for (unsigned i = 0; i < 2; i++)
        fb[i] = qc_half2_of_floats(vb[2 * i], vb[2 * i + 1]);
    for (unsigned i = 0; i < 4; i++)
        fd[i] = c[(i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)];
    qc_mma_m16n8k16(fd, fa, fb);
    for (unsigned i = 0; i < 4; i++)
        d[(i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)] = fd[i];
}

static void test_mma_16816(void **)
{
    float a[16 * 16], b[16 * 8], c[16 * 8], d[16 * 8];
    for (int i = 0; i < 256; i++)
        a[i] = element(0, i / 16, i % 16);
    for (int i = 0; i < 128; i++) {
        b[i] = element(1, i / 8, i % 8);
        c[i] = element(2, i / 8, i % 8);
    }
    for (const char *order : shim_orders) {
        qc_shim_set_order(order);
        device_array<float> da(256, a), db(128, b), dc(128, c), dd(128);
        SHIM_RUN(dd, mma_16816_kernel, 1, 32, 0, da.p, db.p, dc.p, dd.p);
        dd.get(d);
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) {
                float want = c[i * 8 + j];
                for (int k = 0; k < 16; k++)
                    want += a[i * 16 + k] * b[k * 8 + j];
                assert_true(d[i * 8 + j] == want);
            }
    }
}

/* ---- m8n8k4 ---------------------------------------------------------------------------------- */

/* PTX ISA, "Matrix Fragments for mma.m8n8k4 with .f16 floating point type": for .row A and .col B
 *   row of A, column of B = %laneid % 4 if %laneid < 16 else (%laneid % 4) + 4; k = i
 * and for .f32 C and D
 *   X = (%laneid & 0b1) + (i & 0b10) if %laneid < 16, + 4 else
 *   Y = (i & 0b100) + (%laneid & 0b10) + (i & 0b1)
 * and quad pair q is lanes 4q .. 4q + 3 and 16 + 4q .. 16 + 4q + 3. */
static __global__ void mma_884_kernel(const float *a, const float *b, const float *c, float *d)
{
    unsigned lane = threadIdx.x % 32, pair = lane % 16 / 4;
    unsigned line = lane % 4 + (lane < 16 ? 0 : 4);
    a += pair * 32, b += pair * 32, c += pair * 64, d += pair * 64;
    uint32_t fa[2], fb[2];
    float fd[8];
    for (unsigned i = 0; i < 2; i++) {
        fa[i] = qc_half2_of_floats(a[line * 4 + 2 * i], a[line * 4 + 2 * i + 1]);
        fb[i] = qc_half2_of_floats(b[2 * i * 8 + line], b[(2 * i + 1) * 8 + line]);
    }
    for (unsigned i = 0; i < 8; i++)
        fd[i] =
            c[((lane & 1) + (i & 2) + (lane < 16 ? 0 : 4)) * 8 + (i & 4) + (lane & 2) + (i & 1)];
    qc_mma_m8n8k4(fd, fa, fb);
    for (unsigned i = 0; i < 8; i++)
        d[((lane & 1) + (i & 2) + (lane < 16 ? 0 : 4)) * 8 + (i & 4) + (lane & 2) + (i & 1)] =
            fd[i];
}

static void test_mma_884(void **)
{
    float a[4 * 32], b[4 * 32], c[4 * 64], d[4 * 64];
    for (int i = 0; i < 128; i++) {
        a[i] = element(3, i / 4, i % 4);
        b[i] = element(4, i / 8, i % 8);
    }
    for (int i = 0; i < 256; i++)
        c[i] = element(5, i / 8, i % 8);
    for (const char *order : shim_orders) {
        qc_shim_set_order(order);
        device_array<float> da(128, a), db(128, b), dc(256, c), dd(256);
        SHIM_RUN(dd, mma_884_kernel, 1, 32, 0, da.p, db.p, dc.p, dd.p);
        dd.get(d);
        for (int q = 0; q < 4; q++)
            for (int i = 0; i < 8; i++)
                for (int j = 0; j < 8; j++) {
                    float want = c[q * 64 + i * 8 + j];
                    for (int k = 0; k < 4; k++)
                        want += a[q * 32 + i * 4 + k] * b[q * 32 + k * 8 + j];
                    assert_true(d[q * 64 + i * 8 + j] == want);
                }
    }
}

/* A NaN reaches its row or column and nothing else. */
static void test_mma_nan(void **)
{
    float a[16 * 16] = {}, b[16 * 8], c[16 * 8] = {}, d[16 * 8];
    for (float &x : b)
        x = 1;
    a[5 * 16 + 9] = NAN;
    a[6 * 16 + 15] = INFINITY;
    device_array<float> da(256, a), db(128, b), dc(128, c), dd(128);
    SHIM_RUN(dd, mma_16816_kernel, 1, 32, 0, da.p, db.p, dc.p, dd.p);
    dd.get(d);
    for (int i = 0; i < 128; i++)
        assert_true(i / 8 == 5 ? d[i] != d[i] : i / 8 == 6 ? d[i] == INFINITY : d[i] == 0);
}

/* ---- ldmatrix -------------------------------------------------------------------------------- */

struct rows_shared {
    uint16_t row[32][24]; /* 48 bytes from row to row */
};

static __global__ void ldmatrix_kernel(uint32_t *out)
{
    QC_SHARED(rows_shared, s);
    unsigned lane = threadIdx.x;
    for (unsigned j = 0; j < 8; j++)
        s.row[lane][j] = (uint16_t)(lane * 8 + j);
    __syncthreads();
    uint32_t r[4];
    qc_ldmatrix_x4(r, s.row[lane]);
    for (unsigned i = 0; i < 4; i++)
        out[lane * 4 + i] = r[i];
}

static void test_ldmatrix(void **)
{
    for (const char *order : shim_orders) {
        uint32_t found[128];
        qc_shim_set_order(order);
        device_array<uint32_t> out(128);
        SHIM_RUN(out, ldmatrix_kernel, 1, 32, sizeof(rows_shared), out.p);
        out.get(found);
        for (unsigned lane = 0; lane < 32; lane++)
            for (unsigned i = 0; i < 4; i++) {
                unsigned first = (i * 8 + lane / 4) * 8 + 2 * (lane % 4);
                assert_int_equal(found[lane * 4 + i], first | (first + 1) << 16);
            }
    }
}

template <int fault> static __global__ void bad_ldmatrix_kernel(uint32_t *out)
{
    QC_SHARED(rows_shared, s);
    unsigned lane = threadIdx.x;
    uint32_t r[4];
    const unsigned char *row = reinterpret_cast<const unsigned char *>(s.row[lane]);
    if (fault == 0 && lane == 3)
        row += 8;
    if (fault == 1 && lane == 31)
        row += 48;
    if (fault == 2 && lane == 0)
        row = reinterpret_cast<const unsigned char *>(out);
    if (fault == 3)
        qc_cp_async_16(s.row[lane], reinterpret_cast<const unsigned char *>(out) + 4, 16);
    if (fault == 4)
        qc_cp_async_16(&s.row[lane][4], out, 16);
    if (fault == 5)
        qc_cp_async_16(s.row[lane], out, 8);
    qc_ldmatrix_x4(r, row);
    out[lane] = r[0];
}

template <int fault> static bool bad_ldmatrix()
{
    device_array<uint32_t> out(128);
    SHIM_RUN(out, bad_ldmatrix_kernel<fault>, 1, 32, sizeof(rows_shared), out.p);
    cudaDeviceSynchronize();
    return true;
}

static void test_bad_addresses(void **)
{
    shim_expect_fault(bad_ldmatrix<0>,
                      "ldmatrix: offset 152 of shared memory is not aligned to 16");
    shim_expect_fault(bad_ldmatrix<1>, "is outside of the 1536 bytes of shared memory");
    shim_expect_fault(bad_ldmatrix<2>, "is outside of the 1536 bytes of shared memory");
    shim_expect_fault(bad_ldmatrix<3>, "which is not aligned to 16 bytes");
    shim_expect_fault(bad_ldmatrix<4>, "cp.async: offset");
    shim_expect_fault(bad_ldmatrix<5>, "cp.async of 8 bytes");
}

/* ---- cp.async -------------------------------------------------------------------------------- */

struct copies_shared {
    uint32_t word[4][4];
};

/* One thread; out: what is seen in the first word of each of four copies, at six moments. */
static __global__ void copies_kernel(const uint32_t *in, uint32_t *out)
{
    QC_SHARED(copies_shared, s);
    uint32_t *o = out;
    for (unsigned i = 0; i < 4; i++)
        s.word[i][0] = 7;
    auto look = [&]() {
        for (unsigned i = 0; i < 4; i++)
            *o++ = s.word[i][0];
    };
    qc_cp_async_16(s.word[0], in, 16);
    qc_cp_async_commit();
    look(); /* under way: poison */
    qc_cp_async_16(s.word[1], in + 4, 16);
    qc_cp_async_commit();
    qc_cp_async_16(s.word[2], in + 8, 0);
    qc_cp_async_commit();
    qc_cp_async_wait<2>();
    look(); /* the oldest is there */
    qc_cp_async_wait<1>();
    look();
    qc_cp_async_16(s.word[3], in + 12, 16);
    qc_cp_async_wait<0>();
    look(); /* the last is in no group yet */
    qc_cp_async_commit();
    qc_cp_async_wait<1>();
    look();
    qc_cp_async_wait<0>();
    look();
}

static void test_copies(void **)
{
    uint32_t in[16], found[24];
    const uint32_t no = 0xffffffffu;
    const uint32_t want[24] = {no,  7,   7, 7,  100, no,  no, 7,  100, 104, no, 7,
                               100, 104, 0, no, 100, 104, 0,  no, 100, 104, 0,  112};
    for (uint32_t i = 0; i < 16; i++)
        in[i] = 100 + i;
    device_array<uint32_t> from(16, in), out(24);
    SHIM_RUN(out, copies_kernel, 1, 1, sizeof(copies_shared), from.p, out.p);
    out.get(found);
    assert_memory_equal(found, want, sizeof(want));
}

/* ---- devices that do not have it ------------------------------------------------------------- */

template <int which> static __global__ void needs_kernel(const uint32_t *in, float *out)
{
    QC_SHARED(copies_shared, s);
    float d[8] = {};
    uint32_t a[4] = {}, b[2] = {};
    if (which == 0)
        qc_cp_async_16(s.word[0], in, 16);
    if (which == 1)
        qc_mma_m16n8k16(d, a, b);
    if (which == 2)
        qc_ldmatrix_x4(a, s.word[0]);
    if (which == 3)
        qc_mma_m8n8k4(d, a, b);
    out[threadIdx.x] = d[0] + (float)a[0];
}

template <int which> static bool needs()
{
    qc_shim_set_devices("sm_70:80:1GiB");
    device_array<uint32_t> in(4);
    device_array<float> out(32);
    SHIM_RUN(out, needs_kernel<which>, 1, 32, sizeof(copies_shared), in.p, out.p);
    cudaDeviceSynchronize();
    return true;
}

static void test_capabilities(void **)
{
    char text[1000];
    shim_expect_fault(needs<0>, "cp.async needs sm_80; this device is sm_70");
    shim_expect_fault(needs<1>, "mma.m16n8k16 needs sm_80; this device is sm_70");
    shim_expect_fault(needs<2>, "ldmatrix needs sm_75; this device is sm_70");
    assert_int_equal(shim_in_child(needs<3>, text, sizeof(text)), SHIM_RIGHT);
}

} // namespace

int main()
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mma_16816),     cmocka_unit_test(test_mma_884),
        cmocka_unit_test(test_mma_nan),       cmocka_unit_test(test_ldmatrix),
        cmocka_unit_test(test_bad_addresses), cmocka_unit_test(test_copies),
        cmocka_unit_test(test_capabilities),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
