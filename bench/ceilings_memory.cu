/* Reads and copies as fast as memory gives, with a known number of bytes on their way.
 *
 * A thread walks over its loads in one of two orders:
 *
 *   linear     load k of thread t of T is unit k T + t of 16 bytes, so a warp reads 512 in a row.
 *              In bulk the unit is 64 bytes, and a warp reads 2048
 *   fragment   as the operand of a tensor core lies in a weight: a warp has a tile of 8 rows of
 *              4096 bytes, and lane 4 g + t reads bytes [w t, w t + w) of every 4 w of row g,
 *              where w is 8 or 16
 *
 * `unroll` loads are on their way all the time: load k + unroll is started when load k has been
 * used. After a pass over the bytes the blocks change places, so that no multiprocessor meets again
 * what its own L1 may hold. The last `unroll` loads begin a pass that is not counted.
 *
 * A load on its way takes 4 registers, and about 20 are needed besides. In a ring and in bulk it
 * takes shared memory instead. */
#include "bench/ceilings_ptx.cuh"

namespace
{
constexpr unsigned THREADS = QC_CEILING_MEMORY_THREADS;
constexpr unsigned WARPS = THREADS / 32;
constexpr unsigned ROW_BYTES = QC_CEILING_ROW_BYTES;
constexpr unsigned TILE_BYTES = 8 * ROW_BYTES;
/* From pass to pass, blocks move by this many places. */
constexpr unsigned TURN = 37;

/* How many bytes a lane gets by one load. */
constexpr unsigned lane_bytes(int access)
{
    return access == QC_CEILING_BULK                                               ? 64
           : access == QC_CEILING_FRAGMENT_8 || access == QC_CEILING_FRAGMENT_8_L2 ? 8
                                                                                   : 16;
}

constexpr bool is_fragment(int access)
{
    return access == QC_CEILING_FRAGMENT_16 || lane_bytes(access) == 8;
}

template <unsigned width> struct linear_walk {
    uint64_t at, step;
    unsigned block, count, i;

    __device__ __forceinline__ void begin()
    {
        at = ((uint64_t)block * THREADS + threadIdx.x) * width;
        i = 0;
    }
    /* `count` is the number of loads in a pass. */
    __device__ __forceinline__ linear_walk(unsigned count_)
        : step((uint64_t)gridDim.x * THREADS * width), block(blockIdx.x), count(count_)
    {
        begin();
    }
    __device__ __forceinline__ uint64_t next()
    {
        uint64_t here = at;
        at += step;
        if (++i == count) {
            block = (block + TURN) % gridDim.x;
            begin();
        }
        return here;
    }
};

template <unsigned width> struct fragment_walk {
    static constexpr unsigned LOADS = ROW_BYTES / (4 * width); /* loads of a tile */
    uint64_t at, tile_step;
    unsigned block, tiles, tile, i;

    __device__ __forceinline__ void begin()
    {
        unsigned lane = threadIdx.x % 32;
        at = ((uint64_t)block * WARPS + threadIdx.x / 32) * TILE_BYTES + lane / 4 * ROW_BYTES +
             lane % 4 * width;
        tile = 0;
        i = 0;
    }
    __device__ __forceinline__ fragment_walk(unsigned count)
        : tile_step((uint64_t)gridDim.x * WARPS * TILE_BYTES - ROW_BYTES), block(blockIdx.x),
          tiles(count / LOADS)
    {
        begin();
    }
    __device__ __forceinline__ uint64_t next()
    {
        uint64_t here = at;
        at += 4 * width;
        if (++i == LOADS) {
            i = 0;
            at += tile_step;
            if (++tile == tiles) {
                block = (block + TURN) % gridDim.x;
                begin();
            }
        }
        return here;
    }
};

template <int access> struct walk_of {
    using type = linear_walk<16>;
};
template <> struct walk_of<QC_CEILING_FRAGMENT_16> {
    using type = fragment_walk<16>;
};
template <> struct walk_of<QC_CEILING_FRAGMENT_8> {
    using type = fragment_walk<8>;
};
template <> struct walk_of<QC_CEILING_FRAGMENT_8_L2> {
    using type = fragment_walk<8>;
};

QC_DEVICE void add(uint32_t &sum, uint4 v)
{
    sum ^= v.x ^ v.y;
    sum ^= v.z ^ v.w;
}

QC_DEVICE void add(uint32_t &sum, uint2 v)
{
    sum ^= v.x ^ v.y;
}

template <int access> struct loader {
    using value = uint4;
    static __device__ __forceinline__ uint4 load(const unsigned char *p)
    {
        return qc_ld_stream_16(p);
    }
};
template <> struct loader<QC_CEILING_FRAGMENT_8> {
    using value = uint2;
    static __device__ __forceinline__ uint2 load(const unsigned char *p)
    {
        return qc_ceiling_load_8<false>(p);
    }
};
template <> struct loader<QC_CEILING_FRAGMENT_8_L2> {
    using value = uint2;
    static __device__ __forceinline__ uint2 load(const unsigned char *p)
    {
        return qc_ceiling_load_8<true>(p);
    }
};

/* `count` is a thread's loads in one pass, and `total` those in all passes. Both are multiples of
 * unroll. */
template <int access, int unroll>
__global__ void __launch_bounds__(THREADS, 8)
    read_ahead(const unsigned char *in, unsigned count, unsigned total, uint32_t *sums)
{
    typename walk_of<access>::type walk(count);
    typename loader<access>::value v[unroll];
    uint32_t sum = 0;
#pragma unroll
    for (int j = 0; j < unroll; j++)
        v[j] = loader<access>::load(in + walk.next());
#pragma unroll 1
    for (unsigned k = 0; k < total; k += unroll) {
#pragma unroll
        for (int j = 0; j < unroll; j++) {
            add(sum, v[j]);
            v[j] = loader<access>::load(in + walk.next());
        }
    }
    sums[blockIdx.x * THREADS + threadIdx.x] = sum;
}

template <int unroll>
__global__ void __launch_bounds__(THREADS, 8)
    copy_ahead(const unsigned char *in, unsigned count, unsigned total, unsigned char *out,
               uint32_t *sums)
{
    linear_walk<16> from(count), to(count);
    uint4 v[unroll];
#pragma unroll
    for (int j = 0; j < unroll; j++)
        v[j] = qc_ld_stream_16(in + from.next());
#pragma unroll 1
    for (unsigned k = 0; k < total; k += unroll) {
#pragma unroll
        for (int j = 0; j < unroll; j++) {
            *reinterpret_cast<uint4 *>(out + to.next()) = v[j];
            v[j] = qc_ld_stream_16(in + from.next());
        }
    }
    sums[blockIdx.x * THREADS + threadIdx.x] = 0;
}

template <int unroll> struct ring_room {
    uint4 slot[unroll][THREADS];
};

/* Every thread waits for its own copies only, so no barrier is needed. */
template <int unroll>
__global__ void __launch_bounds__(THREADS, 8)
    read_ring(const unsigned char *in, unsigned count, unsigned total, uint32_t *sums)
{
    QC_SHARED(ring_room<unroll>, room);
    linear_walk<16> walk(count);
    uint32_t sum = 0;
#pragma unroll
    for (int j = 0; j < unroll; j++) {
        qc_cp_async_16(&room.slot[j][threadIdx.x], in + walk.next(), 16);
        qc_cp_async_commit();
    }
#pragma unroll 1
    for (unsigned k = 0; k < total; k += unroll) {
#pragma unroll
        for (int j = 0; j < unroll; j++) {
            qc_cp_async_wait<unroll - 1>();
            add(sum, room.slot[j][threadIdx.x]);
            qc_cp_async_16(&room.slot[j][threadIdx.x], in + walk.next(), 16);
            qc_cp_async_commit();
        }
    }
    qc_cp_async_wait<0>();
    sums[blockIdx.x * THREADS + threadIdx.x] = sum;
}

constexpr unsigned CHUNK_BYTES = 32 * 64; /* what a warp copies in bulk */

template <int unroll> struct bulk_room {
    uint4 slot[WARPS][unroll][CHUNK_BYTES / 16];
    uint64_t arrived[WARPS][unroll];
};

/* Every warp has a ring of its own. Its lane 0 asks for chunks, and all lanes wait for them. */
template <int unroll>
__global__ void __launch_bounds__(THREADS)
    read_bulk(const unsigned char *in, unsigned count, unsigned total, uint32_t *sums)
{
    QC_SHARED(bulk_room<unroll>, room);
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    linear_walk<64> walk(count); /* lane 0's places are where chunks begin */
    uint4(*slot)[CHUNK_BYTES / 16] = room.slot[warp];
    uint64_t *arrived = room.arrived[warp];
    uint32_t sum = 0;
    if (lane == 0) {
#pragma unroll
        for (int j = 0; j < unroll; j++) {
            qc_ceiling_bulk_begin(&arrived[j]);
            qc_ceiling_bulk_copy(slot[j], in + walk.next(), CHUNK_BYTES, &arrived[j]);
        }
    }
    __syncwarp();
    unsigned parity = 0;
#pragma unroll 1
    for (unsigned k = 0; k < total; k += unroll) {
#pragma unroll
        for (int j = 0; j < unroll; j++) {
            qc_ceiling_bulk_wait(&arrived[j], parity);
#pragma unroll
            for (unsigned i = 0; i < CHUNK_BYTES / 512; i++)
                add(sum, slot[j][i * 32 + lane]);
            __syncwarp();
            if (lane == 0)
                qc_ceiling_bulk_copy(slot[j], in + walk.next(), CHUNK_BYTES, &arrived[j]);
        }
        parity ^= 1;
    }
    /* Nothing may arrive after the block has ended. */
#pragma unroll
    for (int j = 0; j < unroll; j++)
        qc_ceiling_bulk_wait(&arrived[j], parity);
    sums[blockIdx.x * THREADS + threadIdx.x] = sum;
}

__global__ void __launch_bounds__(256) fill_words(uint32_t *words, uint64_t count)
{
    for (uint64_t i = (uint64_t)blockIdx.x * 256 + threadIdx.x; i < count;
         i += (uint64_t)gridDim.x * 256)
        words[i] = qc_ceiling_hash((uint32_t)i);
}

/* ---- host ------------------------------------------------------------------------------------ */

const char WHAT[] = "ceilings_memory";

/* The run that is asked for, with the number of loads. */
struct launch {
    const qc_ceiling_memory *m;
    unsigned count, total;
    qc_cuda_stream stream;
    unsigned *fits; /* if set, only tell how many blocks fit */
    qc_error *err;

    template <typename Kernel, typename... More>
    qc_status go(Kernel *kernel, size_t shared_bytes, More... more) const
    {
        if (fits)
            return qc_ceiling_room(fits, kernel, THREADS, shared_bytes, WHAT, err);
        QC_TRY(qc_cuda_allow_shared(kernel, shared_bytes, WHAT, err));
        const unsigned char *in = static_cast<const unsigned char *>(m->in);
        QC_LAUNCH(kernel, m->blocks, THREADS, shared_bytes, stream, in, count, total, more...);
        return qc_cuda_launched(WHAT, err);
    }

    template <int unroll> qc_status access() const
    {
        switch (m->access) {
        case QC_CEILING_COPY:
            return go(copy_ahead<unroll>, 0, static_cast<unsigned char *>(m->copy), m->sums);
        case QC_CEILING_READ:
            return go(read_ahead<QC_CEILING_READ, unroll>, 0, m->sums);
        case QC_CEILING_RING:
            return go(read_ring<unroll>, sizeof(ring_room<unroll>), m->sums);
        case QC_CEILING_FRAGMENT_16:
            return go(read_ahead<QC_CEILING_FRAGMENT_16, unroll>, 0, m->sums);
        case QC_CEILING_FRAGMENT_8:
            return go(read_ahead<QC_CEILING_FRAGMENT_8, unroll>, 0, m->sums);
        case QC_CEILING_FRAGMENT_8_L2:
            return go(read_ahead<QC_CEILING_FRAGMENT_8_L2, unroll>, 0, m->sums);
        case QC_CEILING_BULK:
            return go(read_bulk<unroll>, sizeof(bulk_room<unroll>), m->sums);
        case QC_CEILING_ACCESS_COUNT:
            break;
        }
        return qc_error_set(err, QC_ERR_USAGE, __FILE__, __LINE__, "no such access");
    }

    qc_status any() const
    {
        switch (m->unroll) {
        case 1:
            return access<1>();
        case 2:
            return access<2>();
        case 4:
            return access<4>();
        case 8:
            return access<8>();
        default:
            return qc_error_set(err, QC_ERR_USAGE, __FILE__, __LINE__,
                                "1, 2, 4 or 8 loads under way, not %u", m->unroll);
        }
    }
};

/* The loads of a thread in one pass. */
uint64_t loads(const qc_ceiling_memory *m)
{
    uint64_t lane = lane_bytes(m->access);
    uint64_t whole = is_fragment(m->access) ? ROW_BYTES / (4 * lane) : m->unroll;
    uint64_t all = m->bytes / ((uint64_t)m->blocks * THREADS * lane);
    return all / whole * whole;
}
} // namespace

extern "C" const char *qc_ceiling_access_name(qc_ceiling_access a)
{
    static const char *const names[] = {
        "copy", "read", "ring", "fragment 16", "fragment 8", "fragment 8 L2 128", "bulk"};
    return names[a];
}

extern "C" unsigned qc_ceiling_access_sm(qc_ceiling_access a)
{
    if (a == QC_CEILING_BULK) {
#if defined(QC_CUDA_SHIM) || __CUDACC_VER_MAJOR__ >= 12
        return 90;
#else
        return QC_CEILING_ANY + 1;
#endif
    }
    return a == QC_CEILING_RING || a == QC_CEILING_FRAGMENT_8_L2 ? 80 : 70;
}

extern "C" unsigned qc_ceiling_access_bytes(qc_ceiling_access a)
{
    return lane_bytes(a);
}

extern "C" uint64_t qc_ceiling_memory_bytes(const qc_ceiling_memory *m)
{
    return loads(m) * m->blocks * THREADS * lane_bytes(m->access);
}

extern "C" qc_status qc_ceiling_memory_fits(unsigned *blocks, qc_ceiling_access a, unsigned unroll,
                                            qc_error *err)
{
    qc_ceiling_memory m = {};
    m.access = a;
    m.unroll = unroll;
    launch l = {&m, 0, 0, nullptr, blocks, err};
    return l.any();
}

extern "C" qc_status qc_ceiling_memory_run(const qc_ceiling_memory *m, qc_cuda_stream s,
                                           qc_error *err)
{
    uint64_t count = loads(m), total = count * m->passes;
    if (!count || total > UINT32_MAX - 8)
        return qc_error_set(err, QC_ERR_USAGE, __FILE__, __LINE__,
                            "%llu loads per thread: too few, or too many",
                            (unsigned long long)total);
    launch l = {m, (unsigned)count, (unsigned)total, s, nullptr, err};
    return l.any();
}

extern "C" qc_status qc_ceiling_fill(uint32_t *words, uint64_t bytes, qc_cuda_stream s,
                                     qc_error *err)
{
    uint64_t count = bytes / 4, blocks = (count + 255) / 256;
    QC_LAUNCH(fill_words, (unsigned)(blocks < 4096 ? blocks : 4096), 256, 0, s, words, count);
    return qc_cuda_launched(WHAT, err);
}
