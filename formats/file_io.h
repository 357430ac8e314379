/* Files: whole reads and writes at offsets, durable replacement, directories.
 *
 * Every message names the path. Interrupted system calls are retried. Thread-safe: many threads may
 * pread and pwrite on one qc_file, but only one may open or close it. Tests can let the N-th read,
 * write or sync fail (qc_io_fail_at). */
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

/* Opens regular files only (QC_ERR_INPUT for a directory, a pipe, ...). */
QC_NODISCARD qc_status qc_file_open_read(qc_file *f, const char *path, qc_error *err);
/* Creates or empties a file; its mode is 0666 less umask. A link is refused, because its target is
 * not ours. */
QC_NODISCARD qc_status qc_file_create(qc_file *f, const char *path, qc_error *err);
/* Opens a file for reading and writing. It is made if it is missing and never emptied. Links are
 * refused. */
QC_NODISCARD qc_status qc_file_open_update(qc_file *f, const char *path, qc_error *err);
/* Closes and reports a late write error; f is closed either way. */
QC_NODISCARD qc_status qc_file_close(qc_file *f, qc_error *err);
/* Closes and ignores errors; for error paths. The file may be closed already. */
void qc_file_discard(qc_file *f);
/* Asks the system for as many descriptors as we may have; call it before many files are open at
 * once. */
void qc_file_allow_many(size_t files);
QC_NODISCARD qc_status qc_file_size(const qc_file *f, uint64_t *bytes, qc_error *err);
/* Reads all of len bytes at offset, or returns QC_ERR_TRUNCATED that says how many are missing. */
QC_NODISCARD qc_status qc_file_pread(const qc_file *f, void *dst, size_t len, uint64_t offset,
                                     qc_error *err);
/* Writes all of len bytes, or returns QC_ERR_IO, or QC_ERR_NOSPACE that says how many bytes could
 * not be written. */
QC_NODISCARD qc_status qc_file_pwrite(const qc_file *f, const void *src, size_t len,
                                      uint64_t offset, qc_error *err);
QC_NODISCARD qc_status qc_file_sync(const qc_file *f, qc_error *err);
/* The same for contents and size only, without the times. */
QC_NODISCARD qc_status qc_file_sync_data(const qc_file *f, qc_error *err);
/* The same, but it writes the pages first, in steps, and looks at the interrupt flag between them.
 * QC_ERR_INTERRUPTED leaves the rest to the system. */
QC_NODISCARD qc_status qc_file_write_out(const qc_file *f, qc_error *err);
/* Gives the file this size. */
QC_NODISCARD qc_status qc_file_resize(const qc_file *f, uint64_t bytes, qc_error *err);
/* What follows are hints; failures do not matter. */
/* Reads into the page cache now, in requests small enough that no device cuts them short. */
void qc_file_hint_read_soon(const qc_file *f, uint64_t offset, uint64_t len);
/* Tells whether the system shall read ahead by its own guesses, as it does from the start. Pass 0
 * if hints cover all that is worth reading ahead. */
void qc_file_hint_guess(const qc_file *f, int guess);
void qc_file_hint_write_back(const qc_file *f, uint64_t offset, uint64_t len);
/* Tells the system that the range is not needed any more. The whole pages of [offset, offset + len)
 * and the page that offset lies in leave the page cache, unless they are yet to be written. len 0
 * means to the end. */
void qc_file_hint_done(const qc_file *f, uint64_t offset, uint64_t len);
/* Returns 1 if the page cache holds no whole page of the range, and 0 if it holds any or if that
 * cannot be told. With cachestat (Linux 6.5) all pages are looked at, otherwise the first, the
 * middle and the last byte. */
int qc_file_is_uncached(const qc_file *f, uint64_t offset, uint64_t len);

/* Appends the whole file to out; QC_ERR_INPUT if it is longer than out->max allows. */
QC_NODISCARD qc_status qc_file_slurp(const char *path, qc_strbuf *out, qc_error *err);
/* Hands the whole file on in stretches of at most 1 MiB, in their order. */
typedef qc_status (*qc_file_taker)(void *ctx, const void *bytes, size_t len, qc_error *err);
QC_NODISCARD qc_status qc_file_read_through(const char *path, qc_file_taker take, void *ctx,
                                            qc_error *err);

QC_NODISCARD qc_status qc_path_rename(const char *from, const char *to, qc_error *err);
/* Missing is fine. */
QC_NODISCARD qc_status qc_path_remove(const char *path, qc_error *err);
/* Makes a directory and those that lead to it; existing ones are fine. New ones are durable: the
 * directory that holds them is synced. */
QC_NODISCARD qc_status qc_dir_make(const char *path, qc_error *err);
QC_NODISCARD qc_status qc_dir_sync(const char *path, qc_error *err);
/* Syncs the folder that holds path. */
QC_NODISCARD qc_status qc_dir_sync_holder(const char *path, qc_error *err);
/* How many bytes an unprivileged writer may still write to the file system that holds path;
 * UINT64_MAX where the file system does not say how large it is. */
QC_NODISCARD qc_status qc_dir_free_bytes(const char *path, uint64_t *bytes, qc_error *err);
typedef enum { QC_PATH_MISSING, QC_PATH_FILE, QC_PATH_DIR, QC_PATH_OTHER } qc_path_kind;
QC_NODISCARD qc_status qc_path_stat(const char *path, qc_path_kind *kind, uint64_t *bytes,
                                    qc_error *err);
/* Joins dir, one slash and name, in the arena. */
QC_NODISCARD qc_status qc_path_join(qc_arena *a, const char **out, const char *dir,
                                    const char *name, qc_error *err);

/* One entry of a directory tree; its path is relative to the root, with '/' between folders. */
typedef struct {
    const char *path;
    uint64_t bytes;
} qc_tree_file;
/* Lists the regular files below dir, sorted bytewise. Links to files are followed, links to folders
 * are not. Folders whose name begins with '.' are left out. More than max_files are
 * QC_ERR_INPUT. */
QC_NODISCARD qc_status qc_dir_tree(qc_arena *a, const char *dir, size_t max_files,
                                   qc_tree_file **files, size_t *count, qc_error *err);

/* For tests only: the n-th operation of a kind from now fails with errno e, and every later one too
 * if persistent. A write that fails with ENOSPC has written half of its bytes. n = 0 switches
 * faults off. */
typedef enum { QC_IO_READ, QC_IO_WRITE, QC_IO_SYNC, QC_IO_RENAME, QC_IO_KIND_COUNT } qc_io_kind;
void qc_io_fail_at(qc_io_kind kind, uint64_t n, int persistent, int e);
uint64_t qc_io_count(qc_io_kind kind);
/* For operations in other files: returns 0, or the errno that the operation must fail with. */
int qc_io_fault(qc_io_kind kind);

#endif
