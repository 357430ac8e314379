/* Globs over tensor names and the order of names. Matching and comparing neither allocate nor
 * recurse, because names and globs may come from anywhere. */
#include "convert/term/glob.h"

#include "base/text.h"

#include <stdlib.h>
#include <string.h>

/* Looks at one element of a glob that matches exactly one byte: a literal, an escape, '?' or a
 * class. It sets *len to the element's bytes and returns whether c matches. An unclosed '[' is an
 * ordinary '['. No later one can be closed either, so *unclosed remembers the first, and no tail is
 * scanned twice per step. */
static int match_one(const char *g, unsigned char c, size_t *len, const char **unclosed)
{
    *len = 1;
    if (*g == '?')
        return 1;
    if (*g == '\\' && g[1]) {
        *len = 2;
        return (unsigned char)g[1] == c;
    }
    if (*g != '[' || (*unclosed && g >= *unclosed))
        return (unsigned char)*g == c;
    const char *p = g + 1;
    int negate = *p == '!' || *p == '^';
    p += negate;
    int found = 0;
    for (int first = 1; *p && (*p != ']' || first); first = 0) {
        if (*p == '\\' && p[1])
            p++;
        unsigned char low = (unsigned char)*p++;
        unsigned char high = low;
        if (*p == '-' && p[1] && p[1] != ']') {
            p++;
            if (*p == '\\' && p[1])
                p++;
            high = (unsigned char)*p++;
        }
        found |= low <= c && c <= high;
    }
    if (!*p) {
        *unclosed = g;
        return c == '[';
    }
    *len = (size_t)(p + 1 - g);
    return found != negate;
}

int qc_glob_match(const char *glob, const char *name)
{
    const char *star = NULL;   /* behind the last '*' seen */
    const char *resume = NULL; /* where in the name the run of that '*' may end next */
    const char *unclosed = NULL;
    for (;;) {
        if (*glob == '*') {
            star = ++glob;
            resume = name;
            continue;
        }
        if (!*name) {
            if (!*glob)
                return 1;
        } else if (*glob) {
            size_t len = 1;
            if (match_one(glob, (unsigned char)*name, &len, &unclosed)) {
                glob += len;
                name++;
                continue;
            }
        }
        /* Only the last '*' needs to be tried again, because what comes before it matched as early
         * as possible. If an ordinary byte follows it, that byte says where it can end. */
        if (!star || !*resume)
            return 0;
        resume++;
        if (*star && !strchr("*?[\\", *star)) {
            resume = strchr(resume, *star);
            if (!resume)
                return 0;
        }
        glob = star;
        name = resume;
    }
}

/* Compares the digit runs at *a and *b as numbers of any length, and steps over them. */
static int compare_runs(const char **a, const char **b)
{
    const char *p = *a, *q = *b;
    while (*p == '0')
        p++;
    while (*q == '0')
        q++;
    size_t m = 0, n = 0;
    while (qc_is_digit(p[m]))
        m++;
    while (qc_is_digit(q[n]))
        n++;
    *a = p + m;
    *b = q + n;
    if (m != n)
        return m < n ? -1 : 1;
    return memcmp(p, q, m);
}

int qc_natural_compare(const char *a, const char *b)
{
    const char *p = a, *q = b;
    while (*p && *q) {
        if (qc_is_digit(*p) && qc_is_digit(*q)) {
            int c = compare_runs(&p, &q);
            if (c)
                return c;
        } else if (*p == *q) {
            p++;
            q++;
        } else {
            return (unsigned char)*p < (unsigned char)*q ? -1 : 1;
        }
    }
    if (*p || *q)
        return *p ? 1 : -1;
    return strcmp(a, b); /* "01" and "1" differ */
}

int qc_by_natural(const void *a, const void *b)
{
    return qc_natural_compare(*(const char *const *)a, *(const char *const *)b);
}

typedef struct {
    const char *name;
    uint32_t index;
} named_index;

qc_status qc_natural_order(uint32_t **order, qc_arena *arena, const void *structs,
                           size_t name_offset, size_t bytes_each, size_t count, qc_error *err)
{
    named_index *names = NULL;
    QC_TRY(qc_arena_array(arena, order, count, err));
    QC_TRY(qc_arena_array(arena, &names, count, err));
    for (size_t i = 0; i < count; i++) {
        const char *s = (const char *)structs + i * bytes_each;
        memcpy(&names[i].name, s + name_offset, sizeof names[i].name);
        names[i].index = (uint32_t)i;
    }
    if (count > 0)
        qsort(names, count, sizeof *names, qc_by_natural);
    for (size_t i = 0; i < count; i++)
        (*order)[i] = names[i].index;
    return QC_OK;
}
