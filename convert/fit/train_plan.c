/* What `qconv plan --mode train` prints, its page, the configuration that it writes and what it
 * measures. */
#include "convert/fit/train_plan.h"

#include "base/alloc.h"
#include "base/text.h"
#include "convert/hardware/cuda_driver.h"
#include "convert/hardware/hardware.h"
#include "convert/term/console.h"
#include "convert/term/html_text.h"
#include "convert/term/size_text.h"
#include "convert/term/table.h"
#include "formats/file_io.h"
#include "formats/json_writer.h"

#include <inttypes.h>
#include <string.h>

/* What a setting really takes on the first GPU. */
typedef struct {
    const char *gpu;
    uint64_t context_bytes;   /* bytes that the CUDA context alone takes */
    uint64_t allocated_bytes; /* by how much the memory counter went down for all buffers */
    uint64_t asked_bytes;     /* the estimate without the context */
} train_profile;

typedef struct {
    const qc_plan *plan;
    const qc_train_options *o;
    const char *html; /* --html FILE, or NULL */
    qc_train_model model;
    qc_train_place place;
    qc_train_options wanted;
    qc_train_setting settings[QC_TRAIN_MAX_SETTINGS];
    unsigned count;
    unsigned chosen;   /* the first that fits; count if none does */
    uint64_t too_long; /* tokens with which nothing fits: what was asked for, or the default that
                          was shortened to place.tokens. 0: something does */
    uint64_t longest;  /* beside too_long: the most tokens with which something fits; 0: none */
    train_profile profile;
    int profiled;
} train_plan;

static qc_status find_place(train_plan *p, const qc_geometry *g, const qc_budget *budget,
                            qc_error *err)
{
    const qc_fit_options *f = &p->plan->options->fit;
    uint64_t smallest = UINT64_MAX;
    int old = 0;
    for (uint32_t i = 0; i < budget->gpu_count; i++) {
        const qc_device *d = &budget->devices[i];
        if (d->total_bytes < smallest)
            smallest = d->total_bytes;
        old |= d->card && d->card->sm < 80;
    }
    if (budget->gpu_count == 0)
        QC_FAIL(err, QC_ERR_USAGE, "--mode train needs a GPU in --vram, found '%s'", budget->text);
    p->place.gpus = budget->gpu_count;
    p->place.budget_bytes = (uint64_t)((double)smallest * f->margin);
    p->place.context_bytes = f->cuda_context_bytes;
    p->place.tokens = f->context;
    if (f->context == 0)
        p->place.tokens = g->max_context && g->max_context < 8192 ? g->max_context : 8192;
    p->wanted = *p->o;
    if (!p->wanted.precision_given)
        p->wanted.precision = old ? QC_PRECISION_FP16 : QC_PRECISION_BF16;
    if (p->wanted.zero_given && p->wanted.zero > 0 && budget->gpu_count == 1)
        QC_FAIL(err, QC_ERR_USAGE,
                "--zero %u divides states over several GPUs, but --vram names one; use --zero 0",
                p->wanted.zero);
    if (p->wanted.zero_given && p->wanted.zero == 3 && p->wanted.method_given &&
        p->wanted.method == QC_TRAIN_QLORA)
        QC_FAIL(err, QC_ERR_USAGE,
                "--zero 3 does not divide 4-bit weights; expected --zero 0 to 2 with --method "
                "qlora");
    return QC_OK;
}

/* ---- text ---- */

static void add_row(qc_table *t, const train_plan *p, const qc_train_setting *s)
{
    char label[QC_TRAIN_LABEL_BYTES], size[QC_SIZE_TEXT_BYTES];
    const uint64_t terms[] = {s->bytes.parameters,  s->bytes.gradients, s->bytes.optimizer,
                              s->bytes.activations, s->bytes.workspace, s->bytes.total};
    uint64_t effective = s->micro_batch * s->accumulation * p->place.gpus;
    qc_table_put(t, qc_train_label(label, &s->options));
    for (size_t i = 0; i < sizeof terms / sizeof *terms; i++)
        qc_table_bytes(t, terms[i]);
    if (s->micro_batch == 0) {
        qc_table_put(t, "-");
        qc_table_putf(t, "short by %s",
                      qc_text_bytes(size, s->bytes.total - p->place.budget_bytes));
        return;
    }
    qc_table_number(t, s->micro_batch);
    if (p->place.gpus == 1)
        qc_table_putf(t, "x %" PRIu64 " = %" PRIu64, s->accumulation, effective);
    else
        qc_table_putf(t, "x %" PRIu64 " x %" PRIu32 " GPUs = %" PRIu64, s->accumulation,
                      p->place.gpus, effective);
}

static void add_profile(qc_strbuf *out, const train_plan *p)
{
    char a[QC_SIZE_TEXT_BYTES], b[QC_SIZE_TEXT_BYTES], c[QC_SIZE_TEXT_BYTES];
    const train_profile *m = &p->profile;
    double measured = (double)(m->allocated_bytes + m->context_bytes);
    double estimate = (double)(m->asked_bytes + p->place.context_bytes);
    qc_strbuf_putf(out,
                   "\nMeasured on %s: the context takes %s, and buffers take %s where %s were "
                   "asked for; the estimate is %+.2f%% off.\n",
                   m->gpu, qc_text_bytes(a, m->context_bytes), qc_text_bytes(b, m->allocated_bytes),
                   qc_text_bytes(c, m->asked_bytes),
                   measured > 0 ? (estimate - measured) / measured * 100.0 : 0.0);
}

/* Returns the first setting that fits sequences of so many tokens, or count if none does. */
static unsigned settings_for(train_plan *p, uint64_t tokens)
{
    unsigned chosen = 0;
    p->place.tokens = tokens;
    p->count = qc_train_settings(&p->model, &p->wanted, &p->place, p->settings);
    while (chosen < p->count && p->settings[chosen].micro_batch == 0)
        chosen++;
    return chosen;
}

/* Finds settings for what was asked for. If nothing fits, it looks for the longest sequences with
 * which something does (memory only grows with them). Without --context it then halves the default
 * until something fits. */
static void find_settings(train_plan *p)
{
    enum { MIN_TOKENS = 128 };
    uint64_t asked = p->place.tokens, good = 0, bad = asked, halved = asked;
    p->chosen = settings_for(p, asked);
    if (p->chosen < p->count)
        return;
    p->too_long = asked;
    while (bad - good > 1) {
        uint64_t middle = good + (bad - good) / 2;
        *(settings_for(p, middle) < p->count ? &good : &bad) = middle;
    }
    p->longest = good >= MIN_TOKENS ? good : 0;
    while (!p->o->context_given && p->longest && halved > p->longest)
        halved /= 2;
    p->chosen = settings_for(p, halved);
}

/* Adds one sentence about what does not fit, or nothing. */
static void add_too_long(qc_strbuf *out, const train_plan *p)
{
    char asked[QC_SIZE_TEXT_BYTES], longest[QC_SIZE_TEXT_BYTES];
    if (p->too_long == 0)
        return;
    if (p->longest == 0) {
        qc_strbuf_puts(out, "Nothing fits, not even with shorter sequences; larger cards help, or "
                            "more of them where --zero divides what is short");
        return;
    }
    qc_strbuf_putf(out,
                   "Nothing fits sequences of %s tokens%s; the longest that fit have %s "
                   "(--context %" PRIu64 ")",
                   qc_text_count(asked, p->too_long),
                   p->o->context_given ? "" : ", the default, so these are shorter",
                   qc_text_count(longest, p->longest), p->longest);
}

static void add_question(qc_strbuf *out, const train_plan *p)
{
    char count[QC_SIZE_TEXT_BYTES], tokens[QC_SIZE_TEXT_BYTES], size[QC_SIZE_TEXT_BYTES];
    qc_strbuf_putf(out, "%s: %s parameters, sequences of %s tokens\n", p->plan->call->model,
                   qc_text_count(count, p->model.parameters),
                   qc_text_count(tokens, p->place.tokens));
    qc_strbuf_putf(out, "%" PRIu32 " GPU%s with %s to use%s\n\n", p->place.gpus,
                   qc_plural(p->place.gpus), qc_text_bytes(size, p->place.budget_bytes),
                   p->place.gpus == 1 ? "" : " each");
}

static qc_status add_text(qc_strbuf *out, const train_plan *p, qc_error *err)
{
    qc_table t;
    qc_table_begin(&t, p->plan->call->arena,
                   "setting|>weights|>gradients|>optimizer|>activations|>workspace|>total|>batch|"
                   "accumulated");
    for (unsigned i = 0; i < p->count; i++)
        add_row(&t, p, &p->settings[i]);
    add_question(out, p);
    qc_table_print(&t, 2, out);
    if (p->too_long) {
        qc_strbuf_puts(out, "\n");
        add_too_long(out, p);
        qc_strbuf_puts(out, "\n");
    }
    if (p->profiled)
        add_profile(out, p);
    return qc_strbuf_status(out, err);
}

/* ---- JSON ---- */

static void put_setting(qc_json_writer *w, const train_plan *p, const qc_train_setting *s)
{
    const qc_train_options *t = &s->options;
    char label[QC_TRAIN_LABEL_BYTES];
    qc_json_write_begin_object(w);
    qc_json_member_string(w, "label", qc_train_label(label, t));
    qc_json_member_string(w, "method", qc_train_method_names[t->method]);
    qc_json_member_string(w, "optimizer", qc_train_optimizer_names[t->optimizer]);
    qc_json_member_string(w, "precision", qc_train_precision_names[t->precision]);
    qc_json_member_u64(w, "zero_stage", t->zero);
    qc_json_member_bool(w, "checkpointing", t->checkpointing);
    qc_json_member_u64(w, "trained_parameters", qc_train_trained(&p->model, t));
    qc_json_member_bool(w, "fits", s->micro_batch > 0);
    qc_json_member_u64(w, "short_by_bytes",
                       s->micro_batch ? 0 : s->bytes.total - p->place.budget_bytes);
    qc_json_member_u64(w, "micro_batch", s->micro_batch);
    qc_json_member_u64(w, "accumulation", s->accumulation);
    qc_json_member_u64(w, "effective_batch", s->micro_batch * s->accumulation * p->place.gpus);
    qc_json_member_begin_object(w, "bytes_per_gpu");
    qc_json_member_u64(w, "parameters", s->bytes.parameters);
    qc_json_member_u64(w, "gradients", s->bytes.gradients);
    qc_json_member_u64(w, "optimizer", s->bytes.optimizer);
    qc_json_member_u64(w, "activations", s->bytes.activations);
    qc_json_member_u64(w, "batch_data", s->bytes.batch_data);
    qc_json_member_u64(w, "workspace", s->bytes.workspace);
    qc_json_member_u64(w, "context", s->bytes.context);
    qc_json_member_u64(w, "total", s->bytes.total);
    qc_json_write_end_object(w);
    qc_json_write_end_object(w);
}

static qc_status add_json(qc_strbuf *out, const train_plan *p, qc_error *err)
{
    qc_json_writer w;
    qc_json_write_begin_text(&w, out, err);
    qc_json_member_string(&w, "command", "plan");
    qc_json_member_string(&w, "mode", "train");
    qc_json_member_path(&w, "model", p->plan->call->model);
    qc_json_member_u64(&w, "parameters", p->model.parameters);
    qc_json_member_u64(&w, "context", p->place.tokens);
    qc_json_member_u64(&w, "gpus", p->place.gpus);
    qc_json_member_u64(&w, "budget_bytes", p->place.budget_bytes);
    qc_json_member_bool(&w, "fits", p->chosen < p->count);
    qc_json_member_u64_if(&w, "longest_context", p->too_long > 0, p->longest);
    qc_json_member_begin_array(&w, "settings");
    for (unsigned i = 0; i < p->count; i++)
        put_setting(&w, p, &p->settings[i]);
    qc_json_write_end_array(&w);
    qc_json_member_string(&w, "applied", p->o->apply);
    if (qc_json_member_begin_object_if(&w, "profile", p->profiled)) {
        qc_json_member_string(&w, "gpu", p->profile.gpu);
        qc_json_member_u64(&w, "context_bytes", p->profile.context_bytes);
        qc_json_member_u64(&w, "allocated_bytes", p->profile.allocated_bytes);
        qc_json_member_u64(&w, "asked_bytes", p->profile.asked_bytes);
        qc_json_write_end_object(&w);
    }
    return qc_json_write_end_text(&w);
}

/* ---- the page ---- */

enum { PARTS = 7 };
static const char *const part_names[PARTS] = {
    "weights", "gradients", "optimizer", "activations", "batch data", "workspace", "CUDA context"};
static const unsigned part_colours[PARTS] = {0, 1, 5, 4, 7, 2, 3};

static void list_parts(const qc_train_bytes *b, uint64_t parts[PARTS])
{
    const uint64_t list[PARTS] = {b->parameters, b->gradients, b->optimizer, b->activations,
                                  b->batch_data, b->workspace, b->context};
    memcpy(parts, list, sizeof list);
}

static void add_setting_bar(qc_strbuf *out, const train_plan *p, const qc_train_setting *s,
                            double most)
{
    char label[QC_TRAIN_LABEL_BYTES], size[QC_SIZE_TEXT_BYTES], total[QC_SIZE_TEXT_BYTES];
    uint64_t bytes[PARTS];
    qc_html_part shown[PARTS];
    list_parts(&s->bytes, bytes);
    for (int i = 0; i < PARTS; i++)
        shown[i] = (qc_html_part){part_names[i], bytes[i], part_colours[i]};
    qc_strbuf_putf(out, "<div class=\"bar\"><b>%s</b>: %s of %s%s\n",
                   qc_train_label(label, &s->options), qc_text_bytes(total, s->bytes.total),
                   qc_text_bytes(size, p->place.budget_bytes),
                   s->micro_batch ? "" : " <span class=\"no\">(does not fit)</span>");
    qc_html_bar(out, shown, PARTS, (double)p->place.budget_bytes, most);
    qc_strbuf_puts(out, "</div>\n");
}

static void add_setting_row(qc_strbuf *out, const train_plan *p, const qc_train_setting *s)
{
    char label[QC_TRAIN_LABEL_BYTES], size[QC_SIZE_TEXT_BYTES];
    uint64_t bytes[PARTS];
    list_parts(&s->bytes, bytes);
    qc_strbuf_putf(out, "<tr><td>%s</td>", qc_train_label(label, &s->options));
    for (int i = 0; i < PARTS; i++)
        qc_strbuf_putf(out, "<td>%s</td>", qc_text_bytes(size, bytes[i]));
    qc_strbuf_putf(out, "<td>%s</td>", qc_text_bytes(size, s->bytes.total));
    if (s->micro_batch == 0)
        qc_strbuf_putf(out, "<td class=\"no\">%s</td><td></td><td></td><td></td></tr>\n",
                       qc_text_bytes(size, s->bytes.total - p->place.budget_bytes));
    else
        qc_strbuf_putf(
            out, "<td></td><td>%" PRIu64 "</td><td>%" PRIu64 "</td><td>%" PRIu64 "</td></tr>\n",
            s->micro_batch, s->accumulation, s->micro_batch * s->accumulation * p->place.gpus);
}

static void add_page(qc_strbuf *out, const train_plan *p)
{
    char count[QC_SIZE_TEXT_BYTES], tokens[QC_SIZE_TEXT_BYTES], size[QC_SIZE_TEXT_BYTES];
    double most = (double)p->place.budget_bytes;
    qc_html_begin(out, "qconv plan --mode train", "th{white-space:normal}");
    qc_strbuf_puts(out, "<h1>Fine-tuning ");
    qc_html_escape(out, p->plan->call->model);
    qc_strbuf_putf(out,
                   "</h1>\n<p>%s parameters, sequences of %s tokens; %" PRIu32
                   " GPU%s with %s to use%s.</p>\n",
                   qc_text_count(count, p->model.parameters),
                   qc_text_count(tokens, p->place.tokens), p->place.gpus, qc_plural(p->place.gpus),
                   qc_text_bytes(size, p->place.budget_bytes), p->place.gpus == 1 ? "" : " each");
    if (p->too_long) {
        qc_strbuf_puts(out, "<p class=\"no\">");
        add_too_long(out, p);
        qc_strbuf_puts(out, ".</p>\n");
    }
    qc_strbuf_puts(out, "<h2>Memory of a GPU</h2>\n");
    for (unsigned i = 0; i < p->count; i++)
        most =
            (double)p->settings[i].bytes.total > most ? (double)p->settings[i].bytes.total : most;
    for (unsigned i = 0; i < p->count; i++)
        add_setting_bar(out, p, &p->settings[i], most);
    qc_strbuf_puts(out, "<p>");
    for (int i = 0; i < PARTS; i++)
        qc_html_key(out, part_names[i], part_colours[i]);
    qc_strbuf_puts(out, "</p>\n<h2>Settings</h2>\n<table>\n<tr><th>setting</th>");
    for (int i = 0; i < PARTS; i++)
        qc_strbuf_putf(out, "<th>%s</th>", part_names[i]);
    qc_strbuf_puts(out, "<th>total</th><th>short by</th><th>micro-batch</th><th>steps</th>"
                        "<th>batch of all GPUs</th></tr>\n");
    for (unsigned i = 0; i < p->count; i++)
        add_setting_row(out, p, &p->settings[i]);
    qc_html_table_end(out);
    qc_html_end(out);
}

static qc_status put_page(const train_plan *p, qc_error *err)
{
    qc_strbuf out;
    if (!p->html)
        return QC_OK;
    qc_strbuf_init(&out, (size_t)1 << 20);
    add_page(&out, p);
    qc_status st = qc_strbuf_status(&out, err);
    if (st == QC_OK)
        st = qc_file_put(p->html, out.data, out.len, err);
    qc_strbuf_deinit(&out);
    return st;
}

/* ---- measuring ---- */

/* --profile measures the CUDA context, by the memory counter before and after it is made (NVML sees
 * the GPU without one). It also takes every buffer of the setting for real: parameters tensor by
 * tensor, the rest in blocks of the size that a caching allocator takes. How a framework fragments
 * its memory is not measured. */
#define BLOCK_BYTES ((uint64_t)64 << 20)

static qc_status take_blocks(qc_cuda_driver *d, uint64_t bytes, uint64_t *asked, qc_error *err)
{
    while (bytes > 0) {
        uint64_t n = bytes < BLOCK_BYTES ? bytes : BLOCK_BYTES;
        QC_TRY(qc_cuda_driver_take(d, n, err));
        *asked += n;
        bytes -= n;
    }
    return QC_OK;
}

/* Takes the parameters as they are laid out: first tensor by tensor, then what is left
 * (adapters). */
static qc_status take_parameters(qc_cuda_driver *d, const qc_plan *plan, uint64_t bytes,
                                 uint64_t *asked, qc_error *err)
{
    for (uint32_t i = 0; i < plan->tensor_count; i++) {
        uint64_t n = qc_plan_tensor_bytes(plan, i);
        if (n == 0 || n > bytes)
            continue;
        QC_TRY(qc_cuda_driver_take(d, n, err));
        *asked += n;
        bytes -= n;
    }
    return take_blocks(d, bytes, asked, err);
}

static qc_status take_all(qc_cuda_driver *d, const qc_plan *plan, const qc_train_setting *s,
                          uint64_t *asked, qc_error *err)
{
    const uint64_t terms[] = {s->bytes.gradients, s->bytes.optimizer, s->bytes.activations,
                              s->bytes.batch_data, s->bytes.workspace};
    QC_TRY(take_parameters(d, plan, s->bytes.parameters, asked, err));
    for (size_t i = 0; i < sizeof terms / sizeof *terms; i++)
        QC_TRY(take_blocks(d, terms[i], asked, err));
    return QC_OK;
}

static qc_status measure(train_profile *out, const qc_plan *plan, const qc_train_setting *s,
                         qc_error *err)
{
    qc_arena *arena = plan->call->arena;
    qc_hardware hardware;
    qc_cuda_driver *d = NULL;
    uint64_t with_context = 0, with_all = 0, total = 0;
    *out = (train_profile){0};
    QC_TRY(qc_hardware_read(&hardware, arena, err));
    if (hardware.gpu_count == 0)
        QC_FAIL(err, QC_ERR_DEVICE, "--profile needs a GPU: %s",
                hardware.no_gpu ? hardware.no_gpu : "none is visible");
    uint64_t before = hardware.gpus[0].free_bytes;
    QC_TRY(qc_cuda_driver_open(&d, 0, err));
    qc_status st = qc_arena_printf(arena, &out->gpu, err, "%s", qc_cuda_driver_gpu(d));
    if (st == QC_OK)
        st = qc_cuda_driver_memory(d, &with_context, &total, err);
    if (st == QC_OK)
        st = take_all(d, plan, s, &out->asked_bytes, err);
    if (st == QC_OK)
        st = qc_cuda_driver_memory(d, &with_all, &total, err);
    qc_cuda_driver_close(d);
    if (st == QC_ERR_NOMEM)
        qc_error_prefix(err, "--profile, after %" PRIu64 " bytes were taken", out->asked_bytes);
    QC_TRY(st);
    out->context_bytes = before > with_context ? before - with_context : 0;
    out->allocated_bytes = with_context > with_all ? with_context - with_all : 0;
    return QC_OK;
}

/* ---- the configuration ---- */

/* Files that accelerate and DeepSpeed read. Sources: accelerate, "The command line" (config_args,
 * JSON form); DeepSpeed, "Configuration JSON". */
static int is_deepspeed(const char *path)
{
    const char *name = qc_last_name(path);
    return strstr(name, "deepspeed") != NULL || strstr(name, "ds_") != NULL;
}

static void put_enabled(qc_json_writer *w, const char *key, int on)
{
    qc_json_member_begin_object(w, key);
    qc_json_member_bool(w, "enabled", on);
    qc_json_write_end_object(w);
}

static void put_deepspeed(qc_json_writer *w, const qc_train_setting *s, const qc_train_place *place)
{
    const qc_train_options *t = &s->options;
    qc_json_write_begin_object(w);
    qc_json_member_u64(w, "train_micro_batch_size_per_gpu", s->micro_batch);
    qc_json_member_u64(w, "gradient_accumulation_steps", s->accumulation);
    qc_json_member_u64(w, "train_batch_size", s->micro_batch * s->accumulation * place->gpus);
    put_enabled(w, "bf16", t->precision == QC_PRECISION_BF16);
    put_enabled(w, "fp16", t->precision == QC_PRECISION_FP16);
    qc_json_member_begin_object(w, "zero_optimization");
    qc_json_member_u64(w, "stage", t->zero);
    qc_json_write_end_object(w);
    qc_json_write_end_object(w);
}

static void put_accelerate(qc_json_writer *w, const qc_train_setting *s,
                           const qc_train_place *place)
{
    static const char *const precision[] = {"bf16", "fp16", "no"};
    const qc_train_options *t = &s->options;
    qc_json_write_begin_object(w);
    qc_json_member_string(w, "compute_environment", "LOCAL_MACHINE");
    qc_json_member_bool(w, "debug", 0);
    qc_json_member_string(w, "distributed_type",
                          t->zero           ? "DEEPSPEED"
                          : place->gpus > 1 ? "MULTI_GPU"
                                            : "NO");
    if (t->zero) {
        qc_json_member_begin_object(w, "deepspeed_config");
        qc_json_member_u64(w, "zero_stage", t->zero);
        qc_json_member_u64(w, "gradient_accumulation_steps", s->accumulation);
        qc_json_member_string(w, "offload_optimizer_device", "none");
        qc_json_member_string(w, "offload_param_device", "none");
        qc_json_member_bool(w, "zero3_init_flag", t->zero == 3);
        qc_json_member_bool(w, "zero3_save_16bit_model", t->zero == 3);
        qc_json_write_end_object(w);
    }
    qc_json_member_string(w, "downcast_bf16", "no");
    qc_json_member_u64(w, "machine_rank", 0);
    qc_json_member_string(w, "main_training_function", "main");
    qc_json_member_string(w, "mixed_precision", precision[t->precision]);
    qc_json_member_u64(w, "num_machines", 1);
    qc_json_member_u64(w, "num_processes", place->gpus);
    qc_json_member_bool(w, "use_cpu", 0);
    qc_json_write_end_object(w);
}

static qc_status put_config(qc_strbuf *out, const char *path, const qc_train_setting *s,
                            const qc_train_place *place, qc_error *err)
{
    qc_json_writer w;
    qc_json_write_init(&w, out, err);
    if (is_deepspeed(path))
        put_deepspeed(&w, s, place);
    else
        put_accelerate(&w, s, place);
    QC_TRY(qc_json_write_finish(&w));
    return qc_strbuf_adds(out, "\n", err);
}

/* Writes the setting to path. The old file is renamed first, to path.backup. If writing fails then,
 * it is put back. */
static qc_status apply(const char *path, const qc_train_setting *s, const qc_train_place *place,
                       qc_error *err)
{
    qc_strbuf text, backup;
    qc_path_kind kind = QC_PATH_MISSING;
    uint64_t bytes = 0;
    qc_strbuf_init(&text, 1u << 20);
    qc_strbuf_init(&backup, 1u << 20);
    qc_status st = put_config(&text, path, s, place, err);
    qc_strbuf_putf(&backup, "%s.backup", path);
    if (st == QC_OK)
        st = qc_strbuf_status(&backup, err);
    if (st == QC_OK)
        st = qc_path_stat(path, &kind, &bytes, err);
    if (st == QC_OK && kind != QC_PATH_MISSING && kind != QC_PATH_FILE)
        st = QC_ERROR(err, QC_ERR_INPUT,
                      "%s: --apply writes a file, but something else has this name", path);
    if (st == QC_OK && kind == QC_PATH_FILE)
        st = qc_path_rename(path, backup.data, err);
    if (st == QC_OK) {
        st = qc_file_put(path, text.data, text.len, err);
        if (st != QC_OK && kind == QC_PATH_FILE)
            (void)!qc_path_rename(backup.data, path, NULL);
    }
    qc_strbuf_deinit(&text);
    qc_strbuf_deinit(&backup);
    return st;
}

/* ---- all of it ---- */

static qc_status act_on_chosen(train_plan *p, const qc_plan *plan, qc_error *err)
{
    const qc_train_options *t = p->o;
    if (p->chosen == p->count) {
        if (t->apply || t->profile)
            QC_FAIL(
                err, QC_ERR_CHECK,
                "%s: no setting fits %" PRIu32
                " GPU%s, so there is none to %s; without this option the plan shows what is short",
                p->plan->call->model, p->place.gpus, qc_plural(p->place.gpus),
                t->apply ? "apply" : "measure");
        return QC_OK;
    }
    if (t->profile) {
        QC_TRY(measure(&p->profile, plan, &p->settings[p->chosen], err));
        p->profiled = 1;
    }
    if (t->apply)
        QC_TRY(apply(t->apply, &p->settings[p->chosen], &p->place, err));
    return QC_OK;
}

qc_status qc_train_plan(const qc_train_options *o, const char *html, const qc_plan *plan,
                        const qc_geometry *geometry, const qc_budget *budget, qc_error *err)
{
    train_plan p = {.plan = plan, .o = o, .html = html};
    qc_strbuf out;
    QC_TRY(find_place(&p, geometry, budget, err));
    qc_train_model_of(&p.model, plan, geometry);
    if (geometry->layer_count == 0 || p.model.parameters == 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%s: --mode train needs a config.json that gives the model's layers",
                plan->call->model);
    find_settings(&p);
    QC_TRY(put_page(&p, err));
    QC_TRY(act_on_chosen(&p, plan, err));
    qc_strbuf_init(&out, (size_t)1 << 20);
    qc_status st = plan->call->json ? add_json(&out, &p, err) : add_text(&out, &p, err);
    if (st == QC_OK)
        st = qc_console_result(&out, err);
    qc_strbuf_deinit(&out);
    return st;
}
