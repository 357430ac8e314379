#define QC_FEEDBACK_TABLE qc_feedback_lanes_avx512
#include "quant/error_feedback_lanes_body.h"
