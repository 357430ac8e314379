#include "convert/fit/auto_internal.h"

#include "base/checked.h"
#include "convert/fit/auto_traces.h"
#include "convert/fit/auto_weigh.h"
#include "convert/fit/plugin_share.h"
#include "convert/hardware/hardware_choice.h"
#include "convert/model/recipe_coded.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* At most this many experts of a group are measured. */
#define SAMPLED_EXPERTS 8u
/* Only the fit knows the workspace exactly. Where it says that room is short, the room is narrowed
 * at most this many times. */
#define MAX_ROUNDS 12

/* ---- errors ---- */

static void expect_group(qc_chooser *c, uint32_t g)
{
    uint64_t rows, cols;
    qc_auto_shape_of(c, c->members[c->first_member[g]].tensor, &rows, &cols);
    for (unsigned k = 0; k < QC_CANDIDATES; k++)
        c->out->groups[g].rel_mse[k] =
            c->out->groups[g].holds & 1u << k
                ? qc_auto_normal_mse(qc_auto_form_of(c, g, k), cols, c->options->recipe.scale)
                : (double)NAN;
}

static uint32_t sampled_of(const qc_chooser *c, uint32_t g)
{
    uint32_t n = c->first_member[g + 1] - c->first_member[g];
    return n < SAMPLED_EXPERTS ? n : SAMPLED_EXPERTS;
}

static qc_status measure_groups(qc_chooser *c, qc_error *err)
{
    uint32_t count = 0, at = 0;
    for (uint32_t g = 0; g < c->out->group_count; g++)
        count += sampled_of(c, g);
    qc_auto_sample *samples = NULL;
    qc_candidate_form(*forms)[QC_CANDIDATES] = NULL;
    QC_TRY(qc_arena_array(c->scratch, &samples, count, err));
    QC_TRY(qc_arena_array(c->scratch, &forms, c->out->group_count, err));
    for (uint32_t g = 0; g < c->out->group_count; g++) {
        uint64_t n = c->first_member[g + 1] - c->first_member[g], k = sampled_of(c, g);
        for (unsigned candidate = 0; candidate < QC_CANDIDATES; candidate++)
            forms[g][candidate] = qc_auto_form_of(c, g, candidate);
        for (uint64_t i = 0; i < k; i++) {
            qc_auto_sample *s = &samples[at++];
            s->tensor = c->members[c->first_member[g] + (2 * i + 1) * n / (2 * k)].tensor;
            qc_auto_shape_of(c, s->tensor, &s->rows, &s->cols);
            s->transpose = c->recipe->entries[s->tensor].transpose;
            s->coded = qc_auto_coded_of(c, s->tensor);
            s->wanted = c->out->groups[g].holds;
            s->forms = forms[g];
        }
    }
    unsigned threads = c->call->threads ? c->call->threads : qc_cpu_count();
    QC_TRY(qc_auto_measure(samples, count, c->model, &c->options->recipe, threads, err));
    at = 0;
    for (uint32_t g = 0; g < c->out->group_count; at += sampled_of(c, g), g++) {
        qc_auto_group *group = &c->out->groups[g];
        if (qc_auto_combine(group->rel_mse, &group->mean_square, samples + at, sampled_of(c, g)))
            group->reason = "not finite";
        if (!(group->holds & 1u << QC_CANDIDATE_16BIT))
            group->rel_mse[QC_CANDIDATE_16BIT] = (double)NAN;
    }
    for (uint32_t i = 0; i < count; i++) {
        c->out->sampled_rows += samples[i].rows_read;
        c->out->sampled_bytes += samples[i].bytes_read;
    }
    return QC_OK;
}

/* Finds costs by second moments where they are at hand, else by --importance. Without either the
 * roles of weights decide. */
static qc_status weigh_groups(qc_chooser *c, const qc_plan_subject *subject, qc_error *err)
{
    const char *path = c->options->recipe.importance;
    qc_plan plan;
    uint32_t *tensors = NULL;
    double *products = NULL;
    QC_TRY(qc_arena_array(c->scratch, &tensors, c->member_count, err));
    for (uint32_t i = 0; i < c->member_count; i++)
        tensors[i] = c->members[i].tensor;
    const qc_auto_weights w = {c->arena, &plan, c->first_member, tensors};
    if (path && !subject->has_weights)
        QC_FAIL(err, QC_ERR_USAGE,
                "--importance needs the weights of the model, whose errors it weighs, and only "
                "their shapes are known; download the model and give its folder");
    if (path && !subject->weigh) {
        QC_TRY(qc_auto_read_traces(&products, c->scratch, c->model, path, err));
        return qc_auto_weigh_by_traces(c->out, &w, products, err);
    }
    if (!subject->weigh)
        return QC_OK;
    QC_TRY(qc_plan_begin(&plan, c->scratch, c->model, c->recipe, c->call, c->options, err));
    return qc_auto_weigh_groups(c->out, &w, subject->weigh, err);
}

/* ---- what is chosen as one ---- */

/* Adds what a group costs and takes to its item. Costs that are NaN stay so. */
static void add_to_item(qc_chooser *c, uint32_t g)
{
    qc_auto_group *group = &c->out->groups[g];
    qc_auto_item *it = &c->items[c->item_of[g]];
    for (unsigned k = 0; k < QC_CANDIDATES; k++) {
        if (!c->out->weighed || isnan(group->rel_mse[k]))
            group->cost[k] = group->importance * group->rel_mse[k];
        it->cost[k] += group->reason ? (double)NAN : group->cost[k];
        it->bytes[k] =
            qc_sat_add(it->bytes[k], qc_auto_by_bits(c) ? group->bytes[k] : c->room[g][k]);
    }
    group->chosen = QC_CANDIDATE_16BIT;
}

static int has_candidate(const double *errors)
{
    int has = 0;
    for (unsigned k = 0; k < QC_CANDIDATES; k++)
        has |= !isnan(errors[k]);
    return has;
}

/* Takes out the items that have no candidate, whose groups stay as they are. A group that has no
 * reason of its own gets one: another group of its module cannot be quantized, or no scheme can
 * hold the group's weights. */
static void drop_items(qc_chooser *c, uint32_t *now)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < c->item_count; i++) {
        int stays = has_candidate(c->items[i].cost);
        now[i] = stays ? kept : UINT32_MAX;
        c->items[kept] = c->items[i];
        c->modules[kept] = c->modules[i];
        kept += stays ? 1 : 0;
    }
    c->item_count = kept;
    for (uint32_t g = 0; g < c->out->group_count; g++) {
        qc_auto_group *group = &c->out->groups[g];
        c->item_of[g] = now[c->item_of[g]];
        if (c->item_of[g] != UINT32_MAX)
            continue;
        if (!group->reason)
            group->reason = has_candidate(group->rel_mse)
                                ? "loaded as one with what cannot be quantized"
                                : "beyond what the schemes can hold";
        group->rel_mse[QC_CANDIDATE_16BIT] = 0;
    }
}

/* ---- devices ---- */

/* Adds up what the segments take beside the weights whose schemes are chosen. */
static qc_status sum_fixed(qc_chooser *c, qc_error *err)
{
    qc_plan plan;
    uint64_t *largest = NULL;
    QC_TRY(qc_plan_begin(&plan, c->scratch, c->model, c->recipe, c->call, c->options, err));
    QC_TRY(qc_fit_sum_segments(c->scratch, &plan, c->segments, &c->fixed, &largest, err));
    for (uint32_t i = 0; i < c->member_count; i++) {
        uint32_t tensor = c->members[i].tensor;
        const qc_recipe_entry *e = &c->recipe->entries[tensor];
        c->fixed[c->segments->of_tensor[tensor]] -=
            qc_auto_quantized_bytes(c, tensor, e->scheme, e->block_elems);
    }
    for (uint32_t i = 0; i < plan.job_count; i++) {
        const qc_job *j = &plan.jobs[i];
        uint32_t s = c->segments->of_tensor[j->source];
        if (qc_scheme_is_quantized(j->scheme) && !qc_auto_is_choosable(c, j->source) &&
            j->elems > c->fixed_largest[s])
            c->fixed_largest[s] = j->elems;
    }
    return QC_OK;
}

/* Fits a choice for every group on the devices that are filled. */
static qc_status fit_groups(const qc_chooser *c, qc_fit *fit, qc_error *err)
{
    const qc_tp_split split = {qc_family_of(c->model), c->geometry, c->ranks};
    uint32_t n = c->segments->count;
    uint64_t *bytes = NULL, *largest = NULL;
    QC_TRY(qc_arena_array(c->scratch, &bytes, n, err));
    QC_TRY(qc_arena_array(c->scratch, &largest, n, err));
    memcpy(bytes, c->fixed, n * sizeof *bytes);
    memcpy(largest, c->fixed_largest, n * sizeof *largest);
    for (uint32_t g = 0; g < c->out->group_count; g++) {
        const qc_auto_group *group = &c->out->groups[g];
        uint32_t tensor = c->members[c->first_member[g]].tensor;
        uint32_t s = c->segments->of_tensor[tensor];
        bytes[s] += c->room[g][group->chosen];
        /* A stack is dequantized expert by expert, whether its form is its own or not. */
        const qc_coded_weight *coded = qc_auto_coded_of(c, tensor);
        int stack = c->ranks == 0 && coded && coded->coding == QC_CODING_MXFP4;
        uint64_t elems = group->elems / group->weights / (stack ? coded->dims[0] : 1);
        if (group->chosen != QC_CANDIDATE_16BIT || stack)
            largest[s] =
                qc_max_u64(largest[s], qc_plugin_elems(c->model->tensors[tensor].name, elems,
                                                       &split, c->options->recipe.format));
    }
    const qc_fit_load load = {c->segments, c->ranks > 0 ? &c->share : c->geometry, bytes, largest};
    return qc_fit_make(fit, c->scratch, &load, &c->fit, err);
}

static void choose_groups(qc_chooser *c, const unsigned *chosen, unsigned uniform)
{
    for (uint32_t g = 0; g < c->out->group_count; g++) {
        if (c->item_of[g] != UINT32_MAX)
            c->out->groups[g].chosen = chosen ? chosen[c->item_of[g]] : uniform;
    }
}

/* Makes the task of the solver. The bytes of followers count in the segment that they follow, with
 * the larger of their workspaces. A workspace is that of a choice that quantizes all weights. */
static qc_status make_task(qc_chooser *c, qc_auto_task *t, uint64_t **room, qc_error *err)
{
    uint32_t n = c->segments->count;
    uint64_t *fixed = NULL, *scratch = NULL;
    QC_TRY(qc_arena_array(c->scratch, &fixed, n, err));
    QC_TRY(qc_arena_array(c->scratch, &scratch, n, err));
    QC_TRY(qc_arena_array(c->scratch, room, c->fit.vram.count, err));
    qc_fit fit;
    choose_groups(c, NULL, 0);
    QC_TRY(fit_groups(c, &fit, err));
    for (uint32_t s = 0; s < n; s++) {
        uint32_t at = qc_auto_resolve(c->segments, s);
        fixed[at] += c->fixed[s] + fit.segment_kv[s];
        if (fit.segment_workspace[s] > scratch[at])
            scratch[at] = fit.segment_workspace[s];
    }
    for (uint32_t g = 0; g < c->out->group_count; g++) {
        if (c->item_of[g] == UINT32_MAX)
            fixed[c->members[c->first_member[g]].segment] += c->room[g][QC_CANDIDATE_16BIT];
    }
    for (uint32_t d = 0; d < c->fit.vram.count; d++) {
        uint64_t budget = fit.devices[d].budget_bytes;
        uint64_t context =
            c->fit.vram.devices[d].tier == QC_TIER_GPU ? c->options->fit.cuda_context_bytes : 0;
        (*room)[d] = budget > context ? budget - context : 0;
        if (c->ranks > 0 && (*room)[d] < (*room)[0])
            (*room)[0] = (*room)[d]; /* all cards hold the same: they are one device to fill */
    }
    *t = (qc_auto_task){.items = c->items,
                        .item_count = c->item_count,
                        .segment_count = n,
                        .fixed = fixed,
                        .scratch = scratch,
                        .room = *room,
                        .device_count = c->ranks > 0 ? 1 : c->fit.vram.count};
    return QC_OK;
}

/* Returns the average bits of all items' weights where each has the smallest of its candidates. */
static double least_bits(const qc_chooser *c, double elems)
{
    double bytes = 0;
    for (uint32_t i = 0; i < c->item_count; i++) {
        uint64_t least = UINT64_MAX;
        for (unsigned k = 0; k < QC_CANDIDATES; k++)
            if (!isnan(c->items[i].cost[k]))
                least = qc_min_u64(least, c->items[i].bytes[k]);
        bytes += (double)least;
    }
    return elems > 0 ? bytes * 8 / elems : 0;
}

/* Solves for --bits: all weights that are chosen share their bytes, as on one device without
 * anything else. */
static qc_status solve_by_bits(qc_chooser *c, qc_error *err)
{
    const double bits = c->options->recipe.bits;
    qc_auto_solution solution = {.chosen = c->chosen};
    uint64_t *fixed = NULL, room = 0;
    uint32_t cut[1];
    double elems = 0;
    QC_TRY(qc_arena_array(c->scratch, &fixed, c->segments->count, err));
    for (uint32_t g = 0; g < c->out->group_count; g++)
        if (c->item_of[g] != UINT32_MAX)
            elems += (double)c->out->groups[g].elems;
    room = (uint64_t)(bits * elems / 8);
    const qc_auto_task task = {.items = c->items,
                               .item_count = c->item_count,
                               .segment_count = c->segments->count,
                               .fixed = fixed,
                               .room = &room,
                               .device_count = 1};
    solution.cut = cut;
    QC_TRY(qc_auto_solve(&task, &solution, err));
    if (!solution.fits)
        QC_FAIL(err, QC_ERR_USAGE,
                "--bits %g is less than this model can have; expected %.3f bits, its smallest "
                "choice with these --schemes, to 16",
                bits, ceil(least_bits(c, elems) * 1000) / 1000);
    choose_groups(c, c->chosen, 0);
    c->out->fits = 1;
    c->out->predicted = solution.cost;
    c->out->bound = solution.bound;
    memcpy(c->out->uniform, solution.uniform, sizeof solution.uniform);
    memcpy(c->out->uniform_fits, solution.uniform_fits, sizeof solution.uniform_fits);
    return QC_OK;
}

/* Solves the task. The fit makes its own cuts and has the last word: if it is short of room, the
 * solver gets less. */
static qc_status solve_and_fit(qc_chooser *c, qc_error *err)
{
    qc_auto_task task;
    qc_auto_solution solution = {.chosen = c->chosen};
    uint64_t *room = NULL;
    if (qc_auto_by_bits(c))
        return solve_by_bits(c, err);
    QC_TRY(qc_arena_array(c->scratch, &solution.cut, c->fit.vram.count, err));
    QC_TRY(make_task(c, &task, &room, err));
    for (int round = 0;; round++) {
        qc_fit fit;
        QC_TRY(qc_auto_solve(&task, &solution, err));
        if (round == 0)
            c->out->bound = solution.bound;
        choose_groups(c, c->chosen, 0);
        QC_TRY(fit_groups(c, &fit, err));
        c->out->fits = fit.fits;
        if (fit.fits || !solution.fits || round == MAX_ROUNDS)
            break;
        for (uint32_t d = 0; d < task.device_count; d++)
            room[d] = room[d] > fit.short_by_bytes ? room[d] - fit.short_by_bytes : 0;
    }
    c->out->predicted = solution.cost;
    /* The choice is never worse than a uniform scheme that fits, and here the fit says what
     * fits. */
    unsigned better = QC_CANDIDATES;
    for (unsigned k = 0; k < QC_CANDIDATES; k++) {
        qc_fit fit;
        c->out->uniform[k] = solution.uniform[k];
        if (isnan(solution.uniform[k]))
            continue;
        choose_groups(c, NULL, k);
        QC_TRY(fit_groups(c, &fit, err));
        c->out->uniform_fits[k] = fit.fits;
        if (fit.fits && (!c->out->fits || solution.uniform[k] < c->out->predicted)) {
            better = k;
            c->out->fits = 1;
            c->out->predicted = solution.uniform[k];
        }
    }
    choose_groups(c, better == QC_CANDIDATES ? c->chosen : NULL, better);
    if (!(c->out->bound <= c->out->predicted)) /* the solver had ruled out this uniform choice */
        c->out->bound = c->out->fits ? c->out->predicted : (double)NAN;
    return QC_OK;
}

/* ---- the recipe ---- */

static const char *why_of(const qc_chooser *c, const qc_auto_group *group, int coded)
{
    if (group->chosen != QC_CANDIDATE_16BIT)
        return c->out->rows[group->chosen].why;
    if (group->reason)
        return coded ? "auto: as it is, not to be quantized" : "auto: 16 bit, not to be quantized";
    return coded ? "auto: as it is" : c->out->rows[QC_CANDIDATE_16BIT].why;
}

static void apply_choice(qc_chooser *c)
{
    for (uint32_t g = 0; g < c->out->group_count; g++) {
        const qc_auto_group *group = &c->out->groups[g];
        unsigned k = group->chosen;
        c->out->count_chosen[k] += group->weights;
        c->out->bytes_chosen[k] += group->bytes[k];
        for (uint32_t i = c->first_member[g]; i < c->first_member[g + 1]; i++) {
            uint32_t tensor = c->members[i].tensor;
            qc_recipe_entry *e = &c->recipe->entries[tensor];
            qc_auto_set_entry(c, g, e, tensor, k);
            e->unasked = k == QC_CANDIDATE_16BIT && group->reason && !e->coded;
            e->why = why_of(c, group, e->coded && !qc_coding_is_packed(e->coded->coding));
        }
    }
    qc_recipe_settle_scales(c->recipe, c->model);
    int has[QC_SCHEME_COUNT] = {0}, schemes = 0, fp8 = 0;
    for (size_t i = 0; i < c->model->tensor_count; i++) {
        const qc_recipe_entry *e = &c->recipe->entries[i];
        schemes += qc_scheme_is_quantized(e->scheme) && !has[e->scheme];
        has[e->scheme] = 1;
        fp8 |= e->scheme == QC_SCHEME_KEEP && e->coded && e->coded->coding == QC_CODING_FP8;
    }
    c->out->mixed = schemes > 1 && c->options->recipe.format != QC_FORMAT_COMPRESSED_TENSORS;
    c->out->mixed_fp8 = fp8 && schemes > 0;
}

/* ---- what the choice does not say by itself ---- */

/* Leaves int8 out where a card of the budget does not run it, because what fills the GPUs has to
 * run on them. Weights move between devices while the cuts are sought, so one such card is
 * enough. */
static qc_status leave_out_int8(qc_chooser *c, qc_error *err)
{
    const qc_card *card = NULL;
    for (uint32_t i = 0; i < c->fit.vram.gpu_count && !card; i++) {
        const qc_card *k = c->fit.vram.devices[i].card;
        if (k && !qc_sm_runs_int8(k->sm))
            card = k;
    }
    if (!card || c->options->recipe.schemes || (c->ranks > 0 && c->options->fit.plugin))
        return QC_OK;
    for (unsigned k = 0; k < QC_CANDIDATES; k++) {
        if (qc_schemes[c->out->rows[k].scheme].needs_int8_matmul)
            c->candidates &= ~(1u << k);
    }
    return qc_arena_printf(
        c->arena, &c->out->notes[c->out->note_count++], err,
        "int8 is left out because bitsandbytes has no int8 matmul for a %s (compute capability "
        "%u.%u, expected 7.5 or more); name int8 in --schemes to have it all the same",
        card->name, card->sm / 10, card->sm % 10);
}

/* Leaves 16 bits out where they would be another tool's codes, which compressed-tensors does not
 * hold beside its integers. */
static qc_status leave_out_coded(qc_chooser *c, qc_error *err)
{
    const qc_coded_weight *w = NULL;
    if (c->options->recipe.format != QC_FORMAT_COMPRESSED_TENSORS || c->options->recipe.schemes)
        return QC_OK;
    for (uint32_t i = 0; i < c->model->tensor_count && !w; i++)
        if (qc_auto_is_choosable(c, i) && qc_auto_coded_of(c, i) &&
            !qc_coding_is_packed(qc_auto_coded_of(c, i)->coding))
            w = qc_auto_coded_of(c, i);
    if (!w)
        return QC_OK;
    c->candidates &= ~(1u << QC_CANDIDATE_16BIT);
    return qc_arena_printf(c->arena, &c->out->notes[c->out->note_count++], err,
                           "no weight stays in %s, which compressed-tensors does not hold beside "
                           "its integers; --to keep leaves all of them as they are",
                           qc_coding_name(w->coding));
}

/* Notes that the smallest choice spills. GPUs that are too small are no dead end when a tier lies
 * beside them, but then the size matters more than the precision. */
static qc_status note_spilling(qc_chooser *c, qc_error *err)
{
    const qc_budget *b = &c->fit.vram;
    uint32_t tiers = c->options->fit.vram.count - b->count;
    if (c->out->fits || tiers == 0)
        return QC_OK;
    c->out->spills = 1;
    return qc_arena_printf(
        c->arena, &c->out->notes[c->out->note_count++], err,
        "the %s not hold even the smallest choice, so every weight gets that; a better one might "
        "fit with %s%s%s, but what lies there crosses the host link for every token",
        b->gpu_count == 0   ? "cpu does"
        : b->gpu_count == 1 ? "GPU does"
                            : "GPUs do",
        b->devices[b->count].name, tiers > 1 ? " and " : "",
        tiers > 1 ? b->devices[b->count + 1].name : "");
}

/* Can the errors of an earlier choice be taken over? They can if it measured the same groups, and
 * every scheme that may be taken. */
static int was_measured(const qc_chooser *c, const qc_auto_result *before)
{
    int same = before && before->measured && before->rows == c->out->rows &&
               before->group_count == c->out->group_count;
    for (uint32_t g = 0; same && g < before->group_count; g++) {
        const qc_auto_group *then = &before->groups[g], *now = &c->out->groups[g];
        same = (now->holds & ~then->holds) == 0;
        for (unsigned k = 0; same && k < QC_CANDIDATES; k++)
            same = !(now->holds & 1u << k) || now->step[k] == then->step[k];
    }
    return same;
}

static void take_measured(qc_chooser *c, const qc_auto_result *before)
{
    for (uint32_t g = 0; g < before->group_count; g++) {
        const qc_auto_group *then = &before->groups[g];
        qc_auto_group *now = &c->out->groups[g];
        for (unsigned k = 0; k < QC_CANDIDATES; k++) {
            now->rel_mse[k] = now->holds & 1u << k ? then->rel_mse[k] : (double)NAN;
            now->cost[k] = then->cost[k];
        }
        now->mean_square = then->mean_square;
        now->reason = then->reason;
    }
    c->out->weighed = before->weighed;
    c->out->sampled_rows = before->sampled_rows;
    c->out->sampled_bytes = before->sampled_bytes;
}

static qc_status choose_schemes(qc_chooser *c, const qc_plan_subject *subject, qc_error *err)
{
    uint32_t *now = NULL;
    QC_TRY(qc_auto_find_groups(c, err));
    QC_TRY(qc_arena_array(c->scratch, &c->scale_bytes, c->model->tensor_count, err));
    for (size_t i = 0; i < c->model->tensor_count; i++) {
        uint32_t owner = c->recipe->entries[i].owner;
        if (owner != UINT32_MAX)
            c->scale_bytes[owner] += c->model->tensors[i].bytes;
    }
    const uint32_t groups = c->out->group_count;
    QC_TRY(qc_arena_array(c->scratch, &c->room, groups, err));
    QC_TRY(qc_arena_array(c->scratch, &c->fixed, c->segments->count, err));
    QC_TRY(qc_arena_array(c->scratch, &c->fixed_largest, c->segments->count, err));
    QC_TRY(qc_arena_array(c->scratch, &now, groups, err));
    QC_TRY(qc_auto_find_items(c, err));
    QC_TRY(qc_auto_find_candidates(c, err));
    for (uint32_t g = 0; g < groups && !subject->has_weights; g++)
        expect_group(c, g);
    if (subject->has_weights && was_measured(c, subject->measured))
        take_measured(c, subject->measured);
    else if (subject->has_weights)
        QC_TRY(measure_groups(c, err));
    QC_TRY(weigh_groups(c, subject, err));
    QC_TRY(c->ranks > 0 ? qc_tp_geometry(&c->share, c->scratch, c->geometry, c->ranks, err)
                        : sum_fixed(c, err));
    for (uint32_t g = 0; g < groups; g++)
        add_to_item(c, g);
    drop_items(c, now);
    QC_TRY(solve_and_fit(c, err));
    apply_choice(c);
    QC_TRY(note_spilling(c, err));
    return qc_recipe_list_skipped(c->recipe, c->arena, c->model, &c->options->recipe, err);
}

qc_status qc_auto_choose(qc_auto_result *out, qc_arena *arena, qc_recipe *recipe,
                         const qc_plan_subject *subject, const qc_segments *segments,
                         const qc_plan_options *options, qc_error *err)
{
    qc_arena scratch;
    qc_chooser c = {.out = out,
                    .arena = arena,
                    .scratch = &scratch,
                    .recipe = recipe,
                    .call = subject->call,
                    .model = subject->model,
                    .segments = segments,
                    .geometry = subject->geometry,
                    .options = options,
                    .fit = options->fit,
                    .ranks = qc_tp_ranks(&options->fit)};
    memset(out, 0, sizeof *out);
    out->measured = subject->has_weights;
    if (c.fit.vram.count == 0 && !qc_auto_by_bits(&c))
        QC_FAIL(err, QC_ERR_USAGE,
                "--to auto needs --vram, which names the devices that the model has to fit, or "
                "--bits");
    out->rows = qc_candidates_of(&options->recipe);
    QC_TRY(qc_candidates_parse(&options->recipe, &c.candidates, err));
    c.fit.vram.count = c.fit.vram.gpu_count ? c.fit.vram.gpu_count : c.fit.vram.count > 0 ? 1 : 0;
    QC_TRY(leave_out_int8(&c, err));
    QC_TRY(leave_out_coded(&c, err));
    out->candidates = c.candidates;
    qc_arena_init(&scratch);
    qc_status st = choose_schemes(&c, subject, err);
    qc_arena_deinit(&scratch);
    return st;
}
