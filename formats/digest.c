#define XXH_INLINE_ALL
#include <xxhash.h>

#include "formats/digest.h"

#include "base/alloc.h"
#include "formats/digest_ops.h"
#include "formats/file_io.h"

#include <pthread.h>
#include <string.h>

struct qc_digest_state {
    const qc_digest_ops *ops;
    void *hash; /* inside the same allocation, aligned to 64 */
};

QC_DIGEST_DEFINE(qc_digest_scalar);

static pthread_once_t ops_once = PTHREAD_ONCE_INIT;
static const qc_digest_ops *ops_chosen;

const qc_digest_ops *qc_digest_ops_for(qc_isa isa)
{
#if defined(__x86_64__)
    if (isa == QC_ISA_AVX512)
        return &qc_digest_avx512;
    if (isa == QC_ISA_AVX2)
        return &qc_digest_avx2;
#else
    (void)isa;
#endif
    return &qc_digest_scalar;
}

/* The program reports a wrong QCONV_ISA; here it does not matter, because every path gives the same
 * digest. */
static void choose_ops(void)
{
    qc_isa isa = QC_ISA_SCALAR;
    if (qc_isa_select(&isa, NULL) != QC_OK)
        isa = QC_ISA_SCALAR;
    ops_chosen = qc_digest_ops_for(isa);
}

static const qc_digest_ops *digest_ops(void)
{
    (void)pthread_once(&ops_once, choose_ops);
    return ops_chosen;
}

qc_digest qc_digest_bytes(const void *p, size_t len)
{
    return digest_ops()->hash(p, len);
}

qc_digest qc_digest_root(const qc_digest *pieces, size_t count)
{
    _Static_assert(sizeof(qc_digest) == 16, "digests lie end to end");
    if (count == 1)
        return pieces[0];
    return qc_digest_bytes(pieces, count * sizeof *pieces);
}

int qc_digest_equal(const qc_digest *a, const qc_digest *b)
{
    return memcmp(a->b, b->b, sizeof a->b) == 0;
}

void qc_digest_hex(const qc_digest *d, char out[QC_DIGEST_HEX_BYTES])
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < sizeof d->b; i++) {
        out[2 * i] = digits[d->b[i] >> 4];
        out[2 * i + 1] = digits[d->b[i] & 15];
    }
    out[QC_DIGEST_HEX_BYTES - 1] = '\0';
}

/* Returns 16 for anything that is not a lower-case hex digit. */
static unsigned hex_value(char c)
{
    if (c >= '0' && c <= '9')
        return (unsigned)(c - '0');
    if (c >= 'a' && c <= 'f')
        return (unsigned)(c - 'a') + 10;
    return 16;
}

int qc_digest_from_hex(qc_digest *out, const char *hex)
{
    qc_digest d;
    for (size_t i = 0; i < sizeof d.b; i++) {
        unsigned high = hex_value(hex[2 * i]);
        unsigned low = high < 16 ? hex_value(hex[2 * i + 1]) : 16;
        if (low == 16)
            return 1;
        d.b[i] = (uint8_t)(high << 4 | low);
    }
    if (hex[2 * sizeof d.b] != '\0')
        return 1;
    *out = d;
    return 0;
}

#define STATE_ALIGN 64u

qc_status qc_digest_create(qc_digest_state **out, qc_error *err)
{
    const qc_digest_ops *ops = digest_ops();
    void *v = NULL;
    *out = NULL;
    _Static_assert(sizeof(struct qc_digest_state) <= STATE_ALIGN, "the hash comes after it");
    QC_TRY(qc_malloc_aligned(&v, STATE_ALIGN, STATE_ALIGN + ops->state_bytes, err));
    memset(v, 0, STATE_ALIGN + ops->state_bytes);
    *out = v;
    (*out)->ops = ops;
    (*out)->hash = (unsigned char *)v + STATE_ALIGN;
    ops->reset((*out)->hash);
    return QC_OK;
}

void qc_digest_reset(qc_digest_state *s)
{
    s->ops->reset(s->hash);
}

void qc_digest_update(qc_digest_state *s, const void *p, size_t len)
{
    s->ops->update(s->hash, p, len);
}

qc_digest qc_digest_finish(const qc_digest_state *s)
{
    return s->ops->finish(s->hash);
}

void qc_digest_destroy(qc_digest_state *s)
{
    qc_free(s);
}

static qc_status take_hash(void *hash, const void *bytes, size_t len, qc_error *err)
{
    (void)err;
    qc_digest_update(hash, bytes, len);
    return QC_OK;
}

qc_status qc_digest_file(qc_digest *out, const char *path, qc_error *err)
{
    qc_digest_state *hash = NULL;
    QC_TRY(qc_digest_create(&hash, err));
    qc_status st = qc_file_read_through(path, take_hash, hash, err);
    if (st == QC_OK)
        *out = qc_digest_finish(hash);
    qc_digest_destroy(hash);
    return st;
}
