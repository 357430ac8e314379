/* The linear layers of a Llama-like decoder layer, and the places in it where their inputs are. */
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
    QC_LLAMA_AT_QKV,  /* from hidden before the layer */
    QC_LLAMA_AT_O,    /* from hidden before the layer */
    QC_LLAMA_AT_GATE, /* from inputs of o and hidden before the layer, which is then the one behind
                         attention: of gate and up */
    QC_LLAMA_AT_DOWN, /* from hidden behind attention */
    QC_LLAMA_AT_END   /* from hidden behind attention, which is then the one behind the layer */
} qc_llama_stage;

#endif
