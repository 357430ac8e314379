/* Little-endian loads and stores on unaligned bytes. */
#ifndef QC_BASE_BYTES_H
#define QC_BASE_BYTES_H

#include <stdint.h>

static inline uint32_t qc_load_le32(const void *p)
{
    const unsigned char *b = p;
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

static inline uint64_t qc_load_le64(const void *p)
{
    const unsigned char *b = p;
    return (uint64_t)qc_load_le32(b) | (uint64_t)qc_load_le32(b + 4) << 32;
}

static inline void qc_store_le32(void *p, uint32_t v)
{
    unsigned char *b = p;
    b[0] = (unsigned char)v;
    b[1] = (unsigned char)(v >> 8);
    b[2] = (unsigned char)(v >> 16);
    b[3] = (unsigned char)(v >> 24);
}

static inline void qc_store_le64(void *p, uint64_t v)
{
    unsigned char *b = p;
    qc_store_le32(b, (uint32_t)v);
    qc_store_le32(b + 4, (uint32_t)(v >> 32));
}

#endif
