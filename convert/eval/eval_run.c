/* Takes both models over a text in one streaming pass. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/text.h"
#include "base/workers.h"
#include "convert/adapter/adapters.h"
#include "convert/device/device_wish.h"
#include "convert/eval/eval_states.h"
#include "convert/eval/eval_stats.h"
#include "convert/family/family.h"
#include "convert/forward/token_text.h"
#include "convert/model/expert_split.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"
#include "formats/file_io.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

/* What a batch may take besides weights: the hidden states of both models and what computing them
 * needs. A batch has at least one window, however large that is. */
#define BATCH_BYTES ((uint64_t)1 << 30)
/* The bytes of both models' logits at a time. A chunk has at least MIN_ROWS tokens. */
#define LOGIT_BYTES ((uint64_t)64 << 20)
#define MIN_ROWS    16u
#define MAX_ROWS    2048u

/* One of the two models: OUT or MODEL. */
typedef struct {
    qc_checkpoint *checkpoint;
    qc_forward *model;
    /* [batch tokens, hidden]; later the rows that predict something are moved together */
    float *hidden;
    float *logits; /* [chunk rows, vocabulary] */
    uint64_t width;
} side;

typedef struct {
    const qc_call *call;
    const qc_eval_options *o;
    qc_eval_result *r;
    qc_forward_tools tools;
    side sides[2]; /* OUT, MODEL */
    unsigned side_count;
    uint64_t vocabulary;
    uint64_t ids;            /* what ids of tokens are below */
    qc_image_states *images; /* --image-states, or NULL */
    qc_eval_windows windows;
    uint64_t token_bytes; /* bytes of weights that each token passes, in both models */
    uint64_t chunk_rows;
    qc_eval_token *tokens; /* [chunk_rows] */
    uint32_t *targets;     /* of one batch */
    qc_eval_stats stats;
    qc_eval_states states; /* of encoders, instead of what is about logits */
    int encoder;
} evaluation;

/* ---- opening -------------------------------------------------------------------------------- */

static qc_status open_side(evaluation *e, const char *path, qc_error *err)
{
    side *s = &e->sides[e->side_count++];
    QC_TRY(qc_checkpoint_open(&s->checkpoint, path, err));
    for (size_t i = 0; i < s->checkpoint->warning_count; i++)
        qc_console_warn(e->call, "%s", s->checkpoint->warnings[i]);
    QC_TRY(qc_experts_split(s->checkpoint, 0, err));
    /* MODEL is what an adapter belongs to: the model by itself, or that of --against. */
    if (e->side_count == (e->call->against ? 2 : 1))
        QC_TRY(qc_adapters_attach(s->checkpoint, e->call, err));
    return QC_OK;
}

/* QCONV_DEVICE speaks to all commands, so it may name GPUs that other commands use. */
static qc_status check_device(const qc_call *call, qc_error *err)
{
    qc_device_wish w;
    QC_TRY(qc_device_wish_read(&w, call->run_device, err));
    if (w.kind == QC_WISH_CUDA && call->run_device && *call->run_device)
        QC_FAIL(err, QC_ERR_USAGE,
                "--device %s: 'qconv eval' computes on the CPU only; leave --device out", w.text);
    return QC_OK;
}

/* An encoder predicts nothing, so it needs another one to be compared with. */
static qc_status check_kind(const evaluation *e, qc_error *err)
{
    const char *path = e->call->model, *against = e->call->against;
    const qc_forward_config *c = qc_forward_config_of(e->sides[0].model);
    if (e->encoder && !against)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s is an encoder (%s), which predicts nothing: give --against MODEL, and eval "
                "tells how far its hidden states are from those of MODEL",
                path, c->model_type);
    if (against && qc_forward_config_of(e->sides[1].model)->encoder != e->encoder)
        QC_FAIL(err, QC_ERR_INPUT, "%s is an encoder, and %s is none, so they cannot be compared",
                e->encoder ? path : against, e->encoder ? against : path);
    if (e->encoder && e->sides[1].width != e->sides[0].width)
        QC_FAIL(err, QC_ERR_INPUT,
                "the hidden states of %s have %" PRIu64 " elements, and those of %s have %" PRIu64,
                path, e->sides[0].width, against, e->sides[1].width);
    if (e->encoder && e->o->max_kl > 0)
        QC_FAIL(err, QC_ERR_USAGE,
                "--max-kl: %s is an encoder (%s), which predicts nothing; --max-distance is its "
                "limit",
                path, c->model_type);
    if (!e->encoder && e->o->max_distance > 0)
        QC_FAIL(err, QC_ERR_USAGE,
                "--max-distance is for encoders, and %s is a %s; --max-kl is its limit", path,
                c->model_type);
    return QC_OK;
}

static qc_status open_models(evaluation *e, qc_error *err)
{
    const char *paths[] = {e->call->model, e->call->against};
    for (unsigned i = 0; i < e->side_count; i++) {
        side *s = &e->sides[i];
        QC_TRY(qc_forward_open(&s->model, paths[i], s->checkpoint, &e->tools, err));
        const qc_forward_config *c = qc_forward_config_of(s->model);
        s->width = c->hidden;
        e->ids = c->ids;
        if (i == 0)
            e->vocabulary = c->vocabulary;
        else if (c->vocabulary != e->vocabulary)
            QC_FAIL(err, QC_ERR_INPUT,
                    "%s has a vocabulary of %" PRIu64 ", but %s has one of %" PRIu64
                    ", so their predictions cannot be compared",
                    paths[0], e->vocabulary, paths[i], c->vocabulary);
    }
    e->r->model_type = qc_forward_config_of(e->sides[0].model)->model_type;
    e->encoder = qc_forward_config_of(e->sides[0].model)->encoder;
    return check_kind(e, err);
}

static qc_status open_images(evaluation *e, qc_error *err)
{
    const char *path = e->call->image_states;
    if (!path)
        return QC_OK;
    QC_TRY(qc_image_states_open(&e->images, path, e->tools.isa, err));
    e->tools.images = e->images;
    return QC_OK;
}

/* Returns the value of --context, or else the context that both models can take, up to
 * QC_TOKEN_TEXT_CONTEXT. */
static uint64_t context_of(const evaluation *e)
{
    uint64_t context = e->o->context ? e->o->context : QC_TOKEN_TEXT_CONTEXT;
    for (unsigned i = 0; i < e->side_count; i++) {
        uint64_t limit = qc_forward_config_of(e->sides[i].model)->context;
        if (limit == 0 || context <= limit)
            continue;
        if (e->o->context)
            qc_console_warn(e->call,
                            "%s: --context %" PRIu64 " is more than the %" PRIu64
                            " positions that the model was made for",
                            i ? e->call->against : e->call->model, context, limit);
        else
            context = limit;
    }
    return context;
}

/* ---- the text ------------------------------------------------------------------------------- */

/* The head has no logits for tokens such as the image's, so they are not predicted. */
static qc_status leave_out_media(evaluation *e, qc_error *err)
{
    qc_eval_windows *all = &e->windows;
    for (uint64_t w = 0, begin = 0; w < all->count; begin += all->lengths[w++])
        for (uint64_t i = all->first; i < all->lengths[w]; i++)
            all->predicted -= all->ids[begin + i] >= e->vocabulary;
    if (all->predicted == 0)
        QC_FAIL(err, QC_ERR_INPUT, "%s: no token but those of images would be predicted",
                e->o->text);
    return QC_OK;
}

static qc_status make_windows(evaluation *e, const qc_strbuf *text, qc_error *err)
{
    const qc_call *call = e->call;
    const qc_eval_options *o = e->o;
    e->r->context = context_of(e);
    qc_token_text t = {.arena = call->arena,
                       .name = o->text,
                       .tokenizer = call->tokenizer,
                       .model_count = e->side_count,
                       .model = call->model,
                       .vocabulary = e->vocabulary,
                       .ids = e->ids,
                       .context = e->r->context,
                       .max_tokens = o->max_tokens};
    for (unsigned i = 0; i < e->side_count; i++)
        t.models[i] = e->sides[i].checkpoint;
    qc_status st =
        qc_token_text_windows(&e->windows, &t, text, &e->r->tokens, &e->r->tokenizer, err);
    QC_TRY(st);
    const qc_eval_windows *w = &e->windows;
    const qc_forward_batch all = {w->ids, w->lengths, w->count, w->tokens, w->sequences};
    e->r->windows = w->count;
    QC_TRY(qc_forward_check(e->sides[0].model, &all, err));
    return leave_out_media(e, err);
}

/* ---- batches -------------------------------------------------------------------------------- */

static int batch_fits(const evaluation *e, uint64_t tokens)
{
    uint64_t bytes = 0, work = 0;
    for (unsigned i = 0; i < e->side_count; i++) {
        const side *s = &e->sides[i];
        uint64_t least = qc_forward_memory(s->model, e->windows.longest, e->windows.longest);
        uint64_t need = qc_forward_memory(s->model, tokens, e->windows.longest);
        bytes = qc_sat_add(bytes, qc_sat_mul(tokens, s->width * sizeof(float)));
        work = need > least && need - least > work ? need - least : work;
    }
    return qc_sat_add(bytes, work) <= BATCH_BYTES;
}

/* Returns the number of windows from w on that fit together (at least one), and sets *tokens to
 * theirs. */
static uint64_t batch_windows(const evaluation *e, uint64_t w, uint64_t *tokens)
{
    uint64_t n = 0;
    *tokens = 0;
    for (; w + n < e->windows.count; n++) {
        uint64_t more = *tokens + e->windows.lengths[w + n];
        if (n > 0 && !batch_fits(e, more))
            break;
        *tokens = more;
    }
    return n;
}

/* Returns how many batches there will be, and sets the tokens of the largest. */
static uint64_t count_batches(const evaluation *e, uint64_t *largest)
{
    uint64_t batches = 0, tokens = 0;
    *largest = 0;
    for (uint64_t w = 0; w < e->windows.count; batches++) {
        w += batch_windows(e, w, &tokens);
        *largest = tokens > *largest ? tokens : *largest;
    }
    return batches;
}

static qc_status floats(float **out, uint64_t rows, uint64_t width, qc_error *err)
{
    uint64_t bytes = 0;
    if (qc_mul_u64(rows, width, &bytes) || qc_mul_u64(bytes, sizeof(float), &bytes))
        QC_FAIL(err, QC_ERR_NOMEM,
                "%" PRIu64 " rows of %" PRIu64 " floats do not fit memory; try a smaller --context",
                rows, width);
    QC_TRY(qc_malloc_aligned(out, 64, (size_t)bytes, err));
    return QC_OK;
}

static qc_status allocate(evaluation *e, uint64_t batch_tokens, qc_error *err)
{
    uint64_t rows = LOGIT_BYTES / sizeof(float) / e->side_count / e->vocabulary;
    rows = rows < MIN_ROWS ? MIN_ROWS : rows > MAX_ROWS ? MAX_ROWS : rows;
    e->chunk_rows = rows < batch_tokens ? rows : batch_tokens;
    for (unsigned i = 0; i < e->side_count; i++)
        QC_TRY(floats(&e->sides[i].hidden, batch_tokens, e->sides[i].width, err));
    if (e->encoder)
        return qc_eval_states_init(&e->states, e->windows.count, e->sides[0].width, err);
    for (unsigned i = 0; i < e->side_count; i++)
        QC_TRY(floats(&e->sides[i].logits, e->chunk_rows, e->vocabulary, err));
    QC_TRY(qc_calloc(&e->tokens, (size_t)e->chunk_rows, sizeof *e->tokens, err));
    QC_TRY(qc_calloc(&e->targets, (size_t)batch_tokens, sizeof *e->targets, err));
    return qc_eval_stats_init(&e->stats, e->side_count > 1, e->windows.predicted, err);
}

/* ---- computing ------------------------------------------------------------------------------ */

typedef struct {
    evaluation *e;
    const uint32_t *targets;
    uint64_t rows;
    _Atomic uint64_t next;
} row_work;

static qc_status token_worker(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    row_work *w = ctx;
    const evaluation *e = w->e;
    (void)index;
    for (;;) {
        uint64_t i = atomic_fetch_add(&w->next, 1);
        if (i >= w->rows)
            return QC_OK;
        QC_TRY(qc_check_stopped(team, err));
        const float *q = e->sides[0].logits + i * e->vocabulary;
        const float *p = e->side_count > 1 ? e->sides[1].logits + i * e->vocabulary : NULL;
        QC_TRY(qc_eval_token_of(&e->tokens[i], q, p, e->vocabulary, w->targets[i], err));
    }
}

static qc_status count_rows(evaluation *e, uint64_t rows, qc_error *err)
{
    for (uint64_t at = 0; at < rows; at += e->chunk_rows) {
        row_work w = {.e = e, .targets = e->targets + at};
        w.rows = rows - at < e->chunk_rows ? rows - at : e->chunk_rows;
        for (unsigned i = 0; i < e->side_count; i++) {
            const side *s = &e->sides[i];
            QC_TRY(qc_forward_logits(s->model, s->hidden + at * s->width, w.rows, s->logits, err));
        }
        QC_TRY(qc_team_run(e->tools.threads, token_worker, &w, err));
        for (uint64_t i = 0; i < w.rows; i++)
            qc_eval_stats_add(&e->stats, &e->tokens[i]);
    }
    return QC_OK;
}

/* Moves the hidden states that predict something together, and lists what they predict. */
static uint64_t gather(evaluation *e, const qc_forward_batch *b)
{
    uint64_t rows = 0, begin = 0, first = e->windows.first;
    for (uint64_t w = 0; w < b->count; begin += b->lengths[w++]) {
        for (uint64_t t = begin + first; t < begin + b->lengths[w]; t++) {
            if (b->ids[t] >= e->vocabulary)
                continue;
            for (unsigned i = 0; i < e->side_count; i++) {
                uint64_t width = e->sides[i].width;
                memmove(e->sides[i].hidden + rows * width, e->sides[i].hidden + (t - 1) * width,
                        (size_t)width * sizeof(float));
            }
            e->targets[rows++] = b->ids[t];
        }
    }
    return rows;
}

static qc_status compare_states(evaluation *e, const qc_forward_batch *b, qc_error *err)
{
    const uint64_t width = e->sides[0].width;
    for (uint64_t w = 0, at = 0; w < b->count; at += b->lengths[w++])
        QC_TRY(qc_eval_states_add(&e->states, e->sides[0].hidden + at * width,
                                  e->sides[1].hidden + at * width, b->lengths[w], err));
    return QC_OK;
}

static qc_status run_batches(evaluation *e, qc_error *err)
{
    const qc_eval_windows *all = &e->windows;
    for (uint64_t w = 0, begin = 0; w < all->count;) {
        qc_forward_batch b = {
            .ids = all->ids + begin, .lengths = all->lengths + w, .sequences = all->sequences + w};
        b.count = batch_windows(e, w, &b.tokens);
        qc_progress_count_tokens(e->tools.progress, b.tokens, e->token_bytes);
        for (unsigned i = 0; i < e->side_count; i++)
            QC_TRY(qc_forward_hidden(e->sides[i].model, &b, e->sides[i].hidden, err));
        QC_TRY(e->encoder ? compare_states(e, &b, err) : count_rows(e, gather(e, &b), err));
        w += b.count;
        begin += b.tokens;
    }
    return QC_OK;
}

/* The most that is in memory at a time, besides the program and the text: hidden states, logits and
 * heads of both models, and one layer of one of them. */
static uint64_t memory_of(const evaluation *e, uint64_t batch_tokens)
{
    uint64_t layer = 0, all = 0;
    for (unsigned i = 0; i < e->side_count; i++) {
        const qc_forward *m = e->sides[i].model;
        const uint64_t floats_of = batch_tokens * e->sides[i].width + e->chunk_rows * e->vocabulary;
        all = qc_sat_add(all, qc_sat_mul(floats_of, sizeof(float)));
        all = qc_sat_add(all, qc_forward_head_memory(m));
        layer = qc_max_u64(layer, qc_forward_memory(m, batch_tokens, e->windows.longest));
    }
    return qc_sat_add(all, layer);
}

static void tell_memory(const evaluation *e, uint64_t batch_tokens)
{
    char all[QC_SIZE_TEXT_BYTES], images[QC_SIZE_TEXT_BYTES];
    uint64_t most = 0;
    for (unsigned i = 0; i < e->side_count; i++)
        most = qc_max_u64(most, qc_forward_image_memory(e->sides[i].model));
    qc_console_detail(e->call, 1, "this takes up to %s of memory%s%s%s",
                      qc_text_bytes(all, memory_of(e, batch_tokens)), most ? ", of which " : "",
                      most ? qc_text_bytes(images, most) : "",
                      most ? " are for the states of images" : "");
}

static qc_status run(evaluation *e, qc_error *err)
{
    qc_strbuf text;
    uint64_t batch_tokens = 0, bytes = 0;
    qc_strbuf_init(&text, QC_TOKEN_TEXT_MAX);
    qc_status st = qc_file_slurp(e->o->text, &text, err);
    if (st == QC_OK)
        st = open_side(e, e->call->model, err);
    if (st == QC_OK && e->call->against)
        st = open_side(e, e->call->against, err);
    if (st == QC_OK)
        st = open_images(e, err);
    if (st == QC_OK)
        st = open_models(e, err);
    if (st == QC_OK)
        st = make_windows(e, &text, err);
    qc_strbuf_deinit(&text);
    QC_TRY(st);
    uint64_t batches = count_batches(e, &batch_tokens);
    for (unsigned i = 0; i < e->side_count; i++)
        bytes = qc_sat_add(bytes, e->sides[i].checkpoint->tensor_bytes);
    e->token_bytes = bytes;
    qc_progress_expect(e->tools.progress, qc_sat_mul(bytes, e->windows.tokens));
    qc_console_detail(e->call, 1,
                      "%" PRIu64 " window%s in %" PRIu64 " batch%s of up to %" PRIu64
                      " tokens; the weights are read once for each batch",
                      e->windows.count, qc_plural(e->windows.count), batches,
                      batches == 1 ? "" : "es", batch_tokens);
    QC_TRY(allocate(e, batch_tokens, err));
    tell_memory(e, batch_tokens);
    QC_TRY(run_batches(e, err));
    if (e->encoder)
        qc_eval_states_finish(&e->states, e->r);
    else
        qc_eval_stats_finish(&e->stats, e->r);
    return QC_OK;
}

qc_status qc_eval_run(qc_eval_result *out, const qc_call *call, const qc_eval_options *o,
                      qc_error *err)
{
    evaluation e;
    uint64_t started = qc_clock_ns();
    memset(out, 0, sizeof *out);
    memset(&e, 0, sizeof e);
    e.call = call;
    e.o = o;
    e.r = out;
    out->path = call->model;
    out->against = call->against;
    out->text = o->text;
    out->device = "cpu";
    QC_TRY(check_device(call, err));
    e.tools.threads = call->threads ? call->threads : qc_cpu_count();
    QC_TRY(qc_isa_select(&e.tools.isa, err));
    QC_TRY(qc_progress_create(&e.tools.progress, call, "evaluating", 0, err));
    qc_status st = run(&e, err);
    if (st == QC_OK)
        st = qc_check_interrupted(err);
    qc_eval_stats_deinit(&e.stats);
    qc_eval_states_deinit(&e.states);
    qc_free(e.tokens);
    qc_free(e.targets);
    qc_eval_windows_deinit(&e.windows);
    for (unsigned i = 0; i < e.side_count; i++) {
        qc_free(e.sides[i].hidden);
        qc_free(e.sides[i].logits);
        qc_forward_close(e.sides[i].model);
        qc_checkpoint_close(e.sides[i].checkpoint);
    }
    qc_image_states_close(e.images);
    qc_progress_destroy(e.tools.progress);
    out->seconds = (double)(qc_clock_ns() - started) * 1e-9;
    return st;
}
