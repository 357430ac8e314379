/* Any text as a quant_state: refused, or a state that writes itself and reads back the same. */
#include "formats/bnb_state.h"
#include "fuzz_check.h"

#include <stdlib.h>
#include <string.h>

const fuzz_limits fuzz_may_allocate = {1u << 20, 64};

int fuzz_one(const uint8_t *data, size_t size)
{
    qc_bnb_state s;
    qc_bnb_state again;
    qc_error err = {0};
    qc_status st = qc_bnb_state_parse(&s, (const char *)data, size, &err);
    if (st != QC_OK) {
        FUZZ_CHECK(qc_status_exit_code(st) == 3 && err.msg[0]);
        return 0;
    }
    FUZZ_CHECK(s.ndim <= QC_MAX_DIMS && (unsigned)s.source_dtype < QC_DTYPE_COUNT);
    FUZZ_CHECK(memchr(s.quant_type, '\0', sizeof s.quant_type) != NULL);
    size_t bytes = qc_bnb_state_bytes(&s);
    char *text = malloc(bytes);
    FUZZ_CHECK(text != NULL);
    FUZZ_CHECK(qc_bnb_state_write(&s, text, &err) == QC_OK);
    FUZZ_CHECK(qc_bnb_state_parse(&again, text, bytes, NULL) == QC_OK);
    FUZZ_CHECK(strcmp(s.quant_type, again.quant_type) == 0 && s.source_dtype == again.source_dtype);
    FUZZ_CHECK(s.block_elems == again.block_elems && s.nested == again.nested);
    FUZZ_CHECK(s.ndim == again.ndim && memcmp(s.dims, again.dims, sizeof s.dims) == 0);
    FUZZ_CHECK(memcmp(&s.nested_offset, &again.nested_offset, sizeof s.nested_offset) == 0);
    free(text);
    return 0;
}
