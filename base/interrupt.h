/* The interrupt flag of the process. Every long loop looks at it, and ends with QC_ERR_INTERRUPTED
 * once it is set. It stays set until it is cleared. */
#ifndef QC_BASE_INTERRUPT_H
#define QC_BASE_INTERRUPT_H

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Async-signal-safe: may be called from a handler, and from any thread. */
QC_API void qc_interrupt(void);
QC_API int qc_interrupted(void);
QC_API void qc_interrupt_clear(void);

#ifdef __cplusplus
}
#endif
#endif
