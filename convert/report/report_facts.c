#include "convert/report/report_facts.h"

#include "base/text.h"
#include "convert/model/recipe_stored.h"
#include "convert/model/recipe_tables.h"
#include "convert/term/glob.h"
#include "convert/term/progress.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

double qc_report_sqnr(double rel_mse)
{
    return -10.0 * log10(rel_mse);
}

int qc_report_is_4_bit(const qc_report_form *f)
{
    return f->ops->bits == 4;
}

int qc_report_code(const qc_report_form *f, unsigned i)
{
    return (int)i - (qc_form_is_table(f->ops) ? 0 : f->ops->zero);
}

void qc_report_indices(uint64_t at[QC_MAX_DIMS], const uint64_t *dims, unsigned ndim,
                       uint64_t index)
{
    for (unsigned d = ndim; d-- > 0;) {
        at[d] = dims[d] ? index % dims[d] : 0;
        index = dims[d] ? index / dims[d] : 0;
    }
}

const char *qc_report_place(char out[QC_REPORT_PLACE_BYTES], const uint64_t *dims, unsigned ndim,
                            uint64_t index)
{
    uint64_t at[QC_MAX_DIMS];
    size_t len = 1;
    qc_report_indices(at, dims, ndim, index);
    memcpy(out, "[", 2);
    for (unsigned d = 0; d < ndim; d++) {
        int n =
            snprintf(out + len, QC_REPORT_PLACE_BYTES - len, "%s%" PRIu64, d ? ", " : "", at[d]);
        len += n > 0 ? (size_t)n : 0;
    }
    (void)snprintf(out + len, QC_REPORT_PLACE_BYTES - len, "]");
    return out;
}

/* ---- names ----------------------------------------------------------------------------------- */

/* Returns the length of the component at s if that is a number, else 0. */
static size_t number_at(const char *s)
{
    size_t n = 0;
    while (isdigit((unsigned char)s[n]))
        n++;
    return n > 0 && (s[n] == '.' || s[n] == '\0') ? n : 0;
}

int qc_report_layer_of(const char *name, uint32_t *layer)
{
    for (const char *s = name; *s; s++) {
        size_t n = s == name || s[-1] == '.' ? number_at(s) : 0;
        if (n == 0 || n > 8)
            continue;
        *layer = 0;
        for (size_t i = 0; i < n; i++)
            *layer = *layer * 10 + (uint32_t)(s[i] - '0');
        return 0;
    }
    return 1;
}

/* Replaces every number by '*' and drops ".weight" and ".weight_packed". */
static qc_status pattern_of(const char **out, const char *name, qc_arena *arena, qc_error *err)
{
    static const char *const tails[] = {".weight", ".weight_packed"};
    size_t len = strlen(name), used = 0;
    for (size_t i = 0; i < sizeof tails / sizeof *tails; i++)
        if (qc_ends_with(name, tails[i]))
            len = strlen(name) - strlen(tails[i]);
    char *to = NULL;
    QC_TRY(qc_arena_alloc(arena, &to, len + 2, 1, err));
    for (size_t i = 0; i < len;) {
        size_t n = i == 0 || name[i - 1] == '.' ? number_at(name + i) : 0;
        if (n > 0 && i + n <= len) {
            to[used++] = '*';
            i += n;
        } else {
            to[used++] = name[i++];
        }
    }
    *out = to;
    return QC_OK;
}

/* Returns how many bytes b has in common with the first `len` of a, in whole components. */
static size_t common_bytes(const char *a, size_t len, const char *b)
{
    size_t same = 0;
    for (size_t i = 0; i < len && a[i] == b[i]; i++)
        if (a[i] == '.')
            same = i + 1;
    return same;
}

qc_status qc_report_kind_names(const char **kinds, const char *const *names, uint32_t count,
                               qc_arena *arena, qc_error *err)
{
    const char *first = NULL;
    size_t common = 0;
    for (uint32_t i = 0; i < count; i++) {
        QC_TRY(pattern_of(&kinds[i], names[i], arena, err));
        if (!strchr(kinds[i], '*'))
            continue;
        common = first ? common_bytes(first, common, kinds[i])
                       : common_bytes(kinds[i], strlen(kinds[i]), kinds[i]);
        first = first ? first : kinds[i];
    }
    /* Where the names are layers alone, "0" and "1", something must be left of them. */
    for (uint32_t i = 0; first && i < count; i++)
        if (strncmp(kinds[i], first, common) == 0)
            kinds[i] += common;
    return QC_OK;
}

/* ---- weights --------------------------------------------------------------------------------- */

static void form_name(char out[QC_REPORT_FORM_BYTES], const char *scheme, const qc_stored_weight *s)
{
    if (qc_stored_block(s) == 0)
        (void)snprintf(out, QC_REPORT_FORM_BYTES, "%s, a scale per row", scheme);
    else
        (void)snprintf(out, QC_REPORT_FORM_BYTES, "%s, blocks of %" PRIu64 "%s", scheme,
                       s->block_elems, s->nested_block_elems ? ", 8-bit scales" : "");
}

/* There are some ten schemes, eight block sizes, and scales quantized or not; no real output has
 * more forms than there is room for. */
static qc_status form_of(qc_report *r, uint32_t *form, const char *scheme,
                         const qc_stored_weight *s, qc_error *err)
{
    char name[QC_REPORT_FORM_BYTES];
    form_name(name, scheme, s);
    for (*form = 0; *form < r->form_count; ++*form)
        if (strcmp(r->forms[*form].name, name) == 0)
            return QC_OK;
    if (r->form_count == QC_REPORT_MAX_FORMS)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%s: expected at most %u forms of quantized weights, found more", r->call->model,
                QC_REPORT_MAX_FORMS);
    qc_report_form *f = &r->forms[r->form_count++];
    memcpy(f->name, name, sizeof f->name);
    f->scheme = scheme;
    f->ops = qc_schemes[s->stored_as].form;
    return QC_OK;
}

static qc_status add_weight(qc_report *r, uint32_t tensor, qc_error *err)
{
    const qc_tensor_facts *tf = &r->facts.tensors[tensor];
    qc_report_weight *w = &r->weights[r->weight_count++];
    w->name = r->facts.model->tensors[tensor].name;
    w->tensor = tensor;
    w->stored = tf->stored;
    w->elems = tf->elems;
    w->bytes = tf->bytes;
    w->outputs = tf->written ? tf->written->outputs : NULL;
    QC_TRY(form_of(r, &w->form, tf->scheme, tf->stored, err));
    if (tf->written && tf->written->has_error) {
        w->has_error = 1;
        w->rel_mse = tf->written->rel_mse;
        w->max_err = tf->written->max_err;
        w->max_index = tf->written->max_err_index;
        if (w->elems > 0 && w->max_index >= w->elems)
            QC_FAIL(err, QC_ERR_CHECK,
                    "%s: tensor '%s': the place of its largest error is %" PRIu64
                    ", expected less than its %" PRIu64 " elements",
                    QC_MANIFEST_NAME, w->name, w->max_index, w->elems);
    }
    r->quantized_elems += w->elems;
    r->quantized_bytes += w->bytes;
    r->scale_bytes += w->bytes - r->facts.model->tensors[tensor].bytes;
    return QC_OK;
}

static int compare_layers(const void *a, const void *b)
{
    const uint32_t *x = a, *y = b;
    return *x < *y ? -1 : *x > *y;
}

static uint32_t layer_index(const qc_report *r, uint32_t number)
{
    const uint32_t *found =
        bsearch(&number, r->layers, r->layer_count, sizeof number, compare_layers);
    return found ? (uint32_t)(found - r->layers) : QC_REPORT_NO_LAYER;
}

static qc_status find_layers(qc_report *r, qc_error *err)
{
    uint32_t unique = 0;
    QC_TRY(qc_arena_array(r->call->arena, &r->layers, (size_t)r->weight_count + 1, err));
    for (uint32_t i = 0; i < r->weight_count; i++)
        r->layer_count += qc_report_layer_of(r->weights[i].name, &r->layers[r->layer_count]) == 0;
    qsort(r->layers, r->layer_count, sizeof *r->layers, compare_layers);
    for (uint32_t i = 0; i < r->layer_count; i++)
        if (i == 0 || r->layers[i] != r->layers[unique - 1])
            r->layers[unique++] = r->layers[i];
    r->layer_count = unique;
    for (uint32_t i = 0; i < r->weight_count; i++) {
        uint32_t number = 0;
        r->weights[i].layer = qc_report_layer_of(r->weights[i].name, &number) == 0
                                  ? layer_index(r, number)
                                  : QC_REPORT_NO_LAYER;
    }
    return QC_OK;
}

typedef struct {
    const char *name;
    uint32_t form, weight;
} named_kind;

/* Sorts kinds in the order in which a layer has them, which natural order of names gives only by
 * chance. */
static int compare_kinds(const void *a, const void *b)
{
    const named_kind *x = a, *y = b;
    int c = qc_natural_compare(x->name, y->name);
    if (c != 0)
        return c;
    return x->form < y->form ? -1 : x->form > y->form ? 1 : x->weight < y->weight ? -1 : 1;
}

static qc_status find_kinds(qc_report *r, qc_error *err)
{
    uint32_t n = r->weight_count;
    const char **names = NULL;
    QC_TRY(qc_arena_array(r->call->arena, &names, (size_t)n + 1, err));
    const char **kinds = NULL;
    QC_TRY(qc_arena_array(r->call->arena, &kinds, (size_t)n + 1, err));
    named_kind *sorted = NULL;
    QC_TRY(qc_arena_array(r->call->arena, &sorted, (size_t)n + 1, err));
    for (uint32_t i = 0; i < n; i++)
        names[i] = r->weights[i].name;
    QC_TRY(qc_report_kind_names(kinds, names, n, r->call->arena, err));
    for (uint32_t i = 0; i < n; i++)
        sorted[i] = (named_kind){kinds[i], r->weights[i].form, i};
    qsort(sorted, n, sizeof *sorted, compare_kinds);
    uint32_t kind_count = 0, series_count = 0;
    for (uint32_t i = 0; i < n; i++) {
        int other = i == 0 || strcmp(sorted[i].name, sorted[i - 1].name) != 0;
        series_count += other ? 1 : 0;
        kind_count += other || sorted[i].form != sorted[i - 1].form ? 1 : 0;
    }
    QC_TRY(qc_arena_array(r->call->arena, &r->kinds, kind_count + 1, err));
    QC_TRY(qc_arena_array(r->call->arena, &r->series, series_count + 1, err));
    for (uint32_t i = 0; i < n; i++) {
        int other = i == 0 || strcmp(sorted[i].name, sorted[i - 1].name) != 0;
        if (other)
            r->series[r->series_count++] = sorted[i].name;
        if (other || sorted[i].form != sorted[i - 1].form)
            r->kinds[r->kind_count++] =
                (qc_report_kind){.name = sorted[i].name, .form = sorted[i].form};
        r->weights[sorted[i].weight].kind = r->kind_count - 1;
    }
    return QC_OK;
}

/* ---- what was left --------------------------------------------------------------------------- */

/* The last rule that matches decides, as it did when the output was made. */
static const char *rule_for(const qc_manifest *m, const char *name)
{
    for (size_t i = m ? m->rule_count : 0; i-- > 0;) {
        const char *glob = strchr(m->rules[i], ' ');
        if (glob && qc_glob_match(glob + 1, name))
            return strncmp(m->rules[i], "keep ", 5) == 0 ? glob + 1 : NULL;
    }
    return NULL;
}

/* Returns the scheme of the integers for compressed-tensors with the most bits, or NULL. */
static const qc_scheme_row *integers_of(const qc_report *r)
{
    const qc_scheme_row *found = NULL;
    for (uint32_t i = 0; i < r->weight_count; i++) {
        const qc_scheme_row *row = &qc_schemes[r->weights[i].stored->stored_as];
        if (row->format == QC_FORMAT_COMPRESSED_TENSORS && (!found || row->bits > found->bits))
            found = row;
    }
    return found;
}

static qc_status reason(const qc_report *r, uint32_t tensor, const char **why, qc_error *err)
{
    static const struct {
        const char *role, *why;
    } by_role[] = {
        {"embedding", "looked up row by row, not multiplied"},
        {"head", "what the model says depends on it directly; loaders keep it in 16 bit"},
        {"router", "small, and it decides which experts are asked"},
        {"norm", "a vector: nothing to save"},
        {"bias", "a vector: nothing to save"},
        {"conv", "a convolution: loaders keep it in 16 bit"},
        {"packed", "quantized before, in a form that was passed on"},
        {"state", "scales of a weight that was quantized before"},
    };
    const qc_manifest *m = r->facts.manifest;
    const qc_tensor_facts *tf = &r->facts.tensors[tensor];
    const char *name = r->facts.model->tensors[tensor].name;
    const char *glob = rule_for(m, name);
    int linear = tf->role && strcmp(tf->role, "linear") == 0;
    if (glob && linear)
        return qc_arena_printf(r->call->arena, why, err, "--keep %s", glob);
    *why = linear && m && strcmp(m->to, "auto") == 0 ? "--to auto chose 16 bit for it"
           : linear && m && m->block_elems && integers_of(r) && tf->dims[1] % m->block_elems
               ? "its rows are no whole groups"
           : linear ? "a linear layer that was left as it is (docs/recipes.md)"
                    : "not the weight of a linear layer";
    for (size_t i = 0; tf->role && i < sizeof by_role / sizeof *by_role; i++)
        if (strcmp(tf->role, by_role[i].role) == 0)
            *why = by_role[i].why;
    return QC_OK;
}

static int compare_left(const void *a, const void *b)
{
    const qc_report_left *x = a, *y = b;
    return x->bytes > y->bytes ? -1 : x->bytes < y->bytes ? 1 : strcmp(x->example, y->example);
}

#define MAX_LEFT 64u

static qc_status find_left(qc_report *r, qc_error *err)
{
    QC_TRY(qc_arena_array(r->call->arena, &r->left, MAX_LEFT, err));
    for (size_t i = 0; i < r->facts.model->tensor_count; i++) {
        uint32_t t = r->facts.order[i];
        const qc_tensor_facts *tf = &r->facts.tensors[t];
        const char *why = NULL, *role = tf->role ? tf->role : "not known";
        uint32_t at = 0;
        if (tf->stored || (tf->is_state && tf->owner != QC_NO_OWNER))
            continue;
        QC_TRY(reason(r, t, &why, err));
        while (at < r->left_count &&
               (strcmp(r->left[at].role, role) != 0 || strcmp(r->left[at].why, why) != 0))
            at++;
        if (at == MAX_LEFT)
            at--; /* if there are very many rules, the last ones share a row */
        else if (at == r->left_count)
            r->left[r->left_count++] = (qc_report_left){
                .role = role, .why = why, .example = r->facts.model->tensors[t].name};
        r->left[at].tensors++;
        r->left[at].elems += tf->is_counted ? tf->elems : 0;
        r->left[at].bytes += tf->bytes;
    }
    qsort(r->left, r->left_count, sizeof *r->left, compare_left);
    return QC_OK;
}

/* ---- sizes and the command ------------------------------------------------------------------- */

static void find_sizes(qc_report *r)
{
    const qc_facts *f = &r->facts;
    for (size_t i = 0; f->manifest && i < f->manifest->source_count; i++)
        r->source_bytes += f->manifest->sources[i].bytes;
    for (size_t i = 0; i < f->model->tensor_count; i++) {
        const qc_tensor_facts *tf = &f->tensors[i];
        if (tf->stored)
            r->plain_bytes +=
                tf->elems * (qc_dtype_bits(tf->coded ? tf->coded->dtype : tf->stored->dtype) / 8);
        else if (!tf->is_state || tf->owner == QC_NO_OWNER)
            r->plain_bytes += tf->bytes;
    }
}

/* Quotes a name so that a shell reads it back as it is. */
static void quoted(qc_strbuf *out, const char *text)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "_-+=:,./";
    if (*text && strspn(text, plain) == strlen(text)) {
        qc_strbuf_puts(out, text);
        return;
    }
    qc_strbuf_puts(out, "'");
    for (const char *s = text; *s; s++)
        if (*s == '\'')
            qc_strbuf_puts(out, "'\\''");
        else
            qc_strbuf_put(out, s, 1);
    qc_strbuf_puts(out, "'");
}

/* Files are named without a folder, because the manifest does not have one. */
static void calibration_text(const qc_manifest_calibration *c, qc_strbuf *out)
{
    qc_strbuf_putf(out, " --%s ", c->hessians ? "hessians" : "calibrate");
    quoted(out, c->hessians ? c->hessians : c->text);
    if (!c->hessians)
        qc_strbuf_putf(out, " --calibration-tokens %" PRIu64 " --calibration-context %" PRIu64,
                       c->tokens, c->context);
    if (c->damping > 0)
        qc_strbuf_putf(out, " --damping %.6g", c->damping);
    qc_strbuf_putf(out, " --sided %s", c->sided);
}

static void command_text(const qc_report *r, qc_strbuf *out)
{
    const qc_manifest *m = r->facts.manifest;
    const qc_scheme_row *integers = integers_of(r);
    qc_strbuf_putf(out, "qconv --to %s", m->to);
    if (integers)
        qc_strbuf_putf(
            out, " --format %s%s", qc_format_name(integers->format),
            integers->bits == 8 && integers->activation_bits == 16 ? " --activation-bits 16" : "");
    if (m->block_elems)
        qc_strbuf_putf(out, " --block-size %" PRIu64, m->block_elems);
    else if (strcmp(m->to, qc_to_name(QC_TO_INT4)) == 0)
        qc_strbuf_puts(out, " --block-size channel");
    if (m->block_elems && !m->double_quant && !integers)
        qc_strbuf_puts(out, " --no-double-quant");
    /* This is written even where it is the default. */
    if (r->scale)
        qc_strbuf_putf(out, " --scale %s", r->scale);
    if (m->calibration)
        calibration_text(m->calibration, out);
    for (size_t i = 0; i < m->adapter_count; i++) {
        qc_strbuf_puts(out, " --lora ");
        quoted(out, m->adapters[i].name);
        if (m->adapters[i].scale != 1.0)
            qc_strbuf_putf(out, ":%.17g", m->adapters[i].scale);
    }
    if (strcmp(m->rest, "keep") != 0)
        qc_strbuf_putf(out, " --rest %s", m->rest);
    for (size_t i = 0; i < m->rule_count; i++) {
        const char *glob = strchr(m->rules[i], ' ');
        if (!glob)
            continue;
        qc_strbuf_putf(out, " --%.*s ", (int)(glob - m->rules[i]), m->rules[i]);
        quoted(out, glob + 1);
    }
    if (m->placement.device_count) {
        qc_strbuf_puts(out, " --vram ");
        quoted(out, m->placement.vram);
        qc_strbuf_putf(out, " --margin %.6g --context %" PRIu64 " --batch %" PRIu64,
                       m->placement.margin, m->placement.context, m->placement.batch);
    }
    if (m->compressed && m->level != 1)
        qc_strbuf_putf(out, " --compress zstd:%d", m->level);
    else if (!m->compressed)
        qc_strbuf_puts(out, " --compress none");
    qc_strbuf_putf(out, " --max-shard-size %" PRIu64 " MODEL OUT", m->max_shard_bytes);
}

static qc_status make_command(qc_report *r, qc_error *err)
{
    qc_strbuf text;
    if (!r->facts.manifest)
        return QC_OK;
    qc_strbuf_init(&text, 1u << 20);
    command_text(r, &text);
    qc_status st = qc_strbuf_status(&text, err);
    if (st == QC_OK)
        st = qc_arena_strndup(r->call->arena, &r->command, text.data, text.len, err);
    qc_strbuf_deinit(&text);
    return st;
}

qc_status qc_report_gather(qc_report *r, const qc_call *call, qc_error *err)
{
    uint32_t count = 0;
    memset(r, 0, sizeof *r);
    r->call = call;
    QC_TRY(qc_facts_gather(&r->facts, call, err));
    qc_status st = QC_OK;
    const qc_facts *f = &r->facts;
    for (size_t i = 0; i < f->model->tensor_count; i++)
        count += f->tensors[i].stored != NULL;
    if (count == 0)
        QC_TRY_GOTO(st, failed, QC_ERROR(err, QC_ERR_INPUT, QC_STORED_NONE, call->model));
    QC_TRY_GOTO(st, failed, qc_arena_array(call->arena, &r->forms, QC_REPORT_MAX_FORMS, err));
    QC_TRY_GOTO(st, failed, qc_arena_array(call->arena, &r->weights, count, err));
    for (size_t i = 0; i < f->model->tensor_count; i++)
        if (f->tensors[f->order[i]].stored)
            QC_TRY_GOTO(st, failed, add_weight(r, f->order[i], err));
    r->errors = f->manifest ? QC_ERRORS_MANIFEST : QC_ERRORS_NONE;
    QC_TRY_GOTO(st, failed, find_layers(r, err));
    QC_TRY_GOTO(st, failed, find_kinds(r, err));
    QC_TRY_GOTO(st, failed, find_left(r, err));
    find_sizes(r);
    /* --to keep passes on what somebody else made. */
    if (f->manifest && strcmp(f->manifest->to, "keep") != 0)
        r->scale = f->manifest->scale ? f->manifest->scale : "absmax";
    QC_TRY_GOTO(st, failed, make_command(r, err));
    return QC_OK;
failed:
    qc_checkpoint_close(r->facts.model);
    r->facts.model = NULL;
    return st;
}

/* ---- errors against the source, as `qconv verify --against` finds them ----------------------- */

/* Places are found in MODEL but reported in OUT, where a Conv1D weight lies the other way. */
static void take(qc_report_weight *w, const qc_against_row *row)
{
    const qc_stored_weight *s = w->stored;
    uint64_t cols = s->ndim ? s->dims[s->ndim - 1] : 1;
    uint64_t r = row->transpose ? row->max_col : row->max_row;
    uint64_t c = row->transpose ? row->max_row : row->max_col;
    w->fault = row->fault;
    if (!row->measured || row->kind != QC_AGAINST_QUANTIZED || !isfinite(row->error))
        return;
    w->has_error = w->has_expected = 1;
    w->rel_mse = row->error * row->error;
    w->expected = row->expected * row->expected;
    w->max_err = row->max_error;
    w->max_index = r * cols + c;
    w->clipped = row->clipped;
}

qc_status qc_report_measure(qc_report *r, const qc_checkpoint *source, qc_error *err)
{
    qc_against_result *result = NULL;
    qc_progress *progress = NULL;
    QC_TRY(qc_arena_array(r->call->arena, &result, 1, err));
    QC_TRY(qc_progress_create(&progress, r->call, "comparing", r->facts.file_bytes, err));
    qc_status st = qc_against_run(result, r->call, r->facts.manifest, progress, err);
    qc_progress_destroy(progress);
    QC_TRY(st);
    /* Both are in the same order, and OUT may have more tensors than weights. */
    for (uint32_t i = 0, k = 0; i < r->weight_count; i++) {
        qc_report_weight *w = &r->weights[i];
        while (k < result->count && qc_natural_compare(result->rows[k].name, w->name) < 0)
            k++;
        w->has_error = 0;
        if (k < result->count && strcmp(result->rows[k].name, w->name) == 0)
            take(w, &result->rows[k]);
    }
    r->against = result;
    r->errors = QC_ERRORS_SOURCE;
    r->source_bytes = 0;
    for (size_t i = 0; i < source->file_count; i++)
        r->source_bytes += source->files[i].file_bytes;
    return QC_OK;
}

/* ---- sums: a mean of relative errors counts each weight by its elements, because the manifest
 * does not have the sums of squares */

static int compare_doubles(const void *a, const void *b)
{
    const double *x = a, *y = b;
    return *x < *y ? -1 : *x > *y;
}

/* `values` has room for all weights. */
static void sum_form(qc_report *r, uint32_t f, double *values)
{
    qc_report_form *form = &r->forms[f];
    double sum = 0.0, elems = 0.0;
    for (uint32_t i = 0; i < r->weight_count; i++) {
        const qc_report_weight *w = &r->weights[i];
        if (w->form != f)
            continue;
        form->weights++;
        form->elems += w->elems;
        form->bytes += w->bytes;
        if (!w->has_error)
            continue;
        values[form->with_error++] = w->rel_mse;
        sum += w->rel_mse * (double)w->elems;
        elems += (double)w->elems;
    }
    size_t n = form->with_error;
    if (n == 0)
        return;
    qsort(values, n, sizeof *values, compare_doubles);
    form->mean = elems > 0 ? sum / elems : 0.0;
    form->least = values[0];
    form->most = values[n - 1];
    form->median = n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

/* elems is [kind_count], with zeros; it gets the elements of weights with an error. */
static void sum_kinds(qc_report *r, double *elems)
{
    for (uint32_t i = 0; i < r->weight_count; i++) {
        qc_report_weight *w = &r->weights[i];
        qc_report_kind *k = &r->kinds[w->kind];
        double median = r->forms[w->form].median;
        k->weights++;
        k->elems += w->elems;
        k->bytes += w->bytes;
        if (!w->has_error)
            continue;
        w->over_median = median > 0 ? w->rel_mse / median : 0.0;
        k->mean += w->rel_mse * (double)w->elems; /* divided below */
        elems[w->kind] += (double)w->elems;
        if (k->with_error == 0 || w->rel_mse > k->most) {
            k->most = w->rel_mse;
            k->most_of = i;
        }
        if (k->with_error == 0 || w->max_err > k->max_err) {
            k->max_err = w->max_err;
            k->max_of = i;
        }
        k->with_error++;
    }
    for (uint32_t k = 0; k < r->kind_count; k++)
        r->kinds[k].mean = elems[k] > 0 ? r->kinds[k].mean / elems[k] : 0.0;
}

static void add_to_cell(qc_report_cell *c, const qc_report_weight *w)
{
    double elems = (double)c->elems, more = (double)w->elems;
    if (c->count == 0) {
        c->form = w->form;
        c->least = c->most = w->rel_mse;
    }
    c->mixed |= c->form != w->form;
    c->least = w->rel_mse < c->least ? w->rel_mse : c->least;
    c->most = w->rel_mse > c->most ? w->rel_mse : c->most;
    c->mean = elems + more > 0 ? (c->mean * elems + w->rel_mse * more) / (elems + more) : 0.0;
    c->elems += w->elems;
    c->count++;
}

static qc_status sum_cells(qc_report *r, qc_error *err)
{
    /* Where there are so many cells, the names have no order, and there would be nothing to see. */
    if ((uint64_t)r->series_count * r->layer_count > QC_REPORT_MAX_CELLS)
        return QC_OK;
    uint32_t *series = NULL;
    QC_TRY(qc_arena_array(r->call->arena, &series, (size_t)r->kind_count + 1, err));
    for (uint32_t k = 1; k < r->kind_count; k++)
        series[k] = series[k - 1] + (strcmp(r->kinds[k].name, r->kinds[k - 1].name) != 0);
    QC_TRY(qc_arena_array(r->call->arena, &r->cells, (size_t)r->series_count * r->layer_count + 1,
                          err));
    for (uint32_t i = 0; i < r->weight_count; i++) {
        const qc_report_weight *w = &r->weights[i];
        if (w->has_error && w->layer != QC_REPORT_NO_LAYER)
            add_to_cell(&r->cells[(size_t)series[w->kind] * r->layer_count + w->layer], w);
    }
    return QC_OK;
}

typedef struct {
    double rel_mse;
    uint32_t weight;
} ranked;

static int compare_ranked(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    if (x->rel_mse != y->rel_mse)
        return x->rel_mse > y->rel_mse ? -1 : 1;
    return x->weight < y->weight ? -1 : 1;
}

static qc_status rank(qc_report *r, qc_error *err)
{
    QC_TRY(qc_arena_array(r->call->arena, &r->worst, (size_t)r->weight_count + 1, err));
    ranked *order = NULL;
    QC_TRY(qc_arena_array(r->call->arena, &order, (size_t)r->weight_count + 1, err));
    for (uint32_t i = 0; i < r->weight_count; i++)
        if (r->weights[i].has_error)
            order[r->worst_count++] = (ranked){r->weights[i].rel_mse, i};
    qsort(order, r->worst_count, sizeof *order, compare_ranked);
    for (uint32_t i = 0; i < r->worst_count; i++)
        r->worst[i] = order[i].weight;
    return QC_OK;
}

qc_status qc_report_sum_up(qc_report *r, qc_error *err)
{
    double *values = NULL, *elems = NULL;
    QC_TRY(qc_arena_array(r->call->arena, &values, (size_t)r->weight_count + 1, err));
    QC_TRY(qc_arena_array(r->call->arena, &elems, (size_t)r->kind_count + 1, err));
    for (uint32_t f = 0; f < r->form_count; f++)
        sum_form(r, f, values);
    sum_kinds(r, elems);
    QC_TRY(sum_cells(r, err));
    QC_TRY(rank(r, err));
    if (r->worst_count < r->weight_count && !r->no_errors)
        r->no_errors =
            r->errors == QC_ERRORS_NONE ? "there is no manifest, and no --against to compare with"
            : r->errors == QC_ERRORS_SOURCE ? "the source has nothing to compare them with"
                                            : "the manifest has none for them";
    return QC_OK;
}
