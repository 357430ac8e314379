#include "convert/fit_report.h"

#include "base/text.h"
#include "convert/console.h"
#include "convert/size_text.h"
#include "convert/table.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- sums ---- */

static int is_integer(qc_dtype t)
{
    return t == QC_DTYPE_BOOL || t == QC_DTYPE_U8 || t == QC_DTYPE_I8 || t == QC_DTYPE_I16 ||
           t == QC_DTYPE_U16 || t == QC_DTYPE_I32 || t == QC_DTYPE_U32 || t == QC_DTYPE_I64 ||
           t == QC_DTYPE_U64;
}

uint64_t qc_fit_parameters_of(const qc_plan *plan, const qc_job *job)
{
    const qc_ckpt_tensor *t = &plan->model->tensors[job->source];
    const qc_recipe_entry *e = job->entry;
    if (e->role == QC_ROLE_STATE || qc_ends_with(t->name, "inv_freq") ||
        qc_ends_with(t->name, "position_ids"))
        return 0;
    uint64_t elems = 1;
    if (e->stored) {
        for (unsigned i = 0; i < e->stored->ndim; i++)
            elems *= e->stored->dims[i]; /* checked when the recipe was made */
        return elems;
    }
    if (e->role == QC_ROLE_PACKED && t->dtype == QC_DTYPE_U8)
        return t->bytes * 2; /* e2m1 codes: gpt-oss' *_blocks */
    if (is_integer(t->dtype))
        return 0;
    for (unsigned i = 0; i < t->ndim; i++)
        elems *= t->dims[i];
    return elems;
}

/* Blocks of 64 are what "nf4" means; others are told apart. */
static qc_status scheme_name(const char **out, qc_arena *arena, const qc_job *j, qc_error *err)
{
    *out = qc_scheme_name(j->scheme);
    if (j->scheme == QC_SCHEME_NF4 && j->block_elems != 64)
        return qc_arena_printf(arena, out, err, "nf4-%" PRIu32, j->block_elems);
    return QC_OK;
}

qc_status qc_fit_sum_schemes(qc_fit_report *r, const qc_plan *plan, qc_error *err)
{
    enum { ROOM = QC_SCHEME_ABSORBED + 8 };
    typedef struct {
        qc_scheme scheme;
        uint32_t block_elems;
    } key;
    key keys[ROOM];
    void *v = NULL;
    QC_TRY(qc_arena_alloc(r->arena, &v, ROOM, sizeof(qc_fit_scheme), err));
    qc_fit_scheme *sums = v;
    uint32_t count = 0;
    r->parameters = 0;
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_job *j = &plan->jobs[i];
        uint32_t block = j->scheme == QC_SCHEME_NF4 ? j->block_elems : 0;
        uint32_t k = 0;
        while (k < count && (keys[k].scheme != j->scheme || keys[k].block_elems != block))
            k++;
        if (k == count) {
            if (count == ROOM)
                QC_FAIL(err, QC_ERR_INTERNAL, "more than %d schemes in one plan", (int)ROOM);
            keys[count++] = (key){j->scheme, block};
            QC_TRY(scheme_name(&sums[k].name, r->arena, j, err));
        }
        uint64_t parameters = qc_fit_parameters_of(plan, j);
        sums[k].tensors++;
        sums[k].weights += parameters;
        r->parameters += parameters;
        for (int part = 0; part < QC_PART_COUNT; part++)
            if (j->outputs[part] != QC_NO_OUTPUT)
                sums[k].bytes += qc_plan_tensor_bytes(plan, j->outputs[part]);
    }
    /* Largest first; of equal ones the name decides. */
    for (uint32_t i = 1; i < count; i++) {
        qc_fit_scheme s = sums[i];
        uint32_t at = i;
        for (; at > 0 && (sums[at - 1].bytes < s.bytes ||
                          (sums[at - 1].bytes == s.bytes && strcmp(sums[at - 1].name, s.name) > 0));
             at--)
            sums[at] = sums[at - 1];
        sums[at] = s;
    }
    r->schemes = sums;
    r->scheme_count = count;
    return QC_OK;
}

/* ---- bars ---- */

qc_bar_style qc_bar_style_of_console(void)
{
    static const char *const names[] = {"LC_ALL", "LC_CTYPE", "LANG"};
    if (!qc_console_terminal(STDOUT_FILENO))
        return QC_BARS_ASCII;
    /* The first that is set decides, as in the C library. */
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (!value || !*value)
            continue;
        return strstr(value, "UTF-8") || strstr(value, "utf8") || strstr(value, "UTF8") ||
                       strstr(value, "utf-8")
                   ? QC_BARS_BLOCKS
                   : QC_BARS_ASCII;
    }
    return QC_BARS_ASCII;
}

enum { PART_WEIGHTS, PART_KV, PART_WORKSPACE, PART_CONTEXT, PART_FREE, PART_COUNT };

/* U+2588, U+2593, U+2592, U+2591, U+00B7 */
static const char *const glyphs[2][PART_COUNT] = {
    [QC_BARS_ASCII] = {"#", "k", "w", "c", "."},
    [QC_BARS_BLOCKS] = {"\xe2\x96\x88", "\xe2\x96\x93", "\xe2\x96\x92", "\xe2\x96\x91", "\xc2\xb7"},
};
static const char *const part_names[PART_COUNT] = {"weights", "KV cache", "workspace",
                                                   "CUDA context", "free"};

qc_status qc_fit_bar(const qc_fit_device *d, unsigned cells, qc_bar_style style, qc_strbuf *out,
                     qc_error *err)
{
    const uint64_t parts[PART_FREE] = {d->weight_bytes, d->kv_bytes, d->workspace_bytes,
                                       d->context_bytes};
    double sum = 0.0;
    unsigned drawn = 0;
    if (cells > QC_BAR_CELLS)
        cells = QC_BAR_CELLS;
    QC_TRY(qc_strbuf_adds(out, "[", err));
    for (int part = 0; part < PART_COUNT; part++) {
        unsigned end = cells;
        if (part < PART_FREE) {
            sum += (double)parts[part];
            double share = d->budget_bytes ? sum / (double)d->budget_bytes : 1.0;
            end = share >= 1.0 ? cells : (unsigned)(share * cells + 0.5);
        }
        for (; drawn < end; drawn++)
            QC_TRY(qc_strbuf_adds(out, glyphs[style][part], err));
    }
    return qc_strbuf_adds(out, "]", err);
}

/* ---- text ---- */

static uint64_t needed_bytes(const qc_fit_device *d)
{
    return d->weight_bytes + d->kv_bytes + d->workspace_bytes + d->context_bytes;
}

qc_status qc_fit_verdict(const qc_fit_report *r, qc_strbuf *out, qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES];
    const qc_fit *fit = r->fit;
    if (fit->fits)
        return QC_OK;
    QC_TRY(qc_strbuf_addf(out, err, "short by %s on %s", qc_text_bytes(size, fit->short_by_bytes),
                          fit->budget->devices[fit->short_device].name));
    for (uint32_t i = 0; i < r->suggestion_count; i++)
        QC_TRY(qc_strbuf_addf(out, err, "%s%s", i == 0 ? "; would fit with " : ", or with ",
                              r->suggestions[i].change));
    return QC_OK;
}

/* What the choice gains over one scheme for all. */
static qc_status add_choice(const qc_auto_result *a, qc_strbuf *out, qc_error *err)
{
    static const char *const names[] = {"nf4", "nf4-32", "int8", "16 bit"};
    QC_TRY(qc_strbuf_addf(out, err, "  error      %.3g predicted", a->predicted));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!isnan(a->uniform[i]))
            QC_TRY(qc_strbuf_addf(out, err, ", %s %.3g%s", names[i], a->uniform[i],
                                  a->uniform_fits[i] ? ""
                                  : a->spills        ? " (not without spilling)"
                                                     : " (does not fit)"));
    if (!a->measured)
        QC_TRY(qc_strbuf_adds(out,
                              "\n             (no weights to measure: errors are those of normal "
                              "random ones)",
                              err));
    return qc_strbuf_adds(out, "\n", err);
}

static qc_status add_head(const qc_fit_report *r, qc_strbuf *out, qc_error *err)
{
    char model[512], count[QC_SIZE_TEXT_BYTES], size[QC_SIZE_TEXT_BYTES];
    (void)snprintf(model, sizeof model, "%s", r->model);
    qc_console_printable(model);
    int unknown = r->fit->geometry->cache_unknown;
    QC_TRY(qc_strbuf_addf(out, err, "%s as %s on %s: %s%s\n\n", model, r->to, r->fit->budget->text,
                          r->fit->fits ? "fits" : "does not fit",
                          unknown && r->fit->fits ? " without a KV cache, whose size is not known"
                                                  : ""));
    QC_TRY(qc_strbuf_addf(out, err, "  weights    %s in %s parameters",
                          qc_text_bytes(size, r->fit->weight_bytes),
                          qc_text_count(count, r->parameters)));
    if (r->parameters)
        QC_TRY(qc_strbuf_addf(out, err, ", %.3f bits each",
                              8.0 * (double)r->fit->weight_bytes / (double)r->parameters));
    QC_TRY(qc_strbuf_addf(out, err, "\n  files      %s, uncompressed\n",
                          qc_text_bytes(size, r->file_bytes)));
    for (uint32_t i = 0; i < r->scheme_count; i++) {
        const qc_fit_scheme *s = &r->schemes[i];
        QC_TRY(qc_strbuf_addf(out, err, "  %-10s %s in %" PRIu64 " tensor%s\n", s->name,
                              qc_text_bytes(size, s->bytes), s->tensors,
                              s->tensors == 1 ? "" : "s"));
    }
    if (r->chosen)
        QC_TRY(add_choice(r->chosen, out, err));
    if (unknown)
        return qc_strbuf_adds(out, "  KV cache   ?\n", err);
    if (r->generates) {
        QC_TRY(qc_strbuf_addf(out, err, "  KV cache   %s: context %s, batch %" PRIu64,
                              qc_text_bytes(size, r->fit->kv_bytes),
                              qc_text_count(count, r->use->context), r->use->batch));
        QC_TRY(qc_strbuf_addf(out, err, ", %s a token\n",
                              qc_text_bytes(size, r->fit->kv_bytes_per_token)));
    }
    return QC_OK;
}

static qc_status add_size(qc_table *t, uint64_t bytes, qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES];
    return qc_table_cell(t, bytes == QC_NO_LIMIT ? "no limit" : qc_text_bytes(size, bytes), err);
}

static qc_status add_devices(const qc_fit_report *r, qc_strbuf *out, qc_error *err)
{
    qc_table t;
    qc_table_init(&t, r->arena);
    qc_table_column(&t, "device", QC_ALIGN_LEFT);
    qc_table_column(&t, "card", QC_ALIGN_LEFT);
    qc_table_column(&t, "budget", QC_ALIGN_RIGHT);
    qc_table_column(&t, "weights", QC_ALIGN_RIGHT);
    qc_table_column(&t, "KV cache", QC_ALIGN_RIGHT);
    qc_table_column(&t, "workspace", QC_ALIGN_RIGHT);
    qc_table_column(&t, "CUDA context", QC_ALIGN_RIGHT);
    qc_table_column(&t, "free", QC_ALIGN_RIGHT);
    qc_table_column(&t, "short by", QC_ALIGN_RIGHT);
    qc_table_column(&t, "layers", QC_ALIGN_RIGHT);
    for (uint32_t i = 0; i < r->fit->budget->count; i++) {
        const qc_fit_device *d = &r->fit->devices[i];
        QC_TRY(qc_table_cell(&t, d->device->name, err));
        QC_TRY(qc_table_cell(&t, d->device->card ? d->device->card->name : "", err));
        QC_TRY(add_size(&t, d->budget_bytes, err));
        QC_TRY(add_size(&t, d->weight_bytes, err));
        if (r->fit->geometry->cache_unknown)
            QC_TRY(qc_table_cell(&t, "?", err));
        else
            QC_TRY(add_size(&t, d->kv_bytes, err));
        QC_TRY(add_size(&t, d->workspace_bytes, err));
        QC_TRY(add_size(&t, d->context_bytes, err));
        QC_TRY(add_size(&t, d->budget_bytes == QC_NO_LIMIT ? QC_NO_LIMIT : d->free_bytes, err));
        if (d->short_by_bytes)
            QC_TRY(add_size(&t, d->short_by_bytes, err));
        else
            QC_TRY(qc_table_cell(&t, "", err));
        if (d->layers == 0)
            QC_TRY(qc_table_cell(&t, "-", err));
        else if (d->layers == 1)
            QC_TRY(qc_table_cellf(&t, err, "%" PRIu32, d->first_layer));
        else
            QC_TRY(qc_table_cellf(&t, err, "%" PRIu32 "-%" PRIu32, d->first_layer,
                                  d->first_layer + d->layers - 1));
    }
    QC_TRY(qc_strbuf_adds(out, "\n", err));
    return qc_table_render(&t, 2, out, err);
}

/* Bars to one scale, the largest budget of a limit being the longest. */
static qc_status add_bars(const qc_fit_report *r, qc_bar_style style, qc_strbuf *out, qc_error *err)
{
    enum { MIN_CELLS = 8 };
    char used[QC_SIZE_TEXT_BYTES], size[QC_SIZE_TEXT_BYTES];
    const qc_fit *fit = r->fit;
    uint64_t largest = 0;
    size_t name_width = 0;
    for (uint32_t i = 0; i < fit->budget->count; i++) {
        uint64_t b = fit->devices[i].budget_bytes;
        size_t len = strlen(fit->budget->devices[i].name);
        name_width = len > name_width ? len : name_width;
        if (b != QC_NO_LIMIT && b > largest)
            largest = b;
    }
    QC_TRY(qc_strbuf_adds(out, "\n", err));
    for (uint32_t i = 0; i < fit->budget->count; i++) {
        const qc_fit_device *d = &fit->devices[i];
        if (d->budget_bytes == QC_NO_LIMIT || largest == 0)
            continue;
        unsigned cells =
            (unsigned)((double)d->budget_bytes / (double)largest * (double)QC_BAR_CELLS + 0.5);
        cells = cells < MIN_CELLS ? MIN_CELLS : cells;
        QC_TRY(qc_strbuf_addf(out, err, "  %-*s  ", (int)name_width, d->device->name));
        QC_TRY(qc_fit_bar(d, cells, style, out, err));
        QC_TRY(qc_strbuf_addf(out, err, "%*s %s of %s%s\n", (int)(QC_BAR_CELLS - cells), "",
                              qc_text_bytes(used, needed_bytes(d)),
                              qc_text_bytes(size, d->budget_bytes),
                              d->short_by_bytes ? " (!)" : ""));
    }
    QC_TRY(qc_strbuf_addf(out, err, "  %*s ", (int)name_width, ""));
    for (int part = 0; part < PART_COUNT; part++)
        QC_TRY(qc_strbuf_addf(out, err, " %s %s", glyphs[style][part], part_names[part]));
    return qc_strbuf_adds(out, "\n", err);
}

static qc_status add_found(uint64_t found, const char *unit, qc_strbuf *out, qc_error *err)
{
    char count[QC_SIZE_TEXT_BYTES];
    if (found == 0)
        return qc_strbuf_adds(out, "none fits", err);
    if (found == QC_NO_LIMIT)
        return qc_strbuf_adds(out, "no limit", err);
    return qc_strbuf_addf(out, err, "%s%s", qc_text_count(count, found), unit);
}

static qc_status add_search(const qc_fit_report *r, qc_strbuf *out, qc_error *err)
{
    uint64_t limit = r->fit->geometry->max_context;
    if (!r->generates || r->fit->geometry->cache_unknown)
        return QC_OK;
    QC_TRY(qc_strbuf_adds(out, "\n  longest context at batch 1      ", err));
    QC_TRY(add_found(r->max_context, " tokens", out, err));
    if (limit && r->max_context == limit)
        QC_TRY(qc_strbuf_adds(out, ", the model's limit", err));
    QC_TRY(qc_strbuf_adds(out, "\n  largest batch at this context   ", err));
    QC_TRY(add_found(r->max_batch, "", out, err));
    return qc_strbuf_adds(out, "\n", err);
}

static int uses_disk(const qc_fit *fit)
{
    for (uint32_t i = 0; i < fit->budget->count; i++)
        if (fit->budget->devices[i].tier == QC_TIER_DISK && fit->devices[i].segments)
            return 1;
    return 0;
}

qc_status qc_fit_report_text(const qc_fit_report *r, qc_bar_style style, qc_strbuf *out,
                             qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES], time[QC_SIZE_TEXT_BYTES];
    const qc_fit *fit = r->fit;
    QC_TRY(add_head(r, out, err));
    QC_TRY(add_devices(r, out, err));
    QC_TRY(add_bars(r, style, out, err));
    QC_TRY(add_search(r, out, err));
    if (fit->transfer_bytes_per_token)
        QC_TRY(qc_strbuf_addf(
            out, err, "  spilled to the host%s: %s over its link for every token, %s at least\n",
            uses_disk(fit) ? " and to disk" : "",
            qc_text_bytes(size, fit->transfer_bytes_per_token),
            qc_text_seconds(time, fit->transfer_seconds)));
    if (!fit->fits) {
        QC_TRY(qc_strbuf_adds(out, "\n", err));
        QC_TRY(qc_fit_verdict(r, out, err));
        QC_TRY(qc_strbuf_adds(out, "\n", err));
    }
    return QC_OK;
}
