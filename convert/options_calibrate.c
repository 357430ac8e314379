/* Options of calibrating. */
#include "convert/option_values.h"

int qc_calibrates(const qc_calibrate_options *o)
{
    return o->text || o->hessians;
}

/* The first option that says something about the text, or NULL. */
static const char *of_text(const qc_options *o)
{
    return o->eval.tokenizer         ? "tokenizer"
           : o->calibrate.max_tokens ? "calibration-tokens"
           : o->calibrate.context    ? "calibration-context"
                                     : NULL;
}

qc_status qc_options_check_calibrate(const qc_options *o, qc_error *err)
{
    const qc_calibrate_options *c = &o->calibrate;
    const char *name = c->text ? "calibrate" : "hessians";
    if (!c->text && of_text(o))
        QC_FAIL(err, QC_ERR_USAGE, "--%s goes with --calibrate only", of_text(o));
    if (!qc_calibrates(c) && c->damping > 0)
        QC_FAIL(err, QC_ERR_USAGE, "--damping goes with --calibrate or --hessians only");
    if (!qc_calibrates(c))
        return QC_OK;
    if (c->text && c->hessians)
        QC_FAIL(err, QC_ERR_USAGE,
                "--calibrate and --hessians exclude each other: either says what the inputs are");
    if (!qc_to_quantizes(o->to))
        QC_FAIL(err, QC_ERR_USAGE, "--%s does not go with --to %s, which quantizes nothing", name,
                qc_option_table[QC_OPT_TO].choices[o->to]);
    if (o->part_count > 1)
        QC_FAIL(err, QC_ERR_USAGE,
                "--%s and --part exclude each other: a part has no inputs of later layers without "
                "those of the earlier",
                name);
    return QC_OK;
}
