#include "convert/fit/fit_report.h"

#include "base/checked.h"
#include "base/text.h"
#include "convert/fit/tensor_parallel.h"
#include "convert/plan/loaders.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- sums ---- */

uint64_t qc_fit_parameters_of(const qc_plan *plan, const qc_job *job)
{
    const qc_checkpoint_tensor *t = &plan->model->tensors[job->source];
    const qc_recipe_entry *e = job->entry;
    if (e->role == QC_ROLE_STATE || qc_ends_with(t->name, "inv_freq") ||
        qc_ends_with(t->name, "position_ids"))
        return 0;
    const int decoded = e->stored || e->coded;
    if (!decoded && e->role == QC_ROLE_PACKED && t->dtype == QC_DTYPE_U8)
        return t->bytes * 2; /* codes of e2m1 without scales beside them */
    if (!decoded && qc_dtype_is_integer(t->dtype))
        return 0;
    const unsigned ndim = e->stored ? e->stored->ndim : e->coded ? e->coded->ndim : t->ndim;
    const uint64_t *dims = e->stored ? e->stored->dims : e->coded ? e->coded->dims : t->dims;
    uint64_t elems = 1;
    for (unsigned i = 0; i < ndim; i++)
        elems *= dims[i]; /* The recipe has checked the shape. */
    return elems;
}

qc_status qc_fit_sum_schemes(qc_fit_report *r, const qc_plan *plan, qc_error *err)
{
    enum { ROOM = QC_SCHEME_COUNT + 7 };
    typedef struct {
        qc_scheme scheme;
        uint32_t block_elems;
    } key;
    key keys[ROOM];
    qc_fit_scheme *sums = NULL;
    QC_TRY(qc_arena_array(r->arena, &sums, ROOM, err));
    uint32_t count = 0;
    r->parameters = 0;
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_job *j = &plan->jobs[i];
        const uint32_t block = qc_schemes[j->scheme].default_block ? j->form.block_elems : 0;
        uint32_t k = 0;
        while (k < count && (keys[k].scheme != j->scheme || keys[k].block_elems != block))
            k++;
        if (k == count) {
            if (count == ROOM)
                QC_FAIL(err, QC_ERR_INTERNAL, "more than %d schemes in one plan", (int)ROOM);
            keys[count++] = (key){j->scheme, block};
            /* "nf4" means blocks of 64; other sizes are part of the name. */
            sums[k].name = qc_scheme_name(j->scheme);
            if (block != qc_schemes[j->scheme].default_block)
                QC_TRY(qc_arena_printf(r->arena, &sums[k].name, err, "%s-%" PRIu32, sums[k].name,
                                       block));
        }
        uint64_t parameters = qc_fit_parameters_of(plan, j);
        sums[k].tensors++;
        sums[k].weights += parameters;
        r->parameters += parameters;
        sums[k].bytes += qc_plan_job_bytes(plan, j);
    }
    /* The largest comes first; where two are equal, the name decides. */
    for (uint32_t i = 1; i < count; i++) {
        qc_fit_scheme s = sums[i];
        uint32_t at = i;
        for (; at > 0 && (sums[at - 1].bytes < s.bytes ||
                          (sums[at - 1].bytes == s.bytes && strcmp(sums[at - 1].name, s.name) > 0));
             at--)
            sums[at] = sums[at - 1];
        sums[at] = s;
    }
    r->schemes = sums;
    r->scheme_count = count;
    return QC_OK;
}

/* ---- bars ---- */

qc_bar_style qc_bar_style_of_console(void)
{
    static const char *const names[] = {"LC_ALL", "LC_CTYPE", "LANG"};
    if (!qc_console_terminal(STDOUT_FILENO))
        return QC_BARS_ASCII;
    /* The first that is set decides, as in the C library. */
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (!value || !*value)
            continue;
        return strstr(value, "UTF-8") || strstr(value, "utf8") || strstr(value, "UTF8") ||
                       strstr(value, "utf-8")
                   ? QC_BARS_BLOCKS
                   : QC_BARS_ASCII;
    }
    return QC_BARS_ASCII;
}

enum { PART_WEIGHTS, PART_KV, PART_WORKSPACE, PART_CONTEXT, PART_FREE, PART_COUNT };

/* U+2588, U+2593, U+2592, U+2591, U+00B7 */
static const char *const glyphs[2][PART_COUNT] = {
    [QC_BARS_ASCII] = {"#", "k", "w", "c", "."},
    [QC_BARS_BLOCKS] = {"\xe2\x96\x88", "\xe2\x96\x93", "\xe2\x96\x92", "\xe2\x96\x91", "\xc2\xb7"},
};
static const char *const part_names[PART_COUNT] = {"weights", "KV cache", "workspace",
                                                   "CUDA context", "free"};

void qc_fit_bar(const qc_fit_device *d, unsigned cells, qc_bar_style style, qc_strbuf *out)
{
    const uint64_t parts[PART_FREE] = {d->weight_bytes, d->kv_bytes, d->workspace_bytes,
                                       d->context_bytes};
    double sum = 0.0;
    unsigned drawn = 0;
    if (cells > QC_BAR_CELLS)
        cells = QC_BAR_CELLS;
    qc_strbuf_puts(out, "[");
    for (int part = 0; part < PART_COUNT; part++) {
        unsigned end = cells;
        if (part < PART_FREE) {
            sum += (double)parts[part];
            double share = d->budget_bytes ? sum / (double)d->budget_bytes : 1.0;
            end = share >= 1.0 ? cells : (unsigned)(share * cells + 0.5);
        }
        for (; drawn < end; drawn++)
            qc_strbuf_puts(out, glyphs[style][part]);
    }
    qc_strbuf_puts(out, "]");
}

/* ---- text ---- */

/* Adds what the choice gains over one scheme for all, and what kind of number that is. */
static void add_choice(const qc_auto_result *a, qc_strbuf *out)
{
    const unsigned first = qc_auto_smallest(a);
    double smallest = a->uniform[first];
    qc_strbuf_putf(out, "  error      %.3g predicted", a->predicted);
    if (smallest > a->predicted)
        qc_strbuf_putf(out, ", %.0f%% of %s's", a->predicted / smallest * 100.0,
                       a->rows[first].name);
    for (unsigned i = first; i < QC_CANDIDATES; i++)
        if (!isnan(a->uniform[i]))
            qc_strbuf_putf(out, "%s %s %.3g%s", i == first ? ":" : ",",
                           i == QC_CANDIDATE_16BIT ? "16 bit" : a->rows[i].name, a->uniform[i],
                           a->uniform_fits[i] ? ""
                           : a->spills        ? " (not without spilling)"
                                              : " (does not fit)");
    if (a->weighed == QC_WEIGHED_ROLES)
        qc_strbuf_putf(out, "\n             %s\n             %s\n", QC_ERROR_UNIT, QC_ERROR_SEEN);
    else
        qc_strbuf_puts(out, "\n             It is a KL divergence in nats, estimated by "
                            "--importance.\n");
    qc_strbuf_puts(out, a->measured ? ""
                                    : "             There are no weights to measure: these are "
                                      "the errors of normal random ones.\n");
}

int qc_fit_has_mla(const qc_geometry *g)
{
    for (uint32_t i = 0; i < g->layer_count; i++)
        if (g->layers[i].attention == QC_ATTENTION_MLA)
            return 1;
    return 0;
}

void qc_fit_serve_text(const qc_fit_report *r, qc_strbuf *out)
{
    if (r->fit->ranks == 0)
        return;
    if (r->loaders && r->loaders->lmdeploy) {
        qc_strbuf_putf(out, "lmdeploy serve api_server OUT %s", r->loaders->lmdeploy);
        return;
    }
    qc_strbuf_puts(out, "vllm serve OUT ");
    qc_tp_serve_options(out, r->use, r->fit->ranks);
}

/* Says what a verdict on the context rests on, where the context decides. */
static void add_context(const qc_fit_report *r, qc_strbuf *out)
{
    char count[QC_SIZE_TEXT_BYTES];
    const qc_fit_options *use = r->use;
    if (r->fit->fits || !r->generates || (r->whole.max_context == 0 && r->steps.max_context == 0))
        return;
    qc_strbuf_putf(out, " %s tokens", qc_text_count(count, use->context));
    if (use->batch > 1)
        qc_strbuf_putf(out, " in each of %" PRIu64 " sequences", use->batch);
    if (use->prefill) {
        qc_strbuf_putf(out, " with prompts read %s at a time", qc_text_count(count, use->prefill));
        return;
    }
    qc_strbuf_puts(out, " with prompts read whole");
    if (use->batch == 1 && r->steps.max_context >= use->context)
        qc_strbuf_putf(out, "; with --prefill %" PRIu64 " it fits %s", r->steps.tokens,
                       qc_text_count(count, r->steps.max_context));
}

static void add_head(const qc_fit_report *r, qc_strbuf *out)
{
    char count[QC_SIZE_TEXT_BYTES], size[QC_SIZE_TEXT_BYTES];
    int unknown = r->fit->geometry->cache_unknown;
    qc_strbuf_show(out, "%s as %s on %s: %s%s", r->model, r->to, r->fit->budget->text,
                   r->fit->fits ? "fits" : "does not fit",
                   unknown && r->fit->fits ? " without a KV cache, whose size is not known" : "");
    add_context(r, out);
    if (r->fit->fits && r->chosen && qc_loaders_unquantized(r->loaders))
        qc_strbuf_puts(out, ", and nothing has to be quantized");
    qc_strbuf_puts(out, "\n\n");
    qc_strbuf_putf(out, "  weights    %s in %s parameters",
                   qc_text_bytes(size, r->fit->weight_bytes), qc_text_count(count, r->parameters));
    if (r->parameters)
        qc_strbuf_putf(out, ", %.3f bits each",
                       8.0 * (double)r->fit->weight_bytes / (double)r->parameters);
    qc_strbuf_putf(out, "\n  files      %s, uncompressed\n", qc_text_bytes(size, r->file_bytes));
    uint64_t width = 10;
    for (uint32_t i = 0; i < r->scheme_count; i++)
        width = qc_max_u64(width, strlen(r->schemes[i].name));
    for (uint32_t i = 0; i < r->scheme_count; i++) {
        const qc_fit_scheme *s = &r->schemes[i];
        qc_strbuf_putf(out, "  %-*s %s in %" PRIu64 " tensor%s\n", (int)width, s->name,
                       qc_text_bytes(size, s->bytes), s->tensors, qc_plural(s->tensors));
    }
    if (r->chosen)
        add_choice(r->chosen, out);
    if (r->fit->ranks > 0)
        qc_strbuf_putf(
            out,
            "  split      every layer is split over %" PRIu32 " card%s, as vLLM splits it with "
            "--tensor-parallel-size%s%s\n",
            r->fit->ranks, qc_plural(r->fit->ranks),
            r->needs_plugin ? " and the plug-in of qconv's Python package (docs/serving.md)" : "",
            r->loaders && r->loaders->lmdeploy ? ", and lmdeploy with --tp" : "");
    if (unknown) {
        qc_strbuf_puts(out, "  KV cache   its size is not known\n");
    } else if (r->generates) {
        qc_strbuf_putf(out, "  KV cache   %s: context %s, batch %" PRIu64,
                       qc_text_bytes(size, r->fit->kv_bytes), qc_text_count(count, r->use->context),
                       r->use->batch);
        qc_strbuf_putf(out, ", %s a token%s\n", qc_text_bytes(size, r->fit->kv_bytes_per_token),
                       r->fit->ranks > 1 ? "; on each card" : "");
        if (qc_fit_has_mla(r->fit->geometry))
            qc_strbuf_putf(out, "             MLA: %s, as %s does (--mla)\n",
                           r->use->mla_expanded ? "keys and values of every head are cached"
                           : r->use->mla_absorbed
                               ? "the latent is cached and attended to as it is"
                               : "the latent is cached, and each layer expands it to keys and "
                                 "values",
                           qc_fit_mla_runtime(r->use));
    }
}

static void add_size(qc_table *t, uint64_t bytes)
{
    if (bytes == QC_NO_LIMIT)
        qc_table_put(t, "no limit");
    else
        qc_table_bytes(t, bytes);
}

static void add_devices(const qc_fit_report *r, qc_strbuf *out)
{
    qc_table t;
    qc_table_begin(&t, r->arena,
                   "device|card|>budget|>weights|>KV cache|>workspace|>CUDA context|>free|>short "
                   "by|>layers");
    for (uint32_t i = 0; i < r->fit->budget->count; i++) {
        const qc_fit_device *d = &r->fit->devices[i];
        qc_table_put(&t, d->device->name);
        qc_table_put(&t, d->device->card ? d->device->card->name : "");
        add_size(&t, d->budget_bytes);
        add_size(&t, d->weight_bytes);
        if (r->fit->geometry->cache_unknown)
            qc_table_put(&t, "?");
        else
            add_size(&t, d->kv_bytes);
        add_size(&t, d->workspace_bytes);
        add_size(&t, d->context_bytes);
        add_size(&t, d->budget_bytes == QC_NO_LIMIT ? QC_NO_LIMIT : d->free_bytes);
        if (d->short_by_bytes)
            add_size(&t, d->short_by_bytes);
        else
            qc_table_put(&t, "");
        if (d->layers > 1)
            qc_table_putf(&t, "%" PRIu32 "-%" PRIu32, d->first_layer,
                          d->first_layer + d->layers - 1);
        else if (d->layers == 1)
            qc_table_number(&t, d->first_layer);
        else
            qc_table_put(&t, NULL);
    }
    qc_table_print(&t, 2, out);
}

/* Is device i the first with its size and card? */
static int is_first_like(const qc_fit *fit, uint32_t i)
{
    const qc_device *d = fit->budget->devices;
    for (uint32_t j = 0; j < i; j++)
        if (d[j].card == d[i].card && d[j].total_bytes == d[i].total_bytes)
            return 0;
    return 1;
}

/* A size without a card is taken to the byte, but a card sold with that size has less or more. */
static void add_cards_of_size(const qc_device *d, const char *indent, qc_strbuf *out)
{
    const uint64_t GB = 1000000000u;
    char word[32], size[QC_SIZE_TEXT_BYTES], least[QC_SIZE_TEXT_BYTES], most[QC_SIZE_TEXT_BYTES];
    const qc_card *small = NULL, *large = NULL;
    if (d->tier != QC_TIER_GPU || d->card || d->total_bytes % GB != 0)
        return;
    (void)snprintf(word, sizeof word, "%" PRIu64 "GB", d->total_bytes / GB);
    for (unsigned i = 0; i < qc_card_count; i++) {
        const qc_card *card = &qc_card_table[i];
        if (!qc_card_sold_with(card, d->total_bytes / GB))
            continue;
        small = !small || card->memory_bytes < small->memory_bytes ? card : small;
        large = !large || card->memory_bytes > large->memory_bytes ? card : large;
    }
    if (!small)
        return;
    qc_strbuf_putf(out, "%s%s is taken as %s; cards sold with %s have ", indent, word,
                   qc_text_bytes(size, d->total_bytes), word);
    if (small->memory_bytes == large->memory_bytes)
        qc_strbuf_putf(out, "%s (%s)", qc_text_bytes(least, small->memory_bytes), small->name);
    else
        qc_strbuf_putf(out, "%s (%s) to %s (%s)", qc_text_bytes(least, small->memory_bytes),
                       small->name, qc_text_bytes(most, large->memory_bytes), large->name);
    qc_strbuf_puts(out, ": name the card in --vram\n");
}

void qc_fit_budget_notes(const qc_fit_report *r, const char *indent, qc_strbuf *out)
{
    char budget[QC_SIZE_TEXT_BYTES], size[QC_SIZE_TEXT_BYTES];
    const qc_fit *fit = r->fit;
    for (uint32_t i = 0; i < fit->budget->count; i++) {
        const qc_device *d = &fit->budget->devices[i];
        if (d->total_bytes == QC_NO_LIMIT || !is_first_like(fit, i))
            continue;
        qc_strbuf_putf(out, "%s%s is %.3g%% of ", indent,
                       qc_text_bytes(budget, fit->devices[i].budget_bytes), r->use->margin * 100.0);
        if (d->card)
            qc_strbuf_putf(out, "the %s that the driver of %s reports (--margin)\n",
                           qc_text_bytes(size, d->total_bytes), d->card->name);
        else
            qc_strbuf_putf(out, "%s (--margin)\n", qc_text_bytes(size, d->total_bytes));
        add_cards_of_size(d, indent, out);
    }
}

/* Draws the bars to one scale; the device with the largest limit has the longest. */
static void add_bars(const qc_fit_report *r, qc_bar_style style, qc_strbuf *out)
{
    enum { MIN_CELLS = 8 };
    char used[QC_SIZE_TEXT_BYTES], size[QC_SIZE_TEXT_BYTES];
    const qc_fit *fit = r->fit;
    uint64_t largest = 0;
    size_t name_width = 0;
    for (uint32_t i = 0; i < fit->budget->count; i++) {
        uint64_t b = fit->devices[i].budget_bytes;
        size_t len = strlen(fit->budget->devices[i].name);
        name_width = len > name_width ? len : name_width;
        if (b != QC_NO_LIMIT && b > largest)
            largest = b;
    }
    qc_strbuf_puts(out, "\n");
    for (uint32_t i = 0; i < fit->budget->count; i++) {
        const qc_fit_device *d = &fit->devices[i];
        if (d->budget_bytes == QC_NO_LIMIT || largest == 0)
            continue;
        unsigned cells =
            (unsigned)((double)d->budget_bytes / (double)largest * (double)QC_BAR_CELLS + 0.5);
        cells = cells < MIN_CELLS ? MIN_CELLS : cells;
        qc_strbuf_putf(out, "  %-*s  ", (int)name_width, d->device->name);
        qc_fit_bar(d, cells, style, out);
        qc_strbuf_putf(out, "%*s %s of %s%s\n", (int)(QC_BAR_CELLS - cells), "",
                       qc_text_bytes(used, d->weight_bytes + d->kv_bytes + d->workspace_bytes +
                                               d->context_bytes),
                       qc_text_bytes(size, d->budget_bytes), d->short_by_bytes ? " (!)" : "");
    }
    qc_strbuf_putf(out, "  %*s ", (int)name_width, "");
    for (int part = 0; part < PART_COUNT; part++)
        qc_strbuf_putf(out, " %s %s", glyphs[style][part], part_names[part]);
    qc_strbuf_puts(out, "\n");
}

static void add_found(uint64_t found, const char *unit, qc_strbuf *out)
{
    char count[QC_SIZE_TEXT_BYTES];
    if (found == 0)
        qc_strbuf_puts(out, "none fits");
    else if (found == QC_NO_LIMIT)
        qc_strbuf_puts(out, "no limit");
    else
        qc_strbuf_putf(out, "%s%s", qc_text_count(count, found), unit);
}

static void add_longest(const qc_fit_report *r, const qc_fit_prefill *p, qc_strbuf *out)
{
    char count[QC_SIZE_TEXT_BYTES];
    add_found(p->max_context, " tokens", out);
    if (r->fit->geometry->max_context && p->max_context == r->fit->geometry->max_context)
        qc_strbuf_puts(out, ", the model's limit");
    if (p->tokens == 0)
        qc_strbuf_puts(out, "; prompts are read whole, as transformers does by default");
    else
        qc_strbuf_putf(out,
                       "; prompts are read %s tokens at a time (vLLM's --max-num-batched-tokens)",
                       qc_text_count(count, p->tokens));
}

static void add_search(const qc_fit_report *r, qc_strbuf *out)
{
    const qc_fit_prefill *asked = r->use->prefill ? &r->steps : &r->whole,
                         *other = r->use->prefill ? &r->whole : &r->steps;
    char option[QC_SIZE_TEXT_BYTES + 16] = "with --prefill whole";
    if (!r->generates || r->fit->geometry->cache_unknown)
        return;
    qc_strbuf_puts(out, "\n  longest context at batch 1      ");
    add_longest(r, asked, out);
    if (other->max_context != asked->max_context) {
        if (other->tokens)
            (void)snprintf(option, sizeof option, "with --prefill %" PRIu64, other->tokens);
        qc_strbuf_putf(out, "\n  %-30s  ", option);
        add_longest(r, other, out);
    }
    qc_strbuf_puts(out, "\n  largest batch at this context   ");
    add_found(r->max_batch, "", out);
    qc_strbuf_puts(out, "\n");
}

static void add_other_choices(const qc_fit_report *r, qc_strbuf *out)
{
    char count[QC_SIZE_TEXT_BYTES];
    qc_table t;
    qc_table_begin(&t, r->arena, "instead|>longest context|>error|read by");
    for (uint32_t i = 0; i < r->choice_count; i++) {
        const qc_fit_choice *c = &r->choices[i];
        qc_table_put(&t, c->change);
        qc_table_put(&t, c->max_context == QC_NO_LIMIT ? "no limit"
                                                       : qc_text_count(count, c->max_context));
        if (isnan(c->predicted))
            qc_table_put(&t, NULL);
        else
            qc_table_putf(&t, "%.3g", c->predicted);
        qc_table_put(&t, c->own_form ? "qconv only" : "transformers too");
    }
    qc_table_print(&t, 2, out);
}

qc_status qc_fit_report_text(const qc_fit_report *r, qc_bar_style style, qc_strbuf *out,
                             qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES], time[QC_SIZE_TEXT_BYTES];
    const qc_fit *fit = r->fit;
    int disk = 0;
    for (uint32_t i = 0; i < fit->budget->count; i++)
        disk |= fit->budget->devices[i].tier == QC_TIER_DISK && fit->devices[i].segments;
    add_head(r, out);
    qc_strbuf_puts(out, "\n");
    add_devices(r, out);
    qc_strbuf_puts(out, "\n");
    qc_fit_budget_notes(r, "  ", out);
    add_bars(r, style, out);
    add_search(r, out);
    if (r->choice_count > 0)
        qc_strbuf_puts(out, "\n  " QC_AUTO_TRADES "\n\n");
    add_other_choices(r, out);
    if (fit->transfer_bytes_per_token)
        qc_strbuf_putf(
            out,
            "  spilled to the host%s: %s cross its link for every token, which takes at least %s\n",
            disk ? " and to disk" : "", qc_text_bytes(size, fit->transfer_bytes_per_token),
            qc_text_seconds(time, fit->transfer_seconds));
    if (!fit->fits) {
        qc_strbuf_puts(out, "\n");
        qc_strbuf_putf(out, "short by %s on %s", qc_text_bytes(size, fit->short_by_bytes),
                       fit->budget->devices[fit->short_device].name);
        for (uint32_t i = 0; i < r->suggestion_count; i++)
            qc_strbuf_putf(out, "%s%s", i == 0 ? "; would fit with " : ", or with ",
                           r->suggestions[i].change);
        qc_strbuf_puts(out, "\n");
    }
    return qc_strbuf_status(out, err);
}
