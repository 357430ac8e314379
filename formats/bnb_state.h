/* The tensors that bitsandbytes stores beside a quantized weight, by name and form.
 * Source: bitsandbytes functional.py QuantState.as_dict(packed=True), nn/modules.py; see
 * docs/format.md.
 *
 *   NF4 weight M.weight [out, in]
 *       M.weight U8 [(n+1)/2, 1], M.weight.absmax, M.weight.quant_map,
 *       (nested) M.weight.nested_absmax, M.weight.nested_quant_map,
 *       M.weight.quant_state.bitsandbytes__nf4 U8 [len] (JSON)
 *   int8 row-wise
 *       M.weight I8 [out, in], M.SCB F32 [out], M.weight_format U8 [] */
#ifndef QC_FORMATS_BNB_STATE_H
#define QC_FORMATS_BNB_STATE_H

#include "base/dtype.h"
#include "base/status.h"

typedef struct {
    char quant_type[16]; /* "nf4", "fp4"; "int8" for qconv's block-wise int8 */
    uint64_t block_elems;
    qc_dtype source_dtype;
    unsigned ndim;
    uint64_t dims[QC_MAX_DIMS];
    int nested;
    uint64_t nested_block_elems;
    double nested_offset; /* a float, widened */
} qc_bnb_state;

/* The state is JSON as Python's json.dumps writes it, padded with spaces to a length
 * (qc_bnb_state_bytes) that depends on shape, dtype and block size only, not on the offset. So
 * sizes are known before any weight is read. json.loads ignores the spaces. */
size_t qc_bnb_state_bytes(const qc_bnb_state *s);
/* dst has room for qc_bnb_state_bytes(s) bytes; no NUL is written. */
QC_NODISCARD qc_status qc_bnb_state_write(const qc_bnb_state *s, char *dst, qc_error *err);
QC_NODISCARD qc_status qc_bnb_state_parse(qc_bnb_state *out, const char *json, size_t len,
                                          qc_error *err);

#endif
