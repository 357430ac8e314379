/* Finds the longest context and the largest batch by bisection. That works because whatever fits
 * for some context and batch fits for less of either: cache and scratch never shrink when they
 * grow, and neither does the list of what is spilled (convert/fit/fit.c). */
#include "convert/fit/fit.h"

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
    qc_status st =
        qc_fit_make(&fit, &arena, s->fit->segments, s->fit->geometry, s->fit->segment_bytes,
                    s->largest_weight, s->fit->budget, &s->options, err);
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
