/* The summary at the end of a conversion. The pipeline fills in the numbers, and this file writes
 * them. */
#ifndef QC_CONVERT_REPORT_H
#define QC_CONVERT_REPORT_H

#include "base/strbuf.h"
#include "convert/adapter/adapters.h"
#include "convert/calibrate/calibrate.h"
#include "convert/pipeline/odd_values.h"
#include "convert/plan/plan.h"
#include "convert/run/promise.h"
#include "convert/run/resume.h"
#include "formats/json_writer.h"

#define QC_REPORT_SCHEMES (QC_SCHEME_ABSORBED + 1)

typedef struct {
    uint64_t tensors;   /* source tensors that were given this scheme */
    uint64_t elems;     /* their elements (of the logical shape) */
    uint64_t bytes_in;  /* as read */
    uint64_t bytes_out; /* as written, with their scales, before compression */
} qc_report_scheme;

typedef struct {
    const char *model; /* as given */
    const char *out;   /* as given; NULL: no output is made */
    const char *to;    /* "nf4", ... */
    const char *scale; /* "absmax", ...; NULL: nothing is quantized */
    int dry_run;       /* nothing was written, so time, error and stored bytes are unknown */
    int compressed;
    double seconds;             /* from start to the last rename */
    uint64_t bytes_in;          /* tensor bytes of the source, scales and state included */
    uint64_t bytes_out_content; /* tensor bytes of the output, before compression */
    uint64_t bytes_out_stored;  /* all shard files on disk; uncompressed: content plus headers */
    uint32_t shards;
    uint64_t side_files; /* those that were copied: tokenizer, ... */
    qc_report_scheme schemes[QC_REPORT_SCHEMES];
    unsigned threads;
    const char *isa;       /* "avx2", ... */
    const char *device;    /* "cpu", "cuda:0 (NVIDIA H200)" */
    uint64_t gpu_weights;  /* those that GPUs quantized */
    qc_resume_found found; /* work of the conversion that this run continued, if any */
    const qc_attached_adapter *adapters; /* --lora; those of the checkpoint */
    size_t adapter_count;
    /* --hessians; without it, text and hessians are NULL. Its weights are those that this run or an
     * earlier one calibrated, its seconds those of all runs that it took. */
    qc_calibrate_report calibration;
    qc_manifest_outputs outputs; /* mean errors over the calibrated weights */
    const char *worst_name;      /* quantized tensor with the largest rel_mse; NULL: none */
    double worst_rel_mse;
    double worst_max_err;
    qc_odd_values values; /* what is odd in them */
    qc_promise_left left; /* matrices that stay large unasked; texts are the plan's */
    const struct qc_auto_result *choice; /* --to auto; else NULL */
    int explain;                         /* --explain: write its groups too */
    /* This is one of several parts; a part_count of 0 or 1 means a whole conversion. While other
     * parts are still to come, the sizes above are those of this part; when this part completed
     * OUT, they are those of the whole. */
    unsigned part_index, part_count;
    const unsigned *parts_left; /* rising indices; where there are none, OUT is complete */
    unsigned parts_left_count;
    const char *program;              /* how qconv was called, for commands that are shown */
    const struct qc_loaders *loaders; /* convert/plan/loaders.h; NULL: nothing is said of them */
    int complete_before;    /* OUT was complete when this part came, so nothing was done */
    int complete_meanwhile; /* another part completed it when this one was through */
} qc_convert_report;

/* Bits per weight (codes and scales) over the quantized weights; 0 if there are none. */
double qc_report_quantized_bits(const qc_convert_report *r);
/* Bits per weight over all tensors, 0 if there are none. */
double qc_report_overall_bits(const qc_convert_report *r);

/* Writes a few lines for people. */
QC_NODISCARD qc_status qc_report_text(const qc_convert_report *r, qc_strbuf *out, qc_error *err);
/* Writes one JSON object and a new line; docs/cli.md has its members. It is not for a dry run,
 * whose plan has a JSON of its own. */
QC_NODISCARD qc_status qc_report_json(const qc_convert_report *r, qc_strbuf *out, qc_error *err);

/* Prints what --dry-run shows to standard output: one row per tensor of the plan and the sums from
 * `totals`, or with --json one JSON object. */
QC_NODISCARD qc_status qc_plan_print(const qc_plan *plan, const qc_convert_report *totals,
                                     qc_error *err);

#endif
