#include "convert/library/values.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "base/workers.h"
#include "convert/adapter/adapters.h"
#include "convert/model/expert_split.h"
#include "convert/model/recipe_stored.h"
#include "convert/model/weight_read.h"
#include "formats/checkpoint_internal.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Even a slow disk reads this much within the time in which an interruption has to be answered. */
#define READ_BYTES ((uint64_t)16 << 20)

/* The public part comes first, so that a pointer to it is one to all of it. */
typedef struct {
    qc_values_tensor listed;
    uint32_t tensor; /* of the checkpoint */
    const qc_stored_weight *stored;
    const qc_coded_weight *coded;
    int turned;
} entry;

typedef struct reader {
    qc_weight_reader weights;
    struct reader *next;
} reader;

struct qc_values {
    qc_arena arena;
    qc_checkpoint *model;
    entry *entries; /* sorted bytewise by name */
    size_t count;
    pthread_mutex_t lock;
    reader *idle; /* under the lock: those that no thread uses now */
};

/* ---- opening ---- */

static qc_status arrange(qc_values *v, const qc_values_options *o, qc_error *err)
{
    const qc_recipe_options recipe = {.to = QC_TO_BF16,
                                      .experts =
                                          o->experts == QC_VALUES_SEPARATE  ? QC_EXPERTS_SEPARATE
                                          : o->experts == QC_VALUES_STACKED ? QC_EXPERTS_STACKED
                                                                            : QC_EXPERTS_AS_FOUND};
    qc_loras loras = {.count = o->adapter_count};
    QC_TRY(qc_checkpoint_check_model(v->model, err));
    QC_TRY(qc_experts_arrange(v->model, &recipe, err));
    if (o->adapter_count == 0)
        return QC_OK;
    QC_TRY(qc_arena_array(&v->arena, &loras.list, o->adapter_count, err));
    for (uint32_t i = 0; i < o->adapter_count; i++) {
        if (!o->adapters || !o->adapters[i])
            QC_FAIL(err, QC_ERR_USAGE, "adapter %" PRIu32 " has no path", i);
        loras.list[i] = (qc_lora){o->adapters[i], o->adapter_scales ? o->adapter_scales[i] : 1.0};
    }
    return qc_adapters_attach(v->model, loras, err);
}

static qc_status add(qc_values *v, uint32_t i, const qc_recipe_entry *e, qc_error *err)
{
    const qc_checkpoint_tensor *t = &v->model->tensors[i];
    entry *to = &v->entries[v->count++];
    qc_weight_source source;
    *to = (entry){.listed = {.name = e->coded ? e->coded->name : t->name,
                             .dtype = qc_checkpoint_dtype(t),
                             .ndim = t->ndim},
                  .tensor = i,
                  .stored = e->stored,
                  .coded = e->stored ? NULL : e->coded,
                  .turned = e->transpose};
    memcpy(to->listed.dims, t->dims, sizeof t->dims);
    if (!to->stored && !to->coded)
        return QC_OK;
    QC_TRY(qc_weight_source_of(&source, v->model, i, to->stored, to->coded, to->turned, err));
    to->listed.ndim = source.ndim;
    memcpy(to->listed.dims, source.dims, sizeof source.dims);
    to->listed.dtype = to->stored ? to->stored->dtype : to->coded->dtype;
    if (!to->stored)
        return qc_integers_name(&to->listed.stored_as, &v->arena, to->coded, err);
    to->listed.stored_as = to->stored->name;
    return QC_OK;
}

/* Lists the tensors that a conversion to floats writes. */
static qc_status list(qc_values *v, qc_error *err)
{
    const qc_recipe_options options = {.to = QC_TO_BF16};
    qc_recipe recipe;
    QC_TRY(qc_recipe_make(&recipe, &v->arena, v->model, &options, err));
    QC_TRY(qc_arena_array(&v->arena, &v->entries, v->model->tensor_count, err));
    for (uint32_t i = 0; i < (uint32_t)v->model->tensor_count; i++)
        if (recipe.entries[i].scheme != QC_SCHEME_ABSORBED)
            QC_TRY(add(v, i, &recipe.entries[i], err));
    qsort(v->entries, v->count, sizeof *v->entries, qc_by_text);
    size_t twice = qc_find_twice(v->entries, v->count, sizeof *v->entries);
    if (twice)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s has '%s' twice: as codes and as it is; remove one of the two", v->model->path,
                v->entries[twice].listed.name);
    return QC_OK;
}

qc_status qc_values_open(qc_values **out, const char *path, const qc_values_options *options,
                         qc_error *err)
{
    static const qc_values_options none;
    qc_values *v = NULL;
    if (!out || !path)
        QC_FAIL(err, QC_ERR_USAGE, "out or path is NULL");
    *out = NULL;
    QC_TRY(qc_calloc(&v, 1, sizeof *v, err));
    qc_arena_init(&v->arena);
    if (pthread_mutex_init(&v->lock, NULL) != 0) {
        qc_free(v);
        QC_FAIL(err, QC_ERR_NOMEM, "a lock cannot be made");
    }
    qc_status st = qc_checkpoint_open(&v->model, path, err);
    if (st == QC_OK)
        st = arrange(v, options ? options : &none, err);
    if (st == QC_OK)
        st = list(v, err);
    if (st == QC_OK)
        *out = v;
    else
        qc_values_close(v);
    return st;
}

void qc_values_close(qc_values *v)
{
    if (!v)
        return;
    while (v->idle) {
        reader *next = v->idle->next;
        qc_weight_reader_close(&v->idle->weights);
        qc_free(v->idle);
        v->idle = next;
    }
    (void)pthread_mutex_destroy(&v->lock);
    qc_checkpoint_close(v->model);
    qc_arena_deinit(&v->arena);
    qc_free(v);
}

/* ---- listing ---- */

size_t qc_values_count(const qc_values *v)
{
    return v ? v->count : 0;
}

const qc_values_tensor *qc_values_at(const qc_values *v, size_t index)
{
    return v && index < v->count ? &v->entries[index].listed : NULL;
}

const qc_values_tensor *qc_values_find(const qc_values *v, const char *name, size_t *index)
{
    const entry key = {.listed = {.name = name}};
    if (!v || !name || v->count == 0)
        return NULL;
    const entry *found = bsearch(&key, v->entries, v->count, sizeof key, qc_by_text);
    if (found && index)
        *index = (size_t)(found - v->entries);
    return found ? &found->listed : NULL;
}

/* ---- reading ---- */

static qc_status take(qc_values *v, reader **out, qc_error *err)
{
    pthread_mutex_lock(&v->lock);
    *out = v->idle;
    if (v->idle)
        v->idle = v->idle->next;
    pthread_mutex_unlock(&v->lock);
    if (*out)
        return QC_OK;
    QC_TRY(qc_calloc(out, 1, sizeof **out, err));
    qc_status st = qc_weight_reader_open(&(*out)->weights, v->model, err);
    if (st != QC_OK)
        qc_free(*out);
    return st;
}

static void give(qc_values *v, reader *r)
{
    pthread_mutex_lock(&v->lock);
    r->next = v->idle;
    v->idle = r;
    pthread_mutex_unlock(&v->lock);
}

/* Reads rows as the file has them. */
static qc_status read_plain(const qc_values *v, reader *r, const entry *e, uint64_t first,
                            uint64_t count, unsigned char *dst, qc_error *err)
{
    const qc_checkpoint_tensor *t = &v->model->tensors[e->tensor];
    const uint64_t rows = t->ndim ? t->dims[0] : 1;
    const uint64_t row_bytes = rows ? t->bytes / rows : 0, bytes = count * row_bytes;
    for (uint64_t at = 0; at < bytes; at += READ_BYTES) {
        const uint64_t n = qc_min_u64(READ_BYTES, bytes - at);
        QC_TRY(qc_check_interrupted(err));
        QC_TRY(qc_checkpoint_read(v->model, r->weights.codes, t, first * row_bytes + at, dst + at,
                                  (size_t)n, err));
    }
    return QC_OK;
}

qc_status qc_values_read(qc_values *v, size_t index, uint64_t first, uint64_t count, void *dst,
                         qc_dtype dtype, qc_error *err)
{
    if (!v || (!dst && count > 0))
        QC_FAIL(err, QC_ERR_USAGE, "v or dst is NULL");
    if (index >= v->count)
        QC_FAIL(err, QC_ERR_USAGE, "there is no tensor number %zu; %zu are listed", index,
                v->count);
    const entry *e = &v->entries[index];
    const qc_values_tensor *t = &e->listed;
    const uint64_t rows = t->ndim ? t->dims[0] : 1;
    const int coded = e->stored || e->coded || v->model->tensors[e->tensor].change;
    const int is_float = coded || qc_dtype_is_quantizable(t->dtype);
    const int wanted = dtype == QC_DTYPE_F32 || dtype == QC_DTYPE_F16 || dtype == QC_DTYPE_BF16;
    if (first > rows || count > rows - first)
        QC_FAIL(err, QC_ERR_USAGE,
                "tensor '%s' has %" PRIu64 " rows; %" PRIu64 " from %" PRIu64 " on were asked for",
                t->name, rows, count, first);
    if (!(wanted && is_float) && dtype != t->dtype)
        QC_FAIL(err, QC_ERR_USAGE, "tensor '%s' is %s; expected %sits own dtype", t->name,
                qc_dtype_name(t->dtype), is_float ? "F32, F16, BF16 or " : "");
    reader *r = NULL;
    qc_weight_source source;
    QC_TRY(take(v, &r, err));
    qc_status st = QC_OK;
    if (!coded && dtype == t->dtype) {
        st = read_plain(v, r, e, first, count, dst, err);
    } else {
        st = qc_weight_source_of(&source, v->model, e->tensor, e->stored, e->coded, e->turned, err);
        if (st == QC_OK)
            st = qc_weight_read(&r->weights, &source, first, count, dst, dtype, err);
    }
    give(v, r);
    return st;
}
