// attention_paged, rung 1 of 1: split_kv
// Idea      Attention's `split_kv` on keys that lie in pages. The lanes of a warp look up the pages of its next tile while
//           cp.async copies this one; shuffles pass the page numbers on. A block splits its sequence's keys by the
//           length that it finds in device memory (Flash-Decoding, Dao et al.,
//           https://crfm.stanford.edu/2023/10/12/flashdecoding.html; PagedAttention, Kwon et al., arXiv:2309.06180).
// Predicts  The time to read keys and values once at memory bandwidth, and four bytes of the block table a page.
// Limit now Reading keys and values; a second kernel for sequences of several splits.
// Next      –
//
// A block has 16 rows: new tokens of all heads that share one head of keys, so that a page is read once for them. The warps
// of a block take the tiles of its split round-robin. Each warp has a pipeline of its own in shared memory and meets no
// block-wide barrier. At the end the block merges the softmaxes of its warps. The grid has splits for the longest sequence
// that the table can hold; blocks past the end of theirs exit. The second kernel adds the splits in order, so results repeat.
//
// How many splits a sequence has follows from its length and from the most that the host allows. That follows from the
// batch and the number of SMs. With `batch_invariant` it is a constant, PAGED_INVARIANT_SPLITS, or fewer in a table too
// short for so many: then each split has PAGED_MIN_SPLIT keys, in any batch.

#include "attention/pages.cuh"
#include "core/pdl.cuh"

namespace kl {
namespace {

constexpr int PAGED_ROWS = 16;
constexpr int PAGED_MIN_SPLIT = 256;        // keys per split: fewer do not pay for a block
constexpr int PAGED_INVARIANT_SPLITS = 32;  // of a sequence, at most, with batch_invariant
constexpr int PAGED_COMBINE_THREADS = 128;

template <int HEAD_DIM_, int TILE_, int STAGES_, int WARPS_, int BLOCKS_>
struct PagedShape {
    static constexpr int HEAD_DIM = HEAD_DIM_, TILE = TILE_, STAGES = STAGES_, WARPS = WARPS_, THREADS = WARPS * WARP;
    static constexpr int BLOCKS = BLOCKS_;  // per SM
    static constexpr int Q_BYTES = PAGED_ROWS * HEAD_DIM * 2, TILE_BYTES = TILE * HEAD_DIM * 2;
    static constexpr int STAGE_BYTES = WARPS * STAGES * 2 * TILE_BYTES, SHARED = Q_BYTES + STAGE_BYTES;
    static_assert(TILE <= WARP);  // a lane looks up the page of a row
    // The partial results of the warps reuse the memory of the stages.
    static_assert(WARPS * PAGED_ROWS * (HEAD_DIM + 2) * 4 <= STAGE_BYTES);
};
//                       head dim, keys, stages, warps, blocks
using Paged64 = PagedShape<64, 32, 3, 4, 2>;
using Paged128 = PagedShape<128, 16, 3, 4, 2>;
using Paged256 = PagedShape<256, 16, 2, 4, 1>;

struct PagedSizes {
    int heads, heads_kv, tokens, D, D_v;
    int left, right;  // of the band around the diagonal that ends at the lower right
    int splits;       // of a sequence, at most
    float scale;
    Divisor by_splits, by_heads_kv, by_tokens;
};

template <typename T>
struct PagedOperands {
    const T* query;
    int64_t q_batch, q_head, q_row, q_column;
    Cache<T> key, value;
    Pages pages;
    T* output;             // (batch, head, token, D_v), dense
    float *partial, *lse;  // the same, and (batch, head, token), for each split, where there are several
};

/// The keys of a sequence that are seen, and how many of them a split has.
struct Span {
    int begin, length, per_split;

    __device__ Span(const Pages& pages, const PagedSizes& s, int64_t batch) {
        length = min(max(pages.lengths[batch * pages.length], 0), pages.capacity);
        begin = min(max(length - s.tokens - s.left, 0), length);
        const int even = s.by_splits.quotient(length - begin + s.splits - 1);
        per_split = max((even + PAGED_MIN_SPLIT - 1) / PAGED_MIN_SPLIT, 1) * PAGED_MIN_SPLIT;
    }
    __device__ int count() const { return (length - begin + per_split - 1) / per_split; }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

/// Copies the rows of a block, tokens of the heads from head0 on, to a tile. Rows past the last are zeros.
template <typename T, typename S>
__device__ void load_query(uint32_t q_tile, const PagedOperands<T>& p, const PagedSizes& s, int64_t batch, int head0,
                           int row0, int rows) {
    constexpr int D = S::HEAD_DIM, CHUNKS = D / 8;
    for (int i = threadIdx.x; i < PAGED_ROWS * CHUNKS; i += S::THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const uint32_t head = s.by_tokens.quotient(row0 + row), token = row0 + row - head * s.tokens;
        const T* source = p.query + batch * p.q_batch + (head0 + head) * p.q_head + token * p.q_row;
        Vec<T> v;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int column = chunk * 8 + e;
            v[e] = row < rows && column < s.D ? source[column * p.q_column] : from_float<T>(0.0f);
        }
        store_shared16(q_tile + tile_offset<D>(row, chunk), *reinterpret_cast<const uint4*>(&v));
    }
}

/// A step of online softmax for this lane's two rows, of which each sees the keys first … last; column 0 is key0.
template <int N, int M>
__device__ void band_softmax_step(Squares<1, N>& scores, Squares<1, M>& output, float (&row_max)[2],
                                  float (&row_sum)[2], const int (&first)[2], const int (&last)[2], int key0,
                                  float factor) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float new_max = row_max[h];
#pragma unroll
        for (int j = 0; j < N; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int column = key0 + lane_column(j) + e;
                float& score = scores.x[0][j][2 * h + e];
                if (column < first[h] || column > last[h]) score = -INFINITE;
                new_max = fmaxf(new_max, score);  // drops NaN; the exponential of such a score brings it back
            }
        }
        softmax_step(scores, output, h, new_max, row_max[h], row_sum[h], factor);
    }
}

/// Merges the softmaxes that the warps have of their tiles, and stores rows from first_row on. All threads call it, when
/// none reads the stages any more: `results` reuses their memory.
template <typename T, typename S>
__device__ void merge_warps(float* results, const Squares<1, S::HEAD_DIM / 8>& output, const float (&row_max)[2],
                            const float (&row_sum)[2], const PagedOperands<T>& p, const PagedSizes& s,
                            int64_t first_row, int rows) {
    constexpr int D = S::HEAD_DIM, WARPS = S::WARPS;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const float factor = s.scale * LOG2E;
    float* stats = results + WARPS * PAGED_ROWS * D;  // maximum and sum of a warp's row
    store_of_warp<PAGED_ROWS, D>(results, stats, output, row_max, row_sum);
    __syncthreads();
    for (int row = warp; row < rows; row += WARPS) {
        float highest = -INFINITE, sum = 0.0f, share[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, stats[(w * PAGED_ROWS + row) * 2]);
        const float shift = highest == -INFINITE ? 0.0f : highest;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            share[w] = exp2_approx((stats[(w * PAGED_ROWS + row) * 2] - shift) * factor);
            sum = fmaf(share[w], stats[(w * PAGED_ROWS + row) * 2 + 1], sum);
        }
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        const int64_t index = first_row + row;
        if (lane == 0) p.lse[index] = highest * s.scale + logf(sum);
        for (int column = lane; column < s.D_v; column += WARP) {
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) total = fmaf(share[w], results[(w * PAGED_ROWS + row) * D + column], total);
            total *= inverse;
            if (s.splits > 1) {
                p.partial[index * s.D_v + column] = total;
            } else {
                p.output[index * s.D_v + column] = from_float<T>(total);
            }
        }
    }
}

#endif

template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
    attention_paged_split_kv_kernel(const __grid_constant__ PagedOperands<T> p, const __grid_constant__ PagedSizes s) {
#if __CUDA_ARCH__ >= 800
    constexpr int D = S::HEAD_DIM, N = S::TILE / 8, WARPS = S::WARPS;
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    const uint32_t q_tile = shared_address(shared_bytes);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const uint32_t ring = q_tile + S::Q_BYTES + warp * S::STAGES * 2 * S::TILE_BYTES;

    const uint32_t outer = s.by_splits.quotient(blockIdx.x);
    const int split = static_cast<int>(blockIdx.x - outer * s.splits);
    const int64_t batch = s.by_heads_kv.quotient(outer);
    const int head_kv = static_cast<int>(outer) - static_cast<int>(batch) * s.heads_kv;
    const Span span(p.pages, s, batch);
    const int begin = min(span.begin + split * span.per_split, span.length);
    const int end = min(begin + span.per_split, span.length);
    if (begin == end && s.splits > 1) return;
    const int tiles = (end - begin + S::TILE - 1) / S::TILE;
    const int mine = tiles > warp ? (tiles - warp + WARPS - 1) / WARPS : 0;
    const T* key = p.key.data + head_kv * p.key.head;
    const T* value = p.value.data + head_kv * p.value.head;

    const auto first_key = [&](int i) { return begin + (i * WARPS + warp) * S::TILE; };
    const auto look_up = [&](int i) {  // the page of this lane's row in the i-th tile of this warp
        const int row = first_key(i) + lane;
        return lane < S::TILE && row < end ? p.pages.of(batch, row) : 0;
    };
    int page = look_up(0);  // of the next tile to load
    const auto load = [&](int i) {
        if (i < mine) {
            const uint32_t place = ring + i % S::STAGES * 2 * S::TILE_BYTES;
            const int key0 = first_key(i), rows_left = end - key0;
            const Divisor& by_size = p.pages.by_size;
            load_paged_tile<S::TILE, D>(place, p.key, key, by_size, page, key0, rows_left, s.D);
            load_paged_tile<S::TILE, D>(place + S::TILE_BYTES, p.value, value, by_size, page, key0, rows_left, s.D_v);
            page = look_up(i + 1);
        }
        cp_async_commit();
    };
#pragma unroll
    for (int i = 0; i < S::STAGES - 1; ++i) load(i);

    const int group = s.heads / s.heads_kv, head0 = head_kv * group;
    const int row0 = blockIdx.y * PAGED_ROWS, rows = min(group * s.tokens - row0, PAGED_ROWS);
    load_query<T, S>(q_tile, p, s, batch, head0, row0, rows);
    __syncthreads();

    int first[2], last[2];  // the keys that this lane's two rows see
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = lane_row(0, h);
        const int position = span.length - s.tokens + static_cast<int>(s.by_tokens.remainder(row0 + row));
        first[h] = position - s.left;
        last[h] = row < rows ? min(end - 1, position + s.right) : -1;
    }
    const float factor = s.scale * LOG2E;
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
        band_softmax_step(scores, output, row_max, row_sum, first, last, first_key(i), factor);
        const auto weights = round_squares<T>(scores);
        multiply_accumulate<T, D>(output, weights, k_tile + S::TILE_BYTES, 0);
    }
    cp_async_wait<0>();
    __syncthreads();  // all warps have read their last stage
    griddepcontrol_launch_dependents();

    // The row of (batch, head, token), counted over all splits.
    const int64_t all_rows = gridDim.x / s.splits / s.heads_kv * int64_t{s.heads} * s.tokens;
    const int64_t first_row = split * all_rows + (batch * s.heads + head0) * s.tokens + row0;
    merge_warps<T, S>(reinterpret_cast<float*>(shared_bytes + S::Q_BYTES), output, row_max, row_sum, p, s, first_row,
                      rows);
#endif
}

/// Combines the splits of a row, weighted by their share of its sum of exponentials. One block per row; launched with PDL,
/// because it is a short kernel after a long one. Sums go over the sequence's own splits: no bit depends on the others.
template <typename T>
__global__ void __launch_bounds__(PAGED_COMBINE_THREADS)
    attention_paged_split_kv_combine_kernel(T* output, float* lse, const float* partial, const float* of_splits,
                                            const __grid_constant__ Pages pages, const __grid_constant__ PagedSizes s) {
    griddepcontrol_wait();
    const int64_t row = blockIdx.x, rows = gridDim.x;
    const int count = Span(pages, s, row / (int64_t{s.heads} * s.tokens)).count();
    float highest = -INFINITE, sum = 0.0f;
    for (int i = threadIdx.x % WARP; i < count; i += WARP) highest = fmaxf(highest, of_splits[i * rows + row]);
    highest = warp_reduce(highest, Max{});
    const float shift = highest == -INFINITE ? 0.0f : highest;
    const auto share = [&](int i) { return exp2_approx((of_splits[i * rows + row] - shift) * LOG2E); };
#pragma unroll 4
    for (int i = 0; i < count; ++i) sum += share(i);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (threadIdx.x == 0) lse[row] = highest + logf(sum);
    for (int column = threadIdx.x; column < s.D_v; column += PAGED_COMBINE_THREADS) {
        float total = 0.0f;
#pragma unroll 8
        for (int i = 0; i < count; ++i) total = fmaf(share(i), partial[(i * rows + row) * s.D_v + column], total);
        output[row * s.D_v + column] = from_float<T>(total * inverse);
    }
}

void check_integers(const Tensor& tensor, const Tensor& query, int64_t dim, const char* name) {
    KL_CHECK(tensor.is_cuda() && tensor.get_device_index() == query.get_device_index() &&
                 tensor.scalar_type() == ScalarType::Int && tensor.dim() == dim && tensor.size(0) == query.size(0),
             "attention_paged: argument `", name, "` must have int32 numbers of query's sequences, on its device");
}

/// Checks the operands and returns their sizes, without splits. Raises unless they fit together.
PagedSizes check_paged(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& block_table,
                       const Tensor& cache_seqlens, int64_t left, int64_t right, double scale, bool enable_gqa) {
    const char* op = "attention_paged";
    check_cuda(query, op, "query");
    check_like(key, query, op, "key_cache");
    check_like(value, query, op, "value_cache");
    KL_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4, op,
             ": arguments `query`, `key_cache` and `value_cache` must have 4 dimensions");
    check_integers(block_table, query, 2, "block_table");
    check_integers(cache_seqlens, query, 1, "cache_seqlens");
    const int64_t heads = query.size(1), heads_kv = key.size(2), tokens = query.size(2);
    for (int d = 0; d < 3; ++d) {
        KL_CHECK(value.size(d) == key.size(d), op, ": argument `value_cache` must have the pages of `key_cache`");
    }
    KL_CHECK(key.size(3) == query.size(3), op, ": argument `key_cache` must have the head dimension of `query`");
    for (const int64_t size : {query.size(3), value.size(3)}) {
        KL_CHECK(size >= 1 && size <= MAX_HEAD_DIM, op, ": head dimensions must be 1 to ", MAX_HEAD_DIM, ", got ",
                 size);
    }
    KL_CHECK(heads == heads_kv || (enable_gqa && heads_kv > 0 && heads % heads_kv == 0), op,
             ": argument `key_cache` must have the heads of `query`, or with `enable_gqa` a divisor of them, got ",
             heads_kv, " for ", heads);
    KL_CHECK(key.size(1) >= 1 && key.size(1) <= MAX_LENGTH && block_table.size(1) <= MAX_LENGTH / key.size(1), op,
             ": a row of `block_table` must hold at most ", MAX_LENGTH, " keys");
    KL_CHECK(key.size(0) <= MAX_LENGTH && heads <= MAX_LENGTH && tokens * std::max<int64_t>(heads, 1) <= MAX_LENGTH, op,
             ": there must be at most ", MAX_LENGTH, " pages, and as many rows of a sequence");
    const auto reach = [](int64_t side) {
        return static_cast<int>(side < 0 ? MAX_LENGTH : std::min<int64_t>(side, MAX_LENGTH));
    };
    const auto some = [](int64_t n) { return Divisor(static_cast<uint32_t>(std::max<int64_t>(n, 1))); };
    const auto number = [](int64_t n) { return static_cast<int>(n); };
    return {number(heads),
            number(heads_kv),
            number(tokens),
            number(query.size(3)),
            number(value.size(3)),
            reach(left),
            reach(right),
            1,
            static_cast<float>(scale),
            Divisor(1),
            some(heads_kv),
            some(tokens)};
}

template <typename T, typename S>
void launch_paged(PagedOperands<T> operands, PagedSizes s, const Tensor& query, bool invariant, const Launch& launch) {
    const auto kernel = attention_paged_split_kv_kernel<T, S>;
    static DeviceSet asked;
    allow_shared(kernel, S::SHARED, launch.device, asked);
    const int64_t heads = query.size(0) * s.heads_kv, rows = query.size(0) * s.heads * s.tokens;
    const int64_t row_blocks = ceil_div(int64_t{s.heads} / s.heads_kv * s.tokens, PAGED_ROWS);
    KL_CHECK(row_blocks <= 65535, "attention_paged: split_kv takes at most ", 65535 * PAGED_ROWS,
             " rows that share a head of keys");
    const int64_t filling = int64_t{multiprocessors(launch.device)} * S::BLOCKS / (heads * row_blocks);
    const int64_t most = invariant ? PAGED_INVARIANT_SPLITS : std::max<int64_t>(filling, 1);
    s.splits = static_cast<int>(std::min(most, ceil_div(operands.pages.capacity, PAGED_MIN_SPLIT)));
    s.by_splits = Divisor(s.splits);
    float* const lse = operands.lse;
    std::optional<Tensor> partial, partial_lse;
    if (s.splits > 1) {
        partial = empty(query, ScalarType::Float, {s.splits, rows, s.D_v});
        partial_lse = empty(query, ScalarType::Float, {s.splits, rows});
        operands.partial = static_cast<float*>(partial->data_ptr());
        operands.lse = static_cast<float*>(partial_lse->data_ptr());
    }
    const dim3 grid(grid_size(heads * s.splits), static_cast<unsigned>(row_blocks));
    kernel<<<grid, S::THREADS, S::SHARED, launch.stream>>>(operands, s);
    KL_LAUNCH_CHECK();
    if (s.splits == 1) return;
    launch_pdl(attention_paged_split_kv_combine_kernel<T>, grid_size(rows), PAGED_COMBINE_THREADS, launch,
               operands.output, lse, operands.partial, operands.lse, operands.pages, s);
}

}  // namespace

std::tuple<Tensor, Tensor> attention_paged_split_kv(const Tensor& query, const Tensor& key_cache,
                                                    const Tensor& value_cache, const Tensor& block_table,
                                                    const Tensor& cache_seqlens, int64_t left, int64_t right,
                                                    double scale, bool enable_gqa, bool batch_invariant) {
    const PagedSizes s =
        check_paged(query, key_cache, value_cache, block_table, cache_seqlens, left, right, scale, enable_gqa);
    const Launch launch(query);
    Tensor output = empty_like_query(query, query.scalar_type(), s.D_v);
    Tensor lse = empty_like_query(query, ScalarType::Float, 0);
    const int64_t page_size = key_cache.size(1), pages = key_cache.size(0);
    const int capacity = pages > 0 ? static_cast<int>(block_table.size(1) * page_size) : 0;
    if (lse.numel() == 0 || capacity == 0) {
        fill_zero(output, launch.stream);
        if (lse.numel() > 0) attention_fill_negative_infinity(lse, launch.stream);
        return {output, lse};
    }
    const Pages of_sequences{static_cast<const int32_t*>(block_table.data_ptr()),
                             static_cast<const int32_t*>(cache_seqlens.data_ptr()),
                             block_table.stride(0),
                             block_table.stride(1),
                             cache_seqlens.stride(0),
                             static_cast<int>(pages),
                             capacity,
                             Divisor(static_cast<uint32_t>(page_size))};
    dispatch_16bit(query.scalar_type(), "attention_paged", [&](auto zero) {
        using T = decltype(zero);
        const PagedOperands<T> operands{static_cast<const T*>(query.data_ptr()),
                                        query.stride(0),
                                        query.stride(1),
                                        query.stride(2),
                                        query.stride(3),
                                        make_cache<T>(key_cache),
                                        make_cache<T>(value_cache),
                                        of_sequences,
                                        static_cast<T*>(output.data_ptr()),
                                        nullptr,
                                        static_cast<float*>(lse.data_ptr())};
        dispatch_shape<Paged64, Paged128, Paged256>(std::max(s.D, s.D_v), [&](auto shape) {
            launch_paged<T, decltype(shape)>(operands, s, query, batch_invariant, launch);
        });
    });
    return {output, lse};
}

void attention_paged_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    if (dtype == ScalarType::Float) return;
    dispatch_16bit(dtype, "attention_paged", [&](auto zero) {
        const auto add = [&](const char* name, auto shape) {
            using T = decltype(zero);
            using S = decltype(shape);
            attributes.push_back(kernel_attributes<attention_paged_split_kv_kernel<T, S>>(name, S::THREADS, S::SHARED));
        };
        attributes.push_back(kernel_attributes<attention_paged_split_kv_combine_kernel<decltype(zero)>>(
            "attention_paged.split_kv.combine", PAGED_COMBINE_THREADS));
        add("attention_paged.split_kv.64", Paged64{});
        add("attention_paged.split_kv.128", Paged128{});
        add("attention_paged.split_kv.256", Paged256{});
    });
}

}  // namespace kl
