// The instructions of Hopper's asynchronous path, each wrapped once: mbarrier, TMA, wgmma, clusters, setmaxnreg.
// PTX ISA, "mbarrier", "Asynchronous copy", "Tensor copy", "Asynchronous Warpgroup Level Matrix Instructions".
//
// Shared-memory addresses are 32-bit numbers (shared_address). A kernel that uses this file has its body between `#if
// KL_SM90A` and `#endif`. Other architectures compile an empty body, which check_hopper (tensor_map.h) refuses to
// launch.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "core/mma.cuh"

// wgmma and setmaxnreg exist on sm_90a only: neither on plain sm_90 nor on later architectures.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KL_SM90A 1
#else
#define KL_SM90A 0
#endif

namespace kl {

constexpr int WARPGROUP = 128;  // threads

// ---- matrices in shared memory -------------------------------------------------------------------------------------
//
// A tile is stored as panels: rows of 128 bytes, each panel aligned to 1024 bytes. Chunk c (16 bytes) of row r is stored at
// chunk c ^ (r % 8) of its row. This is the "128-byte swizzle", which TMA writes and wgmma reads. Every number below is a
// chunk of the matrix, drawn where it is stored. Chunk 2 of the eight rows lies in eight columns, so in different banks:
//
//   row 0    0  1 [2] 3  4  5  6  7
//   row 1    1  0  3 [2] 5  4  7  6
//   row 2   [2] 3  0  1  6  7  4  5
//   row 3    3 [2] 1  0  7  6  5  4
//   row 4    4  5  6  7  0  1 [2] 3        An atom is eight rows, 1024 bytes. The pattern repeats from atom to atom.
//   row 5    5  4  7  6  1  0  3 [2]
//   row 6    6  7  4  5 [2] 3  0  1
//   row 7    7  6  5  4  3 [2] 1  0
//
// What a row is depends on the operand. A tile of 64 × 128 elements of 16 bits takes two panels in both layouts:
//
//   Major::K: a row is one m (or n), and runs along k        Major::MN: a row is one k, and runs along m (or n)
//
//            k 0 … 63      k 64 … 127                                 m 0 … 63      m 64 … 127
//   m 0     ┌─────────┐    ┌─────────┐                        k 0    ┌─────────┐    ┌─────────┐
//     …     │ panel 0 │    │ panel 1 │                          …    │ panel 0 │    │ panel 1 │
//   m 63    └─────────┘    └─────────┘                        k 63   └─────────┘    └─────────┘
//
// A row holds 64 elements of 16 bits, 32 of tf32, 128 of float8. tf32 and float8 must be Major::K.
enum class Major { K, MN };

constexpr int SWIZZLE_ROW = 128;    // bytes
constexpr int SWIZZLE_ATOM = 1024;  // bytes: eight rows, after which the pattern repeats
/// Where the first panel may begin in dynamic shared memory, which has SWIZZLE_ATOM bytes more than the panels for this.
__device__ inline uint32_t align_to_swizzle(const void* shared) {
    return (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
}
/// Offset of chunk `chunk` (16 bytes) of row `row` in its panel.
__host__ __device__ constexpr uint32_t swizzled(uint32_t row, uint32_t chunk) {
    return row * SWIZZLE_ROW + ((chunk ^ (row % 8)) * 16);
}

/// Shared-memory matrix descriptor of a wgmma operand, in units of 16 bytes:
//
//   bits  0–13  start address
//   bits 16–29  "leading dimension byte offset". Major::K: not used with a swizzle, since the 32 bytes of k that one
//               instruction takes lie inside a row. Major::MN: from one panel of 64 m (n) to the next.
//   bits 32–45  "stride dimension byte offset", from eight rows to the next eight. Major::K: rows are m (n). Major::MN:
//               rows are k, of which one instruction takes sixteen.
//   bits 49–51  phase of the swizzle, 0 for panels that begin at multiples of 1024 bytes
//   bits 62–63  1: 128-byte swizzle
//
// PTX ISA, "Matrix Descriptor Format" and "Strides"; CUTLASS, include/cute/atom/mma_traits_sm90_gmma.hpp.
template <Major MAJOR>
__host__ __device__ constexpr uint64_t matrix_descriptor(uint32_t shared, uint32_t panel_bytes) {
    const uint64_t leading = MAJOR == Major::MN ? panel_bytes / 16 : 1;
    return uint64_t{(shared & 0x3ffff) / 16} | leading << 16 | uint64_t{SWIZZLE_ATOM / 16} << 32 | uint64_t{1} << 62;
}

/// Descriptor increment from one instruction's k to the next: 32 bytes along the row, or sixteen rows. A start inside the
/// first row is valid for all eight: the hardware applies the swizzle to the address bits that it computes.
template <Major MAJOR>
constexpr uint64_t DESCRIPTOR_STEP = MAJOR == Major::K ? 32 / 16 : 16 * SWIZZLE_ROW / 16;

// ---- mbarrier ------------------------------------------------------------------------------------------------------
//
// An mbarrier in shared memory completes a phase after `count` arrivals and all expected bytes. Waiting for parity p returns
// once the phase of that parity is complete. A new barrier is in phase 0: waiting for parity 0 blocks until that phase is
// complete. Waiting for parity 1, "the phase before the first", returns at once.
//
// A pipeline has a full and an empty barrier per stage. Producer and consumers count how often they have gone round:
//
//   producer                                       consumer
//   wait(empty[stage], phase ^ 1)                  wait(full[stage], phase)
//   arrive_expect_tx(full[stage], bytes)           … read the stage …
//   tma_load(stage, …, full[stage])                arrive(empty[stage])
//   state.advance()                                state.advance()
//
// In its first round the producer waits for parity 1 of the empty barriers, and so not at all: all stages are free.

__device__ inline void mbarrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
/// Makes initialised barriers visible to TMA and to the cluster. The threads must still be synchronised afterwards.
__device__ inline void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives at the barrier of the same address in block `rank` of the cluster. It orders accesses of TMA and wgmma only;
/// ordinary writes would need a release at cluster scope, which costs a GPU-wide fence.
__device__ inline void mbarrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
/// Arrives, and expects `bytes` from TMA in this phase.
__device__ inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/// Waits up to 10 ms and returns whether the phase is complete. The hardware's own limit is short, and each retry takes
/// issue slots.
__device__ inline bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
    constexpr uint32_t NANOSECONDS = 10'000'000;
    uint32_t done;
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2, %3;\nselp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity), "r"(NANOSECONDS)
        : "memory");
    return done != 0;
}
__device__ inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

/// Pipeline state: the current stage, and the phase parity of its barriers, which changes with every round.
template <int STAGES>
struct PipelineState {
    int stage = 0;
    uint32_t phase = 0;

    /// Initialises the barriers of all stages. One thread calls it, and mbarrier_init_fence must follow. A stage is full
    /// after `fills` arrivals and their bytes, and empty after `frees` arrivals.
    __device__ static void init(uint32_t full, uint32_t empty, uint32_t fills, uint32_t frees) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(full + s * 8, fills);
            mbarrier_init(empty + s * 8, frees);
        }
    }
    __device__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

/// Makes shared memory written by ordinary stores visible to wgmma and TMA. Each writing thread calls it before a barrier.
__device__ inline void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// The same for global memory: orders a thread's ordinary accesses before its bulk copies that follow.
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- TMA -----------------------------------------------------------------------------------------------------------
//
// One thread requests a box of a tensor (CUtensorMap, a __grid_constant__ kernel parameter). TMA writes the box, with zeros
// outside the tensor, and counts its bytes at an mbarrier. Coordinates: innermost dimension first, in elements.

__device__ inline void tma_prefetch(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

#define KL_TMA(DIMS, COORDINATES, AFTER, PARAMETERS, ...)                                                       \
    __device__ inline void tma_load(uint32_t shared, const CUtensorMap& map, uint32_t barrier, PARAMETERS) {    \
        asm volatile("cp.async.bulk.tensor." DIMS                                                               \
                     "d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {" COORDINATES           \
                     "}], [%2];" ::"r"(shared),                                                                 \
                     "l"(&map), "r"(barrier), __VA_ARGS__                                                       \
                     : "memory");                                                                               \
    }                                                                                                           \
    /* Multicast to the blocks of the cluster whose bits are set: the same address and barrier in each. */      \
    __device__ inline void tma_load_multicast(uint32_t shared, const CUtensorMap& map, uint32_t barrier,        \
                                              uint16_t blocks, PARAMETERS) {                                    \
        asm volatile(                                                                                           \
            "cp.async.bulk.tensor." DIMS                                                                        \
            "d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {" COORDINATES \
            "}], [%2], " AFTER ";" ::"r"(shared),                                                               \
            "l"(&map), "r"(barrier), __VA_ARGS__, "h"(blocks)                                                   \
            : "memory");                                                                                        \
    }
#define KL_INTS(...) __VA_ARGS__
KL_TMA("2", "%3, %4", "%5", KL_INTS(int c0, int c1), "r"(c0), "r"(c1))
KL_TMA("3", "%3, %4, %5", "%6", KL_INTS(int c0, int c1, int c2), "r"(c0), "r"(c1), "r"(c2))
KL_TMA("4", "%3, %4, %5, %6", "%7", KL_INTS(int c0, int c1, int c2, int c3), "r"(c0), "r"(c1), "r"(c2), "r"(c3))
KL_TMA("5", "%3, %4, %5, %6, %7", "%8", KL_INTS(int c0, int c1, int c2, int c3, int c4), "r"(c0), "r"(c1), "r"(c2),
       "r"(c3), "r"(c4))
#undef KL_TMA

// Shared memory → a box of a tensor; elements outside the tensor are not written. The storing thread commits and waits.
#define KL_TMA_STORE(DIMS, COORDINATES, PARAMETERS, ...)                                               \
    __device__ inline void tma_store(const CUtensorMap& map, uint32_t shared, PARAMETERS) {            \
        asm volatile("cp.async.bulk.tensor." DIMS "d.global.shared::cta.bulk_group [%0, {" COORDINATES \
                     "}], [%1];" ::"l"(&map),                                                          \
                     "r"(shared), __VA_ARGS__                                                          \
                     : "memory");                                                                      \
    }
KL_TMA_STORE("2", "%2, %3", KL_INTS(int c0, int c1), "r"(c0), "r"(c1))
KL_TMA_STORE("3", "%2, %3, %4", KL_INTS(int c0, int c1, int c2), "r"(c0), "r"(c1), "r"(c2))
KL_TMA_STORE("4", "%2, %3, %4, %5", KL_INTS(int c0, int c1, int c2, int c3), "r"(c0), "r"(c1), "r"(c2), "r"(c3))
KL_TMA_STORE("5", "%2, %3, %4, %5, %6", KL_INTS(int c0, int c1, int c2, int c3, int c4), "r"(c0), "r"(c1), "r"(c2),
             "r"(c3), "r"(c4))
#undef KL_TMA_STORE

/// The same, but adds to the tensor's elements, in its dtype. The L2 adds atomically.
__device__ inline void tma_add(const CUtensorMap& map, uint32_t shared, int c0, int c1, int c2) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
        "r"(shared), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}
#undef KL_INTS

__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until all but `PENDING` of this thread's groups have read their shared memory, which may then be overwritten.
template <int PENDING>
__device__ inline void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
/// Waits until all but `PENDING` of this thread's groups have been written to global memory.
template <int PENDING>
__device__ inline void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

/// Copies contiguous shared memory to global memory (bulk_store), or adds its float32 elements there atomically
/// (bulk_add). One thread copies a multiple of 16 bytes, commits and waits.
__device__ inline void bulk_store(float* global, uint32_t shared, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
                 : "memory");
}
__device__ inline void bulk_add(float* global, uint32_t shared, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
                 "r"(shared), "r"(bytes)
                 : "memory");
}

/// Bulk copy of contiguous global memory to shared memory, a multiple of 16 bytes. One thread calls it, and `barrier` counts
/// the bytes. EVICT_LAST: with the L2 eviction policy of evict_last(), for data that is read once.
template <bool EVICT_LAST>
__device__ inline void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    if constexpr (EVICT_LAST) {
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
            "%4;" ::"r"(shared_address(shared)),
            "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(EVICT_LAST_POLICY)
            : "memory");
    } else {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(shared)),
                     "l"(global), "r"(bytes), "r"(shared_address(barrier))
                     : "memory");
    }
}

// ---- warps, warpgroups, clusters -----------------------------------------------------------------------------------

// True in one thread of the (whole) warp.
__device__ inline bool elect_one() {
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

// The warp's number, as a value that the compiler knows to be the same in all of its threads.
__device__ inline int warp_index() { return __shfl_sync(FULL_MASK, static_cast<int>(threadIdx.x) / WARP, 0); }

// Sets the registers per thread for the rest of the kernel: `decrease` releases some, `increase` waits until it gets them.
// Every warp of the warpgroup must call it, with a multiple of 8. The kernel needs __launch_bounds__(threads, 1), and one
// branch for each role.
template <int REGISTERS>
__device__ inline void registers_decrease() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ inline void registers_increase() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

/// Named barrier (0 to 15) for `threads` of the block's threads. Number 0 is that of __syncthreads. `sync` arrives and
/// waits, `arrive` does not wait.
__device__ inline void named_barrier_sync(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ inline uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
/// Cluster barrier for all threads of all blocks: writes before the arrival are visible after the wait.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
/// Arrival without release: it orders no writes. It suffices where the barrier only tells others that they may overwrite
/// this block's shared memory, or that this block no longer accesses theirs.
__device__ inline void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ inline void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
/// A barrier that orders no writes: no block goes on, or ends, while others may still access its shared memory.
__device__ inline void cluster_sync_relaxed() {
    cluster_arrive_relaxed();
    cluster_wait();
}
/// Flag in global memory: writes before store_release are visible after load_acquire has read the flag.
__device__ inline void store_release(uint32_t* flag, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ inline void add_release(uint32_t* flag, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ inline uint32_t load_acquire(const uint32_t* flag) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

__device__ inline void store_shared8(uint32_t shared, uint32_t v0, uint32_t v1) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared), "r"(v0), "r"(v1) : "memory");
}

/// Stores four 8×8 matrices of 16-bit elements to shared memory, with the register layout of ldmatrix.
__device__ inline void stmatrix(uint32_t shared, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

// ---- wgmma ---------------------------------------------------------------------------------------------------------
//
// d[64×N] += A[64×k] · B[k×N] by one warpgroup, 32 bytes of k: 16 elements of bfloat16 and half, 8 of tf32, 32 of float8
// (e4m3). It runs asynchronously and reads shared memory through descriptors. The sequence of calls:
//
//     wgmma_fence();  Wgmma<N>::multiply<T, …>(d, a, b, accumulate); …  wgmma_commit();  …  wgmma_wait<0>();
//
// Between the fence and the wait nothing may access d or overwrite the operands.
//
// Accumulator: warp w of the warpgroup holds rows 16w … 16w + 15. Of columns 8j … 8j + 7, lane 4g + t holds:
//
//                  columns 8j + 2t, 8j + 2t + 1
//   row g          d[4j],     d[4j + 1]
//   row g + 8      d[4j + 2], d[4j + 3]
//
// Each 8×8 square is that of mma.sync (core/mma.cuh). An A from registers has the layout of mma's A, 16 rows per warp.
//
// Major::MN exists for 16-bit types only: operands of tf32 and float8 must run along k.

struct float8 {  // e4m3, which only tensor cores read
    uint8_t bits;
};

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
/// Compiler barrier for registers: no access to them moves across it.
template <typename R, int COUNT>
__device__ inline void wgmma_pin(R (&registers)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if constexpr (sizeof(R) == 4 && std::is_same_v<R, float>) {
            asm volatile("" : "+f"(registers[i])::"memory");
        } else {
            asm volatile("" : "+r"(registers[i])::"memory");
        }
    }
}

template <int N>
struct Wgmma;

// N / 2 asm placeholders, by tens, and their operands, by eights: KL_P32 is "%0, …, %31", and KL_D32(C) is C(d[0]), …,
// C(d[31]).
#define KL_P10(tens)                                                                                       \
    ", %" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens "6, %" #tens \
    "7, %" #tens "8, %" #tens "9"
#define KL_P0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9"
#define KL_P32 KL_P0 KL_P10(1) KL_P10(2) ", %30, %31"
#define KL_P40 KL_P0 KL_P10(1) KL_P10(2) KL_P10(3)
#define KL_P48 KL_P40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define KL_P64 KL_P40 KL_P10(4) KL_P10(5) ", %60, %61, %62, %63"
#define KL_P80 KL_P40 KL_P10(4) KL_P10(5) KL_P10(6) KL_P10(7)
#define KL_P88 KL_P80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define KL_P96 KL_P80 KL_P10(8) ", %90, %91, %92, %93, %94, %95"
#define KL_P128 KL_P80 KL_P10(8) KL_P10(9) KL_P10(10) KL_P10(11) ", %120, %121, %122, %123, %124, %125, %126, %127"
#define KL_D8(C, i) C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3]), C(d[i + 4]), C(d[i + 5]), C(d[i + 6]), C(d[i + 7])
#define KL_D16(C) KL_D8(C, 0), KL_D8(C, 8)
#define KL_D32(C) KL_D16(C), KL_D8(C, 16), KL_D8(C, 24)
#define KL_D40(C) KL_D32(C), KL_D8(C, 32)
#define KL_D48(C) KL_D40(C), KL_D8(C, 40)
#define KL_D64(C) KL_D48(C), KL_D8(C, 48), KL_D8(C, 56)
#define KL_D80(C) KL_D64(C), KL_D8(C, 64), KL_D8(C, 72)
#define KL_D88(C) KL_D80(C), KL_D8(C, 80)
#define KL_D96(C) KL_D88(C), KL_D8(C, 88)
#define KL_D128(C) KL_D96(C), KL_D8(C, 96), KL_D8(C, 104), KL_D8(C, 112), KL_D8(C, 120)
#define KL_UPDATED(x) "+f"(x)
#define KL_WRITTEN(x) "=f"(x)

// N outputs per row in R = N / 2 registers per thread. P0 … P6 are the placeholders of the operands that follow them:
//
//   A in shared memory   descriptors of A and B, whether to accumulate, transposing bits of A and B
//   A in registers       its four registers, the descriptor of B, whether to accumulate, B's transposing bit
#define KL_WGMMA_SHARED(N, K, TYPE, R, A, B, ACCUMULATE, BITS, ...)                              \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " ACCUMULATE                \
                 ", 0;\n"                                                                        \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k" K ".f32." TYPE "." TYPE " {" KL_P##R \
                 "}, " A ", " B ", accumulate, 1, 1" BITS ";\n}"                                 \
                 : KL_D##R(KL_UPDATED)                                                           \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))__VA_ARGS__)
#define KL_WGMMA_REGISTERS(N, K, TYPE, R, A, B, ACCUMULATE, BITS, ...)                           \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " ACCUMULATE                \
                 ", 0;\n"                                                                        \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k" K ".f32." TYPE "." TYPE " {" KL_P##R \
                 "}, {" A "}, " B ", accumulate, 1, 1" BITS ";\n}"                               \
                 : KL_D##R(KL_UPDATED)                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))__VA_ARGS__)
// A product that overwrites its outputs. An output that is read, if only by name, would keep its registers alive.
#define KL_WGMMA_FIRST(N, TYPE, R, A, B, BITS)                                                                        \
    asm volatile(                                                                                                     \
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, 0, 0;\n"                                                  \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" KL_P##R "}, " A ", " B                   \
                                                                                     ", accumulate, 1, 1" BITS ";\n}" \
        : KL_D##R(KL_WRITTEN)                                                                                         \
        : "l"(a), "l"(b)KL_BITS_AB)
#define KL_BITS_AB , "n"(A == Major::MN), "n"(B == Major::MN)
#define KL_BIT_B , "n"(B == Major::MN)

#define KL_WGMMA(N, R, P0, P1, P2, P3, P4, P5, P6)                                                                \
    template <>                                                                                                   \
    struct Wgmma<N> {                                                                                             \
        /* A and B in shared memory. */                                                                           \
        template <typename T, Major A, Major B>                                                                   \
        __device__ static void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {             \
            static_assert(sizeof(T) == 2 || (A == Major::K && B == Major::K));                                    \
            if constexpr (std::is_same_v<T, bfloat16>) {                                                          \
                KL_WGMMA_SHARED(N, "16", "bf16", R, P0, P1, P2, ", " P3 ", " P4, KL_BITS_AB);                     \
            } else if constexpr (std::is_same_v<T, half>) {                                                       \
                KL_WGMMA_SHARED(N, "16", "f16", R, P0, P1, P2, ", " P3 ", " P4, KL_BITS_AB);                      \
            } else if constexpr (std::is_same_v<T, float8>) {                                                     \
                KL_WGMMA_SHARED(N, "32", "e4m3", R, P0, P1, P2, "");                                              \
            } else {                                                                                              \
                KL_WGMMA_SHARED(N, "8", "tf32", R, P0, P1, P2, "");                                               \
            }                                                                                                     \
        }                                                                                                         \
        /* The same, d = A · B, for 16-bit types. */                                                              \
        template <typename T, Major A, Major B>                                                                   \
        __device__ static void multiply_first(float (&d)[N / 2], uint64_t a, uint64_t b) {                        \
            static_assert(sizeof(T) == 2);                                                                        \
            if constexpr (std::is_same_v<T, bfloat16>) {                                                          \
                KL_WGMMA_FIRST(N, "bf16", R, P0, P1, ", " P2 ", " P3);                                            \
            } else {                                                                                              \
                KL_WGMMA_FIRST(N, "f16", R, P0, P1, ", " P2 ", " P3);                                             \
            }                                                                                                     \
        }                                                                                                         \
        /* A in registers, B in shared memory. */                                                                 \
        template <typename T, Major B>                                                                            \
        __device__ static void multiply(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) { \
            static_assert(sizeof(T) == 2 || (sizeof(T) == 4 && B == Major::K));                                   \
            if constexpr (std::is_same_v<T, bfloat16>) {                                                          \
                KL_WGMMA_REGISTERS(N, "16", "bf16", R, P0 ", " P1 ", " P2 ", " P3, P4, P5, ", " P6, KL_BIT_B);    \
            } else if constexpr (std::is_same_v<T, half>) {                                                       \
                KL_WGMMA_REGISTERS(N, "16", "f16", R, P0 ", " P1 ", " P2 ", " P3, P4, P5, ", " P6, KL_BIT_B);     \
            } else {                                                                                              \
                KL_WGMMA_REGISTERS(N, "8", "tf32", R, P0 ", " P1 ", " P2 ", " P3, P4, P5, "");                    \
            }                                                                                                     \
        }                                                                                                         \
    }

KL_WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38");
KL_WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46");
KL_WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54");
KL_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70");
KL_WGMMA(160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86");
KL_WGMMA(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102");
KL_WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134");
}  // namespace kl
