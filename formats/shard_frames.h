/* The frames of a compressed shard of an output, as its seek table and the manifest have them.
 * Source: docs/format.md, sections 2 and 5. */
#ifndef QC_FORMATS_SHARD_FRAMES_H
#define QC_FORMATS_SHARD_FRAMES_H

#include "formats/manifest.h"
#include "formats/seekable.h"

typedef struct {
    qc_seek_table table;  /* owned */
    size_t header_frames; /* the header's frames come first; then those of each tensor */
} qc_shard_frames;

/* Reads the seek table of shard m->shards[shard], open as f, and checks that it is the one that was
 * written. Its frames must be, in order and with none left over, those of the header and those of
 * tensors first <= i < end of m, which are all tensors of the shard. QC_ERR_CHECK where they are
 * not. On failure *out holds nothing. */
QC_NODISCARD qc_status qc_shard_frames_read(qc_shard_frames *out, const qc_file *f,
                                            const qc_manifest *m, size_t shard, size_t first,
                                            size_t end, qc_error *err);
void qc_shard_frames_deinit(qc_shard_frames *s);

/* Returns the number of pieces of a tensor in a checked manifest. They are its frames if the output
 * is compressed. */
uint32_t qc_shard_pieces(const qc_manifest_tensor *t);

#endif
