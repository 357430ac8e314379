/* Reads numbers and words of config.json as the models' own code looks them up: in text_config
 * first, if there is one, and under the first of several names that is there and not null. Every
 * number is bounded, so that a product of two fields cannot overflow. Thread-safe. */
#ifndef QC_CONVERT_CONFIG_FIELDS_H
#define QC_CONVERT_CONFIG_FIELDS_H

#include "formats/json_strict.h"

#define QC_CONFIG_MAX_LAYERS  10000u
#define QC_CONFIG_MAX_EXPERTS 100000u
#define QC_CONFIG_MAX_SIZE    (UINT64_C(1) << 30) /* a dimension, a count of heads */

typedef struct {
    const qc_json_node *root;   /* NULL: there is no configuration */
    const qc_json_node *text;   /* text_config, whatever its name is, or root if there is none */
    const qc_json_node *vision; /* vision_config, or NULL */
    const char *model_type;     /* the root's; "" if it has none */
    const char *text_type;      /* text_config's model_type, else root's */
} qc_config;

/* Opens a configuration, which borrows from the document. doc may be NULL, here and below. */
void qc_config_open(qc_config *out, const qc_json *doc);
const qc_json_node *qc_config_root(const qc_json *doc);
const qc_json_node *qc_config_quantization(const qc_json *doc); /* quantization_config, or NULL */
/* "" if it has none. */
const char *qc_config_type(const qc_json *doc);         /* model_type */
const char *qc_config_quant_method(const qc_json *doc); /* quantization_config's quant_method */
/* Is `word` one of the blank-separated words of `list` (" a b ")? */
int qc_config_word_in(const char *word, const char *list);
/* The same of the len bytes at word; 0 for more than 31. */
int qc_config_part_in(const char *word, size_t len, const char *list);
/* Returns the first of the blank-separated names that `object` has with a value other than null, or
 * NULL if it has none of them. */
const qc_json_node *qc_config_field(const qc_json_node *object, const char *names);
/* Does the same in the text configuration, and then in the root. */
const qc_json_node *qc_config_text_field(const qc_config *c, const char *names);
/* Reads an integer from 0 to max, or gives `missing` where there is none. QC_ERR_INPUT names the
 * field. */
QC_NODISCARD qc_status qc_config_count(uint64_t *out, const qc_json_node *n, uint64_t max,
                                       uint64_t missing, qc_error *err);
/* Does the work of qc_config_text_field and qc_config_count in one call. */
QC_NODISCARD qc_status qc_config_read(uint64_t *out, const qc_config *c, const char *names,
                                      uint64_t max, uint64_t missing, qc_error *err);
/* Reads a size so. Where a model has one per layer (a list), the largest counts. */
QC_NODISCARD qc_status qc_config_size(uint64_t *out, const qc_config *c, const char *names,
                                      uint64_t missing, qc_error *err);
/* Reads a boolean. The result is `missing` where the field is missing or not a boolean. */
int qc_config_flag(const qc_config *c, const char *name, int missing);
/* Marks the layers whose numbers the list has; the first layer has the number `first`. Another list
 * is QC_ERR_INPUT. */
QC_NODISCARD qc_status qc_config_mark_layers(unsigned char *marks, uint32_t layer_count,
                                             const qc_json_node *list, uint64_t first,
                                             qc_error *err);

#endif
