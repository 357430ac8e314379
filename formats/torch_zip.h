/* The zip container that torch.save writes: where each stored entry's bytes lie in the file.
 * Source: PKWARE APPNOTE.TXT 6.3.10, sections 4.3 to 4.5; caffe2/serialize/inline_container.cc.
 *
 *   local header | name | extra (padding to 64 bytes) | data | descriptor   per entry
 *   central directory | zip64 end record and locator | end record
 *
 * Only what can be read in place is accepted: entries that are stored, not compressed and not
 * encrypted, on one disk. Everything in the file is checked against the file's size and against the
 * other places that say the same. Names are data: nothing is ever written under them.
 * Thread-safe: yes, once read (no shared state). */
#ifndef QC_FORMATS_TORCH_ZIP_H
#define QC_FORMATS_TORCH_ZIP_H

#include "formats/file_io.h"

typedef struct {
    const char *name;
    uint64_t header_offset; /* of the local header, from the start of the file */
    uint64_t data_offset;   /* of the data */
    uint64_t bytes;
    uint32_t crc32; /* 0 where the writer was told not to compute it */
} qc_zip_entry;

typedef struct {
    qc_arena arena;        /* owns all below */
    qc_zip_entry *entries; /* sorted bytewise by name, each name once */
    size_t count;
} qc_torch_zip;

/* Reads the directory and every local header of f, which has file_bytes.
 * QC_ERR_TRUNCATED where the file ends too early, QC_ERR_UNSUPPORTED for compressed, encrypted and
 * split archives, QC_ERR_INPUT for one that contradicts itself. Messages do not name the file. On
 * error *out is empty. */
QC_NODISCARD qc_status qc_torch_zip_read(qc_torch_zip *out, const qc_file *f, uint64_t file_bytes,
                                         qc_error *err);
void qc_torch_zip_deinit(qc_torch_zip *z);
/* Finds an entry by its exact name; NULL if there is none. */
const qc_zip_entry *qc_torch_zip_find(const qc_torch_zip *z, const char *name);
/* Reads all of the entry's bytes to dst and checks them against its CRC-32 unless that is 0. */
QC_NODISCARD qc_status qc_torch_zip_load(const qc_file *f, const qc_zip_entry *e, void *dst,
                                         qc_error *err);
/* Computes CRC-32 as zip uses it (polynomial 0xedb88320, reflected). */
uint32_t qc_zip_crc32(const void *bytes, size_t len);

#endif
