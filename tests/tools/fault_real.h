/* The system calls behind those that fault_disk.c stands in for. */
#ifndef QC_TESTS_FAULT_REAL_H
#define QC_TESTS_FAULT_REAL_H

#include <stdint.h>
#include <sys/types.h>

/* Says why on standard error and ends the process with 99: the test itself is at fault. */
void fault_die(const char *why) __attribute__((noreturn));
int fault_real_open(const char *path, int flags, mode_t mode);
ssize_t fault_real_pread(int fd, void *dst, size_t len, uint64_t offset);
ssize_t fault_real_pwrite(int fd, const void *src, size_t len, uint64_t offset);
int fault_real_unlink(const char *path);
int fault_real_rename(const char *from, const char *to);
int fault_real_mkdir(const char *path, mode_t mode);

#endif
