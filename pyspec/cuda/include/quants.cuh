// Packed weights to tensor-core operands. A record holds 16 rows by CHUNK blocks of 32 weights; see linear_pack.py.
//
// Codes become f16 exactly, scales stay f32 and multiply sums, not weights. Lane 4 g + t owns rows g and g + 8 and weights
// 4t..4t+3 and 16+4t..16+4t+3 of each block, so that the two products of a block cover its halves. Four ways to an f16:
//   8 bits         1024 + code by bit pattern, less 1024 + 128
//   4, 5, 6 bits   cut out in pairs, 1024 + code or 1024 + 16 code, less what is too much
//   2, 3 bits      shifted to the lowest of a pair (Q2_K: of a byte), 1024 + code, less what is too much
//   tables         bytes by permutation of a table in registers, then as 8 bits; IQ2_XXS: of eight, three levels and their negatives
//   E2M1           the bits alone: f16 has them in the same order, denormal numbers too, and counts them 2^-14
// NVFP4's scales are in the operands: f16 has the product of a code and a scale of four bits each, down to the least of both.
// F16 and BF16 weights are f16 in the record, in the order of the operands.
//
// Set by the launcher: TYPE, CHUNK (blocks in a record), RECORD (bytes of one).
#pragma once
#include "mma.cuh"

#define Q8_0 0
#define Q4_0 1
#define Q4_1 2
#define Q5_0 3
#define Q5_1 4
#define Q4_K 5
#define Q5_K 6
#define Q6_K 7
#define IQ4_NL 8
#define IQ4_XS 9
#define MXFP4 10
#define NVFP4 11
#define F16 12
#define BF16 13
#define Q2_K 14
#define Q3_K 15
#define IQ2_XXS 16
#define IQ3_XXS 17

#define FIVE_BITS (TYPE == Q5_0 || TYPE == Q5_1 || TYPE == Q5_K)
#define TABLE (TYPE == IQ4_NL || TYPE == IQ4_XS || TYPE == IQ3_XXS)
#define CRUMBS (TYPE == Q2_K || TYPE == Q3_K)
#define LEVELS (TYPE == IQ2_XXS)  // two bits say how large, one the sign
#define E2M1 (TYPE == MXFP4 || TYPE == NVFP4)
#define BYTE_SCALES (TYPE == IQ4_XS || TYPE == MXFP4 || TYPE == IQ2_XXS || TYPE == IQ3_XXS)  // a word holds those of rows g and g + 8 of two blocks
#define HAS_MIN (TYPE == Q4_1 || TYPE == Q5_1 || TYPE == Q4_K || TYPE == Q5_K)  // weights are scale * code - min
#define HALF_SCALES (TYPE == Q6_K || TYPE == Q3_K || TYPE == Q2_K)              // one scale for each 16 weights
#define HALF_MINIMA (TYPE == Q2_K)                                              // and a minimum, for which sums are made here
#define SCALED (TYPE == NVFP4)                                                  // operands are weights, scales and all
#define INT_SCALES (TYPE == Q4_K || TYPE == Q5_K)                               // whole numbers, of a record's row times another
#define SHARED_SCALES (INT_SCALES || HALF_SCALES || TYPE == IQ4_XS || TYPE == IQ2_XXS || TYPE == IQ3_XXS)  // a second one for a record's row
#define HALVES (TYPE == F16 || TYPE == BF16)            // no codes, no scales in the record
#define ROW_SCALES (TYPE == NVFP4 || TYPE == BF16)      // behind the last record a second scale for each row, f32

// What sums of operands times scales are to be multiplied with.
constexpr float kUnit = TYPE == MXFP4 ? 8192.f : TYPE == NVFP4 ? 16384.f : 1.f;

struct At {  // where a lane finds its parts of a record
  u32 record, wide, narrow;  // 16 bytes of codes a lane, 4 of scales a row
};

__device__ __forceinline__ At at_record(u32 record, int lane) { return {record, record + lane * 16, record + (lane >> 2) * 4}; }

#if TYPE == Q8_0
struct Codes {  // a lane's part of a block as it lies in a record
  uint4 q;
  u32 d;
};
#elif HALVES
struct Codes {
  uint4 first, second;
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
#if HALF_MINIMA
  float low[4];  // of rows g and g + 8, first halves; second halves
#endif
};  // SCALED: a is all there is

__device__ __forceinline__ float low_half(u32 v) { return f16_to_f32(static_cast<u16>(v)); }
__device__ __forceinline__ float high_half(u32 v) { return f16_to_f32(static_cast<u16>(v >> 16)); }
__device__ __forceinline__ float signed_byte(u32 v) { return static_cast<float>(static_cast<i8>(v)); }

__device__ __forceinline__ void bytes_to_f16(u32 v, u32& first, u32& second) {
  constexpr u32 kBias = 0x64806480u;  // 1024 + 128
  first = sub_f16x2(__byte_perm(v, 0x64646464u, 0x4140), kBias);
  second = sub_f16x2(__byte_perm(v, 0x64646464u, 0x4342), kBias);
}

// The same of bytes that lie in two halves in turn.
__device__ __forceinline__ void pairs_to_f16(u32 v, u32& first, u32& second) {
  constexpr u32 kBias = 0x64806480u;
  first = sub_f16x2(__byte_perm(v, 0x64646464u, 0x4240), kBias);
  second = sub_f16x2(__byte_perm(v, 0x64646464u, 0x4341), kBias);
}

#if TYPE == Q8_0

__device__ __forceinline__ void fetch(Codes& c, At at, int block) {
  c.q = shared_16(at.wide + block * 512);
  c.d = shared_4(at.narrow + CHUNK * 512 + block * 32);
}

__device__ __forceinline__ void fetch_shared(Codes&, At) {}

__device__ __forceinline__ void unpack(Weights& w, const Codes& c) {
  bytes_to_f16(c.q.x, w.a[0], w.a[2]);
  bytes_to_f16(c.q.y, w.a[4], w.a[6]);
  bytes_to_f16(c.q.z, w.a[1], w.a[3]);
  bytes_to_f16(c.q.w, w.a[5], w.a[7]);
  w.scale = low_half(c.d);
  w.scale8 = high_half(c.d);
}

#elif HALVES

__device__ __forceinline__ void fetch(Codes& c, At at, int block) {
  c.first = shared_16(at.wide + block * 1024);
  c.second = shared_16(at.wide + block * 1024 + 512);
}

__device__ __forceinline__ void fetch_shared(Codes&, At) {}

__device__ __forceinline__ void unpack(Weights& w, const Codes& c) {
  w.a[0] = c.first.x, w.a[1] = c.first.y, w.a[2] = c.first.z, w.a[3] = c.first.w;
  w.a[4] = c.second.x, w.a[5] = c.second.y, w.a[6] = c.second.z, w.a[7] = c.second.w;
  w.scale = w.scale8 = 1.f;
}

#else

constexpr int kHigh = CHUNK * (CRUMBS || LEVELS ? 128 : 256);
constexpr int kScales = kHigh + (TYPE == Q6_K ? CHUNK * 128 : FIVE_BITS || TYPE == Q3_K || LEVELS ? CHUNK * 64 : 0);

// What all blocks of a record share.
__device__ __forceinline__ void fetch_shared(Codes& c, At at) {
#if INT_SCALES || HALF_MINIMA
  c.d = shared_8(2 * at.narrow - at.record + kScales + CHUNK * 32);
#elif SHARED_SCALES
  c.d.x = shared_4(at.narrow + kScales + CHUNK * (BYTE_SCALES ? 16 : 32));
#endif
}

__device__ __forceinline__ void fetch(Codes& c, At at, int block) {
#if CRUMBS || LEVELS
  c.q.x = shared_4(at.wide + (block >> 2) * 512 + (block & 3) * 4);
#else
  c.q = shared_8(at.wide + (block >> 1) * 512 + (block & 1) * 8);
#endif
#if TYPE == Q6_K
  c.h = shared_4(at.wide + kHigh + (block >> 2) * 512 + (block & 3) * 4);
#elif LEVELS
  c.h = shared_4(at.wide + kHigh + (block >> 1) * 4) >> (block & 1) * 2;
#elif FIVE_BITS || TYPE == Q3_K
  c.h = shared_4(at.record + (at.wide - at.record) / 4 + kHigh + (block >> 1) * 128) >> (block & 1) * 8;
#endif
#if BYTE_SCALES
  c.s = shared_4(at.narrow + kScales + (block >> 1) * 32) >> (block & 1) * 16;
#elif TYPE == Q4_1 || TYPE == Q5_1
  c.d = shared_8(2 * at.narrow - at.record + kScales + block * 64);  // scale, min of row g; of row g + 8
#elif SHARED_SCALES || TYPE == NVFP4
  // scale, min of row g; of row g + 8, six bits each; or the scales of both halves of row g; of row g + 8
  c.s = shared_4(at.narrow + kScales + block * 32);
#else
  c.d.x = shared_4(at.narrow + kScales + block * 32);
#endif
}

#if TABLE

// Eight nibbles of a row: both halves of the table, then the one that a nibble's highest bit says.
__device__ __forceinline__ void unpack_row(u32 (&a)[8], int r, u32 nibbles, u32) {
#if TYPE == IQ3_XXS  // values + 128
  constexpr u32 k0 = 0x9c948c84u, k4 = 0xbeb4aca4u, k8 = 0x646c747cu, k12 = 0x424c545cu;
#else
  constexpr u32 k0 = 0x3f2d1801u, k4 = 0x766a5d4fu, k8 = 0xa6998d81u, k12 = 0xf1d9c5b5u;
#endif
  const u32 low = nibbles & 0x77777777u, half = 0x32103210u | ((nibbles >> 1) & 0x44444444u);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 at = low >> (16 * i);
    const u32 values = __byte_perm(__byte_perm(k0, k4, at), __byte_perm(k8, k12, at), half >> (16 * i));
    bytes_to_f16(values, a[4 * i + r], a[4 * i + 2 + r]);
  }
}

#elif LEVELS

// A nibble of a row's half of `levels` has two codes, one of its half of `signs` the same, lowest; nibbles are of columns 4t, 16+4t, 4t+1,
// 16+4t+1, and two columns on.
__device__ __forceinline__ void unpack_row(u32 (&a)[8], int r, u32 levels, u32 signs) {
  constexpr u32 kPlus = 0x80ab9988u, kMinus = 0x80556778u;  // values + 128
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 sign = r == 0 ? signs << (2 - i) : signs >> (14 + i);
    const u32 at = and_or(levels >> (16 * r + 2 * i), 0x3333u, sign & 0x4444u);
    pairs_to_f16(__byte_perm(kPlus, kMinus, at), a[2 * i + r], a[4 + 2 * i + r]);
  }
}

#elif TYPE == Q2_K

// Two bits of each byte, of the half's columns in order, are of row r.
__device__ __forceinline__ void unpack_row(u32 (&a)[8], int r, u32 codes, u32) {
  constexpr u32 kZero = 0x64006400u;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const u32 v = codes >> (4 * h + 2 * r) & 0x03030303u;
    a[4 * h + r] = sub_f16x2(__byte_perm(v, 0x64646464u, 0x4140), kZero);
    a[4 * h + 2 + r] = sub_f16x2(__byte_perm(v, 0x64646464u, 0x4342), kZero);
  }
}

#elif TYPE == Q3_K

// Pairs of codes of row r: two bits of `codes` each, one of `high` above them.
__device__ __forceinline__ void unpack_row(u32 (&a)[8], int r, u32 codes, u32 high) {
  constexpr u32 kZero = 0x64046404u;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const int bit = 4 * (p & 1) + 2 * r + (p >> 1);  // in `high`; wanted as the third
    u32 v = and_or(codes >> (8 * r + 4 * (p & 1) + 2 * (p >> 1)), 0x00030003u, 0x64006400u);
    v = and_or(bit < 2 ? high << (2 - bit) : high >> (bit - 2), 0x00040004u, v);
    a[2 * p + r] = sub_f16x2(v, kZero);
  }
}

#elif E2M1

__device__ __forceinline__ void unpack_row(u32 (&a)[8], int r, u32 v, u32) {
  a[r] = v & 0x8e008e00u;
  a[2 + r] = (v << 3) & 0x8e008e00u;
  // a product moves number and sign by different shifts at once; what else it leaves lies below the mask, and so do sums of it
  a[4 + r] = (v & 0x40384038u) * (64 + 2) & 0x8e008e00u;
  a[6 + r] = (v & 0x20072007u) * (512 + 4) & 0x8e008e00u;
}

#else

// The bits above the nibbles, shifted to where `pair` wants those of pair p of row r (g or g + 8); others lie around them.
__device__ __forceinline__ u32 high_bits(u32 h, int r, int p) {
#if TYPE == Q6_K
  return r == 0 ? h << (4 - p / 2 * 2) : h >> (4 + p / 2 * 2);
#else
  return h << (4 - 2 * r - p / 2);
#endif
}

// 1024 + code; of odd pairs 1024 + 16 code.
__device__ __forceinline__ u32 lifted_pair(u32 nibbles, u32 high, int p) {
  constexpr u32 kHigh = TYPE == Q6_K ? 0x00300030u : FIVE_BITS ? 0x00100010u : 0;
  const int shift = p & 1 ? 4 : 0;
  const u32 v = and_or(p < 2 ? nibbles : nibbles >> 8, 0x000f000fu << shift, 0x64006400u);
  return kHigh ? and_or(high, kHigh << shift, v) : v;
}

__device__ __forceinline__ u32 pair(u32 nibbles, u32 high, int p) {
  constexpr u32 kZero = TYPE == Q4_0 ? 8 : TYPE == Q5_0 ? 16 : TYPE == Q6_K ? 32 : 0;  // the code of a zero
  constexpr u32 k1024 = 0x64006400u, k64 = 0x54005400u, k16th = 0x2c002c00u, kMinus = 0x80008000u, kBoth = 0x00010001u;
  const u32 v = lifted_pair(nibbles, high, p);
  if (p & 1) return fma_f16x2(v, k16th, (k64 + kZero * 16 * kBoth) | kMinus);
  return sub_f16x2(v, k1024 + kZero * kBoth);
}

__device__ __forceinline__ void unpack_row(u32 (&a)[8], int r, u32 nibbles, u32 h) {
#pragma unroll
  for (int p = 0; p < 4; ++p) a[2 * p + r] = pair(nibbles, high_bits(h, r, p), p);
}

#endif

__device__ __forceinline__ void unpack(Weights& w, const Codes& c) {
  unpack_row(w.a, 0, c.q.x, c.h);
  unpack_row(w.a, 1, CRUMBS || LEVELS ? c.q.x : c.q.y, c.h);
#if TYPE == Q4_1 || TYPE == Q5_1
  w.scale = low_half(c.d.x);
  w.more = -high_half(c.d.x);
  w.scale8 = low_half(c.d.y);
  w.more8 = -high_half(c.d.y);
#elif TYPE == Q4_K || TYPE == Q5_K
  w.scale = low_half(c.d.x) * static_cast<float>(c.s & 255);
  w.more = high_half(c.d.x) * static_cast<float>((c.s >> 8) & 255);
  w.scale8 = low_half(c.d.y) * static_cast<float>((c.s >> 16) & 255);
  w.more8 = high_half(c.d.y) * static_cast<float>(c.s >> 24);
#elif TYPE == Q6_K || TYPE == Q3_K
  w.scale = low_half(c.d.x) * signed_byte(c.s);
  w.more = low_half(c.d.x) * signed_byte(c.s >> 8);
  w.scale8 = high_half(c.d.x) * signed_byte(c.s >> 16);
  w.more8 = high_half(c.d.x) * signed_byte(c.s >> 24);
#elif TYPE == Q2_K
  const u32 scales = c.s & 0x0f0f0f0fu, low = c.s >> 4 & 0x0f0f0f0fu;
  w.scale = low_half(c.d.x) * static_cast<float>(scales & 255);
  w.more = low_half(c.d.x) * static_cast<float>(scales >> 8 & 255);
  w.scale8 = low_half(c.d.y) * static_cast<float>(scales >> 16 & 255);
  w.more8 = low_half(c.d.y) * static_cast<float>(scales >> 24);
  w.low[0] = high_half(c.d.x) * static_cast<float>(low & 255);
  w.low[1] = high_half(c.d.y) * static_cast<float>(low >> 16 & 255);
  w.low[2] = high_half(c.d.x) * static_cast<float>(low >> 8 & 255);
  w.low[3] = high_half(c.d.y) * static_cast<float>(low >> 24);
#elif TYPE == IQ2_XXS || TYPE == IQ3_XXS
  constexpr float kOdd = TYPE == IQ2_XXS ? 0.125f : 0.25f;  // scales are odd numbers of this
  w.scale = low_half(c.d.x) * kOdd * signed_byte(c.s);
  w.scale8 = high_half(c.d.x) * kOdd * signed_byte(c.s >> 8);
#elif TYPE == IQ4_XS
  w.scale = low_half(c.d.x) * signed_byte(c.s);
  w.scale8 = high_half(c.d.x) * signed_byte(c.s >> 8);
#elif TYPE == MXFP4
  w.scale = __uint_as_float((c.s & 255) << 23);
  w.scale8 = __uint_as_float((c.s & 0xff00u) << 15);
#elif TYPE == NVFP4
  const u32 first = (c.s & 0x00ff00ffu) << 7, second = (c.s & 0xff00ff00u) >> 1;  // f16: of row g; of row g + 8
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 scales = i < 4 ? first : second;
    w.a[i] = i & 1 ? mul_by_half<1>(w.a[i], scales) : mul_by_half<0>(w.a[i], scales);
  }
#else
  w.scale = low_half(c.d.x);
  w.scale8 = high_half(c.d.x);
#endif
}

#endif

__device__ __forceinline__ void fetch(Codes& c, u32 record, int block, int lane) {
  const At at = at_record(record, lane);
  fetch(c, at, block);
  fetch_shared(c, at);
}

__device__ __forceinline__ void unpack(Weights& w, u32 record, int block, int lane) {
  Codes c;
  fetch(c, record, block, lane);
  unpack(w, c);
}
