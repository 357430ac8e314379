/* The number work of qconv: NF4, double quantization, int8 and casts. There is one table of
 * functions per instruction set; all tables give the same bytes.
 *
 * quant_scalar.c is the reference. The AVX2 table, whose functions the AVX-512 table has, too,
 * equals it bit for bit, in codes, scales and error sums, because every operation (and every order
 * of summation) is fixed here in words. Operations are in IEEE single precision without contraction
 * unless stated.
 *
 * Sources: NF4 and double quantization: Dettmers et al. 2023, "QLoRA"; LLM.int8: Dettmers et al.
 * 2022; thresholds, ties and packing as in bitsandbytes' CUDA kernels (see docs/quantizers.md).
 *
 * Common rules
 *
 *   - `src` holds n elements of type `dtype` (F64, F32, F16 or BF16), little-endian, of any
 *     alignment, row-major and flattened.
 *   - Quantizers widen elements to float first (F64: rounded to nearest even; a finite F64 that
 *     becomes infinite counts as QC_BAD_RANGE). Subnormals count; the caller leaves the floating
 *     point environment as C starts it (round to nearest, no flush to zero).
 *   - A non-finite element never gets a code: the function reports the lowest such index, and its
 *     outputs except for bad and bad_index are unspecified.
 *   - Pointers to float are aligned as C wants it; src and dst of type void need no alignment.
 *   - Thread-safe: yes, no shared state. Allocates: never. n == 0 is a no-op. */
#ifndef QC_QUANT_QUANT_OPS_H
#define QC_QUANT_QUANT_OPS_H

#include "base/cpu.h"
#include "base/dtype.h"
#include "base/status.h"

/* Block sizes of NF4 and of block-wise int8: powers of two from 32 to 4096. */
#define QC_BLOCK_DEFAULT 64u
int qc_block_size_valid(uint64_t block_elems);

/* Block size of the second quantization (of absmax), fixed by bitsandbytes' readers. */
#define QC_NESTED_BLOCK 256u

/* The 16 values of NF4 in code order, and the 256 of the signed 8-bit dynamic map. */
extern const float qc_nf4_code[16];
extern const float qc_dynamic_map[256];
/* Thresholds between the NF4 codes: code = number of thresholds strictly below x. */
extern const float qc_nf4_threshold[15];

typedef enum {
    QC_BAD_NONE,
    QC_BAD_NONFINITE, /* NaN or infinity in the source */
    QC_BAD_RANGE      /* finite in the source, infinite in the type it must pass through */
} qc_bad_kind;

/* What quantizing a stretch of a tensor (a "piece") leaves besides codes and scales; always written
 * whole. qc_piece_add combines pieces in index order, so that sums do not depend on threads. */
typedef struct {
    double sum_xx;  /* sum of x^2 */
    double sum_ee;  /* sum of (x - dequantized x)^2 with the scales before double quantization */
    double max_err; /* largest |x - dequantized x| for int8 rows, else 0 */
    uint64_t max_index; /* its index within the piece; the lowest on ties */
    qc_bad_kind bad;
    uint64_t bad_index; /* lowest offending index within the piece */
} qc_piece_sums;

/* What is needed per block to finish the error once double quantization has replaced the scale.
 * With y = x * (1/absmax), c the code's value and r = y - c: the sums over the block of r*c and
 * c*c, and the largest |r|, each rounded to bfloat16 (peak upwards). 6 bytes a block. */
typedef struct {
    uint16_t rc;
    uint16_t cc;
    uint16_t peak;
} qc_block_error;

/* The final error of a tensor, after double quantization if there was one. */
typedef struct {
    double rel_mse;     /* sum (x - x')^2 / sum x^2; 0 for an all-zero tensor */
    double max_err;     /* largest |x - x'|, exact */
    uint64_t max_index; /* its flat index */
} qc_tensor_error;

/* Symmetric integers as compressed-tensors has them: the value of a code is (float)code * scale.
 * Sources: the formats int-quantized and pack-quantized of the compressed-tensors library. */
typedef struct {
    unsigned bits;        /* 2 to 7: codes are -2^(bits-1) to 2^(bits-1) - 1. 8: -127 to 127 */
    unsigned bias;        /* added to a code before it is stored: 0, or 2^(bits-1) */
    qc_dtype scale_dtype; /* F32, F16 or BF16: the values that a scale may have */
    uint64_t stride;      /* bytes from a group's codes to the next group's; 0: there is no gap */
} qc_int_codes;

/* Returns how many bytes n codes take that lie without gaps. */
static inline uint64_t qc_code_bytes(unsigned bits, uint64_t n)
{
    return n / 8 * bits + (n % 8 * bits + 7) / 8;
}

typedef struct {
    qc_isa isa;

    /* NF4. block_elems is a block size as above. The piece starts at a block boundary; only the
     * last block of a tensor may be short (its absmax is over the elements that it has).
     *
     *   codes   (n + 1) / 2 bytes, element 2j in the high nibble, 2j+1 in the low; the last low
     *           nibble of an odd n is 7 (the code of 0)
     *   absmax  ceil(n / block_elems) floats
     *   block_errors  as many, or NULL to skip all error sums (sum_xx, sum_ee then are 0)
     *
     * The code is the number of thresholds strictly below x * (1.0f / absmax); an all-zero block
     * gives 7 (byte 0x77) and absmax 0. A block whose absmax is so small that 1.0f / absmax
     * overflows is scaled by a power of two first; its codes are those of exact arithmetic on the
     * scaled values. */
    void (*nf4_quantize)(const void *src, qc_dtype dtype, uint64_t n, uint32_t block_elems,
                         uint8_t *codes, float *absmax, qc_block_error *block_errors,
                         qc_piece_sums *sums);

    /* out[i] = (dst_dtype)(code_map[code i] * absmax[i / block_elems]): one float product, then
     * one rounding to nearest even. dst_dtype: F32, F16 or BF16. code_map: 16 floats.
     * *first_overflow: lowest index where a finite product became infinite in dst_dtype, or
     * UINT64_MAX. */
    void (*nf4_dequantize)(const uint8_t *codes, const float *absmax, const float *code_map,
                           uint64_t n, uint32_t block_elems, void *dst, qc_dtype dst_dtype,
                           uint64_t *first_overflow);

    /* Second quantization: d = absmax - offset; the nested absmax is that of d over 256 blocks; the
     * code is the nearest entry of the dynamic map to d * (1.0f / nested_absmax), with ties as in
     * bitsandbytes' CUDA search. A group of zeros only gives code 127 (0.0); tiny groups are scaled
     * as in NF4. nested_absmax: ceil(n / 256) floats. absmax and offset are finite. */
    void (*nested_quantize)(const float *absmax, uint64_t n, float offset, uint8_t *codes,
                            float *nested_absmax);
    /* absmax[i] = map[codes[i]] * nested_absmax[i / nested_block] + offset, two roundings. */
    void (*nested_dequantize)(const uint8_t *codes, const float *nested_absmax, const float *map,
                              uint64_t n, uint32_t nested_block, float offset, float *absmax);

    /* LLM.int8, row-wise. Rows pass through float16 first (as bitsandbytes does): a finite value
     * that becomes infinite there is QC_BAD_RANGE.
     *
     *   codes  [rows, cols] int8 = round half even of h * ((1.0f / absmax) * 127.0f); a zero row 0
     *   scb    [rows] float, the row's absmax over the float16 values, not divided by 127
     *
     * The sums compare the source x (as float, before float16) with (code * scb) *
     * 7.874015718698502e-3f. Squares below the range of float count as zero. */
    void (*int8_rows_quantize)(const void *src, qc_dtype dtype, uint64_t rows, uint64_t cols,
                               int8_t *codes, float *scb, qc_piece_sums *sums);
    /* dst = (dst_dtype)((code * scb[row]) * 7.874015718698502e-3f), floats, left to right.
     * *first_overflow as in nf4_dequantize. */
    void (*int8_rows_dequantize)(const int8_t *codes, const float *scb, uint64_t rows,
                                 uint64_t cols, void *dst, qc_dtype dst_dtype,
                                 uint64_t *first_overflow);

    /* int8, block-wise over the flattened tensor; scales as in NF4 (absmax, may be double
     * quantized). code = x * ((1.0f / absmax) * 127.0f), rounded half to even and clamped to +-127.
     * Tiny blocks are scaled as in NF4, also where only the product with 127 would overflow.
     * block_errors are as in NF4 with c = code * 7.874015718698502e-3f. */
    void (*int8_blocks_quantize)(const void *src, qc_dtype dtype, uint64_t n, uint32_t block_elems,
                                 int8_t *codes, float *absmax, qc_block_error *block_errors,
                                 qc_piece_sums *sums);
    /* dst = (dst_dtype)((code * 7.874015718698502e-3f) * absmax[block]), floats, left to right. The
     * code's value comes first, as in NF4, so that no product overflows. */
    void (*int8_blocks_dequantize)(const int8_t *codes, const float *absmax, uint64_t n,
                                   uint32_t block_elems, void *dst, qc_dtype dst_dtype,
                                   uint64_t *first_overflow);

    /* Integers with one scale for every `group` elements: a block (of 32 to 4096) or a row. n is a
     * multiple of group, and a group begins with a byte.
     *
     *   codes   as qc_codes_pack has them; with a stride, zeros behind those of a group
     *   scales  n / group floats, as readers have them: qc_int_scale of the group's absmax
     *
     * code = y = x * (1.0f / scale), clamped and rounded half to even. The sums are final, with
     * max_err. With e = x - code * scale, they add up (e * (1.0f / scale))^2 and y^2 as
     * int8_rows_quantize adds up its squares, where each group is a row, and multiply by scale^2
     * after each flush. */
    void (*int_quantize)(const qc_int_codes *how, const void *src, qc_dtype dtype, uint64_t n,
                         uint64_t group, void *codes, float *scales, qc_piece_sums *sums);
    /* dst = (dst_dtype)(code * scale): one float product. *first_overflow as in nf4_dequantize. */
    void (*int_dequantize)(const qc_int_codes *how, const void *codes, const float *scales,
                           uint64_t n, uint64_t group, void *dst, qc_dtype dst_dtype,
                           uint64_t *first_overflow);

    /* Element-wise cast between F64, F32, F16, BF16 with a single rounding to nearest even (F64 to
     * F16 or BF16 does not pass through float). Infinity passes; NaN passes with its sign and the
     * upper bits of its payload, made quiet. Equal types: the bytes are copied.
     * *first_overflow: lowest index where finite became infinite, else UINT64_MAX. */
    void (*cast)(const void *src, qc_dtype src_dtype, uint64_t n, void *dst, qc_dtype dst_dtype,
                 uint64_t *first_overflow);
} qc_quant_ops;

/* Returns the table for an instruction set that this machine has (see qc_isa_available); never
 * NULL. Where that table is not part of the build, it is the next lesser one, as its member isa
 * says. */
const qc_quant_ops *qc_quant_ops_for(qc_isa isa);

/* Returns the scale of a group by its absmax: absmax / (2^(bits-1) - 0.5), which lies between the
 * ends of the codes (7.5 for 4 bits), absmax / 127 for 8, one IEEE division each, then
 * qc_int_round_scale. */
float qc_int_scale(const qc_int_codes *how, float absmax);
/* The value of scale_dtype that is nearest to a scale, ties to even. A magnitude below the smallest
 * normal one (F16: the smallest subnormal one) becomes that, so 1.0f / scale is always finite. One
 * above 65504 (F16) or 0x1.fep120 becomes that, so code * scale is finite. The sign stays. The
 * scale of a group of zeros is so the smallest one, and never 0, which other readers divide by. */
float qc_int_round_scale(qc_dtype scale_dtype, float scale);

/* Adds the sums of the next piece, whose first element has flat index `first`, to total. Call it in
 * index order. */
void qc_piece_add(qc_piece_sums *total, const qc_piece_sums *piece, uint64_t first);

/* Mean of absmax for double quantization: summed in double in index order, divided, rounded to
 * float, then to nearest even to a value that bfloat16 holds (at most its largest finite one).
 * n == 0 gives 0. */
float qc_nested_offset(const float *absmax, uint64_t n);

#endif
