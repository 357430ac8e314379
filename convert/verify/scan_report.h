/* Prints what verify and unpack say at the end. */
#ifndef QC_CONVERT_SCAN_REPORT_H
#define QC_CONVERT_SCAN_REPORT_H

#include "convert/term/call.h"
#include "convert/verify/output_scan.h"

/* Prints to standard output: text, or one JSON object with --json; nothing with -q (but JSON is
 * always written when it was asked for). verb is "verified" or "unpacked". */
QC_NODISCARD qc_status qc_scan_report(const qc_call *call, const qc_scan_result *r,
                                      const char *verb, double seconds, qc_error *err);

#endif
