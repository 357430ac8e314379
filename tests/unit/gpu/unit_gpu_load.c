/* convert/gpu/gpu_load.h, on the CPU shim */
#include "convert/gpu/gpu_load.h"

#include "kernels/cuda_device.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/device_output_fixture.h"

#include <shim_control.h>

typedef struct {
    void *at[TENSORS];
    const char *refuse;
    unsigned placed;
} room;

static void *place_on_gpu(void *ctx, const qc_reader_tensor *t)
{
    room *r = ctx;
    assert_int_equal(t->index, r->placed++); /* in the order of the list */
    if (r->refuse && strcmp(r->refuse, t->name) == 0)
        return NULL;
    if (qc_cuda_malloc(&r->at[t->index], t->bytes, NULL) != QC_OK)
        return NULL;
    return r->at[t->index];
}

static void drop_room(room *r)
{
    for (size_t i = 0; i < TENSORS; i++)
        qc_cuda_free(r->at[i]);
}

static qc_status load(room *r, const qc_reader *reader, size_t device, unsigned threads,
                      const char *refuse, qc_error *err)
{
    qc_gpu_load_options o = {.threads = threads, .place = place_on_gpu, .ctx = r};
    memset(r, 0, sizeof *r);
    r->refuse = refuse;
    return qc_gpu_load(reader, device, 0, &o, err);
}

static void assert_there(const room *r, const qc_reader_device *d)
{
    qc_cuda_stream s = NULL;
    assert_int_equal(qc_cuda_stream_create(&s, NULL), QC_OK);
    for (size_t i = 0; i < d->tensor_count; i++) {
        const qc_reader_tensor *t = &d->tensors[i];
        unsigned char *got = malloc(t->bytes + 1);
        assert_non_null(got);
        assert_int_equal(qc_cuda_to_host(got, r->at[i], t->bytes, s, NULL), QC_OK);
        assert_int_equal(qc_cuda_stream_synchronize(s, NULL), QC_OK);
        assert_memory_equal(got, content_of(t->name), t->bytes);
        free(got);
    }
    qc_cuda_stream_destroy(s);
}

TEST(every_tensor_is_on_the_gpu)
{
    for (int compressed = 0; compressed < 2; compressed++) {
        world w;
        room at;
        qc_error err = {0};
        make_output(&w, compressed, 1);
        qc_reader *r = open_reader(&w);
        for (size_t i = 0; i < 4; i++) {
            for (unsigned threads = 0; threads < 4; threads++) {
                if (load(&at, r, i, threads, NULL, &err) != QC_OK)
                    fail_msg("%s", err.msg);
                assert_there(&at, qc_reader_device_at(r, i));
                drop_room(&at);
            }
        }
        qc_reader_close(r);
        drop_output(&w);
    }
    assert_int_equal(qc_shim_allocations(NULL), 0);
}

TEST(what_fails_is_said)
{
    world w;
    room at;
    qc_error err = {0};
    char path[FX_PATH_BYTES];
    make_output(&w, 1, 1);
    qc_reader *r = open_reader(&w);
    assert_int_equal(load(&at, r, 1, 2, "l2.w", &err), QC_ERR_NOMEM);
    assert_non_null(strstr(err.msg, "tensor 'l2.w' in model-0000"));
    drop_room(&at);
    assert_int_equal(load(&at, r, 4, 2, NULL, &err), QC_ERR_DEVICE);
    qc_gpu_load_options o = {.place = place_on_gpu, .ctx = &at};
    assert_int_equal(qc_gpu_load(r, 0, 1, &o, &err), QC_ERR_DEVICE);
    o.place = NULL;
    assert_int_equal(qc_gpu_load(r, 0, 0, &o, &err), QC_ERR_USAGE);
    /* Nothing to pin: two tensors of device 3 are placed before. */
    qc_shim_fail_malloc(3);
    assert_int_equal(load(&at, r, 3, 2, NULL, &err), QC_ERR_NOMEM);
    qc_shim_fail_malloc(0);
    assert_int_equal(at.placed, 2);
    drop_room(&at);
    shard_path(path, &w, w.m.tensors[8].shard);
    flip_byte(path, w.m.tensors[8].stored_offset + w.m.tensors[8].stored_bytes / 2);
    assert_int_equal(load(&at, r, 3, 2, NULL, &err), QC_ERR_CHECK);
    assert_non_null(strstr(err.msg, w.m.tensors[8].name));
    drop_room(&at);
    qc_reader_close(r);
    drop_output(&w);
    assert_int_equal(qc_shim_allocations(NULL), 0);
}

TEST(out_of_memory_is_said)
{
    world w;
    make_output(&w, 1, 1);
    qc_reader *r = open_reader(&w);
    EACH_ALLOCATION_FAILS (fault, 0) {
        room at;
        fault.st = load(&at, r, 3, 1, NULL, NULL);
        drop_room(&at);
    }
    qc_reader_close(r);
    drop_output(&w);
    assert_int_equal(qc_shim_allocations(NULL), 0);
}

TEST_GROUP(make_contents, free_contents)
