/* XXH3-128 compiled several times, once per instruction set; private to digest*.c.
 *
 * Debian's libxxhash is built for the baseline and hashes 14 GB/s; the same header inlined with
 * AVX-512 reaches 52 GB/s on data in the L2 cache. The result does not depend on the path: a test
 * compares them. */
#ifndef QC_FORMATS_DIGEST_OPS_H
#define QC_FORMATS_DIGEST_OPS_H

#include "base/cpu.h"
#include "formats/digest.h"

typedef struct {
    qc_digest (*hash)(const void *p, size_t len);
    void (*reset)(void *state);
    void (*update)(void *state, const void *p, size_t len);
    qc_digest (*finish)(const void *state);
    size_t state_bytes; /* how much memory a state takes, aligned to 64 */
} qc_digest_ops;

extern const qc_digest_ops qc_digest_scalar;
extern const qc_digest_ops qc_digest_avx2;   /* x86-64 only */
extern const qc_digest_ops qc_digest_avx512; /* x86-64 only */

/* Returns the best path compiled in for an instruction set; never NULL. */
const qc_digest_ops *qc_digest_ops_for(qc_isa isa);

/* Defines the table `name` in this file, from the xxhash.h that is included with its compile
 * flags. */
#define QC_DIGEST_DEFINE(name)                                                                     \
    static qc_digest canonical(XXH128_hash_t h)                                                    \
    {                                                                                              \
        XXH128_canonical_t c;                                                                      \
        qc_digest d;                                                                               \
        _Static_assert(sizeof c.digest == sizeof d.b, "128 bits");                                 \
        XXH128_canonicalFromHash(&c, h);                                                           \
        for (unsigned i = 0; i < sizeof d.b; i++)                                                  \
            d.b[i] = c.digest[i];                                                                  \
        return d;                                                                                  \
    }                                                                                              \
    static qc_digest hash_bytes(const void *p, size_t len)                                         \
    {                                                                                              \
        return canonical(XXH3_128bits(p, len));                                                    \
    }                                                                                              \
    static void state_reset(void *state)                                                           \
    {                                                                                              \
        (void)XXH3_128bits_reset(state);                                                           \
    }                                                                                              \
    static void state_update(void *state, const void *p, size_t len)                               \
    {                                                                                              \
        (void)XXH3_128bits_update(state, p, len);                                                  \
    }                                                                                              \
    static qc_digest state_finish(const void *state)                                               \
    {                                                                                              \
        return canonical(XXH3_128bits_digest(state));                                              \
    }                                                                                              \
    const qc_digest_ops name = {hash_bytes, state_reset, state_update, state_finish,               \
                                sizeof(XXH3_state_t)}

#endif
