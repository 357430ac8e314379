/* Block-wise NF4 and int8: what quant_avx2_blocks.c and quant_avx512_blocks.c have in common around
 * their passes over groups of blocks. It has no include guard, because each of them includes it
 * once, after these types:
 *
 *   group_scratch   what a group's passes hand on
 *   group_lanes     a vector with a lane for each block of a group
 *   search_tables   where codes are looked up */

typedef enum { NF4, INT8 } scheme;

typedef struct {
    const unsigned char *src; /* of the group */
    uint64_t block;           /* number of its first block */
    unsigned count;           /* of blocks */
    unsigned turn;            /* 0, 1, 2, ...: tells which of the scratch it uses */
    group_lanes absmax;       /* bits */
} group;

typedef struct {
    const search_tables *tables;
    group_scratch *scratch;
    uint32_t block_elems;
    unsigned char *codes;
    qc_block_error *block_errors;
    qc_piece_sums *sums;
} context;

/* Each file defines these. One makes scratch ready for a source; the other quantizes in groups, and
 * the rest with scalar_blocks. errors is a constant: whether c->block_errors is there. */
QC_INLINE void open_scratch(group_scratch *s, const void *src);
QC_INLINE void by_block_size(const context *c, scheme to, const void *src, qc_dtype dtype,
                             uint64_t n, float *absmax, int errors);

QC_INLINE group make_group(const void *src, qc_dtype dtype, uint32_t block_elems, uint64_t block,
                           uint64_t blocks, unsigned turn)
{
    const unsigned most =
        block_elems <= GROUP_ELEMS / QC_GROUP ? QC_GROUP : GROUP_ELEMS / block_elems;
    return (group){
        .src = (const unsigned char *)src + block * block_elems * qc_element_bytes(dtype),
        .block = block,
        .count = qc_min_u32(blocks - block, most),
        .turn = turn,
    };
}

/* Quantizes blocks one by one in scalar code; returns 1, or 0 after an element that has no code. */
static int scalar_blocks(const context *c, scheme to, const void *src, qc_dtype dtype,
                         uint64_t block, uint64_t elems, float *absmax)
{
    const qc_quant_ops *ops = &qc_quant_ops_scalar;
    const uint64_t element = qc_element_bytes(dtype);
    for (uint64_t done = 0; done < elems; done += c->block_elems, block++) {
        uint64_t first = block * c->block_elems;
        uint64_t n = qc_min_u64(elems - done, c->block_elems);
        const unsigned char *at = (const unsigned char *)src + first * element;
        qc_block_error *errors = c->block_errors ? c->block_errors + block : NULL;
        qc_piece_sums one;
        if (to == NF4)
            ops->nf4_quantize(at, dtype, n, c->block_elems, c->codes + first / 2, absmax + block,
                              errors, &one);
        else
            ops->int8_blocks_quantize(at, dtype, n, c->block_elems, (int8_t *)(c->codes + first),
                                      absmax + block, errors, &one);
        if (one.bad != QC_BAD_NONE) {
            c->sums->bad = one.bad;
            c->sums->bad_index = first + one.bad_index;
            return 0;
        }
        c->sums->sum_ee += one.sum_ee;
        c->sums->sum_xx += one.sum_xx;
    }
    return 1;
}

QC_INLINE void by_errors(const context *c, scheme to, const void *src, qc_dtype dtype, uint64_t n,
                         float *absmax)
{
    if (c->block_errors)
        by_block_size(c, to, src, dtype, n, absmax, 1);
    else
        by_block_size(c, to, src, dtype, n, absmax, 0);
}

QC_INLINE void by_dtype(scheme to, const void *src, qc_dtype dtype, uint64_t n,
                        uint32_t block_elems, unsigned char *codes, float *absmax,
                        qc_block_error *block_errors, qc_piece_sums *sums)
{
    group_scratch scratch;
    open_scratch(&scratch, src);
    *sums = (qc_piece_sums){.bad = QC_BAD_NONE};
    const context c = {QC_BLOCKS_TABLES(), &scratch, block_elems, codes, block_errors, sums};
    if (dtype == QC_DTYPE_BF16)
        by_errors(&c, to, src, QC_DTYPE_BF16, n, absmax);
    else if (dtype == QC_DTYPE_F32)
        by_errors(&c, to, src, QC_DTYPE_F32, n, absmax);
    else if (dtype == QC_DTYPE_F16)
        by_errors(&c, to, src, QC_DTYPE_F16, n, absmax);
    else
        by_errors(&c, to, src, QC_DTYPE_F64, n, absmax);
}

void QC_BLOCKS_NAME(nf4_quantize)(const void *src, qc_dtype dtype, uint64_t n, uint32_t block_elems,
                                  uint8_t *codes, float *absmax, qc_block_error *block_errors,
                                  qc_piece_sums *sums)
{
    by_dtype(NF4, src, dtype, n, block_elems, codes, absmax, block_errors, sums);
}

void QC_BLOCKS_NAME(int8_blocks_quantize)(const void *src, qc_dtype dtype, uint64_t n,
                                          uint32_t block_elems, int8_t *codes, float *absmax,
                                          qc_block_error *block_errors, qc_piece_sums *sums)
{
    by_dtype(INT8, src, dtype, n, block_elems, (unsigned char *)codes, absmax, block_errors, sums);
}
