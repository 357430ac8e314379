#include "convert/target_file.h"

#include "formats/file_io.h"

#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* /dev/stdout and the like: a link to what is open already, which must not be renamed over. */
static int is_stream(const char *path)
{
    struct stat s;
    int below = strncmp(path, "/dev/", 5) == 0 || strncmp(path, "/proc/", 6) == 0;
    return below && lstat(path, &s) == 0 && S_ISLNK(s.st_mode);
}

static qc_status check_folder(const char *option, const char *path, qc_error *err)
{
    qc_path_kind kind = QC_PATH_DIR;
    const char *slash = strrchr(path, '/');
    const char *folder = NULL;
    if (!slash || slash == path)
        return QC_OK;
    qc_arena arena;
    qc_arena_init(&arena);
    qc_status st = qc_arena_strndup(&arena, &folder, path, (size_t)(slash - path), err);
    if (st == QC_OK)
        st = qc_path_stat(folder, &kind, NULL, err);
    if (st == QC_OK && kind != QC_PATH_DIR)
        st = qc_error_set(err, QC_ERR_IO, __FILE__, __LINE__, "%s: '%s': there is no folder '%s'",
                          option, path, folder);
    qc_arena_deinit(&arena);
    return st;
}

qc_status qc_target_file_check(const char *option, const char *path, qc_error *err)
{
    qc_path_kind kind = QC_PATH_MISSING;
    if (!path)
        return QC_OK;
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if (kind == QC_PATH_DIR)
        QC_FAIL(err, QC_ERR_USAGE, "%s: '%s': expected a file to write, found a folder", option,
                path);
    if (kind == QC_PATH_OTHER || is_stream(path))
        QC_FAIL(err, QC_ERR_USAGE, "%s: '%s': expected a file to write, found a device or a pipe",
                option, path);
    if (kind == QC_PATH_FILE && access(path, W_OK) != 0)
        QC_FAIL(err, QC_ERR_IO, "%s: '%s': this file may not be written", option, path);
    return check_folder(option, path, err);
}
