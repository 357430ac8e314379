/* What config.json says about the experts of a mixture: which layers have them, how many there are
 * and of what size, and how tokens are routed to them. Fields are read as transformers 4 and 5 read
 * them, with their defaults. */
#ifndef QC_CONVERT_FAMILY_EXPERTS_SHAPE_H
#define QC_CONVERT_FAMILY_EXPERTS_SHAPE_H

#include "base/arena.h"
#include "formats/json_strict.h"

/* Which experts a token goes to, and how much each of them counts. A router gives every token a
 * logit for each expert (Shazeer et al. 2017). Mixtures differ in five things, all of which are in
 * qc_routing:
 *
 *   scores     softmax of all logits; sigmoid of each (DeepSeek-V3); or, chosen by the logits
 *              themselves, softmax of those that were chosen (gpt-oss)
 *   choice     by the score, plus a correction of each expert where there is one (DeepSeek-V3)
 *   groups     only experts of the best groups can be chosen; a group counts as its best expert
 *              (DeepSeek-V2) or as the sum of its two best (DeepSeek-V3)
 *   weights    the chosen scores, without the correction; divided by their sum or not
 *   scale      what the weights are multiplied by
 */
typedef enum { QC_SCORES_SOFTMAX, QC_SCORES_SIGMOID, QC_SCORES_OF_CHOSEN } qc_expert_scores;
typedef enum { QC_GROUP_BY_BEST, QC_GROUP_BY_TWO } qc_expert_group_rule;

typedef struct {
    qc_expert_scores scores;
    qc_expert_group_rule group_rule;
    uint64_t experts, chosen;       /* chosen: of each token, 1 to experts */
    uint64_t groups, groups_chosen; /* equal groups of neighbours; 1 and 1: no groups */
    int normalized;                 /* weights are divided by their sum */
    float guard;                    /* which is added to the sum before */
    float scale;
} qc_routing;

/* How tensors are called in a released checkpoint, behind "model.layers.N.". */
typedef struct {
    const char *router;     /* "mlp.gate" */
    const char *correction; /* "mlp.gate.e_score_correction_bias"; NULL: there is none */
    const char *experts;    /* "mlp.experts": then come ".N." and a matrix */
    const char *gate, *up, *down;
    const char *shared;      /* "mlp.shared_expert"; NULL: there is none */
    const char *shared_gate; /* "mlp.shared_expert_gate"; NULL: the shared expert always counts 1 */
} qc_experts_names;

typedef struct {
    const qc_experts_names *names; /* NULL: the model is no mixture, and nothing else is set */
    qc_routing routing;
    uint64_t inner;        /* the intermediate size of an expert */
    uint64_t shared;       /* of all shared experts together; 0: there are none */
    unsigned char *sparse; /* [layers]: 1 where a layer has experts, 0 where it is dense */
    /* gpt-oss: the experts of a layer are stacked, gate and up are interleaved, all have biases,
     * and gates are clamped: (min(g, limit) * sigmoid(alpha g)) * (clip(u, limit) + 1). */
    int clamped;
    float limit, alpha;
} qc_experts_shape;

/* root: of config.json. The array lives in the arena. A type that is no mixture gives zeros.
 * Messages start with "config.json". */
QC_NODISCARD qc_status qc_experts_shape_read(qc_experts_shape *out, qc_arena *arena,
                                             const qc_json_node *root, uint64_t layers,
                                             qc_error *err);
/* Does this layer have experts? */
int qc_experts_in(const qc_experts_shape *s, uint64_t layer);

#endif
