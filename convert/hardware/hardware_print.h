/* The output of `qconv hardware` as text and as JSON (docs/hardware.md lists every member). */
#ifndef QC_CONVERT_HARDWARE_PRINT_H
#define QC_CONVERT_HARDWARE_PRINT_H

#include "base/strbuf.h"
#include "convert/hardware/hardware.h"

/* Both append to out. Names that the driver gave are made printable. */
QC_NODISCARD qc_status qc_hardware_text(const qc_hardware *h, qc_arena *arena, qc_strbuf *out,
                                        qc_error *err);
QC_NODISCARD qc_status qc_hardware_json(const qc_hardware *h, qc_arena *arena, qc_strbuf *out,
                                        qc_error *err);

#endif
