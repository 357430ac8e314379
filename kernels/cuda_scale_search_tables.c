/* The constants of the search for a GPU, copied from the CPU's tables. */
#include "kernels/cuda_quantize.h"
#include "quant/scale_search_internal.h"

#include <string.h>

_Static_assert(sizeof((qc_cuda_search_tables *)0)->screen == sizeof((qc_search_tables *)0)->screen,
               "one layout of the screen");
_Static_assert(sizeof((qc_cuda_search_tables *)0)->factor == sizeof qc_search_factor &&
                   sizeof((qc_cuda_search_tables *)0)->steps == sizeof qc_search_steps_of,
               "one layout of the factors");
_Static_assert(QC_SEARCH_FACTORS == 16 && QC_SEARCH_LISTS == QC_CUDA_SEARCH_LISTS &&
                   QC_SEARCH_RUN == 64 && QC_SEARCH_CANDIDATES == 16,
               "cuda_scale_search.cu is written for these");
_Static_assert(QC_SEARCH_REFIT_COUNT <= QC_CUDA_SEARCH_REFITS && QC_SEARCH_NF4_LATTICE <= 16 &&
                   QC_SEARCH_PAIR <= 16,
               "room in the tables");

void qc_cuda_search_tables_fill(qc_cuda_search_tables *out)
{
    static const float nf4_steps[] = QC_SEARCH_NF4_STEPS, int4_steps[] = QC_SEARCH_INT4_STEPS;
    static const float refits[] = QC_SEARCH_REFITS;
    memset(out, 0, sizeof *out);
    memcpy(out->screen, qc_search_tables_get()->screen, sizeof out->screen);
    memcpy(out->factor, qc_search_factor, sizeof out->factor);
    memcpy(out->nf4_steps, nf4_steps, sizeof nf4_steps);
    memcpy(out->int4_steps, int4_steps, sizeof int4_steps);
    memcpy(out->steps, qc_search_steps_of, sizeof out->steps);
    memcpy(out->refits, refits, sizeof refits);
    out->int8_target = QC_SEARCH_INT8_TARGET;
}

qc_cuda_search_limits qc_cuda_search_limits_of(const qc_cuda_quantize_job *a)
{
    const int table = qc_form_is_table(a->form.ops), refit = a->form.nested && a->refit;
    const uint32_t list =
        a->searched ? qc_search_list(a->form.ops, a->form.block_elems) : QC_SEARCH_LISTS;
    const uint32_t plain = table                    ? QC_SEARCH_NF4_LATTICE
                           : list < QC_SEARCH_LISTS ? QC_SEARCH_PAIR
                                                    : QC_SEARCH_CANDIDATES;
    const uint32_t wide = table ? QC_SEARCH_NF4_WIDE : QC_SEARCH_INT8_WIDE;
    const uint32_t window = table ? QC_SEARCH_NF4_WINDOW : QC_SEARCH_INT8_WINDOW;
    return (qc_cuda_search_limits){.refit_count = refit ? QC_SEARCH_REFIT_COUNT : 0,
                                   .tried = !a->form.nested ? plain
                                            : refit         ? wide
                                                            : window,
                                   .list = list};
}
