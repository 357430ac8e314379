/* The summary at the end of a conversion. The pipeline fills the numbers; this writes them. */
#ifndef QC_CONVERT_REPORT_H
#define QC_CONVERT_REPORT_H

#include "base/strbuf.h"
#include "convert/model/recipe.h"
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
    const char *out;   /* as given; NULL: none */
    const char *to;    /* "nf4", ... */
    const char *scale; /* "absmax", ...; NULL: nothing is quantized */
    int dry_run;       /* nothing was written: no time, no error; stored bytes are not known */
    int compressed;
    double seconds;             /* from start to the last rename */
    uint64_t bytes_in;          /* tensor bytes of the source, scales and state included */
    uint64_t bytes_out_content; /* tensor bytes of the output, before compression */
    uint64_t bytes_out_stored; /* all shard files on disk; content plus headers if not compressed */
    uint32_t shards;
    uint64_t side_files; /* copied: tokenizer, ... */
    qc_report_scheme schemes[QC_REPORT_SCHEMES];
    unsigned threads;
    const char *isa;         /* "avx2", ... */
    const char *device;      /* "cpu", "cuda:0 (NVIDIA H200)" */
    uint64_t gpu_weights;    /* that GPUs quantized */
    int continued;           /* went on with an interrupted conversion: */
    uint64_t tensors_kept;   /* tensors of the source that it had finished and that are unchanged */
    uint64_t tensors_redone; /* that it had begun, and that were made again */
    uint64_t bytes_in_kept, bytes_out_kept; /* of bytes_in and bytes_out_stored, done before */
    uint64_t files_consumed; /* weight files of the source that were deleted; their bytes: */
    uint64_t bytes_consumed;
    /* --calibrate, --hessians; text and hessians NULL: neither */
    const char *calibration_text, *calibration_hessians; /* as given */
    uint64_t calibration_tokens;
    uint64_t calibrated, not_calibrated; /* weights; of those that are quantized */
    double calibration_damping;
    double calibration_seconds; /* of all runs that it took; 0: an earlier one did it */
    double outputs_rounded;     /* mean over calibrated weights of their errors in outputs */
    double outputs_calibrated;
    const char *worst_name; /* quantized tensor with the largest rel_mse; NULL: none */
    double worst_rel_mse;
    double worst_max_err;
    const struct qc_auto_result *choice; /* --to auto; else NULL */
    int explain;                         /* --explain: its groups too */
    /* One of several parts; part_count 0 or 1: a whole conversion. As long as parts are to come,
     * the sizes above are those of this part; when this one completed OUT, of the whole. */
    unsigned part_index, part_count;
    const unsigned *parts_left; /* indices, rising; none: OUT is complete */
    unsigned parts_left_count;
    const char *program;              /* how qconv was called, for commands */
    const struct qc_loaders *loaders; /* convert/plan/loaders.h; NULL: nothing is said of them */
    int complete_before;              /* OUT was complete when this part came: nothing was done */
    int complete_meanwhile;           /* another part completed it when this one was through */
} qc_convert_report;

/* Bits per weight of what was quantized (codes and scales), 0 if nothing was. */
double qc_report_quantized_bits(const qc_convert_report *r);
/* Bits per weight over all tensors, 0 if there are none. */
double qc_report_overall_bits(const qc_convert_report *r);

/* Writes a few lines for people. */
QC_NODISCARD qc_status qc_report_text(const qc_convert_report *r, qc_strbuf *out, qc_error *err);
/* Writes one JSON object and a new line; docs/cli.md has its members. It is not for a dry run, whose
 * plan has a JSON of its own. */
QC_NODISCARD qc_status qc_report_json(const qc_convert_report *r, qc_strbuf *out, qc_error *err);

/* Member "calibration", of either; nothing where nothing is calibrated. */
void qc_report_calibration_json(const qc_convert_report *r, qc_json_writer *w);

#endif
