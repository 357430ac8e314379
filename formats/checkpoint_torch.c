/* What a checkpoint has to know of PyTorch files and not of safetensors: which files they are, and
 * that two of their tensors may be the same bytes. */
#include "base/alloc.h"
#include "base/text.h"
#include "formats/checkpoint_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define HEAD_BYTES       16u
#define NAME_SHOWN_BYTES 160
#define HEAD_NAME        "lm_head.weight"

qc_status qc_checkpoint_kind_of(const char *path, qc_checkpoint_kind *kind, qc_error *err)
{
    static const char *const torch[] = {".bin", ".pt", ".pth", ".ckpt"};
    unsigned char head[HEAD_BYTES];
    qc_file f = QC_FILE_CLOSED;
    uint64_t bytes = 0;
    *kind = QC_CHECKPOINT_SAFETENSORS;
    if (qc_ends_with(path, ".safetensors") || qc_ends_with(path, ".zst"))
        return QC_OK;
    for (size_t i = 0; i < sizeof torch / sizeof *torch; i++) {
        if (qc_ends_with(path, torch[i])) {
            *kind = QC_CHECKPOINT_TORCH;
            return QC_OK;
        }
    }
    QC_TRY(qc_file_open_read(&f, path, err));
    qc_status st = qc_file_size(&f, &bytes, err);
    size_t len = bytes < sizeof head ? (size_t)bytes : sizeof head;
    if (st == QC_OK)
        st = qc_file_pread(&f, head, len, 0, err);
    if (st == QC_OK && qc_torch_file_is(head, len))
        *kind = QC_CHECKPOINT_TORCH;
    qc_file_discard(&f);
    return st;
}

qc_status qc_checkpoint_open_torch(qc_checkpoint *c, qc_checkpoint_file *f, qc_error *err)
{
    QC_TRY(qc_torch_file_open(&f->torch, f->path, err));
    f->tensor_count = f->torch.tensor_count;
    f->tensor_bytes = f->torch.tensor_bytes;
    f->file_bytes = f->torch.file_bytes;
    f->stamp = f->torch.stamp;
    if (f->torch.skipped)
        return qc_checkpoint_warn(c, err,
                                  "'%.*s' holds %zu entries that are no tensors (the first is "
                                  "'%.*s'); they are left out",
                                  NAME_SHOWN_BYTES, f->name, f->torch.skipped, NAME_SHOWN_BYTES,
                                  f->torch.first_skipped ? f->torch.first_skipped : "");
    return QC_OK;
}

/* ---- tensors that are the same bytes ---- */

typedef struct {
    const qc_checkpoint_tensor *t;
    int drop;
} view;

static int same_view(const qc_checkpoint_tensor *a, const qc_checkpoint_tensor *b)
{
    return a->file == b->file && a->begin == b->begin && a->dtype == b->dtype &&
           a->ndim == b->ndim && memcmp(a->dims, b->dims, sizeof a->dims) == 0;
}

static int compare_views(const void *va, const void *vb)
{
    const qc_checkpoint_tensor *a = ((const view *)va)->t;
    const qc_checkpoint_tensor *b = ((const view *)vb)->t;
    if (a->file != b->file)
        return a->file < b->file ? -1 : 1;
    if (a->begin != b->begin)
        return a->begin < b->begin ? -1 : 1;
    if (a->dtype != b->dtype)
        return a->dtype < b->dtype ? -1 : 1;
    if (a->ndim != b->ndim)
        return a->ndim < b->ndim ? -1 : 1;
    for (unsigned i = 0; i < a->ndim; i++) {
        if (a->dims[i] != b->dims[i])
            return a->dims[i] < b->dims[i] ? -1 : 1;
    }
    return strcmp(a->name, b->name);
}

/* Only an explicit statement counts: without the key each kind of model has a default of its own,
 * and an extra head does no harm, while a missing one does. */
static int says_tied(const qc_checkpoint *c)
{
    if (!c->config)
        return 0;
    const qc_json_node *root = qc_json_root(c->config);
    const qc_json_node *tie = qc_json_get(root, "tie_word_embeddings");
    if (!tie)
        tie = qc_json_get(qc_json_get(root, "text_config"), "tie_word_embeddings");
    return qc_json_bool_or(tie, 0);
}

/* Judges `count` views of the same bytes, sorted by name. */
static qc_status judge_group(qc_checkpoint *c, view *v, size_t count, int tied,
                             qc_checkpoint_names *kept, qc_error *err)
{
    const char *other = NULL;
    for (size_t i = 0; i < count && !other; i++)
        other = qc_ends_with(v[i].t->name, HEAD_NAME) ? NULL : v[i].t->name;
    for (size_t i = 0; i < count; i++) {
        if (!tied || !other || !qc_ends_with(v[i].t->name, HEAD_NAME))
            continue;
        v[i].drop = 1;
        QC_TRY(qc_checkpoint_warn(c, err,
                                  "'%.*s' is '%.*s' under another name; it is left out, as "
                                  "tie_word_embeddings has it",
                                  NAME_SHOWN_BYTES, v[i].t->name, NAME_SHOWN_BYTES, other));
    }
    for (size_t i = 0, left = 0; i < count; i++) {
        if (!v[i].drop && left++ > 0)
            qc_checkpoint_names_add(kept, v[i].t->name);
    }
    return QC_OK;
}

static qc_status judge_views(qc_checkpoint *c, view *views, size_t count, uint64_t *shared_bytes,
                             qc_error *err)
{
    qc_checkpoint_names kept = {0};
    int tied = says_tied(c);
    qsort(views, count, sizeof *views, compare_views);
    for (size_t i = 0, n = 1; i < count; i += n) {
        for (n = 1; i + n < count && same_view(views[i].t, views[i + n].t); n++)
            *shared_bytes += views[i].t->bytes; /* part of c->tensor_bytes: no overflow */
        if (n > 1)
            QC_TRY(judge_group(c, views + i, n, tied, &kept, err));
    }
    if (kept.count)
        return qc_checkpoint_warn(
            c, err,
            "%zu tensor%s %s stored before under another name and written once "
            "more: %s",
            kept.count, qc_plural(kept.count), qc_are(kept.count), qc_checkpoint_names_text(&kept));
    return QC_OK;
}

/* Removes the marked tensors from c->tensors. */
static void drop_marked(qc_checkpoint *c, const view *views, size_t count)
{
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        if (views[i].drop)
            c->tensors[views[i].t - c->tensors].name = NULL;
    }
    for (size_t i = 0; i < c->tensor_count; i++) {
        if (c->tensors[i].name)
            c->tensors[kept++] = c->tensors[i];
        else
            c->tensor_bytes -= c->tensors[i].bytes;
    }
    c->tensor_count = kept;
}

qc_status qc_checkpoint_drop_tied(qc_checkpoint *c, uint64_t *shared_bytes, qc_error *err)
{
    size_t count = 0;
    *shared_bytes = 0;
    for (size_t i = 0; i < c->tensor_count; i++)
        count += c->files[c->tensors[i].file].kind == QC_CHECKPOINT_TORCH && c->tensors[i].bytes;
    if (count == 0)
        return QC_OK;
    view *views = NULL;
    QC_TRY(qc_calloc(&views, count, sizeof *views, err));
    count = 0;
    for (size_t i = 0; i < c->tensor_count; i++) {
        if (c->files[c->tensors[i].file].kind == QC_CHECKPOINT_TORCH && c->tensors[i].bytes)
            views[count++].t = &c->tensors[i];
    }
    qc_status st = judge_views(c, views, count, shared_bytes, err);
    if (st == QC_OK)
        drop_marked(c, views, count);
    qc_free(views);
    return st;
}
