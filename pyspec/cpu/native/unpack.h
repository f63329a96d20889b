// Packed weights as 16-bit whole numbers with f32 scales, 256 weights at a time.
//
// A type T has:
//   BLOCK   weights of one block of the file, BYTES its bytes
//   GROUP   weights that share an f32 scale once the block's whole-number scales are multiplied in
//   MINS    offsets of 256 weights: 0, 8 (of 32 weights each) or 16
//   unpack(blocks, n, table, w, d, m)   n weights, a multiple of BLOCK, n <= 256:
//           weight i is w[i] * d[i / GROUP] + m[i * MINS / 256]. w, d, m behind the n-th weight are not written.
// The largest |w| times 32,767 summed over a group stays below 2^31, so products with 16-bit rows are exact.
#pragma once
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace pyspec {

constexpr int CHUNK = 256;

inline float half_at(const uint8_t *p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return half_to_float(h);
}

alignas(16) inline constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(16) inline constexpr int8_t E2M1_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled

#if defined(__AVX2__)
inline __m256i words(const void *p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i *>(p))); }
inline void put(int16_t *w, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(w), x); }
inline __m256i nibbles(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi16(15)); }

// 16 bytes: low nibbles to w[0..15] and high ones to w[high..], each plus its offset
inline void put_nibbles(const uint8_t *q, int16_t *w, int high, int offset) {
  const __m256i x = words(q), o = _mm256_set1_epi16(short(offset));
  put(w, _mm256_add_epi16(nibbles(x), o));
  put(w + high, _mm256_add_epi16(_mm256_srli_epi16(x, 4), o));
}
// the same through a table of 16 values, times a factor
inline void put_looked_up(const uint8_t *q, int16_t *w, int high, const int8_t *values, int factor) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i *>(q)), t = _mm_load_si128(reinterpret_cast<const __m128i *>(values));
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i low = _mm_shuffle_epi8(t, _mm_and_si128(x, mask)), up = _mm_shuffle_epi8(t, _mm_and_si128(_mm_srli_epi16(x, 4), mask));
  const __m256i f = _mm256_set1_epi16(short(factor));
  put(w, _mm256_mullo_epi16(_mm256_cvtepi8_epi16(low), f));
  put(w + high, _mm256_mullo_epi16(_mm256_cvtepi8_epi16(up), f));
}
#else
inline void put_nibbles(const uint8_t *q, int16_t *w, int high, int offset) {
  for (int i = 0; i < 16; i++) w[i] = int16_t((q[i] & 15) + offset), w[high + i] = int16_t((q[i] >> 4) + offset);
}
inline void put_looked_up(const uint8_t *q, int16_t *w, int high, const int8_t *values, int factor) {
  for (int i = 0; i < 16; i++) w[i] = int16_t(values[q[i] & 15] * factor), w[high + i] = int16_t(values[q[i] >> 4] * factor);
}
#endif

struct Q8_0 {
  static constexpr int BLOCK = 32, BYTES = 34, GROUP = 32, MINS = 0;
  static void unpack(const uint8_t *b, int n, const void *, int16_t *w, float *d, float *) {
    for (int i = 0; i < n; i += 32, b += BYTES) {
      *d++ = half_at(b);
#if defined(__AVX2__)
      put(w + i, _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(b + 2))));
      put(w + i + 16, _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(b + 18))));
#else
      for (int k = 0; k < 32; k++) w[i + k] = int8_t(b[2 + k]);
#endif
    }
  }
};

struct Q4_0 {
  static constexpr int BLOCK = 32, BYTES = 18, GROUP = 32, MINS = 0;
  static void unpack(const uint8_t *b, int n, const void *, int16_t *w, float *d, float *) {
    for (int i = 0; i < n; i += 32, b += BYTES) *d++ = half_at(b), put_nibbles(b + 2, w + i, 16, -8);
  }
};

struct Q4_1 {
  static constexpr int BLOCK = 32, BYTES = 20, GROUP = 32, MINS = 8;
  static void unpack(const uint8_t *b, int n, const void *, int16_t *w, float *d, float *m) {
    for (int i = 0; i < n; i += 32, b += BYTES) *d++ = half_at(b), *m++ = half_at(b + 2), put_nibbles(b + 4, w + i, 16, 0);
  }
};

inline void put_five(const uint8_t *high, const uint8_t *q, int16_t *w, int offset) {
  uint32_t h;
  std::memcpy(&h, high, 4);
  put_nibbles(q, w, 16, offset);
#if defined(__AVX2__)
  const __m256i bit = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, short(32768));
  for (int k = 0; k < 2; k++) {
    const __m256i set = _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16(short(h >> 16 * k)), bit), bit);
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(w + 16 * k));
    put(w + 16 * k, _mm256_add_epi16(x, _mm256_and_si256(set, _mm256_set1_epi16(16))));
  }
#else
  for (int i = 0; i < 32; i++) w[i] = int16_t(w[i] + (int(h >> i & 1) << 4));
#endif
}

struct Q5_0 {
  static constexpr int BLOCK = 32, BYTES = 22, GROUP = 32, MINS = 0;
  static void unpack(const uint8_t *b, int n, const void *, int16_t *w, float *d, float *) {
    for (int i = 0; i < n; i += 32, b += BYTES) *d++ = half_at(b), put_five(b + 2, b + 6, w + i, -16);
  }
};

struct Q5_1 {
  static constexpr int BLOCK = 32, BYTES = 24, GROUP = 32, MINS = 8;
  static void unpack(const uint8_t *b, int n, const void *, int16_t *w, float *d, float *m) {
    for (int i = 0; i < n; i += 32, b += BYTES) *d++ = half_at(b), *m++ = half_at(b + 2), put_five(b + 4, b + 8, w + i, 0);
  }
};

struct Q2_K {
  static constexpr int BLOCK = 256, BYTES = 84, GROUP = 256, MINS = 16;
  static void unpack(const uint8_t *b, int, const void *, int16_t *w, float *d, float *m) {
    const float low = -half_at(b + 82);
    *d = half_at(b + 80);
    for (int i = 0; i < 16; i++) m[i] = low * float(b[i] >> 4);
    for (int half = 0; half < 2; half++)
      for (int pair = 0; pair < 4; pair++)
        for (int k = 0; k < 2; k++, w += 16) {
          const uint8_t *q = b + 16 + 32 * half + 16 * k;
          const int scale = b[8 * half + 2 * pair + k] & 15, shift = 2 * pair;
#if defined(__AVX2__)
          const __m256i x = _mm256_and_si256(_mm256_srli_epi16(words(q), shift), _mm256_set1_epi16(3));
          put(w, _mm256_mullo_epi16(x, _mm256_set1_epi16(short(scale))));
#else
          for (int i = 0; i < 16; i++) w[i] = int16_t((q[i] >> shift & 3) * scale);
#endif
        }
  }
};

struct Q3_K {
  static constexpr int BLOCK = 256, BYTES = 110, GROUP = 256, MINS = 0;
  static void unpack(const uint8_t *b, int, const void *, int16_t *w, float *d, float *) {
    const uint8_t *packed = b + 96;
    *d = half_at(b + 108);
    for (int i = 0; i < 16; i++, w += 16) {
      const int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4, scale = (low | (packed[8 + i % 4] >> 2 * (i / 4) & 3) << 4) - 32;
      const int pair = i / 2 % 4, half = i / 8, mask = 1 << (4 * half + pair), shift = 2 * pair;
      const uint8_t *q = b + 32 + 32 * half + 16 * (i % 2), *h = b + 16 * (i % 2);
#if defined(__AVX2__)
      const __m256i x = _mm256_and_si256(_mm256_srli_epi16(words(q), shift), _mm256_set1_epi16(3));
      const __m256i unset = _mm256_cmpeq_epi16(_mm256_and_si256(words(h), _mm256_set1_epi16(short(mask))), _mm256_setzero_si256());
      const __m256i value = _mm256_sub_epi16(x, _mm256_and_si256(unset, _mm256_set1_epi16(4)));
      put(w, _mm256_mullo_epi16(value, _mm256_set1_epi16(short(scale))));
#else
      for (int k = 0; k < 16; k++) w[k] = int16_t(((q[k] >> shift & 3) - (h[k] & mask ? 0 : 4)) * scale);
#endif
    }
  }
};

// Scales and mins of Q4_K and Q5_K: six bits each, in twelve bytes.
inline void six_bits(const uint8_t *s, uint8_t *scale, uint8_t *min) {
  uint32_t a, b, c;
  std::memcpy(&a, s, 4), std::memcpy(&b, s + 4, 4), std::memcpy(&c, s + 8, 4);
  const uint32_t x[2] = {a & 0x3f3f3f3fu, (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u)};
  const uint32_t y[2] = {b & 0x3f3f3f3fu, (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u)};
  std::memcpy(scale, x, 8), std::memcpy(min, y, 8);
}

// A byte in both halves of a 32-bit lane, to be spread over 16-bit lanes
inline void in_both_halves(const uint8_t *scale, int32_t *both) {
#if defined(__AVX2__)
  const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(scale)));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(both), _mm256_or_si256(x, _mm256_slli_epi32(x, 16)));
#else
  for (int i = 0; i < 8; i++) both[i] = scale[i] * 0x10001;
#endif
}

inline void put_mins(float low, const uint8_t *min, float *m) {
#if defined(__AVX2__)
  const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(min)));
  store(m, f8(_mm256_cvtepi32_ps(x)) * all(-low));
  return;
#endif
  for (int i = 0; i < 8; i++) m[i] = -low * float(min[i]);
}

struct Q4_K {
  static constexpr int BLOCK = 256, BYTES = 144, GROUP = 256, MINS = 8;
  static void unpack(const uint8_t *b, int, const void *, int16_t *w, float *d, float *m) {
    uint8_t scale[8], min[8];
    int32_t both[8];
    *d = half_at(b);
    six_bits(b + 4, scale, min);
    in_both_halves(scale, both);
    put_mins(half_at(b + 2), min, m);
    const uint8_t *q = b + 16;
    for (int i = 0; i < 8; i += 2, w += 64, q += 32) {
#if defined(__AVX2__)
      const __m256i low = _mm256_set1_epi32(both[i]), high = _mm256_set1_epi32(both[i + 1]);
      const __m256i x = words(q), y = words(q + 16);
      put(w, _mm256_mullo_epi16(nibbles(x), low));
      put(w + 16, _mm256_mullo_epi16(nibbles(y), low));
      put(w + 32, _mm256_mullo_epi16(_mm256_srli_epi16(x, 4), high));
      put(w + 48, _mm256_mullo_epi16(_mm256_srli_epi16(y, 4), high));
#else
      for (int k = 0; k < 32; k++) w[k] = int16_t((q[k] & 15) * scale[i]), w[32 + k] = int16_t((q[k] >> 4) * scale[i + 1]);
#endif
    }
  }
};

struct Q5_K {
  static constexpr int BLOCK = 256, BYTES = 176, GROUP = 256, MINS = 8;
  static void unpack(const uint8_t *b, int, const void *, int16_t *w, float *d, float *m) {
    uint8_t scale[8], min[8];
    int32_t both[8];
    *d = half_at(b);
    six_bits(b + 4, scale, min);
    in_both_halves(scale, both);
    put_mins(half_at(b + 2), min, m);
    const uint8_t *h = b + 16, *q = b + 48;
    for (int i = 0; i < 8; i += 2, w += 64, q += 32) {
#if defined(__AVX2__)
      const __m256i low = _mm256_set1_epi32(both[i]), high = _mm256_set1_epi32(both[i + 1]), one = _mm256_set1_epi16(1);
      for (int k = 0; k < 2; k++) {
        const __m256i x = words(q + 16 * k), top = words(h + 16 * k);
        const __m256i first = _mm256_slli_epi16(_mm256_and_si256(_mm256_srli_epi16(top, i), one), 4);
        const __m256i second = _mm256_slli_epi16(_mm256_and_si256(_mm256_srli_epi16(top, i + 1), one), 4);
        put(w + 16 * k, _mm256_mullo_epi16(_mm256_add_epi16(nibbles(x), first), low));
        put(w + 32 + 16 * k, _mm256_mullo_epi16(_mm256_add_epi16(_mm256_srli_epi16(x, 4), second), high));
      }
#else
      for (int k = 0; k < 32; k++) {
        w[k] = int16_t(((q[k] & 15) + ((h[k] >> i & 1) << 4)) * scale[i]);
        w[32 + k] = int16_t(((q[k] >> 4) + ((h[k] >> (i + 1) & 1) << 4)) * scale[i + 1]);
      }
#endif
    }
  }
};

struct Q6_K {
  static constexpr int BLOCK = 256, BYTES = 210, GROUP = 128, MINS = 0;
  static void unpack(const uint8_t *b, int, const void *, int16_t *w, float *d, float *) {
    d[0] = d[1] = half_at(b + 208);
    for (int half = 0; half < 2; half++, w += 128) {
      const uint8_t *low = b + 64 * half, *high = b + 128 + 32 * half;
      const int8_t *scale = reinterpret_cast<const int8_t *>(b + 192 + 8 * half);
      for (int k = 0; k < 2; k++) {
#if defined(__AVX2__)
        const __m256i x = words(low + 16 * k), y = words(low + 32 + 16 * k), h = words(high + 16 * k);
        const __m256i top = _mm256_set1_epi16(48), o = _mm256_set1_epi16(32);
        const auto value = [&](__m256i nibble, __m256i two, int s) {
          const __m256i q = _mm256_sub_epi16(_mm256_or_si256(nibble, _mm256_and_si256(two, top)), o);
          return _mm256_mullo_epi16(q, _mm256_set1_epi16(scale[s + k]));
        };
        put(w + 16 * k, value(nibbles(x), _mm256_slli_epi16(h, 4), 0));
        put(w + 32 + 16 * k, value(nibbles(y), _mm256_slli_epi16(h, 2), 2));
        put(w + 64 + 16 * k, value(_mm256_srli_epi16(x, 4), h, 4));
        put(w + 96 + 16 * k, value(_mm256_srli_epi16(y, 4), _mm256_srli_epi16(h, 2), 6));
#else
        for (int i = 16 * k; i < 16 * k + 16; i++) {
          const int x = low[i], y = low[32 + i], h = high[i];
          w[i] = int16_t((((x & 15) | (h & 3) << 4) - 32) * scale[k]);
          w[32 + i] = int16_t((((y & 15) | (h >> 2 & 3) << 4) - 32) * scale[2 + k]);
          w[64 + i] = int16_t(((x >> 4 | (h >> 4 & 3) << 4) - 32) * scale[4 + k]);
          w[96 + i] = int16_t(((y >> 4 | (h >> 6 & 3) << 4) - 32) * scale[6 + k]);
        }
#endif
      }
    }
  }
};

struct IQ4_NL {
  static constexpr int BLOCK = 32, BYTES = 18, GROUP = 32, MINS = 0;
  static void unpack(const uint8_t *b, int n, const void *, int16_t *w, float *d, float *) {
    for (int i = 0; i < n; i += 32, b += BYTES) *d++ = half_at(b), put_looked_up(b + 2, w + i, 16, IQ4_VALUES, 1);
  }
};

struct IQ4_XS {
  static constexpr int BLOCK = 256, BYTES = 136, GROUP = 128, MINS = 0;
  static void unpack(const uint8_t *b, int, const void *, int16_t *w, float *d, float *) {
    const unsigned high = unsigned(b[2]) | unsigned(b[3]) << 8;
    d[0] = d[1] = half_at(b);
    for (int i = 0; i < 8; i++) {
      const int scale = int((b[4 + i / 2] >> 4 * (i % 2) & 15) | (high >> 2 * i & 3) << 4) - 32;
      put_looked_up(b + 8 + 16 * i, w + 32 * i, 16, IQ4_VALUES, scale);
    }
  }
};

struct MXFP4 {
  static constexpr int BLOCK = 32, BYTES = 17, GROUP = 32, MINS = 0;
  static void unpack(const uint8_t *b, int n, const void *, int16_t *w, float *d, float *) {
    for (int i = 0; i < n; i += 32, b += BYTES) {
      const uint32_t code = b[0], scale = code < 2 ? 0x00200000u << code : (code - 1) << 23;  // half of 2^(code - 127)
      std::memcpy(d++, &scale, 4);
      put_looked_up(b + 1, w + i, 16, E2M1_VALUES, 1);
    }
  }
};

inline float half_ue4m3(uint8_t code) {  // half of the number, as values are doubled
  if (code == 0x7f) return 0.0f;
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  uint32_t scale;
  if (exponent == 0) return float(mantissa) * 0.0009765625f;
  scale = uint32_t(exponent - 8 + 127) << 23 | uint32_t(mantissa) << 20;
  float x;
  std::memcpy(&x, &scale, 4);
  return x;
}

struct NVFP4 {
  static constexpr int BLOCK = 64, BYTES = 36, GROUP = 16, MINS = 0;
  static void unpack(const uint8_t *b, int n, const void *, int16_t *w, float *d, float *) {
    for (int i = 0; i < n; i += 64, b += BYTES)
      for (int k = 0; k < 4; k++) {
        *d++ = half_ue4m3(b[k]);
        const uint8_t *q = b + 4 + 8 * k;
        for (int j = 0; j < 8; j++) {
          w[i + 16 * k + j] = E2M1_VALUES[q[j] & 15];
          w[i + 16 * k + 8 + j] = E2M1_VALUES[q[j] >> 4];
        }
      }
  }
};

// Eight weights of a sign code: bits 0 to 6, and the eighth makes their number even.
inline void put_signed(const uint8_t *points, unsigned code, int factor, int16_t *w, int first, int n) {
  code |= unsigned(__builtin_popcount(code) & 1) << 7;
  for (int k = 0; k < n; k++) w[k] = int16_t((code >> (first + k) & 1 ? -int(points[k]) : int(points[k])) * factor);
}

struct IQ2_XXS {  // table: [256][8] bytes
  static constexpr int BLOCK = 256, BYTES = 66, GROUP = 256, MINS = 0;
  static void unpack(const uint8_t *b, int, const void *table, int16_t *w, float *d, float *) {
    const uint8_t *points = static_cast<const uint8_t *>(table);
    *d = half_at(b) * 0.125f;
    for (int i = 0; i < 8; i++) {
      const uint8_t *q = b + 2 + 8 * i;
      uint32_t word;
      std::memcpy(&word, q + 4, 4);
      const int factor = 2 * int(word >> 28) + 1;
      for (int k = 0; k < 4; k++) put_signed(points + 8 * q[k], word >> 7 * k & 127, factor, w + 32 * i + 8 * k, 0, 8);
    }
  }
};

struct IQ3_XXS {  // table: [256][4] bytes
  static constexpr int BLOCK = 256, BYTES = 98, GROUP = 256, MINS = 0;
  static void unpack(const uint8_t *b, int, const void *table, int16_t *w, float *d, float *) {
    const uint8_t *points = static_cast<const uint8_t *>(table);
    *d = half_at(b) * 0.25f;
    for (int i = 0; i < 8; i++) {
      uint32_t word;
      std::memcpy(&word, b + 66 + 4 * i, 4);
      const int factor = 2 * int(word >> 28) + 1;
      for (int k = 0; k < 8; k++)
        put_signed(points + 4 * b[2 + 8 * i + k], word >> 7 * (k / 2) & 127, factor, w + 32 * i + 4 * k, 4 * (k % 2), 4);
    }
  }
};

}  // namespace pyspec
