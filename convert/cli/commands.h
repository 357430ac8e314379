/* The commands. Each does all of its job: it writes results to standard output and everything else
 * to standard error, and puts what went wrong into *err. */
#ifndef QC_CONVERT_COMMANDS_H
#define QC_CONVERT_COMMANDS_H

#include "convert/cli/options.h"

QC_NODISCARD qc_status qc_cmd_convert(const qc_options *o, qc_error *err);
QC_NODISCARD qc_status qc_cmd_inspect(const qc_options *o, qc_error *err);
QC_NODISCARD qc_status qc_cmd_verify(const qc_options *o, qc_error *err);
QC_NODISCARD qc_status qc_cmd_unpack(const qc_options *o, qc_error *err);
QC_NODISCARD qc_status qc_cmd_plan(const qc_options *o, qc_error *err);
QC_NODISCARD qc_status qc_cmd_hardware(const qc_options *o, qc_error *err);
QC_NODISCARD qc_status qc_cmd_validate(const qc_options *o, qc_error *err);

#endif
