#include "convert/calibrate/calibrate_moments.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "base/workers.h"
#include "convert/calibrate/calibrate_engine.h"
#include "convert/term/console.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define WEIGHT ".weight"

/* ---- names ---- */

static int compare_names(const void *a, const void *b)
{
    const qc_moments_name *x = a, *y = b;
    return strcmp(x->module, y->module);
}

static qc_status add_name(qc_moments *m, uint32_t number, qc_error *err)
{
    const qc_plan *plan = m->k->plan;
    qc_moments_name *n = &m->names[m->name_count];
    uint32_t matrix;
    const char *name = plan->jobs[qc_calibrated_job(plan, number, &matrix)].name;
    char place[QC_CALIBRATED_PLACE_BYTES];
    n->number = number;
    if (number < plan->job_count && !qc_ends_with(name, WEIGHT))
        return QC_OK;
    if (number < plan->job_count)
        QC_TRY(
            qc_arena_strndup(&m->k->arena, &n->module, name, strlen(name) - strlen(WEIGHT), err));
    else
        QC_TRY(qc_arena_printf(&m->k->arena, &n->module, err, "%s[%s]", name,
                               qc_calibrated_place(place, plan, number)));
    m->name_count++;
    return QC_OK;
}

qc_status qc_moments_begin(qc_moments *m, qc_calibrator *k, qc_error *err)
{
    const uint32_t numbers = qc_calibrated_numbers(k->plan);
    *m = (qc_moments){.k = k};
    QC_TRY(qc_arena_array(&k->arena, &m->names, numbers, err));
    QC_TRY(qc_arena_array(&k->arena, &m->known, numbers, err));
    for (uint32_t i = 0; i < numbers; i++) {
        QC_TRY(add_name(m, i, err));
        if (k->store && qc_calibrated_matrices(k->plan, i) == 0 &&
            qc_calibrated_takes(k->plan, i) && qc_calibrated_has(k->store, i))
            m->known[i] =
                QC_MOMENTS_SEEN | (qc_calibrated_is_searched(k->store, i) ? QC_MOMENTS_FEW : 0);
    }
    if (m->name_count > 0)
        qsort(m->names, m->name_count, sizeof *m->names, compare_names);
    return QC_OK;
}

/* Finds a weight by the name that its moments have; QC_NO_JOB: there is none. */
static uint32_t find_module(const qc_moments *m, const char *module)
{
    const qc_moments_name key = {.module = module}, *found = NULL;
    if (m->name_count > 0)
        found = bsearch(&key, m->names, m->name_count, sizeof key, compare_names);
    return found ? found->number : QC_NO_JOB;
}

/* ---- sorting ---- */

static int compare_pairs(const void *a, const void *b)
{
    const qc_moments_pair *x = a, *y = b;
    if (x->moments != y->moments)
        return x->moments < y->moments ? -1 : 1;
    return x->number < y->number ? -1 : x->number > y->number;
}

static int compare_numbers(const void *a, const void *b)
{
    const uint32_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

/* A file from another model is refused, also where some of its modules have the same names. */
static qc_status check_names(const qc_moments *m, qc_error *err)
{
    const uint32_t count = qc_hessians_count(m->h);
    uint32_t strangers = 0, first = 0;
    for (uint32_t i = count; i-- > 0;) {
        if (find_module(m, qc_hessians_name(m->h, i)) != QC_NO_JOB)
            continue;
        strangers++;
        first = i;
    }
    if (strangers > 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: %" PRIu32 " of %" PRIu32
                " modules belong to no weight of this model, '%s' among them: expected moments "
                "that were captured from it",
                m->path, strangers, count, qc_hessians_name(m->h, first));
    return QC_OK;
}

/* Finds the moments of a weight's outputs. */
static qc_status find_outputs(qc_moments *m, qc_moments_pair *p, qc_error *err)
{
    const qc_job j = qc_calibrated_weight(m->k->plan, p->number);
    qc_hessians_outputs *o = &p->outputs;
    char name[QC_CALIBRATED_NAME_BYTES];
    *o = qc_hessians_outputs_of(m->h, p->module);
    if (o->blocks > 0 &&
        (o->whole ? o->block != j.rows : o->blocks != qc_ceil_div_u64(j.rows, o->block)))
        QC_FAIL(err, QC_ERR_SHAPE,
                "%s: expected second moments of %" PRIu64 " outputs for '%s', found %" PRIu64
                " block%s of %" PRIu64,
                m->path, j.rows, qc_calibrated_name(name, m->k->plan, p->number), o->blocks,
                qc_plural(o->blocks), o->block);
    if (o->blocks > 0 && !qc_calibrate_few(qc_min_u64(o->block, j.rows), o->tokens)) {
        m->known[p->number] |= QC_MOMENTS_BOTH;
        return QC_OK;
    }
    m->known[p->number] |= o->blocks > 0 ? QC_MOMENTS_FEW_OUTPUTS : QC_MOMENTS_ALIKE;
    *o = (qc_hessians_outputs){0};
    return QC_OK;
}

/* Sorts the weight of module i of the file. */
static qc_status sort_module(qc_moments *m, uint32_t i, int two, qc_error *err)
{
    const qc_plan *plan = m->k->plan;
    qc_moments_pair p = {.number = find_module(m, qc_hessians_name(m->h, i)), .module = i};
    const qc_job j = qc_calibrated_weight(plan, p.number);
    char name[QC_CALIBRATED_NAME_BYTES];
    uint64_t n = 0, tokens = 0;
    p.moments = qc_hessians_moments(m->h, i, &n, &tokens);
    if (!qc_calibrated_takes(plan, p.number) || !qc_scheme_is_quantized(j.scheme)) {
        m->left[m->left_count++] = p.number;
        return QC_OK;
    }
    m->known[p.number] = QC_MOMENTS_SEEN | QC_MOMENTS_HERE;
    if (n != j.form.cols)
        QC_FAIL(err, QC_ERR_SHAPE,
                "%s: expected second moments of %" PRIu64 " inputs for '%s', found %" PRIu64,
                m->path, j.form.cols, qc_calibrated_name(name, plan, p.number), n);
    if (qc_calibrate_few(n, tokens)) {
        m->known[p.number] |= QC_MOMENTS_FEW;
        m->left[m->left_count++] = p.number;
        return QC_OK;
    }
    if (two)
        QC_TRY(find_outputs(m, &p, err));
    m->tokens = qc_max_u64(m->tokens, tokens);
    if (qc_calibrate_needs(m->k, p.number))
        m->pairs[m->count++] = p;
    return QC_OK;
}

/* A stack of which the file has moments is made as a whole: matrices without moments have had no
 * tokens. */
static void sort_stacks(qc_moments *m)
{
    const qc_plan *plan = m->k->plan;
    for (uint32_t job = 0; job < plan->job_count; job++) {
        const uint32_t count = qc_calibrated_matrices(plan, job);
        const uint32_t first = count > 0 ? plan->first_matrix[job] : 0;
        int here = 0;
        for (uint32_t i = 0; i < count; i++) {
            here |= m->known[first + i] & QC_MOMENTS_HERE;
            m->known[first + i] &= (unsigned char)~QC_MOMENTS_HERE;
        }
        for (uint32_t i = 0; here && i < count; i++) {
            if (!(m->known[first + i] & QC_MOMENTS_SEEN)) {
                m->known[first + i] = QC_MOMENTS_SEEN | QC_MOMENTS_FEW;
                m->left[m->left_count++] = first + i;
            }
        }
    }
    for (uint32_t i = 0; i < m->left_count; i++) {
        const uint32_t number = m->left[i];
        if (number >= plan->job_count && m->k->store && qc_calibrate_needs(m->k, number))
            m->searched[m->searched_count++] = number;
    }
    if (m->left_count > 0)
        qsort(m->left, m->left_count, sizeof *m->left, compare_numbers);
    if (m->searched_count > 0)
        qsort(m->searched, m->searched_count, sizeof *m->searched, compare_numbers);
}

qc_status qc_moments_open(qc_moments *m, const char *path, int two, qc_error *err)
{
    const uint32_t numbers = qc_calibrated_numbers(m->k->plan);
    qc_moments_close(m);
    m->path = path;
    QC_TRY(qc_hessians_open(&m->h, path, err));
    QC_TRY(check_names(m, err));
    const uint32_t modules = qc_hessians_count(m->h);
    QC_TRY(qc_calloc(&m->pairs, modules, sizeof *m->pairs, err));
    QC_TRY(qc_calloc(&m->left, (size_t)numbers + modules, sizeof *m->left, err));
    QC_TRY(qc_calloc(&m->searched, numbers, sizeof *m->searched, err));
    for (uint32_t i = 0; i < modules; i++)
        QC_TRY(sort_module(m, i, two, err));
    sort_stacks(m);
    if (m->count > 0)
        qsort(m->pairs, m->count, sizeof *m->pairs, compare_pairs);
    return QC_OK;
}

void qc_moments_close(qc_moments *m)
{
    qc_hessians_close(m->h);
    qc_free(m->pairs);
    qc_free(m->left);
    qc_free(m->searched);
    m->h = NULL;
    m->pairs = NULL;
    m->left = m->searched = NULL;
    m->count = m->left_count = m->searched_count = 0;
    m->tokens = 0;
}

/* ---- what lies ahead ---- */

static int cross_of(const qc_moments *m, uint32_t i)
{
    return qc_hessians_has_cross(m->h, m->pairs[i].moments);
}

static uint64_t outputs_bytes(const qc_hessians_outputs *o)
{
    return qc_sat_mul(qc_sat_mul(o->blocks, o->block), qc_sat_mul(o->block, sizeof(float)));
}

void qc_moments_ahead(const qc_moments *m, qc_calibrate_outlook *a)
{
    const qc_calibrator *k = m->k;
    *a = (qc_calibrate_outlook){.weights = m->count + m->searched_count,
                                .disk = k->costs ? 0 : qc_calibrated_bytes(k->plan, k->store)};
    for (uint32_t i = 0; i < m->count; i++) {
        const qc_calibrate_one one = {.number = m->pairs[i].number,
                                      .cross = cross_of(m, i),
                                      .block = m->pairs[i].outputs.block,
                                      .outputs_bytes = outputs_bytes(&m->pairs[i].outputs)};
        const int first = i == 0 || m->pairs[i].moments != m->pairs[i - 1].moments;
        qc_calibrate_one_ahead(k, &one, first, a);
    }
}

/* ---- making ---- */

/* Reads the moments of a weight's outputs, if it has any; *g is to be freed. */
static qc_status read_outputs(const qc_moments *m, const qc_moments_pair *p, float **g,
                              qc_error *err)
{
    uint64_t bytes = outputs_bytes(&p->outputs);
    size_t size = 0;
    if (bytes == 0)
        return QC_OK;
    if (bytes == UINT64_MAX || qc_u64_to_size(bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "second moments of %" PRIu64 " outputs do not fit memory",
                qc_calibrated_weight(m->k->plan, p->number).rows);
    QC_TRY(qc_malloc_aligned(g, 64, size, err));
    return qc_hessians_read_outputs(m->h, p->module, *g, err);
}

static qc_status make_one(const qc_moments *m, uint32_t i, qc_error *err)
{
    const qc_calibrator *k = m->k;
    const qc_moments_pair *p = &m->pairs[i];
    const uint64_t rows = qc_calibrated_weight(k->plan, p->number).rows;
    float *g = NULL;
    const double seconds =
        qc_calibrate_weight_seconds(k, p->number, cross_of(m, i), p->outputs.block);
    qc_status st = read_outputs(m, p, &g, err);
    const uint64_t block = qc_min_u64(p->outputs.block, rows);
    const qc_feedback_outputs outputs = {.g = g,
                                         .block = p->outputs.block,
                                         .damping =
                                             qc_feedback_outputs_damping(block, p->outputs.tokens)};
    if (st == QC_OK)
        st = qc_calibrate_weight(m->k, p->number, g ? &outputs : NULL, err);
    qc_free(g);
    qc_calibrate_progress(k, seconds);
    return st;
}

/* Weights [first, end) share their moments. */
static qc_status make_set(const qc_moments *m, uint32_t first, uint32_t end, qc_error *err)
{
    const qc_calibrator *k = m->k;
    char name[QC_CALIBRATED_NAME_BYTES];
    uint64_t n = 0, tokens = 0;
    double *h = NULL, *c = NULL;
    (void)qc_hessians_moments(m->h, m->pairs[first].module, &n, &tokens);
    (void)qc_calibrated_name(name, k->plan, m->pairs[first].number);
    const uint32_t moments = m->pairs[first].moments;
    const int cross = cross_of(m, first);
    qc_status st = qc_calibrate_square(&h, n, err);
    if (st == QC_OK)
        st = qc_hessians_read(m->h, moments, h, err);
    if (st == QC_OK && cross)
        st = qc_calibrate_square(&c, n, err);
    if (st == QC_OK && cross)
        st = qc_hessians_read_cross(m->h, moments, c, err);
    if (st != QC_OK) {
        qc_free(h);
        qc_free(c);
        return st;
    }
    st = k->engine->ops->take(k->engine, n, h, c, err);
    if (st == QC_OK)
        st = qc_calibrate_factor(k, n, cross, tokens, name, err);
    for (uint32_t i = first; st == QC_OK && i < end; i++) {
        st = qc_check_interrupted(err);
        if (st == QC_OK)
            st = make_one(m, i, err);
    }
    k->engine->ops->drop(k->engine);
    return st;
}

static qc_status make_all(const qc_moments *m, qc_error *err)
{
    for (uint32_t i = 0; i < m->count; i++)
        QC_TRY(qc_calibrate_groups_look(m->k, m->pairs[i].number, err));
    for (uint32_t i = 0; i < m->searched_count; i++)
        QC_TRY(qc_calibrate_groups_look(m->k, m->searched[i], err));
    qc_calibrate_groups_end(m->k);
    for (uint32_t first = 0, end = 0; first < m->count; first = end) {
        while (end < m->count && m->pairs[end].moments == m->pairs[first].moments)
            end++;
        QC_TRY(make_set(m, first, end, err));
    }
    for (uint32_t i = 0; i < m->searched_count; i++) {
        QC_TRY(qc_check_interrupted(err));
        QC_TRY(qc_calibrate_searched(m->k, m->searched[i], err));
    }
    return QC_OK;
}

qc_status qc_moments_run(qc_moments *m, qc_error *err)
{
    const qc_status st = make_all(m, err);
    qc_calibrate_groups_drop(m->k);
    return st;
}

/* ---- what is left ---- */

uint32_t qc_moments_list(const qc_moments *m, unsigned of, unsigned are, uint32_t *out)
{
    const qc_plan *plan = m->k->plan;
    uint32_t count = 0;
    for (uint32_t job = 0; job < plan->job_count; job++) {
        const uint32_t matrices = qc_calibrated_matrices(plan, job);
        const uint32_t first = matrices > 0 ? plan->first_matrix[job] : job;
        /* A stack that nothing is known of counts as one weight. */
        const int whole = matrices > 0 && !(m->known[first] & QC_MOMENTS_SEEN);
        if (!qc_scheme_is_quantized(plan->jobs[job].scheme))
            continue;
        for (uint32_t i = 0; i < (matrices > 0 && !whole ? matrices : 1); i++)
            if ((m->known[whole ? job : first + i] & of) == are)
                out[count++] = whole ? job : first + i;
    }
    return count;
}

qc_status qc_moments_tell_left(const qc_moments *m, const char *why, qc_error *err)
{
    uint32_t *list = NULL;
    QC_TRY(qc_arena_array(&m->k->arena, &list, qc_calibrated_numbers(m->k->plan), err));
    const uint32_t unseen = qc_moments_list(m, QC_MOMENTS_SEEN, 0, list);
    qc_calibrate_tell_left(m->k, list, unseen, why);
    const uint32_t few = qc_moments_list(m, QC_MOMENTS_FEW, QC_MOMENTS_FEW, list);
    qc_calibrate_tell_left(
        m->k, list, few, "as the second moments are of fewer tokens than a quarter of the inputs");
    m->k->r->left = unseen + few;
    return QC_OK;
}
