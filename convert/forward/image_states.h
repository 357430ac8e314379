/* The states of images that layers with cross-attention see: what a vision tower and its projector
 * make of an image. They come in a safetensors file, where N counts the sequences of a text from 0:
 *
 *   states.N    of the image of sequence N, [tokens, hidden], in F32, F16 or BF16
 *   states      of the image of every sequence that has none of its own
 *   padding.N, padding   of the tiles that only pad the image; need not be there
 *
 * They are read as they are needed, because the states of one image may take 100 MB. One thread
 * reads them. */
#ifndef QC_CONVERT_IMAGE_STATES_H
#define QC_CONVERT_IMAGE_STATES_H

#include "base/cpu.h"
#include "formats/checkpoint.h"

typedef struct qc_image_states qc_image_states;

typedef struct {
    uint64_t number; /* of the sequence that it belongs to; UINT64_MAX: all without their own */
    const qc_checkpoint_tensor *states, *padding; /* padding: NULL if there is none */
    uint64_t seen, all;                           /* tokens of the states, and with the padding's */
} qc_image;

/* Opens the file and checks names and shapes, and that all numbers are finite. QC_ERR_INPUT,
 * QC_ERR_SHAPE, QC_ERR_UNSUPPORTED and QC_ERR_NONFINITE, with the tensor's name. */
QC_NODISCARD qc_status qc_image_states_open(qc_image_states **out, const char *path, qc_isa isa,
                                            qc_error *err);
void qc_image_states_close(qc_image_states *s); /* NULL is fine */
const char *qc_image_states_path(const qc_image_states *s);
/* Returns the floats of a state. */
uint64_t qc_image_states_width(const qc_image_states *s);
/* Returns the tokens of the largest image, with its padding. */
uint64_t qc_image_states_longest(const qc_image_states *s);
/* Returns the image of a sequence, or NULL if there is none. */
const qc_image *qc_image_of(const qc_image_states *s, uint64_t sequence);
/* Reads tokens [first, first + n) of states and padding, which stand behind each other, as
 * floats. */
QC_NODISCARD qc_status qc_image_read(qc_image_states *s, const qc_image *image, uint64_t first,
                                     uint64_t n, float *out, qc_error *err);

#endif
