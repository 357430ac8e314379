/* What taking stacks of experts apart and putting them together know of a model type. */
#ifndef QC_CONVERT_EXPERT_INTERNAL_H
#define QC_CONVERT_EXPERT_INTERNAL_H

#include "convert/model/expert_split.h"
#include "formats/bnb_state.h"

typedef struct {
    const char *types;            /* " a b " */
    const char *path;             /* of the experts in a released checkpoint */
    const char *gate, *up, *down; /* names of the matrices in that checkpoint */
    const char *router;           /* the released name of "mlp.gate.weight"; NULL: it is the same */
} qc_expert_names;

#define QC_EXPERTS_GATE_UP "mlp.experts.gate_up_proj"
#define QC_EXPERTS_DOWN    "mlp.experts.down_proj"
#define QC_EXPERTS_ROUTER  "mlp.gate.weight"

/* NULL: the type is not known, or there is no config.json. */
const qc_expert_names *qc_expert_names_of(const qc_checkpoint *c);

/* How the weights of a stack are stored: floats, or codes with what lies beside them. */
typedef enum { QC_EXPERTS_FLOATS, QC_EXPERTS_NF4, QC_EXPERTS_INT8 } qc_expert_form;

/* What lies beside the codes of a weight W of NF4 (W.absmax) and int8 (W.SCB; for a module's weight
 * M.SCB). The first is the codes themselves. */
enum { QC_EXPERTS_NF4_PARTS = 6, QC_EXPERTS_INT8_PARTS = 3 };
extern const char *const qc_experts_nf4_parts[QC_EXPERTS_NF4_PARTS];
extern const char *const qc_experts_int8_parts[QC_EXPERTS_INT8_PARTS];
enum { QC_NF4_CODES, QC_NF4_ABSMAX, QC_NF4_MAP, QC_NF4_NESTED, QC_NF4_NESTED_MAP, QC_NF4_STATE };
enum { QC_INT8_CODES, QC_INT8_SCB, QC_INT8_FORMAT };

/* Reads the quant_state t. */
QC_NODISCARD qc_status qc_expert_state_read(qc_bnb_state *out, const qc_checkpoint *c,
                                            qc_st_cursor *cursor, const qc_checkpoint_tensor *t,
                                            qc_error *err);
/* Makes t, whose name is set, the quant_state s. */
QC_NODISCARD qc_status qc_expert_state_make(qc_checkpoint *c, qc_checkpoint_tensor *t,
                                            const qc_bnb_state *s, qc_error *err);

#endif
