/* What the files of this room share. */
#ifndef QC_CONVERT_ADAPTERS_INTERNAL_H
#define QC_CONVERT_ADAPTERS_INTERNAL_H

#include "convert/adapter/adapters.h"
#include "quant/low_rank.h"
#include "quant/quant_ops.h"

#include <pthread.h>

typedef enum { QC_STEP_WHOLE, QC_STEP_LOW_RANK, QC_STEP_BIAS } qc_step_kind;

/* The matrices of a step, as they are multiplied: rows of the stored weight from `left`, columns
 * from `right`. */
typedef struct {
    double *left;   /* [rows, rank]; of a bias: its elements */
    double *right;  /* [rank, columns], packed */
    double *factor; /* DoRA: of each output; else NULL */
} qc_step_data;

/* One thing that an adapter does to a tensor. */
typedef struct qc_merge_step {
    struct qc_merge_step *next;
    qc_step_kind kind;
    const qc_adapter *adapter;
    const qc_adapter_module *module; /* NULL for WHOLE */
    uint32_t whole;                  /* WHOLE: the adapter's tensor */
    int turned;                      /* the weight is stored [in, out]: the product is transposed */
    double scale;
    qc_step_data data; /* while it is loaded */
} qc_merge_step;

typedef enum { QC_MERGE_EMPTY, QC_MERGE_LOADING, QC_MERGE_READY } qc_merge_state;

typedef struct qc_merge_set qc_merge_set;

/* The changes of one tensor. At most one WHOLE, which comes first. */
typedef struct {
    qc_tensor_change change; /* first: it is what the tensor points to */
    qc_merge_set *set;
    qc_merge_step *steps;
    uint64_t rows, cols; /* the stored weight's; a bias has 1 and its length */
    /* The rest is under set->lock. */
    qc_merge_state state;
    unsigned users;
    uint64_t last_use;
    uint64_t bytes;
} qc_merge;

struct qc_merge_set {
    qc_checkpoint_changes changes; /* first: it is what the checkpoint points to */
    qc_attached_adapter *adapters;
    size_t adapter_count;
    qc_merge **merges;
    size_t merge_count;
    const qc_quant_ops *ops;
    qc_isa isa;
    /* The matrices that are loaded: of the tensors that are read just now, and of the last ones. */
    pthread_mutex_t lock;
    pthread_cond_t ready;
    int have_lock;
    uint64_t uses, loaded_bytes;
};

/* The change is a qc_merge, and only its state behind the lock is written to. */
static inline qc_merge *qc_merge_of(const qc_checkpoint_tensor *t)
{
    union {
        const qc_tensor_change *from;
        qc_merge *to;
    } u = {t->change};
    return u.to;
}

/* ---- merge_names.c ---- */

/* A tensor of the model, under the part of its name that all versions of transformers share. */
typedef struct {
    const char *inner;
    uint32_t tensor;
} qc_merge_name;

typedef struct {
    qc_checkpoint *c;
    qc_merge_name *rows; /* sorted */
    size_t count;
    const char *head; /* of a head that is the tensor `table` as well, the inner name; else NULL */
    uint32_t table;
} qc_merge_names;

typedef struct {
    qc_checkpoint_tensor *t;
    int head; /* t is meant as the head that is tied to it */
} qc_merge_place;

/* Lists the names of c. Before, it unties embeddings and head if one of the adapters replaces one
 * of the two. Borrows from c. */
QC_NODISCARD qc_status qc_merge_names_make(qc_merge_names *out, qc_checkpoint *c,
                                           const qc_attached_adapter *adapters, size_t count,
                                           qc_error *err);
/* Finds the model's tensor for one of the adapter's, which belongs to `name`. */
QC_NODISCARD qc_status qc_merge_find(const qc_merge_names *n, const qc_adapter *a, const char *name,
                                     uint32_t tensor, qc_merge_place *out, qc_error *err);

/* ---- merge_tile.c ---- */

/* Reads elements of what the steps begin with, the model's tensor or a WHOLE one, as floats. */
QC_NODISCARD qc_status qc_merge_read_base(const qc_merge *m, const qc_checkpoint *c,
                                          qc_st_cursor *cur, uint64_t first, uint64_t n, float *out,
                                          qc_error *err);
/* A run of columns of some rows of a stored weight, in double. */
typedef struct {
    uint64_t row, col;
    uint32_t rows, n; /* at most QC_LOW_RANK_ROWS and QC_LOW_RANK_RUN */
    float *from;      /* its first element in memory, where a row lies behind the other */
    double values[QC_LOW_RANK_ROWS][QC_LOW_RANK_RUN];
} qc_merge_tile;

/* Calls `take` for one tile after the other, until all of elements [first, first + n) are through,
 * which lie at `values`. Tiles have several rows where those are there whole. */
typedef qc_status (*qc_merge_taker)(void *ctx, qc_merge_tile *tile, qc_error *err);
QC_NODISCARD qc_status qc_merge_each_tile(const qc_merge *m, uint64_t first, uint64_t n,
                                          float *values, qc_merge_taker take, void *ctx,
                                          qc_error *err);
/* Adds the product of a LOW_RANK step to a tile. */
void qc_merge_add_product(const qc_merge *m, const qc_merge_step *s, qc_merge_tile *tile);

/* ---- merge_load.c ---- */

/* Gives the matrices of m to the caller until qc_merge_release, and loads them first if need be. */
QC_NODISCARD qc_status qc_merge_acquire(qc_merge *m, const qc_checkpoint *c, qc_st_cursor *cur,
                                        qc_error *err);
void qc_merge_release(qc_merge *m);
void qc_merge_free(qc_merge *m);

/* ---- merge_read.c ---- */

/* qc_tensor_change's two functions. */
QC_NODISCARD qc_status qc_merge_read(const qc_checkpoint *c, qc_st_cursor *cur,
                                     const qc_checkpoint_tensor *t, uint64_t offset, void *dst,
                                     size_t len, qc_error *err);
QC_NODISCARD qc_status qc_merge_apply(const qc_checkpoint *c, qc_st_cursor *cur,
                                      const qc_checkpoint_tensor *t, uint64_t first, uint64_t n,
                                      float *values, qc_error *err);

#endif
