#include "convert/device/tuning_file.h"

#include "convert/term/console.h"
#include "formats/file_io.h"
#include "formats/json_strict.h"
#include "formats/json_writer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TUNING_VERSION 1u
#define TUNING_MAX     (8u << 20)
#define NAME_MOST      256u

/* ---- names ---- */

typedef struct {
    const char *name;
    int value;
} word;

static const word kinds[] = {{"nf4", QC_FORM_NF4},
                             {"int8", QC_FORM_INT8_ROWS},
                             {"int8-blocks", QC_FORM_INT8_BLOCKS},
                             {NULL, 0}};
/* These names are those of qc_matmul_path_name, which a build without kernels does not have. */
static const word paths[] = {{"gemv", QC_MATMUL_GEMV},
                             {"mma-884", QC_MATMUL_MMA_884},
                             {"mma-16816", QC_MATMUL_MMA_16816},
                             {"wgmma", QC_MATMUL_WGMMA},
                             {"dequant-gemm", QC_MATMUL_DEQUANT_GEMM},
                             {NULL, 0}};
static const word variants[] = {{"general", QC_MATMUL_GENERAL},
                                {"stream", QC_MATMUL_STREAM},
                                {"tiles", QC_MATMUL_TILES},
                                {NULL, 0}};

static const char *name_of(const word *words, int value)
{
    for (; words->name; words++)
        if (words->value == value)
            return words->name;
    return NULL;
}

const char *qc_tuning_variant_name(uint32_t variant)
{
    return variant < QC_MATMUL_VARIANT_COUNT ? name_of(variants, (int)variant) : NULL;
}

/* ---- writing ---- */

static void put_row(qc_json_writer *w, const qc_matmul_tuned *r, const qc_tuning_times *times)
{
    qc_json_member_begin_row(w);
    qc_json_member_string(w, "kind", name_of(kinds, (int)r->kind));
    qc_json_member_u64(w, "n", r->n);
    qc_json_member_u64(w, "k", r->k);
    qc_json_member_u64(w, "m_least", r->m_least);
    qc_json_member_u64(w, "m_most", r->m_most);
    qc_json_member_string(w, "path", name_of(paths, (int)r->choice.path));
    if (r->choice.variant)
        qc_json_member_string(w, "variant", qc_tuning_variant_name(r->choice.variant));
    if (r->choice.blocks)
        qc_json_member_u64(w, "blocks", r->choice.blocks);
    if (times) {
        qc_json_member_number(w, "plan_us", times->plan_us);
        qc_json_member_number(w, "us", times->us);
    }
    qc_json_write_end_object(w);
}

qc_status qc_tuning_text(const qc_tuning *t, qc_strbuf *out, qc_error *err)
{
    qc_json_writer w;
    qc_json_write_begin_text(&w, out, err);
    qc_json_member_u64(&w, "qconv_tuning", TUNING_VERSION);
    qc_json_member_string(&w, "program", t->program);
    qc_json_member_string(&w, "date", t->date);
    qc_json_member_string(&w, "gpu", t->gpu);
    qc_json_member_u64(&w, "sm", t->sm);
    qc_json_member_u64(&w, "multiprocessors", t->multiprocessors);
    qc_json_member_u64(&w, "driver_version", (uint64_t)t->driver_version);
    qc_json_member_u64(&w, "runtime_version", (uint64_t)t->runtime_version);
    qc_json_member_begin_array(&w, "rows");
    for (uint32_t i = 0; i < t->count; i++)
        put_row(&w, &t->rows[i], t->times ? &t->times[i] : NULL);
    qc_json_write_end_array(&w);
    return qc_json_write_end_text(&w);
}

/* ---- reading ---- */

static qc_status read_number(const qc_json_node *n, const char *key, uint64_t least, uint64_t most,
                             uint64_t *out, qc_error *err)
{
    QC_TRY(qc_json_as_u64(qc_json_get(n, key), key, out, err));
    if (*out < least || *out > most)
        QC_FAIL(err, QC_ERR_INPUT, "%s is %llu; expected a number from %llu to %llu", key,
                (unsigned long long)*out, (unsigned long long)least, (unsigned long long)most);
    return QC_OK;
}

static qc_status read_u32(const qc_json_node *n, const char *key, uint32_t least, uint32_t most,
                          uint32_t *out, qc_error *err)
{
    uint64_t v = 0;
    QC_TRY(read_number(n, key, least, most, &v, err));
    *out = (uint32_t)v;
    return QC_OK;
}

static qc_status read_word(const qc_json_node *n, const char *key, const word *words, int *out,
                           qc_error *err)
{
    const char *name = NULL;
    char known[NAME_MOST] = "";
    QC_TRY(qc_json_as_string(qc_json_get(n, key), key, &name, err));
    for (const word *w = words; w->name; w++) {
        if (strcmp(w->name, name) == 0) {
            *out = w->value;
            return QC_OK;
        }
        size_t used = strlen(known);
        (void)snprintf(known + used, sizeof known - used, "%s%s", used ? ", " : "", w->name);
    }
    QC_FAIL(err, QC_ERR_INPUT, "%s is '%.64s'; expected one of %s", key, name, known);
}

static qc_status read_row(const qc_json_node *n, qc_matmul_tuned *r, qc_error *err)
{
    int found = 0;
    QC_TRY(read_word(n, "kind", kinds, &found, err));
    r->kind = (qc_form_kind)found;
    QC_TRY(qc_json_as_u64(qc_json_get(n, "n"), "n", &r->n, err));
    QC_TRY(qc_json_as_u64(qc_json_get(n, "k"), "k", &r->k, err));
    QC_TRY(read_number(n, "m_least", 1, (1ull << 53) - 1, &r->m_least, err));
    QC_TRY(read_number(n, "m_most", r->m_least, (1ull << 53) - 1, &r->m_most, err));
    QC_TRY(read_word(n, "path", paths, &found, err));
    r->choice.path = (qc_matmul_path)found;
    if (qc_json_get(n, "variant")) {
        QC_TRY(read_word(n, "variant", variants, &found, err));
        if (r->choice.path != QC_MATMUL_MMA_16816)
            QC_FAIL(err, QC_ERR_INPUT,
                    "expected a variant for the path mma-16816 only, found one for %s",
                    name_of(paths, (int)r->choice.path));
        r->choice.variant = (uint32_t)found;
    }
    if (qc_json_get(n, "blocks"))
        QC_TRY(read_u32(n, "blocks", 1, QC_MATMUL_BLOCKS_MOST, &r->choice.blocks, err));
    return QC_OK;
}

static qc_status read_rows(qc_tuning *out, qc_arena *arena, const qc_json_node *list, qc_error *err)
{
    size_t count = 0;
    if (!list || qc_json_kind_of(list) != QC_JSON_ARRAY)
        QC_FAIL(err, QC_ERR_INPUT, "rows %s%s; expected an array", list ? "is of kind " : "",
                list ? qc_json_kind_name(qc_json_kind_of(list)) : "is missing");
    for (const qc_json_node *n = qc_json_first(list); n; n = qc_json_next(n))
        count++;
    if (count > QC_MATMUL_TUNED_MOST)
        QC_FAIL(err, QC_ERR_INPUT, "expected at most %u rows, found %zu", QC_MATMUL_TUNED_MOST,
                count);
    QC_TRY(qc_arena_alloc(arena, &out->rows, count + 1, sizeof *out->rows, err));
    for (const qc_json_node *n = qc_json_first(list); n; n = qc_json_next(n)) {
        qc_matmul_tuned *r = &out->rows[out->count];
        *r = (qc_matmul_tuned){.sm = out->sm, .multiprocessors = out->multiprocessors};
        qc_status st = read_row(n, r, err);
        if (st != QC_OK) {
            qc_error_prefix(err, "rows[%u]", out->count);
            return st;
        }
        out->count++;
    }
    return QC_OK;
}

static qc_status read_text(const qc_json_node *root, const char *key, qc_arena *arena,
                           const char **out, qc_error *err)
{
    const char *text = NULL;
    QC_TRY(qc_json_as_string(qc_json_get(root, key), key, &text, err));
    return qc_arena_strndup(arena, out, text, strlen(text), err);
}

static qc_status read_document(qc_tuning *out, qc_arena *arena, const qc_json_node *root,
                               qc_error *err)
{
    uint64_t version = 0;
    uint32_t number = 0;
    if (qc_json_as_u64(qc_json_get(root, "qconv_tuning"), "qconv_tuning", &version, NULL) !=
            QC_OK ||
        version != TUNING_VERSION)
        QC_FAIL(err, QC_ERR_INPUT,
                "expected a table of version %u, as 'qconv bench --tune --save' writes it, found "
                "something else",
                TUNING_VERSION);
    QC_TRY(read_text(root, "program", arena, &out->program, err));
    QC_TRY(read_text(root, "date", arena, &out->date, err));
    QC_TRY(read_text(root, "gpu", arena, &out->gpu, err));
    QC_TRY(read_u32(root, "sm", 1, 100000, &out->sm, err));
    QC_TRY(read_u32(root, "multiprocessors", 1, UINT32_MAX, &out->multiprocessors, err));
    QC_TRY(read_u32(root, "driver_version", 0, INT32_MAX, &number, err));
    out->driver_version = (int)number;
    QC_TRY(read_u32(root, "runtime_version", 0, INT32_MAX, &number, err));
    out->runtime_version = (int)number;
    return read_rows(out, arena, qc_json_get(root, "rows"), err);
}

qc_status qc_tuning_read(qc_tuning *out, qc_arena *arena, const char *path, qc_error *err)
{
    qc_json *doc = NULL;
    *out = (qc_tuning){.path = path};
    QC_TRY(qc_json_read_file(&doc, path, "", TUNING_MAX, err));
    qc_status st = read_document(out, arena, qc_json_root(doc), err);
    if (st != QC_OK)
        qc_error_prefix(err, "%s", path);
    qc_json_destroy(doc);
    return st;
}

/* ---- for a run ---- */

qc_status qc_tuning_open(qc_tuning *out, const qc_call *call, qc_arena *arena, qc_error *err)
{
    const char *path = call->tuning, *from = "--tuning";
    *out = (qc_tuning){0};
    if (!path) {
        path = getenv("QCONV_TUNING");
        from = "QCONV_TUNING";
    }
    if (!path || !*path)
        return QC_OK;
    qc_status st = qc_tuning_read(out, arena, path, err);
    if (st != QC_OK)
        qc_error_prefix(err, "%s", from);
    return st;
}

int qc_tuning_suits(const qc_tuning *t, const qc_cuda_device *d)
{
    return t->sm == d->sm && t->multiprocessors == d->multiprocessors &&
           strcmp(t->gpu, d->name) == 0;
}

qc_matmul_table qc_tuning_for(const qc_tuning *t, const qc_call *call, const qc_cuda_device *d)
{
    if (!t->path || qc_tuning_suits(t, d))
        return (qc_matmul_table){t->rows, t->count};
    qc_console_warn(call,
                    "%s is not used: it was made on %s, sm_%u with %u multiprocessors, and cuda:%d "
                    "is %s, sm_%u with %u; 'qconv bench --tune' makes one here",
                    t->path, t->gpu, t->sm, t->multiprocessors, d->index, d->name, d->sm,
                    d->multiprocessors);
    return (qc_matmul_table){0};
}
