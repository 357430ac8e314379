/* Any text as a recipe file: refused in words, or rules whose globs end on any name and match what
 * they say: a glob without special characters itself and nothing else. */
#include "convert/cli/rules_file.h"
#include "convert/model/recipe.h"
#include "convert/term/glob.h"
#include "fuzz_check.h"
#include "fuzz_files.h"

#include <string.h>
#include <unistd.h>

const fuzz_limits fuzz_may_allocate = {2u << 20, 512};

int fuzz_one(const uint8_t *data, size_t size)
{
    static const char *const names[] = {
        "",    "model.layers.10.mlp.up_proj.weight",
        "a",   "[",
        "\\*", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"};
    char path[64];
    qc_arena arena;
    qc_error err = {0};
    qc_rule *rules = NULL;
    uint32_t count = 0;
    int fd = fuzz_file(path, data, size);
    qc_arena_init(&arena);
    qc_status st = qc_rules_file_read(&arena, path, &rules, &count, &err);
    FUZZ_CHECK(st == QC_OK || (st == QC_ERR_INPUT && err.msg[0]));
    for (uint32_t i = 0; st == QC_OK && i < count; i++) {
        const char *glob = rules[i].glob;
        FUZZ_CHECK(*glob);
        for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
            int hit = qc_glob_match(glob, names[n]);
            if (!strpbrk(glob, "*?[\\"))
                FUZZ_CHECK(hit == (strcmp(glob, names[n]) == 0));
        }
        (void)qc_glob_match(glob, glob);
        FUZZ_CHECK(qc_natural_compare(glob, glob) == 0);
        FUZZ_CHECK((qc_natural_compare(glob, names[1]) < 0) ==
                   (qc_natural_compare(names[1], glob) > 0));
    }
    qc_arena_deinit(&arena);
    (void)close(fd);
    return 0;
}
