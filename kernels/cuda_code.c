#include "kernels/cuda_code.h"

#include <stdlib.h>
#include <string.h>

static int ends_as(const char *end, size_t bytes, const char *word)
{
    return strlen(word) == bytes && memcmp(end, word, bytes) == 0;
}

static int word_runs(const char *word, size_t bytes, unsigned sm)
{
    char *end;
    if (bytes == 0 || *word < '0' || *word > '9')
        return 0;
    unsigned long number = strtoul(word, &end, 10);
    size_t left = bytes - (size_t)(end - word);
    /* Code with the suffix a is for this capability alone; with f it is for its generation from it
     * on. */
    int exactly = left > 0 && *end == 'a', family = left > 0 && *end == 'f';
    if (exactly || family) {
        end++;
        left--;
    }
    int real = left == 0 || ends_as(end, left, "-real");
    int ptx = left == 0 || ends_as(end, left, "-virtual");
    if (exactly)
        return (real || ptx) && sm == number;
    int same = sm >= number && sm / 10 == number / 10;
    return (real && same) || (ptx && (family ? same : sm >= number));
}

int qc_cuda_code_runs(const char *code, unsigned sm)
{
    while (*code) {
        size_t bytes = strcspn(code, " ");
        if (word_runs(code, bytes, sm))
            return 1;
        code += bytes;
        code += strspn(code, " ");
    }
    return 0;
}
