#include "convert/plan/engines.h"

#include "base/checked.h"
#include "base/text.h"
#include "convert/families/config_fields.h"
#include "convert/model/recipe_coded.h"
#include "convert/model/recipe_diffusers.h"
#include "convert/model/recipe_stored.h"
#include "convert/term/console.h"

#include <inttypes.h>
#include <string.h>

const qc_engine_row qc_engine_rows[QC_ENGINES] = {
    [QC_ENGINE_TRANSFORMERS] = {"transformers",
                                "transformers 4.57.6 and 5.23.0 (bitsandbytes 0.50.2)"},
    [QC_ENGINE_VLLM] = {"vllm", "vLLM 0.32.0 (vllm-bnb-plugin 0.0.3)"},
    [QC_ENGINE_LOAD] = {"qconv", "qconv.load (transformers 4.57.6 and 5.23.0)"},
    [QC_ENGINE_PLUGIN] = {"vllm-qconv", "vLLM 0.32.0 with qconv's plug-in"},
};

#define BIT(engine) (1u << QC_ENGINE_##engine)
#define ALL         QC_ENGINES_ALL
#define OURS        QC_ENGINES_OURS
#define OTHERS      (ALL & ~OURS)

/* ---- what there is in an output ---- */

/* Names of weights, each the first of its kind or NULL, and sums. */
typedef struct {
    const char *quantized;
    const char *int8_expert;  /* an expert, kept or not, where something is int8 */
    const char *kept_expert;  /* an expert in 16 bits where something is NF4 */
    const char *mixed_expert; /* another block size than the layer's first expert has */
    const char *cut_expert;   /* not a whole number of blocks */
    const char *kept_member;  /* belongs to a fused group that is quantized in part */
    const char *head;
    const char *only_head; /* the table that head and embeddings share, under the head's name */
    const char *stack;     /* experts in one tensor */
    const char *unlisted;  /* an engine's name for a kept group that no list names */
    /* of compressed-tensors: */
    const char *integers;
    const char *loose;           /* activations have 16 bits, and it is not packed */
    const char *no_kernel;       /* vLLM has no groups of that size, which is named too */
    const char *odd_activations; /* other numbers than 16-bit floats or, beside 8 bits, int8 */
    const char *zero_points;     /* where no kernel has them */
    const char *gaps;            /* between its codes, or behind those of a row */
    const char *act_order;
    const char *mixed_member;  /* another scheme than the fused group's first member has */
    const char *uneven_expert; /* another scheme than the layer's first expert has */
    const char *strange;       /* more than a scale for each row or group, as qconv writes it */
    const char *static_expert; /* its activations have a scale in the file */
    uint64_t quantized_elems, expert_elems; /* the second are among the first */
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

static int is_quantized(const qc_served_weight *w)
{
    return w->is_weight && (qc_scheme_is_quantized(w->scheme) || w->integers.bits > 0);
}

/* Have two weights one group in config.json of compressed-tensors? */
static int are_alike(const qc_served_weight *a, const qc_served_weight *b)
{
    const qc_served_integers *x = &a->integers, *y = &b->integers;
    return x->bits == y->bits && a->block_elems == b->block_elems && x->packed == y->packed &&
           x->one_scale == y->one_scale && x->zero_points == y->zero_points &&
           x->act_order == y->act_order && x->activation_bits == y->activation_bits &&
           x->static_activations == y->static_activations &&
           x->float_activations == y->float_activations;
}

/* Looks at a module of an engine: a fused group, at its first member, or a weight by itself. */
static qc_status look_at_module(finding *f, const qc_served *s, uint32_t i, qc_error *err)
{
    qc_fused_group g;
    const qc_served_weight *first = &s->weights[i];
    const char *name = s->model->tensors[i].name, *kept = NULL, *fused = NULL;
    unsigned quantized = 0;
    int is_group = qc_fused_group_of(&g, s->model, i);
    if (is_group && g.tensors[0] != i)
        return QC_OK;
    if (!is_group)
        g = (qc_fused_group){.tensors = {i}, .count = 1};
    for (unsigned k = 0; k < g.count; k++) {
        const qc_served_weight *w = &s->weights[g.tensors[k]];
        quantized += (unsigned)is_quantized(w);
        if (!is_quantized(w))
            note(&kept, w->name);
        else if (is_quantized(first) && !are_alike(first, w))
            note(&f->mixed_member, w->name);
    }
    if (quantized > 0 && kept)
        note(&f->kept_member, kept);
    if (!is_group || quantized > 0 || !s->skipped || f->unlisted || qc_expert_stem(name) > 0)
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
    const qc_served_weight *first = NULL;
    const char *layer = "";
    size_t layer_len = 0;
    for (uint32_t i = 0; i < s->model->tensor_count; i++) {
        const qc_served_weight *w = &s->weights[i];
        const char *name = s->model->tensors[i].name;
        size_t stem = w->is_weight ? qc_expert_stem(name) : 0;
        if (stem == 0)
            continue;
        if (has_int8)
            note(&f->int8_expert, w->name);
        if (has_nf4 && w->scheme == QC_SCHEME_KEEP)
            note(&f->kept_expert, w->name);
        if (!first || stem != layer_len || strncmp(layer, name, stem) != 0) {
            layer = name;
            layer_len = stem;
            first = w;
        }
        if (w->scheme == QC_SCHEME_NF4) { /* of bitsandbytes */
            if (first->scheme == QC_SCHEME_NF4 && w->block_elems != first->block_elems)
                note(&f->mixed_expert, w->name);
            if (w->elems % w->block_elems != 0)
                note(&f->cut_expert, w->name);
        }
        if (f->integers && !are_alike(first, w))
            note(&f->uneven_expert, w->name);
        if (w->integers.bits && w->integers.static_activations)
            note(&f->static_expert, w->name);
    }
}

/* Looks at how the codes of a weight share scales. vLLM has groups of 256 for 4 bits only. */
static qc_status look_at_scales(finding *f, const qc_served *s, const qc_served_weight *w,
                                qc_error *err)
{
    const qc_served_integers *n = &w->integers;
    const uint64_t g = w->block_elems;
    const char *text = NULL;
    const int weights_only = n->activation_bits == 16;
    if (!weights_only && (g == 0 || n->one_scale))
        return QC_OK;
    if (weights_only && !n->one_scale &&
        (g == 0 || g == 32 || g == 64 || g == 128 || (g == 256 && n->bits == 4)))
        return QC_OK;
    if (n->one_scale)
        QC_TRY(qc_arena_printf(s->arena, &text, err, "'%s' has one scale", w->name));
    else
        QC_TRY(qc_arena_printf(s->arena, &text, err, "'%s' has groups of %" PRIu64, w->name, g));
    note(&f->no_kernel, text);
    return QC_OK;
}

static qc_status look_at_integers(finding *f, const qc_served *s, const qc_served_weight *w,
                                  qc_error *err)
{
    const qc_served_integers *n = &w->integers;
    const int weights_only = n->activation_bits == 16;
    note(&f->integers, w->name);
    if (n->zero_points || n->act_order || n->one_scale || n->static_activations ||
        n->float_activations)
        note(&f->strange, w->name);
    if (n->zero_points && (!weights_only || n->bits == 8))
        note(&f->zero_points, w->name);
    if (n->act_order)
        note(&f->act_order, w->name);
    if (n->gaps)
        note(&f->gaps, w->name);
    if (weights_only && !n->packed)
        note(&f->loose, w->name);
    else if (!weights_only &&
             (n->activation_bits != 8 || n->float_activations || n->bits != 8 || n->packed))
        note(&f->odd_activations, w->name);
    else
        return look_at_scales(f, s, w, err);
    return QC_OK;
}

/* Looks for a table that the head shares with the embeddings, which are under no name of their
 * own. */
static void look_at_head(finding *f, const qc_served *s)
{
    qc_config c;
    const char *head = NULL;
    if (!s->model->config)
        return;
    qc_config_open(&c, s->model->config);
    if (!qc_config_flag(&c, "tie_word_embeddings", qc_family_is(qc_family_of(s->model), "TIED")))
        return;
    for (uint32_t i = 0; i < s->model->tensor_count; i++) {
        const char *name = s->model->tensors[i].name;
        if (qc_ends_with(name, "embed_tokens.weight"))
            return;
        if (strcmp(name, "lm_head.weight") == 0)
            head = name;
    }
    f->only_head = head;
}

static qc_status look_at_all(finding *f, const qc_served *s, qc_error *err)
{
    int has_nf4 = 0, has_int8 = 0;
    if (qc_family_is(qc_family_of(s->model), "TP"))
        look_at_head(f, s);
    for (uint32_t i = 0; i < s->model->tensor_count; i++) {
        const qc_served_weight *w = &s->weights[i];
        if (w->is_stack)
            note(&f->stack, w->name);
        if (!is_quantized(w))
            continue;
        note(&f->quantized, w->name);
        f->quantized_elems += w->elems;
        f->expert_elems += w->is_stack || qc_expert_stem(w->name) > 0 ? w->elems : 0;
        if (qc_ends_with(w->name, "lm_head.weight"))
            note(&f->head, w->name);
        if (w->integers.bits)
            QC_TRY(look_at_integers(f, s, w, err));
        has_nf4 |= w->scheme == QC_SCHEME_NF4;
        has_int8 |= w->scheme == QC_SCHEME_INT8_ROWS;
    }
    if (!f->quantized)
        return QC_OK;
    for (uint32_t i = 0; i < s->model->tensor_count; i++) {
        if (s->weights[i].is_weight)
            QC_TRY(look_at_module(f, s, i, err));
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

#define ROWS_MOST 32
#define SPLIT     "leave out --split-fused, or --keep all of them"
#define AGAIN     "convert again without --split-fused"
#define WHOLE     "put the model's own files there"
/* What helps where no option does: the codes are made anew. */
#define ANEW "decode it with --to bf16, and convert that"

/* Fills in the rows, and returns how many there are. o is f or, where the form is qconv's own,
 * nothing: that is all that there is to say of other engines then. */
static unsigned list_rows(refusal_row rows[ROWS_MOST], const qc_served *s, const finding *f,
                          const finding *o)
{
    /* Their classes in vLLM compute with weights while they load them. */
    static const char rearranged[] = " bloom falcon gpt2 ";
    static const char scales[] =
        "has kernels for groups of 32, 64 or 128 and for a scale per row (for that alone where "
        "activations have 8 bits), and %s";
    const char *type =
        f->quantized && qc_config_word_in(s->model_type, rearranged) ? s->model_type : NULL;
    const char *split = s->ranks > 1 && !o->integers ? o->quantized : NULL;
    const refusal_row all[] = {
        /* of qconv's own loader and plug-in */
        {OURS, s->no_manifest ? "qconv.json" : NULL, "needs a %s, which is not there", "convert it",
         "convert it with qconv"},
        {OURS, qc_diffusers_class(s->model), "does not load models of diffusers (%s)",
         "leave out --for", "load it with diffusers"},
        {OURS,
         !s->own_form  ? NULL
         : s->foreign  ? s->foreign
         : f->integers ? "integers"
                       : NULL,
         "does not load weights that stay %s beside those of qconv", "--to bf16",
         "turn it back with --to bf16"},
        {OURS | BIT(TRANSFORMERS), s->awq,
         "was not tried with AWQ's form ('%s' is in it); vLLM, SGLang and lmdeploy read it",
         "--format compressed-tensors", "turn it back with --to bf16"},
        {OURS, f->strange,
         "takes a scale for each row or group and nothing else, and '%s' has more", ANEW, ANEW},
        {BIT(PLUGIN), type, "rearranges the weights of model type %s, so it takes none as codes",
         "--to bf16", "turn it back with --to bf16"},
        {BIT(PLUGIN), f->head, "takes the head in 16 bits only, and '%s' is not",
         "leave out --quantize for it", "convert again without --quantize for it"},
        {BIT(PLUGIN), f->stack, "does not take experts that are stacked in one tensor ('%s')",
         "leave out --requantize, or --experts separate",
         "--to keep --experts separate takes them apart where it can, and --to bf16 always"},
        /* of any form */
        {ALL, s->lacks, "loads nothing here, because %s", WHOLE, WHOLE},
        /* AutoWeightsLoader of vLLM 0.32.0, which stops then; older ones left embeddings random. */
        {BIT(VLLM) | BIT(PLUGIN), f->only_head,
         "passes over '%s' where tie_word_embeddings is true, and the embeddings are under no name "
         "of their own",
         "save MODEL with transformers, which names it model.embed_tokens.weight",
         "save the source with transformers, and convert it again"},
        {OTHERS, s->own_form, "does not load this form (%s), which only qconv reads",
         s->instead ? s->instead : "--to bf16", "turn it back with --to bf16"},
        {OTHERS, s->compressed ? ".zst" : NULL, "does not read %s files", "--compress none",
         "qconv unpack writes plain files"},
        {BIT(TRANSFORMERS), s->rest,
         "cannot compute with norms or biases in F32 beside a config.json of 16 bits (%s)",
         "add that option", "convert again with that option"},
        {OTHERS, o->stack,
         "by itself loads no quantized experts that are stacked in one tensor ('%s')",
         "--experts separate", "--to keep --experts separate takes them apart"},
        {BIT(VLLM), o->kept_member,
         "has one scheme for a fused group, and '%s' is in 16 bits beside quantized members", SPLIT,
         AGAIN},
        /* of bitsandbytes */
        {BIT(VLLM), o->unlisted,
         "looks for '%s' on the skip list, which does not have it, and quantizes again what was "
         "kept",
         "convert with this version", "convert again with this version"},
        {BIT(VLLM), split, "does not split weights in bitsandbytes' form ('%s') over cards",
         "--for vllm-qconv serves them with qconv's plug-in, or --format compressed-tensors",
         AGAIN},
        {BIT(VLLM), o->int8_expert, "has no int8 of bitsandbytes for experts, and '%s' is one",
         "--to nf4", "convert again with --to nf4"},
        {BIT(VLLM), o->kept_expert, "quantizes experts that were kept ('%s') again, to plain NF4",
         "quantize them too, without --keep", "convert again without --keep for experts"},
        {BIT(VLLM), o->mixed_expert,
         "takes one block size for the experts of a layer, and '%s' has another",
         "leave out --split-fused", AGAIN},
        {BIT(VLLM), o->cut_expert,
         "joins the blocks of all experts, and '%s' is not a whole number of them",
         "a smaller --block-size", "convert again with a smaller --block-size"},
        /* of compressed-tensors */
        {BIT(TRANSFORMERS) | BIT(VLLM), o->loose,
         "takes weights of 8 bits beside activations of 16 only as pack-quantized, and '%s' is "
         "int-quantized",
         ANEW, ANEW},
        {BIT(VLLM), o->odd_activations,
         "has activations of fewer than 16 bits as int8 beside int8 weights alone, and '%s' is of "
         "another kind",
         ANEW, ANEW},
        {BIT(VLLM), o->no_kernel, scales, ANEW, ANEW},
        {BIT(VLLM), o->zero_points,
         "takes zero points beside 4-bit weights (and beside 8-bit ones on Hopper alone), and '%s' "
         "has 8 bits",
         ANEW, ANEW},
        /* humming-kernels 0.1.19: pack_weight asks for whole words. */
        {BIT(VLLM), o->gaps, "takes rows of whole 32-bit words of dense codes, and '%s' has others",
         "a --block-size of 32, 64 or 128, or --keep", ANEW},
        {BIT(VLLM), o->act_order, "no longer loads act-order, and '%s' has it", ANEW, ANEW},
        {BIT(VLLM), o->mixed_member,
         "has one scheme for a fused group, and '%s' has another than its first member", SPLIT,
         AGAIN},
        {BIT(VLLM), o->uneven_expert,
         "takes one scheme for the experts of a layer, and '%s' has another than the first", SPLIT,
         AGAIN},
        {BIT(VLLM), o->static_expert,
         "quantizes the activations of experts itself, and those of '%s' are static", ANEW, ANEW},
    };
    _Static_assert(sizeof all / sizeof *all <= ROWS_MOST, "all rows have room");
    memcpy(rows, all, sizeof all);
    return sizeof all / sizeof *all;
}

qc_status qc_engines_check(qc_refusals *out, const qc_served *s, unsigned engines, qc_error *err)
{
    finding f = {.quantized = NULL};
    const finding nothing = {.quantized = NULL};
    refusal_row rows[ROWS_MOST];
    const char *not5 = NULL;
    if (s->foreign && !s->own_form)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "--for: some weights are %s and stay so, and qconv does not know which engines "
                "read that; expected plain weights, or those of bitsandbytes, compressed-tensors "
                "or qconv",
                s->foreign);
    QC_TRY(look_at_all(&f, s, err));
    const unsigned count = list_rows(rows, s, &f, s->own_form ? &nothing : &f);
    if (!s->own_form)
        QC_TRY(qc_loaders_not5(&not5, s->arena, s->model_type, f.expert_elems, f.quantized_elems,
                               err));
    *out = (qc_refusals){.count = 0};
    QC_TRY(qc_arena_array(s->arena, &out->list, QC_ENGINES * (count + 1), err));
    for (unsigned e = 0; e < QC_ENGINES; e++) {
        if (!(engines & 1u << e))
            continue;
        for (unsigned i = 0; i < count; i++) {
            if (rows[i].found && rows[i].engines & 1u << e)
                QC_TRY(add_row(out, s, &rows[i], (qc_engine)e, err));
        }
        if (e == QC_ENGINE_TRANSFORMERS && not5)
            out->list[out->count++] = (qc_refusal){QC_ENGINE_TRANSFORMERS, not5};
    }
    return QC_OK;
}

/* ---- from a plan ---- */

int qc_served_set_integers(qc_served_weight *out, const qc_coded_weight *w)
{
    if (w->coding != QC_CODING_INT && w->coding != QC_CODING_PACKED && w->coding != QC_CODING_AWQ)
        return 0;
    out->name = w->name;
    out->block_elems = qc_integers_block(w);
    out->integers = (qc_served_integers){
        .bits = w->said.bits ? w->said.bits : w->bits,
        .packed = w->coding != QC_CODING_INT,
        .one_scale = w->tile_rows > 1,
        .zero_points = w->zeros != UINT32_MAX,
        .act_order = w->group_index != UINT32_MAX,
        .gaps = w->coding == QC_CODING_PACKED && (w->padded || w->dims[1] * w->bits % 32 != 0),
        .activation_bits = qc_integers_activation_bits(w),
        .static_activations = w->said.static_activations,
        .float_activations = w->said.float_activations,
    };
    return 1;
}

static qc_status served_of_plan(qc_served *out, const qc_plan *p, const qc_loaders *l,
                                qc_error *err)
{
    qc_served_weight *weights = NULL;
    const char *foreign = NULL;
    out->awq = NULL;
    QC_TRY(qc_arena_array(p->arena, &weights, p->model->tensor_count, err));
    for (uint32_t i = 0; i < p->job_count; i++) {
        const qc_job *j = &p->jobs[i];
        const qc_stored_weight *stored = j->scheme == QC_SCHEME_KEEP ? j->entry->stored : NULL;
        const qc_coded_weight *coded = j->scheme == QC_SCHEME_KEEP ? j->entry->coded : NULL;
        qc_served_weight *w = &weights[j->source];
        *w = (qc_served_weight){.is_weight = j->entry->owner == UINT32_MAX,
                                .is_stack = j->stack && qc_scheme_is_quantized(j->scheme),
                                .name = p->model->tensors[j->source].name,
                                .elems = j->elems};
        const qc_scheme_row *row = &qc_schemes[j->scheme];
        if (row->format == QC_FORMAT_AWQ)
            out->awq = w->name;
        if (row->format == QC_FORMAT_COMPRESSED_TENSORS || row->format == QC_FORMAT_AWQ) {
            w->block_elems = row->by_rows ? 0 : j->form.block_elems;
            w->integers = (qc_served_integers){.bits = row->bits,
                                               .packed = row->code_dtype == QC_DTYPE_I32,
                                               .gaps = qc_form_has_gaps(&j->form),
                                               .activation_bits = row->activation_bits};
        } else if (qc_scheme_is_quantized(j->scheme)) {
            w->scheme = j->scheme;
            w->block_elems = row->by_rows ? 0 : j->form.block_elems;
        } else if (stored) {
            w->scheme = stored->stored_as;
            w->block_elems = stored->block_elems;
        } else if (coded) {
            w->elems = qc_sat_mul(coded->dims[0], coded->dims[1]);
            if (!qc_served_set_integers(w, coded))
                foreign = qc_coding_name(coded->coding);
            if (coded->coding == QC_CODING_AWQ)
                out->awq = w->name;
        } else if (j->scheme == QC_SCHEME_KEEP && w->is_weight &&
                   qc_dtype_is_fp8(p->model->tensors[j->source].dtype)) {
            foreign = "fp8"; /* its scales have names that nobody knows, or are not there */
        }
    }
    *out = (qc_served){.arena = p->arena,
                       .awq = out->awq,
                       .model = p->model,
                       .weights = weights,
                       .foreign = foreign,
                       .own_form = l->own_form,
                       .instead = l->instead,
                       .model_type = p->recipe->model_type,
                       .rest = l->rest,
                       .lacks = l->lacks,
                       .compressed = l->compressed};
    return QC_OK;
}

qc_status qc_engines_settle(qc_loaders *l, const qc_plan *plan, unsigned engines, uint32_t ranks,
                            int compressed, const qc_call *call, qc_error *err)
{
    qc_served s;
    qc_refusals all = {0};
    QC_TRY(qc_loaders_of(l, plan, err));
    QC_TRY(served_of_plan(&s, plan, l, err));
    s.ranks = ranks;
    s.compressed = compressed;
    l->qconv_load = l->plugin = !s.foreign || s.own_form;
    if (l->plugin)
        QC_TRY(qc_engines_check(&all, &s, OURS, err));
    for (unsigned i = 0; i < all.count; i++)
        *(all.list[i].engine == QC_ENGINE_LOAD ? &l->qconv_load : &l->plugin) = 0;
    if (qc_loaders_unquantized(l) && qc_family_is(qc_family_of(plan->model), "TP")) {
        QC_TRY(qc_engines_check(&all, &s, BIT(VLLM), err));
        l->vllm_alone = all.count == 0;
    }
    qc_loaders_warn(l, plan, call);
    if (s.awq && qc_loaders_awq(l))
        QC_TRY(qc_arena_printf(plan->arena, &l->lmdeploy, err,
                               "--backend turbomind --model-format awq --tp %" PRIu32,
                               ranks ? ranks : 1));
    if (!engines)
        return QC_OK;
    QC_TRY(qc_engines_check(&all, &s, engines, err));
    for (unsigned i = 1; i < all.count; i++)
        qc_console_warn(call, "--for %s: %s", qc_engine_rows[all.list[i].engine].name,
                        all.list[i].sentence);
    if (all.count > 0)
        QC_FAIL(err, QC_ERR_USAGE, "--for %s: %s", qc_engine_rows[all.list[0].engine].name,
                all.list[0].sentence);
    return QC_OK;
}
