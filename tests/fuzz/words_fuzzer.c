/* Any lines as the words of a command line, and the whole as the value of --vram, --device and a
 * size: refused in one line that ends in no full stop, or options within their limits; a budget
 * says itself in words that mean the same. */
#include "base/text.h"
#include "convert/cli/options.h"
#include "convert/device/device_wish.h"
#include "convert/fit/budget.h"
#include "convert/term/size_text.h"
#include "fuzz_check.h"

#include <stdlib.h>
#include <string.h>

#define WORDS_MOST 64

const fuzz_limits fuzz_may_allocate = {2u << 20, 512};

static void of_options(char *text)
{
    char program[] = "qconv";
    char *argv[WORDS_MOST + 2] = {program};
    int argc = 1;
    qc_arena arena;
    qc_options o;
    qc_error err = {0};
    for (char *p = text; p && argc <= WORDS_MOST;) {
        argv[argc++] = p;
        p = strchr(p, '\n');
        if (p)
            *p++ = '\0';
    }
    qc_arena_init(&arena);
    qc_status st = qc_options_parse(&o, &arena, argc, argv, &err);
    FUZZ_CHECK(st == QC_OK || (err.msg[0] && !strchr(err.msg, '\n')));
    FUZZ_CHECK(st == QC_OK || qc_status_exit_code(st) <= 3);
    if (st == QC_OK && o.command == QC_CMD_CONVERT)
        FUZZ_CHECK(o.model && o.convert.plan.fit.margin > 0.0 && o.convert.plan.fit.margin <= 1.0);
    qc_arena_deinit(&arena);
}

static void of_budget(const char *text)
{
    qc_arena arena;
    qc_budget b;
    qc_error err = {0};
    /* What looks at the machine is slow, and not the input's. */
    if (strstr(text, "auto") || strstr(text, "AUTO"))
        return;
    qc_arena_init(&arena);
    qc_status st = qc_budget_parse(&b, &arena, text, &err);
    FUZZ_CHECK(st == QC_OK || ((st == QC_ERR_USAGE || st == QC_ERR_DEVICE) && err.msg[0]));
    if (st == QC_OK)
        FUZZ_CHECK(b.count > 0 && b.count <= QC_MAX_DEVICES && b.gpu_count <= b.count);
    qc_arena_deinit(&arena);
}

int fuzz_one(const uint8_t *data, size_t size)
{
    uint64_t bytes = 0;
    qc_device_wish wish;
    qc_error err = {0};
    char *text = malloc(size + 1);
    FUZZ_CHECK(text != NULL);
    if (size)
        memcpy(text, data, size);
    text[size] = '\0';
    of_budget(text);
    qc_status st = qc_parse_size(text, "size", &bytes, &err);
    FUZZ_CHECK(st == QC_OK || (st == QC_ERR_USAGE && err.msg[0]));
    if (*text) {
        st = qc_device_wish_read(&wish, text, &err);
        FUZZ_CHECK(st == QC_OK || ((st == QC_ERR_USAGE || st == QC_ERR_DEVICE) && err.msg[0]));
    }
    of_options(text);
    free(text);
    return 0;
}
