/* The rows of a manifest, which are in memory or made one at a time: see manifest.h. */
#include "formats/manifest.h"

#include <string.h>

qc_status qc_manifest_row(const qc_manifest *m, size_t i, qc_manifest_tensor *room,
                          const qc_manifest_tensor **row, qc_error *err)
{
    *row = m->tensors ? &m->tensors[i] : room;
    if (m->tensors)
        return QC_OK;
    memset(room, 0, sizeof *room);
    return m->tensor_row(m->tensor_ctx, i, room, err);
}
