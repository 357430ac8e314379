#include "convert/eval/eval_states.h"

#include "base/alloc.h"
#include "convert/eval/eval_stats.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

qc_status qc_eval_states_init(qc_eval_states *s, uint64_t room, uint64_t wide, qc_error *err)
{
    memset(s, 0, sizeof *s);
    s->room = room;
    s->wide = wide;
    QC_TRY(qc_realloc_array(&s->distances, room, sizeof *s->distances, err));
    QC_TRY(qc_realloc_array(&s->cosines, room, sizeof *s->cosines, err));
    QC_TRY(qc_realloc_array(&s->means, 2 * wide, sizeof *s->means, err));
    return QC_OK;
}

void qc_eval_states_deinit(qc_eval_states *s)
{
    qc_free(s->distances);
    qc_free(s->cosines);
    qc_free(s->means);
    memset(s, 0, sizeof *s);
}

/* One minus the cosine of a and b, which is half the squared distance of the two at length 1: so
 * vectors that are nearly alike lose no digits. */
static double cosine_distance(const double *a, const double *b, uint64_t n)
{
    double aa = 0.0, bb = 0.0, apart = 0.0;
    for (uint64_t i = 0; i < n; i++) {
        aa += a[i] * a[i];
        bb += b[i] * b[i];
    }
    for (uint64_t i = 0; i < n; i++) {
        const double d = a[i] / sqrt(aa) - b[i] / sqrt(bb);
        apart += d * d;
    }
    return apart / 2.0;
}

qc_status qc_eval_states_add(qc_eval_states *s, const float *output, const float *original,
                             uint64_t tokens, qc_error *err)
{
    double apart = 0.0, whole = 0.0, *a = s->means, *b = s->means + s->wide;
    memset(s->means, 0, (size_t)(2 * s->wide) * sizeof *s->means);
    for (uint64_t t = 0; t < tokens; t++)
        for (uint64_t i = 0; i < s->wide; i++) {
            const double x = (double)*output++, y = (double)*original++;
            apart += (x - y) * (x - y);
            whole += y * y;
            a[i] += x / (double)tokens;
            b[i] += y / (double)tokens;
        }
    const double distance = sqrt(apart / whole), cosine = cosine_distance(a, b, s->wide);
    if (!isfinite(distance) || !isfinite(cosine))
        QC_FAIL(err, QC_ERR_NONFINITE,
                "the hidden states of a window are not finite, or the original's are 0");
    s->distance_sum += distance;
    s->cosine_sum += cosine;
    s->distances[s->count] = (float)distance;
    s->cosines[s->count] = (float)cosine;
    s->count++;
    return QC_OK;
}

void qc_eval_states_finish(qc_eval_states *s, qc_eval_result *out)
{
    const double n = (double)s->count;
    out->encoder = out->compared = 1;
    if (s->count == 0)
        return;
    qc_eval_sort(s->distances, s->count);
    qc_eval_sort(s->cosines, s->count);
    out->distance_mean = s->distance_sum / n;
    out->distance_99 = qc_eval_quantile(s->distances, s->count, 0.99);
    out->distance_max = (double)s->distances[s->count - 1];
    out->cosine_mean = s->cosine_sum / n;
    out->cosine_99 = qc_eval_quantile(s->cosines, s->count, 0.99);
    out->cosine_max = (double)s->cosines[s->count - 1];
}
