/* Sizes, rates and times as people read them. Decimal units, as disks and files are sold:
 * 1 KB = 1000 bytes. */
#ifndef QC_CONVERT_SIZE_TEXT_H
#define QC_CONVERT_SIZE_TEXT_H

#include "base/dtype.h"
#include "base/status.h"

#include <stdint.h>

#define QC_SIZE_TEXT_BYTES 32

/* "0 B", "999 B", "1.23 KB", "45.6 GB": three digits, rounded, never "1000 KB".
 * Each returns out. */
const char *qc_text_bytes(char out[QC_SIZE_TEXT_BYTES], uint64_t bytes);
/* "812 MB/s"; "-" when no time has passed. */
const char *qc_text_rate(char out[QC_SIZE_TEXT_BYTES], uint64_t bytes, double seconds);
/* "0.84 s", "12.3 s", "3:05 min", "2:03:45 h". */
const char *qc_text_seconds(char out[QC_SIZE_TEXT_BYTES], double seconds);
/* "8,030,261,248". */
const char *qc_text_count(char out[QC_SIZE_TEXT_BYTES], uint64_t count);
/* "[4096, 14336]", "[]" for a scalar. ndim <= QC_MAX_DIMS. */
#define QC_SHAPE_TEXT_BYTES (QC_MAX_DIMS * 22 + 3)
const char *qc_text_shape(char out[QC_SHAPE_TEXT_BYTES], const uint64_t *dims, unsigned ndim);

/* "5GB" (10^9), "512MiB" (2^20), "4096", "1.5GB"; case does not matter, nor does one blank before
 * the unit; a lone prefix ("5G") is decimal, "5Gi" is "5GiB". QC_ERR_USAGE otherwise. */
QC_NODISCARD qc_status qc_parse_size(const char *text, const char *what, uint64_t *out,
                                     qc_error *err);

#endif
