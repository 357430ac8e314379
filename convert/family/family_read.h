/* Reads fields of config.json for the files that say how a model computes. Messages start with
 * "config.json". */
#ifndef QC_CONVERT_FAMILY_READ_H
#define QC_CONVERT_FAMILY_READ_H

#include "formats/json_strict.h"

/* Reads a positive finite number. missing NaN: the field has to be there. */
QC_NODISCARD qc_status qc_read_positive(const qc_json_node *object, const char *name,
                                        double missing, double *out, qc_error *err);
/* Reads a count above 0. missing 0: the field has to be there. */
QC_NODISCARD qc_status qc_read_count(const qc_json_node *object, const char *name, uint64_t missing,
                                     uint64_t *out, qc_error *err);
/* Reads a boolean. Python takes "false" for true, so that nothing else is accepted. */
QC_NODISCARD qc_status qc_read_flag(const qc_json_node *object, const char *name, int missing,
                                    int *out, qc_error *err);

#endif
