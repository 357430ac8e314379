/* Shows the files of convert/mount/plain_files.h as a folder, by FUSE. Without libfuse 3 this is
 * no_fuse.c, which refuses. */
#ifndef QC_CONVERT_MOUNT_H
#define QC_CONVERT_MOUNT_H

#include "convert/mount/plain_files.h"

typedef struct {
    int foreground;        /* else a process of its own goes on, and the caller's process ends */
    int allow_other;       /* other users may read, too */
    uint64_t memory_bytes; /* for decompressed frames */
    qc_plain_files *files; /* what is mounted; set by the command */
    const char *root;      /* OUT: paths of its parts begin with it */
} qc_mount_options;

/* Was the program built with libfuse 3? */
int qc_mount_is_built(void);
/* Can something be mounted on dir, an empty folder? Otherwise the message says what to do. */
QC_NODISCARD qc_status qc_mount_check(const char *dir, qc_error *err);
/* Starts o->files and serves them until dir is unmounted or a signal comes. `mounted` is called
 * once they can be read. */
QC_NODISCARD qc_status qc_mount_serve(const qc_mount_options *o, const char *dir, unsigned threads,
                                      qc_status (*mounted)(void *ctx, qc_error *err), void *ctx,
                                      qc_error *err);

#endif
