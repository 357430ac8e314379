/* The text that calibrating uses. qconv brings a text of its own for users who give none, which is
 * in the public domain and of many kinds (docs/calibration.md lists the sources, and
 * tests/tools/calibration_text.py makes it). Any beginning of it has something of each kind. */
#ifndef QC_CONVERT_CALIBRATION_TEXT_H
#define QC_CONVERT_CALIBRATION_TEXT_H

#include "base/strbuf.h"
#include "convert/plan/plan.h"

/* Appends the bundled text, which is UTF-8, to out. */
QC_NODISCARD qc_status qc_calibration_text(qc_strbuf *out, qc_error *err);
/* Appends the text that --calibrate names: the bundled one, or a file's bytes. */
QC_NODISCARD qc_status qc_calibrate_text(const qc_plan_options *o, qc_strbuf *out, qc_error *err);

#endif
