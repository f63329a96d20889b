// Records of expert_planes.cuh's types, and two blocks of one as operands of whole numbers.
//
//   Q4_K     codes where they lie, up to 15; scales up to 63 multiply sums. 64 columns are 64 * 15 * 63 * 32639 at most, below 2^31. Minima
//            times sums of 32 columns are a product of bf16: they have six bits, and of sums two parts are taken, a pair's two columns.
//   IQ2_XXS  levels with their signs out of a table of eight bytes; scales up to 31 multiply sums. Eight levels of a point are 203
//            at most: 64 columns are 8 * 203 * 31 * 32639, below 2^31.
//   Q2_K     codes up to 3 times scales up to 15 are bytes; of rows g + 8 four times as much, which needs no shift: 32 columns are
//            32 * 180 * 32639 at most. Minima are as Q4_K's, of 16 columns each, whose sums lie as two parts. Downs only (rows are halved).
#pragma once

__device__ __forceinline__ int byte_of(u32 word, int i) { return static_cast<int>(__byte_perm(word, 0, 0x4440 + i)); }

__device__ __forceinline__ u32 from_lane(u32 v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }

constexpr int kWide = LEVELS ? 3 : CRUMBS ? 2 : kUnits;  // of a lane, 16 bytes each
constexpr int kScaleWords = LEVELS ? 1 : 2;

struct Record {     // a lane's part of 16 rows by 256 columns
  uint4 q[kWide];   // Q4_K: of two blocks each; others: of four, and behind them (IQ2_XXS) all signs
  u32 scales[kScaleWords];  // lane 8 b + g: blocks b and 4 + b of rows g and g + 8; IQ2_XXS: blocks 2 b and 2 b + 1
  uint2 d;          // of rows g and g + 8; IQ2_XXS: both in the first
};

// A value that is kept where there are registers: what follows from it is not worked out again for each record, which may take more
// instructions than it has loads.
__device__ __forceinline__ u32 kept(u32 x) { return KEEPS ? anew(x) : x; }

// Where a lane finds what is its own in a record: bytes from its first 16 on.
struct Offsets {
  int scales, d;

  __device__ __forceinline__ Offsets() {
    const int lane = threadIdx.x & 31;
    scales = kept(kScales - lane * 12);
    d = kept(kScales + kScaleWords * 128 - (lane * 16 - (lane >> 2) * (LEVELS ? 4 : 8)));
  }
};

// `from`: the lane's first 16 bytes of the record.
template <bool kEarly>
__device__ __forceinline__ void fetch(Record& r, const u8* from, const Offsets& at) {
#pragma unroll
  for (int i = 0; i < kWide; ++i) r.q[i] = stream_16<kEarly>(from + i * 512);
#pragma unroll
  for (int i = 0; i < kScaleWords; ++i) r.scales[i] = stream_4<kEarly>(from + at.scales + i * 128);
#if LEVELS
  r.d = make_uint2(stream_4<kEarly>(from + at.d), 0);
#else
  r.d = stream_8<kEarly>(from + at.d);
#endif
}

constexpr u32 kLevels = 0x002b1908u, kNegatives = 0x00d5e7f8u;  // of IQ2_XXS

// Bytes of table[0] and table[1] that the lower nibbles of `at` say, none above 7: __byte_perm masks them first.
__device__ __forceinline__ u32 look_up(const u32 (&table)[2], u32 at) {
  u32 v;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(table[0]), "r"(table[1]), "r"(at));
  return v;
}

__device__ __forceinline__ u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

struct Whole {  // sums of a pair with rows g and g + 8
  int own, own8;

  __device__ __forceinline__ Whole operator+(const Whole& o) const { return {own + o.own, own8 + o.own8}; }

  __device__ __forceinline__ void add_to(float (&sums)[2], float power) const {
    sums[0] = fmaf(static_cast<float>(own), power, sums[0]);
    sums[1] = fmaf(static_cast<float>(own8), power, sums[1]);
  }
};

// Sums of planes put together.
__device__ __forceinline__ int joined(int upper, int lower) { return upper * 256 + lower; }

struct Operands {  // of a unit's blocks
  u32 a[2][4];
#if !HALF_MINIMA
  int scale[2], scale8[2];
#endif

  // g: the lane's row; levels: IQ2_XXS's.
  __device__ __forceinline__ Operands(const Record& r, int unit, int g, u32 levels) {
#if LEVELS
    const u32 table[2] = {levels, kNegatives};
    constexpr u32 kEvery = 0x11111111u;
    const u32 signs = word_of(r.q[2], unit), word = from_lane(r.scales[0], unit * 8 + g);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // blocks, halves of each
      const u32 codes = word_of(r.q[unit / 2], unit % 2 * 2 + i / 2) >> i % 2 * 2;
      const u32 minus = (i < 2 ? signs << (2 - i) : signs >> (i - 2)) & (4 * kEvery);
      const u32 at = and_or(codes, 3 * kEvery, minus);  // of row g, then of row g + 8
      a[i / 2][i % 2 * 2] = look_up(table, at);
      a[i / 2][i % 2 * 2 + 1] = look_up(table, at >> 16);
    }
#pragma unroll
    for (int b = 0; b < 2; ++b) scale[b] = byte_of(word, 2 * b), scale8[b] = byte_of(word, 2 * b + 1);
#else
    const int first = unit % 2 * 16 + g;
    const u32 words[2] = {from_lane(r.scales[unit / 2], first), from_lane(r.scales[unit / 2], first + 8)};
#if HALF_MINIMA
    constexpr u32 kFour = 0x0f0f0f0fu;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const u32 codes = word_of(r.q[unit / 2], unit % 2 * 2 + b), scales = words[b] & kFour;
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // halves, rows g and g + 8 (four times what they are) of each; scales lie the other way around
        const int from = i % 2 * 2 + i / 2;
        a[b][i] = (codes >> i / 2 * 4 & (i % 2 ? 0x0c0c0c0cu : 0x03030303u)) * byte_of(scales, from);
      }
    }
#else
    constexpr u32 kLow = 0x0f0f0f0fu;
    const uint4 q = r.q[unit];
    a[0][0] = q.x & kLow, a[0][1] = q.y & kLow, a[0][2] = q.x >> 4 & kLow, a[0][3] = q.y >> 4 & kLow;
    a[1][0] = q.z & kLow, a[1][1] = q.w & kLow, a[1][2] = q.z >> 4 & kLow, a[1][3] = q.w >> 4 & kLow;
#pragma unroll
    for (int b = 0; b < 2; ++b) scale[b] = byte_of(words[b], 0), scale8[b] = byte_of(words[b], 2);
#endif
#endif
  }

  template <int kBlock>
  __device__ __forceinline__ Whole times(uint2 x) const {
    int d[4];
#if LEVELS
    mma_s8_s8(d, a[kBlock], x);
#else
    mma_u8_s8(d, a[kBlock], x);
#endif
#if HALF_MINIMA
    return {joined(d[0], d[1]), joined(d[2], d[3])};
#else
    return {joined(d[0], d[1]) * scale[kBlock], joined(d[2], d[3]) * scale8[kBlock]};
#endif
  }
};

struct RowFactors {  // of a record's rows g and g + 8
  float d, d8;
#if HAS_MIN || HALF_MINIMA
  float by, by8;
  u32 m[HALF_MINIMA ? 4 : 2];  // minima of block t, then of t + 4
#endif

  __device__ __forceinline__ explicit RowFactors(const Record& r) {
#if LEVELS
    d = low_half(r.d.x) * 0.125f, d8 = high_half(r.d.x) * 0.125f;
#else
    d = low_half(r.d.x), d8 = low_half(r.d.y) * (HALF_MINIMA ? 0.25f : 1.f), by = -high_half(r.d.x), by8 = -high_half(r.d.y);
    const int lane = threadIdx.x & 31, from = (lane & 3) * 8 + (lane >> 2);
    const u32 word = from_lane(r.scales[0], from), next = from_lane(r.scales[1], from);
#if HALF_MINIMA
    half_minima(m[0], m[1], word), half_minima(m[2], m[3], next);
#else
    minima_of(m, word, next);
#endif
#endif
  }

  // sums: of pair t; of_rows: where those of the rows of pair g / 2 are.
  __device__ __forceinline__ void add_to(float (&acc)[2], const float (&sums)[2], u32 of_rows) const {
#if HAS_MIN || HALF_MINIMA
    float less[4];
#if HALF_MINIMA
    mma_bf16(less, m[0], m[1], m[2], m[3], shared_4(of_rows), shared_4(of_rows + 2 * kOwnUnit), 0.f, 0.f, 0.f, 0.f);
#else
    const bool is_rest = threadIdx.x & 4;
    mma_bf16_k8(less, m[0], m[1], part_of(shared_4(of_rows), shared_4(of_rows + 2 * kOwnUnit), is_rest));
#endif
    acc[0] = fmaf(less[0] + less[1], by, acc[0]);
    acc[1] = fmaf(less[2] + less[3], by8, acc[1]);
#endif
    acc[0] = fmaf(sums[0], d, acc[0]);
    acc[1] = fmaf(sums[1], d8, acc[1]);
  }

 private:
  // Two sums as bf16, or what those are too little by.
  static __device__ __forceinline__ u32 part_of(u32 s0, u32 s1, bool is_rest) {
    const float first = __uint_as_float(s0), second = __uint_as_float(s1);
    const u32 upper = two_bf16(first, second), rest = two_bf16(first - low_bf16(upper), second - high_bf16(upper));
    return is_rest ? rest : upper;
  }

  // Of both halves of a block: of row g, of row g + 8.
  static __device__ __forceinline__ void half_minima(u32& own, u32& own8, u32 word) {
    constexpr u32 kOne = 0x3f803f80u, kMinus128 = 0xc300c300u;
    const u32 lows = word >> 4 & 0x0f0f0f0fu;
    own = fma_bf16x2(__byte_perm(lows, 0x43434343u, 0x4140), kOne, kMinus128);
    own8 = fma_bf16x2(__byte_perm(lows, 0x43434343u, 0x4342), kOne, kMinus128);
  }
};
