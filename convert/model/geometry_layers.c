/* Finds out what each layer keeps from one token to the next.
 *
 *   kinds    attention in full, with a window, a state of fixed size, both, or nothing: a list in
 *            config.json where there is one, else the rule of the family
 *   caches   keys and values per token, or the latent of MLA
 *   states   what a recurrent layer keeps instead: it does not grow
 *   cross    keys and values of the source, in the decoder of an encoder-decoder
 *
 * tests/interop/test_interop_caches.py compares all of this with what transformers keeps. */
#include "convert/model/geometry_internal.h"

#include "base/checked.h"
#include "convert/families/shape_text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define GEMMA3_PATTERN   6u
#define GEMMA4_HEAD      512u  /* the head size of layers with full attention */
#define DEFAULT_WINDOW   4096u /* the default of MistralConfig, Gemma2Config and Gemma3TextConfig */
#define NAME_SHOWN_BYTES 80
#define MAX_CONTEXT      QC_GEOMETRY_MAX_CONTEXT

typedef enum {
    KIND_FULL,
    KIND_SLIDING,
    KIND_CHUNKED,
    KIND_STATE, /* a state instead of keys and values */
    KIND_BOTH,  /* attention and a state in one layer */
    KIND_NONE   /* an MLP or experts alone */
} kind;

static const qc_json_node *text_field(const qc_geometry_reader *r, const char *names)
{
    return qc_config_field(r->config.text, names);
}

/* ---- kinds ---- */

static int kind_of_word(const char *word, kind *out)
{
    static const struct {
        const char *words;
        kind kind;
    } rows[] = {
        {" full_attention attention * ", KIND_FULL},
        {" sliding_attention ", KIND_SLIDING},
        {" chunked_attention ", KIND_CHUNKED},
        {" linear_attention mamba mamba2 conv recurrent M kda ", KIND_STATE},
        {" hybrid ", KIND_BOTH},
        {" moe mlp - E ", KIND_NONE},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (!qc_config_word_in(word, rows[i].words))
            continue;
        *out = rows[i].kind;
        return 1;
    }
    return 0;
}

/* Reads a list of words, one per layer. */
static qc_status read_list(const qc_geometry_reader *r, kind *kinds, const qc_json_node *list,
                           qc_error *err)
{
    const char *name = qc_json_key(list);
    uint32_t i = 0, count = r->out->layer_count;
    if (qc_json_kind_of(list) != QC_JSON_ARRAY)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s is %s, expected a list", name,
                qc_json_kind_name(qc_json_kind_of(list)));
    for (const qc_json_node *n = qc_json_first(list); n; n = qc_json_next(n)) {
        char what[NAME_SHOWN_BYTES];
        const char *word = NULL;
        (void)snprintf(what, sizeof what, "config.json: an entry of %s", name);
        QC_TRY(qc_json_as_string(n, what, &word, err));
        if (i == count)
            QC_FAIL(err, QC_ERR_INPUT,
                    "config.json: %s has more entries than the %" PRIu32 " layers", name, count);
        (void)kind_of_word(word, &kinds[i++]);
    }
    if (i != count)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: %s has %" PRIu32 " entries, but there are %" PRIu32 " layers", name,
                i, count);
    return QC_OK;
}

/* Reads RecurrentGemma's block_types, a pattern that is repeated. */
static qc_status read_pattern(const qc_geometry_reader *r, kind *kinds, qc_error *err)
{
    const qc_json_node *list = text_field(r, "block_types"), *n = NULL;
    for (uint32_t i = 0; i < r->out->layer_count; i++) {
        const char *word = i % 3 == 2 ? "attention" : "recurrent";
        if (list && qc_json_kind_of(list) == QC_JSON_ARRAY && qc_json_first(list)) {
            n = n ? qc_json_next(n) : NULL;
            n = n ? n : qc_json_first(list);
            QC_TRY(qc_json_as_string(n, "config.json: an entry of block_types", &word, err));
        }
        kinds[i] = strcmp(word, "attention") == 0 ? KIND_SLIDING : KIND_STATE;
    }
    return QC_OK;
}

/* Reads Nemotron-H's hybrid_override_pattern, a letter per layer. */
static qc_status read_letters(const qc_geometry_reader *r, kind *kinds, const qc_json_node *letters,
                              qc_error *err)
{
    const char *text = NULL;
    QC_TRY(qc_json_as_string(letters, "config.json: hybrid_override_pattern", &text, err));
    if (strlen(text) != r->out->layer_count)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: hybrid_override_pattern has %zu letters, but there are %" PRIu32
                " layers",
                strlen(text), r->out->layer_count);
    for (uint32_t i = 0; i < r->out->layer_count; i++)
        (void)kind_of_word((char[]){text[i], '\0'}, &kinds[i]);
    return QC_OK;
}

/* Gives one kind to the layers in the list, and another to the others. first is the number of the
 * first layer. */
static qc_status mark(const qc_geometry_reader *r, kind *kinds, const qc_json_node *list,
                      uint64_t first, kind in, kind out, qc_error *err)
{
    for (uint32_t i = 0; i < r->out->layer_count; i++)
        kinds[i] = out;
    if (!list || qc_json_kind_of(list) != QC_JSON_ARRAY)
        return QC_OK;
    for (const qc_json_node *n = qc_json_first(list); n; n = qc_json_next(n)) {
        uint64_t at = 0;
        QC_TRY(qc_json_as_u64(n, qc_json_key(list), &at, err));
        if (at < first || at - first >= r->out->layer_count)
            QC_FAIL(err, QC_ERR_INPUT,
                    "config.json: %s names layer %" PRIu64 ", but there are only %" PRIu32
                    " layers",
                    qc_json_key(list), at, r->out->layer_count);
        kinds[at - first] = in;
    }
    return QC_OK;
}

/* Gives one kind to every period-th layer, beginning with `offset`, and another to the others. */
static void every(const qc_geometry_reader *r, kind *kinds, uint64_t period, uint64_t offset,
                  kind in, kind out)
{
    for (uint32_t i = 0; i < r->out->layer_count; i++)
        kinds[i] = period != 0 && i % period == offset % period ? in : out;
}

static qc_status read_period(const qc_geometry_reader *r, kind *kinds, kind in, qc_error *err)
{
    uint64_t period = 0, offset = 0;
    QC_TRY(qc_geometry_size(r, &period, "attn_layer_period", qc_geometry_is(r, " zamba ") ? 6 : 8,
                            err));
    QC_TRY(qc_geometry_size(r, &offset, "attn_layer_offset", 4, err));
    every(r, kinds, period, offset, in, KIND_STATE);
    return QC_OK;
}

/* Finds which layers slide where there is a window and no list. The first `from` never do. */
static qc_status read_sliding_rule(const qc_geometry_reader *r, kind *kinds, qc_error *err)
{
    uint64_t from = 0, pattern = 0;
    int switched = qc_geometry_is(r, " qwen2 qwen3 qwen2_moe qwen3_moe ") &&
                   !qc_config_flag(&r->config, "use_sliding_window", 0);
    if (switched || !qc_config_flag(&r->config, "use_sliding_window", 1) || r->out->guessed ||
        qc_geometry_is(r, " llama "))
        return QC_OK;
    if (qc_geometry_is(r, " gemma3_text "))
        pattern = GEMMA3_PATTERN;
    if (qc_geometry_is(r, " gemma3_text cohere2 exaone4 olmo3 ")) {
        const qc_json_node *n = text_field(r, "sliding_window_pattern _sliding_window_pattern");
        uint64_t missing = pattern ? pattern : 4;
        if (n && qc_json_kind_of(n) == QC_JSON_STRING)
            pattern = strlen(qc_json_string_or(n, "")); /* "LLLG" */
        else
            QC_TRY(qc_config_count(&pattern, n, QC_CONFIG_MAX_LAYERS, missing, err));
    }
    if (qc_geometry_is(r, " qwen2 qwen3 qwen2_moe "))
        QC_TRY(qc_geometry_size(r, &from, "max_window_layers", 0, err));
    for (uint32_t i = 0; i < r->out->layer_count; i++) {
        int full = i < from || (pattern != 0 && (i + 1) % pattern == 0) ||
                   (qc_geometry_is(r, " gemma2 vaultgemma ") && i % 2 == 1);
        kinds[i] = full ? KIND_FULL : KIND_SLIDING;
    }
    return QC_OK;
}

/* Sets the layers of families whose layers are not all alike, and whose config.json may have no
 * list of them. */
static qc_status read_family_rule(const qc_geometry_reader *r, kind *kinds, qc_error *err)
{
    uint64_t interval = 0;
    const qc_json_node *n = NULL;
    if (qc_geometry_is(r, QC_ATTENTION_FREE))
        return mark(r, kinds, NULL, 0, KIND_STATE, KIND_STATE, err);
    if (qc_geometry_is(r, " falcon_h1 "))
        return mark(r, kinds, NULL, 0, KIND_BOTH, KIND_BOTH, err);
    if (qc_geometry_is(r, " recurrent_gemma "))
        return read_pattern(r, kinds, err);
    if (qc_geometry_is(r, " bamba granitemoehybrid "))
        return mark(r, kinds, text_field(r, "attn_layer_indices"), 0, KIND_FULL, KIND_STATE, err);
    if (qc_geometry_is(r, " jamba zamba "))
        return read_period(r, kinds, qc_geometry_is(r, " jamba ") ? KIND_FULL : KIND_BOTH, err);
    if (qc_geometry_is(r, " zamba2 ") && (n = text_field(r, "hybrid_layer_ids")) != NULL)
        return mark(r, kinds, n, 0, KIND_BOTH, KIND_STATE, err);
    if (qc_geometry_is(r, " lfm2 lfm2_moe ") && (n = text_field(r, "full_attn_idxs")) != NULL)
        return mark(r, kinds, n, 0, KIND_FULL, KIND_STATE, err);
    if (qc_geometry_is(r, " qwen3_next qwen3_5_text qwen3_5_moe_text ")) {
        QC_TRY(qc_geometry_size(r, &interval, "full_attention_interval", 4, err));
        every(r, kinds, interval, interval + interval - 1, KIND_FULL, KIND_STATE);
        return QC_OK;
    }
    if (qc_geometry_is(r, " kimi_linear ")) {
        n = qc_config_field(text_field(r, "linear_attn_config"), "kda_layers");
        return mark(r, kinds, n, 1, KIND_STATE, KIND_FULL, err);
    }
    if (qc_geometry_is(r, " llama4_text ")) { /* every fourth layer sees all */
        every(r, kinds, 4, 3, KIND_FULL, KIND_CHUNKED);
        return QC_OK;
    }
    return read_sliding_rule(r, kinds, err);
}

static qc_status read_kinds(const qc_geometry_reader *r, kind *kinds, qc_error *err)
{
    const qc_json_node *list = text_field(r, "layer_types layers_block_type");
    const qc_json_node *letters = text_field(r, "hybrid_override_pattern");
    if (list)
        return read_list(r, kinds, list, err);
    if (letters)
        return read_letters(r, kinds, letters, err);
    return read_family_rule(r, kinds, err);
}

/* ---- states ---- */

#define WIDE       "mamba_expand?2*hidden"
#define MAMBA1     "(intermediate_size?+!intermediate_size?*expand?2*hidden)"
#define FALCON     "(mamba_d_ssm?+!mamba_d_ssm?*" WIDE ")"
#define NEMOTRON   "(mamba_num_heads?*mamba_head_dim?+!mamba_num_heads?*2*hidden)"
#define XLSTM_KEYS "((hidden/2+63)/64*64/heads)"

/* What one recurrent layer keeps, as sums (convert/families/shape_text.h): elements in 16 bit, and
 * in single precision. In Mamba 2 the B and C of the groups also pass the convolution. xLSTM has a
 * matrix, a normalizer and a maximum per head; its qk_dim_factor and v_dim_factor are fractions,
 * which are not read, and all releases have their defaults, 1/2 and 1. */
static const struct {
    const char *types, *elems, *f32_elems;
} states[] = {
    {" mamba falcon_mamba ", MAMBA1 "*conv_kernel?4", MAMBA1 "*state_size?16"},
    {" jamba zamba ", WIDE "*mamba_d_conv?4", WIDE "*mamba_d_state?16"},
    {" mamba2 ", "(expand?2*hidden+2*n_groups?1*state_size?128)*conv_kernel?4",
     "expand?2*hidden*state_size?128"},
    {" bamba granitemoehybrid ", "(" WIDE "+2*mamba_n_groups?1*mamba_d_state?256)*mamba_d_conv?4",
     WIDE "*mamba_d_state?256"},
    {" falcon_h1 ", "(" FALCON "+2*mamba_n_groups?1*mamba_d_state?256)*mamba_d_conv?4",
     FALCON "*mamba_d_state?256"},
    {" nemotron_h ", "(" NEMOTRON "+2*n_groups?1*ssm_state_size?128)*conv_kernel?4",
     NEMOTRON "*ssm_state_size?128"},
    {" zamba2 ", "(" WIDE "+2*mamba_ngroups?1*mamba_d_state?64)*mamba_d_conv?4",
     WIDE "*mamba_d_state?64"},
    {" xlstm ", "heads*(" XLSTM_KEYS "*((hidden+63)/64*64/heads)+" XLSTM_KEYS "+1)", "0"},
    {" lfm2 lfm2_moe lfm3 ", "hidden*conv_L_cache?3", "0"},
    {" minimax ", "heads*head_dim*head_dim", "0"},
    {" rwkv ", "2*hidden", "3*(attention_hidden_size?+!attention_hidden_size?*hidden)"},
};

/* Reads the state of a gated delta rule: a convolution over queries, keys and values, and a matrix
 * per head. */
static qc_status read_delta_state(const qc_geometry_reader *r, qc_layer_geometry *out,
                                  qc_error *err)
{
    uint64_t heads = 0, key_heads = 0, key_dim = 0, value_dim = 0, conv = 0;
    QC_TRY(qc_geometry_size(r, &heads, "linear_num_value_heads linear_num_heads", 32, err));
    QC_TRY(qc_geometry_size(r, &key_heads, "linear_num_key_heads linear_num_heads", 16, err));
    QC_TRY(qc_geometry_size(r, &key_dim, "linear_key_head_dim linear_head_dim", 128, err));
    QC_TRY(qc_geometry_size(r, &value_dim, "linear_value_head_dim linear_head_dim", 128, err));
    QC_TRY(qc_geometry_size(r, &conv, "linear_conv_kernel_dim", 4, err));
    uint64_t keys = qc_sat_mul(key_heads, key_dim), values = qc_sat_mul(heads, value_dim);
    out->state_elems = qc_sat_mul(qc_sat_add(qc_sat_mul(2, keys), values), conv);
    out->state_f32_elems = qc_sat_mul(qc_sat_mul(heads, key_dim), value_dim);
    return QC_OK;
}

/* Reads what one recurrent layer keeps. It is all zero for a type whose state is not known. */
static qc_status read_state(const qc_geometry_reader *r, qc_layer_geometry *out, qc_error *err)
{
    const qc_geometry *g = r->out;
    const qc_shape_facts facts = {
        .config = &r->config, .hidden = g->hidden, .heads = g->heads, .head_dim = g->head_dim};
    uint64_t width = 0, conv = 0;
    for (size_t i = 0; i < sizeof states / sizeof *states; i++) {
        if (!qc_geometry_is(r, states[i].types))
            continue;
        QC_TRY(qc_shape_when(&out->state_elems, states[i].elems, 0, &facts, err));
        return qc_shape_when(&out->state_f32_elems, states[i].f32_elems, 0, &facts, err);
    }
    if (text_field(r, "linear_num_value_heads linear_num_heads"))
        return read_delta_state(r, out, err);
    if (qc_geometry_is(r, " recurrent_gemma ")) {
        QC_TRY(qc_geometry_size(r, &width, "lru_width", g->hidden, err));
        QC_TRY(qc_geometry_size(r, &conv, "conv1d_width", 4, err));
        out->state_elems = qc_sat_mul(width, conv ? conv - 1 : 0);
        out->state_f32_elems = width;
    }
    return QC_OK;
}

/* ---- windows ---- */

/* Reads the window of sliding layers; 0 if there is none. Where the field is missing, a family's
 * default counts; where it is null, it does not. */
static qc_status read_window(const qc_geometry_reader *r, uint64_t *out, qc_error *err)
{
    const char *name =
        qc_geometry_is(r, " recurrent_gemma ") ? "attention_window_size" : "sliding_window";
    const qc_json_node *n = qc_json_get(r->config.text, name);
    *out = 0;
    if (!n) {
        *out = qc_geometry_is(r, " mistral gemma2 gemma3_text ") ? DEFAULT_WINDOW : 0;
        if (qc_geometry_is(r, " recurrent_gemma "))
            *out = 2048;
        return QC_OK;
    }
    if (qc_json_kind_of(n) == QC_JSON_NULL)
        return QC_OK;
    return qc_config_count(out, n, MAX_CONTEXT, 0, err);
}

/* ---- caches ---- */

static void set_window(qc_layer_geometry *l, uint64_t window)
{
    if (window == 0)
        return;
    l->attention = QC_ATTENTION_SLIDING;
    l->window = window;
}

/* How many elements the keys and values of a token have in one layer of attention. */
typedef struct {
    uint64_t full, sliding; /* elements */
} token_elems;

static qc_status read_token_elems(const qc_geometry_reader *r, token_elems *out, qc_error *err)
{
    const qc_geometry *g = r->out;
    uint64_t v = g->head_dim, heads = g->kv_heads, dim = g->head_dim;
    if (qc_geometry_is(r, " mimo_v2_flash "))
        QC_TRY(qc_geometry_size(r, &v, "v_head_dim", g->head_dim, err));
    out->full = out->sliding = g->kv_heads * (g->head_dim + v);
    if (qc_geometry_is(r, " mimo_v2_flash ")) /* layers with a window have twice the heads */
        out->sliding *= 2;
    if (qc_geometry_is(
            r, " reformer xlnet ")) /* hidden states, from which keys and values are made anew */
        out->full = out->sliding = g->hidden;
    if (!qc_geometry_is(r, " gemma4_text gemma4_unified_text "))
        return QC_OK;
    QC_TRY(qc_geometry_size(r, &dim, "global_head_dim", GEMMA4_HEAD, err));
    if (qc_config_flag(&r->config, "attention_k_eq_v", 0))
        QC_TRY(qc_geometry_size(r, &heads, "num_global_key_value_heads", g->kv_heads, err));
    out->full = 2 * heads * dim;
    return QC_OK;
}

/* The last num_kv_shared_layers use what an earlier layer keeps. */
static qc_status drop_shared(const qc_geometry_reader *r, qc_error *err)
{
    qc_geometry *g = r->out;
    uint64_t shared = 0;
    QC_TRY(qc_config_count(&shared, text_field(r, "num_kv_shared_layers"), g->layer_count, 0, err));
    for (uint64_t i = g->layer_count - shared; i < g->layer_count; i++)
        g->layers[i] = (qc_layer_geometry){0};
    return QC_OK;
}

static qc_status set_kinds(const qc_geometry_reader *r, const kind *kinds, qc_error *err)
{
    qc_geometry *g = r->out;
    qc_layer_geometry state = {0};
    token_elems elems = {0};
    uint64_t window = 0, chunk = 0;
    QC_TRY(read_window(r, &window, err));
    QC_TRY(qc_config_read(&chunk, &r->config, "attention_chunk_size", MAX_CONTEXT, 0, err));
    QC_TRY(read_state(r, &state, err));
    QC_TRY(read_token_elems(r, &elems, err));
    for (uint32_t i = 0; i < g->layer_count; i++) {
        qc_layer_geometry *l = &g->layers[i];
        *l = (qc_layer_geometry){0};
        if (kinds[i] == KIND_STATE || kinds[i] == KIND_BOTH)
            *l = state;
        if (kinds[i] == KIND_STATE || kinds[i] == KIND_NONE || g->heads == 0)
            continue;
        l->attention = QC_ATTENTION_FULL;
        l->kv_elems = kinds[i] == KIND_SLIDING ? elems.sliding : elems.full;
        if (kinds[i] == KIND_SLIDING)
            set_window(l, window);
        else if (kinds[i] == KIND_CHUNKED)
            set_window(l, chunk);
    }
    return drop_shared(r, err);
}

/* Handles multi-head latent attention, where the layers that have attention cache the latent. */
static qc_status read_latent(const qc_geometry_reader *r, uint64_t rank, qc_error *err)
{
    qc_geometry *g = r->out;
    uint64_t rope = 0, nope = 0, v = 0, index = 0;
    QC_TRY(qc_geometry_size(r, &rope, "qk_rope_head_dim", 0, err));
    QC_TRY(qc_geometry_size(r, &nope, "qk_nope_head_dim", 0, err));
    QC_TRY(qc_geometry_size(r, &v, "v_head_dim", nope, err));
    if (rope + nope == 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: kv_lora_rank is %" PRIu64
                ", but there are no qk_nope_head_dim and qk_rope_head_dim",
                rank);
    QC_TRY(qc_geometry_size(r, &index, "index_head_dim", 0, err));
    const qc_json_node *indexers = text_field(r, "indexer_types");
    const qc_json_node *indexer =
        indexers && qc_json_kind_of(indexers) == QC_JSON_ARRAY ? qc_json_first(indexers) : NULL;
    g->head_dim = nope + rope;
    /* LongCat-Flash has two attentions in a layer. */
    uint64_t times = qc_geometry_is(r, " longcat_flash ") ? 2 : 1;
    for (uint32_t i = 0; i < g->layer_count; i++) {
        /* Sparse attention also keeps a key for the indexer, unless the layer uses another's. */
        uint64_t own = indexer && strcmp(qc_json_string_or(indexer, ""), "full") != 0 ? 0 : index;
        indexer = indexer ? qc_json_next(indexer) : NULL;
        if (g->layers[i].attention == QC_ATTENTION_NONE)
            continue;
        g->layers[i].attention = QC_ATTENTION_MLA;
        g->layers[i].kv_elems = times * (rank + rope) + own;
        g->layers[i].kv_elems_expanded = times * g->heads * (nope + rope + v) + own;
    }
    return QC_OK;
}

/* Finds the layers that look at an image instead of the text (mllama). */
static qc_status read_image_layers(const qc_geometry_reader *r, qc_error *err)
{
    qc_geometry *g = r->out;
    unsigned char *marks = NULL;
    const qc_json_node *list = qc_config_text_field(&r->config, "cross_attention_layers");
    if (!list)
        return QC_OK;
    QC_TRY(qc_arena_array(r->arena, &marks, g->layer_count, err));
    QC_TRY(qc_config_mark_layers(marks, g->layer_count, list, err));
    for (uint32_t i = 0; i < g->layer_count; i++) {
        if (marks[i])
            g->layers[i].attention = QC_ATTENTION_CROSS;
    }
    return QC_OK;
}

/* The decoder of an encoder-decoder also keeps keys and values of the source. */
static void add_source(qc_geometry *g)
{
    for (uint32_t i = 0; g->encoder_decoder && i < g->layer_count; i++)
        g->layers[i].source_elems = 2 * g->kv_heads * g->head_dim;
}

qc_status qc_geometry_read_layers(qc_geometry_reader *r, qc_error *err)
{
    qc_geometry *g = r->out;
    uint64_t rank = 0;
    if (g->layer_count == 0)
        return QC_OK;
    QC_TRY(qc_arena_array(r->arena, &g->layers, g->layer_count, err));
    if (!g->decoder)
        return QC_OK;
    kind *kinds = NULL;
    QC_TRY(qc_arena_array(r->arena, &kinds, g->layer_count, err)); /* KIND_FULL */
    QC_TRY(read_kinds(r, kinds, err));
    QC_TRY(set_kinds(r, kinds, err));
    add_source(g);
    QC_TRY(qc_geometry_size(r, &rank, "kv_lora_rank", 0, err));
    if (rank != 0)
        return read_latent(r, rank, err);
    return read_image_layers(r, err);
}
