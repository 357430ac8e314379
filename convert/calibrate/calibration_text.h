/* The text that calibrating takes where none is given: public domain, of many kinds
 * (docs/calibration.md lists the sources; tests/tools/calibration_text.py makes it). Any beginning
 * of it has something of each kind. */
#ifndef QC_CONVERT_CALIBRATION_TEXT_H
#define QC_CONVERT_CALIBRATION_TEXT_H

#include "base/strbuf.h"

/* Appends it to out: UTF-8. */
QC_NODISCARD qc_status qc_calibration_text(qc_strbuf *out, qc_error *err);

#endif
