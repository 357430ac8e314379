/* Where the tensors of a PyTorch file lie, given the places of its storages. */
#include "base/checked.h"
#include "formats/torch_file_internal.h"
#include "formats/torch_state.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define NAME_SHOWN_BYTES 160
#define EXTENTS_BYTES    256
/* Shared weights have a few names (a tied head 2, t5's table 4, heads that all layers share one per
 * layer). A file that is far smaller than its tensors was made to fill a disk. */
#define MOST_TIMES_FILE 64u

qc_status qc_torch_storage_bytes(const qc_pickle_storage *s, uint64_t *bytes, qc_error *err)
{
    return qc_shape_bytes(&s->elems, 1, s->dtype, bytes, err);
}

static int is_contiguous(const qc_pickle_tensor *t)
{
    uint64_t step = 1; /* cannot overflow: the product of all dims was checked */
    for (unsigned i = t->ndim; i-- > 0;) {
        if (t->dims[i] != 1 && t->strides[i] != step)
            return 0;
        step *= t->dims[i];
    }
    return 1;
}

static const char *extents_text(char out[EXTENTS_BYTES], const uint64_t *v, unsigned n)
{
    size_t used = 0;
    out[0] = '\0';
    for (unsigned i = 0; i < n; i++) {
        int k = snprintf(out + used, EXTENTS_BYTES - used, "%s%" PRIu64, i ? ", " : "", v[i]);
        if (k < 0)
            break;
        used += (size_t)k; /* 8 numbers of 20 digits fit */
    }
    return out;
}

static qc_status place_tensor(qc_torch_tensor *to, const qc_pickle_tensor *t,
                              const qc_torch_place *place, qc_error *err)
{
    uint64_t elems = 0;
    uint64_t skip = 0;
    uint64_t end = 0;
    to->dtype = t->dtype;
    to->ndim = t->ndim;
    memcpy(to->dims, t->dims, sizeof to->dims);
    QC_TRY(qc_shape_elems(t->dims, t->ndim, &elems, err));
    QC_TRY(qc_shape_bytes(t->dims, t->ndim, t->dtype, &to->bytes, err));
    to->begin = place->begin;
    if (elems == 0)
        return QC_OK;
    if (!is_contiguous(t)) {
        char shape[EXTENTS_BYTES];
        char strides[EXTENTS_BYTES];
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "shape [%s] with strides [%s] is not contiguous; save it with .contiguous()",
                extents_text(shape, t->dims, t->ndim), extents_text(strides, t->strides, t->ndim));
    }
    if (qc_mul_u64(t->offset_elems, qc_dtype_bits(t->dtype) / 8, &skip) ||
        qc_add_u64(skip, to->bytes, &end) || end > place->bytes)
        QC_FAIL(err, QC_ERR_INPUT,
                "its %" PRIu64 " bytes from element %" PRIu64
                " on end behind its storage, which has %" PRIu64 " bytes",
                to->bytes, t->offset_elems, place->bytes);
    to->begin = place->begin + skip; /* within the file, as all of the storage is */
    return QC_OK;
}

qc_status qc_torch_file_fill(qc_torch_file *f, const qc_pickle *p, const qc_torch_place *places,
                             qc_error *err)
{
    qc_torch_state state;
    QC_TRY(qc_torch_state_read(&state, &f->arena, p, err));
    f->skipped = state.skipped;
    f->first_skipped = state.first_skipped;
    QC_TRY(qc_arena_alloc(&f->arena, &f->tensors, state.count, sizeof *f->tensors, err));
    for (; f->tensor_count < state.count; f->tensor_count++) {
        const qc_state_entry *e = &state.entries[f->tensor_count];
        const qc_pickle_tensor *t = &p->tensors[e->tensor];
        qc_torch_tensor *to = &f->tensors[f->tensor_count];
        to->name = e->name;
        qc_status st = place_tensor(to, t, &places[t->storage], err);
        if (st != QC_OK) {
            qc_error_prefix(err, "tensor '%.*s'", NAME_SHOWN_BYTES, e->name);
            return st;
        }
        if (qc_add_u64(f->tensor_bytes, to->bytes, &f->tensor_bytes))
            QC_FAIL(err, QC_ERR_INPUT, "the sizes of all tensors together overflow 64 bits");
    }
    if (f->tensor_bytes / MOST_TIMES_FILE > f->file_bytes)
        QC_FAIL(err, QC_ERR_INPUT,
                "its %zu tensors share their bytes: expected at most %u times the file's %" PRIu64
                " bytes, found %" PRIu64,
                f->tensor_count, MOST_TIMES_FILE, f->file_bytes, f->tensor_bytes);
    return QC_OK;
}
