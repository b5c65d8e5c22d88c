// matmul, fifth step; the table of the climb stands in matmul.cuh.
//
//   mma        tensor cores, fed by a cp.async pipeline and ldmatrix       mma.sync itself: Hopper's full rate needs wgmma
//
// A block makes BM×BN outputs and walks K in tiles of 128 bytes. Three tiles of each operand lie in shared memory: one is
// multiplied while cp.async fills the others, past the registers. A warp's share is held in registers as 16×8 squares;
// ldmatrix brings the next fragments while the tensor cores work on these.
//
// A tile has the operand's own orientation, so that 16 bytes stay 16 bytes all the way: [x][k] where memory runs along k,
// [k][x] where it runs along x (x = m or n), which ldmatrix transposes on its way to the registers. Operands that cannot
// be copied 16 bytes at a time (odd leading dimension, no stride of 1) are gathered element by element, into [x][k].

#include "matmul.cuh"
#include "mma.cuh"

namespace kl {
namespace {

enum class Layout { ALONG_K, ALONG_X, GATHERED };

constexpr int STAGES = 3;
constexpr int TILE_BYTES = 128;  // of k, per row of A or column of B
constexpr int STEP_BYTES = 32;   // of k, per mma
constexpr int STEPS = TILE_BYTES / STEP_BYTES;
constexpr int CHUNK = 16;        // bytes: what one cp.async and one row of ldmatrix move

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

// One operand's tile in shared memory: WIDTH of x by 128 bytes of k.
template <typename T, Layout LAYOUT, int WIDTH, int THREADS>
struct Tile {
    static constexpr bool ALONG_X = LAYOUT == Layout::ALONG_X;
    static constexpr int BK = TILE_BYTES / sizeof(T);
    static constexpr int E = CHUNK / sizeof(T);  // elements per chunk
    [[maybe_unused]] static constexpr int ROWS = ALONG_X ? BK : WIDTH, CHUNKS = (ALONG_X ? WIDTH : BK) / E;  // per row

    // Chunks trade places within their row, so that what is read together lies in different banks: ldmatrix reads one
    // chunk column of 8 rows, and the tf32 path, that has no transposing ldmatrix, two chunks of 4 rows.
    __device__ static uint32_t offset(int row, int chunk) {
        const int mixed = ALONG_X && sizeof(T) == 4 ? chunk ^ (row % 4 * 2) : chunk ^ (row % 8);
        return (row * CHUNKS + mixed) * CHUNK;
    }

    const T* source;             // element (x0, k = 0)
    int64_t stride_x, stride_k;  // elements
    int x_left;                  // of the operand from x0 on, at most WIDTH

    // Copies the tile that begins at k0, of which k_left elements (at most BK) are inside. Outside stand zeros.
    __device__ void load(uint32_t shared, int64_t k0, int k_left) const {
        if constexpr (LAYOUT == Layout::GATHERED) {
            gather(shared, k0, k_left);
        } else {
            constexpr int STEP = THREADS / CHUNKS;  // rows that the block copies at once
            static_assert(THREADS % CHUNKS == 0 && ROWS % STEP == 0);
            const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
            const int rows_left = (ALONG_X ? k_left : x_left) - row;
            const int columns_left = (ALONG_X ? x_left : k_left) - chunk * E;
            const int bytes = min(max(columns_left, 0) * static_cast<int>(sizeof(T)), CHUNK);
            const int64_t pitch = ALONG_X ? stride_k : stride_x;
            const T* p = source + k0 * stride_k + row * pitch + chunk * E;
#pragma unroll
            for (int i = 0; i < ROWS / STEP; ++i) {
                const int inside = i * STEP < rows_left ? bytes : 0;
                // Where nothing is read, the address still is one inside the operand.
                cp_async16(shared + offset(row + i * STEP, chunk), inside > 0 ? p : source, inside);
                p += STEP * pitch;
            }
        }
    }

    __device__ void gather(uint32_t shared, int64_t k0, int k_left) const {
        const T* p = source + k0 * stride_k;
        const bool along_k = stride_k <= stride_x;  // lanes run along the axis in which memory lies closer together
#pragma unroll 2
        for (int i = threadIdx.x; i < WIDTH * CHUNKS; i += THREADS) {
            const int x = along_k ? i / CHUNKS : i % WIDTH, chunk = along_k ? i % CHUNKS : i / WIDTH;
            Vec<T> v;
#pragma unroll
            for (int e = 0; e < E; ++e) {
                const int k = chunk * E + e;
                v[e] = x < x_left && k < k_left ? p[x * stride_x + k * stride_k] : from_float<T>(0.0f);
            }
            store_shared16(shared + offset(x, chunk), *reinterpret_cast<const uint4*>(&v));
        }
    }

    // The fragment of 16 x, from x on, at one step of k, in mma's order for A: of the four 8×(16 bytes) squares, first x,
    // then k. For B, which wants two fragments of 8 columns, the order is first k, then x.
    template <bool IS_A>
    __device__ static void fragment(uint32_t (&r)[4], uint32_t shared, int x, int step) {
        const int lane = threadIdx.x % WARP;
        // Lanes 8i … 8i + 7 name the rows of square i. Its place among the four:
        const int low = lane / 8 % 2, high = lane / 16;
        const int x_square = IS_A ? low : high, k_square = IS_A ? high : low;
        if constexpr (!ALONG_X) {
            ldmatrix(r, shared + offset(x + x_square * 8 + lane % 8, step * 2 + k_square));
        } else if constexpr (sizeof(T) == 2) {
            ldmatrix_transposed(r, shared + offset(step * 16 + k_square * 8 + lane % 8, x / E + x_square));
        } else {
            const int g = lane / 4, t = lane % 4;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = x + (IS_A ? i % 2 : i / 2) * 8 + g, k = step * 8 + (IS_A ? i / 2 : i % 2) * 4 + t;
                r[i] = load_shared(shared + offset(k, column / E) + column % E * 4);
            }
        }
        round_to_operand<T>(r);
    }
};

// Which tile of the output this block makes. Blocks that run together should share rows of A and columns of B in L2:
// tiles are numbered down a group of rows before the next column is begun.
template <typename S>
__device__ void block_tile(const Product& p, int64_t* batch, int64_t* m0, int64_t* n0) {
    const int64_t tiles_m = ceil_div(p.M, S::BM), tiles_n = ceil_div(p.N, S::BN);
    *batch = blockIdx.x / (tiles_m * tiles_n);
    const int64_t within = blockIdx.x % (tiles_m * tiles_n);
    const int64_t group = within / (S::GROUP * tiles_n), in_group = within % (S::GROUP * tiles_n);
    const int64_t rows = min(tiles_m - group * S::GROUP, int64_t{S::GROUP});
    *m0 = (group * S::GROUP + in_group % rows) * S::BM;
    *n0 = in_group / rows * S::BN;
}

template <typename T, typename S, Layout A_LAYOUT, Layout B_LAYOUT>
__global__ void __launch_bounds__(S::THREADS) matmul_mma_kernel(T* c, const T* a, const T* b, Product p) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    const uint32_t shared = shared_address(shared_bytes);
    using ATile = Tile<T, A_LAYOUT, S::BM, S::THREADS>;
    using BTile = Tile<T, B_LAYOUT, S::BN, S::THREADS>;
    constexpr int BK = ATile::BK, MI = S::WM / 16, NI = S::WN / 16;

    int64_t batch, m0, n0, a_offset, b_offset;
    block_tile<S>(p, &batch, &m0, &n0);
    p.batch_offsets(batch, &a_offset, &b_offset);
    const ATile a_tile{a + a_offset + m0 * p.a_m, p.a_m, p.a_k, static_cast<int>(min(p.M - m0, int64_t{S::BM}))};
    const BTile b_tile{b + b_offset + n0 * p.b_n, p.b_n, p.b_k, static_cast<int>(min(p.N - n0, int64_t{S::BN}))};

    // One group per tile and turn, empty past the end, so that counting groups counts tiles.
    const auto load = [&](uint32_t stage, int64_t k0) {
        if (k0 < p.K) {
            const int k_left = static_cast<int>(min(p.K - k0, int64_t{BK}));
            a_tile.load(stage, k0, k_left);
            b_tile.load(stage + S::A_BYTES, k0, k_left);
        }
        cp_async_commit();
    };
    const int warp = threadIdx.x / WARP, warp_m = warp / S::WARPS_N * S::WM, warp_n = warp % S::WARPS_N * S::WN;
    uint32_t a_fragments[2][MI][4], b_fragments[2][NI][4];
    const auto fetch = [&](int buffer, uint32_t stage, int step) {
#pragma unroll
        for (int i = 0; i < MI; ++i) {
            ATile::template fragment<true>(a_fragments[buffer][i], stage, warp_m + i * 16, step);
        }
#pragma unroll
        for (int j = 0; j < NI; ++j) {
            BTile::template fragment<false>(b_fragments[buffer][j], stage + S::A_BYTES, warp_n + j * 16, step);
        }
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
                // be overwritten in the next turn. (Past the last tile, what is fetched is not used.)
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
    c += batch * p.M * p.N;
    const bool pairs = p.N % 2 == 0;  // then every pair of columns that begins at an even one is aligned
#pragma unroll
    for (int i = 0; i < 2 * MI; ++i) {
        const int64_t m = m0 + warp_m + i * 8 + g;
        if (m >= p.M) continue;
#pragma unroll
        for (int j = 0; j < 2 * NI; ++j) {
            const int64_t n = n0 + warp_n + j * 8 + t * 2;
            struct alignas(2 * sizeof(T)) Pair {
                T first, second;
            } out{from_float<T>(sum[i / 2][j][i % 2 * 2]), from_float<T>(sum[i / 2][j][i % 2 * 2 + 1])};
            if (pairs && n < p.N) {
                *reinterpret_cast<Pair*>(c + m * p.N + n) = out;
            } else {
                if (n < p.N) c[m * p.N + n] = out.first;
                if (n + 1 < p.N) c[m * p.N + n + 1] = out.second;
            }
        }
    }
#endif
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

template <typename T, typename S, Layout A_LAYOUT, Layout B_LAYOUT>
void launch(T* c, const T* a, const T* b, const Product& p, cudaStream_t stream) {
    const auto grid = grid_size(p.batches * ceil_div(p.M, S::BM) * ceil_div(p.N, S::BN));
    auto* kernel = matmul_mma_kernel<T, S, A_LAYOUT, B_LAYOUT>;
    // More than 48 KiB of shared memory must be asked for, on each device.
    KL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED));
    kernel<<<grid, S::THREADS, S::SHARED, stream>>>(c, a, b, p);
}

template <typename T, typename S>
void launch(T* c, const T* a, const T* b, const Product& p, cudaStream_t stream) {
    const Layout a_layout = layout_of<T>(a, p.M, p.a_m, p.K, p.a_k, p, p.a_batch);
    const Layout b_layout = layout_of<T>(b, p.N, p.b_n, p.K, p.b_k, p, p.b_batch);
    constexpr Layout ALONG_K = Layout::ALONG_K, ALONG_X = Layout::ALONG_X, GATHERED = Layout::GATHERED;
    if (a_layout == GATHERED || b_layout == GATHERED) return launch<T, S, GATHERED, GATHERED>(c, a, b, p, stream);
    if (a_layout == ALONG_K) {
        if (b_layout == ALONG_K) return launch<T, S, ALONG_K, ALONG_K>(c, a, b, p, stream);
        return launch<T, S, ALONG_K, ALONG_X>(c, a, b, p, stream);
    }
    if (b_layout == ALONG_K) return launch<T, S, ALONG_X, ALONG_K>(c, a, b, p, stream);
    return launch<T, S, ALONG_X, ALONG_X>(c, a, b, p, stream);
}

int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    KL_CUDA_CHECK(cudaGetDevice(&device));
    KL_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
    return value;
}

}  // namespace

Tensor matmul_mma(const Tensor& input, const Tensor& other, bool allow_tf32) {
    auto [p, output] = prepare(input, other);
    STD_TORCH_CHECK(input.scalar_type() != ScalarType::Float || allow_tf32,
                    "matmul: float32 on tensor cores needs tf32, which is not allowed");
    if (output.numel() == 0) return output;
    const Launch on(input);
    STD_TORCH_CHECK(device_attribute(cudaDevAttrComputeCapabilityMajor) >= 8,
                    "matmul: mma needs compute capability 8.0 or newer");
    const int64_t large_tiles = p.batches * ceil_div(p.M, Large::BM) * ceil_div(p.N, Large::BN);
    const bool large = large_tiles >= device_attribute(cudaDevAttrMultiProcessorCount) / 2 &&
                       device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= Large::SHARED;
    dispatch(input.scalar_type(), "matmul", [&, &p = p, &output = output](auto zero) {
        using T = decltype(zero);
        auto* c = static_cast<T*>(output.data_ptr());
        const auto* a = static_cast<const T*>(input.data_ptr());
        const auto* b = static_cast<const T*>(other.data_ptr());
        large ? launch<T, Large>(c, a, b, p, on.stream) : launch<T, Small>(c, a, b, p, on.stream);
    });
    KL_LAUNCH_CHECK();
    return output;
}

void matmul_mma_facts(std::vector<KernelFacts>& facts) {
    constexpr Layout ALONG_K = Layout::ALONG_K, ALONG_X = Layout::ALONG_X;
    facts.push_back(kernel_facts("matmul.mma", matmul_mma_kernel<bfloat16, Large, ALONG_K, ALONG_X>, Large::THREADS,
                                 Large::SHARED));
    facts.push_back(kernel_facts("matmul.mma small", matmul_mma_kernel<bfloat16, Small, ALONG_K, ALONG_X>,
                                 Small::THREADS, Small::SHARED));
}

}  // namespace kl
