/* Measured choices per shape: which kernel runs, and how its work is cut, for rows of x from
 * m_least to m_most with weights [n, k] on a GPU. A shape without a row follows the plan's rules
 * (matmul_plan.c). No rows are built in, because none have been measured yet. `qconv bench --tune`
 * measures some and saves them; convert/device/tuning_file.h reads them again.
 *
 * Pure host code, except for qc_matmul_set_tuning. */
#ifndef QC_KERNELS_MATMUL_TUNING_H
#define QC_KERNELS_MATMUL_TUNING_H

#include "kernels/matmul_plan.h"

QC_C_BEGIN

struct qc_matmul_tuned {
    uint32_t sm, multiprocessors; /* of the GPU that the row is for; 0: any */
    qc_form_kind kind;
    uint64_t n, k;            /* exactly these; n is the sum over the weights of a launch */
    uint64_t m_least, m_most; /* rows of x, both included */
    qc_matmul_choice choice;  /* its path is not AUTO */
};

/* A table, borrowed. */
typedef struct {
    const qc_matmul_tuned *rows;
    size_t count;
} qc_matmul_table;

/* The most rows of a table: it is searched row by row, for each product. */
#define QC_MATMUL_TUNED_MOST 4096u
/* The most blocks of a choice: splits are a dimension of the grid. */
#define QC_MATMUL_BLOCKS_MOST 65535u

/* QC_ERR_USAGE names the first row that is wrong: too many rows, an unknown kind, path or variant,
 * a range that is empty, too many blocks. Rows may overlap: the first one that fits counts. */
QC_NODISCARD qc_status qc_matmul_tuned_check(const qc_matmul_tuned *rows, size_t count,
                                             qc_error *err);

/* Returns the choice of the first row for this device, kind, n, k and m; path AUTO where there is
 * none. */
qc_matmul_choice qc_matmul_tuned_find(const qc_matmul_tuned *rows, size_t count,
                                      const qc_cuda_device *device, const qc_matmul_shape *shape);

/* h takes a copy of rows[count] in place of the rows it had (count 0: none); on an error it keeps
 * those. Rows for other GPUs have no effect. From then on the rows count for all calls with
 * QC_MATMUL_AUTO, qc_matmul_workspace_bytes included, so ask for workspaces afterwards.
 * Threads: like qc_matmul_create and _destroy, no other thread may use h meanwhile. */
QC_NODISCARD qc_status qc_matmul_set_tuning(qc_matmul *h, const qc_matmul_tuned *rows, size_t count,
                                            qc_error *err);
/* Returns the rows of h, *count of them; NULL where there are none. */
const qc_matmul_tuned *qc_matmul_tuning(const qc_matmul *h, size_t *count);

/* ---- what there is to choose from (matmul_candidates.c) ---- */

#define QC_MATMUL_CANDIDATES_MOST 32u

/* Finds the choices worth measuring for a shape on a device, within limit_bytes of workspace (the
 * shape's own table and choice are ignored). Returns how many there are, at most
 * QC_MATMUL_CANDIDATES_MOST. out[0] is what the plan's rules choose, with path AUTO; all others
 * give plans that differ from it and from each other. */
uint32_t qc_matmul_candidates(const qc_cuda_device *device, const qc_matmul_shape *shape,
                              uint64_t limit_bytes, qc_matmul_choice *out);

QC_C_END
#endif
