/* qconv bench: what the user asks for, what was measured, and everything about it that needs no GPU
 * (shapes, bytes, floors, statistics, the order of turns). gpu_bench.c measures; bench_print.c and
 * bench_json.c write the texts.
 *
 * Times are in microseconds per launch, and rates are decimal. docs/bench.md describes the method
 * and the JSON. */
#ifndef QC_CONVERT_BENCH_H
#define QC_CONVERT_BENCH_H

#include "base/arena.h"
#include "base/strbuf.h"
#include "kernels/matmul_tuning.h"

typedef enum {
    QC_BENCH_NF4,        /* blocks of 64, scales double quantized */
    QC_BENCH_NF4_PLAIN,  /* the same with float scales */
    QC_BENCH_INT8,       /* row-wise */
    QC_BENCH_INT8_BLOCK, /* blocks of 64, scales double quantized */
    QC_BENCH_SCHEME_COUNT
} qc_bench_scheme;
const char *qc_bench_scheme_name(qc_bench_scheme s); /* "nf4", "nf4-plain", ... */

#define QC_BENCH_BLOCK     64u
#define QC_BENCH_MAX_LIST  64u  /* entries of --m and of --shape */
#define QC_BENCH_NAME      48u  /* bytes of a short text */
#define QC_BENCH_TOLERANCE 1e-3 /* normwise, for results that are rounded to float16 */
/* how many rows of x differ; a prime, so that no tile sees a period */
#define QC_BENCH_TRUTH 61u

/* What validate and bench multiply. */
typedef struct {
    const uint64_t *m; /* --m, in the order given; the command fills in its default */
    unsigned m_count;
    uint64_t seed; /* default 1 */
} qc_product_options;

#define QC_BENCH_MAX_PARTS 8u /* QC_MATMUL_GROUP_MOST */

/* A weight [n, k] of a linear layer. */
typedef struct {
    const char *model; /* "Llama-3.3-70B"; "given" for --shapes */
    const char *layer; /* "q, o" */
    uint64_t n, k;
    unsigned count; /* how many such weights one decoder layer has; 0: it belongs to no model */
    /* The rows of the weights that share x, n together. A part_count of 0 means one weight. */
    uint32_t part_count;
    uint64_t parts[QC_BENCH_MAX_PARTS];
} qc_bench_shape;

typedef struct {
    const qc_bench_shape *shapes;
    uint32_t shape_count;
    const uint64_t *m; /* rising, and no two are alike */
    uint32_t m_count;
    const qc_bench_scheme *schemes;
    uint32_t scheme_count;
    int bf16;         /* x, y and the dense weights are BF16; else FP16 */
    const char *path; /* a kernel to force, or NULL */
    uint64_t seed;
    uint32_t rounds;        /* at most; each round gives two samples of every contender */
    double seconds;         /* for everything; what does not fit is left out and counted */
    int device;             /* index */
    int tune;               /* find the best choice, instead of how fast the plan's own choice is */
    int packed;             /* multiply with packed weights, too */
    qc_matmul_table tuning; /* the kernels choose by it; empty with tune */
    const char *tuned_by;   /* the file that it comes from; NULL: none, or it is for another GPU */
} qc_bench_request;

/* With samples == 0 it was not measured. */
typedef struct {
    double median, p10, p90;
    uint32_t samples;
} qc_bench_spread;

/* A kernel that is bound by memory. bytes are those that it reads and writes. */
typedef struct {
    char name[QC_BENCH_NAME];
    uint64_t rows, cols, bytes;
    qc_bench_spread gbps;
} qc_bench_kernel;

/* The weights of one contender, which are used in turn. There are enough of them that the L2 cache
 * never helps, if memory allows it. */
typedef struct {
    uint32_t copies, launches; /* launches in one graph */
    uint64_t bytes; /* how many bytes of the copies all launches of a graph read together */
} qc_bench_rotation;

/* The same product with packed weights (qc_matmul_pack). */
typedef struct {
    const char *path;
    double error;
    qc_bench_spread us;    /* samples is 0 where it was not measured */
    qc_bench_spread ratio; /* the file's layout / packed, each taken within one round */
    qc_bench_rotation turn;
} qc_bench_packed;

/* One scheme at one shape and m. */
typedef struct {
    uint32_t shape; /* index */
    qc_bench_scheme scheme;
    uint64_t m;
    const char *path;      /* the kernel that was chosen: "gemv" */
    int repacked;          /* the weights were first laid out anew */
    double error;          /* normwise, of the first result */
    qc_bench_spread us;    /* quantized */
    qc_bench_spread dense; /* cuBLAS with 16-bit weights, in the same rounds */
    qc_bench_spread ratio; /* dense / quantized, each taken within one round */
    qc_bench_rotation turn, dense_turn;
    qc_bench_packed packed; /* with packed */
} qc_bench_row;

/* What packing a weight of one scheme takes. */
typedef struct {
    uint32_t shape; /* index */
    qc_bench_scheme scheme;
    uint64_t file_bytes;   /* of the codes, and of the codes of scales that are packed with them */
    uint64_t packed_bytes; /* of the memory that takes their place */
    qc_bench_spread us;    /* of one packing, on the device */
} qc_bench_packing;

/* What a choice came to: the kernel, and how its work is cut. */
typedef struct {
    const char *path;    /* "mma-16816" */
    const char *variant; /* "stream"; NULL: the plan chose it, or there is only one */
    uint32_t splits;     /* of K */
    /* blocks of a grid that may have any number of them; 0: the kernel chose */
    uint32_t blocks;
} qc_bench_plan;

/* --tune: the best choice for one scheme at one shape and m. */
typedef struct {
    uint32_t shape; /* index */
    qc_bench_scheme scheme;
    uint64_t m;
    int repacked;
    uint32_t candidates;     /* how many were measured, including the plan's own */
    qc_bench_plan plan;      /* what the rules choose */
    qc_bench_spread plan_us; /* in the rounds that decided */
    /* The fastest other choice, if it looked faster (us.samples > 0), measured in the same
     * rounds. */
    qc_matmul_choice choice;
    qc_bench_plan other;
    qc_bench_spread us;
    qc_bench_spread ratio; /* plan_us / us, each taken within one round */
    int better;            /* qc_bench_is_better says so, and the table gets this choice */
    qc_bench_rotation turn;
} qc_bench_tuned;

typedef struct {
    char name[128], pci[16];
    uint32_t sm, multiprocessors;
    uint64_t memory_bytes, l2_bytes;
    int driver_version, runtime_version;
    /* what the kernels were built with and for: "CUDA 13.0: sm_75 sm_80 ..." */
    const char *build;
    const char *no_gemm; /* why there is no cuBLAS, or NULL */
} qc_bench_device;

typedef struct {
    uint64_t copy_bytes;                         /* bytes that a copy reads; it writes as many */
    qc_bench_spread copy_gbps;                   /* by CUDA's own copy */
    qc_bench_spread kernel_copy_gbps, read_gbps; /* by kernels of ours */
    uint64_t gemm_size;                          /* M = N = K; 0: not measured */
    qc_bench_spread gemm_tflops;
    qc_bench_spread launch_us; /* of a kernel that does nothing, in a graph of many launches */
    uint64_t host_bytes;
    qc_bench_spread to_device_gbps, to_host_gbps;
} qc_bench_roof;

#define QC_BENCH_MAX_KERNELS 16u

/* A contender that gave a wrong result at a point, or could not run. */
typedef struct {
    /* index; QC_BENCH_NO_SHAPE for a roof or a quantizer, which have no m */
    uint32_t shape;
    qc_bench_scheme scheme; /* QC_BENCH_SCHEME_COUNT for cuBLAS, or where there is no scheme */
    uint64_t m;
    const char *path; /* the kernel that was chosen, or "cublas"; NULL: not known */
    const char *what; /* one sentence */
} qc_bench_failure;
#define QC_BENCH_NO_SHAPE UINT32_MAX

typedef struct {
    qc_bench_device device;
    qc_bench_roof roof;
    qc_bench_kernel kernels[QC_BENCH_MAX_KERNELS];
    uint32_t kernel_count;
    qc_bench_row *rows; /* ordered by shape, m, scheme */
    uint32_t row_count;
    qc_bench_packing *packings; /* with packed: ordered by shape, scheme */
    uint32_t packing_count;
    /* with --tune, instead of everything else; ordered by shape, m, scheme */
    qc_bench_tuned *tuned;
    uint32_t tuned_count;
    uint32_t left_out; /* how many rows were left out, for lack of time or memory */
    qc_bench_failure *failed;
    uint32_t failed_count;
    int complete; /* 0: more is to come, or would have come if the run had not ended */
    double seconds;
} qc_bench_result;

/* ---- the question ---- */

/* The shapes of the models by which we judge qconv. */
extern const qc_bench_shape qc_bench_model_shapes[];
extern const uint32_t qc_bench_model_shape_count;

/* Parses "8192x8192,1024x8192", which is N x K, and "nf4,int8". NULL gives the defaults. Errors are
 * QC_ERR_USAGE and name the option. Results live in the arena. */
QC_NODISCARD qc_status qc_bench_parse_shapes(const char *text, qc_arena *arena,
                                             qc_bench_request *out, qc_error *err);
QC_NODISCARD qc_status qc_bench_parse_schemes(const char *text, qc_arena *arena,
                                              qc_bench_request *out, qc_error *err);
/* Sets a copy of m, in rising order. */
QC_NODISCARD qc_status qc_bench_set_m(const uint64_t *m, uint32_t count, qc_arena *arena,
                                      qc_bench_request *out, qc_error *err);

/* The normwise error up to which a result counts as right. It allows for rounding to the dtype of
 * y, and for the float16 to which the tensor-core kernels round weights. */
double qc_bench_tolerance(const qc_bench_request *q);

/* ---- bytes and floors ---- */

/* The codes and scales of a weight: what a matmul has to read of it at least. */
uint64_t qc_bench_weight_bytes(qc_bench_scheme scheme, uint64_t n, uint64_t k);
/* What has to move: weights (of so many bytes), and x and y in 16 bits. */
uint64_t qc_bench_bytes(uint64_t weight_bytes, uint64_t m, uint64_t n, uint64_t k);
double qc_bench_flops(uint64_t m, uint64_t n, uint64_t k);
/* The best that was measured: of the two copies; of these and the read. 0 without any. */
double qc_bench_copy_gbps(const qc_bench_roof *roof);
double qc_bench_memory_gbps(const qc_bench_roof *roof);
/* The time that no implementation can beat on this device: the longer of moving `bytes` at the
 * best measured rate of memory and computing `flops` at the measured rate of cuBLAS. */
double qc_bench_floor_us(const qc_bench_roof *roof, uint64_t bytes, double flops);

/* ---- how it is measured ---- */

/* How many copies of a weight there are. What the launches read of them (read_each per copy) is
 * together more than four times the L2 cache. There are at least 2 and at most 256 copies, and no
 * more than fit into limit_bytes at held_each per copy (but never 0). A repacked weight holds its
 * codes twice, and they are read once. */
uint32_t qc_bench_copies(uint64_t read_each, uint64_t held_each, uint64_t l2_bytes,
                         uint64_t limit_bytes);
/* How many launches a graph has: a multiple of copies, at least `least`, and enough to take min_us
 * together at `us` each, but not more than 2048 (rounded up to a whole number of turns). */
uint32_t qc_bench_launches(uint32_t copies, uint32_t least, double us, double min_us);
/* Whose turn it is at a step (0 .. 2 * contenders - 1) of a round. One round is A B C C B A, and
 * the next C B A A B C. */
uint32_t qc_bench_turn(uint32_t round, uint32_t step, uint32_t contenders);
/* How many rounds one point gets: as many as fit into its share of the time, at most `wanted`, at
 * least 2. */
uint32_t qc_bench_rounds(uint32_t wanted, double round_seconds, double share_seconds);
/* The share of `seconds` for the point (shape, m), when that much time is left for it and all
 * points that follow. Shares are in proportion to the least time that a round of each point takes,
 * so that every point gets about as many rounds, although a product of 4096 rows takes much longer
 * than one of a single row. */
double qc_bench_share(const qc_bench_request *q, const qc_bench_result *r, uint32_t shape,
                      uint32_t m, double seconds);
/* The median and the tenth and ninetieth percentiles (linear between ranks). It sorts the
 * samples. */
qc_bench_spread qc_bench_spread_of(double *samples, uint32_t count);
/* Turns each value into scale / value, which swaps the ends. */
qc_bench_spread qc_bench_spread_rate(qc_bench_spread s, double scale);

/* ---- tuning ---- */

/* The least number of rounds that decide. */
#define QC_BENCH_TUNE_ROUNDS 5u

/* Is it better by more than the spread says? There must be at least QC_BENCH_TUNE_ROUNDS ratios,
 * each within one round (old time over new); their median must be at least 1.01, and nine of ten
 * must be above 1. */
int qc_bench_is_better(qc_bench_spread ratio);
/* The range of rows of x that a measurement with m rows stands for. It goes down to the next
 * smaller m of the request's list, but not to half of m. */
void qc_bench_tuned_range(const qc_bench_request *q, uint64_t m, uint64_t *least, uint64_t *most);
/* Holds "mma-16816 tiles, K in 4". */
#define QC_BENCH_PLAN_BYTES 80
const char *qc_bench_plan_text(char out[QC_BENCH_PLAN_BYTES], const qc_bench_plan *p);
/* Writes the table of better choices as a file (convert/device/tuning_file.h), in the arena. */
QC_NODISCARD qc_status qc_bench_tuning_file(const qc_bench_request *q, const qc_bench_result *r,
                                            qc_arena *arena, qc_strbuf *out, qc_error *err);

/* ---- results ---- */

/* A row's share of the roof; 0 if no roof or no time was measured. */
double qc_bench_of_roof(const qc_bench_request *q, const qc_bench_result *r,
                        const qc_bench_row *row);
/* The dtype of x, y and the dense weights: "fp16" or "bf16". */
const char *qc_bench_dtype_name(const qc_bench_request *q);
/* Is this the first shape of its model? */
int qc_bench_first_of_model(const qc_bench_request *q, uint32_t shape);

/* The time of all linear layers of one decoder layer of a model. */
typedef struct {
    const char *model;
    qc_bench_scheme scheme;
    uint64_t m;
    double us, dense_us; /* sums of medians; dense_us is 0 if it was not measured */
} qc_bench_layer;
/* Returns 1 and sets *out if every shape of the model (which the request first names at shape index
 * `first`) has a row at this m and scheme, else 0. */
int qc_bench_layer_of(const qc_bench_request *q, const qc_bench_result *r, uint32_t first,
                      qc_bench_scheme scheme, uint64_t m, qc_bench_layer *out);
const qc_bench_row *qc_bench_find(const qc_bench_result *r, uint32_t shape, qc_bench_scheme scheme,
                                  uint64_t m); /* or NULL */

/* "Llama-3.3-70B q, o 8192x8192 M=16 nf4 gemv: 12.3 us, 71% of the roof, 3.1x fp16" */
QC_NODISCARD qc_status qc_bench_row_line(const qc_bench_request *q, const qc_bench_result *r,
                                         const qc_bench_row *row, qc_strbuf *out, qc_error *err);
QC_NODISCARD qc_status qc_bench_tuned_line(const qc_bench_request *q, const qc_bench_tuned *t,
                                           qc_strbuf *out, qc_error *err);
/* "given 8192x8192 M=16 nf4 (mma-16816): what", or only "what" if the failure has no shape. */
QC_NODISCARD qc_status qc_bench_failure_line(const qc_bench_request *q, const qc_bench_failure *f,
                                             qc_strbuf *out, qc_error *err);
/* These two also write the results of --tune. */
QC_NODISCARD qc_status qc_bench_text(const qc_bench_request *q, const qc_bench_result *r,
                                     qc_arena *arena, qc_strbuf *out, qc_error *err);
QC_NODISCARD qc_status qc_bench_json(const qc_bench_request *q, const qc_bench_result *r,
                                     qc_strbuf *out, qc_error *err);
/* Writes the kernels section of docs/performance.md. */
QC_NODISCARD qc_status qc_bench_markdown(const qc_bench_request *q, const qc_bench_result *r,
                                         qc_arena *arena, qc_strbuf *out, qc_error *err);

/* ---- the measuring ---- */

/* Is told of every row as it comes, and of what is being done. */
typedef struct {
    void *ctx;
    void (*row)(void *ctx, const qc_bench_result *so_far, const qc_bench_row *row);
    void (*say)(void *ctx, const char *text);
    void (*tuned)(void *ctx, const qc_bench_tuned *t);
    /* Called whenever something was added to the result, so that it can be saved. */
    void (*save)(void *ctx, const qc_bench_result *so_far);
} qc_bench_sink;

/* The functions that measure on a GPU (gpu_bench.c). */
typedef struct qc_gpu_bench {
    /* Measures what q asks for. Rows go to the arena, and to the sink as they come. QC_ERR_CHECK:
     * the result of a kernel is wrong. */
    qc_status (*run)(const qc_bench_request *q, const qc_bench_sink *sink, qc_arena *arena,
                     qc_bench_result *out, qc_error *err);
} qc_gpu_bench;

#endif
