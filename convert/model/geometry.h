/* What config.json says about how a model computes: layers, attention, the cache it keeps.
 *
 * Sizes of weights never come from here (the tensors have them); what the tensors cannot tell does:
 * the KV cache and the workspace. Known model types are read field by field; for others the usual
 * names are tried (num_hidden_layers, n_layer, ...) and `guessed` is set.
 * Facts, field by field and family by family: docs/theory/config.md. */
#ifndef QC_CONVERT_GEOMETRY_H
#define QC_CONVERT_GEOMETRY_H

#include "formats/checkpoint.h"

typedef enum {
    QC_ATTENTION_NONE,    /* an encoder, or a layer without a cache */
    QC_ATTENTION_FULL,    /* MHA, GQA, MQA: 2 * kv_heads * head_dim elements a token */
    QC_ATTENTION_SLIDING, /* the same for the last `window` tokens only */
    QC_ATTENTION_MLA,     /* kv_lora_rank + qk_rope_head_dim elements a token */
    QC_ATTENTION_CROSS    /* 2 * kv_heads * head_dim elements a media position, none a token */
} qc_attention;

typedef struct {
    qc_attention attention;
    uint64_t kv_elems;          /* cached per token (CROSS: per media position) of one sequence */
    uint64_t kv_elems_expanded; /* MLA without absorption: heads * (qk head dim + v head dim) */
    uint64_t window;            /* SLIDING: tokens at most */
    /* What does not grow with the text, whatever the attention: the state of a recurrent layer, in
     * 16 bit (or as wide as the cache, where that is wider) and in single precision. */
    uint64_t state_elems, state_f32_elems;
    uint64_t source_elems; /* of a decoder beside an encoder: per position of the source */
} qc_layer_geometry;

typedef struct {
    const char *model_type; /* "" if config.json has none */
    int guessed;            /* not a type that is known field by field */
    int cache_unknown;   /* there is nothing to tell its cache by: no config.json, or no layers in
                            it */
    int decoder;         /* generates text: has a KV cache */
    int encoder_decoder; /* its layers also look at what an encoder made of a source */
    /* Positions of the source; 0 where they are as many as the tokens of a text, which is then
     * taken to be as long as the context. */
    uint64_t source_positions;
    uint32_t layer_count;
    qc_layer_geometry *layers;
    uint64_t hidden, intermediate; /* intermediate: the widest MLP a token passes, all of its
                                      experts taken together */
    uint64_t heads, kv_heads, head_dim;
    uint64_t vocab;
    uint64_t max_context;                /* max_position_embeddings; 0 unknown */
    uint64_t media_positions;            /* cross-attention positions of one image */
    uint64_t experts, experts_per_token; /* 0 for a dense model */
    uint64_t vision_hidden, vision_layers;
    qc_dtype dtype; /* torch_dtype or dtype; QC_DTYPE_COUNT if not said */
} qc_geometry;

/* config may be NULL (a lone .safetensors file): all zero but cache_unknown, then; layer_count is 0
 * too where config.json has no number of layers. QC_ERR_INPUT for a field with a value that cannot
 * be (a negative count, more than 10,000 layers, no heads where there are layers), naming it. All
 * memory in the arena; nothing is borrowed from config. Thread-safe. */
QC_NODISCARD qc_status qc_geometry_read(qc_geometry *out, qc_arena *arena, const qc_json *config,
                                        qc_error *err);

typedef struct {
    uint64_t context; /* tokens of one sequence */
    uint64_t batch;
    uint64_t images;  /* per sequence */
    unsigned kv_bits; /* per cached element: 4, 8, 16, 32 */
    int mla_expanded;
} qc_kv_use;

/* Bytes of the cache of one layer for the whole use, states and source included. Saturates at
 * UINT64_MAX. */
uint64_t qc_layer_kv_bytes(const qc_geometry *g, uint32_t layer, const qc_kv_use *use);
/* Of one more token of one sequence after use->context: 0 once the window is full. */
uint64_t qc_layer_kv_bytes_next(const qc_geometry *g, uint32_t layer, const qc_kv_use *use);
/* All layers: per token of one sequence before any window is full; neither media nor states. Where
 * the source is a text, one more token of it is counted too. */
uint64_t qc_kv_bytes_per_token(const qc_geometry *g, const qc_kv_use *use);

#endif
