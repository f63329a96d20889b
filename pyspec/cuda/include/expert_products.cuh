// moe.cu's inner loop: a warp's 16 weight rows times an item's rows, a chunk of columns in shared memory at a time.
//
// Its bound is instructions, not bytes, so that offsets are constants, and what all blocks of a chunk share is done once. Q4_K and
// Q5_K (INT_SCALES) have most to share: codes times their six-bit scales are whole numbers that f16 holds, so that a chunk's blocks
// are one chain of products, and minima times sums of columns are one more (bf16: the sums in two parts, which keeps 16 bits).
#pragma once
#include "linear_block.cuh"

// A value the compiler takes for new: what follows from it is kept, not computed again in every stage.
__device__ __forceinline__ u32 anew(u32 x) {
  u32 v;
  asm volatile("mov.u32 %0, %1;" : "=r"(v) : "r"(x));
  return v;
}

// Where a lane's operands lie in a stage.
struct Places {
  At left;           // its group's record of the first chunk
  u32 right, pairs;  // rows of the first block; the first two pairs' sums or powers
  u32 minima, both;  // INT_SCALES: of blocks 2t and 2t + 1 of row g; those blocks' sums or powers of pair g

  // Most experts have a pair or two: of places past the `n` pairs, the last pair's are read, which shared memory gives to all at
  // once; those sums are not stored. (Without lists it gains nothing and costs registers.)
  __device__ __forceinline__ Places(int group, int n) {
    const u32 lane = threadIdx.x & 31, record = group * RECORD, row = lane >> 2, pair = lane & 3;
    left = {anew(record), anew(record + lane * 16), anew(record + row * 4)};
    right = anew(kWeights + (LISTED && TILES_N == 1 ? min(row, static_cast<u32>(n) - 1) * 64 + pair * 16 : lane * 16));
    pairs = anew(pair * 8);
    minima = anew(record + row * 4 + pair * 64);
    both = anew(pair * (2 * kPad * 4) + row * 4);
  }
};

__device__ __forceinline__ void add_times(float (&acc)[4], const float (&part)[4], float left, float right, float left8,
                                          float right8) {
  acc[0] = fmaf(part[0], left, acc[0]);
  acc[1] = fmaf(part[1], right, acc[1]);
  acc[2] = fmaf(part[2], left8, acc[2]);
  acc[3] = fmaf(part[3], right8, acc[3]);
}

__device__ __forceinline__ void add_by_pairs(float (&acc)[4], const float (&part)[4], uint2 powers) {
  const float even = __uint_as_float(powers.x), odd = __uint_as_float(powers.y);
  add_times(acc, part, even, odd, even, odd);
}

#if INT_SCALES

constexpr float kWhole = 65536.f;  // what codes times scales are less than they should be

// Codes of two columns where they lie: f16 below its normal range, codes times 2^-24 or (odd pairs) 2^-20.
__device__ __forceinline__ u32 low_pair(u32 nibbles, u32 high, int p) {
  const int shift = p & 1 ? 4 : 0;
  const u32 v = (p < 2 ? nibbles : nibbles >> 8) & (0x000f000fu << shift);
  return FIVE_BITS ? and_or(high, 0x00100010u << shift, v) : v;
}

// Codes times their scales, of rows g and g + 8, over kWhole: f16 holds whole numbers up to 31 * 63, and these as well. `k16384` is
// f16's in four bytes of 0x74: with another byte below, 16384 and 16 times that byte.
__device__ __forceinline__ void unpack_whole(u32 (&a)[8], const Codes& c, u32 k16384) {
  const u32 scales16 = sub_f16x2(__byte_perm(c.s, k16384, 0x4240), 0x74007400u);
  const u32 scales256 = mul_f16x2(scales16, 0x4c004c00u);
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const u32 v = low_pair(c.q.x, high_bits(c.h, 0, p), p), v8 = low_pair(c.q.y, high_bits(c.h, 1, p), p);
    a[2 * p] = mul_by_half<0>(v, p & 1 ? scales16 : scales256);
    a[2 * p + 1] = mul_by_half<1>(v8, p & 1 ? scales16 : scales256);
  }
}

__device__ __forceinline__ u32 two_bf16(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

// Minima of rows g and g + 8, of blocks 2t and 2t + 1: bf16 has 128 + m with m as its lowest bits.
__device__ __forceinline__ void unpack_minima(u32 (&a)[2], u32 words) {
  constexpr u32 kOne = 0x3f803f80u, kMinus128 = 0xc300c300u;
  const u32 all = __byte_perm(shared_4(words), shared_4(words + 32), 0x7531);
  a[0] = fma_bf16x2(__byte_perm(all, 0x43434343u, 0x4240), kOne, kMinus128);
  a[1] = fma_bf16x2(__byte_perm(all, 0x43434343u, 0x4341), kOne, kMinus128);
}

__device__ __forceinline__ void add_chunk(float (&acc)[TILES_N][4], const Places& at, u32 stage, int chunk) {
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
    unpack_whole(a, codes, k16384);
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
  unpack_minima(m, at.minima + first + kScales);
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) {
    const u32 of = beside + at.both + n * 32;
    float s0 = __uint_as_float(shared_4(of + kSums)), s1 = __uint_as_float(shared_4(of + kSums + kPad * 4));
    if (!INNER) s0 *= __uint_as_float(shared_4(of + kPowers)), s1 *= __uint_as_float(shared_4(of + kPowers + kPad * 4));
    const u32 upper = two_bf16(s0, s1);
    const u32 rest = two_bf16(s0 - __uint_as_float(upper << 16), s1 - __uint_as_float(upper & 0xffff0000u));
    float less[4];
    mma_bf16(less, m[0], m[1], m[0], m[1], upper, rest, 0.f, 0.f, 0.f, 0.f);
    const float d = low_half(whole.d.x) * kWhole, d8 = low_half(whole.d.y) * kWhole;
    const float by = -high_half(whole.d.x), by8 = -high_half(whole.d.y);
    add_times(acc[n], sums[n], d, d, d8, d8);
    add_times(acc[n], less, by, by, by8, by8);
  }
}

#else

__device__ __forceinline__ void add_chunk(float (&acc)[TILES_N][4], const Places& at, u32 stage, int chunk) {
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

__device__ __forceinline__ void add_stage(float (&acc)[TILES_N][4], const Places& at, u32 stage, int n_left) {
  if (n_left >= PER_STAGE) {
#pragma unroll
    for (int chunk = 0; chunk < PER_STAGE; ++chunk) add_chunk(acc, at, stage, chunk);
  } else {
#pragma unroll 1
    for (int chunk = 0; chunk < n_left; ++chunk) add_chunk(acc, at, stage, chunk);
  }
}
