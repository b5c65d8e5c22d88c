// matmul, rung 10 of 16: registers_tma
// Idea      `registers` for float32 on Hopper, with tiles loaded by TMA: one thread asks for tiles of 32 k, and no
//           thread copies.
// Predicts  94 of 100 instructions are multiply-adds.
// Limit now The rate of the float32 units, and their register banks.
// Next      Tensor cores round float32 to tf32: `wgmma` and the rungs after it take float32 only where that is allowed.
//
// As in `registers`, a thread makes 8x16 outputs, a block of 128 threads 128x128, and two blocks share an SM. Each
// register is in one of two banks, by its parity, and two operands of one bank delay the next instruction. So rows are
// walked back and forth, as CUTLASS walks quads of outputs (include/cutlass/gemm/thread/mma_sm50.h). Each multiply-add
// shares one operand with the one before, which stays in the operand cache. Its two others are a column's value and its
// sum. The compiler chooses their registers from different banks if nothing else binds the sums. So sums leave through
// shared memory, one by one.
//
// "Rows" are the operand with 8 values per thread. "Columns" are the operand with 16, which must lie along its x (m or
// n). Rows may also lie along k: a thread then reads four k of each of its rows at once. Where A lies along m and B
// along k, B is the rows, and the product is written transposed. Where both lie along k, the smaller is first copied to
// lie along x. The host code in cuda_impl/matmul.py refuses products that are not worth that copy, and copies over 64
// MiB.

#include "matmul/hopper.cuh"

namespace kl {
namespace {

namespace registers_tma {
constexpr int BLOCK = 128, BK = 32, STAGES = 3, WARPS = 4, BLOCK_THREADS = WARPS * WARP;
constexpr int TILE_BYTES = BLOCK * BK * static_cast<int>(sizeof(float)), STAGE_BYTES = 2 * TILE_BYTES;
// Two barriers per stage: `full`, its tiles have arrived; `empty`, every warp has read them.
constexpr int SHARED = STAGES * STAGE_BYTES + SWIZZLE_ATOM + 2 * STAGES * 8;
// Along x a tile is panels: 32 k, each a row of 32 x. Along k it is one box: 128 x, each a row of 32 k.
constexpr int PANEL_COLUMNS = SWIZZLE_ROW / sizeof(float);
constexpr int PANEL = BK * SWIZZLE_ROW;
static_assert(BLOCK / PANEL_COLUMNS * PANEL == TILE_BYTES);
constexpr int PITCH = BLOCK + 4;  // of the outputs, in floats: rows begin at multiples of 16 bytes
static_assert(BLOCK * PITCH * sizeof(float) <= STAGES * STAGE_BYTES, "outputs lie where tiles were");
}  // namespace registers_tma

// Which of a block's outputs a thread computes. A warp computes 64×64, with its lanes arranged 8×4 (registers.cu).
// Columns are runs of four, 16 apart. Rows are 8 apart where they lie along k, else two runs of four, 32 apart.
template <bool ROWS_ALONG_K>
struct Place {
    const uint32_t m_warp = threadIdx.x / WARP / 2, n_warp = threadIdx.x / WARP % 2;
    const uint32_t m_lane = threadIdx.x % WARP / 2 % 8, n_lane = threadIdx.x % 2 + threadIdx.x % WARP / 16 * 2;

    __device__ uint32_t row(int i) const {
        return m_warp * 64 + (ROWS_ALONG_K ? m_lane + i * 8 : m_lane * 4 + i / 4 * 32 + i % 4);
    }
    __device__ uint32_t column(int j) const { return n_warp * 64 + n_lane * 4 + j / 4 * 16 + j % 4; }
};

#if KL_SM90A
__device__ __forceinline__ void load_shared(float* to, uint32_t from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "r"(from));
}
__device__ __forceinline__ void store_shared(uint32_t to, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

// Inline PTX: the compiler would move fmaf past the branch of keep_apart.
__device__ __forceinline__ void multiply_add(float& sum, float a, float b) {
    asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(sum) : "f"(a), "f"(b));
}

// Inline PTX: the compiler would recompute a sum of constants, with fewer registers and more instructions.
__device__ __forceinline__ void advance(uint32_t& address, int by) {
    asm volatile("add.s32 %0, %0, %1;" : "+r"(address) : "r"(by));
}

// A scheduling barrier for the compiler: a branch over a loop that never runs, since K is never negative. Without it
// the compiler mixes the multiply-adds of several k, which costs registers and puts operands in one bank. A body
// without a loop would be removed from the second use on, and a single instruction would be predicated instead of
// branched over.
__device__ __forceinline__ void keep_apart(int K) {
    asm volatile(
        "{\n.reg .pred usual, early;\n.reg .u32 now;\n"
        "setp.ge.s32 usual, %0, 0;\n@usual bra ON;\n"
        "WAIT: nanosleep.u32 20;\nmov.u32 now, %%clock;\nsetp.lt.u32 early, now, 5;\n@early bra WAIT;\n"
        "ON:\n}" ::"r"(K));
}

template <bool ALONG_K>
__device__ inline void load_operand(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x, int k,
                                    int batch) {
    using namespace registers_tma;
    if constexpr (ALONG_K) {
        tma_load(shared, map, barrier, k, x, batch);
    } else {
#pragma unroll
        for (int i = 0; i < BLOCK / PANEL_COLUMNS; ++i) {
            tma_load(shared + i * PANEL, map, barrier, x + i * PANEL_COLUMNS, k, batch);
        }
    }
}

// Stores a block's outputs at (m0, n0) of an M×N matrix, or TRANSPOSED of an N×M one. Through shared memory, a warp
// stores whole rows, and no four sums need consecutive registers.
template <typename Place, bool TRANSPOSED>
__device__ inline void store_block(float* c, const float (&sum)[8][16], const Place& place, uint32_t shared, int M,
                                   int N, int m0, int n0) {
    using namespace registers_tma;
    __syncthreads();  // every thread has read its last values
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const uint32_t m = place.row(i), n = place.column(j);
            store_shared(shared + (TRANSPOSED ? n * PITCH + m : m * PITCH + n) * sizeof(float), sum[i][j]);
        }
    }
    __syncthreads();
    const int rows = TRANSPOSED ? N - n0 : M - m0, row0 = TRANSPOSED ? n0 : m0, columns = TRANSPOSED ? M : N;
    const bool quads = columns % 4 == 0;  // then every run of four columns that begins at a multiple of 4 is aligned
    const int within = threadIdx.x % WARP * 4, column = (TRANSPOSED ? m0 : n0) + within;
    for (int row = threadIdx.x / WARP; row < min(BLOCK, rows); row += WARPS) {
        float x[4];
        load_shared(x, shared + (row * PITCH + within) * sizeof(float));
        float* const to = c + int64_t{row0 + row} * columns + column;
        if (quads && column < columns) {
            *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (column + e < columns) to[e] = x[e];
            }
        }
    }
}
#endif

// The product of `from.a`, M rows, and `from.b`, N columns. TRANSPOSED: it is written as an N×M matrix.
template <typename T, bool ROWS_ALONG_K, bool TRANSPOSED>
__global__ void __launch_bounds__(registers_tma::BLOCK_THREADS, 2)
    matmul_registers_tma_kernel(T* c, const __grid_constant__ TmaOperands from, Tiled p, TileRaster order) {
#if KL_SM90A
    using namespace registers_tma;
    const uint32_t tiles = aligned_shared(), full = tiles + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        PipelineState<STAGES>::init(full, empty, 1, WARPS);
        mbarrier_init_fence();
        from.prefetch();
    }
    __syncthreads();
    int batch, tile_m, tile_n;
    order.at(blockIdx.x, &batch, &tile_m, &tile_n);
    const int m0 = tile_m * BLOCK, n0 = tile_n * BLOCK, k_tiles = static_cast<int>(ceil_div(p.K, BK));
    const auto load = [&](int tile, int s) {
        const uint32_t stage = tiles + s * STAGE_BYTES, barrier = full + s * 8;
        mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);
        load_operand<ROWS_ALONG_K>(stage, from.a, barrier, m0, tile * BK, batch * p.a_step);
        load_operand<false>(stage + TILE_BYTES, from.b, barrier, n0, tile * BK, batch * p.b_step);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < min(STAGES, k_tiles); ++i) load(i, i);
    }

    const Place<ROWS_ALONG_K> place;
    const uint32_t m_lane = place.m_lane;
    // Addresses of a thread's values for each k of eight, or of four, in the swizzled layout. Computed once, then
    // incremented.
    uint32_t a_at[8], b_at[4];
    for (int k = 0; k < 8; ++k) a_at[k] = tiles + place.m_warp * 2 * PANEL + swizzled(k, m_lane);
    for (int k = 0; k < 4; ++k) b_at[k] = tiles + TILE_BYTES + place.n_warp * 2 * PANEL + (place.n_lane ^ k) * 16;
    float sum[8][16] = {};
    // Values of this k and of the next; four k of each row where rows lie along k. They start as zeros: see below.
    float a[2][8] = {}, a4[8][4] = {}, b[2][16] = {};

    // Multiplies one k. Rows that lie along k are reloaded from `next` right after their fourth k.
    const auto multiply = [&](int k, bool reload, uint32_t next) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float x = ROWS_ALONG_K ? a4[i][k % 4] : a[k % 2][i];
#pragma unroll
            for (int step = 0; step < 16; ++step) {
                const int j = i % 2 == 0 ? step : 15 - step;
                multiply_add(sum[i][j], x, b[k % 2][j]);
            }
            if (ROWS_ALONG_K && reload) load_shared(a4[i], next + i * 8 * SWIZZLE_ROW);
        }
    };

    // Software pipeline: the last k of eight is multiplied while the first of the next eight is loaded. So an iteration
    // starts with the last k of the previous one (the first iteration with zeros), and one k is left at the end.
    PipelineState<STAGES> reading, refilled;
#pragma unroll 1
    for (int tile = 0; tile < k_tiles; ++tile) {
        if (tile > 0) {
            __syncwarp();
            if (threadIdx.x % WARP == 0) mbarrier_arrive(empty + reading.stage * 8);
            reading.advance();
        }
        // Refills the stage before the last, since other warps may be a tile behind. The warps, one on each of the SM's
        // four schedulers, alternate. If one warp did it always, its scheduler would fall behind, and all others would
        // wait.
        if (tile > 1 && tile + 1 < k_tiles) {
            if (threadIdx.x == tile % WARPS * WARP) {
                mbarrier_wait(empty + refilled.stage * 8, refilled.phase);
                load(tile + 1, refilled.stage);
            }
            refilled.advance();
        }
        mbarrier_wait(full + reading.stage * 8, reading.phase);
        const uint32_t rows = tiles + reading.stage * STAGE_BYTES + place.row(0) * SWIZZLE_ROW;
        if (tile > 0) {  // from the end of one stage's tiles to where the next one's begin
            const int by = (reading.stage == 0 ? 1 - STAGES : 1) * STAGE_BYTES - BK * SWIZZLE_ROW;
            for (uint32_t& at : b_at) at += by;
            for (uint32_t& at : a_at) at += by;
        }
#pragma unroll 1
        for (int eight = 0; eight < BK / 8; ++eight) {
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                if (ROWS_ALONG_K && k > 0) keep_apart(p.K);
                if constexpr (!ROWS_ALONG_K) {
                    load_shared(a[k % 2], a_at[k]);
                    load_shared(a[k % 2] + 4, a_at[k] + PANEL);
                    advance(a_at[k], 8 * SWIZZLE_ROW);
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const uint32_t half = (j % 2 ^ k / 4) * 64;  // of the panel's row
                    load_shared(b[k % 2] + 4 * j, b_at[k % 4] + j / 2 * PANEL + k * SWIZZLE_ROW + half);
                }
                if (k >= 4) advance(b_at[k % 4], 8 * SWIZZLE_ROW);
                multiply((k + 7) % 8, k % 4 == 0, rows + ((eight * 2 + k / 4) ^ m_lane) * 16);
            }
        }
    }
    multiply(7, false, 0);
    store_block<Place<ROWS_ALONG_K>, TRANSPOSED>(c + batch * p.c_batch, sum, place, tiles, p.M, p.N, m0, n0);
#endif
}

// ---- both operands along k -----------------------------------------------------------------------------------------

constexpr int SIDE = 32, TRANSPOSE_THREADS = 256;

// (batches, X, K), along k → (batches, K, X), `to_step` from one k to the next: a square of both a block.
template <typename T>
__global__ void __launch_bounds__(TRANSPOSE_THREADS)
    matmul_registers_tma_transpose_kernel(T* to, const T* from, int X, int K, int64_t x_step, int64_t batch_step,
                                          int64_t to_step) {
    __shared__ T square[SIDE][SIDE + 1];
    const int lane = threadIdx.x % SIDE, first = threadIdx.x / SIDE;
    const unsigned squares_k = (K - 1) / SIDE + 1, squares = squares_k * ((X - 1) / SIDE + 1);
    const unsigned batch = blockIdx.x / squares, at = blockIdx.x - batch * squares;
    const int x0 = at / squares_k * SIDE, k0 = at % squares_k * SIDE;
    from += batch * batch_step;
    to += batch * (K * to_step);
#pragma unroll
    for (int i = first; i < SIDE; i += TRANSPOSE_THREADS / SIDE) {
        if (x0 + i < X && k0 + lane < K) square[i][lane] = from[(x0 + i) * x_step + k0 + lane];
    }
    __syncthreads();
#pragma unroll
    for (int i = first; i < SIDE; i += TRANSPOSE_THREADS / SIDE) {
        if (k0 + i < K && x0 + lane < X) to[(k0 + i) * to_step + x0 + lane] = square[lane][i];
    }
}

// ---- host ----------------------------------------------------------------------------------------------------------

// One operand: X rows or columns. Whether TMA can read it, along k or along x.
struct Operand {
    const void* data;
    int64_t X, stride_x, stride_k, batch_stride;

    bool describe(bool along_k, int64_t K, int64_t batches, TmaTensor* tensor) const {
        using namespace registers_tma;
        *tensor = {ScalarType::Float, 3, data};
        tensor->exact = true;
        const int of_k = along_k ? 0 : 1, of_x = 1 - of_k;  // where k and x stand
        tensor->sizes[of_k] = K, tensor->strides[of_k] = stride_k, tensor->box[of_k] = BK;
        tensor->sizes[of_x] = X, tensor->strides[of_x] = stride_x, tensor->box[of_x] = along_k ? BLOCK : PANEL_COLUMNS;
        // TMA has no stride of zero: the kernel stays at batch 0.
        tensor->sizes[2] = batch_stride == 0 ? 1 : batches, tensor->strides[2] = batch_stride, tensor->box[2] = 1;
        return tma_can_address(*tensor);
    }

    int64_t copies(int64_t batches) const { return batch_stride == 0 ? 1 : batches; }
    int64_t transposed_step() const { return ceil_div(X, 4) * 4; }  // rows begin at multiples of 16 bytes
    int64_t transposed_elements(int64_t K, int64_t batches) const { return copies(batches) * K * transposed_step(); }

    // The same operand along x, in memory that has room for it.
    Operand transposed(float* to, int64_t K, int64_t batches, const Launch& on) const {
        const int64_t blocks = copies(batches) * ceil_div(X, SIDE) * ceil_div(K, SIDE);
        matmul_registers_tma_transpose_kernel<float><<<grid_size(blocks), TRANSPOSE_THREADS, 0, on.stream>>>(
            to, static_cast<const float*>(data), static_cast<int>(X), static_cast<int>(K), stride_x, batch_stride,
            transposed_step());
        return {to, X, 1, transposed_step(), batch_stride == 0 ? 0 : K * transposed_step()};
    }
};

template <bool ROWS_ALONG_K, bool TRANSPOSED>
void launch(float* c, const TmaTensor& rows, const TmaTensor& columns, const Tiled& p, const Launch& on) {
    using namespace registers_tma;
    static DeviceSet asked;
    const TileRaster order = tile_order(p, BLOCK, BLOCK);
    launch_hopper(matmul_registers_tma_kernel<float, ROWS_ALONG_K, TRANSPOSED>, "matmul.registers_tma",
                  {tile_count(order, p), 1, BLOCK_THREADS, SHARED}, on, asked, c,
                  TmaOperands{tensor_map(rows), tensor_map(columns)}, p, order);
}

// The product in numbers of 32 bits: `rows` and `columns` are A and B, or B and A where it is written transposed.
Tiled tiled(const Product& p, const Operand& rows, const Operand& columns) {
    return {static_cast<int>(rows.X),
            static_cast<int>(columns.X),
            static_cast<int>(p.K),
            static_cast<int>(p.batches),
            rows.batch_stride != 0,
            columns.batch_stride != 0,
            p.M * p.N,
            p.N};
}

}  // namespace

Tensor matmul_registers_tma(const Tensor& input, const Tensor& other) {
    const auto [p, output] = prepare(input, other);
    KL_CHECK(input.scalar_type() == ScalarType::Float, "matmul: registers_tma takes float32");
    KL_CHECK(is_hopper(input.get_device_index()), "matmul: registers_tma needs a GPU of compute capability 9.0");
    KL_CHECK(p.K > 0 && p.batch_dims <= 1 && std::max({p.M, p.N, p.K, p.batches}) <= TMA_LARGEST_SIZE,
             "matmul: registers_tma takes batches of one stride, and sizes from 1 to 2^31 - 1024");
    if (p.batches * p.M * p.N == 0) return output;
    const Launch on(input);
    auto* const c = static_cast<float*>(output.data_ptr());
    const bool batched = p.batch_dims > 0;
    const Operand A{input.data_ptr(), p.M, p.a_m, p.a_k, batched ? p.a_batch[0] : 0};
    const Operand B{other.data_ptr(), p.N, p.b_n, p.b_k, batched ? p.b_batch[0] : 0};
    TmaTensor rows, columns;
    if (B.describe(false, p.K, p.batches, &columns)) {
        if (A.describe(true, p.K, p.batches, &rows)) {
            launch<true, false>(c, rows, columns, tiled(p, A, B), on);
            return output;
        }
        if (A.describe(false, p.K, p.batches, &rows)) {
            launch<false, false>(c, rows, columns, tiled(p, A, B), on);
            return output;
        }
    } else if (A.describe(false, p.K, p.batches, &columns) && B.describe(true, p.K, p.batches, &rows)) {
        launch<true, true>(c, rows, columns, tiled(p, B, A), on);
        return output;
    }
    KL_CHECK(A.describe(true, p.K, p.batches, &rows) && B.describe(true, p.K, p.batches, &rows),
             "matmul: registers_tma takes operands that TMA can read");
    const bool of_a = A.transposed_elements(p.K, p.batches) < B.transposed_elements(p.K, p.batches);
    const Operand &smaller = of_a ? A : B, &larger = of_a ? B : A;
    const Tensor memory = empty(output, ScalarType::Float, {smaller.transposed_elements(p.K, p.batches)});
    const Operand copy = smaller.transposed(static_cast<float*>(memory.data_ptr()), p.K, p.batches, on);
    KL_LAUNCH_CHECK();
    KL_CHECK(copy.describe(false, p.K, p.batches, &columns) && larger.describe(true, p.K, p.batches, &rows),
             "matmul: a copy of an operand cannot be described");
    of_a ? launch<true, true>(c, rows, columns, tiled(p, B, copy), on)
         : launch<true, false>(c, rows, columns, tiled(p, A, copy), on);
    return output;
}

void matmul_registers_tma_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    using namespace registers_tma;
    if (dtype != ScalarType::Float) return;
    attributes.push_back(kernel_attributes<matmul_registers_tma_kernel<float, true, false>>("matmul.registers_tma",
                                                                                            BLOCK_THREADS, SHARED));
    attributes.push_back(kernel_attributes<matmul_registers_tma_transpose_kernel<float>>(
        "matmul.registers_tma transpose", TRANSPOSE_THREADS));
}

}  // namespace kl
