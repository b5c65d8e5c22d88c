// Normalised rows of 16-bit elements whose vectors wait in shared memory, by blocks or clusters. A thread holds one vector at
// a time and so needs few registers: an SM has room for more of them, and while some wait for memory, or for each other,
// others work.
#pragma once

#include "norm/short_rows.cuh"

namespace kl {

// A thread has VECTORS of each of ROWS rows, and an SM BLOCKS blocks of THREADS. Of a second operand RING vectors of each row
// are on the chip at a time.
template <int ROWS_, int VECTORS_, int THREADS_, int BLOCKS_, int RING_ = VECTORS_>
struct SlotShape {
    static constexpr int ROWS = ROWS_, VECTORS = VECTORS_, THREADS = THREADS_, BLOCKS = BLOCKS_, RING = RING_;
    static constexpr int WARPS = THREADS / WARP, REACH = VECTORS * THREADS;  // the latter vectors of a row
    static constexpr int LANES = WARP / ROWS;  // that finish a row's sum, where a warp's lanes share them
    static constexpr int slots(int operands) { return ROWS * (VECTORS + (operands - 1) * RING); }
};

// Which rows a block has, and which of their vectors: from `begin` to `end`. In a cluster all blocks have the same rows and
// equal parts of them, of whole lines.
template <typename SHAPE, bool CLUSTER>
struct SlotShare {
    int vectors, part, begin = 0, end, group = blockIdx.x;  // `group` numbers blocks, or clusters

    // Of rows of so many vectors.
    __device__ explicit SlotShare(int of_row) : vectors(of_row), part(of_row) {
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) {
            const int log2 = cluster::log2_blocks();
            part = (((vectors - 1) >> log2) / LINE_VECTORS + 1) * LINE_VECTORS;
            begin = static_cast<int>(cluster::rank()) * part;
            group >>= log2;
        }
#endif
        end = min(begin + part, vectors);
    }
    __device__ int64_t row() const { return int64_t{group} * SHAPE::ROWS; }  // the first

    // This thread's v-th vector of a row, and whether there is one.
    __device__ int at(int v) const { return begin + threadIdx.x + v * SHAPE::THREADS; }
    __device__ bool has(int v) const { return at(v) < end; }

    // How many vectors of a row a warp has, of the first so many of each thread; and a block.
    __device__ int of_warp(int warp, int first) const {
        int count = 0;
#pragma unroll
        for (int v = 0; v < first; ++v) count += max(min(end - (begin + warp * WARP + v * SHAPE::THREADS), WARP), 0);
        return count;
    }
    __device__ int of_block(int block) const { return max(min(vectors - block * part, part), 0); }
};

// As cp_async_wait, of a number that is constant once loops are unrolled, and at most MOST.
template <int MOST>
__device__ void cp_async_wait_most(int pending) {
    if constexpr (MOST > 0) {
        if (pending < MOST) return cp_async_wait_most<MOST - 1>(pending);
    }
    cp_async_wait<MOST>();
}

// A thread's vectors on their way into shared memory, v by v; of the second operand a slot is free for a later vector when
// its own has been read. Rows past the last count as zeros. ONCE: as in Slots.
template <typename T, typename SHAPE, bool CLUSTER, int OPERANDS, bool ONCE>
struct SlotRows {
    static constexpr int ROWS = SHAPE::ROWS, V = SHAPE::VECTORS, RING = SHAPE::RING;

    const ShortNorm<T>& p;
    const SlotShare<SHAPE, CLUSTER>& share;
    uint4* const own;
    const T* const residual;  // where this thread's first vector lies
    const int left;           // rows from this block's first on

    __device__ SlotRows(const ShortNorm<T>& p_in, const SlotShare<SHAPE, CLUSTER>& share_in, uint4* shared)
        : p(p_in),
          share(share_in),
          own(shared + threadIdx.x),
          residual(OPERANDS > 1 ? at(p.residual, p.res_step) : nullptr),
          left(static_cast<int>(min(p.count - share.row(), int64_t{ROWS}))) {}

    // Where this thread's first vector of the first row lies. As one value, from which later ones are a constant apart: ptxas
    // would keep its parts in registers, and add them up anew for each.
    template <typename P>
    __device__ P* at(P* operand, int64_t step) const {
        P* first = operand + share.row() * step + int64_t{share.at(0)} * Vec<T>::size;
        asm volatile("" : "+l"(first));
        return first;
    }
    __device__ bool live(int r, int v) const { return r < left && share.has(v); }
    __device__ uint4& slot(int operand, int r, int v) const {
        return own[(operand == 0 ? r * V + v : ROWS * V + r * RING + v % RING) * SHAPE::THREADS];
    }
    // The v-th vectors of all rows; `first` is where this thread's first one of the first row lies.
    __device__ void fetch(int operand, const T* first, int v) const {
        const T* from = first + v * SHAPE::THREADS * Vec<T>::size;
#pragma unroll
        for (int r = 0; r < ROWS; ++r, from += operand == 0 ? p.in_step : p.res_step) {
            cp_async16_if<ONCE>(shared_address(&slot(operand, r, v)), from, live(r, v));
        }
    }
    __device__ void fetch_first() const {
        const T* const input = at(p.input, p.in_step);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            fetch(0, input, v);
            if (OPERANDS > 1 && v < RING) fetch(1, residual, v);
            cp_async_commit();
        }
    }
    // Waits for the v-th vectors. A group of copies is committed for each v, and one more as each is done with.
    __device__ void wait(int v) const {
        cp_async_wait_most<V>(OPERANDS == 1 || RING == V ? V - 1 - v : v < RING ? V - 1 : RING - 1);
    }
    __device__ void done(int v) const {
        if (OPERANDS == 1 || RING == V) return;
        if (v + RING < V) fetch(1, residual, v + RING);
        cp_async_commit();
    }
    // Vector v of row r, as it was made.
    __device__ void read(int r, int v, float (&x)[Vec<T>::size]) const {
        const uint4 word = slot(0, r, v);
        unpack(reinterpret_cast<const Vec<T>&>(word), x);
    }
};

// What is found of a row: the sum, and the squares of the deviations from its mean; or, not CENTRED, of the elements.
template <bool CENTRED>
using Found = std::conditional_t<CENTRED, Pair, float>;

// That of a row, from those of parts of so many elements, a part a lane; `per_element` is 1 / elements of all.
// Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
template <bool CENTRED>
__device__ Found<CENTRED> found_together(const Found<CENTRED>& part, int elements, float per_element, int lanes) {
    if constexpr (!CENTRED) {
        return over_lanes(part, Sum{}, lanes);
    } else {
        const float sum = over_lanes(part.first, Sum{}, lanes), of_part = static_cast<float>(elements);
        const float off = part.first * rcp_approx(fmaxf(of_part, 1.0f)) - sum * per_element;
        return {sum, over_lanes(fmaf(of_part * off, off, part.second), Sum{}, lanes)};
    }
}

// Where warps, and the blocks of a cluster, leave what they found. In shared memory.
template <bool CENTRED, typename SHAPE, bool CLUSTER>
struct SlotMail {
    static constexpr int ROWS = SHAPE::ROWS;
    using Value = Found<CENTRED>;
    Value of_warps[ROWS][SHAPE::WARPS], of_blocks[CLUSTER ? ROWS : 1][MAX_CLUSTER];
    uint64_t arrived;  // an mbarrier, which counts what has come

    // To be called before all else.
    __device__ void open() {
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) {
            if (threadIdx.x == 0) {
                mbarrier_init(shared_address(&arrived), 1);
                mbarrier_init_fence();
            }
            cluster::arrive_relaxed();  // the fence has made the barrier known, and there is nothing else to see
        }
#endif
    }

    // Makes the value of each row from those of all warps. A row's is in all lanes that finish it; in a cluster the first
    // warps, one a row, send the block's to the others, and `meanwhile()` is called before they are waited for.
    template <typename T, typename F>
    __device__ void exchange(Value (&rows)[ROWS], const Value& own, const SlotShare<SHAPE, CLUSTER>& share,
                             float per_element, F&& meanwhile) {
        constexpr int E = Vec<T>::size, WARPS = SHAPE::WARPS, LANES = SHAPE::LANES;
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        if (lane % LANES == 0) of_warps[lane / LANES][warp] = own;
        __syncthreads();
        const auto of_block = [&](int r, float per) {
            const int elements = share.of_warp(lane % WARPS, SHAPE::VECTORS) * E;
            return found_together<CENTRED>(of_warps[r][lane % WARPS], elements, per, WARPS);
        };
        if constexpr (!CLUSTER) {
            meanwhile();
#pragma unroll
            for (int r = 0; r < ROWS; ++r) rows[r] = of_block(r, per_element);
        }
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) {
            const int blocks = static_cast<int>(cluster::blocks()), rank = static_cast<int>(cluster::rank());
            cluster::wait();  // no block's barrier is open before it has started
            if (threadIdx.x == 0) mbarrier_arrive_expect(shared_address(&arrived), ROWS * blocks * sizeof(Value));
            if (warp < ROWS) {
                const Value value = of_block(warp, rcp_approx(static_cast<float>(max(share.of_block(rank) * E, 1))));
                if (lane < blocks) cluster::send(&of_blocks[warp][rank], value, &arrived, lane);
            }
            meanwhile();
            mbarrier_wait(shared_address(&arrived), 0);
            constexpr int TOGETHER = ROWS > 1 ? 2 : 1, APART = WARP / TOGETHER;  // rows that a warp's lanes share
            const int block = lane & (blocks - 1);
#pragma unroll
            for (int r = 0; r < ROWS; r += TOGETHER) {
                const Value part = of_blocks[r + lane / APART][block];
                const Value whole = found_together<CENTRED>(part, share.of_block(block) * E, per_element, blocks);
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) rows[r + i] = shuffle_from(whole, i * APART);
            }
        }
#endif
    }
};

// What this warp finds in its rows, in the lanes that finish them. One pass, about the mean of a warp's first vectors, as in
// norm/registers.cuh. `make(r, v)` makes a vector and returns it, zeros past a row's end: all rows' first vectors first, which
// `read(r, x)` gives again.
template <bool CENTRED, typename T, typename SHAPE, bool CLUSTER, typename Make, typename Read>
__device__ Found<CENTRED> found_by_warp(const SlotShare<SHAPE, CLUSTER>& share, Make&& make, Read&& read) {
    constexpr int E = Vec<T>::size, ROWS = SHAPE::ROWS, V = SHAPE::VECTORS, LANES = SHAPE::LANES;
    float x[E], centre[ROWS] = {};
    Pair found[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) found[r] = {-0.0f, -0.0f};  // to which a first value is added for nothing
    const auto take_in = [&](int r, int v) {
        const float inside = CENTRED && share.has(v) ? centre[r] : 0.0f;
        Pair partial{-0.0f, -0.0f};
#pragma unroll
        for (int e = 0; e < E; ++e) {
            const float deviation = CENTRED ? x[e] - inside : x[e];
            partial = {partial.first + deviation, fmaf(deviation, deviation, partial.second)};
        }
        found[r] = PairSum{}(found[r], partial);
    };
    float sums[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        unpack(make(r, 0), x);
        sums[r] = -0.0f;
#pragma unroll
        for (int e = 0; e < E; ++e) sums[r] += x[e];
    }
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if constexpr (CENTRED) {
        const float per_element = rcp_approx(static_cast<float>(max(share.of_warp(warp, 1) * E, 1)));
        const float mean = own_over_lanes(sums, Sum{}, WARP) * per_element;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) centre[r] = ROWS == 1 ? mean : shuffle_from(mean, r * LANES);
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (v > 0) unpack(make(r, v), x);
            if (v == 0 && ROWS > 1) read(r, x);
            take_in(r, v);
        }
    }
    if constexpr (CENTRED) {
        Pair own = own_over_lanes(found, PairSum{}, WARP);
        float about = centre[0];
#pragma unroll
        for (int r = 1; r < ROWS; ++r) about = chosen(lane / LANES == r, centre[r], about);
        const auto elements = static_cast<float>(share.of_warp(warp, V) * E);
        own.second -= own.first * (own.first * rcp_approx(fmaxf(elements, 1.0f)));  // whose square may be too large
        return {fmaf(elements, about, own.first), own.second};
    } else {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sums[r] = found[r].second;
        return own_over_lanes(sums, Sum{}, WARP);
    }
}

// `make(r, v, words, live)` makes a vector of those of the operands, all rows' v-th before the next.
template <bool CENTRED, typename SHAPE, bool CLUSTER, int OPERANDS, bool ONCE, typename T, typename Make>
__device__ void norm_slots_of(const ShortNorm<T>& p, const SlotShare<SHAPE, CLUSTER>& share, Make&& make) {
    constexpr int E = Vec<T>::size, ROWS = SHAPE::ROWS, V = SHAPE::VECTORS;
    extern __shared__ __align__(SLOT_ALIGNMENT) uint4 in_shared[];
    __shared__ SlotMail<CENTRED, SHAPE, CLUSTER> mail;
    mail.open();
    if constexpr (!CLUSTER) begin_early();
    const SlotRows<T, SHAPE, CLUSTER, OPERANDS, ONCE> rows(p, share, in_shared);
    rows.fetch_first();
    const auto make_and_keep = [&](int r, int v) {
        if (r == 0) rows.wait(v);
        uint4 words[OPERANDS];
#pragma unroll
        for (int o = 0; o < OPERANDS; ++o) words[o] = rows.slot(o, r, v);
        const Vec<T> made = make(r, v, words, rows.live(r, v));
        if constexpr (OPERANDS > 1) rows.slot(0, r, v) = reinterpret_cast<const uint4&>(made);
        if (r == ROWS - 1) rows.done(v);
        return made;
    };
    const Found<CENTRED> by_warp =
        found_by_warp<CENTRED, T>(share, make_and_keep, [&](int r, float (&x)[E]) { rows.read(r, 0, x); });
    cp_async_wait<0>();

    uint4 weight, bias;
    const auto fetch_parameters = [&](int v) {
        weight = filled<T>(1.0f);
        load_if<CLUSTER>(weight, p.weight + share.at(v) * E, p.weight != nullptr && share.has(v));
        if constexpr (!CENTRED) return;
        bias = filled<T>(0.0f);
        load_if<CLUSTER>(bias, p.bias + share.at(v) * E, p.bias != nullptr && share.has(v));
    };
    Found<CENTRED> found[ROWS];
    mail.template exchange<T>(found, by_warp, share, p.per_element, [&] { fetch_parameters(0); });
    Stats stats[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if constexpr (CENTRED) {
            stats[r] =
                stats_of_deviations(found[r].first * p.per_element, {0.0f, found[r].second}, p.per_element, p.eps);
        } else {
            stats[r] = stats_of_squares(found[r] * p.per_element, p.eps);
        }
        if (share.at(0) == 0 && r < rows.left) store_stats<CENTRED>(p.stats, share.row() + r, stats[r]);
    }
    T* const to = rows.at(p.output, p.out_step);
#pragma unroll
    for (int v = 0; v < V; ++v) {
        float x[E], scale[E], offset[E];
        unpack(reinterpret_cast<const Vec<T>&>(weight), scale);
        if constexpr (CENTRED) unpack(reinterpret_cast<const Vec<T>&>(bias), offset);
        if (v + 1 < V) fetch_parameters(v + 1);  // before the stores, over which no load is moved
        T* out = to + v * SHAPE::THREADS * E;
#pragma unroll
        for (int r = 0; r < ROWS; ++r, out += p.out_step) {
            rows.read(r, v, x);
#pragma unroll
            for (int e = 0; e < E; ++e) {
                x[e] = normalized<CENTRED, SHIFTED<T>>(x[e], stats[r]);
                x[e] = CENTRED ? fmaf(x[e], scale[e], offset[e]) : x[e] * scale[e];
            }
            store_if(out, pack<T>(x), rows.live(r, v));
            keep_order();
        }
    }
}

// Rows as they are, or with a RESIDUAL the sum of two, which is stored.
template <typename T, bool CENTRED, bool RESIDUAL, typename SHAPE, bool CLUSTER>
__device__ void norm_slots(const ShortNorm<T>& p) {
    if (!exists_here<CLUSTER>()) return;
    const SlotShare<SHAPE, CLUSTER> share(p.length / Vec<T>::size);
    norm_slots_of<CENTRED, SHAPE, CLUSTER, RESIDUAL ? 2 : 1, true>(
        p, share, [&](int r, int v, const auto& words, bool live) {
            const auto& x = reinterpret_cast<const Vec<T>&>(words[0]);
            if constexpr (!RESIDUAL) {
                return x;
            } else {
                const Vec<T> sum = add_vec(x, reinterpret_cast<const Vec<T>&>(words[1]));
                store_if(p.sum + (share.row() + r) * p.out_step + int64_t{share.at(v)} * Vec<T>::size, sum, live);
                return sum;
            }
        });
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Launches kernel(arguments…) for so many rows.
template <typename SHAPE, int OPERANDS, typename... Parameters, typename... Arguments>
void launch_slots(void (*kernel)(Parameters...), DeviceSet& asked, int64_t count, unsigned cluster,
                  const Launch& launch, const Arguments&... arguments) {
    const int bytes = slot_bytes(SHAPE::THREADS, SHAPE::slots(OPERANDS));
    allow_shared(kernel, bytes, launch.device, asked);
    allow_clusters(kernel, cluster);
    KL_CHECK(cluster == 1 || has_hopper_code(kernel, launch.device), NO_CLUSTERS);
    const dim3 grid(grid_size(ceil_div(count, SHAPE::ROWS) * cluster));
    LaunchConfig(grid, dim3(SHAPE::THREADS), bytes, launch)
        .clusters_of(cluster)
        .early(cluster == 1 && has_hopper_code(kernel, launch.device))
        .run(kernel, arguments...);
}

}  // namespace kl
