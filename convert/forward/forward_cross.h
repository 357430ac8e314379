/* Layers whose tokens look at the states of an image instead of at each other: those of Llama 3.2
 * Vision (Meta 2024). A window sees one image, which is that of its sequence. From the image token
 * on its tokens see the image, and where there is no such token, all of them do. Tokens in front of
 * it get nothing of the layer's feed-forward part, and attention to the image with its padding:
 * this is how transformers computes.
 *
 * Keys and values of one image are in memory, for all windows in a row that see it. */
#ifndef QC_CONVERT_FORWARD_CROSS_H
#define QC_CONVERT_FORWARD_CROSS_H

#include "convert/forward/forward_layer.h"

/* Tokens of a chunk that see the same keys. */
typedef struct {
    uint64_t first, tokens; /* first: in the chunk */
    uint64_t keys;
} qc_cross_rows;

typedef struct {
    qc_image_states *states;  /* borrowed */
    const qc_image **images;  /* [windows] */
    const qc_image **uniques; /* [unique_count]: each image that a window sees, once */
    uint64_t *from;           /* [windows]: the first token that sees the image; it may be behind */
    uint64_t unique_count;
    uint64_t tokens;      /* of the uniques, without padding */
    const qc_image *held; /* whose keys and values are in kv; NULL: no one's */
    float *kv;            /* [tokens of the largest image, wide] */
    float *block;         /* [QC_FORWARD_TOKENS at most, hidden]: states that become keys */
    uint64_t wide;        /* of a key and a value of all heads */
    qc_cross_rows now;    /* what qc_cross_attend computes */
} qc_cross;

struct qc_phase_chunk; /* forward_phases.h */

/* The bytes that qc_cross_create allocates at most. Saturates. */
uint64_t qc_cross_bytes(const qc_forward_shape *shape, uint64_t tokens);
/* QC_ERR_INPUT where a sequence has no image; QC_ERR_UNSUPPORTED where a window has more than one
 * image token. *out has to be destroyed also after a failure. */
QC_NODISCARD qc_status qc_cross_create(qc_cross **out, const qc_forward_shape *shape,
                                       qc_image_states *states, const qc_forward_batch *batch,
                                       qc_error *err);
/* Counts the tokens of all images that the windows see, each once and without padding. It fails as
 * the former. */
QC_NODISCARD qc_status qc_cross_tokens(uint64_t *out, const qc_forward_shape *shape,
                                       qc_image_states *states, const qc_forward_batch *batch,
                                       qc_error *err);
void qc_cross_destroy(qc_cross *x); /* NULL is fine */

/* Phases: ctx is a qc_phase_chunk. The first goes over the tokens of the image in kv; the second
 * over tasks, which are tokens of `now` and a head of keys. */
qc_status qc_cross_norm_keys(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                             qc_error *err);
qc_status qc_cross_attend(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                          qc_error *err);
uint64_t qc_cross_tasks(const struct qc_phase_chunk *k);
/* Sets the inputs of the feed-forward part to 0 for tokens in front of their image, so that it adds
 * nothing. Does nothing in other layers. */
void qc_cross_hide(const struct qc_phase_chunk *k);

#endif
