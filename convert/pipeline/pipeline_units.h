/* The units of a pipeline. A unit is one frame of one output tensor, or of the header of a shard. A
 * worker makes it as a whole. */
#ifndef QC_CONVERT_PIPELINE_UNITS_H
#define QC_CONVERT_PIPELINE_UNITS_H

#include "base/status.h"
#include "formats/digest.h"

typedef struct qc_pipeline qc_pipeline; /* convert/pipeline/pipeline.h */

typedef enum {
    QC_UNIT_HEADER,  /* holds the safetensors header of a shard */
    QC_UNIT_MAIN,    /* is made from the source */
    QC_UNIT_DERIVED, /* is made from a finished job, when its turn in the file comes */
    QC_UNIT_DEFERRED /* is made from a finished job, and goes uncompressed to a place kept free */
} qc_unit_kind;

/* All that is known of a unit. qc_unit_of puts it together from the plan and from what is kept. */
typedef struct {
    uint64_t content_offset; /* in its tensor, or in the header */
    uint64_t file_offset;    /* in the shard's file */
    uint32_t content_bytes;
    uint32_t stored_bytes;
    uint32_t index;
    uint32_t tensor; /* the output tensor, or QC_NO_OUTPUT for a header */
    uint32_t shard;
    qc_unit_kind kind;
    /* Only qc_unit_read and the worker that makes the unit set the digests. A digest is zero where
     * there is nothing to hash: `stored` without compression, `source` of what is derived. */
    qc_digest content, stored, source;
} qc_unit;

/* What is kept of a unit. A conversion needs little more than this for each tensor that it writes,
 * so it is packed into 16 bytes. */
typedef struct {
    uint32_t stored_bytes;
    uint32_t tensor;
    uint32_t place_low; /* these two are its place in the shard's file, see qc_unit_place */
    uint16_t place_high;
    uint8_t kind : 2;     /* a qc_unit_kind; it and the next two are set before the team starts */
    uint8_t kept : 1;     /* an earlier run recorded it */
    uint8_t recorded : 1; /* it was kept; if it is made again, it must have the same digests */
    uint8_t written;      /* set by its worker, or it is kept; read after the team has ended */
} qc_unit_state;
_Static_assert(sizeof(qc_unit_state) == 16, "there are as many as tensors in the output, or more");

static inline uint64_t qc_unit_place(const qc_unit_state *u)
{
    return (uint64_t)u->place_high << 32 | u->place_low;
}

static inline void qc_unit_set_place(qc_unit_state *u, uint64_t place) /* place is below 2^48 */
{
    u->place_low = (uint32_t)place;
    u->place_high = (uint16_t)(place >> 32);
}

int qc_pipeline_is_compressed(const qc_pipeline *p);
/* The units of an output tensor are this many, from p->first_unit[tensor] on. */
uint32_t qc_unit_count(const qc_pipeline *p, uint32_t tensor);
uint32_t qc_unit_shard(const qc_pipeline *p, uint32_t index);
/* Returns unit `index` as it is known now, without digests. No other worker may be making it. */
qc_unit qc_unit_of(const qc_pipeline *p, uint32_t index);
/* Reads a written unit with its digests. */
QC_NODISCARD qc_status qc_unit_read(const qc_pipeline *p, uint32_t index, qc_unit *out,
                                    qc_error *err);
/* Keeps the unit's place, size and digests. A table that is the same beside every weight must have
 * the digests of that table; otherwise this returns QC_ERR_CHECK. */
QC_NODISCARD qc_status qc_unit_put(qc_pipeline *p, const qc_unit *u, qc_error *err);
/* Returns where unit u lies in its shard's file when nothing is compressed. */
uint64_t qc_unit_plain_place(const qc_pipeline *p, const qc_unit *u);
/* Forgets what is kept of a job, so that it and all that is derived from it are made (again). */
void qc_job_reset(qc_pipeline *p, uint32_t job);

#endif
