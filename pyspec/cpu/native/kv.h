// Rows of keys and values in the types of a pool (slots/kv_codes.py): to f32, exact, and from f32, rounded once to nearest even.
#pragma once
#include "simd.h"

namespace pyspec {

enum KvKind : int64_t {
  KV_F32 = 0, KV_F16 = 1, KV_BF16 = 2, KV_Q8_0 = 3, KV_F8 = 4, KV_Q5_1 = 5, KV_Q5_0 = 6, KV_Q4_1 = 7, KV_Q4_0 = 8
};

struct Half { uint16_t bits; };
struct Bf16 { uint16_t bits; };

inline f8 fetch(const float *p) { return load(p); }
inline f8 fetch(const Half *p) { return halves(reinterpret_cast<const uint16_t *>(p)); }
inline f8 fetch(const Bf16 *p) { return bf16s(reinterpret_cast<const uint16_t *>(p)); }

inline int64_t kv_bytes(int64_t kind) { return kind == KV_F32 ? 4 : kind <= KV_BF16 ? 2 : 1; }  // of a whole code
constexpr bool is_packed(int64_t kind) { return kind >= KV_Q5_1; }
constexpr int packed_bits(int64_t kind) { return kind <= KV_Q5_0 ? 5 : 4; }
constexpr bool has_least(int64_t kind) { return kind == KV_Q5_1 || kind == KV_Q4_1; }
// Bytes of a head's codes, and its factors.
inline int64_t head_bytes(int64_t kind, int64_t dim) { return is_packed(kind) ? dim * packed_bits(kind) / 8 : dim * kv_bytes(kind); }
inline int64_t head_factors(int64_t kind, int64_t dim) { return dim / 32 * (has_least(kind) ? 2 : 1); }

inline i8 bytes(const uint8_t *p) {
#if defined(__AVX2__)
  return i8(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
#else
  typedef uint8_t b8 __attribute__((vector_size(8)));
  b8 x;
  std::memcpy(&x, p, 8);
  return __builtin_convertvector(x, i8);
#endif
}

inline i8 signed_bytes(const uint8_t *p) {
#if defined(__AVX2__)
  return i8(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
#else
  return (bytes(p) ^ 0x80) - 0x80;
#endif
}

// e4m3: 1.m 2^(e - 7), m 2^-9 where e is 0, NaN where all of e and m are ones.
inline f8 from_f8(const uint8_t *p) {
#if defined(__F16C__) && defined(__AVX2__)
  const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8);
  const __m128i size = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x7f)), 7);
  const f8 y = f8(_mm256_cvtph_ps(_mm_or_si128(sign, size))) * all(256.0f);  // f16 of another bias: all ones would be 480
  return as_float(bits(y) | ((bits(y) & 0x7fffffff) == 0x43f00000));
#else
  const i8 x = bytes(p);
  const i8 size = x & 0x7f;
  const f8 normal = as_float((size << 20) + (120 << 23)), small = to_float(size) * all(1.0f / 512);
  f8 y = size < 8 ? small : normal;
  y = size == 0x7f ? all(__builtin_nanf("")) : y;
  return as_float(bits(y) | ((x & 0x80) << 24));
#endif
}

inline uint8_t to_f8(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const uint8_t sign = uint8_t(u >> 24 & 0x80);
  u &= 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7f;
  if (u >= 0x43e00000) return sign | 0x7e;  // 448 and above
  if (u >= 0x3c800000) return sign | uint8_t((u - 0x3c000000 + 0x7ffff + (u >> 20 & 1)) >> 20);  // 2^-6 and above
  float size;
  std::memcpy(&size, &u, 4);
  size += 16384.0f;  // its last place is 2^-9
  std::memcpy(&u, &size, 4);
  return sign | uint8_t(u - 0x46800000);
}

inline uint16_t to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

inline uint16_t to_half(float x) {
#if defined(__F16C__)
  return uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  const __fp16 h = __fp16(x);  // to the nearest, ties to even
  uint16_t y;
  std::memcpy(&y, &h, 2);
  return y;
#else
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const uint16_t sign = uint16_t(u >> 16 & 0x8000);
  u &= 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7e00;
  if (u >= 0x477ff000) return sign | 0x7c00;  // 65520 and above
  if (u >= 0x38800000) return sign | uint16_t((u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13);  // 2^-14 and above
  float size;
  std::memcpy(&size, &u, 4);
  size += 0.5f;  // its last place is 2^-24
  std::memcpy(&u, &size, 4);
  return sign | uint16_t(u - 0x3f000000);
#endif
}

inline void to_halves(const float *x, uint16_t *out, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(out + i), _mm256_cvtps_ph(__m256(load(x + i)), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (; i < n; i++) out[i] = to_half(x[i]);
}

template <KvKind K>
inline f8 eight(const void *codes, const uint16_t *scale, int64_t d) {
  if constexpr (K == KV_F32) return load(static_cast<const float *>(codes) + d);
  if constexpr (K == KV_F16) return halves(static_cast<const uint16_t *>(codes) + d);
  if constexpr (K == KV_BF16) return bf16s(static_cast<const uint16_t *>(codes) + d);
  if constexpr (K == KV_F8) return from_f8(static_cast<const uint8_t *>(codes) + d);
  return to_float(signed_bytes(static_cast<const uint8_t *>(codes) + d)) * all(half_to_float(scale[d / 32]));
}

template <KvKind K>
inline void unpack_as(const void *codes, const uint16_t *scale, float *out, int64_t dim) {
  int64_t d = 0;
  for (; d + 8 <= dim; d += 8) store(out + d, eight<K>(codes, scale, d));
  if (d < dim) {  // q8_0 has no tail
    uint8_t rest[32] = {0};
    const int64_t size = kv_bytes(K);
    std::memcpy(rest, static_cast<const uint8_t *>(codes) + d * size, size_t((dim - d) * size));
    store(out + d, eight<K>(rest, scale, 0));
  }
}

// Lane i has bit group i of a word: `step` bits apart.
inline i8 spread(uint32_t word, int step) {
  const i8 shifts = i8{0, 1, 2, 3, 4, 5, 6, 7} * step;
#if defined(__AVX2__)
  return i8(_mm256_srlv_epi32(_mm256_set1_epi32(int(word)), __m256i(shifts)));
#else
  typedef uint32_t u8x __attribute__((vector_size(32)));
  const u8x all_ = {word, word, word, word, word, word, word, word};
  u8x by;
  std::memcpy(&by, &shifts, 32);
  const u8x y = all_ >> by;
  i8 out;
  std::memcpy(&out, &y, 32);
  return out;
#endif
}

// Codes of 4 and 5 bits, as slots/kv_codes.py packs them, to f32.
template <KvKind K>
inline void unpack_bits(const void *codes, const uint16_t *factors, float *out, int64_t dim) {
  const auto *low = static_cast<const uint8_t *>(codes), *high = low + dim / 2;
  for (int64_t b = 0; b < dim; b += 32) {
    const f8 step = all(half_to_float(*factors++)), least = has_least(K) ? all(half_to_float(*factors++)) : f8{};
    for (int64_t d = b; d < b + 32; d += 8) {
      uint32_t word;
      std::memcpy(&word, low + d / 2, 4);
      i8 code = spread(word, 4) & 15;
      if constexpr (packed_bits(K) == 5) code |= (spread(high[d / 8], 1) & 1) << 4;
      if constexpr (has_least(K)) store(out + d, fma(to_float(code), step, least));
      else store(out + d, to_float(code - (1 << (packed_bits(K) - 1))) * step);
    }
  }
}

// One head's row to f32, with zeros up to a multiple of eight columns. scale: factors, where the type has any.
inline void unpack_row(int64_t kind, const void *codes, const uint16_t *scale, float *out, int64_t dim) {
  switch (kind) {
    case KV_F32: return unpack_as<KV_F32>(codes, scale, out, dim);
    case KV_F16: return unpack_as<KV_F16>(codes, scale, out, dim);
    case KV_BF16: return unpack_as<KV_BF16>(codes, scale, out, dim);
    case KV_F8: return unpack_as<KV_F8>(codes, scale, out, dim);
    case KV_Q5_1: return unpack_bits<KV_Q5_1>(codes, scale, out, dim);
    case KV_Q5_0: return unpack_bits<KV_Q5_0>(codes, scale, out, dim);
    case KV_Q4_1: return unpack_bits<KV_Q4_1>(codes, scale, out, dim);
    case KV_Q4_0: return unpack_bits<KV_Q4_0>(codes, scale, out, dim);
    default: return unpack_as<KV_Q8_0>(codes, scale, out, dim);
  }
}

constexpr float MAX_PACKED = 64512.0f, LEAST_STEP = 0x1p-64f;

// trunc(x * inverse + add) with one rounding, within 0..most; NaN is 0.
inline uint8_t code_of(float x, float inverse, float add, float most) {
  const float y = __builtin_fmaf(x, inverse, add);
  return y > 0.0f ? uint8_t(y < most ? y : most) : 0;
}

// Types of 4 and 5 bits as slots/kv_codes.py: the codes are made with the scale in f32.
template <KvKind K>
inline void pack_bits(const float *from, void *codes, uint16_t *factors, int64_t dim) {
  constexpr int bits_ = packed_bits(K);
  constexpr float most = float((1 << bits_) - 1), middle = float(1 << (bits_ - 1));
  auto *low = static_cast<uint8_t *>(codes), *high = low + dim / 2;
  for (int64_t b = 0; b < dim; b += 32) {
    float x[32], top = 0.0f, bottom = 0.0f, extreme = 0.0f;
    bool is_none = false;
    for (int i = 0; i < 32; i++) {
      const float v = from[b + i];
      x[i] = v > MAX_PACKED ? MAX_PACKED : v < -MAX_PACKED ? -MAX_PACKED : v;
      is_none |= v != v;
      top = i == 0 || x[i] > top ? x[i] : top;
      bottom = i == 0 || x[i] < bottom ? x[i] : bottom;
      extreme = i == 0 || __builtin_fabsf(x[i]) > __builtin_fabsf(extreme) ? x[i] : extreme;
    }
    float step = has_least(K) ? (top - bottom) / most : extreme * (-1.0f / middle);
    if (is_none) step = bottom = __builtin_nanf("");
    const float inverse = __builtin_fabsf(step) >= LEAST_STEP ? 1.0f / step : 0.0f;
    const float off = has_least(K) ? bottom : 0.0f, add = has_least(K) ? 0.5f : middle + 0.5f;
    *factors++ = to_half(step);
    if (has_least(K)) *factors++ = to_half(bottom);
    uint8_t code[32];
    for (int i = 0; i < 32; i++) code[i] = code_of(x[i] - off, inverse, add, most);
    for (int i = 0; i < 16; i++) low[b / 2 + i] = uint8_t((code[2 * i] & 15) | code[2 * i + 1] << 4);
    for (int i = 0; bits_ == 5 && i < 4; i++) {
      uint8_t fifth = 0;
      for (int j = 0; j < 8; j++) fifth = uint8_t(fifth | (code[8 * i + j] >> 4) << j);
      high[b / 8 + i] = fifth;
    }
  }
}

// q8_0 as slots/kv_codes.py: the scale is rounded before the codes are made.
inline void pack_q8_0(const float *x, int8_t *codes, uint16_t *scale, int64_t dim) {
  for (int64_t b = 0; b < dim; b += 32) {
    float most = 0.0f;
    for (int i = 0; i < 32; i++) {
      const float size = __builtin_fabsf(x[b + i]);
      most = size > most || size != size ? size : most;  // NaN stays
      if (most != most) break;
    }
    const float wide = most * (1.0f / 127);
    const uint16_t half = to_half(wide > 515.5f ? 515.5f : wide);
    const float s = half_to_float(half), inverse = 1.0f / s;
    scale[b / 32] = half;
    for (int i = 0; i < 32; i++) {
      const float q = __builtin_rintf(x[b + i] * inverse);
      codes[b + i] = s > 0.0f ? int8_t(q < -127.0f ? -127.0f : q > 127.0f ? 127.0f : q) : int8_t(0);
    }
  }
}

inline void pack_row(int64_t kind, const float *x, void *codes, uint16_t *scale, int64_t dim) {
  auto *bytes1 = static_cast<uint8_t *>(codes);
  auto *words = static_cast<uint16_t *>(codes);
  switch (kind) {
    case KV_F32: std::memcpy(codes, x, size_t(dim) * 4); break;
    case KV_F16: to_halves(x, words, dim); break;
    case KV_BF16: for (int64_t d = 0; d < dim; d++) words[d] = to_bf16(x[d]); break;
    case KV_Q5_1: return pack_bits<KV_Q5_1>(x, codes, scale, dim);
    case KV_Q5_0: return pack_bits<KV_Q5_0>(x, codes, scale, dim);
    case KV_Q4_1: return pack_bits<KV_Q4_1>(x, codes, scale, dim);
    case KV_Q4_0: return pack_bits<KV_Q4_0>(x, codes, scale, dim);
    case KV_F8: for (int64_t d = 0; d < dim; d++) bytes1[d] = to_f8(x[d]); break;
    default: pack_q8_0(x, static_cast<int8_t *>(codes), scale, dim);
  }
}

}  // namespace pyspec
