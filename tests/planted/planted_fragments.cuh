/* Planted faults: a fragment of a matrix product in the wrong lane or register, and cp.async. */
#ifndef QC_TESTS_PLANTED_FRAGMENTS_CUH
#define QC_TESTS_PLANTED_FRAGMENTS_CUH

#include "kernels/ptx.cuh"

namespace
{
/* d = a b with a [16, 16], b [16, 8]. fault 1: group and lane of the group swapped for b; 2: the
 * second and third register of a swapped; 3: rows g and g + 8 of d swapped. */
template <int fault> static __global__ void pf_16816(const float *a, const float *b, float *d)
{
    unsigned lane = threadIdx.x, g = lane / 4, t = lane % 4;
    unsigned bg = fault == 1 ? lane % 8 : g, bt = fault == 1 ? lane / 8 : t;
    uint32_t fa[4], fb[2];
    float fd[4] = {};
    for (unsigned i = 0; i < 4; i++) {
        unsigned row = g + (i & 1) * 8, column = 2 * t + (i & 2) * 4;
        fa[fault == 2 ? (i & 1) * 2 + i / 2 : i] =
            qc_half2_of_floats(a[row * 16 + column], a[row * 16 + column + 1]);
    }
    for (unsigned i = 0; i < 2; i++)
        fb[i] = qc_half2_of_floats(b[(2 * bt + 8 * i) * 8 + bg], b[(2 * bt + 8 * i + 1) * 8 + bg]);
    qc_mma_m16n8k16(fd, fa, fb);
    for (unsigned i = 0; i < 4; i++)
        d[(g + (i / 2 ^ (fault == 3)) * 8) * 8 + 2 * t + i % 2] = fd[i];
}

/* Four products of a [8, 4] and b [4, 8]. fault 1: quad pairs taken for lanes 8q .. 8q + 7; 2: the
 * halves of d swapped. */
template <int fault> static __global__ void pf_884(const float *a, const float *b, float *d)
{
    unsigned lane = threadIdx.x;
    unsigned pair = fault == 1 ? lane / 8 : lane % 16 / 4;
    unsigned line = fault == 1 ? lane % 8 : lane % 4 + (lane >= 16 ? 4 : 0);
    uint32_t fa[2], fb[2];
    float fd[8] = {};
    a += pair * 32, b += pair * 32, d += pair * 64;
    for (unsigned i = 0; i < 2; i++) {
        fa[i] = qc_half2_of_floats(a[line * 4 + 2 * i], a[line * 4 + 2 * i + 1]);
        fb[i] = qc_half2_of_floats(b[2 * i * 8 + line], b[(2 * i + 1) * 8 + line]);
    }
    qc_mma_m8n8k4(fd, fa, fb);
    for (unsigned i = 0; i < 8; i++) {
        unsigned e = fault == 2 ? i ^ 4 : i;
        unsigned row = (lane & 1) + (e & 2) + (line & 4), column = (e & 4) + (lane & 2) + (e & 1);
        d[row * 8 + column] = fd[i];
    }
}

/* A ring of three stages filled by cp.async, two ahead: column sums of a [64, 64] matrix, four rows
 * to a stage. fault 1: no wait; 2: waits for one group too few; 3: no barrier behind the wait; 4:
 * no barrier before a stage is filled again; 5: groups are not committed. */
struct pf_ring {
    float stage[3][4][64];
};

template <int fault> static __global__ void pf_pipeline(const float *x, float *y)
{
    QC_SHARED(pf_ring, s);
    unsigned t = threadIdx.x; /* 64 */
    const unsigned tiles = 16;
    auto fetch = [&](unsigned tile) {
        if (tile < tiles) {
            float *to = &s.stage[tile % 3][t / 16][t % 16 * 4];
            qc_cp_async_16(to, x + (tile * 4 + t / 16) * 64 + t % 16 * 4, 16);
        }
        if (fault != 5)
            qc_cp_async_commit();
    };
    float sum = 0;
    fetch(0);
    fetch(1);
    for (unsigned tile = 0; tile < tiles; tile++) {
        if (fault == 2)
            qc_cp_async_wait<2>();
        else if (fault != 1)
            qc_cp_async_wait<1>();
        if (fault != 3 && fault != 4)
            __syncthreads(); /* also: everybody is done with the stage that is filled next */
        if (fault == 4) {
            fetch(tile + 2);
            __syncthreads();
        }
        for (unsigned r = 0; r < 4; r++)
            sum += s.stage[tile % 3][r][t];
        if (fault != 4)
            fetch(tile + 2);
    }
    y[t] = sum;
}

/* 16 threads fill 64 words with cp.async, or with its zeros. Then the words are used for something
 * else: thread t puts x[t] there and reads its neighbour's. fault 1: the
 * copies are not waited for; 2: they are, but none was committed. */
template <int fault, bool zeros> static __global__ void pf_reuse(const float *x, float *y)
{
    QC_SHARED(pf_ring, s);
    unsigned t = threadIdx.x; /* 64 */
    float *words = s.stage[0][0];
    if (t < 16)
        qc_cp_async_16(words + 4 * t, x, zeros ? 0 : 16);
    if (fault != 2)
        qc_cp_async_commit();
    if (fault != 1)
        qc_cp_async_wait<0>();
    __syncthreads();
    words[t] = x[t];
    __syncthreads();
    y[t] = words[t ^ 1];
}
} // namespace

#endif
