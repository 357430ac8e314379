#include "convert/term/size_text.h"

#include "base/checked.h"
#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The value of the suffix at s, or 0 if it is not known. */
static uint64_t suffix_bytes(const char *s)
{
    static const char prefixes[] = "kmgt";
    if (*s == '\0' || (qc_lower(*s) == 'b' && s[1] == '\0'))
        return 1;
    const char *p = strchr(prefixes, qc_lower(*s));
    if (!p)
        return 0;
    s++;
    uint64_t step = 1000;
    if (qc_lower(*s) == 'i') {
        step = 1024;
        s++;
    }
    if (qc_lower(*s) == 'b')
        s++;
    if (*s != '\0')
        return 0;
    uint64_t unit = 1;
    for (const char *q = prefixes; q <= p; q++)
        unit *= step;
    return unit;
}

/* Writes "1,5GB", as much of the world writes it, with a point. It does not do so for "40,960MB",
 * where the comma is no decimal one. */
static int with_point(char out[32], const char *text)
{
    uint64_t bytes = 0;
    const char *comma = strchr(text, ',');
    if (!comma || strlen(text) >= 32 || strspn(comma + 1, "0123456789") > 2)
        return 0;
    memcpy(out, text, strlen(text) + 1);
    out[comma - text] = '.';
    return qc_parse_size(out, "", &bytes, NULL) == QC_OK;
}

qc_status qc_parse_size(const char *text, const char *what, uint64_t *out, qc_error *err)
{
    /* Six digits after the point times the largest unit (2^40) stay below 2^64. */
    enum { MAX_FRACTION_DIGITS = 6 };
    const char *s = text;
    uint64_t whole = 0, fraction = 0, scale = 1, bytes = 0;
    int digits = 0, fraction_digits = 0, too_large = 0;
    for (; *s >= '0' && *s <= '9'; s++, digits++)
        too_large |=
            qc_mul_u64(whole, 10, &whole) || qc_add_u64(whole, (uint64_t)(*s - '0'), &whole);
    if (*s == '.') {
        s++;
        for (; *s >= '0' && *s <= '9'; s++, fraction_digits++) {
            if (fraction_digits < MAX_FRACTION_DIGITS) {
                fraction = fraction * 10 + (uint64_t)(*s - '0');
                scale *= 10;
            }
        }
    }
    int has_point_only = digits == 0 || (s[-1] == '.');
    if (*s == ' ' && s[1] != ' ' && s[1] != '\0')
        s++;
    uint64_t unit = suffix_bytes(s);
    if (has_point_only || unit == 0 || fraction_digits > MAX_FRACTION_DIGITS ||
        (unit == 1 && fraction_digits > 0)) {
        char meant[32];
        int near = with_point(meant, text);
        QC_FAIL(err, QC_ERR_USAGE,
                "%s: expected a size such as 5GB, 512MiB or 4096, got '%s'%s%s%s", what, text,
                near ? "; did you mean " : "", near ? meant : "", near ? "?" : "");
    }
    if (too_large || qc_mul_u64(whole, unit, &bytes) ||
        qc_add_u64(bytes, fraction * unit / scale, &bytes))
        QC_FAIL(err, QC_ERR_USAGE, "%s: expected less than 2^64 bytes, got '%s'", what, text);
    *out = bytes;
    return QC_OK;
}

/* Writes value / unit with three digits and the unit's name. */
static void three_digits(char out[QC_SIZE_TEXT_BYTES], double value, const char *tail)
{
    static const char *const units[] = {"B", "KB", "MB", "GB", "TB", "PB", "EB"};
    unsigned u = 0;
    /* Without this, 999.5 would be printed as 1000. */
    while (value >= 999.5 && u + 1 < sizeof units / sizeof *units) {
        value /= 1000.0;
        u++;
    }
    int decimals = u == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
    (void)snprintf(out, QC_SIZE_TEXT_BYTES, "%.*f %s%s", decimals, value, units[u], tail);
}

const char *qc_text_bytes(char out[QC_SIZE_TEXT_BYTES], uint64_t bytes)
{
    three_digits(out, (double)bytes, "");
    return out;
}

const char *qc_text_rate(char out[QC_SIZE_TEXT_BYTES], uint64_t bytes, double seconds)
{
    if (seconds > 0.0)
        three_digits(out, (double)bytes / seconds, "/s");
    else
        (void)snprintf(out, QC_SIZE_TEXT_BYTES, "-");
    return out;
}

const char *qc_text_seconds(char out[QC_SIZE_TEXT_BYTES], double seconds)
{
    if (!(seconds >= 0.0))
        seconds = 0.0;
    if (seconds > 1e9)
        seconds = 1e9;
    if (seconds < 59.95) {
        (void)snprintf(out, QC_SIZE_TEXT_BYTES, "%.*f s", seconds < 9.995 ? 2 : 1, seconds);
        return out;
    }
    uint64_t s = (uint64_t)(seconds + 0.5);
    if (s < 3600)
        (void)snprintf(out, QC_SIZE_TEXT_BYTES, "%" PRIu64 ":%02" PRIu64 " min", s / 60, s % 60);
    else
        (void)snprintf(out, QC_SIZE_TEXT_BYTES, "%" PRIu64 ":%02" PRIu64 ":%02" PRIu64 " h",
                       s / 3600, s / 60 % 60, s % 60);
    return out;
}

const char *qc_text_count(char out[QC_SIZE_TEXT_BYTES], uint64_t count)
{
    char digits[QC_SIZE_TEXT_BYTES];
    int n = snprintf(digits, sizeof digits, "%" PRIu64, count);
    char *o = out;
    for (int i = 0; i < n; i++) {
        if (i > 0 && (n - i) % 3 == 0)
            *o++ = ',';
        *o++ = digits[i];
    }
    *o = '\0';
    return out;
}

const char *qc_text_shape(char out[QC_SHAPE_TEXT_BYTES], const uint64_t *dims, unsigned ndim)
{
    size_t used = 1;
    out[0] = '[';
    for (unsigned i = 0; i < ndim; i++) {
        int n =
            snprintf(out + used, QC_SHAPE_TEXT_BYTES - used, "%s%" PRIu64, i ? ", " : "", dims[i]);
        used += n > 0 ? (size_t)n : 0;
    }
    (void)snprintf(out + used, QC_SHAPE_TEXT_BYTES - used, "]");
    return out;
}
