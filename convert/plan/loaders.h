/* Who can load an output: one table of forms, which convert, plan, --dry-run and docs/interop.md
 * all use, and the commands that load and run the output there. */
#ifndef QC_CONVERT_LOADERS_H
#define QC_CONVERT_LOADERS_H

#include "base/strbuf.h"
#include "convert/plan/plan.h"
#include "formats/json_writer.h"

/* A form of weights, and what loads it once its files are plain .safetensors. */
typedef struct {
    const char *form; /* in JSON: "plain", "stored", "own", or the name of the scheme */
    int transformers4, transformers5;
    const char *with; /* what those loaders need besides themselves, or NULL */
} qc_loader_row;

typedef struct qc_loaders {
    qc_loader_row row;
    const char *library;  /* "transformers", or "diffusers" for one of its models */
    const char *own_form; /* only if the form is "own": "nf4+int8", ...; else NULL */
    /* only if the form is "own": options that make a form which transformers loads */
    const char *instead;
    const char *not5;       /* why transformers 5 does not load it, and what helps; else NULL */
    int import_qconv;       /* transformers 5 loads it in a Python that has imported qconv */
    int dense;              /* of compressed-tensors: widths whose codes may lie in two words */
    int gaps;               /* likewise: rows that end within a word, which no kernel takes */
    const char *rest;       /* the value of --rest with which transformers 5 can compute; or NULL */
    const char *lacks;      /* as qc_loaders_lack says it */
    const char *side_odd;   /* as the checkpoint has it */
    int compressed;         /* the shards are .zst files, which only qconv and zstd read */
    int placed;             /* there is a device_map.json, and it places everything on GPUs */
    const char *class_name; /* the library's class: "AutoModelForCausalLM" */
    int remote_code;        /* the model brings its own class: trust_remote_code */
    /* Do qconv.load in Python and qconv's plug-in of vLLM load it as it is? qc_engines_settle sets
     * them. */
    int qconv_load, plugin;
    int vllm_alone; /* likewise: a plain model of a type that vLLM is known to have */
    /* The caller sets it: with --tp, the options of `vllm serve`; else NULL. */
    const char *vllm;
    /* of AWQ's form: the options of `lmdeploy serve api_server`; else NULL */
    const char *lmdeploy;
} qc_loaders;

/* Returns why nothing loads a model as its files are, whatever their form: "config.json has no
 * model_type"; what qc_claims_check found missing; NULL where nothing is known to be. */
const char *qc_loaders_lack(const qc_checkpoint *model);
/* The strings live in the plan's arena, or they are constants. */
QC_NODISCARD qc_status qc_loaders_of(qc_loaders *out, const qc_plan *plan, qc_error *err);
/* Sets *not5 as in qc_loaders, for a model with so many quantized weights, and experts among
 * them. */
QC_NODISCARD qc_status qc_loaders_not5(const char **not5, qc_arena *arena, const char *model_type,
                                       uint64_t experts, uint64_t all, qc_error *err);
/* Appends "transformers 4 and 5 with bitsandbytes, qconv.load, vLLM with qconv's plug-in"; "qconv
 * only"; "nothing, because config.json has no model_type". */
void qc_loaders_put_names(const qc_loaders *l, qc_strbuf *text);
/* Is nothing of the output quantized? */
int qc_loaders_unquantized(const qc_loaders *l);
/* Does vLLM need qconv's plug-in for the output? */
int qc_loaders_need_plugin(const qc_loaders *l);
/* Is it written in AWQ's form? */
int qc_loaders_awq(const qc_loaders *l);
/* Does vLLM load it by itself, from plain files in its own form? */
int qc_loaders_plain_vllm(const qc_loaders *l);
/* Warns where not every loader reads the output, and of what was done so that they do. Call it
 * before the work begins. */
void qc_loaders_warn(const qc_loaders *l, const qc_plan *plan, const qc_call *call);

/* Appends a word of a shell's command line, quoted where it has to be. (next_steps.c) */
void qc_shell_word(qc_strbuf *text, const char *word);
/* Appends the line "loads in" of the summary. (next_steps.c) */
void qc_next_steps_names(const qc_loaders *l, qc_strbuf *text);
/* Appends the lines of the summary that say who loads OUT, and the commands that do it. They hold
 * the user's paths, quoted for the shell and for Python. program is the name that qconv was called
 * by. (next_steps.c) */
QC_NODISCARD qc_status qc_next_steps_text(const qc_loaders *l, const char *program, const char *out,
                                          qc_strbuf *text, qc_error *err);
/* Writes the member "loads". If out is NULL, nothing was written and there are no commands.
 * (next_steps.c) */
QC_NODISCARD qc_status qc_next_steps_json(const qc_loaders *l, const char *program, const char *out,
                                          qc_json_writer *w, qc_error *err);

#endif
