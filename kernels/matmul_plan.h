/* Decides which kernel runs with which tiles: a pure host function of shape and device, so that
 * tests can force every branch without that device. */
#ifndef QC_KERNELS_MATMUL_PLAN_H
#define QC_KERNELS_MATMUL_PLAN_H

#include "kernels/matmul.h"

QC_C_BEGIN

/* The kernels of one path, MMA_16816. The other paths have one each, which is 0. */
enum {
    QC_MATMUL_ANY,     /* as the plan chooses */
    QC_MATMUL_GENERAL, /* any shape, any number of rows */
    QC_MATMUL_RING,    /* up to QC_MATMUL_RING_ROWS rows of x: matmul_ring.cu */
    QC_MATMUL_TILES,   /* for more rows: matmul_tiles.cu */
    QC_MATMUL_VARIANT_COUNT
};

typedef struct {
    qc_matmul_path path; /* AUTO: none chosen */
    uint32_t variant;
    uint32_t blocks; /* 0, or thread blocks of a grid that may have any number (RING), else
                        splits of K: as many of them as K and the workspace allow */
} qc_matmul_choice;

typedef struct {
    qc_form_kind kind;
    uint64_t m, n, k; /* n: of all parts */
    uint32_t parts;   /* weights that share x; 0: one, of n rows */
    uint64_t part_n[QC_MATMUL_GROUP_MOST];
    uint64_t ldw;        /* elements from row to row of W in the whole weight; 0: k */
    uint64_t first_most; /* elements of the whole before W's first; of several weights, the most */
    int inside_64;       /* it begins at no multiple of 64 columns */
    uint32_t block_elems;
    qc_dtype x_dtype, y_dtype;
    uint64_t ldx;
    unsigned x_alignment; /* of x's address and of its rows, bytes, at most 16 */
    int repacked;
    int has_epilogue; /* a bias, a gate or a residual */
    int have_gemm;    /* cuBLAS is there */
    /* With QC_MATMUL_AUTO, where device, shape and workspace allow it, this choice is taken instead
     * of the rules' own. Only tests make one. */
    qc_matmul_choice choice;
} qc_matmul_shape;

/* How the warps of matmul_ring.cu share tiles, and what lies where in shared memory. */
typedef struct {
    uint32_t kind, granule;       /* of the kernel; codes of a row that have one scale */
    uint32_t each, pieces;        /* entries of a piece, pieces of a tile */
    uint32_t slots_log, maps_log; /* of powers of two: places for sums, and maps of scales */
    uint32_t map_at, sums_at, x_at, powers_at, ring_at; /* bytes */
    uint32_t x_units;                                   /* of 16 bytes from row to row of x */
} qc_matmul_ring;

typedef struct {
    qc_matmul_path path;
    uint32_t variant; /* of the path's kernels; 0: of the choice, none */
    int aligned;      /* codes are as in the file, and no 32 of a row from a multiple of 32 on cross
                         a block; else they are repacked, and may (matmul_run.cuh) */
    uint32_t m_tile, n_tile; /* of a block of threads; 0 where the path has none */
    uint32_t threads;
    uint32_t splits;       /* of K; > 1: partial sums go to the workspace, summed in order */
    uint64_t split_k;      /* k per split, a multiple of 128 (without splits k_padded will do); the
                              last may be shorter */
    uint64_t worker_k;     /* k per block where blocks go on from one tile to the next, all tiles'
                              k in a row; a tile then has up to `splits` parts. 0: split_k, and a
                              block has one tile */
    uint32_t shared_bytes; /* dynamic */
    uint32_t blocks;       /* RING: of the grid, for each split */
    qc_matmul_ring ring;
    int overlaps; /* kernels that wait (RING, x to float16, the sum of splits) may begin before
                     the launch before them has ended */
    int copies_x; /* x is rewritten as float16 [m][k_padded] with row exponents */
    uint32_t
        image_rows;    /* WGMMA: rows of x in a tile of the image that it is rewritten as; else 0 */
    uint64_t k_padded; /* K rounded up to a multiple of 32 */
    /* DEQUANT_GEMM: how many rows of W are dequantized at a time, to which dtype, and whether the
     * product goes to the workspace in float first, where the reduction finishes it. */
    uint64_t chunk_rows;
    uint64_t dense_stride; /* bytes from one buffer of dense rows to the other; 0: there is one */
    qc_dtype dense_dtype;
    int gemm_to_float;
    /* The layout of the workspace: offsets in bytes, each a multiple of 256, in this order. The
     * rest is cuBLAS's. */
    uint64_t x_offset, x_exponent_offset, partial_offset, dense_offset, gemm_offset;
    uint64_t workspace_bytes;
} qc_matmul_plan;

/* Holds what qc_matmul_plan_product was asked for, for each weight. */
typedef struct {
    qc_form_kind kind;
    qc_weights_part part;
    uint64_t cols; /* of the whole weight */
    uint32_t block_elems;
    int repacked;
    int has_epilogue;
} qc_matmul_planned_weight;

/* The weights that go in one launch. */
typedef struct {
    uint32_t end; /* behind its last weight */
    qc_matmul_plan plan;
} qc_matmul_planned_set;

struct qc_matmul_planned {
    uint32_t count, sets;
    uint64_t m;
    qc_dtype x_dtype, y_dtype;
    unsigned x_alignment;     /* at least */
    uint64_t workspace_bytes; /* at least */
    qc_matmul_planned_weight weights[QC_MATMUL_GROUP_MOST];
    qc_matmul_planned_set set[QC_MATMUL_GROUP_MOST];
};

#define QC_MATMUL_RING_ROWS 8u

/* Above this many rows K is never split: there are enough blocks without. */
#define QC_MATMUL_SPLIT_ROWS 1024u

/* Stands for limit_bytes where there is no workspace at all. */
#define QC_MATMUL_NO_WORKSPACE 1u

/* Returns from how many rows of x on DEQUANT_GEMM is chosen, where cuBLAS is there. */
uint64_t qc_matmul_gemm_rows(const qc_cuda_device *device, const qc_matmul_shape *shape);

/* Makes a plan. path is QC_MATMUL_AUTO, or one to force. QC_ERR_USAGE where the device cannot run
 * it (MMA_16816 below sm_80, MMA_884 below sm_70, DEQUANT_GEMM without cuBLAS). limit_bytes: 0, or
 * the most workspace to use; QC_ERR_USAGE if no plan fits. */
QC_NODISCARD qc_status qc_matmul_plan_make(const qc_cuda_device *device,
                                           const qc_matmul_shape *shape, qc_matmul_path path,
                                           uint64_t limit_bytes, qc_matmul_plan *out,
                                           qc_error *err);

/* Does what qc_matmul_workspace_bytes does, without a handle; the shape's m, dtypes, strides and
 * bias do not count. */
uint64_t qc_matmul_plan_workspace(const qc_cuda_device *device, const qc_matmul_shape *shape,
                                  uint64_t max_m, qc_matmul_path path, uint64_t limit_bytes);

QC_C_END
#endif
