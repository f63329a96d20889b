// Packed weights to tensor-core operands. A record holds 16 rows by CHUNK blocks of 32 weights; see linear_pack.py.
//
// Codes become f16 exactly (1024 + code by bit pattern, less the bias), scales stay f32 and multiply sums, not weights.
// Lane 4 g + t owns rows g and g + 8 and weights 4t..4t+3 and 16+4t..16+4t+3 of each block, so that the two products
// of a block cover its halves.
//
// Set by the launcher: TYPE, CHUNK (blocks in a record), RECORD (bytes of one).
#pragma once
#include "mma.cuh"

#define Q8_0 0
#define Q4_0 1
#define Q4_K 2
#define Q6_K 3

#define HAS_MIN (TYPE == Q4_K)      // weights are scale * code - min
#define HALF_SCALES (TYPE == Q6_K)  // one scale for each 16 weights

struct Weights {
  u32 a[8];            // operands of the block's first 16 columns, then of its second
  float scale, scale8;  // rows g and g + 8 (first halves when HALF_SCALES)
  float more, more8;    // minima, or scales of the second halves
};

__device__ __forceinline__ float low_half(u32 v) { return f16_to_f32(static_cast<u16>(v)); }
__device__ __forceinline__ float high_half(u32 v) { return f16_to_f32(static_cast<u16>(v >> 16)); }

#if TYPE == Q8_0

__device__ __forceinline__ void bytes_to_f16(u32 v, u32& first, u32& second) {
  constexpr u32 kBias = 0x64806480u;  // 1024 + 128
  first = sub_f16x2(__byte_perm(v, 0x64646464u, 0x4140), kBias);
  second = sub_f16x2(__byte_perm(v, 0x64646464u, 0x4342), kBias);
}

__device__ __forceinline__ void unpack(Weights& w, u32 record, int block, int lane) {
  const uint4 q = shared_16(record + block * 512 + lane * 16);
  bytes_to_f16(q.x, w.a[0], w.a[2]);
  bytes_to_f16(q.y, w.a[4], w.a[6]);
  bytes_to_f16(q.z, w.a[1], w.a[3]);
  bytes_to_f16(q.w, w.a[5], w.a[7]);
  const u32 d = shared_4(record + CHUNK * 512 + block * 32 + (lane >> 2) * 4);
  w.scale = low_half(d);
  w.scale8 = high_half(d);
}

#else

// Eight nibbles in the order k0 k2 k4 k6 k1 k3 k5 k7, two more bits of each in `high` (zero for 4-bit types).
__device__ __forceinline__ u32 pair(u32 nibbles, u32 high, int p, u32 bias) {
  return sub_f16x2(((nibbles >> (4 * p)) & 0x000f000fu) | high | 0x64006400u, bias);
}

__device__ __forceinline__ u32 high_bits(u32 h, int j) {
  return (j < 2 ? h << (4 - 2 * j) : h >> (2 * j - 4)) & 0x00300030u;
}

__device__ __forceinline__ void unpack(Weights& w, u32 record, int block, int lane) {
  constexpr u32 kBias = TYPE == Q4_0 ? 0x64086408u : TYPE == Q4_K ? 0x64006400u : 0x64206420u;
  constexpr int kScales = CHUNK * 256 + (TYPE == Q6_K ? CHUNK * 128 : 0);
  const int g = lane >> 2;
  const uint2 q = shared_8(record + (block >> 1) * 512 + lane * 16 + (block & 1) * 8);
  const u32 h = TYPE == Q6_K ? shared_4(record + CHUNK * 256 + (block >> 2) * 512 + lane * 16 + (block & 3) * 4) : 0;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    w.a[2 * p] = pair(q.x, TYPE == Q6_K ? high_bits(h, p) : 0, p, kBias);
    w.a[2 * p + 1] = pair(q.y, TYPE == Q6_K ? high_bits(h, 4 + p) : 0, p, kBias);
  }
#if TYPE == Q4_0
  const u32 d = shared_4(record + kScales + block * 32 + g * 4);
  w.scale = low_half(d);
  w.scale8 = high_half(d);
#elif TYPE == Q4_K
  const u32 s = shared_4(record + kScales + block * 32 + g * 4);  // scale, min of row g; of row g + 8
  const uint2 d = shared_8(record + kScales + CHUNK * 32 + g * 8);
  w.scale = low_half(d.x) * static_cast<float>(s & 255);
  w.more = high_half(d.x) * static_cast<float>((s >> 8) & 255);
  w.scale8 = low_half(d.y) * static_cast<float>((s >> 16) & 255);
  w.more8 = high_half(d.y) * static_cast<float>(s >> 24);
#else
  const u32 s = shared_4(record + kScales + block * 32 + g * 4);  // both halves of row g; of row g + 8
  const u32 d = shared_4(record + kScales + CHUNK * 32 + g * 4);
  w.scale = low_half(d) * static_cast<float>(static_cast<i8>(s));
  w.more = low_half(d) * static_cast<float>(static_cast<i8>(s >> 8));
  w.scale8 = high_half(d) * static_cast<float>(static_cast<i8>(s >> 16));
  w.more8 = high_half(d) * static_cast<float>(static_cast<i8>(s >> 24));
#endif
}

#endif
