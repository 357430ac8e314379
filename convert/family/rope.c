#include "convert/family/rope.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/family/family_read.h"
#include "convert/model/config_fields.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define TAU   6.283185307179586476925
#define SHOWN 80

const qc_json_node *qc_rope_object(const qc_json_node *root)
{
    const qc_json_node *n = qc_config_field(root, "rope_scaling");
    if (n && qc_json_kind_of(n) == QC_JSON_OBJECT && qc_json_first(n))
        return n;
    return qc_config_field(root, "rope_parameters");
}

static double yarn_magnitude(double factor, double scale)
{
    return factor <= 1.0 ? 1.0 : 0.1 * scale * log(factor) + 1.0;
}

static qc_status read_original(const qc_rope_source *s, const qc_json_node *p, qc_rope *rope,
                               qc_error *err)
{
    double outside = 0.0, context = (double)s->context;
    /* Phi-3 has it outside only. */
    if (s->su_is_longrope && !qc_config_field(p, "original_max_position_embeddings"))
        return qc_read_positive(s->root, "original_max_position_embeddings",
                                context > 0.0 ? context : (double)NAN, &rope->original, err);
    QC_TRY(qc_read_positive(p, "original_max_position_embeddings",
                            context > 0.0 ? context : (double)NAN, &rope->original, err));
    QC_TRY(qc_read_positive(s->root, "original_max_position_embeddings", rope->original, &outside,
                            err));
    /* transformers 5 takes the outer value, 4 the inner one. */
    if (outside != rope->original)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: original_max_position_embeddings is %g outside and %g inside of the "
                "rotary parameters, and versions of transformers differ in which they take",
                outside, rope->original);
    return QC_OK;
}

static qc_status read_yarn(const qc_rope_source *s, const qc_json_node *p, qc_rope *rope,
                           qc_error *err)
{
    double scale = 0.0, scale_all = 0.0;
    QC_TRY(read_original(s, p, rope, err));
    QC_TRY(qc_read_positive(p, "beta_fast", 32.0, &rope->beta_fast, err));
    QC_TRY(qc_read_positive(p, "beta_slow", 1.0, &rope->beta_slow, err));
    rope->truncate = qc_json_bool_or(qc_config_field(p, "truncate"), 1);
    if (qc_config_field(p, "mscale_all_dim")) {
        QC_TRY(qc_read_positive(p, "mscale_all_dim", 1.0, &scale_all, err));
        rope->score = yarn_magnitude(rope->factor, scale_all);
        rope->score *= rope->score;
    }
    if (qc_config_field(p, "attention_factor"))
        return qc_read_positive(p, "attention_factor", 1.0, &rope->magnitude, err);
    rope->magnitude = yarn_magnitude(rope->factor, 1.0);
    if (!qc_config_field(p, "mscale") || !qc_config_field(p, "mscale_all_dim"))
        return QC_OK;
    QC_TRY(qc_read_positive(p, "mscale", 1.0, &scale, err));
    rope->magnitude = yarn_magnitude(rope->factor, scale) / yarn_magnitude(rope->factor, scale_all);
    return QC_OK;
}

static qc_status read_llama3(const qc_rope_source *s, const qc_json_node *p, qc_rope *rope,
                             qc_error *err)
{
    QC_TRY(read_original(s, p, rope, err));
    QC_TRY(qc_read_positive(p, "low_freq_factor", (double)NAN, &rope->low, err));
    QC_TRY(qc_read_positive(p, "high_freq_factor", (double)NAN, &rope->high, err));
    if (rope->high <= rope->low)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: high_freq_factor %g is not above low_freq_factor %g", rope->high,
                rope->low);
    return QC_OK;
}

/* ---- longrope ---- */

static qc_status read_factors(const float **out, qc_arena *arena, const qc_json_node *p,
                              const char *name, uint64_t count, qc_error *err)
{
    const qc_json_node *list = qc_config_field(p, name);
    uint64_t i = 0;
    float *factors = NULL;
    QC_TRY(qc_arena_alloc(arena, &factors, (size_t)count, sizeof *factors, err));
    if (!list || qc_json_kind_of(list) != QC_JSON_ARRAY)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s is %s, expected a list", name,
                list ? qc_json_kind_name(qc_json_kind_of(list)) : "missing");
    for (const qc_json_node *n = qc_json_first(list); n; n = qc_json_next(n), i++) {
        double v = 0.0;
        QC_TRY(qc_json_as_double(n, "config.json: a factor of longrope", &v, err));
        if (!(v > 0.0) || isinf((float)v))
            QC_FAIL(err, QC_ERR_INPUT, "config.json: %s has %g, expected numbers above 0", name, v);
        if (i < count)
            factors[i] = (float)v;
    }
    if (i != count)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: %s has %" PRIu64 " entries, and %" PRIu64 " pairs are turned", name,
                i, count);
    *out = factors;
    return QC_OK;
}

static qc_status read_longrope(const qc_rope_source *s, qc_arena *arena, const qc_json_node *p,
                               qc_rope *rope, qc_error *err)
{
    QC_TRY(read_original(s, p, rope, err));
    QC_TRY(read_factors(&rope->short_factors, arena, p, "short_factor", s->dims / 2, err));
    QC_TRY(read_factors(&rope->long_factors, arena, p, "long_factor", s->dims / 2, err));
    const double ratio = (double)s->context / rope->original;
    QC_TRY(qc_read_positive(p, "factor", ratio > 0.0 ? ratio : 1.0, &rope->factor, err));
    if (s->context > 0 && fabs(rope->factor - ratio) > 1e-9 * ratio)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: the factor of longrope is %g, and the contexts make it %g; versions "
                "of transformers differ in which they take",
                rope->factor, ratio);
    rope->magnitude =
        rope->factor <= 1.0 ? 1.0 : sqrt(1.0 + log(rope->factor) / log(rope->original));
    return qc_read_positive(p, "attention_factor", rope->magnitude, &rope->magnitude, err);
}

/* ---- all of it ---- */

static qc_status find_kind(qc_rope *rope, const qc_rope_source *s, const qc_json_node *p,
                           qc_error *err)
{
    static const char *const names[] = {"default", "linear", "dynamic",
                                        "llama3",  "yarn",   "longrope"};
    const char *type = qc_json_string_or(qc_config_field(p, "rope_type type"), "default");
    if (s->su_is_longrope && (strcmp(type, "su") == 0 || strcmp(type, "yarn") == 0))
        type = "longrope";
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
        if (strcmp(type, names[i]) == 0) {
            rope->kind = (qc_rope_kind)i;
            return QC_OK;
        }
    QC_FAIL(err, QC_ERR_UNSUPPORTED,
            "config.json: rotary positions of type '%.*s' are not computed; default, linear, "
            "dynamic, llama3, yarn and longrope are",
            SHOWN, type);
}

/* Goes to the parameters of the layers that are asked for, where layers differ. */
static qc_status find_part(const qc_json_node **p, const qc_rope_source *s, qc_error *err)
{
    if (qc_json_kind_of(*p) != QC_JSON_OBJECT)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s is %s, expected an object", qc_json_key(*p),
                qc_json_kind_name(qc_json_kind_of(*p)));
    for (const qc_json_node *n = qc_json_first(*p); n; n = qc_json_next(n)) {
        if (qc_json_kind_of(n) != QC_JSON_OBJECT)
            continue;
        const qc_json_node *part = s->part ? qc_config_field(*p, s->part) : NULL;
        if (!part)
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "config.json: %s differ by layer ('%.*s'), which is not computed",
                    qc_json_key(*p), SHOWN, qc_json_key(n));
        *p = part;
        return QC_OK;
    }
    return QC_OK;
}

qc_status qc_rope_read(qc_rope *out, qc_arena *arena, const qc_rope_source *s, qc_error *err)
{
    const qc_json_node *p = qc_rope_object(s->root);
    *out = (qc_rope){.factor = 1.0, .magnitude = 1.0, .score = 1.0, .truncate = 1};
    QC_TRY(qc_read_positive(s->root, "rope_theta", s->theta, &out->theta, err));
    if (!p)
        return QC_OK;
    QC_TRY(find_part(&p, s, err));
    QC_TRY(find_kind(out, s, p, err));
    QC_TRY(qc_read_positive(p, "rope_theta", out->theta, &out->theta, err));
    if (out->kind == QC_ROPE_DEFAULT)
        return QC_OK;
    if (out->kind == QC_ROPE_LONGROPE)
        return read_longrope(s, arena, p, out, err);
    QC_TRY(qc_read_positive(p, "factor", (double)NAN, &out->factor, err));
    if (out->kind == QC_ROPE_YARN)
        return read_yarn(s, p, out, err);
    return out->kind == QC_ROPE_LLAMA3 ? read_llama3(s, p, out, err) : QC_OK;
}

/* ---- tables ---- */

/* This computes in float where transformers does. An error in a frequency grows with the position,
 * so both have to get the same frequency. transformers also multiplies llama3's scale and yarn's
 * ramp in float. */
static float llama3(const qc_rope *r, float inv)
{
    float wavelength = (float)TAU / inv;
    float factor = (float)r->factor;
    if (wavelength < (float)(r->original / r->high))
        return inv;
    if (wavelength > (float)(r->original / r->low))
        return inv / factor;
    float smooth = ((float)r->original / wavelength - (float)r->low) / (float)(r->high - r->low);
    return (1.0f - smooth) * inv / factor + smooth * inv;
}

/* The dimension that turns `rotations` times within the original context. */
static double yarn_dimension(const qc_rope *r, double rotations, double dims)
{
    return dims * log(r->original / (rotations * TAU)) / (2.0 * log(r->theta));
}

static void yarn_range(const qc_rope *r, double dims, double *low, double *high)
{
    *low = yarn_dimension(r, r->beta_fast, dims);
    *high = yarn_dimension(r, r->beta_slow, dims);
    if (r->truncate) {
        *low = floor(*low);
        *high = ceil(*high);
    }
    *low = *low > 0.0 ? *low : 0.0;
    *high = *high < dims - 1.0 ? *high : dims - 1.0;
    if (*low == *high)
        *high += 0.001;
}

static float yarn(const qc_rope *r, float power, uint64_t i, double low, double high)
{
    float ramp = ((float)i - (float)low) / (float)(high - low);
    ramp = ramp < 0.0f ? 0.0f : ramp > 1.0f ? 1.0f : ramp;
    float keep = 1.0f - ramp;
    return 1.0f / ((float)r->factor * power) * (1.0f - keep) + 1.0f / power * keep;
}

void qc_rope_frequencies(const qc_rope *r, uint64_t dims, int longer, float *frequencies)
{
    double low = 0.0, high = 0.0;
    if (r->kind == QC_ROPE_YARN)
        yarn_range(r, (double)dims, &low, &high);
    for (uint64_t i = 0; i < dims / 2; i++) {
        float exponent = (float)(2 * i) / (float)dims;
        float power = (float)pow((double)(float)r->theta, (double)exponent);
        float inv = 1.0f / power;
        switch (r->kind) {
        case QC_ROPE_DEFAULT:
        case QC_ROPE_DYNAMIC:
            break;
        case QC_ROPE_LINEAR:
            inv /= (float)r->factor;
            break;
        case QC_ROPE_LLAMA3:
            inv = llama3(r, inv);
            break;
        case QC_ROPE_LONGROPE:
            inv = 1.0f / ((longer ? r->long_factors : r->short_factors)[i] * power);
            break;
        case QC_ROPE_YARN:
            inv = yarn(r, power, i, low, high);
            break;
        }
        frequencies[i] = inv;
    }
}

void qc_rope_table(const qc_rope *r, const float *frequencies, uint64_t dims, uint64_t positions,
                   float *cosines, float *sines)
{
    float magnitude = (float)r->magnitude;
    for (uint64_t p = 0; p < positions; p++) {
        for (uint64_t i = 0; i < dims / 2; i++) {
            float angle = (float)p * frequencies[i];
            *cosines++ = (float)cos((double)angle) * magnitude;
            *sines++ = (float)sin((double)angle) * magnitude;
        }
    }
}

/* Windows that are longer than the original context of longrope have tables of their own. */
static uint64_t rows_of(const qc_rope *r, uint64_t positions)
{
    const int both = r->kind == QC_ROPE_LONGROPE && (double)positions > r->original;
    return qc_sat_mul(positions, both ? 2 : 1);
}

uint64_t qc_rope_tables_bytes(const qc_rope *r, uint64_t dims, uint64_t positions)
{
    return qc_sat_mul(qc_sat_add(qc_sat_mul(rows_of(r, positions), 2), 1),
                      dims / 2 * sizeof(float));
}

uint64_t qc_rope_first_row(const qc_rope *r, const qc_rope_tables *t, uint64_t length)
{
    return r->kind == QC_ROPE_LONGROPE && (double)length > r->original ? t->longer : 0;
}

qc_status qc_rope_tables_make(qc_rope_tables *out, const qc_rope *r, uint64_t dims,
                              uint64_t positions, qc_error *err)
{
    const uint64_t half = dims / 2, rows = rows_of(r, positions);
    size_t bytes = 0;
    *out = (qc_rope_tables){.longer = positions};
    if (qc_u64_to_size(qc_rope_tables_bytes(r, dims, positions), &bytes) || bytes == SIZE_MAX)
        QC_FAIL(err, QC_ERR_NOMEM, "a window of %" PRIu64 " tokens is too long", positions);
    QC_TRY(qc_malloc_aligned(&out->cosines, 64, bytes, err));
    out->sines = out->cosines + rows * half;
    float *frequencies = out->sines + rows * half;
    for (uint64_t at = 0; at < rows; at += positions) {
        qc_rope_frequencies(r, dims, at > 0, frequencies);
        qc_rope_table(r, frequencies, dims, positions, out->cosines + at * half,
                      out->sines + at * half);
    }
    return QC_OK;
}
