/* Runs one fuzz target over the files of its corpus, in blocks of exactly their size: a plain main
 * for compilers without libFuzzer. Usage: fuzz_replay FILE... */
#include "fuzz_check.h"

#include <stdio.h>
#include <stdlib.h>

static int replay(const char *path)
{
    int rc = 1;
    long size = 0;
    uint8_t *bytes = NULL;
    FILE *f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END) != 0 || (size = ftell(f)) < 0 || fseek(f, 0, SEEK_SET) != 0)
        goto done;
    bytes = malloc(size ? (size_t)size : 1);
    if (!bytes || fread(bytes, 1, (size_t)size, f) != (size_t)size)
        goto done;
    (void)LLVMFuzzerTestOneInput(bytes, (size_t)size);
    rc = 0;
done:
    if (rc)
        perror(path);
    free(bytes);
    if (f)
        (void)fclose(f);
    return rc;
}

int main(int argc, char **argv)
{
    int rc = argc < 2;
    for (int i = 1; i < argc; i++)
        rc |= replay(argv[i]);
    size_t bytes = 0, input = 0;
    fuzz_bound_worst(&bytes, &input);
    (void)printf("%d files; at most %zu bytes held, for an input of %zu\n", argc - 1, bytes, input);
    return rc;
}
