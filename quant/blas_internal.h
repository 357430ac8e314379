/* The functions of OpenBLAS that this folder uses; CBLAS is asked for row-major order. */
#ifndef QC_QUANT_BLAS_INTERNAL_H
#define QC_QUANT_BLAS_INTERNAL_H

#include "quant/blas.h"

/* The values of cblas.h. */
enum {
    QC_BLAS_ROWS = 101,
    QC_BLAS_PLAIN = 111,
    QC_BLAS_TRANS = 112,
    QC_BLAS_UPPER = 121,
    QC_BLAS_NON_UNIT = 131,
    QC_BLAS_LEFT = 141,
    QC_BLAS_RIGHT = 142
};

typedef struct {
    void (*sgemm)(int order, int transa, int transb, int m, int n, int k, float alpha,
                  const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc);
    void (*ssymm)(int order, int side, int uplo, int m, int n, float alpha, const float *a, int lda,
                  const float *b, int ldb, float beta, float *c, int ldc);
    void (*dgemm)(int order, int transa, int transb, int m, int n, int k, double alpha,
                  const double *a, int lda, const double *b, int ldb, double beta, double *c,
                  int ldc);
    void (*dtrsm)(int order, int side, int uplo, int trans, int diag, int m, int n, double alpha,
                  const double *a, int lda, double *b, int ldb);
    /* LAPACK is column-major, and gfortran passes the lengths of strings behind the arguments. */
    void (*dpotrf)(const char *uplo, const int *n, double *a, const int *lda, int *info,
                   size_t uplo_length);
    /* of OpenBLAS alone */
    void (*set_num_threads)(int count);
    char *(*config)(void);
    char *(*core_name)(void);
} qc_blas_functions;

struct qc_blas {
    qc_blas_functions f;
    char name[160];
};

/* The largest n that the library's int can hold as a row length, with room for sums of it. */
#define QC_BLAS_MOST 0x3fffffffu

#endif
