#include "convert/calibrate/door_values.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"

#include <inttypes.h>

/* This much is written at a time, or one row where that is more. */
#define PIECE_BYTES ((uint64_t)4 << 20)

qc_status qc_door_values_open(qc_door_values *v, const char *path, qc_error *err)
{
    v->bytes = 0;
    return qc_file_create(&v->file, path, err);
}

static qc_status put_floats(qc_door_values *v, const float *x, uint64_t n, qc_error *err)
{
    const size_t bytes = (size_t)n * sizeof *x;
    QC_TRY(qc_file_pwrite(&v->file, x, bytes, v->bytes, err));
    v->bytes += bytes;
    return QC_OK;
}

/* room: for `rows` rows of the weight. */
static qc_status put_rows(qc_door_values *v, const qc_calibrator *k, const qc_weights *w,
                          uint64_t cols, uint64_t rows, float *room, qc_error *err)
{
    for (uint64_t first = 0; first < w->rows; first += rows) {
        const uint64_t now = qc_min_u64(rows, w->rows - first);
        QC_TRY(qc_check_interrupted(err));
        for (uint64_t r = 0; r < now; r++)
            qc_weights_row(k->ops, w, first + r, room + r * cols);
        QC_TRY(put_floats(v, room, now * cols, err));
    }
    return QC_OK;
}

/* The tensor lies as [cols, rows]. room: a row, and behind it the whole weight. */
static qc_status put_turned(qc_door_values *v, const qc_calibrator *k, const qc_weights *w,
                            uint64_t cols, float *room, qc_error *err)
{
    float *all = room + cols;
    for (uint64_t r = 0; r < w->rows; r++) {
        qc_weights_row(k->ops, w, r, room);
        for (uint64_t c = 0; c < cols; c++)
            all[c * w->rows + r] = room[c];
    }
    return put_floats(v, all, w->rows * cols, err);
}

static qc_status put(qc_door_values *v, const qc_calibrator *k, const qc_job *j,
                     const qc_calibrated_arrays *a, qc_error *err)
{
    qc_weights w = {.form = j->form, .rows = j->rows, .codes = a->codes, .absmax = a->absmax};
    const int turned = j->entry->transpose;
    const uint64_t row = j->form.cols * sizeof(float);
    const uint64_t rows = turned ? j->rows + 1 : qc_max_u64(1, PIECE_BYTES / row);
    float *room = NULL;
    size_t size = 0;
    w.form.nested = 0; /* absmax holds the scales as a reader has them */
    if (qc_u64_to_size(qc_sat_mul(rows, row), &size))
        QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s' is too large", j->name);
    QC_TRY(qc_malloc_aligned(&room, 64, size, err));
    const qc_status st = turned ? put_turned(v, k, &w, j->form.cols, room, err)
                                : put_rows(v, k, &w, j->form.cols, rows, room, err);
    qc_free(room);
    return st;
}

qc_status qc_door_values_put(qc_door_values *v, qc_calibrator *k, uint32_t number, int searched,
                             qc_error *err)
{
    const qc_job j = qc_calibrated_weight(k->plan, number);
    qc_calibrated_arrays a = {0};
    float *w = NULL;
    qc_status st = qc_calibrated_alloc(&a, k->plan, number, err);
    if (st == QC_OK && searched)
        st = qc_calibrated_original(&w, &k->reader, k->plan, number, err);
    if (st == QC_OK)
        st = searched ? qc_calibrate_search(k, number, w, &a, err)
                      : qc_calibrated_get(k->store, number, &a, err);
    if (st == QC_OK)
        st = put(v, k, &j, &a, err);
    qc_free(w);
    qc_calibrated_free(&a);
    return st;
}

qc_status qc_door_values_close(qc_door_values *v, qc_error *err)
{
    return v->file.fd < 0 ? QC_OK : qc_file_close(&v->file, err);
}
