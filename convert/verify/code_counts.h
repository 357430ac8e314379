/* Counts how often each code of the quantized weights of an output occurs, while verify reads it
 * anyway. `qconv verify --codes` prints the counts, and the pages of the Python package draw
 * them. */
#ifndef QC_CONVERT_CODE_COUNTS_H
#define QC_CONVERT_CODE_COUNTS_H

#include "convert/model/recipe_stored.h"
#include "formats/json_writer.h"
#include "formats/output_frames.h"

#include <stdatomic.h>

/* The counts of one quantized weight. */
typedef struct {
    const char *name;
    qc_form form;
    uint64_t elems, bytes;        /* count and length of the codes alone */
    atomic_uint_fast64_t *counts; /* [2^bits], by the code as it is stored */
} qc_code_count;

typedef struct {
    qc_code_count *weights; /* in natural order of names */
    uint32_t count;
    uint32_t *of_tensor; /* per tensor of the checkpoint, or after qc_code_counts_open of the
                            manifest: its weight, or QC_NO_TENSOR */
} qc_code_counts;

/* Makes room for the stored weights of a checkpoint. Everything lives in the arena, and nothing of
 * the checkpoint is kept. */
QC_NODISCARD qc_status qc_code_counts_make(qc_code_counts *c, qc_arena *arena,
                                           const qc_checkpoint *output, const qc_stored_set *stored,
                                           qc_error *err);
/* Makes room for those of the output in the folder dir, whose manifest is m, for
 * qc_code_counts_sink. An output that is too damaged to be a checkpoint has none; verify says what
 * is wrong with it. */
QC_NODISCARD qc_status qc_code_counts_open(qc_code_counts *c, qc_arena *arena, const char *dir,
                                           const qc_manifest *m, qc_error *err);

/* Counts bytes [offset, offset + len) of a tensor of the checkpoint or the manifest. Tensors that
 * hold no codes are left out. Many threads may call it at once. */
void qc_code_counts_add(qc_code_counts *c, uint32_t tensor, uint64_t offset, const void *bytes,
                        size_t len);
/* Does the same with what qc_scan_output hands on; it is a qc_scan_sink, and ctx the counts. */
QC_NODISCARD qc_status qc_code_counts_sink(void *ctx, unsigned worker, const qc_output_frame *frame,
                                           const void *content, qc_error *err);

/* Writes the member "codes". */
void qc_code_counts_put(qc_json_writer *w, qc_code_counts *c);

#endif
