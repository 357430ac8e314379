#include "base/dtype.h"

#include "base/checked.h"

#include <string.h>

static const struct {
    const char *name;
    unsigned bits;
} dtype_table[QC_DTYPE_COUNT] = {
#define QC_DTYPE_ROW(name, bits) {#name, bits},
    QC_DTYPE_MAP(QC_DTYPE_ROW)
#undef QC_DTYPE_ROW
};

const char *qc_dtype_name(qc_dtype t)
{
    return (unsigned)t < QC_DTYPE_COUNT ? dtype_table[t].name : NULL;
}

unsigned qc_dtype_bits(qc_dtype t)
{
    return (unsigned)t < QC_DTYPE_COUNT ? dtype_table[t].bits : 0;
}

int qc_dtype_from_name(const char *name, size_t len, qc_dtype *out)
{
    for (int i = 0; name && out && i < QC_DTYPE_COUNT; i++) {
        if (strlen(dtype_table[i].name) == len && memcmp(dtype_table[i].name, name, len) == 0) {
            *out = (qc_dtype)i;
            return 0;
        }
    }
    return 1;
}

int qc_dtype_is_quantizable(qc_dtype t)
{
    return t == QC_DTYPE_F64 || t == QC_DTYPE_F32 || t == QC_DTYPE_F16 || t == QC_DTYPE_BF16;
}

int qc_dtype_is_integer(qc_dtype t)
{
    return t == QC_DTYPE_BOOL || t == QC_DTYPE_U8 || t == QC_DTYPE_I8 || t == QC_DTYPE_I16 ||
           t == QC_DTYPE_U16 || t == QC_DTYPE_I32 || t == QC_DTYPE_U32 || t == QC_DTYPE_I64 ||
           t == QC_DTYPE_U64;
}

static const char *const torch_names[QC_DTYPE_COUNT] = {
    [QC_DTYPE_F64] = "float64",   [QC_DTYPE_F32] = "float32", [QC_DTYPE_F16] = "float16",
    [QC_DTYPE_BF16] = "bfloat16", [QC_DTYPE_U8] = "uint8",    [QC_DTYPE_I8] = "int8",
    [QC_DTYPE_I16] = "int16",     [QC_DTYPE_I32] = "int32",   [QC_DTYPE_I64] = "int64",
    [QC_DTYPE_BOOL] = "bool",
};

const char *qc_dtype_torch_name(qc_dtype t)
{
    return (unsigned)t < QC_DTYPE_COUNT ? torch_names[t] : NULL;
}

qc_dtype qc_dtype_from_torch_name(const char *name)
{
    int t = 0;
    while (t < QC_DTYPE_COUNT && (!torch_names[t] || strcmp(torch_names[t], name) != 0))
        t++;
    return (qc_dtype)t;
}

qc_status qc_shape_elems(const uint64_t *dims, unsigned ndim, uint64_t *elems, qc_error *err)
{
    uint64_t n = 1;
    if (!elems || (!dims && ndim > 0))
        QC_FAIL(err, QC_ERR_USAGE, "qc_shape_elems: %s NULL", elems ? "dims is" : "elems is");
    for (unsigned i = 0; i < ndim; i++) {
        if (qc_mul_u64(n, dims[i], &n))
            QC_FAIL(err, QC_ERR_INPUT, "the number of elements overflows 64 bits");
    }
    *elems = n;
    return QC_OK;
}

qc_status qc_shape_bytes(const uint64_t *dims, unsigned ndim, qc_dtype t, uint64_t *bytes,
                         qc_error *err)
{
    uint64_t n = 0;
    if (!bytes || (unsigned)t >= QC_DTYPE_COUNT)
        QC_FAIL(err, QC_ERR_USAGE, "qc_shape_bytes: %s",
                bytes ? "there is no such dtype" : "bytes is NULL");
    QC_TRY(qc_shape_elems(dims, ndim, &n, err));
    if (qc_mul_u64(n, qc_dtype_bits(t), &n))
        QC_FAIL(err, QC_ERR_INPUT, "the number of bits overflows 64 bits");
    if (n % 8 != 0)
        QC_FAIL(err, QC_ERR_INPUT, "its elements of type %s do not fill whole bytes",
                qc_dtype_name(t));
    *bytes = n / 8;
    return QC_OK;
}
