#define _GNU_SOURCE
#include "tests/tools/fault_power.h"

#include "tests/tools/fault_real.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE   4096u
#define SECTOR 512u

/* A file that has news, by inode. fd: our own, so that it can be taken back whatever becomes of the
 * name. */
typedef struct {
    dev_t dev;
    ino_t ino;
    int fd;
    uint64_t durable_size;
} power_file;

typedef struct {
    size_t file;
    uint64_t offset, len;
    uint64_t old_len; /* bytes that were there; behind them zeros */
    unsigned char *old;
    uint64_t size_before, size_after;
} data_op;

typedef enum {
    NAME_MADE,
    NAME_MADE_FOLDER,
    NAME_REMOVED,
    NAME_REMOVED_FOLDER,
    NAME_MOVED
} name_kind;

typedef struct {
    name_kind kind;
    char *path;   /* MOVED: where it was */
    char *to;     /* MOVED: where it is */
    char *attic;  /* what was removed or replaced, or NULL */
    char *folder; /* whose sync makes it durable */
} name_op;

static const char *attic_folder;
static uint64_t rng_state, attic_count;
static power_file *files;
static size_t file_count, file_cap;
static data_op *data_ops;
static size_t data_count, data_cap;
static name_op *name_ops;
static size_t name_count, name_cap;

static void *must(void *p)
{
    if (!p)
        fault_die("out of memory");
    return p;
}

static void *grown(void *list, size_t count, size_t *cap, size_t each)
{
    if (count < *cap)
        return list;
    *cap = *cap ? *cap * 2 : 256;
    return must(realloc(list, *cap * each));
}

/* splitmix64 */
static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t random_below(uint64_t n)
{
    rng_state = mix(rng_state);
    return n ? rng_state % n : 0;
}

void power_begin(const char *attic, uint64_t seed)
{
    attic_folder = attic;
    rng_state = mix(seed);
}

static size_t file_of(int fd)
{
    struct stat st;
    char link[64];
    if (fstat(fd, &st) != 0)
        fault_die("a watched file cannot be examined");
    for (size_t i = 0; i < file_count; i++)
        if (files[i].dev == st.st_dev && files[i].ino == st.st_ino)
            return i;
    files = grown(files, file_count, &file_cap, sizeof *files);
    (void)snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int own = fault_real_open(link, O_RDWR | O_CLOEXEC, 0);
    if (own < 0)
        fault_die("a watched file cannot be opened once more");
    files[file_count] = (power_file){st.st_dev, st.st_ino, own, (uint64_t)st.st_size};
    return file_count++;
}

static uint64_t size_of(size_t file)
{
    struct stat st;
    if (fstat(files[file].fd, &st) != 0)
        fault_die("a watched file cannot be examined");
    return (uint64_t)st.st_size;
}

static void add_data(size_t file, uint64_t offset, uint64_t len, uint64_t size_after)
{
    uint64_t size = size_of(file);
    data_op op = {file, offset, len, 0, NULL, size, size_after};
    if (offset < size)
        op.old_len = size - offset < len ? size - offset : len;
    if (op.old_len) {
        op.old = must(malloc(op.old_len));
        for (uint64_t done = 0; done < op.old_len;) {
            ssize_t n =
                fault_real_pread(files[file].fd, op.old + done, op.old_len - done, offset + done);
            if (n <= 0)
                fault_die("old bytes cannot be read");
            done += (uint64_t)n;
        }
    }
    data_ops = grown(data_ops, data_count, &data_cap, sizeof *data_ops);
    data_ops[data_count++] = op;
}

void power_before_write(int fd, uint64_t offset, uint64_t len)
{
    size_t file = file_of(fd);
    uint64_t size = size_of(file);
    add_data(file, offset, len, offset + len > size ? offset + len : size);
}

void power_before_resize(int fd, uint64_t size)
{
    size_t file = file_of(fd);
    uint64_t old = size_of(file);
    if (size < old)
        add_data(file, size, old - size, size);
    else
        add_data(file, old, 0, size);
}

static void forget_data(size_t file)
{
    size_t kept = 0;
    for (size_t i = 0; i < data_count; i++) {
        if (data_ops[i].file == file)
            free(data_ops[i].old);
        else
            data_ops[kept++] = data_ops[i];
    }
    data_count = kept;
}

void power_file_synced(int fd)
{
    size_t file = file_of(fd);
    forget_data(file);
    files[file].durable_size = size_of(file);
}

/* ---- Names ---------------------------------------------------------------------------------- */

static char *folder_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    size_t n = slash && slash != path ? (size_t)(slash - path) : 1;
    return must(strndup(path, n));
}

static void free_name(name_op *op)
{
    if (op->attic)
        (void)fault_real_unlink(op->attic);
    free(op->path);
    free(op->to);
    free(op->attic);
    free(op->folder);
}

/* A second name, outside, for what is about to lose its own. */
static char *keep_in_attic(const char *path)
{
    char name[PATH_MAX];
    struct stat st;
    if (lstat(path, &st) != 0)
        return NULL;
    (void)snprintf(name, sizeof name, "%s/%ld-%llu", attic_folder, (long)getpid(),
                   (unsigned long long)attic_count++);
    if (linkat(AT_FDCWD, path, AT_FDCWD, name, 0) != 0)
        fault_die("what is removed cannot be kept");
    return must(strdup(name));
}

static void add_name(name_kind kind, const char *path, const char *to, char *attic)
{
    name_ops = grown(name_ops, name_count, &name_cap, sizeof *name_ops);
    name_ops[name_count++] = (name_op){kind, must(strdup(path)), to ? must(strdup(to)) : NULL,
                                       attic, folder_of(to ? to : path)};
}

void power_made(const char *path, int folder)
{
    add_name(folder ? NAME_MADE_FOLDER : NAME_MADE, path, NULL, NULL);
}

void power_before_remove(const char *path, int folder)
{
    if (folder)
        add_name(NAME_REMOVED_FOLDER, path, NULL, NULL);
    else
        add_name(NAME_REMOVED, path, NULL, keep_in_attic(path));
}

void power_before_rename(const char *from, const char *to)
{
    struct stat st;
    if (lstat(from, &st) == 0 && S_ISDIR(st.st_mode))
        fault_die("renaming folders is not modelled");
    add_name(NAME_MOVED, from, to, keep_in_attic(to));
}

void power_undo_last_name(void)
{
    free_name(&name_ops[--name_count]);
}

void power_folder_synced(const char *folder)
{
    size_t kept = 0;
    for (size_t i = 0; i < name_count; i++) {
        if (strcmp(name_ops[i].folder, folder) == 0)
            free_name(&name_ops[i]);
        else
            name_ops[kept++] = name_ops[i];
    }
    name_count = kept;
}

/* ---- The power goes ------------------------------------------------------------------------- */

static void put_back(size_t file, const unsigned char *bytes, uint64_t len, uint64_t offset)
{
    while (len > 0) {
        ssize_t n = fault_real_pwrite(files[file].fd, bytes, len, offset);
        if (n <= 0)
            fault_die("old bytes cannot be written");
        bytes += n;
        len -= (uint64_t)n;
        offset += (uint64_t)n;
    }
}

/* Of a range that is to be as before: its old bytes, and zeros behind them. */
static void undo_range(const data_op *op, uint64_t begin, uint64_t end)
{
    static const unsigned char zeros[PAGE];
    uint64_t old_end = op->offset + op->old_len;
    if (begin < old_end)
        put_back(op->file, op->old + (begin - op->offset), (end < old_end ? end : old_end) - begin,
                 begin);
    for (uint64_t at = begin < old_end ? old_end : begin; at < end;) {
        uint64_t n = end - at < PAGE ? end - at : PAGE;
        put_back(op->file, zeros, n, at);
        at += n;
    }
}

/* What is lost: a part of everything; all bytes and a part of the names; all; all bytes and no
 * name; no byte and a part of the names. */
typedef enum { CUT_MIXED, CUT_ALL_DATA, CUT_ALL, CUT_BUT_NAMES, CUT_NAMES } cut_mode;

/* The first operation that this sector does not have: all from it on are taken back. */
static size_t sector_cut(uint64_t salt, const data_op *op, uint64_t sector)
{
    uint64_t page = mix(salt ^ mix(op->file * 0x10001u ^ (sector / (PAGE / SECTOR)) << 20));
    switch (page % 4) {
    case 0:
        return data_count;
    case 1:
        return 0;
    case 2:
        return (size_t)(mix(page) % (data_count + 1));
    default: /* torn */
        page = mix(page ^ sector);
        return page & 1 ? 0 : data_count;
    }
}

/* What was cut off is put back in any case: the size, chosen later, decides whether it is seen. */
static void undo_data(size_t index, cut_mode mode, uint64_t salt)
{
    const data_op *op = &data_ops[index];
    uint64_t end = op->offset + op->len;
    for (uint64_t at = op->offset; at < end;) {
        uint64_t next = (at / SECTOR + 1) * SECTOR;
        if (next > end)
            next = end;
        if (mode != CUT_MIXED || op->size_after < op->size_before ||
            index >= sector_cut(salt, op, at / SECTOR))
            undo_range(op, at, next);
        at = next;
    }
}

/* A size the file had, the durable one if all is lost. */
static void undo_size(size_t file, uint64_t size_now, cut_mode mode)
{
    uint64_t sizes = 1, chosen = files[file].durable_size;
    for (size_t i = 0; i < data_count; i++)
        if (data_ops[i].file == file && random_below(++sizes) == 0 && mode == CUT_MIXED)
            chosen = data_ops[i].size_after;
    if (mode == CUT_ALL_DATA || mode == CUT_NAMES || (mode == CUT_MIXED && random_below(2)))
        chosen = size_now; /* long enough, of zeros */
    if (ftruncate(files[file].fd, (off_t)chosen) != 0)
        fault_die("a size cannot be set back");
}

static void remove_all(const char *path)
{
    char command[PATH_MAX + 32];
    if (fault_real_unlink(path) == 0)
        return;
    (void)snprintf(command, sizeof command, "rm -rf '%s'", path);
    (void)unsetenv("LD_PRELOAD");
    if (system(command) != 0)
        fault_die("a folder cannot be taken back");
}

static void undo_name(const name_op *op)
{
    switch (op->kind) {
    case NAME_MADE:
        (void)fault_real_unlink(op->path);
        break;
    case NAME_MADE_FOLDER:
        remove_all(op->path);
        break;
    case NAME_REMOVED:
        if (op->attic)
            (void)linkat(AT_FDCWD, op->attic, AT_FDCWD, op->path, 0);
        break;
    case NAME_REMOVED_FOLDER:
        (void)fault_real_mkdir(op->path, 0777);
        break;
    case NAME_MOVED:
        (void)fault_real_rename(op->to, op->path);
        if (op->attic)
            (void)linkat(AT_FDCWD, op->attic, AT_FDCWD, op->to, 0);
        break;
    default:
        break;
    }
}

/* In each folder a last part of what happened there, all of them or none. */
static void undo_names(cut_mode mode, uint64_t salt)
{
    for (size_t i = name_count; i-- > 0;) {
        uint64_t h = salt, here = 0, before = 0;
        for (const char *c = name_ops[i].folder; *c; c++)
            h = mix(h ^ (unsigned char)*c);
        for (size_t k = 0; k < name_count; k++) {
            if (strcmp(name_ops[k].folder, name_ops[i].folder) == 0) {
                here++;
                before += k < i;
            }
        }
        uint64_t keep = h % 4 == 0 ? 0 : h % 4 == 1 ? here : mix(h) % (here + 1);
        if (mode == CUT_ALL || (mode != CUT_BUT_NAMES && before >= keep))
            undo_name(&name_ops[i]);
    }
}

void power_lose_file(int fd)
{
    size_t file = file_of(fd);
    for (size_t i = data_count; i-- > 0;)
        if (data_ops[i].file == file)
            undo_data(i, CUT_ALL, 0);
    forget_data(file);
}

void power_cut(void)
{
    uint64_t chance = random_below(8), salt = mix(rng_state);
    cut_mode mode = chance < CUT_NAMES ? (cut_mode)(chance + 1) : CUT_MIXED;
    cut_mode of_data = mode == CUT_BUT_NAMES ? CUT_ALL_DATA : mode;
    uint64_t *sizes = must(calloc(file_count + 1, sizeof *sizes));
    for (size_t i = 0; i < file_count; i++)
        sizes[i] = size_of(i);
    for (size_t i = of_data == CUT_NAMES ? 0 : data_count; i-- > 0;)
        undo_data(i, of_data, salt);
    for (size_t i = 0; i < file_count; i++)
        undo_size(i, sizes[i], of_data);
    undo_names(mode, salt);
    free(sizes);
    for (size_t i = 0; i < name_count; i++)
        if (name_ops[i].attic)
            (void)fault_real_unlink(name_ops[i].attic);
}
