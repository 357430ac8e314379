#include "formats/manifest_header.h"

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PLACE_BYTES 256u

/* ---- Tensor by tensor ----------------------------------------------------------------------- */

/* "BF16 [32, 64] from byte 128" */
static const char *place_text(char out[PLACE_BYTES], qc_dtype dtype, const uint64_t *dims,
                              unsigned ndim, uint64_t begin)
{
    int at = snprintf(out, PLACE_BYTES, "%s [", qc_dtype_name(dtype));
    for (unsigned d = 0; d < ndim; d++)
        at += snprintf(out + at, PLACE_BYTES - (size_t)at, "%s%" PRIu64, d ? ", " : "", dims[d]);
    (void)snprintf(out + at, PLACE_BYTES - (size_t)at, "] from byte %" PRIu64, begin);
    return out;
}

static qc_status fail_on_one_side(const qc_manifest *m, const char *shard, const char *name,
                                  int listed, qc_error *err)
{
    QC_FAIL(err, QC_ERR_CHECK, "header of %s%s: tensor " QC_NAME " is %s", shard,
            qc_manifest_ending(m), name,
            listed ? "in the manifest, but not in the header"
                   : "in the header, but not in the manifest");
}

static qc_status compare(const qc_manifest *m, const qc_manifest_tensor *t,
                         const qc_header_tensor *found, qc_error *err)
{
    const qc_st_tensor *h = &found->tensor;
    char listed[PLACE_BYTES], have[PLACE_BYTES];
    if (strcmp(m->shards[t->shard].name, found->shard) != 0)
        QC_FAIL(err, QC_ERR_CHECK,
                "header of %s%s: tensor " QC_NAME " is in %s according to the manifest",
                found->shard, qc_manifest_ending(m), t->name, m->shards[t->shard].name);
    if (t->dtype == h->dtype && t->ndim == h->ndim && t->begin == h->begin && t->end == h->end &&
        memcmp(t->dims, h->dims, t->ndim * sizeof *t->dims) == 0)
        return QC_OK;
    QC_FAIL(err, QC_ERR_CHECK, "header of %s%s: tensor " QC_NAME " is %s; the manifest says %s",
            found->shard, qc_manifest_ending(m), t->name,
            place_text(have, h->dtype, h->dims, h->ndim, h->begin),
            place_text(listed, t->dtype, t->dims, t->ndim, t->begin));
}

qc_status qc_manifest_hold(const qc_manifest *m, size_t first, size_t end, qc_header_tensor_fn at,
                           const void *ctx, size_t count, qc_error *err)
{
    const qc_manifest_tensor **rows = NULL;
    QC_TRY(qc_calloc(&rows, end - first, sizeof(qc_manifest_tensor *), err));
    for (size_t i = first; i < end; i++)
        rows[i - first] = &m->tensors[i];
    qsort(rows, end - first, sizeof(qc_manifest_tensor *), qc_by_text_behind);
    qc_status st = QC_OK;
    for (size_t i = 0, j = 0; st == QC_OK && (i < end - first || j < count);) {
        qc_header_tensor found;
        int order = i < end - first ? -1 : 1;
        if (j < count)
            at(ctx, j, &found);
        if (j < count && i < end - first)
            order = strcmp(rows[i]->name, found.tensor.name);
        if (order < 0)
            st = fail_on_one_side(m, m->shards[rows[i]->shard].name, rows[i]->name, 1, err);
        else if (order > 0)
            st = fail_on_one_side(m, found.shard, found.tensor.name, 0, err);
        else
            st = compare(m, rows[i], &found, err);
        i++;
        j++;
    }
    qc_free(rows);
    return st;
}

/* ---- The header of a shard ------------------------------------------------------------------ */

/* The text must be the next bytes of the header. Compared bytes are removed from the text except
 * for the last, by which qc_st_header_add knows that a comma comes next. */
static int matches(qc_strbuf *text, size_t skip, const char **header, size_t *left)
{
    size_t n = text->len - skip;
    if (n > *left || memcmp(*header, text->data + skip, n) != 0)
        return 0;
    *header += n;
    *left -= n;
    text->data[0] = text->data[text->len - 1];
    text->len = 1;
    return 1;
}

/* Finds out whether the header is exactly what a writer makes of the rows. */
static qc_status is_as_written(int *yes, const char *header, size_t bytes, const qc_manifest *m,
                               size_t first, size_t end, qc_error *err)
{
    static const qc_st_meta pt_format = {"format", "pt"};
    const char *at = header + 8;
    size_t left = bytes - 8;
    qc_strbuf text;
    qc_strbuf_init(&text, SIZE_MAX / 2);
    qc_status st = qc_st_header_begin(&text, &pt_format, 1, err);
    *yes = st == QC_OK && qc_load_le64(header) == left && matches(&text, 8, &at, &left);
    for (size_t i = first; st == QC_OK && *yes && i < end; i++) {
        const qc_manifest_tensor *t = &m->tensors[i];
        qc_st_tensor row = {
            .name = t->name, .dtype = t->dtype, .ndim = t->ndim, .begin = t->begin, .end = t->end};
        memcpy(row.dims, t->dims, sizeof row.dims);
        st = qc_st_header_add(&text, &row, err);
        *yes = st == QC_OK && matches(&text, 1, &at, &left);
    }
    *yes = *yes && left > 0 && *at == '}';
    while (*yes && --left > 0)
        *yes = *++at == ' ';
    qc_strbuf_deinit(&text);
    return st;
}

typedef struct {
    const qc_st_header *header;
    const char *shard;
} parsed_header;

static void parsed_at(const void *ctx, size_t i, qc_header_tensor *out)
{
    const parsed_header *p = ctx;
    *out = (qc_header_tensor){p->header->tensors[i], p->shard};
}

/* A header that another program spelled, or that says something else, is parsed. */
qc_status qc_shard_header_check(const char *header, const qc_digest *digest, const qc_manifest *m,
                                size_t shard, size_t first, size_t end, qc_error *err)
{
    const qc_manifest_shard *s = &m->shards[shard];
    int yes = 0;
    QC_TRY(is_as_written(&yes, header, (size_t)s->header_bytes, m, first, end, err));
    if (!yes && !qc_digest_equal(digest, &s->header))
        QC_FAIL(err, QC_ERR_CHECK, "header of %s%s: its bytes are not those that were written",
                s->name, qc_manifest_ending(m));
    if (yes)
        return QC_OK;
    qc_st_header h;
    uint64_t n = 0;
    qc_status st = qc_st_header_length((const unsigned char *)header, (size_t)s->header_bytes,
                                       s->content_bytes, &n, err);
    if (st == QC_OK && n != s->header_bytes - 8)
        st = QC_ERROR(err, QC_ERR_CHECK, "it has %" PRIu64 " bytes, but the manifest says %" PRIu64,
                      n + 8, s->header_bytes);
    if (st == QC_OK)
        st = qc_st_header_parse(&h, header + 8, (size_t)n, s->content_bytes - s->header_bytes, err);
    if (st != QC_OK) {
        qc_error_prefix(err, "header of %s%s", s->name, qc_manifest_ending(m));
        return st;
    }
    qsort(h.tensors, h.tensor_count, sizeof *h.tensors, qc_by_text);
    parsed_header p = {&h, s->name};
    st = qc_manifest_hold(m, first, end, parsed_at, &p, h.tensor_count, err);
    qc_st_header_deinit(&h);
    return st;
}
