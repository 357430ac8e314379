/* Calibrating: codes and scales of a model's linear layers from second moments of their inputs
 * (quant/error_feedback.h), which a file has or another program computes, before the pipeline
 * writes them (convert/calibrate/calibrated.h). */
#ifndef QC_CONVERT_CALIBRATE_H
#define QC_CONVERT_CALIBRATE_H

#include "convert/calibrate/calibrated.h"
#include "convert/device/device_choice.h"
#include "formats/manifest.h"

/* What came of calibrating, for the manifest and the summary. The strings are in the options'
 * arena. */
typedef struct {
    const char *text;      /* name of the other side's text, or NULL */
    char text_digest[33];  /* hex */
    const char *tokenizer; /* kind */
    const char *hessians;  /* file, or what the other side calls its moments; NULL: a text */
    uint64_t tokens, windows, context;
    double mix, relative_rank; /* as in qc_manifest_calibration */
    qc_manifest_judged judged;
    double damping;   /* as asked for; 0: chosen by the number of tokens */
    unsigned sided;   /* 2: outputs count by their gradients, in at least one weight; else 1 */
    uint32_t weights; /* calibrated */
    uint32_t left;    /* quantized without calibration, which a message says */
    double seconds;
} qc_calibrate_report;

/* A GPU to calibrate on. */
struct qc_calibrate_device {
    qc_devices devices;
    const char *name; /* the GPU and its libraries, on which the results depend */
};

/* Sets plan->calibrates_on as `devices` wishes, where the plan's options have --hessians: to the
 * first GPU that quantizes, or to the CPU. Where a GPU lacks cuBLAS or cuSOLVER, this returns
 * QC_ERR_DEVICE if the GPU was asked for; otherwise it takes the CPU and says so in one line. */
QC_NODISCARD qc_status qc_calibrate_choose(qc_plan *plan, qc_device_options devices, qc_error *err);

/* Begins a report with what is known before anything is computed. */
void qc_calibrate_report_begin(qc_calibrate_report *out, const qc_plan *plan);

/* Makes one line that says what the results depend on beside the conversion's own identity, for
 * qc_calibrated_open. */
QC_NODISCARD qc_status qc_calibrate_identity(const char **out, const qc_plan *plan, qc_error *err);

/* Fills the store with what it does not hold yet. Without a store (NULL, for --dry-run) it checks
 * everything, says what it will need, and computes nothing. Messages tell what is predicted
 * (memory, operations, time), where damping was raised, and which weights are not calibrated. */
QC_NODISCARD qc_status qc_calibrate_run(qc_calibrate_report *out, const qc_plan *plan,
                                        qc_calibrated *store, qc_error *err);

/* ---- costs for --to auto ---- */

/* Finds how far each candidate for a weight moves the model's answer once the weight is calibrated,
 * which --to auto asks where second moments of inputs and outputs are at hand.
 *
 * To second order the KL divergence of the changed model's predictions from the original's is
 * tr(G E H E^T) / 2 for an error E of one weight, G and H as in quant/error_feedback.h: the Fisher
 * information of the weight, in the factors of Martens and Grosse 2015. E is what feedback along
 * the columns leaves, without sweeps, which lower all errors alike (docs/decisions/0028).
 *
 * costs [plan->job_count][QC_CANDIDATES] has HUGE_VAL where a cost is wanted, of a job that is
 * quantized, and gets it in nats for each token. A cost stays wanted where moments are missing or
 * of too few tokens. forms [plan->job_count] has what the candidates make of it. plan has begun;
 * its options name the moments. It is computed on the CPU, says how long that takes, and depends on
 * the processor, not on threads. Errors are those of qc_calibrate_run. */
QC_NODISCARD qc_status qc_calibrate_costs(double (*costs)[QC_CANDIDATES],
                                          qc_candidate_form (*forms)[QC_CANDIDATES],
                                          const qc_plan *plan, qc_error *err);

#endif
