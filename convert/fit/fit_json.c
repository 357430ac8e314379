/* Writes what `qconv plan --json` answers. */
#include "convert/fit/device_map.h"
#include "convert/fit/fit_report.h"
#include "convert/fit/model_shape.h"
#include "convert/plan/loaders.h"
#include "convert/term/size_text.h"
#include "formats/json_rows.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Writes null for "no limit", because 2^64 - 1 would be taken for a size, and for what has no
 * answer: a model without a cache has no longest context. */
static void put_limit(qc_json_writer *w, const char *key, int known, uint64_t v)
{
    qc_json_put_u64_if(w, key, known && v != QC_NO_LIMIT, v);
}

static void put_device(qc_json_writer *w, const qc_fit_device *d, int cache_known)
{
    qc_json_begin_row(w, NULL);
    qc_json_put_text(w, "name", d->device->name);
    qc_json_put_text(w, "card", d->device->card ? d->device->card->name : NULL);
    put_limit(w, "total_bytes", 1, d->device->total_bytes);
    put_limit(w, "budget_bytes", 1, d->budget_bytes);
    qc_json_put_u64(w, "weight_bytes", d->weight_bytes);
    qc_json_put_u64_if(w, "kv_bytes", cache_known, d->kv_bytes);
    qc_json_put_u64(w, "workspace_bytes", d->workspace_bytes);
    qc_json_put_u64(w, "context_bytes", d->context_bytes);
    put_limit(w, "free_bytes", d->budget_bytes != QC_NO_LIMIT, d->free_bytes);
    qc_json_put_u64(w, "short_by_bytes", d->short_by_bytes);
    qc_json_put_u64(w, "layers", d->layers);
    qc_json_put_u64_if(w, "first_layer", d->layers > 0, d->first_layer);
    qc_json_end(w);
}

static const qc_json_row scheme_rows[] = {
    QC_JSON_ROW(qc_fit_scheme, tensors, U64, 0),
    QC_JSON_ROW(qc_fit_scheme, weights, U64, 0),
    QC_JSON_ROW(qc_fit_scheme, bytes, U64, 0),
    {NULL},
};

/* Writes how prompts are assumed to be read, and the longest context for that way and the other. */
static void put_prefill(qc_json_writer *w, const qc_fit_report *r)
{
    const qc_fit_prefill *ways[] = {&r->whole, &r->steps};
    qc_json_put_u64_if(w, "prefill_tokens", r->use->prefill > 0, r->use->prefill);
    qc_json_begin_row(w, "max_context_by_prefill");
    for (size_t i = 0; i < sizeof ways / sizeof *ways && r->generates; i++) {
        char key[QC_SIZE_TEXT_BYTES] = "whole";
        if (ways[i]->tokens)
            (void)snprintf(key, sizeof key, "%" PRIu64, ways[i]->tokens);
        put_limit(w, key, 1, ways[i]->max_context);
    }
    qc_json_end(w);
}

/* Writes the sentences that explain the budgets. */
static qc_status put_notes(qc_json_writer *w, const qc_fit_report *r, qc_error *err)
{
    qc_strbuf notes;
    qc_strbuf_init(&notes, 1u << 20);
    qc_fit_budget_notes(r, "", &notes);
    qc_status st = qc_strbuf_status(&notes, err);
    qc_json_begin_list(w, "budget_notes");
    for (char *line = notes.data; st == QC_OK && line && *line;) {
        char *end = strchr(line, '\n');
        *end = '\0';
        qc_json_put_text(w, NULL, line);
        line = end + 1;
    }
    qc_json_end(w);
    qc_strbuf_deinit(&notes);
    return st;
}

/* Writes how the model lies on the cards, and the command that serves it where it is split. */
static qc_status put_parallel(qc_json_writer *w, const qc_fit_report *r, qc_error *err)
{
    qc_strbuf command;
    int split = r->fit->ranks > 0;
    qc_strbuf_init(&command, 1u << 12);
    qc_fit_serve_text(r, &command);
    qc_status st = qc_strbuf_status(&command, err);
    qc_json_put_text(w, "parallel", split ? "tensor" : "layers");
    qc_json_put_u64_if(w, "tensor_parallel", split, r->fit->ranks);
    qc_json_put_text(w, "vllm", split && r->fit->fits && st == QC_OK ? command.data : NULL);
    qc_json_put_bool(w, "vllm_needs_plugin", split && r->needs_plugin);
    qc_strbuf_deinit(&command);
    return st;
}

qc_status qc_fit_report_json(const qc_fit_report *r, qc_strbuf *out, qc_error *err)
{
    const qc_fit *fit = r->fit;
    int cache_known = !fit->geometry->cache_unknown, mla = qc_fit_has_mla(fit->geometry);
    qc_json_writer w;
    qc_json_begin_text(&w, out, err);
    qc_json_put_text(&w, "command", "plan");
    qc_json_put_path(&w, "model", r->model);
    qc_json_put_text(&w, "model_type", *r->model_type ? r->model_type : NULL);
    qc_json_put_bool(&w, "has_weights", r->has_weights);
    qc_json_put_text(&w, "to", r->to);
    qc_json_put_text(&w, "vram", fit->budget->text);
    qc_json_put_double(&w, "margin", r->use->margin);
    qc_json_put_u64(&w, "parameters", r->parameters);
    qc_json_put_u64(&w, "weight_bytes", fit->weight_bytes);
    qc_json_put_u64(&w, "file_bytes", r->file_bytes);
    qc_json_put_u64(&w, "context", r->use->context);
    qc_json_put_u64(&w, "batch", r->use->batch);
    QC_TRY(put_parallel(&w, r, err));
    qc_json_put_text(&w, "mla", mla ? qc_fit_mla_name(r->use) : NULL);
    qc_json_put_text(&w, "mla_runtime", mla ? qc_fit_mla_runtime(r->use) : NULL);
    qc_json_put_u64_if(&w, "kv_bytes_per_token", cache_known, fit->kv_bytes_per_token);
    qc_json_put_u64_if(&w, "kv_bytes", cache_known, fit->kv_bytes);
    qc_json_begin_list(&w, "devices");
    for (uint32_t i = 0; i < fit->budget->count; i++)
        put_device(&w, &fit->devices[i], cache_known);
    qc_json_end(&w);
    qc_json_put_bool(&w, "fits", fit->fits);
    qc_json_put_u64(&w, "short_by_bytes", fit->short_by_bytes);
    qc_json_put_text(&w, "short_device",
                     fit->fits ? NULL : fit->budget->devices[fit->short_device].name);
    qc_json_begin_object(&w, "schemes");
    for (uint32_t i = 0; i < r->scheme_count; i++)
        qc_json_put_row(&w, r->schemes[i].name, scheme_rows, 0, &r->schemes[i]);
    qc_json_end(&w);
    if (r->loaders)
        QC_TRY(qc_next_steps_json(r->loaders, "", NULL, &w, err));
    if (r->chosen)
        qc_auto_json(r->chosen, r->explain, &w);
    else
        qc_json_put_null(&w, "auto");
    put_limit(&w, "max_context", r->generates && cache_known, r->max_context);
    put_prefill(&w, r);
    put_limit(&w, "max_batch", r->generates && cache_known, r->max_batch);
    qc_json_put_u64(&w, "transfer_bytes_per_token", fit->transfer_bytes_per_token);
    qc_json_put_double(&w, "transfer_seconds_per_token", fit->transfer_seconds);
    if (fit->ranks > 0)
        qc_json_put_null(&w, "device_map");
    else
        QC_TRY(qc_device_map_put(&w, "device_map", r->arena, fit, err));
    qc_json_begin_list(&w, "choices");
    for (uint32_t i = 0; i < r->choice_count; i++) {
        const qc_fit_choice *c = &r->choices[i];
        qc_json_begin_row(&w, NULL);
        qc_json_put_text(&w, "change", i == 0 ? NULL : c->change);
        put_limit(&w, "max_context", 1, c->max_context);
        qc_json_put_number(&w, "predicted_error", c->predicted);
        qc_json_put_text(&w, "own_form", c->own_form);
        qc_json_end(&w);
    }
    qc_json_end(&w);
    QC_TRY(put_notes(&w, r, err));
    qc_json_begin_list(&w, "suggestions");
    for (uint32_t i = 0; i < r->suggestion_count; i++)
        qc_json_put_text(&w, NULL, r->suggestions[i].sentence);
    qc_json_end(&w);
    qc_json_put_text(&w, "download", r->download);
    qc_json_put_text(&w, "convert", r->convert);
    if (r->shape)
        qc_model_shape_json(r->shape, &w);
    return qc_json_end_text(&w);
}
