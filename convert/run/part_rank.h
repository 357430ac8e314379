/* One conversion can be made by several processes. This says which of them this one is, and what
 * its part is.
 *
 * A part takes whole output shards, so two parts never write to the same file. Which shards those
 * are is a pure function of the plan and the number of parts: every part works it out for itself
 * and asks nobody. convert/output/output_dir.h says how the parts live beside each other on disk,
 * and docs/cluster.md is for users. */
#ifndef QC_CONVERT_PART_RANK_H
#define QC_CONVERT_PART_RANK_H

#include "convert/plan/plan.h"
#include "convert/run/convert_options.h"
#include "convert/run/summary.h"

typedef struct {
    unsigned index; /* 0 .. count - 1 */
    unsigned count; /* 1: all of the work */
} qc_rank;

/* Chooses the rank: --part if it was given, even as 1/1; else the rank of a Slurm task, if srun
 * started this process and the step has more than one task; else 0 of 1.
 *
 * A step is known by SLURM_STEP_NUM_TASKS and SLURM_STEP_ID, which only srun sets, and by
 * SLURM_NTASKS being the same number. Batch scripts have SLURM_NTASKS and SLURM_PROCID too, the
 * shell of salloc has the former, and both inherit the variables of a step that they were started
 * from (tests/slurm/test_slurm.py shows it).
 *
 * It is QC_ERR_USAGE, naming the variable and --part, when these contradict each other, or when a
 * step has more than QC_PARTS_MAX tasks. */
QC_NODISCARD qc_status qc_rank_choose(qc_rank *out, const qc_convert_options *o, qc_error *err);

/* Deals out items: part_of[i] becomes the part, 0 .. parts - 1, of the item that has bytes[i]. The
 * items are taken from the largest down, and each goes to the part that has least so far; among
 * equals the first item and the first part come first. So no part has more than the mean and the
 * largest item together. If there are more parts than items, some have none. (R. L. Graham, Bounds
 * on multiprocessing timing anomalies, 1969: LPT.) */
QC_NODISCARD qc_status qc_parts_deal(uint32_t *part_of, const uint64_t *bytes, uint32_t count,
                                     unsigned parts, qc_error *err);

/* Does the same for a plan's shards, weighed by the bytes that are read and written for them.
 * part_of has plan->layout.count elements. load gets the bytes of each part (parts elements), or is
 * NULL. */
QC_NODISCARD qc_status qc_parts_of_plan(uint32_t *part_of, uint64_t *load, const qc_plan *plan,
                                        unsigned parts, qc_error *err);

/* The shards that one process makes. */
typedef struct {
    const uint32_t *part_of; /* per shard; NULL: all of them are its own */
    unsigned index;          /* its part */
} qc_share;

#define QC_SHARE_ALL ((qc_share){NULL, 0})

static inline int qc_share_has(qc_share s, uint32_t shard)
{
    return !s.part_of || s.part_of[shard] == s.index;
}

/* Is the weight that a job makes in one of these shards? */
int qc_share_has_job(qc_share s, const qc_plan *plan, const qc_job *j);

/* Fills in the sizes and schemes that a report takes from the plan, of these shards. */
void qc_parts_fill_report(qc_convert_report *r, const qc_plan *plan, qc_share share);

#endif
