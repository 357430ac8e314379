/* What the two tensor-core kernels (matmul_mma884.cu and matmul_mma16816.cu) share: their
 * arguments, which part of the product a block of threads makes, and how a finished sum is written.
 *
 * A block makes the tile [m_tile, n_tile] of y over the k of one split. Tiles are numbered with m
 * fastest, so that blocks which read the same weights run side by side and all but the first find
 * them in L2. The warps of a block share the tile's k. Their sums meet in shared memory and are
 * added in the order of the warps. So every sum has one order, which the plan fixes. */
#ifndef QC_KERNELS_MATMUL_MMA_CUH
#define QC_KERNELS_MATMUL_MMA_CUH

#include "kernels/matmul_run.cuh"

#define QC_MMA_THREADS 256
#define QC_MMA_WARPS   8

typedef struct {
    qc_run_source w;
    uint64_t m, n, k, split_k;
    uint64_t m_first; /* the first row of this launch */
    uint32_t m_tiles; /* how many tiles of rows this launch has */
    const uint16_t *x;
    uint64_t ldx;
    const int *x_exponent;
    qc_matmul_output out;
    float *partials;
} qc_mma_args;

static inline qc_mma_args qc_mma_args_of(const qc_matmul_call *c)
{
    qc_mma_args a;
    a.w = qc_run_source_of(&c->weights);
    a.m = c->m;
    a.n = c->n;
    a.k = c->k;
    a.split_k = c->plan.split_k;
    a.m_first = 0;
    a.m_tiles = 0;
    a.x = (const uint16_t *)c->x;
    a.ldx = c->ldx;
    a.x_exponent = c->x_exponent;
    a.out = c->out;
    a.partials = c->plan.splits > 1 ? c->partials : NULL;
    return a;
}

/* The launches cover all tiles. There is more than one only where there are more tiles than a grid
 * can number. `resident` is how many blocks are meant to be on a multiprocessor. */
template <typename Kernel>
static inline qc_status qc_mma_launch_tiles(Kernel *kernel, const qc_matmul_call *c,
                                            unsigned resident, const char *what, qc_cuda_stream s,
                                            qc_error *err)
{
    const qc_matmul_plan *p = &c->plan;
    if (c->n > UINT32_MAX) /* kernels have numbers of rows of W in 32 bits */
        QC_FAIL(err, QC_ERR_USAGE, "a weight has too many rows for one launch");
    QC_TRY(qc_cuda_keep_resident(kernel, p->shared_bytes, resident, what, err));
    qc_mma_args a = qc_mma_args_of(c);
    uint64_t n_tiles = (c->n + p->n_tile - 1) / p->n_tile;
    uint64_t m_tiles = (c->m + p->m_tile - 1) / p->m_tile;
    uint64_t most = n_tiles < 0x7fffffffu ? 0x7fffffffu / n_tiles : 1;
    for (uint64_t done = 0; done < m_tiles; done += a.m_tiles) {
        a.m_first = done * p->m_tile;
        a.m_tiles = (uint32_t)(m_tiles - done < most ? m_tiles - done : most);
        dim3 grid((unsigned)(n_tiles * a.m_tiles), p->splits, 1);
        QC_TRY(qc_cuda_start(what, kernel, grid, dim3(p->threads), p->shared_bytes, s, err, a));
    }
    return QC_OK;
}

/* Splits K so that the grid fills the device. The plan has its tiles and shared_bytes already. */
static inline void qc_mma_configure_splits(const qc_cuda_device *d, const qc_matmul_shape *s,
                                           uint32_t k_step, uint32_t blocks_most, qc_matmul_plan *p)
{
    uint64_t tiles = ((s->n + p->n_tile - 1) / p->n_tile) * ((s->m + p->m_tile - 1) / p->m_tile);
    /* The driver takes 1 KB of each block's shared memory from sm_80 on. */
    uint64_t resident = d->shared_multiprocessor_bytes / (p->shared_bytes + 1024u);
    resident = resident < 1 ? 1 : resident > blocks_most ? blocks_most : resident;
    uint64_t slots = resident * (d->multiprocessors ? d->multiprocessors : 1);
    uint64_t steps = (s->k + k_step - 1) / k_step;
    uint64_t splits = tiles ? slots / tiles : 1;
    /* A split has two steps at least, since the tables and the pipeline cost about one. */
    if (splits > steps / 2)
        splits = steps / 2;
    if (splits < 1)
        splits = 1;
    if (splits > 65535)
        splits = 65535;
    uint64_t each = steps ? (steps + splits - 1) / splits : 1;
    p->split_k = each * k_step;
    p->splits = steps ? (uint32_t)((steps + each - 1) / each) : 1;
}

/* Says where this block works. */
struct qc_mma_part {
    uint64_t m0, n0, k_begin, k_end;
};

QC_DEVICE qc_mma_part qc_mma_part_of(const qc_mma_args &a, unsigned m_tile, unsigned n_tile)
{
    qc_mma_part p;
    p.m0 = a.m_first + (uint64_t)(blockIdx.x % a.m_tiles) * m_tile;
    p.n0 = (uint64_t)(blockIdx.x / a.m_tiles) * n_tile;
    p.k_begin = blockIdx.y * a.split_k;
    p.k_end = a.k - p.k_begin < a.split_k ? a.k : p.k_begin + a.split_k;
    return p;
}

/* The units (16 bytes) of x that a thread brings to shared memory in every step. In a tile with
 * row_units in a row, these are the units thread + i * QC_MMA_THREADS, which always have the same
 * column. */
struct qc_mma_x {
    const uint16_t *from; /* unit 0 at k = 0; unit i lies i * stride behind it */
    uint64_t stride;
    unsigned column; /* of the units, in k */
    unsigned there;  /* how many units have a row < M */
};

QC_DEVICE const uint16_t *qc_mma_x_from(const qc_mma_args &a, const qc_mma_part &p,
                                        unsigned row_units, unsigned thread)
{
    return a.x + (p.m0 + thread / row_units) * a.ldx + 8 * (thread % row_units);
}

QC_DEVICE qc_mma_x qc_mma_x_of(const qc_mma_args &a, const qc_mma_part &p, unsigned row_units,
                               unsigned thread)
{
    unsigned step = QC_MMA_THREADS / row_units;
    uint64_t row = p.m0 + thread / row_units;
    qc_mma_x v;
    v.column = 8 * (thread % row_units);
    v.from = qc_mma_x_from(a, p, row_units, thread);
    v.stride = step * a.ldx;
    uint64_t there = row < a.m ? (a.m - row + step - 1) / step : 0;
    v.there = there < 64 ? (unsigned)there : 64; /* more than any tile has */
    return v;
}

/* Returns where unit i of the step at k begins. */
QC_DEVICE const uint16_t *qc_mma_unit(const qc_mma_x &x, uint64_t k, int i)
{
    return x.from + k + i * x.stride;
}

/* The tile's sums meet in shared memory as [m_tile][n_tile] floats. n is swizzled by m so that the
 * fragments of a warp fall on different banks. */
QC_DEVICE unsigned qc_mma_sum_at(unsigned m, unsigned n, unsigned n_tile)
{
    return m * n_tile + (n ^ (m >> 1 & 3u) << 3);
}

/* Returns where kernels with tiles of 8, 16, 32 and 64 rows of x stand in a table: the first tile
 * that holds m rows, else the last. */
static inline unsigned qc_mma_tile_index(uint64_t m)
{
    return m <= 8 ? 0 : m <= 16 ? 1 : m <= 32 ? 2 : 3;
}

template <int tiles, int parts, int each>
QC_DEVICE void qc_mma_zero(float (&sum)[tiles][parts][each])
{
#pragma unroll
    for (int r = 0; r < tiles; r++)
#pragma unroll
        for (int i = 0; i < parts; i++)
#pragma unroll
            for (int e = 0; e < each; e++)
                sum[r][i][e] = 0.0f;
}

/* Warps that share an element add their sums in turn; the first one passes `first`. */
QC_DEVICE void qc_mma_put(float *sum, float v, bool first)
{
    *sum = first ? v : __fadd_rn(*sum, v);
}

/* Writes finished sums to y, or to the split's partial sums. */
template <int m_tile, int n_tile>
QC_DEVICE void qc_mma_finish(const qc_mma_args &a, const qc_mma_part &p, const float *sums,
                             unsigned thread)
{
    int w_exponent = a.w.exponent ? *a.w.exponent : 0;
    for (unsigned i = thread; i < (unsigned)(m_tile * n_tile); i += QC_MMA_THREADS) {
        unsigned m = i / n_tile, n = i % n_tile;
        uint64_t row = p.m0 + m, column = p.n0 + n;
        if (row >= a.m || column >= a.n)
            continue;
        float v = sums[qc_mma_sum_at(m, n, n_tile)];
        if (a.partials)
            a.partials[(blockIdx.y * a.m + row) * a.n + column] = v;
        else
            qc_finish(a.out, row, column, v, w_exponent + (a.x_exponent ? a.x_exponent[row] : 0));
    }
}

/* ---- what a kernel is launched with ----
 *
 * qc_mma_args, or a qc_experts_call, for which matmul_experts_tile.cuh has the same functions. */

template <typename Call, int m_tile, typename Rest> struct qc_mma_memory {
    Rest rest;
};

template <typename Memory>
QC_DEVICE bool qc_mma_begin(const Memory &, const qc_mma_args &, unsigned)
{
    return true;
}

template <typename Memory>
QC_DEVICE const qc_mma_args &qc_mma_args_in(const Memory &, const qc_mma_args &a)
{
    return a;
}

template <typename Memory>
QC_DEVICE qc_mma_part qc_mma_part_in(const Memory &, const qc_mma_args &a, unsigned m_tile,
                                     unsigned n_tile)
{
    return qc_mma_part_of(a, m_tile, n_tile);
}

template <typename Memory>
QC_DEVICE qc_mma_x qc_mma_x_in(const Memory &, const qc_mma_args &a, const qc_mma_part &p,
                               unsigned row_units, unsigned thread)
{
    return qc_mma_x_of(a, p, row_units, thread);
}

template <typename Memory>
QC_DEVICE void qc_mma_x_anew(qc_mma_x &x, const Memory &, const qc_mma_args &a,
                             const qc_mma_part &p, unsigned row_units, unsigned thread)
{
    x.from = qc_mma_x_from(a, p, row_units, thread);
}

template <int m_tile, int n_tile, typename Memory>
QC_DEVICE void qc_mma_finish_in(const Memory &, const qc_mma_args &a, const qc_mma_part &p,
                                const float *sums, unsigned thread)
{
    qc_mma_finish<m_tile, n_tile>(a, p, sums, thread);
}

#endif
