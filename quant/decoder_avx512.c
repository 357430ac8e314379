/* qc_decoder_ops in vectors of 64 bytes. */
#define DEC_WIDTH 16u
#define DEC_ROWS  4u
#include "quant/decoder_lanes.h"

const qc_decoder_ops qc_decoder_ops_avx512 = DEC_TABLE(QC_ISA_AVX512);
