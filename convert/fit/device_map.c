#include "convert/fit/device_map.h"
#include "convert/term/glob.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    const char *module;
    uint32_t device;
} map_row;

static int compare_rows(const void *pa, const void *pb)
{
    const map_row *a = pa, *b = pb;
    int c = qc_natural_compare(a->module, b->module);
    return c ? c : strcmp(a->module, b->module);
}

/* For models of text and images, transformers 4.52 renamed the modules that it makes of the same
 * checkpoint:
 *   language_model.model.X -> model.language_model.X, language_model.lm_head -> lm_head,
 *   vision_model -> model.vision_model, ...
 * The map has both names: each version takes its own and passes over the other. */
static const char old_text[] = "language_model.model.", old_head[] = "language_model.lm_head";

static qc_status new_name(const char **out, qc_arena *arena, const char *old, qc_error *err)
{
    if (strncmp(old, old_text, sizeof old_text - 1) == 0)
        return qc_arena_printf(arena, out, err, "model.language_model.%s",
                               old + sizeof old_text - 1);
    if (strcmp(old, old_head) == 0) {
        *out = "lm_head";
        return QC_OK;
    }
    return qc_arena_printf(arena, out, err, "model.%s", old);
}

qc_status qc_device_map_put(qc_json_writer *w, const char *key, qc_arena *arena, const qc_fit *fit,
                            qc_error *err)
{
    const qc_segments *s = fit->segments;
    size_t count = 0;
    for (uint32_t i = 0; i < s->count; i++)
        count += s->segments[i].module_count;
    map_row *rows = NULL;
    QC_TRY(qc_arena_array(arena, &rows, count * 2, err));
    count = 0;
    for (uint32_t i = 0; i < s->count; i++)
        for (uint32_t m = 0; m < s->segments[i].module_count; m++)
            rows[count++] = (map_row){s->segments[i].modules[m], fit->device_of[i]};
    int has_old = 0;
    for (size_t i = 0; i < count; i++)
        has_old |= strncmp(rows[i].module, old_text, sizeof old_text - 1) == 0;
    if (has_old) {
        for (size_t i = 0; i < count; i++) {
            rows[count + i].device = rows[i].device;
            QC_TRY(new_name(&rows[count + i].module, arena, rows[i].module, err));
        }
        count *= 2;
    }
    if (count)
        qsort(rows, count, sizeof *rows, compare_rows);
    qc_json_begin_object(w, key);
    for (size_t i = 0; i < count; i++) {
        if (i > 0 && strcmp(rows[i - 1].module, rows[i].module) == 0)
            QC_FAIL(err, QC_ERR_INTERNAL, "the module '%s' lies in two segments", rows[i].module);
        const qc_tier tier = fit->budget->devices[rows[i].device].tier;
        if (tier == QC_TIER_GPU) /* GPUs are the first ones of a budget */
            qc_json_put_u64(w, rows[i].module, rows[i].device);
        else
            qc_json_put_text(w, rows[i].module, tier == QC_TIER_CPU ? "cpu" : "disk");
    }
    qc_json_end(w);
    return QC_OK;
}

qc_status qc_device_map_text(qc_strbuf *out, qc_arena *arena, const qc_fit *fit, qc_error *err)
{
    qc_json_writer w;
    qc_json_write_init(&w, out, err);
    QC_TRY(qc_device_map_put(&w, NULL, arena, fit, err));
    QC_TRY(qc_json_write_finish(&w));
    return qc_strbuf_adds(out, "\n", err);
}
