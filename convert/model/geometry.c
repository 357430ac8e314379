/* Reads config.json field by field. docs/theory/config.md has the facts.
 *
 *   shape      counts and sizes, under the names of the known families or the usual ones
 *   attention  a kind per layer: layer_types where it is given, else the family's own rule
 *   mlp        dense and experts; the wider one counts
 *
 * A configuration without a number of layers is no error. There is nothing to say about it then. */
#include "convert/model/geometry_internal.h"

#include "base/checked.h"
#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define MAX_CONTEXT QC_GEOMETRY_MAX_CONTEXT
#define MAX_MEDIA   (UINT64_C(1) << 40)
#define F32_BYTES   4u

typedef qc_geometry_reader reader;

/* ---- the shape ---- */

static qc_status read_kv_heads(reader *r, qc_error *err)
{
    qc_geometry *g = r->out;
    uint64_t missing = r->row->kv_heads ? r->row->kv_heads : g->heads;
    if (qc_geometry_is(r, " falcon RefinedWeb RefinedWebModel ") &&
        !qc_config_flag(&r->config, "new_decoder_architecture", 0)) {
        g->kv_heads = qc_config_flag(&r->config, "multi_query", 1) ? 1 : g->heads;
        return QC_OK;
    }
    if (qc_geometry_is(r, " gpt_bigcode ") && qc_config_flag(&r->config, "multi_query", 1))
        missing = 1;
    return qc_config_size(&g->kv_heads, &r->config,
                          "decoder_num_key_value_heads num_key_value_heads num_kv_heads n_head_kv "
                          "multi_query_group_num",
                          missing, err);
}

static qc_status read_head_dim(reader *r, qc_error *err)
{
    qc_geometry *g = r->out;
    const char *names = qc_geometry_is(r, " zamba zamba2 ") ? "attention_head_dim head_dim"
                                                            : "head_dim kv_channels d_kv";
    /* Only the configuration of the text counts, because a projector or another tower may have a
     * head_dim too. */
    QC_TRY(qc_config_count(&g->head_dim, qc_config_field(r->config.text, names), QC_CONFIG_MAX_SIZE,
                           r->row->head_dim, err));
    if (g->head_dim != 0 || g->heads == 0)
        return QC_OK;
    if (g->hidden % g->heads != 0 && !g->guessed && g->decoder)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: hidden_size %" PRIu64
                " is not a multiple of num_attention_heads %" PRIu64 ", and there is no head_dim",
                g->hidden, g->heads);
    g->head_dim = g->hidden / g->heads;
    return QC_OK;
}

static qc_status read_shape(reader *r, qc_error *err)
{
    qc_geometry *g = r->out;
    uint64_t layers = 0;
    /* transformers counts LongCat-Flash's attentions, two in a layer, in num_hidden_layers. */
    if (qc_geometry_is(r, " longcat_flash "))
        QC_TRY(qc_config_read(&layers, &r->config, "num_layers", QC_CONFIG_MAX_LAYERS, 0, err));
    if (layers == 0)
        QC_TRY(qc_config_read(&layers, &r->config,
                              "decoder_layers num_decoder_layers decoder_num_hidden_layers "
                              "num_hidden_layers n_layer n_layers num_layers layers",
                              QC_CONFIG_MAX_LAYERS, 0, err));
    /* Only a list may tell how many there are (nemotron_h). xlstm's num_blocks is not read. */
    const qc_json_node *list = qc_config_field(r->config.text, "layers_block_type layer_types");
    if (layers == 0 && list && qc_json_kind_of(list) == QC_JSON_ARRAY) {
        layers = qc_json_count(list);
        if (layers > QC_CONFIG_MAX_LAYERS)
            QC_FAIL(err, QC_ERR_INPUT,
                    "config.json: %s has %" PRIu64 " entries, expected at most %u",
                    qc_json_key(list), layers, QC_CONFIG_MAX_LAYERS);
    }
    g->layer_count = (uint32_t)layers;
    QC_TRY(qc_config_size(&g->hidden, &r->config, "hidden_size n_embd d_model n_embed embed_dim", 0,
                          err));
    QC_TRY(qc_config_size(&g->heads, &r->config,
                          "decoder_attention_heads num_decoder_attention_heads "
                          "decoder_num_attention_heads num_attention_heads n_head n_heads "
                          "num_heads attention_heads",
                          r->row->heads, err));
    QC_TRY(read_kv_heads(r, err));
    QC_TRY(read_head_dim(r, err));
    QC_TRY(qc_config_size(&g->vocab, &r->config, "vocab_size padded_vocab_size", 0, err));
    QC_TRY(qc_config_read(&g->max_context, &r->config,
                          "max_position_embeddings n_positions max_target_positions max_seq_len "
                          "seq_length max_sequence_length n_ctx",
                          MAX_CONTEXT, 0, err));
    const char *dtype =
        qc_json_string_or(qc_config_text_field(&r->config, "torch_dtype dtype"), "");
    for (g->dtype = 0; g->dtype < QC_DTYPE_COUNT; g->dtype++) {
        const char *torch = qc_dtype_torch_name(g->dtype);
        if (torch && strcmp(torch, dtype) == 0)
            break;
    }
    if (g->layer_count == 0 || g->guessed || !g->decoder)
        return QC_OK;
    if (g->heads == 0 && !(r->row->in == QC_LAYER_STATE && r->row->out == QC_LAYER_STATE))
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: there are %" PRIu32 " layers but no num_attention_heads",
                g->layer_count);
    if (g->heads != 0 && (g->kv_heads == 0 || g->heads % g->kv_heads != 0))
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: num_attention_heads %" PRIu64
                " is not a multiple of num_key_value_heads %" PRIu64,
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
    QC_TRY(qc_config_size(&dense, &r->config,
                          "decoder_ffn_dim intermediate_size n_inner ffn_hidden_size ffn_dim d_ff",
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
    QC_TRY(qc_config_size(&moe, &r->config, "moe_intermediate_size", dense, err));
    QC_TRY(qc_config_read(&shared, &r->config, "n_shared_experts", QC_CONFIG_MAX_EXPERTS, 0, err));
    QC_TRY(qc_config_size(&shared_width, &r->config, "shared_expert_intermediate_size", 0, err));
    QC_TRY(qc_config_read(&dense_first, &r->config, "first_k_dense_replace", QC_CONFIG_MAX_SIZE, 0,
                          err));
    uint64_t routed = moe * (g->experts_per_token + shared) + shared_width;
    const qc_json_node *only = qc_config_text_field(&r->config, "mlp_only_layers");
    uint64_t step = 1;
    QC_TRY(qc_config_size(&step, &r->config, "decoder_sparse_step", 1, err));
    int some_dense = dense_first > 0 || step > 1 ||
                     (only && qc_json_kind_of(only) == QC_JSON_ARRAY && qc_json_first(only));
    g->intermediate = some_dense && dense > routed ? dense : routed;
    return QC_OK;
}

/* ---- the vision tower ---- */

/* Reads a size, or the largest of a list, which a tower in stages has. */
static qc_status largest_of(uint64_t *out, const qc_json_node *n, qc_error *err)
{
    const uint64_t max = QC_CONFIG_MAX_SIZE;
    if (!n || qc_json_kind_of(n) != QC_JSON_ARRAY)
        return qc_config_count(out, n, max, 0, err);
    *out = 0;
    for (const qc_json_node *each = qc_json_first(n); each; each = qc_json_next(each)) {
        uint64_t size = 0;
        QC_TRY(qc_config_count(&size, each, max, 0, err));
        *out = size > *out ? size : *out;
    }
    return QC_OK;
}

static qc_status read_vision(reader *r, qc_error *err)
{
    qc_geometry *g = r->out;
    const qc_json_node *v = r->config.vision;
    uint64_t image = 0, patch = 0, tiles = 0;
    if (!v)
        return QC_OK;
    QC_TRY(largest_of(&g->vision_hidden, qc_config_field(v, "hidden_size embed_dim width"), err));
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

/* ---- what it is for ---- */

/* Does this type keep nothing from one token to the next, whatever its config.json says? */
static int has_no_cache(const char *type)
{
    return qc_type_is("run_without_cache", type) || qc_type_is("worked_out_without_cache", type);
}

static void read_role(reader *r)
{
    qc_geometry *g = r->out;
    const qc_json_node *list = qc_config_field(r->config.root, "architectures");
    const qc_json_node *first =
        list && qc_json_kind_of(list) == QC_JSON_ARRAY ? qc_json_first(list) : NULL;
    /* "T5EncoderModel" or "BertForMaskedLM" leaves out the part that generates. */
    const char *class_name = first ? qc_json_string_or(first, "") : "";
    const char *type = r->config.text_type;
    g->decoder = !has_no_cache(type) && !has_no_cache(r->config.model_type) &&
                 !qc_ends_with(class_name, "EncoderModel") &&
                 !qc_ends_with(class_name, "ForMaskedLM");
    if (qc_type_is("encoder", type))
        g->decoder &= qc_config_flag(&r->config, "is_decoder", 0);
    g->encoder_decoder =
        g->decoder && (qc_config_flag(&r->config, "is_encoder_decoder", 0) ||
                       qc_json_bool_or(qc_json_get(r->config.root, "is_encoder_decoder"), 0));
}

/* Reads how many positions of the source the decoder looks at: the number that a speech or vision
 * encoder always makes, or 0 where it depends on the text. */
static qc_status read_source(reader *r, qc_error *err)
{
    qc_geometry *g = r->out;
    uint64_t image = 0, patch = 0;
    if (!g->encoder_decoder)
        return QC_OK;
    if (qc_geometry_is(r, " whisper "))
        return qc_config_read(&g->source_positions, &r->config, "max_source_positions", MAX_CONTEXT,
                              1500, err);
    const qc_json_node *encoder = qc_json_get(r->config.root, "encoder");
    const char *type = qc_json_string_or(qc_config_field(encoder, "model_type"), "");
    if (!qc_config_word_in(type, " vit deit beit "))
        return QC_OK;
    QC_TRY(qc_config_count(&image, qc_config_field(encoder, "image_size"), QC_CONFIG_MAX_SIZE, 224,
                           err));
    QC_TRY(qc_config_count(&patch, qc_config_field(encoder, "patch_size"), QC_CONFIG_MAX_SIZE, 16,
                           err));
    uint64_t side = patch ? image / patch : 0;
    g->source_positions = side * side + (strcmp(type, "deit") == 0 ? 2 : 1);
    return QC_OK;
}

qc_status qc_geometry_read(qc_geometry *out, qc_arena *arena, const qc_json *config, qc_error *err)
{
    reader r = {.out = out, .arena = arena};
    memset(out, 0, sizeof *out);
    out->model_type = "";
    out->dtype = QC_DTYPE_COUNT;
    qc_config_open(&r.config, config);
    out->cache_unknown = 1;
    if (!config)
        return QC_OK;
    QC_TRY(qc_arena_strndup(arena, &out->model_type, r.config.model_type,
                            strlen(r.config.model_type), err));
    r.row = qc_cache_row_of(r.config.text_type);
    out->guessed = !qc_type_is("compared", r.config.text_type) &&
                   !qc_type_is("worked_out", r.config.text_type) &&
                   !has_no_cache(r.config.text_type) && !qc_type_is("encoder", r.config.text_type);
    read_role(&r);
    QC_TRY(read_shape(&r, err));
    QC_TRY(read_mlp(&r, err));
    out->cache_unknown = out->decoder && out->layer_count == 0;
    QC_TRY(qc_geometry_read_layers(&r, err));
    QC_TRY(read_source(&r, err));
    return read_vision(&r, err);
}

/* ---- the cache ---- */

static uint64_t bytes_of(uint64_t elems, unsigned bits)
{
    uint64_t all = qc_sat_mul(elems, bits);
    return all == UINT64_MAX ? all : qc_ceil_div_u64(all, 8);
}

/* Returns the bytes of one position of one sequence. */
static uint64_t position_bytes(const qc_layer_geometry *l, const qc_kv_use *use)
{
    if (l->attention == QC_ATTENTION_NONE)
        return 0;
    if (l->attention == QC_ATTENTION_MLA && use->mla_expanded)
        return bytes_of(l->kv_elems_expanded, use->kv_bits);
    return bytes_of(l->kv_elems, use->kv_bits);
}

uint64_t qc_layer_kv_bytes(const qc_geometry *g, uint32_t layer, const qc_kv_use *use)
{
    const qc_layer_geometry *l = &g->layers[layer];
    uint64_t positions = use->context;
    uint64_t source = g->source_positions ? g->source_positions : use->context;
    if (l->attention == QC_ATTENTION_SLIDING && l->window < positions)
        positions = l->window;
    else if (l->attention == QC_ATTENTION_CROSS)
        positions = qc_sat_mul(use->images, g->media_positions);
    uint64_t bytes = qc_sat_mul(position_bytes(l, use), positions);
    bytes = qc_sat_add(bytes, qc_sat_mul(bytes_of(l->source_elems, use->kv_bits), source));
    /* --kv-dtype does not make a state smaller than 16 bits per element. */
    bytes = qc_sat_add(bytes, bytes_of(l->state_elems, use->kv_bits < 16 ? 16 : use->kv_bits));
    bytes = qc_sat_add(bytes, qc_sat_mul(l->state_f32_elems, F32_BYTES));
    return qc_sat_mul(bytes, use->batch);
}

uint64_t qc_kv_bytes_per_token(const qc_geometry *g, const qc_kv_use *use)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < g->layer_count; i++) {
        const qc_layer_geometry *l = &g->layers[i];
        if (l->attention != QC_ATTENTION_CROSS)
            total = qc_sat_add(total, position_bytes(l, use));
        if (g->source_positions == 0)
            total = qc_sat_add(total, bytes_of(l->source_elems, use->kv_bits));
    }
    return total;
}
