#include "convert/run/output_ready.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "convert/run/finished.h"
#include "convert/run/side_files.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"
#include "formats/seekable.h"

#include <inttypes.h>
#include <string.h>

#define SAMPLE_COUNT 16u
#define SAMPLE_BYTES (64u << 10)

/* ---- what is in the way --------------------------------------------------------------------- */

static qc_status names_of_plan(const char ***names, size_t *count, const qc_plan *plan,
                               qc_error *err)
{
    qc_side_file *side = NULL;
    size_t n = plan->layout.count, side_count = 0;
    QC_TRY(qc_side_files_list(&side, &side_count, plan, err));
    *count = n + side_count;
    QC_TRY(qc_arena_alloc(plan->arena, names, *count, sizeof **names, err));
    for (size_t i = 0; i < n; i++)
        QC_TRY(qc_arena_printf(plan->arena, &(*names)[i], err, "%s%s", plan->layout.shards[i].name,
                               plan->options->compress ? ".zst" : ""));
    for (size_t i = 0; i < side_count; i++)
        (*names)[n + i] = side[i].name;
    return QC_OK;
}

qc_status qc_output_ready(const qc_call *call, int force, const qc_file *root,
                          const qc_owned *owned, const char **names, size_t count, int dry_run,
                          qc_error *err)
{
    char text[QC_NAMES_SHOWN_BYTES];
    qc_replace_plan plan;
    qc_output_sort_names(names, count);
    QC_TRY(qc_output_check_names(&plan, call->arena, root, owned, names, count, force, err));
    if (plan.replaced.count > 0)
        qc_console_warn(call, "--force %s files in %s that qconv did not write there: %s",
                        dry_run ? "would replace" : "replaces", root->path,
                        qc_output_names_text(text, &plan.replaced));
    if (plan.deleted.count > 0)
        qc_console_detail(call, dry_run ? 0 : 1, "%s: these files of the old output %s deleted: %s",
                          root->path, dry_run ? "would be" : "will be",
                          qc_output_names_text(text, &plan.deleted));
    return QC_OK;
}

qc_status qc_output_ready_for(const qc_part_run *part, qc_error *err)
{
    const qc_output_dir *d = part->d;
    const char **names = NULL;
    size_t count = 0;
    QC_TRY(names_of_plan(&names, &count, part->plan, err));
    return qc_output_ready(part->plan->call, part->options->force, &d->root, &d->owned, names,
                           count, 0, err);
}

qc_status qc_output_preview(const qc_part_run *part, qc_error *err)
{
    const qc_plan *plan = part->plan;
    const qc_call *call = plan->call;
    const qc_convert_options *o = part->options;
    const char **names = NULL;
    size_t count = 0;
    qc_path_kind kind = QC_PATH_MISSING;
    qc_file root = QC_FILE_CLOSED;
    qc_owned owned;
    qc_entry e;
    qc_difference why = {"", ""};
    int same = 0;
    QC_TRY(qc_path_stat(o->out, &kind, NULL, err));
    if (kind != QC_PATH_DIR)
        return QC_OK;
    QC_TRY(names_of_plan(&names, &count, plan, err));
    QC_TRY(qc_beneath_open(&root, o->out, err));
    qc_status st = qc_beneath_look(&root, QC_MANIFEST_NAME, &e, err);
    /* Weights are not compared, because that takes as long as reading them. */
    if (st == QC_OK && e.kind == QC_ENTRY_FILE)
        st = qc_output_is_finished(&same, &why, &root, plan, QC_LOOK_FILES, err);
    if (st == QC_OK && e.kind == QC_ENTRY_FILE && !same && !o->force)
        st = qc_output_refuse(&why, root.path, err);
    if (st == QC_OK)
        st = qc_output_owned(&owned, call->arena, &root, err);
    if (st == QC_OK)
        st = qc_output_ready(call, o->force, &root, &owned, names, count, 1, err);
    qc_file_discard(&root);
    if (st == QC_OK && *why.there && !same)
        qc_console_warn(call, "--force would replace %s in %s, which differs from this one: %s",
                        why.there, o->out, why.text);
    else if (st == QC_OK && *why.there && !o->restart && !o->force)
        qc_console_warn(call,
                        "%s already holds %s of these files and options; if the weights are the "
                        "same, too, there is nothing to do",
                        o->out, why.there);
    return st;
}

/* ---- room: what is needed ------------------------------------------------------------------- */

/* Adds the bytes of a file, less what an earlier run wrote of it to the staging folder. */
static qc_status add_file(uint64_t *need, const qc_plan *plan, const qc_file *root,
                          const char *name, const char *suffix, uint64_t bytes, qc_error *err)
{
    const char *staged = NULL;
    qc_entry e = {.kind = QC_ENTRY_MISSING};
    if (root) {
        QC_TRY(qc_arena_printf(plan->arena, &staged, err, QC_STAGING_NAME "/%s%s", name, suffix));
        QC_TRY(qc_beneath_look(root, staged, &e, err));
    }
    *need = qc_sat_add(*need, bytes > e.disk_bytes ? bytes - e.disk_bytes : 0);
    return QC_OK;
}

/* ---- what a sample of the source compresses to ---------------------------------------------- */

/* Compresses a sample of the source. *ratio is from 0 to 1, and 0 where there is nothing to
 * sample. */
static qc_status sample_ratio(double *ratio, const qc_plan *plan, qc_error *err)
{
    qc_st_cursor *cursor = NULL;
    qc_frame_coder *coder = NULL;
    unsigned char *plain = NULL, *packed = NULL;
    uint64_t bytes = 0, packed_bytes = 0;
    qc_status st = QC_OK;
    QC_TRY_GOTO(st, done, qc_st_cursor_create(&cursor, err));
    QC_TRY_GOTO(st, done, qc_frame_coder_create(&coder, err));
    QC_TRY_GOTO(st, done, qc_malloc(&plain, SAMPLE_BYTES, err));
    QC_TRY_GOTO(st, done, qc_malloc(&packed, qc_frame_bound(SAMPLE_BYTES), err));
    /* The samples are spread over the bytes of the model, so large weights are seen more often. */
    uint64_t seen = 0, step = plan->source_bytes / SAMPLE_COUNT + 1, next = step / 2;
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_checkpoint_tensor *t = &plan->model->tensors[plan->jobs[i].source];
        size_t n = t->bytes < SAMPLE_BYTES ? (size_t)t->bytes : SAMPLE_BYTES, len = 0;
        seen = qc_sat_add(seen, t->bytes);
        if (seen <= next)
            continue;
        next = seen + step;
        if (n == 0)
            continue;
        uint64_t at = (t->bytes - n) / 2;
        QC_TRY_GOTO(st, done,
                    qc_checkpoint_read(plan->model, cursor, t, at - at % 8, plain, n, err));
        QC_TRY_GOTO(
            st, done,
            qc_frame_encode(coder, 1, plain, n, packed, qc_frame_bound(SAMPLE_BYTES), &len, err));
        bytes += n;
        packed_bytes += len < n ? len : n;
    }
done:
    *ratio = bytes > 0 ? (double)packed_bytes / (double)bytes : 0;
    qc_free(plain);
    qc_free(packed);
    qc_frame_coder_destroy(coder);
    qc_st_cursor_destroy(cursor);
    return st;
}

/* ---- what is free --------------------------------------------------------------------------- */

/* Finds how many bytes are free where the folder is, or the first folder above it that exists. */
static qc_status free_bytes(uint64_t *out, const char *folder, qc_error *err)
{
    char room[2][PATH_MAX];
    const char *path = folder;
    qc_path_kind kind = QC_PATH_MISSING;
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    for (int i = 0; kind == QC_PATH_MISSING && strcmp(path, ".") != 0; i = !i) {
        const char *above = qc_folder_of(room[i], path);
        path = above ? above : ".";
        QC_TRY(qc_path_stat(path, &kind, NULL, err));
    }
    return qc_dir_free_bytes(path, out, err);
}

static qc_status refuse_room(const char *where, const char *what, uint64_t need, uint64_t room,
                             qc_error *err)
{
    char needed[QC_SIZE_TEXT_BYTES], found[QC_SIZE_TEXT_BYTES], missing[QC_SIZE_TEXT_BYTES];
    QC_FAIL(err, QC_ERR_NOSPACE,
            "%s: %s %s (%" PRIu64 " bytes), and the disk has %s free (%" PRIu64 "), so %s (%" PRIu64
            ") are missing",
            where, what, qc_text_bytes(needed, need), need, qc_text_bytes(found, room), room,
            qc_text_bytes(missing, need - room), need - room);
}

qc_status qc_room_check_bytes(const char *where, const char *what, uint64_t need, qc_error *err)
{
    uint64_t room = 0;
    QC_TRY(free_bytes(&room, where, err));
    return room < need ? refuse_room(where, what, need, room, err) : QC_OK;
}

/* plain: the bytes before compression. */
static qc_status check_compressed(const qc_part_run *part, uint64_t plain, qc_error *err)
{
    const char *out = part->options->out;
    char needed[QC_SIZE_TEXT_BYTES], found[QC_SIZE_TEXT_BYTES];
    uint64_t room = 0;
    double ratio = 0;
    QC_TRY(free_bytes(&room, out, err));
    if (room >= plain)
        return QC_OK;
    QC_TRY(sample_ratio(&ratio, part->plan, err));
    uint64_t least = (uint64_t)((double)plain * ratio / 2);
    if (room < least)
        return refuse_room(out, "by a sample of the source, the compressed output needs at least",
                           least, room, err);
    qc_console_warn(
        part->plan->call,
        "%s: the output is %s before compression, and the disk has %s free; if compression is not "
        "enough, the conversion stops when the disk is full, and the same command continues it",
        out, qc_text_bytes(needed, plain), qc_text_bytes(found, room));
    return QC_OK;
}

qc_status qc_room_check(const qc_part_run *part, const qc_file *root, uint64_t calibrated,
                        qc_error *err)
{
    const qc_plan *plan = part->plan;
    const int compress = plan->options->compress;
    uint64_t need = 0;
    for (uint32_t i = 0; i < plan->layout.count; i++) {
        const qc_shard *s = &plan->layout.shards[i];
        if (qc_share_has(part->share, i))
            QC_TRY(add_file(&need, plan, root, s->name, compress ? ".zst" : "",
                            qc_sat_add(s->header_bytes, s->data_bytes), err));
    }
    for (size_t i = 0; i < plan->model->side_count; i++)
        QC_TRY(add_file(&need, plan, root, plan->model->side[i].path, "",
                        plan->model->side[i].bytes, err));
    if (compress && calibrated == 0)
        return check_compressed(part, need, err);
    if (compress) /* calibrated weights are never compressed */
        need = 0;
    need = qc_sat_add(need, calibrated);
    return qc_room_check_bytes(part->options->out,
                               calibrated == need ? "calibrated weights need"
                               : calibrated > 0   ? "the output and calibrated weights need"
                                                  : "the output needs",
                               need, err);
}

qc_status qc_output_preview_room(const qc_part_run *part, qc_error *err)
{
    const char *out = part->options->out;
    qc_path_kind kind = QC_PATH_MISSING;
    qc_file root = QC_FILE_CLOSED;
    QC_TRY(qc_path_stat(out, &kind, NULL, err));
    if (kind == QC_PATH_DIR)
        QC_TRY(qc_beneath_open(&root, out, err));
    qc_status st = qc_room_check(part, kind == QC_PATH_DIR ? &root : NULL, 0, err);
    qc_file_discard(&root);
    return st;
}
