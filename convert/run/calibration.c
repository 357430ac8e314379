#include "convert/run/calibration.h"

#include "convert/run/resume.h"
#include "convert/term/console.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what calibrating says of itself, in the store ---- */

/* Writes what a later run cannot know without calibrating again. */
static qc_status write_report(const qc_calibrate_report *r, qc_strbuf *out, qc_error *err)
{
    return qc_strbuf_addf(out, err,
                          "tokens=%" PRIu64 "\nwindows=%" PRIu64 "\ncontext=%" PRIu64
                          "\ndamping=%.17g\nsided=%u\nweights=%" PRIu32 "\nleft=%" PRIu32
                          "\nseconds=%.17g\njudged=%" PRIu64 "\nsearch=%.17g\ncalibrated=%.17g"
                          "\ndigest=%s\ntokenizer=%s\n",
                          r->tokens, r->windows, r->context, r->damping, r->sided, r->weights,
                          r->left, r->seconds, r->judged.tokens, r->judged.search,
                          r->judged.calibrated, r->text_digest, r->tokenizer ? r->tokenizer : "");
}

/* Finds the value of `key`, which goes to the end of its line; NULL if there is none. */
static const char *value_of(const char *text, const char *key)
{
    size_t len = strlen(key);
    for (const char *line = text; line && *line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, key, len) == 0 && line[len] == '=')
            return line + len + 1;
    }
    return NULL;
}

/* Reads the number of `key` into the one of n and x that is not NULL. */
static int read_number(const char *text, const char *key, uint64_t *n, double *x)
{
    const char *v = value_of(text, key);
    char *end = NULL;
    if (!v)
        return 0;
    if (n)
        *n = strtoull(v, &end, 10);
    else
        *x = strtod(v, &end);
    return end != v;
}

/* *known = 0 where it is not what write_report wrote. */
static qc_status read_report(qc_calibrate_report *r, const qc_plan *plan, const char *text,
                             int *known, qc_error *err)
{
    uint64_t weights = 0, left = 0, sided = 0;
    const char *digest = value_of(text, "digest"), *tokenizer = value_of(text, "tokenizer");
    qc_calibrate_report_begin(r, plan);
    *known = read_number(text, "tokens", &r->tokens, NULL) &&
             read_number(text, "windows", &r->windows, NULL) &&
             read_number(text, "context", &r->context, NULL) &&
             read_number(text, "damping", NULL, &r->damping) &&
             read_number(text, "sided", &sided, NULL) && (sided == 1 || sided == 2) &&
             read_number(text, "weights", &weights, NULL) &&
             read_number(text, "left", &left, NULL) &&
             read_number(text, "seconds", NULL, &r->seconds) &&
             read_number(text, "judged", &r->judged.tokens, NULL) &&
             read_number(text, "search", NULL, &r->judged.search) &&
             read_number(text, "calibrated", NULL, &r->judged.calibrated) && digest && tokenizer &&
             strcspn(digest, "\n") < sizeof r->text_digest;
    if (!*known)
        return QC_OK;
    r->sided = (unsigned)sided;
    r->weights = (uint32_t)weights;
    r->left = (uint32_t)left;
    memcpy(r->text_digest, digest, strcspn(digest, "\n"));
    return qc_arena_strndup(plan->call->arena, &r->tokenizer, tokenizer, strcspn(tokenizer, "\n"),
                            err);
}

/* ---- the stage ---- */

/* Writes what the store's weights were made for: this conversion, calibrated in this way. */
static qc_status store_identity(const char **out, const qc_plan *plan, qc_error *err)
{
    const char *calibration = NULL;
    char hex[QC_DIGEST_HEX_BYTES];
    qc_strbuf all;
    QC_TRY(qc_calibrate_identity(&calibration, plan, err));
    qc_strbuf_init(&all, SIZE_MAX / 2);
    qc_status st = qc_identity_make(&all, plan, 1, err);
    qc_digest digest = qc_digest_bytes(all.data, all.len);
    qc_strbuf_deinit(&all);
    QC_TRY(st);
    qc_digest_hex(&digest, hex);
    return qc_arena_printf(plan->arena, out, err, "conversion=%s\ncalibration=%s", hex,
                           calibration);
}

qc_status qc_calibration_open(qc_calibration *s, qc_pipeline *p, qc_output_dir *d, qc_error *err)
{
    const char *identity = NULL;
    uint32_t lost = 0;
    *s = QC_CALIBRATION_NONE;
    s->plan = p->plan;
    if (!qc_calibrates(&p->plan->options->calibrate))
        return QC_OK;
    QC_TRY(store_identity(&identity, p->plan, err));
    QC_TRY(qc_calibrated_open(&s->store, p->plan, d, identity, &s->kept, err));
    p->calibrated = s->store;
    const char *text = qc_calibrated_done(s->store, &lost);
    if (text)
        QC_TRY(read_report(&s->report, p->plan, text, &s->known, err));
    if (s->kept > 0 || lost > 0)
        qc_console_detail(p->plan->call, 1,
                          "%" PRIu32 " weights were calibrated before%s, and %" PRIu32
                          " of them were damaged since",
                          s->kept, text ? ", which was all" : "", lost);
    return QC_OK;
}

int qc_calibration_is_due(const qc_calibration *s, const qc_pipeline *p)
{
    uint32_t lost = 0;
    if (!s->store)
        return 0;
    if (!qc_calibrated_done(s->store, &lost) || !s->known)
        return 1;
    for (uint32_t i = 0; lost > 0 && i < p->plan->job_count; i++) {
        if (qc_calibrated_is_lost(s->store, i) && !p->jobs[i].kept)
            return 1;
    }
    return 0;
}

uint64_t qc_calibration_room(const qc_calibration *s, const qc_pipeline *p)
{
    return qc_calibration_is_due(s, p) ? qc_calibrated_bytes(s->plan, s->store) : 0;
}

qc_status qc_calibration_run(qc_calibration *s, const qc_pipeline *p, qc_error *err)
{
    qc_strbuf text;
    if (!qc_calibration_is_due(s, p))
        return QC_OK;
    memset(&s->report, 0, sizeof s->report);
    QC_TRY(qc_calibrate_run(&s->report, s->plan, s->store, err));
    qc_strbuf_init(&text, (size_t)1 << 16);
    qc_status st = write_report(&s->report, &text, err);
    if (st == QC_OK)
        st = qc_calibrated_set_done(s->store, text.data, err);
    qc_strbuf_deinit(&text);
    s->known = st == QC_OK;
    return st;
}

uint32_t qc_calibration_count(const qc_calibration *s)
{
    return s->store ? qc_calibrated_count(s->store) : 0;
}

void qc_calibration_tell(const qc_calibration *s, const qc_pipeline *p, qc_convert_report *report)
{
    qc_manifest_outputs sums = {0, 0};
    uint32_t count = 0;
    if (!s->known)
        return;
    for (uint32_t i = 0; i < p->plan->job_count; i++) {
        if (p->jobs[i].outputs.rounded > 0) {
            sums.rounded += p->jobs[i].outputs.rounded;
            sums.calibrated += p->jobs[i].outputs.calibrated;
            count++;
        }
    }
    report->calibration = s->report;
    report->calibration.weights = count;
    if (count > 0)
        report->outputs = (qc_manifest_outputs){sums.rounded / count, sums.calibrated / count};
}

void qc_calibration_close(qc_calibration *s)
{
    qc_calibrated_close(s->store);
    s->store = NULL;
}
