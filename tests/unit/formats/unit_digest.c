/* formats/digest.h */
#include "base/alloc.h"
#include "base/cpu.h"
#include "formats/digest.h"
#include "formats/digest_ops.h"
#include "tests/fixtures/test.h"

#include <xxhash.h>

#define DATA_BYTES 300000u

static unsigned char *data;

static int make_data(void **state)
{
    (void)state;
    uint32_t x = 2463534242u;
    data = malloc(DATA_BYTES);
    assert_non_null(data);
    for (size_t i = 0; i < DATA_BYTES; i++) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        data[i] = (unsigned char)x;
    }
    return 0;
}

static int drop_data(void **state)
{
    (void)state;
    free(data);
    return 0;
}

/* Every length up to some blocks, then lengths around powers of two. */
static size_t nth_length(size_t i)
{
    if (i < 1300)
        return i;
    size_t k = i - 1300;
    return ((size_t)1 << (11 + k / 5)) + k % 5 - 2;
}
#define LENGTHS (1300u + 5 * 7)

static qc_digest of_library(const void *p, size_t len)
{
    qc_digest d;
    XXH128_canonical_t c;
    XXH128_canonicalFromHash(&c, XXH3_128bits(p, len));
    memcpy(d.b, c.digest, sizeof d.b);
    return d;
}

TEST(every_path_equals_the_library)
{
    for (int isa = 0; isa < QC_ISA_COUNT; isa++) {
        if (!qc_isa_available((qc_isa)isa))
            continue;
        const qc_digest_ops *ops = qc_digest_ops_for((qc_isa)isa);
        void *v = NULL;
        assert_int_equal(qc_malloc_aligned(&v, 64, ops->state_bytes, NULL), QC_OK);
        memset(v, 0, ops->state_bytes);
        for (size_t i = 0; i < LENGTHS; i++) {
            size_t len = nth_length(i);
            qc_digest want = of_library(data + i % 64, len);
            qc_digest have = ops->hash(data + i % 64, len);
            assert_memory_equal(have.b, want.b, sizeof have.b);
            ops->reset(v);
            for (size_t done = 0, n; done < len; done += n) {
                n = 1 + (done * 7 + i) % 4000;
                n = n < len - done ? n : len - done;
                ops->update(v, data + i % 64 + done, n);
            }
            have = ops->finish(v);
            assert_memory_equal(have.b, want.b, sizeof have.b);
        }
        qc_free(v);
    }
}

TEST(the_form_is_canonical)
{
    char hex[QC_DIGEST_HEX_BYTES];
    qc_digest d = qc_digest_bytes("", 0); /* xxhsum -H2 /dev/null */
    qc_digest_hex(&d, hex);
    assert_string_equal(hex, "99aa06d3014798d86001c324468d497f");
    d = qc_digest_bytes("abc", 3); /* printf abc | xxhsum -H2 */
    qc_digest_hex(&d, hex);
    assert_string_equal(hex, "06b05ab6733a618578af5f94892f3950");
}

TEST(hex_goes_both_ways)
{
    qc_digest d = qc_digest_bytes(data, 99), back;
    char hex[QC_DIGEST_HEX_BYTES];
    qc_digest_hex(&d, hex);
    assert_int_equal(qc_digest_from_hex(&back, hex), 0);
    assert_true(qc_digest_equal(&d, &back));
    back.b[15] ^= 1;
    assert_false(qc_digest_equal(&d, &back));
    static const char *const wrong[] = {"",
                                        "0123456789abcdef0123456789abcde",
                                        "0123456789abcdef0123456789abcdef0",
                                        "0123456789abcdef0123456789abcdeF",
                                        "0123456789abcdef0123456789abcdeg",
                                        "g123456789abcdef0123456789abcdef",
                                        "0123456789abcdef 123456789abcdef",
                                        "0123456789abcdef`123456789abcdef",
                                        "0123456789abcdef:123456789abcdef",
                                        "0123456789abcdef/123456789abcdef"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_equal(qc_digest_from_hex(&back, wrong[i]), 1);
}

TEST(a_root_is_the_piece_or_the_digest_of_pieces)
{
    qc_digest p[3], root, want;
    for (size_t i = 0; i < 3; i++)
        p[i] = qc_digest_bytes(data + 1000 * i, 1000);
    root = qc_digest_root(p, 1);
    assert_true(qc_digest_equal(&root, &p[0]));
    root = qc_digest_root(p, 3);
    want = qc_digest_bytes(p, 48);
    assert_true(qc_digest_equal(&root, &want));
    root = qc_digest_root(NULL, 0);
    want = qc_digest_bytes("", 0);
    assert_true(qc_digest_equal(&root, &want));
}

TEST(a_stream_equals_one_shot)
{
    qc_digest_state *s = NULL;
    assert_int_equal(qc_digest_create(&s, NULL), QC_OK);
    for (int round = 0; round < 2; round++) {
        qc_digest_update(s, data, 100);
        qc_digest_update(s, data + 100, 0);
        qc_digest_update(s, data + 100, DATA_BYTES - 100);
        qc_digest have = qc_digest_finish(s), want = qc_digest_bytes(data, DATA_BYTES);
        assert_true(qc_digest_equal(&have, &want));
        qc_digest_reset(s);
    }
    qc_digest have = qc_digest_finish(s), want = qc_digest_bytes("", 0);
    assert_true(qc_digest_equal(&have, &want));
    qc_digest_destroy(s);
    qc_digest_destroy(NULL);
    qc_alloc_fail_at(1, 0);
    assert_int_equal(qc_digest_create(&s, NULL), QC_ERR_NOMEM);
    qc_alloc_fail_at(0, 0);
    assert_null(s);
}

TEST_GROUP(make_data, drop_data)
