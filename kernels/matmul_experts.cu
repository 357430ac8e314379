/* Experts (kernels/matmul_experts.h): the table of their weights, and their product with
 * mma.m8n8k4. The other products are beside their ordinary kernels.
 *
 * matmul_experts_table
 *   grid    1; entries are in the kernel's parameters, TABLE_MOST a launch, so that nothing of the
 *           host is read when the stream comes to it
 * matmul_mma884_any takes aligned weights of experts as well. */
#include "kernels/matmul_experts_tile.cuh"
#include "kernels/matmul_mma884_any.cuh"

#define TABLE_MOST 24u

namespace
{

struct table_args {
    qc_run_source w[TABLE_MOST];
    qc_run_source *to;
};
static_assert(sizeof(table_args) <= 4096, "kernels take no more");

/* A thread writes an entry. */
__global__ void matmul_experts_table(const table_args a)
{
    a.to[threadIdx.x] = a.w[threadIdx.x];
}

template <int m_tile, bool nf4>
qc_status launch(const qc_experts_call *c, qc_cuda_stream s, qc_error *err)
{
    using S = any_shape<m_tile, nf4>;
    using memory = qc_mma_memory<qc_experts_call, m_tile, typename S::shared>;
    return qc_experts_start(matmul_mma884_any<m_tile, nf4, qc_experts_call>, c, S::n_tile,
                            sizeof(memory), 1, "matmul_mma884_experts", s, err);
}

} // namespace

extern "C" qc_status qc_mma884_experts_launch(const qc_experts_call *c, qc_cuda_stream s,
                                              qc_error *err)
{
    static constexpr decltype(&launch<16, true>) starts[2][2] = {
        {launch<16, false>, launch<64, false>}, {launch<16, true>, launch<64, true>}};
    return starts[c->nf4][c->m_tile > 16](c, s, err);
}

extern "C" uint64_t qc_experts_entry_bytes(void)
{
    return sizeof(qc_run_source);
}

extern "C" qc_status qc_experts_table_launch(const qc_weights *w, uint32_t count, void *table,
                                             int *exponents, const unsigned char *codes,
                                             uint64_t row_bytes, qc_cuda_stream s, qc_error *err)
{
    for (uint32_t first = 0; first < count; first += TABLE_MOST) {
        uint32_t some = count - first < TABLE_MOST ? count - first : TABLE_MOST;
        table_args a = {};
        a.to = static_cast<qc_run_source *>(table) + first;
        for (uint32_t i = 0; i < some; i++) {
            qc_matmul_weights m = {};
            m.w = w[first + i];
            m.exponent = exponents + first + i;
            m.part.rows = m.w.rows;
            m.part.cols = m.w.form.cols;
            /* The kernel for any weights takes aligned ones as well, and goes by row_bytes. */
            m.row_bytes = row_bytes ? row_bytes : qc_form_code_bytes(&m.w.form, m.part.cols);
            if (row_bytes)
                m.w.codes = codes + (first + i) * m.w.rows * row_bytes;
            a.w[i] = qc_run_source_of(&m);
        }
        QC_TRY(qc_cuda_start("matmul_experts_table", matmul_experts_table, dim3(1), dim3(some), 0,
                             s, err, a));
    }
    return QC_OK;
}
