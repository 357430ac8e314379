/* Checkpoints in memory for tests of the recipe: names, dtypes and shapes, no files. */
#ifndef QC_TESTS_RECIPE_FIXTURE_H
#define QC_TESTS_RECIPE_FIXTURE_H

#include "base/alloc.h"
#include "convert/recipe.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct {
    qc_checkpoint model;
    qc_arena arena; /* of the recipe */
    qc_recipe_options options;
    qc_rule rules[16];
    qc_recipe recipe;
    qc_error err;
} fixture;

static void fixture_init(fixture *f, qc_to to)
{
    memset(f, 0, sizeof *f);
    qc_arena_init(&f->arena);
    qc_arena_init(&f->model.arena);
    f->model.path = "model";
    f->model.is_dir = 1;
    f->options.to = to;
    f->options.double_quant = 1;
    f->options.rules = f->rules;
}

static void fixture_deinit(fixture *f)
{
    qc_json_destroy(f->model.config);
    free(f->model.tensors);
    qc_arena_deinit(&f->model.arena);
    qc_arena_deinit(&f->arena);
}

static void fixture_config(fixture *f, const char *text)
{
    qc_json_destroy(f->model.config);
    f->model.config = NULL;
    if (qc_json_parse(&f->model.config, text, strlen(text), 0, &f->err) != QC_OK)
        fail_msg("config: %s", f->err.msg);
}

static void fixture_add_dims(fixture *f, const char *name, qc_dtype dtype, unsigned ndim,
                             const uint64_t *dims)
{
    size_t n = f->model.tensor_count;
    if ((n & (n - 1)) == 0) {
        void *p = realloc(f->model.tensors, (n ? 2 * n : 1) * sizeof *f->model.tensors);
        assert_non_null(p);
        f->model.tensors = p;
    }
    qc_ckpt_tensor *t = &f->model.tensors[n];
    memset(t, 0, sizeof *t);
    assert_int_equal(qc_arena_strndup(&f->model.arena, &t->name, name, strlen(name), NULL), QC_OK);
    t->dtype = dtype;
    t->ndim = ndim;
    for (unsigned i = 0; i < ndim; i++)
        t->dims[i] = dims[i];
    assert_int_equal(qc_shape_bytes(t->dims, ndim, dtype, &t->bytes, NULL), QC_OK);
    f->model.tensor_count++;
}

/* A matrix of BF16. */
static inline void fixture_add(fixture *f, const char *name, uint64_t rows, uint64_t cols)
{
    fixture_add_dims(f, name, QC_DTYPE_BF16, 2, (uint64_t[]){rows, cols});
}

static inline void fixture_add_1d(fixture *f, const char *name, uint64_t n)
{
    fixture_add_dims(f, name, QC_DTYPE_BF16, 1, &n);
}

static inline void fixture_rule(fixture *f, int quantize, const char *glob)
{
    f->rules[f->options.rule_count++] = (qc_rule){quantize, glob};
}

static int fixture_order(const void *pa, const void *pb)
{
    const qc_ckpt_tensor *a = pa, *b = pb;
    return strcmp(a->name, b->name);
}

static qc_status fixture_make(fixture *f)
{
    if (f->model.tensor_count)
        qsort(f->model.tensors, f->model.tensor_count, sizeof *f->model.tensors, fixture_order);
    memset(&f->err, 0, sizeof f->err);
    return qc_recipe_make(&f->recipe, &f->arena, &f->model, &f->options, &f->err);
}

static inline void fixture_make_ok(fixture *f)
{
    qc_status st = fixture_make(f);
    if (st != QC_OK)
        fail_msg("%s: %s", qc_status_name(st), f->err.msg);
}

/* Fails with this code and a message that holds both words. */
static inline void fixture_make_fails(fixture *f, qc_status code, const char *a, const char *b)
{
    qc_status st = fixture_make(f);
    if (st != code || !strstr(f->err.msg, a) || !strstr(f->err.msg, b))
        fail_msg("expected %s with '%s' and '%s', got %s: %s", qc_status_name(code), a, b,
                 qc_status_name(st), f->err.msg);
}

static inline const qc_recipe_entry *fixture_entry(const fixture *f, const char *name)
{
    for (size_t i = 0; i < f->model.tensor_count; i++) {
        if (strcmp(f->model.tensors[i].name, name) == 0)
            return &f->recipe.entries[i];
    }
    fail_msg("no tensor '%s'", name);
    return NULL;
}

static inline void fixture_expect(const fixture *f, const char *name, qc_scheme scheme,
                                  qc_role role)
{
    const qc_recipe_entry *e = fixture_entry(f, name);
    if (e->scheme != scheme || e->role != role)
        fail_msg("'%s': expected %s (%s), got %s (%s), because: %s", name, qc_scheme_name(scheme),
                 qc_role_name(role), qc_scheme_name(e->scheme), qc_role_name(e->role), e->why);
}

static inline int fixture_skips(const fixture *f, const char *module)
{
    for (uint32_t i = 0; i < f->recipe.skip_count; i++) {
        if (strcmp(f->recipe.skip_modules[i], module) == 0)
            return 1;
    }
    return 0;
}

/* The whole skip list, joined by blanks. */
/* The list but for "classifier", "qa_outputs" and "score", which are always in it where the model
 * type is known to config.json: a test of its own looks at those. */
static inline void fixture_expect_skips(const fixture *f, const char *want)
{
    char got[4096] = "";
    for (uint32_t i = 0; i < f->recipe.skip_count; i++) {
        size_t used = strlen(got);
        const char *name = f->recipe.skip_modules[i];
        if (strcmp(name, "classifier") && strcmp(name, "qa_outputs") && strcmp(name, "score"))
            (void)snprintf(got + used, sizeof got - used, "%s%s", used ? " " : "", name);
    }
    assert_string_equal(got, want);
}

#endif
