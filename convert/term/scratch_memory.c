#include "convert/term/scratch_memory.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/term/size_text.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#define ALIGNMENT 64u

static qc_status map_file(qc_scratch_memory *s, const char *dir, const char *what,
                          const char *advice, qc_error *err)
{
    char text[QC_SIZE_TEXT_BYTES];
    QC_TRY(qc_file_open_scratch(&s->file, dir, err));
    s->is_file = 1;
    int e = posix_fallocate(s->file.fd, 0, (off_t)s->bytes);
    if (e == ENOSPC)
        QC_FAIL(err, QC_ERR_NOSPACE, "%s: the disk has no room for %s of %s; make room, or %s", dir,
                qc_text_bytes(text, s->bytes), what, advice);
    if (e != 0)
        QC_FAIL(err, QC_ERR_IO, "%s: %s", s->file.path, strerror(e));
    s->base = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s->file.fd, 0);
    if (s->base == MAP_FAILED) {
        s->base = NULL;
        QC_FAIL(err, QC_ERR_NOMEM, "%s: %s", s->file.path, strerror(errno));
    }
    return QC_OK;
}

qc_status qc_scratch_memory_open(qc_scratch_memory *out, uint64_t bytes, uint64_t most,
                                 const char *dir, const char *what, const char *advice,
                                 qc_error *err)
{
    char text[QC_SIZE_TEXT_BYTES];
    *out = (qc_scratch_memory){.file = QC_FILE_CLOSED};
    if (bytes > INT64_MAX || qc_u64_to_size(bytes, &out->bytes))
        QC_FAIL(err, QC_ERR_NOMEM, "%s of %s are too much for this machine; %s",
                qc_text_bytes(text, bytes), what, advice);
    return bytes > most ? map_file(out, dir, what, advice, err)
                        : qc_malloc_aligned(&out->base, ALIGNMENT, out->bytes, err);
}

void qc_scratch_memory_close(qc_scratch_memory *s)
{
    if (s->is_file && s->base)
        (void)munmap(s->base, s->bytes);
    else
        qc_free(s->base);
    if (s->is_file)
        qc_file_discard(&s->file);
    memset(s, 0, sizeof *s);
}
