/* Calibrating as a part of a conversion, between what an earlier run left and the pipeline. */
#ifndef QC_CONVERT_CALIBRATION_H
#define QC_CONVERT_CALIBRATION_H

#include "convert/calibrate/calibrate.h"
#include "convert/pipeline/pipeline.h"
#include "convert/run/summary.h"

typedef struct {
    const qc_pipeline *p;
    qc_calibrated *store; /* NULL: without --hessians */
    int known;            /* report is filled */
    qc_calibrate_report report;
} qc_calibration;

#define QC_CALIBRATION_NONE ((qc_calibration){.p = NULL})

/* Opens the store in d's staging folder, if the plan's options calibrate, and gives it to p. */
QC_NODISCARD qc_status qc_calibration_open(qc_calibration *s, qc_pipeline *p, qc_output_dir *d,
                                           qc_error *err);
/* Is there something to calibrate? There is if calibrating did not get through, or if the store
 * lost a weight that the pipeline has to write. What that keeps has been read back
 * (qc_resume_check). */
int qc_calibration_is_due(const qc_calibration *s);
/* Calibrates what is due, and says so in the store. */
QC_NODISCARD qc_status qc_calibration_run(qc_calibration *s, qc_error *err);
/* Returns how many more bytes the store will take. */
uint64_t qc_calibration_room(const qc_calibration *s);
/* Counts the weights in the store, from this and earlier runs. Any thread may call it. */
uint32_t qc_calibration_count(const qc_calibration *s);
/* Fills in the summary, if s->known. The means are over the pipeline's weights. */
void qc_calibration_tell(const qc_calibration *s, qc_convert_report *report);
void qc_calibration_close(qc_calibration *s);

#endif
