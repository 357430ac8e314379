/* `qconv hardware --watch`: memory of every GPU and process, sample after sample. */
#ifndef QC_CONVERT_MEMORY_WATCH_H
#define QC_CONVERT_MEMORY_WATCH_H

#include "convert/hardware/hardware.h"
#include "convert/term/call.h"

typedef struct {
    const char *as; /* --as, or NULL */
    int watch;
    const char *csv;  /* --csv FILE, or NULL */
    double interval;  /* seconds between samples; default 1 */
    uint64_t samples; /* then stop; 0: until interrupted */
} qc_hardware_options;

/* Samples every o->interval seconds, o->samples times (0: until interrupted), to
 * standard output: redrawn in place on a terminal, one line per GPU and process otherwise, nothing
 * of either with -q; and to the CSV file, each sample flushed to the file. Then the peaks, as text
 * or, with --json, as one object.
 * Peaks are those of samples: what comes and goes between two of them is not seen.
 * QC_ERR_DEVICE when there is no GPU, or the last one is lost; QC_ERR_INTERRUPTED after an
 * interrupt, the peaks printed; QC_ERR_IO for the CSV file. */
QC_NODISCARD qc_status qc_memory_watch(const qc_hardware *h, const qc_call *call,
                                       const qc_hardware_options *o, qc_error *err);

#endif
