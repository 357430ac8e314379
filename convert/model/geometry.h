/* What config.json says about how a model computes: its layers, its attention, and the cache that
 * it keeps.
 *
 * Sizes of weights never come from here, because the tensors have them. What the tensors cannot
 * tell comes from here: the KV cache and the workspace. Known model types are read field by field.
 * For others the usual names are tried (num_hidden_layers, n_layer, ...) and `guessed` is set.
 * docs/theory/config.md has the facts, field by field and family by family. */
#ifndef QC_CONVERT_GEOMETRY_H
#define QC_CONVERT_GEOMETRY_H

#include "formats/checkpoint.h"

typedef enum {
    QC_ATTENTION_NONE,    /* an encoder, or a layer without a cache */
    QC_ATTENTION_FULL,    /* MHA, GQA, MQA: 2 * kv_heads * head_dim elements a token */
    QC_ATTENTION_SLIDING, /* as FULL, but only for the last `window` tokens */
    QC_ATTENTION_MLA,     /* kv_lora_rank + qk_rope_head_dim elements a token */
    QC_ATTENTION_CROSS    /* 2 * kv_heads * head_dim elements a media position, none a token */
} qc_attention;

typedef struct {
    qc_attention attention;
    uint64_t kv_elems;          /* cached per token of one sequence (CROSS: per media position) */
    uint64_t kv_elems_expanded; /* MLA without absorption: heads * (qk head dim + v head dim) */
    uint64_t window;            /* SLIDING: the most tokens that are cached */
    /* What does not grow with the text, whatever the attention is: the state of a recurrent layer,
     * in 16 bit (or as wide as the cache, if that is wider) and in single precision. */
    uint64_t state_elems, state_f32_elems;
    uint64_t source_elems; /* in a decoder beside an encoder: cached per position of the source */
} qc_layer_geometry;

typedef struct {
    const char *model_type; /* "" if config.json has none */
    int guessed;            /* the type is not one that is known field by field */
    int cache_unknown;      /* its cache is not known: no config.json, or no layers in it */
    int decoder;            /* generates text, so has a KV cache */
    int encoder_decoder;    /* its layers also look at what an encoder made of a source */
    /* The positions of the source. 0 means that there is one for each token of a text, which is
     * then taken to be as long as the context. */
    uint64_t source_positions;
    uint32_t layer_count;
    qc_layer_geometry *layers;
    uint64_t hidden, intermediate; /* intermediate: the widest MLP a token passes, all of its
                                      experts taken together */
    uint64_t heads, kv_heads, head_dim;
    uint64_t vocab;
    uint64_t max_context;                /* max_position_embeddings; 0 unknown */
    uint64_t media_positions;            /* positions that one image has in cross-attention */
    uint64_t experts, experts_per_token; /* 0 for a dense model */
    uint64_t vision_hidden;
    qc_dtype dtype; /* torch_dtype or dtype; QC_DTYPE_COUNT if there is none */
} qc_geometry;

/* Reads the geometry. config may be NULL (for a lone .safetensors file); then all is zero but
 * cache_unknown. layer_count is also 0 where config.json has no number of layers. QC_ERR_INPUT
 * names a field whose value cannot be (a negative count, more than 10,000 layers, no heads where
 * there are layers). All memory comes from the arena, and nothing is borrowed from config.
 * Thread-safe. */
QC_NODISCARD qc_status qc_geometry_read(qc_geometry *out, qc_arena *arena, const qc_json *config,
                                        qc_error *err);

typedef struct {
    uint64_t context; /* tokens of one sequence */
    uint64_t batch;
    uint64_t images;  /* per sequence */
    unsigned kv_bits; /* bits of a cached element: 4, 8, 16 or 32 */
    int mla_expanded;
} qc_kv_use;

/* Returns the bytes of the cache of one layer for the whole use, including states and source. It
 * saturates at UINT64_MAX. */
uint64_t qc_layer_kv_bytes(const qc_geometry *g, uint32_t layer, const qc_kv_use *use);
/* Returns the bytes of all layers for one token of one sequence before any window is full, without
 * media and states. Where the source is a text, one more token of it is counted too. */
uint64_t qc_kv_bytes_per_token(const qc_geometry *g, const qc_kv_use *use);

#endif
