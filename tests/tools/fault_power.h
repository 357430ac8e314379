/* What a disk would not have if the power went now: every range, size and name that a process
 * changed and did not sync is kept so that it can be taken back. Part of the library of
 * fault_disk.c, which holds one lock over all calls; nothing here is thread-safe.
 *
 * The model: pages of 4 KiB reach the disk in any order or not at all, a torn one by sectors of 512
 * bytes, each as some write of the past left it. A size is any that the file had since it was
 * synced. Names change in order within a folder, folders in any order. fsync and fdatasync of a
 * file make its bytes and size durable, not its name; fsync of a folder the names in it. A rename
 * is one step and belongs to the folder it leads to. */
#ifndef QC_TESTS_FAULT_POWER_H
#define QC_TESTS_FAULT_POWER_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* attic: a folder on the same file system, outside what is watched, for what was removed. */
void power_begin(const char *attic, uint64_t seed);
/* Before [offset, offset + len) of an open file is written. */
void power_before_write(int fd, uint64_t offset, uint64_t len);
/* Before its size is set. */
void power_before_resize(int fd, uint64_t size);
void power_file_synced(int fd);
/* folder: a real path. */
void power_folder_synced(const char *folder);
/* After a file or folder of this real path was made. */
void power_made(const char *path, int folder);
/* Before a file (or empty folder) goes. */
void power_before_remove(const char *path, int folder);
/* Before a file is renamed; both are real paths. */
void power_before_rename(const char *from, const char *to);
/* The system call that was announced failed: forget it. */
void power_undo_last_name(void);
/* What was written to this file and not synced is gone, all of it: a failed sync, and the pages
 * were dropped. */
void power_lose_file(int fd);
/* The power goes: take back a part of everything, at random by the seed. */
void power_cut(void);

#endif
