#include "base/open_library.h"

#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A library is not unloaded with its last handle. Otherwise some hundreds of MB would be read again
 * for the next one, and what it has registered with CUDA and with threads would be left hanging. */
#ifdef RTLD_NODELETE
#define OPEN_FLAGS (RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)
#else
#define OPEN_FLAGS (RTLD_NOW | RTLD_LOCAL)
#endif

/* Opens the first such file in the place that can be opened. */
static void *open_in(const qc_library_place *place, const char *file)
{
    const char *root = place->variable ? getenv(place->variable) : "";
    char pattern[PATH_MAX];
    glob_t found;
    void *library = NULL;
    if (!root || (place->variable && !*root))
        return NULL;
    int length = snprintf(pattern, sizeof pattern, "%s%s/%s", root, place->folder, file);
    if (length < 0 || (size_t)length >= sizeof pattern || glob(pattern, 0, NULL, &found) != 0)
        return NULL;
    for (size_t i = 0; i < found.gl_pathc && !library; i++)
        library = dlopen(found.gl_pathv[i], OPEN_FLAGS);
    globfree(&found);
    return library;
}

qc_status qc_library_open(void **library, void *functions, const qc_library *l, qc_error *err)
{
    const char *file = getenv(l->variable);
    const int is_named = file && *file;
    *library = is_named ? dlopen(file, OPEN_FLAGS) : NULL;
    for (size_t i = 0; !is_named && !*library && l->files[i]; i++) {
        file = l->files[i];
        *library = dlopen(file, OPEN_FLAGS);
        for (const qc_library_place *p = l->places; p && p->folder && !*library; p++)
            *library = open_in(p, file);
    }
    if (!*library) {
        const char *why = is_named || !l->files[1] ? dlerror() : NULL;
        /* If the file is there, it is damaged, or there is no memory to map it. */
        if (why && !strstr(why, "No such file"))
            QC_FAIL(err, l->missing, "%s: %s: %s", l->title, file, why);
        if (is_named)
            QC_FAIL(err, l->missing, "%s: %s%s%s", l->title, l->no_file[0], file, l->no_file[1]);
        QC_FAIL(err, l->missing, "%s: %s", l->title, l->none);
    }
    for (size_t i = 0; i < l->function_count; i++) {
        void *found = dlsym(*library, l->function_names[i]);
        if (!found && i < l->needed_count) {
            qc_library_close(*library);
            *library = NULL;
            QC_FAIL(err, l->missing, "%s%s%s%s%s", l->no_function[0], file, l->no_function[1],
                    l->function_names[i], l->no_function[2]);
        }
        /* C has no cast from void * to a function. */
        memcpy((unsigned char *)functions + i * sizeof found, &found, sizeof found);
    }
    return QC_OK;
}

void qc_library_close(void *library)
{
    if (library)
        (void)dlclose(library);
}
