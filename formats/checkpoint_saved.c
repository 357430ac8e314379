/* Files of a checkpoint that are deleted, but known by their saved headers. */
#include "formats/checkpoint_internal.h"

#include <stdlib.h>
#include <string.h>

const qc_saved_header *qc_ckpt_saved(const qc_checkpoint *c, const char *name)
{
    for (size_t i = 0; i < c->saved_count; i++) {
        if (strcmp(c->saved[i].name, name) == 0)
            return &c->saved[i];
    }
    return NULL;
}

static int by_path(const void *va, const void *vb)
{
    const qc_tree_file *a = va;
    const qc_tree_file *b = vb;
    return strcmp(a->path, b->path);
}

qc_status qc_ckpt_add_saved(qc_checkpoint *c, qc_tree_file **tree, size_t *tree_count,
                            qc_error *err)
{
    void *p = NULL;
    size_t count = *tree_count;
    if (c->saved_count == 0)
        return QC_OK;
    QC_TRY(qc_arena_alloc(&c->arena, &p, count + c->saved_count, sizeof **tree, err));
    qc_tree_file *all = p;
    if (count)
        memcpy(all, *tree, count * sizeof *all);
    for (size_t i = 0; i < c->saved_count; i++) {
        const qc_saved_header *s = &c->saved[i];
        qc_tree_file key = {.path = s->name, .bytes = s->stamp.bytes};
        if (!*tree_count || !bsearch(&key, *tree, *tree_count, sizeof key, by_path))
            all[count++] = key;
    }
    qsort(all, count, sizeof *all, by_path);
    *tree = all;
    *tree_count = count;
    return QC_OK;
}
