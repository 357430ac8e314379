/* A small checkpoint for tests of whole commands, and a folder to put it in. */
#ifndef QC_TESTS_TEST_MODEL_H
#define QC_TESTS_TEST_MODEL_H

#include "base/arena.h"
#include "convert/options.h"
#include "formats/file_io.h"
#include "formats/safetensors_header.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Memory-backed where there is such a place: these tests sync a lot. */
static inline void test_folder(char *out, size_t cap)
{
    const char *base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    (void)snprintf(out, cap, "%s/qconv-test-XXXXXX", base);
    if (!mkdtemp(out))
        _exit(99);
}

static inline void test_remove(const char *path)
{
    DIR *d = opendir(path);
    if (d) {
        const struct dirent *e;
        while ((e = readdir(d))) {
            char child[4096];
            if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
                continue;
            if ((size_t)snprintf(child, sizeof child, "%s/%s", path, e->d_name) < sizeof child)
                test_remove(child);
        }
        closedir(d);
        (void)rmdir(path);
    } else {
        (void)unlink(path);
    }
}

static inline void test_must(qc_status st, const qc_error *err)
{
    if (st != QC_OK) {
        fprintf(stderr, "unexpected: %s: %s\n", qc_status_name(st), err->msg);
        _exit(99);
    }
}

/* Two Linears (one with 70 columns), an embedding, a norm; F32 with a fixed pattern. */
static inline void test_write_model(const char *dir)
{
    static const struct {
        const char *name;
        unsigned ndim;
        uint64_t dims[2];
    } rows[] = {
        {"model.embed_tokens.weight", 2, {32, 70}},
        {"model.layers.0.input_layernorm.weight", 1, {70, 0}},
        {"model.layers.0.mlp.up_proj.weight", 2, {300, 70}},
        {"model.layers.0.self_attn.q_proj.weight", 2, {70, 70}},
    };
    enum { COUNT = sizeof rows / sizeof *rows };
    qc_error err = {0};
    qc_arena a;
    qc_st_tensor t[COUNT];
    qc_strbuf text;
    const char *path = NULL;
    uint64_t at = 0;
    qc_arena_init(&a);
    memset(t, 0, sizeof t);
    for (int i = 0; i < COUNT; i++) {
        uint64_t bytes = 0;
        t[i].name = rows[i].name;
        t[i].dtype = QC_DTYPE_F32;
        t[i].ndim = rows[i].ndim;
        memcpy(t[i].dims, rows[i].dims, sizeof rows[i].dims);
        test_must(qc_shape_bytes(t[i].dims, t[i].ndim, t[i].dtype, &bytes, &err), &err);
        t[i].begin = at;
        t[i].end = at += bytes;
    }
    qc_strbuf_init(&text, 1u << 24);
    test_must(qc_dir_make(dir, &err), &err);
    test_must(qc_st_header_build(&text, t, COUNT, NULL, 0, &err), &err);
    for (uint64_t i = 0; i < at / 4; i++) {
        float f = (float)((i * 2654435761u >> 7) % 2001) / 1000.0f - 1.0f;
        test_must(qc_strbuf_add(&text, &f, sizeof f, &err), &err);
    }
    test_must(qc_path_join(&a, &path, dir, "model.safetensors", &err), &err);
    test_must(qc_file_put(path, text.data, text.len, &err), &err);
    static const char config[] = "{\n  \"model_type\": \"llama\",\n  \"vocab_size\": 32\n}\n";
    test_must(qc_path_join(&a, &path, dir, "config.json", &err), &err);
    test_must(qc_file_put(path, config, sizeof config - 1, &err), &err);
    qc_strbuf_deinit(&text);
    qc_arena_deinit(&a);
}

#endif
