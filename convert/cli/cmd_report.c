/* qconv report OUT: one page on an output, or the same as JSON. */
#include "base/clock.h"
#include "convert/cli/commands.h"
#include "convert/report/report_codes.h"
#include "convert/term/console.h"
#include "convert/term/target_file.h"
#include "formats/file_io.h"

#include <string.h>
#include <unistd.h>

#define TEXT_MAX ((size_t)1 << 30)

static qc_status check_targets(const qc_options *o, qc_error *err)
{
    QC_TRY(qc_target_file_check("--html", o->html, err));
    QC_TRY(qc_target_file_differs("--html", o->html, "--eval", o->report.eval, err));
    QC_TRY(qc_target_file_differs("--html", o->html, "--bench", o->report.bench, err));
    QC_TRY(qc_target_file_differs("--html", o->html, "--text", o->eval.text, err));
    QC_TRY(qc_target_file_differs("--html", o->html, "--tokenizer", o->call.tokenizer, err));
    if (!o->call.json && !o->html && isatty(STDOUT_FILENO))
        QC_FAIL(err, QC_ERR_USAGE,
                "the page would be written to a terminal; expected --html FILE, or standard output "
                "led to a file ('> report.html')");
    return QC_OK;
}

static qc_status compare(qc_report *r, const qc_options *o, qc_error *err)
{
    qc_checkpoint *source = NULL;
    QC_TRY(qc_checkpoint_open(&source, o->call.against, err));
    qc_status st = qc_target_file_spares("--html", o->html, source, err);
    for (size_t i = 0; st == QC_OK && i < source->warning_count; i++)
        qc_console_warn(&o->call, "%s", source->warnings[i]);
    if (st == QC_OK)
        st = qc_report_measure(r, source, err);
    qc_checkpoint_close(source);
    return st;
}

static qc_status evaluate(qc_report *r, const qc_options *o, qc_error *err)
{
    if (o->report.eval)
        QC_TRY(qc_eval_read(&r->eval, o->call.arena, o->report.eval, err));
    else if (o->eval.text)
        QC_TRY(qc_eval_run(&r->eval, &o->call, &o->eval, err));
    else
        return QC_OK;
    if (r->eval.encoder)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%s is an encoder (%s), and a report shows what --text says of a language model; "
                "'qconv eval --against' tells the distance of hidden states",
                o->call.model, r->eval.model_type);
    r->has_eval = 1;
    r->eval_from = o->report.eval;
    return QC_OK;
}

/* With a path of NULL the page goes to standard output. */
static qc_status put(const qc_report *r, int json, const char *path, qc_error *err)
{
    qc_strbuf out;
    qc_strbuf_init(&out, TEXT_MAX);
    qc_status st = json ? qc_report_facts_json(r, &out, err) : qc_report_page_html(r, &out, err);
    return qc_console_deliver(st, &out, path, err);
}

/* The page is written, and it says so too. */
static qc_status verdict(const qc_report *r, qc_error *err)
{
    const qc_against_result *a = r->against;
    if (!a || a->faults == 0)
        return QC_OK;
    QC_FAIL(err, QC_ERR_CHECK, "%s: %s: %s%s", r->call->model, a->first_what, a->first_why,
            a->faults > 1 ? " (and more)" : "");
}

static qc_status run(qc_report *r, const qc_options *o, uint64_t started, qc_error *err)
{
    for (size_t i = 0; i < r->facts.model->warning_count; i++)
        qc_console_warn(&o->call, "%s", r->facts.model->warnings[i]);
    if (r->facts.manifest_trouble)
        qc_console_warn(&o->call, "%s", r->facts.manifest_trouble);
    QC_TRY(qc_target_file_spares("--html", o->html, r->facts.model, err));
    /* What costs nothing comes first, so that a wrong file is found before the work. */
    if (o->report.bench)
        QC_TRY(qc_report_bench_read(r, o->report.bench, err));
    if (o->report.eval)
        QC_TRY(evaluate(r, o, err));
    if (o->call.against)
        QC_TRY(compare(r, o, err));
    QC_TRY(qc_report_sum_up(r, err));
    QC_TRY(qc_report_count_codes(r, err));
    if (!o->report.eval)
        QC_TRY(evaluate(r, o, err));
    r->seconds = (double)(qc_clock_ns() - started) * 1e-9;
    if (o->html) {
        QC_TRY(put(r, 0, o->html, err));
        qc_console_detail(&o->call, 0, "the page is in %s", o->html);
    }
    if (o->call.json || !o->html)
        QC_TRY(put(r, o->call.json, NULL, err));
    return verdict(r, err);
}

qc_status qc_cmd_report(const qc_options *o, qc_error *err)
{
    qc_report r;
    uint64_t started = qc_clock_ns();
    QC_TRY(check_targets(o, err));
    QC_TRY(qc_report_gather(&r, &o->call, err));
    qc_status st = run(&r, o, started, err);
    qc_checkpoint_close(r.facts.model);
    return st;
}
