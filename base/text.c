#include "base/text.h"

const char *qc_last_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

const char *qc_folder_of(char out[PATH_MAX], const char *path)
{
    size_t n = (size_t)(qc_last_name(path) - path);
    if (n > PATH_MAX)
        return NULL;
    n -= n > 1; /* without the slash, but "/" holds "/name" */
    memcpy(out, n ? path : ".", n ? n : 1);
    out[n ? n : 1] = '\0';
    return out;
}

int qc_is_plain_path(const char *path)
{
    for (const char *p = path;;) {
        size_t n = strcspn(p, "/");
        if (n == 0 || (n == 1 && p[0] == '.') || (n == 2 && p[0] == '.' && p[1] == '.'))
            return 0;
        if (p[n] == '\0')
            return 1;
        p += n + 1;
    }
}

int qc_by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

int qc_by_text_behind(const void *a, const void *b)
{
    return qc_by_text(*(const void *const *)a, *(const void *const *)b);
}

size_t qc_find_twice(const void *sorted, size_t count, size_t bytes_each)
{
    const char *at = sorted;
    for (size_t i = 1; i < count; i++, at += bytes_each) {
        if (qc_by_text(at, at + bytes_each) == 0)
            return i;
    }
    return 0;
}

size_t qc_text_char(const char *s, uint32_t *c)
{
    static const struct {
        unsigned char mask, lead;
        uint32_t least;
    } forms[] = {{0x80, 0x00, 0}, {0xe0, 0xc0, 0x80}, {0xf0, 0xe0, 0x800}, {0xf8, 0xf0, 0x10000}};
    const unsigned char *p = (const unsigned char *)s;
    for (size_t n = 0; n < sizeof forms / sizeof *forms; n++) {
        if ((p[0] & forms[n].mask) != forms[n].lead)
            continue;
        uint32_t v = p[0] & (unsigned char)~forms[n].mask;
        for (size_t i = 1; i <= n; i++) {
            if ((p[i] & 0xc0) != 0x80)
                return 0;
            v = v << 6 | (p[i] & 0x3f);
        }
        if (v < forms[n].least || v > 0x10ffff || (v >= 0xd800 && v < 0xe000))
            return 0;
        *c = v;
        return n + 1;
    }
    return 0;
}

int qc_text_is_control(uint32_t c)
{
    static const struct {
        uint32_t first, last;
    } ranges[] = {
        {0x00, 0x1f},       {0x7f, 0x9f},       /* C0, DEL, C1 */
        {0xad, 0xad},                           /* soft hyphen */
        {0x034f, 0x034f},                       /* combining grapheme joiner */
        {0x061c, 0x061c},                       /* a mark of direction */
        {0x115f, 0x1160},   {0x17b4, 0x17b5},   /* fillers and vowels that are invisible */
        {0x180b, 0x180f},                       /* Mongolian variation selectors */
        {0x200b, 0x200f},                       /* zero width, direction marks */
        {0x2028, 0x202e},                       /* line separators, direction overrides */
        {0x2060, 0x206f},                       /* zero width, direction isolates */
        {0x3164, 0x3164},   {0xfe00, 0xfe0f},   /* a filler, variation selectors */
        {0xfeff, 0xfeff},   {0xffa0, 0xffa0},   /* byte order mark, a filler */
        {0xfff0, 0xfffb},                       /* annotations */
        {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a}, /* format characters of shorthand and music */
        {0xe0000, 0xe0fff},                     /* tags, more selectors */
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        if (c >= ranges[i].first && c <= ranges[i].last)
            return 1;
    }
    return 0;
}

int qc_text_is_utf8(const char *s)
{
    uint32_t c = 0;
    size_t n = 1;
    for (; *s && n; s += n)
        n = qc_text_char(s, &c);
    return n != 0;
}

void qc_text_printable(char *s)
{
    while (*s) {
        uint32_t c = 0;
        size_t n = qc_text_char(s, &c);
        if (n && !qc_text_is_control(c)) {
            s += n;
            continue;
        }
        for (size_t i = 0; i < (n ? n : 1); i++)
            *s++ = '?';
    }
}

const char *qc_text_word_or(const char *name, const char *other)
{
    static const char plain[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/";
    return *name && name[strspn(name, plain)] == '\0' ? name : other;
}
