#include "convert/commands.h"

qc_status qc_cmd_report(const qc_options *o, qc_error *err)
{
    QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s: report is not built yet", o->model);
}
