/* What the engines that serve or train a model can load: one table of engines, and one of what each
 * of them refuses. --for asks it about a plan or about a finished output. docs/interop.md says the
 * same for people, with what was run. */
#ifndef QC_CONVERT_ENGINES_H
#define QC_CONVERT_ENGINES_H

#include "convert/plan/loaders.h"

typedef enum {
    QC_ENGINE_TRANSFORMERS,
    QC_ENGINE_VLLM,
    QC_ENGINE_LOAD,   /* qconv.load in Python */
    QC_ENGINE_PLUGIN, /* vLLM with the plug-in of qconv's Python package */
    QC_ENGINES
} qc_engine;
/* As --for has them, and the bits that they stand for. */
#define QC_ENGINE_NAMES "transformers", "vllm", "qconv", "vllm-qconv", "all"
#define QC_ENGINE_BITS  1, 2, 4, 8, QC_ENGINES_ALL
#define QC_ENGINES_ALL  ((1u << QC_ENGINES) - 1)
#define QC_ENGINES_OURS (1u << QC_ENGINE_LOAD | 1u << QC_ENGINE_PLUGIN)

typedef struct {
    const char *name;     /* as --for has it */
    const char *versions; /* "vLLM 0.32.0 (vllm-bnb-plugin 0.0.3)" */
} qc_engine_row;

/* Indexed by qc_engine. */
extern const qc_engine_row qc_engine_rows[QC_ENGINES];

/* Integers of compressed-tensors as an engine finds them. */
typedef struct {
    unsigned bits; /* of a code; 0: the weight is none of these */
    int packed;    /* in words, "pack-quantized" */
    int one_scale, zero_points, act_order;
    int gaps;                 /* between codes, or behind those of a row */
    unsigned activation_bits; /* 16: they are not quantized */
    int static_activations, float_activations;
} qc_served_integers;

/* One weight as an engine finds it. */
typedef struct {
    int is_weight;        /* 0: a scale or the like */
    int is_stack;         /* of experts, in one tensor */
    const char *name;     /* once it is decoded */
    qc_scheme scheme;     /* KEEP: it is not quantized, or it is integers that no scheme makes */
    uint64_t block_elems; /* 0: each row has a scale */
    uint64_t elems;
    qc_served_integers integers;
} qc_served_weight;

/* An output, planned or finished. */
typedef struct {
    qc_arena *arena;
    const qc_checkpoint *model;      /* has the names of the weights */
    const qc_served_weight *weights; /* one for each tensor of the model */
    const char *foreign;    /* "fp8", "gptq", ...: what some weights are that stay so, or NULL */
    const char *awq;        /* a weight in AWQ's form, or NULL */
    const char *own_form;   /* as in qc_plan */
    const char *instead;    /* options that make a form which others load */
    const char *model_type; /* of config.json, or "" */
    const char *rest;       /* as in qc_loaders */
    const char *lacks;      /* as qc_loaders_lack says it */
    int compressed;
    int no_manifest; /* there is no qconv.json, and none will be written */
    uint32_t ranks;  /* the cards of --tp; 0: layers are placed whole */
    /* A finished output's llm_int8_skip_modules, or NULL: those of a plan are complete. */
    const qc_json_node *skipped;
    int finished;
} qc_served;

typedef struct {
    qc_engine engine;
    const char *sentence; /* without a full stop; it names the option that helps */
} qc_refusal;

typedef struct {
    qc_refusal *list;
    unsigned count;
} qc_refusals;

/* Sets what integers of compressed-tensors that are there already are to an engine. Returns 0 where
 * the weight is in another coding. */
int qc_served_set_integers(qc_served_weight *out, const qc_coded_weight *coded);
/* Finds who loads the output of a plan, fills in *l, and warns where not everybody does. Then it
 * asks the engines of --for (bit e for engine e): QC_ERR_USAGE with the first refusal, after a
 * warning for each of the others. ranks: the cards of --tp, or 0. compressed: will the shards be
 * .zst files? */
QC_NODISCARD qc_status qc_engines_settle(qc_loaders *l, const qc_plan *plan, unsigned engines,
                                         uint32_t ranks, int compressed, const qc_call *call,
                                         qc_error *err);
/* Lists what the engines (bit e for engine e) refuse. Nothing: they load it. QC_ERR_UNSUPPORTED
 * where weights are in a form that another tool packed and no row speaks of. */
QC_NODISCARD qc_status qc_engines_check(qc_refusals *out, const qc_served *s, unsigned engines,
                                        qc_error *err);

#endif
