/* What --to auto chose and why, for people and for machines. */
#include "convert/auto_choice.h"
#include "convert/json_members.h"
#include "convert/size_text.h"
#include "convert/table.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

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

static qc_status explain(const qc_auto_result *r, qc_arena *arena, qc_strbuf *out, qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES];
    QC_TRY(qc_strbuf_adds(out, "Choice of schemes\n", err));
    QC_TRY(uniform_table(r, arena, out, err));
    if (r->measured)
        QC_TRY(qc_strbuf_addf(out, err,
                              "  Errors were measured on %" PRIu64 " sampled rows (%s).\n",
                              r->sampled_rows, qc_text_bytes(size, r->sampled_bytes)));
    else
        QC_TRY(qc_strbuf_adds(out,
                              "  There are no weights to measure: errors are those of normally "
                              "distributed weights.\n",
                              err));
    if (r->mixed || r->mixed_fp8)
        QC_TRY(qc_strbuf_addf(out, err, "  %s, which transformers does not load; see --schemes.\n",
                              qc_auto_mixture(r)));
    for (unsigned i = 0; i < r->note_count; i++)
        QC_TRY(qc_strbuf_addf(out, err, "  Note: %s.\n", r->notes[i]));
    if (!r->fits && !r->spills)
        QC_TRY(qc_strbuf_adds(out, "  Nothing fits: the smallest was taken everywhere.\n", err));
    else if (r->fits && r->bound > 0)
        QC_TRY(qc_strbuf_addf(
            out, err, "  No choice that fits is predicted to have less than %.3g.\n", r->bound));
    QC_TRY(qc_strbuf_adds(out,
                          "  A predicted error is the sum over all weights of how much each "
                          "matters times its relative squared error.\n\n",
                          err));
    return group_table(r, arena, out, err);
}

qc_status qc_auto_explain(const qc_auto_result *r, qc_strbuf *out, qc_error *err)
{
    qc_arena arena;
    qc_arena_init(&arena);
    qc_status st = explain(r, &arena, out, err);
    qc_arena_deinit(&arena);
    return st;
}

/* NaN, which JSON has not, is null. */
static void number_member(qc_json_writer *w, const char *key, double v)
{
    qc_jw_key(w, key);
    if (isnan(v))
        qc_jw_null(w);
    else
        qc_jw_double(w, v);
}

static void write_group(const qc_auto_group *g, qc_json_writer *w)
{
    qc_jw_compact_next(w);
    qc_jw_begin_object(w);
    qc_jm_string(w, "name", g->name);
    qc_jm_u64(w, "weights", g->weights);
    qc_jm_u64(w, "elements", g->elems);
    qc_jm_double(w, "importance", g->importance);
    qc_jm_string(w, "scheme", qc_auto_choice_name(g->chosen));
    qc_jm_u64(w, "bytes", g->bytes[g->chosen]);
    qc_jw_key(w, "relative_errors");
    qc_jw_begin_object(w);
    for (unsigned c = 0; c < QC_AUTO_CHOICES; c++)
        number_member(w, qc_auto_choice_name(c), g->rel_mse[c]);
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
    number_member(w, "lower_bound", r->bound);
    qc_jw_key(w, "uniform");
    qc_jw_begin_object(w);
    for (unsigned c = 0; c < QC_AUTO_CHOICES; c++) {
        if (isnan(r->uniform[c]))
            continue;
        qc_jw_key(w, qc_auto_choice_name(c));
        qc_jw_compact_next(w);
        qc_jw_begin_object(w);
        qc_jm_double(w, "predicted_error", r->uniform[c]);
        qc_jm_bool(w, "fits", r->uniform_fits[c]);
        qc_jw_end_object(w);
    }
    qc_jw_end_object(w);
    qc_jw_key(w, "chosen");
    qc_jw_begin_object(w);
    for (unsigned c = 0; c < QC_AUTO_CHOICES; c++) {
        if (r->count_chosen[c] == 0)
            continue;
        qc_jw_key(w, qc_auto_choice_name(c));
        qc_jw_compact_next(w);
        qc_jw_begin_object(w);
        qc_jm_u64(w, "tensors", r->count_chosen[c]);
        qc_jm_u64(w, "bytes", r->bytes_chosen[c]);
        qc_jw_end_object(w);
    }
    qc_jw_end_object(w);
    qc_jw_key(w, "notes");
    qc_jw_begin_array(w);
    for (unsigned i = 0; i < r->note_count; i++)
        qc_jw_string(w, r->notes[i]);
    qc_jw_end_array(w);
    if (explain_groups) {
        qc_jw_key(w, "groups");
        qc_jw_begin_array(w);
        for (uint32_t g = 0; g < r->group_count; g++)
            write_group(&r->groups[g], w);
        qc_jw_end_array(w);
    }
    qc_jw_end_object(w);
}
