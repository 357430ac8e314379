/* Writes what --to auto chose and why, for people and for machines. */
#include "convert/fit/auto_choice.h"
#include "convert/term/json_members.h"
#include "convert/term/size_text.h"
#include "convert/term/table.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *qc_auto_mixture(const qc_auto_result *r)
{
    if (!r->mixed_fp8)
        return r->mixed ? "int8 lies beside NF4" : NULL;
    if (r->mixed)
        return "int8 and FP8 as it is lie beside NF4";
    return "FP8 as it is lies beside what was quantized";
}

static qc_status number_cell(qc_table *t, double v, qc_error *err)
{
    return isnan(v) ? qc_table_cell(t, NULL, err) : qc_table_cellf(t, err, "%.3g", v);
}

static qc_status uniform_table(const qc_auto_result *r, qc_arena *arena, qc_strbuf *out,
                               qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES];
    qc_table t;
    qc_table_init(&t, arena);
    qc_table_column(&t, "scheme", QC_ALIGN_LEFT);
    qc_table_column(&t, "predicted error", QC_ALIGN_RIGHT);
    qc_table_column(&t, "fits", QC_ALIGN_LEFT);
    qc_table_column(&t, "weights", QC_ALIGN_RIGHT);
    qc_table_column(&t, "bytes", QC_ALIGN_RIGHT);
    QC_TRY(qc_table_cell(&t, "auto", err));
    QC_TRY(number_cell(&t, r->predicted, err));
    QC_TRY(qc_table_cell(&t, r->fits ? "yes" : "no", err));
    uint64_t weights = 0, bytes = 0;
    for (unsigned c = 0; c < QC_AUTO_CHOICES; c++) {
        weights += r->count_chosen[c];
        bytes += r->bytes_chosen[c];
    }
    QC_TRY(qc_table_cellf(&t, err, "%" PRIu64, weights));
    QC_TRY(qc_table_cellf(&t, err, "%s", qc_text_bytes(size, bytes)));
    for (unsigned c = 0; c < QC_AUTO_CHOICES; c++) {
        if (!(r->candidates & 1u << c) && r->count_chosen[c] == 0)
            continue;
        QC_TRY(qc_table_cellf(&t, err, "%s", qc_auto_choice_name(c)));
        QC_TRY(number_cell(&t, r->uniform[c], err));
        QC_TRY(qc_table_cell(&t,
                             isnan(r->uniform[c]) ? NULL
                             : r->uniform_fits[c] ? "yes"
                                                  : "no",
                             err));
        QC_TRY(qc_table_cellf(&t, err, "%" PRIu64, r->count_chosen[c]));
        QC_TRY(qc_table_cellf(&t, err, "%s", qc_text_bytes(size, r->bytes_chosen[c])));
    }
    return qc_table_render(&t, 2, out, err);
}

static qc_status group_table(const qc_auto_result *r, qc_arena *arena, qc_strbuf *out,
                             qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES];
    qc_table t;
    qc_table_init(&t, arena);
    qc_table_column(&t, "chosen together", QC_ALIGN_LEFT);
    qc_table_column(&t, "weights", QC_ALIGN_RIGHT);
    qc_table_column(&t, "elements", QC_ALIGN_RIGHT);
    qc_table_column(&t, "matters", QC_ALIGN_RIGHT);
    for (unsigned c = 0; c < QC_AUTO_AT_16BIT; c++)
        qc_table_column(&t, c == 0 ? "nf4" : c == 1 ? "nf4-32" : "int8", QC_ALIGN_RIGHT);
    qc_table_column(&t, "chosen", QC_ALIGN_LEFT);
    qc_table_column(&t, "bytes", QC_ALIGN_RIGHT);
    qc_table_column(&t, "why", QC_ALIGN_LEFT);
    for (uint32_t g = 0; g < r->group_count; g++) {
        const qc_auto_group *group = &r->groups[g];
        QC_TRY(qc_table_cell(&t, group->name, err));
        QC_TRY(qc_table_cellf(&t, err, "%u", (unsigned)group->weights));
        QC_TRY(qc_table_cellf(&t, err, "%s", qc_text_count(size, group->elems)));
        QC_TRY(qc_table_cellf(&t, err, "%.3g", group->importance));
        for (unsigned c = 0; c < QC_AUTO_AT_16BIT; c++)
            QC_TRY(number_cell(&t, group->rel_mse[c], err));
        QC_TRY(qc_table_cell(&t, qc_auto_choice_name(group->chosen), err));
        QC_TRY(qc_table_cellf(&t, err, "%s", qc_text_bytes(size, group->bytes[group->chosen])));
        QC_TRY(qc_table_cell(&t, group->reason ? group->reason : "", err));
    }
    return qc_table_render(&t, 2, out, err);
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

static qc_status collect(alike *a, const qc_auto_group *g, int has_layer, uint64_t layer,
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
    return collect(&list[at], g, len > 0, layer, arena, err);
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
    char size[QC_SIZE_TEXT_BYTES];
    void *v = NULL;
    uint32_t count = 0;
    qc_table t;
    QC_TRY(qc_arena_alloc(arena, &v, r->group_count + 1, sizeof(alike), err));
    alike *list = v;
    for (uint32_t g = 0; g < r->group_count; g++)
        QC_TRY(add_alike(list, &count, &r->groups[g], arena, err));
    qsort(list, count, sizeof *list, by_kind);
    qc_table_init(&t, arena);
    qc_table_column(&t, "kind", QC_ALIGN_LEFT);
    qc_table_column(&t, "chosen", QC_ALIGN_LEFT);
    qc_table_column(&t, "weights", QC_ALIGN_RIGHT);
    qc_table_column(&t, "bytes", QC_ALIGN_RIGHT);
    qc_table_column(&t, "matters", QC_ALIGN_RIGHT);
    qc_table_column(&t, "layers", QC_ALIGN_LEFT);
    qc_table_column(&t, "why", QC_ALIGN_LEFT);
    for (uint32_t i = 0; i < count; i++) {
        alike *a = &list[i];
        const char *kind = a->kind;
        if (a->any_layer)
            QC_TRY(close_range(a, arena, err));
        if (strncmp(kind, begin, sizeof begin - 1) == 0)
            kind += sizeof begin - 1;
        QC_TRY(qc_table_cell(&t, kind, err));
        QC_TRY(qc_table_cell(&t, qc_auto_choice_name(a->first->chosen), err));
        QC_TRY(qc_table_cellf(&t, err, "%" PRIu64, a->weights));
        QC_TRY(qc_table_cell(&t, qc_text_bytes(size, a->bytes), err));
        QC_TRY(qc_table_cellf(&t, err, "%.3g", a->first->importance));
        if (a->ranges_left_out)
            QC_TRY(qc_table_cellf(&t, err, "%s, and %u more range%s", a->ranges, a->ranges_left_out,
                                  a->ranges_left_out == 1 ? "" : "s"));
        else
            QC_TRY(qc_table_cell(&t, a->ranges, err));
        QC_TRY(qc_table_cell(&t, a->first->reason ? a->first->reason : "", err));
    }
    QC_TRY(qc_table_render(&t, 2, out, err));
    return qc_strbuf_addf(out, err,
                          "  %" PRIu32 " weights or groups of experts; -v lists each with "
                          "its errors.\n",
                          r->group_count);
}

static qc_status explain(const qc_auto_result *r, int all, qc_arena *arena, qc_strbuf *out,
                         qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES];
    qc_strbuf_puts(out, "Choice of schemes\n");
    QC_TRY(uniform_table(r, arena, out, err));
    if (r->measured)
        qc_strbuf_putf(out, "  Errors were measured on %" PRIu64 " sampled rows (%s).\n",
                       r->sampled_rows, qc_text_bytes(size, r->sampled_bytes));
    else
        qc_strbuf_puts(out, "  There are no weights to measure: errors are those of normally "
                            "distributed weights.\n");
    if (r->mixed || r->mixed_fp8)
        qc_strbuf_putf(out, "  %s, which transformers does not load; see --schemes.\n",
                       qc_auto_mixture(r));
    for (unsigned i = 0; i < r->note_count; i++)
        qc_strbuf_putf(out, "  Note: %s.\n", r->notes[i]);
    if (!r->fits && !r->spills)
        qc_strbuf_puts(out, "  Nothing fits: the smallest was taken everywhere.\n");
    else if (r->fits && r->bound > 0)
        qc_strbuf_putf(out, "  No choice that fits is predicted to have less than %.3g.\n",
                       r->bound);
    qc_strbuf_puts(out, "  A predicted error is the sum over all weights of how much each "
                        "matters times its relative squared error.\n\n");
    return all ? group_table(r, arena, out, err) : summary_table(r, arena, out, err);
}

qc_status qc_auto_explain(const qc_auto_result *r, int all, qc_strbuf *out, qc_error *err)
{
    qc_arena arena;
    qc_arena_init(&arena);
    qc_status st = explain(r, all, &arena, out, err);
    qc_arena_deinit(&arena);
    return st;
}

static void write_group(const qc_auto_group *g, qc_json_writer *w)
{
    qc_jm_begin_row(w);
    qc_jm_string(w, "name", g->name);
    qc_jm_u64(w, "weights", g->weights);
    qc_jm_u64(w, "elements", g->elems);
    qc_jm_double(w, "importance", g->importance);
    qc_jm_string(w, "scheme", qc_auto_choice_name(g->chosen));
    qc_jm_u64(w, "bytes", g->bytes[g->chosen]);
    qc_jm_begin_object(w, "relative_errors");
    for (unsigned c = 0; c < QC_AUTO_CHOICES; c++)
        qc_jm_number(w, qc_auto_choice_name(c), g->rel_mse[c]);
    qc_jw_end_object(w);
    qc_jm_string(w, "reason", g->reason);
    qc_jw_end_object(w);
}

void qc_auto_json(const qc_auto_result *r, int explain_groups, qc_json_writer *w)
{
    qc_jw_begin_object(w);
    qc_jm_bool(w, "measured", r->measured);
    qc_jm_u64(w, "sampled_rows", r->sampled_rows);
    qc_jm_u64(w, "sampled_bytes", r->sampled_bytes);
    qc_jm_bool(w, "fits", r->fits);
    qc_jm_bool(w, "spills", r->spills);
    qc_jm_double(w, "predicted_error", r->predicted);
    qc_jm_number(w, "lower_bound", r->bound);
    qc_jm_begin_object(w, "uniform");
    for (unsigned c = 0; c < QC_AUTO_CHOICES; c++) {
        if (isnan(r->uniform[c]))
            continue;
        qc_jw_key(w, qc_auto_choice_name(c));
        qc_jm_begin_row(w);
        qc_jm_double(w, "predicted_error", r->uniform[c]);
        qc_jm_bool(w, "fits", r->uniform_fits[c]);
        qc_jw_end_object(w);
    }
    qc_jw_end_object(w);
    qc_jm_begin_object(w, "chosen");
    for (unsigned c = 0; c < QC_AUTO_CHOICES; c++) {
        if (r->count_chosen[c] == 0)
            continue;
        qc_jw_key(w, qc_auto_choice_name(c));
        qc_jm_begin_row(w);
        qc_jm_u64(w, "tensors", r->count_chosen[c]);
        qc_jm_u64(w, "bytes", r->bytes_chosen[c]);
        qc_jw_end_object(w);
    }
    qc_jw_end_object(w);
    qc_jm_begin_array(w, "notes");
    for (unsigned i = 0; i < r->note_count; i++)
        qc_jw_string(w, r->notes[i]);
    qc_jw_end_array(w);
    if (explain_groups) {
        qc_jm_begin_array(w, "groups");
        for (uint32_t g = 0; g < r->group_count; g++)
            write_group(&r->groups[g], w);
        qc_jw_end_array(w);
    }
    qc_jw_end_object(w);
}
