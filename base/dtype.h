/* Element types of safetensors files.
 * Source: safetensors, enum Dtype. The order is the reference's ("increasing alignment"), and its
 * writer sorts tensors by it, largest first. Append a type here only where the reference appends
 * it. */
#ifndef QC_BASE_DTYPE_H
#define QC_BASE_DTYPE_H

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, bits per element) */
#define QC_DTYPE_MAP(X)                                                                            \
    X(BOOL, 8)                                                                                     \
    X(F4, 4)                                                                                       \
    X(F6_E2M3, 6)                                                                                  \
    X(F6_E3M2, 6)                                                                                  \
    X(U8, 8)                                                                                       \
    X(I8, 8)                                                                                       \
    X(F8_E5M2, 8)                                                                                  \
    X(F8_E4M3, 8)                                                                                  \
    X(F8_E8M0, 8)                                                                                  \
    X(F8_E4M3FNUZ, 8)                                                                              \
    X(F8_E5M2FNUZ, 8)                                                                              \
    X(I16, 16)                                                                                     \
    X(U16, 16)                                                                                     \
    X(F16, 16)                                                                                     \
    X(BF16, 16)                                                                                    \
    X(I32, 32)                                                                                     \
    X(U32, 32)                                                                                     \
    X(F32, 32)                                                                                     \
    X(C64, 64)                                                                                     \
    X(F64, 64)                                                                                     \
    X(I64, 64)                                                                                     \
    X(U64, 64)

typedef enum {
#define QC_DTYPE_ENUM(name, bits) QC_DTYPE_##name,
    QC_DTYPE_MAP(QC_DTYPE_ENUM)
#undef QC_DTYPE_ENUM
        QC_DTYPE_COUNT
} qc_dtype;

#define QC_MAX_DIMS 8

/* Returns safetensors' exact spelling, like "BF16"; NULL for an unknown type. */
QC_API const char *qc_dtype_name(qc_dtype t);
QC_API unsigned qc_dtype_bits(qc_dtype t);
/* Case-sensitive; reads len bytes at name, which need no NUL. Returns 0 and sets *out, or returns 1
 * if the name is unknown. */
QC_API int qc_dtype_from_name(const char *name, size_t len, qc_dtype *out);
/* Returns whether the quantizers can read t: F64, F32, F16 and BF16. */
QC_API int qc_dtype_is_quantizable(qc_dtype t);
/* Returns whether t is a whole number or a boolean. */
int qc_dtype_is_integer(qc_dtype t);
/* "float32", "bfloat16", ... as PyTorch prints it without "torch."; NULL where PyTorch has no such
 * type. */
QC_API const char *qc_dtype_torch_name(qc_dtype t);
/* Returns the type that PyTorch calls so; QC_DTYPE_COUNT if there is none. */
qc_dtype qc_dtype_from_torch_name(const char *name);

/* Is it one of the 8-bit floats that weights are released in? */
static inline int qc_dtype_is_fp8(qc_dtype t)
{
    return t == QC_DTYPE_F8_E4M3 || t == QC_DTYPE_F8_E5M2;
}

/* Count the elements and the bytes of a tensor, with all products checked. ndim 0 is a scalar (1
 * element). It is QC_ERR_USAGE where a pointer is NULL (dims may be NULL for a scalar);
 * QC_ERR_INPUT on overflow or when the bits do not make whole bytes. */
QC_API QC_NODISCARD qc_status qc_shape_elems(const uint64_t *dims, unsigned ndim, uint64_t *elems,
                                             qc_error *err);
QC_API QC_NODISCARD qc_status qc_shape_bytes(const uint64_t *dims, unsigned ndim, qc_dtype t,
                                             uint64_t *bytes, qc_error *err);

#ifdef __cplusplus
}
#endif
#endif
