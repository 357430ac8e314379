#define _DEFAULT_SOURCE /* flock, major, minor */
#include "convert/output/dir_lock.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>

#define LOCKS_PATH "/proc/locks"
#define LINE_BYTES 256

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
                "%s cannot be locked: %s; the output needs a file system with locks (flock)",
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

/* Reads the number that stands right before `place` and after a space. */
static long number_before(const char *line, const char *place)
{
    const char *p = place;
    while (p > line && p[-1] >= '0' && p[-1] <= '9')
        p--;
    return p < place && p > line && p[-1] == ' ' ? strtol(p, NULL, 10) : 0;
}

/* A line is "1: FLOCK  ADVISORY  WRITE 30415 fe:00:10953850 0 EOF"; that of a process that waits
 * for the lock has a "->". */
long qc_dir_lock_holder(const qc_file *f)
{
    struct stat st;
    char place[64], line[LINE_BYTES];
    long pid = 0;
    if (fstat(f->fd, &st) != 0)
        return 0;
    (void)snprintf(place, sizeof place, " %02x:%02x:%llu ", major(st.st_dev), minor(st.st_dev),
                   (unsigned long long)st.st_ino);
    FILE *locks = fopen(LOCKS_PATH, "re");
    while (locks && pid == 0 && fgets(line, sizeof line, locks)) {
        const char *at = strstr(line, place);
        if (at && strstr(line, "FLOCK ") && strstr(line, " WRITE ") && !strstr(line, "->"))
            pid = number_before(line, at);
    }
    if (locks)
        (void)fclose(locks);
    return pid;
}

void qc_dir_lock_pause(void)
{
    struct timespec t = {0, 20000000};
    (void)nanosleep(&t, NULL);
}
