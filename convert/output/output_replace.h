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

#define QC_NAMES_SHOWN_BYTES 256

typedef struct {
    const char *name; /* relative to OUT */
    uint64_t bytes;   /* of a shard */
    int is_shard;
} qc_owned_file;

/* Files that qconv wrote, as its manifests say; sorted by name, of which there may be several. */
typedef struct {
    qc_owned_file *files;
    size_t count;
} qc_owned;

/* What a run will do to files that are there. The names are relative to OUT and lie in the
 * arena. */
typedef struct {
    const char **replaced; /* other people's, only with --force */
    size_t replaced_count;
    const char **deleted; /* qconv's, of which the new output has none of that name */
    size_t deleted_count;
} qc_replace_plan;

/* Is this the name of weights, in any format, or of their index? */
int qc_output_is_weights(const char *name);
/* "a, b and 3 more" in a buffer of QC_NAMES_SHOWN_BYTES; NULL entries are not allowed. */
const char *qc_output_names_text(char *text, const char *const *names, size_t count);
/* Refuses (QC_ERR_USAGE) an OUT that holds weights at its top which owned does not list. */
QC_NODISCARD qc_status qc_output_check_weights(qc_arena *arena, const qc_file *root,
                                               const qc_owned *owned, qc_error *err);
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
/* Is the file that has this name one that owned lists? */
int qc_output_is_owned(const qc_owned *owned, const char *name, const qc_entry *found);
/* Sorts names for the calls above. */
void qc_output_sort_names(const char **names, size_t count);

#endif
