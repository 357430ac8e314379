/* Finds out what each layer keeps from one token to the next.
 *
 *   kinds    attention in full, with a window, a state of fixed size, both, or nothing: a list in
 *            config.json where there is one, else the rule of the type's row
 *   caches   keys and values per token, or the latent of MLA
 *   states   what a recurrent layer keeps instead: it does not grow
 *   cross    keys and values of the source, in the decoder of an encoder-decoder
 *
 * The rows are in convert/families/type_table.c. tests/interop/test_interop_caches.py compares all
 * of this with what transformers keeps. */
#include "convert/model/geometry_internal.h"

#include "base/checked.h"
#include "convert/families/shape_text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define NAME_SHOWN_BYTES 80
#define MAX_CONTEXT      QC_GEOMETRY_MAX_CONTEXT

typedef qc_layer_kind kind;

static const qc_json_node *text_field(const qc_geometry_reader *r, const char *names)
{
    return qc_config_field(r->config.text, names);
}

static int is_list(const qc_json_node *n)
{
    return n && qc_json_kind_of(n) == QC_JSON_ARRAY;
}

/* ---- kinds ---- */

static kind kind_of_word(const char *word)
{
    static const struct {
        const char *words;
        kind kind;
    } rows[] = {
        {" sliding_attention ", QC_LAYER_SLIDING},
        {" chunked_attention ", QC_LAYER_CHUNKED},
        {" linear_attention mamba mamba2 conv recurrent M kda ", QC_LAYER_STATE},
        {" hybrid ", QC_LAYER_BOTH},
        {" moe mlp - E ", QC_LAYER_NONE},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (qc_config_word_in(word, rows[i].words))
            return rows[i].kind;
    }
    return QC_LAYER_FULL; /* "full_attention", "attention", "*" and what is not known */
}

/* Reads a list of words, one per layer. */
static qc_status read_list(const qc_geometry_reader *r, kind *kinds, const qc_json_node *list,
                           qc_error *err)
{
    const char *name = qc_json_key(list);
    uint32_t i = 0, count = r->out->layer_count;
    if (!is_list(list))
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
        kinds[i++] = kind_of_word(word);
    }
    if (i != count)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: %s has %" PRIu32 " entries, but there are %" PRIu32 " layers", name,
                i, count);
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
        kinds[i] = kind_of_word((char[]){text[i], '\0'});
    return QC_OK;
}

/* Sets the layers by the row of the type, where config.json has no list of kinds. */
static qc_status read_rule(const qc_geometry_reader *r, kind *kinds, qc_shape_facts *facts,
                           qc_error *err)
{
    const qc_cache_row *row = r->row;
    const uint32_t count = r->out->layer_count;
    const qc_json_node *list = row->list ? text_field(r, row->list) : NULL;
    unsigned char *marks = NULL;
    if (row->list && !list)
        list = qc_config_field(text_field(r, "linear_attn_config"), row->list);
    if (row->needs_list && !list)
        row = qc_cache_row_usual();
    if (row->out == QC_LAYER_SLIDING &&
        (r->out->guessed || !qc_config_flag(&r->config, "use_sliding_window", 1)))
        return QC_OK;
    QC_TRY(qc_arena_array(r->arena, &marks, count, err));
    if (is_list(list))
        QC_TRY(qc_config_mark_layers(marks, count, list, row->list_first, err));
    for (uint32_t i = 0; i < count; i++) {
        uint64_t in = marks[i];
        facts->layer = i;
        QC_TRY(qc_shape_when(&in, row->when, in, facts, err));
        kinds[i] = in ? row->in : row->out;
    }
    /* RecurrentGemma's block_types is a pattern that is repeated. */
    list = qc_geometry_is(r, " recurrent_gemma ") ? text_field(r, "block_types") : NULL;
    const qc_json_node *n = NULL;
    for (uint32_t i = 0; is_list(list) && qc_json_first(list) && i < count; i++) {
        const char *word = NULL;
        n = n ? qc_json_next(n) : NULL;
        n = n ? n : qc_json_first(list);
        QC_TRY(qc_json_as_string(n, "config.json: an entry of block_types", &word, err));
        kinds[i] = strcmp(word, "attention") == 0 ? row->in : row->out;
    }
    return QC_OK;
}

static qc_status read_kinds(const qc_geometry_reader *r, kind *kinds, qc_shape_facts *facts,
                            qc_error *err)
{
    const qc_json_node *list = text_field(r, "layer_types layers_block_type");
    const qc_json_node *letters = text_field(r, "hybrid_override_pattern");
    if (list)
        return read_list(r, kinds, list, err);
    if (letters)
        return read_letters(r, kinds, letters, err);
    return read_rule(r, kinds, facts, err);
}

/* ---- caches ---- */

/* Reads the window of sliding layers; 0 if there is none. Where the field is missing, the type's
 * default counts; where it is null, it does not. */
static qc_status read_window(const qc_geometry_reader *r, uint64_t *out, qc_error *err)
{
    const char *name = r->row->window ? r->row->window : qc_cache_row_usual()->window;
    const qc_json_node *n = qc_json_get(r->config.text, name);
    *out = n ? 0 : r->row->missing_window;
    return !n || qc_json_kind_of(n) == QC_JSON_NULL ? QC_OK
                                                    : qc_config_count(out, n, MAX_CONTEXT, 0, err);
}

static void set_window(qc_layer_geometry *l, uint64_t window)
{
    if (window == 0)
        return;
    l->attention = QC_ATTENTION_SLIDING;
    l->window = window;
}

/* Finds what a layer keeps whose sizes differ from those of the others, as transformers 5 saves
 * them. What has no row here then has the sizes of config.json, and no others. */
static qc_status read_own_layer(const qc_geometry_reader *r, uint32_t layer,
                                const qc_shape_facts *facts, uint64_t *elems, qc_error *err)
{
    char index[16];
    qc_shape_facts own = *facts;
    const qc_json_node *layers = text_field(r, "per_layer_config");
    if (r->row->sliding || !layers || qc_json_kind_of(layers) != QC_JSON_OBJECT)
        return QC_OK;
    (void)snprintf(index, sizeof index, "%" PRIu32, layer);
    const qc_json_node *at = qc_json_get(layers, index);
    QC_TRY(qc_config_count(&own.head_dim, qc_json_get(at, "head_dim"), QC_CONFIG_MAX_SIZE,
                           own.head_dim, err));
    QC_TRY(qc_config_count(&own.kv_heads, qc_json_get(at, "num_key_value_heads"),
                           QC_CONFIG_MAX_SIZE, own.kv_heads, err));
    return qc_shape_when(elems, qc_cache_row_usual()->full, 0, &own, err);
}

static qc_status set_kinds(const qc_geometry_reader *r, const kind *kinds,
                           const qc_shape_facts *facts, qc_error *err)
{
    const qc_cache_row *row = r->row, *usual = qc_cache_row_usual();
    const qc_cache_row *states = row->state ? row : usual;
    qc_geometry *g = r->out;
    qc_layer_geometry state = {0};
    uint64_t window = 0, chunk = 0, full = 0, sliding = 0, shared = 0;
    QC_TRY(read_window(r, &window, err));
    QC_TRY(qc_config_read(&chunk, &r->config, "attention_chunk_size", MAX_CONTEXT, 0, err));
    QC_TRY(qc_shape_when(&state.state_elems, states->state, 0, facts, err));
    QC_TRY(qc_shape_when(&state.state_f32_elems, states->f32_state, 0, facts, err));
    QC_TRY(qc_shape_when(&full, row->full ? row->full : usual->full, 0, facts, err));
    QC_TRY(qc_shape_when(&sliding, row->sliding ? row->sliding : usual->sliding, 0, facts, err));
    /* The last num_kv_shared_layers use what an earlier layer keeps. */
    QC_TRY(qc_config_count(&shared, text_field(r, "num_kv_shared_layers"), g->layer_count, 0, err));
    for (uint32_t i = 0; i < g->layer_count; i++) {
        qc_layer_geometry *l = &g->layers[i];
        *l = (qc_layer_geometry){0};
        if (i >= g->layer_count - shared)
            continue;
        if (kinds[i] == QC_LAYER_STATE || kinds[i] == QC_LAYER_BOTH)
            *l = state;
        if (kinds[i] == QC_LAYER_STATE || kinds[i] == QC_LAYER_NONE || g->heads == 0)
            continue;
        l->attention = QC_ATTENTION_FULL;
        l->kv_elems = kinds[i] == QC_LAYER_SLIDING ? sliding : full;
        QC_TRY(read_own_layer(r, i, facts, &l->kv_elems, err));
        if (kinds[i] == QC_LAYER_SLIDING)
            set_window(l, window);
        else if (kinds[i] == QC_LAYER_CHUNKED)
            set_window(l, chunk);
    }
    return QC_OK;
}

/* Handles multi-head latent attention, where the layers that have attention cache the latent. */
static qc_status read_latent(const qc_geometry_reader *r, uint64_t rank, qc_error *err)
{
    qc_geometry *g = r->out;
    uint64_t rope = 0, nope = 0, v = 0, index = 0;
    QC_TRY(qc_config_size(&rope, &r->config, "qk_rope_head_dim", 0, err));
    QC_TRY(qc_config_size(&nope, &r->config, "qk_nope_head_dim", 0, err));
    QC_TRY(qc_config_size(&v, &r->config, "v_head_dim", nope, err));
    if (rope + nope == 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: kv_lora_rank is %" PRIu64
                ", but there are no qk_nope_head_dim and qk_rope_head_dim",
                rank);
    QC_TRY(qc_config_size(&index, &r->config, "index_head_dim", 0, err));
    const qc_json_node *indexers = text_field(r, "indexer_types");
    const qc_json_node *indexer = is_list(indexers) ? qc_json_first(indexers) : NULL;
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
    QC_TRY(qc_config_mark_layers(marks, g->layer_count, list, 0, err));
    for (uint32_t i = 0; i < g->layer_count; i++) {
        if (marks[i])
            g->layers[i].attention = QC_ATTENTION_CROSS;
    }
    return QC_OK;
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
    qc_shape_facts facts = {.config = &r->config,
                            .hidden = g->hidden,
                            .heads = g->heads,
                            .kv_heads = g->kv_heads,
                            .head_dim = g->head_dim};
    QC_TRY(qc_arena_array(r->arena, &kinds, g->layer_count, err)); /* QC_LAYER_FULL */
    QC_TRY(read_kinds(r, kinds, &facts, err));
    QC_TRY(set_kinds(r, kinds, &facts, err));
    /* The decoder of an encoder-decoder also keeps keys and values of the source. */
    for (uint32_t i = 0; g->encoder_decoder && i < g->layer_count; i++)
        g->layers[i].source_elems = 2 * g->kv_heads * g->head_dim;
    QC_TRY(qc_config_size(&rank, &r->config, "kv_lora_rank", 0, err));
    if (rank != 0)
        return read_latent(r, rank, err);
    return read_image_layers(r, err);
}
