#include "convert/calibrate/calibrate.h"

#include "base/clock.h"
#include "convert/calibrate/calibrate_door.h"
#include "convert/calibrate/calibrate_engine.h"
#include "convert/term/console.h"
#include "formats/digest.h"

#include <inttypes.h>
#include <string.h>

/* The version of what is computed. It goes up by one when the same moments give other
 * codes. */
#define METHOD 3

/* ---- what results depend on ---- */

/* Makes a digest of a file of moments, or of a folder of them, by names, sizes and times. */
static qc_status moments_digest(const qc_plan_options *o, char out[QC_DIGEST_HEX_BYTES],
                                qc_error *err)
{
    qc_checkpoint *c = NULL;
    qc_strbuf all;
    QC_TRY(qc_checkpoint_open(&c, o->calibrate.hessians, err));
    qc_strbuf_init(&all, (size_t)1 << 30);
    qc_status st = QC_OK;
    for (size_t i = 0; st == QC_OK && i < c->file_count; i++)
        st = qc_strbuf_addf(&all, err, "%" PRIu64 " %" PRId64 "\n", c->files[i].stamp.bytes,
                            (int64_t)c->files[i].stamp.modified_ns);
    for (size_t i = 0; st == QC_OK && i < c->tensor_count; i++)
        st = qc_strbuf_addf(&all, err, "%s\n", c->tensors[i].name);
    if (st == QC_OK) {
        qc_digest d = qc_digest_bytes(all.data ? all.data : "", all.len);
        qc_digest_hex(&d, out);
    }
    qc_strbuf_deinit(&all);
    qc_checkpoint_close(c);
    return st;
}

qc_status qc_calibrate_identity(const char **out, const qc_plan *plan, qc_error *err)
{
    const qc_plan_options *o = plan->options;
    const qc_calibrate_options *c = &o->calibrate;
    char digest[QC_DIGEST_HEX_BYTES];
    const qc_blas *blas = NULL;
    if (c->door) {
        const char *identity = qc_door_identity(c->door);
        const qc_digest d = qc_digest_bytes(identity, strlen(identity));
        qc_digest_hex(&d, digest);
    } else {
        QC_TRY(moments_digest(o, digest, err));
    }
    if (!plan->calibrates_on)
        QC_TRY(qc_blas_open(&blas, err));
    return qc_arena_printf(plan->call->arena, out, err,
                           "method=%d %s=%s damping=%a sided=%u computed by=%s", METHOD,
                           c->door ? "door" : "moments", digest, c->damping, c->sided,
                           blas ? qc_blas_name(blas) : plan->calibrates_on->name);
}

/* ---- on what ---- */

qc_status qc_calibrate_choose(qc_plan *plan, qc_device_options devices, qc_error *err)
{
    const qc_call *call = plan->call;
    struct qc_calibrate_device *d = NULL;
    qc_error why = {0};
    plan->calibrates_on = NULL;
    if (!qc_calibrates(&plan->options->calibrate))
        return QC_OK;
    QC_TRY(qc_arena_alloc(call->arena, &d, 1, sizeof *d, err));
    QC_TRY(qc_devices_choose(&d->devices, devices, qc_plan_gpu_bytes(plan), call->arena, err));
    if (d->devices.gpu_count == 0)
        return QC_OK;
    qc_status st =
        d->devices.work->calibrating->name(&d->name, call->arena, &d->devices.gpus[0], &why);
    if (st == QC_OK) {
        plan->calibrates_on = d;
    } else if (st != QC_ERR_DEVICE || d->devices.wished) {
        QC_FAIL(err, st, "calibrating on a GPU: %s; --device cpu calibrates without one", why.msg);
    } else {
        qc_console_detail(call, 0, "calibrating on the CPU, because the GPU cannot be used: %s",
                          why.msg);
    }
    return QC_OK;
}

/* ---- running ---- */

static qc_status run(qc_calibrator *k, qc_error *err)
{
    QC_TRY(qc_isa_select(&k->isa, err));
    k->ops = qc_quant_ops_for(k->isa);
    if (!k->devices)
        QC_TRY(qc_blas_open(&k->blas, err));
    QC_TRY(qc_calibrate_engine_create(
        &k->engine, k->devices ? k->devices->work->calibrating->ops : &qc_calibrate_cpu_ops, k,
        err));
    if (k->devices)
        qc_console_detail(k->plan->call, 1, "calibrating on %s", k->plan->calibrates_on->name);
    else
        qc_console_detail(k->plan->call, 1, "matrix products by %s", qc_blas_name(k->blas));
    QC_TRY(qc_weight_reader_open(&k->reader, k->plan->model, err));
    return k->o->calibrate.door ? qc_calibrate_from_door(k, err)
                                : qc_calibrate_from_hessians(k, err);
}

static qc_calibrator calibrator_of(const qc_plan *plan, qc_calibrate_report *r)
{
    return (qc_calibrator){.plan = plan,
                           .o = plan->options,
                           .r = r,
                           .threads = plan->call->threads ? plan->call->threads : qc_cpu_count(),
                           .feedback = {plan->options->calibrate.damping, QC_FEEDBACK_SWEEPS}};
}

static qc_status run_and_close(qc_calibrator *k, qc_error *err)
{
    qc_arena_init(&k->arena);
    qc_status st = run(k, err);
    qc_calibrate_engine_destroy(k->engine);
    qc_progress_destroy(k->progress);
    qc_weight_reader_close(&k->reader);
    qc_arena_deinit(&k->arena);
    return st;
}

qc_status qc_calibrate_costs(double (*costs)[QC_CANDIDATES],
                             qc_candidate_form (*forms)[QC_CANDIDATES], const qc_plan *plan,
                             qc_error *err)
{
    qc_calibrate_report r = {0};
    qc_calibrator k = calibrator_of(plan, &r);
    k.costs = costs;
    k.forms = forms;
    return run_and_close(&k, err);
}

void qc_calibrate_report_begin(qc_calibrate_report *out, const qc_plan *plan)
{
    const qc_calibrate_options *c = &plan->options->calibrate;
    *out = c->door ? *qc_door_report(c->door)
                   : (qc_calibrate_report){.hessians = c->hessians, .sided = 1};
    out->damping = c->damping;
}

qc_status qc_calibrate_run(qc_calibrate_report *out, const qc_plan *plan, qc_calibrated *store,
                           qc_error *err)
{
    uint64_t started = qc_clock_ns();
    qc_calibrator k = calibrator_of(plan, out);
    k.store = store;
    k.devices = plan->calibrates_on ? &plan->calibrates_on->devices : NULL;
    qc_calibrate_report_begin(out, plan);
    qc_status st = run_and_close(&k, err);
    if (store)
        out->weights = qc_calibrated_count(store);
    out->seconds = (double)(qc_clock_ns() - started) * 1e-9;
    return st;
}
