// The forward pass of the longest 16-bit rows that are centred: by clusters that stay, whose weight and bias lie in shared
// memory, since half of what other clusters read comes from the L2. Rows arrive there some ahead, each warp's stretch of a row
// by a bulk copy of its own. No warp waits for another of its block: each gives notice of what it found in its stretch, a warp
// that serves adds that up and tells the other blocks, and meanwhile the others make the first pass over the next row.
#pragma once

#include "norm/smem_pipeline.cuh"

namespace kl {

// BLOCKS of a cluster have THREADS each: those of the warp that serves, and others, which have VECTORS of a row each. STAGES
// rows are on the chip: of the longest, more at once make memory slower. FULL: rows are as long as they can be.
template <int VECTORS_, int THREADS_, int BLOCKS_, int STAGES_, bool FULL_>
struct StayingShape {
    static constexpr int VECTORS = VECTORS_, THREADS = THREADS_ + WARP, BLOCKS = BLOCKS_, STAGES = STAGES_;
    static constexpr bool FULL = FULL_;
    using SHAPE = SlotShape<1, VECTORS, THREADS_, 1>;
    static constexpr int SLOTS = SHAPE::REACH, BYTES = (STAGES + 2) * SLOTS * static_cast<int>(sizeof(uint4));
    static constexpr bool takes(int64_t vectors) {
        constexpr int64_t MOST = BLOCKS * SLOTS;
        return FULL ? vectors == MOST : vectors < MOST && vectors > MOST / 2;
    }
};

// Sums, and sums of the squares of the deviations from their own mean, of warps and of blocks. A warp that gives notice of
// turn t + 2 has received turn t, of which all warps had given notice. A block sends turn t + 4 when all of its warps have
// received turn t + 2, which every block sent when all of its warps had read turn t.
template <typename STAY>
struct StayingMail {
    static constexpr int NOTICES = 2, BOXES = 4;
    Pair of_warps[NOTICES][STAY::SHAPE::WARPS], of_blocks[BOXES][STAY::BLOCKS];
    uint64_t noticed[NOTICES], arrived[BOXES], full[STAY::STAGES][STAY::SHAPE::WARPS], parameters;  // mbarriers

    __device__ void open() {
        for (uint64_t& barrier : noticed) mbarrier_init(shared_address(&barrier), STAY::SHAPE::WARPS);
        for (uint64_t& barrier : arrived) mbarrier_init(shared_address(&barrier), 1);
        mbarrier_init(shared_address(&parameters), 1);
        mbarrier_init_fence();
    }
    __device__ void open(int warp) {
        for (auto& of_stage : full) mbarrier_init(shared_address(&of_stage[warp]), 1);
        mbarrier_init_fence();
    }
};

// A row's statistics from those of its blocks, each of which has as many elements but for the last. Divisions are made once
// for all rows: every warp takes these steps between a row's last part and its first store.
struct BlocksTogether {
    float usual, last, per_usual, per_last;

    __device__ BlocksTogether(int of_block, int of_last)
        : usual(static_cast<float>(of_block)),
          last(static_cast<float>(of_last)),
          per_usual(1.0f / usual),
          per_last(1.0f / last) {}

    template <int BLOCKS>
    __device__ Stats stats(const Pair (&blocks)[BLOCKS], float per_element, float eps) const {
        float sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) sum += blocks[b].first;
        const float mean = sum * per_element;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const bool whole = b + 1 < BLOCKS;
            const float off = fmaf(blocks[b].first, whole ? per_usual : per_last, -mean);
            squares += fmaf(off * off, whole ? usual : last, blocks[b].second);
        }
        return stats_of_deviations(mean, {0.0f, squares}, per_element, eps);
    }
};

#if __CUDA_ARCH__ >= 900

// A block's part of its cluster's rows, of which there is one each turn.
template <typename T, typename STAY>
struct StayingPart {
    static constexpr int E = Vec<T>::size, V = STAY::VECTORS;
    using SHAPE = typename STAY::SHAPE;
    using Mail = StayingMail<STAY>;

    const ShortNorm<T>& p;
    Mail& mail;
    uint4 *const weight, *const bias, *const rows;
    const SlotShare<SHAPE, true> share;
    const int mine, stretch, first, apart, turns;  // vectors of this block, and of a warp; rows
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    __device__ StayingPart(const ShortNorm<T>& p_in, Mail& mail_in, uint4* shared)
        : p(p_in),
          mail(mail_in),
          weight(shared),
          bias(weight + STAY::SLOTS),
          rows(bias + STAY::SLOTS),
          share(p.length / E),
          mine(share.end - share.begin),
          stretch(STAY::FULL ? V * WARP : (mine + SHAPE::THREADS - 1) / SHAPE::THREADS * WARP),
          first(share.group),
          apart(static_cast<int>(gridDim.x) / STAY::BLOCKS),
          turns((static_cast<int>(p.count) - first + apart - 1) / apart) {}

    __device__ bool serves() const { return warp == SHAPE::WARPS; }
    // Of this block's vectors: how many a warp has; the v-th of this thread, whether there is one, and whether of its warp.
    __device__ int of_warp(int one) const { return max(min(mine - one * stretch, stretch), 0); }
    __device__ int own(int v) const { return warp * stretch + v * WARP + lane; }
    __device__ bool has(int v) const { return STAY::FULL || v * WARP + lane < of_warp(warp); }
    __device__ bool any_has(int v) const { return STAY::FULL || v * WARP < of_warp(warp); }
    // Where this block's part begins, of what lies `step` apart from row to row.
    template <typename P>
    __device__ P* at(P* operand, int64_t step, int turn) const {
        return operand + (first + int64_t{turn} * apart) * step + int64_t{share.begin} * E;
    }

    // By a thread of the warp.
    __device__ void fetch(int turn, int stage) const {
        const uint32_t bytes = of_warp(warp) * sizeof(uint4);
        if (turn >= turns || bytes == 0) return;
        uint64_t* const full = &mail.full[stage][warp];
        mbarrier_arrive_expect(shared_address(full), bytes);
        bulk_load<true>(rows + stage * STAY::SLOTS + warp * stretch, at(p.input, p.in_step, turn) + warp * stretch * E,
                        bytes, full);
    }
    __device__ void begin() const {
        if (!serves()) {
            mail.open(warp);
            for (int stage = 0; stage < STAY::STAGES; ++stage) fetch(stage, stage);
            return;
        }
        mail.open();
        const uint32_t bytes = mine * sizeof(uint4), wanted = (p.weight != nullptr) + (p.bias != nullptr);
        mbarrier_arrive_expect(shared_address(&mail.parameters), wanted * bytes);
        if (p.weight != nullptr) bulk_load<false>(weight, at(p.weight, 0, 0), bytes, &mail.parameters);
        if (p.bias != nullptr) bulk_load<false>(bias, at(p.bias, 0, 0), bytes, &mail.parameters);
    }
    // What no copy writes: parameters that are absent, and zeros past the end.
    __device__ void fill() const {
        for (int i = threadIdx.x; i < STAY::SLOTS; i += STAY::THREADS) {
            if (p.weight == nullptr) weight[i] = filled<T>(1.0f);
            if (p.bias == nullptr) bias[i] = filled<T>(0.0f);
            for (int stage = 0; i >= mine && stage < STAY::STAGES; ++stage) {
                rows[stage * STAY::SLOTS + i] = filled<T>(0.0f);
            }
        }
    }

    // Of a warp's vectors, in one pass about the first element. If that is far from the mean, so are the squares from nought:
    // what is lost of them is below the number of the warp's elements times the spacing of float32.
    __device__ Pair found_in(const Vec<T> (&tile)[V], float elements, float per_element) const {
        float x[E], centre = 0.0f;
        Pair found{};
#pragma unroll
        for (int v = 0; v < V; ++v) {
            if (v > 0 && !any_has(v)) break;
            unpack(tile[v], x);
            if (v == 0) centre = shuffle_from(x[0], 0);
            const float inside = has(v) ? centre : 0.0f;
            Pair partial{};
#pragma unroll
            for (int e = 0; e < E; ++e) {
                const float deviation = x[e] - inside;
                partial = {partial.first + deviation, fmaf(deviation, deviation, partial.second)};
            }
            found = v == 0 ? partial : PairSum{}(found, partial);
        }
        found = over_lanes(found, PairSum{}, WARP);
        return {fmaf(elements, centre, found.first), found.second - found.first * (found.first * per_element)};
    }

    // The warp that serves: of each row it tells all blocks what this one found.
    __device__ void serve() const {
        const int elements = of_warp(lane % SHAPE::WARPS) * E, rank = static_cast<int>(cluster::rank());
        const float per_element = 1.0f / static_cast<float>(mine * E);
        Ring<Mail::NOTICES> notice;
        Ring<Mail::BOXES> box;
        for (int turn = 0; turn < turns; ++turn, notice.next(), box.next()) {
            mbarrier_wait(shared_address(&mail.noticed[notice.stage]), notice.phase);
            const Pair of_warp = mail.of_warps[notice.stage][lane % SHAPE::WARPS];
            uint64_t* const arrived = &mail.arrived[box.stage];
            if (lane == 0) mbarrier_arrive_expect(shared_address(arrived), STAY::BLOCKS * sizeof(Pair));
            const Pair of_block = found_together<true>(of_warp, elements, per_element, SHAPE::WARPS);
            __syncwarp();  // all lanes have read what the warps found: once this has arrived, more comes in its place
            if (lane < STAY::BLOCKS) cluster::send(&mail.of_blocks[box.stage][rank], of_block, arrived, lane);
        }
    }

    // The other warps: the first pass over a row, then the second over the one before.
    __device__ void work() const {
        const BlocksTogether together(share.part * E, share.of_block(STAY::BLOCKS - 1) * E);
        const auto elements = static_cast<float>(of_warp(warp) * E);
        const float per_element = 1.0f / fmaxf(elements, 1.0f);
        Ring<STAY::STAGES> row;
        Ring<Mail::NOTICES> notice;
        Ring<Mail::BOXES> box;
        Vec<T> tile[V], before[V];
        T* to = at(p.output, p.out_step, 0);
        mbarrier_wait(shared_address(&mail.parameters), 0);
        for (int turn = 0; turn <= turns; ++turn) {
            if (turn < turns) {
                if (any_has(0)) mbarrier_wait(shared_address(&mail.full[row.stage][warp]), row.phase);
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    if (v > 0 && !any_has(v)) break;
                    reinterpret_cast<uint4&>(tile[v]) = rows[row.stage * STAY::SLOTS + own(v)];
                }
                const Pair found = found_in(tile, elements, per_element);
                __syncwarp();  // all lanes have read their vectors: others may come in their place
                if (lane == 0) {
                    fetch(turn + STAY::STAGES, row.stage);
                    mail.of_warps[notice.stage][warp] = found;
                    mbarrier_arrive(shared_address(&mail.noticed[notice.stage]));
                }
                row.next();
                notice.next();
            }
            if (turn > 0) {
                mbarrier_wait(shared_address(&mail.arrived[box.stage]), box.phase);
                const Stats stats = together.stats(mail.of_blocks[box.stage], p.per_element, p.eps);
                if (share.begin == 0 && own(0) == 0)
                    store_stats<true>(p.stats, first + int64_t{turn - 1} * apart, stats);
                store(to, before, stats);
                to += apart * p.out_step;
                box.next();
            }
#pragma unroll
            for (int v = 0; v < V; ++v) before[v] = tile[v];
        }
    }
    __device__ void store(T* to, const Vec<T> (&tile)[V], const Stats& stats) const {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            if (!any_has(v)) break;
            const int i = own(v);
            float x[E], scale[E], offset[E];
            unpack(tile[v], x);
            unpack(reinterpret_cast<const Vec<T>&>(weight[i]), scale);
            unpack(reinterpret_cast<const Vec<T>&>(bias[i]), offset);
#pragma unroll
            for (int e = 0; e < E; ++e) x[e] = fmaf(normalized<true, SHIFTED<T>>(x[e], stats), scale[e], offset[e]);
            if (has(v)) store_streamed(to + i * E, pack<T>(x));
            keep_order();
        }
    }
};

#endif

template <typename T, typename STAY>
__device__ void norm_staying(const ShortNorm<T>& p) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(SLOT_ALIGNMENT) uint4 in_shared[];
    __shared__ StayingMail<STAY> mail;
    const StayingPart<T, STAY> part(p, mail, in_shared);
    if (part.lane == 0) part.begin();
    cluster::arrive_relaxed();  // the fence has made the barriers known
    part.fill();
    cluster::wait();
    __syncthreads();
    // A block that has received the last turn may leave: all that was sent to it has arrived.
    if (part.serves()) {
        part.serve();
    } else {
        part.work();
    }
#endif
}

}  // namespace kl
