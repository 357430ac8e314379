/* What verify, unpack and `qconv verify OUT --against MODEL` say at the end; docs/verify.md has the
 * members of the JSON. Everything goes to standard output: text, or one JSON object with --json;
 * nothing with -q (but JSON is always written when it was asked for). */
#ifndef QC_CONVERT_VERIFY_REPORT_H
#define QC_CONVERT_VERIFY_REPORT_H

#include "convert/term/call.h"
#include "convert/verify/against.h"

/* The output that was scanned. */
typedef struct {
    const char *verb; /* "verified" or "unpacked" */
    const char *path;
    const char *unpacked_to; /* or NULL */
} qc_scan_subject;

QC_NODISCARD qc_status qc_scan_report(const qc_call *call, const qc_scan_subject *of,
                                      const qc_scan_result *r, double seconds, qc_error *err);
QC_NODISCARD qc_status qc_against_report(const qc_call *call, const qc_against_options *o,
                                         const qc_against_result *r, double seconds, qc_error *err);

#endif
