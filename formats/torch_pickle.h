/* Takes a pickle of torch.save apart without running anything.
 * Source: CPython Lib/pickletools.py (opcodes), torch/_utils.py (_rebuild_*),
 * torch/serialization.py (persistent ids).
 *
 * A pickle is a program for a stack machine that can call anything Python can import. The machine
 * here knows only the opcodes that tensors, dicts, lists, tuples, numbers and strings need, and a
 * fixed list of names (torch_rebuild.c); a call makes a record and does nothing else. Anything else
 * ends the reading with an error that gives the byte and the name of what was asked for.
 *
 * Memory and time are bounded by the length of the pickle: every opcode makes at most one value,
 * nothing recurses, and shared values stay shared (a value is a number and an index, not a
 * copy). */
#ifndef QC_FORMATS_TORCH_PICKLE_H
#define QC_FORMATS_TORCH_PICKLE_H

#include "base/dtype.h"
#include "base/status.h"

#define QC_PICKLE_MAX_BYTES (32u << 20) /* about 130,000 tensors */

typedef enum {
    QC_PICKLE_UNSET, /* never on the stack */
    QC_PICKLE_NONE,
    QC_PICKLE_BOOL,
    QC_PICKLE_INT,
    QC_PICKLE_STRING,
    QC_PICKLE_TUPLE,
    QC_PICKLE_LIST,
    QC_PICKLE_DICT, /* OrderedDict as well */
    QC_PICKLE_GLOBAL,
    QC_PICKLE_STORAGE,
    QC_PICKLE_TENSOR,
    QC_PICKLE_OPAQUE /* a float, bytes, a large integer, a torch.device: skipped */
} qc_pickle_kind;

/* What the members mean for each kind.
 *
 *   at     INT, BOOL                     the value (two's complement)
 *          STRING                        offset of its bytes in the text
 *          TUPLE                         index of its first item
 *          LIST, DICT, STORAGE, TENSOR   which one
 *          GLOBAL                        which name of torch_rebuild.c
 *   count  STRING                        bytes
 *          TUPLE                         items */
typedef struct {
    uint32_t kind; /* qc_pickle_kind */
    uint32_t count;
    uint64_t at;
} qc_pickle_value;

/* One entry of a list (key unset) or a dict. A key that was written twice has two entries. */
typedef struct {
    qc_pickle_value key;
    qc_pickle_value value;
    size_t next; /* SIZE_MAX at the end */
} qc_pickle_pair;

typedef struct {
    size_t first, last; /* SIZE_MAX when empty */
    size_t count;
} qc_pickle_container;

typedef struct {
    size_t key; /* offset of the key's bytes in the text */
    uint32_t key_bytes;
    qc_dtype dtype; /* U8 for UntypedStorage */
    uint64_t elems;
} qc_pickle_storage;

/* The arguments of _rebuild_tensor_v2, not yet checked against the storage. */
typedef struct {
    qc_dtype dtype;
    unsigned ndim;
    uint32_t storage;
    uint64_t offset_elems; /* within the storage */
    uint64_t dims[QC_MAX_DIMS];
    uint64_t strides[QC_MAX_DIMS]; /* elements */
} qc_pickle_tensor;

typedef struct {
    const unsigned char *text; /* borrowed */
    size_t len;
    size_t used_bytes; /* up to and with STOP */
    qc_pickle_value root;
    qc_pickle_value *items; /* of tuples */
    qc_pickle_container *containers;
    qc_pickle_pair *pairs;
    qc_pickle_storage *storages;
    qc_pickle_tensor *tensors;
    size_t item_count, container_count, pair_count, storage_count, tensor_count;
    size_t item_cap, container_cap, pair_cap, storage_cap, tensor_cap;
} qc_pickle;

/* Runs the one pickle that begins at text, which must outlive *out; bytes behind its STOP are not
 * looked at. QC_ERR_TRUNCATED when it does not end within len, QC_ERR_UNSUPPORTED for names and
 * opcodes that are not on the list, QC_ERR_INPUT for what no pickler writes. Messages begin with
 * "pickle byte N: ". On error *out is empty. Thread-safe: yes (no shared state). */
QC_NODISCARD qc_status qc_pickle_run(qc_pickle *out, const void *text, size_t len, qc_error *err);
void qc_pickle_deinit(qc_pickle *p);

/* Returns whether v is this string. */
int qc_pickle_is_string(const qc_pickle *p, const qc_pickle_value *v, const char *s);
/* Returns the value of the last entry with this key in a dict, or NULL if there is none. */
const qc_pickle_value *qc_pickle_get(const qc_pickle *p, const qc_pickle_value *dict,
                                     const char *key);

#endif
