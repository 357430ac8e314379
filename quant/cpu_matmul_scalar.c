/* The truth of the integer products (cpu_matmul_internal.h). */
#include "quant/cpu_matmul_internal.h"

#include <math.h>
#include <string.h>

static int code_value(const qc_gemv *g, const unsigned char *codes, unsigned v, unsigned p)
{
    if (g->w->form.ops->bits != 4)
        return (int8_t)(codes[16 * v + p] - g->zero);
    const unsigned char byte = codes[8 * (v % 2) + p % 8 + 16 * (p / 8)];
    const unsigned code = v < 2 ? byte >> 4 : byte & 15u;
    return (int16_t)(g->low[code] | g->high[code] << 8);
}

/* The sums of a group: those of the first scale, and those of the second where there are two. */
static void sum_group(const qc_gemv *g, const unsigned char *codes, const int16_t *x,
                      int32_t sums[2][8])
{
    const int four = g->w->form.ops->bits == 4;
    memset(sums, 0, 2 * sizeof *sums);
    for (unsigned v = 0; v < 4; v++)
        for (unsigned p = 0; p < 16; p++)
            sums[g->halves && (four ? p / 8 : v / 2)][p / 2] +=
                x[16 * v + p] * code_value(g, codes, v, p);
}

static void row(const qc_gemv *g, uint64_t at, float *sums)
{
    const qc_form *f = &g->w->form;
    const int nested = f->nested, four = f->ops->bits == 4;
    const uint64_t first = qc_gemv_first_block(g, at);
    const unsigned bytes = QC_GEMV_GROUP / 8 * f->ops->bits;
    const unsigned char *codes = (const unsigned char *)g->w->codes + at * g->groups * bytes;
    unsigned char room[QC_GEMV_GROUP];
    float lanes[QC_GEMV_ROWS][8];
    memset(lanes, 0, sizeof lanes);
    for (uint64_t i = 0; i < g->groups; i++, codes += bytes) {
        const uint64_t block = g->halves ? first + 2 * i : first + (i >> g->shift);
        const float s[2] = {qc_gemv_scale(g, block, nested),
                            qc_gemv_scale(g, block + (g->halves ? 1 : 0), nested)};
        for (unsigned m = 0; m < g->m; m++) {
            const int16_t *x = g->x + (i * g->m + m) * QC_GEMV_GROUP;
            const float xs = g->x_scales[i * g->m + m];
            int32_t sum[2][8];
            sum_group(g, qc_gemv_codes(g, codes, room), x, sum);
            for (unsigned h = 0; h < (g->halves ? 2u : 1u); h++)
                for (unsigned l = four ? 4 * h : 0; l < (four && g->halves && h == 0 ? 4u : 8u);
                     l++)
                    lanes[m][l] = fmaf((float)sum[h][l], s[h] * xs, lanes[m][l]);
        }
    }
    for (unsigned m = 0; m < g->m; m++) {
        const float *v = lanes[m];
        sums[m] = ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
    }
}

static void rows(const qc_gemv *g, uint64_t first, unsigned count, float *sums)
{
    for (unsigned r = 0; r < count; r++)
        row(g, first + r, sums + r * g->m);
}

const qc_gemv_ops qc_gemv_ops_scalar = {QC_ISA_SCALAR, rows};
