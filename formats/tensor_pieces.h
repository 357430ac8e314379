/* Tensors of a checkpoint whose bytes are not one range of one file: several tensors laid end to
 * end, or a text. They are read like any other (qc_checkpoint_read). */
#ifndef QC_FORMATS_TENSOR_PIECES_H
#define QC_FORMATS_TENSOR_PIECES_H

#include "formats/checkpoint.h"

/* Makes t, whose name, dtype and shape are set, the tensors of parts, all of the same size. The
 * list is kept, and lives in the checkpoint's arena. */
QC_NODISCARD qc_status qc_tensor_join(qc_checkpoint *c, qc_checkpoint_tensor *t,
                                      const qc_checkpoint_tensor *parts, size_t count,
                                      qc_error *err);
/* Makes t, whose name is set, a tensor of U8 with these bytes, which are copied. */
QC_NODISCARD qc_status qc_tensor_text(qc_checkpoint *c, qc_checkpoint_tensor *t, const char *bytes,
                                      size_t len, qc_error *err);

#endif
