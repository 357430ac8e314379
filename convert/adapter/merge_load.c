/* The matrices of adapters in memory: those of the tensors that somebody reads, and of the last
 * few. */
#include "convert/adapter/adapters_internal.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* Matrices that nobody uses just now are kept up to this size, and those of the last reads anyway,
 * because whoever reads a tensor in steps comes back for them. */
#define KEPT_BYTES (64u << 20)
#define KEPT_USES  64u
#define NORM_ELEMS (64u << 10)

void qc_merge_free(qc_merge *m)
{
    for (qc_merge_step *s = m->steps; s; s = s->next) {
        qc_free(s->data.left);
        qc_free(s->data.right);
        qc_free(s->data.factor);
        s->data = (qc_step_data){0};
    }
}

/* ---- loading ---- */

/* Reads a tensor of the adapter as floats, all of them finite. */
static qc_status read_floats(const qc_merge *m, const qc_adapter *a, uint32_t tensor,
                             qc_st_cursor *cur, float **out, qc_error *err)
{
    const qc_checkpoint_tensor *t = &a->weights->tensors[tensor];
    uint64_t n = t->bytes / (qc_dtype_bits(t->dtype) / 8), overflow = 0;
    size_t count = 0;
    void *raw = NULL;
    if (qc_u64_to_size(n, &count))
        QC_FAIL(err, QC_ERR_NOMEM, "%s: tensor '%s' is too large", a->path, t->name);
    QC_TRY(qc_realloc_array(out, count, sizeof **out, err));
    QC_TRY(qc_malloc(&raw, (size_t)t->bytes, err));
    qc_status st = qc_checkpoint_read(a->weights, cur, t, 0, raw, (size_t)t->bytes, err);
    if (st == QC_OK)
        st = qc_checkpoint_check_unchanged(a->weights, t->file, err);
    if (st == QC_OK)
        m->set->ops->cast(raw, t->dtype, n, *out, QC_DTYPE_F32, &overflow);
    qc_free(raw);
    for (uint64_t i = 0; st == QC_OK && i < n; i++) {
        if (!isfinite((*out)[i]))
            st =
                QC_ERROR(err, QC_ERR_NONFINITE,
                         "%s: tensor '%s': element %" PRIu64 " is not finite", a->path, t->name, i);
    }
    return st;
}

/* Reads the matrix of the columns, [rank, columns] or turned, and packs it. */
static qc_status load_right(const qc_merge *m, qc_merge_step *s, qc_st_cursor *cur, qc_error *err)
{
    uint64_t rank = s->module->rank;
    float *from = NULL;
    qc_status st =
        read_floats(m, s->adapter, s->turned ? s->module->b : s->module->a, cur, &from, err);
    if (st == QC_OK)
        st = qc_realloc_array(&s->data.right, (size_t)qc_low_rank_packed(rank, m->cols),
                              sizeof *s->data.right, err);
    if (st == QC_OK)
        qc_low_rank_pack(s->data.right, from, s->turned ? 1 : m->cols, s->turned ? rank : 1, rank,
                         m->cols);
    qc_free(from);
    return st;
}

/* Reads the matrix of the rows, [rows, rank] or turned; of a bias what is added to it. */
static qc_status load_left(const qc_merge *m, qc_merge_step *s, qc_st_cursor *cur, qc_error *err)
{
    const qc_adapter_module *mod = s->module;
    int bias = s->kind == QC_STEP_BIAS;
    uint64_t rows = bias ? m->cols : m->rows, rank = bias ? 1 : mod->rank;
    float *from = NULL;
    qc_status st = read_floats(m, s->adapter,
                               bias        ? mod->bias
                               : s->turned ? mod->a
                                           : mod->b,
                               cur, &from, err);
    if (st == QC_OK)
        st = qc_realloc_array(&s->data.left, (size_t)(rows * rank), sizeof *s->data.left, err);
    for (uint64_t r = 0; st == QC_OK && r < rows; r++) {
        for (uint64_t k = 0; k < rank; k++)
            s->data.left[r * rank + k] = (double)from[s->turned ? k * rows + r : r * rank + k];
    }
    qc_free(from);
    return st;
}

typedef struct {
    const qc_merge *m;
    const qc_merge_step *s;
} squares;

static qc_status add_squares(void *ctx, qc_merge_tile *t, qc_error *err)
{
    const squares *q = ctx;
    double *factor = q->s->data.factor;
    (void)err;
    qc_merge_add_product(q->m, q->s, t);
    for (uint32_t r = 0; r < t->rows; r++) {
        for (uint32_t i = 0; i < t->n; i++)
            factor[q->s->turned ? t->col + i : t->row + r] += t->values[r][i] * t->values[r][i];
    }
    return QC_OK;
}

/* Makes the squares of the lengths that DoRA divides by: of each output, over its inputs, of the
 * model's own weight plus the product. Like peft, this takes no other adapter into account. */
static qc_status sum_squares(const qc_merge *m, const qc_merge_step *s, const qc_checkpoint *c,
                             qc_st_cursor *cur, qc_error *err)
{
    uint64_t all = m->rows * m->cols, step = qc_max_u64(NORM_ELEMS, QC_LOW_RANK_ROWS * m->cols);
    squares q = {m, s};
    float *room = NULL;
    qc_status st = QC_OK;
    step -= step % m->cols;
    QC_TRY(qc_realloc_array(&room, (size_t)step, sizeof *room, err));
    for (uint64_t first = 0; st == QC_OK && first < all; first += step) {
        uint64_t n = qc_min_u64(all - first, step);
        st = qc_merge_read_base(m, c, cur, first, n, room, err);
        if (st == QC_OK)
            st = qc_merge_each_tile(m, first, n, room, add_squares, &q, err);
    }
    qc_free(room);
    return st;
}

static qc_status load_factor(const qc_merge *m, qc_merge_step *s, const qc_checkpoint *c,
                             qc_st_cursor *cur, qc_error *err)
{
    uint64_t outputs = s->turned ? m->cols : m->rows;
    float *magnitude = NULL;
    QC_TRY(qc_calloc(&s->data.factor, (size_t)outputs, sizeof *s->data.factor, err));
    qc_status st = read_floats(m, s->adapter, s->module->magnitude, cur, &magnitude, err);
    if (st == QC_OK)
        st = sum_squares(m, s, c, cur, err);
    for (uint64_t i = 0; st == QC_OK && i < outputs; i++)
        s->data.factor[i] = (double)magnitude[i] / sqrt(s->data.factor[i]);
    qc_free(magnitude);
    return st;
}

static qc_status load(qc_merge *m, const qc_checkpoint *c, qc_st_cursor *cur, qc_error *err)
{
    qc_status st = QC_OK;
    for (qc_merge_step *s = m->steps; s && st == QC_OK; s = s->next) {
        if (s->kind == QC_STEP_WHOLE)
            continue;
        st = load_left(m, s, cur, err);
        if (st == QC_OK && s->kind == QC_STEP_LOW_RANK)
            st = load_right(m, s, cur, err);
        if (st == QC_OK && s->kind == QC_STEP_LOW_RANK &&
            s->module->magnitude != QC_ADAPTER_NO_TENSOR)
            st = load_factor(m, s, c, cur, err);
    }
    if (st != QC_OK)
        qc_merge_free(m);
    return st;
}

/* ---- who has them ---- */

/* Frees what was used longest ago, as long as more is kept than shall be. The caller holds the
 * lock. */
static void make_room(qc_merge_set *set)
{
    while (set->loaded_bytes > KEPT_BYTES) {
        qc_merge *oldest = NULL;
        for (size_t i = 0; i < set->merge_count; i++) {
            qc_merge *m = set->merges[i];
            if (m->state == QC_MERGE_READY && m->users == 0 &&
                m->last_use + KEPT_USES < set->uses && (!oldest || m->last_use < oldest->last_use))
                oldest = m;
        }
        if (!oldest)
            return;
        qc_merge_free(oldest);
        oldest->state = QC_MERGE_EMPTY;
        set->loaded_bytes -= oldest->bytes;
    }
}

qc_status qc_merge_acquire(qc_merge *m, const qc_checkpoint *c, qc_st_cursor *cur, qc_error *err)
{
    qc_merge_set *set = m->set;
    qc_status st = QC_OK;
    pthread_mutex_lock(&set->lock);
    while (m->state == QC_MERGE_LOADING)
        pthread_cond_wait(&set->ready, &set->lock);
    if (m->state == QC_MERGE_EMPTY) {
        m->state = QC_MERGE_LOADING;
        pthread_mutex_unlock(&set->lock);
        st = load(m, c, cur, err);
        pthread_mutex_lock(&set->lock);
        m->state = st == QC_OK ? QC_MERGE_READY : QC_MERGE_EMPTY;
        m->bytes = 0;
        for (const qc_merge_step *s = m->steps; s; s = s->next)
            m->bytes += (m->rows + m->cols) *
                        ((s->kind == QC_STEP_LOW_RANK ? s->module->rank : 0) + 1) * sizeof(double);
        set->loaded_bytes += st == QC_OK ? m->bytes : 0;
        pthread_cond_broadcast(&set->ready);
    }
    if (st == QC_OK) {
        m->users++;
        m->last_use = ++set->uses;
        make_room(set);
    }
    pthread_mutex_unlock(&set->lock);
    return st;
}

void qc_merge_release(qc_merge *m)
{
    pthread_mutex_lock(&m->set->lock);
    m->users--;
    make_room(m->set);
    pthread_mutex_unlock(&m->set->lock);
}
