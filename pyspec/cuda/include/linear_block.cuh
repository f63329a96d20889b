// What all products of packed weights share: one block of 32 columns times the rows, in the order of rows.cu's blocks.
#pragma once
#include "cut.cuh"
#include "quants.cuh"

#define PLAIN 0
#define RESIDUAL 1
#define GATED 2  // rows 0-7 of each 16 are gates, 8-15 the ups of the same features: writes silu(gate) * up

#ifndef TILE_ROWS
#define TILE_ROWS 8  // moe.cu's whole numbers: 4
#endif

constexpr int kPad = TILE_ROWS * TILES_N * WARPS_N;  // rows, those that are not there included
constexpr int kRowBytes = CHUNK * kPad * 64;
constexpr int kSumBytes = HAS_MIN ? CHUNK * kPad * 4 : 0;

// A value the compiler takes for new: what follows from it is kept, not computed again in every stage.
__device__ __forceinline__ u32 anew(u32 x) {
  u32 v;
  asm volatile("mov.u32 %0, %1;" : "=r"(v) : "r"(x));
  return v;
}

__device__ __forceinline__ void add_times(float (&acc)[4], const float (&part)[4], float left, float right, float left8,
                                          float right8) {
  acc[0] = fmaf(part[0], left, acc[0]);
  acc[1] = fmaf(part[1], right, acc[1]);
  acc[2] = fmaf(part[2], left8, acc[2]);
  acc[3] = fmaf(part[3], right8, acc[3]);
}

#if HALF_MINIMA
// Less minima times the rows' sums over 16 columns, which are products with ones: exact, and the same for all weights.
__device__ __forceinline__ void less_minima(float (&acc)[4], float low, float low8, u32 b, u32 b8) {
  constexpr u32 kOnes = 0x3c003c00u;
  float sums[4];
  mma_f16(sums, kOnes, kOnes, kOnes, kOnes, b, b8, 0.f, 0.f, 0.f, 0.f);
  add_times(acc, sums, -low, -low, -low8, -low8);
}
#endif

__device__ __forceinline__ void multiply(float (&acc)[4], const Weights& w, uint4 b, float s0, float s1) {
#if SCALED
  mma_f16(acc, w.a[0], w.a[1], w.a[2], w.a[3], b.x, b.y, acc[0], acc[1], acc[2], acc[3]);
  mma_f16(acc, w.a[4], w.a[5], w.a[6], w.a[7], b.z, b.w, acc[0], acc[1], acc[2], acc[3]);
#else
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
#if HALF_MINIMA
  less_minima(acc, w.low[0], w.low[1], b.x, b.y);
  less_minima(acc, w.low[2], w.low[3], b.z, b.w);
#endif
#else
  mma_f16(part, w.a[4], w.a[5], w.a[6], w.a[7], b.z, b.w, part[0], part[1], part[2], part[3]);
  acc[0] = fmaf(part[0], w.scale, acc[0]);
  acc[1] = fmaf(part[1], w.scale, acc[1]);
  acc[2] = fmaf(part[2], w.scale8, acc[2]);
  acc[3] = fmaf(part[3], w.scale8, acc[3]);
#endif
#endif
#if HAS_MIN
  acc[0] = fmaf(-w.more, s0, acc[0]);
  acc[1] = fmaf(-w.more, s1, acc[1]);
  acc[2] = fmaf(-w.more8, s0, acc[2]);
  acc[3] = fmaf(-w.more8, s1, acc[3]);
#endif
}

struct Right {  // a warp's rows of a block
  uint4 x[TILES_N];
  uint2 sums[TILES_N];
};

// `rows` and `sums`: where those of the block lie for the warp's first 8 rows.
__device__ __forceinline__ void fetch(Right& right, u32 rows, u32 sums) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) right.x[n] = shared_16(rows + n * 512 + lane * 16);
#if HAS_MIN
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) right.sums[n] = shared_8(sums + n * 32 + (lane & 3) * 8);
#endif
}

__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

// Where a product goes: to its row of `out`; or (HANDS_POWER: over this power of two) to the blocks that the next product reads, as rows.cu's
// LAYOUT 0 has them for as many rows. Those are no types whose products need sums of blocks. `by`: the rows' powers there.
#ifdef HANDS_POWER
__device__ __forceinline__ float* powers_of(const float* residual) { return const_cast<float*>(residual); }

__device__ __forceinline__ void put(float* out, float* by, int, int row, int column, float y) {
  const int at = column % 32, place = at / 4 % 4 * 8 + at / 16 * 4 + at % 4;
  reinterpret_cast<u16*>(out)[(static_cast<i64>(column / 32) * kPad + row) * 32 + place] = f32_to_f16(y * (1.f / HANDS_POWER));
  if (column == 0) by[row] = HANDS_POWER;
}
#else
__device__ __forceinline__ float* powers_of(const float*) { return nullptr; }

__device__ __forceinline__ void put(float* out, float*, int n_out, int row, int column, float y) {
  out[static_cast<i64>(row) * n_out + column] = y;
}
#endif
