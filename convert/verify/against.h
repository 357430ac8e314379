/* Finds out whether OUT is the checkpoint MODEL, converted. `qconv verify OUT --against MODEL` does
 * this, tensor by tensor; docs/verify.md explains the words.
 *
 * OUT may be a qconv output, compressed or not or unpacked, or a checkpoint that bitsandbytes
 * saved, which has no manifest. One pass is enough: where there is a manifest, the read that hashes
 * OUT's bytes also compares them.
 *
 * Results do not depend on threads or instruction set. Each thread needs memory for two frames and
 * a few steps of 512 KiB of source (32 MiB for a weight that lies transposed in MODEL); each tensor
 * needs its row, and each piece of it (up to 8 MiB) about 120 bytes. */
#ifndef QC_CONVERT_AGAINST_H
#define QC_CONVERT_AGAINST_H

#include "convert/adapter/adapters.h"
#include "convert/model/recipe.h"
#include "convert/term/call.h"
#include "convert/verify/output_scan.h"
#include "quant/quant_ops.h"

typedef enum {
    QC_AGAINST_EQUAL,     /* it has the bytes of MODEL */
    QC_AGAINST_CAST,      /* cast to another type, or decoded from FP8, MXFP4, NF4 or int8 to it */
    QC_AGAINST_QUANTIZED, /* NF4, FP4, int8 */
    QC_AGAINST_STATE      /* scales and the like of a quantized weight, judged with it */
} qc_against_kind;

/* How large the error may be, relative to the expected one. An output without faults has 1, and
 * less with searched scales. */
#define QC_AGAINST_RATIO 1.02

/* The codes of a calibrated weight make up for each other in the layer's outputs, at the price of
 * the weight's own error, which may be anything where inputs are next to nothing. The manifest says
 * how large that error is, and what is measured has to be within this share of it. */
#define QC_AGAINST_CALIBRATED_SLACK 1e-2

/* If at most one scale in this many differs from the largest value of its block, no search made
 * them. */
#define QC_AGAINST_FEW_OF 64u

/* A tensor of OUT. */
typedef struct {
    const char *name;
    const char *source; /* tensor of MODEL; NULL: nothing there explains this one */
    qc_against_kind kind;
    const char *scheme; /* "nf4", "fp4", "int8", "int8-block", "cast", "keep", "state" */
    qc_dtype dtype, source_dtype;
    unsigned ndim;
    uint64_t dims[QC_MAX_DIMS]; /* shape of the weight */
    int transpose;              /* MODEL has it transposed */
    uint64_t elems;
    uint64_t block_elems;  /* weights per scale; 0: a row, or not quantized */
    uint64_t bytes;        /* in OUT, with scales and state */
    uint64_t source_bytes; /* in MODEL */
    /* Set if a quantized weight was compared. It is 0 where a fault made that pointless; then what
     * follows is 0. */
    int measured;
    /* These are norms over all elements; x' is what OUT decodes to. */
    double error;     /* |x - x'| / |x| */
    double expected;  /* the error that absmax scales in this form leave of MODEL's weights */
    double ratio;     /* error / expected; 1 where both are 0 */
    double max_error; /* the largest |x - x'|, and its place in the tensor of MODEL */
    uint64_t max_row, max_col;
    uint64_t clipped;   /* elements more than 1/64 above the largest value of their scale */
    uint64_t misplaced; /* elements whose code is not one that rounding gives */
    uint64_t scales;    /* scales of blocks or rows that are not all zero */
    uint64_t searched;  /* scales that are not the largest value, but that the codes fit */
    int calibrated;     /* the manifest says so: its codes need not be those of rounding */
    /* What is wrong, as a clause, or NULL. */
    const char *fault;
    const char *fits; /* another tensor of MODEL that fits instead, or NULL */
} qc_against_row;

/* A tensor of MODEL that OUT does not have. */
typedef struct {
    const char *name;
    const char *why; /* the reason; NULL: there is none, which is a fault */
} qc_against_missing;

typedef struct {
    qc_against_row *rows; /* in natural order of names, without QC_AGAINST_STATE */
    size_t count;
    qc_against_missing *missing; /* in natural order of names */
    size_t missing_count;
    uint64_t equal, cast, quantized;    /* rows of each kind */
    uint64_t digests;                   /* sources whose recorded digest was compared */
    uint64_t output_bytes, model_bytes; /* bytes that were read and compared */
    uint64_t faults;                    /* including problems of the scan and missing tensors */
    qc_scan_problem first;              /* the first fault */
    int has_manifest;
    qc_scan_result scan; /* with a manifest: what plain verify finds */
} qc_against_result;

typedef struct {
    const char *out, *model;     /* the two that are compared */
    qc_loras loras;              /* merged into MODEL */
    const qc_manifest *manifest; /* OUT's, or NULL */
} qc_against_options;

/* Compares OUT with MODEL. What is wrong with OUT is in *result, and the status is QC_OK.
 * QC_ERR_INPUT (and other errors) says that MODEL, or an OUT without manifest, is no checkpoint.
 * progress gets bytes of OUT, and may be NULL. Strings and arrays live in the arena of the call. */
QC_NODISCARD qc_status qc_against_run(qc_against_result *result, const qc_call *call,
                                      const qc_against_options *o, qc_progress *progress,
                                      qc_error *err);

#endif
