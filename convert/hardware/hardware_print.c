#include "convert/hardware/hardware_print.h"

#include "convert/hardware/hardware_choice.h"
#include "convert/term/console.h"
#include "convert/term/json_members.h"
#include "convert/term/size_text.h"
#include "convert/term/table.h"

#include <stdio.h>
#include <string.h>

#define CELL_BYTES 256

/* ---- text ---- */

/* "fp16 bf16 tf32 int8 fp8" */
static const char *tensor_text(char out[CELL_BYTES], const qc_arch_facts *a)
{
    const struct {
        int has;
        const char *name;
    } kinds[] = {{a->fp16_tensor, "fp16"},
                 {a->bf16_tensor, "bf16"},
                 {a->tf32_tensor, "tf32"},
                 {a->int8_tensor, "int8"},
                 {a->fp8_tensor, "fp8"}};
    size_t used = 0;
    out[0] = '\0';
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (kinds[i].has)
            used += (size_t)snprintf(out + used, CELL_BYTES - used, "%s%s", used ? " " : "",
                                     kinds[i].name);
    if (!used)
        (void)snprintf(out, CELL_BYTES, "%s", a->sm ? "none" : "not known");
    return out;
}

/* "0,2" or "none"; "" if there is no other GPU to reach. */
static const char *peer_text(char out[CELL_BYTES], const qc_hardware *h, const qc_gpu *g)
{
    size_t used = 0;
    out[0] = '\0';
    if (h->gpu_count < 2)
        return out;
    for (unsigned i = 0; i < QC_MAX_GPUS && used + 8 < CELL_BYTES; i++)
        if (g->peers >> i & 1)
            used += (size_t)snprintf(out + used, CELL_BYTES - used, "%s%u", used ? "," : "", i);
    if (!used)
        (void)snprintf(out, CELL_BYTES, "%s", g->peers_known ? "none" : "not known");
    return out;
}

static qc_status add_gpus(const qc_hardware *h, qc_arena *arena, qc_strbuf *out, qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES], cell[CELL_BYTES];
    qc_table t;
    qc_table_init(&t, arena);
    qc_table_column(&t, "GPU", QC_ALIGN_LEFT);
    qc_table_column(&t, "name", QC_ALIGN_LEFT);
    qc_table_column(&t, "sm", QC_ALIGN_RIGHT);
    qc_table_column(&t, "architecture", QC_ALIGN_LEFT);
    qc_table_column(&t, "memory", QC_ALIGN_RIGHT);
    qc_table_column(&t, "free", QC_ALIGN_RIGHT);
    qc_table_column(&t, "bandwidth", QC_ALIGN_RIGHT);
    qc_table_column(&t, "tensor cores", QC_ALIGN_LEFT);
    qc_table_column(&t, "peers", QC_ALIGN_LEFT);
    for (uint32_t i = 0; i < h->gpu_count; i++) {
        const qc_gpu *g = &h->gpus[i];
        qc_arch_facts a = qc_arch_of(g->sm);
        QC_TRY(qc_table_cellf(&t, err, "cuda:%u", g->index));
        QC_TRY(qc_table_cell(&t, g->name, err));
        if (g->sm)
            QC_TRY(qc_table_cellf(&t, err, "%u", g->sm));
        else
            QC_TRY(qc_table_cell(&t, NULL, err));
        QC_TRY(qc_table_cell(&t, *a.architecture ? a.architecture : NULL, err));
        QC_TRY(qc_table_cell(&t, qc_text_bytes(size, g->total_bytes), err));
        /* Nothing is in use on a card that is only assumed. */
        QC_TRY(qc_table_cell(&t, h->assumed ? "" : qc_text_bytes(size, g->free_bytes), err));
        QC_TRY(qc_table_cell(
            &t, g->bandwidth > 0 ? qc_text_rate(size, (uint64_t)g->bandwidth, 1.0) : NULL, err));
        QC_TRY(qc_table_cell(&t, tensor_text(cell, &a), err));
        QC_TRY(qc_table_cell(&t, peer_text(cell, h, g), err));
    }
    return qc_table_render(&t, 0, out, err);
}

/* Writes a number of weights in thousand millions: "20.6 G". */
static qc_status weights_cell(qc_table *t, uint64_t weights, qc_error *err)
{
    return qc_table_cellf(t, err, "%.1f G", (double)weights / 1e9);
}

static qc_status add_choices(const qc_hardware *h, qc_arena *arena, qc_strbuf *out, qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES];
    qc_table t;
    qc_table_init(&t, arena);
    qc_table_column(&t, "GPU", QC_ALIGN_LEFT);
    qc_table_column(&t, "compute", QC_ALIGN_LEFT);
    qc_table_column(&t, "schemes", QC_ALIGN_LEFT);
    qc_table_column(&t, "kernels", QC_ALIGN_LEFT);
    qc_table_column(&t, "room", QC_ALIGN_RIGHT);
    qc_table_column(&t, "16bit", QC_ALIGN_RIGHT);
    qc_table_column(&t, "int8", QC_ALIGN_RIGHT);
    qc_table_column(&t, "nf4", QC_ALIGN_RIGHT);
    for (uint32_t i = 0; i < h->gpu_count; i++) {
        qc_gpu_choice c = qc_gpu_choose(&h->gpus[i]);
        QC_TRY(qc_table_cellf(&t, err, "cuda:%u", h->gpus[i].index));
        QC_TRY(qc_table_cell(&t, c.compute_dtype, err));
        QC_TRY(qc_table_cell(&t, c.schemes, err));
        QC_TRY(qc_table_cell(&t, c.kernels, err));
        QC_TRY(qc_table_cell(&t, qc_text_bytes(size, c.room_bytes), err));
        QC_TRY(weights_cell(&t, c.weights_16bit, err));
        QC_TRY(weights_cell(&t, c.weights_int8, err));
        QC_TRY(weights_cell(&t, c.weights_nf4, err));
    }
    QC_TRY(qc_strbuf_adds(out, "\nWhat qconv would choose\n", err));
    QC_TRY(qc_table_render(&t, 0, out, err));
    return qc_strbuf_addf(
        out, err,
        "room is for weights and KV cache: %.0f%% of what is free, less %u MB "
        "for the CUDA context. 16bit, int8,\n"
        "nf4: how many weights alone fill it (G: 10^9). 'qconv plan MODEL' counts "
        "a model, its cache and workspace.\n",
        QC_DEFAULT_MARGIN * 100, (unsigned)(QC_DEFAULT_CUDA_CONTEXT_BYTES / 1000000u));
}

/* The reasons are constant sentences; GPUs with the same ones are described together. */
static int same_reasons(const qc_gpu *a, const qc_gpu *b)
{
    qc_gpu_choice x = qc_gpu_choose(a), y = qc_gpu_choose(b);
    return strcmp(x.compute_why, y.compute_why) == 0 && strcmp(x.schemes_why, y.schemes_why) == 0 &&
           strcmp(x.kernels_why, y.kernels_why) == 0;
}

static qc_status add_reasons(const qc_hardware *h, qc_strbuf *out, qc_error *err)
{
    QC_TRY(qc_strbuf_adds(out, "\nWhy\n", err));
    for (uint32_t i = 0; i < h->gpu_count; i++) {
        uint32_t first = 0;
        while (!same_reasons(&h->gpus[first], &h->gpus[i]))
            first++;
        if (first != i)
            continue;
        for (uint32_t k = i; k < h->gpu_count; k++)
            if (same_reasons(&h->gpus[i], &h->gpus[k]))
                QC_TRY(qc_strbuf_addf(out, err, "%scuda:%u", k == i ? "" : ", ", h->gpus[k].index));
        qc_gpu_choice c = qc_gpu_choose(&h->gpus[i]);
        QC_TRY(qc_strbuf_addf(out, err, "\n  %-9s %s\n  %-9s %s\n  %-9s %s\n", c.compute_dtype,
                              c.compute_why, "schemes", c.schemes_why, "kernels", c.kernels_why));
    }
    return QC_OK;
}

static qc_status add_host(const qc_hardware *h, qc_strbuf *out, qc_error *err)
{
    char a[QC_SIZE_TEXT_BYTES], b[QC_SIZE_TEXT_BYTES], name[CELL_BYTES];
    (void)snprintf(name, sizeof name, "%s", h->cpu_name ? h->cpu_name : "not known");
    qc_console_printable(name);
    QC_TRY(qc_strbuf_addf(out, err, "\nprocessor  %s, %u thread%s, %s\n", name, h->cpu_threads,
                          h->cpu_threads == 1 ? "" : "s", qc_isa_name(h->isa)));
    if (h->memory_bytes)
        QC_TRY(qc_strbuf_addf(out, err, "memory     %s, %s free\n",
                              qc_text_bytes(a, h->memory_bytes),
                              qc_text_bytes(b, h->memory_free_bytes)));
    else
        QC_TRY(qc_strbuf_adds(out, "memory     not known\n", err));
    return qc_strbuf_addf(out, err, "disk       %s free in this folder\n",
                          qc_text_bytes(a, h->disk_free_bytes));
}

static qc_status add_quantizing(const qc_hardware *h, qc_strbuf *out, qc_error *err)
{
    char text[512];
    QC_TRY(qc_strbuf_addf(out, err, "kernels    %s\n",
                          h->cuda_build ? h->cuda_build : "none: this build is for the CPU only"));
    if (!h->quantizes_on && !h->quantizes_why)
        return QC_OK;
    (void)snprintf(text, sizeof text, "%s%s%s", h->quantizes_on ? h->quantizes_on : "nothing",
                   h->quantizes_why ? ": " : "", h->quantizes_why ? h->quantizes_why : "");
    qc_console_printable(text);
    return qc_strbuf_addf(out, err, "quantizes  on %s\n", text);
}

qc_status qc_hardware_text(const qc_hardware *h, qc_arena *arena, qc_strbuf *out, qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES], why[512];
    qc_strategy s;
    QC_TRY(qc_strategy_choose(&s, h, arena, err));
    if (h->gpu_count == 0) {
        (void)snprintf(why, sizeof why, "%s", h->no_gpu ? h->no_gpu : "none was found");
        qc_console_printable(why);
        QC_TRY(qc_strbuf_addf(out, err,
                              "No GPU: %s.\n"
                              "Those you will get: qconv hardware --as 2xA100-40GB\n",
                              why));
    } else {
        if (h->assumed)
            QC_TRY(qc_strbuf_adds(out,
                                  "GPUs assumed; processor, memory and disk are this "
                                  "machine's\n",
                                  err));
        else
            QC_TRY(qc_strbuf_addf(out, err, "GPUs%s%s\n", h->driver ? ", NVIDIA driver " : "",
                                  h->driver ? h->driver : ""));
        QC_TRY(add_gpus(h, arena, out, err));
        QC_TRY(add_choices(h, arena, out, err));
        QC_TRY(add_reasons(h, out, err));
    }
    QC_TRY(add_host(h, out, err));
    QC_TRY(add_quantizing(h, out, err));
    return qc_strbuf_addf(
        out, err,
        "\nstrategy   %s: %s\n           room for weights and KV cache: %s; qconv "
        "plan MODEL --vram %s\n",
        s.name, s.why, qc_text_bytes(size, s.room_bytes), s.vram);
}

/* ---- JSON ---- */

/* Writes a number, or null for 0. */
static void put_known(qc_json_writer *w, const char *key, uint64_t v)
{
    qc_jm_u64_if(w, key, v > 0, v);
}

static void put_rate(qc_json_writer *w, const char *key, double v)
{
    qc_jw_key(w, key);
    if (v > 0)
        qc_jw_u64(w, (uint64_t)v);
    else
        qc_jw_null(w);
}

static void put_peers(qc_json_writer *w, const qc_gpu *g)
{
    qc_jw_key(w, "peers");
    if (!g->peers_known && !g->peers) {
        qc_jw_null(w);
        return;
    }
    qc_jw_compact_next(w);
    qc_jw_begin_array(w);
    for (unsigned i = 0; i < QC_MAX_GPUS; i++)
        if (g->peers >> i & 1)
            qc_jw_u64(w, i);
    qc_jw_end_array(w);
}

static void put_choice(qc_json_writer *w, const qc_gpu *g)
{
    qc_gpu_choice c = qc_gpu_choose(g);
    qc_jw_key(w, "choice");
    qc_jw_begin_object(w);
    qc_jm_bool(w, "usable", c.usable);
    qc_jm_string(w, "compute_dtype", c.compute_dtype);
    qc_jm_string(w, "compute_why", c.compute_why);
    qc_jm_string(w, "kernels", c.kernels);
    qc_jm_string(w, "kernels_why", c.kernels_why);
    qc_jm_string(w, "schemes", c.schemes);
    qc_jm_string(w, "schemes_why", c.schemes_why);
    qc_jm_u64(w, "room_bytes", c.room_bytes);
    qc_jm_u64(w, "weights_16bit", c.weights_16bit);
    qc_jm_u64(w, "weights_int8", c.weights_int8);
    qc_jm_u64(w, "weights_nf4", c.weights_nf4);
    qc_jw_end_object(w);
}

static void put_gpu(qc_json_writer *w, const qc_hardware *h, const qc_gpu *g)
{
    qc_arch_facts a = qc_arch_of(g->sm);
    qc_jw_begin_object(w);
    qc_jm_u64(w, "index", g->index);
    qc_jm_u64_if(w, "driver_index", !h->assumed, g->driver_index);
    qc_jm_string(w, "name", g->name);
    qc_jm_string(w, "uuid", g->uuid);
    qc_jm_string(w, "card", g->card ? g->card->name : NULL);
    put_known(w, "sm", g->sm);
    qc_jm_string(w, "architecture", *a.architecture ? a.architecture : NULL);
    qc_jm_u64(w, "total_bytes", g->total_bytes);
    qc_jm_u64(w, "used_bytes", g->used_bytes);
    qc_jm_u64(w, "free_bytes", g->free_bytes);
    put_rate(w, "bandwidth_bytes_per_second", g->bandwidth);
    put_rate(w, "host_link_bytes_per_second", g->card ? g->card->host_link : 0);
    put_rate(w, "peer_link_bytes_per_second", g->card ? g->card->peer_link : 0);
    qc_jw_key(w, "tensor_cores");
    if (g->sm) {
        qc_jw_compact_next(w);
        qc_jw_begin_object(w);
        qc_jm_bool(w, "fp16", a.fp16_tensor);
        qc_jm_bool(w, "bf16", a.bf16_tensor);
        qc_jm_bool(w, "tf32", a.tf32_tensor);
        qc_jm_bool(w, "int8", a.int8_tensor);
        qc_jm_bool(w, "fp8", a.fp8_tensor);
        qc_jw_end_object(w);
    } else {
        qc_jw_null(w);
    }
    put_peers(w, g);
    put_choice(w, g);
    qc_jw_end_object(w);
}

qc_status qc_hardware_json(const qc_hardware *h, qc_arena *arena, qc_strbuf *out, qc_error *err)
{
    qc_json_writer w;
    qc_strategy s;
    QC_TRY(qc_strategy_choose(&s, h, arena, err));
    qc_jw_init(&w, out, err);
    qc_jw_begin_object(&w);
    qc_jm_string(&w, "command", "hardware");
    qc_jm_bool(&w, "assumed", h->assumed);
    qc_jm_string(&w, "driver", h->driver);
    qc_jw_key(&w, "gpus");
    qc_jw_begin_array(&w);
    for (uint32_t i = 0; i < h->gpu_count; i++)
        put_gpu(&w, h, &h->gpus[i]);
    qc_jw_end_array(&w);
    qc_jm_string(&w, "no_gpu", h->no_gpu);
    qc_jm_string(&w, "warning", h->warning);
    qc_jm_bool(&w, "cuda_kernels", h->cuda_build != NULL);
    qc_jm_string(&w, "cuda_build", h->cuda_build);
    qc_jm_string(&w, "quantizes_on", h->quantizes_on);
    qc_jm_string(&w, "quantizes_why", h->quantizes_why);
    qc_jw_key(&w, "cpu");
    qc_jw_begin_object(&w);
    qc_jm_string(&w, "name", h->cpu_name);
    qc_jm_u64(&w, "threads", h->cpu_threads);
    qc_jm_string(&w, "isa", qc_isa_name(h->isa));
    put_known(&w, "memory_bytes", h->memory_bytes);
    put_known(&w, "memory_free_bytes", h->memory_free_bytes);
    qc_jw_end_object(&w);
    qc_jm_u64(&w, "disk_free_bytes", h->disk_free_bytes);
    qc_jw_key(&w, "strategy");
    qc_jw_begin_object(&w);
    qc_jm_string(&w, "name", s.name);
    qc_jm_string(&w, "why", s.why);
    qc_jm_string(&w, "vram", s.vram);
    qc_jm_u64(&w, "room_bytes", s.room_bytes);
    qc_jw_end_object(&w);
    qc_jw_end_object(&w);
    QC_TRY(qc_jw_finish(&w));
    return qc_strbuf_adds(out, "\n", err);
}
