#include "convert/calibrate/calibration_text.h"

#include "base/alloc.h"
#include "formats/file_io.h"

#include <string.h>
#include <zstd.h>

/* calibration_text.zst, which CMake makes an array of. */
extern const unsigned char qc_calibration_text_packed[];
extern const size_t qc_calibration_text_packed_bytes;

qc_status qc_calibration_text(qc_strbuf *out, qc_error *err)
{
    const unsigned char *packed = qc_calibration_text_packed;
    size_t len = qc_calibration_text_packed_bytes;
    unsigned long long bytes = ZSTD_getFrameContentSize(packed, len);
    void *text = NULL;
    if (bytes == ZSTD_CONTENTSIZE_ERROR || bytes == ZSTD_CONTENTSIZE_UNKNOWN)
        QC_FAIL(err, QC_ERR_INTERNAL, "the bundled calibration text is damaged");
    QC_TRY(qc_malloc(&text, (size_t)bytes, err));
    size_t r = ZSTD_decompress(text, (size_t)bytes, packed, len);
    qc_status st = QC_OK;
    if (ZSTD_isError(r) || r != bytes)
        st = QC_ERROR(err, QC_ERR_INTERNAL,
                      "the calibration text within this program is damaged: %s",
                      ZSTD_isError(r) ? ZSTD_getErrorName(r) : "short");
    else
        st = qc_strbuf_add(out, text, r, err);
    qc_free(text);
    return st;
}

qc_status qc_calibrate_text(const qc_plan_options *o, qc_strbuf *out, qc_error *err)
{
    return strcmp(o->calibrate.text, "default") == 0 ? qc_calibration_text(out, err)
                                                     : qc_file_slurp(o->calibrate.text, out, err);
}
