/* Layouts of tensors that a test has in an array. */
#ifndef QC_TESTS_LAYOUT_ARRAY_H
#define QC_TESTS_LAYOUT_ARRAY_H

#include "formats/shard_layout.h"

static void get_of_array(const void *ctx, uint32_t i, qc_out_tensor *t)
{
    *t = ((const qc_out_tensor *)ctx)[i];
}

static qc_out_tensors array_tensors(const qc_out_tensor *t, uint32_t count)
{
    return (qc_out_tensors){get_of_array, t, count};
}

/* qc_layout_make, then every tensor with its place. */
static qc_status layout_array(qc_layout *l, qc_arena *a, qc_out_tensor *t, uint32_t count,
                              uint64_t limit, qc_error *err)
{
    qc_status st = qc_layout_make(l, a, array_tensors(t, count), "model", limit, err);
    for (uint32_t i = 0; st == QC_OK && i < count; i++)
        t[i] = qc_layout_place(l, array_tensors(t, count), i);
    return st;
}

#endif
