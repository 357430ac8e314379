/* Inputs as files, for readers that take a path. Not thread-safe. */
#ifndef QC_TESTS_FUZZ_FILES_H
#define QC_TESTS_FUZZ_FILES_H

#include <stddef.h>
#include <stdint.h>

/* A file of its own in memory that holds data: its descriptor, to be closed, and a path to it. */
int fuzz_file(char path[64], const uint8_t *data, size_t size);

/* A folder from one input: parts, each after a mark of four bytes, F1 1E F1 and the number of its
 * file among names ('0' + number; later parts of the same number replace it). What is before the
 * first mark belongs to no file. */
typedef struct {
    const uint8_t *data;
    size_t size;
    int found;
} fuzz_part;
#define FUZZ_MOST_PARTS 16u
void fuzz_split(fuzz_part parts[FUZZ_MOST_PARTS], const uint8_t *data, size_t size);
/* Path of this process's folder, emptied of the names first; its parts are written. */
const char *fuzz_folder(const char *const *names, const fuzz_part *parts, size_t count);
/* One file of that folder. */
void fuzz_folder_put(const char *name, const uint8_t *data, size_t size);

#endif
