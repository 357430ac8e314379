/* Small safetensors files and directories for tests: scratch folders, files of known content, plain
 * or as a zstd seekable file. Every helper fails the test itself when something goes wrong. */
#ifndef QC_TESTS_FIXTURE_FILES_H
#define QC_TESTS_FIXTURE_FILES_H

#include "base/bytes.h"
#include "formats/safetensors_header.h"
#include "formats/seekable.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define FX_PATH_BYTES 1024

typedef struct {
    char path[FX_PATH_BYTES];
} fx_dir;

static inline void fx_make_dir(fx_dir *d)
{
    const char *tmp = getenv("TMPDIR");
    (void)snprintf(d->path, sizeof d->path, "%s/qconv-test-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    assert_non_null(mkdtemp(d->path));
}

static inline void fx_join(char out[FX_PATH_BYTES], const char *dir, const char *name)
{
    int n = snprintf(out, FX_PATH_BYTES, "%s/%s", dir, name);
    assert_true(n > 0 && n < FX_PATH_BYTES);
}

/* Everything below, then the folder itself. */
static inline void fx_remove_dir(const char *path)
{
    DIR *d = opendir(path);
    struct dirent *e;
    assert_non_null(d);
    while ((e = readdir(d))) {
        char child[FX_PATH_BYTES];
        struct stat s;
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        fx_join(child, path, e->d_name);
        assert_int_equal(lstat(child, &s), 0);
        if (S_ISDIR(s.st_mode))
            fx_remove_dir(child);
        else
            assert_int_equal(unlink(child), 0);
    }
    assert_int_equal(closedir(d), 0);
    assert_int_equal(rmdir(path), 0);
}

/* dir/name with this content; folders in name are made. */
static inline void fx_put(const char *dir, const char *name, const void *bytes, size_t len)
{
    char path[FX_PATH_BYTES];
    fx_join(path, dir, name);
    for (char *p = path + strlen(dir) + 1; (p = strchr(p, '/')); p++) {
        *p = '\0';
        (void)mkdir(path, 0777);
        *p = '/';
    }
    (void)unlink(path); /* emptying an old file instead makes ext4 write it to the disk at once */
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    if (len)
        assert_true(fwrite(bytes, 1, len, f) == len);
    assert_int_equal(fclose(f), 0);
}

static inline void fx_puts(const char *dir, const char *name, const char *text)
{
    fx_put(dir, name, text, strlen(text));
}

/* Byte i of the tensor of this name. */
static inline unsigned char fx_byte(const char *name, uint64_t i)
{
    uint64_t h = i * 131 + 7;
    for (; *name; name++)
        h = h * 31 + (unsigned char)*name;
    return (unsigned char)(h ^ h >> 8);
}

/* A whole plain file: names separated by spaces, each a U8 tensor of bytes_each bytes. */
static inline void fx_build(qc_strbuf *out, const char *names, uint64_t bytes_each,
                            const qc_st_meta *meta, size_t meta_count)
{
    char copy[4096];
    qc_st_tensor t[64];
    size_t count = 0;
    (void)snprintf(copy, sizeof copy, "%s", names);
    memset(t, 0, sizeof t);
    for (char *p = copy; *p;) {
        size_t n = strcspn(p, " ");
        int last = p[n] == '\0';
        p[n] = '\0';
        assert_true(count < 64);
        t[count] = (qc_st_tensor){.name = p, .dtype = QC_DTYPE_U8, .ndim = 1};
        t[count].dims[0] = bytes_each;
        t[count].begin = count * bytes_each;
        t[count].end = (count + 1) * bytes_each;
        count++;
        p += last ? n : n + 1;
    }
    qc_strbuf_init(out, 200000000);
    assert_int_equal(qc_st_header_build(out, t, count, meta, meta_count, NULL), QC_OK);
    for (size_t k = 0; k < count; k++) {
        for (uint64_t i = 0; i < bytes_each; i++) {
            char b = (char)fx_byte(t[k].name, i);
            assert_int_equal(qc_strbuf_add(out, &b, 1, NULL), QC_OK);
        }
    }
}

/* The same content as a zstd seekable file, frames of frame_bytes, an empty one after the first. */
static inline void fx_compress(qc_strbuf *out, const qc_strbuf *content, size_t frame_bytes)
{
    qc_frame frames[512];
    size_t count = 0;
    size_t done = 0;
    qc_frame_coder *coder = NULL;
    qc_strbuf_init(out, 200000000);
    assert_int_equal(qc_frame_coder_create(&coder, NULL), QC_OK);
    while (done < content->len || count == 1) {
        size_t n = content->len - done < frame_bytes ? content->len - done : frame_bytes;
        size_t used = 0;
        if (count == 1)
            n = 0;
        size_t cap = qc_frame_bound(n);
        char *buf = malloc(cap);
        assert_non_null(buf);
        assert_int_equal(qc_frame_encode(coder, 3, content->data + done, n, buf, cap, &used, NULL),
                         QC_OK);
        assert_true(count < 512);
        frames[count++] = (qc_frame){out->len, done, (uint32_t)used, (uint32_t)n};
        assert_int_equal(qc_strbuf_add(out, buf, used, NULL), QC_OK);
        free(buf);
        done += n;
    }
    assert_int_equal(qc_seek_table_build(out, frames, count, NULL), QC_OK);
    qc_frame_coder_destroy(coder);
}

/* dir/name, plain, or compressed where the name ends in .zst. */
static inline void fx_put_tensors(const char *dir, const char *name, const char *tensors,
                                  uint64_t bytes_each)
{
    static const qc_st_meta meta = {"format", "pt"};
    qc_strbuf plain;
    size_t n = strlen(name);
    fx_build(&plain, tensors, bytes_each, &meta, 1);
    if (n > 4 && strcmp(name + n - 4, ".zst") == 0) {
        qc_strbuf packed;
        fx_compress(&packed, &plain, 64);
        fx_put(dir, name, packed.data, packed.len);
        qc_strbuf_deinit(&packed);
    } else {
        fx_put(dir, name, plain.data, plain.len);
    }
    qc_strbuf_deinit(&plain);
}

#endif
