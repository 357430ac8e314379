#include "bench/synthetic_model.h"

#include "base/alloc.h"
#include "base/random.h"
#include "convert/known/known_models.h"
#include "formats/json_writer.h"
#include "tests/fixtures/st_header.h"

#include <ctype.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define TABLE_ENTRIES   32768u /* the positive half of 65,536 quantiles */
#define HEAD_LIMIT      (QC_ST_MAX_HEADER_BYTES + 8u)
#define TEXT_LIMIT      (1u << 30)
#define VALUES_PER_WORD 4u
#define DEVIATION       0.02
#define FP8_FACTOR      5000.0 /* 4.2 deviations are 420 */

/* ---- Values --------------------------------------------------------------------------------- */

static uint16_t bf16_table[TABLE_ENTRIES], f16_table[TABLE_ENTRIES];
static uint32_t f32_table[TABLE_ENTRIES];
static uint8_t fp8_table[TABLE_ENTRIES];
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

/* x with P(X < x) = p of the standard normal distribution, for p > 1/2. It is found by bisection
 * and is exact to the last bits of what is kept. */
static double normal_quantile(double p)
{
    double low = 0, high = 10;
    for (int i = 0; i < 60; i++) {
        double x = (low + high) / 2;
        if (0.5 * erfc(-x / sqrt(2.0)) < p)
            low = x;
        else
            high = x;
    }
    return low;
}

/* A positive x as a small float of `mantissa` bits with a least exponent. The result is an integer
 * in units of its last place, with the exponent above, rounded to nearest. */
static uint32_t small_float(double x, int mantissa, int bias)
{
    int e = 0;
    (void)frexp(x, &e);
    int exponent = e - 1 < 1 - bias ? 1 - bias : e - 1;
    double units = nearbyint(ldexp(x, mantissa - exponent));
    /* A value that rounds up to the next power of two carries into the exponent by itself. */
    return (uint32_t)(((exponent + bias - 1) << mantissa) + (int)units);
}

static void make_tables(void)
{
    for (uint32_t i = 0; i < TABLE_ENTRIES; i++) {
        double x = DEVIATION * normal_quantile(0.5 + (i + 0.5) / (2.0 * TABLE_ENTRIES));
        float f = (float)x;
        memcpy(&f32_table[i], &f, sizeof f);
        bf16_table[i] = (uint16_t)small_float(x, 7, 127);
        f16_table[i] = (uint16_t)small_float(x, 10, 15);
        fp8_table[i] = (uint8_t)small_float(x * FP8_FACTOR, 3, 7);
    }
}

typedef enum { ZERO, TABLE_8, TABLE_16, TABLE_32, SCALES_F32, EXPONENTS_U8, UNIFORM_U8 } value_kind;

static int ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

static value_kind kind_of(const qc_st_tensor *t)
{
    if (t->dtype == QC_DTYPE_BF16 || t->dtype == QC_DTYPE_F16)
        return TABLE_16;
    if (t->dtype == QC_DTYPE_F32)
        return ends_with(t->name, "_scale_inv") ? SCALES_F32 : TABLE_32;
    if (t->dtype == QC_DTYPE_F8_E4M3)
        return TABLE_8;
    if (t->dtype == QC_DTYPE_U8)
        return ends_with(t->name, "_scales") ? EXPONENTS_U8 : UNIFORM_U8;
    return ZERO;
}

/* How many bytes one random number makes. */
static size_t word_bytes(value_kind kind)
{
    if (kind == TABLE_32 || kind == SCALES_F32)
        return 16;
    return kind == TABLE_8 ? 4 : 8;
}

static uint64_t seed_of(const char *name)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (; *name; name++)
        h = (h ^ (unsigned char)*name) * 0x100000001b3u;
    return qc_random_next(&h);
}

static inline uint32_t picked(uint64_t r, unsigned k)
{
    return (uint32_t)(r >> (16 * k)) & 0xffff;
}

static void words_16(uint64_t state, const uint16_t *table, unsigned char *dst, size_t words)
{
    for (size_t i = 0; i < words; i++) {
        uint64_t r = qc_random_next(&state), w = 0;
        for (unsigned k = 0; k < VALUES_PER_WORD; k++)
            w |= (uint64_t)table[picked(r, k) & (TABLE_ENTRIES - 1)] << (16 * k);
        w |= r & 0x8000800080008000u;
        memcpy(dst + 8 * i, &w, 8);
    }
}

static void words_other(value_kind kind, uint64_t state, unsigned char *dst, size_t words)
{
    size_t each = word_bytes(kind);
    for (size_t i = 0; i < words; i++, dst += each) {
        uint64_t r = qc_random_next(&state);
        if (kind == UNIFORM_U8) {
            memcpy(dst, &r, 8);
        } else if (kind == EXPONENTS_U8) {
            r = (r & 0x0303030303030303u) + 0x7676767676767676u;
            memcpy(dst, &r, 8);
        }
        for (unsigned k = 0; each != 8 && k < VALUES_PER_WORD; k++) {
            uint32_t n = picked(r, k), bits = f32_table[n & (TABLE_ENTRIES - 1)] | (n >> 15) << 31;
            float scale = 2e-4f + 4e-4f * ((float)n + 0.5f) / 65536.0f;
            if (kind == TABLE_8)
                dst[k] = (unsigned char)(fp8_table[n & (TABLE_ENTRIES - 1)] | (n >> 15) << 7);
            else if (kind == TABLE_32)
                memcpy(dst + 4 * k, &bits, 4);
            else
                memcpy(dst + 4 * k, &scale, 4);
        }
    }
}

static void make_words(const qc_st_tensor *t, uint64_t first, unsigned char *dst, size_t words)
{
    /* splitmix64 adds its constant once a number, so any place is a product away. */
    uint64_t state = seed_of(t->name) + first * 0x9e3779b97f4a7c15u;
    value_kind kind = kind_of(t);
    if (kind == TABLE_16)
        words_16(state, t->dtype == QC_DTYPE_BF16 ? bf16_table : f16_table, dst, words);
    else
        words_other(kind, state, dst, words);
}

static void make_values(const qc_st_tensor *t, uint64_t offset, unsigned char *dst, size_t len)
{
    value_kind kind = kind_of(t);
    size_t each = word_bytes(kind);
    if (kind == ZERO) {
        memset(dst, 0, len);
        return;
    }
    while (len > 0) {
        size_t within = (size_t)(offset % each);
        if (within == 0 && len >= each) {
            size_t words = len / each;
            make_words(t, offset / each, dst, words);
            dst += words * each;
            offset += words * each;
            len -= words * each;
            continue;
        }
        unsigned char word[16];
        size_t n = each - within < len ? each - within : len;
        make_words(t, offset / each, word, 1);
        memcpy(dst, word + within, n);
        dst += n;
        offset += n;
        len -= n;
    }
}

void qc_synth_read(const qc_synth_file *f, uint64_t offset, void *dst, size_t len)
{
    unsigned char *to = dst;
    if (offset < f->head.len) {
        size_t n = f->head.len - offset < len ? f->head.len - (size_t)offset : len;
        memcpy(to, f->head.data + offset, n);
        to += n;
        offset += n;
        len -= n;
    }
    /* Finds the tensor that holds the offset. Tensors lie without gaps. */
    uint64_t at = offset - f->head.len;
    size_t low = 0, high = f->tensor_count;
    while (len > 0 && low + 1 < high) {
        size_t mid = low + (high - low) / 2;
        if (f->tensors[mid].begin <= at)
            low = mid;
        else
            high = mid;
    }
    for (; len > 0; low++) {
        const qc_st_tensor *t = &f->tensors[low];
        if (t->end <= at)
            continue;
        size_t n = t->end - at < len ? (size_t)(t->end - at) : len;
        make_values(t, at - t->begin, to, n);
        to += n;
        at += n;
        len -= n;
    }
}

/* ---- Layout --------------------------------------------------------------------------------- */

/* Compares numbers in names by their value: layer 2 comes before layer 10. */
static int natural_order(const char *a, const char *b)
{
    while (*a && *b) {
        if (isdigit((unsigned char)*a) && isdigit((unsigned char)*b)) {
            size_t n = strspn(a, "0123456789"), m = strspn(b, "0123456789");
            int c = n != m ? (n < m ? -1 : 1) : strncmp(a, b, n);
            if (c != 0)
                return c;
            a += n;
            b += m;
            continue;
        }
        if (*a != *b)
            break;
        a++;
        b++;
    }
    return (unsigned char)*a - (unsigned char)*b;
}

static int by_layer(const void *a, const void *b)
{
    return natural_order(((const qc_st_tensor *)a)->name, ((const qc_st_tensor *)b)->name);
}

static int in_file(const void *a, const void *b)
{
    return qc_st_tensor_order(a, b);
}

static qc_status lay_out_shard(qc_synth_model *m, qc_synth_file *f, qc_st_tensor *t, size_t count,
                               qc_error *err)
{
    qc_st_meta meta = {"format", "pt"};
    uint64_t at = 0;
    qsort(t, count, sizeof *t, in_file);
    for (size_t i = 0; i < count; i++) {
        uint64_t bytes = 0;
        QC_TRY(qc_shape_bytes(t[i].dims, t[i].ndim, t[i].dtype, &bytes, err));
        t[i].begin = at;
        t[i].end = at += bytes;
    }
    f->tensors = t;
    f->tensor_count = count;
    qc_strbuf_init(&f->head, HEAD_LIMIT);
    QC_TRY(st_header_build(&f->head, t, count, &meta, 1, err));
    f->bytes = f->head.len + at;
    m->tensor_bytes += at;
    return QC_OK;
}

static qc_status add_index(const qc_synth_model *m, qc_synth_file *f, qc_error *err)
{
    qc_json_writer w;
    f->name = "model.safetensors.index.json";
    qc_strbuf_init(&f->head, TEXT_LIMIT);
    qc_json_write_init(&w, &f->head, err);
    qc_json_begin_object(&w, NULL);
    qc_json_begin_object(&w, "metadata");
    qc_json_put_u64(&w, "total_size", m->tensor_bytes);
    qc_json_end(&w);
    qc_json_begin_object(&w, "weight_map");
    for (size_t s = 0; s < m->shard_count; s++) {
        for (size_t i = 0; i < m->files[s].tensor_count; i++) {
            qc_json_put_text(&w, m->files[s].tensors[i].name, m->files[s].name);
        }
    }
    qc_json_end(&w);
    qc_json_end(&w);
    QC_TRY(qc_json_write_finish(&w));
    f->bytes = f->head.len;
    return QC_OK;
}

/* The first tensor that is not in the shard that begins with `first`. */
static size_t shard_end(const qc_st_tensor *t, size_t first, size_t count, uint64_t shard_bytes)
{
    uint64_t full = t[first++].end;
    while (first < count && full <= shard_bytes && t[first].end <= shard_bytes - full)
        full += t[first++].end;
    return first;
}

static qc_status add_files(qc_synth_model *m, const qc_checkpoint *c, uint64_t shard_bytes,
                           qc_error *err)
{
    void *v = NULL;
    size_t count = c->tensor_count;
    QC_TRY(qc_arena_alloc(&m->arena, &v, count, sizeof(qc_st_tensor), err));
    qc_st_tensor *t = v;
    for (size_t i = 0; i < count; i++) {
        const qc_checkpoint_tensor *from = &c->tensors[i];
        t[i] = (qc_st_tensor){.dtype = from->dtype, .ndim = from->ndim};
        memcpy(t[i].dims, from->dims, sizeof t[i].dims);
        t[i].end = from->bytes;
        QC_TRY(qc_arena_strndup(&m->arena, &t[i].name, from->name, strlen(from->name), err));
    }
    qsort(t, count, sizeof *t, by_layer);
    m->tensor_count = count;
    for (size_t i = 0; i < count; i = shard_end(t, i, count, shard_bytes))
        m->shard_count++;
    QC_TRY(qc_arena_alloc(&m->arena, &v, m->shard_count + 2, sizeof *m->files, err));
    m->files = v;
    m->file_count = m->shard_count + 2;
    size_t first = 0;
    for (size_t s = 0; s < m->shard_count; s++) {
        size_t end = shard_end(t, first, count, shard_bytes);
        QC_TRY(qc_arena_printf(&m->arena, &m->files[s].name, err,
                               "model-%05zu-of-%05zu.safetensors", s + 1, m->shard_count));
        QC_TRY(lay_out_shard(m, &m->files[s], t + first, end - first, err));
        first = end;
    }
    QC_TRY(add_index(m, &m->files[m->shard_count], err));
    qc_synth_file *config = &m->files[m->shard_count + 1];
    config->name = "config.json";
    qc_strbuf_init(&config->head, TEXT_LIMIT);
    QC_TRY(qc_strbuf_add(&config->head, c->config_text, c->config_len, err));
    config->bytes = config->head.len;
    return QC_OK;
}

qc_status qc_synth_open(qc_synth_model **out, const char *model, uint64_t shard_bytes,
                        qc_error *err)
{
    qc_checkpoint *c = NULL;
    void *v = NULL;
    int has_weights = 0;
    *out = NULL;
    (void)pthread_once(&tables_once, make_tables);
    QC_TRY(qc_model_open(&c, model, &has_weights, err));
    qc_status st = QC_OK;
    if (has_weights)
        st = qc_error_set(err, QC_ERR_INPUT, __FILE__, __LINE__,
                          "%s: has weights; an id or a config.json was expected", model);
    if (st == QC_OK)
        st = qc_calloc(&v, 1, sizeof **out, err);
    if (st == QC_OK) {
        qc_synth_model *m = v;
        qc_arena_init(&m->arena);
        st = add_files(m, c, shard_bytes, err);
        if (st == QC_OK)
            *out = m;
        else
            qc_synth_close(m);
    }
    qc_checkpoint_close(c);
    return st;
}

void qc_synth_close(qc_synth_model *m)
{
    if (!m)
        return;
    for (size_t i = 0; i < m->file_count; i++)
        qc_strbuf_deinit(&m->files[i].head);
    qc_arena_deinit(&m->arena);
    qc_free(m);
}
