/* A journal: a file that only grows. Each of its records is either whole or not there.
 *
 *   "QCJRNL1\n"                                     8 bytes
 *   record: u32 type, u32 length, payload, u64 XXH3-64 of type, length and payload, little-endian;
 *           seeded with the record's position in the file, so that a record that turns up at
 *           another place is not valid
 *
 * A record is appended with one write. Whoever opens the file reads the records in order up to the
 * first that is not whole, because a process died while it wrote or the power went before all of it
 * was on the disk. The file is cut there: what came behind counts as never written. A record proves
 * nothing about the files it speaks of, because a power loss may keep the record and lose the
 * files. So what it says has to be checked before it is believed.
 *
 * This file knows nothing of what records mean: types and payloads are the caller's.
 * Thread-safe: append and sync may be called from any thread; open and close may not.
 * Allocates: while reading, one record's payload, which is at most the bytes left in the file and
 * at most QC_JOURNAL_RECORD_MAX; while appending, the record.
 * Source: XXH3_64bits_withSeed of xxHash 0.8, doc/xxhash_spec.md. */
#ifndef QC_FORMATS_JOURNAL_H
#define QC_FORMATS_JOURNAL_H

#include "base/status.h"

#define QC_JOURNAL_MAGIC        "QCJRNL1\n"
#define QC_JOURNAL_MAGIC_BYTES  8u
#define QC_JOURNAL_RECORD_EXTRA 16u                 /* bytes of a record beside its payload */
#define QC_JOURNAL_RECORD_MAX   ((uint32_t)1 << 30) /* bytes of a payload */

typedef struct qc_journal qc_journal;

typedef struct {
    uint32_t type;
    uint32_t payload_bytes;
    const unsigned char *payload; /* borrowed until the call returns; never NULL */
    uint64_t end;                 /* position in the file behind the record */
} qc_journal_record;

/* Gets every record in order. A return other than QC_OK ends the reading and is returned. */
typedef qc_status (*qc_journal_fn)(void *ctx, const qc_journal_record *r, qc_error *err);

typedef struct {
    uint64_t records;
    uint64_t bytes;     /* up to the last whole record */
    uint64_t cut_bytes; /* behind it */
} qc_journal_found;

/* Opens a journal for appending. A missing file is made, and made durable: file and folder are
 * synced. An existing file is read from its beginning, fn (may be NULL) gets its records, and what
 * follows the last whole one is cut off. A file that does not begin with the magic is
 * QC_ERR_UNSUPPORTED and stays as it is, unless it is a magic that was only half written. found may
 * be NULL. Links are refused. */
QC_NODISCARD qc_status qc_journal_open(qc_journal **out, const char *path, qc_journal_fn fn,
                                       void *ctx, qc_journal_found *found, qc_error *err);
/* Reads only: nothing is made, cut or kept open. A missing file is QC_ERR_IO; a file without
 * records is fine. */
QC_NODISCARD qc_status qc_journal_read(const char *path, qc_journal_fn fn, void *ctx,
                                       qc_journal_found *found, qc_error *err);
/* Appends one record. On failure (QC_ERR_NOSPACE, QC_ERR_IO, QC_ERR_NOMEM) the journal is as
 * before, and another record may be appended. The record survives the death of the process at once,
 * and that of the machine after the next qc_journal_sync. */
QC_NODISCARD qc_status qc_journal_append(qc_journal *j, uint32_t type, const void *payload,
                                         size_t bytes, qc_error *err);
/* When this returns, all that was appended before the call is on the disk. */
QC_NODISCARD qc_status qc_journal_sync(qc_journal *j, qc_error *err);
/* NULL is fine. */
void qc_journal_close(qc_journal *j);

#endif
