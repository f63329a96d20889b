// moe.cu's inner loop for f16 rows: a warp's 16 weight rows times an item's rows, a chunk of columns in shared memory at a time.
//
// Its bound is instructions, not bytes, so that offsets are constants, and what all blocks of a chunk share is done once. Q5_K
// (INT_SCALES) has most to share: see int_scales.cuh. Of sums, two parts are multiplied with minima, which keeps 16 bits.
#pragma once
#include "linear_block.cuh"

constexpr int kPieces = WARPS_M * RECORD / 16;  // of 16 bytes: a chunk's weights
constexpr int kWeights = PER_STAGE * kPieces * 16;
constexpr int kPowerBytes = INNER ? 0 : CHUNK * kPad * 4;
constexpr int kSums = kWeights + PER_STAGE * kRowBytes, kPowers = kSums + PER_STAGE * kSumBytes;  // where a stage has them
constexpr int kStage = kPowers + PER_STAGE * kPowerBytes;

constexpr int kTiles = TILES_N;
using Acc = float[kTiles][4];  // a lane's sums of rows g and g + 8, of pairs 2t and 2t + 1 of each 8

// f(pair, its sum of row g, of row g + 8)
template <typename F>
__device__ __forceinline__ void each_pair(const Acc& acc, F f) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int j = 0; j < 2; ++j) f(tile * 8 + (threadIdx.x & 3) * 2 + j, acc[tile][j], acc[tile][j + 2]);
}

// Where a lane's operands lie in a stage.
struct Places {
  At left;           // its group's record of the first chunk
  u32 right, pairs;  // rows of the first block; the first two pairs' sums or powers
  u32 minima, both;  // INT_SCALES: of blocks 2t and 2t + 1 of row g; those blocks' sums or powers of pair g

  // Most experts have a pair or two: for places past the `n` pairs the one behind them is read, which shared memory gives to all at
  // once and which holds zeros (clear_place), the numbers that tensor cores spend the least power on: with many rows it is power that
  // bounds a multiprocessor's clock. Those sums are not stored. (Without lists it gains nothing and costs registers.)
  __device__ __forceinline__ Places(int group, int n) {
    const u32 lane = threadIdx.x & 31, record = group * RECORD, row = lane >> 2, pair = lane & 3;
    left = {anew(record), anew(record + lane * 16), anew(record + row * 4)};
    right = anew(kWeights + (LISTED && TILES_N == 1 ? min(row, static_cast<u32>(n)) * 64 + pair * 16 : lane * 16));
    pairs = anew(pair * 8);
    minima = anew(record + row * 4 + pair * 64);
    both = anew(pair * (2 * kPad * 4) + row * 4);
  }
};

// Zeros in all stages' place of pair n, where no copy goes.
__device__ __forceinline__ void clear_place(uint4* stages, int n) {
  if (!LISTED || TILES_N > 1 || n >= kPad) return;
  constexpr int kOfStage = PER_STAGE * CHUNK * 4;  // 16 bytes each
#pragma unroll 1
  for (int i = threadIdx.x; i < STAGES * kOfStage; i += kThreads) {
    const int block = i % kOfStage / 4;
    stages[(i / kOfStage * kStage + kWeights + (block * kPad + n) * 64) / 16 + i % 4] = make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ void add_by_pairs(float (&acc)[4], const float (&part)[4], uint2 powers) {
  const float even = __uint_as_float(powers.x), odd = __uint_as_float(powers.y);
  add_times(acc, part, even, odd, even, odd);
}

#if INT_SCALES

__device__ __forceinline__ void add_chunk(Acc& acc, const Places& at, u32 stage, int chunk) {
  const u32 first = stage + chunk * (kPieces * 16), beside = stage + chunk * (CHUNK * kPad * 4);
  const At left{at.left.record + first, at.left.wide + first, at.left.narrow + first};
  const u32 right = stage + at.right + chunk * kRowBytes;
  float sums[TILES_N][4] = {};
  const u32 k16384 = anew(0x74747474u);
#pragma unroll
  for (int block = 0; block < CHUNK; ++block) {
    Codes codes;
    u32 a[8];
    fetch(codes, left, block);
    unpack_ints(a, codes, k16384);
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
      const uint4 b = shared_16(right + block * (kPad * 64) + n * 512);
      float own[4] = {};
      float(&sum)[4] = INNER ? sums[n] : own;
      mma_f16(sum, a[0], a[1], a[2], a[3], b.x, b.y, sum[0], sum[1], sum[2], sum[3]);
      mma_f16(sum, a[4], a[5], a[6], a[7], b.z, b.w, sum[0], sum[1], sum[2], sum[3]);
      if (!INNER) add_by_pairs(sums[n], own, shared_8(beside + at.pairs + kPowers + block * (kPad * 4) + n * 32));
    }
  }
  Codes whole;
  fetch_shared(whole, left);
  u32 m[2];
  const u32 words = at.minima + first + kScales;
  minima_of(m, shared_4(words), shared_4(words + 32));
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) {
    const u32 of = beside + at.both + n * 32;
    float s0 = __uint_as_float(shared_4(of + kSums)), s1 = __uint_as_float(shared_4(of + kSums + kPad * 4));
    if (!INNER) s0 *= __uint_as_float(shared_4(of + kPowers)), s1 *= __uint_as_float(shared_4(of + kPowers + kPad * 4));
    const u32 upper = two_bf16(s0, s1);
    const u32 rest = two_bf16(s0 - __uint_as_float(upper << 16), s1 - __uint_as_float(upper & 0xffff0000u));
    float less[4];
    mma_bf16(less, m[0], m[1], m[0], m[1], upper, rest, 0.f, 0.f, 0.f, 0.f);
    const float d = low_half(whole.d.x) * kIntScale, d8 = low_half(whole.d.y) * kIntScale;
    const float by = -high_half(whole.d.x), by8 = -high_half(whole.d.y);
    add_times(acc[n], sums[n], d, d, d8, d8);
    add_times(acc[n], less, by, by, by8, by8);
  }
}

#else

__device__ __forceinline__ void add_chunk(Acc& acc, const Places& at, u32 stage, int chunk) {
  const u32 first = stage + chunk * (kPieces * 16), beside = stage + chunk * (CHUNK * kPad * 4) + at.pairs;
  const At left{at.left.record + first, at.left.wide + first, at.left.narrow + first};
  const u32 right = stage + at.right + chunk * kRowBytes;
  Codes codes;
  fetch_shared(codes, left);
#pragma unroll
  for (int block = 0; block < CHUNK; ++block) {
    Weights w;
    fetch(codes, left, block);
    unpack(w, codes);
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
      const u32 pairs = beside + block * (kPad * 4) + n * 32;
      const uint4 b = shared_16(right + block * (kPad * 64) + n * 512);
      uint2 s = make_uint2(0, 0);
      if (HAS_MIN) s = shared_8(pairs + kSums);
      float own[4] = {};
      multiply(INNER ? acc[n] : own, w, b, __uint_as_float(s.x), __uint_as_float(s.y));
      if (!INNER) add_by_pairs(acc[n], own, shared_8(pairs + kPowers));
    }
  }
}

#endif

__device__ __forceinline__ void add_stage(Acc& acc, const Places& at, u32 stage, int n_left) {
  if (n_left >= PER_STAGE) {
#pragma unroll
    for (int chunk = 0; chunk < PER_STAGE; ++chunk) add_chunk(acc, at, stage, chunk);
  } else {
#pragma unroll 1
    for (int chunk = 0; chunk < n_left; ++chunk) add_chunk(acc, at, stage, chunk);
  }
}
