/* What the files of checkpoint*.c share. Nobody else includes this, except for tests. */
#ifndef QC_FORMATS_CHECKPOINT_INTERNAL_H
#define QC_FORMATS_CHECKPOINT_INTERNAL_H

#include "base/text.h"
#include "formats/checkpoint.h"

#define QC_CHECKPOINT_INDEX_NAME     "model.safetensors.index.json"
#define QC_CHECKPOINT_STEM           "model" /* how transformers' file names begin */
#define QC_CHECKPOINT_DIFFUSERS_STEM "diffusion_pytorch_model" /* of diffusers' */
#define QC_CONFIG_WEIGHTS            "transformers_weights"    /* in config.json: names a file */
#define QC_CHECKPOINT_PIPELINE_NAME  "model_index.json" /* names diffusers' folders of models */
#define QC_CHECKPOINT_FILES_MOST     100000u            /* in the folder of a checkpoint */

/* ---- names of weight files (checkpoint_names.c) ---- */

/* "model.fp16.safetensors", "diffusion_pytorch_model-00001-of-00003.safetensors.zst",
 * "model.safetensors.index.fp16.json", "pytorch_model.bin", ... */
typedef struct {
    const char *variant; /* "fp16" where the name has it; else NULL */
    size_t variant_len;
    int shard; /* one of several files */
    int index;
    int torch; /* a .bin file, or an index of such files */
} qc_checkpoint_name;
/* Returns whether transformers or diffusers look for weights or their index under this name. */
int qc_checkpoint_name_read(qc_checkpoint_name *out, const char *name);
/* If path leads to a file with the name of an index, *folder is the folder of that file; otherwise
 * it is path. */
QC_NODISCARD qc_status qc_checkpoint_folder_of_index(const char **folder, qc_arena *arena,
                                                     const char *path, qc_error *err);
/* Returns whether the file may be weights that torch.save wrote, by its name: none of those that
 * trainers leave beside the weights. */
int qc_checkpoint_name_is_torch(const char *path);
/* Returns whether peft and diffusers save adapters under this name, in any folder. */
int qc_checkpoint_name_is_adapter(const char *path);

typedef struct {
    const char *name; /* name of a tensor */
    uint32_t file;    /* index into the files of the index */
} qc_checkpoint_entry;

/* model.safetensors.index.json or another index */
typedef struct {
    const char *file_name; /* its own */
    const char **files;    /* sorted bytewise, each once */
    size_t file_count;
    qc_checkpoint_entry *entries; /* sorted bytewise by name, each once; at least one */
    size_t entry_count;
    int has_total_size;
    double total_size; /* as written; some writers put a fraction */
} qc_checkpoint_index;

/* Everything lives in the arena. Checks that each file name is a relative path that stays below the
 * directory and ends in ".safetensors". */
QC_NODISCARD qc_status qc_checkpoint_index_parse(qc_checkpoint_index *out, qc_arena *arena,
                                                 const char *text, size_t len, qc_error *err);

/* Finds the files of a directory that hold the weights. Sets c->files (name and path; they are not
 * opened yet) and c->file_count. Where there is an index it is read into index_arena and has_index
 * is set. c->config may name one of them. tree: all files of the directory. chosen: the index that
 * the user has named, or NULL. */
QC_NODISCARD qc_status qc_checkpoint_locate(qc_checkpoint *c, const qc_tree_file *tree,
                                            size_t tree_count, const char *chosen,
                                            qc_arena *index_arena, qc_checkpoint_index *index,
                                            int *has_index, qc_error *err);

/* Warns where the index and the files do not name the same tensors in the same files, and sets
 * c->lost. c->tensors must be sorted. */
QC_NODISCARD qc_status qc_checkpoint_check_index(qc_checkpoint *c, const qc_checkpoint_index *index,
                                                 qc_error *err);

/* Sets c->side to the files of the tree that are not weights. Warns of .safetensors files that are
 * neither read nor copied. */
QC_NODISCARD qc_status qc_checkpoint_find_side(qc_checkpoint *c, const qc_tree_file *tree,
                                               size_t tree_count, qc_error *err);
/* Sets c->config_text, which it takes from *text, and c->config. */
QC_NODISCARD qc_status qc_checkpoint_take_config(qc_checkpoint *c, qc_strbuf *text, qc_error *err);
/* The same with the file, if config.json is in the tree. Call it before qc_checkpoint_locate. */
QC_NODISCARD qc_status qc_checkpoint_read_config(qc_checkpoint *c, const qc_tree_file *tree,
                                                 size_t tree_count, qc_error *err);
/* The same for a checkpoint that is a single file. The config.json beside it is taken as the file's
 * own where a loader would look for the two together, and where the file is the only one of its
 * folder. A warning says what was taken and what was not. */
QC_NODISCARD qc_status qc_checkpoint_config_beside(qc_checkpoint *c, qc_error *err);
/* Sets c->stem and c->is_adapter, from config, files and tensors. */
void qc_checkpoint_judge_kind(qc_checkpoint *c);

/* ---- warnings (checkpoint_names.c) ---- */

/* Adds a sentence to c->warnings. */
QC_NODISCARD qc_status qc_checkpoint_warn(qc_checkpoint *c, qc_error *err, const char *fmt, ...)
    QC_PRINTF(3, 4);

/* A list of names for a message: the first few in quotes, then how many more. */
typedef struct {
    char text[256];
    size_t used;
    size_t shown;
    size_t count;
} qc_checkpoint_names;
void qc_checkpoint_names_add(qc_checkpoint_names *list, const char *name);
/* Closes the list and returns its text: "'a', 'b' and 3 more". */
const char *qc_checkpoint_names_text(qc_checkpoint_names *list);

#endif
