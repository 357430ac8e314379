/* qconv eval OUT [--against MODEL] --text FILE: the perplexity, and how far the predictions are
 * from those of the original; of an encoder, how far the hidden states are. */
#include "convert/cli/commands.h"
#include "convert/eval/eval.h"
#include "convert/term/console.h"

#define TEXT_MAX ((size_t)1 << 20)

qc_status qc_cmd_eval(const qc_options *o, qc_error *err)
{
    qc_eval_result r;
    qc_strbuf out;
    QC_TRY(qc_eval_run(&r, &o->call, &o->eval, err));
    qc_strbuf_init(&out, TEXT_MAX);
    qc_status st = o->call.json ? qc_eval_json(&r, &out, err) : qc_eval_text(&r, &out, err);
    QC_TRY(qc_console_deliver(st, &out, NULL, err));
    if (o->eval.max_kl > 0 && !(r.kl_mean <= o->eval.max_kl))
        QC_FAIL(err, QC_ERR_CHECK,
                "%s: the mean KL divergence to %s is %.5g, above --max-kl %.5g, over %s", r.path,
                r.against, r.kl_mean, o->eval.max_kl, r.text);
    if (o->eval.max_distance > 0 && !(r.distance_mean <= o->eval.max_distance))
        QC_FAIL(err, QC_ERR_CHECK,
                "%s: the mean distance of hidden states to %s is %.5g, above --max-distance %.5g, "
                "over %s",
                r.path, r.against, r.distance_mean, o->eval.max_distance, r.text);
    return QC_OK;
}
