/* The CPU shim: threads, barriers, shuffles, votes, atomics, shared memory, intrinsics. */
#include "kernels/cuda_launch.cuh"
#include "kernels/ptx.cuh"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
extern "C" {
#include <cmocka.h>
}
#include <shim_control.h>

namespace
{
template <typename T> struct device_array {
    T *p = nullptr;
    size_t n;
    explicit device_array(size_t n_) : n(n_)
    {
        assert_int_equal(cudaMalloc((void **)&p, n * sizeof(T)), cudaSuccess);
    }
    ~device_array()
    {
        cudaFree(p);
    }
    void get(T *out, cudaStream_t s)
    {
        assert_int_equal(cudaMemcpyAsync(out, p, n * sizeof(T), cudaMemcpyDeviceToHost, s),
                         cudaSuccess);
        assert_int_equal(cudaStreamSynchronize(s), cudaSuccess);
    }
};

static const char *const orders[] = {"forward", "reverse", "shuffle:1", "shuffle:2"};

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
    cudaStream_t s;
    assert_int_equal(cudaStreamCreate(&s), cudaSuccess);
    for (const char *order : orders) {
        qc_shim_set_order(order);
        device_array<float> x(1024), out(4);
        float host[1024], sums[4];
        for (int i = 0; i < 1024; i++)
            host[i] = (float)(i % 37);
        assert_int_equal(cudaMemcpyAsync(x.p, host, sizeof(host), cudaMemcpyHostToDevice, s),
                         cudaSuccess);
        QC_LAUNCH(sum_kernel, 4, 256, sizeof(sum_shared), s, x.p, out.p);
        assert_int_equal(cudaGetLastError(), cudaSuccess);
        out.get(sums, s);
        for (int b = 0; b < 4; b++) {
            float want = 0;
            for (int i = 0; i < 256; i++)
                want += host[b * 256 + i];
            assert_true(sums[b] == want);
        }
    }
    cudaStreamDestroy(s);
}
} // namespace

int main()
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sum)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
