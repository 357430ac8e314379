/* qconv validate OUT --against MODEL: how far every quantized layer is from what it was made from,
 * in its weights and in what they multiply to, and whether that is good enough. */
#include "base/checked.h"
#include "base/clock.h"
#include "base/workers.h"
#include "convert/adapter/adapters.h"
#include "convert/cli/commands.h"
#include "convert/model/expert_split.h"
#include "convert/term/console.h"
#include "convert/term/target_file.h"
#include "convert/validate/validate_gpu.h"
#include "convert/validate/validate_report.h"
#include "convert/validate/validate_times.h"
#include "formats/file_io.h"

#include <stdio.h>
#include <string.h>

#define TEXT_MAX ((size_t)1 << 30)

typedef struct {
    const qc_options *o;
    qc_arena arena;
    qc_checkpoint *output, *model;
    qc_manifest manifest;
    int has_manifest;
    qc_validate_pairs pairs;
    qc_validate_baseline baseline;
    qc_validate_input input;
    qc_validate_tools tools;
    qc_validate_gpu gpu;
    qc_validate_timer timer; /* without a GPU */
    qc_st_cursor *cursor;
    qc_validate_report report;
} validation;

static qc_status check_targets(const qc_options *o, qc_error *err)
{
    const char *save = o->validate.save_baseline;
    QC_TRY(qc_target_file_check("--save-baseline", save, err));
    /* The weights of a model have the names and widths of activations. */
    QC_TRY(qc_target_file_differs("--activations", o->validate.activations, "--against", o->against,
                                  err));
    /* Otherwise errors that fail against the baseline would become the next run's baseline. */
    return qc_target_file_differs("--save-baseline", save, "--baseline", o->validate.baseline, err);
}

/* This comes after opening, because only then it is known which files there are. */
static qc_status check_sources(const validation *v, qc_error *err)
{
    const qc_checkpoint *read[] = {v->output, v->model, v->input.file};
    for (size_t i = 0; i < sizeof read / sizeof *read && read[i]; i++) {
        QC_TRY(
            qc_target_file_spares("--save-baseline", v->o->validate.save_baseline, read[i], err));
    }
    return QC_OK;
}

static qc_status load_manifest(validation *v, qc_error *err)
{
    const char *path = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    if (!v->output->is_dir)
        return QC_OK;
    QC_TRY(qc_path_join(&v->arena, &path, v->o->model, QC_MANIFEST_NAME, err));
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if (kind == QC_PATH_MISSING)
        return QC_OK;
    v->has_manifest = 1;
    return qc_manifest_load(&v->manifest, &v->arena, v->o->model, err);
}

static qc_status open_all(validation *v, qc_error *err)
{
    const qc_options *o = v->o;
    qc_isa isa = QC_ISA_SCALAR;
    QC_TRY(qc_isa_select(&isa, err));
    QC_TRY(qc_validate_gpu_open(&v->gpu, o->devices, &o->products, &v->arena, err));
    if (o->validate.baseline)
        QC_TRY(qc_validate_baseline_read(&v->baseline, &v->arena, o->validate.baseline, err));
    QC_TRY(qc_checkpoint_open(&v->output, o->model, err));
    QC_TRY(load_manifest(v, err));
    QC_TRY(qc_checkpoint_open(&v->model, o->against, err));
    QC_TRY(qc_experts_are_stacked(v->output) ? qc_experts_join(v->model, err)
                                             : qc_experts_split(v->model, 0, err));
    QC_TRY(qc_adapters_attach(v->model, o->loras, err));
    if (v->has_manifest)
        QC_TRY(qc_adapters_check(v->model, &v->manifest, o->model, err));
    for (size_t i = 0; i < v->model->warning_count; i++)
        qc_console_warn(&o->call, "%s", v->model->warnings[i]);
    QC_TRY(qc_validate_pair_up(&v->pairs, &v->arena, v->output,
                               v->has_manifest ? &v->manifest : NULL, v->model, err));
    v->tools = (qc_validate_tools){.output = v->output,
                                   .model = v->model,
                                   .ops = qc_quant_ops_for(isa),
                                   .matmul = qc_matmul_ops_for(isa),
                                   .threads = o->call.threads ? o->call.threads : qc_cpu_count(),
                                   .weights_only = v->gpu.on};
    QC_TRY(qc_cpu_matmul_create(&v->tools.products, v->tools.threads, err));
    QC_TRY(qc_validate_input_open(&v->input, o->validate.activations, o->products.seed,
                                  v->tools.ops, err));
    QC_TRY(check_sources(v, err));
    return qc_st_cursor_create(&v->cursor, err);
}

/* The CPU's times are taken where no GPU's are. */
static qc_status open_timer(validation *v, qc_error *err)
{
    const qc_product_options *o = &v->o->products;
    uint64_t bytes = 0;
    if (v->gpu.on)
        return QC_OK;
    for (size_t i = 0; i < v->pairs.count; i++)
        bytes = qc_sat_add(bytes, v->pairs.pairs[i].bytes);
    return qc_validate_timer_open(&v->timer, v->tools.products, o->m, o->m_count, bytes, &v->arena,
                                  err);
}

/* Why a pair cannot be measured, or NULL. */
static const char *why_not(const validation *v, const qc_validate_pair *p)
{
    if (p->why_not)
        return p->why_not;
    if (p->rows == 0 || p->cols == 0)
        return "it has no elements";
    return qc_validate_input_find(&v->input, p->name, p->cols)
               ? NULL
               : "there are no activations for it in the file";
}

/* Chooses the pairs that are measured: all, or as many as --sample says, which are the middles of
 * as many equal shares. */
static qc_status choose(validation *v, qc_error *err)
{
    qc_validate_report *r = &v->report;
    size_t rank = 0;
    for (size_t i = 0; i < v->pairs.count; i++)
        r->comparable += why_not(v, &v->pairs.pairs[i]) == NULL;
    uint64_t wanted = v->o->validate.sample;
    uint64_t sample = wanted == 0 || wanted > r->comparable ? r->comparable : wanted;
    QC_TRY(qc_arena_alloc(&v->arena, &r->layers, v->pairs.count, sizeof *r->layers, err));
    for (size_t i = 0; i < v->pairs.count; i++) {
        const qc_validate_pair *pair = &v->pairs.pairs[i];
        const char *why = why_not(v, pair);
        if (!why) {
            /* rank is chosen if a middle (2 j + 1) * comparable / (2 sample) falls on it */
            uint64_t j = (2 * rank * sample + r->comparable) / (2 * r->comparable);
            int chosen = 0;
            for (uint64_t c = j > 0 ? j - 1 : 0; c <= j && c < sample; c++)
                chosen |= (2 * c + 1) * r->comparable / (2 * sample) == rank;
            rank++;
            if (!chosen)
                continue;
            r->measured++;
        }
        r->layers[r->layer_count++] = (qc_validate_layer){.pair = pair, .why_not = why};
    }
    r->quantized = v->pairs.count;
    if (r->comparable > 0)
        return QC_OK;
    QC_FAIL(err, QC_ERR_INPUT, "%s: none of its %zu quantized weights can be compared: '%s': %s",
            v->o->model, v->pairs.count, r->layers[0].pair->name, r->layers[0].why_not);
}

static qc_status measure_layer(validation *v, qc_validate_layer *l, qc_error *err)
{
    const qc_validate_pair *p = l->pair;
    qc_stored_arrays w = {0};
    qc_dtype dtype = qc_validate_gpu_x_dtype(&v->gpu, qc_validate_x_dtype(p->dtype));
    l->device = "cpu";
    qc_status st = qc_stored_read(&w, v->output, p->out_tensor, p->stored, v->cursor, err);
    if (st == QC_OK)
        st = qc_validate_input_make(&v->input, p->name, dtype, QC_VALIDATE_ROWS, p->cols, err);
    if (st == QC_OK)
        st = qc_validate_measure(l, &v->tools, p, &w.w, &v->input, err);
    if (st == QC_OK && !v->gpu.on)
        st = qc_validate_take_times(&v->timer, l, &w.w, &v->input, err);
    if (st == QC_OK)
        st = qc_validate_gpu_measure(&v->gpu, l, &v->tools, &w, &v->input, &v->arena, err);
    qc_stored_deinit(&w);
    return st;
}

static qc_status measure_all(validation *v, qc_error *err)
{
    qc_validate_report *r = &v->report;
    uint64_t total = 0;
    for (size_t i = 0; i < r->layer_count; i++)
        if (!r->layers[i].why_not)
            total += v->model->tensors[r->layers[i].pair->model_tensor].bytes;
    qc_console_detail(&v->o->call, 1, "comparing %zu of %zu quantized weights", r->measured,
                      r->quantized);
    QC_TRY(qc_progress_create(&v->tools.progress, &v->o->call, "validating", total, err));
    qc_status st = QC_OK;
    for (size_t i = 0; st == QC_OK && i < r->layer_count; i++)
        if (!r->layers[i].why_not)
            st = measure_layer(v, &r->layers[i], err);
    if (st == QC_OK)
        st = qc_check_interrupted(err);
    qc_progress_destroy(v->tools.progress);
    v->tools.progress = NULL;
    return st;
}

/* ---- what is said --------------------------------------------------------------------------- */

static qc_status answer(validation *v, qc_error *err)
{
    const qc_options *o = v->o;
    qc_strbuf out;
    if (o->validate.save_baseline) {
        qc_strbuf_init(&out, TEXT_MAX);
        QC_TRY(qc_console_deliver(qc_validate_baseline_text(&v->report, &out, err), &out,
                                  o->validate.save_baseline, err));
    }
    qc_strbuf_init(&out, TEXT_MAX);
    qc_status st = o->call.json ? qc_validate_json(&v->report, &out, err)
                                : qc_validate_text(&v->report, &v->arena, &out, err);
    return qc_console_deliver(st, &out, NULL, err);
}

/* Names as many layers as a line holds. */
static qc_status verdict(const validation *v, qc_error *err)
{
    const qc_validate_report *r = &v->report;
    char names[384] = "";
    size_t len = 0, named = 0;
    if (r->failure_count == 0)
        return QC_OK;
    for (; named < r->failure_count; named++) {
        const qc_validate_failure *f = &r->failures[named];
        size_t n = strlen(f->name) + 4;
        if (named > 0 && (len + n + 1 > sizeof names || named == 4))
            break;
        int wrote = snprintf(names + len, sizeof names - len, "%s'%s'", named ? ", " : "", f->name);
        len += wrote > 0 && (size_t)wrote < sizeof names - len ? (size_t)wrote : 0;
    }
    if (r->failure_count == 1)
        QC_FAIL(err, QC_ERR_CHECK, "%s: %s: %s", r->out, names, r->failures[0].why);
    if (named < r->failure_count)
        QC_FAIL(err, QC_ERR_CHECK, "%s: %zu layers are worse than allowed: %s and %zu more", r->out,
                r->failure_count, names, r->failure_count - named);
    QC_FAIL(err, QC_ERR_CHECK, "%s: %zu layers are worse than allowed: %s", r->out,
            r->failure_count, names);
}

static qc_status run(validation *v, qc_error *err)
{
    const qc_options *o = v->o;
    uint64_t started = qc_clock_ns();
    QC_TRY(check_targets(o, err));
    QC_TRY(open_all(v, err));
    QC_TRY(open_timer(v, err));
    v->report = (qc_validate_report){.out = o->model,
                                     .model = o->against,
                                     .activations = o->validate.activations,
                                     .seed = o->products.seed,
                                     .rows = QC_VALIDATE_ROWS,
                                     .sample = o->validate.sample,
                                     .device = v->gpu.name,
                                     .left_out = v->gpu.left_out,
                                     .m = v->gpu.on ? o->products.m : v->timer.m,
                                     .m_count = v->gpu.on ? o->products.m_count : v->timer.m_count,
                                     .timed_on_cpu = !v->gpu.on,
                                     .threads = v->tools.threads,
                                     .isa = qc_isa_name(v->tools.ops->isa),
                                     .max_error = o->validate.max_error,
                                     .baseline = o->validate.baseline,
                                     .tolerance = o->validate.tolerance};
    if (o->validate.baseline)
        QC_TRY(qc_validate_baseline_fits(&v->baseline, &v->report, err));
    QC_TRY(choose(v, err));
    if (o->validate.baseline)
        QC_TRY(qc_validate_baseline_cover(&v->baseline, &v->report, err));
    QC_TRY(measure_all(v, err));
    v->report.read_rate = qc_validate_read_rate(&v->timer);
    QC_TRY(qc_validate_judge(&v->report, &v->pairs, o->validate.baseline ? &v->baseline : NULL,
                             &v->arena, err));
    v->report.seconds = (double)(qc_clock_ns() - started) * 1e-9;
    QC_TRY(answer(v, err));
    return verdict(v, err);
}

qc_status qc_cmd_validate(const qc_options *o, qc_error *err)
{
    validation v;
    memset(&v, 0, sizeof v);
    v.o = o;
    qc_arena_init(&v.arena);
    qc_status st = run(&v, err);
    qc_validate_timer_close(&v.timer);
    qc_cpu_matmul_destroy(v.tools.products);
    qc_st_cursor_destroy(v.cursor);
    qc_validate_input_close(&v.input);
    qc_validate_gpu_close(&v.gpu);
    qc_checkpoint_close(v.model);
    qc_checkpoint_close(v.output);
    qc_arena_deinit(&v.arena);
    return st;
}
