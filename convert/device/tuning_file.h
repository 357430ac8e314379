/* A table of tuned choices (kernels/matmul_tuning.h) as a file. `qconv bench --tune --save FILE`
 * writes it; --tuning FILE or QCONV_TUNING gives it to commands that multiply on a GPU. The format
 * is described in docs/bench.md, "Tuning". */
#ifndef QC_CONVERT_TUNING_FILE_H
#define QC_CONVERT_TUNING_FILE_H

#include "base/arena.h"
#include "base/strbuf.h"
#include "convert/term/call.h"
#include "kernels/matmul_tuning.h"

/* Microseconds of a launch, with the plan's own choice and with the row's, for human readers. */
typedef struct {
    double plan_us, us;
} qc_tuning_times;

typedef struct {
    const char *path; /* of the file, for messages; NULL: there is none */
    const char *gpu;  /* the name of the GPU that it was made on */
    uint32_t sm, multiprocessors;
    int driver_version, runtime_version; /* 13000: CUDA 13.0; 0: not known */
    const char *program;                 /* the program that made it: "qconv 1.2.3" */
    const char *date;                    /* "2026-01-31T12:00:00Z" */
    qc_matmul_tuned *rows;               /* all of them for this GPU */
    uint32_t count;
    const qc_tuning_times *times; /* [count]; NULL: not known, as after reading */
} qc_tuning;

/* "general", "stream" or "tiles"; NULL for 0 and for a variant that does not exist. */
const char *qc_tuning_variant_name(uint32_t variant);

QC_NODISCARD qc_status qc_tuning_text(const qc_tuning *t, qc_strbuf *out, qc_error *err);
/* QC_ERR_INPUT says what is wrong, where, and what was expected. Members that this program does not
 * know are ignored. *out lives as long as the arena. */
QC_NODISCARD qc_status qc_tuning_read(qc_tuning *out, qc_arena *arena, const char *path,
                                      qc_error *err);

/* Reads the file that --tuning names, or QCONV_TUNING where --tuning is not given. Where neither is
 * given, *out has no path and no rows. Error messages begin with the one that named the file. */
QC_NODISCARD qc_status qc_tuning_open(qc_tuning *out, const qc_call *call, qc_arena *arena,
                                      qc_error *err);
/* Was it made on a GPU with this name, capability and number of multiprocessors? */
int qc_tuning_suits(const qc_tuning *t, const qc_cuda_device *d);
/* The choices for products on d: t's rows. Where t was made on another GPU it warns and returns an
 * empty table. */
qc_matmul_table qc_tuning_for(const qc_tuning *t, const qc_call *call, const qc_cuda_device *d);

#endif
