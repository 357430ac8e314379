/* The plan of a conversion: every output tensor, shard, frame and byte, computed from shapes alone.
 *
 * A job is one tensor of the source that is written (a weight, a norm, ...). Its outputs are the
 * main tensor, which is made from the source unit by unit, and for a quantized weight the derived
 * tensors beside it (absmax, maps, state), which are known once the whole weight has been read.
 *
 * A plan is the same for any number of threads and any device: the output's bytes depend on the
 * plan, and the plan depends only on the checkpoint's shapes and the options. */
#ifndef QC_CONVERT_PLAN_H
#define QC_CONVERT_PLAN_H

#include "convert/model/recipe.h"
#include "convert/plan/plan_options.h"
#include "convert/term/call.h"
#include "formats/bnb_state.h"
#include "formats/shard_layout.h"
#include "quant/quant_form.h"

#define QC_NO_OUTPUT UINT32_MAX

/* Steps of this many source bytes are read, hashed and quantized at a time, but never less than a
 * row or a group. Error sums are added up step by step, so the manifest's errors depend on it. */
#define QC_SOURCE_STEP_BYTES (512u << 10)

/* A job has all numbers of its weight, so that whoever carries the plan out asks nobody. It is
 * small, because a mixture of experts has tens of thousands of them: 144 bytes. */
typedef struct {
    const qc_recipe_entry *entry;
    const char *name;     /* name of the main tensor */
    const uint64_t *dims; /* [ndim], shape of the weight as it is written */
    uint64_t elems;
    /* Counts the rows of form.cols elements as they are written. A stack of experts has
     * [experts * out, in]; what is neither that nor 2-D has one row. */
    uint64_t rows;
    /* How the numbers of a quantized weight lie, but for the offset of nested scales. ops is NULL
     * where nothing is quantized, and cols counts in any case. */
    qc_form form;
    uint64_t scales;         /* scales of blocks or rows, before they are quantized themselves */
    uint64_t source_bytes;   /* bytes of the source's tensor, as it is read */
    uint64_t absorbed_bytes; /* bytes of the source's scales and state, read with the weight */
    uint32_t source;         /* index into the checkpoint's tensors */
    /* Frames and steps keep this many elements together: a row or a block, where a weight is or was
     * quantized. Where scales are searched and quantized too, it is all blocks that share one
     * nested absmax, because these are settled together. */
    uint32_t group_elems;
    uint32_t step_elems;   /* elements of a step: whole rows or groups */
    uint32_t first_output; /* index of its main tensor; the others follow in the order of roles */
    uint16_t roles;        /* bit r: it has a tensor of qc_role_tensor r */
    uint16_t device;
    qc_scheme scheme : 8;
    qc_dtype dtype : 8;        /* dtype of the elements that the pipeline reads */
    qc_dtype model_dtype : 8;  /* dtype of the weight in the model: its file's, or what codes stand
                                  for */
    qc_scale_method scale : 8; /* for a quantized weight; absmax otherwise */
    /* An element of the source has source_num bits; the same element has source_den bits in the
     * main tensor where that is not quantized. Or both are in another unit: see
     * qc_job_source_bytes. */
    uint8_t source_num, source_den;
    unsigned ndim : 4;
    unsigned stack : 1;      /* is it a stack of experts? */
    unsigned has_sample : 1; /* does a sample of groups give the offset of its searched scales? */
    /* Is the source's digest over shares of the stored bytes, one for each piece of the output,
     * instead of over what the pieces are made of? Rows of words, padded ones among them, and
     * columns are no ranges of bytes (docs/format.md, section 4). */
    unsigned shares_source : 1;
    /* Are its elements numbered as AWQ makes them (convert/model/awq_layout.h)? */
    unsigned by_groups : 1;
} qc_job;

/* There are as many of these as tensors in the output, so one takes 4 bytes only. */
typedef struct {
    uint32_t job : 28;
    uint32_t role : 4; /* qc_role_tensor */
} qc_output;
_Static_assert(QC_ROLE_TENSOR_COUNT <= 16, "a part of a job has 4 bits");

typedef struct {
    qc_arena *arena; /* borrowed; it owns everything below */
    const qc_checkpoint *model;
    const qc_recipe *recipe;
    const qc_call *call;
    const qc_plan_options *options;
    qc_job *jobs; /* in output order */
    uint32_t job_count;
    qc_output *outputs; /* output tensors, in output order; qc_plan_tensor describes them */
    uint32_t tensor_count;
    const char **device_names; /* set by qc_plan_set_devices; NULL: there is no placement */
    uint32_t device_count;
    uint64_t placed_context; /* tokens of a sequence that the placement leaves room for */
    qc_layout layout;
    /* A form that only qconv reads (docs/format.md 3.6): "nf4+int8", "int8-block", ... If it is
     * NULL, whatever is quantized has bitsandbytes' form. */
    const char *own_form;
    /* The GPU that calibrates (convert/calibrate/calibrate.h). If it is NULL, the CPU calibrates,
     * or there is nothing to calibrate. */
    const struct qc_calibrate_device *calibrates_on;
    /* [job_count + 1] Matrices of stacks that are calibrated one by one have the numbers from
     * first_matrix[job] to first_matrix[job + 1], behind those of all jobs. NULL: there are
     * none. */
    uint32_t *first_matrix;
    uint64_t source_bytes;      /* all jobs, and the scales and state that they absorb */
    uint64_t content_bytes;     /* all shards, headers included: the size with --compress none */
    uint64_t tensor_bytes;      /* all output tensors */
    uint64_t weights_quantized; /* elements */
    uint64_t quantized_bytes;   /* main and derived tensors of quantized weights */
} qc_plan;

/* A plan is made in two steps, so that a placement, which depends on sizes, can come between them.
 * The first makes the jobs and the tensors with their sizes (qc_plan_tensor_bytes), the second the
 * shards. */
QC_NODISCARD qc_status qc_plan_begin(qc_plan *out, qc_arena *arena, const qc_checkpoint *model,
                                     const qc_recipe *recipe, const qc_call *call,
                                     const qc_plan_options *options, qc_error *err);
/* Call this between the two steps: job i lies on device device_of[jobs[i].source], one of `count`
 * (names are borrowed), which leave room for `context` tokens. It sorts the jobs and their tensors
 * by device; within a device they keep their order. */
QC_NODISCARD qc_status qc_plan_set_devices(qc_plan *p, const uint32_t *device_of,
                                           const char **names, uint32_t count, uint64_t context,
                                           qc_error *err);
QC_NODISCARD qc_status qc_plan_lay_out(qc_plan *p, qc_error *err);
uint64_t qc_plan_tensor_bytes(const qc_plan *p, uint32_t tensor);
/* The bytes of all output tensors of a job. */
uint64_t qc_plan_job_bytes(const qc_plan *p, const qc_job *j);
/* Output tensor i of a plan that is laid out, with its place. It is made anew from its job on each
 * call, because the names, shapes and places of all tensors together would be most of a
 * conversion's memory. */
qc_out_tensor qc_plan_tensor(const qc_plan *p, uint32_t i);
/* All output tensors, for qc_layout_header and functions like it. */
qc_out_tensors qc_plan_tensors(const qc_plan *p);
/* The source bytes that a piece of this output tensor is made of, or its share of them. */
uint64_t qc_plan_source_piece(const qc_plan *p, uint32_t tensor);
/* The state of a block-quantized weight, without the offset. */
qc_bnb_state qc_job_state_of(const qc_job *j);
/* The output tensors of a job are this many, from first_output on. */
static inline uint32_t qc_job_output_count(const qc_job *j)
{
    return (uint32_t)__builtin_popcount(j->roles);
}
/* The job's tensor of a role, or QC_NO_OUTPUT. */
static inline uint32_t qc_job_output(const qc_job *j, qc_role_tensor role)
{
    const unsigned before = j->roles & ((1u << role) - 1);
    return j->roles >> role & 1 ? j->first_output + (uint32_t)__builtin_popcount(before)
                                : QC_NO_OUTPUT;
}
/* May calibrating make this job's weight (convert/calibrate/calibrated.h), if calibrating is asked
 * for? Such a weight is laid out like one with searched scales, and if nothing calibrates it, its
 * scales are indeed searched. */
int qc_job_may_be_calibrated(const qc_plan *p, const qc_job *j);
/* Gives a job, whose shape is known, the form and the scales of a scheme that quantizes. */
/* Returns how many of the source's bytes the first n content bytes of the main tensor come from,
 * rounded up. */
uint64_t qc_job_source_bytes(const qc_job *j, uint64_t n);
/* Returns how many elements the first n content bytes of the main tensor hold. */
uint64_t qc_job_elems(const qc_job *j, uint64_t n);
void qc_job_set_form(qc_job *j, qc_scheme scheme, uint32_t block_elems, int nested);
/* The bytes that a weight of 2 dimensions, or a stack of 3, takes in a scheme that quantizes, with
 * its scales and state: exactly the sum of the tensors that qc_plan_begin makes of it. dtype is the
 * model's. */
uint64_t qc_plan_weight_bytes(const uint64_t *dims, unsigned ndim, qc_dtype dtype, qc_scheme scheme,
                              uint32_t block_elems, int nested);
/* Can a GPU quantize job j's weight? */
int qc_job_suits_gpu(const qc_job *j);
/* The bytes of the source that GPUs could quantize. */
uint64_t qc_plan_gpu_bytes(const qc_plan *plan);
/* Warns where most of the weights that could be quantized stay as they are, because their rows are
 * no whole groups, and where weights of 4 bits get 4 bits again. QC_ERR_INPUT where a plan that was
 * to quantize has nothing to quantize. */
QC_NODISCARD qc_status qc_plan_check_quantizes(const qc_plan *p, const char *model, qc_error *err);
/* Makes both steps. */
QC_NODISCARD qc_status qc_plan_make(qc_plan *out, qc_arena *arena, const qc_checkpoint *model,
                                    const qc_recipe *recipe, const qc_call *call,
                                    const qc_plan_options *options, qc_error *err);

#endif
