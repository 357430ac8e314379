/* The words of the CUDA language on the CPU shim: what nvcc knows by itself. Included by
 * kernels/cuda_launch.cuh under QC_CUDA_SHIM; shim_internal.h has the design. */
#ifndef QC_SHIM_LAUNCH_H
#define QC_SHIM_LAUNCH_H

#include <shim_thread.h>

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <type_traits>

#define QC_ARCH 90

#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

/* ---- vector types ---------------------------------------------------------------------------- */

#define QC_SHIM_VECTOR(name, type, align2, align4)                                                 \
    struct name##1                                                                                 \
    {                                                                                              \
        type x;                                                                                    \
    };                                                                                             \
    struct __align__(align2) name##2                                                               \
    {                                                                                              \
        type x, y;                                                                                 \
    };                                                                                             \
    struct name##3                                                                                 \
    {                                                                                              \
        type x, y, z;                                                                              \
    };                                                                                             \
    struct __align__(align4) name##4                                                               \
    {                                                                                              \
        type x, y, z, w;                                                                           \
    };                                                                                             \
    static inline name##1 make_##name##1(type x)                                                   \
    {                                                                                              \
        return name##1 {x};                                                                        \
    }                                                                                              \
    static inline name##2 make_##name##2(type x, type y)                                           \
    {                                                                                              \
        return name##2 {x, y};                                                                     \
    }                                                                                              \
    static inline name##3 make_##name##3(type x, type y, type z)                                   \
    {                                                                                              \
        return name##3 {x, y, z};                                                                  \
    }                                                                                              \
    static inline name##4 make_##name##4(type x, type y, type z, type w)                           \
    {                                                                                              \
        return name##4 {x, y, z, w};                                                               \
    }
QC_SHIM_VECTOR(char, signed char, 2, 4)
QC_SHIM_VECTOR(uchar, unsigned char, 2, 4)
QC_SHIM_VECTOR(short, short, 4, 8)
QC_SHIM_VECTOR(ushort, unsigned short, 4, 8)
QC_SHIM_VECTOR(int, int, 8, 16)
QC_SHIM_VECTOR(uint, unsigned, 8, 16)
QC_SHIM_VECTOR(longlong, long long, 16, 16)
QC_SHIM_VECTOR(ulonglong, unsigned long long, 16, 16)
QC_SHIM_VECTOR(float, float, 8, 16)
QC_SHIM_VECTOR(double, double, 16, 16)
#undef QC_SHIM_VECTOR

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_)
    {
    }
};

/* ---- the thread and its block ---------------------------------------------------------------- */

#define threadIdx (qc_shim_self->thread)
#define blockIdx  (qc_shim_self->block)
#define blockDim  (qc_shim_self->block_dim)
#define gridDim   (qc_shim_self->grid_dim)
static constexpr int warpSize = 32;

#define QC_SHARED(type, name)                                                                      \
    type &name = *static_cast<type *>(qc_shim_shared(sizeof(type), alignof(type)))

#define __syncthreads() ((void)qc_shim_syncthreads(__FILE__, __LINE__, QC_SHIM_COUNT, 0))
#define __syncthreads_count(predicate)                                                             \
    qc_shim_syncthreads(__FILE__, __LINE__, QC_SHIM_COUNT, (predicate) != 0)
#define __syncthreads_and(predicate)                                                               \
    qc_shim_syncthreads(__FILE__, __LINE__, QC_SHIM_AND, (predicate) != 0)
#define __syncthreads_or(predicate)                                                                \
    qc_shim_syncthreads(__FILE__, __LINE__, QC_SHIM_OR, (predicate) != 0)

static inline void __threadfence_block(void)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static inline void __threadfence(void)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static inline void __threadfence_system(void)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static inline void __trap(void)
{
    qc_shim_fault("__trap");
}

/* ---- launches -------------------------------------------------------------------------------- */

#define QC_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                  \
    qc_shim::launch(#kernel, (kernel), dim3(grid), dim3(block), (shared_bytes), (stream), 0,       \
                    __VA_ARGS__)

#define QC_GRID_MOST      (qc_shim_grid_most())
#define QC_GRID_ROWS_MOST (qc_shim_grid_most() < 65535u ? qc_shim_grid_most() : 65535u)

namespace qc_shim
{
template <typename T> struct as_is {
    using type = T;
};

template <typename T> static inline void check_argument(const char *name, unsigned index, T v)
{
    if constexpr (std::is_pointer_v<T>)
        qc_shim_check_argument(name, index, static_cast<const void *>(v));
    else
        (void)name, (void)index, (void)v;
}

template <typename Stream, typename... P>
static inline void launch(const char *name, void (*kernel)(P...), dim3 grid, dim3 block,
                          size_t shared_bytes, Stream stream, int overlaps,
                          typename as_is<P>::type... arguments)
{
    auto body = [=]() { kernel(arguments...); };
    static_assert(std::is_trivially_copyable_v<decltype(body)>,
                  "arguments of kernels are copied as bytes");
    unsigned index = 0;
    (check_argument(name, index++, arguments), ...);
    const unsigned g[3] = {grid.x, grid.y, grid.z}, b[3] = {block.x, block.y, block.z};
    qc_shim_launch(
        name, reinterpret_cast<const void *>(kernel), g, b, shared_bytes, stream, overlaps,
        [](const void *closure) { (*static_cast<const decltype(body) *>(closure))(); }, &body,
        sizeof(body));
}

/* ---- warp collectives ------------------------------------------------------------------------ */

/* What a lane does with the arguments of all is no access of that lane's own: only __syncwarp and
 * the barriers order memory for the thread sanitizer. */
#define QC_SHIM_UNSEEN __attribute__((no_sanitize("thread")))

struct shuffle {
    uint64_t value;
    unsigned source; /* lane; 32: own value */
};

QC_SHIM_UNSEEN static inline void shuffle_compute(void *const *args, unsigned mask)
{
    uint64_t out[32] = {};
    for (unsigned lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1))
            continue;
        unsigned from = static_cast<shuffle *>(args[lane])->source;
        if (from >= 32)
            from = lane;
        /* A lane outside of the mask: undefined, so ones. */
        out[lane] = mask >> from & 1 ? static_cast<shuffle *>(args[from])->value : ~UINT64_C(0);
    }
    for (unsigned lane = 0; lane < 32; lane++)
        if (mask >> lane & 1)
            static_cast<shuffle *>(args[lane])->value = out[lane];
}

template <typename T>
static inline T shuffle_from(const char *kind, unsigned mask, T value, unsigned source)
{
    static_assert(sizeof(T) <= 8 && std::is_arithmetic_v<T>, "shuffles move numbers");
    shuffle s = {0, source};
    memcpy(&s.value, &value, sizeof(T));
    qc_shim_collect(kind, mask, &s, shuffle_compute);
    memcpy(&value, &s.value, sizeof(T));
    return value;
}

struct vote {
    unsigned value;
};

QC_SHIM_UNSEEN static inline void ballot_compute(void *const *args, unsigned mask)
{
    unsigned all = 0;
    for (unsigned lane = 0; lane < 32; lane++)
        if (mask >> lane & 1 && static_cast<vote *>(args[lane])->value)
            all |= 1u << lane;
    for (unsigned lane = 0; lane < 32; lane++)
        if (mask >> lane & 1)
            static_cast<vote *>(args[lane])->value = all;
}

static inline unsigned ballot(const char *kind, unsigned mask, bool predicate)
{
    vote v = {predicate};
    qc_shim_collect(kind, mask, &v, ballot_compute);
    return v.value;
}

static inline void nothing(void *const *args, unsigned mask)
{
    (void)args, (void)mask;
}

template <typename T, typename F> static inline T atomic(T *p, F next)
{
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(p, &old, next(old), false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
    return old;
}
} // namespace qc_shim

static inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    qc_shim_collect("__syncwarp", mask, nullptr, qc_shim::nothing);
}

template <typename T> static inline T __shfl_sync(unsigned mask, T value, int from, int width = 32)
{
    unsigned lane = qc_shim_self->lane, w = (unsigned)width;
    return qc_shim::shuffle_from("__shfl_sync", mask, value,
                                 (lane & ~(w - 1)) | ((unsigned)from & (w - 1)));
}
template <typename T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32)
{
    unsigned lane = qc_shim_self->lane, first = lane & ~((unsigned)width - 1);
    return qc_shim::shuffle_from("__shfl_up_sync", mask, value,
                                 lane - first >= by ? lane - by : 32);
}
template <typename T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32)
{
    unsigned lane = qc_shim_self->lane, last = lane | ((unsigned)width - 1);
    return qc_shim::shuffle_from("__shfl_down_sync", mask, value,
                                 by <= last - lane ? lane + by : 32);
}
template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32)
{
    unsigned lane = qc_shim_self->lane, last = lane | ((unsigned)width - 1);
    unsigned from = lane ^ (unsigned)with;
    return qc_shim::shuffle_from("__shfl_xor_sync", mask, value, from <= last ? from : 32);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    return qc_shim::ballot("__ballot_sync", mask, predicate != 0);
}
static inline int __any_sync(unsigned mask, int predicate)
{
    return qc_shim::ballot("__any_sync", mask, predicate != 0) != 0;
}
static inline int __all_sync(unsigned mask, int predicate)
{
    return qc_shim::ballot("__all_sync", mask, predicate != 0) == mask;
}

/* ---- atomics --------------------------------------------------------------------------------- */

#define QC_SHIM_ATOMICS(type)                                                                      \
    static inline type atomicAdd(type *p, type v)                                                  \
    {                                                                                              \
        return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);                                         \
    }                                                                                              \
    static inline type atomicMin(type *p, type v)                                                  \
    {                                                                                              \
        return qc_shim::atomic(p, [=](type old) { return v < old ? v : old; });                    \
    }                                                                                              \
    static inline type atomicMax(type *p, type v)                                                  \
    {                                                                                              \
        return qc_shim::atomic(p, [=](type old) { return v > old ? v : old; });                    \
    }                                                                                              \
    static inline type atomicAnd(type *p, type v)                                                  \
    {                                                                                              \
        return __atomic_fetch_and(p, v, __ATOMIC_RELAXED);                                         \
    }                                                                                              \
    static inline type atomicOr(type *p, type v)                                                   \
    {                                                                                              \
        return __atomic_fetch_or(p, v, __ATOMIC_RELAXED);                                          \
    }                                                                                              \
    static inline type atomicXor(type *p, type v)                                                  \
    {                                                                                              \
        return __atomic_fetch_xor(p, v, __ATOMIC_RELAXED);                                         \
    }                                                                                              \
    static inline type atomicExch(type *p, type v)                                                 \
    {                                                                                              \
        return __atomic_exchange_n(p, v, __ATOMIC_RELAXED);                                        \
    }                                                                                              \
    static inline type atomicCAS(type *p, type expected, type v)                                   \
    {                                                                                              \
        __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);   \
        return expected;                                                                           \
    }
QC_SHIM_ATOMICS(int)
QC_SHIM_ATOMICS(unsigned)
QC_SHIM_ATOMICS(unsigned long long)
#undef QC_SHIM_ATOMICS

static inline unsigned atomicInc(unsigned *p, unsigned last)
{
    return qc_shim::atomic(p, [=](unsigned old) { return old >= last ? 0 : old + 1; });
}
static inline float atomicAdd(float *p, float v)
{
    unsigned *bits = reinterpret_cast<unsigned *>(p);
    unsigned old = qc_shim::atomic(bits, [=](unsigned u) {
        float f;
        memcpy(&f, &u, 4);
        f += v;
        memcpy(&u, &f, 4);
        return u;
    });
    float f;
    memcpy(&f, &old, 4);
    return f;
}

/* ---- intrinsics ------------------------------------------------------------------------------ */

#define QC_SHIM_BITS(name, to, from)                                                               \
    static inline to name(from v)                                                                  \
    {                                                                                              \
        to r;                                                                                      \
        memcpy(&r, &v, sizeof(r));                                                                 \
        return r;                                                                                  \
    }
QC_SHIM_BITS(__float_as_uint, unsigned, float)
QC_SHIM_BITS(__uint_as_float, float, unsigned)
QC_SHIM_BITS(__float_as_int, int, float)
QC_SHIM_BITS(__int_as_float, float, int)
QC_SHIM_BITS(__double_as_longlong, long long, double)
QC_SHIM_BITS(__longlong_as_double, double, long long)
#undef QC_SHIM_BITS

/* Built with -ffp-contract=off: what stands there is what is done. */
static inline float __fadd_rn(float a, float b)
{
    return a + b;
}
static inline float __fsub_rn(float a, float b)
{
    return a - b;
}
static inline float __fmul_rn(float a, float b)
{
    return a * b;
}
static inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}
static inline float __fdiv_rn(float a, float b)
{
    return a / b;
}
static inline float __frcp_rn(float a)
{
    return 1.0f / a;
}
static inline float __fsqrt_rn(float a)
{
    return sqrtf(a);
}
static inline double __dadd_rn(double a, double b)
{
    return a + b;
}
static inline double __dsub_rn(double a, double b)
{
    return a - b;
}
static inline double __dmul_rn(double a, double b)
{
    return a * b;
}
static inline double __fma_rn(double a, double b, double c)
{
    return fma(a, b, c);
}
static inline double __ddiv_rn(double a, double b)
{
    return a / b;
}
static inline float __int2float_rn(int v)
{
    return (float)v;
}
static inline float __uint2float_rn(unsigned v)
{
    return (float)v;
}
static inline float __double2float_rn(double v)
{
    return (float)v;
}
/* Out of range is clamped and NaN is 0, as cvt does. */
static inline int __float2int_rn(float v)
{
    return v != v ? 0 : v >= 0x1p31f ? INT32_MAX : v < -0x1p31f ? INT32_MIN : (int)rintf(v);
}
static inline int __float2int_rz(float v)
{
    return v != v ? 0 : v >= 0x1p31f ? INT32_MAX : v < -0x1p31f ? INT32_MIN : (int)v;
}
static inline unsigned __float2uint_rn(float v)
{
    return v != v || v <= 0.0f ? 0 : v >= 0x1p32f ? UINT32_MAX : (unsigned)rintf(v);
}
static inline unsigned __float2uint_rz(float v)
{
    return v != v || v <= 0.0f ? 0 : v >= 0x1p32f ? UINT32_MAX : (unsigned)v;
}

static inline int __popc(unsigned v)
{
    return __builtin_popcount(v);
}
static inline int __popcll(unsigned long long v)
{
    return __builtin_popcountll(v);
}
static inline int __ffs(int v)
{
    return __builtin_ffs(v);
}
static inline int __ffsll(long long v)
{
    return __builtin_ffsll(v);
}
static inline int __clz(int v)
{
    return v ? __builtin_clz((unsigned)v) : 32;
}
static inline int __clzll(long long v)
{
    return v ? __builtin_clzll((unsigned long long)v) : 64;
}
static inline unsigned __umulhi(unsigned a, unsigned b)
{
    return (unsigned)((uint64_t)a * b >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector)
{
    uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned out = 0;
    for (unsigned i = 0; i < 4; i++) {
        unsigned s = selector >> 4 * i, byte = (unsigned)(bytes >> 8 * (s & 7)) & 0xff;
        out |= (s & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
    }
    return out;
}
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned by)
{
    return (unsigned)(((uint64_t)hi << 32 | lo) << (by & 31) >> 32);
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned by)
{
    return (unsigned)(((uint64_t)hi << 32 | lo) >> (by & 31));
}
static inline unsigned __funnelshift_lc(unsigned lo, unsigned hi, unsigned by)
{
    return by >= 32 ? lo : __funnelshift_l(lo, hi, by);
}
static inline unsigned __funnelshift_rc(unsigned lo, unsigned hi, unsigned by)
{
    return by >= 32 ? hi : __funnelshift_r(lo, hi, by);
}

template <typename T> static inline T __ldg(const T *p)
{
    return *p;
}
template <typename T> static inline T __ldcg(const T *p)
{
    return *p;
}
template <typename T> static inline T __ldcs(const T *p)
{
    return *p;
}
template <typename T> static inline void __stcg(T *p, T v)
{
    *p = v;
}
template <typename T> static inline void __stcs(T *p, T v)
{
    *p = v;
}

#define QC_SHIM_MIN_MAX(type, a_type, b_type)                                                      \
    static inline type min(a_type a, b_type b)                                                     \
    {                                                                                              \
        return (type)a < (type)b ? (type)a : (type)b;                                              \
    }                                                                                              \
    static inline type max(a_type a, b_type b)                                                     \
    {                                                                                              \
        return (type)a > (type)b ? (type)a : (type)b;                                              \
    }
QC_SHIM_MIN_MAX(int, int, int)
QC_SHIM_MIN_MAX(unsigned, unsigned, unsigned)
QC_SHIM_MIN_MAX(unsigned, int, unsigned)
QC_SHIM_MIN_MAX(unsigned, unsigned, int)
QC_SHIM_MIN_MAX(long, long, long)
QC_SHIM_MIN_MAX(unsigned long, unsigned long, unsigned long)
QC_SHIM_MIN_MAX(long long, long long, long long)
QC_SHIM_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
#undef QC_SHIM_MIN_MAX
static inline float min(float a, float b)
{
    return fminf(a, b);
}
static inline float max(float a, float b)
{
    return fmaxf(a, b);
}
static inline double min(double a, double b)
{
    return fmin(a, b);
}
static inline double max(double a, double b)
{
    return fmax(a, b);
}

#endif
