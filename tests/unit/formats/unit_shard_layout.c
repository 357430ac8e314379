/* formats/shard_layout.h */
#include "formats/safetensors_header.h"
#include "formats/shard_layout.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/layout_array.h"
#include "tests/fixtures/test.h"

#define MIB (1u << 20)

static qc_out_tensor tensor(const char *name, qc_dtype dtype, uint64_t dim, uint32_t group)
{
    return (qc_out_tensor){
        .st = {.name = name, .dtype = dtype, .ndim = 1, .dims = {dim}},
        .group = group,
        .align_bytes = 1,
    };
}

TEST(pieces)
{
    static const struct {
        uint64_t bytes, align, want;
    } cases[] = {
        {0, 64, 64},
        {1, 64, 1},
        {8 * MIB, 4096, 8 * MIB},
        {8 * MIB + 1, 1, 4 * MIB + 1},
        {8 * MIB + 1, 4096, 4 * MIB + 4096},
        {16 * MIB, 4096, 8 * MIB},
        {16 * MIB + 2, 2, 5592406},   /* a third */
        {16 * MIB, 5 * MIB, 5 * MIB}, /* rounding up would exceed 8 MiB */
        {17 * MIB, 3 * MIB, 6 * MIB},
        {100 * MIB, 9 * MIB, 9 * MIB}, /* a row by itself */
        {100 * MIB, 16 * MIB, 16 * MIB},
        {100 * MIB, 16 * MIB + 2, 100 * MIB / 13 / 4096 * 4096 + 4096}, /* given up */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(qc_layout_piece_bytes(cases[i].bytes, cases[i].align), cases[i].want);
}

TEST(one_shard_has_the_plain_name)
{
    qc_arena a;
    qc_layout l;
    qc_error err = {0};
    /* bytes: 100, 40, 16, 3; order in the file: F32, BF16 by name, U8 */
    qc_out_tensor t[] = {tensor("z", QC_DTYPE_U8, 100, 0), tensor("b", QC_DTYPE_BF16, 20, 1),
                         tensor("a", QC_DTYPE_BF16, 8, 2), tensor("s", QC_DTYPE_U8, 3, 2),
                         tensor("f", QC_DTYPE_F32, 1, 3)};
    static const char *const order[] = {"f", "a", "b", "s", "z"};
    static const uint64_t begins[] = {0, 4, 20, 60, 63};
    qc_arena_init(&a);
    assert_int_equal(layout_array(&l, &a, t, 5, 1000, &err), QC_OK);
    assert_int_equal(l.count, 1);
    assert_string_equal(l.shards[0].name, "model.safetensors");
    assert_int_equal(l.shards[0].count, 5);
    assert_int_equal(l.shards[0].data_bytes, 163);
    for (size_t i = 0; i < 5; i++) {
        const qc_out_tensor *o = &t[l.shards[0].order[i]];
        assert_string_equal(o->st.name, order[i]);
        assert_int_equal(o->st.begin, begins[i]);
        assert_int_equal(o->piece_bytes, o->st.end - o->st.begin);
    }
    /* The header is that of the reference writer and is read back as it was laid out. */
    static const char want[] = "{\"__metadata__\":{\"format\":\"pt\"},"
                               "\"f\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                               "\"a\":{\"dtype\":\"BF16\",\"shape\":[8],\"data_offsets\":[4,20]},";
    SCOPED(qc_strbuf) text = {.max = 1000};
    assert_int_equal(qc_layout_header(&text, &l, 0, array_tensors(t, 5), &err), QC_OK);
    assert_int_equal(text.len, l.shards[0].header_bytes);
    assert_memory_equal(text.data + 8, want, sizeof want - 1);
    SCOPED(qc_st_header) h;
    assert_int_equal(l.shards[0].header_bytes % 8, 0);
    assert_int_equal(qc_st_header_parse(&h, text.data + 8, text.len - 8, 163, &err), QC_OK);
    assert_int_equal(h.tensor_count, 5);
    qc_arena_deinit(&a);
}

/* One shard would hold all of it. */
TEST(devices_out_of_order_are_refused)
{
    qc_layout l;
    qc_error err = {0};
    SCOPED(qc_arena) a = {0};
    qc_out_tensor t[] = {tensor("a", QC_DTYPE_U8, 60, 0), tensor("b", QC_DTYPE_U8, 20, 1),
                         tensor("f", QC_DTYPE_U8, 1, 2)};
    t[1].device = 3;
    t[2].device = 2;
    assert_int_equal(layout_array(&l, &a, t, 3, 100, &err), QC_ERR_INTERNAL);
    assert_non_null(strstr(err.msg, "'f' comes after those of a later device"));
    t[2].device = 5;
    t[2].group = 1;
    assert_int_equal(layout_array(&l, &a, t, 3, 100, &err), QC_ERR_INTERNAL);
    assert_non_null(strstr(err.msg, "'f' is not on the device of its group"));
}

TEST(no_tensors_make_one_empty_file)
{
    qc_layout l;
    SCOPED(qc_arena) a = {0};
    assert_int_equal(layout_array(&l, &a, NULL, 0, 100, NULL), QC_OK);
    assert_int_equal(l.count, 1);
    assert_string_equal(l.shards[0].name, "model.safetensors");
    assert_int_equal(l.shards[0].count, 0);
    assert_int_equal(l.shards[0].data_bytes, 0);
    SCOPED(qc_strbuf) text = {.max = 1000};
    assert_int_equal(qc_layout_header(&text, &l, 0, array_tensors(NULL, 0), NULL), QC_OK);
    assert_int_equal(text.len, l.shards[0].header_bytes);
    assert_memory_equal(text.data + 8, "{\"__metadata__\":{\"format\":\"pt\"}}", 33);
}

TEST(wrong_tensors_are_refused)
{
    qc_layout l;
    qc_error err = {0};
    SCOPED(qc_arena) a = {0};
    qc_out_tensor twice[] = {tensor("x", QC_DTYPE_U8, 1, 0), tensor("y", QC_DTYPE_U8, 1, 1),
                             tensor("x", QC_DTYPE_F32, 1, 2)};
    assert_int_equal(layout_array(&l, &a, twice, 3, 1, &err), QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "'x'"));
    qc_out_tensor huge[] = {tensor("x", QC_DTYPE_U8, UINT64_MAX / 8, 0),
                            tensor("y", QC_DTYPE_U64, UINT64_MAX / 64, 0)};
    huge[0].st.ndim = huge[1].st.ndim = 2;
    huge[0].st.dims[1] = huge[1].st.dims[1] = 2;
    assert_int_equal(layout_array(&l, &a, huge, 2, UINT64_MAX, &err), QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "'x'"));
    qc_out_tensor unaligned = tensor("x", QC_DTYPE_U8, 1, 0);
    unaligned.align_bytes = 0;
    assert_int_equal(layout_array(&l, &a, &unaligned, 1, 1, &err), QC_ERR_INTERNAL);
    qc_out_tensor half = tensor("x", QC_DTYPE_F4, 3, 0);
    assert_int_equal(layout_array(&l, &a, &half, 1, 1, &err), QC_ERR_INPUT);
}

TEST(sums_that_overflow_are_refused)
{
    static const char names[10][2] = {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"};
    qc_layout l;
    qc_error err = {0};
    qc_out_tensor t[10];
    SCOPED(qc_arena) a = {0};
    for (uint32_t one_group = 0; one_group < 2; one_group++) {
        for (uint32_t i = 0; i < 10; i++) /* 2^61 - 1 bytes each: nine are too many */
            t[i] = tensor(names[i], QC_DTYPE_U8, UINT64_MAX / 8, one_group ? 0 : i);
        assert_int_equal(layout_array(&l, &a, t, 10, UINT64_MAX, &err), QC_ERR_INPUT);
        assert_non_null(strstr(err.msg, "overflow"));
    }
}

TEST(given_pieces_are_kept)
{
    qc_layout l;
    qc_out_tensor t = tensor("x", QC_DTYPE_U8, 1000, 0);
    t.align_bytes = 10;
    t.piece_bytes = 100;
    SCOPED(qc_arena) a = {0};
    assert_int_equal(layout_array(&l, &a, &t, 1, 1, NULL), QC_OK);
    assert_int_equal(t.piece_bytes, 100);
}

/* Names of two parts are those that their texts would be: in order, in headers, in messages. */
TEST(names_may_come_in_two_parts)
{
    static const char *const whole[] = {"m.weight", "m.weight.absmax", "m.SCB", "m.weightb", "m"};
    static const uint32_t sorted[] = {4, 2, 0, 1, 3};
    qc_out_tensor t[5], plain[5];
    uint32_t order[5];
    qc_layout l, want;
    SCOPED(qc_strbuf) one = {.max = 1000};
    SCOPED(qc_strbuf) two = {.max = 1000};
    SCOPED(qc_arena) a = {0};
    for (uint32_t i = 0; i < 5; i++) {
        plain[i] = tensor(whole[i], QC_DTYPE_U8, 3 + i, i);
        t[i] = tensor("m.weight", QC_DTYPE_U8, 3 + i, i);
    }
    t[1].suffix = ".absmax";
    t[2].suffix = "SCB";
    t[3].suffix = "b";
    t[4].suffix = "";
    for (uint32_t i = 0; i < 5; i++)
        t[i].stem_bytes = i == 2 ? 2 : i == 4 ? 1 : 8;
    assert_int_equal(layout_array(&want, &a, plain, 5, 100, NULL), QC_OK);
    assert_int_equal(layout_array(&l, &a, t, 5, 100, NULL), QC_OK);
    assert_int_equal(l.shards[0].header_bytes, want.shards[0].header_bytes);
    assert_int_equal(qc_layout_header(&one, &l, 0, array_tensors(t, 5), NULL), QC_OK);
    assert_int_equal(qc_layout_header(&two, &want, 0, array_tensors(plain, 5), NULL), QC_OK);
    assert_int_equal(one.len, two.len);
    assert_memory_equal(one.data + 8, two.data + 8, one.len - 8);
    qc_out_tensors_by_name(array_tensors(t, 5), order);
    assert_memory_equal(order, sorted, sizeof sorted);
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(qc_out_tensor_name(&one, &t[i], NULL), QC_OK);
        assert_string_equal(one.data, whole[i]);
    }
    t[3].suffix = "";
    qc_error err = {0};
    assert_int_equal(layout_array(&l, &a, t, 5, 100, &err), QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "'m.weight'"));
}

TEST(out_of_memory_is_said)
{
    EACH_ALLOCATION_FAILS (fault, 0) {
        SCOPED(qc_arena) a = {0};
        qc_layout l;
        qc_out_tensor t[] = {tensor("a", QC_DTYPE_U8, 60, 0), tensor("b", QC_DTYPE_U8, 60, 1)};
        fault.st = layout_array(&l, &a, t, 2, 100, NULL);
    }
}
