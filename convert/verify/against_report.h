/* What `qconv verify OUT --against MODEL` says; docs/verify.md has the members of the JSON. */
#ifndef QC_CONVERT_AGAINST_REPORT_H
#define QC_CONVERT_AGAINST_REPORT_H

#include "convert/term/call.h"
#include "convert/verify/against.h"

/* Prints it to standard output, as call->json, quiet and verbose ask for it. */
QC_NODISCARD qc_status qc_against_report(const qc_call *call, const qc_against_result *r,
                                         double seconds, qc_error *err);

#endif
