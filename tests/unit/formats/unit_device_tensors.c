/* formats/device_reader.h: single tensors and parts of them */
#include "base/interrupt.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/device_output_fixture.h"

static qc_reader_shards *open_shards(const qc_reader *r, size_t device)
{
    qc_reader_shards *s = NULL;
    qc_error err = {0};
    if (qc_reader_shards_open(&s, r, device, &err) != QC_OK)
        fail_msg("%s", err.msg);
    return s;
}

TEST(tensors_are_found_by_name)
{
    for (int placed = 0; placed < 2; placed++) {
        world w;
        make_output(&w, 1, placed);
        qc_reader *r = open_reader(&w);
        for (size_t k = 0; k < TENSORS; k++) {
            size_t device = 99, index = 99;
            const qc_reader_tensor *t = qc_reader_find_tensor(r, made[k].name, &device, &index);
            assert_non_null(t);
            assert_string_equal(t->name, made[k].name);
            assert_int_equal(device, placed ? made[k].device : 0);
            assert_ptr_equal(t, &qc_reader_device_at(r, device)->tensors[index]);
            assert_ptr_equal(t, qc_reader_find_tensor(r, made[k].name, NULL, NULL));
        }
        assert_null(qc_reader_find_tensor(r, "l1", NULL, NULL));
        assert_null(qc_reader_find_tensor(r, "l1.ww", NULL, NULL));
        assert_null(qc_reader_find_tensor(r, "", NULL, NULL));
        assert_null(qc_reader_find_tensor(r, NULL, NULL, NULL));
        assert_null(qc_reader_find_tensor(NULL, "embed", NULL, NULL));
        qc_reader_close(r);
        drop_output(&w);
    }
}

TEST(whole_tensors_are_read)
{
    for (int compressed = 0; compressed < 2; compressed++) {
        world w;
        make_output(&w, compressed, 1);
        qc_reader *r = open_reader(&w);
        for (size_t d = 0; d < 4; d++) {
            qc_reader_shards *s = open_shards(r, d);
            const qc_reader_device *device = qc_reader_device_at(r, d);
            for (size_t i = device->tensor_count; i-- > 0;) {
                const qc_reader_tensor *t = &device->tensors[i];
                unsigned char *got = malloc(t->bytes ? t->bytes : 1);
                assert_int_equal(qc_reader_read(s, i, NULL, got, NULL), QC_OK);
                assert_memory_equal(got, content_of(t->name), t->bytes);
                free(got);
            }
            qc_reader_shards_close(s);
        }
        qc_reader_close(r);
        drop_output(&w);
    }
}

/* The definition: byte after byte. */
static void assert_slice(const qc_reader_shards *s, const qc_reader_tensor *t,
                         const qc_reader_slice *slice)
{
    uint64_t bytes = slice->rows * slice->bytes;
    unsigned char *got = malloc(bytes + 1);
    qc_error err = {0};
    assert_non_null(got);
    got[bytes] = 0xa5;
    if (qc_reader_read(s, t->index, slice, got, &err) != QC_OK)
        fail_msg("%s", err.msg);
    const unsigned char *whole = content_of(t->name);
    for (uint64_t i = 0; i < bytes; i++) {
        uint64_t row = slice->first_row + i / slice->bytes,
                 byte = slice->first_byte + i % slice->bytes;
        if (got[i] != whole[row * slice->row_bytes + byte])
            fail_msg("'%s': byte %llu of the slice", t->name, (unsigned long long)i);
    }
    assert_int_equal(got[bytes], 0xa5);
    free(got);
}

static uint64_t below(uint64_t *state, uint64_t n)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return n ? (*state >> 33) % n : 0;
}

TEST(rows_and_columns_are_read)
{
    static const uint64_t rows_of[] = {1, 64, 4096, 20480, 5 * MIB, 5, 4, 2};
    for (int compressed = 0; compressed < 2; compressed++) {
        world w;
        uint64_t random = 11;
        make_output(&w, compressed, 1);
        qc_reader *r = open_reader(&w);
        size_t device = 0;
        const qc_reader_tensor *t = qc_reader_find_tensor(r, "l1.w", &device, NULL);
        qc_reader_shards *s = open_shards(r, device);
        for (size_t i = 0; i < sizeof rows_of / sizeof *rows_of; i++) {
            uint64_t rows = rows_of[i], row_bytes = t->bytes / rows;
            const qc_reader_slice some[] = {
                {row_bytes, 0, rows, 0, row_bytes},
                {row_bytes, rows - 1, 1, 0, row_bytes},
                {row_bytes, 0, rows, row_bytes - 1, 1},
                {row_bytes, 0, rows, 0, (row_bytes + 1) / 2},
                {row_bytes, rows / 2, rows - rows / 2, row_bytes / 2, row_bytes - row_bytes / 2},
            };
            for (size_t k = 0; k < sizeof some / sizeof *some; k++)
                assert_slice(s, t, &some[k]);
            for (int k = 0; k < 10; k++) {
                qc_reader_slice slice = {.row_bytes = row_bytes};
                slice.first_row = below(&random, rows);
                slice.rows = 1 + below(&random, rows - slice.first_row);
                slice.first_byte = below(&random, row_bytes);
                slice.bytes = 1 + below(&random, row_bytes - slice.first_byte);
                assert_slice(s, t, &slice);
            }
        }
        /* An odd number of bytes, whose last frame holds one. */
        t = qc_reader_find_tensor(r, "head", &device, NULL);
        qc_reader_shards *others = open_shards(r, device);
        assert_slice(others, t, &(qc_reader_slice){t->bytes, 0, 1, t->bytes - 1, 1});
        assert_slice(others, t, &(qc_reader_slice){1, MIB - 3, MIB + 4, 0, 1});
        qc_reader_shards_close(others);
        qc_reader_shards_close(s);
        qc_reader_close(r);
        drop_output(&w);
    }
}

/* Frames that hold none of the slice may be damaged; the others may not. */
TEST(only_frames_of_the_slice_are_read)
{
    world w;
    char path[FX_PATH_BYTES];
    unsigned char got[64];
    size_t device = 0, index = 0;
    qc_error err = {0};
    make_output(&w, 1, 1);
    qc_reader *r = open_reader(&w);
    (void)qc_reader_find_tensor(r, "l1.w", &device, &index);
    const qc_manifest_tensor *m = NULL;
    for (size_t i = 0; i < TENSORS; i++)
        if (strcmp(w.m.tensors[i].name, "l1.w") == 0)
            m = &w.m.tensors[i];
    qc_reader_shards *s = open_shards(r, device);
    shard_path(path, &w, m->shard);
    flip_byte(path, m->stored_offset + m->stored_bytes - 20); /* in the fifth frame */
    const qc_reader_slice first = {64, 4 * (MIB / 64) - 1, 1, 0, 64};
    const qc_reader_slice last = {64, 4 * (MIB / 64), 1, 0, 64};
    const qc_reader_slice columns = {MIB, 4, 1, 7, 64}, begins = {5 * MIB / 2, 0, 2, 0, 32};
    assert_int_equal(qc_reader_read(s, index, &first, got, &err), QC_OK);
    assert_int_equal(qc_reader_read(s, index, &begins, got, &err), QC_OK);
    assert_int_equal(qc_reader_read(s, index, &last, got, &err), QC_ERR_CHECK);
    assert_non_null(strstr(err.msg, "tensor 'l1.w' in model-"));
    assert_non_null(strstr(err.msg, "a frame cannot be decompressed"));
    assert_int_equal(qc_reader_read(s, index, &columns, got, &err), QC_ERR_CHECK);
    unsigned char *all = malloc(5 * MIB);
    assert_int_equal(qc_reader_read(s, index, NULL, all, &err), QC_ERR_CHECK);
    assert_non_null(strstr(err.msg, "tensor 'l1.w' in model-"));
    free(all);
    qc_reader_shards_close(s);
    qc_reader_close(r);
    drop_output(&w);
}

/* The digest of a tensor sees what no checksum of a frame does: plain bytes, and stored noise. */
TEST(whole_tensors_have_their_digests_checked)
{
    for (int compressed = 0; compressed < 2; compressed++) {
        world w;
        make_output(&w, compressed, 1);
        qc_reader *r = open_reader(&w);
        for (size_t i = 0; i < TENSORS; i++) {
            const qc_manifest_tensor *m = &w.m.tensors[i];
            const qc_manifest_shard *sh = &w.m.shards[m->shard];
            char path[FX_PATH_BYTES], says[64];
            size_t device = 0, index = 0;
            qc_error err = {0};
            if (m->begin == m->end)
                continue;
            (void)qc_reader_find_tensor(r, m->name, &device, &index);
            qc_reader_shards *s = open_shards(r, device);
            unsigned char *got = malloc(m->end - m->begin);
            shard_path(path, &w, m->shard);
            flip_byte(path, compressed ? m->stored_offset + m->stored_bytes / 2
                                       : sh->header_bytes + m->begin + (m->end - m->begin) / 2);
            assert_int_equal(qc_reader_read(s, index, NULL, got, &err), QC_ERR_CHECK);
            (void)snprintf(says, sizeof says, "tensor '%s' in %s", m->name, sh->name);
            assert_non_null(strstr(err.msg, says));
            free(got);
            qc_reader_shards_close(s);
        }
        qc_reader_close(r);
        drop_output(&w);
    }
}

TEST(what_is_wrong_in_a_call_is_refused)
{
    world w;
    unsigned char got[4];
    size_t device = 0, index = 0;
    qc_error err = {0};
    make_output(&w, 0, 1);
    qc_reader *r = open_reader(&w);
    qc_reader_shards *s = NULL, *none = NULL;
    assert_int_equal(qc_reader_shards_open(NULL, r, 0, &err), QC_ERR_USAGE);
    assert_int_equal(qc_reader_shards_open(&none, NULL, 0, &err), QC_ERR_USAGE);
    assert_string_equal(err.msg, "qc_reader_shards_open: the reader is NULL");
    assert_int_equal(qc_reader_shards_open(&none, r, 4, &err), QC_ERR_DEVICE);
    assert_null(none);
    (void)qc_reader_find_tensor(r, "l1.s", &device, &index); /* 77 bytes */
    s = open_shards(r, device);
    const qc_reader_slice bad[] = {
        {0, 0, 1, 0, 1},          {2, 0, 1, 0, 1},          {7, 0, 12, 0, 7},
        {7, 12, 0, 0, 7},         {7, 11, 1, 0, 7},         {7, 0, 1, 0, 8},
        {7, 0, 1, 8, 0},          {7, 0, 1, 7, 1},          {7, 0, 1, 1, 7},
        {78, 0, 0, 0, 0},         {7, UINT64_MAX, 2, 0, 7}, {7, 0, UINT64_MAX, 0, 7},
        {7, 1, UINT64_MAX, 0, 7}, {7, 0, 1, UINT64_MAX, 2}, {7, 0, 1, 1, UINT64_MAX},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (qc_reader_read(s, index, &bad[i], got, &err) != QC_ERR_USAGE)
            fail_msg("slice %zu is taken", i);
    const qc_reader_slice uneven = {2, 0, 1, 0, 1}, outside = {7, 10, 2, 0, 7},
                          nothing = {7, 11, 0, 7, 0}, one = {7, 10, 1, 6, 1};
    assert_int_equal(qc_reader_read(s, index, &uneven, got, &err), QC_ERR_USAGE);
    assert_non_null(
        strstr(err.msg, ": rows of 2 bytes do not divide the 77 bytes of tensor 'l1.s'"));
    assert_int_equal(qc_reader_read(s, index, &outside, got, &err), QC_ERR_USAGE);
    assert_non_null(strstr(err.msg, ": bytes 0 to 7 of rows 10 to 12 are not within the 11 rows of "
                                    "7 bytes of tensor 'l1.s'"));
    assert_int_equal(qc_reader_read(s, index, &nothing, NULL, &err), QC_OK);
    assert_int_equal(qc_reader_read(s, index, &one, NULL, &err), QC_ERR_USAGE);
    assert_int_equal(qc_reader_read(s, index, &one, got, &err), QC_OK);
    assert_int_equal(got[0], content_of("l1.s")[76]);
    assert_int_equal(qc_reader_read(s, SIZE_MAX, NULL, got, &err), QC_ERR_USAGE);
    assert_int_equal(qc_reader_read(NULL, 0, NULL, got, &err), QC_ERR_USAGE);
    assert_int_equal(qc_reader_read(s, 99, NULL, got, &err), QC_ERR_USAGE);
    assert_non_null(strstr(err.msg, ": there is no tensor number 99 on device 'cuda:1'; it has 3"));
    qc_interrupt();
    assert_int_equal(qc_reader_read(s, index, &one, got, &err), QC_ERR_INTERRUPTED);
    qc_interrupt_clear();
    qc_reader_close(r); /* its shards may be read on */
    got[0] = 0;
    assert_int_equal(qc_reader_read(s, index, &one, got, &err), QC_OK);
    assert_int_equal(got[0], content_of("l1.s")[76]);
    qc_reader_shards_close(s);
    qc_reader_shards_close(NULL);
    drop_output(&w);
}

/* What a listed file gives is told by tests/interop/test_interop_load.py. */
TEST(side_files_that_are_not_listed_are_refused)
{
    world w;
    qc_error err = {0};
    make_output(&w, 1, 1);
    qc_reader *r = open_reader(&w);
    assert_int_equal(qc_reader_check_file(r, "config.json", "{}", 2, &err), QC_ERR_CHECK);
    assert_non_null(strstr(err.msg, "config.json: qconv.json does not list this file"));
    assert_int_equal(qc_reader_check_file(r, "config.json", NULL, 2, &err), QC_ERR_USAGE);
    assert_int_equal(qc_reader_check_file(r, NULL, "{}", 2, &err), QC_ERR_USAGE);
    assert_int_equal(qc_reader_check_file(NULL, "config.json", "{}", 2, &err), QC_ERR_USAGE);
    qc_reader_close(r);
    drop_output(&w);
}

TEST(out_of_memory_is_said)
{
    world w;
    unsigned char got[64];
    const qc_reader_slice slice = {MIB, 3, 2, 5, 32};
    make_output(&w, 1, 1);
    qc_reader *r = open_reader(&w);
    size_t device = 0, index = 0;
    (void)qc_reader_find_tensor(r, "l1.w", &device, &index);
    EACH_ALLOCATION_FAILS (fault, 0) {
        qc_reader_shards *s = NULL;
        fault.st = qc_reader_shards_open(&s, r, device, NULL);
        if (fault.st == QC_OK)
            fault.st = qc_reader_read(s, index, &slice, got, NULL);
        qc_reader_shards_close(s);
        assert_true(fault.st != QC_OK || fault.at > 8);
    }
    qc_reader_close(r);
    drop_output(&w);
}

TEST_GROUP(make_contents, free_contents)
