#include "convert/run/part_turn.h"

#include "base/clock.h"
#include "base/workers.h"
#include "convert/output/dir_lock.h"
#include "convert/run/resume.h"
#include "convert/term/console.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#define TURN_NAME      "lock-turn"
#define JOURNAL_PREFIX "journal-"
#define LOCK_FORMAT    "lock-%05u-of-%05u"
#define NAME_BYTES     64
#define PATIENCE_NS    5000000000u

/* ---- Locks ---------------------------------------------------------------------------------- */

/* The process that has the turn may be stopped. Then this one waits until somebody does something
 * about it, so it says which process that is. */
static void tell_holder(const qc_call *call, const qc_file *turn)
{
    long pid = qc_dir_lock_holder(turn);
    if (pid > 0)
        qc_console_warn(call, "waiting for process %ld, which holds the lock of %s", pid,
                        turn->path);
    else
        qc_console_warn(call,
                        "waiting for another process, perhaps of another machine, which holds "
                        "the lock of %s",
                        turn->path);
}

qc_status qc_part_turn_take(qc_file *turn, const qc_output_dir *d, const char *must_be,
                            const qc_call *call, int *gone, qc_error *err)
{
    uint64_t begin_ns = qc_clock_ns();
    int is_told = 0;
    const char *path = NULL, *needed = NULL;
    int busy = 1;
    *turn = QC_FILE_CLOSED;
    QC_TRY(qc_path_join(d->arena, &path, d->staging, TURN_NAME, err));
    if (must_be)
        QC_TRY(qc_path_join(d->arena, &needed, d->staging, must_be, err));
    qc_status st = qc_file_open_update(turn, path, err);
    while (st == QC_OK && busy) {
        if (qc_interrupted())
            st = qc_error_set(err, QC_ERR_INTERRUPTED, __FILE__, __LINE__, "interrupted");
        else
            st = qc_dir_lock_try(turn, 0, &busy, err);
        if (st == QC_OK && busy && !is_told && qc_clock_ns() - begin_ns >= PATIENCE_NS) {
            is_told = 1;
            tell_holder(call, turn);
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
        qc_part_turn_give(turn);
    return st;
}

void qc_part_turn_give(qc_file *turn)
{
    qc_file_discard(turn);
}

/* ---- What others left ----------------------------------------------------------------------- */

/* Reads the rank from a name like "journal-00002-of-00004"; any other name is refused. */
static int parse_name(const char *name, qc_rank *rank)
{
    char again[NAME_BYTES];
    unsigned at[2] = {0, 0};
    if (strlen(name) != sizeof "journal-00001-of-00001" - 1)
        return 0;
    for (int i = 0; i < 2; i++) {
        const char *digits = name + sizeof JOURNAL_PREFIX - 1 + i * (5 + 4);
        for (int k = 0; k < 5; k++)
            at[i] = at[i] * 10 + (unsigned)(digits[k] - '0') % 10;
    }
    (void)snprintf(again, sizeof again, QC_JOURNAL_NAME, at[0], at[1]);
    if (strcmp(again, name) != 0 || at[0] == 0 || at[0] > at[1])
        return 0;
    *rank = (qc_rank){at[0] - 1, at[1], QC_RANK_ALONE};
    return 1;
}

typedef struct {
    const qc_output_dir *d;
    qc_rank rank;
    int restart;
    const char *identity;
    size_t identity_bytes;
} check;

typedef struct {
    const check *c;
    int seen;
} identity_reader;

static qc_status take_identity(void *ctx, const qc_journal_record *r, qc_error *err)
{
    identity_reader *reader = ctx;
    const check *c = reader->c;
    if (reader->seen || r->type != QC_RECORD_IDENTITY)
        return QC_OK;
    reader->seen = 1;
    return qc_identity_compare((const char *)r->payload, r->bytes, c->identity, c->identity_bytes,
                               c->d->path, err);
}

static qc_status is_running(const check *c, qc_rank other, int *yes, qc_error *err)
{
    char name[NAME_BYTES];
    const char *path = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    qc_file f = QC_FILE_CLOSED;
    *yes = 0;
    (void)snprintf(name, sizeof name, LOCK_FORMAT, other.index + 1, other.count);
    QC_TRY(qc_path_join(c->d->arena, &path, c->d->staging, name, err));
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if (kind == QC_PATH_MISSING)
        return QC_OK;
    QC_TRY(qc_file_open_update(&f, path, err));
    qc_status st = qc_dir_lock_try(&f, 0, yes, err);
    qc_file_discard(&f);
    return st;
}

/* Removes the journal of another conversion, because --restart asked for it; unless a process works
 * on that conversion now. */
static qc_status clear_away(const check *c, qc_rank other, const char *name, qc_error *err)
{
    int busy = 0;
    const char *path = NULL;
    QC_TRY(is_running(c, other, &busy, err));
    if (busy)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s: part %u of %u of another conversion is running there now; stop it or choose "
                "another OUT",
                c->d->path, other.index + 1, other.count);
    QC_TRY(qc_path_join(c->d->arena, &path, c->d->staging, name, err));
    return qc_path_remove(path, err);
}

static qc_status refuse_count(const check *c, qc_rank other, qc_error *err)
{
    if (c->rank.count == 1)
        QC_FAIL(
            err, QC_ERR_USAGE,
            "%s holds part %u of %u of an interrupted conversion; continue it with --part %u/%u "
            "and so on" QC_RESTART_ADVICE,
            c->d->path, other.index + 1, other.count, other.index + 1, other.count);
    if (other.count == 1)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s holds an interrupted conversion by one process, this is part %u of %u; "
                "continue it with --part 1/1" QC_RESTART_ADVICE,
                c->d->path, c->rank.index + 1, c->rank.count);
    QC_FAIL(err, QC_ERR_USAGE,
            "%s holds part %u of %u of an interrupted conversion, this is part %u of %u; continue "
            "with as many parts as before" QC_RESTART_ADVICE,
            c->d->path, other.index + 1, other.count, c->rank.index + 1, c->rank.count);
}

static qc_status check_identity(const check *c, qc_rank other, const char *name, qc_error *err)
{
    const char *path = NULL;
    identity_reader reader = {c, 0};
    QC_TRY(qc_path_join(c->d->arena, &path, c->d->staging, name, err));
    qc_status st = qc_journal_read(path, take_identity, &reader, NULL, err);
    if (st != QC_ERR_USAGE && st != QC_ERR_INPUT && st != QC_ERR_UNSUPPORTED)
        return st;
    if (c->restart)
        return clear_away(c, other, name, err);
    qc_error_prefix(err, "part %u of %u", other.index + 1, other.count);
    return st;
}

static qc_status check_one(const check *c, const char *name, qc_error *err)
{
    qc_rank other;
    const char *path = NULL;
    if (!parse_name(name, &other))
        return QC_OK;
    if (c->rank.count == 1 && other.count == 1)
        return QC_OK; /* this is the caller's own, which it looks at when it opens it */
    if (other.count != c->rank.count)
        return c->restart ? clear_away(c, other, name, err) : refuse_count(c, other, err);
    if (other.index != c->rank.index)
        return check_identity(c, other, name, err);
    if (!c->restart)
        return QC_OK;
    QC_TRY(qc_path_join(c->d->arena, &path, c->d->staging, name, err));
    return qc_path_remove(path, err);
}

static qc_status open_folder(DIR **dir, const char *path, qc_error *err)
{
    *dir = opendir(path);
    if (!*dir)
        QC_FAIL(err, QC_ERR_IO, "%s: cannot be listed: %s", path, strerror(errno));
    return QC_OK;
}

qc_status qc_parts_check_others(const qc_output_dir *d, qc_rank rank, int restart,
                                const char *identity, size_t identity_bytes, qc_error *err)
{
    check c = {d, rank, restart, identity, identity_bytes};
    DIR *dir = NULL;
    const struct dirent *e;
    QC_TRY(open_folder(&dir, d->staging, err));
    qc_status st = QC_OK;
    while (st == QC_OK && (e = readdir(dir)))
        st = check_one(&c, e->d_name, err);
    closedir(dir);
    return st;
}

qc_status qc_parts_remove_journals(const qc_output_dir *d, qc_rank rank, qc_error *err)
{
    check c = {d, rank, 1, "", 0};
    qc_rank other;
    DIR *dir = NULL;
    const struct dirent *e;
    QC_TRY(open_folder(&dir, d->staging, err));
    qc_status st = QC_OK;
    while (st == QC_OK && (e = readdir(dir))) {
        if (parse_name(e->d_name, &other) &&
            (other.count != rank.count || other.index != rank.index))
            st = clear_away(&c, other, e->d_name, err);
    }
    closedir(dir);
    return st;
}

qc_status qc_parts_have_journal(int *yes, const qc_output_dir *d, qc_error *err)
{
    DIR *dir = NULL;
    const struct dirent *e;
    qc_rank rank;
    *yes = 0;
    QC_TRY(open_folder(&dir, d->staging, err));
    while ((e = readdir(dir)))
        *yes |= parse_name(e->d_name, &rank);
    closedir(dir);
    return QC_OK;
}
