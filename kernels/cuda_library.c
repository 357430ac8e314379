#include "kernels/cuda_library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

/* Not unloaded with the last handle: some hundreds of MB would be read again for the next, and what
 * the library has registered with CUDA and with threads would be left hanging. */
#ifdef RTLD_NODELETE
#define OPEN_FLAGS (RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)
#else
#define OPEN_FLAGS (RTLD_NOW | RTLD_LOCAL)
#endif

static void *open_version(const char *file, int version)
{
    char name[96];
    (void)snprintf(name, sizeof name, "%s.so.%d", file, version);
    void *library = dlopen(name, OPEN_FLAGS);
    if (library)
        return library;
    (void)snprintf(name, sizeof name, "/usr/local/cuda/lib64/%s.so.%d", file, version);
    return dlopen(name, OPEN_FLAGS);
}

qc_status qc_cuda_library_open(void **library, void **functions, const qc_cuda_library *l,
                               qc_error *err)
{
    const char *path = getenv(l->variable);
    *library = NULL;
    if (path && *path) {
        *library = dlopen(path, OPEN_FLAGS);
        if (!*library)
            QC_FAIL(err, QC_ERR_DEVICE, "no %s: %s could not be opened", l->title, path);
    } else {
        for (size_t i = 0; i < l->version_count && !*library; i++)
            *library = open_version(l->file, l->versions[i]);
        if (!*library)
            QC_FAIL(err, QC_ERR_DEVICE, "no %s: %s could be opened", l->title, l->none);
        path = l->file;
    }
    for (size_t i = 0; i < l->name_count; i++) {
        functions[i] = dlsym(*library, l->names[i]);
        if (!functions[i])
            QC_FAIL(err, QC_ERR_DEVICE, "%s has no %s: it is too old", path, l->names[i]);
    }
    return QC_OK;
}
