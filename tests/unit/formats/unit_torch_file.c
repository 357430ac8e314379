/* formats/torch_file.h over tests/data/torch: every file against its safetensors twin, every
 * refusal in its words, and what damage does. */
#include "formats/torch_file.h"

#include "base/alloc.h"
#include "formats/checkpoint.h"
#include "formats/torch_pickle.h"
#include "tests/fixtures/fixture_files.h"
#include "tests/fixtures/sanitized.h"

#include <errno.h>

#define COUNT(a) (sizeof(a) / sizeof *(a))

static fx_dir root;

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

static const char *const accepted[] = {
    "dtypes",
    "dtypes_legacy",
    "new_dtypes",
    "new_dtypes_legacy",
    "module",
    "module_legacy",
    "module_protocol4",
    "module_protocol5",
    "module_no_crc",
    "module_legacy_protocol4",
    "parameters",
    "parameter_with_state",
    "shapes",
    "loose_strides",
    "views",
    "views_legacy",
    "tied",
    "tied_legacy",
    "same_tensor",
    "wrapped",
    "wrapped_model",
    "wrapped_legacy",
    "entries_beside",
    "empty",
    "empty_legacy",
    "many",
};

static void data_path(char out[FX_PATH_BYTES], const char *name, const char *suffix)
{
    int n = snprintf(out, FX_PATH_BYTES, "%s/torch/%s%s", QC_TEST_DATA, name, suffix);
    assert_true(n > 0 && n < FX_PATH_BYTES);
}

static const qc_torch_tensor *find(const qc_torch_file *f, const char *name)
{
    for (size_t i = 0; i < f->tensor_count; i++) {
        if (strcmp(f->tensors[i].name, name) == 0)
            return &f->tensors[i];
    }
    fail_msg("no tensor '%s'", name);
    return NULL;
}

static void equals_its_twin(void **state)
{
    (void)state;
    for (size_t k = 0; k < COUNT(accepted); k++) {
        char path[FX_PATH_BYTES];
        qc_torch_file f;
        qc_st_file twin;
        qc_error err = {0};
        uint64_t bytes = 0;
        data_path(path, accepted[k], ".bin");
        if (qc_torch_file_open(&f, path, &err) != QC_OK)
            fail_msg("%s", err.msg);
        assert_int_equal(f.legacy,
                         strstr(accepted[k], "legacy") || strcmp(accepted[k], "many") == 0);
        data_path(path, accepted[k], ".safetensors");
        assert_int_equal(qc_st_file_open(&twin, path, NULL), QC_OK);
        assert_true(f.tensor_count == twin.header.tensor_count);
        for (size_t i = 0; i < twin.header.tensor_count; i++) {
            const qc_st_tensor *b = &twin.header.tensors[i];
            const qc_torch_tensor *a = find(&f, b->name);
            unsigned char x[4096];
            unsigned char y[4096];
            assert_true(a->dtype == b->dtype && a->ndim == b->ndim);
            assert_memory_equal(a->dims, b->dims, sizeof a->dims);
            assert_true(a->bytes == b->end - b->begin && a->bytes <= sizeof x);
            bytes += a->bytes;
            if (a->bytes == 0)
                continue;
            assert_int_equal(qc_file_pread(&f.file, x, (size_t)a->bytes, a->begin, NULL), QC_OK);
            assert_int_equal(qc_st_file_read(&twin, NULL, b->begin, y, (size_t)a->bytes, NULL),
                             QC_OK);
            if (memcmp(x, y, (size_t)a->bytes) != 0)
                fail_msg("%s: values of '%s'", accepted[k], b->name);
        }
        for (size_t i = 1; i < f.tensor_count; i++)
            assert_true(strcmp(f.tensors[i - 1].name, f.tensors[i].name) < 0);
        assert_true(f.tensor_bytes == bytes);
        qc_st_file_close(&twin);
        qc_torch_file_close(&f);
    }
}

static void counts_what_is_no_tensor(void **state)
{
    static const struct {
        const char *name;
        size_t skipped;
    } cases[] = {{"module", 0}, {"wrapped", 13}, {"entries_beside", 13}, {"wrapped_legacy", 1}};
    (void)state;
    for (size_t k = 0; k < COUNT(cases); k++) {
        char path[FX_PATH_BYTES];
        qc_torch_file f;
        data_path(path, cases[k].name, ".bin");
        assert_int_equal(qc_torch_file_open(&f, path, NULL), QC_OK);
        assert_true(f.skipped == cases[k].skipped);
        if (f.skipped)
            assert_string_equal(f.first_skipped, "epoch");
        qc_torch_file_close(&f);
    }
}

#define NOT_NEEDED                                                                                 \
    "', which no checkpoint of plain tensors needs; it is refused, because qconv never runs code " \
    "from a checkpoint"

static const struct {
    const char *name;
    qc_status status;
    const char *message; /* behind the path */
} refused[] = {
    {"system", QC_ERR_UNSUPPORTED, "pickle byte 178: the pickle calls 'posix.system" NOT_NEEDED},
    {"system_legacy", QC_ERR_UNSUPPORTED,
     "state dict at byte 137: pickle byte 2: the pickle calls 'posix.system" NOT_NEEDED},
    {"system_protocol4", QC_ERR_UNSUPPORTED,
     "pickle byte 28: the pickle calls 'posix.system" NOT_NEEDED},
    {"eval", QC_ERR_UNSUPPORTED, "pickle byte 2: the pickle calls '__builtin__.eval" NOT_NEEDED},
    {"getattr", QC_ERR_UNSUPPORTED,
     "pickle byte 2: the pickle calls '__builtin__.getattr" NOT_NEEDED},
    {"popen", QC_ERR_UNSUPPORTED, "pickle byte 198: the pickle calls 'os.popen" NOT_NEEDED},
    {"namespace", QC_ERR_UNSUPPORTED,
     "pickle byte 181: the pickle calls 'argparse.Namespace" NOT_NEEDED},
    {"numpy_scalar", QC_ERR_UNSUPPORTED,
     "pickle byte 181: the pickle calls 'numpy._core.multiarray.scalar" NOT_NEEDED},
    {"a_set", QC_ERR_UNSUPPORTED, "pickle byte 182: the pickle calls '__builtin__.set" NOT_NEEDED},
    {"whole_module", QC_ERR_UNSUPPORTED,
     "pickle byte 2: the pickle calls 'torch.nn.modules.linear.Linear" NOT_NEEDED},
    {"sparse", QC_ERR_UNSUPPORTED,
     "pickle byte 18: the pickle calls 'torch._utils._rebuild_sparse_tensor" NOT_NEEDED},
    {"meta", QC_ERR_UNSUPPORTED,
     "pickle byte 18: the pickle calls "
     "'torch._utils._rebuild_meta_tensor_no_storage" NOT_NEEDED},
    {"complex128", QC_ERR_UNSUPPORTED,
     "pickle byte 69: the pickle calls 'torch.ComplexDoubleStorage" NOT_NEEDED},
    {"conjugate", QC_ERR_UNSUPPORTED,
     "pickle byte 185: a tensor has metadata (is it a conjugate or negative view?)"},
    {"nine_dims", QC_ERR_UNSUPPORTED,
     "pickle byte 196: a tensor has 9 dimensions; at most 8 are read"},
    {"transposed", QC_ERR_UNSUPPORTED,
     "tensor 'weight': shape [3, 2] with strides [1, 3] is not contiguous; save it with "
     ".contiguous()"},
    {"transposed_legacy", QC_ERR_UNSUPPORTED,
     "tensor 'weight': shape [3, 2] with strides [1, 3] is not contiguous; save it with "
     ".contiguous()"},
    {"expanded", QC_ERR_UNSUPPORTED,
     "tensor 'weight': shape [4, 3] with strides [0, 1] is not contiguous; save it with "
     ".contiguous()"},
    {"every_other", QC_ERR_UNSUPPORTED,
     "tensor 'weight': shape [4] with strides [2] is not contiguous; save it with .contiguous()"},
    {"one_tensor", QC_ERR_UNSUPPORTED, "the file holds a single tensor; expected a state dict"},
    {"a_list", QC_ERR_UNSUPPORTED,
     "the file holds something that is not a dict; expected a state dict"},
    {"number_as_name", QC_ERR_UNSUPPORTED, "the name of a tensor is not a string"},
    {"deep", QC_ERR_UNSUPPORTED,
     "none of its 1 tensors is an entry of the dict itself, or of 'state_dict' or 'model' in it; "
     "save the model's state_dict() alone"},
    {"two_models", QC_ERR_UNSUPPORTED,
     "tensors are in 'state_dict' and in 'model'; save the model's state_dict() alone"},
    {"training", QC_ERR_UNSUPPORTED,
     "2 of its 4 tensors are not entries of the state dict (an optimizer's state?); save the "
     "model's state_dict() alone"},
    {"compressed", QC_ERR_UNSUPPORTED,
     "zip entry 'module/data.pkl' is compressed (method 8), but torch.save stores entries as they "
     "are"},
    {"big_endian", QC_ERR_UNSUPPORTED,
     "the tensors are not in little-endian byte order; save them on a little-endian machine"},
    {"script", QC_ERR_UNSUPPORTED,
     "the file is a TorchScript program; save the model's state_dict() instead"},
    {"no_pickle", QC_ERR_UNSUPPORTED,
     "the zip archive has 12 entries and no data.pkl, so torch.save did not write it"},
    {"two_pickles", QC_ERR_INPUT,
     "the zip archive has two pickles, 'b/data.pkl' and 'module/data.pkl'"},
    {"storage_missing", QC_ERR_INPUT,
     "the zip archive has no entry 'module/data/1', which the pickle refers to"},
    {"storage_short", QC_ERR_INPUT,
     "zip entry 'module/data/1' has 95 bytes, but the pickle says 96"},
    {"text_behind", QC_ERR_INPUT,
     "'module/data.pkl' has 766 bytes, but its pickle ends at byte 764"},
    {"plain_pickle", QC_ERR_UNSUPPORTED,
     "the file is a pickle, but does not begin with the magic number of torch.save"},
    {"tar", QC_ERR_UNSUPPORTED,
     "the file is a tar archive, as torch wrote them before 0.1.10; load it and save it with a "
     "newer torch"},
};

static void expect_failure(const char *path, qc_status status, const char *message)
{
    char expected[FX_PATH_BYTES + 512];
    qc_torch_file f;
    qc_error err = {0};
    (void)snprintf(expected, sizeof expected, "%s: %s", path, message);
    qc_status st = qc_torch_file_open(&f, path, &err);
    if (st != status || strcmp(err.msg, expected) != 0)
        fail_msg("%s '%s', expected %s '%s'", qc_status_name(st), err.msg, qc_status_name(status),
                 expected);
    assert_true(!f.tensors && !f.arena.head && f.file.fd == -1);
}

static void refuses_by_name(void **state)
{
    (void)state;
    for (size_t k = 0; k < COUNT(refused); k++) {
        char name[64];
        char path[FX_PATH_BYTES];
        (void)snprintf(name, sizeof name, "refused/%s", refused[k].name);
        data_path(path, name, ".bin");
        expect_failure(path, refused[k].status, refused[k].message);
    }
}

static void knows_what_is_no_checkpoint(void **state)
{
    static const struct {
        const char *bytes;
        const char *message;
    } cases[] = {
        {"", "the file is not a PyTorch checkpoint, but neither a zip archive nor a pickle"},
        {"x", "the file is not a PyTorch checkpoint, but neither a zip archive nor a pickle"},
        {"version https://git-lfs.github.com/spec/v1\n",
         "the file is a git-lfs pointer, not the file itself (run 'git lfs pull') and not a "
         "PyTorch "
         "checkpoint"},
        {"<!doctype html>",
         "the file is an HTML page (a failed download?) and not a PyTorch checkpoint"},
        {"GGUF....", "the file is a GGUF file and not a PyTorch checkpoint"},
    };
    char path[FX_PATH_BYTES];
    (void)state;
    fx_join(path, root.path, "x.bin");
    for (size_t k = 0; k < COUNT(cases); k++) {
        fx_puts(root.path, "x.bin", cases[k].bytes);
        expect_failure(path, QC_ERR_INPUT, cases[k].message);
    }
}

static void tells_by_the_first_bytes(void **state)
{
    static const struct {
        const char *head;
        size_t len;
        int is;
    } cases[] = {
        {"PK\3\4", 4, 1},          {"PK\3", 3, 0},
        {"PK\3\4\0\0\0\0", 8, 1},  {"PK\3\4\0\0\0\0x", 9, 1},
        {"PK\3\4\0\0\0\0{", 9, 0}, /* a safetensors header of 67,324,752 bytes */
        {"PK\5\6", 4, 0},          {"\x80\2cx", 4, 1},
        {"\x80\5cx", 4, 1},        {"\x80\1cx", 4, 0},
        {"\x80\6cx", 4, 0},        {"(dp0", 4, 0},
    };
    (void)state;
    for (size_t k = 0; k < COUNT(cases); k++) {
        if (qc_torch_file_is((const unsigned char *)cases[k].head, cases[k].len) != cases[k].is)
            fail_msg("case %zu", k);
    }
    qc_torch_file_close(NULL);
}

/* ---- streams put together here ---- */

#define MAGIC    "\x80\2\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
#define PROTOCOL "\x80\2M\xe9\3."
#define SYSTEM   "\x80\2}U\x0dlittle_endian\x88s."
/* One float tensor of elems elements in a storage of `in`. */
#define VIEW(name, key, in, offset, elems)                                                         \
    "U\1" name "ctorch._utils\n_rebuild_tensor_v2\n((U\7storagectorch\nFloatStorage\nU\1" key      \
    "U\3cpuK" in "NtQK" offset "K" elems "\x85K\1\x85\x89}tR"
/* The same with whole opcodes: offset in elements, shape and strides. */
#define VIEW_OF(name, elems, offset, shape, strides)                                               \
    "U\1" name "ctorch._utils\n_rebuild_tensor_v2\n((U\7storagectorch\nFloatStorage\nU\1"          \
    "0U\3cpu" elems "tQ" offset shape strides "\x89}tR"
#define LONG(little_endian) "\x8a\x08" little_endian
#define STATE(views)        "\x80\2}(" views "u."
#define KEYS(keys)          "\x80\2](" keys "e."
#define KEY(key)            "U\1" key
#define FOUR_FLOATS                                                                                \
    "\4\0\0\0\0\0\0\0"                                                                             \
    "0123456789abcdef"
#define HEAD    MAGIC PROTOCOL SYSTEM
#define ONE     HEAD STATE(VIEW("w", "0", "\4", "\0", "\4"))
#define P(text) text, sizeof(text) - 1

static const struct {
    const char *text;
    size_t len;
    qc_status status;
    const char *message; /* NULL: opens */
} streams[] = {
    {P(ONE KEYS(KEY("0")) FOUR_FLOATS), QC_OK, NULL},
    {P(HEAD STATE(VIEW("w", "0", "\4", "\2", "\2") VIEW("v", "0", "\4", "\3", "\1")) KEYS(KEY("0"))
           FOUR_FLOATS),
     QC_OK, NULL},
    {P(HEAD STATE(VIEW("w", "0", "\4", "\0", "\4") VIEW("v", "1", "\0", "\0", "\0"))
           KEYS(KEY("0") KEY("1")) FOUR_FLOATS "\0\0\0\0\0\0\0\0"),
     QC_OK, NULL},
    {P(HEAD STATE(VIEW("w", "0", "\4", "\1", "\4")) KEYS(KEY("0")) FOUR_FLOATS), QC_ERR_INPUT,
     "tensor 'w': its 16 bytes from element 1 on end behind its storage, which has 16 bytes"},
    {P(HEAD STATE(VIEW("w", "0", "\4", "\5", "\0")) KEYS(KEY("0")) FOUR_FLOATS), QC_OK, NULL},
    {P(ONE KEYS(KEY("0")) "\4\0\0\0\0\0\0\0"
                          "0123456789abcde"),
     QC_ERR_TRUNCATED, "storage '0' of 16 bytes at byte 149 is cut off: the file has 172 bytes"},
    {P(ONE KEYS(KEY("0")) "\4\0\0\0"), QC_ERR_TRUNCATED,
     "storage '0' of 16 bytes at byte 149 is cut off: the file has 153 bytes"},
    {P(ONE KEYS(KEY("0")) "\3\0\0\0\0\0\0\0"
                          "0123456789abcdef"),
     QC_ERR_INPUT, "storage '0' has 3 elements, but the pickle says 4"},
    {P(ONE KEYS(KEY("0")) FOUR_FLOATS "x"), QC_ERR_INPUT, "1 bytes are behind the last storage"},
    {P(ONE KEYS(KEY("0") KEY("0")) FOUR_FLOATS FOUR_FLOATS), QC_ERR_INPUT,
     "storage '0' is in the list of keys twice"},
    {P(ONE KEYS(KEY("1")) FOUR_FLOATS), QC_ERR_INPUT, "a key names no storage of the state dict"},
    {P(ONE KEYS("N") FOUR_FLOATS), QC_ERR_INPUT, "a key names no storage of the state dict"},
    {P(ONE "\x80\2]."), QC_ERR_INPUT, "1 of the 1 storages are not in the list of keys"},
    {P(ONE "\x80\2N."), QC_ERR_INPUT, "the keys of the storages are not a list"},
    {P(HEAD STATE(VIEW("w", "0", "\4", "\0", "\4") VIEW("v", "0", "\3", "\0", "\1")) KEYS(KEY("0"))
           FOUR_FLOATS),
     QC_ERR_INPUT, "storage '0' is described in two ways"},
    {P(ONE), QC_ERR_TRUNCATED, "keys at byte 140: pickle byte 0: expected 2 bytes, found 0"},
    {P(HEAD), QC_ERR_TRUNCATED, "state dict at byte 42: pickle byte 0: expected 2 bytes, found 0"},
    {P(MAGIC PROTOCOL), QC_ERR_TRUNCATED,
     "system at byte 21: pickle byte 0: expected 2 bytes, found 0"},
    {P(MAGIC PROTOCOL "\x80\2}U\x0dlittle_endian\x89s."), QC_ERR_UNSUPPORTED,
     "the tensors are not in little-endian byte order; save them on a little-endian machine"},
    {P(MAGIC PROTOCOL "\x80\2}."), QC_ERR_UNSUPPORTED,
     "the tensors are not in little-endian byte order; save them on a little-endian machine"},
    {P(MAGIC "\x80\2M\xe8\3."), QC_ERR_UNSUPPORTED, "the protocol of the stream is not 1001"},
    {P(MAGIC "\x80\2N."), QC_ERR_UNSUPPORTED, "the protocol of the stream is not 1001"},
    {P(MAGIC PROTOCOL "\x80\2}U\x0dlittle_endianK\1s."), QC_ERR_UNSUPPORTED,
     "the tensors are not in little-endian byte order; save them on a little-endian machine"},
    /* Sizes that overflow 64 bits, one after the other. */
    {P(HEAD STATE(VIEW_OF("w", "K\4", "K\0",
                          LONG("\0\0\0\0\0\0\0\x40") LONG("\0\0\0\0\0\0\0\x40") "\x86",
                          "K\1K\1\x86")) KEYS(KEY("0")) FOUR_FLOATS),
     QC_ERR_INPUT, "tensor 'w': the number of elements overflows 64 bits"},
    {P(HEAD STATE(VIEW_OF("w", "K\4", "K\0", LONG("\0\0\0\0\0\0\0\x40") "\x85", "K\1\x85"))
           KEYS(KEY("0")) FOUR_FLOATS),
     QC_ERR_INPUT, "tensor 'w': the number of bits overflows 64 bits"},
    {P(HEAD STATE(VIEW_OF("w", "K\4", LONG("\0\0\0\0\0\0\0\x40"), "K\4\x85", "K\1\x85"))
           KEYS(KEY("0")) FOUR_FLOATS),
     QC_ERR_INPUT,
     "tensor 'w': its 16 bytes from element 4611686018427387904 on end behind its storage, which "
     "has 16 bytes"},
    {P(HEAD STATE(VIEW_OF("w", "K\4", LONG("\xff\xff\xff\xff\xff\xff\xff\x3f"), "K\4\x85",
                          "K\1\x85")) KEYS(KEY("0")) FOUR_FLOATS),
     QC_ERR_INPUT,
     "tensor 'w': its 16 bytes from element 4611686018427387903 on end behind its storage, which "
     "has 16 bytes"},
    {P(HEAD STATE(VIEW_OF("w", LONG("\0\0\0\0\0\0\0\x40"), "K\0", "K\4\x85", "K\1\x85"))
           KEYS(KEY("0")) FOUR_FLOATS),
     QC_ERR_INPUT, "the number of bits overflows 64 bits"},
    {P("\x80\2K\1."), QC_ERR_UNSUPPORTED,
     "the file is a pickle, but does not begin with the magic number of torch.save"},
};

static void reads_streams(void **state)
{
    char path[FX_PATH_BYTES];
    (void)state;
    fx_join(path, root.path, "s.bin");
    for (size_t k = 0; k < COUNT(streams); k++) {
        qc_torch_file f;
        qc_error err = {0};
        fx_put(root.path, "s.bin", streams[k].text, streams[k].len);
        if (streams[k].message) {
            expect_failure(path, streams[k].status, streams[k].message);
            continue;
        }
        if (qc_torch_file_open(&f, path, &err) != QC_OK)
            fail_msg("stream %zu: %s", k, err.msg);
        assert_true(f.legacy && f.head_offset == 0 && f.head_bytes > 140);
        assert_non_null(find(&f, "w"));
        qc_torch_file_close(&f);
    }
}

/* The pickles are read over a window that grows; they are longer here than the first one. */
static void reads_long_streams(void **state)
{
    static const size_t lengths[] = {3u << 20, 5u << 20, 40u << 20};
    char path[FX_PATH_BYTES];
    (void)state;
    fx_join(path, root.path, "long.bin");
    for (size_t k = 0; k < COUNT(lengths); k++) {
        qc_strbuf text;
        qc_torch_file f;
        qc_error err = {0};
        unsigned char n[4];
        char *note = calloc(1, lengths[k]);
        assert_non_null(note);
        qc_store_le32(n, (uint32_t)lengths[k]);
        qc_strbuf_init(&text, 100u << 20);
        assert_int_equal(qc_strbuf_add(&text, P(HEAD "\x80\2}(U\4noteX"), NULL), QC_OK);
        assert_int_equal(qc_strbuf_add(&text, n, 4, NULL), QC_OK);
        assert_int_equal(qc_strbuf_add(&text, note, lengths[k], NULL), QC_OK);
        assert_int_equal(qc_strbuf_add(&text, P(VIEW("w", "0", "\4", "\0", "\4") "u."), NULL),
                         QC_OK);
        assert_int_equal(qc_strbuf_add(&text, P(KEYS(KEY("0")) FOUR_FLOATS), NULL), QC_OK);
        fx_put(root.path, "long.bin", text.data, text.len);
        qc_status st = qc_torch_file_open(&f, path, &err);
        assert_int_equal(st, lengths[k] > QC_PICKLE_MAX_BYTES ? QC_ERR_UNSUPPORTED : QC_OK);
        if (st == QC_OK)
            assert_true(f.head_bytes > lengths[k] && f.tensor_count == 1 && f.skipped == 1);
        qc_torch_file_close(&f);
        qc_strbuf_deinit(&text);
        free(note);
    }
}

/* ---- damage ---- */

static void slurp(const char *path, qc_strbuf *out)
{
    qc_strbuf_init(out, 1u << 20);
    assert_int_equal(qc_file_slurp(path, out, NULL), QC_OK);
}

/* What can be read out of a file that was accepted lies in it. */
static void check_places(const qc_torch_file *f)
{
    for (size_t i = 0; i < f->tensor_count; i++) {
        const qc_torch_tensor *t = &f->tensors[i];
        uint64_t bytes = 0;
        assert_int_equal(qc_shape_bytes(t->dims, t->ndim, t->dtype, &bytes, NULL), QC_OK);
        assert_true(bytes == t->bytes);
        assert_true(bytes == 0 || (t->begin <= f->file_bytes && bytes <= f->file_bytes - t->begin));
    }
}

static void survives_truncation(void **state)
{
    static const char *const names[] = {"module",       "module_legacy", "module_protocol5",
                                        "views_legacy", "wrapped",       "empty",
                                        "empty_legacy"};
    char path[FX_PATH_BYTES];
    (void)state;
    for (size_t k = 0; k < COUNT(names); k++) {
        qc_strbuf text;
        data_path(path, names[k], ".bin");
        slurp(path, &text);
        fx_join(path, root.path, "cut.bin");
        for (size_t n = 0; n <= text.len + 1; n++) {
            qc_torch_file f;
            qc_error err = {0};
            fx_put(root.path, "cut.bin", text.data, n);
            qc_status st = qc_torch_file_open(&f, path, &err);
            if ((st == QC_OK) != (n == text.len) || (n != text.len && qc_status_exit_code(st) != 3))
                fail_msg("%s cut to %zu of %zu: %s '%s'", names[k], n, text.len, qc_status_name(st),
                         err.msg);
            qc_torch_file_close(&f);
        }
        qc_strbuf_deinit(&text);
    }
}

/* Every byte, changed in several ways: refused with words, or something that lies in the file; and
 * with a CRC-32 over the pickle no change to it passes. */
static void survives_flips(void **state)
{
    static const char *const names[] = {"module", "module_no_crc", "module_legacy",
                                        "module_legacy_protocol4"};
    static const unsigned char masks[] = {0x01, 0x02, 0x04, 0x10, 0x80, 0xff};
    char path[FX_PATH_BYTES];
    (void)state;
    for (size_t k = 0; k < COUNT(names); k++) {
        qc_strbuf text;
        qc_torch_file f;
        data_path(path, names[k], ".bin");
        slurp(path, &text);
        assert_int_equal(qc_torch_file_open(&f, path, NULL), QC_OK);
        uint64_t begin = f.head_offset;
        uint64_t end = begin + f.head_bytes;
        qc_torch_file_close(&f);
        fx_join(path, root.path, "flip.bin");
        for (size_t i = 0; i < text.len * COUNT(masks); i += TEST_SANITIZED ? 5 : 1) {
            size_t at = i / COUNT(masks);
            qc_error err = {0};
            text.data[at] ^= (char)masks[i % COUNT(masks)];
            fx_put(root.path, "flip.bin", text.data, text.len);
            qc_status st = qc_torch_file_open(&f, path, &err);
            if (st != QC_OK && (qc_status_exit_code(st) != 3 || !err.msg[0]))
                fail_msg("%s, byte %zu: %s '%s'", names[k], at, qc_status_name(st), err.msg);
            if (st == QC_OK && k == 0 && at >= begin && at < end)
                fail_msg("byte %zu of the pickle was changed and nothing noticed", at);
            if (st == QC_OK)
                check_places(&f);
            qc_torch_file_close(&f);
            text.data[at] ^= (char)masks[i % COUNT(masks)];
        }
        qc_strbuf_deinit(&text);
    }
}

static void survives_faults(void **state)
{
    static const char *const names[] = {"module", "views_legacy", "wrapped"};
    (void)state;
    for (size_t k = 0; k < COUNT(names) * 4; k++) {
        int reads = (k & 1) != 0;
        int persistent = (k & 2) != 0;
        qc_status st = QC_ERR_INTERNAL;
        for (uint64_t n = 1; st != QC_OK; n++) {
            char path[FX_PATH_BYTES];
            qc_torch_file f;
            qc_error err = {0};
            data_path(path, names[k / 4], ".bin");
            if (reads)
                qc_io_fail_at(QC_IO_READ, n, persistent, EIO);
            else
                qc_alloc_fail_at(n, persistent);
            st = qc_torch_file_open(&f, path, &err);
            qc_alloc_fail_at(0, 0);
            qc_io_fail_at(QC_IO_READ, 0, 0, 0);
            if (st != QC_OK && (st != (reads ? QC_ERR_IO : QC_ERR_NOMEM) || !err.msg[0]))
                fail_msg("%s, fault %d of kind %d: %s '%s'", names[k / 4], (int)n, reads,
                         qc_status_name(st), err.msg);
            assert_true(n < 1000);
            qc_torch_file_close(&f);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_its_twin),          cmocka_unit_test(counts_what_is_no_tensor),
        cmocka_unit_test(refuses_by_name),          cmocka_unit_test(knows_what_is_no_checkpoint),
        cmocka_unit_test(tells_by_the_first_bytes), cmocka_unit_test(reads_streams),
        cmocka_unit_test(reads_long_streams),       cmocka_unit_test(survives_truncation),
        cmocka_unit_test(survives_flips),           cmocka_unit_test(survives_faults),
    };
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
