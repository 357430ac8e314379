#define _GNU_SOURCE /* sync_file_range, strerror_r that returns the text */
#include "formats/file_io.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/text.h"
#include "base/workers.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define READ_STEP_BYTES  (1u << 20)
#define HANDLES_USUAL    200u
#define HINT_STEP_BYTES  (512u << 10)
#define WRITE_OUT_BYTES  ((off_t)4 << 20)
#define WRITE_OUT_PASSES 16
#define WRITE_OUT_QUICK  250000000u /* ns for a pass over pages of which nearly all are clean */

/* ---- Faults on request ---------------------------------------------------------------------- */

typedef struct {
    atomic_uint_fast64_t tried;
    atomic_uint_fast64_t fail_from;
    atomic_int persistent;
    atomic_int error;
} fault;

static fault faults[QC_IO_KIND_COUNT];

void qc_io_fail_at(qc_io_kind kind, uint64_t n, int persistent, int e)
{
    fault *f = &faults[kind];
    atomic_store(&f->tried, 0);
    atomic_store(&f->persistent, persistent);
    atomic_store(&f->error, e);
    atomic_store(&f->fail_from, n);
}

uint64_t qc_io_count(qc_io_kind kind)
{
    return atomic_load(&faults[kind].tried);
}

int qc_io_fault(qc_io_kind kind)
{
    fault *f = &faults[kind];
    uint64_t mine = atomic_fetch_add(&f->tried, 1) + 1;
    uint64_t from = atomic_load(&f->fail_from);
    if (from == 0 || mine < from || (mine > from && !atomic_load(&f->persistent)))
        return 0;
    return atomic_load(&f->error);
}

/* ---- Errors --------------------------------------------------------------------------------- */

static qc_status status_of(int e)
{
    return e == ENOSPC || e == EDQUOT || e == EFBIG ? QC_ERR_NOSPACE
           : e == ENOMEM                            ? QC_ERR_NOMEM
                                                    : QC_ERR_IO;
}

/* GNU's strerror_r: returns the text, which is in buf or constant. */
static const char *reason(int e, char *buf, size_t cap)
{
    return strerror_r(e, buf, cap);
}

static qc_status fail_errno(qc_error *err, int line, int e, const char *path, const char *what)
{
    char buf[128];
    return qc_error_set(err, status_of(e), __FILE__, line, "%s %s: %s", path, what,
                        reason(e, buf, sizeof buf));
}

#define FAIL_ERRNO(err, e, path, what) return fail_errno((err), __LINE__, (e), (path), (what))

/* ---- Files ---------------------------------------------------------------------------------- */

static qc_status open_fd(qc_file *f, const char *path, int flags, const char *what, qc_error *err)
{
    char *copy = NULL;
    *f = QC_FILE_CLOSED;
    QC_TRY(qc_strdup(&copy, path, err));
    int fd;
    do {
        fd = open(path, flags | O_CLOEXEC, 0666);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) {
        int e = errno;
        qc_free(copy);
        FAIL_ERRNO(err, e, path, what);
    }
    f->fd = fd;
    f->path = copy;
    return QC_OK;
}

qc_status qc_file_open_read(qc_file *f, const char *path, qc_error *err)
{
    /* O_NONBLOCK: a pipe without a writer must be refused, not waited for. */
    QC_TRY(open_fd(f, path, O_RDONLY | O_NONBLOCK, "cannot be opened", err));
    struct stat s;
    if (fstat(f->fd, &s) != 0) {
        int e = errno;
        qc_file_discard(f);
        FAIL_ERRNO(err, e, path, "cannot be examined");
    }
    if (!S_ISREG(s.st_mode)) {
        qc_file_discard(f);
        QC_FAIL(err, QC_ERR_INPUT, "%s: expected a regular file, found a %s", path,
                S_ISDIR(s.st_mode) ? "directory" : "pipe or device");
    }
    return QC_OK;
}

void qc_file_allow_many(size_t files)
{
    struct rlimit lim;
    if (files <= HANDLES_USUAL || getrlimit(RLIMIT_NOFILE, &lim) != 0)
        return;
    lim.rlim_cur = lim.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &lim); /* if this fails, opening says what is wrong */
}

qc_status qc_file_create(qc_file *f, const char *path, qc_error *err)
{
    return open_fd(f, path, O_RDWR | O_CREAT | O_TRUNC | O_NOFOLLOW, "cannot be created", err);
}

qc_status qc_file_open_update(qc_file *f, const char *path, qc_error *err)
{
    return open_fd(f, path, O_RDWR | O_CREAT | O_NOFOLLOW, "cannot be opened for writing", err);
}

void qc_file_discard(qc_file *f)
{
    if (f->fd >= 0)
        (void)close(f->fd);
    qc_free(f->path);
    *f = QC_FILE_CLOSED;
}

qc_status qc_file_close(qc_file *f, qc_error *err)
{
    qc_status st = QC_OK;
    /* After EINTR Linux has closed the descriptor all the same: never close twice. */
    if (f->fd >= 0 && close(f->fd) != 0 && errno != EINTR)
        st = fail_errno(err, __LINE__, errno, f->path, "could not be closed");
    f->fd = -1;
    qc_file_discard(f);
    return st;
}

qc_status qc_file_size(const qc_file *f, uint64_t *bytes, qc_error *err)
{
    struct stat s;
    if (fstat(f->fd, &s) != 0)
        FAIL_ERRNO(err, errno, f->path, "cannot be examined");
    *bytes = (uint64_t)s.st_size;
    return QC_OK;
}

static int range_fits(uint64_t offset, size_t len)
{
    return offset <= INT64_MAX && len <= INT64_MAX - offset;
}

qc_status qc_file_pread(const qc_file *f, void *dst, size_t len, uint64_t offset, qc_error *err)
{
    size_t done = 0;
    int e = qc_io_fault(QC_IO_READ);
    if (e)
        FAIL_ERRNO(err, e, f->path, "cannot be read");
    if (!range_fits(offset, len))
        QC_FAIL(err, QC_ERR_INPUT, "%s: offset %" PRIu64 " is beyond any file", f->path, offset);
    while (done < len) {
        ssize_t n = pread(f->fd, (unsigned char *)dst + done, len - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            FAIL_ERRNO(err, errno, f->path, "cannot be read");
        if (n == 0)
            QC_FAIL(err, QC_ERR_TRUNCATED,
                    "%s ends too early: %zu of %zu bytes at offset %" PRIu64 " are missing",
                    f->path, len - done, len, offset);
        done += (size_t)n;
    }
    return QC_OK;
}

static qc_status fail_write(const qc_file *f, int e, size_t done, size_t len, qc_error *err)
{
    char buf[128];
    QC_FAIL(err, status_of(e), "%s: %zu of %zu bytes could not be written: %s", f->path, len - done,
            len, reason(e, buf, sizeof buf));
}

qc_status qc_file_pwrite(const qc_file *f, const void *src, size_t len, uint64_t offset,
                         qc_error *err)
{
    size_t done = 0;
    int e = qc_io_fault(QC_IO_WRITE);
    size_t stop = e ? len / 2 : len;
    if (!range_fits(offset, len))
        QC_FAIL(err, QC_ERR_NOSPACE, "%s: offset %" PRIu64 " is beyond any file", f->path, offset);
    while (done < stop) {
        ssize_t n =
            pwrite(f->fd, (const unsigned char *)src + done, stop - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fail_write(f, errno, done, len, err);
        if (n == 0) /* cannot happen for regular files, but must not loop forever */
            return fail_write(f, EIO, done, len, err);
        done += (size_t)n;
    }
    return e ? fail_write(f, e, done, len, err) : QC_OK;
}

static qc_status sync_by(int (*sync)(int), const qc_file *f, qc_error *err)
{
    int e = qc_io_fault(QC_IO_SYNC);
    if (!e) {
        int r;
        do {
            r = sync(f->fd);
        } while (r != 0 && errno == EINTR);
        e = r != 0 ? errno : 0;
    }
    if (e && e != EINVAL) { /* EINVAL: a file system that cannot sync this kind of file */
        /* Linux marks pages clean that it failed to write. Whoever reads them back must see the
         * disk, not what should be on it. */
        (void)posix_fadvise(f->fd, 0, 0, POSIX_FADV_DONTNEED);
        FAIL_ERRNO(err, e, f->path, "could not be brought to the disk");
    }
    return QC_OK;
}

qc_status qc_file_sync(const qc_file *f, qc_error *err)
{
    return sync_by(fsync, f, err);
}

qc_status qc_file_sync_data(const qc_file *f, qc_error *err)
{
    return sync_by(fdatasync, f, err);
}

/* A failed write is reported to each open file once, by whichever call waits first, which may be
 * this one. */
static qc_status write_out_once(const qc_file *f, qc_error *err)
{
    uint64_t bytes = 0;
    QC_TRY(qc_file_size(f, &bytes, err));
    for (uint64_t at = 0; at < bytes; at += (uint64_t)WRITE_OUT_BYTES) {
        QC_TRY(qc_check_interrupted(err));
        if (sync_file_range(f->fd, (off_t)at, WRITE_OUT_BYTES,
                            SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                                SYNC_FILE_RANGE_WAIT_AFTER) != 0 &&
            (errno == EIO || errno == ENOSPC || errno == EDQUOT)) {
            int e = errno;
            (void)posix_fadvise(f->fd, 0, 0, POSIX_FADV_DONTNEED);
            FAIL_ERRNO(err, e, f->path, "could not be brought to the disk");
        }
    }
    return QC_OK;
}

qc_status qc_file_write_out(const qc_file *f, qc_error *err)
{
    /* Others go on writing. The last call cannot be interrupted, so it should find little that is
     * dirty: where a pass took long, another one goes before it. */
    for (unsigned pass = 0; pass < WRITE_OUT_PASSES; pass++) {
        uint64_t begin = qc_clock_ns();
        QC_TRY(write_out_once(f, err));
        if (qc_clock_ns() - begin < WRITE_OUT_QUICK)
            break;
    }
    return qc_file_sync_data(f, err);
}

qc_status qc_file_resize(const qc_file *f, uint64_t bytes, qc_error *err)
{
    int r;
    if (bytes > INT64_MAX)
        QC_FAIL(err, QC_ERR_NOSPACE, "%s: %" PRIu64 " bytes are beyond any file", f->path, bytes);
    do {
        r = ftruncate(f->fd, (off_t)bytes);
    } while (r != 0 && errno == EINTR);
    if (r != 0)
        FAIL_ERRNO(err, errno, f->path, "could not be given its size");
    return QC_OK;
}

void qc_file_hint_read_soon(const qc_file *f, uint64_t offset, uint64_t len)
{
    if (offset > INT64_MAX || len > INT64_MAX - offset)
        return;
    /* For one hint the kernel reads no more than the device takes in one request. */
    for (uint64_t done = 0; done < len; done += HINT_STEP_BYTES) {
        uint64_t n = qc_min_u64(len - done, HINT_STEP_BYTES);
        if (posix_fadvise(f->fd, (off_t)(offset + done), (off_t)n, POSIX_FADV_WILLNEED) != 0)
            return;
    }
}

void qc_file_hint_guess(const qc_file *f, int guess)
{
    (void)posix_fadvise(f->fd, 0, 0, guess ? POSIX_FADV_NORMAL : POSIX_FADV_RANDOM);
}

static uint64_t page_bytes(void)
{
    long n = sysconf(_SC_PAGESIZE);
    return n > 0 ? (uint64_t)n : 4096;
}

void qc_file_hint_done(const qc_file *f, uint64_t offset, uint64_t len)
{
    uint64_t before = offset % page_bytes();
    if (offset > INT64_MAX || len > INT64_MAX - offset)
        return;
    (void)posix_fadvise(f->fd, (off_t)(offset - before), (off_t)(len ? len + before : 0),
                        POSIX_FADV_DONTNEED);
}

/* include/uapi/linux/mman.h; the number is that of all architectures that Debian has. */
#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif
typedef struct {
    uint64_t offset, len;
} cachestat_range;
typedef struct {
    uint64_t cached, dirty, writeback, evicted, recently_evicted;
} cachestat_result;

/* Returns 1 or 0, or -1 where the system has no reads that do not wait. */
static int byte_is_cached(const qc_file *f, uint64_t offset)
{
    char byte;
    struct iovec to = {&byte, 1};
    ssize_t n = preadv2(f->fd, &to, 1, (off_t)offset, RWF_NOWAIT);
    return n >= 0 ? 1 : errno == EAGAIN ? 0 : -1;
}

int qc_file_is_uncached(const qc_file *f, uint64_t offset, uint64_t len)
{
    uint64_t page = page_bytes();
    if (len == 0 || offset > INT64_MAX - page || len > INT64_MAX - page - offset)
        return 0;
    uint64_t begin = offset + (page - offset % page) % page, end = offset + len;
    end -= end % page;
    if (begin >= end) { /* no whole page */
        begin = offset;
        end = offset + len;
    }
    /* The kernel does not say it before 6.5, nor of a file that is neither ours nor writable. */
    cachestat_range range = {begin, end - begin};
    cachestat_result result = {0};
    if (syscall(SYS_cachestat, f->fd, &range, &result, 0) == 0)
        return result.cached == 0;
    return byte_is_cached(f, begin) == 0 && byte_is_cached(f, begin + (end - begin) / 2) == 0 &&
           byte_is_cached(f, end - 1) == 0;
}

void qc_file_hint_write_back(const qc_file *f, uint64_t offset, uint64_t len)
{
    if (offset <= INT64_MAX && len <= INT64_MAX)
        (void)sync_file_range(f->fd, (off_t)offset, (off_t)len, SYNC_FILE_RANGE_WRITE);
}

/* ---- Whole files ---------------------------------------------------------------------------- */

static qc_status read_all(const qc_file *f, uint64_t bytes, qc_file_taker take, void *ctx,
                          qc_error *err)
{
    void *buf = NULL;
    qc_status st = qc_malloc(&buf, READ_STEP_BYTES, err);
    for (uint64_t at = 0; st == QC_OK && at < bytes; at += READ_STEP_BYTES) {
        size_t len = bytes - at < READ_STEP_BYTES ? (size_t)(bytes - at) : READ_STEP_BYTES;
        st = qc_file_pread(f, buf, len, at, err);
        if (st == QC_OK)
            st = take(ctx, buf, len, err);
    }
    qc_free(buf);
    return st;
}

qc_status qc_file_read_through(const char *path, qc_file_taker take, void *ctx, qc_error *err)
{
    qc_file f = QC_FILE_CLOSED;
    uint64_t bytes = 0;
    QC_TRY(qc_file_open_read(&f, path, err));
    qc_status st = qc_file_size(&f, &bytes, err);
    if (st == QC_OK)
        st = read_all(&f, bytes, take, ctx, err);
    qc_file_discard(&f);
    return st;
}

static qc_status take_text(void *ctx, const void *bytes, size_t len, qc_error *err)
{
    return qc_strbuf_add(ctx, bytes, len, err);
}

qc_status qc_file_slurp(const char *path, qc_strbuf *out, qc_error *err)
{
    qc_file f = QC_FILE_CLOSED;
    const size_t before = out->len, room = out->max - before;
    uint64_t bytes = 0;
    QC_TRY(qc_file_open_read(&f, path, err));
    qc_status st = qc_file_size(&f, &bytes, err);
    if (st == QC_OK && bytes > room)
        st = QC_ERROR(err, QC_ERR_INPUT, "%s has %" PRIu64 " bytes; at most %zu are read", path,
                      bytes, room);
    if (st == QC_OK)
        st = qc_strbuf_add(out, "", 0, err); /* an empty file is an empty text */
    if (st == QC_OK)
        st = read_all(&f, bytes, take_text, out, err);
    if (st != QC_OK && out->data) {
        out->len = before;
        out->data[before] = '\0';
    }
    qc_file_discard(&f);
    return st;
}

/* A folder that may be entered but not read cannot be synced. */
static qc_status sync_holder(const char *path, int may_lack_rights, qc_error *err)
{
    char room[PATH_MAX];
    const char *folder = qc_folder_of(room, path);
    if (!folder)
        FAIL_ERRNO(err, ENAMETOOLONG, path, "cannot be opened");
    return may_lack_rights && access(folder, R_OK) != 0 ? QC_OK : qc_dir_sync(folder, err);
}

qc_status qc_dir_sync_holder(const char *path, qc_error *err)
{
    return sync_holder(path, 0, err);
}

/* ---- Paths ---------------------------------------------------------------------------------- */

qc_status qc_path_rename(const char *from, const char *to, qc_error *err)
{
    int e = qc_io_fault(QC_IO_RENAME);
    if (!e && rename(from, to) != 0)
        e = errno;
    if (e) {
        char buf[128];
        QC_FAIL(err, status_of(e), "%s could not be renamed to %s: %s", from, to,
                reason(e, buf, sizeof buf));
    }
    return QC_OK;
}

qc_status qc_path_remove(const char *path, qc_error *err)
{
    if (unlink(path) != 0 && errno != ENOENT)
        FAIL_ERRNO(err, errno, path, "could not be removed");
    return QC_OK;
}

static qc_status make_one(const char *path, qc_error *err)
{
    if (mkdir(path, 0777) == 0)
        return sync_holder(path, 1, err); /* so that its name survives a crash too */
    int e = errno;
    struct stat s;
    if (stat(path, &s) == 0 && S_ISDIR(s.st_mode))
        return QC_OK;
    FAIL_ERRNO(err, e, path, "could not be made");
}

qc_status qc_dir_make(const char *path, qc_error *err)
{
    char *copy = NULL;
    qc_status st = QC_OK;
    QC_TRY(qc_strdup(&copy, path, err));
    for (char *p = copy; *p && st == QC_OK; p++) {
        if (*p != '/' || p == copy || p[-1] == '/')
            continue;
        *p = '\0';
        st = make_one(copy, err);
        *p = '/';
    }
    size_t len = strlen(copy);
    while (len > 1 && copy[len - 1] == '/')
        copy[--len] = '\0';
    if (st == QC_OK)
        st = make_one(copy, err);
    qc_free(copy);
    return st;
}

qc_status qc_dir_sync(const char *path, qc_error *err)
{
    qc_file f = QC_FILE_CLOSED;
    QC_TRY(open_fd(&f, path, O_RDONLY | O_DIRECTORY, "cannot be opened", err));
    qc_status st = qc_file_sync(&f, err);
    qc_file_discard(&f);
    return st;
}

qc_status qc_path_stat(const char *path, qc_path_kind *kind, uint64_t *bytes, qc_error *err)
{
    struct stat s;
    *kind = QC_PATH_MISSING;
    if (bytes)
        *bytes = 0;
    if (stat(path, &s) != 0) {
        if (errno == ENOENT || errno == ENOTDIR)
            return QC_OK;
        FAIL_ERRNO(err, errno, path, "cannot be examined");
    }
    if (S_ISDIR(s.st_mode)) {
        *kind = QC_PATH_DIR;
    } else if (S_ISREG(s.st_mode)) {
        *kind = QC_PATH_FILE;
        if (bytes)
            *bytes = (uint64_t)s.st_size;
    } else {
        *kind = QC_PATH_OTHER;
    }
    return QC_OK;
}

qc_status qc_path_join(qc_arena *a, const char **out, const char *dir, const char *name,
                       qc_error *err)
{
    size_t n = strlen(dir);
    while (n > 0 && dir[n - 1] == '/')
        n--;
    while (*name == '/')
        name++;
    if (n == 0 && *dir != '/')
        return qc_arena_strdup(a, out, name, err);
    return qc_arena_printf(a, out, err, "%.*s/%s", (int)n, dir, name);
}

/* ---- Trees ---------------------------------------------------------------------------------- */

/* Only one folder is open at a time: folders that were found wait in a list, so depth costs no
 * descriptors. */
typedef struct {
    qc_arena *arena;
    const char *root;
    size_t max_files;
    qc_tree_file *files;
    size_t file_count, file_cap;
    const char **folders; /* relative to root; "" is the root itself */
    size_t folder_count, folder_cap;
} tree_walk;

/* list is the address of a typed pointer. */
static qc_status grow(void *list, size_t count, size_t *cap, size_t bytes_each, qc_error *err)
{
    if (count < *cap)
        return QC_OK;
    size_t want = *cap ? *cap * 2 : 64;
    QC_TRY((qc_realloc_array)(list, want, bytes_each, err));
    *cap = want;
    return QC_OK;
}

static qc_status add_folder(tree_walk *w, const char *path, qc_error *err)
{
    QC_TRY(grow(&w->folders, w->folder_count, &w->folder_cap, sizeof *w->folders, err));
    w->folders[w->folder_count++] = path;
    return QC_OK;
}

static qc_status add_entry(tree_walk *w, int fd, const char *folder, const char *name,
                           qc_error *err)
{
    struct stat s;
    const char *path = NULL;
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        return QC_OK;
    if (*folder)
        QC_TRY(qc_arena_printf(w->arena, &path, err, "%s/%s", folder, name));
    else
        QC_TRY(qc_arena_strdup(w->arena, &path, name, err));
    if (fstatat(fd, name, &s, AT_SYMLINK_NOFOLLOW) != 0)
        FAIL_ERRNO(err, errno, path, "cannot be examined");
    if (S_ISDIR(s.st_mode))
        return name[0] == '.' ? QC_OK : add_folder(w, path, err);
    if (S_ISLNK(s.st_mode) && fstatat(fd, name, &s, 0) != 0) {
        if (errno == ENOENT)
            QC_FAIL(err, QC_ERR_INPUT, "%s/%s is a link to a file that does not exist", w->root,
                    path);
        FAIL_ERRNO(err, errno, path, "cannot be examined");
    }
    if (!S_ISREG(s.st_mode))
        return QC_OK;
    if (w->file_count == w->max_files)
        QC_FAIL(err, QC_ERR_INPUT, "%s holds more than %zu files", w->root, w->max_files);
    QC_TRY(grow(&w->files, w->file_count, &w->file_cap, sizeof *w->files, err));
    w->files[w->file_count++] = (qc_tree_file){path, (uint64_t)s.st_size};
    return QC_OK;
}

static qc_status walk_folder(tree_walk *w, const char *folder, qc_error *err)
{
    const char *path = NULL;
    QC_TRY(qc_path_join(w->arena, &path, w->root, folder, err));
    DIR *d = opendir(path);
    if (!d)
        FAIL_ERRNO(err, errno, path, "cannot be opened");
    qc_status st = QC_OK;
    while (st == QC_OK) {
        errno = 0;
        const struct dirent *e = readdir(d);
        if (!e) {
            if (errno)
                st = fail_errno(err, __LINE__, errno, path, "cannot be read");
            break;
        }
        st = add_entry(w, dirfd(d), folder, e->d_name, err);
    }
    (void)closedir(d);
    return st;
}

qc_status qc_dir_tree(qc_arena *a, const char *dir, size_t max_files, qc_tree_file **files,
                      size_t *count, qc_error *err)
{
    tree_walk w = {.arena = a, .root = dir, .max_files = max_files};
    void *v = NULL;
    *files = NULL;
    *count = 0;
    qc_status st = add_folder(&w, "", err);
    while (st == QC_OK && w.folder_count > 0)
        st = walk_folder(&w, w.folders[--w.folder_count], err);
    if (st == QC_OK)
        st = qc_arena_alloc(a, &v, w.file_count, sizeof *w.files, err);
    if (st == QC_OK) {
        if (w.file_count) {
            memcpy(v, w.files, w.file_count * sizeof *w.files);
            qsort(v, w.file_count, sizeof *w.files, qc_by_text);
        }
        *files = v;
        *count = w.file_count;
    }
    qc_free(w.files);
    qc_free(w.folders);
    return st;
}

qc_status qc_dir_free_bytes(const char *path, uint64_t *bytes, qc_error *err)
{
    struct statvfs v;
    if (statvfs(path, &v) != 0)
        QC_FAIL(err, QC_ERR_IO, "%s: free space cannot be read: %s", path, strerror(errno));
    if (v.f_blocks == 0 || qc_mul_u64((uint64_t)v.f_bavail, (uint64_t)v.f_frsize, bytes))
        *bytes = UINT64_MAX;
    return QC_OK;
}
