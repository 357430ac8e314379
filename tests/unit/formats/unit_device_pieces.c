/* formats/device_reader.h: loads in pieces */
#include "tests/fixtures/device_output_fixture.h"

#include <stdatomic.h>

/* A caller that has tensors in pieces, through one buffer a worker. */
typedef struct {
    unsigned char *whole[TENSORS];
    void *buffers[4];
    atomic_uint_fast64_t put[TENSORS];
    atomic_uint tensors, stops;
    atomic_int fail_room, fail_put; /* in so many pieces */
} piecer;

static qc_status piece_room(void *ctx, unsigned worker, size_t bytes, void **piece, qc_error *err)
{
    piecer *p = ctx;
    assert_true(worker < 4);
    if (atomic_fetch_sub(&p->fail_room, 1) == 1)
        QC_FAIL(err, QC_ERR_NOMEM, "no room");
    assert_null(p->buffers[worker]);
    *piece = p->buffers[worker] = malloc(bytes); /* exact: sanitizers see what lies beyond */
    return QC_OK;
}

static qc_status piece_put(void *ctx, unsigned worker, const qc_reader_tensor *t, uint64_t offset,
                           void *piece, size_t bytes, qc_error *err)
{
    piecer *p = ctx;
    if (atomic_fetch_sub(&p->fail_put, 1) == 1)
        QC_FAIL(err, QC_ERR_IO, "the copy failed");
    assert_ptr_equal(piece, p->buffers[worker]);
    assert_true(offset <= t->bytes && bytes <= t->bytes - offset);
    memcpy(p->whole[t->index] + offset, piece, bytes);
    atomic_fetch_add(&p->put[t->index], bytes);
    free(piece);
    p->buffers[worker] = NULL;
    return QC_OK;
}

static qc_status piece_done(void *ctx, const qc_reader_tensor *t, void *dst, qc_error *err)
{
    piecer *p = ctx;
    (void)err;
    assert_null(dst);
    assert_int_equal(atomic_load(&p->put[t->index]), t->bytes);
    assert_memory_equal(p->whole[t->index], content_of(t->name), t->bytes);
    atomic_fetch_add(&p->tensors, 1);
    return QC_OK;
}

static void piece_stopped(void *ctx)
{
    piecer *p = ctx;
    atomic_fetch_add(&p->stops, 1);
}

static const qc_reader_pieces in_pieces = {piece_room, piece_put};

static qc_status load_in_pieces(piecer *p, const qc_reader *r, size_t device, unsigned threads,
                                int fail_room, int fail_put, qc_error *err)
{
    const qc_reader_device *d = qc_reader_device_at(r, device);
    memset(p, 0, sizeof *p);
    atomic_init(&p->fail_room, fail_room);
    atomic_init(&p->fail_put, fail_put);
    for (size_t i = 0; i < d->tensor_count; i++) {
        p->whole[i] = malloc(d->tensors[i].bytes + 1);
        assert_non_null(p->whole[i]);
    }
    qc_reader_options o = {.threads = threads,
                           .pieces = &in_pieces,
                           .done = piece_done,
                           .stopped = piece_stopped,
                           .ctx = p};
    qc_status st = qc_reader_load(r, device, &o, err);
    for (size_t i = 0; i < TENSORS; i++)
        free(p->whole[i]);
    for (size_t i = 0; i < 4; i++)
        free(p->buffers[i]);
    return st;
}

static void *never_place(void *ctx, const qc_reader_tensor *t)
{
    (void)ctx;
    fail_msg("'%s' is placed", t->name);
    return NULL;
}

TEST(tensors_come_in_pieces)
{
    for (int compressed = 0; compressed < 2; compressed++) {
        world w;
        piecer p;
        qc_error err = {0};
        make_output(&w, compressed, 1);
        qc_reader *r = open_reader(&w);
        for (size_t i = 0; i < 4; i++) {
            const qc_reader_device *d = qc_reader_device_at(r, i);
            for (unsigned threads = 1; threads <= 4; threads++) {
                assert_int_equal(load_in_pieces(&p, r, i, threads, 0, 0, &err), QC_OK);
                assert_int_equal(p.tensors, d->tensor_count);
                assert_int_equal(p.stops, 0);
            }
        }
        static const size_t largest[] = {MIB, 2 * MIB, 0, MIB};
        for (size_t i = 0; i < 4; i++)
            assert_int_equal(qc_reader_device_at(r, i)->max_piece_bytes, largest[i]);
        qc_reader_options both = {.pieces = &in_pieces, .place = never_place};
        assert_int_equal(qc_reader_load(r, 0, &both, &err), QC_ERR_USAGE);
        assert_int_equal(load_in_pieces(&p, r, 1, 2, 3, 0, &err), QC_ERR_NOMEM);
        assert_string_equal(err.msg, "no room");
        assert_int_equal(p.stops, 1);
        assert_int_equal(load_in_pieces(&p, r, 1, 2, 0, 2, &err), QC_ERR_IO);
        assert_string_equal(err.msg, "the copy failed");
        assert_int_equal(p.stops, 1);
        char path[FX_PATH_BYTES];
        shard_path(path, &w, w.m.tensors[6].shard);
        flip_byte(path, compressed ? w.m.tensors[6].stored_offset + 500
                                   : w.m.shards[w.m.tensors[6].shard].header_bytes +
                                         w.m.tensors[6].begin + 500);
        assert_int_equal(
            load_in_pieces(&p, r, w.m.shards[w.m.tensors[6].shard].device, 1, 0, 0, &err),
            QC_ERR_CHECK);
        assert_int_equal(p.stops, 1);
        qc_reader_close(r);
        drop_output(&w);
    }
}

TEST_GROUP(make_contents, free_contents)
