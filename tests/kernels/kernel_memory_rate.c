/* What the roof of memory is taken from reads everything, once, and copies every byte. */
#include "tests/fixtures/quant_device_fixture.h"

#include "kernels/cuda_memory_rate.h"

static void check(qt_rng *rng, uint32_t multiprocessors, size_t bytes)
{
    const size_t words = bytes / 4, threads = (size_t)QC_CUDA_READ_SUMS * multiprocessors;
    qc_cuda_device device = qd.device;
    /* A unit more, which must not be read: its sum is not zero. */
    uint32_t *host = qt_alloc(words + 4, 4), *want = qt_alloc(threads, 4);
    char what[100];
    (void)snprintf(what, sizeof what, "%zu bytes, %u multiprocessors", bytes, multiprocessors);
    device.multiprocessors = multiprocessors;
    for (size_t i = 0; i < words; i++) {
        host[i] = (uint32_t)qt_next(rng);
        want[i / 4 % threads] ^= host[i];
    }
    host[words] = 1;
    qd_buffer from = qd_new_from(host, words * 4 + 16, 0), to = qd_new(words * 4, 0);
    qd_buffer sums = qd_new(threads * 4, 0);
    QD_OK(qc_cuda_rate_read(&device, from.p, bytes, sums.p, qd.stream, &qd.err));
    QD_OK(qc_cuda_rate_copy(&device, to.p, from.p, bytes, qd.stream, &qd.err));
    uint32_t *read = qd_take(&sums, what), *copied = qd_take(&to, what);
    qd_same(read, want, threads * 4, what);
    qd_same(copied, host, bytes, what);
    qd_drop(&from);
    free(read);
    free(copied);
    free(want);
    free(host);
}

TEST(bytes_are_read_and_copied)
{
    static const uint32_t multiprocessors[] = {1, 3, 132};
    static const size_t sizes[] = {16, 16 * 127, 16 * 1024, 16 * 8193, 4 << 20};
    qt_rng rng = qt_rng_start("memory rate");
    for (size_t i = 0; i < sizeof multiprocessors / sizeof *multiprocessors; i++)
        for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++)
            check(&rng, multiprocessors[i], sizes[j]);
}

TEST(what_is_refused)
{
    unsigned char *at = (unsigned char *)4096;
    assert_int_equal(qc_cuda_rate_read(&qd.device, at, 24, NULL, qd.stream, &qd.err), QC_ERR_USAGE);
    assert_int_equal(qc_cuda_rate_read(&qd.device, at + 8, 16, NULL, qd.stream, &qd.err),
                     QC_ERR_USAGE);
    assert_int_equal(qc_cuda_rate_copy(&qd.device, at + 4, at, 16, qd.stream, &qd.err),
                     QC_ERR_USAGE);
    assert_string_equal(qd.err.msg, "rate_copy: bytes and addresses are multiples of 16");
}

int main(void)
{
    qd_start();
    const int failed = test_run_all(NULL);
    qd_end();
    return failed != 0;
}
