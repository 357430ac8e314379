/* What the stand-ins for CUDA's libraries share. Their work goes on the shim's streams, which they
 * look for in the program. */
#ifndef QC_SHIM_FAKE_LIBRARY_H
#define QC_SHIM_FAKE_LIBRARY_H

#include "shim_control.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef int enqueue_function(void *stream, const char *name, void (*call)(void *), const void *arg,
                             size_t arg_bytes);

/* NULL if the program has no shim or does not export it. */
static inline enqueue_function *fake_enqueue(void)
{
    enqueue_function *enqueue = NULL;
    void *found = dlsym(RTLD_DEFAULT, "qc_shim_enqueue");
    if (found)
        memcpy(&enqueue, &found, sizeof enqueue); /* C has no cast from void * to a function */
    return enqueue;
}

#endif
