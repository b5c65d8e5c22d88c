// matmul, rung 8 of 16: mma
// Idea      Tensor cores: mma.sync multiplies 16x8 outputs over 32 bytes of k per warp. ldmatrix feeds it from shared
//           memory, which cp.async fills.
// Predicts  One mma.sync replaces 16 · 8 · 16 / 32 = 64 multiply-adds per lane in 16 bits.
// Limit now mma.sync itself: only wgmma reaches Hopper's full rate.
// Next      `wgmma`: Hopper's tensor cores read shared memory themselves.
//
// A block makes BM×BN outputs and walks K in tiles of 128 bytes. Three tiles of each operand lie in shared memory: one
// is multiplied while cp.async fills the others, past the registers. A warp holds its outputs in registers as 16×8
// squares; ldmatrix brings the next fragments while the tensor cores work on these.
//
// A tile has the operand's own orientation, so that 16 bytes stay 16 bytes all the way. It is [x][k] where memory runs
// along k, and [k][x] where it runs along x (x = m or n). ldmatrix transposes the latter on its way to the registers.
// Operands that cannot be copied 16 bytes at a time (odd leading dimension, no stride of 1) are gathered element by
// element, into [x][k].

#include "core/mma.cuh"
#include "matmul/linear.cuh"

namespace kl {
namespace {

enum class Layout { ALONG_K, ALONG_X, GATHERED };

constexpr int STAGES = 3;
constexpr int TILE_BYTES = 128;  // of k, per row of A or column of B
constexpr int STEP_BYTES = 32;   // of k, per mma
constexpr int STEPS = TILE_BYTES / STEP_BYTES;
constexpr int CHUNK = 16;  // bytes: what one cp.async and one row of ldmatrix move

// BM×BN outputs by WARPS_M×WARPS_N warps of WM×WN.
template <int BM_, int BN_, int WM_, int WN_>
struct Shape {
    static constexpr int BM = BM_, BN = BN_, WM = WM_, WN = WN_;
    static constexpr int WARPS_N = BN / WN, THREADS = BM / WM * WARPS_N * WARP;
    static constexpr int A_BYTES = BM * TILE_BYTES, STAGE_BYTES = (BM + BN) * TILE_BYTES;
    static constexpr int SHARED = STAGES * STAGE_BYTES;
    static constexpr int GROUP = 2048 / BM;  // tiles of m that are walked together, see block_tile
};
using Large = Shape<128, 256, 64, 64>;  // each fragment serves four others: the fewest bytes of shared memory per flop
using Small = Shape<64, 64, 32, 32>;    // more blocks, where there are not enough large tiles to fill the GPU

// One operand's tile in shared memory: WIDTH of x by 128 bytes of k, as rows of 16-byte chunks.
template <typename T, Layout LAYOUT, int WIDTH, int THREADS>
struct Tile {
    static constexpr bool ALONG_X = LAYOUT == Layout::ALONG_X;
    static constexpr int BK = TILE_BYTES / sizeof(T);
    static constexpr int E = CHUNK / sizeof(T);  // elements per chunk
    static constexpr int CHUNKS = (ALONG_X ? WIDTH : BK) / E, ROW_BYTES = CHUNKS * CHUNK;

    // The chunks of a row are swizzled, so that what is read together lies in different banks. ldmatrix reads one chunk
    // column of 8 rows. The tf32 path, which has no transposing ldmatrix, reads two chunks of 4 rows.
    __device__ static int mix(int row) { return ALONG_X && sizeof(T) == 4 ? row % 4 * 2 : row % 8; }
    __device__ static uint32_t offset(int row, int chunk) { return row * ROW_BYTES + (chunk ^ mix(row)) * CHUNK; }
};

// Global memory → shared memory, tile after tile along k.
template <typename T, Layout LAYOUT, int WIDTH, int THREADS>
struct Loader : Tile<T, LAYOUT, WIDTH, THREADS> {
    using Base = Tile<T, LAYOUT, WIDTH, THREADS>;
    static constexpr int BK = Base::BK, E = Base::E, CHUNKS = Base::CHUNKS;

    const T* origin;             // element (x0, k = 0): an address inside the operand
    const T* source;             // where this thread reads first in the next tile
    int64_t stride_x, stride_k;  // elements
    int x_left;                  // of the operand from x0 on, at most WIDTH

    __device__ Loader(const T* operand, int64_t x0, int64_t X, int64_t stride_x, int64_t stride_k)
        : origin(operand + x0 * stride_x),
          source(origin),
          stride_x(stride_x),
          stride_k(stride_k),
          x_left(static_cast<int>(min(X - x0, int64_t{WIDTH}))) {
        if constexpr (LAYOUT != Layout::GATHERED) source += first_row() * pitch() + first_chunk() * E;
    }

    __device__ static int first_row() { return threadIdx.x / CHUNKS; }
    __device__ static int first_chunk() { return threadIdx.x % CHUNKS; }
    __device__ int64_t pitch() const { return Base::ALONG_X ? stride_k : stride_x; }

    // Loads the next tile, of which k_left elements (at most BK) of k are inside. Outside stand zeros.
    __device__ void load(uint32_t shared, int k_left) {
        if constexpr (LAYOUT == Layout::GATHERED) {
            gather(shared, k_left);
        } else {
            constexpr int ROWS = Base::ALONG_X ? BK : WIDTH, STEP = THREADS / CHUNKS;  // rows the block copies at once
            static_assert(THREADS % CHUNKS == 0 && ROWS % STEP == 0);
            const int rows_left = (Base::ALONG_X ? k_left : x_left) - first_row();
            const int columns_left = (Base::ALONG_X ? x_left : k_left) - first_chunk() * E;
            const int bytes = min(max(columns_left, 0) * static_cast<int>(sizeof(T)), CHUNK);
            const T* p = source;
#pragma unroll
            for (int i = 0; i < ROWS / STEP; ++i) {
                const int inside = i * STEP < rows_left ? bytes : 0;
                // Where nothing is read, the address still is one inside the operand.
                cp_async16(shared + Base::offset(first_row() + i * STEP, first_chunk()), inside > 0 ? p : origin,
                           inside);
                p += STEP * pitch();
            }
        }
        source += BK * stride_k;
    }

    __device__ void gather(uint32_t shared, int k_left) const {
        const bool along_k = stride_k <= stride_x;  // lanes run along the axis in which memory lies closer together
#pragma unroll 2
        for (int i = threadIdx.x; i < WIDTH * CHUNKS; i += THREADS) {
            const int x = along_k ? i / CHUNKS : i % WIDTH, chunk = along_k ? i % CHUNKS : i / WIDTH;
            Vec<T> v;
#pragma unroll
            for (int e = 0; e < E; ++e) {
                const int k = chunk * E + e;
                v[e] = x < x_left && k < k_left ? source[x * stride_x + k * stride_k] : from_float<T>(0.0f);
            }
            store_shared16(shared + Base::offset(x, chunk), *reinterpret_cast<const uint4*>(&v));
        }
    }
};

// Shared memory → one warp's fragments, of 16 x and one step of k each. The four registers are 8×(16 bytes) squares in
// the order that mma wants: for A first x, then k; for B, whose fragments have 8 columns, first k, then x.
template <bool IS_A, typename T, Layout LAYOUT, int WIDTH, int THREADS>
struct Reader : Tile<T, LAYOUT, WIDTH, THREADS> {
    using Base = Tile<T, LAYOUT, WIDTH, THREADS>;
    static constexpr int E = Base::E, ROW_BYTES = Base::ROW_BYTES;

    // Base::offset(row, chunk) in two parts. A fragment's number and step change only bits that are zero in the lane's
    // own chunk. So an exclusive or with a constant moves from one fragment to the next.
    uint32_t row_bytes, chunk_bytes;

    __device__ explicit Reader(int x_warp) {
        const int lane = threadIdx.x % WARP;
        int row, chunk, within = 0;
        if constexpr (Base::ALONG_X && sizeof(T) == 4) {
            row = lane % 4;
            chunk = (x_warp + lane / 4) / E;
            within = lane / 4 % E * sizeof(T);
        } else {
            // Lanes 8i … 8i + 7 name the rows of square i. Its place among the four:
            const int low = lane / 8 % 2, high = lane / 16;
            const int x_square = IS_A ? low : high, k_square = IS_A ? high : low;
            row = lane % 8 + (Base::ALONG_X ? k_square * 8 : x_warp + x_square * 8);
            chunk = Base::ALONG_X ? x_warp / E + x_square : k_square;
        }
        row_bytes = row * ROW_BYTES + within;
        chunk_bytes = (chunk ^ Base::mix(row)) * CHUNK;
    }

    __device__ void read(uint32_t (&r)[4], uint32_t tile, int fragment, int step) const {
        if constexpr (!Base::ALONG_X) {
            ldmatrix(r, tile + row_bytes + (chunk_bytes ^ step * STEP_BYTES) + fragment * 16 * ROW_BYTES);
        } else if constexpr (sizeof(T) == 2) {
            ldmatrix_transposed(r, tile + row_bytes + (chunk_bytes ^ fragment * 2 * CHUNK) + step * 16 * ROW_BYTES);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int x_square = IS_A ? i % 2 : i / 2, k_square = IS_A ? i / 2 : i % 2;
                r[i] = load_shared(tile + row_bytes + (chunk_bytes ^ (fragment * 4 + x_square * 2) * CHUNK) +
                                   (step * 8 + k_square * 4) * ROW_BYTES);
            }
        }
        round_to_operand<T>(r);
    }
};

// The tile of the output that this block computes. Blocks that run at the same time should share rows of A and columns
// of B in L2. So tiles are numbered down a group of rows before the next column begins.
struct BlockTile {
    uint32_t batch, m, n;  // there are fewer than 2³¹ blocks

    template <typename S>
    __device__ static BlockTile of(const Product& p, S) {
        const uint32_t tiles_m = ceil_div(p.M, S::BM), tiles_n = ceil_div(p.N, S::BN), per_batch = tiles_m * tiles_n;
        const uint32_t within = blockIdx.x % per_batch, per_group = min(tiles_m, uint32_t{S::GROUP}) * tiles_n;
        const uint32_t group = within / per_group, in_group = within % per_group;
        const uint32_t rows = min(tiles_m - group * S::GROUP, uint32_t{S::GROUP});
        return {blockIdx.x / per_batch, group * S::GROUP + in_group % rows, in_group / rows};
    }
};

template <typename T, typename S, Layout A_LAYOUT, Layout B_LAYOUT, typename Epilogue>
__device__ __forceinline__ void multiply(T* c, const T* a, const T* b, const Product& p, const Epilogue& epilogue) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    const uint32_t shared = shared_address(shared_bytes);
    constexpr int BK = TILE_BYTES / sizeof(T), MI = S::WM / 16, NI = S::WN / 16;

    const BlockTile at = BlockTile::of(p, S{});
    const int64_t m0 = int64_t{at.m} * S::BM, n0 = int64_t{at.n} * S::BN;
    int64_t a_offset, b_offset;
    p.batch_offsets(at.batch, &a_offset, &b_offset);
    Loader<T, A_LAYOUT, S::BM, S::THREADS> a_loader(a + a_offset, m0, p.M, p.a_m, p.a_k);
    Loader<T, B_LAYOUT, S::BN, S::THREADS> b_loader(b + b_offset, n0, p.N, p.b_n, p.b_k);

    // One group per tile and iteration, empty past the end, so that counting groups counts tiles.
    const auto load = [&](uint32_t stage, int64_t k0) {
        if (k0 < p.K) {
            const int k_left = static_cast<int>(min(p.K - k0, int64_t{BK}));
            a_loader.load(stage, k_left);
            b_loader.load(stage + S::A_BYTES, k_left);
        }
        cp_async_commit();
    };
    const int warp = threadIdx.x / WARP, warp_m = warp / S::WARPS_N * S::WM, warp_n = warp % S::WARPS_N * S::WN;
    const Reader<true, T, A_LAYOUT, S::BM, S::THREADS> a_reader(warp_m);
    const Reader<false, T, B_LAYOUT, S::BN, S::THREADS> b_reader(warp_n);
    uint32_t a_fragments[2][MI][4], b_fragments[2][NI][4];
    const auto fetch = [&](int buffer, uint32_t stage, int step) {
#pragma unroll
        for (int i = 0; i < MI; ++i) a_reader.read(a_fragments[buffer][i], stage, i, step);
#pragma unroll
        for (int j = 0; j < NI; ++j) b_reader.read(b_fragments[buffer][j], stage + S::A_BYTES, j, step);
    };

    float sum[MI][2 * NI][4] = {};
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) load(shared + s * S::STAGE_BYTES, int64_t{s} * BK);
    uint32_t reading = shared, writing = shared + (STAGES - 1) * S::STAGE_BYTES;
    const auto next = [&](uint32_t stage) {
        stage += S::STAGE_BYTES;
        return stage == shared + S::SHARED ? shared : stage;
    };
    cp_async_wait<STAGES - 2>();  // the first tile is here,
    __syncthreads();              // from every thread
    fetch(0, reading, 0);

    for (int64_t k0 = 0; k0 < p.K; k0 += BK) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step == STEPS - 1) {
                // The next tile is here. And every warp has fetched its last fragments of this one, which may therefore
                // be overwritten in the next iteration. (Past the last tile, what is fetched is not used.)
                cp_async_wait<STAGES - 2>();
                __syncthreads();
                reading = next(reading);
            }
            fetch((step + 1) % 2, reading, (step + 1) % STEPS);
            if (step == 0) {
                load(writing, k0 + (STAGES - 1) * BK);
                writing = next(writing);
            }
#pragma unroll
            for (int i = 0; i < MI; ++i) {
#pragma unroll
                for (int j = 0; j < 2 * NI; ++j) {
                    const auto& b_pair = b_fragments[step % 2][j / 2];
                    mma(sum[i][j], a_fragments[step % 2][i], b_pair[j % 2 * 2], b_pair[j % 2 * 2 + 1], T{});
                }
            }
        }
    }

    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const int64_t c_offset = int64_t{at.batch} * p.M * p.N;
    const bool pairs = p.N % 2 == 0;  // then every pair of columns that begins at an even one is aligned
#pragma unroll
    for (int j = 0; j < 2 * NI; ++j) {
        const int64_t n = n0 + warp_n + j * 8 + t * 2;
        const auto columns = epilogue.template columns<2>(n, p.N - n);
#pragma unroll
        for (int i = 0; i < 2 * MI; ++i) {
            const int64_t m = m0 + warp_m + i * 8 + g;
            if (m >= p.M) continue;
            const float (&x)[4] = sum[i / 2][j];
            columns.store(c, c_offset + m * p.N + n, {x[i % 2 * 2], x[i % 2 * 2 + 1]}, pairs);
        }
    }
#endif
}

template <typename T, typename S, Layout A_LAYOUT, Layout B_LAYOUT>
__global__ void __launch_bounds__(S::THREADS)
    matmul_mma_kernel(T* c, const T* a, const T* b, __grid_constant__ const Product p) {
    multiply<T, S, A_LAYOUT, B_LAYOUT>(c, a, b, p, Identity{});
}

template <typename T, typename S, Layout LAYOUT>
__global__ void __launch_bounds__(S::THREADS)
    linear_mma_kernel(T* c, const T* a, const T* b, __grid_constant__ const Product p,
                      __grid_constant__ const BiasActivation<T> epilogue) {
    multiply<T, S, LAYOUT, LAYOUT>(c, a, b, p, epilogue);
}

// The gradient of a weight, added up over chunks of rows. Sums of float16 operands are float32.
template <typename T>
using SumOf = std::conditional_t<std::is_same_v<T, half>, float, T>;

template <typename T, typename S, Layout LAYOUT>
__global__ void __launch_bounds__(S::THREADS)
    linear_cross_entropy_chunked_add_mma_kernel(T*, const T* a, const T* b, __grid_constant__ const Product p,
                                                __grid_constant__ const AddTo<SumOf<T>> sums) {
    multiply<T, S, LAYOUT, LAYOUT>(static_cast<T*>(nullptr), a, b, p, sums);
}

// ---- host ----------------------------------------------------------------------------------------------------------

// How an operand can be read: 16 bytes at a time along k or along x, or not. An axis of one element has no stride.
template <typename T>
Layout layout_of(const void* data, int64_t X, int64_t stride_x, int64_t K, int64_t stride_k, const Product& p,
                 const int64_t* batch_strides) {
    const auto aligned = [](int64_t stride) { return stride % Vec<T>::size == 0; };
    bool whole = is_aligned16(data);
    for (int d = 0; d < p.batch_dims; ++d) whole = whole && aligned(batch_strides[d]);
    if (whole && (K == 1 || stride_k == 1) && (X == 1 || aligned(stride_x))) return Layout::ALONG_K;
    if (whole && (X == 1 || stride_x == 1) && (K == 1 || aligned(stride_k))) return Layout::ALONG_X;
    return Layout::GATHERED;
}

template <typename S, auto* KERNEL, typename T, typename... Epilogue>
void launch(T* c, const T* a, const T* b, const Product& p, const Launch& on, const Epilogue&... epilogue) {
    static DeviceSet asked;
    const auto grid = grid_size(p.batches * ceil_div(p.M, S::BM) * ceil_div(p.N, S::BN));
    allow_shared(KERNEL, S::SHARED, on.device, asked);
    KERNEL<<<grid, S::THREADS, S::SHARED, on.stream>>>(c, a, b, p, epilogue...);
}

template <typename T, typename S>
void launch_matmul(T* c, const T* a, const T* b, const Product& p, const Launch& on) {
    const Layout a_layout = layout_of<T>(a, p.M, p.a_m, p.K, p.a_k, p, p.a_batch);
    const Layout b_layout = layout_of<T>(b, p.N, p.b_n, p.K, p.b_k, p, p.b_batch);
    constexpr Layout ALONG_K = Layout::ALONG_K, ALONG_X = Layout::ALONG_X, GATHERED = Layout::GATHERED;
    // An instance takes seconds to compile. Layouts that linear has too take its kernel, with an epilogue that does
    // nothing. Gathered operands, and two transposed ones, have the smaller tiles alone.
    const BiasActivation<T> none{};
    if (a_layout == GATHERED || b_layout == GATHERED) {
        return launch<Small, linear_mma_kernel<T, Small, GATHERED>>(c, a, b, p, on, none);
    }
    if (a_layout == ALONG_K) {
        if (b_layout == ALONG_K) return launch<S, linear_mma_kernel<T, S, ALONG_K>>(c, a, b, p, on, none);
        return launch<S, matmul_mma_kernel<T, S, ALONG_K, ALONG_X>>(c, a, b, p, on);
    }
    if (b_layout == ALONG_K) return launch<Small, matmul_mma_kernel<T, Small, ALONG_X, ALONG_K>>(c, a, b, p, on);
    return launch<S, matmul_mma_kernel<T, S, ALONG_X, ALONG_X>>(c, a, b, p, on);
}

// Checks that this GPU can, and says whether large tiles fit in it and are enough to fill it.
bool large_tiles(const char* op, const Product& p, ScalarType dtype, bool allow_tf32, const Launch& on) {
    KL_CHECK(dtype != ScalarType::Float || allow_tf32, op,
             ": float32 on tensor cores needs tf32, which is not allowed");
    KL_CHECK(device_attribute(cudaDevAttrComputeCapabilityMajor, on.device) >= 8, op,
             ": mma needs compute capability 8.0 or newer");
    const int64_t tiles = p.batches * ceil_div(p.M, Large::BM) * ceil_div(p.N, Large::BN);
    return tiles >= multiprocessors(on.device) / 2 &&
           device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, on.device) >= Large::SHARED;
}

}  // namespace

void multiply_mma(const Call& call, const Tensor& input, const Tensor& other, bool allow_tf32, const char* op) {
    const Product& p = call.product;
    if (p.batches * p.M * p.N == 0) return;
    const Launch on(input);
    const bool large = large_tiles(op, p, input.scalar_type(), allow_tf32, on);
    dispatch(input.scalar_type(), op, [&](auto zero) {
        using T = decltype(zero);
        auto* c = static_cast<T*>(call.output.data_ptr());
        const auto* a = static_cast<const T*>(input.data_ptr());
        const auto* b = static_cast<const T*>(other.data_ptr());
        large ? launch_matmul<T, Large>(c, a, b, p, on) : launch_matmul<T, Small>(c, a, b, p, on);
    });
    KL_LAUNCH_CHECK();
}

Tensor matmul_mma(const Tensor& input, const Tensor& other, bool allow_tf32) {
    const Call call = prepare(input, other);
    multiply_mma(call, input, other, allow_tf32, "matmul");
    return call.output;
}

// Chunks of gradients and inputs both lie along x; other operands are gathered. tf32 has the smaller tiles alone: of two
// operands along x the larger ones spill a register.
void add_mma(const Call& call, const Tensor& input, const Tensor& other, bool allow_tf32, const char* op) {
    const Product& p = call.product;
    if (p.batches * p.M * p.N == 0) return;
    const Launch on(input);
    const bool large = large_tiles(op, p, input.scalar_type(), allow_tf32, on);
    dispatch(input.scalar_type(), op, [&](auto zero) {
        using T = decltype(zero);
        const AddTo<SumOf<T>> sums{static_cast<SumOf<T>*>(call.output.data_ptr())};
        const auto* a = static_cast<const T*>(input.data_ptr());
        const auto* b = static_cast<const T*>(other.data_ptr());
        T* const none = nullptr;
        constexpr Layout ALONG_X = Layout::ALONG_X, GATHERED = Layout::GATHERED;
        if (layout_of<T>(a, p.M, p.a_m, p.K, p.a_k, p, p.a_batch) != ALONG_X ||
            layout_of<T>(b, p.N, p.b_n, p.K, p.b_k, p, p.b_batch) != ALONG_X) {
            return launch<Small, linear_cross_entropy_chunked_add_mma_kernel<T, Small, GATHERED>>(none, a, b, p, on,
                                                                                                  sums);
        }
        if constexpr (sizeof(T) == 2) {
            if (large) {
                return launch<Large, linear_cross_entropy_chunked_add_mma_kernel<T, Large, ALONG_X>>(none, a, b, p, on,
                                                                                                     sums);
            }
        }
        launch<Small, linear_cross_entropy_chunked_add_mma_kernel<T, Small, ALONG_X>>(none, a, b, p, on, sums);
    });
    KL_LAUNCH_CHECK();
}

// Input and weight along k, as a layer has them; anything else is gathered, by the smaller tiles alone.
std::tuple<Tensor, Tensor> linear_mma(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                      const std::string& activation, bool keep, bool allow_tf32) {
    const LinearCall call = prepare_linear(input, weight, bias, activation, keep);
    const Product& p = call.product;
    if (p.batches * p.M * p.N == 0) return call.outputs();
    const Launch on(input);
    const bool large = large_tiles("linear", p, input.scalar_type(), allow_tf32, on);
    dispatch(input.scalar_type(), "linear", [&](auto zero) {
        using T = decltype(zero);
        auto* c = static_cast<T*>(call.output.data_ptr());
        const auto* a = static_cast<const T*>(input.data_ptr());
        const auto* b = static_cast<const T*>(weight.data_ptr());
        const auto epilogue = call.epilogue<T>();
        if (layout_of<T>(a, p.M, p.a_m, p.K, p.a_k, p, p.a_batch) != Layout::ALONG_K ||
            layout_of<T>(b, p.N, p.b_n, p.K, p.b_k, p, p.b_batch) != Layout::ALONG_K) {
            launch<Small, linear_mma_kernel<T, Small, Layout::GATHERED>>(c, a, b, p, on, epilogue);
        } else if (large) {
            launch<Large, linear_mma_kernel<T, Large, Layout::ALONG_K>>(c, a, b, p, on, epilogue);
        } else {
            launch<Small, linear_mma_kernel<T, Small, Layout::ALONG_K>>(c, a, b, p, on, epilogue);
        }
    });
    KL_LAUNCH_CHECK();
    return call.outputs();
}

void matmul_mma_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    constexpr Layout ALONG_K = Layout::ALONG_K, ALONG_X = Layout::ALONG_X;
    dispatch(dtype, "matmul", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(kernel_attributes<matmul_mma_kernel<T, Large, ALONG_K, ALONG_X>>(
            "matmul.mma", Large::THREADS, Large::SHARED));
        attributes.push_back(kernel_attributes<matmul_mma_kernel<T, Small, ALONG_K, ALONG_X>>(
            "matmul.mma small", Small::THREADS, Small::SHARED));
        attributes.push_back(kernel_attributes<linear_cross_entropy_chunked_add_mma_kernel<T, Small, ALONG_X>>(
            "linear_cross_entropy.chunked (add, mma small)", Small::THREADS, Small::SHARED));
        if constexpr (sizeof(T) == 2) {
            attributes.push_back(kernel_attributes<linear_cross_entropy_chunked_add_mma_kernel<T, Large, ALONG_X>>(
                "linear_cross_entropy.chunked (add, mma)", Large::THREADS, Large::SHARED));
        }
    });
}

void linear_mma_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "linear", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(kernel_attributes<linear_mma_kernel<T, Large, Layout::ALONG_K>>(
            "linear.mma", Large::THREADS, Large::SHARED));
        attributes.push_back(kernel_attributes<linear_mma_kernel<T, Small, Layout::ALONG_K>>(
            "linear.mma small", Small::THREADS, Small::SHARED));
    });
}

}  // namespace kl
