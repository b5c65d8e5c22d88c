// The gradients of normalised rows, and stage one of those of their weights, in one pass over input and gradient: the last
// two steps of the climb of layer_norm, rms_norm and add_rms_norm.
#pragma once

#include "core/pdl.cuh"
#include "norm/norm.cuh"
#include "reduce/cluster_reduce.cuh"
#include "sm90/smem_stages.cuh"

namespace kl {

constexpr int HELD_VECTORS = 2;  // of a row that a thread can hold, besides the sums of its columns
template <int V>
constexpr bool HELD = V <= HELD_VECTORS;

// Rows on the chip: enough that 64 KiB an SM are under way at any time, twice what memory's latency asks for. Of rows that
// are not held two are worked on at once, where shared memory has room for a third.
__host__ __device__ constexpr int backward_stages(int v, bool roomy) { return v <= HELD_VECTORS ? 4 : roomy ? 3 : 2; }

// Vectors of a thread in shared memory: input and gradient of all stages, and the weight where it is not held.
__host__ __device__ constexpr int backward_slots(int v, bool roomy) {
    return 2 * v * backward_stages(v, roomy) + (v <= HELD_VECTORS ? 0 : v);
}

// Whether an architecture, 90 for sm_90, has room for a third: 228 KiB an SM, as Hopper and Blackwell have, but not the
// 100 KiB of Blackwell's workstation and consumer GPUs (12.x).
__host__ __device__ constexpr bool is_roomy(int architecture) { return architecture >= 90 && architecture < 120; }

// The same of the architecture that is compiled for.
__device__ constexpr bool is_roomy_here() {
#if defined(__CUDA_ARCH__)
    return is_roomy(__CUDA_ARCH__ / 10);
#else
    return false;
#endif
}

// Whether a block has one row at a time, and all its threads share it.
template <bool RESIDUAL, int V, bool WHOLE, bool CLUSTER>
constexpr bool ALONE = CLUSTER || (WHOLE && !RESIDUAL && !HELD<V>);

// Four columns of the partials.
template <bool WHOLE>
__device__ void store_columns(float* partials, int64_t column, const float4& sums, int64_t length) {
    if constexpr (WHOLE) {
        if (column < length) *reinterpret_cast<float4*>(partials + column) = sums;
    } else {
        if (column < length) partials[column] = sums.x;
        if (column + 1 < length) partials[column + 1] = sums.y;
        if (column + 2 < length) partials[column + 2] = sums.z;
        if (column + 3 < length) partials[column + 3] = sums.w;
    }
}

// What is subtracted from a row's gradient: means, from the sums of w·dy and w·dy·x̂, the former only of what was centred.
__device__ inline Pair means_of(const Pair& sums, float per_element) {
    return {sums.first * per_element, sums.second * per_element};
}
__device__ inline Pair means_of(float sum, float per_element) { return {0.0f, sum * per_element}; }

// A vector of a row, as numbers: x̂, the gradient, and the gradient times the weight.
template <typename T, bool CENTRED>
struct Worked {
    static constexpr int E = Vec<T>::size;
    float x_hat[E], g[E], weighted[E];

    __device__ void work_out(const Vec<T>& x, const Vec<T>& grad, const uint4& weight, const Stats& stats) {
        unpack(x, x_hat);
        unpack(grad, g);
        unpack(reinterpret_cast<const Vec<T>&>(weight), weighted);
#pragma unroll
        for (int e = 0; e < E; ++e) {
            x_hat[e] = normalized<CENTRED, SHIFTED<T>>(x_hat[e], stats);
            weighted[e] *= g[e];
        }
    }
};

// A thread's sums over the rows that it went through, as stage one of the weights' gradients; one sum's partials lie
// `apart` from the other's. Where rows share a block their sums are added up in shared memory first, so that the
// partials stay few.
template <bool WHOLE, typename Share, int SUMS, int V, int E>
__device__ void store_partials(float* partials, int64_t apart, const float (&own)[SUMS][V][E], const Share& share,
                               uint4* in_shared, int64_t length) {
    constexpr int FOURS = E / 4;
    constexpr int PIECES = V * FOURS;
    const int lanes = blockDim.x, stripes = Share::LONE ? 1 : static_cast<int>(blockDim.y), width = lanes * PIECES;
    auto* const rows = reinterpret_cast<float4*>(in_shared);
    if (stripes > 1) __syncthreads();  // what stood there before has been read
#pragma unroll
    for (int s = 0; s < SUMS; ++s) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const float* const sum = own[s][i / FOURS] + i % FOURS * 4;
            const float4 four = make_float4(sum[0], sum[1], sum[2], sum[3]);
            const int64_t column = int64_t{share.at(i / FOURS)} * E + i % FOURS * 4;
            if (stripes == 1 && share.at(i / FOURS) < share.end)
                store_columns<WHOLE>(partials + s * apart, column, four, length);
            if (stripes > 1) rows[(s * stripes + threadIdx.y) * width + i * lanes + threadIdx.x] = four;
        }
    }
    if (stripes == 1) return;
    __syncthreads();
    // Powers of two all of them: code that runs once is slow to come, and divisions are long.
    const int log_lanes = __ffs(lanes) - 1;
    for (int at = threadIdx.y * lanes + threadIdx.x; at < SUMS * width; at += lanes * stripes) {
        const int piece = at >> log_lanes, s = piece / PIECES, i = piece % PIECES, lane = at & (lanes - 1);
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int y = 0; y < stripes; ++y) {
            const float4 more = rows[(s * stripes + y) * width + i * lanes + lane];
            sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
        }
        const int64_t column = int64_t{lane + i / FOURS * lanes} * E + i % FOURS * 4;
        store_columns<WHOLE>(partials + s * apart, column, sum, length);
    }
}

// How many rows there are from `row` on, every `apart`-th. Divided on the host: on the GPU a division of 64 bits would stand
// before the first load.
template <typename T>
__device__ int turns_of(int64_t row, const NormBackward<T>& p) {
    return p.turns + (row < p.rest ? 1 : 0);
}

// The rows of an operand that a thread goes through: every `apart`-th from `row` on. EVEN: they lie evenly apart, and an
// addition leads from one to the next.
template <bool EVEN, typename T>
struct RowCursor {
    T *base, *at;
    int64_t row;

    __device__ RowCursor(T* base_in, const EvenRows& even, int64_t row_in) : base(base_in), at(base), row(row_in) {
        if constexpr (EVEN) at += row * even.step;
    }

    // Where the row starts, if it is there (`live`); from then on it is the next one. How far that is was multiplied on the
    // host: no register is held for what is a kernel's argument.
    __device__ T* next(const Rows& rows, const EvenRows& even, int64_t apart, bool live) {
        T* const start = EVEN ? at : base + (live ? rows.start(row) : 0);
        if constexpr (EVEN) at += even.apart;
        row += apart;
        return start;
    }
};

// What a thread does with its part of the rows that it goes through, every `apart`-th from `row` on, which it calls by
// their turn. HELD: what the first pass over a row makes of it stays in registers for the second, as does the weight.
template <typename T, bool CENTRED, bool RESIDUAL, int V, bool WHOLE, bool CLUSTER>
struct BackwardRows {
    static constexpr int E = Vec<T>::size, STAGES = backward_stages(V, is_roomy_here()), WEIGHT = 2 * V * STAGES;
    static constexpr int SUMS = CENTRED ? 2 : 1, KEPT = HELD<V> ? V : 1;
    static constexpr bool LONE = ALONE<RESIDUAL, V, WHOLE, CLUSTER>;
    using Sums = std::conditional_t<CENTRED, Pair, float>;
    using Share = RowShare<CLUSTER, LONE>;

    const NormBackward<T>& p;
    const Share& share;
    const Slots<T, LONE ? ROW_THREADS : 0> slots;
    const int64_t row;
    const int own;  // turns of this thread
    RowCursor<WHOLE, const T> input, grad, grad_sum;
    RowCursor<WHOLE, T> grad_input;
    float of_columns[SUMS][V][E] = {};  // sums, of the weight's gradient and of the bias's
    float scale[KEPT][E], x_hat[KEPT][E], weighted[KEPT][E], g[E];
    Vec<T> more[RESIDUAL ? V : 1];

    __device__ BackwardRows(const NormBackward<T>& p_in, const Share& share_in, uint4* in_shared, int64_t row_in)
        : p(p_in),
          share(share_in),
          slots(in_shared),
          row(row_in),
          own(turns_of(row, p)),
          input(p.input, p.even_in, row),
          grad(p.grad, p.even_g, row),
          grad_sum(p.grad_sum, p.even_gs, row),
          grad_input(p.grad_input, p.even_gi, row) {
        if constexpr (!HELD<V>)
            slots.template fetch_parameter<WHOLE, V>(WEIGHT, p.weight, p.parameter, share, p.length, 1.0f);
    }

    // Once rows are on their way: it waits for memory.
    __device__ void hold_weight() {
        if constexpr (HELD<V>) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                const int first = share.at(v) * E;
                unpack(load_parameter<WHOLE>(p.weight, p.parameter, first, p.length, 1.0f), scale[v]);
            }
        }
    }

    // To be called for every turn, in order.
    __device__ void fetch(int turn) {
        const bool live = turn < own;
        const int begin = turn % STAGES * 2 * V;
        slots.template fetch<WHOLE, V>(begin, input.next(p.in, p.even_in, p.apart, live), p.in, share, live, p.length);
        slots.template fetch<WHOLE, V>(begin + V, grad.next(p.g, p.even_g, p.apart, live), p.g, share, live, p.length);
        cp_async_commit();
    }
    __device__ Stats stats(int turn) const {
        return turn < own ? load_stats<CENTRED>(p.stats, row + turn * p.apart) : Stats{0.0f, 0.0f, 0.0f};
    }
    // What is added to the gradient of this turn's row, unless it comes element by element, which has time.
    __device__ void fetch_more(int turn) {
        if constexpr (RESIDUAL && WHOLE) {
            const bool live = LONE || turn < own;
            load_row<WHOLE>(more, grad_sum.next(p.gs, p.even_gs, p.apart, live), p.gs, share, live, p.length, 0.0f);
        }
    }

    // x̂ and the weighted gradient of vector v.
    __device__ void work_out(int turn, int v, const Stats& stats) {
        const int begin = turn % STAGES * 2 * V + v, at = v % KEPT;
        slots.read(begin, x_hat[at]);
        slots.read(begin + V, g);
        if constexpr (!HELD<V>) slots.read(WEIGHT + v, scale[at]);
#pragma unroll
        for (int e = 0; e < E; ++e) {
            x_hat[at][e] = normalized<CENTRED, SHIFTED<T>>(x_hat[at][e], stats);
            weighted[at][e] = g[e] * scale[at][e];
        }
    }

    // The first pass: what this thread adds to the sums of its row, and to those of its columns.
    __device__ Sums sums(int turn, const Stats& stats) {
        Sums sums{};
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const int at = v % KEPT;
            work_out(turn, v, stats);
            Pair partial{0.0f, 0.0f};
#pragma unroll
            for (int e = 0; e < E; ++e) {
                of_columns[0][v][e] = fmaf(g[e], x_hat[at][e], of_columns[0][v][e]);
                if constexpr (CENTRED) of_columns[1][v][e] += g[e];
                partial = {partial.first + weighted[at][e], fmaf(weighted[at][e], x_hat[at][e], partial.second)};
            }
            if constexpr (CENTRED) sums = PairSum{}(sums, partial);
            if constexpr (!CENTRED) sums += partial.second;
        }
        return sums;
    }

    // The second pass.
    __device__ void store_gradient(int turn, const Sums& sums, const Stats& stats) {
        const bool live = LONE || turn < own;
        const Pair means = means_of(sums, p.per_element);
        T* const to = grad_input.next(p.gi, p.even_gi, p.apart, live);
        const T* const added = RESIDUAL && !WHOLE ? grad_sum.next(p.gs, p.even_gs, p.apart, live) : nullptr;
#pragma unroll(WHOLE ? V : 1)
        for (int v = 0; v < V; ++v) {
            const int at = v % KEPT, first = share.at(v) * E;
            if constexpr (!HELD<V>) work_out(turn, v, stats);
            float x[E];
#pragma unroll
            for (int e = 0; e < E; ++e) {
                x[e] = gradient<CENTRED>(x_hat[at][e], weighted[at][e], means, stats.rstd);
            }
            if constexpr (RESIDUAL) {
                if constexpr (WHOLE) unpack(more[v], g);
                if constexpr (!WHOLE)
                    unpack(load_chunk(added, p.gs, first,
                                      live && (!CLUSTER || share.template has<T>(v, p.length)) ? p.length : 0, 0.0f),
                           g);
#pragma unroll
                for (int e = 0; e < E; ++e) x[e] += g[e];
            }
            store_part<WHOLE, CLUSTER>(to, p.gi, pack<T>(x), v, share, live, p.length);
        }
    }
};

// One read of input and gradient, one write: while a row is worked on the next ones arrive, and every thread keeps the
// sums of its columns in registers over all the rows that it goes through: those of the weights too where nobody wants
// them, which costs no byte and spares half of the instances. Where rows are not held, the first pass over the next row
// stands between sending a row's sums and receiving them.
template <typename T, bool CENTRED, bool RESIDUAL, int V, bool WHOLE, bool CLUSTER>
__device__ void norm_backward_registers(const NormWeights<T>& w, const NormBackward<T>& p) {
#if __CUDA_ARCH__ >= 800
    if (!exists_here<CLUSTER>()) return;
    using Mine = BackwardRows<T, CENTRED, RESIDUAL, V, WHOLE, CLUSTER>;
    using Sums = typename Mine::Sums;
    const std::conditional_t<CENTRED, PairSum, Sum> add;
    launch_dependents();  // each block fills its SM: the next kernel's come as these leave, and not after the last
    extern __shared__ __align__(SLOT_ALIGNMENT) uint4 in_shared[];
    __shared__ Letterbox<CLUSTER, Sums> letterbox[2];
    const typename Mine::Share share(vectors_of<T>(p.length));
    share.open(letterbox[0], letterbox[1]);
    wait_for_previous();
    // The rows of a turn lie a grid apart, so that those of the last one are spread over all SMs.
    const int64_t first_row = CLUSTER ? share.row : blockIdx.x;
    Mine mine(p, share, in_shared, first_row + (Mine::LONE ? 0 : int64_t{gridDim.x} * threadIdx.y));
#pragma unroll 1
    for (int turn = 0; turn < Mine::STAGES; ++turn) mine.fetch(turn);
    mine.hold_weight();
    const int turns = Mine::LONE ? mine.own : turns_of(first_row, p);
    const bool gradient = p.grad_input != nullptr;
    Stats next = mine.stats(0);
    share.meet();
    if constexpr (HELD<V> || !is_roomy_here()) {
        for (int turn = 0; turn < turns; ++turn) {
            const Stats stats = next;
            next = mine.stats(turn + 1);
            mine.fetch_more(turn);
            cp_async_wait<Mine::STAGES - 1>();
            Sums sums = mine.sums(turn, stats);
            if constexpr (HELD<V>) mine.fetch(turn + Mine::STAGES);
            if (gradient) {
                sums = send_over_row<Mine::LONE>(sums, add, letterbox[turn % 2]);
                sums = receive_over_row<Mine::LONE>(sums, add, letterbox[turn % 2], turn / 2);
                mine.store_gradient(turn, sums, stats);
            }
            if constexpr (!HELD<V>) mine.fetch(turn + Mine::STAGES);
        }
    } else {
        Stats stats = next;
        Sums sent{};
        for (int turn = -1; turn < turns; ++turn) {
            const Stats before = stats;
            stats = next;
            next = mine.stats(turn + 2);
            if (turn >= 0) mine.fetch_more(turn);
            cp_async_wait<Mine::STAGES - 2>();
            Sums sums = mine.sums(turn + 1, stats);
            Sums of_row{};
            if (turn >= 0 && gradient) of_row = receive_over_row<Mine::LONE>(sent, add, letterbox[turn % 2], turn / 2);
            if (turn + 1 < turns && gradient) sent = send_over_row<Mine::LONE>(sums, add, letterbox[(turn + 1) % 2]);
            if (turn < 0) continue;
            if (gradient) mine.store_gradient(turn, of_row, before);
            mine.fetch(turn + Mine::STAGES);
        }
    }
    cp_async_wait<0>();
    if (w.partials == nullptr) return;
    float* const partials = w.partials + first_row * p.length;
    const typename Mine::Share anew(vectors_of<T>(p.length));  // no register is held for it meanwhile
    store_partials<WHOLE>(partials, w.groups * p.length, mine.of_columns, anew, in_shared, p.length);
#endif
}

}  // namespace kl
