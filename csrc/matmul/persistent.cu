// matmul, ninth and tenth step; the table of the climb stands in matmul.cuh.
//
//   persistent        blocks stay; loading runs ahead into the next tile     few tiles leave SMs idle
//   stream_k          the last turns' k-tiles, not tiles, are shared out     parts that wait for each other
//
// While the multiplying warpgroups round and store a tile, the stages already fill with the next one's operands. Sums
// leave by stmatrix into shared memory, in the swizzle of TMA, which writes them out while the warps go on: 64×64 at a
// time, in two buffers a warpgroup.
//
// Both warpgroups work on one 128×256 tile ("cooperative"), as in the steps before, rather than on tiles of their own,
// one storing while the other multiplies ("ping-pong"). A warpgroup alone would make 64×256 or 128×128, which asks L2
// for 5/3 or 4/3 of the bytes an output; at large sizes the GPU lowers its clock to stay within its power, and bytes
// cost power; and what ping-pong would hide, a tile's rounding, is about a hundredth of its products at K = 4096.
//
// stream_k (Osama et al., "Stream-K", arXiv:2301.03598) is the same kernel where the tiles of the last turn, which does
// not fill the GPU, and of the turn before are cut into equal parts along k (hopper.cuh, Shares). A block begins with
// the end of a tile that another begins, and ends with the beginning of one that others end; so that whoever adds up waits
// for what was made first.
//
// Who loads is the kernel's argument: TMA, or warps with plain loads (plain_loader.cuh), for what TMA cannot read
// (realign.cu). The warps that multiply do not see the difference. Plain loads are so much work that tiles are always shared
// out.
//
// linear's kernel is the same with a bias and an activation between the sums and their rounding (linear.cuh). On a tile
// they take as long as the products of four or five k-tiles; so one warpgroup is kept LAG k-tiles ahead of the other, and
// each multiplies while the other finishes its half.

#include "matmul/hopper.cuh"
#include "matmul/linear.cuh"
#include "matmul/plain_loader.cuh"

namespace kl {
namespace {

constexpr int BM = 128, BN = 256, STAGES = 4, CONSUMERS = 2;
constexpr int A_BYTES = BM * SWIZZLE_ROW, B_BYTES = BN * SWIZZLE_ROW, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int OUT_BYTES = CONSUMERS * 2 * PANEL_BYTES;
constexpr int SHARED = STAGES * STAGE_BYTES + OUT_BYTES + SWIZZLE_ATOM + 2 * STAGES * 8;

}  // namespace

// One warp asks TMA, in clusters of two blocks that share what both read.
template <typename T, Major A_MAJOR, Major B_MAJOR>
struct TmaLoader {
    using Element = T;
    using Source = TmaOperands;
    static constexpr Major A = A_MAJOR, B = B_MAJOR;
    static constexpr int BLOCKS = CLUSTER, WARPGROUPS = 1, ARRIVALS = 1, REGISTERS = 40, CONSUMER_REGISTERS = 232,
                         PARTS = 1;

    const Source& from;
    int m0, n0, a_batch, b_batch;
    bool below;

    __device__ TmaLoader(const Source& from, const Tiled& p, bool below, int batch, int m0, int n0)
        : from(from), m0(m0), n0(n0), a_batch(batch * p.a_step), b_batch(batch * p.b_step), below(below) {}
    __device__ static void prefetch(const Source& from) { from.prefetch(); }
    __device__ static bool takes_part() { return warp_index() == 0 && elect_one(); }
    __device__ void load(uint32_t stage, uint32_t barrier, int k) const {
        mbarrier_arrive_expect(barrier, STAGE_BYTES);
        load_pair<A, B, BM, BN>(stage, from, barrier, below, m0, n0, k, a_batch, b_batch);
    }
};

// Two warpgroups load, each block for itself. An operand that TMA can read along k is left to it.
template <typename T>
struct PlainLoader {
    using Element = T;
    struct Source {
        TmaOperands tma;
        bool a_by_tma, b_by_tma;
        const T *a, *b;
        Product product;
    };
    static constexpr Major A = Major::K, B = Major::K;
    static constexpr int BLOCKS = 1, WARPGROUPS = 2, ARRIVALS = WARPGROUPS * WARPGROUP / WARP + 1;
    static constexpr int REGISTERS = 88, CONSUMER_REGISTERS = 168, PARTS = 2;

    const Source& from;
    PlainOperand<T, WARPGROUPS * WARPGROUP> a, b;
    int K, m0, n0, a_batch, b_batch;

    __device__ PlainLoader(const Source& from, const Tiled& p, bool, int batch, int m0, int n0)
        : from(from), K(p.K), m0(m0), n0(n0), a_batch(batch * p.a_step), b_batch(batch * p.b_step) {
        const Product& q = from.product;
        int64_t a_offset, b_offset;
        q.batch_offsets(batch, &a_offset, &b_offset);
        a = {from.a + a_offset + m0 * q.a_m, q.a_m, q.a_k, p.M - m0};
        b = {from.b + b_offset + n0 * q.b_n, q.b_n, q.b_k, p.N - n0};
    }
    __device__ static void prefetch(const Source&) {}
    __device__ static bool takes_part() { return true; }
    __device__ void load(uint32_t stage, uint32_t barrier, int k) const {
        const auto thread = static_cast<int>(threadIdx.x);
        if (thread == 0) {
            mbarrier_arrive_expect(barrier, (from.a_by_tma ? A_BYTES : 0) + (from.b_by_tma ? B_BYTES : 0));
            if (from.a_by_tma) load_tile<Major::K, BM>(stage, from.tma.a, barrier, m0, k, a_batch);
            if (from.b_by_tma) load_tile<Major::K, BN>(stage + A_BYTES, from.tma.b, barrier, n0, k, b_batch);
        }
        if (!from.a_by_tma) a.template load<BM>(stage, thread, k, K - k);
        if (!from.b_by_tma) b.template load<BN>(stage + A_BYTES, thread, k, K - k);
        fence_async_shared();
        __syncwarp();
        if (threadIdx.x % WARP == 0) mbarrier_arrive(barrier);
    }
};

namespace {

// Writes a warp's 16 rows of a panel to the outputs from (m0, n0) on, whose rows begin anywhere. Eight lanes a row write
// 16 bytes each, at multiples of 16; of the last one's eight columns some stand at the row's beginning, and go one by
// one.
template <typename T>
__device__ inline void store_rows(T* c, const Tiled& p, int batch, int m0, int n0, uint32_t panel) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP, chunk = lane % 8;
    const int columns = p.N - n0;
#pragma unroll 2  // more under way would not fit the registers
    for (int i = 0; i < 16; i += WARP / 8) {
        const int row = warp * 16 + i + lane / 8;
        if (m0 + row >= p.M) continue;
        T* const to = c + batch * p.c_batch + (m0 + row) * p.c_row + n0;
        const auto before = static_cast<uint32_t>(-reinterpret_cast<uintptr_t>(to) % 16);  // bytes to such a multiple
        uint32_t v[4];
        join<T>(v, load_shared16(panel + swizzled(row, chunk)), load_shared16(panel + swizzled(row, (chunk + 1) % 8)),
                before);
        const int first = chunk * 8 + static_cast<int>(before / sizeof(T));
        if (first + 8 <= min(columns, PANEL_X)) {
            *reinterpret_cast<uint4*>(to + first) = make_uint4(v[0], v[1], v[2], v[3]);
        } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const int x = (first + e) % PANEL_X;
                if (x < columns) reinterpret_cast<uint16_t*>(to)[x] = static_cast<uint16_t>(v[e / 2] >> e % 2 * 16);
            }
        }
    }
}

// Where outputs go: to memory, by TMA where it can address them.
template <typename T>
struct Destination {
    T* c;
    const CUtensorMap& map;
    bool by_tma;
};

// A warpgroup's 64×64 outputs, through a panel of shared memory. Every second call takes the same panel.
template <typename T>
__device__ inline void store_columns(const float (&d)[PANEL_X / 2], const Destination<T>& to, const Tiled& p,
                                     uint32_t panel, int batch, int m0, int n0) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP, group = threadIdx.x / WARPGROUP;
    const bool leader = threadIdx.x % WARPGROUP == 0;
    // Lane 8i + r names row r of square i: rows 0–7 and 8–15 of eight columns, then of the next eight.
    const int row = warp * 16 + lane % 16, square = lane / 16;
    if (to.by_tma) {
        if (leader) tma_store_wait_read<1>();  // the panel's last box has left
        named_barrier_sync(group, WARPGROUP);
    } else {
        __syncwarp();  // each warp reads back what it wrote itself
    }
#pragma unroll
    for (int j = 0; j < PANEL_X / 8; j += 2) {
        stmatrix(panel + swizzled(row, j + square), pack_pair<T>(d[j * 4], d[j * 4 + 1]),
                 pack_pair<T>(d[j * 4 + 2], d[j * 4 + 3]), pack_pair<T>(d[j * 4 + 4], d[j * 4 + 5]),
                 pack_pair<T>(d[j * 4 + 6], d[j * 4 + 7]));
    }
    if (to.by_tma) {
        fence_async_shared();
        named_barrier_sync(group, WARPGROUP);
        if (leader) {
            tma_store(to.map, panel, n0, m0, batch);
            tma_store_commit();
        }
    } else {
        __syncwarp();
        store_rows(to.c, p, batch, m0, n0, panel);
    }
}

constexpr int PARTS_N = BN / PANEL_X;
using Columns = float[PANEL_X / 2];
[[maybe_unused]] __device__ inline Columns& columns_of(float (&sum)[BN / 2], int part) {
    return *reinterpret_cast<Columns*>(sum + part * PANEL_X / 2);
}

// matmul's epilogue: the sums as they are.
struct Bare {
    template <typename T>
    struct Tile {
        __device__ Tile(const Bare&, int, int) {}

        __device__ void store(float (&sum)[BN / 2], const Destination<T>& to, const Tiled& p, uint32_t panels,
                              int batch, int m0, int n0) const {
            if constexpr (sizeof(T) == 4) {  // two float32 of four lanes fill a sector: nothing to gain
                store_outputs<T, BN>(sum, to.c + batch * p.c_batch, p, m0, n0);
            } else {
#pragma unroll
                for (int part = 0; part < PARTS_N; ++part) {
                    store_columns(columns_of(sum, part), to, p, panels + part % 2 * PANEL_BYTES, batch, m0,
                                  n0 + part * PANEL_X);
                }
            }
        }
    };
};

// linear's epilogue.
template <typename Element>
struct Layer {
    BiasActivation<Element> formula;
    CUtensorMap kept;

    // One tile's bias waits in the registers while the tile is multiplied: of each 64 columns a lane holds the two that
    // begin at twice its number, and lane 4j + t has just what lanes t, t + 4, … need of columns 8j … 8j + 7.
    template <typename T>
    struct Tile {
        const Layer& layer;
        T bias[PARTS_N][2];

        __device__ Tile(const Layer& layer, int n0, int N) : layer(layer) {
            const auto& from = layer.formula;
#pragma unroll
            for (int i = 0; i < 2 * PARTS_N; ++i) {
                const int n = n0 + i / 2 * PANEL_X + static_cast<int>(threadIdx.x) % WARP * 2 + i % 2;
                const bool inside = from.bias != nullptr && n < N;
                bias[i / 2][i % 2] = inside ? from.bias[n * from.bias_step] : from_float<T>(0.0f);
            }
        }
        __device__ void activate(float (&d)[PANEL_X / 2], int part) const {
            const float first = to_float(bias[part][0]), second = to_float(bias[part][1]);
#pragma unroll
            for (int j = 0; j < PANEL_X / 8; ++j) {
                const int lane = j * 4 + static_cast<int>(threadIdx.x) % 4;
                const float b[2] = {__shfl_sync(FULL_MASK, first, lane), __shfl_sync(FULL_MASK, second, lane)};
#pragma unroll
                for (int e = 0; e < 4; ++e) d[j * 4 + e] += b[e % 2];
            }
            kl::activate(layer.formula.activation, d);
        }
        __device__ void store(float (&sum)[BN / 2], const Destination<T>& to, const Tiled& p, uint32_t panels,
                              int batch, int m0, int n0) const {
            const Destination<T> kept{layer.formula.kept, layer.kept, to.by_tma};
            if constexpr (sizeof(T) == 4) {
                const int64_t offset = batch * p.c_batch;
                if (kept.c != nullptr) store_outputs<T, BN>(sum, kept.c + offset, p, m0, n0);
#pragma unroll
                for (int part = 0; part < PARTS_N; ++part) activate(columns_of(sum, part), part);
                store_outputs<T, BN>(sum, to.c + offset, p, m0, n0);
            } else {
#pragma unroll
                for (int part = 0; part < PARTS_N; ++part) {
                    auto& d = columns_of(sum, part);
                    int panel = part % 2;
                    if (kept.c != nullptr) {
                        store_columns(d, kept, p, panels, batch, m0, n0 + part * PANEL_X);
                        panel = 1;
                    }
                    activate(d, part);
                    store_columns(d, to, p, panels + panel * PANEL_BYTES, batch, m0, n0 + part * PANEL_X);
                }
            }
        }
    };
};

// Where blocks share the k of a tile: each that does not begin it lays its sums into its place in `sums`, 16 bytes of a
// thread beside those of the others, and raises its flag; the one that begins it adds them up, in the order of k.
struct Workspace {
    float* sums;
    uint32_t* flags;
};
constexpr int ADDERS = CONSUMERS * WARPGROUP;
constexpr int ADDERS_BARRIER = 4;  // past those of the warpgroups, which one may still need while the other adds

// K-tiles between linear's two warpgroups: of more, too few of the four stages would be left to load ahead.
[[maybe_unused]] constexpr int LAG = 2;
[[maybe_unused]] constexpr int LAG_BARRIER = 5;

__device__ inline float4* place_of(const Workspace& space, int block, int thread) {
    return reinterpret_cast<float4*>(space.sums) + int64_t{block} * (BM * BN / 4) + thread;
}
[[maybe_unused]] __device__ inline void lay_down(const float (&sum)[BN / 2], const Workspace& space, int block,
                                                 int thread) {
    float4* const place = place_of(space, block, thread);
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
        place[j * ADDERS] = make_float4(sum[j * 4], sum[j * 4 + 1], sum[j * 4 + 2], sum[j * 4 + 3]);
    }
    __threadfence();
    named_barrier_sync(ADDERS_BARRIER, ADDERS);
    if (thread == 0) store_release(space.flags + block, 1);
}
[[maybe_unused]] __device__ inline void add_up(float (&sum)[BN / 2], const Workspace& space, int block, int thread) {
    if (thread == 0) {
        while (load_acquire(space.flags + block) == 0) {
        }
    }
    named_barrier_sync(ADDERS_BARRIER, ADDERS);
    const float4* const place = place_of(space, block, thread);
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
        const float4 v = __ldcg(place + j * ADDERS);
        sum[j * 4] += v.x, sum[j * 4 + 1] += v.y, sum[j * 4 + 2] += v.z, sum[j * 4 + 3] += v.w;
    }
}

template <typename Loader, typename Epilogue>
__device__ inline void multiply_tiles(const Destination<typename Loader::Element>& to,
                                      const typename Loader::Source& from, const Tiled& p, const PairOrder& order,
                                      const Shares& shares, const Workspace& space, const Epilogue& epilogue) {
#if KL_SM90A
    using T = typename Loader::Element;
    const uint32_t stages = aligned_shared(), panels = stages + STAGES * STAGE_BYTES;
    const uint32_t full = panels + OUT_BYTES, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        Ring<STAGES>::init(full, empty, Loader::ARRIVALS, Loader::BLOCKS * CONSUMERS * WARPGROUP / WARP);
        mbarrier_init_fence();
        Loader::prefetch(from);
    }
    Loader::BLOCKS > 1 ? cluster_sync() : __syncthreads();

    const int rank = Loader::BLOCKS > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int worker = static_cast<int>(blockIdx.x) / Loader::BLOCKS;
    const int group = warp_index() / (WARPGROUP / WARP), lane = threadIdx.x % WARP;
    int batch, m0, n0;
    Ring<STAGES> at;
    Piece piece;
    Pieces pieces(shares, worker);
    if (group < Loader::WARPGROUPS) {
        registers_decrease<Loader::REGISTERS>();
        if (Loader::takes_part()) {
            while (pieces.next(&piece)) {
                order.at<BM, BN, Loader::BLOCKS>(piece.tile, rank, &batch, &m0, &n0);
                const Loader loader(from, p, order.below, batch, m0, n0);
                for (int i = piece.begin; i < piece.end; ++i, at.next()) {
                    mbarrier_wait(empty + at.stage * 8, at.phase ^ 1);
                    loader.load(stages + at.stage * STAGE_BYTES, full + at.stage * 8, i * BLOCK_K<T>);
                }
            }
        }
        __syncwarp();
        if constexpr (Loader::BLOCKS > 1) cluster_leave();
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
        while (pieces.next(&piece)) {
            order.at<BM, BN, Loader::BLOCKS>(piece.tile, rank, &batch, &m0, &n0);
            const typename Epilogue::template Tile<T> tile(epilogue, n0, p.N);
            // One warpgroup begins when the other is LAG k-tiles on. That one cannot come here twice before: with fewer
            // stages than a piece has k-tiles, it would have had to overwrite what is not yet read.
            const bool lag = !std::is_same_v<Epilogue, Bare> && piece.end - piece.begin >= STAGES;
            if (lag && half == 1) named_barrier_sync(LAG_BARRIER, ADDERS);
            int before = 0;
            for (int i = piece.begin; i < piece.end; ++i, at.next()) {
                const uint32_t stage = stages + at.stage * STAGE_BYTES;
                mbarrier_wait(full + at.stage * 8, at.phase);
                multiply_stage<T, Loader::A, Loader::B, BN, Loader::PARTS>(sum, stage + half * PANEL_BYTES,
                                                                           stage + A_BYTES, i > piece.begin);
                wgmma_wait<1>();
                if (i > piece.begin) release(before);
                before = at.stage;
                if (lag && half == 0 && i == piece.begin + LAG) named_barrier_arrive(LAG_BARRIER, ADDERS);
            }
            wgmma_wait<0>();
            release(before);
            wgmma_pin(sum);
            if (piece.begin > 0) {
                lay_down(sum, space, worker * Loader::BLOCKS + rank, thread);
                continue;
            }
            if (piece.end < shares.k_tiles) {
                const int end = (piece.tile + 1) * shares.k_tiles;
                for (int other = worker + 1; shares.begin(other) < end; ++other) {
                    if (shares.begin(other) == shares.begin(other + 1)) continue;  // it has no share
                    add_up(sum, space, other * Loader::BLOCKS + rank, thread);
                }
            }
            tile.store(sum, to, p, panels + half * 2 * PANEL_BYTES, batch, m0 + half * PANEL_X, n0);
        }
        tma_store_wait_read<0>();
        __syncwarp();
        if constexpr (Loader::BLOCKS > 1) cluster_leave();  // shared memory stays until the other block is done with it
    }
#endif
}

template <typename Loader>
__global__ void __launch_bounds__((Loader::WARPGROUPS + CONSUMERS) * WARPGROUP, 1)
    matmul_persistent_kernel(typename Loader::Element* c, const __grid_constant__ CUtensorMap to, bool by_tma,
                             const __grid_constant__ typename Loader::Source from, Tiled p, PairOrder order,
                             Shares shares, Workspace space) {
    multiply_tiles<Loader>({c, to, by_tma}, from, p, order, shares, space, Bare{});
}

template <typename Loader>
__global__ void __launch_bounds__((Loader::WARPGROUPS + CONSUMERS) * WARPGROUP, 1)
    linear_persistent_kernel(typename Loader::Element* c, const __grid_constant__ CUtensorMap to, bool by_tma,
                             const __grid_constant__ typename Loader::Source from, Tiled p, PairOrder order,
                             Shares shares, Workspace space,
                             const __grid_constant__ Layer<typename Loader::Element> layer) {
    multiply_tiles<Loader>({c, to, by_tma}, from, p, order, shares, space, layer);
}

template <auto* KERNEL, typename Loader, typename... Epilogue>
void launch(const char* name, const HopperCall& call, const typename Loader::Source& from, const PairOrder& order,
            const Launch& on, bool share, const Epilogue&... epilogue) {
    using T = typename Loader::Element;
    static DeviceSet asked;
    const Tiled& p = call.tiled;
    const int tiles = tile_count(order.tiles, p);
    const int fit = multiprocessors(on.device) / Loader::BLOCKS;
    const auto k_tiles = static_cast<int>(ceil_div(p.K, BLOCK_K<T>));
    const int shared = share ? shared_tiles(tiles, k_tiles, fit) : 0;
    const int64_t work = shared > 0 ? int64_t{tiles} * k_tiles : tiles;
    const Shares shares{tiles, shared, k_tiles, static_cast<int>(std::min<int64_t>(work, fit))};
    const int blocks = shares.workers * Loader::BLOCKS;

    Tensor memory;  // given back when this returns; what runs on the stream afterwards may have it
    Workspace space{};
    if (shared > 0) {
        memory = empty(call.output, ScalarType::Float, {int64_t{blocks} * (BM * BN + 1)});
        space.sums = static_cast<float*>(memory.data_ptr());
        space.flags = reinterpret_cast<uint32_t*>(space.sums + int64_t{blocks} * BM * BN);
        KL_CUDA_CHECK(cudaMemsetAsync(space.flags, 0, blocks * sizeof(uint32_t), on.stream));
    }
    const TmaTensor output = output_tensor(call);
    const bool by_tma = sizeof(T) == 2 && tma_can_address(output);
    const HopperGrid grid{blocks, Loader::BLOCKS, (Loader::WARPGROUPS + CONSUMERS) * WARPGROUP, SHARED};
    launch_hopper(KERNEL, name, grid, on, asked, static_cast<T*>(call.c), by_tma ? tensor_map(output) : CUtensorMap{},
                  by_tma, from, p, order, shares, space, epilogue...);
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
PairOrder plain_order(const Tiled& p) { return {tile_order(p, BM, BN), false}; }

// Whether to share out the last turns of linear's tiles. A block lays down and adds up 128 KiB for it, in the time of
// about 16 k-tiles; a count so rough must promise something.
bool worth_sharing(const Tiled& p, int k_tiles, int workers) {
    constexpr int64_t SHARE = 16;
    const int64_t pairs = tile_count(pair_order(p, BM, BN).tiles, p);
    const int64_t whole = ceil_div(pairs, workers) * k_tiles, shared = ceil_div(pairs * k_tiles, workers) + SHARE;
    return shared < whole - whole / 16;
}

}  // namespace

void launch_plain(const HopperCall& call, ScalarType dtype, const Launch& on) {
    dispatch(dtype, "matmul", [&](auto zero) {
        using Loader = PlainLoader<decltype(zero)>;
        launch<matmul_persistent_kernel<Loader>, Loader>("matmul.persistent", call, plain_source<decltype(zero)>(call),
                                                         plain_order(call.tiled), on, true);
    });
}

void launch_persistent(const HopperCall& call, ScalarType dtype, const Launch& on, bool share) {
    dispatch_hopper(call, dtype, [&](auto zero, auto a_major, auto b_major) {
        using Loader = TmaLoader<decltype(zero), a_major(), b_major()>;
        launch<matmul_persistent_kernel<Loader>, Loader>("matmul.persistent", call, call.operands(),
                                                         pair_order(call.tiled, BM, BN), on, share);
    });
}

Tensor matmul_persistent(const Tensor& input, const Tensor& other, bool allow_tf32) {
    return run_hopper(input, other, allow_tf32, "persistent", [&](const HopperCall& call, const Launch& on) {
        launch_persistent(call, input.scalar_type(), on, false);
    });
}

Tensor matmul_stream_k(const Tensor& input, const Tensor& other, bool allow_tf32) {
    return run_hopper(input, other, allow_tf32, "stream_k", [&](const HopperCall& call, const Launch& on) {
        launch_persistent(call, input.scalar_type(), on, true);
    });
}

// TMA reads what a layer has, input and weight along k, and weights along their rows; an input that lies otherwise is
// loaded with plain loads.
std::tuple<Tensor, Tensor> linear_persistent(const Tensor& input, const Tensor& weight,
                                             const std::optional<Tensor>& bias, const std::string& activation,
                                             bool keep, bool allow_tf32) {
    const LinearCall layer = prepare_linear(input, weight, bias, activation, keep);
    const Product& p = layer.product;
    if (p.K == 0) return linear_naive(input, weight, bias, activation, keep);  // no k-tile to wait for
    HopperCall call = prepare_hopper({p, layer.output}, input, weight, allow_tf32, "linear", "persistent");
    if (call.done()) return layer.outputs();
    const ScalarType dtype = input.scalar_type();
    const Launch on(input);
    call.copied = p.a_k == 1 || p.K == 1;
    const int64_t item = input.element_size();
    const auto run = [&](HopperCall& part) {
        const Tensor copies = realign(&part, dtype, on);
        // Where the part's outputs begin, in the whole.
        const int64_t offset = (static_cast<char*>(part.c) - static_cast<char*>(call.c)) / item;
        TmaTensor kept = output_tensor(part);
        kept.data = keep ? static_cast<char*>(layer.kept.data_ptr()) + offset * item : nullptr;
        const bool kept_by_tma = keep && dtype != ScalarType::Float && tma_can_address(kept);
        dispatch(dtype, "linear", [&](auto zero) {
            using T = decltype(zero);
            Layer<T> epilogue{layer.epilogue<T>(), kept_by_tma ? tensor_map(kept) : CUtensorMap{}};
            if (keep) epilogue.formula.kept += offset;
            if (bias) epilogue.formula.bias += offset % call.tiled.c_row * epilogue.formula.bias_step;
            const auto by_tma = [&](auto b_major) {
                using Loader = TmaLoader<T, Major::K, b_major()>;
                const bool share = worth_sharing(part.tiled, static_cast<int>(ceil_div(p.K, BLOCK_K<T>)),
                                                 multiprocessors(on.device) / Loader::BLOCKS);
                launch<linear_persistent_kernel<Loader>, Loader>("linear.persistent", part, part.operands(),
                                                                 pair_order(part.tiled, BM, BN), on, share, epilogue);
            };
            if (part.by_tma() && part.a_major == Major::K) {
                if (part.b_major == Major::K) return by_tma(MajorOf<Major::K>{});
                if constexpr (sizeof(T) == 2) return by_tma(MajorOf<Major::MN>{});
            }
            using Loader = PlainLoader<T>;
            launch<linear_persistent_kernel<Loader>, Loader>("linear.persistent", part, plain_source<T>(part),
                                                             plain_order(part.tiled), on, true, epilogue);
        });
    };
    call.by_tma() ? run(call) : in_parts(call, dtype, on, run);
    return layer.outputs();
}

void matmul_persistent_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    dispatch(dtype, "matmul", [&](auto zero) {
        using T = decltype(zero);
        using ByTma = TmaLoader<T, Major::K, sizeof(T) == 2 ? Major::MN : Major::K>;
        facts.push_back(kernel_facts<matmul_persistent_kernel<ByTma>>("matmul.persistent", 3 * WARPGROUP, SHARED));
        facts.push_back(
            kernel_facts<matmul_persistent_kernel<PlainLoader<T>>>("matmul.persistent plain", 4 * WARPGROUP, SHARED));
    });
    realign_facts(facts, dtype);
}

void linear_persistent_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    dispatch(dtype, "linear", [&](auto zero) {
        using T = decltype(zero);
        using ByTma = TmaLoader<T, Major::K, Major::K>;
        facts.push_back(kernel_facts<linear_persistent_kernel<ByTma>>("linear.persistent", 3 * WARPGROUP, SHARED));
        facts.push_back(
            kernel_facts<linear_persistent_kernel<PlainLoader<T>>>("linear.persistent plain", 4 * WARPGROUP, SHARED));
    });
}

}  // namespace kl
