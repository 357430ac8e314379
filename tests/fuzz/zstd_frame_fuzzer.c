/* Any bytes as one frame, after four that say how much is expected in it: refused, or decoded to
 * that and no byte more. The bytes as content: what is encoded is decoded to them again, and a
 * frame that was changed somewhere is never taken for another content. */
#include "base/bytes.h"
#include "formats/seekable.h"
#include "fuzz_check.h"

#include <stdlib.h>
#include <string.h>

#define EXPECTED_MOST (1u << 20)

/* zstd's own tables for both directions, and room for what is expected. */
const fuzz_limits fuzz_may_allocate = {8u << 20, 64};

static void decode(qc_frame_coder *c, const uint8_t *data, size_t size)
{
    if (size < 4)
        return;
    size_t expected = qc_load_le32(data) % (EXPECTED_MOST + 1);
    unsigned char *room = malloc(expected ? expected : 1);
    qc_error err = {0};
    FUZZ_CHECK(room != NULL);
    qc_status st = qc_frame_decode(c, data + 4, size - 4, room, expected, &err);
    FUZZ_CHECK(st == QC_OK || (qc_status_exit_code(st) == 3 && err.msg[0]));
    free(room);
}

static void both_ways(qc_frame_coder *c, int level, const uint8_t *data, size_t size)
{
    size_t cap = qc_frame_bound(size), len = 0;
    unsigned char *frame = malloc(cap);
    unsigned char *back = malloc(size ? size : 1);
    FUZZ_CHECK(frame && back);
    FUZZ_CHECK(qc_frame_encode(c, level, data, size, frame, cap, &len, NULL) == QC_OK);
    FUZZ_CHECK(len <= cap && len <= qc_raw_frame_bytes(size));
    FUZZ_CHECK(qc_frame_decode(c, frame, len, back, size, NULL) == QC_OK);
    FUZZ_CHECK(size == 0 || memcmp(back, data, size) == 0);
    FUZZ_CHECK(qc_frame_decode(c, frame, len - 1, back, size, NULL) != QC_OK);
    FUZZ_CHECK(size == 0 || qc_frame_decode(c, frame, len, back, size - 1, NULL) != QC_OK);
    /* Where the input says, one bit is turned. */
    size_t at = size ? (data[0] * 257u + data[size - 1]) % len : 0;
    frame[at] ^= (unsigned char)(1u << (size & 7));
    if (qc_frame_decode(c, frame, len, back, size, NULL) == QC_OK)
        FUZZ_CHECK(size == 0 || memcmp(back, data, size) == 0);
    free(back);
    free(frame);
}

int fuzz_one(const uint8_t *data, size_t size)
{
    qc_frame_coder *c = NULL;
    FUZZ_CHECK(qc_frame_coder_create(&c, NULL) == QC_OK);
    decode(c, data, size);
    both_ways(c, size % 2 ? 1 : 3, data, size);
    qc_frame_coder_destroy(c);
    return 0;
}
