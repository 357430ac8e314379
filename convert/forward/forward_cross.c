#include "convert/forward/forward_cross.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/forward/forward_phases.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- buffers ---- */

static uint64_t kv_wide(const qc_forward_shape *s)
{
    return s->config.kv_heads * (s->config.head_dim + s->value_dim);
}

static uint64_t kv_bytes(const qc_forward_shape *s)
{
    return qc_sat_mul(s->image_tokens, qc_sat_mul(kv_wide(s), sizeof(float)));
}

static uint64_t block_bytes(const qc_forward_shape *s)
{
    const uint64_t rows = s->image_tokens < QC_FORWARD_TOKENS ? s->image_tokens : QC_FORWARD_TOKENS;
    return qc_sat_mul(rows, qc_sat_mul(s->config.hidden, sizeof(float)));
}

uint64_t qc_cross_bytes(const qc_forward_shape *s, uint64_t tokens)
{
    const uint64_t window = 2 * sizeof(void *) + sizeof(uint64_t);
    /* There are at most as many windows as tokens. */
    return !s->cross ? 0
                     : qc_sat_add(qc_sat_add(kv_bytes(s), block_bytes(s)),
                                  qc_sat_add(sizeof(qc_cross), qc_sat_mul(tokens, window)));
}

/* ---- windows ---- */

/* Finds where the image of a window begins. A window without an image token is all behind it. */
static qc_status find_token(qc_cross *x, const uint32_t *ids, uint64_t n, uint64_t window,
                            uint64_t token, qc_error *err)
{
    uint64_t count = 0;
    x->from[window] = 0;
    for (uint64_t i = n; i-- > 0;)
        if (ids[i] == token) {
            x->from[window] = i;
            count++;
        }
    if (count > 1)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "window %" PRIu64 " has %" PRIu64 " image tokens (%" PRIu64
                "), and one image a sequence is computed",
                window, count, token);
    return QC_OK;
}

static int by_address(const void *a, const void *b)
{
    const qc_image *const *x = a, *const *y = b;
    return *x < *y ? -1 : *x > *y;
}

static void find_uniques(qc_cross *x, uint64_t windows)
{
    memcpy(x->uniques, x->images, (size_t)windows * sizeof *x->images);
    qsort(x->uniques, (size_t)windows, sizeof *x->uniques, by_address);
    for (uint64_t i = 0; i < windows; i++)
        if (i == 0 || x->uniques[i] != x->uniques[x->unique_count - 1]) {
            x->uniques[x->unique_count++] = x->uniques[i];
            x->tokens += x->uniques[i]->seen;
        }
}

static qc_status find_images(qc_cross *x, const qc_forward_shape *s, const qc_forward_batch *b,
                             qc_error *err)
{
    uint64_t at = 0;
    for (uint64_t w = 0; w < b->count; at += b->lengths[w++]) {
        const uint64_t sequence = b->sequences ? b->sequences[w] : w;
        x->images[w] = qc_image_of(x->states, sequence);
        if (!x->images[w])
            QC_FAIL(err, QC_ERR_INPUT,
                    "%s: there is neither 'states.%" PRIu64 "' for sequence %" PRIu64
                    " of the text (the first is 0), nor 'states' for all",
                    qc_image_states_path(x->states), sequence, sequence);
        QC_TRY(find_token(x, b->ids + at, b->lengths[w], w, s->image_token, err));
    }
    find_uniques(x, b->count);
    return QC_OK;
}

static qc_status place_images(qc_cross **out, const qc_forward_shape *s, qc_image_states *states,
                              const qc_forward_batch *b, qc_error *err)
{
    const size_t windows = (size_t)b->count;
    QC_TRY(qc_calloc(out, 1, sizeof **out, err));
    qc_cross *x = *out;
    x->states = states;
    x->wide = kv_wide(s);
    QC_TRY(qc_calloc(&x->images, windows, sizeof *x->images, err));
    QC_TRY(qc_calloc(&x->uniques, windows, sizeof *x->uniques, err));
    QC_TRY(qc_calloc(&x->from, windows, sizeof *x->from, err));
    return find_images(x, s, b, err);
}

qc_status qc_cross_create(qc_cross **out, const qc_forward_shape *s, qc_image_states *states,
                          const qc_forward_batch *b, qc_error *err)
{
    size_t kv = 0, block = 0;
    QC_TRY(place_images(out, s, states, b, err));
    if (kv_bytes(s) == UINT64_MAX || qc_u64_to_size(kv_bytes(s), &kv) ||
        qc_u64_to_size(block_bytes(s), &block))
        QC_FAIL(err, QC_ERR_NOMEM, "the states of an image are too large for memory");
    QC_TRY(qc_malloc_aligned(&(*out)->kv, 64, kv, err));
    return qc_malloc_aligned(&(*out)->block, 64, block, err);
}

qc_status qc_cross_tokens(uint64_t *out, const qc_forward_shape *s, qc_image_states *states,
                          const qc_forward_batch *b, qc_error *err)
{
    qc_cross *x = NULL;
    qc_status st = place_images(&x, s, states, b, err);
    *out = st == QC_OK ? x->tokens : 0;
    qc_cross_destroy(x);
    return st;
}

void qc_cross_destroy(qc_cross *x)
{
    if (!x)
        return;
    qc_free(x->images);
    qc_free(x->uniques);
    qc_free(x->from);
    qc_free(x->kv);
    qc_free(x->block);
    qc_free(x);
}

/* ---- phases ---- */

qc_status qc_cross_norm_keys(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                             qc_error *err)
{
    const qc_phase_chunk *k = ctx;
    const qc_forward_config *c = &k->cpu->shape->config;
    const qc_cross *x = k->cpu->cross;
    (void)thread;
    (void)err;
    for (uint64_t t = first; t < first + count; t++)
        for (uint64_t h = 0; h < c->kv_heads; h++) {
            float *key = x->kv + t * x->wide + h * c->head_dim;
            k->cpu->decoder->norm(key, k->w->vectors[QC_LAYER_K_NORM], c->head_dim,
                                  (float)c->norm_eps, key);
        }
    return QC_OK;
}

uint64_t qc_cross_tasks(const qc_phase_chunk *k)
{
    const qc_forward_config *c = &k->cpu->shape->config;
    const uint64_t step = qc_attend_tokens(c->heads / c->kv_heads);
    return qc_ceil_div_u64(k->cpu->cross->now.tokens, step) * c->kv_heads;
}

qc_status qc_cross_attend(void *ctx, unsigned thread, uint64_t first, uint64_t count, qc_error *err)
{
    const qc_phase_chunk *k = ctx;
    const qc_forward_cpu *cpu = k->cpu;
    const qc_forward_config *c = &cpu->shape->config;
    const qc_cross *x = cpu->cross;
    const uint64_t group = c->heads / c->kv_heads, step = qc_attend_tokens(group);
    const qc_attend_io io = {.q = cpu->b + x->now.first * k->ldb,
                             .k = x->kv,
                             .v = x->kv + k->k,
                             .out = cpu->c + x->now.first * k->attended,
                             .q_stride = k->ldb,
                             .kv_stride = x->wide,
                             .out_stride = k->attended,
                             .q_step = c->head_dim,
                             .k_step = c->head_dim,
                             .v_step = cpu->shape->value_dim,
                             .tokens = x->now.tokens,
                             .group = group,
                             .head_dim = c->head_dim,
                             .value_dim = cpu->shape->value_dim,
                             .keys = x->now.keys,
                             .scale = k->scale};
    (void)err;
    for (uint64_t task = first; task < first + count; task++) {
        const uint64_t token = task / c->kv_heads * step, left = x->now.tokens - token;
        cpu->decoder->attend(&io, task % c->kv_heads, token, left < step ? left : step,
                             cpu->scratch + thread * cpu->scratch_each);
    }
    return QC_OK;
}

void qc_cross_hide(const qc_phase_chunk *k)
{
    const qc_forward_cpu *cpu = k->cpu;
    const uint64_t hidden = cpu->shape->config.hidden;
    for (uint64_t w = k->window; k->cross && w < k->end; w++)
        memset(cpu->a + (cpu->starts[w] - k->start) * hidden, 0,
               (size_t)(cpu->cross->from[w] * hidden) * sizeof *cpu->a);
}
