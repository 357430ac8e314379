/* Processor and memory as this process may use them: /proc, and the limits of its control groups
 * (containers, batch systems), versions 1 and 2, its own and those above it.
 * Thread-safe. */
#ifndef QC_CONVERT_HOST_FACTS_H
#define QC_CONVERT_HOST_FACTS_H

#include "base/arena.h"

typedef struct {
    const char *cpu_name;       /* NULL if the system does not say */
    unsigned threads;           /* at least 1 */
    uint64_t memory_bytes;      /* 0 if the system does not say */
    uint64_t memory_free_bytes; /* available, caches that would be dropped included */
} qc_host_facts;

/* root: "" for this machine, or a folder that holds proc/ and sys/ (tests). threads: processors
 * that the affinity mask allows, which a CPU quota lowers to the next whole number. What cannot be
 * read is not known, never an error; QC_ERR_NOMEM only. */
QC_NODISCARD qc_status qc_host_read(qc_host_facts *out, qc_arena *arena, const char *root,
                                    unsigned threads, qc_error *err);

#endif
