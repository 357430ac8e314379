/* Chains of launches on one workspace, captured into a graph and replayed: every replay has to
 * leave the bits that plain launches leave. Each product's x is the y of the one before, every
 * replay starts with all results poisoned, and buffers are used again within the chain. So a launch
 * that reads or writes before it may shows as other bits. Where the device can, launches of kernels
 * that have qc_grid_wait overlap, in the graph as in the stream.
 *
 *   kernel_graph               all chains
 *   kernel_graph --list        their names, one a line
 *   kernel_graph --smoke NAME  one of them: 0 right, 1 wrong, 77 not on this device */
#include "kernels/cuda_quantize.h"
#include "kernels/matmul_handle.h"
#include "tests/fixtures/kernel_matmul.h"

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* The shim runs a thread after the other. */
#ifdef QC_CUDA_SHIM
enum { REPLAYS = 3 };
#else
enum { REPLAYS = 100 };
#endif

enum { LINKS_MOST = 6, BUFFERS_MOST = 12, RING = 3 };

typedef struct chain chain;

typedef struct {
    void *p;
    size_t bytes;
    int input;      /* written once, before everything */
    uint64_t elems; /* of 16 bits, that have to be finite in the end */
    unsigned char *plain, *replayed;
} buffer;

/* What a chain is of. dims of products: K, then N, which is the next one's K, and so on. */
typedef struct {
    const char *name;
    enum { PRODUCTS, FILL, QUANTIZERS } of;
    qc_form_kind kind;
    qc_matmul_choice choice;
    uint64_t m, dims[LINKS_MOST + 1];
    int bf16;
    uint32_t group;     /* weights that share x; 0: one */
    int copies, splits; /* what the first plan must be */
    int bias, nested, complete;
} graph_case;

struct chain {
    const graph_case *what;
    qc_matmul *h;
    buffer buffers[BUFFERS_MOST];
    uint32_t buffer_count;
    uint32_t links;
    km_weight w[LINKS_MOST][QC_MATMUL_GROUP_MOST];
    const qc_matmul_weights *ready[LINKS_MOST][QC_MATMUL_GROUP_MOST];
    qc_matmul_io io[LINKS_MOST][QC_MATMUL_GROUP_MOST];
    void *workspace;
    uint64_t workspace_bytes;
};

static qc_dtype dtype_of(const graph_case *g)
{
    return g->bf16 ? QC_DTYPE_BF16 : QC_DTYPE_F16;
}

static void *buffer_of(chain *c, size_t bytes)
{
    assert_true(c->buffer_count < BUFFERS_MOST);
    buffer *b = &c->buffers[c->buffer_count++];
    memset(b, 0, sizeof *b);
    b->bytes = bytes;
    b->plain = km_host(bytes);
    b->replayed = km_host(bytes);
    KM_OK(qc_cuda_malloc(&b->p, bytes, &km_error));
    return b->p;
}

/* Numbers around 1 in size. */
static void *input_of(chain *c, uint64_t elems, qc_dtype dtype, qt_rng *rng)
{
    void *p = buffer_of(c, elems * 2);
    buffer *b = &c->buffers[c->buffer_count - 1];
    uint16_t *x = (uint16_t *)(void *)b->plain;
    qc_cuda_stream s = NULL;
    b->input = 1;
    for (uint64_t i = 0; i < elems; i++)
        x[i] = km_bits((float)(2.0 * (qt_uniform(rng) + qt_uniform(rng) - 1.0)), dtype);
    KM_OK(qc_cuda_stream_create(&s, &km_error));
    KM_OK(qc_cuda_to_device(p, x, elems * 2, s, &km_error));
    KM_OK(qc_cuda_stream_synchronize(s, &km_error));
    qc_cuda_stream_destroy(s);
    return p;
}

/* ---- products -------------------------------------------------------------------------------- */

/* The handle has variants and blocks, which AUTO goes by. */
static qc_matmul_path path_of(const graph_case *g)
{
    return g->choice.variant || g->choice.blocks ? QC_MATMUL_AUTO : g->choice.path;
}

static void use_choice(chain *c)
{
    if (path_of(c->what) == QC_MATMUL_AUTO)
        c->h->choice = c->what->choice;
}

/* The first product is what the case is about. 0: not on this device. */
static int check_plan(const chain *c)
{
    const graph_case *g = c->what;
    qc_matmul_shape s = {
        .kind = g->kind,
        .m = g->m,
        .n = g->dims[1] * (g->group ? g->group : 1),
        .k = g->dims[0],
        .block_elems = 64,
        .x_dtype = dtype_of(g),
        .y_dtype = dtype_of(g),
        .ldx = g->dims[0],
        .x_alignment = g->dims[0] % 8 ? 2 : 16,
        .has_epilogue = g->bias,
        .have_gemm = !qc_matmul_no_gemm(c->h),
        .choice = c->h->choice,
    };
    qc_matmul_plan p;
    if (g->of == QUANTIZERS)
        return 1;
    if (qc_matmul_plan_make(qc_matmul_device(c->h), &s, path_of(g), 0, &p, &km_error) != QC_OK) {
        print_message("skipped: %s\n", km_error.msg);
        return 0;
    }
    if (g->choice.path != QC_MATMUL_AUTO && p.path != g->choice.path) {
        print_message("skipped: this device has no %s\n", qc_matmul_path_name(g->choice.path));
        return 0;
    }
    if (g->choice.variant && p.variant != g->choice.variant)
        fail_msg("%s: the plan has variant %u", g->name, p.variant);
    if ((g->copies && !p.copies_x) || (g->splits && p.splits < 2))
        fail_msg("%s: the plan copies %d, has %u splits", g->name, p.copies_x, p.splits);
    return 1;
}

/* Link i, weight j of its group; y has elems elements that will be finite. */
static void link_make(chain *c, uint32_t i, uint32_t j, uint64_t n, uint64_t k, qt_rng *rng)
{
    const graph_case *g = c->what;
    km_spec spec = {.kind = g->kind,
                    .n = n,
                    .k = k,
                    .block = 64,
                    .nested = g->nested,
                    /* y about as large as x; in a group no two decode alike */
                    .scale = 2.5 / sqrt(k ? (double)k : 1.0) / (1 + j)};
    km_weight_make(&c->w[i][j], c->h, &spec, rng);
    if (g->complete) /* km_weight_make has synchronized */
        c->w[i][j].ready.complete = QC_MATMUL_WEIGHTS_COMPLETE;
    c->ready[i][j] = &c->w[i][j].ready;
    c->io[i][j] = (qc_matmul_io){.m = g->m, .x_dtype = dtype_of(g), .y_dtype = dtype_of(g)};
}

static void workspace_make(chain *c)
{
    for (uint32_t i = 0; i < c->links; i++) {
        uint64_t bytes =
            qc_matmul_group_workspace_bytes(c->h, c->ready[i], c->what->group ? c->what->group : 1,
                                            c->what->m, path_of(c->what), 0);
        assert_true(bytes != UINT64_MAX);
        c->workspace_bytes = bytes > c->workspace_bytes ? bytes : c->workspace_bytes;
    }
    KM_OK(qc_cuda_malloc(&c->workspace, c->workspace_bytes, &km_error));
}

static void make_products(chain *c, qt_rng *rng)
{
    const graph_case *g = c->what;
    uint32_t group = g->group ? g->group : 1;
    uint64_t widest = 0;
    for (uint32_t i = 1; i <= c->links; i++)
        widest = g->dims[i] > widest ? g->dims[i] : widest;
    const void *x = input_of(c, g->m * g->dims[0], dtype_of(g), rng);
    const void *bias = g->bias ? input_of(c, widest, dtype_of(g), rng) : NULL;
    buffer *ring = &c->buffers[c->buffer_count];
    for (int i = 0; i < RING; i++)
        (void)buffer_of(c, g->m * widest * 2);
    for (uint32_t i = 0; i < c->links; i++) {
        uint64_t n = g->dims[i + 1];
        for (uint32_t j = 0; j < group; j++) {
            link_make(c, i, j, n, g->dims[i], rng);
            c->io[i][j].x = x;
            c->io[i][j].bias = bias;
            if (j + 1 == group) { /* the next one's x */
                c->io[i][j].y = ring[i % RING].p;
                ring[i % RING].elems = g->m * n;
            } else {
                c->io[i][j].y = buffer_of(c, g->m * n * 2);
                c->buffers[c->buffer_count - 1].elems = g->m * n;
            }
        }
        x = ring[i % RING].p;
    }
    workspace_make(c);
}

/* A weight without columns, whose y is the bias; a product of that; and again into the same x, with
 * another bias, which must not come before the first product has read. */
static void make_fill(chain *c, qt_rng *rng)
{
    const graph_case *g = c->what;
    uint64_t n = g->dims[2], k = g->dims[1];
    const void *biases[2] = {input_of(c, k, dtype_of(g), rng), input_of(c, k, dtype_of(g), rng)};
    buffer *b = &c->buffers[c->buffer_count];
    for (int i = 0; i < 3; i++) {
        (void)buffer_of(c, g->m * (i ? n : k) * 2);
        b[i].elems = g->m * (i ? n : k);
    }
    c->links = 4;
    for (uint32_t i = 0; i < 4; i++) {
        link_make(c, i, 0, i % 2 ? n : k, i % 2 ? k : 0, rng);
        c->io[i][0].x = i % 2 ? b[0].p : NULL;
        c->io[i][0].y = i % 2 ? b[1 + i / 2].p : b[0].p;
        c->io[i][0].bias = i % 2 ? NULL : biases[i / 2];
    }
    workspace_make(c);
}

static void give_products(chain *c, qc_cuda_stream s)
{
    uint32_t group = c->what->group ? c->what->group : 1;
    qc_matmul_path path = path_of(c->what);
    for (uint32_t i = 0; i < c->links; i++)
        if (group > 1)
            KM_OK(qc_matmul_run_group(c->h, c->ready[i], c->io[i], group, path, c->workspace,
                                      c->workspace_bytes, s, &km_error));
        else
            KM_OK(qc_matmul_run(c->h, c->ready[i][0], c->io[i], path, c->workspace,
                                c->workspace_bytes, s, &km_error));
}

/* ---- quantizers ------------------------------------------------------------------------------ */

enum { ROWS = 37, COLS = 200, ELEMS = ROWS * COLS, Q_BLOCKS = (ELEMS + 63) / 64 };

/* Weights to codes and back, three times, each from what the last has left: NF4, int8 in blocks,
 * int8 by rows. */
static void give_quantizers(chain *c, qc_cuda_stream s)
{
    buffer *b = c->buffers;
    void *codes = b[1].p, *back = b[3].p;
    float *absmax = b[2].p;
    uint64_t *bad = b[4].p;
    qc_cuda_quantize_job job = {.src = b[0].p,
                                .dtype = QC_DTYPE_F16,
                                .n = ELEMS,
                                .form = {.ops = &qc_form_nf4, .block_elems = 64, .cols = COLS},
                                .codes = codes,
                                .absmax = absmax,
                                .sums = b[5].p,
                                .bad = bad};
    qc_weights w = {.form = job.form, .rows = ROWS, .codes = codes};
    KM_OK(qc_cuda_quantize(&job, s, &km_error));
    w.absmax = absmax;
    KM_OK(qc_cuda_dequantize(&w, 0, ROWS, back, QC_DTYPE_F16, COLS, NULL, NULL, s, &km_error));
    job.src = back;
    job.form.ops = w.form.ops = &qc_form_int8_blocks;
    KM_OK(qc_cuda_quantize(&job, s, &km_error));
    KM_OK(qc_cuda_dequantize(&w, 0, ROWS, back, QC_DTYPE_F16, COLS, NULL, NULL, s, &km_error));
    job.sums = NULL;
    job.form.ops = &qc_form_int8_rows;
    job.form.block_elems = 0;
    w.form = job.form;
    KM_OK(qc_cuda_quantize(&job, s, &km_error));
    KM_OK(qc_cuda_dequantize(&w, 0, ROWS, back, QC_DTYPE_F16, COLS, NULL, NULL, s, &km_error));
}

static void make_quantizers(chain *c, qt_rng *rng)
{
    (void)input_of(c, ELEMS, QC_DTYPE_F16, rng);
    (void)buffer_of(c, ELEMS);                        /* 1: codes */
    (void)buffer_of(c, Q_BLOCKS * sizeof(float));     /* 2: absmax */
    (void)buffer_of(c, (size_t)ELEMS * 2);            /* 3: back */
    (void)buffer_of(c, sizeof(uint64_t));             /* 4: bad */
    (void)buffer_of(c, Q_BLOCKS * 4 * sizeof(float)); /* 5: error sums */
    c->buffers[3].elems = ELEMS;
}

/* ---- a case ---------------------------------------------------------------------------------- */

static void give(chain *c, qc_cuda_stream s)
{
    for (uint32_t i = 0; i < c->buffer_count; i++)
        if (!c->buffers[i].input)
            KM_OK(qc_cuda_fill(c->buffers[i].p, 0xff, c->buffers[i].bytes, s, &km_error));
    if (c->what->of == QUANTIZERS)
        give_quantizers(c, s);
    else
        give_products(c, s);
}

static void take(chain *c, int replay, qc_cuda_stream s)
{
    for (uint32_t i = 0; i < c->buffer_count; i++) {
        buffer *b = &c->buffers[i];
        if (b->input)
            continue;
        km_download(replay ? b->replayed : b->plain, b->p, b->bytes, s);
        if (replay && memcmp(b->plain, b->replayed, b->bytes) != 0) {
            size_t at = 0;
            while (b->plain[at] == b->replayed[at])
                at++;
            fail_msg("%s: replay %d of the graph left another byte %zu in buffer %u than plain "
                     "launches",
                     c->what->name, replay, at, i);
        }
    }
}

/* What plain launches leave is there at all. */
static void check_finite(const chain *c)
{
    for (uint32_t i = 0; i < c->buffer_count; i++) {
        const uint16_t *y = (const uint16_t *)(const void *)c->buffers[i].plain;
        for (uint64_t j = 0; j < c->buffers[i].elems; j++)
            QT_CHECK(isfinite(km_float(y[j], dtype_of(c->what))),
                     "%s: element %" PRIu64 " of buffer %u is not finite", c->what->name, j, i);
    }
}

/* 0: done; 77: not on this device. Anything wrong fails the test. */
static int run_case(const graph_case *g)
{
    static chain c;
    qt_rng rng = qt_rng_start(g->name);
    int result = 77;
    memset(&c, 0, sizeof c);
    c.what = g;
    c.h = km_handle();
    while (c.links < LINKS_MOST && g->dims[c.links + 1])
        c.links++;
    use_choice(&c);
    if (g->choice.path == QC_MATMUL_DEQUANT_GEMM && qc_matmul_no_gemm(c.h))
        print_message("skipped: %s\n", qc_matmul_no_gemm(c.h));
    else if (check_plan(&c))
        result = 0;
    if (result == 0) {
        qc_cuda_stream s = NULL;
        qc_cuda_graph graph = NULL;
        if (g->of == QUANTIZERS)
            make_quantizers(&c, &rng);
        else if (g->of == FILL)
            make_fill(&c, &rng);
        else
            make_products(&c, &rng);
        KM_OK(qc_cuda_stream_create(&s, &km_error));
        KM_OK(qc_cuda_fill(c.workspace, 0xff, c.workspace_bytes, s, &km_error));
        give(&c, s);
        take(&c, 0, s);
        check_finite(&c);
        KM_OK(qc_cuda_capture_begin(s, &km_error));
        give(&c, s);
        KM_OK(qc_cuda_capture_end(&graph, s, &km_error));
        for (int i = 1; i <= REPLAYS; i++) {
            KM_OK(qc_cuda_graph_launch(graph, s, &km_error));
            take(&c, i, s);
        }
        qc_cuda_graph_destroy(graph);
        qc_cuda_stream_destroy(s);
    }
    for (uint32_t i = 0; i < c.buffer_count; i++) {
        qc_cuda_free(c.buffers[i].p);
        free(c.buffers[i].plain);
        free(c.buffers[i].replayed);
    }
    for (uint32_t i = 0; i < c.links; i++)
        for (uint32_t j = 0; j < QC_MATMUL_GROUP_MOST; j++)
            km_weight_free(&c.w[i][j]);
    qc_cuda_free(c.workspace);
    qc_matmul_destroy(c.h);
    return result;
}

static const graph_case cases[] = {
    {.name = "gemv",
     .choice = {QC_MATMUL_GEMV, 0, 0},
     .m = 3,
     .dims = {77, 45, 130, 33},
     .bias = 1},
    {.name = "gemv-splits",
     .kind = QC_FORM_INT8_BLOCKS,
     .choice = {QC_MATMUL_GEMV, 0, 3},
     .m = 2,
     .splits = 1,
     .dims = {2100, 45, 2100, 33}},
    {.name = "mma-884",
     .choice = {QC_MATMUL_MMA_884, 0, 0},
     .m = 5,
     .dims = {256, 320, 96, 33},
     .nested = 1},
    {.name = "mma-884-splits",
     .choice = {QC_MATMUL_MMA_884, 0, 3},
     .m = 9,
     .splits = 1,
     .bf16 = 1,
     .copies = 1,
     .dims = {1000, 70, 1000, 33}},
    {.name = "mma-16816",
     .choice = {QC_MATMUL_MMA_16816, QC_MATMUL_GENERAL, 0},
     .m = 9,
     .copies = 1,
     .dims = {77, 160, 70, 33},
     .bias = 1},
    {.name = "mma-16816-splits",
     .kind = QC_FORM_INT8_ROWS,
     .choice = {QC_MATMUL_MMA_16816, QC_MATMUL_GENERAL, 2},
     .m = 17,
     .splits = 1,
     .copies = 1,
     .bf16 = 1,
     .dims = {1030, 70, 1030, 33}},
    {.name = "ring",
     .choice = {QC_MATMUL_MMA_16816, QC_MATMUL_RING, 2},
     .m = 3,
     .dims = {320, 192, 448, 192, 131},
     .bias = 1,
     .nested = 1},
    {.name = "ring-complete",
     .choice = {QC_MATMUL_MMA_16816, QC_MATMUL_RING, 5},
     .m = 2,
     .dims = {1472, 384, 1472, 384},
     .nested = 1,
     .complete = 1},
    {.name = "ring-bf16",
     .kind = QC_FORM_INT8_BLOCKS,
     .choice = {QC_MATMUL_MMA_16816, QC_MATMUL_RING, 5},
     .m = 8,
     .bf16 = 1,
     .dims = {1472, 192, 1472, 192, 97},
     .complete = 1},
    {.name = "ring-splits",
     .choice = {QC_MATMUL_MMA_16816, QC_MATMUL_RING, 0},
     .m = 7,
     .splits = 1,
     .dims = {12288, 64, 12288, 33},
     .nested = 1,
     .complete = 1},
    {.name = "tiles",
     .choice = {QC_MATMUL_MMA_16816, QC_MATMUL_TILES, 0},
     .m = 19,
     .dims = {320, 192, 320, 131},
     .nested = 1},
    {.name = "tiles-bf16",
     .kind = QC_FORM_INT8_ROWS,
     .choice = {QC_MATMUL_MMA_16816, QC_MATMUL_TILES, 0},
     .m = 11,
     .copies = 1,
     .bf16 = 1,
     .dims = {640, 128, 640, 77}},
    {.name = "wgmma",
     .choice = {QC_MATMUL_WGMMA, 0, 0},
     .m = 19,
     .copies = 1,
     .dims = {320, 192, 320, 131},
     .bias = 1,
     .nested = 1,
     .complete = 1},
    {.name = "wgmma-bf16",
     .kind = QC_FORM_INT8_ROWS,
     .choice = {QC_MATMUL_WGMMA, 0, 0},
     .m = 35,
     .copies = 1,
     .bf16 = 1,
     .dims = {640, 128, 640, 77}},
    {.name = "wgmma-splits",
     .kind = QC_FORM_INT8_BLOCKS,
     .choice = {QC_MATMUL_WGMMA, 0, 3},
     .m = 9,
     .splits = 1,
     .copies = 1,
     .dims = {1088, 64, 1088, 77},
     .complete = 1},
    {.name = "wgmma-group", /* one of its weights is a short tile */
     .choice = {QC_MATMUL_WGMMA, 0, 0},
     .m = 9,
     .copies = 1,
     .dims = {256, 320, 67},
     .group = 3,
     .nested = 1,
     .complete = 1},
    {.name = "dequant-gemm",
     .choice = {QC_MATMUL_DEQUANT_GEMM, 0, 0},
     .m = 70,
     .dims = {77, 300, 70, 33}},
    {.name = "dequant-gemm-bf16",
     .choice = {QC_MATMUL_DEQUANT_GEMM, 0, 0},
     .m = 65,
     .bf16 = 1,
     .dims = {96, 160, 70, 33},
     .bias = 1},
    {.name = "group",
     .m = 4,
     .dims = {256, 192, 320, 67},
     .group = 3,
     .nested = 1,
     .bias = 1,
     .complete = 1},
    {.name = "group-few", /* a block of threads goes from one weight to the next */
     .choice = {QC_MATMUL_MMA_16816, QC_MATMUL_RING, 2},
     .m = 4,
     .dims = {320, 192, 67},
     .group = 3,
     .nested = 1},
    {.name = "group-gemv",
     .choice = {QC_MATMUL_GEMV, 0, 0},
     .m = 2,
     .dims = {100, 70, 33},
     .group = 2},
    {.name = "fill", .of = FILL, .choice = {QC_MATMUL_GEMV, 0, 0}, .m = 3, .dims = {77, 77, 33}},
    {.name = "quantizers", .of = QUANTIZERS},
};

static int skipped;

static void test_case(void **state)
{
    skipped = run_case(*state) == 77;
    if (skipped)
        skip();
}

#define CASE(i)                                                                                    \
    {                                                                                              \
        cases[i].name, test_case, NULL, NULL, (void *)(uintptr_t)&cases[i]                         \
    }

static int smoke(const char *name)
{
    for (size_t i = 0; i < COUNT(cases); i++)
        if (strcmp(name, cases[i].name) == 0) {
            const struct CMUnitTest one[] = {CASE(i)};
            int failed = cmocka_run_group_tests(one, NULL, NULL);
            return failed ? 1 : skipped ? 77 : 0;
        }
    print_error("there is no chain %s; --list names them\n", name);
    return 1;
}

int main(int argc, char **argv)
{
    struct CMUnitTest tests[COUNT(cases)];
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (size_t i = 0; i < COUNT(cases); i++)
            print_message("%s\n", cases[i].name);
        return 0;
    }
    if (km_no_device())
        return 77;
    if (argc == 3 && strcmp(argv[1], "--smoke") == 0)
        return smoke(argv[2]);
    for (size_t i = 0; i < COUNT(cases); i++)
        tests[i] = (struct CMUnitTest)CASE(i);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
