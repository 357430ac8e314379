/* A checkpoint in memory that has everything except files. */
#include "formats/checkpoint.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "formats/checkpoint_internal.h"

#include <stdlib.h>
#include <string.h>

#define NAME_SHOWN_BYTES 160

static int compare_names(const void *pa, const void *pb)
{
    const qc_ckpt_tensor *a = pa, *b = pb;
    return strcmp(a->name, b->name);
}

static qc_status take_config(qc_checkpoint *c, const char *text, size_t len, qc_error *err)
{
    void *v = NULL;
    QC_TRY(qc_json_parse(&c->config, text, len, QC_JSON_PYTHON, err));
    if (qc_json_kind_of(qc_json_root(c->config)) != QC_JSON_OBJECT)
        QC_FAIL(err, QC_ERR_INPUT, "text is of kind %s, an object was expected",
                qc_json_kind_name(qc_json_kind_of(qc_json_root(c->config))));
    QC_TRY(qc_malloc(&v, len + 1, err));
    c->config_text = v;
    memcpy(c->config_text, text, len);
    c->config_text[len] = '\0';
    c->config_len = len;
    return QC_OK;
}

static qc_status take_tensors(qc_checkpoint *c, const qc_ckpt_tensor *tensors, size_t count,
                              qc_error *err)
{
    void *v = NULL;
    QC_TRY(qc_arena_alloc(&c->arena, &v, count, sizeof *c->tensors, err));
    c->tensors = v;
    for (size_t i = 0; i < count; i++) {
        qc_ckpt_tensor *t = &c->tensors[i];
        *t = tensors[i];
        t->begin = 0;
        t->file = 0;
        QC_TRY(qc_arena_strndup(&c->arena, &t->name, t->name, strlen(t->name), err));
        QC_TRY(qc_shape_bytes(t->dims, t->ndim, t->dtype, &t->bytes, err));
        if (qc_add_u64(c->tensor_bytes, t->bytes, &c->tensor_bytes))
            QC_FAIL(err, QC_ERR_INPUT, "sizes of all tensors overflow 64 bits");
    }
    c->tensor_count = count;
    if (count)
        qsort(c->tensors, count, sizeof *c->tensors, compare_names);
    for (size_t i = 1; i < count; i++) {
        if (strcmp(c->tensors[i - 1].name, c->tensors[i].name) == 0)
            QC_FAIL(err, QC_ERR_INPUT, "tensor '%.*s' is there twice", NAME_SHOWN_BYTES,
                    c->tensors[i].name);
    }
    return QC_OK;
}

qc_status qc_checkpoint_create_shapes(qc_checkpoint **out, const char *path,
                                      const char *config_text, size_t config_len,
                                      const qc_ckpt_tensor *tensors, size_t count, qc_error *err)
{
    void *p = NULL;
    *out = NULL;
    QC_TRY(qc_calloc(&p, 1, sizeof **out, err));
    qc_checkpoint *c = p;
    qc_arena_init(&c->arena);
    c->is_dir = 1;
    qc_status st = qc_arena_strndup(&c->arena, &c->path, path, strlen(path), err);
    if (st == QC_OK)
        st = take_config(c, config_text, config_len, err);
    if (st == QC_OK)
        st = take_tensors(c, tensors, count, err);
    if (st != QC_OK) {
        qc_error_prefix(err, "%s", path);
        qc_checkpoint_close(c);
        return st;
    }
    qc_ckpt_judge_kind(c);
    *out = c;
    return QC_OK;
}
