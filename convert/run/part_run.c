#include "convert/run/part_run.h"

#include "base/clock.h"
#include "base/text.h"
#include "base/workers.h"
#include "convert/output/dir_lock.h"
#include "convert/run/finished.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TURN_NAME   "lock-turn"
#define LOCK_FORMAT "lock-%05u-of-%05u"
#define NAME_BYTES  64
#define PATIENCE_NS 5000000000u
#define OPEN_TRIES  100

/* ---- Turns ---------------------------------------------------------------------------------- */

qc_status qc_part_turn_take(qc_file *turn, const qc_output_dir *d, const char *must_be,
                            const qc_call *call, int *gone, qc_error *err)
{
    uint64_t begin_ns = qc_clock_ns();
    int is_told = 0, busy = 1;
    const char *path = NULL, *needed = NULL;
    *turn = QC_FILE_CLOSED;
    QC_TRY(qc_path_join(d->arena, &path, d->staging, TURN_NAME, err));
    if (must_be)
        QC_TRY(qc_path_join(d->arena, &needed, d->staging, must_be, err));
    qc_status st = qc_file_open_update(turn, path, err);
    while (st == QC_OK && busy) {
        st = qc_check_interrupted(err);
        if (st == QC_OK)
            st = qc_dir_lock_try(turn, 0, &busy, err);
        if (st == QC_OK && busy && !is_told && qc_clock_ns() - begin_ns >= PATIENCE_NS) {
            /* That process may be stopped, and then somebody has to do something about it. */
            long pid = qc_dir_lock_holder(turn);
            is_told = 1;
            if (pid > 0)
                qc_console_warn(call, "waiting for process %ld, which holds the lock of %s", pid,
                                turn->path);
            else
                qc_console_warn(call,
                                "waiting for another process, perhaps of another machine, which "
                                "holds the lock of %s",
                                turn->path);
        }
        if (st == QC_OK && busy)
            qc_dir_lock_pause();
    }
    qc_path_kind kind = QC_PATH_FILE;
    if (st == QC_OK && needed)
        st = qc_path_stat(needed, &kind, NULL, err);
    *gone = !qc_dir_lock_has_its_name(&d->lock) ||
            (st == QC_OK && (!qc_dir_lock_has_its_name(turn) || kind != QC_PATH_FILE));
    if (*gone && st != QC_ERR_INTERRUPTED)
        st = QC_OK;
    if (st != QC_OK || *gone)
        qc_file_discard(turn);
    return st;
}

/* ---- What others left ----------------------------------------------------------------------- */

static qc_status open_staging(DIR **dir, const qc_output_dir *d, qc_error *err)
{
    *dir = opendir(d->staging);
    if (!*dir)
        QC_FAIL(err, QC_ERR_IO, "%s cannot be listed: %s", d->staging, strerror(errno));
    return QC_OK;
}

/* Finds the next name like "journal-00002-of-00004" and its rank; 0 if there is none. */
static int next_journal(DIR *dir, qc_rank *rank)
{
    char again[NAME_BYTES];
    const struct dirent *e;
    while ((e = readdir(dir))) {
        if (strlen(e->d_name) != sizeof "journal-00001-of-00001" - 1)
            continue;
        unsigned long at = strtoul(e->d_name + sizeof "journal-" - 1, NULL, 10);
        unsigned long of = strtoul(e->d_name + sizeof "journal-00001-of-" - 1, NULL, 10);
        (void)snprintf(again, sizeof again, QC_JOURNAL_NAME, (unsigned)at, (unsigned)of);
        if (strcmp(again, e->d_name) != 0 || at == 0 || at > of)
            continue;
        *rank = (qc_rank){(unsigned)at - 1, (unsigned)of};
        return 1;
    }
    return 0;
}

static qc_status remove_journal(const qc_output_dir *d, qc_rank of, qc_error *err)
{
    const char *path = NULL;
    QC_TRY(qc_resume_path(d->arena, &path, d->staging, of.index, of.count, err));
    return qc_path_remove(path, err);
}

/* Removes the journal of another conversion, because --restart asked for it; unless a process works
 * on that conversion now. */
static qc_status clear_away(const qc_output_dir *d, qc_rank other, qc_error *err)
{
    const char *path = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    qc_file f = QC_FILE_CLOSED;
    int busy = 0;
    QC_TRY(qc_arena_printf(d->arena, &path, err, "%s/" LOCK_FORMAT, d->staging, other.index + 1,
                           other.count));
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if (kind != QC_PATH_MISSING) {
        QC_TRY(qc_file_open_update(&f, path, err));
        qc_status st = qc_dir_lock_try(&f, 0, &busy, err);
        qc_file_discard(&f);
        QC_TRY(st);
    }
    if (busy)
        QC_FAIL(err, QC_ERR_USAGE,
                "part %u of %u of another conversion is running in %s now; stop it or choose "
                "another OUT",
                other.index + 1, other.count, d->path);
    return remove_journal(d, other, err);
}

static qc_status refuse_count(const char *out, qc_rank rank, qc_rank other, qc_error *err)
{
    if (rank.count == 1)
        QC_FAIL(
            err, QC_ERR_USAGE,
            "%s holds part %u of %u of an interrupted conversion; continue it with --part %u/%u "
            "and so on" QC_RESTART_ADVICE,
            out, other.index + 1, other.count, other.index + 1, other.count);
    if (other.count == 1)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s holds an interrupted conversion by one process, and this is part %u of %u; "
                "continue it with --part 1/1" QC_RESTART_ADVICE,
                out, rank.index + 1, rank.count);
    QC_FAIL(err, QC_ERR_USAGE,
            "%s holds part %u of %u of an interrupted conversion, and this is part %u of %u; "
            "continue with as many parts as before" QC_RESTART_ADVICE,
            out, other.index + 1, other.count, rank.index + 1, rank.count);
}

typedef struct {
    const char *out, *identity;
    size_t identity_bytes;
    int seen; /* the other's identity was there, and was compared */
} check;

static qc_status check_record(void *ctx, const qc_journal_record *r, qc_error *err)
{
    check *c = ctx;
    if (c->seen || r->type != QC_RECORD_IDENTITY)
        return QC_OK;
    c->seen = 1;
    return qc_identity_compare((const char *)r->payload, r->payload_bytes, c->identity,
                               c->identity_bytes, c->out, err);
}

static qc_status check_other(const qc_output_dir *d, qc_rank other, int restart, check c,
                             qc_error *err)
{
    const char *path = NULL;
    QC_TRY(qc_resume_path(d->arena, &path, d->staging, other.index, other.count, err));
    qc_status st = qc_journal_read(path, check_record, &c, NULL, err);
    if (st != QC_ERR_USAGE && st != QC_ERR_INPUT && st != QC_ERR_UNSUPPORTED)
        return st;
    if (restart)
        return clear_away(d, other, err);
    qc_error_prefix(err, "part %u of %u", other.index + 1, other.count);
    return st;
}

qc_status qc_parts_check_others(const qc_output_dir *d, qc_rank rank, int restart,
                                const char *identity, size_t identity_bytes, qc_error *err)
{
    const check c = {d->path, identity, identity_bytes, 0};
    DIR *dir = NULL;
    qc_rank other;
    QC_TRY(open_staging(&dir, d, err));
    qc_status st = QC_OK;
    while (st == QC_OK && next_journal(dir, &other)) {
        if (rank.count == 1 && other.count == 1)
            continue; /* this is the caller's own, which it looks at when it opens it */
        if (other.count != rank.count)
            st = restart ? clear_away(d, other, err) : refuse_count(d->path, rank, other, err);
        else if (other.index != rank.index)
            st = check_other(d, other, restart, c, err);
        else if (restart)
            st = remove_journal(d, other, err);
    }
    closedir(dir);
    return st;
}

static qc_status clear_others(const qc_output_dir *d, qc_rank rank, qc_error *err)
{
    DIR *dir = NULL;
    qc_rank other;
    QC_TRY(open_staging(&dir, d, err));
    qc_status st = QC_OK;
    while (st == QC_OK && next_journal(dir, &other)) {
        if (other.count != rank.count || other.index != rank.index)
            st = clear_away(d, other, err);
    }
    closedir(dir);
    return st;
}

qc_status qc_parts_have_journal(int *yes, const qc_output_dir *d, qc_error *err)
{
    DIR *dir = NULL;
    qc_rank other;
    QC_TRY(open_staging(&dir, d, err));
    *yes = next_journal(dir, &other);
    closedir(dir);
    return QC_OK;
}

/* ---- Dealing out ---------------------------------------------------------------------------- */

static int is_shared(const qc_part_run *r)
{
    return r->rank.count > 1;
}

static qc_status journal_of(const qc_part_run *r, unsigned part, const char **path, qc_error *err)
{
    return qc_resume_path(r->d->arena, path, r->d->staging, part, r->rank.count, err);
}

qc_status qc_part_begin(qc_part_run *r, qc_rank rank, const qc_plan *plan,
                        const qc_convert_options *options, qc_error *err)
{
    char own[QC_SIZE_TEXT_BYTES], all[QC_SIZE_TEXT_BYTES];
    const uint32_t count = plan->layout.count;
    uint32_t *part_of = NULL, shards = 0;
    uint64_t *load = NULL, sum = 0, most = 0;
    *r = QC_PART_RUN_NONE;
    r->rank = rank;
    r->plan = plan;
    r->options = options;
    r->committer = r->share.index = rank.index;
    if (!is_shared(r))
        return QC_OK;
    QC_TRY(qc_arena_alloc(plan->arena, &part_of, count, sizeof *part_of, err));
    QC_TRY(qc_arena_alloc(plan->arena, &r->left, rank.count, sizeof *r->left, err));
    QC_TRY(qc_arena_alloc(plan->arena, &load, rank.count, sizeof *load, err));
    QC_TRY(qc_parts_of_plan(part_of, load, plan, rank.count, err));
    r->share.part_of = part_of;
    for (unsigned i = 0; i < rank.count; i++) {
        sum += load[i];
        most = load[i] > most ? load[i] : most;
    }
    for (uint32_t i = 0; i < count; i++)
        shards += qc_share_has(r->share, i) ? 1 : 0;
    qc_console_detail(plan->call, 1,
                      "part %u of %u: %" PRIu32 " of %" PRIu32
                      " shard%s, %s of %s to read and write; the largest part has %.2f of the mean",
                      rank.index + 1, rank.count, shards, count, qc_plural(count),
                      qc_text_bytes(own, load[rank.index]), qc_text_bytes(all, sum),
                      sum ? (double)most * rank.count / (double)sum : 1.0);
    return QC_OK;
}

/* ---- Coming in ------------------------------------------------------------------------------ */

/* Does a journal record a commit? If its manifest waits in the staging folder, this sets
 * r->committing. If the manifest is in OUT, so that only the staging folder is left to be removed,
 * this sets *moved. The turn is held. */
static qc_status look_for_commit(qc_part_run *r, int *moved, qc_error *err)
{
    const qc_output_dir *d = r->d;
    qc_digest in_out;
    int there = 0;
    r->committing = *moved = 0;
    QC_TRY(qc_output_dir_manifest(d, &there, &in_out, err));
    if (!there && d->dead.shard_count == 0)
        return QC_OK;
    for (unsigned i = 0; i < r->rank.count && !r->committing && !*moved; i++) {
        const char *path = NULL;
        qc_resume_found found;
        QC_TRY(journal_of(r, i, &path, err));
        QC_TRY(qc_resume_read_commit(&found, path, err));
        if (!found.committing)
            continue;
        *moved = there && qc_digest_equal(&in_out, &found.manifest);
        r->committing =
            d->dead.shard_count > 0 && qc_digest_equal(&d->dead_digest, &found.manifest);
        r->manifest = found.manifest;
        r->committer = i;
    }
    return QC_OK;
}

/* Looks at a finished output in OUT. *same says that it is what this conversion makes, as far as
 * `look` and what is known of weights say. Another one is not replaced without --force. */
static qc_status check_finished(const qc_part_run *r, qc_look look, int *same, qc_error *err)
{
    qc_difference why = {"a finished output", "it was made of another model, of other weights"};
    qc_entry e;
    *same = 0;
    QC_TRY(qc_beneath_look(&r->d->root, QC_MANIFEST_NAME, &e, err));
    if (e.kind != QC_ENTRY_FILE)
        return QC_OK;
    if (r->weights != QC_WEIGHTS_OTHER)
        QC_TRY(qc_output_is_finished(same, &why, &r->d->root, r->plan, look, err));
    return *same || r->options->force ? QC_OK : qc_output_refuse(&why, r->d->path, err);
}

/* The turn is held. *complete says that OUT looks complete. With --restart it says so only where
 * its weights are not yet known to be those of this conversion, so that they are looked at
 * first. */
static qc_status check_staging(qc_part_run *r, int *complete, qc_error *err)
{
    qc_output_dir *d = r->d;
    int any = 0, moved = 0, same = 0, restart = r->options->restart;
    qc_strbuf identity;
    qc_strbuf_init(&identity, SIZE_MAX / 2);
    if (restart && !r->options->force) {
        QC_TRY(check_finished(r, QC_LOOK_PLAN, &same, err));
        *complete = same && r->weights == QC_WEIGHTS_UNKNOWN;
        if (*complete)
            return QC_OK;
    }
    qc_status st = qc_identity_make(&identity, r->plan, r->rank.count, err);
    if (st == QC_OK)
        st = qc_parts_check_others(d, r->rank, restart, identity.data, identity.len, err);
    qc_strbuf_deinit(&identity);
    QC_TRY(st);
    if (restart && d->dead.shard_count > 0) {
        /* A process died while it moved files, so half of what the others did is in OUT. */
        QC_TRY(clear_others(d, r->rank, err));
        QC_TRY(qc_output_dir_forget_dead(d, err));
    }
    if (restart)
        return QC_OK;
    QC_TRY(qc_parts_have_journal(&any, d, err));
    QC_TRY(look_for_commit(r, &moved, err));
    /* Other parts may be at work to replace what is there. */
    QC_TRY(check_finished(r, QC_LOOK_PLAN, &same, err));
    *complete = same && (!any || moved);
    return QC_OK;
}

static qc_status open_dir(qc_part_run *r, qc_error *err)
{
    const qc_call *call = r->plan->call;
    return qc_output_dir_open(r->d, call->arena, r->options->out, r->options->model,
                              r->options->force, r->rank.index, r->rank.count, err);
}

static qc_status open_alone(qc_part_run *r, int *complete, qc_error *err)
{
    qc_output_dir *d = r->d;
    const int restart = r->options->restart;
    int moved = 0, same = 0;
    qc_entry e = {.kind = QC_ENTRY_MISSING};
    QC_TRY(open_dir(r, err));
    qc_status st = qc_beneath_look(&d->root, QC_MANIFEST_NAME, &e, err);
    if (st == QC_OK && e.kind == QC_ENTRY_FILE)
        st = look_for_commit(r, &moved, err);
    r->committing = 0; /* its own journal says so when it is opened */
    /* Where it has moved, a run of this command did that and did not come to clean up. */
    if (st == QC_OK && !r->options->force && (!moved || restart))
        st = check_finished(r, QC_LOOK_WEIGHTS, &same, err);
    *complete = same && !restart && !d->had_journal;
    if (st == QC_OK)
        st = qc_parts_check_others(d, r->rank, restart, "", 0, err);
    if ((st == QC_OK && *complete) || (st != QC_OK && !d->had_journal))
        qc_output_dir_abort(d);
    else if (st != QC_OK)
        qc_output_dir_leave(d);
    else if (restart)
        qc_output_dir_clear(d);
    return st;
}

/* Tries once to enter. *again says that things changed meanwhile, so that it has to be tried
 * again. */
static qc_status try_to_open(qc_part_run *r, int *complete, int *again, qc_error *err)
{
    qc_output_dir *d = r->d;
    int gone = 0, looks_complete = 0, any = 1, there = 0, same = 0;
    qc_digest now;
    QC_TRY(open_dir(r, err));
    qc_status st = qc_part_turn_take(&r->turn, d, NULL, r->plan->call, &gone, err);
    if (st == QC_OK && !gone) /* what was read at opening may be older than the turn */
        st = qc_output_dir_look_again(d, err);
    if (st == QC_OK && !gone && r->weights != QC_WEIGHTS_UNKNOWN) {
        st = qc_output_dir_manifest(d, &there, &now, err);
        if (st == QC_OK && (!there || !qc_digest_equal(&now, &r->weights_of)))
            r->weights = QC_WEIGHTS_UNKNOWN;
    }
    if (st == QC_OK && !gone)
        st = check_staging(r, &looks_complete, err);
    *complete = looks_complete && r->weights == QC_WEIGHTS_SAME && !r->options->restart;
    *again = gone || (looks_complete && !*complete);
    if (st == QC_OK && looks_complete && !*complete) {
        /* To compare weights takes as long as reading them. The turn is given back meanwhile, so
         * everything is looked at again. */
        st = qc_output_dir_manifest(d, &there, &r->weights_of, err);
        if (st == QC_OK)
            qc_file_discard(&r->turn);
        if (st == QC_OK)
            st = qc_output_is_of_weights(&same, d->path, r->plan, r->share, err);
        r->weights = there && same ? QC_WEIGHTS_SAME : QC_WEIGHTS_OTHER;
    }
    /* A part that is refused leaves nothing where there was nothing. */
    if (st != QC_OK && !gone && r->turn.fd >= 0 &&
        (qc_parts_have_journal(&any, d, NULL) != QC_OK || d->dead.shard_count > 0))
        any = 1;
    if (st == QC_OK && *complete) {
        qc_part_close(r);
    } else if (!any) {
        qc_output_dir_abort(d);
        qc_file_discard(&r->turn);
    } else if (st != QC_OK || *again) {
        qc_file_discard(&r->turn);
        qc_output_dir_leave(d);
    }
    return st;
}

qc_status qc_part_open(qc_part_run *r, qc_output_dir *d, int *complete, qc_error *err)
{
    int again = 1;
    *complete = 0;
    r->d = d;
    if (!is_shared(r))
        return open_alone(r, complete, err);
    for (int i = 0; i < OPEN_TRIES && again; i++)
        QC_TRY(try_to_open(r, complete, &again, err));
    if (again)
        QC_FAIL(err, QC_ERR_IO,
                "%s: other parts of the conversion come and go too fast; start this part again",
                r->options->out);
    return QC_OK;
}

void qc_part_opened(qc_part_run *r, qc_pipeline *p, const qc_resume *resume)
{
    for (uint32_t i = 0; is_shared(r) && i < p->plan->layout.count; i++)
        p->shards[i].foreign = !qc_share_has(r->share, i);
    r->committing = r->committing && qc_resume_found_of(resume)->done;
    if (!r->committing)
        qc_file_discard(&r->turn);
}

/* ---- Going out ------------------------------------------------------------------------------ */

/* Are all shards of a part in the staging folder, with the sizes that its journal says? */
static int are_shards_there(const qc_part_run *r, const qc_pipeline *p, unsigned part)
{
    for (uint32_t i = 0; i < p->plan->layout.count; i++) {
        const qc_shard_state *s = &p->shards[i];
        qc_path_kind kind = QC_PATH_MISSING;
        uint64_t bytes = 0;
        if (r->share.part_of[i] != part)
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

qc_status qc_part_look_around(qc_part_run *r, qc_pipeline *p, qc_resume *resume, int *complete,
                              qc_error *err)
{
    qc_output_dir *d = r->d;
    char name[NAME_BYTES];
    int gone = 0, moved = 0;
    *complete = 0;
    if (!is_shared(r))
        return QC_OK;
    if (r->committing) /* the turn is held since qc_part_opened */
        return take_others(r, p, resume, err);
    (void)snprintf(name, sizeof name, QC_JOURNAL_NAME, r->rank.index + 1, r->rank.count);
    QC_TRY(qc_part_turn_take(&r->turn, d, name, r->plan->call, &gone, err));
    if (!gone) { /* the process that had the turn may have died while it completed OUT */
        QC_TRY(qc_output_dir_look_again(d, err));
        QC_TRY(look_for_commit(r, &moved, err));
    }
    if (!gone && !moved)
        return take_others(r, p, resume, err);
    QC_TRY(qc_output_is_finished(complete, NULL, &d->root, p->plan, QC_LOOK_PLAN, err));
    if (*complete)
        return QC_OK;
    QC_FAIL(err, QC_ERR_IO,
            "%s: what this part did was removed meanwhile; start the same command again", d->path);
}

/* Lets go of the folder first, because whoever has the turn next and completes OUT has to be
 * alone. */
void qc_part_leave(qc_part_run *r)
{
    qc_output_dir_leave(r->d);
    qc_file_discard(&r->turn);
}

/* Takes the turn, unless it is held, and says whether the folder is still there. */
static int may_clear(qc_part_run *r)
{
    int gone = 0;
    return r->turn.fd >= 0 ||
           (qc_part_turn_take(&r->turn, r->d, NULL, r->plan->call, &gone, NULL) == QC_OK && !gone);
}

/* Removes the staging folder, unless there is other parts' work in it. */
static void abort_unless_others(qc_part_run *r, int may)
{
    int others = 0;
    if (may && qc_parts_have_journal(&others, r->d, NULL) == QC_OK && !others)
        qc_output_dir_abort(r->d);
    else
        qc_output_dir_leave(r->d);
    qc_file_discard(&r->turn);
}

/* Holds the turn until all is done, because whoever waits for it keeps d's lock from being held
 * alone. */
void qc_part_close(qc_part_run *r)
{
    const char *path = NULL;
    if (is_shared(r) && r->turn.fd < 0) {
        abort_unless_others(r, may_clear(r));
        return;
    }
    /* The journal that records the commit goes last. Should this process die here, it tells the
     * next one that everything is in place. */
    for (unsigned i = 0; is_shared(r) && i < r->rank.count; i++) {
        if (i != r->committer && journal_of(r, i, &path, NULL) == QC_OK)
            (void)unlink(path);
    }
    if (is_shared(r))
        qc_output_dir_clear(r->d);
    qc_output_dir_abort(r->d);
    qc_file_discard(&r->turn);
}

void qc_part_abort(qc_part_run *r, const qc_pipeline *p)
{
    const char *journal = NULL;
    if (!is_shared(r) || !r->d->staging) {
        qc_output_dir_abort(r->d);
        return;
    }
    int may = may_clear(r);
    for (uint32_t i = 0; may && p->shards && i < p->plan->layout.count; i++) {
        if (qc_share_has(r->share, i) && p->shards[i].path)
            (void)unlink(p->shards[i].path);
    }
    if (may && journal_of(r, r->rank.index, &journal, NULL) == QC_OK)
        (void)unlink(journal);
    abort_unless_others(r, may);
}
