#include "convert/term/target_file.h"

#include "base/text.h"
#include "formats/file_io.h"
#include "formats/manifest.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

qc_status qc_target_file_check(const char *option, const char *path, qc_error *err)
{
    qc_path_kind kind = QC_PATH_MISSING, above = QC_PATH_DIR;
    char room[PATH_MAX];
    struct stat s;
    if (!path)
        return QC_OK;
    /* A link to something that is open already, such as /dev/stdout, must not be renamed over. */
    const int is_system = qc_begins_with(path, "/dev/") || qc_begins_with(path, "/proc/");
    const int is_stream = is_system && lstat(path, &s) == 0 && S_ISLNK(s.st_mode);
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if (kind == QC_PATH_DIR)
        QC_FAIL(err, QC_ERR_USAGE, "%s: '%s': expected a file to write, found a folder", option,
                path);
    if (kind == QC_PATH_OTHER || is_stream)
        QC_FAIL(err, QC_ERR_USAGE, "%s: '%s': expected a file to write, found a device or a pipe",
                option, path);
    if (kind == QC_PATH_FILE && access(path, W_OK) != 0)
        QC_FAIL(err, QC_ERR_IO,
                "%s: '%s': expected a file that may be written, found one that may not", option,
                path);
    const char *folder = qc_folder_of(room, path);
    if (folder)
        QC_TRY(qc_path_stat(folder, &above, NULL, err));
    if (above != QC_PATH_DIR)
        QC_FAIL(err, QC_ERR_IO, "%s: '%s': there is no folder '%s'", option, path, folder);
    return QC_OK;
}

/* ---- nothing that is read is replaced -------------------------------------------------------- */

static int is_same(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static qc_status refuse_file_of(const char *option, const char *path, const qc_checkpoint *c,
                                qc_error *err)
{
    QC_FAIL(err, QC_ERR_USAGE, "%s: '%s' is a file of %s, which is only read; choose another name",
            option, path, c->path);
}

qc_status qc_target_file_spares(const char *option, const char *path, const qc_checkpoint *c,
                                qc_error *err)
{
    static const char *const beside[] = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "model.safetensors.index.json",
        "pytorch_model.bin.index.json",
        "diffusion_pytorch_model.safetensors.index.json",
        "diffusion_pytorch_model.bin.index.json",
        QC_MANIFEST_NAME,
    };
    if (!path)
        return QC_OK;
    for (size_t i = 0; i < c->file_count; i++)
        if (is_same(path, c->files[i].path))
            return refuse_file_of(option, path, c, err);
    for (size_t i = 0; c->is_dir && i < sizeof beside / sizeof *beside; i++) {
        char name[PATH_MAX];
        int n = snprintf(name, sizeof name, "%s/%s", c->path, beside[i]);
        if (n > 0 && (size_t)n < sizeof name && is_same(path, name))
            return refuse_file_of(option, path, c, err);
    }
    return QC_OK;
}

qc_status qc_target_file_differs(const char *option, const char *path, const char *other_option,
                                 const char *other, qc_error *err)
{
    char a[PATH_MAX], b[PATH_MAX];
    if (!path || !other)
        return QC_OK;
    int same = is_same(path, other);
    if (!same && strcmp(qc_last_name(path), qc_last_name(other)) == 0) {
        const char *here = qc_folder_of(a, path), *there = qc_folder_of(b, other);
        same = here && there && is_same(here, there);
    }
    if (same)
        QC_FAIL(err, QC_ERR_USAGE, "%s: '%s' is the file of %s, too; choose another name", option,
                path, other_option);
    return QC_OK;
}
