#include "convert/fit/auto_measure.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "convert/model/weight_read.h"
#include "quant/scale_search.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* The rows that are written of a transposed weight are columns of the file, so a few runs of
 * neighbouring columns are read. */
#define TRANSPOSED_RUNS 4u

typedef struct {
    uint64_t rows, cols, elems; /* those of the sample */
} extent;

typedef struct {
    qc_auto_sample *samples;
    uint32_t count;
    const qc_checkpoint *model;
    int double_quant;
    qc_scale_method scale;
    const qc_quant_ops *ops;
    const qc_search_ops *search;
    uint64_t max_elems, max_rows, max_cols, max_each;
    atomic_uint_fast32_t next;
} measuring;

/* The scratch memory of one thread. */
typedef struct {
    qc_weight_reader reader;
    unsigned char *source;
    uint8_t *codes, *nested_codes;
    float *absmax, *final, *nested;
    qc_block_error *errors;
    float *scb;
    void *search; /* scratch for searching scales, where they are searched */
} scratch;

/* Returns the dtype of the weights in the scratch memory. */
static qc_dtype dtype_of(const measuring *m, const qc_auto_sample *s)
{
    return s->coded ? QC_DTYPE_F32 : m->model->tensors[s->tensor].dtype;
}

static uint64_t each_of(const measuring *m, const qc_auto_sample *s)
{
    return qc_dtype_bits(dtype_of(m, s)) / 8;
}

static extent extent_of(const qc_auto_sample *s)
{
    extent e = {.cols = s->cols < QC_AUTO_SAMPLE_MAX ? s->cols : QC_AUTO_SAMPLE_MAX};
    uint64_t want = qc_ceil_div_u64(QC_AUTO_SAMPLE_ELEMS, e.cols);
    want = want < QC_AUTO_SAMPLE_ROWS ? QC_AUTO_SAMPLE_ROWS : want;
    uint64_t most = QC_AUTO_SAMPLE_MAX / e.cols;
    want = want < most ? want : most;
    e.rows = s->rows < want ? s->rows : want;
    e.elems = e.rows * e.cols;
    return e;
}

/* ---- reading ---- */

/* Reads n weights from number `first` on into the scratch memory, from place `at` on. */
static qc_status read_run(const measuring *m, scratch *w, const qc_auto_sample *s, uint64_t first,
                          uint64_t n, uint64_t at, qc_error *err)
{
    const qc_weight_source from = {.tensor = s->tensor, .coded = s->coded};
    uint64_t each = each_of(m, s);
    unsigned char *to = w->source + at * each;
    const float *values = NULL;
    if (!s->coded)
        return qc_checkpoint_read(m->model, w->reader.codes, &m->model->tensors[s->tensor],
                                  first * each, to, (size_t)(n * each), err);
    QC_TRY(qc_weight_floats(&w->reader, &from, first, n, &values, err));
    memcpy(to, values, (size_t)(n * each));
    return QC_OK;
}

static qc_status read_plain(const measuring *m, scratch *w, const qc_auto_sample *s, extent e,
                            qc_error *err)
{
    if (e.rows == s->rows && e.cols == s->cols)
        return read_run(m, w, s, 0, e.elems, 0, err);
    for (uint64_t k = 0; k < e.rows; k++) {
        /* This is the middle of the k-th of e.rows equal parts. The products stay below 2^64,
         * because there are at most 2^22 rows here unless s->rows is below 2^40. */
        uint64_t row = s->rows / e.rows * k + s->rows % e.rows * k / e.rows + s->rows / e.rows / 2;
        QC_TRY(read_run(m, w, s, row * s->cols, e.cols, k * e.cols, err));
    }
    return QC_OK;
}

static qc_status read_transposed(const measuring *m, scratch *w, const qc_auto_sample *s, extent e,
                                 qc_error *err)
{
    const uint64_t each = each_of(m, s);
    const uint64_t runs = e.rows == s->rows || e.rows < TRANSPOSED_RUNS ? 1 : TRANSPOSED_RUNS;
    qc_checkpoint_tensor t = m->model->tensors[s->tensor];
    t.bytes = e.cols * s->rows * each; /* the columns of the sample, which lie as rows */
    for (uint64_t r = 0; r < runs; r++) {
        const uint64_t first = e.rows / runs * r;
        const uint64_t end = r + 1 < runs ? e.rows / runs * (r + 1) : e.rows;
        const uint64_t at = runs == 1 ? 0 : (s->rows - e.rows) / (runs - 1) * r + first;
        QC_TRY(qc_weight_read_turned(m->model, w->reader.codes, &t, e.cols, at * e.cols,
                                     (end - first) * e.cols, w->source + first * e.cols * each,
                                     err));
    }
    return QC_OK;
}

/* ---- errors ---- */

typedef struct {
    const measuring *m;
    const scratch *w;
    qc_dtype dtype;
} floats_ctx;

static qc_status read_floats(void *vctx, uint64_t first, uint64_t n, float *out, qc_error *err)
{
    const floats_ctx *c = vctx;
    uint64_t overflow = UINT64_MAX;
    (void)err;
    c->m->ops->cast(c->w->source + first * (qc_dtype_bits(c->dtype) / 8), c->dtype, n, out,
                    QC_DTYPE_F32, &overflow);
    return QC_OK;
}

/* A row can have a scale that is too large for float16. Then only this candidate has no error. */
static void take_sums(qc_auto_sample *s, unsigned candidate, const qc_form *form,
                      const qc_piece_sums *sums)
{
    int rows_too_large = qc_form_by_rows(form) && !form->ops->integer && sums->bad == QC_BAD_RANGE;
    s->not_finite |= sums->bad != QC_BAD_NONE && !rows_too_large;
    if (sums->bad != QC_BAD_NONE)
        return;
    s->sum_xx = sums->sum_xx;
    s->rel_mse[candidate] = sums->sum_xx > 0 ? sums->sum_ee / sums->sum_xx : 0;
}

static qc_form form_of(const measuring *m, const qc_auto_sample *s, extent e, unsigned candidate)
{
    const qc_candidate_form *c = &s->forms[candidate];
    const int nested =
        m->double_quant && c->scheme != QC_SCHEME_KEEP && !qc_schemes[c->scheme].form->integer;
    qc_form form = qc_scheme_form(c->scheme, e.cols, c->block_elems, nested);
    form.scale_dtype = qc_scheme_scale_dtype(
        s->coded ? s->coded->dtype : qc_checkpoint_dtype(&m->model->tensors[s->tensor]));
    return form;
}

static void measure_searched(const measuring *m, scratch *w, qc_auto_sample *s, extent e,
                             unsigned candidate)
{
    const qc_form form = form_of(m, s, e, candidate);
    qc_search_out out = {.codes = w->codes,
                         .absmax = qc_form_by_rows(&form) ? w->scb : w->absmax,
                         .absmax_codes = w->nested_codes,
                         .nested_absmax = w->nested};
    qc_piece_sums sums = {0};
    m->search->blocks(&form, m->scale == QC_SCALE_REFIT ? QC_SEARCH_REFIT : QC_SEARCH_ONCE,
                      w->source, dtype_of(m, s), e.elems, &out, w->search, &sums);
    take_sums(s, candidate, &form, &sums);
}

static qc_status measure_absmax(const measuring *m, scratch *w, qc_auto_sample *s, extent e,
                                unsigned candidate, qc_error *err)
{
    const qc_form form = form_of(m, s, e, candidate);
    const qc_form_out out = {w->codes, qc_form_by_rows(&form) ? w->scb : w->absmax, w->errors};
    uint64_t blocks = qc_form_scales(&form, e.elems);
    qc_piece_sums sums = {0};
    qc_tensor_error error = {0};
    floats_ctx ctx = {m, w, dtype_of(m, s)};
    form.ops->quantize(m->ops, &form, w->source, ctx.dtype, e.elems, &out, &sums);
    if (sums.bad != QC_BAD_NONE || qc_form_by_rows(&form) || form.ops->integer) {
        take_sums(s, candidate, &form, &sums);
        return QC_OK;
    }
    const float *final = w->absmax;
    if (m->double_quant) {
        float offset = qc_nested_offset(w->absmax, blocks);
        m->ops->nested_quantize(w->absmax, blocks, offset, w->nested_codes, w->nested);
        m->ops->nested_dequantize(w->nested_codes, w->nested, qc_dynamic_map, blocks,
                                  QC_NESTED_BLOCK, offset, w->final);
        final = w->final;
    }
    const qc_finished_blocks finished = {.quant = m->ops,
                                         .form = form,
                                         .n = e.elems,
                                         .absmax = w->absmax,
                                         .absmax_final = final,
                                         .errors = w->errors,
                                         .read = read_floats,
                                         .read_ctx = &ctx};
    QC_TRY(qc_block_error_finish(&finished, &sums, &error, err));
    s->sum_xx = sums.sum_xx;
    s->rel_mse[candidate] = error.rel_mse;
    return QC_OK;
}

static qc_status measure_one(const measuring *m, scratch *w, qc_auto_sample *s, qc_error *err)
{
    extent e = extent_of(s);
    for (unsigned c = 0; c < QC_CANDIDATES; c++)
        s->rel_mse[c] = (double)NAN;
    s->rel_mse[QC_CANDIDATE_16BIT] = 0;
    s->rows_read = e.rows;
    s->elems = e.elems;
    s->bytes_read = s->coded ? qc_coded_bytes(s->coded, e.elems) : e.elems * each_of(m, s);
    qc_error trouble = {0};
    qc_status st =
        s->transpose ? read_transposed(m, w, s, e, &trouble) : read_plain(m, w, s, e, &trouble);
    if (st == QC_ERR_NONFINITE) {
        s->not_finite = 1;
    } else if (st != QC_OK) {
        if (err)
            *err = trouble;
        return st;
    }
    for (unsigned c = 0; c < QC_CANDIDATE_16BIT && !s->not_finite; c++) {
        if (!(s->wanted & 1u << c))
            continue;
        if (m->scale != QC_SCALE_ABSMAX)
            measure_searched(m, w, s, e, c);
        else
            QC_TRY(measure_absmax(m, w, s, e, c, err));
    }
    for (unsigned c = 0; s->not_finite && c < QC_CANDIDATE_16BIT; c++)
        s->rel_mse[c] = (double)NAN;
    return QC_OK;
}

/* ---- threads ---- */

static void scratch_deinit(scratch *w)
{
    qc_weight_reader_close(&w->reader);
    qc_free(w->source);
    qc_free(w->codes);
    qc_free(w->nested_codes);
    qc_free(w->absmax);
    qc_free(w->final);
    qc_free(w->nested);
    qc_free(w->errors);
    qc_free(w->scb);
    qc_free(w->search);
}

static qc_status scratch_init(scratch *w, const measuring *m, qc_error *err)
{
    size_t elems = (size_t)m->max_elems, blocks = elems / 32 + 1;
    memset(w, 0, sizeof *w);
    QC_TRY(qc_weight_reader_open(&w->reader, m->model, err));
    QC_TRY(qc_realloc_array(&w->source, elems, (size_t)m->max_each, err));
    QC_TRY(qc_realloc_array(&w->codes, elems, 1, err));
    QC_TRY(qc_realloc_array(&w->nested_codes, blocks, 1, err));
    QC_TRY(qc_realloc_array(&w->absmax, blocks, sizeof *w->absmax, err));
    QC_TRY(qc_realloc_array(&w->final, blocks, sizeof *w->final, err));
    QC_TRY(qc_realloc_array(&w->nested, blocks / 256 + 1, sizeof *w->nested, err));
    QC_TRY(qc_realloc_array(&w->errors, blocks, sizeof *w->errors, err));
    QC_TRY(qc_realloc_array(&w->scb, (size_t)m->max_rows, sizeof *w->scb, err));
    if (m->scale == QC_SCALE_ABSMAX)
        return QC_OK;
    return qc_malloc_aligned(&w->search, 64, qc_search_scratch_bytes(), err);
}

static qc_status measure_samples(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    measuring *m = ctx;
    scratch w = {0};
    (void)index;
    qc_status st = scratch_init(&w, m, err);
    while (st == QC_OK) {
        uint32_t i = (uint32_t)atomic_fetch_add(&m->next, 1);
        if (i >= m->count)
            break;
        st = qc_check_stopped(team, err);
        if (st == QC_OK)
            st = measure_one(m, &w, &m->samples[i], err);
    }
    scratch_deinit(&w);
    return st;
}

qc_status qc_auto_measure(qc_auto_sample *samples, uint32_t count, const qc_checkpoint *model,
                          const qc_recipe_options *o, unsigned threads, qc_error *err)
{
    qc_isa isa;
    measuring m = {.samples = samples,
                   .count = count,
                   .model = model,
                   .double_quant = o->double_quant,
                   .scale = o->scale,
                   .max_each = 1};
    QC_TRY(qc_isa_select(&isa, err));
    m.ops = qc_quant_ops_for(isa);
    m.search = qc_search_ops_for(isa);
    atomic_init(&m.next, 0);
    for (uint32_t i = 0; i < count; i++) {
        extent e = extent_of(&samples[i]);
        uint64_t each = each_of(&m, &samples[i]);
        m.max_elems = e.elems > m.max_elems ? e.elems : m.max_elems;
        m.max_cols = e.cols > m.max_cols ? e.cols : m.max_cols;
        m.max_rows = e.rows > m.max_rows ? e.rows : m.max_rows;
        m.max_each = each > m.max_each ? each : m.max_each;
    }
    if (count == 0)
        return QC_OK;
    return qc_team_run(threads < count ? threads : count, measure_samples, &m, err);
}

int qc_auto_combine(double rel_mse[QC_CANDIDATES], double *mean_square, const qc_auto_sample *s,
                    uint32_t n)
{
    double xx = 0, elems = 0;
    int not_finite = 0;
    for (uint32_t i = 0; i < n; i++) {
        xx += s[i].sum_xx;
        elems += (double)s[i].elems;
        not_finite |= s[i].not_finite;
    }
    for (unsigned k = 0; k < QC_CANDIDATES; k++) {
        double ee = 0;
        for (uint32_t i = 0; i < n; i++)
            ee += s[i].rel_mse[k] * s[i].sum_xx;
        rel_mse[k] = isnan(ee) ? ee : xx > 0 ? ee / xx : 0;
    }
    rel_mse[QC_CANDIDATE_16BIT] = 0;
    *mean_square = elems > 0 ? xx / elems : 0;
    return not_finite;
}

/* ---- without weights ---- */

/* The error of integers whose scale `length` weights share. */
typedef struct {
    uint32_t length;
    double mse[7][2]; /* of int2 to int8: with absmax scales, and with searched ones */
} shared_error;

/* Measured on normal numbers; tests/unit/fit/unit_auto_measure.c measures again. */
static const shared_error shared_errors[] = {
    {32,
     {{2.219e-01, 1.104e-01},
      {4.116e-02, 2.655e-02},
      {8.972e-03, 6.570e-03},
      {2.102e-03, 1.620e-03},
      {5.092e-04, 3.894e-04},
      {1.253e-04, 9.495e-05},
      {2.854e-05, 2.308e-05}}},
    {64,
     {{2.603e-01, 1.235e-01},
      {4.838e-02, 3.123e-02},
      {1.055e-02, 8.050e-03},
      {2.469e-03, 2.050e-03},
      {5.978e-04, 5.057e-04},
      {1.471e-04, 1.248e-04},
      {3.509e-05, 3.060e-05}}},
    {128,
     {{3.009e-01, 1.323e-01},
      {5.611e-02, 3.463e-02},
      {1.221e-02, 9.303e-03},
      {2.863e-03, 2.448e-03},
      {6.935e-04, 6.189e-04},
      {1.706e-04, 1.540e-04},
      {4.166e-05, 3.814e-05}}},
    {512,
     {{3.836e-01, 1.417e-01},
      {7.243e-02, 3.821e-02},
      {1.579e-02, 1.097e-02},
      {3.699e-03, 3.073e-03},
      {8.943e-04, 8.185e-04},
      {2.206e-04, 2.081e-04},
      {5.471e-05, 5.320e-05}}},
    {2048,
     {{4.659e-01, 1.460e-01},
      {9.031e-02, 3.965e-02},
      {1.961e-02, 1.155e-02},
      {4.590e-03, 3.375e-03},
      {1.113e-03, 9.561e-04},
      {2.738e-04, 2.571e-04},
      {6.833e-05, 6.650e-05}}},
    {8192,
     {{5.400e-01, 1.480e-01},
      {1.077e-01, 4.035e-02},
      {2.349e-02, 1.183e-02},
      {5.492e-03, 3.500e-03},
      {1.331e-03, 1.021e-03},
      {3.273e-04, 2.899e-04},
      {8.181e-05, 7.820e-05}}},
};

static double measured_mse(qc_candidate_form form, uint64_t cols, int searched)
{
    static const double nf4[2][2] = {{8.45e-3, 6.82e-3}, {7.62e-3, 5.66e-3}}; /* 64, 32 */
    enum { LENGTHS = sizeof shared_errors / sizeof *shared_errors };
    const unsigned width = qc_schemes[form.scheme].bits - 2;
    const double length = (double)(form.block_elems ? form.block_elems : cols);
    if (form.scheme == QC_SCHEME_NF4)
        return nf4[form.block_elems < 64][searched];
    unsigned k = 0;
    while (k + 2 < LENGTHS && length > shared_errors[k + 1].length)
        k++;
    /* The error is nearly linear in the logarithm of the length. */
    const shared_error *a = &shared_errors[k], *b = a + 1;
    double part = log2(length / a->length) / log2((double)b->length / a->length);
    part = part < 0 ? 0 : part;
    return a->mse[width][searched] + part * (b->mse[width][searched] - a->mse[width][searched]);
}

double qc_auto_normal_mse(qc_candidate_form form, uint64_t cols, qc_scale_method scale)
{
    /* E[max x^2] over 2^k standard normal numbers, k = 0 .. 20, is the integral of 2 x (1 - erf(x /
     * sqrt 2)^n). tests/unit/fit/unit_auto_measure.c computes both tables again. */
    static const double max_square[] = {
        1.0000,  1.6366,  2.4702,  3.4574,  4.5495,  5.7095,  6.9139,
        8.1483,  9.4038,  10.6750, 11.9583, 13.2512, 14.5520, 15.8595,
        17.1726, 18.4906, 19.8128, 21.1388, 22.4682, 23.8005, 25.1356,
    };
    enum { POINTS = sizeof max_square / sizeof *max_square };
    /* The share of the error that the search leaves, for rows of the same lengths. Rows of fewer
     * than 16 weights take the share of 16. */
    static const double searched_share[POINTS] = {
        0.925, 0.925, 0.925, 0.925, 0.925, 0.936, 0.948, 0.959, 0.967, 0.972, 0.975,
        0.974, 0.969, 0.956, 0.932, 0.895, 0.849, 0.800, 0.752, 0.714, 0.701,
    };
    int searched = scale != QC_SCALE_ABSMAX;
    if (form.scheme == QC_SCHEME_KEEP)
        return 0;
    if (qc_schemes[form.scheme].bits < 8 || form.block_elems)
        return measured_mse(form, cols, searched);
    unsigned k = 0;
    while (k + 2 < POINTS && cols >> (k + 1) > 0)
        k++;
    /* The value is nearly linear in the logarithm of the length. Within an octave, a line over the
     * length is close enough. */
    double part = (double)cols / (double)(UINT64_C(1) << k) - 1;
    part = part < 0 ? 0 : part > 1 ? 1 : part;
    double square = max_square[k] + part * (max_square[k + 1] - max_square[k]);
    /* The largest value of a row is stored without error. */
    double mse = square / (12.0 * 127 * 127) * (1 - 1 / (double)(cols > 1 ? cols : 2));
    if (searched)
        mse *= searched_share[k] + part * (searched_share[k + 1] - searched_share[k]);
    return mse;
}

/* ---- how much an error matters ---- */

/* Is the last component of a module's path one of these words? */
static int is_one_of(const char *part, size_t len, const char *const *words)
{
    for (; *words; words++) {
        if (strlen(*words) == len && memcmp(*words, part, len) == 0)
            return 1;
    }
    return 0;
}

double qc_auto_importance(const char *name)
{
    /* Errors of queries and keys reach the output only through the softmax. */
    static const char *const scores[] = {"q_proj", "k_proj", "q_a_proj", "q_b_proj", "query",
                                         "key",    "q_lin",  "k_lin",    "q",        "k",
                                         "to_q",   "to_k",   "wq",       "wk",       NULL};
    /* These are one weight for several: a key and a value; a query, a key and a value; a gate and
     * an up. */
    static const char *const two[] = {"kv_b_proj", "kv_a_proj_with_mqa", "kv_proj", "to_kv", NULL};
    static const char *const three[] = {"qkv_proj", "query_key_value", "qkv",    "Wqkv",
                                        "c_attn",   "in_proj",         "W_pack", "wqkv",
                                        "to_qkv",   "gate_up_proj",    NULL};
    size_t len = strlen(name), tail = sizeof ".weight" - 1;
    if (len > tail && strcmp(name + len - tail, ".weight") == 0)
        len -= tail;
    size_t begin = len;
    while (begin > 0 && name[begin - 1] != '.')
        begin--;
    const char *last = name + begin;
    len -= begin;
    return is_one_of(last, len, scores)  ? 0.5
           : is_one_of(last, len, two)   ? 1.5
           : is_one_of(last, len, three) ? 2
                                         : 1;
}
