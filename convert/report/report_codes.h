/* Counts how often each code of the quantized weights occurs, which many threads read from the
 * output, and works out how often it would occur if weights were normal.
 *
 * The expectation is that n independent normal values share a scale, which is their largest
 * magnitude M. One of them has the code of +1 or -1; the others are normal values cut at +-M. With
 * F the normal distribution, M has the density n (2 F(m) - 1)^(n-1) 2 f(m), and the shares are
 * integrated over it. Scales that were searched (--scale search) differ from that by design. */
#ifndef QC_CONVERT_REPORT_CODES_H
#define QC_CONVERT_REPORT_CODES_H

#include "convert/report/report_facts.h"

/* Counts the codes of all weights into forms and kinds, and sets what is expected of forms. */
QC_NODISCARD qc_status qc_report_count_codes(qc_report *r, qc_error *err);

/* Adds how often each byte occurs. */
void qc_report_count_bytes(const unsigned char *bytes, size_t len, uint64_t counts[256]);
/* Turns counts of bytes that hold two 4-bit codes each into counts of codes. */
void qc_report_fold_nibbles(const uint64_t bytes[256], qc_report_codes *codes);

/* Computes the shares of the codes (ordered as in qc_report_codes) for normal values, n to a scale;
 * n >= 1. */
void qc_report_expect(const qc_form_ops *form, uint64_t n, double shares[256]);

/* Returns how many bits a code carries, which is its entropy. */
double qc_report_entropy(const qc_report_codes *c);
/* Returns half the sum of |share - expected|, which is 0 to 1. */
double qc_report_distance(const qc_report_codes *c, const double expected[256]);

/* Returns the share of a bin of 15 int8 codes: -127..-113 (with -128), ..., -7..7, ...,
 * 113..127. */
#define QC_REPORT_BINS 17u
double qc_report_bin(const double shares[256], unsigned bin);
int qc_report_bin_first(unsigned bin); /* -127, -112, ... */

#endif
