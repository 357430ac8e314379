/* formats/torch_pickle.h: pickles written by hand, opcode by opcode. What torch writes is in
 * unit_torch_file.c. */
#include "formats/torch_pickle.h"

#include "base/alloc.h"
#include "formats/torch_state.h"
#include "tests/fixtures/fixture_files.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

/* A string literal with its zeros, without the one at its end. */
#define P(text) text, sizeof(text) - 1

static void runs(qc_pickle *p, const char *text, size_t len)
{
    qc_error err = {0};
    if (qc_pickle_run(p, text, len, &err) != QC_OK)
        fail_msg("%s", err.msg);
}

static void reads_numbers(void **state)
{
    static const struct {
        const char *text;
        size_t len;
        int64_t value;
    } cases[] = {
        {P("\x80\2K\0."), 0},
        {P("\x80\2K\xff."), 255},
        {P("\x80\2M\xff\xff."), 65535},
        {P("\x80\2J\xff\xff\xff\x7f."), 2147483647},
        {P("\x80\2J\xff\xff\xff\xff."), -1},
        {P("\x80\2J\0\0\0\x80."), -2147483648ll},
        {P("\x80\2\x8a\0."), 0},
        {P("\x80\2\x8a\1\x80."), -128},
        {P("\x80\2\x8a\5\0\0\0\0\1."), 4294967296ll},
        {P("\x80\2\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f."), INT64_MAX},
        {P("\x80\2\x8b\2\0\0\0\0\1."), 256},
    };
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        qc_pickle p;
        runs(&p, cases[i].text, cases[i].len);
        assert_int_equal(p.root.kind, QC_PICKLE_INT);
        assert_true((int64_t)p.root.at == cases[i].value);
        assert_true(p.used_bytes == cases[i].len);
        qc_pickle_deinit(&p);
    }
}

static void reads_other_values(void **state)
{
    static const struct {
        const char *text;
        size_t len;
        qc_pickle_kind kind;
    } cases[] = {
        {P("\x80\2N."), QC_PICKLE_NONE},
        {P("\x80\5\x88."), QC_PICKLE_BOOL},
        {P("\x80\2G????????."), QC_PICKLE_OPAQUE},
        {P("\x80\2\x8a\x09?????????."), QC_PICKLE_OPAQUE},
        {P("\x80\2U\2ab."), QC_PICKLE_STRING},
        {P("\x80\2T\2\0\0\0ab."), QC_PICKLE_STRING},
        {P("\x80\2X\2\0\0\0ab."), QC_PICKLE_STRING},
        {P("\x80\4\x8c\2ab."), QC_PICKLE_STRING},
        {P("\x80\4\x8d\2\0\0\0\0\0\0\0ab."), QC_PICKLE_STRING},
        {P("\x80\3C\2ab."), QC_PICKLE_OPAQUE},
        {P("\x80\3B\2\0\0\0ab."), QC_PICKLE_OPAQUE},
        {P("\x80\4\x8e\2\0\0\0\0\0\0\0ab."), QC_PICKLE_OPAQUE},
        {P("\x80\2)."), QC_PICKLE_TUPLE},
        {P("\x80\2]."), QC_PICKLE_LIST},
        {P("\x80\2}."), QC_PICKLE_DICT},
        {P("\x80\4\x95\2\0\0\0\0\0\0\0}."), QC_PICKLE_DICT},
        {P("\x80\2ccollections\nOrderedDict\n)R."), QC_PICKLE_DICT},
        {P("\x80\4\x8c\x0b"
           "collections\x8c\x0b"
           "OrderedDict\x93)R."),
         QC_PICKLE_DICT},
        {P("\x80\2ccollections\nOrderedDict\n."), QC_PICKLE_GLOBAL},
        {P("\x80\2ctorch\nfloat8_e4m3fn\n."), QC_PICKLE_GLOBAL},
        {P("\x80\2ctorch\nSize\n(K\1K\2t\x85R."), QC_PICKLE_TUPLE},
        {P("\x80\2ctorch\ndevice\nU\3cpu\x85R."), QC_PICKLE_OPAQUE},
    };
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        qc_pickle p;
        runs(&p, cases[i].text, cases[i].len);
        if (p.root.kind != (uint32_t)cases[i].kind)
            fail_msg("case %zu: kind %u", i, p.root.kind);
        if (p.root.kind == QC_PICKLE_STRING)
            assert_true(qc_pickle_is_string(&p, &p.root, "ab"));
        qc_pickle_deinit(&p);
    }
}

static void reads_containers(void **state)
{
    qc_pickle p;
    (void)state;
    /* {'a': 1, 'b': [2, 3, 4], 'a': (5, 6)} and bytes behind it */
    runs(&p, P("\x80\2}q\0(U\1aK\1U\1b](K\2K\3eK\4aU\1aK\5K\6\x86u.more"));
    assert_int_equal(p.root.kind, QC_PICKLE_DICT);
    assert_true(p.used_bytes == p.len - 4 && p.containers[p.root.at].count == 3);
    const qc_pickle_value *a = qc_pickle_get(&p, &p.root, "a");
    const qc_pickle_value *b = qc_pickle_get(&p, &p.root, "b");
    assert_true(a && a->kind == QC_PICKLE_TUPLE && a->count == 2);
    assert_true(p.items[a->at].at == 5 && p.items[a->at + 1].at == 6);
    assert_true(b && b->kind == QC_PICKLE_LIST && p.containers[b->at].count == 3);
    assert_true(p.pairs[p.containers[b->at].first].value.at == 2);
    assert_true(p.pairs[p.containers[b->at].last].value.at == 4);
    assert_null(qc_pickle_get(&p, &p.root, "c"));
    assert_null(qc_pickle_get(&p, b, "a"));
    qc_pickle_deinit(&p);
}

static void shares_through_the_memo(void **state)
{
    qc_pickle p;
    (void)state;
    /* A list in itself; a dict filled after it was put into the memo. */
    runs(&p, P("\x80\2]q\0h\0a."));
    assert_true(p.pairs[0].value.kind == QC_PICKLE_LIST && p.pairs[0].value.at == p.root.at);
    qc_pickle_deinit(&p);
    runs(&p, P("\x80\4}\x94]\x94h\0ah\0U\1kK\7s\x85\x94h\1\x86."));
    qc_pickle_deinit(&p);
    runs(&p, P("\x80\2}r\1\0\0\0U\1kj\1\0\0\0s."));
    assert_true(qc_pickle_get(&p, &p.root, "k")->at == p.root.at);
    qc_pickle_deinit(&p);
}

#define STORAGE(key, elems) "(U\7storagectorch\nFloatStorage\nU\1" key "U\3cpuK" elems "tQ"
#define TENSOR(key, elems, shape, stride)                                                          \
    "ctorch._utils\n_rebuild_tensor_v2\n(" STORAGE(key, elems) "K\0" shape stride "\x89}tR"

static const struct {
    const char *text;
    size_t len;
    qc_status status;
    const char *message;
} wrong[] = {
    {P(""), QC_ERR_TRUNCATED, "pickle byte 0: expected 2 bytes, found 0"},
    {P("\x80"), QC_ERR_TRUNCATED, "pickle byte 0: expected 2 bytes, found 1"},
    {P("(dp0\n."), QC_ERR_INPUT,
     "pickle byte 0: expected byte 0x80 at the beginning of a pickle, found 0x28"},
    {P("\x80\1."), QC_ERR_UNSUPPORTED, "pickle byte 0: expected pickle protocol 2 to 5, found 1"},
    {P("\x80\6."), QC_ERR_UNSUPPORTED, "pickle byte 0: expected pickle protocol 2 to 5, found 6"},
    {P("\x80\2."), QC_ERR_INPUT, "pickle byte 2: opcode 0x2e takes 1 values, but the stack has 0"},
    {P("\x80\2N"), QC_ERR_TRUNCATED, "pickle byte 3: expected 1 bytes, found 0"},
    {P("\x80\2(."), QC_ERR_INPUT, "pickle byte 3: opcode 0x2e takes 1 values, but the stack has 0"},
    {P("\x80\2N(."), QC_ERR_INPUT,
     "pickle byte 4: opcode 0x2e takes 1 values, but the stack has 0"},
    {P("\x80\2t."), QC_ERR_INPUT, "pickle byte 2: opcode 0x74 needs a mark, but there is none"},
    {P("\x80\2N\x86."), QC_ERR_INPUT,
     "pickle byte 3: opcode 0x86 takes 2 values, but the stack has 1"},
    {P("\x80\2N(N\x86."), QC_ERR_INPUT,
     "pickle byte 5: opcode 0x86 takes 2 values, but the stack has 1"},
    {P("\x80\2(u."), QC_ERR_INPUT,
     "pickle byte 3: opcode 0x75 has nothing to add to, or only half a pair"},
    {P("\x80\2}(Nu."), QC_ERR_INPUT,
     "pickle byte 5: opcode 0x75 has nothing to add to, or only half a pair"},
    {P("\x80\2](NNu."), QC_ERR_UNSUPPORTED, "pickle byte 6: opcode 0x75 needs a dict"},
    {P("\x80\2}Na."), QC_ERR_UNSUPPORTED,
     "pickle byte 4: opcode 0x61 needs a "
     "list"},
    {P("\x80\2Na."), QC_ERR_INPUT,
     "pickle byte 3: opcode 0x61 takes 2 values, but the stack has 1"},
    {P("\x80\2h\0."), QC_ERR_INPUT, "pickle byte 2: memo number 0 was never set"},
    {P("\x80\2j\xff\xff\xff\xff."), QC_ERR_INPUT,
     "pickle byte 2: memo number 4294967295 was never set"},
    {P("\x80\2q\0."), QC_ERR_INPUT,
     "pickle byte 2: opcode 0x71 takes 1 values, but the stack has 0"},
    {P("\x80\2Nr\xff\xff\xff\x7f."), QC_ERR_INPUT,
     "pickle byte 3: memo number 2147483647 cannot be in a pickle of 9 bytes"},
    {P("\x80\2X\xff\xff\xff\xff"
       "a."),
     QC_ERR_TRUNCATED, "pickle byte 2: expected 4294967295 bytes, found 2"},
    {P("\x80\4\x8d\xff\xff\xff\xff\xff\xff\xff\xff"
       "a."),
     QC_ERR_TRUNCATED, "pickle byte 2: expected 18446744073709551615 bytes, found 2"},
    {P("\x80\4\x95\3\0\0\0\0\0\0\0}."), QC_ERR_TRUNCATED,
     "pickle byte 2: a frame of 3 bytes does not fit the 2 that are left"},
    {P("\x80\2\x8b\xff\xff\xff\xff."), QC_ERR_TRUNCATED,
     "pickle byte 2: expected 4294967295 bytes, found 1"},
    {P("\x80\2cos\nsystem"), QC_ERR_TRUNCATED, "pickle byte 2: a name is cut off after 6 bytes"},
    {P("\x80\2cos\nsystem\nU\4true\x85R."), QC_ERR_UNSUPPORTED,
     "pickle byte 2: the pickle calls 'os.system', which no checkpoint of plain tensors needs; it "
     "is refused, because qconv never runs code from a checkpoint"},
    {P("\x80\4\x8c\2os\x8c\6system\x93."), QC_ERR_UNSUPPORTED,
     "pickle byte 14: the pickle calls 'os.system', which no checkpoint of plain tensors needs; it "
     "is refused, because qconv never runs code from a checkpoint"},
    {P("\x80\2ccollections\nOrderedDict.__reduce__\n."), QC_ERR_UNSUPPORTED,
     "pickle byte 2: the pickle calls 'collections.OrderedDict.__reduce__', which no checkpoint of "
     "plain tensors needs; it is refused, because qconv never runs code from a checkpoint"},
    {P("\x80\2ctorch\nfloat32\x1b\n."), QC_ERR_UNSUPPORTED,
     "pickle byte 2: the pickle calls 'torch.float32?', which no checkpoint of plain tensors "
     "needs; it is refused, because qconv never runs code from a checkpoint"},
    {P("\x80\4NN\x93."), QC_ERR_INPUT, "pickle byte 4: STACK_GLOBAL needs two strings"},
    {P("\x80\2(ios\nsystem\n."), QC_ERR_UNSUPPORTED,
     "pickle byte 3: opcode INST is not one that tensors need"},
    {P("\x80\2ccollections\nOrderedDict\n)\x81."), QC_ERR_UNSUPPORTED,
     "pickle byte 28: opcode NEWOBJ is not one that tensors need"},
    {P("\x80\2\x82\1."), QC_ERR_UNSUPPORTED,
     "pickle byte 2: opcode EXT1 is not one that tensors need"},
    {P("\x80\2P0\n."), QC_ERR_UNSUPPORTED,
     "pickle byte 2: opcode PERSID is not one that tensors need"},
    {P("\x80\2N0."), QC_ERR_UNSUPPORTED, "pickle byte 3: opcode 0x30 is not one that tensors need"},
    {P("\x80\2\x80\2."), QC_ERR_UNSUPPORTED,
     "pickle byte 2: opcode 0x80 is not one that tensors need"},
    {P("\x80\2U\1a)R."), QC_ERR_UNSUPPORTED,
     "pickle byte 6: a call has something else than a name and its arguments"},
    {P("\x80\2ccollections\nOrderedDict\nNR."), QC_ERR_UNSUPPORTED,
     "pickle byte 28: a call has something else than a name and its arguments"},
    {P("\x80\2ccollections\nOrderedDict\n]\x85R."), QC_ERR_UNSUPPORTED,
     "pickle byte 29: collections.OrderedDict is called with 1 arguments, which torch.save "
     "never writes"},
    {P("\x80\2ctorch\nFloatStorage\n)R."), QC_ERR_UNSUPPORTED,
     "pickle byte 23: a storage class or a dtype is called as a function"},
    {P("\x80\2ctorch\nSize\nN\x85R."), QC_ERR_UNSUPPORTED,
     "pickle byte 16: torch.Size needs a tuple"},
    {P("\x80\2N}b."), QC_ERR_UNSUPPORTED, "pickle byte 4: BUILD needs a dict"},
    {P("\x80\2}b."), QC_ERR_INPUT,
     "pickle byte 3: opcode 0x62 takes 2 values, but the stack has 1"},
    {P("\x80\2NQ."), QC_ERR_UNSUPPORTED,
     "pickle byte 3: a persistent id is not ('storage', type, key, location, elements)"},
    {P("\x80\2)Q."), QC_ERR_UNSUPPORTED,
     "pickle byte 3: a persistent id is not ('storage', type, key, location, elements)"},
    {P("\x80\2(U\6moduleNNNNtQ."), QC_ERR_UNSUPPORTED,
     "pickle byte 16: a persistent id is not ('storage', type, key, location, elements)"},
    {P("\x80\2(U\7storageNU\1aU\3cpuK\1tQ."), QC_ERR_INPUT,
     "pickle byte 24: the type, key, location or elements of a storage are of the wrong kind"},
    {P("\x80\2(U\7storagectorch\nfloat32\nU\1aU\3cpuK\1tQ."), QC_ERR_INPUT,
     "pickle byte 38: the type, key, location or elements of a storage are of the wrong kind"},
    {P("\x80\2(U\7storagectorch\nFloatStorage\nU\1aU\3cpuJ\xff\xff\xff\xfftQ."), QC_ERR_INPUT,
     "pickle byte 46: the type, key, location or elements of a storage are of the wrong kind"},
    {P("\x80\2(U\7storagectorch\nFloatStorage\nU\1aU\3cpuK\1)tQ."), QC_ERR_UNSUPPORTED,
     "pickle byte 44: a storage is a view of another one, as torch wrote them before 0.4; load it "
     "and save it with a newer torch"},
    {P("\x80\2ctorch._utils\n_rebuild_tensor_v2\n)R."), QC_ERR_UNSUPPORTED,
     "pickle byte 36: torch._utils._rebuild_tensor_v2 is called with 0 arguments, which torch.save "
     "never writes"},
    {P("\x80\2ctorch._utils\n_rebuild_tensor_v2\n(NNNNNNtR."), QC_ERR_INPUT,
     "pickle byte 43: a tensor has no storage or no offset"},
    {P("\x80\2" TENSOR("0", "\1", "N", ")") "."), QC_ERR_INPUT,
     "pickle byte 85: the shape of a tensor is not a tuple"},
    {P("\x80\2" TENSOR("0", "\1", "N\x85", ")") "."), QC_ERR_INPUT,
     "pickle byte 86: the shape of a tensor holds something that is not a size"},
    {P("\x80\2" TENSOR("0", "\1", "J\xff\xff\xff\xff\x85", ")") "."), QC_ERR_INPUT,
     "pickle byte 90: the shape of a tensor holds something that is not a size"},
    {P("\x80\2" TENSOR("0", "\1", ")", "K\1\x85") "."), QC_ERR_INPUT,
     "pickle byte 87: a tensor has 0 dimensions, but 1 strides"},
    {P("\x80\2ctorch._utils\n_rebuild_parameter\n(N\x89}tR."), QC_ERR_UNSUPPORTED,
     "pickle byte 40: a parameter holds no tensor"},
    {P("\x80\4\x93."), QC_ERR_INPUT,
     "pickle byte 2: opcode 0x93 takes 1 values, but the stack has 0"},
    {P("\x80\4N\x93."), QC_ERR_INPUT,
     "pickle byte 3: opcode 0x93 takes 1 values, but the stack has 0"},
    {P("\x80\2b."), QC_ERR_INPUT, "pickle byte 2: opcode 0x62 takes 2 values, but the stack has 0"},
    {P("\x80\2Q."), QC_ERR_INPUT, "pickle byte 2: opcode 0x51 takes 1 values, but the stack has 0"},
    {P("\x80\2G1234567"), QC_ERR_TRUNCATED, "pickle byte 2: expected 8 bytes, found 7"},
    {P("\x80\2J\1\2\3"), QC_ERR_TRUNCATED, "pickle byte 2: expected 4 bytes, found 3"},
    {P("\x80\2Nr\1\0\0"), QC_ERR_TRUNCATED, "pickle byte 3: expected 4 bytes, found 3"},
    {P("\x80\2j\1\0\0"), QC_ERR_TRUNCATED, "pickle byte 2: expected 4 bytes, found 3"},
    {P("\x80\4\x95\3\0\0"), QC_ERR_TRUNCATED, "pickle byte 2: expected 8 bytes, found 3"},
    {P("\x80\2(U\7storageccollections\nOrderedDict\nU\1aU\3cpuK\1tQ."), QC_ERR_INPUT,
     "pickle byte 48: the type, key, location or elements of a storage are of the wrong kind"},
    {P("\x80\2(U\7storagectorch\nFloatStorage\nNU\3cpuK\1tQ."), QC_ERR_INPUT,
     "pickle byte 41: the type, key, location or elements of a storage are of the wrong kind"},
    {P("\x80\2(U\7storagectorch\nFloatStorage\nU\1aNK\1tQ."), QC_ERR_INPUT,
     "pickle byte 39: the type, key, location or elements of a storage are of the wrong kind"},
    {P("\x80\2(U\7storagectorch\nFloatStorage\nU\1aU\3cpuNtQ."), QC_ERR_INPUT,
     "pickle byte 42: the type, key, location or elements of a storage are of the wrong kind"},
    {P("\x80\2ctorch.storage\nTypedStorage\n."), QC_ERR_UNSUPPORTED,
     "pickle byte 2: the pickle calls 'torch.storage.TypedStorage', which no checkpoint of plain "
     "tensors needs; it is refused, because qconv never runs code from a checkpoint"},
    {P("\x80\2ctorch\nSize\n)R."), QC_ERR_UNSUPPORTED,
     "pickle byte 15: torch.Size is called with 0 arguments, which torch.save never writes"},
    {P("\x80\2ctorch._utils\n_rebuild_tensor\n)R."), QC_ERR_UNSUPPORTED,
     "pickle byte 33: torch._utils._rebuild_tensor is called with 0 arguments, which torch.save "
     "never writes"},
    {P("\x80\2ctorch._utils\n_rebuild_tensor_v2\n(" STORAGE("0", "\1") "N))\x89}tR."), QC_ERR_INPUT,
     "pickle byte 84: a tensor has no storage or no offset"},
    {P("\x80\2ctorch._utils\n_rebuild_tensor_v2\n(" STORAGE("0",
                                                            "\1") "J\xff\xff\xff\xff))\x89}tR."),
     QC_ERR_INPUT, "pickle byte 88: a tensor has no storage or no offset"},
    {P("\x80\2ctorch._utils\n_rebuild_tensor_v2\n(" STORAGE("0", "\1") "K\0))\x89}]tR."),
     QC_ERR_UNSUPPORTED,
     "pickle byte 86: a tensor has metadata (is it a conjugate or negative view?)"},
    {P("\x80\2ctorch._utils\n_rebuild_tensor_v3\n(" STORAGE("0", "\1") "K\0))\x89}NtR."),
     QC_ERR_INPUT, "pickle byte 86: the dtype of a tensor is not a dtype"},
    {P("\x80\2ctorch._utils\n_rebuild_tensor_v3\n(" STORAGE(
         "0", "\1") "K\0))\x89}ctorch\nFloatStorage\ntR."),
     QC_ERR_INPUT, "pickle byte 105: the dtype of a tensor is not a dtype"},
    {P("\x80\2ctorch._utils\n_rebuild_parameter\n)R."), QC_ERR_UNSUPPORTED,
     "pickle byte 36: torch._utils._rebuild_parameter is called with 0 arguments, which torch.save "
     "never writes"},
    {P("\x80\2ctorch._utils\n_rebuild_parameter_with_state\n)R."), QC_ERR_UNSUPPORTED,
     "pickle byte 47: torch._utils._rebuild_parameter_with_state is called with 0 arguments, which "
     "torch.save never writes"},
};

static void says_what_is_wrong(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(wrong); i++) {
        qc_pickle p;
        qc_error err = {0};
        qc_status st = qc_pickle_run(&p, wrong[i].text, wrong[i].len, &err);
        if (st != wrong[i].status || strcmp(err.msg, wrong[i].message) != 0)
            fail_msg("case %zu: %s '%s', expected %s '%s'", i, qc_status_name(st), err.msg,
                     qc_status_name(wrong[i].status), wrong[i].message);
        assert_true(!p.items && !p.containers && !p.pairs && !p.storages && !p.tensors);
    }
}

static void makes_tensors(void **state)
{
    qc_pickle p;
    (void)state;
    runs(&p, P("\x80\2}U\1w" TENSOR("7", "\6", "K\2K\3\x86", "K\3K\1\x86") "s."));
    const qc_pickle_value *w = qc_pickle_get(&p, &p.root, "w");
    assert_true(w && w->kind == QC_PICKLE_TENSOR && p.tensor_count == 1 && p.storage_count == 1);
    const qc_pickle_tensor *t = &p.tensors[w->at];
    assert_true(t->dtype == QC_DTYPE_F32 && t->ndim == 2 && t->offset_elems == 0);
    assert_true(t->dims[0] == 2 && t->dims[1] == 3 && t->strides[0] == 3 && t->strides[1] == 1);
    const qc_pickle_storage *s = &p.storages[t->storage];
    assert_true(s->elems == 6 && s->key_bytes == 1 && p.text[s->key] == '7');
    qc_pickle_deinit(&p);
}

/* The four calls that make one: metadata that is absent, None or empty changes nothing. */
static void makes_tensors_by_every_call(void **state)
{
    static const struct {
        const char *text;
        size_t len;
        qc_dtype dtype;
    } cases[] = {
#define OF(call, behind)                                                                           \
    "\x80\2ctorch._utils\n" call "\n(" STORAGE("0", "\6") "K\2K\4\x85K\1\x85" behind "tR."
        {P(OF("_rebuild_tensor", "")), QC_DTYPE_F32},
        {P(OF("_rebuild_tensor_v2", "\x89}")), QC_DTYPE_F32},
        {P(OF("_rebuild_tensor_v2", "\x89}N")), QC_DTYPE_F32},
        {P(OF("_rebuild_tensor_v2", "\x89}}")), QC_DTYPE_F32},
        {P(OF("_rebuild_tensor_v3", "\x89}ctorch\nint32\n")), QC_DTYPE_I32},
        {P(OF("_rebuild_tensor_v3", "\x89}ctorch\nint32\n}")), QC_DTYPE_I32},
#undef OF
    };
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        qc_pickle p;
        runs(&p, cases[i].text, cases[i].len);
        assert_true(p.root.kind == QC_PICKLE_TENSOR && p.tensor_count == 1);
        assert_true(p.tensors->dtype == cases[i].dtype && p.tensors->offset_elems == 2);
        assert_true(p.tensors->ndim == 1 && p.tensors->dims[0] == 4 && p.tensors->strides[0] == 1);
        qc_pickle_deinit(&p);
    }
}

/* ---- what is large for its text ---- */

/* Lists of two of the list before: 2^n values for who walks them. */
static void is_not_moved_by_memo_bombs(void **state)
{
    qc_strbuf text;
    qc_pickle p;
    qc_torch_state out;
    qc_arena arena;
    (void)state;
    qc_strbuf_init(&text, 1u << 20);
    assert_int_equal(qc_strbuf_add(&text, "\x80\4]\x94", 4, NULL), QC_OK);
    for (unsigned i = 0; i < 200; i++) {
        char step[] = {']', (char)0x94, '(', 'h', (char)i, 'h', (char)i, 'e'};
        assert_int_equal(qc_strbuf_add(&text, step, sizeof step, NULL), QC_OK);
    }
    qc_strbuf whole; /* {'x': that} */
    qc_strbuf_init(&whole, 1u << 20);
    assert_int_equal(qc_strbuf_add(&whole, "\x80\4}U\1x", 6, NULL), QC_OK);
    assert_int_equal(qc_strbuf_add(&whole, text.data + 2, text.len - 2, NULL), QC_OK);
    for (unsigned i = 0; i < 200; i++) /* each list took one place on the stack: into tuples */
        assert_int_equal(qc_strbuf_add(&whole, "\x86", 1, NULL), QC_OK);
    assert_int_equal(qc_strbuf_add(&whole, "s.", 2, NULL), QC_OK);
    runs(&p, whole.data, whole.len);
    assert_true(p.pair_count < 500 && p.container_count < 300);
    qc_arena_init(&arena);
    assert_int_equal(qc_torch_state_read(&out, &arena, &p, NULL), QC_OK);
    assert_true(out.count == 0 && out.skipped == 1);
    qc_arena_deinit(&arena);
    qc_pickle_deinit(&p);
    qc_strbuf_deinit(&text);
    qc_strbuf_deinit(&whole);
}

/* One opcode over and over: an end in a sentence, memory in step with the text. */
static void bounds_what_one_opcode_makes(void **state)
{
    static const struct {
        const char *first;
        const char *again;
        const char *part; /* of the message */
    } cases[] = {
        {"", "(", "more values than tensors need"},
        {"", "N", "more values than tensors need"},
        {"", "}", "more values than tensors need"},
        {"", "]", "more values than tensors need"},
        {"", ")", "more values than tensors need"},
        {"N", "\x85", "more values than tensors need"},
        {"]N", "q\1", " bytes, found "},
    };
    size_t len = 4u << 20;
    char *text = malloc(len);
    (void)state;
    assert_non_null(text);
    for (size_t i = 0; i < COUNT(cases); i++) {
        qc_pickle p;
        qc_error err = {0};
        size_t n = strlen(cases[i].again);
        size_t at = 2 + strlen(cases[i].first);
        memcpy(text, "\x80\2", 2);
        memcpy(text + 2, cases[i].first, at - 2);
        for (; at + n <= len; at += n)
            memcpy(text + at, cases[i].again, n);
        qc_status st = qc_pickle_run(&p, text, at, &err);
        if (qc_status_exit_code(st) != 3 || !strstr(err.msg, cases[i].part))
            fail_msg("case %zu: %s '%s'", i, qc_status_name(st), err.msg);
    }
    free(text);
}

static void refuses_what_is_too_long(void **state)
{
    qc_pickle p;
    qc_error err = {0};
    (void)state;
    assert_int_equal(qc_pickle_run(&p, "", QC_PICKLE_MAX_BYTES + 1, &err), QC_ERR_UNSUPPORTED);
    assert_string_equal(err.msg, "the pickle has 33554433 bytes; at most 33554432 are read");
}

/* ---- the state dict ---- */

static const struct {
    const char *text;
    size_t len;
    const char *message;
} states[] = {
    {P("\x80\2N."), "the file holds something that is not a dict; expected a state dict"},
    {P("\x80\2}(U\1w" TENSOR("0", "\1", ")", ")") "U\1w" TENSOR("1", "\1", ")", ")") "u."),
     "tensor 'w' is in the dict twice"},
    {P("\x80\2}U\1\xff" TENSOR("0", "\1", ")", ")") "s."),
     "the name of a tensor is not UTF-8 or holds a zero"},
    {P("\x80\2}U\3\xed\xa0\x80" TENSOR("0", "\1", ")", ")") "s."),
     "the name of a tensor is not UTF-8 or holds a zero"},
    {P("\x80\2}U\3a\0b" TENSOR("0", "\1", ")", ")") "s."),
     "the name of a tensor is not UTF-8 or holds a zero"},
    {P("\x80\2}U\x0c__metadata__" TENSOR("0", "\1", ")", ")") "s."),
     "a tensor is called '__metadata__', which safetensors cannot hold"},
    {P("\x80\2}(U\1w" TENSOR("0", "\1", ")", ")") "U\1x](" TENSOR("1", "\1", ")", ")") "eu."),
     "1 of its 2 tensors are not entries of the state dict (an optimizer's state?); save the "
     "model's state_dict() alone"},
    {P("\x80\2}(U\1w" TENSOR("0", "\1", ")", ")") "u}U\1x" TENSOR("1", "\1", ")", ")") "sb."),
     "1 of its 2 tensors are not entries of the state dict (an optimizer's state?); save the "
     "model's state_dict() alone"},
};

static void judges_state_dicts(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(states); i++) {
        qc_pickle p;
        qc_torch_state out;
        qc_arena arena;
        qc_error err = {0};
        qc_arena_init(&arena);
        runs(&p, states[i].text, states[i].len);
        qc_status st = qc_torch_state_read(&out, &arena, &p, &err);
        if (qc_status_exit_code(st) != 3 || strcmp(err.msg, states[i].message) != 0)
            fail_msg("case %zu: %s '%s'", i, qc_status_name(st), err.msg);
        qc_pickle_deinit(&p);
        qc_arena_deinit(&arena);
    }
}

/* Names are kept as they are where they are UTF-8 (RFC 3629, section 4), and refused otherwise. */
static void judges_names(void **state)
{
    static const struct {
        const char *name; /* at most 4 bytes */
        int ok;
    } cases[] = {
        {"\x7f", 1},
        {"\x80", 0},
        {"\xc1\xbf", 0},
        {"\xc2\x80", 1},
        {"\xdf\xbf", 1},
        {"\xdf", 0},
        {"\xdf\x7f", 0},
        {"\xe0\x9f\xbf", 0},
        {"\xe0\xa0\x80", 1},
        {"\xe1\x80\x80", 1},
        {"\xe1\x80\xc0", 0},
        {"\xed\x9f\xbf", 1},
        {"\xed\xa0\x80", 0},
        {"\xef\xbf\xbf", 1},
        {"\xef\xbf", 0},
        {"\xf0\x8f\xbf\xbf", 0},
        {"\xf0\x90\x80\x80", 1},
        {"\xf1\x80\x80\x80", 1},
        {"\xf4\x8f\xbf\xbf", 1},
        {"\xf4\x90\x80\x80", 0},
        {"\xf5\x80\x80\x80", 0},
        {"\xff\x80\x80\x80", 0},
    };
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        static const char tensor[] = TENSOR("0", "\1", ")", ")") "s.";
        char text[16 + sizeof tensor];
        qc_pickle p;
        qc_torch_state out;
        qc_arena arena;
        qc_error err = {0};
        int n =
            snprintf(text, sizeof text, "\x80\2}U%c%s", (int)strlen(cases[i].name), cases[i].name);
        memcpy(text + n, tensor, sizeof tensor);
        qc_arena_init(&arena);
        runs(&p, text, (size_t)n + sizeof tensor - 1);
        qc_status st = qc_torch_state_read(&out, &arena, &p, &err);
        if ((st == QC_OK) != cases[i].ok)
            fail_msg("name %zu: %s '%s'", i, qc_status_name(st), err.msg);
        if (st == QC_OK)
            assert_true(out.count == 1 && strcmp(out.entries->name, cases[i].name) == 0);
        qc_pickle_deinit(&p);
        qc_arena_deinit(&arena);
    }
}

/* What lies beside the tensors is counted; its name is told where it has one. */
static void skips_what_is_no_tensor(void **state)
{
#define W "U\1w" TENSOR("0", "\1", ")", ")")
    static const struct {
        const char *text;
        size_t len;
        size_t skipped;
        const char *first;
    } cases[] = {
        {P("\x80\2}(" W "u."), 0, NULL},
        {P("\x80\2}(K\1K\2" W "u."), 1, NULL},
        {P("\x80\2}(U\1aK\2U\1bK\3" W "u."), 2, "a"},
        {P("\x80\2}(U\5modelK\2U\6moduleNU\nstate_dict}" W "su."), 2, "model"},
        {P("\x80\2}(U\5model}U\6module}" W "su."), 1, "model"},
    };
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        qc_pickle p;
        qc_torch_state out;
        qc_arena arena;
        qc_error err = {0};
        qc_arena_init(&arena);
        runs(&p, cases[i].text, cases[i].len);
        if (qc_torch_state_read(&out, &arena, &p, &err) != QC_OK)
            fail_msg("case %zu: %s", i, err.msg);
        assert_true(out.count == 1 && strcmp(out.entries->name, "w") == 0);
        if (out.skipped != cases[i].skipped)
            fail_msg("case %zu: %zu skipped", i, out.skipped);
        assert_true(!out.first_skipped == !cases[i].first);
        if (cases[i].first)
            assert_string_equal(out.first_skipped, cases[i].first);
        qc_pickle_deinit(&p);
        qc_arena_deinit(&arena);
    }
#undef W
}

static void survives_faults(void **state)
{
    qc_status st = QC_ERR_INTERNAL;
    (void)state;
    for (uint64_t n = 1; st != QC_OK; n++) {
        qc_pickle p;
        qc_error err = {0};
        qc_alloc_fail_at(n, 0);
        st = qc_pickle_run(
            &p, P("\x80\2}q\0(U\1w" TENSOR("0", "\6", "K\2K\3\x86", "K\3K\1\x86") "u."), &err);
        qc_alloc_fail_at(0, 0);
        assert_true(st == QC_OK || (st == QC_ERR_NOMEM && err.msg[0]));
        assert_true(n < 50);
        qc_pickle_deinit(&p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_numbers),
        cmocka_unit_test(reads_other_values),
        cmocka_unit_test(reads_containers),
        cmocka_unit_test(shares_through_the_memo),
        cmocka_unit_test(says_what_is_wrong),
        cmocka_unit_test(makes_tensors),
        cmocka_unit_test(makes_tensors_by_every_call),
        cmocka_unit_test(is_not_moved_by_memo_bombs),
        cmocka_unit_test(bounds_what_one_opcode_makes),
        cmocka_unit_test(refuses_what_is_too_long),
        cmocka_unit_test(judges_state_dicts),
        cmocka_unit_test(judges_names),
        cmocka_unit_test(skips_what_is_no_tensor),
        cmocka_unit_test(survives_faults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
