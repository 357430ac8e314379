/* The door: with --hessians fd:N another program calibrates, over a Unix stream socket that this
 * process inherits as descriptor N. It computes second moments of one set of weights after another,
 * has them solved here, and gets the values that came of it for its forward pass. Requests and
 * answers are lines of JSON, and arrays are in files; docs/calibration.md has the protocol.
 *
 * A door is for one thread. Everything that may come in is checked, and a bad line is QC_ERR_INPUT
 * with one sentence. QC_ERR_IO where the other side is gone before it said that it is done; what
 * the store holds stays. */
#ifndef QC_CONVERT_CALIBRATE_DOOR_H
#define QC_CONVERT_CALIBRATE_DOOR_H

#include "convert/calibrate/calibrate.h"

typedef struct qc_door qc_door;

/* Opens a door where path is "fd:N", and waits for the hello; else *out is NULL. */
QC_NODISCARD qc_status qc_door_open(qc_door **out, qc_arena *arena, const char *path,
                                    qc_error *err);
void qc_door_close(qc_door *d); /* accepts NULL */
/* Returns, as text, all that the other side's results depend on beside the conversion. */
const char *qc_door_identity(const qc_door *d);
/* Returns what the other side says of itself, where a report has it. The strings are in the door's
 * arena. */
const qc_calibrate_report *qc_door_report(const qc_door *d);

#endif
