/* quant/low_rank.h: every instruction set gives, bit for bit, what a plain loop in double does. */
#include "base/random.h"
#include "quant/low_rank.h"
#include "tests/fixtures/test.h"

#define RANK_MOST 70u
#define COLS_MOST 600u

/* Magnitudes from 2^-20 to 2^20, so that sums lose bits and cancel. */
static float some(uint64_t *state)
{
    uint64_t r = qc_random_next(state);
    float x = (float)(int32_t)(r >> 32) / 2147483648.0f;
    for (uint64_t i = r % 21; i > 0; i--)
        x *= r & 256 ? 2.0f : 0.5f;
    return x;
}

typedef struct {
    uint64_t rank, cols, col;
    uint32_t rows, n;
    double scale;
    int turned; /* the right matrix is stored [cols, rank] */
} call;

static void plain(double *values, const double *left, const float *right, const call *q)
{
    for (uint32_t r = 0; r < q->rows; r++) {
        for (uint32_t i = 0; i < q->n; i++) {
            volatile double sum = 0;
            for (uint64_t k = 0; k < q->rank; k++) {
                uint64_t c = q->col + i, at = q->turned ? c * q->rank + k : k * q->cols + c;
                volatile double product = left[r * q->rank + k] * (double)right[at];
                sum = sum + product;
            }
            volatile double scaled = sum * q->scale;
            values[r * QC_LOW_RANK_RUN + i] += scaled;
        }
    }
}

TEST(every_set_is_the_plain_loop)
{
    static double left[QC_LOW_RANK_ROWS * RANK_MOST];
    static float right[RANK_MOST * COLS_MOST];
    static double packed[RANK_MOST * (COLS_MOST + QC_LOW_RANK_PANEL)];
    static double got[QC_LOW_RANK_ROWS * QC_LOW_RANK_RUN], want[QC_LOW_RANK_ROWS * QC_LOW_RANK_RUN];
    static double before[QC_LOW_RANK_ROWS * QC_LOW_RANK_RUN];
    qc_isa best = QC_ISA_SCALAR;
    uint64_t seed = 20;
    assert_int_equal(qc_isa_select(&best, NULL), QC_OK);
    for (size_t i = 0; i < sizeof before / sizeof *before; i++)
        before[i] = (double)some(&seed);
    for (unsigned round = 0; round < 400; round++) {
        call q = {.rank = qc_random_next(&seed) % (RANK_MOST + 1),
                  .cols = 1 + qc_random_next(&seed) % COLS_MOST,
                  .rows = (uint32_t)(qc_random_next(&seed) % (QC_LOW_RANK_ROWS + 1)),
                  .scale = (double)some(&seed) / 3,
                  .turned = (int)(qc_random_next(&seed) % 2)};
        q.col = qc_random_next(&seed) % q.cols;
        q.n = (uint32_t)(qc_random_next(&seed) % (q.cols - q.col + 1));
        q.n = q.n < QC_LOW_RANK_RUN ? q.n : QC_LOW_RANK_RUN;
        for (uint64_t i = 0; i < q.rows * q.rank; i++)
            left[i] = (double)some(&seed);
        for (uint64_t i = 0; i < q.rank * q.cols; i++)
            right[i] = some(&seed);
        assert_true(qc_low_rank_packed(q.rank, q.cols) <= sizeof packed / sizeof *packed);
        qc_low_rank_pack(packed, right, q.turned ? 1 : q.cols, q.turned ? q.rank : 1, q.rank,
                         q.cols);
        for (qc_isa isa = QC_ISA_SCALAR; isa <= best; isa++) {
            for (size_t i = 0; i < sizeof got / sizeof *got; i++)
                got[i] = want[i] = before[i]; /* what is not asked for stays */
            qc_low_rank(isa, got,
                        &(qc_low_rank_tile){left, packed, q.rank, q.col, q.rows, q.n, q.scale});
            plain(want, left, right, &q);
            assert_memory_equal(got, want, sizeof got);
        }
    }
}
