#include "convert/forward/image_states.h"

#include "base/alloc.h"
#include "base/workers.h"
#include "quant/quant_ops.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CHECKED 256u /* tokens that are looked through at a time */

struct qc_image_states {
    qc_checkpoint *file;
    qc_st_cursor *cursor;
    const qc_quant_ops *ops;
    qc_image *images; /* [count], by number: the one for all comes last */
    size_t count;
    uint64_t width;
    unsigned char *raw; /* what is read before it becomes floats */
    size_t raw_bytes;
};

/* ---- names and shapes ---- */

/* Takes "states" and "states.12" apart. Returns 0 for anything else. */
static int parse_name(const char *name, const char *word, uint64_t *number)
{
    const size_t n = strlen(word);
    char *end = NULL;
    *number = UINT64_MAX;
    if (strncmp(name, word, n) != 0)
        return 0;
    if (!name[n])
        return 1;
    const char *digits = name + n + 1;
    if (name[n] != '.' || *digits < '0' || *digits > '9' || (*digits == '0' && digits[1]))
        return 0;
    *number = strtoull(digits, &end, 10);
    return !*end && *number < UINT32_MAX;
}

static qc_status check_tensor(qc_image_states *s, const qc_checkpoint_tensor *t, qc_error *err)
{
    const char *path = s->file->path;
    if (t->dtype != QC_DTYPE_F32 && t->dtype != QC_DTYPE_F16 && t->dtype != QC_DTYPE_BF16)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s: tensor '%s' is %s; expected F32, F16 or BF16", path,
                t->name, qc_dtype_name(t->dtype));
    if (t->ndim != 2 || t->dims[1] == 0)
        QC_FAIL(err, QC_ERR_SHAPE,
                "%s: tensor '%s' has %u dimensions; expected 2, [tokens, hidden]", path, t->name,
                t->ndim);
    if (s->width == 0)
        s->width = t->dims[1];
    if (t->dims[1] != s->width)
        QC_FAIL(err, QC_ERR_SHAPE,
                "%s: the states in '%s' are %" PRIu64 " wide, and those in '%s' %" PRIu64, path,
                t->name, t->dims[1], s->file->tensors[0].name, s->width);
    return QC_OK;
}

static int by_number(const void *a, const void *b)
{
    const qc_image *x = a, *y = b;
    return x->number < y->number ? -1 : x->number > y->number;
}

static qc_image *find(const qc_image_states *s, uint64_t number)
{
    const qc_image key = {.number = number};
    return bsearch(&key, s->images, s->count, sizeof key, by_number);
}

static qc_status find_padding(qc_image_states *s, qc_error *err)
{
    for (size_t i = 0; i < s->file->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &s->file->tensors[i];
        uint64_t number = 0;
        if (!parse_name(t->name, "padding", &number))
            continue;
        qc_image *image = find(s, number);
        if (!image)
            QC_FAIL(err, QC_ERR_INPUT, "%s: there is '%s', and no 'states%s' that it pads",
                    s->file->path, t->name, t->name + strlen("padding"));
        image->padding = t;
        image->all += t->dims[0];
    }
    return QC_OK;
}

static qc_status find_images(qc_image_states *s, qc_error *err)
{
    const qc_checkpoint *c = s->file;
    uint64_t number = 0;
    QC_TRY(qc_calloc(&s->images, c->tensor_count + 1, sizeof *s->images, err));
    for (size_t i = 0; i < c->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &c->tensors[i];
        const int states = parse_name(t->name, "states", &number);
        if (!states && !parse_name(t->name, "padding", &number))
            QC_FAIL(err, QC_ERR_INPUT,
                    "%s: tensor '%s' is no states of images; expected names such as states, "
                    "states.0 and padding.0",
                    c->path, t->name);
        QC_TRY(check_tensor(s, t, err));
        if (!states)
            continue;
        if (t->dims[0] == 0)
            QC_FAIL(err, QC_ERR_SHAPE, "%s: tensor '%s' has no states", c->path, t->name);
        s->images[s->count++] =
            (qc_image){.number = number, .states = t, .seen = t->dims[0], .all = t->dims[0]};
    }
    if (s->count == 0)
        QC_FAIL(err, QC_ERR_INPUT, "%s: there are no states of images; expected a tensor 'states'",
                c->path);
    qsort(s->images, s->count, sizeof *s->images, by_number);
    return find_padding(s, err);
}

/* ---- numbers ---- */

static qc_status read_rows(qc_image_states *s, const qc_checkpoint_tensor *t, uint64_t first,
                           uint64_t n, float *out, qc_error *err)
{
    const uint64_t each = s->width * (qc_dtype_bits(t->dtype) / 8);
    uint64_t overflow = 0;
    if (n == 0)
        return QC_OK;
    QC_TRY(qc_check_interrupted(err));
    if (s->raw_bytes < n * each) {
        qc_free(s->raw);
        s->raw = NULL;
        s->raw_bytes = 0;
        QC_TRY(qc_malloc(&s->raw, (size_t)(n * each), err));
        s->raw_bytes = (size_t)(n * each);
    }
    QC_TRY(
        qc_checkpoint_read(s->file, s->cursor, t, first * each, s->raw, (size_t)(n * each), err));
    s->ops->cast(s->raw, t->dtype, n * s->width, out, QC_DTYPE_F32, &overflow);
    return QC_OK;
}

static qc_status check_finite(qc_image_states *s, qc_error *err)
{
    float *rows = NULL;
    QC_TRY(qc_malloc(&rows, (size_t)s->width * CHECKED * sizeof *rows, err));
    qc_status st = QC_OK;
    for (size_t i = 0; st == QC_OK && i < s->file->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &s->file->tensors[i];
        for (uint64_t at = 0; st == QC_OK && at < t->dims[0]; at += CHECKED) {
            const uint64_t left = t->dims[0] - at, n = left < CHECKED ? left : CHECKED;
            st = read_rows(s, t, at, n, rows, err);
            for (uint64_t k = 0; st == QC_OK && k < n * s->width; k++)
                if (!isfinite(rows[k]))
                    st = QC_ERROR(err, QC_ERR_NONFINITE,
                                  "%s: tensor '%s': element [%" PRIu64 ", %" PRIu64
                                  "] is not finite",
                                  s->file->path, t->name, at + k / s->width, k % s->width);
        }
    }
    qc_free(rows);
    return st;
}

qc_status qc_image_read(qc_image_states *s, const qc_image *image, uint64_t first, uint64_t n,
                        float *out, qc_error *err)
{
    const uint64_t left = first < image->seen ? image->seen - first : 0, here = n < left ? n : left;
    QC_TRY(read_rows(s, image->states, first, here, out, err));
    if (here == n)
        return QC_OK;
    return read_rows(s, image->padding, first + here - image->seen, n - here, out + here * s->width,
                     err);
}

/* ---- opening ---- */

qc_status qc_image_states_open(qc_image_states **out, const char *path, qc_isa isa, qc_error *err)
{
    qc_image_states *s = NULL;
    *out = NULL;
    QC_TRY(qc_calloc(&s, 1, sizeof *s, err));
    s->ops = qc_quant_ops_for(isa);
    qc_status st = qc_checkpoint_open(&s->file, path, err);
    if (st == QC_OK && s->file->is_dir)
        st = QC_ERROR(err, QC_ERR_INPUT, "%s is a folder; expected a safetensors file", path);
    if (st == QC_OK)
        st = qc_st_cursor_create(&s->cursor, err);
    if (st == QC_OK)
        st = find_images(s, err);
    if (st == QC_OK)
        st = check_finite(s, err);
    if (st == QC_OK)
        *out = s;
    else
        qc_image_states_close(s);
    return st;
}

void qc_image_states_close(qc_image_states *s)
{
    if (!s)
        return;
    qc_free(s->raw);
    qc_free(s->images);
    qc_st_cursor_destroy(s->cursor);
    qc_checkpoint_close(s->file);
    qc_free(s);
}

const char *qc_image_states_path(const qc_image_states *s)
{
    return s->file->path;
}

uint64_t qc_image_states_width(const qc_image_states *s)
{
    return s->width;
}

uint64_t qc_image_states_longest(const qc_image_states *s)
{
    uint64_t longest = 0;
    for (size_t i = 0; i < s->count; i++)
        longest = s->images[i].all > longest ? s->images[i].all : longest;
    return longest;
}

const qc_image *qc_image_of(const qc_image_states *s, uint64_t sequence)
{
    const qc_image *own = find(s, sequence);
    return own ? own : find(s, UINT64_MAX);
}
