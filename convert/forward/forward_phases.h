/* What the CPU does with the tokens of a chunk between matrix products (forward_cpu.c). */
#ifndef QC_CONVERT_FORWARD_PHASES_H
#define QC_CONVERT_FORWARD_PHASES_H

#include "convert/forward/forward_cpu.h"

/* Does elements [first, first + count) of a phase. */
typedef qc_status (*qc_phase_fn)(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                                 qc_error *err);

/* Windows [window, end) of the batch, whose tokens begin at `start`. */
typedef struct qc_phase_chunk {
    qc_forward_cpu *cpu;
    const qc_forward_weights *w;
    uint64_t window, end, start, tokens;
    uint64_t span; /* positions that a token sees, including its own; 0: all */
    float *hidden; /* hidden states, from token `start` on */
    float *normed; /* where their norms go; it may be hidden itself */
    const float *weight;
    const float *added_norm; /* of what is added to them, or of the sum; NULL: there is none */
    qc_layer_turn turn;
    uint64_t q, k, attended, ldb;
    uint64_t ldd, ldf; /* ldf: of b, while it has gate and up */
    float scale;       /* of scores */
    float added;       /* what is added to the hidden states is multiplied by this */
    int cross;         /* the layer looks at images */
    int experts;       /* the layer has experts, which are not computed here */
} qc_phase_chunk;

/* Phases by tokens of the chunk: ctx is a qc_phase_chunk. */
qc_status qc_phase_norm(void *ctx, unsigned thread, uint64_t first, uint64_t count, qc_error *err);
/* hidden += a, behind a norm of its own or of the sum if there is one; and if there is a weight,
 * then a = norm(hidden). */
qc_status qc_phase_add(void *ctx, unsigned thread, uint64_t first, uint64_t count, qc_error *err);
/* Norms q and k, where the family does, and turns them. */
qc_status qc_phase_turn(void *ctx, unsigned thread, uint64_t first, uint64_t count, qc_error *err);
qc_status qc_phase_gate(void *ctx, unsigned thread, uint64_t first, uint64_t count, qc_error *err);
/* Phases by tokens, of multi-head latent attention: the norms of latents; then turns q, and puts
 * the keys and values of all heads behind it. */
qc_status qc_phase_norm_latents(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                                qc_error *err);
qc_status qc_phase_spread_latents(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                                  qc_error *err);
/* A phase by tasks, which are tokens of a window and a head of keys (qc_forward_cpu.tasks). */
qc_status qc_phase_attend(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                          qc_error *err);

#endif
