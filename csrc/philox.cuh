// Dropout's mask, as kernel_ladder/philox.py specifies it: Philox 4×32-10 of the seed and an element's index (Salmon,
// Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11).
#pragma once

#include "common.cuh"

namespace kl {

constexpr int PHILOX_ROUNDS = 10;
constexpr int PHILOX_WORDS = 4;  // of one call, for as many elements

// The keys of all rounds, made by the host: as a kernel's argument they are operands of its instructions, at no cost.
struct PhiloxKeys {
    uint32_t low[PHILOX_ROUNDS], high[PHILOX_ROUNDS];

    explicit PhiloxKeys(int64_t seed) {
        uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
        for (int round = 0; round < PHILOX_ROUNDS; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
            low[round] = k0;
            high[round] = k1;
        }
    }
};

// The words of the counter (lower, upper, 0, 0). Where `upper` is the same in all threads, so is half of the second
// round's work, and of the first round's there is one product alone.
__device__ inline uint4 philox(uint32_t lower, uint32_t upper, const PhiloxKeys& keys) {
    uint4 c = make_uint4(lower, upper, 0u, 0u);
#pragma unroll
    for (int round = 0; round < PHILOX_ROUNDS; ++round) {
        const uint64_t product0 = uint64_t{0xD2511F53u} * c.x, product1 = uint64_t{0xCD9E8D57u} * c.z;
        c = make_uint4(static_cast<uint32_t>(product1 >> 32) ^ c.y ^ keys.low[round], static_cast<uint32_t>(product1),
                       static_cast<uint32_t>(product0 >> 32) ^ c.w ^ keys.high[round], static_cast<uint32_t>(product0));
    }
    return c;
}

// What dropout multiplies elements by: `scale` where the element's word is not below `threshold`, else zero.
struct DropoutMask {
    PhiloxKeys keys;
    uint32_t threshold;
    float scale;

    DropoutMask(int64_t threshold_in, double scale_in, int64_t seed, const char* op)
        : keys(seed), threshold(static_cast<uint32_t>(threshold_in)), scale(static_cast<float>(scale_in)) {
        KL_CHECK(0 <= threshold_in && threshold_in <= std::numeric_limits<uint32_t>::max(), op,
                 ": argument `threshold` must be a word of 32 bits, got ", threshold_in);
        KL_CHECK(seed >= 0, op, ": argument `seed` must not be negative, got ", seed);
    }

    __device__ float factor(uint32_t word) const { return word >= threshold ? scale : 0.0f; }

    // The factor of one element.
    __device__ float of(int64_t index) const {
        const int64_t call = index / PHILOX_WORDS;
        const uint4 words = philox(static_cast<uint32_t>(call), static_cast<uint32_t>(call >> 32), keys);
        const int place = static_cast<int>(index % PHILOX_WORDS);
        return factor(place == 0 ? words.x : place == 1 ? words.y : place == 2 ? words.z : words.w);
    }

    // Multiplies elements whose first is number 4 · (upper · 2^32 + lower).
    template <int SIZE>
    __device__ void apply(float (&x)[SIZE], uint32_t lower, uint32_t upper) const {
        each<SIZE>(lower, upper, [&](int e, float factor) { x[e] *= factor; });
    }

    // The same, and adds others.
    template <int SIZE>
    __device__ void apply(float (&x)[SIZE], uint32_t lower, uint32_t upper, const float (&more)[SIZE]) const {
        each<SIZE>(lower, upper, [&](int e, float factor) { x[e] = fmaf(x[e], factor, more[e]); });
    }

  private:
    template <int SIZE, typename F>
    __device__ void each(uint32_t lower, uint32_t upper, F&& f) const {
#pragma unroll
        for (int call = 0; call < SIZE / PHILOX_WORDS; ++call) {
            const uint4 words = philox(lower + call, upper, keys);
            f(PHILOX_WORDS * call, factor(words.x));
            f(PHILOX_WORDS * call + 1, factor(words.y));
            f(PHILOX_WORDS * call + 2, factor(words.z));
            f(PHILOX_WORDS * call + 3, factor(words.w));
        }
    }
};

}  // namespace kl
