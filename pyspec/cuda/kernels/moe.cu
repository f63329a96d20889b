// moe: products of rows with the experts that took them. One launch for all gates and ups, one for all downs.
//
//   weights  [expert][tile][chunk][16 rows][record]  u8   each expert as linear_pack.py packs a matrix
//   scales   [expert][n_scale]   f32  second scales of weight rows (ROW_SCALES)
//   x        [block][pad][32]    f16  rows.cu: rows over a power of two, blocks of 32 columns
//   sums     [block][pad]        f32  (HAS_MIN)
//   powers   [pad]               f32
//   order    [pair]              i32  pairs by expert, pair = row * n_used + choice (moe_lists)
//   items    [gridDim.y]         i32 x 4  {expert, first place in `order`, pairs, 0}
//   out      f32                 INNER: [place, n_out], of the activation; else [pair, n_out]
//
// INNER reads row order[place] / n_used of x, else row `place`: what the first launch wrote. Grid (64 weight rows, item);
// a warp owns 16 weight rows and the item's up to 8 TILES_N pairs. Each sum is made by one warp in the order of the
// columns, so a row's bits depend neither on its place nor on its neighbours.
//
// Memory-bound: bytes of the experts in use, once for every 8 TILES_N rows that took one. Set by the launcher: TYPE,
// CHUNK, RECORD, TILES_N, STAGES, INNER, ACT, and for linear.cuh WARPS_M 4, WARPS_N 1, TILES_M 4, EPILOGUE 0.
#include "linear.cuh"
#include "overlap.cuh"

#define NONE 0
#define SWIGLU 1  // rows 0-7 of each 16 are gates, 8-15 the ups of the same features
#define RELU2 2

constexpr int kLeftBytes = WARPS_M * RECORD;
constexpr int kStage = kLeftBytes + kRowBytes + kSumBytes;

__device__ __forceinline__ void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Where a CTA's weights lie: `from` its first record of chunk 0, the next chunk's `step` records later.
struct Groups {
  const u8* from;
  int n;  // groups of 16 weight rows, at most WARPS_M
  int step;
};

__device__ __forceinline__ Groups groups(const u8* expert, int n_tile16, int n_chunk) {
  const int first = blockIdx.x * WARPS_M, tile = first / kTile, lower = min(kTile, n_tile16 - tile * kTile);
  const i64 record = static_cast<i64>(tile) * kTile * n_chunk + first % kTile;
  return {expert + record * RECORD, min(WARPS_M, n_tile16 - first), lower};
}

__device__ __forceinline__ void load_chunk(u32 to, Groups g, const u8* x, const float* sums, const int* rows, int pad,
                                           int chunk) {
  const u8* from = g.from + static_cast<i64>(chunk) * g.step * RECORD;
  for (int i = threadIdx.x; i < g.n * (RECORD / 16); i += kThreads) copy16(to + i * 16, from + i * 16);
#pragma unroll
  for (int i = threadIdx.x; i < kRowBytes / 16; i += kThreads) {
    const int block = i / (kPad * 4), token = i / 4 % kPad;
    copy16(to + kLeftBytes + i * 16, x + (static_cast<i64>(chunk * CHUNK + block) * pad + rows[token]) * 64 + i % 4 * 16);
  }
#if HAS_MIN
#pragma unroll
  for (int i = threadIdx.x; i < CHUNK * kPad; i += kThreads)
    copy4(to + kLeftBytes + kRowBytes + i * 4, sums + static_cast<i64>(chunk * CHUNK + i / kPad) * pad + rows[i % kPad]);
#endif
}

__device__ __forceinline__ void add_chunk(float (&acc)[TILES_N][4], u32 stage) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 2
  for (int block = 0; block < CHUNK; ++block) {
    Weights w;
    unpack(w, stage + warp * RECORD, block, lane);
    const u32 right = stage + kLeftBytes + block * (kPad * 64) + lane * 16;
    const u32 mins = stage + kLeftBytes + kRowBytes + block * (kPad * 4) + (lane & 3) * 8;
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
      uint2 s = make_uint2(0, 0);
      if (HAS_MIN) s = shared_8(mins + n * 32);
      multiply(acc[n], w, shared_16(right + n * 512), __uint_as_float(s.x), __uint_as_float(s.y));
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    moe(const u8* __restrict__ weights, const float* __restrict__ scales, const u8* x, const float* sums,
        const float* powers, const int* order, const int4* items, float* out, i64 expert_bytes, int n_scale, int n_used, int pad, int n_out,
        int n_tile16, int n_chunk) {
  let_successor_start();
  wait_for_predecessor();
  extern __shared__ uint4 stages[];
  __shared__ int rows[kPad];
  const int4 item = items[blockIdx.y];
  if (item.z == 0) return;
  if (threadIdx.x < kPad) {
    const int place = item.y + min(static_cast<int>(threadIdx.x), item.z - 1);  // those of none repeat the last
    rows[threadIdx.x] = INNER ? order[place] / n_used : place;
  }
  __syncthreads();
  const u32 base = shared_address(stages);
  const Groups g = groups(weights + item.x * expert_bytes, n_tile16, n_chunk);
  float acc[TILES_N][4] = {};
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < n_chunk) load_chunk(base + i * kStage, g, x, sums, rows, pad, i);
    copies_commit();
  }
  for (int chunk = 0, stage = 0, next = STAGES - 1; chunk < n_chunk; ++chunk) {
    copies_wait<STAGES - 2>();
    __syncthreads();
    if (chunk + STAGES - 1 < n_chunk)
      load_chunk(base + next * kStage, g, x, sums, rows, pad, chunk + STAGES - 1);
    copies_commit();
    next = next + 1 == STAGES ? 0 : next + 1;
    add_chunk(acc, base + stage * kStage);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row16 = lane >> 2;
  if (warp >= g.n) return;
  const int group = blockIdx.x * WARPS_M + warp;
  float scale = kUnit, scale8 = kUnit;
#if ROW_SCALES
  const float* own = scales + static_cast<i64>(item.x) * n_scale + group * 16 + row16;
  scale *= own[0];
  scale8 *= own[8];
#endif
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int token = n * 8 + (lane & 3) * 2 + j;
      if (token >= item.z) continue;
      const float power = powers[rows[token]];
      const float y = acc[n][j] * scale * power, y8 = acc[n][j + 2] * scale8 * power;
      const int place = item.y + token;
      float* to = out + static_cast<i64>(INNER ? place : order[place]) * n_out;
#if ACT == SWIGLU
      const int column = group * 8 + row16;
      if (column < n_out) to[column] = silu(y) * y8;
#else
      const int column = group * 16 + row16;
      const float r = fmaxf(y, 0.f), r8 = fmaxf(y8, 0.f);
      if (column < n_out) to[column] = ACT == RELU2 ? r * r : y;
      if (column + 8 < n_out) to[column + 8] = ACT == RELU2 ? r8 * r8 : y8;
#endif
    }
  }
}
