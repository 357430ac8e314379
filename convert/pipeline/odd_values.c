#include "convert/pipeline/odd_values.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define LOOK_BYTES  ((size_t)64 << 10)
#define FIRST_BYTES ((size_t)256)

/* ---- while a unit is made ---- */

/* These add the bits of all values, but for their signs, to *any, and return whether one has all
 * bits of the exponent, as infinities and NaN have. The loops have no branch, so that the compiler
 * makes vectors of them. */
static int look_16(const uint16_t *v, size_t n, uint16_t exponent, unsigned *any)
{
    uint16_t bits = 0, odd = 0;
    for (size_t i = 0; i < n; i++) {
        bits |= v[i];
        odd |= (uint16_t)((v[i] & exponent) == exponent);
    }
    *any |= bits & 0x7fffu;
    return odd != 0;
}

static int look_32(const uint32_t *v, size_t n, unsigned *any)
{
    const uint32_t exponent = 0x7f800000;
    uint32_t bits = 0, odd = 0;
    for (size_t i = 0; i < n; i++) {
        bits |= v[i];
        odd |= (uint32_t)((v[i] & exponent) == exponent);
    }
    *any |= bits & 0x7fffffffu;
    return odd != 0;
}

static int look(const void *bytes, size_t len, qc_dtype dtype, unsigned *any)
{
    if (dtype == QC_DTYPE_BF16 || dtype == QC_DTYPE_F16)
        return look_16(bytes, len / 2, dtype == QC_DTYPE_F16 ? 0x7c00 : 0x7f80, any);
    if (dtype == QC_DTYPE_F32)
        return look_32(bytes, len / 4, any);
    for (size_t i = 0; i < len && *any == 0; i++)
        *any |= ((const unsigned char *)bytes)[i];
    return 0;
}

int qc_odd_values_are_zero(const void *bytes, uint64_t len, qc_dtype dtype)
{
    const unsigned char *b = bytes;
    unsigned any = 0;
    for (uint64_t at = 0; at < len && any == 0; at += FIRST_BYTES)
        (void)look(b + at, (size_t)qc_min_u64(len - at, FIRST_BYTES), dtype, &any);
    return any == 0;
}

/* Notes the element of a job that is not finite, if none before it is known. */
static void note_not_finite(qc_pipeline *p, qc_job_state *s, uint64_t element)
{
    pthread_mutex_lock(&p->finish_lock);
    if (!s->not_finite || element < s->first_not_finite)
        s->first_not_finite = element;
    s->not_finite = 1;
    pthread_mutex_unlock(&p->finish_lock);
}

qc_digest qc_odd_values_digest(qc_worker *w, qc_unit *u)
{
    const qc_job *j = w->job;
    const int plain = j->scheme == QC_SCHEME_KEEP || j->scheme == QC_SCHEME_ABSORBED;
    const qc_dtype dtype =
        plain ? w->p->plan->model->tensors[j->source].dtype : j->entry->out_dtype;
    const size_t each = qc_dtype_bits(dtype) < 8 ? 1 : qc_dtype_bits(dtype) / 8;
    unsigned any = 0;
    int noted = 0;
    qc_digest_reset(w->hash);
    for (size_t at = 0; at < u->content_bytes; at += LOOK_BYTES) {
        const unsigned char *bytes = w->content + at;
        size_t n = (size_t)qc_min_u64(u->content_bytes - at, LOOK_BYTES);
        qc_digest_update(w->hash, bytes, n);
        if (!look(bytes, n, dtype, &any) || noted)
            continue;
        noted = 1;
        while (n > each && !look(bytes, each, dtype, &any)) {
            bytes += each;
            n -= each;
        }
        note_not_finite(w->p, w->state, (u->content_offset + (size_t)(bytes - w->content)) / each);
    }
    u->zeros = any == 0 && !u->lost;
    return qc_digest_finish(w->hash);
}

/* ---- when all are made ---- */

/* Other tensors may be masks, whose infinities belong there. */
static int is_weight(const qc_job *j)
{
    return j->entry->role != QC_ROLE_OTHER || qc_ends_with(j->name, ".weight") ||
           qc_ends_with(j->name, ".bias");
}

/* Did all that is not zero become zero? */
static int has_vanished(const qc_pipeline *p, uint32_t job)
{
    const qc_job *j = &p->plan->jobs[job];
    if (qc_scheme_is_quantized(j->scheme) && p->jobs[job].error.rel_mse == 1)
        return 1; /* the error is all that there was */
    const uint32_t first = p->first_unit[j->first_output];
    const uint32_t count = qc_unit_count(p, j->first_output);
    int any = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (!p->units[first + i].zeros && !p->units[first + i].lost)
            return 0;
        any |= p->units[first + i].lost;
    }
    return any;
}

/* Returns how many bytes of the source's tensor, counted from its end, are zeros as far as whole
 * units show it. */
static uint64_t zeros_at_end(const qc_pipeline *p, const qc_job *j)
{
    const uint32_t first = p->first_unit[j->first_output];
    const uint32_t count = qc_unit_count(p, j->first_output);
    uint32_t left = count;
    while (left > 0 && p->units[first + left - 1].zeros)
        left--;
    if (count == 0 || left == 0)
        return count ? j->source_bytes : 0;
    if (left == count || j->entry->transpose || j->shares_source)
        return 0;
    const double whole = (double)(p->units[first + count - 1].content_offset +
                                  p->units[first + count - 1].content_bytes);
    return (uint64_t)((1 - (double)p->units[first + left].content_offset / whole) *
                      (double)j->source_bytes);
}

/* The end of a file, from its last tensor on. */
typedef struct {
    const qc_checkpoint_tensor *t;
    uint64_t zeros;
} file_part;

static int from_the_end(const void *pa, const void *pb)
{
    const qc_checkpoint_tensor *a = ((const file_part *)pa)->t, *b = ((const file_part *)pb)->t;
    if (a->file != b->file)
        return a->file < b->file ? -1 : 1;
    return (a->begin < b->begin) - (a->begin > b->begin);
}

/* Counts the files that end in zeros, and warns of the first. */
static qc_status tell_zeros(const qc_pipeline *p, uint64_t *files, qc_error *err)
{
    const qc_plan *plan = p->plan;
    const qc_checkpoint *m = plan->model;
    file_part *parts = NULL;
    size_t n = 0;
    QC_TRY(qc_calloc(&parts, plan->job_count, sizeof *parts, err));
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_checkpoint_tensor *t = &m->tensors[plan->jobs[i].source];
        if (!t->change && t->bytes > 0)
            parts[n++] = (file_part){t, zeros_at_end(p, &plan->jobs[i])};
    }
    if (n > 0)
        qsort(parts, n, sizeof *parts, from_the_end);
    for (size_t i = 0, next; i < n; i = next) {
        const qc_checkpoint_file *f = &m->files[parts[i].t->file];
        char bytes[QC_SIZE_TEXT_BYTES];
        uint64_t zeros = 0;
        int open = 1;
        for (next = i; next < n && parts[next].t->file == parts[i].t->file; next++) {
            zeros += open ? parts[next].zeros : 0;
            open &= parts[next].zeros == parts[next].t->bytes;
        }
        if (zeros < f->tensor_bytes / 2 || zeros == 0)
            continue;
        if ((*files)++ == 0)
            qc_console_warn(plan->call,
                            "the last %s of '%s' are zeros, as a download leaves them that stopped "
                            "early; download the file again",
                            qc_text_bytes(bytes, zeros), f->name);
    }
    qc_free(parts);
    return QC_OK;
}

qc_status qc_odd_values_tell(qc_odd_values *out, const qc_pipeline *p, qc_error *err)
{
    const qc_plan *plan = p->plan;
    const qc_job *odd = NULL, *gone = NULL;
    memset(out, 0, sizeof *out);
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_job *j = &plan->jobs[i];
        if (p->jobs[i].not_finite && is_weight(j)) {
            odd = odd ? odd : j;
            out->not_finite++;
        }
        if (has_vanished(p, i)) {
            gone = gone ? gone : j;
            out->vanished++;
        }
    }
    if (odd)
        qc_console_warn(plan->call,
                        "%" PRIu64 " tensor%s that %s not quantized %s values that are not finite, "
                        "and keep%s them: the first is element %" PRIu64 " of '%s'",
                        out->not_finite, qc_plural(out->not_finite), qc_are(out->not_finite),
                        out->not_finite == 1 ? "has" : "have", out->not_finite == 1 ? "s" : "",
                        p->jobs[odd - plan->jobs].first_not_finite, odd->name);
    if (gone)
        qc_console_warn(plan->call,
                        "nothing is left of %" PRIu64 " weight%s, whose values are too small for "
                        "%s: the first is '%s'; --keep '%s' leaves it as it is",
                        out->vanished, qc_plural(out->vanished),
                        gone->scheme == QC_SCHEME_CAST ? qc_dtype_name(gone->entry->out_dtype)
                                                       : qc_scheme_name(gone->scheme),
                        gone->name, qc_text_word_or(gone->name, "NAME"));
    return tell_zeros(p, &out->half_zero, err);
}
