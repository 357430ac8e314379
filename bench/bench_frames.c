/* Frame coding: rates and ratios of candidate zstd parameters and of qc_frame_encode/decode.
 *
 *   bench_frames [ROUNDS]     default 15
 *
 * Data: 8 MiB each of what qconv writes for normal weights: NF4 codes (block 64), int8 codes by
 * row of 4096 and by block of 64, bytes like nested absmax, bf16 values, random bytes. Candidates
 * run interleaved; medians of processor time. */
#define ZSTD_STATIC_LINKING_ONLY
#include <zstd.h>

#include "formats/seekable.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BYTES      (8u << 20)
#define ROUNDS_MAX 101

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); /* other processes do not count */
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static uint64_t state = 88172645463325252u;

static double uniform(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return ((double)(state >> 11) + 0.5) / 9007199254740992.0;
}

static double normal(void)
{
    return sqrt(-2.0 * log(uniform())) * cos(6.283185307179586 * uniform());
}

/* n normal values; returns the largest magnitude. */
static double normals(double *x, size_t n)
{
    double most = 0;
    for (size_t i = 0; i < n; i++) {
        x[i] = normal();
        most = fabs(x[i]) > most ? fabs(x[i]) : most;
    }
    return most;
}

static unsigned nf4_code(double v)
{
    static const double codes[16] = {-1.0,        -0.6961928,  -0.52507305, -0.39491749,
                                     -0.28444138, -0.18477343, -0.09105004, 0.0,
                                     0.0795803,   0.1609302,   0.2461123,   0.33791524,
                                     0.44070983,  0.562617,    0.72295684,  1.0};
    unsigned best = 0;
    for (unsigned k = 1; k < 16; k++)
        best = fabs(v - codes[k]) < fabs(v - codes[best]) ? k : best;
    return best;
}

static void make_nf4(unsigned char *b)
{
    double x[64];
    for (size_t i = 0; i < BYTES; i += 32) {
        double most = normals(x, 64);
        for (size_t j = 0; j < 32; j++)
            b[i + j] =
                (unsigned char)(nf4_code(x[2 * j] / most) << 4 | nf4_code(x[2 * j + 1] / most));
    }
}

static void make_int8(unsigned char *b, size_t block)
{
    static double x[4096];
    for (size_t i = 0; i < BYTES; i += block) {
        double most = normals(x, block);
        for (size_t j = 0; j < block; j++)
            b[i + j] = (unsigned char)((int)lrint(x[j] * 127 / most) & 255);
    }
}

static void make_int8_row(unsigned char *b)
{
    make_int8(b, 4096);
}

static void make_int8_block(unsigned char *b)
{
    make_int8(b, 64);
}

static void make_absmax(unsigned char *b)
{
    double x[64];
    for (size_t i = 0; i < BYTES; i++) {
        long v = lrint(127 + (normals(x, 64) - 2.4) * 60);
        b[i] = (unsigned char)(v < 0 ? 0 : v > 255 ? 255 : v);
    }
}

static void make_bf16(unsigned char *b)
{
    for (size_t i = 0; i < BYTES; i += 2) {
        float f = (float)(normal() * 0.02);
        uint32_t w;
        memcpy(&w, &f, sizeof w);
        w += 0x7fff + (w >> 16 & 1);
        b[i] = (unsigned char)(w >> 16);
        b[i + 1] = (unsigned char)(w >> 24);
    }
}

static void make_random(unsigned char *b)
{
    for (size_t i = 0; i < BYTES; i++)
        b[i] = (unsigned char)(uniform() * 256);
}

typedef struct {
    const char *name;
    int level; /* of zstd; 0: qc_frame_encode at level 1 */
    int step;  /* targetLength of strategy fast; 0: as the level has it */
    int hash_log;
    int min_match;
} candidate;

static const candidate candidates[] = {
    {"qconv", 0, 0, 0, 0},
    {"level 1", 1, 0, 0, 0},
    {"level 3", 3, 0, 0, 0},
    {"level 1, minMatch 7", 1, 0, 0, 7},
    {"fast 10 + huff", -10, 0, 0, 0},
    {"fast 100 + huff", -100, 0, 0, 0},
    {"step 4k hash 6", 1, 4096, 6, 0},
    {"step 128k hash 6", 1, 131072, 6, 0},
};
#define CANDIDATES (sizeof candidates / sizeof *candidates)

static size_t encode(const candidate *c, ZSTD_CCtx *z, qc_frame_coder *q, const void *src,
                     void *dst, size_t cap)
{
    size_t n = 0;
    if (c->level == 0)
        return qc_frame_encode(q, 1, src, BYTES, dst, cap, &n, NULL) == QC_OK ? n : 0;
    (void)ZSTD_CCtx_reset(z, ZSTD_reset_session_and_parameters);
    (void)ZSTD_CCtx_setParameter(z, ZSTD_c_compressionLevel, c->level);
    (void)ZSTD_CCtx_setParameter(z, ZSTD_c_checksumFlag, 1);
    if (c->level < 0 || c->step)
        (void)ZSTD_CCtx_setParameter(z, ZSTD_c_literalCompressionMode, (int)ZSTD_lcm_huffman);
    if (c->step) {
        (void)ZSTD_CCtx_setParameter(z, ZSTD_c_strategy, ZSTD_fast);
        (void)ZSTD_CCtx_setParameter(z, ZSTD_c_targetLength, c->step);
    }
    if (c->hash_log)
        (void)ZSTD_CCtx_setParameter(z, ZSTD_c_hashLog, c->hash_log);
    if (c->min_match)
        (void)ZSTD_CCtx_setParameter(z, ZSTD_c_minMatch, c->min_match);
    n = ZSTD_compress2(z, dst, cap, src, BYTES);
    return ZSTD_isError(n) ? 0 : n;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median_rate(double *t, int n)
{
    qsort(t, (size_t)n, sizeof *t, ascending);
    return BYTES / t[n / 2] / 1e9;
}

static void run(const char *name, const unsigned char *src, unsigned char *dst, size_t cap,
                unsigned char *back, ZSTD_CCtx *z, ZSTD_DCtx *d, qc_frame_coder *q, int rounds)
{
    static double in[CANDIDATES][ROUNDS_MAX], out[CANDIDATES][ROUNDS_MAX];
    size_t sizes[CANDIDATES];
    for (int r = 0; r < rounds; r++) {
        for (size_t k = 0; k < CANDIDATES; k++) {
            double t = now();
            sizes[k] = encode(&candidates[k], z, q, src, dst, cap);
            in[k][r] = now() - t;
            t = now();
            int ok = candidates[k].level == 0
                         ? qc_frame_decode(q, dst, sizes[k], back, BYTES, NULL) == QC_OK
                         : ZSTD_decompressDCtx(d, back, BYTES, dst, sizes[k]) == BYTES;
            out[k][r] = now() - t;
            if (!ok || memcmp(src, back, BYTES) != 0)
                printf("%s: wrong content\n", candidates[k].name);
        }
    }
    for (size_t k = 0; k < CANDIDATES; k++)
        printf("%-12s %-20s encode %6.3f GB/s  decode %6.3f GB/s  ratio %.4f\n", name,
               candidates[k].name, median_rate(in[k], rounds), median_rate(out[k], rounds),
               (double)BYTES / (double)sizes[k]);
}

static void run_raw(const unsigned char *src, unsigned char *dst, unsigned char *back, ZSTD_DCtx *d,
                    qc_frame_coder *q, int rounds)
{
    static double t[4][ROUNDS_MAX];
    size_t n = qc_raw_frame_bytes(BYTES);
    for (int r = 0; r < rounds; r++) {
        double a = now();
        qc_raw_frame_write(dst, src, BYTES);
        t[0][r] = now() - a;
        a = now();
        if (qc_frame_decode(q, dst, n, back, BYTES, NULL) != QC_OK)
            printf("raw frame: wrong\n");
        t[1][r] = now() - a;
        a = now();
        if (ZSTD_decompressDCtx(d, back, BYTES, dst, n) != BYTES)
            printf("raw frame: wrong for libzstd\n");
        t[2][r] = now() - a;
        a = now();
        memcpy(back, src, BYTES);
        t[3][r] = now() - a;
    }
    printf("raw frame: write %.2f, read %.2f, read by libzstd %.2f, memcpy %.2f GB/s\n",
           median_rate(t[0], rounds), median_rate(t[1], rounds), median_rate(t[2], rounds),
           median_rate(t[3], rounds));
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*make)(unsigned char *);
    } data[] = {
        {"nf4", make_nf4},       {"int8 row", make_int8_row}, {"int8 block", make_int8_block},
        {"absmax", make_absmax}, {"bf16", make_bf16},         {"random", make_random}};
    long rounds = argc > 1 ? strtol(argv[1], NULL, 10) : 15;
    if (rounds < 1 || rounds > ROUNDS_MAX) {
        fprintf(stderr, "bench_frames: rounds: 1 to %d\n", ROUNDS_MAX);
        return 2;
    }
    size_t cap = qc_frame_bound(BYTES);
    unsigned char *src = malloc(BYTES), *dst = malloc(cap), *back = malloc(BYTES);
    ZSTD_CCtx *z = ZSTD_createCCtx();
    ZSTD_DCtx *d = ZSTD_createDCtx();
    qc_frame_coder *q = NULL;
    int failed = !src || !dst || !back || !z || !d || qc_frame_coder_create(&q, NULL) != QC_OK;
    printf("zstd %s, 8 MiB frames, medians of %ld\n", ZSTD_versionString(), rounds);
    for (size_t i = 0; !failed && i < sizeof data / sizeof *data; i++) {
        data[i].make(src);
        run(data[i].name, src, dst, cap, back, z, d, q, (int)rounds);
    }
    if (!failed)
        run_raw(src, dst, back, d, q, (int)rounds);
    qc_frame_coder_destroy(q);
    (void)ZSTD_freeCCtx(z);
    (void)ZSTD_freeDCtx(d);
    free(src);
    free(dst);
    free(back);
    return failed;
}
