/* formats/bnb_state.h */
#include "formats/bnb_state.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/test.h"

static qc_bnb_state nested_state(double offset)
{
    return (qc_bnb_state){.quant_type = "nf4",
                          .block_elems = 64,
                          .source_dtype = QC_DTYPE_BF16,
                          .ndim = 2,
                          .dims = {4096, 11008},
                          .nested = 1,
                          .nested_block_elems = 256,
                          .nested_offset = offset};
}

TEST(is_what_json_dumps_writes_and_spaces)
{
    /* tests/golden/gen_py_repr.py */
    FILE *f = fopen(QC_TEST_GOLDEN "/quant_state.txt", "r");
    char line[1024];
    int lines = 0;
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        qc_bnb_state s;
        qc_error err = {0};
        size_t len = strlen(line) - 1;
        assert_int_equal(qc_bnb_state_parse(&s, line, len + 1, &err), QC_OK);
        size_t bytes = qc_bnb_state_bytes(&s);
        assert_true(bytes >= len && bytes < len + 24);
        assert_true(s.nested || bytes == len);
        char *text = malloc(bytes);
        assert_non_null(text);
        assert_int_equal(qc_bnb_state_write(&s, text, &err), QC_OK);
        assert_memory_equal(text, line, len);
        for (size_t i = len; i < bytes; i++)
            assert_int_equal(text[i], ' ');
        qc_bnb_state back;
        assert_int_equal(qc_bnb_state_parse(&back, text, bytes, &err), QC_OK);
        assert_memory_equal(&back, &s, sizeof s);
        free(text);
        lines++;
    }
    (void)fclose(f);
    assert_int_equal(lines, 94);
}

TEST(the_size_does_not_depend_on_the_offset)
{
    static const double offsets[] = {
        0, 0.5, -1e-38, 3.4028234663852886e38, 0.10000000149011612, -1.401298464324817e-45};
    qc_bnb_state first = nested_state(0);
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        qc_bnb_state s = nested_state((double)(float)offsets[i]);
        char text[512];
        assert_int_equal(qc_bnb_state_bytes(&s), qc_bnb_state_bytes(&first));
        assert_int_equal(qc_bnb_state_write(&s, text, NULL), QC_OK);
    }
}

TEST(any_order_and_white_space_is_read)
{
    static const char text[] =
        "\n{ \"nested_offset\":0.25,\"shape\" :[ 3,\t5 ] , \"dtype\":\"float16\",\r\n"
        "\"nested_dtype\":\"float32\",\"nested_blocksize\":256,\"blocksize\":128,"
        "\"quant_type\":\"fp4\"}   ";
    qc_bnb_state s;
    assert_int_equal(qc_bnb_state_parse(&s, text, sizeof text - 1, NULL), QC_OK);
    assert_string_equal(s.quant_type, "fp4");
    assert_int_equal(s.block_elems, 128);
    assert_int_equal(s.source_dtype, QC_DTYPE_F16);
    assert_int_equal(s.ndim, 2);
    assert_int_equal(s.dims[0], 3);
    assert_int_equal(s.dims[1], 5);
    assert_true(s.nested && s.nested_block_elems == 256);
    assert_true(s.nested_offset == 0.25);
}

TEST(an_offset_is_made_a_float)
{
    qc_bnb_state s;
    static const char text[] =
        "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"float32\","
        " \"shape\": [1], \"nested_blocksize\": 256, \"nested_dtype\":"
        " \"float32\", \"nested_offset\": 0.1}";
    assert_int_equal(qc_bnb_state_parse(&s, text, sizeof text - 1, NULL), QC_OK);
    assert_true(s.nested_offset == 0.10000000149011612);
}

#define PLAIN  "\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"bfloat16\""
#define NESTED "\"nested_blocksize\": 256, \"nested_dtype\": \"float32\""

TEST(wrong_texts_are_refused_in_words)
{
    static const struct {
        const char *text;
        qc_status st;
        const char *says;
    } cases[] = {
        {"", QC_ERR_INPUT, "quant_state"},
        {"[]", QC_ERR_INPUT, "expected an object"},
        {"{" PLAIN ", \"shape\": [1]} x", QC_ERR_INPUT, "quant_state"},
        {"{" PLAIN "}", QC_ERR_INPUT, "'shape' is missing"},
        {"{}", QC_ERR_INPUT, "'quant_type' is missing"},
        {"{" PLAIN ", \"shape\": null}", QC_ERR_UNSUPPORTED, "shape: is null"},
        {"{" PLAIN ", \"shape\": 3}", QC_ERR_INPUT, "expected a list"},
        {"{" PLAIN ", \"shape\": []}", QC_ERR_INPUT, "1 to 8 dimensions"},
        {"{" PLAIN ", \"shape\": [1,1,1,1,1,1,1,1,1]}", QC_ERR_INPUT,
         "shape: expected at most 8 dimensions, found more"},
        {"{" PLAIN ", \"shape\": [-1]}", QC_ERR_INPUT, "shape"},
        {"{" PLAIN ", \"shape\": [1.5]}", QC_ERR_INPUT, "shape"},
        {"{" PLAIN ", \"shape\": [9007199254740991, 9007199254740991]}", QC_ERR_INPUT, "overflows"},
        {"{" PLAIN ", \"shape\": [1], \"colour\": 1}", QC_ERR_UNSUPPORTED, "'colour'"},
        {"{" PLAIN ", \"shape\": [1], " NESTED "}", QC_ERR_INPUT, "'nested_offset' is missing"},
        {"{" PLAIN ", \"shape\": [1], " NESTED ", \"nested_offset\": \"1\"}", QC_ERR_INPUT,
         "nested_offset"},
        {"{" PLAIN ", \"shape\": [1], " NESTED ", \"nested_offset\": 1e39}", QC_ERR_RANGE,
         "nested_offset: expected a number that fits a float, found inf"},
        {"{" PLAIN ", \"shape\": [1], \"nested_blocksize\": 100, \"nested_dtype\": \"float32\", "
         "\"nested_offset\": 1.0}",
         QC_ERR_UNSUPPORTED, "nested_blocksize"},
        {"{" PLAIN ", \"shape\": [1], \"nested_blocksize\": 256, \"nested_dtype\": \"float16\", "
         "\"nested_offset\": 1.0}",
         QC_ERR_UNSUPPORTED, "nested_dtype"},
        {"{\"quant_type\": \"nf4nf4nf4nf4nf4nf4\", \"blocksize\": 64, \"dtype\": \"float16\", "
         "\"shape\": [1]}",
         QC_ERR_UNSUPPORTED, "quant_type"},
        {"{\"quant_type\": 4, \"blocksize\": 64, \"dtype\": \"float16\", \"shape\": [1]}",
         QC_ERR_INPUT, "quant_type"},
        {"{\"quant_type\": \"nf4\", \"blocksize\": 96, \"dtype\": \"float16\", \"shape\": [1]}",
         QC_ERR_UNSUPPORTED, "blocksize"},
        {"{\"quant_type\": \"nf4\", \"blocksize\": 16, \"dtype\": \"float16\", \"shape\": [1]}",
         QC_ERR_UNSUPPORTED, "blocksize"},
        {"{\"quant_type\": \"nf4\", \"blocksize\": 8192, \"dtype\": \"float16\", \"shape\": [1]}",
         QC_ERR_UNSUPPORTED, "blocksize"},
        {"{\"quant_type\": \"nf4\", \"blocksize\": \"64\", \"dtype\": \"float16\", \"shape\": "
         "[1]}",
         QC_ERR_INPUT, "blocksize"},
        {"{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"uint8\", \"shape\": [1]}",
         QC_ERR_UNSUPPORTED, "floating"},
        {"{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"half\", \"shape\": [1]}",
         QC_ERR_UNSUPPORTED, "'half'"},
        {"{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": 16, \"shape\": [1]}",
         QC_ERR_INPUT, "dtype"},
        {"{" PLAIN ", \"shape\": [1], \"nested_blocksize\": 256, \"nested_dtype\": 1, "
         "\"nested_offset\": 1.0}",
         QC_ERR_INPUT, "nested_dtype"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qc_bnb_state s;
        qc_error err = {0};
        assert_int_equal(qc_bnb_state_parse(&s, cases[i].text, strlen(cases[i].text), &err),
                         cases[i].st);
        if (!strstr(err.msg, cases[i].says))
            fail_msg("'%s' is not in '%s'", cases[i].says, err.msg);
        assert_non_null(strstr(err.msg, "quant_state"));
    }
    static char long_text[65537];
    qc_bnb_state s;
    memset(long_text, ' ', sizeof long_text);
    assert_int_equal(qc_bnb_state_parse(&s, long_text, sizeof long_text, NULL), QC_ERR_INPUT);
}

TEST(wrong_states_are_not_written)
{
    char text[512];
    qc_bnb_state s = nested_state(0.1); /* no float */
    assert_int_equal(qc_bnb_state_write(&s, text, NULL), QC_ERR_RANGE);
    s = nested_state(0.5);
    s.source_dtype = QC_DTYPE_F8_E4M3;
    assert_true(qc_bnb_state_bytes(&s) > 0);
    assert_int_equal(qc_bnb_state_write(&s, text, NULL), QC_ERR_UNSUPPORTED);
    s = nested_state(0.5);
    s.ndim = 0;
    assert_int_equal(qc_bnb_state_write(&s, text, NULL), QC_ERR_INPUT);
    s.ndim = 9;
    assert_int_equal(qc_bnb_state_write(&s, text, NULL), QC_ERR_INPUT);
}

TEST(the_largest_fits)
{
    qc_bnb_state s = nested_state(-2.3509887016445750e-38);
    char text[1024];
    (void)snprintf(s.quant_type, sizeof s.quant_type, "int8");
    s.block_elems = 4096;
    s.nested_block_elems = 4096;
    s.ndim = QC_MAX_DIMS;
    for (unsigned i = 0; i < QC_MAX_DIMS; i++)
        s.dims[i] = i ? 0 : 9007199254740991u;
    assert_true(qc_bnb_state_bytes(&s) < sizeof text);
    assert_int_equal(qc_bnb_state_write(&s, text, NULL), QC_OK);
    qc_bnb_state back;
    assert_int_equal(qc_bnb_state_parse(&back, text, qc_bnb_state_bytes(&s), NULL), QC_OK);
    assert_memory_equal(&back, &s, sizeof s);
}

TEST(out_of_memory_is_said)
{
    qc_bnb_state s = nested_state(0.5);
    char text[512];
    assert_int_equal(qc_bnb_state_write(&s, text, NULL), QC_OK);
    EACH_ALLOCATION_FAILS (fault, 0) {
        qc_bnb_state back;
        fault.st = qc_bnb_state_parse(&back, text, qc_bnb_state_bytes(&s), NULL);
    }
}
