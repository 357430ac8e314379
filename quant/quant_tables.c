/* The constant tables of the quantizers (where they come from: quant_values.h). */
#include "quant/quant_internal.h"
#include "quant/quant_values.h"

const float qc_nf4_code[16] = {QC_NF4_CODE_VALUES};

const float qc_nf4_threshold[15] = {QC_NF4_THRESHOLD_VALUES};

/* SHA-256 of the 1024 little-endian bytes:
 * e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c */
const float qc_dynamic_map[256] = {QC_DYNAMIC_MAP_VALUES};

/* threshold[j] is the float midpoint of entries j and j + 1 where j is even. Where j is odd it is
 * the float just below the midpoint, because there the search gives a tie to the upper entry. */
const float qc_dynamic_threshold[255] = {QC_DYNAMIC_THRESHOLD_VALUES};

int qc_block_size_valid(uint64_t block_elems)
{
    return block_elems >= 32 && block_elems <= QC_BLOCK_MAX &&
           (block_elems & (block_elems - 1)) == 0;
}
