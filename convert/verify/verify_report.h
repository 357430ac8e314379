/* What verify, unpack and `qconv verify OUT --against MODEL` say at the end; docs/verify.md has the
 * members of the JSON. Everything goes to standard output: text, or one JSON object with --json;
 * nothing with -q (but JSON is always written when it was asked for). */
#ifndef QC_CONVERT_VERIFY_REPORT_H
#define QC_CONVERT_VERIFY_REPORT_H

#include "convert/term/call.h"
#include "convert/verify/against.h"

/* verb is "verified" or "unpacked". codes are for JSON only; NULL: none were counted. */
QC_NODISCARD qc_status qc_scan_report(const qc_call *call, const qc_scan_result *r,
                                      qc_code_counts *codes, const char *verb, double seconds,
                                      qc_error *err);
QC_NODISCARD qc_status qc_against_report(const qc_call *call, const qc_against_result *r,
                                         qc_code_counts *codes, double seconds, qc_error *err);

#endif
