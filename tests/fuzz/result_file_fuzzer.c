/* Any text as what earlier runs wrote: a baseline of validate, a table of bench
 * --tune. Refused in words, or values that are written and read back the same. */
#include "convert/device/tuning_file.h"
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

static void of_tuning(qc_arena *arena, const char *path)
{
    char again_path[64];
    qc_error err = {0};
    qc_tuning t, again;
    qc_strbuf text;
    qc_status st = qc_tuning_read(&t, arena, path, &err);
    FUZZ_CHECK(st == QC_OK || (st == QC_ERR_INPUT && err.msg[0]));
    if (st != QC_OK)
        return;
    qc_strbuf_init(&text, 1u << 30);
    FUZZ_CHECK(qc_tuning_text(&t, &text, NULL) == QC_OK);
    int fd = fuzz_file(again_path, (const uint8_t *)text.data, text.len);
    FUZZ_CHECK(qc_tuning_read(&again, arena, again_path, NULL) == QC_OK);
    FUZZ_CHECK(again.count == t.count && strcmp(again.gpu, t.gpu) == 0);
    for (uint32_t i = 0; i < t.count; i++) {
        const qc_matmul_tuned *a = &t.rows[i], *b = &again.rows[i];
        FUZZ_CHECK(a->m_least >= 1 && a->m_least <= a->m_most && a->choice.path != QC_MATMUL_AUTO &&
                   a->choice.variant < QC_MATMUL_VARIANT_COUNT &&
                   a->choice.blocks <= QC_MATMUL_BLOCKS_MOST);
        FUZZ_CHECK(a->kind == b->kind && a->n == b->n && a->k == b->k && a->m_least == b->m_least &&
                   a->m_most == b->m_most && a->choice.path == b->choice.path &&
                   a->choice.variant == b->choice.variant && a->choice.blocks == b->choice.blocks);
    }
    (void)close(fd);
    qc_strbuf_deinit(&text);
}

int fuzz_one(const uint8_t *data, size_t size)
{
    char path[64];
    qc_arena arena;
    int fd = fuzz_file(path, data, size);
    qc_arena_init(&arena);
    of_baseline(&arena, path);
    of_tuning(&arena, path);
    qc_arena_deinit(&arena);
    (void)close(fd);
    return 0;
}
