/* qconv unpack OUT DIR: writes the same output with plain .safetensors files and checks every byte
 * on the way. DIR equals what "convert --compress none" would have written, byte for byte.
 *
 * Without DIR the plain shards take the place of the compressed ones. If that stops while the files
 * move, the same command moves the rest.
 *
 * With --device it writes only the shards of that device, an index of them and a manifest of just
 * those: a part that can be verified and loaded by itself. The other shards need not be there. */
#include "base/checked.h"
#include "base/clock.h"
#include "base/text.h"
#include "convert/cli/commands.h"
#include "convert/run/finished.h"
#include "convert/run/make_manifest.h"
#include "convert/run/output_ready.h"
#include "convert/run/side_files.h"
#include "convert/term/console.h"
#include "convert/term/progress.h"
#include "convert/verify/verify_report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const qc_manifest *m;
    qc_file *files; /* per shard */
    const char **paths;
    atomic_uint_fast64_t *left; /* content bytes to come, per shard */
    pthread_mutex_t lock;       /* opening a shard; a leaf lock */
} unpacker;

/* Shards are opened when their first bytes come and closed with their last, so that any number of
 * them needs few file descriptors. */
static qc_status write_frame(void *ctx, unsigned worker, const qc_output_frame *frame,
                             const void *content, qc_error *err)
{
    unpacker *u = ctx;
    (void)worker;
    const uint32_t shard = frame->shard, len = frame->content_bytes;
    uint64_t offset = frame->at;
    qc_status st = QC_OK;
    if (frame->tensor != QC_HEADER_FRAME)
        offset += u->m->shards[shard].header_bytes + u->m->tensors[frame->tensor].begin;
    pthread_mutex_lock(&u->lock);
    if (u->files[shard].fd < 0)
        st = qc_file_create(&u->files[shard], u->paths[shard], err);
    pthread_mutex_unlock(&u->lock);
    QC_TRY(st);
    QC_TRY(qc_file_pwrite(&u->files[shard], content, len, offset, err));
    qc_file_hint_write_back(&u->files[shard], offset, len);
    if (atomic_fetch_sub(&u->left[shard], len) == len) {
        QC_TRY(qc_file_sync(&u->files[shard], err));
        return qc_file_close(&u->files[shard], err);
    }
    return QC_OK;
}

static qc_status copy_side_files(qc_output_dir *d, const char *from_dir, const qc_manifest *m,
                                 qc_error *err)
{
    for (size_t i = 0; i < m->file_count; i++) {
        const qc_manifest_file *f = &m->files[i];
        const char *from = NULL;
        uint64_t bytes = 0;
        qc_digest digest;
        QC_TRY(qc_path_join(d->arena, &from, from_dir, f->path, err));
        QC_TRY(qc_output_dir_copy(d, f->path, from, &bytes, &digest, err));
        if (bytes != f->bytes || !qc_digest_equal(&digest, &f->digest))
            QC_FAIL(err, QC_ERR_CHECK, "%s: its bytes are not those that were written", from);
    }
    return QC_OK;
}

static qc_status unpacker_init(unpacker *u, const qc_manifest *m, qc_output_dir *d, qc_error *err)
{
    u->m = m;
    QC_TRY(qc_arena_alloc(d->arena, &u->files, m->shard_count, sizeof *u->files, err));
    for (size_t i = 0; i < m->shard_count; i++)
        u->files[i] = QC_FILE_CLOSED;
    QC_TRY(qc_arena_alloc(d->arena, &u->paths, m->shard_count, sizeof *u->paths, err));
    QC_TRY(qc_arena_alloc(d->arena, &u->left, m->shard_count, sizeof *u->left, err));
    for (size_t i = 0; i < m->shard_count; i++) {
        atomic_init(&u->left[i], m->shards[i].content_bytes);
        QC_TRY(qc_output_dir_stage(d, m->shards[i].name, &u->paths[i], err));
    }
    return qc_lock_init(&u->lock, NULL, err);
}

static qc_status no_such_device(const qc_manifest *m, const qc_options *o, qc_error *err)
{
    const char *names = "";
    if (m->placement.device_count == 0)
        QC_FAIL(
            err, QC_ERR_DEVICE,
            "%s: it was made without --vram, so there is no device '%s' in it; leave --device out",
            o->model, o->device);
    for (size_t i = 0; i < m->placement.device_count; i++)
        QC_TRY(qc_arena_printf(o->call.arena, &names, err, "%s%s%s", names, i ? ", " : "",
                               m->placement.devices[i].name));
    QC_FAIL(err, QC_ERR_DEVICE, "%s: there is no device '%s' in it, only %s", o->model, o->device,
            names);
}

/* Leaves in m only what lies on one device. Shards and tensors are in the order of devices. */
static qc_status keep_device(qc_manifest *m, const qc_options *o, qc_error *err)
{
    uint32_t device = 0, first = 0;
    size_t end = 0, tensor = 0, tensor_end = 0;
    while (device < m->placement.device_count &&
           strcmp(m->placement.devices[device].name, o->device) != 0)
        device++;
    if (device == m->placement.device_count)
        return no_such_device(m, o, err);
    while (first < m->shard_count && m->shards[first].device < device)
        first++;
    for (end = first; end < m->shard_count && m->shards[end].device == device; end++)
        m->shards[end].device = 0;
    while (tensor < m->tensor_count && m->tensors[tensor].shard < first)
        tensor++;
    for (tensor_end = tensor; tensor_end < m->tensor_count && m->tensors[tensor_end].shard < end;)
        m->tensors[tensor_end++].shard -= first;
    m->shards += first;
    m->shard_count = end - first;
    m->tensors += tensor;
    m->tensor_count = tensor_end - tensor;
    m->placement.devices += device;
    m->placement.device_count = 1;
    m->file_count = 0;
    return QC_OK;
}

static qc_status index_row(void *ctx, size_t i, qc_index_entry *e, qc_error *err)
{
    const qc_index_entry *entries = ctx;
    (void)err;
    *e = entries[i];
    return QC_OK;
}

/* Writes the part's own index. The shards keep their numbers in the whole output, so a loader needs
 * an index to find them. */
static qc_status put_index(qc_output_dir *d, qc_manifest *m, qc_error *err)
{
    qc_index_entry *entries = NULL;
    QC_TRY(qc_arena_alloc(d->arena, &entries, m->tensor_count, sizeof(qc_index_entry), err));
    for (size_t i = 0; i < m->tensor_count; i++)
        entries[i] = (qc_index_entry){m->tensors[i].name, m->shards[m->tensors[i].shard].name};
    qsort(entries, m->tensor_count, sizeof *entries, qc_by_text);
    QC_TRY(qc_arena_alloc(d->arena, &m->files, 1, sizeof *m->files, err));
    /* A device may have no shard. Its index is then a name and nothing more. */
    const char *shard = m->shard_count ? m->shards[0].name : "model.safetensors";
    QC_TRY(qc_index_stage(d, m->files, shard, index_row, entries, m->tensor_count,
                          m->placement.devices[0].tensor_bytes, err));
    m->file_count = 1;
    return QC_OK;
}

static qc_status write_text(qc_strbuf *text, qc_manifest *m, int with_files, qc_error *err)
{
    if (!with_files)
        m->file_count = 0;
    qc_strbuf_init(text, SIZE_MAX / 2);
    return qc_manifest_write(m, text, err);
}

/* Does DIR hold all that would be unpacked? Its manifest is then the one that would be written,
 * except for the index of a single device, which is not made yet. */
static qc_status is_unpacked(int *same, qc_difference *why, const qc_output_dir *d,
                             const qc_options *o, qc_error *err)
{
    qc_arena arena;
    qc_manifest then, now;
    qc_strbuf a = {0}, b = {0};
    *same = 0;
    qc_arena_init(&arena);
    qc_status st = qc_output_read_finished(&then, why, &arena, d->path, err);
    if (st == QC_OK && then.shard_count > 0) {
        st = qc_manifest_load(&now, &arena, o->model, err);
        if (st == QC_OK && o->device)
            st = keep_device(&now, o, err);
        if (st == QC_OK) {
            qc_manifest_make_plain(&now);
            *same = qc_manifest_is_alike(why, &then, &now);
        }
        if (st == QC_OK && *same)
            st = qc_manifest_is_there(same, why, &then, &d->root, err);
        if (st == QC_OK && *same)
            st = write_text(&a, &then, o->device == NULL, err);
        if (st == QC_OK && *same)
            st = write_text(&b, &now, o->device == NULL, err);
        if (st == QC_OK && *same && (a.len != b.len || memcmp(a.data, b.data, a.len) != 0)) {
            *same = 0;
            (void)snprintf(why->text, sizeof why->text, "its contents are others");
        }
    }
    qc_strbuf_deinit(&a);
    qc_strbuf_deinit(&b);
    qc_arena_deinit(&arena);
    return st;
}

/* Asks before the work: is it done already, is anything in the way, and is there room? */
static qc_status check_before(const qc_output_dir *d, const qc_manifest *m, const qc_options *o,
                              int *complete, qc_error *err)
{
    qc_difference why = {"", ""};
    qc_entry e;
    uint64_t need = 0;
    size_t n = 0;
    *complete = 0;
    QC_TRY(qc_beneath_look(&d->root, QC_MANIFEST_NAME, &e, err));
    if (e.kind == QC_ENTRY_FILE && o->out && !o->convert.force) {
        QC_TRY(is_unpacked(complete, &why, d, o, err));
        if (!*complete)
            return qc_output_refuse(&why, d->path, err);
        qc_console_warn(&o->call, "%s is complete already; --force makes it anew", d->path);
        return QC_OK;
    }
    const char **names = NULL;
    QC_TRY(
        qc_arena_alloc(d->arena, &names, m->shard_count + m->file_count + 1, sizeof(char *), err));
    for (size_t i = 0; i < m->shard_count; i++) {
        names[n++] = m->shards[i].name;
        need = qc_sat_add(need, m->shards[i].content_bytes);
    }
    for (size_t i = 0; i < m->file_count; i++) {
        names[n++] = m->files[i].path;
        need = qc_sat_add(need, m->files[i].bytes);
    }
    if (o->device)
        QC_TRY(qc_layout_index_name(&names[n++], d->arena,
                                    m->shard_count ? m->shards[0].name : "model.safetensors", err));
    QC_TRY(qc_output_ready(&o->call, o->convert.force, &d->root, &d->owned, names, n, 0, err));
    return qc_room_check_bytes(d->path, "the unpacked output needs", need, err);
}

static qc_status unpack_into(qc_output_dir *d, const qc_options *o, qc_scan_result *result,
                             int *complete, qc_error *err)
{
    qc_manifest m;
    unpacker u;
    QC_TRY(qc_manifest_load(&m, d->arena, o->model, err));
    if (o->device)
        QC_TRY(keep_device(&m, o, err));
    if (!o->out && !m.compressed) {
        *complete = 1;
        qc_console_warn(&o->call, "%s has plain files already", o->model);
        return QC_OK;
    }
    QC_TRY(check_before(d, &m, o, complete, err));
    if (*complete)
        return QC_OK;
    QC_TRY(unpacker_init(&u, &m, d, err));
    uint64_t total = 0;
    for (size_t i = 0; i < m.shard_count; i++)
        total += m.shards[i].content_bytes;
    qc_progress *progress = NULL;
    qc_console_detail(&o->call, 1,
                      "unpacking %zu tensor%s in %zu shard%s, made by qconv %s with --to %s",
                      m.tensor_count, qc_plural(m.tensor_count), m.shard_count,
                      qc_plural(m.shard_count), m.qconv_version, m.to);
    QC_TRY(qc_progress_create(&progress, &o->call, "unpacking", total, err));
    qc_scan_options so = {.threads = o->call.threads,
                          .shards_only = o->device != NULL,
                          .sink = write_frame,
                          .sink_ctx = &u,
                          .progress = progress};
    qc_status st = qc_scan_output(result, d->arena, o->model, &m, &so, err);
    qc_progress_destroy(progress);
    if (st == QC_OK && result->problem_count > 0)
        st = QC_ERROR(err, QC_ERR_CHECK, "%s: %s", result->first.what, result->first.why);
    if (st == QC_OK)
        st = o->device ? put_index(d, &m, err) : copy_side_files(d, o->model, &m, err);
    for (size_t i = 0; i < m.shard_count; i++)
        qc_file_discard(&u.files[i]);
    pthread_mutex_destroy(&u.lock);
    if (st != QC_OK)
        return st;
    qc_manifest_make_plain(&m);
    qc_digest digest;
    QC_TRY(qc_manifest_stage(d, &m, &digest, err));
    return qc_output_dir_move(d, err);
}

/* Opens OUT itself. If files of an earlier unpacking were on their way, they are moved. */
static qc_status begin_in_place(qc_output_dir *d, const qc_options *o, int *complete, qc_error *err)
{
    qc_entry staging;
    if (o->device)
        QC_FAIL(err, QC_ERR_USAGE, "DIR is missing: --device leaves out the rest of %s", o->model);
    QC_TRY(qc_beneath_look_once(o->model, QC_STAGING_NAME, &staging, err));
    if (staging.kind == QC_ENTRY_MISSING) { /* says what is wrong with a folder that is no output */
        qc_manifest m;
        QC_TRY(qc_manifest_load(&m, o->call.arena, o->model, err));
    }
    QC_TRY(qc_output_dir_open(d, o->call.arena, o->model, NULL, o->convert.force, 0, 1, err));
    if (d->had_journal || (d->dead.shard_count > 0 && d->dead.compressed)) {
        qc_output_dir_leave(d);
        QC_FAIL(err, QC_ERR_USAGE,
                "%s holds an interrupted conversion, which its own command continues", o->model);
    }
    if (d->dead.shard_count == 0) {
        qc_output_dir_clear(d);
        return QC_OK;
    }
    *complete = 1;
    qc_console_warn(&o->call, "%s was being unpacked; the files that were missing are in place now",
                    o->model);
    return qc_output_dir_move_on(d, err);
}

qc_status qc_cmd_unpack(const qc_options *o, qc_error *err)
{
    qc_output_dir d = QC_OUTPUT_DIR_NONE;
    qc_scan_result result;
    int complete = 0;
    uint64_t started = qc_clock_ns();
    QC_TRY(qc_checkpoint_check_single(o->model, err));
    qc_status st =
        o->out ? qc_output_dir_begin(&d, o->call.arena, o->out, o->model, o->convert.force, err)
               : begin_in_place(&d, o, &complete, err);
    if (st == QC_OK && !complete)
        st = unpack_into(&d, o, &result, &complete, err);
    qc_output_dir_abort(&d);
    QC_TRY(st);
    if (complete)
        return QC_OK;
    return qc_scan_report(&o->call,
                          &(qc_scan_subject){"unpacked", o->model, o->out ? o->out : o->model},
                          &result, (double)(qc_clock_ns() - started) * 1e-9, err);
}
