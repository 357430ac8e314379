#include "convert/run/calibration.h"

#include "convert/run/resume.h"
#include "convert/term/console.h"
#include "formats/json_rows.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what calibrating says of itself, in the store ---- */

/* What a later run cannot know without calibrating again: a line "key=value" for each row, then the
 * digest of the text and the kind of its tokenizer. */
static const qc_json_row report_rows[] = {
    QC_JSON_ROW(qc_calibrate_report, tokens, U64, 0),
    QC_JSON_ROW(qc_calibrate_report, windows, U64, 0),
    QC_JSON_ROW(qc_calibrate_report, context, U64, 0),
    QC_JSON_ROW(qc_calibrate_report, damping, DOUBLE, 0),
    QC_JSON_ROW(qc_calibrate_report, sided, U32, 0),
    QC_JSON_ROW(qc_calibrate_report, weights, U32, 0),
    QC_JSON_ROW(qc_calibrate_report, left, U32, 0),
    QC_JSON_ROW(qc_calibrate_report, seconds, DOUBLE, 0),
    QC_JSON_ROW_AS("judged", qc_calibrate_report, judged.tokens, U64, 0),
    QC_JSON_ROW_AS("search", qc_calibrate_report, judged.search, DOUBLE, 0),
    QC_JSON_ROW_AS("calibrated", qc_calibrate_report, judged.calibrated, DOUBLE, 0),
    {NULL},
};

static qc_status write_report(const qc_calibrate_report *r, qc_strbuf *out, qc_error *err)
{
    for (const qc_json_row *row = report_rows; row->name; row++) {
        const void *v = (const unsigned char *)r + row->offset;
        if (row->kind == QC_ROW_DOUBLE)
            qc_strbuf_putf(out, "%s=%.17g\n", row->name, *(const double *)v);
        else
            qc_strbuf_putf(out, "%s=%" PRIu64 "\n", row->name,
                           row->kind == QC_ROW_U64 ? *(const uint64_t *)v : *(const uint32_t *)v);
    }
    qc_strbuf_putf(out, "digest=%s\ntokenizer=%s\n", r->text_digest,
                   r->tokenizer ? r->tokenizer : "");
    return qc_strbuf_status(out, err);
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

/* *known = 0 where it is not what write_report wrote. */
static qc_status read_report(qc_calibrate_report *r, const qc_plan *plan, const char *text,
                             int *known, qc_error *err)
{
    const char *digest = value_of(text, "digest"), *tokenizer = value_of(text, "tokenizer");
    *known = 0;
    qc_calibrate_report_begin(r, plan);
    for (const qc_json_row *row = report_rows; row->name; row++) {
        const char *v = value_of(text, row->name);
        void *to = (unsigned char *)r + row->offset;
        char *end = NULL;
        if (!v)
            return QC_OK;
        if (row->kind == QC_ROW_DOUBLE)
            *(double *)to = strtod(v, &end);
        else if (row->kind == QC_ROW_U64)
            *(uint64_t *)to = strtoull(v, &end, 10);
        else
            *(uint32_t *)to = (uint32_t)strtoul(v, &end, 10);
        if (end == v)
            return QC_OK;
    }
    if (!digest || !tokenizer || strcspn(digest, "\n") >= sizeof r->text_digest ||
        (r->sided != 1 && r->sided != 2))
        return QC_OK;
    *known = 1;
    memcpy(r->text_digest, digest, strcspn(digest, "\n"));
    return qc_arena_strndup(plan->call->arena, &r->tokenizer, tokenizer, strcspn(tokenizer, "\n"),
                            err);
}

/* ---- the stage ---- */

qc_status qc_calibration_open(qc_calibration *s, qc_pipeline *p, qc_output_dir *d, qc_error *err)
{
    const qc_plan *plan = p->plan;
    const char *calibration = NULL, *identity = NULL;
    char hex[QC_DIGEST_HEX_BYTES];
    qc_strbuf all;
    uint32_t kept = 0, lost = 0;
    *s = QC_CALIBRATION_NONE;
    s->p = p;
    if (!qc_calibrates(&plan->options->calibrate))
        return QC_OK;
    /* What the store's weights were made for: this conversion, calibrated in this way. */
    QC_TRY(qc_calibrate_identity(&calibration, plan, err));
    qc_strbuf_init(&all, SIZE_MAX / 2);
    qc_status st = qc_identity_make(&all, plan, 1, err);
    qc_digest digest = qc_digest_bytes(all.data, all.len);
    qc_strbuf_deinit(&all);
    QC_TRY(st);
    qc_digest_hex(&digest, hex);
    QC_TRY(qc_arena_printf(plan->arena, &identity, err, "conversion=%s\ncalibration=%s", hex,
                           calibration));
    QC_TRY(qc_calibrated_open(&s->store, plan, d, identity, &kept, err));
    p->calibrated = s->store;
    const char *text = qc_calibrated_done(s->store, &lost);
    if (text)
        QC_TRY(read_report(&s->report, plan, text, &s->known, err));
    if (kept > 0 || lost > 0)
        qc_console_detail(plan->call, 1,
                          "%" PRIu32 " weights were calibrated before%s, and %" PRIu32
                          " of them were damaged since",
                          kept, text ? ", which was all" : "", lost);
    return QC_OK;
}

int qc_calibration_is_due(const qc_calibration *s)
{
    uint32_t lost = 0;
    if (!s->store)
        return 0;
    if (!qc_calibrated_done(s->store, &lost) || !s->known)
        return 1;
    for (uint32_t i = 0; lost > 0 && i < s->p->plan->job_count; i++) {
        if (qc_calibrated_is_lost(s->store, i) && !s->p->jobs[i].kept)
            return 1;
    }
    return 0;
}

uint64_t qc_calibration_room(const qc_calibration *s)
{
    return qc_calibration_is_due(s) ? qc_calibrated_bytes(s->p->plan, s->store) : 0;
}

qc_status qc_calibration_run(qc_calibration *s, qc_error *err)
{
    qc_strbuf text;
    memset(&s->report, 0, sizeof s->report);
    QC_TRY(qc_calibrate_run(&s->report, s->p->plan, s->store, err));
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

void qc_calibration_tell(const qc_calibration *s, qc_convert_report *report)
{
    qc_manifest_outputs sums = {0, 0};
    uint32_t count = 0;
    if (!s->known)
        return;
    for (uint32_t i = 0; i < s->p->plan->job_count; i++) {
        const qc_feedback_result *found = &s->p->jobs[i].outputs;
        if (found->rounded > 0) {
            sums.rounded += found->rounded;
            sums.calibrated += found->calibrated;
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
