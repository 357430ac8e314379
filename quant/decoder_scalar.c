/* qc_decoder_ops in vectors of 16 bytes. */
#define DEC_WIDTH 4u
#define DEC_ROWS  2u
#include "quant/decoder_lanes.h"

const qc_decoder_ops qc_decoder_ops_scalar = DEC_TABLE(QC_ISA_SCALAR);
