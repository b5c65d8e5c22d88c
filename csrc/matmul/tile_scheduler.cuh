// Which block computes which output tile, and which part of its K: rasterization, and the stream-K scheduler.
#pragma once

#include <cstdint>
#include <limits>

namespace kl {

// Tile rasterization: tile number -> (batch, tile row, tile column). Tiles that run at the same time should share rows
// of A and columns of B in the L2. So tiles are numbered down `group` rows before the next column begins.
struct TileRaster {
    int tiles_m, tiles_n, group;

    __host__ __device__ constexpr int per_batch() const { return tiles_m * tiles_n; }
    __host__ __device__ constexpr void at(int index, int* batch, int* m, int* n) const {
        *batch = index / per_batch();
        const int within = index % per_batch();
        const int first = within / (group * tiles_n) * group;  // row of the group's first tile
        const int rows = tiles_m - first < group ? tiles_m - first : group;
        const int in_group = within - first * tiles_n;
        *m = first + in_group % rows;
        *n = in_group / rows;
    }
};

// The same for clusters of two blocks, whose tiles lie one below the other, or side by side.
constexpr int CLUSTER = 2;
struct ClusterRaster {
    TileRaster tiles;  // of pairs
    bool below;

    // The first row and column of the tile of block `rank`. BLOCKS is 1 where each block stands alone.
    template <int BM, int BN, int BLOCKS = CLUSTER>
    __host__ __device__ constexpr void at(int index, int rank, int* batch, int* m0, int* n0) const {
        int m = 0, n = 0;
        tiles.at(index, batch, &m, &n);
        *m0 = (below ? m * BLOCKS + rank : m) * BM;
        *n0 = (below ? n : n * BLOCKS + rank) * BN;
    }
};

// Stream-K (Osama et al., arXiv:2301.03598): the first `shared` tiles are laid end to end along K and cut into equal
// parts, wherever the cuts fall. Each worker, a block or a cluster of two, has one part. The other tiles stay whole:
// worker w takes tiles shared + w, shared + w + workers, … With `shared` = 0 this is the schedule of a persistent
// kernel.
struct StreamKSchedule {
    int tiles, shared, k_tiles, workers;

    // The first of a worker's k-tiles among the shared ones. Its last is where the next worker begins.
    __host__ __device__ constexpr int begin(int worker) const { return shared * k_tiles * worker / workers; }
};

// Returns how many tiles to share so that no worker is idle. They are those of the last wave, which does not fill the
// GPU, and of the wave before it. So every worker's part is at least a tile where there are so many.
constexpr int shared_tiles(int tiles, int k_tiles, int workers) {
    const int shared = tiles < workers ? tiles : tiles % workers + workers;
    const bool countable = int64_t{shared} * k_tiles * workers <= std::numeric_limits<int32_t>::max();
    return tiles % workers == 0 || !countable ? 0 : shared;
}

// A tile, and the k-tiles [begin, end) of it.
struct WorkTile {
    int tile, begin, end;
};

// Iterates over the work tiles of one worker. Of its shared work tiles only the first may end a tile that another
// worker begins. Only the last may begin a tile that others end. So the worker that adds partial sums waits for those
// that were computed first.
struct StreamKScheduler {
    StreamKSchedule schedule;
    int at, end, whole;

    __host__ __device__ constexpr StreamKScheduler(const StreamKSchedule& schedule, int worker)
        : schedule(schedule),
          at(schedule.begin(worker)),
          end(schedule.begin(worker + 1)),
          whole(schedule.shared + worker) {}
    // Returns false when the worker has no more work.
    __host__ __device__ constexpr bool next(WorkTile* work) {
        if (at < end) {
            const int first = at % schedule.k_tiles, rest = schedule.k_tiles - first, mine = end - at;
            *work = {at / schedule.k_tiles, first, first + (mine < rest ? mine : rest)};
            at += work->end - first;
            return true;
        }
        if (whole >= schedule.tiles) return false;
        *work = {whole, 0, schedule.k_tiles};
        whole += schedule.workers;
        return true;
    }
};

}  // namespace kl
