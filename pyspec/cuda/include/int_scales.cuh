// Q4_K and Q5_K, a chunk of 256 columns at a time: what its blocks share is done once.
//
// Codes times their six-bit scales are whole numbers that f16 holds, so that a chunk's blocks are one chain of products, scaled at
// its end. Minima times sums of columns are one product more, of bf16: minima have six bits, and sums are cut into parts of eight.
#pragma once
#include "linear_block.cuh"

constexpr float kIntScale = 65536.f;  // what codes times scales are less than they should be

// Codes of two columns where they lie: f16 below its normal range, codes times 2^-24 or (odd pairs) 2^-20.
__device__ __forceinline__ u32 low_pair(u32 nibbles, u32 high, int p) {
  const int shift = p & 1 ? 4 : 0;
  const u32 v = (p < 2 ? nibbles : nibbles >> 8) & (0x000f000fu << shift);
  return FIVE_BITS ? and_or(high, 0x00100010u << shift, v) : v;
}

// Codes times their scales, of rows g and g + 8, over kIntScale: f16 holds whole numbers up to 31 * 63, and these as well. `k16384` is
// f16's in four bytes of 0x74: with another byte below, 16384 and 16 times that byte.
__device__ __forceinline__ void unpack_ints(u32 (&a)[8], const Codes& c, u32 k16384) {
  const u32 scales16 = sub_f16x2(__byte_perm(c.s, k16384, 0x4240), 0x74007400u);
  const u32 scales256 = mul_f16x2(scales16, 0x4c004c00u);
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const u32 v = low_pair(c.q.x, high_bits(c.h, 0, p), p), v8 = low_pair(c.q.y, high_bits(c.h, 1, p), p);
    a[2 * p] = mul_by_half<0>(v, p & 1 ? scales16 : scales256);
    a[2 * p + 1] = mul_by_half<1>(v8, p & 1 ? scales16 : scales256);
  }
}

// Minima of rows g and g + 8, of blocks 2t and 2t + 1, from those blocks' words of scales: bf16 has 128 + m with m as its lowest bits.
__device__ __forceinline__ void minima_of(u32 (&a)[2], u32 word, u32 next) {
  constexpr u32 kOne = 0x3f803f80u, kMinus128 = 0xc300c300u;
  const u32 all = __byte_perm(word, next, 0x7531);
  a[0] = fma_bf16x2(__byte_perm(all, 0x43434343u, 0x4240), kOne, kMinus128);
  a[1] = fma_bf16x2(__byte_perm(all, 0x43434343u, 0x4341), kOne, kMinus128);
}

// For linear_sm90.cu and linear_pair.cu, which keep all bits of f32 sums. (moe.cu keeps 16, and has a way of its own.)

struct Scales {  // of 16 rows in a chunk, as they lie: two f16 of rows g and g + 8 each; words of blocks 2t and 2t + 1
  uint2 d;
  u32 word, next;
};

__device__ __forceinline__ void fetch(Scales& s, u32 record) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  s.d = shared_8(record + kScales + CHUNK * 32 + g * 8);
  s.word = shared_4(record + kScales + g * 4 + t * 64);
  s.next = shared_4(record + kScales + g * 4 + t * 64 + 32);
}

struct Parts {  // sums of blocks 2t and 2t + 1 of a row, in the right operand's place
  u32 upper, middle, lower;

  __device__ __forceinline__ Parts(u32 upper, u32 middle, u32 lower) : upper(upper), middle(middle), lower(lower) {}
  __device__ __forceinline__ Parts(float s0, float s1) {
    upper = two_bf16(s0, s1);
    s0 -= low_bf16(upper), s1 -= high_bf16(upper);
    middle = two_bf16(s0, s1);
    lower = two_bf16(s0 - low_bf16(middle), s1 - high_bf16(middle));
  }
};

// Of 8 rows of x from `sums` on: where the first block's lie.
__device__ __forceinline__ Parts fetch_parts(u32 sums) {
  const int lane = threadIdx.x & 31;
  const u32 at = sums + (lane & 3) * (2 * kPad * 4) + (lane >> 2) * 4;
  return Parts(__uint_as_float(shared_4(at)), __uint_as_float(shared_4(at + kPad * 4)));
}

struct Factors {
  float d, d8, by, by8;

  __device__ __forceinline__ explicit Factors(const Scales& s)
      : d(low_half(s.d.x) * kIntScale), d8(low_half(s.d.y) * kIntScale), by(-high_half(s.d.x)), by8(-high_half(s.d.y)) {}
};

__device__ __forceinline__ void add_whole(float (&acc)[4], const float (&sum)[4], const Factors& f) {
  add_times(acc, sum, f.d, f.d, f.d8, f.d8);
}

__device__ __forceinline__ void add_minima(float (&acc)[4], const u32 (&m)[2], const Parts& p, const Factors& f) {
  float less[4];
  mma_bf16(less, m[0], m[1], m[0], m[1], p.upper, p.middle, 0.f, 0.f, 0.f, 0.f);
  mma_bf16(less, m[0], m[1], m[0], m[1], p.lower, 0u, less[0], less[1], less[2], less[3]);
  add_times(acc, less, f.by, f.by, f.by8, f.by8);
}

__device__ __forceinline__ void multiply_whole(float (&sum)[4], const u32 (&a)[8], uint4 b) {
  mma_f16(sum, a[0], a[1], a[2], a[3], b.x, b.y, sum[0], sum[1], sum[2], sum[3]);
  mma_f16(sum, a[4], a[5], a[6], a[7], b.z, b.w, sum[0], sum[1], sum[2], sum[3]);
}
