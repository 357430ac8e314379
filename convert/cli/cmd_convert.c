/* qconv --to SCHEME MODEL OUT: open, decide, plan, convert. */
#include "base/clock.h"
#include "convert/adapter/adapters.h"
#include "convert/calibrate/calibrate.h"
#include "convert/calibrate/calibrate_door.h"
#include "convert/cli/commands.h"
#include "convert/fit/device_map.h"
#include "convert/fit/planned_model.h"
#include "convert/fit/tensor_parallel.h"
#include "convert/known/claims.h"
#include "convert/known/known_models.h"
#include "convert/known/model_path.h"
#include "convert/model/expert_split.h"
#include "convert/model/recipe_diffusers.h"
#include "convert/pipeline/pipeline.h"
#include "convert/plan/engines.h"
#include "convert/plan/plan.h"
#include "convert/run/convert_run.h"
#include "convert/run/make_manifest.h"
#include "convert/run/output_ready.h"
#include "convert/run/part_run.h"
#include "convert/run/side_files.h"
#include "convert/run/summary.h"
#include "convert/term/console.h"
#include "convert/term/progress.h"
#include "convert/term/size_text.h"
#include "formats/checkpoint_internal.h"
#include "formats/json_writer.h"

#include <inttypes.h>
#include <string.h>

/* Finds out which tools load the output, and with --tp the options with which vLLM serves it. The
 * report outlives the plan. */
static qc_status settle_loaders(qc_convert_report *r, const qc_plan *plan, const qc_options *o,
                                const qc_fit *fit, qc_error *err)
{
    const uint32_t ranks = fit ? fit->ranks : 0;
    qc_loaders *loaders = NULL;
    qc_strbuf text;
    QC_TRY(qc_arena_alloc(o->call.arena, &loaders, 1, sizeof(qc_loaders), err));
    QC_TRY(qc_engines_settle(loaders, plan, o->engines, ranks, o->convert.plan.compress, &o->call,
                             err));
    r->program = o->program;
    r->loaders = loaders;
    if (ranks > 0 || o->engines & 1u << QC_ENGINE_VLLM)
        qc_budget_warn_vllm(&o->convert.plan.fit.vram, o->convert.plan.recipe.format, &o->call);
    if (ranks == 0)
        return QC_OK;
    qc_fit_options use = o->convert.plan.fit;
    use.context = fit->context;
    qc_strbuf_init(&text, 1u << 12);
    qc_tp_serve_options(&text, &use, ranks);
    qc_status st = qc_strbuf_status(&text, err);
    if (st == QC_OK)
        st = qc_arena_strndup(o->call.arena, &loaders->vllm, text.data, text.len, err);
    qc_strbuf_deinit(&text);
    return st;
}

/* Warns where there is no config.json, or none that qconv knows, to say how the model is built.
 * Only -v would tell otherwise. */
static void warn_of_config(const qc_checkpoint *model, const qc_plan *plan, const qc_options *o)
{
    const char *type = plan->recipe->model_type;
    if (!model->config)
        qc_console_warn(&o->call, "there is no config.json beside the weights, so only weights are "
                                  "written, and transformers cannot load the result");
    else if (!plan->recipe->known_type && !qc_diffusers_class(model))
        qc_console_warn(&o->call,
                        "%s%s%s, so general rules choose the tensors to quantize; --dry-run shows "
                        "them",
                        *type ? "model type '" : "config.json has no model_type", type,
                        *type ? "' is not known" : "");
}

/* Some rows are a multiple of 16 long, but no whole number of blocks. For some of their weights
 * bitsandbytes' CPU kernel takes the scale of another block. Scales by absmax are alike, so nobody
 * noticed; searched ones differ in sign. */
static void warn_of_straddling(const qc_plan *plan, const qc_options *o)
{
    uint32_t count = 0;
    const qc_job *first = NULL;
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_job *j = &plan->jobs[i];
        if (j->scheme != QC_SCHEME_NF4 || j->scale == QC_SCALE_ABSMAX || j->form.cols % 16 != 0 ||
            j->form.cols % j->form.block_elems == 0)
            continue;
        first = first ? first : j;
        count++;
    }
    if (first && !plan->own_form)
        qc_console_warn(
            &o->call,
            "'%s'%s: rows of %llu weights are not whole blocks of %u, and bitsandbytes up to "
            "0.50.2 reads such rows wrongly on a CPU; the error is least with --scale absmax",
            first->name, count > 1 ? " and others" : "", (unsigned long long)first->form.cols,
            first->form.block_elems);
}

/* With --vram the placement on devices decides how the shards are cut. --bits needs none. */
static qc_status plan_placed(qc_planned_model *placed, const qc_options *o,
                             const qc_checkpoint *model, qc_convert_report *report, qc_error *err)
{
    char bytes[QC_SIZE_TEXT_BYTES], left[QC_SIZE_TEXT_BYTES];
    qc_geometry *geometry = NULL;
    QC_TRY(qc_arena_alloc(o->call.arena, &geometry, 1, sizeof *geometry, err));
    QC_TRY(qc_geometry_read(geometry, o->call.arena, model->config, err));
    const qc_calibrate_options *moments = &o->convert.plan.calibrate;
    const int weighs = qc_calibrates(moments) && moments->sided != 1;
    qc_plan_subject subject = {&o->call, model, geometry,
                               1,        NULL,  weighs ? qc_calibrate_costs : NULL};
    QC_TRY(qc_planned_model_make(placed, o->call.arena, &subject, &o->convert.plan, err));
    QC_TRY(qc_planned_model_check(placed, o->model, err));
    QC_TRY(qc_planned_model_lay_out(placed, err));
    for (uint32_t i = 0; placed->fit.budget && i < placed->fit.budget->count; i++) {
        const qc_fit_device *d = &placed->fit.devices[i];
        qc_console_detail(&o->call, 1, "%s: %" PRIu32 " layers, %s of weights, %s left",
                          d->device->name, d->layers, qc_text_bytes(bytes, d->weight_bytes),
                          d->free_bytes == UINT64_MAX ? "no limit"
                                                      : qc_text_bytes(left, d->free_bytes));
    }
    if (o->convert.plan.recipe.to != QC_TO_AUTO)
        return QC_OK;
    const qc_auto_result *chosen = &placed->chosen;
    qc_strbuf out;
    qc_strbuf_init(&out, SIZE_MAX / 2);
    if (o->convert.explain && !o->call.json)
        QC_TRY(qc_console_deliver(qc_auto_explain(chosen, o->call.verbose, &out, err), &out, NULL,
                                  err));
    qc_auto_result *kept = NULL; /* the report outlives the plan */
    QC_TRY(qc_arena_alloc(o->call.arena, &kept, 1, sizeof *kept, err));
    *kept = *chosen;
    report->choice = kept;
    report->explain = o->convert.explain;
    for (unsigned i = 0; i < chosen->note_count; i++)
        qc_console_warn(&o->call, "%s", chosen->notes[i]);
    return QC_OK;
}

static qc_status convert_model(const qc_options *o, qc_checkpoint *model, qc_rank rank,
                               qc_convert_report *report, qc_error *err)
{
    qc_part_run part;
    qc_recipe recipe;
    qc_plan unplaced;
    qc_planned_model placed;
    qc_plan *plan = &unplaced;
    for (size_t i = 0; i < model->warning_count; i++)
        qc_console_warn(&o->call, "%s", model->warnings[i]);
    if (o->convert.plan.fit.vram.count || o->convert.plan.recipe.to == QC_TO_AUTO) {
        QC_TRY(plan_placed(&placed, o, model, report, err));
        plan = &placed.plan;
    } else {
        QC_TRY(qc_recipe_make(&recipe, o->call.arena, model, &o->convert.plan.recipe, err));
        QC_TRY(qc_plan_make(&unplaced, o->call.arena, model, &recipe, &o->call, &o->convert.plan,
                            err));
    }
    warn_of_config(model, plan, o);
    report->model = o->model;
    report->out = o->out;
    report->to = qc_to_name(o->convert.plan.recipe.to);
    report->scale = qc_scale_name(&o->convert.plan.recipe);
    report->dry_run = o->convert.dry_run;
    report->compressed = o->convert.plan.compress;
    qc_parts_fill_report(report, plan, QC_SHARE_ALL);
    QC_TRY(settle_loaders(report, plan, o,
                          plan == &placed.plan && placed.fit.budget ? &placed.fit : NULL, err));
    QC_TRY(qc_calibrate_choose(plan, o->devices, err));
    QC_TRY(qc_part_begin(&part, rank, plan, &o->convert, err));
    if (o->convert.dry_run) {
        if (o->out)
            QC_TRY(qc_output_check(o->call.arena, o->out, o->model, o->convert.force, NULL, err));
        if (o->out)
            QC_TRY(qc_output_preview(&part, err));
        warn_of_straddling(plan, o);
        if (qc_calibrates(&plan->options->calibrate)) /* checks that all of it is there */
            QC_TRY(qc_calibrate_run(&report->calibration, plan, NULL, err));
        QC_TRY(qc_plan_print(plan, report, err));
        return o->out ? qc_output_preview_room(&part, err) : QC_OK;
    }
    QC_TRY(qc_plan_check_quantizes(plan, o->model, err));
    qc_strbuf device_map;
    qc_strbuf_init(&device_map, SIZE_MAX / 2);
    qc_status st = QC_OK;
    if (plan->device_names)
        st = qc_device_map_text(&device_map, o->call.arena, &placed.fit, err);
    if (st == QC_OK)
        st = qc_convert_run(&part, device_map.data, report, err);
    qc_strbuf_deinit(&device_map);
    QC_TRY(st);
    warn_of_straddling(plan, o);
    if (qc_to_quantizes(o->convert.plan.recipe.to) && report->parts_left_count == 0)
        report->left = qc_promise_count_left(plan);
    return QC_OK;
}

/* Somebody who planned a model by its id tries that id with convert next. */
static qc_status check_model(const char *model, qc_error *err)
{
    qc_path_kind kind = QC_PATH_MISSING;
    QC_TRY(qc_path_stat(model, &kind, NULL, err));
    if (kind == QC_PATH_MISSING && qc_known_model_find(model))
        QC_FAIL(err, QC_ERR_INPUT,
                "%s does not exist; 'qconv plan' knows this model by its id, but to convert it, "
                "download it and give its folder: hf download %s --local-dir %s",
                model, qc_known_model_find(model)->id, model);
    return QC_OK;
}

/* path is as the user gave it. Where it is an index, o->model is the folder of that. */
static qc_status convert_path(const qc_options *o, const char *path, qc_error *err)
{
    qc_checkpoint *model = NULL;
    qc_convert_report report;
    memset(&report, 0, sizeof report);
    uint64_t started = qc_clock_ns();
    qc_rank rank;
    QC_TRY(qc_rank_choose(&rank, &o->convert, err));
    /* The tasks of a Slurm step share the work without an option saying so. */
    if (qc_calibrates(&o->convert.plan.calibrate) && rank.count > 1)
        QC_FAIL(err, QC_ERR_USAGE,
                "--hessians does not go with the %u tasks of a Slurm step: a part has no inputs of "
                "later layers without those of the earlier; start one task, or give --part 1/1",
                rank.count);
    if (qc_model_path_swapped(o->model, o->out))
        QC_FAIL(err, QC_ERR_USAGE,
                "%s holds no model and %s does: MODEL comes first and OUT second; did you mean "
                "'%s %s'?",
                o->model, o->out, o->out, o->model);
    if (!o->convert.dry_run)
        QC_TRY(qc_output_check(o->call.arena, o->out, o->model, o->convert.force, NULL, err));
    QC_TRY(check_model(o->model, err));
    qc_status st = qc_checkpoint_open(&model, path, err);
    if (st == QC_OK && model->side_link)
        st = QC_ERROR(err, QC_ERR_INPUT,
                      "%s: '%s' is a link that leads out of the folder, so a file from "
                      "elsewhere would be copied; put the file itself there",
                      o->model, model->side_link);
    if (st == QC_OK)
        st = qc_checkpoint_check_model(model, err);
    if (st == QC_OK)
        st = qc_claims_check(model, o->convert.incomplete, err);
    if (st == QC_OK)
        st = qc_experts_arrange(model, &o->convert.plan.recipe, err);
    if (st == QC_OK)
        st = qc_adapters_attach(model, o->loras, err);
    if (st == QC_OK)
        report.adapters = qc_adapters_of(model, &report.adapter_count);
    if (st == QC_OK)
        st = convert_model(o, model, rank, &report, err);
    if (st == QC_OK && !o->convert.dry_run) {
        qc_strbuf out;
        qc_strbuf_init(&out, (size_t)1 << 20);
        report.seconds = (double)(qc_clock_ns() - started) * 1e-9;
        if (o->call.json)
            st = qc_report_json(&report, &out, err);
        else if (!o->call.quiet)
            st = qc_report_text(&report, &out, err);
        st = qc_console_deliver(st, &out, NULL, err);
        if (st == QC_OK)
            st = qc_promise_check_left(&report.left, o->out, err);
    }
    qc_checkpoint_close(model);
    return st;
}

qc_status qc_cmd_convert(const qc_options *o, qc_error *err)
{
    qc_options own = *o;
    QC_TRY(qc_checkpoint_folder_of_index(&own.model, o->call.arena, o->model, err));
    own.convert.model = own.model;
    own.convert.out = o->out;
    own.convert.devices = o->devices;
    qc_calibrate_options *c = &own.convert.plan.calibrate;
    QC_TRY(qc_door_open(&c->door, o->call.arena, c->hessians, err));
    const qc_status st = convert_path(&own, o->model, err);
    qc_door_close(c->door);
    return st;
}
