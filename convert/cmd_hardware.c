#include "convert/commands.h"

qc_status qc_cmd_hardware(const qc_options *o, qc_error *err)
{
    (void)o;
    QC_FAIL(err, QC_ERR_INTERNAL, "being built");
}
