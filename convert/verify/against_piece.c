/* Compares a piece of a tensor of OUT with the part of MODEL that it was made from. The piece is in
 * memory; the source is read in steps that stay in the L2 cache, and hashed and compared there. */
#include "convert/verify/against_internal.h"

#include "base/checked.h"
#include "base/workers.h"

#include <string.h>

#define HASH_BYTES ((uint64_t)512 << 10)

typedef struct {
    qc_against *a;
    qc_against_tensor *t;
    qc_against_scratch *s;
    uint32_t piece;
    uint64_t offset; /* of the piece in OUT's tensor */
    const unsigned char *bytes;
    size_t len;
    int hash; /* the digest is over what is read for the comparison */
} work;

static qc_status look_for_interrupt(qc_error *err)
{
    if (qc_interrupted())
        QC_FAIL(err, QC_ERR_INTERRUPTED, "interrupted");
    return QC_OK;
}

static void first_difference(const work *w, const unsigned char *want, uint64_t at, uint64_t n)
{
    uint64_t *where = &w->t->differs[w->piece];
    if (*where != UINT64_MAX || memcmp(w->bytes + at, want, (size_t)n) == 0)
        return;
    uint64_t i = 0;
    while (w->bytes[at + i] == want[i])
        i++;
    *where = w->offset + at + i;
}

/* Compares bytes with those of MODEL, whatever they stand for. */
static qc_status compare_bytes(work *w, qc_error *err)
{
    const qc_ckpt_tensor *from = &w->a->model->tensors[w->t->model_tensor];
    for (uint64_t at = 0; at < w->len; at += HASH_BYTES) {
        uint64_t n = w->len - at < HASH_BYTES ? w->len - at : HASH_BYTES;
        QC_TRY(look_for_interrupt(err));
        QC_TRY(qc_against_room(&w->s->raw, &w->s->raw_room, n, err));
        QC_TRY(qc_checkpoint_read(w->a->model, w->s->source, from, w->offset + at, w->s->raw,
                                  (size_t)n, err));
        if (w->hash)
            qc_digest_update(w->s->hash, w->s->raw, (size_t)n);
        first_difference(w, w->s->raw, at, n);
    }
    return QC_OK;
}

static qc_status compare_cast(work *w, qc_error *err)
{
    const qc_quant_ops *ops = w->a->options->ops;
    uint64_t each = qc_dtype_bits(w->t->row.dtype) / 8;
    uint64_t begin = w->offset / each, end = begin + w->len / each, step = qc_against_step(w->t);
    for (uint64_t first = begin; first < end; first += step) {
        uint64_t n = end - first < step ? end - first : step, overflow = 0;
        const void *source = NULL;
        QC_TRY(look_for_interrupt(err));
        QC_TRY(qc_against_read(w->a, w->s, w->t, first, n, w->hash, &source, err));
        QC_TRY(qc_against_room(&w->s->cast, &w->s->cast_room, n * each, err));
        ops->cast(source, qc_against_read_dtype(w->t), n, w->s->cast, w->t->row.dtype, &overflow);
        first_difference(w, w->s->cast, (first - begin) * each, n * each);
    }
    return QC_OK;
}

/* Checks n elements at source. skip is how many scales of the piece come before the first of
 * them. */
static qc_status check_step(const work *w, const void *source, uint64_t skip, uint64_t n,
                            const unsigned char *codes, qc_check_sums *sums, qc_error *err)
{
    const qc_against *a = w->a;
    const qc_against_tensor *t = w->t;
    qc_against_scratch *s = w->s;
    const qc_quant_ops *ops = a->options->ops;
    qc_dtype dtype = qc_against_read_dtype(t);
    const float *scales = (const float *)s->numbers + skip, *slack = (const float *)s->slack + skip;
    if (!t->coded && t->through != dtype) {
        uint64_t overflow = 0;
        QC_TRY(qc_against_room(&s->cast, &s->cast_room, n * (qc_dtype_bits(t->through) / 8), err));
        ops->cast(source, dtype, n, s->cast, t->through, &overflow);
        source = s->cast;
        dtype = t->through;
    }
    if (t->form.kind != QC_CHECK_INT8_ROWS) {
        qc_check_blocks(ops, &t->form, source, dtype, n, codes, scales, slack, s->check, sums);
        return QC_OK;
    }
    QC_TRY(qc_against_room(&s->codes, &s->codes_room, t->cols, err));
    qc_check_rows(ops, &t->form, source, dtype, n / t->cols, (const int8_t *)codes, scales,
                  s->codes, s->check, sums);
    return QC_OK;
}

/* Handles elements of a source in FP8 or MXFP4 that could not even be read, because they are not
 * finite. */
static qc_status take_nonfinite(const work *w, uint64_t at, qc_status st, qc_error *err)
{
    if (st != QC_ERR_NONFINITE)
        return st;
    qc_check_sums *sums = &w->t->sums[w->piece];
    if (sums->bad_source == UINT64_MAX)
        sums->bad_source = at;
    if (err)
        memset(err, 0, sizeof *err);
    return QC_OK;
}

static qc_status compare_quantized(work *w, qc_error *err)
{
    const qc_against_tensor *t = w->t;
    uint64_t per_byte = t->form.kind == QC_CHECK_CODES4 ? 2 : 1;
    uint64_t begin = w->offset * per_byte, end = begin + w->len * per_byte;
    uint64_t step = qc_against_step(t);
    uint64_t per = t->form.kind == QC_CHECK_INT8_ROWS ? t->cols : t->form.block_elems;
    end = end < t->row.elems ? end : t->row.elems; /* an odd number of nibbles */
    QC_TRY(qc_against_scales(w->a, w->s, w->a->output, t->stored, begin / per,
                             qc_ceil_div_u64(end - begin, per), err));
    for (uint64_t first = begin; first < end; first += step) {
        uint64_t n = end - first < step ? end - first : step;
        const void *source = NULL;
        qc_check_sums sums;
        QC_TRY(look_for_interrupt(err));
        qc_status st = qc_against_read(w->a, w->s, t, first, n, w->hash, &source, err);
        if (st != QC_OK) {
            QC_TRY(take_nonfinite(w, first - begin, st, err));
            continue;
        }
        QC_TRY(check_step(w, source, (first - begin) / per, n,
                          w->bytes + (first - begin) / per_byte, &sums, err));
        qc_check_add(&t->sums[w->piece], &sums, first - begin);
    }
    return QC_OK;
}

/* Hashes this piece's share of the source, where the comparison reads in another order. */
static qc_status hash_share(work *w, qc_error *err)
{
    const qc_against_tensor *t = w->t;
    const qc_ckpt_tensor *from = &w->a->model->tensors[t->model_tensor];
    uint64_t at = (uint64_t)w->piece * t->listed->source_piece_bytes;
    uint64_t left = from->bytes - at;
    uint64_t end =
        at + (left < t->listed->source_piece_bytes ? left : t->listed->source_piece_bytes);
    while (at < end) {
        uint64_t n = end - at < HASH_BYTES ? end - at : HASH_BYTES;
        QC_TRY(qc_against_room(&w->s->raw, &w->s->raw_room, n, err));
        QC_TRY(qc_checkpoint_read(w->a->model, w->s->source, from, at, w->s->raw, (size_t)n, err));
        qc_digest_update(w->s->hash, w->s->raw, (size_t)n);
        at += n;
    }
    return QC_OK;
}

/* Quantized weights are hashed in the order in which they are written. Stacks and matrices that are
 * turned back are hashed as they lie (docs/format.md, section 4). */
static int digest_is_of_shares(const qc_against_tensor *t)
{
    return t->row.transpose && t->row.kind == QC_AGAINST_CAST;
}

qc_status qc_against_piece(qc_against *a, qc_against_tensor *t, uint64_t offset, const void *bytes,
                           size_t len, qc_error *err)
{
    if (t->row.kind == QC_AGAINST_STATE || t->row.fault || len == 0)
        return QC_OK;
    work w = {.a = a, .t = t, .offset = offset, .bytes = bytes, .len = len};
    w.piece = (uint32_t)(offset / t->piece_bytes);
    if (w.piece >= t->piece_count)
        QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s' has a piece too many", t->row.name);
    w.hash = t->sources != NULL && !digest_is_of_shares(t);
    QC_TRY(qc_against_take(a, &w.s, err));
    qc_digest_reset(w.s->hash);
    qc_status st = t->row.kind == QC_AGAINST_EQUAL  ? compare_bytes(&w, err)
                   : t->row.kind == QC_AGAINST_CAST ? compare_cast(&w, err)
                                                    : compare_quantized(&w, err);
    if (st == QC_OK && t->sources && !w.hash)
        st = hash_share(&w, err);
    if (st == QC_OK && t->sources)
        t->sources[w.piece] = qc_digest_finish(w.s->hash);
    qc_against_give(a, w.s);
    return st;
}
