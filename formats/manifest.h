/* qconv.json: what an output directory of qconv contains, with digests of every byte. See
 * docs/format.md.
 *
 * convert and unpack write this structure, and verify, unpack and inspect read it; reading and
 * writing again gives the same bytes. Nothing in it depends on time, machine or threads. The text
 * ends with the digest of everything before it ("manifest_xxh3_128"). */
#ifndef QC_FORMATS_MANIFEST_H
#define QC_FORMATS_MANIFEST_H

#include "base/arena.h"
#include "base/dtype.h"
#include "base/strbuf.h"
#include "formats/digest.h"
#include "formats/text_file.h"

#define QC_MANIFEST_NAME    "qconv.json"
#define QC_MANIFEST_VERSION 1u
/* The version of a manifest with a placement. Others keep version 1, so that its readers can read
 * as much as possible. */
#define QC_MANIFEST_VERSION_PLACED 2u
/* The version of a manifest with calibrated weights, and perhaps a placement; for the same
 * reason. */
#define QC_MANIFEST_VERSION_CALIBRATED 3u

/* The version of a manifest with merged adapters, and perhaps a placement and calibrated
 * weights. */
#define QC_MANIFEST_VERSION_MERGED 4u

/* The relative squared error in a layer's outputs over calibration inputs. */
typedef struct {
    double rounded;    /* with searched scales and codes rounded to nearest */
    double calibrated; /* with the codes that are written */
} qc_manifest_outputs;

typedef struct {
    const char *name;
    const char *scheme; /* "nf4", "int8", ..., "cast", "dequant", "keep"; siblings: "state" */
    qc_dtype dtype;
    unsigned ndim;
    uint64_t dims[QC_MAX_DIMS];
    uint64_t begin, end;                  /* in the data buffer of its decompressed shard */
    uint64_t piece_bytes;                 /* content per frame */
    qc_digest content;                    /* digest over pieces of piece_bytes (digest.h) */
    uint64_t stored_offset, stored_bytes; /* where its frames lie in the shard's file, if
                                             compressed */
    qc_digest stored;                     /* digest over its stored frames, if compressed */
    uint32_t shard;
    int has_error; /* a quantized weight: */
    double rel_mse;
    double max_err;
    uint64_t max_err_index;
    const qc_manifest_outputs *outputs; /* for a calibrated weight; else NULL */
    const char *source_name;            /* NULL for siblings */
    qc_dtype source_dtype;
    uint64_t source_piece_bytes;
    qc_digest source; /* digest over pieces of source_piece_bytes of the source tensor */
} qc_manifest_tensor;

typedef struct {
    const char *name;       /* as the file is called after decompression */
    uint64_t content_bytes; /* decompressed file */
    uint64_t header_bytes;  /* 8 + N */
    qc_digest header;       /* digest of those bytes, in pieces as for a tensor of that size */
    uint32_t device;        /* index into the placement's devices; 0 where there is none */
    /* compressed only */
    uint64_t file_bytes;
    uint64_t header_stored_bytes; /* stored size of the first frames, from offset 0 */
    qc_digest header_stored;
    uint64_t table_bytes; /* seek table at the end */
    qc_digest table;
} qc_manifest_shard;

typedef struct {
    const char *path; /* relative; config.json, index, tokenizer... */
    uint64_t bytes;
    qc_digest digest;
} qc_manifest_file;

typedef struct {
    const char *name;
    uint64_t bytes;
    qc_digest header; /* digest of the 8 + N header bytes */
} qc_manifest_source;

/* An adapter that was merged into the source's weights. */
typedef struct {
    const char *name; /* name of its folder, without those above */
    double scale;     /* on top of its own */
    qc_digest config; /* digest of adapter_config.json */
    uint64_t bytes;   /* length of the file of its weights */
    qc_digest weights;
} qc_manifest_adapter;

/* A device that the output was made for, and how much of it lies there. */
typedef struct {
    const char *name;      /* "cuda:0", "cpu", "disk" */
    uint64_t tensor_bytes; /* sum over its tensors: what a reader needs there */
    uint64_t shard_bytes;  /* size of its shards, decompressed, headers included */
} qc_manifest_device;

/* What the shards were cut for, as convert --vram asked for it. */
typedef struct {
    const char *vram;
    double margin;
    uint64_t context, batch, images;
    uint64_t kv_bits;
    int mla_expanded;
    qc_manifest_device *devices; /* in the order of their shards; some may have no shards */
    size_t device_count;         /* 0: there is no placement, and the members above are not set */
} qc_manifest_placement;

/* What weights cost the answers to a text that did not calibrate: the KL divergence of the
 * predictions from the original's in nats, or the distance of an encoder's states. */
typedef struct {
    uint64_t tokens;           /* length of that text; 0: nobody looked */
    double search, calibrated; /* with scales of --scale search, and with calibrated weights */
} qc_manifest_judged;

/* What weights were calibrated with: a text, or second moments made elsewhere. */
typedef struct {
    const char *text; /* the name of its file, without folders; "default" is the bundled text */
    qc_digest digest; /* digest of the text */
    const char *tokenizer; /* kind, or "ids" */
    uint64_t tokens, windows, context;
    double mix;           /* the share of the tokens that are the bundled text's */
    double relative_rank; /* rank of the text's inputs / the bundled text's; 0: nobody looked */
    qc_manifest_judged judged;
    const char *hessians; /* the name of the file or folder; NULL: a text was used, named above */
    double damping;
    const char *sided; /* "one" or "two" */
} qc_manifest_calibration;

/* Fills *t with row i; what it points to lives until the next call. */
typedef qc_status (*qc_manifest_row_fn)(void *ctx, size_t i, qc_manifest_tensor *t, qc_error *err);

typedef struct {
    const char *qconv_version;
    const char *zstd_version; /* compressed only, else NULL */
    int compressed;
    int level;
    const char *to; /* option --to */
    uint64_t block_elems;
    int double_quant;
    const char *rest;
    const char *compute_dtype;
    uint64_t max_shard_bytes;
    const char **rules; /* --keep/--quantize in order: "keep GLOB", "quantize GLOB" */
    size_t rule_count;
    const char *scale; /* option --scale: "search" or "refit"; NULL: absmax. The text has it as
                          the last of the rules, "scale search", which earlier readers accept
                          unchanged */
    const qc_manifest_calibration *calibration; /* NULL: without --hessians */
    qc_manifest_placement placement;
    qc_manifest_adapter *adapters; /* in the order in which they were merged */
    size_t adapter_count;
    qc_manifest_source *sources;
    size_t source_count;
    qc_manifest_shard *shards;
    size_t shard_count;
    qc_manifest_tensor *tensors; /* in shard order, file order */
    size_t tensor_count;
    /* Where tensors is NULL, writing asks this for the rows one after the other, so that they need
     * no memory. Nobody then checks that names differ; the code that cut the shards has done
     * that. */
    qc_manifest_row_fn tensor_row;
    void *tensor_ctx;
    qc_manifest_file *files; /* sorted by path */
    size_t file_count;
} qc_manifest;

QC_NODISCARD qc_status qc_manifest_write(const qc_manifest *m, qc_strbuf *out, qc_error *err);
/* Writes the same text to an opened file, bit by bit; the caller finishes it. */
QC_NODISCARD qc_status qc_manifest_write_file(const qc_manifest *m, qc_text_file *out,
                                              qc_error *err);
/* What the file of a shard has behind the shard's name: ".zst" or "". */
static inline const char *qc_manifest_ending(const qc_manifest *m)
{
    return m->compressed ? ".zst" : "";
}
/* Makes m the manifest that the output would have, had nothing been compressed. */
void qc_manifest_make_plain(qc_manifest *m);
/* Gives row i of m: from m->tensors, or made anew in *room. */
QC_NODISCARD qc_status qc_manifest_row(const qc_manifest *m, size_t i, qc_manifest_tensor *room,
                                       const qc_manifest_tensor **row, qc_error *err);
/* Checks the closing digest first, then every field (ranges, order, sums). The strings live in
 * arena. */
QC_NODISCARD qc_status qc_manifest_parse(qc_manifest *out, qc_arena *arena, const char *text,
                                         size_t len, qc_error *err);
/* Reads and checks the manifest of a directory. QC_ERR_INPUT when there is none. QC_ERR_CHECK when
 * it is damaged in any way, because it was right when it was written. */
QC_NODISCARD qc_status qc_manifest_load(qc_manifest *out, qc_arena *arena, const char *dir,
                                        qc_error *err);
/* Does so if path is a folder with a manifest, which *found says. */
QC_NODISCARD qc_status qc_manifest_find(qc_manifest *out, int *found, qc_arena *arena,
                                        const char *path, qc_error *err);

#endif
