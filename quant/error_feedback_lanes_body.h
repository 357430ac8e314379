/* The body of error_feedback_lanes*.c; defines the table QC_FEEDBACK_TABLE. It has no include
 * guard, because each of them includes it once. */
#include "quant/error_feedback_lanes.h"
#include "quant/quant_half.h"

#include <string.h>

/* Vectors are returned by functions of this file only, which are inlined. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

/* A vector is one register, since GCC 12 compares wider ones number by number. The lanes are
 * independent, so each function takes as many of them at a time as a register has; results do not
 * depend on how many. */
#if defined(__AVX512F__)
#define AT_A_TIME 16u
#elif defined(__AVX__)
#define AT_A_TIME 8u
#else
#define AT_A_TIME 4u
#endif
typedef float float_lanes __attribute__((vector_size(AT_A_TIME * sizeof(float))));
typedef int32_t int_lanes __attribute__((vector_size(AT_A_TIME * sizeof(int32_t))));

typedef struct {
    float_lanes unit;
    int_lanes code;
} encoded;

static inline float_lanes load(const float *p)
{
    float_lanes v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* These are macros, because old compilers warn of the ABI of vector arguments. */
#define STORE(to, v) memcpy((to), &(v), sizeof(v))
#define ADD(to, v)                                                                                 \
    do {                                                                                           \
        float_lanes sum_ = load(to) + (v);                                                         \
        STORE(to, sum_);                                                                           \
    } while (0)
#define CHOOSE(mask, yes, no)                                                                      \
    ((float_lanes)(((mask) & (int_lanes)(yes)) | (~(mask) & (int_lanes)(no))))

static inline float_lanes all(float x)
{
    return x - (float_lanes){0};
}

static inline void encode_nf4(const float_lanes *y, encoded *e)
{
    e->unit = all(qc_nf4_code[0]);
    e->code = (int_lanes){0};
    for (unsigned k = 0; k < 15; k++) {
        int_lanes above = *y > all(qc_nf4_threshold[k]);
        e->unit = CHOOSE(above, all(qc_nf4_code[k + 1]), e->unit);
        e->code -= above;
    }
}

/* Finds the code's number as a float: a unit is this times step. */
static inline void encode_number(const float_lanes *y, const qc_form_ops *form, encoded *e)
{
    const float lowest = (float)form->lowest, highest = (float)form->highest;
    float_lanes q = CHOOSE(*y > all(highest), all(highest), *y);
    q = CHOOSE(q < all(lowest), all(lowest), q);
    /* round half to even: the ulp of 1.5 * 2^23 is 1 */
    e->unit = (q + 0x1.8p23f) - 0x1.8p23f;
    e->code = __builtin_convertvector(e->unit, int_lanes) + form->zero;
}

static void errors(const float *x, const float *d, uint32_t n, const qc_form_ops *form,
                   const float *inv, unsigned count, float *rr)
{
    const int table = qc_form_is_table(form);
    for (unsigned j = 0; j < count; j++) {
        float lanes[QC_LANES];
        for (unsigned at = 0; at < QC_LANES; at += AT_A_TIME) {
            float_lanes sum = {0};
            for (uint32_t i = at; i < n; i += QC_LANES) {
                float_lanes y = load(x + i) * inv[j];
                encoded e;
                if (table)
                    encode_nf4(&y, &e);
                else
                    encode_number(&y, form, &e);
                float_lanes r = y - e.unit;
                sum += load(d + i) * (r * r);
            }
            STORE(lanes + at, sum);
        }
        rr[j] = qc_fold16(lanes);
    }
}

static void refit(const float *x, const float *d, uint32_t n, const qc_form_ops *form, float inv,
                  float *ux, float *uu)
{
    float lanes_ux[QC_LANES], lanes_uu[QC_LANES];
    for (unsigned at = 0; at < QC_LANES; at += AT_A_TIME) {
        float_lanes sum_ux = {0}, sum_uu = {0};
        for (uint32_t i = at; i < n; i += QC_LANES) {
            float_lanes v = load(x + i), y = v * inv;
            encoded e;
            if (qc_form_is_table(form)) {
                encode_nf4(&y, &e);
            } else {
                encode_number(&y, form, &e);
                e.unit *= form->step;
            }
            float_lanes weighted = load(d + i) * e.unit;
            sum_ux += weighted * v;
            sum_uu += weighted * e.unit;
        }
        STORE(lanes_ux + at, sum_ux);
        STORE(lanes_uu + at, sum_uu);
    }
    *ux = qc_fold16(lanes_ux);
    *uu = qc_fold16(lanes_uu);
}

/* Finds the code, and the value that a reader makes of it; y is a value times its inverse. */
static inline void decide(const float_lanes *y, const float_lanes *scale, const qc_form_ops *form,
                          encoded *e, float_lanes *value)
{
    if (qc_form_is_table(form)) {
        encode_nf4(y, e);
        *value = e->unit * *scale;
        return;
    }
    encode_number(y, form, e);
    *value = form->step_last ? (e->unit * *scale) * form->step : (e->unit * form->step) * *scale;
}

static void feed(qc_tile *t, uint32_t cols, const float *u, const qc_form_ops *form)
{
    for (unsigned at = 0; at < QC_LANES; at += AT_A_TIME)
        for (uint32_t k = 0; k < cols; k++) {
            float_lanes y = load(t->in[k] + at) * load(t->inverse[k] + at);
            float_lanes scale = load(t->scale[k] + at), value;
            encoded e;
            decide(&y, &scale, form, &e, &value);
            float_lanes error = load(t->target[k] + at) - value;
            STORE(t->value[k] + at, value);
            STORE(t->error[k] + at, error);
            STORE(t->code[k] + at, e.code);
            for (uint32_t j = k + 1; j < cols; j++)
                ADD(t->in[j] + at, error * u[k * QC_TILE_COLS + j]);
        }
}

static uint32_t sweep_lanes(qc_tile *t, unsigned at, uint32_t cols, const float *h,
                            const float *inverse, const qc_form_ops *form)
{
    int_lanes changed = {0};
    for (uint32_t k = 0; k < cols; k++) {
        float_lanes old = load(t->value[k] + at), target = load(t->target[k] + at), value;
        float_lanes scale = load(t->scale[k] + at);
        /* a dead column takes the code nearest to its weight */
        float_lanes place = inverse[k] == 0.0f ? target : old + load(t->in[k] + at) * inverse[k];
        float_lanes y = place * load(t->inverse[k] + at);
        int_lanes code;
        encoded e;
        decide(&y, &scale, form, &e, &value);
        memcpy(&code, t->code[k] + at, sizeof code);
        changed -= code != e.code;
        float_lanes less = old - value, error = target - value;
        STORE(t->value[k] + at, value);
        STORE(t->error[k] + at, error);
        STORE(t->code[k] + at, e.code);
        for (uint32_t j = k + 1; j < cols; j++)
            ADD(t->in[j] + at, less * h[k * QC_TILE_COLS + j]);
    }
    uint32_t count = 0;
    for (unsigned l = 0; l < AT_A_TIME; l++)
        count += (uint32_t)changed[l];
    return count;
}

static uint32_t sweep(qc_tile *t, uint32_t cols, const float *h, const float *inverse,
                      const qc_form_ops *form)
{
    uint32_t changed = 0;
    for (unsigned at = 0; at < QC_LANES; at += AT_A_TIME)
        changed += sweep_lanes(t, at, cols, h, inverse, form);
    return changed;
}

/* Sets the codes of column k for the lanes from `at` on. All lanes look for a better code at once;
 * the first that finds one takes it, and those behind it look again. moved [QC_LANES]: G times what
 * the column's errors change by. Returns the number of changed codes. */
static uint32_t step_lanes(qc_tile *t, unsigned at, uint32_t k, float own, float inverse,
                           const qc_tile_outputs *o, const qc_form_ops *form, float *moved)
{
    const unsigned count = o->rows < at ? 0 : o->rows - at < AT_A_TIME ? o->rows - at : AT_A_TIME;
    const float_lanes old = load(t->value[k] + at), target = load(t->target[k] + at);
    const float_lanes scale = load(t->scale[k] + at), to_place = load(t->inverse[k] + at);
    const float_lanes step = load(o->inverse + at) * inverse;
    uint32_t changed = 0;
    for (unsigned l = 0; l < count; l++) {
        float_lanes in = load(t->in[k] + at) + load(moved + at) * own, value;
        float_lanes place = inverse == 0.0f ? target : old + in * step, y = place * to_place;
        encoded e;
        decide(&y, &scale, form, &e, &value);
        while (l < count && e.code[l] == t->code[k][at + l])
            l++;
        if (l >= count)
            break;
        const float less = old[l] - value[l];
        t->value[k][at + l] = value[l];
        t->error[k][at + l] = target[l] - value[l];
        t->code[k][at + l] = e.code[l];
        for (unsigned i = 0; i < QC_LANES; i += AT_A_TIME)
            ADD(moved + i, less * load(o->g[at + l] + i));
        changed++;
    }
    return changed;
}

static uint32_t sweep_outputs(qc_tile *t, uint32_t cols, const float *h, const float *inverse,
                              const qc_tile_outputs *o, const qc_form_ops *form)
{
    uint32_t changed = 0;
    for (uint32_t k = 0; k < cols; k++) {
        _Alignas(64) float moved[QC_LANES] = {0.0f};
        uint32_t here = 0;
        for (unsigned at = 0; at < QC_LANES; at += AT_A_TIME) {
            float_lanes error = load(t->target[k] + at) - load(t->value[k] + at);
            STORE(t->error[k] + at, error);
            here += step_lanes(t, at, k, h[k * QC_TILE_COLS + k], inverse[k], o, form, moved);
        }
        changed += here;
        for (uint32_t j = k + 1; j < cols && here > 0; j++)
            for (unsigned at = 0; at < QC_LANES; at += AT_A_TIME)
                ADD(t->in[j] + at, load(moved + at) * h[k * QC_TILE_COLS + j]);
    }
    return changed;
}

const qc_feedback_lanes QC_FEEDBACK_TABLE = {errors, refit, feed, sweep, sweep_outputs};
