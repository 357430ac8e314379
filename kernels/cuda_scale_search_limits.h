/* Inside kernels/ only: those numbers of quant/scale_search_internal.h (which is C) that decide
 * what is launched. */
#ifndef QC_KERNELS_CUDA_SCALE_SEARCH_LIMITS_H
#define QC_KERNELS_CUDA_SCALE_SEARCH_LIMITS_H

#include <stdint.h>

#define QC_CUDA_SEARCH_REFITS 8u /* most */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    uint32_t nf4_step_count, refit_count, wide_block;
    uint32_t nf4_window, int8_window, nf4_wide, int8_wide; /* codes; wide: REFIT */
} qc_cuda_search_limits;

qc_cuda_search_limits qc_cuda_search_limits_get(void);

#ifdef __cplusplus
}
#endif
#endif
