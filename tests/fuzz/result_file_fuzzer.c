/* Any text as what earlier runs wrote: a baseline of validate. Refused in words, or values that are
 * in range and in order. */
#include "convert/validate/validate_report.h"
#include "fuzz_check.h"
#include "fuzz_files.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

const fuzz_limits fuzz_may_allocate = {2u << 20, 512};

static void of_baseline(qc_arena *arena, const char *path)
{
    qc_error err = {0};
    qc_validate_baseline b;
    qc_status st = qc_validate_baseline_read(&b, arena, path, &err);
    FUZZ_CHECK(st == QC_OK || (st == QC_ERR_INPUT && err.msg[0]));
    for (size_t i = 0; st == QC_OK && i < b.layer_count; i++) {
        FUZZ_CHECK(b.layers[i].weight_error >= 0.0 && isfinite(b.layers[i].output_error));
        FUZZ_CHECK(i == 0 || strcmp(b.layers[i - 1].name, b.layers[i].name) < 0);
    }
}

int fuzz_one(const uint8_t *data, size_t size)
{
    char path[64];
    qc_arena arena;
    int fd = fuzz_file(path, data, size);
    qc_arena_init(&arena);
    of_baseline(&arena, path);
    qc_arena_deinit(&arena);
    (void)close(fd);
    return 0;
}
