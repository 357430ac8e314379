/* What every fuzz target includes: its entry point and a check that stops the fuzzer. */
#ifndef QC_TESTS_FUZZ_CHECK_H
#define QC_TESTS_FUZZ_CHECK_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define FUZZ_CHECK(condition)                                                                      \
    do {                                                                                           \
        if (!(condition))                                                                          \
            __builtin_trap();                                                                      \
    } while (0)

#endif
