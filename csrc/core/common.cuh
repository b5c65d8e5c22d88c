// What every kernel shares: types, checks, 16-byte vectors, reductions. core/layout.h describes strided operands.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/layout.h"
#include "core/tensor.h"

namespace kl {

using half = __half;
using bfloat16 = __nv_bfloat16;

// ---- host: checks, launch -------------------------------------------------------------------------------------------

#define KL_CUDA_CHECK(call)                                                                            \
    do {                                                                                               \
        const cudaError_t error_ = (call);                                                             \
        KL_CHECK(error_ == cudaSuccess, "CUDA error in ", __func__, ": ", cudaGetErrorString(error_)); \
    } while (0)

#define KL_LAUNCH_CHECK() KL_CUDA_CHECK(cudaGetLastError())

inline int device_attribute(cudaDeviceAttr attribute, int32_t device) {
    int value = 0;
    KL_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
    return value;
}

inline int multiprocessors(int32_t device) { return device_attribute(cudaDevAttrMultiProcessorCount, device); }

/// Shared memory that one block may request, dynamic and static together.
inline int shared_limit(int32_t device) { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device); }

/// Architecture that a kernel was compiled for: 90 for sm_90 and for compute_90. Code that the driver translates from
/// compute_80 returns 80 on any GPU. `device` must be the current device. Queried once per device, because all kernels of
/// the extension are compiled for the same architectures.
template <typename Kernel>
int code_version(Kernel* kernel, int32_t device) {
    constexpr int DEVICES = 64;
    static std::atomic<int> known[DEVICES]{};
    if (device < DEVICES) {
        if (const int version = known[device].load(std::memory_order_relaxed)) return version;
    }
    cudaFuncAttributes attributes{};
    KL_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    const int version = std::min(attributes.ptxVersion, attributes.binaryVersion);
    if (device < DEVICES) known[device].store(version, std::memory_order_relaxed);
    return version;
}

/// Whether a kernel's code has Hopper's thread-block clusters and programmatic dependent launch. Code of an older
/// architecture, which newer GPUs run as well, is compiled without them.
template <typename Kernel>
bool has_hopper_code(Kernel* kernel, int32_t device) {
    return code_version(kernel, device) >= 90;
}

inline void check_cuda(const Tensor& tensor, const char* op, const char* name) {
    KL_CHECK(tensor.is_cuda(), op, ": argument `", name, "` must be a CUDA tensor");
}

inline void check_like(const Tensor& tensor, const Tensor& other, const char* op, const char* name) {
    check_cuda(tensor, op, name);
    KL_CHECK(tensor.scalar_type() == other.scalar_type(), op, ": argument `", name,
             "` must have the dtype of the first argument");
    KL_CHECK(tensor.get_device_index() == other.get_device_index(), op, ": argument `", name,
             "` must be on the device of the first argument");
}

inline void check_same_shape(const Tensor& tensor, const Tensor& other, const char* op, const char* name) {
    bool same = tensor.dim() == other.dim();
    for (int64_t d = 0; same && d < tensor.dim(); ++d) same = tensor.size(d) == other.size(d);
    KL_CHECK(same, op, ": argument `", name, "` must have the shape of the first argument");
}

/// Set of devices for which a set-up call has been made. Two threads may both make it; devices from 64 on repeat it.
struct DeviceSet {
    std::atomic<uint64_t> bits{0};
    bool has(int32_t device) const { return device < 64 && (bits.load(std::memory_order_relaxed) >> device & 1) != 0; }
    void add(int32_t device) {
        if (device < 64) bits.fetch_or(uint64_t{1} << device, std::memory_order_relaxed);
    }
};

/// Raises a kernel's limit of dynamic shared memory above 48 KiB, once per kernel and device (the current one). Each kernel
/// has its own `asked`.
template <typename Kernel>
void allow_shared(Kernel* kernel, int bytes, int32_t device, DeviceSet& asked) {
    if (asked.has(device)) return;
    KL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    asked.add(device);
}

/// The same for a kernel whose launches need up to `most` bytes: requests as much of that as the GPU has.
template <typename Kernel>
void allow_shared_up_to(Kernel* kernel, int most, int32_t device, DeviceSet& asked) {
    if (asked.has(device)) return;
    cudaFuncAttributes attributes{};
    KL_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    allow_shared(kernel, std::min(most, shared_limit(device) - static_cast<int>(attributes.sharedSizeBytes)), device,
                 asked);
}

/// Calls f with a zero of the C++ type that `dtype` names: dispatch(dtype, "gelu", [&](auto zero) { using T =
/// decltype(zero); … }).
template <typename F>
void dispatch(ScalarType dtype, const char* op, F&& f) {
    switch (dtype) {
        case ScalarType::Float:
            return f(float{});
        case ScalarType::Half:
            return f(half{});
        case ScalarType::BFloat16:
            return f(bfloat16{});
        default:
            KL_CHECK(false, op, ": dtype must be float16, bfloat16 or float32");
    }
}

/// The same for rungs on tensor cores that would round float32 to tf32, and so do not take it.
template <typename F>
void dispatch_16bit(ScalarType dtype, const char* op, F&& f) {
    switch (dtype) {
        case ScalarType::Half:
            return f(half{});
        case ScalarType::BFloat16:
            return f(bfloat16{});
        default:
            KL_CHECK(false, op, ": this rung takes float16 and bfloat16");
    }
}

/// Calls f with std::true_type or std::false_type, so that f can use the choice as a constant.
template <typename F>
void with_constant(bool value, F&& f) {
    value ? f(std::true_type{}) : f(std::false_type{});
}

constexpr int THREADS = 256;  // default threads per block

inline unsigned int grid_size(int64_t blocks) {
    KL_CHECK(blocks <= std::numeric_limits<int32_t>::max(), "too many blocks for one launch: ", blocks);
    return static_cast<unsigned int>(blocks);
}

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---- device: conversions and vectors -------------------------------------------------------------------------------

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(half x) { return __half2float(x); }
__device__ inline float to_float(bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
    return x;
}
template <>
__device__ inline half from_float<half>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ inline bfloat16 from_float<bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

/// Rounds two floats to a pair of 16-bit values in one register.
template <typename T>
__device__ inline uint32_t pack_pair(float low, float high) {
    if constexpr (std::is_same_v<T, bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    } else {
        const __half2 pair = __floats2half2_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    }
}

/// The elements of one 16-byte load or store.
template <typename T>
struct alignas(16) Vec {
    static constexpr int size = 16 / sizeof(T);
    T elements[size];
    __device__ T& operator[](int i) { return elements[i]; }
    __device__ const T& operator[](int i) const { return elements[i]; }
};

template <typename T>
__device__ inline Vec<T> load_vec(const T* pointer) {
    return *reinterpret_cast<const Vec<T>*>(pointer);
}

/// The L2 cache policy evict_last for every line, encoded as createpolicy returns it. It is what
/// cuda::access_property::persisting stands for; its header alone would double the time that a small file compiles.
constexpr uint64_t EVICT_LAST_POLICY = 0x14F0000000000000;

/// Pointer whose loads have the L2 eviction policy evict_last, for data that is read once. The lines that a kernel writes
/// then leave L2 before those that it reads, and memory moves the same bytes 1 to 5 % faster. From compute capability 10.0
/// on it is the plain pointer. There cicc of CUDA 13.0 crashes on an associated access property of 16-bit elements, and no
/// gain has been measured.
template <typename T>
__device__ inline const T* evict_last(const T* pointer) {
#if __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 1000
    __builtin_assume(__isGlobal(pointer));
    return static_cast<const T*>(__nv_associate_access_property(pointer, EVICT_LAST_POLICY));
#else
    return pointer;
#endif
}

template <typename T>
__device__ inline void store_vec(T* pointer, const Vec<T>& value) {
    *reinterpret_cast<Vec<T>*>(pointer) = value;
}

/// Stores 16 bytes where `inside`, as one instruction: the compiler would split a conditional store into four. The word
/// is computed in any case, which needs no branch.
__device__ inline void store_16_bytes_if(void* to, uint4 word, bool inside) {
    asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
    if (inside) {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word.x), "r"(word.y), "r"(word.z),
                     "r"(word.w)
                     : "memory");
    }
}

/// Stores with the cache policy evict_first. Up to 6 % faster in persistent cluster kernels that loop over rows; elsewhere
/// 1 to 2 % slower, or no faster.
template <typename T>
__device__ inline void store_evict_first(T* pointer, const Vec<T>& value) {
    __stcs(reinterpret_cast<uint4*>(pointer), reinterpret_cast<const uint4&>(value));
}

/// Converts a vector to floats and back, two 16-bit elements per instruction.
template <typename T>
__device__ inline void unpack(const Vec<T>& v, float (&x)[Vec<T>::size]) {
#pragma unroll
    for (int i = 0; i < Vec<T>::size; ++i) x[i] = to_float(v[i]);
}
template <>
__device__ inline void unpack<bfloat16>(const Vec<bfloat16>& v, float (&x)[8]) {
    const uint4 words = *reinterpret_cast<const uint4*>(&v);
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // a bfloat16 is the upper half of a float
        x[2 * i] = __uint_as_float(w[i] << 16);
        x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
}
template <typename T>
__device__ inline Vec<T> pack(const float (&x)[Vec<T>::size]) {
    Vec<T> v;
#pragma unroll
    for (int i = 0; i < Vec<T>::size; ++i) v[i] = from_float<T>(x[i]);
    return v;
}
template <>
__device__ inline Vec<half> pack<half>(const float (&x)[8]) {
    Vec<half> v;
#pragma unroll
    for (int i = 0; i < 4; ++i) reinterpret_cast<half2*>(&v)[i] = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
    return v;
}
template <>
__device__ inline Vec<bfloat16> pack<bfloat16>(const float (&x)[8]) {
    Vec<bfloat16> v;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        reinterpret_cast<__nv_bfloat162*>(&v)[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    return v;
}

/// Instructions of the special function unit, one issue slot each. The reciprocal has an error of 1 ulp, 2^x one of 2 ulp.
/// Denormals are flushed to zero.
__device__ inline float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

constexpr float LOG2E = 1.44269504088896f;  // exp(x) = 2^(x · log2 e)

inline bool is_aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// ---- device: reductions --------------------------------------------------------------------------------------------

constexpr int WARP = 32;
constexpr unsigned FULL_MASK = 0xffffffffu;

struct Sum {
    static constexpr float identity = 0.0f;
    __device__ static float none() { return identity; }
    __device__ float operator()(float a, float b) const { return a + b; }
};

struct Max {  // drops NaN, as fmaxf does
    static constexpr float identity = -std::numeric_limits<float>::infinity();
    __device__ static float none() { return identity; }
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/// Reduces over the warp by a butterfly of shuffles, and returns the result to every lane. All lanes must call it.
template <typename Op>
__device__ inline float warp_reduce(float value, Op op) {
#pragma unroll
    for (int lane = WARP / 2; lane > 0; lane /= 2) value = op(value, __shfl_xor_sync(FULL_MASK, value, lane));
    return value;
}

/// Transposes among the four lanes 4g + t that hold a row of accumulators. One word is two columns of 16 bits:
///
///            before: x[0] x[1] x[2] x[3]           after: x[0] x[1] x[2] x[3]
///   t = 0            a0   b0   c0   d0                    a0   a1   a2   a3
///   t = 1            a1   b1   c1   d1                    b0   b1   b2   b3
///   t = 2            a2   b2   c2   d2                    c0   c1   c2   c3
///   t = 3            a3   b3   c3   d3                    d0   d1   d2   d3
///
/// a, b, c, d are groups of eight columns. Lane t ends with the 16 contiguous bytes of group t, for one store.
__device__ inline void transpose_quad(uint32_t (&x)[4]) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool upper = threadIdx.x & bit;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            const uint32_t other = __shfl_xor_sync(FULL_MASK, upper ? x[i] : x[i + bit], bit);
            (upper ? x[i] : x[i + bit]) = other;
        }
    }
}

/// Reduces over the block and returns the result to every thread. `scratch` holds one float per warp; the call may be
/// repeated with the same scratch.
template <typename Op>
__device__ inline float block_reduce(float value, Op op, float* scratch) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    value = warp_reduce(value, op);
    __syncthreads();  // the scratch may still be read from the reduction before
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    return warp_reduce(lane < warps ? scratch[lane] : Op::identity, op);
}

/// Kahan's compensated sum, for threads that add a whole row or column.
struct CompensatedSum {
    float sum = 0.0f, lost = 0.0f;
    __device__ void add(float x) {
        const float y = x - lost, t = sum + y;
        lost = isinf(t) ? 0.0f : (t - sum) - y;  // ∞ − ∞ would make a sum that overflows NaN
        sum = t;
    }
};

}  // namespace kl
