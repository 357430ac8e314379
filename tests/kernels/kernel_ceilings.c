/* The kernels of bench/ceilings.h: that they read what they say they read and decode what they say
 * they decode, without which their speed would mean nothing. */
#include "tests/fixtures/quant_device_fixture.h"

#include "bench/ceilings.h"
#include "quant/quant_half.h"

#include <math.h>

#define WARPS (QC_CEILING_MEMORY_THREADS / 32)

/* ---- memory ---------------------------------------------------------------------------------- */

/* Exclusive or of the words of a source that qc_ceiling_fill made. */
static uint32_t words_of(uint64_t bytes)
{
    uint32_t sum = 0;
    for (uint64_t i = 0; i < bytes / 4; i++)
        sum ^= qc_ceiling_hash((uint32_t)i);
    return sum;
}

static void check_memory(qc_ceiling_access access, unsigned unroll, unsigned blocks,
                         unsigned passes, uint64_t given)
{
    const char *name = qc_ceiling_access_name(access);
    qd_buffer in = qd_new(given, 0), copy = qd_new(given, 0);
    qd_buffer sums = qd_new(blocks * QC_CEILING_MEMORY_THREADS * 4, 0);
    qc_ceiling_memory m = {.access = access,
                           .unroll = unroll,
                           .blocks = blocks,
                           .in = in.p,
                           .bytes = given,
                           .passes = passes,
                           .copy = copy.p,
                           .sums = sums.p};
    uint64_t bytes = qc_ceiling_memory_bytes(&m);
    assert_in_range(bytes, given / 2, given);
    QD_OK(qc_ceiling_fill(in.p, given, qd.stream, &qd.err));
    QD_OK(qc_ceiling_memory_run(&m, qd.stream, &qd.err));
    uint32_t *got = qd_take(&sums, name), *out = qd_take(&copy, name), every = 0;
    for (unsigned i = 0; i < blocks * QC_CEILING_MEMORY_THREADS; i++) {
        QT_CHECK(passes > 1 || (got[i] != 0) == (access != QC_CEILING_COPY),
                 "%s, %u ahead, %u blocks: thread %u has %08x", name, unroll, blocks, i, got[i]);
        every ^= got[i];
    }
    /* All bytes, each once in a pass. */
    uint32_t all = access != QC_CEILING_COPY && passes % 2 == 1 ? words_of(bytes) : 0;
    QT_CHECK(every == all, "%s, %u ahead, %u blocks, %u passes: %08x, not %08x", name, unroll,
             blocks, passes, every, all);
    if (access == QC_CEILING_COPY) {
        for (uint64_t i = 0; i < given / 4; i++) {
            uint32_t want = i < bytes / 4 ? qc_ceiling_hash((uint32_t)i) : 0xa5a5a5a5u;
            QT_CHECK(out[i] == want, "copy, %u ahead: word %llu", unroll, (unsigned long long)i);
        }
    }
    free(out);
    free(got);
    qd_drop(&in);
}

TEST(test_every_byte_is_read)
{
    for (unsigned a = 0; a < QC_CEILING_ACCESS_COUNT; a++) {
        qc_ceiling_access access = (qc_ceiling_access)a;
        unsigned fits = 0;
        if (qd.device.sm < qc_ceiling_access_sm(access))
            continue;
        /* A fragment's tiles are 32 KB a warp. */
        uint64_t tile = access >= QC_CEILING_FRAGMENT_16 ? 8 * QC_CEILING_ROW_BYTES : 32 * 16 * 8;
        if (access == QC_CEILING_BULK)
            tile = 32 * 64 * 8;
        for (unsigned unroll = 1; unroll <= 8; unroll *= 2) {
            QD_OK(qc_ceiling_memory_fits(&fits, access, unroll, &qd.err));
            assert_true(fits >= 1);
            check_memory(access, unroll, 3, 1, 3 * WARPS * tile * 2 + 64);
        }
        check_memory(access, 2, 2, 3, 2 * WARPS * tile);
        check_memory(access, 8, 1, 2, WARPS * tile);
    }
}

TEST(test_too_few_bytes)
{
    uint32_t word = 0;
    qc_ceiling_memory m = {.access = QC_CEILING_READ,
                           .unroll = 8,
                           .blocks = 1,
                           .in = &word,
                           .bytes = QC_CEILING_MEMORY_THREADS * 16 * 8 - 1,
                           .passes = 1};
    assert_int_equal(qc_ceiling_memory_bytes(&m), 0);
    assert_int_equal(qc_ceiling_memory_run(&m, qd.stream, &qd.err), QC_ERR_USAGE);
    m.unroll = 3;
    m.bytes *= 2;
    assert_int_equal(qc_ceiling_memory_run(&m, qd.stream, &qd.err), QC_ERR_USAGE);
}

/* ---- computing ------------------------------------------------------------------------------- */

static int has(const qc_ceiling_kernel *k)
{
    return qd.device.sm >= k->sm && qd.device.sm <= k->sm_most;
}

typedef struct {
    uint32_t *words; /* 4 per thread */
    qc_ceiling_span *spans;
    unsigned blocks, steps;
} results;

static results run_kernel(const qc_ceiling_kernel *k, unsigned blocks, unsigned steps)
{
    results r = {NULL, NULL, blocks, steps};
    size_t words = (size_t)blocks * QC_CEILING_THREADS * 16, spans = blocks * sizeof *r.spans;
    qd_buffer out = qd_new(words, 0), where = qd_new(spans, 0);
    qc_ceiling_run run = {.blocks = blocks, .steps = steps, .out = out.p, .spans = where.p};
    unsigned fits = 0;
    QD_OK(k->fits(&fits, &qd.err));
    QT_CHECK(fits >= 1, "%s does not fit", k->name);
    QD_OK(k->run(&run, qd.stream, &qd.err));
    r.words = qd_take(&out, k->name);
    r.spans = qd_take(&where, k->name);
    for (unsigned i = 0; i < blocks; i++) {
        QT_CHECK(r.spans[i].clock_end > r.spans[i].clock_begin, "%s: no clocks", k->name);
        QT_CHECK(r.spans[i].ns_end >= r.spans[i].ns_begin, "%s: time runs back", k->name);
        QT_CHECK(r.spans[i].multiprocessor < 4096, "%s: not written", k->name);
    }
    return r;
}

static void free_results(results *r)
{
    free(r->words);
    free(r->spans);
}

static uint16_t nf4_half(unsigned code)
{
    return qc_f16_from_f32(qc_nf4_code[code]);
}

/* Pair i of a word of codes, as two float16. */
static uint32_t pair_of(uint32_t word, unsigned i, int int8)
{
    if (!int8) {
        uint32_t byte = word >> 8 * i & 0xff;
        return (uint32_t)nf4_half(byte & 15) << 16 | nf4_half(byte >> 4);
    }
    uint32_t pair = 0;
    for (unsigned h = 0; h < 2; h++) {
        float v = (float)(int8_t)(word >> (16 * i + 8 * h));
        pair |= (uint32_t)qc_f16_from_f32(v) << 16 * h;
    }
    return pair;
}

static double half_at(const uint32_t *pairs, unsigned i)
{
    return (double)qc_f32_from_f16((uint16_t)(pairs[i / 2] >> 16 * (i % 2)));
}

/* The 16 pairs of a thread in a step. */
static void pairs_of(uint32_t pairs[16], unsigned thread, unsigned step, int int8)
{
    unsigned words = int8 ? 8 : 4;
    for (unsigned j = 0; j < words; j++) {
        uint32_t w = qc_ceiling_hash(thread * words + j);
        for (unsigned s = 0; s < step; s++)
            w = qc_ceiling_next(w);
        for (unsigned i = 0; i < 16 / words; i++)
            pairs[j * (16 / words) + i] = pair_of(w, i, int8);
    }
}

static void check_folded(const qc_ceiling_kernel *k, const results *r, int int8, int floats)
{
    for (unsigned t = 0; t < r->blocks * QC_CEILING_THREADS; t++) {
        uint32_t want[4] = {0};
        for (unsigned s = 0; s < r->steps; s++) {
            uint32_t pairs[16];
            pairs_of(pairs, t, s, int8);
            for (unsigned i = 0; i < 16 && !floats; i++)
                want[0] ^= pairs[i];
        }
        for (unsigned s = 0; s < r->steps && floats; s++) {
            for (unsigned j = 0; j < 4; j++) {
                uint32_t w = qc_ceiling_hash(t * 4 + j);
                for (unsigned u = 0; u < s; u++)
                    w = qc_ceiling_next(w);
                for (unsigned i = 0; i < 8; i++)
                    want[i % 2 ? 0 : 1] ^= qc_f32_bits(qc_nf4_code[w >> 4 * i & 15]);
            }
        }
        QT_CHECK(memcmp(r->words + 4 * t, want, sizeof want) == 0,
                 "%s: thread %u has %08x %08x, not %08x %08x", k->name, t, r->words[4 * t],
                 r->words[4 * t + 1], want[0], want[1]);
    }
}

/* Lane of row (of A) or column (of B) i of mma.m8n8k4 in a quad pair. */
static unsigned lane_884(unsigned quad, unsigned i)
{
    return 4 * quad + i % 4 + (i >= 4 ? 16 : 0);
}

/* Adds the products of what thread `source` decodes with x of a lane, times the scale of a row, and
 * their magnitudes. Of mma.m16n8k16 only pairs of one parity count: 0 and 1 of a fragment meet
 * elements 0, 1 of B, 2 and 3 the others. Of mma.m8n8k4 (parity 2) all do: every two pairs are 4
 * rows of a column of B. */
static void add_products(double sums[2], const results *r, unsigned source, int int8,
                         unsigned parity, unsigned x, unsigned row)
{
    for (unsigned s = 0; s < r->steps; s++) {
        uint32_t pairs[16];
        pairs_of(pairs, source, s, int8);
        for (unsigned i = 0; i < 32; i++) {
            unsigned pair = i / 2, element = parity == 2 ? i % 4 : pair % 4 / 2 * 2 + i % 2;
            if (parity != 2 && pair % 2 != parity)
                continue;
            double v = half_at(pairs, i) * (double)qc_ceiling_x(x, element) *
                       (double)qc_ceiling_scale(row);
            sums[0] += v;
            sums[1] += fabs(v);
        }
    }
}

/* D of mma.m16n8k16: rows g and g + 8 of A are in lanes 4 g + t as pairs 0, 2 and 1, 3 of its
 * fragment, column n of B in lanes 4 n + t. D of mma.m8n8k4: two elements of it for each result. */
static void check_products(const qc_ceiling_kernel *k, const results *r, int int8, int is_884)
{
    for (unsigned i = 0; i < r->blocks * QC_CEILING_THREADS * 4; i++) {
        unsigned lane = i / 4 % 32, warp = i / 4 - lane, e = i % 4, g = lane / 4;
        double sums[2] = {0, 0};
        for (unsigned t = 0; t < 4 && !is_884; t++)
            add_products(sums, r, warp + 4 * g + t, int8, e / 2, 4 * (lane % 4 * 2 + e % 2) + t,
                         e < 2 ? g : g + 8);
        for (unsigned f = e; f < 8 && is_884; f += 4) {
            unsigned row = (lane & 1) + (f & 2) + (lane >= 16 ? 4 : 0), quad = lane % 16 / 4;
            unsigned column = (f & 4) + (lane & 2) + (f & 1);
            add_products(sums, r, warp + lane_884(quad, column), int8, 2, lane_884(quad, row),
                         column);
        }
        double got = (double)qc_f32_of_bits(r->words[i]);
        QT_CHECK(fabs(got - sums[0]) <= 1e-5 * sums[1], "%s: thread %u, %u: %.9g, not %.9g",
                 k->name, i / 4, e, got, sums[0]);
    }
}

TEST(test_decoding)
{
    unsigned count = 0;
    const qc_ceiling_kernel *k = qc_ceiling_decodes(&count);
    assert_int_equal(count, 14);
    for (unsigned i = 0; i < count; i++) {
        if (!has(&k[i]))
            continue;
        int int8 = strncmp(k[i].name, "int8", 4) == 0;
        for (unsigned steps = 4; steps <= 12; steps += 8) {
            results r = run_kernel(&k[i], 2, steps);
            if (strstr(k[i].name, "mma"))
                check_products(&k[i], &r, int8, strstr(k[i].name, "884") != NULL);
            else
                check_folded(&k[i], &r, int8, strcmp(k[i].name, "float pairs") == 0);
            free_results(&r);
        }
    }
}

/* ---- rates ----------------------------------------------------------------------------------- */

/* Twice the steps are twice the sum of products; a chain of loads stays where it is; no chain
 * vanishes. */
TEST(test_rates)
{
    unsigned count = 0;
    const qc_ceiling_kernel *k = qc_ceiling_rates(&count);
    assert_int_equal(count, 15);
    for (unsigned i = 0; i < count; i++) {
        if (!has(&k[i]))
            continue;
        const char *name = k[i].name;
        unsigned other = 0;
        unsigned bytes = strcmp(name, "LDS.32 one bank") == 0 ? 128
                         : strcmp(name, "LDS.64") == 0        ? 8
                         : strcmp(name, "LDS.128") == 0       ? 16
                                                              : 4;
        results once = run_kernel(&k[i], 2, QC_CEILING_STEPS);
        results twice = run_kernel(&k[i], 2, 2 * QC_CEILING_STEPS);
        for (unsigned j = 0; j < 2 * QC_CEILING_THREADS * 4; j++) {
            uint32_t a = once.words[j], b = twice.words[j];
            other += a != 0;
            if (strstr(name, "mma"))
                QT_CHECK(fabsf(qc_f32_of_bits(b) - 2 * qc_f32_of_bits(a)) <=
                             1e-4f * (fabsf(qc_f32_of_bits(b)) + QC_CEILING_STEPS),
                         "%s: result %u", name, j);
            if (strncmp(name, "LDS", 3) == 0)
                QT_CHECK(a == 2 * (j / 4 % 32 * bytes) && a == b, "%s: result %u", name, j);
        }
        QT_CHECK(other >= 1000, "%s: only %u results are not zero", name, other);
        free_results(&once);
        free_results(&twice);
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

TEST(test_nothing)
{
    for (int early = 0; early <= (qd.device.sm >= 90); early++) {
        qd_buffer ns = qd_new(4 * 8, 0);
        uint64_t *at = ns.p;
        QD_OK(qc_ceiling_nothing(3, 64, NULL, early, qd.stream, &qd.err));
        QD_OK(qc_ceiling_nothing(3, 64, at, early, qd.stream, &qd.err));
        QD_OK(qc_ceiling_nothing(1, 32, at + 2, early, qd.stream, &qd.err));
        uint64_t *got = qd_take(&ns, "nothing");
        assert_true(got[0] > 0 && got[0] <= got[1] && got[1] <= got[2] && got[2] <= got[3]);
        free(got);
    }
}

int main(void)
{
    qd_start();
    int failed = test_run_all(NULL);
    qd_end();
    return failed;
}
