#include "convert/run/part_run.h"

#include "base/text.h"

#include "convert/run/consume.h"
#include "convert/run/finished.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define OPEN_TRIES 100
#define NAME_BYTES 64

static int is_shared(const qc_part_run *r)
{
    return r->rank.count > 1;
}

/* ---- Dealing out ---------------------------------------------------------------------------- */

static void tell_share(const qc_part_run *r, const qc_plan *plan, const uint64_t *load)
{
    char own[QC_SIZE_TEXT_BYTES], all[QC_SIZE_TEXT_BYTES];
    uint64_t sum = 0, most = 0;
    uint32_t shards = 0;
    for (unsigned i = 0; i < r->rank.count; i++) {
        sum += load[i];
        most = load[i] > most ? load[i] : most;
    }
    for (uint32_t i = 0; i < plan->layout.count; i++)
        shards += r->part_of[i] == r->rank.index;
    qc_console_detail(plan->call, 1,
                      "part %u of %u: %" PRIu32 " of %" PRIu32
                      " shard%s, %s of %s to read and write; the largest part has %.2f of the mean",
                      r->rank.index + 1, r->rank.count, shards, plan->layout.count,
                      qc_plural(plan->layout.count), qc_text_bytes(own, load[r->rank.index]),
                      qc_text_bytes(all, sum),
                      sum ? (double)most * r->rank.count / (double)sum : 1.0);
}

qc_status qc_part_begin(qc_part_run *r, qc_rank rank, const qc_plan *plan,
                        const qc_convert_options *options, qc_error *err)
{
    void *v = NULL;
    *r = QC_PART_RUN_NONE;
    r->rank = rank;
    r->call = plan->call;
    r->options = options;
    r->committer = rank.index;
    if (!is_shared(r))
        return QC_OK;
    QC_TRY(qc_arena_alloc(plan->arena, &v, plan->layout.count, sizeof *r->part_of, err));
    r->part_of = v;
    QC_TRY(qc_arena_alloc(plan->arena, &v, rank.count, sizeof *r->left, err));
    r->left = v;
    QC_TRY(qc_arena_alloc(plan->arena, &v, rank.count, sizeof(uint64_t), err));
    QC_TRY(qc_parts_of_plan(r->part_of, v, plan, rank.count, err));
    tell_share(r, plan, v);
    return QC_OK;
}

/* ---- Coming in ------------------------------------------------------------------------------ */

static qc_status journal_of(const qc_part_run *r, const qc_output_dir *d, unsigned part,
                            const char **path, qc_error *err)
{
    char name[NAME_BYTES];
    (void)snprintf(name, sizeof name, QC_JOURNAL_NAME, part + 1, r->rank.count);
    return qc_path_join(d->arena, path, d->staging, name, err);
}

static qc_status see_commit(void *ctx, const qc_journal_record *record, qc_error *err)
{
    qc_part_run *seen = ctx;
    (void)err;
    if (record->type == QC_RECORD_BEGIN || record->type == QC_RECORD_JOB ||
        record->type == QC_RECORD_UNIT)
        seen->committing = 0;
    if (record->type == QC_RECORD_COMMIT && record->bytes == sizeof seen->manifest) {
        seen->committing = 1;
        memcpy(&seen->manifest, record->payload, sizeof seen->manifest);
    }
    return QC_OK;
}

/* Does a journal record a commit? If its manifest waits in the staging folder, this sets
 * r->committing. If the manifest is in OUT, so that only the staging folder is left to be removed,
 * this sets *moved. The turn is held. */
static qc_status look_for_commit(qc_part_run *r, const qc_output_dir *d, int *moved, qc_error *err)
{
    qc_digest in_out;
    int there = 0;
    r->committing = *moved = 0;
    QC_TRY(qc_output_dir_manifest(d, &there, &in_out, err));
    if (!there && d->dead.shard_count == 0)
        return QC_OK;
    for (unsigned i = 0; i < r->rank.count && !r->committing && !*moved; i++) {
        const char *path = NULL;
        qc_path_kind kind = QC_PATH_MISSING;
        qc_part_run seen = QC_PART_RUN_NONE;
        QC_TRY(journal_of(r, d, i, &path, err));
        QC_TRY(qc_path_stat(path, &kind, NULL, err));
        if (kind != QC_PATH_MISSING)
            QC_TRY(qc_journal_read(path, see_commit, &seen, NULL, err));
        if (!seen.committing)
            continue;
        *moved = there && qc_digest_equal(&in_out, &seen.manifest);
        r->committing = d->dead.shard_count > 0 && qc_digest_equal(&d->dead_text, &seen.manifest);
        r->manifest = seen.manifest;
        r->committer = i;
    }
    return QC_OK;
}

/* What is known of the weights that OUT, which looks complete, was made of. */
typedef enum { WEIGHTS_UNKNOWN, WEIGHTS_SAME, WEIGHTS_OTHER } weights_of;

/* Looks at a finished output in OUT. *same says that it is what this conversion makes, as far as
 * weights are known. Another one is not replaced without --force. */
static qc_status check_finished(const qc_output_dir *d, const qc_plan *plan, const qc_fit *fit,
                                weights_of weights, int force, int *same, qc_error *err)
{
    qc_difference why = {"a finished output", "it was made of another model, of other weights"};
    qc_entry e;
    *same = 0;
    QC_TRY(qc_beneath_look(&d->root, QC_MANIFEST_NAME, &e, err));
    if (e.kind != QC_ENTRY_FILE)
        return QC_OK;
    if (weights != WEIGHTS_OTHER)
        QC_TRY(qc_output_is_of_plan(same, &why, d->path, plan, fit, err));
    return *same || force ? QC_OK : qc_output_refuse(&why, d->path, err);
}

/* The turn is held. *complete says that OUT looks complete. With --restart it says so only where
 * its weights are not yet known to be those of this conversion, so that they are looked at
 * first. */
static qc_status check_staging(qc_part_run *r, qc_output_dir *d, const qc_plan *plan,
                               const qc_fit *fit, weights_of weights, int *complete, qc_error *err)
{
    int any = 0, moved = 0, same = 0, restart = r->options->restart;
    qc_strbuf identity;
    qc_strbuf_init(&identity, SIZE_MAX / 2);
    if (restart && !r->options->force) {
        QC_TRY(check_finished(d, plan, fit, weights, r->options->force, &same, err));
        *complete = same && weights == WEIGHTS_UNKNOWN;
        if (*complete)
            return QC_OK;
    }
    qc_status st = QC_OK;
    if (restart)
        st = qc_consume_check_restart(plan->arena, d->path, err);
    if (st == QC_OK)
        st = qc_identity_make(&identity, plan, r->rank.count, err);
    if (st == QC_OK)
        st = qc_parts_check_others(d, r->rank, restart, identity.data, identity.len, err);
    qc_strbuf_deinit(&identity);
    QC_TRY(st);
    if (restart && d->dead.shard_count > 0) {
        /* A process died while it moved files, so half of what the others did is in OUT. */
        QC_TRY(qc_parts_remove_journals(d, r->rank, err));
        QC_TRY(qc_output_dir_forget_dead(d, err));
    }
    if (restart)
        return QC_OK;
    QC_TRY(qc_parts_have_journal(&any, d, err));
    QC_TRY(look_for_commit(r, d, &moved, err));
    /* Other parts may be at work to replace what is there. */
    QC_TRY(check_finished(d, plan, fit, weights, r->options->force, &same, err));
    *complete = same && (!any || moved);
    return QC_OK;
}

/* This takes as long as reading the weights. The turn is given back meanwhile, so the caller looks
 * at everything again. manifest is the one of OUT for which the answer holds. */
static qc_status check_weights(qc_part_run *r, const qc_output_dir *d, const qc_plan *plan,
                               weights_of *weights, qc_digest *manifest, qc_error *err)
{
    int there = 0, same = 0;
    QC_TRY(qc_output_dir_manifest(d, &there, manifest, err));
    qc_part_turn_give(&r->turn);
    QC_TRY(qc_output_is_of_weights(&same, d->path, plan, r->part_of, r->rank.index, err));
    *weights = there && same ? WEIGHTS_SAME : WEIGHTS_OTHER;
    return QC_OK;
}

/* Forgets an answer about the weights of another manifest than the one that OUT has now. */
static qc_status forget_other(const qc_output_dir *d, weights_of *weights, const qc_digest *of,
                              qc_error *err)
{
    qc_digest now;
    int there = 0;
    if (*weights == WEIGHTS_UNKNOWN)
        return QC_OK;
    QC_TRY(qc_output_dir_manifest(d, &there, &now, err));
    if (!there || !qc_digest_equal(&now, of))
        *weights = WEIGHTS_UNKNOWN;
    return QC_OK;
}

/* Opens OUT for one process alone. *complete says that OUT is what it would make, and that there is
 * nothing to go on with. */
static qc_status check_alone(const qc_part_run *r, qc_output_dir *d, const qc_plan *plan,
                             const qc_fit *fit, int *complete, qc_error *err)
{
    const qc_convert_options *o = r->options;
    qc_part_run seen = *r;
    qc_difference why = {"", ""};
    qc_entry e;
    int moved = 0, same = 0;
    QC_TRY(qc_beneath_look(&d->root, QC_MANIFEST_NAME, &e, err));
    if (e.kind != QC_ENTRY_FILE)
        return QC_OK;
    QC_TRY(look_for_commit(&seen, d, &moved, err));
    if (moved && !o->restart) /* a run of this command moved it and did not come to clean up */
        return QC_OK;
    if (o->force)
        return QC_OK;
    QC_TRY(qc_output_is_finished(&same, &why, &d->root, plan, fit, 1, err));
    *complete = same && !o->restart && !d->had_journal;
    return same ? QC_OK : qc_output_refuse(&why, d->path, err);
}

static qc_status open_alone(const qc_part_run *r, qc_output_dir *d, const qc_plan *plan,
                            const qc_fit *fit, int *complete, qc_error *err)
{
    const qc_convert_options *o = r->options;
    QC_TRY(qc_output_dir_open(d, plan->call->arena, plan->call->out, plan->call->model, o->force, 0,
                              1, err));
    qc_status st = check_alone(r, d, plan, fit, complete, err);
    if (st == QC_OK && o->restart)
        st = qc_consume_check_restart(plan->call->arena, plan->call->out, err);
    if (st == QC_OK)
        st = qc_parts_check_others(d, r->rank, o->restart, "", 0, err);
    if (st == QC_OK && *complete)
        qc_output_dir_abort(d);
    else if (st != QC_OK && !d->had_journal)
        qc_output_dir_abort(d);
    else if (st != QC_OK)
        qc_output_dir_leave(d);
    else if (o->restart)
        qc_output_dir_clear(d);
    return st;
}

qc_status qc_part_open(qc_part_run *r, qc_output_dir *d, const qc_plan *plan, const qc_fit *fit,
                       int *complete, qc_error *err)
{
    const qc_convert_options *o = r->options;
    *complete = 0;
    if (!is_shared(r))
        return open_alone(r, d, plan, fit, complete, err);
    weights_of weights = WEIGHTS_UNKNOWN;
    qc_digest manifest = {{0}};
    for (int i = 0; i < OPEN_TRIES; i++) {
        int gone = 0, looks_complete = 0;
        QC_TRY(qc_output_dir_open(d, plan->call->arena, plan->call->out, plan->call->model,
                                  o->force, r->rank.index, r->rank.count, err));
        qc_status st = qc_part_turn_take(&r->turn, d, NULL, plan->call, &gone, err);
        if (st == QC_OK && !gone) /* what was read at opening may be older than the turn */
            st = qc_output_dir_look_again(d, err);
        if (st == QC_OK && !gone)
            st = forget_other(d, &weights, &manifest, err);
        if (st == QC_OK && !gone)
            st = check_staging(r, d, plan, fit, weights, &looks_complete, err);
        *complete = looks_complete && weights == WEIGHTS_SAME && !o->restart;
        if (st == QC_OK && looks_complete && !*complete)
            st = check_weights(r, d, plan, &weights, &manifest, err);
        int any = 1; /* a part that is refused leaves nothing where there was nothing */
        if (st != QC_OK && !gone && r->turn.fd >= 0 &&
            (qc_parts_have_journal(&any, d, NULL) != QC_OK || d->dead.shard_count > 0))
            any = 1;
        if (st == QC_OK && *complete) {
            qc_part_close(r, d);
        } else if (!any) {
            qc_output_dir_abort(d);
            qc_part_turn_give(&r->turn);
        } else if (st != QC_OK || gone || looks_complete) {
            qc_part_turn_give(&r->turn);
            qc_output_dir_leave(d);
        }
        if (st != QC_OK || *complete || (!gone && !looks_complete))
            return st;
    }
    QC_FAIL(err, QC_ERR_IO, "%s: other parts of a conversion come and go too fast",
            plan->call->out);
}

void qc_part_opened(qc_part_run *r, qc_pipeline *p, const qc_resume *resume)
{
    for (uint32_t i = 0; is_shared(r) && i < p->plan->layout.count; i++)
        p->shards[i].foreign = r->part_of[i] != r->rank.index;
    r->committing = r->committing && qc_resume_found_of(resume)->done;
    if (!r->committing)
        qc_part_turn_give(&r->turn);
}

/* ---- Going out ------------------------------------------------------------------------------ */

/* Are all shards of a part in the staging folder, with the sizes that its journal says? */
static int are_shards_there(const qc_part_run *r, const qc_pipeline *p, unsigned part)
{
    for (uint32_t i = 0; i < p->plan->layout.count; i++) {
        const qc_shard_state *s = &p->shards[i];
        qc_path_kind kind = QC_PATH_MISSING;
        uint64_t bytes = 0;
        if (r->part_of[i] != part)
            continue;
        if (!s->kept && part != r->rank.index)
            return 0;
        if (qc_path_stat(s->path, &kind, &bytes, NULL) != QC_OK || kind != QC_PATH_FILE ||
            bytes != s->file_bytes)
            return 0;
    }
    return 1;
}

int qc_part_is_done(const qc_part_run *r, const qc_pipeline *p, const qc_resume *resume)
{
    return is_shared(r) &&
           (r->committing || (qc_resume_is_done(resume) && are_shards_there(r, p, r->rank.index)));
}

static qc_status take_others(qc_part_run *r, qc_pipeline *p, qc_resume *resume, qc_error *err)
{
    r->left_count = 0;
    for (unsigned i = 0; i < r->rank.count; i++) {
        qc_resume_found found;
        if (i == r->rank.index)
            continue;
        QC_TRY(qc_resume_take_part(resume, i, r->rank.count, !r->committing, &found, err));
        if (!found.done)
            r->left[r->left_count++] = i;
    }
    /* Where shards are missing, a crash lost more than a journal can know, so somebody has to
     * look. */
    for (unsigned i = 0; !r->committing && r->left_count == 0 && i < r->rank.count; i++) {
        if (!are_shards_there(r, p, i))
            QC_FAIL(err, QC_ERR_IO,
                    "%s: shards of part %u are not there, although its journal says so; start that "
                    "part with --restart",
                    p->out->staging, i + 1);
    }
    return QC_OK;
}

qc_status qc_part_look_around(qc_part_run *r, qc_output_dir *d, qc_pipeline *p, qc_resume *resume,
                              const qc_fit *fit, int *complete, qc_error *err)
{
    char name[NAME_BYTES];
    int gone = 0, moved = 0;
    *complete = 0;
    if (!is_shared(r))
        return QC_OK;
    if (r->committing) /* the turn is held since qc_part_opened */
        return take_others(r, p, resume, err);
    (void)snprintf(name, sizeof name, QC_JOURNAL_NAME, r->rank.index + 1, r->rank.count);
    QC_TRY(qc_part_turn_take(&r->turn, d, name, r->call, &gone, err));
    if (!gone) { /* the process that had the turn may have died while it completed OUT */
        QC_TRY(qc_output_dir_look_again(d, err));
        QC_TRY(look_for_commit(r, d, &moved, err));
    }
    if (gone || moved) {
        QC_TRY(qc_output_is_of_plan(complete, NULL, d->path, p->plan, fit, err));
        if (*complete)
            return QC_OK;
        QC_FAIL(err, QC_ERR_IO,
                "%s: what this part did was removed meanwhile; start the same command again",
                d->path);
    }
    return take_others(r, p, resume, err);
}

/* Lets go of the folder first, because whoever has the turn next and completes OUT has to be
 * alone. */
void qc_part_leave(qc_part_run *r, qc_output_dir *d)
{
    qc_output_dir_leave(d);
    qc_part_turn_give(&r->turn);
}

/* Removes all journals except the one that records the commit, which goes last. Should this process
 * die here, that journal tells the next one that everything is in place. */
static void remove_other_journals(const qc_part_run *r, const qc_output_dir *d)
{
    const char *path = NULL;
    for (unsigned i = 0; i < r->rank.count; i++) {
        if (i != r->committer && journal_of(r, d, i, &path, NULL) == QC_OK)
            (void)unlink(path);
    }
}

/* Holds the turn until all is done, because whoever waits for it keeps d's lock from being held
 * alone. */
void qc_part_close(qc_part_run *r, qc_output_dir *d)
{
    int gone = 0, others = 0;
    if (is_shared(r) && r->turn.fd >= 0) {
        remove_other_journals(r, d);
        qc_output_dir_clear(d);
    } else if (is_shared(r) &&
               (qc_part_turn_take(&r->turn, d, NULL, r->call, &gone, NULL) != QC_OK || gone ||
                qc_parts_have_journal(&others, d, NULL) != QC_OK))
        others = 1;
    if (others)
        qc_output_dir_leave(d); /* the folder is no longer that of this conversion */
    else
        qc_output_dir_abort(d);
    qc_part_turn_give(&r->turn);
}

void qc_part_abort(qc_part_run *r, qc_output_dir *d, const qc_pipeline *p)
{
    int gone = 0, others = 1;
    const char *journal = NULL;
    if (!is_shared(r) || !d->staging) {
        qc_output_dir_abort(d);
        return;
    }
    if (r->turn.fd < 0 &&
        (qc_part_turn_take(&r->turn, d, NULL, r->call, &gone, NULL) != QC_OK || gone)) {
        qc_output_dir_leave(d);
        return;
    }
    for (uint32_t i = 0; p->shards && i < p->plan->layout.count; i++) {
        if (r->part_of[i] == r->rank.index && p->shards[i].path)
            (void)unlink(p->shards[i].path);
    }
    if (journal_of(r, d, r->rank.index, &journal, NULL) == QC_OK)
        (void)unlink(journal);
    if (qc_parts_have_journal(&others, d, NULL) != QC_OK)
        others = 1;
    if (others)
        qc_output_dir_leave(d);
    else
        qc_output_dir_abort(d);
    qc_part_turn_give(&r->turn);
}

void qc_part_fill_report(const qc_part_run *r, const qc_pipeline *p, qc_convert_report *report)
{
    const qc_plan *plan = p->plan;
    for (uint32_t i = 0; i < plan->layout.count; i++)
        if (r->part_of[i] == r->rank.index)
            report->bytes_out_stored += p->shards[i].file_bytes;
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_job *j = &plan->jobs[i];
        const qc_tensor_error *e = &p->jobs[i].error;
        if (r->part_of[qc_plan_tensor(plan, j->outputs[QC_PART_MAIN]).shard] != r->rank.index ||
            (j->scheme != QC_SCHEME_NF4 && j->scheme != QC_SCHEME_INT8_ROWS &&
             j->scheme != QC_SCHEME_INT8_BLOCKS))
            continue;
        if (!report->worst_name || e->rel_mse > report->worst_rel_mse) {
            report->worst_name = j->name;
            report->worst_rel_mse = e->rel_mse;
            report->worst_max_err = e->max_err;
        }
    }
}
