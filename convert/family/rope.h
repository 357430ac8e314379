/* Rotary positions: what config.json says of them, and their tables of cosines and sines. */
#ifndef QC_CONVERT_FAMILY_ROPE_H
#define QC_CONVERT_FAMILY_ROPE_H

#include "base/arena.h"
#include "formats/json_strict.h"

/* Rotary positions turn dimension pair i of a head by position * frequency i. Sources: Su et al.
 * 2021 (RoPE). linear: Chen et al. 2023. dynamic: the base changes beyond the context only. llama3:
 * Llama 3.1's scaling by wavelength. yarn: Peng et al. 2023. longrope: Ding et al. 2024. */
typedef enum {
    QC_ROPE_DEFAULT,
    QC_ROPE_LINEAR,
    QC_ROPE_DYNAMIC, /* like DEFAULT up to the context; longer windows are refused */
    QC_ROPE_LLAMA3,
    QC_ROPE_YARN,
    QC_ROPE_LONGROPE
} qc_rope_kind;

typedef struct {
    qc_rope_kind kind;
    double theta;
    double factor;
    double original;  /* LLAMA3, YARN, LONGROPE: the context before scaling */
    double low, high; /* LLAMA3 */
    double beta_fast, beta_slow;
    double magnitude; /* cos and sin are multiplied by it; 1 except for YARN and LONGROPE */
    double score;     /* q k^T is multiplied by it as well: DeepSeek's YARN, else 1 */
    int truncate;     /* YARN: round to whole dimensions */
    /* LONGROPE: [dims / 2] divisors of frequencies, for windows of up to `original` tokens and for
     * longer ones */
    const float *short_factors, *long_factors;
} qc_rope;

/* Reads the rotary parameters that `part` of them names where layers differ ("full_attention"), and
 * those of the whole model where they do not. root: the object with rope_theta and rope_scaling
 * (transformers 4) or rope_parameters (5). theta: where it is missing. dims: how many of a head are
 * turned. Messages start with "config.json". */
typedef struct {
    const qc_json_node *root;
    const char *part; /* NULL: layers may not differ */
    double theta;
    uint64_t dims, context;
    int su_is_longrope; /* Phi-3 used to call it "su" and "yarn" */
} qc_rope_source;

QC_NODISCARD qc_status qc_rope_read(qc_rope *out, qc_arena *arena, const qc_rope_source *s,
                                    qc_error *err);
/* Returns the object that holds the rotary parameters, or NULL. */
const qc_json_node *qc_rope_object(const qc_json_node *root);

/* Computes frequencies [dims / 2] in float, as transformers does. longer: for windows that are
 * longer than the original context. */
void qc_rope_frequencies(const qc_rope *r, uint64_t dims, int longer, float *frequencies);
/* Computes cos and sin [positions, dims / 2] of float angles, times the magnitude. */
void qc_rope_table(const qc_rope *r, const float *frequencies, uint64_t dims, uint64_t positions,
                   float *cosines, float *sines);

/* The tables for windows of up to so many positions. Row p is that of position p; in a window that
 * is longer than the original context of LONGROPE it is row `longer` + p. */
typedef struct {
    float *cosines, *sines; /* one allocation, which cosines owns */
    uint64_t longer;
} qc_rope_tables;

uint64_t qc_rope_tables_bytes(const qc_rope *r, uint64_t dims, uint64_t positions); /* saturates */
QC_NODISCARD qc_status qc_rope_tables_make(qc_rope_tables *out, const qc_rope *r, uint64_t dims,
                                           uint64_t positions, qc_error *err);
/* Returns the row of position 0 of a window of this length. */
uint64_t qc_rope_first_row(const qc_rope *r, const qc_rope_tables *t, uint64_t length);

#endif
