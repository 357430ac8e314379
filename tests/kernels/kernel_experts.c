/* Experts (kernels/matmul_experts.h) against double sums of exact weights: forms, paths, ways of
 * finding codes, offsets of all sorts, rows of x by number, weights of rows; graphs that run again
 * with other offsets; and offsets that are wrong. */
#include "tests/fixtures/kernel_matmul.h"

#include "kernels/matmul_experts.h"

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

enum { EXPERTS_MOST = 300 };

static const qc_matmul_path paths[] = {QC_MATMUL_GEMV, QC_MATMUL_MMA_884, QC_MATMUL_MMA_16816};
static const unsigned path_sm[] = {0, 70, 80};

typedef struct {
    qc_matmul *h;
    km_weight w[EXPERTS_MOST];
    qc_weights device[EXPERTS_MOST];
    uint32_t count;
    void *memory;
    qc_matmul_experts ready;
    qc_cuda_stream s; /* for all that is done with it */
} layer;

static layer *layer_open(const km_spec *spec, uint32_t count, qt_rng *rng)
{
    layer *l = km_host(sizeof *l);
    qc_matmul *h = km_handle();
    l->h = h;
    l->count = count;
    for (uint32_t i = 0; i < count; i++) {
        km_spec own = *spec;
        own.scale = i % 3 == 2 ? 1e-5 : 0.05; /* of which the first needs an exponent */
        km_weight_make(&l->w[i], h, &own, rng);
        l->device[i] = l->w[i].device;
    }
    KM_OK(qc_cuda_stream_create(&l->s, &km_error));
    KM_OK(qc_cuda_malloc(&l->memory, qc_matmul_experts_bytes(l->device, count), &km_error));
    KM_OK(qc_matmul_experts_prepare(h, l->device, count, l->memory, &l->ready, l->s, &km_error));
    memset(l->device, 0xff, sizeof l->device); /* nobody may look there any more */
    KM_OK(qc_cuda_stream_synchronize(l->s, &km_error));
    return l;
}

static void layer_close(layer *l)
{
    for (uint32_t i = 0; i < l->count; i++)
        km_weight_free(&l->w[i]);
    qc_cuda_free(l->memory);
    qc_cuda_stream_destroy(l->s);
    qc_matmul_destroy(l->h);
    free(l);
}

/* ---- a product ------------------------------------------------------------------------------- */

typedef struct {
    const layer *l;
    qc_matmul_path path;
    qc_dtype x_dtype, y_dtype;
    uint64_t max_rows, x_count, ldx, ldy, n, k;
    uint32_t offsets[EXPERTS_MOST + 1];
    uint32_t *x_rows; /* NULL: row of y = row of x */
    float *row_weights;
    uint16_t *x, *bias, *y;
    /* on the device */
    void *bases[7];
    qc_matmul_experts_io io;
    uint64_t workspace_bytes;
} product;

static void product_make(product *p, const layer *l, qc_matmul_path path, uint64_t max_rows,
                         unsigned variant, qt_rng *rng)
{
    memset(p, 0, sizeof *p);
    p->l = l;
    p->path = path;
    p->n = l->w[0].spec.n;
    p->k = l->w[0].spec.k;
    p->max_rows = max_rows;
    p->x_dtype = variant & 1 ? QC_DTYPE_BF16 : QC_DTYPE_F16;
    p->y_dtype = variant & 2 ? QC_DTYPE_BF16 : QC_DTYPE_F16;
    p->ldx = variant & 4 ? p->k + 3 : p->k;
    p->ldy = variant & 1 ? p->n + 5 : p->n;
    p->x_count = variant & 2 ? max_rows / 2 + 1 : max_rows;
    p->x = km_host(p->x_count * p->ldx * 2);
    p->y = km_host(max_rows * p->ldy * 2);
    p->bias = km_host(l->count * p->n * 2);
    for (uint64_t i = 0; i < p->x_count * p->ldx; i++)
        p->x[i] =
            i % p->ldx >= p->k
                ? 0x7fffu
                : km_bits((float)(2.0 * (qt_uniform(rng) + qt_uniform(rng) - 1.0)), p->x_dtype);
    for (uint64_t i = 0; i < l->count * p->n; i++)
        p->bias[i] = km_bits((float)(qt_uniform(rng) - 0.5), p->y_dtype);
    if (variant & 2) {
        p->x_rows = km_host(max_rows * 4);
        for (uint64_t i = 0; i < max_rows; i++)
            p->x_rows[i] = (uint32_t)(qt_next(rng) % p->x_count);
    }
    if (variant & 4) {
        p->row_weights = km_host(max_rows * 4);
        for (uint64_t i = 0; i < max_rows; i++)
            p->row_weights[i] = (float)(qt_uniform(rng) - 0.25);
    }
    p->io = (qc_matmul_experts_io){
        .max_rows = max_rows,
        .x = km_upload(p->x, p->x_count * p->ldx * 2 - (p->ldx - p->k) * 2, 0, &p->bases[0]),
        .x_dtype = p->x_dtype,
        .ldx = p->ldx,
        .x_count = p->x_rows ? p->x_count : 0,
        .y = km_upload(p->y, max_rows * p->ldy * 2, 0, &p->bases[1]),
        .y_dtype = p->y_dtype,
        .ldy = p->ldy,
        .bias = variant & 4 ? km_upload(p->bias, l->count * p->n * 2, 0, &p->bases[2]) : NULL,
        .x_rows = p->x_rows ? km_upload(p->x_rows, max_rows * 4, 0, &p->bases[3]) : NULL,
        .row_weights =
            p->row_weights ? km_upload(p->row_weights, max_rows * 4, 0, &p->bases[4]) : NULL,
        .offsets = km_upload(p->offsets, (l->count + 1) * 4, 0, &p->bases[5])};
    p->workspace_bytes = qc_matmul_experts_workspace(&l->ready, p->x_count);
    KM_OK(qc_cuda_malloc(&p->bases[6], p->workspace_bytes, &km_error));
}

static void product_free(product *p)
{
    for (size_t i = 0; i < COUNT(p->bases); i++)
        qc_cuda_free(p->bases[i]);
    free(p->x);
    free(p->y);
    free(p->bias);
    free(p->x_rows);
    free(p->row_weights);
}

/* y and the workspace poisoned, offsets and rows of x as p has them. */
static void reset(product *p)
{
    qc_cuda_stream s = p->l->s;
    for (uint64_t i = 0; i < p->max_rows * p->ldy; i++)
        p->y[i] = KM_GAP;
    KM_OK(qc_cuda_to_device(p->io.y, p->y, p->max_rows * p->ldy * 2, s, &km_error));
    KM_OK(qc_cuda_fill(p->bases[6], 0xff, p->workspace_bytes, s, &km_error));
    KM_OK(qc_cuda_to_device(p->bases[5], p->offsets, (p->l->count + 1) * 4, s, &km_error));
    if (p->x_rows)
        KM_OK(qc_cuda_to_device(p->bases[3], p->x_rows, p->max_rows * 4, s, &km_error));
}

static void put_on(product *p)
{
    KM_OK(qc_matmul_run_experts(p->l->h, &p->l->ready, &p->io, p->path, p->bases[6],
                                p->workspace_bytes, p->l->s, &km_error));
}

static void run(product *p)
{
    reset(p);
    put_on(p);
    km_download(p->y, p->io.y, p->max_rows * p->ldy * 2, p->l->s);
}

static void offsets_of(product *p, const uint32_t *counts, uint32_t first)
{
    p->offsets[0] = first;
    for (uint32_t e = 0; e < p->l->count; e++)
        p->offsets[e + 1] = p->offsets[e] + counts[e];
    assert_true(p->offsets[p->l->count] <= p->max_rows);
}

static void expect_gap(const product *p, uint64_t row, uint64_t from)
{
    for (uint64_t n = from; n < p->ldy; n++)
        QT_CHECK(p->y[row * p->ldy + n] == KM_GAP, "y[%" PRIu64 "][%" PRIu64 "] was written", row,
                 n);
}

static km_rounding rounding_of(const product *p, const km_weight *w)
{
    int exponent = 0;
    if (p->path == QC_MATMUL_GEMV)
        return (km_rounding){0.0, 0.0};
    km_download(&exponent, w->ready.exponent, sizeof exponent, p->l->s);
    return (km_rounding){.weight = 0x1p-11, .absolute = ldexp(0x1p-25, -exponent)};
}

/* One element, as km_check bounds it; the row's weight is multiplied into the bound too. */
static void check_element(const product *p, uint32_t e, uint64_t row, uint64_t n, km_rounding r)
{
    const uint16_t *x = p->x + (p->x_rows ? p->x_rows[row] : row) * p->ldx;
    double unit = p->y_dtype == QC_DTYPE_F16 ? 0x1p-11 : 0x1p-8;
    double tiny = p->y_dtype == QC_DTYPE_F16 ? 0x1p-25 : 0x1p-134;
    double by = p->row_weights ? (double)p->row_weights[row] : 1.0;
    double sum = 0.0, size = 0.0, spread = 0.0;
    for (uint64_t k = 0; k < p->k; k++) {
        double w = (double)km_value(&p->l->w[e].host, n, k), v = (double)km_float(x[k], p->x_dtype);
        sum += w * v;
        size += fabs(w * v);
        spread += (r.weight * fabs(w) + r.absolute) * fabs(v);
    }
    if (p->io.bias)
        sum += (double)km_float(p->bias[e * p->n + n], p->y_dtype);
    double got = (double)km_float(p->y[row * p->ldy + n], p->y_dtype);
    double bound = fabs(by) * (spread * 1.01 + 0x1p-20 * (size + fabs(sum)));
    sum *= by;
    bound += unit * fabs(sum) + tiny;
    QT_CHECK(fabs(got - sum) <= bound,
             "expert %u, y[%" PRIu64 "][%" PRIu64 "] is %.9g, %.9g +- %.3g was expected", e, row, n,
             got, sum, bound);
}

static void check(const product *p)
{
    uint64_t row = 0;
    for (uint32_t e = 0; e < p->l->count; e++) {
        km_rounding r = rounding_of(p, &p->l->w[e]);
        for (; row < p->offsets[0]; row++)
            expect_gap(p, row, 0);
        for (; row < p->offsets[e + 1]; row++) {
            for (uint64_t n = 0; n < p->n; n++)
                check_element(p, e, row, n, r);
            expect_gap(p, row, p->n);
        }
    }
    for (; row < p->max_rows; row++)
        expect_gap(p, row, 0);
}

static int has_path(const layer *l, size_t path)
{
    return qc_matmul_device(l->h)->sm >= path_sm[path];
}

/* ---- numbers --------------------------------------------------------------------------------- */

/* Every form, path and way of finding codes; with few and with many rows an expert. */
TEST(test_forms)
{
    qt_rng rng = qt_rng_start("experts");
    static const uint64_t shapes[][2] = {{70, 192}, {37, 71}, {20, 1056}};
    static const uint32_t few[] = {0, 5, 1, 0, 16, 17}, one[] = {0, 0, 0, 45, 0, 0};
    static const uint32_t many[] = {1, 0, 130, 64, 3, 0};
    unsigned turn = 0;
    for (unsigned form = 0; form < 6; form++)
        for (size_t shape = 0; shape < COUNT(shapes); shape++) {
            const km_spec spec = {.kind = form < 3    ? QC_FORM_NF4
                                          : form == 3 ? QC_FORM_INT8_ROWS
                                                      : QC_FORM_INT8_BLOCKS,
                                  .n = shapes[shape][0],
                                  .k = shapes[shape][1],
                                  .block = form % 2 ? 64 : 32,
                                  .nested = form == 1 || form == 5,
                                  .custom_map = form == 2,
                                  .shift = shape == 1 ? 5 : 0};
            layer *l = layer_open(&spec, 6, &rng);
            for (size_t path = 0; path < COUNT(paths); path++)
                for (int rows = 0; has_path(l, path) && rows < (shape == 2 ? 1 : 3);
                     rows += rows == 0 ? 1 + (int)(turn % 2) : 2) { /* one of the latter two */
                    product p;
                    product_make(&p, l, paths[path], rows == 2 ? 210 : 50, turn++ * 5, &rng);
                    offsets_of(&p, rows == 0 ? few : rows == 1 ? one : many, rows == 0 ? 4 : 0);
                    run(&p);
                    check(&p);
                    product_free(&p);
                }
            layer_close(l);
        }
}

/* More experts than a block has threads, and the paths that AUTO takes. */
TEST(test_many_experts)
{
    qt_rng rng = qt_rng_start("many");
    const km_spec spec = {.kind = QC_FORM_NF4, .n = 9, .k = 64, .block = 64, .nested = 1};
    layer *l = layer_open(&spec, EXPERTS_MOST, &rng);
    for (int rows = 0; rows < 3; rows++) {
        uint32_t counts[EXPERTS_MOST];
        product p;
        product_make(&p, l, QC_MATMUL_AUTO,
                     rows == 0   ? 12
                     : rows == 1 ? 300
                                 : 700,
                     (unsigned)rows, &rng);
        uint64_t left = p.max_rows;
        for (uint32_t e = 0; e < EXPERTS_MOST; e++) {
            counts[e] = rows == 1 ? 1 : (uint32_t)(qt_next(&rng) % 4 * (e % 3 == 2));
            counts[e] = counts[e] < left ? counts[e] : (uint32_t)left;
            left -= counts[e];
        }
        offsets_of(&p, counts, 0);
        run(&p);
        p.path = rows == 2 ? QC_MATMUL_MMA_16816 : QC_MATMUL_GEMV; /* which decides the bounds */
        check(&p);
        product_free(&p);
    }
    layer_close(l);
}

/* A row has the same bits wherever it lies and whoever is beside it. */
TEST(test_rows_alone)
{
    qt_rng rng = qt_rng_start("alone");
    const km_spec spec = {.kind = QC_FORM_NF4, .n = 40, .k = 320, .block = 64};
    layer *l = layer_open(&spec, 3, &rng);
    static const uint32_t counts[] = {20, 0, 37}, others[] = {1, 3, 50};
    for (size_t path = 0; path < COUNT(paths); path++)
        for (int large = 0; has_path(l, path) && large < 2; large++) {
            product p;
            product_make(&p, l, paths[path], large ? 80 : 40, 2, &rng);
            uint16_t *before = km_host(p.max_rows * p.ldy * 2);
            const uint32_t last = large ? 56 : 28; /* of y, in the last expert */
            const uint32_t small[] = {10, 0, 19}, less[] = {1, 3, 25};
            offsets_of(&p, large ? counts : small, 0);
            run(&p);
            memcpy(before, p.y, p.max_rows * p.ldy * 2);
            offsets_of(&p, large ? others : less, 0);
            p.x_rows[13] = p.x_rows[last];
            run(&p);
            assert_memory_equal(p.y + 13 * p.ldy, before + last * p.ldy, p.n * 2);
            check(&p);
            free(before);
            product_free(&p);
        }
    layer_close(l);
}

/* ---- graphs ---------------------------------------------------------------------------------- */

TEST(test_graphs)
{
    qt_rng rng = qt_rng_start("graphs");
    const km_spec spec = {.kind = QC_FORM_INT8_BLOCKS, .n = 33, .k = 128, .block = 64};
    static const uint32_t counts[][4] = {{3, 0, 20, 1}, {0, 0, 0, 0}, {0, 40, 0, 0}, {1, 1, 1, 1}};
    layer *l = layer_open(&spec, 4, &rng);
    for (size_t path = 0; path < COUNT(paths); path++) {
        product p;
        qc_cuda_graph g = NULL;
        if (!has_path(l, path))
            continue;
        product_make(&p, l, paths[path], 40, 7, &rng);
        uint16_t *want = km_host(p.max_rows * p.ldy * 2);
        KM_OK(qc_cuda_capture_begin(l->s, &km_error));
        put_on(&p);
        KM_OK(qc_cuda_capture_end(&g, l->s, &km_error));
        for (size_t i = 0; i < COUNT(counts); i++) {
            offsets_of(&p, counts[i], 0);
            run(&p);
            check(&p);
            memcpy(want, p.y, p.max_rows * p.ldy * 2);
            reset(&p);
            KM_OK(qc_cuda_graph_launch(g, l->s, &km_error));
            km_download(p.y, p.io.y, p.max_rows * p.ldy * 2, l->s);
            assert_memory_equal(p.y, want, p.max_rows * p.ldy * 2);
        }
        qc_cuda_graph_destroy(g);
        free(want);
        product_free(&p);
    }
    layer_close(l);
}

/* ---- what is wrong --------------------------------------------------------------------------- */

static void expect_fault(product *p, uint64_t from, uint64_t to)
{
    qc_error err = {0};
    run(p);
    km_expect(qc_matmul_check(p->l->h, &err), QC_ERR_USAGE, &err, "offsets that decrease");
    for (uint64_t row = from; row < to; row++)
        expect_gap(p, row, 0);
    KM_OK(qc_matmul_check(p->l->h, &km_error)); /* said once */
}

TEST(test_faults)
{
    qt_rng rng = qt_rng_start("faults");
    const km_spec spec = {.kind = QC_FORM_NF4, .n = 33, .k = 128, .block = 64};
    static const uint32_t good[] = {3, 0, 20, 1};
    layer *l = layer_open(&spec, 4, &rng);
    for (size_t path = 0; path < COUNT(paths); path++) {
        product p;
        if (!has_path(l, path))
            continue;
        product_make(&p, l, paths[path], 40, 2, &rng);
        offsets_of(&p, good, 0);
        p.offsets[2] = 2;
        expect_fault(&p, 0, 40);
        offsets_of(&p, good, 0);
        p.offsets[4] = 41;
        expect_fault(&p, 0, 40);
        p.offsets[4] = UINT32_MAX;
        expect_fault(&p, 0, 40);
        p.offsets[0] = p.offsets[1] = p.offsets[2] = p.offsets[3] = p.offsets[4] = 0xfffffff0u;
        expect_fault(&p, 0, 40);
        offsets_of(&p, good, 0);
        const uint32_t kept = p.x_rows[10], wrong[] = {(uint32_t)p.x_count, UINT32_MAX};
        for (size_t i = 0; i < COUNT(wrong); i++) {
            p.x_rows[10] = wrong[i];
            expect_fault(&p, 10, 11);
        }
        p.x_rows[10] = kept;
        run(&p);
        check(&p);
        product_free(&p);
    }
    layer_close(l);
}

static void expect(product *p, const char *words)
{
    qc_error err = {0};
    km_expect(qc_matmul_run_experts(p->l->h, &p->l->ready, &p->io, p->path, p->bases[6],
                                    p->workspace_bytes, NULL, &err),
              QC_ERR_USAGE, &err, words);
}

TEST(test_refusals)
{
    qt_rng rng = qt_rng_start("refusals");
    const km_spec spec = {.kind = QC_FORM_NF4, .n = 33, .k = 128, .block = 64};
    product p;
    layer *l = layer_open(&spec, 2, &rng);
    product_make(&p, l, QC_MATMUL_AUTO, 40, 3, &rng);
    const qc_matmul_experts_io io = p.io;
    p.io.offsets = NULL;
    expect(&p, "offsets is NULL");
    p.io = io;
    p.io.x_count = 0;
    expect(&p, "x_count is 0");
    p.io = io;
    p.io.x_rows = NULL;
    expect(&p, "x_count is 21, too few for 40 rows");
    p.io = io;
    p.io.ldx = 127;
    expect(&p, "the rows of x are 127 elements apart");
    p.io = io;
    p.io.x_dtype = QC_DTYPE_F32;
    expect(&p, "x is F32");
    p.io = io;
    p.io.max_rows = UINT64_C(1) << 31;
    expect(&p, "at most");
    p.io = io;
    p.path = QC_MATMUL_DEQUANT_GEMM;
    expect(&p, "path dequant-gemm");
    p.path = QC_MATMUL_MMA_884;
    p.workspace_bytes -= 1;
    expect(&p, "workspace");
    p.io.max_rows = 0;
    KM_OK(qc_matmul_run_experts(l->h, &l->ready, &p.io, QC_MATMUL_AUTO, NULL, 0, NULL, &km_error));
    product_free(&p);

    qc_weights w[2] = {l->w[0].device, l->w[1].device};
    qc_matmul_experts out;
    qc_error err = {0};
    w[1].rows = 32;
    km_expect(qc_matmul_experts_prepare(l->h, w, 2, l->memory, &out, NULL, &err), QC_ERR_USAGE,
              &err, "expert 1 differs from the first in its rows");
    w[1].rows = 33;
    w[1].form.block_elems = 32;
    km_expect(qc_matmul_experts_prepare(l->h, w, 2, l->memory, &out, NULL, &err), QC_ERR_USAGE,
              &err, "block size");
    km_expect(qc_matmul_experts_prepare(l->h, w, 0, l->memory, &out, NULL, &err), QC_ERR_USAGE,
              &err, "no experts");
    km_expect(qc_matmul_experts_prepare(l->h, w, 1, NULL, &out, NULL, &err), QC_ERR_USAGE, &err,
              "256-byte aligned");
    w[0].form.ops = qc_form_ops_of(QC_FORM_W4A16);
    km_expect(qc_matmul_experts_prepare(l->h, w, 1, l->memory, &out, NULL, &err),
              QC_ERR_UNSUPPORTED, &err, "no kernel multiplies experts");
    layer_close(l);
}

int main(void)
{
    km_without_cublas();
    if (km_no_device())
        return 77;
    return test_run_all(NULL);
}
