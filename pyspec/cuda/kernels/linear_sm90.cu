// linear_sm90: linear.cu with the copy engine of sm_90 and later; same arguments, same sums in the same order.
//
// One thread keeps the stages filled by bulk copies, each completing on a barrier; warps wait for stages one by one and
// leave them one by one, so nothing holds all warps together. Weights do not depend on the predecessor: with a
// programmatic launch the first stages stream in while it ends.
//
// Set by the launcher besides linear.cu's: PRODUCER (1: the copying thread is in a warp of its own, 0: in the first
// computing warp), RESIDENT (CTAs that fit a multiprocessor: with 2 the successor's first stages load beside our last).
#include "linear.cuh"
#include "bulk.cuh"
#include "overlap.cuh"

constexpr int kWarps = WARPS_M * WARPS_N;
constexpr int kBlock = kThreads + 32 * PRODUCER;
constexpr int kLag = PRODUCER ? 0 : STAGES > 4 ? 2 : 1;  // units after which a computing thread refills a stage

struct Cursor {
  int tile, chunk, stage;
  u32 parity;

  __device__ __forceinline__ void step(int n_chunk) {
    if (++chunk == n_chunk) chunk = 0, ++tile;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

struct Source {
  const u8* weights;
  const u8* x;
  const u8* sums;
  int n_tile16, n_chunk;
};

__device__ __forceinline__ void load_weights(u32 to, u32 full, const Source& from, const Cursor& at, u64 policy) {
  const int n16 = min(kTile, from.n_tile16 - at.tile * kTile);
  const i64 record = static_cast<i64>(at.tile) * kTile * from.n_chunk + static_cast<i64>(at.chunk) * n16;
  barrier_expect(full, n16 * RECORD + kRowBytes + kSumBytes);
  bulk_copy_once(to, from.weights + record * RECORD, n16 * RECORD, full, policy);
}

__device__ __forceinline__ void load_rows(u32 to, u32 full, const Source& from, const Cursor& at) {
  bulk_copy(to + kWeightBytes, from.x + static_cast<i64>(at.chunk) * kRowBytes, kRowBytes, full);
#if HAS_MIN
  bulk_copy(to + kWeightBytes + kRowBytes, from.sums + static_cast<i64>(at.chunk) * kSumBytes, kSumBytes, full);
#endif
}

struct Line {  // a CTA's run of units and its stages
  u32 base, full, empty;
  Cursor fill;
  int n_unit, n_filled;
  u64 policy;

  // Before the predecessor ended: only weights.
  __device__ __forceinline__ void start(const Source& from) {
    const int n_first = min(STAGES, n_unit);
    Cursor rows = fill;
    for (; n_filled < n_first; ++n_filled, fill.step(from.n_chunk))
      load_weights(base + fill.stage * kStageBytes, full + fill.stage * 8, from, fill, policy);
    wait_for_predecessor();
    for (int i = 0; i < n_first; ++i, rows.step(from.n_chunk))
      load_rows(base + rows.stage * kStageBytes, full + rows.stage * 8, from, rows);
  }

  // As soon as all computing warps have left the next stage.
  __device__ __forceinline__ void refill(const Source& from) {
    const u32 to = base + fill.stage * kStageBytes, barrier = full + fill.stage * 8;
    barrier_wait(empty + fill.stage * 8, fill.parity ^ 1);
    load_weights(to, barrier, from, fill, policy);
    load_rows(to, barrier, from, fill);
    fill.step(from.n_chunk);
    ++n_filled;
  }
};

extern "C" __global__ void __launch_bounds__(kBlock, RESIDENT)
    linear(const u8* __restrict__ weights, const u16* __restrict__ x, const float* __restrict__ sums,
           const float* __restrict__ powers, const float* residual, float* out, float* partial, int* tickets, int n_row,
           int n_out, int n_tile16, int n_chunk) {
  extern __shared__ __align__(128) uint4 stages[];
  __shared__ u64 barriers[2 * STAGES];
  const u32 base = shared_address(stages), full = shared_address(barriers), empty = full + STAGES * 8;
  const i64 total = static_cast<i64>((n_tile16 + kTile - 1) / kTile) * n_chunk;
  const int grid = gridDim.x, cta = blockIdx.x;
  const int begin = static_cast<int>(total * cta / grid), end = static_cast<int>(total * (cta + 1) / grid);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, kWarps);
    }
    barriers_visible();
  }
  __syncthreads();
  let_successor_start();  // it finds room as CTAs end, and waits for their results itself

  const Source from{weights, reinterpret_cast<const u8*>(x), reinterpret_cast<const u8*>(sums), n_tile16, n_chunk};
  const int n_unit = end - begin;
  Cursor at{begin / n_chunk, begin % n_chunk, 0, 0};
  Line line{base, full, empty, at, n_unit, 0, evict_first()};
  const bool copies = threadIdx.x == (PRODUCER ? kThreads : 0);
  if (copies) line.start(from);
#if PRODUCER
  if (threadIdx.x >= kThreads) {
    while (copies && line.n_filled < n_unit) line.refill(from);
    return;
  }
#endif
  wait_for_predecessor();

  const Shape s{n_row, n_out, n_tile16, n_chunk};
  Accumulator acc;
  clear(acc);
  bool is_first = true;
  for (int unit = 0; unit < n_unit; ++unit) {
#if !PRODUCER
    if (threadIdx.x < 32) {
      if (copies && unit >= kLag && line.n_filled < n_unit) line.refill(from);
      __syncwarp();
    }
#endif
    const int tile = at.tile;
    barrier_wait(full + at.stage * 8, at.parity);
    compute_stage(acc, base + at.stage * kStageBytes, min(kTile, n_tile16 - tile * kTile));
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(empty + at.stage * 8);
    at.step(n_chunk);
    if (at.chunk != 0 && unit + 1 < n_unit) continue;

    const Sharers who = sharers(tile, n_chunk, total, grid);
    if (who.first == who.last || gather(acc, partial, tickets + tile, who, 2 * cta + !is_first))
      store(acc, s, tile, powers, residual, out);
    clear(acc);
    is_first = false;
  }
}
