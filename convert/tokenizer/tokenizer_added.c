/* Finds added tokens in the text before anything else is done to it. Of all that begin at the
 * leftmost place, the longest is taken. */
#include "convert/tokenizer/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

int qc_is_white_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0d) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
           c == 0x205f || c == 0x3000;
}

/* Orders patterns by their bytes. Among equal texts, special ones come first, and then the order
 * stays. */
static int compare(const void *a, const void *b)
{
    const qc_added_pattern *x = a, *y = b;
    size_t common = x->pattern.len < y->pattern.len ? x->pattern.len : y->pattern.len;
    int order = memcmp(x->pattern.text, y->pattern.text, common);
    if (order != 0)
        return order;
    if (x->pattern.len != y->pattern.len)
        return x->pattern.len < y->pattern.len ? -1 : 1;
    if (x->token->special != y->token->special)
        return x->token->special ? -1 : 1;
    return (x->token > y->token) - (x->token < y->token);
}

void qc_added_set_sort(qc_added_set *set)
{
    size_t i = 0;
    if (set->count > 1)
        qsort(set->patterns, set->count, sizeof *set->patterns, compare);
    for (unsigned byte = 0; byte < 256; byte++) {
        set->first[byte] = i;
        while (i < set->count && (unsigned char)set->patterns[i].pattern.text[0] == byte)
            i++;
    }
    set->first[256] = i;
}

/* The first pattern in [low, high) that has `byte` or a larger byte at `place`. All of these
 * patterns are longer than `place`. */
static size_t first_with(const qc_added_set *set, size_t low, size_t high, size_t place,
                         unsigned byte)
{
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if ((unsigned char)set->patterns[middle].pattern.text[place] < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Finds the longest token that begins at s.text[at], or NULL. It goes byte by byte through the
 * patterns that still match. */
static qc_status find_at(const qc_added_set *set, qc_token_budget *budget, qc_span s, size_t at,
                         const qc_added_pattern **found, qc_error *err)
{
    unsigned char byte = (unsigned char)s.text[at];
    size_t low = set->first[byte], high = set->first[byte + 1], place = 1;
    *found = NULL;
    for (; low < high; place++) {
        /* Patterns as long as what was read come first, and among equal texts the first one
         * counts. */
        if (set->patterns[low].pattern.len == place)
            *found = &set->patterns[low];
        while (low < high && set->patterns[low].pattern.len == place)
            low++;
        if (at + place == s.len)
            break;
        byte = (unsigned char)s.text[at + place];
        low = first_with(set, low, high, place, byte);
        high = first_with(set, low, high, place, byte + 1u);
    }
    return qc_token_budget_spend(budget, 8 * place) ? QC_OK : qc_token_budget_check(budget, err);
}

/* Where the character begins that ends at `end` > 0. */
static size_t character_before(qc_span s, size_t end)
{
    size_t at = end - 1;
    while (at > 0 && ((unsigned char)s.text[at] & 0xc0) == 0x80)
        at--;
    return at;
}

static uint32_t character_at(qc_span s, size_t at, size_t *bytes)
{
    utf8proc_int32_t c = 0;
    utf8proc_ssize_t n =
        utf8proc_iterate((const utf8proc_uint8_t *)s.text + at, (utf8proc_ssize_t)(s.len - at), &c);
    *bytes = n > 0 ? (size_t)n : 1;
    return n > 0 ? (uint32_t)c : 0;
}

static qc_status is_word(const qc_pattern *word, qc_encoder *e, qc_span s, size_t at, int *is,
                         qc_error *err)
{
    size_t begin = 0, end = 0, bytes = 0;
    (void)character_at(s, at, &bytes);
    return qc_pattern_find(word, e->matcher, (qc_span){s.text + at, bytes}, 0, is, &begin, &end,
                           err);
}

/* Does [begin, end) stand by itself, as a whole word? */
static qc_status stands_alone(const qc_pattern *word, qc_encoder *e, qc_span s, size_t begin,
                              size_t end, int *alone, qc_error *err)
{
    int before = 0, after = 0;
    if (begin > 0)
        QC_TRY(is_word(word, e, s, character_before(s, begin), &before, err));
    if (end < s.len)
        QC_TRY(is_word(word, e, s, end, &after, err));
    *alone = !before && !after;
    return QC_OK;
}

/* It does not go beyond `end`. */
static size_t spaces_before(qc_span s, size_t at, size_t end)
{
    while (at > end) {
        size_t bytes = 0, before = character_before(s, at);
        if (!qc_is_white_space(character_at(s, before, &bytes)))
            break;
        at = before;
    }
    return at;
}

static size_t spaces_after(qc_span s, size_t at)
{
    size_t bytes = 0;
    while (at < s.len && qc_is_white_space(character_at(s, at, &bytes)))
        at += bytes;
    return at;
}

qc_status qc_added_split(const qc_added_set *set, const qc_pattern *word, qc_encoder *e, qc_span s,
                         qc_added_fn fn, qc_error *err)
{
    size_t done = 0;
    for (size_t at = 0; at < s.len && set->count > 0;) {
        const qc_added_pattern *p = NULL;
        QC_TRY(find_at(set, &e->budget, s, at, &p, err));
        if (!p) {
            at++;
            continue;
        }
        size_t begin = at, end = at + p->pattern.len;
        at = end;
        if (p->token->single_word) {
            int alone = 0;
            QC_TRY(stands_alone(word, e, s, begin, end, &alone, err));
            if (!alone)
                continue;
        }
        if (p->token->lstrip)
            begin = begin > done ? spaces_before(s, begin, done) : done;
        if (p->token->rstrip)
            end = spaces_after(s, end);
        /* A token of spaces may lead through the same spaces again. */
        if (!qc_token_budget_spend(&e->budget, end - at))
            QC_TRY(qc_token_budget_check(&e->budget, err));
        if (begin > done)
            QC_TRY(fn(e, (qc_span){s.text + done, begin - done}, NULL, err));
        QC_TRY(fn(e, (qc_span){s.text + begin, end > begin ? end - begin : 0}, p->token, err));
        done = end;
    }
    return done < s.len ? fn(e, (qc_span){s.text + done, s.len - done}, NULL, err) : QC_OK;
}
