/* A model and a budget made member by member, for tests of convert/fit.h. */
#ifndef QC_TESTS_FIT_FIXTURE_H
#define QC_TESTS_FIT_FIXTURE_H

#include "convert/fit.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#define SEGMENTS_MOST 14u
#define DEVICES_MOST  6u
#define MB            1000000u

typedef struct {
    qc_layer_geometry layers[SEGMENTS_MOST];
    qc_geometry geometry;
    qc_segment segment[SEGMENTS_MOST];
    qc_segments segments;
    uint64_t bytes[SEGMENTS_MOST], largest[SEGMENTS_MOST];
    qc_device device[DEVICES_MOST];
    qc_budget budget;
    qc_fit_options options;
} fixture;

static void add_segment(fixture *x, qc_segment_kind kind, uint64_t bytes)
{
    uint32_t i = x->segments.count++;
    x->segment[i] =
        (qc_segment){.kind = kind, .name = "s", .layer = UINT32_MAX, .follows = QC_NO_SEGMENT};
    x->bytes[i] = bytes;
}

static void add_layer(fixture *x, uint64_t bytes)
{
    uint32_t i = x->geometry.layer_count++;
    x->layers[i] = (qc_layer_geometry){.attention = QC_ATTENTION_FULL, .kv_elems = 1000};
    add_segment(x, QC_SEGMENT_LAYER, bytes);
    x->segment[x->segments.count - 1].layer = i;
}

static void add_device(fixture *x, qc_tier tier, uint64_t bytes)
{
    static const char *const names[] = {"cuda:0", "cuda:1", "cuda:2", "cuda:3"};
    uint32_t i = x->budget.count++;
    x->device[i] = (qc_device){.tier = tier, .total_bytes = bytes};
    x->device[i].name = tier == QC_TIER_GPU   ? names[x->budget.gpu_count++]
                        : tier == QC_TIER_CPU ? "cpu"
                                              : "disk";
}

/* hidden 100, 2 heads of 50, MLP 400, vocabulary 1000; nothing quantized; context 1000 tokens. */
static void begin_fixture(fixture *x)
{
    memset(x, 0, sizeof *x);
    x->geometry = (qc_geometry){.model_type = "",
                                .decoder = 1,
                                .layers = x->layers,
                                .hidden = 100,
                                .intermediate = 400,
                                .heads = 2,
                                .kv_heads = 1,
                                .head_dim = 50,
                                .vocab = 1000,
                                .max_context = 100000};
    x->segments.segments = x->segment;
    x->budget.devices = x->device;
    x->budget.text = "";
    x->options = (qc_fit_options){.margin = 1.0,
                                  .context = 1000,
                                  .batch = 1,
                                  .images = 1,
                                  .kv_bits = 16,
                                  .cuda_context_bytes = 5 * MB};
}

static void make(fixture *x, qc_arena *arena, qc_fit *fit)
{
    qc_error err = {0};
    if (qc_fit_make(fit, arena, &x->segments, &x->geometry, x->bytes, x->largest, &x->budget,
                    &x->options, &err) != QC_OK)
        fail_msg("%s", err.msg);
}

#endif
