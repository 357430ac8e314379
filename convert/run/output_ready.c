#include "convert/run/output_ready.h"

#include "convert/run/finished.h"
#include "convert/run/room.h"
#include "convert/run/side_files.h"
#include "convert/term/console.h"

#include <string.h>

static qc_status names_of_plan(const char ***names, size_t *count, const qc_plan *plan,
                               const qc_fit *fit, qc_error *err)
{
    const char **side = NULL;
    size_t side_count = 0;
    void *v = NULL;
    QC_TRY(qc_side_file_names(&side, &side_count, plan->arena, plan, fit, err));
    *count = side_count + plan->layout.count;
    QC_TRY(qc_arena_alloc(plan->arena, &v, *count, sizeof **names, err));
    *names = v;
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
    if (plan.replaced_count > 0)
        qc_console_warn(call, "%s: --force %s files that qconv did not write there: %s", root->path,
                        dry_run ? "would replace" : "replaces",
                        qc_output_names_text(text, plan.replaced, plan.replaced_count));
    if (plan.deleted_count > 0)
        qc_console_detail(call, dry_run ? 0 : 1, "%s: of the old output %s deleted: %s", root->path,
                          dry_run ? "would be" : "will be",
                          qc_output_names_text(text, plan.deleted, plan.deleted_count));
    return QC_OK;
}

qc_status qc_output_ready_for(const qc_output_dir *d, const qc_plan *plan, const qc_fit *fit,
                              int force, qc_error *err)
{
    const char **names = NULL;
    size_t count = 0;
    QC_TRY(names_of_plan(&names, &count, plan, fit, err));
    return qc_output_ready(plan->call, force, &d->root, &d->owned, names, count, 0, err);
}

/* Looks at an output that is there. *same says whether it is the same; if not, why says what
 * differs. Weights are not compared, because that takes as long as reading them. */
static qc_status preview_finished(int *same, qc_difference *why, const qc_file *root,
                                  const qc_plan *plan, const qc_fit *fit, int force, qc_error *err)
{
    qc_entry e;
    QC_TRY(qc_beneath_look(root, QC_MANIFEST_NAME, &e, err));
    if (e.kind != QC_ENTRY_FILE)
        return QC_OK;
    QC_TRY(qc_output_is_finished(same, why, root, plan, fit, 0, err));
    return *same || force ? QC_OK : qc_output_refuse(why, root->path, err);
}

static void tell_finished(int same, const qc_difference *why, const qc_call *call,
                          const qc_convert_options *o)
{
    if (*why->there && !same)
        qc_console_warn(call, "%s: --force would replace %s, which differs from this one: %s",
                        call->out, why->there, why->text);
    else if (*why->there && !o->restart && !o->force)
        qc_console_warn(call,
                        "%s: holds %s of these files and options already; if the weights are the "
                        "same, too, there is nothing to do",
                        call->out, why->there);
}

qc_status qc_output_preview(const qc_plan *plan, const qc_fit *fit, const qc_part_run *part,
                            qc_error *err)
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
    QC_TRY(qc_path_stat(call->out, &kind, NULL, err));
    if (kind != QC_PATH_DIR)
        return QC_OK;
    QC_TRY(names_of_plan(&names, &count, plan, fit, err));
    QC_TRY(qc_beneath_open(&root, call->out, err));
    qc_status st = preview_finished(&same, &why, &root, plan, fit, o->force, err);
    if (st == QC_OK)
        st = qc_output_owned(&owned, call->arena, &root, err);
    if (st == QC_OK)
        st = qc_output_ready(call, o->force, &root, &owned, names, count, 1, err);
    if (st == QC_OK)
        tell_finished(same, &why, call, o);
    qc_file_discard(&root);
    return st;
}

qc_status qc_output_preview_room(const qc_plan *plan, const qc_part_run *part, qc_error *err)
{
    const qc_call *call = plan->call;
    qc_path_kind kind = QC_PATH_MISSING;
    qc_file root = QC_FILE_CLOSED;
    if (part->options->consume_source) /* source files are deleted as it comes to them */
        return QC_OK;
    QC_TRY(qc_path_stat(call->out, &kind, NULL, err));
    if (kind == QC_PATH_DIR)
        QC_TRY(qc_beneath_open(&root, call->out, err));
    qc_room room = {.plan = plan,
                    .part_of = part->part_of,
                    .part_index = part->rank.index,
                    .root = kind == QC_PATH_DIR ? &root : NULL};
    qc_status st = qc_room_check(&room, err);
    qc_file_discard(&root);
    return st;
}
