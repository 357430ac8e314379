/* Shows a made-up checkpoint as a folder, by FUSE, so that nothing lies on a disk. As many threads
 * serve requests as the kernel has requests for. */
#define FUSE_USE_VERSION 32
#include "bench/synthetic_model.h"

#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <string.h>
#include <sys/stat.h>

#define CACHE_SECONDS 1e9 /* nothing ever changes */
#define FILE_TIME     1700000000
#define REQUEST_BYTES 1048576 /* the most that the kernel allows */
#define TEXT(n)       TEXT_OF(n)
#define TEXT_OF(n)    #n
#define OPTIONS       "ro,fsname=bench_model,max_read=" TEXT(REQUEST_BYTES)

typedef struct {
    const qc_synth_model *model;
    int direct;
} mounted;

static const mounted *here(void)
{
    return fuse_get_context()->private_data;
}

static const qc_synth_file *find(const char *path)
{
    const qc_synth_model *m = here()->model;
    for (size_t i = 0; i < m->file_count; i++) {
        if (strcmp(path + 1, m->files[i].name) == 0)
            return &m->files[i];
    }
    return NULL;
}

static void *on_init(struct fuse_conn_info *conn, struct fuse_config *config)
{
    config->kernel_cache = 1;
    config->use_ino = 1;
    conn->max_read = REQUEST_BYTES;
    config->attr_timeout = CACHE_SECONDS;
    config->entry_timeout = CACHE_SECONDS;
    return fuse_get_context()->private_data;
}

static int on_getattr(const char *path, struct stat *s, struct fuse_file_info *fi)
{
    (void)fi;
    memset(s, 0, sizeof *s);
    s->st_mtime = s->st_ctime = s->st_atime = FILE_TIME;
    s->st_nlink = 1;
    s->st_ino = 1;
    if (strcmp(path, "/") == 0) {
        s->st_mode = S_IFDIR | 0555;
        s->st_nlink = 2;
        return 0;
    }
    const qc_synth_file *f = find(path);
    if (!f)
        return -ENOENT;
    s->st_mode = S_IFREG | 0444;
    s->st_ino = 2 + (ino_t)(f - here()->model->files);
    s->st_size = (off_t)f->bytes;
    s->st_blocks = (blkcnt_t)((f->bytes + 511) / 512);
    return 0;
}

static int on_readdir(const char *path, void *buf, fuse_fill_dir_t fill, off_t offset,
                      struct fuse_file_info *fi, enum fuse_readdir_flags flags)
{
    const qc_synth_model *m = here()->model;
    (void)path, (void)offset, (void)fi, (void)flags;
    for (size_t i = 0; i < m->file_count; i++) {
        if (fill(buf, m->files[i].name, NULL, 0, 0) != 0)
            return -ENOMEM;
    }
    return 0;
}

static int on_open(const char *path, struct fuse_file_info *fi)
{
    const qc_synth_file *f = find(path);
    if (!f)
        return -ENOENT;
    if ((fi->flags & O_ACCMODE) != O_RDONLY)
        return -EROFS;
    fi->fh = (uint64_t)(uintptr_t)f;
    fi->direct_io = here()->direct ? 1 : 0;
    fi->keep_cache = 1;
    return 0;
}

static int on_read(const char *path, char *buf, size_t len, off_t offset, struct fuse_file_info *fi)
{
    const qc_synth_file *f = (const qc_synth_file *)(uintptr_t)fi->fh;
    uint64_t at = (uint64_t)offset;
    (void)path;
    if (at >= f->bytes)
        return 0;
    if (len > f->bytes - at)
        len = (size_t)(f->bytes - at);
    qc_synth_read(f, at, buf, len);
    return (int)len;
}

qc_status qc_synth_mount(const qc_synth_model *m, const char *mount, int direct, qc_error *err)
{
    static const struct fuse_operations operations = {
        .init = on_init,
        .getattr = on_getattr,
        .readdir = on_readdir,
        .open = on_open,
        .read = on_read,
    };
    mounted state = {m, direct};
    struct fuse_args args = FUSE_ARGS_INIT(0, NULL);
    if (fuse_opt_add_arg(&args, "bench_model") != 0 || fuse_opt_add_arg(&args, "-o") != 0 ||
        fuse_opt_add_arg(&args, OPTIONS) != 0)
        QC_FAIL(err, QC_ERR_NOMEM, "out of memory");
    qc_status st = QC_OK;
    struct fuse *fuse = fuse_new(&args, &operations, sizeof operations, &state);
    if (!fuse || fuse_mount(fuse, mount) != 0) {
        st = qc_error_set(err, QC_ERR_IO, __FILE__, __LINE__, "%s: could not be mounted", mount);
    } else {
        struct fuse_session *session = fuse_get_session(fuse);
        struct fuse_loop_config config = {.clone_fd = 0, .max_idle_threads = 16};
        if (fuse_set_signal_handlers(session) != 0 || fuse_loop_mt(fuse, &config) < 0)
            st = qc_error_set(err, QC_ERR_IO, __FILE__, __LINE__, "%s: serving it failed", mount);
        fuse_remove_signal_handlers(session);
        fuse_unmount(fuse);
    }
    if (fuse)
        fuse_destroy(fuse);
    fuse_opt_free_args(&args);
    return st;
}
