/* Reading the values of options. All refuse with QC_ERR_USAGE, naming the option, what was expected
 * and what was found. Thread-safe: yes. */
#ifndef QC_CONVERT_OPTION_VALUES_H
#define QC_CONVERT_OPTION_VALUES_H

#include "convert/option_table.h"

/* "nf4, int8, fp16 or bf16"; cut where out is too small. */
void qc_option_list_choices(const qc_option_row *row, char *out, size_t out_bytes);
/* Index of text among the row's choices. */
QC_NODISCARD qc_status qc_option_choice(const qc_option_row *row, const char *text, unsigned *out,
                                        qc_error *err);
/* A whole number in decimal digits; max at most 10^18. digits: where in text it stands ("3" of
 * "zstd:3"). */
QC_NODISCARD qc_status qc_option_number(const qc_option_row *row, const char *text,
                                        const char *digits, uint64_t min, uint64_t max,
                                        uint64_t *out, qc_error *err);
/* Whole numbers from row->min to row->max with commas between, none twice; the array is the
 * arena's. */
QC_NODISCARD qc_status qc_option_number_list(const qc_option_row *row, const char *text,
                                             qc_arena *arena, uint64_t **out, unsigned *count,
                                             qc_error *err);
/* "0.85": digits with at most one point, no sign, no exponent; min is allowed only if above 0. */
QC_NODISCARD qc_status qc_option_decimal(const qc_option_row *row, const char *text, double min,
                                         double max, double *out, qc_error *err);
/* Any text but none. */
QC_NODISCARD qc_status qc_option_path(const qc_option_row *row, const char *value, const char **out,
                                      qc_error *err);
/* "3/8": index 2 of count 8; at most QC_PARTS_MAX parts. */
QC_NODISCARD qc_status qc_option_part(const qc_option_row *row, const char *value, unsigned *index,
                                      unsigned *count, qc_error *err);

/* Options of eval and report: what one sets, and what goes with what. (options_eval.c) */
QC_NODISCARD qc_status qc_options_apply_eval(qc_options *o, const qc_option_row *row,
                                             const char *value, uint64_t number, qc_error *err);
QC_NODISCARD qc_status qc_options_check_eval(const qc_options *o, qc_error *err);

/* Options of calibrating: the same. (options_calibrate.c) */
QC_NODISCARD qc_status qc_options_apply_calibrate(qc_options *o, const qc_option_row *row,
                                                  const char *value, uint64_t number,
                                                  qc_error *err);
QC_NODISCARD qc_status qc_options_check_calibrate(const qc_options *o, qc_error *err);

#endif
