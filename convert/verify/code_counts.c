#include "convert/verify/code_counts.h"

#include "base/checked.h"
#include "convert/model/recipe_coded.h"
#include "convert/term/glob.h"
#include "quant/quant_form.h"
#include "quant/quant_pack.h"

#include <stddef.h>
#include <string.h>

#define RUN   8192u /* codes that are taken apart at a time; a multiple of 8 */
#define LANES 4u    /* tables that take turns, so that equal bytes in a row do not wait */

static unsigned codes_of(const qc_code_count *w)
{
    return 1u << w->form.ops->bits;
}

qc_status qc_code_counts_make(qc_code_counts *c, qc_arena *arena, const qc_checkpoint *output,
                              const qc_stored_set *stored, qc_error *err)
{
    uint32_t *order = NULL;
    memset(c, 0, sizeof *c);
    QC_TRY(qc_natural_order(&order, arena, output->tensors, offsetof(qc_checkpoint_tensor, name),
                            sizeof *output->tensors, output->tensor_count, err));
    QC_TRY(qc_arena_array(arena, &c->weights, (size_t)stored->count + 1, err));
    QC_TRY(qc_arena_array(arena, &c->of_tensor, output->tensor_count + 1, err));
    for (size_t i = 0; i < output->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &output->tensors[order[i]];
        const qc_stored_weight *s = stored->weights[order[i]];
        c->of_tensor[order[i]] = s ? c->count : QC_NO_TENSOR;
        if (!s)
            continue;
        qc_code_count *w = &c->weights[c->count++];
        w->form =
            qc_scheme_form(s->stored_as, s->ndim ? s->dims[s->ndim - 1] : 1, s->block_elems, 0);
        w->bytes = t->bytes;
        QC_TRY(qc_arena_strdup(arena, &w->name, t->name, err));
        QC_TRY(qc_shape_elems(s->dims, s->ndim, &w->elems, err));
        QC_TRY(qc_arena_array(arena, &w->counts, codes_of(w), err));
        for (unsigned k = 0; k < codes_of(w); k++)
            atomic_init(&w->counts[k], 0);
    }
    return QC_OK;
}

static qc_status make_listed(qc_code_counts *c, qc_arena *arena, const qc_checkpoint *output,
                             const qc_manifest *m, qc_error *err)
{
    qc_stored_set stored;
    qc_coded_set coded;
    uint32_t *of_listed = NULL;
    QC_TRY(qc_stored_find_codes(&stored, &coded, arena, output, err));
    QC_TRY(qc_code_counts_make(c, arena, output, &stored, err));
    QC_TRY(qc_arena_array(arena, &of_listed, m->tensor_count + 1, err));
    for (size_t i = 0; i < m->tensor_count; i++) {
        const uint32_t t = qc_checkpoint_find_index(output, m->tensors[i].name);
        of_listed[i] = t == QC_NO_TENSOR ? QC_NO_TENSOR : c->of_tensor[t];
    }
    c->of_tensor = of_listed;
    return QC_OK;
}

qc_status qc_code_counts_open(qc_code_counts *c, qc_arena *arena, const char *dir,
                              const qc_manifest *m, qc_error *err)
{
    qc_checkpoint *output = NULL;
    qc_error damage = {0};
    memset(c, 0, sizeof *c);
    qc_status st = qc_checkpoint_open(&output, dir, &damage);
    if (st == QC_OK)
        st = make_listed(c, arena, output, m, &damage);
    qc_checkpoint_close(output);
    if (st == QC_OK)
        return QC_OK;
    memset(c, 0, sizeof *c);
    if (st != QC_ERR_NOMEM && st != QC_ERR_INTERRUPTED)
        return QC_OK;
    return qc_error_pass(err, &damage, st);
}

/* ---- counting -------------------------------------------------------------------------------- */

/* Counts bytes. Where there are two codes of 4 bits to a byte, one look counts both. */
static void count_bytes(const unsigned char *bytes, size_t len, uint64_t counts[256])
{
    uint32_t lanes[LANES][256] = {{0}};
    memset(counts, 0, 256 * sizeof *counts);
    while (len > 0) {
        size_t n = len < ((size_t)1 << 30) ? len : (size_t)1 << 30, i = 0;
        for (; i + LANES <= n; i += LANES)
            for (unsigned k = 0; k < LANES; k++)
                lanes[k][bytes[i + k]]++;
        for (; i < n; i++)
            lanes[0][bytes[i]]++;
        for (unsigned c = 0; c < 256; c++)
            for (unsigned k = 0; k < LANES; k++) {
                counts[c] += lanes[k][c];
                lanes[k][c] = 0;
            }
        bytes += n;
        len -= n;
    }
}

/* Counts codes that are neither bytes nor nibbles; `bytes` begin with a row, or with a group. */
static void count_packed(const qc_code_count *w, uint64_t offset, const unsigned char *bytes,
                         size_t len, uint64_t counts[256])
{
    const uint64_t cols = w->form.cols, begin = qc_form_code_elems(&w->form, offset);
    const uint64_t end = qc_min_u64(qc_form_code_elems(&w->form, offset + len), w->elems);
    memset(counts, 0, 256 * sizeof *counts);
    for (uint64_t at = begin, n; at < end; at += n) {
        unsigned char codes[RUN];
        uint64_t some[256];
        n = qc_min_u64(qc_min_u64(RUN, cols - at % cols), end - at);
        qc_codes_unpack(w->form.ops->bits, bytes + qc_form_code_bytes(&w->form, at) - offset, n,
                        codes);
        count_bytes(codes, (size_t)n, some);
        for (unsigned c = 0; c < codes_of(w); c++)
            counts[c] += some[c];
    }
}

void qc_code_counts_add(qc_code_counts *c, uint32_t tensor, uint64_t offset, const void *bytes,
                        size_t len)
{
    uint64_t counts[256], codes[16] = {0};
    const unsigned char *b = bytes;
    if (c->of_tensor[tensor] == QC_NO_TENSOR || len == 0)
        return;
    qc_code_count *w = &c->weights[c->of_tensor[tensor]];
    const unsigned bits = w->form.ops->bits;
    if (bits == 4 || bits == 8)
        count_bytes(b, len, counts);
    else
        count_packed(w, offset, b, len, counts);
    if (bits == 4) {
        for (unsigned i = 0; i < 256; i++) {
            codes[i >> 4] += counts[i];
            codes[i & 15] += counts[i];
        }
        /* With an odd number of weights the last low nibble belongs to none. */
        if (w->elems % 2 && offset + len == w->bytes)
            codes[b[len - 1] & 15]--;
    }
    for (unsigned i = 0; i < codes_of(w); i++)
        atomic_fetch_add_explicit(&w->counts[i], bits == 4 ? codes[i] : counts[i],
                                  memory_order_relaxed);
}

qc_status qc_code_counts_sink(void *ctx, unsigned worker, const qc_output_frame *frame,
                              const void *content, qc_error *err)
{
    qc_code_counts *c = ctx;
    (void)worker, (void)err;
    if (c->count > 0 && frame->tensor != QC_HEADER_FRAME)
        qc_code_counts_add(c, frame->tensor, frame->at, content, frame->content_bytes);
    return QC_OK;
}

/* ---- what is printed ------------------------------------------------------------------------- */

void qc_code_counts_put(qc_json_writer *w, qc_code_counts *c)
{
    qc_json_begin_list(w, "codes");
    for (uint32_t i = 0; i < c->count; i++) {
        qc_code_count *t = &c->weights[i];
        const int most = (int)codes_of(t) - 1;
        const int first = most == 255 ? t->form.ops->zero - 128 : 0;
        qc_json_begin_row(w, NULL);
        qc_json_put_text(w, "name", t->name);
        qc_json_begin_list(w, "counts");
        for (int k = 0; k <= most; k++)
            qc_json_put_u64(w, NULL, atomic_load(&t->counts[(first + k) & most]));
        qc_json_end(w);
        qc_json_end(w);
    }
    qc_json_end(w);
}
