#include "convert/device/bench.h"

#include "base/checked.h"
#include "quant/quant_ops.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* From config.json of meta-llama/Llama-3.3-70B-Instruct and meta-llama/Llama-3.1-8B. */
const qc_bench_shape qc_bench_model_shapes[] = {
    {"Llama-3.3-70B", "q, o", 8192, 8192, 2, 0, {0}},
    {"Llama-3.3-70B", "k, v", 1024, 8192, 2, 0, {0}},
    {"Llama-3.3-70B", "gate, up", 28672, 8192, 2, 0, {0}},
    {"Llama-3.3-70B", "down", 8192, 28672, 1, 0, {0}},
    {"Llama-3.1-8B", "q, o", 4096, 4096, 2, 0, {0}},
    {"Llama-3.1-8B", "k, v", 1024, 4096, 2, 0, {0}},
    {"Llama-3.1-8B", "gate, up", 14336, 4096, 2, 0, {0}},
    {"Llama-3.1-8B", "down", 4096, 14336, 1, 0, {0}},
};
const uint32_t qc_bench_model_shape_count =
    sizeof qc_bench_model_shapes / sizeof *qc_bench_model_shapes;

static const qc_bench_scheme default_schemes[] = {QC_BENCH_NF4, QC_BENCH_INT8};

typedef enum { SCALES_OF_ROWS, SCALES_OF_BLOCKS, NESTED_SCALES } scale_kind;

static const struct {
    const char *name;
    unsigned weights_in_byte;
    scale_kind scales;
} schemes[QC_BENCH_SCHEME_COUNT] = {
    [QC_BENCH_NF4] = {"nf4", 2, NESTED_SCALES},
    [QC_BENCH_NF4_PLAIN] = {"nf4-plain", 2, SCALES_OF_BLOCKS},
    [QC_BENCH_INT8] = {"int8", 1, SCALES_OF_ROWS},
    [QC_BENCH_INT8_BLOCK] = {"int8-blocks", 1, NESTED_SCALES},
};

const char *qc_bench_scheme_name(qc_bench_scheme s)
{
    return s < QC_BENCH_SCHEME_COUNT ? schemes[s].name : "?";
}

/* ---- parsing ---- */

/* Up to this, no index of a matmul comes near 2^63. No memory holds a weight beyond it. */
#define MAX_SIDE ((uint64_t)1 << 24)

/* Reads a whole number from 1 to MAX_SIDE at *p, and moves *p behind it. Returns 0 if there is
 * none. */
static int read_side(const char **p, uint64_t *out)
{
    uint64_t v = 0;
    const char *s = *p;
    for (; *s >= '0' && *s <= '9'; s++) {
        v = v * 10 + (uint64_t)(*s - '0');
        if (v > MAX_SIDE)
            return 0;
    }
    if (s == *p || v == 0)
        return 0;
    *p = s;
    *out = v;
    return 1;
}

/* Reads N, or N1+N2+... for weights that share x. Returns 0 if it is neither. */
static int read_rows(const char **p, qc_bench_shape *s)
{
    for (;;) {
        uint64_t n;
        if (s->part_count == QC_BENCH_MAX_PARTS || !read_side(p, &n))
            return 0;
        s->parts[s->part_count++] = n;
        s->n += n;
        if (**p != '+')
            break;
        ++*p;
    }
    if (s->part_count == 1)
        s->part_count = 0;
    return s->n <= MAX_SIDE;
}

static int is_same(const qc_bench_shape *a, const qc_bench_shape *b)
{
    if (a->n != b->n || a->k != b->k || a->part_count != b->part_count)
        return 0;
    for (uint32_t i = 0; i < a->part_count; i++)
        if (a->parts[i] != b->parts[i])
            return 0;
    return 1;
}

qc_status qc_bench_parse_shapes(const char *text, qc_arena *arena, qc_bench_request *out,
                                qc_error *err)
{
    out->shapes = qc_bench_model_shapes;
    out->shape_count = qc_bench_model_shape_count;
    if (!text)
        return QC_OK;
    qc_bench_shape *shapes = NULL;
    QC_TRY(qc_arena_alloc(arena, &shapes, QC_BENCH_MAX_LIST, sizeof(qc_bench_shape), err));
    uint32_t count = 0;
    for (const char *p = text;; p++) {
        qc_bench_shape s = {.model = "given"};
        const char *first = p;
        if (!read_rows(&p, &s) || (*p != 'x' && *p != 'X'))
            break;
        p++;
        if (!read_side(&p, &s.k) || (*p != ',' && *p != '\0'))
            break;
        if (count == QC_BENCH_MAX_LIST)
            QC_FAIL(err, QC_ERR_USAGE, "--shapes: expected at most %u shapes, found more",
                    QC_BENCH_MAX_LIST);
        QC_TRY(qc_arena_printf(arena, &s.layer, err, "%.*s", (int)(p - first), first));
        for (uint32_t i = 0; i < count; i++)
            if (is_same(&shapes[i], &s))
                QC_FAIL(err, QC_ERR_USAGE, "--shapes: %s is there twice", s.layer);
        shapes[count++] = s;
        if (!*p) {
            out->shapes = shapes;
            out->shape_count = count;
            return QC_OK;
        }
    }
    QC_FAIL(err, QC_ERR_USAGE,
            "--shapes: expected a list of NxK, such as 8192x8192,8192+1024+1024x8192 (1 to %llu "
            "each and in all, and at most 8 that share x), found '%s'",
            (unsigned long long)MAX_SIDE, text);
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

qc_status qc_bench_set_m(const uint64_t *m, uint32_t count, qc_arena *arena, qc_bench_request *out,
                         qc_error *err)
{
    uint64_t *sorted = NULL;
    QC_TRY(qc_arena_alloc(arena, &sorted, count, sizeof *m, err));
    memcpy(sorted, m, count * sizeof *m);
    qsort(sorted, count, sizeof *sorted, by_value);
    out->m = sorted;
    out->m_count = count;
    return QC_OK;
}

qc_status qc_bench_parse_schemes(const char *text, qc_arena *arena, qc_bench_request *out,
                                 qc_error *err)
{
    out->schemes = default_schemes;
    out->scheme_count = sizeof default_schemes / sizeof *default_schemes;
    if (!text)
        return QC_OK;
    qc_bench_scheme *chosen = NULL;
    QC_TRY(qc_arena_alloc(arena, &chosen, QC_BENCH_SCHEME_COUNT, sizeof *chosen, err));
    uint32_t count = 0;
    for (const char *p = text;; p++) {
        size_t len = strcspn(p, ",");
        unsigned s = 0;
        while (s < QC_BENCH_SCHEME_COUNT &&
               !(strlen(schemes[s].name) == len && strncmp(schemes[s].name, p, len) == 0))
            s++;
        if (s == QC_BENCH_SCHEME_COUNT)
            QC_FAIL(err, QC_ERR_USAGE,
                    "--scheme: expected nf4, nf4-plain, int8 or int8-blocks, found '%.*s'",
                    (int)len, p);
        for (uint32_t i = 0; i < count; i++)
            if (chosen[i] == (qc_bench_scheme)s)
                QC_FAIL(err, QC_ERR_USAGE, "--scheme: %s is there twice", schemes[s].name);
        chosen[count++] = (qc_bench_scheme)s;
        p += len;
        if (!*p)
            break;
    }
    out->schemes = chosen;
    out->scheme_count = count;
    return QC_OK;
}

double qc_bench_tolerance(const qc_bench_request *q)
{
    return q->bf16 ? 4e-3 : 1e-3;
}

/* ---- bytes and floors ---- */

uint64_t qc_bench_weight_bytes(qc_bench_scheme scheme, uint64_t n, uint64_t k)
{
    uint64_t elems = n * k, blocks = qc_ceil_div_u64(elems, QC_BENCH_BLOCK);
    const uint64_t scales[] = {
        [SCALES_OF_ROWS] = 4 * n,
        [SCALES_OF_BLOCKS] = 4 * blocks,
        [NESTED_SCALES] = blocks + 4 * qc_ceil_div_u64(blocks, 256) + 4 * 256, /* with the map */
    };
    return qc_ceil_div_u64(elems, schemes[scheme].weights_in_byte) + scales[schemes[scheme].scales];
}

uint64_t qc_bench_bytes(uint64_t weight_bytes, uint64_t m, uint64_t n, uint64_t k)
{
    return weight_bytes + 2 * m * k + 2 * m * n;
}

double qc_bench_flops(uint64_t m, uint64_t n, uint64_t k)
{
    return 2 * (double)m * (double)n * (double)k;
}

double qc_bench_copy_gbps(const qc_bench_roof *roof)
{
    return fmax(roof->copy_gbps.median, roof->kernel_copy_gbps.median);
}

double qc_bench_memory_gbps(const qc_bench_roof *roof)
{
    return fmax(qc_bench_copy_gbps(roof), roof->read_gbps.median);
}

double qc_bench_floor_us(const qc_bench_roof *roof, uint64_t bytes, double flops)
{
    const double gbps = qc_bench_memory_gbps(roof);
    double memory = 0, compute = 0;
    if (gbps > 0)
        memory = (double)bytes / gbps / 1e3;
    if (roof->gemm_tflops.median > 0)
        compute = flops / roof->gemm_tflops.median / 1e6;
    return memory > compute ? memory : compute;
}

/* ---- results ---- */

double qc_bench_of_roof(const qc_bench_request *q, const qc_bench_result *r,
                        const qc_bench_row *row)
{
    const qc_bench_shape *s = &q->shapes[row->shape];
    uint64_t weight = qc_bench_weight_bytes(row->scheme, s->n, s->k);
    double floor = qc_bench_floor_us(&r->roof, qc_bench_bytes(weight, row->m, s->n, s->k),
                                     qc_bench_flops(row->m, s->n, s->k));
    return row->us.median > 0 ? floor / row->us.median : 0;
}

const char *qc_bench_dtype_name(const qc_bench_request *q)
{
    return q->bf16 ? "bf16" : "fp16";
}

int qc_bench_first_of_model(const qc_bench_request *q, uint32_t shape)
{
    for (uint32_t i = 0; i < shape; i++)
        if (strcmp(q->shapes[i].model, q->shapes[shape].model) == 0)
            return 0;
    return 1;
}

const qc_bench_row *qc_bench_find(const qc_bench_result *r, uint32_t shape, qc_bench_scheme scheme,
                                  uint64_t m)
{
    for (uint32_t i = 0; i < r->row_count; i++)
        if (r->rows[i].shape == shape && r->rows[i].scheme == scheme && r->rows[i].m == m)
            return &r->rows[i];
    return NULL;
}

int qc_bench_layer_of(const qc_bench_request *q, const qc_bench_result *r, uint32_t first,
                      qc_bench_scheme scheme, uint64_t m, qc_bench_layer *out)
{
    qc_bench_layer sum = {.model = q->shapes[first].model, .scheme = scheme, .m = m};
    int dense = 1;
    if (!q->shapes[first].count)
        return 0;
    for (uint32_t i = first; i < q->shape_count; i++) {
        if (strcmp(q->shapes[i].model, sum.model) != 0)
            continue;
        const qc_bench_row *row = qc_bench_find(r, i, scheme, m);
        if (!row)
            return 0;
        sum.us += q->shapes[i].count * row->us.median;
        sum.dense_us += q->shapes[i].count * row->dense.median;
        if (!row->dense.samples)
            dense = 0;
    }
    if (!dense)
        sum.dense_us = 0;
    *out = sum;
    return 1;
}
