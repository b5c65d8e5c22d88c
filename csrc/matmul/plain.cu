// A loader for operands that TMA can read in neither way: strides other than 1 both ways, batches of several dimensions
// or off the 16-byte grid, tf32 off the grid or not along k, fewer unaligned rows than residues. Two warpgroups load with
// plain loads and store what TMA would have: K-major panels with the 128-byte swizzle.
//
// Any 16 bytes of memory lie in two aligned words of 16 bytes; both are loaded (the second mostly comes from L1) and
// shifted together, so that no load is narrower for being unaligned. Words that hold an element of the operand lie in
// its allocation wholly, since allocations begin and end at multiples of 16 bytes. What runs along x is turned in the
// registers.

#include "persistent.cuh"

namespace kl {

template <typename T, int THREADS>
struct PlainOperand {
    static constexpr int E = 16 / sizeof(T);  // elements per chunk of 16 bytes
    static constexpr int CHUNKS = SWIZZLE_ROW / 16;

    const T* origin;  // element (x0, k = 0)
    int64_t stride_x, stride_k;
    int x_left;  // of the operand from x0 on

    // Fills WIDTH rows of 128 bytes: x0 … x0 + WIDTH - 1, k0 … k0 + BLOCK_K - 1, zeros outside.
    template <int WIDTH>
    __device__ void load(uint32_t tile, int thread, int k0, int k_left) const {
        const T* source = origin + k0 * stride_k;
        if (stride_k == 1) {
            along_k<WIDTH>(tile, thread, source, k_left);
        } else if (stride_x == 1) {
            along_x<WIDTH>(tile, thread, source, k_left);
        } else {
            one_by_one<WIDTH>(tile, thread, source, k_left);
        }
    }

  private:
    struct Words {
        uint4 low, high;
        uint32_t shift;  // bytes from the first of `low` to the chunk's first
    };

    // Volatile, so that loads stay together, ahead of the first use of any.
    __device__ static void load16_if(uint4& v, const uint4* p, bool inside) {
        asm volatile(
            "{\n.reg .pred inside;\nsetp.ne.b32 inside, %5, 0;\n"
            "@inside ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
            : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
            : "l"(p), "r"(static_cast<int>(inside)));
    }

    // Begins to load the chunk at `p`, of which `count` elements (at most E) are inside.
    __device__ static Words begin(const T* p, int count) {
        const auto address = reinterpret_cast<uintptr_t>(p);
        const auto* aligned = reinterpret_cast<const uint4*>(address & ~uintptr_t{15});
        Words words{{}, {}, static_cast<uint32_t>(address % 16)};
        load16_if(words.low, aligned, count > 0);
        load16_if(words.high, aligned + 1, count > 0 && words.shift + count * sizeof(T) > 16);
        return words;
    }

    __device__ static void finish(uint32_t (&chunk)[4], const Words& words, int count) {
        join<T>(chunk, words.low, words.high, words.shift);
        if (count < E) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int bytes = count * static_cast<int>(sizeof(T)) - i * 4;  // of this word that are inside
                if (bytes < 4) chunk[i] = bytes == 2 ? chunk[i] & 0xffff : 0;
            }
        }
    }

    // Eight threads a row; four chunks a thread are under way at once.
    template <int WIDTH>
    __device__ void along_k(uint32_t tile, int thread, const T* source, int k_left) const {
        constexpr int AT_ONCE = 4, ROWS = THREADS / CHUNKS;
        static_assert(WIDTH % (ROWS * AT_ONCE) == 0);
        const int chunk = thread % CHUNKS, inside = min(max(k_left - chunk * E, 0), E);
        source += chunk * E;
#pragma unroll 1
        for (int first = thread / CHUNKS; first < WIDTH; first += ROWS * AT_ONCE) {
            Words words[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int x = first + i * ROWS;
                words[i] = begin(source + x * stride_x, x < x_left ? inside : 0);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int x = first + i * ROWS;
                uint32_t v[4];
                finish(v, words[i], x < x_left ? inside : 0);
                round_to_operand<T>(v);
                store_shared16(tile + swizzled(x, chunk), make_uint4(v[0], v[1], v[2], v[3]));
            }
        }
    }

    // A thread turns four rows of k of one chunk of x into E rows of x of four elements of k. Those side by side hold
    // all k of a row, so that their stores fill whole rows.
    template <int WIDTH>
    __device__ void along_x(uint32_t tile, int thread, const T* source, int k_left) const {
        constexpr int ROWS = 4, FOURS = SWIZZLE_ROW / (ROWS * sizeof(T)), STEP = THREADS / FOURS * E;
        static_assert(WIDTH % STEP == 0);
        const int four = thread % FOURS;
        source += four * ROWS * stride_k;
        k_left -= four * ROWS;
#pragma unroll 1
        for (int x = thread / FOURS * E; x < WIDTH; x += STEP) {
            const int inside = min(max(x_left - x, 0), E);
            Words words[ROWS];
            uint32_t rows[ROWS][4];  // [k][x]
#pragma unroll
            for (int i = 0; i < ROWS; ++i) words[i] = begin(source + x + i * stride_k, i < k_left ? inside : 0);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) finish(rows[i], words[i], i < k_left ? inside : 0);
#pragma unroll
            for (int e = 0; e < E; ++e) {
                if constexpr (sizeof(T) == 4) {
                    uint32_t v[4] = {rows[0][e], rows[1][e], rows[2][e], rows[3][e]};
                    round_to_operand<T>(v);
                    store_shared16(tile + swizzled(x + e, four), make_uint4(v[0], v[1], v[2], v[3]));
                } else {
                    const int halves = e % 2 == 0 ? 0x5410 : 0x7632;
                    store_shared8(tile + swizzled(x + e, four / 2) + four % 2 * 8,
                                  __byte_perm(rows[0][e / 2], rows[1][e / 2], halves),
                                  __byte_perm(rows[2][e / 2], rows[3][e / 2], halves));
                }
            }
        }
    }

    template <int WIDTH>
    __device__ void one_by_one(uint32_t tile, int thread, const T* source, int k_left) const {
        const int chunk = thread % CHUNKS;
#pragma unroll 1
        for (int x = thread / CHUNKS; x < WIDTH; x += THREADS / CHUNKS) {
            Vec<T> v;
#pragma unroll
            for (int e = 0; e < E; ++e) {
                const int k = chunk * E + e;
                v[e] = x < x_left && k < k_left ? source[x * stride_x + k * stride_k] : from_float<T>(0.0f);
            }
            auto& words = reinterpret_cast<uint32_t (&)[4]>(v);
            round_to_operand<T>(words);
            store_shared16(tile + swizzled(x, chunk), make_uint4(words[0], words[1], words[2], words[3]));
        }
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
    using Multiply = MultiplyShared<T, Major::K, Major::K, 2>;
    static constexpr int BLOCKS = 1, WARPGROUPS = 2, ARRIVALS = WARPGROUPS * WARPGROUP / WARP + 1;
    static constexpr int REGISTERS = 88, CONSUMER_REGISTERS = 168;
    static constexpr Sums SUMS = Sums::in_order;

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

void launch_plain(const HopperCall& call, ScalarType dtype, const Launch& on) {
    const Tiled& p = call.tiled;
    const TileOrder tiles{static_cast<int>(ceil_div(p.M, BM)), static_cast<int>(ceil_div(p.N, BN)), 2048 / BM};
    dispatch(dtype, "matmul", [&](auto zero) {
        using T = decltype(zero);
        const bool a_by_tma = call.a_by_tma && call.a_major == Major::K;
        const bool b_by_tma = call.b_by_tma && call.b_major == Major::K;
        const typename PlainLoader<T>::Source from{
            {a_by_tma ? tensor_map(call.a) : CUtensorMap{}, b_by_tma ? tensor_map(call.b) : CUtensorMap{}},
            a_by_tma,
            b_by_tma,
            static_cast<const T*>(call.a_data),
            static_cast<const T*>(call.b_data),
            call.product};
        launch_from<PlainLoader<T>>(from, call, p, {tiles, false}, on, true);
    });
}

void plain_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    dispatch(dtype, "matmul", [&](auto zero) {
        using Loader = PlainLoader<decltype(zero)>;
        facts.push_back(
            kernel_facts<matmul_persistent_kernel<Loader>>("matmul.persistent plain", 4 * WARPGROUP, SHARED));
    });
}

}  // namespace kl
