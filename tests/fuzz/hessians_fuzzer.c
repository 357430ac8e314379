/* Any bytes as a safetensors file of second moments: they are refused in words, or every module
 * that the file lists has moments of the shape it says, which are read or refused. */
#include "base/alloc.h"
#include "convert/calibrate/hessians.h"
#include "fuzz_check.h"
#include "fuzz_files.h"

#include <math.h>
#include <stdio.h>

/* A header of safetensors, a piece of a matrix, and a matrix of floats in double. */
const fuzz_limits fuzz_may_allocate = {4u << 20, 768};

static int is_refusal(qc_status st, const qc_error *err)
{
    return qc_status_exit_code(st) == 3 && err->msg[0];
}

static void read_inputs(const qc_hessians *h, uint32_t number, uint64_t n)
{
    double *m = NULL;
    qc_error err = {0};
    FUZZ_CHECK(qc_calloc(&m, n * n, sizeof *m, NULL) == QC_OK);
    qc_status st = qc_hessians_read(h, number, m, &err);
    FUZZ_CHECK(st == QC_OK || is_refusal(st, &err));
    for (uint64_t i = 0; st == QC_OK && i < n; i++) {
        FUZZ_CHECK(m[i * n + i] >= 0);
        for (uint64_t j = i + 1; j < n; j++)
            FUZZ_CHECK(m[i * n + j] == 0);
    }
    if (qc_hessians_has_cross(h, number)) {
        st = qc_hessians_read_cross(h, number, m, &err);
        FUZZ_CHECK(st == QC_OK || is_refusal(st, &err));
    }
    qc_free(m);
}

static void read_outputs(const qc_hessians *h, uint32_t module)
{
    const qc_hessians_outputs o = qc_hessians_outputs_of(h, module);
    float *m = NULL;
    qc_error err = {0};
    if (o.blocks == 0)
        return;
    FUZZ_CHECK(o.block > 0 && o.tokens > 0 && (o.blocks == 1 || !o.whole));
    uint64_t count = o.blocks * o.block * o.block;
    FUZZ_CHECK(qc_calloc(&m, count, sizeof *m, NULL) == QC_OK);
    qc_status st = qc_hessians_read_outputs(h, module, m, &err);
    FUZZ_CHECK(st == QC_OK || is_refusal(st, &err));
    for (uint64_t i = 0; st == QC_OK && i < count; i++)
        FUZZ_CHECK(isfinite(m[i]));
    qc_free(m);
}

int fuzz_one(const uint8_t *data, size_t size)
{
    static const char *const names[] = {"moments.safetensors"};
    qc_hessians *h = NULL;
    qc_error err = {0};
    char path[256];
    fuzz_part part = {data, size, 1};
    (void)snprintf(path, sizeof path, "%s/%s", fuzz_folder(names, &part, 1), names[0]);
    qc_status st = qc_hessians_open(&h, path, &err);
    FUZZ_CHECK(st == QC_OK ? h != NULL : !h && is_refusal(st, &err));
    for (uint32_t i = 0; st == QC_OK && i < qc_hessians_count(h); i++) {
        uint64_t n = 0, tokens = 0;
        uint32_t number = qc_hessians_moments(h, i, &n, &tokens);
        FUZZ_CHECK(number < qc_hessians_count(h) && n > 0 && tokens > 0);
        read_inputs(h, number, n);
        read_outputs(h, i);
    }
    qc_hessians_close(h);
    (void)fuzz_folder(names, &(fuzz_part){0}, 1);
    return 0;
}
