/* The kernels of bench/ceilings.h: that they read what they say they read and decode what they say
 * they decode, without which their speed would mean nothing. */
#include "tests/fixtures/quant_device_fixture.h"

#include "bench/ceilings.h"
#include "quant/quant_half.h"

#include <math.h>

#define WARPS (QC_CEILING_MEMORY_THREADS / 32)
#define TURN  37u /* places that blocks move by from pass to pass: ceilings_memory.cu */

/* ---- memory ---------------------------------------------------------------------------------- */

/* Exclusive or of the words of a source that qc_ceiling_fill made. */
static uint32_t words_at(uint64_t at, unsigned bytes)
{
    uint32_t sum = 0;
    for (unsigned i = 0; i < bytes / 4; i++)
        sum ^= qc_ceiling_hash((uint32_t)(at / 4 + i));
    return sum;
}

/* What thread t of a block at place `block` reads in one pass. */
static uint32_t thread_sum(const qc_ceiling_memory *m, uint64_t bytes, unsigned block, unsigned t)
{
    unsigned lane = qc_ceiling_access_bytes(m->access);
    uint64_t threads = (uint64_t)m->blocks * QC_CEILING_MEMORY_THREADS;
    uint64_t loads = bytes / (threads * lane);
    uint32_t sum = 0;
    if (m->access == QC_CEILING_BULK) {
        for (uint64_t k = 0; k < loads; k++) {
            uint64_t chunk = (k * m->blocks + block) * WARPS + t / 32;
            for (unsigned i = 0; i < 4; i++)
                sum ^= words_at(chunk * 2048 + i * 512 + t % 32 * 16, 16);
        }
        return sum;
    }
    if (m->access <= QC_CEILING_RING) {
        for (uint64_t k = 0; k < loads; k++)
            sum ^= words_at((k * threads + block * QC_CEILING_MEMORY_THREADS + t) * 16, 16);
        return sum;
    }
    for (uint64_t k = 0; k < loads; k++) {
        uint64_t at = k * 4 * lane, tile = at / QC_CEILING_ROW_BYTES;
        uint64_t warp = (uint64_t)block * WARPS + t / 32 + tile * m->blocks * WARPS;
        uint64_t row = warp * 8 + t % 32 / 4;
        sum ^=
            words_at(row * QC_CEILING_ROW_BYTES + at % QC_CEILING_ROW_BYTES + t % 4 * lane, lane);
    }
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
        uint32_t want = 0;
        unsigned block = i / QC_CEILING_MEMORY_THREADS;
        for (unsigned p = 0; access != QC_CEILING_COPY && p < passes; p++)
            want ^=
                thread_sum(&m, bytes, (block + p * TURN) % blocks, i % QC_CEILING_MEMORY_THREADS);
        QT_CHECK(got[i] == want, "%s, %u ahead, %u blocks: thread %u has %08x, not %08x", name,
                 unroll, blocks, i, got[i], want);
        every ^= got[i];
    }
    /* All bytes, each once in a pass. */
    if (access != QC_CEILING_COPY && passes % 2 == 1)
        assert_int_equal(every, words_at(0, (unsigned)bytes));
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

/* D of mma.m16n8k16: rows g and g + 8 of A are in lanes 4 g + t as pairs 0, 2 and 1, 3 of its
 * fragment, column n of B in lanes 4 n + t. */
static void check_products(const qc_ceiling_kernel *k, const results *r, int int8)
{
    for (unsigned warp = 0; warp < r->blocks * QC_CEILING_THREADS / 32; warp++) {
        double want[32][4] = {{0}}, most[32][4] = {{0}};
        for (unsigned s = 0; s < r->steps; s++) {
            uint32_t pairs[32][16];
            for (unsigned lane = 0; lane < 32; lane++)
                pairs_of(pairs[lane], warp * 32 + lane, s, int8);
            for (unsigned lane = 0; lane < 32; lane++) {
                for (unsigned e = 0; e < 4; e++) {
                    unsigned g = lane / 4, row = g + (e < 2 ? 0 : 8), n = lane % 4 * 2 + e % 2;
                    double scale = (double)qc_ceiling_scale(row);
                    for (unsigned t = 0; t < 4; t++) {
                        for (unsigned i = 0; i < 16; i++) {
                            /* Pairs 0 and 1 of a fragment meet elements 0, 1 of B, 2 and 3 the
                             * others. */
                            if (i % 2 != (row >= 8))
                                continue;
                            for (unsigned h = 0; h < 2; h++) {
                                double v = half_at(pairs[4 * g + t], 2 * i + h) *
                                           (double)qc_ceiling_x(4 * n + t, i % 4 / 2 * 2 + h) *
                                           scale;
                                want[lane][e] += v;
                                most[lane][e] += fabs(v);
                            }
                        }
                    }
                }
            }
        }
        for (unsigned lane = 0; lane < 32; lane++) {
            for (unsigned e = 0; e < 4; e++) {
                double got = (double)qc_f32_of_bits(r->words[4 * (warp * 32 + lane) + e]);
                QT_CHECK(fabs(got - want[lane][e]) <= 1e-5 * most[lane][e],
                         "%s: warp %u, lane %u, %u: %.9g, not %.9g", k->name, warp, lane, e, got,
                         want[lane][e]);
            }
        }
    }
}

/* Lane of row (of A) or column (of B) i in a quad pair. */
static unsigned lane_884(unsigned quad, unsigned i)
{
    return 4 * quad + i % 4 + (i >= 4 ? 16 : 0);
}

/* Row and column of element e of a lane's part of D. */
static unsigned row_884(unsigned lane, unsigned e)
{
    return (lane & 1) + (e & 2) + (lane >= 16 ? 4 : 0);
}

static unsigned column_884(unsigned lane, unsigned e)
{
    return (e & 4) + (lane & 2) + (e & 1);
}

/* D of mma.m8n8k4: every two pairs of a lane are 4 rows of its column of B. */
static void check_products_884(const qc_ceiling_kernel *k, const results *r, int int8)
{
    for (unsigned t = 0; t < r->blocks * QC_CEILING_THREADS; t++) {
        unsigned lane = t % 32, quad = lane % 16 / 4;
        double want[4] = {0}, most[4] = {0};
        for (unsigned e = 0; e < 8; e++) {
            unsigned x = lane_884(quad, row_884(lane, e)), column = column_884(lane, e);
            for (unsigned s = 0; s < r->steps; s++) {
                uint32_t pairs[16];
                pairs_of(pairs, t - lane + lane_884(quad, column), s, int8);
                for (unsigned i = 0; i < 32; i++) {
                    double v = half_at(pairs, i) * (double)qc_ceiling_x(x, i % 4) *
                               (double)qc_ceiling_scale(column);
                    want[e % 4] += v;
                    most[e % 4] += fabs(v);
                }
            }
        }
        for (unsigned e = 0; e < 4; e++) {
            double got = (double)qc_f32_of_bits(r->words[4 * t + e]);
            QT_CHECK(fabs(got - want[e]) <= 1e-5 * most[e], "%s: thread %u, %u: %.9g, not %.9g",
                     k->name, t, e, got, want[e]);
        }
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
            if (strstr(k[i].name, "mma 884"))
                check_products_884(&k[i], &r, int8);
            else if (strstr(k[i].name, "mma"))
                check_products(&k[i], &r, int8);
            else
                check_folded(&k[i], &r, int8, strcmp(k[i].name, "float pairs") == 0);
            free_results(&r);
        }
    }
}

/* ---- rates ----------------------------------------------------------------------------------- */

typedef struct {
    uint32_t a, b;
} constants;

static uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector)
{
    uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t out = 0;
    for (unsigned i = 0; i < 4; i++)
        out |= (uint32_t)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}

/* One instruction of a chain; SHFL is not of one thread alone. */
static uint32_t link(const char *name, uint32_t v, uint32_t neighbour, constants c)
{
    if (strcmp(name, "FFMA") == 0)
        return qc_f32_bits(fmaf(qc_f32_of_bits(v), qc_f32_of_bits(c.a), qc_f32_of_bits(c.b)));
    if (strcmp(name, "IMAD") == 0)
        return v * c.a + c.b;
    if (strcmp(name, "LOP3") == 0)
        return (v & c.a) | neighbour;
    if (strcmp(name, "SHF") == 0)
        return v >> 7 | neighbour << 25;
    if (strcmp(name, "PRMT") == 0)
        return byte_perm(v, c.a, c.b);
    if (strcmp(name, "cvt.rn.f16.f32") == 0)
        return qc_f16_from_f32(qc_f32_of_bits(v)) ^ c.a;
    if (strcmp(name, "cvt.rn.f16x2.f32") == 0)
        return (uint32_t)qc_f16_from_f32(qc_f32_of_bits(neighbour)) << 16 |
               qc_f16_from_f32(qc_f32_of_bits(v));
    return v; /* HMUL2: times one; LDS: where it was */
}

static int is_nan(uint32_t v)
{
    return (v & 0x7fffffffu) > 0x7f800000u;
}

/* The chains of a warp after so many steps of 16 links. Which NaN a conversion gives is not said:
 * *valid is 0 then. */
static void chains(const char *name, unsigned warp, unsigned steps, uint32_t v[32][8], int *valid)
{
    int floats = strcmp(name, "FFMA") == 0 || strcmp(name, "HMUL2") == 0;
    int converts = strncmp(name, "cvt", 3) == 0;
    unsigned words = strcmp(name, "LDS.64") == 0 ? 2 : strcmp(name, "LDS.128") == 0 ? 4 : 1;
    if (strcmp(name, "LDS.32 one bank") == 0)
        words = 32;
    for (unsigned lane = 0; lane < 32; lane++)
        for (unsigned j = 0; j < 8; j++)
            v[lane][j] = strncmp(name, "LDS", 3) == 0 ? lane * words * 4
                         : floats                     ? 0x3c003c00u + j
                                                      : qc_ceiling_hash((warp * 32 + lane) * 8 + j);
    for (unsigned i = 0; i < steps * 16; i++) {
        unsigned j = i % 8;
        uint32_t before[32];
        for (unsigned lane = 0; lane < 32; lane++)
            before[lane] = v[lane][j];
        for (unsigned lane = 0; lane < 32; lane++) {
            unsigned index = warp * 32 + lane;
            constants c = {qc_ceiling_hash(~index), qc_ceiling_hash(index) & 0x7777u};
            if (strcmp(name, "FFMA") == 0)
                c = (constants){0x3f3f3f3fu, 0x3f000000u};
            if (converts && (is_nan(v[lane][j]) || is_nan(v[lane][(j + 1) % 8])))
                valid[lane] = 0;
            v[lane][j] = strcmp(name, "SHFL") == 0
                             ? before[before[lane] % 32]
                             : link(name, v[lane][j], v[lane][(j + 1) % 8], c);
        }
    }
}

static void check_chains(const qc_ceiling_kernel *k, const results *r)
{
    unsigned checked = 0;
    for (unsigned warp = 0; warp < r->blocks * QC_CEILING_THREADS / 32; warp++) {
        uint32_t v[32][8];
        int valid[32];
        for (unsigned lane = 0; lane < 32; lane++)
            valid[lane] = 1;
        chains(k->name, warp, r->steps, v, valid);
        for (unsigned lane = 0; lane < 32; lane++) {
            const uint32_t *got = r->words + 4 * (warp * 32 + lane);
            for (unsigned j = 0; j < 4 && valid[lane]; j++) {
                uint32_t want = v[lane][j] + v[lane][j + 4];
                QT_CHECK(got[j] == want, "%s: warp %u, lane %u: %08x, not %08x", k->name, warp,
                         lane, got[j], want);
                checked++;
            }
        }
    }
    QT_CHECK(checked >= 1000, "%s: only %u results compared", k->name, checked);
}

/* Every element of A's row is as in the kernel; 4 accumulators of steps products each. */
static void check_rate_of_products(const qc_ceiling_kernel *k, const results *r)
{
    for (unsigned t = 0; t < r->blocks * QC_CEILING_THREADS; t++) {
        unsigned lane = t % 32, g = lane / 4;
        for (unsigned e = 0; e < 4; e++) {
            double want = 0;
            for (unsigned q = 0; q < 4; q++) {
                for (unsigned i = e < 2 ? 0 : 1; i < 4; i += 2) {
                    unsigned column = 4 * (lane % 4 * 2 + e % 2) + q;
                    want += (double)qc_ceiling_scale(g) * (double)qc_ceiling_x(column, i / 2 * 2);
                    want +=
                        (double)qc_ceiling_scale(i) * (double)qc_ceiling_x(column, i / 2 * 2 + 1);
                }
            }
            want *= 4.0 * r->steps;
            double got = (double)qc_f32_of_bits(r->words[4 * t + e]);
            QT_CHECK(fabs(got - want) <= 1e-5 * (fabs(want) + r->steps),
                     "%s: thread %u, %u: %.9g, not %.9g", k->name, t, e, got, want);
        }
    }
}

static void check_rate_of_products_884(const qc_ceiling_kernel *k, const results *r)
{
    for (unsigned t = 0; t < r->blocks * QC_CEILING_THREADS; t++) {
        unsigned lane = t % 32, quad = lane % 16 / 4;
        double want[4] = {0};
        for (unsigned e = 0; e < 8; e++) {
            unsigned x = lane_884(quad, row_884(lane, e));
            unsigned w = lane_884(quad, column_884(lane, e));
            for (unsigned i = 0; i < 4; i++)
                want[e % 4] += (double)qc_ceiling_x(x, i) *
                               (double)qc_ceiling_scale(i % 2 ? i / 2 : w) * 2.0 * r->steps;
        }
        for (unsigned e = 0; e < 4; e++) {
            double got = (double)qc_f32_of_bits(r->words[4 * t + e]);
            QT_CHECK(fabs(got - want[e]) <= 1e-5 * (fabs(want[e]) + r->steps),
                     "%s: thread %u, %u: %.9g, not %.9g", k->name, t, e, got, want[e]);
        }
    }
}

TEST(test_rates)
{
    unsigned count = 0;
    const qc_ceiling_kernel *k = qc_ceiling_rates(&count);
    assert_int_equal(count, 15);
    for (unsigned i = 0; i < count; i++) {
        if (!has(&k[i]))
            continue;
        results r = run_kernel(&k[i], 2, QC_CEILING_STEPS);
        if (strcmp(k[i].name, "mma.m8n8k4") == 0)
            check_rate_of_products_884(&k[i], &r);
        else if (strstr(k[i].name, "mma"))
            check_rate_of_products(&k[i], &r);
        else
            check_chains(&k[i], &r);
        free_results(&r);
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
