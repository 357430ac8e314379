#include "convert/device/bench.h"
#include "formats/json_writer.h"

#include <math.h>

/* Begins an object on one line if it is known; else it writes null and returns 0. */
static int begin_row_if(qc_json_writer *w, const char *key, int known)
{
    qc_json_write_key(w, key);
    if (known)
        qc_json_member_begin_row(w);
    else
        qc_json_write_null(w);
    return known;
}

/* Writes null if it was not measured. */
static void put_spread(qc_json_writer *w, const char *key, qc_bench_spread s)
{
    if (!begin_row_if(w, key, s.samples > 0))
        return;
    qc_json_member_double(w, "median", s.median);
    qc_json_member_double(w, "p10", s.p10);
    qc_json_member_double(w, "p90", s.p90);
    qc_json_member_u64(w, "samples", s.samples);
    qc_json_write_end_object(w);
}

static void put_device(qc_json_writer *w, const qc_bench_device *d)
{
    qc_json_member_begin_object(w, "device");
    qc_json_member_string(w, "name", d->name);
    qc_json_member_string(w, "pci", d->pci);
    qc_json_member_u64(w, "sm", d->sm);
    qc_json_member_u64(w, "multiprocessors", d->multiprocessors);
    qc_json_member_u64(w, "memory_bytes", d->memory_bytes);
    qc_json_member_u64(w, "l2_bytes", d->l2_bytes);
    qc_json_member_u64(w, "driver_version", (uint64_t)d->driver_version);
    qc_json_member_u64(w, "runtime_version", (uint64_t)d->runtime_version);
    qc_json_member_string(w, "kernels", d->build);
    qc_json_member_string(w, "no_gemm", d->no_gemm);
    qc_json_write_end_object(w);
}

static void put_roof(qc_json_writer *w, const qc_bench_roof *r)
{
    qc_json_member_begin_object(w, "roof");
    qc_json_member_u64(w, "copy_bytes", r->copy_bytes);
    put_spread(w, "copy_gbps", r->copy_gbps);
    put_spread(w, "kernel_copy_gbps", r->kernel_copy_gbps);
    put_spread(w, "read_gbps", r->read_gbps);
    qc_json_member_double(w, "memory_gbps", qc_bench_memory_gbps(r));
    qc_json_member_u64(w, "gemm_size", r->gemm_size);
    put_spread(w, "gemm_tflops", r->gemm_tflops);
    put_spread(w, "launch_us", r->launch_us);
    qc_json_member_u64(w, "host_bytes", r->host_bytes);
    put_spread(w, "to_device_gbps", r->to_device_gbps);
    put_spread(w, "to_host_gbps", r->to_host_gbps);
    qc_json_write_end_object(w);
}

static void put_kernel(qc_json_writer *w, const qc_bench_kernel *k, const qc_bench_roof *roof)
{
    qc_json_write_begin_object(w);
    qc_json_member_string(w, "name", k->name);
    qc_json_member_u64(w, "rows", k->rows);
    qc_json_member_u64(w, "cols", k->cols);
    qc_json_member_u64(w, "bytes", k->bytes);
    put_spread(w, "gbps", k->gbps);
    const double copy = qc_bench_copy_gbps(roof), memory = qc_bench_memory_gbps(roof);
    qc_json_member_double(w, "of_copy", copy > 0 ? k->gbps.median / copy : 0);
    qc_json_member_double(w, "of_roof", memory > 0 ? k->gbps.median / memory : 0);
    qc_json_write_end_object(w);
}

static void put_rotation(qc_json_writer *w, const char *key, const qc_bench_rotation *t)
{
    if (!begin_row_if(w, key, t->copies > 0))
        return;
    qc_json_member_u64(w, "copies", t->copies);
    qc_json_member_u64(w, "bytes", t->bytes);
    qc_json_member_u64(w, "launches", t->launches);
    qc_json_write_end_object(w);
}

/* Writes null if it was not measured. */
static void put_packed(qc_json_writer *w, const qc_bench_packed *p)
{
    qc_json_write_key(w, "packed");
    if (!p->us.samples) {
        qc_json_write_null(w);
        return;
    }
    qc_json_write_begin_object(w);
    qc_json_member_string(w, "path", p->path);
    qc_json_member_double(w, "error", p->error);
    put_spread(w, "us", p->us);
    put_spread(w, "ratio", p->ratio);
    put_rotation(w, "rotation", &p->turn);
    qc_json_write_end_object(w);
}

static void put_row(qc_json_writer *w, const qc_bench_request *q, const qc_bench_result *r,
                    const qc_bench_row *row)
{
    const qc_bench_shape *s = &q->shapes[row->shape];
    uint64_t bytes =
        qc_bench_bytes(qc_bench_weight_bytes(row->scheme, s->n, s->k), row->m, s->n, s->k);
    double flops = qc_bench_flops(row->m, s->n, s->k), us = row->us.median;
    qc_json_write_begin_object(w);
    qc_json_member_string(w, "model", s->model);
    qc_json_member_string(w, "layer", s->layer);
    qc_json_member_u64(w, "n", s->n);
    qc_json_member_u64(w, "k", s->k);
    qc_json_member_u64(w, "count", s->count);
    if (s->part_count) {
        qc_json_member_begin_array(w, "parts");
        for (uint32_t i = 0; i < s->part_count; i++)
            qc_json_write_u64(w, s->parts[i]);
        qc_json_write_end_array(w);
    }
    qc_json_member_u64(w, "m", row->m);
    qc_json_member_string(w, "scheme", qc_bench_scheme_name(row->scheme));
    qc_json_member_string(w, "path", row->path);
    qc_json_member_bool(w, "repacked", row->repacked);
    qc_json_member_double(w, "error", row->error);
    put_spread(w, "us", row->us);
    put_spread(w, "dense_us", row->dense);
    put_spread(w, "ratio", row->ratio);
    qc_json_member_u64(w, "bytes", bytes);
    qc_json_member_double(w, "gbps", us > 0 ? (double)bytes / us / 1e3 : 0);
    qc_json_member_double(w, "tflops", us > 0 ? flops / us / 1e6 : 0);
    qc_json_member_double(w, "floor_us", qc_bench_floor_us(&r->roof, bytes, flops));
    qc_json_member_double(w, "of_roof", qc_bench_of_roof(q, r, row));
    put_rotation(w, "rotation", &row->turn);
    put_rotation(w, "dense_rotation", &row->dense_turn);
    if (q->packed)
        put_packed(w, &row->packed);
    qc_json_write_end_object(w);
}

static void put_packings(qc_json_writer *w, const qc_bench_request *q, const qc_bench_result *r)
{
    qc_json_member_begin_array(w, "packing");
    for (uint32_t i = 0; i < r->packing_count; i++) {
        const qc_bench_packing *p = &r->packings[i];
        const qc_bench_shape *s = &q->shapes[p->shape];
        qc_json_write_begin_object(w);
        qc_json_member_string(w, "model", s->model);
        qc_json_member_string(w, "layer", s->layer);
        qc_json_member_u64(w, "n", s->n);
        qc_json_member_u64(w, "k", s->k);
        qc_json_member_string(w, "scheme", qc_bench_scheme_name(p->scheme));
        qc_json_member_u64(w, "file_bytes", p->file_bytes);
        qc_json_member_u64(w, "packed_bytes", p->packed_bytes);
        put_spread(w, "us", p->us);
        qc_json_write_end_object(w);
    }
    qc_json_write_end_array(w);
}

static void put_layers(qc_json_writer *w, const qc_bench_request *q, const qc_bench_result *r)
{
    qc_bench_layer l;
    for (uint32_t s = 0; s < q->shape_count; s++)
        for (uint32_t i = 0; qc_bench_first_of_model(q, s) && i < q->scheme_count; i++)
            for (uint32_t m = 0; m < q->m_count; m++) {
                if (!qc_bench_layer_of(q, r, s, q->schemes[i], q->m[m], &l))
                    continue;
                qc_json_member_begin_row(w);
                qc_json_member_string(w, "model", l.model);
                qc_json_member_string(w, "scheme", qc_bench_scheme_name(l.scheme));
                qc_json_member_u64(w, "m", l.m);
                qc_json_member_double(w, "us", l.us);
                qc_json_member_number(w, "dense_us", l.dense_us > 0 ? l.dense_us : (double)NAN);
                qc_json_write_end_object(w);
            }
}

/* Writes how the run ended, or how far it is. */
static void put_end(qc_json_writer *w, const qc_bench_request *q, const qc_bench_result *r)
{
    qc_json_member_u64(w, "left_out", r->left_out);
    qc_json_member_begin_array(w, "failed");
    for (uint32_t i = 0; i < r->failed_count; i++) {
        const qc_bench_failure *f = &r->failed[i];
        const qc_bench_shape *s = f->shape == QC_BENCH_NO_SHAPE ? NULL : &q->shapes[f->shape];
        qc_json_write_begin_object(w);
        qc_json_member_string(w, "model", s ? s->model : NULL);
        qc_json_member_string(w, "layer", s ? s->layer : NULL);
        qc_json_member_u64_if(w, "n", s != NULL, s ? s->n : 0);
        qc_json_member_u64_if(w, "k", s != NULL, s ? s->k : 0);
        qc_json_member_u64_if(w, "m", s != NULL, f->m);
        qc_json_member_string(w, "scheme",
                              f->scheme == QC_BENCH_SCHEME_COUNT ? NULL
                                                                 : qc_bench_scheme_name(f->scheme));
        qc_json_member_string(w, "path", f->path);
        qc_json_member_string(w, "what", f->what);
        qc_json_write_end_object(w);
    }
    qc_json_write_end_array(w);
    qc_json_member_bool(w, "complete", r->complete);
    qc_json_member_double(w, "seconds", r->seconds);
}

/* ---- tuning ---- */

/* Writes null if there is none. */
static void put_plan(qc_json_writer *w, const char *key, const qc_bench_plan *p)
{
    if (!begin_row_if(w, key, p != NULL))
        return;
    qc_json_member_string(w, "path", p->path);
    qc_json_member_string(w, "variant", p->variant);
    qc_json_member_u64(w, "splits", p->splits);
    qc_json_member_u64(w, "blocks", p->blocks);
    qc_json_write_end_object(w);
}

static void put_tuned(qc_json_writer *w, const qc_bench_request *q, const qc_bench_tuned *t)
{
    const qc_bench_shape *s = &q->shapes[t->shape];
    uint64_t least = 0, most = 0;
    qc_bench_tuned_range(q, t->m, &least, &most);
    qc_json_write_begin_object(w);
    qc_json_member_string(w, "model", s->model);
    qc_json_member_string(w, "layer", s->layer);
    qc_json_member_u64(w, "n", s->n);
    qc_json_member_u64(w, "k", s->k);
    qc_json_member_u64(w, "m", t->m);
    qc_json_member_u64(w, "m_least", least);
    qc_json_member_u64(w, "m_most", most);
    qc_json_member_string(w, "scheme", qc_bench_scheme_name(t->scheme));
    qc_json_member_bool(w, "repacked", t->repacked);
    qc_json_member_u64(w, "candidates", t->candidates);
    put_plan(w, "plan", &t->plan);
    put_spread(w, "plan_us", t->plan_us);
    put_plan(w, "other", t->us.samples ? &t->other : NULL);
    put_spread(w, "us", t->us);
    put_spread(w, "ratio", t->ratio);
    qc_json_member_bool(w, "better", t->better);
    put_rotation(w, "rotation", &t->turn);
    qc_json_write_end_object(w);
}

static void put_tuning(qc_json_writer *w, const qc_bench_request *q, const qc_bench_result *r)
{
    put_device(w, &r->device);
    qc_json_member_begin_array(w, "rows");
    for (uint32_t i = 0; i < r->tuned_count; i++)
        put_tuned(w, q, &r->tuned[i]);
    qc_json_write_end_array(w);
}

/* ---- all of it ---- */

static void put_results(qc_json_writer *w, const qc_bench_request *q, const qc_bench_result *r)
{
    qc_json_member_string(w, "forced_path", q->path);
    qc_json_member_path(w, "tuning", q->tuned_by);
    put_device(w, &r->device);
    put_roof(w, &r->roof);
    qc_json_member_begin_array(w, "kernels");
    for (uint32_t i = 0; i < r->kernel_count; i++)
        put_kernel(w, &r->kernels[i], &r->roof);
    qc_json_write_end_array(w);
    qc_json_member_begin_array(w, "rows");
    for (uint32_t i = 0; i < r->row_count; i++)
        put_row(w, q, r, &r->rows[i]);
    qc_json_write_end_array(w);
    qc_json_member_begin_array(w, "layers");
    put_layers(w, q, r);
    qc_json_write_end_array(w);
    if (q->packed)
        put_packings(w, q, r);
}

qc_status qc_bench_json(const qc_bench_request *q, const qc_bench_result *r, qc_strbuf *out,
                        qc_error *err)
{
    qc_json_writer w;
    qc_json_write_begin_text(&w, out, err);
    qc_json_member_string(&w, "command", q->tune ? "bench --tune" : "bench");
    qc_json_member_string(&w, "program", "qconv " QCONV_VERSION);
    qc_json_member_string(&w, "dtype", qc_bench_dtype_name(q));
    qc_json_member_u64(&w, "seed", q->seed);
    if (q->tune)
        put_tuning(&w, q, r);
    else
        put_results(&w, q, r);
    put_end(&w, q, r);
    return qc_json_write_end_text(&w);
}
