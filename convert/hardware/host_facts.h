/* The memory that this process may use, from /proc and from the limits of its control groups
 * (containers, batch systems) in versions 1 and 2, its own group and those above it; and the name
 * of the processor. Thread-safe. */
#ifndef QC_CONVERT_HOST_FACTS_H
#define QC_CONVERT_HOST_FACTS_H

#include "base/arena.h"

typedef struct {
    const char *cpu_name;       /* NULL if the system does not say */
    uint64_t memory_bytes;      /* 0 if the system does not say */
    uint64_t memory_free_bytes; /* counts caches that would be dropped as free */
} qc_host_facts;

/* root is "" for this machine, or a folder that holds proc/ and sys/ (for tests). A fact that
 * cannot be read is unknown and never an error; the only error is QC_ERR_NOMEM. */
QC_NODISCARD qc_status qc_host_read(qc_host_facts *out, qc_arena *arena, const char *root,
                                    qc_error *err);

#endif
