#define _XOPEN_SOURCE 700 /* realpath that allocates */
#include "formats/path_link.h"

#include "base/arena.h"
#include "formats/file_io.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define SNAPSHOTS "/snapshots"
#define BLOBS     "/blobs"

static int lies_below(const char *path, const char *dir, size_t dir_len)
{
    return strncmp(path, dir, dir_len) == 0 && path[dir_len] == '/';
}

/* dir is .../snapshots/REVISION; returns whether path lies in .../blobs. */
static int lies_in_blobs(const char *path, const char *dir)
{
    const char *revision = strrchr(dir, '/');
    size_t len = (size_t)(revision - dir), tail = strlen(SNAPSHOTS);
    if (len < tail || strncmp(revision - tail, SNAPSHOTS, tail) != 0)
        return 0;
    size_t root = len - tail;
    return strncmp(path, dir, root) == 0 && lies_below(path + root, BLOBS, strlen(BLOBS));
}

qc_status qc_path_leaves(const char *dir, const char *name, int *leaves, qc_error *err)
{
    qc_arena arena;
    const char *path = NULL;
    struct stat s;
    qc_arena_init(&arena);
    *leaves = 0;
    qc_status st = qc_path_join(&arena, &path, dir, name, err);
    if (st == QC_OK && lstat(path, &s) == 0 && S_ISLNK(s.st_mode)) {
        char *from = realpath(dir, NULL);
        char *to = realpath(path, NULL);
        if (from && to)
            *leaves = !lies_below(to, from, strlen(from)) && !lies_in_blobs(to, from);
        free(from);
        free(to);
    }
    qc_arena_deinit(&arena);
    return st;
}
