/* LD_PRELOAD: runs a shell command right before the N-th call of a kind, so that tests can change a
 * file, or kill the program, at exactly that moment.
 *
 *   AT_CALL=KIND:N   read, write, sync, rename, unlink; "any" is all of them
 *   AT_PATH=TEXT     only calls whose file's path contains it
 *   AT_RUN=COMMAND   run once; $PPID in it is the program
 *   AT_COUNT=FILE    instead of all that: the number of such calls is written there at the end
 *
 * Every thread's calls count. The command itself runs without this library. */
#undef _FILE_OFFSET_BITS /* both names of each function are defined here */
#undef _FORTIFY_SOURCE
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_ulong calls;

static int matches_kind(const char *kind)
{
    const char *want = getenv("AT_CALL");
    size_t n = want ? strcspn(want, ":") : 0;
    return n && ((n == 3 && strncmp(want, "any", 3) == 0) ||
                 (n == strlen(kind) && strncmp(want, kind, n) == 0));
}

static void run_command(const char *command)
{
    char text[4096];
    (void)snprintf(text, sizeof text, "unset LD_PRELOAD; %s", command);
    if (system(text) != 0)
        (void)fputs("at_call: the command failed\n", stderr);
}

static void at(const char *kind, const char *path)
{
    const char *part = getenv("AT_PATH"), *want = getenv("AT_CALL"), *command = getenv("AT_RUN");
    if (!matches_kind(kind) || (part && !strstr(path, part)))
        return;
    unsigned long mine = atomic_fetch_add(&calls, 1) + 1;
    const char *colon = strchr(want, ':');
    if (command && colon && mine == strtoul(colon + 1, NULL, 10))
        run_command(command);
}

static void at_fd(const char *kind, int fd)
{
    char link[64], path[PATH_MAX];
    (void)snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n < 0 ? 0 : n] = '\0';
    at(kind, path);
}

/* A name in a folder that is open. */
static void at_name(const char *kind, int folder, const char *name)
{
    char link[64], path[2 * PATH_MAX];
    (void)snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    n = n < 0 ? 0 : n;
    (void)snprintf(path + n, sizeof path - (size_t)n, "/%s", name);
    at(kind, path);
}

__attribute__((destructor)) static void tell(void)
{
    const char *name = getenv("AT_COUNT");
    FILE *f = name ? fopen(name, "w") : NULL;
    if (f) {
        (void)fprintf(f, "%lu\n", atomic_load(&calls));
        (void)fclose(f);
    }
}

#define SHOWN __attribute__((visibility("default")))

/* The next function of this name, once. */
#define NEXT(name)                                                                                 \
    static __typeof__(&name) next;                                                                 \
    if (!next)                                                                                     \
    *(void **)(&next) = dlsym(RTLD_NEXT, #name)

SHOWN ssize_t pread(int fd, void *buf, size_t n, off_t at_offset)
{
    NEXT(pread);
    at_fd("read", fd);
    return next(fd, buf, n, at_offset);
}

SHOWN ssize_t pread64(int fd, void *buf, size_t n, off64_t at_offset)
{
    NEXT(pread64);
    at_fd("read", fd);
    return next(fd, buf, n, at_offset);
}

SHOWN ssize_t preadv2(int fd, const struct iovec *v, int n, off_t at_offset, int flags)
{
    NEXT(preadv2);
    at_fd("read", fd);
    return next(fd, v, n, at_offset, flags);
}

SHOWN ssize_t preadv64v2(int fd, const struct iovec *v, int n, off64_t at_offset, int flags)
{
    NEXT(preadv64v2);
    at_fd("read", fd);
    return next(fd, v, n, at_offset, flags);
}

SHOWN ssize_t pwrite(int fd, const void *buf, size_t n, off_t at_offset)
{
    NEXT(pwrite);
    at_fd("write", fd);
    return next(fd, buf, n, at_offset);
}

SHOWN ssize_t pwrite64(int fd, const void *buf, size_t n, off64_t at_offset)
{
    NEXT(pwrite64);
    at_fd("write", fd);
    return next(fd, buf, n, at_offset);
}

SHOWN ssize_t pwritev2(int fd, const struct iovec *v, int n, off_t at_offset, int flags)
{
    NEXT(pwritev2);
    at_fd("write", fd);
    return next(fd, v, n, at_offset, flags);
}

SHOWN ssize_t pwritev64v2(int fd, const struct iovec *v, int n, off64_t at_offset, int flags)
{
    NEXT(pwritev64v2);
    at_fd("write", fd);
    return next(fd, v, n, at_offset, flags);
}

SHOWN int fsync(int fd)
{
    NEXT(fsync);
    at_fd("sync", fd);
    return next(fd);
}

SHOWN int fdatasync(int fd)
{
    NEXT(fdatasync);
    at_fd("sync", fd);
    return next(fd);
}

SHOWN int rename(const char *from, const char *to)
{
    NEXT(rename);
    at("rename", from);
    return next(from, to);
}

SHOWN int unlink(const char *path)
{
    NEXT(unlink);
    at("unlink", path);
    return next(path);
}

SHOWN int renameat(int from_at, const char *from, int to_at, const char *to)
{
    NEXT(renameat);
    at_name("rename", from_at, from);
    return next(from_at, from, to_at, to);
}

SHOWN int unlinkat(int folder, const char *path, int flags)
{
    NEXT(unlinkat);
    if (!(flags & AT_REMOVEDIR))
        at_name("unlink", folder, path);
    return next(folder, path, flags);
}
