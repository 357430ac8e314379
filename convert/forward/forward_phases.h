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

/* Where the heads of q, k and v are in a row of b: the first ones, and the floats from one to the
 * next. */
typedef struct {
    uint64_t first[3], step[3];
} qc_phase_heads;
qc_phase_heads qc_phase_heads_of(const qc_phase_chunk *k);
/* The cosines and sines of what turns the heads of the layer, `turned / 2` a row; NULL: nothing. */
const qc_rope_tables *qc_phase_turns(const qc_phase_chunk *k);

/* The attention of a window of the chunk: b [tokens, ldb] has q, k and v of the chunk's tokens,
 * c [tokens, attended] what attention gives, or gradients of that. */
qc_attend_io qc_phase_attention(const qc_phase_chunk *k, uint64_t window, const float *b, float *c);
/* What norms of latents add to the mean of squares, whatever config.json says. */
#define QC_PHASE_LATENT_EPS 1e-6f

qc_phase_chunk qc_phase_chunk_of(qc_forward_cpu *cpu, const qc_forward_pass *p,
                                 const qc_forward_chunk *at);
/* y = x W^T + bias for `count` matrices of the layer, whose results lie side by side in a row of y.
 */
QC_NODISCARD qc_status qc_phase_multiply(const qc_phase_chunk *k, qc_layer_which first,
                                         unsigned count, const float *x, uint64_t ldx, float *y,
                                         uint64_t ldy, qc_error *err);
/* Inputs of o -> hidden behind attention, and a, the inputs of gate and up; but where those are
 * computed beside attention, a has nothing of use. */
QC_NODISCARD qc_status qc_phase_leave_attention(qc_phase_chunk *k, const float *attended,
                                                qc_error *err);
/* Does a phase by tokens; weight: the chunk's. */
QC_NODISCARD qc_status qc_phase_tokens(qc_phase_chunk *k, qc_phase_fn fn, const float *weight,
                                       qc_error *err);

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
