/* The pattern files of tests/data/models as checkpoints in memory. */
#ifndef QC_TESTS_MODEL_FILES_H
#define QC_TESTS_MODEL_FILES_H

#include "recipe_fixture.h"

#include <inttypes.h>

typedef struct {
    const char *name, *role;
} named_role;

static char *read_text(const char *path, size_t *len)
{
    FILE *fp = fopen(path, "rb");
    if (!fp)
        fail_msg("cannot open %s", path);
    assert_int_equal(fseek(fp, 0, SEEK_END), 0);
    long size = ftell(fp);
    assert_true(size > 0);
    rewind(fp);
    char *text = malloc((size_t)size + 1);
    assert_non_null(text);
    *len = fread(text, 1, (size_t)size, fp);
    assert_int_equal(*len, size);
    text[*len] = 0;
    (void)fclose(fp);
    return text;
}

typedef struct {
    uint64_t layer, expert;
} place;

/* Replace {l} and {e}. */
static void expand_name(char *out, size_t cap, const char *pattern, const place *p)
{
    size_t n = 0;
    for (const char *s = pattern; *s && n + 24 < cap;) {
        if (strncmp(s, "{l}", 3) == 0 || strncmp(s, "{e}", 3) == 0) {
            n += (size_t)snprintf(out + n, cap - n, "%" PRIu64, s[1] == 'l' ? p->layer : p->expert);
            s += 3;
        } else {
            out[n++] = *s++;
        }
    }
    out[n] = 0;
}

static void read_span(const qc_json_node *n, uint64_t span[3])
{
    span[0] = span[1] = 0;
    span[2] = 1;
    if (qc_json_kind_of(n) == QC_JSON_NULL)
        return;
    unsigned i = 0;
    for (const qc_json_node *c = qc_json_first(n); c; c = qc_json_next(c))
        assert_int_equal(qc_json_as_u64(c, "span", &span[i++], NULL), QC_OK);
}

static named_role *roles;
static size_t role_count;

static int compare_roles(const void *pa, const void *pb)
{
    const named_role *a = pa, *b = pb;
    return strcmp(a->name, b->name);
}

static void add_row(fixture *f, const qc_json_node *row)
{
    const qc_json_node *cell = qc_json_first(row);
    const char *pattern = NULL, *dtype_name = NULL, *role = NULL;
    assert_int_equal(qc_json_as_string(cell, "name", &pattern, NULL), QC_OK);
    cell = qc_json_next(cell);
    assert_int_equal(qc_json_as_string(cell, "dtype", &dtype_name, NULL), QC_OK);
    qc_dtype dtype;
    assert_int_equal(qc_dtype_from_name(dtype_name, strlen(dtype_name), &dtype), 0);
    cell = qc_json_next(cell);
    uint64_t dims[QC_MAX_DIMS];
    unsigned ndim = 0;
    for (const qc_json_node *d = qc_json_first(cell); d; d = qc_json_next(d))
        assert_int_equal(qc_json_as_u64(d, "dim", &dims[ndim++], NULL), QC_OK);
    uint64_t layers[3], experts[3];
    cell = qc_json_next(cell);
    read_span(cell, layers);
    cell = qc_json_next(cell);
    read_span(cell, experts);
    assert_int_equal(qc_json_as_string(qc_json_next(cell), "role", &role, NULL), QC_OK);
    place p = {0, 0};
    for (p.layer = layers[0]; p.layer <= layers[1]; p.layer += layers[2]) {
        for (p.expert = experts[0]; p.expert <= experts[1]; p.expert += experts[2]) {
            char name[512];
            expand_name(name, sizeof name, pattern, &p);
            fixture_add_dims(f, name, dtype, ndim, dims);
            if ((role_count & (role_count - 1)) == 0) {
                roles = realloc(roles, (role_count ? 2 * role_count : 1) * sizeof *roles);
                assert_non_null(roles);
            }
            roles[role_count++] =
                (named_role){f->model.tensors[f->model.tensor_count - 1].name, role};
        }
    }
}

/* What add_config read last. */
static char config_text[8192];

/* The text of the member "config" of a pattern file, without what the released file lacks. */
static void add_config(fixture *f, const char *text, const qc_json_node *root)
{
    const char *start = strstr(text, "\"config\": {");
    assert_non_null(start);
    start += strlen("\"config\": ");
    const char *end = start;
    int depth = 0;
    do {
        depth += *end == '{';
        depth -= *end == '}';
        end++;
    } while (depth > 0);
    qc_strbuf now;
    qc_strbuf_init(&now, 1 << 20);
    assert_int_equal(qc_strbuf_add(&now, start, (size_t)(end - start), NULL), QC_OK);
    const qc_json_node *drop = qc_json_get(root, "config_not_in_file");
    for (const qc_json_node *n = drop ? qc_json_first(drop) : NULL; n; n = qc_json_next(n)) {
        const char *key = qc_json_string_or(n, "");
        qc_strbuf next;
        qc_strbuf_init(&next, 1 << 20);
        assert_int_equal(qc_json_splice(&next, now.data, now.len, key, NULL, NULL), QC_OK);
        qc_strbuf_deinit(&now);
        now = next;
    }
    fixture_config(f, now.data);
    (void)snprintf(config_text, sizeof config_text, "%s", now.data);
    qc_strbuf_deinit(&now);
}

static inline qc_json *load(fixture *f, const char *name, qc_to to)
{
    char path[1024];
    (void)snprintf(path, sizeof path, "%s/models/%s", QC_TEST_DATA, name);
    size_t len = 0;
    char *text = read_text(path, &len);
    qc_json *doc = NULL;
    assert_int_equal(qc_json_parse(&doc, text, len, 0, NULL), QC_OK);
    const qc_json_node *root = qc_json_root(doc);
    fixture_init(f, to);
    role_count = 0;
    const qc_json_node *rows = qc_json_get(root, "tensor_patterns");
    for (const qc_json_node *r = qc_json_first(rows); r; r = qc_json_next(r))
        add_row(f, r);
    qsort(roles, role_count, sizeof *roles, compare_roles);
    add_config(f, text, root);
    free(text);
    return doc;
}

static inline int free_roles(void **state)
{
    (void)state;
    free(roles);
    roles = NULL;
    return 0;
}

#endif
