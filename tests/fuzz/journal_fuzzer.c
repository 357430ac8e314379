/* Any bytes as a journal: refused, or replayed up to the last whole record, which is where the file
 * is cut, so that a second reading finds the same and nothing behind it. And, as no mutation
 * survives the digest of a record, the same bytes taken as records and appended: they are read back
 * in order, and after a cut anywhere those that were whole before it. */
#include "base/alloc.h"
#include "formats/journal.h"
#include "fuzz_check.h"
#include "fuzz_files.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

const fuzz_limits fuzz_may_allocate = {256u << 10, 4};

static const char *const names[] = {"journal"};

typedef struct {
    const uint8_t *expected; /* payloads one after the other, or NULL: not compared */
    size_t used, size;
    uint64_t records;
} reading;

static qc_status take(void *ctx, const qc_journal_record *r, qc_error *err)
{
    reading *g = ctx;
    (void)err;
    FUZZ_CHECK(r->payload != NULL);
    if (g->expected) {
        FUZZ_CHECK(r->payload_bytes <= g->size - g->used);
        FUZZ_CHECK(memcmp(r->payload, g->expected + g->used, r->payload_bytes) == 0);
        g->used += r->payload_bytes;
    }
    g->records++;
    return QC_OK;
}

static void as_file(const char *path, size_t size)
{
    qc_journal *j = NULL;
    qc_journal_found first = {0}, again = {0};
    reading g = {0};
    qc_error err = {0};
    struct stat s;
    qc_status st = qc_journal_read(path, take, &g, &first, &err);
    FUZZ_CHECK(st == QC_OK || (st == QC_ERR_UNSUPPORTED && err.msg[0]));
    FUZZ_CHECK(st != QC_OK ||
               (first.bytes + first.cut_bytes == size && g.records == first.records));
    qc_status opened = qc_journal_open(&j, path, NULL, NULL, &again, &err);
    FUZZ_CHECK(opened == st);
    if (st != QC_OK)
        return;
    FUZZ_CHECK(again.records == first.records && again.bytes <= size + QC_JOURNAL_MAGIC_BYTES);
    qc_journal_close(j);
    FUZZ_CHECK(qc_journal_read(path, NULL, NULL, &again, NULL) == QC_OK);
    FUZZ_CHECK(stat(path, &s) == 0 && (uint64_t)s.st_size == again.bytes);
    FUZZ_CHECK(again.records == first.records && again.cut_bytes == 0);
}

/* Records of 0 to 255 bytes: each takes its first byte for its length. */
static void as_records(const char *path, const uint8_t *data, size_t size)
{
    qc_journal *j = NULL;
    qc_journal_found found;
    uint8_t *payloads = malloc(size + 1);
    uint64_t count = 0;
    size_t used = 0;
    FUZZ_CHECK(payloads != NULL && unlink(path) == 0);
    FUZZ_CHECK(qc_journal_open(&j, path, NULL, NULL, NULL, NULL) == QC_OK);
    for (size_t i = 0; i < size && count < 64;) {
        size_t n = data[i] < size - i - 1 ? data[i] : size - i - 1;
        FUZZ_CHECK(qc_journal_append(j, data[i], data + i + 1, n, NULL) == QC_OK);
        memcpy(payloads + used, data + i + 1, n);
        used += n;
        count++;
        i += 1 + n;
    }
    qc_journal_close(j);
    reading g = {.expected = payloads, .size = used};
    FUZZ_CHECK(qc_journal_read(path, take, &g, &found, NULL) == QC_OK);
    FUZZ_CHECK(found.records == count && g.used == used && found.cut_bytes == 0);
    if (size >= 2) {
        uint64_t cut = (data[0] * 251u + data[size - 1]) % (found.bytes + 1);
        FUZZ_CHECK(truncate(path, (off_t)cut) == 0);
        g = (reading){.expected = payloads, .size = used};
        FUZZ_CHECK(qc_journal_read(path, take, &g, &found, NULL) == QC_OK);
        FUZZ_CHECK(found.records <= count && found.bytes <= cut);
    }
    free(payloads);
}

int fuzz_one(const uint8_t *data, size_t size)
{
    char path[4096];
    const fuzz_part part = {data, size, 1};
    const fuzz_part none = {NULL, 0, 0};
    (void)snprintf(path, sizeof path, "%s/journal", fuzz_folder(names, &part, 1));
    as_file(path, size);
    as_records(path, data, size);
    (void)fuzz_folder(names, &none, 1);
    return 0;
}
