/* qconv plan MODEL: what fits where. It reads headers only, and writes nothing but the file of
 * --device-map. */
#include "convert/adapter/adapters.h"
#include "convert/cli/commands.h"
#include "convert/fit/device_map.h"
#include "convert/fit/fit_report.h"
#include "convert/fit/fit_suggest.h"
#include "convert/fit/model_shape.h"
#include "convert/fit/planned_model.h"
#include "convert/fit/plugin_share.h"
#include "convert/fit/tensor_parallel.h"
#include "convert/hardware/hardware.h"
#include "convert/known/claims.h"
#include "convert/known/known_models.h"
#include "convert/model/expert_split.h"
#include "convert/plan/engines.h"
#include "convert/run/make_manifest.h"
#include "convert/term/console.h"
#include "convert/term/target_file.h"
#include "formats/file_io.h"

#include <string.h>

#define MAX_TEXT_BYTES (1u << 30)

/* Without --vram the devices are this machine's GPUs, or its memory where it has none. */
static qc_status choose_devices(qc_budget *vram, qc_arena *arena, const qc_call *call,
                                qc_error *err)
{
    qc_hardware machine;
    if (vram->count)
        return QC_OK;
    QC_TRY(qc_hardware_read(&machine, arena, err));
    if (machine.gpu_count)
        return qc_budget_parse(vram, arena, "auto", err);
    qc_console_warn(call, "%s, so this plan is for the CPU; --vram names the devices to plan for",
                    machine.no_gpu ? machine.no_gpu : "this machine has no GPU");
    return qc_budget_parse(vram, arena, "cpu", err);
}

/* Makes the commands by which a plan that fits comes true. */
static qc_status make_commands(qc_fit_report *r, const qc_options *o, qc_error *err)
{
    const qc_known_model *known = r->has_weights ? NULL : qc_known_model_meant(r->model);
    const char *model = known ? strchr(known->id, '/') + 1 : r->model;
    qc_strbuf text;
    if (known)
        QC_TRY(qc_arena_printf(r->arena, &r->download, err, "hf download %s --local-dir %s",
                               known->id, model));
    qc_strbuf_init(&text, MAX_TEXT_BYTES);
    qc_shell_word(&text, strchr(o->program, '/') ? o->program : "qconv");
    if (!o->convert.plan.recipe.to_given)
        qc_strbuf_putf(&text, " --to %s", r->to);
    qc_strbuf_puts(&text, o->for_convert);
    if (!strstr(o->for_convert, "--vram "))
        qc_strbuf_putf(&text, " --vram %s", r->fit->budget->text);
    qc_strbuf_puts(&text, " --compress none ");
    qc_shell_word(&text, model);
    qc_strbuf_puts(&text, " OUT");
    qc_status st = qc_strbuf_status(&text, err);
    if (st == QC_OK)
        st = qc_arena_strndup(r->arena, &r->convert, text.data, text.len, err);
    qc_strbuf_deinit(&text);
    return st;
}

/* Says how a plan that fits comes true, and what loads the output then. */
static qc_status add_next(const qc_fit_report *r, const qc_options *o, qc_strbuf *out,
                          qc_error *err)
{
    qc_loaders plain = *r->loaders;
    plain.compressed = 0;
    qc_strbuf_puts(out, "\n");
    if (r->download)
        qc_strbuf_putf(out, "  %s\n", r->download);
    qc_strbuf_putf(out, "  %s\n", r->convert);
    if (r->fit->ranks == 0)
        return qc_next_steps_text(&plain, o->program, "OUT", out, err);
    qc_strbuf_puts(out, "  ");
    qc_fit_serve_text(r, out);
    qc_strbuf_puts(out, "\n");
    return QC_OK;
}

static qc_status print_plan(const qc_fit_report *r, const qc_options *o, qc_error *err)
{
    qc_strbuf out;
    qc_strbuf_init(&out, MAX_TEXT_BYTES);
    qc_status st = o->call.json ? qc_fit_report_json(r, &out, err)
                                : qc_fit_report_text(r, qc_bar_style_of_console(), &out, err);
    if (st == QC_OK && !o->call.json && o->convert.explain) {
        qc_strbuf_puts(&out, "\n");
        st = qc_auto_explain(r->chosen, o->call.verbose, &out, err);
    }
    if (st == QC_OK && !o->call.json && r->fit->fits)
        st = add_next(r, o, &out, err);
    return qc_console_deliver(st, &out, NULL, err);
}

/* Prints the longest context for prompts that are read whole, and for those read in steps. */
static qc_status find_contexts(qc_fit_report *r, const qc_planned_model *planned, qc_error *err)
{
    qc_fit_prefill *ways[] = {&r->whole, &r->steps};
    r->steps.tokens = r->use->prefill ? r->use->prefill : QC_USUAL_PREFILL;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        qc_fit_options use = *r->use;
        use.prefill = ways[i]->tokens;
        QC_TRY(qc_fit_max_context(&ways[i]->max_context, &planned->fit, &use,
                                  planned->largest_weight, err));
    }
    r->max_context = (r->use->prefill ? r->steps : r->whole).max_context;
    return QC_OK;
}

static qc_status plan_and_print(const qc_options *o, qc_arena *arena,
                                const qc_plan_subject *subject, qc_error *err)
{
    qc_planned_model planned;
    QC_TRY(qc_planned_model_make(&planned, arena, subject, &o->convert.plan, err));
    if (o->convert.plan.recipe.to == QC_TO_AUTO)
        for (unsigned i = 0; i < planned.chosen.note_count; i++)
            qc_console_warn(&o->call, "%s", planned.chosen.notes[i]);
    if (o->convert.plan.recipe.to_given)
        QC_TRY(qc_plan_check_quantizes(&planned.plan, o->model, err));
    QC_TRY(qc_planned_model_lay_out(&planned, err));
    qc_model_shape shape;
    qc_model_shape_of(&shape, &planned.plan, subject->geometry);
    qc_loaders loaders;
    /* A plan says nothing of compression, which convert decides. */
    QC_TRY(qc_engines_settle(&loaders, &planned.plan, o->engines, planned.fit.ranks, 0, &o->call,
                             err));
    if (planned.fit.ranks > 0 || o->engines & 1u << QC_ENGINE_VLLM)
        qc_budget_warn_vllm(&o->convert.plan.fit.vram, o->convert.plan.recipe.format, &o->call);
    qc_fit_report r = {.fit = &planned.fit,
                       .use = &o->convert.plan.fit,
                       .arena = arena,
                       .model = o->model,
                       .model_type = planned.recipe.model_type,
                       .to = qc_to_name(o->convert.plan.recipe.to),
                       .has_weights = subject->has_weights,
                       .file_bytes = planned.plan.content_bytes,
                       .generates = subject->geometry->decoder,
                       .chosen = o->convert.plan.recipe.to == QC_TO_AUTO ? &planned.chosen : NULL,
                       .loaders = &loaders,
                       .needs_plugin = qc_plugin_needed(&planned.plan),
                       .explain = o->convert.explain,
                       .shape = o->call.verbose ? &shape : NULL};
    QC_TRY(qc_fit_sum_schemes(&r, &planned.plan, err));
    if (r.generates) {
        QC_TRY(find_contexts(&r, &planned, err));
        QC_TRY(qc_fit_max_batch(&r.max_batch, &planned.fit, &o->convert.plan.fit,
                                planned.largest_weight, err));
    }
    if (o->convert.plan.recipe.to == QC_TO_AUTO && planned.fit.fits && r.generates)
        QC_TRY(qc_fit_compare(&r, arena, subject, &planned, &o->convert.plan, err));
    if (!planned.fit.fits)
        QC_TRY(qc_fit_suggest(&r, arena, subject, &planned, &o->convert.plan, err));
    if (o->device_map) {
        qc_strbuf map;
        qc_strbuf_init(&map, MAX_TEXT_BYTES);
        QC_TRY(qc_console_deliver(qc_device_map_text(&map, arena, &planned.fit, err), &map,
                                  o->device_map, err));
    }
    if (planned.fit.fits)
        QC_TRY(make_commands(&r, o, err));
    return print_plan(&r, o, err);
}

static qc_status plan_model(qc_options *o, qc_arena *arena, qc_checkpoint *model, int has_weights,
                            qc_error *err)
{
    qc_geometry geometry;
    QC_TRY(qc_checkpoint_check_model(model, err));
    if (has_weights)
        QC_TRY(qc_claims_check(model, o->convert.incomplete, err));
    QC_TRY(qc_experts_arrange(model, &o->convert.plan.recipe, err));
    QC_TRY(qc_adapters_attach(model, o->loras, err));
    for (size_t i = 0; i < model->warning_count; i++)
        qc_console_warn(&o->call, "%s", model->warnings[i]);
    QC_TRY(qc_geometry_read(&geometry, arena, model->config, err));
    qc_plan_subject subject = {&o->call, model, &geometry, has_weights, NULL, NULL};
    if (!model->config)
        qc_console_warn(&o->call, "there is no config.json beside the weights, so the KV cache "
                                  "cannot be worked out, and transformers cannot load the result");
    else if (geometry.cache_unknown)
        qc_console_warn(&o->call, "config.json does not say how many layers there are, so the KV "
                                  "cache cannot be worked out");
    else if (geometry.guessed)
        qc_console_warn(&o->call,
                        "model type '%s' is not known, so its KV cache is worked out from the "
                        "usual names of config.json",
                        geometry.model_type);
    QC_TRY(qc_plan_defaults(&o->convert.plan, arena, &subject, err));
    const char *old_card = qc_budget_card_without_int8(&o->convert.plan.fit.vram);
    if (o->convert.plan.recipe.to == QC_TO_INT8 && old_card)
        qc_console_warn(&o->call,
                        "bitsandbytes needs compute capability 7.5 to compute in int8, and %s has "
                        "less; --to nf4 runs there",
                        old_card);
    if (geometry.max_context && o->convert.plan.fit.context > geometry.max_context)
        qc_console_warn(&o->call, "--context %llu is beyond the model's limit of %llu tokens",
                        (unsigned long long)o->convert.plan.fit.context,
                        (unsigned long long)geometry.max_context);
    return plan_and_print(o, arena, &subject, err);
}

/* Says which model is planned where another name was typed. */
static void say_which(const qc_options *o, const qc_checkpoint *model, int has_weights)
{
    const char *hub = qc_hub_id_of(o->model), *id = hub ? hub : o->model;
    const qc_known_model *known = qc_known_model_meant(o->model);
    if (!has_weights && known && strcmp(model->path, known->id) == 0 && !qc_known_model_find(id))
        qc_console_warn(&o->call, "'%s' is taken as %s, %s", id, known->id,
                        qc_known_model_find(strchr(id, '/') ? strchr(id, '/') + 1 : "")
                            ? "which has the same name"
                            : "the only well-known model whose name begins so");
}

qc_status qc_cmd_plan(const qc_options *o, qc_error *err)
{
    qc_arena arena;
    qc_options own = *o;
    qc_checkpoint *model = NULL;
    int has_weights = 0;
    /* What is wrong with the question is said before a large model is opened. */
    QC_TRY(qc_target_file_check("--device-map", o->device_map, err));
    qc_arena_init(&arena);
    qc_status st = choose_devices(&own.convert.plan.fit.vram, &arena, &o->call, err);
    if (st == QC_OK)
        st = qc_model_open(&model, o->model, &has_weights, err);
    if (st == QC_OK)
        say_which(o, model, has_weights);
    if (st == QC_OK)
        st = qc_target_file_spares("--device-map", o->device_map, model, err);
    if (st == QC_OK)
        st = plan_model(&own, &arena, model, has_weights, err);
    qc_checkpoint_close(model);
    qc_arena_deinit(&arena);
    return st;
}
