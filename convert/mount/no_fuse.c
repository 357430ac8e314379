#include "convert/mount/mount.h"

int qc_mount_is_built(void)
{
    return 0;
}

qc_status qc_mount_check(const char *dir, qc_error *err)
{
    QC_FAIL(err, QC_ERR_UNSUPPORTED,
            "%s: nothing can be mounted, because this qconv was built without libfuse 3; install "
            "libfuse3-dev and build it again, or write plain files with 'qconv unpack'",
            dir);
}

qc_status qc_mount_serve(const qc_mount_options *o, const char *dir, unsigned threads,
                         qc_status (*mounted)(void *ctx, qc_error *err), void *ctx, qc_error *err)
{
    (void)o, (void)threads, (void)mounted, (void)ctx;
    return qc_mount_check(dir, err);
}
