/* Reads the values of options. All functions refuse with QC_ERR_USAGE and name the option, what was
 * expected and what was found. Thread-safe: yes. */
#ifndef QC_CONVERT_OPTION_VALUES_H
#define QC_CONVERT_OPTION_VALUES_H

#include "convert/cli/option_table.h"

/* Writes "nf4, int8, fp16 or bf16", cut where out is too small. */
void qc_option_list_choices(const qc_option_row *row, char *out, size_t out_bytes);

/* Returns the index of the choice that text is, or -1. */
int qc_option_choice(const qc_option_row *row, const char *text);

/* The setters of the table's rows (qc_option_setter). Each line says what is stored in the row's
 * member. */
#define QC_SETTER(name)                                                                            \
    QC_NODISCARD qc_status name(qc_options *o, const qc_option_row *row, const char *value,        \
                                qc_error *err)
QC_SETTER(qc_option_set_choice);   /* the index of the choice or its value; 1 for a switch */
QC_SETTER(qc_option_set_count);    /* one more than before */
QC_SETTER(qc_option_set_word);     /* the choice's name */
QC_SETTER(qc_option_set_u64);      /* a whole number */
QC_SETTER(qc_option_set_unsigned); /* the same, where the row's max fits in an unsigned */
QC_SETTER(qc_option_set_decimal);  /* "0.85": digits with at most one point, no sign, no exponent */
QC_SETTER(qc_option_set_size);     /* bytes */
QC_SETTER(qc_option_set_text);     /* as it is */
QC_SETTER(qc_option_set_list);     /* names with commas between, lower case, without blanks */
QC_SETTER(qc_option_set_path);     /* as it is, but not empty */
/* These setters know their members. */
QC_SETTER(qc_option_set_compress);
QC_SETTER(qc_option_set_rule);
QC_SETTER(qc_option_set_vram);
QC_SETTER(qc_option_set_mla);
QC_SETTER(qc_option_set_block_size); /* a number of weights, or "channel" */
QC_SETTER(qc_option_set_prefill);    /* a number of tokens, or "whole", which is 0 */
QC_SETTER(qc_option_set_run_device);
QC_SETTER(qc_option_set_m);
QC_SETTER(qc_option_set_part);
QC_SETTER(qc_option_set_lora);

#endif
