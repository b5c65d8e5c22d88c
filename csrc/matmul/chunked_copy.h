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

// A tile of `persistent`. Two of them side by side, or one below the other, are computed by a cluster of two blocks.
constexpr int64_t PART_TILE_M = 128, PART_TILE_N = 256;

// What parts cost, in stages of 128 bytes of K: LAUNCH for each part, SHARE where stream-K shares its last waves. A copy
// of STAGE_BYTES takes as long as a stage. kernel_ladder/selection/matmul_parts.py has the same numbers.
constexpr int64_t PART_STAGE = 128, PART_LAUNCH = 17, PART_SHARE = 16, PART_STAGE_BYTES = int64_t{1} << 20;

inline int64_t part_ceil(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Stages of a worker, a cluster of two blocks, for so many tile pairs; with the last waves shared (stream-K) where that
// promises a gain of 1/16. Storing and adding 128 KiB of partial sums takes a block about as long as 16 stages.
inline int64_t shared_stages(int64_t pairs, int64_t stages, int64_t workers) {
    const int64_t whole = part_ceil(pairs, workers) * stages;
    const int64_t shared = part_ceil(pairs * stages, workers) + PART_SHARE;
    return shared < whole - whole / 16 ? shared : whole;
}

// Parts of equal numbers of tiles: all but the last of each row and column of parts.
struct EvenParts {
    int64_t tiles_m, tiles_n;  // of the product
    int64_t rows, columns;     // tiles of a part

    int64_t parts_m() const { return part_ceil(tiles_m, rows); }
    int64_t parts_n() const { return part_ceil(tiles_n, columns); }

    static int64_t stages_of(int64_t rows, int64_t columns, int64_t stages, int64_t sms) {
        const bool below = rows % 2 == 0 || columns % 2 != 0;
        const int64_t pairs = below ? part_ceil(rows, 2) * columns : rows * part_ceil(columns, 2);
        return (pairs < sms / 2 ? stages : shared_stages(pairs, stages, sms / 2)) + PART_LAUNCH;
    }
    // In bytes, as of a copy. A column of parts keeps its copy of B; one part per column keeps that of A.
    int64_t cost(int64_t a_tile, int64_t b_tile, int64_t stages, int64_t sms) const {
        const int64_t whole_m = parts_m() - 1, whole_n = parts_n() - 1, a_copies = whole_m == 0 ? 1 : parts_n();
        const int64_t last_m = tiles_m - whole_m * rows, last_n = tiles_n - whole_n * columns;
        const int64_t total =
            whole_m * whole_n * stages_of(rows, columns, stages, sms) + whole_m * stages_of(rows, last_n, stages, sms) +
            whole_n * stages_of(last_m, columns, stages, sms) + stages_of(last_m, last_n, stages, sms);
        return total * PART_STAGE_BYTES + a_copies * tiles_m * a_tile + tiles_n * b_tile;
    }
};

// Parts of at most `most` bytes of copies each: as many whole batches as fit, or where none does, even parts of each
// batch, those of the least cost. `row_bytes` has a row along K. None, where parts of a batch would leave most of the
// GPU idle: then plain loads are faster. The first part is the largest.
inline std::vector<Part> parts_of(int64_t batches, int64_t M, int64_t N, int64_t row_bytes, const CopiedOperand& a,
                                  const CopiedOperand& b, int64_t most, int64_t sms) {
    constexpr int64_t LEAST_FULL = 5;  // plain loads have a fifth to a third of the rate
    constexpr int64_t MORE_PARTS = 4;  // smaller parts may fill their waves better
    const auto bytes = [&](int64_t count) { return a.of_batches(count) + b.of_batches(count); };
    std::vector<Part> parts;
    if (bytes(1) <= most) {
        const int64_t of_one_more = bytes(2) - bytes(1);
        const int64_t fit = of_one_more == 0 ? batches : std::min(batches, 1 + (most - bytes(1)) / of_one_more);
        const int64_t each = part_ceil(batches, part_ceil(batches, fit));
        for (int64_t batch = 0; batch < batches; batch += each) {
            parts.push_back({batch, std::min(each, batches - batch), 0, M, 0, N});
        }
        return parts;
    }
    const int64_t tiles_m = part_ceil(M, PART_TILE_M), tiles_n = part_ceil(N, PART_TILE_N);
    const int64_t stages = part_ceil(row_bytes, PART_STAGE);
    EvenParts best{tiles_m, tiles_n, 0, 0};
    int64_t best_cost = 0;
    // From one part per row of parts on; of equal columns once.
    for (int64_t columns = tiles_n; columns > 0;) {
        const int64_t left = most - columns * b.of_tile;
        const int64_t fit = left < 0 ? 0 : a.of_tile == 0 ? tiles_m : std::min(tiles_m, left / a.of_tile);
        const int64_t fewest = fit == 0 ? 0 : part_ceil(tiles_m, fit);
        for (int64_t count = fewest; fit > 0 && count < fewest + MORE_PARTS; ++count) {
            const EvenParts even{tiles_m, tiles_n, part_ceil(tiles_m, count), columns};
            const int64_t tiles = even.rows * columns;
            if (tiles * LEAST_FULL < part_ceil(tiles, sms) * sms) continue;
            const int64_t cost = even.cost(a.of_tile, b.of_tile, stages, sms);
            if (best.rows == 0 || cost < best_cost) best = even, best_cost = cost;
        }
        if (columns == 1) break;
        columns = part_ceil(tiles_n, part_ceil(tiles_n, columns - 1));
    }
    if (best.rows == 0) return parts;
    const int64_t rows = best.rows * PART_TILE_M, columns = best.columns * PART_TILE_N;
    for (int64_t batch = 0; batch < batches; ++batch) {
        for (int64_t n = 0; n < N; n += columns) {
            for (int64_t m = 0; m < M; m += rows) {
                parts.push_back({batch, 1, m, std::min(rows, M - m), n, std::min(columns, N - n)});
            }
        }
    }
    return parts;
}

}  // namespace kl
