#include "convert/placed_plan.h"

#include "convert/make_manifest.h"
#include "convert/size_text.h"

#include <string.h>

static qc_status check_fits(const qc_fit *fit, const qc_plan *plan, qc_error *err)
{
    const qc_options *o = plan->options;
    char bytes[QC_SIZE_TEXT_BYTES];
    if (fit->fits)
        return QC_OK;
    QC_FAIL(err, QC_ERR_CHECK,
            "%s: does not fit --vram %s with --to %s: short by %s on %s; see 'qconv plan'",
            o->model, o->fit.vram, qc_to_name(o->to), qc_text_bytes(bytes, fit->short_by_bytes),
            fit->devices[fit->short_device].device->name);
}

/* The device of every tensor of the source that is written. */
static qc_status set_devices(const qc_placed_plan *p, qc_plan *plan, qc_error *err)
{
    void *v = NULL;
    QC_TRY(qc_arena_alloc(plan->arena, &v, p->segments.tensor_count, sizeof(uint32_t), err));
    uint32_t *device_of = v;
    for (uint32_t i = 0; i < p->segments.tensor_count; i++) {
        uint32_t segment = p->segments.of_tensor[i];
        device_of[i] = segment == QC_NO_SEGMENT ? UINT32_MAX : p->fit.device_of[segment];
    }
    QC_TRY(qc_arena_alloc(plan->arena, &v, p->budget.count, sizeof(char *), err));
    const char **names = v;
    for (uint32_t i = 0; i < p->budget.count; i++)
        names[i] = p->budget.devices[i].name;
    return qc_plan_set_devices(plan, device_of, names, p->budget.count, err);
}

qc_status qc_placed_plan_make(qc_placed_plan *out, qc_plan *plan, qc_arena *arena,
                              const qc_checkpoint *model, qc_recipe *recipe, const qc_options *o,
                              qc_error *err)
{
    qc_placed_plan *p = out;
    uint64_t *segment_bytes = NULL, *largest_weight = NULL;
    memset(p, 0, sizeof *p);
    QC_TRY(qc_budget_parse(&p->budget, arena, o->fit.vram, err));
    QC_TRY(qc_geometry_read(&p->geometry, arena, model->config, err));
    QC_TRY(qc_segments_make(&p->segments, arena, model, recipe, &p->geometry, err));
    if (o->to == QC_TO_AUTO) {
        QC_TRY(qc_auto_choose(&p->choice, arena, recipe, model, 1, &p->segments, &p->geometry,
                              &p->budget, o, err));
        p->chosen = 1;
    }
    QC_TRY(qc_plan_begin(plan, arena, model, recipe, o, err));
    QC_TRY(qc_fit_sum_segments(arena, plan, &p->segments, &segment_bytes, &largest_weight, err));
    QC_TRY(qc_fit_make(&p->fit, arena, &p->segments, &p->geometry, segment_bytes, largest_weight,
                       &p->budget, &o->fit, err));
    QC_TRY(check_fits(&p->fit, plan, err));
    QC_TRY(set_devices(p, plan, err));
    return qc_plan_lay_out(plan, err);
}
