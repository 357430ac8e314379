#include "convert/calibrate/hessians.h"

#include "base/alloc.h"
#include "base/bytes.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The kinds of tensors, told by the end of the name. */
#define MOMENT ".second_moment"
#define TOKENS ".tokens"
#define SAME   ".same_as"

#define NONE       UINT32_MAX
#define NAME_BYTES 1024u
/* This much is read at a time, or one row where that is more. */
#define PIECE_BYTES 1048576u
#define SYMMETRY    1e-3

typedef struct {
    const char *name; /* a part of the checkpoint's tensor name, so there is no NUL at len */
    size_t len;
    const qc_checkpoint_tensor *moment; /* NULL for a module with the inputs of another */
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

static int compare_names(const char *a, size_t a_len, const char *b, size_t b_len)
{
    int c = memcmp(a, b, a_len < b_len ? a_len : b_len);
    return c ? c : (a_len > b_len) - (a_len < b_len);
}

static int compare_modules(const void *a, const void *b)
{
    const module *x = a;
    const module *y = b;
    return compare_names(x->name, x->len, y->name, y->len);
}

static uint32_t number_of(const qc_hessians *h, const char *name, size_t len)
{
    uint32_t from = 0;
    uint32_t to = h->count;
    while (from < to) {
        uint32_t mid = from + (to - from) / 2;
        int c = compare_names(h->modules[mid].name, h->modules[mid].len, name, len);
        if (c == 0)
            return mid;
        if (c < 0)
            from = mid + 1;
        else
            to = mid;
    }
    return NONE;
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

static qc_status read_tokens(const qc_hessians *h, qc_st_cursor *cur, module *m, qc_error *err)
{
    const qc_checkpoint_tensor *t = beside(h, m, TOKENS);
    unsigned char raw[8];
    if (!t)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s' has no '%s' beside it", m->moment->name,
                &TOKENS[1]);
    if (t->dtype != QC_DTYPE_I64 || t->bytes != sizeof raw)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': expected one I64, found %" PRIu64 " bytes of %s",
                t->name, t->bytes, qc_dtype_name(t->dtype));
    QC_TRY(qc_checkpoint_read(h->file, cur, t, 0, raw, sizeof raw, err));
    m->tokens = qc_load_le64(raw);
    if (m->tokens == 0 || m->tokens > INT64_MAX)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': expected at least 1 token, found %" PRId64,
                t->name, (int64_t)m->tokens);
    return QC_OK;
}

static qc_status check_moment(const qc_hessians *h, qc_st_cursor *cur, module *m, qc_error *err)
{
    const qc_checkpoint_tensor *t = m->moment;
    if (t->dtype != QC_DTYPE_F64 && t->dtype != QC_DTYPE_F32)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': expected F64 or F32, found %s", t->name,
                qc_dtype_name(t->dtype));
    if (t->ndim != 2 || t->dims[0] != t->dims[1] || t->dims[0] == 0)
        QC_FAIL(err, QC_ERR_SHAPE, "tensor '%s': expected a square matrix, found another shape",
                t->name);
    m->n = t->dims[0];
    return read_tokens(h, cur, m, err);
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
            if (!ends_with(t->name, TOKENS, &m.len))
                QC_FAIL(err, QC_ERR_INPUT,
                        "tensor '%s' does not belong in a file of second moments: expected a name "
                        "that ends in '%s', '%s' or '%s'",
                        t->name, &MOMENT[1], &TOKENS[1], &SAME[1]);
            continue;
        }
        if (m.len >= NAME_BYTES - sizeof MOMENT)
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
    }
    for (uint32_t i = 0; i < h->count; i++) {
        if (!h->modules[i].moment)
            QC_TRY_GOTO(st, done, follow(h, cur, &h->modules[i], err));
    }
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

uint32_t qc_hessians_find(const qc_hessians *h, const char *weight, uint64_t *n, uint64_t *tokens)
{
    size_t len = 0;
    if (!ends_with(weight, ".weight", &len))
        return NONE;
    uint32_t i = number_of(h, weight, len);
    if (i == NONE)
        return NONE;
    *n = h->modules[i].n;
    *tokens = h->modules[i].tokens;
    return h->modules[i].moments;
}

uint32_t qc_hessians_count(const qc_hessians *h)
{
    return h->count;
}

const char *qc_hessians_name(const qc_hessians *h, uint32_t i)
{
    return i < h->count ? h->modules[i].text : "";
}

/* Takes row i of the file to out. Its part before the diagonal is compared with the column above
 * the diagonal, which was read before: *apart is the largest difference. The element of the
 * diagonal is added to *trace. */
static qc_status take_row(const module *m, uint64_t i, const unsigned char *raw, double *out,
                          double *apart, double *trace, qc_error *err)
{
    int wide = m->moment->dtype == QC_DTYPE_F64;
    for (uint64_t j = 0; j < m->n; j++) {
        double v = 0;
        if (wide) {
            uint64_t bits = qc_load_le64(raw + 8 * j);
            memcpy(&v, &bits, sizeof v);
        } else {
            uint32_t bits = qc_load_le32(raw + 4 * j);
            float f = 0;
            memcpy(&f, &bits, sizeof f);
            v = (double)f;
        }
        if (!isfinite(v))
            QC_FAIL(err, QC_ERR_NONFINITE,
                    "tensor '%s': the element at row %" PRIu64 ", column %" PRIu64
                    " is not a finite number",
                    m->moment->name, i, j);
        out[i * m->n + j] = v;
        if (j < i)
            *apart = fmax(*apart, fabs(v - out[j * m->n + i]));
    }
    double d = out[i * m->n + i];
    if (d < 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%s': element %" PRIu64 " of the diagonal is negative (%g)",
                m->moment->name, i, d);
    *trace += d;
    return QC_OK;
}

qc_status qc_hessians_read(const qc_hessians *h, uint32_t number, double *out, qc_error *err)
{
    if (number >= h->count || !h->modules[number].moment)
        QC_FAIL(err, QC_ERR_INTERNAL, "no second moments of number %" PRIu32, number);
    const module *m = &h->modules[number];
    uint64_t row = m->moment->bytes / m->n;
    uint64_t rows = row < PIECE_BYTES ? PIECE_BYTES / row : 1;
    qc_st_cursor *cur = NULL;
    void *raw = NULL;
    double apart = 0;
    double trace = 0;
    qc_status st = QC_OK;
    QC_TRY_GOTO(st, done, qc_malloc(&raw, (size_t)(rows * row), err));
    QC_TRY_GOTO(st, done, qc_st_cursor_create(&cur, err));
    for (uint64_t i = 0; i < m->n; i += rows) {
        uint64_t now = m->n - i < rows ? m->n - i : rows;
        QC_TRY_GOTO(
            st, done,
            qc_checkpoint_read(h->file, cur, m->moment, i * row, raw, (size_t)(now * row), err));
        for (uint64_t k = 0; k < now; k++)
            QC_TRY_GOTO(
                st, done,
                take_row(m, i + k, (const unsigned char *)raw + k * row, out, &apart, &trace, err));
    }
    if (apart > SYMMETRY * trace / (double)m->n) {
        st = QC_ERROR(err, QC_ERR_INPUT,
                      "tensor '%s' is not symmetric: two elements are %g apart, where the "
                      "diagonal's mean is %g",
                      m->moment->name, apart, trace / (double)m->n);
        goto done;
    }
    for (uint64_t i = 0; i < m->n; i++) {
        for (uint64_t j = 0; j < m->n; j++)
            out[i * m->n + j] = j <= i ? out[i * m->n + j] * (double)m->tokens : 0;
    }
done:
    qc_st_cursor_destroy(cur);
    qc_free(raw);
    if (st != QC_OK)
        qc_error_prefix(err, "%s", h->file->path);
    return st;
}
