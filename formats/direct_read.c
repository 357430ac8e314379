#define _GNU_SOURCE /* O_DIRECT */
#include "formats/direct_read.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The largest alignment that devices and file systems want for offsets, lengths and memory. */
#define ALIGNMENT 4096u
/* Buffers lie in huge pages. A request into scattered small pages is cut where the device takes no
 * more of them (254 of 4 KiB in a virtual machine), and each page is looked up and pinned. */
#define HUGE_PAGE (2u << 20)

typedef struct {
    struct iocb request;
    int busy;
    int64_t got; /* bytes, or -errno */
} chunk;

struct qc_direct_reader {
    aio_context_t context;
    int have_context;
    const qc_file *file; /* the file that fd reads */
    int fd;              /* -1: none */
    unsigned char *bytes;
    chunk chunks[QC_DIRECT_DEPTH]; /* chunk n of the range is in chunks[n % DEPTH] */
    unsigned busy;
    uint64_t base, end;   /* the range; base is aligned down */
    uint64_t first, next; /* chunks [first, next) are here or on their way */
};

qc_status qc_direct_create(qc_direct_reader **out, qc_error *err)
{
    void *v = NULL, *bytes = NULL;
    *out = NULL;
    QC_TRY(qc_calloc(&v, 1, sizeof **out, err));
    const size_t n = (size_t)QC_DIRECT_CHUNK_BYTES * QC_DIRECT_DEPTH;
    qc_status st = qc_malloc_aligned(&bytes, HUGE_PAGE, n, err);
    if (st != QC_OK) {
        qc_free(v);
        return st;
    }
    qc_direct_reader *d = v;
    (void)madvise(bytes, n, MADV_HUGEPAGE); /* small pages do where there are no huge ones */
    d->bytes = bytes;
    d->fd = -1;
    d->have_context = syscall(SYS_io_setup, QC_DIRECT_DEPTH, &d->context) == 0;
    *out = d;
    return QC_OK;
}

/* Waits for at least one request. Returns 0 if that is impossible; the reader is then useless. */
static int wait_for_some(qc_direct_reader *d)
{
    struct io_event events[QC_DIRECT_DEPTH];
    long n;
    do {
        n = syscall(SYS_io_getevents, d->context, 1L, (long)QC_DIRECT_DEPTH, events, NULL);
    } while (n < 0 && errno == EINTR);
    for (long i = 0; i < n; i++) {
        chunk *c = &d->chunks[events[i].data];
        c->busy = 0;
        c->got = events[i].res;
        d->busy--;
    }
    return n > 0;
}

void qc_direct_end(qc_direct_reader *d)
{
    /* The device must not write into buffers that serve another range, or none. If waiting fails
     * (it has no reason to), destroying the context waits. */
    while (d->busy > 0 && wait_for_some(d)) {
    }
    if (d->busy > 0) {
        (void)syscall(SYS_io_destroy, d->context);
        d->have_context = 0;
        d->busy = 0;
    }
    if (d->fd >= 0)
        (void)close(d->fd);
    d->fd = -1;
    d->file = NULL;
    d->base = d->end = d->first = d->next = 0;
}

void qc_direct_destroy(qc_direct_reader *d)
{
    if (!d)
        return;
    qc_direct_end(d);
    if (d->have_context)
        (void)syscall(SYS_io_destroy, d->context);
    qc_free(d->bytes);
    qc_free(d);
}

/* Opens the file again, because O_DIRECT belongs to an opening. This goes by way of the open
 * descriptor, so that it is the same file whatever its path leads to by now. */
static int reopen(qc_direct_reader *d, const qc_file *f)
{
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", f->fd);
    d->fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    d->file = f;
    return d->fd >= 0;
}

/* Asks for the next chunk of the range, if there is one. */
static int ask(qc_direct_reader *d)
{
    uint64_t offset = d->base + d->next * QC_DIRECT_CHUNK_BYTES;
    unsigned slot = (unsigned)(d->next % QC_DIRECT_DEPTH);
    chunk *c = &d->chunks[slot];
    if (offset >= d->end)
        return 1;
    uint64_t len = d->end - offset + (ALIGNMENT - d->end % ALIGNMENT) % ALIGNMENT;
    if (len > QC_DIRECT_CHUNK_BYTES)
        len = QC_DIRECT_CHUNK_BYTES;
    memset(&c->request, 0, sizeof c->request);
    c->request.aio_data = slot;
    c->request.aio_lio_opcode = IOCB_CMD_PREAD;
    c->request.aio_fildes = (uint32_t)d->fd;
    c->request.aio_buf = (uint64_t)(uintptr_t)(d->bytes + (size_t)slot * QC_DIRECT_CHUNK_BYTES);
    c->request.aio_nbytes = len;
    c->request.aio_offset = (int64_t)offset;
    struct iocb *list[1] = {&c->request};
    if (syscall(SYS_io_submit, d->context, 1L, list) != 1)
        return 0;
    c->busy = 1;
    d->busy++;
    d->next++;
    return 1;
}

int qc_direct_begin(qc_direct_reader *d, const qc_file *f, uint64_t offset, uint64_t bytes)
{
    qc_direct_end(d);
    if (!d->have_context || bytes == 0 || offset > INT64_MAX / 2 || bytes > INT64_MAX / 2)
        return 0;
    if (!reopen(d, f))
        return 0;
    d->base = offset - offset % ALIGNMENT;
    d->end = offset + bytes;
    for (unsigned i = 0; i < QC_DIRECT_DEPTH; i++) {
        if (!ask(d)) {
            qc_direct_end(d);
            return 0;
        }
    }
    return 1;
}

int qc_direct_read(qc_direct_reader *d, const qc_file *f, void *dst, size_t len, uint64_t offset)
{
    unsigned char *to = dst;
    if (d->file != f || offset < d->base || offset > d->end || len > d->end - offset)
        return 0;
    while (len > 0) {
        uint64_t n = (offset - d->base) / QC_DIRECT_CHUNK_BYTES;
        size_t within = (size_t)((offset - d->base) % QC_DIRECT_CHUNK_BYTES);
        /* Earlier chunks are done with: their buffers are free for what comes next. */
        while (d->first < n && d->first < d->next) {
            while (d->chunks[d->first % QC_DIRECT_DEPTH].busy) {
                if (!wait_for_some(d))
                    return 0;
            }
            d->first++;
            if (d->next - d->first < QC_DIRECT_DEPTH && !ask(d))
                return 0;
        }
        if (n < d->first || n >= d->next)
            return 0;
        const chunk *c = &d->chunks[n % QC_DIRECT_DEPTH];
        while (c->busy) {
            if (!wait_for_some(d))
                return 0;
        }
        size_t piece = qc_min_size(QC_DIRECT_CHUNK_BYTES - within, len);
        if (c->got < (int64_t)(within + piece))
            return 0;
        memcpy(to, d->bytes + (size_t)(n % QC_DIRECT_DEPTH) * QC_DIRECT_CHUNK_BYTES + within,
               piece);
        to += piece;
        offset += piece;
        len -= piece;
    }
    return 1;
}
