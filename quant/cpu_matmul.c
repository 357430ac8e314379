#include "quant/cpu_matmul.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "quant/cpu_matmul_internal.h"
#include "quant/matmul_ops.h"
#include "quant/quant_half.h"
#include "quant/quant_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define ALIGNMENT 64u
#define SPINS     20000u /* some 50 us: what lies between the products of a layer */
#define CHUNKS    8u     /* of rows for each thread, so that one that is held up does less */

/* A product on its way. */
typedef struct {
    const qc_weights *w;
    const qc_matmul_cpu_io *io;
    qc_gemv gemv; /* the rows of x from first_x on */
    uint64_t first_x;
    unsigned x_rows; /* rows that there are; gemv.m may be more */
    int fast;
    uint64_t chunk;
} product;

typedef struct {
    qc_cpu_matmul *h;
    unsigned index;
} seat;

struct qc_cpu_matmul {
    const qc_matmul_ops *ops;
    const qc_gemv_ops *gemv;
    unsigned threads;
    pthread_t *ids;
    seat *seats;
    unsigned started;
    pthread_mutex_t calls; /* one call at a time; taken before lock */
    pthread_mutex_t lock;  /* for the conditions; a leaf lock */
    pthread_cond_t begun, ended;
    atomic_uint turn;    /* number of the product; a new one wakes the threads */
    atomic_uint working; /* threads that are not through with this turn */
    atomic_int closing;
    atomic_uint_fast64_t next; /* row of W */
    product job;
    void *packed; /* x as the kernels want it */
    size_t packed_bytes;
    void *scratch; /* room for panels, one for each thread */
    size_t scratch_bytes;
};

/* ---- Threads -------------------------------------------------------------------------------- */

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static void store_rows(const product *p, uint64_t row, const float *sums)
{
    const qc_matmul_cpu_io *io = p->io;
    for (unsigned m = 0; m < p->x_rows; m++) {
        float sum = sums[m] + (io->bias ? io->bias[row] : 0.0f);
        const uint64_t at = (p->first_x + m) * io->ldy + row;
        if (isnan(sum))
            sum = qc_f32_of_bits(0x7fc00000u);
        if (io->y_dtype == QC_DTYPE_F32)
            ((float *)io->y)[at] = sum;
        else
            ((uint16_t *)io->y)[at] =
                io->y_dtype == QC_DTYPE_F16 ? qc_f16_from_f32(sum) : qc_bf16_from_f32(sum);
    }
}

static void work(qc_cpu_matmul *h, unsigned index)
{
    const product *p = &h->job;
    for (;;) {
        const uint64_t first = atomic_fetch_add(&h->next, p->chunk);
        if (first >= p->w->rows)
            return;
        const uint64_t count = qc_min_u64(p->chunk, p->w->rows - first);
        if (!p->fast) {
            qc_matmul_cpu_quantized(h->ops, p->w, first, count, p->io,
                                    (unsigned char *)h->scratch + index * h->scratch_bytes);
            continue;
        }
        for (uint64_t r = 0; r < count; r += QC_GEMV_BATCH) {
            const unsigned batch = (unsigned)qc_min_u64(count - r, QC_GEMV_BATCH);
            float sums[QC_GEMV_BATCH * QC_GEMV_ROWS];
            h->gemv->rows(&p->gemv, first + r, batch, sums);
            for (unsigned k = 0; k < batch; k++)
                store_rows(p, first + r + k, sums + k * p->gemv.m);
        }
    }
}

static void *serve(void *arg)
{
    const seat *s = arg;
    qc_cpu_matmul *h = s->h;
    unsigned seen = 0;
    for (;;) {
        for (unsigned i = 0; i < SPINS && atomic_load(&h->turn) == seen; i++)
            relax();
        if (atomic_load(&h->turn) == seen) {
            pthread_mutex_lock(&h->lock);
            while (atomic_load(&h->turn) == seen)
                pthread_cond_wait(&h->begun, &h->lock);
            pthread_mutex_unlock(&h->lock);
        }
        seen = atomic_load(&h->turn);
        if (atomic_load(&h->closing))
            return NULL;
        work(h, s->index);
        if (atomic_fetch_sub(&h->working, 1) == 1) {
            pthread_mutex_lock(&h->lock);
            pthread_cond_signal(&h->ended);
            pthread_mutex_unlock(&h->lock);
        }
    }
}

static void begin_turn(qc_cpu_matmul *h)
{
    pthread_mutex_lock(&h->lock);
    atomic_store(&h->working, h->started);
    atomic_fetch_add(&h->turn, 1);
    pthread_cond_broadcast(&h->begun);
    pthread_mutex_unlock(&h->lock);
}

/* Every thread takes part in h->job; returns when all are through. */
static void run_job(qc_cpu_matmul *h)
{
    atomic_store(&h->next, 0);
    if (h->started > 0)
        begin_turn(h);
    work(h, 0);
    for (unsigned i = 0; i < SPINS && atomic_load(&h->working) > 0; i++)
        relax();
    if (atomic_load(&h->working) == 0)
        return;
    pthread_mutex_lock(&h->lock);
    while (atomic_load(&h->working) > 0)
        pthread_cond_wait(&h->ended, &h->lock);
    pthread_mutex_unlock(&h->lock);
}

static qc_status start_threads(qc_cpu_matmul *h, qc_error *err)
{
    QC_TRY(qc_calloc(&h->ids, h->threads, sizeof *h->ids, err));
    QC_TRY(qc_calloc(&h->seats, h->threads, sizeof *h->seats, err));
    for (unsigned i = 1; i < h->threads; i++) {
        char what[64];
        h->seats[i] = (seat){h, i};
        (void)snprintf(what, sizeof what, "thread %u of %u", i + 1, h->threads);
        QC_TRY(qc_thread_start(&h->ids[i], serve, &h->seats[i], what, err));
        h->started++;
    }
    return QC_OK;
}

qc_status qc_cpu_matmul_create(qc_cpu_matmul **out, unsigned threads, qc_error *err)
{
    qc_isa isa = QC_ISA_SCALAR;
    qc_cpu_matmul *h = NULL;
    if (!out)
        QC_FAIL(err, QC_ERR_USAGE, "qc_cpu_matmul_create: out is NULL");
    *out = NULL;
    QC_TRY(qc_threads_wanted(&threads, err));
    QC_TRY(qc_isa_select(&isa, err));
    QC_TRY(qc_calloc(&h, 1, sizeof *h, err));
    h->ops = qc_matmul_ops_for(isa);
    h->gemv = qc_gemv_ops_for(isa);
    h->threads = threads;
    if (pthread_mutex_init(&h->calls, NULL) != 0 || pthread_mutex_init(&h->lock, NULL) != 0 ||
        pthread_cond_init(&h->begun, NULL) != 0 || pthread_cond_init(&h->ended, NULL) != 0) {
        qc_free(h);
        QC_FAIL(err, QC_ERR_NOMEM, "a lock could not be made");
    }
    qc_status st = start_threads(h, err);
    if (st == QC_OK)
        *out = h;
    else
        qc_cpu_matmul_destroy(h);
    return st;
}

void qc_cpu_matmul_destroy(qc_cpu_matmul *h)
{
    if (!h)
        return;
    atomic_store(&h->closing, 1);
    begin_turn(h);
    for (unsigned i = 1; i <= h->started; i++)
        pthread_join(h->ids[i], NULL);
    pthread_cond_destroy(&h->ended);
    pthread_cond_destroy(&h->begun);
    pthread_mutex_destroy(&h->lock);
    pthread_mutex_destroy(&h->calls);
    qc_free(h->packed);
    qc_free(h->scratch);
    qc_free(h->seats);
    qc_free(h->ids);
    qc_free(h);
}

unsigned qc_cpu_matmul_threads(const qc_cpu_matmul *h)
{
    return h ? h->threads : 0;
}

/* ---- The integer kernels -------------------------------------------------------------------- */

int qc_cpu_matmul_is_fast(const qc_weights *w)
{
    const qc_form *f = w ? &w->form : NULL;
    return f && f->cols > 0 && f->cols % QC_GEMV_GROUP == 0 &&
           (f->block_elems == 0 || f->cols % f->block_elems == 0);
}

static unsigned log2_of(uint64_t power)
{
    unsigned n = 0;
    while (power >> (n + 1) > 0)
        n++;
    return n;
}

/* The values of codes of 4 bits as integers of 16. Returns what one unit of them is worth. */
static float make_table(qc_gemv *g)
{
    const qc_form *f = &g->w->form;
    float values[16], most = 0.0f;
    for (int c = 0; c < 16; c++) {
        values[c] = f->code_map ? f->code_map[c] : qc_form_unit(f->ops, c);
        most = fmaxf(most, fabsf(values[c]));
    }
    for (int c = 0; c < 16; c++) {
        const long t = most > 0.0f ? lrintf(values[c] / most * QC_GEMV_T_MOST) : 0;
        g->low[c] = (unsigned char)(t & 0xff);
        g->high[c] = (unsigned char)(t >> 8 & 0xff);
    }
    return most / QC_GEMV_T_MOST;
}

static float describe(qc_gemv *g, const qc_weights *w)
{
    const qc_form *f = &w->form;
    *g = (qc_gemv){.w = w, .groups = f->cols / QC_GEMV_GROUP, .shift = 63};
    if (f->block_elems > 0) {
        g->halves = f->block_elems < QC_GEMV_GROUP;
        g->shift = g->halves ? 0 : log2_of(f->block_elems / QC_GEMV_GROUP);
    }
    if (f->nested)
        g->nested_shift = log2_of(w->nested_block);
    if (f->ops->bits == 4)
        return make_table(g);
    g->zero = (unsigned char)f->ops->zero;
    return f->ops->step;
}

/* The elements of a group of x, from element i on. */
static void read_group(const qc_matmul_cpu_io *io, uint64_t i, float *out)
{
    const uint16_t *half = (const uint16_t *)io->x + i;
    if (io->x_dtype == QC_DTYPE_F32)
        memcpy(out, (const float *)io->x + i, QC_GEMV_GROUP * sizeof *out);
    else if (io->x_dtype == QC_DTYPE_F16)
        for (unsigned e = 0; e < QC_GEMV_GROUP; e++)
            out[e] = qc_f32_from_f16(half[e]);
    else
        for (unsigned e = 0; e < QC_GEMV_GROUP; e++)
            out[e] = qc_f32_from_bf16(half[e]);
}

/* From elements in order to the order of the kernel for codes of 4 bits. first: of a byte, which
 * of its elements is in the upper half. */
static void order_group(const int16_t *q, unsigned first, int16_t *out)
{
    for (unsigned v = 0; v < 4; v++)
        for (unsigned half = 0; half < 2; half++) {
            const int16_t *from = q + 16 * (v % 2) + 32 * half + ((v >= 2) ^ first);
            for (unsigned p = 0; p < 8; p++)
                out[16 * v + 8 * half + p] = from[2 * p];
        }
}

/* Returns the scale. */
static float pack_group(const qc_form *f, const float *x, float unit, int16_t *out)
{
    int16_t q[QC_GEMV_GROUP], *to = f->ops->bits == 4 ? q : out;
    int32_t largest = 0; /* bits of |x|, among which infinity and NaN are the largest */
    for (unsigned i = 0; i < QC_GEMV_GROUP; i++) {
        const int32_t bits = (int32_t)(qc_f32_bits(x[i]) & 0x7fffffffu);
        largest = bits > largest ? bits : largest;
    }
    const float most = qc_f32_of_bits((uint32_t)largest);
    const int finite = (uint32_t)largest < QC_F32_INF;
    /* 16383 / most is finite where most / 16383 is normal; below that x is as good as 0. */
    const float inverse = finite && most >= 0x1p-110f ? (float)QC_GEMV_X_MOST / most : 0.0f;
    if (inverse > 0.0f)
        for (unsigned i = 0; i < QC_GEMV_GROUP; i++)
            to[i] = (int16_t)((int32_t)qc_f32_bits(x[i] * inverse + 0x1.8p23f) - 0x4b400000);
    else
        memset(to, 0, QC_GEMV_GROUP * sizeof *to);
    if (to == q)
        order_group(q, f->ops->low_first != 0, out);
    return finite ? most / (float)QC_GEMV_X_MOST * unit : (float)NAN;
}

/* Lays out the next rows of x, at most QC_GEMV_ROWS, with rows of zeros up to a count that the
 * kernels have. */
static void pack(qc_cpu_matmul *h, float unit)
{
    product *p = &h->job;
    qc_gemv *g = &p->gemv;
    const qc_matmul_cpu_io *io = p->io;
    p->x_rows = (unsigned)qc_min_u64(io->m - p->first_x, QC_GEMV_ROWS);
    g->m = p->x_rows > 4 ? 8 : p->x_rows > 2 ? 4 : p->x_rows;
    int16_t *x = h->packed;
    float *scales = (float *)(void *)(x + g->m * g->groups * QC_GEMV_GROUP);
    g->x = x;
    g->x_scales = scales;
    for (uint64_t i = 0; i < g->groups; i++)
        for (unsigned m = 0; m < g->m; m++, x += QC_GEMV_GROUP) {
            float room[QC_GEMV_GROUP] = {0.0f};
            if (m < p->x_rows)
                read_group(io, (p->first_x + m) * io->ldx + i * QC_GEMV_GROUP, room);
            *scales++ = pack_group(&p->w->form, room, unit, x);
        }
}

/* ---- A product ------------------------------------------------------------------------------ */

static qc_status grow(void **memory, size_t *have, size_t each, unsigned count, qc_error *err)
{
    if (*have >= each)
        return QC_OK;
    qc_free(*memory);
    *memory = NULL;
    *have = 0;
    QC_TRY(qc_malloc_aligned(memory, ALIGNMENT, (size_t)qc_sat_mul(each, count), err));
    *have = each;
    return QC_OK;
}

static int is_float(qc_dtype t)
{
    return t == QC_DTYPE_F32 || t == QC_DTYPE_F16 || t == QC_DTYPE_BF16;
}

static const char *name_of(qc_dtype t)
{
    return qc_dtype_name(t) ? qc_dtype_name(t) : "an unknown dtype";
}

static qc_status check(const qc_cpu_matmul *h, const qc_weights *w, const qc_matmul_cpu_io *io,
                       qc_error *err)
{
    const char *none = !h             ? "the handle"
                       : !w           ? "the weight"
                       : !w->form.ops ? "the weight's form.ops"
                       : !io          ? "io"
                                      : NULL;
    if (none)
        QC_FAIL(err, QC_ERR_USAGE, "qc_cpu_matmul_run: %s is NULL", none);
    if (!is_float(io->x_dtype) || !is_float(io->y_dtype))
        QC_FAIL(err, QC_ERR_USAGE, "a product takes F32, F16 or BF16, not %s and %s",
                name_of(io->x_dtype), name_of(io->y_dtype));
    if (io->ldx < w->form.cols || io->ldy < w->rows)
        QC_FAIL(err, QC_ERR_USAGE,
                "rows of x and y are %" PRIu64 " and %" PRIu64
                " elements apart, a weight of %" PRIu64 " rows and %" PRIu64
                " columns needs %" PRIu64 " and %" PRIu64,
                io->ldx, io->ldy, w->rows, w->form.cols, w->form.cols, w->rows);
    if (io->m > 0 && w->rows > 0 && (!io->y || (!io->x && w->form.cols > 0)))
        QC_FAIL(err, QC_ERR_USAGE, "qc_cpu_matmul_run: %s is NULL", io->y ? "x" : "y");
    return QC_OK;
}

static qc_status run_fast(qc_cpu_matmul *h, qc_error *err)
{
    product *p = &h->job;
    const uint64_t cols = p->w->form.cols;
    const float unit = describe(&p->gemv, p->w);
    const uint64_t bytes =
        qc_sat_mul(QC_GEMV_ROWS, cols * sizeof(int16_t) + p->gemv.groups * sizeof(float));
    QC_TRY(grow(&h->packed, &h->packed_bytes, (size_t)bytes, 1, err));
    p->chunk = qc_max_u64(qc_ceil_div_u64(p->w->rows, (uint64_t)h->threads * CHUNKS), 16);
    for (p->first_x = 0; p->first_x < p->io->m; p->first_x += QC_GEMV_ROWS) {
        pack(h, unit);
        run_job(h);
    }
    return QC_OK;
}

static qc_status run_panels(qc_cpu_matmul *h, qc_error *err)
{
    product *p = &h->job;
    const uint64_t bytes = qc_matmul_cpu_scratch_bytes(p->io->m, p->w->form.cols);
    const uint64_t aligned = qc_align_u64(bytes, ALIGNMENT);
    QC_TRY(grow(&h->scratch, &h->scratch_bytes, (size_t)aligned, h->threads, err));
    p->chunk = qc_max_u64(qc_ceil_div_u64(p->w->rows, (uint64_t)h->threads * 2), 16);
    run_job(h);
    return QC_OK;
}

qc_status qc_cpu_matmul_run(qc_cpu_matmul *h, const qc_weights *w, const qc_matmul_cpu_io *io,
                            qc_error *err)
{
    QC_TRY(check(h, w, io, err));
    if (io->m == 0 || w->rows == 0)
        return QC_OK;
    pthread_mutex_lock(&h->calls);
    h->job = (product){.w = w, .io = io};
    h->job.fast = io->m <= QC_CPU_MATMUL_ROWS && qc_cpu_matmul_is_fast(w);
    const qc_status st = h->job.fast ? run_fast(h, err) : run_panels(h, err);
    pthread_mutex_unlock(&h->calls);
    return st;
}
