/* Kernels that do nothing. They show what a launch costs, and what lies between one kernel and the
 * next. */
#include "bench/ceilings_ptx.cuh"

namespace
{
const char WHAT[] = "ceilings_launch";

template <bool early> __global__ void __launch_bounds__(1024) nothing(uint64_t *ns)
{
    if (early) {
        qc_ceiling_next_may_begin();
        qc_ceiling_wait_previous();
    }
    if (ns && blockIdx.x == 0 && threadIdx.x == 0) {
        ns[0] = qc_ceiling_ns();
        ns[1] = qc_ceiling_ns();
    }
}
} // namespace

extern "C" qc_status qc_ceiling_nothing(unsigned blocks, unsigned threads, uint64_t *ns, int early,
                                        qc_cuda_stream s, qc_error *err)
{
    if (!early) {
        QC_LAUNCH(nothing<false>, blocks, threads, 0, s, ns);
        return qc_cuda_launched(WHAT, err);
    }
#ifdef QC_CUDA_SHIM
    /* The shim's streams do one thing after another. */
    QC_LAUNCH(nothing<true>, blocks, threads, 0, s, ns);
    return qc_cuda_launched(WHAT, err);
#else
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.stream = s;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return qc_cuda_check(cudaLaunchKernelEx(&config, nothing<true>, ns), WHAT, err);
#endif
}
