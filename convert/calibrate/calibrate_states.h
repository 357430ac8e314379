/* The hidden states of a calibration text in both passes, and what their attention gave. They are
 * in memory up to a limit, and beyond it in an unnamed file of the staging folder. The environment
 * variable QCONV_STATES_MEMORY sets another limit, in MiB. */
#ifndef QC_CONVERT_CALIBRATE_STATES_H
#define QC_CONVERT_CALIBRATE_STATES_H

#include "convert/calibrate/calibrate_internal.h"
#include "formats/file_io.h"

#define QC_CALIBRATE_STATES_MEMORY ((uint64_t)1 << 30)

typedef struct {
    float *x, *z;                   /* [tokens, hidden] */
    float *x_attended, *z_attended; /* [tokens, q] */
    void *base;
    size_t bytes;
    qc_file file;
    int is_file;
} qc_calibrate_states;

/* The bytes of states that may be in memory. */
uint64_t qc_calibrate_states_memory(void);
/* The bytes of states that this text needs. Saturates. */
uint64_t qc_calibrate_states_bytes(uint64_t tokens, uint64_t hidden, uint64_t q);
/* Returns QC_ERR_NOSPACE where the file does not fit the disk. s is to be closed also after a
 * failure. */
QC_NODISCARD qc_status qc_calibrate_states_open(qc_calibrate_states *s, const qc_calibrator *k,
                                                uint64_t tokens, uint64_t hidden, uint64_t q,
                                                qc_error *err);
void qc_calibrate_states_close(qc_calibrate_states *s); /* accepts zeros */

#endif
