#include "convert/device/device_wish.h"

#include "base/text.h"

#include <stdlib.h>
#include <string.h>

#define EXPECTED "expected auto, cpu, cuda, cuda:0 or cuda:0,2"

/* Reads the index at entry, "2" or "cuda:2". It has at most three digits, so it cannot overflow. */
static int read_index(const char *entry, size_t len, unsigned *out)
{
    unsigned v = 0;
    if (len >= 5 && qc_begins_with(entry, "cuda:")) {
        entry += 5;
        len -= 5;
    }
    if (len == 0 || len > 3)
        return 0;
    for (size_t i = 0; i < len; i++) {
        if (entry[i] < '0' || entry[i] > '9')
            return 0;
        v = v * 10 + (unsigned)(entry[i] - '0');
    }
    *out = v;
    return 1;
}

/* Other programs say "0", "0,1", "gpu" and "gpu:1", so for these it has a suggestion. */
static qc_status refuse_wish(const char *name, const char *text, qc_error *err)
{
    const char *indices = qc_begins_with(text, "gpu:") ? text + 4 : text;
    if (strcmp(text, "gpu") == 0 || strcmp(text, "gpus") == 0 || strcmp(text, "nvidia") == 0)
        QC_FAIL(err, QC_ERR_USAGE, "%s: " EXPECTED ", found '%s'; did you mean cuda?", name, text);
    if (*indices >= '0' && *indices <= '9' && strlen(indices) < 64 &&
        indices[strspn(indices, "0123456789,")] == '\0')
        QC_FAIL(err, QC_ERR_USAGE, "%s: " EXPECTED ", found '%s'; did you mean cuda:%s?", name,
                text, indices);
    QC_FAIL(err, QC_ERR_USAGE, "%s: " EXPECTED ", found '%s'", name, text);
}

static qc_status read_list(qc_device_wish *w, const char *name, qc_error *err)
{
    if (!qc_begins_with(w->text, "cuda:"))
        return refuse_wish(name, w->text, err);
    for (const char *entry = w->text;; entry++) {
        size_t len = strcspn(entry, ",");
        unsigned index = 0;
        if (!read_index(entry, len, &index))
            QC_FAIL(err, QC_ERR_USAGE, "%s: " EXPECTED ", found '%s'", name, w->text);
        if (index >= QC_MAX_GPUS)
            QC_FAIL(err, QC_ERR_DEVICE, "%s%s: there is no cuda:%u", w->from, w->text, index);
        if (w->gpus >> index & 1)
            QC_FAIL(err, QC_ERR_USAGE, "%s: cuda:%u is there twice in '%s'", name, index, w->text);
        w->gpus |= 1ull << index;
        entry += len;
        if (*entry == '\0')
            return QC_OK;
    }
}

qc_status qc_device_wish_read(qc_device_wish *out, const char *option, qc_error *err)
{
    const char *text = option;
    const char *name = "--device";
    *out = (qc_device_wish){.from = "--device ", .text = ""};
    if (!text || !*text) {
        text = getenv("QCONV_DEVICE");
        name = "QCONV_DEVICE";
        out->from = "QCONV_DEVICE=";
    }
    if (!text || !*text) {
        out->from = "";
        return QC_OK;
    }
    out->text = text;
    if (strcmp(text, "auto") == 0)
        return QC_OK;
    if (strcmp(text, "cpu") == 0) {
        out->cpu = 1;
        return QC_OK;
    }
    out->cuda = 1;
    return strcmp(text, "cuda") == 0 ? QC_OK : read_list(out, name, err);
}
