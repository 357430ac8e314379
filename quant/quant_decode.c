#include "quant/quant_decode.h"

#include "base/float_bits.h"

const float qc_fp4_code[16] = {
    0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f,
};

/* Returns 2^(code - 127). The smallest, 2^-127, is subnormal as a float. */
static float e8m0_value(unsigned code)
{
    if (code == 255)
        return qc_f32_of_bits(0x7FC00000u);
    return qc_f32_of_bits(code == 0 ? 0x00400000u : code << 23);
}

/* Returns a small float of exp_bits and man_bits; its largest exponent has no special meaning. */
static float small_float(unsigned code, unsigned exp_bits, unsigned man_bits)
{
    unsigned sign = code >> 7, exponent = code >> man_bits & ((1u << exp_bits) - 1);
    unsigned mantissa = code & ((1u << man_bits) - 1);
    int bias = (1 << (exp_bits - 1)) - 1;
    float unit =
        qc_f32_of_bits((uint32_t)(127 - bias + 1 - (int)man_bits) << 23); /* the subnormals' */
    float value = exponent == 0 ? (float)mantissa * unit
                                : (float)(mantissa | 1u << man_bits) * unit *
                                      (float)(UINT32_C(1) << (exponent - 1));
    return sign ? -value : value;
}

void qc_f8_table(qc_dtype dtype, float table[256])
{
    const float nan = qc_f32_of_bits(0x7FC00000u), infinity = qc_f32_of_bits(0x7F800000u);
    for (unsigned code = 0; code < 256; code++) {
        unsigned magnitude = code & 0x7Fu;
        float value = nan;
        if (dtype == QC_DTYPE_F8_E8M0)
            value = e8m0_value(code);
        else if (dtype == QC_DTYPE_F8_E4M3 && magnitude != 0x7F)
            value = small_float(code, 4, 3);
        else if (dtype == QC_DTYPE_F8_E5M2 && magnitude < 0x7C)
            value = small_float(code, 5, 2);
        else if (dtype == QC_DTYPE_F8_E5M2 && magnitude == 0x7C)
            value = code == magnitude ? infinity : -infinity;
        table[code] = value;
    }
}

/* Returns the index of the first value that is not finite, or UINT64_MAX. The first pass has no
 * branch. */
static uint64_t find_nonfinite(const float *values, uint64_t n)
{
    uint32_t any = 0;
    for (uint64_t i = 0; i < n; i++)
        any |= (qc_f32_bits(values[i]) & 0x7F800000u) == 0x7F800000u;
    for (uint64_t i = 0; any && i < n; i++)
        if ((qc_f32_bits(values[i]) & 0x7F800000u) == 0x7F800000u)
            return i;
    return UINT64_MAX;
}

void qc_f8_decode(const uint8_t *codes, const float table[256], const qc_tile_scales *tiles,
                  uint64_t first, uint64_t n, float *out, uint64_t *first_bad)
{
    for (uint64_t done = 0; done < n;) {
        uint64_t row = (first + done) / tiles->cols, col = (first + done) % tiles->cols;
        const float *scales = tiles->scales + row / tiles->tile_rows * tiles->tiles_across;
        uint64_t row_left = tiles->cols - col;
        uint64_t row_end = done + (row_left < n - done ? row_left : n - done);
        while (done < row_end) {
            uint64_t tile_left = tiles->tile_cols - col % tiles->tile_cols;
            uint64_t run = tile_left < row_end - done ? tile_left : row_end - done;
            float scale = scales[col / tiles->tile_cols];
            for (uint64_t i = 0; i < run; i++)
                out[done + i] = table[codes[done + i]] * scale;
            done += run;
            col += run;
        }
    }
    *first_bad = find_nonfinite(out, n);
}

void qc_mxfp4_decode(const uint8_t *blocks, const uint8_t *scales, uint64_t n, float *out,
                     uint64_t *first_bad)
{
    for (uint64_t b = 0; b < n; b++) {
        float values[16];
        float scale = e8m0_value(scales[b]);
        for (unsigned code = 0; code < 16; code++)
            values[code] = qc_fp4_code[code] * scale;
        const uint8_t *bytes = blocks + b * QC_MXFP4_BYTES;
        for (unsigned i = 0; i < QC_MXFP4_BYTES; i++) {
            *out++ = values[bytes[i] & 15];
            *out++ = values[bytes[i] >> 4];
        }
    }
    *first_bad = find_nonfinite(out - n * QC_MXFP4_BLOCK, n * QC_MXFP4_BLOCK);
}
