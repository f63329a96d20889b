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
constexpr int kWarps = WARPS_M * WARPS_N;
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

__device__ __forceinline__ void multiply(float (&acc)[4], const Weights& w, uint4 b, float s0, float s1) {
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
  acc[0] = fmaf(-w.more, s0, acc[0]);
  acc[1] = fmaf(-w.more, s1, acc[1]);
  acc[2] = fmaf(-w.more8, s0, acc[2]);
  acc[3] = fmaf(-w.more8, s1, acc[3]);
#endif
}

// What a warp multiplies of one block: its part of the weights and of the rows.
struct Left {
  Codes codes[TILES_M];
};

struct Right {
  uint4 x[TILES_N];
  uint2 sums[TILES_N];
};

// Past the rows of a last, lower tile lies anything: it is multiplied and not stored.
__device__ __forceinline__ void fetch(Left& left, u32 stage, int block) {
  const int lane = threadIdx.x & 31, tile = (threadIdx.x >> 5) / WARPS_N * TILES_M;
#pragma unroll
  for (int m = 0; m < TILES_M; ++m) fetch(left.codes[m], stage + (tile + m) * RECORD, block, lane);
}

__device__ __forceinline__ void fetch(Right& right, u32 stage, int block) {
  const int lane = threadIdx.x & 31, column = (threadIdx.x >> 5) % WARPS_N * TILES_N;
  const u32 rows = stage + kWeightBytes + block * (kPad * 64) + column * 512 + lane * 16;
  const u32 sums = stage + kWeightBytes + kRowBytes + block * (kPad * 4) + column * 32 + (lane & 3) * 8;
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) right.x[n] = shared_16(rows + n * 512);
#if HAS_MIN
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) right.sums[n] = shared_8(sums + n * 32);
#endif
}

__device__ __forceinline__ void multiply(Accumulator& acc, const Left& left, const Right& right) {
  Weights w[TILES_M];
#pragma unroll
  for (int m = 0; m < TILES_M; ++m) unpack(w[m], left.codes[m]);
#pragma unroll
  for (int n = 0; n < TILES_N; ++n)
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
      multiply(acc.v[m][n], w[m], right.x[n], __uint_as_float(right.sums[n].x), __uint_as_float(right.sums[n].y));
}

__device__ __forceinline__ void clear(Accumulator& acc) {
  each(acc, [](float& v, int) { v = 0.f; });
}

__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

__device__ __forceinline__ void store(const Accumulator& acc, Shape s, int tile, const u8* weights, const float* powers,
                                      const float* residual, float* out) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
  const int first16 = tile * kTile + (warp / WARPS_N) * TILES_M;
  float scale[TILES_M], scale8[TILES_M];
#pragma unroll
  for (int m = 0; m < TILES_M; ++m) {
    scale[m] = scale8[m] = kUnit;
#if ROW_SCALES
    const float* row_scales = reinterpret_cast<const float*>(weights + static_cast<i64>(s.n_tile16) * s.n_chunk * RECORD);
    scale[m] *= row_scales[(first16 + m) * 16 + g];
    scale8[m] *= row_scales[(first16 + m) * 16 + g + 8];
#endif
  }
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) {
    const int row = ((warp % WARPS_N) * TILES_N + n) * 8 + (lane & 3) * 2;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (row + j >= s.n_row) continue;
      const float power = powers[row + j];
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
        const int tile16 = first16 + m;
        const float y = acc.v[m][n][j] * scale[m] * power, y8 = acc.v[m][n][j + 2] * scale8[m] * power;
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

// Counts an arrival; sees what earlier ones wrote, and shows what this thread (and those it synchronised with) wrote.
__device__ __forceinline__ int arrive(int* ticket) {
  int n;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(n) : "l"(ticket) : "memory");
  return n;
}

// Adds the shares of a cut tile in the order of its columns; false for all but the last to arrive. Each warp has a ticket
// of its own and waits for no other: a CTA's warps cover different rows or tokens.
__device__ __forceinline__ bool gather(Accumulator& acc, float* partial, int* tickets, Sharers who, int slot) {
  constexpr int kVectors = TILES_M * TILES_N;
  constexpr int kSlot = 64 * kPad;  // in vectors
  constexpr int kAtOnce = kVectors <= 2 ? 4 : kVectors <= 4 ? 2 : 1;  // shares under way
  float4* shares = reinterpret_cast<float4*>(partial) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const float(&v)[4] = acc.v[i / TILES_N][i % TILES_N];
    __stcg(shares + slot * kSlot + i * kThreads, make_float4(v[0], v[1], v[2], v[3]));
  }
  __syncwarp();
  int n_before = 0;
  if ((threadIdx.x & 31) == 0) {
    int* ticket = tickets + (threadIdx.x >> 5);
    n_before = arrive(ticket);
    if (n_before == who.last - who.first) *ticket = 0;
  }
  if (__shfl_sync(0xffffffffu, n_before, 0) != who.last - who.first) return false;
  clear(acc);
#pragma unroll kAtOnce
  for (int cta = who.first; cta <= who.last; ++cta) {
    const float4* share = shares + (2 * cta + (cta == who.first && who.is_second)) * kSlot;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 v = __ldcg(share + i * kThreads);
      float(&sum)[4] = acc.v[i / TILES_N][i % TILES_N];
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
  }
  return true;
}
