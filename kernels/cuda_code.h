/* Which GPUs the kernels of a build run on: pure host code, no CUDA needed. */
#ifndef QC_KERNELS_CUDA_CODE_H
#define QC_KERNELS_CUDA_CODE_H

#ifdef __cplusplus
extern "C" {
#endif

/* Returns 1 if the code runs on GPUs of compute capability sm (times ten), else 0; also 0 if the
 * code has an unknown word. code says what was built, as "70-real 80-real 90 90-virtual" (words of
 * CMAKE_CUDA_ARCHITECTURES; one without an ending is both).
 * Machine code (-real) runs on its own generation from its number on: 80 on 80, 86 and 89, not on
 * 75, 90 or 79. PTX (-virtual) runs on its number and everything newer. Endings 'a' and 'f' (90a)
 * are for exactly that chip, in both forms. */
int qc_cuda_code_runs(const char *code, unsigned sm);

#ifdef __cplusplus
}
#endif
#endif
