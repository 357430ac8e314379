/* XXH3-128 digests, in the library's canonical (big-endian) form.
 * Source: xxHash, doc/xxhash_spec.md; XXH128_canonicalFromHash. Seed 0.
 *
 * A tensor is hashed in pieces (its frames, or fixed pieces of the source) so that pieces can be
 * hashed in parallel: its digest is the piece's own digest when there is one piece, else the
 * digest of the pieces' canonical digests laid end to end. */
#ifndef QC_FORMATS_DIGEST_H
#define QC_FORMATS_DIGEST_H

#include "base/status.h"

typedef struct {
    uint8_t b[16];
} qc_digest;

#define QC_DIGEST_HEX_BYTES 33 /* 32 lower-case digits and a NUL */

qc_digest qc_digest_bytes(const void *p, size_t len);
/* Digest of `count` consecutive pieces whose digests are given; see above. count 0: of no bytes. */
qc_digest qc_digest_root(const qc_digest *pieces, size_t count);
int qc_digest_equal(const qc_digest *a, const qc_digest *b);
void qc_digest_hex(const qc_digest *d, char out[QC_DIGEST_HEX_BYTES]);
/* Exactly 32 lower-case hex digits; returns 1 otherwise. */
int qc_digest_from_hex(qc_digest *out, const char *hex);

/* Running digest over a stream; create/destroy own heap. */
typedef struct qc_digest_state qc_digest_state;
QC_NODISCARD qc_status qc_digest_create(qc_digest_state **out, qc_error *err);
void qc_digest_reset(qc_digest_state *s);
void qc_digest_update(qc_digest_state *s, const void *p, size_t len);
qc_digest qc_digest_finish(const qc_digest_state *s);
void qc_digest_destroy(qc_digest_state *s);

#endif
