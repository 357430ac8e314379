/* qc_check_codes: sums against a plain reading in double, every code changed,
 * scales of both signs, and the same from every instruction set. */
#include "quant/scale_search.h"
#include "quant/weight_check.h"
#include "tests/fixtures/quant_testing.h"

#include <string.h>

#define MOST 40000u

typedef struct {
    const qc_form_ops *ops;
    uint32_t block; /* or columns */
    const float *map;
} form_case;

static const float fp4_map[16] = {
    0.0f,  0.0052083333f,  0.66666667f,  1.0f,  0.33333333f,  0.5f,  0.16666667f,  0.25f,
    -0.0f, -0.0052083333f, -0.66666667f, -1.0f, -0.33333333f, -0.5f, -0.16666667f, -0.25f,
};

static const form_case cases[] = {
    {&qc_form_nf4, 64, qc_nf4_code},   {&qc_form_nf4, 32, qc_nf4_code},
    {&qc_form_nf4, 4096, qc_nf4_code}, {&qc_form_nf4, 64, fp4_map},
    {&qc_form_int8_blocks, 64, NULL},  {&qc_form_int8_blocks, 1024, NULL},
    {&qc_form_int8_rows, 96, NULL},    {&qc_form_int8_rows, 20000, NULL},
};

/* What was quantized, and how. */
typedef struct {
    qc_check check;
    uint64_t n, scale_count;
    float x[MOST], scales[MOST / 32 + 1], slack[MOST / 32 + 1];
    uint8_t codes[MOST + 1];
} piece;

static qc_check_scratch scratch;
static piece p;

static qc_check_sums check_with(const qc_quant_ops *ops)
{
    static int8_t codes_ref[MOST];
    qc_check_sums s;
    memset(&s, 0, sizeof s);
    qc_check_codes(ops, &p.check, p.x, QC_DTYPE_F32, p.n, p.codes, p.scales, p.slack, codes_ref,
                   &scratch, &s);
    return s;
}

static qc_check_sums check(void)
{
    return check_with(qc_quant_ops_for(QC_ISA_SCALAR));
}

static double value_of(uint64_t i)
{
    const qc_form *f = &p.check.form;
    if (f->ops->integer)
        return (double)qc_form_value(f->ops, qc_form_code_at(f->ops, p.codes, i),
                                     p.scales[i / (f->block_elems ? f->block_elems : f->cols)]);
    if (f->ops->bits == 4)
        return (double)(p.check.map[qt_nibble(p.codes, i)] * p.scales[i / f->block_elems]);
    uint64_t scale = qc_form_by_rows(f) ? i / f->cols : i / f->block_elems;
    return (double)qc_form_value(f->ops, (int8_t)p.codes[i], p.scales[scale]);
}

static unsigned fp4_nearest(float y)
{
    unsigned best = 0;
    for (unsigned c = 1; c < 16; c++)
        if (fabsf(y - fp4_map[c]) < fabsf(y - fp4_map[best]))
            best = c;
    return best;
}

/* p.x [n] in this form, by absmax. */
static void quantize(const form_case *c, uint64_t n)
{
    qc_piece_sums sums;
    int rows = c->ops == &qc_form_int8_rows;
    uint64_t per = c->block;
    n = rows ? n - n % per : n;
    p.n = n;
    p.scale_count = n / per + (n % per != 0);
    const qc_form form = {.ops = c->ops,
                          .block_elems = rows ? 0 : c->block,
                          .cols = rows ? c->block : 0,
                          .code_map = c->map};
    qc_check_init(&p.check, &form);
    memset(p.codes, 0, sizeof p.codes);
    form.ops->quantize(qc_quant_ops_for(QC_ISA_SCALAR), &form, p.x, QC_DTYPE_F32, n,
                       &(qc_form_out){p.codes, p.scales, NULL}, &sums);
    for (uint64_t i = 0; c->map == fp4_map && i < n; i++) {
        float a = p.scales[i / per];
        unsigned code = a > 0.0f ? fp4_nearest(p.x[i] / a) : 0;
        p.codes[i / 2] =
            (uint8_t)(i % 2 ? (p.codes[i / 2] & 0xf0) | code : (p.codes[i / 2] & 15) | code << 4);
    }
    for (uint64_t k = 0; k < p.scale_count; k++)
        p.slack[k] = p.scales[k] * 0x1p-20f;
}

static void fill(qt_rng *rng, double sd)
{
    for (uint64_t i = 0; i < MOST; i++) {
        double sum = 0.0;
        for (int k = 0; k < 12; k++)
            sum += (double)(qt_next(rng) >> 11) * 0x1p-53;
        p.x[i] = (float)((sum - 6.0) * sd);
    }
}

static void compare_sums(const qc_check_sums *s, const char *what)
{
    double ee = 0.0, xx = 0.0, most = -1.0;
    uint64_t at = 0;
    for (uint64_t i = 0; i < p.n; i++) {
        double e = fabs((double)p.x[i] - value_of(i));
        ee += e * e;
        xx += (double)p.x[i] * (double)p.x[i];
        at = e > most ? i : at;
        most = e > most ? e : most;
    }
    QT_CHECK(fabs(s->sum_xx - xx) <= 1e-6 * xx, "%s: xx %g, expected %g", what, s->sum_xx, xx);
    QT_CHECK(fabs(s->sum_ee - ee) <= 1e-4 * ee, "%s: ee %g, expected %g", what, s->sum_ee, ee);
    QT_CHECK(fabs(s->max_err - most) <= 1e-6 * most, "%s: largest %g, expected %g", what,
             s->max_err, most);
    QT_CHECK(s->max_index == at || p.check.form.ops == &qc_form_int8_rows,
             "%s: largest at %" PRIu64 ", expected %" PRIu64, what, s->max_index, at);
}

TEST(test_honest)
{
    qt_rng rng = qt_rng_start("honest");
    for (unsigned c = 0; c < sizeof cases / sizeof *cases; c++) {
        fill(&rng, 0.02);
        quantize(&cases[c], c % 2 ? MOST : MOST - 7);
        qc_check_sums s = check();
        char what[64];
        (void)snprintf(what, sizeof what, "case %u", c);
        compare_sums(&s, what);
        QT_CHECK(fabs(s.sum_expected / s.sum_ee - 1.0) < 1e-6, "case %u: expected %g of %g", c,
                 s.sum_expected, s.sum_ee);
        QT_CHECK(s.misplaced == 0 && s.clipped == 0 && s.searched == 0 &&
                     s.first_misplaced == UINT64_MAX,
                 "case %u: %" PRIu64 " misplaced, %" PRIu64 " clipped, %" PRIu64 " searched", c,
                 s.misplaced, s.clipped, s.searched);
        QT_CHECK(s.scales == p.scale_count, "case %u: %" PRIu64 " scales", c, s.scales);
        QT_CHECK(s.bad_source == UINT64_MAX && s.bad_value == UINT64_MAX, "case %u: bad", c);
    }
}

/* One code at a time, one step up or down: found, and found where it is, unless the weight lies on
 * the border. */
TEST(test_every_code)
{
    qt_rng rng = qt_rng_start("every code");
    for (unsigned c = 0; c < 7; c++) {
        unsigned missed = 0, tried = 0;
        fill(&rng, 1.0);
        quantize(&cases[c], 4096);
        for (uint64_t i = 0; i < p.n; i += 7, tried++) {
            uint8_t *byte = &p.codes[cases[c].map ? i / 2 : i], kept = *byte;
            double best = fabs((double)p.x[i] - value_of(i)) / (double)p.scales[i / cases[c].block];
            if (!cases[c].map)
                *byte = (uint8_t)(*byte + ((int8_t)*byte > 0 ? -1 : 1));
            else
                *byte ^= (uint8_t)((i % 2 ? 1u : 0x10u) << qt_next(&rng) % 4);
            qc_check_sums s = check();
            double off = fabs((double)p.x[i] - value_of(i)) / (double)p.scales[i / cases[c].block];
            *byte = kept;
            /* On the border both codes are good; rows pass through float16. */
            double border = 127 * QC_CHECK_SLACK * 1.01;
            border += cases[c].ops == &qc_form_int8_rows ? 127 * 0x1p-11 : 0.0;
            if (!cases[c].map && off * 127 < 0.5 + border)
                continue;
            if (cases[c].map && off - best < 2 * QC_CHECK_SLACK * 1.01)
                continue;
            /* -0 and 0 of FP4 are one value; 0.16667 and 0.0052 differ in bit 0 only */
            if (s.misplaced == 0 && cases[c].map == fp4_map)
                missed++;
            else
                QT_CHECK(s.misplaced == 1 && s.first_misplaced == i,
                         "case %u, code %" PRIu64 ": %" PRIu64 " misplaced, first %" PRIu64, c, i,
                         s.misplaced, s.first_misplaced);
        }
        assert_true(tried > 500 && missed < tried / 16);
    }
}

TEST(test_scales)
{
    qt_rng rng = qt_rng_start("scales");
    for (unsigned c = 0; c < sizeof cases / sizeof *cases; c++) {
        fill(&rng, 1.0);
        quantize(&cases[c], MOST);
        uint64_t k = p.scale_count / 2;
        float kept = p.scales[k];
        const float factors[] = {2.0f, 0.5f, 1.25f, -1.0f, 0.0f};
        for (unsigned f = 0; f < 5; f++) {
            p.scales[k] = kept * factors[f];
            qc_check_sums s = check();
            QT_CHECK(s.misplaced > 0 && s.first_misplaced / cases[c].block == k,
                     "case %u, scale times %g: %" PRIu64 " misplaced", c, (double)factors[f],
                     s.misplaced);
        }
        p.scales[k] = NAN;
        qc_check_sums s = check();
        QT_CHECK(s.bad_value / cases[c].block == k, "case %u: NaN at %" PRIu64, c, s.bad_value);
        /* So little that every code still fits, but it is not the largest value. */
        p.scales[k] = kept * (1.0f + 0x1p-15f);
        s = check();
        QT_CHECK(s.searched + s.misplaced > 0, "case %u: a scale that is another", c);
    }
}

/* Codes made for smaller scales, as a search has them; in NF4 also with the map turned around. */
TEST(test_searched)
{
    qt_rng rng = qt_rng_start("searched");
    for (unsigned c = 0; c < 3; c++) {
        fill(&rng, 1.0);
        quantize(&cases[c], MOST);
        for (uint64_t k = 0; k < p.scale_count; k++)
            p.scales[k] *= k % 3 == 2 ? -0.9f : 0.9f;
        for (uint64_t i = 0; i < p.n; i++) {
            unsigned code = qt_nf4_tree(p.x[i] / p.scales[i / cases[c].block]);
            p.codes[i / 2] = (uint8_t)(i % 2 ? (p.codes[i / 2] & 0xf0) | code
                                             : (p.codes[i / 2] & 15) | code << 4);
        }
        qc_check_sums s = check();
        compare_sums(&s, "searched");
        uint64_t clipped = 0;
        for (uint64_t i = 0; i < p.n; i++)
            clipped += fabs((double)p.x[i]) >
                       fabs((double)p.scales[i / cases[c].block]) * (1.0 + QC_CHECK_CLIP);
        QT_CHECK(s.misplaced == 0 && s.searched == p.scale_count && s.clipped == clipped,
                 "case %u: %" PRIu64 " misplaced, %" PRIu64 " of %" PRIu64 " searched, %" PRIu64
                 " clipped, expected %" PRIu64,
                 c, s.misplaced, s.searched, p.scale_count, s.clipped, clipped);
    }
}

TEST(test_edges)
{
    qt_rng rng = qt_rng_start("edges");
    for (unsigned c = 0; c < sizeof cases / sizeof *cases; c++) {
        /* zeros */
        memset(p.x, 0, sizeof p.x);
        quantize(&cases[c], MOST);
        qc_check_sums s = check();
        assert_true(s.sum_ee == 0.0 && s.sum_xx == 0.0 && s.sum_expected == 0.0);
        assert_true(s.misplaced == 0 && s.scales == 0 && s.max_err == 0.0);
        /* weights next to nothing, but for rows, which pass through float16 */
        if (cases[c].ops != &qc_form_int8_rows && cases[c].map != fp4_map) {
            fill(&rng, 0x1p-130);
            quantize(&cases[c], MOST);
            s = check();
            QT_CHECK(s.misplaced == 0, "case %u, tiny: %" PRIu64 " misplaced", c, s.misplaced);
        }
        /* no weight */
        fill(&rng, 1.0);
        quantize(&cases[c], MOST);
        p.x[20001] = NAN;
        s = check();
        QT_CHECK(s.bad_source == 20001 || cases[c].ops == &qc_form_int8_rows,
                 "case %u: bad at %" PRIu64, c, s.bad_source);
        assert_true(s.bad_source != UINT64_MAX);
        p.n = 0;
        s = check();
        assert_true(s.sum_ee == 0.0 && s.bad_source == UINT64_MAX && s.max_index == UINT64_MAX);
    }
}

TEST(test_instruction_sets)
{
    qt_rng rng = qt_rng_start("instruction sets");
    for (unsigned c = 0; c < sizeof cases / sizeof *cases; c++) {
        for (unsigned damage = 0; damage < 3; damage++) {
            fill(&rng, 0.02);
            quantize(&cases[c], MOST - 13 * damage);
            for (unsigned i = 0; i < damage * 50; i++)
                p.codes[qt_next(&rng) % (p.n / 2)] ^= (uint8_t)(1u << qt_next(&rng) % 8);
            qc_check_sums want = check();
            for (int isa = QC_ISA_SCALAR; isa <= QC_ISA_AVX512; isa++) {
                if (!qc_isa_available((qc_isa)isa))
                    continue;
                qc_check_sums s = check_with(qc_quant_ops_for((qc_isa)isa));
                QT_CHECK(memcmp(&s, &want, sizeof s) == 0, "case %u, damage %u, isa %d", c, damage,
                         isa);
            }
        }
    }
}

static const qc_form int_cases[] = {
    {.ops = &qc_form_w4a16, .block_elems = 128, .cols = 256, .scale_dtype = QC_DTYPE_BF16},
    {.ops = &qc_form_w4a16, .block_elems = 32, .cols = 64, .scale_dtype = QC_DTYPE_F16},
    {.ops = &qc_form_w4a16, .cols = 5000, .scale_dtype = QC_DTYPE_F32},
    {.ops = &qc_form_w8a16, .block_elems = 64, .cols = 64, .scale_dtype = QC_DTYPE_BF16},
    {.ops = &qc_form_w8a8, .cols = 96, .scale_dtype = QC_DTYPE_F32}};

/* p.x [n] as integers: by absmax, or with scales that are searched. */
static void quantize_integers(const qc_form *form, uint64_t n, int search)
{
    const uint64_t group = form->block_elems ? form->block_elems : form->cols;
    qc_piece_sums sums;
    p.n = n / group * group;
    p.scale_count = p.n / group;
    qc_check_init(&p.check, form);
    memset(p.codes, 0, sizeof p.codes);
    memset(p.slack, 0, sizeof p.slack);
    if (search) {
        void *room = aligned_alloc(64, qc_search_scratch_bytes());
        QT_CHECK(room != NULL, "out of memory");
        qc_search_ops_for(QC_ISA_SCALAR)
            ->blocks(form, QC_SEARCH_ONCE, p.x, QC_DTYPE_F32, p.n,
                     &(qc_search_out){.codes = p.codes, .absmax = p.scales}, room, &sums);
        free(room);
        return;
    }
    form->ops->quantize(qc_quant_ops_for(QC_ISA_SCALAR), form, p.x, QC_DTYPE_F32, p.n,
                        &(qc_form_out){.codes = p.codes, .absmax = p.scales}, &sums);
}

TEST(test_integers)
{
    qt_rng rng = qt_rng_start("integers");
    for (unsigned c = 0; c < sizeof int_cases / sizeof *int_cases; c++) {
        const qc_form *form = &int_cases[c];
        const uint64_t group = form->block_elems ? form->block_elems : form->cols;
        char what[64];
        (void)snprintf(what, sizeof what, "integers, case %u", c);
        fill(&rng, 0.02);
        quantize_integers(form, MOST, 0);
        qc_check_sums s = check();
        compare_sums(&s, what);
        QT_CHECK(s.misplaced == 0 && s.searched == 0 && s.scales == p.scale_count &&
                     s.clipped == 0 && fabs(s.sum_expected / s.sum_ee - 1.0) < 1e-6,
                 "%s: %" PRIu64 " misplaced, %" PRIu64 " searched, %" PRIu64 " clipped", what,
                 s.misplaced, s.searched, s.clipped);
        for (uint64_t i = 3; i < p.n; i += 997) { /* one code, one step away */
            const uint64_t at = form->ops->bits == 4 ? i / 2 : i;
            const uint8_t kept = p.codes[at];
            const int code = qc_form_code_at(form->ops, p.codes, i) - form->ops->zero;
            const int other = (code > 0 ? code - 1 : code + 1) + form->ops->zero;
            if (form->ops->bits == 8)
                p.codes[at] = (uint8_t)other;
            else
                p.codes[at] = (uint8_t)(i % 2 ? (kept & 15) | other << 4 : (kept & 0xf0) | other);
            s = check();
            const double off = fabs((double)p.x[i] - value_of(i)) / (double)p.scales[i / group];
            QT_CHECK(off < 0.501 || (s.misplaced == 1 && s.first_misplaced == i),
                     "%s, code %" PRIu64 ": %" PRIu64 " misplaced", what, i, s.misplaced);
            p.codes[at] = kept;
        }
        const float kept = p.scales[p.scale_count / 2];
        p.scales[p.scale_count / 2] = 2.0f * kept;
        s = check();
        QT_CHECK(s.misplaced > 0 && s.first_misplaced / group == p.scale_count / 2,
                 "%s: %" PRIu64 " misplaced", what, s.misplaced);
        p.scales[p.scale_count / 2] = NAN;
        s = check();
        assert_true(s.bad_value / group == p.scale_count / 2);

        quantize_integers(form, MOST, 1);
        s = check();
        compare_sums(&s, what);
        QT_CHECK(s.misplaced == 0 && s.searched > p.scale_count / 2,
                 "%s: %" PRIu64 " misplaced, %" PRIu64 " of %" PRIu64 " searched", what,
                 s.misplaced, s.searched, p.scale_count);
        for (unsigned i = 0; i < 50; i++)
            p.codes[qt_next(&rng) % (p.n / 2)] ^= (uint8_t)(1u << qt_next(&rng) % 8);
        const qc_check_sums want = check();
        for (int isa = QC_ISA_AVX2; isa <= QC_ISA_AVX512; isa++)
            if (qc_isa_available((qc_isa)isa)) {
                s = check_with(qc_quant_ops_for((qc_isa)isa));
                QT_CHECK(memcmp(&s, &want, sizeof s) == 0, "%s, isa %d", what, isa);
            }
        memset(p.x, 0, sizeof p.x);
        quantize_integers(form, MOST, 0);
        s = check();
        assert_true(s.sum_xx == 0.0 && s.misplaced == 0 && s.scales == 0 && s.max_err == 0.0);
        p.x[p.n - 1] = NAN;
        s = check();
        assert_true(s.bad_source == p.n - 1);
    }
}

/* A form of 4 bits that nothing else knows: verify reads its codes by what they stand for alone.
 * NF4 quantizes for it, so that its codes are others than those of absmax. */
TEST(test_other_form)
{
    qt_rng rng = qt_rng_start("other form");
    qc_form_ops other = qc_form_nf4;
    other.lowest = -8;
    other.highest = 7;
    other.zero = 8;
    fill(&rng, 1.0);
    quantize(&cases[0], MOST);
    const qc_form form = {.ops = &other, .block_elems = 64};
    qc_check_init(&p.check, &form);
    for (uint64_t k = 0; k < p.n / 64; k++)
        p.scales[k] /= 8.0f;
    for (uint64_t i = 0; i < p.n; i++) {
        const int code = (int)fminf(rintf(p.x[i] / p.scales[i / 64]), 7.0f) + 8;
        p.codes[i / 2] =
            (uint8_t)(i % 2 ? (p.codes[i / 2] & 0xf0) | code : (p.codes[i / 2] & 15) | code << 4);
    }
    qc_check_sums s = check();
    compare_sums(&s, "other form");
    QT_CHECK(s.misplaced == 0 && s.searched == 0 && s.clipped == 0, "%" PRIu64 " misplaced",
             s.misplaced);
    unsigned found = 0;
    for (uint64_t i = 1; i < p.n; i += 499) {
        const uint8_t kept = p.codes[i / 2];
        p.codes[i / 2] ^= i % 2 ? 2 : 0x20; /* two steps away */
        s = check();
        QT_CHECK(s.misplaced == 1 && s.first_misplaced == i, "code %" PRIu64 ": %" PRIu64, i,
                 s.misplaced);
        p.codes[i / 2] = kept;
        found++;
    }
    assert_true(found > 50);
}

/* Pieces add up to the whole. */
TEST(test_pieces)
{
    qt_rng rng = qt_rng_start("pieces");
    fill(&rng, 1.0);
    quantize(&cases[0], MOST);
    p.codes[15000] ^= 0x11;
    qc_check_sums whole = check(), sum, part;
    qc_check_sums_init(&sum);
    for (uint64_t first = 0; first < p.n; first += QC_CHECK_CHUNK) {
        uint64_t n = p.n - first < QC_CHECK_CHUNK ? p.n - first : QC_CHECK_CHUNK;
        qc_check_codes(qc_quant_ops_for(QC_ISA_SCALAR), &p.check, p.x + first, QC_DTYPE_F32, n,
                       p.codes + first / 2, p.scales + first / 64, p.slack + first / 64, NULL,
                       &scratch, &part);
        qc_check_add(&sum, &part, first);
    }
    assert_true(fabs(sum.sum_ee - whole.sum_ee) <= 1e-12 * whole.sum_ee);
    assert_true(sum.max_err == whole.max_err && sum.max_index == whole.max_index);
    assert_int_equal(whole.misplaced, 2);
    assert_int_equal(sum.misplaced, 2);
    assert_int_equal(sum.first_misplaced, 30000);
    assert_int_equal(sum.scales, whole.scales);
}
