/* What convert/tokenizer/tokenizer.h makes of a text, for comparisons from Python.
 * Usage: ids_tool TOKENIZER plain|specials <TEXT: one line of ids. Several texts: with a NUL byte
 * between them, a line each. */
#include "base/alloc.h"
#include "convert/tokenizer/tokenizer.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define TEXT_MAX (64u << 20)

static qc_status print(const qc_tokenizer *t, const char *text, size_t len, int specials,
                       qc_error *err)
{
    uint32_t *ids = NULL;
    size_t count = 0;
    QC_TRY(qc_tokenizer_encode(t, text, len, specials, &ids, &count, err));
    for (size_t i = 0; i < count; i++)
        (void)printf(i ? " %" PRIu32 : "%" PRIu32, ids[i]);
    (void)puts("");
    qc_free(ids);
    return QC_OK;
}

int main(int argc, char **argv)
{
    qc_tokenizer *t = NULL;
    qc_error err = {0};
    void *v = NULL;
    if (argc != 3)
        return 2;
    qc_status st = qc_tokenizer_open(&t, argv[1], &err);
    if (st == QC_OK)
        st = qc_malloc(&v, TEXT_MAX, &err);
    char *text = v;
    size_t len = st == QC_OK ? fread(text, 1, TEXT_MAX, stdin) : 0;
    for (size_t at = 0; st == QC_OK && at <= len;) {
        const char *end = memchr(text + at, '\0', len - at);
        size_t n = end ? (size_t)(end - text) - at : len - at;
        st = print(t, text + at, n, strcmp(argv[2], "specials") == 0, &err);
        at += n + 1;
    }
    if (st != QC_OK)
        (void)fprintf(stderr, "ids_tool: %s\n", err.msg);
    qc_free(v);
    qc_tokenizer_close(t);
    return qc_status_exit_code(st);
}
