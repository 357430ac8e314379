#include "convert/cli/rules_file.h"

#include "convert/term/glob.h"
#include "convert/term/size_text.h"
#include "formats/file_io.h"
#include "formats/json_strict.h"

#include <string.h>

#define MAX_FILE_BYTES (4u << 20)
#define MAX_RULES      10000u

static qc_status read_rule(qc_arena *arena, const qc_json_node *node, uint32_t index, qc_rule *rule,
                           qc_error *err)
{
    if (qc_json_kind_of(node) != QC_JSON_OBJECT)
        QC_FAIL(err, QC_ERR_INPUT,
                "rules[%u] is %s; expected {\"keep\": \"GLOB\"} or "
                "{\"quantize\": \"GLOB\"}",
                index, qc_json_kind_name(qc_json_kind_of(node)));
    const qc_json_node *member = qc_json_first(node);
    if (!member || qc_json_next(member))
        QC_FAIL(err, QC_ERR_INPUT, "rules[%u] must have exactly one member, keep or quantize",
                index);
    const char *key = qc_json_key(member);
    if (strcmp(key, "quantize") == 0)
        rule->quantize = 1;
    else if (strcmp(key, "keep") != 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "rules[%u] has the unknown member '%s'; expected keep or "
                "quantize",
                index, key);
    const char *glob = NULL;
    QC_TRY(qc_json_as_string(member, key, &glob, err));
    if (*glob == '\0')
        QC_FAIL(err, QC_ERR_INPUT,
                "rules[%u]: the glob is empty; expected one such as '*.q_proj.*'", index);
    if (strlen(glob) > QC_GLOB_MAX_BYTES)
        QC_FAIL(err, QC_ERR_INPUT, "rules[%u]: expected a glob of at most %u bytes, found %zu",
                index, QC_GLOB_MAX_BYTES, strlen(glob));
    return qc_arena_strdup(arena, &rule->glob, glob, err);
}

static qc_status read_rules(qc_arena *arena, const qc_json_node *root, qc_rule **rules,
                            uint32_t *count, qc_error *err)
{
    if (qc_json_kind_of(root) != QC_JSON_OBJECT)
        QC_FAIL(err, QC_ERR_INPUT, "expected an object {\"rules\": [...]}, found %s",
                qc_json_kind_name(qc_json_kind_of(root)));
    for (const qc_json_node *m = qc_json_first(root); m; m = qc_json_next(m))
        if (strcmp(qc_json_key(m), "rules") != 0)
            QC_FAIL(err, QC_ERR_INPUT, "unknown member '%s'; expected rules only", qc_json_key(m));
    const qc_json_node *list = qc_json_get(root, "rules");
    if (!list || qc_json_kind_of(list) != QC_JSON_ARRAY)
        QC_FAIL(err, QC_ERR_INPUT, "rules is missing or not an array; expected {\"rules\": [...]}");
    const size_t n = qc_json_count(list);
    if (n > MAX_RULES)
        QC_FAIL(err, QC_ERR_INPUT, "expected at most %u rules, found %zu", MAX_RULES, n);
    QC_TRY(qc_arena_alloc(arena, rules, n, sizeof **rules, err));
    *count = 0;
    for (const qc_json_node *r = qc_json_first(list); r; r = qc_json_next(r)) {
        QC_TRY(read_rule(arena, r, *count, &(*rules)[*count], err));
        ++*count;
    }
    return QC_OK;
}

qc_status qc_rules_file_read(qc_arena *arena, const char *path, qc_rule **rules, uint32_t *count,
                             qc_error *err)
{
    qc_strbuf text;
    qc_json *doc = NULL;
    qc_status st = QC_OK;
    qc_strbuf_init(&text, MAX_FILE_BYTES);
    /* The messages of reading the file name it already. */
    QC_TRY_GOTO(st, done, qc_file_slurp(path, &text, err));
    st = qc_json_parse(&doc, text.data ? text.data : "", text.len, 0, err);
    if (st == QC_OK)
        st = read_rules(arena, qc_json_root(doc), rules, count, err);
    if (st != QC_OK)
        qc_error_prefix(err, "recipe '%s'", path);
done:
    qc_json_destroy(doc);
    qc_strbuf_deinit(&text);
    return st;
}
