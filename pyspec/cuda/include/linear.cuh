// What linear.cu and linear_sm90.cu share: sums of a stage in shared memory, shares of tiles, stores. See linear.cu.
#pragma once
#include "quants.cuh"

#define PLAIN 0
#define RESIDUAL 1
#define GATED 2  // rows 0-7 of each 16 are gates, 8-15 the ups of the same features: writes silu(gate) * up

constexpr int kThreads = 32 * WARPS_M * WARPS_N;
constexpr int kTile = 16;  // 16-row tiles of a CTA
constexpr int kPad = 8 * TILES_N * WARPS_N;
constexpr int kWeightBytes = kTile * RECORD;
constexpr int kRowBytes = CHUNK * kPad * 64;
constexpr int kSumBytes = HAS_MIN ? CHUNK * kPad * 4 : 0;
constexpr int kUnroll = TILES_M * TILES_N > 4 ? 1 : 2;  // blocks in flight: more spills with wide tiles
constexpr int kStageBytes = kWeightBytes + kRowBytes + kSumBytes;
static_assert(WARPS_M * TILES_M == kTile, "a CTA owns 256 rows");

struct Shape {
  int n_row, n_out, n_tile16, n_chunk;
};

struct Accumulator {
  float v[TILES_M][TILES_N][4];
};

// Calls f(value, its number) for each of a thread's sums.
template <class F>
__device__ __forceinline__ void each(Accumulator& acc, F f) {
#pragma unroll
  for (int m = 0; m < TILES_M; ++m)
#pragma unroll
    for (int n = 0; n < TILES_N; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) f(acc.v[m][n][j], (m * TILES_N + n) * 4 + j);
}

__device__ __forceinline__ void multiply(float (&acc)[4], const Weights& w, uint4 b, u32 sums) {
  float part[4];
  mma_f16(part, w.a[0], w.a[1], w.a[2], w.a[3], b.x, b.y, 0.f, 0.f, 0.f, 0.f);
#if HALF_SCALES
  acc[0] = fmaf(part[0], w.scale, acc[0]);
  acc[1] = fmaf(part[1], w.scale, acc[1]);
  acc[2] = fmaf(part[2], w.scale8, acc[2]);
  acc[3] = fmaf(part[3], w.scale8, acc[3]);
  mma_f16(part, w.a[4], w.a[5], w.a[6], w.a[7], b.z, b.w, 0.f, 0.f, 0.f, 0.f);
  acc[0] = fmaf(part[0], w.more, acc[0]);
  acc[1] = fmaf(part[1], w.more, acc[1]);
  acc[2] = fmaf(part[2], w.more8, acc[2]);
  acc[3] = fmaf(part[3], w.more8, acc[3]);
#else
  mma_f16(part, w.a[4], w.a[5], w.a[6], w.a[7], b.z, b.w, part[0], part[1], part[2], part[3]);
  acc[0] = fmaf(part[0], w.scale, acc[0]);
  acc[1] = fmaf(part[1], w.scale, acc[1]);
  acc[2] = fmaf(part[2], w.scale8, acc[2]);
  acc[3] = fmaf(part[3], w.scale8, acc[3]);
#endif
#if HAS_MIN
  const uint2 sum = shared_8(sums);
  const float s0 = __uint_as_float(sum.x), s1 = __uint_as_float(sum.y);
  acc[0] = fmaf(-w.more, s0, acc[0]);
  acc[1] = fmaf(-w.more, s1, acc[1]);
  acc[2] = fmaf(-w.more8, s0, acc[2]);
  acc[3] = fmaf(-w.more8, s1, acc[3]);
#endif
}

__device__ __forceinline__ void compute_stage(Accumulator& acc, u32 stage, int n16) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int tile = (warp / WARPS_N) * TILES_M, column = (warp % WARPS_N) * TILES_N;
  if (tile >= n16) return;  // a last tile of fewer rows; its second half, if missing, is computed and not stored
  const u32 rows = stage + kWeightBytes + column * 512 + lane * 16;
  const u32 sums = stage + kWeightBytes + kRowBytes + column * 32 + (lane & 3) * 8;
#pragma unroll kUnroll
  for (int block = 0; block < CHUNK; ++block) {
    Weights w[TILES_M];
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) unpack(w[m], stage + (tile + m) * RECORD, block, lane);
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
      const uint4 b = shared_16(rows + block * (kPad * 64) + n * 512);
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) multiply(acc.v[m][n], w[m], b, sums + block * (kPad * 4) + n * 32);
    }
  }
}

__device__ __forceinline__ void clear(Accumulator& acc) {
  each(acc, [](float& v, int) { v = 0.f; });
}

__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

__device__ __forceinline__ void store(const Accumulator& acc, Shape s, int tile, const float* powers,
                                      const float* residual, float* out) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) {
    const int row = ((warp % WARPS_N) * TILES_N + n) * 8 + (lane & 3) * 2;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (row + j >= s.n_row) continue;
      const float power = powers[row + j];
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
        const int tile16 = tile * kTile + (warp / WARPS_N) * TILES_M + m;
        const float y = acc.v[m][n][j] * power, y8 = acc.v[m][n][j + 2] * power;
#if EPILOGUE == GATED
        const int column = tile16 * 8 + g;
        if (column < s.n_out) out[static_cast<i64>(row + j) * s.n_out + column] = silu(y) * y8;
#else
        const int column = tile16 * 16 + g;
        const i64 at = static_cast<i64>(row + j) * s.n_out + column;
        if (column < s.n_out) out[at] = EPILOGUE == RESIDUAL ? residual[at] + y : y;
        if (column + 8 < s.n_out) out[at + 8] = EPILOGUE == RESIDUAL ? residual[at + 8] + y8 : y8;
#endif
      }
    }
  }
}

// Which CTAs share a tile, from the cut of the line of units.
struct Sharers {
  int first, last;
  bool is_second;  // the first sharer began with an earlier tile: its share lies in its second slot
};

__device__ __forceinline__ Sharers sharers(int tile, int n_chunk, i64 total, int grid) {
  const i64 start = static_cast<i64>(tile) * n_chunk;
  const int first = static_cast<int>(((start + 1) * grid - 1) / total);
  return {first, static_cast<int>(((start + n_chunk) * grid - 1) / total), total * first / grid < start};
}

__device__ __forceinline__ void sync_computing() {  // a copying warp, if there is one, takes no part
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// Adds the shares of a cut tile in the order of its columns; false for all but the last CTA to arrive.
__device__ __forceinline__ bool gather(Accumulator& acc, float* partial, int* ticket, Sharers who, int slot) {
  __shared__ int is_last;
  constexpr i64 kSlot = 256 * kPad;
  float* mine = partial + slot * kSlot + threadIdx.x;
  each(acc, [&](float& v, int i) { __stcg(mine + i * kThreads, v); });
  __threadfence();
  sync_computing();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(ticket, 1) == who.last - who.first;
    if (is_last) *ticket = 0;
  }
  sync_computing();
  if (!is_last) return false;
  __threadfence();
  const float* share = partial + (2 * who.first + who.is_second) * kSlot + threadIdx.x;
  each(acc, [&](float& v, int i) { v = __ldcg(share + i * kThreads); });
  for (int cta = who.first + 1; cta <= who.last; ++cta) {
    share = partial + 2 * cta * kSlot + threadIdx.x;
    each(acc, [&](float& v, int i) { v += __ldcg(share + i * kThreads); });
  }
  return true;
}
