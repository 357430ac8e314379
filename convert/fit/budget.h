/* --vram: which devices a model is to be placed on, and how much of each may be used.
 *
 *   SPEC  = TERM { ('+' | ',') TERM }
 *   TERM  = [COUNT 'x'] (SIZE | CARD) | (SIZE | CARD) 'x' COUNT
 *         | 'auto' | 'cpu' [':' SIZE] | 'disk' [':' SIZE]
 *
 * '*' and the sign of multiplication stand for 'x' as well.
 * Examples: "2x40GB", "24GB+16GB", "2xA100-40GB", "3090+cpu:64GB", "auto+cpu+disk". 'auto' stands
 * for this machine's visible GPUs with what is free on them now. 'cpu' without a size is this
 * machine's memory, and 'disk' without one has no limit. GPUs are called cuda:0, cuda:1, ... in the
 * order given; cpu and disk come last, each at most once. "cpu:64GB" alone is a plan for the CPU
 * only. A SIZE must have a unit here ("40" would be 40 bytes). Case, blanks around a term and one
 * blank before a unit do not matter.
 * Everything lives in the given arena. */
#ifndef QC_CONVERT_BUDGET_H
#define QC_CONVERT_BUDGET_H

#include "base/arena.h"
#include "convert/hardware/card_table.h"
#include "convert/plan/plan_options.h"
#include "convert/term/call.h"

#define QC_MAX_DEVICES 256u

/* Parses the text of --vram. A mistake is QC_ERR_USAGE, with one sentence that quotes the term and
 * says what was expected, or names a card with a similar name. Refused are zero sizes, counts of 0
 * or above QC_MAX_DEVICES, auto, cpu or disk given twice, and disk by itself (nothing computes
 * there). 'auto' on a machine without GPUs and without a cpu tier is QC_ERR_DEVICE. The machine is
 * looked at only for 'auto' and for 'cpu' without a size. */
QC_NODISCARD qc_status qc_budget_parse(qc_budget *out, qc_arena *arena, const char *text,
                                       qc_error *err);

/* Returns the first card of the budget on which bitsandbytes has no int8 (because its compute
 * capability is too low), or NULL. Nothing is known of GPUs that are only a size. */
const char *qc_budget_card_without_int8(const qc_budget *b);
/* Warns where vLLM is to serve on a card of the budget that it does not start on, and says what
 * does. */
void qc_budget_warn_vllm(const qc_budget *b, qc_format format, const qc_call *call);

#endif
