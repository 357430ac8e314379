/* The stated error of block-quantized tensors against double arithmetic over every element. */
#include "tests/fixtures/quant_testing.h"

#include "quant/quant_form.h"

#define OPS qc_quant_ops_for(QC_ISA_SCALAR)

/* A source to be read again, which counts, and fails on demand. */
typedef struct {
    const float *x;
    uint64_t n, reads, fail_at;
    uint32_t block;
    float spoil; /* added to what is read */
} reader;

static qc_status read_floats(void *ctx, uint64_t first, uint64_t n, float *out, qc_error *err)
{
    reader *r = ctx;
    QT_CHECK(first % r->block == 0 && n <= r->block && first + n <= r->n, "read out of range");
    r->reads++;
    if (r->reads == r->fail_at)
        QC_FAIL(err, QC_ERR_IO, "as told");
    for (uint64_t i = 0; i < n; i++)
        out[i] = r->x[first + i] + r->spoil;
    return QC_OK;
}

/* A tensor with everything that quantizing it leaves. */
typedef struct {
    int nf4;
    uint64_t n, blocks;
    uint32_t block;
    const float *x;
    uint8_t *codes;
    float *absmax, *final;
    qc_block_error *errors;
    qc_piece_sums sums;
} tensor;

/* nested 0: the scales stay; 1: double quantization. In pieces, as the pipeline does. */
static tensor tensor_new(const float *x, uint64_t n, uint32_t block, int nf4, int nested)
{
    tensor t = {.nf4 = nf4, .n = n, .blocks = n / block + (n % block != 0), .block = block, .x = x};
    t.codes = qt_alloc(n + 1, 1);
    t.absmax = qt_alloc(t.blocks, sizeof *t.absmax);
    t.final = qt_alloc(t.blocks, sizeof *t.final);
    t.errors = qt_alloc(t.blocks, sizeof *t.errors);
    uint64_t piece_elems = block * 7u;
    for (uint64_t first = 0; first < n; first += piece_elems) {
        uint64_t count = n - first < piece_elems ? n - first : piece_elems, k = first / block;
        qc_piece_sums piece;
        if (nf4)
            OPS->nf4_quantize(x + first, QC_DTYPE_F32, count, block, t.codes + first / 2,
                              t.absmax + k, t.errors + k, &piece);
        else
            OPS->int8_blocks_quantize(x + first, QC_DTYPE_F32, count, block,
                                      (int8_t *)t.codes + first, t.absmax + k, t.errors + k,
                                      &piece);
        qc_piece_add(&t.sums, &piece, first);
    }
    assert_int_equal(t.sums.bad, QC_BAD_NONE);
    memcpy(t.final, t.absmax, t.blocks * sizeof *t.final);
    if (nested) {
        uint8_t *scales = qt_alloc(t.blocks, 1);
        float *groups = qt_alloc(t.blocks / 256 + 1, sizeof *groups);
        float offset = qc_nested_offset(t.absmax, t.blocks);
        OPS->nested_quantize(t.absmax, t.blocks, offset, scales, groups);
        OPS->nested_dequantize(scales, groups, qc_dynamic_map, t.blocks, 256, offset, t.final);
        free(scales);
        free(groups);
    }
    return t;
}

static void tensor_free(tensor *t)
{
    free(t->codes);
    free(t->absmax);
    free(t->final);
    free(t->errors);
}

static qc_tensor_error brute_force(const tensor *t)
{
    qc_tensor_error e = {0.0, 0.0, 0};
    double ee = 0.0, xx = 0.0;
    for (uint64_t i = 0; i < t->n; i++) {
        float c = t->nf4 ? qc_nf4_code[qt_nibble(t->codes, i)]
                         : (float)(int8_t)t->codes[i] * 7.874015718698502e-3f;
        float restored = c * t->final[i / t->block];
        double d = fabs((double)t->x[i] - (double)restored);
        ee += d * d;
        xx += (double)t->x[i] * (double)t->x[i];
        if (d > e.max_err) {
            e.max_err = d;
            e.max_index = i;
        }
    }
    e.rel_mse = xx > 0.0 ? ee / xx : 0.0;
    return e;
}

static qc_status finish(const tensor *t, reader *r, qc_tensor_error *out, qc_error *err)
{
    const qc_finished_blocks b = {
        .quant = OPS,
        .form = {.ops = t->nf4 ? &qc_form_nf4 : &qc_form_int8_blocks, .block_elems = t->block},
        .n = t->n,
        .absmax = t->absmax,
        .absmax_final = t->final,
        .errors = t->errors,
        .read = read_floats,
        .read_ctx = r};
    return qc_block_error_finish(&b, &t->sums, out, err);
}

/* Returns how many blocks were read again. */
static uint64_t check_finish(const tensor *t, double tolerance, const char *what)
{
    reader r = {.x = t->x, .n = t->n, .block = t->block};
    qc_tensor_error want = brute_force(t), found, again;
    qc_error err = {.code = QC_OK};
    assert_int_equal(finish(t, &r, &found, &err), QC_OK);
    QT_CHECK(found.max_err == want.max_err && found.max_index == want.max_index,
             "%s: largest error %a at %" PRIu64 ", expected %a at %" PRIu64, what, found.max_err,
             found.max_index, want.max_err, want.max_index);
    /* What is not accounted for, relative to the root of sum_xx and correlated with the error at
     * worst: y is rounded to float, restored values among subnormals to multiples of 2^-149. */
    double lost = 0x1p-22;
    if (t->sums.sum_xx > 0.0)
        lost += 0x1p-150 * sqrt((double)t->n / t->sums.sum_xx);
    double allowed = tolerance * want.rel_mse + 2 * lost * sqrt(want.rel_mse) + lost * lost;
    QT_CHECK(fabs(found.rel_mse - want.rel_mse) <= allowed,
             "%s: rel_mse %.8e, expected %.8e within %.1e", what, found.rel_mse, want.rel_mse,
             allowed);
    uint64_t reads = r.reads;
    assert_int_equal(finish(t, &r, &again, NULL), QC_OK);
    assert_true(memcmp(&again, &found, sizeof again) == 0);
    return reads;
}

TEST(test_weights)
{
    qt_rng rng = qt_rng_start("weights");
    uint64_t n = 1u << 20;
    float *x = qt_alloc(n, sizeof *x);
    for (uint32_t block = 32; block <= 4096; block *= 4) {
        for (int nf4 = 0; nf4 < 2; nf4++) {
            for (int nested = 0; nested < 2; nested++) {
                for (uint64_t i = 0; i < n; i++)
                    x[i] = qc_f32_from_bf16(qc_bf16_from_f32(qt_randn(&rng) * 0.02f));
                tensor t = tensor_new(x, n - 5, block, nf4, nested);
                uint64_t reads = check_finish(&t, 1e-4, "weights");
                print_message("%s block %4u%s: %" PRIu64 " of %" PRIu64 " blocks read again\n",
                              nf4 ? "nf4 " : "int8", block, nested ? " nested" : "       ", reads,
                              t.blocks);
                /* int8 with nested scales: the error of a scale is as large as that of a code, so
                 * that bounds lie closer to each other */
                assert_true(reads <= (nf4 || !nested ? 4 + t.blocks / 100 : t.blocks / 5));
                tensor_free(&t);
            }
        }
    }
    free(x);
}

/* Small tensors of every nature, short tails, one block, one element. */
TEST(test_assorted)
{
    qt_rng rng = qt_rng_start("assorted");
    float *x = qt_alloc(20000, sizeof *x);
    for (unsigned round = 0; round < 2000; round++) {
        uint32_t block = 32u << qt_below(&rng, 5);
        uint64_t n = 1 + qt_below(&rng, round % 20 ? 1000 : 20000);
        unsigned mode = (unsigned)qt_below(&rng, 6);
        double scale = pow(10.0, 60.0 * qt_uniform(&rng) - 30.0);
        for (uint64_t i = 0; i < n; i++) {
            double v = (double)qt_randn(&rng);
            x[i] = (float)(mode == 0   ? v * scale
                           : mode == 1 ? (i / block % 3 ? 0.0 : v)
                           : mode == 2 ? v * pow(10.0, (double)(i / block % 5))
                           : mode == 3 ? (i % 200 == 3 ? 1e4 * v : v)
                           : mode == 4 ? (double)(qt_below(&rng, 3)) - 1.0
                                       : v * 1e-42);
        }
        tensor t = tensor_new(x, n, block, round % 2, round / 2 % 2);
        /* few blocks, or scales far apart in one group: corrections weigh more */
        char what[32];
        snprintf(what, sizeof what, "assorted, mode %u", mode);
        check_finish(&t, 0x1p-7, what);
        tensor_free(&t);
    }
    free(x);
}

TEST(test_huge)
{
    qt_rng rng = qt_rng_start("huge");
    float *x = qt_alloc(5000, sizeof *x);
    for (unsigned round = 0; round < 200; round++) {
        for (uint64_t i = 0; i < 5000; i++)
            x[i] = (float)(2.0 * qt_uniform(&rng) - 1.0) * (round % 2 ? FLT_MAX : 0x1p126f);
        tensor t = tensor_new(x, 4990, 64, round / 2 % 2, 0);
        check_finish(&t, 1e-3, "huge");
        tensor_free(&t);
    }
    free(x);
}

/* Equal errors in many places: the lowest index is named, wherever the search began. */
TEST(test_ties)
{
    qt_rng rng = qt_rng_start("ties");
    float *x = qt_alloc(6400, sizeof *x);
    for (unsigned round = 0; round < 200; round++) {
        for (uint64_t i = 0; i < 6400; i++)
            x[i] = i % 64 == 0 ? 1.0f : 0.0f;
        uint64_t lowest = UINT64_MAX;
        for (unsigned k = 0; k < 5; k++) { /* an element between two codes, in five places */
            uint64_t i = qt_below(&rng, 6400);
            if (i % 64 == 0)
                continue;
            x[i] = 0.84f;
            lowest = i < lowest ? i : lowest;
        }
        tensor t = tensor_new(x, 6400, 64, 1, 0);
        qc_tensor_error want = brute_force(&t);
        assert_true(lowest == UINT64_MAX || want.max_index == lowest);
        check_finish(&t, 1e-4, "ties");
        tensor_free(&t);
    }
    free(x);
}

TEST(test_zeros_and_empty)
{
    float *x = qt_alloc(1000, sizeof *x);
    reader r = {.x = x, .n = 1000, .block = 64};
    qc_tensor_error e = {1.0, 1.0, 1};
    tensor t = tensor_new(x, 1000, 64, 1, 1);
    assert_true(check_finish(&t, 0.0, "zeros") <= 1);
    tensor_free(&t);
    /* no error anywhere, found in a later block first: still the lowest index */
    x[700] = 1.0f;
    t = tensor_new(x, 1000, 64, 1, 0);
    assert_true(brute_force(&t).max_index == 0 && brute_force(&t).max_err == 0.0);
    check_finish(&t, 0.0, "no error");
    tensor_free(&t);
    assert_int_equal(finish(&(tensor){.nf4 = 1, .block = 64}, &r, &e, NULL), QC_OK);
    assert_true(e.rel_mse == 0.0 && e.max_err == 0.0 && e.max_index == 0 && r.reads == 0);
    free(x);
}

TEST(test_failures)
{
    qt_rng rng = qt_rng_start("failures");
    float *x = qt_alloc(6400, sizeof *x);
    qc_tensor_error e;
    for (uint64_t i = 0; i < 6400; i++)
        x[i] = qt_randn(&rng);
    tensor t = tensor_new(x, 6400, 64, 1, 1);
    uint64_t reads = check_finish(&t, 1e-3, "failures");
    for (uint64_t fail = 1; fail <= reads; fail++) {
        reader r = {.x = x, .n = 6400, .block = 64, .fail_at = fail};
        qc_error err;
        assert_int_equal(finish(&t, &r, &e, &err), QC_ERR_IO);
        assert_string_equal(err.msg, "as told");
        assert_true(r.reads == fail);
    }
    const float spoils[] = {0.5f, NAN, INFINITY};
    for (unsigned s = 0; s < 3; s++) { /* the source changed since it was quantized */
        reader r = {.x = x, .n = 6400, .block = 64, .spoil = spoils[s]};
        assert_int_equal(finish(&t, &r, &e, NULL), QC_ERR_CHECK);
    }
    tensor_free(&t);
    free(x);
}

TEST(test_piece_add)
{
    qc_piece_sums total = {.bad = QC_BAD_NONE};
    const qc_piece_sums pieces[4] = {
        {1.0, 0.5, 0.25, 7, QC_BAD_NONE, 0},
        {2.0, 0.25, 0.25, 3, QC_BAD_RANGE, 4},     /* an equal error later does not count */
        {4.0, 0.125, 0.5, 0, QC_BAD_NONFINITE, 1}, /* nor does a later offender */
        {8.0, 0.0, 0.0, 9, QC_BAD_NONE, 0},
    };
    qc_piece_add(&total, &pieces[0], 0);
    assert_true(total.max_err == 0.25 && total.max_index == 7);
    qc_piece_add(&total, &pieces[1], 100);
    assert_true(total.max_index == 7 && total.bad == QC_BAD_RANGE && total.bad_index == 104);
    qc_piece_add(&total, &pieces[2], 200);
    qc_piece_add(&total, &pieces[3], 300);
    assert_true(total.sum_xx == 15.0 && total.sum_ee == 0.875);
    assert_true(total.max_err == 0.5 && total.max_index == 200);
    assert_true(total.bad == QC_BAD_RANGE && total.bad_index == 104);
}
