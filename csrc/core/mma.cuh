// The instructions of Ampere's tensor-core path, each wrapped once: cp.async, ldmatrix, mma.sync.
//
// Fragments of a warp, by lane 4g + t (g: 0 … 7, t: 0 … 3). PTX ISA, "Matrix Fragments for mma.m16n8k16" and "for
// mma.m16n8k8". Elements of 16 bits, two per register:
//
//   A (16 × 16)         k 2t, 2t + 1    k 2t + 8, 2t + 9
//     row g             a[0]            a[2]
//     row g + 8         a[1]            a[3]
//   B (16 × 8)          k 2t, 2t + 1    k 2t + 8, 2t + 9
//     column g          b0              b1
//   C, D (16 × 8)       column 2t       column 2t + 1
//     row g             d[0]            d[1]
//     row g + 8         d[2]            d[3]
//
// So a lane's d, rounded to 16 bits and packed in pairs, is a fragment of A. Attention's weights enter the second product
// without a shuffle. For tf32, with one element per register, k is t and t + 4.
#pragma once

#include "core/common.cuh"

namespace kl {

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

/// Copies 16 bytes from global to shared memory, bypassing registers. Only the first `bytes` are read; zeros fill the rest.
__device__ inline void cp_async16(uint32_t shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

/// The same for all 16 bytes or none: cheaper, because a byte count would be encoded in the low bits of the address.
/// EVICT_LAST: with the L2 eviction policy of evict_last(), for data that is read once.
template <bool EVICT_LAST = false>
__device__ inline void cp_async16_if(uint32_t shared, const void* global, bool inside) {
    if constexpr (EVICT_LAST) {
        asm volatile(
            "{\n.reg .pred outside;\nsetp.eq.b32 outside, %2, 0;\n"
            "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, outside, %3;\n}" ::"r"(shared),
            "l"(global), "r"(static_cast<int>(inside)), "l"(EVICT_LAST_POLICY)
            : "memory");
    } else {
        asm volatile(
            "{\n.reg .pred outside;\nsetp.eq.b32 outside, %2, 0;\n"
            "cp.async.cg.shared.global [%0], [%1], 16, outside;\n}" ::"r"(shared),
            "l"(global), "r"(static_cast<int>(inside))
            : "memory");
    }
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `PENDING` of this thread's groups are in flight.
template <int PENDING>
__device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/// Loads four 8×8 matrices of 16-bit elements, or 8×4 of 32-bit ones. Lane 8i + j gives the address of row j (16 bytes) of
/// matrix i. Lane 4g + t receives elements 2t and 2t + 1 (32-bit: element t) of row g of matrix i in r[i].
__device__ inline void ldmatrix(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}

/// The same with each matrix transposed: lane 4g + t receives rows 2t and 2t + 1 of column g.
__device__ inline void ldmatrix_transposed(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}

__device__ inline uint32_t load_shared(uint32_t shared) {
    uint32_t value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(shared) : "memory");
    return value;
}

__device__ inline uint4 load_shared16(uint32_t shared) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(shared)
                 : "memory");
    return v;
}
__device__ inline void store_shared16(uint32_t shared, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

/// d += a · b, 16×8 outputs, over 32 bytes of k: 16 elements of half and bfloat16, 8 of tf32. Lane 4g + t holds outputs
/// (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, half) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bfloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Rounds float32 to the nearest tf32, because mma truncates. 16-bit pairs pass unchanged.
template <typename T>
__device__ inline void round_to_operand(uint32_t (&r)[4]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (uint32_t& x : r) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(x) : "f"(__uint_as_float(x)));
    }
}

#endif

}  // namespace kl
