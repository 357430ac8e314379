/* The cases that the integer products with vectors have code for: rows of x, bits of a code, blocks
 * of 32, double quantization. Each file includes this once, after it has defined AT_ONCE, the rows
 * of W that it takes together (1 or 2), and rows_of. It has no include guard. */

INLINE void of_scales(const qc_gemv *g, uint64_t at, float *const sums[2], unsigned rows, int four)
{
    const int nested = g->w->form.nested;
    if (g->halves)
        nested ? rows_of(g, at, sums, rows, four, 1, 1) : rows_of(g, at, sums, rows, four, 1, 0);
    else
        nested ? rows_of(g, at, sums, rows, four, 0, 1) : rows_of(g, at, sums, rows, four, 0, 0);
}

INLINE void of_rows(const qc_gemv *g, uint64_t at, float *const sums[2], int four)
{
    switch (g->m) {
    case 1:
        of_scales(g, at, sums, 1, four);
        break;
    case 2:
        of_scales(g, at, sums, 2, four);
        break;
    case 4:
        of_scales(g, at, sums, 4, four);
        break;
    default:
        of_scales(g, at, sums, 8, four);
        break;
    }
}

static void rows(const qc_gemv *g, uint64_t first, unsigned count, float *sums)
{
    for (unsigned r = 0; r < count; r += AT_ONCE) {
        const unsigned last = r + AT_ONCE - 1 < count ? r + AT_ONCE - 1 : r;
        float *const to[2] = {sums + r * g->m, sums + last * g->m};
        if (g->w->form.ops->bits == 4)
            of_rows(g, first + r, to, 1);
        else
            of_rows(g, first + r, to, 0);
    }
}
