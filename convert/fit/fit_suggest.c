#include "convert/fit/fit_suggest.h"

#include "base/checked.h"
#include "base/text.h"
#include "convert/term/glob.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <string.h>

enum {
    MAX_SUGGESTIONS = 16,
    MAX_CHOICES = 5,
    MAX_COMBINED = 2, /* several free changes at once, where none alone is enough */
    MIN_CONTEXT = 256,
    MAX_MARGIN_PERCENT = 99
};
/* This is more than any host has, but so little that sums with it do not overflow. */
#define AMPLE_BYTES (UINT64_C(1) << 50)
#define GB          UINT64_C(1000000000)

typedef struct {
    qc_arena *arena; /* owns the texts */
    qc_arena scratch;
    const qc_plan_subject *subject;
    const qc_planned_model *planned;
    const qc_plan_options *options;
    qc_suggestion *list;
    uint32_t count;
} seeker;

/* ---- trials ---- */

/* Fits the same weights with another use or on other devices. fit is in scratch memory, and valid
 * until the next call. */
static qc_status try_fit(seeker *s, qc_fit *fit, const qc_fit_options *use, qc_error *err)
{
    const qc_planned_model *p = s->planned;
    const qc_fit_load load = {&p->segments, &p->geometry, p->segment_bytes, p->largest_weight};
    QC_TRY(qc_fit_make(fit, &s->scratch, &load, use, err));
    fit->weight_bytes = p->fit.weight_bytes;
    return QC_OK;
}

/* Frees what a try before took: a plan can take hundreds of megabytes. */
static void forget_try(seeker *s)
{
    qc_arena_deinit(&s->scratch);
    qc_arena_init(&s->scratch);
}

/* Plans the model anew. If the checkpoint cannot become what o says, *made is 0: the plan that was
 * asked for has not failed by that. */
static qc_status try_plan(qc_planned_model *out, int *made, qc_arena *arena,
                          const qc_plan_subject *subject, const qc_plan_options *o, qc_error *err)
{
    qc_error trouble = {0};
    const qc_status st = qc_planned_model_make(out, arena, subject, o, &trouble);
    *made = st == QC_OK;
    if (st == QC_OK || qc_status_is_refusal(st))
        return QC_OK;
    return qc_error_pass(err, &trouble, st);
}

/* The bytes that the planned weights take at least, of one rank if there are several. Layers that
 * predict further tokens may be left out. */
static uint64_t weight_bytes_of(const qc_planned_model *p)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < p->segments.count; i++)
        if (p->segments.segments[i].kind != QC_SEGMENT_EXTRA)
            bytes = qc_sat_add(bytes, p->segment_bytes[i]);
    return bytes;
}

/* Returns the budgets of all devices together. Of ranks each has a device alone. */
static uint64_t room_of(const seeker *s)
{
    const qc_fit *fit = &s->planned->fit;
    uint64_t room = 0;
    for (uint32_t i = 0; i < fit->budget->count; i++)
        room = fit->ranks > 0 ? qc_max_u64(room, fit->devices[i].budget_bytes)
                              : qc_sat_add(room, fit->devices[i].budget_bytes);
    return room;
}

/* Would it be too large even if all weights had the fewest bits of any scheme? Trying that takes as
 * long as the plan itself, which is seconds for 300,000 experts. */
static int is_hopeless(const seeker *s)
{
    const qc_plan *plan = &s->planned->plan;
    unsigned most = 16, fewest = 16;
    for (uint32_t i = 0; i < plan->job_count; i++)
        if (qc_dtype_bits(plan->jobs[i].dtype) > most)
            most = qc_dtype_bits(plan->jobs[i].dtype);
    for (unsigned i = 0; i < QC_SCHEME_COUNT; i++)
        if (qc_schemes[i].bits && qc_schemes[i].bits < fewest)
            fewest = qc_schemes[i].bits;
    return weight_bytes_of(s->planned) / most * fewest > room_of(s);
}

static qc_status add_suggestion(seeker *s, const qc_fit *fit, const char *change,
                                const char *detail, qc_error *err)
{
    char weights[QC_SIZE_TEXT_BYTES], left[QC_SIZE_TEXT_BYTES];
    if (!fit->fits || s->count == MAX_SUGGESTIONS)
        QC_FAIL(err, QC_ERR_INTERNAL, "the suggestion '%s' does not fit", change);
    uint64_t least_free = UINT64_MAX;
    for (uint32_t i = 0; i < fit->budget->count; i++)
        if (fit->devices[i].segments && fit->devices[i].free_bytes < least_free)
            least_free = fit->devices[i].free_bytes;
    qc_suggestion *g = &s->list[s->count++];
    g->change = change;
    /* A plan that does not fit has the smallest choice everywhere. With more room there will be
     * another choice. */
    if (s->options->recipe.to == QC_TO_AUTO)
        return qc_arena_printf(
            s->arena, &g->sentence, err,
            "with %s%s: %s of weights at least, and the fullest device keeps %s for better schemes",
            change, detail, qc_text_bytes(weights, fit->weight_bytes),
            qc_text_bytes(left, least_free));
    return qc_arena_printf(s->arena, &g->sentence, err,
                           "with %s%s: %s of weights, and the fullest device keeps %s free", change,
                           detail, qc_text_bytes(weights, fit->weight_bytes),
                           qc_text_bytes(left, least_free));
}

/* ---- kinds of changes ---- */

/* Returns the scheme for all with the fewest bits, in the format of the options. */
static qc_to smallest_of(const qc_recipe_options *o)
{
    return o->format == QC_FORMAT_BITSANDBYTES ? QC_TO_NF4 : QC_TO_INT4;
}

/* The recipe of a suggestion: vLLM splits only what is in compressed-tensors' form. */
static qc_recipe_options recipe_of(const seeker *s)
{
    qc_recipe_options r = s->options->recipe;
    if (s->planned->fit.ranks > 0)
        r.format = QC_FORMAT_COMPRESSED_TENSORS;
    return r;
}

static qc_status other_precision(seeker *s, qc_error *err)
{
    const qc_recipe_options offered = recipe_of(s);
    const qc_to small = smallest_of(&offered);
    const qc_to ladder[] = {QC_TO_KEEP, QC_TO_INT8, small, QC_TO_AUTO};
    /* Whether some choice fits does not depend on the errors, because NF4 everywhere is one
     * choice. */
    qc_plan_subject unread = *s->subject;
    unread.has_weights = 0;
    const qc_plan_options *o = s->options;
    if (o->recipe.to == small || o->recipe.to == QC_TO_AUTO ||
        s->planned->recipe.input_is_quantized || is_hopeless(s))
        return QC_OK;
    for (size_t i = o->recipe.to == QC_TO_INT8 ? 2 : 0; i < sizeof ladder / sizeof *ladder; i++) {
        if (ladder[i] == QC_TO_KEEP &&
            (!s->planned->recipe.input_is_coded || o->recipe.to == QC_TO_KEEP))
            continue;
        if (ladder[i] == small && s->count > 0)
            continue; /* int8 fits already, and is more precise */
        qc_plan_options trial = *o;
        qc_planned_model planned;
        int made = 0;
        const char *change = NULL;
        trial.recipe = ladder[i] == QC_TO_KEEP ? o->recipe : offered;
        trial.recipe.to = ladder[i];
        if (ladder[i] == QC_TO_INT8) {
            if (qc_budget_card_without_int8(&o->fit.vram))
                continue;
            trial.recipe.block_elems = 0;
        }
        if (ladder[i] == QC_TO_AUTO)
            trial.recipe.block_elems = 0;
        forget_try(s);
        QC_TRY(try_plan(&planned, &made, &s->scratch, &unread, &trial, err));
        if (!made || !planned.fit.fits)
            continue;
        const int given = offered.format == o->recipe.format || ladder[i] == QC_TO_INT4 ||
                          ladder[i] == QC_TO_KEEP;
        QC_TRY(qc_arena_printf(s->arena, &change, err, "--to %s%s", qc_to_name(ladder[i]),
                               given ? "" : " --format compressed-tensors"));
        QC_TRY(add_suggestion(s, &planned.fit, change, "", err));
        if (ladder[i] == QC_TO_KEEP)
            return QC_OK; /* what was released quantized is best as it is */
    }
    return QC_OK;
}

/* Finds the largest value of *varied, a member of *use, with which it fits. What is needed grows
 * with it, so every value below one that fits does too. */
static qc_status less_of(seeker *s, qc_fit_options *use, uint64_t *varied, uint64_t least,
                         const char *option, qc_error *err)
{
    const char *change = NULL;
    qc_fit fit;
    uint64_t good = 0, bad = *varied;
    while (bad - good > 1) {
        *varied = good + (bad - good) / 2;
        QC_TRY(try_fit(s, &fit, use, err));
        *(fit.fits ? &good : &bad) = *varied;
    }
    if (good < least)
        return QC_OK;
    *varied = good;
    QC_TRY(try_fit(s, &fit, use, err));
    QC_TRY(qc_arena_printf(s->arena, &change, err, "%s %" PRIu64, option, good));
    return add_suggestion(s, &fit, change, "", err);
}

static qc_status shorter_context(seeker *s, qc_error *err)
{
    qc_fit_options use = s->options->fit;
    return s->subject->geometry->decoder
               ? less_of(s, &use, &use.context, MIN_CONTEXT, "--context", err)
               : QC_OK;
}

static qc_status smaller_batch(seeker *s, qc_error *err)
{
    qc_fit_options use = s->options->fit;
    return less_of(s, &use, &use.batch, 1, "--batch", err);
}

/* ---- what costs no card and no token ---- */

/* In the order in which they are offered. */
enum { IN_STEPS, WITHOUT_MTP, SMALL_HEAD, SMALL_CACHE, FREE_CHANGES };

static int is_kept_by_rule(const qc_recipe_options *r, const char *name)
{
    int kept = 0;
    for (uint32_t i = 0; i < r->rule_count; i++)
        if (qc_glob_match(r->rules[i].glob, name))
            kept = !r->rules[i].quantize;
    return kept;
}

/* Finds an output head in 16 bits that from_pretrained loads quantized, which vLLM does not. */
static const char *find_head(const seeker *s)
{
    const qc_planned_model *p = s->planned;
    const qc_recipe_options *r = &s->options->recipe;
    if (p->fit.ranks > 0 || r->to == QC_TO_AUTO || !qc_to_quantizes(r->to))
        return NULL;
    for (uint32_t i = 0; i < p->plan.job_count; i++) {
        const qc_job *j = &p->plan.jobs[i];
        if (j->entry->role == QC_ROLE_HEAD && j->scheme == QC_SCHEME_KEEP && j->ndim == 2 &&
            !strpbrk(j->name, "*?[\\") && !is_kept_by_rule(r, j->name))
            return j->name;
    }
    return NULL;
}

static int has_mtp(const qc_planned_model *p)
{
    for (uint32_t i = 0; i < p->segments.count; i++)
        if (p->segments.segments[i].kind == QC_SEGMENT_EXTRA)
            return 1;
    return 0;
}

/* Plans with the changes whose bits are set. *fit is in scratch memory, and valid until the next
 * call. */
static qc_status try_free(seeker *s, qc_fit *fit, unsigned set, const char *head, qc_error *err)
{
    qc_plan_options *trial = NULL;
    qc_planned_model *planned = NULL;
    qc_plan_subject unread = *s->subject;
    int made = 0;
    unread.has_weights = 0;
    qc_arena_deinit(&s->scratch); /* one plan at a time */
    qc_arena_init(&s->scratch);
    QC_TRY(qc_arena_array(&s->scratch, &trial, 1, err));
    *trial = *s->options;
    if (set >> IN_STEPS & 1)
        trial->fit.prefill = QC_USUAL_PREFILL;
    if (set >> SMALL_CACHE & 1)
        trial->fit.kv_bits = 8;
    if (!(set & (1u << WITHOUT_MTP | 1u << SMALL_HEAD)))
        return try_fit(s, fit, &trial->fit, err);
    qc_recipe_options *r = &trial->recipe;
    if (set >> WITHOUT_MTP & 1)
        r->drop_mtp = 1;
    if (set >> SMALL_HEAD & 1) {
        qc_rule *rules = NULL;
        QC_TRY(qc_arena_array(&s->scratch, &rules, (size_t)r->rule_count + 1, err));
        for (uint32_t i = 0; i < r->rule_count; i++)
            rules[i] = r->rules[i];
        rules[r->rule_count++] = (qc_rule){1, head};
        r->rules = rules;
    }
    QC_TRY(qc_arena_array(&s->scratch, &planned, 1, err));
    QC_TRY(try_plan(planned, &made, &s->scratch, &unread, trial, err));
    *fit = planned->fit;
    fit->fits &= made;
    return QC_OK;
}

static qc_status offer_free(seeker *s, const qc_fit *fit, unsigned set, const char *head,
                            qc_error *err)
{
    const char *const words[] = {[WITHOUT_MTP] = "--drop-mtp", [SMALL_CACHE] = "--kv-dtype fp8"};
    const char *change = "";
    for (int i = 0; i < FREE_CHANGES; i++) {
        if (!(set >> i & 1))
            continue;
        const char *before = change, *space = *change ? " " : "";
        if (i == IN_STEPS)
            QC_TRY(qc_arena_printf(s->arena, &change, err, "%s%s--prefill %u", before, space,
                                   QC_USUAL_PREFILL));
        else if (i == SMALL_HEAD)
            QC_TRY(
                qc_arena_printf(s->arena, &change, err, "%s%s--quantize %s", before, space, head));
        else
            QC_TRY(qc_arena_printf(s->arena, &change, err, "%s%s%s", before, space, words[i]));
    }
    return add_suggestion(
        s, fit, change,
        set >> IN_STEPS & 1 ? " (prompts are read in steps: vLLM's --max-num-batched-tokens)" : "",
        err);
}

/* Offers each change that is enough by itself; if there is none, the smallest sets that are. */
static qc_status free_changes(seeker *s, qc_error *err)
{
    const qc_fit_options *use = &s->options->fit;
    const int cached = s->subject->geometry->decoder;
    const char *head = find_head(s);
    unsigned possible = 0;
    qc_fit fit;
    if (use->prefill == 0 && cached && use->context > QC_USUAL_PREFILL)
        possible |= 1u << IN_STEPS;
    if (!s->options->recipe.drop_mtp && has_mtp(s->planned))
        possible |= 1u << WITHOUT_MTP;
    if (head)
        possible |= 1u << SMALL_HEAD;
    if (cached && use->kv_bits > 8)
        possible |= 1u << SMALL_CACHE;
    /* A head that is dequantized takes workspace, so all of them together are not always best. */
    int hope = 0;
    for (int with_head = 0; with_head < 2 && !hope; with_head++) {
        const unsigned all = with_head ? possible : possible & ~(1u << SMALL_HEAD);
        QC_TRY(try_free(s, &fit, all, head, err));
        hope = fit.fits;
    }
    for (int size = 1, found = 0; hope && !found && size <= FREE_CHANGES; size++)
        for (unsigned set = 1; set < 1u << FREE_CHANGES; set++) {
            if (set & ~possible || __builtin_popcount(set) != size ||
                (size > 1 && found == MAX_COMBINED))
                continue;
            QC_TRY(try_free(s, &fit, set, head, err));
            if (!fit.fits)
                continue;
            QC_TRY(offer_free(s, &fit, set, head, err));
            found++;
        }
    return QC_OK;
}

/* ---- other changes ---- */

/* Tries a larger share of each device, in hundredths, but never all of it. */
static qc_status larger_margin(seeker *s, qc_error *err)
{
    const char *change = NULL, *detail = NULL;
    qc_fit_options use = s->options->fit;
    qc_fit fit;
    unsigned bad = (unsigned)(use.margin * 100.0), good = MAX_MARGIN_PERCENT;
    double given = use.margin;
    if (bad >= good)
        return QC_OK;
    use.margin = good / 100.0;
    QC_TRY(try_fit(s, &fit, &use, err));
    if (!fit.fits)
        return QC_OK;
    while (good - bad > 1) {
        unsigned middle = bad + (good - bad) / 2;
        use.margin = middle / 100.0;
        QC_TRY(try_fit(s, &fit, &use, err));
        *(fit.fits ? &good : &bad) = middle;
    }
    use.margin = good / 100.0;
    QC_TRY(try_fit(s, &fit, &use, err));
    QC_TRY(qc_arena_printf(s->arena, &change, err, "--margin %.2f", use.margin));
    QC_TRY(qc_arena_printf(
        s->arena, &detail, err,
        " (this leaves %u%% of each device for what is not counted, instead of %.3g%%)", 100 - good,
        100.0 - 100.0 * given));
    return add_suggestion(s, &fit, change, detail, err);
}

/* Makes a budget of the GPUs that were given, `more` copies of the one numbered `like`, and a cpu
 * of cpu_bytes (0: as it was); then what else there was. */
static qc_status widen(seeker *s, qc_budget *out, uint32_t more, uint32_t like, uint64_t cpu_bytes,
                       qc_error *err)
{
    const qc_budget *b = &s->options->fit.vram;
    qc_device *d = NULL;
    QC_TRY(qc_arena_array(&s->scratch, &d, (size_t)b->count + more + 1, err));
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->gpu_count; i++)
        d[n++] = b->devices[i];
    for (uint32_t i = 0; i < more; i++, n++) {
        d[n] = b->devices[like];
        QC_TRY(qc_arena_printf(&s->scratch, &d[n].name, err, "cuda:%" PRIu32, n));
    }
    uint32_t gpus = n;
    if (cpu_bytes)
        d[n++] = (qc_device){"cpu", QC_TIER_CPU, NULL, cpu_bytes};
    for (uint32_t i = b->gpu_count; i < b->count; i++)
        if (!cpu_bytes || b->devices[i].tier != QC_TIER_CPU)
            d[n++] = b->devices[i];
    *out = (qc_budget){b->text, d, n, gpus};
    return QC_OK;
}

/* Finds how much memory of the host it takes, in whole GB: what an ample tier would be given. */
static qc_status host_memory(seeker *s, qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES], seconds[QC_SIZE_TEXT_BYTES];
    const char *change = NULL, *detail = "";
    qc_fit_options use = s->options->fit;
    qc_fit fit;
    if (s->planned->fit.ranks > 0)
        return QC_OK;
    QC_TRY(widen(s, &use.vram, 0, 0, AMPLE_BYTES, err));
    QC_TRY(try_fit(s, &fit, &use, err));
    if (!fit.fits)
        return QC_OK;
    const qc_fit_device *cpu = &fit.devices[use.vram.gpu_count]; /* behind the GPUs */
    double needed = (double)(cpu->budget_bytes - cpu->free_bytes) / use.margin;
    uint64_t gigabytes = (uint64_t)(needed / (double)GB) + 1;
    QC_TRY(widen(s, &use.vram, 0, 0, gigabytes * GB, err));
    QC_TRY(try_fit(s, &fit, &use, err));
    if (!fit.fits)
        return QC_OK;
    QC_TRY(qc_fit_count_experts(&fit, &s->planned->plan, err));
    QC_TRY(qc_arena_printf(s->arena, &change, err, "%scpu:%" PRIu64 "GB",
                           use.vram.gpu_count == 0 ? "--vram " : "+", gigabytes));
    if (fit.transfer_bytes_per_token)
        QC_TRY(qc_arena_printf(s->arena, &detail, err,
                               " (%s cross the host link for every token, which takes at least %s)",
                               qc_text_bytes(size, fit.transfer_bytes_per_token),
                               qc_text_seconds(seconds, fit.transfer_seconds)));
    return add_suggestion(s, &fit, change, detail, err);
}

/* More room never hurts, so the count is found by bisection. */
static qc_status more_cards(seeker *s, qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES];
    const char *change = NULL, *detail = NULL;
    qc_fit_options use = s->options->fit;
    const qc_budget *b = &s->options->fit.vram;
    uint32_t like = 0, bad = 0, good = 0;
    int alike = 1;
    qc_fit fit;
    if (b->gpu_count == 0 || b->gpu_count >= QC_MAX_SUGGESTED_CARDS || s->planned->fit.ranks > 0)
        return QC_OK;
    for (uint32_t i = 1; i < b->gpu_count; i++) {
        alike &= b->devices[i].total_bytes == b->devices[0].total_bytes;
        if (b->devices[i].total_bytes > b->devices[like].total_bytes)
            like = i;
    }
    good = QC_MAX_SUGGESTED_CARDS - b->gpu_count;
    QC_TRY(widen(s, &use.vram, good, like, 0, err));
    QC_TRY(try_fit(s, &fit, &use, err));
    if (!fit.fits)
        return QC_OK;
    while (good - bad > 1) {
        uint32_t middle = bad + (good - bad) / 2;
        QC_TRY(widen(s, &use.vram, middle, like, 0, err));
        QC_TRY(try_fit(s, &fit, &use, err));
        *(fit.fits ? &good : &bad) = middle;
    }
    QC_TRY(widen(s, &use.vram, good, like, 0, err));
    QC_TRY(try_fit(s, &fit, &use, err));
    if (alike)
        QC_TRY(qc_arena_printf(s->arena, &change, err, "%" PRIu32 " cards", b->gpu_count + good));
    else
        QC_TRY(qc_arena_printf(s->arena, &change, err, "%" PRIu32 " more card%s", good,
                               qc_plural(good)));
    QC_TRY(qc_arena_printf(s->arena, &detail, err, " of %s",
                           qc_text_bytes(size, b->devices[like].total_bytes)));
    return add_suggestion(s, &fit, change, detail, err);
}

/* Splits the model over twice as many cards, and so on, until it fits. */
static qc_status more_ranks(seeker *s, qc_error *err)
{
    const char *change = NULL;
    qc_plan_options trial = *s->options;
    uint32_t ranks = s->planned->fit.ranks;
    for (uint32_t n = ranks * 2; ranks > 0 && n <= QC_MAX_SUGGESTED_CARDS; n *= 2) {
        qc_planned_model planned;
        qc_error trouble = {0};
        if (weight_bytes_of(s->planned) / n * ranks > room_of(s))
            continue;
        trial.fit.tensor_parallel = n;
        forget_try(s);
        QC_TRY(widen(s, &trial.fit.vram, n - ranks, 0, 0, err));
        const qc_status st = qc_planned_model_replace(&planned, &s->scratch, s->planned, s->subject,
                                                      &trial, &trouble);
        if (qc_status_is_refusal(st))
            return QC_OK;
        QC_TRY(qc_error_pass(err, &trouble, st));
        if (!planned.fit.fits)
            continue;
        QC_TRY(qc_arena_printf(s->arena, &change, err, "--tp %" PRIu32 " on as many cards", n));
        return add_suggestion(s, &planned.fit, change, "", err);
    }
    return QC_OK;
}

typedef qc_status (*kind)(seeker *s, qc_error *err);

static qc_status try_kinds(seeker *s, const kind *kinds, size_t count, qc_error *err)
{
    for (size_t i = 0; i < count; i++) {
        qc_arena_init(&s->scratch);
        qc_status st = kinds[i](s, err);
        qc_arena_deinit(&s->scratch);
        QC_TRY(st);
    }
    return QC_OK;
}

static const kind changes[] = {free_changes, other_precision, shorter_context, smaller_batch,
                               host_memory,  more_cards,      more_ranks,      larger_margin};

/* Where no change alone is enough, this tries NF4 and one more change. */
static qc_status nf4_and_more(seeker *s, qc_arena *kept, qc_error *err)
{
    const qc_plan_options *o = s->options;
    qc_plan_options trial = *o;
    qc_planned_model planned;
    seeker inner = *s;
    trial.recipe = recipe_of(s);
    trial.recipe.to = smallest_of(&trial.recipe);
    if (s->count || o->recipe.to == trial.recipe.to || o->recipe.to == QC_TO_AUTO ||
        s->planned->recipe.input_is_quantized)
        return QC_OK;
    int made = 0;
    QC_TRY(try_plan(&planned, &made, kept, s->subject, &trial, err));
    if (!made)
        return QC_OK;
    inner.planned = &planned;
    inner.options = &trial;
    QC_TRY(try_kinds(&inner, changes, sizeof changes / sizeof *changes, err));
    for (s->count = 0; s->count < inner.count; s->count++) {
        qc_suggestion *g = &s->list[s->count];
        QC_TRY(qc_arena_printf(s->arena, &g->change, err, "--to %s and %s",
                               qc_to_name(trial.recipe.to), g->change));
        QC_TRY(qc_arena_printf(s->arena, &g->sentence, err, "with --to %s and %s",
                               qc_to_name(trial.recipe.to), g->sentence + strlen("with ")));
    }
    return QC_OK;
}

qc_status qc_fit_suggest(qc_fit_report *report, qc_arena *arena, const qc_plan_subject *subject,
                         const qc_planned_model *planned, const qc_plan_options *options,
                         qc_error *err)
{
    qc_arena kept;
    seeker s = {.arena = arena, .subject = subject, .planned = planned, .options = options};
    QC_TRY(qc_arena_array(arena, &s.list, MAX_SUGGESTIONS, err));
    QC_TRY(try_kinds(&s, changes, sizeof changes / sizeof *changes, err));
    qc_arena_init(&kept);
    qc_status st = nf4_and_more(&s, &kept, err);
    qc_arena_deinit(&kept);
    QC_TRY(st);
    report->suggestions = s.list;
    report->suggestion_count = s.count;
    return QC_OK;
}

/* ---- what --to auto gave the room to ---- */

typedef struct {
    qc_fit_report *report;
    qc_plan_subject subject;
    qc_fit_choice *list;
    uint32_t count;
} comparer;

/* Adds what the options lead to, unless that does not fit or the options do not go with this
 * model. */
static qc_status add_choice(comparer *c, const qc_plan_options *o, const char *change,
                            qc_error *err)
{
    qc_arena scratch;
    qc_planned_model planned;
    int made = 0;
    qc_fit_choice *row = &c->list[c->count];
    qc_arena_init(&scratch);
    qc_status st = try_plan(&planned, &made, &scratch, &c->subject, o, err);
    if (made && planned.fit.fits) {
        *row = (qc_fit_choice){
            .change = change,
            .predicted = o->recipe.to == QC_TO_AUTO
                             ? planned.chosen.predicted
                             : c->report->chosen->uniform[qc_auto_smallest(c->report->chosen)]};
        st = qc_fit_max_context(&row->max_context, &planned.fit, &o->fit, planned.largest_weight,
                                err);
        if (st == QC_OK && planned.plan.own_form)
            st = qc_arena_strndup(c->report->arena, &row->own_form, planned.plan.own_form,
                                  strlen(planned.plan.own_form), err);
        c->count += st == QC_OK;
    }
    qc_arena_deinit(&scratch);
    return st;
}

qc_status qc_fit_compare(qc_fit_report *report, qc_arena *arena, const qc_plan_subject *subject,
                         const qc_planned_model *planned, const qc_plan_options *options,
                         qc_error *err)
{
    const char *change = NULL, *schemes = "";
    comparer c = {.report = report, .subject = *subject, .count = 1};
    QC_TRY(qc_arena_array(arena, &c.list, MAX_CHOICES, err));
    c.subject.measured = &planned->chosen;
    c.list[0] = (qc_fit_choice){.change = "this plan",
                                .predicted = planned->chosen.predicted,
                                .max_context = report->max_context,
                                .own_form = planned->plan.own_form};
    qc_plan_options trial = *options;
    trial.recipe.to = smallest_of(&options->recipe);
    QC_TRY(qc_arena_printf(arena, &change, err, "--to %s", qc_to_name(trial.recipe.to)));
    QC_TRY(add_choice(&c, &trial, change, err));
    uint64_t most = c.count > 1 ? c.list[1].max_context : 0;
    trial.recipe.to = QC_TO_AUTO;
    /* Tries up to two contexts between the longest of the plan and of NF4. */
    for (int i = 1; i <= 2 && options->fit.context <= most >> i; i++) {
        trial.fit.context = options->fit.context << i;
        if (trial.fit.context <= report->max_context)
            continue;
        QC_TRY(qc_arena_printf(arena, &change, err, "--context %" PRIu64, trial.fit.context));
        QC_TRY(add_choice(&c, &trial, change, err));
    }
    trial.fit.context = options->fit.context;
    if (planned->chosen.mixed && !planned->chosen.mixed_fp8) {
        const qc_auto_result *chosen = &planned->chosen; /* its candidates without int8: */
        for (unsigned k = 0; k < QC_CANDIDATES; k++)
            if (!qc_schemes[chosen->rows[k].scheme].by_rows && chosen->candidates & 1u << k)
                QC_TRY(qc_arena_printf(arena, &schemes, err, "%s%s%s", schemes, *schemes ? "," : "",
                                       chosen->rows[k].name));
        trial.recipe.schemes = schemes;
        QC_TRY(qc_arena_printf(arena, &change, err, "--schemes %s", schemes));
        QC_TRY(add_choice(&c, &trial, change, err));
    }
    report->choices = c.list;
    /* If NF4 leaves no more room for context, nothing was traded. */
    report->choice_count = most > report->max_context || c.list[0].own_form ? c.count : 0;
    return QC_OK;
}
