#include "formats/file_stamp.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

#define NS_PER_S 1000000000

static qc_status examine(struct stat *s, const qc_file *f, qc_error *err)
{
    if (fstat(f->fd, s) != 0)
        QC_FAIL(err, QC_ERR_IO, "%s cannot be examined: %s", f->path, strerror(errno));
    return QC_OK;
}

/* Saturates: times beyond 2262 make no sense, but must not be undefined behaviour. */
static int64_t modified_ns(const struct stat *s)
{
    int64_t ns = 0;
    if (__builtin_mul_overflow((int64_t)s->st_mtim.tv_sec, (int64_t)NS_PER_S, &ns) ||
        __builtin_add_overflow(ns, (int64_t)s->st_mtim.tv_nsec, &ns))
        return s->st_mtim.tv_sec < 0 ? INT64_MIN : INT64_MAX;
    return ns;
}

qc_status qc_file_stamp_take(qc_file_stamp *out, const qc_file *f, qc_error *err)
{
    struct stat s;
    QC_TRY(examine(&s, f, err));
    *out = (qc_file_stamp){(uint64_t)s.st_size, modified_ns(&s)};
    return QC_OK;
}

qc_status qc_file_stamp_check(const qc_file_stamp *s, const qc_file *f, qc_error *err)
{
    struct stat held, named;
    QC_TRY(examine(&held, f, err));
    if ((uint64_t)held.st_size != s->bytes)
        QC_FAIL(err, QC_ERR_CHANGED,
                "%s changed while it was read: it had %" PRIu64 " bytes, now it has %" PRIu64,
                f->path, s->bytes, (uint64_t)held.st_size);
    if (modified_ns(&held) != s->modified_ns)
        QC_FAIL(err, QC_ERR_CHANGED,
                "%s changed while it was read: it was written to after it had been opened",
                f->path);
    if (stat(f->path, &named) != 0) {
        if (errno == ENOENT || errno == ENOTDIR)
            QC_FAIL(err, QC_ERR_CHANGED, "%s was removed or renamed while it was read", f->path);
        QC_FAIL(err, QC_ERR_IO, "%s cannot be examined: %s", f->path, strerror(errno));
    }
    if (named.st_dev != held.st_dev || named.st_ino != held.st_ino)
        QC_FAIL(err, QC_ERR_CHANGED,
                "%s changed while it was read: another file was put in its place", f->path);
    return QC_OK;
}
