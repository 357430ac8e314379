/* Who reads an output: one table of forms, which convert, plan, --dry-run and docs/interop.md go
 * by, and the commands that run it there. */
#ifndef QC_CONVERT_LOADERS_H
#define QC_CONVERT_LOADERS_H

#include "base/strbuf.h"
#include "convert/plan/plan.h"
#include "formats/json_writer.h"

/* A form of weights, and what loads it once its files are plain. */
typedef struct {
    const char *form; /* in JSON: "plain", "nf4", "int8", "stored", "own" */
    int transformers4, transformers5;
    const char *with; /* what those need beside themselves, or NULL */
} qc_loader_row;

typedef struct qc_loaders {
    const qc_loader_row *row;
    const char *library;    /* "transformers", or "diffusers" for a model of its */
    const char *own_form;   /* of the form "own": "nf4+int8", ...; else NULL */
    const char *instead;    /* of the form "own": what makes a form that transformers loads */
    const char *not5;       /* why transformers 5 does not load it, and what helps; else NULL */
    const char *rest;       /* what --rest should be so that transformers 5 can compute; or NULL */
    int has_config;         /* without a config.json nothing but qconv knows the architecture */
    int compressed;         /* the shards are .zst files, which only qconv and zstd read */
    int placed;             /* there is a device_map.json, and all of it is on GPUs */
    const char *class_name; /* of the library: "AutoModelForCausalLM" */
    int of_pipeline; /* set by the caller: a part of a diffusers pipeline, which is run as a whole
                      */
    int remote_code; /* the class comes with the model: trust_remote_code */
} qc_loaders;

/* Strings live in the plan's arena, or for ever. */
QC_NODISCARD qc_status qc_loaders_of(qc_loaders *out, const qc_plan *plan, qc_error *err);
/* Of a whole diffusers pipeline whose parts are converted as o says; not for forms of qconv's own.
 */
qc_loaders qc_loaders_of_pipeline(const qc_plan_options *o);
/* "transformers 4 and 5 with bitsandbytes"; "diffusers"; "qconv only". */
const char *qc_loaders_names(const qc_loaders *l);
/* Warnings where not every loader reads what comes out; to be said before the work. */
void qc_loaders_warn(const qc_loaders *l, const qc_call *call);

/* Lines of the summary: who loads OUT, and the commands that do it, with the user's paths, quoted
 * for the shell and for Python. program: how qconv was called. (next_steps.c) */
QC_NODISCARD qc_status qc_next_steps_text(const qc_loaders *l, const char *program, const char *out,
                                          qc_strbuf *text, qc_error *err);
/* Member "loads". out NULL: nothing was written, and there are no commands. (next_steps.c) */
QC_NODISCARD qc_status qc_next_steps_json(const qc_loaders *l, const char *program, const char *out,
                                          qc_json_writer *w, qc_error *err);
/* path as one word of a shell, appended. (next_steps.c) */
QC_NODISCARD qc_status qc_shell_word(qc_strbuf *text, const char *path, qc_error *err);

#endif
