#include "convert/hardware/hardware_print.h"

#include "base/text.h"
#include "convert/hardware/hardware_choice.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"
#include "convert/term/table.h"
#include "formats/json_writer.h"

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

static void put_gpus(const qc_hardware *h, qc_arena *arena, qc_strbuf *out)
{
    char rate[QC_SIZE_TEXT_BYTES], cell[CELL_BYTES];
    qc_table t;
    qc_table_begin(&t, arena,
                   "GPU|name|>sm|architecture|>memory|>free|>bandwidth|tensor cores|peers");
    for (uint32_t i = 0; i < h->gpu_count; i++) {
        const qc_gpu *g = &h->gpus[i];
        qc_arch_facts a = qc_arch_of(g->sm);
        qc_table_putf(&t, "cuda:%u", g->index);
        qc_table_put(&t, g->name);
        if (g->sm)
            qc_table_number(&t, g->sm);
        else
            qc_table_put(&t, NULL);
        qc_table_put(&t, *a.architecture ? a.architecture : NULL);
        qc_table_bytes(&t, g->total_bytes);
        if (h->assumed)
            qc_table_put(&t, "");
        else
            qc_table_bytes(&t, g->free_bytes);
        qc_table_put(&t, g->bandwidth > 0 ? qc_text_rate(rate, (uint64_t)g->bandwidth, 1) : NULL);
        qc_table_put(&t, tensor_text(cell, &a));
        qc_table_put(&t, peer_text(cell, h, g));
    }
    qc_table_print(&t, 0, out);
}

/* Writes a number of weights in thousand millions: "20.6 G". */
static void put_weights(qc_table *t, uint64_t weights)
{
    qc_table_putf(t, "%.1f G", (double)weights / 1e9);
}

static void put_choices(const qc_hardware *h, qc_arena *arena, qc_strbuf *out)
{
    qc_table t;
    qc_table_begin(&t, arena, "GPU|compute|schemes|kernels|>room|>16bit|>int8|>nf4");
    for (uint32_t i = 0; i < h->gpu_count; i++) {
        qc_gpu_choice c = qc_gpu_choose(&h->gpus[i]);
        qc_table_putf(&t, "cuda:%u", h->gpus[i].index);
        qc_table_put(&t, c.compute_dtype);
        qc_table_put(&t, c.schemes);
        qc_table_put(&t, c.kernels);
        qc_table_bytes(&t, c.room_bytes);
        put_weights(&t, c.weights_16bit);
        put_weights(&t, c.weights_int8);
        put_weights(&t, c.weights_nf4);
    }
    qc_strbuf_puts(out, "\nWhat qconv would choose\n");
    qc_table_print(&t, 0, out);
    qc_strbuf_putf(out,
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

static void put_reasons(const qc_hardware *h, qc_strbuf *out)
{
    qc_strbuf_puts(out, "\nWhy\n");
    for (uint32_t i = 0; i < h->gpu_count; i++) {
        uint32_t first = 0;
        while (!same_reasons(&h->gpus[first], &h->gpus[i]))
            first++;
        if (first != i)
            continue;
        for (uint32_t k = i; k < h->gpu_count; k++)
            if (same_reasons(&h->gpus[i], &h->gpus[k]))
                qc_strbuf_putf(out, "%scuda:%u", k == i ? "" : ", ", h->gpus[k].index);
        qc_gpu_choice c = qc_gpu_choose(&h->gpus[i]);
        qc_strbuf_putf(out, "\n  %-9s %s\n  %-9s %s\n  %-9s %s\n", c.compute_dtype, c.compute_why,
                       "schemes", c.schemes_why, "kernels", c.kernels_why);
    }
}

static void put_host(const qc_hardware *h, qc_strbuf *out)
{
    char a[QC_SIZE_TEXT_BYTES], b[QC_SIZE_TEXT_BYTES];
    qc_strbuf_puts(out, "\n");
    qc_strbuf_show(out, "processor  %s, %u thread%s, %s\n", h->cpu_name ? h->cpu_name : "not known",
                   h->cpu_threads, qc_plural(h->cpu_threads), qc_isa_name(h->isa));
    if (h->memory_bytes)
        qc_strbuf_putf(out, "memory     %s, %s free\n", qc_text_bytes(a, h->memory_bytes),
                       qc_text_bytes(b, h->memory_free_bytes));
    else
        qc_strbuf_puts(out, "memory     not known\n");
    qc_strbuf_putf(out, "disk       %s free in this folder\n",
                   qc_text_bytes(a, h->disk_free_bytes));
    qc_strbuf_putf(out, "kernels    %s\n",
                   h->cuda_build ? h->cuda_build : "none: this build is for the CPU only");
    if (h->quantizes_on || h->quantizes_why)
        qc_strbuf_show(out, "quantizes  on %s%s%s\n", h->quantizes_on ? h->quantizes_on : "nothing",
                       h->quantizes_why ? ": " : "", h->quantizes_why ? h->quantizes_why : "");
}

qc_status qc_hardware_text(const qc_hardware *h, qc_arena *arena, qc_strbuf *out, qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES];
    qc_strategy s;
    QC_TRY(qc_strategy_choose(&s, h, arena, err));
    if (h->gpu_count == 0) {
        qc_strbuf_show(out, "No GPU: %s.\n", h->no_gpu ? h->no_gpu : "none was found");
        qc_strbuf_puts(out,
                       "To describe cards that are not here: qconv hardware --as 2xA100-40GB\n");
    } else {
        if (h->assumed)
            qc_strbuf_puts(out, "GPUs assumed; processor, memory and disk are this machine's\n");
        else
            qc_strbuf_putf(out, "GPUs%s%s\n", h->driver ? ", NVIDIA driver " : "",
                           h->driver ? h->driver : "");
        put_gpus(h, arena, out);
        put_choices(h, arena, out);
        put_reasons(h, out);
    }
    put_host(h, out);
    qc_strbuf_putf(out,
                   "\nstrategy   %s: %s\n           room for weights and KV cache: %s; qconv "
                   "plan MODEL --vram %s\n",
                   s.name, s.why, qc_text_bytes(size, s.room_bytes), s.vram);
    return qc_strbuf_status(out, err);
}

/* ---- JSON ---- */

/* Writes a rate, or null for 0. */
static void put_rate(qc_json_writer *w, const char *key, double v)
{
    qc_json_put_u64_if(w, key, v > 0, (uint64_t)v);
}

static void put_gpu(qc_json_writer *w, const qc_hardware *h, const qc_gpu *g)
{
    const qc_arch_facts a = qc_arch_of(g->sm);
    const qc_gpu_choice c = qc_gpu_choose(g);
    qc_json_begin_object(w, NULL);
    qc_json_put_u64(w, "index", g->index);
    qc_json_put_u64_if(w, "driver_index", !h->assumed, g->driver_index);
    qc_json_put_text(w, "name", g->name);
    qc_json_put_text(w, "uuid", g->uuid);
    qc_json_put_text(w, "card", g->card ? g->card->name : NULL);
    qc_json_put_u64_if(w, "sm", g->sm > 0, g->sm);
    qc_json_put_text(w, "architecture", *a.architecture ? a.architecture : NULL);
    qc_json_put_u64(w, "total_bytes", g->total_bytes);
    qc_json_put_u64(w, "used_bytes", g->used_bytes);
    qc_json_put_u64(w, "free_bytes", g->free_bytes);
    put_rate(w, "bandwidth_bytes_per_second", g->bandwidth);
    put_rate(w, "host_link_bytes_per_second", g->card ? g->card->host_link : 0);
    put_rate(w, "peer_link_bytes_per_second", g->card ? g->card->peer_link : 0);
    if (qc_json_begin_row_if(w, "tensor_cores", g->sm > 0)) {
        qc_json_put_bool(w, "fp16", a.fp16_tensor);
        qc_json_put_bool(w, "bf16", a.bf16_tensor);
        qc_json_put_bool(w, "tf32", a.tf32_tensor);
        qc_json_put_bool(w, "int8", a.int8_tensor);
        qc_json_put_bool(w, "fp8", a.fp8_tensor);
        qc_json_end(w);
    }
    if (!g->peers_known && !g->peers) {
        qc_json_put_null(w, "peers");
    } else {
        qc_json_begin_line(w, "peers");
        for (unsigned i = 0; i < QC_MAX_GPUS; i++)
            if (g->peers >> i & 1)
                qc_json_put_u64(w, NULL, i);
        qc_json_end(w);
    }
    qc_json_begin_object(w, "choice");
    qc_json_put_bool(w, "usable", c.usable);
    qc_json_put_text(w, "compute_dtype", c.compute_dtype);
    qc_json_put_text(w, "compute_why", c.compute_why);
    qc_json_put_text(w, "kernels", c.kernels);
    qc_json_put_text(w, "kernels_why", c.kernels_why);
    qc_json_put_text(w, "schemes", c.schemes);
    qc_json_put_text(w, "schemes_why", c.schemes_why);
    qc_json_put_u64(w, "room_bytes", c.room_bytes);
    qc_json_put_u64(w, "weights_16bit", c.weights_16bit);
    qc_json_put_u64(w, "weights_int8", c.weights_int8);
    qc_json_put_u64(w, "weights_nf4", c.weights_nf4);
    qc_json_end(w);
    qc_json_end(w);
}

qc_status qc_hardware_json(const qc_hardware *h, qc_arena *arena, qc_strbuf *out, qc_error *err)
{
    qc_json_writer w;
    qc_strategy s;
    QC_TRY(qc_strategy_choose(&s, h, arena, err));
    qc_json_begin_text(&w, out, err);
    qc_json_put_text(&w, "command", "hardware");
    qc_json_put_bool(&w, "assumed", h->assumed);
    qc_json_put_text(&w, "driver", h->driver);
    qc_json_begin_list(&w, "gpus");
    for (uint32_t i = 0; i < h->gpu_count; i++)
        put_gpu(&w, h, &h->gpus[i]);
    qc_json_end(&w);
    qc_json_put_text(&w, "no_gpu", h->no_gpu);
    qc_json_put_text(&w, "warning", h->warning);
    qc_json_put_bool(&w, "cuda_kernels", h->cuda_build != NULL);
    qc_json_put_text(&w, "cuda_build", h->cuda_build);
    qc_json_put_text(&w, "quantizes_on", h->quantizes_on);
    qc_json_put_text(&w, "quantizes_why", h->quantizes_why);
    qc_json_begin_object(&w, "cpu");
    qc_json_put_text(&w, "name", h->cpu_name);
    qc_json_put_u64(&w, "threads", h->cpu_threads);
    qc_json_put_text(&w, "isa", qc_isa_name(h->isa));
    qc_json_put_u64_if(&w, "memory_bytes", h->memory_bytes > 0, h->memory_bytes);
    qc_json_put_u64_if(&w, "memory_free_bytes", h->memory_free_bytes > 0, h->memory_free_bytes);
    qc_json_end(&w);
    qc_json_put_u64(&w, "disk_free_bytes", h->disk_free_bytes);
    qc_json_begin_object(&w, "strategy");
    qc_json_put_text(&w, "name", s.name);
    qc_json_put_text(&w, "why", s.why);
    qc_json_put_text(&w, "vram", s.vram);
    qc_json_put_u64(&w, "room_bytes", s.room_bytes);
    qc_json_end(&w);
    return qc_json_end_text(&w);
}
