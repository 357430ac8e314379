#include "convert/run/output_ready.h"

#include "base/alloc.h"
#include "base/checked.h"
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
    const char **side = NULL;
    size_t side_count = 0;
    QC_TRY(qc_side_file_names(&side, &side_count, plan->arena, plan, err));
    *count = side_count + plan->layout.count;
    QC_TRY(qc_arena_alloc(plan->arena, names, *count, sizeof **names, err));
    for (uint32_t i = 0; i < plan->layout.count; i++)
        QC_TRY(qc_arena_printf(plan->arena, &(*names)[i], err, "%s%s", plan->layout.shards[i].name,
                               plan->options->compress ? ".zst" : ""));
    if (side_count > 0)
        memcpy(*names + plan->layout.count, side, side_count * sizeof *side);
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

qc_status qc_output_ready_for(const qc_output_dir *d, const qc_plan *plan, int force, qc_error *err)
{
    const char **names = NULL;
    size_t count = 0;
    QC_TRY(names_of_plan(&names, &count, plan, err));
    return qc_output_ready(plan->call, force, &d->root, &d->owned, names, count, 0, err);
}

/* Looks at an output that is there. *same says whether it is the same; if not, why says what
 * differs. Weights are not compared, because that takes as long as reading them. */
static qc_status preview_finished(int *same, qc_difference *why, const qc_file *root,
                                  const qc_plan *plan, int force, qc_error *err)
{
    qc_entry e;
    QC_TRY(qc_beneath_look(root, QC_MANIFEST_NAME, &e, err));
    if (e.kind != QC_ENTRY_FILE)
        return QC_OK;
    QC_TRY(qc_output_is_finished(same, why, root, plan, QC_LOOK_FILES, err));
    return *same || force ? QC_OK : qc_output_refuse(why, root->path, err);
}

static void tell_finished(int same, const qc_difference *why, const qc_call *call,
                          const qc_convert_options *o)
{
    if (*why->there && !same)
        qc_console_warn(call, "--force would replace %s in %s, which differs from this one: %s",
                        why->there, o->out, why->text);
    else if (*why->there && !o->restart && !o->force)
        qc_console_warn(call,
                        "%s already holds %s of these files and options; if the weights are the "
                        "same, too, there is nothing to do",
                        o->out, why->there);
}

qc_status qc_output_preview(const qc_plan *plan, const qc_part_run *part, qc_error *err)
{
    const qc_call *call = plan->call;
    const qc_convert_options *o = part->options;
    const char **names = NULL;
    size_t count = 0;
    qc_path_kind kind = QC_PATH_MISSING;
    qc_file root = QC_FILE_CLOSED;
    qc_owned owned;
    qc_difference why = {"", ""};
    int same = 0;
    QC_TRY(qc_path_stat(o->out, &kind, NULL, err));
    if (kind != QC_PATH_DIR)
        return QC_OK;
    QC_TRY(names_of_plan(&names, &count, plan, err));
    QC_TRY(qc_beneath_open(&root, o->out, err));
    qc_status st = preview_finished(&same, &why, &root, plan, o->force, err);
    if (st == QC_OK)
        st = qc_output_owned(&owned, call->arena, &root, err);
    if (st == QC_OK)
        st = qc_output_ready(call, o->force, &root, &owned, names, count, 1, err);
    if (st == QC_OK)
        tell_finished(same, &why, call, o);
    qc_file_discard(&root);
    return st;
}

/* ---- room: what is needed ------------------------------------------------------------------- */

/* Adds the bytes of a file, less what an earlier run wrote of it to the staging folder. */
static qc_status add_file(uint64_t *need, const qc_room *r, const char *name, const char *suffix,
                          uint64_t bytes, qc_error *err)
{
    const char *staged = NULL;
    qc_entry e = {.kind = QC_ENTRY_MISSING};
    if (r->root) {
        QC_TRY(
            qc_arena_printf(r->plan->arena, &staged, err, QC_STAGING_NAME "/%s%s", name, suffix));
        QC_TRY(qc_beneath_look(r->root, staged, &e, err));
    }
    *need = qc_sat_add(*need, bytes > e.disk_bytes ? bytes - e.disk_bytes : 0);
    return QC_OK;
}

/* Adds up shards and copied files. */
static qc_status add_all(uint64_t *need, const qc_room *r, qc_error *err)
{
    const qc_plan *plan = r->plan;
    for (uint32_t i = 0; i < plan->layout.count; i++) {
        const qc_shard *s = &plan->layout.shards[i];
        if (!r->part_of || r->part_of[i] == r->part_index)
            QC_TRY(add_file(need, r, s->name, plan->options->compress ? ".zst" : "",
                            qc_sat_add(s->header_bytes, s->data_bytes), err));
    }
    for (size_t i = 0; i < plan->model->side_count; i++)
        QC_TRY(add_file(need, r, plan->model->side[i].path, "", plan->model->side[i].bytes, err));
    return QC_OK;
}

/* ---- what a sample of the source compresses to ---------------------------------------------- */

typedef struct {
    const qc_plan *plan;
    qc_st_cursor *cursor;
    qc_frame_coder *coder;
    void *room, *packed;
    uint64_t bytes, packed_bytes;
} sampler;

static qc_status sample_tensor(sampler *s, const qc_checkpoint_tensor *t, qc_error *err)
{
    size_t n = t->bytes < SAMPLE_BYTES ? (size_t)t->bytes : SAMPLE_BYTES, packed = 0;
    if (n == 0)
        return QC_OK;
    uint64_t at = (t->bytes - n) / 2;
    QC_TRY(qc_checkpoint_read(s->plan->model, s->cursor, t, at - at % 8, s->room, n, err));
    QC_TRY(qc_frame_encode(s->coder, 1, s->room, n, s->packed, qc_frame_bound(SAMPLE_BYTES),
                           &packed, err));
    s->bytes += n;
    s->packed_bytes += packed < n ? packed : n;
    return QC_OK;
}

/* Compresses a sample of the source. *ratio is from 0 to 1, and 0 where there is nothing to
 * sample. */
static qc_status sample_ratio(double *ratio, const qc_plan *plan, qc_error *err)
{
    sampler s = {.plan = plan};
    *ratio = 0;
    qc_status st = qc_st_cursor_create(&s.cursor, err);
    if (st == QC_OK)
        st = qc_frame_coder_create(&s.coder, err);
    if (st == QC_OK)
        st = qc_malloc(&s.room, SAMPLE_BYTES, err);
    if (st == QC_OK)
        st = qc_malloc(&s.packed, qc_frame_bound(SAMPLE_BYTES), err);
    /* The samples are spread over the bytes of the model, so large weights are seen more often. */
    uint64_t seen = 0, step = plan->source_bytes / SAMPLE_COUNT + 1, next = step / 2;
    for (uint32_t i = 0; st == QC_OK && i < plan->job_count; i++) {
        const qc_checkpoint_tensor *t = &plan->model->tensors[plan->jobs[i].source];
        seen = qc_sat_add(seen, t->bytes);
        if (seen <= next)
            continue;
        next = seen + step;
        st = sample_tensor(&s, t, err);
    }
    if (s.bytes > 0)
        *ratio = (double)s.packed_bytes / (double)s.bytes;
    qc_free(s.room);
    qc_free(s.packed);
    qc_frame_coder_destroy(s.coder);
    qc_st_cursor_destroy(s.cursor);
    return st;
}

/* ---- what is free --------------------------------------------------------------------------- */

/* Finds how many bytes are free where the folder is, or the first folder above it that exists. */
static qc_status free_bytes(uint64_t *out, const char *folder, qc_error *err)
{
    qc_path_kind kind = QC_PATH_MISSING;
    char *path = NULL;
    QC_TRY(qc_strdup(&path, folder, err));
    qc_status st = qc_path_stat(path, &kind, NULL, err);
    while (st == QC_OK && kind == QC_PATH_MISSING && strcmp(path, ".") != 0) {
        size_t len = strlen(path);
        while (len > 1 && path[len - 1] == '/')
            len--;
        while (len > 0 && path[len - 1] != '/')
            len--;
        while (len > 1 && path[len - 1] == '/')
            len--;
        if (len == 0)
            path[len++] = '.'; /* a name of one byte at least was there */
        path[len] = '\0';
        st = qc_path_stat(path, &kind, NULL, err);
    }
    if (st == QC_OK)
        st = qc_dir_free_bytes(path, out, err);
    qc_free(path);
    return st;
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
static qc_status check_compressed(const qc_room *r, uint64_t plain, qc_error *err)
{
    const char *out = r->out;
    char needed[QC_SIZE_TEXT_BYTES], found[QC_SIZE_TEXT_BYTES];
    uint64_t room = 0;
    double ratio = 0;
    QC_TRY(free_bytes(&room, out, err));
    if (room >= plain)
        return QC_OK;
    QC_TRY(sample_ratio(&ratio, r->plan, err));
    uint64_t least = (uint64_t)((double)plain * ratio / 2);
    if (room < least)
        return refuse_room(out, "by a sample of the source, the compressed output needs at least",
                           least, room, err);
    qc_console_warn(
        r->plan->call,
        "%s: the output is %s before compression, and the disk has %s free; if compression is not "
        "enough, the conversion stops when the disk is full, and the same command continues it",
        out, qc_text_bytes(needed, plain), qc_text_bytes(found, room));
    return QC_OK;
}

qc_status qc_room_check(const qc_room *r, qc_error *err)
{
    const qc_plan_options *o = r->plan->options;
    uint64_t need = 0;
    QC_TRY(add_all(&need, r, err));
    if (o->compress && r->calibrated == 0)
        return check_compressed(r, need, err);
    if (o->compress) /* calibrated weights are never compressed */
        need = 0;
    need = qc_sat_add(need, r->calibrated);
    return qc_room_check_bytes(r->out,
                               r->calibrated == need ? "calibrated weights need"
                               : r->calibrated > 0   ? "the output and calibrated weights need"
                                                     : "the output needs",
                               need, err);
}

qc_status qc_output_preview_room(const qc_plan *plan, const qc_part_run *part, qc_error *err)
{
    const qc_convert_options *o = part->options;
    qc_path_kind kind = QC_PATH_MISSING;
    qc_file root = QC_FILE_CLOSED;
    QC_TRY(qc_path_stat(o->out, &kind, NULL, err));
    if (kind == QC_PATH_DIR)
        QC_TRY(qc_beneath_open(&root, o->out, err));
    qc_room room = {.plan = plan,
                    .out = o->out,
                    .part_of = part->part_of,
                    .part_index = part->rank.index,
                    .root = kind == QC_PATH_DIR ? &root : NULL};
    qc_status st = qc_room_check(&room, err);
    qc_file_discard(&root);
    return st;
}
