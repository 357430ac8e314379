#define QC_LANES_TABLE qc_lanes_avx2
#include "quant/weight_lanes_body.h"
