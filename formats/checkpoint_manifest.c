/* A folder with a manifest, read as a checkpoint. */
#include "formats/checkpoint_internal.h"
#include "formats/manifest_header.h"

#include <string.h>

static void tensor_at(const void *ctx, size_t i, qc_header_tensor *out)
{
    const qc_checkpoint *c = ctx;
    const qc_ckpt_tensor *t = &c->tensors[i];
    out->shard = c->files[t->file].name;
    out->tensor = (qc_st_tensor){.name = t->name,
                                 .dtype = t->dtype,
                                 .ndim = t->ndim,
                                 .begin = t->begin,
                                 .end = t->begin + t->bytes};
    memcpy(out->tensor.dims, t->dims, sizeof out->tensor.dims);
}

qc_status qc_ckpt_check_manifest(const qc_checkpoint *c, const qc_tree_file *tree,
                                 size_t tree_count, qc_error *err)
{
    qc_arena arena;
    qc_manifest m;
    qc_error trouble = {0};
    size_t i = 0;
    while (i < tree_count && strcmp(tree[i].path, QC_MANIFEST_NAME) != 0)
        i++;
    if (i == tree_count || c->files[0].kind != QC_CKPT_SAFETENSORS)
        return QC_OK;
    qc_arena_init(&arena);
    qc_status st = qc_manifest_load(&m, &arena, c->path, &trouble);
    if (st == QC_OK) {
        st = qc_manifest_hold(&m, 0, m.tensor_count, tensor_at, c, c->tensor_count, err);
        if (st == QC_ERR_CHECK) {
            qc_error_prefix(err, "%s", c->path);
            st = QC_ERR_INPUT;
            if (err)
                err->code = st;
        }
    } else if (st == QC_ERR_CHECK || st == QC_ERR_INPUT) {
        st = QC_OK; /* judging a damaged manifest is left to verify */
    } else if (err) {
        *err = trouble;
    }
    qc_arena_deinit(&arena);
    return st;
}
