/* A low-rank adapter as peft saves it: a folder with adapter_config.json and
 * adapter_model.safetensors. Opening reads the configuration and the names and shapes of the
 * tensors, and finds everything that is wrong with them by themselves.
 * Source: peft 0.21, tuners/lora/config.py, utils/save_and_load.py.
 *
 * A tensor M.lora_A.weight [rank, in] and M.lora_B.weight [out, rank] change the weight W [out, in]
 * of module M to W + scaling * B * A. Of an embedding [rows, columns] these are M.lora_embedding_A
 * [rank, rows] and M.lora_embedding_B [columns, rank], and the product is transposed. All names
 * begin with "base_model.model.", which is left out here. Tensors without lora_ in their name (of
 * modules_to_save, and trained biases) take the place of the model's. In the state of a whole
 * PeftModel the names hold the adapter's own ("M.lora_A.default.weight"), which is left out, too.
 *
 * Thread-safe for reading. */
#ifndef QC_FORMATS_ADAPTER_H
#define QC_FORMATS_ADAPTER_H

#include "formats/checkpoint.h"

#define QC_ADAPTER_CONFIG_NAME "adapter_config.json"
#define QC_ADAPTER_NO_TENSOR   UINT32_MAX

/* The change of one module's weight, and of its bias. */
typedef struct {
    const char *module; /* "model.layers.0.self_attn.q_proj" */
    int embedding;
    uint32_t a, b;      /* indices into weights->tensors */
    uint32_t magnitude; /* DoRA: the lengths of the rows of the merged weight; or NO_TENSOR */
    uint32_t bias;      /* lora_B.bias, or NO_TENSOR */
    uint64_t rank;
    double scaling; /* alpha / rank, or alpha / sqrt(rank) */
} qc_adapter_module;

/* A tensor that takes the place of the model's. */
typedef struct {
    const char *name; /* in the model */
    uint32_t tensor;  /* index into weights->tensors */
    int saved;        /* of modules_to_save: peft keeps it beside the model's own until it merges */
} qc_adapter_whole;

typedef struct {
    qc_arena arena;
    const char *path;                        /* as given */
    const char *name;                        /* the last part of the path */
    qc_checkpoint *weights;                  /* one file */
    qc_digest config_digest, weights_digest; /* digests of the two files */
    int fan_in_fan_out;                      /* weights are stored [in, out] (Conv1D of GPT-2) */
    int keeps_tied;      /* ensure_weight_tying: embeddings and head were trained as one */
    const char *unknown; /* members of adapter_config.json that peft does not know; "" for none */
    qc_adapter_module *modules; /* sorted by module */
    size_t module_count;
    qc_adapter_whole *wholes; /* sorted by name */
    size_t whole_count;
} qc_adapter;

/* QC_ERR_UNSUPPORTED for kinds of adapters that are not a sum of a weight and a product; messages
 * begin with the path. */
QC_NODISCARD qc_status qc_adapter_open(qc_adapter **out, const char *path, qc_error *err);
void qc_adapter_close(qc_adapter *a); /* NULL is fine */
/* Returns the name of a tensor as the adapter's file has it. */
const char *qc_adapter_tensor_name(const qc_adapter *a, uint32_t tensor);
/* Makes c a model whose output head and embeddings are two tensors: its configuration says so, and
 * unless head is NULL, a tensor of this name has the values of tensor `table`. Tensors move, so it
 * is for a checkpoint that nobody else uses yet. */
QC_NODISCARD qc_status qc_checkpoint_untie(qc_checkpoint *c, uint32_t table, const char *head,
                                           qc_error *err);

#endif
