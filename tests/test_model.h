/* A small checkpoint for tests of whole commands, and a folder to put it in. */
#ifndef QC_TESTS_TEST_MODEL_H
#define QC_TESTS_TEST_MODEL_H

#include "base/arena.h"
#include "convert/commands.h"
#include "formats/file_io.h"
#include "formats/safetensors_header.h"

#include <dirent.h>
#include <stdarg.h>
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

typedef struct {
    const char *name;
    qc_dtype dtype;
    unsigned ndim;
    uint64_t dims[4];
} test_tensor;

/* Appends the bytes of a tensor to text. */
typedef void (*test_fill_fn)(qc_strbuf *text, const qc_st_tensor *t);

/* dir with model.safetensors and config.json. */
static inline void test_write_filled(const char *dir, const test_tensor *rows, size_t count,
                                     const char *config, test_fill_fn fill)
{
    enum { MOST = 16 };
    qc_error err = {0};
    qc_arena a;
    qc_st_tensor t[MOST];
    qc_strbuf text;
    const char *path = NULL;
    uint64_t at = 0;
    if (count > MOST)
        _exit(99);
    qc_arena_init(&a);
    memset(t, 0, sizeof t);
    for (size_t i = 0; i < count; i++) {
        uint64_t bytes = 0;
        t[i].name = rows[i].name;
        t[i].dtype = rows[i].dtype;
        t[i].ndim = rows[i].ndim;
        memcpy(t[i].dims, rows[i].dims, sizeof rows[i].dims);
        test_must(qc_shape_bytes(t[i].dims, t[i].ndim, t[i].dtype, &bytes, &err), &err);
        t[i].begin = at;
        t[i].end = at += bytes;
    }
    qc_strbuf_init(&text, 1u << 26);
    test_must(qc_dir_make(dir, &err), &err);
    test_must(qc_st_header_build(&text, t, count, NULL, 0, &err), &err);
    for (size_t k = 0; k < count; k++)
        fill(&text, &t[k]);
    test_must(qc_path_join(&a, &path, dir, "model.safetensors", &err), &err);
    test_must(qc_file_put(path, text.data, text.len, &err), &err);
    test_must(qc_path_join(&a, &path, dir, "config.json", &err), &err);
    test_must(qc_file_put(path, config, strlen(config), &err), &err);
    qc_strbuf_deinit(&text);
    qc_arena_deinit(&a);
}

/* A fixed pattern: F32 within -1 and 1, of other types bytes below 0x70, which are finite in FP8.
 */
static inline void test_fill_pattern(qc_strbuf *text, const qc_st_tensor *t)
{
    qc_error err = {0};
    uint64_t step = t->dtype == QC_DTYPE_F32 ? 4 : 1;
    for (uint64_t i = t->begin / step; i < t->end / step; i++) {
        float f = (float)((i * 2654435761u >> 7) % 2001) / 1000.0f - 1.0f;
        char b = (char)(i * 37 % 0x70);
        test_must(step == 4 ? qc_strbuf_add(text, &f, sizeof f, &err)
                            : qc_strbuf_add(text, &b, 1, &err),
                  &err);
    }
}

static inline void test_write_checkpoint(const char *dir, const test_tensor *rows, size_t count,
                                         const char *config)
{
    test_write_filled(dir, rows, count, config, test_fill_pattern);
}

/* Two Linears (one with 70 columns), an embedding, a norm; F32. */
static inline void test_write_model(const char *dir)
{
    static const test_tensor rows[] = {
        {"model.embed_tokens.weight", QC_DTYPE_F32, 2, {32, 70}},
        {"model.layers.0.input_layernorm.weight", QC_DTYPE_F32, 1, {70, 0}},
        {"model.layers.0.mlp.up_proj.weight", QC_DTYPE_F32, 2, {300, 70}},
        {"model.layers.0.self_attn.q_proj.weight", QC_DTYPE_F32, 2, {70, 70}},
    };
    test_write_checkpoint(
        dir, rows, sizeof rows / sizeof *rows,
        "{\n  \"model_type\": \"llama\",\n  \"vocab_size\": 32,\n  \"hidden_size\": 70,\n"
        "  \"intermediate_size\": 300,\n  \"num_hidden_layers\": 1,\n"
        "  \"num_attention_heads\": 7\n}\n");
}

enum { TEST_WORDS_MOST = 16 };

/* The words of a command line, separated by single spaces, which become its ends. */
static inline int test_words(char *line, char *argv[TEST_WORDS_MOST])
{
    int argc = 0;
    for (char *p = line, *space; p; p = space) {
        space = strchr(p, ' ');
        if (space)
            *space++ = '\0';
        if (argc == TEST_WORDS_MOST)
            _exit(99);
        argv[argc++] = p;
    }
    return argc;
}

/* Runs a command line. */
QC_PRINTF(3, 4)
static inline qc_status test_run_line(qc_status (*run)(int argc, char **argv, qc_error *err),
                                      qc_error *err, const char *fmt, ...)
{
    char line[512];
    char *argv[TEST_WORDS_MOST];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    if (n <= 0 || (size_t)n >= sizeof line)
        _exit(99);
    return run(test_words(line, argv), argv, err);
}

/* For test_run_line: a command that makes an output or looks at one. */
static inline qc_status test_command(int argc, char **argv, qc_error *err)
{
    qc_arena a;
    qc_options o;
    qc_arena_init(&a);
    qc_status st = qc_options_parse(&o, &a, argc, argv, err);
    if (st == QC_OK)
        st = o.command == QC_CMD_CONVERT    ? qc_cmd_convert(&o, err)
             : o.command == QC_CMD_VERIFY   ? qc_cmd_verify(&o, err)
             : o.command == QC_CMD_UNPACK   ? qc_cmd_unpack(&o, err)
             : o.command == QC_CMD_VALIDATE ? qc_cmd_validate(&o, err)
             : o.command == QC_CMD_REPORT   ? qc_cmd_report(&o, err)
                                            : QC_ERR_INTERNAL;
    qc_arena_deinit(&a);
    return st;
}

#endif
