// attention, rung 7 of 7: split_kv
// Idea      Few queries over long keys, as in decoding: keys are split into runs among blocks, so that a single query keeps
//           every SM reading (Flash-Decoding, Dao et al., https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
// Predicts  The time to read keys and values once at memory bandwidth.
// Limit now Reading keys and values.
// Next      –
//
// A block has all queries that share one head of keys and values, grouped heads too, so that keys are read once. They are
// packed as the 16 rows of one tile. The warps of a block take the tiles of its run round-robin. Each warp has a pipeline
// of its own in shared memory and meets no block-wide barrier. It ends with a softmax of the keys it has seen, and the
// block merges those of its warps. Two runs of two warps:
//
//   keys      │ run 0: block 0                │ run 1: block 1                │
//   tiles     │ w0 │ w1 │ w0 │ w1 │ w0 │ w1 │ │ w0 │ w1 │ w0 │ w1 │ w0 │ w1 │ │
//   merge     └ warps, in shared memory ──────┴ runs, in a cluster or by a second kernel
//
// Runs are combined in one of two ways. A second kernel weighs them by their log-sum-exps. On Hopper, the blocks of a head
// can be a cluster (CLUSTER): each sends a row's results to the block that finishes that row. That needs two, four
// or eight runs that fill the GPU as well, and all clusters resident at once. Runs are summed in a fixed order, so results
// repeat. The number of runs, and so the last bits, depends on the number of SMs.

#include "attention/split_kv_merge.cuh"
#include "core/pdl.cuh"

namespace kl {
namespace {

constexpr int MIN_RUN = 256;  // keys per run: fewer do not pay for a block
constexpr int COMBINE_THREADS = 128;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

template <typename S, typename T>
__device__ __forceinline__ void load_queries(uint32_t q_tile, const Operands<T>& p, const Attention& a,
                                             const PackedQueries& queries) {
    constexpr int CHUNKS = S::HEAD_DIM / 8;
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += S::THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const T* source = p.query.at(queries.batch, queries.head0 + row / a.S_q) + row % a.S_q * p.query.row;
        Vec<T> v;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int column = chunk * 8 + e;
            v[e] = row < queries.rows && column < a.D ? source[column * p.query.column] : from_float<T>(0.0f);
        }
        store_shared16(q_tile + tile_offset<S::HEAD_DIM>(row, chunk), *reinterpret_cast<const uint4*>(&v));
    }
}

/// Of this lane's two rows: the keys that are visible, and where the row of the mask begins.
struct VisibleKeys {
    int first[2], end[2];
    int64_t mask_row[2];

    __device__ VisibleKeys(const PackedQueries& queries, const Mask& mask, const Attention& a, int run_end) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = lane_row(0, h), query = row % a.S_q;
            first[h] = query + a.first;
            end[h] = row < queries.rows ? min(run_end, query + a.last + 1) : 0;
            mask_row[h] = mask.at(queries.batch, queries.head0 + min(row, queries.rows - 1) / a.S_q) + query * mask.row;
        }
    }
};

/// Masks the scores of a tile of keys that begins at k0, and adds them to the online softmax of the lane's two rows.
template <typename T, int N, int M>
__device__ __forceinline__ void mask_and_update(Squares<1, N>& scores, Squares<1, M>& output, float (&row_max)[2],
                                                float (&row_sum)[2], const VisibleKeys& visible, const Mask& mask,
                                                const Attention& a, const MaskedUnits& units, int k0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float new_max = row_max[h];
#pragma unroll
        for (int j = 0; j < N; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int column = k0 + lane_column(j) + e;
                float& score = scores.x[0][j][2 * h + e];
                if (column < visible.first[h] || column >= visible.end[h]) {
                    score = -INFINITE;
                } else if (mask.kind != MaskKind::NONE) {
                    score = mask.template apply<T>(score, visible.mask_row[h] + column * mask.column, a.scale);
                }
                new_max = fmaxf(new_max, score);  // drops NaN; the exponential of such a score brings it back
            }
        }
        softmax_step(scores, output, h, new_max, row_max[h], row_sum[h], units.factor);
    }
}

#endif

template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
    attention_split_kv_kernel(const __grid_constant__ Operands<T> p, const __grid_constant__ Attention a, Runs runs) {
#if __CUDA_ARCH__ >= 800
    constexpr int D = S::HEAD_DIM, N = S::TILE / 8, WARPS = S::WARPS;
    constexpr bool CLUSTER = S::CLUSTER && __CUDA_ARCH__ >= 900;
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    const SplitSmem<S> smem{shared_bytes};
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const uint32_t q_tile = smem.queries(), ring = smem.ring(warp);

    // Launch latency dominates short calls, so the prologue avoids integer division.
    const uint32_t outer = runs.by_count.quotient(blockIdx.x);
    const int run = static_cast<int>(blockIdx.x - outer * runs.count);
    const int64_t batch = runs.by_heads.quotient(outer);
    const int head_kv = static_cast<int>(outer) - static_cast<int>(batch) * a.heads_kv;
    const T* key = p.key.at(batch, head_kv);
    const T* value = p.value.at(batch, head_kv);
    const int run_begin = runs.begin + run * runs.length, run_end = min(run_begin + runs.length, runs.end);
    const int tiles = (run_end - run_begin + S::TILE - 1) / S::TILE;  // zero where no key is seen
    const int mine = tiles > warp ? (tiles - warp + WARPS - 1) / WARPS : 0;

    const auto load = [&](int i) {  // the i-th tile of this warp, if it exists
        if (i < mine) {
            const uint32_t place = ring + i % S::STAGES * 2 * S::TILE_BYTES;
            const int k0 = run_begin + (i * WARPS + warp) * S::TILE;
            load_tile<S::TILE, D, WARP>(place, key + k0 * p.key.row, p.key, run_end - k0, a.D, lane);
            load_tile<S::TILE, D, WARP>(place + S::TILE_BYTES, value + k0 * p.value.row, p.value, run_end - k0, a.D_v,
                                        lane);
        }
        cp_async_commit();
    };
#pragma unroll
    for (int i = 0; i < S::STAGES - 1; ++i) load(i);

    const int group = a.group();
    const PackedQueries queries{batch, head_kv * group, group * a.S_q};
#if __CUDA_ARCH__ >= 900
    // In a cluster each block finishes every count-th row, and receives that row's results of the other runs.
    const int finished = runs.by_count.quotient(queries.rows + runs.count - 1 - run);
    if constexpr (CLUSTER) expect_runs(smem, finished * (runs.count - 1) * S::ROW_FLOATS * 4);
#endif
    load_queries<S>(q_tile, p, a, queries);
    __syncthreads();

    const VisibleKeys visible(queries, p.mask, a, run_end);
    const MaskedUnits units(p.mask, a);
    float row_max[2] = {-INFINITE, -INFINITE}, row_sum[2] = {};  // the sum is of this lane's columns
    Squares<1, D / 8> output;
    output.clear();

    for (int i = 0; i < mine; ++i) {
        cp_async_wait<S::STAGES - 2>();
        __syncwarp();  // tile i has landed for all lanes, and all have read tile i − 1, whose stage is filled next
        load(i + S::STAGES - 1);
        const uint32_t k_tile = ring + i % S::STAGES * 2 * S::TILE_BYTES;
        Squares<1, N> scores;
        multiply_rows<T, D>(scores, q_tile, 0, k_tile);
        mask_and_update<T>(scores, output, row_max, row_sum, visible, p.mask, a, units,
                           run_begin + (i * WARPS + warp) * S::TILE);
        const auto weights = round_squares<T>(scores);
        multiply_accumulate<T, D>(output, weights, k_tile + S::TILE_BYTES, 0);
    }
    cp_async_wait<0>();
    __syncthreads();  // all warps have read their last stage
    griddepcontrol_launch_dependents();

    store_of_warp<ROWS, D>(smem.results(), smem.stats(), output, row_max, row_sum);
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER) cluster_wait();  // all blocks have started
#endif
    merge_warps<CLUSTER>(smem, p, a, runs, queries, run, units);
#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER) finish_rows(smem, p, a, runs, queries, run, finished);
#endif
#endif
}

/// Combines the runs of a query, weighted by their share of its sum of exponentials. One block per query; launched with
/// PDL, because it is a short kernel after a long one.
template <typename T>
__global__ void __launch_bounds__(COMBINE_THREADS)
    attention_split_kv_combine_kernel(T* output, Lse lse, const float* partial, Lse of_runs, int64_t rows, int runs,
                                      int D_v) {
    griddepcontrol_wait();
    const int64_t row = blockIdx.x;
    float max_of_all = -INFINITE, sum = 0.0f;
    for (int r = threadIdx.x % WARP; r < runs; r += WARP) max_of_all = fmaxf(max_of_all, of_runs.data[r * rows + row]);
    max_of_all = warp_reduce(max_of_all, Max{});
    const float shift = max_of_all == -INFINITE ? 0.0f : max_of_all;
    const auto share = [&](int r) {
        float exponent = of_runs.data[r * rows + row] - shift;
        if (of_runs.log_sum != nullptr) exponent += of_runs.log_sum[r * rows + row];
        return exp2_approx(exponent * LOG2E);
    };
    for (int r = threadIdx.x % WARP; r < runs; r += WARP) sum += share(r);
    sum = warp_reduce(sum, Sum{});
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (threadIdx.x == 0) lse.store(row, max_of_all, logf(sum));
    for (int column = threadIdx.x; column < D_v; column += COMBINE_THREADS) {
        float total = 0.0f;
#pragma unroll 8
        for (int r = 0; r < runs; ++r) total = fmaf(share(r), partial[(r * rows + row) * D_v + column], total);
        output[row * D_v + column] = from_float<T>(total * inverse);
    }
}

/// Splits the visible keys into as many runs as fill the GPU once, each of at least MIN_RUN keys.
Runs split(const Attention& a, int blocks_per_sm, int32_t device) {
    const int begin = std::min(std::max(0, a.first), a.S_k);
    const int end = std::max(begin, std::min(a.S_k, a.S_q + a.last));
    const int64_t blocks = std::max<int64_t>(a.batches * a.heads_kv, 1);
    const int64_t wanted =
        std::min<int64_t>(int64_t{multiprocessors(device)} * blocks_per_sm / blocks, (end - begin) / MIN_RUN);
    const int64_t length = ceil_div(std::max(end - begin, 1), std::max<int64_t>(wanted, 1));
    const int rounded = static_cast<int>(ceil_div(length, 64) * 64);
    const int count = static_cast<int>(std::max<int64_t>(ceil_div(end - begin, rounded), 1));
    return {begin, end, rounded, count, Divisor(count), Divisor(std::max(a.heads_kv, 1))};
}

/// Launches the runs of a head as a cluster, if that fills the GPU as well and all clusters are resident at once.
/// Returns whether it has. The choice stays here: it needs the kernel's occupancy, which only the driver knows.
template <typename T, typename S>
bool launch_in_clusters(const Operands<T>& operands, const Attention& a, const Runs& apart, const Launch& launch) {
    using InCluster = typename S::InCluster;
    const auto kernel = attention_split_kv_kernel<T, InCluster>;
    if (!has_hopper_code(kernel, launch.device) || InCluster::SHARED > shared_limit(launch.device)) return false;
    static DeviceSet asked;
    static OccupancyCache occupancy;
    const Runs runs = split(a, InCluster::BLOCKS, launch.device);
    const bool some = runs.count == 2 || runs.count == 4 || runs.count == PORTABLE_CLUSTER;
    if (!some || runs.count * S::BLOCKS < apart.count) return false;
    allow_shared(kernel, InCluster::SHARED, launch.device, asked);
    const int64_t heads = a.batches * a.heads_kv;
    const dim3 block(InCluster::THREADS);
    if (occupancy.clusters(kernel, block, runs.count, InCluster::SHARED, launch) < heads) return false;
    LaunchConfig config(dim3(grid_size(heads * runs.count)), block, InCluster::SHARED, launch);
    config.clusters_of(runs.count).run(kernel, operands, a, runs);
    return true;
}

template <typename T, typename S>
void launch_split(Operands<T> operands, const Tensor& query, const Attention& a, const Launch& launch) {
    const auto kernel = attention_split_kv_kernel<T, S>;
    static DeviceSet asked;
    allow_shared(kernel, S::SHARED, launch.device, asked);
    const Runs runs = split(a, S::BLOCKS, launch.device);
    if (launch_in_clusters<T, S>(operands, a, runs, launch)) return;
    const auto grid = grid_size(a.batches * a.heads_kv * runs.count);
    const Lse lse = operands.lse;
    std::optional<Tensor> partial, partial_lse;
    if (runs.count > 1) {
        partial = empty(query, ScalarType::Float, {runs.count, a.rows(), a.D_v});
        const bool apart = operands.mask.additive();
        partial_lse = empty(query, ScalarType::Float, {apart ? 2 : 1, runs.count, a.rows()});
        operands.partial = static_cast<float*>(partial->data_ptr());
        operands.lse.data = static_cast<float*>(partial_lse->data_ptr());
        operands.lse.log_sum = apart ? operands.lse.data + runs.count * a.rows() : nullptr;
    }
    kernel<<<grid, S::THREADS, S::SHARED, launch.stream>>>(operands, a, runs);
    KL_LAUNCH_CHECK();
    if (runs.count == 1) return;
    launch_pdl(attention_split_kv_combine_kernel<T>, grid_size(a.rows()), COMBINE_THREADS, launch, operands.output, lse,
               operands.partial, operands.lse, a.rows(), runs.count, static_cast<int>(a.D_v));
}

}  // namespace

std::tuple<Tensor, Tensor> attention_split_kv(const Tensor& query, const Tensor& key, const Tensor& value,
                                              const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                              double scale, bool enable_gqa) {
    const Attention a = prepare_attention(query, key, value, first, last, scale, enable_gqa);
    const Mask mask = make_mask(attn_mask, query, a);
    KL_CHECK(int64_t{a.group()} * a.S_q <= ROWS, "attention: split_kv takes at most ", ROWS,
             " queries that share a head of keys, got ", int64_t{a.group()} * a.S_q);
    const Launch launch(query);
    Tensor output = empty_like_query(query, query.scalar_type(), a.D_v);
    Tensor lse = empty_lse(query, mask);
    if (sums_nothing(a, output, lse, launch.stream)) return {output, lse};
    dispatch_16bit(query.scalar_type(), "attention", [&](auto zero) {
        using T = decltype(zero);
        const Operands<T> operands{make_view<T>(query),
                                   make_view<T>(key),
                                   make_view<T>(value),
                                   static_cast<T*>(output.data_ptr()),
                                   nullptr,
                                   make_lse(lse, mask, a),
                                   mask};
        dispatch_shape<Split64, Split128, Split256>(
            std::max(a.D, a.D_v), [&](auto shape) { launch_split<T, decltype(shape)>(operands, query, a, launch); });
    });
    return {output, lse};
}

void attention_split_kv_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    if (dtype == ScalarType::Float) return;
    dispatch_16bit(dtype, "attention", [&](auto zero) {
        const auto add = [&](const char* name, auto shape) {
            using T = decltype(zero);
            using S = decltype(shape);
            attributes.push_back(kernel_attributes<attention_split_kv_kernel<T, S>>(name, S::THREADS, S::SHARED));
        };
        attributes.push_back(kernel_attributes<attention_split_kv_combine_kernel<decltype(zero)>>(
            "attention.split_kv.combine", COMBINE_THREADS));
        add("attention.split_kv.64", Split64{});
        add("attention.split_kv.128", Split128{});
        add("attention.split_kv.256", Split256{});
        add("attention.split_kv.64 in clusters", Split64::InCluster{});
        add("attention.split_kv.128 in clusters", Split128::InCluster{});
        add("attention.split_kv.256 in clusters", Split256::InCluster{});
    });
}

}  // namespace kl
