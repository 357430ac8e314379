#include "convert/calibrate/hessians.h"

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/checked.h"
#include "quant/quant_ops.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The kinds of tensors, told by the end of the name. */
#define MOMENT        ".second_moment"
#define TOKENS        ".tokens"
#define SAME          ".same_as"
#define CROSS         ".cross_moment"
#define OUTPUT        ".output_moment"
#define OUTPUT_TOKENS ".output_tokens"

#define NONE       UINT32_MAX
#define NAME_BYTES 1024u
/* This much is read at a time, or one row where that is more. */
#define PIECE_BYTES 1048576u
#define SYMMETRY    1e-3
/* An element may be larger than the diagonal allows by this share, and by this share of the
 * diagonal's mean, as sums of floats are not exact. */
#define POSITIVE      1e-3
#define POSITIVE_MEAN 1e-6

typedef struct {
    const char *name; /* a part of the checkpoint's tensor name, so there is no NUL at len */
    size_t len;
    const qc_checkpoint_tensor *moment;         /* NULL for a module with the inputs of another */
    const qc_checkpoint_tensor *cross, *output; /* or NULL */
    qc_hessians_outputs outputs;
    uint64_t n, tokens;
    uint32_t moments; /* the module that has them: this one or another */
    char *text;       /* the name, for messages */
} module;

struct qc_hessians {
    qc_checkpoint *file;
    module *modules; /* sorted bytewise by name */
    uint32_t count;
};

static int ends_with(const char *name, const char *end, size_t *len)
{
    size_t n = strlen(name);
    size_t e = strlen(end);
    if (n <= e || memcmp(name + n - e, end, e) != 0)
        return 0;
    *len = n - e;
    return 1;
}

static int compare_modules(const void *a, const void *b)
{
    const module *x = a, *y = b;
    int c = memcmp(x->name, y->name, qc_min_u64(x->len, y->len));
    return c ? c : (x->len > y->len) - (x->len < y->len);
}

static uint32_t number_of(const qc_hessians *h, const char *name, size_t len)
{
    const module key = {.name = name, .len = len}, *found = NULL;
    if (h->count > 0)
        found = bsearch(&key, h->modules, h->count, sizeof key, compare_modules);
    return found ? (uint32_t)(found - h->modules) : NONE;
}

/* Finds the tensor `name` + `end`, or returns NULL. */
static const qc_checkpoint_tensor *beside(const qc_hessians *h, const module *m, const char *end)
{
    char name[NAME_BYTES];
    size_t e = strlen(end);
    if (m->len + e >= sizeof name)
        return NULL;
    memcpy(name, m->name, m->len);
    memcpy(name + m->len, end, e + 1);
    return qc_checkpoint_find(h->file, name);
}

/* Reads how many tokens the moments t of a module are of, from the tensor with this end. */
static qc_status read_tokens(const qc_hessians *h, qc_st_cursor *cur, const module *m,
                             const qc_checkpoint_tensor *of, const char *end, uint64_t *tokens,
                             qc_error *err)
{
    const qc_checkpoint_tensor *t = beside(h, m, end);
    unsigned char raw[8];
    if (!t)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s' has no '%s' beside it", of->name, &end[1]);
    if (t->dtype != QC_DTYPE_I64 || t->bytes != sizeof raw)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': expected one I64, found %" PRIu64 " bytes of %s",
                t->name, t->bytes, qc_dtype_name(t->dtype));
    QC_TRY(qc_checkpoint_read(h->file, cur, t, 0, raw, sizeof raw, err));
    *tokens = qc_load_le64(raw);
    if (*tokens == 0 || *tokens > INT64_MAX)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': expected at least 1 token, found %" PRId64,
                t->name, (int64_t)*tokens);
    return QC_OK;
}

static qc_status check_numbers(const qc_checkpoint_tensor *t, qc_error *err)
{
    if (t->dtype != QC_DTYPE_F64 && t->dtype != QC_DTYPE_F32)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': expected F64 or F32, found %s", t->name,
                qc_dtype_name(t->dtype));
    return QC_OK;
}

static qc_status check_moment(const qc_hessians *h, qc_st_cursor *cur, module *m, qc_error *err)
{
    const qc_checkpoint_tensor *t = m->moment, *c = beside(h, m, CROSS);
    QC_TRY(check_numbers(t, err));
    if (t->ndim != 2 || t->dims[0] != t->dims[1] || t->dims[0] == 0)
        QC_FAIL(err, QC_ERR_SHAPE, "tensor '%s': expected a square matrix, found another shape",
                t->name);
    m->n = t->dims[0];
    m->cross = c;
    if (c) {
        QC_TRY(check_numbers(c, err));
        if (c->ndim != 2 || c->dims[0] != m->n || c->dims[1] != m->n)
            QC_FAIL(err, QC_ERR_SHAPE,
                    "tensor '%s': expected the shape of '%s', [%" PRIu64 ", %" PRIu64
                    "], found another",
                    c->name, t->name, m->n, m->n);
    }
    return read_tokens(h, cur, m, t, TOKENS, &m->tokens, err);
}

/* The weight's rows are not known here. */
static qc_status check_outputs(const qc_hessians *h, qc_st_cursor *cur, module *m, qc_error *err)
{
    const qc_checkpoint_tensor *t = m->output = beside(h, m, OUTPUT);
    if (!t)
        return QC_OK;
    QC_TRY(check_numbers(t, err));
    unsigned at = t->ndim == 3;
    if (t->ndim != at + 2u || t->dims[at] != t->dims[at + 1u] || t->dims[at] == 0 ||
        t->dims[0] == 0)
        QC_FAIL(err, QC_ERR_SHAPE,
                "tensor '%s': expected a square matrix or a list of them, found another shape",
                t->name);
    m->outputs.blocks = at ? t->dims[0] : 1;
    m->outputs.whole = !at;
    m->outputs.block = t->dims[at];
    return read_tokens(h, cur, m, t, OUTPUT_TOKENS, &m->outputs.tokens, err);
}

/* Reads the module that a same_as tensor names. It must have moments of its own. */
static qc_status follow(qc_hessians *h, qc_st_cursor *cur, module *m, qc_error *err)
{
    const qc_checkpoint_tensor *t = beside(h, m, SAME);
    char other[NAME_BYTES];
    if (!t || t->dtype != QC_DTYPE_U8 || t->bytes == 0 || t->bytes >= sizeof other)
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s%s': expected the name of a module as U8, of fewer than %u bytes",
                m->text, SAME, NAME_BYTES);
    QC_TRY(qc_checkpoint_read(h->file, cur, t, 0, other, (size_t)t->bytes, err));
    other[t->bytes] = '\0';
    uint32_t i = number_of(h, other, (size_t)t->bytes);
    if (i == NONE || !h->modules[i].moment)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': the file has no second moments of '%s'", t->name,
                other);
    m->moments = i;
    m->n = h->modules[i].n;
    m->tokens = h->modules[i].tokens;
    return QC_OK;
}

/* Is it a tensor that belongs to a module beside others? */
static int is_companion(const char *name, size_t *len)
{
    return ends_with(name, TOKENS, len) || ends_with(name, CROSS, len) ||
           ends_with(name, OUTPUT, len) || ends_with(name, OUTPUT_TOKENS, len);
}

/* A companion must not be alone, as nothing would read it. */
static qc_status check_companions(const qc_hessians *h, qc_error *err)
{
    for (size_t i = 0; i < h->file->tensor_count; i++) {
        const char *name = h->file->tensors[i].name;
        size_t len = 0;
        if (!is_companion(name, &len) || ends_with(name, TOKENS, &len))
            continue;
        uint32_t found = number_of(h, name, len);
        if (ends_with(name, OUTPUT_TOKENS, &len)) {
            if (found == NONE || !h->modules[found].output)
                QC_FAIL(err, QC_ERR_INPUT, "tensor '%s' has no '%s' beside it", name, &OUTPUT[1]);
        } else if (found == NONE || (ends_with(name, CROSS, &len) && !h->modules[found].moment)) {
            QC_FAIL(err, QC_ERR_INPUT, "tensor '%s' has no '%s'%s beside it", name, &MOMENT[1],
                    found == NONE ? " or 'same_as'" : "");
        }
    }
    return QC_OK;
}

/* Makes the list of modules, sorted by name. */
static qc_status collect(qc_hessians *h, qc_error *err)
{
    const qc_checkpoint *f = h->file;
    if (f->tensor_count >= UINT32_MAX)
        QC_FAIL(err, QC_ERR_INPUT, "%zu tensors are too many", f->tensor_count);
    QC_TRY(qc_calloc(&h->modules, f->tensor_count + 1, sizeof *h->modules, err));
    for (size_t i = 0; i < f->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &f->tensors[i];
        module m = {.name = t->name};
        if (ends_with(t->name, MOMENT, &m.len))
            m.moment = t;
        else if (!ends_with(t->name, SAME, &m.len)) {
            if (!is_companion(t->name, &m.len))
                QC_FAIL(err, QC_ERR_INPUT,
                        "tensor '%s' does not belong in a file of second moments: expected a name "
                        "that ends in '%s', '%s', '%s', '%s', '%s' or '%s'",
                        t->name, &MOMENT[1], &TOKENS[1], &SAME[1], &CROSS[1], &OUTPUT[1],
                        &OUTPUT_TOKENS[1]);
            continue;
        }
        if (m.len >= NAME_BYTES - sizeof OUTPUT_TOKENS)
            QC_FAIL(err, QC_ERR_INPUT, "tensor '%.60s...': its name is too long", t->name);
        QC_TRY(qc_malloc(&m.text, m.len + 1, err));
        memcpy(m.text, m.name, m.len);
        m.text[m.len] = '\0';
        h->modules[h->count++] = m;
    }
    if (h->count == 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "expected at least one tensor whose name ends in '%s', found none", MOMENT);
    qsort(h->modules, h->count, sizeof *h->modules, compare_modules);
    for (uint32_t i = 1; i < h->count; i++) {
        if (compare_modules(&h->modules[i - 1], &h->modules[i]) == 0)
            QC_FAIL(err, QC_ERR_INPUT, "module '%s' has both '%s' and '%s'", h->modules[i].text,
                    &MOMENT[1], &SAME[1]);
    }
    return QC_OK;
}

qc_status qc_hessians_open(qc_hessians **out, const char *path, qc_error *err)
{
    qc_st_cursor *cur = NULL;
    qc_status st = QC_OK;
    *out = NULL;
    qc_hessians *h = NULL;
    QC_TRY(qc_calloc(&h, 1, sizeof *h, err));
    QC_TRY_GOTO(st, done, qc_checkpoint_open(&h->file, path, err));
    QC_TRY_GOTO(st, done, qc_st_cursor_create(&cur, err));
    QC_TRY_GOTO(st, done, collect(h, err));
    for (uint32_t i = 0; i < h->count; i++) {
        h->modules[i].moments = i;
        if (h->modules[i].moment)
            QC_TRY_GOTO(st, done, check_moment(h, cur, &h->modules[i], err));
        else if (beside(h, &h->modules[i], TOKENS)) {
            st = QC_ERROR(err, QC_ERR_INPUT, "module '%s' has both '%s' and '%s'",
                          h->modules[i].text, &TOKENS[1], &SAME[1]);
            goto done;
        }
        QC_TRY_GOTO(st, done, check_outputs(h, cur, &h->modules[i], err));
    }
    for (uint32_t i = 0; i < h->count; i++) {
        if (!h->modules[i].moment)
            QC_TRY_GOTO(st, done, follow(h, cur, &h->modules[i], err));
    }
    QC_TRY_GOTO(st, done, check_companions(h, err));
done:
    qc_st_cursor_destroy(cur);
    if (st == QC_OK) {
        *out = h;
        return QC_OK;
    }
    if (h->file) /* other messages name the path already */
        qc_error_prefix(err, "%s", path);
    qc_hessians_close(h);
    return st;
}

void qc_hessians_close(qc_hessians *h)
{
    if (!h)
        return;
    for (uint32_t i = 0; i < h->count; i++)
        qc_free(h->modules[i].text);
    qc_free(h->modules);
    qc_checkpoint_close(h->file);
    qc_free(h);
}

uint32_t qc_hessians_moments(const qc_hessians *h, uint32_t i, uint64_t *n, uint64_t *tokens)
{
    if (i >= h->count)
        return NONE;
    *n = h->modules[i].n;
    *tokens = h->modules[i].tokens;
    return h->modules[i].moments;
}

qc_hessians_outputs qc_hessians_outputs_of(const qc_hessians *h, uint32_t i)
{
    return i < h->count ? h->modules[i].outputs : (qc_hessians_outputs){0};
}

int qc_hessians_has_cross(const qc_hessians *h, uint32_t number)
{
    return number < h->count && h->modules[number].cross;
}

uint32_t qc_hessians_count(const qc_hessians *h)
{
    return h->count;
}

const char *qc_hessians_name(const qc_hessians *h, uint32_t i)
{
    return i < h->count ? h->modules[i].text : "";
}

/* A matrix [n, n] that is read from a tensor, where it starts at this byte. */
typedef struct {
    const qc_checkpoint_tensor *t;
    uint64_t start, n;
    void *out;
    qc_dtype dtype; /* F64 or F32, of `out` */
} matrix;

static double element(const matrix *m, uint64_t i, uint64_t j)
{
    return m->dtype == QC_DTYPE_F64 ? ((const double *)m->out)[i * m->n + j]
                                    : (double)((const float *)m->out)[i * m->n + j];
}

static qc_status take_matrix(const qc_hessians *h, qc_st_cursor *cur, const matrix *m,
                             qc_error *err)
{
    const qc_quant_ops *ops = qc_quant_ops_for(QC_ISA_SCALAR);
    const uint64_t row = m->n * (qc_dtype_bits(m->t->dtype) / 8);
    const uint64_t rows = row < PIECE_BYTES ? PIECE_BYTES / row : 1;
    void *raw = NULL;
    qc_status st = qc_malloc(&raw, (size_t)(rows * row), err);
    for (uint64_t i = 0; st == QC_OK && i < m->n; i += rows) {
        const uint64_t now = qc_min_u64(m->n - i, rows);
        uint64_t overflow; /* is not finite then */
        st = qc_checkpoint_read(h->file, cur, m->t, m->start + i * row, raw, (size_t)(now * row),
                                err);
        if (st == QC_OK)
            ops->cast(raw, m->t->dtype, now * m->n,
                      (unsigned char *)m->out + i * m->n * (qc_dtype_bits(m->dtype) / 8), m->dtype,
                      &overflow);
        for (uint64_t k = 0; st == QC_OK && k < now * m->n; k++)
            if (!isfinite(element(m, i, k)))
                st = QC_ERROR(err, QC_ERR_NONFINITE,
                              "tensor '%s': the element at row %" PRIu64 ", column %" PRIu64
                              " is not a finite number",
                              m->t->name, m->start / row + i + k / m->n, k % m->n);
    }
    qc_free(raw);
    return st;
}

/* A second moment is symmetric, and no element is larger than the two of the diagonal allow. */
static qc_status check_moments(const matrix *m, qc_error *err)
{
    double mean = 0;
    for (uint64_t i = 0; i < m->n; i++) {
        double d = element(m, i, i);
        if (d < 0)
            QC_FAIL(err, QC_ERR_INPUT,
                    "tensor '%s': element %" PRIu64 " of the diagonal is negative (%g)", m->t->name,
                    i, d);
        mean += d / (double)m->n;
    }
    for (uint64_t i = 0; i < m->n; i++) {
        for (uint64_t j = 0; j < i; j++) {
            double v = element(m, i, j), apart = fabs(v - element(m, j, i));
            double a = element(m, i, i), b = element(m, j, j);
            double most = fmax(fabs(v) - POSITIVE_MEAN * mean, 0) / (1 + POSITIVE);
            if (apart > SYMMETRY * mean)
                QC_FAIL(err, QC_ERR_INPUT,
                        "tensor '%s' is not symmetric: two elements are %g apart, where the "
                        "diagonal's mean is %g",
                        m->t->name, apart, mean);
            if (most * most > a * b)
                QC_FAIL(err, QC_ERR_INPUT,
                        "tensor '%s' is not positive: the element at row %" PRIu64
                        ", column %" PRIu64 " is %g, where the diagonal has %g and %g",
                        m->t->name, i, j, v, a, b);
        }
    }
    return QC_OK;
}

/* Reads matrices that lie one behind the other; moments: they are checked as such. */
static qc_status read_matrices(const qc_hessians *h, matrix m, uint64_t count, int moments,
                               qc_error *err)
{
    qc_st_cursor *cur = NULL;
    const uint64_t elems = m.n * m.n, bytes = elems * (qc_dtype_bits(m.t->dtype) / 8);
    qc_status st = qc_st_cursor_create(&cur, err);
    for (uint64_t i = 0; st == QC_OK && i < count; i++) {
        m.start = i * bytes;
        st = take_matrix(h, cur, &m, err);
        if (st == QC_OK && moments)
            st = check_moments(&m, err);
        m.out = (unsigned char *)m.out + elems * (qc_dtype_bits(m.dtype) / 8);
    }
    qc_st_cursor_destroy(cur);
    if (st != QC_OK)
        qc_error_prefix(err, "%s", h->file->path);
    return st;
}

qc_status qc_hessians_read(const qc_hessians *h, uint32_t number, double *out, qc_error *err)
{
    if (number >= h->count || !h->modules[number].moment)
        QC_FAIL(err, QC_ERR_INTERNAL, "no second moments of number %" PRIu32, number);
    const module *m = &h->modules[number];
    QC_TRY(read_matrices(h, (matrix){m->moment, 0, m->n, out, QC_DTYPE_F64}, 1, 1, err));
    for (uint64_t i = 0; i < m->n; i++) {
        for (uint64_t j = 0; j < m->n; j++)
            out[i * m->n + j] = j <= i ? out[i * m->n + j] * (double)m->tokens : 0;
    }
    return QC_OK;
}

qc_status qc_hessians_read_cross(const qc_hessians *h, uint32_t number, double *out, qc_error *err)
{
    if (!qc_hessians_has_cross(h, number))
        QC_FAIL(err, QC_ERR_INTERNAL, "no cross moment of number %" PRIu32, number);
    const module *m = &h->modules[number];
    QC_TRY(read_matrices(h, (matrix){m->cross, 0, m->n, out, QC_DTYPE_F64}, 1, 0, err));
    for (uint64_t i = 0; i < m->n * m->n; i++)
        out[i] *= (double)m->tokens;
    return QC_OK;
}

qc_status qc_hessians_read_outputs(const qc_hessians *h, uint32_t i, float *out, qc_error *err)
{
    if (qc_hessians_outputs_of(h, i).blocks == 0)
        QC_FAIL(err, QC_ERR_INTERNAL, "no second moments of outputs of number %" PRIu32, i);
    const qc_hessians_outputs *o = &h->modules[i].outputs;
    return read_matrices(h, (matrix){h->modules[i].output, 0, o->block, out, QC_DTYPE_F32},
                         o->blocks, 1, err);
}
