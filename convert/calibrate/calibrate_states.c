#include "convert/calibrate/calibrate_engine.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ALIGNMENT 64u

static uint64_t array_bytes(uint64_t tokens, uint64_t width)
{
    uint64_t bytes = qc_sat_mul(qc_sat_mul(tokens, width), sizeof(float));
    return qc_sat_mul(qc_ceil_div_u64(bytes, ALIGNMENT), ALIGNMENT);
}

uint64_t qc_calibrate_states_memory(void)
{
    const char *text = getenv("QCONV_STATES_MEMORY");
    char *end = NULL;
    if (!text || *text < '0' || *text > '9')
        return QC_CALIBRATE_STATES_MEMORY;
    unsigned long long mib = strtoull(text, &end, 10);
    return *end ? QC_CALIBRATE_STATES_MEMORY : qc_sat_mul(mib, (uint64_t)1 << 20);
}

uint64_t qc_calibrate_states_bytes(uint64_t tokens, uint64_t hidden, uint64_t q)
{
    return qc_sat_mul(2, qc_sat_add(array_bytes(tokens, hidden), array_bytes(tokens, q)));
}

/* Takes the room on the disk at once, because a mapped page that finds none would end the process
 * by a signal instead of an error. */
static qc_status map_file(qc_calibrate_states *s, const char *dir, qc_error *err)
{
    char text[QC_SIZE_TEXT_BYTES];
    QC_TRY(qc_file_open_scratch(&s->file, dir, err));
    s->is_file = 1;
    int e = posix_fallocate(s->file.fd, 0, (off_t)s->bytes);
    if (e == ENOSPC)
        QC_FAIL(err, QC_ERR_NOSPACE,
                "%s: the disk has no room for %s of hidden states; make room, or take fewer tokens "
                "with "
                "--calibration-tokens",
                dir, qc_text_bytes(text, s->bytes));
    if (e != 0)
        QC_FAIL(err, QC_ERR_IO, "%s: %s", s->file.path, strerror(e));
    s->base = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s->file.fd, 0);
    if (s->base == MAP_FAILED) {
        s->base = NULL;
        QC_FAIL(err, QC_ERR_NOMEM, "%s: %s", s->file.path, strerror(errno));
    }
    return QC_OK;
}

qc_status qc_calibrate_states_open(qc_calibrate_states *s, const qc_calibrator *k, uint64_t tokens,
                                   uint64_t hidden, uint64_t q, qc_error *err)
{
    uint64_t bytes = qc_calibrate_states_bytes(tokens, hidden, q);
    char text[QC_SIZE_TEXT_BYTES];
    *s = (qc_calibrate_states){.file = QC_FILE_CLOSED};
    if (bytes > INT64_MAX || qc_u64_to_size(bytes, &s->bytes))
        QC_FAIL(err, QC_ERR_NOMEM,
                "hidden states of %" PRIu64
                " tokens are too large for this machine; take fewer with --calibration-tokens",
                tokens);
    if (bytes > qc_calibrate_states_memory())
        QC_TRY(map_file(s, qc_calibrated_folder(k->store), err));
    else
        QC_TRY(qc_malloc_aligned(&s->base, ALIGNMENT, s->bytes, err));
    qc_console_detail(k->plan->call, 1, "hidden states: %s are kept in %s",
                      qc_text_bytes(text, bytes),
                      s->is_file ? "an unnamed file of the staging folder" : "memory");
    unsigned char *at = s->base;
    s->x = (float *)(void *)at;
    s->z = (float *)(void *)(at += array_bytes(tokens, hidden));
    s->x_attended = (float *)(void *)(at += array_bytes(tokens, hidden));
    s->z_attended = (float *)(void *)(at + array_bytes(tokens, q));
    return QC_OK;
}

void qc_calibrate_states_close(qc_calibrate_states *s)
{
    if (s->is_file && s->base)
        (void)munmap(s->base, s->bytes);
    else
        qc_free(s->base);
    if (s->is_file)
        qc_file_discard(&s->file);
    memset(s, 0, sizeof *s);
}
