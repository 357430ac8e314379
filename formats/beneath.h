/* Files beneath a folder in which others may have put links: none of those is ever followed.
 *
 * The folder itself ("root") is opened by its path, whose links are the user's own choice. What
 * lies beneath it is named relative to it, with '/' between folders and without "." and "..". The
 * folders on the way are opened by openat2 with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS, and where
 * the kernel (before 5.6) or a sandbox does not have that call, one after the other with
 * O_NOFOLLOW. The last component is then looked at, made, renamed or removed relative to the folder
 * that is open, by calls that act on a link itself.
 *
 * Errors are QC_ERR_IO (or QC_ERR_NOSPACE) and name the path. Thread-safe. */
#ifndef QC_FORMATS_BENEATH_H
#define QC_FORMATS_BENEATH_H

#include "formats/file_io.h"

typedef enum {
    QC_ENTRY_MISSING,
    QC_ENTRY_FILE,
    QC_ENTRY_FOLDER,
    QC_ENTRY_LINK,
    QC_ENTRY_OTHER /* a pipe, a device, a socket */
} qc_entry_kind;

typedef struct {
    qc_entry_kind kind;
    /* Not 0: the name cannot be reached, because so many of its first bytes name something that is
     * no folder; kind says what. */
    size_t blocked;
    uint64_t bytes;      /* of a file */
    uint64_t disk_bytes; /* that it takes on the disk: less where it has holes */
} qc_entry;

/* Open the folder at path, for the calls below; the caller discards it. */
QC_NODISCARD qc_status qc_beneath_open(qc_file *root, const char *path, qc_error *err);
/* What has this name? */
QC_NODISCARD qc_status qc_beneath_look(const qc_file *root, const char *name, qc_entry *out,
                                       qc_error *err);
/* The same of a folder that is opened for this one look; a missing folder holds nothing. */
QC_NODISCARD qc_status qc_beneath_look_once(const char *path, const char *name, qc_entry *out,
                                            qc_error *err);
/* A handle for reading, which the caller closes; -1 where there is no such file. It does not wait
 * for a pipe. */
int qc_beneath_open_fd(const qc_file *root, const char *name);
/* "a file", "a folder", "a link", "a pipe or device". */
const char *qc_entry_text(qc_entry_kind kind);
/* mkdir -p; new folders are durable. "" is the root, which exists. */
QC_NODISCARD qc_status qc_beneath_make_folder(const qc_file *root, const char *folder,
                                              qc_error *err);
/* Replaces what has the name `to`; a link by that name is replaced and not followed. */
QC_NODISCARD qc_status qc_beneath_rename(const qc_file *root, const char *from, const char *to,
                                         qc_error *err);
/* Removes a file, or a link itself. What is missing or cannot be reached is fine: there is nothing
 * of that name beneath the root. */
QC_NODISCARD qc_status qc_beneath_remove(const qc_file *root, const char *name, qc_error *err);
/* Removes the folders that lead to name, the innermost first, until one is not empty. */
void qc_beneath_remove_empty(const qc_file *root, const char *name);
QC_NODISCARD qc_status qc_beneath_sync(const qc_file *root, const char *folder, qc_error *err);
/* Calls see for each entry of a folder, in no order, until that is not QC_OK. A folder that is
 * missing or cannot be reached has none. */
typedef qc_status (*qc_beneath_fn)(void *ctx, const char *name, qc_error *err);
QC_NODISCARD qc_status qc_beneath_list(const qc_file *root, const char *folder, qc_beneath_fn see,
                                       void *ctx, qc_error *err);
/* Is everything below this folder a file or a folder? odd: the first that is neither, relative to
 * the root, in a buffer of PATH_MAX bytes; "" where there is none. */
QC_NODISCARD qc_status qc_beneath_find_odd(const qc_file *root, const char *folder, char *odd,
                                           qc_entry_kind *kind, qc_error *err);
/* Removes what this folder holds, but for entries of its own whose names stay() keeps (NULL: keeps
 * none); and the folder itself where stay is NULL. Best effort. */
void qc_beneath_clear(const qc_file *root, const char *folder, int (*stay)(const char *name));

/* Tests only: 0 does as if the kernel had no openat2. */
void qc_beneath_use_openat2(int yes);

#endif
