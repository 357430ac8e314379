/* XXH3-128 with AVX512: compiled with that flag, and called only where the processor has it. */
#if defined(__x86_64__)
#define XXH_INLINE_ALL
#define XXH_VECTOR 3 /* XXH_AVX512 */
#include <xxhash.h>

#include "formats/digest_ops.h"

QC_DIGEST_DEFINE(qc_digest_avx512);
#else
typedef int qc_digest_avx512_is_for_x86; /* a translation unit must not be empty */
#endif
