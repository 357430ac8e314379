/* What config.json says about the experts of a mixture: which layers have them, how many there are
 * and of what size, and how tokens are routed to them. Fields are read as transformers 4 and 5 read
 * them, with their defaults. */
#ifndef QC_CONVERT_FAMILY_EXPERTS_SHAPE_H
#define QC_CONVERT_FAMILY_EXPERTS_SHAPE_H

#include "base/arena.h"
#include "convert/forward/experts_route.h"
#include "formats/json_strict.h"

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
