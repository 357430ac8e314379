/* config.json read field by field. Facts: docs/models.md.
 *
 *   shape      counts and sizes, under the names of the known families or the usual ones
 *   attention  a kind per layer: layer_types where it is given, else the family's own rule
 *   mlp        dense and experts; the wider one counts
 *
 * A configuration without a number of layers is no error: there is nothing to say then. */
#include "convert/geometry.h"

#include "base/checked.h"
#include "convert/config_fields.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define MAX_CONTEXT    (UINT64_C(1) << 40)
#define MAX_MEDIA      (UINT64_C(1) << 40)
#define GEMMA_HEAD     256u
#define GEMMA3_HEADS   8u
#define GEMMA3_KV      4u
#define GEMMA3_PATTERN 6u
#define DEFAULT_WINDOW 4096u /* of MistralConfig, Gemma2Config and Gemma3TextConfig */

static const char known_types[] =
    " llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe phi3 gemma gemma2 gemma3_text "
    "deepseek_v2 deepseek_v3 gpt_oss mllama_text_model mllama bert gpt2 ";
static const char encoder_types[] =
    " bert roberta xlm-roberta camembert distilbert electra albert deberta deberta-v2 mpnet "
    "modernbert nomic_bert vit deit beit dinov2 clip clip_vision_model siglip "
    "siglip_vision_model wav2vec2 hubert ";

typedef struct {
    qc_geometry *out;
    qc_arena *arena;
    qc_config config;
} reader;

static int is_type(const reader *r, const char *list)
{
    return qc_config_word_in(r->config.text_type, list);
}

/* ---- sizes ---- */

static qc_status read_size(const reader *r, uint64_t *out, const char *names, uint64_t missing,
                           qc_error *err)
{
    return qc_config_read(out, &r->config, names, QC_CONFIG_MAX_SIZE, missing, err);
}

static qc_status read_kv_heads(reader *r, qc_error *err)
{
    qc_geometry *g = r->out;
    uint64_t missing = is_type(r, " gemma3_text ") ? GEMMA3_KV : g->heads;
    if (is_type(r, " falcon RefinedWeb RefinedWebModel ") &&
        !qc_config_flag(&r->config, "new_decoder_architecture", 0)) {
        g->kv_heads = qc_config_flag(&r->config, "multi_query", 1) ? 1 : g->heads;
        return QC_OK;
    }
    if (is_type(r, " gpt_bigcode ") && qc_config_flag(&r->config, "multi_query", 1))
        missing = 1;
    return read_size(r, &g->kv_heads,
                     "num_key_value_heads num_kv_heads n_head_kv multi_query_"
                     "group_num",
                     missing, err);
}

static qc_status read_head_dim(reader *r, qc_error *err)
{
    qc_geometry *g = r->out;
    uint64_t missing = is_type(r, " gemma gemma2 gemma3_text ") ? GEMMA_HEAD : 0;
    QC_TRY(read_size(r, &g->head_dim, "head_dim kv_channels d_kv", missing, err));
    if (g->head_dim != 0 || g->heads == 0)
        return QC_OK;
    if (g->hidden % g->heads != 0 && !g->guessed)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: hidden_size %" PRIu64 " is no multiple of num_attention_heads "
                "%" PRIu64 " and there is no head_dim",
                g->hidden, g->heads);
    g->head_dim = g->hidden / g->heads;
    return QC_OK;
}

static qc_dtype read_dtype(const reader *r)
{
    const char *name = qc_json_string_or(qc_config_text_field(&r->config, "torch_dtype dtype"), "");
    for (int t = 0; t < QC_DTYPE_COUNT; t++) {
        const char *torch = qc_dtype_torch_name((qc_dtype)t);
        if (torch && strcmp(torch, name) == 0)
            return (qc_dtype)t;
    }
    return QC_DTYPE_COUNT;
}

static qc_status read_shape(reader *r, qc_error *err)
{
    qc_geometry *g = r->out;
    uint64_t layers = 0;
    QC_TRY(qc_config_read(&layers, &r->config, "num_hidden_layers n_layer n_layers num_layers",
                          QC_CONFIG_MAX_LAYERS, 0, err));
    g->layer_count = (uint32_t)layers;
    QC_TRY(read_size(r, &g->hidden, "hidden_size n_embd d_model n_embed", 0, err));
    QC_TRY(read_size(r, &g->heads, "num_attention_heads n_head n_heads num_heads",
                     is_type(r, " gemma3_text ") ? GEMMA3_HEADS : 0, err));
    QC_TRY(read_kv_heads(r, err));
    QC_TRY(read_head_dim(r, err));
    QC_TRY(read_size(r, &g->vocab, "vocab_size padded_vocab_size", 0, err));
    QC_TRY(qc_config_read(&g->max_context, &r->config,
                          "max_position_embeddings n_positions max_seq_len seq_length "
                          "max_sequence_length n_ctx",
                          MAX_CONTEXT, 0, err));
    g->dtype = read_dtype(r);
    if (g->layer_count == 0 || g->guessed)
        return QC_OK;
    if (g->heads == 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: there are %" PRIu32 " layers but no num_attention_heads",
                g->layer_count);
    if (g->kv_heads == 0 || g->heads % g->kv_heads != 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: num_attention_heads %" PRIu64 " is no multiple of "
                "num_key_value_heads %" PRIu64,
                g->heads, g->kv_heads);
    if (g->hidden == 0)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: there are %" PRIu32 " layers but no hidden_size",
                g->layer_count);
    return QC_OK;
}

/* ---- the MLP ---- */

static qc_status read_mlp(reader *r, qc_error *err)
{
    qc_geometry *g = r->out;
    uint64_t dense = 0, moe = 0, shared_width = 0, shared = 0, dense_first = 0;
    QC_TRY(read_size(r, &dense, "intermediate_size n_inner ffn_hidden_size ffn_dim d_ff",
                     g->hidden * 4, err));
    QC_TRY(qc_config_read(&g->experts, &r->config,
                          "num_local_experts num_experts n_routed_experts moe_num_experts",
                          QC_CONFIG_MAX_EXPERTS, 0, err));
    g->intermediate = dense;
    if (g->experts == 0)
        return QC_OK;
    QC_TRY(qc_config_read(&g->experts_per_token, &r->config,
                          "num_experts_per_tok experts_per_token moe_top_k moe_k", g->experts, 1,
                          err));
    QC_TRY(read_size(r, &moe, "moe_intermediate_size", dense, err));
    QC_TRY(qc_config_read(&shared, &r->config, "n_shared_experts", QC_CONFIG_MAX_EXPERTS, 0, err));
    QC_TRY(read_size(r, &shared_width, "shared_expert_intermediate_size", 0, err));
    QC_TRY(qc_config_read(&dense_first, &r->config, "first_k_dense_replace", QC_CONFIG_MAX_SIZE, 0,
                          err));
    uint64_t routed = moe * (g->experts_per_token + shared) + shared_width;
    const qc_json_node *only = qc_config_text_field(&r->config, "mlp_only_layers");
    uint64_t step = 1;
    QC_TRY(read_size(r, &step, "decoder_sparse_step", 1, err));
    int some_dense = dense_first > 0 || step > 1 ||
                     (only && qc_json_kind_of(only) == QC_JSON_ARRAY && qc_json_first(only));
    g->intermediate = some_dense && dense > routed ? dense : routed;
    return QC_OK;
}

/* ---- attention ---- */

/* The window of sliding layers; 0: none. A family's default counts where the field is missing, not
 * where it is null. */
static qc_status read_window(const reader *r, uint64_t *out, qc_error *err)
{
    const qc_json_node *n = qc_json_get(r->config.text, "sliding_window");
    *out = 0;
    if (!n) {
        *out = is_type(r, " mistral gemma2 gemma3_text ") ? DEFAULT_WINDOW : 0;
        return QC_OK;
    }
    if (qc_json_kind_of(n) == QC_JSON_NULL)
        return QC_OK;
    return qc_config_count(out, n, MAX_CONTEXT, 0, err);
}

static void set_sliding(qc_layer_geometry *l, uint64_t window)
{
    if (window == 0)
        return;
    l->attention = QC_ATTENTION_SLIDING;
    l->window = window;
}

static qc_status read_layer_types(reader *r, const qc_json_node *types, uint64_t window,
                                  qc_error *err)
{
    static const char no_cache[] = " linear_attention mamba mamba2 conv recurrent ";
    qc_geometry *g = r->out;
    uint64_t chunk = 0;
    uint32_t i = 0;
    QC_TRY(qc_config_read(&chunk, &r->config, "attention_chunk_size", MAX_CONTEXT, 0, err));
    if (qc_json_kind_of(types) != QC_JSON_ARRAY)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: layer_types is %s, expected a list",
                qc_json_kind_name(qc_json_kind_of(types)));
    for (const qc_json_node *n = qc_json_first(types); n; n = qc_json_next(n)) {
        const char *kind = NULL;
        QC_TRY(qc_json_as_string(n, "config.json: an entry of layer_types", &kind, err));
        if (i == g->layer_count)
            QC_FAIL(err, QC_ERR_INPUT,
                    "config.json: layer_types has more entries than the %" PRIu32 " layers",
                    g->layer_count);
        qc_layer_geometry *l = &g->layers[i++];
        if (strcmp(kind, "sliding_attention") == 0)
            set_sliding(l, window);
        else if (strcmp(kind, "chunked_attention") == 0)
            set_sliding(l, chunk);
        else if (qc_config_word_in(kind, no_cache))
            *l = (qc_layer_geometry){0};
    }
    if (i != g->layer_count)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: layer_types has %" PRIu32 " entries, there are %" PRIu32 " layers", i,
                g->layer_count);
    return QC_OK;
}

/* Which layers slide where config.json has no layer_types. */
static qc_status read_windows(reader *r, qc_error *err)
{
    qc_geometry *g = r->out;
    uint64_t window = 0, pattern = 0, from = 0;
    QC_TRY(read_window(r, &window, err));
    const qc_json_node *types = qc_config_text_field(&r->config, "layer_types");
    if (types)
        return read_layer_types(r, types, window, err);
    if (is_type(r, " gemma3_text "))
        QC_TRY(read_size(r, &pattern, "sliding_window_pattern _sliding_window_pattern",
                         GEMMA3_PATTERN, err));
    if (is_type(r, " qwen2 qwen3 qwen2_moe "))
        QC_TRY(read_size(r, &from, "max_window_layers", 0, err));
    int switched = is_type(r, " qwen2 qwen3 qwen2_moe qwen3_moe ") &&
                   !qc_config_flag(&r->config, "use_sliding_window", 0);
    int slides = is_type(r, " mistral mixtral phi3 starcoder2 gemma2 gemma3_text qwen2 qwen3 "
                            "qwen2_moe qwen3_moe ");
    if (!slides || switched)
        return QC_OK;
    for (uint32_t i = 0; i < g->layer_count; i++) {
        if (is_type(r, " gemma2 ") && i % 2 == 1)
            continue;
        if (pattern != 0 && (i + 1) % pattern == 0)
            continue;
        if (i >= from)
            set_sliding(&g->layers[i], window);
    }
    return QC_OK;
}

static qc_status read_latent(reader *r, uint64_t rank, qc_error *err)
{
    qc_geometry *g = r->out;
    uint64_t rope = 0, nope = 0, v = 0;
    QC_TRY(read_size(r, &rope, "qk_rope_head_dim", 0, err));
    QC_TRY(read_size(r, &nope, "qk_nope_head_dim", 0, err));
    QC_TRY(read_size(r, &v, "v_head_dim", nope, err));
    if (rope + nope == 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: kv_lora_rank is %" PRIu64
                " but there are no qk_nope_head_dim and qk_rope_head_dim",
                rank);
    g->head_dim = nope + rope;
    for (uint32_t i = 0; i < g->layer_count; i++) {
        g->layers[i].attention = QC_ATTENTION_MLA;
        g->layers[i].kv_elems = rank + rope;
        g->layers[i].kv_elems_expanded = g->heads * (nope + rope + v);
    }
    return QC_OK;
}

static qc_status read_cross(reader *r, qc_error *err)
{
    qc_geometry *g = r->out;
    void *v = NULL;
    const qc_json_node *list = qc_config_text_field(&r->config, "cross_attention_layers");
    if (!list)
        return QC_OK;
    QC_TRY(qc_arena_alloc(r->arena, &v, g->layer_count, 1, err));
    unsigned char *marks = v;
    QC_TRY(qc_config_mark_layers(marks, g->layer_count, list, err));
    for (uint32_t i = 0; i < g->layer_count; i++) {
        if (marks[i])
            g->layers[i].attention = QC_ATTENTION_CROSS;
    }
    return QC_OK;
}

static qc_status read_attention(reader *r, qc_error *err)
{
    qc_geometry *g = r->out;
    void *v = NULL;
    uint64_t rank = 0;
    if (g->layer_count == 0)
        return QC_OK;
    QC_TRY(qc_arena_alloc(r->arena, &v, g->layer_count, sizeof *g->layers, err));
    g->layers = v;
    if (!g->decoder || g->heads == 0)
        return QC_OK;
    for (uint32_t i = 0; i < g->layer_count; i++) {
        g->layers[i].attention = QC_ATTENTION_FULL;
        g->layers[i].kv_elems = 2 * g->kv_heads * g->head_dim;
    }
    QC_TRY(read_size(r, &rank, "kv_lora_rank", 0, err));
    if (rank != 0)
        return read_latent(r, rank, err);
    QC_TRY(read_windows(r, err));
    return read_cross(r, err);
}

/* ---- the vision tower ---- */

static qc_status read_vision(reader *r, qc_error *err)
{
    qc_geometry *g = r->out;
    const qc_json_node *v = r->config.vision;
    uint64_t local = 0, global = 0, image = 0, patch = 0, tiles = 0;
    if (!v)
        return QC_OK;
    QC_TRY(qc_config_count(&g->vision_hidden, qc_config_field(v, "hidden_size embed_dim width"),
                           QC_CONFIG_MAX_SIZE, 0, err));
    QC_TRY(qc_config_count(&local, qc_config_field(v, "num_hidden_layers depth layers"),
                           QC_CONFIG_MAX_LAYERS, 0, err));
    QC_TRY(qc_config_count(&global, qc_config_field(v, "num_global_layers"), QC_CONFIG_MAX_LAYERS,
                           0, err));
    g->vision_layers = local + global;
    if (strcmp(r->config.model_type, "mllama") != 0)
        return QC_OK;
    QC_TRY(qc_config_count(&image, qc_config_field(v, "image_size"), QC_CONFIG_MAX_SIZE, 0, err));
    QC_TRY(qc_config_count(&patch, qc_config_field(v, "patch_size"), QC_CONFIG_MAX_SIZE, 0, err));
    QC_TRY(
        qc_config_count(&tiles, qc_config_field(v, "max_num_tiles"), QC_CONFIG_MAX_SIZE, 0, err));
    if (patch == 0)
        return QC_OK;
    uint64_t side = image / patch;
    if (qc_mul_u64(side * side + 1, tiles, &g->media_positions) || g->media_positions > MAX_MEDIA)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: %" PRIu64 " tiles of %" PRIu64 " x %" PRIu64
                " patches are more than the %" PRIu64 " positions an image may have",
                tiles, side, side, (uint64_t)MAX_MEDIA);
    return QC_OK;
}

qc_status qc_geometry_read(qc_geometry *out, qc_arena *arena, const qc_json *config, qc_error *err)
{
    reader r = {.out = out, .arena = arena};
    memset(out, 0, sizeof *out);
    out->model_type = "";
    out->dtype = QC_DTYPE_COUNT;
    qc_config_open(&r.config, config);
    if (!config)
        return QC_OK;
    QC_TRY(qc_arena_strndup(arena, &out->model_type, r.config.model_type,
                            strlen(r.config.model_type), err));
    out->guessed = !is_type(&r, known_types);
    out->decoder = !is_type(&r, encoder_types) || qc_config_flag(&r.config, "is_decoder", 0);
    QC_TRY(read_shape(&r, err));
    QC_TRY(read_mlp(&r, err));
    QC_TRY(read_attention(&r, err));
    return read_vision(&r, err);
}

/* ---- the cache ---- */

/* Bytes of one position of one sequence. */
static uint64_t position_bytes(const qc_layer_geometry *l, const qc_kv_use *use)
{
    uint64_t elems = l->kv_elems;
    if (l->attention == QC_ATTENTION_NONE)
        return 0;
    if (l->attention == QC_ATTENTION_MLA && use->mla_expanded)
        elems = l->kv_elems_expanded;
    uint64_t bits = qc_sat_mul(elems, use->kv_bits);
    return bits == UINT64_MAX ? bits : qc_ceil_div_u64(bits, 8);
}

uint64_t qc_layer_kv_bytes(const qc_geometry *g, uint32_t layer, const qc_kv_use *use)
{
    const qc_layer_geometry *l = &g->layers[layer];
    uint64_t positions = use->context;
    if (l->attention == QC_ATTENTION_SLIDING && l->window < positions)
        positions = l->window;
    else if (l->attention == QC_ATTENTION_CROSS)
        positions = qc_sat_mul(use->images, g->media_positions);
    return qc_sat_mul(qc_sat_mul(position_bytes(l, use), positions), use->batch);
}

uint64_t qc_layer_kv_bytes_next(const qc_geometry *g, uint32_t layer, const qc_kv_use *use)
{
    const qc_layer_geometry *l = &g->layers[layer];
    if (l->attention == QC_ATTENTION_CROSS ||
        (l->attention == QC_ATTENTION_SLIDING && use->context >= l->window))
        return 0;
    return position_bytes(l, use);
}

uint64_t qc_kv_bytes_per_token(const qc_geometry *g, const qc_kv_use *use)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < g->layer_count; i++) {
        if (g->layers[i].attention != QC_ATTENTION_CROSS)
            total = qc_sat_add(total, position_bytes(&g->layers[i], use));
    }
    return total;
}
