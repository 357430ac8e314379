/* Packs weights, and unpacks them (matmul_packed.h has the layout). A thread copies 16 bytes of
 * packed codes, or the codes of four scales of a row. This happens once per weight: the order of
 * the packed side is what makes whole lines, and rows are met in pieces of 32 or 64 bytes. */
#include "kernels/matmul_packed.h"

#include "base/checked.h"
#include "kernels/ptx.cuh"

#define THREADS 256u

namespace
{

struct pack_args {
    unsigned char *rows, *packed; /* codes */
    uint8_t *row_scales, *packed_scales;
    uint64_t n;           /* rows */
    uint64_t blocks;      /* of 64 columns, in a row */
    uint64_t code_units;  /* of 16 packed bytes */
    uint64_t scale_units; /* of four scales */
};

template <bool unpack, typename T> QC_DEVICE void move(T *row, T *packed, bool there)
{
    if (unpack && there)
        *row = *packed;
    else if (!unpack)
        *packed = there ? *row : T{};
}

template <bool nf4, bool unpack> QC_DEVICE void pack_codes(const pack_args &a, uint64_t i)
{
    constexpr uint32_t block_units = QC_PACKED_BLOCK_BYTES(nf4 ? 4u : 8u) / 16;
    uint64_t block = i / block_units, band = block / a.blocks;
    uint32_t in = (uint32_t)(i % block_units), lane = in % 32, g = lane / 4, t = lane % 4;
    uint64_t n = band * QC_PACKED_ROWS + in / (block_units / 4) * QC_PACKED_UNIT + g;
    unsigned char *packed = a.packed + i * 16;
    if constexpr (nf4) {
        const uint64_t row_bytes = a.blocks * 32;
        unsigned char *row = a.rows + n * row_bytes + block % a.blocks * 32 + t * 8;
        for (uint32_t half = 0; half < 2; half++)
            move<unpack>(reinterpret_cast<uint2 *>(row + half * 8 * row_bytes),
                         reinterpret_cast<uint2 *>(packed) + half, n + half * 8 < a.n);
    } else {
        n += in / 32 % 2 * 8;
        unsigned char *row = a.rows + (n * a.blocks + block % a.blocks) * 64 + t * 16;
        move<unpack>(reinterpret_cast<uint4 *>(row), reinterpret_cast<uint4 *>(packed), n < a.n);
    }
}

template <bool unpack> QC_DEVICE void pack_scales(const pack_args &a, uint64_t i)
{
    const uint64_t fours = a.blocks / QC_PACKED_SCALES;
    uint64_t four = i / QC_PACKED_ROWS, band = four / fours;
    uint32_t in = (uint32_t)(i % QC_PACKED_ROWS); /* QC_PACKED_ROW of: */
    uint32_t row = (in & 48u) | (in >> 1 & 7u) | (in & 1u) << 3;
    uint64_t n = band * QC_PACKED_ROWS + row;
    uint8_t *codes = a.row_scales + (n * fours + four % fours) * QC_PACKED_SCALES;
    for (uint32_t e = 0; e < QC_PACKED_SCALES; e++) /* one by one: they may have any address */
        move<unpack>(codes + e, a.packed_scales + i * QC_PACKED_SCALES + e, n < a.n);
}

template <bool nf4, bool unpack>
static __global__ void __launch_bounds__(THREADS) matmul_pack(const pack_args a)
{
    const uint64_t step = (uint64_t)gridDim.x * THREADS;
    const uint64_t first = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    for (uint64_t i = first; i < a.code_units; i += step)
        pack_codes<nf4, unpack>(a, i);
    for (uint64_t i = first; i < a.scale_units; i += step)
        pack_scales<unpack>(a, i);
}

template <bool unpack>
qc_status launch(const qc_weights *w, const pack_args &sides, qc_cuda_stream s, qc_error *err)
{
    pack_args a = sides;
    a.n = w->rows;
    a.blocks = w->form.cols / QC_PACKED_COLS;
    a.code_units = qc_packed_code_bytes(w) / 16;
    a.scale_units = qc_packed_scale_bytes(w) / QC_PACKED_SCALES;
    auto kernel =
        w->form.ops->kind == QC_FORM_NF4 ? matmul_pack<true, unpack> : matmul_pack<false, unpack>;
    return qc_cuda_start("matmul_pack", kernel, dim3(qc_cuda_grid_x(a.code_units, THREADS)),
                         dim3(THREADS), 0, s, err, a);
}

} // namespace

extern "C" qc_status qc_matmul_pack_launch(const qc_weights *w, void *packed, qc_cuda_stream s,
                                           qc_error *err)
{
    pack_args a = {};
    a.rows = const_cast<unsigned char *>(static_cast<const unsigned char *>(w->codes));
    a.packed = static_cast<unsigned char *>(packed);
    a.row_scales = const_cast<uint8_t *>(w->absmax_codes);
    a.packed_scales = a.packed + qc_packed_code_bytes(w);
    return launch<false>(w, a, s, err);
}

extern "C" qc_status qc_matmul_unpack_launch(const qc_weights *w, const void *packed, void *codes,
                                             uint8_t *absmax_codes, qc_cuda_stream s, qc_error *err)
{
    pack_args a = {};
    a.rows = static_cast<unsigned char *>(codes);
    a.packed = const_cast<unsigned char *>(static_cast<const unsigned char *>(packed));
    a.row_scales = absmax_codes;
    a.packed_scales = a.packed + qc_packed_code_bytes(w);
    return launch<true>(w, a, s, err);
}
