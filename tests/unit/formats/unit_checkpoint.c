/* formats/checkpoint.h: directories as they come, and what is wrong with them. */
#include "formats/checkpoint.h"

#include "base/alloc.h"
#include "formats/checkpoint_internal.h"
#include "tests/fixtures/fixture_files.h"

#include <errno.h>
#include <sys/resource.h>

#define COUNT(a)   (sizeof(a) / sizeof *(a))
#define INDEX_NAME "model.safetensors.index.json"

static fx_dir root; /* holds one folder per test */
static char dir[FX_PATH_BYTES];

static int make_root(void **state)
{
    (void)state;
    fx_make_dir(&root);
    return 0;
}

/* A fresh empty folder in `dir`. */
static void fresh(void)
{
    static int n;
    char name[32];
    (void)snprintf(name, sizeof name, "d%d", n++);
    fx_join(dir, root.path, name);
    assert_int_equal(mkdir(dir, 0777), 0);
}

/* Opening must fail with this status and this message, in which %s stands for the directory. */
static void expect_failure(qc_status status, const char *message)
{
    qc_checkpoint *c = (void *)1;
    qc_error err = {0};
    char expected[2 * FX_PATH_BYTES + 600];
    const char *mark = strstr(message, "%s"), *second = mark ? strstr(mark + 2, "%s") : NULL;
    if (second)
        (void)snprintf(expected, sizeof expected, "%.*s%s%.*s%s%s", (int)(mark - message), message,
                       dir, (int)(second - mark - 2), mark + 2, dir, second + 2);
    else if (mark)
        (void)snprintf(expected, sizeof expected, "%.*s%s%s", (int)(mark - message), message, dir,
                       mark + 2);
    else
        (void)snprintf(expected, sizeof expected, "%s", message);
    qc_status st = qc_checkpoint_open(&c, dir, &err);
    if (st != status || strcmp(err.msg, expected) != 0)
        fail_msg("%s '%s', expected %s '%s'", qc_status_name(st), err.msg, qc_status_name(status),
                 expected);
    assert_null(c);
}

static qc_checkpoint *open_dir(void)
{
    qc_checkpoint *c = NULL;
    qc_error err = {0};
    if (qc_checkpoint_open(&c, dir, &err) != QC_OK)
        fail_msg("%s", err.msg);
    return c;
}

static void expect_warning(const qc_checkpoint *c, const char *part)
{
    for (size_t i = 0; i < c->warning_count; i++) {
        if (strstr(c->warnings[i], part))
            return;
    }
    fail_msg("no warning with '%s' among %zu", part, c->warning_count);
}

static void check_tensor(const qc_checkpoint *c, const char *name, const char *file)
{
    const qc_checkpoint_tensor *t = qc_checkpoint_find(c, name);
    qc_st_cursor *cur = NULL;
    unsigned char buf[256];
    assert_non_null(t);
    assert_string_equal(t->name, name);
    assert_string_equal(c->files[t->file].name, file);
    assert_true(t->bytes <= sizeof buf);
    assert_int_equal(qc_st_cursor_create(&cur, NULL), QC_OK);
    assert_int_equal(qc_checkpoint_read(c, cur, t, 0, buf, (size_t)t->bytes, NULL), QC_OK);
    for (uint64_t i = 0; i < t->bytes; i++)
        assert_int_equal(buf[i], fx_byte(name, i));
    assert_int_equal(qc_checkpoint_read(c, cur, t, t->bytes - 1, buf, 1, NULL), QC_OK);
    assert_int_equal(buf[0], fx_byte(name, t->bytes - 1));
    qc_st_cursor_destroy(cur);
}

/* Two shards a b | c d, 40 bytes a tensor, and the index over them. */
#define GOOD_INDEX                                                                                 \
    "{\"metadata\":{\"total_size\":160},\"weight_map\":{\"d\":\"m-00001-of-00002.safetensors\","   \
    "\"a\":\"m-00000-of-00002.safetensors\",\"c\":\"m-00001-of-00002.safetensors\","               \
    "\"b\":\"m-00000-of-00002.safetensors\"}}"

static void make_sharded(const char *suffix)
{
    char name[64];
    fresh();
    (void)snprintf(name, sizeof name, "m-00000-of-00002.safetensors%s", suffix);
    fx_put_tensors(dir, name, "b a", 40);
    (void)snprintf(name, sizeof name, "m-00001-of-00002.safetensors%s", suffix);
    fx_put_tensors(dir, name, "c d", 40);
    fx_puts(dir, INDEX_NAME, GOOD_INDEX);
    fx_puts(dir, "config.json", "{\"model_type\": \"llama\"}\n");
}

TEST(opens_a_sharded_checkpoint)
{
    static const char *const suffixes[] = {"", ".zst"};
    for (size_t k = 0; k < COUNT(suffixes); k++) {
        make_sharded(suffixes[k]);
        qc_checkpoint *c = open_dir();
        assert_int_equal(c->is_dir, 1);
        assert_string_equal(c->path, dir);
        assert_true(c->file_count == 2 && c->tensor_count == 4 && c->tensor_bytes == 160);
        assert_int_equal(c->files[0].st.compressed, (int)k);
        assert_string_equal(c->files[1].name, "m-00001-of-00002.safetensors");
        for (size_t i = 1; i < c->tensor_count; i++)
            assert_true(strcmp(c->tensors[i - 1].name, c->tensors[i].name) < 0);
        check_tensor(c, "a", "m-00000-of-00002.safetensors");
        check_tensor(c, "b", "m-00000-of-00002.safetensors");
        check_tensor(c, "c", "m-00001-of-00002.safetensors");
        check_tensor(c, "d", "m-00001-of-00002.safetensors");
        assert_null(qc_checkpoint_find(c, ""));
        assert_null(qc_checkpoint_find(c, "aa"));
        assert_null(qc_checkpoint_find(c, "e"));
        assert_true(c->meta_count == 1);
        assert_string_equal(c->meta->key, "format");
        assert_true(c->warning_count == 0);
        assert_true(c->side_count == 1);
        assert_string_equal(c->side->path, "config.json");
        assert_string_equal(c->config_text, "{\"model_type\": \"llama\"}\n");
        assert_true(c->config_len == 24);
        assert_string_equal(
            qc_json_string_or(qc_json_get(qc_json_root(c->config), "model_type"), ""), "llama");

        char b = 0;
        qc_error err = {0};
        const qc_checkpoint_tensor *t = qc_checkpoint_find(c, "a");
        assert_int_equal(qc_checkpoint_read(c, NULL, t, 41, &b, 0, &err), QC_ERR_INPUT);
        assert_string_equal(err.msg, "tensor 'a' has 40 bytes, but 0 at 41 were asked for");
        assert_int_equal(qc_checkpoint_read(c, NULL, t, 1, &b, 40, &err), QC_ERR_INPUT);
        assert_int_equal(qc_checkpoint_read(c, NULL, t, UINT64_MAX, &b, 2, &err), QC_ERR_INPUT);
        qc_checkpoint_close(c);
    }
    qc_checkpoint_close(NULL);
}

TEST(opens_single_files)
{
    static const char *const names[] = {"model.safetensors", "model.safetensors.zst",
                                        "other.safetensors", "other.safetensors.zst"};
    for (size_t k = 0; k < COUNT(names); k++) {
        const char *plain = k < 2 ? "model.safetensors" : "other.safetensors";
        fresh();
        fx_put_tensors(dir, names[k], "x y", 20);
        for (int as_file = 0; as_file < 2; as_file++) {
            qc_checkpoint *c = NULL;
            char path[FX_PATH_BYTES];
            qc_error err = {0};
            fx_join(path, dir, as_file ? names[k] : "");
            if (qc_checkpoint_open(&c, path, &err) != QC_OK)
                fail_msg("%s", err.msg);
            assert_int_equal(c->is_dir, !as_file);
            assert_true(c->file_count == 1 && c->tensor_count == 2 && c->side_count == 0);
            assert_null(c->config);
            assert_null(c->config_text);
            check_tensor(c, "x", plain);
            check_tensor(c, "y", plain);
            qc_checkpoint_close(c);
        }
    }
    /* a path without a slash */
    char before[FX_PATH_BYTES];
    qc_checkpoint *c = NULL;
    assert_non_null(getcwd(before, sizeof before));
    assert_int_equal(chdir(dir), 0);
    assert_int_equal(qc_checkpoint_open(&c, "other.safetensors.zst", NULL), QC_OK);
    assert_string_equal(c->files->name, "other.safetensors");
    qc_checkpoint_close(c);
    assert_int_equal(chdir(before), 0);
}

TEST(prefers_plain_over_compressed)
{
    fresh();
    fx_put_tensors(dir, "one.safetensors", "plain", 20);
    fx_put_tensors(dir, "one.safetensors.zst", "packed", 20);
    qc_checkpoint *c = open_dir();
    assert_non_null(qc_checkpoint_find(c, "plain"));
    expect_warning(c, "both 'one.safetensors' and its .zst are there; the first is read");
    qc_checkpoint_close(c);
}

TEST(ignores_what_lies_beside)
{
    make_sharded("");
    fx_put_tensors(dir, "stale.safetensors", "stale", 8);
    fx_put_tensors(dir, "model-00001-of-00009.safetensors", "stale", 8);
    fx_put_tensors(dir, "original/model.safetensors", "a", 8);
    fx_put_tensors(dir, "metal/model.safetensors", "a", 8);
    fx_put_tensors(dir, "2_Dense/model.safetensors", "linear", 8);
    static const char *const junk[] = {
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin.index.json",
        "consolidated.00.pth",
        "consolidated.safetensors",
        "original/params.json",
        "metal/model.bin",
        "x.pt",
        "x.ckpt",
        "x.gguf",
        "tf_model.h5",
        "flax_model.msgpack",
        "onnx/model.onnx",
        ".gitattributes",
        ".cache/huggingface/x",
        "qconv.json",
        "device_map.json",
        "model.safetensors.tmp",
        "other.safetensors.index.json",
        "sub/.hidden",
        "training_args.bin",
        "sub/states.pkl",
    };
    for (size_t i = 0; i < COUNT(junk); i++)
        fx_puts(dir, junk[i], "junk");
    static const char *const side[] = {
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "LICENSE",
        "README.md",
        "config.json",
        "modeling_x.py",
        "sub/deep/qconv.json",
        "tokenizer.json",
        "tokenizer.model",
    };
    for (size_t i = 0; i < COUNT(side); i++) {
        if (strcmp(side[i], "config.json") != 0)
            fx_puts(dir, side[i], "text");
    }
    qc_checkpoint *c = open_dir();
    assert_true(c->tensor_count == 4 && c->file_count == 2);
    assert_true(c->side_count == COUNT(side));
    for (size_t i = 0; i < COUNT(side); i++) {
        assert_string_equal(c->side[i].path, side[i]);
        if (strcmp(side[i], "config.json") != 0)
            assert_true(c->side[i].bytes == 4);
    }
    assert_true(c->warning_count == 2);
    expect_warning(c, "2 Python pickles are not copied: 'sub/states.pkl', 'training_args.bin'");
    expect_warning(c, "4 .safetensors files are not part of the model: "
                      "'2_Dense/model.safetensors', 'consolidated.safetensors', "
                      "'model-00001-of-00009.safetensors', 'stale.safetensors'");
    qc_checkpoint_close(c);
}

TEST(follows_shards_into_folders)
{
    fresh();
    fx_put_tensors(dir, "deep/er/x.safetensors", "a", 16);
    fx_put_tensors(dir, "..odd..safetensors", "b", 16);
    fx_puts(dir, INDEX_NAME,
            "{\"weight_map\":{\"a\":\"deep/er/x.safetensors\",\"b\":\"..odd..safetensors\"}}");
    qc_checkpoint *c = open_dir();
    check_tensor(c, "a", "deep/er/x.safetensors");
    check_tensor(c, "b", "..odd..safetensors");
    assert_true(c->warning_count == 0);
    qc_checkpoint_close(c);
}

/* The Hub's cache: every file is a link into ../blobs. */
TEST(follows_links_to_files)
{
    char path[FX_PATH_BYTES];
    fresh();
    fx_put_tensors(dir, "blobs/aa", "x", 16);
    fx_puts(dir, "blobs/bb", "{}");
    fx_puts(dir, "snapshot/README.md", "text");
    fx_join(path, dir, "snapshot/model.safetensors");
    assert_int_equal(symlink("../blobs/aa", path), 0);
    fx_join(path, dir, "snapshot/config.json");
    assert_int_equal(symlink("../blobs/bb", path), 0);
    fx_join(path, dir, "snapshot");
    memcpy(dir, path, sizeof dir);
    qc_checkpoint *c = open_dir();
    check_tensor(c, "x", "model.safetensors");
    assert_non_null(c->config);
    assert_true(c->side_count == 2);
    qc_checkpoint_close(c);
    /* the file behind the link is gone */
    fx_join(path, dir, "../blobs/aa");
    assert_int_equal(unlink(path), 0);
    expect_failure(QC_ERR_INPUT, "%s/model.safetensors is a link to a file that does not exist");
}

/* ---- the index ---- */

#define IN_MAP(name) "{\"weight_map\":{\"a\":\"" name "\"}}"
#define AT           "%s/" INDEX_NAME ": "

static const struct {
    const char *index;
    const char *message;
} bad_indexes[] = {
    {"", AT "the file is empty; download it again"},
    {"version https://git-lfs.github.com/spec/v1\n", AT
     "the file is a git-lfs pointer, not the file itself (run 'git lfs pull'); download it again"},
    {"{", AT "JSON byte 1: expected a key in quotes, found the end of the text"},
    {"[]", AT "text is of kind array; expected an object"},
    {"{}", AT "weight_map is missing; expected an object"},
    {"{\"metadata\":{\"total_size\":1}}", AT "weight_map is missing; expected an object"},
    {"{\"Weight_Map\":{\"a\":\"x.safetensors\"}}", AT "weight_map is missing; expected an object"},
    {"{\"weight_map\":[]}", AT "weight_map is of kind array; expected an object"},
    {"{\"weight_map\":null}", AT "weight_map is of kind null; expected an object"},
    {"{\"weight_map\":{}}", AT "weight_map is empty"},
    {"{\"weight_map\":{\"a\":1}}",
     AT "a file name in weight_map is of kind number; expected a string"},
    {"{\"weight_map\":{\"a\":\"x.safetensors\",\"a\":\"y.safetensors\"}}",
     AT "JSON byte 35: key 'a' appears a second time in one object (first at byte 15)"},
    {IN_MAP(""), AT "file name '' in weight_map: it is empty"},
    {IN_MAP("/etc/passwd.safetensors"),
     AT "file name '/etc/passwd.safetensors' in weight_map: absolute paths are not accepted"},
    {IN_MAP("../x.safetensors"),
     AT "file name '../x.safetensors' in weight_map: it is not a plain path below the directory"},
    {IN_MAP("a/../../x.safetensors"), AT "file name 'a/../../x.safetensors' in weight_map: it is "
                                         "not a plain path below the directory"},
    {IN_MAP("./x.safetensors"),
     AT "file name './x.safetensors' in weight_map: it is not a plain path below the directory"},
    {IN_MAP("a//x.safetensors"),
     AT "file name 'a//x.safetensors' in weight_map: it is not a plain path below the directory"},
    {IN_MAP("x.safetensors/"),
     AT "file name 'x.safetensors/' in weight_map: it is not a plain path below the directory"},
    {IN_MAP("a\\\\..\\\\x.safetensors"),
     AT "file name 'a\\..\\x.safetensors' in weight_map: it contains a backslash"},
    {IN_MAP("C:x.safetensors"),
     AT "file name 'C:x.safetensors' in weight_map: it begins with a drive letter"},
    {IN_MAP("z:x.safetensors"),
     AT "file name 'z:x.safetensors' in weight_map: it begins with a drive letter"},
    {IN_MAP("x.bin"), AT "file name 'x.bin' in weight_map: it does not end in .safetensors"},
    {IN_MAP("x.SAFETENSORS"),
     AT "file name 'x.SAFETENSORS' in weight_map: it does not end in .safetensors"},
    {IN_MAP("x.safetensors.zst"),
     AT "file name 'x.safetensors.zst' in weight_map: it does not end in .safetensors"},
    {IN_MAP("x"), AT "file name 'x' in weight_map: it does not end in .safetensors"},
    {IN_MAP("gone.safetensors"),
     "%s: 1 of the 1 files that " INDEX_NAME
     " names are missing: 'gone.safetensors'; the first missing tensor is 'a'; download them, too"},
    {"{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"1.safetensors\",\"c\":\"2.safetensors\","
     "\"d\":\"3.safetensors\",\"e\":\"4.safetensors\",\"f\":\"5.safetensors\",\"g\":"
     "\"6.safetensors\",\"h\":\"7.safetensors\"}}",
     "%s: 7 of the 8 files that " INDEX_NAME
     " names are missing: '1.safetensors', '2.safetensors', '3.safetensors', '4.safetensors', "
     "'5.safetensors' and 2 more; the first missing tensor is 'b'; download them, "
     "too"},
};

TEST(refuses_bad_indexes)
{
    fresh();
    fx_put_tensors(dir, "x.safetensors", "a b", 16);
    for (size_t i = 0; i < COUNT(bad_indexes); i++) {
        fx_puts(dir, INDEX_NAME, bad_indexes[i].index);
        expect_failure(QC_ERR_INPUT, bad_indexes[i].message);
    }
}

/* What transformers and vLLM load: all that is in the files that the index names, the last file by
 * name over the others. */
TEST(believes_the_files)
{
#define MAP_A "\"a\":\"m-00000-of-00002.safetensors\","
#define MAP_B "\"b\":\"m-00001-of-00002.safetensors\","
#define MAP_C "\"c\":\"m-00001-of-00002.safetensors\""
    static const struct {
        const char *map, *second, *warning;
        size_t lost;
    } cases[] = {
        {MAP_A "\"b\":\"m-00000-of-00002.safetensors\"," MAP_C
               ",\"z\":\"m-00001-of-00002.safetensors\"",
         "c d", "1 tensor of " INDEX_NAME " is in no file: 'z'", 1},
        {MAP_A MAP_C, "c d",
         "2 tensors of the files are not in " INDEX_NAME
         ", and are read all the same, as transformers and vLLM do: 'b', 'd'",
         0},
        {MAP_A MAP_B MAP_C ",\"d\":\"m-00001-of-00002.safetensors\"", "c d",
         INDEX_NAME
         " says that 1 tensor is in another file than the one that is read (the first in "
         "'m-00001-of-00002.safetensors'), and is not believed: 'b'",
         0},
        {MAP_A MAP_B MAP_C ",\"d\":\"m-00001-of-00002.safetensors\"", "b c d",
         "1 tensor is in two files, of which the last by name counts, as in transformers and vLLM "
         "(the first is read from 'm-00001-of-00002.safetensors'): 'b'",
         0},
    };
    make_sharded("");
    for (size_t i = 0; i < COUNT(cases); i++) {
        char index[1000];
        (void)snprintf(index, sizeof index, "{\"weight_map\":{%s}}", cases[i].map);
        fx_puts(dir, INDEX_NAME, index);
        fx_put_tensors(dir, "m-00001-of-00002.safetensors", cases[i].second, 40);
        qc_checkpoint *c = open_dir();
        expect_warning(c, cases[i].warning);
        assert_true(c->tensor_count == 4 && c->tensor_bytes == 160);
        assert_true(c->lost_count == cases[i].lost);
        const uint32_t file = qc_checkpoint_find(c, "b")->file;
        assert_string_equal(c->files[file].name, i == 3 ? "m-00001-of-00002.safetensors"
                                                        : "m-00000-of-00002.safetensors");
        qc_checkpoint_close(c);
    }
}

TEST(takes_the_file_that_transformers_loads)
{
    make_sharded("");
    fx_put_tensors(dir, "model.safetensors", "x", 8);
    qc_checkpoint *c = open_dir();
    assert_string_equal(c->files[0].name, "model.safetensors");
    expect_warning(c, "'model.safetensors' is read, as transformers does; vLLM reads the files "
                      "that '" INDEX_NAME "' names instead");
    qc_checkpoint_close(c);
    fx_puts(dir, "config.json", "{\"transformers_weights\":\"" INDEX_NAME "\"}");
    c = open_dir();
    assert_true(c->file_count == 2);
    qc_checkpoint_close(c);
    fx_puts(dir, "config.json", "{\"transformers_weights\":\"m-00000-of-00002.safetensors\"}");
    c = open_dir();
    assert_string_equal(c->files[0].name, "m-00000-of-00002.safetensors");
    expect_warning(c, "'m-00000-of-00002.safetensors' is read, which config.json has as "
                      "transformers_weights; vLLM reads '" INDEX_NAME "' instead");
    qc_checkpoint_close(c);
    fx_puts(dir, "config.json", "{\"transformers_weights\":\"gone.safetensors\"}");
    expect_failure(QC_ERR_INPUT, "%s: transformers_weights of config.json is 'gone.safetensors': "
                                 "there is no such file; download it, too");
    /* An index that was left behind, of other files or of none, and one that lists this, too. */
    fx_puts(dir, "config.json", "{}");
    fx_puts(dir, INDEX_NAME, "{\"weight_map\":{\"x\":\"gone.safetensors\"}}");
    c = open_dir();
    expect_warning(c, "'model.safetensors' is read, as transformers does, and '" INDEX_NAME
                      "' is left out: 1 of its files are missing: 'gone.safetensors'");
    qc_checkpoint_close(c);
    fx_puts(dir, INDEX_NAME, "");
    c = open_dir();
    expect_warning(c, "the file is empty; download it again");
    qc_checkpoint_close(c);
    fx_puts(
        dir, INDEX_NAME,
        "{\"weight_map\":{\"x\":\"model.safetensors\",\"a\":\"m-00000-of-00002.safetensors\"}}");
    c = open_dir();
    assert_true(c->file_count == 2);
    qc_checkpoint_close(c);
}

TEST(refuses_short_and_foreign_shards)
{
    make_sharded("");
    qc_strbuf file;
    fx_build(&file, "c d", 40, NULL, 0);
    fx_put(dir, "m-00001-of-00002.safetensors", file.data, file.len - 41);
    expect_failure(QC_ERR_TRUNCATED,
                   "%s/m-00001-of-00002.safetensors: the data has 39 bytes, but the tensors need "
                   "80: 41 are missing, and 'c' is the first tensor that is not whole; download or "
                   "copy it again");
    qc_strbuf_deinit(&file);
    fx_puts(dir, "m-00001-of-00002.safetensors", "version https://git-lfs.github.com/spec/v1\n");
    expect_failure(QC_ERR_INPUT,
                   "%s/m-00001-of-00002.safetensors: the file is a git-lfs pointer, not "
                   "the file itself (run 'git lfs pull')");
    fx_put(dir, "m-00001-of-00002.safetensors", "PK\x03\x04\0\0\0\0\0\0", 10);
    expect_failure(QC_ERR_UNSUPPORTED,
                   "%s/m-00001-of-00002.safetensors: the file is a zip archive (a "
                   "PyTorch checkpoint?), not safetensors");
}

TEST(warns_but_goes_on)
{
    static const struct {
        const char *metadata;
        const char *warning; /* NULL: none */
    } cases[] = {
        {"{\"total_size\":160}", NULL},
        {"{\"total_size\":160.0}", NULL},
        {"{\"total_size\":159}", INDEX_NAME " says total_size 159, the tensors have 160 bytes"},
        {"{\"total_size\":-1}", INDEX_NAME " says total_size -1, the tensors have 160 bytes"},
        {"{\"total_size\":\"160\"}", NULL},
        {"{}", NULL},
        {"null", NULL},
    };
    make_sharded("");
    for (size_t i = 0; i < COUNT(cases); i++) {
        char index[1000];
        (void)snprintf(index, sizeof index, "{\"metadata\":%s,%s", cases[i].metadata,
                       strstr(GOOD_INDEX, "\"weight_map\""));
        fx_puts(dir, INDEX_NAME, index);
        qc_checkpoint *c = open_dir();
        assert_true(c->warning_count == (cases[i].warning != NULL));
        if (cases[i].warning)
            expect_warning(c, cases[i].warning);
        qc_checkpoint_close(c);
    }
    /* unknown members of tensor entries */
    static const char odd[] = "\x4b\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"U8\",\"shape\":[1],"
                              "\"data_offsets\":[0,1],\"x\":1,\"y\":2}}          z";
    fresh();
    fx_put(dir, "odd.safetensors", odd, sizeof odd - 1);
    qc_checkpoint *c = open_dir();
    expect_warning(c, "tensor entries have 2 members besides dtype, shape and data_offsets in 1 "
                      "files (the first is 'odd.safetensors'); they are ignored");
    qc_checkpoint_close(c);
}

TEST(merges_metadata)
{
    static const qc_st_meta one[] = {{"format", "pt"}, {"who", "one"}};
    static const qc_st_meta two[] = {{"who", "two"}, {"format", "pt"}};
    qc_strbuf file;
    fresh();
    fx_build(&file, "a", 8, one, 2);
    fx_put(dir, "1.safetensors", file.data, file.len);
    qc_strbuf_deinit(&file);
    fx_build(&file, "b", 8, two, 2);
    fx_put(dir, "2.safetensors", file.data, file.len);
    qc_strbuf_deinit(&file);
    fx_puts(dir, INDEX_NAME, "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
    qc_checkpoint *c = open_dir();
    assert_true(c->meta_count == 3);
    assert_string_equal(c->meta[0].value, "pt");
    assert_string_equal(c->meta[1].value, "one");
    assert_string_equal(c->meta[2].value, "two");
    qc_checkpoint_close(c);
}

/* ---- no index ---- */

TEST(says_what_is_there_instead)
{
    fresh();
    expect_failure(QC_ERR_INPUT,
                   "%s has no .safetensors file; give the folder that has the weights");
    fx_puts(dir, "config.json", "{}");
    fx_puts(dir, "sub/model.safetensors", "not at the top");
    expect_failure(QC_ERR_INPUT, "%s has no .safetensors file; give the folder that has the "
                                 "weights, such as %s/sub");
    fx_puts(dir, "tf_model.h5", "x");
    fx_puts(dir, "model.onnx", "x");
    expect_failure(
        QC_ERR_UNSUPPORTED,
        "%s has no .safetensors file, but only weights in formats that qconv does not read: "
        "'model.onnx', 'tf_model.h5'; take the checkpoint that they were made from");
    for (int i = 0; i < 4; i++) {
        char name[200];
        (void)snprintf(name, sizeof name, "a%d-%0140d.gguf", i, i);
        fx_puts(dir, name, "x");
    }
    qc_checkpoint *c = NULL;
    qc_error err = {0};
    assert_int_equal(qc_checkpoint_open(&c, dir, &err), QC_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.msg, "000.gguf' and 5 more"));

    fresh();
    fx_put_tensors(dir, "b.safetensors", "b", 8);
    fx_put_tensors(dir, "a.safetensors.zst", "a", 8);
    fx_puts(dir, "._b.safetensors", "resource fork");
    expect_failure(QC_ERR_INPUT, "%s has 2 .safetensors files, but no " INDEX_NAME
                                 " that says what belongs together: 'a.safetensors', "
                                 "'b.safetensors'");
}

TEST(refuses_what_is_no_checkpoint)
{
    char good[FX_PATH_BYTES];
    fresh();
    fx_join(good, dir, "gone");
    memcpy(dir, good, sizeof dir);
    expect_failure(QC_ERR_INPUT, "%s does not exist");
    assert_int_equal(mkfifo(dir, 0666), 0);
    expect_failure(QC_ERR_INPUT, "%s: expected a directory or a regular file, found neither");
    assert_int_equal(unlink(dir), 0);

    fresh();
    fx_puts(dir, "model.safetensors/x", "a folder by that name");
    qc_checkpoint *c = NULL;
    qc_error err = {0};
    assert_int_equal(qc_checkpoint_open(&c, dir, &err), QC_ERR_INPUT);
    assert_null(c);
}

static const struct {
    const char *config;
    const char *message;
} bad_configs[] = {
    {"", "%s/config.json: the file is empty; download it again"},
    {"<!DOCTYPE html>\n", "%s/config.json: the file is an HTML page; download it again"},
    {"[]", "%s/config.json: text is of kind array; expected an object"},
    {"{\"a\":1,}", "%s/config.json: JSON byte 7: expected a key in quotes, found '}'"},
};

TEST(refuses_bad_configs)
{
    fresh();
    fx_put_tensors(dir, "model.safetensors", "a", 8);
    for (size_t i = 0; i < COUNT(bad_configs); i++) {
        fx_puts(dir, "config.json", bad_configs[i].config);
        expect_failure(QC_ERR_INPUT, bad_configs[i].message);
    }
}

/* Mamba-2 models have it; Python writes and reads it. */
TEST(takes_infinity_in_configs)
{
    fresh();
    fx_put_tensors(dir, "model.safetensors", "a", 8);
    fx_puts(dir, "config.json", "{\"time_step_limit\": [0.0, Infinity], \"n\": 3}");
    qc_checkpoint *c = open_dir();
    uint64_t n = 0;
    assert_int_equal(qc_json_as_u64(qc_json_get(qc_json_root(c->config), "n"), "n", &n, NULL),
                     QC_OK);
    assert_true(n == 3);
    qc_checkpoint_close(c);
}

TEST(keeps_messages_and_warnings_printable)
{
    qc_checkpoint_names names = {0};
    qc_checkpoint c;
    memset(&c, 0, sizeof c);
    assert_int_equal(qc_checkpoint_warn(&c, NULL, "a\x1b[31m%s", "b\n"), QC_OK);
    assert_string_equal(c.warnings[0], "a?[31mb?");
    for (int i = 0; i < 100; i++)
        assert_int_equal(qc_checkpoint_warn(&c, NULL, "%d", i), QC_OK);
    assert_true(c.warning_count == 64);
    qc_arena_deinit(&c.arena);
    assert_string_equal(qc_checkpoint_names_text(&names), "");
    qc_checkpoint_names_add(&names, "x");
    assert_string_equal(qc_checkpoint_names_text(&names), "'x'");
    assert_int_equal(qc_ends_with("t", ".zst"), 0);
}

/* ---- faults ---- */

static void make_rich(void)
{
    make_sharded(".zst");
    fx_put_tensors(dir, "m-00000-of-00002.safetensors", "b a", 40); /* beside its .zst: a warning */
    fx_puts(dir, "tokenizer/x.json", "{}");
    fx_put_tensors(dir, "stale.safetensors", "q", 4);
}

TEST(survives_every_failed_allocation)
{
    uint64_t last = 0;
    make_rich();
    for (int persistent = 0; persistent < 2; persistent++) {
        for (uint64_t at = 1;; at++) {
            qc_checkpoint *c = NULL;
            qc_error err = {0};
            qc_alloc_fail_at(at, persistent);
            qc_status st = qc_checkpoint_open(&c, dir, &err);
            last = qc_alloc_count();
            qc_alloc_fail_at(0, 0);
            if (last < at) {
                assert_int_equal(st, QC_OK);
                qc_checkpoint_close(c);
                break;
            }
            if (st == QC_OK) {
                qc_checkpoint_close(c);
                continue;
            }
            if (st != QC_ERR_NOMEM)
                fail_msg("allocation %llu: %s '%s'", (unsigned long long)at, qc_status_name(st),
                         err.msg);
            assert_null(c);
        }
    }
    print_message("%llu allocations\n", (unsigned long long)last);
}

TEST(survives_every_failed_read)
{
    uint64_t last = 0;
    make_rich();
    for (int persistent = 0; persistent < 2; persistent++) {
        for (uint64_t at = 1;; at++) {
            qc_checkpoint *c = NULL;
            qc_error err = {0};
            qc_io_fail_at(QC_IO_READ, at, persistent, EIO);
            qc_status st = qc_checkpoint_open(&c, dir, &err);
            last = qc_io_count(QC_IO_READ);
            qc_io_fail_at(QC_IO_READ, 0, 0, 0);
            if (last < at) {
                assert_int_equal(st, QC_OK);
                qc_checkpoint_close(c);
                break;
            }
            assert_int_equal(st, QC_ERR_IO);
            assert_non_null(strstr(err.msg, dir));
            assert_null(c);
        }
    }
    print_message("%llu reads\n", (unsigned long long)last);
}

/* Every step out of checkpoint_internal.h again with arenas that are nearly full, so that each of
 * its allocations in turn is the one that needs a new block. */
static qc_status run_parts(size_t room, uint64_t fail_at)
{
    static const char text[] = GOOD_INDEX;
    qc_checkpoint c;
    qc_checkpoint_index index;
    qc_tree_file *tree = NULL;
    size_t tree_count = 0;
    int has_index = 0;
    void *p = NULL;
    memset(&c, 0, sizeof c);
    qc_arena_init(&c.arena);
    c.path = dir;
    assert_int_equal(qc_arena_alloc(&c.arena, &p, 1, 1, NULL), QC_OK);
    SCOPED(qc_arena) tree_arena = {0};
    assert_int_equal(qc_dir_tree(&tree_arena, dir, 100, &tree, &tree_count, NULL), QC_OK);
    c.arena.used_bytes = c.arena.head_bytes - room;
    qc_alloc_fail_at(fail_at, 0);
    qc_status st = qc_checkpoint_index_parse(&index, &c.arena, text, sizeof text - 1, NULL);
    if (st == QC_OK)
        st = qc_checkpoint_read_config(&c, tree, tree_count, NULL);
    if (st == QC_OK)
        st = qc_checkpoint_locate(&c, tree, tree_count, NULL, &c.arena, &index, &has_index, NULL);
    if (st == QC_OK)
        st = qc_checkpoint_find_side(&c, tree, tree_count, NULL);
    qc_alloc_fail_at(0, 0);
    qc_json_destroy(c.config);
    free(c.config_text);
    qc_arena_deinit(&c.arena);
    return st;
}

TEST(survives_full_arenas)
{
    make_rich();
    for (int index = 0; index < 2; index++) {
        if (index == 1) { /* the second time without an index */
            char path[FX_PATH_BYTES];
            fx_join(path, dir, INDEX_NAME);
            assert_int_equal(unlink(path), 0);
            for (int i = 0; i < 2; i++) {
                char name[64];
                (void)snprintf(name, sizeof name, "m-0000%d-of-00002.safetensors.zst", i);
                fx_join(path, dir, name);
                assert_int_equal(unlink(path), 0);
            }
            fx_join(path, dir, "stale.safetensors");
            assert_int_equal(unlink(path), 0);
        }
        for (size_t room = 0; room < 1600; room += 16) {
            for (uint64_t at = 1; at < 60; at++) {
                qc_status st = run_parts(room, at);
                assert_true(st == QC_OK || st == QC_ERR_NOMEM);
            }
        }
    }
}

/* More shards than the soft limit of handles allows. */
TEST(raises_the_limit_of_handles)
{
    enum { SHARDS = 300 };
    struct rlimit before;
    qc_strbuf index;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    if (before.rlim_max < SHARDS + 50)
        skip();
    fresh();
    qc_strbuf_init(&index, 100000);
    for (int i = 0; i < SHARDS; i++) {
        char name[64];
        char tensor[16];
        (void)snprintf(name, sizeof name, "model-%06d-of-000007.safetensors", i);
        (void)snprintf(tensor, sizeof tensor, "t%d", i);
        fx_put_tensors(dir, name, tensor, 4);
        assert_int_equal(qc_strbuf_addf(&index, NULL, "%s\"%s\":\"%s\"",
                                        i ? "," : "{\"weight_map\":{", tensor, name),
                         QC_OK);
    }
    assert_int_equal(qc_strbuf_adds(&index, "}}", NULL), QC_OK);
    fx_puts(dir, INDEX_NAME, index.data);
    qc_strbuf_deinit(&index);
    struct rlimit tight = {256, before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &tight), 0);
    qc_checkpoint *c = open_dir();
    assert_true(c->file_count == SHARDS && c->tensor_count == SHARDS);
    check_tensor(c, "t299", "model-000299-of-000007.safetensors");
    qc_checkpoint_close(c);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST_GROUP(make_root, NULL)
