#define QC_LANES_TABLE qc_lanes_avx512
#include "quant/weight_lanes_body.h"
