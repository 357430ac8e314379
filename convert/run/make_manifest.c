#include "convert/run/make_manifest.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/adapter/adapters.h"
#include "convert/fit/fit.h"
#include "convert/run/side_files.h"

#include <stddef.h>
#include <string.h>

/* Makes the digest over one digest, which lies at `offset`, of each of `count` units. */
static qc_status root_of(const qc_unit *units, uint32_t count, size_t offset, qc_digest *out,
                         qc_error *err)
{
    qc_digest *frames = NULL;
    QC_TRY(qc_malloc(&frames, (size_t)count * sizeof *frames, err));
    for (uint32_t i = 0; i < count; i++)
        memcpy(&frames[i], (const char *)&units[i] + offset, sizeof *frames);
    *out = qc_digest_root(frames, count);
    qc_free(frames);
    return QC_OK;
}

static qc_status fill_tensor(qc_manifest_tensor *t, qc_manifest_rows *rows, uint32_t tensor,
                             qc_error *err)
{
    const qc_pipeline *p = rows->p;
    const qc_plan *plan = p->plan;
    const qc_out_tensor o = qc_plan_tensor(plan, tensor);
    const qc_output *made = &plan->outputs[tensor];
    const qc_job *j = &plan->jobs[made->job];
    const qc_unit *units = &p->units[p->first_unit[tensor]];
    uint32_t count = qc_unit_count(p, tensor);
    QC_TRY(qc_out_tensor_name(&rows->name, &o, err));
    t->name = rows->name.data;
    t->dtype = o.st.dtype;
    t->ndim = o.st.ndim;
    memcpy(t->dims, o.st.dims, sizeof t->dims);
    t->begin = o.st.begin;
    t->end = o.st.end;
    t->piece_bytes = o.piece_bytes;
    t->shard = o.shard;
    QC_TRY(root_of(units, count, offsetof(qc_unit, content), &t->content, err));
    if (plan->options->compress) {
        QC_TRY(root_of(units, count, offsetof(qc_unit, stored), &t->stored, err));
        t->stored_offset = count ? units->file_offset : 0;
        for (uint32_t i = 0; i < count; i++)
            t->stored_bytes += units[i].stored_bytes;
    }
    if (made->role != QC_ROLE_TENSOR_MAIN) {
        t->scheme = "state";
        return QC_OK;
    }
    const qc_checkpoint_tensor *src = &plan->model->tensors[j->source];
    t->scheme = qc_scheme_name(j->scheme);
    t->source_name = src->name;
    t->source_dtype = src->dtype;
    t->source_piece_bytes = qc_plan_source_piece(plan, tensor);
    QC_TRY(root_of(units, count, offsetof(qc_unit, source), &t->source, err));
    if (qc_scheme_is_quantized(j->scheme)) {
        const qc_tensor_error *e = &p->jobs[made->job].error;
        t->has_error = 1;
        t->rel_mse = e->rel_mse;
        t->max_err = e->max_err;
        t->max_err_index = e->max_index;
        const qc_feedback_result *found = &p->jobs[made->job].outputs;
        rows->outputs = (qc_manifest_outputs){found->rounded, found->calibrated};
        if (found->rounded > 0)
            t->outputs = &rows->outputs;
    }
    return QC_OK;
}

static qc_status fill_shard(qc_manifest_shard *s, const qc_pipeline *p, uint32_t shard,
                            qc_error *err)
{
    const qc_shard *sh = &p->plan->layout.shards[shard];
    const qc_shard_state *state = &p->shards[shard];
    const qc_unit *units = &p->units[state->first_unit];
    uint32_t count = 0;
    while (count < state->unit_count && units[count].kind == QC_UNIT_HEADER)
        count++;
    s->name = sh->name;
    s->device = sh->device;
    s->content_bytes = sh->header_bytes + sh->data_bytes;
    s->header_bytes = sh->header_bytes;
    QC_TRY(root_of(units, count, offsetof(qc_unit, content), &s->header, err));
    if (!p->plan->options->compress)
        return QC_OK;
    s->file_bytes = state->file_bytes;
    for (uint32_t i = 0; i < count; i++)
        s->header_stored_bytes += units[i].stored_bytes;
    QC_TRY(root_of(units, count, offsetof(qc_unit, stored), &s->header_stored, err));
    s->table_bytes = state->table_bytes;
    s->table = state->table;
    return QC_OK;
}

static qc_status fill_placement(qc_manifest_placement *out, const qc_plan *plan, qc_error *err)
{
    const qc_fit_options *o = &plan->options->fit;
    *out = (qc_manifest_placement){.vram = o->vram,
                                   .margin = o->margin,
                                   .context = plan->placed_context,
                                   .batch = o->batch,
                                   .images = o->images,
                                   .kv_bits = o->kv_bits,
                                   .mla_expanded = o->mla_expanded,
                                   .device_count = plan->device_count};
    QC_TRY(
        qc_arena_alloc(plan->arena, &out->devices, plan->device_count, sizeof *out->devices, err));
    for (uint32_t i = 0; i < plan->device_count; i++)
        out->devices[i].name = plan->device_names[i];
    for (uint32_t i = 0; i < plan->layout.count; i++) {
        const qc_shard *s = &plan->layout.shards[i];
        qc_manifest_device *d = &out->devices[s->device];
        d->tensor_bytes += s->data_bytes;
        d->shard_bytes += s->header_bytes + s->data_bytes;
    }
    return QC_OK;
}

/* Shards follow one another in the plan's order, too. */
static qc_status fill_row(void *ctx, size_t i, qc_manifest_tensor *t, qc_error *err)
{
    qc_manifest_rows *rows = ctx;
    return fill_tensor(t, rows, rows->p->plan->layout.shards[0].order[i], err);
}

void qc_manifest_rows_deinit(qc_manifest_rows *rows)
{
    qc_strbuf_deinit(&rows->name);
}

static qc_status fill_adapters(qc_manifest *m, const qc_plan *plan, qc_error *err)
{
    const qc_attached_adapter *a = qc_adapters_of(plan->model, &m->adapter_count);
    QC_TRY(qc_arena_alloc(plan->arena, &m->adapters, m->adapter_count, sizeof *m->adapters, err));
    for (size_t i = 0; i < m->adapter_count; i++)
        m->adapters[i] = (qc_manifest_adapter){.name = a[i].adapter->name,
                                               .scale = a[i].scale,
                                               .config = a[i].adapter->config_digest,
                                               .bytes = a[i].adapter->weights->files[0].file_bytes,
                                               .weights = a[i].adapter->weights_digest};
    return QC_OK;
}

qc_status qc_manifest_head(qc_manifest *m, const qc_plan *plan, qc_error *err)
{
    const qc_plan_options *o = plan->options;
    const qc_checkpoint *model = plan->model;
    memset(m, 0, sizeof *m);
    m->qconv_version = QCONV_VERSION;
    m->compressed = o->compress;
    if (o->compress) {
        m->level = o->compress_level;
        m->zstd_version = qc_frame_library_version();
    }
    m->to = qc_to_name(o->recipe.to);
    const qc_scheme_row *row = &qc_schemes[qc_scheme_of_options(&o->recipe)];
    const int to_auto = o->recipe.to == QC_TO_AUTO, quantizes = row->to == o->recipe.to || to_auto;
    m->block_elems = o->recipe.block_elems;
    if (!m->block_elems && quantizes && !to_auto)
        m->block_elems = row->default_block;
    if (row->quant_type && (m->block_elems || to_auto))
        m->double_quant = o->recipe.double_quant;
    m->rest = qc_rest_name(o->recipe.rest);
    if (quantizes && row->quant_type && row->bits == 4)
        m->compute_dtype = qc_compute_dtype(plan);
    m->max_shard_bytes = o->max_shard_bytes;
    m->scale = o->recipe.scale == QC_SCALE_ABSMAX ? NULL : qc_scale_name(&o->recipe);
    m->rule_count = o->recipe.rule_count;
    QC_TRY(qc_arena_alloc(plan->arena, &m->rules, o->recipe.rule_count, sizeof *m->rules, err));
    for (uint32_t i = 0; i < o->recipe.rule_count; i++)
        QC_TRY(qc_arena_printf(plan->arena, &m->rules[i], err, "%s %s",
                               o->recipe.rules[i].quantize ? "quantize" : "keep",
                               o->recipe.rules[i].glob));
    if (plan->device_names)
        QC_TRY(fill_placement(&m->placement, plan, err));
    QC_TRY(fill_adapters(m, plan, err));
    m->source_count = model->file_count;
    QC_TRY(qc_arena_alloc(plan->arena, &m->sources, m->source_count, sizeof *m->sources, err));
    for (size_t i = 0; i < model->file_count; i++) {
        m->sources[i].name = model->files[i].name;
        m->sources[i].bytes = model->files[i].file_bytes;
        QC_TRY(qc_checkpoint_head_digest(model, i, &m->sources[i].header, err));
    }
    return QC_OK;
}

/* Returns the last component of a path, so that a manifest does not depend on where a file lies. */
static const char *base_name(const char *path)
{
    const char *end = path + strlen(path), *begin;
    while (end > path && end[-1] == '/')
        end--;
    for (begin = end; begin > path && begin[-1] != '/'; begin--)
        continue;
    return begin;
}

static qc_status name_of(const char **out, const qc_plan *plan, const char *path, qc_error *err)
{
    const char *name = base_name(path);
    size_t len = strcspn(name, "/");
    return qc_arena_strndup(plan->arena, out, name, len, err);
}

qc_status qc_manifest_add_calibration(qc_manifest *m, const qc_plan *plan,
                                      const qc_calibrate_report *r, qc_error *err)
{
    qc_manifest_calibration *c = NULL;
    QC_TRY(qc_arena_alloc(plan->arena, &c, 1, sizeof *m->calibration, err));
    *c = (qc_manifest_calibration){.damping = r->damping, .sided = r->sided == 2 ? "two" : "one"};
    m->calibration = c;
    if (r->hessians)
        return name_of(&c->hessians, plan, r->hessians, err);
    c->tokenizer = r->tokenizer;
    c->tokens = r->tokens;
    c->windows = r->windows;
    c->context = r->context;
    c->mix = r->mix;
    c->relative_rank = r->relative_rank;
    c->judged = r->judged;
    if (!r->text || !r->tokenizer || qc_digest_from_hex(&c->digest, r->text_digest) != 0)
        QC_FAIL(err, QC_ERR_INTERNAL, "calibrating does not say with what");
    return name_of(&c->text, plan, r->text, err);
}

qc_status qc_manifest_make(qc_manifest *m, qc_manifest_rows *rows, const qc_pipeline *p,
                           qc_manifest_file *files, size_t file_count, qc_error *err)
{
    const qc_plan *plan = p->plan;
    rows->p = p;
    qc_strbuf_init(&rows->name, SIZE_MAX / 2);
    QC_TRY(qc_manifest_head(m, plan, err));
    m->shard_count = plan->layout.count;
    QC_TRY(qc_arena_alloc(plan->arena, &m->shards, m->shard_count, sizeof *m->shards, err));
    for (uint32_t s = 0; s < plan->layout.count; s++)
        QC_TRY(fill_shard(&m->shards[s], p, s, err));
    m->tensor_count = plan->tensor_count;
    m->tensor_row = fill_row;
    m->tensor_ctx = rows;
    m->files = files;
    m->file_count = file_count;
    return QC_OK;
}

qc_status qc_manifest_stage(qc_output_dir *d, const qc_manifest *m, qc_digest *digest,
                            qc_error *err)
{
    qc_text_file text = QC_TEXT_FILE_NONE;
    const char *path = NULL;
    QC_TRY(qc_output_dir_manifest_path(d, &path, err));
    qc_status st = qc_text_file_open(&text, path, err);
    if (st == QC_OK)
        st = qc_manifest_write_file(m, &text, err);
    if (st == QC_OK)
        st = qc_text_file_finish(&text, err);
    if (st == QC_OK)
        *digest = qc_text_file_digest(&text);
    qc_text_file_deinit(&text);
    return st;
}
