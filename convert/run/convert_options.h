/* All that a conversion is asked for. */
#ifndef QC_CONVERT_CONVERT_OPTIONS_H
#define QC_CONVERT_CONVERT_OPTIONS_H

#include "convert/device/device_choice.h"
#include "convert/plan/plan_options.h"

#define QC_PARTS_MAX 4096

typedef struct {
    const char *model, *out; /* as given; OUT may be NULL with dry_run */
    qc_device_options devices;
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
