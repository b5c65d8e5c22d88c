// matmul, fourth step; the table of the climb stands in matmul.cuh.
//
//   registers  8×8 outputs per thread, 16-byte loads, two buffers          the rate of the float32 units
//
// A thread that holds 8×8 outputs reads 16 values from shared memory for 64 multiply-adds, where `tiled` reads 128.
// A block of 256 threads makes 128×128 outputs and walks K in tiles of 16. The next tile travels from global memory
// into registers while this one is multiplied, and is then stored to the other of two buffers: one barrier per tile.

#include "matmul.cuh"

namespace kl {
namespace {

constexpr int THREADS = 256;
constexpr int BLOCK = 128;  // rows of A, and columns of B, per block
constexpr int BLOCK_K = 16;
constexpr int PER_THREAD = BLOCK * BLOCK_K / THREADS;  // elements of one operand that a thread loads per tile

// Both tiles lie in shared memory as [k][x], with x = m or n: the inner loop reads rows of it, 4 floats at a time. The
// pitch keeps them aligned, and halves the bank conflicts of storing a transposed operand, whose lanes hold several k
// of a few x, to two lanes per bank.
constexpr int PITCH = BLOCK + 4;

// How a block reads one operand. ALONG_K: its memory is walked along k, else along x.
template <typename T, bool ALONG_K>
struct Loader {
    static constexpr int V = Vec<T>::size, VECTORS = PER_THREAD / V;
    static constexpr int PER_ROW = (ALONG_K ? BLOCK_K : BLOCK) / V;  // vectors that make one row of the tile

    const T* source;             // this thread's first element of the next tile
    int64_t stride_x, stride_k;  // one of them 1 where `whole`
    int x_left;                  // rows or columns of the operand from x0 on, at most BLOCK
    bool whole;                  // 16-byte loads are aligned
    T staged[PER_THREAD];

    __device__ Loader(const T* operand, int64_t x0, int64_t X, int64_t stride_x, int64_t stride_k, bool whole)
        : source(operand + (x0 + x_of(0)) * stride_x + k_of(0) * stride_k),
          stride_x(stride_x),
          stride_k(stride_k),
          x_left(static_cast<int>(min(X - x0, int64_t{BLOCK}))),
          whole(whole) {}

    __device__ static int x_of(int v) {
        const int i = threadIdx.x + v * THREADS;
        return ALONG_K ? i / PER_ROW : i % PER_ROW * V;
    }
    __device__ static int k_of(int v) {
        const int i = threadIdx.x + v * THREADS;
        return ALONG_K ? i % PER_ROW * V : i / PER_ROW;
    }

    // Global memory → registers: the next tile, of which k_left elements of k are inside. Outside stands zero.
    __device__ void fetch(int64_t k_left) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int x = x_of(v), k = k_of(v);
            const T* p = source + v * (THREADS / PER_ROW) * (ALONG_K ? stride_x : stride_k);
            if (whole && x + (ALONG_K ? 1 : V) <= x_left && k + (ALONG_K ? V : 1) <= k_left) {
                const Vec<T> loaded = load_vec(p);
#pragma unroll
                for (int e = 0; e < V; ++e) staged[v * V + e] = loaded[e];
            } else {
#pragma unroll
                for (int e = 0; e < V; ++e) {
                    const bool inside = ALONG_K ? x < x_left && k + e < k_left : x + e < x_left && k < k_left;
                    staged[v * V + e] = inside ? *p : from_float<T>(0.0f);
                    p += ALONG_K ? stride_k : stride_x;
                }
            }
        }
        source += BLOCK_K * stride_k;
    }

    // Registers → shared memory, as float32.
    __device__ void store(float (*tile)[PITCH]) const {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int x = x_of(v), k = k_of(v);
            if constexpr (ALONG_K) {
#pragma unroll
                for (int e = 0; e < V; ++e) tile[k + e][x] = to_float(staged[v * V + e]);
            } else {
#pragma unroll
                for (int e = 0; e < V; e += 4) {
                    const T* s = staged + v * V + e;
                    *reinterpret_cast<float4*>(&tile[k][x + e]) =
                        make_float4(to_float(s[0]), to_float(s[1]), to_float(s[2]), to_float(s[3]));
                }
            }
        }
    }
};

template <typename T>
struct alignas(4 * sizeof(T)) Quad {
    T elements[4];
};

// A warp makes 32×64 outputs: its lanes stand 4×8, each with four 4×4 squares, 16 rows and 32 columns apart. So the
// lanes' reads of a row of B are one run of 128 bytes, and of A one of 64 that lanes share.
template <typename T, bool A_ALONG_K, bool B_ALONG_K>
__global__ void __launch_bounds__(THREADS, 2)
    matmul_registers_kernel(T* c, const T* a, const T* b, Product p, bool a_whole, bool b_whole) {
    __shared__ alignas(16) float a_tile[2][BLOCK_K][PITCH];
    __shared__ alignas(16) float b_tile[2][BLOCK_K][PITCH];
    const uint32_t tiles_m = ceil_div(p.M, BLOCK), tiles_n = ceil_div(p.N, BLOCK);  // fewer than 2³¹ blocks in all
    const uint32_t batch = blockIdx.x / (tiles_m * tiles_n), within = blockIdx.x % (tiles_m * tiles_n);
    const int64_t m0 = int64_t{within / tiles_n} * BLOCK, n0 = int64_t{within % tiles_n} * BLOCK;
    int64_t a_offset, b_offset;
    p.batch_offsets(batch, &a_offset, &b_offset);
    Loader<T, A_ALONG_K> a_loader(a + a_offset, m0, p.M, p.a_m, p.a_k, a_whole);
    Loader<T, B_ALONG_K> b_loader(b + b_offset, n0, p.N, p.b_n, p.b_k, b_whole);

    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int m_thread = warp / 2 * 32 + lane / 8 * 4, n_thread = warp % 2 * 64 + lane % 8 * 4;
    float sum[8][8] = {};
    const auto multiply = [&](int buffer, int first) {
#pragma unroll
        for (int k = first; k < first + BLOCK_K / 2; ++k) {
            float x[8], y[8];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                *reinterpret_cast<float4*>(x + 4 * half) =
                    *reinterpret_cast<const float4*>(&a_tile[buffer][k][m_thread + 16 * half]);
                *reinterpret_cast<float4*>(y + 4 * half) =
                    *reinterpret_cast<const float4*>(&b_tile[buffer][k][n_thread + 32 * half]);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[i][j] += x[i] * y[j];
            }
        }
    };

    if (p.K > 0) {
        a_loader.fetch(p.K);
        b_loader.fetch(p.K);
        a_loader.store(a_tile[0]);
        b_loader.store(b_tile[0]);
    }
    __syncthreads();
    int buffer = 0;
    for (int64_t k_left = p.K; k_left > 0; k_left -= BLOCK_K) {
        const bool more = k_left > BLOCK_K;
        // The next tile of A travels during the first half of this one, B's during the second: only one at a time needs
        // registers. The other buffer was last read before the barrier that ended the turn before.
        if (more) a_loader.fetch(k_left - BLOCK_K);
        multiply(buffer, 0);
        if (more) {
            a_loader.store(a_tile[buffer ^ 1]);
            b_loader.fetch(k_left - BLOCK_K);
        }
        multiply(buffer, BLOCK_K / 2);
        if (more) b_loader.store(b_tile[buffer ^ 1]);
        __syncthreads();
        buffer ^= 1;
    }

    c += int64_t{batch} * p.M * p.N;
    const bool quads = p.N % 4 == 0;  // then every run of four columns that begins at a multiple of 4 is aligned
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int64_t m = m0 + m_thread + i / 4 * 16 + i % 4;
        if (m >= p.M) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int64_t n = n0 + n_thread + 32 * half;
            Quad<T> out;
#pragma unroll
            for (int j = 0; j < 4; ++j) out.elements[j] = from_float<T>(sum[i][4 * half + j]);
            if (quads && n + 4 <= p.N) {
                *reinterpret_cast<Quad<T>*>(c + m * p.N + n) = out;
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (n + j < p.N) c[m * p.N + n + j] = out.elements[j];
                }
            }
        }
    }
}

// Whether every 16-byte run along the stride-1 axis begins at a multiple of 16 bytes.
template <typename T>
bool is_whole(const void* data, int64_t contiguous, int64_t other, const Product& p, const int64_t* batch_strides) {
    bool whole = contiguous == 1 && is_aligned16(data) && other % Vec<T>::size == 0;
    for (int d = 0; d < p.batch_dims; ++d) whole = whole && batch_strides[d] % Vec<T>::size == 0;
    return whole;
}

}  // namespace

Tensor matmul_registers(const Tensor& input, const Tensor& other) {
    auto [p, output] = prepare(input, other);
    if (output.numel() == 0) return output;
    const Launch launch(input);
    dispatch(input.scalar_type(), "matmul", [&, &p = p, &output = output](auto zero) {
        using T = decltype(zero);
        const auto grid = grid_size(p.batches * ceil_div(p.M, BLOCK) * ceil_div(p.N, BLOCK));
        auto* c = static_cast<T*>(output.data_ptr());
        const auto* a = static_cast<const T*>(input.data_ptr());
        const auto* b = static_cast<const T*>(other.data_ptr());
        const bool a_along_k = p.a_k <= p.a_m || p.M == 1, b_along_k = p.b_k < p.b_n || p.N == 1;
        const bool a_whole = a_along_k ? is_whole<T>(a, p.a_k, p.M == 1 ? 0 : p.a_m, p, p.a_batch)
                                       : is_whole<T>(a, p.a_m, p.K == 1 ? 0 : p.a_k, p, p.a_batch);
        const bool b_whole = b_along_k ? is_whole<T>(b, p.b_k, p.N == 1 ? 0 : p.b_n, p, p.b_batch)
                                       : is_whole<T>(b, p.b_n, p.K == 1 ? 0 : p.b_k, p, p.b_batch);
        auto* kernel =
            a_along_k
                ? (b_along_k ? matmul_registers_kernel<T, true, true> : matmul_registers_kernel<T, true, false>)
                : (b_along_k ? matmul_registers_kernel<T, false, true> : matmul_registers_kernel<T, false, false>);
        kernel<<<grid, THREADS, 0, launch.stream>>>(c, a, b, p, a_whole, b_whole);
    });
    KL_LAUNCH_CHECK();
    return output;
}

void matmul_registers_facts(std::vector<KernelFacts>& facts) {
    facts.push_back(kernel_facts("matmul.registers", matmul_registers_kernel<float, true, false>, THREADS));
}

}  // namespace kl
