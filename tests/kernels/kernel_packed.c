/* Packed weights: there and back bit for bit, each code at the place that matmul_packed.h says,
 * dense rows and products with the bits of those of the file's layout, on every path that reads
 * them, and what is refused. The last test says which kernels were compared. */
#include "tests/fixtures/kernel_matmul.h"

#include "kernels/cuda_dequantize.h"
#include "kernels/matmul_handle.h"
#include "kernels/matmul_packed.h"

#include <inttypes.h>

#ifdef QC_CUDA_SHIM
#include "shim_control.h"
#endif

static qc_matmul *handle;
static qt_rng rng;
static qc_cuda_stream stream;

#define COUNT(a) (sizeof(a) / sizeof *(a))

/* A weight, and the same packed: km_run takes either. */
typedef struct {
    km_weight file, packed;
    void *memory;
} weights;

static void weights_make(weights *w, const km_spec *spec)
{
    km_weight_make(&w->file, handle, spec, &rng);
    w->packed = w->file;
    KM_OK(qc_cuda_malloc(&w->memory, qc_matmul_packed_bytes(handle, &w->file.device), &km_error));
    KM_OK(qc_matmul_pack(handle, &w->file.ready, w->memory, &w->packed.ready, stream, &km_error));
    KM_OK(qc_cuda_stream_synchronize(stream, &km_error));
}

static void weights_free(weights *w)
{
    qc_cuda_free(w->memory);
    km_weight_free(&w->file);
}

/* Both cut alike. */
static weights sliced(const weights *whole, const qc_weights_part *part)
{
    weights w = *whole;
    KM_OK(qc_matmul_slice(&whole->file.ready, part, &w.file.ready, &km_error));
    KM_OK(qc_matmul_slice(&whole->packed.ready, part, &w.packed.ready, &km_error));
    return w;
}

/* A form that can be packed, of so many columns, 64 times a number; in turn each kind, plain and
 * nested. Scales of 1e-6 and 1e9 take an exponent. */
static km_spec spec_of(unsigned turn, uint64_t n, uint64_t k)
{
    static const double scales[] = {0.05, 1e-6, 0.05, 1e9, 0.05};
    km_spec spec = km_next_spec(turn, n, k);
    spec.scale = scales[turn % COUNT(scales)];
    return spec;
}

static uint64_t between(uint64_t least, uint64_t most)
{
    return least + qt_below(&rng, most - least + 1);
}

/* A part that a packed weight can be cut into. */
static qc_weights_part part_of(const qc_weights *w)
{
    const uint64_t step = qc_packed_has_scales(w) ? 256 : 64, cols = w->form.cols / step;
    const uint64_t bands = (w->rows + 63) / 64, band = qt_below(&rng, bands);
    const uint64_t rows = 64 * between(1, bands - band), col = qt_below(&rng, cols);
    return (qc_weights_part){64 * band, rows < w->rows - 64 * band ? rows : w->rows - 64 * band,
                             step * col, step * between(1, cols - col)};
}

/* On the shim, `most` blocks of a grid in x and in y, so that kernels go on in steps; 0: any. */
static void set_grid(unsigned most)
{
#ifdef QC_CUDA_SHIM
    qc_shim_set_grid(most);
#else
    (void)most;
#endif
}

/* ---- the layout ------------------------------------------------------------------------------ */

static const km_spec specs[] = {
    {.kind = QC_FORM_NF4, .block = 64, .nested = 1, .n = 200, .k = 512},
    {.kind = QC_FORM_NF4, .block = 64, .nested = 1, .n = 64, .k = 320},
    {.kind = QC_FORM_NF4, .block = 128, .nested = 1, .n = 1, .k = 256},
    {.kind = QC_FORM_NF4, .block = 64, .n = 130, .k = 64},
    {.kind = QC_FORM_INT8_BLOCKS, .block = 64, .nested = 1, .n = 77, .k = 768},
    {.kind = QC_FORM_INT8_ROWS, .n = 129, .k = 192},
    /* The codes' address is odd, so preparing lays them out anew. */
    {.kind = QC_FORM_NF4, .block = 64, .nested = 1, .n = 70, .k = 256, .shift = 1},
    {.kind = QC_FORM_INT8_BLOCKS, .block = 64, .n = 65, .k = 128, .shift = 4},
};

/* Code k of row n, 4 bits of NF4 or 8 of int8, of codes in the file's layout. */
static unsigned code_of(const qc_weights *w, const uint8_t *codes, uint64_t n, uint64_t k)
{
    const uint64_t f = n * w->form.cols + k;
    return w->form.ops->bits == 4 ? codes[f / 2] >> (f % 2 ? 0 : 4) & 15u : codes[f];
}

/* The same of packed ones: the bytes of a block in matmul_packed.h's words. */
static unsigned packed_code_of(const qc_weights *w, const uint8_t *packed, uint64_t n, uint64_t k)
{
    const int nf4 = w->form.ops->bits == 4;
    const uint64_t block = n / 64 * (w->form.cols / 64) + k / 64;
    const uint64_t unit = n % 64 / 16, g = n % 8, high = n / 8 % 2, t = k % 64 / 16, i = k % 16;
    const uint64_t lane = 4 * g + t;
    if (nf4) {
        const uint8_t byte = packed[block * 2048 + unit * 512 + lane * 16 + high * 8 + i / 2];
        return byte >> (i % 2 ? 0 : 4) & 15u;
    }
    return packed[block * 4096 + unit * 1024 + high * 512 + lane * 16 + i];
}

/* The codes of scales may have any address, on the way there and back. */
TEST(test_there_and_back)
{
    for (size_t i = 0; i < COUNT(specs); i++) {
        km_weight w;
        km_weight_make(&w, handle, &specs[i], &rng);
        const qc_weights *host = &w.host;
        const uint64_t codes = qc_form_code_bytes(&host->form, host->rows * host->form.cols);
        const uint64_t scales = qc_form_scales(&host->form, host->rows * host->form.cols);
        const uint64_t bytes = qc_matmul_packed_bytes(handle, host);
        const uint64_t code_bytes = qc_packed_code_bytes(host);
        const int packs_scales = qc_packed_has_scales(host);
        qc_matmul_weights packed;
        void *memory = NULL, *back = NULL, *scales_back = NULL, *scales_base = NULL;
        const size_t shift = i % 4;
        if (host->absmax_codes)
            w.ready.w.absmax_codes = km_upload(host->absmax_codes, scales, shift, &scales_base);
        assert_int_equal(w.ready.row_bytes != 0, specs[i].shift != 0);
        assert_int_equal(bytes, code_bytes + qc_packed_scale_bytes(host));
        KM_OK(qc_cuda_malloc(&memory, bytes, &km_error));
        KM_OK(qc_cuda_malloc(&back, codes, &km_error));
        KM_OK(qc_cuda_malloc(&scales_back, scales + shift, &km_error));
        set_grid(i % 2 ? 3 : 0);
        KM_OK(qc_matmul_pack(handle, &w.ready, memory, &packed, stream, &km_error));
        assert_int_equal(packed.packed, 1);
        assert_int_equal(packed.row_bytes, 0);
        uint8_t *const to = packs_scales ? (uint8_t *)scales_back + shift : NULL;
        KM_OK(qc_matmul_unpack(handle, &packed, back, to, stream, &km_error));
        set_grid(0);
        uint8_t *all = km_host(bytes), *again = km_host(codes), *map = km_host(scales);
        km_download(all, memory, bytes, stream);
        km_download(again, back, codes, stream);
        assert_memory_equal(again, host->codes, codes);
        for (uint64_t n = 0; n < host->rows; n++)
            for (uint64_t k = 0; k < host->form.cols; k++)
                QT_CHECK(packed_code_of(host, all, n, k) == code_of(host, host->codes, n, k),
                         "weight %zu, code %" PRIu64 " of row %" PRIu64, i, k, n);
        if (packs_scales) {
            const uint64_t blocks = host->form.cols / 64;
            km_download(map, to, scales, stream);
            assert_memory_equal(map, host->absmax_codes, scales);
            for (uint64_t n = 0; n < host->rows; n++)
                for (uint64_t b = 0; b < blocks; b++)
                    QT_CHECK(all[code_bytes + (n / 64 * (blocks / 4) + b / 4) * 256 +
                                 (n / 16 % 4 * 16 + n % 8 * 2 + n / 8 % 2) * 4 + b % 4] ==
                                 host->absmax_codes[n * blocks + b],
                             "weight %zu, scale %" PRIu64 " of row %" PRIu64, i, b, n);
        }
        free(all);
        free(again);
        free(map);
        qc_cuda_free(memory);
        qc_cuda_free(back);
        qc_cuda_free(scales_back);
        qc_cuda_free(scales_base);
        km_weight_free(&w);
    }
}

/* *out may be *w. */
TEST(test_in_place)
{
    weights w;
    weights_make(&w, &specs[0]);
    qc_matmul_weights same = w.file.ready;
    KM_OK(qc_matmul_pack(handle, &same, w.memory, &same, stream, &km_error));
    KM_OK(qc_cuda_stream_synchronize(stream, &km_error));
    assert_memory_equal(&same, &w.packed.ready, sizeof same);
    weights_free(&w);
}

/* ---- dense rows ------------------------------------------------------------------------------ */

/* Any rows of any part, from within a band or a unit on, have the bits of qc_cuda_dequantize_part
 * of the file's layout, with and without the exponent, also where values are subnormal as floats.
 */
TEST(test_dense_rows)
{
    for (unsigned turn = 0; turn < 48; turn += qt_every(4)) {
        km_spec spec = spec_of(turn, between(1, 200), 64 * between(1, 12));
        if (turn % 6 == 5)
            spec.scale = 1e-41;
        if (turn % 3 == 0)
            spec.k = 256 * between(1, 3);
        weights whole;
        weights_make(&whole, &spec);
        const qc_weights_part part = part_of(&whole.file.host);
        const weights w = turn % 2 ? sliced(&whole, &part) : whole;
        const qc_weights_part *of = &w.file.ready.part;
        const uint64_t first = qt_below(&rng, of->rows), rows = between(1, of->rows - first);
        const uint64_t bytes = rows * of->cols * 2;
        const qc_weights_part range = {of->row + first, rows, of->col, of->cols};
        const qc_dtype dtype = turn / 2 % 2 ? QC_DTYPE_BF16 : QC_DTYPE_F16;
        const int *exponent = turn / 4 % 2 ? w.file.ready.exponent : NULL;
        void *dense[2] = {NULL};
        uint16_t *want = km_host(bytes), *got = km_host(bytes);
        for (int i = 0; i < 2; i++)
            KM_OK(qc_cuda_malloc(&dense[i], bytes, &km_error));
        KM_OK(qc_cuda_fill(dense[1], 0xcd, bytes, stream, &km_error));
        KM_OK(qc_cuda_dequantize_part(&w.file.device, &range, dense[0], dtype, of->cols, exponent,
                                      NULL, stream, &km_error));
        set_grid(turn % 5 == 4);
        KM_OK(qc_matmul_dense_rows_launch(&w.packed.ready, first, rows, dense[1], dtype, of->cols,
                                          exponent, stream, &km_error));
        set_grid(0);
        km_download(want, dense[0], bytes, stream);
        km_download(got, dense[1], bytes, stream);
        for (uint64_t i = 0; i < rows * of->cols; i++)
            QT_CHECK(got[i] == want[i],
                     "turn %u, row %" PRIu64 " + %" PRIu64 ", column %" PRIu64
                     ": 0x%04x, expected 0x%04x",
                     turn, first, i / of->cols, i % of->cols, got[i], want[i]);
        for (int i = 0; i < 2; i++)
            qc_cuda_free(dense[i]);
        free(want);
        free(got);
        weights_free(&whole);
    }
}

/* ---- products -------------------------------------------------------------------------------- */

/* The kernels that read packed weights, and how often each was compared. */
enum { DEQUANT_GEMM, STREAM, TILES, WGMMA, KERNELS };
static const char *const kernel_names[KERNELS] = {"dequant-gemm", "stream", "tiles", "wgmma"};
static unsigned compared[KERNELS];

/* Whether this build and this device have the path at all. */
static int is_here(qc_matmul_path path)
{
    if (path == QC_MATMUL_WGMMA)
        return handle->device.sm == 90 && km_wgmma_was_built();
    return path != QC_MATMUL_DEQUANT_GEMM || !qc_matmul_no_gemm(handle);
}

/* The kernel that a job leads to; *path is the path. */
static int kernel_of(const qc_matmul_weights *w, const km_job *job, qc_matmul_path *path)
{
    qc_matmul_planned planned;
    const qc_matmul_io io = {.m = job->m,
                             .x = (const void *)(uintptr_t)(256 + 2 * job->x_shift),
                             .x_dtype = job->x_dtype,
                             .y_dtype = job->y_dtype,
                             .ldx = job->ldx,
                             .ldy = job->ldy};
    KM_OK(qc_matmul_plan_product(handle, &w, &io, 1, job->path, job->limit_bytes, &planned,
                                 &km_error));
    *path = planned.set[0].plan.path;
    if (*path == QC_MATMUL_DEQUANT_GEMM || *path == QC_MATMUL_WGMMA)
        return *path == QC_MATMUL_WGMMA ? WGMMA : DEQUANT_GEMM;
    const uint32_t variant = planned.set[0].plan.variant;
    assert_true(*path == QC_MATMUL_MMA_16816 && variant != QC_MATMUL_GENERAL);
    return variant == QC_MATMUL_STREAM ? STREAM : TILES;
}

/* y with the packed weight has the bits of y with the file's layout, by the same kernel. There is
 * another one only where stream takes a weight of fewer than 64 rows because it is packed, which
 * kernel_stream.c holds against sums in double. */
static void compare(const weights *w, km_job job)
{
    qc_matmul_path path = QC_MATMUL_AUTO;
    km_data d;
    if (!is_here(job.path))
        return;
    const int kernel = kernel_of(&w->packed.ready, &job, &path);
    job.path = path;
    if (kernel_of(&w->file.ready, &job, &path) != kernel) {
        assert_true(kernel == STREAM && w->file.ready.part.rows < 64);
        return;
    }
    km_data_make(&d, &w->file, &job, &rng);
    const uint64_t bytes = job.m * d.job.ldy * 2;
    uint16_t *want = km_host(bytes);
    km_run(handle, &w->file, &d);
    memcpy(want, d.y, bytes);
    km_run(handle, &w->packed, &d);
    for (uint64_t i = 0; i < bytes / 2; i++)
        QT_CHECK(d.y[i] == want[i],
                 "%s, %d, %" PRIu64 " x %" PRIu64 " in blocks of %u: y[%" PRIu64 "][%" PRIu64
                 "] is 0x%04x, in the file's layout 0x%04x",
                 kernel_names[kernel], (int)w->file.spec.kind, d.n, d.k, w->file.spec.block,
                 i / d.job.ldy, i % d.job.ldy, d.y[i], want[i]);
    compared[kernel]++;
    free(want);
    km_data_free(&d);
}

/* Ways to each of the kernels, by numbers of rows of x, and the one that the plan chooses. */
static const struct {
    qc_matmul_path path;
    uint64_t m_least, m_most;
} ways[] = {
    {QC_MATMUL_MMA_16816, 1, 8}, {QC_MATMUL_MMA_16816, 9, 16}, {QC_MATMUL_MMA_16816, 17, 70},
    {QC_MATMUL_WGMMA, 1, 16},    {QC_MATMUL_WGMMA, 17, 70},    {QC_MATMUL_DEQUANT_GEMM, 1, 40},
    {QC_MATMUL_AUTO, 1, 40},
};

static km_job job_of(unsigned turn, size_t way, const weights *w)
{
    const qc_weights_part *of = &w->file.ready.part;
    km_job job = km_next_job((unsigned)qt_below(&rng, 60),
                             between(ways[way].m_least, ways[way].m_most), of->rows, of->cols);
    job.path = ways[way].path;
    job.residual = turn % 3 ? 0 : turn % 2 ? KM_IN_Y : KM_APART;
    job.act = turn % 4 == 1 ? QC_MATMUL_SILU : QC_MATMUL_NO_GATE;
    /* cuBLAS's 4 MiB, and room for chunks of 64 rows: the last one may be any shorter. */
    if (job.path == QC_MATMUL_DEQUANT_GEMM && turn % 2)
        job.limit_bytes =
            (4u << 20) + 4096 + 64 * 2 * of->cols + 3 * job.m * of->cols + 64 * 4 * job.m + 4096;
    return job;
}

/* Random shapes and forms, whole and sliced, on every way. */
TEST(test_products)
{
    for (unsigned turn = 0; turn < 24; turn += qt_every(6)) {
        const uint64_t step = turn % 2 ? 256 : 64;
        const km_spec spec = spec_of(turn, between(1, 280), step * between(1, 768 / step));
        weights whole;
        weights_make(&whole, &spec);
        const qc_weights_part part = part_of(&whole.file.host);
        const weights some = sliced(&whole, &part);
        for (size_t i = 0; i < COUNT(ways); i++) {
            const weights *w = (turn + i) % 2 ? &some : &whole;
            compare(w, job_of(turn, i, w));
        }
        weights_free(&whole);
    }
}

/* A part of a part is that part of the whole. */
TEST(test_part_of_a_part)
{
    const km_spec spec = {.kind = QC_FORM_NF4, .n = 250, .k = 1024, .block = 64, .nested = 1};
    const qc_weights_part outer = {64, 186, 256, 768}, inner = {64, 122, 256, 256};
    const qc_weights_part both = {128, 122, 512, 256};
    weights whole;
    weights_make(&whole, &spec);
    const weights some = sliced(&whole, &outer), within = sliced(&some, &inner);
    const weights direct = sliced(&whole, &both);
    assert_memory_equal(&within.packed.ready, &direct.packed.ready, sizeof within.packed.ready);
    for (size_t i = 0; i < COUNT(ways); i++)
        compare(&within, job_of(1, i, &within));
    weights_free(&whole);
}

/* ---- groups ---------------------------------------------------------------------------------- */

enum { GROUP = 3, GROUP_M = 5, GROUP_K = 256 };

/* y [GROUP_M][n] of each weight from one call for all of them. Returns the launches that it took.
 */
static uint32_t run_group(const qc_matmul_weights *const *w, uint32_t count, qc_matmul_path path,
                          const void *x, uint16_t *const *y)
{
    qc_matmul_io io[GROUP];
    qc_matmul_planned planned;
    void *device[GROUP] = {NULL}, *workspace = NULL;
    for (uint32_t i = 0; i < count; i++)
        io[i] =
            (qc_matmul_io){.m = GROUP_M, .x = x, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16};
    KM_OK(qc_matmul_plan_product(handle, w, io, count, path, 0, &planned, &km_error));
    const uint64_t bytes = qc_matmul_group_workspace_bytes(handle, w, count, GROUP_M, path, 0);
    assert_true(bytes != UINT64_MAX);
    KM_OK(qc_cuda_malloc(&workspace, bytes, &km_error));
    KM_OK(qc_matmul_workspace_init(workspace, bytes, stream, &km_error));
    for (uint32_t i = 0; i < count; i++) {
        KM_OK(qc_cuda_malloc(&device[i], GROUP_M * w[i]->part.rows * 2, &km_error));
        io[i].y = device[i];
    }
    KM_OK(qc_matmul_run_group(handle, w, io, count, path, workspace, bytes, stream, &km_error));
    for (uint32_t i = 0; i < count; i++) {
        km_download(y[i], device[i], GROUP_M * w[i]->part.rows * 2, stream);
        qc_cuda_free(device[i]);
    }
    qc_cuda_free(workspace);
    return planned.sets;
}

/* Packed weights share a launch, with the bits of the file's layout; packed and other weights do
 * not, and each has the bits that it has in a launch of its own. */
TEST(test_groups)
{
    static const qc_matmul_path paths[] = {QC_MATMUL_MMA_16816, QC_MATMUL_WGMMA,
                                           QC_MATMUL_DEQUANT_GEMM, QC_MATMUL_AUTO};
    static const uint64_t rows[GROUP] = {128, 64, 70};
    weights w[GROUP];
    uint16_t x[GROUP_M * GROUP_K], *want[GROUP], *got[GROUP];
    void *base = NULL;
    for (int i = 0; i < GROUP; i++) {
        const km_spec spec = {
            .kind = QC_FORM_NF4, .n = rows[i], .k = GROUP_K, .block = 64, .nested = 1};
        weights_make(&w[i], &spec);
        want[i] = km_host(GROUP_M * rows[i] * 2);
        got[i] = km_host(GROUP_M * rows[i] * 2);
    }
    for (size_t i = 0; i < COUNT(x); i++)
        x[i] = km_bits(qt_randn(&rng), QC_DTYPE_F16);
    const void *device_x = km_upload(x, sizeof x, 0, &base);
    for (size_t p = 0; p < COUNT(paths); p++)
        for (int mixed = 0; mixed < 2; mixed++) {
            const qc_matmul_weights *packed[GROUP], *file[GROUP];
            for (int i = 0; i < GROUP; i++) {
                file[i] = &w[i].file.ready;
                packed[i] = mixed && i == 1 ? file[i] : &w[i].packed.ready;
            }
            if (!is_here(paths[p]))
                continue;
            assert_int_equal(run_group(packed, GROUP, paths[p], device_x, got), mixed ? GROUP : 1);
            if (!mixed)
                assert_int_equal(run_group(file, GROUP, paths[p], device_x, want), 1);
            for (int i = 0; i < GROUP; i++) {
                if (mixed)
                    assert_int_equal(run_group(&file[i], 1, paths[p], device_x, &want[i]), 1);
                assert_memory_equal(got[i], want[i], GROUP_M * rows[i] * 2);
            }
        }
    qc_cuda_free(base);
    for (int i = 0; i < GROUP; i++) {
        weights_free(&w[i]);
        free(want[i]);
        free(got[i]);
    }
}

/* ---- what is refused ------------------------------------------------------------------------- */

/* A plan is for weights in one layout. */
TEST(test_planned)
{
    const km_spec spec = {.kind = QC_FORM_NF4, .n = 64, .k = 256, .block = 64, .nested = 1};
    uint16_t x[256] = {0}, y[64];
    const qc_matmul_io io = {
        .m = 1, .x = x, .x_dtype = QC_DTYPE_F16, .y = y, .y_dtype = QC_DTYPE_F16};
    weights w;
    weights_make(&w, &spec);
    const qc_matmul_weights *layouts[] = {&w.file.ready, &w.packed.ready};
    for (int i = 0; i < 2; i++) {
        qc_matmul_planned planned;
        qc_error err = {0};
        const qc_matmul_path path =
            qc_matmul_no_gemm(handle) ? QC_MATMUL_AUTO : QC_MATMUL_DEQUANT_GEMM;
        KM_OK(qc_matmul_plan_product(handle, &layouts[i], &io, 1, path, 0, &planned, &km_error));
        km_expect(qc_matmul_run_planned(handle, &planned, &layouts[!i], &io, NULL, 0, stream, &err),
                  QC_ERR_USAGE, &err, "weight 0 differs in kind, part, block or layout from");
    }
    weights_free(&w);
}

/* Paths that do not read packed weights are refused by name, and have no workspace. */
TEST(test_paths)
{
    static const struct {
        qc_matmul_path path;
        const char *words;
    } refused[] = {{QC_MATMUL_GEMV, "path gemv does not read packed weights"},
                   {QC_MATMUL_MMA_884, "path mma-884 does not read packed weights"},
                   {QC_MATMUL_FILL, "cannot be asked for"}};
    const km_spec spec = {.kind = QC_FORM_INT8_ROWS, .n = 64, .k = 64};
    uint16_t x[64] = {0}, y[64];
    const qc_matmul_io io = {
        .m = 1, .x = x, .x_dtype = QC_DTYPE_F16, .y = y, .y_dtype = QC_DTYPE_F16};
    weights w;
    weights_make(&w, &spec);
    for (size_t i = 0; i < COUNT(refused); i++) {
        km_expect_run(handle, &w.packed.ready, &io, (int)refused[i].path, NULL, 0,
                      refused[i].words);
        assert_true(UINT64_MAX ==
                    qc_matmul_workspace_bytes(handle, &w.packed.ready, 8, refused[i].path, 0));
    }
    /* Without rows of x there is nothing to read. */
    qc_matmul_io none = io;
    none.m = 0;
    static const qc_matmul_path empty[] = {QC_MATMUL_AUTO, QC_MATMUL_MMA_16816};
    for (size_t i = 0; i < COUNT(empty); i++)
        KM_OK(qc_matmul_run(handle, &w.packed.ready, &none, empty[i], NULL, 0, stream, &km_error));
    weights_free(&w);
}

TEST(test_cuts)
{
    static const km_spec forms[] = {
        {.kind = QC_FORM_NF4, .n = 200, .k = 512, .block = 64, .nested = 1},
        {.kind = QC_FORM_INT8_BLOCKS, .n = 200, .k = 512, .block = 64}};
    static const struct {
        int form;
        qc_weights_part part;
        const char *words; /* NULL: a cut */
    } cuts[] = {
        {0, {64, 128, 0, 512}, NULL},
        {0, {192, 8, 256, 256}, NULL},
        {1, {128, 72, 448, 64}, NULL},
        {0, {3, 0, 5, 0}, NULL},
        {0,
         {32, 64, 0, 512},
         "rows 32 to 96 of a packed weight cut through 64 rows that stay together; it can be cut "
         "at multiples of 64 rows"},
        {0, {64, 72, 0, 512}, "rows 64 to 136 of a packed weight"},
        {0,
         {0, 64, 64, 256},
         "columns 64 to 320 of a packed weight in nf4 cut through 256 weights that stay together; "
         "it can be cut at multiples of 256 columns"},
        {0, {0, 64, 0, 448}, "columns 0 to 448 of a packed weight"},
        {1, {0, 64, 32, 64}, "cut at multiples of 64 columns"},
        {1, {0, 201, 0, 64}, "are not within a weight of 200 rows"},
    };
    for (int form = 0; form < 2; form++) {
        weights w;
        weights_make(&w, &forms[form]);
        for (size_t i = 0; i < COUNT(cuts); i++) {
            qc_matmul_weights out = w.packed.ready;
            qc_error err = {0};
            if (cuts[i].form != form)
                continue;
            const qc_status st = qc_matmul_slice(&w.packed.ready, &cuts[i].part, &out, &err);
            if (!cuts[i].words) {
                assert_int_equal(st, QC_OK);
                assert_memory_equal(&out.part, &cuts[i].part, sizeof out.part);
                assert_int_equal(out.packed, 1);
                continue;
            }
            assert_int_not_equal(st, QC_OK);
            km_expect(st, st, &err, cuts[i].words);
            assert_memory_equal(&out, &w.packed.ready, sizeof out);
        }
        weights_free(&w);
    }
}

/* A weight that cannot be packed: 0 bytes, and a sentence. */
TEST(test_forms)
{
    static const struct {
        km_spec spec;
        const char *words;
    } forms[] = {
        {{.kind = QC_FORM_NF4, .n = 8, .k = 96, .block = 64},
         "a weight of 8 x 96 in nf4, blocks of 64, cannot be packed; expected NF4 or int8 with "
         "columns that 64 divides, and blocks of 64 or more or a scale per row"},
        {{.kind = QC_FORM_NF4, .n = 8, .k = 128, .block = 32}, "blocks of 32, cannot be packed"},
        {{.kind = QC_FORM_INT8_BLOCKS, .n = 8, .k = 128, .block = 32}, "blocks of 32"},
        {{.kind = QC_FORM_INT8_ROWS, .n = 8, .k = 100}, "a weight of 8 x 100"},
        {{.kind = QC_FORM_NF4, .n = 0, .k = 128, .block = 64}, "a weight of 0 x 128"},
        {{.kind = QC_FORM_W4A16, .n = 8, .k = 128, .block = 64}, "cannot be packed"},
        {{.kind = QC_FORM_W8A16, .n = 8, .k = 128, .block = 64}, "cannot be packed"},
        {{.kind = QC_FORM_W8A8, .n = 8, .k = 128}, "cannot be packed"},
    };
    void *memory = NULL;
    KM_OK(qc_cuda_malloc(&memory, 4096, &km_error));
    for (size_t i = 0; i < COUNT(forms); i++) {
        km_weight w;
        qc_error err = {0};
        km_weight_make(&w, handle, &forms[i].spec, &rng);
        qc_matmul_weights out = w.ready;
        assert_true(qc_matmul_packed_bytes(handle, &w.device) == 0);
        km_expect(qc_matmul_pack(handle, &w.ready, memory, &out, stream, &err), QC_ERR_UNSUPPORTED,
                  &err, forms[i].words);
        assert_memory_equal(&out, &w.ready, sizeof out);
        km_weight_free(&w);
    }
    qc_cuda_free(memory);
}

TEST(test_bytes)
{
    qc_weights w = {.form = {.ops = qc_form_ops_of(QC_FORM_NF4), .cols = 8192, .block_elems = 64},
                    .rows = 28672,
                    .nested_block = 256};
    /* The figures of docs/matmul.md. */
    assert_int_equal(qc_matmul_packed_bytes(handle, &w), 117440512 + 3670016);
    w.rows = 28609; /* to the next multiple of 64 */
    assert_int_equal(qc_matmul_packed_bytes(handle, &w), 117440512 + 3670016);
    w.nested_block = 2; /* four blocks of a row in two groups */
    assert_int_equal(qc_matmul_packed_bytes(handle, &w), 117440512);
    w.nested_block = 256;
    w.form.cols = 8192 - 64;
    assert_int_equal(qc_matmul_packed_bytes(handle, &w), (uint64_t)28672 * 8128 / 2);
    w.rows = UINT64_MAX - 63;
    assert_true(qc_matmul_packed_bytes(handle, &w) == UINT64_MAX);
    assert_true(qc_matmul_packed_bytes(handle, NULL) == UINT64_MAX);
    assert_true(qc_matmul_packed_bytes(NULL, &w) == UINT64_MAX);
    w.form.ops = NULL;
    assert_true(qc_matmul_packed_bytes(handle, &w) == UINT64_MAX);
}

TEST(test_arguments)
{
    const qc_weights_part rows = {64, 64, 0, 256}, cols = {0, 128, 0, 64};
    const km_spec nested = {.kind = QC_FORM_NF4, .n = 128, .k = 256, .block = 64, .nested = 1};
    const km_spec plain = {.kind = QC_FORM_NF4, .n = 128, .k = 256, .block = 64};
    weights w, other;
    weights_make(&w, &nested);
    weights_make(&other, &plain);
    const qc_matmul_weights *file = &w.file.ready, *packed = &w.packed.ready;
    qc_matmul_weights upper, left, out = *file;
    KM_OK(qc_matmul_slice(file, &rows, &upper, &km_error));
    KM_OK(qc_matmul_slice(file, &cols, &left, &km_error));
    unsigned char *const memory = w.memory;
    qc_matmul old = *handle;
    old.device.sm = 75;
    const struct {
        const qc_matmul *h;
        const qc_matmul_weights *w;
        void *memory;
        qc_matmul_weights *out;
        qc_status status;
        const char *words;
    } packs[] = {
        {NULL, file, memory, &out, QC_ERR_USAGE, "the matmul's handle is NULL"},
        {handle, NULL, memory, &out, QC_ERR_USAGE, "qc_matmul_pack: the weight is NULL"},
        {handle, file, memory, NULL, QC_ERR_USAGE, "qc_matmul_pack: out is NULL"},
        {handle, file, NULL, &out, QC_ERR_USAGE,
         "the memory for a packed weight is not 256-byte aligned"},
        {handle, file, memory + 128, &out, QC_ERR_USAGE, "is not 256-byte aligned"},
        {handle, packed, memory, &out, QC_ERR_USAGE,
         "the weight is packed already; expected a prepared one, whole"},
        {handle, &upper, memory, &out, QC_ERR_USAGE, "the weight is a slice; expected"},
        {handle, &left, memory, &out, QC_ERR_USAGE, "the weight is a slice; expected"},
        {&old, file, memory, &out, QC_ERR_UNSUPPORTED,
         "packed weights are for kernels of sm_80 and newer, but this device is sm_75"},
    };
    for (size_t i = 0; i < COUNT(packs); i++) {
        qc_error err = {0};
        km_expect(
            qc_matmul_pack(packs[i].h, packs[i].w, packs[i].memory, packs[i].out, stream, &err),
            packs[i].status, &err, packs[i].words);
        assert_memory_equal(&out, file, sizeof out);
    }
    assert_int_equal(qc_matmul_packed_bytes(&old, &w.file.device), 0);

    const qc_matmul_weights *without = &other.packed.ready;
    qc_matmul_weights first;
    KM_OK(qc_matmul_slice(packed, &rows, &first, &km_error));
    const struct {
        const qc_matmul *h;
        const qc_matmul_weights *w;
        void *codes;
        uint8_t *absmax_codes;
        const char *words;
    } unpacks[] = {
        {NULL, packed, memory, memory, "the matmul's handle is NULL"},
        {handle, NULL, memory, memory, "qc_matmul_unpack: expected a packed weight, whole"},
        {handle, file, memory, memory, "expected a packed weight, whole"},
        {handle, &first, memory, memory, "expected a packed weight, whole"},
        {handle, packed, NULL, memory, "the codes of an unpacked weight are not 16-byte aligned"},
        {handle, packed, memory + 8, memory, "are not 16-byte aligned"},
        {handle, packed, memory, NULL,
         "the codes of the scales are packed, but absmax_codes is NULL"},
        {handle, without, memory, memory,
         "the codes of the scales are not packed, but absmax_codes is given"},
    };
    for (size_t i = 0; i < COUNT(unpacks); i++) {
        qc_error err = {0};
        km_expect(qc_matmul_unpack(unpacks[i].h, unpacks[i].w, unpacks[i].codes,
                                   unpacks[i].absmax_codes, stream, &err),
                  QC_ERR_USAGE, &err, unpacks[i].words);
    }
    weights_free(&w);
    weights_free(&other);
}

/* Every kernel that is there was compared. */
TEST(test_compared)
{
    static const qc_matmul_path paths[KERNELS] = {QC_MATMUL_DEQUANT_GEMM, QC_MATMUL_MMA_16816,
                                                  QC_MATMUL_MMA_16816, QC_MATMUL_WGMMA};
    for (int i = 0; i < KERNELS; i++)
        print_message("%s: %u products compared%s\n", kernel_names[i], compared[i],
                      is_here(paths[i]) ? "" : ", as it is not here");
    for (int i = 0; i < KERNELS; i++)
        assert_true(compared[i] || !is_here(paths[i]));
}

int main(void)
{
    if (km_no_device())
        return 77;
    handle = km_handle();
    if (handle->device.sm < 80) {
        print_message("skipped: no kernel of sm_%u reads packed weights\n", handle->device.sm);
        qc_matmul_destroy(handle);
        return 77;
    }
    rng = qt_rng_start("packed");
    KM_OK(qc_cuda_stream_create(&stream, &km_error));
    const int failed = test_run_all(NULL);
    qc_cuda_stream_destroy(stream);
    qc_matmul_destroy(handle);
    return failed;
}
