/* What this machine has, or a machine described by --as.
 *
 * GPUs come from NVML (libnvidia-ml.so.1), opened at run time: no build needs it, and a machine
 * without it simply has no GPUs. QCONV_NVML names another library (tests). Which GPUs count:
 *
 * CUDA_VISIBLE_DEVICES as CUDA reads it: indices, or UUIDs or unique beginnings of them
 * ("GPU-8932f"), commas between. The first entry that names nothing hides itself and all that
 * follow; an entry twice hides all; empty or -1: none. It never is an error.
 * Then QCONV_DEVICE (convert/device/device_wish.h): indices after CUDA_VISIBLE_DEVICES, as CUDA
 * programs count.
 *
 * Indices are in PCI bus order, CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID.
 * Thread-safe: yes; everything lives in the arena given. */
#ifndef QC_CONVERT_HARDWARE_H
#define QC_CONVERT_HARDWARE_H

#include "base/arena.h"
#include "base/cpu.h"
#include "convert/device/device_wish.h"
#include "convert/hardware/card_table.h"

typedef struct {
    unsigned index;        /* as a CUDA program sees it: cuda:INDEX */
    unsigned driver_index; /* as the driver counts (nvidia-smi); --as: index */
    const char *name;      /* the driver's product name, or the card's for --as */
    const char *uuid;      /* NULL if not known */
    unsigned sm;           /* compute capability times ten; 0 unknown */
    uint64_t total_bytes, used_bytes, free_bytes;
    double bandwidth;    /* bytes a second; 0 unknown */
    const qc_card *card; /* NULL if it is not in the table */
    uint64_t peers;      /* bit i: can reach the memory of the GPU with index i directly */
    int peers_known;
} qc_gpu;

typedef struct {
    qc_gpu *gpus; /* visible ones, in index order */
    uint32_t gpu_count;
    const char *driver;   /* version, NULL if not known */
    const char *no_gpu;   /* a sentence why there are none ("no NVIDIA driver: ..."), or NULL */
    const char *warning;  /* about GPUs that are there and left out, or NULL */
    int assumed;          /* from --as: CPU and disk are still this machine's */
    const char *cpu_name; /* NULL if not known */
    unsigned cpu_threads; /* that this process may use */
    qc_isa isa;           /* that qconv takes */
    uint64_t memory_bytes, memory_free_bytes; /* of the host (or its cgroup, if less); 0 unknown */
    uint64_t disk_free_bytes;                 /* of the current directory's file system */
    /* Asked only by 'qconv hardware', as CUDA starts for it (cmd_hardware.c). */
    const char *cuda_build;    /* what the kernels are built for, NULL without any */
    const char *quantizes_on;  /* "cuda:0 (NVIDIA H200)", "cpu"; NULL: not asked, or nothing can */
    const char *quantizes_why; /* why not on a GPU, or NULL */
} qc_hardware;

/* QC_ERR_DEVICE when QCONV_DEVICE names what is not there; QC_ERR_USAGE for one that cannot be
 * read; what qc_isa_select says of QCONV_ISA. A machine without GPUs is no error. */
QC_NODISCARD qc_status qc_hardware_read(qc_hardware *out, qc_arena *arena, qc_error *err);
/* This machine with its GPUs replaced by those of `as`: "2xA100-40GB", "3090+4090", "V100-16GB".
 * QC_ERR_USAGE for an unknown card, naming a near one, and for more than QC_MAX_GPUS. */
QC_NODISCARD qc_status qc_hardware_assume(qc_hardware *out, qc_arena *arena, const char *as,
                                          qc_error *err);

/* ---- parts of the above, for tests ---- */

/* Which of count GPUs CUDA shows: their driver indices to visible (room for count), their number
 * to *shown. list: CUDA_VISIBLE_DEVICES, NULL if it is not set. uuids[i]: "" if not known. */
void qc_cuda_visible(const char *list, const char *const *uuids, unsigned count, unsigned *visible,
                     unsigned *shown);

#endif
