#include "convert/fit/plugin_share.h"

#include "base/checked.h"
#include "convert/model/expert_split.h"
#include "convert/model/recipe_stored.h"
#include "quant/weight_slice.h"

#include <inttypes.h>
#include <string.h>

#define CODE_MAP_BYTES   (16 * sizeof(float))
#define NESTED_MAP_BYTES (256 * sizeof(float))
#define EXPERT_BYTES     2u /* of a number that is restored */
#define MAX_RUNS         3u /* q, k and v of one matrix */

/* Which tables the weights before have, for qc_plugin_tables. */
enum { CODE_MAP = 1, NESTED_MAP = 2 };

/* The rows and columns of a weight that one card has, in at most so many runs of rows. */
typedef struct {
    qc_weights_part runs[MAX_RUNS];
    unsigned count;
} share;

int qc_plugin_serves(const qc_job *j)
{
    const qc_scheme_row *row = &qc_schemes[j->scheme];
    return (j->scheme == QC_SCHEME_KEEP && j->entry->stored) ||
           (row->bits && (row->format == QC_FORMAT_BITSANDBYTES || row->format == QC_FORMAT_OWN));
}

int qc_plugin_needed(const qc_plan *plan)
{
    for (uint32_t i = 0; i < plan->job_count; i++)
        if (qc_plugin_serves(&plan->jobs[i]))
            return 1;
    return 0;
}

uint64_t qc_plugin_elems(const char *name, uint64_t elems, const qc_tp_split *split,
                         qc_format format)
{
    if (split->ranks == 0)
        return elems;
    if (qc_expert_stem(name) > 0 || format != QC_FORMAT_BITSANDBYTES)
        return 0;
    const int whole = qc_family_split(split->family, name) == QC_SPLIT_WHOLE;
    return whole ? elems : qc_ceil_div_u64(elems, split->ranks);
}

/* The weight as it lies in the output, without its arrays. */
static qc_weights weight_of(const qc_job *j)
{
    const qc_stored_weight *s = j->scheme == QC_SCHEME_KEEP ? j->entry->stored : NULL;
    if (!s)
        return (qc_weights){
            .form = qc_scheme_form(j->scheme, j->form.cols, j->form.block_elems, j->form.nested),
            .rows = j->rows,
            .nested_block = j->form.nested ? QC_NESTED_BLOCK : 0};
    const uint64_t cols = s->ndim == 2 ? s->dims[1] : 0;
    const int nested = s->nested_block_elems > 0;
    return (qc_weights){.form = qc_scheme_form(s->stored_as, cols, qc_stored_block(s), nested),
                        .rows = s->ndim == 2 ? s->dims[0] : 0,
                        .nested_block = (uint32_t)s->nested_block_elems};
}

uint64_t qc_plugin_job_elems(const qc_plan *plan, const qc_job *j, const qc_tp_split *split)
{
    const qc_weights w = weight_of(j);
    return qc_plugin_elems(plan->model->tensors[j->source].name, qc_sat_mul(w.rows, w.form.cols),
                           split, QC_FORMAT_BITSANDBYTES);
}

uint64_t qc_plugin_tables(const qc_job *j, unsigned *counted)
{
    const qc_weights w = weight_of(j);
    const unsigned before = *counted;
    *counted |= (w.form.ops == qc_form_ops_of(QC_FORM_NF4) ? CODE_MAP : 0) |
                (w.form.nested ? NESTED_MAP : 0);
    return ((*counted & ~before) & CODE_MAP ? CODE_MAP_BYTES : 0) +
           ((*counted & ~before) & NESTED_MAP ? NESTED_MAP_BYTES : 0);
}

/* ---- which rows and columns ---- */

static void add_rows(share *s, const qc_weights *w, uint64_t row, uint64_t rows)
{
    s->runs[s->count++] = (qc_weights_part){.row = row, .rows = rows, .cols = w->form.cols};
}

/* Adds the heads of k or v that card r has; the matrix begins at row `first`. */
static void add_kv_heads(share *s, const qc_weights *w, uint64_t first, uint64_t head_rows,
                         const qc_tp_split *split, uint32_t r)
{
    const uint64_t kv = split->geometry->kv_heads, n = split->ranks;
    const uint64_t heads = kv >= n ? kv / n : 1, head = kv >= n ? r * heads : r * kv / n;
    add_rows(s, w, first + head * head_rows, heads * head_rows);
}

/* Adds an equal share of so many matrices that lie one below the other. */
static int add_columns(share *s, const qc_weights *w, unsigned matrices, uint32_t ranks, uint32_t r)
{
    const uint64_t rows = w->rows / matrices / ranks;
    for (unsigned m = 0; m < matrices; m++)
        add_rows(s, w, w->rows / matrices * m + r * rows, rows);
    return w->rows % ((uint64_t)matrices * ranks) == 0;
}

static int add_fused_heads(share *s, const qc_weights *w, const qc_tp_split *split, uint32_t r)
{
    const uint64_t q = split->geometry->heads, kv = split->geometry->kv_heads;
    if (q + 2 * kv == 0 || w->rows % (q + 2 * kv) != 0 || q % split->ranks != 0)
        return 0;
    const uint64_t head_rows = w->rows / (q + 2 * kv), own = q / split->ranks;
    add_rows(s, w, r * own * head_rows, own * head_rows);
    add_kv_heads(s, w, q * head_rows, head_rows, split, r);
    add_kv_heads(s, w, (q + kv) * head_rows, head_rows, split, r);
    return 1;
}

/* Returns 0 where the weight does not divide over the cards. Others than these have no share. */
static int share_of(share *s, const char *name, const qc_weights *w, const qc_tp_split *split,
                    uint32_t r)
{
    const uint64_t kv = split->geometry->kv_heads, cols = w->form.cols / split->ranks;
    *s = (share){.count = 0};
    switch (qc_family_split(split->family, name)) {
    case QC_SPLIT_WHOLE:
        add_rows(s, w, 0, w->rows);
        return 1;
    case QC_SPLIT_COLUMNS:
        return add_columns(s, w, strstr(name, ".gate_up_proj.") ? 2 : 1, split->ranks, r);
    case QC_SPLIT_ROWS:
        s->runs[s->count++] = (qc_weights_part){0, w->rows, r * cols, cols};
        return w->form.cols % split->ranks == 0;
    case QC_SPLIT_KV_HEADS:
        if (kv == 0 || w->rows % kv != 0)
            return 0;
        add_kv_heads(s, w, 0, w->rows / kv, split, r);
        return 1;
    case QC_SPLIT_FUSED_QKV:
        return add_fused_heads(s, w, split, r);
    case QC_SPLIT_UNKNOWN:
    case QC_SPLIT_VOCABULARY:
    case QC_SPLIT_SINKS:
    case QC_SPLIT_ABSENT:
        break;
    }
    return 0;
}

/* ---- bytes ---- */

/* Are the experts of a layer codes on card r? They are restored where a weight in the form of w
 * cannot be cut, with as many columns as the intermediate size is. */
static int experts_are_codes(qc_split how, const qc_weights *w, uint32_t ranks, uint32_t r)
{
    const int down = how == QC_SPLIT_ROWS;
    const uint64_t wide = down ? w->form.cols : w->rows, cols = wide / ranks;
    qc_weights like = *w;
    qc_weights_read read;
    qc_error why = {0};
    like.rows = down ? w->rows : w->form.cols;
    like.form.cols = wide;
    return qc_weights_read_of(&like, &(qc_weights_part){0, like.rows, r * cols, cols}, &read,
                              &why) == QC_OK;
}

static qc_status card_bytes(uint64_t *out, const char *name, const qc_weights *w,
                            const qc_tp_split *split, uint32_t r, qc_error *err)
{
    share s;
    const qc_split how = qc_family_split(split->family, name);
    const int restored = qc_expert_stem(name) > 0 && !experts_are_codes(how, w, split->ranks, r);
    *out = 0;
    if (how == QC_SPLIT_UNKNOWN)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "it is not known how vLLM splits it");
    if (how == QC_SPLIT_VOCABULARY)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "it takes the head in 16 bits only");
    if (!share_of(&s, name, w, split, r))
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "its %" PRIu64 " rows and %" PRIu64 " columns do not divide", w->rows,
                w->form.cols);
    for (unsigned i = 0; i < s.count; i++) {
        uint64_t bytes = qc_sat_mul(qc_sat_mul(s.runs[i].rows, s.runs[i].cols), EXPERT_BYTES);
        if (!restored) {
            qc_weights_read read;
            QC_TRY(qc_weights_read_of(w, &s.runs[i], &read, err));
            bytes = qc_sat_mul(read.scales, read.nested_block ? 1 : sizeof(float));
            bytes = qc_sat_add(bytes, qc_sat_mul(read.nested_scales, sizeof(float)));
            bytes = qc_sat_add(bytes, read.code_bytes);
        }
        *out = qc_sat_add(*out, bytes);
    }
    return QC_OK;
}

qc_status qc_plugin_bytes(uint64_t *out, const qc_plan *plan, const qc_job *j,
                          const qc_tp_split *split, qc_error *err)
{
    const char *name = plan->model->tensors[j->source].name;
    const qc_weights w = weight_of(j);
    *out = 0;
    for (uint32_t r = 0; r < split->ranks; r++) {
        uint64_t bytes = 0;
        qc_error why = {0};
        qc_status st = j->stack ? QC_ERROR(&why, QC_ERR_UNSUPPORTED,
                                           "it does not take experts stacked in one tensor")
                                : card_bytes(&bytes, name, &w, split, r, &why);
        if (st != QC_OK)
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "tensor '%s' as %s: qconv's plug-in of vLLM does not split it over %" PRIu32
                    " cards: %s; plan with another --tp, with --to int8, or with --parallel layers",
                    name, qc_scheme_name(j->scheme), split->ranks, why.msg);
        *out = qc_max_u64(*out, bytes);
    }
    return QC_OK;
}
