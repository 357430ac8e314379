/* Values of a checkpoint's tensors, worked out here from the bytes that the test writes; arguments
 * that are wrong; memory that runs out. tests/cli/test_values.py compares every form with what a
 * conversion writes. */
#include "convert/library/values.h"

#include "base/strbuf.h"
#include "quant/quant_ops.h"

#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/fixture_files.h"
#include "tests/fixtures/st_header.h"

#define NF4    "model.layers.0.mlp.down_proj.weight"
#define INT8   "model.layers.0.mlp.up_proj."
#define ROWS   6
#define COLS   96
#define SCALES (ROWS * COLS / 64)

static const char state_text[] =
    "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"bfloat16\", \"shape\": [6, 96], "
    "\"nested_blocksize\": 256, \"nested_dtype\": \"float32\", \"nested_offset\": 0.5}";

static unsigned char codes[ROWS * COLS / 2], scale_codes[SCALES];
static signed char bytes[ROWS * COLS];
static float code_map[16], nested_map[256], nested_scale = 0.25f, row_scales[ROWS];
static uint16_t norm[4] = {0x3f80, 0x4000, 0xbf80, 0x0000}; /* 1, 2, -1, 0 in BF16 */
static int64_t ids[3] = {7, -8, 9};

typedef struct {
    const char *name;
    qc_dtype dtype;
    unsigned ndim;
    uint64_t dims[2];
    const void *content;
} part;

static const part parts[] = {
    {"ids", QC_DTYPE_I64, 1, {3}, ids},
    {NF4, QC_DTYPE_U8, 2, {ROWS * COLS / 2, 1}, codes},
    {NF4 ".absmax", QC_DTYPE_U8, 1, {SCALES}, scale_codes},
    {NF4 ".nested_absmax", QC_DTYPE_F32, 1, {1}, &nested_scale},
    {NF4 ".nested_quant_map", QC_DTYPE_F32, 1, {256}, nested_map},
    {NF4 ".quant_map", QC_DTYPE_F32, 1, {16}, code_map},
    {NF4 ".quant_state.bitsandbytes__nf4", QC_DTYPE_U8, 1, {sizeof state_text - 1}, state_text},
    {INT8 "SCB", QC_DTYPE_F32, 1, {ROWS}, row_scales},
    {INT8 "weight", QC_DTYPE_I8, 2, {ROWS, COLS}, bytes},
    {"model.norm.weight", QC_DTYPE_BF16, 1, {4}, norm},
};
#define PARTS (sizeof parts / sizeof *parts)

static void write_model(const char *folder)
{
    qc_st_tensor t[PARTS];
    qc_strbuf out;
    uint64_t at = 0, size = 0;
    for (size_t i = 0; i < sizeof codes; i++)
        codes[i] = (unsigned char)(i * 37 + i / 5);
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (signed char)((int)(i * 29 % 255) - 127);
    for (size_t i = 0; i < SCALES; i++)
        scale_codes[i] = (unsigned char)(i * 51);
    for (size_t i = 0; i < 256; i++)
        nested_map[i] = (float)i / 256.0f - 0.5f;
    for (size_t i = 0; i < 16; i++)
        code_map[i] = (float)i / 8.0f - 1.0f;
    for (size_t i = 0; i < ROWS; i++)
        row_scales[i] = 0.3f + (float)i;
    memset(t, 0, sizeof t);
    for (size_t i = 0; i < PARTS; i++) {
        t[i] = (qc_st_tensor){.name = parts[i].name,
                              .dtype = parts[i].dtype,
                              .ndim = parts[i].ndim,
                              .dims = {parts[i].dims[0], parts[i].dims[1]},
                              .begin = at};
        assert_int_equal(qc_shape_bytes(t[i].dims, t[i].ndim, t[i].dtype, &size, NULL), QC_OK);
        t[i].end = at += size;
    }
    qc_strbuf_init(&out, 1 << 20);
    assert_int_equal(st_header_build(&out, t, PARTS, NULL, 0, NULL), QC_OK);
    for (size_t i = 0; i < PARTS; i++)
        assert_int_equal(
            qc_strbuf_add(&out, parts[i].content, (size_t)(t[i].end - t[i].begin), NULL), QC_OK);
    fx_put(folder, "model.safetensors", out.data, out.len);
    fx_puts(folder, "config.json", "{\"model_type\":\"llama\",\"torch_dtype\":\"bfloat16\"}");
    qc_strbuf_deinit(&out);
}

static float nf4_at(size_t i)
{
    const int code = i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4;
    return code_map[code] * (nested_map[scale_codes[i / 64]] * nested_scale + 0.5f);
}

static size_t number_of(const qc_values *v, const char *name)
{
    size_t index = SIZE_MAX;
    const qc_values_tensor *t = qc_values_find(v, name, &index);
    assert_non_null(t);
    assert_ptr_equal(t, qc_values_at(v, index));
    return index;
}

TEST(lists_and_reads)
{
    fx_dir dir;
    qc_values *v = NULL;
    qc_error err;
    float values[ROWS * COLS];
    fx_make_dir(&dir);
    write_model(dir.path);
    assert_int_equal(qc_values_open(&v, dir.path, NULL, &err), QC_OK);
    assert_int_equal(qc_values_count(v), 4);
    assert_null(qc_values_at(v, 4));
    assert_null(qc_values_find(v, NF4 ".absmax", NULL));
    const size_t nf4 = number_of(v, NF4), int8 = number_of(v, INT8 "weight");
    assert_int_equal(qc_values_at(v, nf4)->dtype, QC_DTYPE_BF16);
    assert_int_equal(qc_values_at(v, nf4)->ndim, 2);
    assert_int_equal(qc_values_at(v, nf4)->dims[1], COLS);
    assert_string_equal(qc_values_at(v, nf4)->stored_as, "nf4");
    /* Row 1 begins within a block. */
    for (uint64_t first = 0; first < ROWS; first++) {
        assert_int_equal(qc_values_read(v, nf4, first, ROWS - first, values, QC_DTYPE_F32, &err),
                         QC_OK);
        for (size_t i = first * COLS; i < ROWS * COLS; i++)
            assert_true(values[i - first * COLS] == nf4_at(i));
    }
    assert_int_equal(qc_values_read(v, int8, 2, 1, values, QC_DTYPE_F32, &err), QC_OK);
    for (size_t i = 0; i < COLS; i++)
        assert_true(values[i] == (float)bytes[2 * COLS + i] * row_scales[2] * (1.0f / 127.0f));
    assert_int_equal(
        qc_values_read(v, number_of(v, "model.norm.weight"), 1, 2, values, QC_DTYPE_F32, &err),
        QC_OK);
    assert_true(values[0] == 2.0f && values[1] == -1.0f);
    assert_int_equal(qc_values_read(v, number_of(v, "ids"), 1, 2, values, QC_DTYPE_I64, &err),
                     QC_OK);
    assert_memory_equal(values, ids + 1, 2 * sizeof *ids);
    qc_values_close(v);
}

TEST(wrong_arguments)
{
    fx_dir dir;
    qc_values *v = NULL;
    qc_error err;
    float value[2 * COLS];
    const char *const none[] = {NULL};
    const qc_values_options options = {.adapter_count = 1, .adapters = none};
    fx_make_dir(&dir);
    write_model(dir.path);
    assert_int_equal(qc_values_open(NULL, dir.path, NULL, &err), QC_ERR_USAGE);
    assert_int_equal(qc_values_open(&v, NULL, NULL, &err), QC_ERR_USAGE);
    assert_int_equal(qc_values_open(&v, dir.path, &options, &err), QC_ERR_USAGE);
    assert_null(v);
    assert_int_equal(qc_values_open(&v, dir.path, NULL, NULL), QC_OK);
    const size_t nf4 = number_of(v, NF4), integers = number_of(v, "ids");
    assert_int_equal(qc_values_read(NULL, 0, 0, 1, value, QC_DTYPE_F32, &err), QC_ERR_USAGE);
    assert_int_equal(qc_values_read(v, nf4, 0, 1, NULL, QC_DTYPE_F32, &err), QC_ERR_USAGE);
    assert_int_equal(qc_values_read(v, 4, 0, 1, value, QC_DTYPE_F32, &err), QC_ERR_USAGE);
    assert_int_equal(qc_values_read(v, nf4, 5, 2, value, QC_DTYPE_F32, &err), QC_ERR_USAGE);
    assert_int_equal(qc_values_read(v, nf4, UINT64_MAX, 2, value, QC_DTYPE_F32, &err),
                     QC_ERR_USAGE);
    assert_int_equal(qc_values_read(v, nf4, 0, 1, value, QC_DTYPE_F64, &err), QC_ERR_USAGE);
    assert_int_equal(qc_values_read(v, nf4, 0, 1, value, QC_DTYPE_COUNT, &err), QC_ERR_USAGE);
    assert_int_equal(qc_values_read(v, integers, 0, 1, value, QC_DTYPE_F32, &err), QC_ERR_USAGE);
    assert_int_equal(qc_values_count(NULL), 0);
    assert_null(qc_values_at(NULL, 0));
    assert_null(qc_values_find(v, NULL, NULL));
    qc_values_close(v);
    qc_values_close(NULL);
}

TEST(memory_runs_out)
{
    fx_dir dir;
    float values[ROWS * COLS];
    fx_make_dir(&dir);
    write_model(dir.path);
    EACH_ALLOCATION_FAILS (fault, 0) {
        qc_values *v = NULL;
        qc_error err;
        fault.st = qc_values_open(&v, dir.path, NULL, &err);
        for (size_t i = 0; i < qc_values_count(v) && fault.st == QC_OK; i++) {
            const qc_values_tensor *t = qc_values_at(v, i);
            fault.st = qc_values_read(v, i, 0, t->dims[0], values,
                                      t->dtype == QC_DTYPE_I64 ? t->dtype : QC_DTYPE_F32, &err);
        }
        qc_values_close(v);
    }
}
