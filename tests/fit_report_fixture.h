/* A placement made by hand: six segments on two GPUs and a cpu tier, numbers chosen so that shares
 * are round. For the tests of what is printed. */
#ifndef QC_TESTS_FIT_REPORT_FIXTURE_H
#define QC_TESTS_FIT_REPORT_FIXTURE_H

#include "convert/fit_report.h"

#include <string.h>

typedef struct {
    qc_device devices[3];
    qc_budget budget;
    qc_segment segments[6];
    qc_segments map;
    qc_geometry geometry;
    uint32_t device_of[6];
    uint64_t segment_bytes[6], segment_kv[6];
    qc_fit_device on[3];
    qc_fit fit;
    qc_fit_options use;
    qc_fit_scheme schemes[2];
    qc_suggestion suggestions[2];
    qc_fit_report report;
} fit_fixture;

static const char *fixture_modules[6][2] = {
    {"model.embed_tokens", NULL}, {"model.layers.0", NULL}, {"model.layers.1", NULL},
    {"model.layers.10", NULL},    {"model.norm", NULL},     {"lm_head", NULL},
};
static const char *const fixture_names[6] = {"embeddings", "layer 0", "layer 1",
                                             "layer 10",   "norm",    "head"};

static inline void fit_fixture_make(fit_fixture *f, qc_arena *arena)
{
    static const uint64_t GB = 1000000000u;
    memset(f, 0, sizeof *f);
    f->devices[0] = (qc_device){"cuda:0", QC_TIER_GPU, NULL, 40 * GB};
    f->devices[1] = (qc_device){"cuda:1", QC_TIER_GPU, NULL, 20 * GB};
    f->devices[2] = (qc_device){"cpu", QC_TIER_CPU, NULL, UINT64_MAX};
    f->budget = (qc_budget){"40GB+20GB+cpu", f->devices, 3, 2};
    for (uint32_t i = 0; i < 6; i++) {
        f->segments[i] = (qc_segment){QC_SEGMENT_LAYER,   i, fixture_names[i],
                                      fixture_modules[i], 1, QC_NO_SEGMENT};
        f->segment_bytes[i] = GB;
        f->segment_kv[i] = GB / 2;
    }
    f->map = (qc_segments){f->segments, 6, NULL, 0};
    f->device_of[3] = 1;
    f->device_of[4] = 1;
    f->device_of[5] = 2;
    f->on[0] = (qc_fit_device){.device = &f->devices[0],
                               .budget_bytes = 36 * GB,
                               .weight_bytes = 18 * GB,
                               .kv_bytes = 9 * GB,
                               .workspace_bytes = 3 * GB,
                               .context_bytes = GB / 2,
                               .free_bytes = 5 * GB + GB / 2,
                               .layers = 2,
                               .segments = 3};
    f->on[1] = (qc_fit_device){.device = &f->devices[1],
                               .budget_bytes = 18 * GB,
                               .weight_bytes = 20 * GB,
                               .kv_bytes = GB,
                               .short_by_bytes = 3 * GB,
                               .layers = 1,
                               .first_layer = 10,
                               .segments = 2};
    f->on[2] = (qc_fit_device){.device = &f->devices[2],
                               .budget_bytes = QC_NO_LIMIT,
                               .weight_bytes = GB,
                               .free_bytes = QC_NO_LIMIT,
                               .segments = 1};
    f->geometry.decoder = 1;
    f->geometry.max_context = 131072;
    f->fit = (qc_fit){.budget = &f->budget,
                      .segments = &f->map,
                      .geometry = &f->geometry,
                      .devices = f->on,
                      .device_of = f->device_of,
                      .segment_bytes = f->segment_bytes,
                      .segment_kv = f->segment_kv,
                      .weight_bytes = 39 * GB,
                      .kv_bytes_per_token = 327680,
                      .kv_bytes = 10 * GB,
                      .fits = 0,
                      .short_by_bytes = 3 * GB,
                      .short_device = 1,
                      .transfer_bytes_per_token = GB,
                      .transfer_seconds = 0.04};
    f->use = (qc_fit_options){.margin = 0.9, .context = 8192, .batch = 1};
    f->schemes[0] = (qc_fit_scheme){"nf4", 560, 68000000000u, 35 * GB};
    f->schemes[1] = (qc_fit_scheme){"keep", 163, 2000000000u, 4 * GB};
    f->suggestions[0] = (qc_suggestion){"--context 4096", "with --context 4096: 1.5 GB left"};
    f->suggestions[1] = (qc_suggestion){"3 cards", "with 3 cards <\"of\" 40 & 20 GB>"};
    f->report = (qc_fit_report){.fit = &f->fit,
                                .use = &f->use,
                                .arena = arena,
                                .model = "model",
                                .model_type = "llama",
                                .to = "nf4",
                                .has_weights = 1,
                                .parameters = 70000000000u,
                                .file_bytes = 39 * GB + 123456,
                                .schemes = f->schemes,
                                .scheme_count = 2,
                                .generates = 1,
                                .max_context = 131072,
                                .max_batch = 0,
                                .whole = {0, 131072},
                                .steps = {2048, 150000},
                                .suggestions = f->suggestions,
                                .suggestion_count = 2};
}

#endif
