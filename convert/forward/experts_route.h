/* Routes tokens to experts, as experts_shape.h says. Everything is computed in float. Of equal
 * scores the lowest expert comes first. */
#ifndef QC_CONVERT_FORWARD_EXPERTS_ROUTE_H
#define QC_CONVERT_FORWARD_EXPERTS_ROUTE_H

#include "convert/family/experts_shape.h"
#include "quant/decoder_ops.h"

/* The floats that qc_route_token needs to work with. */
uint64_t qc_route_room(const qc_routing *r);
/* Routes one token. logits [experts] are finite; correction [experts] or NULL. chosen [r->chosen]
 * and weights [r->chosen] are in falling order of what decided. The bits do not depend on the
 * instruction set. Thread-safe: yes. Allocates: no. */
void qc_route_token(const qc_routing *r, const qc_decoder_ops *ops, const float *logits,
                    const float *correction, float *room, uint32_t *chosen, float *weights);

#endif
