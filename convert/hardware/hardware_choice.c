#include "convert/hardware/hardware_choice.h"

#include "convert/term/size_text.h"

#include <stdio.h>

static uint64_t room_of(uint64_t free_bytes, uint64_t context_bytes)
{
    uint64_t usable = (uint64_t)((double)free_bytes * QC_DEFAULT_MARGIN);
    return usable > context_bytes ? usable - context_bytes : 0;
}

/* room x weights / bytes, where so many weights take so many bytes with their scales. */
static uint64_t weights_in(uint64_t room, uint64_t weights, uint64_t bytes)
{
    return room / bytes * weights + room % bytes * weights / bytes;
}

static void choose_kernels(qc_gpu_choice *c, unsigned sm)
{
    static const char sm70[] = "sm_70: mma.m8n8k4";
    static const char sm80[] = "sm_80: mma.m16n8k16, cp.async";
    if (sm == 0) {
        c->kernels = "not known";
        c->kernels_why = "the driver does not tell the compute capability";
    } else if (sm < 70) {
        c->kernels = "none";
        c->kernels_why = "kernels need compute capability 7.0 or more";
    } else if (sm < 75) {
        c->kernels = sm70;
        c->kernels_why = "Volta's own matrix instruction";
    } else if (sm < 80) {
        c->kernels = sm70;
        c->kernels_why = "Turing runs Volta's code; it lacks cp.async, which Ampere's code needs";
    } else if (sm < 90) {
        c->kernels = sm80;
        c->kernels_why = "tensor cores of 8.x, and copies that run beside the arithmetic";
    } else if (sm == 90) {
        c->kernels = sm80;
        c->kernels_why = "Hopper runs Ampere's code, and with more rows of x products of its own";
    } else {
        c->kernels = sm80;
        c->kernels_why = "later GPUs run Ampere's instructions; their own are not used yet";
    }
}

int qc_sm_runs_int8(unsigned sm)
{
    return qc_arch_of(sm).int8_tensor && sm >= 75;
}

qc_gpu_choice qc_gpu_choose(const qc_gpu *g)
{
    enum {
        /* 64 weights share one byte, and 256 of those bytes share a float32. */
        NF4_WEIGHTS = 64 * 256,
        NF4_BYTES = NF4_WEIGHTS / 2 + 256 + 4,
        /* Each row has one float32; we take rows of 4096 weights as typical. */
        ROW_WEIGHTS = 4096,
        ROW_BYTES = ROW_WEIGHTS + 4
    };
    qc_arch_facts arch = qc_arch_of(g->sm);
    qc_gpu_choice c = {.usable = g->sm == 0 || g->sm >= 70, .compute_dtype = arch.compute_dtype};
    if (g->sm == 0)
        c.compute_why = "runs on every GPU, and the capability of this one is not known";
    else if (arch.bf16_tensor)
        c.compute_why = "tensor cores support it from Ampere on, and it has the range of float32";
    else if (arch.fp16_tensor)
        c.compute_why = "its tensor cores support neither bfloat16 nor TF32";
    else
        c.compute_why = "it has no tensor cores; bfloat16 would be emulated";
    if (qc_sm_runs_int8(g->sm)) {
        c.schemes = "nf4,nf4-32,int8,16bit";
        c.schemes_why = "int8 where it fits, nf4 where it does not";
    } else {
        c.schemes = "nf4,nf4-32,16bit";
        c.schemes_why = "LLM.int8 in bitsandbytes needs compute capability 7.5";
    }
    choose_kernels(&c, g->sm);
    c.room_bytes = room_of(g->free_bytes, QC_DEFAULT_CUDA_CONTEXT_BYTES);
    c.weights_16bit = c.room_bytes / 2;
    c.weights_int8 = weights_in(c.room_bytes, ROW_WEIGHTS, ROW_BYTES);
    c.weights_nf4 = weights_in(c.room_bytes, NF4_WEIGHTS, NF4_BYTES);
    return c;
}

/* Writes assumed cards as "2xA100-40GB+RTX3090". */
static qc_status spell_vram(qc_strategy *s, const qc_hardware *h, qc_arena *arena, qc_error *err)
{
    const int cards = s->kind != QC_STRATEGY_CPU && h->assumed;
    s->vram = s->kind == QC_STRATEGY_CPU ? "cpu" : cards ? "" : "auto";
    for (uint32_t i = 0, same; cards && i < h->gpu_count; i += same) {
        char count[16] = "";
        for (same = 1; i + same < h->gpu_count; same++)
            if (h->gpus[i + same].card != h->gpus[i].card)
                break;
        if (same > 1)
            (void)snprintf(count, sizeof count, "%ux", (unsigned)same);
        QC_TRY(qc_arena_printf(arena, &s->vram, err, "%s%s%s%s", s->vram, i > 0 ? "+" : "", count,
                               h->gpus[i].card->name));
    }
    return s->kind == QC_STRATEGY_GPU_AND_CPU
               ? qc_arena_printf(arena, &s->vram, err, "%s+cpu", s->vram)
               : QC_OK;
}

qc_status qc_strategy_choose(qc_strategy *out, const qc_hardware *h, qc_arena *arena, qc_error *err)
{
    static const char *const names[] = {"gpus-balanced", "gpu-and-cpu", "gpu-whole", "cpu"};
    uint32_t usable = 0;
    uint64_t gpu_free = 0;
    char host[QC_SIZE_TEXT_BYTES], gpu[QC_SIZE_TEXT_BYTES];
    *out = (qc_strategy){.kind = QC_STRATEGY_CPU};
    for (uint32_t i = 0; i < h->gpu_count; i++) {
        qc_gpu_choice c = qc_gpu_choose(&h->gpus[i]);
        if (!c.usable)
            continue;
        usable++;
        gpu_free += h->gpus[i].free_bytes;
        out->room_bytes += c.room_bytes;
    }
    (void)qc_text_bytes(host, h->memory_free_bytes);
    (void)qc_text_bytes(gpu, gpu_free);
    const char *whose = h->assumed ? "this machine's" : "the host's";
    if (usable > 1) {
        out->kind = QC_STRATEGY_GPUS_BALANCED;
        QC_TRY(qc_arena_printf(arena, &out->why, err,
                               "whole layers in order over %u GPUs, cut so that the fullest is "
                               "least full",
                               (unsigned)usable));
    } else if (usable == 1 && h->memory_free_bytes > gpu_free) {
        out->kind = QC_STRATEGY_GPU_AND_CPU;
        QC_TRY(qc_arena_printf(arena, &out->why, err,
                               "what the GPU cannot hold goes to the host: %s free memory (%s) is "
                               "more than the GPU's (%s)",
                               whose, host, gpu));
    } else if (usable == 1) {
        out->kind = QC_STRATEGY_GPU_WHOLE;
        QC_TRY(
            qc_arena_printf(arena, &out->why, err,
                            "all on the GPU: %s free memory (%s) is not more than the GPU's (%s)",
                            whose, host, gpu));
    } else {
        out->room_bytes = room_of(h->memory_free_bytes, 0);
        out->why = h->gpu_count ? "no GPU has compute capability 7.0 or more" : "there is no GPU";
    }
    out->name = names[out->kind];
    return spell_vram(out, h, arena, err);
}
