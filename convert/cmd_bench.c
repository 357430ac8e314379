#include "convert/commands.h"

qc_status qc_cmd_bench(const qc_options *o, qc_error *err)
{
    (void)o;
    QC_FAIL(err, QC_ERR_UNSUPPORTED, "'qconv bench' is not part of this build");
}
