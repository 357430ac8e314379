/* Any files as a model's folder with an adapter in it (see fuzz_files.h): refused in words, or an
 * adapter whose tensors lie in its file, which fits the model or not; and what is merged is the
 * same as a whole and element by element, or refused. */
#include "base/alloc.h"
#include "convert/adapter/adapters.h"
#include "fuzz_check.h"
#include "fuzz_files.h"

#include <math.h>
#include <string.h>

/* A header of safetensors, and A and B in double. */
const fuzz_limits fuzz_may_allocate = {400u << 20, 512};

#define READ_MOST (1u << 16)

static const char *const names[] = {
    "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "model.safetensors",
    "config.json",
};
#define NAME_COUNT (sizeof names / sizeof *names)

static int is_refusal(qc_status st, const qc_error *err)
{
    return (qc_status_exit_code(st) == 3 || qc_status_exit_code(st) == 2) && err->msg[0];
}

static int look_at(const char *folder)
{
    qc_adapter *a = NULL;
    qc_error err = {0};
    qc_status st = qc_adapter_open(&a, folder, &err);
    FUZZ_CHECK(st == QC_OK ? a != NULL : !a && is_refusal(st, &err));
    for (size_t i = 0; a && i < a->module_count; i++) {
        const qc_adapter_module *m = &a->modules[i];
        FUZZ_CHECK(m->a < a->weights->tensor_count && m->b < a->weights->tensor_count);
        FUZZ_CHECK(m->rank > 0 && isfinite(m->scaling));
        FUZZ_CHECK(i == 0 || strcmp(m[-1].module, m->module) < 0);
    }
    for (size_t i = 0; a && i < a->whole_count; i++)
        FUZZ_CHECK(a->wholes[i].tensor < a->weights->tensor_count);
    qc_adapter_close(a);
    return st == QC_OK;
}

static void read_merged(const qc_checkpoint *c, const qc_checkpoint_tensor *t, qc_st_cursor *cursor)
{
    qc_error err = {0};
    void *whole = NULL;
    if (!t->change || t->change->decoded || t->bytes == 0 || t->bytes > READ_MOST)
        return;
    FUZZ_CHECK(qc_malloc(&whole, (size_t)t->bytes, NULL) == QC_OK);
    qc_status st = qc_checkpoint_read(c, cursor, t, 0, whole, (size_t)t->bytes, &err);
    FUZZ_CHECK(st == QC_OK || is_refusal(st, &err));
    const float *values = whole;
    for (uint64_t i = 0; st == QC_OK && i < t->bytes / sizeof *values; i++) {
        float one = 0;
        FUZZ_CHECK(qc_checkpoint_read(c, cursor, t, i * sizeof one, &one, sizeof one, NULL) ==
                   QC_OK);
        FUZZ_CHECK(memcmp(&one, &values[i], sizeof one) == 0);
    }
    qc_free(whole);
}

static void merge(const char *folder)
{
    qc_lora lora = {.path = folder, .scale = 0.5};
    const qc_loras loras = {&lora, 1};
    qc_checkpoint *c = NULL;
    qc_st_cursor *cursor = NULL;
    qc_error err = {0};
    if (qc_checkpoint_open(&c, folder, NULL) != QC_OK)
        return;
    qc_status st = qc_adapters_attach(c, loras, &err);
    FUZZ_CHECK(st == QC_OK || is_refusal(st, &err));
    FUZZ_CHECK(qc_st_cursor_create(&cursor, NULL) == QC_OK);
    for (size_t i = 0; st == QC_OK && i < c->tensor_count; i++)
        read_merged(c, &c->tensors[i], cursor);
    qc_st_cursor_destroy(cursor);
    qc_checkpoint_close(c);
}

int fuzz_one(const uint8_t *data, size_t size)
{
    fuzz_part parts[FUZZ_MOST_PARTS];
    fuzz_split(parts, data, size);
    const char *folder = fuzz_folder(names, parts, NAME_COUNT);
    if (look_at(folder))
        merge(folder);
    (void)fuzz_folder(names, (fuzz_part[FUZZ_MOST_PARTS]){{0}}, NAME_COUNT);
    return 0;
}
