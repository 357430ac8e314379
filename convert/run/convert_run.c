#include "convert/run/convert_run.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/text.h"
#include "convert/pipeline/pipeline.h"
#include "convert/run/calibration.h"
#include "convert/run/ending.h"
#include "convert/run/finished.h"
#include "convert/run/make_manifest.h"
#include "convert/run/output_ready.h"
#include "convert/run/promise.h"
#include "convert/run/resume.h"
#include "convert/run/side_files.h"
#include "convert/term/console.h"
#include "convert/term/progress.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* One conversion in the making. */
typedef struct {
    const qc_plan *plan;
    const qc_call *call;
    const qc_convert_options *o;
    const char *device_map; /* text; NULL: there is no placement */
    qc_output_dir d;
    qc_pipeline p;
    qc_resume *resume;
    qc_part_run *part;
    qc_calibration calibrate;
    qc_manifest_rows rows;
    int worked; /* work on the input began: an error may come from it */
    int made;   /* this process has made all that it has to make */
} conversion;

static qc_status check_room(const conversion *c, qc_error *err)
{
    return qc_room_check(c->part, &c->d.root, qc_calibration_room(&c->calibrate), err);
}

/* m is the manifest, or NULL while parts are to come: then this part alone is reported. */
static void fill_results(qc_convert_report *r, const qc_pipeline *p, const qc_part_run *part,
                         const qc_manifest *m)
{
    const qc_plan *plan = p->plan;
    const qc_share share = m ? QC_SHARE_ALL : part->share;
    r->threads = p->threads;
    r->isa = qc_isa_name(p->ops->isa);
    r->device = p->devices->text;
    r->gpu_weights = atomic_load(&p->gpu_elems);
    r->side_files = m ? m->file_count : 0;
    for (uint32_t i = 0; i < plan->layout.count; i++)
        if (qc_share_has(share, i))
            r->bytes_out_stored += p->shards[i].file_bytes;
    /* Of two that are equally bad this takes the first in the order of the files. */
    for (uint32_t i = 0; i < plan->tensor_count; i++) {
        uint32_t tensor = plan->layout.shards[0].order[i];
        const qc_output *o = &plan->outputs[tensor];
        const qc_job *j = &plan->jobs[o->job];
        const qc_tensor_error *e = &p->jobs[o->job].error;
        if (o->role != QC_ROLE_TENSOR_MAIN || !qc_scheme_is_quantized(j->scheme) ||
            !qc_share_has_job(share, plan, j))
            continue;
        if (m)
            qc_console_detail(plan->call, 2,
                              "%s: %s, relative MSE %.3e, largest error %.3e at %" PRIu64, j->name,
                              qc_scheme_name(j->scheme), e->rel_mse, e->max_err, e->max_index);
        if (!r->worst_name || e->rel_mse > r->worst_rel_mse) {
            r->worst_name = j->name;
            r->worst_rel_mse = e->rel_mse;
            r->worst_max_err = e->max_err;
        }
    }
}

static void add_progress(void *progress, uint64_t bytes)
{
    qc_progress_add(progress, bytes);
}

/* A disk filled up. The failed write is only the first that did not fit; how much is still to come
 * is known before compression. */
static void tell_what_is_missing(const qc_pipeline *p, qc_error *err)
{
    uint64_t room = 0, left = 0;
    for (uint32_t i = 0; i < p->unit_count; i++) {
        const qc_unit *u = &p->units[i];
        if (!u->written && !p->shards[u->shard].foreign)
            left += u->content_bytes;
    }
    if (qc_dir_free_bytes(p->out->staging, &room, NULL) == QC_OK && left > room)
        qc_error_prefix(err, "the disk is full, and up to %" PRIu64 " more bytes are needed",
                        left - room);
}

/* Reads back the frames that an earlier run left. */
static qc_status check_kept(conversion *c, qc_error *err)
{
    const qc_resume_found *found = qc_resume_found_of(c->resume);
    qc_progress *progress = NULL;
    if (found->continued) {
        qc_console_detail(c->call, 1,
                          "continuing: %" PRIu32 " of %" PRIu32 " tensors were finished; reading "
                          "them back",
                          found->jobs_kept, c->plan->job_count);
        QC_TRY(qc_progress_create(&progress, c->call, "checking what is there", found->stored_kept,
                                  err));
    }
    qc_status st = qc_resume_check(c->resume, add_progress, progress, err);
    qc_progress_destroy(progress);
    if (st == QC_OK && found->continued)
        qc_console_detail(c->call, 1, "%" PRIu32 " tensors are kept, %" PRIu32 " are made again",
                          found->jobs_kept, found->jobs_redone);
    return st;
}

/* Makes all of the output but its manifest. */
static qc_status run_pipeline(conversion *c, qc_error *err)
{
    qc_progress *progress = NULL;
    const char *verb = "converting";
    const qc_devices *devices = c->p.devices;
    qc_convert_report own;
    qc_parts_fill_report(&own, c->plan, c->part->share);
    uint64_t bytes = own.bytes_in - qc_resume_found_of(c->resume)->bytes_kept;
    if (devices->gpu_count == 1)
        QC_TRY(qc_arena_printf(c->call->arena, &verb, err, "converting on cuda:%d",
                               devices->gpus[0].index));
    else if (devices->gpu_count > 1)
        QC_TRY(qc_arena_printf(c->call->arena, &verb, err, "converting on %u GPUs",
                               devices->gpu_count));
    QC_TRY(qc_progress_create(&progress, c->call, verb, bytes, err));
    c->p.progress = add_progress;
    c->p.progress_ctx = progress;
    c->worked = 1;
    qc_alloc_trim(); /* headers of many tensors were read for the plan */
    qc_status st = qc_pipeline_run(&c->p, err);
    if (st == QC_OK)
        st = qc_source_files_check(c->plan, err);
    if (st == QC_OK)
        st = qc_resume_done(c->resume, err);
    if (st == QC_ERR_NOSPACE)
        tell_what_is_missing(&c->p, err);
    qc_progress_destroy(progress);
    return st;
}

/* Shards that have moved are not read back. Where a file of the source has another time now, the
 * manifest says what they were made of. */
static qc_status check_source_of(const conversion *c, const qc_manifest *m, qc_error *err)
{
    int same = 1;
    if (!qc_resume_is_done(c->resume))
        QC_TRY(qc_manifest_is_of_weights(&same, m, c->plan, QC_SHARE_ALL, err));
    if (!same)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s has changed since the conversion that %s holds" QC_RESTART_ADVICE,
                c->part->options->model, c->part->options->out);
    return QC_OK;
}

/* Finishes a commit during which an earlier run died, or just after it; *done says that there was
 * one. manifest is the digest of its manifest. */
static qc_status finish_commit(conversion *c, const qc_digest *manifest, qc_manifest *m, int *done,
                               qc_error *err)
{
    qc_digest digest;
    int there = 0;
    *done = 0;
    if (c->d.dead.shard_count > 0 && qc_digest_equal(&c->d.dead_digest, manifest)) {
        *m = c->d.dead;
        *done = 1;
        QC_TRY(check_source_of(c, m, err));
        return qc_output_dir_move_on(&c->d, err);
    }
    QC_TRY(qc_output_dir_manifest(&c->d, &there, &digest, err));
    if (!there || !qc_digest_equal(&digest, manifest))
        return QC_OK;
    *done = 1;
    QC_TRY(qc_manifest_load(m, c->call->arena, c->d.path, err));
    return check_source_of(c, m, err);
}

static void tell_kept(const conversion *c, qc_error *err)
{
    uint32_t done = 0, own = 0;
    for (uint32_t i = 0; i < c->plan->job_count; i++) {
        const qc_job *j = &c->plan->jobs[i];
        if (c->p.shards[qc_plan_tensor(c->plan, j->first_output).shard].foreign)
            continue;
        own++;
        done += c->p.jobs[i].kept || atomic_load(&c->p.jobs[i].recorded);
    }
    size_t len = strlen(err->msg);
    if (done == 0 && qc_calibration_count(&c->calibrate) > 0) {
        (void)snprintf(err->msg + len, sizeof err->msg - len,
                       "; %" PRIu32
                       " weights are calibrated, and the same command continues from there",
                       qc_calibration_count(&c->calibrate));
        return;
    }
    (void)snprintf(err->msg + len, sizeof err->msg - len,
                   "; %" PRIu32 " of %" PRIu32
                   " tensors are done, and the same command continues from there",
                   done, own);
}

/* Is there anything that the same command could go on with? */
static int has_work(const conversion *c)
{
    return qc_resume_has_work(c->resume) || qc_calibration_count(&c->calibrate) > 0;
}

/* ---- an interruption that takes too long ---- */

/* A frame at level 19 takes seconds, and so may one write to a slow disk. What is recorded needs no
 * farewell: after this time the process ends in the middle of whatever it does, as a kill would. */
#define PATIENCE_NS 1500000000u

typedef struct {
    const conversion *c;
    pthread_t thread;
    pthread_mutex_t lock; /* protects over; a leaf lock */
    pthread_cond_t told;
    int over;
} watch;

static void *watch_main(void *arg)
{
    watch *w = arg;
    uint64_t since = 0;
    pthread_mutex_lock(&w->lock);
    while (!w->over) {
        qc_cond_wait_briefly(&w->told, &w->lock);
        if (qc_interrupted() && since == 0)
            since = qc_clock_ns();
        if (!w->over && since > 0 && qc_clock_ns() - since > PATIENCE_NS) {
            qc_error err = {QC_ERR_INTERRUPTED, "interrupted", __FILE__, __LINE__};
            qc_output_dir d = w->c->d;
            if (has_work(w->c))
                tell_kept(w->c, &err);
            else if (w->c->part->rank.count == 1) /* others' work lies in the same folder */
                qc_output_dir_abort(&d);
            qc_console_error(&err, NULL, 0);
            _exit(qc_status_exit_code(QC_ERR_INTERRUPTED));
        }
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

static qc_status watch_start(watch *w, const conversion *c, qc_error *err)
{
    *w = (watch){.c = c};
    QC_TRY(qc_lock_init(&w->lock, &w->told, err));
    qc_status st =
        qc_thread_start(&w->thread, watch_main, w, "the thread that waits for Ctrl-C", err);
    if (st != QC_OK)
        qc_lock_deinit(&w->lock, &w->told);
    return st;
}

static void watch_end(watch *w)
{
    pthread_mutex_lock(&w->lock);
    w->over = 1;
    pthread_cond_signal(&w->told);
    pthread_mutex_unlock(&w->lock);
    (void)pthread_join(w->thread, NULL);
    qc_lock_deinit(&w->lock, &w->told);
}

static void fill_part(const conversion *c, qc_convert_report *r)
{
    const qc_part_run *part = c->part;
    r->part_index = part->rank.index;
    r->part_count = part->rank.count;
    r->parts_left = part->left;
    r->parts_left_count = part->left_count;
    if (part->left_count > 0 || r->complete_meanwhile)
        qc_parts_fill_report(r, c->plan, part->share);
}

/* Takes what an earlier run left, makes the rest, and completes OUT, unless parts are to come.
 * *done says that OUT is complete, and that m is its manifest. */
static qc_status go_on(conversion *c, qc_manifest *m, int *done, qc_convert_report *report,
                       qc_error *err)
{
    const qc_resume_found *found = qc_resume_found_of(c->resume);
    qc_part_run *part = c->part;
    qc_manifest_file *files = NULL;
    size_t file_count = 0;
    qc_digest digest;
    *done = 0;
    if (part->rank.count == 1 && found->committing)
        QC_TRY(finish_commit(c, &found->manifest, m, done, err));
    if (*done)
        return QC_OK;
    if (!qc_part_is_done(part, &c->p, c->resume)) {
        QC_TRY(check_kept(c, err));
        if (qc_calibration_is_due(&c->calibrate)) {
            QC_TRY(check_room(c, err));
            c->worked = 1;
            QC_TRY(qc_calibration_run(&c->calibrate, err));
        }
        QC_TRY(check_room(c, err));
        QC_TRY(run_pipeline(c, err));
        QC_TRY(qc_odd_values_tell(&report->values, &c->p, err));
    }
    c->made = 1;
    QC_TRY(qc_part_look_around(part, &c->p, c->resume, &report->complete_meanwhile, err));
    if (report->complete_meanwhile || part->left_count > 0)
        return QC_OK;
    if (part->committing)
        QC_TRY(finish_commit(c, &part->manifest, m, done, err));
    if (*done)
        return QC_OK;
    QC_TRY(qc_promise_check_files(&c->p, err));
    QC_TRY(qc_side_files_stage(&c->d, c->plan, c->device_map, &files, &file_count, err));
    QC_TRY(qc_manifest_make(m, &c->rows, &c->p, files, file_count, err));
    if (c->calibrate.known)
        QC_TRY(qc_manifest_add_calibration(m, c->plan, &c->calibrate.report, err));
    QC_TRY(qc_source_files_check(c->plan, err));
    QC_TRY(qc_manifest_stage(&c->d, m, &digest, err));
    QC_TRY(qc_resume_commit(c->resume, &digest, err));
    *done = 1;
    return qc_output_dir_move(&c->d, err);
}

static qc_status convert(conversion *c, qc_convert_report *report, qc_error *err)
{
    const qc_call *call = c->call;
    const qc_plan *plan = c->plan;
    qc_devices *devices = NULL;
    qc_isa isa;
    qc_manifest m;
    watch w;
    int done = 0;
    unsigned threads = call->threads;
    QC_TRY(qc_isa_select(&isa, err));
    QC_TRY(qc_arena_alloc(call->arena, &devices, 1, sizeof *devices, err));
    QC_TRY(qc_devices_choose(devices, c->part->options->devices, qc_plan_gpu_bytes(plan),
                             call->arena, err));
    if (threads == 0)
        threads = qc_pipeline_default_threads(
            plan->options->compress ? plan->options->compress_level : 0);
    const char *type = plan->recipe->model_type, *why = devices->why;
    qc_console_detail(call, 1,
                      "%zu tensor%s become %" PRIu32 " in %" PRIu32 " shard%s; model type %s%s; "
                      "threads %u, code path %s, quantizing on %s%s%s",
                      plan->model->tensor_count, qc_plural(plan->model->tensor_count),
                      plan->tensor_count, plan->layout.count, qc_plural(plan->layout.count),
                      *type ? type : "not given",
                      plan->recipe->known_type ? "" : " (general rules)", threads, qc_isa_name(isa),
                      devices->text, why ? ": " : "", why ? why : "");
    QC_TRY(qc_pipeline_init(&c->p, plan, &c->d, isa, threads, err));
    c->p.devices = devices;
    const qc_status opened =
        qc_resume_open(&c->resume, &c->p, &c->d, c->part->rank.index, c->part->rank.count, err);
    if (opened == QC_ERR_NOSPACE) /* says how much is missing, as where a little is free */
        QC_TRY(qc_room_check(c->part, &c->d.root, 0, err));
    QC_TRY(opened);
    qc_part_opened(c->part, &c->p, c->resume);
    QC_TRY(qc_calibration_open(&c->calibrate, &c->p, &c->d, err));
    QC_TRY(watch_start(&w, c, err));
    qc_status st = go_on(c, &m, &done, report, err);
    watch_end(&w);
    QC_TRY(st);
    report->found = *qc_resume_found_of(c->resume);
    qc_calibration_tell(&c->calibrate, report);
    fill_part(c, report);
    fill_results(report, &c->p, c->part, done ? &m : NULL);
    return QC_OK;
}

qc_status qc_convert_run(qc_part_run *part, const char *device_map, qc_convert_report *report,
                         qc_error *err)
{
    conversion c = {
        .plan = part->plan, .call = part->plan->call, .device_map = device_map, .part = part};
    int there = 0;
    QC_TRY(qc_part_open(part, &c.d, &there, err));
    if (there) {
        report->complete_before = 1;
        fill_part(&c, report);
        return QC_OK;
    }
    qc_status st = qc_output_ready_for(part, err);
    if (st == QC_OK)
        st = convert(&c, report, err);
    st = qc_source_files_explain(c.plan, st, err);
    unsigned facts = 0;
    facts |= c.d.had_journal ? QC_ENDING_JOURNAL : 0;
    facts |= c.resume ? QC_ENDING_OPENED : 0;
    facts |= c.resume && has_work(&c) ? QC_ENDING_WORK : 0;
    facts |= c.worked ? QC_ENDING_WORKED : 0;
    facts |= c.made && part->rank.count > 1 ? QC_ENDING_PART_MADE : 0;
    facts |= part->left_count > 0 ? QC_ENDING_OTHERS_LEFT : 0;
    const qc_ending ending =
        qc_ending_of(qc_end_of(st, atomic_load(&c.p.misfit) || c.d.lost), facts);
    if (ending.tell && err)
        tell_kept(&c, err);
    qc_strbuf_deinit(&c.rows.name);
    qc_calibration_close(&c.calibrate);
    qc_resume_close(c.resume);
    if (ending.fate == QC_STAGING_LEAVE)
        qc_part_leave(part);
    else if (ending.fate == QC_STAGING_CLOSE)
        qc_part_close(part);
    else
        qc_part_abort(part, &c.p);
    qc_pipeline_deinit(&c.p);
    return st;
}
