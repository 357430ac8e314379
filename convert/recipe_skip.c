#include "convert/recipe_skip.h"

#include <stdlib.h>
#include <string.h>

#define FIRST_CAPACITY 64u

qc_status qc_skip_init(qc_skip_list *l, qc_arena *arena, const qc_model_table *table, qc_error *err)
{
    memset(l, 0, sizeof *l);
    l->arena = arena;
    l->table = table;
    void *v = NULL;
    QC_TRY(qc_arena_alloc(arena, &v, FIRST_CAPACITY, sizeof *l->names, err));
    l->names = v;
    l->capacity = FIRST_CAPACITY;
    return QC_OK;
}

static qc_status append(qc_skip_list *l, const char *name, qc_error *err)
{
    if (l->count == l->capacity) {
        void *v = NULL;
        if (l->capacity > UINT32_MAX / 2)
            QC_FAIL(err, QC_ERR_NOMEM, "too many modules to skip");
        QC_TRY(qc_arena_alloc(l->arena, &v, (size_t)l->capacity * 2, sizeof *l->names, err));
        memcpy(v, l->names, l->count * sizeof *l->names);
        l->names = v;
        l->capacity *= 2;
    }
    l->names[l->count++] = name;
    return QC_OK;
}

qc_status qc_skip_add(qc_skip_list *l, const char *module, size_t len, qc_error *err)
{
    static const char head[] = "lm_head";
    size_t head_len = sizeof head - 1;
    if (len > head_len && module[len - head_len - 1] == '.' &&
        memcmp(module + len - head_len, head, head_len) == 0)
        return append(l, head, err);
    const char *name = NULL;
    QC_TRY(qc_arena_strndup(l->arena, &name, module, len, err));
    QC_TRY(append(l, name, err));
    const char *from = NULL, *to = NULL;
    for (unsigned n = 0; l->table && qc_model_table_rename(l->table, n, &from, &to); n++) {
        size_t from_len = strlen(from);
        if (len < from_len || memcmp(name, from, from_len) != 0)
            continue;
        const char *other = NULL;
        QC_TRY(qc_arena_printf(l->arena, &other, err, "%s%s", to, name + from_len));
        QC_TRY(append(l, other, err));
    }
    return QC_OK;
}

qc_status qc_skip_add_as_is(qc_skip_list *l, const char *name, qc_error *err)
{
    const char *copy = NULL;
    QC_TRY(qc_arena_strndup(l->arena, &copy, name, strlen(name), err));
    return append(l, copy, err);
}

const char *qc_skip_key(const qc_json_node *quantization)
{
    static const char bnb[] = "llm_int8_skip_modules", common[] = "modules_to_not_convert";
    static const char *const keys[] = {bnb, common, "ignored_layers", "ignore"};
    const char *method = qc_json_string_or(qc_json_get(quantization, "quant_method"), "");
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        if (qc_json_get(quantization, keys[i]))
            return keys[i];
    }
    if (strcmp(method, "compressed-tensors") == 0)
        return "ignore";
    return strcmp(method, "bitsandbytes") == 0 ? bnb : common;
}

static int compare_names(const void *pa, const void *pb)
{
    const char *const *a = pa, *const *b = pb;
    return qc_natural_compare(*a, *b);
}

void qc_skip_finish(qc_skip_list *l, const char ***names, uint32_t *count)
{
    qsort(l->names, l->count, sizeof *l->names, compare_names);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < l->count; i++) {
        if (kept == 0 || strcmp(l->names[kept - 1], l->names[i]) != 0)
            l->names[kept++] = l->names[i];
    }
    *names = l->names;
    *count = kept;
}
