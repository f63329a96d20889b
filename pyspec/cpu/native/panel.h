// Eight rows of a packed matrix side by side: lane l of a vector belongs to row l, so no sum is ever taken across lanes.
#pragma once
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace pyspec {

constexpr int CHUNK = 256;  // weights of a row that are unpacked at a time
constexpr int LANES = 8;

typedef uint8_t b32 __attribute__((vector_size(32)));   // eight rows x four bytes
typedef int16_t s16 __attribute__((vector_size(32)));   // eight rows x a pair
typedef uint32_t u8v __attribute__((vector_size(32)));  // eight rows x a word

#define ALWAYS inline __attribute__((always_inline))
#define ALWAYS_LAMBDA __attribute__((always_inline))
#define NEVER __attribute__((noinline))
#define PRAGMA(x) _Pragma(#x)
#if defined(__AVX2__) || PYSPEC_NEON
#define UNROLL(n) PRAGMA(GCC unroll n)
#else
#define UNROLL(n)
#endif

ALWAYS b32 every(int x) { return b32{} + uint8_t(x); }

// 256 weights of eight rows as bytes: weights 4k to 4k + 3 in w[k]; scales of their groups and offsets
struct Panel {
  b32 w[CHUNK / 4];
  f8 d[16], m[16];
};

template <int N>
ALWAYS b32 right(b32 x) {  // unsigned shift of bytes
#if defined(__AVX2__)
  return b32(_mm256_and_si256(_mm256_srli_epi16(__m256i(x), N), _mm256_set1_epi8(char(0xff >> N))));
#else
  return x >> N;
#endif
}
template <int N>
ALWAYS b32 left(b32 x) {
#if defined(__AVX2__)
  return b32(_mm256_and_si256(_mm256_slli_epi16(__m256i(x), N), _mm256_set1_epi8(char(0xff << N))));
#else
  return x << N;
#endif
}
ALWAYS b32 low_nibbles(b32 x) { return x & every(15); }
ALWAYS b32 high_nibbles(b32 x) { return right<4>(x); }

// values[x] of each byte below 16
ALWAYS b32 look_up(const int8_t *values, b32 x) {
#if defined(__AVX2__)
  const __m128i t = _mm_load_si128(reinterpret_cast<const __m128i *>(values));
  return b32(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), __m256i(x)));
#elif defined(__aarch64__)
  const uint8x16_t t = vld1q_u8(reinterpret_cast<const uint8_t *>(values));
  uint8_t *at = reinterpret_cast<uint8_t *>(&x);
  vst1q_u8(at, vqtbl1q_u8(t, vld1q_u8(at)));
  vst1q_u8(at + 16, vqtbl1q_u8(t, vld1q_u8(at + 16)));
  return x;
#else
  b32 y;
  for (int i = 0; i < 32; i++) y[i] = uint8_t(values[x[i]]);
  return y;
#endif
}

// Eight rows that lie `stride` bytes apart, from the block at hand
struct Eight {
  const uint8_t *at;
  int64_t stride;

  ALWAYS const uint8_t *row(int l, int64_t offset) const { return at + l * stride + offset; }

  // Bytes from to from + 15 of each row: four to a vector
  ALWAYS void sixteen(int64_t from, b32 *out) const {
#if defined(__AVX2__)
    __m256i x[4];
UNROLL(4)
    for (int l = 0; l < 4; l++)
      x[l] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(row(l, from)))),
                                     _mm_loadu_si128(reinterpret_cast<const __m128i *>(row(l + 4, from))), 1);
    const __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
    const __m256i c = _mm256_unpacklo_epi32(x[2], x[3]), d = _mm256_unpackhi_epi32(x[2], x[3]);
    out[0] = b32(_mm256_unpacklo_epi64(a, c)), out[1] = b32(_mm256_unpackhi_epi64(a, c));
    out[2] = b32(_mm256_unpacklo_epi64(b, d)), out[3] = b32(_mm256_unpackhi_epi64(b, d));
#elif defined(__aarch64__)
    for (int h = 0; h < 2; h++) {  // four rows
      const auto row_of = [&](int l) { return vreinterpretq_u32_u8(vld1q_u8(row(4 * h + l, from))); };
      const uint32x4_t x0 = row_of(0), x1 = row_of(1), x2 = row_of(2), x3 = row_of(3);
      const uint32x4_t a = vzip1q_u32(x0, x2), b = vzip1q_u32(x1, x3), c = vzip2q_u32(x0, x2), d = vzip2q_u32(x1, x3);
      const uint32x4_t words[4] = {vzip1q_u32(a, b), vzip2q_u32(a, b), vzip1q_u32(c, d), vzip2q_u32(c, d)};
      for (int k = 0; k < 4; k++) vst1q_u32(reinterpret_cast<uint32_t *>(out + k) + 4 * h, words[k]);
    }
#else
    for (int k = 0; k < 4; k++) out[k] = b32(word(from + 4 * k));
#endif
  }
  ALWAYS u8v word(int64_t from) const {
    u8v x;
    for (int l = 0; l < LANES; l++) {
      uint32_t one;
      std::memcpy(&one, row(l, from), 4);
      x[l] = one;
    }
    return x;
  }
  ALWAYS i8 byte(int64_t from) const {
    i8 x;
    for (int l = 0; l < LANES; l++) x[l] = *row(l, from);
    return x;
  }
  ALWAYS f8 half(int64_t from) const {
    uint16_t x[LANES];
    for (int l = 0; l < LANES; l++) std::memcpy(x + l, row(l, from), 2);
#if defined(__F16C__)
    const __m128i y = _mm_setr_epi16(short(x[0]), short(x[1]), short(x[2]), short(x[3]), short(x[4]), short(x[5]), short(x[6]), short(x[7]));
    return f8(_mm256_cvtph_ps(y));
#else
    return halves(x);
#endif
  }
};

// Byte k of each lane's word as f32
template <bool SIGNED>
ALWAYS f8 byte_of(u8v x, int k) {
  if (SIGNED) return to_float(i8(x << (24 - 8 * k)) >> 24);
  return to_float(i8(x >> (8 * k) & 255));
}

}  // namespace pyspec
