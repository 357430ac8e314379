#include "formats/json_writer.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DIGITS_MAX 17

/* Rounds |v| (finite, not 0) to n significant digits; returns the exponent of the first digit. */
static int round_digits(double v, int n, char digits[DIGITS_MAX + 1], int *exponent)
{
    char text[QC_PY_REPR_BYTES];
    (void)snprintf(text, sizeof text, "%.*e", n - 1, v);
    int len = 0;
    for (const char *p = text; *p && *p != 'e'; p++) {
        if (*p >= '0' && *p <= '9') /* this skips the point, whatever the locale calls it */
            digits[len++] = *p;
    }
    digits[len] = '\0';
    *exponent = (int)strtol(strchr(text, 'e') + 1, NULL, 10);
    /* The comparison is exact on purpose: it asks whether the text reads back. */
    return strtod(text, NULL) == v;
}

/* Above a power of two, doubles lie twice as far apart as below it. So the next decimal above the
 * nearest one may read back where the nearest, which is below, does not. */
static int next_digits_up(double v, int n, char digits[DIGITS_MAX + 1], int exponent)
{
    char text[QC_PY_REPR_BYTES];
    int power = 0;
    int i = n - 1;
    if (frexp(v, &power) > 0.5)
        return 0;
    for (; i > 0 && digits[i] == '9'; i--)
        digits[i] = '0';
    digits[i]++; /* all digits 9 cannot occur: then the digits are those of 10^k */
    (void)snprintf(text, sizeof text, "%se%d", digits, exponent - n + 1);
    return strtod(text, NULL) == v;
}

size_t qc_py_repr_double(double v, char buf[QC_PY_REPR_BYTES])
{
    char digits[DIGITS_MAX + 1] = "0";
    int exponent = 0, n;
    const char *sign = signbit(v) ? "-" : "";
    double magnitude = fabs(v);
    if (!isfinite(v)) /* this is outside the contract, but Python spells it so */
        return (size_t)snprintf(buf, QC_PY_REPR_BYTES, "%s",
                                isnan(v) ? "nan"
                                : v > 0  ? "inf"
                                         : "-inf");
    /* Up to 15 digits survive a double, so where 15 read back, the shortest are those 15 without
     * their trailing zeros; subnormal numbers hold fewer. */
    n = magnitude < DBL_MIN ? 1 : DBL_DIG;
    while (magnitude > 0 && !round_digits(magnitude, n, digits, &exponent) && n < DIGITS_MAX &&
           !next_digits_up(magnitude, n, digits, exponent))
        n++;
    int len = (int)strlen(digits);
    while (len > 1 && digits[len - 1] == '0')
        digits[--len] = '\0';
    if (exponent < -4 || exponent >= 16)
        n = snprintf(buf, QC_PY_REPR_BYTES, "%s%.1s%s%se%c%02d", sign, digits, len > 1 ? "." : "",
                     digits + 1, exponent < 0 ? '-' : '+', abs(exponent));
    else if (exponent < 0)
        n = snprintf(buf, QC_PY_REPR_BYTES, "%s0.%.*s%s", sign, -exponent - 1, "000", digits);
    else if (len <= exponent + 1)
        n = snprintf(buf, QC_PY_REPR_BYTES, "%s%s%.*s.0", sign, digits, exponent + 1 - len,
                     "000000000000000");
    else
        n = snprintf(buf, QC_PY_REPR_BYTES, "%s%.*s.%s", sign, exponent + 1, digits,
                     digits + exponent + 1);
    return (size_t)n;
}
