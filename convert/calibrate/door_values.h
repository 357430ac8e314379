/* Files in which a door gives the values of weights that are in the store: float32, as a reader of
 * the output gets them, one weight after the other. A weight lies as its tensor does in the
 * checkpoint. */
#ifndef QC_CONVERT_DOOR_VALUES_H
#define QC_CONVERT_DOOR_VALUES_H

#include "convert/calibrate/calibrate_internal.h"
#include "formats/file_io.h"

typedef struct {
    qc_file file;
    uint64_t bytes; /* written so far, where the next weight begins */
} qc_door_values;

#define QC_DOOR_VALUES_NONE ((qc_door_values){.file = {-1, NULL}})

/* Makes or empties the file. */
QC_NODISCARD qc_status qc_door_values_open(qc_door_values *v, const char *path, qc_error *err);
/* Puts a weight, or a matrix of a stack by itself. searched: as --scale search makes it, instead of
 * as the store has it. */
QC_NODISCARD qc_status qc_door_values_put(qc_door_values *v, qc_calibrator *k, uint32_t number,
                                          int searched, qc_error *err);
/* Accepts QC_DOOR_VALUES_NONE. */
QC_NODISCARD qc_status qc_door_values_close(qc_door_values *v, qc_error *err);

#endif
