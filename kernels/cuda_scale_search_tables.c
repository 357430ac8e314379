/* The constants of the search for a GPU, copied from the CPU's tables. */
#include "kernels/cuda_scale_search.h"
#include "quant/scale_search_internal.h"

#include <string.h>

_Static_assert(sizeof((qc_cuda_search_tables *)0)->screen == sizeof((qc_search_tables *)0)->screen,
               "one layout of the screen");
_Static_assert(sizeof((qc_cuda_search_tables *)0)->factor == sizeof qc_search_factor,
               "one layout of the factors");
_Static_assert(QC_SEARCH_FACTORS == 16 && QC_SEARCH_LISTS == QC_CUDA_SEARCH_LISTS &&
                   QC_SEARCH_RUN == 64 && QC_SEARCH_CANDIDATES == 16,
               "cuda_scale_search.cu is written for these");
_Static_assert(QC_SEARCH_REFIT_COUNT <= QC_CUDA_SEARCH_REFITS && QC_SEARCH_NF4_LATTICE <= 16 &&
                   QC_SEARCH_PAIR <= 16,
               "room in the tables");

void qc_cuda_search_tables_fill(qc_cuda_search_tables *out)
{
    static const float nf4_steps[] = QC_SEARCH_NF4_STEPS, int8_steps[] = QC_SEARCH_INT8_STEPS;
    static const float int4_steps[] = QC_SEARCH_INT4_STEPS;
    static const float row_steps[] = QC_SEARCH_ROW_STEPS, refits[] = QC_SEARCH_REFITS;
    memset(out, 0, sizeof *out);
    memcpy(out->screen, qc_search_tables_get()->screen, sizeof out->screen);
    memcpy(out->factor, qc_search_factor, sizeof out->factor);
    memcpy(out->nf4_steps, nf4_steps, sizeof nf4_steps);
    memcpy(out->int4_steps, int4_steps, sizeof int4_steps);
    memcpy(out->int8_steps, int8_steps, sizeof int8_steps);
    memcpy(out->row_steps, row_steps, sizeof row_steps);
    for (unsigned j = 0; j < QC_SEARCH_CANDIDATES / 2; j++)
        out->int4_row_factor[j] = qc_search_steps_of[1][4 - 2][2 * j];
    memcpy(out->refits, refits, sizeof refits);
    out->int8_target = QC_SEARCH_INT8_TARGET;
}

uint32_t qc_cuda_search_list(const qc_form_ops *form, uint32_t block_elems)
{
    return qc_search_list(form, block_elems);
}

qc_cuda_search_limits qc_cuda_search_limits_get(void)
{
    return (qc_cuda_search_limits){.nf4_step_count = QC_SEARCH_NF4_LATTICE,
                                   .int4_step_count = QC_SEARCH_PAIR,
                                   .refit_count = QC_SEARCH_REFIT_COUNT,
                                   .nf4_window = QC_SEARCH_NF4_WINDOW,
                                   .int8_window = QC_SEARCH_INT8_WINDOW,
                                   .nf4_wide = QC_SEARCH_NF4_WIDE,
                                   .int8_wide = QC_SEARCH_INT8_WIDE};
}
