/* What every fuzz target includes: its entry point, what it may allocate, and a check that stops
 * the fuzzer.
 *
 * The entry point that libFuzzer and fuzz_replay.c call is in fuzz_bound.c. It counts every heap
 * block that qconv and zstd hold meanwhile (-Wl,--wrap; what the C library takes for
 * itself is not seen), and stops where the most at one time is beyond the limits of the target, or
 * where something is left over. */
#ifndef QC_TESTS_FUZZ_CHECK_H
#define QC_TESTS_FUZZ_CHECK_H

#include <stddef.h>
#include <stdint.h>

/* At most fixed_bytes + per_byte * size at one time, for an input of size bytes. */
typedef struct {
    size_t fixed_bytes;
    size_t per_byte;
} fuzz_limits;

/* Each target has both. 0 always: libFuzzer keeps other values for itself. */
extern const fuzz_limits fuzz_may_allocate;
int fuzz_one(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
/* The most that was held at one time so far, and the input's size then: fuzz_replay.c says it. */
void fuzz_bound_worst(size_t *bytes, size_t *input_bytes);

#define FUZZ_CHECK(condition)                                                                      \
    do {                                                                                           \
        if (!(condition))                                                                          \
            __builtin_trap();                                                                      \
    } while (0)

#endif
