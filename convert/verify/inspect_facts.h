/* What `qconv inspect` knows about a checkpoint, before it is put into words. */
#ifndef QC_CONVERT_INSPECT_FACTS_H
#define QC_CONVERT_INSPECT_FACTS_H

#include "base/strbuf.h"
#include "convert/model/recipe_stored.h"
#include "convert/plan/engines.h"
#include "formats/checkpoint.h"
#include "formats/manifest.h"

#define QC_FACTS_SCHEMES 32u

typedef struct {
    const char *role;   /* as qc_role_name; NULL when the recipe could not tell */
    const char *scheme; /* "nf4", "fp4", "int8", "w4a16", ..., "gptq", "mxfp4"; NULL: none */
    /* Set for weights that a scheme of qconv's makes, those of bitsandbytes and compressed-tensors;
     * else NULL. */
    const qc_stored_weight *stored;
    const qc_coded_weight *coded; /* set for what is decoded as coded, integers too; else NULL */
    int is_packed;                /* coded as integers with scales */
    uint64_t block_elems;         /* weights that share a scale; 0: each row has one, or none has */
    int is_state;                 /* scales and the like, which are no weights by themselves */
    int is_counted;               /* its elements are weights of the model */
    uint32_t owner;               /* the weight that state goes with, or QC_NO_TENSOR */
    unsigned ndim;                /* logical shape */
    uint64_t dims[QC_MAX_DIMS];
    uint64_t elems;                    /* elements of the logical shape */
    uint64_t bytes;                    /* including the state tensors that it owns */
    const qc_manifest_tensor *written; /* its entry in the manifest, or NULL */
} qc_tensor_facts;

/* A sum over tensors that have something in common. */
typedef struct {
    const char *name;
    uint64_t tensors;
    uint64_t weights;
    uint64_t bytes;
} qc_facts_sum;

typedef struct {
    qc_arena *arena; /* borrowed */
    qc_checkpoint *model;
    const char *model_type; /* NULL: none */
    int known_type;
    const char *recipe_trouble; /* why there are no roles, or NULL */
    qc_tensor_facts *tensors;   /* one per checkpoint tensor, same order */
    uint32_t *order;            /* tensor indices in natural order of names */
    qc_manifest *manifest;      /* a qconv output's, else NULL */
    const char *manifest_trouble;
    qc_facts_sum by_dtype[QC_DTYPE_COUNT];
    qc_facts_sum by_scheme[QC_FACTS_SCHEMES]; /* the last one stands for all that have no place */
    unsigned scheme_count;
    uint64_t weights;   /* parameters */
    uint64_t uncounted; /* integer tensors that are neither weights nor state */
    uint64_t state_count;
    uint64_t file_bytes; /* size of all weight files on disk */
    unsigned asked;      /* a bit for each engine that qc_facts_ask_engines asked */
    qc_refusals refused; /* refusals of these engines */
} qc_facts;

/* Opens the checkpoint at path and gathers the facts. The caller closes facts->model (NULL after an
 * error). */
QC_NODISCARD qc_status qc_facts_gather(qc_facts *facts, qc_arena *arena, const char *path,
                                       qc_error *err);
/* Asks engines (bit e for engine e) whether they load the checkpoint. */
QC_NODISCARD qc_status qc_facts_ask_engines(qc_facts *f, unsigned engines, qc_error *err);
/* Returns the bits per weight; weights > 0. */
double qc_facts_bits(uint64_t bytes, uint64_t weights);
/* Writes the answer of `qconv inspect --json`, one JSON object and a new line. (inspect_json.c) */
QC_NODISCARD qc_status qc_inspect_json(const qc_facts *f, qc_strbuf *out, qc_error *err);

#endif
