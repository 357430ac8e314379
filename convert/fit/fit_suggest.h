/* Finds what would make a model fit that does not. What costs least comes first: prompts in steps,
 * no multi-token prediction, a quantized head, a narrower cache, or several of these; then another
 * precision, a shorter context, a smaller batch, a cpu tier, more cards, or a larger margin. Every
 * suggestion was planned anew and fits. With --to auto, that is planned with the smallest choice,
 * so no weight is measured again. */
#ifndef QC_CONVERT_FIT_SUGGEST_H
#define QC_CONVERT_FIT_SUGGEST_H

#include "convert/fit/fit_report.h"
#include "convert/fit/planned_model.h"

#define QC_MAX_SUGGESTED_CARDS 64u

/* Sets report->suggestions (texts in the arena) for `planned`, which was made of subject and
 * options and does not fit. There is at most one for each kind of change. Where no change alone
 * is enough, they are changes beside NF4 ("--to nf4 and +cpu:64GB"); if nothing helps, there are
 * none. */
QC_NODISCARD qc_status qc_fit_suggest(qc_fit_report *report, qc_arena *arena,
                                      const qc_plan_subject *subject,
                                      const qc_planned_model *planned,
                                      const qc_plan_options *options, qc_error *err);
/* Call this with --to auto, for a model that fits and has a cache. It finds what else the same
 * devices could hold (NF4, auto for longer contexts, auto in a form that bitsandbytes has), with
 * the longest context of each, and sets report->choices, the plan itself first. There are none
 * where nothing was traded for precision. It uses the errors that were measured for `planned`. */
QC_NODISCARD qc_status qc_fit_compare(qc_fit_report *report, qc_arena *arena,
                                      const qc_plan_subject *subject,
                                      const qc_planned_model *planned,
                                      const qc_plan_options *options, qc_error *err);

#endif
