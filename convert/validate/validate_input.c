#include "convert/validate/validate_input.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/random.h"
#include "base/text.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define NAME_BYTES 4096u

qc_status qc_validate_input_open(qc_validate_input *in, const char *path, uint64_t seed,
                                 const qc_quant_ops *ops, qc_error *err)
{
    memset(in, 0, sizeof *in);
    in->seed = seed;
    in->ops = ops;
    if (!path)
        return QC_OK;
    QC_TRY(qc_checkpoint_open(&in->file, path, err));
    return qc_st_cursor_create(&in->cursor, err);
}

void qc_validate_input_close(qc_validate_input *in)
{
    qc_free(in->x);
    qc_st_cursor_destroy(in->cursor);
    qc_checkpoint_close(in->file);
    memset(in, 0, sizeof *in);
}

/* Finds a tensor that can serve: it has floats, the right width and at least one row. */
static const qc_checkpoint_tensor *usable(const qc_validate_input *in, const char *name,
                                          uint64_t cols)
{
    const qc_checkpoint_tensor *t = qc_checkpoint_find(in->file, name);
    return t && t->ndim > 0 && t->bytes > 0 && t->dims[t->ndim - 1] == cols &&
                   qc_dtype_is_quantizable(t->dtype)
               ? t
               : NULL;
}

static const qc_checkpoint_tensor *find(const qc_validate_input *in, const char *layer,
                                        uint64_t cols)
{
    char name[NAME_BYTES];
    const qc_checkpoint_tensor *t = usable(in, layer, cols);
    size_t len = strlen(layer), tail = sizeof ".weight" - 1;
    if (!t && qc_ends_with(layer, ".weight") && len - tail < sizeof name) {
        memcpy(name, layer, len - tail);
        name[len - tail] = '\0';
        t = usable(in, name, cols);
    }
    if (!t) {
        (void)snprintf(name, sizeof name, "%" PRIu64, cols);
        t = usable(in, name, cols);
    }
    return t;
}

const char *qc_validate_input_find(const qc_validate_input *in, const char *layer, uint64_t cols)
{
    if (!in->file)
        return "";
    const qc_checkpoint_tensor *t = find(in, layer, cols);
    return t ? t->name : NULL;
}

/* ---- random numbers ------------------------------------------------------------------------- */

/* The method is Box and Muller's. */
static void normal_row(uint64_t seed, uint64_t row, uint64_t cols, float *out)
{
    uint64_t state = seed, mixed = qc_random_next(&state) ^ cols;
    state = mixed;
    mixed = qc_random_next(&state) ^ row;
    state = mixed;
    for (uint64_t k = 0; k < cols; k += 2) {
        double radius = sqrt(-2.0 * log(qc_random_uniform(&state)));
        double angle = 6.283185307179586 * qc_random_uniform(&state);
        out[k] = (float)(radius * cos(angle));
        if (k + 1 < cols)
            out[k + 1] = (float)(radius * sin(angle));
    }
}

/* ---- rows ----------------------------------------------------------------------------------- */

/* Takes rows that are spread evenly over all that there are. */
static qc_status captured(qc_validate_input *in, const qc_checkpoint_tensor *t, void *row_bytes,
                          qc_error *err)
{
    const unsigned infinity = in->dtype == QC_DTYPE_F16 ? 0x7c00u : 0x7f80u;
    uint64_t each = qc_dtype_bits(t->dtype) / 8, width = in->cols * each, overflow = 0;
    uint64_t have = t->bytes / width;
    for (uint64_t r = 0; r < in->rows; r++) {
        uint64_t from =
            have >= in->rows ? r * (have / in->rows) + r * (have % in->rows) / in->rows : r % have;
        uint16_t *x = (uint16_t *)in->x + r * in->cols;
        QC_TRY(qc_checkpoint_read(in->file, in->cursor, t, from * width, row_bytes, (size_t)width,
                                  err));
        in->ops->cast(row_bytes, t->dtype, in->cols, x, in->dtype, &overflow);
        if (overflow != UINT64_MAX)
            QC_FAIL(err, QC_ERR_RANGE, "%s: tensor '%s': a value is too large for %s",
                    in->file->path, t->name, qc_dtype_name(in->dtype));
        for (uint64_t k = 0; k < in->cols; k++)
            if ((x[k] & infinity) == infinity)
                QC_FAIL(err, QC_ERR_NONFINITE, "%s: tensor '%s': a value is not finite",
                        in->file->path, t->name);
    }
    return QC_OK;
}

qc_status qc_validate_input_make(qc_validate_input *in, const char *layer, qc_dtype dtype,
                                 uint64_t rows, uint64_t cols, qc_error *err)
{
    uint64_t bytes = 0, overflow = 0;
    void *v = NULL;
    if (in->x && in->of_random && in->dtype == dtype && in->rows == rows && in->cols == cols)
        return QC_OK;
    qc_free(in->x);
    in->x = NULL;
    if (qc_mul_u64(rows, cols, &bytes) || qc_mul_u64(bytes, sizeof(double), &bytes))
        QC_FAIL(err, QC_ERR_NOMEM, "activations [%" PRIu64 ", %" PRIu64 "] do not fit memory", rows,
                cols);
    QC_TRY(qc_malloc(&in->x, (size_t)(rows * cols) * sizeof(uint16_t), err));
    in->dtype = dtype;
    in->rows = rows;
    in->cols = cols;
    in->of_random = in->file == NULL;
    QC_TRY(qc_malloc(&v, (size_t)cols * sizeof(double), err));
    qc_status st = QC_OK;
    if (in->file) {
        const qc_checkpoint_tensor *t = find(in, layer, cols);
        st = t ? captured(in, t, v, err)
               : QC_ERROR(err, QC_ERR_INTERNAL,
                          "there are no activations for '%s', although some were found before",
                          layer);
    } else {
        for (uint64_t r = 0; r < rows; r++) {
            normal_row(in->seed, r, cols, v);
            in->ops->cast(v, QC_DTYPE_F32, cols, (uint16_t *)in->x + r * cols, dtype, &overflow);
        }
    }
    qc_free(v);
    return st;
}
