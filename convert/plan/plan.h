/* The plan of a conversion: every output tensor, shard, frame and byte, from shapes alone.
 *
 * A job is one tensor of the source that is written (a weight, a norm, ...). Its outputs are the
 * main tensor, made from the source piece by piece, and for a quantized weight the derived tensors
 * beside it (absmax, maps, state), known once all of the weight has been seen.
 *
 * The plan holds for any number of threads and any device: output bytes depend on it, and it
 * depends on the checkpoint's shapes and the options only. */
#ifndef QC_CONVERT_PLAN_H
#define QC_CONVERT_PLAN_H

#include "convert/model/recipe.h"
#include "convert/plan/plan_options.h"
#include "convert/term/call.h"
#include "formats/bnb_state.h"
#include "formats/shard_layout.h"

typedef enum {
    QC_PART_MAIN,
    QC_PART_ABSMAX,        /* U8 (nested) or F32 */
    QC_PART_QUANT_MAP,     /* F32 [16] */
    QC_PART_NESTED_ABSMAX, /* F32 */
    QC_PART_NESTED_MAP,    /* F32 [256] */
    QC_PART_STATE,         /* U8, JSON */
    QC_PART_SCB,           /* F32 [rows] */
    QC_PART_FORMAT,        /* U8 scalar 0: row-major */
    QC_PART_COUNT
} qc_part;

#define QC_NO_OUTPUT UINT32_MAX

/* Of a job only what nothing else tells is kept: a mixture of experts has tens of thousands. */
typedef struct {
    const qc_recipe_entry *entry;
    const char *name;     /* of the main tensor */
    const uint64_t *dims; /* [ndim], of the weight as it is written */
    uint64_t elems;
    uint64_t rows, cols; /* of a 2-D weight as written, of a stack of experts [experts * out, in];
                            else 1, elems */
    uint64_t blocks;     /* of a block-quantized weight */
    uint64_t absorbed_bytes; /* of the source's scales and state that are read with the weight */
    uint32_t source;         /* index into the checkpoint's tensors */
    qc_scheme scheme : 8;
    qc_dtype dtype : 8;        /* of the elements that qc_job_read gives */
    qc_scale_method scale : 8; /* of a quantized weight, else absmax */
    unsigned ndim : 8;
    uint32_t block_elems;
    uint32_t device;
    uint32_t outputs[QC_PART_COUNT]; /* indices of output tensors, or QC_NO_OUTPUT */
    /* A main piece of n content bytes comes from n * source_num / source_den source bytes. */
    uint8_t source_num, source_den;
    uint8_t nested;
    uint8_t stack; /* of experts */
} qc_job;

/* As many as there are tensors in the output, so in 4 bytes. */
typedef struct {
    uint32_t job : 29;
    uint32_t part : 3; /* qc_part */
} qc_output;
_Static_assert(QC_PART_COUNT <= 8, "a part of a job has 3 bits");

typedef struct {
    qc_arena *arena; /* borrowed; owns all below */
    const qc_checkpoint *model;
    const qc_recipe *recipe;
    const qc_call *call;
    const qc_plan_options *options;
    qc_job *jobs; /* in output order */
    uint32_t job_count;
    qc_output *outputs; /* output tensors, in output order; what they are qc_plan_tensor tells */
    uint32_t tensor_count;
    const char **device_names; /* of qc_plan_set_devices; NULL: no placement */
    uint32_t device_count;
    qc_layout layout;
    /* What only qconv reads (docs/format.md 3.6): "nf4+int8", "int8-block", ...; NULL: what is
     * quantized, if anything, is bitsandbytes' form. */
    const char *own_form;
    /* Of convert/calibrate/calibrate.h: the GPU that calibrates; NULL: the CPU, or nothing to
     * calibrate. */
    const struct qc_calibrate_device *calibrates_on;
    uint64_t source_bytes;      /* of all jobs, and of what they absorb */
    uint64_t content_bytes;     /* of all shards, headers included: the size with --compress none */
    uint64_t tensor_bytes;      /* of all output tensors */
    uint64_t weights_quantized; /* elements */
    uint64_t quantized_bytes;   /* of their main and derived tensors */
} qc_plan;

/* In two steps, so that what depends on sizes (placement) can come between: jobs and tensors with
 * their sizes (qc_plan_tensor_bytes), then shards. */
QC_NODISCARD qc_status qc_plan_begin(qc_plan *out, qc_arena *arena, const qc_checkpoint *model,
                                     const qc_recipe *recipe, const qc_call *call,
                                     const qc_plan_options *options, qc_error *err);
/* Between the two: job i lies on device device_of[jobs[i].source] of `count` (borrowed names). Jobs
 * and their tensors are put in the order of devices; within one their order stays. */
QC_NODISCARD qc_status qc_plan_set_devices(qc_plan *p, const uint32_t *device_of,
                                           const char **names, uint32_t count, qc_error *err);
QC_NODISCARD qc_status qc_plan_lay_out(qc_plan *p, qc_error *err);
uint64_t qc_plan_tensor_bytes(const qc_plan *p, uint32_t tensor);
/* Output tensor i of a plan that is laid out, with its place. Made anew from its job each time:
 * names, shapes and places of all of them at once would be most of a conversion's memory. */
qc_out_tensor qc_plan_tensor(const qc_plan *p, uint32_t i);
/* All of them, for qc_layout_header and its like. */
qc_out_tensors qc_plan_tensors(const qc_plan *p);
/* State of a block-quantized weight, without the offset. */
qc_bnb_state qc_job_state_of(const qc_job *j);
/* Of a block-quantized weight: the elements that frames and steps keep together. A block; where
 * scales are searched and quantized too, the blocks of one nested absmax, which are settled at
 * once. A power of two. */
uint64_t qc_job_group_elems(const qc_job *j);
/* Is job's weight one that calibrating may make (convert/calibrate/calibrated.h), when that is
 * asked for? It is laid out as one whose scales are searched, which it is where nothing calibrates
 * it. */
int qc_job_may_be_calibrated(const qc_plan *p, const qc_job *j);
/* Do its scales, searched and quantized, have an offset that a sample of groups gives? */
int qc_job_has_sample(const qc_job *j);
/* What of job j's source the first n content bytes of its main tensor come from; all of it for all
 * of them, exactly. Without absorbed_bytes. */
uint64_t qc_plan_source_share(const qc_plan *p, const qc_job *j, uint64_t n);
/* What a 2-D weight [rows, cols] takes in a scheme, its scales and state included: exactly the sum
 * of the tensors that qc_plan_begin makes of it. dtype: of the source. scheme: NF4, INT8_ROWS,
 * INT8_BLOCKS or KEEP. */
uint64_t qc_plan_weight_bytes(uint64_t rows, uint64_t cols, qc_dtype dtype, qc_scheme scheme,
                              uint32_t block_elems, int nested);
/* The same of a weight in FP8 or MXFP4 that is quantized (not KEEP). */
uint64_t qc_plan_coded_bytes(const qc_coded_weight *w, qc_scheme scheme, uint32_t block_elems,
                             int nested);
/* Can a GPU quantize job j's weight? */
int qc_job_suits_gpu(const qc_job *j);
/* Bytes of the source that GPUs could quantize. */
uint64_t qc_plan_gpu_bytes(const qc_plan *plan);
/* Both steps. */
QC_NODISCARD qc_status qc_plan_make(qc_plan *out, qc_arena *arena, const qc_checkpoint *model,
                                    const qc_recipe *recipe, const qc_call *call,
                                    const qc_plan_options *options, qc_error *err);

#endif
