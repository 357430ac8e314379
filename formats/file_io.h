/* Files: whole reads and writes at offsets, durable replacement, directories.
 *
 * Every message names the path. Interrupted system calls are retried. Thread-safe: pread and
 * pwrite on one qc_file from many threads are fine; open and close are not shared.
 * Tests can fail the N-th read, write or sync (qc_io_fail_at).
 */
#ifndef QC_FORMATS_FILE_IO_H
#define QC_FORMATS_FILE_IO_H

#include "base/arena.h"
#include "base/status.h"
#include "base/strbuf.h"

typedef struct {
    int fd;     /* -1 when closed */
    char *path; /* owned */
} qc_file;

#define QC_FILE_CLOSED ((qc_file){-1, NULL})

/* Regular files only (QC_ERR_INPUT for a directory, pipe, ...). */
QC_NODISCARD qc_status qc_file_open_read(qc_file *f, const char *path, qc_error *err);
/* Creates or empties; mode 0666 less umask. A link is refused: what it leads to is not ours. */
QC_NODISCARD qc_status qc_file_create(qc_file *f, const char *path, qc_error *err);
/* For reading and writing what may be there already: made if it is missing, never emptied. Links
 * are refused. */
QC_NODISCARD qc_status qc_file_open_update(qc_file *f, const char *path, qc_error *err);
/* A new file in dir that has no name any more: scratch, gone when it is closed. Its path is for
 * messages. On a network file system a name may be left until then. */
QC_NODISCARD qc_status qc_file_open_scratch(qc_file *f, const char *dir, qc_error *err);
/* Closes and reports a late write error; f is closed either way. */
QC_NODISCARD qc_status qc_file_close(qc_file *f, qc_error *err);
/* Closes without a word; for error paths. A closed file is fine. */
void qc_file_discard(qc_file *f);
/* Many files will be open at once: ask the system for all the handles we may have. */
void qc_file_allow_many(size_t files);
QC_NODISCARD qc_status qc_file_size(const qc_file *f, uint64_t *bytes, qc_error *err);
/* All of len bytes at offset, or QC_ERR_TRUNCATED that says how many are missing. */
QC_NODISCARD qc_status qc_file_pread(const qc_file *f, void *dst, size_t len, uint64_t offset,
                                     qc_error *err);
/* All of len bytes, or QC_ERR_NOSPACE that says how many could not be written, or QC_ERR_IO. */
QC_NODISCARD qc_status qc_file_pwrite(const qc_file *f, const void *src, size_t len,
                                      uint64_t offset, qc_error *err);
QC_NODISCARD qc_status qc_file_sync(const qc_file *f, qc_error *err);
/* The same for contents and size only, not for times. */
QC_NODISCARD qc_status qc_file_sync_data(const qc_file *f, qc_error *err);
/* The same, the pages first and in steps, with a look at the interrupt flag between them:
 * QC_ERR_INTERRUPTED leaves the rest to the system. */
QC_NODISCARD qc_status qc_file_write_out(const qc_file *f, qc_error *err);
/* Give the file this size. */
QC_NODISCARD qc_status qc_file_resize(const qc_file *f, uint64_t bytes, qc_error *err);
/* Hints; failures do not matter. */
/* Read into the page cache now, in requests that no device's limit cuts short. */
void qc_file_hint_read_soon(const qc_file *f, uint64_t offset, uint64_t len);
/* Whether the system reads ahead by its own guesses, as it does from the start; 0 where all that is
 * worth it is hinted at. */
void qc_file_hint_guess(const qc_file *f, int guess);
void qc_file_hint_write_back(const qc_file *f, uint64_t offset, uint64_t len);
/* Not needed any more: whole pages of [offset, offset + len), and the one that offset lies in,
 * leave the page cache unless they are yet to be written. len 0: to the end. */
void qc_file_hint_done(const qc_file *f, uint64_t offset, uint64_t len);
/* 1 if the page cache holds no whole page of the range. 0 if it holds any, or if it cannot be told:
 * by cachestat (Linux 6.5) all pages are looked at, else the first, the middle and the last. */
int qc_file_is_uncached(const qc_file *f, uint64_t offset, uint64_t len);

/* The whole file into out (appended); QC_ERR_INPUT beyond out->max. */
QC_NODISCARD qc_status qc_file_slurp(const char *path, qc_strbuf *out, qc_error *err);
/* path.tmp is written, synced and renamed to path; the directory is synced. */
QC_NODISCARD qc_status qc_file_put(const char *path, const void *bytes, size_t len, qc_error *err);

QC_NODISCARD qc_status qc_path_rename(const char *from, const char *to, qc_error *err);
/* Missing is fine. */
QC_NODISCARD qc_status qc_path_remove(const char *path, qc_error *err);
/* mkdir -p; existing directories are fine. New ones are durable: what holds them is synced. */
QC_NODISCARD qc_status qc_dir_make(const char *path, qc_error *err);
QC_NODISCARD qc_status qc_dir_sync(const char *path, qc_error *err);
/* Bytes an unprivileged writer may still write to the file system that holds path; UINT64_MAX where
 * that does not say how large it is. */
QC_NODISCARD qc_status qc_dir_free_bytes(const char *path, uint64_t *bytes, qc_error *err);
typedef enum { QC_PATH_MISSING, QC_PATH_FILE, QC_PATH_DIR, QC_PATH_OTHER } qc_path_kind;
QC_NODISCARD qc_status qc_path_stat(const char *path, qc_path_kind *kind, uint64_t *bytes,
                                    qc_error *err);
/* dir + "/" + name in the arena, one slash between. */
QC_NODISCARD qc_status qc_path_join(qc_arena *a, const char **out, const char *dir,
                                    const char *name, qc_error *err);

/* One entry of a directory tree, path relative to its root, '/' between folders. */
typedef struct {
    const char *path;
    uint64_t bytes;
} qc_tree_file;
/* Regular files (links to files followed, links to folders not) below dir, sorted bytewise.
 * Folders whose name begins with '.' are left out. At most max_files, else QC_ERR_INPUT. */
QC_NODISCARD qc_status qc_dir_tree(qc_arena *a, const char *dir, size_t max_files,
                                   qc_tree_file **files, size_t *count, qc_error *err);

/* Tests only: the n-th operation of a kind from now fails with errno e (for writes: ENOSPC after
 * having written half); every later one too if persistent. n = 0 switches off. */
typedef enum { QC_IO_READ, QC_IO_WRITE, QC_IO_SYNC, QC_IO_RENAME, QC_IO_KIND_COUNT } qc_io_kind;
void qc_io_fail_at(qc_io_kind kind, uint64_t n, int persistent, int e);
uint64_t qc_io_count(qc_io_kind kind);
/* For an operation that is not in this file: 0, or the errno it must fail with. */
int qc_io_fault(qc_io_kind kind);

#endif
