/* What `qconv plan --mode train` prints, and its page. */
#include "convert/fit/train_plan.h"

#include "convert/term/console.h"
#include "convert/term/html_text.h"
#include "convert/term/json_members.h"
#include "convert/term/size_text.h"
#include "convert/term/table.h"
#include "formats/file_io.h"

#include <inttypes.h>
#include <string.h>

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
    qc_train_profile profile;
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
        QC_FAIL(err, QC_ERR_USAGE, "--mode train needs a GPU in --vram, got '%s'", budget->text);
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
        QC_FAIL(err, QC_ERR_USAGE, "--zero %u divides states over several GPUs; --vram has one",
                p->wanted.zero);
    if (p->wanted.zero_given && p->wanted.zero == 3 && p->wanted.method_given &&
        p->wanted.method == QC_TRAIN_QLORA)
        QC_FAIL(err, QC_ERR_USAGE,
                "--zero 3 does not divide 4-bit weights; expected --zero 0 to 2 with --method "
                "qlora");
    return QC_OK;
}

/* ---- text ---- */

static qc_status add_row(qc_table *t, const train_plan *p, unsigned index, qc_error *err)
{
    char label[QC_TRAIN_LABEL_BYTES], size[QC_SIZE_TEXT_BYTES];
    const qc_train_setting *s = &p->settings[index];
    const uint64_t terms[] = {s->bytes.parameters,  s->bytes.gradients, s->bytes.optimizer,
                              s->bytes.activations, s->bytes.workspace, s->bytes.total};
    QC_TRY(qc_table_cell(t, qc_train_label(label, &s->options), err));
    for (size_t i = 0; i < sizeof terms / sizeof *terms; i++)
        QC_TRY(qc_table_cell(t, qc_text_bytes(size, terms[i]), err));
    if (s->micro_batch == 0) {
        QC_TRY(qc_table_cell(t, "-", err));
        return qc_table_cellf(t, err, "short by %s",
                              qc_text_bytes(size, s->bytes.total - p->place.budget_bytes));
    }
    QC_TRY(qc_table_cellf(t, err, "%" PRIu64, s->micro_batch));
    uint64_t effective = s->micro_batch * s->accumulation * p->place.gpus;
    if (p->place.gpus == 1)
        return qc_table_cellf(t, err, "x %" PRIu64 " = %" PRIu64, s->accumulation, effective);
    return qc_table_cellf(t, err, "x %" PRIu64 " x %" PRIu32 " GPUs = %" PRIu64, s->accumulation,
                          p->place.gpus, effective);
}

static void add_profile(qc_strbuf *out, const train_plan *p)
{
    char a[QC_SIZE_TEXT_BYTES], b[QC_SIZE_TEXT_BYTES], c[QC_SIZE_TEXT_BYTES];
    const qc_train_profile *m = &p->profile;
    double measured = (double)(m->allocated_bytes + m->context_bytes);
    double estimate = (double)(m->asked_bytes + p->place.context_bytes);
    qc_strbuf_putf(
        out,
        "\nMeasured on %s: context %s, buffers %s for %s asked; the estimate is %+.2f%% off.\n",
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
        qc_strbuf_puts(out, "Nothing fits, with shorter sequences neither; larger cards would do, "
                            "or more of them where --zero divides what is short");
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
                   p->place.gpus == 1 ? "" : "s", qc_text_bytes(size, p->place.budget_bytes),
                   p->place.gpus == 1 ? "" : " each");
}

static qc_status add_text(qc_strbuf *out, const train_plan *p, qc_error *err)
{
    static const char *const titles[] = {"setting",   "weights",     "gradients",
                                         "optimizer", "activations", "workspace",
                                         "total",     "batch",       "accumulated"};
    qc_table t;
    qc_table_init(&t, p->plan->call->arena);
    for (size_t i = 0; i < sizeof titles / sizeof *titles; i++)
        qc_table_column(&t, titles[i], i == 0 || i == 8 ? QC_ALIGN_LEFT : QC_ALIGN_RIGHT);
    for (unsigned i = 0; i < p->count; i++)
        QC_TRY(add_row(&t, p, i, err));
    add_question(out, p);
    QC_TRY(qc_table_render(&t, 2, out, err));
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
    qc_jw_begin_object(w);
    qc_jm_string(w, "label", qc_train_label(label, t));
    qc_jm_string(w, "method", qc_train_method_names[t->method]);
    qc_jm_string(w, "optimizer", qc_train_optimizer_names[t->optimizer]);
    qc_jm_string(w, "precision", qc_train_precision_names[t->precision]);
    qc_jm_u64(w, "zero_stage", t->zero);
    qc_jm_bool(w, "checkpointing", t->checkpointing);
    qc_jm_u64(w, "trained_parameters", qc_train_trained(&p->model, t));
    qc_jm_bool(w, "fits", s->micro_batch > 0);
    qc_jm_u64(w, "short_by_bytes", s->micro_batch ? 0 : s->bytes.total - p->place.budget_bytes);
    qc_jm_u64(w, "micro_batch", s->micro_batch);
    qc_jm_u64(w, "accumulation", s->accumulation);
    qc_jm_u64(w, "effective_batch", s->micro_batch * s->accumulation * p->place.gpus);
    qc_jm_begin_object(w, "bytes_per_gpu");
    qc_jm_u64(w, "parameters", s->bytes.parameters);
    qc_jm_u64(w, "gradients", s->bytes.gradients);
    qc_jm_u64(w, "optimizer", s->bytes.optimizer);
    qc_jm_u64(w, "activations", s->bytes.activations);
    qc_jm_u64(w, "batch_data", s->bytes.batch_data);
    qc_jm_u64(w, "workspace", s->bytes.workspace);
    qc_jm_u64(w, "context", s->bytes.context);
    qc_jm_u64(w, "total", s->bytes.total);
    qc_jw_end_object(w);
    qc_jw_end_object(w);
}

static qc_status add_json(qc_strbuf *out, const train_plan *p, qc_error *err)
{
    qc_json_writer w;
    qc_jw_init(&w, out, err);
    qc_jw_begin_object(&w);
    qc_jm_string(&w, "command", "plan");
    qc_jm_string(&w, "mode", "train");
    qc_jm_path(&w, "model", p->plan->call->model);
    qc_jm_u64(&w, "parameters", p->model.parameters);
    qc_jm_u64(&w, "context", p->place.tokens);
    qc_jm_u64(&w, "gpus", p->place.gpus);
    qc_jm_u64(&w, "budget_bytes", p->place.budget_bytes);
    qc_jm_bool(&w, "fits", p->chosen < p->count);
    qc_jm_u64_if(&w, "longest_context", p->too_long > 0, p->longest);
    qc_jm_begin_array(&w, "settings");
    for (unsigned i = 0; i < p->count; i++)
        put_setting(&w, p, &p->settings[i]);
    qc_jw_end_array(&w);
    qc_jm_string(&w, "applied", p->o->apply);
    if (qc_jm_begin_object_if(&w, "profile", p->profiled)) {
        qc_jm_string(&w, "gpu", p->profile.gpu);
        qc_jm_u64(&w, "context_bytes", p->profile.context_bytes);
        qc_jm_u64(&w, "allocated_bytes", p->profile.allocated_bytes);
        qc_jm_u64(&w, "asked_bytes", p->profile.asked_bytes);
        qc_jw_end_object(&w);
    }
    qc_jw_end_object(&w);
    QC_TRY(qc_jw_finish(&w));
    return qc_strbuf_adds(out, "\n", err);
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
                   qc_text_count(tokens, p->place.tokens), p->place.gpus,
                   p->place.gpus == 1 ? "" : "s", qc_text_bytes(size, p->place.budget_bytes),
                   p->place.gpus == 1 ? "" : " each");
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

/* ---- all of it ---- */

static qc_status act_on_chosen(train_plan *p, const qc_plan *plan, qc_error *err)
{
    const qc_train_options *t = p->o;
    if (p->chosen == p->count) {
        if (t->apply || t->profile)
            QC_FAIL(err, QC_ERR_CHECK,
                    "%s: no setting fits %" PRIu32 " GPU%s, so there is none to %s",
                    p->plan->call->model, p->place.gpus, p->place.gpus == 1 ? "" : "s",
                    t->apply ? "apply" : "measure");
        return QC_OK;
    }
    if (t->profile) {
        QC_TRY(qc_train_measure(&p->profile, p->plan->call->arena, plan, &p->settings[p->chosen],
                                err));
        p->profiled = 1;
    }
    if (t->apply)
        QC_TRY(qc_train_apply(t->apply, &p->settings[p->chosen], &p->place, err));
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
