/* kernels/cuda_upload.h */
#include "tests/fixtures/quant_device_fixture.h"

#include "base/workers.h"
#include "kernels/cuda_upload.h"

#ifdef QC_CUDA_SHIM
#include <shim_control.h>
#endif

#define WORKERS    3u
#define PIECES     7u
#define SLOT_BYTES ((size_t)70001)

typedef struct {
    qc_cuda_upload *upload;
    unsigned char *memory; /* on the device: PIECES slots for each worker */
} sending;

static size_t piece_bytes(unsigned worker, unsigned piece)
{
    return SLOT_BYTES - worker * 1000u - piece * (piece == 3 ? SLOT_BYTES / 4 : 7u);
}

static unsigned char piece_byte(unsigned worker, unsigned piece, size_t i)
{
    return (unsigned char)((i * 2654435761u + worker * 977u + piece * 131u) >> 7);
}

static qc_status send_worker(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    sending *s = ctx;
    (void)team;
    for (unsigned k = 0; k < PIECES; k++) {
        void *pinned = NULL;
        size_t bytes = piece_bytes(index, k);
        QC_TRY(qc_cuda_upload_room(s->upload, index, &pinned, err));
        for (size_t i = 0; i < bytes; i++)
            ((unsigned char *)pinned)[i] = piece_byte(index, k, i);
        QC_TRY(qc_cuda_upload_send(s->upload, index, s->memory + (index * PIECES + k) * SLOT_BYTES,
                                   bytes, err));
    }
    return QC_OK;
}

/* A slot that is filled anew before its copy is done would show: work on the shim is late. */
TEST(test_every_piece_arrives)
{
    sending s;
    void *v = NULL;
    size_t all = WORKERS * PIECES * SLOT_BYTES;
    QD_OK(qc_cuda_malloc(&v, all, &qd.err));
    s.memory = v;
    QD_OK(qc_cuda_fill(v, QD_POISON, all, qd.stream, &qd.err));
    QD_OK(qc_cuda_stream_synchronize(qd.stream, &qd.err));
    QD_OK(qc_cuda_upload_create(&s.upload, &qd.device, WORKERS, SLOT_BYTES, &qd.err));
    unsigned char *got = malloc(all);
    assert_non_null(got);
    for (unsigned round = 0; round < 2; round++) { /* and again after finish */
        QD_OK(qc_team_run(WORKERS, send_worker, &s, &qd.err));
        QD_OK(qc_cuda_upload_finish(s.upload, &qd.err));
        QD_OK(qc_cuda_to_host(got, s.memory, all, qd.stream, &qd.err));
        QD_OK(qc_cuda_stream_synchronize(qd.stream, &qd.err));
        for (unsigned w = 0; w < WORKERS; w++) {
            for (unsigned k = 0; k < PIECES; k++) {
                const unsigned char *p = got + (w * PIECES + k) * SLOT_BYTES;
                size_t bytes = piece_bytes(w, k), i = 0;
                while (i < bytes && p[i] == piece_byte(w, k, i))
                    i++;
                QT_CHECK(i == bytes, "worker %u, piece %u: byte %zu of %zu", w, k, i, bytes);
                for (; i < SLOT_BYTES; i++)
                    QT_CHECK(p[i] == QD_POISON, "worker %u, piece %u: byte %zu behind it", w, k, i);
            }
        }
    }
    qc_cuda_upload_destroy(s.upload);
    /* Under way when it ends. */
    QD_OK(qc_cuda_upload_create(&s.upload, &qd.device, WORKERS, SLOT_BYTES, &qd.err));
    QD_OK(send_worker(NULL, 1, &s, &qd.err));
    qc_cuda_upload_destroy(s.upload);
    qc_cuda_free(s.memory);
    free(got);
}

TEST(test_wrong_calls)
{
    qc_cuda_upload *u = NULL;
    void *pinned = NULL, *memory = NULL;
    assert_int_equal(qc_cuda_upload_create(&u, &qd.device, 0, 1, &qd.err), QC_ERR_USAGE);
    assert_int_equal(qc_cuda_upload_create(&u, &qd.device, 1, 0, &qd.err), QC_ERR_USAGE);
    assert_int_equal(qc_cuda_upload_create(&u, &qd.device, 4, SIZE_MAX / 2, &qd.err), QC_ERR_NOMEM);
    assert_null(u);
    qc_cuda_upload_destroy(NULL);
    QD_OK(qc_cuda_malloc(&memory, 64, &qd.err));
    QD_OK(qc_cuda_upload_create(&u, &qd.device, 1, 16, &qd.err));
    QD_OK(qc_cuda_upload_room(u, 0, &pinned, &qd.err));
    assert_int_equal(qc_cuda_upload_send(u, 0, memory, 17, &qd.err), QC_ERR_INTERNAL);
    QD_OK(qc_cuda_upload_send(u, 0, memory, 0, &qd.err));
    QD_OK(qc_cuda_upload_finish(u, &qd.err));
    qc_cuda_upload_destroy(u);
    qc_cuda_free(memory);
}

#ifdef QC_CUDA_SHIM
TEST(test_no_memory_to_pin)
{
    qc_cuda_upload *u = NULL;
    size_t before = qc_shim_allocations(NULL);
    qc_shim_fail_malloc(1);
    assert_int_equal(qc_cuda_upload_create(&u, &qd.device, 2, 1000, &qd.err), QC_ERR_NOMEM);
    qc_shim_fail_malloc(0);
    assert_null(u);
    assert_int_equal(qc_shim_allocations(NULL), before);
}
#endif

int main(void)
{
    qd_start();
    int failed = test_run_all(NULL);
    qd_end();
    return failed;
}
