/* The quantizer for bench_bitsandbytes.py. Its one call times an NF4 quantization with double
 * quantization and error terms, as the pipeline does it, into buffers of its own. */
#include "base/alloc.h"
#include "base/clock.h"
#include "quant/quant_ops.h"

#include <string.h>

#define STEP_ELEMS (256u << 10)

/* Returns seconds, or a negative number when this machine lacks the code path or the memory. */
__attribute__((visibility("default"))) double qc_bench_nf4(const char *isa, const void *bf16,
                                                           uint64_t n);

double qc_bench_nf4(const char *isa, const void *bf16, uint64_t n)
{
    static unsigned char *codes, *nested_codes;
    static float *absmax, *nested;
    static qc_block_error *errors;
    static uint64_t room;
    uint64_t blocks = (n + 63) / 64;
    int which = 0;
    while (which < QC_ISA_COUNT && strcmp(isa, qc_isa_name((qc_isa)which)) != 0)
        which++;
    if (which == QC_ISA_COUNT || !qc_isa_available((qc_isa)which) ||
        qc_quant_ops_for((qc_isa)which)->isa != (qc_isa)which)
        return -1;
    if (room < n) {
        void *v[5] = {codes, nested_codes, absmax, nested, errors};
        if (qc_realloc_array(&v[0], (size_t)n / 2 + 1, 1, NULL) != QC_OK ||
            qc_realloc_array(&v[1], (size_t)blocks, 1, NULL) != QC_OK ||
            qc_realloc_array(&v[2], (size_t)blocks, sizeof *absmax, NULL) != QC_OK ||
            qc_realloc_array(&v[3], (size_t)blocks / 256 + 1, sizeof *nested, NULL) != QC_OK ||
            qc_realloc_array(&v[4], (size_t)blocks, sizeof *errors, NULL) != QC_OK)
            return -1;
        codes = v[0];
        nested_codes = v[1];
        absmax = v[2];
        nested = v[3];
        errors = v[4];
        room = n;
    }
    const qc_quant_ops *ops = qc_quant_ops_for((qc_isa)which);
    uint64_t begin = qc_clock_ns();
    for (uint64_t at = 0; at < n; at += STEP_ELEMS) {
        uint64_t m = n - at < STEP_ELEMS ? n - at : STEP_ELEMS;
        qc_piece_sums sums = {0};
        ops->nf4_quantize((const unsigned char *)bf16 + 2 * at, QC_DTYPE_BF16, m, 64,
                          codes + at / 2, absmax + at / 64, errors + at / 64, &sums);
    }
    float offset = qc_nested_offset(absmax, blocks);
    ops->nested_quantize(absmax, blocks, offset, nested_codes, nested);
    return (double)(qc_clock_ns() - begin) * 1e-9;
}
