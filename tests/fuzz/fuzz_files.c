#define _GNU_SOURCE /* memfd_create */
#include "fuzz_files.h"
#include "fuzz_check.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static char folder[PATH_MAX];

static void write_all(int fd, const uint8_t *data, size_t size)
{
    FUZZ_CHECK(fd >= 0);
    FUZZ_CHECK(size == 0 || write(fd, data, size) == (ssize_t)size);
}

int fuzz_file(char path[64], const uint8_t *data, size_t size)
{
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    write_all(fd, data, size);
    (void)snprintf(path, 64, "/proc/self/fd/%d", fd);
    return fd;
}

void fuzz_split(fuzz_part parts[FUZZ_MOST_PARTS], const uint8_t *data, size_t size)
{
    fuzz_part *open = NULL;
    memset(parts, 0, FUZZ_MOST_PARTS * sizeof *parts);
    for (size_t i = 0; i < size; i++) {
        if (size - i >= 4 && data[i] == 0xf1 && data[i + 1] == 0x1e && data[i + 2] == 0xf1) {
            open = &parts[(unsigned)(data[i + 3] - '0') % FUZZ_MOST_PARTS];
            *open = (fuzz_part){data + i + 4, 0, 1};
            i += 3;
        } else if (open) {
            open->size++;
        }
    }
}

static void remove_folder(void)
{
    /* Its files are removed by whoever wrote them last; one that is left keeps it. */
    (void)rmdir(folder);
}

static void path_of(char path[PATH_MAX + 64], const char *name)
{
    (void)snprintf(path, PATH_MAX + 64, "%s/%s", folder, name);
}

void fuzz_folder_put(const char *name, const uint8_t *data, size_t size)
{
    char path[PATH_MAX + 64];
    path_of(path, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    write_all(fd, data, size);
    FUZZ_CHECK(close(fd) == 0);
}

const char *fuzz_folder(const char *const *names, const fuzz_part *parts, size_t count)
{
    if (!folder[0]) {
        const char *base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
        (void)snprintf(folder, sizeof folder, "%s/qconv-fuzz-XXXXXX", base);
        FUZZ_CHECK(mkdtemp(folder) != NULL);
        (void)atexit(remove_folder);
    }
    for (size_t i = 0; i < count; i++) {
        char path[PATH_MAX + 64];
        path_of(path, names[i]);
        FUZZ_CHECK(unlink(path) == 0 || errno == ENOENT);
        if (parts[i].found)
            fuzz_folder_put(names[i], parts[i].data, parts[i].size);
    }
    return folder;
}
