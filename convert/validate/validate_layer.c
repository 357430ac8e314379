#include "convert/validate/validate_layer.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "quant/quant_half.h"
#include "quant/weight_slice.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define STEP_BYTES     (1u << 20)           /* of W as floats, for each thread */
#define SHARE_BYTES    (8u << 20)           /* of W as floats: how much a thread takes at a time */
#define PIECE_PRODUCTS ((uint64_t)64 << 20) /* of a weight and an x, between looks for Ctrl-C */

/* The sums over one row of W. Rows are added in order at the end. */
typedef struct {
    qc_validate_sums weight, output, kernel;
    uint64_t max_col;
} row_sums;

typedef struct {
    const qc_validate_tools *tools;
    const qc_validate_pair *pair;
    const qc_weights *w;
    const qc_validate_input *in;
    qc_weight_source source;
    double *packed;       /* x, packed for double_row */
    uint16_t *y;          /* [R, N] */
    row_sums *rows;       /* [N] */
    uint64_t step, share; /* rows at a time */
    atomic_uint_fast64_t next;
} job;

typedef struct {
    qc_weight_reader reader;
    float *original, *decoded; /* [step, K], [K] */
    double *sums;              /* [2, R] */
} bench;

double qc_validate_kernel_limit(qc_dtype y_dtype)
{
    return y_dtype == QC_DTYPE_BF16 ? QC_VALIDATE_KERNEL_BF16 : QC_VALIDATE_KERNEL_F16;
}

double qc_validate_speedup(const qc_validate_time *t)
{
    return t->fp16_seconds > 0.0 ? t->fp16_seconds / t->seconds : (double)NAN;
}

double qc_validate_sqnr(double weight_error)
{
    return -20.0 * log10(weight_error);
}

double qc_validate_ratio(double error, double size)
{
    if (error == 0.0)
        return 0.0;
    return sqrt(error / size);
}

/* Returns the largest error over the root mean square of what it is compared with. */
static double relative(const qc_validate_sums *s, double count)
{
    return s->max == 0.0 ? 0.0 : s->max / sqrt(s->xx / count);
}

void qc_validate_set_errors(qc_validate_layer *l, const qc_validate_sums *output,
                            const qc_validate_sums *kernel, double outputs)
{
    l->output_error = qc_validate_ratio(output->ee, output->xx);
    l->output_max = relative(output, outputs);
    l->kernel_error = qc_validate_ratio(kernel->ee, kernel->xx);
    l->kernel_max = relative(kernel, outputs);
}

qc_dtype qc_validate_x_dtype(qc_dtype weight)
{
    return weight == QC_DTYPE_BF16 ? QC_DTYPE_BF16 : QC_DTYPE_F16;
}

/* Is e larger, or a NaN? A NaN must not get lost. */
static int exceeds(double e, double most)
{
    return e > most || (isnan(e) && !isnan(most));
}

/* Adds an error; returns 1 if it is the largest so far. */
static int add_error(qc_validate_sums *s, double e, double x)
{
    s->ee += e * e;
    s->xx += x * x;
    if (!exceeds(fabs(e), s->max))
        return 0;
    s->max = fabs(e);
    return 1;
}

static int add_sums(qc_validate_sums *s, const qc_validate_sums *more)
{
    s->ee += more->ee;
    s->xx += more->xx;
    if (!exceeds(more->max, s->max))
        return 0;
    s->max = more->max;
    return 1;
}

static qc_status step_rows(job *j, bench *b, uint64_t first, uint64_t count, qc_error *err)
{
    const qc_validate_tools *t = j->tools;
    const qc_dtype dtype = j->in->dtype;
    uint64_t k = j->w->form.cols, rows = j->in->rows;
    QC_TRY(qc_weight_read(&b->reader, &j->source, first, count, b->original, QC_DTYPE_F32, err));
    for (uint64_t n = 0; n < count; n++) {
        row_sums *s = &j->rows[first + n];
        const float *original = b->original + n * k;
        qc_weights_row(t->ops, j->w, first + n, b->decoded);
        for (uint64_t i = 0; i < k; i++)
            if (add_error(&s->weight, (double)original[i] - (double)b->decoded[i],
                          (double)original[i]))
                s->max_col = i;
        if (t->weights_only)
            continue;
        t->matmul->double_row(b->decoded, k, j->packed, rows, b->sums);
        t->matmul->double_row(original, k, j->packed, rows, b->sums + rows);
        for (uint64_t r = 0; r < rows; r++) {
            const double exact = b->sums[r], original_sum = b->sums[rows + r];
            const double y = qc_f64_of_half(dtype, j->y[r * j->w->rows + first + n]);
            const double z =
                qc_f64_of_half(dtype, dtype == QC_DTYPE_BF16 ? qc_bf16_from_f64(original_sum)
                                                             : qc_f16_from_f64(original_sum));
            (void)add_error(&s->output, y - z, z);
            (void)add_error(&s->kernel, y - exact, exact);
        }
    }
    return QC_OK;
}

static qc_status work(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    (void)index;
    job *j = ctx;
    bench b = {0};
    uint64_t k = j->w->form.cols, n = j->w->rows, rows = j->in->rows;
    uint64_t source_bytes = j->tools->model->tensors[j->pair->model_tensor].bytes;
    qc_status st = qc_weight_reader_open(&b.reader, j->tools->model, err);
    if (st == QC_OK)
        st = qc_malloc(&b.original, (size_t)(j->step * k) * sizeof(float), err);
    if (st == QC_OK)
        st = qc_malloc(&b.decoded, (size_t)k * sizeof(float), err);
    if (st == QC_OK)
        st = qc_malloc(&b.sums, (size_t)rows * 2 * sizeof(double), err);
    while (st == QC_OK) {
        uint64_t first = atomic_fetch_add(&j->next, j->share);
        if (first >= n)
            break;
        uint64_t end = n - first < j->share ? n : first + j->share;
        for (uint64_t at = first; st == QC_OK && at < end; at += j->step) {
            uint64_t count = end - at < j->step ? end - at : j->step;
            st = qc_check_stopped(team, err);
            if (st == QC_OK)
                st = step_rows(j, &b, at, count, err);
        }
        if (st == QC_OK)
            qc_progress_add(j->tools->progress,
                            (uint64_t)((double)source_bytes * (double)(end - first) / (double)n));
    }
    qc_free(b.sums);
    qc_free(b.decoded);
    qc_free(b.original);
    qc_weight_reader_close(&b.reader);
    return st;
}

qc_status qc_validate_source(qc_weight_source *out, const qc_validate_tools *tools,
                             const qc_validate_pair *pair, qc_error *err)
{
    QC_TRY(qc_weight_source_of(out, tools->model, pair->model_tensor, NULL, pair->coded,
                               pair->transpose, err));
    out->ndim = 2;
    out->dims[0] = pair->rows;
    out->dims[1] = pair->cols;
    return QC_OK;
}

static qc_status prepare(job *j, qc_error *err)
{
    uint64_t k = j->w->form.cols, n = j->w->rows, rows = j->in->rows;
    uint64_t groups = (rows + QC_MATMUL_PACK_ROWS - 1) / QC_MATMUL_PACK_ROWS, bytes = 0;
    size_t size = 0;
    if (qc_mul_u64(groups * QC_MATMUL_PACK_ROWS * sizeof(double), k, &bytes) ||
        qc_u64_to_size(bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "the activations for tensor '%s' do not fit memory",
                j->pair->name);
    QC_TRY(qc_malloc_aligned(&j->packed, 64, size, err));
    qc_matmul_double_pack(j->in->x, j->in->dtype, rows, k, k, j->packed);
    if (qc_mul_u64(n, rows * sizeof *j->y, &bytes) || qc_u64_to_size(bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "the outputs of tensor '%s' do not fit memory", j->pair->name);
    QC_TRY(qc_malloc(&j->y, size, err));
    QC_TRY(qc_calloc(&j->rows, (size_t)n, sizeof *j->rows, err));
    /* A thread reads its share from front to back, so a compressed model is decoded about once. */
    uint64_t row_bytes = qc_sat_mul(k ? k : 1, sizeof(float));
    j->step = row_bytes < STEP_BYTES ? STEP_BYTES / row_bytes : 1;
    j->share = row_bytes < SHARE_BYTES ? SHARE_BYTES / row_bytes : 1;
    uint64_t even = qc_ceil_div_u64(n ? n : 1, j->tools->threads);
    j->share = even < j->share ? even : j->share;
    j->step = j->share < j->step ? j->share : j->step;
    /* All of a Conv1D weight, which lies transposed, is read for each step. */
    if (j->pair->transpose)
        j->step = j->share;
    return qc_validate_source(&j->source, j->tools, j->pair, err);
}

static void finish(const job *j, qc_validate_layer *out)
{
    row_sums all = {0};
    uint64_t n = j->w->rows, row = 0, col = 0;
    for (uint64_t i = 0; i < n; i++) {
        const row_sums *s = &j->rows[i];
        if (add_sums(&all.weight, &s->weight)) {
            row = i;
            col = s->max_col;
        }
        (void)add_sums(&all.output, &s->output);
        (void)add_sums(&all.kernel, &s->kernel);
    }
    out->x_dtype = j->in->dtype;
    out->weight_error = qc_validate_ratio(all.weight.ee, all.weight.xx);
    out->weight_max = all.weight.max;
    out->max_row = j->pair->transpose ? col : row;
    out->max_col = j->pair->transpose ? row : col;
    qc_validate_set_errors(out, &all.output, &all.kernel, (double)n * (double)j->in->rows);
}

qc_status qc_validate_multiply(qc_cpu_matmul *products, const qc_weights *w, qc_matmul_cpu_io io,
                               qc_error *err)
{
    qc_weights_cuts cuts;
    qc_weights_part part = {.cols = w->form.cols};
    unsigned char *y = io.y;
    QC_TRY(qc_weights_cuts_of(w, &cuts, err));
    const uint64_t rows = PIECE_PRODUCTS / qc_max_u64(1, qc_sat_mul(w->form.cols, io.m));
    const uint64_t whole = cuts.rows_in_place; /* a piece of so many rows needs no copy */
    const uint64_t step = qc_sat_mul(qc_max_u64(1, rows / whole), whole);
    for (; part.row < w->rows; part.row += part.rows) {
        qc_weights piece;
        part.rows = qc_min_u64(step, w->rows - part.row);
        io.y = y + part.row * (qc_dtype_bits(io.y_dtype) / 8);
        QC_TRY(qc_check_interrupted(err));
        QC_TRY(qc_weights_slice(w, &part, NULL, &piece, err));
        QC_TRY(qc_cpu_matmul_run(products, &piece, &io, err));
    }
    return QC_OK;
}

qc_status qc_validate_measure(qc_validate_layer *out, const qc_validate_tools *tools,
                              const qc_validate_pair *pair, const qc_weights *w,
                              const qc_validate_input *in, qc_error *err)
{
    job j = {.tools = tools, .pair = pair, .w = w, .in = in};
    atomic_init(&j.next, 0);
    qc_matmul_cpu_io io = {.x = in->x,
                           .x_dtype = in->dtype,
                           .m = in->rows,
                           .ldx = in->cols,
                           .y_dtype = in->dtype,
                           .ldy = w->rows};
    qc_status st = prepare(&j, err);
    if (st == QC_OK && !tools->weights_only) {
        io.y = j.y;
        st = qc_validate_multiply(tools->products, w, io, err);
    }
    if (st == QC_OK)
        st = qc_team_run(tools->threads, work, &j, err);
    if (st == QC_OK)
        finish(&j, out);
    qc_free(j.rows);
    qc_free(j.y);
    qc_free(j.packed);
    return st;
}
