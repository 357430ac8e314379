/* What the kernels that share tiles out to blocks of threads are given: matmul_tiles.cu and
 * matmul_wgmma.cu. The work is the tiles of all weights in a row, with tile_steps for each, a step
 * being 128 of k. Block b of threads has worker_steps, beginning at b * worker_steps. */
#ifndef QC_KERNELS_MATMUL_SHARE_CUH
#define QC_KERNELS_MATMUL_SHARE_CUH

#include "base/checked.h"
#include "kernels/matmul_kernels.h"
#include "kernels/matmul_run.cuh"

#define QC_SHARE_STEP  128u /* of k */
#define QC_SHARE_BLOCK 64u  /* codes of a row that have one scale */

typedef struct {
    qc_run_source w;
    uint64_t n;
    qc_matmul_output out;
    float *partials;
    uint32_t tile_first;  /* counted over all weights' tiles */
    uint32_t block_first; /* of the whole weight, the block of 64 that is the first here */
    int together;         /* the codes of several scales can be loaded at once */
} qc_share_part;

typedef struct {
    qc_share_part part[QC_MATMUL_GROUP_MOST];
    uint32_t count;
    uint32_t units, tile_steps, worker_steps; /* steps of all tiles, of a tile, of a block */
    uint32_t m_tiles, splits;
    uint32_t row_blocks; /* blocks of 64 from row to row of a weight */
    uint64_t m;
    const uint16_t *x;
    const int *x_exponent;
    uint32_t *fault; /* the call's */
} qc_share;

/* Of calls with one plan. `together`: how many codes of scales of a row a kernel would load at once
 * for one nested scale. */
static inline void qc_share_of(qc_share *a, const qc_matmul_call *c, uint32_t count,
                               uint32_t together)
{
    const qc_matmul_plan *p = &c->plan;
    a->count = count;
    a->m = c->m;
    a->x = (const uint16_t *)c->x;
    a->x_exponent = c->x_exponent;
    a->fault = c->fault;
    a->splits = p->splits;
    a->m_tiles = (uint32_t)qc_ceil_div_u64(c->m, p->m_tile);
    uint64_t split_steps = qc_ceil_div_u64(p->splits > 1 ? p->split_k : c->k, QC_SHARE_STEP);
    uint64_t all_steps = qc_ceil_div_u64(c->k, QC_SHARE_STEP);
    a->worker_steps = (uint32_t)(p->worker_k ? p->worker_k / QC_SHARE_STEP : split_steps);
    a->tile_steps = (uint32_t)(p->worker_k ? all_steps : split_steps * p->splits);
    const uint64_t ld = c->weights.w.form.cols;
    uint64_t tiles = 0;
    a->row_blocks = (uint32_t)(ld / QC_SHARE_BLOCK);
    for (uint32_t i = 0; i < count; i++) {
        qc_share_part *to = &a->part[i];
        to->w = qc_run_source_there(&c[i].weights);
        to->block_first = (uint32_t)(to->w.first / QC_SHARE_BLOCK);
        to->n = c[i].n;
        to->out = c[i].out;
        to->partials = p->splits > 1 ? c[i].partials : NULL;
        to->tile_first = (uint32_t)tiles;
        to->together = !to->w.absmax && to->w.block_shift == 6 &&
                       1u << to->w.nested_shift >= together &&
                       ld % (together * QC_SHARE_BLOCK) == 0 &&
                       to->w.first % (together * QC_SHARE_BLOCK) == 0 &&
                       (uintptr_t)to->w.absmax_codes % together == 0;
        tiles += qc_ceil_div_u64(c[i].n, p->n_tile);
    }
    a->units = (uint32_t)(tiles * a->m_tiles * a->tile_steps);
}

#endif
