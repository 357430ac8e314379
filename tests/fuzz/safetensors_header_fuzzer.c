/* Any bytes as a whole file: refused with a message, or a header that keeps every rule, and that
 * reads back the same after building. The data itself is never touched, so the file's size may be
 * larger than the input: the last byte of the input adds up to 255 bytes of data. */
#include "base/checked.h"
#include "fuzz_check.h"
#include "tests/fixtures/st_header.h"

#include <string.h>

static void check_rules(const qc_st_header *h, uint64_t data_bytes)
{
    uint64_t end = 0;
    for (size_t i = 0; i < h->tensor_count; i++) {
        const qc_st_tensor *t = &h->tensors[i];
        uint64_t bits = qc_dtype_bits(t->dtype);
        FUZZ_CHECK(t->ndim <= QC_MAX_DIMS);
        for (unsigned d = 0; d < t->ndim; d++)
            FUZZ_CHECK(!qc_mul_u64(bits, t->dims[d], &bits) || t->begin == t->end);
        FUZZ_CHECK(t->begin == end && t->end >= end);
        FUZZ_CHECK(t->begin == t->end || bits == (t->end - t->begin) * 8);
        FUZZ_CHECK(strcmp(t->name, "__metadata__") != 0);
        end = t->end;
    }
    FUZZ_CHECK(end == data_bytes && h->data_bytes == data_bytes);
}

static void check_round_trip(const qc_st_header *h, uint64_t data_bytes)
{
    qc_strbuf out;
    qc_st_header again;
    qc_strbuf_init(&out, 200000000);
    FUZZ_CHECK(st_header_build(&out, h->tensors, h->tensor_count, h->meta, h->meta_count, NULL) ==
               QC_OK);
    FUZZ_CHECK(out.len % 8 == 0);
    FUZZ_CHECK(qc_st_header_parse(&again, out.data + 8, out.len - 8, data_bytes, NULL) == QC_OK);
    FUZZ_CHECK(again.tensor_count == h->tensor_count && again.meta_count == h->meta_count);
    for (size_t i = 0; i < h->tensor_count; i++) {
        const qc_st_tensor *a = &h->tensors[i];
        const qc_st_tensor *b = &again.tensors[i];
        FUZZ_CHECK(strcmp(a->name, b->name) == 0 && a->dtype == b->dtype && a->ndim == b->ndim);
        FUZZ_CHECK(memcmp(a->dims, b->dims, sizeof a->dims) == 0);
        FUZZ_CHECK(a->begin == b->begin && a->end == b->end);
    }
    for (size_t i = 0; i < h->meta_count; i++)
        FUZZ_CHECK(strcmp(st_header_meta(&again, h->meta[i].key), h->meta[i].value) == 0);
    qc_st_header_deinit(&again);
    qc_strbuf_deinit(&out);
}

const fuzz_limits fuzz_may_allocate = {1u << 20, 128};

int fuzz_one(const uint8_t *data, size_t size)
{
    uint64_t file_bytes = size;
    uint64_t n = 0;
    qc_st_header h;
    qc_error err = {0};
    if (size > 8)
        file_bytes += data[size - 1];
    qc_status st = qc_st_header_length(data, size < 64 ? size : 64, file_bytes, &n, &err);
    FUZZ_CHECK(st == QC_OK || qc_status_exit_code(st) == 3);
    FUZZ_CHECK(st == QC_OK || err.msg[0]);
    if (st != QC_OK || n > size - 8)
        return 0;
    uint64_t data_bytes = file_bytes - 8 - n;
    st = qc_st_header_parse(&h, (const char *)data + 8, (size_t)n, data_bytes, &err);
    if (st != QC_OK) {
        FUZZ_CHECK(qc_status_exit_code(st) == 3 && err.msg[0]);
        FUZZ_CHECK(!h.tensors && !h.meta && !h.arena.head);
        return 0;
    }
    check_rules(&h, data_bytes);
    check_round_trip(&h, data_bytes);
    qc_st_header_deinit(&h);
    return 0;
}
