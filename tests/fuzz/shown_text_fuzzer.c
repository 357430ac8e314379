/* Any text as a name out of somebody's file: no way to show it lets a control character through,
 * nor a quote out of a string. */
#include "base/text.h"
#include "convert/term/table.h"
#include "formats/json_writer.h"
#include "fuzz_check.h"

#include <stdlib.h>
#include <string.h>

const fuzz_limits fuzz_may_allocate = {2u << 20, 64};

/* C0 but for `allowed`, DEL, C1 as UTF-8, and the override of direction. */
static int has_control(const char *s, const char *allowed)
{
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s, d = (unsigned char)s[1];
        if ((c < 0x20 && !strchr(allowed, c)) || c == 0x7f ||
            (c == 0xc2 && d >= 0x80 && d < 0xa0) || strncmp(s, "\xe2\x80\xae", 3) == 0)
            return 1;
    }
    return 0;
}

static void in_table(const char *name)
{
    qc_arena arena;
    qc_table t;
    qc_strbuf out;
    qc_arena_init(&arena);
    qc_strbuf_init(&out, 1u << 30);
    qc_table_begin(&t, &arena, "name");
    qc_table_put(&t, name);
    qc_table_print(&t, 2, &out);
    FUZZ_CHECK(qc_strbuf_status(&out, NULL) == QC_OK);
    FUZZ_CHECK(!out.data || !has_control(out.data, "\n"));
    qc_strbuf_deinit(&out);
    qc_arena_deinit(&arena);
}

static void in_json(const char *name)
{
    qc_strbuf out;
    qc_json_writer w;
    qc_strbuf_init(&out, 1u << 30);
    qc_json_write_init(&w, &out, NULL);
    qc_json_put_path(&w, NULL, name);
    FUZZ_CHECK(qc_json_write_finish(&w) == QC_OK);
    FUZZ_CHECK(!has_control(out.data, ""));
    qc_strbuf_deinit(&out);
}

int fuzz_one(const uint8_t *data, size_t size)
{
    qc_error err = {0};
    char *name = malloc(size + 1);
    FUZZ_CHECK(name != NULL);
    if (size)
        memcpy(name, data, size);
    name[size] = '\0';
    (void)qc_error_set(&err, QC_ERR_INPUT, "", 0, "tensor '%.*s' in %s", 160, name, name);
    FUZZ_CHECK(!has_control(err.msg, ""));
    qc_error_prefix(&err, "%s", name);
    FUZZ_CHECK(!has_control(err.msg, ""));
    in_table(name);
    in_json(name);
    qc_text_printable(name);
    FUZZ_CHECK(!has_control(name, ""));
    free(name);
    return 0;
}
