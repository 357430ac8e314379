#include "convert/fit/planned_model.h"

#include "base/checked.h"
#include "convert/fit/plugin_share.h"
#include "convert/fit/tensor_parallel.h"
#include "convert/model/recipe_coded.h"
#include "convert/term/glob.h"
#include "convert/term/size_text.h"

#include <string.h>

/* Do weights that have 4 bits or fewer already hold most of the parameters? */
static int has_few_bits(const qc_recipe *recipe, const qc_checkpoint *model)
{
    enum { FEW_BITS = 4 };
    uint64_t few = 0, all = 0;
    for (size_t i = 0; i < model->tensor_count; i++) {
        const qc_coded_weight *w = recipe->entries[i].coded;
        uint64_t elems = 0;
        if (recipe->entries[i].owner != UINT32_MAX ||
            qc_shape_elems(w ? w->dims : model->tensors[i].dims,
                           w ? w->ndim : model->tensors[i].ndim, &elems, NULL) != QC_OK)
            continue;
        all = qc_sat_add(all, elems);
        few = qc_sat_add(few, w && qc_coded_bits(w) <= FEW_BITS ? elems : 0);
    }
    return few > all / 2;
}

qc_status qc_plan_defaults(qc_plan_options *options, qc_arena *arena,
                           const qc_plan_subject *subject, qc_error *err)
{
    qc_fit_options *fit = &options->fit;
    fit->context = qc_fit_context(subject->geometry, fit);
    if (options->recipe.to_given)
        return QC_OK;
    /* This recipe keeps everything, which refuses no checkpoint, and so it finds out what this one
     * is. */
    qc_recipe_options probe = options->recipe;
    qc_recipe recipe;
    probe.to = QC_TO_KEEP;
    probe.rules = NULL;
    probe.rule_count = 0;
    QC_TRY(qc_recipe_make(&recipe, arena, subject->model, &probe, err));
    const int keeps = recipe.input_is_quantized || fit->parallel == QC_PARALLEL_TENSOR ||
                      (!probe.requantize && has_few_bits(&recipe, subject->model));
    options->recipe.to = keeps ? QC_TO_KEEP : QC_TO_NF4;
    return QC_OK;
}

/* Replaces the geometry by that of one card, and sums up its bytes. vLLM's kernels do not
 * dequantize whole weights, those of qconv's plug-in may. */
static qc_status take_share(qc_planned_model *m, qc_arena *arena, uint32_t ranks, qc_error *err)
{
    const qc_geometry whole = m->geometry;
    QC_TRY(qc_arena_array(arena, &m->largest_weight, m->segments.count, err));
    QC_TRY(qc_tp_geometry(&m->geometry, arena, &whole, ranks, err));
    const qc_tp_split split = {qc_family_of(m->plan.model), &whole, ranks};
    for (uint32_t i = 0; i < m->plan.job_count; i++) {
        const qc_job *j = &m->plan.jobs[i];
        uint32_t segment = m->segments.of_tensor[j->source];
        if (segment < m->segments.count && qc_plugin_serves(j))
            m->largest_weight[segment] =
                qc_max_u64(m->largest_weight[segment], qc_plugin_job_elems(&m->plan, j, &split));
    }
    return qc_tp_sum_segments(&m->segment_bytes, arena, &m->plan, &m->segments, &split, err);
}

/* Places what is planned on the devices of the options. */
static qc_status place(qc_planned_model *out, qc_arena *arena, const qc_plan_subject *subject,
                       const qc_plan_options *options, qc_error *err)
{
    const uint32_t ranks = qc_tp_ranks(&options->fit);
    out->geometry = *subject->geometry;
    if (ranks > 0)
        QC_TRY(take_share(out, arena, ranks, err));
    else
        QC_TRY(qc_fit_sum_segments(arena, &out->plan, &out->segments, &out->segment_bytes,
                                   &out->largest_weight, err));
    const qc_fit_load load = {&out->segments, &out->geometry, out->segment_bytes,
                              out->largest_weight};
    QC_TRY(qc_fit_make(&out->fit, arena, &load, &options->fit, err));
    out->fit.weight_bytes = out->plan.tensor_bytes;
    return qc_fit_count_experts(&out->fit, &out->plan, err);
}

static qc_status choose_recipe(qc_planned_model *out, qc_arena *arena,
                               const qc_plan_subject *subject, const qc_plan_options *options,
                               qc_error *err)
{
    QC_TRY(qc_recipe_make(&out->recipe, arena, subject->model, &options->recipe, err));
    QC_TRY(qc_segments_make(&out->segments, arena, subject->model, &out->recipe, subject->geometry,
                            err));
    if (options->recipe.to != QC_TO_AUTO)
        return QC_OK;
    return qc_auto_choose(&out->chosen, arena, &out->recipe, subject, &out->segments, options, err);
}

/* Where not even the smallest choice fits, an output head in integers may help, which engines of
 * compressed-tensors read. It is otherwise left in 16 bits, and no rule may name it. */
static qc_status try_head(qc_planned_model *out, qc_arena *arena, const qc_plan_subject *subject,
                          const qc_plan_options *options, qc_error *err)
{
    const qc_checkpoint *model = subject->model;
    const uint32_t head = qc_checkpoint_find_index(model, "lm_head.weight");
    qc_planned_model with = {0};
    qc_plan_options trial = *options;
    qc_recipe_options *r = &trial.recipe;
    qc_error trouble = {0};
    if (out->chosen.fits || out->chosen.spills || r->to != QC_TO_AUTO ||
        r->format != QC_FORMAT_COMPRESSED_TENSORS || head == UINT32_MAX ||
        out->recipe.entries[head].role != QC_ROLE_HEAD)
        return QC_OK;
    for (uint32_t i = 0; i < r->rule_count; i++)
        if (qc_glob_match(r->rules[i].glob, model->tensors[head].name))
            return QC_OK;
    QC_TRY(qc_arena_array(arena, &r->rules, (size_t)r->rule_count + 1, err));
    for (uint32_t i = 0; i < r->rule_count; i++)
        r->rules[i] = options->recipe.rules[i];
    r->rules[r->rule_count++] = (qc_rule){1, model->tensors[head].name};
    const qc_status st = choose_recipe(&with, arena, subject, &trial, &trouble);
    if (st != QC_OK || !with.chosen.fits) /* a head that is tied is no help, for one */
        return st == QC_ERR_NOMEM || st == QC_ERR_INTERRUPTED || st == QC_ERR_IO ? st : QC_OK;
    with.chosen.notes[with.chosen.note_count++] =
        "nothing fits with lm_head.weight in 16 bits, so it is quantized, too";
    *out = with;
    return QC_OK;
}

qc_status qc_planned_model_make(qc_planned_model *out, qc_arena *arena,
                                const qc_plan_subject *subject, const qc_plan_options *options,
                                qc_error *err)
{
    memset(out, 0, sizeof *out);
    uint32_t ranks = qc_tp_ranks(&options->fit);
    if (ranks > 0 && options->recipe.to == QC_TO_AUTO && !options->fit.plugin &&
        options->recipe.format != QC_FORMAT_COMPRESSED_TENSORS)
        QC_FAIL(err, QC_ERR_USAGE,
                "--to auto with --tp needs --format compressed-tensors, which vLLM splits over "
                "cards by itself, or --for vllm-qconv, whose plug-in splits NF4 and int8 too");
    if (ranks > 0)
        QC_TRY(qc_tp_check(&options->fit, subject->model, subject->geometry, err));
    QC_TRY(choose_recipe(out, arena, subject, options, err));
    QC_TRY(try_head(out, arena, subject, options, err));
    QC_TRY(qc_plan_begin(&out->plan, arena, subject->model, &out->recipe, subject->call, options,
                         err));
    out->geometry = *subject->geometry;
    return options->fit.vram.count ? place(out, arena, subject, options, err) : QC_OK;
}

qc_status qc_planned_model_replace(qc_planned_model *out, qc_arena *arena,
                                   const qc_planned_model *m, const qc_plan_subject *subject,
                                   const qc_plan_options *options, qc_error *err)
{
    *out = *m;
    if (qc_tp_ranks(&options->fit) > 0)
        QC_TRY(qc_tp_check(&options->fit, subject->model, subject->geometry, err));
    return place(out, arena, subject, options, err);
}

qc_status qc_planned_model_lay_out(qc_planned_model *m, qc_error *err)
{
    const qc_segments *s = &m->segments;
    const qc_budget *b = m->fit.budget;
    const char **names = NULL;
    uint32_t *device_of = NULL;
    if (m->fit.ranks > 0 || !b)
        return qc_plan_lay_out(&m->plan, err);
    QC_TRY(qc_arena_array(m->plan.arena, &device_of, s->tensor_count, err));
    for (uint32_t i = 0; i < s->tensor_count; i++) {
        uint32_t segment = s->of_tensor[i];
        device_of[i] = segment == QC_NO_SEGMENT ? UINT32_MAX : m->fit.device_of[segment];
    }
    QC_TRY(qc_arena_array(m->plan.arena, &names, b->count, err));
    for (uint32_t i = 0; i < b->count; i++)
        names[i] = b->devices[i].name;
    QC_TRY(qc_plan_set_devices(&m->plan, device_of, names, b->count, m->fit.context, err));
    return qc_plan_lay_out(&m->plan, err);
}

qc_status qc_planned_model_check(const qc_planned_model *m, const char *path, qc_error *err)
{
    const qc_plan_options *o = m->plan.options;
    char bytes[QC_SIZE_TEXT_BYTES];
    if (m->fit.fits || !m->fit.budget)
        return QC_OK;
    QC_FAIL(err, QC_ERR_CHECK,
            "%s does not fit --vram %s with --to %s: it is short by %s on %s; 'qconv plan' shows "
            "what would fit",
            path, o->fit.vram.text, qc_to_name(o->recipe.to),
            qc_text_bytes(bytes, m->fit.short_by_bytes),
            m->fit.devices[m->fit.short_device].device->name);
}
