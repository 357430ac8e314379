#include "kernels/cuda_library.h"

#include <dlfcn.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The library is not unloaded with the last handle. Otherwise some hundreds of MB would be read
 * again for the next one, and what it has registered with CUDA and with threads would be left
 * hanging. */
#ifdef RTLD_NODELETE
#define OPEN_FLAGS (RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)
#else
#define OPEN_FLAGS (RTLD_NOW | RTLD_LOCAL)
#endif

/* Opens the first file that matches and can be opened. */
static void *open_pattern(const char *pattern)
{
    glob_t found;
    void *library = NULL;
    if (glob(pattern, 0, NULL, &found) != 0)
        return NULL;
    for (size_t i = 0; i < found.gl_pathc && !library; i++)
        library = dlopen(found.gl_pathv[i], OPEN_FLAGS);
    globfree(&found);
    return library;
}

static void *open_version(const char *file, int version)
{
    /* These are the places in a toolkit, and in the wheels of a Python environment, whose libraries
     * find each other. */
    static const struct {
        const char *variable, *folder;
    } places[] = {
        {"CUDA_HOME", "/lib64"},
        {"CUDA_PATH", "/lib64"},
        {NULL, "/usr/local/cuda/lib64"},
        {"VIRTUAL_ENV", "/lib/python3*/site-packages/nvidia/*/lib"},
        {"CONDA_PREFIX", "/lib/python3*/site-packages/nvidia/*/lib"},
    };
    char name[4096];
    (void)snprintf(name, sizeof name, "%s.so.%d", file, version);
    void *library = dlopen(name, OPEN_FLAGS);
    for (size_t i = 0; i < sizeof places / sizeof *places && !library; i++) {
        const char *root = places[i].variable ? getenv(places[i].variable) : "";
        if (!root || (places[i].variable && !*root))
            continue;
        int length =
            snprintf(name, sizeof name, "%s%s/%s.so.%d", root, places[i].folder, file, version);
        if (length > 0 && (size_t)length < sizeof name)
            library = open_pattern(name);
    }
    return library;
}

qc_status qc_cuda_library_open(void **library, void *functions, const qc_cuda_library *l,
                               qc_error *err)
{
    const char *path = getenv(l->variable);
    *library = NULL;
    if (path && *path) {
        *library = dlopen(path, OPEN_FLAGS);
        if (!*library)
            QC_FAIL(err, QC_ERR_DEVICE, "%s cannot be loaded: %s could not be opened", l->title,
                    path);
    } else {
        for (size_t i = 0; i < l->version_count && !*library; i++)
            *library = open_version(l->file, l->versions[i]);
        if (!*library)
            QC_FAIL(err, QC_ERR_DEVICE,
                    "%s cannot be loaded: %s could be opened; install it, or name its file in %s",
                    l->title, l->none, l->variable);
        path = l->file;
    }
    for (size_t i = 0; i < l->name_count; i++) {
        void *found = dlsym(*library, l->names[i]);
        if (!found)
            QC_FAIL(err, QC_ERR_DEVICE, "%s is too old: it has no %s", path, l->names[i]);
        /* C has no cast from void * to a function. */
        memcpy((unsigned char *)functions + i * sizeof found, &found, sizeof found);
    }
    return QC_OK;
}

qc_status qc_cuda_library_check(int code, int no_memory, const char *title, const char *what,
                                qc_error *err)
{
    if (code == 0)
        return QC_OK;
    QC_FAIL(err, code == no_memory ? QC_ERR_NOMEM : QC_ERR_INTERNAL, "%s: %s failed with status %d",
            title, what, code);
}
