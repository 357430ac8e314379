/* What --to auto wants to know where second moments of inputs and outputs are at hand: how far each
 * candidate for a weight moves the model's answer, once the weight is calibrated.
 *
 * To second order the KL divergence of the changed model's predictions from the original's is
 * tr(G E H E^T) / 2 for an error E of one weight, G and H as in quant/error_feedback.h: the Fisher
 * information of the weight, in the factors of Martens and Grosse 2015. E is what feedback along
 * the columns leaves, without sweeps, which lower all errors alike (docs/decisions/0028). */
#ifndef QC_CONVERT_CALIBRATE_COSTS_H
#define QC_CONVERT_CALIBRATE_COSTS_H

#include "convert/plan/plan.h"

/* costs [plan->job_count][QC_CANDIDATES] has HUGE_VAL where a cost is wanted, of a job that
 * is quantized, and gets it in nats for each token. A cost stays wanted where moments are missing
 * or of too few tokens. rows: the candidates, as qc_candidates_of has them. plan has begun; its
 * options name the moments. It is computed on the CPU, says how long that takes, and depends on the
 * processor, not on threads. Errors are those of qc_calibrate_run. */
QC_NODISCARD qc_status qc_calibrate_costs(double (*costs)[QC_CANDIDATES], const qc_plan *plan,
                                          const qc_candidate *rows, qc_error *err);

#endif
