/* Shared by against_*.c; not for others. */
#ifndef QC_CONVERT_AGAINST_PARTS_H
#define QC_CONVERT_AGAINST_PARTS_H

#include "convert/model/coded_read.h"
#include "convert/model/recipe_coded.h"
#include "convert/model/recipe_stored.h"
#include "convert/verify/against.h"
#include "quant/weight_check.h"

#include <pthread.h>

/* A tensor of OUT and what it is compared with. */
typedef struct {
    qc_against_row row;
    uint32_t out_tensor, model_tensor; /* QC_NO_TENSOR where there is none */
    const qc_stored_weight *stored;    /* in OUT, for QUANTIZED */
    const qc_coded_weight *coded;      /* in MODEL, for CAST and QUANTIZED */
    const qc_stored_weight *packed;    /* in MODEL, for CAST: decoded from it */
    const qc_manifest_tensor *listed;  /* in the manifest; NULL: there is none */
    uint64_t rows, cols;               /* of a quantized weight as written */
    qc_dtype through;                  /* QUANTIZED: cast to this first; else source_dtype */
    qc_check_form form;
    uint64_t out_bytes; /* of this tensor alone */
    /* pieces of OUT's tensor */
    uint64_t piece_bytes;
    uint32_t piece_count;
    qc_check_sums *sums; /* QUANTIZED, one per piece */
    uint64_t *differs;   /* EQUAL and CAST: first byte that differs, UINT64_MAX: none */
    qc_digest *sources;  /* where the manifest has the source's digest, one per piece */
    qc_check_sums total; /* after the run */
    uint64_t first_differs;
} qc_against_tensor;

typedef struct qc_against_scratch qc_against_scratch;

typedef struct {
    qc_arena *arena;
    const qc_against_options *options;
    const qc_manifest *manifest; /* NULL: none */
    qc_checkpoint *output, *model;
    qc_stored_set in_output, in_model;
    qc_coded_set coded;
    qc_against_tensor *tensors; /* one per tensor of OUT, same order */
    size_t *by_name;            /* tensors in natural order */
    uint32_t *of_listed;        /* per tensor of the manifest: of OUT */
    uint64_t *first_of_shard;   /* per shard of the manifest: its first tensor; one more */
    qc_against_missing *missing;
    size_t missing_count;
    /* Scratches not in use. The lock protects the list only and is a leaf. */
    pthread_mutex_t lock;
    qc_against_scratch *idle;
} qc_against;

/* ---- against_match.c ---- */

/* in_output is there already. */
QC_NODISCARD qc_status qc_against_match(qc_against *a, qc_error *err);

/* ---- against_read.c: weights of MODEL and of OUT, in OUT's order ---- */

struct qc_against_scratch {
    qc_against_scratch *next;
    qc_st_cursor *source, *scales, *output;
    qc_coded_scratch coded;
    qc_digest_state *hash;
    /* grow to what one step needs; the first four may hold the source of what is checked */
    void *raw, *turned, *made, *cast, *codes;
    size_t raw_room, turned_room, made_room, cast_room, codes_room;
    void *numbers, *slack;
    size_t numbers_room, slack_room;
    void *nested;
    size_t nested_room;
    qc_check_scratch *check;
};

QC_NODISCARD qc_status qc_against_take(qc_against *a, qc_against_scratch **out, qc_error *err);
void qc_against_give(qc_against *a, qc_against_scratch *s);
void qc_against_scratch_destroy(qc_against_scratch *s); /* a list; NULL is fine */
QC_NODISCARD qc_status qc_against_room(void **p, size_t *room, uint64_t bytes, qc_error *err);

/* Elements of a step. */
uint64_t qc_against_step(const qc_against_tensor *t);
/* The type that qc_against_read gives: the source's, F32 where it is coded. */
qc_dtype qc_against_read_dtype(const qc_against_tensor *t);
/* Elements [first, first + n) of the source in OUT's order; *out is borrowed from the scratch. What
 * was read is added to s->hash where hash is not 0. */
QC_NODISCARD qc_status qc_against_read(const qc_against *a, qc_against_scratch *s,
                                       const qc_against_tensor *t, uint64_t first, uint64_t n,
                                       int hash, const void **out, qc_error *err);
/* Scales [first, first + n) of a quantized weight of a checkpoint as a reader has them, to
 * s->numbers, and to s->slack how far each may be from its block's largest value. */
QC_NODISCARD qc_status qc_against_scales(const qc_against *a, qc_against_scratch *s,
                                         const qc_checkpoint *c, const qc_stored_weight *w,
                                         uint64_t first, uint64_t n, qc_error *err);
/* Elements [first, first + n) of MODEL's quantized weight as F32, in its own order; *out is
 * borrowed from the scratch. */
QC_NODISCARD qc_status qc_against_decode(const qc_against *a, qc_against_scratch *s,
                                         const qc_checkpoint *c, uint32_t tensor,
                                         const qc_stored_weight *w, uint64_t first, uint64_t n,
                                         const float **out, qc_error *err);

/* ---- against_piece.c ---- */

/* Compare bytes [offset, offset + len) of tensor t of OUT, a piece. From many threads at once. */
QC_NODISCARD qc_status qc_against_piece(qc_against *a, qc_against_tensor *t, uint64_t offset,
                                        const void *bytes, size_t len, qc_error *err);

/* ---- against_judge.c ---- */

/* Sums to rows, rows to faults. */
QC_NODISCARD qc_status qc_against_judge(qc_against *a, qc_against_result *r, qc_error *err);

/* ---- against_fit.c ---- */

/* Which other tensor of MODEL the bytes of t are made of, or NULL. Bounded: the first elements are
 * compared with at most 4096 tensors of as many. */
QC_NODISCARD qc_status qc_against_fits(qc_against *a, const qc_against_tensor *t, const char **out,
                                       qc_error *err);

#endif
