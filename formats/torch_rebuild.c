/* The names that a checkpoint of tensors refers to, and what calling them would give.
 *
 * The list is closed: torch 2.15 writes no other name for a state dict of plain tensors and
 * parameters (tests/golden/make_torch_bins.py); torch wrote _rebuild_tensor before
 * _rebuild_tensor_v2. For a name on the list a record is made here, from arguments of the form that
 * torch gives; nothing is ever looked up or executed. */
#include "formats/torch_pickle_internal.h"

#include <inttypes.h>
#include <string.h>

#define NAME_SHOWN_BYTES 80
#define TENSORS_FLOOR    1024u
#define TENSOR_MIN_TEXT  32u /* the fewest bytes of pickle that one tensor takes */

typedef enum {
    CALL_ORDERED_DICT,
    CALL_SIZE,
    CALL_DEVICE,
    CALL_TENSOR,    /* storage, offset, size, stride */
    CALL_TENSOR_V2, /* and requires_grad, hooks[, metadata] */
    CALL_TENSOR_V3, /* and requires_grad, hooks, dtype[, metadata] */
    CALL_PARAMETER, /* data, requires_grad, hooks */
    CALL_PARAMETER_WITH_STATE,
    CALL_COUNT
} call_id;

/* A GLOBAL's `at`: a call, or a storage class, or a dtype. */
#define STORAGE_BASE   0x100u
#define DTYPE_BASE     0x200u
#define UNTYPED_GLOBAL (STORAGE_BASE + 0xffu)

static const struct {
    const char *module;
    const char *name;
} calls[CALL_COUNT] = {
    [CALL_ORDERED_DICT] = {"collections", "OrderedDict"},
    [CALL_SIZE] = {"torch", "Size"},
    [CALL_DEVICE] = {"torch", "device"},
    [CALL_TENSOR] = {"torch._utils", "_rebuild_tensor"},
    [CALL_TENSOR_V2] = {"torch._utils", "_rebuild_tensor_v2"},
    [CALL_TENSOR_V3] = {"torch._utils", "_rebuild_tensor_v3"},
    [CALL_PARAMETER] = {"torch._utils", "_rebuild_parameter"},
    [CALL_PARAMETER_WITH_STATE] = {"torch._utils", "_rebuild_parameter_with_state"},
};

/* Only the older types have storage classes; the storage of the others is untyped. */
static const struct {
    const char *storage; /* NULL where there is none */
    const char *name;
    qc_dtype dtype;
} types[] = {
    {"FloatStorage", "float32", QC_DTYPE_F32},
    {"HalfStorage", "float16", QC_DTYPE_F16},
    {"BFloat16Storage", "bfloat16", QC_DTYPE_BF16},
    {"DoubleStorage", "float64", QC_DTYPE_F64},
    {"LongStorage", "int64", QC_DTYPE_I64},
    {"IntStorage", "int32", QC_DTYPE_I32},
    {"ShortStorage", "int16", QC_DTYPE_I16},
    {"CharStorage", "int8", QC_DTYPE_I8},
    {"ByteStorage", "uint8", QC_DTYPE_U8},
    {"BoolStorage", "bool", QC_DTYPE_BOOL},
    {"ComplexFloatStorage", "complex64", QC_DTYPE_C64},
    {NULL, "uint16", QC_DTYPE_U16},
    {NULL, "uint32", QC_DTYPE_U32},
    {NULL, "uint64", QC_DTYPE_U64},
    {NULL, "float8_e4m3fn", QC_DTYPE_F8_E4M3},
    {NULL, "float8_e5m2", QC_DTYPE_F8_E5M2},
    {NULL, "float8_e8m0fnu", QC_DTYPE_F8_E8M0},
    {NULL, "float8_e4m3fnuz", QC_DTYPE_F8_E4M3FNUZ},
    {NULL, "float8_e5m2fnuz", QC_DTYPE_F8_E5M2FNUZ},
};

static int same(const char *text, size_t bytes, const char *name)
{
    return strlen(name) == bytes && memcmp(text, name, bytes) == 0;
}

static int find_global(const char *module, size_t module_bytes, const char *name, size_t name_bytes,
                       uint64_t *at)
{
    for (unsigned i = 0; i < CALL_COUNT; i++) {
        if (same(module, module_bytes, calls[i].module) && same(name, name_bytes, calls[i].name)) {
            *at = i;
            return 1;
        }
    }
    if (same(module, module_bytes, "torch.storage") && same(name, name_bytes, "UntypedStorage")) {
        *at = UNTYPED_GLOBAL;
        return 1;
    }
    if (!same(module, module_bytes, "torch"))
        return 0;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (types[i].storage && same(name, name_bytes, types[i].storage)) {
            *at = STORAGE_BASE + (uint64_t)types[i].dtype;
            return 1;
        }
        if (same(name, name_bytes, types[i].name)) {
            *at = DTYPE_BASE + (uint64_t)types[i].dtype;
            return 1;
        }
    }
    return 0;
}

qc_status qc_pickle_global(const char *module, size_t module_bytes, const char *name,
                           size_t name_bytes, qc_pickle_value *out, qc_error *err)
{
    uint64_t at = 0;
    if (!find_global(module, module_bytes, name, name_bytes, &at))
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "the pickle calls '%.*s.%.*s', which no checkpoint of plain tensors needs; it is "
                "refused, because qconv never runs code from a checkpoint",
                module_bytes < NAME_SHOWN_BYTES ? (int)module_bytes : NAME_SHOWN_BYTES, module,
                name_bytes < NAME_SHOWN_BYTES ? (int)name_bytes : NAME_SHOWN_BYTES, name);
    *out = (qc_pickle_value){.kind = QC_PICKLE_GLOBAL, .at = at};
    return QC_OK;
}

/* Returns the items of a tuple. Anything else, and an empty tuple, gives one item of no kind. */
static const qc_pickle_value *items_of(const qc_pickle *p, const qc_pickle_value *tuple)
{
    static const qc_pickle_value none;
    return tuple->kind == QC_PICKLE_TUPLE && tuple->count ? p->items + tuple->at : &none;
}

/* ---- storages ---- */

qc_status qc_pickle_persistent(qc_pickle *p, const qc_pickle_value *id, qc_pickle_value *out,
                               qc_error *err)
{
    const qc_pickle_value *v = items_of(p, id);
    int wide = id->kind == QC_PICKLE_TUPLE && (id->count == 5 || id->count == 6);
    if (!wide || !qc_pickle_is_string(p, &v[0], "storage"))
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "a persistent id is not ('storage', type, key, location, elements)");
    if (v[1].kind != QC_PICKLE_GLOBAL || v[1].at < STORAGE_BASE || v[1].at >= DTYPE_BASE ||
        v[2].kind != QC_PICKLE_STRING || v[3].kind != QC_PICKLE_STRING ||
        v[4].kind != QC_PICKLE_INT || (int64_t)v[4].at < 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "the type, key, location or elements of a storage are of the wrong kind");
    if (id->count == 6 && v[5].kind != QC_PICKLE_NONE)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "a storage is a view of another one, as torch wrote them before 0.4; load it and "
                "save it with a newer torch");
    QC_TRY(qc_pickle_grow(&p->storages, &p->storage_cap, p->storage_count,
                          TENSORS_FLOOR + p->len / TENSOR_MIN_TEXT, sizeof *p->storages, err));
    p->storages[p->storage_count] = (qc_pickle_storage){
        .key = (size_t)v[2].at,
        .key_bytes = v[2].count,
        .dtype = v[1].at == UNTYPED_GLOBAL ? QC_DTYPE_U8 : (qc_dtype)(v[1].at - STORAGE_BASE),
        .elems = v[4].at,
    };
    *out = (qc_pickle_value){.kind = QC_PICKLE_STORAGE, .at = p->storage_count++};
    return QC_OK;
}

/* ---- calls ---- */

static qc_status take_extents(const qc_pickle *p, const qc_pickle_value *v, const char *what,
                              uint64_t out[QC_MAX_DIMS], qc_error *err)
{
    if (v->kind != QC_PICKLE_TUPLE)
        QC_FAIL(err, QC_ERR_INPUT, "the %s of a tensor is not a tuple", what);
    if (v->count > QC_MAX_DIMS)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "a tensor has %" PRIu32 " dimensions; at most %d are read",
                v->count, QC_MAX_DIMS);
    for (uint32_t i = 0; i < v->count; i++) {
        const qc_pickle_value *d = &p->items[v->at + i];
        if (d->kind != QC_PICKLE_INT || (int64_t)d->at < 0)
            QC_FAIL(err, QC_ERR_INPUT, "the %s of a tensor holds something that is not a size",
                    what);
        out[i] = d->at;
    }
    return QC_OK;
}

static qc_status make_tensor(qc_pickle *p, const qc_pickle_value *v, uint32_t count,
                             const qc_pickle_value *dtype, qc_pickle_value *out, qc_error *err)
{
    qc_pickle_tensor t = {0};
    const qc_pickle_value *meta = count > (dtype ? 7u : 6u) ? &v[count - 1] : NULL;
    if (v[0].kind != QC_PICKLE_STORAGE || v[1].kind != QC_PICKLE_INT || (int64_t)v[1].at < 0)
        QC_FAIL(err, QC_ERR_INPUT, "a tensor has no storage or no offset");
    QC_TRY(take_extents(p, &v[2], "shape", t.dims, err));
    QC_TRY(take_extents(p, &v[3], "stride", t.strides, err));
    if (v[2].count != v[3].count)
        QC_FAIL(err, QC_ERR_INPUT, "a tensor has %" PRIu32 " dimensions, but %" PRIu32 " strides",
                v[2].count, v[3].count);
    if (dtype && (dtype->kind != QC_PICKLE_GLOBAL || dtype->at < DTYPE_BASE))
        QC_FAIL(err, QC_ERR_INPUT, "the dtype of a tensor is not a dtype");
    /* Conjugate and negative views keep a bit here that would change every value. */
    if (meta && meta->kind != QC_PICKLE_NONE &&
        (meta->kind != QC_PICKLE_DICT || p->containers[meta->at].count != 0))
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "a tensor has metadata (is it a conjugate or negative view?)");
    t.ndim = v[2].count;
    t.offset_elems = v[1].at;
    t.storage = (uint32_t)v[0].at;
    t.dtype = dtype ? (qc_dtype)(dtype->at - DTYPE_BASE) : p->storages[v[0].at].dtype;
    QC_TRY(qc_pickle_grow(&p->tensors, &p->tensor_cap, p->tensor_count,
                          TENSORS_FLOOR + p->len / TENSOR_MIN_TEXT, sizeof *p->tensors, err));
    p->tensors[p->tensor_count] = t;
    *out = (qc_pickle_value){.kind = QC_PICKLE_TENSOR, .at = p->tensor_count++};
    return QC_OK;
}

static qc_status check_count(call_id id, uint32_t count, uint32_t least, uint32_t most,
                             qc_error *err)
{
    if (count < least || count > most)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%s.%s is called with %" PRIu32 " arguments, which torch.save never writes",
                calls[id].module, calls[id].name, count);
    return QC_OK;
}

qc_status qc_pickle_call(qc_pickle *p, const qc_pickle_value *callee, const qc_pickle_value *args,
                         qc_pickle_value *out, qc_error *err)
{
    const qc_pickle_value *v = items_of(p, args);
    uint32_t n = args->count;
    if (callee->at >= CALL_COUNT)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "a storage class or a dtype is called as a function");
    call_id id = (call_id)callee->at;
    switch (id) {
    case CALL_ORDERED_DICT:
        QC_TRY(check_count(id, n, 0, 0, err));
        return qc_pickle_container_new(p, QC_PICKLE_DICT, out, err);
    case CALL_SIZE:
        QC_TRY(check_count(id, n, 1, 1, err));
        if (v[0].kind != QC_PICKLE_TUPLE)
            QC_FAIL(err, QC_ERR_UNSUPPORTED, "torch.Size needs a tuple");
        *out = v[0];
        return QC_OK;
    case CALL_DEVICE:
        *out = (qc_pickle_value){.kind = QC_PICKLE_OPAQUE};
        return QC_OK;
    case CALL_TENSOR:
        QC_TRY(check_count(id, n, 4, 4, err));
        return make_tensor(p, v, n, NULL, out, err);
    case CALL_TENSOR_V2:
        QC_TRY(check_count(id, n, 6, 7, err));
        return make_tensor(p, v, n, NULL, out, err);
    case CALL_TENSOR_V3:
        QC_TRY(check_count(id, n, 7, 8, err));
        return make_tensor(p, v, n, &v[6], out, err);
    case CALL_PARAMETER:
    case CALL_PARAMETER_WITH_STATE:
        QC_TRY(check_count(id, n, id == CALL_PARAMETER ? 3 : 4, id == CALL_PARAMETER ? 3 : 4, err));
        if (v[0].kind != QC_PICKLE_TENSOR)
            QC_FAIL(err, QC_ERR_UNSUPPORTED, "a parameter holds no tensor");
        *out = v[0];
        return QC_OK;
    case CALL_COUNT:
        break;
    }
    QC_FAIL(err, QC_ERR_INTERNAL, "call %" PRIu64 " is not known", callee->at);
}
