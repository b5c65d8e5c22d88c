// matmul, rung 7 of 16: registers
// Idea      A thread holds 8x16 outputs and loads two things ahead of their use. The values of the next k go from
//           shared memory into a second set of registers; the tiles of the next two steps from global into shared
//           memory.
// Predicts  Shared loads of 16 bytes per multiply-add: (8 + 16) / 4 / 128 = 1/21 instead of 1/16 in `double_buffered`;
//           tiles of 32 k instead of 8: a quarter of the barriers.
// Limit now The rate of the float32 units.
// Next      `mma`: tensor cores, for 16-bit types and tf32. `registers_tma`: float32 on Hopper, tiles loaded by TMA.
//
// A float32 tile travels by cp.async, past the registers; 16-bit elements wait in registers for most of a step and are
// widened then. A block of 128 threads makes 128x128 outputs and walks K in tiles of 32 or 16, with one barrier per
// tile. Two blocks share an SM: one multiplies while the other waits at its barrier. Any strides, batches and sizes.

#include <cuda_pipeline_primitives.h>

#include "matmul/linear.cuh"

namespace kl {
namespace {

constexpr int BLOCK_THREADS = 128;
constexpr int BLOCK = 128;  // rows of A, and columns of B, per block
// k of a tile: as much as the shared memory of two blocks per SM holds. 16-bit tiles wait in registers, so they have
// half.
template <typename T>
constexpr int BLOCK_K = sizeof(T) == sizeof(float) ? 32 : 16;
constexpr int STAGES = 3;  // tiles in shared memory: one multiplied, two in flight
constexpr int BURST = 8;   // copies that a thread issues together: alone among loads each costs three empty issue slots

// Both tiles lie in shared memory as [k][x], x = m or n: the inner loop reads rows of it, 4 floats at a time. The pitch
// keeps them aligned and shifts each k by 4 banks: lanes that store 8 k of 4 x use 32 different banks.
constexpr int PITCH = BLOCK + 4;
template <typename T>
constexpr int TILE = BLOCK_K<T> * PITCH;  // floats
template <typename T>
constexpr int SHARED = STAGES * 2 * TILE<T> * static_cast<int>(sizeof(float));

// Like __pipeline_memcpy_async of one element, or of a zero, without a branch between the two.
__device__ inline void copy_or_zero(float* shared, const float* global, bool copy) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
        "l"(global), "r"(copy ? 4 : 0)
        : "memory");
#else
    *shared = copy ? *global : 0.0f;
#endif
}

// How a block reads one operand. ALONG_K: its memory is walked along k, else along x. VECTORIZED: the walked axis has stride
// 1, every run of 16 bytes is aligned, every tile lies inside the operand and spans less than 4 GiB.
template <typename T, bool ALONG_K, bool VECTORIZED>
struct Loader {
    static constexpr int BK = BLOCK_K<T>;
    static constexpr bool ASYNC = sizeof(T) == sizeof(float);  // cp.async cannot convert
    // Elements per copy. A float32 operand along k is transposed by copies of one element.
    static constexpr int V = VECTORIZED && !(ASYNC && ALONG_K) ? Vec<T>::size : 1;
    static constexpr int COPIES = BK / V;
    // A warp's single elements along k are 8 k of 4 x: whole sectors of 32 bytes. Longer runs are one row per thread.
    static constexpr int K_LANES = V == 1 ? 8 : 1, X_LANES = BLOCK_THREADS / K_LANES;  // where ALONG_K
    static constexpr int X_RUNS = BLOCK / V;                            // else: runs in a row of the tile
    static constexpr int OFFSETS = ALONG_K ? BLOCK / X_LANES : COPIES;  // copies after which k moves on

    const T* source;  // of the next tile: its first element where VECTORIZED, else this thread's first
    const T* cursor;  // where not VECTORIZED: the latest copy's source
    int64_t stride_x, stride_k;
    uint32_t offsets[OFFSETS];  // where VECTORIZED: bytes from `source` to this thread's runs
    int x_left;                 // rows or columns of the operand from this thread's first on
    int64_t k_left;             // the same along k, and no more than a tile's of it
    int k_inside;
    Vec<T> staged[ASYNC ? 1 : BK / Vec<T>::size];

    __device__ Loader(const T* operand, int64_t x0, int64_t X, int64_t K, int64_t stride_x, int64_t stride_k)
        : source(operand + x0 * stride_x + (VECTORIZED ? 0 : x_of(0) * stride_x + k_of(0) * stride_k)),
          stride_x(stride_x),
          stride_k(stride_k),
          x_left(static_cast<int>(min(X - x0 - x_of(0), int64_t{BLOCK}))),
          k_left(K - k_of(0)),
          k_inside(static_cast<int>(min(k_left, int64_t{BK}))) {
        const uint32_t bytes_x = stride_x * sizeof(T), bytes_k = stride_k * sizeof(T);
        for (int i = 0; i < OFFSETS; ++i) offsets[i] = x_of(i) * bytes_x + k_of(i) * bytes_k;
    }

    // Where copy i of this thread lies in the tile.
    __device__ static int x_of(int i) {
        const int t = threadIdx.x;
        return ALONG_K ? t / K_LANES + i % OFFSETS * X_LANES : t % X_RUNS * V;
    }
    __device__ static int k_of(int i) {
        const int t = threadIdx.x;
        return ALONG_K ? t % K_LANES + i / OFFSETS * (K_LANES * V) : t / X_RUNS + i * V;
    }

    // Starts copy i of the next tile, to `tile` in shared memory or into registers. Zeros outside the operand.
    __device__ void fetch(int i, float* tile) {
        if (i >= COPIES) return;
        const int x = x_of(i) - x_of(0), k = k_of(i) - k_of(0);  // known to the compiler
        const T* from;
        if constexpr (VECTORIZED) {
            from = reinterpret_cast<const T*>(reinterpret_cast<const char*>(source) + offsets[i % OFFSETS]);
            if (ALONG_K) from += k;
        } else {
            cursor = i % OFFSETS != 0 ? cursor + (ALONG_K ? X_LANES * stride_x : stride_k) : source + k * stride_k;
            from = cursor;
        }
        const bool inside = VECTORIZED || (x < x_left && k < k_inside);
        if constexpr (ASYNC) {
            float* to = tile + k_of(i) * PITCH + x_of(i);
            VECTORIZED ? __pipeline_memcpy_async(to, from, V * sizeof(T)) : copy_or_zero(to, from, inside);
        } else if constexpr (V == 1) {
            staged[i / Vec<T>::size][i % Vec<T>::size] = inside ? *from : from_float<T>(0.0f);
        } else {
            staged[i] = load_vec(from);
        }
    }

    // What fetch left in registers → shared memory, as float32.
    __device__ void store(float* tile) const {
        if constexpr (!ASYNC) {
#pragma unroll
            for (int i = 0; i < BK; ++i) {  // elements
                const int at = k_of(i / V) * PITCH + x_of(i / V) + i % V * (ALONG_K ? PITCH : 1);
                tile[at] = to_float(staged[i / Vec<T>::size][i % Vec<T>::size]);
            }
        }
    }

    // Moves to the next tile, if there is one. Else `fetch` copies the last tile of a VECTORIZED operand again, without a
    // branch, and nothing of any other operand.
    __device__ void advance(bool more) {
        k_left -= BK;
        k_inside = static_cast<int>(min(k_left, int64_t{BK}));
        source += more ? BK * stride_k : 0;
    }
};

// The values that a thread multiplies for one k: 2 runs of 4 rows, 32 apart, and 4 runs of 4 columns, 16 apart.
struct Fragment {
    float a[8], b[16];

    __device__ void load(const float* a_row, const float* b_row) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            *reinterpret_cast<float4*>(a + 4 * i) = *reinterpret_cast<const float4*>(a_row + 32 * i);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            *reinterpret_cast<float4*>(b + 4 * j) = *reinterpret_cast<const float4*>(b_row + 16 * j);
        }
    }
};

constexpr uint32_t GROUP = 16;  // rasterization: rows of blocks that share B in the L2

template <typename T, bool A_ALONG_K, bool B_ALONG_K, bool VECTORIZED, typename Epilogue>
__device__ __forceinline__ void multiply(T* c, const T* a, const T* b, const Product& p, const Epilogue& epilogue) {
    constexpr int BK = BLOCK_K<T>;
    extern __shared__ float4 shared[];
    float* const a_tiles = reinterpret_cast<float*>(shared);
    float* const b_tiles = a_tiles + STAGES * TILE<T>;
    const uint32_t tiles_m = ceil_div(p.M, BLOCK), tiles_n = ceil_div(p.N, BLOCK);  // fewer than 2³¹ blocks in all
    const uint32_t batch = blockIdx.x / (tiles_m * tiles_n), within = blockIdx.x % (tiles_m * tiles_n);
    const uint32_t group = within / tiles_n / GROUP, in_group = within - group * GROUP * tiles_n;
    const uint32_t group_rows = min(tiles_m - group * GROUP, GROUP);
    const int64_t m0 = int64_t{group * GROUP + in_group % group_rows} * BLOCK;
    const int64_t n0 = int64_t{in_group / group_rows} * BLOCK;
    int64_t a_offset, b_offset;
    p.batch_offsets(batch, &a_offset, &b_offset);
    Loader<T, A_ALONG_K, VECTORIZED> a_loader(a + a_offset, m0, p.M, p.K, p.a_m, p.a_k);
    Loader<T, B_ALONG_K, VECTORIZED> b_loader(b + b_offset, n0, p.N, p.K, p.b_n, p.b_k);

    // A warp makes 64×64 outputs, its lanes standing 8×4. Shared memory serves 16 bytes per lane for half a warp at
    // once where neighbours, or every second lane, read the same address. So bit 0 of the lane chooses columns, bit 1
    // rows.
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int m_thread = warp / 2 * 64 + lane / 2 % 8 * 4, n_thread = warp % 2 * 64 + (lane % 2 + lane / 16 * 2) * 4;
    float sum[8][16] = {};

    int reading = 0, writing = (STAGES - 1) * TILE<T>;  // offsets of the tile multiplied and of the one fetched
    const auto next_stage = [](int at) { return at == (STAGES - 1) * TILE<T> ? 0 : at + TILE<T>; };
    if (p.K > 0) {
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; ++stage) {
#pragma unroll
            for (int i = 0; i < BK; ++i) {
                a_loader.fetch(i, a_tiles + stage * TILE<T>);
                b_loader.fetch(i, b_tiles + stage * TILE<T>);
            }
            a_loader.store(a_tiles + stage * TILE<T>);
            b_loader.store(b_tiles + stage * TILE<T>);
            __pipeline_commit();
            const bool more = (stage + 1) * BK < p.K;
            a_loader.advance(more);
            b_loader.advance(more);
        }
        __pipeline_wait_prior(STAGES - 2);
    }
    __syncthreads();
    Fragment fragments[2];
    if (p.K > 0) fragments[0].load(a_tiles + m_thread, b_tiles + n_thread);
    for (int64_t k0 = 0; k0 < p.K; k0 += BK) {
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            if (k % BURST == 0) {
#pragma unroll
                for (int i = k; i < k + BURST; ++i) a_loader.fetch(i, a_tiles + writing);
#pragma unroll
                for (int i = k; i < k + BURST; ++i) b_loader.fetch(i, b_tiles + writing);
            }
            if (k == BK * 3 / 4) {
                a_loader.store(a_tiles + writing);
                b_loader.store(b_tiles + writing);
            }
            int next = reading + (k + 1) * PITCH;
            if (k == BK - 1) {
                // Every thread has read its last values of this tile. After the barrier the whole next tile has
                // arrived, and the next iteration may overwrite this one.
                __pipeline_commit();
                __pipeline_wait_prior(STAGES - 2);
                __syncthreads();
                const bool more = k0 + STAGES * BK < p.K;
                a_loader.advance(more);
                b_loader.advance(more);
                writing = reading;
                next = reading = next_stage(reading);
            }
            fragments[(k + 1) % 2].load(a_tiles + next + m_thread, b_tiles + next + n_thread);
            const Fragment& now = fragments[k % 2];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
#pragma unroll
                for (int j = 0; j < 16; ++j) sum[i][j] += now.a[i] * now.b[j];
            }
        }
    }
    __pipeline_wait_prior(0);

    const int64_t c_offset = int64_t{batch} * p.M * p.N;
    const bool quads = p.N % 4 == 0;  // then every run of four columns that begins at a multiple of 4 is aligned
#pragma unroll
    for (int run = 0; run < 4; ++run) {
        const int64_t n = n0 + n_thread + 16 * run;
        const auto columns = epilogue.template columns<4>(n, p.N - n);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int64_t m = m0 + m_thread + i / 4 * 32 + i % 4;
            if (m >= p.M) continue;
            const float* const x = sum[i] + 4 * run;
            columns.store(c, c_offset + m * p.N + n, {x[0], x[1], x[2], x[3]}, quads);
        }
    }
}

template <typename T, bool A_ALONG_K, bool B_ALONG_K, bool VECTORIZED>
__global__ void __launch_bounds__(BLOCK_THREADS, 2)
    matmul_registers_kernel(T* c, const T* a, const T* b, __grid_constant__ const Product p) {
    multiply<T, A_ALONG_K, B_ALONG_K, VECTORIZED>(c, a, b, p, Identity{});
}

template <typename T, bool VECTORIZED>
__global__ void __launch_bounds__(BLOCK_THREADS, 2)
    linear_registers_kernel(T* c, const T* a, const T* b, __grid_constant__ const Product p,
                            __grid_constant__ const BiasActivation<T> epilogue) {
    multiply<T, true, true, VECTORIZED>(c, a, b, p, epilogue);
}

// The gradient of a weight, added up over chunks of rows.
template <bool VECTORIZED>
__global__ void __launch_bounds__(BLOCK_THREADS, 2)
    linear_cross_entropy_chunked_add_registers_kernel(float*, const float* a, const float* b,
                                                      __grid_constant__ const Product p,
                                                      __grid_constant__ const AddTo<float> sums) {
    multiply<float, false, false, VECTORIZED>(static_cast<float*>(nullptr), a, b, p, sums);
}

// Whether every 16-byte run along the stride-1 axis begins at a multiple of 16 bytes, and 32 bits count a tile's bytes.
constexpr int64_t MAX_STRIDE = int64_t{1} << 22;
template <typename T>
bool is_regular(const void* data, int64_t contiguous, int64_t other, const Product& p, const int64_t* batch_strides) {
    bool regular = contiguous == 1 && is_aligned16(data) && other % Vec<T>::size == 0 && other < MAX_STRIDE;
    for (int d = 0; d < p.batch_dims; ++d) regular = regular && batch_strides[d] % Vec<T>::size == 0;
    return regular;
}

template <typename T, bool A_ALONG_K, bool B_ALONG_K>
bool is_whole(const T* a, const T* b, const Product& p) {
    return p.M % BLOCK == 0 && p.N % BLOCK == 0 && p.K % BLOCK_K<T> == 0 &&
           (A_ALONG_K ? is_regular<T>(a, p.a_k, p.a_m, p, p.a_batch) : is_regular<T>(a, p.a_m, p.a_k, p, p.a_batch)) &&
           (B_ALONG_K ? is_regular<T>(b, p.b_k, p.b_n, p, p.b_batch) : is_regular<T>(b, p.b_n, p.b_k, p, p.b_batch));
}

template <auto* KERNEL, typename T, typename... Epilogue>
void launch(T* c, const T* a, const T* b, const Product& p, const Launch& on, const Epilogue&... epilogue) {
    static DeviceSet asked;
    allow_shared(KERNEL, SHARED<T>, on.device, asked);
    const auto grid = grid_size(p.batches * ceil_div(p.M, BLOCK) * ceil_div(p.N, BLOCK));
    KERNEL<<<grid, BLOCK_THREADS, SHARED<T>, on.stream>>>(c, a, b, p, epilogue...);
}

void launch_linear(float* c, const float* a, const float* b, const Product& p, const Launch& on,
                   const BiasActivation<float>& epilogue) {
    is_whole<float, true, true>(a, b, p) ? launch<linear_registers_kernel<float, true>>(c, a, b, p, on, epilogue)
                                         : launch<linear_registers_kernel<float, false>>(c, a, b, p, on, epilogue);
}

template <typename T, bool A_ALONG_K, bool B_ALONG_K>
void launch_matmul(T* c, const T* a, const T* b, const Product& p, const Launch& on) {
    // An instance takes seconds to compile. 16-bit types, which later rungs make fast, have two. One takes whole row-major
    // operands; the other reads any layout element by element. Float32 operands along k take linear's kernel, with an
    // epilogue that does nothing.
    constexpr bool ROW_MAJOR = A_ALONG_K && !B_ALONG_K, EVERY = sizeof(T) == sizeof(float);
    if constexpr (EVERY && A_ALONG_K && B_ALONG_K) {
        launch_linear(c, a, b, p, on, BiasActivation<T>{});
    } else {
        if constexpr (EVERY || ROW_MAJOR) {
            if (is_whole<T, A_ALONG_K, B_ALONG_K>(a, b, p)) {
                return launch<matmul_registers_kernel<T, A_ALONG_K, B_ALONG_K, true>>(c, a, b, p, on);
            }
        }
        launch<matmul_registers_kernel<T, !EVERY || A_ALONG_K, false, false>>(c, a, b, p, on);
    }
}

}  // namespace

void multiply_registers(const Call& call, const Tensor& input, const Tensor& other) {
    const Product& p = call.product;
    if (p.batches * p.M * p.N == 0) return;
    const Launch on(input);
    dispatch(input.scalar_type(), "matmul", [&](auto zero) {
        using T = decltype(zero);
        auto* c = static_cast<T*>(call.output.data_ptr());
        const auto* a = static_cast<const T*>(input.data_ptr());
        const auto* b = static_cast<const T*>(other.data_ptr());
        const bool a_along_k = p.a_k <= p.a_m || p.M == 1, b_along_k = p.b_k < p.b_n || p.N == 1;
        if (b_along_k) {  // also where A is not: two transposed operands are read element by element
            launch_matmul<T, true, true>(c, a, b, p, on);
        } else {
            a_along_k ? launch_matmul<T, true, false>(c, a, b, p, on) : launch_matmul<T, false, false>(c, a, b, p, on);
        }
    });
    KL_LAUNCH_CHECK();
}

Tensor matmul_registers(const Tensor& input, const Tensor& other) {
    const Call call = prepare(input, other);
    multiply_registers(call, input, other);
    return call.output;
}

void add_registers(const Call& call, const Tensor& input, const Tensor& other) {
    const Product& p = call.product;
    if (p.batches * p.M * p.N == 0) return;
    const Launch on(input);
    const auto* a = static_cast<const float*>(input.data_ptr());
    const auto* b = static_cast<const float*>(other.data_ptr());
    const AddTo<float> sums{static_cast<float*>(call.output.data_ptr())};
    float* const none = nullptr;
    if (is_whole<float, false, false>(a, b, p)) {
        launch<linear_cross_entropy_chunked_add_registers_kernel<true>>(none, a, b, p, on, sums);
    } else {
        launch<linear_cross_entropy_chunked_add_registers_kernel<false>>(none, a, b, p, on, sums);
    }
    KL_LAUNCH_CHECK();
}

// Walks both operands along k: right for any strides, fast for those of a layer.
std::tuple<Tensor, Tensor> linear_registers(const Tensor& input, const Tensor& weight,
                                            const std::optional<Tensor>& bias, const std::string& activation,
                                            bool keep) {
    const LinearCall call = prepare_linear(input, weight, bias, activation, keep);
    const Product& p = call.product;
    KL_CHECK(input.scalar_type() == ScalarType::Float, "linear: registers takes float32");
    if (p.batches * p.M * p.N == 0) return call.outputs();
    const Launch on(input);
    auto* c = static_cast<float*>(call.output.data_ptr());
    const auto* a = static_cast<const float*>(input.data_ptr());
    const auto* b = static_cast<const float*>(weight.data_ptr());
    launch_linear(c, a, b, p, on, call.epilogue<float>());
    KL_LAUNCH_CHECK();
    return call.outputs();
}

void linear_registers_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    if (dtype != ScalarType::Float) return;
    attributes.push_back(
        kernel_attributes<linear_registers_kernel<float, true>>("linear.registers", BLOCK_THREADS, SHARED<float>));
}

void matmul_registers_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "matmul", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(kernel_attributes<matmul_registers_kernel<T, true, false, true>>(
            "matmul.registers", BLOCK_THREADS, SHARED<T>));
    });
    if (dtype != ScalarType::Float) return;
    attributes.push_back(kernel_attributes<linear_cross_entropy_chunked_add_registers_kernel<true>>(
        "linear_cross_entropy.chunked (add, registers)", BLOCK_THREADS, SHARED<float>));
}

}  // namespace kl
