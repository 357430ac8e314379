/* Guesses what somebody meant who typed what another tool wants. The guesses are for messages only;
 * the setters accept by themselves what is unambiguous (option_values.h).
 *
 * A result is what follows "did you mean ", or NULL. Thread-safe: yes. */
#ifndef QC_CONVERT_OPTION_MISTAKES_H
#define QC_CONVERT_OPTION_MISTAKES_H

#include "convert/cli/option_table.h"

/* The command that a word like "quantize" or "verfy" stands for. */
const qc_command_row *qc_mistaken_command(const char *word);
/* Finds what stands for an option that `command` does not have, typed without its dashes:
 * "--threads" for "jobs", "--block-size" for "blok-size". rows is qc_option_table. *text lies in
 * the arena where it had to be made. */
QC_NODISCARD qc_status qc_mistaken_option(const char **text, qc_arena *arena, const char *typed,
                                          size_t len, const qc_option_row *rows, qc_command command,
                                          qc_error *err);
/* What does the job of a command ("mount") or an option ("--html") that earlier versions had. It
 * follows "qconv no longer has 'mount': ". */
const char *qc_gone_instead(const char *typed, size_t len, qc_command command);
/* Is it a command that only the Python package has? */
int qc_is_python_command(const char *word);
/* The choice of a row that another word stands for: "nf4" for "4bit", "none" for "off". */
const char *qc_mistaken_choice(const qc_option_row *row, const char *typed);
/* The number that "4k", "8,192" or "1_000" stands for, or 0. */
uint64_t qc_mistaken_number(const char *typed);
/* The share that "90%", "0,9" or, where 1 is the most, "90" stands for, or 0. */
double qc_mistaken_decimal(const char *typed, double most);

/* Do two words mean the same type: "bf16" and "BFloat16"? Case does not matter. */
int qc_same_word(const char *a, const char *b);

#endif
