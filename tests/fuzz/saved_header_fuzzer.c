/* Any bytes as a saved header, with the digest they have and with the right one: refused, or its
 * parts cover it and it opens as the safetensors file it was saved of, without its data. */
#define _GNU_SOURCE /* memfd_create */
#include "formats/digest.h"
#include "formats/safetensors_file.h"
#include "fuzz_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

const fuzz_limits fuzz_may_allocate = {1u << 20, 768};

static void open_it(qc_saved_header *s, const unsigned char *bytes, size_t len)
{
    char path[64];
    unsigned char byte;
    qc_st_file f;
    qc_error err = {0};
    qc_st_cursor *cursor = NULL;
    int fd = memfd_create("saved_header", 0);
    FUZZ_CHECK(fd >= 0 && write(fd, bytes, len) == (ssize_t)len);
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    s->path = path;
    qc_status st = qc_st_file_open_saved(&f, "gone", s, &err);
    if (st == QC_OK) {
        void *header = malloc((size_t)f.data_offset);
        FUZZ_CHECK(header != NULL && qc_st_cursor_create(&cursor, NULL) == QC_OK);
        FUZZ_CHECK(f.data_offset + f.header.data_bytes == s->content_bytes);
        FUZZ_CHECK(qc_st_file_read_header(&f, cursor, header, NULL) == QC_OK);
        FUZZ_CHECK(memcmp(header, bytes + s->header_at, (size_t)s->header_bytes) == 0);
        FUZZ_CHECK(qc_st_file_read(&f, cursor, 0, &byte, 1, NULL) == QC_ERR_INPUT);
        qc_st_cursor_destroy(cursor);
        free(header);
        qc_st_file_close(&f);
    } else {
        FUZZ_CHECK(qc_status_exit_code(st) == 3 && err.msg[0]);
    }
    (void)close(fd);
}

static void check(const unsigned char *bytes, size_t len)
{
    qc_arena arena;
    qc_saved_header s;
    qc_error err = {0};
    qc_arena_init(&arena);
    qc_status st = qc_saved_header_parse(&s, &arena, bytes, len, &err);
    if (st == QC_OK) {
        FUZZ_CHECK(s.header_at + s.header_bytes + sizeof(qc_digest) == len);
        FUZZ_CHECK(s.name[0] && s.origin[0] && s.content_bytes >= s.header_bytes);
        open_it(&s, bytes, len);
    } else {
        FUZZ_CHECK(st == QC_ERR_INPUT && err.msg[0]);
    }
    qc_arena_deinit(&arena);
}

int fuzz_one(const uint8_t *data, size_t size)
{
    unsigned char *whole = malloc(size + sizeof(qc_digest));
    FUZZ_CHECK(whole != NULL);
    if (size)
        memcpy(whole, data, size);
    qc_digest d = qc_digest_bytes(whole, size);
    memcpy(whole + size, d.b, sizeof d.b);
    check(whole, size);
    check(whole, size + sizeof d.b);
    free(whole);
    return 0;
}
