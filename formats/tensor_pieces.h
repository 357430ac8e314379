/* Tensors of a checkpoint whose bytes are not one range of one file: several tensors laid end to
 * end, a matrix that the file has the other way round, or a text. They are read like any other
 * (qc_checkpoint_read). */
#ifndef QC_FORMATS_TENSOR_PIECES_H
#define QC_FORMATS_TENSOR_PIECES_H

#include "formats/checkpoint.h"

/* Makes t, whose name, dtype and shape are set, the tensors of parts, all of the same size. The
 * list is kept, and lives in the checkpoint's arena. */
QC_NODISCARD qc_status qc_tensor_join(qc_checkpoint *c, qc_checkpoint_tensor *t,
                                      const qc_checkpoint_tensor *parts, size_t count,
                                      qc_error *err);
/* A matrix of rows x cols of which the file has the columns, one after the other. Each begins a run
 * of `stride` elements in which `first` lie before it, as where gate and up are joined. Those of a
 * stack of matrices go on behind each other. */
typedef struct {
    uint64_t rows, cols, stride, first;
} qc_turned;
/* Makes t, a part of `from` whose name and shape are set, a tensor whose matrices lie turned: the
 * first of them begins `matrix` matrices behind the first of `from`. */
QC_NODISCARD qc_status qc_tensor_turn(qc_checkpoint *c, qc_checkpoint_tensor *t,
                                      const qc_checkpoint_tensor *from, const qc_turned *turned,
                                      uint64_t matrix, qc_error *err);
/* Reads len bytes of the matrices that lie turned in t. They are read in tiles of some rows, 4 MiB
 * or a row at most, for which a part of each column is read; the cursor keeps the last tile, and
 * nothing more is held, however large the matrix is. */
QC_NODISCARD qc_status qc_tensor_read_turned(const qc_checkpoint *c, qc_st_cursor *cur,
                                             const qc_checkpoint_tensor *t, const qc_turned *turned,
                                             uint64_t offset, void *dst, size_t len, qc_error *err);
/* Makes t, whose name is set, a tensor of U8 with these bytes, which are copied. */
QC_NODISCARD qc_status qc_tensor_text(qc_checkpoint *c, qc_checkpoint_tensor *t, const char *bytes,
                                      size_t len, qc_error *err);

#endif
