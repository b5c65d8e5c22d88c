// A product in parts of its outputs, for which copies of its operands take no more memory at a time than they may. Host
// code alone, so that it is tested where there is no GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kl {

// Outputs from (batch, m, n) on.
struct Part {
    int64_t batch, batches, m, M, n, N;
};

// What the copy of an operand takes, in bytes; nothing, if it is not copied.
struct CopiedOperand {
    int64_t of_batch, of_tile;  // all of one batch's, and a tile's rows (columns)
    bool per_batch;             // or all batches have the same

    int64_t of_batches(int64_t count) const { return per_batch ? count * of_batch : of_batch; }
};

constexpr int64_t PART_TILE_M = 128, PART_TILE_N = 256;

// Parts of at most `most` bytes of copies each: as many whole batches as fit, or where none does, of each batch as many
// tiles as fill the last turn of `sms` multiprocessors best, and of such the most. None, where parts of a batch would
// leave most of the GPU idle: then plain loads are faster.
inline std::vector<Part> parts_of(int64_t batches, int64_t M, int64_t N, const CopiedOperand& a, const CopiedOperand& b,
                                  int64_t most, int64_t sms) {
    constexpr double LEAST_FULL = 0.2;  // plain loads have a fifth to a third of the rate
    const auto up = [](int64_t x, int64_t y) { return (x + y - 1) / y; };
    const auto bytes = [&](int64_t count) { return a.of_batches(count) + b.of_batches(count); };
    std::vector<Part> parts;
    if (bytes(1) <= most) {
        const int64_t of_one_more = bytes(2) - bytes(1);
        const int64_t fit = of_one_more == 0 ? batches : std::min(batches, 1 + (most - bytes(1)) / of_one_more);
        const int64_t each = up(batches, up(batches, fit));
        for (int64_t batch = 0; batch < batches; batch += each) {
            parts.push_back({batch, std::min(each, batches - batch), 0, M, 0, N});
        }
        return parts;
    }
    const int64_t most_m = up(M, PART_TILE_M), most_n = up(N, PART_TILE_N);
    int64_t best_m = 0, best_n = 0;
    double best = 0.0;
    for (int64_t tiles_n = 1; tiles_n <= most_n && tiles_n * b.of_tile <= most; ++tiles_n) {
        const int64_t left = most - tiles_n * b.of_tile;
        const int64_t tiles_m = a.of_tile == 0 ? most_m : std::min(most_m, left / a.of_tile);
        const int64_t tiles = tiles_m * tiles_n, places = up(std::max<int64_t>(tiles, 1), sms) * sms;
        const double full = static_cast<double>(tiles) / static_cast<double>(places);
        if (full > best || (full == best && tiles > best_m * best_n)) best = full, best_m = tiles_m, best_n = tiles_n;
    }
    if (best < LEAST_FULL) return parts;
    for (int64_t batch = 0; batch < batches; ++batch) {
        for (int64_t n = 0; n < N; n += best_n * PART_TILE_N) {
            for (int64_t m = 0; m < M; m += best_m * PART_TILE_M) {
                parts.push_back(
                    {batch, 1, m, std::min(best_m * PART_TILE_M, M - m), n, std::min(best_n * PART_TILE_N, N - n)});
            }
        }
    }
    return parts;
}

}  // namespace kl
