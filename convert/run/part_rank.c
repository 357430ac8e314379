#include "convert/run/part_rank.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <stdlib.h>
#include <string.h>

/* ---- Rank ----------------------------------------------------------------------------------- */

/* Reads a number from the environment, without sign or blanks. */
static qc_status read_number(const char *name, const char *text, uint64_t *out, qc_error *err)
{
    uint64_t n = 0;
    const char *c = text;
    for (; *c >= '0' && *c <= '9' && n < 1000000000u; c++)
        n = n * 10 + (uint64_t)(*c - '0');
    if (c == text || *c)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s is '%.40s'; expected a number; give --part I/N (1/1 is all of the work)", name,
                text);
    *out = n;
    return QC_OK;
}

static qc_status read_step(qc_rank *out, const char *tasks_text, qc_error *err)
{
    uint64_t tasks = 0, task = 0, all = 0;
    const char *task_text = getenv("SLURM_PROCID"), *all_text = getenv("SLURM_NTASKS");
    QC_TRY(read_number("SLURM_STEP_NUM_TASKS", tasks_text, &tasks, err));
    /* A job that a task submits, or the shell of a salloc in it, inherits the variables of the
     * step, but has a number of tasks of its own. */
    if (all_text)
        QC_TRY(read_number("SLURM_NTASKS", all_text, &all, err));
    if (tasks == 1 || (all_text && all != tasks))
        return QC_OK;
    QC_TRY(read_number("SLURM_PROCID", task_text ? task_text : "", &task, err));
    if (task >= tasks)
        QC_FAIL(err, QC_ERR_USAGE,
                "SLURM_PROCID is %llu, but SLURM_STEP_NUM_TASKS is %llu; give --part I/N",
                (unsigned long long)task, (unsigned long long)tasks);
    if (tasks > QC_PARTS_MAX)
        QC_FAIL(err, QC_ERR_USAGE,
                "the Slurm step has %llu tasks; expected at most %u, one for each part",
                (unsigned long long)tasks, QC_PARTS_MAX);
    *out = (qc_rank){(unsigned)task, (unsigned)tasks};
    return QC_OK;
}

qc_status qc_rank_choose(qc_rank *out, const qc_convert_options *o, qc_error *err)
{
    *out = (qc_rank){0, 1};
    if (o->part_count) {
        *out = (qc_rank){o->part_index, o->part_count};
        return QC_OK;
    }
    const char *tasks = getenv("SLURM_STEP_NUM_TASKS");
    if (!tasks || !getenv("SLURM_STEP_ID"))
        return QC_OK;
    return read_step(out, tasks, err);
}

/* ---- Dealing out ---------------------------------------------------------------------------- */

typedef struct {
    uint64_t bytes;
    uint32_t index;
} item;

static int larger_first(const void *pa, const void *pb)
{
    const item *a = pa, *b = pb;
    if (a->bytes != b->bytes)
        return a->bytes > b->bytes ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

qc_status qc_parts_deal(uint32_t *part_of, const uint64_t *bytes, uint32_t count, unsigned parts,
                        qc_error *err)
{
    item *items = NULL;
    uint64_t *load = NULL; /* bytes of each part so far */
    if (parts == 0)
        QC_FAIL(err, QC_ERR_INTERNAL, "no part to give work to");
    QC_TRY(qc_calloc(&items, count, sizeof *items, err));
    qc_status st = qc_calloc(&load, parts, sizeof *load, err);
    for (uint32_t i = 0; i < count; i++)
        items[i] = (item){bytes[i], i};
    qsort(items, count, sizeof *items, larger_first);
    for (uint32_t i = 0; st == QC_OK && i < count; i++) {
        unsigned least = 0;
        for (unsigned k = 1; k < parts; k++)
            least = load[k] < load[least] ? k : least;
        part_of[items[i].index] = least;
        load[least] = qc_sat_add(load[least], items[i].bytes);
    }
    qc_free(items);
    qc_free(load);
    return st;
}

qc_status qc_parts_of_plan(uint32_t *part_of, uint64_t *load, const qc_plan *plan, unsigned parts,
                           qc_error *err)
{
    uint32_t count = plan->layout.count;
    uint64_t *bytes = NULL;
    QC_TRY(qc_calloc(&bytes, count, sizeof(uint64_t), err));
    for (uint32_t i = 0; i < count; i++)
        bytes[i] =
            qc_sat_add(plan->layout.shards[i].header_bytes, plan->layout.shards[i].data_bytes);
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_job *j = &plan->jobs[i];
        uint64_t *b = &bytes[qc_plan_tensor(plan, j->first_output).shard];
        *b = qc_sat_add(*b, qc_sat_add(plan->model->tensors[j->source].bytes, j->absorbed_bytes));
    }
    qc_status st = qc_parts_deal(part_of, bytes, count, parts, err);
    for (unsigned i = 0; load && i < parts; i++)
        load[i] = 0;
    for (uint32_t i = 0; st == QC_OK && load && i < count; i++)
        load[part_of[i]] = qc_sat_add(load[part_of[i]], bytes[i]);
    qc_free(bytes);
    return st;
}

int qc_share_has_job(qc_share s, const qc_plan *plan, const qc_job *j)
{
    return qc_share_has(s, qc_plan_tensor(plan, j->first_output).shard);
}

void qc_parts_fill_report(qc_convert_report *r, const qc_plan *plan, qc_share share)
{
    memset(r->schemes, 0, sizeof r->schemes);
    r->bytes_in = r->bytes_out_content = r->shards = 0;
    for (uint32_t i = 0; i < plan->layout.count; i++)
        r->shards += qc_share_has(share, i) ? 1 : 0;
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_job *j = &plan->jobs[i];
        if (!qc_share_has_job(share, plan, j))
            continue;
        qc_report_scheme *s = &r->schemes[j->scheme];
        uint64_t in = plan->model->tensors[j->source].bytes + j->absorbed_bytes;
        uint64_t out = qc_plan_job_bytes(plan, j);
        s->tensors++;
        s->elems += j->elems;
        s->bytes_in += in;
        s->bytes_out += out;
        r->bytes_in += in;
        r->bytes_out_content += out;
    }
    if (!share.part_of) {
        r->bytes_in = plan->source_bytes;
        r->bytes_out_content = plan->tensor_bytes;
    }
}
