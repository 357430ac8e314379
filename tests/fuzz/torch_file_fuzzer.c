/* Any bytes as a file of torch.save, through a real file, as the reader wants one; and the same
 * bytes as a bare pickle, which gets past CRC-32 and container. Refused with a message, or tensors
 * that lie in the file and keep their order. */
#include "formats/torch_file.h"
#include "formats/torch_pickle.h"
#include "fuzz_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void check_file(const qc_torch_file *f)
{
    for (size_t i = 0; i < f->tensor_count; i++) {
        const qc_torch_tensor *t = &f->tensors[i];
        uint64_t bytes = 0;
        FUZZ_CHECK(t->ndim <= QC_MAX_DIMS);
        FUZZ_CHECK(qc_shape_bytes(t->dims, t->ndim, t->dtype, &bytes, NULL) == QC_OK);
        FUZZ_CHECK(bytes == t->bytes);
        FUZZ_CHECK(bytes == 0 || (t->begin <= f->file_bytes && bytes <= f->file_bytes - t->begin));
        FUZZ_CHECK(i == 0 || strcmp(t[-1].name, t->name) < 0);
    }
}

static void check_pickle(const qc_pickle *p, size_t size)
{
    FUZZ_CHECK(p->used_bytes <= size && p->root.kind != QC_PICKLE_UNSET);
    FUZZ_CHECK(p->item_count <= size && p->pair_count <= size && p->container_count <= size);
    for (size_t i = 0; i < p->storage_count; i++)
        FUZZ_CHECK(p->storages[i].key + p->storages[i].key_bytes <= size);
    for (size_t i = 0; i < p->tensor_count; i++)
        FUZZ_CHECK(p->tensors[i].storage < p->storage_count);
}

const fuzz_limits fuzz_may_allocate = {4u << 20, 256};

int fuzz_one(const uint8_t *data, size_t size)
{
    char path[] = "/tmp/qconv-fuzz-torch-XXXXXX";
    qc_torch_file f;
    qc_pickle p;
    qc_error err = {0};
    int fd = mkstemp(path);
    FUZZ_CHECK(fd >= 0);
    FUZZ_CHECK(write(fd, data, size) == (ssize_t)size);
    FUZZ_CHECK(close(fd) == 0);
    qc_status st = qc_torch_file_open(&f, path, &err);
    FUZZ_CHECK(unlink(path) == 0);
    FUZZ_CHECK(st == QC_OK || (qc_status_exit_code(st) == 3 && err.msg[0]));
    if (st == QC_OK)
        check_file(&f);
    qc_torch_file_close(&f);
    st = qc_pickle_run(&p, data, size, &err);
    FUZZ_CHECK(st == QC_OK || (qc_status_exit_code(st) == 3 && err.msg[0]));
    if (st == QC_OK)
        check_pickle(&p, size);
    qc_pickle_deinit(&p);
    return 0;
}
