#include "convert/run/promise.h"

#include "base/text.h"
#include "convert/run/make_manifest.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <string.h>

/* ---- files ---- */

static qc_status compare_tensor(const qc_plan *plan, uint32_t tensor, const qc_st_tensor *t,
                                qc_strbuf *name, const char *path, qc_error *err)
{
    qc_manifest_tensor want;
    QC_TRY(qc_manifest_plan_row(&want, name, plan, tensor, err));
    const int empty = want.begin == want.end && t->begin == t->end; /* these lie in any order */
    if (empty || (strcmp(t->name, want.name) == 0 && t->dtype == want.dtype &&
                  t->ndim == want.ndim && t->begin == want.begin && t->end == want.end &&
                  memcmp(t->dims, want.dims, t->ndim * sizeof *t->dims) == 0))
        return QC_OK;
    QC_FAIL(err, QC_ERR_CHECK,
            "%s: it was to have '%s' of %s in %" PRIu64 " bytes, and has '%s' of %s in %" PRIu64
            "; what was written is not what was planned",
            path, want.name, qc_dtype_name(want.dtype), want.end - want.begin, t->name,
            qc_dtype_name(t->dtype), t->end - t->begin);
}

static qc_status compare_shard(const qc_plan *plan, uint32_t shard, const char *path, qc_error *err)
{
    const qc_shard *s = &plan->layout.shards[shard];
    qc_st_file f;
    qc_strbuf name;
    qc_status st = QC_OK;
    QC_TRY(qc_st_file_open(&f, path, err));
    qc_strbuf_init(&name, SIZE_MAX / 2);
    if (f.header.tensor_count != s->count || f.header.data_bytes != s->data_bytes ||
        f.data_offset != s->header_bytes)
        st = QC_ERROR(err, QC_ERR_CHECK,
                      "%s: it was to have %" PRIu32 " tensors in %" PRIu64
                      " bytes, and has %zu in %" PRIu64 " bytes",
                      path, s->count, s->data_bytes, f.header.tensor_count, f.header.data_bytes);
    for (uint32_t i = 0; st == QC_OK && i < s->count; i++)
        st = compare_tensor(plan, s->order[i], &f.header.tensors[i], &name, path, err);
    qc_strbuf_deinit(&name);
    qc_st_file_close(&f);
    return st;
}

/* Is there something in the output for each tensor of the source that is not absorbed? What stays
 * in floats has the shape of the source. */
static qc_status compare_source(const qc_plan *plan, qc_error *err)
{
    const qc_checkpoint *model = plan->model;
    size_t absorbed = 0;
    for (size_t i = 0; i < model->tensor_count; i++)
        absorbed += plan->recipe->entries[i].scheme == QC_SCHEME_ABSORBED;
    if (absorbed + plan->job_count != model->tensor_count)
        QC_FAIL(err, QC_ERR_CHECK,
                "%s: of its %zu tensors %" PRIu32 " were written and %zu absorbed; expected all",
                model->path, model->tensor_count, plan->job_count, absorbed);
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_job *j = &plan->jobs[i];
        const qc_checkpoint_tensor *t = &model->tensors[j->source];
        const qc_out_tensor o = qc_plan_tensor(plan, j->first_output);
        const int same =
            o.st.ndim == t->ndim && memcmp(o.st.dims, t->dims, t->ndim * sizeof *t->dims) == 0;
        if (j->scheme == QC_SCHEME_KEEP && !same)
            QC_FAIL(err, QC_ERR_CHECK, "tensor '%s': it was to be kept, and has another shape",
                    t->name);
    }
    return QC_OK;
}

qc_status qc_promise_check_files(const qc_pipeline *p, qc_error *err)
{
    for (uint32_t s = 0; s < p->plan->layout.count; s++)
        QC_TRY(compare_shard(p->plan, s, p->shards[s].path, err));
    return compare_source(p->plan, err);
}

/* ---- what stays large ---- */

qc_promise_left qc_promise_count_left(const qc_plan *plan)
{
    qc_promise_left n = {0};
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_job *j = &plan->jobs[i];
        const uint64_t bytes = qc_checkpoint_bytes(&plan->model->tensors[j->source]);
        if (!j->entry->unasked && (j->entry->role != QC_ROLE_LINEAR || j->ndim < 2))
            continue;
        n.matrices++;
        n.bytes += bytes;
        if (!j->entry->unasked)
            continue;
        n.left++;
        n.left_bytes += bytes;
        n.first = n.first ? n.first : j->name;
        n.why = n.why ? n.why : j->entry->why;
    }
    return n;
}

qc_status qc_promise_check_left(const qc_promise_left *n, const char *out, qc_error *err)
{
    char left[QC_SIZE_TEXT_BYTES], all[QC_SIZE_TEXT_BYTES];
    if (n->left_bytes <= n->bytes / 2)
        return QC_OK;
    QC_FAIL(err, QC_ERR_CHECK,
            "%s is complete, but %" PRIu32 " of %" PRIu32 " matrices, %s of %s, stay as they were "
            "though nothing asked for it: '%.160s' (%s)%s; --keep names what is meant to stay",
            out, n->left, n->matrices, qc_text_bytes(left, n->left_bytes),
            qc_text_bytes(all, n->bytes), n->first, n->why, n->left > 1 ? " is the first" : "");
}
