// What every kernel shares: types, checks, launch check, vectors of 16 bytes, reductions; strided operands by layout.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cuda/annotated_ptr>
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

// Shared memory that one block may ask for, dynamic and static together.
inline int shared_limit(int32_t device) { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device); }

// The architecture that a kernel's code was compiled for, as 90 for sm_90 and for compute_90: of a driver's translation of
// compute_80 it is 80, on whatever GPU. The kernel is asked on the current device, which must be `device`, and only once:
// all kernels of the extension are compiled for the same architectures.
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

// Whether a kernel's code has what came with Hopper: thread-block clusters, programmatic dependent launch. That of an older
// architecture, which newer GPUs run as well, has left it out.
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

// Devices for which something has been done. Two threads may both do it; those beyond 64 do it every time.
struct DeviceSet {
    std::atomic<uint64_t> bits{0};
    bool has(int32_t device) const { return device < 64 && (bits.load(std::memory_order_relaxed) >> device & 1) != 0; }
    void add(int32_t device) {
        if (device < 64) bits.fetch_or(uint64_t{1} << device, std::memory_order_relaxed);
    }
};

// More than 48 KiB of dynamic shared memory must be asked for, once per kernel and device (the current one). `asked` is
// the kernel's own.
template <typename Kernel>
void allow_shared(Kernel* kernel, int bytes, int32_t device, DeviceSet& asked) {
    if (asked.has(device)) return;
    KL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    asked.add(device);
}

// The same of a kernel whose launches need different amounts, `most` at most: as much of that as the GPU has.
template <typename Kernel>
void allow_shared_up_to(Kernel* kernel, int most, int32_t device, DeviceSet& asked) {
    if (asked.has(device)) return;
    cudaFuncAttributes attributes{};
    KL_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    allow_shared(kernel, std::min(most, shared_limit(device) - static_cast<int>(attributes.sharedSizeBytes)), device,
                 asked);
}

// Calls f with a value of the C++ type that `dtype` names: dispatch(dtype, "gelu", [&](auto zero) { using T =
// decltype(zero); … }).
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

// Calls f with std::true_type or std::false_type, so that a choice made here is a constant there.
template <typename F>
void with_constant(bool value, F&& f) {
    value ? f(std::true_type{}) : f(std::false_type{});
}

constexpr int THREADS = 256;  // of a block, where nothing asks for another number

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

// As many elements as one 16-byte load or store moves.
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

using Persisting = cuda::access_property::persisting;

// A pointer to what is read but once, whose lines leave the L2 after all others: what is written then leaves it early, and
// the memory moves the same bytes 1 to 5 % faster. From compute capability 10.0 on the pointer as it is: there cicc of
// CUDA 13.0 crashes on associate_access_property where elements have 16 bits, and nobody has measured a gain.
template <typename T>
__device__ inline const T* once(const T* pointer) {
#if __CUDA_ARCH__ < 1000
    return cuda::associate_access_property(pointer, Persisting{});
#else
    return pointer;
#endif
}

template <typename T>
__device__ inline void store_vec(T* pointer, const Vec<T>& value) {
    *reinterpret_cast<Vec<T>*>(pointer) = value;
}

// The same, of what leaves the L2 before what is read. Faster where clusters stay and go from row to row, by up to 6 %;
// elsewhere 1 to 2 % slower, or no faster.
template <typename T>
__device__ inline void store_streamed(T* pointer, const Vec<T>& value) {
    __stcs(reinterpret_cast<uint4*>(pointer), reinterpret_cast<const uint4&>(value));
}

// A vector as floats and back, two 16-bit elements an instruction.
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

// The special function unit's own instructions: one issue slot each, 1 ulp (reciprocal) and 2 ulp (2 to the x) of
// error, denormals flushed to zero.
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
    __device__ float operator()(float a, float b) const { return a + b; }
};

struct Max {  // drops NaN, as fmaxf does
    static constexpr float identity = -std::numeric_limits<float>::infinity();
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <typename Op>
__device__ inline float warp_reduce(float value, Op op) {
#pragma unroll
    for (int lane = WARP / 2; lane > 0; lane /= 2) value = op(value, __shfl_xor_sync(FULL_MASK, value, lane));
    return value;
}

// Among the four lanes of a row: lane t has two columns of each of four groups of eight, and gets all of group t.
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

// Every thread of the block gets the result. `scratch` holds one float per warp.
template <typename Op>
__device__ inline float block_reduce(float value, Op op, float* scratch) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    value = warp_reduce(value, op);
    __syncthreads();  // the scratch may still be read from the reduction before
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    return warp_reduce(lane < warps ? scratch[lane] : Op::identity, op);
}

// Kahan's sum: one thread adds up a whole row or column, whose rounding errors would pile up.
struct CompensatedSum {
    float sum = 0.0f, lost = 0.0f;
    __device__ void add(float x) {
        const float y = x - lost, t = sum + y;
        lost = isinf(t) ? 0.0f : (t - sum) - y;  // ∞ − ∞ would make a sum that overflows NaN
        sum = t;
    }
};

}  // namespace kl
