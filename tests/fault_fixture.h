/* For tests that make a conversion fail: what a folder holds, copies of folders, open handles. */
#ifndef QC_TESTS_FAULT_FIXTURE_H
#define QC_TESTS_FAULT_FIXTURE_H

#include "formats/digest.h"
#include "test_model.h"

#include <stdint.h>

enum { TEST_TREE_MOST = 64 };

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
