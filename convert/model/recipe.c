/* Decides what becomes of every tensor, from its class, the rules and the options.
 *
 *   1. classify   what is it: a table for the model's type, else the general rules; weights that
 *                 are quantized already by the tensors beside them
 *   2. rules      --keep and --quantize globs; the last one that matches a tensor wins
 *   3. decide     a scheme for every tensor
 *   4. skip list  the modules that a loader must not turn into quantized ones
 *
 * Everything is one pass over the tensors, or one per glob. */
#include "convert/model/recipe.h"

#include "base/edit_distance.h"
#include "base/text.h"
#include "convert/families/config_fields.h"
#include "convert/families/type_table.h"
#include "convert/model/expert_split.h"
#include "convert/model/recipe_coded.h"
#include "convert/model/recipe_diffusers.h"
#include "convert/model/recipe_rules.h"
#include "convert/model/recipe_skip.h"
#include "convert/model/recipe_stored.h"
#include "convert/term/glob.h"
#include "quant/quant_ops.h"

#include <inttypes.h>
#include <string.h>

#define NO_RULE UINT32_MAX

typedef struct {
    qc_recipe *out;
    qc_arena *arena;
    const qc_checkpoint *model;
    const qc_recipe_options *options;
    const qc_family *table;
    qc_model_facts facts;
    uint32_t count;
    int quantizing; /* --to quantizes (qc_to_quantizes) */
    int tied;       /* the output head is the embedding table */
    qc_tensor_class *classes;
    uint32_t *rule_of; /* per tensor: the rule that wins, or NO_RULE */
    const char **rule_why;
    const char **fused_why; /* per tensor: why, if a rule was widened to it; else NULL */
    qc_stored_set stored;
    qc_coded_set coded;
} maker;

const char *qc_role_name(qc_role r)
{
    static const char *const names[] = {
        [QC_ROLE_LINEAR] = "linear", [QC_ROLE_EMBEDDING] = "embedding", [QC_ROLE_HEAD] = "head",
        [QC_ROLE_ROUTER] = "router", [QC_ROLE_NORM] = "norm",           [QC_ROLE_BIAS] = "bias",
        [QC_ROLE_CONV] = "conv",     [QC_ROLE_STATE] = "state",         [QC_ROLE_PACKED] = "packed",
        [QC_ROLE_OTHER] = "other",
    };
    return names[r];
}

/* Is tensor i a weight in integers with scales? */
static int is_packed(const maker *m, uint32_t i)
{
    return m->coded.weights[i] && qc_coding_is_packed(m->coded.weights[i]->coding);
}

/* Tensor i as the recipe sees it: a weight in integers has the name and shape that it has when it
 * is decoded. */
static qc_checkpoint_tensor face_of(const maker *m, uint32_t i)
{
    qc_checkpoint_tensor t = m->model->tensors[i];
    if (is_packed(m, i)) {
        t.name = m->coded.weights[i]->name;
        t.ndim = m->coded.weights[i]->ndim;
        memcpy(t.dims, m->coded.weights[i]->dims, sizeof t.dims);
    }
    return t;
}

/* ---- the model ---- */

static const qc_json_node *first_member(const qc_checkpoint *model)
{
    return model->config ? qc_json_first(qc_config_root(model->config)) : NULL;
}

/* Returns a member of config.json, or of its text_config, where multimodal models have it. */
const qc_json_node *qc_config_get(const qc_checkpoint *model, const char *key)
{
    const qc_json_node *root = qc_config_root(model->config), *n = qc_json_get(root, key);
    return n ? n : qc_json_get(qc_json_get(root, "text_config"), key);
}

static void read_facts(maker *m)
{
    static const char *const expert_keys[] = {
        "num_experts",         "num_local_experts", "n_routed_experts", "moe_num_experts",
        "num_experts_per_tok", "moe_config",        "num_expert",
    };
    m->facts.model_type = qc_config_type(m->model->config);
    if (qc_json_as_u64(qc_config_get(m->model, "vocab_size"), "vocab_size", &m->facts.vocab_size,
                       NULL) != QC_OK)
        m->facts.vocab_size = 0;
    for (size_t i = 0; i < sizeof expert_keys / sizeof *expert_keys; i++)
        m->facts.has_experts |= qc_config_get(m->model, expert_keys[i]) != NULL;
    m->table = qc_family_find(m->facts.model_type);
    m->facts.has_conv1d = qc_type_is("conv1d", m->facts.model_type);
    for (const qc_json_node *part = first_member(m->model); part; part = qc_json_next(part))
        m->facts.has_conv1d |=
            qc_type_is("conv1d", qc_json_string_or(qc_json_get(part, "model_type"), ""));
}

/* Is the output head tied to the embeddings? A head that is in the file shares their values when
 * the configuration says so, when it is the only one of the two in the file, or when the file says
 * that it stands for the other name. */
static int head_is_tied(const maker *m)
{
    int embeddings = 0;
    for (uint32_t i = 0; i < m->count; i++)
        embeddings |= m->classes[i].role == QC_ROLE_EMBEDDING && m->model->tensors[i].ndim == 2;
    if (!embeddings)
        return 1;
    for (size_t i = 0; i < m->model->meta_count; i++) {
        if (qc_ends_with(m->model->meta[i].value, "lm_head.weight"))
            return 1;
    }
    const qc_json_node *tie = qc_config_get(m->model, "tie_word_embeddings");
    return qc_json_bool_or(tie, qc_family_is(m->table, "TIED"));
}

/* Returns the tensor that has `other` in the place of a name's tail; NULL if there is none. */
static const qc_checkpoint_tensor *find_instead(const maker *m, const char *name, const char *tail,
                                                const char *other)
{
    if (!qc_ends_with(name, tail))
        return NULL;
    uint32_t i = qc_checkpoint_beside(m->model, name, strlen(name) - strlen(tail), other);
    return i == QC_NO_TENSOR ? NULL : &m->model->tensors[i];
}

/* What the length of the bias beside a matrix says: 1, its columns are the outputs (a Conv1D, [in,
 * out] in the file); -1, its rows are; 0, nothing. */
static int bias_says_conv1d(const maker *m, const qc_checkpoint_tensor *t)
{
    const qc_checkpoint_tensor *b = find_instead(m, t->name, ".weight", ".bias");
    if (!b || b->ndim != 1 || t->ndim != 2 || t->dims[0] == t->dims[1])
        return 0;
    return b->dims[0] == t->dims[1] ? 1 : b->dims[0] == t->dims[0] ? -1 : 0;
}

/* Is this a Conv1D within a model that has no table of its own (GPT-2 as the decoder of another
 * model)? For a square matrix, and for one that is quantized already and thus [out, in], the name
 * and the model types in config.json decide. */
static int is_conv1d(const maker *m, uint32_t i)
{
    const qc_checkpoint_tensor t = face_of(m, i);
    int says = m->stored.weights[i] || is_packed(m, i) ? 0 : bias_says_conv1d(m, &t);
    if (says != 0)
        return says > 0;
    return m->facts.has_conv1d && qc_rules_conv1d_name(t.name);
}

static qc_status classify(maker *m, qc_error *err)
{
    QC_TRY(qc_arena_array(m->arena, &m->classes, m->count, err));
    for (uint32_t i = 0; i < m->count; i++) {
        qc_tensor_class *c = &m->classes[i];
        const qc_checkpoint_tensor t = face_of(m, i);
        if (!m->table || !qc_family_classify(m->table, t.name, c))
            qc_rules_classify(&m->facts, &t, c);
        if (c->role == QC_ROLE_LINEAR && !m->table && is_conv1d(m, i))
            c->traits |= QC_TRAIT_CONV1D;
        /* nn.MultiheadAttention multiplies with the raw weight of its out_proj, so that cannot be a
         * quantized module. The in_proj_weight beside it tells that it is one. */
        if (c->role == QC_ROLE_LINEAR &&
            find_instead(m, t.name, "out_proj.weight", "in_proj_weight"))
            *c = (qc_tensor_class){QC_ROLE_OTHER, QC_TRAIT_MODULE, "used raw by its attention"};
        if (m->stored.weights[i])
            *c = (qc_tensor_class){QC_ROLE_PACKED, QC_TRAIT_FIXED | (c->traits & QC_TRAIT_CONV1D),
                                   "quantized already"};
        else if (m->stored.owners[i] != QC_NO_TENSOR)
            *c = (qc_tensor_class){QC_ROLE_STATE, QC_TRAIT_FIXED, "state of a quantized weight"};
        if (m->coded.weights[i] && m->coded.weights[i]->coding == QC_CODING_MXFP4)
            *c = (qc_tensor_class){QC_ROLE_PACKED, QC_TRAIT_FIXED, "MXFP4, kept as stored"};
        else if (m->coded.owners[i] != QC_NO_TENSOR)
            *c = (qc_tensor_class){QC_ROLE_STATE, QC_TRAIT_FIXED, "scale of a packed weight"};
    }
    if (qc_diffusers_class(m->model))
        qc_diffusers_correct(qc_diffusers_class(m->model), m->model, m->classes);
    m->tied = head_is_tied(m);
    for (uint32_t i = 0; i < m->count; i++) {
        if (m->tied && m->classes[i].role == QC_ROLE_HEAD &&
            qc_ends_with(face_of(m, i).name, "lm_head.weight"))
            m->classes[i].why = "output head, tied to the embeddings";
    }
    return QC_OK;
}

/* ---- rules ---- */

static const char *format_obstacle(const maker *m, uint32_t i)
{
    const qc_checkpoint_tensor t = face_of(m, i);
    int linear = t.ndim == 2 && !(m->classes[i].traits & QC_TRAIT_CONV1D);
    return qc_scheme_obstacle(m->options, linear ? t.dims[1] : 0);
}

/* Why --quantize cannot have this tensor, or NULL if it can. */
static const char *quantize_obstacle(const maker *m, uint32_t i)
{
    const qc_checkpoint_tensor face = face_of(m, i), *t = &face;
    const qc_tensor_class *c = &m->classes[i];
    if (m->coded.weights[i] && m->coded.weights[i]->coding == QC_CODING_MXFP4)
        return m->options->requantize ? NULL : "is MXFP4 already; see --requantize";
    if (c->role == QC_ROLE_PACKED || c->role == QC_ROLE_STATE)
        return "is part of a weight that is packed already";
    if (t->ndim != 2)
        return "does not have two dimensions";
    if (!qc_dtype_is_quantizable(t->dtype) && !m->coded.weights[i])
        return "does not hold F64, F32, F16 or BF16";
    if (t->dims[0] == 0 || t->dims[1] == 0)
        return "is empty";
    if (!qc_ends_with(t->name, ".weight"))
        return "is not the weight of a module";
    if (format_obstacle(m, i))
        return format_obstacle(m, i);
    if (c->traits & QC_TRAIT_MAYBE)
        return NULL;
    if (c->traits & QC_TRAIT_FLOAT)
        return "is a Linear that its loader holds in 32 bit";
    switch (c->role) {
    case QC_ROLE_EMBEDDING:
        return "is an embedding table, which no loader reads quantized";
    case QC_ROLE_NORM:
        return "is a norm";
    case QC_ROLE_HEAD:
        return m->tied && qc_ends_with(t->name, "lm_head.weight")
                   ? "is tied to the embeddings, which no loader reads quantized"
                   : NULL;
    case QC_ROLE_ROUTER:
        return c->traits & QC_TRAIT_MODULE ? NULL : "is a router that is not a Linear";
    case QC_ROLE_OTHER:
        return c->traits & QC_TRAIT_MODULE ? "is multiplied with raw by its attention" : NULL;
    case QC_ROLE_LINEAR:
        return NULL;
    case QC_ROLE_BIAS:
    case QC_ROLE_CONV:
    case QC_ROLE_STATE:
    case QC_ROLE_PACKED:
        break;
    }
    return "is not the weight of a Linear";
}

/* Returns the name that a misspelt one was meant to be, or NULL. Of very many none is sought. */
static const char *nearest_name(const qc_checkpoint *model, const char *typed)
{
    enum { MANY = 20000 };
    const size_t len = strlen(typed);
    size_t best = len / 4 + 1;
    const char *nearest = NULL;
    for (size_t i = 0; i < model->tensor_count && model->tensor_count <= MANY; i++) {
        const char *name = model->tensors[i].name;
        const size_t n = strlen(name);
        if (len > QC_EDIT_MAX_BYTES || n + best <= len || len + best <= n)
            continue;
        const unsigned distance = qc_edit_distance(typed, len, name, n);
        nearest = distance < best ? name : nearest;
        best = distance < best ? distance : best;
    }
    return nearest;
}

static qc_status apply_rules(maker *m, qc_error *err)
{
    const qc_recipe_options *o = m->options;
    QC_TRY(qc_arena_array(m->arena, &m->rule_of, m->count, err));
    QC_TRY(qc_arena_array(m->arena, &m->rule_why, o->rule_count, err));
    for (uint32_t i = 0; i < m->count; i++)
        m->rule_of[i] = NO_RULE;
    for (uint32_t r = 0; r < o->rule_count; r++) {
        const qc_rule *rule = &o->rules[r];
        const char *option = rule->quantize ? "--quantize" : "--keep";
        if (rule->quantize && !m->quantizing)
            QC_FAIL(err, QC_ERR_USAGE, "--quantize '%s' needs --to nf4, int4, int8 or auto",
                    rule->glob);
        QC_TRY(qc_arena_printf(m->arena, &m->rule_why[r], err, "%s %s", option, rule->glob));
        uint32_t matches = 0, usable = 0, first = 0;
        const char *obstacle = NULL;
        for (uint32_t i = 0; i < m->count; i++) {
            if (!qc_glob_match(rule->glob, m->model->tensors[i].name) &&
                !qc_glob_match(rule->glob, face_of(m, i).name))
                continue;
            const char *why_not = rule->quantize ? quantize_obstacle(m, i) : NULL;
            matches++;
            if (why_not && !obstacle) {
                obstacle = why_not;
                first = i;
            }
            if (why_not)
                continue;
            usable++;
            m->rule_of[i] = r;
        }
        if (matches == 0) {
            const char *longer = NULL;
            QC_TRY(qc_arena_printf(m->arena, &longer, err, "%s.weight", rule->glob));
            for (uint32_t i = 0; i < m->count; i++)
                if (qc_glob_match(longer, m->model->tensors[i].name))
                    QC_FAIL(err, QC_ERR_USAGE,
                            "%s '%s' matches no tensor, but modules; did you mean '%s'?", option,
                            rule->glob, longer);
            longer = nearest_name(m->model, rule->glob);
            QC_FAIL(err, QC_ERR_USAGE, "%s '%s' matches no tensor; %s '%s'%s", option, rule->glob,
                    longer ? "did you mean" : "a name here is",
                    longer     ? longer
                    : m->count ? m->model->tensors[m->count / 2].name
                               : "(none)",
                    longer ? "?" : "");
        }
        if (usable == 0)
            QC_FAIL(err, QC_ERR_USAGE, "%s '%s' matches only what cannot be quantized: '%s' %s%s",
                    option, rule->glob, m->model->tensors[first].name, obstacle,
                    matches > 1 ? ", and so on" : "");
    }
    return QC_OK;
}

/* ---- decisions ---- */

static int kept_by_rule(const maker *m, uint32_t i)
{
    return m->rule_of[i] != NO_RULE && !m->options->rules[m->rule_of[i]].quantize;
}

/* Refuses a weight that would have to be read but has a form that qconv cannot read. */
static qc_status refuse_foreign(const maker *m, uint32_t i, qc_error *err)
{
    const qc_checkpoint_tensor *t = &m->model->tensors[i];
    const qc_tensor_class *c = &m->classes[i];
    if (kept_by_rule(m, i) || m->coded.weights[i] || m->stored.weights[i] ||
        m->coded.owners[i] != QC_NO_TENSOR || m->stored.owners[i] != QC_NO_TENSOR)
        return QC_OK;
    int buffer = c->role == QC_ROLE_OTHER && (c->traits & QC_TRAIT_FIXED);
    const char *tool = buffer ? NULL : qc_foreign_tool(m->model, i);
    if (tool)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "tensor '%s' was packed by %s in a form that qconv does not read: start from the "
                "16-bit checkpoint, or leave such tensors as they are with --keep",
                t->name, tool);
    if (c->role != QC_ROLE_LINEAR || t->ndim != 2 || qc_dtype_is_quantizable(t->dtype))
        return QC_OK;
    if (qc_dtype_bits(t->dtype) == 8 && strncmp(qc_dtype_name(t->dtype), "F8", 2) == 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "tensor '%s' is %s, but there is no weight_scale_inv or weight_scale beside it: "
                "start from the 16-bit checkpoint, or leave such tensors as they are with --keep",
                t->name, qc_dtype_name(t->dtype));
    QC_FAIL(err, QC_ERR_UNSUPPORTED,
            "tensor '%s' is the weight of a Linear, but holds %s: expected F64, F32, F16, BF16, or "
            "FP8 or integers with their scales; --keep leaves it as it is",
            t->name, qc_dtype_name(t->dtype));
}

/* Decoded integers are [out, in], so a Conv1D that is not quantized would have to be transposed. */
static qc_status refuse_turned(const qc_recipe_entry *e, const maker *m, uint32_t i, qc_error *err)
{
    int decoded = e->scheme == QC_SCHEME_CAST || m->options->to == QC_TO_AUTO;
    if (!is_packed(m, i) || !decoded || e->scheme == QC_SCHEME_KEEP ||
        !(m->classes[i].traits & QC_TRAIT_CONV1D))
        return QC_OK;
    QC_FAIL(err, QC_ERR_UNSUPPORTED,
            "tensor '%s' is the weight of a Conv1D in %s, which qconv cannot turn back: start from "
            "the 16-bit checkpoint, use --to nf4 or int8, or leave it as it is with --keep",
            m->model->tensors[i].name, qc_coding_name(e->coded->coding));
}

static void cast_or_keep(qc_recipe_entry *e, const maker *m, uint32_t i, qc_dtype to,
                         const char *why)
{
    qc_dtype from = m->model->tensors[i].dtype;
    if (!qc_dtype_is_quantizable(from) || from == to || (m->classes[i].traits & QC_TRAIT_FIXED))
        return;
    e->scheme = QC_SCHEME_CAST;
    e->out_dtype = to;
    e->why = why;
}

static void apply_rest(qc_recipe_entry *e, const maker *m, uint32_t i)
{
    if (m->options->rest == QC_REST_BF16)
        cast_or_keep(e, m, i, QC_DTYPE_BF16, "--rest bf16");
    else if (m->options->rest == QC_REST_FP16)
        cast_or_keep(e, m, i, QC_DTYPE_F16, "--rest fp16");
}

static int is_stack(const maker *m, uint32_t i)
{
    return m->coded.weights[i] && m->coded.weights[i]->coding == QC_CODING_MXFP4;
}

/* Floats that are written as one tensor of codes for all experts. */
static int is_float_stack(const maker *m, uint32_t i)
{
    return qc_experts_become_codes(m->model, m->options) && m->model->tensors[i].ndim == 3 &&
           qc_experts_is_stack(m->model, &m->model->tensors[i]);
}

static const char *why_by_rule(const maker *m, uint32_t i)
{
    return m->fused_why[i] ? m->fused_why[i] : m->rule_why[m->rule_of[i]];
}

/* Is the weight to be quantized, and can it be? */
static int is_wanted(const maker *m, uint32_t i)
{
    const qc_checkpoint_tensor face = face_of(m, i), *t = &face;
    const qc_tensor_class *c = &m->classes[i];
    int coded = is_stack(m, i), stack = coded || is_float_stack(m, i);
    int wanted = coded   ? m->options->requantize
                 : stack ? 1
                         : c->role == QC_ROLE_LINEAR && !(c->traits & QC_TRAIT_FLOAT);
    if (m->rule_of[i] != NO_RULE)
        wanted = m->options->rules[m->rule_of[i]].quantize;
    return wanted && t->bytes > 0 && (t->ndim == 2 || stack) &&
           (qc_dtype_is_quantizable(t->dtype) || m->coded.weights[i]) && !format_obstacle(m, i);
}

/* Lets rules count for whole fused groups, whose members then have one scheme. Where nothing is
 * quantized, a group is split if some of its members stay quantized as they are. */
static qc_status widen_rules(maker *m, qc_error *err)
{
    qc_fused_state *states = NULL;
    QC_TRY(qc_arena_array(m->arena, &m->fused_why, m->count, err));
    if (m->options->rule_count == 0 || m->options->split_fused || m->options->to == QC_TO_KEEP)
        return QC_OK;
    QC_TRY(qc_arena_array(m->arena, &states, m->count, err));
    for (uint32_t i = 0; i < m->count; i++) {
        int quantized = m->quantizing
                            ? is_wanted(m, i)
                            : (m->stored.weights[i] || m->coded.weights[i]) && kept_by_rule(m, i);
        states[i] = quantized                                  ? QC_FUSED_QUANTIZED
                    : m->quantizing && quantize_obstacle(m, i) ? QC_FUSED_FIXED
                                                               : QC_FUSED_KEPT;
    }
    return qc_fused_widen(&m->out->widened, m->arena, m->model, m->options, states, m->rule_of,
                          m->fused_why, err);
}

static qc_status decide_quantized(qc_recipe_entry *e, const maker *m, uint32_t i, qc_error *err)
{
    const qc_checkpoint_tensor *t = &m->model->tensors[i];
    const qc_tensor_class *c = &m->classes[i];
    int coded = is_stack(m, i), stack = coded || is_float_stack(m, i);
    if (stack && !coded)
        e->why =
            m->options->experts == QC_EXPERTS_STACKED ? "--experts stacked" : "stack of experts";
    if (coded && m->options->requantize)
        e->why = "--requantize";
    if (m->rule_of[i] != NO_RULE) {
        e->why = why_by_rule(m, i);
    } else if (c->role == QC_ROLE_LINEAR && t->ndim != 2) {
        e->why = "not 2-D";
        e->unasked = t->ndim > 2 && !stack && qc_dtype_is_quantizable(t->dtype);
    } else if (c->role == QC_ROLE_LINEAR && (t->dims[0] == 0 || t->dims[1] == 0)) {
        e->why = "empty";
    } else if (c->role == QC_ROLE_LINEAR && format_obstacle(m, i)) {
        e->why = format_obstacle(m, i);
        e->unasked = 1;
    } else if (!stack && qc_experts_look_stacked(t)) {
        e->unasked = qc_dtype_is_quantizable(t->dtype);
    }
    if (!is_wanted(m, i)) {
        apply_rest(e, m, i);
        if (is_packed(m, i) && !kept_by_rule(m, i)) { /* cast to the model's dtype */
            e->scheme = QC_SCHEME_CAST;
            e->out_dtype = e->coded->dtype;
            if (m->options->rest != QC_REST_KEEP)
                e->out_dtype = m->options->rest == QC_REST_BF16 ? QC_DTYPE_BF16 : QC_DTYPE_F16;
        }
        /* T5's "wo" overflows in float16. transformers turns it into F32 in a checkpoint that is
         * not quantized, but leaves its dtype alone in one that is. */
        if ((c->traits & QC_TRAIT_FLOAT) && m->rule_of[i] == NO_RULE &&
            e->out_dtype == QC_DTYPE_F16) {
            e->scheme = qc_checkpoint_dtype(t) == QC_DTYPE_F32 ? QC_SCHEME_KEEP : QC_SCHEME_CAST;
            e->out_dtype = QC_DTYPE_F32;
            e->why = c->why;
        }
        return QC_OK;
    }
    /* For --to auto, whatever could be quantized is marked so, and auto_choice.c then decides each
     * one. */
    e->scheme = qc_scheme_of_options(m->options);
    e->block_elems = qc_scheme_block_of_options(m->options);
    e->transpose = (stack && !coded ? qc_experts_is_stack(m->model, t) == 2
                                    : (c->traits & QC_TRAIT_CONV1D) != 0) &&
                   !is_packed(m, i);
    /* The codes of a stack's experts lie one after the other, so a block must not span two. */
    const uint64_t *dims = coded ? e->coded->dims : t->dims;
    if (stack && !qc_schemes[e->scheme].by_rows && dims[1] * dims[2] % e->block_elems != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "tensor '%s': experts of %" PRIu64 " x %" PRIu64 " weights are not whole blocks of "
                "%" PRIu32 "; use a smaller --block-size, or --keep '%s'",
                t->name, dims[1], dims[2], e->block_elems, t->name);
    return QC_OK;
}

static void decide_float(qc_recipe_entry *e, const maker *m, uint32_t i)
{
    const int bf16 = m->options->to == QC_TO_BF16;
    const qc_dtype dtype = bf16 ? QC_DTYPE_BF16 : QC_DTYPE_F16;
    const char *why = bf16 ? "--to bf16" : "--to fp16";
    uint32_t owner = m->stored.owners[i] == QC_NO_TENSOR ? i : m->stored.owners[i];
    if (kept_by_rule(m, owner)) {
        e->why = why_by_rule(m, owner);
        return;
    }
    if (m->stored.weights[i]) {
        e->scheme = QC_SCHEME_DEQUANT;
        e->out_dtype = dtype;
        e->transpose = (e->stored->ndim == 3 && !qc_experts_known(m->model)) ||
                       (e->stored->ndim == 2 && (m->classes[i].traits & QC_TRAIT_CONV1D));
    } else if (e->coded) {
        e->scheme = QC_SCHEME_CAST;
        e->out_dtype = dtype;
        e->transpose = is_stack(m, i) != 0;
        e->why = why;
    } else if (owner != i) {
        e->scheme = QC_SCHEME_ABSORBED;
    } else if (m->out->input_is_quantized) {
        apply_rest(e, m, i);
    } else {
        cast_or_keep(e, m, i, dtype, why);
    }
}

/* ---- multi-token prediction ---- */

/* Leaves out what is for multi-token prediction alone. */
static qc_status drop_mtp(maker *m, qc_error *err)
{
    uint64_t layers = 0;
    if (!m->options->drop_mtp)
        return QC_OK;
    QC_TRY(qc_json_as_u64(qc_config_get(m->model, "num_hidden_layers"), "num_hidden_layers",
                          &layers, err));
    for (uint32_t i = 0; i < m->count; i++) {
        qc_recipe_entry *e = &m->out->entries[i];
        if (!qc_rules_predicts_more(m->model->tensors[i].name, layers))
            continue;
        e->scheme = QC_SCHEME_ABSORBED;
        e->why = "--drop-mtp";
        m->out->mtp_dropped = 1;
    }
    for (size_t i = 0; i < m->model->lost_count && !m->out->mtp_dropped; i++)
        m->out->mtp_dropped = qc_rules_predicts_more(m->model->lost[i], layers);
    if (!m->out->mtp_dropped)
        QC_FAIL(
            err, QC_ERR_USAGE,
            "--drop-mtp: %s has no layer for multi-token prediction, because none is called mtp "
            "or numbered %" PRIu64 " (num_hidden_layers) or above; leave the option out",
            m->model->path, layers);
    return QC_OK;
}

static qc_status decide(maker *m, qc_error *err)
{
    QC_TRY(qc_arena_array(m->arena, &m->out->entries, m->count, err));
    for (uint32_t i = 0; i < m->count; i++) {
        qc_recipe_entry *e = &m->out->entries[i];
        e->scheme = QC_SCHEME_KEEP;
        e->role = m->classes[i].role;
        e->out_dtype = m->model->tensors[i].dtype;
        e->why = m->classes[i].why;
        e->stored = m->stored.weights[i];
        e->coded = m->coded.weights[i];
        e->owner = m->stored.owners[i] != QC_NO_TENSOR ? m->stored.owners[i] : m->coded.owners[i];
        if (m->options->to == QC_TO_KEEP) {
            e->why = "--to keep";
            continue;
        }
        QC_TRY(refuse_foreign(m, i, err));
        if (m->quantizing)
            QC_TRY(decide_quantized(e, m, i, err));
        else
            decide_float(e, m, i);
        QC_TRY(refuse_turned(e, m, i, err));
    }
    qc_recipe_settle_scales(m->out, m->model);
    return drop_mtp(m, err);
}

/* Lists heads that have no tensor of their own because they are tied. An explicit list replaces a
 * loader's defaults, so they have to be in it. */
static qc_status skip_hidden_heads(maker *m, qc_skip_list *list, qc_error *err)
{
    const char *head = qc_type_hidden_head(m->facts.model_type);
    QC_TRY(qc_skip_add(list, "lm_head", strlen("lm_head"), err));
    QC_TRY(qc_skip_add(list, head, strlen(head), err));
    /* The models within a composite model have heads of their own types. */
    const qc_json_node *part = first_member(m->model);
    for (; part; part = qc_json_next(part)) {
        head = qc_type_hidden_head(qc_json_string_or(qc_json_get(part, "model_type"), ""));
        if (strcmp(head, "lm_head") != 0)
            QC_TRY(qc_skip_add_absent(list, head, err));
    }
    size_t last_len = 0;
    const char *last = NULL;
    for (uint32_t i = 0; i < m->count; i++) {
        const char *name = m->model->tensors[i].name;
        size_t len = qc_rules_predictions_path(name);
        if (len == 0 || (len == last_len && memcmp(name, last, len) == 0))
            continue;
        const char *decoder = NULL;
        QC_TRY(qc_arena_printf(m->arena, &decoder, err, "%.*s.decoder", (int)len, name));
        QC_TRY(qc_skip_add(list, decoder, strlen(decoder), err));
        last = name;
        last_len = len;
    }
    return QC_OK;
}

/* A class with another head (AutoModelForSequenceClassification of a language model) makes modules
 * that the file does not have. If a loader took them for quantized modules, the model would not
 * load. */
static qc_status skip_label_heads(maker *m, qc_skip_list *list, qc_error *err)
{
    const char *type = m->facts.model_type, *head = NULL;
    for (unsigned i = 0; type[0] && (head = qc_type_label_head(type, i)) != NULL; i++)
        QC_TRY(qc_skip_add_absent(list, head, err));
    return QC_OK;
}

/* Does this weight stay in a form that its loader has to know? FP8 that qconv does not understand
 * (a stack of experts) counts as well. */
static int stays_coded(const maker *m, uint32_t i)
{
    const qc_recipe_entry *e = &m->out->entries[i];
    if (e->scheme != QC_SCHEME_KEEP)
        return 0;
    if (e->stored || e->coded)
        return e->stored || e->coded->scales != QC_NO_TENSOR;
    return qc_dtype_is_fp8(m->model->tensors[i].dtype);
}

/* Returns the length of the module's name for weight i: its name without ".weight", or the module
 * that holds a stack of experts. */
static size_t module_of(const maker *m, uint32_t i)
{
    const char *name = m->model->tensors[i].name, *dot = strrchr(name, '.');
    return dot ? (size_t)(dot - name) : 0;
}

/* Does a stack of experts share its module with another stack that stays? No list can say so. */
static int module_stays_coded(const maker *m, uint32_t i)
{
    const qc_recipe_entry *e = &m->out->entries[i];
    size_t len = module_of(m, i);
    if ((e->stored ? e->stored->ndim : e->coded->ndim) != 3)
        return 0;
    const char *name = m->model->tensors[i].name;
    /* Names are sorted, so the members of a module are neighbours, with at most longer names
     * between. */
    uint32_t k = i;
    while (k > 0 && strncmp(m->model->tensors[k - 1].name, name, len) == 0)
        k--;
    for (; k < m->count && strncmp(m->model->tensors[k].name, name, len) == 0; k++) {
        if (k != i && module_of(m, k) == len && stays_coded(m, k))
            return 1;
    }
    return 0;
}

/* Adds the decoded weights to the list of plain modules where others stay quantized for the loader
 * that config.json names. */
static qc_status list_decoded(maker *m, qc_error *err)
{
    const qc_json_node *q = qc_config_quantization(m->model->config);
    const char *key = qc_skip_key(q);
    const qc_json_node *named = qc_json_get(q, key);
    qc_skip_list list;
    if (!m->out->keeps_coded || !q || qc_json_kind_of(q) != QC_JSON_OBJECT)
        return QC_OK;
    qc_skip_init(&list, m->arena, m->model, m->out->entries);
    for (uint32_t i = 0; i < m->count; i++) {
        const qc_recipe_entry *e = &m->out->entries[i];
        const int decoded =
            e->scheme == QC_SCHEME_DEQUANT || (e->coded && e->scheme == QC_SCHEME_CAST);
        if (!decoded || module_of(m, i) == 0 || module_stays_coded(m, i))
            continue;
        QC_TRY(qc_skip_add(&list, m->model->tensors[i].name, module_of(m, i), err));
        if (strcmp(key, "llm_int8_skip_modules") == 0)
            QC_TRY(qc_skip_add_fused(&list, i, err));
    }
    if (list.count == 0)
        return QC_OK;
    if (named && qc_json_kind_of(named) == QC_JSON_ARRAY) {
        for (named = qc_json_first(named); named; named = qc_json_next(named)) {
            const char *name = qc_json_string_or(named, NULL);
            if (name)
                QC_TRY(qc_skip_add_as_is(&list, name, err));
        }
    } else if (strcmp(key, "ignore") != 0) {
        QC_TRY(skip_hidden_heads(m, &list, err));
        QC_TRY(skip_label_heads(m, &list, err));
    }
    qc_skip_finish(&list, &m->out->skip_modules, &m->out->skip_count);
    return QC_OK;
}

/* Lists the modules that transformers sees as a Linear, or may see as one, and that are not
 * quantized. */
static qc_status list_skipped(maker *m, qc_error *err)
{
    if (!m->quantizing)
        return list_decoded(m, err);
    qc_skip_list list;
    qc_skip_init(&list, m->arena, m->model, m->out->entries);
    int head_quantized = 0;
    for (uint32_t i = 0; i < m->count; i++) {
        const qc_recipe_entry *e = &m->out->entries[i];
        const qc_checkpoint_tensor face = face_of(m, i), *t = &face;
        int kept = e->scheme == QC_SCHEME_KEEP || e->scheme == QC_SCHEME_CAST;
        head_quantized |= !kept && e->role == QC_ROLE_HEAD;
        if (!kept || t->ndim != 2 || !qc_ends_with(t->name, ".weight") ||
            (e->role != QC_ROLE_LINEAR &&
             !(m->classes[i].traits & (QC_TRAIT_MODULE | QC_TRAIT_MAYBE))))
            continue;
        QC_TRY(qc_skip_add(&list, t->name, strlen(t->name) - strlen(".weight"), err));
        QC_TRY(qc_skip_add_fused(&list, i, err));
    }
    QC_TRY(qc_diffusers_check_namesakes(m->model, m->out->entries, err));
    if (!head_quantized)
        QC_TRY(skip_hidden_heads(m, &list, err));
    QC_TRY(skip_label_heads(m, &list, err));
    qc_skip_finish(&list, &m->out->skip_modules, &m->out->skip_count);
    return QC_OK;
}

/* Finds out what the tensors are, before anything is decided. */
static qc_status look(maker *m, qc_recipe *out, qc_arena *arena, const qc_checkpoint *model,
                      const qc_recipe_options *options, qc_error *err)
{
    *m = (maker){.out = out, .arena = arena, .model = model, .options = options};
    m->quantizing = qc_to_quantizes(options->to);
    m->count = (uint32_t)model->tensor_count;
    QC_TRY(qc_stored_find(&m->stored, arena, model, err));
    QC_TRY(qc_coded_find(&m->coded, arena, model, err));
    read_facts(m);
    return classify(m, err);
}

/* Makes what follows from the schemes: what the loader has to know, and the skip list. */
static qc_status finish(maker *m, qc_error *err)
{
    m->out->keeps_coded = 0;
    for (uint32_t i = 0; i < m->count && !m->out->keeps_coded; i++)
        m->out->keeps_coded = stays_coded(m, i);
    return list_skipped(m, err);
}

qc_status qc_recipe_make(qc_recipe *out, qc_arena *arena, const qc_checkpoint *model,
                         const qc_recipe_options *options, qc_error *err)
{
    memset(out, 0, sizeof *out);
    maker m;
    QC_TRY(look(&m, out, arena, model, options, err));
    QC_TRY(qc_arena_strndup(arena, &out->model_type, m.facts.model_type, strlen(m.facts.model_type),
                            err));
    out->known_type = m.table != NULL;
    out->input_is_quantized = m.stored.count > 0;
    out->input_is_coded = m.coded.count > 0;
    if (m.quantizing && out->input_is_quantized) {
        uint32_t i = 0;
        while (!m.stored.weights[i])
            i++;
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%s is quantized already: '%s' is %s (quantized weights in all: %" PRIu32
                "); quantize its 16-bit original, or turn it back with --to bf16 first",
                model->path, model->tensors[i].name, m.stored.weights[i]->name, m.stored.count);
    }
    uint32_t stack = 0;
    while (stack < m.count && !is_stack(&m, stack))
        stack++;
    if (options->requantize && stack == m.count)
        QC_FAIL(err, QC_ERR_USAGE, "--requantize: %s has no weights in MXFP4", model->path);
    QC_TRY(apply_rules(&m, err));
    QC_TRY(widen_rules(&m, err));
    QC_TRY(decide(&m, err));
    return finish(&m, err);
}

qc_status qc_recipe_list_skipped(qc_recipe *recipe, qc_arena *arena, const qc_checkpoint *model,
                                 const qc_recipe_options *options, qc_error *err)
{
    maker m;
    QC_TRY(look(&m, recipe, arena, model, options, err));
    return finish(&m, err);
}
