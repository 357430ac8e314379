#include "convert/run/ending.h"

#include <stddef.h>

#define ON(end) (1u << (end))
#define ON_ANY  (ON(QC_END_STOPPED) | ON(QC_END_CHANGED) | ON(QC_END_MISFIT) | ON(QC_END_REFUSED))

/* The first row that fits counts. */
typedef struct {
    unsigned ends;          /* one of these */
    unsigned with, without; /* facts */
    qc_ending then;
} row;

static const row rows[] = {
    {ON(QC_END_DONE), QC_ENDING_OTHERS_LEFT, 0, {QC_STAGING_LEAVE, 0}},
    {ON(QC_END_DONE), 0, 0, {QC_STAGING_CLOSE, 0}},
    /* The journal in the folder is another run's, and so is what it speaks of. */
    {ON_ANY, QC_ENDING_JOURNAL, QC_ENDING_OPENED, {QC_STAGING_LEAVE, 0}},
    {ON_ANY, 0, QC_ENDING_OPENED, {QC_STAGING_DROP, 0}},
    /* There is nothing to go on with. */
    {ON_ANY, 0, QC_ENDING_WORK, {QC_STAGING_DROP, 0}},
    {ON(QC_END_STOPPED) | ON(QC_END_CHANGED), 0, 0, {QC_STAGING_LEAVE, 1}},
    {ON(QC_END_MISFIT), 0, 0, {QC_STAGING_LEAVE, 0}},
    /* What one process did is not undone for what is wrong with another's part. */
    {ON(QC_END_REFUSED), QC_ENDING_PART_MADE, 0, {QC_STAGING_LEAVE, 0}},
    /* It was refused before anything was made, so what is there is an earlier run's. */
    {ON(QC_END_REFUSED), 0, QC_ENDING_WORKED, {QC_STAGING_LEAVE, 0}},
    /* Working on the input showed what is wrong with it. */
    {ON(QC_END_REFUSED), 0, 0, {QC_STAGING_DROP, 0}},
};

qc_end qc_end_of(qc_status status, int misfit)
{
    if (status == QC_OK)
        return QC_END_DONE;
    if (misfit)
        return QC_END_MISFIT;
    if (status == QC_ERR_CHANGED)
        return QC_END_CHANGED;
    return qc_status_is_refusal(status) ? QC_END_REFUSED : QC_END_STOPPED;
}

qc_ending qc_ending_of(qc_end end, unsigned facts)
{
    size_t i = 0;
    while (!(rows[i].ends & ON(end)) || (facts & rows[i].with) != rows[i].with ||
           (facts & rows[i].without))
        i++;
    return rows[i].then;
}
