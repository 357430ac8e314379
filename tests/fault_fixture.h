/* For tests that make a command fail: every allocation in turn, what a folder holds, copies of
 * folders, open handles. */
#ifndef QC_TESTS_FAULT_FIXTURE_H
#define QC_TESTS_FAULT_FIXTURE_H

#include "base/alloc.h"
#include "formats/digest.h"
#include "test_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

enum { TEST_TREE_MOST = 64 };

/* Fails allocation number 1, 2, 3, ... of run(ctx), one in each run, until a run has fewer: each
 * says that memory ran out, or does without. `least`: it has more than so many. */
static inline void test_every_allocation(qc_status (*run)(void *ctx, qc_error *err), void *ctx,
                                         uint64_t least)
{
    for (uint64_t n = 1;; n++) {
        qc_error err = {0};
        qc_alloc_fail_at(n, 0);
        qc_status st = run(ctx, &err);
        uint64_t tried = qc_alloc_count();
        qc_alloc_fail_at(0, 0);
        if (tried < n) {
            test_must(st, &err);
            assert_true(n > least);
            return;
        }
        if (st != QC_OK && (st != QC_ERR_NOMEM || !*err.msg))
            fail_msg("allocation %llu: %s: %s", (unsigned long long)n, qc_status_name(st), err.msg);
    }
}

/* A checkpoint of Conv1D weights, which are read whole and turned, and one that stays. */
static inline void test_write_conv1d(const char *dir)
{
    static const test_tensor rows[] = {
        {"h.0.mlp.c_fc.weight", QC_DTYPE_F32, 2, {40, 72}},
        {"h.0.mlp.c_proj.weight", QC_DTYPE_BF16, 2, {72, 40}},
        {"h.0.ln_1.weight", QC_DTYPE_F32, 1, {40}},
    };
    test_write_checkpoint(dir, rows, sizeof rows / sizeof *rows, "{\"model_type\": \"gpt2\"}");
}

static inline qc_digest test_file_digest(const char *path)
{
    qc_error err = {0};
    qc_strbuf text;
    qc_strbuf_init(&text, 1u << 24);
    test_must(qc_file_slurp(path, &text, &err), &err);
    qc_digest d = qc_digest_bytes(text.data, text.len);
    qc_strbuf_deinit(&text);
    return d;
}

/* Names and bytes of all files below dir but those in folders whose name begins with a dot. */
static inline qc_digest test_tree_digest(const char *dir)
{
    qc_error err = {0};
    qc_arena a;
    qc_tree_file *files = NULL;
    size_t count = 0;
    qc_digest parts[2 * TEST_TREE_MOST];
    qc_arena_init(&a);
    test_must(qc_dir_tree(&a, dir, TEST_TREE_MOST, &files, &count, &err), &err);
    for (size_t i = 0; i < count; i++) {
        const char *path = NULL;
        test_must(qc_path_join(&a, &path, dir, files[i].path, &err), &err);
        parts[2 * i] = qc_digest_bytes(files[i].path, strlen(files[i].path));
        parts[2 * i + 1] = test_file_digest(path);
    }
    qc_digest d = qc_digest_bytes(parts, 2 * count * sizeof *parts);
    qc_arena_deinit(&a);
    return d;
}

/* A copy of a folder with all that is in it. */
static inline void test_copy_tree(const char *from, const char *to)
{
    qc_error err = {0};
    DIR *d = opendir(from);
    const struct dirent *e;
    if (!d || mkdir(to, 0777) != 0)
        _exit(99);
    while ((e = readdir(d))) {
        char a[4096], b[4096];
        struct stat st;
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        if ((size_t)snprintf(a, sizeof a, "%s/%s", from, e->d_name) >= sizeof a ||
            (size_t)snprintf(b, sizeof b, "%s/%s", to, e->d_name) >= sizeof b || lstat(a, &st) != 0)
            _exit(99);
        if (S_ISDIR(st.st_mode)) {
            test_copy_tree(a, b);
            continue;
        }
        qc_strbuf text;
        qc_strbuf_init(&text, 1u << 24);
        test_must(qc_file_slurp(a, &text, &err), &err);
        test_must(qc_file_put(b, text.data, text.len, &err), &err);
        qc_strbuf_deinit(&text);
    }
    closedir(d);
}

/* Handles this process has open. */
static inline size_t test_open_handles(void)
{
    size_t count = 0;
    DIR *d = opendir("/proc/self/fd");
    if (!d)
        return 0;
    while (readdir(d))
        count++;
    closedir(d);
    return count;
}

#endif
