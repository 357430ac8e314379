/* The linear layers of a Llama-like decoder layer, and the points in it at which their inputs
 * are. */
#ifndef QC_CONVERT_LLAMA_STAGE_H
#define QC_CONVERT_LLAMA_STAGE_H

typedef enum {
    QC_LLAMA_Q,
    QC_LLAMA_K,
    QC_LLAMA_V,
    QC_LLAMA_O,
    QC_LLAMA_GATE,
    QC_LLAMA_UP,
    QC_LLAMA_DOWN,
    QC_LLAMA_MATRICES
} qc_llama_part;

typedef enum {
    QC_LLAMA_AT_QKV, /* computed from the hidden states before the layer */
    QC_LLAMA_AT_O,   /* computed from the hidden states before the layer */
    /* The inputs of gate and up. They are computed from the inputs of o and from the hidden states
     * before the layer, which then become those behind attention. */
    QC_LLAMA_AT_GATE,
    QC_LLAMA_AT_DOWN, /* computed from the hidden states behind attention */
    /* The end of the layer. The hidden states behind attention become those behind the layer. */
    QC_LLAMA_AT_END
} qc_llama_stage;

#endif
