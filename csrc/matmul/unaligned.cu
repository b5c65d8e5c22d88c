// A loader for 16-bit operands whose rows (as memory has them) begin anywhere: odd leading dimensions, odd first
// elements. Whatever the leading dimension ld, eight rows are 8 · ld elements apart, which is a multiple of 16 bytes;
// and a box of TMA may begin at any element of a row. So each remainder r of a row's number modulo eight (its residue)
// has a description of its own, which begins at the multiple of 16 bytes before row r; the elements in between are
// skipped by the coordinate. A box brings rows of one residue, and a tile's rows come in another order than they lie:
//
//   along k both      rows are m and n: the outputs' order, undone as they leave (Sums::by_residue)
//   along m and n     rows are k: both operands agree, and a sum asks for no order
//   A along k, B not  k in B's order: A's fragments are put together by the registers, which put them in that order
//   A along m, B not  the case before, of the transposed product: C is stored transposed
//
// From the loads on it is `persistent` with its clusters, in which each block asks for half of what both read.

#include "persistent.cuh"

namespace kl {

// One operand, a description for each residue.
struct ResidueMaps {
    CUtensorMap map[RESIDUES];
    int skip[RESIDUES];  // elements from where the description begins to the row
};

// One residue of the tile that begins at (x, k), WIDTH wide, into its place there: WIDTH / 8 of x by 64 of k in one box,
// or 64 of x by 8 of k in several. Tiles begin at multiples of eight. Where `both`, into both blocks of the cluster.
template <Major MAJOR, int WIDTH>
__device__ inline void load_residue(uint32_t tile, const ResidueMaps& from, int residue, uint32_t barrier, bool both,
                                    int x, int k, int batch) {
    const CUtensorMap& map = from.map[residue];
    const auto load = [&](uint32_t shared, int c0, int c1) {
        constexpr uint16_t BOTH = 0b11;
        both ? tma_load_multicast(shared, map, barrier, BOTH, c0, c1, batch)
             : tma_load(shared, map, barrier, c0, c1, batch);
    };
    const int skip = from.skip[residue];
    if constexpr (MAJOR == Major::K) {
        load(tile + residue * (WIDTH / RESIDUES) * SWIZZLE_ROW, k + skip, x / RESIDUES);
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; i += PANEL_X) {
            load(tile + i * SWIZZLE_ROW + residue * SWIZZLE_ATOM, x + i + skip, k / RESIDUES);
        }
    }
}

// A along k, B along n. Of a stage's 64 k, instruction `step` takes from B those of two residues: k = 8j + 2 · step,
// j = 0 … 7, and then k = 8j + 2 · step + 1. Of either eight, lane 4g + t holds in A's fragment j = 2t and 2t + 1: halves
// of word `step` of the chunks 2t and 2t + 1 of A's row. Two rows and two chunks give the fragments of all four steps.
template <typename T>
class MultiplyRegisters {
    uint32_t a[STEPS][4] = {};

  public:
    __device__ void operator()(float (&sum)[BN / 2], uint32_t stage, int half, bool accumulate) {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP, t = lane % 4, g = lane / 4;
        // A's rows are read in their order: row 8j + r of the tile stands at r · BM / 8 + j. Rows g and g + 1 then lie in
        // the same banks, so that lanes of odd g read the second chunk first.
        const uint32_t odd = g % 2;
        uint4 chunks[2][2];  // [row g, row g + 8]
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t row = g * (BM / RESIDUES) + (half * 4 + warp) * 2 + i;
#pragma unroll
            for (int c = 0; c < 2; ++c) chunks[i][c] = load_shared16(stage + swizzled(row, 2 * t + (c ^ odd)));
        }
        const uint32_t low = odd ? 0x1054 : 0x5410, high = odd ? 0x3276 : 0x7632;  // halves of two words
        wgmma_wait<0>();  // the last stage's fragments are read
        wgmma_pin(a[0]), wgmma_pin(a[1]), wgmma_pin(a[2]), wgmma_pin(a[3]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t first[STEPS] = {chunks[i][0].x, chunks[i][0].y, chunks[i][0].z, chunks[i][0].w};
            const uint32_t second[STEPS] = {chunks[i][1].x, chunks[i][1].y, chunks[i][1].z, chunks[i][1].w};
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                a[step][i] = __byte_perm(first[step], second[step], low);
                a[step][i + 2] = __byte_perm(first[step], second[step], high);
            }
        }
        wgmma_fence();
        const uint64_t b = matrix_descriptor<Major::MN>(stage + A_BYTES, PANEL_BYTES);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            Wgmma<BN>::template multiply<T, Major::MN>(sum, a[step], b + step * DESCRIPTOR_STEP<Major::MN>,
                                                       accumulate || step > 0);
        }
        wgmma_commit();
    }
};

// Four warps ask TMA, each for two residues, in clusters of two blocks that share what both read.
template <typename T, Major A, Major B, Sums SUMS_>
struct ResidueLoader {
    using Element = T;
    struct Source {
        ResidueMaps a, b;
    };
    using Multiply = std::conditional_t<A == Major::K && B == Major::MN, MultiplyRegisters<T>, MultiplyShared<T, A, B>>;
    static constexpr int BLOCKS = CLUSTER, WARPGROUPS = 1, ARRIVALS = 4, REGISTERS = 40, CONSUMER_REGISTERS = 232;
    static constexpr Sums SUMS = SUMS_;

    const Source& from;
    int m0, n0, a_batch, b_batch, rank;
    bool below;

    __device__ ResidueLoader(const Source& from, const Tiled& p, bool below, int batch, int m0, int n0)
        : from(from),
          m0(m0),
          n0(n0),
          a_batch(batch * p.a_step),
          b_batch(batch * p.b_step),
          rank(static_cast<int>(cluster_rank())),
          below(below) {}
    __device__ static void prefetch(const Source& from) {
        for (int r = 0; r < RESIDUES; ++r) {
            tma_prefetch(from.a.map[r]);
            tma_prefetch(from.b.map[r]);
        }
    }
    __device__ static bool takes_part() { return elect_one(); }
    __device__ void load(uint32_t stage, uint32_t barrier, int k) const {
        constexpr int EACH = RESIDUES / ARRIVALS;
        static_assert(EACH == CLUSTER, "of a warp's residues of what both blocks read, each block asks for one");
        const int first = static_cast<int>(threadIdx.x) / WARP * EACH;
        mbarrier_arrive_expect(barrier, STAGE_BYTES / ARRIVALS);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (below || i == rank) load_residue<A, BM>(stage, from.a, first + i, barrier, !below, m0, k, a_batch);
            if (!below || i == rank) {
                load_residue<B, BN>(stage + A_BYTES, from.b, first + i, barrier, below, n0, k, b_batch);
            }
        }
    }
};

namespace {

// One operand, X by K.
struct Matrix {
    const void* data;
    int64_t X, x_step, K, k_step, batch_step;

    Major major() const { return k_step == 1 || K == 1 ? Major::K : Major::MN; }
};

// Describes it by residues, each brought in boxes of `box_x` rows where memory runs along k; false where it cannot.
bool describe(const Matrix& matrix, int64_t batches, int box_x, ScalarType dtype, ResidueMaps* maps) {
    const bool along_k = matrix.major() == Major::K;
    const int64_t inner = along_k ? matrix.K : matrix.X, outer = along_k ? matrix.X : matrix.K;
    const int64_t step = along_k ? matrix.x_step : matrix.k_step;
    if (inner > 1 && (along_k ? matrix.k_step : matrix.x_step) != 1) return false;
    if (outer < RESIDUES) return false;  // a residue without rows
    constexpr int ITEM = sizeof(half), GRID = 16;
    for (int r = 0; r < RESIDUES; ++r) {
        const uintptr_t row = reinterpret_cast<uintptr_t>(matrix.data) + r * step * ITEM;
        maps->skip[r] = static_cast<int>(row % GRID / ITEM);
        const TmaTensor tensor{
            dtype,
            3,
            reinterpret_cast<const void*>(row / GRID * GRID),
            {inner + maps->skip[r], ceil_div(outer - r, RESIDUES), matrix.batch_step == 0 ? 1 : batches},
            {1, step * RESIDUES, matrix.batch_step},
            {PANEL_X, along_k ? box_x : RESIDUES, 1}};
        if (!tma_can_address(tensor)) return false;
        maps->map[r] = tensor_map(tensor);
    }
    return true;
}

}  // namespace

template <Sums SUMS>
using SumsOf = std::integral_constant<Sums, SUMS>;

bool launch_unaligned(const HopperCall& call, ScalarType dtype, const Launch& on) {
    const Product& q = call.product;
    if (dtype == ScalarType::Float || q.batch_dims > 1) return false;
    Matrix a{call.a_data, q.M, q.a_m, q.K, q.a_k, q.batch_dims > 0 ? q.a_batch[0] : 0};
    Matrix b{call.b_data, q.N, q.b_n, q.K, q.b_k, q.batch_dims > 0 ? q.b_batch[0] : 0};
    Tiled p = call.tiled;
    const bool transposed = a.major() == Major::MN && b.major() == Major::K;
    if (transposed) {
        std::swap(a, b);
        p = {p.N, p.M, p.K, p.batches, p.b_step, p.a_step, p.c_batch};
    }
    ResidueMaps a_maps, b_maps;
    if (!describe(a, q.batches, BM / RESIDUES, dtype, &a_maps)) return false;
    if (!describe(b, q.batches, BN / RESIDUES, dtype, &b_maps)) return false;
    dispatch(dtype, "matmul", [&](auto zero) {
        using T = decltype(zero);
        if constexpr (sizeof(T) == 2) {
            using K = MajorOf<Major::K>;
            using MN = MajorOf<Major::MN>;
            const auto launch = [&](auto a_major, auto b_major, auto sums) {
                using Loader = ResidueLoader<T, a_major(), b_major(), sums()>;
                launch_from<Loader>({a_maps, b_maps}, call, p, pair_order(p, BM, BN), on, true);
            };
            if (transposed) return launch(K{}, MN{}, SumsOf<Sums::transposed>{});
            if (a.major() == Major::MN) return launch(MN{}, MN{}, SumsOf<Sums::in_order>{});
            if (b.major() == Major::MN) return launch(K{}, MN{}, SumsOf<Sums::in_order>{});
            launch(K{}, K{}, SumsOf<Sums::by_residue>{});
        }
    });
    return true;
}

void unaligned_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    dispatch(dtype, "matmul", [&](auto zero) {
        using T = decltype(zero);
        if constexpr (sizeof(T) == 2) {
            using Loader = ResidueLoader<T, Major::K, Major::MN, Sums::in_order>;
            facts.push_back(
                kernel_facts<matmul_persistent_kernel<Loader>>("matmul.persistent unaligned", 3 * WARPGROUP, SHARED));
        }
    });
}

}  // namespace kl
