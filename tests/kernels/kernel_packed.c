/* Packed weights: there and back bit for bit, each code at the place that matmul_packed.h says, and
 * what cannot be packed. */
#include "tests/fixtures/kernel_matmul.h"

#include "kernels/matmul_packed.h"

#include <inttypes.h>

static qc_matmul *handle;
static qt_rng rng;
static qc_cuda_stream stream;

#define COUNT(a) (sizeof(a) / sizeof *(a))

static const km_spec specs[] = {
    {.kind = QC_FORM_NF4, .block = 64, .nested = 1, .n = 200, .k = 512},
    {.kind = QC_FORM_NF4, .block = 64, .nested = 1, .n = 64, .k = 320},
    {.kind = QC_FORM_NF4, .block = 128, .nested = 1, .n = 1, .k = 256},
    {.kind = QC_FORM_NF4, .block = 64, .n = 130, .k = 64},
    {.kind = QC_FORM_INT8_BLOCKS, .block = 64, .nested = 1, .n = 77, .k = 768},
    {.kind = QC_FORM_INT8_ROWS, .n = 129, .k = 192},
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

static void test_there_and_back(void **state)
{
    (void)state;
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
        void *memory = NULL, *back = NULL, *scales_back = NULL;
        assert_int_equal(bytes, code_bytes + qc_packed_scale_bytes(host));
        KM_OK(qc_cuda_malloc(&memory, bytes, &km_error));
        KM_OK(qc_cuda_malloc(&back, codes, &km_error));
        KM_OK(qc_cuda_malloc(&scales_back, scales, &km_error));
        KM_OK(qc_matmul_pack(handle, &w.ready, memory, &packed, stream, &km_error));
        KM_OK(qc_matmul_unpack(handle, &packed, back, packs_scales ? scales_back : NULL, stream,
                               &km_error));
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
            km_download(map, scales_back, scales, stream);
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
        km_weight_free(&w);
    }
}

int main(void)
{
    if (km_no_device())
        return 77;
    handle = km_handle();
    rng = qt_rng_start("packed");
    KM_OK(qc_cuda_stream_create(&stream, &km_error));
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_there_and_back),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    qc_cuda_stream_destroy(stream);
    qc_matmul_destroy(handle);
    return failed;
}
