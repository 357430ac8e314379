/* What the benches of quantizers share: normal weights, quantiles of the times of many rounds, and
 * the end of a result file. */
#ifndef QC_BENCH_SAMPLES_H
#define QC_BENCH_SAMPLES_H

#include "base/random.h"
#include "base/strbuf.h"
#include "formats/file_io.h"
#include "formats/json_writer.h"
#include "formats/text_file.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BENCH_MAX_RUNS 101

/* A normal number by the method of Box and Muller. */
static inline double bench_normal(uint64_t *seed, double deviation)
{
    double u = ((double)(qc_random_next(seed) >> 11) + 0.5) * 0x1p-53;
    double v = (double)(qc_random_next(seed) >> 11) * 0x1p-53;
    return deviation * sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

/* n bf16 weights of standard deviation 0.02. After the first 2^20, they repeat those at random. */
static inline void bench_fill_bf16(uint16_t *x, uint64_t n, uint64_t *seed)
{
    const uint64_t pool = (uint64_t)1 << 20;
    for (uint64_t i = 0; i < n; i++) {
        if (i < pool) {
            float f = (float)bench_normal(seed, 0.02);
            uint32_t bits;
            memcpy(&bits, &f, sizeof bits);
            x[i] = (uint16_t)((bits + 0x7fff) >> 16);
        } else {
            x[i] = x[qc_random_next(seed) % pool];
        }
    }
}

static inline int bench_compare_doubles(const void *pa, const void *pb)
{
    double a = *(const double *)pa, b = *(const double *)pb;
    return (a > b) - (a < b);
}

/* q = 0.5 gives the median. n is BENCH_MAX_RUNS at most. */
static inline double bench_quantile(const double *v, int n, double q)
{
    double sorted[BENCH_MAX_RUNS];
    memcpy(sorted, v, (size_t)n * sizeof *v);
    qsort(sorted, (size_t)n, sizeof *sorted, bench_compare_doubles);
    return sorted[(int)(q * (n - 1) + 0.5)];
}

/* Ends the document, writes it to path and frees out. */
static inline qc_status bench_json_save(qc_json_writer *w, qc_strbuf *out, const char *path,
                                        qc_error *err)
{
    qc_status st = qc_json_write_finish(w);
    if (st == QC_OK)
        st = qc_strbuf_adds(out, "\n", err);
    if (st == QC_OK)
        st = qc_file_put(path, out->data, out->len, err);
    qc_strbuf_deinit(out);
    return st;
}

#endif
