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
 *
 * Everything is computed in float. Of equal scores the lowest expert comes first. */
#ifndef QC_CONVERT_FORWARD_EXPERTS_ROUTE_H
#define QC_CONVERT_FORWARD_EXPERTS_ROUTE_H

#include "quant/decoder_ops.h"

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

/* The floats that qc_route_token needs to work with. */
uint64_t qc_route_room(const qc_routing *r);
/* Routes one token. logits [experts] are finite; correction [experts] or NULL. chosen [r->chosen]
 * and weights [r->chosen] are in falling order of what decided. The bits do not depend on the
 * instruction set. Thread-safe: yes. Allocates: no. */
void qc_route_token(const qc_routing *r, const qc_decoder_ops *ops, const float *logits,
                    const float *correction, float *room, uint32_t *chosen, float *weights);

#endif
