/* The kernel of matmul_tiles.cu for packed weights. It has a file of its own because compilers give
 * the kernels of a file the same constant addresses of shared memory: beside it, those for the
 * file's layout would be others (CUDA 13.0, sm_100 and sm_120). */
#include "kernels/matmul_tiles_kernel.cuh"

extern "C" qc_status qc_tiles_launch_packed(const qc_matmul_call *c, uint32_t count,
                                            qc_cuda_stream s, qc_error *err)
{
    return launch_any<PACKED>(c, count, s, err);
}
