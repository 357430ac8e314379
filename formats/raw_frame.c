/* Zstandard frames of raw blocks, which are made without compressing.
 *
 *   28 B5 2F FD | A4 | u32 content bytes | blocks of up to 128 KiB | u32 checksum
 *   block: 3 bytes LE: last | 0 << 1 | bytes << 3, then the bytes
 *
 * A4: content size in 4 bytes (10......), single segment (..1.....), checksum (.....1..). The
 * checksum is the low half of XXH64 of the content. So a frame's size depends on the size of its
 * content only.
 *
 * Reading a frame into a buffer and decoding it there costs a copy and XXH64 more than reading the
 * content to where it goes. qc_raw_frame_read does the latter, block by block, and hashes each
 * block while it is in the cache. A block is read together with the 3 bytes before the next block,
 * which then overwrites them. */
#define XXH_INLINE_ALL /* a state on the stack */
#include <xxhash.h>

#include "formats/seekable.h"

#include "base/bytes.h"
#include "base/checked.h"

#include <string.h>

#define FRAME_MAGIC     0xFD2FB528u
#define DESCRIPTOR      0xA4u
#define HEAD_BYTES      9u
#define BLOCK_HEAD      3u
#define BLOCK_MAX_BYTES (128u << 10)
#define CHECKSUM_BYTES  4u

size_t qc_raw_frame_bytes(size_t content_bytes)
{
    const size_t blocks = content_bytes ? (content_bytes - 1) / BLOCK_MAX_BYTES + 1 : 1;
    return HEAD_BYTES + blocks * BLOCK_HEAD + content_bytes + CHECKSUM_BYTES;
}

/* Makes the head of a block with `left` bytes of content from its own on. */
static void store_block_head(unsigned char p[BLOCK_HEAD], size_t left)
{
    uint32_t v = (uint32_t)qc_min_size(left, BLOCK_MAX_BYTES) << 3 | (left <= BLOCK_MAX_BYTES);
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
        size_t n = qc_min_size(len - done, BLOCK_MAX_BYTES);
        store_block_head(p, len - done);
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

qc_status qc_raw_frame_read(int *as_written, const qc_file *f, uint64_t offset, void *dst,
                            size_t content_bytes, qc_digest_state *hash, qc_error *err)
{
    unsigned char want[HEAD_BYTES + BLOCK_HEAD], head[HEAD_BYTES + BLOCK_HEAD];
    unsigned char tail[CHECKSUM_BYTES], *p = dst;
    XXH64_state_t sum;
    *as_written = 0;
    qc_store_le32(want, FRAME_MAGIC);
    want[4] = DESCRIPTOR;
    qc_store_le32(want + 5, (uint32_t)content_bytes);
    store_block_head(want + HEAD_BYTES, content_bytes);
    QC_TRY(qc_file_pread(f, head, sizeof head, offset, err));
    if (memcmp(head, want, sizeof head) != 0)
        return QC_OK;
    if (hash)
        qc_digest_update(hash, head, sizeof head);
    else
        (void)XXH64_reset(&sum, 0);
    offset += sizeof head;
    for (size_t left = content_bytes; left > 0;) {
        size_t n = qc_min_size(left, BLOCK_MAX_BYTES);
        /* The last block, or one with too little behind it for another head, is read alone. */
        size_t more = left - n >= BLOCK_HEAD ? BLOCK_HEAD : 0;
        unsigned char *next = p + n;
        QC_TRY(qc_file_pread(f, p, n + more, offset, err));
        offset += n + more;
        if (left > n && more == 0) {
            QC_TRY(qc_file_pread(f, head, BLOCK_HEAD, offset, err));
            offset += BLOCK_HEAD;
            next = head;
        }
        if (hash)
            qc_digest_update(hash, p, n);
        else
            (void)XXH64_update(&sum, p, n);
        left -= n;
        p += n;
        if (left == 0)
            break;
        store_block_head(want, left);
        if (memcmp(next, want, BLOCK_HEAD) != 0)
            return QC_OK;
        if (hash)
            qc_digest_update(hash, want, BLOCK_HEAD);
    }
    QC_TRY(qc_file_pread(f, tail, sizeof tail, offset, err));
    if (hash)
        qc_digest_update(hash, tail, sizeof tail);
    else if ((uint32_t)XXH64_digest(&sum) != qc_load_le32(tail))
        QC_FAIL(err, QC_ERR_INPUT, "the frame's checksum does not fit its content");
    *as_written = 1;
    return QC_OK;
}
