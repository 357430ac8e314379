#include "formats/torch_file.h"

#include "base/alloc.h"
#include "formats/torch_file_internal.h"
#include "formats/torch_zip.h"

#include <inttypes.h>
#include <string.h>

#define HEAD_BYTES       264u
#define TAR_MAGIC_AT     257u
#define NAME_SHOWN_BYTES 160
#define PICKLE_NAME      "data.pkl"

int qc_torch_file_is(const unsigned char *head, size_t len)
{
    if (len < 4)
        return 0;
    if (memcmp(head, "PK\3\4", 4) == 0) /* as safetensors this would be a header of 67,324,752
                                           bytes */
        return len < 9 || head[8] != '{';
    return head[0] == 0x80 && head[1] >= 2 && head[1] <= 5;
}

/* ---- the zip form ---- */

/* Finds the one "P/data.pkl"; *prefix gets "P" and its slash. */
static qc_status find_pickle(const qc_torch_zip *z, const qc_zip_entry **out, size_t *prefix,
                             qc_error *err)
{
    *out = NULL;
    for (size_t i = 0; i < z->count; i++) {
        const char *slash = strchr(z->entries[i].name, '/');
        if (!slash || strcmp(slash + 1, PICKLE_NAME) != 0)
            continue;
        if (*out)
            QC_FAIL(err, QC_ERR_INPUT, "the zip archive has two pickles, '%.*s' and '%.*s'",
                    NAME_SHOWN_BYTES, (*out)->name, NAME_SHOWN_BYTES, z->entries[i].name);
        *out = &z->entries[i];
        *prefix = (size_t)(slash + 1 - z->entries[i].name);
    }
    if (!*out)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "the zip archive has %zu entries and no data.pkl, so torch.save did not write it",
                z->count);
    return QC_OK;
}

/* Finds the entry of this name beside the pickle; NULL if there is none. */
static qc_status find_beside(qc_torch_file *f, const qc_torch_zip *z, const qc_zip_entry *pickle,
                             size_t prefix, const char *name, const qc_zip_entry **out,
                             qc_error *err)
{
    const char *full = NULL;
    QC_TRY(qc_arena_printf(&f->arena, &full, err, "%.*s%s", (int)prefix, pickle->name, name));
    *out = qc_torch_zip_find(z, full);
    return QC_OK;
}

static qc_status check_archive(qc_torch_file *f, const qc_torch_zip *z, const qc_zip_entry *pickle,
                               size_t prefix, qc_error *err)
{
    const qc_zip_entry *e = NULL;
    char order[6] = {0};
    QC_TRY(find_beside(f, z, pickle, prefix, "constants.pkl", &e, err));
    if (e)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "the file is a TorchScript program; save the model's state_dict() instead");
    QC_TRY(find_beside(f, z, pickle, prefix, "byteorder", &e, err));
    if (!e)
        return QC_OK; /* only torch 2.1 and later write it; before, all was little-endian */
    if (e->bytes == sizeof order)
        QC_TRY(qc_torch_zip_load(&f->file, e, order, err));
    if (e->bytes != sizeof order || memcmp(order, "little", sizeof order) != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "the tensors are not in little-endian byte order; save them on a little-endian "
                "machine");
    return QC_OK;
}

static qc_status place_storages(const qc_torch_zip *z, const qc_zip_entry *pickle, size_t prefix,
                                const qc_pickle *p, qc_torch_place *places, qc_error *err)
{
    qc_strbuf name;
    qc_status st = QC_OK;
    qc_strbuf_init(&name, QC_PICKLE_MAX_BYTES + 65536u + 16u);
    for (size_t i = 0; i < p->storage_count; i++) {
        const qc_pickle_storage *s = &p->storages[i];
        uint64_t bytes = 0;
        const char *key = (const char *)p->text + s->key;
        name.len = 0;
        QC_TRY_GOTO(st, done, qc_torch_storage_bytes(s, &bytes, err));
        if (bytes == 0)
            continue; /* nobody asks where it lies */
        QC_TRY_GOTO(st, done, qc_strbuf_add(&name, pickle->name, prefix, err));
        QC_TRY_GOTO(st, done, qc_strbuf_adds(&name, "data/", err));
        QC_TRY_GOTO(st, done, qc_strbuf_add(&name, key, s->key_bytes, err));
        const qc_zip_entry *e = qc_torch_zip_find(z, name.data);
        if (!e || strlen(name.data) != name.len) {
            st = QC_ERROR(err, QC_ERR_INPUT,
                          "the zip archive has no entry '%.*s', which the pickle refers to",
                          NAME_SHOWN_BYTES, name.data);
            goto done;
        }
        if (e->bytes != bytes) {
            st = QC_ERROR(err, QC_ERR_INPUT,
                          "zip entry '%.*s' has %" PRIu64 " bytes, but the pickle says %" PRIu64,
                          NAME_SHOWN_BYTES, e->name, e->bytes, bytes);
            goto done;
        }
        places[i] = (qc_torch_place){e->data_offset, bytes};
    }
done:
    qc_strbuf_deinit(&name);
    return st;
}

static qc_status read_archive(qc_torch_file *f, const qc_torch_zip *z, qc_error *err)
{
    const qc_zip_entry *e = NULL;
    size_t prefix = 0;
    void *text = NULL;
    void *places = NULL;
    qc_pickle p = {0};
    QC_TRY(find_pickle(z, &e, &prefix, err));
    QC_TRY(check_archive(f, z, e, prefix, err));
    if (e->bytes > QC_PICKLE_MAX_BYTES)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "'%.*s' has %" PRIu64 " bytes; at most %u are read",
                NAME_SHOWN_BYTES, e->name, e->bytes, QC_PICKLE_MAX_BYTES);
    f->head_offset = e->data_offset;
    f->head_bytes = e->bytes;
    QC_TRY(qc_malloc(&text, (size_t)e->bytes, err));
    qc_status st = qc_torch_zip_load(&f->file, e, text, err);
    if (st == QC_OK)
        st = qc_pickle_run(&p, text, (size_t)e->bytes, err);
    if (st == QC_OK && p.used_bytes != e->bytes)
        st = QC_ERROR(err, QC_ERR_INPUT,
                      "'%.*s' has %" PRIu64 " bytes, but its pickle ends at byte %zu",
                      NAME_SHOWN_BYTES, e->name, e->bytes, p.used_bytes);
    if (st == QC_OK)
        st = qc_calloc(&places, p.storage_count, sizeof(qc_torch_place), err);
    if (st == QC_OK)
        st = place_storages(z, e, prefix, &p, places, err);
    if (st == QC_OK)
        st = qc_torch_file_fill(f, &p, places, err);
    qc_free(places);
    qc_pickle_deinit(&p);
    qc_free(text);
    return st;
}

static qc_status read_zip(qc_torch_file *f, qc_error *err)
{
    qc_torch_zip z;
    QC_TRY(qc_torch_zip_read(&z, &f->file, f->file_bytes, err));
    qc_status st = read_archive(f, &z, err);
    qc_torch_zip_deinit(&z);
    return st;
}

/* ---- opening ---- */

static qc_status fail_unknown(const unsigned char *head, size_t len, qc_error *err)
{
    static const struct {
        const char *begin;
        const char *what;
    } known[] = {
        {"version https://git-lfs", "a git-lfs pointer, not the file itself (run 'git lfs pull')"},
        {"<!doctype", "an HTML page (a failed download?)"},
        {"<html", "an HTML page (a failed download?)"},
        {"GGUF", "a GGUF file"},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        size_t n = strlen(known[i].begin);
        if (len >= n && memcmp(head, known[i].begin, n) == 0)
            QC_FAIL(err, QC_ERR_INPUT, "the file is %s and not a PyTorch checkpoint",
                    known[i].what);
    }
    if (len >= TAR_MAGIC_AT + 5 && memcmp(head + TAR_MAGIC_AT, "ustar", 5) == 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "the file is a tar archive, as torch wrote them before 0.1.10; load it and save it "
                "with a newer torch");
    QC_FAIL(err, QC_ERR_INPUT,
            "the file is not a PyTorch checkpoint, but neither a zip archive nor a pickle");
}

static qc_status open_any(qc_torch_file *f, qc_error *err)
{
    unsigned char head[HEAD_BYTES];
    QC_TRY(qc_file_stamp_take(&f->stamp, &f->file, err));
    f->file_bytes = f->stamp.bytes;
    size_t n = f->file_bytes < sizeof head ? (size_t)f->file_bytes : sizeof head;
    QC_TRY(qc_file_pread(&f->file, head, n, 0, err));
    /* "PK" is enough here: for a damaged archive the zip reader's message is the better one. */
    if (n >= 2 && memcmp(head, "PK", 2) == 0)
        return read_zip(f, err);
    if (n >= 2 && head[0] == 0x80) {
        f->legacy = 1;
        return qc_torch_legacy_read(f, err);
    }
    return fail_unknown(head, n, err);
}

qc_status qc_torch_file_open(qc_torch_file *out, const char *path, qc_error *err)
{
    memset(out, 0, sizeof *out);
    out->file = QC_FILE_CLOSED;
    qc_arena_init(&out->arena);
    qc_status st = qc_file_open_read(&out->file, path, err);
    if (st == QC_OK) {
        st = open_any(out, err);
        if (st != QC_OK && st != QC_ERR_NOMEM && st != QC_ERR_IO)
            qc_error_prefix(err, "%s", path);
    }
    if (st != QC_OK)
        qc_torch_file_close(out);
    return st;
}

void qc_torch_file_close(qc_torch_file *f)
{
    if (!f)
        return;
    qc_arena_deinit(&f->arena);
    qc_file_discard(&f->file);
    memset(f, 0, sizeof *f);
    f->file = QC_FILE_CLOSED;
}

qc_status qc_torch_file_read_head(const qc_torch_file *f, void *dst, qc_error *err)
{
    return qc_file_pread(&f->file, dst, (size_t)f->head_bytes, f->head_offset, err);
}
