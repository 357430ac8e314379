#include "convert/device/bench.h"
#include "convert/term/json_members.h"

/* Writes null if it was not measured. */
static void put_spread(qc_json_writer *w, const char *key, qc_bench_spread s)
{
    qc_jw_key(w, key);
    if (!s.samples) {
        qc_jw_null(w);
        return;
    }
    qc_jw_compact_next(w);
    qc_jw_begin_object(w);
    qc_jm_double(w, "median", s.median);
    qc_jm_double(w, "p10", s.p10);
    qc_jm_double(w, "p90", s.p90);
    qc_jm_u64(w, "samples", s.samples);
    qc_jw_end_object(w);
}

static void put_device(qc_json_writer *w, const qc_bench_device *d)
{
    qc_jw_key(w, "device");
    qc_jw_begin_object(w);
    qc_jm_string(w, "name", d->name);
    qc_jm_string(w, "pci", d->pci);
    qc_jm_u64(w, "sm", d->sm);
    qc_jm_u64(w, "multiprocessors", d->multiprocessors);
    qc_jm_u64(w, "memory_bytes", d->memory_bytes);
    qc_jm_u64(w, "l2_bytes", d->l2_bytes);
    qc_jm_u64(w, "driver_version", (uint64_t)d->driver_version);
    qc_jm_u64(w, "runtime_version", (uint64_t)d->runtime_version);
    qc_jm_string(w, "kernels", d->build);
    qc_jm_string(w, "no_gemm", d->no_gemm);
    qc_jw_end_object(w);
}

static void put_roof(qc_json_writer *w, const qc_bench_roof *r)
{
    qc_jw_key(w, "roof");
    qc_jw_begin_object(w);
    qc_jm_u64(w, "copy_bytes", r->copy_bytes);
    put_spread(w, "copy_gbps", r->copy_gbps);
    qc_jm_u64(w, "gemm_size", r->gemm_size);
    put_spread(w, "gemm_tflops", r->gemm_tflops);
    put_spread(w, "launch_us", r->launch_us);
    qc_jm_u64(w, "host_bytes", r->host_bytes);
    put_spread(w, "to_device_gbps", r->to_device_gbps);
    put_spread(w, "to_host_gbps", r->to_host_gbps);
    qc_jw_end_object(w);
}

static void put_kernel(qc_json_writer *w, const qc_bench_kernel *k, const qc_bench_roof *roof)
{
    qc_jw_begin_object(w);
    qc_jm_string(w, "name", k->name);
    qc_jm_u64(w, "rows", k->rows);
    qc_jm_u64(w, "cols", k->cols);
    qc_jm_u64(w, "bytes", k->bytes);
    put_spread(w, "gbps", k->gbps);
    qc_jm_double(w, "of_copy",
                 roof->copy_gbps.median > 0 ? k->gbps.median / roof->copy_gbps.median : 0);
    qc_jw_end_object(w);
}

static void put_rotation(qc_json_writer *w, const char *key, const qc_bench_rotation *t)
{
    qc_jw_key(w, key);
    if (!t->copies) {
        qc_jw_null(w);
        return;
    }
    qc_jw_compact_next(w);
    qc_jw_begin_object(w);
    qc_jm_u64(w, "copies", t->copies);
    qc_jm_u64(w, "bytes", t->bytes);
    qc_jm_u64(w, "launches", t->launches);
    qc_jw_end_object(w);
}

static void put_row(qc_json_writer *w, const qc_bench_request *q, const qc_bench_result *r,
                    const qc_bench_row *row)
{
    const qc_bench_shape *s = &q->shapes[row->shape];
    uint64_t bytes =
        qc_bench_bytes(qc_bench_weight_bytes(row->scheme, s->n, s->k), row->m, s->n, s->k);
    double flops = qc_bench_flops(row->m, s->n, s->k), us = row->us.median;
    qc_jw_begin_object(w);
    qc_jm_string(w, "model", s->model);
    qc_jm_string(w, "layer", s->layer);
    qc_jm_u64(w, "n", s->n);
    qc_jm_u64(w, "k", s->k);
    qc_jm_u64(w, "count", s->count);
    if (s->part_count) {
        qc_jw_key(w, "parts");
        qc_jw_begin_array(w);
        for (uint32_t i = 0; i < s->part_count; i++)
            qc_jw_u64(w, s->parts[i]);
        qc_jw_end_array(w);
    }
    qc_jm_u64(w, "m", row->m);
    qc_jm_string(w, "scheme", qc_bench_scheme_name(row->scheme));
    qc_jm_string(w, "path", row->path);
    qc_jm_bool(w, "repacked", row->repacked);
    qc_jm_double(w, "error", row->error);
    put_spread(w, "us", row->us);
    put_spread(w, "dense_us", row->dense);
    put_spread(w, "ratio", row->ratio);
    qc_jm_u64(w, "bytes", bytes);
    qc_jm_double(w, "gbps", us > 0 ? (double)bytes / us / 1e3 : 0);
    qc_jm_double(w, "tflops", us > 0 ? flops / us / 1e6 : 0);
    qc_jm_double(w, "floor_us", qc_bench_floor_us(&r->roof, bytes, flops));
    qc_jm_double(w, "of_roof", qc_bench_of_roof(q, r, row));
    put_rotation(w, "rotation", &row->turn);
    put_rotation(w, "dense_rotation", &row->dense_turn);
    qc_jw_end_object(w);
}

static void put_layers(qc_json_writer *w, const qc_bench_request *q, const qc_bench_result *r)
{
    qc_bench_layer l;
    for (uint32_t s = 0; s < q->shape_count; s++)
        for (uint32_t i = 0; qc_bench_first_of_model(q, s) && i < q->scheme_count; i++)
            for (uint32_t m = 0; m < q->m_count; m++) {
                if (!qc_bench_layer_of(q, r, s, q->schemes[i], q->m[m], &l))
                    continue;
                qc_jw_compact_next(w);
                qc_jw_begin_object(w);
                qc_jm_string(w, "model", l.model);
                qc_jm_string(w, "scheme", qc_bench_scheme_name(l.scheme));
                qc_jm_u64(w, "m", l.m);
                qc_jm_double(w, "us", l.us);
                qc_jw_key(w, "dense_us");
                if (l.dense_us > 0)
                    qc_jw_double(w, l.dense_us);
                else
                    qc_jw_null(w);
                qc_jw_end_object(w);
            }
}

/* Writes how the run ended, or how far it is. */
static void put_end(qc_json_writer *w, const qc_bench_request *q, const qc_bench_result *r)
{
    qc_jm_u64(w, "left_out", r->left_out);
    qc_jw_key(w, "failed");
    qc_jw_begin_array(w);
    for (uint32_t i = 0; i < r->failed_count; i++) {
        const qc_bench_failure *f = &r->failed[i];
        const qc_bench_shape *s = f->shape == QC_BENCH_NO_SHAPE ? NULL : &q->shapes[f->shape];
        const uint64_t sides[] = {s ? s->n : 0, s ? s->k : 0, f->m};
        const char *const names[] = {"n", "k", "m"};
        qc_jw_begin_object(w);
        qc_jm_string(w, "model", s ? s->model : NULL);
        qc_jm_string(w, "layer", s ? s->layer : NULL);
        for (unsigned j = 0; j < 3; j++) {
            qc_jw_key(w, names[j]);
            if (s)
                qc_jw_u64(w, sides[j]);
            else
                qc_jw_null(w);
        }
        qc_jm_string(w, "scheme",
                     f->scheme == QC_BENCH_SCHEME_COUNT ? NULL : qc_bench_scheme_name(f->scheme));
        qc_jm_string(w, "path", f->path);
        qc_jm_string(w, "what", f->what);
        qc_jw_end_object(w);
    }
    qc_jw_end_array(w);
    qc_jm_bool(w, "complete", r->complete);
    qc_jm_double(w, "seconds", r->seconds);
}

/* ---- tuning ---- */

static void put_plan(qc_json_writer *w, const char *key, const qc_bench_plan *p)
{
    qc_jw_key(w, key);
    qc_jw_compact_next(w);
    qc_jw_begin_object(w);
    qc_jm_string(w, "path", p->path);
    qc_jm_string(w, "variant", p->variant);
    qc_jm_u64(w, "splits", p->splits);
    qc_jm_u64(w, "blocks", p->blocks);
    qc_jw_end_object(w);
}

static void put_tuned(qc_json_writer *w, const qc_bench_request *q, const qc_bench_tuned *t)
{
    const qc_bench_shape *s = &q->shapes[t->shape];
    uint64_t least = 0, most = 0;
    qc_bench_tuned_range(q, t->m, &least, &most);
    qc_jw_begin_object(w);
    qc_jm_string(w, "model", s->model);
    qc_jm_string(w, "layer", s->layer);
    qc_jm_u64(w, "n", s->n);
    qc_jm_u64(w, "k", s->k);
    qc_jm_u64(w, "m", t->m);
    qc_jm_u64(w, "m_least", least);
    qc_jm_u64(w, "m_most", most);
    qc_jm_string(w, "scheme", qc_bench_scheme_name(t->scheme));
    qc_jm_bool(w, "repacked", t->repacked);
    qc_jm_u64(w, "candidates", t->candidates);
    put_plan(w, "plan", &t->plan);
    put_spread(w, "plan_us", t->plan_us);
    if (t->us.samples) {
        put_plan(w, "other", &t->other);
    } else {
        qc_jw_key(w, "other");
        qc_jw_null(w);
    }
    put_spread(w, "us", t->us);
    put_spread(w, "ratio", t->ratio);
    qc_jm_bool(w, "better", t->better);
    put_rotation(w, "rotation", &t->turn);
    qc_jw_end_object(w);
}

static qc_status tune_json(const qc_bench_request *q, const qc_bench_result *r, qc_strbuf *out,
                           qc_error *err)
{
    qc_json_writer w;
    qc_jw_init(&w, out, err);
    qc_jw_begin_object(&w);
    qc_jm_string(&w, "command", "bench --tune");
    qc_jm_string(&w, "program", "qconv " QCONV_VERSION);
    qc_jm_string(&w, "dtype", qc_bench_dtype_name(q));
    qc_jm_u64(&w, "seed", q->seed);
    put_device(&w, &r->device);
    qc_jw_key(&w, "rows");
    qc_jw_begin_array(&w);
    for (uint32_t i = 0; i < r->tuned_count; i++)
        put_tuned(&w, q, &r->tuned[i]);
    qc_jw_end_array(&w);
    put_end(&w, q, r);
    qc_jw_end_object(&w);
    QC_TRY(qc_jw_finish(&w));
    return qc_strbuf_adds(out, "\n", err);
}

/* ---- all of it ---- */

qc_status qc_bench_json(const qc_bench_request *q, const qc_bench_result *r, qc_strbuf *out,
                        qc_error *err)
{
    qc_json_writer w;
    if (q->tune)
        return tune_json(q, r, out, err);
    qc_jw_init(&w, out, err);
    qc_jw_begin_object(&w);
    qc_jm_string(&w, "command", "bench");
    qc_jm_string(&w, "program", "qconv " QCONV_VERSION);
    qc_jm_string(&w, "dtype", qc_bench_dtype_name(q));
    qc_jm_u64(&w, "seed", q->seed);
    qc_jm_string(&w, "forced_path", q->path);
    qc_jm_path(&w, "tuning", q->tuned_by);
    put_device(&w, &r->device);
    put_roof(&w, &r->roof);
    qc_jw_key(&w, "kernels");
    qc_jw_begin_array(&w);
    for (uint32_t i = 0; i < r->kernel_count; i++)
        put_kernel(&w, &r->kernels[i], &r->roof);
    qc_jw_end_array(&w);
    qc_jw_key(&w, "rows");
    qc_jw_begin_array(&w);
    for (uint32_t i = 0; i < r->row_count; i++)
        put_row(&w, q, r, &r->rows[i]);
    qc_jw_end_array(&w);
    qc_jw_key(&w, "layers");
    qc_jw_begin_array(&w);
    put_layers(&w, q, r);
    qc_jw_end_array(&w);
    put_end(&w, q, r);
    qc_jw_end_object(&w);
    QC_TRY(qc_jw_finish(&w));
    return qc_strbuf_adds(out, "\n", err);
}
