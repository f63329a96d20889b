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

#if TYPE == Q8_0
struct Codes {  // a lane's part of a block as it lies in a record
  uint4 q;
  u32 d;
};
#else
struct Codes {
  uint2 q;
  u32 h, s;
  uint2 d;
};
#endif

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

__device__ __forceinline__ void fetch(Codes& c, u32 record, int block, int lane) {
  c.q = shared_16(record + block * 512 + lane * 16);
  c.d = shared_4(record + CHUNK * 512 + block * 32 + (lane >> 2) * 4);
}

__device__ __forceinline__ void unpack(Weights& w, const Codes& c) {
  bytes_to_f16(c.q.x, w.a[0], w.a[2]);
  bytes_to_f16(c.q.y, w.a[4], w.a[6]);
  bytes_to_f16(c.q.z, w.a[1], w.a[3]);
  bytes_to_f16(c.q.w, w.a[5], w.a[7]);
  w.scale = low_half(c.d);
  w.scale8 = high_half(c.d);
}

#else

// Eight nibbles in the order k0 k2 k4 k6 k1 k3 k5 k7, two more bits of each in `high` (zero for 4-bit types).
__device__ __forceinline__ u32 pair(u32 nibbles, u32 high, int p, u32 bias) {
  return sub_f16x2(((nibbles >> (4 * p)) & 0x000f000fu) | high | 0x64006400u, bias);
}

__device__ __forceinline__ u32 high_bits(u32 h, int j) {
  return (j < 2 ? h << (4 - 2 * j) : h >> (2 * j - 4)) & 0x00300030u;
}

__device__ __forceinline__ void fetch(Codes& c, u32 record, int block, int lane) {
  constexpr int kScales = CHUNK * 256 + (TYPE == Q6_K ? CHUNK * 128 : 0);
  const u32 pairs = record + kScales + (lane >> 2) * 4;
  c.q = shared_8(record + (block >> 1) * 512 + lane * 16 + (block & 1) * 8);
#if TYPE == Q4_0
  c.d.x = shared_4(pairs + block * 32);
#elif TYPE == Q4_K
  c.s = shared_4(pairs + block * 32);  // scale, min of row g; of row g + 8
  c.d = shared_8(pairs + CHUNK * 32 + (lane >> 2) * 4);
#else
  c.h = shared_4(record + CHUNK * 256 + (block >> 2) * 512 + lane * 16 + (block & 3) * 4);
  c.s = shared_4(pairs + block * 32);  // both halves of row g; of row g + 8
  c.d.x = shared_4(pairs + CHUNK * 32);
#endif
}

__device__ __forceinline__ void unpack(Weights& w, const Codes& c) {
  constexpr u32 kBias = TYPE == Q4_0 ? 0x64086408u : TYPE == Q4_K ? 0x64006400u : 0x64206420u;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    w.a[2 * p] = pair(c.q.x, TYPE == Q6_K ? high_bits(c.h, p) : 0, p, kBias);
    w.a[2 * p + 1] = pair(c.q.y, TYPE == Q6_K ? high_bits(c.h, 4 + p) : 0, p, kBias);
  }
#if TYPE == Q4_0
  w.scale = low_half(c.d.x);
  w.scale8 = high_half(c.d.x);
#elif TYPE == Q4_K
  w.scale = low_half(c.d.x) * static_cast<float>(c.s & 255);
  w.more = high_half(c.d.x) * static_cast<float>((c.s >> 8) & 255);
  w.scale8 = low_half(c.d.y) * static_cast<float>((c.s >> 16) & 255);
  w.more8 = high_half(c.d.y) * static_cast<float>(c.s >> 24);
#else
  w.scale = low_half(c.d.x) * static_cast<float>(static_cast<i8>(c.s));
  w.more = low_half(c.d.x) * static_cast<float>(static_cast<i8>(c.s >> 8));
  w.scale8 = high_half(c.d.x) * static_cast<float>(static_cast<i8>(c.s >> 16));
  w.more8 = high_half(c.d.x) * static_cast<float>(static_cast<i8>(c.s >> 24));
#endif
}

#endif

__device__ __forceinline__ void unpack(Weights& w, u32 record, int block, int lane) {
  Codes c;
  fetch(c, record, block, lane);
  unpack(w, c);
}
