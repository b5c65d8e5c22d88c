// Dropout's mask, as kernel_ladder/semantics/philox.py specifies it: Philox 4×32-10 of the seed and an element's index
// (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11).
#pragma once

#include "core/common.cuh"

namespace kl {

constexpr int PHILOX_ROUNDS = 10;
constexpr uint32_t PHILOX_W0 = 0x9E3779B9u, PHILOX_W1 = 0xBB67AE85u;
constexpr int PHILOX_HALVES = 8;  // 16-bit words per call, one per element

/// Keys of all rounds, computed on the host. As kernel parameters they are constant operands of the instructions.
struct PhiloxKeys {
    uint32_t low[PHILOX_ROUNDS], high[PHILOX_ROUNDS];

    explicit PhiloxKeys(int64_t seed) {
        uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
        for (int round = 0; round < PHILOX_ROUNDS; ++round, k0 += PHILOX_W0, k1 += PHILOX_W1) {
            low[round] = k0;
            high[round] = k1;
        }
    }
};

/// Philox of the counter (lower, upper, PART, 0). Where `upper` is the same in all threads, the first round has one product
/// per thread, and half of the second round is uniform too.
///
/// Part 0 is unrolled. Part 1 is rarely called, but all threads of its row wait for it. It is a loop, so that it shares no
/// values with part 0, which would occupy registers. It accumulates its keys, because loading a key by a run-time index
/// takes as long as a round.
template <uint32_t PART>
__device__ uint4 philox(uint32_t lower, uint32_t upper, const PhiloxKeys& keys) {
    constexpr int UNROLL = PART == 0 ? PHILOX_ROUNDS : 1;
    uint4 c = make_uint4(lower, upper, PART, 0u);
    uint32_t k0 = keys.low[0], k1 = keys.high[0];
#pragma unroll UNROLL
    for (int round = 0; round < PHILOX_ROUNDS; ++round, k0 += PHILOX_W0, k1 += PHILOX_W1) {
        if constexpr (PART == 0) k0 = keys.low[round], k1 = keys.high[round];
        const uint64_t product0 = uint64_t{0xD2511F53u} * c.x, product1 = uint64_t{0xCD9E8D57u} * c.z;
        c = make_uint4(static_cast<uint32_t>(product1 >> 32) ^ c.y ^ k0, static_cast<uint32_t>(product1),
                       static_cast<uint32_t>(product0 >> 32) ^ c.w ^ k1, static_cast<uint32_t>(product0));
    }
    return c;
}

/// Factors of dropout: `scale` where the element's 32-bit word is at least `threshold`, else zero.
///
/// The upper half of a word comes from a first call. It decides alone unless it equals the threshold's upper half, a
/// tie, once in 65536 times. Then a second call gives the lower halves, and the decisions replace the halves of the
/// first.
struct DropoutMask {
    PhiloxKeys keys;
    uint32_t threshold;
    uint32_t tie;    // the threshold's upper half, twice
    uint32_t floor;  // the least word that is kept where its upper half decides; not 0, so that decide() can drop by 0
    float scale;

    DropoutMask(int64_t threshold_in, double scale_in, int64_t seed, const char* op)
        : keys(seed),
          threshold(static_cast<uint32_t>(threshold_in)),
          tie((threshold >> 16) * 0x10001u),
          floor(std::max(threshold & 0xFFFF0000u, 0x10000u)),
          scale(static_cast<float>(scale_in)) {
        KL_CHECK(0 <= threshold_in && threshold_in <= std::numeric_limits<uint32_t>::max(), op,
                 ": argument `threshold` must be a word of 32 bits, got ", threshold_in);
        KL_CHECK(seed >= 0, op, ": argument `seed` must not be negative, got ", seed);
    }

    // The factor of one element.
    __device__ float of(int64_t index) const { return keeps(index) ? scale : 0.0f; }

    __device__ bool keeps(int64_t index) const {
        const auto lower = static_cast<uint32_t>(index / PHILOX_HALVES);
        const auto upper = static_cast<uint32_t>(index / PHILOX_HALVES >> 32);
        const int half = static_cast<int>(index % PHILOX_HALVES);
        uint32_t word = from_half(philox<0>(lower, upper, keys), half);
        if ((word ^ threshold) >> 16 == 0) {
            word = (word & 0xFFFF0000u) | from_half(philox<1>(lower, upper, keys), half) >> 16;
        }
        return word >= threshold;
    }

    // Whether an element (bit 0) and the next (bit 1) are kept. One call of Philox serves both, unless the next element is
    // the first of another call.
    __device__ uint32_t keeps_two(int64_t index) const {
        const int half = static_cast<int>(index % PHILOX_HALVES);
        if (half + 1 == PHILOX_HALVES) return (keeps(index) ? 1u : 0u) | (keeps(index + 1) ? 2u : 0u);
        const auto lower = static_cast<uint32_t>(index / PHILOX_HALVES);
        const auto upper = static_cast<uint32_t>(index / PHILOX_HALVES >> 32);
        const uint4 w = philox<0>(lower, upper, keys);
        uint32_t words[2] = {from_half(w, half), from_half(w, half + 1)};
        if ((words[0] ^ threshold) >> 16 == 0 || (words[1] ^ threshold) >> 16 == 0) {
            const uint4 more = philox<1>(lower, upper, keys);
#pragma unroll
            for (int e = 0; e < 2; ++e) words[e] = (words[e] & 0xFFFF0000u) | from_half(more, half + e) >> 16;
        }
        return (words[0] >= threshold ? 1u : 0u) | (words[1] >= threshold ? 2u : 0u);
    }

    // Words for SIZE elements, the first of which is number SIZE · (upper · 2^32 + lower).
    template <int SIZE>
    __device__ uint4 draw(uint32_t lower, uint32_t upper) const {
        static_assert(SIZE == PHILOX_HALVES || SIZE == PHILOX_HALVES / 2);
        uint4 words[1];
        if constexpr (SIZE == PHILOX_HALVES) {
            decide(words, {{lower, upper}});
            return words[0];
        } else {  // two vectors a call
            decide(words, {{__funnelshift_r(lower, upper, 1), upper / 2}});
            return shifted(words[0], lower % 2 * 16);
        }
    }

    template <int SIZE>
    __device__ uint4 draw(uint64_t number) const {
        return draw<SIZE>(static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32));
    }

    // The same of each of N numbers, `number(i)`. Calls for PHILOX_HALVES elements need not wait for each other.
    template <int SIZE, int N, typename F>
    __device__ void draw(uint4 (&words)[N], F&& number) const {
        if constexpr (SIZE == PHILOX_HALVES) {
            uint2 halves[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const uint64_t here = number(i);
                halves[i] = make_uint2(static_cast<uint32_t>(here), static_cast<uint32_t>(here >> 32));
            }
            decide(words, halves);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) words[i] = draw<SIZE>(static_cast<uint64_t>(number(i)));
        }
    }

    // Multiplies the elements that words were drawn for.
    template <int SIZE>
    __device__ void apply(float (&x)[SIZE], const uint4& words) const {
        each<SIZE>(words, [&](int e, float factor) { x[e] *= factor; });
    }

    // The same, and adds others.
    template <int SIZE>
    __device__ void apply(float (&x)[SIZE], const uint4& words, const float (&more)[SIZE]) const {
        each<SIZE>(words, [&](int e, float factor) { x[e] = fmaf(x[e], factor, more[e]); });
    }

  private:
    // The factor of an element whose word's upper half decides.
    __device__ float factor(uint32_t word) const { return word >= floor ? scale : 0.0f; }

    // A word whose upper half is 16-bit word `half` of a call.
    static __device__ uint32_t from_half(const uint4& w, int half) {
        const int place = half % 4;
        return (place == 0 ? w.x : place == 1 ? w.y : place == 2 ? w.z : w.w) << (half / 4 * 16);
    }

    static __device__ uint4 shifted(const uint4& w, uint32_t by) {
        return make_uint4(w.x << by, w.y << by, w.z << by, w.w << by);
    }

    template <int SIZE, typename F>
    __device__ void each(uint4 words, F&& f) const {
#pragma unroll
        for (int e = 0; e < SIZE; e += 4, words = shifted(words, 16)) {
            f(e, factor(words.x));
            f(e + 1, factor(words.y));
            f(e + 2, factor(words.z));
            f(e + 3, factor(words.w));
        }
    }

    // The words of N calls, given the lower and upper halves of their numbers. Each half of a word decides for one element.
    template <int N>
    __device__ void decide(uint4 (&words)[N], const uint2 (&numbers)[N]) const {
#pragma unroll
        for (int i = 0; i < N; ++i) words[i] = philox<0>(numbers[i].x, numbers[i].y, keys);
        if (!any_tie(words)) return;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const uint4 more = philox<1>(numbers[i].x, numbers[i].y, keys);
            uint4& w = words[i];
            w = make_uint4(settled(w.x, more.x), settled(w.y, more.y), settled(w.z, more.z), settled(w.w, more.w));
        }
    }

    // Whether any half word equals the threshold's upper half. It is true, too, where one differs in the top bit alone: that
    // costs a needless call and changes no result. The exclusive ors are compared as pairs of 16-bit floats, two per
    // instruction: only 0 and −0 have magnitude zero, and a minimum ignores NaN.
    template <int N>
    __device__ bool any_tie(const uint4 (&words)[N]) const {
        __half2 least;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const uint4& w = words[i];
            const __half2 here =
                __hmin2(__hmin2(difference(w.x), difference(w.y)), __hmin2(difference(w.z), difference(w.w)));
            least = i == 0 ? here : __hmin2(least, here);
        }
        return !__hbneu2(least, __float2half2_rn(0.0f));
    }

    __device__ __half2 difference(uint32_t word) const {
        const uint32_t bits = word ^ tie;
        return __habs2(reinterpret_cast<const __half2&>(bits));
    }

    // Upper halves in `word`, lower halves in `more`: all ones for an element that is kept, else zeros.
    __device__ uint32_t settled(uint32_t word, uint32_t more) const {
        const uint32_t first = (word & 0xFFFF0000u) | more >> 16, second = word << 16 | (more & 0xFFFFu);
        return (first >= threshold ? 0xFFFF0000u : 0u) | (second >= threshold ? 0xFFFFu : 0u);
    }
};

}  // namespace kl
