/* XXH3-128 digests, in the library's canonical (big-endian) form.
 * Source: xxHash, doc/xxhash_spec.md; XXH128_canonicalFromHash. Seed 0.
 *
 * A tensor is hashed in pieces (its frames, or ranges of fixed size of a source tensor), which
 * several threads can hash at once. If there is one piece, its digest is the tensor's; otherwise
 * the tensor's digest is that of the canonical digests of all pieces, laid end to end. */
#ifndef QC_FORMATS_DIGEST_H
#define QC_FORMATS_DIGEST_H

#include "base/status.h"

typedef struct {
    uint8_t b[16];
} qc_digest;

#define QC_DIGEST_HEX_BYTES 33 /* 32 lower-case digits and a NUL */

qc_digest qc_digest_bytes(const void *p, size_t len);
/* Combines the digests of `count` consecutive pieces as described above. With count 0 the result is
 * the digest of no bytes. */
qc_digest qc_digest_root(const qc_digest *pieces, size_t count);
int qc_digest_equal(const qc_digest *a, const qc_digest *b);
void qc_digest_hex(const qc_digest *d, char out[QC_DIGEST_HEX_BYTES]);
/* Reads exactly 32 lower-case hex digits; returns 1 if hex is anything else. */
int qc_digest_from_hex(qc_digest *out, const char *hex);

/* A running digest over a stream; create and destroy allocate and free it. */
typedef struct qc_digest_state qc_digest_state;
QC_NODISCARD qc_status qc_digest_create(qc_digest_state **out, qc_error *err);
void qc_digest_reset(qc_digest_state *s);
void qc_digest_update(qc_digest_state *s, const void *p, size_t len);
qc_digest qc_digest_finish(const qc_digest_state *s);
void qc_digest_destroy(qc_digest_state *s);
/* Reads a whole file. */
QC_NODISCARD qc_status qc_digest_file(qc_digest *out, const char *path, qc_error *err);

#endif
