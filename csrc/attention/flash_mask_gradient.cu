// The gradient of an additive mask, for the rungs `flash` and `split_kv`, on request. In a file of its own, which the other
// backward kernels do not wait for.
//
// The mask is added to the scores, so its gradient is dS = P ∘ (F ∘ dP − delta), summed over what the mask broadcasts to,
// with the names of flash_backward.cuh. A block has a tile of the mask. It computes dS of every tile of scores that the
// mask's tile is added to, and sums them in registers: S and dP once more, two products beside the seven of the backward
// pass, and no gradient of S_q × S_k per head in memory.
//
// A mask that broadcasts may have fewer tiles than the GPU has room for. Then several blocks share a tile. Each adds up a
// run of its tiles of scores in float32, and a second kernel adds up the runs. Every sum has one order: results repeat bit
// for bit.

#include "attention/flash_backward.cuh"
#include "attention/mask_sums.cuh"

namespace kl {
namespace {

//                              head dim, queries, keys, warps
using MaskShape64 = FlashShape<64, 64, 64, 4>;
using MaskShape128 = FlashShape<128, 64, 64, 4>;
using MaskShape256 = FlashShape<256, 64, 32, 4>;

template <typename S>
constexpr int MASK_SHARED = 2 * (S::BLOCK_BYTES + S::STREAM_BYTES);
static_assert(MASK_SHARED<MaskShape128> <= LEAST_SHARED && MASK_SHARED<MaskShape256> <= LEAST_SHARED);

// Runs are added up separately until a launch has as many blocks. Sums of a run then take at most 64 KiB an SM.
constexpr int MASK_BLOCKS_PER_SM = 4;

/// The tiles of a mask, and of the scores that share one.
struct MaskTiles {
    Strided own_batches, shared_batches;  // batch entries by the mask's own, and of the entries that share one
    int64_t batches;                      // that share an entry of the mask
    int own_heads, heads;                 // of the mask, and those that share one
    int own_q, own_k;                     // tiles of the mask in a head
    int q, k;                             // tiles of scores that share one
    bool sums_q, sums_k;                  // over all queries, over all keys
    int runs;
    int64_t elements;  // of the mask

    __host__ __device__ int64_t summands() const { return batches * heads * q * k; }
};

template <typename T>
struct MaskGradient {
    View<T> query, key, value, grad;
    const float *lse, *log_sum, *delta;
    Mask mask;
    MaskTiles tiles;
    T* out;
    float* runs;  // sums of each run, one after the other, where there are several
};

/// Which tile of the mask a block has, and which run of its tiles of scores.
struct MaskBlock {
    int tile_q, tile_k, head, run;
    int64_t batch;

    __device__ MaskBlock(const MaskTiles& t, unsigned index) {
        const auto next = [&](int size) {
            const int place = static_cast<int>(index % size);
            index /= size;
            return place;
        };
        tile_k = next(t.own_k);
        tile_q = next(t.own_q);
        head = next(t.own_heads);
        run = next(t.runs);
        batch = index;
    }
};

/// Stores a block's sums, through shared memory: threads then add up rows or columns, or store neighbours.
template <typename T, typename S>
__device__ void store_mask_sums(const Squares<1, S::STREAM / 8>& sums, float* tile, const MaskGradient<T>& p,
                                const MaskBlock& own, const Attention& a) {
    constexpr int N = S::STREAM / 8;
    const MaskTiles& t = p.tiles;
    const int warp_row = threadIdx.x / WARP * S::ROWS;
    __syncthreads();  // all warps have read the tiles that the sums replace
#pragma unroll
    for (int j = 0; j < N; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            tile[(warp_row + lane_row(0, e / 2)) * S::STREAM + lane_column(j) + e % 2] = sums.x[0][j][e];
        }
    }
    __syncthreads();
    const int rows = t.sums_q ? 1 : S::BLOCK, columns = t.sums_k ? 1 : S::STREAM;
    const int rows_left = t.sums_q ? 1 : a.S_q - own.tile_q * S::BLOCK;
    const int columns_left = t.sums_k ? 1 : a.S_k - own.tile_k * S::STREAM;
    const int64_t mask_rows = t.sums_q ? 1 : a.S_q, mask_columns = t.sums_k ? 1 : a.S_k;
    const int64_t first = ((own.batch * t.own_heads + own.head) * mask_rows + own.tile_q * S::BLOCK) * mask_columns +
                          own.tile_k * S::STREAM;
    for (int i = threadIdx.x; i < rows * columns; i += S::THREADS) {
        const int row = i / columns, column = i % columns;
        if (row >= rows_left || column >= columns_left) continue;
        float sum = 0.0f;
        for (int r = 0; r < S::BLOCK / rows; ++r) {
            float of_row = 0.0f;
            for (int c = 0; c < S::STREAM / columns; ++c) of_row += tile[(row + r) * S::STREAM + column + c];
            sum += of_row;
        }
        const int64_t element = first + row * mask_columns + column;
        if (t.runs == 1) {
            p.out[element] = from_float<T>(sum);
        } else {
            p.runs[own.run * t.elements + element] = sum;
        }
    }
}

template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS)
    attention_flash_mask_backward_kernel(const __grid_constant__ MaskGradient<T> p, const __grid_constant__ Attention a,
                                         const __grid_constant__ General sequences) {
#if __CUDA_ARCH__ >= 800
    constexpr int N = S::STREAM / 8, D = S::HEAD_DIM;
    static_assert(S::ROWS == 16 && S::BLOCK * S::STREAM * int(sizeof(float)) <= MASK_SHARED<S>);
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    const uint32_t q_tile = shared_address(shared_bytes), grad_tile = q_tile + S::BLOCK_BYTES;
    const uint32_t k_tile = grad_tile + S::BLOCK_BYTES, v_tile = k_tile + S::STREAM_BYTES;

    const MaskTiles& t = p.tiles;
    const MaskBlock own(t, blockIdx.x);
    const int64_t first_batch = t.own_batches.offset(own.batch);

    const int warp_row = threadIdx.x / WARP * S::ROWS;
    Squares<1, N> sums;
    sums.clear();
    // Neighbours in a run share keys and values where only queries change, or heads of a group.
    int64_t loaded_queries = -1, loaded_keys = -1;
    const int64_t end = t.summands() * (own.run + 1) / t.runs;
    for (int64_t i = t.summands() * own.run / t.runs; i < end; ++i) {
        int64_t rest = i;
        const int of_q = own.tile_q + static_cast<int>(rest % t.q), q0 = of_q * S::BLOCK;
        rest /= t.q;
        const int of_k = own.tile_k + static_cast<int>(rest % t.k), k0 = of_k * S::STREAM;
        rest /= t.k;
        const int head = own.head + static_cast<int>(rest % t.heads);
        const int64_t batch = first_batch + t.shared_batches.offset(rest / t.heads);
        if (k0 > q0 + S::BLOCK - 1 + a.last || k0 + S::STREAM - 1 < q0 + a.first) continue;  // outside the band

        const int64_t outer = batch * a.heads + head;
        const int64_t queries = outer * t.q * t.own_q + of_q;
        const int64_t keys = (batch * a.heads_kv + head / p.key.group) * t.k * t.own_k + of_k;
        __syncthreads();  // all warps have read the tiles before
        if (queries != loaded_queries) {
            load_tile<S::BLOCK, D, S::THREADS>(q_tile, p.query.at(batch, head) + q0 * p.query.row, p.query, a.S_q - q0,
                                               a.D);
            load_tile<S::BLOCK, D, S::THREADS>(grad_tile, p.grad.at(batch, head) + q0 * p.grad.row, p.grad, a.S_q - q0,
                                               a.D_v);
        }
        if (keys != loaded_keys) {
            load_tile<S::STREAM, D, S::THREADS>(k_tile, p.key.at(batch, head) + k0 * p.key.row, p.key, a.S_k - k0, a.D);
            load_tile<S::STREAM, D, S::THREADS>(v_tile, p.value.at(batch, head) + k0 * p.value.row, p.value, a.S_k - k0,
                                                a.D_v);
        }
        cp_async_commit();
        loaded_queries = queries;
        loaded_keys = keys;

        const int64_t first_row = outer * a.S_q + q0 + warp_row;
        const uint32_t kept = sequences.drops ? kept_weights<N>(sequences.dropout, first_row, k0, a) : 0;
        RowShift of_row[2];
        float delta[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const bool inside = q0 + warp_row + lane_row(0, h) < a.S_q;
            const int64_t row = first_row + lane_row(0, h);
            of_row[h] = row_shift(p, row, inside);
            delta[h] = inside ? p.delta[row] : 0.0f;
        }
        cp_async_wait<0>();
        __syncthreads();

        Squares<1, N> scores, grad_weights;
        multiply_rows<T, D>(scores, q_tile, warp_row, k_tile);
        multiply_rows<T, D>(grad_weights, grad_tile, warp_row, v_tile);
        apply_mask<T>(scores, p.mask, p.mask.at(batch, head), q0 + warp_row, k0, a);
        if (sequences.drops) drop(grad_weights, kept, sequences.dropout.scale);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int j = 0; j < N; ++j) {
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; ++e) {
                    const float score = scores.x[0][j][e];
                    const float weight = masked_weight(score, of_row[h].max, of_row[h].log2_sum, LOG2E, true);
                    // Also past the last query and key: what is hidden adds nothing, whatever its value holds.
                    if (score != -INFINITE) sums.x[0][j][e] += weight * (grad_weights.x[0][j][e] - delta[h]);
                }
            }
        }
    }

    store_mask_sums<T, S>(sums, reinterpret_cast<float*>(shared_bytes), p, own, a);
#endif
}

/// Adds up the sums of all runs.
template <typename T>
__global__ void attention_flash_mask_runs_backward_kernel(T* out, const float* sums, int64_t elements, int runs) {
    const int64_t element = int64_t{blockIdx.x} * THREADS + threadIdx.x;
    if (element >= elements) return;
    float sum = 0.0f;
    for (int run = 0; run < runs; ++run) sum += sums[run * elements + element];
    out[element] = from_float<T>(sum);
}

template <typename S>
MaskTiles mask_tiles(const BroadcastMask& mask, const Attention& a, int32_t device) {
    const size_t dim = mask.sizes.size();
    const int64_t own_heads = mask.sizes[dim - 3];
    const bool sums_q = mask.sizes[dim - 2] == 1, sums_k = mask.sizes[dim - 1] == 1;
    const int tiles_q = static_cast<int>(ceil_div(a.S_q, S::BLOCK));
    const int tiles_k = static_cast<int>(ceil_div(a.S_k, S::STREAM));
    int64_t own_batches = 1;
    for (size_t d = 0; d + 3 < dim; ++d) own_batches *= mask.sizes[d];
    MaskTiles t{mask.walk_own(dim - 3),
                mask.walk_shared(dim - 3),
                a.batches / own_batches,
                static_cast<int>(own_heads),
                static_cast<int>(a.heads / own_heads),
                sums_q ? 1 : tiles_q,
                sums_k ? 1 : tiles_k,
                sums_q ? tiles_q : 1,
                sums_k ? tiles_k : 1,
                sums_q,
                sums_k,
                1,
                mask.elements};
    const int64_t wanted = int64_t{MASK_BLOCKS_PER_SM} * multiprocessors(device);
    const int64_t blocks = own_batches * own_heads * t.own_q * t.own_k;
    t.runs = static_cast<int>(std::max<int64_t>(std::min(wanted / blocks, t.summands()), 1));
    return t;
}

template <typename T, typename S>
void launch_mask_gradient(MaskGradient<T> p, const BroadcastMask& mask, const Attention& a, const General& sequences,
                          const Tensor& grad_mask, const Launch& launch) {
    const auto kernel = attention_flash_mask_backward_kernel<T, S>;
    static DeviceSet asked;
    allow_shared(kernel, MASK_SHARED<S>, launch.device, asked);
    const MaskTiles& t = p.tiles = mask_tiles<S>(mask, a, launch.device);
    std::optional<Tensor> runs;
    if (t.runs > 1) {
        runs = empty(grad_mask, ScalarType::Float, {t.runs, t.elements});
        p.runs = static_cast<float*>(runs->data_ptr());
    }
    const auto grid = grid_size(a.batches / t.batches * t.own_heads * t.own_q * t.own_k * t.runs);
    kernel<<<grid, S::THREADS, MASK_SHARED<S>, launch.stream>>>(p, a, sequences);
    KL_LAUNCH_CHECK();
    if (t.runs > 1) {
        attention_flash_mask_runs_backward_kernel<T>
            <<<grid_size(ceil_div(t.elements, THREADS)), THREADS, 0, launch.stream>>>(p.out, p.runs, t.elements,
                                                                                      t.runs);
        KL_LAUNCH_CHECK();
    }
}

}  // namespace

Tensor attention_mask_backward_flash(const Tensor& grad, const std::optional<Tensor>& grad_lse, const Tensor& query,
                                     const Tensor& key, const Tensor& value, const Tensor& output, const Tensor& lse,
                                     const Tensor& attn_mask, int64_t first, int64_t last, double scale,
                                     bool enable_gqa, int64_t threshold, double drop_scale, int64_t seed) {
    const Attention a = prepare_attention(query, key, value, first, last, scale, enable_gqa);
    const BroadcastMask mask(attn_mask, query, a);
    const float* of_lse = grad_lse_pointer(grad_lse, query, a);
    check_saved(grad, query, output, lse, mask.mask, a);
    std::optional<DropoutMask> dropout;
    if (threshold != 0 || drop_scale != 1.0) dropout.emplace(threshold, drop_scale, seed, "attention");
    const Launch launch(query);
    Tensor grad_mask = empty_dense(attn_mask);
    if (a.rows() * a.S_k == 0) {
        fill_zero(grad_mask, launch.stream);
        return grad_mask;
    }
    const Tensor delta = empty_like_query(query, ScalarType::Float, 0);
    launch_flash_delta(delta, of_lse, grad, output, a, launch);
    dispatch_16bit(query.scalar_type(), "attention_mask_backward", [&](auto zero) {
        using T = decltype(zero);
        const Lse saved = make_lse(lse, mask.mask, a);
        const MaskGradient<T> operands{make_view<T>(query),
                                       make_view<T>(key, a.group()),
                                       make_view<T>(value, a.group()),
                                       make_view<T>(grad),
                                       saved.data,
                                       saved.log_sum,
                                       static_cast<const float*>(delta.data_ptr()),
                                       mask.mask,
                                       {},
                                       static_cast<T*>(grad_mask.data_ptr()),
                                       nullptr};
        dispatch_shape<MaskShape64, MaskShape128, MaskShape256>(std::max(a.D, a.D_v), [&](auto shape) {
            launch_mask_gradient<T, decltype(shape)>(operands, mask, a, General(Batched{}, dropout), grad_mask, launch);
        });
    });
    return grad_mask;
}

void attention_flash_mask_gradient_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    if (dtype == ScalarType::Float) return;
    dispatch_16bit(dtype, "attention_mask_backward", [&](auto zero) {
        using T = decltype(zero);
        const auto add = [&](const char* name, auto shape) {
            using S = decltype(shape);
            attributes.push_back(
                kernel_attributes<attention_flash_mask_backward_kernel<T, S>>(name, S::THREADS, MASK_SHARED<S>));
        };
        add("attention_backward.flash.mask.64", MaskShape64{});
        add("attention_backward.flash.mask.128", MaskShape128{});
        add("attention_backward.flash.mask.256", MaskShape256{});
        attributes.push_back(kernel_attributes<attention_flash_mask_runs_backward_kernel<T>>(
            "attention_backward.flash.mask.runs", THREADS));
    });
}

}  // namespace kl
