/* Writes what --to auto chose and why, for people and for machines. */
#include "convert/fit/auto_choice.h"

#include "base/text.h"
#include "convert/term/size_text.h"
#include "convert/term/table.h"
#include "formats/json_writer.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

unsigned qc_auto_smallest(const qc_auto_result *r)
{
    unsigned k = 0;
    while (k < QC_CANDIDATE_16BIT && isnan(r->uniform[k]))
        k++;
    return k;
}

const char *qc_auto_mixture(const qc_auto_result *r)
{
    if (!r->mixed_fp8)
        return r->mixed ? "int8 lies beside NF4" : NULL;
    if (r->mixed)
        return "int8 and FP8 as it is lie beside NF4";
    return "FP8 as it is lies beside what was quantized";
}

static void number_cell(qc_table *t, double v)
{
    if (isnan(v))
        qc_table_put(t, NULL);
    else
        qc_table_putf(t, "%.3g", v);
}

/* Adds a row; `fits` is NULL where nothing is known of the scheme. */
static void uniform_row(qc_table *t, const char *scheme, double error, const char *fits,
                        const uint64_t sums[2])
{
    qc_table_put(t, scheme);
    number_cell(t, error);
    qc_table_put(t, fits);
    qc_table_number(t, sums[0]);
    qc_table_bytes(t, sums[1]);
}

static void uniform_table(const qc_auto_result *r, qc_arena *arena, qc_strbuf *out)
{
    qc_table t;
    uint64_t all[2] = {0};
    for (unsigned c = 0; c < QC_CANDIDATES; c++) {
        all[0] += r->count_chosen[c];
        all[1] += r->bytes_chosen[c];
    }
    qc_table_begin(&t, arena, "scheme|>predicted error|fits|>weights|>bytes");
    uniform_row(&t, "auto", r->predicted, r->fits ? "yes" : "no", all);
    for (unsigned c = 0; c < QC_CANDIDATES; c++) {
        const uint64_t sums[] = {r->count_chosen[c], r->bytes_chosen[c]};
        const char *fits = r->uniform_fits[c] ? "yes" : "no";
        if (r->candidates & 1u << c || r->count_chosen[c])
            uniform_row(&t, r->rows[c].name, r->uniform[c], isnan(r->uniform[c]) ? NULL : fits,
                        sums);
    }
    qc_table_print(&t, 2, out);
}

static void group_table(const qc_auto_result *r, qc_arena *arena, qc_strbuf *out)
{
    char size[QC_SIZE_TEXT_BYTES];
    qc_table t;
    qc_table_begin(&t, arena, "group|>weights|>elements|>matters");
    for (unsigned c = 0; c < QC_CANDIDATE_16BIT; c++) {
        if (!(r->candidates & 1u << c))
            continue;
        (void)snprintf(size, sizeof size, ">%s", r->rows[c].name);
        qc_table_columns(&t, size);
    }
    qc_table_columns(&t, "chosen|>bytes|why");
    for (uint32_t g = 0; g < r->group_count; g++) {
        const qc_auto_group *group = &r->groups[g];
        qc_table_put(&t, group->name);
        qc_table_number(&t, group->weights);
        qc_table_put(&t, qc_text_count(size, group->elems));
        number_cell(&t, r->weighed ? (double)NAN : group->importance); /* the costs have it */
        for (unsigned c = 0; c < QC_CANDIDATE_16BIT; c++)
            if (r->candidates & 1u << c)
                number_cell(&t, r->weighed ? group->cost[c] : group->rel_mse[c]);
        qc_table_put(&t, r->rows[group->chosen].name);
        qc_table_bytes(&t, group->bytes[group->chosen]);
        qc_table_put(&t, group->reason ? group->reason : "");
    }
    qc_table_print(&t, 2, out);
}

/* ---- the same by kind and range of layers ---- */

/* Groups that differ only in their layer: their kind, scheme, reason and importance are the
 * same. */
typedef struct {
    const char *kind; /* the name without its first number */
    size_t head;      /* bytes of kind before that number */
    const qc_auto_group *first;
    uint64_t weights, elems, bytes;
    uint64_t begin, end;      /* the layers that are being collected, if any_layer */
    const char *ranges;       /* the layers before those: "0-3, 7" */
    unsigned ranges_left_out; /* ranges for which the line has no room */
    int any_layer;
} alike;

#define MAX_RANGES_TEXT 40u

/* Finds the first number of a name between blanks and points; its length is 0 if there is none. */
static const char *layer_of(const char *name, size_t *len, uint64_t *layer)
{
    for (const char *s = name; *s; s++) {
        size_t n = strspn(s, "0123456789");
        int begins = s == name || s[-1] == ' ' || s[-1] == '.';
        if (begins && n > 0 && n < 10 && (s[n] == ' ' || s[n] == '.')) {
            *len = n;
            *layer = strtoull(s, NULL, 10);
            return s;
        }
    }
    *len = 0;
    return name + strlen(name);
}

static int is_alike(const alike *a, const qc_auto_group *g, size_t head, const char *tail)
{
    return a->first->chosen == g->chosen && a->head == head &&
           strncmp(a->kind, g->name, head) == 0 && strcmp(a->kind + head, tail) == 0 &&
           (a->first->reason == g->reason ||
            (a->first->reason && g->reason && strcmp(a->first->reason, g->reason) == 0));
}

static qc_status close_range(alike *a, qc_arena *arena, qc_error *err)
{
    if (strlen(a->ranges) > MAX_RANGES_TEXT) {
        a->ranges_left_out++;
        return QC_OK;
    }
    if (a->begin == a->end)
        return qc_arena_printf(arena, &a->ranges, err, "%s%s%" PRIu64, a->ranges,
                               *a->ranges ? ", " : "", a->begin);
    return qc_arena_printf(arena, &a->ranges, err, "%s%s%" PRIu64 "-%" PRIu64, a->ranges,
                           *a->ranges ? ", " : "", a->begin, a->end);
}

static qc_status add_group(alike *a, const qc_auto_group *g, int has_layer, uint64_t layer,
                           qc_arena *arena, qc_error *err)
{
    a->weights += g->weights;
    a->elems += g->elems;
    a->bytes += g->bytes[g->chosen];
    if (!has_layer)
        return QC_OK;
    if (a->any_layer && layer == a->end + 1) {
        a->end = layer;
        return QC_OK;
    }
    if (a->any_layer)
        QC_TRY(close_range(a, arena, err));
    a->any_layer = 1;
    a->begin = a->end = layer;
    return QC_OK;
}

static qc_status add_alike(alike *list, uint32_t *count, const qc_auto_group *g, qc_arena *arena,
                           qc_error *err)
{
    size_t len = 0;
    uint64_t layer = 0;
    uint32_t at = 0;
    const char *number = layer_of(g->name, &len, &layer);
    size_t head = (size_t)(number - g->name);
    while (at < *count && !is_alike(&list[at], g, head, number + len))
        at++;
    if (at == *count) {
        list[at] = (alike){.head = head, .first = g, .ranges = ""};
        QC_TRY(qc_arena_printf(arena, &list[at].kind, err, "%.*s%s", (int)head, g->name,
                               number + len));
        (*count)++;
    }
    return add_group(&list[at], g, len > 0, layer, arena, err);
}

static int by_kind(const void *a, const void *b)
{
    const alike *x = a, *y = b;
    int order = strcmp(x->kind, y->kind);
    return order                                 ? order
           : x->first->chosen < y->first->chosen ? -1
                                                 : x->first->chosen > y->first->chosen;
}

static qc_status summary_table(const qc_auto_result *r, qc_arena *arena, qc_strbuf *out,
                               qc_error *err)
{
    static const char begin[] = "layer  "; /* "layer 3 mlp.up_proj" without its number */
    uint32_t count = 0;
    qc_table t;
    alike *list = NULL;
    QC_TRY(qc_arena_array(arena, &list, r->group_count + 1, err));
    for (uint32_t g = 0; g < r->group_count; g++)
        QC_TRY(add_alike(list, &count, &r->groups[g], arena, err));
    qsort(list, count, sizeof *list, by_kind);
    qc_table_begin(&t, arena, "kind|chosen|>weights|>bytes|>matters|layers|why");
    for (uint32_t i = 0; i < count; i++) {
        alike *a = &list[i];
        const char *kind = a->kind;
        if (a->any_layer)
            QC_TRY(close_range(a, arena, err));
        if (strncmp(kind, begin, sizeof begin - 1) == 0)
            kind += sizeof begin - 1;
        qc_table_put(&t, kind);
        qc_table_put(&t, r->rows[a->first->chosen].name);
        qc_table_number(&t, a->weights);
        qc_table_bytes(&t, a->bytes);
        number_cell(&t, r->weighed ? (double)NAN : a->first->importance);
        if (a->ranges_left_out)
            qc_table_putf(&t, "%s, and %u more range%s", a->ranges, a->ranges_left_out,
                          qc_plural(a->ranges_left_out));
        else
            qc_table_put(&t, a->ranges);
        qc_table_put(&t, a->first->reason ? a->first->reason : "");
    }
    qc_table_print(&t, 2, out);
    qc_strbuf_putf(out,
                   "  %" PRIu32 " weights or groups of experts; -v lists each with "
                   "its errors.\n",
                   r->group_count);
    return QC_OK;
}

static qc_status write_explanation(const qc_auto_result *r, int all, qc_arena *arena,
                                   qc_strbuf *out, qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES];
    qc_strbuf_puts(out, "Choice of schemes\n");
    uniform_table(r, arena, out);
    if (r->measured)
        qc_strbuf_putf(out, "  Errors were measured on %" PRIu64 " sampled rows (%s).\n",
                       r->sampled_rows, qc_text_bytes(size, r->sampled_bytes));
    else
        qc_strbuf_puts(out, "  There are no weights to measure: errors are those of normally "
                            "distributed weights.\n");
    if (r->mixed || r->mixed_fp8)
        qc_strbuf_putf(out, "  %s, which transformers does not load; see --schemes.\n",
                       qc_auto_mixture(r));
    if (r->together)
        qc_strbuf_puts(out, "  What engines load as one has one scheme: queries, keys and values; "
                            "gate and up; the experts of a layer.\n");
    for (unsigned i = 0; i < r->note_count; i++)
        qc_strbuf_putf(out, "  Note: %s.\n", r->notes[i]);
    if (!r->fits && !r->spills)
        qc_strbuf_puts(out, "  Nothing fits, so every weight got the smallest candidate.\n");
    else if (r->fits && r->bound > 0)
        qc_strbuf_putf(out, "  No choice that fits has a predicted error below %.3g.\n", r->bound);
    static const char *const units[] = {
        [QC_WEIGHED_ROLES] = "sum over all weights of how much each matters, by its role and "
                             "without any data, times its relative squared error",
        [QC_WEIGHED_MOMENTS] =
            "KL divergence in nats that second moments of inputs and outputs let expect",
        [QC_WEIGHED_TRACES] = "KL divergence in nats that the traces of --importance let expect"};
    qc_strbuf_putf(out, "  A predicted error is the %s.\n\n", units[r->weighed]);
    if (all)
        group_table(r, arena, out);
    else
        QC_TRY(summary_table(r, arena, out, err));
    return qc_strbuf_status(out, err);
}

qc_status qc_auto_explain(const qc_auto_result *r, int all, qc_strbuf *out, qc_error *err)
{
    qc_arena arena;
    qc_arena_init(&arena);
    qc_status st = write_explanation(r, all, &arena, out, err);
    qc_arena_deinit(&arena);
    return st;
}

/* 16 bits are shown even if they are no candidate, as some weights may stay in them. */
static int is_shown(const qc_auto_result *r, unsigned c)
{
    return r->candidates & 1u << c || c == QC_CANDIDATE_16BIT;
}

static void write_group(const qc_auto_result *r, const qc_auto_group *g, qc_json_writer *w)
{
    qc_json_begin_row(w, NULL);
    qc_json_put_text(w, "name", g->name);
    qc_json_put_u64(w, "weights", g->weights);
    qc_json_put_u64(w, "elements", g->elems);
    qc_json_put_double(w, "importance", g->importance);
    qc_json_put_text(w, "scheme", r->rows[g->chosen].name);
    qc_json_put_u64(w, "bytes", g->bytes[g->chosen]);
    qc_json_begin_object(w, "relative_errors");
    for (unsigned c = 0; c < QC_CANDIDATES; c++)
        if (is_shown(r, c))
            qc_json_put_number(w, r->rows[c].name, g->rel_mse[c]);
    qc_json_end(w);
    if (r->weighed) {
        qc_json_begin_object(w, "divergences");
        for (unsigned c = 0; c < QC_CANDIDATES; c++)
            if (is_shown(r, c))
                qc_json_put_number(w, r->rows[c].name, g->cost[c]);
        qc_json_end(w);
    }
    qc_json_put_text(w, "reason", g->reason);
    qc_json_end(w);
}

void qc_auto_json(const qc_auto_result *r, int explain_groups, qc_json_writer *w)
{
    qc_json_begin_object(w, "auto");
    qc_json_put_bool(w, "measured", r->measured);
    static const char *const by[] = {"importance", "moments", "traces"};
    qc_json_put_text(w, "weighed_by", by[r->weighed]);
    qc_json_put_u64(w, "sampled_rows", r->sampled_rows);
    qc_json_put_u64(w, "sampled_bytes", r->sampled_bytes);
    qc_json_put_bool(w, "fits", r->fits);
    qc_json_put_bool(w, "spills", r->spills);
    qc_json_put_double(w, "predicted_error", r->predicted);
    qc_json_put_number(w, "lower_bound", r->bound);
    qc_json_begin_object(w, "uniform");
    for (unsigned c = 0; c < QC_CANDIDATES; c++) {
        if (isnan(r->uniform[c]))
            continue;
        qc_json_begin_row(w, r->rows[c].name);
        qc_json_put_double(w, "predicted_error", r->uniform[c]);
        qc_json_put_bool(w, "fits", r->uniform_fits[c]);
        qc_json_end(w);
    }
    qc_json_end(w);
    qc_json_begin_object(w, "chosen");
    for (unsigned c = 0; c < QC_CANDIDATES; c++) {
        if (r->count_chosen[c] == 0)
            continue;
        qc_json_begin_row(w, r->rows[c].name);
        qc_json_put_u64(w, "tensors", r->count_chosen[c]);
        qc_json_put_u64(w, "bytes", r->bytes_chosen[c]);
        qc_json_end(w);
    }
    qc_json_end(w);
    qc_json_put_texts(w, "notes", r->notes, r->note_count);
    if (explain_groups) {
        qc_json_begin_list(w, "groups");
        for (uint32_t g = 0; g < r->group_count; g++)
            write_group(r, &r->groups[g], w);
        qc_json_end(w);
    }
    qc_json_end(w);
}
