/* Properties of safetensors headers on random input:
 *   build then parse gives the same tensors, whatever names, shapes, dtypes and metadata;
 *   parse then build then parse changes nothing, building twice gives the same bytes;
 *   the order of members in the JSON does not matter;
 *   any damage to the text is refused or gives another header that keeps every rule.
 * QC_SEED=n replays a run. */
#include "tests/fixtures/st_header.h"
#include "tests/fixtures/test_random.h"

#include <time.h>

#define TENSORS_MAX 8
#define META_MAX    3
#define NAME_BYTES  32
#define ROUNDS      4000

typedef struct {
    qc_st_tensor tensors[TENSORS_MAX];
    size_t count;
    qc_st_meta meta[META_MAX];
    size_t meta_count;
    uint64_t data_bytes;
    char text[2 * (TENSORS_MAX + 2 * META_MAX)][NAME_BYTES + 8];
    size_t texts;
} sample;

/* A random string without NUL, valid UTF-8, made unlike all others by its number. */
static const char *random_text(sample *s)
{
    static const char *const pieces[] = {
        "a",  ".",        "weight", "\"",           "\\",
        "\n", "\t",       "\x01",   "\x7f",         "/",
        "{}", "\xc3\xa9", " ",      "\xe2\x82\xac", "\xf0\x9f\x98\x80",
        "0",  "__",       ":"};
    char *out = s->text[s->texts];
    size_t n = 0;
    for (size_t k = below(6); k > 0; k--) {
        const char *p = pieces[below(sizeof pieces / sizeof *pieces)];
        if (n + strlen(p) < NAME_BYTES) {
            memcpy(out + n, p, strlen(p));
            n += strlen(p);
        }
    }
    (void)snprintf(out + n, 8, "%zu", s->texts++);
    return out;
}

static void make_sample(sample *s)
{
    memset(s, 0, sizeof *s);
    s->count = below(TENSORS_MAX + 1);
    s->meta_count = below(META_MAX + 1);
    for (size_t i = 0; i < s->count; i++) {
        qc_st_tensor *t = &s->tensors[i];
        uint64_t bytes = 0;
        t->name = random_text(s);
        t->ndim = (unsigned)below(QC_MAX_DIMS + 1);
        for (unsigned d = 0; d < t->ndim; d++)
            t->dims[d] = below(10) == 0 ? below(3) * 1000000 : 1 + below(4);
        t->dtype = (qc_dtype)below(QC_DTYPE_COUNT);
        /* F4 and F6 do not fill bytes with every shape, and products may be too large. */
        while (qc_shape_bytes(t->dims, t->ndim, t->dtype, &bytes, NULL) != QC_OK ||
               bytes > UINT64_C(1) << 49) {
            if (t->ndim == 0 || qc_dtype_bits(t->dtype) % 8 != 0)
                t->dtype = QC_DTYPE_BF16;
            else
                t->dims[below(t->ndim)] = 1;
        }
        t->begin = s->data_bytes;
        t->end = s->data_bytes += bytes;
    }
    for (size_t i = 0; i < s->meta_count; i++) {
        s->meta[i].key = random_text(s);
        s->meta[i].value = random_text(s);
    }
}

static int order_by_place(const void *va, const void *vb)
{
    const qc_st_tensor *a = va;
    const qc_st_tensor *b = vb;
    if (a->begin != b->begin)
        return a->begin < b->begin ? -1 : 1;
    if (a->end != b->end)
        return a->end < b->end ? -1 : 1;
    return strcmp(a->name, b->name);
}

static void assert_same(const qc_st_header *h, const sample *s)
{
    assert_true(h->tensor_count == s->count && h->meta_count == s->meta_count);
    assert_true(h->data_bytes == s->data_bytes && h->unknown_fields == 0);
    for (size_t i = 0; i < s->count; i++) {
        const qc_st_tensor *a = &h->tensors[i];
        const qc_st_tensor *b = &s->tensors[i];
        assert_string_equal(a->name, b->name);
        assert_true(a->dtype == b->dtype && a->ndim == b->ndim);
        assert_memory_equal(a->dims, b->dims, sizeof a->dims);
        assert_true(a->begin == b->begin && a->end == b->end);
    }
    for (size_t i = 0; i < s->meta_count; i++)
        assert_string_equal(st_header_meta(h, s->meta[i].key), s->meta[i].value);
}

static void build(qc_strbuf *out, const qc_st_tensor *t, size_t count, const qc_st_meta *meta,
                  size_t meta_count)
{
    qc_strbuf_init(out, 1000000);
    assert_int_equal(st_header_build(out, t, count, meta, meta_count, NULL), QC_OK);
    assert_true(out->len % 8 == 0 && out->data[8] == '{');
}

TEST(round_trips)
{
    for (int round = 0; round < ROUNDS; round++) {
        sample s;
        qc_strbuf out;
        qc_strbuf again;
        qc_st_header h;
        qc_error err = {0};
        make_sample(&s);
        build(&out, s.tensors, s.count, s.meta, s.meta_count);
        if (qc_st_header_parse(&h, out.data + 8, out.len - 8, s.data_bytes, &err) != QC_OK)
            fail_msg("%s: %s", err.msg, out.data + 8);
        qsort(s.tensors, s.count, sizeof *s.tensors, order_by_place);
        assert_same(&h, &s);
        build(&again, h.tensors, h.tensor_count, h.meta, h.meta_count);
        assert_true(again.len == out.len);
        qc_st_header_deinit(&h);

        /* shuffled members */
        qc_strbuf_deinit(&again);
        qc_st_tensor shuffled[TENSORS_MAX];
        memcpy(shuffled, s.tensors, sizeof shuffled);
        for (size_t i = s.count; i > 1; i--) {
            size_t j = below(i);
            qc_st_tensor t = shuffled[i - 1];
            shuffled[i - 1] = shuffled[j];
            shuffled[j] = t;
        }
        build(&again, shuffled, s.count, s.meta, s.meta_count);
        assert_int_equal(qc_st_header_parse(&h, again.data + 8, again.len - 8, s.data_bytes, NULL),
                         QC_OK);
        assert_same(&h, &s);
        qc_st_header_deinit(&h);

        /* one byte of data more or less */
        assert_int_equal(qc_st_header_parse(&h, out.data + 8, out.len - 8, s.data_bytes + 1, NULL),
                         QC_ERR_INPUT);
        if (s.data_bytes)
            assert_int_equal(
                qc_st_header_parse(&h, out.data + 8, out.len - 8, s.data_bytes - 1, NULL),
                QC_ERR_TRUNCATED);
        qc_strbuf_deinit(&out);
        qc_strbuf_deinit(&again);
    }
}

static void damage(char *text, size_t *len)
{
    static const char bytes[] = "{}[],:\"\\0123456789-.eE ntfu\x80\xc3\xff";
    switch (below(4)) {
    case 0: /* overwrite */
        text[below(*len)] = bytes[below(sizeof bytes)];
        break;
    case 1: { /* drop a run */
        size_t at = below(*len);
        size_t n = 1 + below(*len - at < 9 ? *len - at : 9);
        memmove(text + at, text + at + n, *len - at - n);
        *len -= n;
        break;
    }
    case 2: { /* swap two */
        size_t i = below(*len);
        size_t j = below(*len);
        char c = text[i];
        text[i] = text[j];
        text[j] = c;
        break;
    }
    default: { /* copy a run over another */
        size_t n = 1 + below(*len < 20 ? *len : 20);
        size_t to = below(*len - n + 1);
        memmove(text + to, text + below(*len - n + 1), n);
        break;
    }
    }
}

TEST(survives_damage)
{
    size_t taken = 0;
    for (int round = 0; round < ROUNDS; round++) {
        sample s;
        qc_strbuf out;
        qc_st_header h;
        qc_error err = {0};
        make_sample(&s);
        build(&out, s.tensors, s.count, s.meta, s.meta_count);
        size_t len = out.len - 8;
        char *text = malloc(len);
        assert_non_null(text);
        memcpy(text, out.data + 8, len);
        for (size_t k = 1 + below(3); k > 0 && len > 0; k--)
            damage(text, &len);
        qc_status st = qc_st_header_parse(&h, text, len, s.data_bytes, &err);
        if (st == QC_OK) {
            uint64_t end = 0;
            for (size_t i = 0; i < h.tensor_count; i++) {
                const qc_st_tensor *t = &h.tensors[i];
                uint64_t bytes = 0;
                assert_int_equal(qc_shape_bytes(t->dims, t->ndim, t->dtype, &bytes, NULL), QC_OK);
                assert_true(t->begin == end && t->end - t->begin == bytes);
                end = t->end;
            }
            assert_true(end == s.data_bytes);
            qc_st_header_deinit(&h);
            taken++;
        } else {
            assert_int_equal(qc_status_exit_code(st), 3);
            assert_true(err.msg[0] != '\0' && !h.tensors);
        }
        free(text);
        qc_strbuf_deinit(&out);
    }
    print_message("%d damaged headers, %zu still valid\n", ROUNDS, taken);
}

int main(void)
{
    const char *seed = getenv("QC_SEED");
    random_begin(seed ? strtoull(seed, NULL, 0) : (uint64_t)time(NULL));
    (void)printf("QC_SEED=%" PRIu64 "\n", random_numbers.seed);
    return test_run_all(NULL);
}
