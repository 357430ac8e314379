/* What the processor can do, and which code path to take on it. */
#ifndef QC_BASE_CPU_H
#define QC_BASE_CPU_H

#include "base/status.h"

/* In increasing order of preference. AVX2 means that AVX2, F16C, FMA and BMI2 are all present;
 * AVX512 means that F, BW, DQ, VL, VBMI and VNNI are. */
typedef enum { QC_ISA_SCALAR, QC_ISA_AVX2, QC_ISA_AVX512, QC_ISA_COUNT } qc_isa;

const char *qc_isa_name(qc_isa isa); /* "scalar", "avx2", "avx512" */
/* Returns whether this machine can run that path. */
int qc_isa_available(qc_isa isa);
/* Chooses the best available path, or the one that the environment variable QCONV_ISA names. It is
 * QC_ERR_USAGE if that name is unknown, QC_ERR_DEVICE if this machine lacks it. */
QC_NODISCARD qc_status qc_isa_select(qc_isa *out, qc_error *err);
/* Returns the number of processors that this process may run on, at least 1. */
unsigned qc_cpu_count(void);

#endif
