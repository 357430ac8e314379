#include "convert/run/room.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/output/output_dir.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"
#include "formats/seekable.h"

#include <inttypes.h>
#include <string.h>

#define SAMPLE_PIECES 16u
#define PIECE_BYTES   (64u << 10)

/* ---- what is needed ------------------------------------------------------------------------- */

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

static qc_status sample_tensor(sampler *s, const qc_ckpt_tensor *t, qc_error *err)
{
    size_t n = t->bytes < PIECE_BYTES ? (size_t)t->bytes : PIECE_BYTES, packed = 0;
    if (n == 0 || s->plan->model->files[t->file].saved)
        return QC_OK;
    uint64_t at = (t->bytes - n) / 2;
    QC_TRY(qc_checkpoint_read(s->plan->model, s->cursor, t, at - at % 8, s->room, n, err));
    QC_TRY(qc_frame_encode(s->coder, 1, s->room, n, s->packed, qc_frame_bound(PIECE_BYTES), &packed,
                           err));
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
        st = qc_malloc(&s.room, PIECE_BYTES, err);
    if (st == QC_OK)
        st = qc_malloc(&s.packed, qc_frame_bound(PIECE_BYTES), err);
    /* The pieces are spread over the bytes of the model, so large weights are seen more often. */
    uint64_t seen = 0, step = plan->source_bytes / SAMPLE_PIECES + 1, next = step / 2;
    for (uint32_t i = 0; st == QC_OK && i < plan->job_count; i++) {
        const qc_ckpt_tensor *t = &plan->model->tensors[plan->jobs[i].source];
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

static qc_status refuse(const char *where, const char *what, uint64_t need, uint64_t room,
                        qc_error *err)
{
    char needed[QC_SIZE_TEXT_BYTES], found[QC_SIZE_TEXT_BYTES], missing[QC_SIZE_TEXT_BYTES];
    QC_FAIL(err, QC_ERR_NOSPACE,
            "%s: %s %s (%" PRIu64 " bytes), the disk has %s free (%" PRIu64 "): %s (%" PRIu64
            ") are missing",
            where, what, qc_text_bytes(needed, need), need, qc_text_bytes(found, room), room,
            qc_text_bytes(missing, need - room), need - room);
}

qc_status qc_room_check_bytes(const char *where, const char *what, uint64_t need, qc_error *err)
{
    uint64_t room = 0;
    QC_TRY(free_bytes(&room, where, err));
    return room < need ? refuse(where, what, need, room, err) : QC_OK;
}

/* plain: the bytes before compression. */
static qc_status check_compressed(const qc_room *r, uint64_t plain, qc_error *err)
{
    const char *out = r->plan->call->out;
    char needed[QC_SIZE_TEXT_BYTES], found[QC_SIZE_TEXT_BYTES];
    uint64_t room = 0;
    double ratio = 0;
    QC_TRY(free_bytes(&room, out, err));
    if (room >= plain)
        return QC_OK;
    QC_TRY(sample_ratio(&ratio, r->plan, err));
    uint64_t least = (uint64_t)((double)plain * ratio / 2);
    if (room < least)
        return refuse(out, "by a sample of the source, the compressed output needs at least", least,
                      room, err);
    qc_console_warn(r->plan->call,
                    "%s: the output is %s before compression and the disk has %s free; should "
                    "compression not be enough, the conversion stops when the disk is full, and "
                    "the same command continues it",
                    out, qc_text_bytes(needed, plain), qc_text_bytes(found, room));
    return QC_OK;
}

qc_status qc_room_check(const qc_room *r, qc_error *err)
{
    const qc_plan_options *o = r->plan->options;
    uint64_t need = r->consumption;
    if (!r->consumes) {
        QC_TRY(add_all(&need, r, err));
        if (o->compress && r->calibrated == 0)
            return check_compressed(r, need, err);
    }
    /* Calibrated weights are never compressed, and they are there before files of the source go. */
    if (r->calibrated > 0 && (o->compress || r->consumes))
        need = 0;
    need = qc_sat_add(need, r->calibrated);
    return qc_room_check_bytes(r->plan->call->out,
                               r->calibrated == need ? "calibrated weights need"
                               : r->calibrated > 0   ? "the output and calibrated weights need"
                                                     : "the output needs",
                               need, err);
}
