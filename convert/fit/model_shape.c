#include "convert/fit/model_shape.h"

#include "base/checked.h"
#include "convert/fit/fit_report.h"

#include <string.h>

/* Returns the number in "...layers.12....", or UINT64_MAX. */
static uint64_t layer_of(const char *name)
{
    static const char *const marks[] = {"layers.", "layer.", "h.", "blocks."};
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        const char *at = strstr(name, marks[i]);
        if (!at || (at != name && at[-1] != '.'))
            continue;
        uint64_t n = 0;
        const char *s = at + strlen(marks[i]);
        if (*s < '0' || *s > '9')
            continue;
        for (; *s >= '0' && *s <= '9' && n < 1000000; s++)
            n = n * 10 + (uint64_t)(*s - '0');
        return n;
    }
    return UINT64_MAX;
}

void qc_model_shape_of(qc_model_shape *out, const qc_plan *plan, const qc_geometry *geometry)
{
    *out = (qc_model_shape){.geometry = geometry};
    uint64_t layer = UINT64_MAX, layer_elems = 0;
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_job *j = &plan->jobs[i];
        uint64_t elems = qc_fit_parameters_of(plan, j);
        uint64_t of = layer_of(plan->model->tensors[j->source].name);
        if (of != layer) { /* jobs come layer by layer */
            layer = of;
            layer_elems = 0;
        }
        layer_elems = of == UINT64_MAX ? 0 : qc_sat_add(layer_elems, elems);
        out->largest_layer = qc_max_u64(out->largest_layer, layer_elems);
        if (j->entry->role != QC_ROLE_LINEAR || j->form.cols == j->elems)
            continue;
        out->linear_sides = qc_sat_add(out->linear_sides, qc_sat_add(j->rows, j->form.cols));
        out->largest_linear = qc_max_u64(out->largest_linear, elems);
    }
}

void qc_model_shape_json(const qc_model_shape *s, qc_json_writer *w)
{
    const qc_geometry *g = s->geometry;
    qc_json_begin_object(w, "model_shape");
    qc_json_put_u64(w, "layers", g->layer_count);
    qc_json_put_u64(w, "hidden", g->hidden);
    qc_json_put_u64(w, "intermediate", g->intermediate);
    qc_json_put_u64(w, "heads", g->heads);
    qc_json_put_u64(w, "kv_heads", g->kv_heads);
    qc_json_put_u64(w, "head_dim", g->head_dim);
    qc_json_put_u64(w, "vocab", g->vocab);
    qc_json_put_u64(w, "linear_sides", s->linear_sides);
    qc_json_put_u64(w, "largest_linear", s->largest_linear);
    qc_json_put_u64(w, "largest_layer", s->largest_layer);
    qc_json_end(w);
}
