#include "convert/commands.h"

qc_status qc_cmd_validate(const qc_options *o, qc_error *err)
{
    (void)o;
    QC_FAIL(err, QC_ERR_UNSUPPORTED, "'qconv validate' is not part of this build");
}
