/* Small questions about strings, and which characters of a foreign text may be shown.
 * Thread-safe: yes (no shared state). */
#ifndef QC_BASE_TEXT_H
#define QC_BASE_TEXT_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Returns whether s ends in tail. Every string ends in "". */
static inline int qc_ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), m = strlen(tail);
    return n >= m && memcmp(s + n - m, tail, m) == 0;
}

static inline int qc_begins_with(const char *s, const char *start)
{
    return strncmp(s, start, strlen(start)) == 0;
}

static inline int qc_is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Returns the small letter for a capital one of ASCII, else c. */
static inline char qc_lower(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

/* Returns the ending of a noun that is counted: "1 file", "2 files". */
static inline const char *qc_plural(uint64_t count)
{
    return count == 1 ? "" : "s";
}

static inline const char *qc_are(uint64_t count)
{
    return count == 1 ? "is" : "are";
}

/* Returns the part of a path behind its last slash. */
const char *qc_last_name(const char *path);
/* Writes the folder that holds what a path names: "." and "/" where there is no other. Returns it,
 * or NULL if it is too long. */
const char *qc_folder_of(char out[PATH_MAX], const char *path);
/* Returns whether the path is relative and none of its parts is empty, "." or "..". */
int qc_is_plain_path(const char *path);

/* Compares two texts, or two structs whose first member is a text; for qsort and bsearch. */
int qc_by_text(const void *a, const void *b);
/* The same for pointers to such structs. */
int qc_by_text_behind(const void *a, const void *b);
/* Returns the index of the first element of an array sorted so that has the same text as the one
 * before it, or 0 if there is none. */
size_t qc_find_twice(const void *sorted, size_t count, size_t bytes_each);

/* Stores the code point of the UTF-8 character at s in *c and returns its number of bytes, or 0 if
 * the bytes are not UTF-8 (RFC 3629: shortest form, no surrogates). The end of the string counts as
 * the character 0 of one byte. */
size_t qc_text_char(const char *s, uint32_t *c);
int qc_text_is_utf8(const char *s);
/* True for characters that act on the display instead of being seen: C0, DEL and C1 (a terminal's
 * escapes), line separators, and marks and overrides of the writing direction. It is true as well
 * for all characters that Unicode wants to be drawn as nothing (Default_Ignorable_Code_Point),
 * because each of them makes one name look like another. */
int qc_text_is_control(uint32_t c);
/* Replaces each byte of such characters, and each byte that is not UTF-8, by '?', in place. */
void qc_text_printable(char *s);

/* Returns name if it consists of letters, digits, '.', '_', '-' and '/' only, else `other`. For
 * commands in a message, which somebody may paste into a shell. */
const char *qc_text_word_or(const char *name, const char *other);

#endif
