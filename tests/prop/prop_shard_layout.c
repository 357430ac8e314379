/* Properties of a layout over random tensors. QC_SEED=n replays one run. */
#include "formats/shard_layout.h"
#include "tests/fixtures/layout_array.h"
#include "tests/fixtures/st_header.h"
#include "tests/fixtures/test_random.h"

#define ROUNDS       400
#define TENSORS_MOST 60u
#define MIB          (1u << 20)

static uint32_t make_tensors(qc_out_tensor *t, char names[][24])
{
    uint32_t count = (uint32_t)below(TENSORS_MOST + 1), group = 0, device = 0;
    uint32_t devices = (uint32_t)below(4); /* 0: all on the first */
    memset(t, 0, TENSORS_MOST * sizeof *t);
    for (uint32_t i = 0; i < count; i++) {
        qc_dtype dtype = (qc_dtype)below(QC_DTYPE_COUNT);
        (void)snprintf(names[i], 24, "%c%" PRIu64 ".%" PRIu32, (char)('a' + below(3)), below(20),
                       i);
        t[i].st.name = names[i];
        t[i].st.dtype = dtype;
        t[i].st.ndim = (unsigned)below(4);
        for (unsigned d = 0; d < t[i].st.ndim; d++)
            t[i].st.dims[d] = 8 * below(6);
        if (t[i].st.ndim == 0 && qc_dtype_bits(dtype) < 8)
            t[i].st.dtype = QC_DTYPE_BF16;
        t[i].align_bytes = (uint64_t)1 << below(5);
        t[i].group = group;
        t[i].device = device;
        if (below(2)) {
            group++;
            if (devices > 0 && below(8) == 0)
                device += 1 + (uint32_t)below(devices); /* some stay empty */
        }
    }
    return count;
}

static void check_shard(const qc_layout *l, uint32_t s, const qc_out_tensor *t, uint32_t count,
                        uint64_t limit)
{
    const qc_shard *sh = &l->shards[s];
    uint64_t offset = 0;
    const qc_out_tensor *sized = NULL; /* the last one that has bytes */
    int one_group = 1;
    for (uint32_t i = 0; i < sh->count; i++) {
        const qc_out_tensor *o = &t[sh->order[i]];
        uint64_t bytes = 0;
        assert_true(sh->order[i] < count);
        assert_int_equal(o->shard, s);
        assert_int_equal(o->device, sh->device);
        assert_int_equal(qc_shape_bytes(o->st.dims, o->st.ndim, o->st.dtype, &bytes, NULL), QC_OK);
        assert_int_equal(o->st.begin, offset); /* contiguous */
        assert_int_equal(o->st.end - o->st.begin, bytes);
        unsigned each = qc_dtype_bits(o->st.dtype) / 8;
        if (each > 0)
            assert_int_equal(o->st.begin % each, 0); /* aligned */
        if (i > 0)
            assert_true(qc_st_tensor_order(&t[sh->order[i - 1]].st, &o->st) < 0);
        if (bytes > 0) {
            one_group = one_group && (!sized || sized->group == o->group);
            sized = o;
        }
        offset = o->st.end;
    }
    assert_int_equal(sh->data_bytes, offset);
    assert_true(offset <= limit || one_group);
    SCOPED(qc_st_header) h;
    uint64_t n = 0;
    SCOPED(qc_strbuf) text = {.max = SIZE_MAX / 2};
    assert_int_equal(qc_layout_header(&text, l, s, array_tensors(t, count), NULL), QC_OK);
    assert_int_equal(text.len, sh->header_bytes); /* counted beforehand */
    assert_int_equal(qc_st_header_length((const unsigned char *)text.data, 8,
                                         sh->header_bytes + sh->data_bytes, &n, NULL),
                     QC_OK);
    assert_int_equal(n + 8, sh->header_bytes);
    assert_int_equal(qc_st_header_parse(&h, text.data + 8, n, sh->data_bytes, NULL), QC_OK);
    assert_int_equal(h.tensor_count, sh->count);
    assert_string_equal(st_header_meta(&h, "format"), "pt");
}

static void check_fill(const qc_layout *l, const qc_out_tensor *t, uint32_t count, uint64_t limit)
{
    uint32_t total = 0;
    for (uint32_t s = 0; s < l->count; s++) {
        char name[64] = "model.safetensors";
        if (l->count > 1)
            (void)snprintf(name, sizeof name, "model-%05" PRIu32 "-of-%05" PRIu32 ".safetensors",
                           s + 1, l->count);
        assert_string_equal(l->shards[s].name, name);
        check_shard(l, s, t, count, limit);
        assert_true(l->shards[s].count > 0 || count == 0);
        total += l->shards[s].count;
    }
    assert_int_equal(total, count);
    for (uint32_t i = 1; i < count; i++) {
        uint32_t step = t[i].shard - t[i - 1].shard;
        assert_true(step <= 1); /* in the order given */
        if (t[i].group == t[i - 1].group) {
            assert_int_equal(step, 0); /* together */
        } else if (t[i].device != t[i - 1].device) {
            assert_int_equal(step, 1);
        } else if (step == 1) {
            /* Greedy: the group that opened the shard did not fit the one before. */
            uint64_t group_bytes = 0;
            for (uint32_t k = i; k < count && t[k].group == t[i].group; k++)
                group_bytes += t[k].st.end - t[k].st.begin;
            assert_true(l->shards[t[i - 1].shard].data_bytes + group_bytes > limit);
        }
    }
}

TEST(layouts_hold_their_contract)
{
    static qc_out_tensor t[TENSORS_MOST], again[TENSORS_MOST];
    static char names[TENSORS_MOST][24];
    for (int round = 0; round < ROUNDS; round++) {
        uint32_t count = make_tensors(t, names);
        uint64_t limit = below(4) ? below(200000) : UINT64_MAX;
        qc_layout l, m;
        SCOPED(qc_arena) a = {0};
        memcpy(again, t, sizeof t);
        assert_int_equal(layout_array(&l, &a, t, count, limit, NULL), QC_OK);
        check_fill(&l, t, count, limit);
        assert_int_equal(layout_array(&m, &a, again, count, limit, NULL), QC_OK);
        assert_memory_equal(t, again, sizeof t);
        assert_int_equal(l.count, m.count);
        for (uint32_t s = 0; s < l.count; s++) {
            assert_int_equal(l.shards[s].header_bytes, m.shards[s].header_bytes);
        }
    }
}

TEST(pieces_hold_their_contract)
{
    for (int round = 0; round < 20000; round++) {
        uint64_t align = 1 + below((uint64_t)1 << below(26));
        uint64_t bytes = 1 + below((uint64_t)1 << below(40));
        uint64_t piece = qc_layout_piece_bytes(bytes, align);
        assert_true(piece > 0 && piece <= 16 * MIB);
        if (bytes <= 8 * MIB) {
            assert_int_equal(piece, bytes);
        } else if (align <= 16 * MIB) {
            assert_int_equal(piece % align, 0);
            assert_true(piece >= 4 * MIB);
            assert_true(piece <= 8 * MIB || piece == align);
        }
    }
}

int main(void)
{
    const char *given = getenv("QC_SEED");
    random_begin(given ? strtoull(given, NULL, 10) : 20240611);
    printf("QC_SEED=%" PRIu64 "\n", random_numbers.seed);
    return test_run_all(NULL);
}
