#include "base/edit_distance.h"

#include "base/text.h"

static int same(char a, char b)
{
    return qc_lower(a) == qc_lower(b);
}

static unsigned smaller(unsigned a, unsigned b)
{
    return a < b ? a : b;
}

unsigned qc_edit_distance(const char *a, size_t a_len, const char *b, size_t b_len)
{
    unsigned rows[3][QC_EDIT_MAX_BYTES + 1]; /* row i is for the first i letters of a */
    if (a_len > QC_EDIT_MAX_BYTES || b_len > QC_EDIT_MAX_BYTES)
        return QC_EDIT_TOO_LONG;
    for (size_t j = 0; j <= b_len; j++)
        rows[0][j] = (unsigned)j;
    for (size_t i = 1; i <= a_len; i++) {
        unsigned *now = rows[i % 3];
        const unsigned *up = rows[(i - 1) % 3], *up2 = rows[(i + 1) % 3];
        now[0] = (unsigned)i;
        for (size_t j = 1; j <= b_len; j++) {
            unsigned best = up[j - 1] + !same(a[i - 1], b[j - 1]);
            best = smaller(best, smaller(up[j], now[j - 1]) + 1);
            if (i > 1 && j > 1 && same(a[i - 1], b[j - 2]) && same(a[i - 2], b[j - 1]))
                best = smaller(best, up2[j - 2] + 1);
            now[j] = best;
        }
    }
    return rows[a_len % 3][b_len];
}
