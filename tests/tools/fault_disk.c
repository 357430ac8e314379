/* A disk that fails, for tests of the whole program: LD_PRELOAD this library. It stands in for the
 * calls of the C library that touch files, watches those below QC_FAULT_DIRS, and
 *
 *   QC_FAULT_FAIL=KIND:N:ERRNO[:on]  fails the N-th call of a kind (read write sync rename remove
 *                                    make open resize close range), every later one too with ":on";
 *                                    a write that fails for room has written half. Kind range:
 *                                    sync_file_range that waits, and what was not synced is gone,
 *                                    as in kind syncloss: the N-th sync
 *   QC_FAULT_ROOM=BYTES              takes so many bytes, then the disk is full
 *   QC_FAULT_SLOW=BYTES              reads and writes so many bytes a second, all threads together
 *   QC_FAULT_SIGNAL=N:SIGNAL         sends the process a signal after the N-th change of the disk
 *   QC_FAULT_POWER=N:SEED            at the N-th change the power goes: what was not synced is lost
 *                                    or half lost (fault_power.h), and the process is dead
 *   QC_FAULT_COUNTS=FILE             a u64 for each kind of call in the order above, then for
 *                                    changes: any of write, sync, rename, remove, make, resize.
 *                                    Kept up to date, so that they outlive the process
 *   QC_FAULT_READS=FILE              appends a line "INODE OFFSET BYTES" for each read below
 *                                    QC_FAULT_SOURCE, a folder that need not be watched
 *
 * QC_FAULT_DIRS: absolute, ':' between. QC_FAULT_ATTIC: an empty folder beside them, for POWER and
 * syncloss. Calls that change files in a way that is not modelled end the process with 99. One lock
 * is held over every call on a watched file. */
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE
#undef _FILE_OFFSET_BITS /* would give open and open64 one name; off_t has 64 bits here anyway */
#include "tests/tools/fault_power.h"
#include "tests/tools/fault_real.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MAX_FDS  65536
#define MAX_DIRS 8

typedef enum {
    OP_READ,
    OP_WRITE,
    OP_SYNC,
    OP_RENAME,
    OP_REMOVE,
    OP_MAKE, /* a file or folder comes to be */
    OP_OPEN,
    OP_RESIZE,
    OP_CLOSE,
    OP_RANGE,  /* sync_file_range that waits */
    OP_CHANGE, /* any that changes the disk */
    OP_COUNT
} op_kind;

static const char *const op_names[OP_COUNT] = {"read",   "write", "sync",  "rename",
                                               "remove", "make",  "open",  "resize",
                                               "close",  "range", "change"};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned char watched[MAX_FDS];
static char *dirs[MAX_DIRS];
static size_t dir_count;
static uint64_t own_counts[OP_COUNT], *counts = own_counts;
static op_kind fail_kind = OP_COUNT;
static uint64_t hurry_ns;
static uint64_t fail_at, room = UINT64_MAX, speed, signal_at, power_at;
static int fail_errno, fail_on, sync_loses, signal_number, tracking;
static char *source_dir;
static int reads_fd = -1;

void fault_die(const char *why)
{
    (void)fprintf(stderr, "fault_disk: %s\n", why);
    _exit(99);
}

int fault_real_open(const char *path, int flags, mode_t mode)
{
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

ssize_t fault_real_pread(int fd, void *dst, size_t len, uint64_t offset)
{
    return syscall(SYS_pread64, fd, dst, len, offset);
}

ssize_t fault_real_pwrite(int fd, const void *src, size_t len, uint64_t offset)
{
    return syscall(SYS_pwrite64, fd, src, len, offset);
}

int fault_real_unlink(const char *path)
{
    return (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}

int fault_real_rename(const char *from, const char *to)
{
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int fault_real_mkdir(const char *path, mode_t mode)
{
    return (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

/* ---- Settings ------------------------------------------------------------------------------- */

static uint64_t number(const char **text)
{
    char *end = NULL;
    uint64_t n = strtoull(*text, &end, 10);
    if (end == *text)
        fault_die("a number is missing in a setting");
    *text = *end == ':' ? end + 1 : end;
    return n;
}

static int errno_named(const char *name)
{
    static const struct {
        const char *name;
        int e;
    } known[] = {
        {"EIO", EIO}, {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT}, {"EACCES", EACCES}, {"EROFS", EROFS}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strncmp(name, known[i].name, strlen(known[i].name)) == 0)
            return known[i].e;
    fault_die("an unknown errno");
}

static void set_failure(const char *text)
{
    size_t n = strcspn(text, ":");
    sync_loses = n == 8 && strncmp(text, "syncloss", n) == 0;
    for (int k = 0; k < OP_CHANGE; k++)
        if (strlen(op_names[k]) == n && strncmp(text, op_names[k], n) == 0)
            fail_kind = (op_kind)k;
    if (sync_loses)
        fail_kind = OP_SYNC;
    if (fail_kind == OP_COUNT || text[n] != ':')
        fault_die("an unknown kind of call");
    text += n + 1;
    fail_at = number(&text);
    fail_errno = errno_named(text);
    fail_on = strstr(text, ":on") != NULL;
}

static void share_counts(const char *path)
{
    int fd = fault_real_open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0 || syscall(SYS_ftruncate, fd, (off_t)sizeof own_counts) != 0)
        fault_die("counts cannot be kept");
    counts = mmap(NULL, sizeof own_counts, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (counts == MAP_FAILED)
        fault_die("counts cannot be kept");
}

__attribute__((constructor)) static void begin(void)
{
    const char *text = getenv("QC_FAULT_DIRS");
    if (!text)
        return;
    char copy[MAX_DIRS * PATH_MAX], *save = NULL;
    (void)snprintf(copy, sizeof copy, "%s", text);
    for (char *d = strtok_r(copy, ":", &save); d && dir_count < MAX_DIRS;
         d = strtok_r(NULL, ":", &save))
        dirs[dir_count++] = realpath(d, NULL);
    if ((text = getenv("QC_FAULT_FAIL")))
        set_failure(text);
    if ((text = getenv("QC_FAULT_ROOM")))
        room = number(&text);
    if ((text = getenv("QC_FAULT_SLOW")))
        speed = number(&text);
    if ((text = getenv("QC_FAULT_HURRY")))
        hurry_ns = number(&text) * 1000000u;
    if ((text = getenv("QC_FAULT_SIGNAL"))) {
        signal_at = number(&text);
        signal_number = (int)number(&text);
    }
    uint64_t seed = 0;
    if ((text = getenv("QC_FAULT_POWER"))) {
        power_at = number(&text);
        seed = number(&text);
    }
    if ((text = getenv("QC_FAULT_COUNTS")))
        share_counts(text);
    if ((text = getenv("QC_FAULT_READS"))) {
        reads_fd = fault_real_open(text, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        source_dir = realpath(getenv("QC_FAULT_SOURCE"), NULL);
        if (reads_fd < 0 || !source_dir)
            fault_die("QC_FAULT_READS or QC_FAULT_SOURCE cannot be opened");
    }
    if ((text = getenv("QC_FAULT_ATTIC"))) {
        tracking = 1;
        power_begin(text, seed);
    } else if (power_at || sync_loses || fail_kind == OP_RANGE) {
        fault_die("QC_FAULT_ATTIC is missing");
    }
}

/* ---- What every call goes through ----------------------------------------------------------- */

static int is_below(const char *path)
{
    for (size_t i = 0; i < dir_count; i++) {
        size_t n = dirs[i] ? strlen(dirs[i]) : 0;
        if (n && strncmp(path, dirs[i], n) == 0 && (path[n] == '/' || path[n] == '\0'))
            return 1;
    }
    return 0;
}

/* The real path of a name that need not exist: its folder's and what is behind it. 0: none. */
static int real_name(const char *path, char *real)
{
    char folder[PATH_MAX];
    size_t len = strlen(path);
    while (len > 1 && path[len - 1] == '/')
        len--;
    size_t slash = len;
    while (slash > 0 && path[slash - 1] != '/')
        slash--;
    if (len == 0 || len >= sizeof folder || len - slash > NAME_MAX)
        return 0;
    memcpy(folder, slash ? path : ".", slash ? slash : 1);
    folder[slash ? slash : 1] = '\0';
    if (!realpath(folder, real))
        return 0;
    size_t n = strlen(real);
    if (n + 1 + len - slash >= PATH_MAX)
        return 0;
    if (n > 1)
        real[n++] = '/';
    memcpy(real + n, path + slash, len - slash);
    real[n + len - slash] = '\0';
    return 1;
}

/* The path of a name in a folder that is open; of the folder itself where the name is empty. */
static const char *path_at(int at, const char *name, char *path)
{
    char link[64];
    if (at == AT_FDCWD || *name == '/')
        return name;
    (void)snprintf(link, sizeof link, "/proc/self/fd/%d", at);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    if (n < 0 || (size_t)n + strlen(name) + 2 > PATH_MAX)
        fault_die("an open folder has no path");
    (void)snprintf(path + n, PATH_MAX - (size_t)n, "%s%s", *name ? "/" : "", name);
    return path;
}

static int is_watched(int fd)
{
    return fd >= 0 && fd < MAX_FDS && watched[fd] == 1;
}

static int is_source(int fd)
{
    return reads_fd >= 0 && fd >= 0 && fd < MAX_FDS && watched[fd] == 2;
}

static void note_read(int fd, uint64_t offset, uint64_t bytes)
{
    char line[96];
    struct stat st;
    if (fstat(fd, &st) != 0)
        fault_die("a source cannot be examined");
    int n = snprintf(line, sizeof line, "%llu %llu %llu\n", (unsigned long long)st.st_ino,
                     (unsigned long long)offset, (unsigned long long)bytes);
    if (syscall(SYS_write, reads_fd, line, (size_t)n) != n)
        fault_die("a read cannot be noted");
}

/* Counts a call; its errno if it is to fail. */
static int fails(op_kind kind)
{
    counts[kind]++;
    if (kind != fail_kind || counts[kind] < fail_at || (counts[kind] > fail_at && !fail_on))
        return 0;
    return fail_errno;
}

static void take_time(size_t bytes)
{
    if (!speed)
        return;
    uint64_t ns = (uint64_t)bytes * 1000000000u / speed;
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    (void)nanosleep(&t, NULL);
}

static void die_now(void)
{
    (void)kill(getpid(), SIGKILL);
    for (;;)
        (void)pause();
}

/* A change is about to happen. 1: it is the last one. */
static int before_change(void)
{
    return ++counts[OP_CHANGE] == power_at && power_at;
}

static void after_change(int last)
{
    if (last) {
        power_cut();
        die_now();
    }
    if (signal_at && counts[OP_CHANGE] == signal_at)
        (void)kill(getpid(), signal_number);
}

static int failed(int e)
{
    pthread_mutex_unlock(&lock);
    errno = e;
    return -1;
}

static ssize_t done(ssize_t result)
{
    int e = errno;
    pthread_mutex_unlock(&lock);
    errno = e;
    return result;
}

/* ---- Opening, closing ----------------------------------------------------------------------- */

static int open_watched(const char *path, const char *real, int flags, mode_t mode)
{
    struct stat st;
    int is_new = (flags & O_CREAT) && lstat(real, &st) != 0;
    int e = fails(OP_OPEN);
    if (!e && is_new)
        e = fails(OP_MAKE);
    if (e)
        return failed(e);
    if ((flags & O_TMPFILE) == O_TMPFILE)
        fault_die("files without a name are not modelled");
    int fd = fault_real_open(path, flags & ~O_TRUNC, mode);
    if (fd < 0)
        return (int)done(fd);
    if (fd >= MAX_FDS)
        fault_die("too many files");
    watched[fd] = 1;
    if (is_new) {
        int last = before_change();
        if (tracking)
            power_made(real, 0);
        after_change(last);
    } else if ((flags & O_TRUNC) && fstat(fd, &st) == 0 && st.st_size > 0) {
        int last = before_change();
        if (tracking)
            power_before_resize(fd, 0);
        (void)syscall(SYS_ftruncate, fd, (off_t)0);
        after_change(last);
    }
    return (int)done(fd);
}

static int open_any(const char *path, int flags, mode_t mode)
{
    char real[PATH_MAX], *target = NULL;
    if (dir_count == 0 || !real_name(path, real))
        return fault_real_open(path, flags, mode);
    if ((target = realpath(path, NULL))) { /* where a link leads to */
        (void)snprintf(real, sizeof real, "%s", target);
        free(target);
    }
    if (!is_below(real)) {
        int fd = fault_real_open(path, flags, mode);
        if (fd >= 0 && fd < MAX_FDS && source_dir &&
            strncmp(real, source_dir, strlen(source_dir)) == 0)
            watched[fd] = 2;
        return fd;
    }
    pthread_mutex_lock(&lock);
    return open_watched(path, real, flags, mode);
}

static mode_t mode_of(int flags, va_list args)
{
    return flags & (O_CREAT | O_TMPFILE) ? (mode_t)va_arg(args, int) : 0;
}

#define OPEN_BODY                                                                                  \
    va_list args;                                                                                  \
    va_start(args, flags);                                                                         \
    mode_t mode = mode_of(flags, args);                                                            \
    va_end(args);                                                                                  \
    return open_any(path, flags, mode);

int open(const char *path, int flags, ...)
{
    OPEN_BODY
}

int open64(const char *path, int flags, ...)
{
    OPEN_BODY
}

#define OPENAT_BODY                                                                                \
    va_list args;                                                                                  \
    va_start(args, flags);                                                                         \
    mode_t mode = mode_of(flags, args);                                                            \
    va_end(args);                                                                                  \
    if (at == AT_FDCWD || *path == '/')                                                            \
        return open_any(path, flags, mode);                                                        \
    if (is_watched(at) && (flags & O_ACCMODE) != O_RDONLY)                                         \
        fault_die("openat is not modelled");                                                       \
    return (int)syscall(SYS_openat, at, path, flags, mode);

int openat(int at, const char *path, int flags, ...)
{
    OPENAT_BODY
}

int openat64(int at, const char *path, int flags, ...)
{
    OPENAT_BODY
}

int close(int fd)
{
    if (!is_watched(fd)) {
        if (fd >= 0 && fd < MAX_FDS)
            watched[fd] = 0;
        return (int)syscall(SYS_close, fd);
    }
    pthread_mutex_lock(&lock);
    int e = fails(OP_CLOSE);
    watched[fd] = 0;
    int r = (int)syscall(SYS_close, fd);
    return e ? failed(e) : (int)done(r);
}

/* ---- Reading, writing ----------------------------------------------------------------------- */

static ssize_t read_any(int fd, const struct iovec *iov, int count, off_t offset, int flags)
{
    size_t len = 0;
    for (int i = 0; i < count; i++)
        len += iov[i].iov_len;
    if (is_source(fd) && offset >= 0 && !(flags & RWF_NOWAIT)) /* a look at the page cache */
        note_read(fd, (uint64_t)offset, len);
    if (!is_watched(fd))
        return offset < 0 ? syscall(SYS_readv, fd, iov, count)
                          : syscall(SYS_preadv2, fd, iov, count, offset, 0, flags);
    pthread_mutex_lock(&lock);
    int e = fails(OP_READ);
    if (e)
        return failed(e);
    take_time(len);
    (void)done(0);
    return offset < 0 ? syscall(SYS_readv, fd, iov, count)
                      : syscall(SYS_preadv2, fd, iov, count, offset, 0, flags);
}

static ssize_t write_watched(int fd, const struct iovec *iov, int count, off_t offset, int flags)
{
    size_t len = 0;
    ssize_t r;
    int e = fails(OP_WRITE), last;
    for (int i = 0; i < count; i++)
        len += iov[i].iov_len;
    if (offset < 0)
        offset = (off_t)syscall(SYS_lseek, fd, (off_t)0, SEEK_CUR);
    if (e && e != ENOSPC)
        return failed(e);
    take_time(len);
    size_t take = e ? len / 2 : len;
    take = take > room ? (size_t)room : take;
    if (take == 0 && len > 0)
        return failed(ENOSPC);
    last = before_change();
    if (tracking)
        power_before_write(fd, (uint64_t)offset, take);
    if (take == len)
        r = syscall(SYS_pwritev2, fd, iov, count, offset, 0, flags);
    else /* what there is room for, of the first piece */
        r = fault_real_pwrite(fd, iov[0].iov_base, take < iov[0].iov_len ? take : iov[0].iov_len,
                              (uint64_t)offset);
    if (r > 0 && room != UINT64_MAX)
        room -= (uint64_t)r;
    after_change(last);
    if (e)
        return failed(e);
    return done(r);
}

static ssize_t write_any(int fd, const struct iovec *iov, int count, off_t offset, int flags)
{
    if (!is_watched(fd))
        return offset < 0 ? syscall(SYS_writev, fd, iov, count)
                          : syscall(SYS_pwritev2, fd, iov, count, offset, 0, flags);
    pthread_mutex_lock(&lock);
    return write_watched(fd, iov, count, offset, flags);
}

ssize_t read(int fd, void *dst, size_t len)
{
    return read_any(fd, &(struct iovec){dst, len}, 1, -1, 0);
}

ssize_t pread(int fd, void *dst, size_t len, off_t offset)
{
    return read_any(fd, &(struct iovec){dst, len}, 1, offset, 0);
}

ssize_t pread64(int fd, void *dst, size_t len, off64_t offset)
{
    return read_any(fd, &(struct iovec){dst, len}, 1, offset, 0);
}

ssize_t preadv2(int fd, const struct iovec *iov, int count, off_t offset, int flags)
{
    return read_any(fd, iov, count, offset, flags);
}

ssize_t preadv64v2(int fd, const struct iovec *iov, int count, off64_t offset, int flags)
{
    return read_any(fd, iov, count, offset, flags);
}

ssize_t write(int fd, const void *src, size_t len)
{
    if (!is_watched(fd))
        return syscall(SYS_write, fd, src, len);
    fault_die("writing at a file's own position is not modelled");
}

ssize_t pwrite(int fd, const void *src, size_t len, off_t offset)
{
    if (!is_watched(fd))
        return fault_real_pwrite(fd, src, len, (uint64_t)offset);
    return write_any(fd, &(struct iovec){(void *)(uintptr_t)src, len}, 1, offset, 0);
}

ssize_t pwrite64(int fd, const void *src, size_t len, off64_t offset)
{
    return pwrite(fd, src, len, offset);
}

ssize_t pwritev2(int fd, const struct iovec *iov, int count, off_t offset, int flags)
{
    return write_any(fd, iov, count, offset, flags);
}

ssize_t pwritev64v2(int fd, const struct iovec *iov, int count, off64_t offset, int flags)
{
    return write_any(fd, iov, count, offset, flags);
}

int ftruncate(int fd, off_t size)
{
    if (!is_watched(fd))
        return (int)syscall(SYS_ftruncate, fd, size);
    pthread_mutex_lock(&lock);
    int e = fails(OP_RESIZE);
    if (e)
        return failed(e);
    int last = before_change();
    if (tracking)
        power_before_resize(fd, (uint64_t)size);
    int r = (int)syscall(SYS_ftruncate, fd, size);
    after_change(last);
    return (int)done(r);
}

int ftruncate64(int fd, off64_t size)
{
    return ftruncate(fd, size);
}

/* ---- Syncing -------------------------------------------------------------------------------- */

static void synced(int fd)
{
    char link[64], path[PATH_MAX];
    struct stat st;
    if (fstat(fd, &st) != 0)
        return;
    if (S_ISREG(st.st_mode)) {
        power_file_synced(fd);
        return;
    }
    (void)snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n > 0) {
        path[n] = '\0';
        power_folder_synced(path);
    }
}

/* A folder that was opened by openat2, which is no function of the C library. */
static int is_folder_below(int fd)
{
    char path[PATH_MAX];
    struct stat st;
    return dir_count > 0 && fstat(fd, &st) == 0 && S_ISDIR(st.st_mode) &&
           is_below(path_at(fd, "", path));
}

/* On a memory file system syncing costs nothing, elsewhere the model is all that counts: nothing
 * is brought to the disk in truth where the power is modelled. */
static int sync_any(int fd, long call)
{
    if (!is_watched(fd) && !is_folder_below(fd))
        return (int)syscall(call, fd);
    pthread_mutex_lock(&lock);
    int last = before_change();
    if (last)
        after_change(last);
    int e = fails(OP_SYNC);
    if (e) {
        struct stat st;
        if (sync_loses && fstat(fd, &st) == 0 && S_ISREG(st.st_mode))
            power_lose_file(fd);
        return failed(e);
    }
    if (tracking)
        synced(fd);
    else
        (void)syscall(call, fd);
    after_change(0);
    return (int)done(0);
}

int fsync(int fd)
{
    return sync_any(fd, SYS_fsync);
}

int fdatasync(int fd)
{
    return sync_any(fd, SYS_fdatasync);
}

/* Waiting for pages tells of those that could not be written, once: a later fsync says nothing. */
int sync_file_range(int fd, off64_t offset, off64_t len, unsigned flags)
{
    unsigned waits = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WAIT_AFTER;
    if (!is_watched(fd) || !(flags & waits))
        return (int)syscall(SYS_sync_file_range, fd, offset, len, flags);
    pthread_mutex_lock(&lock);
    int e = fails(OP_RANGE);
    if (!e)
        return (int)done(0); /* it makes nothing durable */
    power_lose_file(fd);
    return failed(e);
}

/* ---- Names ---------------------------------------------------------------------------------- */

int rename(const char *from, const char *to)
{
    char a[PATH_MAX], b[PATH_MAX];
    if (dir_count == 0 || !real_name(from, a) || !real_name(to, b) || !(is_below(a) || is_below(b)))
        return fault_real_rename(from, to);
    pthread_mutex_lock(&lock);
    int e = fails(OP_RENAME);
    if (e)
        return failed(e);
    int last = before_change();
    if (tracking)
        power_before_rename(a, b);
    int r = fault_real_rename(from, to), error = errno;
    if (r != 0 && tracking)
        power_undo_last_name();
    after_change(last);
    errno = error;
    return (int)done(r);
}

static int remove_any(const char *path, int folder)
{
    char real[PATH_MAX];
    struct stat st;
    long flag = folder ? AT_REMOVEDIR : 0;
    if (dir_count == 0 || !real_name(path, real) || !is_below(real) || lstat(real, &st) != 0)
        return (int)syscall(SYS_unlinkat, AT_FDCWD, path, flag);
    pthread_mutex_lock(&lock);
    int e = fails(OP_REMOVE);
    if (e)
        return failed(e);
    int last = before_change();
    if (tracking)
        power_before_remove(real, folder);
    int r = (int)syscall(SYS_unlinkat, AT_FDCWD, path, flag), error = errno;
    if (r != 0 && tracking)
        power_undo_last_name();
    after_change(last);
    errno = error;
    return (int)done(r);
}

int unlink(const char *path)
{
    return remove_any(path, 0);
}

int rmdir(const char *path)
{
    return remove_any(path, 1);
}

int mkdir(const char *path, mode_t mode)
{
    char real[PATH_MAX];
    struct stat st;
    if (dir_count == 0 || !real_name(path, real) || !is_below(real) || lstat(real, &st) == 0)
        return fault_real_mkdir(path, mode);
    pthread_mutex_lock(&lock);
    int e = fails(OP_MAKE);
    if (e)
        return failed(e);
    int last = before_change();
    int r = fault_real_mkdir(path, mode), error = errno;
    if (r == 0 && tracking)
        power_made(real, 1);
    after_change(last);
    errno = error;
    return (int)done(r);
}

int renameat(int a, const char *from, int b, const char *to)
{
    char old[PATH_MAX], new[PATH_MAX];
    return rename(path_at(a, from, old), path_at(b, to, new));
}

int unlinkat(int at, const char *path, int flags)
{
    char whole[PATH_MAX];
    return remove_any(path_at(at, path, whole), (flags & AT_REMOVEDIR) != 0);
}

int mkdirat(int at, const char *path, mode_t mode)
{
    char whole[PATH_MAX];
    return mkdir(path_at(at, path, whole), mode);
}

/* ---- Time ----------------------------------------------------------------------------------- */

int clock_gettime(clockid_t id, struct timespec *t)
{
    int r = (int)syscall(SYS_clock_gettime, id, t);
    if (r == 0 && id == CLOCK_REALTIME && hurry_ns) {
        uint64_t ns = (uint64_t)t->tv_sec * 1000000000u + (uint64_t)t->tv_nsec - hurry_ns;
        *t = (struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    }
    return r;
}

/* ---- Not modelled: the test must not pass because nobody looked ------------------------------ */

#define NOT_MODELLED(name, parameters)                                                             \
    __attribute__((noreturn)) int name parameters;                                                 \
    int name parameters                                                                            \
    {                                                                                              \
        fault_die(#name " is not modelled");                                                       \
    }

NOT_MODELLED(renameat2, (int a, const char *from, int b, const char *to, unsigned flags))
NOT_MODELLED(link, (const char *from, const char *to))
NOT_MODELLED(symlink, (const char *from, const char *to))
NOT_MODELLED(truncate, (const char *path, off_t size))
NOT_MODELLED(truncate64, (const char *path, off64_t size))
NOT_MODELLED(posix_fallocate, (int fd, off_t offset, off_t len))
NOT_MODELLED(posix_fallocate64, (int fd, off64_t offset, off64_t len))
