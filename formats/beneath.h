/* Files beneath a folder in which others may have put links. None of those links is ever followed.
 *
 * The folder itself ("root") is opened by its path, whose links are the user's own choice. What
 * lies beneath it is named relative to it, with '/' between folders and without "." and "..". The
 * folders on the way are opened with openat2, RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS. Where the
 * kernel (before 5.6) or a sandbox does not have that call, they are opened one after the other
 * with O_NOFOLLOW. The last component is then looked at, made, renamed or removed relative to the
 * open folder, by calls that act on a link itself.
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
    /* If not 0, the name cannot be reached: its first `blocked` bytes name something that is not a
     * folder, and kind says what it is. */
    size_t blocked;
    uint64_t bytes;      /* length of a file */
    uint64_t disk_bytes; /* space on the disk; less than its size where it has holes */
} qc_entry;

/* Opens the folder at path for the calls below; the caller discards it. */
QC_NODISCARD qc_status qc_beneath_open(qc_file *root, const char *path, qc_error *err);
/* What has this name? */
QC_NODISCARD qc_status qc_beneath_look(const qc_file *root, const char *name, qc_entry *out,
                                       qc_error *err);
/* Like qc_beneath_look, but opens the folder just for this call; a missing folder holds nothing. */
QC_NODISCARD qc_status qc_beneath_look_once(const char *path, const char *name, qc_entry *out,
                                            qc_error *err);
/* Returns a descriptor for reading, which the caller closes, or -1 where there is no such file. It
 * does not wait for a pipe. */
int qc_beneath_open_fd(const qc_file *root, const char *name);
/* "a file", "a folder", "a link", "a pipe or device". */
const char *qc_entry_text(qc_entry_kind kind);
/* Makes the folder and those that lead to it; new folders are durable. "" is the root, which
 * exists. */
QC_NODISCARD qc_status qc_beneath_make_folder(const qc_file *root, const char *folder,
                                              qc_error *err);
/* Renames a file and replaces what has the name `to`; a link of that name is replaced, not
 * followed. */
QC_NODISCARD qc_status qc_beneath_rename(const qc_file *root, const char *from, const char *to,
                                         qc_error *err);
/* Removes a file, or a link itself. It is no error if the name is missing or cannot be reached,
 * because then nothing of that name is beneath the root. */
QC_NODISCARD qc_status qc_beneath_remove(const qc_file *root, const char *name, qc_error *err);
/* Removes the folders that lead to name, the innermost first, until one is not empty. */
void qc_beneath_remove_empty(const qc_file *root, const char *name);
QC_NODISCARD qc_status qc_beneath_sync(const qc_file *root, const char *folder, qc_error *err);
/* Calls `see` for each entry of a folder, in any order, until it returns something other than
 * QC_OK. A folder that is missing or cannot be reached has no entries. */
typedef qc_status (*qc_beneath_fn)(void *ctx, const char *name, qc_error *err);
QC_NODISCARD qc_status qc_beneath_list(const qc_file *root, const char *folder, qc_beneath_fn see,
                                       void *ctx, qc_error *err);
/* Finds anything below this folder that is neither a file nor a folder. odd, a buffer of PATH_MAX
 * bytes, gets the first such path relative to the root, or "" if there is none. */
QC_NODISCARD qc_status qc_beneath_find_odd(const qc_file *root, const char *folder, char *odd,
                                           qc_entry_kind *kind, qc_error *err);
/* Removes what this folder holds, except for those of its own entries whose names stay() keeps. If
 * stay is NULL, everything and the folder itself is removed. Best effort. */
void qc_beneath_clear(const qc_file *root, const char *folder, int (*stay)(const char *name));

/* For tests only: 0 makes the calls behave as on a kernel without openat2. */
void qc_beneath_use_openat2(int yes);

#endif
