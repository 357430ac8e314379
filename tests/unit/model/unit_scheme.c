/* The table of schemes: what the members of a row may say together, and the functions that read
 * rows. */
#include "convert/model/scheme.h"
#include "tests/fixtures/test.h"

TEST(every_row_makes_sense)
{
    for (unsigned s = 0; s < QC_SCHEME_COUNT; s++) {
        const qc_scheme_row *row = &qc_schemes[s];
        assert_non_null(row->name);
        assert_string_equal(qc_scheme_name((qc_scheme)s), row->name);
        assert_int_equal(qc_scheme_is_quantized((qc_scheme)s), row->bits != 0);
        assert_int_equal(row->form != NULL, row->bits != 0);
        const int awq = row->format == QC_FORMAT_AWQ;
        const int packed = awq || row->format == QC_FORMAT_COMPRESSED_TENSORS;
        assert_int_equal(row->quant_type != NULL, row->bits && !row->by_rows && !packed);
        assert_int_equal(row->state_suffix != NULL, row->quant_type != NULL);
        assert_true(row->role_tensors & 1u << QC_ROLE_TENSOR_MAIN);
        assert_int_equal(row->role_tensors >> QC_ROLE_TENSOR_STATE & 1, row->quant_type != NULL);
        if (!row->bits) {
            assert_int_equal(row->role_tensors, 1u << QC_ROLE_TENSOR_MAIN);
            assert_false(row->by_rows || row->default_block || packed);
            continue;
        }
        assert_int_equal(row->role_tensors >> QC_ROLE_TENSOR_SCB & 1, row->by_rows && !packed);
        assert_int_equal(row->role_tensors >> QC_ROLE_TENSOR_SCALE & 1, packed);
        assert_int_equal(row->role_tensors >> QC_ROLE_TENSOR_SHAPE & 1,
                         packed && !awq && row->code_dtype == QC_DTYPE_I32);
        assert_int_equal(row->role_tensors >> QC_ROLE_TENSOR_ZEROS & 1, awq);
        assert_int_equal(row->form->integer, packed);
        assert_int_equal(row->activation_bits != 0, packed);
        assert_true(row->bits >= 2 && row->bits <= 8);
        assert_int_equal(row->form->bits, row->bits);
        const qc_form form = qc_scheme_form((qc_scheme)s, 100, 64, 0);
        assert_int_equal(form.block_elems, row->by_rows ? 0 : 64);
        assert_true(qc_to_quantizes(row->to) && row->to != QC_TO_AUTO);
        assert_false(row->by_rows && row->default_block);
        assert_int_equal(qc_scheme_code_bytes((qc_scheme)s, 9), (9 * row->bits + 7) / 8);
        assert_int_equal(qc_form_scale_elems(&form), row->by_rows ? 100 : 64);
    }
    assert_string_equal(qc_scheme_name((qc_scheme)QC_SCHEME_COUNT), "unknown");
}

TEST(options_find_their_scheme)
{
    static const struct {
        qc_recipe_options options;
        qc_scheme scheme;
    } cases[] = {
        {{.to = QC_TO_NF4}, QC_SCHEME_NF4},
        {{.to = QC_TO_NF4, .block_elems = 128}, QC_SCHEME_NF4},
        {{.to = QC_TO_INT8}, QC_SCHEME_INT8_ROWS},
        {{.to = QC_TO_INT8, .block_elems = 64}, QC_SCHEME_INT8_BLOCKS},
        {{.to = QC_TO_AUTO}, QC_SCHEME_NF4},
        {{.to = QC_TO_AUTO, .block_elems = 64}, QC_SCHEME_NF4},
        {{.to = QC_TO_INT4, .format = QC_FORMAT_COMPRESSED_TENSORS}, QC_SCHEME_W4A16},
        {{.to = QC_TO_INT4, .format = QC_FORMAT_COMPRESSED_TENSORS, .block_elems = 32},
         QC_SCHEME_W4A16},
        {{.to = QC_TO_INT4, .format = QC_FORMAT_COMPRESSED_TENSORS, .per_channel = 1},
         QC_SCHEME_W4A16_CHANNEL},
        {{.to = QC_TO_AUTO, .format = QC_FORMAT_COMPRESSED_TENSORS}, QC_SCHEME_W4A16},
        {{.to = QC_TO_INT8, .format = QC_FORMAT_COMPRESSED_TENSORS}, QC_SCHEME_W8A8},
        {{.to = QC_TO_INT8, .format = QC_FORMAT_COMPRESSED_TENSORS, .per_channel = 1},
         QC_SCHEME_W8A8},
        {{.to = QC_TO_INT8, .format = QC_FORMAT_COMPRESSED_TENSORS, .activations_16 = 1},
         QC_SCHEME_W8A16_CHANNEL},
        {{.to = QC_TO_INT8,
          .format = QC_FORMAT_COMPRESSED_TENSORS,
          .activations_16 = 1,
          .block_elems = 64},
         QC_SCHEME_W8A16},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(qc_scheme_of_options(&cases[i].options), cases[i].scheme);
}

TEST(candidates_grow_in_size)
{
    static const qc_recipe_options formats[] = {
        {.format = QC_FORMAT_BITSANDBYTES},
        {.format = QC_FORMAT_COMPRESSED_TENSORS},
        {.format = QC_FORMAT_COMPRESSED_TENSORS, .activations_16 = 1},
    };
    for (unsigned i = 0; i < 3 * QC_CANDIDATES; i++) {
        const unsigned k = i % QC_CANDIDATES;
        const qc_recipe_options *o = &formats[i / QC_CANDIDATES];
        const qc_candidate *c = &qc_candidates_of(o)[k];
        const qc_scheme_row *row = &qc_schemes[c->scheme];
        if (!c->name)
            continue;
        assert_int_equal(row->bits == 0, k == QC_CANDIDATE_16BIT);
        assert_true(!row->bits || row->format == o->format);
        assert_true(row->format != QC_FORMAT_COMPRESSED_TENSORS || row->bits < 8 ||
                    row->activation_bits == (o->activations_16 ? 16u : 8u));
        assert_int_equal(c->block_elems != 0, row->bits && !row->by_rows);
        if (k > 0 && row->bits)
            assert_true(qc_schemes[c[-1].scheme].bits <= row->bits);
    }
}

/* The groups of int5 for rows of so many elements: 128, or the first that divides them, or a scale
 * for each row; and whether int8 and int4-32 can have such rows. */
TEST(rows_lead_to_other_groups)
{
    static const struct {
        uint64_t cols;
        unsigned step, int8, int4_32;
    } rows[] = {{128, 0, 1, 1}, {2880, 1, 1, 1}, {96, 2, 1, 1},
                {440, 3, 1, 0}, {441, 3, 0, 0},  {0, 4, 0, 0}};
    const qc_recipe_options o = {
        .to = QC_TO_AUTO, .format = QC_FORMAT_COMPRESSED_TENSORS, .activations_16 = 1};
    for (unsigned i = 0; i < sizeof rows / sizeof *rows; i++) {
        const uint64_t cols = rows[i].cols;
        for (unsigned k = 0; k < QC_CANDIDATES; k++) {
            const qc_candidate *c = &qc_candidates_of(&o)[k];
            qc_candidate_form form;
            unsigned step = 0;
            while (qc_candidate_step(c, step, &form) && qc_candidate_obstacle(form, cols))
                step++;
            const int found = qc_candidate_step(c, step, &form);
            if (!c->name)
                continue;
            if (strcmp(c->name, "int5") == 0)
                assert_int_equal(step, rows[i].step);
            if (strcmp(c->name, "int8") == 0)
                assert_int_equal(found, rows[i].int8);
            if (strcmp(c->name, "int4-32") == 0)
                assert_int_equal(found, rows[i].int4_32);
            if (k == QC_CANDIDATE_16BIT)
                assert_true(found && step == 0);
        }
        assert_int_equal(qc_scheme_obstacle(&o, cols) == NULL, rows[i].step < QC_CANDIDATE_STEPS);
    }
    const qc_recipe_options int4 = {.to = QC_TO_INT4, .format = QC_FORMAT_COMPRESSED_TENSORS};
    assert_string_equal(qc_scheme_obstacle(&int4, 2880), "has rows of no whole groups");
}
