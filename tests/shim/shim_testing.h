/* What the tests of the shim itself share: running kernels in every order, and faults in a child
 * process. */
#ifndef QC_SHIM_TESTING_H
#define QC_SHIM_TESTING_H

#include "kernels/cuda_launch.cuh"
#include "kernels/ptx.cuh"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
extern "C" {
#include <cmocka.h>
}
#include <shim_control.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define CUDA_OK(call) assert_int_equal((call), cudaSuccess)

static const char *const shim_orders[] = {"forward",   "reverse",   "shuffle:1",
                                          "shuffle:2", "shuffle:3", "shuffle:4"};

/* Device memory that is filled from the host and read back, each time with a wait. */
template <typename T> struct device_array {
    T *p = nullptr;
    size_t n;
    cudaStream_t s = nullptr;
    explicit device_array(size_t n_, const T *from = nullptr) : n(n_)
    {
        CUDA_OK(cudaMalloc((void **)&p, n * sizeof(T)));
        CUDA_OK(cudaStreamCreate(&s));
        if (from) {
            CUDA_OK(cudaMemcpyAsync(p, from, n * sizeof(T), cudaMemcpyHostToDevice, s));
            CUDA_OK(cudaStreamSynchronize(s));
        }
    }
    device_array(const device_array &) = delete;
    device_array &operator=(const device_array &) = delete;
    ~device_array()
    {
        cudaStreamDestroy(s);
        cudaFree(p);
    }
    /* Reads the array, after all that was given to the device. */
    void get(T *out)
    {
        CUDA_OK(cudaDeviceSynchronize());
        CUDA_OK(cudaMemcpyAsync(out, p, n * sizeof(T), cudaMemcpyDeviceToHost, s));
        CUDA_OK(cudaStreamSynchronize(s));
    }
};

/* A QC_LAUNCH that has to be accepted, on the array's own stream. */
#define SHIM_RUN(array, kernel, grid, block, shared_bytes, ...)                                    \
    do {                                                                                           \
        QC_LAUNCH(kernel, grid, block, shared_bytes, (array).s, __VA_ARGS__);                      \
        CUDA_OK(cudaGetLastError());                                                               \
    } while (0)

enum shim_end { SHIM_RIGHT, SHIM_WRONG, SHIM_FAULT };

/* Calls run() in a child and puts what that writes to stderr into text. SHIM_WRONG means that run()
 * returned false, and SHIM_FAULT that the child ended otherwise than by returning. */
static inline shim_end shim_in_child(bool (*run)(), char *text, size_t bytes)
{
    FILE *file = tmpfile();
    assert_non_null(file);
    fflush(stdout);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(fileno(file), STDERR_FILENO);
        _exit(run() ? 0 : 100);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    rewind(file);
    size_t n = fread(text, 1, bytes - 1, file);
    text[n] = 0;
    fclose(file);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return SHIM_RIGHT;
    return WIFEXITED(status) && WEXITSTATUS(status) == 100 ? SHIM_WRONG : SHIM_FAULT;
}

/* Where the undefined behaviour sanitizer is in, it has words of its own for these faults. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static constexpr bool shim_own_words = false;
#else
static constexpr bool shim_own_words = true;
#endif

/* run() has to end the process with these words. */
static inline void shim_expect_fault(bool (*run)(), const char *words)
{
    char text[4096];
    shim_end end = shim_in_child(run, text, sizeof(text));
    if (end != SHIM_FAULT)
        fail_msg("no fault; expected: %s", words);
    if (shim_own_words && !strstr(text, words))
        fail_msg("expected: %s\nfound: %s", words, text);
}

#endif
