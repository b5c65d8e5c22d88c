// matmul, rung 15 of 16: skinny
// Idea      At most 16 rows: the other operand goes from global memory through registers straight into mma, 16 bytes
//           per load. Its rows are mma's 16 rows, and rows of the input mma's 8 columns.
// Predicts  Time is N · K · sizeof(T) / bandwidth: the other operand is read once.
// Limit now That read. Few columns leave SMs idle.
// Next      `split_k`: for more rows, and for few columns.
//
// No shared memory is needed for operands. Within a product the order of k is free as long as both operands have the
// same. So a lane takes what its 16 bytes hold. The warps of a block share K; their sums are added in order at the end.
// The `skinny` rung of linear, rung 6 of 6, is the same kernel with an epilogue.

#include "core/mma.cuh"
#include "matmul/linear.cuh"

namespace kl {
namespace {

constexpr int MOST_ROWS = 16;

// Columns of B that lie along N make half as many blocks, about one an SM: each then has twice the warps.
template <bool ALONG_K>
constexpr int SKINNY_THREADS = ALONG_K ? 256 : 512;

// 16 bytes, zeros where `inside` is false. Volatile, so that loads stay where they are asked for, ahead of their use.
__device__ inline uint4 load16(const void* pointer, bool inside) {
    uint4 v = {0, 0, 0, 0};
    if (inside) {
        asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(pointer));
    }
    return v;
}

__device__ inline uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// One warp's step along k. MT: how often 8 rows of the input. Lane 4g + t holds row g of each 8, and columns of `other`
// as the memory of that has them.
template <typename T, int MT, bool ALONG_K>
struct Step {
    // ALONG_K: 32 columns and 64 of k. A lane has columns g, g + 8, g + 16, g + 24 at 8t … 8t + 7 of each 32 of k.
    // Else:    64 columns and 32 of k. A lane has columns 8g … 8g + 7 at each of 8t … 8t + 7.
    static constexpr int COLUMNS = ALONG_K ? 32 : 64, BK = ALONG_K ? 64 : 32;
    static constexpr int HALVES = BK / 32, LOADS = 8, TILES = COLUMNS / 16;

    uint4 w[LOADS], x[MT][HALVES];

    // `k` is the first of the warp's, for the lane 8t further.
    __device__ void load_other(const T* b, const Product& p, int64_t n0, int64_t k) {
        const int g = threadIdx.x % WARP / 4;
        const int64_t first = n0 + (ALONG_K ? g : g * 8);
        const T* from = ALONG_K ? b + first * p.b_n + k : b + k * p.b_k + first;
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int column = ALONG_K ? i / HALVES * 8 : 0, at = ALONG_K ? i % HALVES * 32 : i;
            w[i] = load16(ALONG_K ? from + at : from, first + column < p.N && k + at < p.K);
            if (!ALONG_K || i % HALVES == HALVES - 1) from += ALONG_K ? 8 * p.b_n : p.b_k;
        }
    }

    __device__ void load_input(const T* a, const Product& p, int64_t k) {
        const int g = threadIdx.x % WARP / 4;
#pragma unroll
        for (int q = 0; q < MT; ++q) {
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                const bool inside = q * 8 + g < p.M && k + h * 32 < p.K;
                x[q][h] =
                    inside ? *reinterpret_cast<const uint4*>(a + (q * 8 + g) * p.a_m + k + h * 32) : uint4{0, 0, 0, 0};
            }
        }
    }

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    __device__ void multiply(float (&sum)[TILES][MT][4]) const {
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
#pragma unroll
            for (int s = 0; s < 2; ++s) {  // two words of the input's four: 16 of k over the lanes of a row
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    uint32_t a[4];
                    if constexpr (ALONG_K) {
                        const uint4 &upper = w[2 * tile * HALVES + h], &lower = w[(2 * tile + 1) * HALVES + h];
                        a[0] = word(upper, 2 * s), a[1] = word(lower, 2 * s);
                        a[2] = word(upper, 2 * s + 1), a[3] = word(lower, 2 * s + 1);
                    } else {  // rows g and g + 8 are columns 8g + 2 · tile and the next: halves of a word of four k
#pragma unroll
                        for (int pair = 0; pair < 2; ++pair) {
                            const uint32_t first = word(w[4 * s + 2 * pair], tile);
                            const uint32_t second = word(w[4 * s + 2 * pair + 1], tile);
                            a[2 * pair] = __byte_perm(first, second, 0x5410);
                            a[2 * pair + 1] = __byte_perm(first, second, 0x7632);
                        }
                    }
#pragma unroll
                    for (int q = 0; q < MT; ++q)
                        mma(sum[tile][q], a, word(x[q][h], 2 * s), word(x[q][h], 2 * s + 1), T{});
                }
            }
        }
    }
#endif

    // Which of the warp's columns rows g (`half` 0) and g + 8 (1) of a tile are.
    __device__ static int column(int tile, int half) {
        const int g = threadIdx.x % WARP / 4;
        return ALONG_K ? tile * 16 + half * 8 + g : g * 8 + tile * 2 + half;
    }
};

template <typename T, int MT, bool ALONG_K, typename Epilogue>
__device__ __forceinline__ void multiply(T* c, const T* a, const T* b, const Product& p, const Epilogue& epilogue) {
#if __CUDA_ARCH__ >= 800
    using Step = Step<T, MT, ALONG_K>;
    constexpr int WARPS = SKINNY_THREADS<ALONG_K> / WARP, AT_ONCE = 8;
    __shared__ float sums[AT_ONCE][MT * 8][Step::COLUMNS];
    const int warp = threadIdx.x / WARP, t = threadIdx.x % 4;
    const int64_t n0 = int64_t{blockIdx.x} * Step::COLUMNS;
    float sum[Step::TILES][MT][4] = {};
    // What comes from memory is asked for two steps ahead, what comes from the L1 when it is needed.
    Step now, next, after;
    constexpr int STRIDE = WARPS * Step::BK;
    int64_t k = warp * Step::BK + t * 8;
    now.load_other(b, p, n0, k);
    next.load_other(b, p, n0, k + STRIDE);  // past the end of k nothing is read
    for (int64_t k0 = warp * Step::BK; k0 < p.K; k0 += STRIDE, k += STRIDE) {
        after.load_other(b, p, n0, k + 2 * STRIDE);
        now.load_input(a, p, k);
        now.multiply(sum);
#pragma unroll
        for (int i = 0; i < Step::LOADS; ++i) now.w[i] = next.w[i], next.w[i] = after.w[i];
    }
    // The last warps leave their sums, the others add theirs.
#pragma unroll
    for (int round = WARPS / AT_ONCE - 1; round >= 0; --round) {
        if (warp / AT_ONCE == round) {
#pragma unroll
            for (int tile = 0; tile < Step::TILES; ++tile) {
#pragma unroll
                for (int q = 0; q < MT; ++q) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float& at = sums[warp % AT_ONCE][q * 8 + 2 * t + e % 2][Step::column(tile, e / 2)];
                        at = round + 1 < WARPS / AT_ONCE ? at + sum[tile][q][e] : sum[tile][q][e];
                    }
                }
            }
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < p.M * Step::COLUMNS; i += SKINNY_THREADS<ALONG_K>) {
        const int m = i / Step::COLUMNS, column = i % Step::COLUMNS;
        const int64_t n = n0 + column;
        if (n >= p.N) continue;
        float total[1] = {};
#pragma unroll
        for (int other = 0; other < AT_ONCE; ++other) total[0] += sums[other][m][column];
        epilogue.template columns<1>(n, 1).store(c, m * p.N + n, total, true);
    }
#endif
}

template <typename T, int MT, bool ALONG_K>
__global__ void __launch_bounds__(SKINNY_THREADS<ALONG_K>)
    matmul_skinny_kernel(T* c, const T* a, const T* b, __grid_constant__ const Product p) {
    multiply<T, MT, ALONG_K>(c, a, b, p, Identity{});
}

template <typename T, int MT>
__global__ void __launch_bounds__(SKINNY_THREADS<true>)
    linear_skinny_kernel(T* c, const T* a, const T* b, __grid_constant__ const Product p,
                         __grid_constant__ const BiasActivation<T> epilogue) {
    multiply<T, MT, true>(c, a, b, p, epilogue);
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Raises unless 16-byte loads of both operands are aligned and none crosses an edge. Says whether B lies along k.
bool check_skinny(const Product& p, const void* a, const void* b, ScalarType dtype, const char* op) {
    constexpr int V = 8;
    KL_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16, op, ": skinny takes float16 and bfloat16");
    KL_CHECK(p.batches == 1 && p.M <= MOST_ROWS, op, ": skinny takes at most ", MOST_ROWS, " rows, and no batches");
    const bool input = p.a_k == 1 && (p.M == 1 || p.a_m % V == 0) && p.K % V == 0 && is_aligned16(a);
    const bool along_k = p.b_k == 1 && (p.N == 1 || p.b_n % V == 0);
    const bool along_n = p.b_n == 1 && p.b_k % V == 0 && p.N % V == 0;
    KL_CHECK(input && is_aligned16(b) && (along_k || along_n), op,
             ": skinny needs operands that are dense along one dimension and start every run of it on 16 bytes");
    return along_k;
}

template <auto* KERNEL, bool ALONG_K, typename T, typename... Epilogue>
void launch(T* c, const T* a, const T* b, const Product& p, const Launch& on, const Epilogue&... epilogue) {
    constexpr int COLUMNS = Step<T, 1, ALONG_K>::COLUMNS;
    KERNEL<<<grid_size(ceil_div(p.N, COLUMNS)), SKINNY_THREADS<ALONG_K>, 0, on.stream>>>(c, a, b, p, epilogue...);
}

// Calls f with a value of the 16-bit type that `dtype` names; check_skinny has seen to it that it names one.
template <typename F>
void dispatch16(ScalarType dtype, F&& f) {
    dtype == ScalarType::Half ? f(half{}) : f(bfloat16{});
}

template <typename T, bool ALONG_K>
void launch_matmul(T* c, const T* a, const T* b, const Product& p, const Launch& on) {
    p.M <= 8 ? launch<matmul_skinny_kernel<T, 1, ALONG_K>, ALONG_K>(c, a, b, p, on)
             : launch<matmul_skinny_kernel<T, 2, ALONG_K>, ALONG_K>(c, a, b, p, on);
}

}  // namespace

Tensor matmul_skinny(const Tensor& input, const Tensor& other) {
    auto [p, output] = prepare(input, other);
    const bool along_k = check_skinny(p, input.data_ptr(), other.data_ptr(), input.scalar_type(), "matmul");
    if (p.M * p.N == 0) return output;
    const Launch on(input);
    dispatch16(input.scalar_type(), [&, &p = p, &output = output](auto zero) {
        using T = decltype(zero);
        auto* c = static_cast<T*>(output.data_ptr());
        const auto* a = static_cast<const T*>(input.data_ptr());
        const auto* b = static_cast<const T*>(other.data_ptr());
        along_k ? launch_matmul<T, true>(c, a, b, p, on) : launch_matmul<T, false>(c, a, b, p, on);
    });
    KL_LAUNCH_CHECK();
    return output;
}

std::tuple<Tensor, Tensor> linear_skinny(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                         const std::string& activation, bool keep) {
    const LinearCall call = prepare_linear(input, weight, bias, activation, keep);
    const Product& p = call.product;
    const bool along_k = check_skinny(p, input.data_ptr(), weight.data_ptr(), input.scalar_type(), "linear");
    KL_CHECK(along_k, "linear: skinny takes a `weight` whose rows are dense");
    if (p.M * p.N == 0) return call.outputs();
    const Launch on(input);
    dispatch16(input.scalar_type(), [&](auto zero) {
        using T = decltype(zero);
        auto* c = static_cast<T*>(call.output.data_ptr());
        const auto* a = static_cast<const T*>(input.data_ptr());
        const auto* b = static_cast<const T*>(weight.data_ptr());
        p.M <= 8 ? launch<linear_skinny_kernel<T, 1>, true>(c, a, b, p, on, call.epilogue<T>())
                 : launch<linear_skinny_kernel<T, 2>, true>(c, a, b, p, on, call.epilogue<T>());
    });
    KL_LAUNCH_CHECK();
    return call.outputs();
}

void matmul_skinny_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    if (dtype == ScalarType::Float) return;
    dispatch16(dtype, [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(
            kernel_attributes<matmul_skinny_kernel<T, 2, true>>("matmul.skinny", SKINNY_THREADS<true>));
        attributes.push_back(
            kernel_attributes<matmul_skinny_kernel<T, 2, false>>("matmul.skinny along N", SKINNY_THREADS<false>));
    });
}

void linear_skinny_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    if (dtype == ScalarType::Float) return;
    dispatch16(dtype, [&](auto zero) {
        attributes.push_back(
            kernel_attributes<linear_skinny_kernel<decltype(zero), 2>>("linear.skinny", SKINNY_THREADS<true>));
    });
}

}  // namespace kl
