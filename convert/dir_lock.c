#define _DEFAULT_SOURCE /* flock */
#include "convert/dir_lock.h"

#include <errno.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>

qc_status qc_dir_lock_try(const qc_file *f, int shared, int *busy, qc_error *err)
{
    *busy = 0;
    while (flock(f->fd, (shared ? LOCK_SH : LOCK_EX) | LOCK_NB) != 0) {
        if (errno == EINTR)
            continue;
        *busy = errno == EWOULDBLOCK;
        if (*busy)
            return QC_OK;
        QC_FAIL(err, QC_ERR_IO,
                "%s: cannot be locked: %s; the output needs a file system with locks (flock)",
                f->path, strerror(errno));
    }
    return QC_OK;
}

int qc_dir_lock_has_its_name(const qc_file *f)
{
    struct stat held, named;
    return fstat(f->fd, &held) == 0 && lstat(f->path, &named) == 0 && held.st_dev == named.st_dev &&
           held.st_ino == named.st_ino;
}

void qc_dir_lock_pause(void)
{
    struct timespec t = {0, 20000000};
    (void)nanosleep(&t, NULL);
}
