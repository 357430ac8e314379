/* What libqconv says of itself. The whole interface is docs/library.md.
 *
 * Versions: before 1.0 a minor version may change the interface, so the soname has major and minor
 * (libqconv.so.0.5), and so have the symbols (QCONV_0.5). Within one minor version functions and
 * names are added only, and no struct changes. Enums are 32 bits wide; new names come last. */
#ifndef QC_CONVERT_LIBRARY_LIBRARY_H
#define QC_CONVERT_LIBRARY_LIBRARY_H

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* "0.5.0": that of the library that is loaded, whatever header the caller was compiled with. */
QC_API const char *qc_version(void);

/* The bytes of a public struct by its name, like "qc_weights", as the library was compiled; 0 for a
 * name that it does not know. Programs that write the structs down in another language compare
 * these with theirs when they load the library. */
QC_API size_t qc_abi_size(const char *name);

#ifdef __cplusplus
}
#endif
#endif
