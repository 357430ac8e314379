/* Shared by the implementations of qc_search_ops; not for callers. The method, step by step.
 *
 * All in IEEE single precision without contraction unless stated; fmaf where it says so. Lanes are
 * element % 16 of the block, folded by qc_fold16; s is a scale, a the absmax of the block (or of
 * the row), R and the tables below constants.
 *
 * A block
 *  1. Look. a = largest |x|. A block of zeros: codes of 0, target 0, no part in what follows.
 *     Tiny blocks (a < QC_TINY_ABSMAX): x, a and every s below are first multiplied by
 *     QC_TINY_SCALE; only x' = value * s and x - x' are made with the true ones.
 *         k = (1.0f / a) * 127.0f,  z = x * k,  xx = fmaf(z, z, xx) by lanes
 *         sum_xx += (double)fold(xx) * q^2,  q = a / 127.0 in double
 *  2. Screen, NF4 and integers of four bits only. level = z rounded half to even, -127 .. 127. The
 *     screen is a table of integers: row `level` has for each of 2 * QC_SEARCH_FACTORS candidates
 *     (a factor f of a, and a sign; negative ones in the second half) the squared distance of
 *     level / 127 from the nearest value of a code whose scale is +-f. Rows are added per run of
 *     QC_SEARCH_RUN elements, saturating at 65535, runs in 32 bits. The candidate of the least
 *     total, the lowest index on ties, gives the target t = f * a or -(f * a); where that is not
 *     finite, t = a or -a. 8 bits: t = a * QC_SEARCH_INT8_TARGET where that is finite, else a.
 *  3. Candidates for s, in a fixed order: see below. One is usable if a / 4 <= |s| < infinity.
 *  4. Error of a usable candidate.
 *     NF4   inv = 1.0f / s, y = x * inv, r = y less the NF4 value nearest to it (least |y - c|),
 *           rr = fmaf(r, r, rr) by lanes, E = (double)fold(rr) * ((double)s * (double)s)
 *     int8  inv = (1.0f / s) * 127.0f, y = x * inv, q = y rounded half to even, clamped to +-127,
 *           r = y - q, rr likewise, E = (double)fold(rr) * (w * w), w = (double)s / 127.0
 *     The least E wins, the first on ties. No usable candidate: all codes are those of 0, E is
 *     what step 1 added to sum_xx, and s is the one of code q0 below.
 *  5. Codes. NF4: number of thresholds strictly below y; int8: q. sum_ee += E. max_err, max_index:
 *     |x - x'|, x' = value * s, or (q * QC_INT8_STEP) * s.
 *     In a tiny block E and q^2 are multiplied by 2^-128 (exact).
 *
 * Candidates without double quantization: t * QC_SEARCH_NF4_STEPS[j], or a *
 * QC_SEARCH_INT8_STEPS[j]
 *
 * Integers (`integer` of qc_form_ops; never nested): as int8, but inv = 1.0f / s, w = s, codes are
 * clamped to those of the form, and x' = q * s. Candidates of groups of 4 bits are
 * qc_int_round_scale(|t| * QC_SEARCH_INT4_STEPS[j]) with the sign of t. All others are
 * qc_int_round_scale(a * |f| / reach) with the sign of f, in this order of operations, where reach
 * is the largest magnitude of a code and f is qc_search_steps_of[by rows][bits - 2][j]. One is
 * usable if a / 4 <= |s| * reach; where none is, and for zeros, s is candidate 0.
 *
 * With it, for a group, once all its blocks have targets:
 *     N = largest |t - offset| over its blocks that are not zero (0 if there are none); not finite:
 *         FLT_MAX. d = t - offset; q0 = entry of the dynamic map nearest to d * (1.0f / N) as
 *         nested_quantize finds it (N and d times QC_TINY_SCALE if N < QC_TINY_ABSMAX; N == 0: 127)
 *     s(q) = map[q] * N + offset
 *     window: R codes from q0 - R / 2 + (t > s(q0)) on, moved to lie within 0 .. 255, ascending;
 *         R = QC_SEARCH_NF4_WINDOW or QC_SEARCH_INT8_WINDOW
 *     a block of zeros: q0 of t = 0
 * QC_SEARCH_REFIT: R = QC_SEARCH_NF4_WIDE or QC_SEARCH_INT8_WIDE, and NF4 has a second target t2,
 * from the candidate of the screen with the least total (lowest index on ties) among those of the
 * other sign or more than one index away from the first. Windows around t, then around t2. All this
 * for N_k = N * QC_SEARCH_REFITS[k] (q0 and windows with N_k), k rising; the N_k of least sum of E
 * over the group's blocks (double, in order) is taken, the lowest k on ties.
 *
 * A row of int8: x is h, after float16; E of step 4 for s = a * QC_SEARCH_ROW_STEPS[j], where
 * lanes are column % 16 and after every QC_ROW_FLUSH columns and at the row's end are folded, added
 * to a double and zeroed; scb = the best s. Sums as in int8_rows_quantize. Integers by rows have no
 * float16, and sums as in int_quantize. */
#ifndef QC_QUANT_SCALE_SEARCH_INTERNAL_H
#define QC_QUANT_SCALE_SEARCH_INTERNAL_H

#include "quant/quant_internal.h"
#include "quant/scale_search.h"

#define QC_SEARCH_FACTORS     16u
#define QC_SEARCH_LEVELS      255u
#define QC_SEARCH_RUN         64u
#define QC_SEARCH_CANDIDATES  16u /* most at once */
#define QC_SEARCH_RUN_BLOCKS  16u
#define QC_SEARCH_NF4_WINDOW  QC_SEARCH_PAIR
#define QC_SEARCH_INT8_WINDOW 16u
#define QC_SEARCH_NF4_LATTICE 5u
#define QC_SEARCH_PAIR        2u /* NF4's window and the steps of four bits are one */
#define QC_SEARCH_NF4_WIDE    8u
#define QC_SEARCH_SHORT       8u /* factors of groups of 5 to 7 bits */
#define QC_SEARCH_INT8_WIDE   32u
#define QC_SEARCH_REFIT_COUNT 4u
#define QC_SEARCH_INT8_TARGET 1.02f
#define QC_SEARCH_WIDE_BLOCK  512u /* from this size on the second list of factors is used */

/* Two lists are for NF4, one for blocks below QC_SEARCH_WIDE_BLOCK and one for the others: the
 * larger a block, the further its largest element is from the bulk. Above 1.2 the largest element
 * takes the code below the last. Two more are for integers of four bits, as shares of a / 8. */
#define QC_SEARCH_LISTS 4u
#define QC_SEARCH_FACTOR_VALUES                                                                    \
    {0.70f, 0.78f, 0.82f, 0.86f, 0.89f, 0.92f, 0.95f, 0.98f,                                       \
     1.01f, 1.04f, 1.07f, 1.10f, 1.25f, 1.31f, 1.37f, 1.43f},                                      \
        {0.46f, 0.54f, 0.60f, 0.66f, 0.70f, 0.74f, 0.78f, 0.82f,                                   \
         0.86f, 0.90f, 0.94f, 0.98f, 1.02f, 1.06f, 1.12f, 1.33f},                                  \
        {0.780f / 8, 0.805f / 8, 0.830f / 8, 0.855f / 8, 0.880f / 8, 0.905f / 8,                   \
         0.930f / 8, 0.955f / 8, 0.980f / 8, 1.005f / 8, 1.030f / 8, 1.055f / 8,                   \
         1.080f / 8, 1.105f / 8, 1.130f / 8, 1.155f / 8},                                          \
    {                                                                                              \
        0.36f / 8, 0.40f / 8, 0.44f / 8, 0.48f / 8, 0.52f / 8, 0.56f / 8, 0.60f / 8, 0.64f / 8,    \
            0.68f / 8, 0.72f / 8, 0.76f / 8, 0.80f / 8, 0.84f / 8, 0.88f / 8, 0.92f / 8, 0.96f / 8 \
    }
/* 1 -+ 1 / 128 */
#define QC_SEARCH_INT4_STEPS                                                                       \
    {                                                                                              \
        0.9921875f, 1.0078125f                                                                     \
    }
#define QC_SEARCH_NF4_STEPS                                                                        \
    {                                                                                              \
        0.984375f, 0.9921875f, 1.0f, 1.0078125f, 1.015625f                                         \
    }
/* (254 + j) / 256 */
#define QC_SEARCH_INT8_STEPS                                                                       \
    {                                                                                              \
        0x1.fcp-1f, 0x1.fep-1f, 0x1p+0f, 0x1.01p+0f, 0x1.02p+0f, 0x1.03p+0f, 0x1.04p+0f,           \
            0x1.05p+0f, 0x1.06p+0f, 0x1.07p+0f, 0x1.08p+0f, 0x1.09p+0f, 0x1.0ap+0f, 0x1.0bp+0f,    \
            0x1.0cp+0f, 0x1.0dp+0f                                                                 \
    }
#define QC_SEARCH_ROW_STEPS                                                                        \
    {                                                                                              \
        0.70f, 0.80f, 0.86f, 0.90f, 0.92f, 0.94f, 0.95f, 0.96f, 0.97f, 0.975f, 0.98f, 0.985f,      \
            0.99f, 0.995f, 1.0f, 1.005f                                                            \
    }
/* For codes of 2 to 8 bits, in groups and by rows. Below 8 bits a scale may be negative, because
 * the lowest number has no mirror. The factors for 2, 3, 5, 6 and 7 bits are those that together
 * leave the least error of normal weights, of Student's t and, by rows, of rows with an outlier,
 * chosen one after another from a grid of 0.01 (docs/theory/scale_search.md). 1 and -1 are among
 * them, one of which leaves the largest value exact. Groups of 4 bits have a screen instead; those
 * of 5 to 7 have eight factors, which are there twice, so that code for sixteen finds the same. */
#define QC_SEARCH_GROUP_FACTORS                                                                    \
    {                                                                                              \
        {-0.44f, 0.48f,  -0.54f, 0.59f,  -0.62f, 0.67f,  -0.68f, -0.74f,                           \
         0.75f,  -0.79f, 0.82f,  -0.84f, 0.90f,  -0.91f, 1.00f,  -1.00f},                          \
            {0.65f,  -0.68f, 0.75f,  -0.76f, 0.82f,  -0.82f, 0.87f,  -0.87f,                       \
             -0.91f, 0.92f,  -0.95f, 0.97f,  -1.00f, 1.00f,  -1.06f, 1.22f},                       \
            {0.0f}, {-0.95f, 0.96f, 0.98f, -0.98f, 1.00f, -1.00f, 1.06f, 1.13f,                    \
                     -0.95f, 0.96f, 0.98f, -0.98f, 1.00f, -1.00f, 1.06f, 1.13f},                   \
            {0.99f, -0.99f, 1.00f, -1.00f, 1.02f, 1.03f, 1.04f, 1.07f,                             \
             0.99f, -0.99f, 1.00f, -1.00f, 1.02f, 1.03f, 1.04f, 1.07f},                            \
            {-0.99f, 1.00f, -1.00f, 1.01f, 1.02f, 1.03f, 1.05f, 1.07f,                             \
             -0.99f, 1.00f, -1.00f, 1.01f, 1.02f, 1.03f, 1.05f, 1.07f},                            \
            QC_SEARCH_INT8_STEPS                                                                   \
    }
#define QC_SEARCH_ROW_FACTORS                                                                      \
    {                                                                                              \
        {0.26f, -0.26f, -0.30f, -0.34f, 0.36f, -0.42f, 0.47f, -0.53f,                              \
         0.57f, -0.61f, 0.64f,  -0.67f, 0.73f, -0.74f, 1.00f, -1.00f},                             \
            {0.26f,  -0.26f, -0.33f, 0.36f,  -0.43f, 0.45f, -0.48f, 0.56f,                         \
             -0.58f, 1.00f,  -0.68f, -0.75f, 0.76f,  0.83f, -0.84f, -1.00f},                       \
            {0.30f, -0.30f, 0.40f, -0.40f, 0.49f, -0.49f, 0.58f, -0.58f,                           \
             0.67f, -0.67f, 0.76f, -0.76f, 0.85f, -0.85f, 0.95f, -0.95f},                          \
            {-0.49f, 0.50f,  0.64f, -0.68f, 0.76f, -0.76f, -0.82f, 0.84f,                          \
             0.88f,  -0.88f, 0.92f, -0.92f, 0.94f, -0.96f, 1.00f,  -1.00f},                        \
            {-0.76f, 0.77f,  -0.86f, -0.89f, 0.90f,  0.92f, -0.92f, 0.94f,                         \
             -0.94f, -0.95f, 0.97f,  -0.97f, -0.98f, 1.00f, -1.00f, 1.03f},                        \
            {-0.91f, 0.93f,  -0.93f, -0.94f, 0.95f, -0.95f, 0.97f, -0.97f,                         \
             0.98f,  -0.98f, 0.99f,  -0.99f, 1.00f, -1.00f, 1.01f, 1.03f},                         \
            QC_SEARCH_ROW_STEPS                                                                    \
    }
/* 1 - k / 32 */
#define QC_SEARCH_REFITS                                                                           \
    {                                                                                              \
        1.0f, 0.96875f, 0.9375f, 0.90625f                                                          \
    }

extern const float qc_search_factor[QC_SEARCH_LISTS][QC_SEARCH_FACTORS];
/* Indexed by whether a form has a scale for each row, and by its bits less 2. */
extern const float qc_search_steps_of[2][7][QC_SEARCH_CANDIDATES];

/* Returns the list of factors, or QC_SEARCH_LISTS for a form without a screen. */
static inline unsigned qc_search_list(const qc_form_ops *form, uint32_t block_elems)
{
    const unsigned first = qc_form_is_table(form) ? 0 : 2;
    return form->bits == 4 ? first + (block_elems >= QC_SEARCH_WIDE_BLOCK) : QC_SEARCH_LISTS;
}

/* Rounds n magnitudes as qc_int_round_scale does it for each, with the table's casts. n is at most
 * QC_NESTED_BLOCK * QC_SEARCH_CANDIDATES. */
void qc_search_round_scales(const qc_quant_ops *ops, qc_dtype dtype, float *s, unsigned n);

/* screen: [list][level + 127][candidate] is 32768 * the squared distance, rounded half to even in
 * double; the last row is 0. nf4_low, nf4_high: for y in [-1, 1] and k = y * QC_NF4_BUCKETS
 * rounded, modulo 32 (see quant_simd_tables.h), one of the two is the NF4 value nearest to y. */
typedef struct {
    _Alignas(64) uint16_t screen[QC_SEARCH_LISTS][QC_SEARCH_LEVELS + 1][2 * QC_SEARCH_FACTORS];
    float factor[QC_SEARCH_LISTS][2 * QC_SEARCH_FACTORS]; /* [list][candidate], with its sign */
    _Alignas(64) float nf4_low[32];
    _Alignas(64) float nf4_high[32];
} qc_search_tables;

/* The tables are computed once per process; thread-safe. */
const qc_search_tables *qc_search_tables_get(void);

/* What steps 1 and 2 find in a block. If absmax is 0, below QC_TINY_ABSMAX or not finite, only
 * absmax is set. */
typedef struct {
    _Alignas(64) uint32_t total[2 * QC_SEARCH_FACTORS]; /* sums of the screen by candidate */
    uint32_t best;                                      /* the candidate of least total */
    float absmax;                                       /* largest magnitude of the floats */
    float xx;                                           /* folded */
} qc_search_look;

/* The work on elements, per instruction set. Floats are 64-byte aligned and n is a multiple of
 * QC_SEARCH_PAD. The driver pads with zeros, which change nothing (their level, error and code are
 * those of 0), and scales tiny blocks. */
#define QC_SEARCH_PAD 32u

static inline uint32_t qc_search_padded(uint32_t n)
{
    return (n + QC_SEARCH_PAD - 1) / QC_SEARCH_PAD * QC_SEARCH_PAD;
}

typedef struct {
    const qc_quant_ops *ops; /* casts, double quantization */
    /* any n, no padding */
    void (*widen)(const void *src, qc_dtype dtype, uint32_t n, float *x);
    /* These three work on up to QC_SEARCH_RUN_BLOCKS blocks of n elements, one after another, so
     * that numbers per block form a vector; n times their number is at most QC_BLOCK_MAX. */
    /* screen: NULL for forms without one. Only looks with an absmax of the usual kind are
     * complete. */
    void (*look)(const float *x, uint32_t n, unsigned blocks,
                 const uint16_t (*screen)[2 * QC_SEARCH_FACTORS], qc_search_look *out);
    /* inv and rr: [blocks][count]; rr is folded, for the candidate of that inverse. count is
     * QC_SEARCH_PAIR, of a table also QC_SEARCH_NF4_LATTICE or _WIDE, of others QC_SEARCH_SHORT
     * or QC_SEARCH_CANDIDATES; tables may be NULL for evenly spaced codes. */
    void (*errors)(const qc_search_tables *tables, const float *x, uint32_t n, unsigned blocks,
                   const qc_form_ops *form, const float *inv, unsigned count, float *rr);
    /* inv and s: [blocks]. Writes codes as a reader has them; returns the largest |x - x'|. */
    float (*encode)(const float *x, uint32_t n, unsigned blocks, const qc_form_ops *form,
                    const float *inv, const float *s, uint8_t *codes);
    /* At most QC_ROW_FLUSH columns of a row; x is before float16, h after. ee and xx are folded,
     * and for integers in units of the scale's square. */
    float (*encode_row)(const float *x, const float *h, uint32_t n, const qc_form_ops *form,
                        float s, uint8_t *codes, float *ee, float *xx);
} qc_search_steps;

/* What is known of a block after the first walk. */
typedef struct {
    float absmax;
    float target; /* 0: a block of zeros */
    float second; /* NF4 */
    double xx;    /* sum x^2 */
} qc_search_target;

typedef struct {
    float x[QC_BLOCK_MAX];
    uint8_t codes[QC_BLOCK_MAX]; /* codes of a short block */
    qc_search_target of[QC_NESTED_BLOCK];
    float target[QC_NESTED_BLOCK];
    uint8_t nearest[QC_NESTED_BLOCK];
    /* What is tried of a group without refit, [block][candidate]. */
    uint32_t first_code[QC_NESTED_BLOCK];
    _Alignas(64) float scale[QC_NESTED_BLOCK * QC_SEARCH_CANDIDATES];
    _Alignas(64) float inverse[QC_NESTED_BLOCK * QC_SEARCH_CANDIDATES]; /* 0: not usable */
} qc_search_scratch;

/* Notes the largest |x - x'| of elements from `first` on; x are as they are in the source. */
void qc_search_note_largest(const qc_form_ops *form, const float *x, uint32_t n,
                            const uint8_t *codes, float scale, uint64_t first, qc_piece_sums *sums);

/* What scale_search.h says of forms by rows, done with these steps for n elements. */
void qc_search_rows_with(const qc_search_steps *steps, const qc_form *form, const void *src,
                         qc_dtype dtype, uint64_t n, const qc_search_out *out, void *scratch,
                         qc_piece_sums *sums);
/* Returns what errors and values of a row are multiplied by before they are squared. */
static inline float qc_search_row_unit(const qc_form_ops *form, float s)
{
    return form->integer ? 1.0f / s : 1.0f;
}
/* Returns the factor that takes a value to the number of its code; 0 for a scale of 0. */
static inline float qc_search_inverse(const qc_form_ops *form, float s)
{
    return s == 0.0f ? 0.0f : (1.0f / s) * form->span;
}

extern const qc_search_ops qc_search_ops_scalar;
extern const qc_search_ops qc_search_ops_avx2;   /* where QC_HAVE_QUANT_AVX2 */
extern const qc_search_ops qc_search_ops_avx512; /* where QC_HAVE_QUANT_AVX512 */

#endif
