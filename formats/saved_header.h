/* What is kept of a weight file that is deleted: its safetensors header, and what the file was.
 *
 * A conversion that deletes its source as it goes (--consume-source) must still know, when it is
 * continued, which tensors the source had. Before it begins, it writes one file for each weight
 * file. The name of that file is a number, and its contents are
 *
 *   "QCHEAD1\n"            8 bytes
 *   u64 file bytes         on the disk
 *   u64 modified           its stamp (formats/file_stamp.h), nanoseconds since 1970, signed
 *   u64 content bytes      uncompressed: what the header is checked against
 *   u64 header bytes       8 + N
 *   u32 compressed         0 or 1
 *   u32 name, u32 origin   bytes of the two texts
 *   name, origin           no NUL
 *   header                 as it began in the file, uncompressed
 *   XXH3-128               of all before, 16 bytes
 *
 * Integers are little-endian. Right before the weight file is deleted, this file is renamed to the
 * number and "-gone", a step that needs no room on a full disk. The bytes are not trusted: lengths
 * are checked against the file, the digest against the bytes, and the header is parsed as any
 * other. */
#ifndef QC_FORMATS_SAVED_HEADER_H
#define QC_FORMATS_SAVED_HEADER_H

#include "formats/file_stamp.h"

#define QC_SAVED_GONE     "-gone"
#define QC_SAVED_TEXT_MAX 65536u /* bytes of a name or an origin */

typedef struct {
    const char *path;   /* of what is kept */
    const char *name;   /* of the file, relative to its checkpoint's folder, ".zst" included */
    const char *origin; /* where the file was: an absolute path, links resolved */
    qc_file_stamp stamp;
    uint64_t content_bytes;
    uint64_t header_bytes;
    uint64_t header_at; /* in the file at path */
    int compressed;
    int gone; /* as its path tells: the weight file is deleted, or is about to be */
} qc_saved_header;

/* Writes s and its header (s->header_bytes) to s->path, synced; s->header_at is not looked at. */
QC_NODISCARD qc_status qc_saved_header_put(const qc_saved_header *s, const void *header,
                                           qc_error *err);
/* Parses the bytes of a saved header. Its two texts go to the arena; path stays NULL. QC_ERR_INPUT
 * when the bytes are damaged. */
QC_NODISCARD qc_status qc_saved_header_parse(qc_saved_header *out, qc_arena *arena,
                                             const unsigned char *bytes, size_t len, qc_error *err);
/* Reads all saved headers of a folder, sorted by path: files whose names are digits, or digits and
 * "-gone". A missing folder holds none. Everything lives in the arena. */
QC_NODISCARD qc_status qc_saved_headers_read(qc_saved_header **out, size_t *count, qc_arena *arena,
                                             const char *folder, qc_error *err);

#endif
