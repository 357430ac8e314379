#define _GNU_SOURCE /* sched_getaffinity, CPU_COUNT */
#include "base/cpu.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const isa_names[QC_ISA_COUNT] = {"scalar", "avx2", "avx512"};

const char *qc_isa_name(qc_isa isa)
{
    return isa_names[isa];
}

int qc_isa_available(qc_isa isa)
{
    if (isa == QC_ISA_SCALAR)
        return 1;
#if defined(__x86_64__)
    if (isa == QC_ISA_AVX2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("avx");
    if (isa == QC_ISA_AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
               qc_isa_available(QC_ISA_AVX2);
#endif
    return 0;
}

qc_status qc_isa_select(qc_isa *out, qc_error *err)
{
    const char *want = getenv("QCONV_ISA");
    if (want && *want) {
        for (int i = 0; i < QC_ISA_COUNT; i++) {
            if (strcmp(want, isa_names[i]) != 0)
                continue;
            if (!qc_isa_available((qc_isa)i))
                QC_FAIL(err, QC_ERR_DEVICE,
                        "QCONV_ISA: this processor does not have %s; leave QCONV_ISA unset to take "
                        "the best that it has",
                        want);
            *out = (qc_isa)i;
            return QC_OK;
        }
        QC_FAIL(err, QC_ERR_USAGE, "QCONV_ISA: expected scalar, avx2 or avx512, found '%s'", want);
    }
    int best = QC_ISA_COUNT - 1;
    while (!qc_isa_available((qc_isa)best))
        best--;
    *out = (qc_isa)best;
    return QC_OK;
}

unsigned qc_cpu_count(void)
{
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        int n = CPU_COUNT(&set);
        if (n > 0)
            return (unsigned)n;
    }
#endif
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (unsigned)n : 1;
}
