/* Weights that are stored as 8-bit floats or in MXFP4, decoded to float.
 *
 * Sources: OCP 8-bit Floating Point Specification (E4M3, E5M2); OCP Microscaling Formats (MX)
 * Specification (E8M0 scales, E2M1 elements, blocks of 32); the layout of a byte's two elements as
 * gpt-oss stores them (low nibble first).
 *
 * Every value is exact in float, except that a product with a scale is rounded once, to nearest
 * even. Codes and scales that stand for NaN or infinity, and products that overflow, come out as
 * non-finite floats; *first_bad is the index of the first one (UINT64_MAX if there is none).
 * Thread-safe: yes. Allocates: never. n == 0 is a no-op. */
#ifndef QC_QUANT_QUANT_DECODE_H
#define QC_QUANT_QUANT_DECODE_H

#include "base/dtype.h"

#include <stdint.h>

/* Elements of an MXFP4 block, and their bytes without the scale. */
#define QC_MXFP4_BLOCK 32u
#define QC_MXFP4_BYTES 16u
#define QC_NVFP4_BLOCK 16u /* codes that share a scale, two in a byte like MXFP4's */

/* The 16 values of E2M1 in code order. */
extern const float qc_fp4_code[16];

/* Writes the 256 values of an 8-bit float in code order. E4M3: bias 7, no infinity, NaN 0x7f and
 * 0xff. E5M2: the upper byte of a float16. E8M0: 2^(code - 127), 0xff NaN. Any other dtype: all
 * NaN. */
void qc_f8_table(qc_dtype dtype, float table[256]);

/* Scales of an [rows, cols] weight: one for each tile of tile_rows x tile_cols (both at least 1;
 * tiles at the edges may be partial), row-major. */
typedef struct {
    uint64_t cols; /* columns of the weight, at least 1 */
    uint64_t tile_rows, tile_cols;
    uint64_t tiles_across; /* ceil(cols / tile_cols) */
    const float *scales;
} qc_tile_scales;

/* out[i] = table[codes[i]] * the scale of its tile, for the elements [first, first + n) of the
 * flattened weight; codes and out begin at element `first`. *first_bad counts from there. */
void qc_f8_decode(const uint8_t *codes, const float table[256], const qc_tile_scales *tiles,
                  uint64_t first, uint64_t n, float *out, uint64_t *first_bad);

/* Decodes n blocks of MXFP4: 16 bytes and a scale byte each become 32 floats, qc_fp4_code[nibble] *
 * 2^(scale - 127). A scale of 255 is NaN. A product is exact (and fits bfloat16) unless it
 * overflows: scale 254 with codes of 2 and more, 253 with 4 and 6. */
void qc_mxfp4_decode(const uint8_t *blocks, const uint8_t *scales, uint64_t n, float *out,
                     uint64_t *first_bad);

#endif
