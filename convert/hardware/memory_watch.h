/* `qconv hardware --watch` shows the memory of every GPU and process, sample after sample. */
#ifndef QC_CONVERT_MEMORY_WATCH_H
#define QC_CONVERT_MEMORY_WATCH_H

#include "convert/hardware/hardware.h"
#include "convert/term/call.h"

typedef struct {
    const char *as; /* --as, or NULL */
    int watch;
    const char *csv;  /* --csv FILE, or NULL */
    double interval;  /* seconds between samples; default 1 */
    uint64_t samples; /* how many samples to take; 0: until interrupted */
} qc_hardware_options;

/* Takes a sample every o->interval seconds, o->samples times (0: until interrupted). On a terminal
 * they are redrawn in place on standard output; elsewhere each GPU and process gets a line; with -q
 * neither is shown. They also go to the CSV file, which is flushed after each sample. At the end it
 * writes the peaks, as text or, with --json, as one object.
 *
 * Peaks are those of the samples, so memory that is taken and given back between two of them is not
 * seen. QC_ERR_DEVICE when there is no GPU, or the last one is lost. QC_ERR_INTERRUPTED after an
 * interrupt, when the peaks have been printed. QC_ERR_IO for the CSV file. */
QC_NODISCARD qc_status qc_memory_watch(const qc_hardware *h, const qc_call *call,
                                       const qc_hardware_options *o, qc_error *err);

#endif
