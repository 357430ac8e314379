#define QC_FEEDBACK_TABLE qc_feedback_lanes_avx2
#include "quant/error_feedback_lanes_body.h"
