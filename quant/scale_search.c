/* The scalar reference of the search, which every other table must equal bit for bit. The order of
 * every operation is in scale_search_internal.h. */
#include "quant/scale_search_internal.h"

#include "quant/quant_half.h"

#include <math.h>
#include <string.h>

/* Returns the number of the code nearest to y. */
static float nearest_number(const qc_form_ops *form, float y)
{
    const float lowest = (float)form->lowest, highest = (float)form->highest;
    float q = qc_round_even(y);
    q = q > highest ? highest : q;
    return q < lowest ? lowest : q;
}

/* Adds the rows of one run, saturating at 65535. */
static void add_run(const float *x, uint32_t n, float k, const uint16_t (*screen)[32],
                    uint32_t *total)
{
    uint32_t run[2 * QC_SEARCH_FACTORS] = {0};
    for (uint32_t i = 0; i < n; i++) {
        const uint16_t *row = screen[(int)qc_round_even(x[i] * k) + 127];
        for (unsigned m = 0; m < 2 * QC_SEARCH_FACTORS; m++)
            run[m] += row[m];
    }
    for (unsigned m = 0; m < 2 * QC_SEARCH_FACTORS; m++)
        total[m] += run[m] < 65535u ? run[m] : 65535u;
}

static void look_at(const float *x, uint32_t n, const uint16_t (*screen)[2 * QC_SEARCH_FACTORS],
                    qc_search_look *out)
{
    uint32_t largest = 0;
    float xx[QC_LANES] = {0};
    for (uint32_t i = 0; i < n; i++) {
        uint32_t magnitude = qc_f32_bits(x[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    *out = (qc_search_look){.absmax = qc_f32_of_bits(largest)};
    if (!isfinite(out->absmax) || out->absmax < QC_TINY_ABSMAX)
        return;
    const float k = (1.0f / out->absmax) * 127.0f;
    for (uint32_t i = 0; i < n; i++) {
        float z = x[i] * k;
        xx[i % QC_LANES] = fmaf(z, z, xx[i % QC_LANES]);
    }
    out->xx = qc_fold16(xx);
    if (!screen)
        return;
    for (uint32_t i = 0; i < n; i += QC_SEARCH_RUN)
        add_run(x + i, qc_min_u32(n - i, QC_SEARCH_RUN), k, screen, out->total);
    for (uint32_t m = 1; m < 2 * QC_SEARCH_FACTORS; m++)
        if (out->total[m] < out->total[out->best])
            out->best = m;
}

static void look(const float *x, uint32_t n, unsigned blocks,
                 const uint16_t (*screen)[2 * QC_SEARCH_FACTORS], qc_search_look *out)
{
    for (unsigned b = 0; b < blocks; b++)
        look_at(x + b * n, n, screen, &out[b]);
}

/* Returns y less the NF4 value nearest to it. A threshold lies within an ulp of the middle, so the
 * nearest value is that of the code or a neighbour. */
static float nf4_residue(float y)
{
    unsigned code = qc_nf4_code_of(y);
    float r = y - qc_nf4_code[code];
    if (code > 0 && fabsf(y - qc_nf4_code[code - 1]) < fabsf(r))
        r = y - qc_nf4_code[code - 1];
    if (code < 15 && fabsf(y - qc_nf4_code[code + 1]) < fabsf(r))
        r = y - qc_nf4_code[code + 1];
    return r;
}

static void errors(const qc_search_tables *tables, const float *x, uint32_t n, unsigned blocks,
                   const qc_form_ops *form, const float *inv, unsigned count, float *rr)
{
    const int table = qc_form_is_table(form);
    (void)tables;
    for (unsigned j = 0; j < blocks * count; j++) {
        const float *block = x + j / count * n;
        float lanes[QC_LANES] = {0};
        for (uint32_t i = 0; i < n; i++) {
            float y = block[i] * inv[j];
            float r = table ? nf4_residue(y) : y - nearest_number(form, y);
            lanes[i % QC_LANES] = fmaf(r, r, lanes[i % QC_LANES]);
        }
        rr[j] = qc_fold16(lanes);
    }
}

static float encode(const float *x, uint32_t n, unsigned blocks, const qc_form_ops *form,
                    const float *inv, const float *s, uint8_t *codes)
{
    float largest = 0.0f;
    for (uint32_t i = 0; i < blocks * n; i++) {
        const float y = x[i] * inv[i / n];
        const int code = qc_form_is_table(form) ? (int)qc_nf4_code_of(y)
                                                : (int)nearest_number(form, y) + form->zero;
        const float value = qc_form_unit(form, code);
        qc_form_put_code(form, codes, i, code);
        float error = fabsf(x[i] - value * s[i / n]);
        largest = error > largest ? error : largest;
    }
    return largest;
}

static float encode_row(const float *x, const float *h, uint32_t n, const qc_form_ops *form,
                        float s, uint8_t *codes, float *ee, float *xx)
{
    const float inv = qc_search_inverse(form, s);
    const float unit = qc_search_row_unit(form, s);
    float ee_lanes[QC_LANES] = {0}, xx_lanes[QC_LANES] = {0}, largest = 0.0f;
    for (uint32_t i = 0; i < n; i++) {
        float q = nearest_number(form, h[i] * inv);
        float e = x[i] - (q * s) * form->step;
        qc_form_put_code(form, codes, i, (int)q + form->zero);
        float r = e * unit, y = x[i] * unit;
        ee_lanes[i % QC_LANES] = fmaf(r, r, ee_lanes[i % QC_LANES]);
        xx_lanes[i % QC_LANES] = fmaf(y, y, xx_lanes[i % QC_LANES]);
        largest = fabsf(e) > largest ? fabsf(e) : largest;
    }
    *ee = qc_fold16(ee_lanes);
    *xx = qc_fold16(xx_lanes);
    return largest;
}

static void widen(const void *src, qc_dtype dtype, uint32_t n, float *x)
{
    uint64_t overflow;
    qc_quant_ops_scalar.cast(src, dtype, n, x, QC_DTYPE_F32, &overflow);
}

static const qc_search_steps steps = {
    &qc_quant_ops_scalar, widen, look, errors, encode, encode_row};

#include "quant/scale_search_driver.h"

const qc_search_ops qc_search_ops_scalar = {QC_ISA_SCALAR, search_blocks};
