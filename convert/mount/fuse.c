/* The kernel keeps what it has read, in its page cache and as names and sizes, since nothing ever
 * changes. As many threads serve requests as the kernel has requests for. */
#define _DEFAULT_SOURCE  /* realpath */
#define FUSE_USE_VERSION 32
#include "base/checked.h"
#include "base/workers.h"
#include "convert/mount/mount.h"

#include <dirent.h>
#include <errno.h>
#include <fuse.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FUSE_DEVICE   "/dev/fuse"
#define CACHE_SECONDS 1e9
#define NANO          1000000000
#define IDLE_THREADS  16
#define ADVICE                                                                                     \
    "; a container has to be started with --device " FUSE_DEVICE                                   \
    " --cap-add SYS_ADMIN, and 'qconv unpack' needs none of it"

/* ---- What the kernel asks -------------------------------------------------------------------- */

static qc_plain_files *files_here(void)
{
    return fuse_get_context()->private_data;
}

/* What follows in path behind a folder ("" is the root) and a slash, or NULL. */
static const char *below(const char *path, const char *folder)
{
    size_t n = strlen(folder);
    if (n == 0)
        return path;
    return strncmp(path, folder, n) == 0 && path[n] == '/' ? path + n + 1 : NULL;
}

static void *on_init(struct fuse_conn_info *conn, struct fuse_config *config)
{
    (void)conn;
    config->kernel_cache = 1;
    config->attr_timeout = config->entry_timeout = config->negative_timeout = CACHE_SECONDS;
    return files_here();
}

static int on_getattr(const char *path, struct stat *s, struct fuse_file_info *fi)
{
    qc_plain_files *files = files_here();
    (void)fi;
    *s = (struct stat){.st_nlink = 1, .st_uid = getuid(), .st_gid = getgid()};
    for (size_t i = 0; i < qc_plain_files_count(files); i++) {
        const qc_plain_file *f = qc_plain_files_at(files, i);
        const int same = strcmp(f->path, path + 1) == 0;
        if (!same && !below(f->path, path + 1))
            continue;
        /* A folder has the time of the first file in it. */
        s->st_mode = same ? S_IFREG | 0444 : S_IFDIR | 0555;
        s->st_size = same ? (off_t)f->bytes : 0;
        s->st_blocks = (s->st_size + 511) / 512;
        s->st_mtim.tv_sec = f->modified_ns / NANO;
        s->st_mtim.tv_nsec = f->modified_ns % NANO;
        s->st_atim = s->st_ctim = s->st_mtim;
        return 0;
    }
    return -ENOENT;
}

static int on_readdir(const char *path, void *buf, fuse_fill_dir_t fill, off_t offset,
                      struct fuse_file_info *fi, enum fuse_readdir_flags flags)
{
    qc_plain_files *files = files_here();
    (void)offset, (void)fi, (void)flags;
    if (fill(buf, ".", NULL, 0, 0) != 0 || fill(buf, "..", NULL, 0, 0) != 0)
        return -ENOMEM;
    for (size_t i = 0; i < qc_plain_files_count(files); i++) {
        const char *full = qc_plain_files_at(files, i)->path, *name = below(full, path + 1);
        char one[NAME_MAX + 1];
        int seen = 0;
        if (!name)
            continue;
        const size_t len = strcspn(name, "/"), end = (size_t)(name - full) + len + 1;
        for (size_t k = 0; k < i && !seen && name[len] == '/'; k++)
            seen = strncmp(qc_plain_files_at(files, k)->path, full, end) == 0;
        (void)snprintf(one, sizeof one, "%.*s", (int)len, name);
        if (!seen && fill(buf, one, NULL, 0, 0) != 0)
            return -ENOMEM;
    }
    return 0;
}

/* The kernel asks for no writing, because the mount is read-only. */
static int on_open(const char *path, struct fuse_file_info *fi)
{
    qc_plain_files *files = files_here();
    for (fi->fh = 0; fi->fh < qc_plain_files_count(files); fi->fh++)
        if (strcmp(qc_plain_files_at(files, fi->fh)->path, path + 1) == 0)
            return 0;
    return -ENOENT;
}

static int on_read(const char *path, char *buf, size_t len, off_t offset, struct fuse_file_info *fi)
{
    qc_plain_files *files = files_here();
    const uint64_t left = qc_sat_sub(qc_plain_files_at(files, fi->fh)->bytes, (uint64_t)offset);
    (void)path;
    len = (size_t)qc_min_u64(len, left);
    if (qc_plain_files_read(files, fi->fh, (uint64_t)offset, buf, len, NULL) != QC_OK)
        return -EIO;
    return (int)len;
}

/* ---- Mounting -------------------------------------------------------------------------------- */

/* The last thing that libfuse had to say, for a message in one line. */
static char said[256];

static void on_log(enum fuse_log_level level, const char *fmt, va_list args)
{
    (void)level;
    (void)vsnprintf(said, sizeof said, fmt, args);
    said[strcspn(said, "\n")] = '\0';
}

int qc_mount_is_built(void)
{
    return 1;
}

qc_status qc_mount_check(const char *dir, qc_error *err)
{
    size_t entries = 0;
    errno = 0;
    DIR *d = opendir(dir);
    for (; d && readdir(d); entries++)
        ;
    const int e = errno;
    if (d)
        (void)closedir(d);
    if (e == ENOTCONN)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s: an earlier mount is still here, but the process that served it is gone; end "
                "it with 'fusermount3 -u %s'",
                dir, dir);
    if (e != 0 || entries > 2) /* "." and ".." */
        QC_FAIL(err, QC_ERR_USAGE, "%s: expected an empty folder to mount on; %s", dir,
                e ? strerror(e) : "there is something in it");
    if (access(FUSE_DEVICE, R_OK | W_OK) != 0)
        QC_FAIL(err, QC_ERR_IO,
                "%s: nothing can be mounted, because there is no " FUSE_DEVICE
                " here that may be opened" ADVICE,
                dir);
    return QC_OK;
}

/* fsname, which df and mount show, gets OUT, whose commas would end it. */
static qc_status add_options(struct fuse_args *args, const qc_mount_options *o, qc_error *err)
{
    char name[PATH_MAX + 8];
    char *options = NULL;
    (void)snprintf(name, sizeof name, "fsname=%s", o->root);
    int failed = fuse_opt_add_opt(&options, "ro,nosuid,nodev,default_permissions,subtype=qconv") ||
                 (o->allow_other && fuse_opt_add_opt(&options, "allow_other")) ||
                 fuse_opt_add_opt_escaped(&options, name) || fuse_opt_add_arg(args, "qconv") ||
                 fuse_opt_add_arg(args, "-o") || fuse_opt_add_arg(args, options);
    free(options); /* libfuse allocated it */
    if (failed)
        QC_FAIL(err, QC_ERR_NOMEM, "there is not enough memory for the options of libfuse");
    return QC_OK;
}

/* libfuse sets its handlers only where there is none. What is ignored stays ignored. */
static int set_handlers(struct fuse_session *session)
{
    static const int stops[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction old;
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++)
        if (sigaction(stops[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
            (void)signal(stops[i], SIG_DFL);
    return fuse_set_signal_handlers(session);
}

/* Threads do not survive the fork of fuse_daemonize, so they start after it. */
static qc_status serve(struct fuse *fuse, const qc_mount_options *o, const char *dir,
                       unsigned threads, qc_error *err)
{
    struct fuse_loop_config loop = {.clone_fd = 0, .max_idle_threads = IDLE_THREADS};
    if (fuse_daemonize(o->foreground) != 0)
        QC_FAIL(err, QC_ERR_IO, "%s: the process that serves it could not be started: %s", dir,
                strerror(errno));
    QC_TRY(qc_plain_files_start(o->files, o->memory_bytes, threads, err));
    QC_TRY(qc_check_interrupted(err)); /* before libfuse's handlers are there */
    if (set_handlers(fuse_get_session(fuse)) != 0 || fuse_loop_mt(fuse, &loop) < 0)
        QC_FAIL(err, QC_ERR_IO, "%s: serving it failed: %s", dir, said);
    fuse_remove_signal_handlers(fuse_get_session(fuse));
    return QC_OK;
}

qc_status qc_mount_serve(const qc_mount_options *o, const char *dir, unsigned threads,
                         qc_status (*mounted)(void *ctx, qc_error *err), void *ctx, qc_error *err)
{
    static const struct fuse_operations operations = {.init = on_init,
                                                      .getattr = on_getattr,
                                                      .readdir = on_readdir,
                                                      .open = on_open,
                                                      .read = on_read};
    struct fuse_args args = FUSE_ARGS_INIT(0, NULL);
    struct fuse *fuse = NULL;
    char absolute[PATH_MAX]; /* because fuse_daemonize goes to another folder */
    fuse_set_log_func(on_log);
    qc_status st = add_options(&args, o, err);
    if (st == QC_OK) {
        fuse = fuse_new(&args, &operations, sizeof operations, o->files);
        if (!fuse || !realpath(dir, absolute) || fuse_mount(fuse, absolute) != 0) {
            st = QC_ERROR(err, QC_ERR_IO, "%s could not be mounted: %s" ADVICE, dir, said);
        } else {
            st = mounted(ctx, err);
            if (st == QC_OK)
                st = serve(fuse, o, dir, threads, err);
            fuse_unmount(fuse);
        }
    }
    if (fuse)
        fuse_destroy(fuse);
    fuse_opt_free_args(&args);
    return st;
}
