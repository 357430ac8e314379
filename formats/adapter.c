#include "formats/adapter_internal.h"

#include "base/alloc.h"
#include "base/text.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define PREFIX       "base_model.model."
#define WEIGHTS_NAME "adapter_model.safetensors"
#define TORCH_NAME   "adapter_model.bin"

typedef enum { A, B, MAGNITUDE, BIAS, KIND_COUNT } tensor_kind;

/* A tensor is called M + part, then perhaps the adapter's name, then tail. */
typedef struct {
    const char *part, *tail;
    tensor_kind kind;
    int embedding;
} part_row;

static const part_row part_rows[] = {
    {".lora_A", ".weight", A, 0},
    {".lora_B", ".weight", B, 0},
    {".lora_embedding_A", "", A, 1},
    {".lora_embedding_B", "", B, 1},
    {".lora_B", ".bias", BIAS, 0},
    {".lora_magnitude_vector", ".weight", MAGNITUDE, 0},
    {".lora_magnitude_vector", "", MAGNITUDE, 0},
};

/* Names of wrappers in the names of whole tensors. */
#define SAVED ".modules_to_save."
static const char *const wrappers[] = {".base_layer.", SAVED "default.", SAVED};

const char *qc_adapter_tensor_name(const qc_adapter *a, uint32_t tensor)
{
    return a->weights->tensors[tensor].name;
}

static const char *bare(const char *name)
{
    size_t n = strlen(PREFIX);
    return strncmp(name, PREFIX, n) == 0 ? name + n : name;
}

/* ---- sorting the tensors ---- */

/* Is a tensor of modules_to_save? As in peft, an entry is the end of a module's name. */
static int is_saved(const qc_adapter_config *c, const char *name)
{
    const char *dot = strrchr(name, '.');
    size_t len = dot ? (size_t)(dot - name) : 0;
    for (size_t i = 0; i < c->saved_count; i++) {
        size_t n = strlen(c->saved[i]);
        if (n <= len && memcmp(name + len - n, c->saved[i], n) == 0)
            return 1;
    }
    return strstr(name, SAVED) != NULL;
}

static qc_status add_whole(qc_adapter *a, const qc_adapter_config *c, uint32_t i, qc_error *err)
{
    const char *name = bare(qc_adapter_tensor_name(a, i));
    qc_adapter_whole *w = &a->wholes[a->whole_count++];
    w->tensor = i;
    w->saved = is_saved(c, name);
    for (size_t k = 0; k < sizeof wrappers / sizeof *wrappers; k++) {
        const char *at = strstr(name, wrappers[k]);
        if (at)
            return qc_arena_printf(&a->arena, &w->name, err, "%.*s.%s", (int)(at - name), name,
                                   at + strlen(wrappers[k]));
    }
    w->name = name;
    return QC_OK;
}

/* Returns the length of the module's name in that of a tensor of this row; 0 for another tensor. */
static size_t module_len(const part_row *row, const char *name)
{
    const char *at = name;
    if (!qc_ends_with(name, row->tail))
        return 0;
    for (const char *next = name; (next = strstr(next, row->part)) != NULL; next++)
        at = next;
    const char *own = at + strlen(row->part), *end = name + strlen(name) - strlen(row->tail);
    if (at == name || own > end || (own < end && (*own != '.' || own + 1 == end)) ||
        (own < end && memchr(own + 1, '.', (size_t)(end - own - 1))))
        return 0;
    return (size_t)(at - name);
}

/* Puts tensor i in the module whose name has this length. The tensors of a module are neighbours,
 * because names are sorted. */
static qc_status add_part(qc_adapter *a, uint32_t i, const part_row *row, size_t len, qc_error *err)
{
    const char *name = bare(qc_adapter_tensor_name(a, i));
    const char *last = a->module_count ? a->modules[a->module_count - 1].module : NULL;
    if (!last || strlen(last) != len || memcmp(last, name, len) != 0) {
        qc_adapter_module fresh = {.a = QC_ADAPTER_NO_TENSOR,
                                   .b = QC_ADAPTER_NO_TENSOR,
                                   .magnitude = QC_ADAPTER_NO_TENSOR,
                                   .bias = QC_ADAPTER_NO_TENSOR};
        QC_TRY(qc_arena_strndup(&a->arena, &fresh.module, name, len, err));
        a->modules[a->module_count++] = fresh;
    }
    qc_adapter_module *m = &a->modules[a->module_count - 1];
    uint32_t *const places[KIND_COUNT] = {&m->a, &m->b, &m->magnitude, &m->bias};
    if (*places[row->kind] != QC_ADAPTER_NO_TENSOR)
        QC_FAIL(err, QC_ERR_INPUT, "'%s' and '%s' are the same thing twice",
                qc_adapter_tensor_name(a, *places[row->kind]), qc_adapter_tensor_name(a, i));
    *places[row->kind] = i;
    m->embedding |= row->embedding;
    return QC_OK;
}

static qc_status sort_tensors(qc_adapter *a, const qc_adapter_config *c, qc_error *err)
{
    const qc_checkpoint *w = a->weights;
    QC_TRY(qc_arena_array(&a->arena, &a->modules, w->tensor_count, err));
    QC_TRY(qc_arena_array(&a->arena, &a->wholes, w->tensor_count, err));
    for (uint32_t i = 0; i < w->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &w->tensors[i];
        const part_row *row = part_rows, *end = row + sizeof part_rows / sizeof *part_rows;
        size_t len = 0;
        while (row < end && (len = module_len(row, bare(t->name))) == 0)
            row++;
        if (row < end) {
            QC_TRY(add_part(a, i, row, len, err));
            if (!qc_dtype_is_quantizable(t->dtype) || t->dtype == QC_DTYPE_F64)
                QC_FAIL(err, QC_ERR_UNSUPPORTED, "tensor '%s' is %s; expected F32, F16 or BF16",
                        t->name, qc_dtype_name(t->dtype));
        } else if (strstr(t->name, "lora_") || strstr(t->name, "trainable_tokens")) {
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "tensor '%s': qconv does not know what such a tensor does to a weight",
                    t->name);
        } else if (!strstr(t->name, ".original_module.")) { /* that is the model's own */
            QC_TRY(add_whole(a, c, i, err));
        }
    }
    if (w->tensor_count == 0)
        QC_FAIL(err, QC_ERR_INPUT, "it has no tensors");
    qsort(a->modules, a->module_count, sizeof *a->modules, qc_by_text);
    qsort(a->wholes, a->whole_count, sizeof *a->wholes, qc_by_text);
    size_t twice = qc_find_twice(a->wholes, a->whole_count, sizeof *a->wholes);
    if (twice)
        QC_FAIL(err, QC_ERR_INPUT, "'%s' and '%s' are the same thing twice",
                qc_adapter_tensor_name(a, a->wholes[twice - 1].tensor),
                qc_adapter_tensor_name(a, a->wholes[twice].tensor));
    return QC_OK;
}

/* ---- checking a module ---- */

static qc_status check_module(const qc_adapter *a, const qc_adapter_config *c, qc_adapter_module *m,
                              qc_error *err)
{
    double rank = qc_adapter_config_rank(c, m->module),
           alpha = qc_adapter_config_alpha(c, m->module);
    if (m->a == QC_ADAPTER_NO_TENSOR || m->b == QC_ADAPTER_NO_TENSOR)
        QC_FAIL(err, QC_ERR_INPUT, "module '%s' has no %s, only '%s'", m->module,
                m->a == QC_ADAPTER_NO_TENSOR ? "lora_A" : "lora_B",
                qc_adapter_tensor_name(a, m->a != QC_ADAPTER_NO_TENSOR           ? m->a
                                          : m->b != QC_ADAPTER_NO_TENSOR         ? m->b
                                          : m->magnitude != QC_ADAPTER_NO_TENSOR ? m->magnitude
                                                                                 : m->bias));
    const qc_checkpoint_tensor *ta = &a->weights->tensors[m->a], *tb = &a->weights->tensors[m->b];
    const qc_checkpoint_tensor *pair[] = {ta, tb};
    for (unsigned i = 0; i < 2; i++) {
        if (pair[i]->ndim != 2)
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "tensor '%s' has %u dimensions; qconv merges matrices, not convolutions",
                    pair[i]->name, pair[i]->ndim);
    }
    m->rank = ta->dims[0];
    if (m->rank == 0 || tb->dims[1] != m->rank)
        QC_FAIL(err, QC_ERR_SHAPE,
                "module '%s': lora_A is [%" PRIu64 ", %" PRIu64 "] and lora_B is [%" PRIu64
                ", %" PRIu64 "]; expected one rank, above 0, where they meet",
                m->module, ta->dims[0], ta->dims[1], tb->dims[0], tb->dims[1]);
    if ((double)m->rank != rank)
        QC_FAIL(err, QC_ERR_SHAPE,
                "module '%s' has rank %" PRIu64 ", but " QC_ADAPTER_CONFIG_NAME " says %g (r, or "
                "rank_pattern), and the scale depends on it",
                m->module, m->rank, rank);
    if (c->use_dora != (m->magnitude != QC_ADAPTER_NO_TENSOR))
        QC_FAIL(err, QC_ERR_INPUT, "module '%s' has %s magnitude vector, but use_dora is %s",
                m->module, c->use_dora ? "no" : "a", c->use_dora ? "true" : "false");
    m->scaling = alpha / (c->use_rslora ? sqrt(rank) : rank);
    return QC_OK;
}

/* ---- opening ---- */

static qc_status open_files(qc_adapter *a, qc_adapter_config *c, const char *path, qc_error *err)
{
    const char *config = NULL, *weights = NULL, *torch = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    QC_TRY(qc_arena_strdup(&a->arena, &a->path, path, err));
    size_t len = strlen(path);
    while (len > 1 && path[len - 1] == '/')
        len--;
    QC_TRY(qc_arena_strndup(&a->arena, &a->name, path, len, err));
    a->name = qc_last_name(a->name);
    QC_TRY(qc_path_stat(a->path, &kind, NULL, err));
    if (kind != QC_PATH_DIR)
        QC_FAIL(err, QC_ERR_INPUT,
                "expected the folder of an adapter, with " QC_ADAPTER_CONFIG_NAME
                " and " WEIGHTS_NAME ", but %s",
                kind == QC_PATH_MISSING ? "it does not exist" : "it is a file");
    QC_TRY(qc_path_join(&a->arena, &config, a->path, QC_ADAPTER_CONFIG_NAME, err));
    QC_TRY(qc_path_stat(config, &kind, NULL, err));
    if (kind != QC_PATH_FILE)
        QC_FAIL(err, QC_ERR_INPUT,
                "there is no " QC_ADAPTER_CONFIG_NAME
                ", which peft writes beside an adapter's weights");
    QC_TRY(qc_adapter_config_read(c, &a->arena, config, err));
    a->fan_in_fan_out = c->fan_in_fan_out;
    a->keeps_tied = c->keeps_tied;
    a->unknown = c->unknown;
    QC_TRY(qc_path_join(&a->arena, &weights, a->path, WEIGHTS_NAME, err));
    QC_TRY(qc_path_stat(weights, &kind, NULL, err));
    if (kind != QC_PATH_FILE) {
        QC_TRY(qc_path_join(&a->arena, &torch, a->path, TORCH_NAME, err));
        QC_TRY(qc_path_stat(torch, &kind, NULL, err));
        if (kind == QC_PATH_FILE)
            return qc_checkpoint_refuse_torch(a->path, "'" TORCH_NAME "'", err);
        QC_FAIL(err, QC_ERR_INPUT, "there is no " WEIGHTS_NAME);
    }
    QC_TRY(qc_checkpoint_open(&a->weights, weights, err));
    QC_TRY(qc_digest_file(&a->config_digest, config, err));
    return qc_digest_file(&a->weights_digest, weights, err);
}

qc_status qc_adapter_open(qc_adapter **out, const char *path, qc_error *err)
{
    qc_adapter_config config = {0};
    qc_adapter *a = NULL;
    *out = NULL;
    QC_TRY(qc_calloc(&a, 1, sizeof *a, err));
    qc_arena_init(&a->arena);
    qc_status st = open_files(a, &config, path, err);
    if (st == QC_OK)
        st = sort_tensors(a, &config, err);
    for (size_t i = 0; st == QC_OK && i < a->module_count; i++)
        st = check_module(a, &config, &a->modules[i], err);
    qc_adapter_config_deinit(&config);
    if (st != QC_OK) {
        if (err && !qc_begins_with(err->msg, path))
            qc_error_prefix(err, "%s", path);
        qc_adapter_close(a);
        return st;
    }
    *out = a;
    return QC_OK;
}

void qc_adapter_close(qc_adapter *a)
{
    if (!a)
        return;
    qc_checkpoint_close(a->weights);
    qc_arena_deinit(&a->arena);
    qc_free(a);
}
