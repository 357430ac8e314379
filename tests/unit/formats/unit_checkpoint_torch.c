/* formats/checkpoint.h over PyTorch files: which are read, the index, tied weights, side files. */
#include "formats/checkpoint.h"

#include "base/alloc.h"
#include "formats/checkpoint_internal.h"
#include "tests/fixtures/fixture_files.h"

#include <errno.h>

#define COUNT(a) (sizeof(a) / sizeof *(a))
#define SHARD(i) "pytorch_model-0000" #i "-of-00002.bin"

static fx_dir root;
static char dir[FX_PATH_BYTES];

static int make_root(void **state)
{
    (void)state;
    fx_make_dir(&root);
    return 0;
}

static int remove_root(void **state)
{
    (void)state;
    test_remove(root.path);
    return 0;
}

static void fresh(void)
{
    static int n;
    char name[32];
    (void)snprintf(name, sizeof name, "d%d", n++);
    fx_join(dir, root.path, name);
    assert_int_equal(mkdir(dir, 0777), 0);
}

static void data_path(char out[FX_PATH_BYTES], const char *name)
{
    int n = snprintf(out, FX_PATH_BYTES, "%s/torch/%s", QC_TEST_DATA, name);
    assert_true(n > 0 && n < FX_PATH_BYTES);
}

/* A file of tests/data/torch under another name in `dir`. */
static void copy(const char *from, const char *to)
{
    char path[FX_PATH_BYTES];
    qc_strbuf text;
    data_path(path, from);
    qc_strbuf_init(&text, 1u << 20);
    assert_int_equal(qc_file_slurp(path, &text, NULL), QC_OK);
    fx_put(dir, to, text.data, text.len);
    qc_strbuf_deinit(&text);
}

static void copy_sharded(void)
{
    static const char *const names[] = {SHARD(1), SHARD(2), "pytorch_model.bin.index.json",
                                        "config.json"};
    fresh();
    for (size_t i = 0; i < COUNT(names); i++) {
        char from[128];
        (void)snprintf(from, sizeof from, "sharded/%s", names[i]);
        copy(from, names[i]);
    }
}

static qc_checkpoint *open_path(const char *path)
{
    qc_checkpoint *c = NULL;
    qc_error err = {0};
    if (qc_checkpoint_open(&c, path, &err) != QC_OK)
        fail_msg("%s", err.msg);
    return c;
}

/* Opening `dir` must fail with this behind its path. */
static void expect_failure(qc_status status, const char *message)
{
    qc_checkpoint *c = NULL;
    qc_error err = {0};
    char expected[FX_PATH_BYTES + 600];
    (void)snprintf(expected, sizeof expected, "%s%s", dir, message);
    qc_status st = qc_checkpoint_open(&c, dir, &err);
    if (st != status || strcmp(err.msg, expected) != 0)
        fail_msg("%s '%s', expected %s '%s'", qc_status_name(st), err.msg, qc_status_name(status),
                 expected);
    assert_null(c);
}

static void expect_warning(const qc_checkpoint *c, const char *text)
{
    for (size_t i = 0; i < c->warning_count; i++) {
        if (strcmp(c->warnings[i], text) == 0)
            return;
    }
    fail_msg("no warning '%s' among %zu, the first: %s", text, c->warning_count,
             c->warning_count ? c->warnings[0] : "");
}

/* The same tensors with the same bytes as the safetensors file. */
static void check_twin(const qc_checkpoint *c, const char *name)
{
    char path[FX_PATH_BYTES];
    qc_st_cursor *cursor = NULL;
    data_path(path, name);
    qc_checkpoint *twin = open_path(path);
    assert_int_equal(qc_st_cursor_create(&cursor, NULL), QC_OK);
    assert_true(c->tensor_count == twin->tensor_count && c->tensor_bytes == twin->tensor_bytes);
    for (size_t i = 0; i < c->tensor_count; i++) {
        const qc_checkpoint_tensor *a = &c->tensors[i];
        const qc_checkpoint_tensor *b = &twin->tensors[i];
        char x[16384];
        char y[16384];
        assert_string_equal(a->name, b->name);
        assert_true(a->bytes == b->bytes && a->bytes <= sizeof x && a->dtype == b->dtype);
        assert_int_equal(qc_checkpoint_read(c, cursor, a, 0, x, (size_t)a->bytes, NULL), QC_OK);
        assert_int_equal(qc_checkpoint_read(twin, cursor, b, 0, y, (size_t)a->bytes, NULL), QC_OK);
        assert_memory_equal(x, y, (size_t)a->bytes);
        assert_int_equal(qc_checkpoint_read(c, cursor, a, a->bytes - 2, x, 2, NULL), QC_OK);
        assert_memory_equal(x, y + a->bytes - 2, 2);
        assert_int_equal(qc_checkpoint_read(c, cursor, a, a->bytes - 1, x, 2, NULL), QC_ERR_INPUT);
        qc_checkpoint_hint_read_soon(c, a, 0, a->bytes);
    }
    qc_st_cursor_destroy(cursor);
    qc_checkpoint_close(twin);
}

static void opens_shards(void **state)
{
    char path[FX_PATH_BYTES];
    qc_digest a;
    qc_digest b;
    (void)state;
    data_path(path, "sharded");
    qc_checkpoint *c = open_path(path);
    assert_true(c->file_count == 2 && c->warning_count == 0 && c->meta_count == 0);
    for (size_t i = 0; i < 2; i++) {
        const qc_checkpoint_file *f = &c->files[i];
        assert_true(f->kind == QC_CHECKPOINT_TORCH && !f->compressed && f->torch.head_bytes > 0);
        assert_true(f->file_bytes > f->tensor_bytes && f->tensor_count == (i ? 3 : 2));
    }
    assert_string_equal(c->files[0].name, SHARD(1));
    assert_true(c->side_count == 1 && c->config);
    check_twin(c, "sharded.safetensors");
    assert_int_equal(qc_checkpoint_head_digest(c, 0, &a, NULL), QC_OK);
    assert_int_equal(qc_checkpoint_head_digest(c, 1, &b, NULL), QC_OK);
    assert_false(qc_digest_equal(&a, &b));
    qc_checkpoint_close(c);
}

/* The digest of a head is that of data.pkl, or of the pickles of a stream. */
static void digests_the_pickles(void **state)
{
    static const char *const names[] = {"module.bin", "module_legacy.bin"};
    (void)state;
    for (size_t k = 0; k < COUNT(names); k++) {
        char path[FX_PATH_BYTES];
        qc_strbuf text;
        qc_digest a;
        data_path(path, names[k]);
        qc_checkpoint *c = open_path(path);
        const qc_torch_file *f = &c->files->torch;
        qc_strbuf_init(&text, 1u << 20);
        assert_int_equal(qc_file_slurp(path, &text, NULL), QC_OK);
        qc_digest b = qc_digest_bytes(text.data + f->head_offset, (size_t)f->head_bytes);
        assert_int_equal(qc_checkpoint_head_digest(c, 0, &a, NULL), QC_OK);
        assert_true(qc_digest_equal(&a, &b));
        assert_true(text.data[f->head_offset + f->head_bytes - 1] == '.');
        qc_strbuf_deinit(&text);
        qc_checkpoint_close(c);
    }
}

static void opens_single_files(void **state)
{
    static const char *const names[] = {"x.bin", "x.pt", "x.pth", "x.ckpt", "weights"};
    char path[FX_PATH_BYTES];
    (void)state;
    fresh();
    for (size_t i = 0; i < COUNT(names); i++) {
        copy(i % 2 ? "module_legacy.bin" : "module.bin", names[i]);
        fx_join(path, dir, names[i]);
        qc_checkpoint *c = open_path(path);
        assert_string_equal(c->files->name, names[i]);
        assert_true(!c->is_dir && c->warning_count == 0);
        check_twin(c, i % 2 ? "module_legacy.safetensors" : "module.safetensors");
        qc_checkpoint_close(c);
    }
    fresh();
    copy("module_legacy.bin", "pytorch_model.bin");
    qc_checkpoint *c = open_path(dir);
    assert_true(c->is_dir && c->file_count == 1 && c->side_count == 0);
    check_twin(c, "module_legacy.safetensors");
    qc_checkpoint_close(c);
    /* A name that says safetensors is believed, and what is there instead is said. */
    qc_error err = {0};
    fresh();
    copy("module.bin", "model.safetensors");
    assert_int_equal(qc_checkpoint_open(&c, dir, &err), QC_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.msg, "file is a zip archive (a PyTorch checkpoint?)"));
}

/* Without an ending that says it, the first bytes tell what a file is. */
static void tells_by_contents(void **state)
{
    static const char *const contents[] = {"", "no", "neither a pickle nor an archive"};
    char path[FX_PATH_BYTES];
    qc_checkpoint *c = NULL;
    qc_checkpoint_kind kind = QC_CHECKPOINT_TORCH;
    (void)state;
    fresh();
    fx_join(path, dir, "weights");
    assert_int_equal(qc_checkpoint_kind_of(path, &kind, NULL), QC_ERR_IO);
    for (size_t i = 0; i < COUNT(contents); i++) {
        qc_error err = {0};
        fx_puts(dir, "weights", contents[i]);
        assert_int_equal(qc_checkpoint_kind_of(path, &kind, &err), QC_OK);
        assert_int_equal(kind, QC_CHECKPOINT_SAFETENSORS);
        assert_int_equal(qc_status_exit_code(qc_checkpoint_open(&c, path, &err)), 3);
        qc_io_fail_at(QC_IO_READ, 1, 0, EIO);
        qc_status st = qc_checkpoint_kind_of(path, &kind, &err);
        qc_io_fail_at(QC_IO_READ, 0, 0, 0);
        assert_int_equal(st, QC_ERR_IO);
    }
}

/* The same 16 bytes as six tensors; only one that is the same in type and shape is a second name.
 */
static void knows_second_names(void **state)
{
#define VIEW(name, dtype, shape, strides)                                                          \
    "U\1" name                                                                                     \
    "ctorch._utils\n_rebuild_tensor_v3\n((U\7storagectorch.storage\nUntypedStorage\nU\1"           \
    "0U\3cpuK\x10tQK\0" shape strides "\x89}ctorch\n" dtype "\ntR"
    static const char file[] =
        "\x80\2\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
        "\x80\2M\xe9\3."
        "\x80\2}U\x0dlittle_endian\x88s."
        "\x80\2}(" VIEW("a", "float32", "K\4\x85", "K\1\x85")
            VIEW("b", "int32", "K\4\x85", "K\1\x85")
                VIEW("c", "float32", "K\2K\2\x86", "K\2K\1\x86")
                    VIEW("d", "float32", "K\4K\1\x86", "K\1K\1\x86")
                        VIEW("e", "float32", "K\2K\2\x86", "K\2K\1\x86")
                            VIEW("f", "int16", "K\2K\4\x86", "K\4K\1\x86") "u."
                                                                           "\x80\2](U\1"
                                                                           "0e."
                                                                           "\x10\0\0\0\0\0\0\0"
                                                                           "0123456789abcdef";
#undef VIEW
    (void)state;
    fresh();
    fx_put(dir, "pytorch_model.bin", file, sizeof file - 1);
    qc_checkpoint *c = open_path(dir);
    assert_true(c->tensor_count == 6 && c->tensor_bytes == 6 * 16 && c->warning_count == 1);
    expect_warning(c, "1 tensor is stored before under another name and written once more: "
                      "'e'");
    qc_checkpoint_close(c);
}

static void prefers_safetensors(void **state)
{
    (void)state;
    copy_sharded();
    copy("module.bin", "pytorch_model.bin");
    fx_put_tensors(dir, "model.safetensors", "a b", 16);
    qc_checkpoint *c = open_path(dir);
    assert_true(c->tensor_count == 2 && c->files->kind == QC_CHECKPOINT_SAFETENSORS);
    assert_true(c->side_count == 1 && c->warning_count == 0);
    qc_checkpoint_close(c);
    /* The index before the single file. */
    copy_sharded();
    copy("module.bin", "pytorch_model.bin");
    c = open_path(dir);
    assert_true(c->file_count == 2 && c->side_count == 1 && c->warning_count == 0);
    qc_checkpoint_close(c);
}

static void refuses_bad_indexes(void **state)
{
    char path[FX_PATH_BYTES];
    (void)state;
    fresh();
    copy("module.bin", SHARD(2));
    copy("module.bin", SHARD(1));
    expect_failure(
        QC_ERR_INPUT,
        " has 2 PyTorch shards, but no pytorch_model.bin.index.json that says what belongs "
        "together: '" SHARD(1) "', '" SHARD(2) "'");
    copy_sharded();
    fx_join(path, dir, SHARD(1));
    assert_int_equal(unlink(path), 0);
    expect_failure(
        QC_ERR_INPUT,
        ": 1 of the 2 files that pytorch_model.bin.index.json names are "
        "missing: '" SHARD(
            1) "'; the first missing tensor is 'model.embed_tokens.weight'; download them, too");
    static const struct {
        const char *value;
        const char *message;
    } names[] = {
        {"../x.bin", "it is not a plain path below the directory"},
        {"/x.bin", "absolute paths are not accepted"},
        {"x.safetensors", "it does not end in .bin"},
        {"x.pt", "it does not end in .bin"},
    };
    for (size_t i = 0; i < COUNT(names); i++) {
        char text[256];
        char message[256];
        fresh();
        (void)snprintf(text, sizeof text, "{\"weight_map\":{\"a\":\"%s\"}}", names[i].value);
        fx_puts(dir, "pytorch_model.bin.index.json", text);
        (void)snprintf(message, sizeof message,
                       "/pytorch_model.bin.index.json: file name '%s' in weight_map: %s",
                       names[i].value, names[i].message);
        expect_failure(QC_ERR_INPUT, message);
    }
    fresh();
    copy("same_tensor.bin", "x.bin");
    fx_puts(dir, "pytorch_model.bin.index.json",
            "{\"weight_map\":{\"a\":\"x.bin\",\"c\":\"x.bin\"}}");
    expect_failure(QC_ERR_INPUT,
                   ": 1 tensor of pytorch_model.bin.index.json is in no file ('c'), 1 tensor of "
                   "the files is not in it ('b')");
    fresh();
    copy("same_tensor.bin", "x.bin");
    copy("same_tensor.bin", "y.bin");
    fx_puts(dir, "pytorch_model.bin.index.json",
            "{\"weight_map\":{\"a\":\"x.bin\",\"b\":\"y.bin\"}}");
    expect_failure(QC_ERR_INPUT, ": tensor 'a' is in two files, 'x.bin' and 'y.bin'");
    copy_sharded();
    fx_puts(dir, SHARD(2), "x");
    expect_failure(QC_ERR_INPUT,
                   "/" SHARD(2) ": the file is not a PyTorch checkpoint, but neither a zip "
                                "archive nor a pickle");
}

/* An index may say the size with what is shared once (transformers) or as often as it is named. */
static void checks_total_size(void **state)
{
    static const int sizes[] = {12, 24, 23};
    (void)state;
    for (size_t i = 0; i < COUNT(sizes); i++) {
        char text[256];
        fresh();
        copy("same_tensor.bin", "x.bin"); /* a and b, 12 bytes */
        (void)snprintf(text, sizeof text,
                       "{\"metadata\":{\"total_size\":%d},\"weight_map\":{\"a\":\"x.bin\","
                       "\"b\":\"x.bin\"}}",
                       sizes[i]);
        fx_puts(dir, "pytorch_model.bin.index.json", text);
        qc_checkpoint *c = open_path(dir);
        assert_true(c->tensor_count == 2 && c->tensor_bytes == 24 && c->side_count == 0);
        assert_true(c->warning_count == (sizes[i] == 23 ? 2 : 1));
        expect_warning(c, "1 tensor is stored before under another name and written once "
                          "more: 'b'");
        if (sizes[i] == 23)
            expect_warning(c, "pytorch_model.bin.index.json says total_size 23, the tensors have "
                              "24 bytes; the files are believed");
        qc_checkpoint_close(c);
    }
}

static void drops_tied_heads(void **state)
{
    static const struct {
        const char *config; /* NULL: none */
        int dropped;
    } cases[] = {
        {"{\"tie_word_embeddings\": true}", 1},
        {"{\"text_config\": {\"tie_word_embeddings\": true}}", 1},
        {"{\"tie_word_embeddings\": false, \"text_config\": {\"tie_word_embeddings\": true}}", 0},
        {"{\"tie_word_embeddings\": false}", 0},
        {"{}", 0},
        {NULL, 0},
    };
    static const char *const files[] = {"tied.bin", "tied_legacy.bin"};
    (void)state;
    for (size_t i = 0; i < COUNT(cases) * COUNT(files); i++) {
        fresh();
        copy(files[i % 2], "pytorch_model.bin");
        if (cases[i / 2].config)
            fx_puts(dir, "config.json", cases[i / 2].config);
        qc_checkpoint *c = open_path(dir);
        const qc_checkpoint_tensor *head = qc_checkpoint_find(c, "lm_head.weight");
        const qc_checkpoint_tensor *embed = qc_checkpoint_find(c, "embed_tokens.weight");
        assert_true(embed && embed->bytes == 96 && c->warning_count == 1);
        assert_true(c->tensor_bytes == c->files->tensor_bytes - (cases[i / 2].dropped ? 96 : 0));
        for (size_t k = 1; k < c->tensor_count; k++)
            assert_true(strcmp(c->tensors[k - 1].name, c->tensors[k].name) < 0);
        if (cases[i / 2].dropped) {
            assert_null(head);
            expect_warning(c, "'lm_head.weight' is 'embed_tokens.weight' under another name; it is "
                              "left out, as tie_word_embeddings has it");
        } else {
            assert_true(head && head->begin == embed->begin);
            expect_warning(c, "1 tensor is stored before under another name and written once "
                              "more: 'lm_head.weight'");
        }
        qc_checkpoint_close(c);
    }
    /* A head with bytes of its own stays, whatever the configuration says. */
    fresh();
    copy("module.bin", "pytorch_model.bin");
    fx_puts(dir, "config.json", cases[0].config);
    qc_checkpoint *c = open_path(dir);
    assert_true(c->warning_count == 0 && qc_checkpoint_find(c, "lm_head.weight"));
    qc_checkpoint_close(c);
}

static void warns_of_other_entries(void **state)
{
    (void)state;
    fresh();
    copy("wrapped_legacy.bin", "pytorch_model.bin");
    qc_checkpoint *c = open_path(dir);
    expect_warning(c, "'pytorch_model.bin' holds 1 entries that are no tensors (the first is "
                      "'epoch'); they are left out");
    qc_checkpoint_close(c);
}

static void leaves_pickles_behind(void **state)
{
    static const char *const pickles[] = {"training_args.bin", "optimizer.bin", "scheduler.bin",
                                          "random_states_0.pkl", "sub/x.pickle"};
    (void)state;
    copy_sharded();
    for (size_t i = 0; i < COUNT(pickles); i++)
        fx_puts(dir, pickles[i], "x");
    fx_puts(dir, "optimizer.pt", "x");
    fx_puts(dir, "rng_state.pth", "x");
    fx_puts(dir, "vocab.bin", "x");
    qc_checkpoint *c = open_path(dir);
    assert_true(c->side_count == 2);
    assert_string_equal(c->side[0].path, "config.json");
    assert_string_equal(c->side[1].path, "vocab.bin");
    expect_warning(c, "5 Python pickles are not copied: 'optimizer.bin', 'random_states_0.pkl', "
                      "'scheduler.bin', 'sub/x.pickle', 'training_args.bin'");
    qc_checkpoint_close(c);
}

static void survives_faults(void **state)
{
    (void)state;
    fresh();
    copy("tied.bin", "pytorch_model.bin");
    fx_puts(dir, "config.json", "{\"tie_word_embeddings\": true}");
    for (int reads = 0; reads < 2; reads++) {
        qc_status st = QC_ERR_INTERNAL;
        for (uint64_t n = 1; st != QC_OK; n++) {
            qc_checkpoint *c = NULL;
            qc_error err = {0};
            qc_digest digest;
            if (reads)
                qc_io_fail_at(QC_IO_READ, n, 0, EIO);
            else
                qc_alloc_fail_at(n, 0);
            st = qc_checkpoint_open(&c, dir, &err);
            if (st == QC_OK)
                st = qc_checkpoint_head_digest(c, 0, &digest, &err);
            qc_alloc_fail_at(0, 0);
            qc_io_fail_at(QC_IO_READ, 0, 0, 0);
            assert_true(st == QC_OK || st == (reads ? QC_ERR_IO : QC_ERR_NOMEM));
            assert_true(n < 1000);
            qc_checkpoint_close(c);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(opens_shards),          cmocka_unit_test(digests_the_pickles),
        cmocka_unit_test(opens_single_files),    cmocka_unit_test(prefers_safetensors),
        cmocka_unit_test(tells_by_contents),     cmocka_unit_test(knows_second_names),
        cmocka_unit_test(refuses_bad_indexes),   cmocka_unit_test(checks_total_size),
        cmocka_unit_test(drops_tied_heads),      cmocka_unit_test(warns_of_other_entries),
        cmocka_unit_test(leaves_pickles_behind), cmocka_unit_test(survives_faults),
    };
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
