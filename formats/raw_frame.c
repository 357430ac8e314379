/* Zstandard frames of raw blocks: made without compressing.
 *
 *   28 B5 2F FD | A4 | u32 content bytes | blocks of up to 128 KiB | u32 checksum
 *   block: 3 bytes LE: last | 0 << 1 | bytes << 3, then the bytes
 *
 * A4: content size in 4 bytes (10......), single segment (..1.....), checksum (.....1..). The
 * checksum is the low half of XXH64 of the content. So the size depends on the content's size only.
 *
 * Measured: libzstd reads them as fast as code of our own would, bound by XXH64. */
#define XXH_INLINE_ALL /* a state on the stack */
#include <xxhash.h>

#include "formats/seekable.h"

#include "base/bytes.h"

#include <string.h>

#define FRAME_MAGIC     0xFD2FB528u
#define DESCRIPTOR      0xA4u
#define HEAD_BYTES      9u
#define BLOCK_HEAD      3u
#define BLOCK_MAX_BYTES (128u << 10)
#define CHECKSUM_BYTES  4u

static size_t block_count(size_t content_bytes)
{
    return content_bytes ? (content_bytes - 1) / BLOCK_MAX_BYTES + 1 : 1;
}

size_t qc_raw_frame_bytes(size_t content_bytes)
{
    return HEAD_BYTES + block_count(content_bytes) * BLOCK_HEAD + content_bytes + CHECKSUM_BYTES;
}

static void store_block_head(unsigned char *p, size_t bytes, int last)
{
    uint32_t v = (uint32_t)bytes << 3 | (last ? 1u : 0u);
    p[0] = (unsigned char)v;
    p[1] = (unsigned char)(v >> 8);
    p[2] = (unsigned char)(v >> 16);
}

void qc_raw_frame_write(void *dst, const void *src, size_t len)
{
    unsigned char *p = dst;
    const unsigned char *from = src;
    XXH64_state_t hash;
    (void)XXH64_reset(&hash, 0);
    qc_store_le32(p, FRAME_MAGIC);
    p[4] = DESCRIPTOR;
    qc_store_le32(p + 5, (uint32_t)len);
    p += HEAD_BYTES;
    size_t done = 0;
    do {
        size_t n = len - done < BLOCK_MAX_BYTES ? len - done : BLOCK_MAX_BYTES;
        store_block_head(p, n, done + n == len);
        p += BLOCK_HEAD;
        if (n) {
            memcpy(p, from + done, n);
            (void)XXH64_update(&hash, p, n);
        }
        p += n;
        done += n;
    } while (done < len);
    qc_store_le32(p, (uint32_t)XXH64_digest(&hash));
}
