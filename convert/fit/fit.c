/* Decides where everything goes.
 *
 * The GPUs compute, or the cpu where there are none. Segments lie there in order
 * (convert/fit/placement.h). When they do not all fit and there is a tier behind, segments are
 * spilled one after another until the rest fits, first those that cost a token least; the shortest
 * such list is taken. The list and the tiers only get fuller with more context or batch, so what
 * fits for some context and batch fits for less, which the searches at the end rely on. */
#include "convert/fit/fit.h"

#include "base/checked.h"
#include "convert/fit/placement.h"
#include "convert/fit/tensor_parallel.h"
#include "convert/model/recipe_coded.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define ACTIVATION_BYTES 2u /* computing is in 16 bit */
#define LOGIT_BYTES      4u
#define DEFAULT_CONTEXT  8192u

uint64_t qc_fit_context(const qc_geometry *g, const qc_fit_options *o)
{
    if (o->context > 0)
        return o->context;
    return g->max_context > 0 && g->max_context < DEFAULT_CONTEXT ? g->max_context
                                                                  : DEFAULT_CONTEXT;
}

const char *qc_fit_mla_name(const qc_fit_options *o)
{
    return o->mla_expanded ? "expanded" : o->mla_absorbed ? "absorbed" : "latent";
}

const char *qc_fit_mla_runtime(const qc_fit_options *o)
{
    return o->mla_expanded ? "transformers 4.57" : o->mla_absorbed ? "vLLM" : "transformers 5.23";
}

uint64_t qc_fit_budget_bytes(uint64_t total_bytes, double margin)
{
    if (total_bytes == UINT64_MAX || margin >= 1.0)
        return total_bytes;
    double bytes = floor((double)total_bytes * margin);
    /* Above 2^53 the product may round up past the total. */
    return bytes >= (double)total_bytes ? total_bytes : (uint64_t)bytes;
}

/* Counts the elements of attention's inputs and outputs for `tokens`; the scores are never written
 * to memory. */
static uint64_t attention_elems(const qc_geometry *g, const qc_fit_options *o, uint32_t layer,
                                uint64_t tokens)
{
    uint64_t expanded = 0;
    uint64_t q = qc_sat_mul(g->heads, g->head_dim),
             kv = qc_sat_mul(2, qc_sat_mul(g->kv_heads, g->head_dim));
    const qc_layer_geometry *l = layer < g->layer_count ? &g->layers[layer] : NULL;
    if (l && l->attention == QC_ATTENTION_MLA && o->mla_expanded)
        kv = l->kv_elems_expanded;
    else if (l && l->attention == QC_ATTENTION_MLA && o->mla_absorbed)
        kv = qc_sat_add(l->kv_elems, qc_sat_mul(2, qc_sat_mul(g->heads, l->kv_elems)));
    else if (l && l->attention == QC_ATTENTION_MLA) {
        /* The product with kv_b_proj has no rotary part, and the keys are copied out of it into
         * another tensor. So twice the keys and values of every head are no less than what is there
         * at once. */
        kv = l->kv_elems;
        expanded = qc_sat_mul(qc_sat_mul(2, l->kv_elems_expanded),
                              qc_sat_mul(qc_fit_context(g, o), o->batch));
    } else if (l && l->attention == QC_ATTENTION_CROSS)
        kv = 0;
    return qc_sat_add(qc_sat_mul(qc_sat_add(qc_sat_mul(2, q), kv), tokens), expanded);
}

int qc_fit_has_cross(const qc_geometry *g)
{
    for (uint32_t i = 0; i < g->layer_count; i++)
        if (g->layers[i].attention == QC_ATTENTION_CROSS)
            return 1;
    return 0;
}

uint64_t qc_workspace_bytes(const qc_geometry *g, const qc_fit_options *o, qc_segment_kind kind,
                            uint32_t layer, uint64_t largest_weight, int has_cross)
{
    uint64_t step = qc_fit_context(g, o);
    if (g->decoder && o->prefill && step > o->prefill)
        step = o->prefill;
    uint64_t tokens = qc_sat_mul(step, o->batch);
    /* vLLM's --max-num-batched-tokens counts the tokens of all sequences together. */
    if (o->parallel == QC_PARALLEL_TENSOR && o->prefill && tokens > o->prefill)
        tokens = o->prefill;
    uint64_t positions = qc_sat_mul(qc_sat_mul(g->media_positions, o->images), o->batch);
    uint64_t weight = qc_sat_mul(ACTIVATION_BYTES, largest_weight);
    uint64_t hidden = qc_sat_mul(qc_sat_mul(ACTIVATION_BYTES, g->hidden), tokens);
    uint64_t inner = 0, beside = 0;
    switch (kind) {
    case QC_SEGMENT_EMBEDDING:
        return qc_sat_add(hidden, weight);
    case QC_SEGMENT_VISION:
        inner = qc_sat_mul(qc_sat_mul(10, g->vision_hidden), positions);
        return qc_sat_add(qc_sat_mul(ACTIVATION_BYTES, inner), weight);
    case QC_SEGMENT_LAYER:
        inner = qc_max_u64(attention_elems(g, o, layer, tokens),
                           qc_sat_mul(qc_sat_mul(3, g->intermediate), tokens));
        if (has_cross)
            inner = qc_sat_add(inner, qc_sat_mul(g->hidden, positions));
        /* Beside the buffers of attention or MLP, in elements of 2 bytes a token: the embeddings,
         * the layer's input, the residual and its normed copy; the rotary sines and cosines; and
         * ids, positions and mask of 8 bytes each. Measured: docs/theory/sizes.md. */
        beside = qc_sat_add(qc_sat_mul(4, g->hidden), qc_sat_add(qc_sat_mul(2, g->head_dim), 12));
        inner = qc_sat_add(inner, qc_sat_mul(beside, tokens));
        return qc_sat_add(qc_sat_mul(ACTIVATION_BYTES, inner), weight);
    case QC_SEGMENT_EXTRA:
        return 0; /* ordinary decoding does not run it */
    case QC_SEGMENT_NORM:
        return qc_sat_mul(2, hidden);
    case QC_SEGMENT_HEAD:
        if (g->decoder)
            inner = qc_sat_mul(qc_sat_mul(LOGIT_BYTES, g->vocab), o->batch);
        return qc_sat_add(qc_sat_add(hidden, inner), weight);
    }
    return 0;
}

/* The numbers of one placement: arrays with one entry per segment, and the lists made of them. */
typedef struct {
    qc_fit *fit;
    const qc_fit_options *o;
    qc_arena *arena;
    uint32_t compute_count;    /* the devices that compute, which are the first of the budget */
    uint32_t *leader;          /* per segment: itself, or the one it follows in the end */
    uint64_t *need;            /* per segment: weights and cache */
    uint64_t *group_need;      /* per leader: need with that of its followers */
    unsigned char *heads;      /* per leader: there is a head among them */
    uint64_t *room, *room_now; /* per computing device: without context; and without staging */
    uint32_t *spill;           /* leaders, in the order in which they are spilled */
    uint32_t spill_count;
    unsigned char *is_spilled; /* per segment */
    unsigned char *tiers_hold; /* per length of the list: the tiers have room for that much */
    /* The placement task, without what is spilled. */
    uint32_t *kept; /* the segment of each entry */
    uint32_t *kept_at, *kept_follows, *kept_device;
    uint64_t *kept_bytes, *kept_peak;
    qc_placement_task task;
} work;

static void list_kind(work *w, qc_segment_kind kind, int from_last)
{
    const qc_segments *s = w->fit->segments;
    for (uint32_t n = 0; n < s->count; n++) {
        uint32_t i = from_last ? s->count - 1 - n : n;
        qc_segment_kind as = w->heads[i] ? QC_SEGMENT_HEAD : s->segments[i].kind;
        if (w->leader[i] == i && as == kind)
            w->spill[w->spill_count++] = i;
    }
}

/* Does it pay to spill the head before layers? The head passes the buffer whole. So when it is
 * larger than a layer, spilling another layer frees room on the GPUs for fewer bytes a token; and a
 * layer of experts moves only some of them. This looks at weights alone, because the order must not
 * change with context or batch: otherwise more of them could fit where less does not. */
static int head_goes_first(const work *w)
{
    const qc_fit *f = w->fit;
    uint64_t head = 0, layer = 0;
    for (uint32_t i = 0; i < f->segments->count; i++) {
        if (w->heads[w->leader[i]])
            head = qc_sat_add(head, f->segment_bytes[i]);
        else if (f->segments->segments[i].kind == QC_SEGMENT_LAYER)
            layer = qc_max_u64(layer, f->segment_bytes[i]);
    }
    return f->geometry->experts == 0 && head <= layer;
}

/* Lists what to spill, first what costs a token least. A table that is also the head costs as much
 * as the head. */
static void order_spilling(work *w)
{
    int head_first = head_goes_first(w);
    list_kind(w, QC_SEGMENT_EXTRA, 1);
    list_kind(w, QC_SEGMENT_EMBEDDING, 0);
    list_kind(w, QC_SEGMENT_VISION, 0);
    if (head_first)
        list_kind(w, QC_SEGMENT_HEAD, 0);
    list_kind(w, QC_SEGMENT_LAYER, 1);
    if (!head_first)
        list_kind(w, QC_SEGMENT_HEAD, 0);
    list_kind(w, QC_SEGMENT_NORM, 1);
}

/* Embeddings are looked up where they lie, and images are seen where they lie. Everything else is
 * brought to the device that computes, through a buffer with room for the largest of them. */
static int is_staged(const work *w, uint32_t leader)
{
    qc_segment_kind kind = w->fit->segments->segments[leader].kind;
    return kind == QC_SEGMENT_LAYER || kind == QC_SEGMENT_NORM || w->heads[leader];
}

static uint64_t staging_of(const work *w, uint32_t spilled)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < spilled; i++)
        if (is_staged(w, w->spill[i]))
            most = qc_max_u64(most, w->group_need[w->spill[i]]);
    return most;
}

/* Makes the placement task without the first `spilled` entries of the list. */
static void make_task(work *w, uint32_t spilled)
{
    const qc_segments *s = w->fit->segments;
    memset(w->is_spilled, 0, s->count);
    for (uint32_t i = 0; i < spilled; i++)
        w->is_spilled[w->spill[i]] = 1;
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        uint32_t follows = s->segments[i].follows;
        w->is_spilled[i] = w->is_spilled[w->leader[i]];
        if (w->is_spilled[i])
            continue;
        w->kept[n] = i;
        w->kept_at[i] = n;
        w->kept_follows[n] = follows == QC_NO_SEGMENT ? UINT32_MAX : w->kept_at[follows];
        w->kept_bytes[n] = w->need[i];
        w->kept_peak[n] = w->fit->segment_workspace[i];
        n++;
    }
    uint64_t staging = staging_of(w, spilled);
    memcpy(w->room_now, w->room, w->compute_count * sizeof *w->room);
    w->room_now[0] = qc_sat_sub(w->room[0], staging);
    w->task = (qc_placement_task){.bytes = w->kept_bytes,
                                  .follows = w->kept_follows,
                                  .segment_count = n,
                                  .room = w->room_now,
                                  .device_count = w->compute_count,
                                  .peak = w->kept_peak};
}

/* Puts the first `spilled` entries of the list on the tiers, in order: as many as the first tier
 * holds, then the next. Followers go where their leaders go. Fills tiers_hold up to there. */
static void fill_tiers(work *w, uint32_t spilled)
{
    qc_fit *f = w->fit;
    uint32_t tier = w->compute_count;
    uint64_t used = 0;
    w->tiers_hold[0] = 1;
    for (uint32_t n = 0; n < spilled; n++) {
        uint64_t need = w->group_need[w->spill[n]];
        if (tier + 1 < f->budget->count && qc_sat_add(used, need) > f->devices[tier].budget_bytes) {
            tier++;
            used = 0;
        }
        used = qc_sat_add(used, need);
        f->device_of[w->spill[n]] = tier;
        w->tiers_hold[n + 1] = used <= f->devices[tier].budget_bytes;
    }
}

/* Do the devices that compute hold the rest once the first `spilled` entries are gone? */
static qc_status try_spilling(work *w, uint32_t spilled, int *computes, qc_error *err)
{
    *computes = 0;
    make_task(w, spilled);
    if (staging_of(w, spilled) > w->room[0])
        return QC_OK;
    return qc_placement_fits(&w->task, computes, err);
}

/* Finds the least k from begin to end - 1 with which the rest fits, or end. All of them are staged
 * through the same buffer, so what fits still fits with more of the list spilled, and a binary
 * search finds k. */
static qc_status least_spilling(work *w, uint32_t begin, uint32_t end, uint32_t *out, qc_error *err)
{
    uint32_t low = begin, high = end;
    int computes = 0;
    QC_TRY(try_spilling(w, end - 1, &computes, err));
    if (computes)
        high = end - 1;
    else
        low = end;
    while (low < high) {
        uint32_t k = low + (high - low) / 2;
        QC_TRY(try_spilling(w, k, &computes, err));
        if (computes)
            high = k;
        else
            low = k + 1;
    }
    *out = low;
    return QC_OK;
}

/* Returns how much of the list to spill; *fits says whether everything has room then. */
static qc_status choose_spilling(work *w, uint32_t *spilled, int *fits, qc_error *err)
{
    const qc_fit *f = w->fit;
    uint32_t most = f->budget->count > w->compute_count ? w->spill_count : 0;
    int found = 0;
    *spilled = most;
    *fits = 0;
    fill_tiers(w, most);
    for (uint32_t begin = 0, end = 0; begin <= most; begin = end) {
        uint64_t staging = staging_of(w, begin);
        for (end = begin + 1; end <= most; end++)
            if (is_staged(w, w->spill[end - 1]) && w->group_need[w->spill[end - 1]] > staging)
                break;
        uint32_t k = 0;
        QC_TRY(least_spilling(w, begin, end, &k, err));
        if (k < end && !found) {
            /* This comes nearest if no tier is large enough: the devices that compute are filled
             * first. */
            *spilled = k;
            found = 1;
        }
        for (; k < end; k++) {
            if (w->tiers_hold[k]) {
                *spilled = k;
                *fits = 1;
                return QC_OK;
            }
        }
    }
    return QC_OK;
}

static qc_status make_arrays(work *w, qc_error *err)
{
    qc_fit *f = w->fit;
    uint32_t n = f->segments->count, devices = f->budget->count;
    QC_TRY(qc_arena_array(w->arena, &f->devices, devices, err));
    QC_TRY(qc_arena_array(w->arena, &f->device_of, n, err));
    QC_TRY(qc_arena_array(w->arena, &f->segment_bytes, n, err));
    QC_TRY(qc_arena_array(w->arena, &f->segment_kv, n, err));
    QC_TRY(qc_arena_array(w->arena, &f->segment_workspace, n, err));
    QC_TRY(qc_arena_array(w->arena, &w->leader, n, err));
    QC_TRY(qc_arena_array(w->arena, &w->need, n, err));
    QC_TRY(qc_arena_array(w->arena, &w->group_need, n, err));
    QC_TRY(qc_arena_array(w->arena, &w->heads, n, err));
    QC_TRY(qc_arena_array(w->arena, &w->room, devices, err));
    QC_TRY(qc_arena_array(w->arena, &w->room_now, devices, err));
    QC_TRY(qc_arena_array(w->arena, &w->spill, n, err));
    QC_TRY(qc_arena_array(w->arena, &w->is_spilled, n, err));
    QC_TRY(qc_arena_array(w->arena, &w->tiers_hold, (size_t)n + 1, err));
    QC_TRY(qc_arena_array(w->arena, &w->kept, n, err));
    QC_TRY(qc_arena_array(w->arena, &w->kept_at, n, err));
    QC_TRY(qc_arena_array(w->arena, &w->kept_follows, n, err));
    QC_TRY(qc_arena_array(w->arena, &w->kept_device, n, err));
    QC_TRY(qc_arena_array(w->arena, &w->kept_bytes, n, err));
    QC_TRY(qc_arena_array(w->arena, &w->kept_peak, n, err));
    return QC_OK;
}

static void fill_segments(work *w, const uint64_t *segment_bytes, const uint64_t *largest_weight)
{
    qc_fit *f = w->fit;
    const qc_kv_use use = {.context = f->context,
                           .batch = f->batch,
                           .images = w->o->images,
                           .kv_bits = w->o->kv_bits,
                           .mla_expanded = w->o->mla_expanded};
    int has_cross = qc_fit_has_cross(f->geometry);
    for (uint32_t i = 0; i < f->segments->count; i++) {
        const qc_segment *s = &f->segments->segments[i];
        f->segment_bytes[i] = segment_bytes[i];
        if (s->kind == QC_SEGMENT_LAYER && s->layer < f->geometry->layer_count)
            f->segment_kv[i] = qc_layer_kv_bytes(f->geometry, s->layer, &use);
        f->segment_workspace[i] =
            qc_workspace_bytes(f->geometry, w->o, s->kind, s->layer, largest_weight[i], has_cross);
        w->leader[i] = s->follows == QC_NO_SEGMENT ? i : w->leader[s->follows];
        w->need[i] = qc_sat_add(f->segment_bytes[i], f->segment_kv[i]);
        w->group_need[w->leader[i]] = qc_sat_add(w->group_need[w->leader[i]], w->need[i]);
        w->heads[w->leader[i]] |= s->kind == QC_SEGMENT_HEAD;
        f->weight_bytes = qc_sat_add(f->weight_bytes, f->segment_bytes[i]);
        f->kv_bytes = qc_sat_add(f->kv_bytes, f->segment_kv[i]);
    }
    f->kv_bytes_per_token = qc_kv_bytes_per_token(f->geometry, &use);
}

static void add_segment(work *w, uint32_t i, uint32_t device)
{
    qc_fit *f = w->fit;
    qc_fit_device *d = &f->devices[device];
    const qc_segment *s = &f->segments->segments[i];
    d->segments++;
    d->weight_bytes = qc_sat_add(d->weight_bytes, f->segment_bytes[i]);
    d->kv_bytes = qc_sat_add(d->kv_bytes, f->segment_kv[i]);
    if (device < w->compute_count)
        d->workspace_bytes = qc_max_u64(d->workspace_bytes, f->segment_workspace[i]);
    else
        f->spilled++;
    if (s->kind == QC_SEGMENT_LAYER) {
        if (d->layers == 0 || s->layer < d->first_layer)
            d->first_layer = s->layer;
        d->layers++;
    }
}

/* Fills the table of devices from device_of; with --tp every card has its share of all. */
static void add_up(work *w, uint64_t staging)
{
    qc_fit *f = w->fit;
    for (uint32_t i = 0; i < f->segments->count; i++) {
        if (f->ranks == 0)
            add_segment(w, i, f->device_of[i]);
        for (uint32_t rank = 0; rank < f->ranks; rank++)
            add_segment(w, i, rank);
    }
    f->devices[0].staging_bytes = staging;
    f->devices[0].workspace_bytes = qc_sat_add(f->devices[0].workspace_bytes, staging);
    f->fits = 1;
    for (uint32_t i = 0; i < f->budget->count; i++) {
        qc_fit_device *d = &f->devices[i];
        if (d->device->tier == QC_TIER_GPU && (d->segments > 0 || d->staging_bytes > 0))
            d->context_bytes = w->o->cuda_context_bytes;
        uint64_t needed = qc_sat_add(qc_sat_add(d->weight_bytes, d->kv_bytes),
                                     qc_sat_add(d->workspace_bytes, d->context_bytes));
        d->short_by_bytes = qc_sat_sub(needed, d->budget_bytes);
        d->free_bytes =
            d->budget_bytes == UINT64_MAX ? UINT64_MAX : qc_sat_sub(d->budget_bytes, needed);
        if (d->short_by_bytes > 0)
            f->fits = 0;
        if (d->short_by_bytes > f->short_by_bytes) {
            f->short_by_bytes = d->short_by_bytes;
            f->short_device = i;
        }
    }
}

/* Returns ceil(bytes * batch * chosen / experts), at most bytes: what a step reads if no two tokens
 * choose the same expert. */
static uint64_t read_experts(const qc_fit *f, uint64_t bytes)
{
    const qc_geometry *g = f->geometry;
    uint64_t chosen = qc_sat_mul(g->experts_per_token, f->batch);
    if (g->experts == 0 || g->experts_per_token == 0 || chosen >= g->experts)
        return bytes;
    return bytes / g->experts * chosen + qc_ceil_div_u64(bytes % g->experts * chosen, g->experts);
}

/* Is this embedding also the head? A tied head reads all of the table that it follows. */
static int is_also_head(const qc_segments *s, uint32_t embedding)
{
    for (uint32_t i = embedding + 1; i < s->count; i++)
        if (s->segments[i].kind == QC_SEGMENT_HEAD && s->segments[i].follows == embedding)
            return 1;
    return 0;
}

/* Returns what a decoding step brings over from segment i. expert_bytes of the segment are routed
 * experts. */
static uint64_t moved_bytes(const qc_fit *f, uint32_t i, uint64_t expert_bytes)
{
    const qc_segments *s = f->segments;
    const qc_segment *seg = &s->segments[i];
    uint64_t bytes = f->segment_bytes[i];
    switch (seg->kind) {
    case QC_SEGMENT_EMBEDDING:
        if (is_also_head(s, i) || f->geometry->vocab == 0)
            return bytes;
        bytes = qc_sat_mul(qc_ceil_div_u64(bytes, f->geometry->vocab), f->batch);
        return bytes < f->segment_bytes[i] ? bytes : f->segment_bytes[i];
    case QC_SEGMENT_LAYER:
        return qc_sat_add(qc_sat_add(bytes - expert_bytes, read_experts(f, expert_bytes)),
                          f->segment_kv[i]);
    case QC_SEGMENT_VISION: /* once per image, where it lies */
    case QC_SEGMENT_EXTRA:
        return 0;
    case QC_SEGMENT_NORM:
    case QC_SEGMENT_HEAD:
        return bytes;
    }
    return bytes;
}

static void count_transfer(qc_fit *f, const uint64_t *expert_bytes)
{
    uint32_t computing = f->budget->gpu_count > 0 ? f->budget->gpu_count : 1;
    const qc_device *first = &f->budget->devices[0];
    double link = first->card && first->card->host_link > 0 ? first->card->host_link : QC_LINK_RATE;
    f->transfer_bytes_per_token = 0;
    f->transfer_seconds = 0;
    for (uint32_t i = 0; i < f->segments->count; i++) {
        uint32_t d = f->device_of[i];
        if (d < computing)
            continue;
        uint64_t bytes = moved_bytes(f, i, expert_bytes ? expert_bytes[i] : 0);
        f->transfer_bytes_per_token = qc_sat_add(f->transfer_bytes_per_token, bytes);
        if (f->budget->devices[d].tier == QC_TIER_DISK)
            f->transfer_seconds += (double)bytes / QC_DISK_RATE;
        if (first->tier == QC_TIER_GPU)
            f->transfer_seconds += (double)bytes / link;
    }
}

qc_status qc_fit_make(qc_fit *out, qc_arena *arena, const qc_fit_load *load,
                      const qc_fit_options *o, qc_error *err)
{
    memset(out, 0, sizeof *out);
    out->budget = &o->vram;
    out->segments = load->segments;
    out->geometry = load->geometry;
    out->context = qc_fit_context(load->geometry, o);
    out->batch = o->batch;
    work w = {.fit = out, .o = o, .arena = arena};
    QC_TRY(make_arrays(&w, err));
    fill_segments(&w, load->segment_bytes, load->largest_weight);
    w.compute_count = o->vram.gpu_count > 0 ? o->vram.gpu_count : 1;
    for (uint32_t d = 0; d < o->vram.count; d++) {
        const qc_device *device = &o->vram.devices[d];
        out->devices[d].device = device;
        out->devices[d].budget_bytes = qc_fit_budget_bytes(device->total_bytes, o->margin);
        w.room[d] = out->devices[d].budget_bytes;
        if (device->tier == QC_TIER_GPU)
            w.room[d] = qc_sat_sub(w.room[d], o->cuda_context_bytes);
    }
    out->ranks = qc_tp_ranks(o);
    if (out->ranks > 0) {
        add_up(&w, 0);
        return QC_OK;
    }
    order_spilling(&w);
    uint32_t spilled = 0, short_device = 0;
    uint64_t short_bytes = 0;
    int fits = 0, computes = 0;
    QC_TRY(choose_spilling(&w, &spilled, &fits, err));
    make_task(&w, spilled);
    QC_TRY(qc_placement_solve(&w.task, w.kept_device, &computes, &short_bytes, &short_device, err));
    for (uint32_t i = 0; i < w.task.segment_count; i++)
        out->device_of[w.kept[i]] = w.kept_device[i];
    fill_tiers(&w, spilled);
    for (uint32_t i = 0; i < load->segments->count; i++)
        out->device_of[i] = out->device_of[w.leader[i]];
    add_up(&w, staging_of(&w, spilled));
    count_transfer(out, NULL);
    return QC_OK;
}

/* Returns how many elements of a job's weight may be needed in 16 bit at once. For stacked experts,
 * that is one expert. */
static uint64_t dequantized_elems(const qc_plan *p, const qc_job *j)
{
    const qc_checkpoint_tensor *t = &p->model->tensors[j->source];
    uint64_t elems = 1;
    if (j->scheme == QC_SCHEME_KEEP && j->entry->stored) {
        for (unsigned i = 0; i < j->entry->stored->ndim; i++)
            elems = qc_sat_mul(elems, j->entry->stored->dims[i]);
        return elems;
    }
    const qc_coded_weight *w = j->scheme == QC_SCHEME_KEEP ? j->entry->coded : NULL;
    if (w && qc_coding_is_packed(w->coding))
        return qc_sat_mul(w->dims[w->ndim - 2], w->dims[w->ndim - 1]);
    uint64_t stack = t->ndim >= 3 && t->dims[0] > 0 ? t->dims[0] : 1;
    if (j->scheme == QC_SCHEME_KEEP && j->entry->role == QC_ROLE_PACKED)
        return t->dtype == QC_DTYPE_U8 ? qc_sat_mul(2, j->elems) / stack : j->elems / stack;
    int kept_fp8 =
        j->scheme == QC_SCHEME_KEEP && j->entry->coded && j->entry->coded->coding == QC_CODING_FP8;
    if (qc_scheme_is_quantized(j->scheme) || kept_fp8)
        return j->elems / stack;
    return 0;
}

static qc_status segment_of_job(const qc_plan *plan, const qc_segments *segments, const qc_job *j,
                                uint32_t *out, qc_error *err)
{
    *out = j->source < segments->tensor_count ? segments->of_tensor[j->source] : QC_NO_SEGMENT;
    if (*out >= segments->count)
        QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s': expected to lie in a segment, found none",
                plan->model->tensors[j->source].name);
    return QC_OK;
}

qc_status qc_fit_sum_segments(qc_arena *arena, const qc_plan *plan, const qc_segments *segments,
                              uint64_t **segment_bytes, uint64_t **largest_weight, qc_error *err)
{
    QC_TRY(qc_arena_array(arena, segment_bytes, segments->count, err));
    QC_TRY(qc_arena_array(arena, largest_weight, segments->count, err));
    for (uint32_t i = 0; i < plan->tensor_count; i++) {
        uint32_t segment = 0;
        QC_TRY(segment_of_job(plan, segments, &plan->jobs[plan->outputs[i].job], &segment, err));
        (*segment_bytes)[segment] += qc_plan_tensor_bytes(plan, i);
    }
    for (uint32_t i = 0; i < plan->job_count; i++) {
        uint32_t segment = 0;
        QC_TRY(segment_of_job(plan, segments, &plan->jobs[i], &segment, err));
        uint64_t elems = dequantized_elems(plan, &plan->jobs[i]);
        (*largest_weight)[segment] = qc_max_u64((*largest_weight)[segment], elems);
    }
    return QC_OK;
}

qc_status qc_fit_count_experts(qc_fit *fit, const qc_plan *plan, qc_error *err)
{
    if (fit->geometry->experts == 0 || fit->spilled == 0)
        return QC_OK;
    qc_status st = QC_OK;
    qc_arena arena;
    qc_arena_init(&arena);
    uint64_t *expert_bytes = NULL;
    QC_TRY_GOTO(st, done, qc_arena_array(&arena, &expert_bytes, fit->segments->count, err));
    for (uint32_t i = 0; i < plan->tensor_count; i++) {
        const qc_job *j = &plan->jobs[plan->outputs[i].job];
        uint32_t segment = 0;
        QC_TRY_GOTO(st, done, segment_of_job(plan, fit->segments, j, &segment, err));
        /* Names with ".shared_experts." do not match, because every token passes those. */
        if (strstr(plan->model->tensors[j->source].name, ".experts."))
            expert_bytes[segment] += qc_plan_tensor_bytes(plan, i);
    }
    count_transfer(fit, expert_bytes);
done:
    qc_arena_deinit(&arena);
    return st;
}

/* ---- searching ---- */

/* Finds the longest context and the largest batch by bisection. That works because whatever fits
 * for some context and batch fits for less of either: cache and scratch never shrink when they
 * grow, and neither does the list of what is spilled. */

/* These are beyond any real use. If even that fits, nothing grows with it. */
#define CONTEXT_MOST ((uint64_t)1 << 40)
#define BATCH_MOST   ((uint64_t)1 << 32)

typedef struct {
    const qc_fit *fit;
    const uint64_t *largest_weight;
    qc_fit_options options;
    uint64_t *searched; /* the member of options that is varied */
} search;

static qc_status try_value(search *s, uint64_t value, int *fits, qc_error *err)
{
    qc_arena arena;
    qc_arena_init(&arena);
    qc_fit fit;
    *s->searched = value;
    const qc_fit_load load = {s->fit->segments, s->fit->geometry, s->fit->segment_bytes,
                              s->largest_weight};
    qc_status st = qc_fit_make(&fit, &arena, &load, &s->options, err);
    if (st == QC_OK)
        *fits = fit.fits;
    qc_arena_deinit(&arena);
    return st;
}

/* Finds the largest value from 1 to most that fits; 0 if none does. */
static qc_status largest_value(search *s, uint64_t most, uint64_t *out, qc_error *err)
{
    uint64_t good = 0, bad = most;
    int fits = 0;
    QC_TRY(try_value(s, most, &fits, err));
    if (fits) {
        *out = most;
        return QC_OK;
    }
    while (bad - good > 1) {
        uint64_t middle = good + (bad - good) / 2;
        QC_TRY(try_value(s, middle, &fits, err));
        if (fits)
            good = middle;
        else
            bad = middle;
    }
    *out = good;
    return QC_OK;
}

qc_status qc_fit_max_context(uint64_t *out, const qc_fit *fit, const qc_fit_options *o,
                             const uint64_t *largest_weight, qc_error *err)
{
    search s = {.fit = fit, .largest_weight = largest_weight, .options = *o};
    s.options.batch = 1;
    s.searched = &s.options.context;
    uint64_t limit = fit->geometry->max_context;
    QC_TRY(largest_value(&s, limit > 0 ? limit : CONTEXT_MOST, out, err));
    if (limit == 0 && *out == CONTEXT_MOST)
        *out = QC_NO_LIMIT;
    return QC_OK;
}

qc_status qc_fit_max_batch(uint64_t *out, const qc_fit *fit, const qc_fit_options *o,
                           const uint64_t *largest_weight, qc_error *err)
{
    search s = {.fit = fit, .largest_weight = largest_weight, .options = *o};
    s.options.context = qc_fit_context(fit->geometry, o);
    s.searched = &s.options.batch;
    QC_TRY(largest_value(&s, BATCH_MOST, out, err));
    if (*out == BATCH_MOST)
        *out = QC_NO_LIMIT;
    return QC_OK;
}
