/* Calibrating: codes and scales of a model's linear layers from a text that passes through it
 * (quant/error_feedback.h), before the pipeline writes them (convert/calibrate/calibrated.h). */
#ifndef QC_CONVERT_CALIBRATE_H
#define QC_CONVERT_CALIBRATE_H

#include "convert/calibrate/calibrated.h"
#include "convert/device/device_choice.h"

/* What comes of it, for the manifest and the summary. Strings in the options' arena. */
typedef struct {
    const char *text;      /* as given; "default" for the bundled one; NULL: moments of a file */
    char text_digest[33];  /* XXH3-128 of the text's bytes, hex */
    const char *tokenizer; /* kind, or "ids" */
    const char *hessians;  /* file, or NULL */
    uint64_t tokens, windows, context;
    double damping;   /* as asked for; 0: chosen by the number of tokens */
    uint32_t weights; /* calibrated */
    uint32_t left;    /* that the recipe quantizes and that were not: named in a message */
    double seconds;
} qc_calibrate_report;

/* A GPU to calibrate on. */
struct qc_calibrate_device {
    qc_devices devices;
    const char *name; /* with its libraries: what the results depend on */
};

/* Sets plan->calibrates_on as --device wishes, where the plan's options calibrate: the first GPU
 * that quantizes, or the CPU. A GPU without cuBLAS or cuSOLVER: QC_ERR_DEVICE if it was asked for,
 * else the CPU, said in one line. */
QC_NODISCARD qc_status qc_calibrate_choose(qc_plan *plan, qc_error *err);

/* One line that says what the results depend on beside the conversion's own identity; for
 * qc_calibrated_open. Reads the text. */
QC_NODISCARD qc_status qc_calibrate_identity(const char **out, const qc_plan *plan, qc_error *err);

/* Fills the store with what it does not hold yet. store NULL (--dry-run): checks everything, says
 * what it will need, and computes nothing. Messages: what is predicted (memory, operations, time),
 * damping that was raised, weights that are not calibrated. QC_ERR_UNSUPPORTED for a family that
 * the forward pass does not know, naming --hessians. */
QC_NODISCARD qc_status qc_calibrate_run(qc_calibrate_report *out, const qc_plan *plan,
                                        qc_calibrated *store, qc_error *err);

#endif
