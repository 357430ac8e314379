/* Faults planted into small kernels (tests/planted) and host code are found on the CPU shim: by a
 * wrong result or a message, in at least one of the orders that the tests of kernels run in; their
 * twins without the fault pass in all. */
#include "tests/planted/planted_async.cuh"
#include "tests/planted/planted_barriers.cuh"
#include "tests/planted/planted_fragments.cuh"
#include "tests/planted/planted_overlap.cuh"
#include "tests/planted/planted_tiles.cuh"
#include "tests/shim/shim_testing.h"

namespace
{
static float value(unsigned i)
{
    return (float)((i * 29 + i / 7) % 53) - 26;
}

template <unsigned n> struct numbers {
    float v[n];
    numbers()
    {
        for (unsigned i = 0; i < n; i++)
            v[i] = value(i);
    }
};

/* NaN equals nothing. */
static bool equal(const float *a, const float *b, unsigned n)
{
    bool same = true;
    for (unsigned i = 0; i < n; i++)
        same &= a[i] == b[i];
    return same;
}

/* ---- barriers -------------------------------------------------------------------------------- */

template <int fault> static bool run_tiles()
{
    numbers<PB_TILES * PB_THREADS> in;
    float found[PB_THREADS], want[PB_THREADS];
    for (unsigned t = 0; t < PB_THREADS; t++) {
        want[t] = 0;
        for (unsigned i = 0; i < PB_TILES; i++)
            want[t] += in.v[i * PB_THREADS + (t + 77) % PB_THREADS];
    }
    device_array<float> x(PB_TILES * PB_THREADS, in.v), y(PB_THREADS);
    SHIM_RUN(y, pb_tiles<fault>, 1, PB_THREADS, sizeof(pb_shared), x.p, y.p);
    y.get(found);
    return equal(found, want, PB_THREADS);
}

template <bool fault> static bool run_tree()
{
    numbers<PB_THREADS> in;
    float found, want = 0;
    for (float v : in.v)
        want += v;
    device_array<float> x(PB_THREADS, in.v), y(1);
    SHIM_RUN(y, pb_tree<fault>, 1, PB_THREADS, sizeof(pb_shared), x.p, y.p);
    y.get(&found);
    return equal(&found, &want, 1);
}

template <bool fault> static bool run_fragments()
{
    numbers<128> in;
    float found[128];
    device_array<float> x(128, in.v), y(128);
    SHIM_RUN(y, pb_fragments<fault>, 1, 32, sizeof(pb_rows), x.p, y.p);
    y.get(found);
    return equal(found, in.v, 128);
}

template <bool fault> static bool run_divergent()
{
    numbers<PB_THREADS> in;
    float found[PB_THREADS], want[PB_THREADS];
    for (unsigned t = 0; t < PB_THREADS; t++)
        want[t] = in.v[PB_THREADS - 1 - t];
    device_array<float> x(PB_THREADS, in.v), y(PB_THREADS);
    SHIM_RUN(y, pb_divergent<fault>, 1, PB_THREADS, sizeof(pb_shared), x.p, y.p);
    y.get(found);
    return equal(found, want, PB_THREADS);
}

/* ---- tiles ----------------------------------------------------------------------------------- */

/* n: of a whole number of 256 bytes, so that the end is at the guard page, or not */
template <int fault, unsigned n> static bool run_double()
{
    numbers<n> in;
    float found[n], want[n];
    for (unsigned i = 0; i < n; i++)
        want[i] = 2 * in.v[i];
    device_array<float> x(n, in.v), y(n);
    SHIM_RUN(y, pt_double<fault>, n / 64 + 1, 64, 0, x.p, y.p, n);
    y.get(found);
    return equal(found, want, n);
}

template <int fault> static bool run_columns()
{
    enum { ROWS = 21 };
    numbers<ROWS * 32> in;
    float found[32], want[32] = {};
    for (unsigned i = 0; i < ROWS * 32; i++)
        want[i % 32] += in.v[i];
    /* Thread t sums column 31 - t into y[31 - t]. */
    device_array<float> x(ROWS * 32, in.v), y(32);
    SHIM_RUN(y, pt_columns<fault>, 1, 32, sizeof(pt_shared), x.p, y.p, (unsigned)ROWS);
    y.get(found);
    return equal(found, want, 32);
}

template <bool fault, bool stream> static bool run_vector()
{
    numbers<132> in;
    float found[32], want[32];
    for (unsigned t = 0; t < 32; t++)
        want[t] = in.v[4 * t] + in.v[4 * t + 1] + in.v[4 * t + 2] + in.v[4 * t + 3];
    device_array<float> x(132, in.v), y(32);
    if (stream)
        SHIM_RUN(y, pt_stream<fault>, 1, 32, 0, x.p, y.p);
    else
        SHIM_RUN(y, pt_vector<fault>, 1, 32, 0, x.p, y.p);
    y.get(found);
    return equal(found, want, 32);
}

/* ---- fragments and copies -------------------------------------------------------------------- */

template <int fault> static bool run_16816()
{
    numbers<256> a;
    numbers<128> b;
    float found[128], want[128];
    for (unsigned i = 0; i < 128; i++) {
        want[i] = 0;
        for (unsigned k = 0; k < 16; k++)
            want[i] += a.v[i / 8 * 16 + k] * b.v[k * 8 + i % 8];
    }
    device_array<float> da(256, a.v), db(128, b.v), d(128);
    SHIM_RUN(d, pf_16816<fault>, 1, 32, 0, da.p, db.p, d.p);
    d.get(found);
    return equal(found, want, 128);
}

template <int fault> static bool run_884()
{
    numbers<128> a, b;
    float found[256], want[256];
    for (unsigned i = 0; i < 256; i++) {
        want[i] = 0;
        for (unsigned k = 0; k < 4; k++)
            want[i] += a.v[i / 64 * 32 + i % 64 / 8 * 4 + k] * b.v[i / 64 * 32 + k * 8 + i % 8];
    }
    device_array<float> da(128, a.v), db(128, b.v), d(256);
    SHIM_RUN(d, pf_884<fault>, 1, 32, 0, da.p, db.p, d.p);
    d.get(found);
    return equal(found, want, 256);
}

template <int fault> static bool run_pipeline()
{
    numbers<64 * 64> in;
    float found[64], want[64] = {};
    for (unsigned i = 0; i < 64 * 64; i++)
        want[i % 64] += in.v[i];
    device_array<float> x(64 * 64, in.v), y(64);
    SHIM_RUN(y, pf_pipeline<fault>, 1, 64, sizeof(pf_ring), x.p, y.p);
    y.get(found);
    return equal(found, want, 64);
}

template <int fault, bool zeros> static bool run_reuse()
{
    numbers<64> in;
    float found[64], want[64];
    for (unsigned i = 0; i < 64; i++)
        want[i] = in.v[i ^ 1];
    device_array<float> x(64, in.v), y(64);
    SHIM_RUN(y, (pf_reuse<fault, zeros>), 1, 64, sizeof(pf_ring), x.p, y.p);
    y.get(found);
    return equal(found, want, 64);
}

/* ---- streams --------------------------------------------------------------------------------- */

/* Copies numbers in, doubles them and copies them out through pinned memory, in two rounds. fault
 * 1: the host does not wait before it reads; 2: the second stream does not wait for the first; 3:
 * the host fills the buffer again while it may still be read. */
template <int fault> static bool run_streams()
{
    enum { N = 64 };
    cudaStream_t in, out;
    cudaEvent_t filled, taken;
    float *host, *back;
    bool right = true;
    CUDA_OK(cudaStreamCreate(&in));
    CUDA_OK(cudaStreamCreate(&out));
    CUDA_OK(cudaEventCreateWithFlags(&filled, cudaEventDisableTiming));
    CUDA_OK(cudaEventCreateWithFlags(&taken, cudaEventDisableTiming));
    CUDA_OK(cudaHostAlloc((void **)&host, N * sizeof(float), 0));
    CUDA_OK(cudaHostAlloc((void **)&back, 2 * N * sizeof(float), 0));
    {
        device_array<float> x(2 * N), y(2 * N);
        for (unsigned round = 0; round < 2; round++) {
            float *to = x.p + round * N, *result = y.p + round * N;
            if (round && fault != 3)
                CUDA_OK(cudaEventSynchronize(taken));
            for (unsigned i = 0; i < N; i++)
                host[i] = value(i + round);
            CUDA_OK(cudaMemcpyAsync(to, host, N * sizeof(float), cudaMemcpyHostToDevice, in));
            CUDA_OK(cudaEventRecord(taken, in));
            CUDA_OK(cudaEventRecord(filled, in));
            if (fault != 2)
                CUDA_OK(cudaStreamWaitEvent(out, filled, 0));
            QC_LAUNCH(pt_double<0>, 1, N, 0, out, to, result, (unsigned)N);
            CUDA_OK(cudaGetLastError());
            CUDA_OK(cudaMemcpyAsync(back + round * N, result, N * sizeof(float),
                                    cudaMemcpyDeviceToHost, out));
        }
        if (fault != 1)
            CUDA_OK(cudaStreamSynchronize(out));
        for (unsigned i = 0; i < 2 * N; i++)
            right &= back[i] == 2 * value(i % N + i / N);
        CUDA_OK(cudaDeviceSynchronize());
    }
    CUDA_OK(cudaFreeHost(host));
    CUDA_OK(cudaFreeHost(back));
    CUDA_OK(cudaEventDestroy(filled));
    CUDA_OK(cudaEventDestroy(taken));
    CUDA_OK(cudaStreamDestroy(in));
    CUDA_OK(cudaStreamDestroy(out));
    return right;
}

/* ---- kernels that overlap -------------------------------------------------------------------- */

template <int fault> static void step(cudaStream_t s, const float *x, float *y)
{
    qc_error err = {};
    const po_args a = {x, y};
    if (qc_cuda_launch_overlapping(po_step<fault>, PO_BLOCKS, PO_THREADS, sizeof(po_shared), s,
                                   true, "po_step", &err, a) != QC_OK)
        fail_msg("%s", err.msg);
}

/* A chain of four kernels. The third has the fault; 5: it reads what the first has written, and
 * the second waits as it should; 6: the kernels' code is of compute_80. */
template <int fault, bool graph = false> static bool run_overlap()
{
    constexpr int kernel = fault == 5 ? 1 : fault == 6 ? 0 : fault;
    numbers<PO_COUNT> in;
    float found[PO_COUNT], want[PO_COUNT];
    for (unsigned i = 0; i < PO_COUNT; i++)
        want[i] = in.v[i] + (fault == 5 ? 3.0f : 4.0f);
    device_array<float> x(PO_COUNT, in.v), a(PO_COUNT), b(PO_COUNT), c(PO_COUNT), y(PO_COUNT);
    cudaGraph_t made = nullptr;
    cudaGraphExec_t g = nullptr;
    qc_shim_set_code(fault == 6 ? 80 : 0);
    if (graph)
        CUDA_OK(cudaStreamBeginCapture(y.s, cudaStreamCaptureModeThreadLocal));
    step<0>(y.s, x.p, a.p);
    step<0>(y.s, a.p, b.p);
    step<kernel>(y.s, fault == 5 ? a.p : b.p, c.p);
    step<0>(y.s, c.p, y.p);
    if (graph) {
        CUDA_OK(cudaStreamEndCapture(y.s, &made));
        CUDA_OK(cudaGraphInstantiateWithFlags(&g, made, 0));
        CUDA_OK(cudaGraphDestroy(made));
        CUDA_OK(cudaGraphLaunch(g, y.s));
    }
    y.get(found);
    if (graph)
        CUDA_OK(cudaGraphExecDestroy(g));
    return equal(found, want, PO_COUNT);
}

/* ---- what runs on its own -------------------------------------------------------------------- */

template <pa_fault fault> static bool run_ring()
{
    numbers<PA_STEPS *(PA_A + PA_B)> in;
    float found[64 * PA_WIDTH], want[64 * PA_WIDTH] = {};
    pa_stage stages[PA_STEPS];
    for (unsigned step = 0; step < PA_STEPS; step++) {
        const float *a = in.v + step * (PA_A + PA_B), *b = a + PA_A;
        for (unsigned i = 0; i < PA_A; i++)
            stages[step].a[i] = qc_half_of_float(a[i]);
        for (unsigned i = 0; i < PA_B; i++) {
            unsigned k = i / PA_WIDTH, j = i % PA_WIDTH;
            stages[step].b[(k / 8 * 2 + j / 8) * 64 + j % 8 * 8 + k % 8] = qc_half_of_float(b[i]);
        }
        for (unsigned i = 0; i < 64 * PA_WIDTH; i++)
            for (unsigned k = 0; k < 16; k++)
                want[i] += a[i / PA_WIDTH * 16 + k] * b[k * PA_WIDTH + i % PA_WIDTH];
    }
    device_array<pa_stage> from(PA_STEPS, stages);
    device_array<float> d(64 * PA_WIDTH);
    SHIM_RUN(d, pa_ring<fault>, 1, PA_THREADS, sizeof(pa_ring_shared), from.p, d.p);
    d.get(found);
    return equal(found, want, 64 * PA_WIDTH);
}

template <int fault> static bool run_copied()
{
    uint32_t in[PA_ROUNDS * 512], found[PA_ROUNDS * 128];
    bool right = true;
    for (uint32_t i = 0; i < PA_ROUNDS * 512; i++)
        in[i] = 3 * i;
    device_array<uint32_t> from(PA_ROUNDS * 512, in), out(PA_ROUNDS * 128);
    SHIM_RUN(out, pa_copied<fault>, 1, 256, sizeof(pa_copied_shared), from.p, out.p);
    out.get(found);
    for (unsigned i = 0; i < PA_ROUNDS * 128; i++)
        right &= found[i] == in[(i / 128 * 128 + (i % 128 ^ 77)) * 4 + i % 4];
    return right;
}

template <bool early> static bool run_early_load()
{
    qc_error err = {};
    numbers<PA_B> in;
    float found[PA_B], want[PA_B];
    for (unsigned i = 0; i < PA_B; i++)
        want[i] = 4 * in.v[i];
    device_array<float> x(PA_B, in.v), y(PA_B), z(PA_B);
    if (qc_cuda_launch_overlapping(pa_step<false>, 1, 32, sizeof(pa_step_shared), z.s, true,
                                   "pa_step", &err, pa_step_args{x.p, y.p}) != QC_OK ||
        qc_cuda_launch_overlapping(pa_step<early>, 1, 32, sizeof(pa_step_shared), z.s, true,
                                   "pa_step", &err, pa_step_args{y.p, z.p}) != QC_OK)
        fail_msg("%s", err.msg);
    z.get(found);
    return equal(found, want, PA_B);
}

/* ---- all of them ----------------------------------------------------------------------------- */

static const struct planted {
    const char *name;
    bool (*twin)();
    bool (*fault)();
    const char *words; /* of the message; NULL: found by its result */
} all[] = {
    {"no barrier before reading", run_tiles<0>, run_tiles<1>, NULL},
    {"no barrier before overwriting", run_tiles<0>, run_tiles<2>, NULL},
    {"no __syncwarp in a tree", run_tree<false>, run_tree<true>, NULL},
    {"no __syncwarp before ldmatrix", run_fragments<false>, run_fragments<true>, NULL},
    {"a barrier for some", run_divergent<false>, run_divergent<true>, "kernel pb_divergent"},
    {"writes one too many, page", run_double<0, 128>, run_double<1, 128>,
     "0 bytes past the end of allocation"},
    {"writes one too many, slack", run_double<0, 100>, run_double<1, 100>,
     "the byte 0 past the end of allocation"},
    {"misses the last", run_double<0, 100>, run_double<2, 100>, NULL},
    {"reads one too many, page", run_double<0, 128>, run_double<3, 128>,
     "0 bytes past the end of allocation"},
    {"reads one too many, slack", run_double<0, 100>, run_double<3, 100>, NULL},
    {"a row too many", run_columns<0>, run_columns<1>, "an index out of its array's bounds"},
    {"a row too few", run_columns<0>, run_columns<2>, NULL},
    {"misaligned float4", run_vector<false, false>, run_vector<true, false>, "misaligned"},
    {"misaligned streaming load", run_vector<false, true>, run_vector<true, true>,
     "16-byte load from"},
    {"m16n8k16: B in the wrong lanes", run_16816<0>, run_16816<1>, NULL},
    {"m16n8k16: registers of A swapped", run_16816<0>, run_16816<2>, NULL},
    {"m16n8k16: rows of D swapped", run_16816<0>, run_16816<3>, NULL},
    {"m8n8k4: wrong quad pairs", run_884<0>, run_884<1>, NULL},
    {"m8n8k4: halves of D swapped", run_884<0>, run_884<2>, NULL},
    {"cp.async: no wait", run_pipeline<0>, run_pipeline<1>, NULL},
    {"cp.async: waits for too few", run_pipeline<0>, run_pipeline<2>, NULL},
    {"cp.async: no barrier behind the wait", run_pipeline<0>, run_pipeline<3>, NULL},
    {"cp.async: stage filled too early", run_pipeline<0>, run_pipeline<4>, NULL},
    {"cp.async: not committed", run_pipeline<0>, run_pipeline<5>, NULL},
    {"cp.async: its place reused", run_reuse<0, false>, run_reuse<1, false>,
     "was written while a cp.async to it was under way"},
    {"cp.async: the place of its zeros reused", run_reuse<0, true>, run_reuse<1, true>,
     "was written while a cp.async to it was under way"},
    {"cp.async: reused, not committed", run_reuse<0, true>, run_reuse<2, true>,
     "was written while a cp.async to it was under way"},
    {"overlap: reads before the wait", run_overlap<0>, run_overlap<1>, NULL},
    {"overlap: writes before the wait", run_overlap<0>, run_overlap<2>, "before qc_grid_wait"},
    {"overlap: a warp does not wait", run_overlap<0>, run_overlap<3>,
     "a thread ends without qc_grid_wait"},
    {"overlap: reads early into shared memory", run_overlap<0>, run_overlap<4>, NULL},
    {"overlap: in a graph", run_overlap<0, true>, run_overlap<1, true>, NULL},
    {"overlap: the last but one kernel's output", run_overlap<0>, run_overlap<5>, NULL},
    {"overlap: code without the wait", run_overlap<0>, run_overlap<6>, "before qc_grid_wait"},
    {"async: no wait for a load", run_ring<PA_RIGHT>, run_ring<PA_NO_FULL_WAIT>,
     "more arrivals at the mbarrier"},
    {"async: the wrong parity", run_ring<PA_RIGHT>, run_ring<PA_WRONG_PARITY>,
     "B was written while a product"},
    {"async: no wait for an empty stage", run_ring<PA_RIGHT>, run_ring<PA_NO_EMPTY_WAIT>,
     "more arrivals at the mbarrier"},
    {"async: a stage given back too early", run_ring<PA_RIGHT>, run_ring<PA_EARLY_RELEASE>,
     "B was written while a product"},
    {"async: a warp gives nothing back", run_ring<PA_RIGHT>, run_ring<PA_NO_RELEASE>,
     "threads wait for each other for ever: "},
    {"async: A's registers used again", run_ring<PA_RIGHT>, run_ring<PA_ONE_A>,
     "wrote to A before"},
    {"async: D read too early", run_ring<PA_RIGHT>, run_ring<PA_D_READ>, NULL},
    {"async: D written too early", run_ring<PA_RIGHT>, run_ring<PA_D_WRITTEN>, "wrote to D before"},
    {"async: no wait for a product", run_ring<PA_RIGHT>, run_ring<PA_NO_WAIT>,
     "has not waited for a product"},
    {"async: a product not committed", run_ring<PA_RIGHT>, run_ring<PA_NO_COMMIT>,
     "has not waited for a product"},
    {"async: no fence", run_ring<PA_RIGHT>, run_ring<PA_NO_FENCE>, "without a wgmma.fence"},
    {"async: warps in another order", run_ring<PA_RIGHT>, run_ring<PA_OTHER_ORDER>,
     "the warps of a warpgroup do not do the same"},
    {"async: a warp without a product", run_ring<PA_RIGHT>, run_ring<PA_ONE_LESS>,
     "the warps of a warpgroup do not do the same"},
    {"async: a lane without a product", run_ring<PA_RIGHT>, run_ring<PA_LANE_LESS>,
     "lanes of one mask at different places"},
    {"async: too few bytes announced", run_ring<PA_RIGHT>, run_ring<PA_TOO_FEW_BYTES>,
     "16 bytes more than were announced"},
    {"async: too many bytes announced", run_ring<PA_RIGHT>, run_ring<PA_TOO_MANY_BYTES>,
     "which lacks 0 arrivals and 16 bytes"},
    {"async: barriers not ready", run_ring<PA_RIGHT>, run_ring<PA_NOT_READY>, "but not ready"},
    {"async: barriers used too early", run_ring<PA_RIGHT>, run_ring<PA_NO_INIT_BARRIER>,
     "was not initialized"},
    {"async: threads write B", run_ring<PA_RIGHT>, run_ring<PA_COPIED_B>, "threads wrote to B"},
    {"async: a barrier overwritten", run_ring<PA_RIGHT>, run_ring<PA_OVERWRITTEN>,
     "was overwritten"},
    {"async: arrives without its cp.async", run_copied<0>, run_copied<1>, NULL},
    {"async: arrives before its cp.async", run_copied<0>, run_copied<2>,
     "was written while a cp.async to it was under way"},
    {"async: other registers", run_copied<0>, run_copied<3>,
     "the warps of a warpgroup do not do the same: setmaxnreg.dec"},
    {"async: copies to a place not read yet", run_copied<0>, run_copied<4>,
     "was written while a cp.async to it was under way"},
    {"async: loads before qc_grid_wait", run_early_load<false>, run_early_load<true>,
     "the source of a bulk load"},
    {"the host does not wait", run_streams<0>, run_streams<1>, NULL},
    {"a stream does not wait", run_streams<0>, run_streams<2>, NULL},
    {"a buffer filled too early", run_streams<0>, run_streams<3>, NULL},
};

static const char *const stream_modes[] = {"lazy", "eager", "shuffle:1", "shuffle:2"};

static void test_planted(void **)
{
    for (const planted &p : all) {
        unsigned found = 0, runs = 0;
        char text[4096] = "";
        for (const char *order : shim_orders)
            for (const char *mode : stream_modes) {
                /* Streams matter to one kind only. */
                if (p.twin != run_streams<0> && mode != stream_modes[0])
                    continue;
                qc_shim_set_order(order);
                qc_shim_set_streams(mode);
                if (!p.twin())
                    fail_msg("%s: the twin is wrong (%s, %s)", p.name, order, mode);
                shim_end end = shim_in_child(p.fault, text, sizeof(text));
                runs++;
                found += end != SHIM_RIGHT;
                if (end == SHIM_FAULT && shim_own_words && (!p.words || !strstr(text, p.words)))
                    fail_msg("%s: unexpected: %s", p.name, text);
                if (end == SHIM_WRONG && p.words)
                    fail_msg("%s: a wrong result; expected: %s", p.name, p.words);
            }
        print_message("%-40s found in %u of %u orders\n", p.name, found, runs);
        if (!found)
            fail_msg("%s: not found", p.name);
    }
    qc_shim_set_streams("lazy");
}
} // namespace

int main()
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_planted)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
