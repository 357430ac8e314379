/* Checks of the options of eval and report. */
#include "convert/cli/option_values.h"

qc_status qc_options_check_eval(const qc_options *o, qc_error *err)
{
    if (o->command == QC_CMD_EVAL) {
        if (!o->eval.text)
            QC_FAIL(err, QC_ERR_USAGE,
                    "--text is missing; expected --text with a file of text, or of token ids");
        if (o->eval.max_kl > 0 && !o->call.against)
            QC_FAIL(err, QC_ERR_USAGE, "--max-kl goes with --against only");
        return QC_OK;
    }
    if (o->report.eval && o->eval.text)
        QC_FAIL(err, QC_ERR_USAGE, "--eval and --text exclude each other");
    if (!o->eval.text &&
        (o->call.tokenizer || o->eval.context || o->eval.max_tokens || o->call.tuning))
        QC_FAIL(err, QC_ERR_USAGE, "--%s goes with --text only",
                o->call.tokenizer    ? "tokenizer"
                : o->eval.context    ? "context"
                : o->eval.max_tokens ? "max-tokens"
                                     : "tuning");
    return QC_OK;
}
