/* How many rows of W the path DEQUANT_GEMM dequantizes at a time: a pure host function. */
#ifndef QC_KERNELS_MATMUL_CHUNKS_H
#define QC_KERNELS_MATMUL_CHUNKS_H

#include "kernels/cuda_device.h"

QC_C_BEGIN

/* Up to this many rows of x, the whole weight is one chunk if there is room for it. */
#define QC_CHUNK_WHOLE_ROWS 512u
/* If there is room for it, a chunk fills the device with cuBLAS's tiles at least this many
 * times. */
#define QC_CHUNK_WAVES 3u
/* With less room, chunks are multiples of this, and at least this. */
#define QC_CHUNK_LEAST 64u

/* The memory that chunks may take. */
typedef struct {
    uint64_t bytes;     /* UINT64_MAX: any */
    uint64_t dense_row; /* bytes of a dense row of W */
    uint64_t sums_row;  /* bytes that each row of a chunk takes beside that: cuBLAS's sums, 0 where
                           they go straight to y */
} qc_chunk_room;

typedef struct {
    uint64_t rows; /* of all chunks but the last, which may have less */
    /* There are two dense buffers: the next chunk is dequantized while cuBLAS multiplies this
     * one. */
    int paired;
} qc_chunks;

/* Return how many tiles cuBLAS has for `rows` rows of W and m rows of x, and how often they fill
 * the device. */
uint64_t qc_chunk_tiles(uint64_t rows, uint64_t m);
uint64_t qc_chunk_waves(unsigned multiprocessors, uint64_t rows, uint64_t m);
/* Returns how many dense rows, of n, chunks of `rows` take in memory: one buffer or two. */
uint64_t qc_chunk_dense_rows(uint64_t n, qc_chunks chunks);

/* Chooses chunks for W of n rows; n and m are at least 1. If not even QC_CHUNK_LEAST rows have
 * room, the answer is still that many. */
qc_chunks qc_chunks_choose(unsigned multiprocessors, uint64_t n, uint64_t m, qc_chunk_room room);

QC_C_END
#endif
