/* What qconv would choose for a GPU and for a machine, and why. These are rules, not measurements;
 * docs/hardware.md states each of them. Thread-safe: the functions are pure, except for the
 * arena. */
#ifndef QC_CONVERT_HARDWARE_CHOICE_H
#define QC_CONVERT_HARDWARE_CHOICE_H

#include "convert/hardware/hardware.h"

/* The same as the defaults of --margin and --cuda-context (convert/cli/options.h). */
#define QC_DEFAULT_MARGIN             0.9
#define QC_DEFAULT_CUDA_CONTEXT_BYTES 500000000u

typedef struct {
    int usable; /* compute capability is 7.0 or more, or not known */
    const char *compute_dtype, *compute_why;
    const char *kernels; /* matmul's: "sm_80: mma.m16n8k16, cp.async" */
    const char *kernels_why;
    const char *schemes; /* as --schemes takes them */
    const char *schemes_why;
    uint64_t room_bytes; /* for weights and KV cache: margin x free - CUDA context */
    /* How many weights would fill the room if nothing else were there; scales are included. */
    uint64_t weights_16bit, weights_int8, weights_nf4;
} qc_gpu_choice;

qc_gpu_choice qc_gpu_choose(const qc_gpu *g);
/* Does bitsandbytes have an int8 matmul for this compute capability (times ten)? */
int qc_sm_runs_int8(unsigned sm);

typedef enum {
    QC_STRATEGY_GPUS_BALANCED, /* there are two usable GPUs or more */
    QC_STRATEGY_GPU_AND_CPU,   /* one usable GPU, and more free host memory than free GPU memory */
    QC_STRATEGY_GPU_WHOLE,     /* one usable GPU, and the host does not have as much free memory */
    QC_STRATEGY_CPU            /* none */
} qc_strategy_kind;

typedef struct {
    qc_strategy_kind kind;
    const char *name;    /* "gpus-balanced", "gpu-and-cpu", "gpu-whole", "cpu" */
    const char *why;     /* a clause without a full stop */
    const char *vram;    /* the value for --vram: "auto", "2xA100-40GB", "auto+cpu", "cpu" */
    uint64_t room_bytes; /* sum over all usable GPUs; for the CPU, margin x free memory */
} qc_strategy;

/* The only error is QC_ERR_NOMEM. */
QC_NODISCARD qc_status qc_strategy_choose(qc_strategy *out, const qc_hardware *h, qc_arena *arena,
                                          qc_error *err);

#endif
