/* What adapter.c and adapter_config.c share. */
#ifndef QC_FORMATS_ADAPTER_INTERNAL_H
#define QC_FORMATS_ADAPTER_INTERNAL_H

#include "formats/adapter.h"

#include <regex.h>

/* A member of rank_pattern or alpha_pattern: modules whose name ends so have another value. */
typedef struct {
    const char *key;
    regex_t pattern;
    int compiled;
    double value;
} qc_adapter_pattern;

typedef struct {
    double r, alpha;
    int use_rslora, use_dora, fan_in_fan_out, keeps_tied;
    const char **saved; /* modules_to_save: the ends of modules' names */
    size_t saved_count;
    const char *unknown; /* as in qc_adapter */
    qc_adapter_pattern *ranks, *alphas;
    size_t rank_count, alpha_count;
} qc_adapter_config;

/* Reads adapter_config.json. Call _deinit also after a failure. Texts live in the arena. */
QC_NODISCARD qc_status qc_adapter_config_read(qc_adapter_config *out, qc_arena *arena,
                                              const char *path, qc_error *err);
void qc_adapter_config_deinit(qc_adapter_config *c);
/* The rank and the alpha that count for a module. */
double qc_adapter_config_rank(const qc_adapter_config *c, const char *module);
double qc_adapter_config_alpha(const qc_adapter_config *c, const char *module);

#endif
