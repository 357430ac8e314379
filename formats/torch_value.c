/* The values of a pickle: the arrays that hold them, and what readers ask of them. */
#include "base/alloc.h"
#include "formats/torch_pickle_internal.h"

#include <string.h>

#define NONE_LEFT   SIZE_MAX
#define LIMIT_FLOOR 65536u

qc_status qc_pickle_grow(void *array, size_t *cap, size_t count, size_t limit, size_t bytes_each,
                         qc_error *err)
{
    if (count < *cap)
        return QC_OK;
    if (count >= limit)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "the pickle has more values than tensors need in one of its length (%zu)", limit);
    size_t more = *cap ? *cap * 2 : 64;
    if (more > limit)
        more = limit;
    QC_TRY((qc_realloc_array)(array, more, bytes_each, err));
    *cap = more;
    return QC_OK;
}

size_t qc_pickle_limit(const qc_pickle *p)
{
    return LIMIT_FLOOR + p->len / 2;
}

qc_status qc_pickle_container_new(qc_pickle *p, qc_pickle_kind kind, qc_pickle_value *out,
                                  qc_error *err)
{
    QC_TRY(qc_pickle_grow(&p->containers, &p->container_cap, p->container_count, qc_pickle_limit(p),
                          sizeof *p->containers, err));
    p->containers[p->container_count] = (qc_pickle_container){NONE_LEFT, NONE_LEFT, 0};
    *out = (qc_pickle_value){.kind = kind, .at = p->container_count++};
    return QC_OK;
}

qc_status qc_pickle_add_pair(qc_pickle *p, const qc_pickle_value *to, const qc_pickle_value *key,
                             const qc_pickle_value *value, qc_error *err)
{
    qc_pickle_container *c = &p->containers[to->at];
    QC_TRY(qc_pickle_grow(&p->pairs, &p->pair_cap, p->pair_count, qc_pickle_limit(p),
                          sizeof *p->pairs, err));
    size_t at = p->pair_count++;
    p->pairs[at] = (qc_pickle_pair){.value = *value, .next = NONE_LEFT};
    if (key)
        p->pairs[at].key = *key;
    if (c->count++ == 0)
        c->first = at;
    else
        p->pairs[c->last].next = at;
    c->last = at;
    return QC_OK;
}

void qc_pickle_deinit(qc_pickle *p)
{
    if (!p)
        return;
    qc_free(p->items);
    qc_free(p->containers);
    qc_free(p->pairs);
    qc_free(p->storages);
    qc_free(p->tensors);
    memset(p, 0, sizeof *p);
}

/* ---- use ---- */

int qc_pickle_is_string(const qc_pickle *p, const qc_pickle_value *v, const char *s)
{
    return v->kind == QC_PICKLE_STRING && v->count == strlen(s) &&
           memcmp(p->text + v->at, s, v->count) == 0;
}

const qc_pickle_value *qc_pickle_get(const qc_pickle *p, const qc_pickle_value *dict,
                                     const char *key)
{
    const qc_pickle_value *found = NULL;
    if (dict->kind != QC_PICKLE_DICT)
        return NULL;
    for (size_t i = p->containers[dict->at].first; i != NONE_LEFT; i = p->pairs[i].next) {
        if (qc_pickle_is_string(p, &p->pairs[i].key, key))
            found = &p->pairs[i].value;
    }
    return found;
}
