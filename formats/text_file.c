#include "formats/text_file.h"

#include "base/alloc.h"

#include <string.h>
#include <unistd.h>

#define STEP_BYTES ((size_t)64 << 10)
#define SUFFIX     ".tmp"

qc_status qc_text_file_open(qc_text_file *t, const char *path, qc_error *err)
{
    void *v = NULL;
    size_t n = strlen(path);
    *t = QC_TEXT_FILE_NONE;
    qc_strbuf_init(&t->text, SIZE_MAX / 2);
    QC_TRY(qc_digest_create(&t->hash, err));
    QC_TRY(qc_strdup(&t->path, path, err));
    QC_TRY(qc_malloc(&v, n + sizeof SUFFIX, err));
    memcpy(v, path, n);
    memcpy((char *)v + n, SUFFIX, sizeof SUFFIX);
    qc_status st = qc_file_create(&t->file, v, err);
    if (st == QC_OK)
        t->temporary = v;
    else
        qc_free(v);
    return st;
}

qc_status qc_text_file_flush(qc_text_file *t, qc_error *err)
{
    size_t n = t->text.len;
    if (n == 0)
        return QC_OK;
    QC_TRY(qc_file_pwrite(&t->file, t->text.data, n, t->bytes, err));
    qc_digest_update(t->hash, t->text.data, n);
    t->bytes += n;
    t->text.data[0] = '\0';
    t->text.len = 0;
    return QC_OK;
}

qc_status qc_text_file_step(qc_text_file *t, qc_error *err)
{
    return t->text.len < STEP_BYTES ? QC_OK : qc_text_file_flush(t, err);
}

qc_digest qc_text_file_digest(const qc_text_file *t)
{
    return qc_digest_finish(t->hash);
}

qc_status qc_text_file_finish(qc_text_file *t, qc_error *err)
{
    QC_TRY(qc_text_file_flush(t, err));
    QC_TRY(qc_file_sync(&t->file, err));
    QC_TRY(qc_file_close(&t->file, err));
    QC_TRY(qc_path_rename(t->temporary, t->path, err));
    qc_free(t->temporary);
    t->temporary = NULL;
    return qc_dir_sync_holder(t->path, err);
}

qc_status qc_file_put(const char *path, const void *bytes, size_t len, qc_error *err)
{
    qc_text_file t;
    qc_status st = qc_text_file_open(&t, path, err);
    if (st == QC_OK)
        st = qc_file_pwrite(&t.file, bytes, len, 0, err);
    if (st == QC_OK)
        st = qc_text_file_finish(&t, err);
    qc_text_file_deinit(&t);
    return st;
}

void qc_text_file_deinit(qc_text_file *t)
{
    qc_file_discard(&t->file);
    if (t->temporary)
        (void)unlink(t->temporary);
    qc_digest_destroy(t->hash);
    qc_strbuf_deinit(&t->text);
    qc_free(t->temporary);
    qc_free(t->path);
    *t = QC_TEXT_FILE_NONE;
}
