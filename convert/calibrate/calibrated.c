#include "convert/calibrate/calibrated.h"

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/checked.h"
#include "base/float_bits.h"
#include "base/workers.h"
#include "formats/journal.h"
#include "quant/quant_ops.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

/* Types of records in the journal of a store. Values are pinned: append only.
 *   IDENTITY  text; first of all
 *   WEIGHT    u32 job, f32 offset of its scales, f64 and f64 the two errors, then the digests of
 *             its pieces. The last one of a job counts
 *   DONE      text of qc_calibrated_set_done
 * A weight's bytes lie one after the other: codes, then its scales, or their codes and the scales
 * of those. */
enum { RECORD_IDENTITY = 1, RECORD_WEIGHT = 2, RECORD_DONE = 3 };

#define STORE_FORMAT      2
#define PIECE_BYTES       ((uint64_t)64 << 10)
#define ALIGN_BYTES       ((uint64_t)4096) /* of a weight in the file */
#define WEIGHT_HEAD_BYTES 24u
#define DONE_MOST         ((size_t)1 << 20)

typedef struct {
    uint64_t place;      /* in the file */
    qc_digest *pieces;   /* NULL: it was never recorded */
    float offset;        /* added to its double quantized scales */
    atomic_uchar held;   /* recorded, and its bytes are there */
    unsigned char is_of; /* qc_calibrated_takes */
    unsigned char lost;
    qc_feedback_result result;
} stored_weight;

struct qc_calibrated {
    const qc_plan *plan;
    const char *path; /* path of the file */
    qc_file file;
    qc_journal *journal;
    stored_weight *weights; /* per job */
    qc_strbuf identity;
    char *done;
    uint32_t lost;
    int has_identity;
};

/* ---- numbers ---- */

uint32_t qc_calibrated_numbers(const qc_plan *plan)
{
    return plan->first_matrix ? plan->first_matrix[plan->job_count] : plan->job_count;
}

uint32_t qc_calibrated_matrices(const qc_plan *plan, uint32_t job)
{
    return plan->first_matrix && job < plan->job_count
               ? plan->first_matrix[job + 1] - plan->first_matrix[job]
               : 0;
}

uint32_t qc_calibrated_job(const qc_plan *plan, uint32_t number, uint32_t *matrix)
{
    uint32_t low = 0, high = plan->job_count; /* the last job whose first is not above number */
    *matrix = 0;
    if (number < plan->job_count)
        return number;
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        if (plan->first_matrix[middle] <= number)
            low = middle;
        else
            high = middle;
    }
    *matrix = number - plan->first_matrix[low];
    return low;
}

qc_job qc_calibrated_weight(const qc_plan *plan, uint32_t number)
{
    uint32_t matrix;
    const uint32_t job = qc_calibrated_job(plan, number, &matrix);
    qc_job j = plan->jobs[job];
    if (number < plan->job_count)
        return j;
    const uint32_t count = qc_calibrated_matrices(plan, job);
    j.elems /= count;
    j.rows /= count;
    j.scales /= count;
    j.stack = 0;
    return j;
}

uint64_t qc_calibrated_lead(const qc_plan *plan, uint32_t number)
{
    uint32_t matrix;
    (void)qc_calibrated_job(plan, number, &matrix);
    const qc_job j = qc_calibrated_weight(plan, number);
    return j.form.nested ? matrix * j.scales % QC_NESTED_BLOCK : 0;
}

const char *qc_calibrated_place(char out[QC_CALIBRATED_PLACE_BYTES], const qc_plan *plan,
                                uint32_t number)
{
    uint32_t matrix;
    const uint32_t job = qc_calibrated_job(plan, number, &matrix);
    const int both = qc_calibrated_matrices(plan, job) > plan->jobs[job].dims[0];
    (void)snprintf(out, QC_CALIBRATED_PLACE_BYTES, "%" PRIu32 "%s", both ? matrix / 2 : matrix,
                   !both        ? ""
                   : matrix % 2 ? ", up"
                                : ", gate");
    return out;
}

const char *qc_calibrated_name(char out[QC_CALIBRATED_NAME_BYTES], const qc_plan *plan,
                               uint32_t number)
{
    uint32_t matrix;
    char place[QC_CALIBRATED_PLACE_BYTES];
    const qc_job *j = &plan->jobs[qc_calibrated_job(plan, number, &matrix)];
    if (number < plan->job_count)
        (void)snprintf(out, QC_CALIBRATED_NAME_BYTES, "%s", j->name);
    else
        (void)snprintf(out, QC_CALIBRATED_NAME_BYTES, "%.200s[%s]", j->name,
                       qc_calibrated_place(place, plan, number));
    return out;
}

qc_status qc_calibrated_original(float **out, qc_weight_reader *reader, const qc_plan *plan,
                                 uint32_t number, qc_error *err)
{
    const qc_job j = qc_calibrated_weight(plan, number);
    qc_weight_source w;
    uint32_t matrix;
    size_t size = 0;
    (void)qc_calibrated_job(plan, number, &matrix);
    QC_TRY(qc_weight_source_of(&w, plan->model, j.source, j.entry->stored, j.entry->coded,
                               j.entry->transpose, err));
    if (!w.turned) { /* a stack as the rows of all of its matrices */
        w.ndim = 2;
        w.dims[0] = w.elems / j.form.cols;
        w.dims[1] = j.form.cols;
    }
    if (qc_u64_to_size(qc_sat_mul(j.elems, sizeof(float)), &size))
        QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s' is too large", j.name);
    QC_TRY(qc_malloc_aligned(out, 64, size, err));
    return qc_weight_read(reader, &w, matrix * j.rows, j.rows, *out, QC_DTYPE_F32, err);
}

/* ---- where things lie ---- */

/* The places of a weight's arrays among its bytes. */
typedef struct {
    uint64_t codes, scales, groups; /* counts of bytes, of blocks or rows, and of groups of them */
    uint64_t scales_at, groups_at;
    uint64_t lead; /* qc_calibrated_lead */
    uint64_t total_bytes;
} shape;

static shape shape_of_job(const qc_job *j, uint64_t lead)
{
    shape s = {.lead = lead};
    s.codes = qc_form_code_bytes(&j->form, j->elems);
    s.scales = j->scales;
    s.groups = j->form.nested ? qc_ceil_div_u64(s.lead + s.scales, QC_NESTED_BLOCK) : 0;
    s.scales_at = s.codes;
    s.groups_at = s.scales_at + s.scales * (j->form.nested ? 1 : sizeof(float));
    s.total_bytes = s.groups_at + s.groups * sizeof(float);
    return s;
}

static shape shape_of(const qc_plan *plan, uint32_t number)
{
    const qc_job j = qc_calibrated_weight(plan, number);
    return shape_of_job(&j, qc_calibrated_lead(plan, number));
}

static uint64_t piece_count(const shape *s)
{
    return qc_ceil_div_u64(s->total_bytes, PIECE_BYTES);
}

static uint64_t room_of(const qc_plan *plan, uint32_t number)
{
    const shape s = shape_of(plan, number);
    return qc_ceil_div_u64(s.total_bytes, ALIGN_BYTES) * ALIGN_BYTES;
}

int qc_calibrated_takes(const qc_plan *plan, uint32_t job)
{
    return job >= plan->job_count ||
           (!plan->jobs[job].stack && qc_job_may_be_calibrated(plan, &plan->jobs[job]));
}

uint64_t qc_calibrated_bytes(const qc_plan *plan, const qc_calibrated *c)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < qc_calibrated_numbers(plan); i++) {
        if (qc_calibrated_takes(plan, i) && !(c && qc_calibrated_has(c, i)))
            bytes = qc_sat_add(bytes, room_of(plan, i));
    }
    return bytes;
}

/* ---- arrays ---- */

qc_status qc_calibrated_alloc(qc_calibrated_arrays *out, const qc_plan *plan, uint32_t number,
                              qc_error *err)
{
    const qc_job j = qc_calibrated_weight(plan, number);
    return qc_calibrated_alloc_job(out, &j, qc_calibrated_lead(plan, number), err);
}

qc_status qc_calibrated_alloc_job(qc_calibrated_arrays *out, const qc_job *j, uint64_t lead,
                                  qc_error *err)
{
    const shape s = shape_of_job(j, lead);
    uint64_t floats = s.scales + s.groups, bytes = 0;
    size_t all = 0;
    *out = (qc_calibrated_arrays){0};
    if (qc_mul_u64(floats, sizeof(float), &bytes) || qc_add_u64(bytes, s.codes, &bytes) ||
        qc_add_u64(bytes, j->form.nested ? s.scales : 0, &bytes) || qc_u64_to_size(bytes, &all))
        QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s' is too large", j->name);
    QC_TRY(qc_malloc_aligned(&out->owned, 64, all, err));
    memset(out->owned, 0, all);
    float *f = out->owned;
    unsigned char *b = (unsigned char *)(f + floats);
    out->absmax = f;
    out->nested_absmax = j->form.nested ? f + s.scales : NULL;
    out->codes = b;
    out->absmax_codes = j->form.nested ? b + s.codes : NULL;
    out->codes_bytes = s.codes;
    out->scales = s.scales;
    out->groups = s.groups;
    return QC_OK;
}

void qc_calibrated_free(qc_calibrated_arrays *a)
{
    qc_free(a->owned);
    *a = (qc_calibrated_arrays){0};
}

/* ---- reading ---- */

/* Bytes [at, at + len) of a weight, whose pieces are read whole where they are not asked for whole:
 * to room, of PIECE_BYTES. */
static qc_status read_range(const qc_calibrated *c, uint32_t job, const shape *s, uint64_t at,
                            void *dst, uint64_t len, unsigned char *room, qc_error *err)
{
    const stored_weight *w = &c->weights[job];
    unsigned char *out = dst;
    for (uint64_t end = at + len; at < end;) {
        uint64_t piece = at / PIECE_BYTES, from = piece * PIECE_BYTES;
        uint64_t size = s->total_bytes - from < PIECE_BYTES ? s->total_bytes - from : PIECE_BYTES;
        uint64_t n = from + size < end ? from + size - at : end - at;
        unsigned char *to = n == size ? out : room;
        QC_TRY(qc_file_pread(&c->file, to, (size_t)size, w->place + from, err));
        qc_digest digest = qc_digest_bytes(to, (size_t)size);
        char name[QC_CALIBRATED_NAME_BYTES];
        if (!qc_digest_equal(&digest, &w->pieces[piece]))
            QC_FAIL(err, QC_ERR_CHECK,
                    "%s: the calibrated weight '%s' is not what was written there; the same "
                    "command calibrates it again",
                    c->path, qc_calibrated_name(name, c->plan, job));
        if (to == room)
            memcpy(out, room + (at - from), (size_t)n);
        out += n;
        at += n;
    }
    return QC_OK;
}

/* Decodes the scales of blocks from `block` on, as a reader has them. The tables of all instruction
 * sets give the same. */
static void decode_scales(const uint8_t *codes, const float *nested_absmax, uint64_t block,
                          uint64_t n, float offset, float *out)
{
    const qc_quant_ops *ops = qc_quant_ops_for(QC_ISA_SCALAR);
    for (uint64_t done = 0; done < n;) {
        uint64_t inside = (block + done) % QC_NESTED_BLOCK;
        uint64_t run = QC_NESTED_BLOCK - inside < n - done ? QC_NESTED_BLOCK - inside : n - done;
        uint64_t group = (block + done) / QC_NESTED_BLOCK - block / QC_NESTED_BLOCK;
        ops->nested_dequantize(codes + done, nested_absmax + group, qc_dynamic_map, run,
                               QC_NESTED_BLOCK, offset, out + done);
        done += run;
    }
}

/* Reads the scales of blocks or rows [block, block + blocks). */
static qc_status read_scales(const qc_calibrated *c, uint32_t job, const shape *s,
                             const qc_calibrated_arrays *to, uint64_t block, uint64_t blocks,
                             unsigned char *room, qc_error *err)
{
    uint64_t group = (s->lead + block) / QC_NESTED_BLOCK;
    uint64_t groups = qc_ceil_div_u64(s->lead + block + blocks, QC_NESTED_BLOCK) - group;
    if (s->groups == 0)
        return to->absmax ? read_range(c, job, s, s->scales_at + block * sizeof(float), to->absmax,
                                       blocks * sizeof(float), room, err)
                          : QC_OK;
    if (to->absmax_codes)
        QC_TRY(read_range(c, job, s, s->scales_at + block, to->absmax_codes, blocks, room, err));
    if (to->nested_absmax)
        QC_TRY(read_range(c, job, s, s->groups_at + group * sizeof(float), to->nested_absmax,
                          groups * sizeof(float), room, err));
    if (to->absmax)
        decode_scales(to->absmax_codes, to->nested_absmax, s->lead + block, blocks,
                      c->weights[job].offset, to->absmax);
    return QC_OK;
}

static qc_status read_matrix(const qc_calibrated *c, uint32_t job, uint64_t first, uint64_t n,
                             const qc_calibrated_arrays *to, qc_error *err)
{
    const qc_job weight = qc_calibrated_weight(c->plan, job), *j = &weight;
    const shape s = shape_of(c->plan, job);
    uint64_t per_scale = qc_form_scale_elems(&j->form);
    const uint64_t codes_at = qc_form_code_bytes(&j->form, first);
    void *room = NULL;
    if (!qc_calibrated_has(c, job) || first % per_scale != 0 || first > j->elems ||
        n > j->elems - first ||
        (j->form.nested && to->absmax && !(to->absmax_codes && to->nested_absmax)))
        QC_FAIL(err, QC_ERR_INTERNAL,
                "tensor '%s': elements %" PRIu64 " to %" PRIu64 " cannot be read from the store",
                j->name, first, first + n);
    if (n == 0)
        return QC_OK;
    QC_TRY(qc_malloc(&room, PIECE_BYTES, err));
    qc_status st = QC_OK;
    if (to->codes)
        st = read_range(c, job, &s, codes_at, to->codes,
                        qc_form_code_bytes(&j->form, first + n) - codes_at, room, err);
    if (st == QC_OK)
        st = read_scales(c, job, &s, to, first / per_scale, qc_ceil_div_u64(n, per_scale), room,
                         err);
    qc_free(room);
    return st;
}

/* The places of the arrays where element `at` belongs, in a step that begins with `first`. */
static qc_calibrated_arrays places(const qc_job *j, const qc_calibrated_arrays *to, uint64_t first,
                                   uint64_t at)
{
    const uint64_t per_scale = qc_form_scale_elems(&j->form);
    const uint64_t from = first / per_scale, scale = at / per_scale - from;
    const uint64_t group = at / per_scale / QC_NESTED_BLOCK - from / QC_NESTED_BLOCK;
    const uint64_t codes = qc_form_code_bytes(&j->form, at - first);
    return (qc_calibrated_arrays){
        .codes = to->codes ? (unsigned char *)to->codes + codes : NULL,
        .absmax = to->absmax ? to->absmax + scale : NULL,
        .absmax_codes = to->absmax_codes ? to->absmax_codes + scale : NULL,
        .nested_absmax = to->nested_absmax ? to->nested_absmax + group : NULL};
}

qc_status qc_calibrated_read(const qc_calibrated *c, uint32_t job, uint64_t first, uint64_t n,
                             const qc_calibrated_arrays *to, qc_error *err)
{
    const uint32_t count = qc_calibrated_matrices(c->plan, job);
    if (count == 0)
        return read_matrix(c, job, first, n, to, err);
    const qc_job *j = &c->plan->jobs[job];
    const uint64_t each = j->elems / count;
    for (uint64_t at = first, run; at < first + n; at += run) {
        const qc_calibrated_arrays there = places(j, to, first, at);
        run = qc_min_u64(first + n, (at / each + 1) * each) - at;
        QC_TRY(read_matrix(c, c->plan->first_matrix[job] + (uint32_t)(at / each), at % each, run,
                           &there, err));
    }
    return QC_OK;
}

qc_status qc_calibrated_get(const qc_calibrated *c, uint32_t job, qc_calibrated_arrays *a,
                            qc_error *err)
{
    a->nested_offset = qc_calibrated_offset(c, job);
    return qc_calibrated_read(c, job, 0, qc_calibrated_weight(c->plan, job).elems, a, err);
}

float qc_calibrated_offset(const qc_calibrated *c, uint32_t job)
{
    const uint32_t own = qc_calibrated_matrices(c->plan, job) ? c->plan->first_matrix[job] : job;
    return c->weights[own].offset; /* a stack has one */
}

int qc_calibrated_has(const qc_calibrated *c, uint32_t job)
{
    const uint32_t count = qc_calibrated_matrices(c->plan, job);
    for (uint32_t i = 0; i < count; i++)
        if (!qc_calibrated_has(c, c->plan->first_matrix[job] + i))
            return 0;
    return count > 0 || atomic_load_explicit(&c->weights[job].held, memory_order_acquire) != 0;
}

int qc_calibrated_is_searched(const qc_calibrated *c, uint32_t number)
{
    return c->weights[number].result.rounded < 0.0;
}

qc_feedback_result qc_calibrated_result(const qc_calibrated *c, uint32_t job)
{
    const uint32_t count = qc_calibrated_matrices(c->plan, job);
    qc_feedback_result mean = {0};
    double made = 0.0;
    if (count == 0)
        return c->weights[job].result;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t number = c->plan->first_matrix[job] + i;
        if (qc_calibrated_is_searched(c, number))
            continue;
        mean.rounded += c->weights[number].result.rounded;
        mean.calibrated += c->weights[number].result.calibrated;
        made++;
    }
    return made > 0.0 ? (qc_feedback_result){.rounded = mean.rounded / made,
                                             .calibrated = mean.calibrated / made}
                      : mean;
}

uint32_t qc_calibrated_count(const qc_calibrated *c)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < qc_calibrated_numbers(c->plan); i++)
        n += qc_calibrated_takes(c->plan, i) && qc_calibrated_has(c, i) &&
             !qc_calibrated_is_searched(c, i);
    return n;
}

const char *qc_calibrated_done(const qc_calibrated *c, uint32_t *lost)
{
    *lost = c->lost;
    return c->done;
}

int qc_calibrated_is_lost(const qc_calibrated *c, uint32_t job)
{
    int lost = c->weights[job].lost;
    for (uint32_t i = 0; i < qc_calibrated_matrices(c->plan, job); i++)
        lost |= c->weights[c->plan->first_matrix[job] + i].lost;
    return lost;
}

/* ---- writing ---- */

/* A reader makes absmax of the codes. It has to be what calibrating reckoned with. */
static qc_status check_scales(const qc_job *j, const shape *s, const qc_calibrated_arrays *a,
                              qc_error *err)
{
    float scales[QC_NESTED_BLOCK];
    for (uint64_t block = 0; a->groups > 0 && block < a->scales; block += QC_NESTED_BLOCK) {
        uint64_t n = a->scales - block < QC_NESTED_BLOCK ? a->scales - block : QC_NESTED_BLOCK;
        decode_scales(a->absmax_codes + block,
                      a->nested_absmax + (s->lead + block) / QC_NESTED_BLOCK, s->lead + block, n,
                      a->nested_offset, scales);
        if (memcmp(scales, a->absmax + block, (size_t)n * sizeof *scales) != 0)
            QC_FAIL(err, QC_ERR_INTERNAL,
                    "tensor '%s': the scales from block %" PRIu64
                    " on are not those of their codes",
                    j->name, block);
    }
    return QC_OK;
}

/* The weight's bytes from its arrays, piece by piece: to room. */
static void gather(const shape *s, const qc_calibrated_arrays *a, uint64_t at, uint64_t n,
                   unsigned char *room)
{
    const struct {
        uint64_t begin, end;
        const void *from;
    } parts[] = {
        {0, s->scales_at, a->codes},
        {s->scales_at, s->groups_at, a->groups ? (const void *)a->absmax_codes : a->absmax},
        {s->groups_at, s->total_bytes, a->nested_absmax},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        uint64_t from = at > parts[i].begin ? at : parts[i].begin;
        uint64_t end = at + n < parts[i].end ? at + n : parts[i].end;
        if (from < end)
            memcpy(room + (from - at),
                   (const unsigned char *)parts[i].from + (from - parts[i].begin),
                   (size_t)(end - from));
    }
}

static qc_status write_pieces(qc_calibrated *c, uint32_t job, const shape *s,
                              const qc_calibrated_arrays *a, unsigned char *digests, qc_error *err)
{
    void *room = NULL;
    qc_status st = qc_malloc(&room, PIECE_BYTES, err);
    for (uint64_t at = 0; st == QC_OK && at < s->total_bytes; at += PIECE_BYTES) {
        uint64_t n = s->total_bytes - at < PIECE_BYTES ? s->total_bytes - at : PIECE_BYTES;
        gather(s, a, at, n, room);
        const qc_digest digest = qc_digest_bytes(room, (size_t)n);
        memcpy(digests + at / PIECE_BYTES * sizeof digest, &digest, sizeof digest);
        st = qc_file_pwrite(&c->file, room, (size_t)n, c->weights[job].place + at, err);
    }
    qc_free(room);
    return st == QC_OK ? qc_file_sync_data(&c->file, err) : st;
}

static qc_status take_weight(qc_calibrated *c, const unsigned char *b, uint64_t bytes,
                             qc_error *err)
{
    uint32_t job = bytes < WEIGHT_HEAD_BYTES ? UINT32_MAX : qc_load_le32(b);
    if (job >= qc_calibrated_numbers(c->plan) || !c->weights[job].is_of)
        QC_FAIL(err, QC_ERR_INPUT, "%s: a record of no weight", c->path);
    stored_weight *w = &c->weights[job];
    const shape s = shape_of(c->plan, job);
    uint64_t n = piece_count(&s) * sizeof *w->pieces;
    uint32_t offset = qc_load_le32(b + 4);
    if (bytes != WEIGHT_HEAD_BYTES + n)
        QC_FAIL(err, QC_ERR_INPUT, "%s: a record of no weight", c->path);
    if (!w->pieces)
        QC_TRY(qc_malloc(&w->pieces, (size_t)n, err));
    memcpy(&w->offset, &offset, sizeof offset);
    w->result.rounded = qc_f64_of_bits(qc_load_le64(b + 8));
    w->result.calibrated = qc_f64_of_bits(qc_load_le64(b + 16));
    memcpy(w->pieces, b + WEIGHT_HEAD_BYTES, (size_t)n);
    return QC_OK;
}

qc_status qc_calibrated_put(qc_calibrated *c, uint32_t job, const qc_calibrated_arrays *a,
                            const qc_feedback_result *result, qc_error *err)
{
    const qc_job weight = qc_calibrated_weight(c->plan, job), *j = &weight;
    const shape s = shape_of(c->plan, job);
    size_t bytes = WEIGHT_HEAD_BYTES + (size_t)piece_count(&s) * sizeof(qc_digest);
    stored_weight *w = &c->weights[job];
    uint32_t offset;
    if (!w->is_of || a->codes_bytes != s.codes || a->scales != s.scales || a->groups != s.groups)
        QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s' does not have the arrays that the store expects",
                j->name);
    QC_TRY(check_scales(j, &s, a, err));
    unsigned char *b = NULL;
    QC_TRY(qc_malloc(&b, bytes, err));
    memcpy(&offset, &a->nested_offset, sizeof offset);
    qc_store_le32(b, job);
    qc_store_le32(b + 4, offset);
    qc_store_le64(b + 8, qc_f64_bits(result->rounded));
    qc_store_le64(b + 16, qc_f64_bits(result->calibrated));
    atomic_store(&w->held, 0);
    qc_status st = write_pieces(c, job, &s, a, b + WEIGHT_HEAD_BYTES, err);
    if (st == QC_OK)
        st = qc_journal_append(c->journal, RECORD_WEIGHT, b, bytes, err);
    if (st == QC_OK)
        st = qc_journal_sync(c->journal, err);
    if (st == QC_OK)
        st = take_weight(c, b, bytes, err);
    qc_free(b);
    if (st != QC_OK)
        return st;
    c->lost -= w->lost;
    w->lost = 0;
    atomic_store_explicit(&w->held, 1, memory_order_release);
    return QC_OK;
}

static qc_status take_done(qc_calibrated *c, const void *text, size_t len, qc_error *err)
{
    char *copy = NULL;
    QC_TRY(qc_malloc(&copy, len + 1, err));
    if (len > 0)
        memcpy(copy, text, len);
    copy[len] = '\0';
    qc_free(c->done);
    c->done = copy;
    return QC_OK;
}

qc_status qc_calibrated_set_done(qc_calibrated *c, const char *text, qc_error *err)
{
    size_t len = strlen(text);
    if (len > DONE_MOST)
        QC_FAIL(err, QC_ERR_INTERNAL,
                "a text of %zu bytes is too long for the record of what was done", len);
    QC_TRY(qc_journal_append(c->journal, RECORD_DONE, text, len, err));
    QC_TRY(qc_journal_sync(c->journal, err));
    return take_done(c, text, len, err);
}

/* ---- opening ---- */

static qc_status take_record(void *ctx, const qc_journal_record *r, qc_error *err)
{
    qc_calibrated *c = ctx;
    if (r->type == RECORD_IDENTITY && !c->has_identity)
        c->has_identity = r->payload_bytes == c->identity.len &&
                          memcmp(r->payload, c->identity.data, c->identity.len) == 0;
    else if (c->has_identity && r->type == RECORD_WEIGHT)
        return take_weight(c, r->payload, r->payload_bytes, err);
    else if (c->has_identity && r->type == RECORD_DONE && r->payload_bytes <= DONE_MOST)
        return take_done(c, r->payload, r->payload_bytes, err);
    if (c->has_identity)
        return QC_OK;
    QC_FAIL(err, QC_ERR_INPUT, "%s was made for another conversion", c->path);
}

static void forget_records(qc_calibrated *c)
{
    for (uint32_t i = 0; c->weights && i < qc_calibrated_numbers(c->plan); i++) {
        qc_free(c->weights[i].pieces);
        c->weights[i].pieces = NULL;
    }
    qc_free(c->done);
    c->done = NULL;
    c->has_identity = 0;
}

static qc_status open_journal(qc_calibrated *c, const char *path, qc_error *err)
{
    qc_error why = {0};
    qc_status st = qc_journal_open(&c->journal, path, take_record, c, NULL, &why);
    if (st == QC_ERR_UNSUPPORTED ||
        st == QC_ERR_INPUT) { /* it belongs to another conversion, or it is damaged */
        forget_records(c);
        QC_TRY(qc_path_remove(path, err));
        QC_TRY(qc_path_remove(c->path, err));
        why = (qc_error){0};
        st = qc_journal_open(&c->journal, path, take_record, c, NULL, &why);
    }
    if (st != QC_OK)
        return qc_error_pass(err, &why, why.code);
    if (c->has_identity)
        return QC_OK;
    /* Weights that lie in the folder without a journal belong to nobody. */
    QC_TRY(qc_path_remove(c->path, err));
    QC_TRY(qc_journal_append(c->journal, RECORD_IDENTITY, c->identity.data, c->identity.len, err));
    return qc_journal_sync(c->journal, err);
}

/* Reads a recorded weight back. */
static qc_status check_weight(qc_calibrated *c, uint32_t job, unsigned char *room, qc_error *err)
{
    const shape s = shape_of(c->plan, job);
    stored_weight *w = &c->weights[job];
    qc_error why = {0};
    qc_status st = QC_OK;
    for (uint64_t at = 0; st == QC_OK && at < s.total_bytes; at += PIECE_BYTES) {
        uint64_t n = s.total_bytes - at < PIECE_BYTES ? s.total_bytes - at : PIECE_BYTES;
        QC_TRY(qc_check_interrupted(err));
        st = read_range(c, job, &s, at, room, n, room, &why);
    }
    if (st == QC_ERR_CHECK || st == QC_ERR_TRUNCATED) {
        w->lost = 1;
        c->lost++;
        return QC_OK;
    }
    if (st != QC_OK && err)
        *err = why;
    atomic_store(&w->held, st == QC_OK);
    return st;
}

static qc_status open_store(qc_calibrated *c, qc_output_dir *d, const char *identity,
                            uint32_t *kept, qc_error *err)
{
    const qc_plan *plan = c->plan;
    const char *journal = NULL;
    uint64_t place = 0;
    QC_TRY(qc_calloc(&c->weights, qc_calibrated_numbers(plan), sizeof *c->weights, err));
    for (uint32_t i = 0; i < qc_calibrated_numbers(plan); i++) {
        c->weights[i].is_of = qc_calibrated_takes(plan, i) != 0;
        c->weights[i].place = place;
        if (c->weights[i].is_of && qc_add_u64(place, room_of(plan, i), &place))
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "the weights are larger than a file can be, so they cannot be calibrated");
    }
    QC_TRY(qc_strbuf_addf(&c->identity, err, "store=%u\n%s\n", STORE_FORMAT, identity));
    for (size_t i = 0; i < plan->model->file_count; i++)
        QC_TRY(qc_strbuf_addf(&c->identity, err, "modified=%" PRId64 "\n",
                              (int64_t)plan->model->files[i].stamp.modified_ns));
    QC_TRY(qc_path_join(d->arena, &journal, d->staging, QC_CALIBRATED_JOURNAL, err));
    QC_TRY(qc_path_join(d->arena, &c->path, d->staging, QC_CALIBRATED_WEIGHTS, err));
    QC_TRY(open_journal(c, journal, err));
    QC_TRY(qc_file_open_update(&c->file, c->path, err));
    /* What was recorded is read back. */
    void *room = NULL;
    qc_status st = qc_malloc(&room, PIECE_BYTES, err);
    for (uint32_t i = 0; st == QC_OK && i < qc_calibrated_numbers(plan); i++) {
        if (c->weights[i].pieces)
            st = check_weight(c, i, room, err);
        *kept += st == QC_OK && qc_calibrated_takes(plan, i) && qc_calibrated_has(c, i);
    }
    qc_free(room);
    return st;
}

qc_status qc_calibrated_open(qc_calibrated **out, const qc_plan *plan, qc_output_dir *d,
                             const char *identity, uint32_t *kept, qc_error *err)
{
    *out = NULL;
    *kept = 0;
    qc_calibrated *c = NULL;
    QC_TRY(qc_calloc(&c, 1, sizeof(qc_calibrated), err));
    c->plan = plan;
    c->file = QC_FILE_CLOSED;
    qc_strbuf_init(&c->identity, SIZE_MAX / 2);
    qc_status st = open_store(c, d, identity, kept, err);
    if (st != QC_OK) {
        qc_calibrated_close(c);
        return st;
    }
    *out = c;
    return QC_OK;
}

void qc_calibrated_close(qc_calibrated *c)
{
    if (!c)
        return;
    forget_records(c);
    qc_free(c->weights);
    qc_journal_close(c->journal);
    qc_file_discard(&c->file);
    qc_strbuf_deinit(&c->identity);
    qc_free(c);
}
