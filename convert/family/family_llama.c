/* Llama (Touvron et al. 2023) and those that compute as it does, but for biases, norms of q and k,
 * and windows: Mistral, Qwen2 and Qwen3. The language model of Llama 3.2 Vision (Meta 2024) is that
 * of Llama 3.1 with layers between that look at an image. */
#include "base/alloc.h"
#include "convert/family/family.h"
#include "convert/model/config_fields.h"

#include <inttypes.h>

const qc_layer_names qc_layer_names_plain = {.matrices = {QC_NAMES_QKV, QC_NAMES_GATED},
                                             .vectors = {QC_NAMES_TWO_NORMS}};

static const qc_layer_names with_head_norms = {.matrices = {QC_NAMES_QKV, QC_NAMES_GATED},
                                               .vectors = {QC_NAMES_TWO_NORMS, QC_NAMES_QK_NORMS}};

/* ---- Llama 3.2 Vision ---- */

#define DEFAULT_FIRST 3u /* cross_attention_layers where it is missing: each fifth from here on */
#define DEFAULT_STEP  5u
#define DEFAULT_LAST  38u
#define MEDIA_ROWS    8u /* of the embedding, behind those of the vocabulary */

#define IMAGE_TOKEN 128256u /* where image_token_index is missing */

static const qc_layer_names cross_names = {
    .matrices = {[QC_LAYER_Q] = "cross_attn.q_proj",
                 [QC_LAYER_K] = "cross_attn.k_proj",
                 [QC_LAYER_V] = "cross_attn.v_proj",
                 [QC_LAYER_O] = "cross_attn.o_proj",
                 QC_NAMES_GATED},
    .vectors = {
        QC_NAMES_TWO_NORMS, [QC_LAYER_Q_NORM] = "cross_attn.q_norm",
        [QC_LAYER_K_NORM] = "cross_attn.k_norm", [QC_LAYER_ATTENDED_GATE] = "cross_attn_attn_gate",
        [QC_LAYER_FFN_GATE] = "cross_attn_mlp_gate"}};

/* Marks the layers that look at an image. Text without images skips them as a whole, their
 * feed-forward parts too: then they are left out. */
static qc_status read_numbers(qc_family_reader *r, qc_error *err)
{
    qc_forward_shape *s = r->out;
    const uint64_t layers = s->config.layers;
    const qc_json_node *list = qc_config_field(r->root, "cross_attention_layers");
    unsigned char *cross = NULL;
    QC_TRY(qc_arena_alloc(r->arena, &cross, (size_t)layers, 1, err));
    QC_TRY(qc_config_mark_layers(cross, (uint32_t)layers, list, err));
    for (uint64_t i = DEFAULT_FIRST; !list && i < layers && i <= DEFAULT_LAST; i += DEFAULT_STEP)
        cross[i] = 1;
    if (r->images) {
        s->cross = cross;
        return QC_OK;
    }
    QC_TRY(qc_arena_alloc(r->arena, &s->numbers, (size_t)layers, sizeof *s->numbers, err));
    s->config.layers = 0;
    for (uint64_t i = 0; i < layers; i++)
        if (!cross[i])
            s->numbers[s->config.layers++] = i;
    if (s->config.layers == 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: cross_attention_layers names all %" PRIu64
                " layers, and text without images needs others",
                layers);
    return QC_OK;
}

static qc_status read_text(qc_family_reader *r, qc_error *err)
{
    if (r->out->config.tied)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: tie_word_embeddings is true, and the embedding of a %s has more "
                "rows than its head",
                r->family->model_type);
    r->out->media_rows = MEDIA_ROWS;
    const qc_json_node *token = r->images ? qc_json_get(r->top, "image_token_index") : NULL;
    r->out->image_token = IMAGE_TOKEN;
    if (r->images)
        r->out->config.ids += MEDIA_ROWS;
    if (token)
        QC_TRY(qc_json_as_u64(token, "config.json: image_token_index", &r->out->image_token, err));
    return read_numbers(r, err);
}

#define TEXT_OF_IMAGES                                                                             \
    .names = &qc_layer_names_plain, .cross_names = &cross_names, .read = read_text, .heads = 32,   \
    .kv_heads = 8, .vocabulary = 128256, .theta = 5e5, .norm_eps = 1e-5, .bos = 128000,            \
    .eos = 128001

/* ---- the types ---- */

const qc_family qc_family_llama[6] = {
    {.model_type = "llama",
     .architecture = "LlamaForCausalLM",
     .other_architecture = "LLaMAForCausalLM",
     .names = &qc_layer_names_plain,
     .traits = QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_OUT_BIAS | QC_FAMILY_READS_MLP_BIAS,
     .bos = 1,
     .eos = 2},
    {.model_type = "mistral",
     .architecture = "MistralForCausalLM",
     .names = &qc_layer_names_plain,
     .slides = QC_SLIDES_ALWAYS,
     .window = 4096,
     .kv_heads = 8,
     .bos = 1,
     .eos = 2},
    {.model_type = "qwen2",
     .architecture = "Qwen2ForCausalLM",
     .names = &qc_layer_names_plain,
     .slides = QC_SLIDES_FROM,
     .traits = QC_FAMILY_QKV_BIAS,
     .window = 4096,
     .kv_heads = 32,
     .bos = -1,
     .eos = -1},
    {.model_type = "qwen3",
     .architecture = "Qwen3ForCausalLM",
     .names = &with_head_norms,
     .slides = QC_SLIDES_FROM,
     .traits = QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_OUT_BIAS,
     .window = 4096,
     .kv_heads = 32,
     .head_dim = 128,
     .bos = -1,
     .eos = -1},
    {TEXT_OF_IMAGES, .model_type = "mllama_text_model", .architecture = "MllamaForCausalLM"},
    {TEXT_OF_IMAGES, .model_type = "mllama", .architecture = "MllamaForConditionalGeneration",
     .prefixes = "language_model.model. model.language_model.", .traits = QC_FAMILY_TEXT_CONFIG},
};
