#include "quant/quant_pack.h"

#include "base/checked.h"

#include <string.h>

#define PAIRS UINT64_C(0x00ff00ff00ff00ff)
#define FOURS UINT64_C(0x0000ffff0000ffff)
#define HALF  UINT64_C(0x00000000ffffffff)

/* Moves eight bytes' low bits together: neighbours, then pairs, then fours. */
static uint64_t join(uint64_t x, unsigned bits)
{
    x = (x & PAIRS) | (x >> 8 & PAIRS) << bits;
    x = (x & FOURS) | (x >> 16 & FOURS) << 2 * bits;
    return (x & HALF) | (x >> 32) << 4 * bits;
}

/* Undoes join. */
static uint64_t part(uint64_t x, unsigned bits)
{
    const uint64_t four = (UINT64_C(1) << 4 * bits) - 1;
    const uint64_t two = ((UINT64_C(1) << 2 * bits) - 1) * UINT64_C(0x0000000100000001);
    const uint64_t one = ((UINT64_C(1) << bits) - 1) * UINT64_C(0x0001000100010001);
    x = (x & four) | (x >> 4 * bits & four) << 32;
    x = (x & two) | (x >> 2 * bits & two) << 16;
    return (x & one) | (x >> bits & one) << 8;
}

/* Eight bytes are written and read at a time; the last ones, which may not be there, one by one. */
void qc_codes_pack(unsigned bits, const uint8_t *codes, uint64_t n, void *packed)
{
    unsigned char *to = packed;
    uint64_t x, i = 0;
    for (; i + 8 <= n && (n - i) * bits >= 64; i += 8, to += bits) {
        memcpy(&x, codes + i, 8);
        x = join(x, bits);
        memcpy(to, &x, 8);
    }
    for (; i < n; i += 8, to += bits) {
        const unsigned count = qc_min_u32(n - i, 8);
        x = 0;
        memcpy(&x, codes + i, count);
        x = join(x, bits);
        memcpy(to, &x, (count * bits + 7) / 8);
    }
}

void qc_codes_unpack(unsigned bits, const void *packed, uint64_t n, uint8_t *codes)
{
    const unsigned char *from = packed;
    uint64_t x, i = 0;
    for (; i + 8 <= n && (n - i) * bits >= 64; i += 8, from += bits) {
        memcpy(&x, from, 8);
        x = part(x, bits);
        memcpy(codes + i, &x, 8);
    }
    for (; i < n; i += 8, from += bits) {
        const unsigned count = qc_min_u32(n - i, 8);
        x = 0;
        memcpy(&x, from, (count * bits + 7) / 8);
        x = part(x, bits);
        memcpy(codes + i, &x, count);
    }
}
