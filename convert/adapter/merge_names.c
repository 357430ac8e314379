/* Where the tensors of adapters lie in a model: under which names, and what is tied. */
#include "convert/adapter/adapters_internal.h"

#include "base/text.h"
#include "convert/families/config_fields.h"
#include "convert/families/family.h"
#include "convert/families/type_table.h"
#include "formats/checkpoint_internal.h"

#include <stdlib.h>
#include <string.h>

#define WEIGHT ".weight"

/* ---- names ---- */

/* Returns the name without the modules that only hold the others. An adapter has the names that
 * modules had in memory, and a file may have those of another version: the language model within
 * a vision-language model is "language_model.model." in files and up to transformers 4.51, and
 * "model.language_model." from 4.52 on (conversion_mapping.py of 5.24 has all of them). A file of
 * the inner model by itself leaves out "model." or "transformer.". */
static const char *inner_name(const char *name)
{
    static const char *const outer[] = {"model.", "language_model.", "text_model.", "thinker.",
                                        "transformer."};
    for (size_t i = 0; i < sizeof outer / sizeof *outer; i++) {
        const size_t n = strlen(outer[i]);
        if (strncmp(name, outer[i], n) == 0) {
            name += n;
            i = (size_t)-1; /* from the beginning */
        }
    }
    return name;
}

static qc_status list_names(qc_merge_names *n, qc_checkpoint *c, qc_error *err)
{
    n->c = c;
    n->count = c->tensor_count;
    QC_TRY(qc_arena_array(&c->arena, &n->rows, n->count, err));
    for (uint32_t i = 0; i < n->count; i++)
        n->rows[i] = (qc_merge_name){inner_name(c->tensors[i].name), i};
    qsort(n->rows, n->count, sizeof *n->rows, qc_by_text);
    return QC_OK;
}

qc_status qc_merge_find(const qc_merge_names *n, const qc_adapter *a, const char *name,
                        uint32_t tensor, qc_merge_place *out, qc_error *err)
{
    const char *inner = inner_name(name), *mine = qc_adapter_tensor_name(a, tensor);
    const qc_checkpoint_tensor *t = qc_checkpoint_find(n->c, name);
    const qc_merge_name *row =
        t || n->count == 0 ? NULL : bsearch(&inner, n->rows, n->count, sizeof *row, qc_by_text);
    const qc_merge_name *end = n->rows + n->count;
    for (; row && row > n->rows && strcmp(row[-1].inner, inner) == 0; row--)
        continue;
    if (row && row + 1 < end && strcmp(row[1].inner, inner) == 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: '%s' may belong to '%s' or to '%s' of %s, and no name is quite its own",
                a->path, mine, n->c->tensors[row->tensor].name, n->c->tensors[row[1].tensor].name,
                n->c->path);
    out->head = !t && !row && n->head && strcmp(inner, n->head) == 0;
    if (!t && !row && !out->head)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: '%s' belongs to '%s', which %s does not have; is this the "
                "model that the adapter was trained for?",
                a->path, mine, name, n->c->path);
    out->t = &n->c->tensors[t ? (uint32_t)(t - n->c->tensors) : row ? row->tensor : n->table];
    return QC_OK;
}

/* ---- what is tied ---- */

/* The embeddings and the head of a model. */
typedef struct {
    const char *head, *table;      /* inner names */
    uint32_t head_at, table_at;    /* UINT32_MAX: there is no such tensor */
    const qc_adapter *saves, *low; /* adapters that replace one of the two, and that add to it */
} tie;

/* Is it the name of embeddings to which a head may be tied by its own name? BERT and its kin
 * ("embeddings.word_embeddings") predict with a module that has parts. */
static int is_table(const char *inner)
{
    static const char *const names[] = {"embed_tokens", "wte",        "word_embeddings",
                                        "embed_in",     "embeddings", "shared"};
    const char *dot = strrchr(inner, '.'), *at = dot;
    if (!dot || strcmp(dot, WEIGHT) != 0 || strstr(inner, "layers.") ||
        strstr(inner, "embeddings.word_"))
        return 0;
    while (at > inner && at[-1] != '.')
        at--;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strlen(names[i]) == (size_t)(dot - at) && strncmp(at, names[i], strlen(names[i])) == 0)
            return 1;
    }
    return 0;
}

/* Finds the two, if the configuration ties them. */
static qc_status find_tie(tie *t, qc_checkpoint *c, qc_error *err)
{
    qc_config config;
    qc_config_open(&config, c->config);
    *t = (tie){.head_at = UINT32_MAX, .table_at = UINT32_MAX};
    if (!qc_config_flag(&config, "tie_word_embeddings",
                        qc_family_is(qc_family_find(config.model_type), "TIED")))
        return QC_OK;
    QC_TRY(qc_arena_printf(&c->arena, &t->head, err, "%s" WEIGHT,
                           qc_type_hidden_head(config.model_type)));
    for (uint32_t i = 0; i < c->tensor_count; i++) {
        const char *inner = inner_name(c->tensors[i].name);
        if (strcmp(inner, t->head) == 0) {
            t->head_at = i;
        } else if (c->tensors[i].ndim == 2 && is_table(inner) &&
                   (!t->table || strlen(inner) < strlen(t->table))) { /* not those of a tower */
            t->table_at = i;
            t->table = inner;
        }
    }
    return QC_OK;
}

static int is_of_tie(const tie *t, const char *name)
{
    const char *inner = inner_name(name);
    return strcmp(inner, t->head) == 0 || strcmp(inner, t->table) == 0;
}

static int module_is_of_tie(const tie *t, const char *module)
{
    const char *inner = inner_name(module);
    const size_t n = strlen(inner);
    return (strncmp(inner, t->head, n) == 0 && strcmp(t->head + n, WEIGHT) == 0) ||
           (strncmp(inner, t->table, n) == 0 && strcmp(t->table + n, WEIGHT) == 0);
}

/* Looks what an adapter does to the two. Returns whether it does anything. */
static int look_at(tie *t, const qc_adapter *a)
{
    int touched = 0;
    for (size_t i = 0; i < a->whole_count; i++) {
        int is = is_of_tie(t, a->wholes[i].name);
        touched |= is;
        if (is && a->wholes[i].saved && !a->keeps_tied)
            t->saves = a;
    }
    for (size_t i = 0; i < a->module_count; i++) {
        if (module_is_of_tie(t, a->modules[i].module))
            t->low = a;
    }
    return touched || t->low;
}

/* Makes two tensors of one, as peft does when it merges a module of modules_to_save: what the
 * adapter does not replace stays what it was. The head's name is as the file's other names are. */
static qc_status untie(const tie *t, qc_checkpoint *c, qc_error *err)
{
    const char *table = c->tensors[t->table_at].name, *own = strstr(table, ".model."), *head = NULL;
    if (strcmp(t->table, "shared" WEIGHT) == 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%s replaces '%s' of %s or what is tied to it (modules_to_save), and qconv unties "
                "nothing but an output head from the embeddings of a decoder",
                t->saves->path, table, c->path);
    QC_TRY(qc_checkpoint_warn(c, err,
                              "%s has embeddings or an output head of its own (modules_to_save), "
                              "and %s ties the two: both are written, and tie_word_embeddings is "
                              "false, as after a merge by peft",
                              t->saves->path, c->path));
    if (t->head_at == UINT32_MAX)
        QC_TRY(qc_arena_printf(&c->arena, &head, err, "%.*s%s", own ? (int)(own - table + 1) : 0,
                               table, t->head));
    return qc_checkpoint_untie(c, t->table_at, head, err);
}

/* Makes the two one tensor, which a loader makes of them as well. */
static qc_status keep_tied(qc_merge_names *n, const tie *t, qc_checkpoint *c, qc_error *err)
{
    n->head = t->head;
    n->table = t->table_at;
    if (t->low)
        QC_TRY(qc_checkpoint_warn(c, err,
                                  "%s adds to '%s' of %s or to its output head, which are tied "
                                  "(tie_word_embeddings): both change, as when peft merges, and "
                                  "the result is not quite the model that was trained",
                                  t->low->path, c->tensors[t->table_at].name, c->path));
    if (t->head_at == UINT32_MAX)
        return QC_OK;
    c->tensor_bytes -= c->tensors[t->head_at].bytes;
    c->tensor_count--;
    memmove(&c->tensors[t->head_at], &c->tensors[t->head_at + 1],
            (c->tensor_count - t->head_at) * sizeof *c->tensors);
    n->table -= t->table_at > t->head_at;
    return QC_OK;
}

qc_status qc_merge_names_make(qc_merge_names *out, qc_checkpoint *c,
                              const qc_attached_adapter *adapters, size_t count, qc_error *err)
{
    tie t;
    int touched = 0;
    *out = (qc_merge_names){0};
    QC_TRY(find_tie(&t, c, err));
    for (size_t i = 0; t.table && i < count; i++)
        touched |= look_at(&t, adapters[i].adapter);
    if (t.saves)
        QC_TRY(untie(&t, c, err));
    else if (touched)
        QC_TRY(keep_tied(out, &t, c, err));
    return list_names(out, c, err);
}
