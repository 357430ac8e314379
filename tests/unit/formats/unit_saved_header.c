/* formats/saved_header.h: what is kept of a deleted file, and checkpoints that are opened with it.
 */
#include "base/alloc.h"
#include "formats/checkpoint.h"
#include "tests/fixtures/fixture_files.h"

#include <errno.h>

#define COUNT(a) (sizeof(a) / sizeof *(a))

static fx_dir dir;
static qc_arena arena;

static int make_dir(void **state)
{
    (void)state;
    fx_make_dir(&dir);
    qc_arena_init(&arena);
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    qc_arena_deinit(&arena);
    fx_remove_dir(dir.path);
    return 0;
}

static const char *path_of(const char *name)
{
    const char *path = NULL;
    assert_int_equal(qc_path_join(&arena, &path, dir.path, name, NULL), QC_OK);
    return path;
}

/* Keep the header of file i of c as kept/<i>, as a conversion does before it deletes it. */
static void keep(const qc_checkpoint *c, size_t i)
{
    char name[32];
    qc_saved_header s = {.name = qc_checkpoint_file_name(c, i), .origin = c->files[i].path};
    (void)snprintf(name, sizeof name, "kept/%05zu", i);
    s.path = path_of(name);
    qc_st_file_describe(&c->files[i].st, &s);
    unsigned char *bytes = malloc((size_t)s.header_bytes);
    qc_st_cursor *cursor = NULL;
    assert_non_null(bytes);
    assert_int_equal(qc_st_cursor_create(&cursor, NULL), QC_OK);
    assert_int_equal(qc_st_file_read_header(&c->files[i].st, cursor, bytes, NULL), QC_OK);
    assert_int_equal(qc_dir_make(path_of("kept"), NULL), QC_OK);
    assert_int_equal(qc_saved_header_put(&s, bytes, NULL), QC_OK);
    qc_st_cursor_destroy(cursor);
    free(bytes);
}

static qc_checkpoint *open_with_kept(const char *path)
{
    qc_saved_header *saved = NULL;
    size_t count = 0;
    qc_checkpoint *c = NULL;
    qc_error err = {0};
    assert_int_equal(qc_saved_headers_read(&saved, &count, &arena, path_of("kept"), &err), QC_OK);
    if (qc_checkpoint_open_saved(&c, path, saved, count, &err) != QC_OK)
        fail_msg("%s", err.msg);
    return c;
}

static qc_checkpoint *open_plain(const char *path)
{
    qc_checkpoint *c = NULL;
    qc_error err = {0};
    if (qc_checkpoint_open(&c, path, &err) != QC_OK)
        fail_msg("%s", err.msg);
    return c;
}

/* All that opening gives is the same, but for the paths of files. */
static void expect_same(const qc_checkpoint *a, const qc_checkpoint *b)
{
    assert_int_equal(a->file_count, b->file_count);
    assert_int_equal(a->tensor_count, b->tensor_count);
    assert_int_equal(a->tensor_bytes, b->tensor_bytes);
    assert_int_equal(a->side_count, b->side_count);
    assert_int_equal(a->meta_count, b->meta_count);
    assert_int_equal(a->warning_count, b->warning_count);
    for (size_t i = 0; i < a->tensor_count; i++) {
        const qc_checkpoint_tensor *s = &a->tensors[i], *t = &b->tensors[i];
        assert_string_equal(s->name, t->name);
        assert_true(s->dtype == t->dtype && s->ndim == t->ndim && s->bytes == t->bytes);
        assert_true(s->begin == t->begin && s->file == t->file);
        assert_memory_equal(s->dims, t->dims, s->ndim * sizeof *s->dims);
    }
    for (size_t i = 0; i < a->file_count; i++) {
        qc_digest d, e;
        assert_string_equal(a->files[i].name, b->files[i].name);
        assert_string_equal(a->files[i].path, b->files[i].path);
        assert_int_equal(a->files[i].file_bytes, b->files[i].file_bytes);
        assert_int_equal(a->files[i].compressed, b->files[i].compressed);
        assert_int_equal(a->files[i].stamp.bytes, b->files[i].stamp.bytes);
        assert_true(a->files[i].stamp.modified_ns == b->files[i].stamp.modified_ns);
        assert_int_equal(qc_checkpoint_head_digest(a, i, &d, NULL), QC_OK);
        assert_int_equal(qc_checkpoint_head_digest(b, i, &e, NULL), QC_OK);
        assert_true(qc_digest_equal(&d, &e));
        assert_int_equal(qc_checkpoint_check_unchanged(b, i, NULL), QC_OK);
    }
}

/* The tensor can be read exactly if its file is there. */
static void expect_readable(const qc_checkpoint *c, const char *name, int yes)
{
    unsigned char byte = 0;
    qc_error err = {0};
    qc_st_cursor *cursor = NULL;
    const qc_checkpoint_tensor *t = qc_checkpoint_find(c, name);
    assert_non_null(t);
    assert_int_equal(qc_st_cursor_create(&cursor, NULL), QC_OK);
    qc_status st = qc_checkpoint_read(c, cursor, t, 3, &byte, 1, &err);
    assert_int_equal(st, yes ? QC_OK : QC_ERR_INPUT);
    if (yes)
        assert_int_equal(byte, fx_byte(name, 3));
    else
        assert_non_null(strstr(err.msg, "--consume-source"));
    qc_checkpoint_hint_read_soon(c, t, 0, 1);
    qc_st_cursor_destroy(cursor);
}

static void stands_for_shards(void **state)
{
    static const char index[] = "{\"metadata\":{\"total_size\":160},\"weight_map\":{"
                                "\"a\":\"sub/x.safetensors\",\"b\":\"sub/x.safetensors\","
                                "\"c\":\"y.safetensors\",\"d\":\"y.safetensors\"}}";
    (void)state;
    fx_put_tensors(dir.path, "m/sub/x.safetensors", "a b", 40);
    fx_put_tensors(dir.path, "m/y.safetensors.zst", "c d", 40);
    fx_puts(dir.path, "m/model.safetensors.index.json", index);
    fx_puts(dir.path, "m/config.json", "{}");
    for (size_t gone = 0; gone < 2; gone++) {
        qc_checkpoint *before = open_plain(path_of("m"));
        assert_string_equal(qc_checkpoint_file_name(before, gone),
                            gone ? "y.safetensors.zst" : "sub/x.safetensors");
        keep(before, gone);
        qc_checkpoint *present = open_with_kept(path_of("m"));
        assert_null(present->files[gone].saved); /* what is there is read */
        qc_checkpoint_close(present);
        char away[64];
        (void)snprintf(away, sizeof away, "away%zu", gone);
        assert_int_equal(rename(before->files[gone].path, path_of(away)), 0);
        qc_checkpoint *after = open_with_kept(path_of("m"));
        expect_same(before, after);
        assert_non_null(after->files[gone].saved);
        expect_readable(after, gone ? "d" : "b", 0);
        expect_readable(after, gone ? "a" : "c", 1);
        assert_int_equal(rename(path_of(away), before->files[gone].path), 0);
        qc_checkpoint_close(after);
        qc_checkpoint_close(before);
        fx_remove_dir(path_of("kept"));
    }
    fx_remove_dir(path_of("m"));
}

/* One file by its usual name, by another name, and given by its path. */
static void stands_for_a_single_file(void **state)
{
    static const char *const names[] = {"model.safetensors", "other.safetensors",
                                        "model.safetensors.zst"};
    (void)state;
    for (size_t i = 0; i < COUNT(names); i++) {
        char file[64];
        (void)snprintf(file, sizeof file, "m/%s", names[i]);
        for (int by_file = 0; by_file < 2; by_file++) {
            fx_put_tensors(dir.path, file, "a b", 40);
            const char *path = path_of(by_file ? file : "m");
            qc_checkpoint *before = open_plain(path);
            assert_string_equal(qc_checkpoint_file_name(before, 0), names[i]);
            keep(before, 0);
            assert_int_equal(unlink(path_of(file)), 0);
            qc_checkpoint *after = open_with_kept(path);
            expect_same(before, after);
            expect_readable(after, "a", 0);
            qc_checkpoint_close(after);
            qc_checkpoint_close(before);
            fx_remove_dir(path_of("m"));
            fx_remove_dir(path_of("kept"));
        }
    }
}

/* The file of an open checkpoint is deleted: its space is free, its header is known. */
static void an_open_file_is_deleted(void **state)
{
    (void)state;
    fx_put_tensors(dir.path, "m/model.safetensors", "a b", 40);
    qc_checkpoint *before = open_plain(path_of("m")), *c = open_plain(path_of("m"));
    qc_error err = {0};
    uint64_t header_at = 0;
    struct stat s;
    keep(c, 0);
    assert_int_equal(qc_st_file_let_go(&c->files[0].st, path_of("kept/nothing"), &header_at, &err),
                     QC_ERR_IO);
    expect_readable(c, "a", 1);
    assert_int_equal(unlink(path_of("m/model.safetensors")), 0);
    assert_int_equal(fstat(c->files[0].st.file.fd, &s), 0);
    assert_int_equal(s.st_nlink, 0);
    assert_int_equal(qc_st_file_let_go(&c->files[0].st, path_of("kept/00000"), &header_at, NULL),
                     QC_OK);
    assert_int_equal(fstat(c->files[0].st.file.fd, &s), 0);
    assert_int_equal(s.st_nlink, 1);
    qc_st_file_set_header_only(&c->files[0].st, header_at);
    expect_readable(c, "a", 0);
    expect_same(before, c);
    qc_checkpoint_close(c);
    qc_checkpoint_close(before);
    fx_remove_dir(path_of("m"));
    fx_remove_dir(path_of("kept"));
}

static qc_status read_kept(size_t *count, qc_error *err)
{
    qc_saved_header *saved = NULL;
    return qc_saved_headers_read(&saved, count, &arena, path_of("kept"), err);
}

/* Every byte changed, every length: refused; nothing else in the folder matters. */
static void damaged_ones_are_refused(void **state)
{
    qc_strbuf text;
    size_t count = 7;
    qc_error err = {0};
    (void)state;
    assert_int_equal(read_kept(&count, NULL), QC_OK); /* no folder */
    assert_int_equal(count, 0);
    fx_put_tensors(dir.path, "m/model.safetensors", "a", 40);
    qc_checkpoint *c = open_plain(path_of("m"));
    keep(c, 0);
    qc_checkpoint_close(c);
    qc_strbuf_init(&text, 1 << 20);
    assert_int_equal(qc_file_slurp(path_of("kept/00000"), &text, NULL), QC_OK);
    for (size_t i = 0; i < text.len; i++) {
        qc_saved_header s;
        text.data[i] ^= 0x40;
        assert_int_equal(
            qc_saved_header_parse(&s, &arena, (const unsigned char *)text.data, text.len, &err),
            QC_ERR_INPUT);
        text.data[i] ^= 0x40;
        assert_int_equal(
            qc_saved_header_parse(&s, &arena, (const unsigned char *)text.data, i, &err),
            QC_ERR_INPUT);
    }
    /* Sizes that lie, with a digest that does not. */
    static const size_t fields[] = {24, 32, 40, 44, 48};
    for (size_t i = 0; i < COUNT(fields); i++) {
        for (unsigned delta = 1; delta < 256; delta++) {
            qc_saved_header s;
            unsigned char kept = (unsigned char)text.data[fields[i]];
            text.data[fields[i]] = (char)(kept - delta);
            qc_digest d = qc_digest_bytes(text.data, text.len - sizeof d);
            memcpy(text.data + text.len - sizeof d, d.b, sizeof d);
            qc_status st =
                qc_saved_header_parse(&s, &arena, (const unsigned char *)text.data, text.len, &err);
            /* The content may have other sizes as far as this file can tell. */
            assert_true(st == QC_ERR_INPUT || fields[i] == 24 ||
                        (fields[i] == 40 && s.compressed == 1));
            text.data[fields[i]] = (char)kept;
        }
    }
    fx_put(dir.path, "kept/00001", "QCHEAD1\n", 8);
    assert_int_equal(read_kept(&count, &err), QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "kept/00001"));
    assert_int_equal(unlink(path_of("kept/00001")), 0);
    fx_put(dir.path, "kept/00001.tmp", "QCHEAD1\n", 8); /* half written */
    assert_int_equal(read_kept(&count, &err), QC_OK);
    assert_int_equal(count, 1);
    qc_strbuf_deinit(&text);
    fx_remove_dir(path_of("m"));
    fx_remove_dir(path_of("kept"));
}

/* A header that was saved of another file than its sizes say does not open. */
static void a_header_of_other_content_is_refused(void **state)
{
    qc_saved_header *saved = NULL;
    size_t count = 0;
    qc_checkpoint *c = NULL;
    qc_error err = {0};
    (void)state;
    fx_put_tensors(dir.path, "m/model.safetensors", "a", 40);
    c = open_plain(path_of("m"));
    keep(c, 0);
    qc_checkpoint_close(c);
    assert_int_equal(unlink(path_of("m/model.safetensors")), 0);
    assert_int_equal(qc_saved_headers_read(&saved, &count, &arena, path_of("kept"), &err), QC_OK);
    saved[0].content_bytes++;
    assert_int_equal(qc_checkpoint_open_saved(&c, path_of("m"), saved, 1, &err), QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "saved header"));
    saved[0].content_bytes -= 2;
    assert_int_equal(qc_checkpoint_open_saved(&c, path_of("m"), saved, 1, &err), QC_ERR_TRUNCATED);
    fx_remove_dir(path_of("m"));
    fx_remove_dir(path_of("kept"));
}

/* Every allocation in turn fails: a clean error, and what was open stays so. */
static void memory_runs_out(void **state)
{
    qc_checkpoint *c = NULL;
    qc_status st = QC_ERR_NOMEM;
    (void)state;
    fx_put_tensors(dir.path, "m/model.safetensors", "a b", 40);
    qc_checkpoint *open = open_plain(path_of("m"));
    keep(open, 0);
    assert_int_equal(rename(path_of("kept/00000"), path_of("kept/00000-gone")), 0);
    assert_int_equal(unlink(path_of("m/model.safetensors")), 0);
    const char *model = path_of("m"), *kept = path_of("kept");
    for (uint64_t n = 1; st != QC_OK; n++) {
        qc_arena own;
        qc_saved_header *saved = NULL;
        size_t count = 0;
        qc_error err = {0};
        qc_arena_init(&own);
        qc_alloc_fail_at(n, 0);
        st = qc_saved_headers_read(&saved, &count, &own, kept, &err);
        if (st == QC_OK)
            st = qc_checkpoint_open_saved(&c, model, saved, count, &err);
        qc_alloc_fail_at(0, 0);
        assert_true(st == QC_OK || (st == QC_ERR_NOMEM && err.msg[0]));
        assert_true(st == QC_OK ? count == 1 && saved[0].gone : c == NULL);
        qc_arena_deinit(&own);
        assert_true(n < 1000);
    }
    expect_same(open, c);
    qc_checkpoint_close(c);
    const char *gone = path_of("kept/00000-gone");
    uint64_t header_at = 0;
    st = QC_ERR_NOMEM;
    for (uint64_t n = 1; st != QC_OK; n++) {
        expect_readable(open, "a", 1);
        qc_alloc_fail_at(n, 0);
        st = qc_st_file_let_go(&open->files[0].st, gone, &header_at, NULL);
        qc_alloc_fail_at(0, 0);
        assert_true(n < 1000);
    }
    qc_st_file_set_header_only(&open->files[0].st, header_at);
    expect_readable(open, "a", 0);
    qc_checkpoint_close(open);
    fx_remove_dir(path_of("m"));
    fx_remove_dir(path_of("kept"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stands_for_shards),
        cmocka_unit_test(stands_for_a_single_file),
        cmocka_unit_test(an_open_file_is_deleted),
        cmocka_unit_test(damaged_ones_are_refused),
        cmocka_unit_test(memory_runs_out),
        cmocka_unit_test(a_header_of_other_content_is_refused),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
