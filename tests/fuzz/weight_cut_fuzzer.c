/* Any numbers of a weight, as the plug-in of vLLM takes them from a quant_state: a cut of it is
 * refused, or lies within the weight. */
#include "base/checked.h"
#include "formats/bnb_state.h"
#include "fuzz_check.h"
#include "quant/quant_form.h"
#include "quant/weight_slice.h"

#include <string.h>

const fuzz_limits fuzz_may_allocate = {1u << 20, 64};

static void check_cut(const qc_weights *w, const qc_weights_part *part)
{
    qc_weights_cuts cuts;
    qc_weights_read r;
    qc_error err = {0};
    const qc_status st = qc_weights_read_of(w, part, &r, &err);
    if (st != QC_OK) {
        const int code = qc_status_exit_code(st);
        FUZZ_CHECK((code == 2 || code == 3) && err.msg[0]);
        return;
    }
    const uint64_t all = w->rows * w->form.cols;
    FUZZ_CHECK(r.read.row <= part->row && r.skip == part->row - r.read.row);
    FUZZ_CHECK(r.read.row <= w->rows && r.read.rows <= w->rows - r.read.row);
    FUZZ_CHECK(r.code_bytes <= qc_form_code_bytes(&w->form, all) &&
               r.scales <= qc_max_u64(all, w->rows));
    FUZZ_CHECK(r.nested_scales <= r.scales && (r.nested_block > 0) == (r.nested_scales > 0));
    FUZZ_CHECK(w->form.block_elems == 0 || r.block_elems <= w->form.block_elems);
    qc_weights whole = *w;
    static const float plain;
    whole.absmax = w->form.nested ? NULL : &plain;
    FUZZ_CHECK(qc_weights_cuts_of(&whole, &cuts, &err) == QC_OK && cuts.rows > 0 && cuts.cols > 0);
}

/* The bytes are the numbers themselves; or a part and a quant_state, as the file has it. */
int fuzz_one(const uint8_t *data, size_t size)
{
    struct {
        uint64_t rows, cols, block, nested;
        qc_weights_part part;
    } n;
    qc_bnb_state s;
    if (size < sizeof n + 1)
        return 0;
    memcpy(&n, data + 1, sizeof n);
    const char *text = (const char *)data + 1 + sizeof n.part;
    if (qc_bnb_state_parse(&s, text, size - 1 - sizeof n.part, NULL) == QC_OK && s.ndim == 2) {
        memcpy(&n.part, data + 1, sizeof n.part);
        n.rows = s.dims[0];
        n.cols = s.dims[1];
        n.block = s.block_elems;
        n.nested = s.nested ? s.nested_block_elems : 0;
    }
    const qc_weights w = {.form = {.ops = qc_form_ops_of((qc_form_kind)(data[0] % 6)),
                                   .block_elems = (uint32_t)n.block,
                                   .cols = n.cols,
                                   .nested = data[0] / 6 % 2},
                          .rows = n.rows,
                          .nested_block = (uint32_t)n.nested};
    check_cut(&w, &n.part);
    return 0;
}
