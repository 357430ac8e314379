/* What this machine has, or the machine that --as describes.
 *
 * GPUs come from NVML (libnvidia-ml.so.1), which is opened at run time. No build needs it, and a
 * machine without it simply has no GPUs. QCONV_NVML names another library (for tests). Two
 * environment variables decide which GPUs count:
 *
 * CUDA_VISIBLE_DEVICES is read as CUDA reads it. It has indices, or UUIDs, or beginnings of them
 * that are unique ("GPU-8932f"), with commas between. The first entry that names nothing hides
 * itself and all that follow. If an entry is there twice, all GPUs are hidden; if the list is empty
 * or -1, so are they. Nothing in it is an error. QCONV_DEVICE (convert/device/device_wish.h) then
 * has indices among those that are left, as CUDA programs count.
 *
 * Indices are in PCI bus order, as CUDA's are with CUDA_DEVICE_ORDER=PCI_BUS_ID. Thread-safe: yes;
 * everything lives in the given arena. */
#ifndef QC_CONVERT_HARDWARE_H
#define QC_CONVERT_HARDWARE_H

#include "base/arena.h"
#include "base/cpu.h"
#include "convert/device/device_wish.h"
#include "convert/hardware/card_table.h"

typedef struct {
    unsigned index;        /* as a CUDA program sees it: cuda:INDEX */
    unsigned driver_index; /* as the driver counts (nvidia-smi); with --as the same as index */
    const char *name;      /* the driver's product name, or with --as the card's name */
    const char *uuid;      /* NULL if not known */
    unsigned sm;           /* compute capability times ten; 0 unknown */
    uint64_t total_bytes, used_bytes, free_bytes;
    double bandwidth;    /* bytes per second; 0 unknown */
    const qc_card *card; /* NULL if it is not in the table */
    /* bit i is set if it can reach the memory of the GPU with index i directly */
    uint64_t peers;
    int peers_known;
} qc_gpu;

typedef struct {
    qc_gpu *gpus; /* the visible ones, in index order */
    uint32_t gpu_count;
    const char *driver; /* its version; NULL if not known */
    const char *
        no_gpu; /* a sentence why there are no GPUs ("the NVIDIA driver was not found: ..."), or NULL */
    const char *warning;  /* about GPUs that exist but are left out, or NULL */
    int assumed;          /* the GPUs are those of --as; CPU and disk are still this machine's */
    const char *cpu_name; /* NULL if not known */
    unsigned cpu_threads; /* CPU threads that this process may use */
    qc_isa isa;           /* the instruction set that qconv uses */
    uint64_t memory_bytes, memory_free_bytes; /* the host's (or its cgroup's, if less); 0 unknown */
    uint64_t disk_free_bytes;                 /* on the file system of the current directory */
    /* Only 'qconv hardware' fills these in, because CUDA is started for them (cmd_hardware.c). */
    const char *cuda_build;    /* names what the kernels are built for; NULL: there are none */
    const char *quantizes_on;  /* "cuda:0 (NVIDIA H200)", "cpu"; NULL: not asked, or nothing can */
    const char *quantizes_why; /* why a GPU does not quantize, or NULL */
} qc_hardware;

/* QC_ERR_DEVICE when QCONV_DEVICE names a GPU that does not exist, QC_ERR_USAGE when it cannot be
 * read, and the errors of qc_isa_select for QCONV_ISA. A machine without GPUs is not an error. */
QC_NODISCARD qc_status qc_hardware_read(qc_hardware *out, qc_arena *arena, qc_error *err);
/* Reads this machine and replaces its GPUs by those of `as`: "2xA100-40GB", "3090+4090",
 * "V100-16GB". QC_ERR_USAGE for an unknown card, with the name of a near one, and for more than
 * QC_MAX_GPUS. */
QC_NODISCARD qc_status qc_hardware_assume(qc_hardware *out, qc_arena *arena, const char *as,
                                          qc_error *err);

/* ---- parts of the above, for tests ---- */

/* Which of `count` GPUs CUDA shows: writes their driver indices to visible (room for count) and
 * their number to *shown. list is CUDA_VISIBLE_DEVICES, or NULL if it is not set. uuids[i] is "" if
 * it is not known. */
void qc_cuda_visible(const char *list, const char *const *uuids, unsigned count, unsigned *visible,
                     unsigned *shown);

#endif
