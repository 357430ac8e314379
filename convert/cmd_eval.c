#include "convert/commands.h"

qc_status qc_cmd_eval(const qc_options *o, qc_error *err)
{
    QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s: eval is not built yet", o->model);
}
