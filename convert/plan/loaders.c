#include "convert/plan/loaders.h"

#include "base/text.h"
#include "convert/families/config_fields.h"
#include "convert/families/type_table.h"
#include "convert/model/recipe_coded.h"
#include "convert/model/recipe_diffusers.h"
#include "convert/term/console.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* tests/interop loads each of these forms in both versions, or sees it refused. */
static const qc_loader_row plain = {"plain", 1, 1, NULL};
/* Weights that were quantized before and stay so load as MODEL does. */
static const qc_loader_row stored = {"stored", 1, 1, "what MODEL needs"};
static const qc_loader_row own = {"own", 0, 0, NULL};

static int is_stored(const qc_loader_row *row)
{
    return strcmp(row->form, stored.form) == 0;
}

static int is_compressed_tensors(const qc_loaders *l)
{
    return l->row.with && strcmp(l->row.with, qc_format_name(QC_FORMAT_COMPRESSED_TENSORS)) == 0;
}

int qc_loaders_awq(const qc_loaders *l)
{
    return l->row.with && strcmp(l->row.with, qc_format_name(QC_FORMAT_AWQ)) == 0;
}

/* transformers 5 turns only a plain nn.Linear into a quantized module. It keeps the experts of a
 * layer in one tensor instead, but for some types, and Falcon's Linear is a class of its own. (4.57
 * takes both.) */
qc_status qc_loaders_not5(const char **not5, qc_arena *arena, const char *model_type,
                          uint64_t experts, uint64_t all, qc_error *err)
{
    *not5 = NULL;
    if (strcmp(model_type, "falcon") == 0 && all > 0) {
        *not5 = "transformers 5 loads no quantized Falcon, whose linear layers are of a class "
                "of their own: load it with transformers 4 or with qconv's own reader";
        return QC_OK;
    }
    const qc_expert_names *names = qc_expert_names_of(model_type);
    if (experts == 0 || (names && names->traits & QC_EXPERTS_MODULES))
        return QC_OK;
    return qc_arena_printf(arena, not5, err,
                           "transformers 5 loads quantized experts (%.0f%% of what is quantized) "
                           "only in bitsandbytes' forms after `import qconv`; qconv.load takes all",
                           100.0 * (double)experts / (double)all);
}

static qc_status find_not5(qc_loaders *out, const qc_plan *p, qc_error *err)
{
    uint64_t experts = 0, all = 0;
    int stacked = 0;
    for (uint32_t i = 0; i < p->job_count; i++) {
        const qc_job *j = &p->jobs[i];
        if (!qc_scheme_is_quantized(j->scheme))
            continue;
        all += j->elems;
        experts += j->stack || qc_expert_stem(j->name) > 0 ? j->elems : 0;
        stacked |= j->stack;
    }
    QC_TRY(qc_loaders_not5(&out->not5, p->arena, p->recipe->model_type, experts, all, err));
    out->row.transformers5 = !out->not5;
    if (stacked)
        out->row.transformers4 = 0;
    out->import_qconv = out->not5 && experts > 0 && !is_compressed_tensors(out);
    return QC_OK;
}

/* transformers 5 casts the biases of a quantized checkpoint to config.json's dtype, but not the
 * weights beside them. Its norms and plain layers cannot compute with two dtypes. */
static const char *find_rest(const qc_plan *p, const qc_json_node *config)
{
    static const char *const keys[] = {"dtype", "torch_dtype"};
    const qc_json_node *text = qc_json_get(config, "text_config");
    const char *dtype = "", *option = NULL;
    char weight[512];
    for (size_t i = 0; i < 2; i++) {
        dtype = qc_json_string_or(qc_json_get(text, keys[i]), dtype);
        dtype = qc_json_string_or(qc_json_get(config, keys[i]), dtype);
    }
    if (strcmp(dtype, "bfloat16") == 0)
        option = "--rest bf16";
    if (strcmp(dtype, "float16") == 0)
        option = "--rest fp16";
    for (uint32_t i = 0; option && i < p->job_count; i++) {
        const qc_job *bias = &p->jobs[i];
        size_t n = strlen(bias->name);
        if (bias->entry->out_dtype != QC_DTYPE_F32 || !qc_ends_with(bias->name, ".bias") ||
            n + 3 > sizeof weight)
            continue;
        memcpy(weight, bias->name, n - 4);
        memcpy(weight + n - 4, "weight", sizeof "weight");
        const qc_checkpoint_tensor *t = qc_checkpoint_find(p->model, weight);
        const qc_recipe_entry *e = t ? &p->recipe->entries[t - p->model->tensors] : NULL;
        if (e && e->scheme == QC_SCHEME_KEEP && e->out_dtype == QC_DTYPE_F32)
            return option;
    }
    return NULL;
}

/* The options to recommend to a user whose command line leads to a form of qconv's own. */
static const char *instead_of(const qc_plan *p)
{
    int stack = strstr(p->own_form, "mxfp4") != NULL;
    int fp8 = strstr(p->own_form, "fp8") != NULL, integers = 0;
    for (int c = 0; c < QC_CODING_COUNT; c++)
        integers |= qc_coding_is_packed((qc_coding)c) &&
                    strstr(p->own_form, qc_coding_name((qc_coding)c)) != NULL;
    for (uint32_t i = 0; i < p->job_count; i++)
        stack |= p->jobs[i].stack;
    if (stack) /* what is in MXFP4 already is smallest as it is */
        return p->recipe->input_is_coded ? "--to keep" : "--to bf16";
    if (p->options->recipe.to == QC_TO_AUTO)
        return fp8 ? "--schemes nf4,nf4-32 or int8" : "--schemes nf4,nf4-32,16bit or int8,16bit";
    return fp8        ? "quantizing the weights in FP8 too, or --to bf16,"
           : integers ? "quantizing the weights in integers too, or --to bf16,"
                      : "--to int8 without --block-size";
}

/* Can the name stand in a line of Python? */
static int is_identifier(const char *s)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789";
    size_t n = strlen(s);
    return n > 0 && n <= 80 && strspn(s, letters) == n && !qc_is_digit(*s);
}

/* The class that config.json names, or the automatic class where that is known to find it. */
static const char *class_of(const qc_json_node *config)
{
    const qc_json_node *list = qc_json_get(config, "architectures");
    const char *name = "";
    if (list && qc_json_kind_of(list) == QC_JSON_ARRAY)
        name = qc_json_string_or(qc_json_first(list), "");
    if (qc_ends_with(name, "ForCausalLM") || (qc_ends_with(name, "LMHeadModel") && *name))
        return "AutoModelForCausalLM";
    return is_identifier(name) && !qc_json_get(config, "auto_map") ? name : "AutoModel";
}

const char *qc_loaders_lack(const qc_checkpoint *model)
{
    const qc_json_node *config = model->config ? qc_json_root(model->config) : NULL;
    if (!config)
        return "there is no config.json";
    /* transformers 5.24 and 4.57.6 (AutoConfig) find a class for configurations of timm and of
     * models that bring their own, too. */
    if (!*qc_config_type(model->config) && !qc_diffusers_class(model) &&
        !qc_json_get(config, "pretrained_cfg") && !qc_json_get(config, "auto_map"))
        return "config.json has no model_type";
    return model->lacks;
}

qc_status qc_loaders_of(qc_loaders *out, const qc_plan *p, qc_error *err)
{
    const qc_json_node *config = p->model->config ? qc_json_root(p->model->config) : NULL;
    memset(out, 0, sizeof *out);
    out->row = p->own_form ? own : p->recipe->keeps_coded ? stored : plain;
    for (uint32_t i = 0; !p->own_form && i < p->job_count; i++) {
        const qc_scheme scheme = p->jobs[i].scheme;
        if (!qc_scheme_is_quantized(scheme))
            continue;
        const qc_format format = qc_schemes[scheme].format;
        const int known = format != QC_FORMAT_AWQ; /* transformers needs gptqmodel for it */
        out->row = (qc_loader_row){qc_scheme_name(scheme), known, known, qc_format_name(format)};
        break;
    }
    for (uint32_t i = 0; i < p->job_count; i++) {
        const qc_form *form = &p->jobs[i].form;
        out->dense |= form->ops && form->ops->words;
        out->gaps |= form->ops && qc_form_has_gaps(form);
    }
    out->lacks = qc_loaders_lack(p->model);
    out->side_odd = p->model->side_odd;
    out->compressed = p->options->compress;
    out->placed = p->device_names != NULL;
    for (uint32_t i = 0; i < p->device_count; i++)
        out->placed &= qc_begins_with(p->device_names[i], "cuda:");
    out->remote_code = config && qc_json_get(config, "auto_map") != NULL;
    const char *class_name = qc_diffusers_class(p->model);
    out->library = class_name ? "diffusers" : "transformers";
    if (!class_name)
        class_name = config ? class_of(config) : "AutoModel";
    else if (!is_identifier(class_name))
        class_name = "AutoModel";
    QC_TRY(qc_arena_printf(p->arena, &out->class_name, err, "%s", class_name));
    if (p->own_form) {
        out->own_form = p->own_form;
        out->instead = instead_of(p);
    } else if (!qc_diffusers_class(p->model) && p->weights_quantized && !qc_loaders_awq(out)) {
        QC_TRY(find_not5(out, p, err));
        out->rest = find_rest(p, config);
    }
    return QC_OK;
}

int qc_loaders_unquantized(const qc_loaders *l)
{
    return strcmp(l->row.form, plain.form) == 0;
}

int qc_loaders_need_plugin(const qc_loaders *l)
{
    return l->plugin && !qc_loaders_awq(l) &&
           (l->compressed || l->own_form || (l->row.with && !is_compressed_tensors(l)));
}

int qc_loaders_plain_vllm(const qc_loaders *l)
{
    return l->vllm_alone || (is_compressed_tensors(l) && !l->own_form && !l->compressed &&
                             l->row.transformers4 && !l->gaps);
}

/* What other programs load it, once its files are plain. */
static const char *others(const qc_loaders *l)
{
    const qc_loader_row *r = &l->row;
    if (qc_loaders_awq(
            l)) /* as their documentation and code say; docs/interop.md has what was run */
        return "lmdeploy (TurboMind, from V100 on), vLLM and SGLang (from Turing on)";
    if (l->import_qconv && !r->transformers4)
        return "transformers 5 with bitsandbytes after import qconv";
    if (!r->transformers4 && !r->transformers5)
        return "";
    if (l->import_qconv)
        return "transformers 4 with bitsandbytes (5 after import qconv)";
    if (is_compressed_tensors(l))
        return l->gaps    ? "transformers with compressed-tensors 0.18 or newer"
               : l->dense ? "transformers with compressed-tensors 0.18 or newer, vLLM on GPUs"
                          : "transformers with compressed-tensors, vLLM";
    if (strcmp(l->library, "diffusers") == 0 && !is_stored(r))
        return r->with ? "diffusers with bitsandbytes" : "diffusers";
    if (!r->transformers5)
        return r->with ? "transformers 4 with bitsandbytes" : "transformers 4";
    if (!r->transformers4)
        return r->with ? "transformers 5 with bitsandbytes" : "transformers 5";
    if (is_stored(r))
        return "what loads MODEL";
    if (r->with)
        return "transformers 4 and 5 with bitsandbytes";
    return l->vllm_alone ? "transformers 4 and 5, vLLM" : "transformers 4 and 5";
}

void qc_loaders_put_names(const qc_loaders *l, qc_strbuf *text)
{
    const char *ours = l->qconv_load ? "qconv.load" : "";
    const char *vllm = qc_loaders_need_plugin(l) ? "vLLM with qconv's plug-in" : "";
    const char *between = *ours && *vllm ? ", " : "", *theirs = others(l);
    if (l->lacks)
        qc_strbuf_putf(text, "nothing, because %s", l->lacks);
    else if (l->own_form)
        qc_strbuf_putf(text, "%s%s%s%s", ours, between, vllm, *ours || *vllm ? "" : "qconv only");
    else if (!*theirs)
        qc_strbuf_puts(text, *ours ? ours : "qconv only");
    else if (*ours && l->compressed)
        qc_strbuf_putf(text, "%s%s%s; as plain files in %s", ours, between, vllm, theirs);
    else
        qc_strbuf_putf(text, "%s%s%s%s%s", theirs, *ours ? ", " : "", ours, between, vllm);
    if (l->side_odd && !l->lacks)
        qc_strbuf_putf(text, ", each without %s", l->side_odd);
}

/* Warns of rules that count for more than they name, because engines hold a group as one. */
static void warn_widened(const qc_plan *p, const qc_call *call)
{
    const qc_fused_widenings *all = &p->recipe->widened;
    char more[64] = "";
    for (uint32_t r = 0; r < all->count; r++) {
        const qc_fused_widening *w = &all->list[r];
        const qc_rule *rule = &p->options->recipe.rules[r];
        if (w->groups == 0)
            continue;
        if (w->groups > 1)
            (void)snprintf(more, sizeof more, ", and so in %" PRIu32 " more place%s", w->groups - 1,
                           w->groups > 2 ? "s" : "");
        qc_console_warn(
            call,
            "%s '%s' names %s of '%s' without %s, but vLLM loads them as one (%s), so all "
            "of them are %s%s; --split-fused keeps to the names",
            rule->quantize ? "--quantize" : "--keep", rule->glob, w->named, w->first, w->added,
            w->row->fused, rule->quantize ? "quantized" : "kept", more);
    }
}

void qc_loaders_warn(const qc_loaders *l, const qc_plan *plan, const qc_call *call)
{
    warn_widened(plan, call);
    if (l->own_form)
        qc_console_warn(call,
                        "only qconv reads this form (%s)%s, and %s does not load it by itself, "
                        "which config.json says; %s makes what it loads",
                        l->own_form,
                        !l->qconv_load ? ""
                        : l->plugin    ? ", by qconv.load in Python and its plug-in for vLLM"
                                       : ", by qconv.load in Python",
                        l->library, l->instead);
    if (l->not5)
        qc_console_warn(call, "%s", l->not5);
    if (l->rest)
        qc_console_warn(
            call,
            "norms or layers with biases are in F32 and stay so, while config.json names a dtype "
            "of 16 bits; transformers 5 cannot compute with that, so add %s",
            l->rest);
}
