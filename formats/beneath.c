#define _GNU_SOURCE /* O_PATH, syscall */
#include "formats/beneath.h"

#include "base/alloc.h"
#include "base/text.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FOLDER_FLAGS (O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW)
#define DEPTH_MAX    64
#define RACE_TRIES   100

/* include/uapi/linux/openat2.h; the number is that of all architectures that Debian has. */
#ifndef SYS_openat2
#define SYS_openat2 437
#endif
#define BENEATH_NO_SYMLINKS 0x04u
#define BENEATH_ONLY        0x08u
typedef struct {
    uint64_t flags, mode, resolve;
} openat2_how;

static atomic_int openat2_missing;

void qc_beneath_use_openat2(int yes)
{
    atomic_store(&openat2_missing, !yes);
}

static qc_status fail(qc_error *err, const qc_file *root, const char *name, const char *what)
{
    qc_status code = errno == ENOSPC || errno == EDQUOT ? QC_ERR_NOSPACE
                     : errno == ENOMEM                  ? QC_ERR_NOMEM
                                                        : QC_ERR_IO;
    QC_FAIL(err, code, "%s%s%s %s: %s", root->path, *name ? "/" : "", name, what,
            errno == ELOOP || errno == ENOTDIR ? "something on the way to it is not a folder"
                                               : strerror(errno));
}

/* Closes what was opened, if it was; errno stays. */
static void close_quietly(int fd)
{
    int e = errno;
    if (fd >= 0)
        (void)close(fd);
    errno = e;
}

/* ---- opening folders ------------------------------------------------------------------------ */

/* A name must not lead out of the root, whatever manifest it comes from. */
static int is_plain_name(const char *name)
{
    return strlen(name) < PATH_MAX && qc_is_plain_path(name);
}

/* Opens a folder beneath root ("" is root itself). Returns -1 and sets errno: ELOOP or ENOTDIR
 * where something on the way is a link or a file. */
static int open_folder(const qc_file *root, const char *folder, int flags)
{
    if (*folder == '\0')
        return openat(root->fd, ".", O_DIRECTORY | O_CLOEXEC | flags);
    if (!is_plain_name(folder)) {
        errno = EINVAL;
        return -1;
    }
    openat2_how how = {(uint64_t)(FOLDER_FLAGS | flags), 0, BENEATH_ONLY | BENEATH_NO_SYMLINKS};
    for (int i = 0; i < RACE_TRIES && !atomic_load(&openat2_missing); i++) {
        long fd = syscall(SYS_openat2, root->fd, folder, &how, sizeof how);
        if (fd >= 0 || (errno != ENOSYS && errno != EPERM && errno != EAGAIN && errno != EINTR))
            return (int)fd;
        if (errno == ENOSYS || errno == EPERM) /* sandboxes that do not know it say EPERM */
            atomic_store(&openat2_missing, 1);
    }
    int at = openat(root->fd, ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    while (at >= 0 && *folder) {
        char name[NAME_MAX + 1];
        size_t n = strcspn(folder, "/");
        int next = -1;
        if (n > NAME_MAX) {
            errno = ENAMETOOLONG;
        } else {
            memcpy(name, folder, n);
            name[n] = '\0';
            folder += n + (folder[n] == '/');
            next = openat(at, name, FOLDER_FLAGS | (*folder ? O_PATH : flags));
        }
        close_quietly(at);
        at = next;
    }
    return at;
}

/* Opens the folder that holds name; *last is what name is called in it. */
static int open_holder(const qc_file *root, const char *name, const char **leaf)
{
    char folder[PATH_MAX];
    const char *slash = strrchr(name, '/');
    size_t n = slash ? (size_t)(slash - name) : 0;
    *leaf = slash ? slash + 1 : name;
    if (!is_plain_name(name)) {
        errno = EINVAL;
        return -1;
    }
    memcpy(folder, name, n);
    folder[n] = '\0';
    return open_folder(root, folder, O_PATH);
}

qc_status qc_beneath_open(qc_file *root, const char *path, qc_error *err)
{
    char *copy = NULL;
    *root = QC_FILE_CLOSED;
    QC_TRY(qc_strdup(&copy, path, err));
    root->path = copy;
    root->fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root->fd >= 0)
        return QC_OK;
    qc_status st = fail(err, root, "", "cannot be opened");
    qc_file_discard(root);
    return st;
}

/* ---- looking -------------------------------------------------------------------------------- */

const char *qc_entry_text(qc_entry_kind kind)
{
    static const char *const texts[] = {"nothing", "a file", "a folder", "a link",
                                        "a pipe or device"};
    return texts[kind];
}

/* Finds what keeps name from being reached: the first component on its way that is not a folder. */
static qc_status find_block(const qc_file *root, const char *name, qc_entry *out, qc_error *err)
{
    char part[PATH_MAX];
    for (const char *slash = strchr(name, '/'); slash; slash = strchr(slash + 1, '/')) {
        size_t n = (size_t)(slash - name);
        memcpy(part, name, n);
        part[n] = '\0';
        QC_TRY(qc_beneath_look(root, part, out, err));
        if (out->kind != QC_ENTRY_FOLDER) {
            out->blocked = out->kind == QC_ENTRY_MISSING ? 0 : n;
            return QC_OK;
        }
    }
    *out = (qc_entry){.kind = QC_ENTRY_MISSING}; /* the name has become a folder */
    return QC_OK;
}

qc_status qc_beneath_look(const qc_file *root, const char *name, qc_entry *out, qc_error *err)
{
    const char *leaf = NULL;
    struct stat s;
    *out = (qc_entry){.kind = QC_ENTRY_MISSING};
    int at = open_holder(root, name, &leaf);
    int found = at >= 0 && fstatat(at, leaf, &s, AT_SYMLINK_NOFOLLOW) == 0;
    close_quietly(at);
    if (found) {
        out->kind = S_ISREG(s.st_mode)   ? QC_ENTRY_FILE
                    : S_ISDIR(s.st_mode) ? QC_ENTRY_FOLDER
                    : S_ISLNK(s.st_mode) ? QC_ENTRY_LINK
                                         : QC_ENTRY_OTHER;
        if (out->kind == QC_ENTRY_FILE) {
            out->bytes = (uint64_t)s.st_size;
            out->disk_bytes = (uint64_t)s.st_blocks * 512;
        }
        return QC_OK;
    }
    if (errno == ELOOP || errno == ENOTDIR)
        return find_block(root, name, out, err);
    return errno == ENOENT ? QC_OK : fail(err, root, name, "cannot be examined");
}

qc_status qc_beneath_look_once(const char *path, const char *name, qc_entry *out, qc_error *err)
{
    qc_file root = QC_FILE_CLOSED;
    qc_path_kind kind = QC_PATH_MISSING;
    *out = (qc_entry){.kind = QC_ENTRY_MISSING};
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if (kind != QC_PATH_DIR)
        return QC_OK;
    QC_TRY(qc_beneath_open(&root, path, err));
    qc_status st = qc_beneath_look(&root, name, out, err);
    qc_file_discard(&root);
    return st;
}

int qc_beneath_open_fd(const qc_file *root, const char *name)
{
    const char *leaf = NULL;
    int at = open_holder(root, name, &leaf);
    int fd = at < 0 ? -1 : openat(at, leaf, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    close_quietly(at);
    return fd;
}

/* ---- changing ------------------------------------------------------------------------------- */

/* A user who may enter a folder but not read it cannot sync it. */
static qc_status sync_at(const qc_file *root, const char *folder, int may_lack_rights,
                         qc_error *err)
{
    qc_file f = {open_folder(root, folder, O_RDONLY), NULL};
    if (f.fd < 0 && errno == EACCES && may_lack_rights)
        return QC_OK;
    if (f.fd < 0)
        return fail(err, root, folder, "cannot be opened");
    qc_status st = qc_strdup(&f.path, root->path, err);
    if (st == QC_OK)
        st = qc_file_sync(&f, err);
    qc_file_discard(&f);
    return st;
}

qc_status qc_beneath_sync(const qc_file *root, const char *folder, qc_error *err)
{
    return sync_at(root, folder, 0, err);
}

/* Makes one folder; the one that holds it is there. */
static qc_status make_one(const qc_file *root, const char *folder, qc_error *err)
{
    char holder[PATH_MAX];
    const char *leaf = NULL;
    int there = open_folder(root, folder, O_PATH);
    if (there >= 0) {
        (void)close(there);
        return QC_OK;
    }
    int at = errno == ENOENT ? open_holder(root, folder, &leaf) : -1;
    if (at < 0)
        return fail(err, root, folder, "could not be made");
    int made = mkdirat(at, leaf, 0777) == 0;
    close_quietly(at);
    if (!made && (errno != EEXIST || (there = open_folder(root, folder, O_PATH)) < 0))
        return fail(err, root, folder, "could not be made");
    close_quietly(there); /* another process made it */
    size_t n = leaf > folder ? (size_t)(leaf - folder) - 1 : 0;
    memcpy(holder, folder, n);
    holder[n] = '\0';
    return made ? sync_at(root, holder, 1, err) : QC_OK;
}

qc_status qc_beneath_make_folder(const qc_file *root, const char *folder, qc_error *err)
{
    char part[PATH_MAX];
    for (const char *p = folder; *p;) {
        p += strcspn(p, "/");
        size_t n = (size_t)(p - folder);
        if (n >= sizeof part) {
            errno = ENAMETOOLONG;
            return fail(err, root, folder, "could not be made");
        }
        memcpy(part, folder, n);
        part[n] = '\0';
        QC_TRY(make_one(root, part, err));
        p += *p == '/';
    }
    return QC_OK;
}

qc_status qc_beneath_rename(const qc_file *root, const char *from, const char *to, qc_error *err)
{
    const char *old = NULL, *new = NULL;
    int e = qc_io_fault(QC_IO_RENAME), source = -1, target = -1;
    if (!e) {
        source = open_holder(root, from, &old);
        target = source < 0 ? -1 : open_holder(root, to, &new);
        if (target < 0 || renameat(source, old, target, new) != 0)
            e = errno;
    }
    close_quietly(source);
    close_quietly(target);
    if (!e)
        return QC_OK;
    char what[64 + PATH_MAX];
    (void)snprintf(what, sizeof what, "could not be renamed to %.*s", PATH_MAX, to);
    errno = e;
    return fail(err, root, from, what);
}

qc_status qc_beneath_remove(const qc_file *root, const char *name, qc_error *err)
{
    const char *leaf = NULL;
    int at = open_holder(root, name, &leaf);
    int e = at >= 0 && unlinkat(at, leaf, 0) == 0 ? 0 : errno;
    close_quietly(at);
    if (e && e != ENOENT && (at >= 0 || (e != ELOOP && e != ENOTDIR)))
        return fail(err, root, name, "could not be removed");
    return QC_OK;
}

void qc_beneath_remove_empty(const qc_file *root, const char *name)
{
    char folder[PATH_MAX];
    size_t n = strlen(name);
    if (n >= sizeof folder)
        return;
    memcpy(folder, name, n + 1);
    for (char *slash = strrchr(folder, '/'); slash; slash = strrchr(folder, '/')) {
        const char *leaf = NULL;
        *slash = '\0';
        int at = open_holder(root, folder, &leaf);
        int gone = at >= 0 && unlinkat(at, leaf, AT_REMOVEDIR) == 0;
        close_quietly(at);
        if (!gone)
            return;
    }
}

/* ---- whole folders -------------------------------------------------------------------------- */

/* Returns NULL and sets errno on failure. Closing the list closes `at`. */
static DIR *list_folder(int at)
{
    DIR *dir = at < 0 ? NULL : fdopendir(at);
    if (!dir)
        close_quietly(at);
    return dir;
}

/* Returns the next entry except "." and ".."; NULL at the end, or on failure with errno. */
static const struct dirent *next_entry(DIR *dir)
{
    const struct dirent *e;
    do {
        errno = 0;
        e = readdir(dir);
    } while (e && (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0));
    return e;
}

qc_status qc_beneath_list(const qc_file *root, const char *folder, qc_beneath_fn see, void *ctx,
                          qc_error *err)
{
    DIR *dir = list_folder(open_folder(root, folder, O_RDONLY));
    if (!dir)
        return errno == ENOENT || errno == ELOOP || errno == ENOTDIR
                   ? QC_OK
                   : fail(err, root, folder, "cannot be listed");
    const struct dirent *e;
    qc_status st = QC_OK;
    while (st == QC_OK && (e = next_entry(dir)))
        st = see(ctx, e->d_name, err);
    if (st == QC_OK && errno)
        st = fail(err, root, folder, "cannot be listed");
    (void)closedir(dir);
    return st;
}

typedef struct {
    const qc_file *root;
    const char *folder;
    char *odd;
    qc_entry_kind *kind;
    int depth;
} odd_search;

static qc_status look_for_odd(void *ctx, const char *name, qc_error *err)
{
    const odd_search *s = ctx;
    char path[PATH_MAX];
    qc_entry e;
    int n = snprintf(path, sizeof path, "%s/%s", s->folder, name);
    if (*s->odd)
        return QC_OK;
    if (n < 0 || n >= PATH_MAX || s->depth == DEPTH_MAX)
        QC_FAIL(err, QC_ERR_IO, "%s/%s has folders that are too deep", s->root->path, s->folder);
    QC_TRY(qc_beneath_look(s->root, path, &e, err));
    if (e.kind == QC_ENTRY_FOLDER) {
        odd_search below = *s;
        below.folder = path;
        below.depth++;
        return qc_beneath_list(s->root, path, look_for_odd, &below, err);
    }
    if (e.kind == QC_ENTRY_LINK || e.kind == QC_ENTRY_OTHER) {
        memcpy(s->odd, path, (size_t)n + 1);
        *s->kind = e.kind;
    }
    return QC_OK;
}

qc_status qc_beneath_find_odd(const qc_file *root, const char *folder, char *odd,
                              qc_entry_kind *kind, qc_error *err)
{
    odd_search s = {root, folder, odd, kind, 0};
    *odd = '\0';
    *kind = QC_ENTRY_MISSING;
    return qc_beneath_list(root, folder, look_for_odd, &s, err);
}

/* at is the folder; it is closed. */
static void clear_at(int at, int (*stay)(const char *name), int depth)
{
    DIR *dir = list_folder(at);
    const struct dirent *e;
    while (dir && (e = next_entry(dir))) {
        int fd = dirfd(dir);
        if (stay && stay(e->d_name))
            continue;
        struct stat s;
        if (fstatat(fd, e->d_name, &s, AT_SYMLINK_NOFOLLOW) != 0)
            continue;
        if (!S_ISDIR(s.st_mode)) {
            (void)unlinkat(fd, e->d_name, 0);
        } else if (depth < DEPTH_MAX) {
            int below = openat(fd, e->d_name, FOLDER_FLAGS | O_RDONLY);
            clear_at(below, NULL, depth + 1);
            (void)unlinkat(fd, e->d_name, AT_REMOVEDIR);
        }
    }
    if (dir)
        (void)closedir(dir);
}

void qc_beneath_clear(const qc_file *root, const char *folder, int (*stay)(const char *name))
{
    const char *leaf = NULL;
    clear_at(open_folder(root, folder, O_RDONLY), stay, 0);
    int at = stay ? -1 : open_holder(root, folder, &leaf);
    if (at >= 0)
        (void)unlinkat(at, leaf, AT_REMOVEDIR);
    close_quietly(at);
}
