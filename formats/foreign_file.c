#include "formats/foreign_file.h"

#include <string.h>

#define NOT_WEIGHTS ", not safetensors"

static const struct {
    const char *begin;
    size_t bytes;
    qc_foreign_kind kind;
} known[] = {
    {"version https://git-lfs",
     23,
     {"a git-lfs pointer, not the file itself (run 'git lfs pull')", "", QC_ERR_INPUT}},
    {"PK\x03\x04",
     4,
     {"a zip archive", " (a PyTorch checkpoint?)" NOT_WEIGHTS, QC_ERR_UNSUPPORTED}},
    {"GGUF",
     4,
     {"a GGUF file", NOT_WEIGHTS " (take the checkpoint that it was made from)",
      QC_ERR_UNSUPPORTED}},
    {"\x89HDF", 4, {"an HDF5 file", NOT_WEIGHTS, QC_ERR_UNSUPPORTED}},
};
static const qc_foreign_kind pickle = {
    "a Python pickle", " (an old PyTorch checkpoint?)" NOT_WEIGHTS, QC_ERR_UNSUPPORTED};
static const qc_foreign_kind page = {"an HTML page", NOT_WEIGHTS " (a failed download?)",
                                     QC_ERR_INPUT};
static const qc_foreign_kind plain = {"text", NOT_WEIGHTS, QC_ERR_INPUT};

static int is_blank(unsigned char c)
{
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

static int begins_with_letters(const unsigned char *head, size_t len, const char *lower)
{
    size_t n = strlen(lower);
    if (len < n)
        return 0;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = head[i];
        if (c >= 'A' && c <= 'Z')
            c = (unsigned char)(c + 32);
        if (c != (unsigned char)lower[i])
            return 0;
    }
    return 1;
}

const qc_foreign_kind *qc_foreign_kind_of(const unsigned char *head, size_t len)
{
    static const char *const pages[] = {"<!doctype", "<html", "<?xml"};
    size_t skip = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (len >= known[i].bytes && memcmp(head, known[i].begin, known[i].bytes) == 0)
            return &known[i].kind;
    if (len >= 2 && head[0] == 0x80 && head[1] >= 2 && head[1] <= 5)
        return &pickle;
    while (skip < len && is_blank(head[skip]))
        skip++;
    for (size_t i = 0; i < sizeof pages / sizeof *pages; i++)
        if (begins_with_letters(head + skip, len - skip, pages[i]))
            return &page;
    for (size_t i = 0; i < len; i++) {
        if (!is_blank(head[i]) && (head[i] < 0x20 || head[i] >= 0x7f))
            return NULL;
    }
    return &plain;
}

const char *qc_foreign_text(const char *text, size_t len)
{
    if (len == 0)
        return "empty";
    const qc_foreign_kind *kind = qc_foreign_kind_of((const unsigned char *)text, len);
    return kind == &known[0].kind || kind == &page ? kind->what : NULL;
}

void qc_foreign_say(qc_error *err, const char *before, const char *path, const char *text,
                    size_t len)
{
    const char *what =
        qc_foreign_text(text, len < QC_FOREIGN_HEAD_BYTES ? len : QC_FOREIGN_HEAD_BYTES);
    if (what)
        (void)QC_ERROR(err, QC_ERR_INPUT, "%s%s: the file is %s; download it again", before, path,
                       what);
    else
        qc_error_prefix(err, "%s%s", before, path);
}
