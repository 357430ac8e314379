/* NVML is the driver's library of facts about GPUs. It is opened at run time, so neither a header
 * nor a library of NVIDIA's is needed to build.
 *
 * The library is libnvidia-ml.so.1, or the one that the environment variable QCONV_NVML names.
 * nvml_gpu.c declares the few functions that are used, after the published interface (NVML API
 * Reference Guide; the _v2 and _v3 names have been stable since 2012 and 2021). Functions that old
 * drivers lack are optional, and what they would have said is then unknown.
 *
 * GPUs are counted as the driver counts them: all of them, in PCI bus order. Thread-safe: one
 * owner. */
#ifndef QC_CONVERT_NVML_GPU_H
#define QC_CONVERT_NVML_GPU_H

#include "base/arena.h"

typedef struct qc_nvml qc_nvml;

#define QC_NVML_TEXT_BYTES 128

typedef struct {
    char name[QC_NVML_TEXT_BYTES];
    char uuid[QC_NVML_TEXT_BYTES]; /* "GPU-..."; "" if not known */
    unsigned sm;                   /* compute capability times ten; 0 unknown */
    double bandwidth;              /* bytes per second, from bus width and clock; 0 unknown */
} qc_nvml_facts;

typedef struct {
    uint64_t total_bytes, used_bytes, free_bytes;
} qc_nvml_memory;

/* QC_ERR_DEVICE, with a sentence, if there is no such library, if it lacks a function that is
 * needed, or if the driver does not answer. Close it with qc_nvml_close. */
QC_NODISCARD qc_status qc_nvml_open(qc_nvml **out, qc_error *err);
/* Accepts NULL. */
void qc_nvml_close(qc_nvml *n);
unsigned qc_nvml_count(const qc_nvml *n);
/* The version of the driver, or "" if it is not known. */
const char *qc_nvml_driver(const qc_nvml *n);
/* In the following functions gpu < qc_nvml_count. QC_ERR_DEVICE when the GPU does not answer. */
QC_NODISCARD qc_status qc_nvml_read_facts(qc_nvml *n, unsigned gpu, qc_nvml_facts *out,
                                          qc_error *err);
QC_NODISCARD qc_status qc_nvml_read_memory(qc_nvml *n, unsigned gpu, qc_nvml_memory *out,
                                           qc_error *err);
/* Can a read and write the memory of b? 1 or 0, or -1 if the driver does not say. */
int qc_nvml_peer(qc_nvml *n, unsigned a, unsigned b);

#endif
