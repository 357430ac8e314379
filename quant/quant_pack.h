/* Codes of 2 to 8 bits that lie without gaps, least significant bits first, as compressed-tensors
 * packs them to 32-bit words: eight codes are as many bytes as a code has bits.
 *
 * Source: pack_to_int32 of compressed-tensors 0.18 and newer. */
#ifndef QC_QUANT_QUANT_PACK_H
#define QC_QUANT_QUANT_PACK_H

#include <stdint.h>

/* Writes n codes, each in the low bits of its byte, to qc_code_bytes(bits, n) bytes. The bits after
 * the last code are 0. */
void qc_codes_pack(unsigned bits, const uint8_t *codes, uint64_t n, void *packed);
/* Reads n codes, each to a byte. */
void qc_codes_unpack(unsigned bits, const void *packed, uint64_t n, uint8_t *codes);

#endif
