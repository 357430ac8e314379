#include "convert/loaders.h"

#include "base/text.h"
#include "convert/console.h"

#include <string.h>

typedef enum { FORM_PLAIN, FORM_NF4, FORM_INT8, FORM_STORED, FORM_OWN } form;

/* tests/interop loads each of them in both versions, or sees it refused. */
static const qc_loader_row rows[] = {
    [FORM_PLAIN] = {"plain", 1, 1, NULL},
    [FORM_NF4] = {"nf4", 1, 1, "bitsandbytes"},
    [FORM_INT8] = {"int8", 1, 1, "bitsandbytes"},
    /* Weights that were quantized before and stay so: as MODEL. */
    [FORM_STORED] = {"stored", 1, 1, "what MODEL needs"},
    [FORM_OWN] = {"own", 0, 0, NULL},
};

static form form_of(const qc_plan *p)
{
    if (p->own_form)
        return FORM_OWN;
    for (uint32_t i = 0; i < p->job_count; i++) {
        if (p->jobs[i].scheme == QC_SCHEME_NF4)
            return FORM_NF4;
        if (p->jobs[i].scheme == QC_SCHEME_INT8_ROWS)
            return FORM_INT8;
    }
    return p->recipe->keeps_coded ? FORM_STORED : FORM_PLAIN;
}

/* What to say instead of the command line that led to a form of qconv's own. */
static const char *instead_of(const qc_plan *p)
{
    int stack = strstr(p->own_form, "mxfp4") != NULL;
    int fp8 = strstr(p->own_form, "fp8") != NULL;
    for (uint32_t i = 0; i < p->job_count; i++)
        stack |= p->jobs[i].stack;
    if (stack)
        return "--to bf16";
    if (p->options->to == QC_TO_AUTO)
        return fp8 ? "--schemes nf4,nf4-32 or int8" : "--schemes nf4,nf4-32,16bit or int8,16bit";
    return fp8 ? "quantizing the weights in FP8 too, or --to bf16,"
               : "--to int8 without --block-size";
}

/* A name that can stand in a line of Python. */
static int is_identifier(const char *s)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789";
    size_t n = strlen(s);
    return n > 0 && n <= 80 && strspn(s, letters) == n && !(*s >= '0' && *s <= '9');
}

/* The class that config.json names, or the automatic one where that is known to find it. */
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

static int all_on_gpus(const qc_plan *p)
{
    for (uint32_t i = 0; i < p->device_count; i++)
        if (strncmp(p->device_names[i], "cuda:", 5) != 0)
            return 0;
    return p->device_names != NULL;
}

qc_status qc_loaders_of(qc_loaders *out, const qc_plan *p, qc_error *err)
{
    const qc_json_node *config = p->model->config ? qc_json_root(p->model->config) : NULL;
    memset(out, 0, sizeof *out);
    out->row = &rows[form_of(p)];
    out->has_config = config != NULL;
    out->compressed = p->options->compress;
    out->placed = all_on_gpus(p);
    out->remote_code = config && qc_json_get(config, "auto_map") != NULL;
    QC_TRY(qc_arena_printf(p->arena, &out->class_name, err, "%s",
                           config ? class_of(config) : "AutoModel"));
    if (p->own_form) {
        out->own_form = p->own_form;
        out->instead = instead_of(p);
    }
    return QC_OK;
}

const char *qc_loaders_names(const qc_loaders *l)
{
    const qc_loader_row *r = l->row;
    if (!r->transformers4 && !r->transformers5)
        return "qconv only";
    if (!r->transformers5)
        return r->with ? "transformers 4 with bitsandbytes" : "transformers 4";
    if (!r->transformers4)
        return r->with ? "transformers 5 with bitsandbytes" : "transformers 5";
    if (strcmp(r->form, "stored") == 0)
        return "what loads MODEL";
    return r->with ? "transformers 4 and 5 with bitsandbytes" : "transformers 4 and 5";
}

void qc_loaders_warn(const qc_loaders *l, const qc_options *o)
{
    if (l->own_form)
        qc_console_warn(o,
                        "only qconv reads this form (%s), which transformers does not load, and "
                        "config.json says so; %s makes what it loads",
                        l->own_form, l->instead);
}
