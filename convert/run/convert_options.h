/* What a conversion is asked for, apart from how the program was called (convert/term/call.h). */
#ifndef QC_CONVERT_CONVERT_OPTIONS_H
#define QC_CONVERT_CONVERT_OPTIONS_H

#include "convert/plan/plan_options.h"

#define QC_PARTS_MAX 4096

typedef struct {
    qc_plan_options plan;
    int dry_run;
    int force;
    int restart;         /* begin anew although an interrupted conversion could be continued */
    unsigned part_index; /* 0..part_count-1, of --part */
    unsigned part_count; /* 0: not given; at most QC_PARTS_MAX */
    int explain;         /* --to auto: say why */
    int incomplete;      /* take a model that lacks tensors */
} qc_convert_options;

#endif
