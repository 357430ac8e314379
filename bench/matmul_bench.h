/* What the files of bench_matmul share: what is asked for, the device, and what was measured.
 *
 * Times are in microseconds per launch, and rates are decimal. docs/bench.md describes the method
 * and the JSON. */
#ifndef QC_BENCH_MATMUL_BENCH_H
#define QC_BENCH_MATMUL_BENCH_H

#include "convert/gpu/gpu_timing.h"
#include "quant/quant_form.h"

#define MB_BLOCK      64u
#define MB_LIST       64u /* entries of --m and of --shapes */
#define MB_SCHEMES    4u
#define MB_QUANTIZERS 8u
#define MB_PINNED     ((size_t)32 << 20)
#define MB_LEAST      20u    /* launches in a graph of a product */
#define MB_ROUND_US   2000.0 /* a graph takes at least so long (gpu_timing.c) */

typedef struct {
    const char *name;
    const qc_form_ops *ops;
    int by_rows, nested; /* one scale a row; scales that are double quantized */
} mb_scheme;
extern const mb_scheme mb_schemes[MB_SCHEMES];

/* A weight [n, k], or, with parts, weights that share x, n together. */
typedef struct {
    char layer[64]; /* as --shapes has it: "8192x8192" */
    uint64_t n, k, parts[QC_MATMUL_GROUP_MOST];
    uint32_t part_count; /* 0: one weight */
} mb_shape;

/* The weights of one contender, which are used in turn. There are enough of them that the L2 cache
 * never helps, if memory allows it. */
typedef struct {
    uint32_t copies, launches; /* launches in one graph */
    uint64_t bytes; /* how many bytes of the copies all launches of a graph read together */
} mb_rotation;

/* A product. */
typedef struct {
    const char *path; /* the kernel that was chosen: "gemv" */
    double error;     /* normwise, of the first result */
    qc_spread us;     /* samples is 0 where it was not measured */
    qc_spread ratio;  /* cuBLAS over this, each taken within one round */
    mb_rotation turn;
} mb_product;

/* One scheme at one shape and m, with one wish of a path. */
typedef struct {
    const mb_shape *shape;
    const mb_scheme *scheme;
    uint64_t m;
    int repacked;    /* the weights were first laid out anew */
    qc_spread dense; /* cuBLAS with 16-bit weights, in the same rounds */
    mb_rotation dense_turn;
    mb_product ours;
} mb_row;

/* A kernel that quantizes or dequantizes. bytes are those that it reads and writes. */
typedef struct {
    const char *name;
    uint64_t rows, cols, bytes;
    qc_spread gbps;
} mb_quantizer;

/* What gave a wrong result, or could not run. */
typedef struct {
    const mb_shape *shape;   /* NULL of a quantizer, which has no m */
    const mb_scheme *scheme; /* NULL: cuBLAS */
    uint64_t m;
    const char *path; /* NULL: not known */
    char what[512];   /* one sentence */
} mb_failure;

typedef struct {
    /* what is asked for */
    mb_shape shapes[MB_LIST];
    uint64_t m[MB_LIST]; /* rising */
    const mb_scheme *schemes[MB_SCHEMES];
    qc_matmul_path paths[QC_MATMUL_PATH_COUNT]; /* AUTO: as the plan chooses */
    uint32_t shape_count, m_count, scheme_count, path_count;
    const char *path_text; /* --path, or NULL */
    qc_dtype dtype;        /* of x, y and the dense weights */
    uint32_t rounds;       /* at most; each round gives two samples of every contender */
    double seconds;        /* for everything; what does not fit is left out and counted */
    int device;
    const char *output; /* a file, or NULL */

    /* the device */
    qc_timer t;
    const char *no_gemm;     /* why there is no cuBLAS for this dtype, or NULL */
    const qc_quant_ops *ops; /* the CPU's, to check against */
    void *pinned;            /* host, MB_PINNED bytes: what is downloaded to be checked */
    float *map;              /* device: the dynamic map */
    uint64_t *bad;
    uint64_t started_ns, products_ns; /* the latter: when the first shape began */
    double timed_seconds;             /* of the rounds since then */

    /* what was measured */
    qc_gpu_roof roof;
    mb_quantizer quantizers[MB_QUANTIZERS];
    mb_row *rows;
    mb_failure *failed;
    uint32_t quantizer_count, row_count, failed_count;
    uint32_t left_out; /* rows that there was no time or memory for */
    int complete;
} mb_bench;

/* ---- bench_matmul.c ---- */

/* Writes down what was measured so far, where a file is asked for. */
QC_NODISCARD qc_status mb_save(mb_bench *b, qc_error *err);
/* Reports that something could not be measured, and why: the failure f, all of it but f.what. The
 * run goes on with what is next, but an interrupt and a failure of this itself are errors. */
QC_NODISCARD qc_status mb_failed(mb_bench *b, mb_failure f, const qc_error *why, qc_error *err);
double mb_seconds_left(const mb_bench *b);

/* ---- matmul_weights.c ---- */

/* Copies device memory to the host and waits for it. */
QC_NODISCARD qc_status mb_download(mb_bench *b, void *host, const void *device, uint64_t bytes,
                                   qc_error *err);
/* Double quantizes scales [count] of the device with the CPU's functions, which make codes [count]
 * and nested scales on the device, and *offset. Synchronizes. */
QC_NODISCARD qc_status mb_nest(mb_bench *b, const float *absmax, uint64_t count, uint8_t *codes,
                               float *nested, float *offset, qc_error *err);
/* The codes and scales of a weight: what a product has to read of it at least. */
uint64_t mb_weight_bytes(const mb_scheme *s, uint64_t n, uint64_t k);

/* Weights of one scheme: `copies` times the same, at different addresses. */
typedef struct {
    uint64_t bytes_each; /* device memory of one copy */
    uint32_t copies;
    void **memory; /* [copies] */
    qc_matmul_weights *w;
    qc_weights plain; /* the first, as it was before it was made ready */
} mb_weights;
/* Makes the first copy: the kernels quantize the dense weight [n, k]. */
QC_NODISCARD qc_status mb_weights_make(mb_bench *b, mb_weights *w, const mb_scheme *scheme,
                                       const void *dense, const mb_shape *shape, qc_error *err);
/* Makes more copies, up to `want` or as many as there is memory for, and waits for them. */
QC_NODISCARD qc_status mb_weights_multiply(mb_bench *b, mb_weights *w, uint32_t want,
                                           qc_error *err);
void mb_weights_free(mb_weights *w);

/* ---- what is measured ---- */

QC_NODISCARD qc_status mb_quantizers_measure(mb_bench *b, qc_error *err); /* matmul_quantize.c */
QC_NODISCARD qc_status mb_products_measure(mb_bench *b, qc_error *err);   /* matmul_point.c */

#endif
