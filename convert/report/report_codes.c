/* One thread reads a piece of codes (the frame of a compressed file, so that each is decoded once)
 * and counts its bytes. Counts are added at the end, so nothing depends on the order. Codes of
 * 4 bits are counted by bytes as well and taken apart later, so that one look counts two codes. */
#include "convert/report/report_codes.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "convert/term/console.h"
#include "convert/term/progress.h"
#include "quant/quant_ops.h"

#include <math.h>
#include <string.h>

#define PIECE_BYTES                                                                                \
    ((uint64_t)8 << 20) /* what a thread takes at a time where there are no frames */
#define STEP_BYTES ((uint64_t)512 << 10) /* read at a time, so that it stays in the cache */
#define LANES      4u /* tables that take turns, so that equal bytes in a row do not wait */

void qc_report_count_bytes(const unsigned char *bytes, size_t len, uint64_t counts[256])
{
    uint32_t lanes[LANES][256];
    memset(lanes, 0, sizeof lanes);
    while (len > 0) {
        size_t n = len < ((size_t)1 << 30) ? len : (size_t)1 << 30, i = 0;
        for (; i + LANES <= n; i += LANES)
            for (unsigned k = 0; k < LANES; k++)
                lanes[k][bytes[i + k]]++;
        for (; i < n; i++)
            lanes[0][bytes[i]]++;
        for (unsigned c = 0; c < 256; c++)
            for (unsigned k = 0; k < LANES; k++) {
                counts[c] += lanes[k][c];
                lanes[k][c] = 0;
            }
        bytes += n;
        len -= n;
    }
}

void qc_report_fold_nibbles(const uint64_t bytes[256], qc_report_codes *codes)
{
    for (unsigned b = 0; b < 256; b++) {
        codes->counts[b >> 4] += bytes[b];
        codes->counts[b & 15] += bytes[b];
        codes->total += 2 * bytes[b];
    }
}

/* ---- what normal values would give ----------------------------------------------------------- */

#define MOST      12.0 /* in standard deviations; no normal value is larger */
#define STEP      0.01
#define SQRT_HALF 0.70710678118654752

/* Computes the shares of codes between rising thresholds of x / scale. There are `codes` codes and
 * codes - 1 thresholds. */
static void expect(uint64_t n, const double *thresholds, unsigned codes, double *shares)
{
    double rest = (double)(n - 1), sum = 0.0;
    memset(shares, 0, codes * sizeof *shares);
    for (double m = STEP / 2; n > 1 && m < MOST; m += STEP) {
        double inside = erf(m * SQRT_HALF);
        double density = exp(rest * log(inside) - m * m / 2);
        if (density < 1e-18)
            continue;
        double before = -inside / 2;
        for (unsigned c = 0; c < codes; c++) {
            double after = c + 1 < codes ? erf(thresholds[c] * m * SQRT_HALF) / 2 : inside / 2;
            shares[c] += density * (after - before) / inside;
            before = after;
        }
        sum += density;
    }
    double weight = sum > 0 ? rest / (double)n / sum : 0.0;
    for (unsigned c = 0; c < codes; c++)
        shares[c] *= weight;
    shares[0] += 0.5 / (double)n;
    shares[codes - 1] += 0.5 / (double)n;
}

void qc_report_expect(const qc_form_ops *form, uint64_t n, double shares[256])
{
    const int is_table = qc_form_is_table(form);
    const unsigned codes = is_table ? 16u : (unsigned)(form->highest - form->lowest) + 1u;
    double thresholds[255], rising[256];
    for (unsigned i = 0; i + 1 < codes; i++)
        thresholds[i] = is_table ? (double)qc_nf4_threshold[i]
                                 : (form->lowest + (double)i + 0.5) * 2.0 / (double)(codes - 1);
    expect(n, thresholds, codes, rising);
    memset(shares, 0, 256 * sizeof *shares);
    for (unsigned i = 0; i < codes; i++)
        shares[form->bits == 4 ? i : (unsigned)(form->lowest + (int)i) & 255u] = rising[i];
}

double qc_report_entropy(const qc_report_codes *c)
{
    double sum = 0.0;
    for (unsigned i = 0; i < 256; i++) {
        double p = c->total ? (double)c->counts[i] / (double)c->total : 0.0;
        sum -= p > 0 ? p * log2(p) : 0.0;
    }
    return sum > 0 ? sum : 0.0;
}

double qc_report_distance(const qc_report_codes *c, const double expected[256])
{
    double sum = 0.0;
    for (unsigned i = 0; i < 256; i++)
        sum += fabs((double)c->counts[i] / (double)(c->total ? c->total : 1) - expected[i]);
    return sum / 2;
}

int qc_report_bin_first(unsigned bin)
{
    return (int)bin * 15 - 127;
}

double qc_report_bin(const double shares[256], unsigned bin)
{
    double sum = bin == 0 ? shares[128] : 0.0;
    for (int i = 0; i < 15; i++)
        sum += shares[(qc_report_bin_first(bin) + i) & 255];
    return sum;
}

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct {
    const qc_checkpoint *model;
    qc_report *r;
    uint64_t *first;     /* [weight_count + 1] number of each weight's first piece */
    uint64_t *counts;    /* [kind_count, 256] counts of bytes, under lock */
    unsigned char *last; /* [weight_count] the last byte of each weight */
    atomic_uint_fast64_t next;
    pthread_mutex_t lock; /* for counts; a leaf lock */
    qc_progress *progress;
} counting;

/* Returns the weight that a piece belongs to. */
static uint32_t weight_of(const counting *c, uint64_t piece)
{
    uint32_t low = 0, high = c->r->weight_count;
    while (high - low > 1) {
        uint32_t mid = low + (high - low) / 2;
        if (c->first[mid] <= piece)
            low = mid;
        else
            high = mid;
    }
    return low;
}

static uint64_t piece_bytes(const qc_report *r, const qc_report_weight *w)
{
    const qc_manifest_tensor *written = r->facts.tensors[w->tensor].written;
    return written && written->piece_bytes ? written->piece_bytes : PIECE_BYTES;
}

static qc_status count_piece(counting *c, uint64_t piece, qc_st_cursor *cursor,
                             unsigned char *buffer, qc_error *err)
{
    uint32_t w = weight_of(c, piece);
    const qc_report_weight *weight = &c->r->weights[w];
    const qc_checkpoint_tensor *t = &c->model->tensors[weight->tensor];
    uint64_t size = piece_bytes(c->r, weight), at = (piece - c->first[w]) * size, n = 0;
    uint64_t end = t->bytes - at < size ? t->bytes : at + size;
    uint64_t counts[256] = {0};
    for (; at < end; at += n) {
        n = end - at < STEP_BYTES ? end - at : STEP_BYTES;
        QC_TRY(qc_checkpoint_read(c->model, cursor, t, at, buffer, (size_t)n, err));
        qc_report_count_bytes(buffer, (size_t)n, counts);
        qc_progress_add(c->progress, n);
    }
    pthread_mutex_lock(&c->lock);
    for (unsigned i = 0; i < 256; i++)
        c->counts[(uint64_t)weight->kind * 256 + i] += counts[i];
    if (end == t->bytes && n > 0)
        c->last[w] = buffer[n - 1];
    pthread_mutex_unlock(&c->lock);
    return QC_OK;
}

static qc_status work(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    counting *c = ctx;
    qc_st_cursor *cursor = NULL;
    void *buffer = NULL;
    (void)index;
    qc_status st = qc_malloc(&buffer, STEP_BYTES, err);
    if (st == QC_OK)
        st = qc_st_cursor_create(&cursor, err);
    while (st == QC_OK) {
        uint64_t piece = atomic_fetch_add(&c->next, 1);
        if (piece >= c->first[c->r->weight_count])
            break;
        st = qc_check_stopped(team, err);
        if (st == QC_OK)
            st = count_piece(c, piece, cursor, buffer, err);
    }
    qc_st_cursor_destroy(cursor);
    qc_free(buffer);
    return st;
}

/* Turns the counts of bytes into counts of codes, for kinds and for forms. */
static void fold(const counting *c)
{
    qc_report *r = c->r;
    for (uint32_t k = 0; k < r->kind_count; k++) {
        qc_report_codes *codes = &r->kinds[k].codes;
        const uint64_t *bytes = c->counts + (uint64_t)k * 256;
        if (qc_report_is_4_bit(&r->forms[r->kinds[k].form])) {
            qc_report_fold_nibbles(bytes, codes);
            continue;
        }
        const int zero = r->forms[r->kinds[k].form].ops->zero;
        for (unsigned i = 0; i < 256; i++) {
            codes->counts[(i - (unsigned)zero) & 255u] = bytes[i];
            codes->total += bytes[i];
        }
    }
    /* With an odd number of weights the last low nibble belongs to none. */
    for (uint32_t i = 0; i < r->weight_count; i++) {
        const qc_report_weight *w = &r->weights[i];
        if (!qc_report_is_4_bit(&r->forms[w->form]) || w->elems % 2 == 0)
            continue;
        r->kinds[w->kind].codes.counts[c->last[i] & 15]--;
        r->kinds[w->kind].codes.total--;
    }
    for (uint32_t k = 0; k < r->kind_count; k++) {
        qc_report_codes *all = &r->forms[r->kinds[k].form].codes;
        for (unsigned i = 0; i < 256; i++)
            all->counts[i] += r->kinds[k].codes.counts[i];
        all->total += r->kinds[k].codes.total;
    }
}

/* Returns the number of values in w that share a scale. */
static uint64_t scale_elems(const qc_report_weight *w)
{
    const qc_stored_weight *s = w->stored;
    uint64_t cols = s->ndim ? s->dims[s->ndim - 1] : 1;
    uint64_t n = qc_scheme_elems_per_scale(s->stored_as, cols, s->block_elems);
    n = n > w->elems ? w->elems : n;
    return n ? n : 1;
}

/* Sets what is expected of forms. With a scale per row the rows of a form differ in length, so each
 * weight counts by its elements. */
static void set_expected(qc_report *r)
{
    double shares[256];
    uint64_t last_n = 0;
    for (uint32_t f = 0; f < r->form_count; f++) {
        qc_report_form *form = &r->forms[f];
        if (strcmp(form->scheme, "fp4") == 0 || form->elems == 0)
            continue;
        last_n = 0;
        memset(shares, 0, sizeof shares);
        for (uint32_t i = 0; i < r->weight_count; i++) {
            if (r->weights[i].form != f)
                continue;
            uint64_t n = scale_elems(&r->weights[i]);
            if (n != last_n)
                qc_report_expect(form->ops, n, shares);
            last_n = n;
            for (unsigned c = 0; c < 256; c++)
                form->expected[c] += shares[c] * (double)r->weights[i].elems / (double)form->elems;
        }
        form->has_expected = 1;
    }
}

qc_status qc_report_count_codes(qc_report *r, qc_error *err)
{
    counting c = {.model = r->facts.model, .r = r};
    uint64_t total = 0;
    QC_TRY(qc_arena_array(r->call->arena, &c.first, (size_t)r->weight_count + 1, err));
    QC_TRY(qc_arena_array(r->call->arena, &c.counts, (size_t)r->kind_count * 256 + 1, err));
    QC_TRY(qc_arena_alloc(r->call->arena, &c.last, (size_t)r->weight_count + 1, 1, err));
    for (uint32_t i = 0; i < r->weight_count; i++) {
        uint64_t bytes = c.model->tensors[r->weights[i].tensor].bytes;
        c.first[i + 1] = c.first[i] + qc_ceil_div_u64(bytes, piece_bytes(r, &r->weights[i]));
        total += bytes;
    }
    atomic_init(&c.next, 0);
    if (pthread_mutex_init(&c.lock, NULL) != 0)
        QC_FAIL(err, QC_ERR_NOMEM, "no lock for the counts could be made");
    uint64_t pieces = c.first[r->weight_count];
    unsigned threads = r->call->threads ? r->call->threads : qc_cpu_count();
    threads = pieces < threads ? (unsigned)pieces : threads;
    qc_status st = qc_progress_create(&c.progress, r->call, "counting codes", total, err);
    if (st == QC_OK)
        st = qc_team_run(threads ? threads : 1, work, &c, err);
    qc_progress_destroy(c.progress);
    pthread_mutex_destroy(&c.lock);
    QC_TRY(st);
    fold(&c);
    set_expected(r);
    return QC_OK;
}
