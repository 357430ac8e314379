/* Any text as model.safetensors.index.json: refused, or names that are sorted, belong together and
 * stay below the directory. */
#include "formats/checkpoint_internal.h"
#include "fuzz_check.h"

#include <string.h>

static void check_file_name(const char *name)
{
    FUZZ_CHECK(name[0] != '/' && !strchr(name, '\\') && !strstr(name, "//"));
    FUZZ_CHECK(strncmp(name, "../", 3) != 0 && !strstr(name, "/../") && !strstr(name, "/./"));
    FUZZ_CHECK(qc_ends_with(name, ".safetensors"));
}

const fuzz_limits fuzz_may_allocate = {1u << 20, 96};

int fuzz_one(const uint8_t *data, size_t size)
{
    qc_checkpoint_index index;
    qc_arena arena;
    qc_error err = {0};
    qc_arena_init(&arena);
    qc_status st = qc_checkpoint_index_parse(&index, &arena, (const char *)data, size, &err);
    FUZZ_CHECK(st == QC_OK || (st == QC_ERR_INPUT && err.msg[0] && index.entry_count == 0));
    if (st == QC_OK) {
        FUZZ_CHECK(index.entry_count > 0 && index.file_count > 0);
        FUZZ_CHECK(index.file_count <= index.entry_count);
        for (size_t i = 0; i < index.file_count; i++) {
            check_file_name(index.files[i]);
            FUZZ_CHECK(i == 0 || strcmp(index.files[i - 1], index.files[i]) < 0);
        }
        for (size_t i = 0; i < index.entry_count; i++) {
            FUZZ_CHECK(index.entries[i].file < index.file_count);
            FUZZ_CHECK(i == 0 || strcmp(index.entries[i - 1].name, index.entries[i].name) < 0);
        }
    }
    qc_arena_deinit(&arena);
    return 0;
}
