/* NVML, the driver's library of facts about GPUs, opened at run time: neither a header nor a
 * library of NVIDIA's is needed to build.
 *
 * libnvidia-ml.so.1, or what the environment variable QCONV_NVML names. The few functions used are
 * declared in nvml_gpu.c after the published interface (NVML API Reference Guide; the _v2 and _v3
 * names are stable since 2012 and 2021). Those that old drivers lack are optional: what they would
 * have said is then not known.
 * GPUs are counted as the driver counts: in PCI bus order, all of them.
 * Thread-safe: one owner. */
#ifndef QC_CONVERT_NVML_GPU_H
#define QC_CONVERT_NVML_GPU_H

#include "base/arena.h"

typedef struct qc_nvml qc_nvml;

#define QC_NVML_TEXT_BYTES 128

typedef struct {
    char name[QC_NVML_TEXT_BYTES];
    char uuid[QC_NVML_TEXT_BYTES]; /* "GPU-..."; "" if not known */
    unsigned sm;                   /* compute capability times ten; 0 unknown */
    double bandwidth;              /* bytes a second, from bus width and clock; 0 unknown */
} qc_nvml_facts;

typedef struct {
    uint64_t total_bytes, used_bytes, free_bytes;
} qc_nvml_memory;

typedef struct {
    unsigned pid;
    int bytes_known; /* the driver may keep it to itself (containers, other users) */
    uint64_t bytes;
} qc_nvml_process;

/* QC_ERR_DEVICE with a sentence when there is no such library, it lacks a function that is needed,
 * or the driver does not answer. Ends with qc_nvml_close. */
QC_NODISCARD qc_status qc_nvml_open(qc_nvml **out, qc_error *err);
/* NULL is fine. */
void qc_nvml_close(qc_nvml *n);
unsigned qc_nvml_count(const qc_nvml *n);
/* The driver's version, "" if not known. */
const char *qc_nvml_driver(const qc_nvml *n);
/* The following: gpu < qc_nvml_count. QC_ERR_DEVICE when the GPU does not answer. */
QC_NODISCARD qc_status qc_nvml_read_facts(qc_nvml *n, unsigned gpu, qc_nvml_facts *out,
                                          qc_error *err);
QC_NODISCARD qc_status qc_nvml_read_memory(qc_nvml *n, unsigned gpu, qc_nvml_memory *out,
                                           qc_error *err);
/* Whether a can read and write the memory of b: 1, 0, or -1 where the driver does not say. */
int qc_nvml_peer(qc_nvml *n, unsigned a, unsigned b);
/* Processes that compute on the GPU: up to room of them to out, their number to *count.
 * QC_ERR_UNSUPPORTED when the driver does not list them. */
QC_NODISCARD qc_status qc_nvml_processes(qc_nvml *n, unsigned gpu, qc_nvml_process *out,
                                         unsigned room, unsigned *count, qc_error *err);

#endif
