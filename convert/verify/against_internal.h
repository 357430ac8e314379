/* What the files against_*.c share. Nobody else includes this. */
#ifndef QC_CONVERT_AGAINST_INTERNAL_H
#define QC_CONVERT_AGAINST_INTERNAL_H

#include "convert/model/recipe_coded.h"
#include "convert/model/recipe_stored.h"
#include "convert/model/weight_read.h"
#include "convert/verify/against.h"
#include "quant/weight_check.h"

/* A tensor of OUT and what it is compared with. */
typedef struct {
    qc_against_row row;
    uint32_t out_tensor, model_tensor; /* QC_NO_TENSOR where there is none */
    const qc_stored_weight *stored;    /* in OUT, if it is QUANTIZED */
    const qc_coded_weight *coded;      /* in MODEL, if it is CAST or QUANTIZED */
    const qc_stored_weight *packed;    /* in MODEL, if it is CAST and was decoded from there */
    const qc_manifest_tensor *listed;  /* in the manifest; NULL: there is none */
    uint64_t rows, cols;               /* shape of a quantized weight, as it is written */
    qc_dtype through; /* the type that a QUANTIZED one was cast to first; else source_dtype */
    qc_check check;
    uint64_t out_bytes; /* length of this tensor alone */
    /* The pieces of OUT's tensor. */
    uint64_t piece_bytes;
    uint32_t piece_count;
    qc_check_sums *sums;    /* QUANTIZED, one per piece */
    uint64_t *differs;      /* EQUAL and CAST: the first byte that differs; UINT64_MAX: none */
    qc_digest *sources;     /* one per piece, where the manifest has the digest of the source */
    uint64_t first_differs; /* after the run */
} qc_against_tensor;

typedef struct qc_against_scratch qc_against_scratch;

typedef struct qc_against {
    qc_arena *arena;
    const qc_against_options *o;
    const qc_quant_ops *ops;
    qc_progress *progress;
    unsigned threads;
    qc_checkpoint *output, *model;
    qc_stored_set in_output, in_model;
    qc_coded_set out_coded, coded; /* in OUT; in MODEL */
    qc_against_tensor *tensors;    /* one per tensor of OUT, same order */
    uint32_t *by_name;             /* indices of tensors in natural order of names */
    uint32_t *of_listed;           /* per tensor of the manifest: its tensor of OUT */
    qc_against_missing *missing;
    size_t missing_count;
    qc_against_scratch *scratch; /* per thread */
} qc_against;

/* ---- against_match.c ---- */

/* Matches the tensors of OUT with those of MODEL. a->in_output must be filled in before. */
QC_NODISCARD qc_status qc_against_match(qc_against *a, qc_error *err);
/* Is the row's shape that of dims? If the row is transposed, the last two are exchanged. */
int qc_against_same_shape(const qc_against_row *r, const uint64_t *dims, unsigned ndim);

/* ---- against_read.c: weights of MODEL and of OUT, in OUT's order ---- */

struct qc_against_scratch {
    qc_against *a; /* NULL: it is empty */
    qc_weight_reader model, output;
    qc_digest_state *hash;
    /* The first three may hold the source of what is checked. */
    qc_buffer raw, turned, cast, codes, slack;
    qc_buffer made; /* codes of AWQ in the order in which they are made */
    qc_check_scratch *check;
};

/* Returns the scratch memory of a thread, whose number is less than a->threads. */
QC_NODISCARD qc_status qc_against_scratch_of(qc_against *a, unsigned thread,
                                             qc_against_scratch **out, qc_error *err);
void qc_against_scratch_free(qc_against_scratch *s); /* accepts an empty one */

/* Returns the type that qc_against_read gives: the source's, or F32 where the source is coded. */
qc_dtype qc_against_read_dtype(const qc_against_tensor *t);
/* Reads elements [first, first + n) of the source in OUT's order; *out is borrowed from the scratch
 * memory. Where hash is not 0, what was read is added to s->hash. */
QC_NODISCARD qc_status qc_against_read(qc_against_scratch *s, const qc_against_tensor *t,
                                       uint64_t first, uint64_t n, int hash, const void **out,
                                       qc_error *err);
/* Compares a frame of a tensor of OUT, which is number `tensor` of the checkpoint. */
QC_NODISCARD qc_status qc_against_frame(qc_against *a, unsigned thread, uint32_t tensor,
                                        const qc_output_frame *frame, const void *content,
                                        qc_error *err);

/* ---- against_judge.c ---- */

/* Turns sums into rows, and finds the faults in the rows. */
QC_NODISCARD qc_status qc_against_judge(qc_against *a, qc_against_result *r, qc_error *err);

#endif
