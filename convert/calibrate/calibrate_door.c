#include "convert/calibrate/calibrate_door.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "base/workers.h"
#include "convert/calibrate/calibrate_engine.h"
#include "convert/calibrate/calibrate_moments.h"
#include "convert/calibrate/door_line.h"
#include "formats/digest.h"
#include "formats/file_io.h"
#include "formats/json_writer.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define PREFIX         "fd:"
#define HELLO_VERSION  1u
#define TOKENIZER_MOST 128u
/* What outputs are expected to count together in, for what is said before the moments are there. */
#define BLOCK 1024u

struct qc_door {
    qc_door_line line;
    const char *identity;
    qc_calibrate_report report; /* as the hello gives it */
};

/* ---- the hello ---- */

static qc_status bad(const qc_door *d, qc_error *err, const char *expected)
{
    QC_FAIL(err, QC_ERR_INPUT, "--hessians %s: expected %s", d->line.name, expected);
}

/* Copies a member that is one line of text; *out is NULL where it is missing or null. */
static qc_status take_line(const qc_door *d, qc_arena *arena, const char **out,
                           const qc_json_node *of, const char *key, qc_error *err)
{
    const qc_json_node *n = qc_json_get(of, key);
    const char *s = NULL;
    *out = NULL;
    if (!n || qc_json_kind_of(n) == QC_JSON_NULL)
        return QC_OK;
    qc_status st = qc_json_as_string(n, key, &s, err);
    if (st != QC_OK) {
        qc_error_prefix(err, "--hessians %s", d->line.name);
        return st;
    }
    if (!*s || strpbrk(s, "\r\n"))
        QC_FAIL(err, QC_ERR_INPUT, "--hessians %s: %s: expected one line of text", d->line.name,
                key);
    return qc_arena_strdup(arena, out, s, err);
}

static qc_status take_number(const qc_door *d, uint64_t *out, const qc_json_node *of,
                             const char *key, qc_error *err)
{
    const qc_json_node *n = qc_json_get(of, key);
    if (!n)
        return QC_OK;
    qc_status st = qc_json_as_u64(n, key, out, err);
    if (st != QC_OK)
        qc_error_prefix(err, "--hessians %s", d->line.name);
    return st;
}

/* A number of 0 or more, which stays what it is where it is missing. */
static qc_status take_real(const qc_door *d, double *out, const qc_json_node *of, const char *key,
                           qc_error *err)
{
    const qc_json_node *n = qc_json_get(of, key);
    if (n && (qc_json_as_double(n, key, out, NULL) != QC_OK || !(*out >= 0)))
        QC_FAIL(err, QC_ERR_INPUT, "--hessians %s: %s: expected a number of 0 or more",
                d->line.name, key);
    return QC_OK;
}

static qc_status take_report(qc_door *d, qc_arena *arena, const qc_json_node *r, qc_error *err)
{
    qc_calibrate_report *h = &d->report;
    const char *text_digest = NULL;
    uint64_t sided = 1;
    qc_digest digest;
    QC_TRY(take_line(d, arena, &h->text, r, "text", err));
    QC_TRY(take_line(d, arena, &h->hessians, r, "hessians", err));
    QC_TRY(take_line(d, arena, &text_digest, r, "text_digest", err));
    QC_TRY(take_line(d, arena, &h->tokenizer, r, "tokenizer", err));
    QC_TRY(take_number(d, &h->tokens, r, "tokens", err));
    QC_TRY(take_number(d, &h->windows, r, "windows", err));
    QC_TRY(take_number(d, &h->context, r, "context", err));
    QC_TRY(take_number(d, &sided, r, "sided", err));
    QC_TRY(take_real(d, &h->mix, r, "mix", err));
    QC_TRY(take_real(d, &h->relative_rank, r, "relative_rank", err));
    if (!h->text == !h->hessians)
        return bad(d, err, "a report with either \"text\" or \"hessians\"");
    if (h->text && (!h->tokenizer || strlen(h->tokenizer) > TOKENIZER_MOST || !text_digest ||
                    qc_digest_from_hex(&digest, text_digest) != 0))
        return bad(d, err,
                   "a report with the \"tokenizer\" of the text and a \"text_digest\" of 32 "
                   "hexadecimal digits");
    if (sided != 1 && sided != 2)
        return bad(d, err, "\"sided\" to be 1 or 2");
    h->sided = (unsigned)sided;
    if (text_digest)
        (void)snprintf(h->text_digest, sizeof h->text_digest, "%s", text_digest);
    return QC_OK;
}

static qc_status take_hello(qc_door *d, qc_arena *arena, qc_error *err)
{
    qc_json *doc = NULL;
    const char *identity = NULL;
    QC_TRY(qc_door_line_read(&d->line, &doc, err));
    const qc_json_node *root = qc_json_root(doc);
    uint64_t version = 0;
    qc_status st = QC_OK;
    if (qc_json_as_u64(qc_json_get(root, "hello"), "hello", &version, NULL) != QC_OK ||
        version != HELLO_VERSION ||
        qc_json_as_string(qc_json_get(root, "identity"), "identity", &identity, NULL) != QC_OK ||
        qc_json_expect(qc_json_get(root, "report"), QC_JSON_OBJECT, "report", NULL) != QC_OK)
        st = bad(d, err, "a first line {\"hello\": 1, \"identity\": TEXT, \"report\": {...}}");
    if (st == QC_OK)
        st = qc_arena_strdup(arena, &d->identity, identity, err);
    if (st == QC_OK)
        st = take_report(d, arena, qc_json_get(root, "report"), err);
    qc_json_destroy(doc);
    return st;
}

/* The number behind "fd:", or -1. */
static int descriptor_of(const char *path)
{
    const char *s = path + strlen(PREFIX);
    int fd = 0;
    if (!*s || strlen(s) > 6)
        return -1;
    for (; *s; s++) {
        if (*s < '0' || *s > '9')
            return -1;
        fd = fd * 10 + (*s - '0');
    }
    return fd;
}

qc_status qc_door_open(qc_door **out, qc_arena *arena, const char *path, qc_error *err)
{
    qc_door *d = NULL;
    *out = NULL;
    if (!path || !qc_begins_with(path, PREFIX))
        return QC_OK;
    QC_TRY(qc_arena_alloc(arena, &d, 1, sizeof *d, err));
    qc_status st = qc_door_line_open(&d->line, path, descriptor_of(path), err);
    if (st == QC_OK)
        st = take_hello(d, arena, err);
    if (st != QC_OK)
        qc_door_line_close(&d->line);
    else
        *out = d;
    return st;
}

void qc_door_close(qc_door *d)
{
    if (d)
        qc_door_line_close(&d->line);
}

const char *qc_door_identity(const qc_door *d)
{
    return d->identity;
}

const qc_calibrate_report *qc_door_report(const qc_door *d)
{
    return &d->report;
}

/* ---- a phase ---- */

typedef struct {
    qc_door *d;
    qc_calibrator *k;
    qc_moments m;
    int over;
} phase;

/* Ends the members that say which weight it is. */
static void write_weight(const phase *p, qc_json_writer *w, uint32_t number)
{
    const qc_plan *plan = p->k->plan;
    uint32_t matrix;
    const uint32_t job = qc_calibrated_job(plan, number, &matrix);
    qc_json_begin_row(w, NULL);
    qc_json_put_text(w, "name", plan->jobs[job].name);
    if (number < plan->job_count)
        return;
    qc_json_put_u64(w, "matrix", matrix);
    qc_json_put_u64(w, "matrices", qc_calibrated_matrices(plan, job));
}

static qc_status send_line(const phase *p, qc_json_writer *w, qc_error *err)
{
    qc_json_end(w);
    qc_status st = qc_json_write_finish(w);
    if (st == QC_OK)
        st = qc_strbuf_adds(w->out, "\n", err);
    return st == QC_OK ? qc_door_line_write(&p->d->line, w->out, err) : st;
}

static void begin_line(qc_json_writer *w, qc_strbuf *out, qc_error *err)
{
    qc_strbuf_init(out, (size_t)1 << 30);
    qc_json_write_init(w, out, err);
    qc_json_begin_row(w, NULL);
}

/* May the other side have it solved? */
static int is_offered(const phase *p, const qc_moments_name *n)
{
    const qc_plan *plan = p->k->plan;
    return qc_calibrated_takes(plan, n->number) &&
           qc_scheme_is_quantized(qc_calibrated_weight(plan, n->number).scheme);
}

static int is_made(const phase *p, uint32_t number)
{
    return p->k->store && qc_calibrated_has(p->k->store, number);
}

static void write_offer(const phase *p, qc_json_writer *w, const qc_moments_name *n)
{
    const qc_job j = qc_calibrated_weight(p->k->plan, n->number);
    write_weight(p, w, n->number);
    qc_json_put_text(w, "module", n->module);
    qc_json_put_u64(w, "rows", j.rows);
    qc_json_put_u64(w, "cols", j.form.cols);
    qc_json_put_bool(w, "turned", j.entry->transpose);
    qc_json_put_bool(w, "made", is_made(p, n->number));
    if (is_made(p, n->number))
        qc_json_put_bool(w, "searched", qc_calibrated_is_searched(p->k->store, n->number));
    qc_json_end(w);
}

/* Tells the other side what there is to do. */
static qc_status send_phase(phase *p, const qc_calibrate_outlook *ahead, qc_error *err)
{
    qc_json_writer w;
    qc_strbuf out;
    begin_line(&w, &out, err);
    qc_json_put_text(&w, "phase", p->k->costs ? "weigh" : p->k->store ? "calibrate" : "dry-run");
    qc_json_put_number(&w, "seconds", ahead->seconds);
    qc_json_put_number(&w, "operations", ahead->operations);
    qc_json_put_u64(&w, "memory", ahead->memory);
    qc_json_put_u64(&w, "device_memory", ahead->device_memory);
    qc_json_put_u64(&w, "disk", ahead->disk);
    qc_json_begin_list(&w, "weights");
    for (uint32_t i = 0; i < p->m.name_count; i++)
        if (is_offered(p, &p->m.names[i]))
            write_offer(p, &w, &p->m.names[i]);
    qc_json_end(&w);
    qc_status st = send_line(p, &w, err);
    qc_strbuf_deinit(&out);
    return st;
}

/* Weights of one folder with as many columns are taken to have the same inputs. */
static int is_first_of_inputs(const phase *p, const qc_moments_name *before,
                              const qc_moments_name *n)
{
    const char *dot = strrchr(n->module, '.');
    const size_t len = dot ? (size_t)(dot - n->module) : 0;
    return !before ||
           qc_calibrated_weight(p->k->plan, before->number).form.cols !=
               qc_calibrated_weight(p->k->plan, n->number).form.cols ||
           strncmp(before->module, n->module, len) != 0 || strchr(n->module, '[');
}

/* Before there are moments, what they will take is estimated. */
static void look_ahead(const phase *p, qc_calibrate_outlook *a)
{
    const qc_moments_name *before = NULL;
    const int two = p->d->report.sided == 2;
    *a = (qc_calibrate_outlook){.disk =
                                    p->k->costs ? 0 : qc_calibrated_bytes(p->k->plan, p->k->store)};
    for (uint32_t i = 0; i < p->m.name_count; i++) {
        const qc_moments_name *n = &p->m.names[i];
        if (!is_offered(p, n) || !qc_calibrate_needs(p->k, n->number))
            continue;
        const uint64_t rows = qc_calibrated_weight(p->k->plan, n->number).rows;
        const uint64_t block = two ? qc_min_u64(rows, BLOCK) : 0;
        const qc_calibrate_one one = {.number = n->number,
                                      .cross = !p->k->costs,
                                      .block = block,
                                      .outputs_bytes = qc_sat_mul(rows, block * sizeof(float))};
        qc_calibrate_one_ahead(p->k, &one, is_first_of_inputs(p, before, n), a);
        a->weights++;
        before = n;
    }
}

/* ---- values of weights, for the other side's forward pass ---- */

/* This much is written at a time, or one row where that is more. */
#define PIECE_BYTES ((uint64_t)4 << 20)

/* A file of float32, as a reader of the output gets them, one weight after the other. A weight lies
 * as its tensor does in the checkpoint. */
typedef struct {
    qc_file file;
    uint64_t bytes; /* written so far, where the next weight begins */
} values_file;

static qc_status put_floats(values_file *v, const float *x, uint64_t n, qc_error *err)
{
    const size_t bytes = (size_t)n * sizeof *x;
    QC_TRY(qc_file_pwrite(&v->file, x, bytes, v->bytes, err));
    v->bytes += bytes;
    return QC_OK;
}

/* room: for `rows` rows of the weight. */
static qc_status put_rows(values_file *v, const qc_calibrator *k, const qc_weights *w,
                          uint64_t rows, float *room, qc_error *err)
{
    const uint64_t cols = w->form.cols;
    for (uint64_t first = 0; first < w->rows; first += rows) {
        const uint64_t now = qc_min_u64(rows, w->rows - first);
        QC_TRY(qc_check_interrupted(err));
        for (uint64_t r = 0; r < now; r++)
            qc_weights_row(k->ops, w, first + r, room + r * cols);
        QC_TRY(put_floats(v, room, now * cols, err));
    }
    return QC_OK;
}

/* The tensor lies as [cols, rows]. room: a row, and behind it the whole weight. */
static qc_status put_turned(values_file *v, const qc_calibrator *k, const qc_weights *w,
                            float *room, qc_error *err)
{
    const uint64_t cols = w->form.cols;
    float *all = room + cols;
    for (uint64_t r = 0; r < w->rows; r++) {
        qc_weights_row(k->ops, w, r, room);
        for (uint64_t c = 0; c < cols; c++)
            all[c * w->rows + r] = room[c];
    }
    return put_floats(v, all, w->rows * cols, err);
}

static qc_status put_arrays(values_file *v, const qc_calibrator *k, const qc_job *j,
                            const qc_calibrated_arrays *a, qc_error *err)
{
    qc_weights w = {.form = j->form, .rows = j->rows, .codes = a->codes, .absmax = a->absmax};
    const int turned = j->entry->transpose;
    const uint64_t row = j->form.cols * sizeof(float);
    const uint64_t rows = turned ? j->rows + 1 : qc_max_u64(1, PIECE_BYTES / row);
    float *room = NULL;
    size_t size = 0;
    w.form.nested = 0; /* absmax holds the scales as a reader has them */
    if (qc_u64_to_size(qc_sat_mul(rows, row), &size))
        QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s' is too large", j->name);
    QC_TRY(qc_malloc_aligned(&room, 64, size, err));
    const qc_status st =
        turned ? put_turned(v, k, &w, room, err) : put_rows(v, k, &w, rows, room, err);
    qc_free(room);
    return st;
}

/* Puts a weight, or a matrix of a stack by itself. searched: as --scale search makes it, instead of
 * as the store has it. */
static qc_status put_weight(values_file *v, qc_calibrator *k, uint32_t number, int searched,
                            qc_error *err)
{
    const qc_job j = qc_calibrated_weight(k->plan, number);
    qc_calibrated_arrays a = {0};
    float *w = NULL;
    qc_status st = qc_calibrated_alloc(&a, k->plan, number, err);
    if (st == QC_OK && searched)
        st = qc_calibrated_original(&w, &k->reader, k->plan, number, err);
    if (st == QC_OK)
        st = searched ? qc_calibrate_search(k, number, w, &a, err)
                      : qc_calibrated_get(k->store, number, &a, err);
    if (st == QC_OK)
        st = put_arrays(v, k, &j, &a, err);
    qc_free(w);
    qc_calibrated_free(&a);
    return st;
}

/* ---- requests ---- */

static qc_status find_weight(const phase *p, const qc_json_node *n, int searched, uint32_t *number,
                             qc_error *err)
{
    const qc_plan *plan = p->k->plan;
    const char *name = qc_json_string_or(qc_json_get(n, "name"), "");
    uint64_t matrix = 0;
    for (uint32_t job = 0; job < plan->job_count; job++) {
        const uint32_t count = qc_calibrated_matrices(plan, job);
        if (strcmp(plan->jobs[job].name, name) != 0)
            continue;
        if (count > 0 && qc_json_as_u64(qc_json_get(n, "matrix"), "matrix", &matrix, NULL) != QC_OK)
            break;
        *number = count > 0 ? plan->first_matrix[job] + (uint32_t)matrix : job;
        if (matrix < (count > 0 ? count : 1) && (searched || is_made(p, *number)))
            return QC_OK;
        break;
    }
    QC_FAIL(err, QC_ERR_INPUT,
            "--hessians %s: \"values\" asks for a weight that is not made: '%.200s'",
            p->d->line.name, name);
}

/* Closes the file, and sends the answer where all went well. */
static qc_status finish_answer(const phase *p, qc_json_writer *w, values_file *v, qc_status st,
                               qc_error *err)
{
    const qc_status closed =
        v->file.fd < 0 ? QC_OK : qc_file_close(&v->file, st == QC_OK ? err : NULL);
    st = st == QC_OK ? closed : st;
    if (st == QC_OK)
        st = send_line(p, w, err);
    qc_strbuf_deinit(w->out);
    return st;
}

/* {"values": [{"name", "matrix"?}, ...], "to": PATH, "searched": true?} */
static qc_status answer_values(phase *p, const qc_json_node *request, qc_error *err)
{
    const qc_json_node *list = qc_json_get(request, "values");
    const char *path = qc_json_string_or(qc_json_get(request, "to"), NULL);
    const int searched = qc_json_bool_or(qc_json_get(request, "searched"), 0);
    values_file v = {.file = QC_FILE_CLOSED};
    qc_json_writer w;
    qc_strbuf out;
    if (!p->k->store)
        return bad(p->d, err, "\"values\" in the phase \"calibrate\" only");
    if (qc_json_kind_of(list) != QC_JSON_ARRAY || !path)
        return bad(p->d, err, "{\"values\": [{\"name\": NAME}, ...], \"to\": PATH}");
    begin_line(&w, &out, err);
    qc_json_begin_list(&w, "values");
    qc_status st = qc_file_create(&v.file, path, err);
    for (const qc_json_node *n = qc_json_first(list); st == QC_OK && n; n = qc_json_next(n)) {
        uint32_t number = 0;
        st = find_weight(p, n, searched, &number, err);
        write_weight(p, &w, number);
        qc_json_put_u64(&w, "offset", v.bytes);
        qc_json_end(&w);
        if (st == QC_OK)
            st = put_weight(&v, p->k, number, searched, err);
    }
    qc_json_end(&w);
    return finish_answer(p, &w, &v, st, err);
}

/* Answers with what was solved, and writes its values to path unless that is NULL. */
static qc_status send_solved(const phase *p, const char *path, qc_error *err)
{
    values_file v = {.file = QC_FILE_CLOSED};
    qc_json_writer w;
    qc_strbuf out;
    begin_line(&w, &out, err);
    qc_json_begin_list(&w, "solved");
    qc_status st = path ? qc_file_create(&v.file, path, err) : QC_OK;
    for (uint32_t i = 0; st == QC_OK && p->k->store && i < p->m.count; i++) {
        const uint32_t number = p->m.pairs[i].number;
        const qc_feedback_result r = qc_calibrated_result(p->k->store, number);
        write_weight(p, &w, number);
        if (path)
            qc_json_put_u64(&w, "offset", v.bytes);
        qc_json_put_number(&w, "rounded", r.rounded);
        qc_json_put_number(&w, "calibrated", r.calibrated);
        qc_json_end(&w);
        if (path)
            st = put_weight(&v, p->k, number, 0, err);
    }
    qc_json_end(&w);
    qc_json_begin_list(&w, "left");
    for (uint32_t i = 0; i < p->m.left_count; i++) {
        const unsigned known = p->m.known[p->m.left[i]];
        write_weight(p, &w, p->m.left[i]);
        qc_json_put_text(&w, "why", known & QC_MOMENTS_FEW ? "few tokens" : "not quantized");
        qc_json_end(&w);
    }
    qc_json_end(&w);
    return finish_answer(p, &w, &v, st, err);
}

/* {"solve": PATH, "values": PATH or null, "tokens": N?} */
static qc_status answer_solve(phase *p, const qc_json_node *request, qc_error *err)
{
    const char *path = qc_json_string_or(qc_json_get(request, "solve"), NULL);
    const qc_json_node *values = qc_json_get(request, "values");
    const char *to = qc_json_string_or(values, NULL);
    qc_calibrator *k = p->k;
    qc_calibrate_outlook ahead;
    int outputs = 0;
    if (!k->store && !k->costs)
        return bad(p->d, err, "no \"solve\" in the phase \"dry-run\"");
    if (!path || (values && !to && qc_json_kind_of(values) != QC_JSON_NULL))
        return bad(p->d, err, "{\"solve\": PATH, \"values\": PATH or null}");
    QC_TRY(qc_moments_open(&p->m, path, 1, err));
    for (uint32_t i = 0; i < qc_hessians_count(p->m.h); i++)
        outputs |= qc_hessians_outputs_of(p->m.h, i).blocks > 0;
    if (p->d->report.sided == 1 && outputs)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: it has second moments of outputs, but the hello on --hessians %s says that "
                "\"sided\" is 1",
                path, p->d->line.name);
    if (k->costs) {
        k->r->tokens = p->m.tokens;
        QC_TRY(take_number(p->d, &k->r->tokens, request, "tokens", err));
    }
    qc_moments_ahead(&p->m, &ahead);
    QC_TRY(qc_calibrate_check_room(k, &ahead, err));
    QC_TRY(qc_moments_run(&p->m, err));
    QC_TRY(send_solved(p, to, err));
    qc_moments_close(&p->m);
    return QC_OK;
}

/* {"end": {"left": WHY?, "judged": {"tokens": N, "search": X, "calibrated": X}?}} */
static qc_status take_end(phase *p, const qc_json_node *request, qc_error *err)
{
    const qc_json_node *end = qc_json_get(request, "end");
    const char *why = NULL;
    if (qc_json_kind_of(end) != QC_JSON_OBJECT)
        return bad(p->d, err, "{\"end\": {...}}");
    QC_TRY(take_line(p->d, &p->k->arena, &why, end, "left", err));
    const qc_json_node *judged = qc_json_get(end, "judged");
    QC_TRY(take_number(p->d, &p->k->r->judged.tokens, judged, "tokens", err));
    QC_TRY(take_real(p->d, &p->k->r->judged.search, judged, "search", err));
    QC_TRY(take_real(p->d, &p->k->r->judged.calibrated, judged, "calibrated", err));
    p->over = 1;
    if (!p->k->store) /* nothing was solved that could be missed */
        return QC_OK;
    return qc_moments_tell_left(&p->m,
                                why ? why : "as there were no second moments of their inputs", err);
}

static qc_status run(phase *p, qc_error *err)
{
    qc_calibrator *k = p->k;
    const unsigned sided = p->d->report.sided;
    qc_calibrate_outlook ahead;
    if (k->o->calibrate.sided > 0 && k->o->calibrate.sided != sided)
        QC_FAIL(err, QC_ERR_USAGE,
                "--sided says otherwise than the hello on --hessians %s, where \"sided\" is %u",
                p->d->line.name, sided);
    if (sided == 2)
        k->feedback.sweeps = QC_FEEDBACK_SWEEPS_TWO_SIDED;
    if (k->costs)
        k->feedback.sweeps = 0;
    QC_TRY(qc_moments_begin(&p->m, k, err));
    QC_TRY(k->engine->ops->measure(k->engine, &k->speed, err));
    look_ahead(p, &ahead);
    QC_TRY(qc_calibrate_check_room(k, &ahead, err));
    QC_TRY(send_phase(p, &ahead, err));
    while (!p->over) {
        qc_json *doc = NULL;
        QC_TRY(qc_door_line_read(&p->d->line, &doc, err));
        const qc_json_node *request = qc_json_root(doc);
        const qc_status st = qc_json_get(request, "solve")    ? answer_solve(p, request, err)
                             : qc_json_get(request, "values") ? answer_values(p, request, err)
                             : qc_json_get(request, "end")
                                 ? take_end(p, request, err)
                                 : bad(p->d, err, "a line with \"solve\", \"values\" or \"end\"");
        qc_json_destroy(doc);
        QC_TRY(st);
    }
    return QC_OK;
}

qc_status qc_calibrate_from_door(qc_calibrator *k, qc_error *err)
{
    phase p = {.d = k->o->calibrate.door, .k = k};
    p.m.k = k;
    qc_status st = run(&p, err);
    qc_moments_close(&p.m);
    return st;
}
