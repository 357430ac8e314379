/* The choices that are worth measuring for a shape: see matmul_tuning.h. */
#include "kernels/matmul_tuning.h"

/* Every kernel that may be worth trying, and for how many rows of x. A new kernel needs a row here
 * and nothing else in the tuning. */
static const struct {
    qc_matmul_path path;
    uint32_t variant;
    uint64_t m_least, m_most;
    uint32_t sm_least, sm_below;
    int any_grid; /* blocks are thread blocks, not splits of K */
} kernels_to_try[] = {
    /* It takes 8 rows at a time and reads the weights again for every 8. */
    {QC_MATMUL_GEMV, 0, 1, 32, 0, UINT32_MAX, 0},
    /* sm_80 and newer have no such instruction and emulate it, slowly. */
    {QC_MATMUL_MMA_884, 0, 1, QC_MATMUL_SPLIT_ROWS, 70, 80, 0},
    {QC_MATMUL_MMA_16816, QC_MATMUL_STREAM, 1, 8, 80, UINT32_MAX, 1},
    {QC_MATMUL_MMA_16816, QC_MATMUL_TILES, 9, QC_MATMUL_SPLIT_ROWS, 80, UINT32_MAX, 0},
    {QC_MATMUL_WGMMA, 0, 1, UINT64_MAX, 90, 100, 0},
    {QC_MATMUL_MMA_16816, QC_MATMUL_GENERAL, 1, QC_MATMUL_SPLIT_ROWS, 80, UINT32_MAX, 0},
    /* For up to 8 rows it moves some eight times the bytes of the others. */
    {QC_MATMUL_DEQUANT_GEMM, 0, 9, UINT64_MAX, 0, UINT32_MAX, 0},
};

typedef struct {
    const qc_cuda_device *device;
    qc_matmul_shape shape;
    uint64_t limit_bytes;
    qc_matmul_choice *out;
    qc_matmul_plan plans[QC_MATMUL_CANDIDATES_MOST]; /* of out */
    uint32_t count;
} candidates;

/* Returns whether it is the same kernel, started in the same way. Variant 0 is one of the others,
 * so it is alike where all else is. */
static int is_alike(const qc_matmul_plan *a, const qc_matmul_plan *b)
{
    return a->path == b->path && a->m_tile == b->m_tile && a->n_tile == b->n_tile &&
           a->threads == b->threads && a->shared_bytes == b->shared_bytes &&
           a->splits == b->splits && a->split_k == b->split_k && a->chunk_rows == b->chunk_rows &&
           (a->variant == b->variant || a->variant == 0 || b->variant == 0) &&
           (a->variant != QC_MATMUL_STREAM || a->blocks == b->blocks);
}

/* Tries one choice. *made is its plan, also where it is not new. Returns 0 where there is no such
 * plan. */
static int try_choice(candidates *c, qc_matmul_choice choice, qc_matmul_plan *made)
{
    c->shape.choice = choice;
    if (qc_matmul_plan_make(c->device, &c->shape, QC_MATMUL_AUTO, c->limit_bytes, made, NULL) !=
        QC_OK)
        return 0;
    if (choice.path != QC_MATMUL_AUTO && made->path != choice.path)
        return 0;
    for (uint32_t i = 0; i < c->count; i++)
        if (is_alike(&c->plans[i], made))
            return 1;
    if (c->count < QC_MATMUL_CANDIDATES_MOST) {
        c->plans[c->count] = *made;
        c->out[c->count++] = choice;
    }
    return 1;
}

/* Tries a grid of any size: whole numbers of blocks per multiprocessor. */
static void try_grids(candidates *c, qc_matmul_choice choice)
{
    qc_matmul_plan made;
    for (uint32_t each = 1; each <= 4; each++) {
        choice.blocks = each * c->device->multiprocessors;
        (void)try_choice(c, choice, &made);
    }
}

/* Tries splits of K around those that the kernel itself would take. */
static void try_splits(candidates *c, qc_matmul_choice choice, uint32_t own)
{
    const uint32_t around[] = {own / 2, 2 * own, 1, own + own / 2, 4 * own};
    qc_matmul_plan made;
    for (size_t i = 0; i < sizeof around / sizeof *around; i++) {
        choice.blocks = around[i];
        if (choice.blocks)
            (void)try_choice(c, choice, &made);
    }
}

uint32_t qc_matmul_candidates(const qc_cuda_device *device, const qc_matmul_shape *shape,
                              uint64_t limit_bytes, qc_matmul_choice *out)
{
    candidates c = {.device = device, .shape = *shape, .limit_bytes = limit_bytes, .out = out};
    qc_matmul_plan made;
    c.shape.tuned = NULL;
    c.shape.tuned_count = 0;
    if (!try_choice(&c, (qc_matmul_choice){QC_MATMUL_AUTO, 0, 0}, &made) ||
        made.path == QC_MATMUL_FILL)
        return c.count;
    for (size_t i = 0; i < sizeof kernels_to_try / sizeof *kernels_to_try; i++) {
        qc_matmul_choice choice = {kernels_to_try[i].path, kernels_to_try[i].variant, 0};
        if (shape->m < kernels_to_try[i].m_least || shape->m > kernels_to_try[i].m_most ||
            device->sm < kernels_to_try[i].sm_least || device->sm >= kernels_to_try[i].sm_below ||
            !try_choice(&c, choice, &made))
            continue;
        if (kernels_to_try[i].any_grid)
            try_grids(&c, choice);
        else if (choice.path != QC_MATMUL_DEQUANT_GEMM && shape->m <= QC_MATMUL_SPLIT_ROWS)
            try_splits(&c, choice, made.splits);
    }
    return c.count;
}
