#include "formats/torch_state.h"

#include "base/alloc.h"
#include "base/text.h"

#include <stdlib.h>
#include <string.h>

#define NAME_SHOWN_BYTES 160

/* The keys under which trainers keep the model's own dict. */
static const char *const wrappers[] = {"state_dict", "model", "module", "model_state_dict"};

static size_t count_tensors(const qc_pickle *p, const qc_pickle_value *dict)
{
    size_t n = 0;
    for (size_t i = p->containers[dict->at].first; i != SIZE_MAX; i = p->pairs[i].next)
        n += p->pairs[i].value.kind == QC_PICKLE_TENSOR;
    return n;
}

static qc_status choose_dict(const qc_pickle *p, qc_pickle_value *dict, qc_error *err)
{
    const char *first = NULL;
    if (p->root.kind != QC_PICKLE_DICT)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "the file holds %s; expected a state dict",
                p->root.kind == QC_PICKLE_TENSOR ? "a single tensor"
                                                 : "something that is not a dict");
    *dict = p->root;
    if (count_tensors(p, dict) != 0 || p->tensor_count == 0)
        return QC_OK;
    for (size_t i = 0; i < sizeof wrappers / sizeof *wrappers; i++) {
        const qc_pickle_value *v = qc_pickle_get(p, &p->root, wrappers[i]);
        if (!v || v->kind != QC_PICKLE_DICT || count_tensors(p, v) == 0)
            continue;
        if (first)
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "tensors are in '%s' and in '%s'; save the model's state_dict() alone", first,
                    wrappers[i]);
        first = wrappers[i];
        *dict = *v;
    }
    if (!first)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "none of its %zu tensors is an entry of the dict itself, or of 'state_dict' or "
                "'model' in it; save the model's state_dict() alone",
                p->tensor_count);
    return QC_OK;
}

static qc_status take_name(const qc_pickle *p, qc_arena *arena, const qc_pickle_value *key,
                           const char **out, qc_error *err)
{
    size_t n = 0;
    uint32_t c = 0;
    if (key->kind != QC_PICKLE_STRING)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "the name of a tensor is not a string");
    const char *s = (const char *)p->text + key->at; /* opcodes follow, which end any character */
    for (size_t i = 0; i < key->count; i += n) {
        n = qc_text_char(s + i, &c);
        if (n == 0 || n > key->count - i || c == 0)
            QC_FAIL(err, QC_ERR_INPUT, "the name of a tensor is not UTF-8 or holds a zero");
    }
    QC_TRY(qc_arena_strndup(arena, out, s, key->count, err));
    if (strcmp(*out, "__metadata__") == 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "a tensor is called '__metadata__', which safetensors cannot hold");
    return QC_OK;
}

static qc_status skip(qc_torch_state *out, qc_arena *arena, const qc_pickle *p,
                      const qc_pickle_value *key, qc_error *err)
{
    if (out->skipped++ != 0 || key->kind != QC_PICKLE_STRING)
        return QC_OK;
    return qc_arena_strndup(arena, &out->first_skipped, (const char *)p->text + key->at, key->count,
                            err);
}

/* Collects the entries of the dict and marks their tensors in `seen`. */
static qc_status collect(qc_torch_state *out, qc_arena *arena, const qc_pickle *p,
                         const qc_pickle_value *dict, unsigned char *seen, qc_error *err)
{
    size_t distinct = 0;
    QC_TRY(qc_arena_alloc(arena, &out->entries, count_tensors(p, dict), sizeof *out->entries, err));
    for (size_t i = p->containers[dict->at].first; i != SIZE_MAX; i = p->pairs[i].next) {
        const qc_pickle_pair *pair = &p->pairs[i];
        if (pair->value.kind != QC_PICKLE_TENSOR) {
            QC_TRY(skip(out, arena, p, &pair->key, err));
            continue;
        }
        qc_state_entry *e = &out->entries[out->count++];
        QC_TRY(take_name(p, arena, &pair->key, &e->name, err));
        e->tensor = (uint32_t)pair->value.at;
        distinct += !seen[e->tensor];
        seen[e->tensor] = 1;
    }
    qsort(out->entries, out->count, sizeof *out->entries, qc_by_text);
    size_t twice = qc_find_twice(out->entries, out->count, sizeof *out->entries);
    if (twice)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%.*s' is in the dict twice", NAME_SHOWN_BYTES,
                out->entries[twice].name);
    if (distinct != p->tensor_count)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%zu of its %zu tensors are not entries of the state dict (an optimizer's "
                "state?); save the model's state_dict() alone",
                p->tensor_count - distinct, p->tensor_count);
    return QC_OK;
}

qc_status qc_torch_state_read(qc_torch_state *out, qc_arena *arena, const qc_pickle *p,
                              qc_error *err)
{
    qc_pickle_value dict = {0};
    void *seen = NULL;
    memset(out, 0, sizeof *out);
    QC_TRY(choose_dict(p, &dict, err));
    if (dict.at != p->root.at) {
        for (size_t i = p->containers[p->root.at].first; i != SIZE_MAX; i = p->pairs[i].next) {
            const qc_pickle_value *v = &p->pairs[i].value;
            if (v->kind != QC_PICKLE_DICT || v->at != dict.at)
                QC_TRY(skip(out, arena, p, &p->pairs[i].key, err));
        }
    }
    QC_TRY(qc_calloc(&seen, p->tensor_count, 1, err));
    qc_status st = collect(out, arena, p, &dict, seen, err);
    qc_free(seen);
    return st;
}
