/* Any bytes as a zstd seekable file: the table is refused, or its frames lie in the file without
 * gap and in order. Then the same bytes as a compressed safetensors file: refused, or all of its
 * data can be asked for. */
#define _GNU_SOURCE /* memfd_create */
#include "formats/safetensors_file.h"
#include "fuzz_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define DATA_MAX_BYTES (1u << 20) /* more is not read */

static void check_table(const qc_seek_table *t, uint64_t file_bytes)
{
    uint64_t stored = 0;
    uint64_t content = 0;
    for (size_t i = 0; i < t->count; i++) {
        const qc_frame *f = &t->frames[i];
        FUZZ_CHECK(f->stored_offset == stored && f->content_offset == content);
        FUZZ_CHECK(f->content_bytes <= QC_FRAME_READ_MAX_BYTES);
        stored += f->stored_bytes;
        content += f->content_bytes;
    }
    FUZZ_CHECK(stored == t->table_offset && content == t->content_bytes);
    FUZZ_CHECK(t->table_offset + t->table_bytes == file_bytes);
    for (size_t i = 0; i < t->count; i++) {
        const qc_frame *f = &t->frames[i];
        if (f->content_bytes)
            FUZZ_CHECK(qc_seek_table_find(t, f->content_offset) == i &&
                       qc_seek_table_find(t, f->content_offset + f->content_bytes - 1) == i);
    }
}

static void read_data(const qc_st_file *f)
{
    qc_st_cursor *cur = NULL;
    uint64_t bytes = f->header.data_bytes;
    FUZZ_CHECK(qc_st_cursor_create(&cur, NULL) == QC_OK);
    if (bytes <= DATA_MAX_BYTES) {
        unsigned char *whole = malloc((size_t)bytes + 1);
        FUZZ_CHECK(whole != NULL);
        qc_error err = {0};
        qc_status st = qc_st_file_read(f, cur, 0, whole, (size_t)bytes, &err);
        FUZZ_CHECK(st == QC_OK || (qc_status_exit_code(st) == 3 && err.msg[0]));
        /* In pieces the same comes out. */
        for (uint64_t i = 0; st == QC_OK && i < bytes && i < 300; i++) {
            unsigned char b = 0;
            FUZZ_CHECK(qc_st_file_read(f, cur, bytes - 1 - i, &b, 1, NULL) == QC_OK);
            FUZZ_CHECK(b == whole[bytes - 1 - i]);
        }
        free(whole);
    }
    qc_st_cursor_destroy(cur);
}

const fuzz_limits fuzz_may_allocate = {400u << 20, 64};

int fuzz_one(const uint8_t *data, size_t size)
{
    char path[64];
    qc_error err = {0};
    qc_seek_table table;
    qc_st_file st_file;
    int fd = memfd_create("seek_table", 0);
    FUZZ_CHECK(fd >= 0);
    FUZZ_CHECK(size == 0 || write(fd, data, size) == (ssize_t)size);
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    qc_file file = {fd, path};
    qc_status st = qc_seek_table_read(&table, &file, &err);
    if (st == QC_OK) {
        check_table(&table, size);
        qc_seek_table_deinit(&table);
    } else {
        FUZZ_CHECK(qc_status_exit_code(st) == 3 && err.msg[0]);
    }
    st = qc_st_file_open(&st_file, path, &err);
    if (st == QC_OK) {
        read_data(&st_file);
        qc_st_file_close(&st_file);
    } else {
        FUZZ_CHECK(qc_status_exit_code(st) == 3 && err.msg[0]);
    }
    (void)close(fd);
    return 0;
}
