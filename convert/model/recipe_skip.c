#include "convert/model/recipe_skip.h"

#include "base/checked.h"
#include "base/text.h"
#include "convert/families/config_fields.h"
#include "convert/term/glob.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Does a loader see this weight as a quantized module? */
static int stays_quantized(const qc_recipe_entry *e)
{
    return qc_scheme_is_quantized(e->scheme) || (e->scheme == QC_SCHEME_KEEP && e->stored);
}

void qc_skip_init(qc_skip_list *l, qc_arena *arena, const qc_checkpoint *model,
                  const qc_recipe_entry *entries)
{
    static const char *const parts[] = {"text_config", "vision_config", "audio_config",
                                        "llm_config", "decoder"};
    const qc_json_node *root = qc_config_root(model->config);
    *l = (qc_skip_list){
        .arena = arena, .table = qc_family_of(model), .model = model, .entries = entries};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const qc_json_node *part = qc_json_get(root, parts[i]);
        l->composite |= part && qc_json_kind_of(part) == QC_JSON_OBJECT;
    }
    for (size_t i = 0; i < model->tensor_count && !l->has_language_model; i++)
        l->has_language_model = strstr(model->tensors[i].name, "language_model.") != NULL;
}

static qc_status append(qc_skip_list *l, const char *name, qc_error *err)
{
    QC_TRY(qc_arena_more(l->arena, &l->names, l->count, err));
    l->names[l->count++] = name;
    return QC_OK;
}

/* ---- what a name would catch ---- */

/* Would some loader match a quantized module with this name? recipe_skip.h has their rules. */
static int catches_quantized(const qc_skip_list *l, const char *name)
{
    const size_t n = strlen(name);
    for (size_t i = 0; i < l->model->tensor_count; i++) {
        const char *path = l->model->tensors[i].name, *dot = strrchr(path, '.');
        if (!dot || !stays_quantized(&l->entries[i]))
            continue;
        for (const char *at = path; at + n <= dot; at++) {
            if (memcmp(at, name, n) == 0 && (at == path || at + n == dot || at[n] == '.'))
                return 1;
        }
    }
    return 0;
}

/* Is the module with exactly this name quantized? */
static qc_status names_quantized(const qc_skip_list *l, const char *name, int *is, qc_error *err)
{
    const char *weight = NULL;
    QC_TRY(qc_arena_printf(l->arena, &weight, err, "%s.weight", name));
    const qc_checkpoint_tensor *t = qc_checkpoint_find(l->model, weight);
    *is = t && stays_quantized(&l->entries[t - l->model->tensors]);
    return QC_OK;
}

/* ---- other names ---- */

static qc_status append_other(qc_skip_list *l, const char *name, qc_error *err)
{
    int taken = 0;
    QC_TRY(names_quantized(l, name, &taken, err));
    return taken ? QC_OK : append(l, name, err);
}

/* transformers 5 names the layers of ViT and similar models in the manner of Llama, for some of
 * them without "encoder.layer" before the number. */
static qc_status add_vit(qc_skip_list *l, const char *name, qc_error *err)
{
    static const char layer[] = "encoder.layer.";
    static const struct {
        const char *from, *to;
    } inner[] = {
        {"attention.attention.query", "attention.q_proj"},
        {"attention.attention.key", "attention.k_proj"},
        {"attention.attention.value", "attention.v_proj"},
        {"attention.output.dense", "attention.o_proj"},
        {"intermediate.dense", "mlp.fc1"},
        {"output.dense", "mlp.fc2"},
    };
    const char *at = strstr(name, layer), *other = NULL;
    if (!at)
        return QC_OK;
    const char *number = at + strlen(layer);
    size_t digits = strspn(number, "0123456789");
    char sibling[512]; /* a name that only the weights of a ViT layer have */
    int n = snprintf(sibling, sizeof sibling, "%.*s.attention.attention.query.weight",
                     (int)(number + digits - name), name);
    if (n < 0 || (size_t)n >= sizeof sibling || !qc_checkpoint_find(l->model, sibling))
        return QC_OK;
    for (size_t i = 0; i < sizeof inner / sizeof *inner; i++) {
        if (number[digits] != '.' || strcmp(number + digits + 1, inner[i].from) != 0)
            continue;
        QC_TRY(qc_arena_printf(l->arena, &other, err, "%.*s.%s", (int)(number + digits - name),
                               name, inner[i].to));
        QC_TRY(append_other(l, other, err));
        QC_TRY(qc_arena_printf(l->arena, &other, err, "%.*slayers.%.*s.%s", (int)(at - name), name,
                               (int)digits, number, inner[i].to));
        QC_TRY(append_other(l, other, err));
    }
    return QC_OK;
}

/* transformers 5 has no "vision_model" within a vision tower, nor at its start where the tower is
 * the whole model. */
static qc_status add_towers(qc_skip_list *l, const char *name, qc_error *err)
{
    static const char *const inner[] = {"vision_model.", "text_model."};
    const char *other = NULL;
    QC_TRY(append_other(l, name, err));
    QC_TRY(add_vit(l, name, err));
    for (size_t i = 0; i < 2; i++) {
        size_t len = strlen(inner[i]);
        if (!l->composite && qc_begins_with(name, inner[i]))
            QC_TRY(append_other(l, name + len, err));
        const char *at = strstr(name, inner[i]);
        if (at &&
            qc_begins_with(at + len, inner[i])) /* if it is there twice, the inner one is meant */
            at += len;
        if (!l->composite || !at || at == name || at[-1] != '.' ||
            (at - name == 6 && qc_begins_with(name, "model.")))
            continue;
        QC_TRY(qc_arena_printf(l->arena, &other, err, "%.*s%s", (int)(at - name), name, at + len));
        QC_TRY(append_other(l, other, err));
    }
    return QC_OK;
}

/* Renamings of transformers 5.24 (conversion_mapping.py; DiffusionGemma's encoder is tied to its
 * decoder), in order. Names end with a dot here. ^: at the begin; |: each of these, where one
 * tensor of the file becomes several modules, or where it depends on the class that loads. */
static const struct {
    const char *types, *from, *to;
} in_memory[] = {
    {" sarvam_moe ", ".attention.", ".self_attn."},
    {" sarvam_moe ", ".self_attn.dense.", ".self_attn.o_proj."},
    {" sarvam_moe ", ".query_key_value.", ".q_proj.|.k_proj.|.v_proj."},
    {" axk2 ", ".W_down.", ".mlp.fc1."},
    {" axk2 ", ".W_up.", ".mlp.fc2."},
    {" axk2 ", ".self_attn.q_b_proj.", ".self_attn.q_gate_proj."},
    {" step3p7 ", "^vision_model.", "model.vision_model."},
    {" step3p7 ", "^vit_large_projector.", "model.multi_modal_projector."},
    {" step3p7 ", "^model.layers.", "model.language_model.layers."},
    {" step3p7 ", ".moe.gate.", ".mlp.gate."},
    {" step3p7 ", ".share_expert.", ".mlp.shared_experts."},
    {" step3p7 ", ".transformer.resblocks.", ".layers."},
    {" step3p7 ", ".vit_downsampler", ".downsampler"},
    {" step3p7 inkling2 ", ".mlp.c_fc.", ".mlp.fc1."},
    {" step3p7 inkling2 ", ".mlp.c_proj.", ".mlp.fc2."},
    {" step3p7 inkling2 inkling2_text ", ".attn.", ".self_attn."},
    /* A kept out_proj lies beside an in_proj_weight, which is no module's. */
    {" step3p7 ", ".self_attn.out_proj.",
     ".self_attn.out_proj.|.self_attn.q_proj.|.self_attn.k_proj.|.self_attn.v_proj."},
    {" inkling2 inkling2_text ", "^model.llm.unembed.", "lm_head."},
    {" inkling2 ", "^model.llm.", "model.language_model."},
    {" inkling2_text ", "^model.llm.", "model."},
    {" inkling2 ", "^model.visual.", "model.vision_tower."},
    {" inkling2 ", ".vision_tower.backbone.", ".vision_tower."},
    {" inkling2 ", ".vision_tower.proj_in.", ".vision_tower.merger.linear_1."},
    {" inkling2 ", ".vision_tower.proj_out.", ".vision_tower.merger.linear_2."},
    {" inkling2 inkling2_text ", ".self_attn.wq_du.", ".self_attn.q_proj.linear."},
    {" inkling2 inkling2_text ", ".self_attn.wk_dv.", ".self_attn.k_proj.linear."},
    {" inkling2 inkling2_text ", ".self_attn.wv_dv.", ".self_attn.v_proj.linear."},
    {" inkling2 inkling2_text ", ".self_attn.wr_du.", ".self_attn.relative_position_bias.linear."},
    {" inkling2 inkling2_text ", ".self_attn.wo_ud.", ".self_attn.o_proj.linear."},
    {" inkling2 inkling2_text ", ".self_attn.gate_attn.", ".self_attn.o_proj.gate_proj."},
    {" inkling2 inkling2_text ", ".self_attn.attn_sink_proj.", ".self_attn.sink_proj."},
    {" ultrabert ", "^ultrabert.", "model.|"},
    {" ultrabert ", "^cls.", "head.decoder."},
    {" diffusion_gemma ", "^model.decoder.layers.", "model.encoder.language_model.layers."},
};

/* Adds the names that a module has in memory. name ends with a dot; rows before `row` are done. */
static qc_status add_in_memory(qc_skip_list *l, const char *type, const char *name, size_t row,
                               qc_error *err)
{
    const char *at = NULL, *from = NULL, *other = NULL;
    for (; !at && row < sizeof in_memory / sizeof *in_memory; row++) {
        from = in_memory[row].from;
        const int first = *from == '^';
        from += first;
        if (qc_config_word_in(type, in_memory[row].types))
            at = !first ? strstr(name, from) : qc_begins_with(name, from) ? name : NULL;
    }
    if (!at) {
        QC_TRY(qc_arena_strndup(l->arena, &other, name, strlen(name) - 1, err));
        return append_other(l, other, err);
    }
    for (const char *to = in_memory[row - 1].to; to; to = strchr(to, '|')) {
        to += *to == '|';
        QC_TRY(qc_arena_printf(l->arena, &other, err, "%.*s%.*s%s", (int)(at - name), name,
                               (int)strcspn(to, "|"), to, at + strlen(from)));
        QC_TRY(add_in_memory(l, type, other, row, err));
    }
    return QC_OK;
}

/* Since transformers 4.52 the names of a composite model's submodels begin with "model."; in files
 * they are often still the old ones. */
static qc_status add_parts(qc_skip_list *l, const char *name, qc_error *err)
{
    static const struct {
        const char *from, *to;
    } swaps[] = {
        {"language_model.model.", "model.language_model."},
        {"model.language_model.", "language_model.model."},
    };
    const char *other = NULL;
    if (strcmp(name, "language_model") == 0 || strcmp(name, "model.language_model") == 0)
        return append(l, name[0] == 'l' ? "model.language_model" : "language_model", err);
    for (size_t i = 0; i < 2; i++) {
        if (!qc_begins_with(name, swaps[i].from))
            continue;
        QC_TRY(qc_arena_printf(l->arena, &other, err, "%s%s", swaps[i].to,
                               name + strlen(swaps[i].from)));
        return add_towers(l, other, err);
    }
    if (!qc_begins_with(name, "model.")) {
        QC_TRY(qc_arena_printf(l->arena, &other, err, "model.%s", name));
        return add_towers(l, other, err);
    }
    if (!qc_begins_with(name, "model.layers."))
        return add_towers(l, name + strlen("model."), err);
    if (l->has_language_model)
        return QC_OK;
    QC_TRY(qc_arena_printf(l->arena, &other, err, "model.language_model.%s", name + 6));
    return add_towers(l, other, err);
}

static qc_status add_names(qc_skip_list *l, const char *name, qc_error *err)
{
    QC_TRY(append(l, name, err));
    const char *from = NULL, *to = NULL, *other = NULL;
    for (unsigned n = 0; l->table && qc_family_rename(l->table, n, &from, &to); n++) {
        if (!qc_begins_with(name, from))
            continue;
        QC_TRY(qc_arena_printf(l->arena, &other, err, "%s%s", to, name + strlen(from)));
        QC_TRY(append_other(l, other, err));
    }
    qc_config config;
    qc_config_open(&config, l->model->config);
    QC_TRY(qc_arena_printf(l->arena, &other, err, "%s.", name));
    QC_TRY(add_in_memory(l, config.model_type, other, 0, err));
    if (l->composite)
        QC_TRY(add_parts(l, name, err));
    return add_towers(l, name, err);
}

/* ---- submodels that stay as a whole ---- */

/* Sets *whole to the submodel of a module if its name would catch nothing that is quantized. Names
 * come in order, so the answer is mostly the same as for the module before. */
static qc_status whole_part(qc_skip_list *l, const char *module, size_t len, const char **whole,
                            qc_error *err)
{
    static const char parts[] =
        " vision_tower vision_model vision_encoder visual image_tower video_tower audio_tower "
        "audio_encoder audio_model multi_modal_projector connector aligner qformer mm_projector "
        "embed_vision embed_audio language_model text_model language_projection ";
    size_t n = 0; /* length of the submodel's path */
    for (size_t at = 0; l->composite && at < len && n == 0;) {
        size_t end = qc_min_size(at + strcspn(module + at, "."), len);
        n = qc_config_part_in(module + at, end - at, parts) ? end : 0;
        at = end + 1;
    }
    *whole = NULL;
    if (n == 0 || (l->last_divided && strlen(l->last_divided) == n &&
                   memcmp(module, l->last_divided, n) == 0))
        return QC_OK;
    if (!l->last_whole || strlen(l->last_whole) != n || memcmp(module, l->last_whole, n) != 0) {
        const char *part = NULL;
        QC_TRY(qc_arena_strndup(l->arena, &part, module, n, err));
        if (catches_quantized(l, part)) {
            l->last_divided = part;
            return QC_OK;
        }
        l->last_whole = part;
    }
    *whole = l->last_whole;
    return QC_OK;
}

/* A detector has a list of heads, one for each layer of its decoder, and they may all be the same
 * one. The file then has it once, while in memory it appears under every number and in the decoder
 * as well. */
static qc_status add_detector(qc_skip_list *l, const char *module, qc_error *err)
{
    static const char *const lists[] = {"bbox_embed", "class_embed"};
    const qc_json_node *config = qc_config_root(l->model->config);
    const char *name = NULL;
    uint64_t layers = 0;
    for (unsigned i = 0; i < 2; i++) {
        size_t n = strlen(lists[i]);
        const char *at = strstr(module, lists[i]);
        if (!at || (at != module && at[-1] != '.') || at[n] != '.' || (l->detectors & 1u << i))
            continue;
        l->detectors |= 1u << i;
        QC_TRY(qc_arena_printf(l->arena, &name, err, "model.decoder.%s", lists[i]));
        QC_TRY(qc_skip_add_absent(l, name, err));
        if (qc_json_as_u64(qc_json_get(config, "decoder_layers"), "decoder_layers", &layers,
                           NULL) != QC_OK)
            continue;
        /* There is one head more where the encoder proposes boxes. */
        for (uint64_t k = 0; k <= layers && k <= 64; k++) {
            QC_TRY(qc_arena_printf(l->arena, &name, err, "%s.%u", lists[i], (unsigned)k));
            QC_TRY(qc_skip_add_absent(l, name, err));
        }
    }
    return QC_OK;
}

qc_status qc_skip_add(qc_skip_list *l, const char *module, size_t len, qc_error *err)
{
    static const char head[] = "lm_head";
    size_t head_len = sizeof head - 1;
    const char *before = l->last_whole, *name = NULL;
    if (len >= head_len && memcmp(module + len - head_len, head, head_len) == 0 &&
        (len == head_len || module[len - head_len - 1] == '.'))
        return append(l, head, err);
    QC_TRY(whole_part(l, module, len, &name, err));
    if (name && name == before)
        return QC_OK; /* the list has it already */
    if (!name) {
        QC_TRY(qc_arena_strndup(l->arena, &name, module, len, err));
        QC_TRY(add_detector(l, name, err));
    }
    return add_names(l, name, err);
}

qc_status qc_skip_add_fused(qc_skip_list *l, uint32_t weight, qc_error *err)
{
    qc_fused_group g;
    const char *name = l->model->tensors[weight].name, *alias = NULL;
    int taken = 0;
    if (qc_expert_stem(name) > 0 || !qc_fused_group_of(&g, l->model, weight) ||
        g.tensors[0] != weight)
        return QC_OK;
    for (unsigned k = 0; k < g.count; k++)
        taken |= stays_quantized(&l->entries[g.tensors[k]]);
    const char *const aliases[] = {g.row->fused, g.row->other};
    for (size_t a = 0; !taken && a < 2 && aliases[a]; a++) {
        int other = 0;
        QC_TRY(qc_arena_printf(l->arena, &alias, err, "%.*s%s%s", (int)g.parent_len, name,
                               g.parent_len ? "." : "", aliases[a]));
        QC_TRY(names_quantized(l, alias, &other, err));
        if (!other)
            QC_TRY(qc_skip_add(l, alias, strlen(alias), err));
    }
    return QC_OK;
}

qc_status qc_skip_add_absent(qc_skip_list *l, const char *name, qc_error *err)
{
    return catches_quantized(l, name) ? QC_OK : append(l, name, err);
}

qc_status qc_skip_add_as_is(qc_skip_list *l, const char *name, qc_error *err)
{
    const char *copy = NULL;
    QC_TRY(qc_arena_strndup(l->arena, &copy, name, strlen(name), err));
    return append(l, copy, err);
}

const char *qc_skip_key(const qc_json_node *quantization)
{
    static const char bnb[] = "llm_int8_skip_modules", common[] = "modules_to_not_convert";
    static const char *const keys[] = {bnb, common, "ignored_layers", "ignore"};
    const char *method = qc_json_string_or(qc_json_get(quantization, "quant_method"), "");
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        if (qc_json_get(quantization, keys[i]))
            return keys[i];
    }
    if (strcmp(method, "compressed-tensors") == 0 || qc_begins_with(method, "modelopt"))
        return "ignore";
    return strcmp(method, "bitsandbytes") == 0 ? bnb : common;
}

static int compare_names(const void *pa, const void *pb)
{
    const char *const *a = pa, *const *b = pb;
    return qc_natural_compare(*a, *b);
}

void qc_skip_finish(qc_skip_list *l, const char ***names, uint32_t *count)
{
    if (l->count > 0)
        qsort(l->names, l->count, sizeof *l->names, compare_names);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < l->count; i++) {
        if (kept == 0 || strcmp(l->names[kept - 1], l->names[i]) != 0)
            l->names[kept++] = l->names[i];
    }
    *names = l->names;
    *count = kept;
}
