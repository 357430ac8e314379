#include "convert/plan/engines.h"

#include "base/text.h"
#include "convert/model/recipe_coded.h"
#include "convert/term/console.h"

#include <inttypes.h>
#include <string.h>

const qc_engine_row qc_engine_rows[QC_ENGINES] = {
    [QC_ENGINE_TRANSFORMERS] = {"transformers",
                                "transformers 4.57.6 and 5.23.0 (bitsandbytes 0.50.2)", 1},
    [QC_ENGINE_VLLM] = {"vllm", "vLLM 0.32.0 (vllm-bnb-plugin 0.0.3)", 1},
    [QC_ENGINE_SGLANG] = {"sglang", "SGLang (November 2026)", 0},
    [QC_ENGINE_UNSLOTH] = {"unsloth", "Unsloth (November 2026)", 0},
};

#define BIT(engine) (1u << QC_ENGINE_##engine)
#define ALL         ((1u << QC_ENGINES) - 1)

/* ---- what there is in an output ---- */

/* The names of weights of which each is the first of its kind, or NULL. */
typedef struct {
    const char *quantized;
    const char *flat;         /* NF4 without double quantization */
    const char *int8_expert;  /* an expert, kept or not, where something is int8 */
    const char *kept_expert;  /* an expert in 16 bits where something is NF4 */
    const char *mixed_expert; /* another block size than the layer's first expert has */
    const char *cut_expert;   /* not a whole number of blocks */
    const char *kept_member;  /* of a fused group that is quantized in part */
    const char *integers;     /* in compressed-tensors */
    const char *odd_shape;    /* of these: its shape has no kernel on GPUs */
    const char *unlisted;     /* what an engine calls a kept group, and no list names it */
} finding;

static void note(const char **at, const char *name)
{
    *at = *at ? *at : name;
}

static int is_listed(const qc_json_node *list, const char *name)
{
    for (const qc_json_node *n = qc_json_first(list); n; n = qc_json_next(n)) {
        const char *s = qc_json_string_or(n, "");
        size_t len = strlen(s);
        /* equal to the name, a whole number of components at its start, or one component of it */
        for (const char *at = name; len > 0 && (at = strstr(at, s)) != NULL; at++) {
            int begins = at == name || at[-1] == '.', ends = at[len] == '\0' || at[len] == '.';
            if (begins && ends && (at == name || !strchr(s, '.')))
                return 1;
        }
    }
    return 0;
}

/* Looks at a fused group, once for each: at its first member. */
static qc_status look_at_group(finding *f, const qc_served *s, uint32_t i, qc_error *err)
{
    qc_fused_group g;
    const char *name = s->model->tensors[i].name, *kept = NULL, *fused = NULL;
    unsigned quantized = 0;
    if (!qc_fused_group_of(&g, s->model, i) || g.tensors[0] != i)
        return QC_OK;
    for (unsigned k = 0; k < g.count; k++) {
        if (qc_scheme_is_quantized(s->weights[g.tensors[k]].scheme))
            quantized++;
        else
            note(&kept, s->model->tensors[g.tensors[k]].name);
    }
    if (quantized > 0 && kept)
        note(&f->kept_member, kept);
    if (quantized > 0 || !s->skipped || f->unlisted || qc_expert_stem(name) > 0)
        return QC_OK;
    QC_TRY(qc_arena_printf(s->arena, &fused, err, "%.*s%s%s", (int)g.parent_len, name,
                           g.parent_len ? "." : "", g.row->fused));
    if (!is_listed(s->skipped, fused))
        f->unlisted = fused;
    return QC_OK;
}

/* Looks at the experts, once it is known whether anything is NF4 or int8. */
static void look_at_experts(finding *f, const qc_served *s, int has_nf4, int has_int8)
{
    const char *layer = "";
    size_t layer_len = 0;
    uint64_t block = 0;
    for (uint32_t i = 0; i < s->model->tensor_count; i++) {
        const qc_served_weight *w = &s->weights[i];
        const char *name = s->model->tensors[i].name;
        size_t stem = w->is_weight ? qc_expert_stem(name) : 0;
        if (stem == 0)
            continue;
        if (has_int8)
            note(&f->int8_expert, name);
        if (has_nf4 && w->scheme == QC_SCHEME_KEEP)
            note(&f->kept_expert, name);
        if (w->scheme != QC_SCHEME_NF4)
            continue;
        if (stem != layer_len || strncmp(layer, name, stem) != 0) {
            layer = name;
            layer_len = stem;
            block = w->block_elems;
        }
        if (w->block_elems != block)
            note(&f->mixed_expert, name);
        if (w->elems % w->block_elems != 0)
            note(&f->cut_expert, name);
    }
}

/* Marlin multiplies weights of 4 or 8 bits with activations of 16 on GPUs. */
static void look_at_integers(finding *f, const qc_served_weight *w, const char *name)
{
    const qc_scheme_row *row = &qc_schemes[w->scheme];
    if (row->format != QC_FORMAT_COMPRESSED_TENSORS)
        return;
    note(&f->integers, name);
    if (row->activation_bits != 16)
        return;
    if (w->cols % 128 != 0 || w->rows % 64 != 0)
        note(&f->odd_shape, name);
}

static qc_status find(finding *f, const qc_served *s, qc_error *err)
{
    int has_nf4 = 0, has_int8 = 0;
    memset(f, 0, sizeof *f);
    for (uint32_t i = 0; i < s->model->tensor_count; i++) {
        const qc_served_weight *w = &s->weights[i];
        const char *name = s->model->tensors[i].name;
        if (!w->is_weight || !qc_scheme_is_quantized(w->scheme))
            continue;
        note(&f->quantized, name);
        look_at_integers(f, w, name);
        has_nf4 |= w->scheme == QC_SCHEME_NF4;
        has_int8 |= w->scheme == QC_SCHEME_INT8_ROWS;
        if (w->scheme == QC_SCHEME_NF4 && !w->nested)
            note(&f->flat, name);
    }
    if (!f->quantized)
        return QC_OK;
    for (uint32_t i = 0; i < s->model->tensor_count; i++) {
        if (s->weights[i].is_weight)
            QC_TRY(look_at_group(f, s, i, err));
    }
    look_at_experts(f, s, has_nf4, has_int8);
    return QC_OK;
}

/* ---- what engines refuse ---- */

/* One row: the engines that cannot load what was found, what they do with it, and what helps before
 * and after the conversion. The text has %s for the weight, or for what else was found. */
typedef struct {
    unsigned engines;
    const char *found;
    const char *text, *before, *after;
} refusal_row;

static qc_status add_row(qc_refusals *out, const qc_served *s, const refusal_row *r, qc_engine e,
                         qc_error *err)
{
    const char *help = s->finished ? r->after : r->before;
    const char *at = strstr(r->text, "%s");
    qc_refusal *to = &out->list[out->count++];
    to->engine = e;
    return qc_arena_printf(s->arena, &to->sentence, err, "%s %.*s%s%s: %s",
                           qc_engine_rows[e].versions, (int)(at - r->text), r->text, r->found,
                           at + 2, help);
}

qc_status qc_engines_check(qc_refusals *out, const qc_served *s, unsigned engines, qc_error *err)
{
    finding f;
    if (s->foreign && !s->own_form)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "--for: some weights are %s and stay so, and which engine reads that is not known "
                "here: expected plain weights, those of bitsandbytes or of qconv",
                s->foreign);
    QC_TRY(find(&f, s, err));
    const char *bnb = s->own_form ? NULL : f.quantized; /* in bitsandbytes' form */
    int float32 = bnb && s->compute_dtype && strcmp(s->compute_dtype, "float32") == 0;
    const refusal_row rows[] = {
        {ALL, s->has_config ? NULL : "config.json", "needs a %s, which is not there",
         "put the model's beside the weights", "put the model's beside the weights"},
        {ALL, s->own_form, "does not load this form (%s), which only qconv reads",
         s->instead ? s->instead : "--to bf16", "turn it back with --to bf16"},
        {ALL, s->compressed ? ".zst" : NULL, "does not read %s files", "--compress none",
         "qconv unpack makes plain files"},
        {BIT(TRANSFORMERS), s->rest,
         "cannot compute with norms or biases in F32 beside a config.json of 16 bits (%s)",
         "add that option", "convert again with that option"},
        {BIT(VLLM) | BIT(SGLANG), s->own_form ? NULL : f.kept_member,
         "has one scheme for a fused group, and '%s' is in 16 bits beside quantized members",
         "leave out --split-fused, or --keep all of them", "convert again without --split-fused"},
        {BIT(VLLM) | BIT(SGLANG), s->own_form ? NULL : f.unlisted,
         "looks for '%s' on the skip list, which does not have it, and quantizes again what was "
         "kept",
         "convert with this version", "convert again with this version"},
        {BIT(VLLM), s->own_form ? NULL : f.int8_expert,
         "has no int8 of bitsandbytes for experts, and '%s' is one", "--to nf4",
         "convert again with --to nf4"},
        {BIT(VLLM), s->own_form ? NULL : f.kept_expert,
         "quantizes experts that were kept ('%s') again, to plain NF4",
         "quantize them too, without --keep", "convert again without --keep for experts"},
        {BIT(VLLM), s->own_form ? NULL : f.mixed_expert,
         "takes one block size for the experts of a layer, and '%s' has another",
         "leave out --split-fused", "convert again without --split-fused"},
        {BIT(VLLM), s->own_form ? NULL : f.cut_expert,
         "joins the blocks of all experts, and '%s' is not a whole number of them",
         "a smaller --block-size", "convert again with a smaller --block-size"},
        {BIT(VLLM), f.odd_shape,
         "wants columns in 128s and rows in 64s on GPUs, and '%s' has others",
         "--keep such weights, or --format bitsandbytes", "convert again with --keep for those"},
        {BIT(UNSLOTH), f.integers, "is not known to load compressed-tensors ('%s')",
         "--format bitsandbytes", "convert again with --format bitsandbytes"},
        {BIT(UNSLOTH), s->own_form ? NULL : f.flat,
         "reads scales that are quantized too, and those of '%s' are not",
         "leave out --no-double-quant", "convert again without --no-double-quant"},
        {BIT(UNSLOTH), float32 ? "float32" : NULL, "computes in 16 bits, and config.json says %s",
         "--compute-dtype bfloat16 or float16",
         "convert again with --compute-dtype bfloat16 or float16"},
    };
    const size_t count = sizeof rows / sizeof *rows;
    *out = (qc_refusals){.count = 0};
    QC_TRY(qc_arena_array(s->arena, &out->list, QC_ENGINES * (count + 1), err));
    for (unsigned e = 0; e < QC_ENGINES; e++) {
        if (!(engines & 1u << e))
            continue;
        for (size_t i = 0; i < count; i++) {
            if (rows[i].found && rows[i].engines & 1u << e)
                QC_TRY(add_row(out, s, &rows[i], (qc_engine)e, err));
        }
        if (e == QC_ENGINE_TRANSFORMERS && s->not5)
            out->list[out->count++] = (qc_refusal){QC_ENGINE_TRANSFORMERS, s->not5};
    }
    return QC_OK;
}

qc_status qc_engines_refuse(const qc_served *s, unsigned engines, const qc_call *call,
                            qc_error *err)
{
    qc_refusals all;
    QC_TRY(qc_engines_check(&all, s, engines, err));
    for (unsigned i = 1; i < all.count; i++)
        qc_console_warn(call, "--for %s: %s", qc_engine_rows[all.list[i].engine].name,
                        all.list[i].sentence);
    if (all.count > 0)
        QC_FAIL(err, QC_ERR_USAGE, "--for %s: %s", qc_engine_rows[all.list[0].engine].name,
                all.list[0].sentence);
    return QC_OK;
}

/* ---- from a plan ---- */

qc_status qc_served_of_plan(qc_served *out, const qc_plan *p, const qc_loaders *l, qc_error *err)
{
    qc_served_weight *weights = NULL;
    const char *foreign = NULL;
    QC_TRY(qc_arena_array(p->arena, &weights, p->model->tensor_count, err));
    for (uint32_t i = 0; i < p->job_count; i++) {
        const qc_job *j = &p->jobs[i];
        const qc_stored_weight *stored = j->scheme == QC_SCHEME_KEEP ? j->entry->stored : NULL;
        weights[j->source] = (qc_served_weight){
            .is_weight = j->entry->owner == UINT32_MAX,
            .scheme = stored ? stored->stored_as : j->scheme,
            .block_elems = stored ? stored->block_elems : j->block_elems,
            .elems = j->elems,
            .rows = j->rows,
            .cols = j->cols,
            .nested = stored ? stored->nested_block_elems > 0 : j->nested,
        };
        if (!qc_scheme_is_quantized(weights[j->source].scheme))
            weights[j->source].scheme = QC_SCHEME_KEEP;
        if (j->scheme == QC_SCHEME_KEEP && j->entry->coded)
            foreign = qc_coding_name(j->entry->coded->coding);
    }
    *out = (qc_served){.arena = p->arena,
                       .model = p->model,
                       .weights = weights,
                       .foreign = foreign,
                       .own_form = l->own_form,
                       .instead = l->instead,
                       .not5 = l->not5,
                       .rest = l->rest,
                       .compute_dtype = p->options->recipe.compute_dtype,
                       .has_config = l->has_config,
                       .compressed = l->compressed};
    return QC_OK;
}
