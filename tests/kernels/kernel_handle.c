/* The matmul's handle: the device it keeps, the faults it reports, products planned once; and
 * dequantize-and-cuBLAS in chunks, with its side stream. */
#include "tests/fixtures/kernel_matmul.h"

#include "kernels/matmul_handle.h"

#include <pthread.h>

#ifdef QC_CUDA_SHIM
#include "shim_control.h"
#endif

/* A product that may be run again and again. */
typedef struct {
    km_weight w;
    km_data data;
    qc_matmul_io io;
    void *workspace, *x, *y, *bias;
    uint64_t bytes;
    qc_cuda_stream s;
} product;

static void product_make(product *p, const qc_matmul *h, const km_spec *spec, const km_job *job,
                         qt_rng *rng)
{
    memset(p, 0, sizeof *p);
    km_weight_make(&p->w, h, spec, rng);
    km_data_make(&p->data, &p->w, job, rng);
    const km_job *j = &p->data.job;
    for (uint64_t i = 0; i < j->m * j->ldy; i++)
        p->data.y[i] = KM_GAP;
    p->bytes = qc_matmul_workspace_bytes(h, &p->w.ready, j->m, j->path, j->limit_bytes);
    KM_OK(qc_cuda_stream_create(&p->s, &km_error));
    KM_OK(qc_cuda_malloc(&p->workspace, p->bytes, &km_error));
    KM_OK(qc_cuda_fill(p->workspace, 0xff, p->bytes, p->s, &km_error));
    KM_OK(qc_cuda_stream_synchronize(p->s, &km_error));
    p->io = (qc_matmul_io){.m = j->m,
                           .x = km_upload(p->data.x, j->m * j->ldx * 2, 0, &p->x),
                           .x_dtype = j->x_dtype,
                           .ldx = j->ldx,
                           .y = km_upload(p->data.y, j->m * j->ldy * 2, 0, &p->y),
                           .y_dtype = j->y_dtype,
                           .ldy = j->ldy};
    if (j->bias)
        p->io.bias = km_upload(p->data.bias, p->data.n * 2, 0, &p->bias);
}

static void product_free(product *p)
{
    qc_cuda_stream_destroy(p->s);
    qc_cuda_free(p->workspace);
    qc_cuda_free(p->x);
    qc_cuda_free(p->y);
    qc_cuda_free(p->bias);
    km_data_free(&p->data);
    km_weight_free(&p->w);
}

static qc_status product_run(const product *p, const qc_matmul *h, qc_error *err)
{
    return qc_matmul_run(h, &p->w.ready, &p->io, p->data.job.path, p->workspace, p->bytes, p->s,
                         err);
}

/* y as it is, to out [m][ldy]; and y back to what it was before any product. */
static void product_take(product *p, uint16_t *out)
{
    size_t bytes = p->data.job.m * p->data.job.ldy * 2;
    km_download(out, p->io.y, bytes, p->s);
    KM_OK(qc_cuda_to_device(p->io.y, p->data.y, bytes, p->s, &km_error));
    KM_OK(qc_cuda_stream_synchronize(p->s, &km_error));
}

/* The word that a kernel writes is reported by whichever call comes next, once. */
TEST(test_fault)
{
    qt_rng rng = qt_rng_start("fault");
    qc_matmul *h = km_handle();
    km_spec spec = {.kind = QC_FORM_NF4, .n = 70, .k = 128, .block = 64};
    km_job job = {.m = 2, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16};
    product p;
    qc_error err = {0};
    uint16_t y[2 * 70];
    product_make(&p, h, &spec, &job, &rng);
    const qc_matmul_weights *w = &p.w.ready;
    qc_matmul_planned planned;
    KM_OK(qc_matmul_plan_product(h, &w, &p.io, 1, QC_MATMUL_AUTO, 0, &planned, &km_error));
    for (int call = 0; call < 4; call++) {
        KM_OK(qc_matmul_check(h, &km_error));
        *h->fault = 1;
        qc_status st = call == 0   ? qc_matmul_check(h, &err)
                       : call == 1 ? product_run(&p, h, &err)
                       : call == 2 ? qc_matmul_run_group(h, &w, &p.io, 1, QC_MATMUL_AUTO,
                                                         p.workspace, p.bytes, p.s, &err)
                                   : qc_matmul_run_planned(h, &planned, &w, &p.io, p.workspace,
                                                           p.bytes, p.s, &err);
        km_expect(st, QC_ERR_INTERNAL, &err,
                  "an earlier product on cuda:0 could not do its work (fault 1 of its kernel); its "
                  "y was not written");
        product_take(&p, y);
        assert_int_equal(y[0], KM_GAP); /* nor by this one */
        KM_OK(product_run(&p, h, &km_error));
        product_take(&p, y);
        assert_int_not_equal(y[0], KM_GAP);
    }
    *h->fault = 2;
    km_expect(qc_matmul_check(h, &err), QC_ERR_USAGE, &err, "product of experts on cuda:0 found");
    KM_OK(qc_matmul_check(h, &km_error));
    product_free(&p);
    qc_matmul_destroy(h);
}

typedef struct {
    const qc_matmul *h;
    int seen;
} fault_watch;

static void *watch_fault(void *arg)
{
    fault_watch *f = arg;
    for (int i = 0; i < 1000; i++)
        f->seen += qc_matmul_check(f->h, NULL) != QC_OK;
    return NULL;
}

/* Two threads that ask at once: one of them is told. */
TEST(test_fault_threads)
{
    qc_matmul *h = km_handle();
    for (int i = 0; i < 20; i++) {
        fault_watch f[2] = {{h, 0}, {h, 0}};
        pthread_t threads[2];
        *h->fault = 1;
        for (int j = 0; j < 2; j++)
            assert_int_equal(pthread_create(&threads[j], NULL, watch_fault, &f[j]), 0);
        for (int j = 0; j < 2; j++)
            assert_int_equal(pthread_join(threads[j], NULL), 0);
        assert_int_equal(f[0].seen + f[1].seen, 1);
    }
    qc_matmul_destroy(h);
}

/* A plan run again gives what a run gives, with other weights of the shape as well, alone and in a
 * group of two launches; what it does not hold for is refused. */
TEST(test_planned)
{
    qt_rng rng = qt_rng_start("planned");
    qc_matmul *h = km_handle();
    km_spec spec = {.kind = QC_FORM_NF4, .n = 70, .k = 128, .block = 64};
    km_spec other = {.kind = QC_FORM_INT8_ROWS, .n = 70, .k = 128};
    for (int path = QC_MATMUL_AUTO; path <= QC_MATMUL_DEQUANT_GEMM; path++) {
        if ((path == QC_MATMUL_DEQUANT_GEMM && qc_matmul_no_gemm(h)) ||
            (path == QC_MATMUL_MMA_16816 && qc_matmul_device(h)->sm < 80))
            continue;
        km_job job = {.m = 11,
                      .x_dtype = QC_DTYPE_F16,
                      .y_dtype = path % 2 ? QC_DTYPE_F16 : QC_DTYPE_BF16,
                      .bias = path % 3 == 0,
                      .path = (qc_matmul_path)path};
        product p[2];
        km_weight third;
        product_make(&p[0], h, &spec, &job, &rng);
        product_make(&p[1], h, &spec, &job, &rng);
        km_weight_make(&third, h, &other, &rng);
        uint16_t want[11 * 70], got[11 * 70];
        qc_matmul_planned planned;
        const qc_matmul_weights *first = &p[0].w.ready;
        KM_OK(qc_matmul_plan_product(h, &first, &p[0].io, 1, (qc_matmul_path)path, p[0].bytes,
                                     &planned, &km_error));
        assert_true(planned.workspace_bytes <= p[0].bytes);
        for (int i = 0; i < 4; i++) {
            const qc_matmul_weights *w = &p[i % 2].w.ready;
            KM_OK(product_run(&p[i % 2], h, &km_error));
            product_take(&p[i % 2], want);
            KM_OK(qc_matmul_run_planned(h, &planned, &w, &p[i % 2].io, p[i % 2].workspace,
                                        p[i % 2].bytes, p[i % 2].s, &km_error));
            product_take(&p[i % 2], got);
            assert_memory_equal(got, want, sizeof got);
        }
        /* The same x for weights of two kinds. */
        const qc_matmul_weights *two[] = {&third.ready, &p[1].w.ready};
        qc_matmul_io io[2] = {p[0].io, p[0].io};
        io[1].y = p[1].io.y;
        qc_matmul_planned pair;
        KM_OK(qc_matmul_plan_product(h, two, io, 2, (qc_matmul_path)path, 0, &pair, &km_error));
        assert_int_equal(pair.sets, 2);
        void *workspace = NULL;
        KM_OK(qc_cuda_malloc(&workspace, pair.workspace_bytes, &km_error));
        KM_OK(qc_matmul_run_planned(h, &pair, two, io, workspace, pair.workspace_bytes, p[0].s,
                                    &km_error));
        product_take(&p[0], got);
        KM_OK(qc_matmul_run(h, two[0], &io[0], (qc_matmul_path)path, workspace,
                            pair.workspace_bytes, p[0].s, &km_error));
        product_take(&p[0], want);
        assert_memory_equal(got, want, sizeof got);
        qc_cuda_free(workspace);
        km_weight_free(&third);
        product_free(&p[0]);
        product_free(&p[1]);
    }
    qc_matmul_destroy(h);
}

TEST(test_planned_refuses)
{
    qt_rng rng = qt_rng_start("planned refuses");
    qc_matmul *h = km_handle();
    km_spec spec = {.kind = QC_FORM_NF4, .n = 70, .k = 128, .block = 64};
    km_job job = {.m = 11, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16};
    product p;
    product_make(&p, h, &spec, &job, &rng);
    const qc_matmul_weights *w = &p.w.ready;
    qc_matmul_planned planned;
    qc_error err = {0};
    KM_OK(qc_matmul_plan_product(h, &w, &p.io, 1, QC_MATMUL_MMA_884, 0, &planned, &km_error));
    struct {
        const char *words;
        qc_matmul_io io;
        qc_matmul_weights w;
        uint64_t bytes;
    } cases[] = {
        {"planned for 11 rows of x, not 10", p.io, *w, p.bytes},
        {"planned for x in F16 and y in F16, not BF16 and F16", p.io, *w, p.bytes},
        {"planned for rows of x on 16-byte addresses", p.io, *w, p.bytes},
        {"weight 0 was planned without a bias", p.io, *w, p.bytes},
        {"weight 0 differs in kind, part, block or layout from the 70 x 128", p.io, *w, p.bytes},
        {"weight 0 differs", p.io, *w, p.bytes},
        {"weight 0 differs", p.io, *w, p.bytes},
        {"y is NULL", p.io, *w, p.bytes},
        {"rows of x are 100 elements apart", p.io, *w, p.bytes},
        {"not 256-byte aligned", p.io, *w, p.bytes},
    };
    cases[0].io.m = 10;
    cases[1].io.x_dtype = QC_DTYPE_BF16;
    cases[2].io.x = (const uint16_t *)p.io.x + 1;
    cases[3].io.bias = p.io.x;
    cases[4].w.part.rows = 69;
    cases[5].w.row_bytes = 64;
    cases[6].w.w.form.block_elems = 128;
    cases[7].io.y = NULL;
    cases[8].io.ldx = 100;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const qc_matmul_weights *v = &cases[i].w;
        km_expect(qc_matmul_run_planned(h, &planned, &v, &cases[i].io,
                                        (unsigned char *)p.workspace + (i == 9 ? 8 : 0), p.bytes,
                                        p.s, &err),
                  QC_ERR_USAGE, &err, cases[i].words);
    }
    planned.workspace_bytes = p.bytes + 1;
    km_expect(qc_matmul_run_planned(h, &planned, &w, &p.io, p.workspace, p.bytes, p.s, &err),
              QC_ERR_USAGE, &err, "but the product was planned for");
    /* Planning follows no pointers. */
    p.io.x = p.io.y = NULL;
    KM_OK(qc_matmul_plan_product(h, &w, &p.io, 1, QC_MATMUL_AUTO, 0, &planned, &km_error));
    p.io.m = 0;
    KM_OK(qc_matmul_plan_product(h, &w, &p.io, 1, QC_MATMUL_AUTO, 0, &planned, &km_error));
    KM_OK(qc_matmul_run_planned(h, &planned, &w, &p.io, NULL, 0, p.s, &km_error));
    km_expect(qc_matmul_plan_product(h, &w, &p.io, 9, QC_MATMUL_AUTO, 0, &planned, &err),
              QC_ERR_USAGE, &err, "group has 9 weights");
    product_free(&p);
    qc_matmul_destroy(h);
}

#ifdef QC_CUDA_SHIM
static void expect_current(int index)
{
    int current = -1;
    KM_OK(qc_cuda_current(&current, &km_error));
    assert_int_equal(current, index);
}

/* Making a handle, failing to, and ending it leave the thread's device as it was; work for a handle
 * of another device is refused before anything is launched. */
TEST(test_device)
{
    qt_rng rng = qt_rng_start("device");
    qc_error err = {0};
    qc_matmul *h = NULL;
    qc_shim_set_devices("sm_90:132:1GiB,sm_90:132:1GiB");
    qc_cuda_device zero, one;
    KM_OK(qc_cuda_device_open(&zero, 0, &km_error));
    KM_OK(qc_cuda_device_open(&one, 1, &km_error));
    for (int from = 0; from < 2; from++) {
        KM_OK(qc_cuda_use(from ? &one : &zero, &km_error));
        KM_OK(qc_matmul_create(&h, 1, &km_error));
        expect_current(from);
        qc_matmul_destroy(h);
        expect_current(from);
        qc_shim_fail_malloc(1);
        assert_int_equal(qc_matmul_create(&h, 1, &err), QC_ERR_NOMEM);
        assert_null(h);
        expect_current(from);
        assert_int_equal(qc_matmul_create(&h, 2, &err), QC_ERR_DEVICE);
        expect_current(from);
    }
    const char *const words = "the matmul's handle is for cuda:1, but the calling thread's device "
                              "is cuda:0; choose the handle's with qc_cuda_use";
    KM_OK(qc_matmul_create(&h, 1, &km_error));
    km_spec spec = {.kind = QC_FORM_NF4, .n = 70, .k = 128, .block = 64};
    km_job job = {.m = 2, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16};
    product p;
    product_make(&p, h, &spec, &job, &rng); /* with one current */
    const qc_matmul_weights *w = &p.w.ready;
    qc_matmul_planned planned;
    KM_OK(qc_matmul_plan_product(h, &w, &p.io, 1, QC_MATMUL_AUTO, 0, &planned, &km_error));
    KM_OK(qc_cuda_use(&zero, &km_error));
    qc_matmul_weights ready;
    uint64_t before = qc_shim_kernels_run();
    km_expect(product_run(&p, h, &err), QC_ERR_USAGE, &err, words);
    km_expect(qc_matmul_run_group(h, &w, &p.io, 1, QC_MATMUL_AUTO, p.workspace, p.bytes, p.s, &err),
              QC_ERR_USAGE, &err, words);
    km_expect(qc_matmul_run_planned(h, &planned, &w, &p.io, p.workspace, p.bytes, p.s, &err),
              QC_ERR_USAGE, &err, words);
    km_expect(qc_matmul_prepare(h, &p.w.device, p.workspace, &ready, p.s, &err), QC_ERR_USAGE, &err,
              words);
    km_expect(qc_matmul_dense(h, p.x, 1, 1, &p.io, NULL, 0, p.s, &err), QC_ERR_USAGE, &err, words);
    const qc_matmul_exact exact = {&p.w.device, NULL,   QC_DTYPE_F32, 70,         128,
                                   2,           p.io.x, QC_DTYPE_F16, p.workspace};
    km_expect(qc_matmul_reference(h, &exact, p.s, &err), QC_ERR_USAGE, &err, words);
    KM_OK(qc_cuda_use(&one, &km_error));
    KM_OK(qc_cuda_stream_synchronize(p.s, &km_error));
    assert_int_equal(qc_shim_kernels_run(), before);
    KM_OK(product_run(&p, h, &km_error));
    product_free(&p);
    qc_matmul_destroy(h);
    qc_shim_set_devices("sm_90:132:4GiB");
}
#endif

#ifdef QC_CUDA_SHIM
/* ---- chunks on the side stream (on a device with one multiprocessor: three tiles are enough) ---
 */

enum { CHUNK_N = 3840, CHUNK_ROWS = 768, CHUNK_M = 1 };

/* A product with room for two chunks of CHUNK_ROWS rows, and y as one chunk gives it. */
typedef struct {
    product p;
    uint64_t whole_bytes; /* p.bytes: of the chunks */
    uint16_t want[CHUNK_M * CHUNK_N];
} chunked;

static qc_matmul_plan plan_of(const qc_matmul *h, const product *p, uint64_t bytes)
{
    const qc_matmul_weights *w = &p->w.ready;
    qc_matmul_planned planned;
    KM_OK(qc_matmul_plan_product(h, &w, &p->io, 1, QC_MATMUL_DEQUANT_GEMM, bytes, &planned,
                                 &km_error));
    return planned.set[0].plan;
}

static void chunked_make(chunked *c, const qc_matmul *h, int form, qt_rng *rng)
{
    km_spec spec = {.kind = form == 1 ? QC_FORM_INT8_ROWS : QC_FORM_NF4,
                    .n = CHUNK_N,
                    .k = form == 2 ? 13 : 32,
                    .block = 64,
                    .nested = form == 0,
                    .scale = form == 3 ? 300.0 : 0};
    km_job job = {.m = CHUNK_M,
                  .x_dtype = form == 1 ? QC_DTYPE_BF16 : QC_DTYPE_F16,
                  .y_dtype = QC_DTYPE_F16,
                  .bias = form == 1,
                  .path = QC_MATMUL_DEQUANT_GEMM};
    product_make(&c->p, h, &spec, &job, rng);
    c->whole_bytes = c->p.bytes;
    assert_int_equal(plan_of(h, &c->p, c->whole_bytes).chunk_rows, CHUNK_N);
    KM_OK(product_run(&c->p, h, &km_error));
    product_take(&c->p, c->want);
    qc_matmul_plan p = plan_of(h, &c->p, c->whole_bytes);
    c->p.bytes = p.dense_offset + 4 * CHUNK_ROWS * p.k_padded + 1024 + (4u << 20);
    p = plan_of(h, &c->p, c->p.bytes);
    assert_int_equal(p.chunk_rows, CHUNK_ROWS);
    assert_true(p.dense_stride >= 2 * CHUNK_ROWS * p.k_padded);
}

/* Everything that was made of c so far is done: y is right, and then it is not any more. */
static void chunked_check(chunked *c)
{
    uint16_t got[CHUNK_M * CHUNK_N];
    product_take(&c->p, got);
    assert_memory_equal(got, c->want, sizeof got);
}

/* Two products one behind the other on one stream, sharing one workspace. */
static void run_two(const qc_matmul *h, chunked *c)
{
    qc_matmul_io second = c[1].p.io;
    KM_OK(product_run(&c[0].p, h, &km_error));
    KM_OK(qc_matmul_run(h, &c[1].p.w.ready, &second, QC_MATMUL_DEQUANT_GEMM, c[0].p.workspace,
                        c[0].p.bytes, c[0].p.s, &km_error));
}

static void check_two(chunked *c)
{
    KM_OK(qc_cuda_stream_synchronize(c[0].p.s, &km_error));
    chunked_check(&c[0]);
    chunked_check(&c[1]);
}

static qc_cuda_graph capture_two(const qc_matmul *h, chunked *c)
{
    qc_cuda_graph graph = NULL;
    KM_OK(qc_cuda_capture_begin(c[0].p.s, &km_error));
    run_two(h, c);
    KM_OK(qc_cuda_capture_end(&graph, c[0].p.s, &km_error));
    return graph;
}

static void check_chunks(const qc_matmul *h, int form, qt_rng *rng)
{
    chunked c[2], other;
    chunked_make(&c[0], h, form, rng);
    chunked_make(&c[1], h, form, rng);
    chunked_make(&other, h, form, rng);
    run_two(h, c);
    check_two(c);
    for (int i = 0; i < 2; i++) {
        qc_cuda_graph graph = capture_two(h, c);
        KM_OK(qc_cuda_graph_launch(graph, c[0].p.s, &km_error));
        KM_OK(qc_cuda_graph_launch(graph, c[0].p.s, &km_error));
        check_two(c);
        qc_cuda_graph_destroy(graph);
    }
    /* A product that runs, and one that is captured, while another capture has the side stream. */
    qc_cuda_graph first = NULL, second = NULL;
    KM_OK(qc_cuda_capture_begin(c[0].p.s, &km_error));
    run_two(h, c);
    KM_OK(product_run(&other.p, h, &km_error));
    KM_OK(qc_cuda_stream_synchronize(other.p.s, &km_error));
    chunked_check(&other);
    KM_OK(qc_cuda_capture_begin(other.p.s, &km_error));
    KM_OK(product_run(&other.p, h, &km_error));
    KM_OK(qc_cuda_capture_end(&second, other.p.s, &km_error));
    KM_OK(qc_cuda_capture_end(&first, c[0].p.s, &km_error));
    KM_OK(qc_cuda_graph_launch(second, other.p.s, &km_error));
    KM_OK(qc_cuda_graph_launch(first, c[0].p.s, &km_error));
    chunked_check(&other);
    check_two(c);
    qc_cuda_graph_destroy(first);
    qc_cuda_graph_destroy(second);
    product_free(&c[0].p);
    product_free(&c[1].p);
    product_free(&other.p);
}

TEST(test_chunks)
{
    static const char *const modes[] = {"lazy", "eager", "shuffle:1", "shuffle:2", "shuffle:3"};
    qt_rng rng = qt_rng_start("chunks");
    qc_shim_set_devices("sm_90:1:1GiB");
    qc_matmul *h = km_handle();
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        qc_shim_set_streams(modes[i]);
        check_chunks(h, (int)(i % 4), &rng);
    }
    qc_shim_set_streams("lazy");
    qc_matmul_destroy(h);
    qc_shim_set_devices("sm_90:132:4GiB");
}

/* A launch that is refused in the middle: when the caller's stream is done, nothing runs, and the
 * handle goes on as before. */
TEST(test_chunks_fail)
{
    qt_rng rng = qt_rng_start("chunks fail");
    qc_error err = {0};
    qc_shim_set_devices("sm_90:1:1GiB");
    qc_matmul *h = km_handle();
    chunked c;
    chunked_make(&c, h, 1, &rng);
    unsigned failed = 0;
    for (unsigned n = 1;; n++) {
        uint16_t y[CHUNK_M * CHUNK_N];
        qc_cuda_graph graph = NULL;
        qc_shim_fail_launch(n);
        qc_status st = product_run(&c.p, h, &err);
        qc_shim_fail_launch(0);
        product_take(&c.p, y);
        uint64_t kernels = qc_shim_kernels_run();
        KM_OK(qc_cuda_stream_synchronize(h->side[0].stream, &km_error));
        assert_int_equal(qc_shim_kernels_run(), kernels);
        KM_OK(qc_cuda_capture_begin(c.p.s, &km_error));
        qc_shim_fail_launch(n);
        assert_int_equal(product_run(&c.p, h, &err), st);
        qc_shim_fail_launch(0);
        KM_OK(qc_cuda_capture_end(&graph, c.p.s, &km_error)); /* all of it was joined */
        qc_cuda_graph_destroy(graph);
        if (st == QC_OK)
            break;
        failed++;
    }
    assert_int_equal(failed, 1 + 5 + 5); /* x, five chunks, five reductions */
    KM_OK(product_run(&c.p, h, &km_error));
    chunked_check(&c);
    product_free(&c.p);
    qc_matmul_destroy(h);
    qc_shim_set_devices("sm_90:132:4GiB");
}
#endif

int main(void)
{
    int skip = km_no_device();
    return skip ? skip : test_run_all(NULL);
}
