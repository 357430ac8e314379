/* What lies in OUT, and what becomes of it when an output is written there.
 *
 * qconv deletes and replaces what a manifest of its own lists. That is the one in OUT or, while
 * files move and OUT has none, those in the staging folder. A listed shard that has another size
 * than the manifest says is not what qconv wrote, and not its own. Files of others stay as they
 * are, with two exceptions: with --force a file that is in the way is replaced and named, and other
 * people's weights are a reason to refuse, --force or not, because they would either be lost or be
 * loaded together with the output. */
#ifndef QC_CONVERT_OUTPUT_REPLACE_H
#define QC_CONVERT_OUTPUT_REPLACE_H

#include "base/arena.h"
#include "formats/beneath.h"
#include "formats/digest.h"
#include "formats/manifest.h"

#define QC_STAGING_NAME    ".qconv-partial"
#define QC_LOCK_NAME       "lock"
#define QC_STAGED_MANIFEST QC_STAGING_NAME "/" QC_MANIFEST_NAME
/* The manifest of an output that is being replaced: it tells which files of OUT are qconv's while
 * OUT itself has no manifest. */
#define QC_REPLACED_NAME     ".replaced.json"
#define QC_REPLACED_MANIFEST QC_STAGING_NAME "/" QC_REPLACED_NAME
#define QC_MANIFEST_MAX      ((size_t)1 << 30)

#define QC_NAMES_SHOWN_BYTES 256

/* A list of names that grows in an arena. */
typedef struct {
    qc_arena *arena; /* borrowed */
    const char **names;
    size_t count, room;
} qc_name_list;

QC_NODISCARD qc_status qc_name_list_add(qc_name_list *l, const char *name, qc_error *err);

typedef struct {
    const char *name; /* relative to OUT */
    uint64_t bytes;   /* length of a shard */
    int is_shard;
} qc_owned_file;

/* Files that qconv wrote, as its manifests say; sorted by name. A name may come more than once. */
typedef struct {
    qc_owned_file *files;
    size_t count;
} qc_owned;

/* What a run will do to files that are there. The names are relative to OUT and lie in the
 * arena. */
typedef struct {
    qc_name_list replaced; /* other people's, only with --force */
    qc_name_list deleted;  /* qconv's, where the new output has no file of the name */
} qc_replace_plan;

/* "a, b and 3 more" in a buffer of QC_NAMES_SHOWN_BYTES; NULL entries are not allowed. */
const char *qc_output_names_text(char *text, const qc_name_list *list);
/* May an output be written to OUT? source is the input path, which must not be OUT, nor hold it,
 * nor be a file in it; NULL where OUT itself is changed. Touches nothing; *exists says whether OUT
 * is there, and may be NULL. QC_ERR_USAGE when OUT is the source, or without force is not empty and
 * no qconv output. */
QC_NODISCARD qc_status qc_output_check(qc_arena *arena, const char *out, const char *source,
                                       int force, int *exists, qc_error *err);
/* Reads a manifest beneath root and the digest of its text; the result is empty (shard_count 0)
 * where it is missing or damaged. One that is there and cannot be read now is an error, because
 * whoever took it for none would make again what has moved to OUT. digest may be NULL. */
QC_NODISCARD qc_status qc_output_read_manifest(qc_arena *arena, const qc_file *root,
                                               const char *name, qc_manifest *m, qc_digest *digest,
                                               qc_error *err);
/* What qconv's manifests in OUT list. */
QC_NODISCARD qc_status qc_output_owned(qc_owned *out, qc_arena *arena, const qc_file *root,
                                       qc_error *err);
/* Can files of these names (sorted, without the manifest) be written to OUT? If not, QC_ERR_USAGE
 * names what is in the way: a folder, a pipe, a link where a folder is needed, weights of somebody
 * else, or without force any file of somebody else. */
QC_NODISCARD qc_status qc_output_check_names(qc_replace_plan *plan, qc_arena *arena,
                                             const qc_file *root, const qc_owned *owned,
                                             const char *const *names, size_t count, int force,
                                             qc_error *err);
/* Sorts names for the calls above. */
void qc_output_sort_names(const char **names, size_t count);

#endif
