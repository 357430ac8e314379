#include "convert/model/awq_layout.h"

#include "base/bytes.h"
#include "base/checked.h"

#define TILE_WORDS 16u /* a cache line of words, whose rows stay in L1 for all inputs of a group */

const uint8_t qc_awq_row[QC_AWQ_ROWS] = {0, 2, 4, 6, 1, 3, 5, 7};

/* A word of input k and the next one's are made of a byte of each of the 8 rows. */
static void pack_pair(const unsigned char *made, uint64_t row_bytes, unsigned char *word,
                      unsigned char *next)
{
    uint32_t low = 0, high = 0;
    for (unsigned i = 0; i < QC_AWQ_ROWS; i++) {
        const uint32_t byte = made[qc_awq_row[i] * row_bytes];
        low |= (byte & 15) << 4 * i;
        high |= (byte >> 4) << 4 * i;
    }
    qc_store_le32(word, low);
    qc_store_le32(next, high);
}

static void unpack_pair(unsigned char *made, uint64_t row_bytes, const unsigned char *word,
                        const unsigned char *next)
{
    const uint32_t low = qc_load_le32(word), high = qc_load_le32(next);
    for (unsigned i = 0; i < QC_AWQ_ROWS; i++)
        made[qc_awq_row[i] * row_bytes] =
            (unsigned char)((low >> 4 * i & 15) | (high >> 4 * i & 15) << 4);
}

#define EACH_PAIR(body)                                                                            \
    const uint64_t row_bytes = block / 2, words = rows / QC_AWQ_ROWS, group = rows * row_bytes;    \
    for (uint64_t at = 0; at < bytes; at += group)                                                 \
        for (uint64_t tile = 0; tile < words; tile += TILE_WORDS)                                  \
            for (uint64_t k = 0; k < row_bytes; k++)                                               \
                for (uint64_t i = tile; i < qc_min_u64(tile + TILE_WORDS, words); i++) {           \
                    const uint64_t from = at + i * QC_AWQ_ROWS * row_bytes + k;                    \
                    const uint64_t to = at + (2 * k * words + i) * 4;                              \
                    body;                                                                          \
                }

void qc_awq_pack(const unsigned char *made, uint64_t rows, uint64_t block, size_t bytes,
                 unsigned char *qweight)
{
    EACH_PAIR(pack_pair(made + from, row_bytes, qweight + to, qweight + to + 4 * words))
}

void qc_awq_unpack(const unsigned char *qweight, uint64_t rows, uint64_t block, size_t bytes,
                   unsigned char *made)
{
    EACH_PAIR(unpack_pair(made + from, row_bytes, qweight + to, qweight + to + 4 * words))
}
