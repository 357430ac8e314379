#define QC_LANES_TABLE qc_lanes_scalar
#include "quant/weight_lanes_body.h"
