/* Lines over the socket of a door (calibrate_door.h). All waiting ends with Ctrl-C. */
#ifndef QC_CONVERT_DOOR_LINE_H
#define QC_CONVERT_DOOR_LINE_H

#include "base/strbuf.h"
#include "formats/json_strict.h"

/* The most bytes of a line that comes in. */
#define QC_DOOR_LINE_MOST ((size_t)16 << 20)

typedef struct {
    int fd;
    const char *name; /* "fd:5" */
    qc_strbuf unread;
} qc_door_line;

/* Takes the descriptor over. QC_ERR_USAGE where it is no connected stream socket. */
QC_NODISCARD qc_status qc_door_line_open(qc_door_line *l, const char *name, int fd, qc_error *err);
void qc_door_line_close(qc_door_line *l);
/* Waits for a line and parses it: an object. QC_ERR_IO where the other side is gone. */
QC_NODISCARD qc_status qc_door_line_read(qc_door_line *l, qc_json **out, qc_error *err);
/* Sends a line, which ends with a line feed. */
QC_NODISCARD qc_status qc_door_line_write(const qc_door_line *l, const qc_strbuf *text,
                                          qc_error *err);

#endif
