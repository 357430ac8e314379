/* formats/device_reader.h */
#include "base/workers.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/device_output_fixture.h"

#include <pthread.h>
#include <time.h>

/* ---- A caller that keeps everything --------------------------------------------------------- */

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t freed;
    unsigned char *at[TENSORS];
    unsigned placed, whole, stops;
    const char *refuse;    /* no memory for this tensor */
    const char *fail_done; /* done() fails for it */
    int one_at_a_time;     /* room for one tensor only */
    unsigned in_flight;
    int give_up;
} keeper;

static void *keep_place(void *ctx, const qc_reader_tensor *t)
{
    keeper *k = ctx;
    if (k->refuse && strcmp(k->refuse, t->name) == 0)
        return NULL;
    pthread_mutex_lock(&k->lock);
    while (k->one_at_a_time && k->in_flight > 0 && !k->give_up)
        qc_cond_wait_briefly(&k->freed, &k->lock);
    int give_up = k->give_up;
    k->in_flight++;
    k->placed++;
    pthread_mutex_unlock(&k->lock);
    if (give_up)
        return NULL;
    if (t->bytes == 0)
        return NULL;
    k->at[t->index] = malloc(t->bytes); /* exact: sanitizers see what lies beyond */
    return k->at[t->index];
}

static qc_status keep_done(void *ctx, const qc_reader_tensor *t, void *dst, qc_error *err)
{
    keeper *k = ctx;
    if (k->fail_done && strcmp(k->fail_done, t->name) == 0)
        QC_FAIL(err, QC_ERR_IO, "the copy of '%s' failed", t->name);
    if (t->bytes > 0 && memcmp(content_of(t->name), dst, t->bytes) != 0)
        QC_FAIL(err, QC_ERR_INTERNAL, "'%s' has other bytes", t->name);
    pthread_mutex_lock(&k->lock);
    k->whole++;
    k->in_flight--;
    pthread_cond_signal(&k->freed);
    pthread_mutex_unlock(&k->lock);
    return QC_OK;
}

static void keep_stopped(void *ctx)
{
    keeper *k = ctx;
    pthread_mutex_lock(&k->lock);
    k->stops++;
    k->give_up = 1;
    pthread_cond_signal(&k->freed);
    pthread_mutex_unlock(&k->lock);
}

static qc_reader_options keep_options(keeper *k, unsigned threads)
{
    memset(k, 0, sizeof *k);
    assert_int_equal(qc_lock_init(&k->lock, &k->freed, NULL), QC_OK);
    return (qc_reader_options){.threads = threads,
                               .place = keep_place,
                               .done = keep_done,
                               .stopped = keep_stopped,
                               .ctx = k};
}

static void keeper_deinit(keeper *k)
{
    for (size_t i = 0; i < TENSORS; i++)
        free(k->at[i]);
    qc_lock_deinit(&k->lock, &k->freed);
}

static void assert_loads(const qc_reader *r, size_t device, unsigned threads, int skip)
{
    SCOPED(keeper) k;
    qc_error err = {0};
    const qc_reader_device *d = qc_reader_device_at(r, device);
    qc_reader_options o = keep_options(&k, threads);
    o.skip_digests = skip;
    if (qc_reader_load(r, device, &o, &err) != QC_OK)
        fail_msg("%s", err.msg);
    assert_int_equal(k.placed, d->tensor_count);
    assert_int_equal(k.whole, d->tensor_count);
    assert_int_equal(k.stops, 0);
}

static void assert_load_fails(const qc_reader *r, size_t device, unsigned threads, qc_status want,
                              const char *says, const char *and_says)
{
    SCOPED(keeper) k;
    qc_error err = {0};
    qc_reader_options o = keep_options(&k, threads);
    qc_status st = qc_reader_load(r, device, &o, &err);
    if (st != want || !strstr(err.msg, says) || !strstr(err.msg, and_says))
        fail_msg("%s, \"%s\"", qc_status_name(st), err.msg);
    assert_int_equal(k.stops, 1);
}

/* ---- Tests ---------------------------------------------------------------------------------- */

TEST(devices_and_their_tensors_are_listed)
{
    for (int compressed = 0; compressed < 2; compressed++) {
        world w;
        make_output(&w, compressed, 1);
        qc_reader *r = open_reader(&w);
        size_t seen = 0, index = 99;
        uint64_t stored = 0;
        assert_int_equal(qc_reader_device_count(r), 4);
        for (size_t i = 0; i < 4; i++) {
            const qc_reader_device *d = qc_reader_device_at(r, i);
            uint64_t bytes = 0;
            assert_string_equal(d->name, names[i]);
            assert_int_equal(qc_reader_find_device(r, names[i], &index, NULL), QC_OK);
            assert_int_equal(index, i);
            for (size_t k = 0; k < d->tensor_count; k++, seen++) {
                const qc_reader_tensor *t = &d->tensors[k];
                size_t m = 0;
                while (strcmp(made[m].name, t->name) != 0)
                    m++;
                assert_int_equal(made[m].device, i);
                assert_int_equal(t->bytes, made[m].bytes);
                assert_int_equal(t->index, k);
                assert_true(t->dtype == QC_DTYPE_U8 && t->ndim == 1 && t->dims[0] == t->bytes);
                assert_string_equal(t->scheme, "keep");
                assert_true((strstr(t->shard, ".zst") != NULL) == compressed);
                bytes += t->bytes;
            }
            assert_int_equal(d->tensor_bytes, bytes);
            stored += d->stored_bytes;
        }
        assert_int_equal(seen, TENSORS);
        assert_int_equal(qc_reader_device_at(r, 2)->tensor_count, 0);
        assert_null(qc_reader_device_at(r, 2)->tensors);
        uint64_t files = 0;
        for (uint32_t i = 0; i < w.layout.count; i++) {
            char path[FX_PATH_BYTES];
            struct stat s;
            shard_path(path, &w, i);
            assert_int_equal(stat(path, &s), 0);
            files += (uint64_t)s.st_size;
        }
        assert_int_equal(stored, files);
        qc_reader_close(r);
        drop_output(&w);
    }
}

TEST(every_device_loads_alone)
{
    static const unsigned threads[] = {1, 2, 7, 0};
    for (int compressed = 0; compressed < 2; compressed++) {
        world w;
        make_output(&w, compressed, 1);
        qc_reader *r = open_reader(&w);
        for (size_t i = 0; i < 4; i++) {
            for (size_t k = 0; k < 4; k++)
                assert_loads(r, i, threads[k], k == 2);
        }
        qc_reader_close(r);
        drop_output(&w);
    }
}

TEST(only_the_shards_of_the_device_are_needed)
{
    for (int compressed = 0; compressed < 2; compressed++) {
        world w;
        make_output(&w, compressed, 1);
        qc_reader *r = open_reader(&w);
        for (uint32_t i = 0; i < w.layout.count; i++) {
            char path[FX_PATH_BYTES];
            shard_path(path, &w, i);
            if (w.layout.shards[i].device != 1)
                assert_int_equal(unlink(path), 0);
        }
        assert_loads(r, 1, 3, 0);
        assert_loads(r, 2, 3, 0); /* nothing lies there */
        assert_load_fails(r, 0, 2, QC_ERR_CHECK, "model-00001-of-", "'cuda:0' needs it");
        qc_reader_close(r);
        drop_output(&w);
    }
}

TEST(an_output_without_placement_is_one_device)
{
    for (int compressed = 0; compressed < 2; compressed++) {
        world w;
        size_t index = 99;
        qc_error err = {0};
        make_output(&w, compressed, 0);
        qc_reader *r = open_reader(&w);
        assert_int_equal(qc_reader_device_count(r), 1);
        assert_int_equal(qc_reader_device_at(r, 0)->tensor_count, TENSORS);
        assert_int_equal(qc_reader_find_device(r, "all", &index, NULL), QC_OK);
        assert_int_equal(index, 0);
        assert_int_equal(qc_reader_find_device(r, "cuda:0", &index, &err), QC_ERR_DEVICE);
        assert_non_null(strstr(err.msg, "made without --vram"));
        assert_loads(r, 0, 4, 0);
        qc_reader_close(r);
        drop_output(&w);
    }
}

TEST(damage_is_named)
{
    for (int compressed = 0; compressed < 2; compressed++) {
        world w;
        make_output(&w, compressed, 1);
        qc_reader *r = open_reader(&w);
        for (size_t i = 0; i < TENSORS; i++) {
            const qc_manifest_tensor *t = &w.m.tensors[i];
            const qc_manifest_shard *s = &w.m.shards[t->shard];
            char path[FX_PATH_BYTES], says[64];
            if (t->begin == t->end)
                continue;
            uint64_t first = compressed ? t->stored_offset : s->header_bytes + t->begin;
            uint64_t bytes = compressed ? t->stored_bytes : t->end - t->begin;
            const uint64_t at[] = {first, first + bytes / 2, first + bytes - 1};
            shard_path(path, &w, t->shard);
            (void)snprintf(says, sizeof says, "tensor '%s' in %s", t->name, s->name);
            for (size_t k = 0; k < 3; k++) {
                flip_byte(path, at[k]);
                assert_load_fails(r, s->device, 2, QC_ERR_CHECK, says, "");
                flip_byte(path, at[k]);
            }
        }
        char path[FX_PATH_BYTES];
        const qc_manifest_shard *s = &w.m.shards[0];
        shard_path(path, &w, 0);
        /* Of a compressed header some bits do not matter: those of its frame. */
        for (uint64_t at = compressed ? s->header_stored_bytes / 2 : 0;
             at < (compressed ? s->header_stored_bytes / 2 + 1 : s->header_bytes); at++) {
            flip_byte(path, at);
            assert_load_fails(r, 0, 1, QC_ERR_CHECK, "header of model-00001-of-", "");
            flip_byte(path, at);
        }
        if (compressed) {
            for (uint64_t at = s->file_bytes - s->table_bytes; at < s->file_bytes; at++) {
                flip_byte(path, at);
                assert_load_fails(r, 0, 1, QC_ERR_CHECK, s->name, "table");
                flip_byte(path, at);
            }
        }
        assert_loads(r, 0, 1, 0); /* it is as it was */
        assert_int_equal(truncate(path, 100), 0);
        assert_load_fails(r, 0, 1, QC_ERR_CHECK, "found 100", w.m.shards[0].name);
        qc_reader_close(r);
        drop_output(&w);
    }
}

/* A file that is cut while it is read is damaged, like one that was before. */
TEST(a_shard_that_is_cut_meanwhile)
{
    for (int compressed = 0; compressed < 2; compressed++) {
        world w;
        char path[FX_PATH_BYTES];
        qc_reader_shards *s = NULL;
        qc_error err = {0};
        size_t last = TENSORS - 1;
        make_output(&w, compressed, 0);
        qc_reader *r = open_reader(&w);
        const qc_reader_tensor *tensors = qc_reader_device_at(r, 0)->tensors;
        assert_int_equal(qc_reader_shards_open(&s, r, 0, NULL), QC_OK);
        while (tensors[last].bytes == 0)
            last--;
        shard_path(path, &w, (uint32_t)w.m.shard_count - 1);
        assert_int_equal(truncate(path, 100), 0);
        void *room = malloc(tensors[last].bytes);
        assert_int_equal(qc_reader_read(s, last, NULL, room, &err), QC_ERR_CHECK);
        assert_non_null(strstr(err.msg, "ends too early"));
        assert_non_null(strstr(err.msg, tensors[last].name));
        free(room);
        qc_reader_shards_close(s);
        qc_reader_close(r);
        drop_output(&w);
    }
}

/* A manifest that is right in itself, but not of these shards. */
TEST(frames_of_another_output_are_refused)
{
    for (int k = 0; k < 4; k++) {
        world w;
        make_output(&w, 1, 1);
        qc_manifest_tensor *long_one = w.m.tensors, *next = w.m.tensors + 1;
        while (strcmp(long_one->name, "l1.w") != 0)
            long_one++;
        while (next->begin == next->end)
            next++;
        if (k == 0)
            long_one->piece_bytes = 2 * MIB; /* not the pieces it was cut into */
        if (k == 1) { /* the end of one tensor as the beginning of the next */
            w.m.tensors[0].stored_bytes -= 1;
            next->stored_offset -= 1;
            next->stored_bytes += 1;
        }
        if (k == 2) { /* header and first tensor, the same */
            w.m.shards[0].header_stored_bytes += 1;
            w.m.tensors[0].stored_offset += 1;
            w.m.tensors[0].stored_bytes -= 1;
        }
        if (k == 3) { /* a table of another length, in a file of the same */
            w.m.shards[0].table_bytes -= 1;
            w.m.shards[0].header_stored_bytes += 1;
            for (size_t i = 0; i < TENSORS && w.m.tensors[i].shard == 0; i++)
                if (w.m.tensors[i].end > w.m.tensors[i].begin)
                    w.m.tensors[i].stored_offset += 1;
        }
        write_manifest(&w);
        qc_reader *r = open_reader(&w);
        const char *says = k == 3 ? "its seek table is not the one that was written"
                                  : "its frames are not those the manifest lists";
        const qc_manifest_shard *s = &w.m.shards[k == 0 ? long_one->shard : 0];
        assert_load_fails(r, s->device, 2, QC_ERR_CHECK, s->name, says);
        qc_reader_close(r);
        drop_output(&w);
    }
}

/* A manifest that is right in itself, but does not say what the shards' headers say; what else may
 * differ is in tests/cli/test_verify.py. */
TEST(headers_that_say_something_else_are_refused)
{
    for (int compressed = 0; compressed < 2; compressed++) {
        world w;
        make_output(&w, compressed, 1);
        qc_manifest_tensor *t = w.m.tensors;
        while (strcmp(t->name, "l0.w") != 0)
            t++;
        t->dtype = QC_DTYPE_I8;
        write_manifest(&w);
        qc_reader *r = open_reader(&w);
        assert_load_fails(r, 0, 2, QC_ERR_CHECK, "header of model-00001-of-",
                          "tensor 'l0.w' is U8 [1000] from byte ");
        qc_reader_close(r);
        drop_output(&w);
    }
}

/* A manifest that is right in itself, of 2 PiB: no list of their pieces is made. */
TEST(sizes_that_no_file_has_are_not_believed)
{
    for (int compressed = 0; compressed < 2; compressed++) {
        const uint64_t more = (uint64_t)1 << 51;
        world w;
        qc_error err = {0};
        qc_reader *r = NULL;
        make_output(&w, compressed, 0);
        qc_manifest_tensor *t = &w.m.tensors[TENSORS - 1];
        t->dims[0] += more;
        t->end += more;
        t->piece_bytes = MIB;
        w.m.shards[t->shard].content_bytes += more;
        if (compressed) { /* is not written by us */
            SCOPED(qc_strbuf) text = {.max = MIB};
            assert_int_equal(qc_manifest_write(&w.m, &text, &err), QC_ERR_INPUT);
            assert_non_null(strstr(err.msg, "frames"));
        } else {
            write_manifest(&w);
            r = open_reader(&w);
            assert_load_fails(r, 0, 2, QC_ERR_CHECK, "expected 22517998", "bytes, found");
        }
        qc_reader_close(r);
        drop_output(&w);
    }
}

/* The plain form has no checksum below the digests: what is skipped is not looked at. */
TEST(digests_are_skipped_on_request)
{
    world w;
    keeper k;
    char path[FX_PATH_BYTES];
    make_output(&w, 0, 1);
    qc_reader *r = open_reader(&w);
    shard_path(path, &w, 0);
    flip_byte(path, w.m.shards[0].header_bytes);
    qc_reader_options o = keep_options(&k, 1);
    o.skip_digests = 1;
    o.done = NULL;
    assert_int_equal(qc_reader_load(r, 0, &o, NULL), QC_OK);
    keeper_deinit(&k);
    qc_reader_close(r);
    drop_output(&w);
    make_output(&w, 1, 1); /* the checksums of frames are still looked at, stored or compressed */
    r = open_reader(&w);
    for (size_t i = 4; i < 7; i += 2) {
        const qc_manifest_tensor *t = &w.m.tensors[i];
        assert_true((t->stored_bytes == qc_raw_frame_bytes(2 * MIB)) == (i == 6));
        assert_loads(r, w.m.shards[t->shard].device, 1, 1);
        shard_path(path, &w, t->shard);
        flip_byte(path, t->stored_offset + t->stored_bytes / 3);
        o = keep_options(&k, 1);
        o.skip_digests = 1;
        assert_int_equal(qc_reader_load(r, w.m.shards[t->shard].device, &o, NULL), QC_ERR_CHECK);
        keeper_deinit(&k);
        flip_byte(path, t->stored_offset + t->stored_bytes / 3);
    }
    qc_reader_close(r);
    drop_output(&w);
}

TEST(room_for_one_tensor_is_enough)
{
    world w;
    make_output(&w, 1, 0);
    qc_reader *r = open_reader(&w);
    for (unsigned threads = 1; threads <= 8; threads++) {
        keeper k;
        qc_error err = {0};
        qc_reader_options o = keep_options(&k, threads);
        k.one_at_a_time = 1;
        if (qc_reader_load(r, 0, &o, &err) != QC_OK)
            fail_msg("%s", err.msg);
        assert_int_equal(k.whole, TENSORS);
        keeper_deinit(&k);
        /* A failure wakes who waits for room. */
        o = keep_options(&k, threads);
        k.one_at_a_time = 1;
        k.fail_done = "l1.w";
        assert_int_equal(qc_reader_load(r, 0, &o, &err), QC_ERR_IO);
        assert_string_equal(err.msg, "the copy of 'l1.w' failed");
        assert_int_equal(k.stops, 1);
        keeper_deinit(&k);
    }
    qc_reader_close(r);
    drop_output(&w);
}

TEST(callers_errors_come_back)
{
    world w;
    keeper k;
    qc_error err = {0};
    make_output(&w, 1, 1);
    qc_reader *r = open_reader(&w);
    qc_reader_options o = keep_options(&k, 3);
    k.refuse = "l2.w";
    assert_int_equal(qc_reader_load(r, 1, &o, &err), QC_ERR_NOMEM);
    assert_non_null(strstr(err.msg, "tensor 'l2.w' in model-0000"));
    assert_int_equal(k.stops, 1);
    keeper_deinit(&k);
    o = keep_options(&k, 1);
    assert_int_equal(qc_reader_load(r, 4, &o, &err), QC_ERR_DEVICE);
    assert_int_equal(qc_reader_load(r, SIZE_MAX, &o, &err), QC_ERR_DEVICE);
    o.threads = 1025;
    assert_int_equal(qc_reader_load(r, 0, &o, &err), QC_ERR_USAGE);
    assert_string_equal(err.msg, "1025 threads; expected 1 to 1024, or 0 for one per processor");
    o.threads = 1;
    o.place = NULL;
    assert_int_equal(qc_reader_load(r, 0, &o, &err), QC_ERR_USAGE);
    qc_interrupt();
    o.place = keep_place;
    assert_int_equal(qc_reader_load(r, 0, &o, &err), QC_ERR_INTERRUPTED);
    qc_interrupt_clear();
    keeper_deinit(&k);
    size_t index = 0;
    assert_int_equal(qc_reader_find_device(r, "cuda:7", &index, &err), QC_ERR_DEVICE);
    assert_non_null(strstr(err.msg, "'cuda:7'"));
    assert_non_null(strstr(err.msg, "cuda:0, cuda:1, cuda:2, cpu"));
    qc_reader_close(r);
    drop_output(&w);
}

TEST(what_is_no_output_is_refused)
{
    fx_dir d;
    qc_reader *r = NULL;
    qc_error err = {0};
    fx_make_dir(&d);
    assert_int_equal(qc_reader_open(&r, d.path, &err), QC_ERR_INPUT);
    assert_null(r);
    fx_puts(d.path, QC_MANIFEST_NAME, "{}");
    assert_int_equal(qc_reader_open(&r, d.path, &err), QC_ERR_CHECK);
    assert_null(r);
    qc_reader_close(NULL);
}

TEST(null_is_refused)
{
    world w;
    keeper k;
    size_t index = 0;
    uint64_t n = 0;
    qc_dtype t = QC_DTYPE_U8;
    qc_error err = {0};
    const qc_reader_pieces none = {0};
    make_output(&w, 0, 1);
    qc_reader *r = open_reader(&w), *other = NULL;
    qc_reader_options o = keep_options(&k, 1);
    assert_null(qc_reader_device_at(r, 4));
    assert_null(qc_reader_device_at(r, SIZE_MAX));
    assert_null(qc_reader_device_at(NULL, 0));
    assert_int_equal(qc_reader_device_count(NULL), 0);
    assert_int_equal(qc_reader_open(NULL, w.dir.path, &err), QC_ERR_USAGE);
    assert_int_equal(qc_reader_open(&other, NULL, &err), QC_ERR_USAGE);
    assert_string_equal(err.msg, "qc_reader_open: dir is NULL");
    assert_int_equal(qc_reader_find_device(NULL, "cpu", &index, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_reader_find_device(r, NULL, &index, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_reader_find_device(r, "cpu", NULL, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_reader_load(NULL, 0, &o, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_reader_load(r, 0, NULL, NULL), QC_ERR_USAGE);
    o.place = NULL;
    o.pieces = &none;
    assert_int_equal(qc_reader_load(r, 0, &o, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_dtype_from_name(NULL, 0, &t), 1);
    assert_int_equal(qc_dtype_from_name("U8", 2, NULL), 1);
    assert_null(qc_dtype_name((qc_dtype)99));
    assert_int_equal(qc_dtype_bits((qc_dtype)99), 0);
    assert_int_equal(qc_shape_elems(NULL, 1, &n, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_shape_elems(&n, 1, NULL, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_shape_bytes(NULL, 1, t, &n, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_shape_bytes(&n, 1, t, NULL, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_shape_bytes(&n, 1, (qc_dtype)99, &n, NULL), QC_ERR_USAGE);
    qc_error_prefix(NULL, "x");
    qc_reader_close(r);
    keeper_deinit(&k);
    drop_output(&w);
}

TEST(out_of_memory_is_said)
{
    world w;
    make_output(&w, 1, 1);
    EACH_ALLOCATION_FAILS (fault, 0) {
        SCOPED(keeper) k;
        qc_reader *r = NULL;
        qc_reader_options o = keep_options(&k, 1);
        fault.st = qc_reader_open(&r, w.dir.path, NULL);
        if (fault.st == QC_OK)
            fault.st = qc_reader_load(r, 1, &o, NULL);
        qc_reader_close(r);
        assert_true(fault.st != QC_OK || fault.at > 20);
    }
    drop_output(&w);
}

TEST_GROUP(make_contents, free_contents)
