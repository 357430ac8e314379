/* Devices, memory, copies, streams, events and graphs of kernels/cuda_device.h, and which GPUs a
 * build has code for. */
#include "tests/fixtures/quant_device_fixture.h"

#include "kernels/cuda_internal.h"

#ifdef QC_CUDA_SHIM
#include <cuda_runtime_api.h>
#include <shim_control.h>
#endif

#define BYTES ((size_t)100003)

static void fill_pattern(unsigned char *p, size_t n, unsigned seed)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (unsigned char)((i * 2654435761u + seed) >> 7);
}

TEST(test_code_of_a_build)
{
    static const struct {
        const char *code;
        unsigned sm;
        int runs;
    } cases[] = {
        {"70-real 80-real", 70, 1},
        {"70-real 80-real", 75, 1}, /* the same generation, later */
        {"70-real 80-real", 86, 1},
        {"86-real 70-real", 80, 0}, /* the same generation, earlier */
        {"75-real 80-real", 70, 0},
        {"80-real 86-real", 90, 0},
        {"100-real", 103, 1},
        {"100-real", 120, 0},
        {"90-virtual", 90, 1},
        {"90-virtual", 100, 1},
        {"90-virtual", 89, 0},
        {"75-real 90-virtual", 120, 1},
        {"90", 90, 1},
        {"90", 100, 1},
        {"90", 80, 0},
        {"90a-real", 90, 1},
        {"90a-real", 91, 0},
        {"90a-virtual", 100, 0},
        {"120f", 120, 1},
        {"120f", 121, 1},
        {"100f-real", 103, 1},
        {"103f", 100, 0},
        {"100f-virtual", 110, 0},
        {"100-real 120-real 90-virtual", 100, 1},
        {"100-real 120-real 90-virtual", 103, 1}, /* B300 */
        {"100-real 120-real 90-virtual", 110, 1}, /* Jetson Thor: by PTX */
        {"100-real 120-real 90-virtual", 121, 1}, /* GB10 */
        {"100-real 120-real 120-virtual", 110, 0},
        {"", 80, 0},
        {"  ", 80, 0},
        {"all", 80, 0},
        {"80-bogus", 80, 0},
        {"80-rea", 80, 0},
        {"80-", 80, 0},
        {"-real 80-real", 80, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        QT_CHECK(qc_cuda_code_runs(cases[i].code, cases[i].sm) == cases[i].runs, "'%s' on sm_%u",
                 cases[i].code, cases[i].sm);
}

/* Shared memory of a multiprocessor for the blocks that a kernel wants, on the cards there are. */
TEST(test_carve_out)
{
    enum { V100 = 96, T4 = 64, A100 = 164, A10 = 100, H100 = 228 };
    static const struct {
        uint64_t block, reserved;
        unsigned blocks, all_kb, percent;
    } cases[] = {
        {37 << 10, 1024, 3, A100, 70}, /* GEMV, one row of x, NF4: 3 x 38 KB */
        {37 << 10, 1024, 3, H100, 50}, {37 << 10, 1024, 3, A10, 76}, /* two fit */
        {37 << 10, 0, 3, V100, 78},                                  /* likewise */
        {37 << 10, 0, 3, T4, 0},                                     /* one */
        {65 << 10, 1024, 2, H100, 58}, {83046, 1024, 2, H100, 73},   /* the general kernel, 16 rows,
                                                                        NF4 */
        {83046, 1024, 2, A100, 0},     {54272, 1024, 4, H100, 95},   /* a panel of error feedback */
        {54272, 1024, 4, A10, 0},      {32 << 10, 0, 2, T4, 100},    {32769, 0, 2, T4, 0},
        {1 << 20, 1024, 2, H100, 0},   {0, 1024, 2, H100, 1},        {0, 0, 2, H100, 0},
        {1024, 1024, 1, H100, 0},      {1024, 1024, 0, H100, 0},     {1024, 1024, 2, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        QT_CHECK(qc_cuda_carve_percent(cases[i].block, cases[i].reserved, cases[i].blocks,
                                       (uint64_t)cases[i].all_kb << 10) == cases[i].percent,
                 "%" PRIu64 " bytes, %u blocks, %u KB: not %u %%", cases[i].block, cases[i].blocks,
                 cases[i].all_kb, cases[i].percent);
}

TEST(test_facts)
{
    const qc_cuda_device *d = &qd.device;
    uint64_t free_bytes = 0, total_bytes = 0;
    assert_int_equal(d->index, 0);
    assert_true(strlen(d->name) > 2 && strlen(d->pci) >= 7);
    assert_true(d->sm >= 70 && d->sm < 1000);
    assert_true(d->code >= 60 && d->code <= d->sm);
    assert_true(d->multiprocessors > 0 && d->warps_multiprocessor >= 32);
    assert_true(d->shared_block_bytes >= 48u << 10);
    assert_true(d->shared_multiprocessor_bytes >= d->shared_block_bytes);
    assert_true(d->driver_version >= 11000 && d->runtime_version >= 11000);
    assert_non_null(strstr(qc_cuda_build(), " "));
    QD_OK(qc_cuda_memory(&free_bytes, &total_bytes, &qd.err));
    assert_true(free_bytes > 0 && free_bytes <= total_bytes);
    assert_true(total_bytes <= d->memory_bytes);
    for (const char *c = d->pci; *c; c++)
        assert_true((*c >= '0' && *c <= '9') || (*c >= 'a' && *c <= 'f') || *c == ':' || *c == '.');
}

TEST(test_no_such_device)
{
    qc_cuda_device d;
    qc_error err = {0};
    int count = 0;
    qc_cuda_device_count(&count, NULL, 0);
    assert_true(count >= 1);
    assert_int_equal(qc_cuda_device_open(&d, -1, &err), QC_ERR_DEVICE);
    assert_int_equal(qc_cuda_device_open(&d, count, &err), QC_ERR_DEVICE);
    assert_non_null(strstr(err.msg, "there is no cuda:"));
    d = qd.device;
    d.index = count;
    assert_int_equal(qc_cuda_use(&d, &err), QC_ERR_DEVICE);
    QD_OK(qc_cuda_use(&qd.device, &qd.err));
}

/* Host to device, over the device, and back; each byte arrives, and none beside. */
TEST(test_copies)
{
    void *a = NULL, *b = NULL, *up = NULL, *down = NULL;
    QD_OK(qc_cuda_malloc(&a, BYTES, &qd.err));
    QD_OK(qc_cuda_malloc(&b, BYTES + 8, &qd.err));
    QD_OK(qc_cuda_host_malloc(&up, BYTES, &qd.err));
    QD_OK(qc_cuda_host_malloc(&down, BYTES + 8, &qd.err));
    assert_int_equal((uintptr_t)a % 256, 0);
    fill_pattern(up, BYTES, 1);
    memset(down, 0, BYTES + 8);
    QD_OK(qc_cuda_to_device(a, up, BYTES, qd.stream, &qd.err));
    QD_OK(qc_cuda_fill(b, 0x5a, BYTES + 8, qd.stream, &qd.err));
    QD_OK(qc_cuda_copy((unsigned char *)b + 3, a, BYTES, qd.stream, &qd.err));
    QD_OK(qc_cuda_to_host(down, b, BYTES + 8, qd.stream, &qd.err));
    QD_OK(qc_cuda_stream_synchronize(qd.stream, &qd.err));
    const unsigned char *got = down;
    assert_memory_equal(got + 3, up, BYTES);
    for (size_t i = 0; i < 8; i++)
        assert_int_equal(got[i < 3 ? i : BYTES + i], 0x5a);
    qc_cuda_host_free(down);
    qc_cuda_host_free(up);
    qc_cuda_free(b);
    qc_cuda_free(a);
}

TEST(test_nothing)
{
    void *p = &p;
    QD_OK(qc_cuda_malloc(&p, 0, &qd.err));
    assert_null(p);
    p = &p;
    QD_OK(qc_cuda_host_malloc(&p, 0, &qd.err));
    assert_null(p);
    QD_OK(qc_cuda_to_device(NULL, NULL, 0, qd.stream, &qd.err));
    QD_OK(qc_cuda_to_host(NULL, NULL, 0, qd.stream, &qd.err));
    QD_OK(qc_cuda_copy(NULL, NULL, 0, qd.stream, &qd.err));
    QD_OK(qc_cuda_fill(NULL, 1, 0, qd.stream, &qd.err));
    qc_cuda_free(NULL);
    qc_cuda_host_free(NULL);
    qc_cuda_stream_destroy(NULL);
    qc_cuda_event_destroy(NULL);
    qc_cuda_graph_destroy(NULL);
}

/* More than there is: a status of its own, and what comes next is not blamed for it. */
TEST(test_out_of_memory)
{
    void *p = &p;
    qc_error err = {0};
    assert_int_equal(qc_cuda_malloc(&p, (size_t)1 << 50, &err), QC_ERR_NOMEM);
    assert_null(p);
    assert_non_null(strstr(err.msg, "1125899906842624 bytes of device memory"));
    QD_OK(qc_cuda_malloc(&p, 256, &qd.err));
    QD_OK(qc_cuda_fill(p, 0, 256, qd.stream, &qd.err));
    QD_OK(qc_cuda_stream_synchronize(qd.stream, &qd.err));
    qc_cuda_free(p);
#ifdef QC_CUDA_SHIM
    qc_shim_fail_malloc(1);
    assert_int_equal(qc_cuda_host_malloc(&p, 256, &err), QC_ERR_NOMEM);
    assert_null(p);
    assert_non_null(strstr(err.msg, "256 bytes of pinned memory"));
#endif
}

/* A second stream reads what the first wrote, once it has waited for its event. */
TEST(test_events)
{
    void *p = NULL, *host = NULL;
    qc_cuda_stream other = NULL;
    qc_cuda_event begin = NULL, end = NULL, ready = NULL;
    double ms = -1;
    QD_OK(qc_cuda_malloc(&p, BYTES, &qd.err));
    QD_OK(qc_cuda_host_malloc(&host, BYTES, &qd.err));
    QD_OK(qc_cuda_stream_create(&other, &qd.err));
    QD_OK(qc_cuda_event_create(&begin, 1, &qd.err));
    QD_OK(qc_cuda_event_create(&end, 1, &qd.err));
    QD_OK(qc_cuda_event_create(&ready, 0, &qd.err));
    memset(host, 0, BYTES);
    QD_OK(qc_cuda_event_record(begin, qd.stream, &qd.err));
    QD_OK(qc_cuda_fill(p, 0x11, BYTES, qd.stream, &qd.err));
    QD_OK(qc_cuda_fill(p, 0x22, BYTES, qd.stream, &qd.err));
    QD_OK(qc_cuda_event_record(end, qd.stream, &qd.err));
    QD_OK(qc_cuda_event_record(ready, qd.stream, &qd.err));
    QD_OK(qc_cuda_stream_wait(other, ready, &qd.err));
    QD_OK(qc_cuda_to_host(host, p, BYTES, other, &qd.err));
    QD_OK(qc_cuda_stream_synchronize(other, &qd.err));
    for (size_t i = 0; i < BYTES; i++)
        assert_int_equal(((unsigned char *)host)[i], 0x22);
    QD_OK(qc_cuda_event_synchronize(end, &qd.err));
    QD_OK(qc_cuda_event_elapsed(&ms, begin, end, &qd.err));
    assert_true(ms >= 0 && ms < 60000);
    /* An event without a time has none. */
    assert_int_not_equal(qc_cuda_event_elapsed(&ms, ready, ready, &qd.err), QC_OK);
    qc_cuda_event_destroy(ready);
    qc_cuda_event_destroy(end);
    qc_cuda_event_destroy(begin);
    qc_cuda_stream_destroy(other);
    qc_cuda_host_free(host);
    qc_cuda_free(p);
}

/* Nothing runs while it is captured; each launch of the graph runs all of it. */
TEST(test_graphs)
{
    void *a = NULL, *b = NULL, *host = NULL;
    qc_cuda_graph graph = NULL;
    QD_OK(qc_cuda_malloc(&a, 64, &qd.err));
    QD_OK(qc_cuda_malloc(&b, 64, &qd.err));
    QD_OK(qc_cuda_host_malloc(&host, 64, &qd.err));
    unsigned char *h = host;
    QD_OK(qc_cuda_fill(a, 1, 64, qd.stream, &qd.err));
    QD_OK(qc_cuda_fill(b, 2, 64, qd.stream, &qd.err));
    QD_OK(qc_cuda_stream_synchronize(qd.stream, &qd.err));
    QD_OK(qc_cuda_capture_begin(qd.stream, &qd.err));
    QD_OK(qc_cuda_copy(b, a, 64, qd.stream, &qd.err));
    QD_OK(qc_cuda_fill(a, 3, 64, qd.stream, &qd.err));
    QD_OK(qc_cuda_capture_end(&graph, qd.stream, &qd.err));
    static const unsigned char wanted[] = {2, 1, 3}; /* b before, after one launch, after two */
    for (unsigned i = 0; i < 3; i++) {
        if (i > 0)
            QD_OK(qc_cuda_graph_launch(graph, qd.stream, &qd.err));
        QD_OK(qc_cuda_to_host(h, b, 64, qd.stream, &qd.err));
        QD_OK(qc_cuda_stream_synchronize(qd.stream, &qd.err));
        assert_int_equal(h[0], wanted[i]);
        assert_int_equal(h[63], wanted[i]);
    }
    qc_cuda_graph_destroy(graph);
    qc_cuda_host_free(host);
    qc_cuda_free(b);
    qc_cuda_free(a);
}

#ifdef QC_CUDA_SHIM
static void count_says(const char *devices, const char *words)
{
    int count = -1;
    char why[256] = "";
    qc_cuda_device d;
    qc_error err = {0};
    qc_shim_set_devices(devices);
    qc_cuda_device_count(&count, why, sizeof why);
    assert_int_equal(count, 0);
    assert_string_equal(why, words);
    assert_int_equal(qc_cuda_device_open(&d, 0, &err), QC_ERR_DEVICE);
    assert_non_null(strstr(err.msg, words));
    memset(&err, 0, sizeof err);
    assert_int_equal(qc_cuda_usable(&err), QC_ERR_DEVICE);
    assert_non_null(strstr(err.msg, words));
}

TEST(test_no_devices)
{
    qd_end();
    count_says("none", "the NVIDIA driver shows no GPU");
    count_says("nodriver", "the NVIDIA driver was not found");
    count_says("olddriver",
               "the NVIDIA driver is too old: it has CUDA 10.2, but this build needs 13.0; install "
               "a newer driver");
    qc_shim_set_devices("sm_70:80:1GiB,sm_86:84:2GiB");
    int count = 0;
    qc_cuda_device_count(&count, NULL, 0);
    assert_int_equal(count, 2);
    qc_cuda_device d;
    QD_OK(qc_cuda_usable(&qd.err));
    assert_int_equal(qc_cuda_device_open(NULL, 1, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_cuda_use(NULL, NULL), QC_ERR_USAGE);
    QD_OK(qc_cuda_device_open(&d, 1, &qd.err));
    assert_int_equal(d.sm, 86);
    assert_int_equal(d.multiprocessors, 84);
    assert_int_equal(d.memory_bytes, (uint64_t)2 << 30);
    assert_int_equal(d.code, 86);
    qc_shim_set_code(80);
    QD_OK(qc_cuda_device_open(&d, 1, &qd.err));
    assert_int_equal(d.code, 80);
    qc_shim_set_code(0);
    int now = -1;
    assert_int_equal(cudaGetDevice(&now), cudaSuccess);
    assert_int_equal(now, 0); /* opening another device does not make it the current one */
    qd_start();
}
#endif

int main(void)
{
    qd_start();
    int failed = test_run_all(NULL);
    qd_end();
    return failed;
}
