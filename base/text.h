/* Small questions about strings, and what of a text from elsewhere may be shown.
 * Thread-safe: yes (no shared state). */
#ifndef QC_BASE_TEXT_H
#define QC_BASE_TEXT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Does s end in tail? Every string ends in "". */
static inline int qc_ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), m = strlen(tail);
    return n >= m && memcmp(s + n - m, tail, m) == 0;
}

/* Bytes of the UTF-8 character at s and its code point, 0 where there is none (RFC 3629: shortest
 * form, no surrogates). The end of the string is the character 0, one byte. */
size_t qc_text_char(const char *s, uint32_t *c);
int qc_text_is_utf8(const char *s);
/* Characters that do something to whoever shows them instead of being seen: C0, DEL and C1 (a
 * terminal's escapes), separators of lines, marks and overrides of the direction of writing; and
 * all that Unicode wants nothing to be drawn for (Default_Ignorable_Code_Point): each of them makes
 * a name look like another. */
int qc_text_is_control(uint32_t c);
/* Such characters, and bytes that are no UTF-8, to '?', a byte each, in place. */
void qc_text_printable(char *s);

/* name where it consists of letters, digits, '.', '_', '-' and '/', else other: for commands in a
 * message, which somebody may paste into a shell. */
const char *qc_text_word_or(const char *name, const char *other);

#endif
