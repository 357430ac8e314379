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

#include "base/arena.h"

#include <stdint.h>

typedef struct qc_door qc_door;

/* What the other side says of itself when it comes. The strings are in the door's arena. */
typedef struct {
    const char *identity;    /* all that its results depend on beside the conversion */
    const char *text;        /* the name of its text; NULL: it has moments */
    const char *hessians;    /* the name of its moments; NULL: it has a text */
    const char *text_digest; /* hex, with a text */
    const char *tokenizer;   /* kind, with a text */
    uint64_t tokens, windows, context;
    double mix, relative_rank; /* as in qc_manifest_calibration */
    unsigned sided;
} qc_door_hello;

/* Opens a door where path is "fd:N", and waits for the hello; else *out is NULL. */
QC_NODISCARD qc_status qc_door_open(qc_door **out, qc_arena *arena, const char *path,
                                    qc_error *err);
void qc_door_close(qc_door *d); /* accepts NULL */
const qc_door_hello *qc_door_hello_of(const qc_door *d);

#endif
