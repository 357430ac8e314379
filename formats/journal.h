/* A journal: a file that only grows, of records that are each whole or not there.
 *
 *   "QCJRNL1\n"                                     8 bytes
 *   record: u32 type, u32 length, payload, u64 XXH3-64 of type, length and payload, little-endian;
 *           seeded with the record's position in the file, so that a record that turns up at
 *           another place is none
 *
 * A record is appended with one write. Who opens the file reads the records in order up to the
 * first that is not whole (a process died while it wrote, or the power went before all of it was on
 * the disk) and cuts the file there: what was behind it counts as never written. A record says
 * nothing of the files it speaks of: power loss may keep it and lose them, so what it says has to
 * be looked at before it is believed.
 *
 * This file knows nothing of what records mean: types and payloads are the caller's.
 * Thread-safe: append, sync and bytes may be called from any thread; open and close not.
 * Allocates: while reading, one record's payload, at most the bytes left in the file and at most
 * QC_JOURNAL_RECORD_MAX; while appending, the record.
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
    uint32_t bytes;               /* of the payload */
    const unsigned char *payload; /* borrowed until the call returns; bytes 0: not NULL */
    uint64_t end;                 /* position in the file behind the record */
} qc_journal_record;

/* Gets every record in order. What it returns beside QC_OK ends reading and is returned. */
typedef qc_status (*qc_journal_fn)(void *ctx, const qc_journal_record *r, qc_error *err);

typedef struct {
    uint64_t records;
    uint64_t bytes;     /* up to the last whole record */
    uint64_t cut_bytes; /* behind it */
} qc_journal_found;

/* Open for appending. A file that is missing is made (and is durable: file and folder are synced);
 * one that is there is read from its beginning, fn (may be NULL) gets its records, and what follows
 * the last whole one is cut off. A file whose first bytes are no magic, but for a magic that was
 * half written, is QC_ERR_UNSUPPORTED and stays as it is. found may be NULL. Links are refused. */
QC_NODISCARD qc_status qc_journal_open(qc_journal **out, const char *path, qc_journal_fn fn,
                                       void *ctx, qc_journal_found *found, qc_error *err);
/* Read only: nothing is made, cut or kept open. A missing file is QC_ERR_IO, one that holds no
 * record is fine. */
QC_NODISCARD qc_status qc_journal_read(const char *path, qc_journal_fn fn, void *ctx,
                                       qc_journal_found *found, qc_error *err);
/* Append one record. On failure (QC_ERR_NOSPACE, QC_ERR_IO, QC_ERR_NOMEM) the journal is as before,
 * and another may be appended. end (may be NULL): position behind the record. It survives the death
 * of the process at once, that of the machine after the next qc_journal_sync. */
QC_NODISCARD qc_status qc_journal_append(qc_journal *j, uint32_t type, const void *payload,
                                         size_t bytes, uint64_t *end, qc_error *err);
/* All that was appended before the call is on the disk when it returns. */
QC_NODISCARD qc_status qc_journal_sync(qc_journal *j, qc_error *err);
/* Position behind the last record. */
uint64_t qc_journal_bytes(qc_journal *j);
/* NULL is fine. */
void qc_journal_close(qc_journal *j);

#endif
