/* Frames through libzstd; how to compress each is decided beforehand.
 *
 * Quantized weights have no repetitions. All that can be saved is the skew of single bytes (2.5% of
 * NF4 codes, 4 to 12% of int8, 22% of bf16). At level 1 such frames therefore skip the search for
 * matches ("entropy": one probe per block, Huffman coding forced on). Huffman decoding runs at 0.8
 * GB/s a core, while stored frames load at the speed of the page cache, so compressing a frame is
 * not worth it below 4%, whatever the level (docs/decisions/0013-stored-below-four-percent.md).
 * Whether and how a frame is compressed at level 1 is tried on a sample:
 *
 *   four pieces of 16 KiB --plain level 1--> a bytes
 *                         --entropy only---> b bytes
 *   both save less than 3%: store        a is 2% smaller than b: plain        else: entropy only
 *
 * Measured (docs/performance.md): 0.83 GB/s against 0.79 plain and 0.72 at level 3, with sizes
 * equal within 0.01%; 6 GB/s against 3 where there is too little to save. The rest of the time is
 * Huffman coding.
 *
 * Frames below 256 KiB are compressed plainly. Whichever way was taken, a frame that does not save
 * 4% is stored. All of this depends on the content only. */
#define ZSTD_STATIC_LINKING_ONLY /* memory hooks, literal compression mode */
#include <zstd.h>
#include <zstd_errors.h>

#include "formats/seekable.h"

#include "base/alloc.h"
#include "base/bytes.h"

#include <string.h>

#define FRAME_MAGIC        0xFD2FB528u
#define SAMPLED_FROM_BYTES (256u << 10)
#define SAMPLE_PIECES      4u
#define SAMPLE_PIECE_BYTES (16u << 10)
#define SAMPLE_BYTES       ((size_t)SAMPLE_PIECES * SAMPLE_PIECE_BYTES)
#define WORTH_PERCENT      96u /* a compressed frame has at most this much of its content's size */
#define SAMPLE_PERCENT     97u /* frames whose sample is larger are stored: samples vary */

struct qc_frame_coder {
    ZSTD_CCtx *compress;
    ZSTD_DCtx *expand;
    unsigned char *sample; /* SAMPLE_BYTES, then room to compress them */
    size_t sample_cap;
};

typedef enum { WAY_STORE, WAY_ENTROPY, WAY_PLAIN } encode_way;

static void *zstd_alloc(void *opaque, size_t bytes)
{
    (void)opaque;
    return qc_hook_malloc(bytes);
}

static void zstd_free(void *opaque, void *p)
{
    (void)opaque;
    qc_hook_free(p);
}

qc_status qc_frame_coder_create(qc_frame_coder **out, qc_error *err)
{
    ZSTD_customMem mem = {zstd_alloc, zstd_free, NULL};
    void *v = NULL;
    qc_status st = QC_OK;
    *out = NULL;
    qc_frame_coder *c = NULL;
    QC_TRY(qc_calloc(&c, 1, sizeof *c, err));
    c->sample_cap = ZSTD_compressBound(SAMPLE_BYTES);
    QC_TRY_GOTO(st, fail, qc_malloc(&v, SAMPLE_BYTES + c->sample_cap, err));
    c->sample = v;
    c->compress = ZSTD_createCCtx_advanced(mem);
    c->expand = ZSTD_createDCtx_advanced(mem);
    if (!c->compress || !c->expand) {
        st = QC_ERROR(err, QC_ERR_NOMEM, "there is not enough memory for zstd");
        goto fail;
    }
    *out = c;
    return QC_OK;
fail:
    qc_frame_coder_destroy(c);
    return st;
}

void qc_frame_coder_destroy(qc_frame_coder *c)
{
    if (!c)
        return;
    (void)ZSTD_freeCCtx(c->compress);
    (void)ZSTD_freeDCtx(c->expand);
    qc_free(c->sample);
    qc_free(c);
}

void qc_frame_coder_skip_checksums(qc_frame_coder *c)
{
    /* This cannot fail between frames; if it did, checksums would be checked. */
    (void)ZSTD_DCtx_setParameter(c->expand, ZSTD_d_forceIgnoreChecksum, ZSTD_d_ignoreChecksum);
}

const char *qc_frame_library_version(void)
{
    return ZSTD_versionString();
}

size_t qc_frame_coder_bytes(int level, size_t len)
{
    return level ? ZSTD_estimateCCtxSize_usingCParams(ZSTD_getCParams(level, len, 0)) : 0;
}

size_t qc_frame_bound(size_t len)
{
    size_t raw = qc_raw_frame_bytes(len);
    size_t bound = ZSTD_compressBound(len);
    return raw > bound ? raw : bound;
}

static qc_status zstd_failed(size_t code, const char *what, qc_status otherwise, qc_error *err)
{
    if (ZSTD_getErrorCode(code) == ZSTD_error_memory_allocation)
        QC_FAIL(err, QC_ERR_NOMEM, "there is not enough memory for zstd");
    QC_FAIL(err, otherwise, "%s: %s", what, ZSTD_getErrorName(code));
}

static size_t compress_way(qc_frame_coder *c, encode_way way, int level, const void *src,
                           size_t len, void *dst, size_t cap)
{
    static const struct {
        ZSTD_cParameter name;
        int value;
    } entropy[] = {
        {ZSTD_c_strategy, ZSTD_fast},
        {ZSTD_c_targetLength, ZSTD_TARGETLENGTH_MAX}, /* steps of the search */
        {ZSTD_c_hashLog, 6},
        {ZSTD_c_literalCompressionMode, (int)ZSTD_lcm_huffman},
    };
    size_t r = ZSTD_CCtx_reset(c->compress, ZSTD_reset_session_and_parameters);
    if (!ZSTD_isError(r))
        r = ZSTD_CCtx_setParameter(c->compress, ZSTD_c_compressionLevel, level);
    if (!ZSTD_isError(r))
        r = ZSTD_CCtx_setParameter(c->compress, ZSTD_c_checksumFlag, 1);
    for (size_t i = 0; way == WAY_ENTROPY && i < sizeof entropy / sizeof *entropy; i++) {
        if (!ZSTD_isError(r))
            r = ZSTD_CCtx_setParameter(c->compress, entropy[i].name, entropy[i].value);
    }
    return ZSTD_isError(r) ? r : ZSTD_compress2(c->compress, dst, cap, src, len);
}

static size_t choose_way(qc_frame_coder *c, const unsigned char *src, size_t len, encode_way *way)
{
    *way = WAY_PLAIN;
    if (len < SAMPLED_FROM_BYTES)
        return 0;
    for (unsigned i = 0; i < SAMPLE_PIECES; i++)
        memcpy(c->sample + (size_t)i * SAMPLE_PIECE_BYTES, src + len / SAMPLE_PIECES * i,
               SAMPLE_PIECE_BYTES);
    unsigned char *room = c->sample + SAMPLE_BYTES;
    size_t plain = compress_way(c, WAY_PLAIN, 1, c->sample, SAMPLE_BYTES, room, c->sample_cap);
    if (ZSTD_isError(plain))
        return plain;
    size_t entropy = compress_way(c, WAY_ENTROPY, 1, c->sample, SAMPLE_BYTES, room, c->sample_cap);
    if (ZSTD_isError(entropy))
        return entropy;
    if (plain > SAMPLE_BYTES / 100 * SAMPLE_PERCENT &&
        entropy > SAMPLE_BYTES / 100 * SAMPLE_PERCENT)
        *way = WAY_STORE;
    else if (plain * 100 >= entropy * 98)
        *way = WAY_ENTROPY;
    return 0;
}

qc_status qc_frame_encode(qc_frame_coder *c, int level, const void *src, size_t len, void *dst,
                          size_t cap, size_t *out_len, qc_error *err)
{
    encode_way way = WAY_PLAIN;
    size_t r = 0;
    if (len > QC_FRAME_MAX_BYTES || cap < qc_frame_bound(len))
        QC_FAIL(err, QC_ERR_INTERNAL, "a frame of %zu bytes does not fit %zu", len, cap);
    if (level < 1 || level > 19)
        QC_FAIL(err, QC_ERR_USAGE, "compression level: expected 1 to 19, found %d", level);
    if (level == 1)
        r = choose_way(c, src, len, &way);
    if (!ZSTD_isError(r) && way != WAY_STORE)
        r = compress_way(c, way, level, src, len, dst, cap);
    if (ZSTD_isError(r))
        return zstd_failed(r, "compression failed", QC_ERR_INTERNAL, err);
    if (way == WAY_STORE || r * 100 > len * WORTH_PERCENT) {
        qc_raw_frame_write(dst, src, len);
        r = qc_raw_frame_bytes(len);
    }
    *out_len = r;
    return QC_OK;
}

qc_status qc_frame_decode(qc_frame_coder *c, const void *src, size_t len, void *dst,
                          size_t content_bytes, qc_error *err)
{
    if (len < 4 || qc_load_le32(src) != FRAME_MAGIC)
        QC_FAIL(err, QC_ERR_INPUT, "the frame does not begin as a zstd frame does");
    size_t one = ZSTD_findFrameCompressedSize(src, len);
    if (ZSTD_isError(one))
        return zstd_failed(one, "frame", QC_ERR_INPUT, err);
    if (one != len)
        QC_FAIL(err, QC_ERR_INPUT, "the frame ends after %zu bytes; expected %zu", one, len);
    size_t r = ZSTD_decompressDCtx(c->expand, dst, content_bytes, src, len);
    if (ZSTD_isError(r))
        return zstd_failed(r, "frame", QC_ERR_INPUT, err);
    if (r != content_bytes)
        QC_FAIL(err, QC_ERR_INPUT, "the frame holds %zu bytes; expected %zu", r, content_bytes);
    return QC_OK;
}
