#include "convert/run/plan_print.h"

#include "convert/fit/auto_choice.h"
#include "convert/plan/loaders.h"
#include "convert/term/console.h"
#include "convert/term/json_members.h"
#include "convert/term/size_text.h"
#include "convert/term/table.h"

#include <inttypes.h>

static uint64_t job_bytes(const qc_plan *p, const qc_job *j)
{
    uint64_t bytes = 0;
    for (int part = 0; part < QC_PART_COUNT; part++) {
        uint32_t t = j->outputs[part];
        if (t != QC_NO_OUTPUT)
            bytes += qc_plan_tensor_bytes(p, t);
    }
    return bytes;
}

static const char *device_name(const qc_plan *p, const qc_job *j)
{
    return p->device_names[j->device];
}

static qc_status print_table(qc_strbuf *out, const qc_plan *p, const qc_convert_report *totals,
                             qc_error *err)
{
    qc_table t;
    qc_table_init(&t, p->arena);
    qc_table_column(&t, "tensor", QC_ALIGN_LEFT);
    qc_table_column(&t, "dtype", QC_ALIGN_LEFT);
    qc_table_column(&t, "shape", QC_ALIGN_LEFT);
    qc_table_column(&t, "becomes", QC_ALIGN_LEFT);
    qc_table_column(&t, "bytes before", QC_ALIGN_RIGHT);
    qc_table_column(&t, "after", QC_ALIGN_RIGHT);
    if (p->device_names)
        qc_table_column(&t, "device", QC_ALIGN_LEFT);
    qc_table_column(&t, "why", QC_ALIGN_LEFT);
    for (uint32_t i = 0; i < p->job_count; i++) {
        const qc_job *j = &p->jobs[i];
        const qc_ckpt_tensor *src = &p->model->tensors[j->source];
        char shape[QC_SHAPE_TEXT_BYTES];
        QC_TRY(qc_table_cell(&t, src->name, err));
        QC_TRY(qc_table_cell(&t, qc_dtype_name(src->dtype), err));
        QC_TRY(qc_table_cell(&t, qc_text_shape(shape, src->dims, src->ndim), err));
        QC_TRY(qc_table_cellf(&t, err, "%s%s", qc_scheme_name(j->scheme),
                              j->entry->transpose ? ", transposed" : ""));
        QC_TRY(qc_table_cellf(&t, err, "%" PRIu64, src->bytes));
        QC_TRY(qc_table_cellf(&t, err, "%" PRIu64, job_bytes(p, j)));
        if (p->device_names)
            QC_TRY(qc_table_cell(&t, device_name(p, j), err));
        QC_TRY(qc_table_cell(&t, j->entry->why, err));
    }
    QC_TRY(qc_table_render(&t, 0, out, err));
    return qc_report_text(totals, out, err);
}

static qc_status print_json(qc_strbuf *out, const qc_plan *p, const qc_convert_report *totals,
                            qc_error *err)
{
    qc_json_writer w;
    qc_jw_init(&w, out, err);
    qc_jw_begin_object(&w);
    qc_jm_string(&w, "command", "dry-run");
    qc_jm_string(&w, "model_type", p->recipe->model_type);
    qc_jm_bool(&w, "known_type", p->recipe->known_type);
    qc_jm_u64(&w, "source_bytes", p->source_bytes);
    qc_jm_u64(&w, "tensor_bytes", p->tensor_bytes);
    qc_jm_u64(&w, "file_bytes", p->content_bytes);
    qc_jm_u64(&w, "weights_quantized", p->weights_quantized);
    qc_jm_u64(&w, "quantized_bytes", p->quantized_bytes);
    qc_jm_begin_array(&w, "shards");
    for (uint32_t i = 0; i < p->layout.count; i++) {
        const qc_shard *s = &p->layout.shards[i];
        qc_jm_begin_row(&w);
        qc_jm_string(&w, "name", s->name);
        qc_jm_u64(&w, "bytes", s->header_bytes + s->data_bytes);
        if (p->device_names) {
            qc_jm_string(&w, "device", p->device_names[s->device]);
        }
        qc_jw_end_object(&w);
    }
    qc_jw_end_array(&w);
    qc_jm_begin_array(&w, "skip_modules");
    for (uint32_t i = 0; i < p->recipe->skip_count; i++)
        qc_jw_string(&w, p->recipe->skip_modules[i]);
    qc_jw_end_array(&w);
    qc_jm_begin_array(&w, "tensors");
    for (uint32_t i = 0; i < p->job_count; i++) {
        const qc_job *j = &p->jobs[i];
        const qc_ckpt_tensor *src = &p->model->tensors[j->source];
        qc_jm_begin_row(&w);
        qc_jm_string(&w, "name", src->name);
        qc_jm_string(&w, "dtype", qc_dtype_name(src->dtype));
        qc_jm_u64s(&w, "shape", src->dims, src->ndim);
        qc_jm_string(&w, "scheme", qc_scheme_name(j->scheme));
        qc_jm_string(&w, "role", qc_role_name(j->entry->role));
        qc_jm_bool(&w, "transposed", j->entry->transpose);
        qc_jm_string(&w, "why", j->entry->why);
        qc_jm_u64(&w, "bytes_before", src->bytes);
        qc_jm_u64(&w, "bytes_after", job_bytes(p, j));
        qc_jm_u64(&w, "shard", qc_plan_tensor(p, j->outputs[QC_PART_MAIN]).shard);
        if (p->device_names) {
            qc_jm_string(&w, "device", device_name(p, j));
        }
        qc_jw_end_object(&w);
    }
    qc_jw_end_array(&w);
    qc_report_calibration_json(totals, &w);
    if (totals->choice) {
        qc_jw_key(&w, "auto");
        qc_auto_json(totals->choice, totals->explain, &w);
    }
    if (totals->loaders)
        QC_TRY(qc_next_steps_json(totals->loaders, totals->program, NULL, &w, err));
    qc_jw_end_object(&w);
    QC_TRY(qc_jw_finish(&w));
    return qc_strbuf_adds(out, "\n", err);
}

qc_status qc_plan_print(const qc_plan *plan, const qc_convert_report *totals, qc_error *err)
{
    qc_strbuf out;
    qc_strbuf_init(&out, SIZE_MAX / 2);
    qc_status st = plan->call->json ? print_json(&out, plan, totals, err)
                                    : print_table(&out, plan, totals, err);
    if (st == QC_OK)
        st = qc_console_result(&out, err);
    qc_strbuf_deinit(&out);
    return st;
}
