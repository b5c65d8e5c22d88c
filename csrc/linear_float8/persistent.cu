// linear_float8, rung 2 of 2: persistent
// Idea      matmul's `persistent` with float8 operands: twice the products of 16 bits in the same stages. Each stage's
//           128 products are added to float32 sums, because the tensor cores keep 13 bits of theirs.
// Predicts  Twice the rate of 16 bits, less the additions: 128 of a warpgroup's 1,024 cycles a stage, which the other
//           warpgroup's products cover.
// Limit now Few tiles leave SMs idle. With many, the power limit lowers the clock.
// Next      Nothing further here. In matmul's `split_k` a cluster shares the K of a tile.
//
// Shared code: stages, TMA loads by pairs of blocks and the outputs' way through shared memory are matmul's
// (matmul/tma_epilogue.cuh).

#include "linear_float8/linear_float8.cuh"
#include "matmul/tma_epilogue.cuh"

namespace kl {
namespace float8_persistent {
using namespace persistent;
using Loader = TmaLoader<float8, Major::K, Major::K>;
constexpr int BLOCK_THREADS = (Loader::WARPGROUPS + CONSUMERS) * WARPGROUP;
constexpr int PARTS = 2, PART_N = BN / PARTS;  // columns whose sums of a stage are in registers at a time

// sum += A · B over one stage's k, by one warpgroup, rounded to float32 once a stage.
__device__ inline void multiply_promoted(float (&sum)[BN / 2], uint32_t a, uint32_t b) {
    const uint64_t a_matrix = matrix_descriptor<Major::K>(a, PANEL_BYTES);
    const uint64_t b_matrix = matrix_descriptor<Major::K>(b, PANEL_BYTES);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        float of_stage[PART_N / 2];
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            Wgmma<PART_N>::multiply<float8, Major::K, Major::K>(
                of_stage, a_matrix + step * DESCRIPTOR_STEP<Major::K>,
                b_matrix + step * DESCRIPTOR_STEP<Major::K> + part * PART_N * SWIZZLE_ROW / 16, step > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(of_stage);
#pragma unroll
        for (int i = 0; i < PART_N / 2; ++i) sum[part * PART_N / 2 + i] += of_stage[i];
    }
}

// What scales a thread's sums: factors of its two rows, and factors and shifts of columns. Of each 64 columns lane l
// holds those of columns 2l and 2l + 1: lane 4j + t has what lanes t, t + 4, … need of columns 8j … 8j + 7. All are
// loaded at once: one after the other they took as long as the products of 13 stages.
struct TileScaling {
    float rows[2], factors[PARTS_N][2], shifts[PARTS_N][2];

    __device__ TileScaling(const Scaling& scaling, const Tiled& p, int m0, int n0) {
        const int lane = threadIdx.x % WARP, m = m0 + static_cast<int>(threadIdx.x) % WARPGROUP / WARP * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) rows[i] = scaling.row(min(m + i * 8, p.M - 1));  // past the end nothing is stored
#pragma unroll
        for (int i = 0; i < 2 * PARTS_N; ++i) {
            const int n = min(n0 + i / 2 * PANEL_X + lane * 2 + i % 2, p.N - 1);
            factors[i / 2][i % 2] = scaling.column(n);
            shifts[i / 2][i % 2] = scaling.shift(n);
        }
    }
    __device__ void scale(float (&d)[PANEL_X / 2], int part) const {
#pragma unroll
        for (int j = 0; j < PANEL_X / 8; ++j) {
            const int lane = j * 4 + static_cast<int>(threadIdx.x) % 4;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float factor = __shfl_sync(FULL_MASK, factors[part][e], lane);
                const float shift = __shfl_sync(FULL_MASK, shifts[part][e], lane);
                d[j * 4 + e] = d[j * 4 + e] * rows[0] * factor + shift;
                d[j * 4 + 2 + e] = d[j * 4 + 2 + e] * rows[1] * factor + shift;
            }
        }
    }
};
}  // namespace float8_persistent

namespace {

template <typename T>
__global__ void __launch_bounds__(float8_persistent::BLOCK_THREADS, 1)
    linear_float8_persistent_kernel(T* c, const __grid_constant__ CUtensorMap to, bool by_tma,
                                    const __grid_constant__ TmaOperands from, Tiled p, ClusterRaster order, int tiles,
                                    const __grid_constant__ Scaling scaling) {
#if KL_SM90A
    using namespace float8_persistent;
    const uint32_t stages = aligned_shared(), panels = stages + STAGES * STAGE_BYTES;
    const uint32_t full = panels + OUT_BYTES, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        PipelineState<STAGES>::init(full, empty, Loader::ARRIVALS, CLUSTER * CONSUMERS * WARPGROUP / WARP);
        mbarrier_init_fence();
        from.prefetch();
    }
    cluster_sync();

    const int rank = static_cast<int>(cluster_rank()), workers = static_cast<int>(gridDim.x) / CLUSTER;
    const int k_tiles = static_cast<int>(ceil_div(p.K, BLOCK_K<float8>));
    const int group = warp_index() / (WARPGROUP / WARP), lane = threadIdx.x % WARP;
    int batch, m0, n0;
    PipelineState<STAGES> at;
    if (group == 0) {
        registers_decrease<Loader::REGISTERS>();
        if (Loader::takes_part()) {
            for (int tile = static_cast<int>(blockIdx.x) / CLUSTER; tile < tiles; tile += workers) {
                order.at<BM, BN>(tile, rank, &batch, &m0, &n0);
                const Loader loader(from, p, order.below, batch, m0, n0);
                for (int i = 0; i < k_tiles; ++i, at.advance()) {
                    mbarrier_wait(empty + at.stage * 8, at.phase ^ 1);
                    loader.load(stages + at.stage * STAGE_BYTES, full + at.stage * 8, i * BLOCK_K<float8>);
                }
            }
        }
        __syncwarp();
        cluster_sync_relaxed();
    } else {
        registers_increase<Loader::CONSUMER_REGISTERS>();
        const int half = group - 1;
        const OutputTarget<T> target{c, to, by_tma};
        for (int tile = static_cast<int>(blockIdx.x) / CLUSTER; tile < tiles; tile += workers) {
            order.at<BM, BN>(tile, rank, &batch, &m0, &n0);
            m0 += half * PANEL_X;
            float sum[BN / 2];
#pragma unroll
            for (float& s : sum) s = 0.0f;
            for (int i = 0; i < k_tiles; ++i, at.advance()) {
                const uint32_t stage = stages + at.stage * STAGE_BYTES;
                mbarrier_wait(full + at.stage * 8, at.phase);
                multiply_promoted(sum, stage + half * PANEL_BYTES, stage + A_BYTES);
                if (lane < CLUSTER) mbarrier_arrive_at(empty + at.stage * 8, lane);
            }
            const TileScaling scales(scaling, p, m0, n0);
#pragma unroll
            for (int part = 0; part < PARTS_N; ++part) {
                auto& d = columns_of(sum, part);
                scales.scale(d, part);
                if constexpr (sizeof(T) == 2) {
                    store_columns(d, target, p, panels + (half * 2 + part % 2) * PANEL_BYTES, 0, m0,
                                  n0 + part * PANEL_X);
                }
            }
            if constexpr (sizeof(T) == 4) store_outputs<T, BN>(sum, c, p, m0, n0);
        }
        tma_store_wait_read<0>();
        __syncwarp();
        cluster_sync_relaxed();  // shared memory stays until the other block writes and arrives no more
    }
#endif
}

// Rows of float8 as TMA reads them, along k.
TmaTensor float8_rows(const void* data, int64_t rows, int64_t step, int64_t K, int64_t k_step, const char* name) {
    const TmaTensor found{ScalarType::Float8, 3, data, {K, rows, 1}, {k_step, step, 0}, {SWIZZLE_ROW, PANEL_X, 1}};
    KL_CHECK(tma_can_address(found),
             "linear_float8: persistent reads rows that are dense and begin at multiples of 16 ",
             "bytes; those of argument `", name, "` do not");
    return found;
}

}  // namespace

Tensor linear_float8_persistent(const Tensor& input, const Tensor& weight, const Tensor& input_scale,
                                const Tensor& weight_scale, const std::optional<Tensor>& bias,
                                const std::string& out_dtype) {
    using namespace float8_persistent;
    const Float8Call call = prepare_float8(input, weight, input_scale, weight_scale, bias, out_dtype);
    if (call.output.numel() == 0) return call.output;
    KL_CHECK(is_hopper(input.get_device_index()), "linear_float8: persistent needs a GPU of compute capability 9.0");
    KL_CHECK(std::max({call.M, call.N, call.K}) <= TMA_LARGEST_SIZE, "linear_float8: sizes must be below 2^31");
    const TmaOperands operands{tensor_map(float8_rows(call.a, call.M, call.a_m, call.K, call.a_k, "input")),
                               tensor_map(float8_rows(call.b, call.N, call.b_n, call.K, call.b_k, "weight"))};
    const Tiled p{static_cast<int>(call.M), static_cast<int>(call.N), static_cast<int>(call.K), 1, 0, 0, 0, call.N};
    const ClusterRaster order = pair_order(p, BM, BN);
    const int tiles = tile_count(order.tiles, p);
    const Launch on(input);
    const int blocks = CLUSTER * std::min(tiles, multiprocessors(on.device) / CLUSTER);
    const ScalarType dtype = call.output.scalar_type();
    dispatch(dtype, "linear_float8", [&](auto zero) {
        using T = decltype(zero);
        static DeviceSet asked;
        void* const c = call.output.data_ptr();
        const TmaTensor output{dtype, 3, c, {call.N, call.M, 1}, {1, call.N, 0}, {PANEL_X, PANEL_X, 1}};
        const bool by_tma = sizeof(T) == 2 && tma_can_write(output);
        launch_hopper(linear_float8_persistent_kernel<T>, "linear_float8.persistent",
                      {blocks, CLUSTER, BLOCK_THREADS, SHARED}, on, asked, static_cast<T*>(c),
                      by_tma ? tensor_map(output) : CUtensorMap{}, by_tma, operands, p, order, tiles, call.scaling);
    });
    return call.output;
}

void linear_float8_persistent_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    using namespace float8_persistent;
    dispatch(dtype, "linear_float8", [&](auto zero) {
        attributes.push_back(kernel_attributes<linear_float8_persistent_kernel<decltype(zero)>>(
            "linear_float8.persistent", BLOCK_THREADS, SHARED));
    });
}

}  // namespace kl
