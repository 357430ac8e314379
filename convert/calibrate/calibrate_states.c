#include "convert/calibrate/calibrate_engine.h"

#include "base/checked.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"

#include <stdlib.h>
#include <string.h>

#define ALIGNMENT 64u

static uint64_t array_bytes(uint64_t tokens, uint64_t width)
{
    uint64_t bytes = qc_sat_mul(qc_sat_mul(tokens, width), sizeof(float));
    return qc_sat_mul(qc_ceil_div_u64(bytes, ALIGNMENT), ALIGNMENT);
}

uint64_t qc_calibrate_states_memory(void)
{
    const char *text = getenv("QCONV_STATES_MEMORY");
    char *end = NULL;
    if (!text || *text < '0' || *text > '9')
        return QC_CALIBRATE_STATES_MEMORY;
    unsigned long long mib = strtoull(text, &end, 10);
    return *end ? QC_CALIBRATE_STATES_MEMORY : qc_sat_mul(mib, (uint64_t)1 << 20);
}

const char *qc_calibrate_folder(const qc_calibrator *k)
{
    const char *other = getenv("TMPDIR");
    return k->store ? qc_calibrated_folder(k->store) : other && *other ? other : "/tmp";
}

uint64_t qc_calibrate_states_bytes(uint64_t tokens, uint64_t hidden, uint64_t q)
{
    return qc_sat_mul(2, qc_sat_add(array_bytes(tokens, hidden), array_bytes(tokens, q)));
}

qc_status qc_calibrate_states_open(qc_calibrate_states *s, const qc_calibrator *k, uint64_t tokens,
                                   uint64_t hidden, uint64_t q, qc_error *err)
{
    uint64_t bytes = qc_calibrate_states_bytes(tokens, hidden, q);
    char text[QC_SIZE_TEXT_BYTES];
    memset(s, 0, sizeof *s);
    QC_TRY(qc_scratch_memory_open(&s->memory, bytes, qc_calibrate_states_memory(),
                                  qc_calibrate_folder(k), "hidden states", QC_CALIBRATE_FEWER,
                                  err));
    qc_console_detail(k->plan->call, 1, "hidden states: %s are kept in %s",
                      qc_text_bytes(text, bytes),
                      !s->memory.is_file ? "memory"
                      : k->store         ? "an unnamed file of the staging folder"
                                         : "an unnamed file of TMPDIR");
    unsigned char *at = s->memory.base;
    s->x = (float *)(void *)at;
    s->z = (float *)(void *)(at += array_bytes(tokens, hidden));
    s->x_attended = (float *)(void *)(at += array_bytes(tokens, hidden));
    s->z_attended = (float *)(void *)(at + array_bytes(tokens, q));
    return QC_OK;
}

void qc_calibrate_states_close(qc_calibrate_states *s)
{
    qc_scratch_memory_close(&s->memory);
    memset(s, 0, sizeof *s);
}
