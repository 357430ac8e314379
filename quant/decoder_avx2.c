/* qc_decoder_ops in vectors of 32 bytes. */
#define DEC_WIDTH 8u
#define DEC_ROWS  4u
#include "quant/decoder_lanes.h"

const qc_decoder_ops qc_decoder_ops_avx2 = DEC_TABLE(QC_ISA_AVX2);
