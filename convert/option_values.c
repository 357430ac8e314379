#include "convert/option_values.h"

#include <inttypes.h>
#include <string.h>

/* "nf4, int8, fp16 or bf16" */
void qc_option_list_choices(const qc_option_row *row, char *out, size_t out_bytes)
{
    out[0] = '\0';
    size_t used = 0;
    for (unsigned i = 0; i < QC_MAX_CHOICES && row->choices[i]; i++) {
        int last = i + 1 == QC_MAX_CHOICES || !row->choices[i + 1];
        const char *between = i == 0 ? "" : last ? " or " : ", ";
        size_t need = strlen(between) + strlen(row->choices[i]);
        if (used + need >= out_bytes)
            break;
        memcpy(out + used, between, strlen(between));
        memcpy(out + used + strlen(between), row->choices[i], strlen(row->choices[i]) + 1);
        used += need;
    }
}

qc_status qc_option_number(const qc_option_row *row, const char *text, const char *digits,
                           uint64_t min, uint64_t max, uint64_t *out, qc_error *err)
{
    uint64_t v = 0;
    const char *s = digits;
    for (; *s >= '0' && *s <= '9' && v <= max; s++)
        v = v * 10 + (uint64_t)(*s - '0');
    if (s == digits || *s != '\0' || v < min || v > max)
        QC_FAIL(err, QC_ERR_USAGE, "--%s: expected %s from %" PRIu64 " to %" PRIu64 ", got '%s'",
                row->name, digits == text ? "a whole number" : "zstd:LEVEL with a level", min, max,
                text);
    *out = v;
    return QC_OK;
}

qc_status qc_option_choice(const qc_option_row *row, const char *text, unsigned *out, qc_error *err)
{
    char choices[QC_SPELLED_BYTES];
    for (unsigned i = 0; i < QC_MAX_CHOICES && row->choices[i]; i++) {
        if (strcmp(text, row->choices[i]) == 0) {
            *out = i;
            return QC_OK;
        }
    }
    qc_option_list_choices(row, choices, sizeof choices);
    QC_FAIL(err, QC_ERR_USAGE, "--%s: expected %s, got '%s'", row->name, choices, text);
}

/* "0.85": digits with at most one point, no sign, no exponent; min is allowed only if above 0. */
qc_status qc_option_decimal(const qc_option_row *row, const char *text, double min, double max,
                            double *out, qc_error *err)
{
    double v = 0, unit = 1;
    int digits = 0, point = 0;
    const char *s = text;
    for (; (*s >= '0' && *s <= '9') || (*s == '.' && !point); s++) {
        if (*s == '.') {
            point = 1;
            continue;
        }
        digits++;
        v = v * 10 + (*s - '0');
        if (point)
            unit *= 10;
    }
    v /= unit;
    if (*s != '\0' || digits == 0 || digits > 15 || v < min || v > max || v <= 0)
        QC_FAIL(err, QC_ERR_USAGE, "--%s: expected a number %s %g and at most %g, got '%s'",
                row->name, min > 0 ? "of at least" : "above", min, max, text);
    *out = v;
    return QC_OK;
}

qc_status qc_option_path(const qc_option_row *row, const char *value, const char **out,
                         qc_error *err)
{
    if (*value == '\0')
        QC_FAIL(err, QC_ERR_USAGE, "--%s: the path is empty", row->name);
    *out = value;
    return QC_OK;
}

qc_status qc_option_number_list(const qc_option_row *row, const char *text, qc_arena *arena,
                                uint64_t **out, unsigned *count, qc_error *err)
{
    size_t room = 1, n = 0;
    for (const char *s = text; *s; s++)
        room += *s == ',';
    void *v = NULL;
    QC_TRY(qc_arena_alloc(arena, &v, room, sizeof(uint64_t), err));
    uint64_t *list = v;
    for (const char *entry = text;; entry++) {
        char digits[24];
        size_t len = strcspn(entry, ",");
        size_t kept = len < sizeof digits ? len : 0; /* too long is no number here either */
        memcpy(digits, entry, kept);
        digits[kept] = '\0';
        QC_TRY(qc_option_number(row, digits, digits, row->min, row->max, &list[n], err));
        for (size_t i = 0; i < n; i++)
            if (list[i] == list[n])
                QC_FAIL(err, QC_ERR_USAGE, "--%s: %" PRIu64 " is there twice in '%s'", row->name,
                        list[n], text);
        n++;
        entry += len;
        if (*entry == '\0')
            break;
    }
    *out = list;
    *count = (unsigned)n;
    return QC_OK;
}

qc_status qc_option_part(const qc_option_row *row, const char *value, unsigned *index,
                         unsigned *count, qc_error *err)
{
    char part[24] = "";
    uint64_t i = 0, n = 0;
    const char *slash = strchr(value, '/');
    size_t len = slash ? (size_t)(slash - value) : 0;
    if (len > 0 && len < sizeof part)
        memcpy(part, value, len);
    /* The whole of it is shown: of 3/2 either number may be the one that is wrong. */
    if (!*part || qc_option_number(row, slash + 1, slash + 1, 1, QC_PARTS_MAX, &n, NULL) != QC_OK ||
        qc_option_number(row, part, part, 1, n, &i, NULL) != QC_OK)
        QC_FAIL(err, QC_ERR_USAGE,
                "--%s: expected I/N, like 1/4, with I from 1 to N and N up to %u, got '%s'",
                row->name, QC_PARTS_MAX, value);
    *index = (unsigned)(i - 1);
    *count = (unsigned)n;
    return QC_OK;
}
