#define _DEFAULT_SOURCE /* flock */
#include "convert/part_hold.h"

#include "base/workers.h"
#include "convert/resume.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define TURN_NAME      "turn.lock"
#define JOURNAL_PREFIX "journal-"
#define LOCK_FORMAT    "part-%05u-of-%05u.lock"
#define NAME_BYTES     64

/* ---- Locks ---------------------------------------------------------------------------------- */

/* Try to lock it; *busy: somebody else has it. */
static qc_status try_lock(const qc_file *f, int *busy, qc_error *err)
{
    while (flock(f->fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EINTR)
            continue;
        if (errno == EWOULDBLOCK) {
            *busy = 1;
            return QC_OK;
        }
        QC_FAIL(err, QC_ERR_IO,
                "%s: cannot be locked: %s; parts of a conversion need a file system with locks",
                f->path, strerror(errno));
    }
    *busy = 0;
    return QC_OK;
}

static void pause_briefly(void)
{
    struct timespec t = {0, 20000000};
    (void)nanosleep(&t, NULL);
}

/* Is the open file the one that its name leads to? */
static int has_its_name(const qc_file *f)
{
    struct stat held, named;
    return fstat(f->fd, &held) == 0 && lstat(f->path, &named) == 0 && held.st_dev == named.st_dev &&
           held.st_ino == named.st_ino;
}

static qc_status open_lock(qc_part_hold *h, qc_file *f, const char *name, int *gone, qc_error *err)
{
    const char *path = NULL;
    QC_TRY(qc_path_join(h->arena, &path, h->staging, name, err));
    qc_status st = qc_file_create(f, path, err);
    *gone = st != QC_OK && !has_its_name(h->lock);
    return *gone ? QC_OK : st;
}

/* Waits while somebody else has it. */
static qc_status wait_for_turn(qc_part_hold *h, qc_error *err)
{
    int busy = 1;
    for (;;) {
        if (qc_interrupted())
            QC_FAIL(err, QC_ERR_INTERRUPTED, "interrupted");
        QC_TRY(try_lock(&h->turn, &busy, err));
        if (!busy)
            return QC_OK;
        pause_briefly();
    }
}

qc_status qc_part_take_turn(qc_part_hold *h, int *gone, qc_error *err)
{
    QC_TRY(open_lock(h, &h->turn, TURN_NAME, gone, err));
    if (!*gone) {
        qc_status st = wait_for_turn(h, err);
        if (st != QC_OK) {
            qc_file_discard(&h->turn);
            return st;
        }
        *gone = !has_its_name(h->lock) || !has_its_name(&h->turn);
    }
    if (*gone)
        qc_part_leave(h);
    return QC_OK;
}

void qc_part_give_turn(qc_part_hold *h)
{
    qc_file_discard(&h->turn);
}

void qc_part_leave(qc_part_hold *h)
{
    qc_file_discard(&h->turn);
    qc_file_discard(&h->own);
}

qc_status qc_part_enter(qc_part_hold *h, qc_arena *arena, const char *out, const char *staging,
                        const qc_file *lock, qc_rank rank, int *gone, qc_error *err)
{
    char name[NAME_BYTES];
    int busy = 0;
    *h = QC_PART_HOLD_NONE;
    h->arena = arena;
    h->out = out;
    h->staging = staging;
    h->lock = lock;
    h->rank = rank;
    (void)snprintf(name, sizeof name, LOCK_FORMAT, rank.index + 1, rank.count);
    QC_TRY(open_lock(h, &h->own, name, gone, err));
    if (*gone)
        return QC_OK;
    qc_status st = try_lock(&h->own, &busy, err);
    if (st == QC_OK && busy)
        st = qc_error_set(err, QC_ERR_USAGE, __FILE__, __LINE__,
                          "%s: part %u of %u is running there now, here or on another machine", out,
                          rank.index + 1, rank.count);
    if (st == QC_OK)
        st = qc_part_take_turn(h, gone, err);
    if (st != QC_OK)
        qc_part_leave(h);
    return st;
}

/* ---- What others left ----------------------------------------------------------------------- */

/* "journal-00002-of-00004", and nothing else. */
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
    qc_arena *arena;
    const char *out, *staging;
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
                               c->out, err);
}

static qc_status is_running(const check *c, qc_rank other, int *yes, qc_error *err)
{
    char name[NAME_BYTES];
    const char *path = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    qc_file f = QC_FILE_CLOSED;
    *yes = 0;
    (void)snprintf(name, sizeof name, LOCK_FORMAT, other.index + 1, other.count);
    QC_TRY(qc_path_join(c->arena, &path, c->staging, name, err));
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if (kind == QC_PATH_MISSING)
        return QC_OK;
    QC_TRY(qc_file_create(&f, path, err));
    qc_status st = try_lock(&f, yes, err);
    qc_file_discard(&f);
    return st;
}

/* What belongs to another conversion: away with it, if that was asked for and nobody is at it. */
static qc_status clear_away(const check *c, qc_rank other, const char *name, qc_error *err)
{
    int busy = 0;
    const char *path = NULL;
    QC_TRY(is_running(c, other, &busy, err));
    if (busy)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s: part %u of %u of another conversion is running there now; stop it or choose "
                "another OUT",
                c->out, other.index + 1, other.count);
    QC_TRY(qc_path_join(c->arena, &path, c->staging, name, err));
    return qc_path_remove(path, err);
}

static qc_status refuse_count(const check *c, qc_rank other, qc_error *err)
{
    if (c->rank.count == 1)
        QC_FAIL(
            err, QC_ERR_USAGE,
            "%s holds part %u of %u of an interrupted conversion; continue it with --part %u/%u "
            "and so on, or begin anew with --restart",
            c->out, other.index + 1, other.count, other.index + 1, other.count);
    if (other.count == 1)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s holds an interrupted conversion by one process, this is part %u of %u; "
                "continue it with --part 1/1, or begin anew with --restart",
                c->out, c->rank.index + 1, c->rank.count);
    QC_FAIL(err, QC_ERR_USAGE,
            "%s holds part %u of %u of an interrupted conversion, this is part %u of %u; continue "
            "with as many parts as before, or begin anew with --restart",
            c->out, other.index + 1, other.count, c->rank.index + 1, c->rank.count);
}

static qc_status check_identity(const check *c, qc_rank other, const char *name, qc_error *err)
{
    const char *path = NULL;
    identity_reader reader = {c, 0};
    QC_TRY(qc_path_join(c->arena, &path, c->staging, name, err));
    qc_status st = qc_journal_read(path, take_identity, &reader, NULL, err);
    if (st != QC_ERR_USAGE && st != QC_ERR_INPUT)
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
    if (other.count != c->rank.count)
        return c->restart ? clear_away(c, other, name, err) : refuse_count(c, other, err);
    if (other.index != c->rank.index)
        return check_identity(c, other, name, err);
    if (!c->restart)
        return QC_OK;
    QC_TRY(qc_path_join(c->arena, &path, c->staging, name, err));
    return qc_path_remove(path, err);
}

static qc_status open_folder(DIR **dir, const char *path, qc_error *err)
{
    *dir = opendir(path);
    if (!*dir)
        QC_FAIL(err, QC_ERR_IO, "%s: cannot be listed: %s", path, strerror(errno));
    return QC_OK;
}

qc_status qc_parts_check_others(qc_arena *arena, const char *out, const char *staging, qc_rank rank,
                                int restart, const char *identity, size_t identity_bytes,
                                qc_error *err)
{
    check c = {arena, out, staging, rank, restart, identity, identity_bytes};
    DIR *dir = NULL;
    const struct dirent *e;
    QC_TRY(open_folder(&dir, staging, err));
    qc_status st = QC_OK;
    while (st == QC_OK && (e = readdir(dir)))
        st = check_one(&c, e->d_name, err);
    closedir(dir);
    return st;
}

qc_status qc_parts_have_journal(int *yes, const char *staging, qc_error *err)
{
    DIR *dir = NULL;
    const struct dirent *e;
    qc_rank rank;
    *yes = 0;
    QC_TRY(open_folder(&dir, staging, err));
    while ((e = readdir(dir)))
        *yes |= parse_name(e->d_name, &rank);
    closedir(dir);
    return QC_OK;
}
