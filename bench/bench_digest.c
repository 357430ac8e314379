/* XXH3-128 by each path this processor has, on pieces that lie in the L2 cache and on larger ones.
 *
 *   bench_digest [ROUNDS]     default 31; medians of processor time, paths interleaved */
#include "formats/digest_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

#define BYTES      (64u << 20)
#define RUN_BYTES  (16u << 20)
#define ROUNDS_MAX 101
#define PATHS      (QC_ISA_COUNT + 1) /* and the library as packaged */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static unsigned hash_once(int path, const void *p, size_t len)
{
    if (path == QC_ISA_COUNT)
        return (unsigned)XXH3_128bits(p, len).low64;
    return qc_digest_ops_for((qc_isa)path)->hash(p, len).b[15];
}

int main(int argc, char **argv)
{
    static const size_t sizes[] = {4u << 10, 64u << 10, 1u << 20, 8u << 20};
    static double t[PATHS][ROUNDS_MAX];
    long rounds = argc > 1 ? strtol(argv[1], NULL, 10) : 31;
    unsigned char *b = malloc(BYTES);
    volatile unsigned sink = 0;
    if (!b || rounds < 1 || rounds > ROUNDS_MAX) {
        fprintf(stderr, "bench_digest: rounds: 1 to %d\n", ROUNDS_MAX);
        free(b);
        return 2;
    }
    for (size_t i = 0; i < BYTES; i++)
        b[i] = (unsigned char)(i * 2654435761u >> 13);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (long r = 0; r < rounds; r++) {
            for (int k = 0; k < PATHS; k++) {
                if (k < QC_ISA_COUNT && !qc_isa_available((qc_isa)k))
                    continue;
                sink += hash_once(k, b, sizes[s]);
                double begin = now();
                for (size_t n = 0; n < RUN_BYTES; n += sizes[s])
                    sink += hash_once(k, b, sizes[s]);
                t[k][r] = now() - begin;
            }
        }
        for (int k = 0; k < PATHS; k++) {
            qsort(t[k], (size_t)rounds, sizeof(double), ascending);
            if (t[k][0] > 0)
                printf("%5zu KiB  %-8s %6.1f GB/s\n", sizes[s] >> 10,
                       k < QC_ISA_COUNT ? qc_isa_name((qc_isa)k) : "packaged",
                       RUN_BYTES / t[k][rounds / 2] / 1e9);
        }
    }
    (void)sink;
    free(b);
    return 0;
}
