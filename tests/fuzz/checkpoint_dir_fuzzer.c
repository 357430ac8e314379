/* Any files as a checkpoint's folder (see fuzz_files.h): refused in words, or a model whose tensors
 * lie in their files, are read whole and in pieces alike, and which inspect and convert can look
 * through: recipe, stored and coded weights, fused experts, names and shapes. As libqconv has it,
 * each tensor is read whole and its last row again. */
#include "base/alloc.h"
#include "convert/library/values.h"
#include "convert/model/coded_read.h"
#include "convert/model/expert_split.h"
#include "convert/model/recipe_stored.h"
#include "convert/model/stored_read.h"
#include "fuzz_check.h"
#include "fuzz_files.h"
#include "quant/quant_decode.h"

#include <string.h>

/* A frame of a compressed file is decoded whole where it is read in pieces (QC_FRAME_READ_MAX_BYTES
 * at most), and so is its header (QC_ST_MAX_HEADER_BYTES). */
const fuzz_limits fuzz_may_allocate = {400u << 20, 512};

#define READ_MOST    (1u << 20)
#define TENSORS_MOST 64u

static const char *const names[] = {
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.zst",
    "model-00001-of-00002.safetensors.zst",
    "model-00002-of-00002.safetensors.zst",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
};
#define NAME_COUNT (sizeof names / sizeof *names)

static int is_refusal(qc_status st, const qc_error *err)
{
    return qc_status_exit_code(st) == 3 && err->msg[0];
}

static void read_tensor(const qc_checkpoint *c, const qc_checkpoint_tensor *t, qc_st_cursor *cursor)
{
    qc_error err = {0};
    void *whole = NULL;
    if (t->bytes == 0 || t->bytes > READ_MOST)
        return;
    FUZZ_CHECK(qc_malloc(&whole, (size_t)t->bytes, NULL) == QC_OK);
    qc_status st = qc_checkpoint_read(c, cursor, t, 0, whole, (size_t)t->bytes, &err);
    FUZZ_CHECK(st == QC_OK || is_refusal(st, &err));
    if (st == QC_OK) {
        unsigned char last = 0;
        FUZZ_CHECK(qc_checkpoint_read(c, cursor, t, t->bytes - 1, &last, 1, NULL) == QC_OK);
        FUZZ_CHECK(last == ((unsigned char *)whole)[t->bytes - 1]);
    }
    unsigned char beyond[2];
    FUZZ_CHECK(qc_checkpoint_read(c, cursor, t, t->bytes - 1, beyond, 2, NULL) != QC_OK);
    qc_free(whole);
}

static void read_stored(const qc_checkpoint *c, const qc_stored_set *set, qc_st_cursor *cursor)
{
    qc_error err = {0};
    for (uint32_t i = 0; i < c->tensor_count && i < TENSORS_MOST; i++) {
        qc_stored_arrays a;
        if (!set->weights[i] || qc_stored_bytes(c, i, set->weights[i]) > READ_MOST)
            continue;
        memset(&a, 0, sizeof a);
        qc_status st = qc_stored_read(&a, c, i, set->weights[i], cursor, &err);
        FUZZ_CHECK(st == QC_OK || is_refusal(st, &err));
        qc_stored_deinit(&a);
    }
}

/* Reads coded weights whole, and their last weights again by themselves. */
static void read_coded(const qc_checkpoint *c, const qc_recipe *recipe, qc_st_cursor *cursor)
{
    const qc_quant_ops *ops = qc_quant_ops_for(QC_ISA_SCALAR);
    for (uint32_t i = 0; i < c->tensor_count && i < TENSORS_MOST; i++) {
        const qc_coded_weight *w = recipe->entries[i].coded;
        qc_coded_scratch scratch = {0};
        qc_error err = {0};
        uint64_t n = 0;
        float *values = NULL, last[QC_MXFP4_BLOCK];
        if (!w || qc_shape_elems(w->dims, w->ndim, &n, NULL) != QC_OK || n == 0 || n > READ_MOST)
            continue;
        uint64_t again = w->coding == QC_CODING_MXFP4 ? QC_MXFP4_BLOCK : 1;
        FUZZ_CHECK(qc_malloc(&values, (size_t)n * sizeof *values, NULL) == QC_OK);
        const qc_coded_source src = {c, cursor, cursor, ops, &c->tensors[i], w};
        qc_status st = qc_coded_read(&src, &scratch, 0, n, values, &err);
        FUZZ_CHECK(st == QC_OK || is_refusal(st, &err));
        if (st == QC_OK) {
            st = qc_coded_read(&src, &scratch, n - again, again, last, &err);
            FUZZ_CHECK(st == QC_OK);
            FUZZ_CHECK(memcmp(last, values + n - again, (size_t)again * sizeof *last) == 0);
        }
        qc_coded_scratch_deinit(&scratch);
        qc_free(values);
    }
}

static void look_through(qc_checkpoint *c, qc_st_cursor *cursor)
{
    qc_arena arena;
    qc_error err = {0};
    qc_recipe recipe;
    qc_stored_set set;
    qc_recipe_options o = {.to = QC_TO_NF4, .double_quant = 1};
    qc_arena_init(&arena);
    qc_status st = qc_stored_find(&set, &arena, c, &err);
    FUZZ_CHECK(st == QC_OK || is_refusal(st, &err));
    if (st == QC_OK)
        read_stored(c, &set, cursor);
    st = qc_experts_split(c, 0, &err);
    FUZZ_CHECK(st == QC_OK || is_refusal(st, &err));
    if (st == QC_OK) {
        st = qc_recipe_make(&recipe, &arena, c, &o, &err);
        FUZZ_CHECK(st == QC_OK || err.msg[0]);
        if (st == QC_OK)
            read_coded(c, &recipe, cursor);
    }
    qc_arena_deinit(&arena);
}

static void read_values(const char *folder, qc_values_experts experts)
{
    const qc_values_options options = {.experts = experts};
    qc_values *v = NULL;
    qc_error err = {0};
    qc_status st = qc_values_open(&v, folder, &options, &err);
    FUZZ_CHECK(st == QC_OK ? v != NULL : !v && err.msg[0]);
    for (size_t i = 0; i < qc_values_count(v) && i < TENSORS_MOST; i++) {
        const qc_values_tensor *t = qc_values_at(v, i);
        const qc_dtype dtype = qc_dtype_is_quantizable(t->dtype) ? QC_DTYPE_F32 : t->dtype;
        unsigned char *values = NULL;
        uint64_t bytes = 0;
        if (qc_shape_bytes(t->dims, t->ndim, dtype, &bytes, NULL) != QC_OK || bytes == 0 ||
            bytes > 2 * READ_MOST)
            continue;
        const uint64_t rows = t->ndim ? t->dims[0] : 1, row = bytes / rows;
        FUZZ_CHECK(qc_malloc(&values, (size_t)(bytes + row), NULL) == QC_OK);
        st = qc_values_read(v, i, 0, rows, values, dtype, &err);
        FUZZ_CHECK(st == QC_OK || is_refusal(st, &err));
        if (st == QC_OK) {
            FUZZ_CHECK(qc_values_read(v, i, rows - 1, 1, values + bytes, dtype, &err) == QC_OK);
            FUZZ_CHECK(memcmp(values + bytes, values + bytes - row, (size_t)row) == 0);
        }
        qc_free(values);
    }
    qc_values_close(v);
}

int fuzz_one(const uint8_t *data, size_t size)
{
    fuzz_part parts[FUZZ_MOST_PARTS];
    qc_checkpoint *c = NULL;
    qc_st_cursor *cursor = NULL;
    qc_error err = {0};
    fuzz_split(parts, data, size);
    const char *folder = fuzz_folder(names, parts, NAME_COUNT);
    qc_status st = qc_checkpoint_open(&c, folder, &err);
    FUZZ_CHECK(st == QC_OK ? c != NULL : !c && is_refusal(st, &err));
    if (c) {
        FUZZ_CHECK(qc_st_cursor_create(&cursor, NULL) == QC_OK);
        for (size_t i = 0; i < c->tensor_count; i++) {
            const qc_checkpoint_tensor *t = &c->tensors[i];
            FUZZ_CHECK(t->file < c->file_count && t->ndim <= QC_MAX_DIMS);
            FUZZ_CHECK(i == 0 || strcmp(t[-1].name, t->name) < 0);
            FUZZ_CHECK(qc_checkpoint_find(c, t->name) == t);
            if (i < TENSORS_MOST)
                read_tensor(c, t, cursor);
        }
        for (size_t i = 0; i < c->file_count; i++) {
            qc_digest d;
            st = qc_checkpoint_head_digest(c, i, &d, &err);
            FUZZ_CHECK(st == QC_OK || is_refusal(st, &err));
        }
        look_through(c, cursor);
        qc_st_cursor_destroy(cursor);
    }
    qc_checkpoint_close(c);
    read_values(folder, size % 2 ? QC_VALUES_STACKED : QC_VALUES_AS_FOUND);
    (void)fuzz_folder(names, (fuzz_part[FUZZ_MOST_PARTS]){{0}}, NAME_COUNT);
    return 0;
}
