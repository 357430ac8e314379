/* The table has the _keep_in_fp32_modules of the classes of diffusers 0.42. Its loader puts these
 * names on every skip list, so a quantized weight below one of them would not load. */
#include "convert/model/recipe_diffusers.h"

#include "base/text.h"
#include "convert/families/config_fields.h"

#include <string.h>

#define QC_DIFFUSERS_NAME_MAX 120u
#define WAN                   "rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"

static const struct {
    const char *class_name;
    const char *modules[9]; /* followed by NULL */
} held_in_float[] = {
    {"AnyFlowFARTransformer3DModel", {WAN}},
    {"AnyFlowTransformer3DModel", {WAN}},
    {"ChronoEditTransformer3DModel", {WAN}},
    {"Cosmos3OmniTransformer", {"time_embedder"}},
    {"CosmosControlNetModel", {"learnable_pos_embed"}},
    {"CosmosTransformer3DModel", {"learnable_pos_embed"}},
    {"Flux3Transformer2DModel", {"norm_q", "norm_k"}},
    {"HeliosTransformer3DModel", {WAN, "history_key_scale"}},
    {"JoyImageEditPlusTransformer3DModel", {"time_embedder", "norm1", "norm2", "norm_out"}},
    {"JoyImageEditTransformer3DModel", {"time_embedder", "norm1", "norm2", "norm_out"}},
    {"Kandinsky5Transformer3DModel",
     {"time_embeddings", "modulation", "visual_modulation", "text_modulation"}},
    {"Kandinsky6SRTransformer3DModel", {"time_embeddings", "pooled_bias", "modulation"}},
    {"Kandinsky6Transformer3DModel", {"time_embeddings", "modulation"}},
    {"Krea2Transformer2DModel", {"norm", "norm1", "norm2", "norm_q", "norm_k"}},
    {"MiniMaxH3Transformer3DModel",
     {"proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out", "rope"}},
    {"RFD4ProteinaTransformer", {"cond_factory", "norm", "ln_out"}},
    {"SkyReelsV2Transformer3DModel", {WAN}},
    {"WanAnimate2Transformer3DModel",
     {"time_embedding", "time_projection", "scale_shift_table", "norm1", "norm2", "norm3",
      "modulation"}},
    {"WanAnimateTransformer3DModel", {WAN, "motion_synthesis_weight"}},
    {"WanTransformer3DModel", {WAN}},
    {"WanVACETransformer3DModel", {WAN}},
};

const char *qc_diffusers_class(const qc_checkpoint *model)
{
    const qc_json_node *root = qc_config_root(model->config);
    if (qc_json_get(root, "model_type"))
        return NULL;
    return qc_json_string_or(qc_json_get(root, "_class_name"), NULL);
}

/* Would diffusers leave a module plain for this key of a list? (quantizers/bitsandbytes/utils.py)
 * It does if the module's last component is the key, or if its path holds the key followed by a
 * dot; the key may begin in the middle of a component. */
static int spares(const char *key, const char *module, size_t len)
{
    size_t n = strlen(key);
    if (n == 0 || n > len)
        return 0;
    if (memcmp(module + len - n, key, n) == 0 && (n == len || module[len - n - 1] == '.'))
        return 1;
    for (size_t i = 0; i + n < len; i++) {
        if (memcmp(module + i, key, n) == 0 && module[i + n] == '.')
            return 1;
    }
    return 0;
}

static size_t module_length(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? (size_t)(dot - name) : 0;
}

/* Is key a component of the name? This is how diffusers decides on a parameter's dtype. */
static int has_component(const char *name, const char *key)
{
    size_t n = strlen(key);
    for (const char *p = name;; p++) {
        size_t len = strcspn(p, ".");
        if (len == n && memcmp(p, key, n) == 0)
            return 1;
        p += len;
        if (*p == '\0')
            return 0;
    }
}

/* Finds the weights (indices) of modules at the top of the model that share their name with the
 * module of the weight `name`. If one of them is on diffusers' skip list, diffusers leaves that
 * module plain too: "proj_out.weight" does this to "blocks.0.proj_out.weight". */
static size_t find_namesakes(const qc_checkpoint *model, const char *name,
                             uint32_t out[QC_NAMESAKES_MAX])
{
    static const char leaf[] = ".weight";
    char other[QC_DIFFUSERS_NAME_MAX + sizeof leaf];
    size_t count = 0, len = module_length(name);
    for (size_t at = 0, end = 0; at < len && count < QC_NAMESAKES_MAX; at++) {
        if (at >= end)
            end = at + strcspn(name + at, ".");
        size_t n = end - at;
        int whole = at == 0 || name[at - 1] == '.';
        /* The last component has to be equal; of the others an equal end is enough. */
        if (n == 0 || n > QC_DIFFUSERS_NAME_MAX || (end == len && !whole))
            continue;
        memcpy(other, name + at, n);
        memcpy(other + n, leaf, sizeof leaf);
        const qc_checkpoint_tensor *t = qc_checkpoint_find(model, other);
        if (t && t->ndim == 2 && t->bytes > 0 && n < len)
            out[count++] = (uint32_t)(t - model->tensors);
    }
    return count;
}

/* A module at the top, "proj_out", cannot be told from every "blocks.N.proj_out" on a skip list. If
 * the general rules would leave it plain because of its size, we quantize it instead, like its
 * namesakes. If it may be an embedding, the namesakes stay plain with it. */
static void settle_namesakes(const qc_checkpoint *model, qc_tensor_class *classes, size_t i)
{
    uint32_t same[QC_NAMESAKES_MAX];
    size_t count = find_namesakes(model, model->tensors[i].name, same);
    for (size_t k = 0; k < count; k++) {
        qc_tensor_class *c = &classes[same[k]];
        if (!(c->traits & QC_TRAIT_MAYBE))
            continue;
        if (c->role == QC_ROLE_EMBEDDING)
            classes[i] = (qc_tensor_class){QC_ROLE_OTHER, QC_TRAIT_MODULE | QC_TRAIT_MAYBE,
                                           "has the name of an embedding"};
        else
            *c = (qc_tensor_class){QC_ROLE_LINEAR, 0, "linear like others of its name"};
    }
}

void qc_diffusers_correct(const char *class_name, const qc_checkpoint *model,
                          qc_tensor_class *classes)
{
    for (size_t f = 0; f < sizeof held_in_float / sizeof *held_in_float; f++) {
        if (strcmp(held_in_float[f].class_name, class_name) != 0)
            continue;
        for (size_t i = 0; i < model->tensor_count; i++) {
            const char *name = model->tensors[i].name;
            qc_tensor_class *c = &classes[i];
            for (const char *const *key = held_in_float[f].modules; *key; key++) {
                if (c->role == QC_ROLE_LINEAR && spares(*key, name, module_length(name)))
                    *c = (qc_tensor_class){QC_ROLE_LINEAR, c->traits | QC_TRAIT_FLOAT,
                                           "held in 32 bit by diffusers"};
                if (has_component(name, *key))
                    c->traits |= QC_TRAIT_FIXED;
            }
        }
    }
    for (size_t i = 0; i < model->tensor_count; i++) {
        const qc_tensor_class *c = &classes[i];
        if (c->role == QC_ROLE_LINEAR && !(c->traits & QC_TRAIT_FLOAT) &&
            model->tensors[i].ndim == 2)
            settle_namesakes(model, classes, i);
    }
}

qc_status qc_diffusers_check_namesakes(const qc_checkpoint *model, const qc_recipe_entry *entries,
                                       qc_error *err)
{
    uint32_t same[QC_NAMESAKES_MAX];
    for (uint32_t i = 0; qc_diffusers_class(model) && i < model->tensor_count; i++) {
        const char *name = model->tensors[i].name;
        const qc_scheme_row *row = &qc_schemes[entries[i].scheme];
        if (!row->bits || row->format != QC_FORMAT_BITSANDBYTES)
            continue;
        size_t count = find_namesakes(model, name, same);
        for (size_t k = 0; k < count; k++) {
            if (entries[same[k]].scheme != QC_SCHEME_KEEP &&
                entries[same[k]].scheme != QC_SCHEME_CAST)
                continue;
            QC_FAIL(err, QC_ERR_USAGE,
                    "diffusers cannot leave '%s' unquantized without '%s', whose name ends alike: "
                    "quantize both, or keep both with --keep",
                    model->tensors[same[k]].name, name);
        }
    }
    return QC_OK;
}
