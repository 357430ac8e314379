/* Sizes, rates and times as people read them. Units are decimal, as disks and files are sold: 1 KB
 * = 1000 bytes. */
#ifndef QC_CONVERT_SIZE_TEXT_H
#define QC_CONVERT_SIZE_TEXT_H

#include "base/dtype.h"
#include "base/status.h"

#include <stdint.h>

#define QC_SIZE_TEXT_BYTES 32

/* "0 B", "999 B", "1.23 KB", "45.6 GB": three digits, rounded, and never "1000 KB". Each of these
 * functions returns out. */
const char *qc_text_bytes(char out[QC_SIZE_TEXT_BYTES], uint64_t bytes);
/* "812 MB/s", or "-" when no time has passed. */
const char *qc_text_rate(char out[QC_SIZE_TEXT_BYTES], uint64_t bytes, double seconds);
/* "0.84 s", "12.3 s", "3:05 min", "2:03:45 h". */
const char *qc_text_seconds(char out[QC_SIZE_TEXT_BYTES], double seconds);
/* "8,030,261,248". */
const char *qc_text_count(char out[QC_SIZE_TEXT_BYTES], uint64_t count);
/* "[4096, 14336]", or "[]" for a scalar. ndim <= QC_MAX_DIMS. */
#define QC_SHAPE_TEXT_BYTES (QC_MAX_DIMS * 22 + 3)
const char *qc_text_shape(char out[QC_SHAPE_TEXT_BYTES], const uint64_t *dims, unsigned ndim);

/* Parses "5GB" (10^9), "512MiB" (2^20), "4096" or "1.5GB". Case does not matter, and one blank may
 * stand before the unit. A lone prefix ("5G") is decimal, and "5Gi" is "5GiB". Anything else is
 * QC_ERR_USAGE. */
QC_NODISCARD qc_status qc_parse_size(const char *text, const char *what, uint64_t *out,
                                     qc_error *err);

#endif
