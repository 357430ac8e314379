#include "convert/run/finished.h"

#include "base/alloc.h"
#include "base/arena.h"
#include "base/checked.h"
#include "base/cpu.h"
#include "base/text.h"
#include "base/workers.h"
#include "convert/calibrate/calibrate.h"
#include "convert/run/make_manifest.h"
#include "convert/run/side_files.h"
#include "convert/term/progress.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define READ_BYTES (1u << 20)

/* ---- what differs --------------------------------------------------------------------------- */

static int differ(qc_difference *why, const char *fmt, ...) QC_PRINTF(2, 3);

/* Writes what differs to why, and returns 0, for "not the same". */
static int differ(qc_difference *why, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    if (why)
        (void)vsnprintf(why->text, sizeof why->text, fmt, args);
    va_end(args);
    return 0;
}

static int same_text(const char *a, const char *b)
{
    return a == b || (a && b && strcmp(a, b) == 0);
}

/* none is the word for an option that was not given. */
static int same_option(qc_difference *why, const char *name, const char *then, const char *now,
                       const char *none)
{
    return same_text(then, now) || differ(why, "%s was '%.60s' and is '%.60s' now", name,
                                          then ? then : none, now ? now : none);
}

static int same_number(qc_difference *why, const char *name, uint64_t then, uint64_t now)
{
    return then == now || differ(why, "%s was %" PRIu64 " and is %" PRIu64 " now", name, then, now);
}

static int same_placement(qc_difference *why, const qc_manifest_placement *a,
                          const qc_manifest_placement *b)
{
    if (!same_option(why, "--vram", a->vram, b->vram, "not given"))
        return 0;
    int same = a->device_count == b->device_count;
    if (same && a->device_count == 0)
        return 1;
    same = same && !(a->margin < b->margin) && !(a->margin > b->margin) &&
           a->context == b->context && a->batch == b->batch && a->images == b->images &&
           a->kv_bits == b->kv_bits && a->mla_expanded == b->mla_expanded;
    for (size_t i = 0; same && i < a->device_count; i++)
        same = same_text(a->devices[i].name, b->devices[i].name) &&
               a->devices[i].tensor_bytes == b->devices[i].tensor_bytes;
    return same ||
           differ(why, "what --vram was fitted to (margin, context and so on) is not the same");
}

static int same_compression(qc_difference *why, const qc_manifest *a, const qc_manifest *b)
{
    if (a->compressed != b->compressed)
        return differ(why, "--compress was '%s' and is '%s' now", a->compressed ? "zstd" : "none",
                      b->compressed ? "zstd" : "none");
    if (a->level != b->level)
        return differ(why, "--compress was 'zstd:%d' and is 'zstd:%d' now", a->level, b->level);
    return same_text(a->zstd_version, b->zstd_version) ||
           differ(why, "it was compressed by zstd %.20s and this is zstd %.20s", a->zstd_version,
                  b->zstd_version);
}

static int same_rules(qc_difference *why, const qc_manifest *a, const qc_manifest *b)
{
    size_t count = a->rule_count > b->rule_count ? a->rule_count : b->rule_count;
    for (size_t i = 0; i < count; i++) {
        const char *then = i < a->rule_count ? a->rules[i] : "nothing";
        const char *now = i < b->rule_count ? b->rules[i] : "nothing";
        if (!same_text(then, now))
            return differ(why, "rule %zu was '%.60s' and is '%.60s' now", i + 1, then, now);
    }
    return 1;
}

static int same_options(qc_difference *why, const qc_manifest *a, const qc_manifest *b)
{
    return same_option(why, "--to", a->to, b->to, "") &&
           same_number(why, "--block-size", a->block_elems, b->block_elems) &&
           (a->double_quant == b->double_quant ||
            differ(why, "--no-double-quant was %s and %s now",
                   a->double_quant ? "not given" : "given", b->double_quant ? "is not" : "is")) &&
           same_option(why, "--scale", a->scale, b->scale, "absmax") &&
           same_option(why, "--rest", a->rest, b->rest, "") &&
           same_option(why, "--compute-dtype", a->compute_dtype, b->compute_dtype, "none") &&
           same_compression(why, a, b) &&
           same_number(why, "--max-shard-size", a->max_shard_bytes, b->max_shard_bytes) &&
           same_rules(why, a, b) && same_placement(why, &a->placement, &b->placement) &&
           (same_text(a->qconv_version, b->qconv_version) ||
            differ(why, "it was made by qconv %.30s and this is qconv %.30s", a->qconv_version,
                   b->qconv_version));
}

static int same_sources(qc_difference *why, const qc_manifest *a, const qc_manifest *b)
{
    if (a->source_count != b->source_count)
        return differ(why, "its source had %zu weight file%s and this one has %zu", a->source_count,
                      qc_plural(a->source_count), b->source_count);
    for (size_t i = 0; i < a->source_count; i++) {
        const qc_manifest_source *x = &a->sources[i], *y = &b->sources[i];
        if (!same_text(x->name, y->name))
            return differ(why, "it was made of a file '%.80s' and this source has '%.80s'", x->name,
                          y->name);
        if (x->bytes != y->bytes)
            return differ(why,
                          "it was made of another model, whose file '%.80s' had %" PRIu64
                          " bytes where this one has %" PRIu64,
                          x->name, x->bytes, y->bytes);
        if (!qc_digest_equal(&x->header, &y->header))
            return differ(why, "it was made of another model, whose file '%.80s' had other tensors",
                          x->name);
    }
    return 1;
}

int qc_manifest_is_alike(qc_difference *why, const qc_manifest *then, const qc_manifest *now)
{
    return same_sources(why, then, now) && same_options(why, then, now);
}

/* ---- the plan ------------------------------------------------------------------------------- */

static qc_status same_tensors(int *same, const qc_manifest *m, const qc_plan *plan, qc_error *err)
{
    *same = m->shard_count == plan->layout.count && m->tensor_count == plan->tensor_count;
    for (uint32_t i = 0; *same && i < plan->layout.count; i++) {
        const qc_shard *s = &plan->layout.shards[i];
        *same = same_text(m->shards[i].name, s->name) &&
                m->shards[i].header_bytes == s->header_bytes && m->shards[i].device == s->device;
    }
    qc_strbuf name;
    qc_status st = QC_OK;
    qc_strbuf_init(&name, SIZE_MAX / 2);
    for (size_t i = 0; st == QC_OK && *same && i < m->tensor_count; i++) {
        const qc_manifest_tensor *t = &m->tensors[i];
        qc_manifest_tensor now;
        st = qc_manifest_plan_row(&now, &name, plan, plan->layout.shards[0].order[i], err);
        *same = st == QC_OK && same_text(t->name, now.name) && t->dtype == now.dtype &&
                t->ndim == now.ndim && memcmp(t->dims, now.dims, t->ndim * sizeof *t->dims) == 0 &&
                t->begin == now.begin && t->end == now.end && t->shard == now.shard &&
                t->piece_bytes == now.piece_bytes && same_text(t->scheme, now.scheme) &&
                same_text(t->source_name, now.source_name);
    }
    qc_strbuf_deinit(&name);
    return st;
}

qc_status qc_output_read_finished(qc_manifest *m, qc_difference *why, qc_arena *arena,
                                  const char *out, qc_error *err)
{
    char text[QC_SIZE_TEXT_BYTES];
    uint64_t bytes = 0;
    qc_status st = qc_manifest_load(m, arena, out, err);
    for (size_t i = 0; st == QC_OK && i < m->shard_count; i++)
        bytes += m->compressed ? m->shards[i].file_bytes : m->shards[i].content_bytes;
    if (st == QC_OK && why)
        (void)snprintf(why->there, sizeof why->there, "a finished output (--to %.20s, %s)", m->to,
                       qc_text_bytes(text, bytes));
    if (st != QC_ERR_INPUT && st != QC_ERR_CHECK)
        return st;
    memset(m, 0, sizeof *m);
    if (why)
        (void)snprintf(why->there, sizeof why->there, "an output of qconv");
    (void)differ(why, "its " QC_MANIFEST_NAME " is damaged");
    return QC_OK;
}

/* ---- weights of the source ------------------------------------------------------------------ */

typedef struct {
    const qc_plan *plan;
    const qc_manifest_tensor *tensors; /* in the order of the plan's shards */
    const uint32_t *rows;              /* the numbers of those that are compared */
    uint32_t count;
    atomic_uint_fast32_t next;
    atomic_int differs;
    qc_progress *progress;
} comparison;

typedef struct {
    qc_st_cursor *cursor;
    qc_digest_state *hash;
    unsigned char *bytes;
} reader;

static const qc_job *job_of(const qc_plan *plan, uint32_t row)
{
    return &plan->jobs[plan->outputs[plan->layout.shards[0].order[row]].job];
}

/* Compares the source of a row with the digest of its pieces. */
static qc_status compare_weight(comparison *c, qc_team *team, const reader *r, uint32_t row,
                                qc_error *err)
{
    const qc_manifest_tensor *t = &c->tensors[row];
    const qc_checkpoint_tensor *from = &c->plan->model->tensors[job_of(c->plan, row)->source];
    uint64_t at = 0, each = t->source_piece_bytes;
    size_t count = each ? (size_t)qc_ceil_div_u64(from->bytes, each) : 0, done = 0;
    qc_digest *pieces = NULL;
    qc_status st = QC_OK;
    if (count == 0)
        return QC_OK;
    QC_TRY(qc_calloc(&pieces, count, sizeof(qc_digest), err));
    for (; st == QC_OK && done < count && !atomic_load(&c->differs); done++) {
        uint64_t end = from->bytes - at < each ? from->bytes : at + each;
        st = qc_check_stopped(team, err);
        qc_digest_reset(r->hash);
        while (st == QC_OK && at < end) {
            size_t n = end - at < READ_BYTES ? (size_t)(end - at) : READ_BYTES;
            st = qc_checkpoint_read(c->plan->model, r->cursor, from, at, r->bytes, n, err);
            if (st != QC_OK)
                break;
            qc_digest_update(r->hash, r->bytes, n);
            qc_progress_add(c->progress, n);
            at += n;
        }
        pieces[done] = qc_digest_finish(r->hash);
    }
    if (st == QC_OK && done == count) {
        qc_digest found = qc_digest_root(pieces, count);
        if (!qc_digest_equal(&found, &t->source))
            atomic_store(&c->differs, 1);
    }
    qc_free(pieces);
    return st;
}

static qc_status compare_some(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    comparison *c = ctx;
    reader r = {NULL, NULL, NULL};
    (void)index;
    qc_status st = qc_st_cursor_create(&r.cursor, err);
    if (st == QC_OK)
        st = qc_digest_create(&r.hash, err);
    if (st == QC_OK)
        st = qc_malloc(&r.bytes, READ_BYTES, err);
    while (st == QC_OK && !atomic_load(&c->differs)) {
        uint32_t i = (uint32_t)atomic_fetch_add(&c->next, 1);
        if (i >= c->count)
            break;
        st = compare_weight(c, team, &r, c->rows[i], err);
    }
    qc_free(r.bytes);
    qc_digest_destroy(r.hash);
    qc_st_cursor_destroy(r.cursor);
    return st;
}

qc_status qc_manifest_is_of_weights(int *same, const qc_manifest *m, const qc_plan *plan,
                                    qc_share share, qc_error *err)
{
    const qc_call *call = plan->call;
    comparison c = {.plan = plan, .tensors = m->tensors};
    uint64_t bytes = 0;
    uint32_t *rows = NULL;
    *same = 0;
    if (m->tensor_count != plan->tensor_count)
        return QC_OK;
    QC_TRY(qc_calloc(&rows, plan->tensor_count, sizeof(uint32_t), err));
    c.rows = rows;
    for (uint32_t i = 0; i < plan->tensor_count; i++) {
        uint32_t tensor = plan->layout.shards[0].order[i];
        const qc_job *j = job_of(plan, i);
        if (!qc_share_has(share, qc_plan_tensor(plan, tensor).shard) ||
            plan->outputs[tensor].role != QC_ROLE_TENSOR_MAIN || j->entry->transpose)
            continue;
        rows[c.count++] = i;
        bytes += plan->model->tensors[j->source].bytes;
    }
    qc_status st = qc_progress_create(&c.progress, call, "comparing the source with what is there",
                                      bytes, err);
    if (st == QC_OK)
        st = qc_team_run(call->threads ? call->threads : qc_cpu_count(), compare_some, &c, err);
    qc_progress_destroy(c.progress);
    qc_free(rows);
    *same = st == QC_OK && !atomic_load(&c.differs);
    return st;
}

qc_status qc_output_is_of_weights(int *same, const char *out, const qc_plan *plan, qc_share share,
                                  qc_error *err)
{
    qc_arena arena;
    qc_manifest m;
    *same = 0;
    qc_arena_init(&arena);
    qc_status st = qc_manifest_load(&m, &arena, out, err);
    if (st == QC_OK)
        st = qc_manifest_is_of_weights(same, &m, plan, share, err);
    else if (st == QC_ERR_INPUT || st == QC_ERR_CHECK)
        st = QC_OK;
    qc_arena_deinit(&arena);
    return st;
}

/* ---- all of it ------------------------------------------------------------------------------ */

/* Compares config.json and what is copied. The index and the device map follow from the plan. */
static qc_status same_side_files(int *same, qc_difference *why, const qc_manifest *m,
                                 const qc_plan *plan, qc_error *err)
{
    qc_side_file *side = NULL;
    size_t count = 0;
    QC_TRY(qc_side_files_list(&side, &count, plan, err));
    *same = 1;
    if (count != m->file_count)
        *same = differ(why, "it has %zu file%s beside the weights and this one %zu", m->file_count,
                       qc_plural(m->file_count), count);
    for (size_t i = 0; *same && i < count; i++) {
        const char *path = NULL, *name = side[i].name;
        const qc_manifest_file *f = m->files;
        qc_digest digest;
        qc_strbuf config;
        qc_status st = QC_OK;
        while (f < m->files + m->file_count && strcmp(f->path, name) != 0)
            f++;
        if (f == m->files + m->file_count) {
            *same = differ(why, "it has no file '%.120s'", name);
            break;
        }
        if (side[i].kind == QC_SIDE_INDEX || side[i].kind == QC_SIDE_DEVICE_MAP)
            continue;
        qc_strbuf_init(&config, SIZE_MAX / 2);
        if (side[i].kind == QC_SIDE_CONFIG) {
            st = qc_config_make(&config, plan, err);
            digest = qc_digest_bytes(config.data, config.len);
        } else {
            st = qc_path_join(plan->arena, &path, plan->model->path, name, err);
            if (st == QC_OK)
                st = qc_digest_file(&digest, path, err);
        }
        qc_strbuf_deinit(&config);
        QC_TRY(st);
        if (!qc_digest_equal(&digest, &f->digest))
            *same = differ(why, "its '%.120s' is not that of this source", name);
    }
    return QC_OK;
}

static qc_status same_calibration(int *same, qc_difference *why, const qc_manifest *m,
                                  const qc_plan *plan, qc_error *err)
{
    const qc_manifest_calibration *then = m->calibration, *now = NULL;
    const qc_calibrate_options *c = &plan->options->calibrate;
    qc_calibrate_report r = {0};
    qc_manifest made = {0};
    *same = !then && !qc_calibrates(c);
    if (*same)
        return QC_OK;
    qc_calibrate_report_begin(&r, plan);
    if (!then || !qc_calibrates(c) || !then->text != !r.text) {
        *same = differ(why, "it was %s and this one is %s",
                       !then        ? "not calibrated"
                       : then->text ? "calibrated with a text"
                                    : "calibrated with second moments",
                       !qc_calibrates(c) ? "not"
                       : r.text          ? "to be calibrated with a text"
                                         : "to be calibrated with second moments");
        return QC_OK;
    }
    if (!then->text) {
        *same = differ(why, "whether its second moments were those of --hessians is not recorded");
        return QC_OK;
    }
    QC_TRY(qc_manifest_add_calibration(&made, plan, &r, err));
    now = made.calibration;
    *same = (same_text(then->text, now->text) && qc_digest_equal(&then->digest, &now->digest) &&
             same_text(then->tokenizer, now->tokenizer) && then->tokens == now->tokens &&
             then->windows == now->windows && then->context == now->context &&
             !(then->damping < now->damping) && !(then->damping > now->damping) &&
             !(then->mix < now->mix) && !(then->mix > now->mix) &&
             same_text(then->sided, now->sided)) ||
            differ(why, "it was calibrated with another text, or otherwise");
    return QC_OK;
}

static qc_status is_there(int *same, qc_difference *why, const qc_file *root, const char *name,
                          uint64_t bytes, qc_error *err)
{
    qc_entry e;
    QC_TRY(qc_beneath_look(root, name, &e, err));
    if (e.kind != QC_ENTRY_FILE || e.blocked)
        *same = differ(why, "its file '%.120s' is missing", name);
    else if (e.bytes != bytes)
        *same = differ(why, "its file '%.120s' has %" PRIu64 " bytes instead of %" PRIu64, name,
                       e.bytes, bytes);
    return QC_OK;
}

qc_status qc_manifest_is_there(int *same, qc_difference *why, const qc_manifest *m,
                               const qc_file *root, qc_error *err)
{
    *same = 1;
    for (size_t i = 0; *same && i < m->shard_count; i++) {
        const qc_manifest_shard *s = &m->shards[i];
        char name[NAME_MAX + 1];
        (void)snprintf(name, sizeof name, "%s%s", s->name, qc_manifest_ending(m));
        QC_TRY(
            is_there(same, why, root, name, m->compressed ? s->file_bytes : s->content_bytes, err));
    }
    for (size_t i = 0; *same && i < m->file_count; i++)
        QC_TRY(is_there(same, why, root, m->files[i].path, m->files[i].bytes, err));
    return QC_OK;
}

static qc_status compare_output(int *same, qc_difference *why, const qc_manifest *m,
                                const qc_file *root, const qc_plan *plan, qc_look look,
                                qc_error *err)
{
    qc_manifest now;
    if (m->shard_count > 0) {
        QC_TRY(qc_manifest_head(&now, plan, err));
        *same = qc_manifest_is_alike(why, m, &now);
        if (*same) {
            QC_TRY(same_tensors(same, m, plan, err));
            if (!*same)
                (void)differ(why, "its tensors, their schemes or their places are not the same");
        }
    }
    if (!*same || look == QC_LOOK_PLAN)
        return QC_OK;
    QC_TRY(qc_manifest_is_there(same, why, m, root, err));
    if (*same)
        QC_TRY(same_side_files(same, why, m, plan, err));
    if (*same)
        QC_TRY(same_calibration(same, why, m, plan, err));
    if (!*same || look == QC_LOOK_FILES)
        return QC_OK;
    QC_TRY(qc_manifest_is_of_weights(same, m, plan, QC_SHARE_ALL, err));
    if (!*same)
        (void)differ(why, "it was made of another model, whose weights are not these");
    return QC_OK;
}

qc_status qc_output_is_finished(int *same, qc_difference *why, const qc_file *root,
                                const qc_plan *plan, qc_look look, qc_error *err)
{
    qc_arena arena;
    qc_manifest m;
    *same = 0;
    qc_arena_init(&arena);
    qc_status st = qc_output_read_finished(&m, why, &arena, root->path, err);
    if (st == QC_OK)
        st = compare_output(same, why, &m, root, plan, look, err);
    qc_arena_deinit(&arena);
    return st;
}

qc_status qc_output_refuse(const qc_difference *why, const char *out, qc_error *err)
{
    QC_FAIL(
        err, QC_ERR_USAGE,
        "%s holds %s that differs from this one: %s; --force replaces it, or choose another OUT",
        out, why->there, why->text);
}
