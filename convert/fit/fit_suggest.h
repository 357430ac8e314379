/* What would make a model fit that does not: other precision, a shorter context, a smaller batch, a
 * narrower cache, a cpu tier, more cards, a larger margin; what costs least first. Every suggestion
 * was planned anew and fits. With --to auto that is with the smallest choice, so no weight is
 * measured again. */
#ifndef QC_CONVERT_FIT_SUGGEST_H
#define QC_CONVERT_FIT_SUGGEST_H

#include "convert/fit/fit_report.h"
#include "convert/fit/planned_model.h"

#define QC_MAX_SUGGESTED_CARDS 64u

/* planned: made of subject, budget and options, and does not fit. Sets report->suggestions (texts
 * in the arena). At most one per kind of change; where no change alone is enough, those beside NF4
 * ("--to nf4 and +cpu:64GB"); none if nothing helps. */
QC_NODISCARD qc_status qc_fit_suggest(qc_fit_report *report, qc_arena *arena,
                                      const qc_plan_subject *subject,
                                      const qc_planned_model *planned, const qc_budget *budget,
                                      const qc_plan_options *options, qc_error *err);
/* For --to auto of a model that fits and has a cache: what else the same devices could hold (NF4,
 * auto for longer contexts, auto in a form that bitsandbytes has), with the longest context of
 * each. Sets report->choices, the plan itself first; none where nothing was traded for precision.
 * Takes the errors that planned measured. */
QC_NODISCARD qc_status qc_fit_compare(qc_fit_report *report, qc_arena *arena,
                                      const qc_plan_subject *subject,
                                      const qc_planned_model *planned,
                                      const qc_plan_options *options, qc_error *err);

#endif
