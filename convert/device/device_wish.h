/* Which devices the user wishes for: the value of --device or, where that is not given, of
 * QCONV_DEVICE.
 *
 *   auto           GPUs if there are any that can do the work, else the CPU
 *   cpu            the CPU; the driver is not even asked
 *   cuda           every GPU
 *   cuda:0,2       GPUs 0 and 2, as CUDA programs count them; "cuda:0,cuda:2" is the same
 *
 * Thread-safe: yes. */
#ifndef QC_CONVERT_DEVICE_WISH_H
#define QC_CONVERT_DEVICE_WISH_H

#include "base/status.h"

#define QC_MAX_GPUS 64u

typedef struct {
    int cpu, cuda;    /* the one alone; neither: auto */
    uint64_t gpus;    /* for CUDA: bit i is set if cuda:i is named; 0: all GPUs */
    const char *from; /* "--device " or "QCONV_DEVICE=", for messages; "" where neither is given */
    const char *text; /* the value, borrowed; "" where neither is given */
} qc_device_wish;

/* option: the value of --device. If it is NULL or "", QCONV_DEVICE counts, and without that auto.
 * QC_ERR_USAGE for a value that cannot be read; QC_ERR_DEVICE for an index that no machine has. */
QC_NODISCARD qc_status qc_device_wish_read(qc_device_wish *out, const char *option, qc_error *err);

#endif
