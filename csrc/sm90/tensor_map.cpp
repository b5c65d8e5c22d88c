#include "sm90/tensor_map.h"

#include <cudaTypedefs.h>

#include <atomic>
#include <cstring>
#include <limits>

#include "core/check.h"

namespace kl {
namespace {

/// Looks up the driver function at run time, so that libcuda is not linked.
PFN_cuTensorMapEncodeTiled_v12000 encode_function() {
    static const PFN_cuTensorMapEncodeTiled_v12000 function = [] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult status{};
        const cudaError_t error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status);
        const bool there = error == cudaSuccess && status == cudaDriverEntryPointSuccess;
        return there ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found) : nullptr;
    }();
    KL_CHECK(function != nullptr, "the CUDA driver has no cuTensorMapEncodeTiled: TMA needs a driver for CUDA 12");
    return function;
}

CUtensorMapDataType data_type(const TmaTensor& t) {
    switch (t.dtype) {
        case ScalarType::Half:
            return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
        case ScalarType::BFloat16:
            return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
        case ScalarType::Float8:
            return CU_TENSOR_MAP_DATA_TYPE_UINT8;
        default:
            return t.exact ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
    }
}

int64_t item_size(ScalarType dtype) { return dtype == ScalarType::Float ? 4 : dtype == ScalarType::Float8 ? 1 : 2; }

/// Cache key: the content of a tensor map, compared by bytes.
struct Key {
    uint64_t address;
    uint64_t sizes[TMA_DIMS];
    uint64_t stride_bytes[TMA_DIMS];
    uint32_t box[TMA_DIMS];
    uint32_t dims;
    uint64_t type;  // the driver's number

    bool operator==(const Key& other) const { return std::memcmp(this, &other, sizeof(Key)) == 0; }
    uint64_t hash() const {
        uint64_t words[sizeof(Key) / 8], h = 0;
        std::memcpy(words, this, sizeof(Key));
        for (const uint64_t word : words) h = (h ^ word) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
        return h;
    }
};
static_assert(sizeof(Key) == 8 * (1 + 2 * TMA_DIMS + 3 + 1), "no padding: its bytes are compared");

Key key_of(const TmaTensor& t) {
    Key key{};
    key.address = reinterpret_cast<uintptr_t>(t.data);
    key.dims = static_cast<uint32_t>(t.dims);
    key.type = static_cast<uint64_t>(data_type(t));
    for (int d = 0; d < t.dims; ++d) {
        key.sizes[d] = static_cast<uint64_t>(t.sizes[d]);
        key.box[d] = static_cast<uint32_t>(t.box[d]);
        // The stride of a dimension of one element is unused, but TMA must accept it.
        key.stride_bytes[d] = t.sizes[d] == 1 ? 16 : static_cast<uint64_t>(t.strides[d] * item_size(t.dtype));
    }
    return key;
}

void check_status(cudaError_t error) { KL_CHECK(error == cudaSuccess, "CUDA error: ", cudaGetErrorString(error)); }

CUtensorMap encode(const TmaTensor& t, const Key& key) {
    KL_CHECK(tma_can_address(t), "TMA needs positive strides and addresses that are multiples of 16 bytes");
    const cuuint32_t every[TMA_DIMS] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    // Promotion to 256 bytes fetches twice what is asked for where rows begin off 256 bytes: products of 6000 take 1.15
    // times as long.
    const auto make = [&] {
        return encode_function()(&map, data_type(t), key.dims, const_cast<void*>(t.data), key.sizes,
                                 key.stride_bytes + 1, key.box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    CUresult status = make();
    if (status == CUDA_ERROR_INVALID_CONTEXT) {
        // The first CUDA call of a thread, as in autograd. Unlike the runtime, the driver does not make the context
        // current. cudaSetDevice of the current device does, and is allowed during stream capture.
        int device = 0;
        check_status(cudaGetDevice(&device));
        check_status(cudaSetDevice(device));
        status = make();
    }
    KL_CHECK(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with error ", static_cast<int>(status));
    return map;
}

}  // namespace

bool tma_can_address(const TmaTensor& t) {
    bool can =
        t.data != nullptr && reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && (t.sizes[0] == 1 || t.strides[0] == 1);
    for (int d = 0; d < t.dims; ++d) can = can && t.sizes[d] > 0 && t.sizes[d] <= std::numeric_limits<int32_t>::max();
    for (int d = 1; d < t.dims; ++d) {
        const int64_t bytes = t.strides[d] * item_size(t.dtype);
        can = can && (t.sizes[d] == 1 || (bytes > 0 && bytes % 16 == 0 && bytes < int64_t{1} << 40));
    }
    return can;
}

bool tma_can_write(const TmaTensor& t) { return tma_can_address(t) && t.sizes[0] * item_size(t.dtype) % 16 == 0; }

CUtensorMap tensor_map(const TmaTensor& tensor) {
    struct Cached {
        Key key;
        CUtensorMap map;
    };
    constexpr int ENTRIES = 128;
    thread_local Cached cache[ENTRIES]{};  // no tensor has address 0, so an empty entry matches none
    const Key key = key_of(tensor);
    Cached& entry = cache[key.hash() % ENTRIES];
    if (!(entry.key == key)) {
        entry.map = encode(tensor, key);
        entry.key = key;
    }
    return entry.map;
}

bool is_hopper(int32_t device) {
    static std::atomic<uint64_t> known{0},
        hopper{0};  // a bit for each of the first 64 devices; others are queried each time
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if ((known.load(std::memory_order_acquire) & bit) != 0) return (hopper.load(std::memory_order_relaxed) & bit) != 0;
    int major = 0;
    check_status(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    if (major == 9) hopper.fetch_or(bit, std::memory_order_relaxed);
    known.fetch_or(bit, std::memory_order_release);
    return major == 9;
}

bool compiled_for_hopper(const void* kernel) {
    cudaFuncAttributes attributes{};
    check_status(cudaFuncGetAttributes(&attributes, kernel));
    return attributes.numRegs >= 32;  // an empty body has no accumulators
}

void check_hopper(const void* kernel, int32_t device, const char* name) {
    KL_CHECK(is_hopper(device), name, " needs a GPU of compute capability 9.0");
    KL_CHECK(compiled_for_hopper(kernel), name, " was not compiled for sm_90a; add 9.0a to TORCH_CUDA_ARCH_LIST");
}

}  // namespace kl
