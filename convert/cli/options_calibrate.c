/* Checks of the options for calibrating. */
#include "convert/cli/option_values.h"

/* Returns the first option that says something about the text, or NULL. */
static const char *of_text(const qc_options *o)
{
    return o->call.tokenizer                      ? "tokenizer"
           : o->convert.plan.calibrate.max_tokens ? "calibration-tokens"
           : o->convert.plan.calibrate.context    ? "calibration-context"
                                                  : NULL;
}

qc_status qc_options_check_calibrate(const qc_options *o, qc_error *err)
{
    const qc_calibrate_options *c = &o->convert.plan.calibrate;
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
    if (!qc_to_quantizes(o->convert.plan.recipe.to))
        QC_FAIL(err, QC_ERR_USAGE, "--%s does not go with --to %s, which quantizes nothing", name,
                qc_option_table[QC_OPT_TO].choices[o->convert.plan.recipe.to]);
    if (o->convert.part_count > 1)
        QC_FAIL(err, QC_ERR_USAGE,
                "--%s and --part exclude each other: a part has no inputs of later layers without "
                "those of the earlier",
                name);
    return QC_OK;
}
