/* Any text as tokenizer.json (up to the first NUL byte, all of it without one), any bytes behind it
 * as what it is to read: refused in words, or ids below the vocabulary, twice the same. */
#include "base/alloc.h"
#include "convert/tokenizer/tokenizer.h"
#include "fuzz_check.h"

#include <string.h>

#define TEXT_MOST 4096u /* normalizers may multiply it */

static void encode(const qc_tokenizer *t, const char *text, size_t len, int specials)
{
    uint32_t *ids = NULL, *again = NULL;
    size_t count = 0, again_count = 0;
    qc_error err = {0};
    qc_status st = qc_tokenizer_encode(t, text, len, specials, &ids, &count, &err);
    FUZZ_CHECK(st == QC_OK || (err.msg[0] && !ids && count == 0));
    if (st == QC_OK) {
        for (size_t i = 0; i < count; i++)
            FUZZ_CHECK(ids[i] < qc_tokenizer_vocabulary(t));
        FUZZ_CHECK(qc_tokenizer_encode(t, text, len, specials, &again, &again_count, NULL) ==
                   QC_OK);
        FUZZ_CHECK(count == again_count && (count == 0 || memcmp(ids, again, count * 4) == 0));
    }
    qc_free(ids);
    qc_free(again);
}

const fuzz_limits fuzz_may_allocate = {16u << 20, 4096};

int fuzz_one(const uint8_t *data, size_t size)
{
    qc_tokenizer *t = NULL;
    qc_error err = {0};
    const char *json = (const char *)data;
    const uint8_t *nul = size ? memchr(data, 0, size) : NULL;
    size_t len = nul ? (size_t)(nul - data) : size;
    const char *text = nul ? (const char *)nul + 1 : "a b<s> 12\n\xc3\xa9";
    size_t text_len = nul ? size - len - 1 : strlen(text);
    qc_status st = qc_tokenizer_open_text(&t, json ? json : "", len, &err);
    FUZZ_CHECK(st == QC_OK ? t != NULL : t == NULL && err.msg[0]);
    if (t && text_len <= TEXT_MOST) {
        encode(t, text, text_len, 0);
        encode(t, text, text_len, 1);
    }
    qc_tokenizer_close(t);
    return 0;
}
