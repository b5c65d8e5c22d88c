// The persistent kernel's body and launch, which matmul's `persistent` and `stream_k` and linear's `persistent` share.
//
// Blocks stay on their SM and take work tiles from the scheduler. Producer warps run ahead into the next tile. While
// the consumer warpgroups round and store a tile, the stages already fill with the operands of the next.
//
// Both consumer warpgroups work on one 128×256 tile ("cooperative") rather than on tiles of their own, one storing
// while the other multiplies ("ping-pong"). A warpgroup alone would make 64×256 or 128×128, which reads 5/3 or 4/3 of
// the bytes per output from the L2. At large sizes the GPU lowers its clock to stay within its power, and bytes cost
// power. What ping-pong would hide, the rounding of a tile, is about a hundredth of its products at K = 4096.
#pragma once

#include "matmul/stream_k_fixup.cuh"
#include "matmul/tma_epilogue.cuh"

namespace kl {
namespace persistent {

// linear's epilogue takes long: one consumer warpgroup is kept LAG k-tiles ahead of the other, and each multiplies
// while the other stores its half. A larger LAG would leave too few of the four stages to load ahead.
constexpr int LAG = 2;
constexpr int LAG_BARRIER = 5;

// Computes all work tiles of this block.
template <typename Loader, typename Epilogue>
__device__ inline void multiply_tiles(const OutputTarget<typename Loader::Element>& to,
                                      const typename Loader::Source& from, const Tiled& p, const ClusterRaster& order,
                                      const StreamKSchedule& schedule, const Workspace& space,
                                      const Epilogue& epilogue) {
#if KL_SM90A
    using T = typename Loader::Element;
    const uint32_t stages = aligned_shared(), panels = stages + STAGES * STAGE_BYTES;
    const uint32_t full = panels + OUT_BYTES, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        PipelineState<STAGES>::init(full, empty, Loader::ARRIVALS, Loader::BLOCKS * CONSUMERS * WARPGROUP / WARP);
        mbarrier_init_fence();
        Loader::prefetch(from);
    }
    Loader::BLOCKS > 1 ? cluster_sync() : __syncthreads();

    const int rank = Loader::BLOCKS > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int worker = static_cast<int>(blockIdx.x) / Loader::BLOCKS;
    const int group = warp_index() / (WARPGROUP / WARP), lane = threadIdx.x % WARP;
    int batch, m0, n0;
    PipelineState<STAGES> at;
    WorkTile work;
    StreamKScheduler scheduler(schedule, worker);
    if (group < Loader::WARPGROUPS) {
        registers_decrease<Loader::REGISTERS>();
        if (Loader::takes_part()) {
            while (scheduler.next(&work)) {
                order.at<BM, BN, Loader::BLOCKS>(work.tile, rank, &batch, &m0, &n0);
                const Loader loader(from, p, order.below, batch, m0, n0);
                for (int i = work.begin; i < work.end; ++i, at.advance()) {
                    mbarrier_wait(empty + at.stage * 8, at.phase ^ 1);
                    loader.load(stages + at.stage * STAGE_BYTES, full + at.stage * 8, i * BLOCK_K<T>);
                }
            }
        }
        __syncwarp();
        if constexpr (Loader::BLOCKS > 1) cluster_sync_relaxed();
    } else {
        registers_increase<Loader::CONSUMER_REGISTERS>();
        const int half = group - Loader::WARPGROUPS;
        const int thread = static_cast<int>(threadIdx.x) - Loader::WARPGROUPS * WARPGROUP;
        float sum[BN / 2];
        const auto release = [&](int stage) {
            if constexpr (Loader::BLOCKS > 1) {
                if (lane < Loader::BLOCKS) mbarrier_arrive_at(empty + stage * 8, lane);
            } else {
                if (lane == 0) mbarrier_arrive(empty + stage * 8);
            }
        };
        while (scheduler.next(&work)) {
            order.at<BM, BN, Loader::BLOCKS>(work.tile, rank, &batch, &m0, &n0);
            const typename Epilogue::template Tile<T> tile(epilogue, n0, p.N);
            // One warpgroup begins when the other is LAG k-tiles ahead. The other cannot arrive here twice before that:
            // with fewer stages than k-tiles, it would have to overwrite a stage that is not yet read.
            const bool lag = !std::is_same_v<Epilogue, IdentityEpilogue> && work.end - work.begin >= STAGES;
            if (lag && half == 1) named_barrier_sync(LAG_BARRIER, CONSUMER_THREADS);
            int before = 0;
            for (int i = work.begin; i < work.end; ++i, at.advance()) {
                const uint32_t stage = stages + at.stage * STAGE_BYTES;
                mbarrier_wait(full + at.stage * 8, at.phase);
                multiply_stage<T, Loader::A, Loader::B, BN, Loader::PARTS>(sum, stage + half * PANEL_BYTES,
                                                                           stage + A_BYTES, i > work.begin);
                wgmma_wait<1>();
                if (i > work.begin) release(before);
                before = at.stage;
                if (lag && half == 0 && i == work.begin + LAG) named_barrier_arrive(LAG_BARRIER, CONSUMER_THREADS);
            }
            wgmma_wait<0>();
            release(before);
            wgmma_pin(sum);
            if (work.begin > 0) {
                store_partial(sum, space, worker * Loader::BLOCKS + rank, thread);
                continue;
            }
            if (work.end < schedule.k_tiles) {
                const int end = (work.tile + 1) * schedule.k_tiles;
                for (int other = worker + 1; schedule.begin(other) < end; ++other) {
                    if (schedule.begin(other) == schedule.begin(other + 1)) continue;  // no k-tiles
                    fixup(sum, space, other * Loader::BLOCKS + rank, thread);
                }
            }
            tile.store(sum, to, p, panels + half * 2 * PANEL_BYTES, batch, m0 + half * PANEL_X, n0);
        }
        tma_store_wait_read<0>();
        __syncwarp();
        if constexpr (Loader::BLOCKS > 1)
            cluster_sync_relaxed();  // shared memory must live until the other block is done with it
    }
#endif
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Launches KERNEL over all tiles of a call. `share`: stream-K, where the last wave does not fill the GPU.
template <auto* KERNEL, typename Loader, typename... Epilogue>
void launch(const char* name, const HopperCall& call, const typename Loader::Source& from, const ClusterRaster& order,
            const Launch& on, bool share, const Epilogue&... epilogue) {
    using T = typename Loader::Element;
    static DeviceSet asked;
    const Tiled& p = call.tiled;
    const int tiles = tile_count(order.tiles, p);
    const int fit = multiprocessors(on.device) / Loader::BLOCKS;
    const auto k_tiles = static_cast<int>(ceil_div(p.K, BLOCK_K<T>));
    const int shared = share ? shared_tiles(tiles, k_tiles, fit) : 0;
    const int64_t work = shared > 0 ? int64_t{tiles} * k_tiles : tiles;
    const StreamKSchedule schedule{tiles, shared, k_tiles, static_cast<int>(std::min<int64_t>(work, fit))};
    const int blocks = schedule.workers * Loader::BLOCKS;

    Tensor memory;  // freed on return: later work on the stream may reuse it
    Workspace space{};
    if (shared > 0) {
        memory = empty(call.output, ScalarType::Float, {int64_t{blocks} * (BM * BN + 1)});
        space.sums = static_cast<float*>(memory.data_ptr());
        space.flags = reinterpret_cast<uint32_t*>(space.sums + int64_t{blocks} * BM * BN);
        KL_CUDA_CHECK(cudaMemsetAsync(space.flags, 0, blocks * sizeof(uint32_t), on.stream));
    }
    const TmaTensor output = output_tensor(call);
    const bool by_tma = sizeof(T) == 2 && output.dtype != ScalarType::Float &&
                        (call.padded ? tma_can_address(output) : tma_can_write(output));
    const HopperGrid grid{blocks, Loader::BLOCKS, (Loader::WARPGROUPS + CONSUMERS) * WARPGROUP, SHARED};
    launch_hopper(KERNEL, name, grid, on, asked, static_cast<T*>(call.c), by_tma ? tensor_map(output) : CUtensorMap{},
                  by_tma, from, p, order, schedule, space, epilogue...);
}

template <typename T>
typename PlainLoader<T>::Source plain_source(const HopperCall& call) {
    const bool a_by_tma = call.a_by_tma && call.a_major == Major::K;
    const bool b_by_tma = call.b_by_tma && call.b_major == Major::K;
    return {{a_by_tma ? tensor_map(call.a) : CUtensorMap{}, b_by_tma ? tensor_map(call.b) : CUtensorMap{}},
            a_by_tma,
            b_by_tma,
            static_cast<const T*>(call.a_data),
            static_cast<const T*>(call.b_data),
            call.product};
}
inline ClusterRaster plain_order(const Tiled& p) { return {tile_order(p, BM, BN), false}; }

}  // namespace persistent
}  // namespace kl
